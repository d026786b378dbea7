"""The registers generator: up to three levels of a mip chain a dispatch (shaders/several_levels.comp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpu_lod.context import Context
from gpu_lod.pyramid import Reduce
from gpu_lod.transfer import READ_BARRIERS, Planes, parts, rows_of, scratch_planes, word_defines, wrapped

LEVELS_AT_ONCE = 3
"""Levels a dispatch: four would take 16 x 16 texels an invocation, more than registers hold."""


def reduce_chain(ctx: Context, chain: Sequence[Planes], reduce: Reduce, one_level: Callable[..., None]) -> None:
    """Make the levels of a chain below level 0.

    Args:
        one_level: (source, target, scratch or None, whether the source is the scratch of the level above) makes a level
            that cannot be made together with the next one: of a level with an odd side, or whose rows are no whole
            words.

    Raises:
        LimitError: a row of it does not fit the device's storage-buffer bindings.
    """
    dtype = chain[0].dtype
    wide = reduce == "mean" and dtype != torch.float32
    source, last, level = chain[0], len(chain) - 1, 0
    while level < last:
        count = together(chain, level)
        end = level + max(count, 1)
        target = chain[end]
        scratch = None
        if wide and end < last:
            scratch = scratch_planes(ctx, (target.count, target.height, target.width), torch.float32)
        if count < 2:
            one_level(source, target, scratch, wide and level > 0)
        else:
            _several(ctx, source, chain[level + 1 : end + 1], scratch, reduce, wide and level > 0)
        source, level = scratch or target, end


def together(chain: Sequence[Planes], level: int) -> int:
    """How many levels below this one can be made at once."""
    count = 0
    if chain[level].offset % 16:  # the image stands where the caller placed it
        return 0
    while count < LEVELS_AT_ONCE and level + count + 1 < len(chain):
        above, below = chain[level + count], chain[level + count + 1]
        if above.height % 2 or above.width % 2 or below.width % below.per_word:
            break
        count += 1
    return count


def _several(
    ctx: Context, source: Planes, targets: Sequence[Planes], scratch: Planes | None, reduce: Reduce, source_wide: bool
) -> None:
    last = targets[-1]
    fetched = source.fetchable(ctx)
    # As (binding, planes, rows of them to a row of the last level).
    bound = [] if fetched else [(0, source, 1 << len(targets))]
    bound += [(1 + i, target, 1 << (len(targets) - 1 - i)) for i, target in enumerate(targets)]
    if scratch is not None:
        bound.append((4, scratch, 1))

    def fits(planes: int, rows: int) -> bool:
        return all(target.span_fits(ctx, *rows_of(target, 0, planes, 0, rows * scale)) for _, target, scale in bound)

    program = ctx.programs.compute(
        "several_levels.comp",
        **word_defines(last.dtype),
        **{f"REDUCE_{reduce.upper()}": True},
        LEVELS=len(targets),
        FETCHED=fetched,
        SOURCE_WIDE=source_wide,
        KEEP_WIDE=scratch is not None,
        LOCAL_SIZE=ctx.tuning.registers,
    )
    program.set(u_size=(last.width, last.height))
    words = last.width // last.per_word
    origin = source.fetch_words(0, 4) * source.per_word if fetched else 0
    for first, planes, row, end in parts(ctx, last.count, (0, last.height), fits, source.width):
        firsts = [origin + first * source.area, 0, 0, 0, 0]
        for binding, target, scale in bound:
            index = target.bind(ctx, binding, *rows_of(target, first, planes, row * scale, end * scale))
            firsts[binding] = wrapped(index + first * target.area)
        program.set(u_firsts=tuple(firsts[:4]), u_first_wide=firsts[4], u_first_row=row)
        program.dispatch_groups(-(-words // ctx.tuning.registers), end - row, planes)
        ctx.gl.MemoryBarrier(READ_BARRIERS)  # for the next part too, which may read the buffer that this one writes to
