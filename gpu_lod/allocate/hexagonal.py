"""The densest even packing: rows of sites, every second one shifted by half a step."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from gpu_lod.allocate.base import Allocator, Need, Scene, register


@register
class Hexagonal(Allocator):
    """K patches on a hexagonal grid over the whole picture, whatever is in it: rows sqrt(3)/2 steps apart, shifted by a
    quarter of a step to the left and to the right in turn, K spread over the rows by largest remainder, so exactly K.

    Each is read at the level at which its P samples span a step. Scores are all 1, and the order is row by row.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = scene.size
        rows = min(max(1, round(math.sqrt(self.budget * height / width * 2 / math.sqrt(3)))), self.budget)
        ends = [self.budget * (row + 1) // rows for row in range(rows)]
        sites = []
        for row, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            columns = end - begin
            step = width / columns
            level = math.log2(max(1.0, max(step, height / rows) / self.patch))
            shift = 0.25 if row % 2 else -0.25
            x = (torch.arange(columns, dtype=torch.float64) + 0.5 + (shift if rows > 1 else 0)) / columns
            sites.append(torch.stack([x, torch.full_like(x, (row + 0.5) / rows), torch.full_like(x, level)], dim=-1))
        found = torch.cat(sites).float().to(scene.device).expand(scene.batch, -1, -1)
        return found.contiguous(), torch.ones(found.shape[:2], device=scene.device)
