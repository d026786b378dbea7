"""All levels of a chain in as few launches as pay: the memory of reduce.cu."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from typing import NamedTuple

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.device import DEFAULT_STREAMS, MOST_BLOCKS, THREADS, Device
from gpu_lod.kernels.sources import Kernel, reduction

ALIGNMENT = 256
"""In bytes, of levels in the packed tensor."""
GROUP = 6
"""Levels that a tile gives at most."""
RAGGED_GROUP = 3
"""That it gives, or one more, where sides are odd and the image larger than a tile. More make more twice."""
TILE = 1 << GROUP
LAST = 2 * TILE
"""Texels a side of a level at most that one block makes those below of."""
WINDOWS = GROUP, GROUP + 1
"""Of odd sides: a tile's outputs of level k fit 2^(window - k) columns and rows. The larger it is, the less is made
twice, and the fewer tiles there are."""
MOST_LEVELS = 32
MOST_TEXELS = 2**30
"""Along a side."""
RESIDENT = 4
"""Blocks of a multiprocessor that registers suffice for. Where sides are even, so many make the tiles of an image, each
as many as fall to it: of one it would read too little for the time that it waits."""
BLOCK_BYTES = 21828
"""Of shared memory that a block takes, with what CUDA keeps of it: some GPUs have room for fewer blocks."""
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
        ("part_y", ctypes.c_float * MOST_LEVELS),
        ("part_x", ctypes.c_float * MOST_LEVELS),
        ("to_row", ctypes.c_int64 * 3),
        ("to_plane", ctypes.c_int64 * 3),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("levels", ctypes.c_int),
        ("base", ctypes.c_int),
        ("group", ctypes.c_int),
        ("window", ctypes.c_int),
        ("own", ctypes.c_int),
        ("tiles_x", ctypes.c_int),
        ("tiles_y", ctypes.c_int),
        ("tiles", ctypes.c_uint32),
        ("at_once", ctypes.c_uint32),
        ("finish", ctypes.c_int),
        ("fours", ctypes.c_int),
    )


_NOT_KEPT = 2**64 - 1


class _Layout(NamedTuple):
    """What chains of a shape have in common."""

    launches: list[tuple[Kernel, int, bytes]]
    """Each with its blocks and the kernel's parameter, without addresses."""
    elements: int
    """Of the packed tensor."""
    wide: int
    """Of the tensor of unrounded values."""
    counters: int
    views: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    """Shape, strides and offset of each level in the packed tensor."""


