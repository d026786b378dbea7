"""What foveated pixels give the levels that they were made of: the adjoint of trilinear foveation, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.adjoints import Adjoint, wide
from gpu_lod.dispatch import pull
from gpu_lod.enlarging import enlarged_adjoint
from gpu_lod.foveate_tiles import Tile
from gpu_lod.pyramid import level_sizes


def adjoint_of(
    made: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor],
    image: torch.Tensor,
    levels: int,
    fixation: torch.Tensor,
    e0: float,
    bias: float,
) -> Adjoint:
    """The adjoint of samples with anisotropy 1, which keeps no value but the fixations' as they are now.

    Args:
        made: the pixels of levels and fixations, by a graph of torch's own: the way of gradients in a batch.
        image: of the shape, dtype and device of level 0, [B, C, H, W] or [C, H, W].
        levels: of its mean chain.
        fixation: [B, 2].
    """
    shape, dtype, device = image.shape, image.dtype, image.device
    sizes = level_sizes(shape[-2], shape[-1], levels)
    kept = fixation.detach().clone()

    def points() -> torch.Tensor:
        return kept.to(device, dtype if dtype == torch.float64 else torch.float32)

    def by_graph(gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            kind: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
            zeros = [torch.zeros(*shape[:-2], *size, **kind) for size in sizes]
            return pull([made(zeros, points())], zeros, [gradient], again=again)

    def adjoint(gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        # torch's own interpolation knows what is deterministic on a GPU.
        if checks.transformed(gradient) or (device.type != "cpu" and torch.are_deterministic_algorithms_enabled()):
            return by_graph(gradient)
        pixels = wide(gradient if len(shape) == 4 else gradient[None])
        assert pixels is not None
        rows, columns = (slice(0, n) for n in sizes[0])
        at, found = points(), []
        for part, point, place in zip(pixels.split(1), at, at.tolist(), strict=True):
            tile = Tile(sizes[0], rows, columns, point, place, e0, bias, len(sizes) - 1, True)
            found.append(_of_image(part, tile, sizes))
        joined = [_joined(parts) for parts in zip(*found, strict=True)]
        return [None if x is None else x.to(dtype).view(*shape[:-2], *x.shape[-2:]) for x in joined]

    return adjoint


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The gradient in a level from those in its images."""
    like = next((part for part in parts if part is not None), None)
    if like is None or len(parts) == 1:
        return like
    return torch.cat([torch.zeros_like(like) if part is None else part for part in parts])


def _of_image(gradient: torch.Tensor, tile: Tile, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor | None]:
    """The gradients in the levels of an image from that in its pixels [1, C, H, W]; None in those that none reads."""
    found: list[torch.Tensor | None] = [None] * len(sizes)
    finest, coarsest = tile.reads()
    level = tile.level_map()
    rest = gradient.clone()  # what finer levels leave
    for index in range(finest, coarsest):
        y0, y1, x0, x1 = box = tile.within(index)
        if y0 < y1 and x0 < x1:
            share = (level[y0:y1, x0:x1] - index).clamp_(0, 1)
            part = rest[..., y0:y1, x0:x1]
            found[index] = _reduced(torch.addcmul(part, part, share, value=-1), index, box, sizes)
            part.mul_(share)
    found[coarsest] = _reduced(rest, coarsest, (0, sizes[0][0], 0, sizes[0][1]), sizes)
    return found


def _reduced(
    pixels: torch.Tensor, index: int, box: tuple[int, int, int, int], sizes: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """What rows y0..y1 and columns x0..x1 at full size give a level that was brought there."""
    size = sizes[0]
    if index and all(n % (1 << index) == 0 for n in size):
        return enlarged_adjoint(pixels, 1 << index, box, sizes[index])
    y0, y1, x0, x1 = box
    whole = F.pad(pixels, (x0, size[1] - x1, y0, size[0] - y1))
    if index == 0:
        return whole
    shape = [*pixels.shape[:-2], *sizes[index]]
    found: torch.Tensor = torch.ops.aten.upsample_bilinear2d_backward(whole, list(size), shape, False)
    return found
