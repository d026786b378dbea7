"""The Voronoi cells of the peaks of relevance, and spirals that fill them: what Spiral and Whirlwind share."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from gpu_lod import by_kernel
from gpu_lod.allocate.ordering import at_sites, ordered, scored
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import shared_out
from gpu_lod.allocate.voronoi import owners
from gpu_lod.cortical_sites import GOLDEN_ANGLE, box_of, reach
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels import spirals

RAYS = 128
"""Directions in which a cell is looked at."""

_MARGIN = 1 - 1e-5
"""Of the way to a cell's border is where it ends, so that no two cells have a site in common, in fp32 either."""

_SPARE = 1.25, 16
"""Candidates beyond those that an even share of the directions asks for: a factor, and a number."""


class PeakCells:
    """The cells of the peaks of each image, as their peaks see them: how far they reach in each direction. Being
    convex, they are no more than that.

    Units: lengths are in units of the longer side, so that distances are in pixels' proportions.

    Attributes:
        counts: [B, S], the tokens of each peak: the budget shared out by the relevance that its cell holds, largest
            remainder, at least one for each cell that holds the centre of a patch (the heaviest, if there are not
            enough).
        weight: [B, S], that relevance, in float64.
        points: [B, S, 2], in float64.
    """

    def __init__(self, scene: Scene, peaks: int, budget: int) -> None:
        self.scene, self.budget = scene, budget
        peaks = min(peaks, scene.grid[0] * scene.grid[1])
        self._peaks = scene.fixations(peaks)
        self.weight, room = _held(scene, self._peaks, budget)
        self.counts = shared_out(self.weight, room, budget)
        self.points = self._peaks.double()
        self.box = box_of(self.points, scene.size)

    @cached_property
    def rays(self) -> torch.Tensor:
        """Angles of directions, evenly all around, [RAYS]."""
        numbers = torch.arange(RAYS, dtype=torch.float64, device=self.scene.device)
        return (numbers + 0.5) * (2 * math.pi / RAYS)

    def launched(self, kind: str, floor: float = 0.0) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What `tokens` gives of a spiral of one of `sources.SPIRALS`, without asking how many sites there are to look
        at; None where no kernel makes it.

        Args:
            floor: of a "whirlwind", as `Whirlwind` has it.
        """
        scene, points = self.scene, self._peaks
        if not by_kernel.usable(points, self.counts):
            return None
        amounts, device = scene.amounts(), kernels.device_of(points)
        given = points, self.counts, self.budget, scene.size, scene.patch, amounts, self.weight, floor
        sites = by_kernel.attempt(points.device, lambda: spirals.spirals(device, kind, *given), waits=True)
        if sites is None:
            return None
        sites, scores = scored(scene, sites)
        return sites.float(), scores

    def reach(self, angle: torch.Tensor) -> torch.Tensor:
        """[B, S, N] how far each cell reaches at angles [N] or [B, S, N], from +x towards +y."""
        across, down = angle.cos(), angle.sin()
        direction = torch.stack([across, down], dim=-1).expand(*self.points.shape[:2], -1, 2)
        edge = reach(self.points.flatten(0, 1), direction.flatten(0, 1), self.box).unflatten(0, self.points.shape[:2])
        at = self.points * self.box
        for other in range(at.shape[1]):
            apart = at[:, other, None] - at
            half = apart.square().sum(-1, keepdim=True) / 2
            # A peak that stands where another one does, or is the same, sets no border; nor does one that is behind.
            half = torch.where(half > 0, half, math.inf)
            towards = across * apart[..., :1] + down * apart[..., 1:]
            edge = torch.minimum(edge, half / towards.clamp(min=1e-300))
        return edge * _MARGIN

    def indices(self, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sites of a spiral to look at, [N], and how many of these each cell does, [B, S, 1].

        Args:
            mass: [B, S, RAYS], the law of density integrated from the peak to the cell's border along each ray.
        """
        factor, more = _SPARE
        ratio = mass.amax(-1, keepdim=True) / mass.mean(-1, keepdim=True)
        needed = (ratio * factor * self.counts[..., None]).ceil().long() + more
        return torch.arange(int(needed.max()), dtype=torch.float64, device=mass.device), needed

    def fill(self, enters: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sites of each spiral that are inside its cell at the density at which its share is: their indices
        [B, S, N], N the largest share, of which the first `counts` count, and the density [B, S, 1].

        Args:
            enters: [B, S, M], the density from which on each site is inside; it rises as the spiral is pushed outward.
        """
        looked = torch.arange(enters.shape[-1], device=enters.device) < needed
        found, order = torch.sort(torch.where(looked, enters, math.inf), dim=-1, stable=True)
        last = self.counts[..., None].clamp(min=1)
        taken = self._taken(int(self.counts.max()))
        index = torch.where(taken, order[..., : taken.shape[-1]], enters.shape[-1]).sort(dim=-1).values
        return index.where(taken, 0), (found.gather(-1, last - 1) + found.gather(-1, last)) / 2

    def _taken(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.counts.device) < self.counts[..., None]

    def tokens(
        self, angle: torch.Tensor, radius: torch.Tensor, spacing: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sites [B, K, 3] and scores [B, K] of what `fill` chose, all [B, S, N]. Levels are those at which P samples
        span the spacing, scores the relevance of the level-0 patch that a site is in; of equal ones the higher peak's
        come first, from the peak outward."""
        scene = self.scene
        at = self.points[:, :, None] + radius[..., None] * _direction(angle) / self.box
        level = (spacing * (max(scene.size) / scene.patch)).log2().clamp(min=0)
        sites = torch.cat([at, level[..., None]], dim=-1).flatten(1, 2)
        taken = self._taken(radius.shape[-1]).flatten(1)
        scores, order = ordered(at_sites(scene, scene.relevance, sites), taken.shape[1])
        first = torch.sort(taken.gather(1, order).byte(), dim=1, descending=True, stable=True).indices[:, : self.budget]
        order = order.gather(1, first)
        return sites.gather(1, order[..., None].expand(-1, -1, 3)).float(), scores.gather(1, first)


def _held(scene: Scene, points: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How much relevance the cell of each point holds, [B, S], float64; and room for `most` tokens, or none where it
    holds the centre of no patch."""
    amounts = scene.amounts()
    if amounts.dtype == points.dtype == torch.float32 and by_kernel.usable(points, amounts):
        held = by_kernel.attempt(
            points.device,
            lambda: spirals.cells(kernels.device_of(points), amounts, points, scene.size, scene.patch, most),
        )
        if held is not None:
            return held
    owner = owners(scene, points)
    zeros = torch.zeros(points.shape[:2], dtype=torch.float64, device=scene.device)
    weight = zeros.scatter_add(1, owner, amounts.flatten(1).double())
    room = zeros.scatter_add(1, owner, torch.ones_like(owner, dtype=torch.float64)) > 0
    return weight, room.long() * most


def vogel(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of the sites of a sunflower's spiral, and how many sites are nearer to its centre than each: that of an
    even law's disc, so i + 1/2, but for the first, which stands at the centre."""
    return index * GOLDEN_ANGLE, torch.where(index > 0, index + 0.5, 0.0)


def _direction(angle: torch.Tensor) -> torch.Tensor:
    return torch.stack([angle.cos(), angle.sin()], dim=-1)
