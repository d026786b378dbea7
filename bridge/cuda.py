"""The calls of CUDA's runtime and driver that sharing GL buffers with torch takes.

Registration goes through `cuda.bindings.runtime`, which attaches to the primary context that torch uses on any thread,
and reports error codes. (`cuda.core.GraphicsResource` maps one buffer a call, unmaps from finalizers, which run on
threads where no GL context is current, and reports errors as text.) Map and unmap, which every verb calls, are the
driver's own, of many buffers in one call.

Source: CUDA Runtime API, sections "OpenGL Interoperability", "Graphics Interoperability" and "Interactions with the
CUDA Driver API" (a cudaGraphicsResource_t is a CUgraphicsResource); cuGraphicsMapResources, cuGraphicsUnmapResources
and cuCtxRecordEvent (CUDA 12.5) of the Driver API.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpu_lod.errors import (
    CaptureError,
    CudaUnavailableError,
    DeviceLostError,
    DeviceMismatchError,
    GpuLodError,
    InteropUnavailableError,
)

from . import cuda_errors
from .pool import Loan, Returns

# Of torch's CUDA version: bindings of a newer one may ask for a newer driver.
INSTALL = f"pip install 'cuda-bindings=={(torch.version.cuda or '13').split('.')[0]}.*'"

_NO_DEVICE = 100


class _Memory:
    """Device memory as torch takes it without a copy (__cuda_array_interface__, version 3)."""

    __slots__ = ("__cuda_array_interface__", "_owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_over(address: int, nbytes: int, owner: object, device: torch.device) -> torch.Tensor:
    """Mapped device memory as a uint8 tensor [nbytes], which keeps `owner` alive.

    Raises:
        DeviceMismatchError: torch finds the memory elsewhere.
    """
    try:
        tensor = torch.as_tensor(_Memory(address, nbytes, owner), device=device)
    except RuntimeError as error:
        raise DeviceMismatchError(
            f"torch cannot use mapped memory of a GL buffer on {device}: {error}. {cuda_errors.SAME_GPU}"
        ) from None
    if tensor.data_ptr() != address:  # it was copied, to another device
        raise DeviceMismatchError(
            f"torch finds the mapped memory of a GL buffer on another device than {device}. {cuda_errors.SAME_GPU}"
        )
    return tensor


class Event(Loan[Any]):
    """A CUDA event, given back to its maker's stock when nobody refers to it.

    Recording it again is legal then: who waited captured the event's state of that time.
    """

    __slots__ = ()

    @property
    def handle(self) -> Any:
        return self.item


class CudaDriver:
    """`interop.Driver` for torch's own CUDA context.

    Args:
        ordinal: the CUDA device, as torch numbers it.

    Raises:
        CudaUnavailableError: torch sees no such device, or cuda-bindings is missing.
    """

    name = "cuda"

    def __init__(self, ordinal: int) -> None:
        check_available(ordinal)
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise CudaUnavailableError(
                f"sharing memory between CUDA and OpenGL needs the package cuda-bindings ({error}). Install it with "
                f"{INSTALL}, or use backend='torch'."
            ) from None
        self.device = torch.device("cuda", ordinal)
        self._ordinal = ordinal
        self._cu, self._rt = driver, runtime
        self._map, self._unmap = graphics_calls()
        self._success = int(runtime.cudaError_t.cudaSuccess)
        self._events: Returns[Any] = Returns()
        self.context_events = True
        """Whether one event can stand behind all streams; else the host waits for the device."""
        torch.cuda.init()

    # -- threads and devices ------------------------------------------------------------------------------------------

    def activate(self) -> tuple[int, Any]:
        check_not_capturing()  # before any call that a capture might forbid
        before = self._call("cudaGetDevice", self._rt.cudaGetDevice())
        # Also where it is the device already: the first call on a thread makes the primary context current there.
        self._call("cudaSetDevice", self._rt.cudaSetDevice(self._ordinal))
        try:
            if before != self._ordinal:
                check_not_capturing()  # on that device's stream
            # A capture on another thread forbids unsafe calls to all threads but those that say this.
            mode = self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
            mode = self._call("cudaThreadExchangeStreamCaptureMode", self._rt.cudaThreadExchangeStreamCaptureMode(mode))
        except BaseException:
            self._put_back(before)
            raise
        return int(before), mode

    def restore(self, before: tuple[int, Any]) -> None:
        device, mode = before
        self._put_back(device)
        self._call("cudaThreadExchangeStreamCaptureMode", self._rt.cudaThreadExchangeStreamCaptureMode(mode))

    def _put_back(self, device: int) -> None:
        if device != self._ordinal:
            # Unlike cudaSetDevice it makes no context on a device that this process has not used.
            torch.cuda._maybe_exchange_device(device)

    @property
    def memory(self) -> int:
        return int(torch.cuda.get_device_properties(self._ordinal).total_memory)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._ordinal).cuda_stream)

    def check_same_gpu(self, renderer: str) -> GpuLodError | None:
        code, *found = self._rt.cudaGLGetDevices(16, self._rt.cudaGLDeviceList.cudaGLDeviceListAll)
        answer: list[int] | GpuLodError
        if int(code) == self._success:
            count, ordinals = found
            answer = [*ordinals][:count]
        else:
            answer = cuda_errors.error(int(code), self._error_name(int(code)), "cudaGLGetDevices")
        return doubt_of_gpu(int(code), answer, self._ordinal, renderer, self.device)

    # -- buffers ------------------------------------------------------------------------------------------------------

    def register(self, glo: int) -> Any:
        # Read and written by both, so no usage hint: flags 0.
        handle = self._call("cudaGraphicsGLRegisterBuffer", self._rt.cudaGraphicsGLRegisterBuffer(glo, 0))
        if not int(handle):  # which nobody checks when it is to be mapped
            have = _version()
            raise InteropUnavailableError(
                "cudaGraphicsGLRegisterBuffer succeeds and returns no handle, as it does in some releases of "
                f"cuda-bindings; here is {have}. Install another, {INSTALL[:-1]},!={have}', or use interop='pycuda'."
            )
        return handle

    def unregister(self, handle: Any) -> None:
        self._call("cudaGraphicsUnregisterResource", self._rt.cudaGraphicsUnregisterResource(handle))

    def map(self, handles: Sequence[Any], stream: int) -> None:
        self._hand_over("cuGraphicsMapResources", self._map, handles, stream)

    def unmap(self, handles: Sequence[Any], stream: int) -> None:
        self._hand_over("cuGraphicsUnmapResources", self._unmap, handles, stream)

    def _hand_over(self, name: str, call: Any, handles: Sequence[Any], stream: int) -> None:
        code = call(len(handles), (ctypes.c_void_p * len(handles))(*map(int, handles)), stream)
        if code != self._success:
            raise cuda_errors.error(code, self._error_name(code), name)

    def address(self, handle: Any) -> tuple[int, int]:
        address, nbytes = self._call(
            "cudaGraphicsResourceGetMappedPointer", self._rt.cudaGraphicsResourceGetMappedPointer(handle)
        )
        return int(address), int(nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return tensor_over(address, nbytes, owner, self.device)

    # -- order --------------------------------------------------------------------------------------------------------

    def mark(self) -> Event | None:
        """While a stream of the context is captured, by any thread and in any mode, CUDA refuses what looks at every
        stream, and invalidates the capture. Events on single streams would not do: nobody knows which of them use a
        tensor."""
        if self.context_events:
            handle = self._events.pop() if self._events else self._call("cuEventCreate", self._cu.cuEventCreate(2))
            event = Event(handle, self._events)
            try:
                context = self._call("cuCtxGetCurrent", self._cu.cuCtxGetCurrent())
                code = int(self._cu.cuCtxRecordEvent(context, handle)[0])
            except (AttributeError, RuntimeError):  # bindings or a driver from before CUDA 12.5
                code = -1
            if code == self._success:
                return event
            error = cuda_errors.error(code, self._error_name(code), "cuCtxRecordEvent")
            if isinstance(error, (CaptureError, DeviceLostError)):
                raise error
            self.context_events = False
        wait_for_device(self._ordinal)
        return None

    def wait(self, event: Event, stream: int) -> None:
        self._call("cuStreamWaitEvent", self._cu.cuStreamWaitEvent(stream, event.handle, 0))

    # -- memory -------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._ordinal).synchronize()

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def poison(self, storage: int, message: str) -> None:
        poison(storage, message)

    def _call(self, name: str, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != self._success:
            raise cuda_errors.error(int(code), self._error_name(int(code)), name)
        return values[0] if len(values) == 1 else values

    def _error_name(self, code: int) -> str:
        try:
            return str(self._rt.cudaError_t(code).name)
        except ValueError:
            return "unknown"


def _version() -> str:
    try:
        return version("cuda-bindings")
    except PackageNotFoundError:
        return "0"


def libcuda() -> ctypes.CDLL:
    """NVIDIA's driver.

    Raises:
        CudaUnavailableError: there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailableError(
            f"NVIDIA's driver does not load: {error}. Install or update it; `nvidia-smi` must list the GPU."
        ) from None


