"""What a context shares with torch: its buffers, by the bridge to the device that a verb's tensors are on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from gpu_lod import recording
from gpu_lod.bridge import Bridge, HostBridge, InteropBridge, Pool, PrivatePool, egl
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.borrowed import EXTENSION
from gpu_lod.bridge.cuda import CudaDriver, check_available
from gpu_lod.bridge.gl import GL
from gpu_lod.bridge.interop import Driver
from gpu_lod.bridge.pool import hold
from gpu_lod.bridge.pycuda import PyCudaDriver
from gpu_lod.errors import (
    CaptureError,
    DeviceLostError,
    DeviceMismatchError,
    GpuLodError,
    InputError,
    OutOfMemoryError,
)
from gpu_lod.glstate import preserved
from gpu_lod.program import Programs
from gpu_lod.shield import Shield
from gpu_lod.texture import TexturePool
from gpu_lod.tuning import Tuning, tuning
from gpu_lod.turns import Turns

if TYPE_CHECKING:
    from typing_extensions import Self

Interop = Literal["cuda", "pycuda"]
DRIVERS: dict[Interop, Callable[[int], Driver]] = {"cuda": CudaDriver, "pycuda": PyCudaDriver}

T = TypeVar("T")


@dataclass
class Limits:
    """Limits of the device. Lowering `storage_bytes` makes verbs split their work earlier."""

    storage_bytes: int
    """Largest range of a storage-buffer binding."""
    texture_size: int
    """Largest side of a texture."""
    layers: int
    """Most layers of an array texture that can be sampled and rendered to."""
    texels: int
    """Most texels of a texture in a buffer."""
    shared_bytes: int
    """Shared memory of a workgroup."""
    subgroup: int
    """Invocations of a subgroup, where compute shaders may shuffle values between them; else 0."""
    lanes: bool | None = None
    """What `subgroups.usable` found out about them; None is nothing yet."""


def _subgroup(gl: GL, extensions: Set[str]) -> int:
    if "GL_KHR_shader_subgroup" not in extensions:
        return 0
    stages, features = gl.integer(G.SUBGROUP_SUPPORTED_STAGES_KHR), gl.integer(G.SUBGROUP_SUPPORTED_FEATURES_KHR)
    able = stages & G.COMPUTE_SHADER_BIT and features & G.SUBGROUP_FEATURE_SHUFFLE_BIT_KHR
    return gl.integer(G.SUBGROUP_SIZE_KHR) if able else 0


@cache
def _is_software(renderer: str) -> bool:
    return any(name in renderer.lower() for name in ("llvmpipe", "softpipe", "swiftshader", "swrast"))


class Constants:
    """Small tables that verbs keep in GL memory between calls, the least recently used dropped first."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._tables: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._tables:
            self._tables[key] = make()
            if len(self._tables) > self._most:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        table: T = self._tables[key]
        hold(table)
        return table

    def clear(self) -> None:
        self._tables.clear()


