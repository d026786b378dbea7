"""Pyramids as layered textures with mip levels.

They are pooled: one whose pyramid has died is taken again, on whatever stream, after all work that was queued by then.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_lod.bridge import Lease, Pool
from gpu_lod.errors import CaptureError, LimitError, OutOfMemoryError
from gpu_lod.kernels.device import MOST_BLOCKS, THREADS, Device, DeviceTexture, Storage, TextureKey, per_device
from gpu_lod.kernels.memory import Stack
from gpu_lod.kernels.sources import of_dtype
from gpu_lod.shield import Shield

STORAGE: dict[torch.dtype, Storage] = {
    torch.uint8: "uint8",
    torch.float16: "float16",
    torch.bfloat16: "float32",  # texture units know no bfloat16, and fp32 holds it exactly
    torch.float32: "float32",
}
MOST_LEVELS = 16
MOST_IDLE_BYTES = 512 * 2**20


class Fill(ctypes.Structure):
    """The parameter of fill.cu."""

    _fields_ = (
        ("source", ctypes.c_void_p * MOST_LEVELS),
        ("target", ctypes.c_uint64 * MOST_LEVELS),
        ("first_block", ctypes.c_uint32 * MOST_LEVELS),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("levels", ctypes.c_int),
        ("layers", ctypes.c_int),
        ("channels", ctypes.c_int),
    )


class _Pooled:
    """A texture that is leased or idle."""

    def __init__(self, device: Device, key: TextureKey) -> None:
        self.key = key
        self.texture: DeviceTexture = device.make_texture(key)
        self.free_after: Any = None
        self._device = device

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    def delete(self) -> None:
        self._device.finish(self.free_after)
        self.texture.delete()


class _Textures:
    """Those of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self.pool: Pool[_Pooled] = Pool(MOST_IDLE_BYTES)

    def lease(self, key: TextureKey) -> Lease[_Pooled]:
        with Shield(), self._lock:  # a signal in between would lose what came back
            self._drain()
            item = self.pool.take(key, lambda: self._make(key))
            if item.free_after is not None:
                self._device.wait(item.free_after)
            return Lease(item, self.pool.returned)

    def _drain(self) -> None:
        """Take back what finalizers queued, which may be in use by work that is queued now, and by no other."""
        count = len(self.pool.returned)  # what comes back from now on may have been used after the event
        if not count:
            return
        try:
            event = self._device.mark()
        except CaptureError:  # on another thread: later
            return
        returned = self.pool.returned.take(count)
        for item in returned:
            item.free_after = event
        self.pool.take_back(returned)

    def _make(self, key: TextureKey) -> _Pooled:
        try:
            return _Pooled(self._device, key)
        except OutOfMemoryError:
            self.pool.trim()
            self._device.release_cache()
            return _Pooled(self._device, key)


textures_of = per_device(_Textures)


@dataclass(frozen=True)
class Part:
    """Some images of a batch: those that one texture holds, a layer each."""

    first: int
    count: int
    lease: Lease[_Pooled]

    @property
    def texture(self) -> DeviceTexture:
        return self.lease.item.texture


class Source(Stack):
    """One as textures, more than one for huge batches.

    Raises:
        CaptureError: a CUDA graph is being captured.
        LimitError: larger than the device's textures.
    """

    def __init__(self, device: Device, levels: Sequence[torch.Tensor]) -> None:
        super().__init__(device, levels)
        if device.capturing():
            raise CaptureError(
                "a CUDA graph is being captured, and textures cannot be made meanwhile. Make it before, with "
                "pyramid.upload(backend='cuda'), and keep the pyramid as long as the graph."
            )
        if max(self.height, self.width) > device.texture_side or self.levels > MOST_LEVELS:
            raise LimitError(
                f"the image is {self.width} x {self.height}, and this device's textures end at {device.texture_side}. "
                "Use a smaller image, or backend='torch'."
            )
        self._stream = device.stream()
        self.parts = []
        for first in range(0, self.batch, device.texture_layers):
            count = min(device.texture_layers, self.batch - first)
            key = TextureKey(self.width, self.height, count, self.levels, STORAGE[self.dtype], self.channels)
            self.parts.append(Part(first, count, textures_of(device).lease(key)))
        planes = [level.detach().contiguous().view(-1, *level.shape[-3:]) for level in levels]
        for part in self.parts:
            self._fill(part, planes)
        self._filled = device.record()

    def _fill(self, part: Part, planes: list[torch.Tensor]) -> None:
        fill = Fill(height=self.height, width=self.width, levels=self.levels, layers=part.count, channels=self.channels)
        blocks = 0
        for level, (values, surface) in enumerate(zip(planes, part.texture.surfaces, strict=True)):
            fill.source[level] = values[part.first].data_ptr()
            fill.target[level] = surface
            fill.first_block[level] = blocks
            height, width = values.shape[-2:]
            blocks += part.count * -(-height * width // THREADS)
        if blocks > MOST_BLOCKS:
            raise LimitError(
                f"{part.count} images of {self.width} x {self.height} are more than a CUDA launch covers. Use a "
                "smaller batch."
            )
        self.device.launch(of_dtype("fill", self.dtype), (blocks, 1, 1), THREADS, fill)

    def ready(self) -> None:
        """The current stream may read it. A capture begins after what it reads was made, which is the caller's part:
        torch.cuda.graph() waits for the device before it begins."""
        if self.device.stream() != self._stream and not self.device.capturing():
            self.device.wait(self._filled)
