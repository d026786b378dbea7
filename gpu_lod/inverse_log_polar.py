"""From a log-polar map back to the picture's frame."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from gpu_lod import checks, dispatch, operators, planewise
from gpu_lod.adjoints import Adjoint, linear, of_samples, wide
from gpu_lod.bilinear import bilinear, scattered
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.halving import stored
from gpu_lod.log_polar import ring_rule
from gpu_lod.planewise import bands
from gpu_lod.program import LOCAL_SIZE, MAX_GROUPS
from gpu_lod.pyramid import like_levels
from gpu_lod.transfer import Planes, bind_table, chunks, make_words, planes_of, word_defines
from gpu_lod.whole_rows import new_rows

_BORDERS = ("clamp", "zero")
_QUARTERED = 32
"""The least wedges that torch takes a quarter at a time."""
_ROLLED = 8
"""The least wedges whose maps torch rolls by half a turn."""


@operators.verb
def inverse_log_polar(
    polar: torch.Tensor,
    fixation: Any,
    size: tuple[int, int],
    r_min: float | None = None,
    r_max: float = 0.7,
    spacing: Literal["log", "cortical"] = "log",
    e0: float = 0.05,
    border: Literal["clamp", "zero"] = "zero",
    backend: Backend = "auto",
) -> torch.Tensor:
    """What a log-polar map shows, drawn where it was seen: the inverse of `log_polar` as far as there is one.

    Shape: polar [B, C, rings, wedges] or [C, rings, wedges], any C, gives [..., H, W].
    Units: the map's dtype.
    Convention: a pixel reads the map at its own distance and angle from the fixation, bilinear between the centres of
        rings and wedges; wedges go round. Inside the first ring's centre the first ring is read. Beyond `r_max` a pixel
        is 0 (border "zero") or reads the last ring ("clamp"). The other arguments are those the map was made with. The
        round trip of a smooth picture comes back within the map's own resolution: the largest error falls with the
        square of the ring and wedge spacing (below 0.02 of range from 64 rings x 128 wedges of a picture of 96 x 128
        that holds less than one wave).
    Precision: places are fp32, of 512 wedges within some 3e-5 of one, and the result is as far off as that is of the
        difference of neighbours. Near the fixation an angle is off by 6e-8 over the distance.

    Args:
        fixation: (x, y) in [0, 1], or [B, 2]; gradients pass to it on the torch backend.
        size: (height, width) of the picture in pixels.
        r_min, r_max, spacing, e0: as for `log_polar`.
        border: "zero" or "clamp".
        backend: "gl", "torch" or "auto". Both give gradients in the map.

    Raises:
        InputError: bad shapes, dtype, radii, size; a fixation that is not finite or outside [0, 1], or of which
            gradients of uint8 are asked.
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device allows.

    Source: Weiman and Chaikin, "Logarithmic Spiral Grids for Image Processing and Display" (1979).
    """
    polar = checks.tensor(polar, "polar")
    chosen = _choose(polar, fixation, size, r_min, r_max, spacing, e0, border, backend)
    height, width = checks.size(size, at_most=checks.LONGEST)
    inner = e0 if spacing == "cortical" else 0.01 if r_min is None else r_min
    points = checks.fixation(fixation, polar.shape[0] if polar.ndim == 4 else 1)
    checks.no_counts(points, polar.dtype, "fixation", way_out="polar.float() / 255")
    laid = float(inner), float(r_max), spacing == "cortical", border == "zero"
    if chosen.backend == "torch":
        return reference(polar, points, (height, width), *laid)
    frame = Frame((height, width), polar.shape[-2], polar.shape[-1], *laid)
    ctx, points = context_for(polar), dispatch.kept(points, [polar])
    (result,) = linear(lambda x: [_gl(ctx, x, points, frame)], _adjoint_of(polar, points, frame), polar)
    return result


def _choose(
    polar: torch.Tensor,
    fixation: Any,
    size: tuple[int, int],
    r_min: float | None = None,
    r_max: float = 0.7,
    spacing: str = "log",
    e0: float = 0.05,
    border: str = "zero",
    backend: Backend = "auto",
) -> Choice:
    polar = checks.image(polar, "polar", max_channels=None)
    checks.size(size, at_most=checks.LONGEST)
    checks.choice(border, "border", _BORDERS)
    dispatch.check_backend(backend)
    ring_rule(polar.shape[-2], polar.shape[-1], r_min, r_max, spacing, e0)
    if backend == "gl":
        checks.gl_input(polar)
        checks.gl_place(fixation)
    if backend != "auto":
        return Choice(backend, "asked for")
    barred = dispatch.barred(polar, fixation)
    if barred is not None:
        return barred
    if isinstance(fixation, torch.Tensor) and fixation.requires_grad:
        return Choice("torch", "gradients are asked for in the fixation")
    batch, channels = polar.shape[0] if polar.ndim == 4 else 1, polar.shape[-3]
    height, width = size
    work = batch * height * width
    return dispatch.measured("inverse_log_polar", polar, work, channels=channels, batch=batch, adjoint=True)


dispatch.register(inverse_log_polar, _choose)
operators.register(inverse_log_polar, lambda polar, fixation, size, *_: polar.new_empty(*polar.shape[:-2], *size))


class Frame(NamedTuple):
    """Where the pixels of a picture lie in a map."""

    size: tuple[int, int]
    """(height, width) of the picture."""
    rings: int
    wedges: int
    inner: float
    """Where the rings begin, or e0 if they are cortical."""
    r_max: float
    cortical: bool
    zero: bool
    """Pixels beyond the last ring are 0."""

    @property
    def scale(self) -> float:
        """Rings to the logarithm of a radius."""
        ratio = self.r_max / self.inner
        return self.rings / (math.log1p(ratio) if self.cortical else math.log(ratio))

    def along(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [W] and y [H] of pixels, from 0 to 1."""
        height, width = self.size
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        return (torch.arange(width, **kind) + 0.5) / width, (torch.arange(height, **kind) + 0.5) / height

    def away(self, at: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, 1, w] and [B, h, 1] from the fixations [B, 2], in units of the longer side."""
        height, width = self.size
        longer = max(self.size)
        return (x - at[:, 0, None, None]) * (width / longer), (y[:, None] - at[:, 1, None, None]) * (height / longer)

    def places(
        self, at: torch.Tensor, x: torch.Tensor, y: torch.Tensor, first: int, shown: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What pixels read of `shown` wedges, from that one on, as grid_sample counts, [B, h, w, 2]; and which lie
        beyond the rings, [B, 1, h, w]. Differentiable in the fixations."""
        dx, dy = torch.broadcast_tensors(*self.away(at, x, y))
        if needs_grad(at) or checks.transformed(at):  # at the fixation itself neither distance nor angle has a slope
            there = (dx == 0) & (dy == 0)
            dx = torch.where(there, 1.0, dx)
            r, turn = (torch.where(there, 0.0, found) for found in (torch.hypot(dx, dy), torch.atan2(dy, dx)))
        else:
            r, turn = torch.hypot(dx, dy), torch.atan2(dy, dx)
        ring = r.clamp(min=1e-30).div_(self.inner)
        ring = (ring.log1p() if self.cortical else ring.log()).mul_(self.scale).sub_(0.5)
        turn = turn.div_(2 * math.pi)
        wedge = torch.where(turn < 0, turn + 1, turn).mul_(self.wedges).sub_(0.5)
        # grid_sample counts from -1 to 1.
        wedge, ring = (2 * (wedge - first) + 1) / shown - 1, (2 * ring + 1) / self.rings - 1
        return torch.stack([wedge, ring], dim=-1), (r > self.r_max)[:, None]

    def places_from_behind(
        self, at: torch.Tensor, x: torch.Tensor, y: torch.Tensor, first: int, shown: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in less time, of wedges from half a turn before the first one on, as atan2 counts: with what
        grid_sample counts folded into one factor and one term a side."""
        dx, dy = self.away(at, x, y)
        square = torch.addcmul(dx * dx, dy, dy)
        grid = square.new_empty(*square.shape, 2)
        turn = torch.atan2(dy.expand_as(square), dx.expand_as(square))
        torch.add(turn.mul_(self.wedges / (math.pi * shown)), -2 * first / shown - 1, out=grid[..., 0])
        scale = 2 * self.scale / self.rings
        if self.cortical:
            torch.sub(square.sqrt().div_(self.inner).log1p_().mul_(scale), 1, out=grid[..., 1])
        else:
            ring = square.clamp(min=1e-36).log_().mul_(scale / 2)
            torch.sub(ring, scale * math.log(self.inner) + 1, out=grid[..., 1])
        return grid, (square > self.r_max * self.r_max)[:, None]

    def seam(self) -> tuple[int, int, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
        """The first wedge that pixels all round read, one past the last, and what places them: of few wedges they go
        on from 0."""
        if self.wedges < _ROLLED:
            return -1, self.wedges + 1, self.places
        return -(self.wedges // 2) - 2, self.wedges // 2 + 3, self.places_from_behind


def reference(
    polar: torch.Tensor,
    fixation: torch.Tensor,
    size: tuple[int, int],
    inner: float,
    r_max: float,
    cortical: bool,
    zero: bool,
) -> torch.Tensor:
    """The same in plain torch; float64 too. Differentiable in the map and the fixation [B, 2]. The others are those of
    a `Frame`."""
    frame = Frame(size, polar.shape[-2], polar.shape[-1], inner, r_max, cortical, zero)
    if not needs_grad(polar) or needs_grad(fixation) or checks.transformed(fixation):
        return _made(polar, fixation, frame)
    adjoint = _adjoint_of(polar, fixation.detach().clone(), frame)
    (result,) = linear(
        lambda polar: [_made(polar, fixation, frame)], adjoint, polar, like=lambda: like_levels(polar, [size])
    )
    return result


def _adjoint_of(polar: torch.Tensor, fixation: torch.Tensor, frame: Frame) -> Adjoint:
    """
    Args:
        fixation: that stays as it is.
    """
    return of_samples(
        lambda gradient: [_adjoint(gradient, fixation, frame)], lambda maps: _made(maps[0], fixation, frame), polar, 1
    )


def _adjoint(gradient: torch.Tensor, fixation: torch.Tensor, frame: Frame) -> torch.Tensor:
    """The gradient in a map from that in a picture [B, C, H, W]."""
    pixels = wide(gradient)
    assert pixels is not None
    points, (x, y) = fixation.to(pixels.device, pixels.dtype), frame.along(pixels)
    first, end, places = frame.seam()
    batch, channels, height, width = pixels.shape
    shape = channels, frame.rings, end - first
    sums = pixels.new_zeros(batch, *shape)
    most = max(planewise.PART // 4, frame.rings * frame.wedges) if checks.on_host(pixels) else pixels.numel()
    for images, rows in bands(batch, height, width, most):
        grid, beyond = places(points[images], x, y[rows], first, end - first)
        part = pixels[images, :, rows]
        sums[images] += scattered(part.masked_fill(beyond, 0) if frame.zero else part, grid, (len(part), *shape))
    return _turned_adjoint(sums, first, frame.wedges)


def _made(polar: torch.Tensor, fixation: torch.Tensor, frame: Frame) -> torch.Tensor:
    """By a graph of torch's own where gradients are asked for."""
    batched = polar if polar.ndim == 4 else polar[None]
    work = polar.dtype if polar.dtype in (torch.float32, torch.float64) else torch.float32
    height, width = frame.size
    wedges = frame.wedges
    points = fixation.to(polar.device, work)
    x, y = frame.along(points)
    graph = needs_grad(polar, points) or checks.transformed(polar) or checks.transformed(points)

    def make(maps: torch.Tensor, grid: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
        result = bilinear(maps, grid, work)
        if frame.zero:
            result = result.masked_fill(beyond, 0) if graph else result.masked_fill_(beyond, 0)
        return stored(result, polar.dtype, in_place=not graph)

    if graph or polar.device.type != "cpu":
        result = make(_turned(batched, -1, wedges + 1), *frame.places(points, x, y, -1, wedges + 2))
        return result if polar.ndim == 4 else result[0]
    result = batched.new_empty(*batched.shape[:2], height, width)
    texels = batched[0].numel()
    small = height * width < planewise.PART // 16 and texels <= planewise.PART * 3 // 4
    if work == polar.dtype or wedges < _QUARTERED or small:
        first, end, places = frame.seam()
        part = _turned(batched, first, end)
        most = min(planewise.PART // 4, max(len(batched) * height * width // 8, planewise.PART // 16))
        if work != polar.dtype:  # in fp32 they are several times themselves: what is left beside the turned ones
            most = min(most, max(max(planewise.PART // 2, batched.nbytes // 5) // texels, 1) * height * width)
        for images, rows in bands(len(batched), height, width, most):
            found = places(points[images], x, y[rows], first, end - first)
            result[images, :, rows] = make(part[images], *found)
        return result if polar.ndim == 4 else result[0]
    # A map of a small dtype is several times itself in fp32: a quarter of it at a time, which is what the pixels on one
    # side of the fixation in x and y read.
    most = min(planewise.PART // 4, max(height * width // 10, planewise.PART // 16))
    threads = torch.get_num_threads()
    xs, ys = x.tolist(), y.tolist()
    for image, (px, py) in enumerate(points.tolist()):
        at, left, above = points[image : image + 1], bisect.bisect_left(xs, px), bisect.bisect_left(ys, py)
        for quarter, (row, end, column, last) in enumerate(
            ((above, height, left, width), (above, height, 0, left), (0, above, 0, left), (0, above, left, width))
        ):
            if row == end or column == last:
                continue
            # A wedge more on both sides than the bilinear filter reads, for rounding.
            first = quarter * wedges // 4 - 2
            part = _turned(batched[image][None], first, (quarter + 1) * wedges // 4 + 3).to(work)
            columns = last - column
            together = max(most // (columns * threads), 1) * threads  # `bilinear` shares rows among the threads
            for _, rows in bands(1, end - row, columns, together * columns):
                rows = slice(row + rows.start, row + rows.stop)
                found = frame.places(at, x[column:last], y[rows], first, part.shape[-1])
                result[image, :, rows, column:last] = make(part, *found)[0]
            del part  # before the next one is made
    return result if polar.ndim == 4 else result[0]


def _turned(maps: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Wedges of maps, counted on past the first and the last of them."""
    wedges = maps.shape[-1]
    parts = [maps[..., first:]] * (first < 0) + [maps[..., max(first, 0) : end]]
    return torch.cat(parts + [maps[..., : end - wedges]] * (end > wedges), dim=-1)


def _turned_adjoint(turned: torch.Tensor, first: int, wedges: int) -> torch.Tensor:
    """What wedges counted from `first` on, below 0, give those they are."""
    before, behind = turned[..., :-first], turned[..., -first:]
    result = turned.new_zeros(*turned.shape[:-1], wedges)
    result[..., first:] += before
    for part in behind.split(wedges, dim=-1):
        result[..., : part.shape[-1]] += part
    return result


def _gl(ctx: Context, polar: torch.Tensor, fixation: torch.Tensor, frame: Frame) -> torch.Tensor:
    batched = polar if polar.ndim == 4 else polar[None]
    batch, channels, rings, wedges = batched.shape
    height, width = frame.size
    longer = max(frame.size)
    with ctx.active(polar.device):
        source = planes_of(ctx, batched)
        target, result, done = new_rows(ctx, (batch, channels, height, width), polar.dtype)
        points = ctx.private.lease(batch * 8).write(fixation.float())
        bind_table(ctx, 2, points)
        fetched = source.fetchable(ctx)
        uniforms = {
            "u_map_size": (wedges, rings),
            "u_pixel": (1 / width, 1 / height),
            "u_box": (width / longer, height / longer),
            "u_radii": (frame.inner, frame.r_max, frame.scale),
        }
        defines = {"CORTICAL": frame.cortical, "BORDER_ZERO": frame.zero, "FETCHED": fetched}
        make = _fours if target.width % target.per_word == 0 and _together(ctx, source, target, channels) else _words
        make(ctx, source, target, channels, uniforms, defines)
        done()
        ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
    return result if polar.ndim == 4 else result[0]


def _together(ctx: Context, source: Planes, target: Planes, channels: int) -> int:
    """Planes that fit the bindings at once: whole images, or some of one; 0 if rows must be cut."""
    if max(target.height, -(-target.width // 4 // LOCAL_SIZE)) > MAX_GROUPS:
        return 0
    count = target.count
    while count and not all(planes.span_fits(ctx, 0, count * planes.area - 1) for planes in (source, target)):
        count //= 2
    count = min(count, channels * MAX_GROUPS)
    return count // channels * channels or count


def _fours(
    ctx: Context,
    source: Planes,
    target: Planes,
    channels: int,
    uniforms: Mapping[str, object],
    defines: Mapping[str, object],
) -> None:
    """What the channels of an image share is made once."""
    together = _together(ctx, source, target, channels)
    planes = min(together, channels)
    at_once = 4 if target.width % 4 == 0 else target.per_word
    program = ctx.programs.compute(
        "inverse_log_polar_fours.comp", **word_defines(target.dtype), AT_ONCE=at_once, **defines
    )
    for image in range(0, target.count // channels, together // planes):
        images = min(together // planes, target.count // channels - image)
        for channel in range(0, channels, planes):
            first, made = image * channels + channel, min(planes, channels - channel)
            last = first + images * made - 1
            read = first * source.area, (last + 1) * source.area - 1
            origin = source.fetch(1) if defines["FETCHED"] else source.bind(ctx, 1, *read)
            index = target.bind(ctx, 0, first * target.area, (last + 1) * target.area - 1)
            program.set(
                u_size=(target.width, target.height),
                u_first=(origin + read[0], (index + first * target.area) // at_once),
                u_planes=made,
                u_first_image=image,
                **uniforms,
            )
            program.dispatch_groups(-(-target.width // 4 // LOCAL_SIZE), target.height, images)


def _words(
    ctx: Context,
    source: Planes,
    target: Planes,
    channels: int,
    uniforms: Mapping[str, object],
    defines: Mapping[str, object],
) -> None:
    """Any word by itself."""

    def span(first: int, last: int) -> tuple[int, int]:
        """The whole maps of the planes that these elements are in."""
        return first // target.area * source.area, (last // target.area + 1) * source.area - 1

    for chunk in chunks(ctx, target, lambda first, last: source.span_fits(ctx, *span(first, last))):
        last = chunk.first + chunk.elements - 1
        origin = source.fetch(1) if defines["FETCHED"] else source.bind(ctx, 1, *span(chunk.first, last))
        here = {
            "u_source_first": origin + chunk.plane * source.area,
            "u_first_plane": chunk.plane,
            "u_channels": channels,
        }
        make_words(ctx, "inverse_log_polar.comp", target, chunk, uniforms={**uniforms, **here}, defines=defines)
