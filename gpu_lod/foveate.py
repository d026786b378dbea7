"""Foveation: a picture as sharp as the eye would see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpu_lod import checks, dispatch, operators, planewise, texture_chain
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.enlarging import enlarged
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.foveate_blocks import blocks, highest, ranges_of
from gpu_lod.halving import stored
from gpu_lod.kernels import samplers
from gpu_lod.log_polar import bilinear, cropped
from gpu_lod.mipmap import mipmap, sampled
from gpu_lod.planewise import bands
from gpu_lod.pyramid import Pyramid, level_sizes
from gpu_lod.texture_chain import Source
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
        pixels out, and is read at level max(0, level - log2(N)). Texture units, on GL and CUDA, filter in their own
        way, and so differ where there is detail. There gradients are those of the samples' mean: its exact adjoint,
        and so that of the forward only as nearly as the two agree.

    Args:
        fixation: (x, y), a tensor [2] for the whole batch, or [B, 2].
        e0: eccentricity at which resolution has halved.
        bias: added to the level: more is blurrier.
        anisotropy: 1 to 16.
        backend: "gl", "cuda" (texture units without OpenGL, CUDA tensors only), "torch" or "auto", which takes GL where
            that measures faster: seldom for small pictures that are no texture yet (`Pyramid.upload`), and with
            anisotropy on software renderers alone. All give gradients in src, "torch" also in the fixation. "cuda" does
            not check the values of a fixation that is a CUDA tensor.

    Raises:
        InputError: bad shapes, dtype, e0, bias, anisotropy; a fixation that is not finite or outside [0, 1]; a pyramid
            that is no mean one.
        UnsupportedError: a backend that is not available, or anisotropy on a GPU without
            GL_EXT_texture_filter_anisotropic or beyond what it has.
        LimitError: larger than the device allows.
        PyramidChangedError: a level was written to since the pyramid was built.
        CaptureError: by OpenGL inside a CUDA-graph capture; by CUDA there, if src is no texture yet
            (`Pyramid.upload`), the verb was not called before, or the fixation is on the host.

    Source: Perry and Geisler, "Gaze-contingent Real-time Simulation of Arbitrary Visual Fields" (2002); Toet and Levi
        (1992) for zones that are longer along the radius; EXT_texture_filter_anisotropic.
    """
    src = src if isinstance(src, Pyramid) else checks.tensor(src, "src")
    chosen = _choose(src, fixation, e0, bias, anisotropy, backend)
    built = isinstance(src, Pyramid)
    image = src.levels[0] if isinstance(src, Pyramid) else src
    cuda = chosen.backend == "cuda"
    points = checks.fixation(fixation, image.shape[0] if image.ndim == 4 else 1, wait=not cuda)
    # Beyond these every pixel reads level 0, or the last.
    rule = (max(float(e0), 1e-18), min(max(float(bias), -1e4), 1e4), float(anisotropy))
    levels = None  # all, where it would take waiting to know which are read
    if not isinstance(src, Pyramid) and (not cuda or checks.on_host(points)):
        levels = _levels(image, points, *rule[:2])
    if chosen.backend == "torch":
        return sampled(src, levels, points, lambda levels, points: reference(levels, points, *rule))
    if backend == "auto" and not isinstance(src, Pyramid):
        src = mipmap(src, levels)  # by whatever makes chains fastest, which need not be what samples them
    source = texture_chain.source(src, levels, result_bytes=image.nbytes, backend=chosen.backend)
    points = dispatch.kept(points, source.levels)
    if isinstance(source, Pyramid) and cuda:
        sample = partial(samplers.foveate, source.cuda_textures(), points, *rule)
    else:
        ctx = source.texture_context() or context_for(*source.levels)
        sample = partial(_gl, ctx, source, points, *rule, spare=built)
    return texture_chain.run(source, sample, lambda levels: reference(levels, points, *rule))


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
    )
    if anisotropy > 1 and chosen.backend == "gl" and not (context or context_for(image)).software:
        return Choice("torch", BY_UNIT)
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
    places = [None] * len(points) if checks.transformed(points) else points.tolist()
    result = None
    if in_place and (len(points) > 1 or (texels or height * width) < height * width):
        result = torch.empty_like(top, memory_format=torch.contiguous_format)
    parts = []
    for image, point in enumerate(points):
        one = [level[image : image + 1] for level in chain]
        whole = _Tile(size, slice(0, height), slice(0, width), point, places[image], e0, bias, len(chain) - 1, in_place)
        for tile in [whole] if texels is None else whole.cut(texels):
            rows, columns = tile.rows, tile.columns
            level = tile.level_map() if kept is None else kept[rows, columns]
            part = _probes(one, tile, level, anisotropy) if anisotropy > 1 else _trilinear(one, tile, level)
            if result is None:
                parts.append(part)
            else:
                result[image, :, rows, columns] = stored(part[0], top.dtype, in_place=True)
    if result is None:
        result = stored(torch.cat(parts) if len(parts) > 1 else parts[0], top.dtype)
    return result if levels[0].ndim == 4 else result[0]


