"""What a plan records while a function runs once: GL commands, and whether repeating them repeats the function."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_lod.bridge.gl import GL
from gpu_lod.bridge.pool import Lease, holding

T = TypeVar("T")

_here = threading.local()
_reads_lock = threading.RLock()
_READS = ("tolist", "numpy", "__array__", "__dlpack__")


class AbandonedError(BaseException):
    """A run that cannot be repeated ends here. No Exception, for functions catch those and go on."""


class Recording:
    """The tape of one run.

    Args:
        coherent: torch may read what verbs made meanwhile. On hardware it may not be there yet, and on CUDA it is
            OpenGL's till the end: there the run ends at the first thing that cannot be repeated, for what torch would
            read is undefined, be it indices.
        inputs: tensors that another run may find with other values. What is uploaded straight from their memory is
            uploaded again. Anything else that rests on them, in torch or in Python, cannot be repeated; what rests on
            none of them stays as it is.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], coherent: bool = True) -> None:
        self.coherent = coherent
        self.tape: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.conversions: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Inputs in another dtype, and what they are made of, in this order."""
        self.writes: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        """What torch writes into memory that OpenGL then reads, or that is a part of the result."""
        self.checks: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = []
        """Functions that raise where values are bad, and what they look at."""
        self.held: list[Any] = []
        """All that commands refer to."""
        self.pyramids: list[tuple[Any, Any]] = []
        """Pyramids that came from elsewhere, as they were."""
        self.undo: list[Callable[[], object]] = []
        """What mends the state that commands leave behind where not all of them are given."""
        self.watching = True
        self.obstacle: str | None = None
        """The first thing that cannot be repeated."""
        self._gl: GL | None = None
        self._bound: set[int] = set()
        """Buffers that commands refer to so far, by GL name."""
        self._written: list[tuple[int, int]] = []
        self._memory = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in inputs]

    def stop(self, reason: str) -> None:
        """Note something that cannot be repeated."""
        self.obstacle = self.obstacle or reason

    def abandon(self) -> None:
        """End the run, if it is not to go on.

        Raises:
            AbandonedError: always, then.
        """
        if self.obstacle is not None and self.tape and not self.coherent:
            raise AbandonedError

    def mend(self) -> None:
        """After commands were given in part."""
        for mend in self.undo:
            mend()

    def is_input(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._memory)

    def varies(self, address: int) -> bool:
        """True for the memory of inputs, and of what verbs made of them."""
        return self.is_input(address) or self._lease_of(address) is not None

    def _lease_of(self, address: int) -> Any:
        """The lease made meanwhile whose memory holds an address."""
        shared: Iterator[Any] = (one for one in self.held if isinstance(one, Lease) and hasattr(one, "address"))
        return next((one for one in shared if one.address <= address < one.address + one.nbytes), None)

    def elsewhere(self) -> list[torch.Tensor]:
        """Tensors in GL memory that commands refer to, and that were there before."""
        held = (one for one in self.held if isinstance(one, torch.Tensor))
        return [tensor for tensor in held if not self.varies(tensor.data_ptr())]

    def convert(self, result: torch.Tensor, source: torch.Tensor) -> None:
        """Note that a tensor on the host is an input in another dtype: it is made again before anything else is done,
        and is an input like those."""
        self.conversions.append((result, source))
        self._memory.append((result.data_ptr(), result.data_ptr() + result.nbytes))

    def write(self, func: Callable[..., Any], args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """Note an operation that writes to its first argument and may be repeated. All writes are repeated before all
        commands: each must go to a place of its own, in memory that is new and that OpenGL has not seen yet, and take
        nothing that it makes."""
        target, *sources = [(tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)) for tensor in tensors]
        lease = self._lease_of(target[0])
        fresh = lease is not None and lease.item.glo not in self._bound
        clash = any(start < target[1] and target[0] < end for start, end in (*self._memory, *self._written))
        made = any(self.varies(start) and not self.is_input(start) for start, _ in sources)
        if not fresh or clash or made:
            self.stop(f"torch computes in it ({func})")
        self._written.append(target)
        self.writes.append((func, args))

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What torch does meanwhile is known, or does not count."""
        self.watching = False
        try:
            yield
        finally:
            self.watching = True

    def step(self, function: Callable[..., Any], args: tuple[Any, ...], reads: Sequence[torch.Tensor]) -> None:
        """Note a function that is called again where it stands among the commands, and call it."""
        self.tape.append((function, args))
        leases = (self._lease_of(tensor.data_ptr()) for tensor in reads)
        self._bound.update(lease.item.glo for lease in leases if lease is not None)  # torch must not write there later
        _here.recording = None
        try:
            with self.unwatched(), holding([]):
                function(*args)
        finally:
            _here.recording = self

    @contextmanager
    def running(self, gl: GL) -> Iterator[None]:
        """Record what this thread does with a context, which must be current."""
        _here.recording = self
        try:
            self._gl = gl
            watch = _WatchApart if "torch._dynamo" in sys.modules else _Watch
            with holding(self.held), gl.recording(self._note), watch(self), _reads_seen(), _Made(self):
                yield
        finally:
            _here.recording = None

    def _note(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if current() is not self:  # a step's own, which it gives again
            return
        if name == "GetBufferSubData":
            self.stop("it reads results back on the host (glGetBufferSubData)")
        elif name == "BufferSubData":
            target, offset, nbytes, pointer = arguments
            if not self.is_input(pointer.value):
                if self.varies(pointer.value):
                    self.stop("it reads on the host what a verb made")
                pointer = ctypes.create_string_buffer(ctypes.string_at(pointer.value, nbytes), nbytes)
            self.tape.append((function, (target, offset, nbytes, pointer)))
        elif name not in _ONCE:
            self.tape.append((function, arguments))
            if name == "BindBufferRange":
                self._bound.add(arguments[2])


_ONCE = {
    *("GetError", "GetIntegerv", "GetInteger64v", "GetIntegeri_v", "GetInteger64i_v", "GetString", "IsEnabled"),
    *("GetBooleani_v", "GetFloati_v", "GetTexEnvfv", "IsEnabledi"),
    *("IsTexture", "Finish", "MapBufferRange", "BufferData", "BufferStorage", "TexBuffer", "TexStorage3D"),
    *(f"{do}{kind}" for do in ("Gen", "Delete") for kind in ("Buffers", "Framebuffers", "Textures", "VertexArrays")),
}
"""Commands that make things, which last, or ask."""


def check(function: Callable[[torch.Tensor], T], values: torch.Tensor) -> T:
    """`function(values)`, which raises where values are bad; what it returns decides nothing else. A plan calls it
    again for each new input."""
    recording = current()
    if recording is None:
        return function(values)
    if recording.is_input(values.data_ptr()):
        recording.checks.append((function, values))
    elif recording.varies(values.data_ptr()):  # and is not there yet: commands run behind
        recording.stop("it reads on the host what a verb made")
    with recording.unwatched():
        return function(values)


def step(function: Callable[..., Any], *args: Any, reads: Sequence[torch.Tensor]) -> None:
    """Call a function in which the host reads what commands made, or writes what they read: a plan calls it again
    between these commands. For bridges and renderers on which that is no long wait.

    Args:
        reads: the tensors that it reads.
    """
    recording = current()
    if recording is None:
        function(*args)
    else:
        recording.step(function, args, reads)


def current() -> Recording | None:
    """What records this thread."""
    return getattr(_here, "recording", None)


def decides(what: str, by: torch.Tensor | None = None) -> None:
    """Say that what follows depends on values of inputs, or on those of a tensor, which may rest on none of them."""
    recording = current()
    if recording is not None and (by is None or recording.varies(by.data_ptr())):
        recording.stop(what)


def uses(pyramid: Any) -> None:
    """Say that commands read a pyramid."""
    noted = getattr(_here, "noted", None)
    if noted is not None:
        noted.append(weakref.ref(pyramid))
    recording = current()
    if recording is not None and not recording.varies(pyramid.levels[0].data_ptr()):
        recording.pyramids.append((pyramid, pyramid.state[0]))


@contextmanager
def pyramids_noted() -> Iterator[list[weakref.ref[Any]]]:
    """The pyramids that verbs of this thread read meanwhile."""
    before = getattr(_here, "noted", None)
    found: list[weakref.ref[Any]] = []
    _here.noted = found
    try:
        yield found
    finally:
        _here.noted = before


def enters(gl: GL) -> None:
    """Say that commands go to a context."""
    recording = current()
    if recording is not None and recording._gl is not gl:
        recording.stop("it works on another OpenGL context")


def refers(glo: int) -> None:
    """Say that commands refer to a buffer, by its GL name, in a way that they do not show."""
    recording = current()
    if recording is not None:
        recording._bound.add(glo)


def on_failure(mend: Callable[[], object]) -> None:
    """Say what mends the state that commands leave behind where not all of them are given."""
    recording = current()
    if recording is not None:
        recording.undo.append(mend)


@contextmanager
def _reads_seen() -> Iterator[None]:
    """Notice where Python reads the values of an input past torch's dispatcher."""

    def seen(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        @functools.wraps(read)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            recording = current()
            if recording is not None and recording.watching and recording.varies(tensor.data_ptr()):
                recording.stop(f"it reads values on the host (by {name})")
                recording.abandon()
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


def _after_fork() -> None:
    """A thread that is not in the child may have held the lock."""
    global _reads_lock
    _reads_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class _Watch(TorchDispatchMode):
    """Sees what torch computes, which no tape can repeat."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to see to it: seconds, in the first plan

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording = self._recording
        if recording.watching and not _harmless(func):
            recording.abandon()
            # What it computes from constants alone is a constant.
            converts = func is torch.ops.aten._to_copy.default and _on_host(args[0], kwargs)
            if converts and recording.is_input(args[0].data_ptr()):
                result = func(*args, **(kwargs or {}))
                recording.convert(result, args[0])
                return result
            tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if torch.Tag.nondeterministic_seeded in func.tags:
                recording.stop(f"it is random ({func})")
            elif _writes(func):
                if func._schema.name not in ("aten::copy_", "aten::zero_", "aten::fill_"):
                    recording.stop(f"torch computes in it ({func})")
                recording.write(func, args, tensors)
            elif any(recording.varies(tensor.data_ptr()) for tensor in tensors):
                recording.stop(f"torch computes in it ({func})")
            recording.abandon()
        return func(*args, **(kwargs or {}))


class _WatchApart(_Watch):
    """The same where the compiler is there: torch keeps it from this."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


_MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")
_NUMBERS = ("__index__", "__int__", "__float__", "__bool__", "__complex__")


class _Made(TorchFunctionMode):
    """Sees tensors that are made of Python's sequences of others, whose values torch reads past its dispatcher."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, name = self._recording, getattr(func, "__name__", "")
        if recording.watching and name in (*_MAKERS, *_NUMBERS):
            given = [*args, *(kwargs or {}).values()]
            # Of a tensor the dispatcher sees the copy.
            given = given if name in _NUMBERS else [one for one in given if not isinstance(one, torch.Tensor)]
            tensors = (leaf for leaf in _pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
            if any(recording.varies(tensor.data_ptr()) for tensor in tensors):
                recording.stop(f"it reads values on the host (by {name})")
                recording.abandon()
        return func(*args, **(kwargs or {}))


def _on_host(source: torch.Tensor, how: Any) -> bool:
    """Whether a copy and what it is made of are."""
    device = (how or {}).get("device") or source.device
    return source.device.type == torch.device(device).type == "cpu"


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
