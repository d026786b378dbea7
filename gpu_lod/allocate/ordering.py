"""What is the highest, in order, and what is where: shared by allocators, and by the encoders' selections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gpu_lod import by_kernel, checks, dispatch
from gpu_lod.kernels import choosing
from gpu_lod.kernels import device as kernels

if TYPE_CHECKING:
    from gpu_lod.allocate.scene import Scene

_FEW, _MANY = 4, 1024
"""From so many times as many numbers as are wanted on, and from so many, a CPU finds these faster than it sorts all."""


def ordered(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest `count` of [..., N], high first, equal ones by their place: (scores, indices), both [..., count]."""
    made = _by_kernel(scores, count)
    if made is not None:
        return made
    many = scores.shape[-1] >= max(_FEW * count, _MANY)
    if many and scores.dtype == torch.float32 and scores.device.type == "cpu" and not checks.transformed(scores):
        index = _highest(scores.detach(), count)
        return scores.gather(-1, index), index
    found, index = torch.sort(scores, dim=-1, descending=True, stable=True)
    return found[..., :count], index[..., :count]


def _by_kernel(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `ordered`, where a kernel finds them faster than a GPU sorts all; None elsewhere."""
    if scores.ndim != 2 or scores.dtype not in (torch.float32, torch.float64) or not scores.numel():
        return None
    count = min(count, scores.shape[1])
    if not 0 < count <= choosing.MOST_BEST or scores.shape[1] > choosing.MOST_SCORES or not by_kernel.usable(scores):
        return None
    device = kernels.device_of(scores)
    found = by_kernel.attempt(scores.device, lambda: choosing.best(device, scores, count))
    if found is None or not dispatch.needs_grad(scores):
        return found
    return scores.gather(1, found[1]), found[1]


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Their places. torch.topk is not stable, so it is given keys of which no two are equal: a number's bits above, its
    place below."""
    bits = (scores + 0.0).view(torch.int32)  # of 0 for -0, which are equal
    last = scores.shape[-1] - 1
    # Negative numbers of two's complement are in the order of floats when all bits but the sign are turned.
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long().bitwise_left_shift_(32)
    keys += torch.arange(last, -1, -1, device=scores.device)
    return last - torch.topk(keys, count, dim=-1).values.bitwise_and_(0xFFFFFFFF)


def places(taken: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` taken ones of each row of [B, N] are, in order: [B, count]. Asks a GPU for nothing."""
    numbers = torch.arange(taken.shape[1], device=taken.device).expand_as(taken)
    slots = torch.where(taken, taken.cumsum(1) - 1, count)  # all the others into one slot more
    return numbers.new_zeros(len(taken), count + 1).scatter_(1, slots, numbers)[:, :count]


def at_sites(scene: Scene, values: torch.Tensor, sites: torch.Tensor) -> torch.Tensor:
    """[B, K]: values [B, Hg, Wg] of the grid's cells that sites [B, K, 2 or 3] are in."""
    cells = []
    for n, count, place in zip(scene.size, scene.grid, (sites[..., 1], sites[..., 0]), strict=True):
        # Sites of lattices lie on edges of cells, and a GPU divides by a number by multiplying with its inverse.
        along = torch.div(place.detach() * n, scene.patch, rounding_mode="floor")
        cells.append(along.long().clamp(0, count - 1))
    return values.flatten(1).gather(1, cells[0] * scene.grid[1] + cells[1])


def scored(scene: Scene, sites: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3] by the relevance at them, high first, equal ones in the order they are in; and that: [B, K]."""
    scores, order = ordered(at_sites(scene, scene.relevance, sites), sites.shape[1])
    return sites.gather(1, order[..., None].expand_as(sites)), scores
