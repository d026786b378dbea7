"""Mip chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from gpu_lod import checks, dispatch, generators, operators
from gpu_lod.adjoints import chain_adjoint, linear, wide
from gpu_lod.context import Context, context_for
from gpu_lod.conversion import Conversion, conversion
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.errors import UnsupportedError
from gpu_lod.halving import SUMS, WHOLE, halve_extreme, halve_mean, halve_mean_adjoint, in_parts, parts_pay, stored
from gpu_lod.kernels.chain import chain
from gpu_lod.kernels.device import device_of
from gpu_lod.planewise import PART
from gpu_lod.pyramid import Kind, Pyramid, Reduce, level_sizes, like_levels
from gpu_lod.tuning import generator_of

_REDUCES = ("mean", "max", "min")
_GENERATORS = ("auto", "compute", "registers", "single-pass", "single-pass-texture", "fragment", "driver")
AT_ONCE = 2**23
"""Pixels of images that a CPU makes levels of at once to sample them: for levels of a large batch it takes fresh memory
at each call, which costs it more than making them does."""
STRIP = 8
"""From this ratio of its sides on, an image may be wider than any texture and as small as those that were measured."""


@operators.verb
def mipmap(
    image: torch.Tensor,
    levels: int | None = None,
    reduce: Reduce = "mean",
    generator: Literal[
        "auto", "compute", "registers", "single-pass", "single-pass-texture", "fragment", "driver"
    ] = "auto",
    backend: Backend = "auto",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
) -> Pyramid:
    """A mip chain: each level halves the one above.

    Shape: image [B, C, H, W] or [C, H, W], C 1 to 4, any sides from 1; `levels[l]` is
        [..., max(1, H >> l), max(1, W >> l)].
    Units: uint8 0..255, float16, bfloat16 or float32; the pyramid has the image's dtype. Values are averaged as they
        are: no sRGB decode, no premultiplied alpha.
    Convention: "mean" is the exact area average. An odd side n = 2m + 1 uses the 3-tap polyphase box filter: output i
        weighs inputs 2i, 2i+1, 2i+2 by (m-i)/n, m/n, (i+1)/n, so every level keeps the image's mean; tiles of a picture
        have its levels as long as its sides, and theirs, are even. "max" and "min" take every texel that the footprint
        touches. A footprint that holds a NaN is NaN. Small dtypes are carried in fp32 between levels and rounded once
        (the driver generator rounds at every level). Sums come before they are divided, on most backends: means of
        magnitudes beyond 2^126 may be infinite.

    Args:
        levels: how many, level 0 included; None goes down to 1 x 1.
        reduce: "mean", "max" or "min".
        generator: what makes it on the GL backend. "compute": one dispatch a level. "registers": up to three levels a
            dispatch. "single-pass": one dispatch for all levels and the whole batch, which reads what shaders can read
            at all (`Context.empty`, on llvmpipe any CPU tensor) as it stands: channels last, crops, steps.
            "single-pass-texture": the same from a texture, by bilinear fetches, whose places are fp32: where sides are
            no powers of two, 2^-23 of a side off, and as much of the difference of neighbours; mean only, and at odd
            sides by single texels. "fragment": a draw a level. "driver": glGenerateMipmap, mean only, and at odd sides
            OpenGL leaves the filter open. "auto" takes the one for the device; naming one implies backend="gl".
        backend: "gl", "cuda" (one launch, or two or three for large pictures; CUDA tensors only), "torch" or "auto",
            which takes what measures fastest; `explain(mipmap, image)` says why. All give gradients.
        mean, std: a number a channel; the pyramid is one of (value - mean) / std. "single-pass" does it, and a change
            of dtype, on the way to means; other generators, and all for "max" and "min", start from a converted copy.
        dtype: of the pyramid, float16, bfloat16 or float32; None is the image's (float32 for uint8 with mean or std).
            uint8 values are divided by 255 where the pyramid is floating point.

    Returns:
        A `Pyramid`. Its level 0 is `image` itself where that needs no copy and no conversion.

    Raises:
        InputError: wrong rank, channels, dtype, an empty side, too many levels, an unknown choice, a std of 0.
        UnsupportedError: a generator or backend that cannot do this, no OpenGL for backend="gl", or no CUDA (driver,
            cuda-bindings, NVRTC) for backend="cuda".
        LimitError: larger than the device allows.
        CaptureError: inside a CUDA-graph capture, and not called before it; or by OpenGL.

    Source: Guthe and Heckbert, "Non-Power-of-Two Mipmapping" (NVIDIA, 2005); OpenGL 4.5 section 8.14.4 for the level
        sizes.
    """
    image = checks.tensor(image, "image")
    chosen = _choose(image, levels, reduce, generator, backend, mean, std, dtype)
    count = checks.levels(levels, *image.shape[-2:])
    return make(image, count, reduce, chosen, _conversion(image, mean, std, dtype))


def _choose(
    image: torch.Tensor,
    levels: int | None = None,
    reduce: Reduce = "mean",
    generator: str = "auto",
    backend: Backend = "auto",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
) -> Choice:
    image = checks.image(image)
    checks.choice(reduce, "reduce", _REDUCES)
    checks.choice(generator, "generator", _GENERATORS)
    converted = _conversion(image, mean, std, dtype) is not None
    batch, state = image.shape[0] if image.ndim == 4 else 1, "mean" if reduce == "mean" else "max, min"
    channels, adjoint = image.shape[-3], reduce == "mean"
    return choose_generator(
        "mipmap", image, generator, backend, state, channels, batch, converted=converted, adjoint=adjoint
    )


def choose_generator(
    verb: str,
    image: torch.Tensor,
    generator: str,
    backend: Backend,
    state: str,
    channels: int,
    batch: int,
    *,
    converted: bool = False,
    adjoint: bool = False,
) -> Choice:
    """Shared by the verbs that make chains.

    Args:
        state, channels, batch: as in `tables.Question`.
        converted: values are scaled, or become another dtype, on the way.
        adjoint: as in `dispatch.measured`.
    """
    dispatch.check_backend(backend, cuda=True)
    if generator != "auto" and backend in ("torch", "cuda"):
        raise UnsupportedError(f"generator={generator!r} is a GL one; backend={backend!r} has none: leave it out.")
    if backend == "cuda":
        checks.cuda_input(image)
        return Choice("cuda", "asked for")
    if backend == "gl" or generator != "auto":
        checks.gl_input(image)
        if generator != "auto":
            return Choice("gl", "asked for", generator)
        if torch.compiler.is_compiling():
            return Choice("gl", "asked for")
        return Choice("gl", "asked for", generator_of(context_for(image).tuning, image, converted=converted))
    if backend == "torch":
        return Choice("torch", "asked for")
    barred = dispatch.barred(image)
    if barred is not None:
        return barred
    height, width = image.shape[-2:]
    if max(height, width) > STRIP * min(height, width):
        return Choice("torch", "times were measured on pictures, not on strips; backend='gl' takes them all the same")
    work = height * width * (channels or 1) * batch
    return dispatch.measured(verb, image, work, state=state, channels=channels, batch=batch, adjoint=adjoint)


def _conversion(
    image: torch.Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, dtype: torch.dtype | None
) -> Conversion | None:
    return None if mean is None and std is None and dtype is None else conversion(image, mean, std, dtype)


def _like(
    image: torch.Tensor,
    levels: int | None = None,
    reduce: Reduce = "mean",
    generator: str = "auto",
    backend: str = "auto",
    mean: Any = None,
    std: Any = None,
    dtype: torch.dtype | None = None,
) -> Pyramid:
    """What `mipmap` returns, without values."""
    height, width = image.shape[-2:]
    values = _conversion(image, mean, std, dtype)
    if values is not None:
        image = image.new_empty(image.shape, dtype=values.dtype)
    return empty(image, level_sizes(height, width, checks.levels(levels, height, width)), reduce)


def empty(image: torch.Tensor, sizes: list[tuple[int, int]], kind: Kind) -> Pyramid:
    """A pyramid on an image, without values below it."""
    return Pyramid((image, *(image.new_empty(*image.shape[:-2], *size) for size in sizes[1:])), kind)


dispatch.register(mipmap, _choose, cuda=True)
operators.register(mipmap, _like)


def reference(
    image: torch.Tensor, levels: int | None = None, reduce: Reduce = "mean", values: Conversion | None = None
) -> list[torch.Tensor]:
    """The chain in plain torch, in the fastest way found: a list of levels, level 0 the image itself, or what the
    conversion makes of it.

    Takes float64 too. Differentiable.
    """
    wide = image
    if values is not None:
        wide = values.apply(image)
        image = wide if image.dtype == torch.float64 else stored(wide, values.dtype)
        wide = wide if reduce == "mean" else image
    sizes, dtype = level_sizes(image.shape[-2], image.shape[-1], levels), image.dtype

    def below(wide: torch.Tensor) -> list[torch.Tensor]:
        result = []
        for height, width in sizes[1:]:
            wide = halve_mean(wide, height, width) if reduce == "mean" else halve_extreme(wide, reduce)
            result.append(wide if wide.dtype == dtype else stored(wide, dtype))
        return result

    return [image, *(_means(below, wide, levels, dtype) if reduce == "mean" else below(wide))]


def _means(
    below: Callable[[torch.Tensor], list[torch.Tensor]],
    image: torch.Tensor,
    levels: int | None,
    dtype: torch.dtype | None = None,
) -> Sequence[torch.Tensor]:
    """`below(image)`, the levels of its mean chain below it, differentiable.

    Args:
        dtype: of the levels; None is the image's.
    """
    sizes = level_sizes(image.shape[-2], image.shape[-1], levels)
    if len(sizes) == 1:
        return below(image)
    adjoint = partial(chain_adjoint, sizes=sizes, dtype=image.dtype, step=halve_mean_adjoint)
    return linear(below, adjoint, image, like=lambda: like_levels(image, sizes[1:], dtype))


def image_gradient(
    gradients: Sequence[torch.Tensor | None], sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> torch.Tensor | None:
    """The gradient in an image from those in the levels of its mean chain, level 0 included."""
    top, *rest = gradients
    if not rest:
        return None if top is None else top.to(dtype)
    (found,) = chain_adjoint(*rest, sizes=sizes, dtype=dtype, step=halve_mean_adjoint, finest=top)
    return found


def _below(
    below: Callable[[torch.Tensor], list[torch.Tensor]], image: torch.Tensor, levels: int, reduce: Reduce
) -> Sequence[torch.Tensor]:
    """The same of levels that shaders or kernels make, of extremes too."""
    if reduce == "mean":
        return _means(below, image, levels)
    return dispatch.with_reference_gradient(below, lambda x: reference(x, levels, reduce)[1:], image)


def _converted(
    chain: Callable[[torch.Tensor], list[torch.Tensor]],
    image: torch.Tensor,
    levels: int,
    reduce: Reduce,
    values: Conversion,
) -> Sequence[torch.Tensor]:
    """`chain(image)`, all levels of converted values that shaders or kernels make, differentiable."""
    if reduce != "mean":
        return dispatch.with_reference_gradient(chain, lambda x: reference(x, levels, reduce, values), image)
    sizes, dtype = level_sizes(image.shape[-2], image.shape[-1], levels), image.dtype

    def adjoint(*gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
        found = image_gradient([wide(one) for one in gradients], sizes, torch.promote_types(dtype, torch.float32))
        return [None if found is None else values.adjoint(found).to(dtype)]

    return linear(chain, adjoint, image)


def sampled(
    src: torch.Tensor | Pyramid,
    levels: int | None,
    points: torch.Tensor,
    sample: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor],
    most: int | None = None,
) -> torch.Tensor:
    """What a plain-torch sampler reads of a pyramid, or of an image, whose levels are made for it.

    Args:
        levels: as many of an image's; None is all.
        points: where it reads, [B, ...], or [1, ...] for all images.
        sample: of levels and the points of their images.
        most: texels of images whose levels a CPU makes together, if fewer than `AT_ONCE`.
    """
    if isinstance(src, Pyramid):
        src.check_unchanged()
    top = src.levels[0] if isinstance(src, Pyramid) else src

    def chain(images: slice | None) -> list[torch.Tensor]:
        if isinstance(src, Pyramid):
            made = list(src.levels) if images is None else [level[images] for level in src.levels]
        else:
            made = _chain(src if images is None else src[images], levels)
        return list(dispatch.keepable(*made)) if dispatch.needs_grad(points) else made

    batch = len(top) if top.ndim == 4 and top.device.type == "cpu" else 1
    at_once = (
        batch if isinstance(src, Pyramid) else max(1, min(most or AT_ONCE, AT_ONCE) // (top.shape[-2] * top.shape[-1]))
    )
    if top.dtype.itemsize < 4 and top.numel() > WHOLE:
        # Levels are read in fp32: of a quarter of the batch they are no more than the images. On many threads it is an
        # image for each.
        at_once = min(at_once, max(-(-batch // 4), torch.get_num_threads()))
    if batch <= at_once:
        return sample(chain(None), points)
    points = points.expand(batch, *points.shape[1:])
    parts: list[torch.Tensor] = []
    result = None
    for first in range(0, batch, at_once):
        images = slice(first, first + at_once)
        part = sample(chain(images), points[images])
        if dispatch.needs_grad(part) or checks.transformed(part):
            parts.append(part)
        else:  # not twice in memory
            result = part.new_empty(batch, *part.shape[1:]) if result is None else result
            result[images] = part
    return torch.cat(parts) if result is None else result


def _chain(image: torch.Tensor, levels: int | None) -> list[torch.Tensor]:
    """A mean chain that is there to be sampled alone: made of smaller parts than one that is kept, as less memory is
    what a call may take."""
    if not parts_pay(image):
        return reference(image, levels)
    part = min(PART // 2, image.numel() // 8)
    return [image, *_means(lambda x: in_parts(x, levels, part), image, levels)]


def make(image: torch.Tensor, levels: int, reduce: Reduce, chosen: Choice, values: Conversion | None = None) -> Pyramid:
    """The chain by the chosen backend; arguments are checked."""
    if chosen.backend == "torch":
        # Counts are halved four in a word; half precision costs more whole only where fp32 of it is fresh memory.
        whole = WHOLE if image.dtype == torch.uint8 else SUMS
        if reduce == "mean" and values is None and parts_pay(image, whole):
            return Pyramid((image, *_means(lambda x: in_parts(x, levels, PART), image, levels)), reduce)
        return Pyramid(tuple(reference(image, levels, reduce, values)), reduce)
    if chosen.backend == "cuda":
        return _cuda(image, levels, reduce, values)
    ctx = context_for(image)
    generator = chosen.generator or generator_of(ctx.tuning, image, converted=values is not None)
    if values is not None:
        converted = _converted(
            lambda x: _gl_converted(ctx, x, levels, reduce, generator, values), image, levels, reduce, values
        )
        return Pyramid(tuple(converted), reduce, generator)
    kept: list[Any] = []

    def below(source: torch.Tensor) -> list[torch.Tensor]:
        result, textures = _gl(ctx, source, levels, reduce, generator)
        kept[:] = [textures, result[0]]
        return result[1:]

    result = _below(below, image, levels, reduce)
    # Level 0 is the image, so there is nothing to differentiate; without gradients take the copy in GL memory.
    top = image if dispatch.needs_grad(image) else kept[1]
    pyramid = Pyramid.made((top, *result), reduce, generator)
    if kept[0] is not None:
        pyramid._keep_textures(ctx, kept[0])
    return pyramid


def _cuda(image: torch.Tensor, levels: int, reduce: Reduce, values: Conversion | None) -> Pyramid:
    device = device_of(image)
    if values is not None:
        # Torch converts on the way in and, once, on the way out.
        def converted(source: torch.Tensor) -> list[torch.Tensor]:
            wide = values.apply(source.detach())
            top = (wide if reduce == "mean" else stored(wide, values.dtype)).contiguous()
            return [stored(level, values.dtype) for level in (top, *chain(device, top, levels, reduce))]

        return Pyramid(tuple(_converted(converted, image, levels, reduce, values)), reduce, "cuda")
    top = image if dispatch.needs_grad(image) else image.contiguous()
    result = _below(lambda source: chain(device, source.contiguous(), levels, reduce), top, levels, reduce)
    return Pyramid.made((top, *result), reduce, "cuda")


def _gl(
    ctx: Context, image: torch.Tensor, levels: int, reduce: Reduce, generator: str
) -> tuple[list[torch.Tensor], Any]:
    batched = image if image.ndim == 4 else image[None]
    with ctx.active(image.device):
        result, textures = generators.build(ctx, batched, levels, reduce, generator)
    if image.dtype == torch.bfloat16:
        textures = None  # they hold unrounded values
    if image.ndim == 3:
        result = [level[0] for level in result]
    return result, textures


def _gl_converted(
    ctx: Context, image: torch.Tensor, levels: int, reduce: Reduce, generator: str, values: Conversion
) -> list[torch.Tensor]:
    """All levels of a chain of converted values."""
    if generator != "single-pass" or reduce != "mean":
        wide = values.apply(image.detach())
        result, _ = _gl(ctx, wide if reduce == "mean" else stored(wide, values.dtype), levels, reduce, generator)
        return [stored(level, values.dtype) for level in result]
    batched = image if image.ndim == 4 else image[None]
    with ctx.active(image.device):
        result = generators.build_converted(ctx, batched, levels, values)
    return [level if image.ndim == 4 else level[0] for level in result]
