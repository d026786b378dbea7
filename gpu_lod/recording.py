"""What a plan records while a function runs once: GL commands, and whether repeating them repeats the function."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_lod.bridge.gl import GL
from gpu_lod.bridge.pool import Lease, holding

T = TypeVar("T")

_here = threading.local()
_reads_lock = threading.RLock()
_READS = ("tolist", "numpy", "__array__", "__dlpack__")


class Recording:
    """The tape of one run.

    Args:
        inputs: tensors that another run may find with other values. What is uploaded straight from their memory is
            uploaded again. Anything else that rests on them, in torch or in Python, cannot be repeated; what rests on
            none of them stays as it is.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.tape: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.writes: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        """What torch writes into memory that OpenGL then reads, or that is a part of the result."""
        self.checks: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = []
        """Functions that raise where values are bad, and what they look at."""
        self.leases: list[Lease[Any]] = []
        """All that commands refer to."""
        self.watching = True
        self.obstacle: str | None = None
        """The first thing that cannot be repeated."""
        self._written: list[tuple[int, int]] = []
        self._memory = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in inputs]

    def stop(self, reason: str) -> None:
        """Note something that cannot be repeated."""
        self.obstacle = self.obstacle or reason

    def is_input(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._memory)

    def varies(self, address: int) -> bool:
        """True for the memory of inputs, and of what verbs made of them."""
        shared: list[Any] = [lease for lease in self.leases if hasattr(lease, "address")]
        return self.is_input(address) or any(one.address <= address < one.address + one.nbytes for one in shared)

    def write(self, func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """Note an operation that writes to its first argument. All writes are repeated before all commands, which asks
        that each has a place of its own and takes nothing that OpenGL makes."""
        target, *sources = [(tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)) for tensor in tensors]
        clash = any(start < target[1] and target[0] < end for start, end in (*self._memory, *self._written))
        made = any(self.varies(start) and not self.is_input(start) for start, _ in sources)
        if clash or made or func._schema.name not in ("aten::copy_", "aten::zero_", "aten::fill_"):
            self.stop(f"torch computes in it ({func})")
        self._written.append(target)
        self.writes.append((func, args))

    @contextmanager
    def running(self, gl: GL) -> Iterator[None]:
        """Record what this thread does with a context, which must be current."""
        _here.recording = self
        try:
            with holding(self.leases), gl.recording(self._note), _Watch(self), _reads_seen():
                yield
        finally:
            _here.recording = None

    def _note(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name in _READ_BACK:
            self.stop(f"it reads results back on the host (gl{name})")
        elif name == "BufferSubData":
            target, offset, nbytes, pointer = arguments
            if not self.is_input(pointer.value):
                pointer = ctypes.create_string_buffer(ctypes.string_at(pointer.value, nbytes), nbytes)
            self.tape.append((function, (target, offset, nbytes, pointer)))
        elif name not in _ONCE:
            self.tape.append((function, arguments))


_READ_BACK = ("GetBufferSubData", "BufferData")
_ONCE = {
    *("GetError", "GetIntegerv", "GetInteger64v", "GetIntegeri_v", "GetInteger64i_v", "GetString", "IsEnabled"),
    *("IsTexture", "Finish", "MapBufferRange", "BufferStorage", "TexStorage3D"),
    *(f"{do}{kind}" for do in ("Gen", "Delete") for kind in ("Buffers", "Framebuffers", "Textures", "VertexArrays")),
}
"""Commands that make things, which last, or ask."""


def check(function: Callable[[torch.Tensor], T], values: torch.Tensor) -> T:
    """`function(values)`, which raises where values are bad; what it returns decides nothing else. A plan calls it
    again for each new input."""
    recording: Recording | None = getattr(_here, "recording", None)
    if recording is None:
        return function(values)
    if recording.is_input(values.data_ptr()):
        recording.checks.append((function, values))
    recording.watching = False
    try:
        return function(values)
    finally:
        recording.watching = True


def decides(what: str) -> None:
    """Say that what follows depends on values of inputs."""
    recording: Recording | None = getattr(_here, "recording", None)
    if recording is not None:
        recording.stop(what)


@contextmanager
def _reads_seen() -> Iterator[None]:
    """Notice where Python reads the values of an input past torch's dispatcher."""

    def seen(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        @functools.wraps(read)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            recording: Recording | None = getattr(_here, "recording", None)
            if recording is not None and recording.watching and recording.varies(tensor.data_ptr()):
                recording.stop(f"it reads values on the host (by {name})")
            return read(tensor, *args, **kwargs)

        return call

    with _reads_lock:  # other threads' calls pass through, but two plans must not restore in the wrong order
        before = {name: torch.Tensor.__dict__.get(name) for name in _READS}
        for name in _READS:
            setattr(torch.Tensor, name, seen(name))
        try:
            yield
        finally:
            for name, method in before.items():
                if method is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, method)


class _Watch(TorchDispatchMode):
    """Sees what torch computes, which no tape can repeat."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording = self._recording
        if recording.watching and not _harmless(func):
            # What it computes from constants alone is a constant.
            tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if _writes(func):
                recording.write(func, args, tensors)
            elif any(recording.varies(tensor.data_ptr()) for tensor in tensors):
                recording.stop(f"torch computes in it ({func})")
        return func(*args, **(kwargs or {}))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _writes(func: Any) -> bool:
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def _harmless(func: Any) -> bool:
    """Views and new memory."""
    schema = func._schema
    if _writes(func):
        return False
    if schema.name.startswith(("aten::empty", "aten::new_empty")):
        return True
    return bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)
