"""Foveation on software renderers: a picture in blocks of 4 x 4 or 8 x 4 pixels, which a shader filters by itself."""

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
"""(width, height), in pixels, of what a row of a workgroup makes."""

TILES = {"foveate_blocks.comp": 4, "foveate_rows.comp": 8}
"""Rows of a workgroup."""

IMAGES = 512
"""Most images that its table of tiles can number."""

SERIES_FROM = 43
"""Pixels: e + e0 from which the corners of its blocks of 4 x 4 are at most 1/20 of that from their middles. There the
first three terms of log2(1 + t) are right to `ROUNDING`."""

THREE_LEVELS_FROM = 5
"""Pixels: e + e0 from which levels in such a block are less than 1 apart: log2((5 + 3 sqrt 2) / 5) = 0.9."""

ROUNDING = 2.3e-6
"""Of a level: what a block's may be off by."""

CORNER = 1.5 * math.sqrt(2)
"""Pixels from the middle of a block of 4 x 4 to those of its corners."""

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
    channels, row, area = defines["CHANNELS"], target.width, target.area
    at_once = target.per_word if row % 4 else 4
    # fp16's rounding takes most of the time, and takes longer eight at once.
    eights = row % 8 == 0 and ctx.programs.pairs and target.dtype != torch.float16
    kinds, ways = _kinds(fixation, size, levels, rule, eights=eights)
    _, codes = _tiles(size)
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
        firsts = [0] * 4
        for channel, binding in zip(range(channels), (0, 3, 4, 5), strict=False):
            index = target.bind(ctx, binding, begin + channel * area, end + channel * area - 1)
            firsts[channel] = index + channel * area
        for (shader, how), count in zip(ways, counts, strict=False):
            if not count:
                continue
            how = {"AT_ONCE": at_once, **how}
            program = ctx.programs.compute(shader, **word_defines(target.dtype), **how, **defines)
            program.set(
                u_first_stored=tuple(first // how["AT_ONCE"] for first in firsts),
                u_first_tile=done,
                u_tiles=count,
                u_first_layer=images.start,
                u_size=(target.width, target.height),
                **uniforms,
            )
            workgroups = -(-count // TILES[shader])
            high = -(-workgroups // MAX_GROUPS)
            program.dispatch_groups(-(-workgroups // high), high, 1)
            done += count


def _kinds(
    fixation: torch.Tensor, size: tuple[int, int], levels: int, rule: tuple[float, float], *, eights: bool
) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """[B, rows, columns] uint8, the kind of each tile, and the shader of each kind with its defines.

    Args:
        eights: eight neighbours of a row can be stored at once.
    """
    e0, longer = rule[0], max(size)
    points = fixation.detach().cpu().double().numpy()
    last = max(highest((x, y), size, *rule, levels - 1) for x, y in points.tolist())
    # Where texels cover whole blocks, their centres lie between blocks from level 3 on, and two of a side do.
    whole = all(n % (1 << last) == 0 for n in size)

    def beyond(level: float) -> float:
        """The eccentricity from which it is reached."""
        return max(e0 * (2.0 ** min(level - rule[1], 1000.0) - 1), 0.0)

    def square_of(e: float) -> float:
        """In pixels; infinite beyond a float's range."""
        return e * longer * (e * longer)

    def block(texels: int, least: float) -> tuple[str, dict[str, Any]]:
        away = (least + e0) * longer
        halves = whole and texels < 4 and away >= THREE_LEVELS_FROM
        series = e0 >= LEAST_E0 and away >= SERIES_FROM
        return "foveate_blocks.comp", {"TEXELS": texels, "HALVES": halves, "SERIES": series}

    ways = [block(4, 0.0)]
    begins, codes = _tiles(size)
    x, y = (
        (ahead := begin - points[:, axis, None] * size[1 - axis], -side - ahead)
        for axis, (begin, side) in enumerate(zip(begins, TILE, strict=True))
    )
    kinds = np.zeros((len(points), *codes.shape), np.uint8)
    if levels <= 3:  # no more are there, and the last one is read in place of higher ones
        return kinds, ways

    def squared(x: Any, y: Any) -> Any:
        return np.square(x)[:, None, :] + np.square(y)[:, :, None]

    near = squared(*(np.maximum(np.maximum(ahead, behind), 0.0) for ahead, behind in (x, y)))
    two, three = beyond(2.0002), beyond(3.0003)
    ways.append(block(3, two))
    kinds += near >= square_of(two)
    if not whole:
        return kinds, ways
    if not (eights and _is_quadratic(three / e0, CORNER / (longer * e0))):
        ways.append(block(2, three))
        kinds += near >= square_of(three)
        return kinds, ways
    # Tiles with a third level stay with those of three texels: they are few, and a dispatch takes as long as several.
    ways.append(("foveate_rows.comp", {"AT_ONCE": 8}))
    far = squared(*(np.maximum(np.abs(ahead), np.abs(behind)) for ahead, behind in (x, y)))
    for level in range(3, last + 1):
        inside = near >= square_of(beyond(level * 1.0001))
        if level < last:
            inside &= far <= square_of(beyond((level + 1) * 0.9999))
        kinds[inside] = 2
    return kinds, ways


def _is_quadratic(r: float, d: float) -> bool:
    """Whether three terms of log2(1 + |p|) are right to `ROUNDING` as far as d from p, |p| = r or more."""
    if r <= 0:
        return False
    near, far = d / r, d / (1 + r)  # of two concentric circles
    return far * (0.481 * far * far + 0.278 * near * (near + far)) <= ROUNDING


@functools.lru_cache(maxsize=16)
def _tiles(size: tuple[int, int]) -> tuple[tuple[Any, Any], Any]:
    """Where the tiles of an image begin along x and y, in pixels, and what the shader calls them: uint32 [rows,
    columns]."""
    begins = np.arange(0.0, size[1], TILE[0]), np.arange(0.0, size[0], TILE[1])
    columns, lines = (np.arange(len(begin), dtype=np.uint32) for begin in begins)
    return begins, lines[:, None] << 10 | columns
