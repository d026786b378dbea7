"""What HybridAtlas makes: SLIC's superpixels as scikit-image has them, and runs of what is behind. Memory and launches
of patch_means.cu, lab.cu, nearest.cu, means.cu, connected.cu; of runs.cu."""

from __future__ import annotations

import ctypes

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.choosing import MOST_CELLS
from gpu_lod.kernels.device import MOST_BLOCKS, THREADS, Device
from gpu_lod.kernels.sources import CONNECTED, LAB, MEANS, NEAREST, PATCH_MEANS, RUNS

ROUNDS = 10
"""Of finding the nearest centres, and these anew."""
MOST_PAIRS = 2**26
"""Of a pixel and a centre, of a picture: each round goes through all of them."""
MOST_RUNS = 2**10
"""For whose boxes runs.cu has room."""
ROOM = 2**12
"""Pixels of a picture for which connected.cu has room in shared memory."""
_FEW, _SOME, _MANY = 64, 128, 1024
"""Threads of nearest.cu and patch_means.cu, of means.cu, of connected.cu."""


class PatchMeans(ctypes.Structure):
    """The parameter of patch_means.cu."""

    _fields_ = (
        ("pictures", ctypes.c_void_p),
        ("means", ctypes.c_void_p),
        ("patches", ctypes.c_ulonglong),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("patch", ctypes.c_int),
    )


class Runs(ctypes.Structure):
    """The parameter of runs.cu."""

    _fields_ = (
        ("cells", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("every", ctypes.c_void_p),
        ("middle", ctypes.c_void_p),
        ("sites", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("patch", ctypes.c_int),
    )


class Lab(ctypes.Structure):
    """The parameter of lab.cu."""

    _fields_ = (
        ("pictures", ctypes.c_void_p),
        ("colours", ctypes.c_void_p),
        ("stride", ctypes.c_ulonglong),
        ("ratio", ctypes.c_double),
        ("channels", ctypes.c_int),
        ("pixels", ctypes.c_int),
        ("tiles", ctypes.c_int),
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


def patch_means(device: Device, pictures: torch.Tensor, patch: int) -> torch.Tensor:
    """`torch.nn.functional.avg_pool2d(pictures, patch, ceil_mode=True)` of pictures [B, C, H, W], fp32, to the last
    bit, where torch's own has each thread wait for a pixel after the other. Without gradients.

    Raises:
        LimitError: more patches than a launch covers.
    """
    pictures = pictures.detach().contiguous()
    height, width = pictures.shape[2:]
    means = pictures.new_empty((*pictures.shape[:2], -(-height // patch), -(-width // patch)))
    blocks = -(-means.numel() // _FEW)
    if blocks > MOST_BLOCKS:
        raise LimitError(f"{means.numel()} patches are more than a launch covers ({MOST_BLOCKS * _FEW}).")
    parameters = PatchMeans(
        pictures=pictures.data_ptr(),
        means=means.data_ptr(),
        patches=means.numel(),
        height=height,
        width=width,
        rows=means.shape[2],
        columns=means.shape[3],
        patch=patch,
    )
    device.launch(PATCH_MEANS, (blocks, 1, 1), _FEW, parameters)
    return means


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
    count, tiles = down * across, -(-pixels // _FEW)
    if pixels > MOST_CELLS or pixels * count > MOST_PAIRS or images * max(tiles, count) > MOST_BLOCKS:
        raise LimitError(
            f"{images} x {count} superpixels of {rows} x {columns} patches are more than kernels make ({MOST_CELLS} "
            f"patches, {MOST_PAIRS} pairs of a patch and a superpixel)."
        )
    (_, reach_y), (_, reach_x) = grid((rows, columns), count)  # and not of as many as were asked for
    channels = 3 if pictures.shape[1] >= 3 else 1
    seen = pictures.detach()[:, :channels].contiguous()
    colours = seen.new_empty((images, pixels, 3), dtype=torch.float64)
    labels = torch.empty((images, pixels), dtype=torch.int32, device=seen.device)
    scratch = torch.empty((images, 3, pixels if pixels > ROOM else 0), dtype=torch.int32, device=seen.device)
    centres = colours.new_empty((images, count, 5))
    regions = torch.empty((images, rows, columns), dtype=torch.int64, device=seen.device)
    lab = Lab(
        pictures=seen.data_ptr(),
        colours=colours.data_ptr(),
        stride=channels * pixels,
        ratio=1 / compactness,
        channels=channels,
        pixels=pixels,
        tiles=-(-pixels // THREADS),
    )
    device.launch(LAB, (images * lab.tiles, 1, 1), THREADS, lab)
    nearest = Nearest(
        colours=colours.data_ptr(),
        labels=labels.data_ptr(),
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
        labels=labels.data_ptr(),
        centres=centres.data_ptr(),
        rows=rows,
        columns=columns,
        segments=count,
    )
    for turn in range(ROUNDS):
        device.launch(NEAREST, (images * tiles, 1, 1), _FEW, nearest)
        if turn < ROUNDS - 1:
            device.launch(MEANS, (images * count, 1, 1), _SOME, means)
            nearest.centres = centres.data_ptr()
    least = int(0.5 * (pixels / count))
    connected = Connected(
        labels=labels.data_ptr(),
        scratch=scratch.data_ptr(),
        regions=regions.data_ptr(),
        rows=rows,
        columns=columns,
        least=least,
        most=int(3 * (pixels / count)),
    )
    device.launch(CONNECTED, (images, 1, 1), _MANY, connected)
    return regions, pixels // max(least, 1)


def runs(
    device: Device,
    cells: torch.Tensor,
    counts: torch.Tensor,
    order: torch.Tensor,
    every: torch.Tensor,
    size: tuple[int, int],
    patch: int,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the middles of runs of cells [B, Hg, Wg], bool, are, and their sites [B, Hg Wg, 3]: as `runs` and `squares`
    of HybridAtlas have them. Sites of what is no middle are 0.

    Args:
        counts: [B], of runs.
        order: [Hg Wg], the cells along a curve, int64.
        every: [Hg Wg, 3], the sites of cells by themselves.
        size: (height, width), in pixels.
        most: runs there can be.

    Raises:
        LimitError: a larger grid than a block is to go through, or more runs than it has room for.
    """
    images, rows, columns = cells.shape
    if rows * columns > MOST_CELLS or most > MOST_RUNS or max(rows, columns) * patch >= 2**31:
        raise LimitError(
            f"{most} runs of {rows} x {columns} patches of {patch} pixels are more than a block takes ({MOST_RUNS} of "
            f"{MOST_CELLS})."
        )
    cells, counts, every = cells.contiguous(), counts.long().contiguous(), every.contiguous()
    middle, sites = torch.empty_like(cells), every.new_empty(images, rows * columns, 3)
    parameters = Runs(
        cells=cells.data_ptr(),
        counts=counts.data_ptr(),
        order=order.data_ptr(),
        every=every.data_ptr(),
        middle=middle.data_ptr(),
        sites=sites.data_ptr(),
        rows=rows,
        columns=columns,
        height=size[0],
        width=size[1],
        patch=patch,
    )
    device.launch(RUNS, (images, 1, 1), THREADS, parameters)
    return middle, sites


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
