"""Log-polar sampling about a fixation."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from gpu_lod import checks, dispatch, operators, sources
from gpu_lod.adjoints import Adjoint, linear, of_samples, wide
from gpu_lod.bilinear import Sums, bilinear, cropped
from gpu_lod.bridge import Private
from gpu_lod.bridge import gl as G
from gpu_lod.cached import constant
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.errors import InputError, LimitError, UnsupportedError
from gpu_lod.halving import stored
from gpu_lod.kernels import samplers
from gpu_lod.mipmap import mipmap, sampled
from gpu_lod.pyramid import Pyramid, like_levels
from gpu_lod.sources import Source
from gpu_lod.transfer import Planes, bind_table, chunks, layer_groups, make_words, new_planes, texture_to_planes

LEAST = torch.finfo(torch.float32).tiny
"""Of radii and eccentricities: shaders flush what is less to zero, and would divide by it."""
_SPACINGS = ("log", "cortical")
_BORDERS = ("clamp", "zero")
_GENERATORS = ("auto", "compute", "fragment")

RINGS_AT_ONCE_SOFTWARE = 8
"""Neighbouring rings an invocation makes on a software renderer: it reads each direction once for all of them."""
_AT_ONCE = 2**15
"""Samples that a CPU takes at once of small dtypes: in fp32 they are several times the result. Of fp32 eight times as
many."""
_BANDS = 2
"""Of rings, which are drawn one after the other: the texels of all, RGB in RGBA, are more than the map. Of bfloat16,
whose texels are fp32, twice as many."""
_CONVERTED = 2**20
"""Samples of a level from which it is made fp32 of a quarter at a time."""


@operators.verb
def log_polar(
    src: torch.Tensor | Pyramid,
    fixation: Any,
    rings: int,
    wedges: int,
    r_min: float | None = None,
    r_max: float = 0.7,
    spacing: Literal["log", "cortical"] = "log",
    e0: float = 0.05,
    border: Literal["clamp", "zero"] = "clamp",
    generator: Literal["auto", "compute", "fragment"] = "auto",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Sample an image on rings and wedges about a fixation: fine at the centre, coarse outside, like a retina.

    Shape: src is an image [B, C, H, W] or [C, H, W], C 1 to 4, or a mean `Pyramid` of one; the result is
        [B, C, rings, wedges] or [C, rings, wedges], of src's dtype.
    Units: radii in units of the image's longer side, so that circles stay circles in pixels; fixation (x, y) in [0, 1]
        of width and height, y down.
    Convention: ring k has radius r_min (r_max / r_min)^((k + 0.5) / rings) with spacing "log", and
        e0 ((1 + r_max / e0)^((k + 0.5) / rings) - 1) with spacing "cortical" (uniform in cortical distance ln(1 +
        e / e0)). Wedge j lies at angle 2 pi (j + 0.5) / wedges, from +x towards +y (clockwise on the screen). Each
        sample is read at level max(0, log2(longer * max(arc, radial step))), trilinear over the mean mip chain, texel
        i's centre at (i + 0.5) / n; levels past the last are clamped to it. skimage's warp_polar and OpenCV's warpPolar
        begin at angle 0 and their innermost radius instead of half a step on, and do not filter; skimage's log radii
        are r_min = 1 px, OpenCV's are one pixel less, so "cortical" with e0 = 1 px. Turning the picture about the
        fixation by a wedge's angle moves the map by a wedge, and, with spacing "log", scaling it by the ratio of two
        neighbouring radii moves it by a ring: within 0.1 of the picture's range where no wave is shorter than 4 of the
        outermost samples, 0.01 where none is shorter than 16.
    Precision: places are fp32, 6e-8 of a side off, and the result is as far off as that is of the difference of
        neighbouring texels: in white noise of 1024 x 1024 up to 5e-5 of range, in a photograph below 2e-5.

    Args:
        fixation: (x, y), a tensor [2] for the whole batch, or [B, 2].
        rings, wedges: at least 1.
        r_min: radius where the rings begin (spacing "log" only); None is 0.01.
        r_max: radius where they end; the largest eccentricity with spacing "cortical".
        e0: eccentricity at which cortical magnification has halved (spacing "cortical").
        border: a sample whose position is outside the image takes the nearest edge ("clamp") or is 0 ("zero").
        generator: "compute" or "fragment" shader on the GL backend; naming one implies backend="gl".
        backend: "gl", "cuda" (without OpenGL, CUDA tensors only: by texture units where src is a texture, else from
            memory), "torch" or "auto", by what measures fastest, on a CPU of images and of pyramids that are a texture
            already (`Pyramid.upload`), else torch. All give gradients in src. "cuda" does not check the values of a
            fixation that is a CUDA tensor.

    Raises:
        InputError: bad shapes, dtype, radii, counts; a fixation that is not finite or outside [0, 1], or of which
            gradients of uint8 are asked; a max or min pyramid.
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device's textures, or buffers for an image.
        PyramidChangedError: a level was written to since the pyramid was built.
        CaptureError: by OpenGL inside a CUDA-graph capture; by CUDA there, if the verb was not called before with
            these arguments, or the fixation is on the host.

    Source: Weiman and Chaikin, "Logarithmic Spiral Grids for Image Processing and Display" (1979); Schwartz,
        "Computational Anatomy and Functional Architecture of Striate Cortex" (1980) for ln(1 + e / e0).
    """
    rule = ring_rule(rings, wedges, r_min, r_max, spacing, e0)
    src = src if isinstance(src, Pyramid) else checks.tensor(src, "src")
    chosen = _choose_for(src, fixation, rule, border, generator, backend)
    image = src.levels[0] if isinstance(src, Pyramid) else src
    batch = image.shape[0] if image.ndim == 4 else 1
    points = checks.fixation(fixation, batch, wait=chosen.backend != "cuda")
    checks.no_counts(points, image.dtype, "fixation")
    if chosen.backend == "torch":
        return sampled(src, None, points, lambda levels, points: reference(levels, points, rule, border))
    samples, result_bytes = _amounts(image, rule)
    if chosen.generator == "fragment":
        result_bytes //= 3  # what is drawn stands in a texture first, which takes two thirds of its room
    if backend == "auto" and chosen.backend == "cuda" and not isinstance(src, Pyramid):
        src = mipmap(src)  # by whatever makes chains fastest, which need not be what samples them
    source = sources.source(src, samples=samples, result_bytes=result_bytes, backend=chosen.backend)
    points = dispatch.kept(points, source.levels)
    if isinstance(source, Pyramid) and chosen.backend == "cuda":
        sample = functools.partial(_cuda, source, points, rule, border)
    else:
        ctx = source.texture_context() or context_for(*source.levels)
        sample = functools.partial(_gl, ctx, source, points, rule, border, chosen.generator or "compute")
    return sources.run(source, sample, _adjoint_of(source.levels[0], len(source), points, rule, border))