@functools.lru_cache(maxsize=1024)
def _layout(
    shape: torch.Size, levels: int, dtype: torch.dtype, reduce: str, fours: bool, units: int, each: int
) -> _Layout:
    """Args:
    fours: rows of level 0 are whole groups of four elements, and begin where one may.
    units: multiprocessors.
    each: blocks that run on one at once, of those that make several tiles.
    """
    *outer, height, width = shape
    planes, size = math.prod(outer), dtype.itemsize
    sizes = [(max(1, height >> level), max(1, width >> level)) for level in range(levels)]
    tiles = [(-(-h // TILE), -(-w // TILE)) for h, w in sizes]
    if max(height, width) > MOST_TEXELS or planes * math.prod(tiles[0]) > MOST_BLOCKS:
        raise LimitError(
            f"the image is {width} x {height} in {planes} planes, which is more than a CUDA launch covers "
            f"({MOST_TEXELS} texels a side, {MOST_BLOCKS} tiles of {TILE} x {TILE}). Use a smaller batch."
        )
    made = Chain(height=height, width=width, levels=levels, fours=fours)
    for level, (h, w) in enumerate(sizes):
        made.part_y[level], made.part_x[level] = _part(h), _part(w)
    for level, (h, w) in enumerate(sizes[:3]):
        side = TILE >> level
        made.to_row[level] = side * w - tiles[0][1] * side
        made.to_plane[level] = h * w - tiles[0][0] * side * w
    end, views = 0, []
    for level, (h, w) in enumerate(sizes[1:], start=1):
        made.first[level] = end // size
        strides = [w, 1]
        for n in (h, *outer[:0:-1]):
            strides.insert(0, strides[0] * n)
        views.append(((*outer, h, w), tuple(strides), end // size))
        end += -(-planes * h * w * size // ALIGNMENT) * ALIGNMENT
    rounds = _rounds(sizes, fours)
    wide = 0
    made.first_wide[:] = [_NOT_KEPT] * MOST_LEVELS
    if reduce == "mean" and dtype != torch.float32:
        for base, group, _, _ in rounds:
            if base + group < levels - 1:  # it is read again
                made.first_wide[base + group] = wide
                wide += planes * math.prod(sizes[base + group])
    launches = []
    for base, group, even, finish in rounds:
        made.base, made.group, made.finish = base, group, finish
        if even:
            made.tiles_y, made.tiles_x = tiles[base]
        else:
            made.window, made.own, made.tiles_y, made.tiles_x = _ragged(sizes[base], group, planes, units)
        made.tiles = planes * made.tiles_y * made.tiles_x
        made.at_once = -(-made.tiles // (units * each)) if even else 1
        launches.append((reduction(dtype, reduce, even), -(-made.tiles // made.at_once), bytes(made)))
    return _Layout(launches, end // size, wide, planes if rounds[-1][-1] else 0, views)


def _rounds(sizes: list[tuple[int, int]], fours: bool) -> list[tuple[int, int, bool, bool]]:
    """(base, levels that tiles of it give, whether it is by groups of four and all sides are even, whether a block
    finishes the chain) of each launch."""
    base, result = 0, []
    while base < len(sizes) - 1:
        left, (h, w) = len(sizes) - 1 - base, sizes[base]
        group = min(left, GROUP, ((h | w) & -(h | w)).bit_length() - 1)
        even = group > 1 and fours and base == 0
        if not even:
            group = min(left, RAGGED_GROUP if max(h, w) > TILE else GROUP)
            if left > group + 1 and max(sizes[base + group + 1]) <= LAST and max(sizes[base + group]) > TILE:
                group += 1  # that saves a launch, or the last block three quarters of its work
        finish = left > group and max(sizes[base + group]) <= LAST
        result.append((base, group, even, finish))
        base = len(sizes) if finish else base + group
    return result


def _ragged(size: tuple[int, int], group: int, planes: int, units: int) -> tuple[int, int, int, int]:
    """window, own and tiles down and across of a launch where sides are odd, as reduce.cu has them."""
    if max(size) <= TILE:
        return GROUP, TILE, 1, 1
    for window in reversed(WINDOWS):
        own = (1 << window - group) - (1 if group > 1 else 2)  # level 1 is made by twos
        down, across = (-(-side // (own << group)) for side in size)
        if planes * down * across > units:  # some for each multiprocessor
            break
    return window, own, down, across


def _part(side: int) -> float:
    """1 / side as the kernel would have it, in fp32."""
    return 1 / ctypes.c_float(side).value


class _Counters:
    """Counters of a device that are zero whenever no chain runs: each launch leaves its own as it found them."""

    def __init__(self, device: Device) -> None:
        self.all = torch.zeros(2 * COUNTERS, dtype=torch.int32, device=device.torch_device)
        device.finish(device.record())  # other streams read them
        self.taken = COUNTERS
        """By the default stream, whose launches come one after the other, and by graphs, each of which has its own for
        good, as nobody tells when it is gone. Those that come when all are taken bring theirs, and set them to zero."""


_counters: dict[Device, _Counters] = {}
_lock = threading.Lock()


def _zeros(device: Device, count: int) -> int:
    """The address of counters for a launch, or 0 where there are none that nobody else counts with."""
    captured = device.capturing()
    if not captured and (device.stream() not in DEFAULT_STREAMS or count > COUNTERS):
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
    source = image.data_ptr()
    fours = image.shape[-1] % 4 == 0 and source % (4 * image.dtype.itemsize) == 0
    each = max(min(RESIDENT, device.shared_bytes // BLOCK_BYTES), 1)
    layout = _layout(image.shape, levels, image.dtype, reduce, fours, device.multiprocessors, each)
    packed = torch.empty(layout.elements, dtype=image.dtype, device=image.device)
    finished = wide = 0
    keep: list[torch.Tensor] = []  # until all is queued
    if layout.counters:
        finished = _zeros(device, layout.counters)
        if not finished:
            keep.append(torch.zeros(layout.counters, dtype=torch.int32, device=image.device))
            finished = keep[-1].data_ptr()
    if layout.wide:
        keep.append(torch.empty(layout.wide, dtype=torch.float32, device=image.device))
        wide = keep[-1].data_ptr()
    for kernel, blocks, parameter in layout.launches:
        made = Chain.from_buffer_copy(parameter)
        made.source, made.packed, made.finished, made.wide = source, packed.data_ptr(), finished, wide
        device.launch(kernel, (blocks, 1, 1), THREADS, made)
    return [packed.as_strided(*view) for view in layout.views]
