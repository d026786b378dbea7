"""Foveation: a picture as sharp as the eye would see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu_lod import checks, dispatch, operators, planewise, recording, sources
from gpu_lod.adjoints import Adjoint, linear, of_samples
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.foveate_adjoint import of_foveation
from gpu_lod.foveate_blocks import blocks, highest, ranges_of
from gpu_lod.foveate_tiles import Tile, probed, trilinear
from gpu_lod.halving import stored
from gpu_lod.kernels import samplers
from gpu_lod.memory_chain import MemoryChain
from gpu_lod.mipmap import mipmap, sampled
from gpu_lod.pyramid import Pyramid, level_sizes
from gpu_lod.sources import Source
from gpu_lod.texture import Readable
from gpu_lod.transfer import Planes, bind_table, chunks, make_words
from gpu_lod.whole_rows import new_rows

ANISOTROPY_EXTENSIONS = {"GL_EXT_texture_filter_anisotropic", "GL_ARB_texture_filter_anisotropic"}


@operators.verb
def foveate(
    src: torch.Tensor | Pyramid,
    fixation: Any,
    e0: float = 0.05,
    bias: float = 0.0,
    anisotropy: float = 1.0,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Blur a picture as eccentricity grows: sharp at the fixation, an octave less for each doubling of e + e0.

    Shape: src is an image [B, C, H, W] or [C, H, W], C 1 to 4, or a mean `Pyramid` of one; the result has the image's
        shape and dtype.
    Units: eccentricity e in units of the longer side; fixation (x, y) in [0, 1] of width and height, y down.
    Convention: each pixel is read at its own position at level max(0, log2((e + e0) / e0) + bias), trilinear over the
        mean mip chain, texel i's centre at (i + 0.5) / n, clamped to the edge; past the last level the last is read.
        With anisotropy a > 1 the footprint is 2^level pixels along the radius and 2^level / a across it, as crowding
        zones of the visual field are. torch, and GL on software renderers, take the mean of N = ceil(a) trilinear
        samples along the radius, as the extension describes it: sample i of 1..N lies 2^level (i / (N + 1) - 1/2)
        pixels out, and is read at level max(0, level - log2(N)). A pixel on the fixation has no radius: where its
        distance is a rounding error, backends may take any. Texture units, on GL and CUDA, filter in their own way,
        and so differ where there is detail. There gradients are those of the samples' mean: its exact adjoint, and so
        that of the forward only as nearly as the two agree. What reads a NaN is NaN. What has a weight of 0 may
        count as read: a texel beside the first ones of a level, and, but for torch on a CPU, a level beside another,
        where one NaN is in all coarse ones.

    Precision: places are fp32. In white noise of 1537 x 1021 results are within 1.5e-5 of the range of exact ones, and
        within 6e-5 with anisotropy, whose samples lie between pixels.

    Args:
        fixation: (x, y), a tensor [2] for the whole batch, or [B, 2].
        e0: eccentricity at which resolution has halved.
        bias: added to the level: more is blurrier.
        anisotropy: 1 to 16.
        backend: "gl", "cuda" (without OpenGL, CUDA tensors only: by texture units where src is a texture, and with
            anisotropy, else from memory), "torch" or "auto", which takes GL where that measures faster: seldom for
            small pictures that are no texture yet (`Pyramid.upload`), and with anisotropy on software renderers alone.
            All give gradients in src, "torch" also in the fixation. "cuda" does not check the values of a fixation that
            is a CUDA tensor.

    Raises:
        InputError: bad shapes, dtype, e0, bias, anisotropy; a fixation that is not finite or outside [0, 1], or of
            which gradients of uint8 are asked; a pyramid that is no mean one.
        UnsupportedError: a backend that is not available, or anisotropy on a GPU without
            GL_EXT_texture_filter_anisotropic or beyond what it has.
        LimitError: larger than the device allows.
        PyramidChangedError: a level was written to since the pyramid was built.
        CaptureError: by OpenGL inside a CUDA-graph capture; by CUDA there, if the verb was not called before, the
            fixation is on the host, or, with anisotropy, src is no texture yet (`Pyramid.upload`).

    Source: Perry and Geisler, "Gaze-contingent Real-time Simulation of Arbitrary Visual Fields" (2002); Toet and Levi
        (1992) for zones that are longer along the radius; EXT_texture_filter_anisotropic.
    """
    src = src if isinstance(src, Pyramid) else checks.tensor(src, "src")
    chosen = _choose(src, fixation, e0, bias, anisotropy, backend)
    built = isinstance(src, Pyramid)
    image = src.levels[0] if isinstance(src, Pyramid) else src
    cuda = chosen.backend == "cuda"
    points = checks.fixation(fixation, image.shape[0] if image.ndim == 4 else 1, wait=not cuda)
    checks.no_counts(points, image.dtype, "fixation")
    # Beyond these every pixel reads level 0, or the last.
    rule = (max(float(e0), 1e-18), min(max(float(bias), -1e4), 1e4), float(anisotropy))
    # All, where it would take waiting to know which are read, or another run may read others.
    levels = None
    if not isinstance(src, Pyramid) and recording.current() is None and (not cuda or checks.on_host(points)):
        levels = _levels(image, points, *rule[:2])
    if chosen.backend == "torch":
        return sampled(src, levels, points, lambda levels, points: reference(levels, points, *rule))
    if backend == "auto" and not isinstance(src, Pyramid) and (cuda or context_for(src).software):
        src = mipmap(src, levels)  # by whatever makes chains fastest, which need not be what samples them
    samples = image.numel() // image.shape[-3]
    source = sources.source(src, levels, samples=samples, result_bytes=image.nbytes, backend=chosen.backend)
    points = dispatch.kept(points, source.levels)
    if isinstance(source, Pyramid) and cuda:
        read = source.cuda_textures() if anisotropy > 1 else source.cuda_source()
        sample = partial(samplers.foveate, read, points, *rule)
    else:
        ctx = source.texture_context() or context_for(*source.levels)
        sample = partial(_gl, ctx, source, points, *rule, spare=built)
        if isinstance(source, MemoryChain) and _large_texels(ctx, source, anisotropy):
            sample = partial(_by_planes, ctx, source, points, *rule)
    return sources.run(source, sample, _adjoint_of(source.levels[0], len(source), points, *rule))


