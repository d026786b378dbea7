"""All levels of a chain in one launch: the memory of reduce.cu."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from typing import NamedTuple

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.device import MOST_BLOCKS, THREADS, Device
from gpu_lod.kernels.sources import Kernel, reduction

ALIGNMENT = 256
"""In bytes, of levels in the packed tensor."""
GROUP = 6
"""Levels that a tile gives; the sixth, the twelfth, ... are read again by the launch that made them."""
TILE = 1 << GROUP
MOST_LEVELS = 32
MOST_TEXELS = 2**30
"""Along a side."""
COUNTERS = 2**15
"""That a device keeps for chains of its default stream, and as many again for those of graphs."""


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


class _Layout(NamedTuple):
    """What chains of a shape have in common."""

    parameter: bytes
    """Of the kernel, without addresses."""
    blocks: int
    elements: int
    """Of the packed tensor."""
    wide: int
    """Of the tensor of unrounded values."""
    views: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    """Shape, strides and offset of each level in the packed tensor."""
    ragged: Kernel
    even: Kernel | None
    """Where all sides are even and rows begin at a group of four elements."""


@functools.lru_cache(maxsize=1024)
def _layout(shape: torch.Size, levels: int, dtype: torch.dtype, reduce: str) -> _Layout:
    *outer, height, width = shape
    planes, size = math.prod(outer), dtype.itemsize
    tiles_y, tiles_x = -(-height // TILE), -(-width // TILE)
    if max(height, width) > MOST_TEXELS or planes * tiles_y * tiles_x > MOST_BLOCKS:
        raise LimitError(
            f"the image is {width} x {height} in {planes} planes, which is more than a CUDA launch covers "
            f"({MOST_TEXELS} texels a side, {MOST_BLOCKS} tiles of {TILE} x {TILE}). Use a smaller batch."
        )
    made = Chain(height=height, width=width, levels=levels, tiles_x=tiles_x, tiles_y=tiles_y)
    end = wide = 0
    views = []
    for level in range(1, levels):
        h, w = max(1, height >> level), max(1, width >> level)
        made.first[level] = end // size
        strides = [w, 1]
        for n in (h, *outer[:0:-1]):
            strides.insert(0, strides[0] * n)
        views.append(((*outer, h, w), tuple(strides), end // size))
        end += -(-planes * h * w * size // ALIGNMENT) * ALIGNMENT
        if level % GROUP == 0 and level < levels - 1 and reduce == "mean" and dtype != torch.float32:
            made.first_wide[level] = wide
            wide += planes * h * w
    group = min(levels - 1, GROUP)
    even = group > 1 and not (height | width) % (1 << group)
    return _Layout(
        bytes(made),
        planes * tiles_y * tiles_x,
        end // size,
        wide,
        views,
        reduction(dtype, reduce, False),
        reduction(dtype, reduce, True) if even else None,
    )


class _Counters:
    """Counters of a device that are zero whenever no chain runs: each launch leaves its own as it found them."""

    def __init__(self, device: Device) -> None:
        self.all = torch.zeros(2 * COUNTERS, dtype=torch.int32, device=device.torch_device)
        device.finish(device.record())  # other streams read them
        self.taken = COUNTERS
        """By the default stream, whose launches come one after the other, and by graphs, each of which has its own."""


_counters: dict[Device, _Counters] = {}
_lock = threading.Lock()


def _zeros(device: Device, count: int) -> int:
    """The address of counters for a launch, or 0 where there are none that nobody else counts with."""
    captured = device.capturing()
    if not captured and (device.stream() != 0 or count > COUNTERS):
        return 0
    with _lock:
        known = _counters.get(device)
        if captured:
            if known is None or known.taken + count > len(known.all):
                return 0
            known.taken += count
            return known.all.data_ptr() + 4 * (known.taken - count)
        if known is None:
            known = _counters[device] = _Counters(device)
        return known.all.data_ptr()


def chain(device: Device, image: torch.Tensor, levels: int, reduce: str) -> list[torch.Tensor]:
    """The levels below a contiguous image [..., H, W], `levels` with level 0 included: views of one tensor,
    level-major, each aligned.

    Raises:
        LimitError: larger than a launch may be.
    """
    if levels == 1:
        return []
    layout = _layout(image.shape, levels, image.dtype, reduce)
    made = Chain.from_buffer_copy(layout.parameter)
    packed = torch.empty(layout.elements, dtype=image.dtype, device=image.device)
    keep: list[torch.Tensor] = []  # until the launch is queued
    if levels - 1 > GROUP:
        planes = math.prod(image.shape[:-2])
        made.finished = _zeros(device, planes)
        if not made.finished:
            keep.append(torch.zeros(planes, dtype=torch.int32, device=image.device))
            made.finished = keep[-1].data_ptr()
        if layout.wide:
            keep.append(torch.empty(layout.wide, dtype=torch.float32, device=image.device))
            made.wide = keep[-1].data_ptr()
    source = image.data_ptr()
    made.source, made.packed = source, packed.data_ptr()
    made.fours = image.shape[-1] % 4 == 0 and source % (4 * image.dtype.itemsize) == 0
    kernel = layout.even if layout.even is not None and made.fours else layout.ragged
    device.launch(kernel, (layout.blocks, 1, 1), THREADS, made)
    return [packed.as_strided(*view) for view in layout.views]
