"""GL buffers seen as tensors. Knows nothing of images; import it as `gpu_lod.bridge`.

A bridge makes buffers that GL and torch both see and says which tensors are such buffers. `Bridge` is what a context
needs of one: `host.HostBridge` is the one for CPU tensors, `interop.InteropBridge` the one for CUDA tensors, over the
calls of `cuda.CudaDriver` or `pycuda.PyCudaDriver`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .devices import Device, choose, devices
from .host import HostBridge, MappedBuffer, SharedBuffer
from .interop import InteropBridge
from .pool import Lease, Pool, Returns
from .private import Private, PrivatePool
from .views import Views


class Buffer(Protocol):
    """A GL buffer object."""

    @property
    def glo(self) -> int:
        """Its GL name."""

    @property
    def views(self) -> Views | None:
        """Its buffer textures; None where it must not have any."""

    def take(self) -> None:
        """Note that the running verb will bind it."""

    def bind(self, binding: int, start: int, size: int) -> None:
        """Bind a range to a storage-buffer binding; a shared buffer is GL's from now until the verb ends."""


class Shared(Protocol):
    """A leased buffer that tensors are made of."""

    @property
    def item(self) -> Buffer: ...

    @property
    def nbytes(self) -> int: ...

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A contiguous tensor of `shape` whose memory is the buffer from byte `offset` on."""


class Bridge(Protocol):
    """One way to share GL buffers with torch. All methods but `find` need the context to be current."""

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""

    @property
    def coherent(self) -> bool:
        """True if torch may write to buffers between GL commands that use others."""

    @property
    def pool(self) -> Pool[Any]: ...

    def lease(self, nbytes: int) -> Shared:
        """A buffer of `nbytes`, contents undefined; it returns to the pool when its last tensor has died. Torch may
        write to it until it is bound."""

    def find(self, tensor: torch.Tensor) -> tuple[Buffer, int] | None:
        """The buffer that is the tensor's memory and the byte offset of its first element, or None."""

    def borrow(self, tensor: torch.Tensor) -> tuple[Buffer, int, object] | None:
        """The memory of an ordinary tensor as a buffer to be read, the byte offset of its first element in it, and what
        keeps both; or None where it must be copied."""

    def begin(self) -> None:
        """Before a verb's first GL command: take back dead buffers."""

    def end(self) -> None:
        """After a verb's last GL command: make what GL wrote visible to torch."""

    def trim(self) -> None:
        """Delete idle buffers."""

    def taken(self) -> list[Any]:
        """What the running verb has bound so far, for `hand_over` in a later one."""

    def hand_over(self, taken: list[Any]) -> None:
        """Make buffers GL's until the verb ends."""


__all__ = [
    "Bridge",
    "Buffer",
    "Device",
    "HostBridge",
    "InteropBridge",
    "Lease",
    "MappedBuffer",
    "Pool",
    "Private",
    "PrivatePool",
    "Returns",
    "Shared",
    "SharedBuffer",
    "choose",
    "devices",
]
