"""Culling: which texels of a relevance map reach a threshold, found from the root of its Hi-Z pyramid down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.private import clear
from gpu_lod.context import Context, context_for
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.errors import InputError, LimitError
from gpu_lod.program import LOCAL_SIZE, MAX_GROUPS
from gpu_lod.pyramid import Pyramid
from gpu_lod.shapes import summary
from gpu_lod.transfer import Planes, packed_bytes, packed_planes, word_defines

_KEPT, _PRUNED = 1, 2
"""States of a node in cull.comp; 0 was never looked at. The mask is the bytes of level 0, as bool."""


@dataclass(frozen=True, eq=False, repr=False)
class Culled:
    """What `cull` keeps and what it prunes; together they cover level 0 exactly once."""

    mask: torch.Tensor
    """bool, the shape of level 0: True where the texel is kept."""
    indices: torch.Tensor
    """int64 [K, 4] of (b, c, y, x), or [K, 3] of (c, y, x) for an unbatched pyramid: the kept texels, row-major."""
    pruned: torch.Tensor
    """int64 [N, 5] of (b, c, level, y, x), or [N, 4] of (c, level, y, x): the maximal pruned nodes, coarse first, then
    row-major. A node stands for every level-0 texel whose canonical ancestor it is."""
    tested: int
    """How many texels, of all levels, were compared with the threshold."""

    def __repr__(self) -> str:
        return summary(self)


torch.serialization.add_safe_globals([Culled])  # torch.load's weights_only


@operators.verb
def cull(hz: Pyramid, threshold: float | torch.Tensor, backend: Backend = "auto") -> Culled:
    """Keep the level-0 texels that reach a threshold; a coarse texel below it prunes everything under it unseen.

    Shape: any pyramid [B, C, H, W] or [C, H, W] with reduce "max"; see `Culled` for the result.
    Convention: texel j's canonical ancestor at level l is min(j >> l, n_l - 1) along each side, so every texel has one
        parent. The mask equals `hz.levels[0] >= threshold` exactly. NaN is unknown: it is never kept, and a node that
        is NaN never prunes its subtree.

    Args:
        hz: from `hiz(relevance)`. Fewer levels than a full chain start from the coarsest there is.
        threshold: a number, or a tensor [B] with one for each image. Infinities are fine.
        backend: "gl", "torch" or "auto". No gradients.

    Raises:
        InputError: a min or mean pyramid; a threshold that is NaN or of the wrong shape.
        UnsupportedError: a backend that is not available.
        LimitError: a plane too large for the device's storage buffers.
        PyramidChangedError: a level was written to since the pyramid was built.

    Source: Greene, Kass and Miller, "Hierarchical Z-Buffer Visibility" (SIGGRAPH 1993).
    """
    chosen = _choose(hz, threshold, backend)
    hz.check_unchanged()
    thresholds = _thresholds(hz, threshold)
    if chosen.backend == "torch":
        levels = [level.detach() if hz.batched else level.detach()[None] for level in hz.levels]
        return _unbatch(hz, *reference(levels, thresholds))
    return _unbatch(hz, *_gl(context_for(*hz.levels), hz, thresholds))


def _choose(hz: Pyramid, threshold: Any, backend: Backend = "auto") -> Choice:
    dispatch.check_backend(backend)
    checks.hiz_pyramid(hz, "max", "cull")
    for value in (hz.levels[0], threshold):
        checks.no_vmap(value, "cull", "every image keeps and prunes another number of texels. Pass [B, C, H, W].")
    if backend == "gl":
        checks.gl_input(hz.levels[0])
    if backend != "auto":
        return Choice(backend, "asked for")
    # How much it prunes is not known beforehand.
    top = hz.levels[0]
    return dispatch.barred(top, threshold) or dispatch.measured(
        "cull", top.detach(), top.numel(), batch=hz.batch * hz.channels
    )


def _like(hz: Pyramid, *_: Any) -> Culled:
    """What `cull` returns, without values, for lengths that only a run can tell."""
    top, ctx = hz.levels[0], torch.library.get_ctx()
    kept, pruned = ctx.new_dynamic_size(), ctx.new_dynamic_size()
    mask = torch.empty(top.shape, dtype=torch.bool, device=top.device)
    indices = torch.empty(kept, top.ndim, dtype=torch.int64, device=top.device)
    nodes = torch.empty(pruned, top.ndim + 1, dtype=torch.int64, device=top.device)
    return Culled(mask, indices, nodes, torch.empty((), dtype=torch.int64, device="cpu"))  # type: ignore[arg-type]


dispatch.register(cull, _choose)
operators.register(cull, _like, differentiable=False)


def _thresholds(hz: Pyramid, threshold: float | torch.Tensor) -> torch.Tensor:
    """[B] thresholds in level 0's dtype (fp32 for uint8), such that >= says what torch's own comparison says."""
    if isinstance(threshold, torch.Tensor):
        checks.dense(threshold, "threshold")
    try:
        where = threshold.device if isinstance(threshold, torch.Tensor) else torch.device("cpu")
        values = torch.as_tensor(threshold, dtype=torch.float64, device=where).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"threshold is {checks.shown(threshold)}; expected a number or a tensor [B] ({error})."
        ) from None
    if values.ndim > 1 or (values.ndim == 1 and values.shape[0] != hz.batch):
        raise InputError(f"threshold has shape {tuple(values.shape)}; expected a number or [{hz.batch}], one an image.")
    if bool(torch.isnan(values).any()):
        raise InputError("threshold is NaN; nothing compares with it. Pass a number, or infinity to prune everything.")
    dtype = torch.float32 if hz.dtype == torch.uint8 else hz.dtype
    stored = values.to(hz.device, dtype)
    if values.ndim == 1:
        # Torch compares a tensor with a number in the tensor's dtype, but with a tensor in the wider dtype of the two:
        # there a texel reaches the threshold if it reaches the next value that its own dtype has.
        low = stored.double() < values.to(hz.device)
        stored = torch.where(low, _next(stored), stored)
    return stored.expand(hz.batch)


def _next(values: torch.Tensor) -> torch.Tensor:
    """The next larger value of a float dtype."""
    bits = (values + 0.0).view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    up = torch.where(bits < 0, bits - 1, bits + 1)
    return torch.where(values == 0, torch.ones_like(bits), up).view(values.dtype)


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def reference(levels: list[torch.Tensor], thresholds: torch.Tensor) -> Parts:
    """The descent in plain torch, a level at a time: mask, indices, pruned and tested, as in `Culled`, batched.

    In a max pyramid what reaches the threshold has ancestors that do, so nodes are tested whose parents do.
    """
    limit = thresholds[:, None, None, None]
    pruned, tested = [], 0
    above: torch.Tensor | None = None  # which nodes of the level above are below the threshold
    for level in range(len(levels) - 1, -1, -1):
        values = levels[level]
        if level:
            below = _below(values, limit)
        else:
            mask = _below(values, limit).logical_not_() if values.dtype == torch.uint8 else values >= limit
            below = mask.logical_not()
        lost, dropped = (below, 0) if above is None else _first_below(below, above)
        tested += values.numel() - dropped
        pruned.append((level, _places(lost)))
        above = below
    return mask, _places(mask), _joined(pruned), tested


def _first_below(below: torch.Tensor, above: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What is below the threshold and has a parent that is not, and how many have one that is."""
    height, width = below.shape[-2:]
    if (height, width) == (2 * above.shape[-2], 2 * above.shape[-1]):
        parents = above.view(torch.uint8).to(torch.int16).mul_(257).view(torch.bool)  # two bytes a number
        pairs = below.unflatten(-2, (-1, 2)).gt(parents[..., None, :])
        return pairs.view(below.shape), 4 * int(above.count_nonzero())
    parents = _children(above, height, width)
    return below.gt(parents), int(parents.count_nonzero())


