"""Tensors that are made once, of what does not change."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch

from gpu_lod.errors import CaptureError

P = ParamSpec("P")
R = TypeVar("R")


def cached(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that makes tensors of hashable arguments: `functools.lru_cache`, of ordinary tensors whoever
    asks first. One made in inference mode could not be used where gradients are asked for, later; one that is traced
    stands for no values."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        remembered = functools.lru_cache(maxsize)(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch._C._len_torch_dispatch_stack():
                return function(*args, **kwargs)
            with torch.inference_mode(False):
                return remembered(*args, **kwargs)  # type: ignore[arg-type]

        return call

    return decorate


MOST_BYTES = 64 * 2**20
"""Of what `constant` keeps."""
_TRACES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))
_kept: dict[Hashable, torch.Tensor] = {}
_lock = threading.Lock()


def constant(device: torch.device, make: Callable[..., torch.Tensor], *arguments: Hashable) -> torch.Tensor:
    """`make(*arguments)`, a CPU tensor that is always the same, on a device: to be read and never written to. It is
    brought there once and never let go of: bringing it anew would wait for all that a GPU has to do, no CUDA graph may
    do that, and a graph reads where it stood.

    Raises:
        CaptureError: a CUDA graph is being captured, and it is not on the device yet.
    """
    if torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACES):
        return make(*arguments).to(device)
    key = make, arguments, device
    found = _kept.get(key)
    if found is None:
        if capturing(device):
            raise CaptureError(
                "a CUDA graph is being captured, and a table of this size is not on the device yet. Call the function "
                "once with tensors of these shapes before the capture."
            )
        with torch.inference_mode(False), _lock:
            found = make(*arguments).to(device)
            room = sum(kept.nbytes for kept in _kept.values()) + found.nbytes <= MOST_BYTES
            if room and type(found) is torch.Tensor:  # and not what a mode of torch made of it
                found = _kept.setdefault(key, found)
    return found


def numbers(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number, or nested tuples of them, as a `constant`."""
    return constant(device, _numbers, values, dtype)


def _numbers(values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def capturing(device: torch.device) -> bool:
    """True while the current stream of a GPU is captured into a CUDA graph: nothing can be read on the host then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
