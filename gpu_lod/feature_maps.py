"""Feature maps: forty things that can be said of each pixel, for relevance scorers to weigh."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, overload

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.binomial import expand, mirrored
from gpu_lod.context import context_for
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.enlarging import enlarged
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.feature_passes import FeatureTexture, make, make_texture
from gpu_lod.gaussian import reference as gaussian_chain
from gpu_lod.pages import large
from gpu_lod.planewise import bands
from gpu_lod.pyramid import burt_sizes
from gpu_lod.quadrature import energy

CHANNELS = MappingProxyType(
    {
        "rgb": slice(0, 3),
        "position": slice(3, 5),
        "saliency": slice(5, 6),
        "gradient": slice(6, 9),
        "luma": slice(9, 10),
        "motion": slice(10, 11),
        "eccentricity": slice(11, 12),
        "high_pass": slice(12, 13),
        "orientation": slice(13, 17),
        "semantic": slice(17, 33),
        "band_energy": slice(33, 37),
        "variance": slice(37, 38),
        "opponency": slice(38, 40),
    }
)
"""Where each feature is: name to channels."""
COUNT = 40
SEMANTIC = 16
DTYPES = (torch.float16, torch.float32)

LUMA = (0.299, 0.587, 0.114)
PAIRS = ((1, 3), (2, 4), (3, 5))
"""Centre and surround of the saliency, levels of the Gaussian pyramid."""
BANDS = 4
AT_ONCE = 2**20
"""Pixels whose saliency is worked on at a time, on a CPU."""
LEVELS = 6
"""Of the Gaussian pyramid: to the coarsest surround, and one below the last band."""


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

    def named(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        rest = iter(tensors[1:])
        return tensors[0], None if previous is None else next(rest), None if semantic is None else next(rest)

    def shaders(*tensors: torch.Tensor) -> tuple[torch.Tensor]:
        x, before, features = named(tensors)
        return (make(ctx, x, points, before, features, dtype, video),)

    def plain(*tensors: torch.Tensor) -> tuple[torch.Tensor]:
        x, before, features = named(tensors)
        return (reference(x, points, before, features, dtype, video),)

    (result,) = dispatch.with_reference_gradient(shaders, plain, *inputs)
    return result


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
    semantic = checks.image(value, "semantic", max_channels=None)
    batch = image.shape[0] if image.ndim == 4 else 1
    count = semantic.shape[0] if semantic.ndim == 4 else 1
    if not semantic.is_floating_point():
        raise InputError(f"semantic is {semantic.dtype}; features are floats: convert them with .float().")
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
    batched = image if image.ndim == 4 else image[None]
    dtype = torch.float64 if image.dtype == torch.float64 else dtype
    found = _channels(batched, fixation, previous, semantic, video)
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


def luma_of(image: torch.Tensor) -> torch.Tensor:
    """Channel 9 of [B, C, H, W]: [B, 1, H, W], fp32. On a CPU in bands of rows: of bytes, whole colours would be four
    times the picture."""
    if not checks.on_host(image) or needs_grad(image) or checks.transformed(image):
        return _luma(_unit(image, torch.float32))
    count, _, height, width = image.shape
    result = image.new_empty((count, 1, height, width), dtype=torch.float32)
    for some, rows in bands(count, height, width):
        result[some, :, rows] = _luma(_unit(image[some, :, rows], torch.float32))
    return result


def luma_weights(image: torch.Tensor) -> tuple[float, ...]:
    """Of the first channels of [B, C, H, W], as they are stored, in that."""
    unit = 1 / 255 if image.dtype == torch.uint8 else 1.0
    return tuple(unit * weight for weight in (LUMA if image.shape[1] > 2 else (1.0,)))


def _unit(x: torch.Tensor, work: torch.dtype) -> list[torch.Tensor]:
    """Red, green and blue [B, 1, H, W] in [0, 1]; three times the same if it is grey."""
    colours = x[:, : 1 if x.shape[1] <= 2 else 3].to(work)
    colours = colours / 255 if x.dtype == torch.uint8 else colours
    return list(colours.split(1, dim=1)) * (1 if colours.shape[1] == 3 else 3)


def _luma(colours: list[torch.Tensor]) -> torch.Tensor:
    if colours[0] is colours[1]:
        return colours[0]
    result = colours[0] * LUMA[0]
    for colour, weight in zip(colours[1:], LUMA[1:], strict=True):
        result = torch.add(result, colour, alpha=weight)
    return result


def _channels(
    image: torch.Tensor,
    fixation: torch.Tensor,
    previous: torch.Tensor | None,
    semantic: torch.Tensor | None,
    video: bool,
) -> Iterator[torch.Tensor]:
    """All channels in order, in parts [B or 1, k, H or 1, W or 1]."""
    work = image.dtype if image.dtype in (torch.float32, torch.float64) else torch.float32
    height, width = image.shape[-2:]
    colours = _unit(image, work)
    red, green, blue = colours
    luma = _luma(colours)
    yield from colours
    x = (torch.arange(width, dtype=work, device=image.device) + 0.5) / width
    y = (torch.arange(height, dtype=work, device=image.device) + 0.5) / height
    yield x.expand(1, 1, height, width)
    yield y[:, None].expand(1, 1, height, width)
    levels = gaussian_chain(luma, min(LEVELS, len(burt_sizes(height, width))))
    yield _centre_surround(levels, height, width)
    padded = mirrored(luma, 2, 2)
    yield from _gradient(padded)
    yield luma
    yield _motion(luma, previous, video, work)
    points = fixation.to(image.device, work)
    longer = max(height, width)
    dx = (x - points[:, :1]) * (width / longer)
    dy = (y - points[:, 1:]) * (height / longer)
    yield _length(dx[:, None, None, :], dy[:, None, :, None])
    yield (luma - expand(levels[1], height, width)).abs() if len(levels) > 1 else torch.zeros_like(luma[:1])
    yield energy(luma[:, 0], 4)
    if semantic is None:
        yield luma.new_zeros(1, 1, 1, 1).expand(1, SEMANTIC, height, width)
    else:
        yield (semantic if semantic.ndim == 4 else semantic[None]).to(work)
    squares = [(fine - expand(coarse, *fine.shape[-2:])).square() for fine, coarse in pairwise(levels[1:])]
    for level in range(1, 1 + BANDS):
        yield _read(squares[level - 1], level, height, width) if level <= len(squares) else torch.zeros_like(luma[:1])
    yield _variance(padded)
    yield red - green
    yield torch.sub(blue, red + green, alpha=0.5)


def saliency_map(image: torch.Tensor) -> torch.Tensor:
    """Channel 5 alone, [B, H, W] of images [B, C, H, W], in plain torch: an eighth of the work of all channels."""
    height, width = image.shape[-2:]
    at_once = max(1, AT_ONCE // (height * width))
    if image.device.type == "cpu" and image.shape[0] > at_once:
        # Fresh memory for the temporaries of a whole batch costs a CPU three times the work.
        return torch.cat([saliency_map(part) for part in image.split(at_once)])
    work = image.dtype if image.dtype in (torch.float32, torch.float64) else torch.float32
    levels = gaussian_chain(_luma(_unit(image, work)), min(LEVELS, len(burt_sizes(height, width))))
    return _centre_surround(levels, height, width)[:, 0]


def _centre_surround(levels: list[torch.Tensor], height: int, width: int) -> torch.Tensor:
    """The mean of |G_c - G_s| at every pixel, [B, 1, H, W].

    Samples of a level are among those of every finer one, so that the surround is read at the centre's samples first,
    and only the difference of both at the pixels.
    """
    parts = [_read(difference(levels, *pair), pair[0], height, width) for pair in PAIRS]
    if needs_grad(*parts) or any(map(checks.transformed, parts)):
        return (parts[0].abs() + parts[1].abs() + parts[2].abs()) / len(parts)
    total = parts[0].abs_()  # in place: fresh megabytes cost more than the sums
    for part in parts[1:]:
        total.add_(part.abs_())
    return total.div_(len(parts))


def difference(levels: list[torch.Tensor], centre: int, surround: int) -> torch.Tensor:
    """G_c - G_s at the samples of G_c, of the levels of a Gaussian pyramid; the last stands for those beyond it."""
    last = len(levels) - 1
    fine, coarse = levels[min(centre, last)], levels[min(surround, last)]
    return fine - _read(coarse, surround - centre, *fine.shape[-2:])


def _read(samples: torch.Tensor, level: int, height: int, width: int) -> torch.Tensor:
    """Samples that stand 2^level pixels apart, read at every pixel bilinearly; beyond the last the last is read."""
    return enlarged(samples, 1 << level, (0, height, 0, width), centred=False)


def _gradient(padded: torch.Tensor) -> Iterator[torch.Tensor]:
    """gx, gy and their length, of a luma with two mirrored pixels about it."""
    inner = padded[..., 1:-1, 1:-1]

    def window(x: torch.Tensor, dim: int, first: int) -> torch.Tensor:
        return x.narrow(dim, first, x.shape[dim] - 2)

    def smoothed(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.add(window(x, dim, 0) + window(x, dim, 2), window(x, dim, 1), alpha=2)

    gx = smoothed((window(inner, -1, 2) - window(inner, -1, 0)) * 0.125, -2)
    gy = smoothed((window(inner, -2, 2) - window(inner, -2, 0)) * 0.125, -1)
    yield gx
    yield gy
    yield _length(gx, gy)


def _length(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """sqrt(x^2 + y^2), whose gradient at 0 is 0."""
    squared = x * x + y * y
    if not (needs_grad(squared) or checks.transformed(squared)):
        return squared.sqrt()
    safe = torch.where(squared > 0, squared, torch.ones_like(squared))
    return torch.where(squared > 0, safe.sqrt(), torch.zeros_like(squared))


def _motion(luma: torch.Tensor, previous: torch.Tensor | None, video: bool, work: torch.dtype) -> torch.Tensor:
    before = None
    if previous is not None:
        before = _luma(_unit(previous if previous.ndim == 4 else previous[None], work))
    if not video:
        return torch.zeros_like(luma[:1]) if before is None else luma - before
    first = torch.zeros_like(luma[:1]) if before is None else luma[:1] - before
    return torch.cat([first, luma[1:] - luma[:-1]])


_CACHED = 2**15
"""Pixels whose variances are made at a time."""


def _variance(padded: torch.Tensor) -> torch.Tensor:
    """Over 5 x 5, of a luma with two mirrored pixels about it. In float64, where the mean square less the squared mean
    loses nothing that fp32 could show: on a CPU some rows at a time, which stay in its cache."""
    batch, _, height, width = padded.shape
    height, width = height - 4, width - 4
    if padded.device.type != "cpu" or height * width <= _CACHED or needs_grad(padded) or checks.transformed(padded):
        return _variances(padded)
    result = padded.new_empty(batch, 1, height, width)
    for images, rows in bands(batch, height, width, _CACHED):
        result[images, :, rows] = _variances(padded[images, :, rows.start : rows.stop + 4])
    return result


def _variances(padded: torch.Tensor) -> torch.Tensor:
    def five(x: torch.Tensor, dim: int) -> torch.Tensor:
        count = x.shape[dim] - 4
        pairs = x.narrow(dim, 0, count + 3) + x.narrow(dim, 1, count + 3)
        return pairs.narrow(dim, 0, count) + pairs.narrow(dim, 2, count) + x.narrow(dim, 4, count)

    wide = padded.double()
    mean = five(five(wide, -2), -1) * (1 / 25)
    square = five(five(wide * wide, -2), -1) * (1 / 25)
    return (square - mean * mean).clamp(min=0).to(padded.dtype)
