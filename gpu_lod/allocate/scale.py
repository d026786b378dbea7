"""Relevance of any size as numbers that can be summed."""

from __future__ import annotations

import math

import torch

HIGHEST = 100
"""Exponent of the largest finite relevance that is summed as it is: 2^28 of them are still a number."""
LOWEST = -60
"""Exponent below which an image's largest is brought up to 1, for sums of products would be nothing."""


def summable(relevance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, h, w] as finite numbers whose sums are finite, and where it is -inf, which is a number here all the same.

    An image of usual size stays as it is; others are multiplied by a power of two. inf becomes 16 times the largest
    finite value that there can be.
    """
    values = relevance.detach()
    largest = values.abs().where(torch.isfinite(values), 0.0).amax((1, 2), keepdim=True)
    exponent = torch.frexp(largest).exponent
    shift = torch.where(exponent > HIGHEST, HIGHEST - exponent, 0)
    shift = torch.where((exponent < LOWEST) & (largest > 0), (-exponent).clamp(max=120), shift)
    limit = 2.0 ** (HIGHEST + 4)
    scaled = (relevance * torch.exp2(shift.to(relevance.dtype))).clamp(-limit, limit)
    return scaled, values == -math.inf
