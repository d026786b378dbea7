"""Laplacian pyramids: what each level adds to the next coarser one, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.adjoints import Adjoint, linear, wide
from gpu_lod.binomial import added, expand_adjoint, reduce_adjoint
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.errors import InputError
from gpu_lod.gaussian import choose, reduce_level
from gpu_lod.gaussian import reference as gaussian_chain
from gpu_lod.planewise import planewise
from gpu_lod.pyramid import Pyramid, burt_sizes, like_levels
from gpu_lod.transfer import (
    READ_BARRIERS,
    Planes,
    chunks,
    make_words,
    packed_planes,
    parts,
    planes_of,
    rows_of,
    scratch_planes,
)


@operators.verb
def laplacian(image: torch.Tensor, levels: int | None = None, backend: Backend = "auto") -> Pyramid:
    """A Laplacian pyramid: the Gaussian pyramid as differences, and its last level as it is.

    Shape: image [B, C, H, W] or [C, H, W], any number of channels and any sides from 1; `levels[l]` is
        [..., ceil(H / 2^l), ceil(W / 2^l)].
    Units: the image's; float dtypes keep theirs, uint8 images give float32 counts, since differences are negative.
    Convention: L_l = G_l - up(G_(l+1)), the last level is G. `up` puts zeros between the samples and applies four
        times the binomial of `gaussian`, to the finer level's size; borders are those of OpenCV's `pyrUp`: mirrored
        before the first sample, repeated after the last. Levels are carried in fp32 and rounded once. `collapse` is
        the inverse.

    Args:
        levels: how many, the last Gaussian level included; None goes down to 1 x 1.
        backend: "gl", "torch" or "auto"; `explain(laplacian, image)` says why. Both give gradients.

    Returns:
        A `Pyramid` with `reduce == "laplacian"`.

    Raises:
        InputError: wrong rank, dtype, an empty side, too many levels.
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device allows.

    Source: Burt and Adelson, "The Laplacian Pyramid as a Compact Image Code" (1983).
    """
    image = checks.tensor(image, "image")
    chosen = _choose(image, levels, backend)
    height, width = image.shape[-2:]
    count = checks.levels(levels, height, width, burt_sizes)
    if chosen.backend == "torch":
        return Pyramid(tuple(reference(image, count)), "laplacian")
    ctx = context_for(image)
    result = linear(lambda x: _gl(ctx, x, count), _adjoint_of(image, count), image)
    return Pyramid(tuple(result), "laplacian", "compute")


def _choose(image: torch.Tensor, levels: int | None = None, backend: Backend = "auto") -> Choice:
    return choose("laplacian", checks.image(image, max_channels=None), backend)


def _like(image: torch.Tensor, levels: int | None = None, *_: str) -> Pyramid:
    """What `laplacian` returns, without values."""
    height, width = image.shape[-2:]
    sizes = burt_sizes(height, width, checks.levels(levels, height, width, burt_sizes))
    dtype = torch.float32 if image.dtype == torch.uint8 else image.dtype
    return Pyramid(tuple(image.new_empty(*image.shape[:-2], *size, dtype=dtype) for size in sizes), "laplacian")


dispatch.register(laplacian, _choose)
operators.register(laplacian, _like)


@operators.verb
def collapse(pyramid: Pyramid, backend: Backend = "auto") -> torch.Tensor:
    """The image that a Laplacian pyramid was made of.

    Shape: [B, C, H, W] or [C, H, W], of level 0.
    Units: the pyramid's. In fp32 the image comes back within 1e-6 of its range.
    Convention: from the coarsest level up, G_l = L_l + up(G_(l+1)), with `laplacian`'s `up`; carried in fp32.

    Args:
        backend: "gl", "torch" or "auto"; both give gradients.

    Raises:
        InputError: not a Laplacian pyramid.
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device allows.
        PyramidChangedError: a level was written to since the pyramid was built.

    Source: Burt and Adelson (1983).
    """
    chosen = _choose_collapse(pyramid, backend)
    pyramid.check_unchanged()
    if chosen.backend == "torch":
        return collapse_reference(list(pyramid.levels))
    ctx = context_for(*pyramid.levels)
    (result,) = linear(
        lambda *levels: (_gl_collapse(ctx, levels),), _collapse_adjoint_of(pyramid.levels), *pyramid.levels
    )
    return result


def _choose_collapse(pyramid: Pyramid, backend: Backend = "auto") -> Choice:
    if not isinstance(pyramid, Pyramid) or pyramid.reduce != "laplacian":
        what = f"a {pyramid.reduce} pyramid" if isinstance(pyramid, Pyramid) else f"a {type(pyramid).__name__}"
        raise InputError(f"collapse takes what laplacian() gives, and this is {what}.")
    return choose("collapse", checks.image(pyramid.levels[0], "level 0", max_channels=None), backend)


dispatch.register(collapse, _choose_collapse)
operators.register(collapse, lambda pyramid, *_: pyramid.levels[0].new_empty(pyramid.levels[0].shape))


def reference(image: torch.Tensor, levels: int) -> list[torch.Tensor]:
    """The pyramid in plain torch. Takes float64 too. Differentiable."""
    dtype = torch.float32 if image.dtype == torch.uint8 else image.dtype

    def make(image: torch.Tensor) -> list[torch.Tensor]:
        chain = gaussian_chain(image if image.dtype in (torch.float32, torch.float64) else image.float(), levels)
        result = [added(fine, coarse, -1).to(dtype) for fine, coarse in pairwise(chain)]
        return [*result, chain[-1].to(dtype, copy=levels == 1)]  # not the image itself

    def like() -> list[torch.Tensor]:
        return like_levels(image, burt_sizes(image.shape[-2], image.shape[-1], levels), dtype)

    return list(linear(lambda image: planewise(make, image), _adjoint_of(image, levels), image, like=like))


def _adjoint_of(image: torch.Tensor, levels: int) -> Adjoint:
    sizes = burt_sizes(image.shape[-2], image.shape[-1], levels)
    return partial(_adjoint, sizes=sizes, dtype=image.dtype)


def _adjoint(
    *gradients: torch.Tensor | None, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[torch.Tensor | None]:
    def make(*gradients: torch.Tensor | None) -> list[torch.Tensor]:
        found = wide(gradients[-1])
        for size, gradient in zip(reversed(sizes[:-1]), reversed(gradients[:-1]), strict=True):
            fine = wide(gradient)
            if fine is not None:
                found = torch.neg(expand_adjoint(fine)) if found is None else found - expand_adjoint(fine)
            found = None if found is None else reduce_adjoint(found, *size, fine)
        assert found is not None
        return [found.to(dtype)]

    given = [gradient for gradient in gradients if gradient is not None]
    return [*(planewise(make, *given) if len(given) == len(gradients) else make(*gradients))]


def collapse_reference(levels: list[torch.Tensor]) -> torch.Tensor:
    """The image in plain torch. Differentiable."""
    dtype = levels[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def make(*levels: torch.Tensor) -> list[torch.Tensor]:
        result = levels[-1].to(wide)
        for level in reversed(levels[:-1]):
            result = added(level.to(wide), result, 1)
        return [result.to(dtype, copy=len(levels) == 1)]  # not the level itself

    (result,) = linear(
        lambda *levels: planewise(make, *levels),
        _collapse_adjoint_of(levels),
        *levels,
        like=lambda: [torch.empty_like(levels[0])],
    )
    return result


def _collapse_adjoint_of(levels: Sequence[torch.Tensor]) -> Adjoint:
    return partial(_collapse_adjoint, dtypes=[level.dtype for level in levels])


def _collapse_adjoint(gradient: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    def make(gradient: torch.Tensor) -> list[torch.Tensor]:
        found, result = gradient, [gradient]
        for dtype in dtypes[1:]:
            found = expand_adjoint(found if found.dtype.itemsize >= 4 else found.float())
            result.append(found.to(dtype))
        return result

    return planewise(make, gradient)


def _gl(ctx: Context, image: torch.Tensor, levels: int) -> list[torch.Tensor]:
    batched = image if image.ndim == 4 else image[None]
    stored = torch.float32 if image.dtype == torch.uint8 else image.dtype
    if levels == 1:
        result = [batched.to(stored, copy=True)]
        return [level[0] for level in result] if image.ndim == 3 else result
    batch, channels, height, width = batched.shape
    sizes = burt_sizes(height, width, levels)
    with ctx.active(batched.device):
        targets, result = packed_planes(ctx, batch, channels, sizes, stored)
        source = planes_of(ctx, batched, torch.float32 if image.dtype == torch.uint8 else None)
        for level in range(levels - 1):
            below = scratch_planes(ctx, (source.count, *sizes[level + 1]), torch.float32)
            if level == levels - 2 or source.dtype != torch.float32:
                # It is rounded too, into the last level, or where the next one will be.
                reduce_level(ctx, source, targets[level + 1], below)
            else:
                reduce_level(ctx, source, below)
            _expand(ctx, source, below, targets[level], -1)
            source = below
    return [level[0] for level in result] if image.ndim == 3 else result


def _gl_collapse(ctx: Context, levels: tuple[torch.Tensor, ...]) -> torch.Tensor:
    top = levels[0]
    if len(levels) == 1:
        return top.clone()
    batched = [level if level.ndim == 4 else level[None] for level in levels]
    batch, channels, height, width = batched[0].shape
    with ctx.active(top.device):
        # The finest is added as it is, and nothing is as large.
        sources = [planes_of(ctx, level, torch.float32 if i else None) for i, level in enumerate(batched)]
        targets, tensors = packed_planes(ctx, batch, channels, [(height, width)], top.dtype)
        result = sources[-1]
        for level in range(len(levels) - 2, -1, -1):
            fine = sources[level]
            shape = (fine.count, fine.height, fine.width)
            target = targets[0] if level == 0 else scratch_planes(ctx, shape, torch.float32)
            _expand(ctx, fine, result, target, 1)
            result = target
    return tensors[0] if top.ndim == 4 else tensors[0][0]


def _expand(ctx: Context, fine: Planes, coarse: Planes, target: Planes, sign: int) -> None:
    """`target` = `fine` + `sign` times `coarse` at its size; sources are fp32 or of the target's dtype."""

    fetched = fine.fetchable(ctx) and coarse.fetchable(ctx)
    if fetched and _in_fours(fine, coarse, target):
        _fours(ctx, fine, coarse, target, sign)
        return

    def span(first: int, last: int) -> tuple[int, int]:
        """Elements of the coarse level that these elements rest on."""
        plane, row = divmod(first // fine.width, fine.height)
        last_plane, last_row = divmod(last // fine.width, fine.height)
        begin = plane * coarse.area + max(row // 2 - 1, 0) * coarse.width
        return begin, last_plane * coarse.area + min(last_row // 2 + 2, coarse.height) * coarse.width - 1

    def fits(first: int, last: int) -> bool:
        return coarse.span_fits(ctx, *span(first, last)) and fine.span_fits(ctx, first, last)

    wide = {name: source.dtype != target.dtype for name, source in (("FINE_WIDE", fine), ("COARSE_WIDE", coarse))}
    defines = {**wide, "SIGN": f"{sign}.0", "FETCHED": fetched}
    for chunk in chunks(ctx, target, fits):
        last = chunk.first + chunk.elements - 1
        uniforms = {
            "u_coarse_size": (coarse.width, coarse.height),
            "u_fine_first": (fine.fetch(1) if fetched else fine.bind(ctx, 1, chunk.first, last)) + chunk.first,
            "u_coarse_first": (coarse.fetch(2) if fetched else coarse.bind(ctx, 2, *span(chunk.first, last)))
            + chunk.plane * coarse.area,
        }
        make_words(ctx, "expand.comp", target, chunk, uniforms=uniforms, defines=defines)
    ctx.gl.MemoryBarrier(READ_BARRIERS)


def _in_fours(fine: Planes, coarse: Planes, target: Planes) -> bool:
    """Whether rows are whole groups of expand_fours.comp, in fp32."""
    whole = fine.width % 4 == 0 and fine.offset % 16 == 0 and target.offset % 16 == 0
    return whole and fine.dtype == coarse.dtype == target.dtype == torch.float32


def _fours(ctx: Context, fine: Planes, coarse: Planes, target: Planes, sign: int) -> None:
    program = ctx.programs.compute("expand_fours.comp", SIGN=f"{sign}.0")
    origins = fine.fetch(1, 4), coarse.fetch(2)

    def fits(count: int, tall: int) -> bool:
        return target.span_fits(ctx, 0, (count - 1) * target.area + tall * target.width)

    for plane, count, row, stop in parts(ctx, target.count, (0, target.height), fits, target.width, 2):
        first = target.bind(ctx, 0, *rows_of(target, plane, count, row, stop))
        program.set(
            u_size=(target.width, target.height),
            u_coarse_size=(coarse.width, coarse.height),
            u_rows=(row, stop),
            u_first=(
                first + plane * target.area,
                origins[0] + plane * fine.area,
                origins[1] + plane * coarse.area,
            ),
        ).dispatch_groups(-(-target.width // 64), -(-(stop - row) // 8), count)
    ctx.gl.MemoryBarrier(READ_BARRIERS)
