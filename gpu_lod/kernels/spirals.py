"""Spirals about the peaks of relevance, and what their cells hold: memory and launches of cells.cu and spirals.cu."""

from __future__ import annotations

import ctypes

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.choosing import MOST_CELLS
from gpu_lod.kernels.device import THREADS, Device
from gpu_lod.kernels.sources import CELLS, SPIRALS

MOST_SITES = 2**13
"""Of an image: a block may have to look at 160 times as many."""


class Cells(ctypes.Structure):
    """The parameter of cells.cu."""

    _fields_ = (
        ("amounts", ctypes.c_void_p),
        ("points", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("most", ctypes.c_longlong),
        ("width", ctypes.c_double),
        ("height", ctypes.c_double),
        ("patch", ctypes.c_double),
        ("part_x", ctypes.c_float),
        ("part_y", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("peaks", ctypes.c_int),
    )


class Spirals(ctypes.Structure):
    """The parameter of spirals.cu."""

    _fields_ = (
        ("points", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("amounts", ctypes.c_void_p),
        ("sites", ctypes.c_void_p),
        ("box_x", ctypes.c_double),
        ("box_y", ctypes.c_double),
        ("part_x", ctypes.c_double),
        ("part_y", ctypes.c_double),
        ("patch", ctypes.c_double),
        ("floor", ctypes.c_float),
        ("peaks", ctypes.c_int),
        ("budget", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
    )


def cells(
    device: Device, amounts: torch.Tensor, points: torch.Tensor, size: tuple[int, int], patch: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the Voronoi cells of points [B, S, 2] hold of maps [B, h, w] of level-0 patches, both fp32: their weight
    [B, S], float64, and their room, int64: `most` for cells that hold the centre of a patch.

    Args:
        size: (height, width) of the image in pixels.

    Raises:
        LimitError: larger maps than a block is to go through.
    """
    (images, peaks), (rows, columns) = points.shape[:2], amounts.shape[1:]
    if rows * columns > MOST_CELLS:
        raise LimitError(f"a map of {rows} x {columns} cells is more than a block takes ({MOST_CELLS}).")
    amounts, points = amounts.detach().contiguous(), points.contiguous()
    weight = torch.empty((images, peaks), dtype=torch.float64, device=points.device)
    room = torch.empty_like(weight, dtype=torch.int64)
    height, width = size
    parameters = Cells(
        amounts=amounts.data_ptr(),
        points=points.data_ptr(),
        weight=weight.data_ptr(),
        room=room.data_ptr(),
        most=most,
        width=width,
        height=height,
        patch=patch,
        part_x=width / max(size),
        part_y=height / max(size),
        rows=rows,
        columns=columns,
        peaks=peaks,
    )
    device.launch(CELLS, (images * peaks, 1, 1), THREADS, parameters)
    return weight, room


def spirals(
    device: Device,
    kind: str,
    points: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    size: tuple[int, int],
    patch: int,
    amounts: torch.Tensor,
    weight: torch.Tensor,
    floor: float = 0.0,
) -> torch.Tensor:
    """[B, `budget`, 3], float64, sites of spirals about points [B, S, 2], fp32, `counts` [B, S] of each: peak by peak,
    from each outward; as `Spiral` and `Whirlwind` have it.

    Args:
        kind: one of `SPIRALS`.
        counts: int64; those of an image sum to `budget`.
        size: (height, width) of the image in pixels.
        amounts: [B, h, w], fp32, the relevance of level-0 patches, which winds "whirlwind" alone, as the next two do.
        weight: [B, S], float64, what the cells hold of it.
        floor: added to it, in units of its mean.

    Raises:
        LimitError: more sites than a block is to choose.
    """
    if budget > MOST_SITES:
        raise LimitError(f"{budget} sites are more than a block chooses ({MOST_SITES}).")
    (images, peaks), (rows, columns) = points.shape[:2], amounts.shape[1:]
    points, counts, weight = points.contiguous(), counts.contiguous(), weight.contiguous()
    amounts = amounts.detach().contiguous()
    sites = torch.empty((images, budget, 3), dtype=torch.float64, device=points.device)
    height, width = size
    parameters = Spirals(
        points=points.data_ptr(),
        counts=counts.data_ptr(),
        weight=weight.data_ptr(),
        amounts=amounts.data_ptr(),
        sites=sites.data_ptr(),
        box_x=width / max(size),
        box_y=height / max(size),
        part_x=width / (columns * patch),
        part_y=height / (rows * patch),
        patch=patch / max(size),
        floor=floor,
        peaks=peaks,
        budget=budget,
        rows=rows,
        columns=columns,
    )
    device.launch(SPIRALS[kind], (images * peaks, 1, 1), THREADS, parameters)
    return sites
