"""How much virtual tokens blend of each patch, and the patches: memory and launches of vortices.cu and tiles.cu."""

from __future__ import annotations

import ctypes

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels import choosing
from gpu_lod.kernels.device import MOST_BLOCKS, THREADS, Device
from gpu_lod.kernels.sources import TILES, VORTICES, VORTICES_WEIGHTS

MOST_PATCHES = 2**13
"""For which a block has room."""


class Vortices(ctypes.Structure):
    """The parameter of vortices.cu."""

    _fields_ = (
        ("relevance", ctypes.c_void_p),
        ("amounts", ctypes.c_void_p),
        ("least", ctypes.c_void_p),
        ("anchors", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("strengths", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("sites", ctypes.c_void_p),
        ("across", ctypes.c_float),
        ("down", ctypes.c_float),
        ("tokens", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
    )


class Tiles(ctypes.Structure):
    """The parameter of tiles.cu."""

    _fields_ = (
        ("pictures", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("channels", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("step", ctypes.c_int),
    )


_AT_ONCE = 4
"""Patches that a block of tiles.cu makes."""


def tiles(device: Device, pictures: torch.Tensor, patch: int) -> torch.Tensor:
    """Pictures [B, C, H, W], fp32, of whole patches, cut into these: [B, Hg Wg, C, P, P], row by row.

    Raises:
        LimitError: more patches than a launch makes.
    """
    pictures = pictures.detach().contiguous()
    images, channels, height, width = pictures.shape
    rows, columns = height // patch, width // patch
    groups = -(-columns // _AT_ONCE)
    if images * rows * groups > MOST_BLOCKS or channels * patch * patch >= 2**29:
        raise LimitError(f"{images} x {rows * columns} patches are more than a launch makes. Use a smaller batch.")
    made = pictures.new_empty(images, rows * columns, channels, patch, patch)
    parameters = Tiles(
        pictures=pictures.data_ptr(),
        tiles=made.data_ptr(),
        channels=channels,
        rows=rows,
        columns=columns,
        patch=patch,
        groups=groups,
        step=next(n for n in (4, 2, 1) if patch % n == 0 and pictures.data_ptr() % (4 * n) == 0),
    )
    device.launch(TILES, (images * rows * groups, 1, 1), THREADS, parameters)
    return made


def vortices(
    device: Device,
    relevance: torch.Tensor,
    amounts: torch.Tensor,
    anchors: torch.Tensor,
    squares: torch.Tensor,
    strengths: torch.Tensor,
    centres: tuple[torch.Tensor, torch.Tensor],
    size: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3], scores [B, K] and weights [B, K, N] of tokens, high scores first: as `SoftVortex` has it. All
    are fp32.

    Args:
        relevance, amounts: [B, N], of the patches, row by row, the former as logarithms.
        anchors, squares, strengths: [K, 2] in parts of width and height, [K] squared spreads in units of the longer
            side, and [K].
        centres: [columns] and [rows], of the patches in parts of the sides.
        size: (height, width).

    Raises:
        LimitError: more patches than a block has room for, or more tokens than a launch has blocks.
    """
    (images, patches), tokens = relevance.shape, len(anchors)
    if patches > MOST_PATCHES or images * tokens > MOST_BLOCKS:
        raise LimitError(
            f"{images} x {tokens} tokens of {patches} patches are more than a launch takes ({MOST_BLOCKS} of "
            f"{MOST_PATCHES})."
        )
    x, y = centres
    longer = max(size)
    given = [values.detach().contiguous() for values in (relevance, amounts, anchors, -2 * squares, strengths)]
    least = given[1].amin(1)
    scores = given[0].new_empty(images, tokens)
    parameters = Vortices(
        **{name: values.data_ptr() for name, values in zip(_GIVEN, given, strict=True)},
        least=least.data_ptr(),
        x=x.data_ptr(),
        y=y.data_ptr(),
        scores=scores.data_ptr(),
        across=size[1] / longer,
        down=size[0] / longer,
        tokens=tokens,
        rows=len(y),
        columns=len(x),
    )
    device.launch(VORTICES, (images * tokens, 1, 1), THREADS, parameters)
    if tokens <= choosing.MOST_BEST:
        scores, order = choosing.best(device, scores, tokens)
    else:
        scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
    weights, sites = given[0].new_empty(images, tokens, patches), given[0].new_empty(images, tokens, 3)
    parameters.order, parameters.weights, parameters.sites = order.data_ptr(), weights.data_ptr(), sites.data_ptr()
    device.launch(VORTICES_WEIGHTS, (images * tokens, 1, 1), THREADS, parameters)
    return sites, scores, weights


_GIVEN = "relevance", "amounts", "anchors", "squares", "strengths"
