"""Bounds of boxes over Hi-Z pyramids."""

from __future__ import annotations

from typing import Any, Literal

import torch

from gpu_lod import checks, dispatch, operators, recording
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.errors import InputError
from gpu_lod.pyramid import Pyramid, depth
from gpu_lod.transfer import bind_table, chunks, make_words, new_planes

Bound = Literal["max", "min"]
BOX = 16
"""What a box costs, in texels."""


@operators.verb
def region_max(hz: Pyramid, boxes: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """An upper bound of each box over a max pyramid, from at most four texels.

    Shape: boxes [B, N, 4], or [N, 4] for all images of the batch; the result is [B, C, N], or [C, N] for an unbatched
        pyramid, of its dtype.
    Units: boxes (x0, y0, x1, y1) in [0, 1] of width and height, y down.
    Convention: half-open and clipped to the image: a box touches texels floor(x0 n) .. ceil(x1 n) - 1 along a side of
        n, in fp32. It is read at the finest level where the canonical ancestors min(j >> l, n_l - 1) of those texels
        span at most two a side, so the bound may come from texels beside the box: never below the true maximum, exact
        for small boxes. A box that touches no texel gives the identity (-inf; 0 for uint8). NaN among the texels read
        gives NaN. Hardware may take subnormal numbers for zero.

    Args:
        hz: from `hiz(relevance)`: reduce "max", all levels down to 1 x 1.
        boxes: any float dtype; made fp32.
        backend: "gl", "torch" or "auto", which takes what measures fastest, the first time with making the pyramid a
            texture (`Pyramid.upload`). No gradients.

    Raises:
        InputError: a pyramid that is no full max pyramid; boxes of the wrong shape, with NaN or infinity, or x1 < x0.
        UnsupportedError: a backend that is not available.
        LimitError: larger than the device's textures or storage buffers.
        PyramidChangedError: a level was written to since the pyramid was built.

    Source: Greene, Kass and Miller, "Hierarchical Z-Buffer Visibility" (SIGGRAPH 1993).
    """
    return _region(hz, boxes, backend, "max")


@operators.verb
def region_min(hz: Pyramid, boxes: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """A lower bound of each box over a min pyramid: `region_max` the other way round.

    A box that touches no texel gives +inf (255 for uint8). See `region_max` for the rest.

    Raises:
        InputError, UnsupportedError, LimitError, PyramidChangedError: as `region_max`, of a full min pyramid.
    """
    return _region(hz, boxes, backend, "min")


def _region(hz: Pyramid, boxes: torch.Tensor, backend: Backend, reduce: Bound) -> torch.Tensor:
    chosen = _choose(hz, boxes, backend, reduce)
    hz.check_unchanged()
    prepared = _boxes(hz, checks.dense(boxes, "boxes"))
    levels = [level if hz.batched else level[None] for level in hz.levels]
    if prepared.shape[1] == 0:
        result = levels[0].new_empty(hz.batch, hz.channels, 0)
    elif chosen.backend == "torch":
        result = reference([level.detach() for level in levels], prepared, reduce)
    else:
        result = _gl(hz.texture_context() or context_for(*hz.levels), hz, prepared, reduce)
    return result if hz.batched else result[0]


def _choose(hz: Pyramid, boxes: Any, backend: Backend = "auto", reduce: Bound = "max") -> Choice:
    dispatch.check_backend(backend)
    checks.hiz_pyramid(hz, reduce, f"region_{reduce}")
    if len(hz) != depth(*hz.size):
        raise InputError(
            f"the pyramid has {len(hz)} levels and ends at {hz.levels[-1].shape[-1]} x {hz.levels[-1].shape[-2]}; "
            "expected all of them down to 1 x 1, as hiz() makes them."
        )
    if backend == "gl":
        checks.gl_input(hz.levels[0])
        checks.gl_input(checks.tensor(boxes, "boxes"))
    if backend != "auto":
        return Choice(backend, "asked for")
    top = hz.levels[0]
    barred = dispatch.barred(top, boxes) or dispatch.barred_texture(hz)
    if barred is not None:
        return barred
    planes = hz.batch * hz.channels
    if isinstance(boxes, torch.Tensor):
        checks.ordinary(boxes, "boxes")
    shape: tuple[int, ...] = tuple(getattr(boxes, "shape", ()))
    count = shape[-2] if len(shape) > 1 else 1
    # Torch goes through all texels and, box by box, through about a dozen small tensors.
    context = hz.texture_context()
    return dispatch.measured(
        "region_max",
        top.detach(),
        top.numel() + BOX * planes * count,
        state="" if context else dispatch.NO_TEXTURE,
        batch=planes,
        context=context,
    )


dispatch.register(region_max, lambda hz, boxes, backend="auto": _choose(hz, boxes, backend, "max"))
dispatch.register(region_min, lambda hz, boxes, backend="auto": _choose(hz, boxes, backend, "min"))


def _like(hz: Pyramid, boxes: torch.Tensor, *_: str) -> torch.Tensor:
    """What `region_max` and `region_min` return, without values."""
    return hz.levels[0].new_empty(*hz.levels[0].shape[:-2], boxes.shape[-2])


for verb in (region_max, region_min):
    operators.register(verb, _like, differentiable=False)


def _boxes(hz: Pyramid, boxes: torch.Tensor) -> torch.Tensor:
    """Checked boxes, fp32 [B, N, 4]."""
    if not boxes.is_floating_point() or boxes.ndim not in (2, 3) or boxes.shape[-1] != 4:
        raise InputError(
            f"boxes is {boxes.dtype} {tuple(boxes.shape)}; expected floats [{hz.batch}, N, 4] or [N, 4]: "
            "(x0, y0, x1, y1) in [0, 1]."
        )
    if boxes.ndim == 3 and boxes.shape[0] not in (1, hz.batch):
        raise InputError(
            f"boxes has shape {tuple(boxes.shape)} for a batch of {hz.batch}; expected [{hz.batch}, N, 4]."
        )
    checks.same_device(hz.levels[0], boxes, "boxes")
    boxes = boxes.detach().float()
    recording.check(_box_values, boxes)
    return boxes.expand(hz.batch, -1, 4) if boxes.ndim == 3 else boxes[None].expand(hz.batch, -1, 4)


def _box_values(boxes: torch.Tensor) -> None:
    seen = checks.values(boxes)
    if not bool(torch.isfinite(seen).all()):
        raise InputError("boxes holds NaN or infinity; expected finite (x0, y0, x1, y1).")
    if bool((seen[..., 2:] < seen[..., :2]).any()):
        raise InputError("a box has x1 < x0 or y1 < y0; expected (x0, y0, x1, y1) with x0 <= x1 and y0 <= y1.")


_ALONE = 2**16
"""Texels from which one of the first levels is read where it is, and not copied into a row with the others."""


def reference(
    levels: list[torch.Tensor], boxes: torch.Tensor, reduce: Bound = "max", row: torch.Tensor | None = None
) -> torch.Tensor:
    """The bounds in plain torch: [B, C, N] from levels [B, C, h, w] and fp32 boxes [B, N, 4].

    Args:
        row: all levels of a plane one after the other, [B, C, texels], where they lie so already.
    """
    top = levels[0]
    batch, channels, height, width = top.shape
    size = torch.tensor([width, height], dtype=torch.float32, device=top.device)
    first = (boxes[..., :2] * size).floor().clamp(min=0)
    last = torch.minimum((boxes[..., 2:] * size).ceil() - 1, size - 1)
    empty = (last < first).any(dim=-1)
    first = torch.minimum(first, size - 1)
    last = torch.maximum(last, first)
    level, corners = _corners(levels, first.int(), last.int())
    plane = torch.arange(batch * channels, dtype=_index(top), device=top.device).view(batch, channels, 1)
    alone = 0 if row is not None else sum(x.numel() >= _ALONE for x in levels[:2])
    runs = [levels[number : number + 1] for number in range(alone)]
    runs += [levels[alone:]] if alone < len(levels) else []
    result = None
    for number, run in enumerate(runs):
        texels = row
        if texels is None:
            texels = run[0].flatten(2) if len(run) == 1 else in_one_row(run)
        index = corners[:, :, None] + plane * texels.shape[2]
        if len(run) > 1:
            sizes = [0] * (number + 1) + [x.shape[2] * x.shape[3] for x in run[:-1]]
            starts = torch.tensor(sizes, dtype=plane.dtype, device=top.device).cumsum(0, dtype=plane.dtype)
            index = index + starts[level.long()][:, None]
        here = (level >= number if run is runs[-1] else level == number)[:, None]
        index = index if len(runs) == 1 else torch.where(here, index, 0)
        found = texels.reshape(-1).index_select(0, index.flatten()).view(index.shape)
        found = found.amax(0) if reduce == "max" else found.amin(0)
        result = found if result is None else torch.where(here, found, result)
    assert result is not None
    return result.masked_fill(empty[:, None], identity(top.dtype, reduce))


def in_one_row(levels: list[torch.Tensor]) -> torch.Tensor:
    """Levels one after the other, [B, C, texels]."""
    return torch.cat([x.flatten(2) for x in levels], dim=2)


def _corners(levels: list[torch.Tensor], first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The finest level at which the canonical ancestors of texels `first` to `last` [B, N, 2] span at most two a side,
    [B, N], and the places of the four outermost in it, [4, B, N]."""
    sides = torch.tensor([(x.shape[3], x.shape[2]) for x in levels], dtype=_index(levels[0]), device=first.device)

    def ancestors(level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        here = sides[level.long()]
        a, b = (torch.minimum(texel >> level[..., None], here - 1) for texel in (first, last))
        return a, b, here[..., 0]

    # Of 2^(e - 1) to 2^e texels it is e - 2, e - 1 or e: two more than below would stay at least three ancestors.
    level = ((last - first).amax(dim=-1).float().frexp().exponent - 2).clamp(min=0)
    for _ in range(2):
        a, b, _ = ancestors(level)
        level = level + (b - a > 1).any(dim=-1)
    a, b, columns = ancestors(level)
    rows = [at * columns for at in (a[..., 1], b[..., 1])]
    return level, torch.stack([row + at for row in rows for at in (a[..., 0], b[..., 0])])


def _index(top: torch.Tensor) -> torch.dtype:
    """What numbers all texels of a chain."""
    return torch.int32 if top.numel() < 2**30 else torch.int64


def identity(dtype: torch.dtype, reduce: Bound) -> float:
    """What a reduction over nothing gives."""
    if dtype == torch.uint8:
        return 0 if reduce == "max" else 255
    return -torch.inf if reduce == "max" else torch.inf


def _gl(ctx: Context, hz: Pyramid, boxes: torch.Tensor, reduce: Bound) -> torch.Tensor:
    count = boxes.shape[1]
    most = max(ctx.limits.storage_bytes // (16 * hz.batch), 1)
    if count > most:
        return torch.cat([_gl(ctx, hz, part, reduce) for part in boxes.split(most, dim=1)], dim=2)
    planes = hz.batch * hz.channels
    with ctx.active(hz.device):
        target, result = new_planes(ctx, (planes, 1, count), hz.dtype)
        table = ctx.private.lease(boxes.numel() * 4).write(boxes)
        for first, texture in hz.textures(ctx):
            part = target.layers(first, texture.key.layers)
            texture.bind(ctx.gl)
            bind_table(ctx, 1, table)
            for chunk in chunks(ctx, part):
                make_words(
                    ctx,
                    "region.comp",
                    part,
                    chunk,
                    uniforms={
                        "u_first_plane": chunk.plane,
                        "u_first_layer": first,
                        "u_channels": hz.channels,
                        **texture.reading,
                    },
                    defines={f"REDUCE_{reduce.upper()}": True, **ctx.textures.reading(texture)},
                )
        ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
    return result.view(hz.batch, hz.channels, count)
