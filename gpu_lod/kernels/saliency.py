"""The saliency of pictures on the grid of their patches: memory and launches of binomial.cu and salient.cu."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from gpu_lod.kernels.device import MOST_ROWS, THREADS, Device, check_blocks
from gpu_lod.kernels.sources import SALIENT, of_dtype

LEVELS = 5
"""Below the picture."""
_TILE = (8, 64)
"""Rows and columns of samples that a block of binomial.cu makes."""


class Binomial(ctypes.Structure):
    """The parameter of binomial.cu."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("weights", ctypes.c_float * 3),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("layers", ctypes.c_int),
        ("stored", ctypes.c_int),
        ("weighed", ctypes.c_int),
        ("fours", ctypes.c_int),
    )


class Salient(ctypes.Structure):
    """The parameter of salient.cu."""

    _fields_ = (
        ("level", ctypes.c_void_p * LEVELS),
        ("target", ctypes.c_void_p),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("layers", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("across", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("most", ctypes.c_int),
    )


def cells(
    device: Device,
    images: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    weights: Sequence[float],
    patch: int,
    *,
    most: bool,
) -> torch.Tensor:
    """[B, ceil(H / P), ceil(W / P)], fp32, of images [B, C, H, W]: as `saliency_cells` has it.

    Args:
        sizes: of levels 1 to 5 of the Gaussian pyramid.
        weights: of the first channels in the luma of what is stored.
        most: of the pixels of a patch; else their mean.

    Raises:
        LimitError: more than a launch covers.
    """
    batch, height, width = images.shape[0], images.shape[-2], images.shape[-1]
    rows, columns = -(-height // patch), -(-width // patch)
    check_blocks(images, patch, fits=height <= 2 * _TILE[0] * MOST_ROWS)
    images = images.detach().contiguous()
    memory = images.new_empty(batch * sum(math.prod(size) for size in sizes), dtype=torch.float32)
    levels = memory.split([batch * math.prod(size) for size in sizes])
    source, weighing, above = images, weights, (height, width)
    for level, size in zip(levels, sizes, strict=True):
        halve(device, source, level, above, weighing, batch, images.shape[1] if source is images else 1)
        source, weighing, above = level, (1.0,), size
    target = images.new_empty((batch, rows, columns), dtype=torch.float32)
    wide = min(patch, width, THREADS)
    blocks = -(-columns // (THREADS // wide))
    across = -(-columns // blocks)
    salient = Salient(
        level=(ctypes.c_void_p * LEVELS)(*(level.data_ptr() for level in levels)),
        target=target.data_ptr(),
        height=height,
        width=width,
        layers=batch,
        rows=rows,
        columns=columns,
        across=across,
        patch=patch,
        most=most,
    )
    grid = (blocks, min(rows, MOST_ROWS), min(batch, MOST_ROWS))
    device.launch(SALIENT, grid, -(-across * wide // 32) * 32, salient)
    return target


def halve(
    device: Device,
    source: torch.Tensor,
    target: torch.Tensor,
    size: tuple[int, int],
    weights: Sequence[float],
    layers: int,
    stored: int = 1,
) -> None:
    """The next level of a Gaussian pyramid, fp32, of pictures of `stored` planes of a size, weighed by the first of
    them."""
    parameters = Binomial(
        source=source.data_ptr(),
        target=target.data_ptr(),
        weights=(ctypes.c_float * 3)(*weights),
        height=size[0],
        width=size[1],
        layers=layers,
        stored=stored,
        weighed=len(weights),
        fours=_fours(source, size),
    )
    rows, columns = -(-size[0] // 2), -(-size[1] // 2)
    grid = (-(-columns // _TILE[1]), -(-rows // _TILE[0]), min(layers, MOST_ROWS))
    device.launch(of_dtype("binomial", source.dtype), grid, THREADS, parameters)


def _fours(source: torch.Tensor, size: tuple[int, int]) -> bool:
    """Whether four elements of a row can be loaded at once, of a picture that is mirrored once at most."""
    at_fours = source.data_ptr() % (4 * source.element_size()) == 0 and size[1] % 4 == 0
    return at_fours and size[0] > 2
