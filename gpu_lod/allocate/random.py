"""Patches by lot: a baseline that many published methods do not beat."""

from __future__ import annotations

from typing import ClassVar

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.cached import constant
from gpu_lod.patch_grid import Pool

MOST_SEED = 2**64 - 1
"""That torch's generators take."""


@register
class Random(Allocator):
    """K level-0 patches drawn without replacement, the same ones for every image and call with one seed.

    Scores, and with them the order, are the relevance that was given, if any.
    """

    needs: ClassVar[tuple[Need, ...]] = ()
    finest = True

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean", seed: int = 0) -> None:
        super().__init__(budget, patch, pool)
        self.seed = checks.integer(seed, "seed", at_least=0, at_most=MOST_SEED)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        cells = scene.grid[0] * scene.grid[1]
        self.enough(cells)
        index = constant(scene.device, _lots, self.seed, cells, self.budget).expand(scene.batch, -1)
        scores, order = ordered(scene.relevance.flatten(1).gather(1, index), self.budget)
        return scene.sites(0, index.gather(1, order)), scores


def _lots(seed: int, cells: int, count: int) -> torch.Tensor:
    """[`count`] cells, in order."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(cells, generator=generator, device="cpu")[:count].sort().values
