"""Oriented energy and feature maps, beside the best of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from inputs import inputs_for, job, picture
from rows import Row
from timer import Race, race

import gpu_lod as lod
from gpu_lod.binomial import reduce
from gpu_lod.quadrature import basis, steering

LEVELS = 5
_FILTERS = torch.cat(
    [
        torch.einsum("ob,byx->oyx", torch.tensor(part, dtype=torch.float64), filters)
        for part, filters in zip(steering(4), (basis()[:3], basis()[3:]), strict=True)
    ]
).float()[:, None]


def _dense(x: torch.Tensor) -> list[torch.Tensor]:
    """One convolution of 9 x 9 an angle, G2's and H2's; sides from 5 up."""
    result = []
    for level in range(LEVELS):
        x = reduce(x) if level else x
        padded = F.pad(x.flatten(0, 1)[:, None], (4, 4, 4, 4), mode="reflect")
        even, odd = F.conv2d(padded, _FILTERS.to(x.device)).split(4, dim=1)
        result.append((even * even + odd * odd).unflatten(0, x.shape[:2]))
    return result


def energies(
    sizes: list[tuple[int, int, int]], seconds: float, device: str = "cpu", race: Race = race
) -> Iterator[Row]:
    """Four orientations on five levels of fp32 grey, and of RGB, which are three planes to a shader."""
    for (height, width, batch), channels in product(sizes, (1, 3)):
        if channels > 1 and batch * height * width > 2**20:  # 2 GiB at 2048
            continue
        image = picture(height, width, batch=batch, channels=channels).to(device)
        inputs = inputs_for(image, "warm", lambda x: x)
        sides: dict[str, Callable[[], object]] = {
            "auto": job(partial(lod.oriented_energy, levels=LEVELS), inputs),
            "gl compute": job(partial(lod.oriented_energy, levels=LEVELS, backend="gl"), inputs),
            "torch rows as channels": job(partial(lod.oriented_energy, levels=LEVELS, backend="torch"), inputs),
        }
        if min(height, width) >> (LEVELS - 1) > 4:  # torch mirrors no farther than a side
            sides["torch conv2d"] = job(_dense, inputs)
        yield Row(
            "oriented_energy", "end to end", height, width, batch, channels, "float32", "warm", image.nbytes * 19 // 3,
            race(sides, seconds=seconds), note="5 levels, 4 orientations",
        )  # fmt: skip


def maps(sizes: list[tuple[int, int, int]], seconds: float, device: str = "cpu", race: Race = race) -> Iterator[Row]:
    """Forty channels of fp32 RGB, as fp32 and as fp16."""
    for height, width, batch in sizes:
        image = picture(height, width, batch=batch).to(device)
        inputs = inputs_for(image, "warm", lambda x: x)
        for dtype in (torch.float32, torch.float16):
            sides: dict[str, Callable[[], object]] = {
                name: job(partial(lod.feature_maps, dtype=dtype, backend=backend), inputs)
                for name, backend in (("auto", "auto"), ("gl compute", "gl"), ("torch strided sums", "torch"))
            }
            moved = image.nbytes + 40 * batch * height * width * dtype.itemsize
            yield Row(
                "feature_maps", "end to end", height, width, batch, 3, "float32", "warm", moved,
                race(sides, seconds=seconds), note=f"40 channels of {str(dtype)[6:]}",
            )  # fmt: skip


def rows(sizes: list[tuple[int, int, int]], seconds: float, device: str = "cpu", race: Race = race) -> Iterator[Row]:
    yield from energies(sizes, seconds, device, race)
    yield from maps(sizes, seconds, device, race)
