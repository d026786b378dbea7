"""Culling: which texels of a relevance map reach a threshold, found from the root of its Hi-Z pyramid down."""

from __future__ import annotations

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
from gpu_lod.transfer import Planes, word_defines


@dataclass(frozen=True, eq=False)
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
    checks.gl_input(hz.levels[0])
    return _unbatch(hz, *_gl(context_for(*hz.levels), hz, thresholds))


def _choose(hz: Pyramid, threshold: Any, backend: Backend = "auto") -> Choice:
    dispatch.check_backend(backend)
    checks.hiz_pyramid(hz, "max", "cull")
    for value in (hz.levels[0], threshold):
        checks.no_vmap(value, "cull", "every image keeps and prunes another number of texels. Pass [B, C, H, W].")
    if backend != "auto":
        return Choice(backend, "asked for")
    # How much it prunes is not known beforehand.
    top = hz.levels[0]
    return dispatch.barred(top, threshold) or dispatch.measured("cull", top, top.numel(), batch=hz.batch * hz.channels)


def _like(hz: Pyramid, *_: Any) -> Culled:
    """What `cull` returns, without values, for lengths that only a run can tell."""
    top, ctx = hz.levels[0], torch.library.get_ctx()
    kept, pruned = ctx.new_dynamic_size(), ctx.new_dynamic_size()
    mask = torch.empty(top.shape, dtype=torch.bool, device=top.device)
    indices = torch.empty(kept, top.ndim, dtype=torch.int64, device=top.device)
    nodes = torch.empty(pruned, top.ndim + 1, dtype=torch.int64, device=top.device)
    return Culled(mask, indices, nodes, torch.empty((), dtype=torch.int64))  # type: ignore[arg-type]


dispatch.register(cull, _choose)
operators.register(cull, _like, differentiable=False)


def _thresholds(hz: Pyramid, threshold: float | torch.Tensor) -> torch.Tensor:
    """[B] thresholds in level 0's dtype (fp32 for uint8), such that >= says what torch's own comparison says."""
    if isinstance(threshold, torch.Tensor) and (threshold.is_complex() or threshold.layout is not torch.strided):
        raise InputError(f"threshold is a {threshold.layout} {threshold.dtype} tensor; expected real numbers, dense.")
    try:
        where = None if hasattr(threshold, "__dlpack__") else torch.device("cpu")
        values = torch.as_tensor(threshold, dtype=torch.float64, device=where).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"threshold is {threshold!r}; expected a number or a tensor [B] ({error}).") from None
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
    """The descent in plain torch, a level at a time: mask, indices, pruned and tested, as in `Culled`, batched."""
    limit = thresholds[:, None, None, None]
    pruned, tested = [], 0
    alive: torch.Tensor | None = None  # nodes to test at this level
    for level in range(len(levels) - 1, 0, -1):
        below = levels[level] < limit
        if alive is not None:
            tested += int(alive.sum())
            below &= alive
        else:
            tested += below.numel()
        pruned.append(_with_level(below.nonzero(), level))
        keep = ~below if alive is None else alive & ~below
        alive = _children(keep, *levels[level - 1].shape[-2:])
    mask = levels[0] >= limit
    tested += mask.numel() if alive is None else int(alive.sum())
    pruned.append(_with_level((~mask if alive is None else alive & ~mask).nonzero(), 0))
    return mask, mask.nonzero(), torch.cat(pruned), tested


