"""What foveated pixels give the levels that they were made of: the adjoint of trilinear foveation, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gpu_lod import checks, dispatch
from gpu_lod.adjoints import Adjoint, wide
from gpu_lod.dispatch import pull
from gpu_lod.enlarging import enlarged_adjoint
from gpu_lod.foveate_tiles import Tile
from gpu_lod.pyramid import level_sizes

SMALL = 2**16
"""Values of a picture below which torch's own interpolation takes less than the several operations here."""


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
    large = pixels.shape[1] * size[0] * size[1] >= SMALL
    plain = pixels.device.type == "cpu" and not (dispatch.needs_grad(pixels) or checks.transformed(pixels))
    if index and large and plain:
        return _by_sides(pixels, size, box, sizes[index])
    whole = F.pad(pixels, (x0, size[1] - x1, y0, size[0] - y1))
    if index == 0:
        return whole
    shape = [*pixels.shape[:-2], *sizes[index]]
    found: torch.Tensor = torch.ops.aten.upsample_bilinear2d_backward(whole, list(size), shape, False)
    return found


def _by_sides(
    pixels: torch.Tensor, size: tuple[int, int], box: tuple[int, int, int, int], samples: tuple[int, int]
) -> torch.Tensor:
    """What pixels [B, C, y1 - y0, x1 - x0] of a box give the level [B, C, *samples] that is brought to full size by any
    factor: rows along one side, then, as rows of the transpose, along the other."""
    taps = [
        _taps(n, whole, *ends, pixels.dtype) for n, whole, ends in zip(samples, size, (box[:2], box[2:]), strict=True)
    ]
    spans = [slice(int(before[0]), int(after[-1]) + 1) for before, after, _ in taps]
    for (before, after, share), span in zip(taps, spans, strict=True):
        found = pixels.new_zeros(*pixels.shape[:-2], span.stop - span.start, pixels.shape[-1])
        part = pixels * share[:, None]
        found.index_add_(-2, after - span.start, part)
        found.index_add_(-2, before - span.start, torch.sub(pixels, part, out=part))
        pixels = found.mT.contiguous()
    result = pixels.new_zeros(*pixels.shape[:-2], *samples)
    result[..., spans[0], spans[1]] = pixels
    return result


def _taps(
    count: int, n: int, first: int, end: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two texels of a side that pixels first..end of n lie between, and the share of the second."""
    at = (torch.arange(first, end, dtype=torch.float64, device="cpu") + 0.5).mul_(count / n).sub_(0.5).clamp_(min=0)
    before = at.long().clamp_(max=count - 1)
    return before, (before + 1).clamp_(max=count - 1), (at - before).to(dtype)
