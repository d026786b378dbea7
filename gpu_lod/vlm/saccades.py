"""Gestalt and saccades: the whole picture coarsely, and a few places well."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.allocate import Allocator, Downsample
from gpu_lod.errors import InputError
from gpu_lod.mipmap import mipmap
from gpu_lod.pyramid import Pyramid
from gpu_lod.token_set import TokenSet


class Saccades(nn.Module):
    """`base` tokens that tile the whole picture evenly, then `budget` tokens of an allocator: as many for every image,
    so that batches stack.

    Both have the allocator's patch side. A square number of base tokens is a grid of as many rows as columns, 16 x 16
    for 256, whatever the picture's shape; any other number is what `Downsample` makes of it. The base comes first, row
    by row, then the saccades by relevance, high first; scores are each part's own, those of the base all 1. It is a
    torch module, whose parameters are the allocator's if it learns.

    Args:
        allocator: chooses the saccades. One with another budget is copied, with `budget`; one that learned, or that
            was made to fit its budget otherwise, has to be made with it.

    Raises:
        InputError: no allocator, or one that has learned for another budget.
    """

    __call__: Callable[..., TokenSet]

    def __init__(self, allocator: Allocator, base: int = 256, budget: int = 273) -> None:
        super().__init__()
        if not isinstance(allocator, Allocator):
            raise InputError(
                f"allocator is {type(allocator).__name__}; expected one of gpu_lod.allocate, as "
                "gpu_lod.allocate.FoveatedPyramid()."
            )
        base = checks.integer(base, "base", at_least=1, at_most=2**20)
        budget = checks.integer(budget, "budget", at_least=1, at_most=2**20)
        if allocator.budget != budget:
            name = type(allocator).__name__
            if isinstance(allocator, nn.Module):
                raise InputError(
                    f"{name} has parameters for a budget of {allocator.budget}, and {budget} saccades are asked for. "
                    f"Make it with budget={budget}, or pass budget={allocator.budget}."
                )
            allocator = copy.copy(allocator)
            allocator.budget = budget
        side = math.isqrt(base)
        self.gestalt = Downsample(base, allocator.patch, rows=side if side**2 == base else None)
        self.allocator = allocator

    @property
    def patch(self) -> int:
        """P."""
        return self.allocator.patch

    @property
    def budget(self) -> int:
        """Of both together."""
        return self.gestalt.budget + self.allocator.budget

    def extra_repr(self) -> str:
        return f"{self.gestalt.budget} + {self.allocator!r}" * (not isinstance(self.allocator, nn.Module))

    def forward(
        self,
        image: torch.Tensor | Pyramid | None = None,
        relevance: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        fixation: Any = None,
        labels: torch.Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bias: float = 0.0,
    ) -> TokenSet:
        """Choose sites, and read the patches there: what an `Allocator` takes and gives. Only the saccades look at what
        is beyond the image. Tokens of an allocator that blends are blends, the base's are not, and neither has weights.
        """
        if image is not None and not isinstance(image, Pyramid):
            image = mipmap(checks.tensor(image, "image"))  # once for both
        if self.allocator.blends and image is not None:
            # Blends of bytes are fractions: so is the base then.
            channels = image.levels[0].shape[-3]
            mean = (0.0,) * channels if mean is None else mean
            std = (1.0,) * channels if std is None else std
        fine = self.allocator(image, relevance, query, fixation, labels, mean, std, bias)
        if fine.budget != self.allocator.budget:
            raise InputError(
                f"{type(self.allocator).__name__} gives {fine.budget} tokens, and {self.allocator.budget} saccades are "
                f"asked for. Make it with budget={self.allocator.budget}."
            )
        # Without a picture relevance gives the size, and an even one leaves the base row by row.
        even = torch.ones_like(checks.tensor(relevance, "relevance")) if image is None else None
        coarse = self.gestalt(image, even, mean=mean, std=std, bias=bias)
        sites = torch.cat([coarse.sites, fine.sites], dim=-2)
        scores = torch.cat([coarse.scores, fine.scores.to(coarse.scores.dtype)], dim=-1)
        patches = None
        if coarse.patches is not None and fine.patches is not None:
            patches = torch.cat([coarse.patches, fine.patches], dim=-4)
        return TokenSet(sites, scores, patches, self.patch)
