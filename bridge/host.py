"""The host bridge: GL buffers that are also CPU torch tensors.

A buffer has immutable storage that stays mapped, persistently and coherently, for its whole life. The tensor's memory
*is* the mapping: what a shader writes is what torch reads, and the other way round, with no copy in either direction.
On a software renderer that memory is ordinary RAM; on a GPU it is memory that the driver chose for host access. A
software renderer may also borrow the memory of ordinary tensors (borrowed.py).

Ownership: the bridge guarantees that after `end()` all GL writes are visible to the host, and the verbs
guarantee that no GL work is in flight while torch holds a buffer.

Source: GL_ARB_buffer_storage (core in OpenGL 4.4).
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch

from gpu_lod.errors import OutOfMemoryError, UnsupportedError

from . import gl as G
from .borrowed import ALIGNMENT, MOST, Borrowed, BorrowedBuffer, Borrower, over
from .gl import GL
from .pool import Lease, Pool, Returns, hold, size_class, storage_start
from .views import OwnBuffer, alike

_FLAGS = G.MAP_READ_BIT | G.MAP_WRITE_BIT | G.MAP_PERSISTENT_BIT | G.MAP_COHERENT_BIT


class MappedBuffer(OwnBuffer):
    """One GL buffer object, mapped for its whole life at `address`."""

    __slots__ = ("_registry", "address", "nbytes")

    def __init__(self, gl: GL, nbytes: int, registry: dict[int, MappedBuffer]) -> None:
        self._registry = registry
        self.nbytes = nbytes
        gl.check("an earlier command of this call")
        super().__init__(gl, gl.gen("Buffers"))
        address = self._storage(gl)
        if not address:
            gl.clear_errors()
            gl.delete("Buffers", self.glo)
            raise OutOfMemoryError(
                f"the driver could not make a mapped buffer of {nbytes / 2**20:.1f} MiB. Use a smaller image or batch, "
                "drop results that are no longer needed, or call Context.trim()."
            )
        self.address: int = address
        registry[address] = self

    def _storage(self, gl: GL) -> int | None:
        """Make it, and return its address; None where there is no memory."""
        gl.BindBuffer(G.COPY_WRITE_BUFFER, self.glo)
        # CLIENT_STORAGE asks for host memory: torch reads it at full speed, also where the GPU has its own.
        gl.BufferStorage(G.COPY_WRITE_BUFFER, alike(self.nbytes), None, _FLAGS | G.CLIENT_STORAGE_BIT)
        address = None if gl.GetError() else gl.MapBufferRange(G.COPY_WRITE_BUFFER, 0, self.nbytes, _FLAGS)
        gl.BindBuffer(G.COPY_WRITE_BUFFER, 0)
        return address

    @property
    def key(self) -> int:
        return self.nbytes

    def delete(self) -> None:
        # Forget the address first: malloc may hand it to an ordinary tensor next.
        del self._registry[self.address]
        super().delete()  # deleting a mapped buffer unmaps it


class OutlivingBuffer(MappedBuffer):
    """The same over memory of the process's own, which is still there when its context has gone."""

    __slots__ = ("_memory",)

    def _storage(self, gl: GL) -> int | None:
        size = alike(self.nbytes)
        try:
            self._memory: np.ndarray[Any, Any] | None = np.empty(size + ALIGNMENT, np.uint8)
        except MemoryError:
            return None
        address = -(-self._memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        return address if over(gl, self.glo, address, size) == G.NO_ERROR else None

    def forget(self) -> None:
        """Free the memory, which nobody uses any more, and leave the buffer object. Needs no context."""
        self._memory = None

    def delete(self) -> None:
        super().delete()
        self.forget()


class SharedBuffer(Lease[MappedBuffer]):
    """A leased GL buffer. Tensors made from it keep it alive; when the last alias dies it returns to the pool."""

    __slots__ = ("nbytes",)

    def __init__(self, item: MappedBuffer, returned: Returns[MappedBuffer], nbytes: int) -> None:
        super().__init__(item, returned)
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        return self.item.address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.item.address, False), "version": 3}

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A contiguous tensor of `shape` whose memory is this buffer from byte `offset` on."""
        # numpy keeps the lease as the array's base, and torch keeps the array: aliases of any kind keep the buffer.
        # Made outside inference mode so that in-place changes are counted and a stale texture can be told.
        end = offset + math.prod(shape) * dtype.itemsize
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.tensor(dtype, shape, offset)
        return torch.from_numpy(np.asarray(self)[offset:end]).view(dtype).view(shape)


class HostBridge:
    """Makes, pools and recognises mapped buffers of one context.

    Args:
        borrows: the driver takes any memory of the process for a buffer's.
        outlive: results are to stay when the context goes, which is somebody else's; only with `borrows` they do.
    """

    device = torch.device("cpu")
    coherent = True

    def __init__(
        self, gl: GL, max_idle_bytes: int = 512 * 2**20, *, borrows: bool = False, outlive: bool = False
    ) -> None:
        self._gl = gl
        self._outlive = borrows and outlive
        self._borrower = Borrower(gl, able=borrows)
        self.pool: Pool[MappedBuffer] = Pool(max_idle_bytes)
        self._by_address: dict[int, MappedBuffer] = {}

    @staticmethod
    def check_supported(extensions: set[str], version: int) -> None:
        """Raises UnsupportedError where persistent mapping is missing."""
        if version < 440 and "GL_ARB_buffer_storage" not in extensions:
            raise UnsupportedError(
                f"this driver has OpenGL {version // 100}.{version // 10 % 10} without GL_ARB_buffer_storage, which "
                "the zero-copy host bridge needs. Update the driver (Mesa since 10.2 and NVIDIA since 331 have it), "
                "choose another device, or use backend='torch'."
            )

    def lease(self, nbytes: int) -> SharedBuffer:
        """A buffer of `nbytes`, contents undefined. The context must be current."""
        size = size_class(nbytes)
        return SharedBuffer(self.pool.take(size, lambda: self._make(size)), self.pool.returned, nbytes)

    def _make(self, nbytes: int) -> MappedBuffer:
        kind = OutlivingBuffer if self._outlive and nbytes <= MOST else MappedBuffer
        try:
            return kind(self._gl, nbytes, self._by_address)
        except OutOfMemoryError:
            self.trim()
            return kind(self._gl, nbytes, self._by_address)

    def find(self, tensor: torch.Tensor) -> tuple[MappedBuffer, int] | None:
        """The buffer that is the tensor's memory and the byte offset of its first element, or None."""
        start = storage_start(tensor)
        buffer = self._by_address.get(start)
        if buffer is None:
            return None
        hold(tensor)
        return buffer, tensor.data_ptr() - start

    @property
    def borrows(self) -> bool:
        """True if shaders may read ordinary tensors where they are."""
        return self._borrower.able

    def borrow(self, tensor: torch.Tensor) -> tuple[BorrowedBuffer, int, Borrowed] | None:
        """A buffer over the memory of an ordinary tensor, to be read only; see `Borrower.borrow`."""
        return self._borrower.borrow(tensor)

    def begin(self) -> None:
        """Nothing to hand over: coherent mappings show host writes to commands submitted after them."""
        self.drain()

    def end(self) -> None:
        """Wait until all GL work is done and visible to the host."""
        # All bits: what goes back to the pools is next written to by whatever command the next verb begins with.
        self._gl.MemoryBarrier(G.ALL_BARRIER_BITS)
        self._gl.Finish()
        self._borrower.end()

    def taken(self) -> list[Any]:
        return []

    def hand_over(self, taken: list[Any]) -> None:
        """Nothing to hand over."""

    def drain(self) -> None:
        self.pool.drain()
        self._borrower.drain()

    def trim(self) -> None:
        self.drain()
        self.pool.trim()

    def forget(self) -> None:
        """Free what memory can be freed without the context, when no more will be leased."""
        self.pool.max_idle_bytes = sys.maxsize  # nothing is to be deleted here
        dead = self.pool.returned.take()
        for buffer in dead:
            if isinstance(buffer, OutlivingBuffer):
                buffer.forget()
        self.pool.take_back(dead)
