"""What a forward keeps for its backward, and that nobody wrote to it in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gpu_lod import checks
from gpu_lod.errors import InputChangedError
from gpu_lod.pyramid import Pyramid

_CHANGED = (
    "an input or a result of a verb was modified by an inplace operation between the forward and the backward, which "
    "reads it again. Write to a clone of it, or after the backward."
)
_UNWATCHED = contextlib.nullcontext()


def watched(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Whatever torch keeps inside for the gradients that a verb's arguments ask for, the backward says by name what was
    written to since.

    A program's own hooks, as of checkpoints, come first: there torch's error is what is said.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _UNWATCHED
    if not any(map(_asks, values)) or not _free():
        return _UNWATCHED
    return saved_tensors_hooks(_pack, _unpack)


def _asks(value: Any) -> bool:
    if isinstance(value, Pyramid):
        return any(level.requires_grad for level in value.levels)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _free() -> bool:
    """Whether torch takes hooks here, and has none."""
    autograd: Any = torch._C._autograd
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)  # older ones do not say
    return bool(
        autograd._saved_tensors_hooks_is_enabled() and top is not None and top(False) is None and not checks.traced()
    )


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor.detach(), tensor._version  # a node that kept its own result would never be freed


def _unpack(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = kept
    if tensor._version != version:
        raise InputChangedError(_CHANGED)
    return tensor


def saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    """What a forward saved for its backward.

    Raises:
        InputChangedError: it was written to since.
    """
    try:
        return tuple(ctx.saved_tensors)
    except RuntimeError as error:
        if "inplace" not in str(error) or isinstance(error, InputChangedError):
            raise
        raise InputChangedError(_CHANGED) from error
