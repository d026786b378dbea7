"""What foveated pixels give the levels that they were made of: the adjoint of foveation, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpu_lod.adjoints import wide
from gpu_lod.bilinear import Sums
from gpu_lod.enlarging import enlarged_adjoint
from gpu_lod.foveate_tiles import Tile, probes_of, sharper
from gpu_lod.planewise import PART
from gpu_lod.pyramid import level_sizes

SMALL = 3 * 2**15
"""Values of a picture below which torch's own interpolation takes less than the several operations here."""


def of_foveation(
    gradient: torch.Tensor,
    size: tuple[int, int],
    levels: int,
    fixation: torch.Tensor,
    e0: float,
    bias: float,
    anisotropy: float,
) -> list[torch.Tensor | None]:
    """The gradients in the levels of a mean chain from that in a foveated image.

    Args:
        gradient: [B, C, H, W], no graph kept.
        size: (height, width) of the image.
        fixation: [B, 2].
    """
    pixels, sizes = wide(gradient), level_sizes(*size, levels)
    assert pixels is not None
    rows, columns = (slice(0, n) for n in size)
    at, found = fixation.to(pixels.device, pixels.dtype), []
    for part, point, place in zip(pixels.split(1), at, at.tolist(), strict=True):
        tile = Tile(size, rows, columns, point, place, e0, bias, levels - 1, True)
        found.append(_of_probes(part, tile, sizes, anisotropy) if anisotropy > 1 else _of_image(part, tile, sizes))
    return [_joined(parts) for parts in zip(*found, strict=True)]


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


def _of_probes(
    gradient: torch.Tensor, whole: Tile, sizes: Sequence[tuple[int, int]], anisotropy: float
) -> list[torch.Tensor | None]:
    """The same of pixels that are the means of probes. On a CPU as many probes at once as there are threads, which
    share the images of a batch."""
    plain = gradient.device.type == "cpu"
    at_once = torch.get_num_threads() if plain else 1
    sums = Sums(gradient.shape[:2] + sizes[0], len(sizes))
    for tile in whole.cut(PART // 4) if plain else [whole]:
        level = tile.level_map()
        centre, radius, shifts = probes_of(tile, level, anisotropy)
        centre, radius = centre.flatten(0, 1), radius.flatten(0, 1)
        values = gradient[0, :, tile.rows, tile.columns].flatten(1)
        finest, coarsest = sharper(tile, anisotropy).reads()
        level = level.flatten().sub_(math.log2(len(shifts))).clamp_(finest, coarsest)
        for index in range(finest, coarsest + 1):
            weight = (level - index).abs_().neg_().add_(1)
            which = (weight > 0).nonzero()[:, 0]  # a ring, mostly
            if not len(which):
                continue
            part = values.index_select(1, which).mul_(weight.index_select(0, which).div_(len(shifts)))
            there, out = centre.index_select(0, which), radius.index_select(0, which)
            reach = out.abs().amax(0).mul_(0.5)
            box = sums.within(index, torch.stack([there.amin(0) - reach, there.amax(0) + reach]))
            if box is not None:
                there, out = torch.addcmul(box.shift, there, box.scale), out * box.scale
            for some in shifts.split(at_once):
                grid = (there + out * some[:, None, None])[:, None]
                sums.add(index, part[:, None].expand(len(some), -1, -1, -1), grid, box)
    return sums.found


def _reduced(
    pixels: torch.Tensor, index: int, box: tuple[int, int, int, int], sizes: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """What rows y0..y1 and columns x0..x1 at full size give a level that was brought there."""
    size = sizes[0]
    y0, y1, x0, x1 = box
    large = pixels.device.type != "cpu" or pixels.shape[1] * size[0] * size[1] >= SMALL
    if index and large:
        if all(n % (1 << index) == 0 for n in size):
            return enlarged_adjoint(pixels, 1 << index, box, sizes[index])
        if pixels.device.type == "cpu":
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
