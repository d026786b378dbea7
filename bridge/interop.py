"""GL buffers that are also CUDA tensors: who owns which buffer when.

A buffer belongs to CUDA (mapped) or to OpenGL (unmapped), never to both. Between verbs every buffer is mapped, so that
torch may use the tensors over it. Inside a verb, the first time a buffer is bound, all buffers that the verb has taken
so far are unmapped in one call; when the verb ends, however it ends, all of them are mapped again in one call. Both
calls are made on torch's current stream, which orders them with torch's work: CUDA promises that work queued on the
stream before an unmap is done before GL begins, and that GL is done before work queued after a map begins. Nothing
waits on the host.

A buffer whose last tensor died may still be in use by work that is queued, on any stream. When it returns to the pool
an event behind all work of the CUDA context is recorded, and its next user waits for that event on the GPU. So tensors
need no `record_stream`.

The state machine knows CUDA only through a `Driver`.

Source: CUDA Runtime API, "Graphics Interoperability" and "OpenGL Interoperability".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpu_lod.errors import (
    BufferMovedError,
    GpuLodError,
    InteropUnavailableError,
    MappingError,
    OutOfMemoryError,
)

from . import gl as G
from .gl import GL
from .pool import EXPIRED, Lease, Pool, Returns, hold, size_class, storage_start

# GL may find the memory only when CUDA asks for it, and what CUDA then reports is not always that there is none.
_MAY_BE_SHORTAGE = (OutOfMemoryError, InteropUnavailableError, MappingError)
_SHORTAGES = frozenset([205, 304, 999])
"""CUDA's codes that are most likely one where a buffer that is no larger could be shared."""


class Driver(Protocol):
    """The calls that sharing buffers takes. All but `device` need `activate` on the calling thread first."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""

    @property
    def memory(self) -> int:
        """Bytes of memory that the device has."""

    def activate(self) -> Any:
        """Make the CUDA context current on this thread; returns what `restore` takes.

        Raises:
            CaptureError: the current stream is being captured into a CUDA graph.
        """

    def restore(self, before: Any) -> None:
        """Undo `activate`."""

    def check_same_gpu(self, renderer: str) -> GpuLodError | None:
        """Raises DeviceMismatchError if the current GL context is not on this CUDA device. Returns why that cannot be
        asked, if so: then sharing a buffer tells."""

    def stream(self) -> int:
        """torch's current stream."""

    def register(self, glo: int) -> Any:
        """Share a GL buffer; the GL context must be current. Returns a handle."""

    def unregister(self, handle: Any) -> None: ...

    def map(self, handles: Sequence[Any], stream: int) -> None: ...

    def unmap(self, handles: Sequence[Any], stream: int) -> None: ...

    def address(self, handle: Any) -> tuple[int, int]:
        """(address, bytes) of a mapped buffer."""

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """The memory as a uint8 tensor [nbytes], which keeps `owner` alive."""

    def mark(self) -> Any:
        """An event behind all work queued so far, on every stream; None if there is nothing to wait for.

        Raises:
            CaptureError: another thread captures a CUDA graph, which is now invalid.
        """

    def wait(self, event: Any, stream: int) -> None:
        """Let later work on the stream wait for the event."""

    def synchronize(self) -> None:
        """Wait on the host for torch's current stream."""

    def release_cache(self) -> None:
        """Give memory that torch caches back to the device."""

    def poison(self, storage: int, message: str) -> None:
        """Make every later use of a torch storage (its C++ address) raise."""


