"""Who builds a mean mip chain fastest?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import peers
import torch
import torch.nn.functional as F
from inputs import generators_of, inputs_for, job, picture, pyramid_bytes
from rows import Row
from timer import able, race

import gpu_lod as lod

Size = tuple[int, int, int]
"""(height, width, batch)"""
Step = Callable[[torch.Tensor, int, int], torch.Tensor]
HELD_NOTE = "the image is in GL memory already"


def _chain(step: Step, image: torch.Tensor) -> list[torch.Tensor]:
    levels = [image]
    while max(levels[-1].shape[-2:]) > 1:
        h, w = levels[-1].shape[-2:]
        levels.append(step(levels[-1], max(1, h // 2), max(1, w // 2)))
    return levels


def _stored_chain(step: Step, image: torch.Tensor) -> list[torch.Tensor]:
    """Carried in fp32 and stored in the image's dtype, as the verb does it."""
    if image.dtype == torch.float32:
        return _chain(step, image)
    levels = _chain(step, image.float())[1:]
    return [image, *((x.round() if image.dtype == torch.uint8 else x).to(image.dtype) for x in levels)]


def _avg_pool(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.avg_pool2d(x, (2 if x.shape[-2] > 1 else 1, 2 if x.shape[-1] > 1 else 1))


def _reshape_mean(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], h, x.shape[-2] // h, w, x.shape[-1] // w).mean(dim=(3, 5))


def _interpolate(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.interpolate(x, size=(h, w), mode="bilinear", align_corners=False)


def _antialias(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.interpolate(x, size=(h, w), mode="bilinear", align_corners=False, antialias=True)


def _area(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.interpolate(x, size=(h, w), mode="area")


POLYPHASE = "not the polyphase box filter at odd sides: levels do not keep the image's mean"
TRIANGLE = "a triangle filter over 4 texels (1 3 3 1) / 8, twice as wide as the mean's box"
LAST = {"bilinear": _interpolate, "area": _area, "avg_pool2d": _avg_pool, "reshape mean": _reshape_mean}
"""The ways that are also measured on channels_last input."""


def is_power(*sides: int) -> bool:
    return all(side & (side - 1) == 0 for side in sides)


def torch_ways(height: int, width: int) -> tuple[dict[str, Callable[[torch.Tensor], object]], dict[str, str]]:
    """Ways to make the chain of an image of this size in plain torch, and which of them do another job, and why."""
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "torch interpolate bilinear": partial(_stored_chain, _interpolate),
        "torch interpolate area": partial(_stored_chain, _area),
        "torch avg_pool2d": partial(_stored_chain, _avg_pool),
    }
    filtered = {"torch interpolate bilinear antialias": partial(_stored_chain, _antialias)}
    other = dict.fromkeys(filtered, TRIANGLE)
    own = partial(lod.mipmap, backend="torch")
    if is_power(height, width):
        return ways | {"torch reshape mean": partial(_stored_chain, _reshape_mean), "torch sums": own} | filtered, other
    # Nobody else has the exact filter for odd sides.
    other |= dict.fromkeys(ways, POLYPHASE)
    return ways | {"torch polyphase": own} | filtered, other


def channels_last(height: int, width: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """The same on fp32 tensors in channels_last order, where they do the verb's job."""
    if not is_power(height, width):
        return {}
    return {f"torch channels_last {name}": partial(_chain, step) for name, step in LAST.items()}


def driver_differs(height: int, width: int, dtype: torch.dtype) -> dict[str, str]:
    """Why glGenerateMipmap does another job, if it does."""
    if not is_power(height, width):
        return {"gl driver": "OpenGL leaves its filter at odd sides open"}
    return {"gl driver": peers.ROUNDS} if dtype == torch.uint8 else {}


def rows(sizes: list[Size], dtypes: list[torch.dtype], caches: list[str], seconds: float) -> Iterator[Row]:
    """A row for each (height, width, batch), dtype and cache state."""
    for height, width, batch in sizes:
        for dtype in dtypes:
            for cache in caches:
                image = picture(height, width, batch=batch, dtype=dtype)
                ways, other = torch_ways(height, width)
                inputs = inputs_for(image, cache, lambda x: x)
                ours, dropped = able(
                    {
                        f"gl {name}": job(partial(lod.mipmap, generator=name), inputs)
                        for name in generators_of(lod.mipmap)
                    }
                )
                sides: dict[str, Callable[[], object]] = {
                    "auto": job(lod.mipmap, inputs),
                    **ours,
                    **{name: job(way, inputs) for name, way in ways.items()},
                }
                if dtype == torch.float32:
                    last = inputs_for(image, cache, lambda x: x.to(memory_format=torch.channels_last))
                    sides |= {name: job(way, last) for name, way in channels_last(height, width).items()}
                theirs, differ, left_out = peers.chains(image, cache, dtype)
                other |= differ | driver_differs(height, width, dtype)
                dropped |= left_out
                yield Row(
                    "mipmap", "end to end", height, width, batch, 3, str(dtype)[6:], cache, pyramid_bytes(image),
                    race(sides | theirs, seconds=seconds), other_job=other,
                    extra={"dropped": dropped} if dropped else {},
                )  # fmt: skip


def zero_copy(sizes: list[Size], seconds: float) -> Iterator[Row]:
    """Every generator, with the image in GL memory; torch reads that memory too."""
    for height, width, batch in sizes:
        held = lod.Context().empty(batch, 3, height, width)
        held.copy_(picture(height, width, batch=batch))
        ours, dropped = able(
            {f"gl {name}": partial(lod.mipmap, held, generator=name) for name in generators_of(lod.mipmap)}
        )
        ways, other = torch_ways(height, width)
        fast = {name: partial(way, held) for name, way in ways.items() if name in _FAST}
        yield Row(
            "mipmap", "zero-copy in", height, width, batch, 3, "float32", "warm", pyramid_bytes(held),
            race({"auto": partial(lod.mipmap, held), **ours, **fast}, seconds=seconds), note=HELD_NOTE,
            other_job=other | driver_differs(height, width, torch.float32),
            extra={"dropped": dropped} if dropped else {},
        )  # fmt: skip


_FAST = ("torch interpolate bilinear", "torch avg_pool2d", "torch polyphase", "torch sums")