@dataclass(frozen=True)
class _Tile:
    """Some pixels of one image, and how they are seen."""

    size: tuple[int, int]
    """(height, width) of the image."""
    rows: slice
    columns: slice
    point: torch.Tensor
    """[2], the fixation."""
    place: tuple[float, float] | None
    """The same, unless it has no values."""
    e0: float
    bias: float
    last: int
    """No level beyond it is there."""
    in_place: bool
    """No graph is kept, so that tensors may be written to."""

    def cut(self, texels: int) -> Iterator[_Tile]:
        """Squares of no more pixels, each of which reads few levels, where these halve evenly, so that no more of them
        is brought to full size than a square rests on; else whole rows."""
        height, width = self.size
        across = width
        if height * width > texels and all(n % (1 << self.reads()[1]) == 0 for n in self.size):
            across = min(1 << math.isqrt(texels).bit_length() - 1, width)
        for left in range(0, width, across):
            for _, rows in bands(1, height, across, texels):
                yield replace(self, rows=rows, columns=slice(left, min(left + across, width)))

    def away(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x [1, w] and y [h, 1] from the fixation, in units of the longer side."""
        height, width = self.size
        kind: dict[str, Any] = {"dtype": self.point.dtype, "device": self.point.device}
        y = (torch.arange(self.rows.start, self.rows.stop, **kind) + 0.5) / height
        x = (torch.arange(self.columns.start, self.columns.stop, **kind) + 0.5) / width
        longer = max(self.size)
        return (x - self.point[0])[None] * (width / longer), (y - self.point[1])[:, None] * (height / longer)

    def level_map(self) -> torch.Tensor:
        """[h, w] the level of each pixel."""
        x, y = self.away()
        squared = (x / self.e0).square() + (y / self.e0).square()
        if needs_grad(self.point) or checks.transformed(self.point):
            # The root has no slope at 0; this is far below any rounding.
            return ((squared.clamp(min=1e-30).sqrt() + 1).log2() + self.bias).clamp(min=0)
        return squared.sqrt_().add_(1).log2_().add_(self.bias).clamp_(min=0)

    def reads(self) -> tuple[int, int]:
        """The finest and the coarsest level that its pixels read; all where that is not known."""
        if self.place is None:
            return 0, self.last
        longer = max(self.size)
        # From the fixation to both edges, in units of the longer side.
        edges = [
            (begin / n - at) * (n / longer)
            for n, at, span in zip(self.size, (self.place[1], self.place[0]), (self.rows, self.columns), strict=True)
            for begin in (span.start, span.stop)
        ]
        near = math.hypot(*(max(begin, -end, 0.0) for begin, end in (edges[:2], edges[2:])))
        far = math.hypot(*(max(-begin, end) for begin, end in (edges[:2], edges[2:])))
        finest, coarsest = (math.log2(1 + e / self.e0) + self.bias for e in (near, far))
        return max(math.floor(min(finest, self.last)), 0), max(math.ceil(min(coarsest, self.last)), 0)


def level_map(point: torch.Tensor, size: tuple[int, int], e0: float, bias: float) -> torch.Tensor:
    """[H, W] the level of each pixel of an image."""
    return _Tile(size, slice(0, size[0]), slice(0, size[1]), point, None, e0, bias, 0, True).level_map()


def _trilinear(chain: list[torch.Tensor], tile: _Tile, level: torch.Tensor) -> torch.Tensor:
    """Pixels of an image whose levels are [1, C, h, w]."""
    finest, coarsest = tile.reads()

    def made(index: int, box: tuple[int, int, int, int]) -> torch.Tensor:
        found = _enlarged(chain[index], index, tile.size, box, tile.point.dtype)
        if tile.in_place and index == coarsest:
            found = found.contiguous() if index else found.clone()  # never the source itself
        return found

    return _blended(made, tile, level, finest, coarsest)


def _blended(
    made: Callable[[int, tuple[int, int, int, int]], torch.Tensor],
    tile: _Tile,
    level: torch.Tensor,
    finest: int,
    coarsest: int,
) -> torch.Tensor:
    """Levels blended from the coarsest to the finest.

    Args:
        made: rows y0..y1 and columns x0..x1 of a level at full size; of the last one it is written to.
        level: of each pixel of the tile, or what `level_map` gives before it is clamped.
    """
    height, width = tile.size
    top, bottom, left, right = tile.rows.start, tile.rows.stop, tile.columns.start, tile.columns.stop
    result = made(coarsest, (top, bottom, left, right))
    for index in range(coarsest - 1, finest - 1, -1):
        y0, y1, x0, x1 = top, bottom, left, right
        if tile.in_place:  # pixels that read this level or a finer one; all where a graph must be kept
            assert tile.place is not None
            reach = max(tile.e0 * (2.0 ** (index + 1 - tile.bias) - 1) * max(tile.size), 0.0)
            (y0, y1), (x0, x1) = (
                _span(tile.place[1] * height, reach, y0, y1),
                _span(tile.place[0] * width, reach, x0, x1),
            )
        if y0 >= y1 or x0 >= x1:
            break
        fine = made(index, (y0, y1, x0, x1))
        coarse = result[..., y0 - top : y1 - top, x0 - left : x1 - left]
        share = level[y0 - top : y1 - top, x0 - left : x1 - left] - index
        if tile.in_place:
            torch.lerp(fine, coarse, share.clamp_(0, 1), out=coarse)
        else:
            result = torch.lerp(fine, coarse, share.clamp(0, 1))
    return result


def _span(centre: float, reach: float, begin: int, end: int) -> tuple[int, int]:
    """Of some pixels those within reach of the centre, first and one past the last."""
    return max(math.floor(max(centre - reach, begin)), begin), min(math.ceil(min(centre + reach, end)), end)


def _enlarged(
    level: torch.Tensor, index: int, size: tuple[int, int], box: tuple[int, int, int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Rows y0..y1 and columns x0..x1 of a level brought to full size, bilinear."""
    y0, y1, x0, x1 = box
    if index == 0:
        return level[..., y0:y1, x0:x1].to(dtype)
    if all(n % (1 << index) == 0 for n in size):
        return enlarged(level, 1 << index, box, dtype)
    top, bottom, row, rows = _reads(y0, y1, size[0], index)
    left, right, column, columns = _reads(x0, x1, size[1], index)
    if 4 * (bottom - top) > 5 * (y1 - y0):  # much that is not asked for
        texels = _rows(level[..., column:columns], y0, y1, size[0], dtype)
        top, bottom = y0, y1
    else:
        texels = level[..., row:rows, column:columns].to(dtype)
    pixels = F.interpolate(texels, size=(bottom - top, right - left), mode="bilinear", align_corners=False)
    return pixels[..., y0 - top : y1 - top, x0 - left : x1 - left]


def _reads(first: int, end: int, n: int, index: int) -> tuple[int, int, int, int]:
    """Pixels of a side n and texels of that level, no more than that range of pixels rests on: a texel on both sides.
    All where parts of the side would be scaled by another factor."""
    whole = 1 << index
    if n % whole:
        return 0, n, 0, max(1, n >> index)
    begin, last = max(first // whole - 1, 0), min(-(-end // whole) + 1, n >> index)
    return begin * whole, last * whole, begin, last


def _rows(level: torch.Tensor, first: int, end: int, height: int, dtype: torch.dtype) -> torch.Tensor:
    """Some of the rows that a level [..., h, w] has at full height, linear."""
    count = level.shape[-2]
    step = count / height
    at = torch.arange(first, end, dtype=dtype, device=level.device) + 0.5
    at = (at * step - 0.5).clamp_(min=0)
    above = at.long()
    below = (above + 1).clamp_(max=count - 1)
    # Rows that are read, and one more on both sides for rounding, so that not all of it is converted.
    low = max(math.floor((first + 0.5) * step - 0.5) - 1, 0)
    high = min(math.floor((end - 0.5) * step - 0.5) + 3, count)
    texels = level[..., low:high, :].to(dtype)
    share = (at - above)[:, None]
    return torch.lerp(texels.index_select(-2, above - low), texels.index_select(-2, below - low), share)


def _probes(chain: list[torch.Tensor], tile: _Tile, level: torch.Tensor, anisotropy: float) -> torch.Tensor:
    """Pixels of an image whose levels are [1, C, h, w]: the mean of several trilinear samples along the radius."""
    height, width = tile.size
    probes = math.ceil(anisotropy)
    read = level - math.log2(probes)
    x, y = tile.away()
    step = torch.exp2(level) / (x.square() + y.square()).clamp(min=1e-30).sqrt()
    # As grid_sample counts.
    radius = torch.stack([x * step * (2 / width), y * step * (2 / height)], dim=-1)
    kind: dict[str, Any] = {"dtype": level.dtype, "device": level.device}
    across, down = (
        (2 * torch.arange(span.start, span.stop, **kind) + 1) / n - 1
        for span, n in ((tile.columns, width), (tile.rows, height))
    )
    centre = torch.stack(torch.broadcast_tensors(across, down[:, None]), dim=-1)
    shifts = torch.arange(1, probes + 1, **kind) / (probes + 1) - 0.5

    def mean(index: int, box: tuple[int, int, int, int]) -> torch.Tensor:
        y0, y1, x0, x1 = box
        top, left = tile.rows.start, tile.columns.start
        here = slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
        return _mean_of_probes(chain[index], centre[here], radius[here], shifts)

    tile = replace(tile, bias=tile.bias - math.log2(probes))
    return _blended(mean, tile, read, *tile.reads())


def _mean_of_probes(
    level: torch.Tensor, centre: torch.Tensor, radius: torch.Tensor, shifts: torch.Tensor
) -> torch.Tensor:
    """[1, C, h, w] of one level, at `centre + shift * radius` [h, w, 2]. On a CPU as many probes at once as there are
    threads, which share the images of a batch."""
    at_once = torch.get_num_threads() if level.device.type == "cpu" else 1
    if level.dtype != centre.dtype and level.device.type == "cpu" and not checks.transformed(centre):
        ends = torch.stack([torch.add(centre, radius, alpha=float(shift)) for shift in (shifts[0], shifts[-1])])
        level, crop = cropped(level, ends.detach(), centre.dtype, small=0)
        if crop is not None:
            centre, radius = torch.addcmul(crop[1], centre, crop[0]), radius * crop[0]
    total: torch.Tensor | None = None
    for some in shifts.split(at_once):
        grid = centre + radius * some[:, None, None, None]
        found = bilinear(level.expand(len(some), -1, -1, -1), grid, centre.dtype).sum(0, keepdim=True)
        total = found if total is None else total + found
    assert total is not None
    return total / len(shifts)


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
    with ctx.active(pyramid.device):
        textures = pyramid.textures(ctx, filtered=by_unit)
        target, result, done = new_rows(ctx, (batch, channels, height, width), dtype, longer=spare)
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
