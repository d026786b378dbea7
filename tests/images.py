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


def grey_levels(device: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Levels of one grey each, sites between them, and what a linear blend gives there. A driver may be set to show one
    level where two should be blended, for speed: then all that samples pyramids differs, and this says how."""
    levels = tuple(torch.full((1, n, n), float(n == 4), device=device) for n in (8, 4, 2))
    between = torch.arange(129) / 64
    sites = torch.stack([torch.full_like(between, 0.5), torch.full_like(between, 0.5), between], dim=-1)
    return levels, sites, 1 - (1 - between).abs()
