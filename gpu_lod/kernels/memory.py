"""Pyramids as they are in memory, for kernels that need no texture of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from gpu_lod.kernels.chain import MOST_LEVELS
from gpu_lod.kernels.device import Device
from gpu_lod.kernels.sources import ELEMENTS


class Steps(ctypes.Structure):
    """Texels of a level to a pixel, along one side: levels.cuh."""

    _fields_ = (
        ("near", ctypes.c_float * MOST_LEVELS),
        ("rest", ctypes.c_float * MOST_LEVELS),
    )


@functools.lru_cache(maxsize=1024)
def steps(side: int) -> Steps:
    """Of all levels of an image's side."""
    whole = [max(1, side >> level) / side for level in range(MOST_LEVELS)]
    near = (ctypes.c_float * MOST_LEVELS)(*whole)
    rest = (ctypes.c_float * MOST_LEVELS)(*(exact - rounded for exact, rounded in zip(whole, near, strict=True)))
    return Steps(near, rest)


class Levels(ctypes.Structure):
    """Where levels are and how large: levels.cuh."""

    _fields_ = (
        ("level", ctypes.c_void_p * MOST_LEVELS),
        ("x", Steps),
        ("y", Steps),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("last", ctypes.c_int),
        ("stored", ctypes.c_int),
    )


class Stack:
    """A mean pyramid that kernels sample, wherever they read it.

    Args:
        levels: [B, C, h, w] or [C, h, w] each, finest first, C 1 to 4.
    """

    def __init__(self, device: Device, levels: Sequence[torch.Tensor]) -> None:
        top = levels[0]
        self.device = device
        self.dtype, self.where, self.batched = top.dtype, top.device, top.ndim == 4
        self.batch = top.shape[0] if self.batched else 1
        self.channels, self.height, self.width = top.shape[-3:]
        self.levels = len(levels)


class Memory(Stack):
    """One to be read where it is, with weights of fp32; what lies beyond the last level is read from it."""

    def __init__(self, device: Device, levels: Sequence[torch.Tensor]) -> None:
        super().__init__(device, levels)
        self._levels = [level.detach().contiguous() for level in levels]

    @property
    def addresses(self) -> Levels:
        return Levels(
            level=(ctypes.c_void_p * MOST_LEVELS)(*(level.data_ptr() for level in self._levels)),
            x=steps(self.width),
            y=steps(self.height),
            height=self.height,
            width=self.width,
            last=self.levels - 1,
            stored=list(ELEMENTS).index(self.dtype),
        )
