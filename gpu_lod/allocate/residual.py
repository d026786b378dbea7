"""A smaller picture, and level-0 patches where that loses most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.downsample import level_of, rows_of, tiling
from gpu_lod.allocate.energy import ROUNDING, checked, luma, over_patches, relevances
from gpu_lod.allocate.ordering import ordered, scored
from gpu_lod.allocate.scene import Scene
from gpu_lod.cached import constant, numbers
from gpu_lod.mipmap import reference
from gpu_lod.patch_grid import Pool
from gpu_lod.pyramid import level_sizes

SHARES = tuple(tenth / 10 for tenth in range(10, 0, -1))
"""What is tried; of equally good ones the first is taken, which is tiles alone."""
_STABLE = 0.03**2
"""Added to variances that others are divided by: that of the structural similarity, of pictures from 0 to 1."""


@register
class Residual(Allocator):
    """Some of the tokens tile the whole picture evenly, as `Downsample` does; the others are the level-0 patches of
    what that loses most of.

    A patch is worth its relevance times the mean square, over its pixels, of what the luma differs by from itself at
    the level of the tiles, trilinear. What rounding to 8 bits would add is added to all, so that relevance decides
    where there is nothing to see. A picture small enough for tiles of level 0 has tiles alone. Tokens of both kinds are
    scored and ordered by the relevance at them, equal ones tiles first, then by worth; without relevance all score 1.

    How many of each there are is the picture's matter, of ten shares the one that leaves least: of each patch without
    a token of its own its relevance times n / (n + s), n being what it loses and s its variance. A photograph, most of
    which a coarser level shows, gets tiles; print, of which that shows nothing, patches. (By the mean squares alone
    photographs would get patches too: more decibels, and fewer of the features that a network finds.)

    The tiles are of a fractional level: a bias of -0.75 reads them sharper, and keeps more.

    Args:
        share: of the budget, for the tiles, from 0 to 1, rounded, at least one token; None is what the picture asks
            for.

    Source: a base layer and an enhancement where it counts, as in scalable video coding; Burt and Adelson, "The
        Laplacian Pyramid as a Compact Image Code" (1983) for what a level lacks; n / (n + s) is what a Wiener filter
        would take away.
    """

    needs: ClassVar[tuple[Need, ...]] = ("image",)
    monotone = True

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean", share: float | None = None) -> None:
        super().__init__(budget, patch, pool)
        self.share = None if share is None else checks.between(share, "share", 0.0, 1.0)

    def work(self, scene: Scene) -> int:
        return scene.size[0] * scene.size[1]

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        shares = SHARES if self.share is None else (self.share,)
        splits = tuple(dict.fromkeys(self._split(scene, share) for share in shares))
        tiles = constant(scene.device, _tilings, self.budget, splits, *scene.size, self.patch)
        most = max(fine for fine, _ in splits)
        if not most:
            return scored(scene, tiles.expand(scene.batch, -1, -1))
        levels = [self._level(scene, *split) for split in splits]
        lost, variance = _lost(scene, levels, among=len(splits) > 1)
        relevance = relevances(scene, 0)[0].flatten(1).detach()
        worth = relevance * (lost + ROUNDING)
        index = ordered(worth.flatten(0, 1), most)[1].unflatten(0, worth.shape[:2])
        fine = numbers(tuple(fine for fine, _ in splits), torch.int64, scene.device)
        if variance is None:
            best = fine.new_zeros(scene.batch)
        else:
            missed = (relevance * (lost / (lost + variance + _STABLE))).double()
            taken = torch.arange(most, device=scene.device) < fine[:, None, None]
            best = (missed.sum(2) - (missed.gather(2, index) * taken).sum(2)).argmin(0)
        place, count = torch.arange(self.budget, device=scene.device), self.budget - fine[best, None]
        own = index[best, torch.arange(scene.batch, device=scene.device)]
        patches = scene.sites(0, own.gather(1, (place - count).clamp(0, most - 1)))
        return scored(scene, torch.where((place < count)[..., None], tiles[best], patches))

    def _split(self, scene: Scene, share: float) -> tuple[int, int]:
        """How many patches there are of level 0, and in how many rows the tiles are."""
        fine = min(self.budget - max(round(share * self.budget), 1), scene.grid[0] * scene.grid[1])
        rows = rows_of(self.budget - fine, scene.size)
        if self._level(scene, fine, rows) == 0:  # tiles of patches as fine
            return 0, rows_of(self.budget, scene.size)
        return fine, rows

    def _level(self, scene: Scene, fine: int, rows: int) -> float:
        return level_of(-(-(self.budget - fine) // rows), rows, scene.size, self.patch)


def _tilings(budget: int, splits: Sequence[tuple[int, int]], height: int, width: int, patch: int) -> torch.Tensor:
    """[splits, budget, 3]: the tiles of each, and as much as is missing."""
    return torch.stack(
        [F.pad(tiling(budget - fine, rows, height, width, patch), (0, 0, 0, fine)) for fine, rows in splits]
    )


def _lost(scene: Scene, levels: Sequence[float], among: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of level-0 patches the mean squares of what the luma loses at each level, [levels, B, Hg Wg]; and, to choose
    among these, its variance [B, Hg Wg].

    Between two whole levels it is a square of their mix, and so is its mean: each of them is enlarged once.
    """
    whole = luma(scene).detach()
    last = len(level_sizes(*scene.size)) - 1
    levels = [min(level, float(last)) for level in levels]
    low, high = int(min(levels)), math.ceil(max(levels))
    chain = reference(whole, high + 1)

    def pooled(values: torch.Tensor) -> torch.Tensor:
        return over_patches(values[:, 0], scene, 0, 1, scene.size).flatten(1)

    squares: list[torch.Tensor] = []
    products: list[torch.Tensor] = []
    finer: torch.Tensor | None = None
    for texels in chain[low:]:
        coarse = F.interpolate(texels, size=scene.size, mode="bilinear", align_corners=False)
        difference = coarse.sub_(whole)  # its own memory, of the picture's own level too
        if finer is not None:
            products.append(pooled(finer.mul_(difference)))
        finer = difference
        squares.append(checked(pooled(difference.square())))
    found = []
    for level in levels:
        first, share = int(level), level - int(level)
        mixed = squares[first - low]
        if share:
            pair = 2 * share * (1 - share) * products[first - low]
            mixed = ((1 - share) ** 2 * mixed + share**2 * squares[first - low + 1] + pair).clamp(min=0)
        found.append(mixed)
    if not among:
        return torch.stack(found), None
    variance = pooled(whole.square()) - pooled(whole).square()
    return torch.stack(found), checked(variance).clamp(min=0)
