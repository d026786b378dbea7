"""Parts of a foveated picture in plain torch: levels brought to full size and blended, or probed along the radius."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.bilinear import bilinear, cropped
from gpu_lod.dispatch import needs_grad
from gpu_lod.enlarging import enlarged
from gpu_lod.planewise import bands


@dataclass(frozen=True)
class Tile:
    """Some pixels of one image, and how they are seen."""

    size: tuple[int, int]
    """(height, width) of the image."""
    rows: slice
    columns: slice
    point: torch.Tensor
    """[2], the fixation."""
    place: tuple[float, float] | None
    """The same, unless it has no values."""
    e0: float
    bias: float
    last: int
    """No level beyond it is there."""
    in_place: bool
    """No graph is kept, so that tensors may be written to."""
    spoilt: bool = False
    """The picture holds NaN or infinities: what is read with a weight of 0 is left out."""

    def cut(self, texels: int) -> Iterator[Tile]:
        """Squares of no more pixels, each of which reads few levels, where these halve evenly, so that no more of them
        is brought to full size than a square rests on; else whole rows."""
        height, width = self.size
        across = width
        if height * width > texels and all(n % (1 << self.reads()[1]) == 0 for n in self.size):
            across = min(1 << math.isqrt(texels).bit_length() - 1, width)
        for left in range(0, width, across):
            for _, rows in bands(1, height, across, texels):
                yield replace(self, rows=rows, columns=slice(left, min(left + across, width)))

    def away(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x [1, w] and y [h, 1] from the fixation, in units of the longer side."""
        height, width = self.size
        kind: dict[str, Any] = {"dtype": self.point.dtype, "device": self.point.device}
        y = (torch.arange(self.rows.start, self.rows.stop, **kind) + 0.5) / height
        x = (torch.arange(self.columns.start, self.columns.stop, **kind) + 0.5) / width
        longer = max(self.size)
        return (x - self.point[0])[None] * (width / longer), (y - self.point[1])[:, None] * (height / longer)

    def level_map(self) -> torch.Tensor:
        """[h, w] the level of each pixel."""
        x, y = self.away()
        squared = (x / self.e0).square() + (y / self.e0).square()
        if needs_grad(self.point) or checks.transformed(self.point):
            # The root has no slope at 0; this is far below any rounding.
            return ((squared.clamp(min=1e-30).sqrt() + 1).log2() + self.bias).clamp(min=0)
        return squared.sqrt_().add_(1).log2_().add_(self.bias).clamp_(min=0)

    def reads(self) -> tuple[int, int]:
        """The finest and the coarsest level that its pixels read; all where that is not known."""
        if self.place is None:
            return 0, self.last
        longer = max(self.size)
        # From the fixation to both edges, in units of the longer side.
        edges = [
            (begin / n - at) * (n / longer)
            for n, at, span in zip(self.size, (self.place[1], self.place[0]), (self.rows, self.columns), strict=True)
            for begin in (span.start, span.stop)
        ]
        near = math.hypot(*(max(begin, -end, 0.0) for begin, end in (edges[:2], edges[2:])))
        far = math.hypot(*(max(-begin, end) for begin, end in (edges[:2], edges[2:])))
        finest, coarsest = (math.log2(1 + e / self.e0) + self.bias for e in (near, far))
        return max(math.floor(min(finest, self.last)), 0), max(math.ceil(min(coarsest, self.last)), 0)

    def within(self, level: int) -> tuple[int, int, int, int]:
        """y0, y1, x0, x1: the rows and columns of its pixels that may read that level or a finer one."""
        assert self.place is not None
        height, width = self.size
        reach = max(self.e0 * (2.0 ** (level + 1 - self.bias) - 1) * max(self.size), 0.0)
        return (
            *_span(self.place[1] * height, reach, self.rows.start, self.rows.stop),
            *_span(self.place[0] * width, reach, self.columns.start, self.columns.stop),
        )


def level_map(point: torch.Tensor, size: tuple[int, int], e0: float, bias: float) -> torch.Tensor:
    """[H, W] the level of each pixel of an image."""
    return Tile(size, slice(0, size[0]), slice(0, size[1]), point, None, e0, bias, 0, True).level_map()


