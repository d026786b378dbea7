"""Planes and rows that do not depend on each other, some of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from gpu_lod import checks
from gpu_lod.dispatch import needs_grad

PART = 2**20
"""Texels that a CPU works on at once: what torch makes of them on the way is small, and its memory used again. Of all
planes at once it would be several images of fresh memory, which costs more than the work."""


def planewise(make: Callable[..., list[torch.Tensor]], *sources: torch.Tensor) -> list[torch.Tensor]:
    """`make(*sources)`, for tensors [..., h, w] of the same outer sides to such tensors [..., more, h, w].

    All at once on a GPU, where a graph is kept, and inside torch.func.
    """
    top = sources[0]
    *outer, height, width = top.shape
    planes, at_once = top.numel() // (height * width), max(PART // (height * width), 1)
    free = not (needs_grad(*sources) or any(map(checks.transformed, sources)))
    if planes <= at_once or not checks.on_host(top) or not free:
        return make(*sources)
    result: list[torch.Tensor] = []
    for first, parts in enumerate(zip(*(s.flatten(0, -3).split(at_once) for s in sources), strict=True)):
        made = make(*parts)
        result = result or [part.new_empty(planes, *part.shape[1:]) for part in made]
        for whole, part in zip(result, made, strict=True):
            whole[first * at_once :][: len(part)] = part
    return [whole.unflatten(0, outer) for whole in result]


def bands(count: int, height: int, width: int, texels: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Cut planes or images into (some of them, rows): as many as have so many texels, or rows of one.

    Args:
        texels: None is a quarter of `PART`, for work that makes several tensors of each texel.
    """
    texels = texels or PART // 4
    together, rows = max(texels // (height * width), 1), min(max(texels // width, 1), height)
    for first in range(0, count, together):
        for row in range(0, height, rows):
            yield slice(first, first + together), slice(row, min(row + rows, height))


def joined(parts: Iterable[tuple[torch.Tensor, ...]], count: int) -> tuple[torch.Tensor, ...]:
    """The tensors of all parts, which are at least one, joined along dimension 0, of `count` rows in all.

    Each part is copied to its place as soon as it comes, so that no two need memory at once.
    """
    coming = iter(parts)
    part: tuple[torch.Tensor, ...] | None = next(coming)
    assert part is not None
    if torch.compiler.is_compiling() or needs_grad(*part) or any(map(checks.transformed, part)):
        return tuple(map(torch.cat, zip(part, *coming, strict=True)))
    result = tuple(value.new_empty((count, *value.shape[1:])) for value in part)
    at = 0
    while part is not None:
        for whole, value in zip(result, part, strict=True):
            whole[at : at + len(value)] = value
        at += len(part[0])
        del value
        part = ()  # before the next is made
        part = next(coming, None)
    return result
