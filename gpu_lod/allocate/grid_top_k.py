"""The most relevant patches of the grid: the baseline that all others must beat."""

from __future__ import annotations

import torch

from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene


@register
class GridTopK(Allocator):
    """The K level-0 patches of the highest relevance; equal ones row by row."""

    monotone = True
    nested = True
    finest = True

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = scene.grid
        self.enough(rows * columns)
        scores, index = ordered(scene.relevance.flatten(1), self.budget)
        return scene.sites(0, index), scores
