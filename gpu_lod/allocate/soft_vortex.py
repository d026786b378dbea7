"""Virtual tokens along vortices: each a blend of the patches about its place."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import nn

from gpu_lod import by_kernel, checks, dispatch, precision
from gpu_lod.allocate.base import register
from gpu_lod.allocate.learned import Learned, by_score, convex, even_points, log_relevance, parameter
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.voronoi import distances
from gpu_lod.cached import numbers
from gpu_lod.errors import InputError
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels.vortices import vortices
from gpu_lod.patch_grid import Pool

INNERMOST = 0.05
"""Where a spiral begins, in units of the vortex's radius."""


@register
class SoftVortex(Learned):
    """K virtual tokens, each a convex blend of level-0 patches at its depth along a vortex.

    A vortex is a logarithmic spiral about its centre, from 1/20 of its radius out to the radius: at depth t in (0, 1)
    it is at r = radius 20^(t - 1) and has turned `twist` t times. Tokens are dealt to the vortices in turn and stand at
    depths (j + 1/2) / n, so there are exactly K. A token weighs the patches by
    relevance^strength exp(-distance^2 / (2 s^2)), in sum 1, with s^2 = (`width` r)^2 + (half a patch)^2: the deeper,
    the wider.

    A token's site is the mean position of what it blends, its level half the log2 of the effective number of patches,
    1 / sum w^2, and its score the relevance that it gathers, sum w x relevance. All are differentiable in the relevance
    and the parameters; `TokenSet.blend` does the same to features of patches. Two tokens may stand at the same site.

    Parameters: centres as the logits of (x, y), the logarithms of radii, strengths, and twists in turns.

    Args:
        vortices: how many; spread evenly to begin with.
        radius: to begin with, in units of the longer side.
        twist: to begin with.
        width: s over r.
    """

    blends: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    moves: ClassVar[bool] = True
    learns: ClassVar[tuple[str, ...]] = ("centre_logits", "log_radii", "strengths", "twists")

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        vortices: int = 8,
        radius: float = 0.3,
        twist: float = 3.0,
        width: float = 0.25,
    ) -> None:
        super().__init__(budget, patch, pool)
        vortices = checks.integer(vortices, "vortices", at_least=1, at_most=1024)
        radius = checks.between(radius, "radius", 1e-6, 1e6)
        twist = checks.between(twist, "twist", -1e3, 1e3)
        self.width = checks.between(width, "width", 1e-6, 1e6)
        self._made_with = {"vortices": vortices, "radius": radius, "twist": twist}
        self.centre_logits = parameter(even_points(vortices).logit())
        self.log_radii = nn.Parameter(torch.full((vortices,), math.log(radius), dtype=torch.float32))
        self.strengths = nn.Parameter(torch.ones(vortices, dtype=torch.float32))
        self.twists = nn.Parameter(torch.full((vortices,), twist, dtype=torch.float32))

    @property
    def centres(self) -> torch.Tensor:
        """[V, 2], (x, y) in [0, 1]."""
        return self.centre_logits.sigmoid()

    def work(self, scene: Scene) -> int:
        return self.budget * scene.grid[0] * scene.grid[1]

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        height, width = scene.size
        longer = max(height, width)
        box = numbers((width, height), torch.float32, scene.device) / longer
        anchors, radii, vortex = self._anchors(box)
        squares = (self.width * radii).square() + (0.5 * scene.patch / longer) ** 2
        strengths = self.strengths.float()[vortex]
        found = self._by_kernel_of(scene, anchors, squares, strengths)
        sites, scores, weights = found or _blends(scene, anchors, squares, strengths)
        if checks.readable(sites) and not torch.isfinite(checks.values(sites)).all():
            raise InputError(
                "the radii or twists of SoftVortex are so large that its sites are NaN. Load parameters of before they "
                "diverged, and train at a lower rate."
            )
        return sites, scores, weights

    @staticmethod
    def _by_kernel_of(
        scene: Scene, anchors: torch.Tensor, squares: torch.Tensor, strengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """As `_blends`, by two launches; None where torch is to do it, as for gradients."""
        relevance, given = scene.relevance, (anchors, squares, strengths)
        if dispatch.needs_grad(relevance, *given) or not by_kernel.usable(relevance, *given):
            return None
        return by_kernel.attempt(
            scene.device,
            lambda: vortices(
                kernels.device_of(relevance),
                log_relevance(scene).float(),
                scene.amounts().flatten(1),
                *given,
                scene.centres(),
                scene.size,
            ),
        )

    def _anchors(self, box: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where tokens stand [K, 2], (x, y) in parts of width and height; how far from the centre [K], in units of the
        longer side; and their vortex [K]."""
        index = torch.arange(self.budget, device=box.device)
        count = len(self.log_radii)
        vortex = index % count
        members = (self.budget - 1 - vortex) // count + 1
        depth = ((index // count).float() + 0.5) / members
        radii = (self.log_radii.float()[vortex] + (1 - depth) * math.log(INNERMOST)).exp()
        angle = 2 * math.pi * self.twists.float()[vortex] * depth
        direction = torch.stack([angle.cos(), angle.sin()], dim=-1)
        return self.centres.float()[vortex] + radii[:, None] * direction / box, radii, vortex


def _blends(
    scene: Scene, anchors: torch.Tensor, squares: torch.Tensor, strengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3], scores [B, K] and weights [B, K, Hg Wg] of tokens at anchors [K, 2]."""
    near = scene.common("near", lambda: distances(scene, anchors[None]) / (-2 * squares[:, None]))
    parts, total, _ = convex(torch.addcmul(near, strengths[:, None], log_relevance(scene).float()[:, None]))
    amounts = scene.amounts().flatten(1)[:, None]
    least = amounts.amin(-1, keepdim=True)
    # From the least on, so that equal relevance gives equal scores to the last bit, and an order of its own.
    relevance = ((parts * (amounts - least)).sum(-1, keepdim=True) / total + least)[..., 0]
    scores, weights = by_score(relevance, parts / total)
    places = scene.sites(0, torch.arange(scene.grid[0] * scene.grid[1], device=scene.device))[:, :2]
    # Rounding may step over the edge.
    centre = means(precision.factor(weights), precision.factor(places)).to(places.dtype).clamp(0, 1)
    levels = -torch.linalg.vector_norm(weights, dim=-1, keepdim=True).log2()
    return torch.cat([centre, levels.clamp(min=0)], dim=-1), scores, weights


def means(weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """weights [B, K, N] @ places [N, 2]."""
    if checks.on_host(weights):
        if torch.compiler.is_compiling():
            return weights @ places
        # An image at a time: libraries add in other orders for other numbers of rows, and sites know no other images.
        return torch.stack([torch.mm(rows, places) for rows in weights])
    # cuBLAS multiplies by a matrix of two columns at a tenth of the speed of memory, and by a vector at all of it.
    rows = weights.flatten(0, 1)
    return torch.stack([torch.mv(rows, column) for column in places.unbind(1)], dim=1).unflatten(0, weights.shape[:2])
