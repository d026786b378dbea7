"""Relevance of any size as numbers that can be summed."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from gpu_lod import by_kernel
from gpu_lod.kernels import choosing
from gpu_lod.kernels import device as kernels

HIGHEST = 100
"""Exponent of the largest finite relevance that is summed as it is: 2^28 of them are still a number."""
LOWEST = -60
"""Exponent below which an image's largest is brought up to 1, for sums of products would be nothing."""


class Summable:
    """Relevance [B, h, w], fp32, as finite numbers whose sums are finite.

    An image of usual size stays as it is; others are multiplied by a power of two. inf becomes 16 times the largest
    finite value that there can be; -inf is the least there is, and moves nothing else.
    """

    def __init__(self, relevance: torch.Tensor) -> None:
        self._relevance = relevance

    @cached_property
    def amounts(self) -> torch.Tensor:
        """Not negative (the least is 0 if it was), and not all 0."""
        if self._made is not None:
            return self._made[0]
        values, none = self._scaled
        values = values - values.where(~none, 0.0).amin((1, 2), keepdim=True).clamp(max=0)
        values = torch.where(none, 0.0, values)
        return torch.where(values.amax((1, 2), keepdim=True) > 0, values, torch.ones_like(values))

    @cached_property
    def finite(self) -> torch.Tensor:
        """-inf is the least of the others. No gradients."""
        if self._made is not None:
            return self._made[1]
        values, none = (part.detach() for part in self._scaled)
        values = torch.where(none, values.where(~none, math.inf).amin((1, 2), keepdim=True), values)
        return values.where(torch.isfinite(values), 0.0)

    @cached_property
    def _made(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both by a kernel, where there are any."""
        relevance = self._relevance
        if relevance.requires_grad or relevance.dtype != torch.float32 or not by_kernel.usable(relevance):
            return None
        device = kernels.device_of(relevance)
        return by_kernel.attempt(
            relevance.device, lambda: choosing.amounts(device, relevance, highest=HIGHEST, lowest=LOWEST)
        )

    @cached_property
    def _scaled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """And where it is -inf."""
        relevance, values = self._relevance, self._relevance.detach()
        largest = values.abs().where(torch.isfinite(values), 0.0).amax((1, 2), keepdim=True)
        exponent = torch.frexp(largest).exponent
        shift = torch.where(exponent > HIGHEST, HIGHEST - exponent, 0)
        shift = torch.where((exponent < LOWEST) & (largest > 0), (-exponent).clamp(max=120), shift)
        limit = 2.0 ** (HIGHEST + 4)
        scaled = (relevance * torch.exp2(shift.to(relevance.dtype))).clamp(-limit, limit)
        return scaled, values == -math.inf
