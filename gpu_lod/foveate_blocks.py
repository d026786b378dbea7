"""Foveation on software renderers: a picture in blocks of 4 x 4 pixels, which a shader filters by itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gpu_lod.context import Context
from gpu_lod.program import MAX_GROUPS
from gpu_lod.transfer import ALIGNMENT, Planes, bind_table, word_defines

TILE = (64, 8)
"""(width, height), in pixels, of what a row of a workgroup of foveate_blocks.comp makes."""

TILES = 4
"""Rows of a workgroup."""

IMAGES = 512
"""Most images that its table of tiles can number."""

SERIES_FROM = 43
"""Pixels: e + e0 from which the corners of its blocks of 4 x 4 are at most 1/20 of that from their middles. There the
first three terms of log2(1 + t) are right to 2.3e-6 of a level."""

THREE_LEVELS_FROM = 5
"""Pixels: e + e0 from which levels in such a block are less than 1 apart: log2((5 + 3 sqrt 2) / 5) = 0.9."""

LEAST_E0 = 1e-9
"""Below it squares of distances in units of e0 may overflow, and the series has no value."""


def highest(fixation: tuple[float, float], size: tuple[int, int], e0: float, bias: float, last: int) -> int:
    """The last level that is read."""
    height, width = size
    x, y = fixation
    far = math.hypot(max(x, 1 - x) * width, max(y, 1 - y) * height) / max(size)
    return math.ceil(min(float(last), max(0.0, math.log2(1 + far / e0) + bias)))


def ranges_of(ctx: Context, target: Planes, channels: int) -> Iterator[tuple[slice, slice]]:
    """Images, and rows of them, that can be made at once where each channel has a binding of its own: as many whole
    images as may be, else rows of one; none where not even a tile's rows fit, or a side is beyond the table."""
    if max(target.height, target.width) > 2**16:
        return
    most = (ctx.limits.storage_bytes - 2 * ALIGNMENT) // target.dtype.itemsize
    images, height = target.count // channels, target.height
    at_once = (most // target.area - 1) // channels + 1  # of the last image there is one plane in each
    at_once = min(at_once, IMAGES)
    if at_once > 0:
        for first in range(0, images, at_once):
            yield slice(first, min(first + at_once, images)), slice(0, height)
    elif rows := most // target.width // TILE[1] * TILE[1]:
        for image in range(images):
            for begin in range(0, height, rows):
                yield slice(image, image + 1), slice(begin, min(begin + rows, height))


def blocks(
    ctx: Context,
    target: Planes,
    ranges: list[tuple[slice, slice]],
    fixation: torch.Tensor,
    size: tuple[int, int],
    levels: int,
    rule: tuple[float, float],
    uniforms: dict[str, Any],
    defines: dict[str, Any],
) -> None:
    """Filtered by the shader itself. A dispatch for each kind of tile: blocks of coarser levels touch fewer texels.

    Args:
        target: planes whose rows are as long as the image's, or longer.
        size: (height, width) of the image.
    """
    # Where texels cover whole blocks, their centres lie between blocks from level 3 on, and two of a side do.
    last = max(highest((x, y), size, *rule, levels - 1) for x, y in fixation.tolist())
    whole = all(n % (1 << last) == 0 for n in size)
    # Where there are no more levels, the last one is read in place of higher ones.
    least = [2, 3][: 1 + whole] if levels > 3 else []
    nearest = [max(rule[0] * (2.0 ** min(level * 1.0001 - rule[1], 1000.0) - 1), 0.0) for level in least]
    kinds = _kinds(fixation, size, nearest)
    _, codes = _tiles(size)
    channels, row, area = defines["CHANNELS"], target.width, target.area
    at_once = target.per_word if row % 4 else 4
    groups = []
    for images, rows in ranges:
        lines = slice(rows.start // TILE[1], -(-rows.stop // TILE[1]))
        here = kinds[images, lines].ravel()
        layers = np.arange(images.stop - images.start, dtype=np.uint32)[:, None, None] << 23
        groups.append(((layers | codes[lines]).ravel()[here.argsort(kind="stable")], np.bincount(here).tolist()))
    tiles = np.concatenate([tiles for tiles, _ in groups]).view(np.int32)
    bind_table(ctx, 2, ctx.private.lease(tiles.nbytes).write(torch.from_numpy(tiles)))
    done = 0
    for (images, rows), (_, counts) in zip(ranges, groups, strict=True):
        begin = images.start * channels * area + rows.start * row
        end = (images.stop - 1) * channels * area + rows.stop * row
        first_stored = [0] * 4
        for channel, binding in zip(range(channels), (0, 3, 4, 5), strict=False):
            index = target.bind(ctx, binding, begin + channel * area, end + channel * area - 1)
            first_stored[channel] = (index + channel * area) // at_once
        for texels, least_e, count in zip((4, 3, 2), (0.0, *nearest), counts, strict=False):
            if not count:
                continue
            away = (least_e + rule[0]) * max(size)
            series = rule[0] >= LEAST_E0 and away >= SERIES_FROM
            halves = whole and texels < 4 and away >= THREE_LEVELS_FROM
            how = {"TEXELS": texels, "HALVES": halves, "AT_ONCE": at_once, "SERIES": series}
            program = ctx.programs.compute("foveate_blocks.comp", **word_defines(target.dtype), **how, **defines)
            program.set(
                u_first_stored=tuple(first_stored),
                u_first_tile=done,
                u_tiles=count,
                u_first_layer=images.start,
                u_size=(target.width, target.height),
                **uniforms,
            )
            workgroups = -(-count // TILES)
            high = -(-workgroups // MAX_GROUPS)
            program.dispatch_groups(-(-workgroups // high), high, 1)
            done += count


def _kinds(fixation: torch.Tensor, size: tuple[int, int], nearest: list[float]) -> Any:
    """[B, rows, columns] uint8, how many of these eccentricities all of a tile is beyond."""
    points = fixation.detach().cpu().double().numpy()
    begins, codes = _tiles(size)
    x, y = (
        np.square(np.maximum(np.maximum(ahead := begin - points[:, axis, None] * size[1 - axis], -side - ahead), 0.0))
        for axis, (begin, side) in enumerate(zip(begins, TILE, strict=True))
    )
    squared = x[:, None, :] + y[:, :, None]
    kinds = np.zeros((len(points), *codes.shape), np.uint8)
    for e in nearest:
        pixels = e * max(size)
        kinds += squared >= pixels * pixels
    return kinds


@functools.lru_cache(maxsize=16)
def _tiles(size: tuple[int, int]) -> tuple[tuple[Any, Any], Any]:
    """Where the tiles of an image begin along x and y, in pixels, and what the shader calls them: uint32 [rows,
    columns]."""
    begins = np.arange(0.0, size[1], TILE[0]), np.arange(0.0, size[0], TILE[1])
    columns, lines = (np.arange(len(begin), dtype=np.uint32) for begin in begins)
    return begins, lines[:, None] << 10 | columns
