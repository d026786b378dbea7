"""The quadrature pair G2 and H2 in plain torch: filters, steering, energies, and what energies give the picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpu_lod import checks, dispatch, precision
from gpu_lod.adjoints import pulled
from gpu_lod.binomial import mirrored, mirrored_adjoint
from gpu_lod.cached import constant

REACH = 4
"""Taps on each side of the centre."""
SPACING = 0.67
_SECOND = 0.9213
_THIRD = 0.9780
_CUBIC = 2.254
_BAND = (2**15, 2**16)
"""Samples that the reference takes on at once, at least and at most: what it makes of them on the way stays in the
caches, and is little beside what it makes of all."""
_DEVICE_BAND = 2**23
"""Samples that it takes on at once on a GPU, where launches cost more than what leaves a cache: four orientations make
2^26 elements of them on the way."""
_WIDEST = 2**12
"""Columns of a picture that it takes on at once, where all of it is too much."""
_LANES = 16
"""Channels that a CPU's vectors have room for: so many make convolutions fill them, by neighbouring rows if need be. Of
four orientations that takes half the time of a row at a time."""
_SMALL = 2**15
"""Samples times orientations up to which fewer calls take a CPU less time than fewer multiplications."""
_BLOCK = 8
"""Neighbouring rows that one product of matrices makes."""


def _kernels() -> tuple[list[list[float]], float, float]:
    """The four filters of 9 taps, and what the kernel of Hxxy along x takes of the first and the third."""
    x = [SPACING * k for k in range(-REACH, REACH + 1)]
    gaussian = [math.exp(-t * t) for t in x]
    tilted = [t * g for t, g in zip(x, gaussian, strict=True)]
    curved = [_SECOND * (2 * t * t - 1) * g for t, g in zip(x, gaussian, strict=True)]
    cubic = [_THIRD * (t**3 - _CUBIC * t) * g for t, g in zip(x, gaussian, strict=True)]
    # Sampled, the second derivative does not quite sum to 0. As much of the round Gaussian is taken from Gxx as from
    # Gyy, so the sum of both over cos^2 and sin^2 loses the same at every angle: what is left steers exactly.
    mean = sum(curved) / sum(gaussian)
    curved = [c - mean * g for c, g in zip(curved, gaussian, strict=True)]
    share = _THIRD / (2 * _SECOND)
    return [gaussian, tilted, curved, cubic], share, _THIRD * (0.5 - _CUBIC / 3) + share * mean


FILTERS, _SHARE, _REST = _kernels()
"""Along one side: the Gaussian, x times it, the kernel of Gxx without its mean, the kernel of Hxxx. The kernel of Hxxy
along x, x^2 - 2.254 / 3 times the Gaussian, is `_SHARE` of the third and `_REST` of the first."""


SHARES = _SHARE, _REST, 2 * _SECOND
"""Of the third and the first filter in the kernel of Hxxy along x; of the second along both sides in Gxy."""


def steering(orientations: int) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """For each angle, how much of (Gxx, Gxy, Gyy) and of (Hxxx, Hxxy, Hxyy, Hyyy)."""
    second: list[tuple[float, ...]] = []
    third: list[tuple[float, ...]] = []
    for k in range(orientations):
        c, s = math.cos(math.pi * k / orientations), math.sin(math.pi * k / orientations)
        second.append((c * c, 2 * c * s, s * s))
        third.append((c**3, 3 * c * c * s, 3 * c * s * s, s**3))
    return second, third


def basis() -> torch.Tensor:
    """The seven filters [7, 9, 9] in float64, rows y: Gxx, Gxy, Gyy, Hxxx, Hxxy, Hxyy, Hyyy."""
    return torch.einsum("niy,ix->nyx", _columns(), _rows())


def _rows() -> torch.Tensor:
    return torch.tensor(FILTERS, dtype=torch.float64, device="cpu")


def _columns() -> torch.Tensor:
    """[7, 4, 9]: what each filter of the basis does to the columns of the four planes whose rows are filtered."""
    gaussian, tilted, curved, cubic = _rows()
    none = torch.zeros_like(gaussian)
    square = _SHARE * curved + _REST * gaussian
    return torch.stack(
        [
            torch.stack(planes)
            for planes in (
                (none, none, gaussian, none),
                (none, 2 * _SECOND * tilted, none, none),
                (curved, none, none, none),
                (none, none, none, gaussian),
                (_REST * tilted, none, _SHARE * tilted, none),
                (none, square, none, none),
                (cubic, none, none, none),
            )
        ]
    )


def energy(x: torch.Tensor, orientations: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[..., h, w] to [..., orientations, h, w], of one level, in fp32 or float64. Differentiable.

    Args:
        dtype: of the result; None is that of x.
    """
    dtype = dtype or x.dtype
    if not checks.on_host(x):
        return _energy(x, orientations, dtype)
    (result,) = pulled(
        lambda x: [_energy(x, orientations, dtype)],
        lambda _, gradients, inputs: [pull(gradients[0], inputs[0], orientations)],
        x,
    )
    return result