def _choose(
    src: torch.Tensor | Pyramid,
    fixation: Any,
    rings: int,
    wedges: int,
    r_min: float | None = None,
    r_max: float = 0.7,
    spacing: str = "log",
    e0: float = 0.05,
    border: str = "clamp",
    generator: str = "auto",
    backend: Backend = "auto",
) -> Choice:
    rule = ring_rule(rings, wedges, r_min, r_max, spacing, e0)
    return _choose_for(src, fixation, rule, border, generator, backend)


def _choose_for(
    src: torch.Tensor | Pyramid, fixation: Any, rule: Rule, border: str, generator: str, backend: Backend
) -> Choice:
    dispatch.check_backend(backend, cuda=True)
    checks.choice(border, "border", _BORDERS)
    checks.choice(generator, "generator", _GENERATORS)
    image = checks.mean_source(src, "log_polar")
    if generator != "auto" and backend in ("torch", "cuda"):
        raise UnsupportedError(f"generator={generator!r} is a GL one; backend={backend!r} has none: leave it out.")
    if backend == "cuda":
        checks.cuda_input(image)
        checks.cuda_place(fixation)
        return Choice("cuda", "asked for")
    if backend == "gl" or generator != "auto":
        checks.gl_input(image)
        checks.gl_place(fixation)
        return Choice("gl", "asked for", "compute" if generator == "auto" else generator)
    if backend == "torch":
        return Choice("torch", "asked for")
    chosen = dispatch.sampler(src, fixation, "fixation")
    if chosen is not None:
        return chosen
    return dispatch.measured("log_polar", image, **sources.asked(src, *_amounts(image, rule)))