def trilinear(chain: list[torch.Tensor], tile: Tile, level: torch.Tensor) -> torch.Tensor:
    """Pixels of an image whose levels are [1, C, h, w]."""
    finest, coarsest = tile.reads()

    def made(index: int, box: tuple[int, int, int, int]) -> torch.Tensor:
        found = _enlarged(chain[index], index, tile.size, box, tile.point.dtype)
        if tile.in_place and index == coarsest:
            found = found.contiguous() if index else found.clone()  # never the source itself
        return found

    return _blended(made, tile, level, finest, coarsest)


def _blended(
    made: Callable[[int, tuple[int, int, int, int]], torch.Tensor],
    tile: Tile,
    level: torch.Tensor,
    finest: int,
    coarsest: int,
) -> torch.Tensor:
    """Levels blended from the coarsest to the finest.

    Args:
        made: rows y0..y1 and columns x0..x1 of a level at full size; of the last one it is written to.
        level: of each pixel of the tile, or what `level_map` gives before it is clamped.
    """
    top, bottom, left, right = tile.rows.start, tile.rows.stop, tile.columns.start, tile.columns.stop
    result = made(coarsest, (top, bottom, left, right))
    for index in range(coarsest - 1, finest - 1, -1):
        # All where a graph must be kept.
        y0, y1, x0, x1 = tile.within(index) if tile.in_place else (top, bottom, left, right)
        if y0 >= y1 or x0 >= x1:
            break
        fine = made(index, (y0, y1, x0, x1))
        coarse = result[..., y0 - top : y1 - top, x0 - left : x1 - left]
        share = level[y0 - top : y1 - top, x0 - left : x1 - left] - index
        if tile.spoilt:
            blended = torch.lerp(fine, coarse, share.clamp(0, 1))
            blended = torch.where(share <= 0, fine, torch.where(share >= 1, coarse, blended))
            if tile.in_place:
                coarse.copy_(blended)
            else:
                result = blended
        elif tile.in_place:
            torch.lerp(fine, coarse, share.clamp_(0, 1), out=coarse)
        else:
            result = torch.lerp(fine, coarse, share.clamp(0, 1))
    return result


def _span(centre: float, reach: float, begin: int, end: int) -> tuple[int, int]:
    """Of some pixels those within reach of the centre, first and one past the last."""
    return max(math.floor(max(centre - reach, begin)), begin), min(math.ceil(min(centre + reach, end)), end)


