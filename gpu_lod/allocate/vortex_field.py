"""Vortices at the peaks of relevance: each place goes to the one that pulls it most."""

from __future__ import annotations

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.fixations import ALIKE
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import best_of_each
from gpu_lod.allocate.voronoi import distances
from gpu_lod.patch_grid import Pool


@register
class VortexField(Allocator):
    """Level-0 patches, shared out among vortices by the relevance that each holds, and the best of each: no patch goes
    to two.

    Vortices stand at the peaks of relevance that non-maximum suppression leaves (`find_fixations`, with the radius as
    the distance below which the lower peak gives way). A vortex pulls a patch by strength / (distance^2 + radius^2),
    its strength being the relevance within its radius (of the nearest patch at least), and a patch goes to the one that
    pulls it most, the higher peak of equal ones.

    Args:
        vortices: how many.
        radius: in units of the longer side.
    """

    finest = True

    def __init__(
        self, budget: int = 273, patch: int = 14, pool: Pool = "mean", vortices: int = 8, radius: float = 0.1
    ) -> None:
        super().__init__(budget, patch, pool)
        self.vortices = checks.integer(vortices, "vortices", at_least=1, at_most=1024)
        self.radius = checks.between(radius, "radius", 1e-6, 1e6)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        self.enough(scene.grid[0] * scene.grid[1])
        points = scene.fixations(self.vortices, radius=self.radius)
        away = distances(scene, points)
        amounts = scene.amounts().flatten(1)[:, None].double()
        inside = (away <= self.radius**2 * ALIKE) | (away == away.amin(-1, keepdim=True))
        strength = (amounts * inside).sum(-1, keepdim=True)
        pull = strength / (away.double() + self.radius**2)
        return best_of_each(scene, pull.argmax(1), self.vortices, self.budget)