def _amounts(image: torch.Tensor, rule: Rule) -> tuple[int, int]:
    """Samples of a map, and its bytes."""
    samples = (image.shape[0] if image.ndim == 4 else 1) * rule.rings * rule.wedges
    return samples, samples * image.shape[-3] * image.itemsize


def _like(src: torch.Tensor | Pyramid, fixation: Any, rings: int, wedges: int, *_: Any) -> torch.Tensor:
    """What `log_polar` returns, without values."""
    image = src.levels[0] if isinstance(src, Pyramid) else src
    return image.new_empty(*image.shape[:-2], rings, wedges)


dispatch.register(log_polar, _choose, cuda=True)
operators.register(log_polar, _like)


class Law(NamedTuple):
    """What rings and wedges are laid out by, checked."""

    rings: int
    wedges: int
    r_min: float
    r_max: float
    e0: float | None
    """None: the rings are logarithmic."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Where the rings and wedges lie; everything that does not depend on the image. One object a set of arguments."""

    law: Law
    radii: tuple[float, ...]
    """Radius of each ring, in units of the longer side."""
    footprints: tuple[float, ...]
    """Side of each ring's samples, in the same units."""

    @property
    def rings(self) -> int:
        return self.law.rings

    @property
    def wedges(self) -> int:
        return self.law.wedges

    def levels(self, longer: int, last: int) -> list[float]:
        """Level of each ring, for an image whose longer side is `longer` px and whose last level is `last`."""
        return [min(math.log2(max(1.0, longer * footprint)), float(last)) for footprint in self.footprints]

    def runs(self, longer: int, last: int) -> Iterator[tuple[slice, int, list[float]]]:
        """Rings between two levels: which, the finer level, and of each ring the share of the coarser one. They are
        neighbours, since levels never fall with the radius."""
        levels, first = self.levels(longer, last), 0
        for fine, ring in itertools.groupby(map(int, levels)):
            end = first + len(list(ring))
            yield slice(first, end), fine, [level - fine for level in levels[first:end]]
            first = end


def ring_rule(rings: int, wedges: int, r_min: float | None, r_max: float, spacing: str, e0: float) -> Rule:
    """The checked rule. In compiled code the check alone: rings are laid out when the graph runs."""
    checks.choice(spacing, "spacing", _SPACINGS)
    rings = checks.integer(rings, "rings", at_least=1, at_most=2**20)
    wedges = checks.integer(wedges, "wedges", at_least=1, at_most=2**20)
    r_max = checks.number(r_max, "r_max")
    if spacing == "cortical":
        if r_min is not None:
            raise InputError(
                f"r_min is {r_min}; cortical rings begin at the fixation. Leave it out, or use spacing='log'."
            )
        e0 = checks.number(e0, "e0")
        if e0 <= 0 or r_max <= 0:
            raise InputError(f"e0 is {e0} and r_max {r_max}; both must be positive.")
        if e0 < LEAST:
            raise InputError(f"e0 is {e0:g}; expected at least {LEAST:g}, the least that fp32 holds.")
        start, scale = 0.0, e0
    else:
        start, scale = 0.01 if r_min is None else checks.number(r_min, "r_min"), None
        if not 0 < start < r_max:
            raise InputError(
                f"r_min is {start} and r_max {r_max}; expected 0 < r_min < r_max, in units of the longer side."
            )
        if start < LEAST:
            raise InputError(f"r_min is {start:g}; expected at least {LEAST:g}, the least that fp32 holds.")
    law = Law(rings, wedges, start, r_max, scale)
    return Rule(law, (), ()) if torch.compiler.is_compiling() else _make_rule(law)


@functools.lru_cache(maxsize=64)
def _make_rule(law: Law) -> Rule:
    rings, wedges, r_min, r_max, e0 = law
    radii, footprints = [], []
    for k in range(rings):
        t = (k + 0.5) / rings
        if e0 is None:
            radius = r_min * (r_max / r_min) ** t
            step = radius * math.log(r_max / r_min) / rings
        else:
            radius = e0 * math.expm1(t * math.log1p(r_max / e0))
            step = (radius + e0) * math.log1p(r_max / e0) / rings
        radii.append(radius)
        footprints.append(max(2 * math.pi * radius / wedges, step))
    return Rule(law, tuple(radii), tuple(footprints))


