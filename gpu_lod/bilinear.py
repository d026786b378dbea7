"""Bilinear samples of a level by torch's grid_sample, and how little of the level is converted for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.adjoints import linear
from gpu_lod.dispatch import needs_grad
from gpu_lod.errors import UnsupportedError
from gpu_lod.pyramid import level_sizes

_SMALL = 2**18
"""Samples of a level below which torch converts all of it sooner than we find out what is read of it."""


def bilinear(level: torch.Tensor, grid: torch.Tensor, dtype: torch.dtype, parts: int | None = None) -> torch.Tensor:
    """Bilinear samples of a level at `grid` [B, rows, columns, 2], counted as grid_sample does; edges repeat."""
    image, grid = converted(level, grid, dtype)
    return grid_sample(image if image.ndim == 4 else image[None], grid, parts)


def converted(level: torch.Tensor, grid: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What `grid` reads of a level, in the dtype that torch computes in, and the grid counted in that."""
    if level.dtype == dtype or level.device.type != "cpu" or needs_grad(level, grid) or checks.transformed(grid):
        return level.to(dtype), grid
    values, crop = cropped(level, grid, dtype)
    return values, grid if crop is None else torch.addcmul(crop[1], grid, crop[0])


def cropped(
    level: torch.Tensor, grid: torch.Tensor, dtype: torch.dtype, small: int = _SMALL
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """What is read of a level between the outermost places of a grid, in the dtype that torch computes in: of a large
    level mostly a small part. And, if it is, the scale and the shift [2] from the grid to one of that part.

    Args:
        small: texels below which all of it is converted.
    """
    box = None
    if level.numel() >= small and level.dtype != dtype and not checks.traced():
        box = _box(level.shape, grid)
    if box is None:
        return level.to(dtype), None
    return level[..., box.rows, box.columns].to(dtype), (box.scale, box.shift)


class Box(NamedTuple):
    """A part of a level, and the scale and the shift [2] from a grid to one of that part."""

    rows: slice
    columns: slice
    scale: torch.Tensor
    shift: torch.Tensor


def _box(shape: Sequence[int], grid: torch.Tensor) -> Box | None:
    """What is read of a level [..., h, w] between the outermost places of a grid; None: most of it."""
    box, scales, shifts = [], [], []
    for axis, n in enumerate((shape[-1], shape[-2])):
        low, high = (min(max(float(bound), -3.0), 3.0) for bound in grid[..., axis].aminmax())  # inf, too
        # A texel more on each side, for rounding; samples outside the level read its edge.
        first = min(max(math.floor((low + 1) / 2 * n - 0.5) - 1, 0), n - 1)
        end = min(max(math.floor((high + 1) / 2 * n - 0.5) + 3, first + 1), n)
        box.append(slice(first, end))
        scales.append(n / (end - first))
        shifts.append((n - 2 * first) / (end - first) - 1)
    if scales[0] * scales[1] < 1.25:  # not worth another grid
        return None
    return Box(box[1], box[0], grid.new_tensor(scales), grid.new_tensor(shifts))


def grid_sample(image: torch.Tensor, grid: torch.Tensor, parts: int | None = 1) -> torch.Tensor:
    """torch's own, as the samplers read: texel i's centre at (i + 0.5) / n, edges repeat. Where the grid needs no
    gradient nothing is kept of the image.

    Args:
        parts: how many threads share the samples of a single image; None is all of torch's.
    """
    if needs_grad(grid) or any(map(checks.transformed, (image, grid))):
        return _grid_sample(image, grid)
    shape = image.shape

    def adjoint(gradient: torch.Tensor) -> list[torch.Tensor]:
        return [scattered(gradient, grid, shape)]

    def sampled(image: torch.Tensor) -> list[torch.Tensor]:
        together = torch.get_num_threads() if parts is None else parts
        rows, columns = grid.shape[1:3]
        if together < 2 or shape[0] != 1 or image.device.type != "cpu" or rows * columns % together:
            return [_grid_sample(image, grid)]
        # On a CPU grid_sample works in parallel over the batch alone. One image becomes a batch of the same image, each
        # with a part of the samples: twice as fast on two cores.
        found = _grid_sample(image.expand(together, -1, -1, -1), grid.reshape(together, 1, -1, 2))
        return [found.transpose(0, 1).reshape(1, -1, rows, columns)]

    (result,) = linear(sampled, adjoint, image)
    return result


_BILINEAR = 0, 1, False
"""Bilinear, edges repeat, corners are not aligned."""


def scattered(gradient: torch.Tensor, grid: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The adjoint of `grid_sample`: the gradient in an image [B, C, h, w] from that in its samples."""
    unread, samples = gradient.new_empty(()), grid.shape[1] * grid.shape[2]
    parts = 1
    if shape[0] == 1 and grid.device.type == "cpu" and not (needs_grad(gradient) or checks.transformed(gradient)):
        # It works in parallel over the batch alone, too. A part of the samples each adds to an image of its own.
        parts = min(torch.get_num_threads(), 2 * samples // (shape[2] * shape[3]))
        while parts > 1 and samples % parts:
            parts -= 1
    if parts < 2:
        return _scattered(gradient, unread.expand(*shape), grid)
    split = gradient.reshape(shape[1], parts, 1, -1).transpose(0, 1), grid.reshape(parts, 1, -1, 2)
    first, *others = _scattered(split[0], unread.expand(parts, *shape[1:]), split[1])
    for other in others:
        first += other
    return first[None]


class Sums:
    """The gradients in the levels of a mean chain, to which samples of them add theirs.

    Args:
        shape: of level 0, [B, C, H, W].
    """

    def __init__(self, shape: Sequence[int], levels: int) -> None:
        self.shapes = [(*shape[:2], *size) for size in level_sizes(shape[2], shape[3], levels)]
        self.found: list[torch.Tensor | None] = [None] * levels
        """None: nothing was read of it."""

    def within(self, level: int, ends: torch.Tensor) -> Box | None:
        """The part of a level between the outermost of such places [..., 2], if to add to that takes a CPU less."""
        shape = self.shapes[level]
        return _box(shape, ends) if ends.device.type == "cpu" and math.prod(shape) >= _SMALL else None

    def add(self, level: int, gradient: torch.Tensor, grid: torch.Tensor, box: Box | None = None) -> None:
        """Of samples [n, C, rows, columns] at `grid` [n, rows, columns, 2]: n is the batch; or, of a single image, any
        number that share it.

        Args:
            box: the part of the level that they lie in, which the grid counts in.
        """
        shape = self.shapes[level]
        own = self.found[level]
        if box is not None:
            own = own if own is not None else gradient.new_zeros(shape)
            rows, columns = box.rows, box.columns
            size = rows.stop - rows.start, columns.stop - columns.start
            for one in scattered(gradient, grid, (len(grid), shape[1], *size)).split(shape[0]):
                own[..., rows, columns] += one
        else:
            for one in scattered(gradient, grid, (len(grid), *shape[1:])).split(shape[0]):
                own = one if own is None else own.add_(one)
        self.found[level] = own


def _scattered(gradient: torch.Tensor, unread: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor
    found, _ = torch.ops.aten.grid_sampler_2d_backward(gradient, unread, grid, *_BILINEAR, [True, False])
    return found


def _grid_sample(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    try:
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)
    except NotImplementedError as error:
        raise UnsupportedError(
            "torch's grid_sample, by which the samplers read, has forward-mode gradients (torch.func.jvp) from 2.15 "
            f"on; this is PyTorch {torch.__version__}. Use reverse mode (vjp, grad). Samplers are linear in the image: "
            "the jvp in it is the same call on the tangent."
        ) from error
