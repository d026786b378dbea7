"""From a level to the pixels that read it: bilinear, by whole factors, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.dispatch import needs_grad
from gpu_lod.precision import factor as factored

_SMALL = 2**18
"""Values below which torch's own interpolation takes less than the several operations here."""
_IN_TURN = 4
"""Up to this factor each column between two samples is written by itself: so few in a row do not vectorise."""


def enlarged(
    samples: torch.Tensor,
    factor: int,
    box: tuple[int, int, int, int],
    dtype: torch.dtype | None = None,
    *,
    centred: bool = True,
) -> torch.Tensor:
    """Rows y0..y1 and columns x0..x1 of what samples are at full size; beyond the outer ones these are read.

    On a CPU the few rows of samples are widened first, and whole rows then blended: down to a quarter of the time of
    `F.interpolate`, which takes four samples for every pixel.

    Args:
        samples: [B, C, h, w].
        factor: pixels from a sample to the next, a power of two from 2 on.
        box: (y0, y1, x0, x1), of h factor rows and w factor columns.
        dtype: of the result, fp32 or fp64; None is the samples'.
        centred: a sample lies in the middle of its pixels (`align_corners=False`); else it is the first of them.
    """
    down, along = (
        _Side.of(n, factor, *ends, centred) for n, ends in zip(samples.shape[-2:], (box[:2], box[2:]), strict=True)
    )
    window = samples[..., down.low : down.high, along.low : along.high].to(dtype or samples.dtype)
    values = samples.shape[0] * samples.shape[1] * down.wanted * along.wanted
    # Of few rows of a coarse level much would be made that is not asked for.
    few_rows = 4 * (down.high - down.low) * factor > 5 * down.wanted
    if samples.device.type != "cpu" or (values < _SMALL and not few_rows):
        return _interpolated(window, factor, down, along, centred)
    window = _repeated(window, down, along)
    shares = torch.arange(factor, dtype=window.dtype, device="cpu").add_(0.5 if centred else 0.0).div_(factor)
    left, right = window[..., :-1], window[..., 1:]
    graph = needs_grad(samples) or checks.transformed(samples)
    if factor > _IN_TURN or graph:
        wide = torch.lerp(left[..., None], right[..., None], shares)
    else:
        wide, step = left.new_empty(*left.shape, factor), right - left
        for column, share in enumerate(shares.tolist()):
            torch.add(left, step, alpha=share, out=wide[..., column])
    wide = wide.flatten(-2)[..., along.begin : along.begin + along.wanted]
    upper, lower, shares = wide[..., :-1, :], wide[..., 1:, :], shares[:, None]
    end = down.begin + down.wanted
    if graph or not few_rows:
        tall = torch.lerp(upper[..., None, :], lower[..., None, :], shares)
        return tall.flatten(-3, -2)[..., down.begin : end, :]
    tall = wide.new_empty(*wide.shape[:-2], down.wanted, along.wanted)
    for row in range(upper.shape[-2]):
        begin, stop = max(row * factor, down.begin), min((row + 1) * factor, end)
        torch.lerp(
            upper[..., row : row + 1, :],
            lower[..., row : row + 1, :],
            shares[begin - row * factor : stop - row * factor],
            out=tall[..., begin - down.begin : stop - down.begin, :],
        )
    return tall


def enlarged_adjoint(
    pixels: torch.Tensor, factor: int, box: tuple[int, int, int, int], size: tuple[int, int], *, centred: bool = True
) -> torch.Tensor:
    """The adjoint of `enlarged`: what pixels [B, C, y1 - y0, x1 - x0] give the samples, [B, C, *size]."""
    down, along = (_Side.of(n, factor, *ends, centred) for n, ends in zip(size, (box[:2], box[2:]), strict=True))
    window = _gathered(_gathered(pixels, factor, down, centred).mT, factor, along, centred).mT
    if window.shape[-2:] == size:
        return window
    result = pixels.new_zeros(*pixels.shape[:-2], *size)
    result[..., down.low : down.high, along.low : along.high] = window
    return result


def _gathered(pixels: torch.Tensor, factor: int, side: _Side, centred: bool) -> torch.Tensor:
    """Rows of pixels [..., n, w] weighed into the samples that are there, as rows."""
    count = side.before + side.high - side.low + side.after
    behind = (count - 1) * factor - side.begin - side.wanted
    between = F.pad(pixels, (0, 0, side.begin, behind)).unflatten(-2, (count - 1, factor))
    shares = torch.arange(factor, dtype=pixels.dtype, device=pixels.device).add_(0.5 if centred else 0.0).div_(factor)
    above, below = (factored(torch.stack([1 - shares, shares])) @ factored(between)).to(pixels.dtype).unbind(-2)
    samples = F.pad(above, (0, 0, 0, 1)) + F.pad(below, (0, 0, 1, 0))
    if side.before:  # the first was read once more
        samples = torch.cat([samples[..., :1, :] + samples[..., 1:2, :], samples[..., 2:, :]], dim=-2)
    if side.after:
        samples = torch.cat([samples[..., :-2, :], samples[..., -2:-1, :] + samples[..., -1:, :]], dim=-2)
    return samples


class _Side(NamedTuple):
    """Some pixels along a side, and the samples that they lie between."""

    low: int
    high: int
    """The samples that are there: low..high - 1."""
    before: int
    after: int
    """How often the first and the last of the side are wanted once more."""
    begin: int
    """Of the pixels from the first wanted sample on, the first that is wanted."""
    wanted: int

    @staticmethod
    def of(n: int, factor: int, begin: int, end: int, centred: bool) -> _Side:
        shift = factor // 2 if centred else 0  # from a sample's first pixel to the first behind its centre
        first, last = (begin - shift) // factor, (end - 1 - shift) // factor + 1
        low, high = max(first, 0), min(last, n - 1) + 1
        return _Side(low, high, low - first, last + 1 - high, begin - shift - first * factor, end - begin)


def _repeated(window: torch.Tensor, down: _Side, along: _Side) -> torch.Tensor:
    more = (along.before, along.after, down.before, down.after)
    return F.pad(window, more, mode="replicate") if any(more) else window


def _interpolated(window: torch.Tensor, factor: int, down: _Side, along: _Side, centred: bool) -> torch.Tensor:
    """By torch's own interpolation."""
    if centred:
        pixels = F.interpolate(
            window, size=[n * factor for n in window.shape[-2:]], mode="bilinear", align_corners=False
        )
        # From the first pixel of the first sample that is there.
        y, x = (side.begin + factor // 2 - side.before * factor for side in (down, along))
    else:
        window = _repeated(window, down, along)
        size = [(n - 1) * factor + 1 for n in window.shape[-2:]]
        pixels = F.interpolate(window, size=size, mode="bilinear", align_corners=True)
        y, x = down.begin, along.begin
    return pixels[..., y : y + down.wanted, x : x + along.wanted]
