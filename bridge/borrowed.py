"""Ordinary CPU tensors as GL buffers: their own memory, neither copied nor owned.

A driver that works on the host's memory can take any of it for a buffer's storage, whatever its alignment: llvmpipe
does, in some microseconds. Other drivers ask for whole pages, and a GPU would read them over its bus.

Source: GL_AMD_pinned_memory.
"""

from __future__ import annotations

import mmap

import torch

from . import gl as G
from .gl import GL
from .pool import Loan, Returns, hold
from .views import OwnBuffer, alike

EXTENSION = "GL_AMD_pinned_memory"
ALIGNMENT = 64
"""Bytes that a buffer's address and size are multiples of. So its texels are aligned, all of the tensor is in whole
ones, and what it holds besides lies in the same pages."""
MOST = 2**32 - ALIGNMENT
"""Bytes, as Mesa counts them in 32 bits."""


def _around(begin: int, end: int) -> tuple[int, int]:
    """The first byte and the one behind the last of a buffer that holds these: of a size that shaders are compiled for
    already (`alike`), where the pages have room for one."""
    begin, end = begin // ALIGNMENT * ALIGNMENT, -(-end // ALIGNMENT) * ALIGNMENT
    more = alike(end - begin) - (end - begin)
    behind = min(more, -end % mmap.PAGESIZE)
    before = more - behind
    return (begin - before, end + behind) if before <= begin % mmap.PAGESIZE else (begin, end)


def over(gl: GL, glo: int, address: int, nbytes: int) -> int:
    """Make host memory a buffer's storage; what glGetError has to say of it."""
    gl.BindBuffer(G.EXTERNAL_VIRTUAL_MEMORY_BUFFER_AMD, glo)
    gl.BufferData(G.EXTERNAL_VIRTUAL_MEMORY_BUFFER_AMD, nbytes, address, G.STREAM_DRAW)
    error: int = gl.GetError()
    gl.BindBuffer(G.EXTERNAL_VIRTUAL_MEMORY_BUFFER_AMD, 0)
    return error


class BorrowedBuffer(OwnBuffer):
    """A GL buffer object over memory of somebody else's."""

    __slots__ = ()


class Borrowed(Loan[BorrowedBuffer]):
    """Keeps the tensor whose memory the buffer is; not its memory, which others may give it anew."""

    __slots__ = ("tensor",)

    def __init__(self, item: BorrowedBuffer, returned: Returns[BorrowedBuffer], tensor: torch.Tensor) -> None:
        super().__init__(item, returned)
        self.tensor = tensor
        hold(self)


class Borrower:
    """Makes such buffers in one context, and deletes them when nothing refers to them any more."""

    def __init__(self, gl: GL, *, able: bool) -> None:
        self._gl = gl
        self.able = able
        self._returned: Returns[BorrowedBuffer] = Returns()
        self._lent: list[Borrowed] = []

    def borrow(self, tensor: torch.Tensor) -> tuple[BorrowedBuffer, int, Borrowed] | None:
        """A buffer over the memory of a CPU tensor of any strides, the byte offset of its first element in it, and what
        keeps both; None where that cannot be had. It is for the running verb alone, which holds the tensor until it
        ends: later the tensor may have other memory (`share_memory_`, `.data =`)."""
        size = tensor.element_size()
        address = tensor.data_ptr()
        if not self.able or tensor.device.type != "cpu" or not address or address % size or tensor.is_neg():
            return None
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin, end = _around(address, address + (last + 1) * size)
        if end - begin > MOST:
            return None
        gl = self._gl
        gl.check("an earlier command of this call")
        glo = gl.gen("Buffers")
        refused = over(gl, glo, begin, end - begin)
        if refused != G.NO_ERROR:
            gl.clear_errors()
            gl.delete("Buffers", glo)
            self.able = refused == G.OUT_OF_MEMORY  # which may pass
            return None
        loan = Borrowed(BorrowedBuffer(gl, glo), self._returned, tensor)
        self._lent.append(loan)
        return loan.item, address - begin, loan

    def end(self) -> None:
        """After all GL work on them is done."""
        self._lent.clear()

    def drain(self) -> None:
        """Delete the buffers of dead loans. The context must be current."""
        for buffer in self._returned.take():
            buffer.delete()
