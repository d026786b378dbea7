"""Whether invocations of a subgroup exchange values here as shaders/lanes.glsl says. Nothing needs them to."""

from __future__ import annotations

import math

import torch

from gpu_lod.bridge import gl as G
from gpu_lod.context import Context
from gpu_lod.errors import ShaderError

LEAST, MOST = 16, 64
"""Invocations of a subgroup that shaders ask for: of what is done in lanes there is as much as fills one."""
_FIELDS = 8
"""Of an invocation in what lanes.comp finds."""
_MASKS = (1, 2, 3, 4, 8, 12)


def usable(ctx: Context) -> bool:
    """True where the device has them, tuning wants them, and a first try went well. Runs inside `ctx.active()`."""
    limits = ctx.limits
    if not ctx.tuning.subgroups or not LEAST <= limits.subgroup <= MOST:
        return False
    if limits.lanes is None:
        limits.lanes = _tried(ctx)
    return limits.lanes


def _tried(ctx: Context) -> bool:
    """In a workgroup like those that will use them: a driver may run it in narrower subgroups than it names."""
    shape = ctx.tuning.single_pass
    try:
        program = ctx.programs.compute("lanes.comp", THREADS_X=shape[0], THREADS_Y=shape[1])
    except ShaderError:
        return False
    threads = math.prod(shape)
    found = ctx.private.lease(4 * _FIELDS * threads).clear()
    found.item.bind(0, 0, found.nbytes)
    program.dispatch_groups(1, 1, 1)
    ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
    rows: list[list[int]] = found.read(torch.int32, _FIELDS * threads).view(threads, _FIELDS).tolist()
    lanes = sorted(lane for _, lane, *_ in rows)
    return lanes == list(range(threads)) and all(
        meet == 1 and others == [lane ^ mask for mask in _MASKS] for meet, lane, *others in rows
    )