def _choose(
    src: torch.Tensor | Pyramid,
    fixation: Any,
    e0: float = 0.05,
    bias: float = 0.0,
    anisotropy: float = 1.0,
    backend: Backend = "auto",
) -> Choice:
    dispatch.check_backend(backend, cuda=True)
    image = checks.mean_source(src, "foveate")
    if checks.number(e0, "e0") <= 0:
        raise InputError(f"e0 is {e0}; expected a positive eccentricity.")
    checks.number(bias, "bias")
    if not 1 <= checks.number(anisotropy, "anisotropy") <= 16:
        raise InputError(f"anisotropy is {anisotropy}; expected 1 (none) to 16.")
    if backend == "gl":
        checks.gl_input(image)
        checks.gl_place(fixation)
    if backend == "cuda":
        checks.cuda_input(image)
        checks.cuda_place(fixation)
    if backend != "auto":
        return Choice(backend, "asked for")
    chosen = dispatch.sampler(src, fixation, "fixation", once=True)
    if chosen is not None:
        return chosen
    if anisotropy > 1 and image.device.type != "cpu":
        return Choice("torch", BY_UNIT)
    channels, height, width = image.shape[-3:]
    batch = image.shape[0] if image.ndim == 4 else 1
    there = isinstance(src, Pyramid) and src.is_texture
    words = width * image.dtype.itemsize % 4 == 0
    context = src.texture_context() if isinstance(src, Pyramid) else None
    chosen = dispatch.measured(
        "foveate",
        image,
        batch * height * width * math.ceil(anisotropy),
        state=state(texture=there, whole_words=words, anisotropic=anisotropy > 1),
        channels=channels,
        batch=batch,
        context=context,
        adjoint=True,
    )
    if anisotropy > 1 and chosen.backend == "gl" and not (context or context_for(image)).software:
        return Choice("torch", BY_UNIT)
    if not isinstance(src, Pyramid) and chosen.figures:
        return replace(chosen, reason=f"{chosen.reason}; beside the image's chain, which is made as mipmap(image) is")
    return chosen


BY_UNIT = "with anisotropy a GPU's texture units filter in their own way; ask for backend='gl' by name"


def state(*, texture: bool, whole_words: bool, anisotropic: bool = False) -> str:
    """What the times depend on beside sizes.

    Args:
        texture: the source is one already.
        whole_words: rows are whole words of the buffer; others take another shader.
        anisotropic: so do several samples a pixel, each of which counts as one.
    """
    found = ["anisotropic"] * anisotropic + [dispatch.NO_TEXTURE] * (not texture)
    return ", ".join(found + ["ragged rows"] * (not whole_words))


def _like(src: torch.Tensor | Pyramid, *_: Any) -> torch.Tensor:
    """What `foveate` returns, without values."""
    image = src.levels[0] if isinstance(src, Pyramid) else src
    return image.new_empty(image.shape)


dispatch.register(foveate, _choose, cuda=True)
operators.register(foveate, _like)


