"""Sites about the fixation as the visual cortex magnifies, with a share of them in the fovea."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from gpu_lod import by_kernel, checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.ordering import at_sites, ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.cached import numbers
from gpu_lod.cortical_sites import (
    Candidates,
    box_of,
    by_one_launch,
    every_candidate,
    first_to_enter,
    magnified,
    most_candidates,
    sites_about,
)
from gpu_lod.errors import InputError
from gpu_lod.kernels import cortical
from gpu_lod.kernels import device as kernels
from gpu_lod.patch_grid import Pool

E0_RANGE = 1e-3, 1e3
"""Eccentricities of half magnification that are tried, in units of the fovea's radius: from a density of nearly
1 / e^2 to one that is all but even."""

RADIUS_RANGE = 1e-3, 10.0
"""Of the fovea: below, fp32 no longer tells its sites apart; above, it is more than any picture."""

_TRIED, _ROUNDS = cortical.TRIES, 3
"""How many of them at once, and how often, each time between the two that the number asked for lies between. In the
end they are 13.8 / 32^3 of their logarithm apart: among thousands of sites, one at most crosses the fovea's border."""


@register
class LogPolar(Allocator):
    """`cortical_sites` about the fixation, with the e0 at which the fovea holds its share of the tokens.

    The density of sites falls with the square of magnification, M(e) = e0 / (e + e0): the smaller e0 is, the more of
    them are near the fixation. So e0 is found for each image, by search: the one at which round(fovea K) of the K sites
    are within the radius, exactly (within one, if K is ten thousand and more), wherever the fixation is, a corner too.
    No e0 gives a share beyond what is possible: less than the fovea's part of the picture's area (e0 is then the
    largest there is, and sites are even) or, with the default radius, more than about three quarters (the smallest);
    the nearest share is taken.
    Levels are those of `cortical_sites`: patches cover the distance between neighbours. Scores are the relevance of the
    level-0 patch that a site is in, times M there.

    Units: radius and e0 in units of the longer side.

    Args:
        fovea: the share of the tokens that are in the fovea, in [0, 1].
        radius: of the fovea, in `RADIUS_RANGE`.
        Without a fixation, the peak of relevance is one (`find_fixations`).

    Source: Schwartz (1980) for M; Vogel (1979) for the spiral; see `cortical_sites`.
    """

    takes: ClassVar[tuple[Need, ...]] = ("fixation",)
    follows: ClassVar[bool] = True

    def __init__(
        self, budget: int = 273, patch: int = 14, pool: Pool = "mean", fovea: float = 0.3, radius: float = 0.1
    ) -> None:
        super().__init__(budget, patch, pool)
        self.fovea = checks.number(fovea, "fovea")
        self.radius = checks.number(radius, "radius")
        if not 0 <= self.fovea <= 1:
            raise InputError(f"fovea is {fovea}; expected a share of the tokens, in [0, 1].")
        low, high = RADIUS_RANGE
        if not low <= self.radius <= high:
            raise InputError(
                f"radius is {radius}; expected a positive part of the longer side, {low:g} to {high:g}. From 1.5 on "
                "the fovea is the whole picture, wherever the fixation is."
            )

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        fixation = scene.fixations()[:, 0] if scene.fixation is None else scene.fixation
        points, amounts = fixation.double(), scene.amounts()
        count = round(self.fovea * self.budget)
        among = None
        if not by_kernel.usable(points):
            among = every_candidate(points, scene.size, self.budget, _TRIED * len(points))
        e0 = foveal_e0(points.detach(), scene.size, self.budget, count, self.radius, among)
        found = by_one_launch(points, self.budget, scene.size, self.patch, e0, amounts)
        if found is None:
            sites = sites_about(points, self.budget, scene.size, self.patch, e0, among)
            away = ((sites[..., :2] - points[:, None]) * box_of(points, scene.size)).norm(dim=-1)
            found = sites, at_sites(scene, amounts, sites) * (e0 / (away + e0)).float()
        scores, order = ordered(found[1], self.budget)
        return found[0].gather(1, order[..., None].expand(-1, -1, 3)).float(), scores


def foveal_e0(
    points: torch.Tensor,
    size: tuple[int, int],
    budget: int,
    count: int,
    radius: float,
    among: Candidates | None = None,
) -> torch.Tensor:
    """[B, 1] the e0 at which `count` of the sites about points [B, 2], in float64, are within the radius.

    Convention: with e0 the density changes continuously, so that sites enter and leave the fovea one by one: where one
        end of the range has fewer than wanted, and the other as many or more, there is an e0 between with the number.
    """
    if by_kernel.usable(points):
        e0 = by_kernel.attempt(
            points.device,
            lambda: cortical.foveal_e0(
                kernels.device_of(points),
                points,
                size,
                budget,
                most_candidates(size, budget),
                count=count,
                radius=radius,
                between=(E0_RANGE[0] * radius, E0_RANGE[1] * radius),
                rounds=_ROUNDS,
            ),
        )
        if e0 is not None:
            return e0
    border = numbers(radius, points.dtype, points.device)
    ends = tuple(math.log(end * radius) for end in E0_RANGE)
    tried = numbers(ends, points.dtype, points.device).expand(len(points), 2)
    part = torch.linspace(0, 1, _TRIED, dtype=points.dtype, device=points.device)
    limit = None
    for _ in range(_ROUNDS):
        tried = torch.lerp(tried[:, :1], tried[:, -1:], part)
        index, enters, last = first_to_enter(points, size, budget, tried.exp(), limit, among)
        density = last.mean(-1, keepdim=True)
        near = index[:, None] + 0.5 <= density * magnified(border, tried.exp()[..., None])
        within = ((enters <= density) & near).sum(-1)
        about = [(within > count).sum(1) - 1, _TRIED - (within < count).sum(1)]
        error = (within - count).abs()
        best = error == error.amin(1, keepdim=True)
        # The middle of those that do, so that no site is at the border itself.
        middle = (best.cumsum(1) >= (best.sum(1, keepdim=True) + 1) // 2).byte().argmax(1, keepdim=True)
        found = tried.gather(1, middle)
        between = torch.stack(about, dim=1).clamp(0, _TRIED - 1)
        tried, limits = tried.gather(1, between), last[..., 1].log().gather(1, between)
        limit = torch.lerp(limits[:, :1], limits[:, -1:], part).exp()
    return found.exp()
