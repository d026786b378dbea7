"""Where to look: peaks of relevance."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from gpu_lod import by_kernel, checks, operators
from gpu_lod.allocate.scale import Summable
from gpu_lod.cached import constant, numbers
from gpu_lod.errors import InputError
from gpu_lod.kernels import choosing
from gpu_lod.kernels import device as kernels

COARSE = 16
"""Cells of the coarse pass along the longer side."""

ALIKE = 1 + 2**-18
"""Squares of distances that are this much apart are the same, but for rounding."""


def asked(count: int, radius: float, inhibition: float) -> tuple[int, float, float]:
    """How many peaks, and which inhibition of return, checked."""
    count = checks.integer(count, "count", at_least=1, at_most=1024)
    radius, inhibition = checks.number(radius, "radius"), checks.number(inhibition, "inhibition")
    if not 0 <= radius <= 1e6 or not 0 <= inhibition <= 1:
        raise InputError(
            f"radius is {radius} and inhibition {inhibition}; expected a part of the longer side from 0 on, and a "
            "number from 0 to 1."
        )
    return count, radius, inhibition


def _map(
    relevance: torch.Tensor, count: int, radius: float, inhibition: float
) -> tuple[torch.Tensor, int, float, float]:
    """Checked but for values."""
    relevance = checks.dense(relevance, "relevance")
    if relevance.ndim != 3 or not relevance.numel() or relevance.dtype == torch.bool:
        raise InputError(f"relevance is {relevance.dtype} {tuple(relevance.shape)}; expected numbers [B, Hg, Wg].")
    return relevance, *asked(count, radius, inhibition)


def _points(relevance: torch.Tensor, count: int, radius: float, inhibition: float) -> torch.Tensor:
    relevance, count, _, _ = _map(relevance, count, radius, inhibition)
    return relevance.new_empty(len(relevance), count, 2, dtype=torch.float32)


@operators.function(_points, differentiable=False)
def find_fixations(
    relevance: torch.Tensor, count: int = 1, *, radius: float = 0.15, inhibition: float = 1.0
) -> torch.Tensor:
    """The most relevant places, one after the other.

    Shape: relevance [B, Hg, Wg] gives [B, count, 2].
    Units: (x, y) in [0, 1], y down; the radius in units of the longer side.
    Convention: relevance is averaged to a coarse map of 16 cells along its longer side (fewer if it has fewer); -inf
        counts as its least finite value. A peak is its highest cell, of equal ones the nearest to the middle (in parts
        of the sides) and then the first row by row, refined below a cell by the vertex of the parabola through the cell
        and its neighbours along each side. Then relevance within the radius is inhibited (inhibition of return):
        multiplied by 1 - inhibition, after its least value was subtracted; so with an inhibition of 1 a second peak's
        cell is never within the radius of the first peak while there are others (the vertex may be, by half a cell).
        With less of it, what is far above the rest may be looked at again. No gradients.

    Raises:
        InputError: no map, NaN, a count not from 1 to 1024, a radius below 0, or an inhibition outside [0, 1].

    Source: Koch and Ullman, "Shifts in Selective Visual Attention" (1985); Itti, Koch and Niebur (1998).
    """
    relevance, count, radius, inhibition = _map(relevance, count, radius, inhibition)
    checks.no_nan(relevance, "relevance")
    return peaks_of(Summable(relevance.detach().float()).finite, count, radius=radius, inhibition=inhibition)


def peaks_of(finite: torch.Tensor, count: int, *, radius: float = 0.15, inhibition: float = 1.0) -> torch.Tensor:
    """The same of numbers that are finite, as their sums are."""
    height, width = finite.shape[-2:]
    scale = min(1.0, COARSE / max(height, width))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    # In float64: means of equal values over windows of other sizes would differ in their last bits.
    coarse = F.adaptive_avg_pool2d(finite[:, None].double(), size)[:, 0].to(finite.dtype)
    coarse = coarse - coarse.amin((1, 2), keepdim=True)
    longer = max(height, width)
    reach = radius**2 * ALIKE
    y, x, central = (constant(coarse.device, part, size) for part in (_down, _across, _central))
    if coarse.dtype == torch.float32 and by_kernel.usable(coarse):
        found = by_kernel.attempt(
            coarse.device,
            lambda: choosing.peaks(
                kernels.device_of(coarse), coarse, (y, x, central), count, (height, width), reach, inhibition
            ),
        )
        if found is not None:
            return found
    free = torch.ones_like(coarse, dtype=torch.bool)
    sides = numbers((size[1], size[0]), coarse.dtype, coarse.device)
    points = []
    for number in range(count):
        best = coarse == coarse.amax((1, 2), keepdim=True)
        # Of equal ones, places that were looked at come last.
        fresh = best & free
        best = torch.where(fresh.any(2, keepdim=True).any(1, keepdim=True), fresh, best)
        index = torch.where(best, central, -math.inf).flatten(1).argmax(1)
        place = torch.stack([index % size[1], index // size[1]], dim=1)
        points.append(((_vertices(coarse, index[:, None], place) + place + 0.5) / sides).clamp(0, 1))
        if number == count - 1:
            break
        dy = (y[None, :, None] - points[-1][:, 1, None, None]) * height / longer
        dx = (x[None, None, :] - points[-1][:, 0, None, None]) * width / longer
        near = (dx**2 + dy**2 <= reach).flatten(1).scatter(1, index[:, None], True).view_as(free)
        coarse = torch.where(near, coarse * (1 - inhibition), coarse)
        free = free & ~near
    return torch.stack(points, dim=1)


def _down(size: tuple[int, int]) -> torch.Tensor:
    """[rows], the cells' centres in parts of the side."""
    return (torch.arange(size[0], dtype=torch.float32, device="cpu") + 0.5) / size[0]


def _across(size: tuple[int, int]) -> torch.Tensor:
    """[columns]"""
    return _down(size[::-1])


def _central(size: tuple[int, int]) -> torch.Tensor:
    """[rows, columns], the nearer to the middle, the higher."""
    # As far on each side, to the last bit.
    y, x = ((2 * torch.arange(n, dtype=torch.float32, device="cpu") + 1 - n) / (2 * n) for n in size)
    return -(y[:, None] ** 2 + x**2)


def _vertices(values: torch.Tensor, index: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """[B, 2], cells along x and y from a peak to the vertex of the parabola through it and its neighbours: at most half
    of one.

    Args:
        index: [B, 1], of the peaks among all cells.
        place: [B, 2], their (column, row).
    """
    height, width = values.shape[1:]
    steps = numbers((1, width), index.dtype, index.device)
    low, high = place > 0, place < numbers((width - 1, height - 1), index.dtype, index.device)
    near = torch.cat([index - steps * low, index + steps * high, index], dim=1)
    before, after, here = values.flatten(1).gather(1, near).split((2, 2, 1), dim=1)
    bend = before - 2 * here + after
    inside = low & high & (bend < 0)
    return torch.where(inside, 0.5 * (before - after) / torch.where(inside, bend, -1.0), 0.0).clamp(-0.5, 0.5)
