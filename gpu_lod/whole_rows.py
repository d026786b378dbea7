"""Results of small dtypes whose rows are no whole words, for shaders that write whole words of a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from gpu_lod.context import Context
from gpu_lod.program import LOCAL_SIZE, MAX_GROUPS
from gpu_lod.transfer import ALIGNMENT, READ_BARRIERS, Planes, new_planes, scratch_planes

_ROWS = 256
"""Rows that begin at aligned places, of whatever length."""


def new_rows(
    ctx: Context, shape: tuple[int, ...], dtype: torch.dtype, *, longer: bool = True
) -> tuple[Planes, torch.Tensor, Callable[[], None]]:
    """Planes to write, the tensor [..., height, width] that they become, and what is to be called in between.

    Where rows are no whole words, each word would have to be made by itself, element by element, as it may lie over the
    end of a row or of a plane. A software renderer makes rows that are longer in a fraction of that time, and copies
    them. Elements beyond the width may have any value.

    Args:
        longer: there is memory for both at once.
    """
    height, width = shape[-2:]
    target, result = new_planes(ctx, shape, dtype)
    per_word = target.per_word
    if longer and ctx.software and width % per_word and width >= 2 * per_word:
        made = scratch_planes(ctx, (target.count, height, -(-width // 4) * 4), dtype)
        step = min(MAX_GROUPS, (ctx.limits.storage_bytes - 2 * ALIGNMENT) // (width * dtype.itemsize)) // _ROWS * _ROWS
        if made.fetchable(ctx) and step:
            return made, result, partial(_narrower, ctx, made, target, step)
    return target, result, lambda: None


def _narrower(ctx: Context, source: Planes, target: Planes, step: int) -> None:
    """So many rows at a time."""
    ctx.gl.MemoryBarrier(READ_BARRIERS)
    per_word, row = target.per_word, target.width
    group = 2 * per_word
    origin = source.fetch_words(1)
    program = ctx.programs.compute("narrower_rows.comp", PER_WORD=per_word)
    rows = target.count * target.height
    for first in range(0, rows, step):
        count = min(step, rows - first)
        # Buffers are a multiple of 1 KiB: the last group stays inside.
        index = target.bind(ctx, 0, first * row, -(-(first + count) * row // group) * group - 1)
        assert index == -first * row, "rows begin where a binding may"
        words = source.width // per_word
        program.set(u_width=row, u_source_first=origin + first * words, u_source_words=words)
        program.dispatch_groups(math.ceil(row / group / LOCAL_SIZE), count, 1)
