"""What data loaders run in their workers; importable there."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

import gpu_lod as lod


class Levels(Dataset[torch.Tensor]):
    """Item i is the coarsest level of an image of i."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.full((1, 16, 16), float(index), device=self._device)
        return lod.mipmap(image, backend="gl")[4].cpu()
