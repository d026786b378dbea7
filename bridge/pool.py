"""A pool of GL objects whose finalizers never touch GL.

An object leaves the pool as a `Lease`. When the last reference to the lease dies, on whatever thread and whenever the
garbage collector likes, its object is only put on a queue; the next `drain()`, made with the context current, makes it
idle or deletes it.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from gpu_lod.errors import BufferMovedError


class Pooled(Protocol):
    """What a pool holds: a GL object with a size class."""

    @property
    def key(self) -> Hashable: ...

    @property
    def nbytes(self) -> int: ...

    def delete(self) -> None:
        """Delete the GL object; called only with its context current."""


T = TypeVar("T")
P = TypeVar("P", bound=Pooled)

_holding = threading.local()


@contextmanager
def holding(held: list[Any]) -> Iterator[None]:
    """Keep in the list what this thread leases, and what else `hold` is told of."""
    before = getattr(_holding, "held", None)
    _holding.held = held
    try:
        yield
    finally:
        _holding.held = before


def hold(thing: Any) -> None:
    """Say that GL commands of this thread refer to memory of this thing, which somebody else owns."""
    held = getattr(_holding, "held", None)
    if held is not None:
        held.append(thing)


class _Way(weakref.ref["np.ndarray[Any, Any]"], Generic[T]):
    """Outlives a loan and carries its object to the queue."""

    __slots__ = ("item",)

    item: T


class Returns(Generic[T]):
    """Where the objects of dead loans are found.

    A loan has no `__del__`: a signal handler may run, and raise, before a Python finalizer's first line, and then the
    object is lost, and Ctrl-C too. What runs instead is `deque.append` itself, as a weak reference's callback: no
    bytecode, no lock, safe in any thread and at exit.
    """

    def __init__(self) -> None:
        self._dead: deque[_Way[T]] = deque()
        self._ways: dict[int, _Way[T]] = {}  # of all loans: a weak reference that dies first calls nothing

    def expect(self, loan: Loan[T]) -> None:
        """Queue the loan's object when the loan dies."""
        way = _Way(loan._alive, self._dead.append)
        way.item = loan.item
        self._ways[id(way)] = way

    def pop(self) -> T:
        """The object that came back first.

        Raises:
            IndexError: none has.
        """
        way = self._dead.popleft()
        del self._ways[id(way)]
        return way.item

    def take(self, most: int | None = None) -> list[T]:
        """What came back, in that order: all of it, or the first `most`."""
        return [self.pop() for _ in range(len(self) if most is None else most)]

    def __len__(self) -> int:
        return len(self._dead)


class Loan(Generic[T]):
    """Holds one object; dropping the last reference gives it back."""

    __slots__ = ("__weakref__", "_alive", "item")

    def __init__(self, item: T, returned: Returns[T]) -> None:
        self.item = item
        # The garbage collector lets weak references to what it found call back before the finalizers of that, which may
        # still use a loan, or bring it back. Arrays it does not look for.
        self._alive = np.empty(0, np.uint8)
        returned.expect(self)


class Lease(Loan[T]):
    """A loan from a pool, to which GL commands may refer."""

    __slots__ = ()

    def __init__(self, item: T, returned: Returns[T]) -> None:
        super().__init__(item, returned)
        hold(self)


class Pool(Generic[P]):
    """Idle objects by size class, the least recently used deleted first when they hold more than `max_idle_bytes`."""

    def __init__(self, max_idle_bytes: int) -> None:
        self.max_idle_bytes = max_idle_bytes
        self.leased = 0
        self.idle_bytes = 0
        self._idle: OrderedDict[Hashable, list[P]] = OrderedDict()
        self.returned: Returns[P] = Returns()
        """Where leases put their objects; `drain` empties it."""

    def take(self, key: Hashable, make: Callable[[], P]) -> P:
        """An idle object of size class `key`, or a new one from `make()`. The caller wraps it in a `Lease` at once."""
        bucket = self._idle.get(key)
        if bucket:
            item = bucket.pop()
            self.idle_bytes -= item.nbytes
            if not bucket:
                del self._idle[key]
        else:
            item = make()
        self.leased += 1
        return item

    def drain(self) -> None:
        """Take back what finalizers queued. The context must be current and its earlier work on them finished."""
        self.take_back(self.returned.take())

    def take_back(self, items: list[P]) -> None:
        """Make returned objects idle."""
        for item in items:
            self.leased -= 1
            self._idle.setdefault(item.key, []).append(item)
            self._idle.move_to_end(item.key)
            self.idle_bytes += item.nbytes
        if self.idle_bytes > self.max_idle_bytes:
            self.trim(self.max_idle_bytes)

    def trim(self, keep_bytes: int = 0) -> None:
        """Delete idle objects, least recently used first, until at most `keep_bytes` are idle."""
        while self._idle and self.idle_bytes > keep_bytes:
            key, bucket = next(iter(self._idle.items()))
            item = bucket[0]
            item.delete()  # one that cannot be deleted now stays
            del bucket[0]
            if not bucket:
                del self._idle[key]
            self.idle_bytes -= item.nbytes

    @property
    def idle(self) -> int:
        return sum(len(bucket) for bucket in self._idle.values())


def size_class(nbytes: int) -> int:
    """Round up to a quarter of a power of two, 4 KiB at least: at most 25% waste, and few classes."""
    if nbytes <= 4096:
        return 4096
    step = 1 << (max(nbytes - 1, 1).bit_length() - 3)
    return -(-nbytes // step) * step


EXPIRED = "this tensor is no longer valid"
"""What tensors say from then on whose storage was taken away."""


def check_alive(tensor: torch.Tensor) -> None:
    """Raises BufferMovedError if the tensor's storage was taken away; tensors that have none pass."""
    try:
        if not torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]  # a clone that asking would make a copy
            tensor.untyped_storage().data_ptr()
    except RuntimeError as error:
        if EXPIRED in str(error):
            raise BufferMovedError(str(error)) from None


def storage_start(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage.

    Raises:
        BufferMovedError: the storage was taken away from its tensors.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError as error:
        if EXPIRED not in str(error):
            raise
        raise BufferMovedError(str(error)) from None