class InteropBuffer:
    """One GL buffer object, registered with CUDA for its whole life."""

    __slots__ = ("_bridge", "address", "event", "glo", "handle", "mapped", "nbytes", "storages")

    def __init__(self, bridge: InteropBridge, nbytes: int, glo: int, handle: Any) -> None:
        self._bridge = bridge
        self.nbytes = nbytes
        self.glo = glo
        self.handle = handle
        self.mapped = False
        self.address = 0
        self.event: Any = None
        """Behind the work that may still use the buffer since its last tensor died."""
        self.storages: list[Any] = []
        """Weak references to the torch storages over it."""

    @property
    def key(self) -> int:
        return self.nbytes

    @property
    def views(self) -> None:
        """None: what CUDA has registered shaders see as a storage buffer alone."""

    def take(self) -> None:
        """Note that the running verb will bind the buffer, so that it becomes GL's together with the others."""
        self._bridge.take(self)

    def bind(self, binding: int, start: int, size: int) -> None:
        """Bind a range to a storage-buffer binding; the buffer is GL's from now until the verb ends."""
        self._bridge.give_to_gl(self, binding)
        self._bridge.gl.BindBufferRange(G.SHADER_STORAGE_BUFFER, binding, self.glo, start, size)

    def delete(self) -> None:
        self._bridge.destroy(self)