def _energy(x: torch.Tensor, orientations: int, dtype: torch.dtype) -> torch.Tensor:
    """By a graph of torch's own where gradients are asked for."""
    height, width = x.shape[-2:]
    planes = x.reshape(-1, height, width)
    shape = (*x.shape[:-2], orientations, height, width)
    if _by_convolutions(x) and planes.numel() * orientations <= _SMALL:
        even, odd = _by_convolution(mirrored(planes, REACH, REACH), orientations, 1)
        return torch.addcmul(even.square(), odd, odd).to(dtype).reshape(shape)
    result = None  # where a graph is kept, parts are joined
    if not (dispatch.needs_grad(x) or checks.transformed(x)):
        result = planes.new_empty(len(planes), *shape[-3:], dtype=dtype)
    made: list[list[list[torch.Tensor]]] = []
    for part in _parts(planes, orientations):
        even, odd = part.even, part.odd
        if result is None:
            if part.columns.start == 0:
                if part.rows.start == 0:
                    made.append([])
                made[-1].append([])
            made[-1][-1].append(torch.addcmul(even.square(), odd, odd).flatten(2, 3).narrow(-2, 0, part.height))
            continue
        target = result[part.planes, :, part.rows, part.columns]
        blocks, block = part.height // odd.shape[3], odd.shape[3]
        even.square_()
        whole = target[:, :, : blocks * block].unflatten(2, (blocks, block))
        torch.addcmul(even[:, :, :blocks], odd[:, :, :blocks], odd[:, :, :blocks], out=whole)
        rest = part.height - blocks * block
        if rest:
            last = odd[:, :, blocks, :rest]
            torch.addcmul(even[:, :, blocks, :rest], last, last, out=target[:, :, blocks * block :])
    if result is None:
        result = _cat([_cat([_cat(across, -1) for across in down], -2) for down in made], 0).to(dtype)
    return result.reshape(shape)


class _Part(NamedTuple):
    """G2 and H2 [n, orientations, blocks, rows of a block, w] of some planes, rows and columns; the last block may have
    more rows than there are."""

    planes: slice
    rows: slice
    columns: slice
    even: torch.Tensor
    odd: torch.Tensor

    @property
    def height(self) -> int:
        return int(self.rows.stop - self.rows.start)


def _by_convolutions(x: torch.Tensor) -> bool:
    return checks.on_host(x) and x.dtype == torch.float32 and precision.exact("conv", x.device)


