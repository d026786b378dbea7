"""The whole picture at a lower resolution: the other baseline."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.ordering import scored
from gpu_lod.allocate.scene import Scene
from gpu_lod.cached import constant
from gpu_lod.patch_grid import Pool


@register
class Downsample(Allocator):
    """K patches that tile the picture evenly, whatever is in it: near-square cells in rows, K spread over the rows by
    largest remainder, so exactly K. Each is read at the level at which its P samples span the longer side of its cell.

    Scores, and with them the order, are the relevance that was given, of the grid's cells that the sites are in; equal
    ones, and all without relevance, which score 1, go row by row.

    Args:
        rows: how many; None makes the cells as square as may be.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean", rows: int | None = None) -> None:
        super().__init__(budget, patch, pool)
        self.rows = None if rows is None else checks.integer(rows, "rows", at_least=1, at_most=self.budget)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = scene.size
        rows = min(self.rows or rows_of(self.budget, scene.size), self.budget)  # a token bank may have lowered it
        sites = constant(scene.device, tiling, self.budget, rows, height, width, self.patch)
        return scored(scene, sites.expand(scene.batch, -1, -1))


def rows_of(budget: int, size: tuple[int, int]) -> int:
    """How many rows make cells as square as may be."""
    height, width = size
    return min(max(1, round(math.sqrt(budget * height / width))), budget)


def level_of(columns: int, rows: int, size: tuple[int, int], patch: int) -> float:
    """At which P samples span the longer side of a cell."""
    height, width = size
    return math.log2(max(1.0, max(width / columns, height / rows) / patch))


def tiling(budget: int, rows: int, height: int, width: int, patch: int) -> torch.Tensor:
    """Sites [K, 3] of cells in rows."""
    # Equal shares: floor of the cumulated share, which is largest remainder spread over the rows.
    ends = [budget * (row + 1) // rows for row in range(rows)]
    sites = []
    for row, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        columns = end - begin
        level = level_of(columns, rows, (height, width), patch)
        x = (torch.arange(columns, dtype=torch.float64, device="cpu") + 0.5) / columns
        y = torch.full_like(x, (row + 0.5) / rows)
        sites.append(torch.stack([x, y, torch.full_like(x, level)], dim=-1))
    return torch.cat(sites).float()
