"""The ways in which GL makes a mip chain. All give the same levels; they differ in which hardware does the work. (Where
infinities stand, a texture unit may make NaN of them: 0 * inf.)

- compute: one dispatch a level, storage buffer to storage buffer, no texture.
- registers: up to three levels a dispatch, each invocation a block of its own, no barriers (several_levels.py); one
  level where a side is odd.
- single-pass: one dispatch for the whole chain, through shared memory (single_pass.py).
- single-pass-texture: the same from a texture, where one bilinear fetch averages four texels. Mean only.
- fragment: one draw a level, rendered into an array texture.
- driver: glGenerateMipmap. Mean only; rounds at every level; at odd sides OpenGL leaves the filter open.
- sampler: the texture unit's min/max reduction (GL_EXT_texture_filter_minmax). Max and min only, no NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from gpu_lod import several_levels, single_pass
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context
from gpu_lod.conversion import Conversion
from gpu_lod.copies import put
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.pyramid import Reduce, level_sizes
from gpu_lod.texture import Texture
from gpu_lod.transfer import (
    READ_BARRIERS,
    Planes,
    check_texture_size,
    chunks,
    layer_groups,
    make_words,
    memory_of,
    new_planes,
    packed_planes,
    planes_of,
    planes_to_texture,
    private_planes,
    scratch_planes,
    texture_to_planes,
)

Textures = list[tuple[int, Texture]]
"""Of images from a first one on."""

_BUFFERS_ALONE = ("compute", "single-pass", "registers")


class Chain:
    """The levels of a chain in GL memory, as planes and as tensors [B, C, h, w].

    Args:
        strided: an image that GL can read is level 0 as it stands, whatever its strides; only `source` may then be
            read.
        private: no tensor is made of the levels below: they may lie where only GL gets at them.
    """

    def __init__(
        self,
        ctx: Context,
        image: torch.Tensor,
        sizes: list[tuple[int, int]],
        *,
        strided: bool = False,
        private: bool = False,
    ) -> None:
        batch, channels, height, width = image.shape
        dtype = image.dtype
        self.channels = channels
        self.tensors: list[torch.Tensor] = []
        source = None if private or not (strided or image.is_contiguous()) else readable(ctx, image)
        if private:
            self.planes = [planes_of(ctx, image), *private_planes(ctx, batch, channels, sizes[1:], dtype)]
            self.source = single_pass.Source.of_planes(self.planes[0], channels)
        elif source is None:
            self.planes, self.tensors = packed_planes(ctx, batch, channels, sizes, dtype)
            put(ctx, self.tensors[0], image)
            self.source = single_pass.Source.of_planes(self.planes[0], channels)
        else:  # the image is level 0 as it stands
            self.planes, self.tensors = packed_planes(ctx, batch, channels, sizes[1:], dtype)
            top = Planes(source.buffer, source.offset, batch * channels, height, width, dtype, source.owner)
            self.planes.insert(0, top)
            self.tensors.insert(0, image)
            self.source = source


def readable(ctx: Context, image: torch.Tensor) -> single_pass.Source | None:
    """An image [B, C, H, W] where it is, of any strides; None where it must be copied."""
    found = memory_of(ctx, image)
    if found is None:
        return None
    buffer, offset, owner = found
    source = single_pass.Source(buffer, offset, tuple(image.shape), image.stride(), image.dtype, owner)
    return source if image.is_contiguous() or source.readable(ctx) else None


def build(
    ctx: Context, image: torch.Tensor, levels: int, reduce: Reduce, generator: str
) -> tuple[list[torch.Tensor], Textures | None]:
    """Levels [B, C, h, w] of an image [B, C, H, W], and textures if they came with it.

    Runs inside `ctx.active()`.

    Raises: as `chain_of`.
    """
    chain, textures = chain_of(ctx, image, levels, reduce, generator, strided=generator == "single-pass")
    return chain.tensors, textures


def chain_of(
    ctx: Context,
    image: torch.Tensor,
    levels: int,
    reduce: Reduce,
    generator: str,
    *,
    strided: bool = False,
    private: bool = False,
) -> tuple[Chain, Textures | None]:
    """The same, as planes too.

    Args: as for `Chain`.

    Raises:
        UnsupportedError: the generator cannot do this reduction, here or at all.
        LimitError: larger than the device allows.
        InputError: NaN for the sampler generator.
    """
    check_generator(ctx, generator, reduce)
    if generator not in _BUFFERS_ALONE:
        check_texture_size(ctx, *image.shape[-2:])
    if generator == "sampler" and image.dtype.is_floating_point and bool(torch.isnan(image).any()):
        raise InputError(
            "the image holds NaN, which the texture unit's min/max filter leaves undefined. Use another generator; "
            "they give NaN wherever the footprint holds one."
        )
    height, width = image.shape[-2:]
    chain = Chain(ctx, image, level_sizes(height, width, levels), strided=strided, private=private)
    textures = None
    if levels > 1 or generator == "driver":
        textures = _MAKERS[generator](ctx, chain, reduce)
    return chain, textures


def build_converted(ctx: Context, image: torch.Tensor, levels: int, values: Conversion) -> list[torch.Tensor]:
    """All levels of the mean chain of an image [B, C, H, W], converted on the way: one dispatch. Runs inside
    `ctx.active()`.
    """
    batch, channels, height, width = image.shape
    dtype = values.dtype
    if levels == 1:  # no chain to make
        (_, top) = new_planes(ctx, tuple(image.shape), dtype)
        return [top.copy_(values.apply(image))]
    source = readable(ctx, image) or single_pass.Source.of_planes(planes_of(ctx, image), channels)
    planes, tensors = packed_planes(ctx, batch, channels, level_sizes(height, width, levels), dtype)
    scale = values.scale or (1.0,) * channels
    single_pass.reduce_chain(ctx, source, planes, channels, "mean", (scale, values.offset))
    return tensors


def check_generator(ctx: Context, generator: str, reduce: Reduce) -> None:
    if generator == "single-pass-texture" and reduce != "mean":
        raise UnsupportedError(
            f"bilinear fetches average; they cannot reduce by {reduce!r}. Use generator='single-pass'."
        )
    if generator == "driver" and reduce != "mean":
        raise UnsupportedError(
            f"glGenerateMipmap averages; it cannot reduce by {reduce!r}. "
            "Use generator='compute' or generator='fragment'."
        )
    minmax = {"GL_EXT_texture_filter_minmax", "GL_ARB_texture_filter_minmax"}
    if generator == "sampler" and not minmax & ctx.extensions:
        raise UnsupportedError(
            f"{ctx.renderer} has no GL_EXT_texture_filter_minmax. Use generator='compute' or generator='fragment'."
        )


def _taps(above: Planes) -> dict[str, int]:
    """Footprint widths: 2 for an even side, 3 for an odd one, 1 where the side is 1 already."""

    def taps(n: int) -> int:
        return 1 if n == 1 else 2 + n % 2

    return {"TAPS_X": taps(above.width), "TAPS_Y": taps(above.height)}


def _compute(ctx: Context, chain: Chain, reduce: Reduce) -> None:
    dtype = chain.planes[0].dtype
    # Means of small types are carried to the next level in fp32 and rounded once, on output.
    wide = reduce == "mean" and dtype != torch.float32
    source = chain.planes[0]
    for level, target in enumerate(chain.planes[1:], start=1):
        scratch = None
        if wide and level < len(chain.planes) - 1:
            scratch = scratch_planes(ctx, (target.count, target.height, target.width), torch.float32)
        reduce_level(ctx, reduce, source, target, scratch, wide and level > 1)
        source = scratch or target


def reduce_level(
    ctx: Context,
    reduce: Reduce,
    source: Planes,
    target: Planes,
    scratch: Planes | None = None,
    source_wide: bool = False,
) -> None:
    """One level from the one above it, and into `scratch` the same in fp32.

    Args:
        source_wide: the source is fp32 whatever the target is.
    """
    fetch = source.fetch if reduce == "mean" else source.fetch_bits
    fetched = source.fetchable(ctx)
    defines = {"SOURCE_WIDE": source_wide, "FETCHED": fetched, **_reduction(reduce), **_taps(source)}
    reduce_by(
        ctx,
        "reduce_level.comp",
        source,
        target,
        scratch,
        defines,
        above=0,
        fetch=fetch if fetched else None,
    )


def reduce_by(
    ctx: Context,
    shader: str,
    source: Planes,
    target: Planes,
    scratch: Planes | None,
    defines: Mapping[str, object],
    *,
    above: int,
    fetch: Callable[[int], int] | None = None,
) -> None:
    """One level from the one above it, and into `scratch` the same in fp32.

    Args:
        above: rows of the source before row 2 y that row y rests on; it rests on none after row 2 y + 2.
        fetch: binds the source as a buffer texture, which the shader then reads; None is a buffer.
    """

    def span(first: int, last: int) -> tuple[int, int]:
        """Elements of the source that these elements of the target rest on."""
        plane, row = divmod(first // target.width, target.height)
        last_plane, last_row = divmod(last // target.width, target.height)
        begin = plane * source.area + max(min(2 * row, source.height - 1) - above, 0) * source.width
        end = last_plane * source.area + min(2 * last_row + 3, source.height) * source.width
        return begin, end - 1

    def fits(first: int, last: int) -> bool:
        return source.span_fits(ctx, *span(first, last)) and (scratch is None or scratch.span_fits(ctx, first, last))

    for chunk in chunks(ctx, target, fits):
        last = chunk.first + chunk.elements - 1
        origin = fetch(1) if fetch else source.bind(ctx, 1, *span(chunk.first, last))
        if scratch is not None:
            scratch.bind(ctx, 2, chunk.first, last)
        here = {
            "u_source_size": (source.width, source.height),
            "u_source_first": origin + chunk.plane * source.area,
        }
        make_words(ctx, shader, target, chunk, uniforms=here, defines={"KEEP_WIDE": scratch is not None, **defines})
        ctx.gl.MemoryBarrier(READ_BARRIERS)  # for the next part too, which may read the buffer that this one writes to


def _reduction(reduce: Reduce) -> dict[str, int]:
    return {f"REDUCE_{reduce.upper()}": 1}


def _fragment(ctx: Context, chain: Chain, reduce: Reduce) -> None:
    base = chain.planes[0]
    channels = chain.channels if chain.channels <= 4 else 1
    dtype = torch.float32 if reduce == "mean" else base.dtype  # unrounded between levels
    below = len(chain.planes) - 1
    for first, count in layer_groups(ctx, base.count // channels):
        part = [planes.layers(first * channels, count * channels) for planes in chain.planes]
        top = ctx.textures.lease((base.width, base.height), layers=count, levels=1, dtype=base.dtype, channels=channels)
        rest = ctx.textures.lease(
            (part[1].width, part[1].height), layers=count, levels=below, dtype=dtype, channels=channels
        )
        planes_to_texture(ctx, part[0], top, 0)
        for level, target in enumerate(part[1:], start=1):
            program = ctx.programs.render("reduce_level.frag", **_reduction(reduce), **_taps(part[level - 1]))
            program.set(u_target_size=(target.width, target.height))
            if level == 1:
                top.clamp_levels(ctx.gl, 0, 0)
            else:  # sampling must not reach the level that is rendered to
                rest.clamp_levels(ctx.gl, level - 2, level - 2)
            rest.render_to(ctx.gl, level - 1)
            program.draw_layers(ctx.programs.vertex_array, count)
        rest.clamp_levels(ctx.gl, 0, below - 1)
        for level, target in enumerate(part[1:]):
            texture_to_planes(ctx, rest, level, target)


def _driver(ctx: Context, chain: Chain, reduce: Reduce) -> Textures:
    base = chain.planes[0]
    channels = chain.channels
    textures = []
    for first, count in layer_groups(ctx, base.count // channels):
        part = [planes.layers(first * channels, count * channels) for planes in chain.planes]
        texture = ctx.textures.lease(
            (base.width, base.height), layers=count, levels=len(part), dtype=base.dtype, channels=channels
        )
        planes_to_texture(ctx, part[0], texture, 0)
        texture.clamp_levels(ctx.gl, 0, len(part) - 1)
        ctx.gl.GenerateMipmap(G.TEXTURE_2D_ARRAY)
        for level, target in enumerate(part[1:], start=1):
            texture_to_planes(ctx, texture, level, target)
        textures.append((first, texture))
    return textures


def _registers(ctx: Context, chain: Chain, reduce: Reduce) -> None:
    several_levels.reduce_chain(ctx, chain.planes, reduce, functools.partial(reduce_level, ctx, reduce))


def _single_pass(ctx: Context, chain: Chain, reduce: Reduce) -> None:
    single_pass.reduce_chain(ctx, chain.source, chain.planes, chain.channels, reduce)


def _single_pass_texture(ctx: Context, chain: Chain, reduce: Reduce) -> None:
    base = chain.planes[0]
    for first, count in layer_groups(ctx, base.count):
        part = [planes.layers(first, count) for planes in chain.planes]
        texture = ctx.textures.lease(
            (base.width, base.height), layers=count, levels=1, dtype=base.dtype, channels=1, filtered=True
        )
        planes_to_texture(ctx, part[0], texture, 0)
        texture.clamp_levels(ctx.gl, 0, 0)
        single_pass.reduce_chain(ctx, texture, part, 1, reduce)


def _sampler(ctx: Context, chain: Chain, reduce: Reduce) -> None:
    base = chain.planes[0]
    gl = ctx.gl
    for first, count in layer_groups(ctx, base.count):
        part = [planes.layers(first, count) for planes in chain.planes]
        texture = ctx.textures.lease(
            (base.width, base.height), layers=count, levels=len(part), dtype=base.dtype, channels=1
        )
        planes_to_texture(ctx, part[0], texture, 0)
        texture.clamp_levels(gl, 0, len(part) - 1)
        try:
            mode = G.REDUCE_MAX if reduce == "max" else G.REDUCE_MIN
            gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_REDUCTION_MODE, mode)
            # With a linear blend between levels the filter may take in texels of the next one.
            gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_MIN_FILTER, G.LINEAR_MIPMAP_NEAREST)
            for level, target in enumerate(part[1:], start=1):
                above = part[level - 1]
                program = ctx.programs.compute("minmax_level.comp", **_reduction(reduce), **_taps(above))
                texture.bind_image(gl, level)
                program.set(
                    u_source_size=(above.width, above.height),
                    u_target_size=(target.width, target.height),
                    u_level=level - 1,
                ).dispatch_groups(-(-target.width // 8), -(-target.height // 8), count)
                gl.MemoryBarrier(G.TEXTURE_FETCH_BARRIER_BIT | G.SHADER_IMAGE_ACCESS_BARRIER_BIT)
        finally:
            gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_REDUCTION_MODE, G.WEIGHTED_AVERAGE)
            gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_MIN_FILTER, G.LINEAR_MIPMAP_LINEAR)
        for level, target in enumerate(part[1:], start=1):
            texture_to_planes(ctx, texture, level, target)


_MAKERS: dict[str, Callable[[Context, Chain, Reduce], Textures | None]] = {
    "compute": _compute,
    "registers": _registers,
    "single-pass": _single_pass,
    "single-pass-texture": _single_pass_texture,
    "fragment": _fragment,
    "driver": _driver,
    "sampler": _sampler,
}
