"""SLIC's superpixels as scikit-image makes them: memory and launches of lab.cu, nearest.cu, means.cu, connected.cu."""

from __future__ import annotations

import ctypes

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.choosing import MOST_CELLS
from gpu_lod.kernels.device import MOST_BLOCKS, THREADS, Device
from gpu_lod.kernels.sources import CONNECTED, LAB, MEANS, NEAREST

ROUNDS = 10
"""Of finding the nearest centres, and these anew."""
MOST_PAIRS = 2**26
"""Of a pixel and a centre, of a picture: each round goes through all of them."""
_WARP = 32
"""Threads of means.cu."""


class Lab(ctypes.Structure):
    """The parameter of lab.cu."""

    _fields_ = (
        ("pictures", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("high", ctypes.c_void_p),
        ("colours", ctypes.c_void_p),
        ("stride", ctypes.c_ulonglong),
        ("ratio", ctypes.c_double),
        ("channels", ctypes.c_int),
        ("pixels", ctypes.c_int),
        ("images", ctypes.c_int),
    )


class Nearest(ctypes.Structure):
    """The parameter of nearest.cu."""

    _fields_ = (
        ("colours", ctypes.c_void_p),
        ("centres", ctypes.c_void_p),
        ("labels", ctypes.c_void_p),
        ("weight", ctypes.c_double),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("segments", ctypes.c_int),
        ("first_y", ctypes.c_int),
        ("first_x", ctypes.c_int),
        ("step_y", ctypes.c_int),
        ("step_x", ctypes.c_int),
        ("across", ctypes.c_int),
        ("reach_y", ctypes.c_int),
        ("reach_x", ctypes.c_int),
        ("tiles", ctypes.c_int),
    )


class Means(ctypes.Structure):
    """The parameter of means.cu."""

    _fields_ = (
        ("colours", ctypes.c_void_p),
        ("labels", ctypes.c_void_p),
        ("centres", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("segments", ctypes.c_int),
    )


class Connected(ctypes.Structure):
    """The parameter of connected.cu."""

    _fields_ = (
        ("labels", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("least", ctypes.c_int),
        ("most", ctypes.c_int),
    )


def superpixels(device: Device, pictures: torch.Tensor, segments: int, compactness: float) -> tuple[torch.Tensor, int]:
    """Superpixels of pictures [B, C, h, w], fp32: of each pixel which it is in, [B, h, w], int64, from 0 on; and how
    many a picture of this size can have. As `skimage.segmentation.slic(picture, n_segments=segments,
    compactness=compactness, start_label=1)` numbers them, less one.

    Args:
        pictures: of three channels or more the first three are RGB, of fewer the first alone is looked at.

    Raises:
        LimitError: larger pictures, or more segments in them, than kernels are to go through.
    """
    images, (rows, columns) = len(pictures), pictures.shape[2:]
    pixels = rows * columns
    (first_y, step_y), (first_x, step_x) = grid((rows, columns), segments)
    down, across = (-(-(n - first) // step) for n, first, step in ((rows, first_y, step_y), (columns, first_x, step_x)))
    count, tiles = down * across, -(-pixels // THREADS)
    if pixels > MOST_CELLS or pixels * count > MOST_PAIRS or images * max(tiles, count) > MOST_BLOCKS:
        raise LimitError(
            f"{images} x {count} superpixels of {rows} x {columns} patches are more than kernels make ({MOST_CELLS} "
            f"patches, {MOST_PAIRS} pairs of a patch and a superpixel)."
        )
    (_, reach_y), (_, reach_x) = grid((rows, columns), count)  # and not of as many as were asked for
    channels = 3 if pictures.shape[1] >= 3 else 1
    seen = pictures.detach()[:, :channels].contiguous()
    low, high = torch.aminmax(seen.flatten(1), dim=1)
    colours = seen.new_empty((images, pixels, 3), dtype=torch.float64)
    scratch = torch.empty((5, images, pixels), dtype=torch.int32, device=seen.device)
    centres = colours.new_empty((images, count, 5))
    regions = torch.empty((images, rows, columns), dtype=torch.int64, device=seen.device)
    lab = Lab(
        pictures=seen.data_ptr(),
        low=low.data_ptr(),
        high=high.data_ptr(),
        colours=colours.data_ptr(),
        stride=channels * pixels,
        ratio=1 / compactness,
        channels=channels,
        pixels=pixels,
        images=images,
    )
    device.launch(LAB, (-(-images * pixels // THREADS), 1, 1), THREADS, lab)
    nearest = Nearest(
        colours=colours.data_ptr(),
        labels=scratch[4].data_ptr(),
        weight=1 / max(step_y, step_x) ** 2,
        rows=rows,
        columns=columns,
        segments=count,
        first_y=first_y,
        first_x=first_x,
        step_y=step_y,
        step_x=step_x,
        across=across,
        reach_y=2 * reach_y,
        reach_x=2 * reach_x,
        tiles=tiles,
    )
    means = Means(
        colours=colours.data_ptr(),
        labels=scratch[4].data_ptr(),
        centres=centres.data_ptr(),
        rows=rows,
        columns=columns,
        segments=count,
    )
    for turn in range(ROUNDS):
        device.launch(NEAREST, (images * tiles, 1, 1), THREADS, nearest)
        if turn < ROUNDS - 1:
            device.launch(MEANS, (images * count, 1, 1), _WARP, means)
            nearest.centres = centres.data_ptr()
    least = int(0.5 * (pixels / count))
    connected = Connected(
        labels=scratch[4].data_ptr(),
        scratch=scratch.data_ptr(),
        regions=regions.data_ptr(),
        rows=rows,
        columns=columns,
        least=least,
        most=int(3 * (pixels / count)),
    )
    device.launch(CONNECTED, (images, 1, 1), THREADS, connected)
    return regions, pixels // max(least, 1)


def grid(size: tuple[int, int], points: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where a regular grid of about so many points begins along y and x, and its steps: as
    `skimage.util.regular_grid((1, *size), points)` has it."""
    height, width = size
    if height * width <= points:
        return (0, 1), (0, 1)
    short, long = sorted(size)
    even = (height * width / points) ** 0.5
    steps = [even, even] if even <= short else [short, long / points]
    if height > width:
        steps.reverse()
    return (int(steps[0] // 2), round(steps[0])), (int(steps[1] // 2), round(steps[1]))
