"""From a log-polar map back to the picture's frame."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice, needs_grad
from gpu_lod.log_polar import bilinear, ring_rule
from gpu_lod.mipmap import stored
from gpu_lod.planewise import bands
from gpu_lod.transfer import bind_table, chunks, make_words, new_planes, planes_of

_BORDERS = ("clamp", "zero")


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
        square of the ring and wedge spacing.

    Args:
        fixation: (x, y) in [0, 1], or [B, 2]; gradients pass to it on the torch backend.
        size: (height, width) of the picture in pixels.
        r_min, r_max, spacing, e0: as for `log_polar`.
        border: "zero" or "clamp".
        backend: "gl", "torch" or "auto". Both give gradients in the map.

    Raises:
        InputError: bad shapes, dtype, radii, size; a fixation that is not finite or outside [0, 1].
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device allows.

    Source: Weiman and Chaikin, "Logarithmic Spiral Grids for Image Processing and Display" (1979).
    """
    polar = checks.tensor(polar, "polar")
    chosen = _choose(polar, fixation, size, r_min, r_max, spacing, e0, border, backend)
    height, width = checks.size(size)
    inner = e0 if spacing == "cortical" else 0.01 if r_min is None else r_min
    points = checks.fixation(fixation, polar.shape[0] if polar.ndim == 4 else 1)
    rest = (float(inner), float(r_max), spacing == "cortical", border == "zero")
    if chosen.backend == "torch":
        return reference(polar, points, (height, width), *rest)
    ctx = context_for(polar)
    points = dispatch.kept(points, [polar])
    (result,) = dispatch.run_gl(
        lambda x: (_gl(ctx, x, points, (height, width), *rest),),
        lambda x: (reference(x, points, (height, width), *rest),),
        polar,
    )
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
    checks.size(size)
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
    return dispatch.measured("inverse_log_polar", polar, batch * height * width, channels=channels, batch=batch)


dispatch.register(inverse_log_polar, _choose)
operators.register(inverse_log_polar, lambda polar, fixation, size, *_: polar.new_empty(*polar.shape[:-2], *size))


def reference(
    polar: torch.Tensor,
    fixation: torch.Tensor,
    size: tuple[int, int],
    inner: float,
    r_max: float,
    cortical: bool,
    zero: bool,
) -> torch.Tensor:
    """The same in plain torch; float64 too. Differentiable in the map and the fixation [B, 2].

    Args:
        inner: where the rings begin, or e0 if they are cortical.
    """
    batched = polar if polar.ndim == 4 else polar[None]
    work = polar.dtype if polar.dtype in (torch.float32, torch.float64) else torch.float32
    height, width = size
    rings, wedges = polar.shape[-2:]
    longer = max(size)
    points = fixation.to(polar.device, work)
    y = (torch.arange(height, dtype=work, device=polar.device) + 0.5) / height
    x = (torch.arange(width, dtype=work, device=polar.device) + 0.5) / width
    scale = rings / (math.log1p(r_max / inner) if cortical else math.log(r_max / inner))
    # A column of the other end on both sides lets the wedges go round; grid_sample counts from -1 to 1.
    turned = torch.cat([batched[..., -1:], batched, batched[..., :1]], dim=-1)

    def make(images: slice, rows: slice) -> torch.Tensor:
        at = points[images]
        dx = (x[None, None, :] - at[:, 0, None, None]) * (width / longer)
        dy = (y[None, rows, None] - at[:, 1, None, None]) * (height / longer)
        dx, dy = torch.broadcast_tensors(dx, dy)
        r = torch.hypot(dx, dy)
        safe = r.clamp(min=1e-30)
        ring = ((safe / inner).log1p() if cortical else (safe / inner).log()) * scale - 0.5
        turn = torch.where(r > 0, torch.atan2(dy, torch.where(r > 0, dx, torch.ones_like(dx))) / (2 * math.pi), 0.0)
        wedge = torch.where(turn < 0, turn + 1, turn) * wedges - 0.5
        grid = torch.stack([(2 * wedge + 3) / (wedges + 2) - 1, (2 * ring + 1) / rings - 1], dim=-1)
        result = bilinear(turned[images], grid, work)
        if zero:
            result = result.masked_fill((r > r_max)[:, None], 0)
        return stored(result, polar.dtype)

    cut = [(slice(None), slice(None))]
    if polar.device.type == "cpu" and not (needs_grad(polar, points) or any(map(checks.transformed, (polar, points)))):
        cut = list(bands(len(batched), height, width))
    if len(cut) == 1:
        result = make(*cut[0])
    else:
        result = batched.new_empty(*batched.shape[:2], height, width)
        for images, rows in cut:
            result[images, :, rows] = make(images, rows)
    return result if polar.ndim == 4 else result[0]


def _gl(
    ctx: Context,
    polar: torch.Tensor,
    fixation: torch.Tensor,
    size: tuple[int, int],
    inner: float,
    r_max: float,
    cortical: bool,
    zero: bool,
) -> torch.Tensor:
    batched = polar if polar.ndim == 4 else polar[None]
    batch, channels, rings, wedges = batched.shape
    height, width = size
    longer = max(size)
    scale = rings / (math.log1p(r_max / inner) if cortical else math.log(r_max / inner))
    with ctx.active(polar.device):
        source = planes_of(ctx, batched)
        target, result = new_planes(ctx, (batch, channels, height, width), polar.dtype)
        points = ctx.private.lease(batch * 8).write(fixation.float())

        def span(first: int, last: int) -> tuple[int, int]:
            """The whole maps of the planes that these elements are in."""
            return first // target.area * source.area, (last // target.area + 1) * source.area - 1

        for chunk in chunks(ctx, target, lambda first, last: source.span_fits(ctx, *span(first, last))):
            last = chunk.first + chunk.elements - 1
            origin = source.bind(ctx, 1, *span(chunk.first, last))
            bind_table(ctx, 2, points)
            uniforms = {
                "u_map_size": (wedges, rings),
                "u_source_first": origin + chunk.plane * source.area,
                "u_first_plane": chunk.plane,
                "u_channels": channels,
                "u_pixel": (1 / width, 1 / height),
                "u_box": (width / longer, height / longer),
                "u_radii": (inner, r_max, scale),
            }
            defines = {"CORTICAL": cortical, "BORDER_ZERO": zero}
            make_words(ctx, "inverse_log_polar.comp", target, chunk, uniforms=uniforms, defines=defines)
        ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
    return result if polar.ndim == 4 else result[0]
