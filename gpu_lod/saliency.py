"""Simple saliency in plain torch, for the demo and the command line: something for Hi-Z to be a pyramid of."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from gpu_lod.feature_channels import LUMA
from gpu_lod.halving import stored
from gpu_lod.mipmap import reference

Kind = Literal["centre-surround", "gradient"]
PATCH = 14

_SCALES = ((1, 4), (2, 5), (3, 6))  # (centre, surround) levels


def unit(image: torch.Tensor) -> torch.Tensor:
    """Values in [0, 1] as float32: uint8 divided by 255, others as they are."""
    return image.float() / 255 if image.dtype == torch.uint8 else image.float()


def colour(image: torch.Tensor) -> torch.Tensor:
    """The channels of [C, H, W] that are not alpha."""
    return image[: 1 if image.shape[0] <= 2 else 3]


def luma(image: torch.Tensor) -> torch.Tensor:
    """[C, H, W] to [1, H, W] of the same dtype, weighed as in Rec. 601; alpha is left out."""
    channels = colour(image)
    if channels.shape[0] == 1:
        return channels
    weights = torch.tensor(LUMA, device=image.device)[:, None, None]
    return stored((channels.float() * weights).sum(0, keepdim=True), image.dtype)


def saliency(image: torch.Tensor, kind: Kind = "centre-surround") -> torch.Tensor:
    """How much each pixel stands out.

    Shape: [C, H, W] to [1, H, W], float32 in [0, 1], the largest value 1 (0 everywhere for a flat picture).
    Convention: "centre-surround" is the absolute difference of mip levels, both enlarged to full size, over three
        scales and the colour channels. "gradient" is the energy gx^2 + gy^2 of the luma, which finds print on paper.
    """
    if kind == "gradient":
        y = unit(luma(image))
        gx = F.pad(y, (1, 1, 0, 0), mode="replicate")
        gy = F.pad(y, (0, 0, 1, 1), mode="replicate")
        found = (gx[..., 2:] - gx[..., :-2]) ** 2 + (gy[:, 2:] - gy[:, :-2]) ** 2
    else:
        levels = reference(unit(colour(image)))
        size = image.shape[-2:]

        def enlarged(level: int) -> torch.Tensor:
            coarse = levels[min(level, len(levels) - 1)][None]
            return F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)[0]

        found = torch.stack([(enlarged(c) - enlarged(s)).abs() for c, s in _SCALES]).sum(0).mean(0, keepdim=True)
    largest = found.max()
    return found / largest if largest > 0 else found
