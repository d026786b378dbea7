"""Gaussian pyramids."""

from __future__ import annotations

import math
from functools import partial

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.adjoints import Adjoint, chain_adjoint, linear
from gpu_lod.binomial import reduce, reduce_adjoint
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.generators import Chain, reduce_by
from gpu_lod.halving import stored
from gpu_lod.mipmap import empty
from gpu_lod.planewise import planewise
from gpu_lod.pyramid import Pyramid, burt_sizes, like_levels
from gpu_lod.transfer import READ_BARRIERS, Planes, parts, rows_of, scratch_planes


@operators.verb
def gaussian(image: torch.Tensor, levels: int | None = None, backend: Backend = "auto") -> Pyramid:
    """A Gaussian pyramid: each level is every other sample of the one above, smoothed.

    Shape: image [B, C, H, W] or [C, H, W], any number of channels and any sides from 1; `levels[l]` is
        [..., ceil(H / 2^l), ceil(W / 2^l)].
    Units: uint8 0..255, float16, bfloat16 or float32; the pyramid has the image's dtype. Small dtypes are carried in
        fp32 between levels and rounded once.
    Convention: Burt and Adelson's, and OpenCV's `pyrDown`: 5-tap binomial (1 4 6 4 1) / 16 along each side, border
        mirrored about the outermost sample (reflect-101), sides rounded up. So sample i of level l stands on texel
        2^l i, not in the middle of a footprint (`Pyramid.position`), and samplers do not take it. kornia's `pyrdown`
        has the same filter and another grid: it resamples bilinearly. OpenCV rounds uint8 at every level, and so may be
        a count or two away further down.

    Args:
        levels: how many, level 0 included; None goes down to 1 x 1.
        backend: "gl", "torch" or "auto"; `explain(gaussian, image)` says why. Both give gradients.

    Returns:
        A `Pyramid` with `reduce == "gaussian"`. Its level 0 is `image` itself where that needs no copy.

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
        return Pyramid(tuple(reference(image, count)), "gaussian")
    ctx = context_for(image)
    kept: list[torch.Tensor] = []

    def below(source: torch.Tensor) -> list[torch.Tensor]:
        result = _gl(ctx, source, count)
        kept[:] = result[:1]
        return result[1:]

    result = linear(below, _adjoint_of(image, count), image)
    top = image if dispatch.needs_grad(image) else kept[0]
    return Pyramid((top, *result), "gaussian", "compute")


def _choose(image: torch.Tensor, levels: int | None = None, backend: Backend = "auto") -> Choice:
    return choose("gaussian", checks.image(image, max_channels=None), backend)


RAGGED = "ragged rows"
"""State of images whose rows are no whole number of `EIGHTS`: their shaders take several times as long."""
EIGHTS = 8


def choose(verb: str, image: torch.Tensor, backend: Backend, *, ragged: bool = True) -> Choice:
    """Shared by the verbs that rest on this pyramid.

    Args:
        ragged: ragged rows have times of their own.
    """
    dispatch.check_backend(backend)
    if backend == "gl":
        checks.gl_input(image)
    if backend != "auto":
        return Choice(backend, "asked for")
    if barred := dispatch.barred(image):  # compiled code, which would have a graph for ragged rows alone
        return barred
    state = RAGGED if ragged and image.shape[-1] % EIGHTS else ""
    return dispatch.measured(verb, image, image.numel(), state=state, batch=math.prod(image.shape[:-2]), adjoint=True)


def _like(image: torch.Tensor, levels: int | None = None, *_: str) -> Pyramid:
    """What `gaussian` returns, without values."""
    height, width = image.shape[-2:]
    return empty(image, burt_sizes(height, width, checks.levels(levels, height, width, burt_sizes)), "gaussian")


dispatch.register(gaussian, _choose)
operators.register(gaussian, _like)


def reference(image: torch.Tensor, levels: int) -> list[torch.Tensor]:
    """The pyramid in plain torch, each side by itself. Takes float64 too. Differentiable."""
    if levels == 1:
        return [image]

    def below(image: torch.Tensor) -> list[torch.Tensor]:
        return planewise(lambda planes: _below(planes, levels - 1), image)

    sizes = burt_sizes(image.shape[-2], image.shape[-1], levels)[1:]
    return [image, *linear(below, _adjoint_of(image, levels), image, like=lambda: like_levels(image, sizes))]


def _below(image: torch.Tensor, levels: int) -> list[torch.Tensor]:
    held = [image if image.dtype in (torch.float32, torch.float64) else image.float()]
    result = []
    for _ in range(levels):
        wide = reduce(held.pop())  # as the last to know it (from Python 3.11 on), it lets go of it on the way
        held.append(wide)
        result.append(wide if wide.dtype == image.dtype else stored(wide, image.dtype))
        del wide
    return result


def _adjoint_of(image: torch.Tensor, levels: int) -> Adjoint:
    sizes = burt_sizes(image.shape[-2], image.shape[-1], levels)
    return partial(chain_adjoint, sizes=sizes, dtype=image.dtype, step=reduce_adjoint)


def _gl(ctx: Context, image: torch.Tensor, levels: int) -> list[torch.Tensor]:
    batched = image if image.ndim == 4 else image[None]
    height, width = image.shape[-2:]
    with ctx.active(image.device):
        chain = Chain(ctx, batched, burt_sizes(height, width, levels))
        wide = chain.planes[0].dtype != torch.float32
        source = chain.planes[0]
        for level, target in enumerate(chain.planes[1:], start=1):
            scratch = None
            if wide and level < levels - 1:
                scratch = scratch_planes(ctx, (target.count, target.height, target.width), torch.float32)
            reduce_level(ctx, source, target, scratch)
            source = scratch or target
    return [level[0] for level in chain.tensors] if image.ndim == 3 else chain.tensors


def reduce_level(ctx: Context, source: Planes, target: Planes, scratch: Planes | None = None) -> None:
    """One level of planes from the one above, and into `scratch` the same in fp32."""
    if ctx.software and scratch is None and _in_eights(source, target):
        _eights(ctx, source, target)
    else:
        fetched = source.fetchable(ctx)
        defines = {"SOURCE_WIDE": source.dtype != target.dtype, "FETCHED": fetched}
        reduce_by(
            ctx,
            "gaussian_level.comp",
            source,
            target,
            scratch,
            defines,
            above=2,
            fetch=source.fetch if fetched else None,
        )


def _in_eights(source: Planes, target: Planes) -> bool:
    """Whether rows of both are whole vectors of gaussian_eights.comp, in fp32."""
    whole = source.width % 8 == 0 and source.offset % 32 == 0 and target.offset % 16 == 0
    return whole and source.dtype == target.dtype == torch.float32


def _eights(ctx: Context, source: Planes, target: Planes) -> None:
    def read(plane: int, count: int, row: int, stop: int) -> tuple[int, int]:
        last = (plane + count - 1) * source.area + min(2 * stop + 1, source.height) * source.width - 1
        return plane * source.area + max(min(2 * row, source.height - 1) - 2, 0) * source.width, last

    def fits(count: int, tall: int) -> bool:
        begin, last = read(0, count, 0, min(tall + 2, target.height))
        return source.span_fits(ctx, begin, last) and target.span_fits(
            ctx, 0, (count - 1) * target.area + tall * target.width
        )

    fetched = source.fetchable(ctx)
    program = ctx.programs.compute("gaussian_eights.comp", FETCHED=fetched)
    for plane, count, row, stop in parts(ctx, target.count, (0, target.height), fits, target.width, 2):
        origin = source.fetch(1, 4) if fetched else source.bind(ctx, 1, *read(plane, count, row, stop))
        first = target.bind(ctx, 0, *rows_of(target, plane, count, row, stop)) + plane * target.area
        program.set(
            u_source_size=(source.width, source.height),
            u_size=(target.width, target.height),
            u_rows=(row, stop),
            u_first=(origin + plane * source.area, first),
        ).dispatch_groups(-(-target.width // 32), -(-(stop - row) // 8), count)
    ctx.gl.MemoryBarrier(READ_BARRIERS)
