"""Sites along spirals about the peaks of relevance."""

from __future__ import annotations

import math
from typing import Literal

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.peak_cells import PeakCells, vogel
from gpu_lod.allocate.scene import Scene
from gpu_lod.patch_grid import Pool

Kind = Literal["golden", "archimedean", "fibonacci"]

_PITCH = 2 * math.log((1 + math.sqrt(5)) / 2) / math.pi
"""d ln r / d angle of the golden spiral, which grows by the golden ratio each quarter turn."""


@register
class Spiral(Allocator):
    """Sites along a spiral about each peak of relevance, from the peak to the borders of its Voronoi cell.

    A peak gets tokens by the relevance that its cell holds (largest remainder). The first stands at the peak; those
    that would be outside the cell, so outside the image too, are left out, and the spiral goes on: its scale is the one
    at which exactly the peak's share is inside. Cells have no site in common, so no two spirals have.

    Convention: angles go from +x towards +y (y down). Kinds are
        "golden": logarithmic; r grows by the golden ratio each quarter turn. Sites are as dense as 1 / r^2 from one
            patch off the peak (a quarter of the cell's mean radius, where that is less) outward: neighbours are g r
            apart, g being such that the cell takes the share. One arm's turns are 6.9-fold apart, so the spiral has as
            many arms, evenly turned, as make arms as far from each other as sites along them are, to the nearest whole
            number; sites of all arms alternate, each farther out than the one before.
        "archimedean": r grows by as much each turn as sites are apart along the arm, everywhere: an even density.
        "fibonacci": Vogel's sunflower; each site a golden angle on, r as the root of how many there are: an even
            density, with neighbours as far in every direction.
    Levels are those at which P samples span the distance of neighbours, the root of the area for each site; level 0
    where they are nearer than P pixels. Scores are the relevance of the level-0 patch that a site is in.

    Args:
        kind: of spiral.
        peaks: how many (`find_fixations`).

    Source: Vogel, "A Better Way to Construct the Sunflower Head" (1979), for "fibonacci".
    """

    def __init__(
        self, budget: int = 273, patch: int = 14, pool: Pool = "mean", kind: Kind = "golden", peaks: int = 8
    ) -> None:
        super().__init__(budget, patch, pool)
        self.kind: Kind = checks.choice(kind, "kind", ("golden", "archimedean", "fibonacci"))
        self.peaks = checks.integer(peaks, "peaks", at_least=1, at_most=1024)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        cells = PeakCells(scene, self.peaks, self.budget)
        found = cells.launched(self.kind)
        if found is not None:
            return found
        return self._golden(cells) if self.kind == "golden" else self._even(cells)

    def _even(self, cells: PeakCells) -> tuple[torch.Tensor, torch.Tensor]:
        """Of an areal density: within r there are density r^2 / 2 sites."""
        index, needed = cells.indices(cells.reach(cells.rays).square() / 2)
        angle, within = vogel(index)
        if self.kind == "archimedean":
            angle, within = _archimedes(within)
        chosen, density = cells.fill(2 * within / cells.reach(angle).square(), needed)
        radius = (2 * within[chosen] / density).sqrt()
        return cells.tokens(angle[chosen], radius, (2 * math.pi / density).sqrt().expand_as(radius))

    def _golden(self, cells: PeakCells) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a density of 1 / r^2: within r there are ln(r / r_0) / growth sites."""
        rays = cells.reach(cells.rays)
        patch = self.patch / max(cells.scene.size)
        inner = (rays.log().mean(-1, keepdim=True).exp() / 4).clamp(max=patch)
        mass = (rays / inner).log().clamp(min=0)
        growth = mass.mean(-1, keepdim=True) / cells.counts[..., None].clamp(min=1)
        step = (2 * math.pi * growth).sqrt()
        arms = (2 * math.pi * math.sin(math.atan(_PITCH)) / step).round().clamp(min=1)
        index, needed = cells.indices(mass)
        angle = index * (growth / _PITCH + 2 * math.pi / arms)
        size = (index * growth).clamp(max=300).exp()  # what is beyond is far outside
        chosen, density = cells.fill(torch.where(index > 0, size, 0.0) / cells.reach(angle), needed)
        radius = size.gather(-1, chosen) / density
        return cells.tokens(angle.gather(-1, chosen), radius.where(chosen > 0, 0.0), step * radius)


def _archimedes(length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of sites along r = angle / 2 pi, whose turns are 1 apart, by the length of the arm to each; and the even
    law's number of sites within each."""
    angle = (4 * math.pi * length).sqrt()
    for _ in range(8):  # Newton; the length is convex in the angle
        found = (angle * (1 + angle.square()).sqrt() + angle.asinh()) / 2
        angle = angle - (found - 2 * math.pi * length) / (1 + angle.square()).sqrt()
    return angle, angle.square() / (4 * math.pi)
