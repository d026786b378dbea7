"""Spirals about the peaks of relevance, tight where relevance is dense and loose where it is sparse."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, register
from gpu_lod.allocate.peak_cells import RAYS, PeakCells, vogel
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError
from gpu_lod.patch_grid import Pool

STEPS = 64
"""Of a ray from a peak to the border of its cell."""


@register
class Whirlwind(Allocator):
    """`Spiral` of kind "fibonacci", wound by relevance: the areal density of sites is, place by place, proportional to
    local relevance plus a floor.

    Along each ray from the peak, the density (relevance is bilinear between the centres of the grid's cells, the last
    of which may reach over the picture) is integrated over the area, N(r) = integral of density(s) s ds; site i stands
    at r = N^-1((i + 1/2) / c) along its own ray, the first at the peak, with the c at which exactly the peak's share is
    inside its cell. So turns are close where relevance is dense, in that direction alone, and far from each other where
    it is sparse; the radial law of a disc would average relevance over all directions. Rays are tabled: each cell's
    128, in 64 steps, and a site follows the one nearest to it.
    Levels are those at which P samples span the distance of neighbours, the root of the area for each site; scores are
    the relevance of the level-0 patch that a site is in.

    Args:
        peaks: how many (`find_fixations`).
        floor: what is added to relevance, in units of its mean over the image (least value 0, if it was negative): the
            larger, the more even.

    Source: Vogel (1979) for the angles.
    """

    def __init__(
        self, budget: int = 273, patch: int = 14, pool: Pool = "mean", peaks: int = 8, floor: float = 0.1
    ) -> None:
        super().__init__(budget, patch, pool)
        self.peaks = checks.integer(peaks, "peaks", at_least=1, at_most=1024)
        self.floor = checks.number(floor, "floor")
        if not 0 < self.floor <= 1e6:
            raise InputError(f"floor is {floor}; expected a positive part of the mean relevance, at most 1e6.")

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        cells = PeakCells(scene, self.peaks, self.budget)
        made = cells.launched("whirlwind", self.floor)
        if made is not None:
            return made
        rays = cells.reach(cells.rays)
        density = self._density(cells, rays)
        edges = torch.linspace(0, 1, STEPS + 1, dtype=rays.dtype, device=rays.device).square()
        # A ray's reach is 1 here, and a site's number is scaled to it.
        inside = (density * edges.diff() / 2).cumsum(-1)
        mass = inside[..., -1]
        index, needed = cells.indices(mass * rays.square())
        angle, within = vogel(index)
        ray = (angle / (2 * math.pi) % 1 * RAYS).long().clamp(max=RAYS - 1)
        reach = cells.reach(angle)
        chosen, scale = cells.fill(within / (mass[..., ray] * reach.square()), needed)
        reach = reach.gather(-1, chosen)
        total = mass.gather(-1, ray[chosen])
        part = within[chosen] / (scale * reach.square() * total)
        row, area = _inverse(inside / mass[..., None], ray[chosen], part.clamp(max=1), edges)
        found = density.flatten(2).gather(-1, row)
        return cells.tokens(angle[chosen], area.sqrt() * reach, (2 * math.pi / (scale * found)).sqrt())

    def _density(self, cells: PeakCells, rays: torch.Tensor) -> torch.Tensor:
        """[B, S, RAYS, STEPS] in the middle of each step."""
        scene = cells.scene
        values = scene.amounts().detach()  # sites pass no gradient
        values = values / values.mean((1, 2), keepdim=True) + self.floor
        steps = (torch.arange(STEPS, dtype=values.dtype, device=rays.device) + 0.5) / STEPS
        places = []
        for axis, along in ((0, cells.rays.cos()), (1, cells.rays.sin())):
            # Of the grid, which may reach over the image's far edges.
            part = scene.size[1 - axis] / (scene.grid[1 - axis] * scene.patch)
            step = (2 * part / cells.box[axis] * along * rays).float()
            places.append(step[..., None] * steps + (2 * part * cells.points[..., axis, None, None] - 1).float())
        place = torch.stack(places, dim=-1)
        read = F.grid_sample(values[:, None], place.flatten(1, 2), padding_mode="border", align_corners=False)
        return read[:, 0].unflatten(1, rays.shape[1:]).double()


def _inverse(
    inside: torch.Tensor, ray: torch.Tensor, part: torch.Tensor, edges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a ray has a part of its mass within: the step [B, S, N], numbered through all rays of a cell, and the
    square of the radius, the cell's border being 1.

    Args:
        inside: [B, S, RAYS, STEPS], the part within each step's end.
    """
    table = (inside + torch.arange(RAYS, device=ray.device)[:, None]).flatten(2)  # rises through all rays
    step = torch.searchsorted(table, ray + part).minimum(ray * STEPS + STEPS - 1).maximum(ray * STEPS)
    number = step - ray * STEPS
    end = inside.flatten(2).gather(-1, step)
    begin = torch.where(number > 0, inside.flatten(2).gather(-1, (step - 1).clamp(min=0)), 0.0)
    along = ((part - begin) / (end - begin)).clamp(0, 1)
    return step, torch.lerp(edges[number], edges[number + 1], along)
