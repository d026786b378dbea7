"""Fine levels near the fixation and where there is detail, coarse ones elsewhere: a tree cut."""

from __future__ import annotations

from typing import ClassVar

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, Pool, Scene, coarser, register
from gpu_lod.allocate.tree_cut import tokens_of, tree_cut
from gpu_lod.cached import constant


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
        magnified = self._magnification(scene, fixation, top)
        benefits = [total * m for total, m in zip(sums[1:], magnified[1:], strict=True)]
        scores = [total / count * m for total, count, m in zip(sums, counts, magnified, strict=True)]
        cut = tree_cut(benefits, scores[0], self.budget, self.max_level)
        return tokens_of(scene, cut, scores, self.budget)

    def _magnification(self, scene: Scene, fixation: torch.Tensor, top: int) -> list[torch.Tensor]:
        """[B, h, w] at each node's nearest point, levels 0 to `top`."""
        longer = max(scene.size)
        squares = []
        for n, cells, at in zip(scene.size, scene.grid, (fixation[:, 1], fixation[:, 0]), strict=True):
            counts = [-(-cells // 2**level) for level in range(top + 1)]
            begin, end = constant(scene.device, _spans, n, scene.patch, tuple(counts))
            place = at[:, None] * n
            offset = torch.maximum(begin - place, place - end).clamp(min=0) / longer
            squares.append(offset.square().split(counts, dim=1))
        eccentricity = [torch.sqrt(y[:, :, None] + x[:, None, :]) for y, x in zip(*squares, strict=True)]
        return [self.e0 / (e + self.e0) for e in eccentricity]


def _spans(n: int, patch: int, counts: tuple[int, ...]) -> torch.Tensor:
    """[2, N] where nodes begin and end along a side of n pixels, of so many a level, finest first."""
    begins = [i * patch << level for level, count in enumerate(counts) for i in range(count)]
    ends = [min((i + 1) * patch << level, n) for level, count in enumerate(counts) for i in range(count)]
    return torch.tensor([begins, ends], dtype=torch.float32, device="cpu")
