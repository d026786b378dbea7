"""Relevance of all kinds that allocators have to bear."""

from __future__ import annotations

import math

import torch

KINDS = [
    "noise", "ties", "zeros", "one hot", "infinities", "many infinities", "nothing finite", "equal", "negative",
]  # fmt: skip


def maps(kind: str, batch: int, rows: int, columns: int) -> torch.Tensor:
    values = torch.rand(batch, rows, columns)
    if kind == "ties":
        values = (values * 3).round()
    elif kind == "zeros":
        values = torch.zeros_like(values)
    elif kind == "one hot":
        values = torch.zeros_like(values)
        values[:, rows // 2, columns // 3] = 1
    elif kind == "infinities":
        values[:, 0, 0] = math.inf
        values[:, -1, -1] = -math.inf
    elif kind == "many infinities":
        values[values > 0.7] = math.inf
    elif kind == "nothing finite":
        values = torch.full_like(values, -math.inf)
    elif kind == "equal":
        values = torch.full_like(values, 2.5)
    elif kind == "negative":
        values = values - 2
    return values
