"""The saliency of pictures on the grid of their patches: channel 5 of `feature_maps`, pooled as it is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.dispatch import needs_grad
from gpu_lod.feature_maps import AT_ONCE, LEVELS, LUMA, PAIRS, difference, saliency_map
from gpu_lod.gaussian import BINOMIAL, mirrored
from gpu_lod.gaussian import reference as gaussian_chain
from gpu_lod.patch_grid import Pool, along, pooled
from gpu_lod.pyramid import burt_sizes

_BAND = 2**18
"""Pixels that a CPU works on at a time: what is made of so many stays in its cache, and the memory is used again."""
_LEAST = 8
"""Pixels of a side below which a picture is no matter of bands."""


def saliency_cells(images: torch.Tensor, patch: int, pool: Pool = "mean") -> torch.Tensor:
    """[B, ceil(H / P), ceil(W / P)] of images [B, C, H, W], fp32, in plain torch; differentiable.

    On a CPU in bands of some rows of patches, but for small pictures and where a graph is kept: what is made on the way
    stays small, and its memory is used again.
    """
    count, _, height, width = images.shape
    small = min(height, width) < _LEAST or len(burt_sizes(height, width)) < LEVELS
    graph = needs_grad(images) or checks.transformed(images)
    if images.device.type != "cpu" or images.dtype == torch.float64 or small or graph:
        return pooled(saliency_map(images)[:, None].float(), patch, pool)[:, 0]
    together = max(1, AT_ONCE // (height * width))
    found = [_cells(images[first : first + together], patch, pool) for first in range(0, count, together)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _cells(images: torch.Tensor, patch: int, pool: Pool) -> torch.Tensor:
    count, _, height, width = images.shape
    first = _level_one(images)
    levels = [first, *gaussian_chain(first, LEVELS - 1)]  # nothing asks for level 0
    # The last row twice: rows of pixels lie between two.
    samples = [F.pad(difference(levels, *pair), (0, 1, 0, 1), mode="replicate") for pair in PAIRS]
    del first, levels
    side = min(patch, height)
    cells = height // side
    at_once = max(_BAND // (count * width * side), 1)
    bands = [(i * side, min(i + at_once, cells) * side) for i in range(0, cells, at_once)]
    if height % side:
        bands.append((height - side, height))  # the last patches are flush with the edge
    most = max(end - begin for begin, end in bands)
    memory = [samples[0].new_empty(count, 1, most + (2 << centre), width) for centre, _ in PAIRS]
    rows = [along(_band(samples, memory, *band), -2, patch, pool) for band in bands]
    return along(torch.cat(rows, dim=-2), -1, patch, pool)[:, 0].div_(len(PAIRS))


def _band(samples: Sequence[torch.Tensor], memory: Sequence[torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Rows begin..end - 1 of the saliency, times three, in the first of some memory that is there."""
    parts = []
    for (centre, _), few, room in zip(PAIRS, samples, memory, strict=True):
        factor = 1 << centre
        low, high = begin // factor, (end - 1) // factor + 1
        tall = room[..., : (high - low) * factor, :]
        wide = _widened(few[..., low : high + 1, :], factor)[..., : room.shape[-1]]
        shares = torch.arange(factor, dtype=wide.dtype)[:, None] / factor
        torch.lerp(
            wide[..., :-1, None, :], wide[..., 1:, None, :], shares, out=tall.unflatten(-2, (high - low, factor))
        )
        parts.append(tall[..., begin - low * factor : end - low * factor, :].abs_())
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


def _widened(samples: torch.Tensor, factor: int) -> torch.Tensor:
    """Samples [B, 1, h, w + 1], so many pixels apart, read at every pixel between them: [B, 1, h, w factor]."""
    left, right = samples[..., :-1], samples[..., 1:]
    wide, step = left.new_empty(*left.shape, factor), right - left
    for column in range(factor):
        torch.add(left, step, alpha=column / factor, out=wide[..., column])
    return wide.flatten(-2)


def _level_one(images: torch.Tensor) -> torch.Tensor:
    """Level 1 of the Gaussian pyramid of the luma, [B, 1, ceil(H / 2), ceil(W / 2)], without the luma."""
    count, channels, height, width = images.shape
    tall, wide = -(-height // 2), -(-width // 2)
    result = images.new_empty(count, 1, tall, wide, dtype=torch.float32)
    at_once = max(_BAND // (count * width) // 2, 1)
    luma = result.new_empty(count, 1, 2 * at_once + 3, width)
    side, near, middle = BINOMIAL[:3]
    unit = 255 if images.dtype == torch.uint8 else 1
    weights = LUMA if channels > 2 else (1.0,)
    for row in range(0, tall, at_once):
        rows = min(at_once, tall - row)
        # The luma of the rows that these rest on, mirrored about the outermost ones.
        begin, end = 2 * row - 2, 2 * (row + rows) + 1
        there = slice(max(begin, 0), min(end, height))
        inner = luma[..., there.start - begin : there.stop - begin, :]
        for channel, weight in enumerate(weights):
            colour = images[:, channel : channel + 1, there].float()
            if channel == 0:
                torch.mul(colour, weight / unit, out=inner)
            else:
                inner.add_(colour, alpha=weight / unit)
        for outside in (*range(begin, 0), *range(height, end)):
            inside = -outside if outside < 0 else 2 * height - 2 - outside
            luma[..., outside - begin, :] = luma[..., inside - begin, :]

        def tap(k: int, rows: int = rows) -> torch.Tensor:
            return luma[..., k : k + 2 * rows - 1 : 2, :]

        made = (tap(2) * middle).add_(tap(1) + tap(3), alpha=near).add_(tap(0) + tap(4), alpha=side)
        made = mirrored(made, 0, 2)
        part = result[..., row : row + rows, :]
        even, odd = made[..., ::2], made[..., 1::2]
        torch.mul(even[..., 1 : wide + 1], middle, out=part)
        part.add_(odd[..., :wide] + odd[..., 1 : wide + 1], alpha=near)
        part.add_(even[..., :wide] + even[..., 2 : wide + 2], alpha=side)
    return result
