"""What learned allocators share: they are torch modules, and choose with gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Pool
from gpu_lod.errors import InputError
from gpu_lod.token_set import TokenSet


class Learned(nn.Module, Allocator):
    """An allocator with parameters: `parameters()`, `state_dict()`, `train()` and `.to(device)` as with any module."""

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean") -> None:
        nn.Module.__init__(self)
        Allocator.__init__(self, budget, patch, pool)

    def forward(self, *args: Any, **kwargs: Any) -> TokenSet:
        return Allocator.__call__(self, *args, **kwargs)


_HALVINGS = 52
"""Of the interval that holds the threshold: as many as double precision has bits."""


def soft_top_k(scores: torch.Tensor, count: int, temperature: float) -> torch.Tensor:
    """How much each of [B, N] is among the best `count`: in [0, 1], and `count` in sum for each row.

    It is sigmoid((score - t) / temperature) with the threshold t at which the sum is right, found by bisection; the
    gradient is exact, by the implicit function theorem: it passes through t. As the temperature falls the result
    approaches the indicator of the best `count`.

    Raises:
        InputError: a count below 1 or above N, or a temperature that is not positive.

    Source: the entropy-regularised linear program of top-k; Cuturi et al., "Differentiable Ranks and Sorting using
        Optimal Transport" (2019); Amos et al., "The Limited Multi-Label Projection Layer" (2019).
    """
    temperature = checks.number(temperature, "temperature")
    checks.integer(count, "count", at_least=1)
    if scores.ndim != 2 or count > scores.shape[1]:
        raise InputError(f"scores are {tuple(scores.shape)}; expected [B, N] with N of at least the count, {count}.")
    if temperature <= 0:
        raise InputError(f"temperature is {temperature}; expected a positive number.")
    if count == scores.shape[1]:
        return torch.ones_like(scores)
    logits = (scores.double() / temperature).clamp(-1e30, 1e30)
    with torch.no_grad():
        last, next_ = torch.sort(logits, dim=1, descending=True).values[:, count - 1 : count + 1].chunk(2, dim=1)
        centre, gap = (last + next_) / 2, (last - next_) / 2
        tail = 40 + math.log(scores.shape[1])  # beyond it all sigmoids together are nothing
        high = torch.where(gap > tail, 0.0, gap + tail)
    # Round the K-th score, where it counts, so that large scores keep their small differences.
    logits = logits - centre
    with torch.no_grad():
        low = -high
        for _ in range(_HALVINGS):
            threshold = (low + high) / 2
            more = torch.sigmoid(logits - threshold).sum(1, keepdim=True) > count
            low, high = torch.where(more, threshold, low), torch.where(more, high, threshold)
        soft = torch.sigmoid(logits - threshold)
        slope = soft * (1 - soft)
        share = slope / slope.sum(1, keepdim=True).clamp(min=1e-300)
    # The threshold's derivative without a value of its own.
    moved = (share * (logits - logits.detach())).sum(1, keepdim=True)
    return torch.sigmoid(logits - threshold - moved).to(scores.dtype)
