"""What allocators that look at the picture share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_lod.allocate.base import Scene, coarser
from gpu_lod.errors import InputError
from gpu_lod.feature_maps import luma_of
from gpu_lod.pyramid import Pyramid

ROUNDING = 1 / (12 * 255**2)
"""Variance of a pixel's error when it is stored in 8 bits. Added to energies, it keeps what is below it, noise and the
last bits of arithmetic, from deciding anything: places without structure rank by their relevance."""


def luma(scene: Scene, multiple: int) -> torch.Tensor:
    """[B, H', W'], the picture's luma, its last row and column repeated up to the next multiple along each side."""
    assert scene.image is not None
    top = scene.image.levels[0] if isinstance(scene.image, Pyramid) else scene.image
    values = luma_of(top if top.ndim == 4 else top[None])
    bottom, right = (-n % multiple for n in scene.size)
    return F.pad(values, (0, right, 0, bottom), mode="replicate")[:, 0]


def checked(energy: torch.Tensor) -> torch.Tensor:
    """The energy itself, if it is finite."""
    if not torch.isfinite(energy).all():
        raise InputError(
            "the energy of the picture is not finite: it holds NaN, infinities, or values that are too large. Repair "
            "it with torch.nan_to_num, and scale it to [0, 1]."
        )
    return energy


def relevances(scene: Scene, top: int) -> list[torch.Tensor]:
    """Mean relevance of the nodes of levels 0 to `top`, [B, h_l, w_l], from 0 to 1."""
    values = scene.amounts()
    levels = [values / values.amax((1, 2), keepdim=True)]
    for _ in range(top):
        levels.append(coarser(levels[-1], "mean"))
    return levels
