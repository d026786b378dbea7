"""How much memory a call takes at its peak, counted, not measured: the same call gives the same number."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

R = TypeVar("R")


def peak_bytes(call: Callable[[], R]) -> tuple[R, int]:
    """What a call returns, and the most bytes that tensors made in it held at once, the returned ones too.

    Convention: a tensor counts from the operator that made it until the last that shares its memory is gone; views
        count once, and what was there before not at all. What an operator needs while it runs is not seen, nor is
        memory that is no tensor's: numpy's, and buffers of OpenGL.
    """
    with _Count() as count:
        result = call()
    return result, count.peak


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._held: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and what keeps the compiler out takes longer than most operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in _storages(args, (kwargs or {}).values())}
        result = func(*args, **(kwargs or {}))
        for storage in _storages([result]):
            key = id(storage)
            if key not in before and key not in self._held:
                self.live += storage.nbytes()
                self._held[key] = weakref.ref(storage, self._dropper(key, storage.nbytes()))
        self.peak = max(self.peak, self.live)
        return result

    def _dropper(self, key: int, size: int) -> Callable[[Any], None]:
        def drop(_: Any) -> None:
            self.live -= size
            del self._held[key]

        return drop


def _storages(*several: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Of tensors among values, and in lists of them: one Python object a storage, as long as the storage lives."""
    for values in several:
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value.untyped_storage()
            elif isinstance(value, (list, tuple)):
                yield from _storages(value)
