"""The most relevant patches of several levels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError
from gpu_lod.patch_grid import Pool, coarser


@register
class PyramidTopK(Allocator):
    """The K patches of the highest relevance times level weight, over the nodes of a quadtree on the grid.

    A node's relevance is the mean of the cells that it covers, above the map's least if that is negative, lest weights
    below 1 raise what is negative. Patches of different levels may cover the same pixels: that is what tree cuts avoid.
    With a split, each level gives its own best; a level that has fewer patches than its share hands the rest to the
    next finer one, and the finest to the next coarser that has some left.

    Args:
        weights: of the levels, finest first; as many levels as there are weights.
        split: patches of each level, coarsest first, such as (64, 128, 64, 17); they sum to the budget.
    """

    nested = True

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        weights: Sequence[float] = (1.0, 0.9, 0.8, 0.7),
        split: Sequence[int] | None = None,
    ) -> None:
        super().__init__(budget, patch, pool)
        each: Any = weights
        if isinstance(each, torch.Tensor):
            each = each.tolist()
        if not isinstance(each, (list, tuple)) or not each:
            raise InputError(f"weights are {weights!r}; expected a positive number for each level, finest first.")
        self.weights = tuple(checks.between(weight, "a level's weight", 1e-6, 1e6) for weight in each)
        # Raising a cell must not lift its parent more than itself.
        self.monotone = all(fine >= coarse for fine, coarse in pairwise(self.weights))
        self.split: tuple[int, ...] | None = None
        if split is not None:
            if not isinstance(split, (list, tuple)) or len(split) != len(self.weights):
                raise InputError(f"split is {split!r}; expected {len(self.weights)} counts, coarsest first.")
            self.split = tuple(checks.integer(count, "a level's count", at_least=0) for count in split)
            if sum(self.split) != budget:
                raise InputError(f"split is {self.split}; expected counts that sum to {budget}.")
        self.nested = self.nested and split is None

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        if self.split is not None and sum(self.split) != self.budget:
            raise InputError(
                f"split is {self.split}, which sums to {sum(self.split)}; the budget is {self.budget}. Make it with "
                f"budget={self.budget} and a split that sums to that."
            )
        sums, levels = scene.amounts(), []
        cells = torch.ones_like(sums[:1])
        for level, weight in enumerate(self.weights):
            if level:
                sums, cells = coarser(sums, "sum"), coarser(cells, "sum")
            levels.append((sums / cells * weight).flatten(1))
        there = [level.shape[1] for level in levels]
        self.enough(sum(there), f"patches of {len(there)} levels")
        sites = torch.cat(
            [scene.sites(level, torch.arange(count, device=scene.device)) for level, count in enumerate(there)]
        )
        if self.split is not None:
            counts = _shares(self.split[::-1], there)
            chosen = [ordered(level, count) for level, count in zip(levels, counts, strict=True)]
            starts = [sum(there[:level]) for level in range(len(there))]
            scores = torch.cat([found for found, _ in chosen], dim=1)
            index = torch.cat([place + start for (_, place), start in zip(chosen, starts, strict=True)], dim=1)
            scores, order = ordered(scores, self.budget)
            return sites[index.gather(1, order)], scores
        scores, index = ordered(torch.cat(levels, dim=1), self.budget)
        return sites[index], scores


def _shares(wanted: Sequence[int], there: Sequence[int]) -> list[int]:
    """Counts, finest first, none above what there is: the rest goes to the next finer level, then to coarser ones."""
    counts, rest = list(wanted), 0
    for level in [*range(len(counts) - 1, -1, -1), *range(len(counts))]:
        asked = counts[level] + rest
        counts[level] = min(asked, there[level])
        rest = asked - counts[level]
    return counts
