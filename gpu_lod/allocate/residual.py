"""A smaller picture, and level-0 patches where that loses most."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.downsample import level_of, rows_of, tiling
from gpu_lod.allocate.energy import ROUNDING, checked, luma, over_patches, relevances
from gpu_lod.allocate.ordering import ordered, scored
from gpu_lod.allocate.scene import Scene
from gpu_lod.cached import constant
from gpu_lod.mipmap import reference
from gpu_lod.patch_grid import Pool
from gpu_lod.pyramid import level_sizes


@register
class Residual(Allocator):
    """Most of the tokens tile the whole picture evenly, as `Downsample` does; the others are the level-0 patches of
    what that loses most of.

    A patch is worth its relevance times the mean square, over its pixels, of what the luma differs by from itself at
    the level of the tiles, trilinear. What rounding to 8 bits would add is added to all, so that relevance decides
    where there is nothing to see. A picture small enough for tiles of level 0 has tiles alone. Tokens of both kinds are
    scored and ordered by the relevance at them, equal ones tiles first, then by worth; without relevance all score 1.

    The tiles are of a fractional level: a bias of -0.75 reads them sharper, and keeps more.

    Args:
        share: of the budget, for the tiles, from 0 to 1, rounded, at least one token. Photographs keep most of what a
            network sees in them at 0.9, print most of what can be read at 0.1.

    Source: a base layer and an enhancement where it counts, as in scalable video coding; Burt and Adelson, "The
        Laplacian Pyramid as a Compact Image Code" (1983) for what a level lacks.
    """

    needs: ClassVar[tuple[Need, ...]] = ("image",)
    monotone = True

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean", share: float = 0.9) -> None:
        super().__init__(budget, patch, pool)
        self.share = checks.between(share, "share", 0.0, 1.0)

    def work(self, scene: Scene) -> int:
        return scene.size[0] * scene.size[1]

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = scene.size
        there = scene.grid[0] * scene.grid[1]
        fine = min(self.budget - max(round(self.share * self.budget), 1), there)
        rows = rows_of(self.budget - fine, scene.size)
        if level_of(-(-(self.budget - fine) // rows), rows, scene.size, self.patch) == 0:  # tiles of patches as fine
            fine, rows = 0, rows_of(self.budget, scene.size)
        tiles = constant(scene.device, tiling, self.budget - fine, rows, height, width, self.patch)
        sites = tiles.expand(scene.batch, -1, -1)
        if fine:
            level = level_of((self.budget - fine) // rows, rows, scene.size, self.patch)
            worth = relevances(scene, 0)[0] * (_lost(scene, level) + ROUNDING)
            index = ordered(worth.detach().flatten(1), fine)[1]
            sites = torch.cat([sites, scene.sites(0, index)], dim=1)
        return scored(scene, sites)


def _lost(scene: Scene, level: float) -> torch.Tensor:
    """[B, Hg, Wg]: mean squares over level-0 patches of what the luma loses at a level."""
    whole = luma(scene).detach()
    last = len(level_sizes(*scene.size)) - 1
    first, share = (int(level), level - int(level)) if level < last else (last, 0.0)
    chain = reference(whole, min(first + 2, last + 1))
    coarse = _at_full_size(chain[first], scene.size)
    if share:  # not into what may be the picture's luma itself
        coarser = _at_full_size(chain[first + 1], scene.size)
        coarse = torch.lerp(coarse, coarser, share, out=coarser)
    return checked(over_patches((whole - coarse).square_()[:, 0], scene, 0, 1, scene.size))


def _at_full_size(level: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if level.shape[-2:] == size:
        return level
    return F.interpolate(level, size=size, mode="bilinear", align_corners=False)
