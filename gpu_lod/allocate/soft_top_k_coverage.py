"""The most relevant patches that are not all in one place."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.allocate.base import register
from gpu_lod.allocate.learned import Learned, soft_top_k
from gpu_lod.allocate.losses import coverage_loss
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import ranks_within, strata_of
from gpu_lod.cached import numbers
from gpu_lod.patch_grid import Pool
from gpu_lod.uncompiled import as_it_stands


@register
class SoftTopKCoverage(Learned):
    """The K level-0 patches that together have the most relevance less a penalty on crowded bins.

    Relevance counts in units of its spread (the mean distance from the mean of the finite values). The penalty is
    strength x share / 2 x sum over the bins of (tokens / share)^2, the share being the K / (rows x columns) tokens that
    a bin has if all have as many; it is least where the coverage is even. The n-th token of a bin, n = 0, 1, ..., adds
    strength x (n + 1/2) / share to it. So what each patch is worth is its relevance less what it adds when it comes
    after the better ones of its bin, and the K best by worth are the optimum, exactly: no iteration. Strength 0 is
    GridTopK.

    (The penalty's gradient at a soft mask, which the rule may also be built on, is the same for all patches of a bin:
    where relevance ties, it takes bins whole or not at all.)

    Scores are the soft top-k of worth, in [0, 1]; over all patches they sum to K, over the chosen ones to nearly that.
    `soft_mask` has those of all patches, to train on what was not chosen too, and `coverage_penalty` is the penalty on
    them: of a soft histogram, which has gradients everywhere, where the choice counts whole tokens in bins with edges.

    What has gradients in what: the sites have none. Scores, `soft_mask` and `coverage_penalty` have some in the
    relevance, the strength and the temperature; scores and mask have none through the count of tokens in a bin, for how
    patches rank in it is constant between two swaps. `coverage_penalty` does count: it falls as the strength grows, and
    as relevance moves to where there is little. So strength makes the choice spread, and the penalty in a loss teaches
    it, and what makes the relevance, how much that is worth:

        loss = task(allocator.soft_mask(image, relevance)) + 0.1 * allocator.coverage_penalty(image, relevance)

    Args:
        bins: (rows, columns); no more than the grid has.
        strength: of the penalty, in spreads of relevance for a bin that has its share. A parameter; below 0 it is 0.
        temperature: of the soft top-k, in spreads of relevance. A parameter, as its logarithm.
    """

    finest = True

    learns: ClassVar[tuple[str, ...]] = ("strength", "log_temperature")

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        bins: tuple[int, int] = (8, 8),
        strength: float = 1.0,
        temperature: float = 0.1,
    ) -> None:
        super().__init__(budget, patch, pool)
        self.bins = checks.size(bins)
        strength = checks.between(strength, "strength", 0, 1e6)
        temperature = checks.between(temperature, "temperature", 1e-6, 1e6)
        self._made_with = {"strength": strength, "temperature": temperature}
        self.strength = nn.Parameter(torch.tensor(strength, dtype=torch.float32))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature), dtype=torch.float32))

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        worth, soft = self._soft(scene)
        index = ordered(worth, self.budget)[1]
        return scene.sites(0, index), soft.gather(1, index).float()

    @as_it_stands
    def soft_mask(self, image: Any = None, relevance: Any = None) -> torch.Tensor:
        """[B, Hg, Wg]: the soft top-k of all patches, those that are not chosen too; in sum K for each image."""
        scene, _ = self._scene(image, relevance, None, None, None)
        return self._soft(scene)[1].float().unflatten(1, scene.grid)

    @as_it_stands
    def coverage_penalty(self, image: Any = None, relevance: Any = None) -> torch.Tensor:
        """How unevenly the soft mask lies over the bins: `coverage_loss` of all patches by it, fp32, the mean over the
        batch; 0 if all bins hold as much. Has gradients in the relevance, the strength and the temperature."""
        scene, _ = self._scene(image, relevance, None, None, None)
        return self._penalty(scene).float()

    def _penalty(self, scene: Scene) -> torch.Tensor:
        soft = self._soft(scene)[1]
        every = scene.sites(0, torch.arange(soft.shape[1], device=scene.device))
        return coverage_loss(every.expand(scene.batch, -1, -1), soft, self._cut(scene))

    def _cut(self, scene: Scene) -> tuple[int, int]:
        """Rows and columns of bins: no more than the grid has."""
        return min(self.bins[0], scene.grid[0]), min(self.bins[1], scene.grid[1])

    def _soft(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        """What each patch is worth, and the soft top-k of it: [B, Hg Wg], float64."""
        self.enough(scene.grid[0] * scene.grid[1])
        relevance = scene.relevance.flatten(1)
        cut = self._cut(scene)
        count = cut[0] * cut[1]
        bin_ = strata_of(scene, numbers((tuple(cut),), torch.int64, scene.device)).expand(scene.batch, -1)
        before = ranks_within(relevance, bin_, count)
        added = (before.double() + 0.5) * count / self.budget
        # The gradient passes as if the strength were not held at 0, so that it can come back.
        strength = (self.strength + (self.strength.clamp(min=0) - self.strength).detach()).double()
        worth = in_spreads(relevance) - strength * added
        return worth, soft_top_k(worth / self.log_temperature.double().exp(), self.budget, 1.0)


def in_spreads(values: torch.Tensor) -> torch.Tensor:
    """[B, N] in units of the mean distance from the mean, float64; infinities are very large and do not count in it."""
    values = values.double()
    finite = torch.isfinite(values)
    count = finite.sum(1, keepdim=True).clamp(min=1)
    some = torch.where(finite, values, 0.0)
    away = torch.where(finite, some - some.sum(1, keepdim=True) / count, 0.0)
    spread = away.abs().sum(1, keepdim=True) / count
    return torch.where(finite, some / torch.where(spread > 0, spread, 1.0), values.sign() * 1e30)
