"""Tensors that are made once, of what does not change."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from gpu_lod.errors import CaptureError

MOST_BYTES = 64 * 2**20
"""Of what `constant` keeps on a device."""
_MOST_ASKED = 4096
_LEAST_BYTES = 512
"""That a tensor takes of a GPU's memory."""
_TRACES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def constant(device: torch.device, make: Callable[..., torch.Tensor], *arguments: Hashable) -> torch.Tensor:
    """`make(*arguments)`, a CPU tensor that is always the same, on a device: to be read and never written to. It is
    brought there once and kept as long as it is used now and then: bringing it anew would wait for all that a GPU has
    to do, and no CUDA graph may. What a graph reads is kept for good.

    Raises:
        CaptureError: a CUDA graph is being captured, and it is not on the device yet.
    """
    if torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACES):
        return make(*arguments).to(device)
    return _constants.get(device, make, arguments)


_Kept = tuple[torch.Tensor, Any]
"""A tensor, and the stream that brought it to a GPU."""


def known(device: torch.device, make: Callable[..., torch.Tensor], *arguments: Hashable) -> torch.Tensor | None:
    """The same of what can be done without: None if it was never asked for before, as its size may never come again."""
    if torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACES):
        return None
    return _constants.get(device, make, arguments) if _constants.asked(device, make, arguments) else None


class _Constants:
    """Those of each device that were used last."""

    def __init__(self) -> None:
        self.after_fork()
        self._kept: defaultdict[torch.device, OrderedDict[Hashable, _Kept]] = defaultdict(OrderedDict)
        self._bytes: Counter[torch.device] = Counter()
        self._captured: dict[Hashable, torch.Tensor] = {}
        self._asked: OrderedDict[Hashable, None] = OrderedDict()

    def after_fork(self) -> None:
        """A thread that is not in the child may have held the lock."""
        self._lock = threading.Lock()

    def asked(self, device: torch.device, make: Callable[..., torch.Tensor], arguments: Any) -> bool:
        """Whether it is there, or was asked for before and can be brought."""
        key = make, arguments
        if key in self._kept[device]:
            return True
        if capturing(device):
            return (device, key) in self._captured
        with self._lock:
            before = (device, key) in self._asked
            self._asked[device, key] = None
            self._asked.move_to_end((device, key))
            for _ in range(len(self._asked) - _MOST_ASKED):
                self._asked.popitem(last=False)
        return before

    def get(self, device: torch.device, make: Callable[..., torch.Tensor], arguments: Any) -> torch.Tensor:
        key, kept = (make, arguments), self._kept[device]
        with self._lock:
            found = kept.get(key)
            if found is not None:
                kept.move_to_end(key)
        captures = capturing(device)
        if found is None:
            if captures:
                if (device, key) in self._captured:
                    return self._captured[device, key]
                raise CaptureError(
                    "a CUDA graph is being captured, and a table of this size is not on the device. Call the function "
                    "with tensors of these shapes, and the same arguments, just before the capture."
                )
            with torch.inference_mode(False):  # and not under the lock: it may take others to make
                made = make(*arguments).to(device)
            if type(made) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(made):
                return made  # a transform's, or a mode's: nobody else's
            found = made, _stream(device)
            self._keep(device, key, found)
        tensor, stream = found
        if captures:
            self._captured[device, key] = tensor
        elif stream is not None and (now := _stream(device)) != stream:
            tensor.record_stream(now)  # its memory is not for others before this one is through
        return tensor

    def _keep(self, device: torch.device, key: Hashable, found: _Kept) -> None:
        with self._lock:
            kept = self._kept[device]
            if key in kept:  # by another thread
                return
            kept[key] = found
            self._bytes[device] += max(found[0].nbytes, _LEAST_BYTES)
            for _ in range(len(kept) - 1):
                if self._bytes[device] <= MOST_BYTES:
                    break
                oldest, _ = kept.popitem(last=False)[1]
                self._bytes[device] -= max(oldest.nbytes, _LEAST_BYTES)


_constants = _Constants()
os.register_at_fork(after_in_child=_constants.after_fork)


def _stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def numbers(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number, or nested tuples of them, as a `constant`."""
    return constant(device, _numbers, values, dtype)


def _numbers(values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def capturing(device: torch.device) -> bool:
    """True while the current stream of a GPU is captured into a CUDA graph: nothing can be read on the host then."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
