"""Oriented energy: how strongly a picture varies in each direction, at each scale, whatever the phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.adjoints import pulled
from gpu_lod.binomial import reduce, reduce_adjoint
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.gaussian import choose, reduce_level
from gpu_lod.planewise import planewise
from gpu_lod.program import LOCAL_SIZE
from gpu_lod.pyramid import burt_sizes
from gpu_lod.quadrature import REACH, energy, pull, steering
from gpu_lod.transfer import Planes, narrow, packed_planes, parts, planes_of, scratch_planes

_TILE = (1, 4)
"""Columns and rows that one invocation makes: few registers, neighbours side by side."""
_TILE_SOFTWARE = (4, 8)
"""On a software renderer, where loads cost more than registers: each row is filtered half as often as in (4, 4)."""
LEAST_ROW = 8
"""Samples of a row that shaders read and write in groups of four."""
_STAGED_BYTES = 2**22
"""Of fp32 energies that are rounded at once, where they cannot be written so."""
MOST = 360
"""Orientations: one each half degree is far more than filters of 9 x 9 tell apart."""


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
    if not checks.on_host(image):
        return dispatch.with_reference_gradient(
            lambda x: _gl(ctx, x, count, orientations), lambda x: reference(x, count, orientations), image
        )
    return tuple(
        pulled(
            lambda x: _gl(ctx, x, count, orientations),
            partial(_pull, orientations),
            image,
            graph=lambda x: reference(x, count, orientations),
        )
    )


def _choose(image: torch.Tensor, levels: int | None = None, orientations: int = 4, backend: Backend = "auto") -> Choice:
    image = checks.image(image, max_channels=None)
    orientations = checks.integer(orientations, "orientations", at_least=1, at_most=MOST)
    return choose("oriented_energy", image, backend, ragged=False)


def _like(image: torch.Tensor, levels: int | None = None, orientations: int = 4, *_: Any) -> tuple[torch.Tensor, ...]:
    """What `oriented_energy` returns, without values."""
    height, width = image.shape[-2:]
    count = checks.levels(levels, height, width, burt_sizes)
    dtype = torch.float32 if image.dtype == torch.uint8 else image.dtype
    sizes = burt_sizes(height, width, count)
    return tuple(image.new_empty(*image.shape[:-2], orientations, h, w, dtype=dtype) for h, w in sizes)


dispatch.register(oriented_energy, _choose)
operators.register(oriented_energy, _like)


def reference(image: torch.Tensor, levels: int, orientations: int = 4) -> list[torch.Tensor]:
    """The energies in plain torch. Takes float64 too. Differentiable."""
    dtype = torch.float32 if image.dtype == torch.uint8 else image.dtype

    def make(image: torch.Tensor) -> list[torch.Tensor]:
        return [energy(level, orientations, dtype) for level in _wide_levels(image, levels)]

    if not checks.on_host(image):
        return planewise(make, image)
    return list(
        pulled(
            lambda x: planewise(make, x),
            partial(_pull, orientations),
            image,
            like=lambda: _like(image, levels, orientations),
        )
    )


def _wide_levels(image: torch.Tensor, levels: int) -> Iterator[torch.Tensor]:
    """Of the Gaussian pyramid, in fp32 or float64."""
    wide = image if image.dtype in (torch.float32, torch.float64) else image.float()
    yield wide
    for _ in range(levels - 1):
        wide = reduce(wide)
        yield wide


def _pull(
    orientations: int, _: Sequence[bool], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradient in the image from those in the energies of each level."""
    (image,) = inputs
    levels = list(_wide_levels(image, len(gradients)))
    found: torch.Tensor | None = None
    for level, gradient in zip(reversed(levels), reversed(gradients), strict=True):
        own = None if gradient is None else pull(gradient, level, orientations)
        found = own if found is None else reduce_adjoint(found, level.shape[-2], level.shape[-1], own)
    return [None if found is None else found.to(image.dtype)]


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
