"""The samplers: memory and launches of log_polar.cu, foveate.cu and patches.cu, which read textures, and of their likes
that read levels in memory (`_of_levels`).

Fixations and sites are read by the kernels, in device memory, so nothing waits for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from gpu_lod.errors import CaptureError, LimitError
from gpu_lod.kernels.device import MOST_BLOCKS, MOST_ROWS, THREADS, Device, DeviceTexture, Grid
from gpu_lod.kernels.memory import Levels, Memory
from gpu_lod.kernels.sources import of_dtype
from gpu_lod.kernels.textures import Source

_ROWS = THREADS // 32
"""That a block of foveation makes."""
RINGS = 8
"""That a thread of log_polar.cu makes at once."""
SAMPLES = 4
"""That a thread of patches.cu makes at once."""
MOST_COLUMNS = 2**23
"""Pixels of a row up to which fp32 holds their centres."""


class Rings(ctypes.Structure):
    """Where the samples of a log-polar map are: rings.cuh."""

    _fields_ = (
        ("rings", ctypes.c_void_p),
        ("wedges", ctypes.c_void_p),
        ("fixations", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("aspect_x", ctypes.c_float),
        ("aspect_y", ctypes.c_float),
        ("ring_count", ctypes.c_uint32),
        ("wedge_count", ctypes.c_uint32),
        ("channels", ctypes.c_int),
        ("layers", ctypes.c_int),
        ("border_zero", ctypes.c_int),
    )


class LogPolar(ctypes.Structure):
    """The parameter of log_polar.cu."""

    _fields_ = (("texture", ctypes.c_uint64), ("rings", Rings))


class LogPolarOfLevels(ctypes.Structure):
    """The parameter of log_polar_of_levels.cu."""

    _fields_ = (("levels", Levels), ("rings", Rings))


class Gaze(ctypes.Structure):
    """Where the pixels of a foveated picture are read: gaze.cuh."""

    _fields_ = (
        ("fixations", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("box_x", ctypes.c_float),
        ("box_y", ctypes.c_float),
        ("bias", ctypes.c_float),
        ("pixel_x", ctypes.c_float),
        ("pixel_y", ctypes.c_float),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("channels", ctypes.c_int),
        ("layers", ctypes.c_int),
    )


class Foveate(ctypes.Structure):
    """The parameter of foveate.cu."""

    _fields_ = (("texture", ctypes.c_uint64), ("gaze", Gaze), ("anisotropy", ctypes.c_float))


class FoveateOfLevels(ctypes.Structure):
    """The parameter of foveate_of_levels.cu."""

    _fields_ = (("levels", Levels), ("gaze", Gaze))


class Wanted(ctypes.Structure):
    """Where sites are read and patches written, and what these look like: sites.cuh."""

    _fields_ = (
        ("sites", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("scale", ctypes.c_float * 4),
        ("offset", ctypes.c_float * 4),
        ("budget", ctypes.c_uint32),
        ("share", ctypes.c_uint32),
        ("patch", ctypes.c_int),
        ("channels", ctypes.c_int),
        ("layers", ctypes.c_uint32),
        ("border_zero", ctypes.c_int),
        ("bias", ctypes.c_float),
    )


class Patches(ctypes.Structure):
    """The parameter of patches.cu."""

    _fields_ = (
        ("texture", ctypes.c_uint64),
        ("texels", ctypes.c_uint64),
        ("height", ctypes.c_float),
        ("width", ctypes.c_float),
        ("last", ctypes.c_float),
        ("pixel_x", ctypes.c_float),
        ("pixel_y", ctypes.c_float),
        ("wanted", Wanted),
    )


class PatchesOfLevels(ctypes.Structure):
    """The parameter of patches_of_levels.cu."""

    _fields_ = (("levels", Levels), ("wanted", Wanted))


def log_polar(
    source: Source | Memory,
    fixation: torch.Tensor,
    rings: torch.Tensor,
    wedges: torch.Tensor,
    *,
    border_zero: bool,
) -> torch.Tensor:
    """[B, C, rings, wedges] or [C, rings, wedges] of a pyramid's dtype.

    Args:
        fixation: [B, 2].
        rings: fp32 [rings, 2], radius / longer side and level.
        wedges: fp32 [wedges, 2], cos and sin.
    """
    samples = len(rings) * len(wedges)
    if samples >= 2**31:
        raise LimitError(
            f"{len(rings)} rings of {len(wedges)} wedges are {samples} samples; a map may have 2^31 - 1. Ask for fewer."
        )
    target = source_like(source, source.channels, len(rings), len(wedges))
    points = placed(source.device, fixation, source.where)
    longer = max(source.height, source.width)
    pieces = -(-len(wedges) // THREADS)
    threads = -(-len(wedges) // pieces // 32) * 32
    for first, count, read in _parts(source):
        where = Rings(
            rings=rings.data_ptr(),
            wedges=wedges.data_ptr(),
            fixations=points[first].data_ptr(),
            target=target[first].data_ptr(),
            aspect_x=longer / source.width,
            aspect_y=longer / source.height,
            ring_count=len(rings),
            wedge_count=len(wedges),
            channels=source.channels,
            layers=count,
            border_zero=border_zero,
        )
        grid = (pieces, min(len(rings), MOST_ROWS), min(count, MOST_ROWS))
        if isinstance(read, Levels):
            _launch(source, "log_polar_of_levels", grid, LogPolarOfLevels(read, where), threads=threads)
        else:
            grid = (pieces, min(-(-len(rings) // RINGS), MOST_ROWS), min(count, MOST_ROWS))
            _launch(source, "log_polar", grid, LogPolar(read.filtered, where), threads=threads)
    return target if source.batched else target[0]


def foveate(
    source: Source | Memory, fixation: torch.Tensor, e0: float, bias: float, anisotropy: float = 1.0
) -> torch.Tensor:
    """A tensor like level 0.

    Args:
        fixation: [B, 2].
        anisotropy: of texture units alone.
    """
    height, width = source.height, source.width
    if height > MOST_ROWS * _ROWS or width > MOST_COLUMNS:
        raise LimitError(
            f"the image is {width} x {height}, and a CUDA launch ends at {MOST_ROWS * _ROWS} rows of {MOST_COLUMNS}. "
            "Cut it into parts, or use backend='torch'."
        )
    target = source_like(source, source.channels, height, width)
    points = placed(source.device, fixation, source.where)
    longer = max(height, width)
    for first, count, read in _parts(source):
        gaze = Gaze(
            fixations=points[first].data_ptr(),
            target=target[first].data_ptr(),
            box_x=width / longer / e0,
            box_y=height / longer / e0,
            bias=bias,
            pixel_x=1 / width,
            pixel_y=1 / height,
            height=height,
            width=width,
            channels=source.channels,
            layers=count,
        )
        grid = (-(-width // 32), -(-height // _ROWS), min(count, MOST_ROWS))
        if isinstance(read, Levels):
            _launch(source, "foveate_of_levels", grid, FoveateOfLevels(read, gaze))
        else:
            unit = read.anisotropic if anisotropy > 1 else read.filtered
            _launch(source, "foveate", grid, Foveate(unit, gaze, anisotropy))
    return target if source.batched else target[0]


def patches(
    source: Source | Memory,
    sites: torch.Tensor,
    patch: int,
    scale: Sequence[float],
    offset: Sequence[float],
    dtype: torch.dtype,
    *,
    border_zero: bool,
    bias: float = 0.0,
) -> torch.Tensor:
    """[B, K, C, patch, patch] or [K, C, patch, patch]: stored values, times scale and plus offset by channel.

    Args:
        sites: [B, K, 3] or [1, K, 3].
    """
    budget, area = sites.shape[1], patch * patch
    target = source_like(source, budget, source.channels, patch, patch, dtype=dtype)
    points = placed(source.device, sites.expand(source.batch, -1, -1), source.where)
    for first, count, read in _parts(source):
        if count * budget > MOST_BLOCKS:
            raise LimitError(f"{count} x {budget} sites are more than a CUDA launch covers. Pass fewer at once.")
        # A texture's 1 is 255 counts, in the source and, if that is counts too, in the result.
        unit = 255.0 if not isinstance(read, Levels) and source.dtype == torch.uint8 else 1.0
        wanted = Wanted(
            sites=points[first].data_ptr(),
            target=target[first].data_ptr(),
            scale=(ctypes.c_float * 4)(*(unit * value for value in scale)),
            offset=(ctypes.c_float * 4)(*offset),
            budget=budget,
            share=_share(patch),
            patch=patch,
            channels=source.channels,
            layers=count,
            border_zero=border_zero,
            bias=bias,
        )
        each = 1 if isinstance(read, Levels) else SAMPLES
        threads = min(THREADS, -(-area // each // 32) * 32)
        grid = (budget, min(-(-area // each // threads), MOST_ROWS), min(count, MOST_ROWS))
        if isinstance(read, Levels):
            _launch(source, "patches_of_levels", grid, PatchesOfLevels(read, wanted), dtype, threads)
        else:
            size = float(source.height), float(source.width), float(source.levels - 1)
            pixel = 1 / source.width, 1 / source.height
            parameters = Patches(read.filtered, read.nearest, *size, *pixel, wanted)
            _launch(source, "patches", grid, parameters, dtype, threads)
    return target if source.batched else target[0]


def _share(patch: int) -> int:
    """Of 2^32, rounded up, where the rows of a patch's samples are found by multiplying with it: sites.cuh."""
    return -(-(2**32) // patch) if patch > 1 and patch**3 < 2**32 else 0


def _parts(source: Source | Memory) -> Iterator[tuple[int, int, DeviceTexture | Levels]]:
    """Images that a launch makes: the first, how many, and where they are read."""
    if isinstance(source, Memory):
        yield 0, source.batch, source.addresses
        return
    source.ready()
    for part in source.parts:
        yield part.first, part.count, part.texture


def _launch(
    source: Source | Memory,
    name: str,
    grid: Grid,
    parameters: ctypes.Structure,
    dtype: torch.dtype | None = None,
    threads: int = THREADS,
) -> None:
    source.device.launch(of_dtype(name, dtype or source.dtype), grid, threads, parameters)


def source_like(source: Source | Memory, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Uninitialised, for each image of the batch."""
    return torch.empty((source.batch, *shape), dtype=dtype or source.dtype, device=source.where)


def placed(device: Device, points: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Fixations or sites where the kernel reads them, fp32 and contiguous.

    Raises:
        CaptureError: they are on the host and a CUDA graph is being captured, which would read them there again.
    """
    if points.device != where and device.capturing():
        raise CaptureError(
            f"a CUDA graph is being captured, and the fixation or the sites are on {points.device}: the graph would "
            f"read there again whenever it runs. Pass a tensor on {where}, and write to that one."
        )
    points = points.detach()
    if points.device != where and points.is_pinned():  # read when the GPU comes to it, and written to meanwhile
        points = points.clone()
    return points.to(where, torch.float32, non_blocking=True).contiguous()
