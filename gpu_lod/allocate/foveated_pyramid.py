"""Fine levels near the fixation and where there is detail, coarse ones elsewhere: a tree cut."""

from __future__ import annotations

from typing import ClassVar

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, Pool, Scene, coarser, register
from gpu_lod.allocate.tree_cut import tokens_of, tree_cut


@register
class FoveatedPyramid(Allocator):
    """The budgeted tree cut with benefit = detail x M(e): the relevance that a node holds, times cortical magnification
    about the fixation.

    Detail is the sum of relevance over the node's cells; e is the eccentricity of the node's nearest point, so that
    magnification never falls from a parent to the child that the fixation is in.
    Tokens cover the picture exactly once, but for the few detail cells that what is left of the budget goes to. Scores
    are the mean relevance of what a token covers, times M there.

    Args:
        e0: eccentricity of half magnification, in units of the longer side.
        max_level: level of the coarsest tokens; None lets a single token be the whole picture.
        Without a fixation, the peak of relevance is one (`find_fixations`).

    Source: Schwartz (1980) for M(e) = M0 / (e + e0), M0 = e0 here, so that M is 1 at the fixation.
    """

    takes: ClassVar[tuple[Need, ...]] = ("fixation",)

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        e0: float = 0.05,
        max_level: int | None = None,
    ) -> None:
        super().__init__(budget, patch, pool)
        self.e0 = checks.between(e0, "e0", 1e-6, 1e6)
        self.max_level = None if max_level is None else checks.integer(max_level, "max_level", at_least=0)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        fixation = scene.fixations()[:, 0] if scene.fixation is None else scene.fixation
        fixation = fixation.float()
        values = scene.amounts()
        rows, columns = scene.grid
        top = (max(rows, columns) - 1).bit_length()
        ones = torch.ones_like(values[:1])
        sums, counts = [values], [ones]
        for _ in range(top):
            sums.append(coarser(sums[-1], "sum"))
            counts.append(coarser(counts[-1], "sum"))
        magnified = [self._magnification(scene, level, fixation) for level in range(top + 1)]
        benefits = [total * m for total, m in zip(sums[1:], magnified[1:], strict=True)]
        scores = [total / count * m for total, count, m in zip(sums, counts, magnified, strict=True)]
        cut = tree_cut(benefits, scores[0], self.budget, self.max_level)
        return tokens_of(scene, cut, scores, self.budget)

    def _magnification(self, scene: Scene, level: int, fixation: torch.Tensor) -> torch.Tensor:
        """[B, h, w] at each node's nearest point."""
        height, width = scene.size
        longer, side = max(height, width), 2**level * self.patch
        offsets = []
        for n, cells, at in ((height, scene.grid[0], fixation[:, 1]), (width, scene.grid[1], fixation[:, 0])):
            begin = torch.arange(-(-cells // 2**level), device=scene.device) * side
            end = torch.clamp(begin + side, max=n)
            place = at[:, None] * n
            offsets.append(torch.clamp(torch.maximum(begin - place, place - end), min=0) / longer)
        eccentricity = torch.sqrt(offsets[0][:, :, None] ** 2 + offsets[1][:, None, :] ** 2)
        return self.e0 / (eccentricity + self.e0)
