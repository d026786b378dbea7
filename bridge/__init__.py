"""GL buffers seen as tensors. Knows nothing of images; import it as `gpu_lod.bridge`.

A bridge makes buffers that GL and torch both see and says which tensors are such buffers. `Bridge` is what a context
needs of one; `host.HostBridge` is the one for CPU tensors.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .devices import Device, choose, devices
from .host import HostBridge, MappedBuffer, SharedBuffer
from .pool import Lease, Pool


class Bridge(Protocol):
    """One way to share GL buffers with torch. All methods but `find` need the context to be current."""

    @property
    def device_type(self) -> str:
        """The torch device type of its tensors: "cpu" or "cuda"."""

    @property
    def pool(self) -> Pool[Any]: ...

    def lease(self, nbytes: int) -> SharedBuffer:
        """A buffer of `nbytes`, contents undefined; it returns to the pool when its last tensor has died."""

    def find(self, tensor: torch.Tensor) -> tuple[MappedBuffer, int] | None:
        """The buffer that is the tensor's memory and the byte offset of its first element, or None."""

    def hand_to_gl(self) -> None:
        """Before a verb's first GL command: make what torch wrote visible to GL."""

    def hand_to_torch(self) -> None:
        """After a verb's last GL command: make what GL wrote visible to torch."""

    def drain(self) -> None:
        """Take back the buffers whose tensors have died."""

    def trim(self) -> None:
        """Delete idle buffers."""


__all__ = ["Bridge", "Device", "HostBridge", "Lease", "MappedBuffer", "Pool", "SharedBuffer", "choose", "devices"]