def _parts(planes: torch.Tensor, orientations: int) -> Iterator[_Part]:
    """All of planes [n, h, w], some at a time: planes, then rows, then columns."""
    height, width = planes.shape[-2:]
    block, way = _BLOCK, _by_products
    if not checks.on_host(planes):
        way = _by_products_alone
    elif _by_convolutions(planes):
        block, way = max(_LANES // (2 * orientations), 1), _by_convolution
    most = min(max(planes.numel() // 4, _BAND[0]), _BAND[1]) if checks.on_host(planes) else _DEVICE_BAND
    most = max(most * 4 // max(orientations, 4), 1)
    together, high, wide = max(most // (height * width), 1), height, width
    if together == 1:  # rows of a very wide picture in parts: of a few whole ones most would be read twice
        wide = min(width, _WIDEST)
        high = max(most // (block * wide), 1) * block
    for begin in range(0, len(planes), together):
        window = _windows(planes[begin : begin + together])
        for row in range(0, height, high):
            end = min(row + high, height)
            for column in range(0, width, wide):
                last = min(column + wide, width)
                around = window(row - REACH, end + REACH, column - REACH, last + REACH)
                if (end - row) % block:
                    around = F.pad(around, (0, 0, 0, (row - end) % block))
                even, odd = way(around, orientations, block)
                here = slice(begin, begin + len(around)), slice(row, end), slice(column, last)
                yield _Part(*here, even, odd)


def pull(gradient: torch.Tensor, x: torch.Tensor, orientations: int) -> torch.Tensor:
    """The gradient in a level x [..., h, w], fp32 or float64, from that in its energies, of any dtype. Keeps no graph.

    On a CPU a part at a time, by sums where torch's own graph would transpose convolutions, which takes it ten times as
    long.
    """
    few = not checks.on_host(x) or x.numel() * orientations <= _SMALL
    if few and not checks.transforming():  # fewer operations
        with torch.enable_grad():
            asked = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(_energy(asked, orientations, x.dtype), asked, gradient.to(x.dtype))
        return found
    height, width = x.shape[-2:]
    planes, weights = x.reshape(-1, height, width), gradient.reshape(-1, orientations, height, width)
    sums = planes.new_zeros(len(planes), height + 2 * REACH, width + 2 * REACH)
    for part in _parts(planes, orientations):
        down, across = part.height, part.columns.stop - part.columns.start
        blocks = -(-(down + 2 * REACH) // _BLOCK)
        # Rows of all filters, with nothing about them.
        around = planes.new_zeros(len(part.even), blocks * _BLOCK + 2 * REACH, 2 * orientations, across + 4 * REACH)
        inside = around[:, 2 * REACH : 2 * REACH + down, :, 2 * REACH : 2 * REACH + across].transpose(1, 2)
        there = weights[part.planes, :, part.rows, part.columns]
        for values, into in zip((part.even, part.odd), inside.split(orientations, dim=1), strict=True):
            run = values.shape[3]
            whole = down - down % run
            torch.mul(
                values[:, :, : whole // run],
                there[:, :, :whole].unflatten(2, (-1, run)),
                out=into[:, :, :whole].unflatten(2, (-1, run)),
            )
            if whole < down:
                torch.mul(values[:, :, whole // run, : down - whole], there[:, :, whole:], out=into[:, :, whole:])
        rows, columns = (slice(s.start, s.stop + 2 * REACH) for s in (part.rows, part.columns))
        sums[part.planes, rows, columns] += _spread(around, orientations)[:, : down + 2 * REACH]
    return mirrored_adjoint(sums, REACH, REACH).mul_(2).reshape(x.shape)


def _spread(x: torch.Tensor, orientations: int) -> torch.Tensor:
    """The adjoint of both filters of all angles, from [n, rows + 8, 2 * orientations, w + 16] to [n, rows, w + 8]: by a
    product over overlapping blocks of rows, and sums along rows."""
    side = _BLOCK + 2 * REACH
    filters = 2 * orientations
    blocks = x.flatten(1, 2).unfold(1, filters * side, filters * _BLOCK).transpose(-1, -2)
    columns = constant(x.device, _block_of_columns_back, orientations, x.dtype)
    both = torch.matmul(precision.factor(columns), precision.factor(blocks)).to(x.dtype)
    width = x.shape[-1] - 2 * REACH
    result: torch.Tensor | None = None
    for plane, taps in zip(both.unflatten(2, (4, _BLOCK)).unbind(2), FILTERS, strict=True):
        for k in range(-REACH, REACH + 1):
            tap, some = taps[REACH + k], plane.narrow(-1, REACH - k, width)
            if result is None:
                result = some * tap
            elif tap:
                result.add_(some, alpha=tap)
    assert result is not None
    return result.flatten(1, 2)


def _cat(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0]


def _windows(planes: torch.Tensor) -> Callable[[int, int, int, int], torch.Tensor]:
    """Rows and columns from .. to .. of planes whose borders are mirrored, up to `REACH` outside."""
    height, width = planes.shape[-2:]
    if checks.on_host(planes) and min(height, width) > REACH:

        def window(top: int, bottom: int, left: int, right: int) -> torch.Tensor:
            inside = planes[:, max(top, 0) : bottom, max(left, 0) : right]
            outside = (max(-left, 0), max(right - width, 0), max(-top, 0), max(bottom - height, 0))
            return F.pad(inside, outside, mode="reflect") if any(outside) else inside

        return window
    padded = mirrored(planes, REACH, REACH)
    return lambda top, bottom, left, right: padded[:, top + REACH : bottom + REACH, left + REACH : right + REACH]


def _by_convolution(x: torch.Tensor, orientations: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """G2 and H2 [n, orientations, rows / block, block, w] of [n, rows + 8, w + 8], rows a multiple of the block."""
    kernels = constant(x.device, _blocks_of_filters, orientations, block, x.dtype)
    both = F.conv2d(x[:, None], kernels, stride=(block, 1))
    even, odd = both.unflatten(1, (2, orientations, block)).transpose(3, 4).unbind(1)
    return even, odd


def _by_products(x: torch.Tensor, orientations: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by strided sums of rows, which vectorise, and for their columns one product of matrices over overlapping
    blocks of rows: no copy."""
    width = x.shape[-1] - 2 * REACH
    blocks = _filtered_rows(x, width).unfold(1, 4 * (block + 2 * REACH), 4 * block).transpose(-1, -2)
    columns = constant(x.device, _block_of_columns, orientations, block, x.dtype)
    both = torch.matmul(precision.factor(columns), precision.factor(blocks)).to(x.dtype)
    even, odd = both.unflatten(2, (2, orientations, block)).transpose(1, 2).transpose(2, 3).unbind(1)
    return even, odd


def _by_products_alone(x: torch.Tensor, orientations: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a product over overlapping blocks of columns and one over blocks of rows: a seventh of the launches,
    for a GPU."""
    width = x.shape[-1] - 2 * REACH
    if width % block:
        x = F.pad(x, (0, -width % block))
    rows = constant(x.device, _block_of_rows, block, x.dtype)
    columns = constant(x.device, _block_of_columns, orientations, block, x.dtype)
    windows = x.unfold(2, block + 2 * REACH, block)
    outer = windows.shape[:3]
    filtered = torch.mm(precision.factor(windows.flatten(0, 2)), precision.factor(rows))
    blocks = filtered.view(*outer, 4, block).unfold(1, block + 2 * REACH, block)
    del windows, filtered
    # From [n, blocks down, across, 4, block, rows] to [n, blocks down, rows * 4, w].
    blocks = blocks.permute(0, 1, 5, 3, 2, 4).flatten(4, 5).flatten(2, 3)
    both = torch.matmul(precision.factor(columns), blocks).to(x.dtype)[..., :width]
    even, odd = both.unflatten(2, (2, orientations, block)).transpose(1, 2).transpose(2, 3).unbind(1)
    return even, odd


def _filtered_rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """[n, rows, w + 8] to [n, rows * 4, w]: what each of the four filters makes of each row."""
    before = [x.narrow(-1, REACH - k, width) for k in range(REACH + 1)]
    after = [x.narrow(-1, REACH + k, width) for k in range(REACH + 1)]

    def weighed(parts: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        total = parts[0] * weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            total = torch.add(total, part, alpha=weight)
        return total

    # Half of the taps are those of the other half, or their negatives. One kind after the other: less at once.
    sums = [before[0], *(a + b for a, b in zip(after[1:], before[1:], strict=True))]
    gaussian, curved = (weighed(sums, FILTERS[index][REACH:]) for index in (0, 2))
    del sums
    differences = [a - b for a, b in zip(after[1:], before[1:], strict=True)]
    tilted, cubic = (weighed(differences, FILTERS[index][REACH + 1 :]) for index in (1, 3))
    del differences
    filtered = (gaussian, tilted, curved, cubic)
    return torch.stack(filtered, dim=2).flatten(1, 2)


def _blocks_of_filters(orientations: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """[2 * orientations * block, 1, block + 8, 9]: from a window to a block of rows of G2 of each angle, then of H2."""
    parts = [torch.tensor(part, dtype=torch.float64, device="cpu") for part in steering(orientations)]
    angles = [torch.einsum("ob,byx->oyx", part, f) for part, f in zip(parts, basis().split((3, 4)), strict=True)]
    return _in_blocks(torch.cat(angles), block).flatten(0, 1)[:, None].to(dtype)


def _block_of_rows(block: int, dtype: torch.dtype) -> torch.Tensor:
    """[block + 8, 4 * block]: from columns of a window to a block of columns of each of the four planes."""
    filters = _in_blocks(_rows()[..., None], block)
    return filters[..., 0].flatten(0, 1).t().to(dtype).contiguous()


def _block_of_columns(orientations: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """[2 * orientations * block, 4 * (block + 8)]: from rows of four planes to a block of rows of G2 and of H2."""
    return _in_blocks(_steered_columns(orientations), block).flatten(2).flatten(0, 1).to(dtype)


def _steered_columns(orientations: int) -> torch.Tensor:
    """[2 * orientations, 9, 4]: what G2 of each angle, then H2, takes of the columns of the four planes."""
    second, third = (torch.tensor(part, dtype=torch.float64, device="cpu") for part in steering(orientations))
    columns = _columns()
    parts = (second, columns[:3]), (third, columns[3:])
    return torch.cat([torch.einsum("ob,bpk->okp", angles, filters) for angles, filters in parts])


def _block_of_columns_back(orientations: int, dtype: torch.dtype) -> torch.Tensor:
    """[4 * block, (block + 8) * 2 * orientations]: from rows of all filters to a block of rows of the four planes."""
    taps = _steered_columns(orientations).flip(1).permute(2, 1, 0)
    found = taps.new_zeros(4, _BLOCK, _BLOCK + 2 * REACH, 2 * orientations)
    for row in range(_BLOCK):
        found[:, row, row : row + 2 * REACH + 1] = taps
    return found.flatten(2).flatten(0, 1).to(dtype)


def _in_blocks(filters: torch.Tensor, block: int) -> torch.Tensor:
    """Filters [n, 9, m] of so many neighbouring rows, [n, block, block + 8, m]: each a row further down."""
    result = filters.new_zeros(len(filters), block, block + 2 * REACH, filters.shape[2])
    for row in range(block):
        result[:, row, row : row + 2 * REACH + 1] = filters
    return result
