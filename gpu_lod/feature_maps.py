"""Feature maps: forty things that can be said of each pixel, for relevance scorers to weigh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.adjoints import pulled
from gpu_lod.context import context_for
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.feature_channels import CHANNELS as CHANNELS  # where its callers look for it
from gpu_lod.feature_channels import COUNT, SEMANTIC, channels, pull
from gpu_lod.feature_passes import FeatureTexture, make, make_texture
from gpu_lod.pages import large

DTYPES = (torch.float16, torch.float32)


@overload
def feature_maps(
    image: torch.Tensor,
    fixation: Any = ...,
    previous: torch.Tensor | None = ...,
    semantic: torch.Tensor | None = ...,
    dtype: torch.dtype = ...,
    video: bool = ...,
    as_texture: Literal[False] = ...,
    backend: Backend = ...,
) -> torch.Tensor: ...
@overload
def feature_maps(
    image: torch.Tensor,
    fixation: Any = ...,
    previous: torch.Tensor | None = ...,
    semantic: torch.Tensor | None = ...,
    dtype: torch.dtype = ...,
    video: bool = ...,
    *,
    as_texture: Literal[True],
    backend: Backend = ...,
) -> FeatureTexture: ...
@operators.verb
def feature_maps(
    image: torch.Tensor,
    fixation: Any = (0.5, 0.5),
    previous: torch.Tensor | None = None,
    semantic: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    video: bool = False,
    as_texture: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | FeatureTexture:
    """Forty channels that describe each pixel, its neighbourhood and its place.

    Shape: image [B, C, H, W] or [C, H, W], C 1 (grey), 2 (grey, alpha), 3 or 4 (RGB, alpha), any sides from 1; the
        result is [B, 40, H, W] or [40, H, W]. Alpha is left out, grey serves as all three colours.
    Units: images are scaled to [0, 1], uint8 by 255, floats as they are; all is computed in fp32 and rounded once.
    Convention: y down; borders mirrored about the outermost pixel (reflect-101) unless said otherwise. G_l and L_l are
        the levels of `gaussian` and `laplacian` of the luma. A level is read at pixel (x, y) bilinearly at sample
        (x, y) / 2^l, for its sample i stands at pixel centre 2^l i + 1/2; beyond its last sample the last is read.

        0-2    red, green, blue
        3-4    x, y: (i + 0.5) / n
        5      saliency: the mean of |G_c - G_s| over (c, s) = (1, 3), (2, 4), (3, 5), each level read at the pixel;
               levels beyond the last, 1 x 1, are the last
        6-8    Sobel's gx, gy (positive where the luma rises towards +x, +y; its 3 x 3 kernel over 8, so that a ramp of
               1 a pixel gives 1) and sqrt(gx^2 + gy^2)
        9      luma: 0.299 R + 0.587 G + 0.114 B (Rec. 601)
        10     motion: the luma less that of the frame before; 0 where there is none
        11     eccentricity: the distance from the fixation, in units of the longer side
        12     |L_0|
        13-16  `oriented_energy` of the luma, level 0, at 0, 45, 90 and 135 degrees
        17-32  `semantic`, else 0
        33-36  L_1^2 to L_4^2, the squares read at the pixel. The last level of a pyramid is no band: bands that do not
               exist are 0, in channel 12 too
        37     variance of the luma over 5 x 5 pixels, of the population
        38     R - G
        39     B - (R + G) / 2

        `from gpu_lod.feature_maps import CHANNELS` maps names to channels.

        What reads a NaN is NaN; where a level is read with a weight of 0 for one, as beside a NaN in 5 and 33-36, and
        along odd sides, a backend may leave it out. What reads an infinity is infinite or NaN, which of the two may
        differ between backends.

    Args:
        fixation: (x, y) in [0, 1], or [B, 2]; gradients pass to it on the torch backend.
        previous: the frame before, of the image's size, [C', H, W] or [1, C', H, W] for all images, or [B, C', H, W].
        semantic: sixteen channels of the caller's own, floats, taken as they are: [B, 16, H, W], or [16, H, W] or
            [1, 16, H, W] for all images.
        dtype: of the result, float16 or float32.
        video: the batch is consecutive frames: what came before frame k is frame k - 1, and before frame 0 `previous`,
            a single image, if there is one.
        as_texture: give an array texture of 10 RGBA layers an image instead of a tensor, channel 4 k + c in component c
            of layer k, for shaders of yours to sample. GL only, without gradients.
        backend: "gl", "torch" or "auto"; `explain(feature_maps, image)` says why. Both give gradients in the image, in
            `previous` and in `semantic`.

    Returns:
        A tensor, or with `as_texture` a `FeatureTexture`.

    Raises:
        InputError: bad shapes, sizes or dtypes; tensors on several devices; a fixation that is not finite or outside
            [0, 1].
        UnsupportedError: a backend that is not available; a texture from the torch backend, or with gradients.
        LimitError: larger than the device allows.

    Source: saliency after Itti, Koch and Niebur, "A Model of Saliency-Based Visual Attention for Rapid Scene Analysis"
        (1998), without its normalisation; the others as in `gaussian`, `laplacian` and `oriented_energy`.
    """
    image = checks.tensor(image, "image")
    previous = None if previous is None else checks.tensor(previous, "previous")
    semantic = None if semantic is None else checks.tensor(semantic, "semantic")
    chosen = _choose(image, fixation, previous, semantic, dtype, video, as_texture, backend)
    points = checks.fixation(fixation, image.shape[0] if image.ndim == 4 else 1)
    if chosen.backend == "torch":
        return reference(image, points, previous, semantic, dtype, video)
    inputs = [x for x in (image, previous, semantic) if x is not None]
    points = dispatch.kept(points, inputs)
    ctx = context_for(*inputs)
    if as_texture:
        if needs_grad(*inputs):
            raise UnsupportedError("a texture carries no gradients: pass detached tensors, or leave as_texture off.")
        return make_texture(ctx, image, points, previous, semantic, dtype, video)

    return _differentiable(
        partial(make, ctx, dtype=dtype, video=video), image, points, previous, semantic, dtype, video
    )


def _choose(
    image: torch.Tensor,
    fixation: Any = (0.5, 0.5),
    previous: torch.Tensor | None = None,
    semantic: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    video: bool = False,
    as_texture: bool = False,
    backend: Backend = "auto",
) -> Choice:
    image = checks.image(image)
    dispatch.check_backend(backend)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise InputError(f"dtype is {dtype}; expected torch.float16 or torch.float32.")
    for flag, name in ((video, "video"), (as_texture, "as_texture")):
        checks.flag(flag, name)
    inputs = [image]
    if previous is not None:
        inputs.append(_check_previous(image, previous, video))
    if semantic is not None:
        inputs.append(_check_semantic(image, semantic))
    if as_texture and backend == "torch":
        raise UnsupportedError("as_texture gives an OpenGL texture, and torch makes none. Use backend='gl' or 'auto'.")
    if backend == "gl" or as_texture:
        if torch.compiler.is_compiling() and as_texture:
            raise UnsupportedError("a texture cannot be a value in compiled code. Leave as_texture off there.")
        for tensor in inputs:
            checks.gl_input(tensor)
        checks.gl_place(fixation)
        return Choice("gl", "asked for" if backend == "gl" else "a texture is asked for")
    if backend == "torch":
        return Choice("torch", "asked for")
    barred = dispatch.barred(*inputs, fixation)
    if barred is not None:
        return barred
    if isinstance(fixation, torch.Tensor) and fixation.requires_grad:
        return Choice("torch", "the fixation requires grad")
    # Forty channels are made of an image whatever it holds; where rows are no whole words, by shaders of their own.
    return dispatch.measured(
        "feature_maps",
        image,
        image.numel() // image.shape[-3],
        state="ragged rows" if image.shape[-1] % 4 else "",
        batch=image.shape[0] if image.ndim == 4 else 1,
        dtype=dtype,
        adjoint=True,
    )


def _like(
    image: torch.Tensor,
    fixation: Any = None,
    previous: Any = None,
    semantic: Any = None,
    dtype: torch.dtype = torch.float32,
    *_: Any,
) -> torch.Tensor:
    """What `feature_maps` returns, without values."""
    return image.new_empty(*image.shape[:-3], COUNT, *image.shape[-2:], dtype=dtype)


dispatch.register(feature_maps, _choose)
operators.register(feature_maps, _like)


def _check_previous(image: torch.Tensor, value: torch.Tensor, video: bool) -> torch.Tensor:
    previous = checks.image(value, "previous")
    batch = image.shape[0] if image.ndim == 4 else 1
    count = previous.shape[0] if previous.ndim == 4 else 1
    if previous.shape[-2:] != image.shape[-2:]:
        raise InputError(
            f"previous is {tuple(previous.shape[-2:])} and the image {tuple(image.shape[-2:])}. Frames of another size "
            "have no motion pixel by pixel: resize them first."
        )
    if count not in ((1,) if video else (1, batch)):
        which = "one image, the frame before the first" if video or batch == 1 else f"1 image or {batch}"
        raise InputError(f"previous has shape {tuple(previous.shape)}; expected {which}.")
    checks.same_device(image, previous, "previous")
    return previous


def _check_semantic(image: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point() or value.dtype == torch.float64:
        raise InputError(
            f"semantic is {value.dtype}; expected features in float16, bfloat16 or float32. Convert them with .float()."
        )
    semantic = checks.image(value, "semantic", max_channels=None)
    batch = image.shape[0] if image.ndim == 4 else 1
    count = semantic.shape[0] if semantic.ndim == 4 else 1
    if semantic.shape[-3] != SEMANTIC or count not in (1, batch):
        raise InputError(
            f"semantic has shape {tuple(semantic.shape)}; expected [16, H, W] or [{batch}, 16, H, W]. Project other "
            "features to 16 channels, or fill up with zeros."
        )
    if semantic.shape[-2:] != image.shape[-2:]:
        raise InputError(
            f"semantic is {tuple(semantic.shape[-2:])} and the image {tuple(image.shape[-2:])}; nothing is resized "
            "silently. Resize it with torch.nn.functional.interpolate(semantic, size=image.shape[-2:], "
            "mode='bilinear') if bilinear values are what you mean."
        )
    checks.same_device(image, semantic, "semantic")
    return semantic


# -- in plain torch ----------------------------------------------------------------------------------------------------


def reference(
    image: torch.Tensor,
    fixation: torch.Tensor,
    previous: torch.Tensor | None = None,
    semantic: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    video: bool = False,
) -> torch.Tensor:
    """The maps in plain torch; float64 images give float64. Differentiable in every tensor, the fixation [B, 2] too."""
    dtype = torch.float64 if image.dtype == torch.float64 else dtype
    return _differentiable(partial(_made, dtype=dtype, video=video), image, fixation, previous, semantic, dtype, video)


def _made(
    image: torch.Tensor,
    fixation: torch.Tensor,
    previous: torch.Tensor | None,
    semantic: torch.Tensor | None,
    dtype: torch.dtype,
    video: bool,
) -> torch.Tensor:
    """By a graph of torch's own where gradients are asked for."""
    batched = image if image.ndim == 4 else image[None]
    found = channels(batched, fixation, previous, semantic, video)
    batch, _, height, width = batched.shape
    given = [x for x in (image, fixation, previous, semantic) if x is not None]
    if needs_grad(*given) or any(map(checks.transformed, given)):
        result = torch.cat([part.expand(batch, -1, height, width).to(dtype) for part in found], dim=1)
    else:
        result = large(torch.empty(batch, COUNT, height, width, dtype=dtype, device=image.device))
        first = 0
        for part in found:  # one at a time: none outlives its copy
            result[:, first : first + part.shape[1]] = part
            first += part.shape[1]
    return result if image.ndim == 4 else result[0]


def _differentiable(
    make: Callable[..., torch.Tensor],
    image: torch.Tensor,
    fixation: torch.Tensor,
    previous: torch.Tensor | None,
    semantic: torch.Tensor | None,
    dtype: torch.dtype,
    video: bool,
) -> torch.Tensor:
    """`make(image, fixation, previous, semantic)`, differentiable in each of them."""
    given = (image, fixation, previous, semantic)
    there = [place for place, one in enumerate(given) if one is not None]

    def all_of(tensors: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        named = dict(zip(there, tensors, strict=True))
        return named[0], named[1], named.get(2), named.get(3)

    def pullback(
        wanted: Sequence[bool], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        found = pull(gradients[0], all_of(inputs), video, [bool(want) for want in all_of(wanted)])
        return [found[place] for place in there]

    def graph(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [_made(*all_of(tensors), dtype, video)]

    tensors = [one for one in given if one is not None]
    (result,) = pulled(
        lambda *tensors: [make(*all_of(tensors))],
        pullback,
        *tensors,
        graph=graph,
        like=lambda: [_like(image, dtype=dtype)],
    )
    return result
