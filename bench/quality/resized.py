"""What one does without any of this, as a method: the picture made smaller, and every patch of that.

A grid of at most K patches, as near to the picture's shape as may be; the picture resized to just that, with a filter
that keeps what the new size can hold, and shown again by the same filter. The filter is bicubic in both directions, by
which fine print and features keep more than by a bilinear one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from gpu_lod.rebuild import Rebuilt


class Resized:
    """Called as the frame calls a method: budget and patch, then the picture."""

    needs: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, budget: int, patch: int) -> None:
        self.budget, self.patch = budget, patch

    def __call__(self, image: torch.Tensor, relevance: Any = None, fixation: Any = None) -> Small:
        """
        Shape: image uint8 [C, H, W].
        """
        rows, columns = self.choose(image)
        shape = rows * self.patch, columns * self.patch
        return Small(_bicubic(image, shape, antialias=True), (image.shape[-2], image.shape[-1]))

    def choose(self, image: torch.Tensor, relevance: Any = None, fixation: Any = None) -> tuple[int, int]:
        """Rows and columns: those by which the axis that loses more loses least; of such, those with more patches."""
        height, width = image.shape[-2:]
        grids = ((rows, self.budget // rows) for rows in range(1, self.budget + 1))
        return max(grids, key=lambda grid: (min(grid[0] / height, grid[1] / width), grid[0] * grid[1]))


def _bicubic(image: torch.Tensor, shape: tuple[int, int], *, antialias: bool) -> torch.Tensor:
    found = F.interpolate(image[None].float(), shape, mode="bicubic", antialias=antialias)[0]
    return found.round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Small:
    """The small picture, uint8 [C, rows P, columns P]."""

    image: torch.Tensor
    size: tuple[int, int]

    def rebuilt(self) -> Rebuilt:
        return Rebuilt(_bicubic(self.image, self.size, antialias=False), torch.ones(self.size, dtype=torch.bool))
