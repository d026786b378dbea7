"""Fine levels near the fixation and where there is detail, coarse ones elsewhere: a tree cut."""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.tree_cut import apart, in_a_row, tokens_of, tree_cut
from gpu_lod.cached import constant
from gpu_lod.patch_grid import Pool, coarser


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
        rows, columns = scene.grid
        top = (max(rows, columns) - 1).bit_length()
        sizes = tuple((-(-rows // 2**level), -(-columns // 2**level)) for level in range(top + 1))
        sums = [scene.amounts()]
        for _ in range(top):
            sums.append(coarser(sums[-1], "sum"))
        # All levels at once: a launch, and a call, costs more than what it does for one of them.
        total, magnified = in_a_row(sums), self._magnification(scene, fixation, sizes)
        scores = apart(total / constant(scene.device, _covered, sizes) * magnified, sizes)
        cut = tree_cut(apart(total * magnified, sizes)[1:], scores[0], self.budget, self.max_level)
        return tokens_of(scene, cut, scores, self.budget)

    def _magnification(self, scene: Scene, fixation: torch.Tensor, sizes: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """[B, N] at the nearest point of each node, in a row."""
        longer = max(scene.size)
        squares = []
        for side, (n, at) in enumerate(zip(scene.size, (fixation[:, 1], fixation[:, 0]), strict=True)):
            begin, end = constant(scene.device, _spans, n, scene.patch, tuple(size[side] for size in sizes))
            place = at[:, None] * n
            offset = torch.maximum(begin - place, place - end).clamp(min=0) / longer
            squares.append(offset.square().index_select(1, constant(scene.device, _along, sizes, side)))
        eccentricity = torch.sqrt(squares[0] + squares[1])
        return self.e0 / (eccentricity + self.e0)


def _spans(n: int, patch: int, counts: tuple[int, ...]) -> torch.Tensor:
    """[2, M] where nodes begin and end along a side of n pixels, of so many a level, finest first."""
    begins = [i * patch << level for level, count in enumerate(counts) for i in range(count)]
    ends = [min((i + 1) * patch << level, n) for level, count in enumerate(counts) for i in range(count)]
    return torch.tensor([begins, ends], dtype=torch.float32, device="cpu")


def _along(sizes: tuple[tuple[int, int], ...], side: int) -> torch.Tensor:
    """[N] which of those spans, along rows (0) or columns (1), each node in a row has."""
    starts = [0, *accumulate(size[side] for size in sizes)]
    found = []
    for start, (rows, columns) in zip(starts, sizes, strict=False):
        found.append(np.tile(np.arange(columns), rows) if side else np.repeat(np.arange(rows), columns))
        found[-1] += start
    return torch.from_numpy(np.concatenate(found[::-1]))


def _covered(sizes: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """[N] cells that each node in a row covers."""
    found = []
    for level, (rows, columns) in enumerate(sizes):
        down, across = (
            np.minimum(1 << level, cells - (np.arange(count) << level))
            for cells, count in zip(sizes[0], (rows, columns), strict=True)
        )
        found.append(np.multiply.outer(down, across).ravel())
    return torch.from_numpy(np.concatenate(found[::-1]).astype(np.float32))
