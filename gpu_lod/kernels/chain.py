"""All levels of a chain in one launch: the memory of reduce.cu."""

from __future__ import annotations

import ctypes
import math

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.device import MOST_BLOCKS, THREADS, Device
from gpu_lod.kernels.sources import reduction

ALIGNMENT = 256
"""In bytes, of levels in the packed tensor."""
GROUP = 6
"""Levels that a tile gives; the sixth, the twelfth, ... are read again by the launch that made them."""
TILE = 1 << GROUP
MOST_LEVELS = 32
MOST_TEXELS = 2**30
"""Along a side."""


class Chain(ctypes.Structure):
    """The kernel's parameter, as reduce.cu has it."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("finished", ctypes.c_void_p),
        ("first", ctypes.c_uint64 * MOST_LEVELS),
        ("first_wide", ctypes.c_uint64 * MOST_LEVELS),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("levels", ctypes.c_int),
        ("tiles_x", ctypes.c_int),
        ("tiles_y", ctypes.c_int),
        ("fours", ctypes.c_int),
    )


def chain(device: Device, image: torch.Tensor, sizes: list[tuple[int, int]], reduce: str) -> list[torch.Tensor]:
    """The levels below a contiguous image [..., H, W] of the sizes given, level 0 included there: views of one tensor,
    level-major, each aligned.

    Raises:
        LimitError: larger than a launch may be.
    """
    outer, (height, width) = image.shape[:-2], image.shape[-2:]
    planes, size = math.prod(outer), image.dtype.itemsize
    if len(sizes) == 1:
        return []
    tiles_y, tiles_x = -(-height // TILE), -(-width // TILE)
    if max(height, width) > MOST_TEXELS or planes * tiles_y * tiles_x > MOST_BLOCKS:
        raise LimitError(
            f"the image is {width} x {height} in {planes} planes, which is more than a CUDA launch covers "
            f"({MOST_TEXELS} texels a side, {MOST_BLOCKS} tiles of {TILE} x {TILE}). Use a smaller batch."
        )
    made = Chain(height=height, width=width, levels=len(sizes), tiles_x=tiles_x, tiles_y=tiles_y)
    end = 0
    for level, (h, w) in enumerate(sizes[1:], start=1):
        made.first[level] = end // size
        end += -(-planes * h * w * size // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(end // size, dtype=image.dtype, device=image.device)
    keep: list[torch.Tensor] = []  # until the launch is queued
    if len(sizes) - 1 > GROUP:
        finished = torch.zeros(planes, dtype=torch.int32, device=image.device)
        made.finished = finished.data_ptr()
        keep.append(finished)
        if reduce == "mean" and image.dtype != torch.float32:
            end = 0
            for level in range(GROUP, len(sizes) - 1, GROUP):
                made.first_wide[level] = end
                end += planes * math.prod(sizes[level])
            wide = torch.empty(end, dtype=torch.float32, device=image.device)
            made.wide = wide.data_ptr()
            keep.append(wide)
    made.source, made.packed = image.data_ptr(), packed.data_ptr()
    made.fours = width % 4 == 0 and image.data_ptr() % (4 * size) == 0
    device.launch(reduction(image.dtype, reduce), (planes * tiles_y * tiles_x, 1, 1), THREADS, made)
    return [
        packed[made.first[level] :][: planes * h * w].view(*outer, h, w)
        for level, (h, w) in enumerate(sizes[1:], start=1)
    ]
