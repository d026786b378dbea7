"""Mip chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from gpu_lod import checks, dispatch, generators, operators, planewise
from gpu_lod.context import Context, context_for
from gpu_lod.conversion import Conversion, conversion
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.errors import UnsupportedError
from gpu_lod.kernels.chain import chain
from gpu_lod.kernels.device import device_of
from gpu_lod.planewise import bands
from gpu_lod.pyramid import Kind, Pyramid, Reduce, level_sizes

_REDUCES = ("mean", "max", "min")
_GENERATORS = ("auto", "compute", "registers", "single-pass", "single-pass-texture", "fragment", "driver")
WHOLE = 2**21
"""Texels of small dtypes that a CPU makes fp32 of at once; of larger images and batches it is a part at a time, which
takes down to a third of the time and a fraction of the memory."""

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
        weighs inputs 2i, 2i+1, 2i+2 by (m-i)/n, m/n, (i+1)/n, so every level keeps the image's mean. "max" and "min"
        take every texel that the footprint touches. A footprint that holds a NaN is NaN. Small dtypes are carried in
        fp32 between levels and rounded once (the driver generator rounds at every level).

    Args:
        levels: how many, level 0 included; None goes down to 1 x 1.
        reduce: "mean", "max" or "min".
        generator: what makes it on the GL backend. "compute": one dispatch a level. "registers": up to three levels a
            dispatch. "single-pass": one dispatch for all levels and the whole batch, which reads a tensor in GL memory
            (`Context.empty`) as it stands: channels last, crops, steps. "single-pass-texture": the same from a texture,
            by bilinear fetches; mean only, and at odd sides by single texels. "fragment": a draw a level. "driver":
            glGenerateMipmap, mean only, and at odd sides OpenGL leaves the filter open. "auto" takes the one for the
            device; naming one implies backend="gl".
        backend: "gl", "cuda" (one launch for all levels, CUDA tensors only), "torch" or "auto", which takes what
            measures fastest; `explain(mipmap, image)` says why. All give gradients.
        mean, std: a number a channel; the pyramid is one of (value - mean) / std. "single-pass" does it, and a change
            of dtype, on the way; other generators start from a converted copy.
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
    _conversion(image, mean, std, dtype)
    batch, state = image.shape[0] if image.ndim == 4 else 1, "mean" if reduce == "mean" else "max, min"
    return choose_generator("mipmap", image, generator, backend, state, image.shape[-3], batch)


def choose_generator(
    verb: str, image: torch.Tensor, generator: str, backend: Backend, state: str, channels: int, batch: int
) -> Choice:
    """Shared by the verbs that make chains.

    Args:
        state, channels, batch: as in `tables.Question`.
    """
    dispatch.check_backend(backend, cuda=True)
    if generator != "auto" and backend in ("torch", "cuda"):
        raise UnsupportedError(f"generator={generator!r} is a GL one; leave it 'auto' with backend={backend!r}.")
    if backend == "cuda":
        checks.cuda_input(image)
        return Choice("cuda", "asked for")
    if backend == "gl" or generator != "auto":
        checks.gl_input(image)
        if generator != "auto":
            return Choice("gl", "asked for", generator)
        if torch.compiler.is_compiling():
            return Choice("gl", "asked for")
        return Choice("gl", "asked for", context_for(image).tuning.generator)
    if backend == "torch":
        return Choice("torch", "asked for")
    barred = dispatch.barred(image)
    if barred is not None:
        return barred
    height, width = image.shape[-2:]
    if max(height, width) > STRIP * min(height, width):
        return Choice("torch", "times were measured on pictures, not on strips; backend='gl' takes them all the same")
    return dispatch.measured(
        verb, image, height * width * (channels or 1) * batch, state=state, channels=channels, batch=batch
    )


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
    elif reduce == "mean" and image.dtype not in (torch.float32, torch.float64):
        wide = image.float()
    result = [image]
    top_height, top_width = image.shape[-2:]
    for height, width in level_sizes(top_height, top_width, levels)[1:]:
        wide = halve_mean(wide, height, width) if reduce == "mean" else _halve_extreme(wide, reduce)
        result.append(wide if wide.dtype == image.dtype else stored(wide, image.dtype))
    return result


def sampled(
    src: torch.Tensor | Pyramid,
    levels: int | None,
    points: torch.Tensor,
    sample: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What a plain-torch sampler reads of a pyramid, or of an image, whose levels are made for it.

    Args:
        levels: as many of an image's; None is all.
        points: where it reads, [B, ...], or [1, ...] for all images.
        sample: of levels and the points of their images.
    """
    if isinstance(src, Pyramid):
        src.check_unchanged()
        return sample(list(src.levels), points)
    if src.device.type == "cpu" and src.ndim == 4:
        at_once = max(1, AT_ONCE // (src.shape[-2] * src.shape[-1]))
        if len(src) > at_once:
            parts = zip(src.split(at_once), points.expand(len(src), *points.shape[1:]).split(at_once), strict=True)
            return torch.cat([sample(reference(some, levels), own) for some, own in parts])
    return sample(reference(src, levels), points)


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values as they are stored: rounded for uint8."""
    return values.round().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def halve_mean(x: torch.Tensor, height: int, width: int, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Area average to (height, width), the next level's size.

    Args:
        rows: of a band of a level, which row of the next level is its first and how many rows the level has; None is
            the whole level.
    """
    h, w = x.shape[-2:]
    if h % 2 and h > 1:
        x = _polyphase(x, -2, *(rows or (0, h)))
    if w % 2 and w > 1:
        x = _polyphase(x, -1, 0, w)
    threads = torch.get_num_threads() if x.device.type == "cpu" else 0
    if x.shape[-2] != height and x.shape[-1] != width and threads != 1:
        # One kernel for four: bilinear at half the size has its taps at the centres, with weights of exactly 1/2.
        batched = x if x.ndim == 4 else x[None]
        batched = F.interpolate(batched, size=(height, width), mode="bilinear", align_corners=False)
        return batched if x.ndim == 4 else batched[0]
    # On a single thread torch interpolates by another kernel, which takes five times as long as sums do. And where one
    # side alone is even it weighs a neighbour on the other side with 0, and 0 * inf is NaN.
    share = 1.0
    if x.shape[-2] != height:
        x, share = torch.add(x[..., 0::2, :], x[..., 1::2, :]), 0.5
    if x.shape[-1] != width:
        x, share = torch.add(x[..., 0::2], x[..., 1::2]), share / 2
    return x if share == 1 else x.mul_(share)


def _polyphase(x: torch.Tensor, dim: int, begin: int, n: int) -> torch.Tensor:
    """The 3-tap box filter along an odd side n = 2m + 1, or of what outputs from `begin` on rest on."""
    m, count = n // 2, x.shape[dim] // 2
    i = torch.arange(begin, begin + count, dtype=x.dtype, device=x.device)
    if dim == -2:
        i = i[:, None]
        first, middle, last = x[..., 0:-1:2, :], x[..., 1::2, :], x[..., 2::2, :]
    else:
        first, middle, last = x[..., 0:-1:2], x[..., 1::2], x[..., 2::2]
    result = middle * (m / n)
    return torch.addcmul(torch.addcmul(result, first, (m - i) / n), last, (i + 1) / n)


def _in_parts(image: torch.Tensor, levels: int) -> list[torch.Tensor]:
    """Levels 1, 2, ... of `reference` of a small dtype, the first of them some planes or rows at a time: in fp32 the
    image would be several."""
    sizes = level_sizes(image.shape[-2], image.shape[-1], levels)[1:]
    result: list[torch.Tensor] = []
    wide = image
    for height, width in sizes:
        wide = halve_mean(wide, height, width) if result else _halve_small(image, height, width)
        result.append(stored(wide, image.dtype))
    return result


def _halve_small(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Area average to (height, width), in fp32."""
    h, w = image.shape[-2:]
    result = image.new_empty(*image.shape[:-2], height, width, dtype=torch.float32)
    source, target = image.flatten(0, -3), result.flatten(0, -3)
    for planes, rows in bands(len(target), height, 2 * w, planewise.PART):
        part = source[planes, 2 * rows.start : 2 * rows.stop + h % 2].float()
        target[planes, rows] = halve_mean(part, rows.stop - rows.start, width, (rows.start, h))
    return result


def _halve_extreme(x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Max or min of each footprint, rows first: whole rows vectorise."""
    take = torch.maximum if reduce == "max" else torch.minimum
    h, w = x.shape[-2:]
    if h > 1:
        m = h // 2 * 2
        y = take(x[..., 0:m:2, :], x[..., 1:m:2, :])
        x = take(y, x[..., 2::2, :]) if h % 2 else y
    if w > 1:
        m = w // 2 * 2
        y = take(x[..., 0:m:2], x[..., 1:m:2])
        x = take(y, x[..., 2::2]) if w % 2 else y
    return x


def make(image: torch.Tensor, levels: int, reduce: Reduce, chosen: Choice, values: Conversion | None = None) -> Pyramid:
    """The chain by the chosen backend; arguments are checked."""
    if chosen.backend == "torch":
        small = image.dtype in (torch.uint8, torch.float16, torch.bfloat16) and image.device.type == "cpu"
        free = not (dispatch.needs_grad(image) or checks.transformed(image))
        if small and free and reduce == "mean" and values is None and image.numel() > WHOLE:
            return Pyramid((image, *_in_parts(image, levels)), reduce)
        return Pyramid(tuple(reference(image, levels, reduce, values)), reduce)
    if chosen.backend == "cuda":
        return _cuda(image, levels, reduce, values)
    ctx = context_for(image)
    generator = chosen.generator or ctx.tuning.generator
    if values is not None:
        converted = dispatch.run_gl(
            lambda x: _gl_converted(ctx, x, levels, reduce, generator, values),
            lambda x: reference(x, levels, reduce, values),
            image,
        )
        return Pyramid(tuple(converted), reduce, generator)
    kept: list[Any] = []

    def below(source: torch.Tensor) -> list[torch.Tensor]:
        result, textures = _gl(ctx, source, levels, reduce, generator)
        kept[:] = [textures, result[0]]
        return result[1:]

    result = dispatch.run_gl(below, lambda x: reference(x, levels, reduce)[1:], image)
    # Level 0 is the image, so there is nothing to differentiate; without gradients take the copy in GL memory.
    top = image if dispatch.needs_grad(image) else kept[1]
    pyramid = Pyramid((top, *result), reduce, generator)
    if kept[0] is not None:
        pyramid._keep_textures(ctx, kept[0])
    return pyramid


def _cuda(image: torch.Tensor, levels: int, reduce: Reduce, values: Conversion | None) -> Pyramid:
    device = device_of(image)
    sizes = level_sizes(image.shape[-2], image.shape[-1], levels)
    if values is not None:
        # Torch converts on the way in and, once, on the way out.
        def converted(source: torch.Tensor) -> list[torch.Tensor]:
            wide = values.apply(source.detach())
            top = (wide if reduce == "mean" else stored(wide, values.dtype)).contiguous()
            return [stored(level, values.dtype) for level in (top, *chain(device, top, sizes, reduce))]

        made = dispatch.run_gl(converted, lambda source: reference(source, levels, reduce, values), image)
        return Pyramid(tuple(made), reduce, "cuda")
    top = image.contiguous()
    result = dispatch.run_gl(
        lambda source: chain(device, source.contiguous(), sizes, reduce),
        lambda source: reference(source, levels, reduce)[1:],
        image if dispatch.needs_grad(image) else top,
    )
    return Pyramid((image if dispatch.needs_grad(image) else top, *result), reduce, "cuda")


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
