"""Patches at sites: the tokens that a vision encoder embeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from gpu_lod import checks, dispatch, operators, patch_windows, recording, sources
from gpu_lod.adjoints import Adjoint, linear, of_samples, wide
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context, context_for
from gpu_lod.conversion import conversion
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.errors import InputError
from gpu_lod.halving import stored
from gpu_lod.kernels import samplers
from gpu_lod.mipmap import mipmap, sampled
from gpu_lod.program import MAX_GROUPS
from gpu_lod.pyramid import Pyramid, level_sizes
from gpu_lod.sources import Source
from gpu_lod.transfer import ALIGNMENT, Planes, bind_table, chunks, make_words, new_planes, word_defines

_BORDERS = ("clamp", "zero")

ROUNDING = 2.0**-22
"""Of a side: as far off may fp32 positions be that a few operations made. A centre no further from a whole or half
pixel is taken to be there, so that patches of the grid are exactly its pixels."""

_AT_ONCE = 2**20
"""Texels whose levels plain torch makes together: patches read a part of them alone, so that fresh memory for more is
what a batch would pay for."""

_VALUES = 2**18
"""Of patches that plain torch makes together on a CPU."""

LANES_AT_ONCE = 128
"""Invocations of a workgroup, if patches are smaller; half as many on a software renderer, whose threads then end
closer together."""
_VECTOR = 8
"""Invocations that a software renderer makes at once."""

_MOST_BIAS = 32.0
"""More is far beyond any image."""

LARGEST_PATCH = 1024
"""From this side on a row is more than a workgroup may have invocations."""


@operators.verb
def gather_patches(
    src: torch.Tensor | Pyramid,
    sites: Any,
    patch: int = 14,
    border: Literal["clamp", "zero"] = "clamp",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    bias: float = 0.0,
) -> torch.Tensor:
    """Read a patch of samples round each site, at the site's own level: what a ViT's patch embedding takes.

    Shape: src is an image [B, C, H, W] or [C, H, W], or a mean `Pyramid` of one; sites are [B, K, 3], or [K, 3] for all
        images alike; the result is [B, K, C, P, P], or [K, C, P, P] for an unbatched src.
    Units: a site is (x, y, level), x and y in [0, 1] of width and height, y down; level 0 is full resolution, each 1
        more halves the sampling rate, and levels between are blended.
    Convention: sample u of 0..P-1 lies (u - (P - 1) / 2) 2^level pixels from the centre along each side, and is read at
        that level of the mean mip chain, trilinear, texel i's centre at (i + 0.5) / n; above the last level the last is
        read. A centre within fp32's rounding, 2^-22 of a side, of a whole or half pixel is there, so that patches on
        the pixel grid are exactly its pixels; a sample is as far off as that is of the difference of neighbours. uint8
        values are divided by 255 where the result is floating point. Levels above 0 of a uint8 src are uint8 too, each
        rounded once: a sample there is up to half a step of 255 off that of src.float() / 255, which is four times the
        memory. Take that where coarse values have to be exact.
        OpenGL makes a whole batch of a pyramid in one dispatch, or in as few as storage bindings make ranges of the
        result (128 MiB each on llvmpipe); an image's chain takes more.

    Args:
        patch: P, samples along a side; 14 and 16 are common, any is possible.
        border: a sample outside the image takes the nearest edge ("clamp") or is 0 ("zero", 0 in the result, whatever
            mean and std).
        mean, std: a number a channel; the result is (value - mean) / std. Image processors of encoders hold them.
        dtype: of the result, float16, bfloat16 or float32; None is src's (float32 for uint8 with mean or std).
        backend: "gl", "cuda" (without OpenGL, CUDA tensors only: by texture units where src is a texture, else from
            memory), "torch" or "auto", by what measures fastest, on a CPU of pyramids that are a texture already
            (`Pyramid.upload`) and, at sites of fractional level, of images, else torch. All give gradients in src,
            "torch" also in the sites; where samples are texels, those of one side. "cuda" does not check the values of
            sites that are a CUDA tensor.
        bias: LOD bias: a site of level l has its samples 2^l pixels apart as before, read at level l + bias of the
            chain, not below 0. Where levels are fractional trilinear samples are blurred: -0.5 keeps more of what a
            patch can hold, and some of what it cannot, as moire. Patches of whole levels on their grid are what they
            were, but for rounding, down to -1, for a texel is the mean of four.

    Raises:
        InputError: bad shapes, dtypes or counts; a bias that is not finite; sites that are not finite, outside the
            image or of negative level, or of which gradients of uint8 are asked; a pyramid that is no mean one.
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device allows.
        PyramidChangedError: a level was written to since the pyramid was built.
        CaptureError: by OpenGL inside a CUDA-graph capture; by CUDA there, if the verb was not called before, or the
            sites are on the host.

    Source: patches as in Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021); level of detail as in Williams,
        "Pyramidal Parametrics" (1983).
    """
    src = src if isinstance(src, Pyramid) else checks.tensor(src, "src")
    image = _image(src, backend)
    look = _look(image, patch, border, mean, std, dtype, bias)
    points = checks.sites(sites, image)
    chosen = _choose_for(src, points, look, backend)
    checks.no_counts(points, look.dtype, "sites", way_out="dtype=torch.float32")
    checks.no_vmap(
        points,
        "gather_patches",
        "how much it reads depends on the sites. Pass [B, K, 3] and image.expand(B, -1, -1, -1).",
    )
    cuda = chosen.backend == "cuda"
    levels = None
    if not cuda or checks.on_host(points):
        highest = max(checks.highest_level(points) + look.bias, 0.0)
        if not isinstance(src, Pyramid):
            recording.decides("the sites' values decide how many levels it makes", points)
            # No more of the chain than the sites read.
            read = math.floor(highest) + 1 if _graph(points) else math.ceil(highest)
            levels = min(read + 1, len(level_sizes(*image.shape[-2:])))
    if chosen.backend == "torch":
        most = _AT_ONCE
        if image.dtype.itemsize < 4:  # fp32 of them would be several times the picture; an image a thread at least
            most = max(most // 4, image.shape[-2] * image.shape[-1] * torch.get_num_threads())
        return sampled(src, levels, points, lambda levels, points: reference(levels, points, look), most)
    if backend == "auto" and chosen.backend == "cuda" and not isinstance(src, Pyramid):
        src = mipmap(src, levels)  # by whatever makes chains fastest, which need not be what samples them
    samples, result_bytes = _amounts(image, points, look)
    source = sources.source(src, levels, samples=samples, result_bytes=result_bytes, backend=chosen.backend)
    points = dispatch.kept(points, source.levels)
    if isinstance(source, Pyramid) and cuda:
        scale = look.scale or (1.0,) * source.channels
        offset = look.offset if look.scale else (0.0,) * source.channels
        how = points, look.patch, scale, offset, look.dtype
        sample = partial(samplers.patches, source.cuda_source(), *how, border_zero=look.zero, bias=look.bias)
    else:
        sample = partial(_gl, source.texture_context() or context_for(*source.levels), source, points, look)
    return sources.run(source, sample, _adjoint_of(source.levels[0], len(source), points, look))


def _choose(
    src: torch.Tensor | Pyramid,
    sites: Any,
    patch: int = 14,
    border: str = "clamp",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    bias: float = 0.0,
) -> Choice:
    src = src if isinstance(src, Pyramid) else checks.tensor(src, "src")
    image = _image(src, backend)
    look = _look(image, patch, border, mean, std, dtype, bias)
    return _choose_for(src, checks.sites(sites, image), look, backend)


def _image(src: torch.Tensor | Pyramid, backend: Backend) -> torch.Tensor:
    dispatch.check_backend(backend, cuda=True)
    image = checks.mean_source(src, "gather_patches", max_channels=None)
    if backend in ("gl", "cuda"):
        if image.shape[-3] > 4:
            raise InputError(
                f"src has {image.shape[-3]} channels; textures hold 1 to 4. Use backend='torch', which takes any "
                "number."
            )
        (checks.gl_input if backend == "gl" else checks.cuda_input)(image)
    return image


def _choose_for(src: torch.Tensor | Pyramid, sites: torch.Tensor, look: Look, backend: Backend) -> Choice:
    image = src.levels[0] if isinstance(src, Pyramid) else src
    if backend == "gl":
        checks.gl_place(sites, "sites")
    if backend == "cuda":
        checks.cuda_place(sites, "sites")
    if backend != "auto":
        return Choice(backend, "asked for")
    chosen = dispatch.sampler(src, sites, "sites")
    if chosen is not None:
        return chosen
    if image.shape[-3] > 4:
        return Choice("torch", f"textures and kernels hold 1 to 4 channels, and there are {image.shape[-3]}")
    whole = checks.on_host(sites) and _whole_levels(sites, look.bias)  # a GPU would be waited for
    if whole and not isinstance(src, Pyramid) and not dispatch.by_kernels(image):
        return Choice("torch", "patches of whole levels are mostly slices, which torch copies fast")
    question = sources.asked(src, *_amounts(image, sites, look), WHOLE if whole else "")
    return dispatch.measured("gather_patches", image, **question)


def _amounts(image: torch.Tensor, sites: torch.Tensor, look: Look) -> tuple[int, int]:
    """Samples of all patches, and their bytes."""
    samples = (image.shape[0] if image.ndim == 4 else 1) * sites.shape[-2] * look.patch**2
    return samples, samples * image.shape[-3] * look.dtype.itemsize


WHOLE = "whole levels"
"""State of sites whose patches are mostly slices, which torch copies fast."""


def _whole_levels(sites: torch.Tensor, bias: float) -> bool:
    level = sites[..., 2].detach()
    if bias:
        return not level.any()
    return not level.frac().any()  # `floor` would wake torch's other threads, which take a software renderer's


def _like(
    src: torch.Tensor | Pyramid,
    sites: torch.Tensor,
    patch: int = 14,
    border: str = "clamp",
    mean: Any = None,
    std: Any = None,
    dtype: torch.dtype | None = None,
    *_: Any,
) -> torch.Tensor:
    """What `gather_patches` returns, without values."""
    image = src.levels[0] if isinstance(src, Pyramid) else src
    if dtype is None:
        dtype = torch.float32 if image.dtype == torch.uint8 and (mean or std) else image.dtype
    return image.new_empty(*image.shape[:-3], sites.shape[-2], image.shape[-3], patch, patch, dtype=dtype)


dispatch.register(gather_patches, _choose, cuda=True)
operators.register(gather_patches, _like)


@dataclass(frozen=True)
class Look:
    """What the patches look like: everything that depends neither on the picture nor on the sites."""

    patch: int
    zero: bool
    scale: tuple[float, ...] | None
    """By channel: a result is value * scale + offset; None leaves values as they are."""
    offset: tuple[float, ...]
    dtype: torch.dtype
    bias: float = 0.0


def _look(
    image: torch.Tensor,
    patch: int,
    border: str,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    dtype: torch.dtype | None,
    bias: float,
) -> Look:
    patch = checks.integer(patch, "patch", at_least=1, at_most=2**14)
    checks.choice(border, "border", _BORDERS)
    values = conversion(image, mean, std, dtype)
    bias = min(max(checks.number(bias, "bias"), -_MOST_BIAS), _MOST_BIAS)
    return Look(patch, border == "zero", values.scale, values.offset, values.dtype, bias)


def _graph(sites: torch.Tensor) -> bool:
    """Whether patches are to have gradients in the sites."""
    return needs_grad(sites) or checks.transformed(sites)


def centres_of(sites: torch.Tensor, size: tuple[int, int], work: torch.dtype) -> torch.Tensor:
    """[..., 2] in pixels of sites [..., 3], as patches are read; gradients pass as if none were moved."""
    height, width = size
    sides = torch.tensor([width, height], dtype=work, device=sites.device)
    at = sites[..., :2].to(work) * sides
    met = on_pixels(at.detach(), sides)
    return at + (met - at).detach() if needs_grad(at) else met


def on_pixels(at: torch.Tensor, sides: torch.Tensor) -> torch.Tensor:
    """Places [..., 2] in pixels of an image of `sides` [2], put right where rounding kept them from (half) pixels."""
    near = (at * 2).round_().div_(2)
    return torch.where((at - near).abs_() <= sides * ROUNDING, near, at)


def reference(levels: list[torch.Tensor], sites: torch.Tensor, look: Look) -> torch.Tensor:
    """The same in plain torch, in the fastest way found.

    Args:
        levels: a mean chain, [B, C, h, w] or [C, h, w] each; float64 too.
        sites: [B, K, 3], or [1, K, 3] for all images.

    Differentiable in the levels and the sites.
    """
    if not needs_grad(*levels) or _graph(sites):
        return _made(levels, sites, look)
    adjoint = _adjoint_of(levels[0], len(levels), sites.detach().clone(), look)
    top = levels[0]
    shape = (*top.shape[:-3], sites.shape[-2], top.shape[-3], look.patch, look.patch)
    (result,) = linear(
        lambda *levels: [_made(levels, sites, look)],
        adjoint,
        *levels,
        like=lambda: [top.new_empty(shape, dtype=look.dtype)],
    )
    return result


def _adjoint_of(image: torch.Tensor, levels: int, sites: torch.Tensor, look: Look) -> Adjoint:
    """
    Args:
        sites: that stay as they are.
    """
    sizes = level_sizes(image.shape[-2], image.shape[-1], levels)
    return of_samples(
        lambda gradient: _adjoint(gradient, sizes, sites, look),
        lambda levels: _made(levels, sites, look),
        image,
        levels,
    )


def _adjoint(
    gradient: torch.Tensor, sizes: Sequence[tuple[int, int]], sites: torch.Tensor, look: Look
) -> list[torch.Tensor | None]:
    """The gradients in the levels from that in patches [B, K, C, P, P]."""
    batch, _, channels = gradient.shape[:3]
    values = gradient.flatten(0, 1)
    every = _sites_of(sizes, sites.to(gradient.device), batch, look)
    given = patch_windows.Given([(batch, channels, *size) for size in sizes], look.patch, look.bias)
    parts: Iterable[torch.Tensor | None] = [None]
    if checks.on_host(gradient) and values.numel() > 2 * _VALUES:
        parts = _parts(every, channels, look.patch, 2 * _VALUES)
    for part in parts:
        some = every if part is None else every.of(part)
        own = wide(values if part is None else values[part])
        assert own is not None
        if look.zero:
            own = own.masked_fill(~_inside(some, sizes[0], look.patch), 0.0)
        if look.scale is not None:
            own = own * own.new_tensor(look.scale)[:, None, None]
        given.add(own, some)
    return given.found()


def _sites_of(sizes: Sequence[tuple[int, int]], sites: torch.Tensor, batch: int, look: Look) -> patch_windows.Sites:
    """Those of all images in a row, and what they read of levels of such (height, width)."""
    points = sites.expand(batch, -1, -1).flatten(0, 1)
    image = torch.arange(batch, device=sites.device).repeat_interleave(sites.shape[1])
    centres = centres_of(points, sizes[0], torch.float64)
    level = points[:, 2].double().clamp(max=30)  # far beyond any image
    shapes = [(width, height) for height, width in sizes]
    return patch_windows.sites_of(shapes, image, centres, level, look.patch, look.bias)


def _parts(sites: patch_windows.Sites, channels: int, patch: int, values: int) -> Iterator[torch.Tensor]:
    """Some that read alike, and whose patches are no more values."""
    most = max(values // (channels * patch**2), 1)
    alike = sites.reads.argsort(stable=True).split(sites.reads.unique(return_counts=True)[1].tolist())
    return itertools.chain.from_iterable(some.split(most) for some in alike)


def _made(levels: Sequence[torch.Tensor], sites: torch.Tensor, look: Look) -> torch.Tensor:
    """By a graph of torch's own where gradients are asked for."""
    chain = [level if level.ndim == 4 else level[None] for level in levels]
    top, patch, graph = chain[0], look.patch, _graph(sites)
    batch, channels, height, width = top.shape
    work = top.dtype if top.dtype in (torch.float32, torch.float64) else torch.float32
    sizes = [(level.shape[2], level.shape[3]) for level in chain]
    every = _sites_of(sizes, sites.to(top.device), batch, look)
    values_of = None
    if look.scale is not None:
        values_of = torch.tensor([look.scale, look.offset], dtype=work, device=top.device)[..., None, None]

    def read(some: patch_windows.Sites) -> torch.Tensor:
        values = patch_windows.read(chain, some, patch, work=work, graph=graph, bias=look.bias)
        if values_of is not None:
            values = torch.addcmul(values_of[1], values.to(work), values_of[0])
        if look.zero:
            values = values.masked_fill(~_inside(some, (height, width), patch), 0.0)  # infinities, too
        return values if values.dtype == look.dtype else stored(values, look.dtype)

    # On a CPU some sites at a time: of all of them what is made on the way would be several results in fp32.
    many = len(every.reads) > max(_VALUES // (channels * patch**2), 1)
    free = top.device.type == "cpu" and not (graph or needs_grad(*levels) or any(map(checks.transformed, levels)))
    as_they_are = not look.zero and values_of is None and look.dtype == top.dtype
    if free and many and not (as_they_are and every.are_slices()):
        result = top.new_empty((len(every.reads), channels, patch, patch), dtype=look.dtype)
        for part in _parts(every, channels, patch, _VALUES):
            result.index_copy_(0, part, read(every.of(part)))
    else:
        result = read(every)
    return result.unflatten(0, (batch, -1)) if levels[0].ndim == 4 else result


def _inside(sites: patch_windows.Sites, size: tuple[int, int], patch: int) -> torch.Tensor:
    """Whether samples are in the picture, [N, 1, P, P]."""
    steps = torch.arange(patch, dtype=torch.float64, device=sites.level.device) - (patch - 1) / 2
    places = (sites.centres[..., None] + torch.exp2(sites.level)[:, None, None] * steps).detach()
    x, y = ((places >= 0) & (places <= places.new_tensor([[size[1]], [size[0]]]))).unbind(1)
    return (x[:, None, :] & y[:, :, None])[:, None]


def _gl(ctx: Context, pyramid: Source, sites: torch.Tensor, look: Look) -> torch.Tensor:
    height, width = pyramid.size
    channels, batch, patch = pyramid.channels, pyramid.batch, look.patch
    budget = sites.shape[1]
    counts = pyramid.dtype == torch.uint8  # textures hold them as fractions
    unit = 255.0 if counts else 1.0
    scale = (unit,) * channels if look.scale is None else tuple(unit * s for s in look.scale)
    offset = look.offset if look.scale is not None else (0.0,) * channels
    uniforms: dict[str, Any] = {
        "u_size": (float(width), float(height)),
        "u_last": float(len(pyramid) - 1),
        "u_scale": (*scale, *(0.0,) * (4 - channels)),
        "u_offset": (*offset, *(0.0,) * (4 - channels)),
        "u_budget": budget,
        "u_bias": look.bias,
    }
    defines = {"CHANNELS": channels, "PATCH": patch, "BORDER_ZERO": look.zero, "SHARPER": look.bias < 0}
    with ctx.active(pyramid.device):
        target, result = new_planes(ctx, (batch, budget, channels, patch, patch), look.dtype)
        textures = pyramid.textures(ctx)
        table = ctx.private.lease(batch * budget * 12).write(sites.float().expand(batch, -1, -1))
        bind_table(ctx, 1, table)
        for first, texture in textures:
            texture.bind(ctx.gl)
            count = texture.key.layers
            part = target.layers(first * budget * channels, count * budget * channels)
            here = uniforms | {"u_first_site": first * budget} | texture.reading
            reading = ctx.textures.reading(texture)
            # With smaller texels there are fewer lines, and what it costs is more than the waiting.
            touch = ctx.software and reading.get("BUFFERED") and texture.key.texel_bytes >= 16
            _make(ctx, part, channels, here, defines | reading | {"TOUCH": touch})
        ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
    return result if pyramid.batched else result[0]


def _make(ctx: Context, target: Planes, channels: int, uniforms: dict[str, Any], defines: dict[str, Any]) -> None:
    """The patches of one texture."""
    patch = target.width
    per_patch = channels * target.area
    patches = target.count // channels
    at_once = (ctx.limits.storage_bytes - 2 * ALIGNMENT) // (per_patch * target.dtype.itemsize)
    if target.area % target.per_word or at_once < 1 or patch > LARGEST_PATCH:
        for chunk in chunks(ctx, target):
            first = {"u_first_plane": chunk.plane}
            make_words(ctx, "patches_words.comp", target, chunk, uniforms=uniforms | first, defines=defines)
        return
    stored = 4 if ctx.software and target.area % 4 == 0 else target.per_word
    rows = 1 if patch % stored == 0 else 2
    steps = patch // rows
    lanes = patch * rows // stored
    together = max(1, LANES_AT_ONCE // (2 if ctx.software else 1) // lanes)
    together -= together % (_VECTOR // math.gcd(lanes, _VECTOR)) if together >= _VECTOR else 0  # whole vectors
    # On a GPU every row has invocations of its own.
    steps_at_once = steps if ctx.software else 1
    shape = {"ROWS": rows, "PATCHES": together, "INVOCATIONS": lanes * together, "STEPS_AT_ONCE": steps_at_once}
    program = ctx.programs.compute("patches.comp", AT_ONCE=stored, **word_defines(target.dtype), **shape, **defines)
    for begin in range(0, patches, at_once):
        count = min(at_once, patches - begin)
        index = target.bind(ctx, 0, begin * per_patch, (begin + count) * per_patch - 1)
        program.set(
            u_first_stored=(index + begin * per_patch) // stored,
            u_first_patch=begin,
            u_patches=count,
            u_steps=steps,
            u_nothing=0,
            **uniforms,
        )
        groups = -(-count // together)
        layers = -(-groups // MAX_GROUPS)
        program.dispatch_groups(-(-groups // layers), -(-steps // steps_at_once), layers)
