"""A GPU through CUDA's driver API, in the primary context that torch uses.

Source: CUDA Driver API; CUDA Programming Guide, "Texture and Surface Memory" and "CUDA Graphs".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from gpu_lod.bridge import Returns, cuda_errors
from gpu_lod.bridge.cuda import Event, check_available
from gpu_lod.cached import capturing
from gpu_lod.errors import (
    CaptureError,
    CudaUnavailableError,
    DeviceLostError,
    GpuLodError,
    InteropError,
    KernelError,
    OutOfMemoryError,
)
from gpu_lod.kernels import compiler
from gpu_lod.kernels.device import DEFAULT_STREAMS, Grid, TextureKey
from gpu_lod.kernels.sources import Kernel

WARM_UP = (
    "Call the verb once with the same arguments before the capture (or others as aligned in memory), at fixations or "
    "sites that are CUDA tensors; with anisotropy, sample a pyramid that pyramid.upload(backend='cuda') made a texture."
)
_REMEDIES: dict[type[GpuLodError], str] = {
    OutOfMemoryError: "Use a smaller image or batch, or drop pyramids and results that are no longer needed.",
    CaptureError: WARM_UP,
    DeviceLostError: "The CUDA context is unusable from now on: start a new process, and look at `dmesg` for Xid.",
    CudaUnavailableError: "`nvidia-smi` must list the GPU; update the driver, or look at CUDA_VISIBLE_DEVICES.",
}
_NOT_FOR_THIS_GPU = (200, 209)
"""Machine code that is damaged, or made for another architecture."""


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""What torch's own compiler asks for the stream, without an object around it."""


def error(code: int, name: str, where: str) -> GpuLodError:
    """The named error for CUDA's `code` (`name` is CUDA's own) met in `where`, with what to do about it."""
    kind = cuda_errors.known().get(code)
    if kind not in _REMEDIES:
        kind = KernelError
    remedy = _REMEDIES.get(kind, "This is a bug in gpu_lod: please report it with the traceback.")
    result = kind(f"CUDA reports error {code} ({name}) in {where}. {remedy}")
    if isinstance(result, InteropError):
        result.code = code
    return result


