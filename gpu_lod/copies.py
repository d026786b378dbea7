"""Copies into memory that OpenGL works on next."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd.graph import increment_version

from gpu_lod import recording
from gpu_lod.context import Context

SERIAL = 2**15
"""Elements below which torch copies on the calling thread."""

PARALLEL = 2**19
"""Elements from which on converting and interleaving take so long that more threads save more than they cost."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def put(ctx: Context, target: torch.Tensor, source: torch.Tensor | float) -> None:
    """`target.copy_(source)`, or `fill_` of a number.

    For a software renderer on one thread: after an operation on several, torch's other threads spin for milliseconds,
    each on a core that the renderer is about to need, and shaders took up to twice as long.
    """
    small = target.numel() < SERIAL or target.device.type != "cpu" or not ctx.software
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if not isinstance(source, torch.Tensor):
            if small:
                target.fill_(source)
                return
            source = target.new_tensor(source).expand_as(target)
        source = source.detach()
        if small:
            target.copy_(source)
        elif target.dtype == source.dtype and source.device == target.device and not source.is_neg():
            if target.is_contiguous() or target.numel() < PARALLEL or not any(source.stride()):
                _bits(target, source)
            else:
                target.copy_(source)
        elif target.numel() < PARALLEL:
            _in_pieces(target, source.expand_as(target))
        else:
            target.copy_(source)


def _in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.numel() < SERIAL:
        target.copy_(source)
        return
    along = next(dim for dim, n in enumerate(target.shape) if n > 1)  # pieces of memory, where it is contiguous
    for part in zip(target.tensor_split(2, along), source.tensor_split(2, along), strict=True):
        _in_pieces(*part)


def _bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """numpy copies on the calling thread."""
    found = recording.current()
    if found is None:
        _copy_bits(target, source)
        return
    found.write(_copy_bits, (target, source), [target, source])
    with found.unwatched():
        _copy_bits(target, source)


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    word = _WORDS[target.dtype.itemsize]
    np.copyto(target.view(word).numpy(), source.view(word).numpy())
    if not target.is_inference():
        increment_version(target)
