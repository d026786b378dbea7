"""Something everywhere, more where it matters: a grid of strata."""

from __future__ import annotations

import torch

from gpu_lod import by_kernel, checks
from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.tree_cut import tokens_at
from gpu_lod.cached import numbers
from gpu_lod.errors import CaptureError
from gpu_lod.kernels import choosing
from gpu_lod.kernels import device as kernels
from gpu_lod.patch_grid import Pool


@register
class Stratified(Allocator):
    """Level-0 patches, shared out among the strata of a grid by relevance, and the best of each stratum.

    Every stratum gets one token (with a smaller budget than strata, the most relevant ones do). The rest is shared by
    largest remainder on the relevance that each stratum holds; no stratum gets more than it has patches, and what it
    cannot take goes to the others in the same way.

    Args:
        strata: (rows, columns); no more than the grid has.
    """

    # A heavier stratum never loses a token by largest remainder while the others stay as they are.
    monotone = True
    finest = True

    def __init__(
        self, budget: int = 273, patch: int = 14, pool: Pool = "mean", strata: tuple[int, int] = (4, 4)
    ) -> None:
        super().__init__(budget, patch, pool)
        self.strata = checks.size(strata)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = scene.grid
        self.enough(rows * columns)
        cut = [min(count, cells) for count, cells in zip(self.strata, scene.grid, strict=True)]
        stratum = strata_of(scene, numbers((tuple(cut),), torch.int64, scene.device)).expand(scene.batch, -1)
        return best_of_each(scene, stratum, cut[0] * cut[1], self.budget)


def strata_of(scene: Scene, cut: torch.Tensor) -> torch.Tensor:
    """[B, Hg Wg], the stratum of each level-0 patch, row by row.

    Args:
        cut: [B, 2], the rows and columns of strata, no more than the grid has; or [1, 2] for all images.
    """
    rows, columns = cut[:, :, None].unbind(1)
    y, x = (torch.arange(n, device=scene.device) * k // n for n, k in zip(scene.grid, (rows, columns), strict=True))
    return (y[:, :, None] * columns[:, :, None] + x[:, None]).flatten(1)


def best_of_each(scene: Scene, stratum: torch.Tensor, count: int, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Level-0 patches: the budget shared out among strata by the relevance that each holds, and the best of each.

    Args:
        stratum: [B, Hg Wg], the stratum of each patch, from 0 to `count` - 1.
    """
    room, weight = held(scene, stratum, count)
    taken = best_of(scene.relevance, stratum, room, shared_out(weight, room, budget))
    return tokens_at(scene, [(0, taken)], [scene.relevance], budget)


def held(scene: Scene, stratum: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many patches each stratum has, [B, S], and how much relevance, float64; arguments as in `best_of_each`."""
    room = room_in(stratum, count)
    weight = torch.zeros(room.shape, dtype=torch.float64, device=scene.device).scatter_add(
        1, stratum, scene.amounts().flatten(1).double()
    )
    return room, weight


def best_of(values: torch.Tensor, stratum: torch.Tensor, room: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Where the best `counts` [B, S] patches of each stratum are, bool [B, Hg, Wg]; equal ones by their place."""
    ranks = ranks_within(values.flatten(1), stratum, room.shape[1], room)
    return (ranks < counts.gather(1, stratum)).view_as(values)


def room_in(stratum: torch.Tensor, count: int) -> torch.Tensor:
    """[B, `count`], how many patches each stratum has, of [B, N]."""
    return stratum.new_zeros(stratum.shape[0], count).scatter_add(1, stratum, torch.ones_like(stratum))


def ranks_within(
    values: torch.Tensor, stratum: torch.Tensor, count: int, room: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, N], how many of its stratum come before each: those of higher values, and equal ones by their place.

    Args:
        stratum: [B, N], of each value, from 0 to `count` - 1.
        room: [B, `count`], how many values each stratum has, where that is known.
    """
    few = 0 < max(values.shape[1], count) <= choosing.MOST_RANKED and len(values) > 0
    if few and values.dtype == torch.float32 and by_kernel.usable(values, stratum):
        device = kernels.device_of(values)
        ranks = by_kernel.attempt(values.device, lambda: choosing.ranks(device, values, stratum, count))
        if ranks is not None:
            return ranks
    room = room_in(stratum, count) if room is None else room
    order = torch.sort(values, dim=1, descending=True, stable=True).indices
    order = order.gather(1, torch.sort(stratum.gather(1, order), dim=1, stable=True).indices)
    before = (room.cumsum(1) - room).gather(1, stratum.gather(1, order))
    return torch.empty_like(stratum).scatter(1, order, torch.arange(values.shape[1], device=values.device) - before)


def shared_out(weight: torch.Tensor, room: torch.Tensor, total: int | torch.Tensor, least: int = 1) -> torch.Tensor:
    """Whole shares [B, S] that sum to `total`: `least` for each (the heaviest first, if there are not enough), the rest
    by largest remainder, none above its room.

    Args:
        weight: not negative; all 0 is all equal.
        room: sums to `total` at least.
        total: of every image, or [B].
        least: 1, or 0 for shares by weight alone.
    """
    strata = weight.shape[1]
    if by_kernel.usable(weight, room):
        device = kernels.device_of(weight)
        counts = by_kernel.attempt(
            weight.device, lambda: choosing.shares(device, weight, room, total, least), waits=True
        )
        if counts is not None:
            return counts
    if not checks.readable(weight):
        raise CaptureError(
            "a CUDA graph is being captured, and tokens are shared out by a kernel there alone, which cannot be used "
            f"for tensors on {weight.device}. Call the allocator outside the graph."
        )
    if isinstance(total, int):
        total = torch.full((1,), total, device=weight.device)
    wanted = total.expand(len(weight))[:, None]
    heaviest = torch.sort(weight.where(room > 0, -1.0), dim=1, descending=True, stable=True).indices
    first = (torch.arange(strata, device=weight.device) < wanted).long() * least
    counts = torch.zeros_like(room).scatter(1, heaviest, first).minimum(room)
    for _ in range(strata):  # each fills a stratum, or is the last
        rest = wanted - counts.sum(1, keepdim=True)
        left = room - counts
        open_ = left > 0
        shares = weight * open_
        shares = torch.where(shares.sum(1, keepdim=True) > 0, shares, open_.double())
        quota = rest * shares / shares.sum(1, keepdim=True).clamp(min=1e-300)
        over_full = quota > left
        full = over_full.any(1, keepdim=True)
        # Those that would get more than they have room for are filled first, alone: the rest is shared anew.
        given = torch.where(full & ~over_full, 0, torch.minimum(quota.floor().long(), left))
        remainder = torch.where(open_ & (given < left), quota - given, -1.0)
        rank = torch.sort(remainder, dim=1, descending=True, stable=True).indices
        over = rest - given.sum(1, keepdim=True)
        extra = torch.zeros_like(counts).scatter(
            1, rank, ((torch.arange(strata, device=weight.device) < over) & (remainder.gather(1, rank) >= 0)).long()
        )
        counts = counts + given + torch.where(full, 0, extra)
        if not bool((counts.sum(1, keepdim=True) < wanted).any()):
            break
    return counts