class CudaDevice:
    """`device.Device` over cuda-bindings.

    Args:
        ordinal: the CUDA device, as torch numbers it.

    Raises:
        CudaUnavailableError: torch sees no such device, or cuda-bindings or the driver is missing.
    """

    def __init__(self, ordinal: int) -> None:
        check_available(ordinal)
        try:
            from cuda.bindings import driver

            driver.cuDriverGetVersion()  # finds the library
        except (ImportError, RuntimeError) as reason:
            raise CudaUnavailableError(
                f"backend='cuda' needs NVIDIA's driver and the package cuda-bindings ({reason}). Install it with "
                f"{compiler.install_line()}, or use backend='torch'."
            ) from None
        self.torch_device = torch.device("cuda", ordinal)
        self._ordinal = ordinal
        # torch's is the legacy one; cuda-bindings may be told to take 0 for each thread's own.
        self._default_stream = DEFAULT_STREAMS["CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM" in os.environ]
        self._cu = driver
        self._events: Returns[Any] = Returns()
        self._functions: dict[Kernel, Any] = {}
        self._lock = threading.Lock()
        torch.cuda.init()
        handle = self._call("cuDeviceGet", driver.cuDeviceGet(ordinal))
        self._context = self._call("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
        attribute = driver.CUdevice_attribute

        def limit(*names: str) -> int:
            return min(
                int(
                    self._call(
                        "cuDeviceGetAttribute",
                        driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle),
                    )
                )
                for name in names
            )

        self.arch = f"sm_{limit('COMPUTE_CAPABILITY_MAJOR')}{limit('COMPUTE_CAPABILITY_MINOR')}"
        self.multiprocessors = limit("MULTIPROCESSOR_COUNT")
        self.shared_bytes = limit("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
        kinds = ("TEXTURE2D_LAYERED", "SURFACE2D_LAYERED", "TEXTURE2D_MIPMAPPED")
        self.texture_side = limit(*(f"MAXIMUM_{kind}_{side}" for kind in kinds for side in ("WIDTH", "HEIGHT")))
        self.texture_layers = limit(*(f"MAXIMUM_{kind}_LAYERS" for kind in kinds[:2]))

    # -- streams and order --------------------------------------------------------------------------------------------

    def capturing(self) -> bool:
        return capturing(self.torch_device)

    def stream(self) -> int:
        if _raw_stream is not None:
            return int(_raw_stream(self._ordinal)) or self._default_stream
        return int(torch.cuda.current_stream(self._ordinal).cuda_stream) or self._default_stream

    def record(self) -> Event:
        with self._active():
            event = self._new_event()
            self._call("cuEventRecord", self._cu.cuEventRecord(event.handle, self.stream()))
        return event

    def mark(self) -> Event:
        with self._active():
            event = self._new_event()
            try:
                self._call("cuCtxRecordEvent", self._cu.cuCtxRecordEvent(self._context, event.handle))
                return event
            except (CaptureError, DeviceLostError):
                raise
            except (AttributeError, RuntimeError):  # bindings or a driver from before CUDA 12.5
                pass
            self._call("cuCtxSynchronize", self._cu.cuCtxSynchronize())
            self._call("cuEventRecord", self._cu.cuEventRecord(event.handle, self.stream()))
        return event

    def wait(self, event: Event) -> None:
        with self._active():
            self._call("cuStreamWaitEvent", self._cu.cuStreamWaitEvent(self.stream(), event.handle, 0))

    def finish(self, event: Event) -> None:
        with self._active(), self._unseen_by_captures():
            self._call("cuEventSynchronize", self._cu.cuEventSynchronize(event.handle))

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    # -- kernels ------------------------------------------------------------------------------------------------------

    def launch(self, kernel: Kernel, grid: Grid, threads: int, parameters: ctypes.Structure) -> None:
        cu, stream = self._cu, self.stream()
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        self._call("cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))  # as `_active`, in half the time
        try:
            function = self._functions.get(kernel) or self._load(kernel)
            result = cu.cuLaunchKernel(function, *grid, threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        finally:
            cu.cuCtxPopCurrent()
        self._call("cuLaunchKernel", result)

    def _load(self, kernel: Kernel) -> Any:
        if self.capturing():
            raise CaptureError(
                f"a CUDA graph is being captured, and the kernel {kernel.name!r} ({', '.join(kernel.defines)}) is not "
                f"loaded yet. {WARM_UP}"
            )
        with self._lock:
            if kernel in self._functions:
                return self._functions[kernel]
            with self._unseen_by_captures():
                result = self._cu.cuModuleLoadData(compiler.cubin(kernel, self.arch))
                if int(result[0]) in _NOT_FOR_THIS_GPU:  # whatever is on disk
                    result = self._cu.cuModuleLoadData(compiler.cubin(kernel, self.arch, anew=True))
                module = self._call("cuModuleLoadData", result)
                function = self._call("cuModuleGetFunction", self._cu.cuModuleGetFunction(module, kernel.name.encode()))
            self._functions[kernel] = function
            return function

    # -- textures -----------------------------------------------------------------------------------------------------

    def make_texture(self, key: TextureKey) -> CudaTexture:
        with self._active(), self._unseen_by_captures():
            return CudaTexture(self, key)

    # -- calls --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """torch's context is current on this thread."""
        self._call("cuCtxPushCurrent", self._cu.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._cu.cuCtxPopCurrent()

    @contextlib.contextmanager
    def _unseen_by_captures(self) -> Iterator[None]:
        """A capture forbids calls that may allocate to all threads but those that say this, which it takes no part in.
        On its own thread too: a texture object may first be asked for there."""
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        name = "cuThreadExchangeStreamCaptureMode"
        before = self._call(name, self._cu.cuThreadExchangeStreamCaptureMode(mode))
        try:
            yield
        finally:
            self._call(name, self._cu.cuThreadExchangeStreamCaptureMode(before))

    def _new_event(self) -> Event:
        try:
            handle = self._events.pop()
        except IndexError:
            flags = self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            handle = self._call("cuEventCreate", self._cu.cuEventCreate(flags))
        return Event(handle, self._events)

    def _call(self, name: str, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code):
            raise error(int(code), getattr(code, "name", "unknown"), name)
        return values[0] if len(values) == 1 else values


class CudaTexture:
    """`device.DeviceTexture`: a layered mipmapped array, and objects over it."""

    def __init__(self, device: CudaDevice, key: TextureKey) -> None:
        self._device, self._cu = device, device._cu
        cu, call = device._cu, device._call
        self._levels = key.levels
        self._lock = threading.Lock()
        self._objects: dict[str, Any] = {}
        self._surfaces: list[Any] = []
        wanted = cu.CUDA_ARRAY3D_DESCRIPTOR()
        wanted.Width, wanted.Height, wanted.Depth = key.width, key.height, key.layers
        wanted.Format = {
            "uint8": cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8,
            "float16": cu.CUarray_format.CU_AD_FORMAT_HALF,
            "float32": cu.CUarray_format.CU_AD_FORMAT_FLOAT,
        }[key.storage]
        wanted.NumChannels = key.stored_channels
        wanted.Flags = cu.CUDA_ARRAY3D_LAYERED | cu.CUDA_ARRAY3D_SURFACE_LDST
        self._array = call("cuMipmappedArrayCreate", cu.cuMipmappedArrayCreate(wanted, key.levels))
        try:
            for level in range(key.levels):
                array = call("cuMipmappedArrayGetLevel", cu.cuMipmappedArrayGetLevel(self._array, level))
                resource = cu.CUDA_RESOURCE_DESC()
                resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
                resource.res.array.hArray = array
                self._surfaces.append(call("cuSurfObjectCreate", cu.cuSurfObjectCreate(resource)))
        except BaseException:
            self._free()
            raise

    @property
    def surfaces(self) -> list[int]:
        return [int(surface) for surface in self._surfaces]

    @property
    def filtered(self) -> int:
        return self._object("LINEAR", 1)

    @property
    def nearest(self) -> int:
        return self._object("POINT", 1)

    @property
    def anisotropic(self) -> int:
        return self._object("LINEAR", 16)

    def _object(self, mode: str, anisotropy: int) -> int:
        name = f"{mode} {anisotropy}"
        with self._lock:  # of two threads that ask at once, one makes it
            if name not in self._objects:
                self._objects[name] = self._new_object(mode, anisotropy)
            return int(self._objects[name])

    def _new_object(self, mode: str, anisotropy: int) -> Any:
        cu = self._cu
        resource = cu.CUDA_RESOURCE_DESC()
        resource.resType = cu.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
        resource.res.mipmap.hMipmappedArray = self._array
        wanted = cu.CUDA_TEXTURE_DESC()
        wanted.addressMode = [cu.CUaddress_mode.CU_TR_ADDRESS_MODE_CLAMP] * 3
        wanted.filterMode = wanted.mipmapFilterMode = getattr(cu.CUfilter_mode, f"CU_TR_FILTER_MODE_{mode}")
        # The optimization reads one level where two should be blended.
        wanted.flags = cu.CU_TRSF_NORMALIZED_COORDINATES | cu.CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION
        wanted.maxAnisotropy = anisotropy
        wanted.minMipmapLevelClamp, wanted.maxMipmapLevelClamp = 0.0, float(self._levels - 1)
        with self._device._active(), self._device._unseen_by_captures():
            return self._device._call("cuTexObjectCreate", cu.cuTexObjectCreate(resource, wanted, None))

    def delete(self) -> None:
        with self._device._active(), self._device._unseen_by_captures():
            self._free()

    def _free(self) -> None:
        for made in self._objects.values():
            self._cu.cuTexObjectDestroy(made)
        for surface in self._surfaces:
            self._cu.cuSurfObjectDestroy(surface)
        self._cu.cuMipmappedArrayDestroy(self._array)
        self._objects, self._surfaces = {}, []