def _children(keep: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """A mask one level down: True where the canonical parent is."""
    rows = (torch.arange(height, device=keep.device) >> 1).clamp(max=keep.shape[-2] - 1)
    columns = (torch.arange(width, device=keep.device) >> 1).clamp(max=keep.shape[-1] - 1)
    return keep.index_select(-2, rows).index_select(-1, columns)


def _with_level(nodes: torch.Tensor, level: int) -> torch.Tensor:
    """(b, c, y, x) to (b, c, level, y, x)."""
    return torch.cat([nodes[:, :2], torch.full_like(nodes[:, :1], level), nodes[:, 2:]], dim=1)


def _unbatch(hz: Pyramid, mask: torch.Tensor, indices: torch.Tensor, pruned: torch.Tensor, tested: int) -> Culled:
    if hz.batched:
        return Culled(mask, indices, pruned, tested)
    return Culled(mask[0], indices[:, 1:], pruned[:, 1:], tested)


def _gl(ctx: Context, hz: Pyramid, thresholds: torch.Tensor) -> Parts:
    height, width = hz.size
    planes, area = hz.batch * hz.channels, height * width
    # Work lists hold a word a texel, in one binding.
    at_once = min(planes, (ctx.limits.storage_bytes - 1024) // (8 * area))
    if at_once < 1:
        raise LimitError(
            f"a plane of {width} x {height} needs a work list of {8 * area} bytes, and this device's storage-buffer "
            f"bindings end at {ctx.limits.storage_bytes}. Use backend='torch'."
        )
    with ctx.active(hz.device):
        sources = [hz.planes(ctx, level) for level in range(len(hz))]
        found = [
            _descend(ctx, hz, sources, thresholds, first, min(at_once, planes - first))
            for first in range(0, planes, at_once)
        ]
    shape = (hz.batch, hz.channels, height, width)
    masks = [part.mask for part in found]
    mask = (torch.cat(masks) if len(masks) > 1 else masks[0]).view(shape)
    pruned = torch.cat([_decode(hz, part.nodes[: part.pruned].cpu(), part.first) for part in found])
    if len(found) > 1:  # coarse first over all parts
        pruned = pruned[torch.argsort(pruned[:, 2], descending=True, stable=True)]
    return mask, mask.nonzero(), pruned.to(hz.device), sum(part.tested for part in found)


@dataclass(frozen=True)
class _Descent:
    """What the shader found in the planes from `first` on. Tensors: to be read once the verb's GL work has ended."""

    first: int
    mask: torch.Tensor
    """bool, flat."""
    nodes: torch.Tensor
    """int32 [texels, 2], of which the first `pruned` are (level, flat index)."""
    pruned: int
    tested: int


def _descend(
    ctx: Context, hz: Pyramid, sources: list[Planes], thresholds: torch.Tensor, first: int, count: int
) -> _Descent:
    gl, levels = ctx.gl, len(hz)
    planes = [source.layers(first, count) for source in sources]
    elements, top = planes[0].elements, planes[-1]
    nbytes = -(-elements // 4) * 4
    mask_lease, nodes_lease = ctx.bridge.lease(nbytes), ctx.bridge.lease(8 * elements)
    mask = mask_lease.tensor(torch.bool, (elements,))
    nodes = nodes_lease.tensor(torch.int32, (elements, 2))
    lists = [ctx.private.lease(4 * elements), ctx.private.lease(4 * elements)]
    lists[levels % 2].write(torch.arange(top.elements, dtype=torch.int32, device="cpu"))
    # Four words a level (workgroups in x, y and z, and nodes to test), the number of pruned nodes, the thresholds.
    words = torch.zeros(4 * (levels + 1) + 1 + hz.batch, dtype=torch.int32, device="cpu")
    groups = words[: 4 * (levels + 1)].view(-1, 4)
    groups[:, 1:3] = 1
    groups[levels, 0], groups[levels, 3] = min(-(-top.elements // LOCAL_SIZE), MAX_GROUPS), top.elements
    words[4 * (levels + 1) + 1 :] = _keys(thresholds, hz.dtype)
    counters = ctx.private.lease(words.nbytes).write(words)
    mask_lease.item.bind(5, 0, nbytes)
    clear(gl, mask_lease.item.glo, nbytes)
    nodes_lease.item.bind(3, 0, nodes_lease.nbytes)
    counters.item.bind(4, 0, counters.nbytes)
    for level in range(levels - 1, -1, -1):
        source, below = planes[level], planes[max(level - 1, 0)]
        origin = source.bind(ctx, 0, 0, source.elements - 1)
        tested, following = lists[(level + 1) % 2], lists[level % 2]
        tested.item.bind(1, 0, tested.nbytes)
        following.item.bind(2, 0, following.nbytes)
        program = ctx.programs.compute("cull.comp", LEVEL_ZERO=level == 0, **word_defines(source.dtype))
        program.set(
            u_level=level,
            u_levels=levels,
            u_size=(source.width, source.height),
            u_below_size=(below.width, below.height),
            u_first_value=origin,
            u_first_plane=first,
            u_channels=hz.channels,
            u_most_groups=MAX_GROUPS,
        )
        program.dispatch_indirect(counters.glo, 16 * (level + 1))
        gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT | G.COMMAND_BARRIER_BIT)
    words = counters.read(torch.int32, len(words))
    tests = int(words[: 4 * (levels + 1)].view(-1, 4)[1:, 3].sum())
    return _Descent(first, mask, nodes, int(words[4 * (levels + 1)]), tests)


def _decode(hz: Pyramid, nodes: torch.Tensor, first: int) -> torch.Tensor:
    """(level, flat index) of planes from `first` on, in any order, to sorted (b, c, level, y, x)."""
    sizes = torch.tensor([level.shape[-2:] for level in hz.levels], device="cpu")
    level, flat = nodes.long().unbind(dim=1)
    # Coarse first, then row-major: the order in which invocations append is not defined. By index_select, as brackets
    # wake torch's other threads for a few thousand nodes.
    order = torch.argsort((len(hz) - level) * 2**40 + flat)
    level, flat = level.index_select(0, order), flat.index_select(0, order)
    height, width = sizes.index_select(0, level).unbind(dim=1)
    plane = flat // (height * width)
    in_plane = flat - plane * height * width
    plane = plane + first
    columns = [plane // hz.channels, plane % hz.channels, level, in_plane // width, in_plane % width]
    return torch.stack(columns, dim=1)


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
