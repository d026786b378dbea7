"""Oriented energy: how strongly a picture varies in each direction, at each scale, whatever the phase."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from gpu_lod import checks, dispatch, operators, precision
from gpu_lod.binomial import mirrored, reduce
from gpu_lod.bridge import gl as G
from gpu_lod.cached import constant
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.gaussian import choose, reduce_level
from gpu_lod.planewise import planewise
from gpu_lod.program import LOCAL_SIZE
from gpu_lod.pyramid import burt_sizes
from gpu_lod.transfer import Planes, narrow, packed_planes, parts, planes_of, scratch_planes

REACH = 4
"""Taps on each side of the centre."""
SPACING = 0.67
_SECOND = 0.9213
_THIRD = 0.9780
_CUBIC = 2.254

_TILE = (1, 4)
"""Columns and rows that one invocation makes: few registers, neighbours side by side."""
_TILE_SOFTWARE = (4, 8)
"""On a software renderer, where loads cost more than registers: each row is filtered half as often as in (4, 4)."""
_BAND = (2**15, 2**16)
"""Samples that the reference takes on at once, at least and at most: what it makes of them on the way stays in the
caches, and is little beside what it makes of all."""
_DEVICE_BAND = 2**23
"""Samples that it takes on at once on a GPU, where launches cost more than what leaves a cache: four orientations make
2^26 elements of them on the way."""
_WIDEST = 2**12
"""Columns of a picture that it takes on at once, where all of it is too much."""
LEAST_ROW = 8
"""Samples of a row that shaders read and write in groups of four."""
_STAGED_BYTES = 2**22
"""Of fp32 energies that are rounded at once, where they cannot be written so."""
MOST = 360
"""Orientations: one each half degree is far more than filters of 9 x 9 tell apart."""
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


@operators.verb
def oriented_energy(
    image: torch.Tensor, levels: int | None = None, orientations: int = 4, backend: Backend = "auto"
) -> tuple[torch.Tensor, ...]:
    """Energy of the picture's variation in each direction, on every level of its Gaussian pyramid.

    Shape: image [B, C, H, W] or [C, H, W], any number of channels and any sides from 1; level l of the result is
        [..., orientations, ceil(H / 2^l), ceil(W / 2^l)] behind B and C.
    Units: the image's, squared; float dtypes keep theirs (float16 ends at 65504), uint8 images give float32 counts^2.
    Convention: orientation k is 180 k / orientations degrees and the direction (cos, sin) of the derivative, y down: 0
        answers to vertical edges, 90 to lines of horizontal text, 45 to what varies towards the lower right. Energy is
        G2^2 + H2^2, the second derivative of a Gaussian and its Hilbert transform steered there: 9 taps 0.67 samples
        apart, correlated, borders mirrored about the outermost sample (reflect-101). G2 is made to sum to 0, so that
        flat areas have no energy. The levels between are those of `gaussian`, carried in fp32.

    Args:
        levels: how many, level 0 included; None goes down to 1 x 1.
        orientations: 1 to 360. Four is what these filters resolve, more interpolate.
        backend: "gl", "torch" or "auto"; `explain(oriented_energy, image)` says why. Both give gradients.

    Returns:
        One tensor a level.

    Raises:
        InputError: wrong rank, dtype, an empty side, too many levels, no orientation.
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device allows.

    Source: Freeman and Adelson, "The Design and Use of Steerable Filters" (1991), the tables of G2 and H2. The factors
        of Gxy, Hxxy and Hxyy, rounded to four digits there, are here the exact multiples of those of Gxx and Hxxx, or a
        steered filter would not quite be the rotated one.
    """
    image = checks.tensor(image, "image")
    chosen = _choose(image, levels, orientations, backend)
    height, width = image.shape[-2:]
    count, orientations = checks.levels(levels, height, width, burt_sizes), int(orientations)
    if chosen.backend == "torch":
        return tuple(reference(image, count, orientations))
    ctx = context_for(image)
    return dispatch.with_reference_gradient(
        lambda x: _gl(ctx, x, count, orientations), lambda x: reference(x, count, orientations), image
    )


def _choose(image: torch.Tensor, levels: int | None = None, orientations: int = 4, backend: Backend = "auto") -> Choice:
    image = checks.image(image, max_channels=None)
    orientations = checks.integer(orientations, "orientations", at_least=1, at_most=MOST)
    return choose("oriented_energy", image, backend, ragged=False, adjoint=False)


def _like(image: torch.Tensor, levels: int | None = None, orientations: int = 4, *_: Any) -> tuple[torch.Tensor, ...]:
    """What `oriented_energy` returns, without values."""
    height, width = image.shape[-2:]
    count = checks.levels(levels, height, width, burt_sizes)
    dtype = torch.float32 if image.dtype == torch.uint8 else image.dtype
    sizes = burt_sizes(height, width, count)
    return tuple(image.new_empty(*image.shape[:-2], orientations, h, w, dtype=dtype) for h, w in sizes)


dispatch.register(oriented_energy, _choose)
operators.register(oriented_energy, _like)


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


def reference(image: torch.Tensor, levels: int, orientations: int = 4) -> list[torch.Tensor]:
    """The energies in plain torch. Takes float64 too. Differentiable."""
    dtype = torch.float32 if image.dtype == torch.uint8 else image.dtype

    def make(image: torch.Tensor) -> list[torch.Tensor]:
        wide = image if image.dtype in (torch.float32, torch.float64) else image.float()
        result = []
        for level in range(levels):
            if level:
                wide = reduce(wide)
            result.append(energy(wide, orientations, dtype))
        return result

    return planewise(make, image)


def energy(x: torch.Tensor, orientations: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[..., h, w] to [..., orientations, h, w], of one level, in fp32 or float64.

    Args:
        dtype: of the result; None is that of x.
    """
    dtype = dtype or x.dtype
    height, width = x.shape[-2:]
    planes = x.reshape(-1, height, width)
    shape = (*x.shape[:-2], orientations, height, width)
    block, way = _BLOCK, _by_products
    if not checks.on_host(x):
        way = _by_products_alone
    elif x.dtype == torch.float32 and precision.exact("conv", x.device):
        block, way = max(_LANES // (2 * orientations), 1), _by_convolution
        if planes.numel() * orientations <= _SMALL:
            even, odd = way(mirrored(planes, REACH, REACH), orientations, 1)
            return torch.addcmul(even.square(), odd, odd).to(dtype).reshape(shape)
    most = min(max(planes.numel() // 4, _BAND[0]), _BAND[1]) if checks.on_host(x) else _DEVICE_BAND
    most = max(most * 4 // max(orientations, 4), 1)
    together, high, wide = max(most // (height * width), 1), height, width
    if together == 1:  # rows of a very wide picture in parts: of a few whole ones most would be read twice
        wide = min(width, _WIDEST)
        high = max(most // (block * wide), 1) * block
    result = None  # where a graph is kept, parts are joined
    if not (dispatch.needs_grad(x) or checks.transformed(x)):
        result = planes.new_empty(len(planes), *shape[-3:], dtype=dtype)
    groups = []
    for begin in range(0, len(planes), together):
        group = planes[begin : begin + together]
        window = _windows(group)
        bands = []
        for row in range(0, height, high):
            there = min(high, height - row)
            parts = []
            for column in range(0, width, wide):
                across = min(wide, width - column)
                around = window(row - REACH, row + there + REACH, column - REACH, column + across + REACH)
                if there % block:
                    around = F.pad(around, (0, 0, 0, -there % block))
                even, odd = way(around, orientations, block)
                if result is None:
                    part = torch.addcmul(even.square(), odd, odd)
                    parts.append(part.flatten(2, 3).narrow(-2, 0, there))
                    continue
                target = result[begin : begin + together, :, row : row + there, column : column + across]
                blocks, rest = divmod(there, block)
                even.square_()
                whole = target[:, :, : there - rest].unflatten(2, (blocks, block))
                torch.addcmul(even[:, :, :blocks], odd[:, :, :blocks], odd[:, :, :blocks], out=whole)
                if rest:
                    last = odd[:, :, blocks, :rest]
                    torch.addcmul(even[:, :, blocks, :rest], last, last, out=target[:, :, there - rest :])
            if result is None:
                bands.append(_cat(parts, -1))
        if result is None:
            groups.append(_cat(bands, -2))
    if result is None:
        result = _cat(groups, 0).to(dtype)
    return result.reshape(shape)


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
    second, third = (torch.tensor(part, dtype=torch.float64, device="cpu") for part in steering(orientations))
    columns = _columns()
    parts = (second, columns[:3]), (third, columns[3:])
    steered = torch.cat([torch.einsum("ob,bpk->okp", angles, filters) for angles, filters in parts])
    return _in_blocks(steered, block).flatten(2).flatten(0, 1).to(dtype)


def _in_blocks(filters: torch.Tensor, block: int) -> torch.Tensor:
    """Filters [n, 9, m] of so many neighbouring rows, [n, block, block + 8, m]: each a row further down."""
    result = filters.new_zeros(len(filters), block, block + 2 * REACH, filters.shape[2])
    for row in range(block):
        result[:, row, row : row + 2 * REACH + 1] = filters
    return result


def _gl(ctx: Context, image: torch.Tensor, levels: int, orientations: int) -> list[torch.Tensor]:
    batched = image if image.ndim == 4 else image[None]
    stored = torch.float32 if image.dtype == torch.uint8 else image.dtype
    batch, channels, height, width = batched.shape
    sizes = burt_sizes(height, width, levels)
    with ctx.active(batched.device):
        targets, result = packed_planes(ctx, batch * channels, orientations, sizes, stored)
        source = planes_of(ctx, batched, torch.float32)
        for level, target in enumerate(targets):
            # Shaders write two bytes a value where rows are whole groups of four.
            direct = stored.itemsize > 2 or (target.width % 4 == 0 and target.width >= LEAST_ROW)
            (energy_planes if direct else _narrowed)(ctx, source, target, orientations)
            if level < levels - 1:
                below = scratch_planes(ctx, (source.count, *sizes[level + 1]), torch.float32)
                reduce_level(ctx, source, below)
                source = below
    shape = (batch, channels) if image.ndim == 4 else (channels,)
    return [level.unflatten(0, shape) for level in result]


def _narrowed(ctx: Context, source: Planes, target: Planes, orientations: int) -> None:
    """Made in fp32 elsewhere, some planes or rows at a time."""
    area, run = target.area, (_TILE_SOFTWARE if ctx.software else _TILE)[1]

    def fits(planes: int, rows: int) -> bool:
        small = planes * orientations * rows * source.width * 4 <= _STAGED_BYTES
        return small or (planes == 1 and rows <= run)

    whole: Planes | None = None
    for plane, count, row, end in parts(ctx, source.count, (0, source.height), fits, source.width, run):
        shape = (count * orientations, end - row, source.width)
        whole = whole or scratch_planes(ctx, shape, torch.float32)  # the first is the largest
        staged = replace(whole, count=shape[0], height=shape[1])
        energy_planes(ctx, source.layers(plane, count), staged, orientations, rows=(row, end))
        pieces = count * orientations if staged.height < source.height else 1
        length = staged.elements // pieces
        for piece in range(pieces):
            at = (plane * orientations + piece) * area + row * source.width
            narrow(ctx, staged, piece * length, target, at, length)


def energy_planes(
    ctx: Context,
    source: Planes,
    target: Planes,
    orientations: int,
    *,
    apart: int | None = None,
    rows: tuple[int, int] | None = None,
) -> None:
    """Energies of fp32 planes, into fp32 planes; into fp16 or bfloat16 ones if rows are whole groups of four, two at
    least.

    Args:
        apart: the energies of plane p begin with plane p * `apart` of the target; None is one behind the other.
        rows: the first row wanted and the one after the last, if the target has no others.
    """
    apart = orientations if apart is None else apart
    rows = (0, source.height) if rows is None else rows
    for first in range(0, orientations, 4):
        _energy_at(ctx, source, target, range(first, min(first + 4, orientations)), orientations, apart, rows)


def _energy_at(
    ctx: Context,
    source: Planes,
    target: Planes,
    angles: range,
    orientations: int,
    apart: int,
    wanted: tuple[int, int],
) -> None:
    """Up to four of the angles."""
    height, width, area = source.height, source.width, source.area
    half = target.dtype.itemsize == 2
    columns, run = _TILE_SOFTWARE if ctx.software else _TILE
    columns = 4 if half else columns  # an invocation writes whole words
    fours = width % 4 == 0 and source.offset % 16 == 0 and target.offset % (4 * target.dtype.itemsize) == 0
    assert not half or (fours and width >= LEAST_ROW)
    aligned, fetched = columns == 4 and fours and width >= LEAST_ROW, source.fetchable(ctx)
    program = ctx.programs.compute(
        "oriented_energy.comp",
        COLUMNS=columns,
        ALIGNED=aligned,
        FETCHED=fetched,
        HALF=half,
        BFLOAT16=target.dtype == torch.bfloat16,
        RUN=run,
        ORIENTATIONS=len(angles),
        FOUR=orientations == 4,
        SMALL=min(height, width) <= REACH,
    )
    if orientations != 4:
        for name, part in zip(("u_second", "u_third"), steering(orientations), strict=True):
            flat = [share for k in angles for share in (*part[k], 0.0)[:4]]
            program.set(**{name: (*flat, *[0.0] * (16 - len(flat)))})

    def fits(planes: int, rows: int) -> bool:
        return source.span_fits(ctx, 0, ((planes - 1) * height + rows + 2 * REACH) * width - 1) and target.span_fits(
            ctx, 0, (planes - 1) * apart * target.area + rows * width - 1
        )

    for plane, count, row, end in parts(ctx, source.count, wanted, fits, width, run):
        begin = plane * area + max(row - REACH, 0) * width
        last = (plane + count - 1) * area + min(end + REACH, height) * width - 1
        origin = source.fetch(1, 4 if aligned else 1) if fetched else source.bind(ctx, 1, begin, last)
        firsts = [0] * 4
        for binding, k in zip((0, 2, 3, 4), angles, strict=False):
            top = (plane * apart + k) * target.area - wanted[0] * width
            last = top + (count - 1) * apart * target.area + end * width - 1
            firsts[k - angles[0]] = target.bind(ctx, binding, top + row * width, last) + top
        program.set(
            u_size=(width, height),
            u_source_first=origin + plane * area,
            u_rows=(row, end),
            u_first=tuple(firsts),
            u_stride=apart * target.area if count > 1 else 0,  # else it may be beyond 31 bits
        )
        program.dispatch_groups(-(-width // (columns * LOCAL_SIZE)), -(-(end - row) // run), count)
    ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