def _radii(law: Law, dtype: torch.dtype) -> torch.Tensor:
    """[rings, 1, 1] in units of the longer side."""
    return torch.tensor(_make_rule(law).radii, dtype=torch.float64, device="cpu")[:, None, None].to(dtype)


def _directions(wedges: int, dtype: torch.dtype) -> torch.Tensor:
    """[wedges, 2], cos and sin of each."""
    angle = 2 * math.pi * (torch.arange(wedges, dtype=torch.float64, device="cpu") + 0.5) / wedges
    return torch.stack([angle.cos(), angle.sin()], dim=-1).to(dtype)


def reference(
    levels: list[torch.Tensor], fixation: torch.Tensor, rule: Rule, border: str = "clamp", parts: int | None = None
) -> torch.Tensor:
    """Trilinear samples in plain torch, in the fastest way found: each ring reads only the two levels it needs.

    Args:
        levels: a mean chain, [B, C, h, w] or [C, h, w] each; float64 too.
        fixation: [B, 2].
        parts: how many threads share the samples of a single image; None is all of torch's.

    Differentiable in the levels and the fixation.
    """
    if not needs_grad(*levels) or needs_grad(fixation) or checks.transformed(fixation):
        return _made(levels, fixation, rule, border, parts)
    adjoint = _adjoint_of(levels[0], len(levels), fixation.detach().clone(), rule, border)
    (result,) = linear(
        lambda *levels: [_made(levels, fixation, rule, border, parts)],
        adjoint,
        *levels,
        like=lambda: like_levels(levels[0], [(rule.rings, rule.wedges)]),
    )
    return result


def _adjoint_of(image: torch.Tensor, levels: int, fixation: torch.Tensor, rule: Rule, border: str) -> Adjoint:
    """
    Args:
        fixation: that stays as it is.
    """
    size = image.shape[-2], image.shape[-1]
    return of_samples(
        lambda gradient: _adjoint(gradient, size, levels, fixation, rule, border),
        lambda levels: _made(levels, fixation, rule, border),
        image,
        levels,
    )