class Sharing(Turns):
    """Runs verbs, and makes, finds and frees the memory that they share with torch."""

    gl: GL
    bridge: Bridge
    """That of the running verb: `host` or `interop`."""
    host: HostBridge
    interop: InteropBridge | None
    """The bridge to CUDA tensors, made with the first of them."""
    private: PrivatePool
    textures: TexturePool
    constants: Constants
    programs: Programs
    limits: Limits
    tuning: Tuning
    renderer: str
    _interop_by: Interop
    _active: int
    _unfinished: bool
    _outer_bridges: list[Bridge]
    """Of verbs around the running one that have another."""

    def _start_sharing(self, gl: GL, extensions: Set[str]) -> None:
        self.gl = gl
        self.renderer = gl.string(G.RENDERER)
        self.host = self.bridge = HostBridge(
            gl, borrows=self.software and EXTENSION in extensions, outlive=self.device is None
        )
        self.interop = None
        self._interop_by = "cuda"
        self.private = PrivatePool(gl, fetched=self.fetches)
        self.textures = TexturePool(gl, self.software)
        self.constants = Constants()
        self.limits = Limits(
            # Element indices must stay below 2^31.
            storage_bytes=min(gl.integer(G.MAX_SHADER_STORAGE_BLOCK_SIZE), 2**31 - 2**20),
            texture_size=gl.integer(G.MAX_TEXTURE_SIZE),
            layers=min(gl.integer(G.MAX_ARRAY_TEXTURE_LAYERS), gl.integer(G.MAX_FRAMEBUFFER_LAYERS)),
            texels=gl.integer(G.MAX_TEXTURE_BUFFER_SIZE),
            shared_bytes=gl.integer(G.MAX_COMPUTE_SHARED_MEMORY_SIZE),
            subgroup=_subgroup(gl, extensions),
        )
        self.tuning = tuning(software=self.software)
        self._active = 0
        self._unfinished = False
        self._outer_bridges = []

    @property
    def software(self) -> bool:
        """True on a software renderer (llvmpipe, softpipe, SwiftShader)."""
        return _is_software(self.renderer)

    @property
    def fetches(self) -> bool:
        """True where shaders had better read buffers as buffer textures: on llvmpipe itself. Zink, OpenGL by way of
        Vulkan, over Mesa's software Vulkan reads what was never written (Mesa 26.2, with descriptor buffers)."""
        return self.software and self.renderer.startswith("llvmpipe")

    @contextmanager
    def active(self, device: torch.device | None = None) -> Iterator[Self]:
        """What every verb runs in: the lock, the context current, and on exit GL's work visible to torch. (On CUDA only
        once the outermost block ends: until then what verbs made is OpenGL's.)

        Args:
            device: where the verb's tensors are; None is the CPU.
        """
        with Shield():
            recording.enters(self.gl)
            self._acquire()
            try:
                if self._active:  # a verb inside a verb, or inside a plan: the outer one waits
                    yield from self._inside(device)
                    return
                self._active += 1
                try:
                    if self.device is None:
                        with preserved(self.gl):
                            yield from self._work(device)
                    else:
                        yield from self._work(device)
                finally:
                    self._active -= 1
            finally:
                self._release()

    def _work(self, device: torch.device | None) -> Iterator[Self]:
        if self._unfinished:  # a signal cut the last verb short: its work may still use what comes back now
            self._finish()
        bridge = self._bridge_for(device or self.host.device)
        bridge.begin()
        self.bridge, self._unfinished = bridge, True
        try:
            self.textures.drain()
            self.private.drain()
            self.gl.clear_errors()
            yield self
            self.gl.check("this call")
        except BaseException:
            self.programs.forget()
            raise
        finally:
            # Also after an exception: buffers go back to the pool, and torch may write to them at once.
            self._finish()

    def _inside(self, device: torch.device | None) -> Iterator[Self]:
        outer = self.bridge
        bridge = outer if device is None else self._bridge_for(device)
        if recording.current() is not None:
            yield from self._within(bridge)
            return
        # A finalizer may call a verb amid another one, between what it binds and what it dispatches.
        self.gl.check("this call")
        try:
            with preserved(self.gl), self.programs.kept():
                yield from self._within(bridge)
                if bridge.coherent:  # torch may read it before the outer block ends
                    self.gl.MemoryBarrier(G.CLIENT_MAPPED_BUFFER_BARRIER_BIT)
                    self.gl.Finish()
                self.gl.check("this call")
        finally:
            self.gl.clear_errors()  # of bindings whose objects were deleted meanwhile

    def _within(self, bridge: Bridge) -> Iterator[Self]:
        outer = self.bridge
        if bridge is outer:
            yield self
            return
        recording.decides("it works on CPU and on CUDA tensors")
        begun = bridge in self._outer_bridges
        if not begun:
            bridge.begin()
        self._outer_bridges.append(outer)
        self.bridge = bridge
        try:
            yield self
        finally:
            self.bridge = self._outer_bridges.pop()
            if not begun:
                bridge.end()

    def _finish(self) -> None:
        try:
            self.bridge.end()
        finally:
            self._unfinished = False
            self.bridge = self.host

    def _bridge_for(self, device: torch.device) -> Bridge:
        """The bridge to tensors on `device`; the context must be current."""
        if self.interop is not None and device == self.interop.device:
            return self.interop
        if device.type != "cuda":
            return self.host
        if self.interop is None:
            self.interop = self._connect(device)
        else:
            raise DeviceMismatchError(
                f"the tensor is on {device}, and this context ({self.renderer}) shares memory with "
                f"{self.interop.device}. Leave the `with` block of this context, open "
                f"gpu_lod.Context({str(device)!r}), or move the tensor."
            )
        return self.interop

    def _connect(self, device: torch.device, driver: Driver | None = None) -> InteropBridge:
        """A bridge to a CUDA device, which must be the GPU that this context is on."""
        if self.software:
            raise DeviceMismatchError(
                f"the tensor is on {device}, and this OpenGL context is a software renderer ({self.renderer}), which "
                f"shares no memory with CUDA. {egl.INSTALL_HINT} Or use backend='torch'."
            )
        driver = driver or DRIVERS[self._interop_by](device.index)
        before = driver.activate()
        try:
            doubt = driver.check_same_gpu(self.renderer)
        finally:
            driver.restore(before)
        bridge = InteropBridge(self.gl, driver)
        if doubt is not None:
            refusal = ""
            self.gl.clear_errors()  # of the program's, in an adopted context
            try:
                bridge.prove()
            except (CaptureError, DeviceLostError, OutOfMemoryError):
                raise
            except GpuLodError as error:
                refusal = str(error)  # without its traceback, which holds the buffer
            if refusal:
                with suppress(GpuLodError):
                    bridge.trim()
                raise DeviceMismatchError(
                    f"the OpenGL context ({self.renderer}) shares no memory with {device}: {refusal} And whether it is "
                    f"on that GPU could not be asked: {doubt}"
                )
        return bridge

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def tensor_device(self) -> torch.device:
        """Where `empty` makes tensors by default: the CUDA device that this context is on, if torch has it, else the
        CPU."""
        return self.interop.device if self.interop is not None else self.host.device

    def empty(
        self, *shape: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """A tensor whose memory is a GL buffer, so that verbs read it without a copy. Contents are undefined.

        Args:
            shape: sides, or one sequence of them; the dtype may follow.
            dtype: uint8, float16, bfloat16 or float32; None is float32.
            device: "cpu" or the CUDA device that this context is on; None is `tensor_device`, which is CUDA for a
                context opened with a CUDA device or used with a CUDA tensor before.

        Returns:
            A contiguous tensor. Its memory returns to the context's pool when its last alias dies. On CUDA it is
            OpenGL's while a verb reads it: no other thread may use it meanwhile.

        Raises:
            InputError: a shape, dtype or device that cannot be had.
            DeviceMismatchError: the CUDA device is not the GPU that this context is on.
            OutOfMemoryError: the device has no room left.
        """
        if shape and isinstance(shape[-1], torch.dtype) and dtype is None:
            *shape, dtype = shape  # type: ignore[assignment]
        dtype = torch.float32 if dtype is None else dtype
        sides = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if dtype not in (torch.uint8, torch.float16, torch.bfloat16, torch.float32):
            raise InputError(
                f"dtype is {dtype}; GL buffers hold uint8, float16, bfloat16 or float32. Convert by .float()."
            )
        if not sides or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in sides):
            raise InputError(f"shape is {sides}; expected one or more positive integers.")
        sides = tuple(map(int, sides))  # numpy's too
        count = 1
        for side in sides:
            count *= side
        with self.active(device=self.tensor_device if device is None else torch_device(device)):
            return self.bridge.lease(count * dtype.itemsize).tensor(dtype, sides)

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's memory is one of this context's GL buffers."""
        return self._bridge_of(tensor).find(tensor) is not None

    def coherent_with(self, tensor: torch.Tensor) -> bool:
        """True if torch may write to GL buffers on the tensor's device between the GL commands of a verb."""
        # The bridge to CUDA, which is not, may not be there yet.
        return tensor.device == self.host.device and self._bridge_of(tensor).coherent

    def _bridge_of(self, tensor: torch.Tensor) -> Bridge:
        return self.interop if self.interop is not None and tensor.device == self.interop.device else self.host

    def _trim(self) -> None:
        self.host.trim()
        if self.interop is not None:
            self.interop.trim()
        self.private.trim()
        self.textures.trim()

    def _leased(self) -> int:
        pools: list[Pool[Any]] = [self.host.pool, self.private.pool, self.textures.pool]
        if self.interop is not None:
            pools.append(self.interop.pool)
        return sum(pool.leased for pool in pools) + self.textures.given


def torch_device(device: torch.device | str) -> torch.device:
    """A CPU or CUDA device, the latter with its index."""
    try:
        result = torch.device(device)
    except RuntimeError as error:
        raise InputError(
            f"device is {device!r}; expected a torch device such as 'cpu' or 'cuda:0' ({error})."
        ) from None
    if result.type not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}; OpenGL shares memory with 'cpu' and 'cuda' tensors.")
    if result.type == "cuda":
        check_available(index := 0 if str(result) == "cuda" else result.index)
        return torch.device("cuda", torch.cuda.current_device() if str(result) == "cuda" else index)
    return result
