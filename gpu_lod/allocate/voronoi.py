"""Cells of the peaks of relevance: each place is served by the nearest one."""

from __future__ import annotations

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.fixations import ALIKE
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import best_of_each
from gpu_lod.patch_grid import Pool


@register
class Voronoi(Allocator):
    """Level-0 patches, shared out among the Voronoi cells of the peaks of relevance by the relevance that each cell
    holds, and the best of each cell.

    Distances are in pixels, and a patch between two peaks belongs to the higher one. Every cell that holds a patch gets
    a token; shares are whole by largest remainder, and never more than a cell has.

    Args:
        peaks: how many (`find_fixations`).
    """

    finest = True

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean", peaks: int = 8) -> None:
        super().__init__(budget, patch, pool)
        self.peaks = checks.integer(peaks, "peaks", at_least=1, at_most=1024)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        self.enough(scene.grid[0] * scene.grid[1])
        points = scene.fixations(min(self.peaks, scene.grid[0] * scene.grid[1]))
        return best_of_each(scene, owners(scene, points), points.shape[1], self.budget)


def owners(scene: Scene, points: torch.Tensor) -> torch.Tensor:
    """int64 [B, Hg Wg], which of points [B, S, 2] each level-0 patch is nearest to: of those as near, the first."""
    away = distances(scene, points)
    return (away <= away.amin(1, keepdim=True) * ALIKE).byte().argmax(1)


def distances(scene: Scene, points: torch.Tensor) -> torch.Tensor:
    """Squared, from points [B, S, 2] to the centres of level-0 patches: [B, S, Hg Wg], in units of the longer side."""
    height, width = scene.size
    x, y = scene.centres()
    longer = max(height, width)
    dx = (x - points[..., :1]) * (width / longer)
    dy = (y - points[..., 1:]) * (height / longer)
    return (dy.square()[..., :, None] + dx.square()[..., None, :]).flatten(2)
