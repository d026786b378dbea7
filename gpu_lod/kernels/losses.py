"""What nodes of a quadtree lose against their children: memory and launches of losses.cu."""

from __future__ import annotations

import ctypes

import torch

from gpu_lod.kernels.device import THREADS, Device, check_blocks
from gpu_lod.kernels.sources import of_dtype


class Losses(ctypes.Structure):
    """The parameter of losses.cu."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("means", ctypes.c_void_p),
        ("lost", ctypes.c_void_p),
        ("unit", ctypes.c_float),
        ("tall", ctypes.c_int),
        ("wide", ctypes.c_int),
        ("channels", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("side", ctypes.c_int),
    )


def losses(device: Device, images: torch.Tensor, patch: int, levels: int) -> list[torch.Tensor]:
    """Of nodes of levels 1, 2, ..., `levels`, [B, h_l, w_l] each, fp32, of images [B, C, H, W]: as
    `allocate.node_losses` has it, in units of [0, 1].

    Raises:
        LimitError: more than a launch covers.
    """
    batch, channels, height, width = images.shape
    rows, columns = -(-height // patch), -(-width // patch)
    check_blocks(images, patch, fits=channels * patch**2 < 2**31)
    source, side, found = images.detach().contiguous(), 1, []
    for _ in range(levels):
        rows, columns = -(-rows // 2), -(-columns // 2)
        lost = images.new_empty((batch, rows, columns), dtype=torch.float32)
        means = images.new_empty((batch, channels, rows * patch, columns * patch), dtype=torch.float32)
        parameters = Losses(
            source=source.data_ptr(),
            means=means.data_ptr(),
            lost=lost.data_ptr(),
            unit=255.0 if source.dtype == torch.uint8 else 1.0,
            tall=source.shape[-2],
            wide=source.shape[-1],
            channels=channels,
            rows=rows,
            columns=columns,
            patch=patch,
            height=height,
            width=width,
            side=side,
        )
        device.launch(of_dtype("losses", source.dtype), (batch * rows * columns, 1, 1), THREADS, parameters)
        source, side = means, 2 * side
        found.append(lost)
    return found