def _levels(image: torch.Tensor, points: torch.Tensor, e0: float, bias: float) -> int:
    """How many levels of the chain are read."""
    height, width = image.shape[-2:]
    last = len(level_sizes(height, width)) - 1
    places = checks.values(points).flatten(0, -2).tolist()  # of all, inside torch.func.vmap
    return max(highest((x, y), (height, width), e0, bias, last) for x, y in places) + 1


def reference(
    levels: list[torch.Tensor],
    fixation: torch.Tensor,
    e0: float,
    bias: float = 0.0,
    anisotropy: float = 1.0,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, in the fastest way found: a tile at a time, from the coarsest level it reads to the
    finest, each blended in over no more than the box of pixels that read it.

    Args:
        levels: a mean chain, [B, C, h, w] or [C, h, w] each; float64 too.
        fixation: [B, 2].
        kept: what `level_map` gave, for one image and a fixation that stays; worked out if None.

    Differentiable in the levels and the fixation.
    """
    rule = e0, bias, anisotropy
    if not needs_grad(*levels) or needs_grad(fixation) or checks.transformed(fixation):
        result = _made(levels, fixation, *rule, kept)
        if needs_grad(fixation) and not result.requires_grad and result.is_floating_point():
            result = result + 0 * fixation.sum().to(result)  # which it rests on, but nowhere changes with
        return result
    adjoint = _adjoint_of(levels[0], len(levels), fixation.detach().clone(), *rule)
    (result,) = linear(
        lambda *levels: (_made(levels, fixation, *rule, kept),),
        adjoint,
        *levels,
        like=lambda: [torch.empty_like(levels[0])],
    )
    return result


def _adjoint_of(
    image: torch.Tensor, levels: int, fixation: torch.Tensor, e0: float, bias: float, anisotropy: float
) -> Adjoint:
    """
    Args:
        fixation: that stays as it is.
    """
    rule = fixation, e0, bias, anisotropy
    size = image.shape[-2], image.shape[-1]
    return of_samples(
        lambda gradient: of_foveation(gradient, size, levels, *rule),
        lambda levels: _made(levels, *rule),
        image,
        levels,
    )


def _made(
    levels: Sequence[torch.Tensor],
    fixation: torch.Tensor,
    e0: float,
    bias: float,
    anisotropy: float,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """By a graph of torch's own where gradients are asked for."""
    chain = [level if level.ndim == 4 else level[None] for level in levels]
    top = chain[0]
    work = top.dtype if top.dtype in (torch.float32, torch.float64) else torch.float32
    points = fixation.to(top.device, work)
    size = height, width = top.shape[-2], top.shape[-1]
    in_place = not (needs_grad(points, *chain) or any(map(checks.transformed, (points, *chain))))
    texels = None
    if in_place and top.device.type == "cpu":
        texels = planewise.PART // 4
        if anisotropy > 1:  # the places of probes take several times what is made
            most = max(len(points) * height * width // 30, planewise.PART // (128 if top.dtype == work else 512))
            texels = min(planewise.PART // 16, most)
        elif top.dtype != work:  # in fp32 they are several times the picture
            texels = min(texels, max(height * width // 10, planewise.PART // 16))
    # Looked at where that is no waiting.
    seen = top.device.type == "cpu" and not (checks.traced() or any(map(checks.memoryless, chain)))
    seen = seen and not any(map(checks.transformed, (points, *chain)))
    places = [None] * len(points) if checks.transformed(points) else points.tolist()
    result = None
    if in_place and (len(points) > 1 or (texels or height * width) < height * width):
        result = torch.empty_like(top, memory_format=torch.contiguous_format)
    parts = []
    for image, point in enumerate(points):
        one = [level[image : image + 1] for level in chain]
        spoilt = seen and not bool(one[-1].detach().sum(dtype=work).isfinite())  # means hand it down
        whole = Tile(
            size, slice(0, height), slice(0, width), point, places[image], e0, bias, len(chain) - 1, in_place, spoilt
        )
        for tile in [whole] if texels is None else whole.cut(texels):
            rows, columns = tile.rows, tile.columns
            level = tile.level_map() if kept is None else kept[rows, columns]
            part = probed(one, tile, level, anisotropy) if anisotropy > 1 else trilinear(one, tile, level)
            if result is None:
                parts.append(part)
            else:
                result[image, :, rows, columns] = stored(part[0], top.dtype, in_place=True)
    if result is None:
        result = stored(torch.cat(parts) if len(parts) > 1 else parts[0], top.dtype)
    return result if levels[0].ndim == 4 else result[0]


def _large_texels(ctx: Context, chain: MemoryChain, anisotropy: float) -> bool:
    """Whether texture units filter texels twice the size of what they are made of, of more than one plane. A plan keeps
    what it made, and gains nothing."""
    large = chain.dtype == torch.bfloat16 and chain.batch * chain.channels > 1
    return large and anisotropy > 1 and not ctx.software and recording.current() is None


def _by_planes(
    ctx: Context, chain: MemoryChain, fixation: torch.Tensor, e0: float, bias: float, anisotropy: float
) -> torch.Tensor:
    """A third of an image's planes at a time, or less, each an image by itself: a texture of all of them would be more
    than memory allows. All parts are as many planes, for the next one takes the texture of the last."""
    image = chain.image.detach()
    planes = image.reshape(-1, 1, *chain.size)
    count = len(planes)
    at_once = count // next((parts for parts in range(3, count) if count % parts == 0), count)
    points = fixation.expand(chain.batch, 2).repeat_interleave(chain.channels, dim=0)
    parts = [
        _gl(ctx, MemoryChain(some, len(chain)), at, e0, bias, anisotropy, spare=False)
        for some, at in zip(planes.split(at_once), points.split(at_once), strict=True)
    ]
    return torch.cat(parts).view(image.shape)


def _gl(
    ctx: Context,
    pyramid: Source,
    fixation: torch.Tensor,
    e0: float,
    bias: float,
    anisotropy: float,
    *,
    spare: bool,
) -> torch.Tensor:
    """
    Args:
        spare: there is memory for a second result: of an image the texture takes all but one.
    """
    height, width = pyramid.size
    longer = max(height, width)
    channels, batch = pyramid.channels, pyramid.batch
    dtype = pyramid.dtype
    by_unit = anisotropy > 1 and not ctx.software
    if by_unit and not ANISOTROPY_EXTENSIONS & ctx.extensions:
        raise UnsupportedError(
            f"{ctx.renderer} has no GL_EXT_texture_filter_anisotropic. Use anisotropy=1, or backend='torch'."
        )
    uniforms: dict[str, Any] = {
        "u_pixel": (1 / width, 1 / height),
        "u_box": (width / longer / e0, height / longer / e0),
        "u_bias": bias,
    }
    defines = {"CHANNELS": channels, "TO_STORED": 255.0 if dtype == torch.uint8 else 1.0}
    textures: Sequence[tuple[int, Readable]] | None = None
    if by_unit and not isinstance(pyramid, Pyramid):
        with ctx.active(pyramid.device):  # by itself: the result is made in the memory that this gives back
            textures = pyramid.textures(ctx, filtered=True)
    with ctx.active(pyramid.device):
        target, result, done = new_rows(ctx, (batch, channels, height, width), dtype, longer=spare)
        textures = textures or pyramid.textures(ctx, filtered=by_unit)
        points = ctx.private.lease(batch * 8).write(fixation.float())
        bind_table(ctx, 1, points)
        for first, texture in textures:
            count = texture.key.layers
            part = target.layers(first * channels, count * channels)
            texture.bind(ctx.gl)
            here = uniforms | {"u_first_image": first} | texture.reading
            how = defines | ctx.textures.reading(texture)
            if by_unit:
                _by_unit(ctx, part, here | {"u_anisotropy": anisotropy}, how)
            elif anisotropy > 1:
                _pixels(ctx, part, here | {"u_anisotropy": anisotropy}, how | {"ANISOTROPIC": True, "PROBES": True})
            elif ctx.software and part.width % part.per_word == 0 and (ranges := list(ranges_of(ctx, part, channels))):
                recording.decides("a software renderer foveates in tiles that the fixation's values decide", fixation)
                size = height, width
                blocks(ctx, part, ranges, fixation[first : first + count], size, len(pyramid), (e0, bias), here, how)
            else:
                _pixels(ctx, part, here, how)
        done()
        ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
    return result if pyramid.batched else result[0]


def _pixels(ctx: Context, target: Planes, uniforms: dict[str, Any], defines: dict[str, Any]) -> None:
    """Each pixel by itself."""
    for chunk in chunks(ctx, target):
        first = {"u_first_plane": chunk.plane}
        make_words(
            ctx,
            "foveate.comp",
            target,
            chunk,
            shared_channels=defines["CHANNELS"],
            uniforms=uniforms | first,
            defines=defines,
        )


def _by_unit(ctx: Context, target: Planes, uniforms: dict[str, Any], defines: dict[str, Any]) -> None:
    most = ctx.gl.integer(G.MAX_TEXTURE_MAX_ANISOTROPY)
    if uniforms["u_anisotropy"] > most:
        raise UnsupportedError(
            f"anisotropy is {uniforms['u_anisotropy']}, and this device's texture units go to {most}. Use less, or "
            "backend='torch'."
        )
    ctx.gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_MAX_ANISOTROPY, most)
    try:
        _pixels(ctx, target, uniforms, defines | {"ANISOTROPIC": True})
    finally:
        ctx.gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_MAX_ANISOTROPY, 1)
