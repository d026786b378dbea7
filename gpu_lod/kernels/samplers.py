"""The samplers: memory and launches of log_polar.cu, foveate.cu, patches.cu and patches_of_levels.cu.

Fixations and sites are read by the kernels, in device memory, so nothing waits for them.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from gpu_lod.errors import CaptureError, LimitError
from gpu_lod.kernels.chain import MOST_LEVELS
from gpu_lod.kernels.device import Device, per_device
from gpu_lod.kernels.sources import ELEMENTS, sampling
from gpu_lod.kernels.textures import Source

THREADS = 256
MOST_ROWS = 65535
"""Of blocks of a grid."""
_KEPT_TABLES = 64


class LogPolar(ctypes.Structure):
    """The parameter of log_polar.cu."""

    _fields_ = (
        ("texture", ctypes.c_uint64),
        ("rings", ctypes.c_void_p),
        ("wedges", ctypes.c_void_p),
        ("fixations", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("aspect_x", ctypes.c_float),
        ("aspect_y", ctypes.c_float),
        ("ring_count", ctypes.c_uint32),
        ("wedge_count", ctypes.c_uint32),
        ("channels", ctypes.c_int),
        ("border_zero", ctypes.c_int),
    )


class Foveate(ctypes.Structure):
    """The parameter of foveate.cu."""

    _fields_ = (
        ("texture", ctypes.c_uint64),
        ("fixations", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("box_x", ctypes.c_float),
        ("box_y", ctypes.c_float),
        ("bias", ctypes.c_float),
        ("anisotropy", ctypes.c_float),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("channels", ctypes.c_int),
    )


_SITES = (
    ("sites", ctypes.c_void_p),
    ("target", ctypes.c_void_p),
    ("scale", ctypes.c_float * 4),
    ("offset", ctypes.c_float * 4),
)
_LOOK = (
    ("budget", ctypes.c_uint32),
    ("patch", ctypes.c_int),
    ("channels", ctypes.c_int),
    ("border_zero", ctypes.c_int),
)
"""What both kernels of patches are told: where sites are read and patches written, and what these look like."""


class Patches(ctypes.Structure):
    """The parameter of patches.cu."""

    _fields_ = (
        ("texture", ctypes.c_uint64),
        ("texels", ctypes.c_uint64),
        *_SITES,
        ("height", ctypes.c_float),
        ("width", ctypes.c_float),
        ("last", ctypes.c_float),
        *_LOOK,
    )


class PatchesOfLevels(ctypes.Structure):
    """The parameter of patches_of_levels.cu."""

    _fields_ = (
        ("level", ctypes.c_void_p * MOST_LEVELS),
        *_SITES,
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("last", ctypes.c_int),
        ("stored", ctypes.c_int),
        *_LOOK,
    )


def log_polar(
    source: Source,
    fixation: torch.Tensor,
    key: Hashable,
    tables: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    border_zero: bool,
) -> torch.Tensor:
    """[B, C, rings, wedges] or [C, rings, wedges] of a pyramid's dtype.

    Args:
        fixation: [B, 2].
        key: of the tables, which are kept.
        tables: gives fp32 (radius / longer side, level) [rings, 2] and (cos, sin) [wedges, 2].
    """
    rings, wedges = _tables_of(source.device).get(("log_polar", key), tables, source.where)
    samples = len(rings) * len(wedges)
    if samples >= 2**31:
        raise LimitError(f"{len(rings)} rings of {len(wedges)} wedges are {samples} samples; a map may have 2^31 - 1.")
    target = source_like(source, source.channels, len(rings), len(wedges))
    points = placed(source.device, fixation, source.where)
    source.ready()
    longer = max(source.height, source.width)
    for part in source.parts:
        parameters = LogPolar(
            texture=part.texture.filtered,
            rings=rings.data_ptr(),
            wedges=wedges.data_ptr(),
            fixations=points[part.first].data_ptr(),
            target=target[part.first].data_ptr(),
            aspect_x=longer / source.width,
            aspect_y=longer / source.height,
            ring_count=len(rings),
            wedge_count=len(wedges),
            channels=source.channels,
            border_zero=border_zero,
        )
        grid = (-(-samples // THREADS), part.count, 1)
        source.device.launch(sampling("log_polar", source.dtype), grid, THREADS, parameters)
    return target if source.batched else target[0]


def foveate(source: Source, fixation: torch.Tensor, e0: float, bias: float, anisotropy: float) -> torch.Tensor:
    """A tensor like level 0. `fixation` is [B, 2]."""
    target = source_like(source, source.channels, source.height, source.width)
    points = placed(source.device, fixation, source.where)
    source.ready()
    longer = max(source.height, source.width)
    for part in source.parts:
        parameters = Foveate(
            texture=part.texture.anisotropic if anisotropy > 1 else part.texture.filtered,
            fixations=points[part.first].data_ptr(),
            target=target[part.first].data_ptr(),
            box_x=source.width / longer / e0,
            box_y=source.height / longer / e0,
            bias=bias,
            anisotropy=anisotropy,
            height=source.height,
            width=source.width,
            channels=source.channels,
        )
        grid = (-(-source.width // 32), -(-source.height // (THREADS // 32)), part.count)
        source.device.launch(sampling("foveate", source.dtype), grid, THREADS, parameters)
    return target if source.batched else target[0]


def patches(
    source: Source,
    sites: torch.Tensor,
    patch: int,
    scale: Sequence[float],
    offset: Sequence[float],
    dtype: torch.dtype,
    *,
    border_zero: bool,
) -> torch.Tensor:
    """[B, K, C, patch, patch] or [K, C, patch, patch]: stored values, times scale and plus offset by channel.

    Args:
        sites: [B, K, 3] or [1, K, 3].
    """
    budget, area = sites.shape[1], patch * patch
    target = source_like(source, budget, source.channels, patch, patch, dtype=dtype)
    points = placed(source.device, sites.expand(source.batch, -1, -1), source.where)
    # A texture's 1 is 255 counts, in the source and, if that is counts too, in the result.
    unit = 255.0 if source.dtype == torch.uint8 else 1.0
    threads = min(THREADS, -(-area // 32) * 32)
    source.ready()
    for part in source.parts:
        if part.count * budget >= 2**31:
            raise LimitError(f"{part.count} x {budget} sites are more than a CUDA launch covers. Pass fewer at once.")
        parameters = Patches(
            texture=part.texture.filtered,
            texels=part.texture.nearest,
            sites=points[part.first].data_ptr(),
            target=target[part.first].data_ptr(),
            scale=(ctypes.c_float * 4)(*(unit * value for value in scale)),
            offset=(ctypes.c_float * 4)(*offset),
            height=source.height,
            width=source.width,
            last=source.levels - 1,
            budget=budget,
            patch=patch,
            channels=source.channels,
            border_zero=border_zero,
        )
        grid = (part.count * budget, min(-(-area // threads), MOST_ROWS), 1)
        source.device.launch(sampling("patches", dtype), grid, threads, parameters)
    return target if source.batched else target[0]


def patches_of_levels(
    device: Device,
    levels: Sequence[torch.Tensor],
    sites: torch.Tensor,
    patch: int,
    scale: Sequence[float],
    offset: Sequence[float],
    dtype: torch.dtype,
    *,
    border_zero: bool,
) -> torch.Tensor:
    """The same from levels that are no texture, with weights of fp32: [B, C, h, w] or [C, h, w] each, contiguous. What
    lies beyond the last is read from it.

    Args:
        sites: [B, K, 3] or [1, K, 3].
    """
    top = levels[0]
    batch, (channels, height, width) = top.shape[0] if top.ndim == 4 else 1, top.shape[-3:]
    budget, area = sites.shape[1], patch * patch
    if batch * budget >= 2**31:
        raise LimitError(f"{batch} x {budget} sites are more than a CUDA launch covers. Pass fewer at once.")
    target = torch.empty((batch, budget, channels, patch, patch), dtype=dtype, device=top.device)
    points = placed(device, sites.expand(batch, -1, -1), top.device)
    parameters = PatchesOfLevels(
        level=(ctypes.c_void_p * MOST_LEVELS)(*(level.data_ptr() for level in levels)),
        sites=points.data_ptr(),
        target=target.data_ptr(),
        scale=(ctypes.c_float * 4)(*scale),
        offset=(ctypes.c_float * 4)(*offset),
        height=height,
        width=width,
        last=len(levels) - 1,
        stored=list(ELEMENTS).index(top.dtype),
        budget=budget,
        patch=patch,
        channels=channels,
        border_zero=border_zero,
    )
    threads = min(THREADS, -(-area // 32) * 32)
    grid = (batch * budget, min(-(-area // threads), MOST_ROWS), 1)
    device.launch(sampling("patches_of_levels", dtype), grid, threads, parameters)
    return target if top.ndim == 4 else target[0]


def source_like(source: Source, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
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


class _Tables:
    """Small constant tables on a device, kept while they are used now and then."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[tuple[torch.Tensor, ...], int, Any]] = OrderedDict()
        self._captured: list[Any] = []  # graphs read them as long as the process lives

    def get(
        self, key: Hashable, make: Callable[[], tuple[torch.Tensor, ...]], where: torch.device
    ) -> tuple[torch.Tensor, ...]:
        capturing = self._device.capturing()
        with self._lock:
            if key not in self._kept:
                if capturing:
                    raise CaptureError(
                        "a CUDA graph is being captured, and the tables of these rings and wedges are not on the "
                        "device yet. Call the verb once with the same arguments before the capture."
                    )
                tables = tuple(table.to(where, non_blocking=True) for table in make())
                self._kept[key] = tables, self._device.stream(), self._device.record()
                while len(self._kept) > _KEPT_TABLES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            tables, stream, made = self._kept[key]
        if capturing:
            self._captured.append(tables)
        elif stream != self._device.stream():
            self._device.wait(made)
            for table in tables:
                if table.is_cuda:
                    table.record_stream(torch.cuda.current_stream(where))
        return tables


_tables_of = per_device(_Tables)
