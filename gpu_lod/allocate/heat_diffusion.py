"""Relevance that spreads: neighbours of what matters matter too."""

from __future__ import annotations

import math

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.patch_grid import Pool

_NOTHING = 1e-12
"""Of the most heat: what is below is no more than rounding."""


@register
class HeatDiffusion(Allocator):
    """The K level-0 patches that are hottest in the steady state of diffusion from relevance.

    Relevance heats each cell at its rate, heat spreads to the four neighbours and is lost in proportion: u solves
    u - length^2 Laplace(u) = relevance, in units of cells, insulated at the picture's edges, so that all heat stays in
    and the sum of u is that of relevance. It is solved exactly, in the cosine basis. Length 0 is GridTopK.

    Args:
        length: how far heat spreads, in cells.

    Source: the screened Poisson equation; Crank, "The Mathematics of Diffusion" (1975).
    """

    # No cell gains more from heat at a place than the place itself.
    monotone = True
    nested = True
    finest = True

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean", length: float = 2.0) -> None:
        super().__init__(budget, patch, pool)
        self.length = checks.between(length, "length", 0, 1e6)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = scene.grid
        self.enough(rows * columns)
        heat = steady_state(scene.amounts().double(), self.length)
        # Where next to nothing arrives, rounding would decide: there it is nothing, and places come row by row.
        heat = heat.where(heat > _NOTHING * heat.amax((1, 2), keepdim=True), 0.0)
        scores, index = ordered(heat.float().flatten(1), self.budget)
        return scene.sites(0, index), scores


def steady_state(source: torch.Tensor, length: float) -> torch.Tensor:
    """[B, h, w] to the same: u - length^2 Laplace(u) = source, nothing passing the edges."""
    if length == 0:
        return source
    (by_row, rate_y), (by_column, rate_x) = (_cosines(n, source) for n in source.shape[-2:])
    waves = by_row @ source @ by_column.T
    damped = waves / (1 + length**2 * (rate_y[:, None] + rate_x))
    return by_row.T @ damped @ by_column


def _cosines(n: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The orthonormal cosine basis [n, n] of cells insulated at both ends (DCT-II), and minus the Laplacian of each."""
    k = torch.arange(n, dtype=like.dtype, device=like.device)
    basis = torch.cos(math.pi * k[:, None] * (k + 0.5) / n) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis, 2 - 2 * torch.cos(math.pi * k / n)
