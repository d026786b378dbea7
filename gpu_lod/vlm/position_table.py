"""Learned absolute positions, read anywhere: an encoder's own table, resampled as the encoder resamples it."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F

from gpu_lod import checks, operators
from gpu_lod.errors import InputError

Mode = Literal["bilinear", "bicubic"]


def _looked_up(
    table: torch.Tensor,
    positions: torch.Tensor,
    grid: tuple[int, int],
    cells: tuple[int, int],
    mode: str,
    antialias: bool,
    align_corners: bool,
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], tuple[int, int]]:
    """Table, positions and sides, checked but for values."""
    checks.choice(mode, "mode", ("bilinear", "bicubic"))
    checks.flag(antialias, "antialias")
    checks.flag(align_corners, "align_corners")
    grid, cells = _sides(grid, "grid"), _sides(cells, "cells")
    table, positions = checks.real(table, "table"), checks.real(positions, "positions")
    if table.ndim != 2 or table.shape[0] != grid[0] * grid[1] or positions.shape[-1:] != (2,):
        raise InputError(
            f"the table is {tuple(table.shape)}, positions {tuple(positions.shape)}; expected "
            f"[{grid[0] * grid[1]}, D] for a grid of {grid[0]} x {grid[1]}, and [..., 2]."
        )
    checks.same_device(table, positions, "positions", "the table")
    if antialias and align_corners:
        raise InputError("antialias and align_corners exclude each other. Drop one.")
    return table, positions, grid, cells


def _like(table: torch.Tensor, positions: torch.Tensor, *how: Any) -> torch.Tensor:
    table, positions, *_ = _looked_up(table, positions, *how)
    return table.new_empty(*positions.shape[:-1], table.shape[1])


@operators.function(_like)
def sample_position_table(
    table: torch.Tensor,
    positions: torch.Tensor,
    grid: tuple[int, int],
    cells: tuple[int, int],
    mode: Mode = "bicubic",
    antialias: bool = False,
    align_corners: bool = False,
) -> torch.Tensor:
    """Position embeddings at fractional positions.

    Shape: table [gh gw, D], row by row, and positions [..., 2] as (y, x) give [..., D], of the table's dtype.
    Units: positions in cells of the picture's grid of patches (`grid_positions(...)[..., 1:]`).
    Convention: at the cells themselves these are the rows of `F.interpolate(table, cells)` of the same mode, antialias
        and align_corners; between them, the same filter's continuous values; outside, the edge's. With cells equal
        to the grid, whole positions give the table's rows exactly.

    Args:
        grid: (gh, gw), the native grid of the table.
        cells: (h, w), the whole patches of the picture: what the encoder's own interpolation goes to.
        mode, antialias, align_corners: SigLIP and CLIP: bicubic; SigLIP 2: bilinear and antialias; timm: bicubic and
            antialias; Qwen3-VL: bilinear and align_corners.

    Raises:
        InputError: bad shapes, tensors on several devices, positions that are not finite, or antialias with
            align_corners.

    Source: Keys, "Cubic Convolution Interpolation" (1981), a = -0.75, or -0.5 with antialias, as torch has them.
    """
    table, positions, grid, cells = _looked_up(table, positions, grid, cells, mode, antialias, align_corners)
    at = positions.reshape(-1, 2).float()
    if not torch.isfinite(checks.values(at)).all():  # read on the host: on a GPU that waits
        raise InputError("positions hold NaN or infinities; expected finite (y, x) in cells, as of grid_positions.")
    rows, row_weights = _taps(at[:, 0], grid[0], cells[0], mode, antialias, align_corners)
    columns, column_weights = _taps(at[:, 1], grid[1], cells[1], mode, antialias, align_corners)
    index = (rows[:, :, None] * grid[1] + columns[:, None, :]).flatten(1)
    weights = (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)
    if checks.transforming():  # which torch's embedding_bag passes but in part
        values = (table.float()[index] * weights[..., None]).sum(1)
    else:
        values = F.embedding_bag(index, table.float(), per_sample_weights=weights, mode="sum")
    return values.view(*positions.shape[:-1], table.shape[1]).to(table.dtype)


def _sides(value: Any, name: str) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f"{name} is {value!r}; expected (rows, columns).")
    rows, columns = (checks.integer(side, f"a side of {name}", at_least=1) for side in value)
    return rows, columns


def _taps(
    at: torch.Tensor, n: int, cells: int, mode: Mode, antialias: bool, align_corners: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] positions along one axis to [M, T] rows of the table and their weights, which sum to 1."""
    scale = n / cells
    centre = at if n == cells else (at + 0.5) * scale - 0.5
    if align_corners:
        centre = at * ((n - 1) / max(cells - 1, 1))
    centre = centre.clamp(-0.5, n - 0.5)  # the edges of the picture
    wide = max(scale, 1.0) if antialias else 1.0
    reach = math.ceil((1 if mode == "bilinear" else 2) * wide)
    first = centre.detach().floor()
    taps = first.long()[:, None] + torch.arange(-reach, reach + 1, device=at.device)
    away = (taps - centre[:, None]).abs() / wide
    weights = (1 - away).clamp(min=0) if mode == "bilinear" else _cubic(away, -0.5 if antialias else -0.75)
    if antialias:  # torch leaves out what is outside; else the edge stands in for it
        inside = (taps >= 0) & (taps < n)
        weights = torch.where(inside, weights, torch.zeros_like(weights))
        weights = weights / weights.sum(1, keepdim=True)
    return taps.clamp(0, n - 1), weights


def _cubic(away: torch.Tensor, a: float) -> torch.Tensor:
    near = ((a + 2) * away - (a + 3)) * away**2 + 1
    far = ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
    return torch.where(away <= 1, near, torch.where(away < 2, far, torch.zeros_like(away)))
