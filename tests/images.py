"""Test images."""

from __future__ import annotations

import torch

DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
SIZES = [(1, 1), (1, 9), (9, 1), (2, 2), (3, 5), (16, 16), (17, 31), (48, 64), (101, 77), (6, 1), (128, 33)]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """White noise: the hardest picture for filters."""
    values = torch.rand(*shape)
    return (values * 255).round().to(torch.uint8) if dtype == torch.uint8 else values.to(dtype)


def smooth(height: int, width: int, channels: int = 3) -> torch.Tensor:
    """A picture without detail, fp32 [channels, height, width] in [0, 1]."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return torch.stack([(torch.sin((c + 2) * x + y) + 1) / 2 for c in range(channels)])
