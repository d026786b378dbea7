"""What becomes of stored values on the way into a result: fractions, normalised, in another dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_lod import checks
from gpu_lod.errors import InputError


@dataclass(frozen=True)
class Conversion:
    """By channel: a result is value * scale + offset, in `dtype`."""

    scale: tuple[float, ...] | None
    """None leaves values as they are."""
    offset: tuple[float, ...]
    dtype: torch.dtype

    def apply(self, image: torch.Tensor) -> torch.Tensor:
        """[..., C, H, W] converted, not yet rounded to the dtype: fp32, or what is wider. Differentiable."""
        wide = image if image.dtype in (torch.float32, torch.float64) else image.float()
        if self.scale is None:
            return wide
        return torch.addcmul(_of_channels(self.offset, wide), wide, _of_channels(self.scale, wide))

    def adjoint(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient in the values from that in what they become, [..., C, H, W]."""
        return gradient if self.scale is None else gradient * _of_channels(self.scale, gradient)


def _of_channels(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    # Not by new_tensor, which negated views refuse.
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


def conversion(
    image: torch.Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, dtype: torch.dtype | None
) -> Conversion:
    """(value - mean) / std, of fractions where uint8 becomes floating point.

    Args:
        mean, std: a number a channel, or None.
        dtype: None is the image's (float32 for uint8 with mean or std).

    Raises:
        InputError: a wrong count, a std of 0, or a dtype that cannot hold it.
    """
    channels = image.shape[-3]
    means = (0.0,) * channels if mean is None else checks.numbers(mean, "mean", channels)
    stds = (1.0,) * channels if std is None else checks.numbers(std, "std", channels)
    if std is not None and not all(
        math.isfinite(float(torch.tensor(1 / s if s else math.inf, dtype=torch.float32, device="cpu"))) for s in stds
    ):
        raise InputError(f"std is {stds}; every channel's must differ from 0, and 1 / std be a number of fp32.")
    normalised = mean is not None or std is not None
    counts = image.dtype == torch.uint8
    if dtype is None:
        dtype = torch.float32 if counts and normalised else image.dtype
    elif not isinstance(dtype, torch.dtype) or (
        dtype not in (torch.float16, torch.bfloat16, torch.float32) and (dtype != image.dtype or normalised)
    ):
        raise InputError(
            f"dtype is {dtype}; expected torch.float16, torch.bfloat16 or torch.float32"
            + (", for mean and std give fractions." if normalised else ", or None for the image's own.")
        )
    unit = 1 / 255 if counts and dtype.is_floating_point else 1.0
    scale = tuple(unit / s for s in stds) if normalised or unit != 1 else None
    return Conversion(scale, tuple(-m / s for m, s in zip(means, stds, strict=True)), dtype)
