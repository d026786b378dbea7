"""GL buffers that no tensor ever sees: tables, work lists, and what lies between two passes."""

from __future__ import annotations

import ctypes

import torch

from gpu_lod.errors import OutOfMemoryError

from . import gl as G
from .gl import GL
from .pool import Lease, Pool, size_class
from .views import OwnBuffer, alike


class PrivateBuffer(OwnBuffer):
    """One GL buffer with immutable storage, never mapped."""

    __slots__ = ("nbytes",)

    def __init__(self, gl: GL, nbytes: int, fetched: bool) -> None:
        self.nbytes = nbytes
        gl.check("an earlier command of this call")
        super().__init__(gl, gl.gen("Buffers"))
        gl.BindBuffer(G.COPY_WRITE_BUFFER, self.glo)
        size = alike(nbytes) if fetched else nbytes
        gl.BufferStorage(G.COPY_WRITE_BUFFER, size, None, G.DYNAMIC_STORAGE_BIT)
        try:
            gl.check(f"making a buffer of {nbytes / 2**20:.1f} MiB")
        except BaseException:
            gl.delete("Buffers", self.glo)
            raise

    @property
    def key(self) -> int:
        return self.nbytes


class Private(Lease[PrivateBuffer]):
    """A leased private buffer; it returns to the pool with its last reference, and GL orders its next use."""

    __slots__ = ("_gl", "nbytes")

    def __init__(self, item: PrivateBuffer, pool: Pool[PrivateBuffer], gl: GL, nbytes: int) -> None:
        super().__init__(item, pool.returned)
        self._gl = gl
        self.nbytes = nbytes

    @property
    def glo(self) -> int:
        return self.item.glo

    def write(self, values: torch.Tensor) -> Private:
        """Copy a tensor to the start of the buffer, after the GL commands given so far. Returns itself."""
        values = values.detach().cpu()
        alike = 1
        if self._gl.noted is not None and values.ndim > 1 and values.stride(0) == 0:
            # One row for all images. What torch made of it would not follow the row, as what is read from it does.
            alike, values = len(values), values[0]
        values = values.contiguous()
        self._gl.BindBuffer(G.COPY_WRITE_BUFFER, self.glo)
        for offset in range(0, alike * values.nbytes, max(values.nbytes, 1)):
            self._gl.BufferSubData(G.COPY_WRITE_BUFFER, offset, values.nbytes, ctypes.c_void_p(values.data_ptr()))
        return self

    def clear(self) -> Private:
        """Fill with zeros. Returns itself."""
        clear(self._gl, self.glo, self.item.nbytes)
        return self

    def read(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The first `count` elements, on the host. Waits for the GL commands given so far."""
        values = torch.empty(count, dtype=dtype, device="cpu")
        self._gl.MemoryBarrier(G.BUFFER_UPDATE_BARRIER_BIT)
        self._gl.BindBuffer(G.COPY_READ_BUFFER, self.glo)
        self._gl.GetBufferSubData(G.COPY_READ_BUFFER, 0, values.nbytes, ctypes.c_void_p(values.data_ptr()))
        return values


def clear(gl: GL, glo: int, nbytes: int) -> None:
    """Fill the first `nbytes` (a multiple of 4) of a buffer with zeros, ordered with the other GL commands."""
    gl.BindBuffer(G.COPY_WRITE_BUFFER, glo)
    gl.MemoryBarrier(G.BUFFER_UPDATE_BARRIER_BIT)  # shaders may still be writing to it
    gl.ClearBufferSubData(G.COPY_WRITE_BUFFER, G.R32UI, 0, nbytes, G.RED_INTEGER, G.UNSIGNED_INT, None)
    gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)


class PrivatePool:
    """Private buffers of one context.

    Args:
        fetched: shaders read them as buffer textures.
    """

    def __init__(self, gl: GL, max_idle_bytes: int = 256 * 2**20, *, fetched: bool = False) -> None:
        self._gl = gl
        self._fetched = fetched
        self.pool: Pool[PrivateBuffer] = Pool(max_idle_bytes)

    def lease(self, nbytes: int) -> Private:
        """A buffer of at least `nbytes`, contents undefined. The context must be current."""
        size = size_class(nbytes)
        return Private(self.pool.take(size, lambda: self._make(size)), self.pool, self._gl, nbytes)

    def _make(self, nbytes: int) -> PrivateBuffer:
        try:
            return PrivateBuffer(self._gl, nbytes, self._fetched)
        except OutOfMemoryError:
            self.trim()
            return PrivateBuffer(self._gl, nbytes, self._fetched)

    def drain(self) -> None:
        self.pool.drain()

    def trim(self) -> None:
        self.pool.drain()
        self.pool.trim()
