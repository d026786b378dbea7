"""Something everywhere, more where it matters: a grid of strata."""

from __future__ import annotations

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Pool, Scene, register
from gpu_lod.allocate.tree_cut import tokens_at


@register
class Stratified(Allocator):
    """Level-0 patches, shared out among the strata of a grid by relevance, and the best of each stratum.

    Every stratum gets one token (with a smaller budget than strata, the most relevant ones do). The rest is shared by
    largest remainder on the relevance that each stratum holds; no stratum gets more than it has patches, and what it
    cannot take goes to the others in the same way.

    Args:
        strata: (rows, columns); no more than the grid has.
    """

    def __init__(
        self, budget: int = 273, patch: int = 14, pool: Pool = "mean", strata: tuple[int, int] = (4, 4)
    ) -> None:
        super().__init__(budget, patch, pool)
        self.strata = checks.size(strata)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = scene.grid
        self.enough(rows * columns)
        cut = [min(count, cells) for count, cells in zip(self.strata, scene.grid, strict=True)]
        stratum_y = torch.arange(rows, device=scene.device) * cut[0] // rows
        stratum_x = torch.arange(columns, device=scene.device) * cut[1] // columns
        stratum = (stratum_y[:, None] * cut[1] + stratum_x).flatten().expand(scene.batch, -1)
        return best_of_each(scene, stratum, cut[0] * cut[1], self.budget)


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
    ones = torch.ones_like(stratum)
    room = torch.zeros(scene.batch, count, dtype=torch.long, device=scene.device).scatter_add(1, stratum, ones)
    weight = torch.zeros(room.shape, dtype=torch.float64, device=scene.device).scatter_add(
        1, stratum, scene.amounts().flatten(1).double()
    )
    return room, weight


def best_of(values: torch.Tensor, stratum: torch.Tensor, room: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Where the best `counts` [B, S] patches of each stratum are, bool [B, Hg, Wg]; equal ones by their place."""
    # The rank of each patch in its stratum: sorted by value, then stably by stratum.
    order = torch.sort(values.flatten(1), dim=1, descending=True, stable=True).indices
    order = order.gather(1, torch.sort(stratum.gather(1, order), dim=1, stable=True).indices)
    sorted_strata = stratum.gather(1, order)
    ranks = torch.arange(order.shape[1], device=order.device) - (room.cumsum(1) - room).gather(1, sorted_strata)
    taken = torch.zeros_like(stratum, dtype=torch.bool)
    return taken.scatter(1, order, ranks < counts.gather(1, sorted_strata)).view_as(values)


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
    wanted = torch.as_tensor(total, device=weight.device).expand(len(weight))[:, None]
    heaviest = torch.sort(weight.where(room > 0, -1.0), dim=1, descending=True, stable=True).indices
    first = (torch.arange(strata, device=weight.device) < wanted).long() * least
    counts = torch.zeros_like(room).scatter(1, heaviest, first).minimum(room)
    for _ in range(strata):  # each round fills a stratum, or is the last
        rest = wanted - counts.sum(1, keepdim=True)
        left = room - counts
        open_ = left > 0
        shares = weight * open_
        shares = torch.where(shares.sum(1, keepdim=True) > 0, shares, open_.double())
        quota = rest * shares / shares.sum(1, keepdim=True).clamp(min=1e-300)
        given = torch.minimum(quota.floor().long(), left)
        full = (quota.floor().long() > left).any(1, keepdim=True)
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
