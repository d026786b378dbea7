"""Who samples a log-polar map fastest, from a pyramid that is there, at a new fixation every call?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import peers
import torch
import torch.nn.functional as F
from inputs import NO_GL, PLAN, PLANNED, generators_of, inputs_for, job, opens, picture, planned
from rows import Row
from timer import Race, race

import gpu_lod as lod
from gpu_lod.log_polar import reference, ring_rule

RINGS, WEDGES = 256, 512
READY = "from a prebuilt pyramid, a texture already"


def _all_levels(pyramid: lod.Pyramid, fixation: torch.Tensor) -> torch.Tensor:
    """The way one writes it first: sample every level everywhere, blend by weight."""
    height, width = pyramid.size
    longer = max(height, width)
    fixation = fixation.to(pyramid.device)
    t = (torch.arange(RINGS, device=pyramid.device) + 0.5) / RINGS
    radius = 0.01 * 70**t
    footprint = torch.maximum(2 * math.pi * radius / WEDGES, radius * math.log(70) / RINGS)
    level = (longer * footprint).log2().clamp(0, len(pyramid) - 1)[:, None]
    theta = 2 * math.pi * (torch.arange(WEDGES, device=pyramid.device) + 0.5) / WEDGES
    ring = radius[:, None, None] * torch.stack([theta.cos(), theta.sin()], -1)
    aspect = torch.tensor([longer / width, longer / height], device=pyramid.device)
    grid = 2 * (fixation[:, None, None] + ring * aspect) - 1
    total = torch.zeros((), device=pyramid.device)
    for index, image in enumerate(pyramid):
        weight = (1 - (level - index).abs()).clamp(min=0)
        if weight.any():
            total = total + weight * F.grid_sample(image.float(), grid, padding_mode="border", align_corners=False)
    return total


def _two_levels(pyramid: lod.Pyramid, fixation: torch.Tensor) -> torch.Tensor:
    """Each ring samples only the two levels it needs, in one grid_sample a level."""
    rule = ring_rule(RINGS, WEDGES, None, 0.7, "log", 0.05)
    return reference(list(pyramid.levels), fixation, rule, parts=1)


def rows(
    sizes: list[tuple[int, int, int]], dtypes: list[torch.dtype], caches: list[str], seconds: float
) -> Iterator[Row]:
    """256 x 512 of pyramids of RGB images."""
    for height, width, batch in sizes:
        for dtype in dtypes:
            for cache in caches:
                image = picture(height, width, batch=batch, dtype=dtype)
                pyramids = inputs_for(image, cache, lambda x: lod.mipmap(x, backend="gl").upload())
                fixations = cycle(torch.rand(64, batch, 2).unbind())

                def at(sample: Callable[..., object], pyramid: lod.Pyramid, fixations: object = fixations) -> object:
                    return sample(pyramid, next(fixations))  # type: ignore[call-overload]

                ours = partial(lod.log_polar, rings=RINGS, wedges=WEDGES)
                sides: dict[str, Callable[[], object]] = {
                    "auto": job(partial(at, ours), pyramids),
                    **{
                        f"gl {name}": job(partial(at, partial(ours, generator=name)), pyramids)
                        for name in generators_of(lod.log_polar)
                    },
                    "torch two levels a ring, split over threads": job(
                        partial(at, partial(ours, backend="torch")), pyramids
                    ),
                    "torch two levels a ring": job(partial(at, _two_levels), pyramids),
                    "torch every level": job(partial(at, _all_levels), pyramids),
                }
                theirs, other = peers.log_polars(image, cache, RINGS, WEDGES)
                sides |= {name: job(partial(at, way), arrays) for name, (way, arrays) in theirs.items()}
                if cache == "warm":
                    points = partial(next, fixations)
                    sides |= planned(
                        lod.log_polar, pyramids[0], points(), RINGS, WEDGES, backend="gl", following=points
                    )
                    other = {**other, **PLANNED}
                out = batch * 3 * RINGS * WEDGES * dtype.itemsize
                yield Row(
                    "log_polar", "end to end", height, width, batch, 3, str(dtype)[6:], cache, 2 * out,
                    race(sides, seconds=seconds), other_job=other, note=READY,
                )  # fmt: skip


def whole_calls(seconds: float, device: str = "cpu", race: Race = race, side: int = 1024) -> Iterator[Row]:
    """From an image, the chain included; and the least that a call costs."""
    yield from from_an_image(seconds, device, race, side)
    yield from fixed_cost(seconds, device, race)


def from_an_image(seconds: float, device: str = "cpu", race: Race = race, side: int = 1024) -> Iterator[Row]:
    """The chain included."""
    image = picture(side, side).to(device)
    ours = partial(lod.log_polar, image, (0.4, 0.6), RINGS, WEDGES)
    point = torch.tensor([[0.4, 0.6]])
    sides: dict[str, Callable[[], object]] = {
        "auto": ours,
        "gl compute": partial(ours, backend="gl"),
        **planned(
            lambda at: lod.log_polar(lod.mipmap(image, backend="gl").upload(), at, RINGS, WEDGES, backend="gl"),
            point,
            following=lambda: point,
        ),
        "torch two levels a ring": partial(ours, backend="torch"),
    }
    yield Row(
        "log_polar", "end to end", side, side, 1, 3, "float32", "warm", image.nbytes,
        race(sides, seconds=seconds), other_job=PLANNED,
        note="from an image: builds the chain too",
    )  # fmt: skip


def fixed_cost(seconds: float, device: str = "cpu", race: Race = race) -> Iterator[Row]:
    """The least that a call costs, on OpenGL where that opens, and by kernels."""
    point = torch.tensor([[0.4, 0.6]])
    if gl := opens(device):
        small = lod.mipmap(picture(64, 64).to(device), backend="gl").upload()
        tiny = partial(lod.log_polar, small, (0.4, 0.6), 4, 8)
        out = tiny(generator="compute")
        yield Row(
            "bridge", "fixed cost", 64, 64, 1, 3, "float32", "warm", 4 * 3 * 4 * 8,
            race(
                {
                    "gl compute": partial(tiny, generator="compute"),
                    **planned(lod.log_polar, small, point, 4, 8, backend="gl", following=lambda: point),
                },
                seconds=seconds, most=400,
            ), other_job=PLANNED,
            note="a log-polar map of 4 x 8: everything but the work",
            extra={"copied_out_bytes": 0 if lod.Context(device).owns(out) else out.nbytes},
        )  # fmt: skip
    if torch.device(device).type == "cuda":
        small, point = lod.mipmap(picture(64, 64).to(device), backend="cuda").upload(backend="cuda"), point.to(device)
        graph = lod.plan(lod.log_polar, small, point, 4, 8, backend="cuda")
        yield Row(
            "bridge", "fixed cost", 64, 64, 1, 3, "float32", "warm", 4 * 3 * 4 * 8,
            race(
                {
                    "cuda kernels": partial(lod.log_polar, small, point, 4, 8, backend="cuda"),
                    "cuda plan": partial(graph, point),
                },
                seconds=seconds, most=400,
            ), other_job={"cuda plan": "its result lasts until the next call"},
            note="a log-polar map of 4 x 8 by kernels: everything but the work",
            extra={"copied_out_bytes": 0, **({} if gl else {"dropped": {"gl compute": NO_GL, PLAN: NO_GL}})},
        )  # fmt: skip