def _enlarged(
    level: torch.Tensor, index: int, size: tuple[int, int], box: tuple[int, int, int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Rows y0..y1 and columns x0..x1 of a level brought to full size, bilinear."""
    y0, y1, x0, x1 = box
    if index == 0:
        return level[..., y0:y1, x0:x1].to(dtype)
    if all(n % (1 << index) == 0 for n in size):
        return enlarged(level, 1 << index, box, dtype)
    top, bottom, row, rows = _reads(y0, y1, size[0], index)
    left, right, column, columns = _reads(x0, x1, size[1], index)
    if 4 * (bottom - top) > 5 * (y1 - y0):  # much that is not asked for
        texels = _rows(level[..., column:columns], y0, y1, size[0], dtype)
        top, bottom = y0, y1
    else:
        texels = level[..., row:rows, column:columns].to(dtype)
    pixels = F.interpolate(texels, size=(bottom - top, right - left), mode="bilinear", align_corners=False)
    return pixels[..., y0 - top : y1 - top, x0 - left : x1 - left]


def _reads(first: int, end: int, n: int, index: int) -> tuple[int, int, int, int]:
    """Pixels of a side n and texels of that level, no more than that range of pixels rests on: a texel on both sides.
    All where parts of the side would be scaled by another factor."""
    whole = 1 << index
    if n % whole:
        return 0, n, 0, max(1, n >> index)
    begin, last = max(first // whole - 1, 0), min(-(-end // whole) + 1, n >> index)
    return begin * whole, last * whole, begin, last


def _rows(level: torch.Tensor, first: int, end: int, height: int, dtype: torch.dtype) -> torch.Tensor:
    """Some of the rows that a level [..., h, w] has at full height, linear."""
    count = level.shape[-2]
    step = count / height
    at = torch.arange(first, end, dtype=dtype, device=level.device) + 0.5
    at = (at * step - 0.5).clamp_(min=0)
    above = at.long()
    below = (above + 1).clamp_(max=count - 1)
    # Rows that are read, and one more on both sides for rounding, so that not all of it is converted.
    low = max(math.floor((first + 0.5) * step - 0.5) - 1, 0)
    high = min(math.floor((end - 0.5) * step - 0.5) + 3, count)
    texels = level[..., low:high, :].to(dtype)
    share = (at - above)[:, None]
    return torch.lerp(texels.index_select(-2, above - low), texels.index_select(-2, below - low), share)


def probed(chain: list[torch.Tensor], tile: Tile, level: torch.Tensor, anisotropy: float) -> torch.Tensor:
    """Pixels of an image whose levels are [1, C, h, w]: the mean of several trilinear samples along the radius."""
    centre, radius, shifts = probes_of(tile, level, anisotropy)
    read = level - math.log2(len(shifts))

    def mean(index: int, box: tuple[int, int, int, int]) -> torch.Tensor:
        y0, y1, x0, x1 = box
        top, left = tile.rows.start, tile.columns.start
        here = slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
        return _mean_of_probes(chain[index], centre[here], radius[here], shifts)

    tile = sharper(tile, anisotropy)
    return _blended(mean, tile, read, *tile.reads())


def sharper(tile: Tile, anisotropy: float) -> Tile:
    """A tile seen as each of its probes is."""
    return replace(tile, bias=tile.bias - math.log2(math.ceil(anisotropy)))


def probes_of(tile: Tile, level: torch.Tensor, anisotropy: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where pixels are probed, as grid_sample counts: at `centre + shift * radius` [h, w, 2] for each of the shifts."""
    height, width = tile.size
    probes = math.ceil(anisotropy)
    x, y = tile.away()
    # No infinity, of which a direction along an axis would make NaN: as the shader has it.
    step = torch.exp2(level.clamp(max=64)) / (x.square() + y.square()).clamp(min=1e-30).sqrt()
    radius = torch.stack([x * step * (2 / width), y * step * (2 / height)], dim=-1)
    kind: dict[str, Any] = {"dtype": level.dtype, "device": level.device}
    across, down = (
        (2 * torch.arange(span.start, span.stop, **kind) + 1) / n - 1
        for span, n in ((tile.columns, width), (tile.rows, height))
    )
    centre = torch.stack(torch.broadcast_tensors(across, down[:, None]), dim=-1)
    return centre, radius, torch.arange(1, probes + 1, **kind) / (probes + 1) - 0.5


def _mean_of_probes(
    level: torch.Tensor, centre: torch.Tensor, radius: torch.Tensor, shifts: torch.Tensor
) -> torch.Tensor:
    """[1, C, h, w] of one level, at `centre + shift * radius` [h, w, 2]. On a CPU as many probes at once as there are
    threads, which share the images of a batch."""
    at_once = torch.get_num_threads() if level.device.type == "cpu" else 1
    if level.dtype != centre.dtype and level.device.type == "cpu" and not checks.transformed(centre):
        ends = torch.stack([torch.add(centre, radius, alpha=float(shift)) for shift in (shifts[0], shifts[-1])])
        level, crop = cropped(level, ends.detach(), centre.dtype, small=0)
        if crop is not None:
            centre, radius = torch.addcmul(crop[1], centre, crop[0]), radius * crop[0]
    total: torch.Tensor | None = None
    for some in shifts.split(at_once):
        grid = centre + radius * some[:, None, None, None]
        found = bilinear(level.expand(len(some), -1, -1, -1), grid, centre.dtype).sum(0, keepdim=True)
        total = found if total is None else total + found
    assert total is not None
    return total / len(shifts)