def _adjoint(
    gradient: torch.Tensor, size: tuple[int, int], levels: int, fixation: torch.Tensor, rule: Rule, border: str
) -> list[torch.Tensor | None]:
    """The gradients in the levels from that in a map [B, C, rings, wedges]."""
    pixels = wide(gradient)
    assert pixels is not None
    batch, channels = pixels.shape[:2]
    centre, radii, directions = _places(fixation, size, rule, pixels.dtype, pixels.device)
    sums = Sums((batch, channels, *size), levels)
    most = rule.rings
    if checks.on_host(
        pixels
    ):  # where all of a level is made at every call: of as many samples as texels that is little
        most = max(8 * _AT_ONCE // (batch * rule.wedges), size[0] * size[1] // rule.wedges, 1)
    for rings, fine, blend in rule.runs(max(size), levels - 1):
        for begin in range(rings.start, rings.stop, most):
            rows = slice(begin, min(begin + most, rings.stop))
            grid = torch.addcmul(centre, radii[rows], directions)
            part = pixels[:, :, rows]
            if border == "zero":
                part = part.masked_fill(_outside(grid), 0.0)
            ends = _ends(centre, radii[rows.stop - 1] * directions)

            def add(level: int, part: torch.Tensor, grid: torch.Tensor = grid, ends: torch.Tensor = ends) -> None:
                box = sums.within(level, ends)
                sums.add(level, part, grid if box is None else torch.addcmul(box.shift, grid, box.scale), box)

            if any(blend):
                here = blend[begin - rings.start : rows.stop - rings.start]
                coarse = part * torch.tensor(here, dtype=pixels.dtype, device=pixels.device)[:, None]
                add(fine + 1, coarse)
                part = torch.sub(part, coarse, out=coarse)
            add(fine, part)
    return sums.found


def _places(
    fixation: torch.Tensor, size: tuple[int, int], rule: Rule, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Centres [B, 1, 1, 2], radii [rings, 1, 1] and directions [wedges, 2], whose products and sums are places as
    grid_sample counts them, from -1 to 1."""
    height, width = size
    aspect = torch.tensor([2 * max(size) / width, 2 * max(size) / height], dtype=dtype, device=device)
    centre = (2 * fixation.to(device, dtype) - 1)[:, None, None, :]
    directions = constant(device, _directions, rule.wedges, dtype)
    return centre, constant(device, _radii, rule.law, dtype), directions * aspect


def _ends(centre: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """The two corners of what lies up to the last ring [..., 2] about the centres."""
    return torch.cat([centre + away.amin(0).clamp(max=0), centre + away.amax(0).clamp(min=0)], dim=1)


def _outside(grid: torch.Tensor) -> torch.Tensor:
    """[B, 1, rows, columns]."""
    return (grid.abs() > 1).any(dim=-1)[:, None]


def _made(
    levels: Sequence[torch.Tensor], fixation: torch.Tensor, rule: Rule, border: str, parts: int | None = None
) -> torch.Tensor:
    """By a graph of torch's own where gradients are asked for."""
    top = levels[0]
    batched = top.ndim == 4
    height, width = top.shape[-2:]
    work = top.dtype if top.dtype in (torch.float32, torch.float64) else torch.float32
    centre, radii, directions = _places(fixation, (height, width), rule, work, top.device)
    in_place = not (needs_grad(fixation, *levels) or any(map(checks.transformed, (fixation, *levels))))
    result = top.new_empty(len(centre), top.shape[-3], rule.rings, rule.wedges) if in_place else None
    few = in_place and top.dtype != work and top.device.type == "cpu"
    at_once = len(centre) * rule.rings * rule.wedges
    if few:
        at_once = min(_AT_ONCE, max(len(centre) * height * width // 32, _AT_ONCE // 8))  # of small pictures less
    elif in_place and top.device.type == "cpu":
        at_once = min(at_once, 8 * _AT_ONCE)
    bands = []
    for rings, fine, blend in rule.runs(max(height, width), len(levels) - 1):
        first, last = rings.start, rings.stop
        # Converted once for all of them.
        pair = levels[fine : fine + 1 + any(blend)]
        # A quarter of the wedges, if that is much, reads a quarter of the picture.
        several = 4 if few and pair[0].numel() > _CONVERTED and rule.wedges % 4 == 0 else 1
        most = max(at_once * several // (len(centre) * rule.wedges), 1)
        for quarter in range(several):
            columns = slice(quarter * rule.wedges // several, (quarter + 1) * rule.wedges // several)
            if few:
                away = radii[last - 1] * directions[columns]
                ends = _ends(centre, away)
                read = [cropped(level, ends, work, small=0) for level in pair]  # two ends a level cost nothing to ask
            else:
                read = [(level.to(work), None) for level in pair]
            for begin in range(first, last, most):
                rows = slice(begin, min(begin + most, last))
                here = slice(begin - first, rows.stop - first)
                grid = torch.addcmul(centre, radii[rows], directions[columns])
                part, *coarser = [
                    bilinear(level, grid if crop is None else torch.addcmul(crop[1], grid, crop[0]), work, parts)
                    for level, crop in read
                ]
                for coarse in coarser:
                    weights = torch.tensor(blend[here], dtype=work, device=top.device)[:, None]
                    part = part.lerp_(coarse, weights) if in_place else torch.lerp(part, coarse, weights)
                if border == "zero":
                    part = part.masked_fill(_outside(grid), 0.0)  # infinities, too
                part = stored(part, top.dtype, in_place=in_place)
                if result is None:
                    bands.append(part)
                else:
                    result[:, :, rows, columns] = part
    if result is None:
        result = torch.cat(bands, dim=2) if len(bands) > 1 else bands[0]
    return result if batched else result[0]


def _gl(ctx: Context, pyramid: Source, fixation: torch.Tensor, rule: Rule, border: str, generator: str) -> torch.Tensor:
    height, width = pyramid.size
    longer = max(height, width)
    channels, batch = pyramid.channels, pyramid.batch
    shape = (batch, channels, rule.rings, rule.wedges)
    with ctx.active(pyramid.device):
        target, result = new_planes(ctx, shape, pyramid.dtype)  # first: a chain in memory goes over to OpenGL with it
        textures = pyramid.textures(ctx)
        rings, wedges = _tables(ctx, rule, longer, len(pyramid) - 1)
        points = ctx.private.lease(batch * 8).write(fixation.float())
        for binding, table in ((1, rings), (2, wedges), (3, points)):
            bind_table(ctx, binding, table)
        uniforms = {"u_aspect": (longer / width, longer / height)}
        for first, texture in textures:
            count = texture.key.layers
            common = {"BORDER_ZERO": border == "zero", **ctx.textures.reading(texture)}
            part = target.layers(first * channels, count * channels)
            make = _fragment if generator == "fragment" else _compute
            make(ctx, texture, part, common, uniforms | {"u_first_image": first} | texture.reading)
    return result if pyramid.batched else result[0]


def _cuda(pyramid: Pyramid, fixation: torch.Tensor, rule: Rule, border: str) -> torch.Tensor:
    rings = constant(pyramid.device, _ring_table, rule.law, max(pyramid.size), len(pyramid) - 1)
    wedges = constant(pyramid.device, _directions, rule.wedges, torch.float32)
    return samplers.log_polar(pyramid.cuda_source(), fixation, rings, wedges, border_zero=border == "zero")


def _ring_table(law: Law, longer: int, last: int) -> torch.Tensor:
    """[rings, 2], radius and level of each, computed in double precision; as `_directions`, what does not depend on the
    image."""
    rule = _make_rule(law)
    values = torch.tensor([rule.radii, rule.levels(longer, last)], dtype=torch.float64, device="cpu").T
    return values.float().contiguous()


def _tables(ctx: Context, rule: Rule, longer: int, last: int) -> tuple[Private, Private]:
    """The tables, kept in GL memory."""

    def make() -> tuple[Private, Private]:
        tables = _ring_table(rule.law, longer, last), _directions(rule.wedges, torch.float32)
        rings, wedges = (ctx.private.lease(table.nbytes).write(table) for table in tables)
        return rings, wedges

    return ctx.constants.get(("log_polar", rule, longer, last), make)


def _compute(ctx: Context, texture: Any, target: Planes, common: dict[str, Any], uniforms: dict[str, Any]) -> None:
    channels = texture.key.channels
    rings_at_once = RINGS_AT_ONCE_SOFTWARE if ctx.software else 1
    texture.bind(ctx.gl)
    for chunk in chunks(ctx, target):
        make_words(
            ctx,
            "log_polar.comp",
            target,
            chunk,
            shared_channels=channels,
            rows_at_once=rings_at_once,
            at_once=4 if ctx.software else target.per_word,
            uniforms={"u_first_plane": chunk.plane, **uniforms},
            defines={"CHANNELS": channels, "RINGS_AT_ONCE": rings_at_once, **common},
        )
    ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)


def _fragment(ctx: Context, texture: Any, target: Planes, common: dict[str, Any], uniforms: dict[str, Any]) -> None:
    key = texture.key
    if target.width > ctx.limits.texture_size:
        raise LimitError(
            f"{target.width} wedges are rendered to a texture's rows, and this device's end at "
            f"{ctx.limits.texture_size}. Use generator='compute'."
        )
    bands = _BANDS * (2 if target.dtype == torch.bfloat16 else 1)
    most = min(-(-target.height // bands), ctx.limits.texture_size)
    rounding = {"ROUND_TO_HALVES": target.dtype == torch.float16, "ROUND_TO_COUNTS": target.dtype == torch.uint8}
    program = ctx.programs.render("log_polar.frag", **common, **rounding)
    for first, count in layer_groups(ctx, key.layers):
        canvas = ctx.textures.lease(
            (target.width, most), layers=count, levels=1, dtype=target.dtype, channels=key.channels
        )
        part = target.layers(first * key.channels, count * key.channels)
        for ring in range(0, target.height, most):
            after = min(ring + most, target.height)
            program.set(u_first_layer=first, u_first_ring=ring, **uniforms)
            texture.bind(ctx.gl)
            canvas.render_to(ctx.gl, 0, after - ring)
            program.draw_layers(ctx.programs.vertex_array, count)
            canvas.clamp_levels(ctx.gl, 0, 0)
            texture_to_planes(ctx, canvas, 0, part, (ring, after))
