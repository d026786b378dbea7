"""Maps of pixels, and the grid of level-0 patches that they are pooled to."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

Pool = Literal["mean", "max"]
Coarser = Literal["max", "sum"]


def starts_of(n: int, patch: int) -> list[int]:
    """Where the patches along a side of n pixels begin; the last is shifted inward until flush with the edge."""
    return [min(i * patch, max(n - patch, 0)) for i in range(-(-n // patch))]


def pooled(values: torch.Tensor, patch: int, pool: Pool = "mean") -> torch.Tensor:
    """The mean or the largest value over each patch: [B, H, W] or [B, C, H, W] to [..., ceil(H / patch),
    ceil(W / patch)]. Patches of the same values have the very same one."""
    if pool == "max":
        return along(along(values, -2, patch, pool), -1, patch, pool)
    rows, columns = (min(patch, n) for n in values.shape[-2:])
    # By convolutions' pooling, which adds every window in one order: sums along a side take the last columns in another
    # one than the others. And a side at a time: of so few values in a row sums are the more precise.
    parts = [values] if values.shape[-1] % columns == 0 else [values, values[..., -columns:]]
    found = torch.cat([F.avg_pool2d(part, (1, columns)) for part in parts], -1)
    parts = [found] if found.shape[-2] % rows == 0 else [found, found[..., -rows:, :]]
    return torch.cat([F.avg_pool2d(part, (rows, 1)) for part in parts], -2)


def along(values: torch.Tensor, dim: int, patch: int, pool: Pool = "mean") -> torch.Tensor:
    """`pooled` along one side, -2 or -1."""
    n = values.shape[dim]
    side = min(patch, n)
    whole = n - n % side
    parts = values.narrow(dim, 0, whole).unflatten(dim, (whole // side, side))
    found = parts.amax(dim) if pool == "max" else parts.mean(dim)
    if whole == n:
        return found
    last = values.narrow(dim, n - side, side)
    last = last.amax(dim, keepdim=True) if pool == "max" else last.mean(dim, keepdim=True)
    return torch.cat([found, last], dim)


def coarser(values: torch.Tensor, pool: Coarser) -> torch.Tensor:
    """[B, h, w] to [B, ceil(h / 2), ceil(w / 2)]: over the 1 to 4 children of each node."""
    height, width = values.shape[-2:]
    bottom, right = height % 2, width % 2

    def padded(x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        # F.pad copies even where there is nothing to pad.
        return (F.pad(x, (0, right, 0, bottom), value=value) if bottom or right else x)[:, None]

    if pool == "max":
        return F.max_pool2d(padded(values, -math.inf), 2)[:, 0]
    return F.avg_pool2d(padded(values), 2, divisor_override=1)[:, 0]