def graphics_calls() -> tuple[Any, Any]:
    """cuGraphicsMapResources and cuGraphicsUnmapResources. By way of cuda-bindings each takes the CPU longer.

    Raises:
        CudaUnavailableError: there is no driver.
    """
    library = libcuda()
    calls = library.cuGraphicsMapResources, library.cuGraphicsUnmapResources
    for call in calls:
        call.argtypes, call.restype = (ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    return calls


def check_available(ordinal: int) -> None:
    """Raises CudaUnavailableError if torch sees no such CUDA device."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            f"torch is built for CUDA {built} and finds no device; `nvidia-smi` and CUDA_VISIBLE_DEVICES say more"
            if built
            else "torch is built without CUDA; pytorch.org says how to install one that has it"
        )
        raise CudaUnavailableError(f"no CUDA: {why}. Or use CPU tensors.")
    if not 0 <= ordinal < torch.cuda.device_count():
        raise CudaUnavailableError(
            f"there is no CUDA device {ordinal}; torch sees 0 to {torch.cuda.device_count() - 1}. Look at "
            "CUDA_VISIBLE_DEVICES."
        )


def doubt_of_gpu(
    code: int, answer: Sequence[int] | GpuLodError, ordinal: int, renderer: str, device: torch.device
) -> GpuLodError | None:
    """`interop.Driver.check_same_gpu`, of what CUDA answered to which devices OpenGL is on.

    Args:
        code: CUDA's, 0 for success.
        answer: the devices, by the numbers of the library that was asked, or the error that the code is.
        ordinal: the number of `device` there.
    """
    if isinstance(answer, GpuLodError):
        if code != _NO_DEVICE:
            return answer
        raise DeviceMismatchError(f"the OpenGL context ({renderer}) is on no GPU that CUDA can use: {answer}")
    if ordinal not in answer:
        raise DeviceMismatchError(
            f"the OpenGL context ({renderer}) is on CUDA device {[*answer]}, and the tensor on {device}. Open the "
            f"context with gpu_lod.Context({str(device)!r}), or move the tensor."
        )
    return None


def check_not_capturing() -> None:
    """Raises CaptureError if the current stream is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"a CUDA graph is being captured on the current stream. {cuda_errors.CAPTURE}")


def wait_for_device(ordinal: int) -> None:
    """Wait on the host for all streams of a device.

    Raises:
        CaptureError: one of them is being captured, by any thread.
        DeviceLostError, InteropError: CUDA reports something else.
    """
    try:
        torch.cuda.synchronize(ordinal)
    except RuntimeError as error:
        raise cuda_errors.from_text(str(error), "cudaDeviceSynchronize") from error


def poison(storage: int, message: str) -> None:
    """Make every later use of a torch storage (its C++ address) raise `message`; CUDA builds of torch can."""
    release = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if release is not None:
        release(storage, message)