_WORDS = 2**12
"""Texels from which a CPU looks for the few that are True eight at a time."""


def _places(mask: torch.Tensor) -> torch.Tensor:
    """`mask.nonzero()` of [B, C, h, w]."""
    texels = mask.view(-1)
    if mask.device.type != "cpu" or len(texels) < _WORDS or len(texels) % 8:
        return mask.nonzero()
    some = texels.view(torch.int64).nonzero()[:, 0]
    if len(some) > len(texels) // 96:
        return mask.nonzero()
    within = texels.view(-1, 8)[some].view(-1).nonzero()[:, 0]
    place = some[within >> 3] * 8 + (within & 7)
    columns = []
    for n in mask.shape[:0:-1]:
        # A division of 64 bits takes as long as all the rest.
        bits = n.bit_length() - 1 if n & (n - 1) == 0 else None
        columns.append(place % n if bits is None else place & (n - 1))
        place = place // n if bits is None else place >> bits
    return torch.stack([place, *columns[::-1]], dim=1)


def _below(level: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    if level.dtype != torch.uint8:
        return level < limit
    # In counts: compared with another dtype, all of the level would be converted first.
    counts = limit.ceil().clamp(0, 256)
    return (level < counts.clamp(max=255).to(torch.uint8)).logical_or_(counts == 256)


def _children(keep: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """A mask one level down: True where the canonical parent is."""
    rows = (torch.arange(height, device=keep.device) >> 1).clamp(max=keep.shape[-2] - 1)
    columns = (torch.arange(width, device=keep.device) >> 1).clamp(max=keep.shape[-1] - 1)
    return keep.index_select(-2, rows).index_select(-1, columns)


def _joined(nodes: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """(b, c, y, x) of nodes of some levels to (b, c, level, y, x) of all."""
    found = nodes[0][1].new_empty(sum(len(places) for _, places in nodes), 5)
    for part, (level, places) in zip(found.split([len(places) for _, places in nodes]), nodes, strict=True):
        part[:, :2], part[:, 2], part[:, 3:] = places[:, :2], level, places[:, 2:]
    return found


def _unbatch(hz: Pyramid, mask: torch.Tensor, indices: torch.Tensor, pruned: torch.Tensor, tested: int) -> Culled:
    if hz.batched:
        return Culled(mask, indices, pruned, tested)
    return Culled(mask[0], indices[:, 1:], pruned[:, 1:], tested)


def _gl(ctx: Context, hz: Pyramid, thresholds: torch.Tensor) -> Parts:
    planes, sizes = hz.batch * hz.channels, [(level.shape[-2], level.shape[-1]) for level in hz.levels]
    # The largest binding of a plane: level 0, or the list of what survives of level 1, a word a node.
    words = math.prod(sizes[1]) if len(sizes) > 1 else 0
    nbytes = max(hz.dtype.itemsize * math.prod(sizes[0]), 4 * words)
    at_once = min(planes, (ctx.limits.storage_bytes - 1024) // nbytes)
    if at_once < 1:
        raise LimitError(
            f"a plane of {sizes[0][1]} x {sizes[0][0]} needs {nbytes} bytes in one storage-buffer binding, and this "
            f"device allows {ctx.limits.storage_bytes}. Use backend='torch'."
        )
    with ctx.active(hz.device):
        sources = [hz.planes(ctx, level) for level in range(len(hz))]
        found = [
            _descend(ctx, hz, sources, thresholds, first, min(at_once, planes - first))
            for first in range(0, planes, at_once)
        ]
    pruned = []
    for level in range(len(sizes) - 1, -1, -1):
        parts = [states[level] for states, _ in found]
        states = (torch.cat(parts) if len(parts) > 1 else parts[0]).view(hz.batch, hz.channels, *sizes[level])
        pruned.append((level, (states == _PRUNED).nonzero()))
    mask = states.bitwise_and_(_KEPT).view(torch.bool)
    kept, nodes = mask.nonzero(), _joined(pruned)
    # What was looked at was kept, pruned or, above level 0, survived.
    return mask, kept, nodes, len(kept) + len(nodes) + sum(survived for _, survived in found)


def _descend(
    ctx: Context, hz: Pyramid, sources: list[Planes], thresholds: torch.Tensor, first: int, count: int
) -> tuple[list[torch.Tensor], int]:
    """Of the planes from `first` on: the states of each level's nodes, uint8 [count, 1, h, w], to be read once the
    verb's GL work has ended; and how many nodes above level 0 survived."""
    gl, levels = ctx.gl, len(hz)
    planes = [source.layers(first, count) for source in sources]
    # Level 0 in a buffer of its own, as it becomes the mask that is returned.
    sizes = [(source.height, source.width) for source in planes]
    mask, texels = packed_planes(ctx, count, 1, sizes[:1], torch.uint8)
    others, nodes = packed_planes(ctx, count, 1, sizes[1:], torch.uint8)
    states = mask + others
    for own, some in ((mask, sizes[:1]), (others, sizes[1:])):
        if own:
            own[0].bind(ctx, 3, 0, 0)  # on CUDA the buffer is torch's till then, and earlier work may still read it
            clear(gl, own[0].buffer.glo, packed_bytes(count, 1, some, torch.uint8))
    # Four words a level (workgroups in x, y and z, and survivors), the thresholds.
    words = torch.zeros(4 * levels + hz.batch, dtype=torch.int32, device="cpu")
    words[: 4 * levels].view(-1, 4)[:, 1:3] = 1
    words[4 * levels :] = _keys(thresholds, hz.dtype)
    counters = ctx.private.lease(words.nbytes).write(words)
    counters.item.bind(4, 0, counters.nbytes)
    # By turns: of level 1, 3, ... and of level 2, 4, ...
    survivors = [ctx.private.lease(4 * (planes[level].elements if level < levels else 1)) for level in (1, 2)]
    for level in range(levels - 1, -1, -1):
        source, above = planes[level], planes[min(level + 1, levels - 1)]
        origin = source.bind(ctx, 0, 0, source.elements - 1)
        survivors[level % 2].item.bind(1, 0, survivors[level % 2].nbytes)
        survivors[(level + 1) % 2].item.bind(2, 0, survivors[(level + 1) % 2].nbytes)
        states[level].bind(ctx, 3, 0, source.elements - 1)
        roots = level == levels - 1
        defines = {"LEVEL_ZERO": level == 0, "ROOTS": roots, **word_defines(source.dtype)}
        program = ctx.programs.compute("cull.comp", **defines)
        program.set(
            u_level=level,
            u_levels=levels,
            u_size=(source.width, source.height),
            u_above_size=(above.width, above.height),
            u_first_value=origin,
            u_first_plane=first,
            u_channels=hz.channels,
            u_roots=source.elements,
            u_most_groups=MAX_GROUPS,
        )
        if roots:
            program.dispatch_groups(min(-(-source.elements // LOCAL_SIZE), MAX_GROUPS), 1, 1)
        else:
            program.dispatch_indirect(counters.glo, 16 * (level + 1))
        gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT | G.COMMAND_BARRIER_BIT)
    survived = counters.read(torch.int32, 4 * levels).view(-1, 4)[1:, 3]
    return texels + nodes, int(survived.sum())


def _keys(thresholds: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Thresholds as the ordered integers of order.glsl, reinterpreted as int32."""
    if dtype == torch.uint8:  # a count reaches a threshold if it reaches the next whole count; 256 is never reached
        return thresholds.ceil().clamp(0, 256).int()
    width = 8 * dtype.itemsize
    bits = (thresholds.to(dtype) + 0.0).view(torch.int16 if width == 16 else torch.int32).long()  # -0 becomes 0
    bits &= 2**width - 1
    sign = 2 ** (width - 1)
    keys = torch.where(bits >= sign, 2**width - 1 - bits, bits | sign)
    return torch.where(keys >= 2**31, keys - 2**32, keys).int()
