"""The saliency of pictures on the grid of their patches: channel 5 of `feature_maps`, pooled as it is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_lod import by_kernel, checks, precision
from gpu_lod.between_samples import ROWS, SAMPLES, spread
from gpu_lod.binomial import BINOMIAL, reduce
from gpu_lod.dispatch import needs_grad
from gpu_lod.errors import InputError
from gpu_lod.feature_channels import LEVELS, LUMA, PAIRS, luma_weights, saliency_map
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels import saliency
from gpu_lod.kernels.sources import ELEMENTS
from gpu_lod.patch_grid import Pool, along, pooled
from gpu_lod.pyramid import burt_sizes

_AT_ONCE = 2**22
"""Pixels of pictures that a CPU works on together. A picture at a time pays for its many small operations, 10 to 20%
more; pictures of four times as many pay for fresh memory, as much."""
_BAND = 2**19
"""Pixels whose luma a CPU makes at a time: what is made of so many stays in its cache, and the memory is used again."""
_POOLED = 2**18
"""Pixels of the saliency, of which all pairs of levels are there at once."""
_LEAST = 8
"""Pixels of a side below which a picture is no matter of bands."""
_WHOLE = 16
"""Columns that are summed together. A CPU sums what is left of its vectors in another order, and what that is depends
on how many images there are: sites must not."""
_COARSEST = 1 << max(centre for centre, _ in PAIRS) >> 1
"""Every other pixels that the samples of the coarsest centres are apart."""


@precision.in_full
def saliency_cells(images: torch.Tensor, patch: int, pool: Pool = "mean") -> torch.Tensor:
    """[B, ceil(H / P), ceil(W / P)] of images [B, C, H, W], fp32; differentiable.

    By kernels where they run, else in plain torch: on a CPU in bands of some rows of patches, but for small pictures:
    what is made on the way stays small, and its memory is used again. Where a graph is kept, it is that of the map, and
    the values are those that there are without: sites must not depend on who asks for gradients.
    What lies between samples is read at every other pixel by products with small matrices of weights, in less time than
    by sums of strided views, and at the others as means of these. Products multiply by 0 too, so what is not finite
    spreads further there. A pass over all pixels costs more than what it computes, so absolute values are made with the
    differences that they are of.
    """
    count, _, height, width = images.shape
    if needs_grad(images):
        kept = _of_map(images, patch, pool)
        return saliency_cells(images.detach(), patch, pool) + (kept - kept.detach())
    deep = len(burt_sizes(height, width)) >= LEVELS
    graph = checks.transformed(images)
    plain = min(height, width) < _LEAST or not deep or graph or not precision.exact("matmul", images.device)
    if deep and not graph and images.dtype in ELEMENTS and by_kernel.usable(images):
        sizes, device = burt_sizes(height, width, LEVELS)[1:], kernels.device_of(images)
        weights = luma_weights(images)
        found = by_kernel.attempt(
            images.device, lambda: saliency.cells(device, images, sizes, weights, patch, most=pool == "max")
        )
        if found is not None:
            return found
    if images.device.type != "cpu" or images.dtype == torch.float64 or plain:
        return _of_map(images, patch, pool)
    together = max(1, _AT_ONCE // (height * width))
    parts = [_cells(images[first : first + together], patch, pool) for first in range(0, count, together)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def finite(cells: torch.Tensor) -> torch.Tensor:
    """The same.

    Raises:
        InputError: they are not; a CUDA graph that is being captured does not look.
    """
    if checks.readable(cells) and not torch.isfinite(cells.detach()).all():
        raise InputError(
            "the saliency of the image is not finite: it holds NaN, infinities, or values that are too large. Repair "
            "it with torch.nan_to_num, scale it to [0, 1], or give relevance of your own."
        )
    return cells


def _of_map(images: torch.Tensor, patch: int, pool: Pool) -> torch.Tensor:
    return pooled(saliency_map(images)[:, None].float(), patch, pool)[:, 0]


def _cells(images: torch.Tensor, patch: int, pool: Pool) -> torch.Tensor:
    count, _, height, width = images.shape
    first = _level_one(images)
    chain = [first, first]  # nothing asks for level 0
    while len(chain) < LEVELS:
        chain.append(reduce(chain[-1], steady=True))
    levels = [level[:, 0] for level in chain]
    side = min(patch, height)
    halves = _at_every_other(levels, _WHOLE if pool == "max" or side % 2 == 0 else 2 * _WHOLE)
    cells = height // side
    at_once = max(_POOLED // (count * width * side), 1)
    bands = [(i * side, min(i + at_once, cells) * side) for i in range(0, cells, at_once)]
    if height % side:
        bands.append((height - side, height))  # the last patches are flush with the edge
    most = max(end - begin for begin, end in bands) // 2 + 1
    memory = images.new_empty(most, 2, 2, len(PAIRS), count, halves.shape[-1] - 1, dtype=torch.float32)
    rows = torch.cat([_rows(halves, memory, *band, patch, pool) for band in bands], dim=-2)
    whole = rows.movedim(0, -1).flatten(-2)[..., :width]
    return along(whole, -1, patch, pool).div_(len(PAIRS))


def _rows(halves: torch.Tensor, memory: torch.Tensor, begin: int, end: int, patch: int, pool: Pool) -> torch.Tensor:
    """Rows begin..end - 1 of the sum over pairs, pooled along columns, in memory that is there: [2, B, h, w / 2], the
    even columns and the odd ones."""
    low, high = begin // 2, -(-end // 2)
    here = halves[:, :, low : high + 1]
    # [h / 2, row, column, pair, B, w / 2]: rows come first, by which threads share work. So each sums what it made,
    # which is still in its cache, and need not come from another core's.
    found = memory[: high - low]
    even = here[..., :-1]
    for column, samples in enumerate((even, torch.lerp(even, here[..., 1:], 0.5))):
        first, second = (out.permute(1, 2, 0, 3) for out in (found[:, 0, column], found[:, 1, column]))
        torch.abs(samples[:, :, :-1], out=first)
        _apart(samples[:, :, :-1], samples[:, :, 1:], out=second)
    side = min(patch, end - begin)
    # Levels are of half the luma, so what is on samples counts twice, and a sum of two neighbours is their mean.
    if pool == "mean" and begin % 2 == side % 2 == 0:
        sums = found.unflatten(0, (-1, side // 2)).sum(1).sum(3).permute(1, 2, 3, 0, 4)
        return torch.add(sums[1], sums[0], alpha=2).div_(side)
    found[:, 0].mul_(2)
    rows = found.sum(3).permute(2, 3, 0, 1, 4).flatten(2, 3)
    return along(rows[:, :, begin - 2 * low : end - 2 * low], -2, patch, pool)


def _apart(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """|a - b| in one pass: what this loss is from `beta` on, and below it is nothing."""
    torch.ops.aten.smooth_l1_loss.out(a, b, 0, torch.finfo(torch.float32).tiny, out=out)


def _at_every_other(levels: Sequence[torch.Tensor], whole: int) -> torch.Tensor:
    """Differences of levels at every other pixel of every other row, [pairs, B, ceil(H / 2) + 1, w + 1], the last ones
    twice, w being ceil(W / 2) or more, a multiple of `whole`, whose further columns mean nothing. Every other row is of
    the other sign, so that `_apart` can make sums along columns."""
    count, h, w = levels[0].shape
    columns = -(-w // whole) * whole
    tall, wide = -(-(h + 1) // ROWS) * ROWS, -(-(columns + 1) // (SAMPLES * _COARSEST)) * SAMPLES * _COARSEST
    result = levels[0].new_empty(len(PAIRS), count, tall, wide)
    for (centre, surround), out in zip(PAIRS, result, strict=True):
        factor = 1 << centre >> 1
        if factor > 1:
            spread(_difference(levels[centre], levels[surround], 1 << surround - centre), factor, out, signs=True)
            continue
        fine = levels[centre]
        spread(levels[surround], 1 << surround - centre, out, signs=True)
        out[:, :h:2, :w].sub_(fine[:, ::2])
        out[:, 1:h:2, :w].add_(fine[:, 1::2])
        out[:, :h, w] = out[:, :h, w - 1]
        torch.neg(out[:, h - 1, : w + 1], out=out[:, h, : w + 1])
    return result[:, :, : h + 1, : columns + 1]


def _difference(fine: torch.Tensor, coarse: torch.Tensor, factor: int) -> torch.Tensor:
    """A level less a coarser one at its samples."""
    count, h, w = fine.shape
    tall = fine.new_empty(count, -(-h // ROWS) * ROWS, -(-w // (SAMPLES * factor)) * SAMPLES * factor)
    spread(coarse, factor, tall)
    return fine - tall[:, :h, :w]


def _level_one(images: torch.Tensor) -> torch.Tensor:
    """Level 1 of the Gaussian pyramid of half the luma, [B, 1, ceil(H / 2), ceil(W / 2)], without the luma."""
    count, channels, height, width = images.shape
    tall, wide = -(-height // 2), -(-width // 2)
    result = images.new_empty(count, 1, tall, wide, dtype=torch.float32)
    at_once = max(_BAND // (count * width) // 2, 1)
    luma = result.new_empty(count, 2 * at_once + 3, width)
    # Two columns more before the first and behind the last, mirrored about these.
    made = result.new_empty(count, at_once, 2 * wide + 4)
    side, near, middle = BINOMIAL[:3]
    weights = LUMA if channels > 2 else (1.0,)
    # What is common to all weights is multiplied with at the end.
    common = side * weights[0] / (510 if images.dtype == torch.uint8 else 2)
    weighing = result.new_empty(3, 2 * wide)
    for pair, even, odd in zip(weighing, (middle, side, side), (near, near, 0.0), strict=True):
        pair[::2], pair[1::2] = common * even, common * odd
    here, before, after = weighing
    for row in range(0, tall, at_once):
        rows = min(at_once, tall - row)
        # The luma of the rows that these rest on, mirrored about the outermost ones.
        begin, end = 2 * row - 2, 2 * (row + rows) + 1
        there = slice(max(begin, 0), min(end, height))
        inner = luma[:, there.start - begin : there.stop - begin]
        first, *rest = ((images[:, channel, there], weight / weights[0]) for channel, weight in enumerate(weights))
        if rest and images.dtype == torch.float32:
            (colour, weight), *rest = rest
            torch.add(first[0], colour, alpha=weight, out=inner)
        else:
            inner.copy_(first[0])
        for colour, weight in rest:
            inner.add_(colour.float(), alpha=weight)
        for outside in (*range(begin, 0), *range(height, end)):
            inside = -outside if outside < 0 else 2 * height - 2 - outside
            luma[:, outside - begin] = luma[:, inside - begin]
        taps = [luma[:, k : k + 2 * rows - 1 : 2] for k in range(5)]
        inmost = torch.add(taps[1], taps[3]).add_(taps[2], alpha=middle / near)
        column = made[:, :rows]
        torch.add(taps[0], taps[4], out=column[..., 2 : width + 2]).add_(inmost, alpha=near / side)
        for k in range(1, 2 * wide + 3 - width):
            column[..., width + 1 + k] = column[..., width + 1 - k]
        column[..., :2] = column[..., 3:5].flip(-1)
        # Two columns are one of the result: even and odd ones have weights of their own, and are added last.
        both = (column[..., 2:-2] * here).addcmul_(column[..., :-4], before).addcmul_(column[..., 4:], after)
        torch.add(both[..., ::2], both[..., 1::2], out=result[:, 0, row : row + rows])
    return result
