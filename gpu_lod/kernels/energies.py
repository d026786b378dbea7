"""Oriented energy on level 1 of pictures' Gaussian pyramids: memory and launches of binomial.cu and oriented.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.device import MOST_ROWS, THREADS, Device
from gpu_lod.kernels.saliency import halve
from gpu_lod.kernels.sources import ORIENTED

ANGLES = 4
_TAPS = 9
_TILE = (16, 32)
"""Rows and columns that a block of oriented.cu makes."""


class Oriented(ctypes.Structure):
    """The parameter of oriented.cu."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("filters", ctypes.c_float * _TAPS * 4),
        ("share", ctypes.c_float),
        ("rest", ctypes.c_float),
        ("cross", ctypes.c_float),
        ("second", ctypes.c_float * 3 * ANGLES),
        ("third", ctypes.c_float * 4 * ANGLES),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("layers", ctypes.c_int),
    )


def of_half(
    device: Device,
    images: torch.Tensor,
    weights: Sequence[float],
    filters: Sequence[Sequence[float]],
    shares: tuple[float, float, float],
    steering: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
) -> torch.Tensor:
    """[B, 4, ceil(H / 2), ceil(W / 2)], fp32, of images [B, C, H, W].

    Args:
        weights: of the first channels in the luma of what is stored.
        filters: four of nine taps along a side, of which the basis is made.
        shares: of the third and the first filter in the kernel of Hxxy along x; of the second along both sides in Gxy.
        steering: for each angle, how much of the basis of G2 and of that of H2.

    Raises:
        LimitError: more than a launch covers.
    """
    batch, channels, height, width = images.shape
    rows, columns = -(-height // 2), -(-width // 2)
    if rows > MOST_ROWS * THREADS // 32:
        raise LimitError(f"images of {width} x {height} are more than a CUDA launch covers. Scale them down.")
    images = images.detach().contiguous()
    half = images.new_empty((batch, rows, columns), dtype=torch.float32)
    halve(device, images, half, (height, width), weights, batch, channels)
    target = half.new_empty((batch, ANGLES, rows, columns))
    second, third = steering
    parameters = Oriented(
        source=half.data_ptr(),
        target=target.data_ptr(),
        filters=(ctypes.c_float * _TAPS * 4)(*((ctypes.c_float * _TAPS)(*taps) for taps in filters)),
        share=shares[0],
        rest=shares[1],
        cross=shares[2],
        second=(ctypes.c_float * 3 * ANGLES)(*((ctypes.c_float * 3)(*part) for part in second)),
        third=(ctypes.c_float * 4 * ANGLES)(*((ctypes.c_float * 4)(*part) for part in third)),
        height=rows,
        width=columns,
        layers=batch,
    )
    device.launch(ORIENTED, (-(-columns // _TILE[1]), -(-rows // _TILE[0]), min(batch, MOST_ROWS)), THREADS, parameters)
    return target