class InteropLease(Lease[InteropBuffer]):
    """A leased shared buffer. Tensors made from it keep it alive; when the last alias dies it returns to the pool."""

    __slots__ = ("_driver", "nbytes")

    def __init__(self, item: InteropBuffer, returned: Returns[InteropBuffer], driver: Driver, nbytes: int) -> None:
        super().__init__(item, returned)
        self._driver = driver
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        return self.item.address

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A contiguous tensor of `shape` whose memory is this buffer from byte `offset` on."""
        if torch.is_inference_mode_enabled():  # in-place changes must be counted, so that a stale texture can be told
            with torch.inference_mode(False):
                return self.tensor(dtype, shape, offset)
        flat = self._driver.tensor(self.item.address, self.nbytes, self)
        self.item.storages.append(StorageWeakRef(flat.untyped_storage()))
        end = offset + math.prod(shape) * dtype.itemsize
        return flat[offset:end].view(dtype).view(shape)


class InteropBridge:
    """Makes, pools and recognises shared buffers of one GL context, and hands them to and fro."""

    coherent = False  # buffers are handed over once a verb

    def __init__(self, gl: GL, driver: Driver, max_idle_bytes: int | None = None) -> None:
        self.gl = gl
        self.driver = driver
        # A quarter of the device: registering costs far more than keeping, and a shortage trims.
        self.pool: Pool[InteropBuffer] = Pool(driver.memory // 4 if max_idle_bytes is None else max_idle_bytes)
        self._by_address: dict[int, InteropBuffer] = {}
        self._taken: dict[int, InteropBuffer] = {}  # by the running verb, by GL name
        self._bindings: set[int] = set()  # where they are bound
        self._least: float = math.inf  # bytes of the smallest buffer that was made
        self._stream = 0
        self._before: Any = None

    @property
    def device(self) -> torch.device:
        return self.driver.device

    # -- a verb -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a verb's first GL command.

        Raises:
            CaptureError: a CUDA graph is being captured on the current stream; or on another, and buffers have come
                back, which wait for the next verb.
        """
        before = self.driver.activate()
        try:
            self._stream = self.driver.stream()
            self.drain()
        except BaseException:
            self.driver.restore(before)
            raise
        self._before = before

    def prove(self) -> None:
        """Share a buffer, and see that torch finds it where it should be. Whatever is wrong with that raises."""
        self.begin()
        try:
            self.lease(1).tensor(torch.uint8, (1,))
        finally:
            self.end()

    def lease(self, nbytes: int) -> InteropLease:
        """A buffer of `nbytes`, contents undefined, CUDA's until it is bound."""
        size = size_class(nbytes)
        buffer = self.pool.take(size, lambda: self._make(size))
        lease = InteropLease(buffer, self.pool.returned, self.driver, nbytes)
        if buffer.event is not None:
            self.driver.wait(buffer.event, self._stream)
            buffer.event = None
        buffer.storages.clear()
        if not buffer.mapped:  # an earlier map failed
            self._map([buffer])
            self._locate(buffer)
        self._taken[buffer.glo] = buffer
        return lease

    def take(self, buffer: InteropBuffer) -> None:
        """Note a buffer that the running verb will bind."""
        self._taken[buffer.glo] = buffer

    def give_to_gl(self, buffer: InteropBuffer, binding: int) -> None:
        """Unmap a buffer that is about to be bound, and with it all that the verb has taken so far, in one call."""
        self.take(buffer)
        self._bindings.add(binding)
        if buffer.mapped:
            self._unmap([one for one in self._taken.values() if one.mapped])

    def taken(self) -> list[tuple[InteropBuffer, set[int]]]:
        """What the running verb has bound so far; all bindings stand beside each."""
        return [(buffer, set(self._bindings)) for buffer in self._taken.values() if not buffer.mapped]

    def hand_over(self, taken: list[tuple[InteropBuffer, set[int]]]) -> None:
        """Unmap buffers in one call, until the verb ends."""
        for buffer, bindings in taken:
            self.take(buffer)
            self._bindings |= bindings
        mapped = [buffer for buffer, _ in taken if buffer.mapped]
        if mapped:
            self._unmap(mapped)

    def end(self) -> None:
        """After a verb's last GL command: map what was unmapped, in one call.

        Raises:
            BufferMovedError: a buffer came back at another address, or not at all. Tensors over it raise from now on.
        """
        try:
            self._take_back()
        finally:
            self.driver.restore(self._before)

    def _take_back(self) -> None:
        buffers = [buffer for buffer in self._taken.values() if not buffer.mapped]
        self._taken.clear()
        if not buffers:
            return
        self.gl.MemoryBarrier(G.ALL_BARRIER_BITS)
        for binding in self._bindings:  # no later command of GL's may even refer to what is CUDA's
            self.gl.BindBufferBase(G.SHADER_STORAGE_BUFFER, binding, 0)
        self._bindings.clear()
        try:
            self._map(buffers)
        except BaseException as error:
            for buffer in buffers:
                self._poison(buffer, f"its GL buffer could not be mapped again: {error}")
            raise
        moved, lost = 0, None
        for buffer in buffers:
            try:
                if self._locate(buffer):
                    self._poison(buffer, "its GL buffer came back at another address")
                    moved += 1
            except BaseException as error:
                self._poison(buffer, f"where its GL buffer came back cannot be told: {error}")
                lost = lost or error
        if lost is not None:
            raise lost
        if moved:
            raise BufferMovedError(
                f"{moved} GL buffers came back at another CUDA address, so the tensors over them are no longer "
                "valid and raise from now on. Make them again; pass ordinary CUDA tensors instead of Context.empty() "
                "ones if it happens again."
            )

    # -- buffers ----------------------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> tuple[InteropBuffer, int] | None:
        """The buffer that is the tensor's memory and the byte offset of its first element, or None."""
        start = storage_start(tensor)
        buffer = self._by_address.get(start)
        if buffer is None:
            return None
        hold(tensor)
        return buffer, tensor.data_ptr() - start

    def borrow(self, tensor: torch.Tensor) -> None:
        """None: GL reads no memory of CUDA's that is not registered."""

    def drain(self) -> None:
        """Take back the buffers whose tensors have died, each behind the work that may still use it."""
        # Counted first: what dies on another thread from now on may have been used after the event.
        count = len(self.pool.returned)
        if count:
            event = self.driver.mark()
            returned = self.pool.returned.take(count)
            for buffer in returned:
                buffer.event = event
            self.pool.take_back(returned)

    def trim(self) -> None:
        """Delete idle buffers."""
        before = self.driver.activate()
        try:
            self._stream = self.driver.stream()
            self.drain()
            self.pool.trim()
        finally:
            self.driver.restore(before)

    def destroy(self, buffer: InteropBuffer) -> None:
        """Delete an idle buffer."""
        if buffer.event is not None:
            self.driver.wait(buffer.event, self._stream)
            buffer.event = None
        if buffer.mapped:
            self._unmap([buffer])
        self.driver.synchronize()  # nothing says that unregistering waits
        self._forget(buffer)
        self.driver.unregister(buffer.handle)
        self.gl.delete("Buffers", buffer.glo)

    def _make(self, nbytes: int) -> InteropBuffer:
        try:
            return self._create(nbytes)
        except _MAY_BE_SHORTAGE:
            self.pool.trim()
        try:
            return self._create(nbytes)
        except _MAY_BE_SHORTAGE:
            self.driver.release_cache()  # GL cannot use what torch keeps for itself
        try:
            return self._create(nbytes)
        except (InteropUnavailableError, MappingError) as error:
            if error.code not in _SHORTAGES or self._least > nbytes:
                raise
            raise OutOfMemoryError(
                f"a buffer of {nbytes / 2**20:.1f} MiB could not be shared with CUDA, and others no larger could: most "
                "likely no memory is left. Use a smaller image or batch, drop results that are no longer needed, or "
                f"call Context.trim(). {error}"
            ) from error

    def _create(self, nbytes: int) -> InteropBuffer:
        gl = self.gl
        gl.check("an earlier command of this call")
        glo = gl.gen("Buffers")
        try:
            gl.BindBuffer(G.COPY_WRITE_BUFFER, glo)
            gl.BufferData(G.COPY_WRITE_BUFFER, nbytes, None, G.DYNAMIC_DRAW)
            gl.BindBuffer(G.COPY_WRITE_BUFFER, 0)
            gl.check(f"making a buffer of {nbytes / 2**20:.1f} MiB")
            buffer = InteropBuffer(self, nbytes, glo, self.driver.register(glo))
        except BaseException:
            gl.delete("Buffers", glo)
            raise
        try:
            self._map([buffer])
            self._locate(buffer)
        except BaseException:
            if buffer.mapped:
                self._unmap([buffer])
            self.driver.unregister(buffer.handle)
            gl.delete("Buffers", glo)
            raise
        self._least = min(self._least, nbytes)
        return buffer

    # -- the state machine --------------------------------------------------------------------------------------------

    def _map(self, buffers: list[InteropBuffer]) -> None:
        if any(buffer.mapped for buffer in buffers):
            raise MappingError("a buffer that is CUDA's already was to be mapped; please report this.")
        self.driver.map([buffer.handle for buffer in buffers], self._stream)
        for buffer in buffers:
            buffer.mapped = True

    def _unmap(self, buffers: list[InteropBuffer]) -> None:
        if not all(buffer.mapped for buffer in buffers):
            raise MappingError("a buffer that is GL's already was to be unmapped; please report this.")
        self.driver.unmap([buffer.handle for buffer in buffers], self._stream)
        for buffer in buffers:
            buffer.mapped = False

    def _locate(self, buffer: InteropBuffer) -> bool:
        """Note where a mapped buffer is; True if it was elsewhere before."""
        address, nbytes = self.driver.address(buffer.handle)
        if nbytes < buffer.nbytes:
            raise MappingError(f"CUDA maps {nbytes} bytes of a GL buffer of {buffer.nbytes}; please report this.")
        if buffer.address == address:
            return False
        before = buffer.address
        self._forget(buffer)
        buffer.address = address
        self._by_address[address] = buffer
        return before != 0

    def _forget(self, buffer: InteropBuffer) -> None:
        if self._by_address.get(buffer.address) is buffer:
            del self._by_address[buffer.address]

    def _poison(self, buffer: InteropBuffer, why: str) -> None:
        for storage in buffer.storages:
            if not storage.expired():
                self.driver.poison(storage.cdata, f"{EXPIRED}: {why}.")
        buffer.storages.clear()
