"""What running a kernel takes of a device, and which device is a tensor's.

`driver.CudaDevice` is the one there is; whatever else has these methods can stand in for it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from gpu_lod.errors import GpuLodError, LimitError, UnsupportedError
from gpu_lod.kernels.sources import Kernel

Storage = Literal["uint8", "float16", "float32"]
_BYTES = {"uint8": 1, "float16": 2, "float32": 4}

T = TypeVar("T")
Grid = tuple[int, int, int]
THREADS = 256
"""Of a block; reduce.cu and block.cuh have it too."""
MOST_ROWS = 65535
"""Of blocks of a grid along y, and along z."""
MOST_BLOCKS = 2**31 - 1
"""Along x."""
DEFAULT_STREAMS = 0, 1
"""What torch calls its default stream, and CU_STREAM_LEGACY, which is the same one."""
KIND = "cuda"
"""Type of the torch devices whose tensors kernels take."""


@dataclass(frozen=True)
class TextureKey:
    """Size class of a layered texture with mip levels: exactly its storage."""

    width: int
    height: int
    layers: int
    levels: int
    storage: Storage
    channels: int

    @property
    def stored_channels(self) -> int:
        """There are no textures of three channels."""
        return 4 if self.channels == 3 else self.channels

    def size(self, level: int) -> tuple[int, int]:
        """(width, height)"""
        return max(1, self.width >> level), max(1, self.height >> level)

    @property
    def nbytes(self) -> int:
        texel = _BYTES[self.storage] * self.stored_channels
        sizes = map(self.size, range(self.levels))
        return sum(width * height for width, height in sizes) * self.layers * texel


class DeviceTexture(Protocol):
    """A layered texture with mip levels, contents undefined."""

    @property
    def surfaces(self) -> list[int]:
        """A surface object for each level, to write through."""

    @property
    def filtered(self) -> int:
        """Texture object: trilinear, clamped to the edge, normalised coordinates, 8-bit values as fractions."""

    @property
    def nearest(self) -> int:
        """The same by the nearest texel of the nearest level."""

    @property
    def anisotropic(self) -> int:
        """As `filtered`, with up to 16 times as many samples along the longer side of a footprint."""

    def delete(self) -> None:
        """Nothing uses it any more."""


class Device(Protocol):
    """A GPU. Everything is queued on torch's current stream."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def texture_side(self) -> int:
        """Largest side of a texture."""

    @property
    def texture_layers(self) -> int: ...

    @property
    def multiprocessors(self) -> int: ...

    @property
    def shared_bytes(self) -> int:
        """Of a multiprocessor."""

    def capturing(self) -> bool:
        """True while the current stream is captured into a CUDA graph."""

    def stream(self) -> int:
        """torch's current stream; its default one is one of DEFAULT_STREAMS."""

    def launch(self, kernel: Kernel, grid: Grid, threads: int, parameters: ctypes.Structure) -> None:
        """Queue a kernel; compile it first if need be."""

    def make_texture(self, key: TextureKey) -> DeviceTexture: ...

    def record(self) -> Any:
        """An event after what is queued on the current stream."""

    def mark(self) -> Any:
        """An event after everything that is queued on the device."""

    def wait(self, event: Any) -> None:
        """The current stream waits for an event."""

    def finish(self, event: Any) -> None:
        """The host waits for an event."""

    def release_cache(self) -> None:
        """Give back memory that torch keeps and does not use."""


def per_device(make: Callable[[Device], T]) -> Callable[[Device], T]:
    """One object a device, made when it is first asked for."""
    made: dict[Device, T] = {}
    lock = threading.Lock()

    def get(device: Device) -> T:
        with lock:
            if device not in made:
                made[device] = make(device)
            return made[device]

    return get


def check_blocks(images: torch.Tensor, patch: int, *, fits: bool = True) -> None:
    """Raises LimitError where images [B, C, H, W] have more patches than a launch has blocks, or do not fit it else."""
    batch, (height, width) = images.shape[0], images.shape[-2:]
    if not fits or batch * -(-height // patch) * -(-width // patch) > MOST_BLOCKS:
        raise LimitError(
            f"{batch} images of {width} x {height} in patches of {patch} are more than a CUDA launch covers. Use a "
            "smaller batch."
        )


_lock = threading.Lock()


def check_kind(device: torch.device) -> None:
    """Raises UnsupportedError for tensors that no kernel takes."""
    if device.type != KIND:
        raise UnsupportedError(
            f"the tensor is on {device}, and backend='cuda' takes CUDA tensors. Move it with .to('cuda'), or use "
            "backend='torch' or 'gl'."
        )


def device_of(tensor: torch.Tensor) -> Device:
    """The device of a tensor.

    Raises:
        UnsupportedError: no kernel takes it.
        CudaUnavailableError: CUDA cannot be used here.
    """
    check_kind(tensor.device)
    with _lock:
        return open_device(tensor.device)


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether kernels run on the tensors of a device."""
    try:
        check_kind(device)
        with _lock:
            open_device(device)
    except GpuLodError:
        return False
    return True


@functools.cache
def open_device(device: torch.device) -> Device:
    from gpu_lod.kernels.driver import CudaDevice

    return CudaDevice(torch.cuda.current_device() if device.index is None else device.index)
