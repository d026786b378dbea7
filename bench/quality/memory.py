"""Peak memory of a piece of work: the same number each time, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those that were made inside.

    Storages count whole and once, however many views they have, from the operation that returned them until nothing
    holds them. What an operation allocates and frees within itself is not seen, nor what the allocator rounds up to,
    nor what was there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor) and not self._known(given):
                storage = StorageWeakRef(given.untyped_storage())
                self._before[storage.cdata] = storage
        found = func(*args, **(kwargs or {}))
        for made in tree_leaves(found):
            if isinstance(made, torch.Tensor) and not self._known(made):
                storage = StorageWeakRef(made.untyped_storage())
                self._held[storage.cdata] = (storage, made.untyped_storage().nbytes())
        self._held = {key: entry for key, entry in self._held.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._held.values()))
        return found

    def _known(self, tensor: torch.Tensor) -> bool:
        """Whether its storage counts already, or never does."""
        key = tensor.untyped_storage()._cdata
        before = self._before.get(key)
        if before is not None and not before.expired():
            return True
        held = self._held.get(key)
        return held is not None and not held[0].expired()


def peak_bytes(work: Callable[[], Any]) -> int:
    """Of a call; what it returns counts too."""
    with Peak() as peak, torch.no_grad():
        work()
    return peak.bytes
