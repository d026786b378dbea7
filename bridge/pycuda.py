"""The bridge for programs that live in PyCUDA: the same calls as `cuda.CudaDriver`, through `pycuda.gl`.

PyCUDA and torch see each other's memory only inside one CUDA context, so PyCUDA must use the device's primary context,
as `pycuda.autoprimaryctx` does. PyCUDA ties its objects to the thread that made its context: verbs on CUDA tensors
must be called there, and on one thread only. It maps one buffer a call, on CUDA's default stream, which is ordered with
torch's current one by events.

What PyCUDA cannot do, or not safely, the driver is asked for itself: which GPU OpenGL is on, and whether a buffer can
be registered.

Source: PyCUDA reference, "OpenGL Interoperability" (pycuda.gl); src/cpp/cuda_gl.hpp of PyCUDA 2026.1; CUDA Driver API,
"OpenGL Interoperability".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from gpu_lod.errors import (
    ContextNotCurrentError,
    CudaUnavailableError,
    DeviceMismatchError,
    GpuLodError,
    InteropUnavailableError,
    MappingError,
)

from . import cuda_errors
from .cuda import (
    check_available,
    check_not_capturing,
    doubt_of_gpu,
    libcuda,
    poison,
    tensor_over,
    wait_for_device,
)

_HOW_TO_BUILD = (
    "PyCUDA leaves OpenGL out unless it is told: unpack its source, run `python configure.py --cuda-enable-gl` there "
    "(it writes CUDA_ENABLE_GL = True to siteconf.py), then `pip install .`; it needs nvcc, a C++ compiler, OpenGL's "
    "headers (Debian: libgl-dev) and, unless --no-cuda-enable-curand is given too, cuRAND. Or use interop='cuda'."
)


class _Registered:
    """A registered buffer and, while it is mapped, its mapping."""

    __slots__ = ("buffer", "mapping")

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.mapping: Any = None


class PyCudaDriver:
    """`interop.Driver` in the calling program's PyCUDA context.

    Args:
        ordinal: the CUDA device, as torch numbers it.

    Raises:
        CudaUnavailableError: no PyCUDA, or torch sees no such device.
        InteropUnavailableError: PyCUDA was built without OpenGL.
    """

    name = "pycuda"

    def __init__(self, ordinal: int) -> None:
        check_available(ordinal)
        try:
            import pycuda.driver
        except ImportError as error:
            raise CudaUnavailableError(
                f"interop='pycuda' needs PyCUDA ({error}). Install it, or use interop='cuda'. {_HOW_TO_BUILD}"
            ) from None
        try:
            import pycuda.gl
        except ImportError as error:
            raise InteropUnavailableError(f"this PyCUDA has no OpenGL ({error}). {_HOW_TO_BUILD}") from None
        self.device = torch.device("cuda", ordinal)
        self._ordinal = ordinal
        self._thread: threading.Thread | None = None
        """Where it is used."""
        self._driver, self._gl = pycuda.driver, pycuda.gl

    def activate(self) -> None:
        current = self._driver.Context.get_current()
        if current is None:
            raise ContextNotCurrentError(
                "no PyCUDA context is current on this thread. Call verbs on the thread that made it, or "
                "`import pycuda.autoprimaryctx` there first."
            )
        if int(current.handle) != primary_context(self._ordinal):
            raise DeviceMismatchError(
                f"the current PyCUDA context is not the primary context of {self.device}, which torch uses, so neither "
                "sees the other's memory. Use `import pycuda.autoprimaryctx` in place of pycuda.autoinit, or "
                "Device(n).retain_primary_context().push()."
            )
        # Another thread may push the same context by an object of its own, and PyCUDA then refuses to unmap.
        if self._thread is None:
            self._thread = threading.current_thread()
        elif self._thread is not threading.current_thread():
            raise ContextNotCurrentError(
                f"a verb on CUDA tensors was called on thread {self._thread.name} before, and PyCUDA ties buffers to "
                "the thread that registered them. Call verbs there, or use interop='cuda', which any thread may use."
            )
        check_not_capturing()

    def restore(self, before: None) -> None: ...

    def check_same_gpu(self, renderer: str) -> GpuLodError | None:
        lib = libcuda()
        device, count, found = ctypes.c_int(0), ctypes.c_uint(0), (ctypes.c_int * 16)()
        _check(lib, lib.cuDeviceGet(ctypes.byref(device), self._ordinal), "cuDeviceGet")
        code = lib.cuGLGetDevices_v2(ctypes.byref(count), found, 16, 1)  # CU_GL_DEVICE_LIST_ALL
        answer = _error(lib, code, "cuGLGetDevices") if code else found[: count.value]
        return doubt_of_gpu(code, answer, device.value, renderer, self.device)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._ordinal).cuda_stream)

    def register(self, glo: int) -> _Registered:
        try_to_register(glo)
        with _named("pycuda.gl.RegisteredBuffer"):
            return _Registered(self._gl.RegisteredBuffer(glo))

    def unregister(self, handle: _Registered) -> None:
        with _named("RegisteredBuffer.unregister"):
            handle.buffer.unregister()

    def map(self, handles: Sequence[_Registered], stream: int) -> None:
        done: list[_Registered] = []
        default = self._behind(stream)
        try:
            with _named("RegisteredBuffer.map"):
                for handle in handles:
                    handle.mapping = handle.buffer.map()
                    done.append(handle)
        except BaseException:
            with suppress(MappingError):  # of which the first error says more
                self._unmap(done)  # all or none
            raise
        if stream != default.cuda_stream:
            torch.cuda.current_stream(self._ordinal).wait_stream(default)

    def unmap(self, handles: Sequence[_Registered], stream: int) -> None:
        self._behind(stream)
        self._unmap(handles)

    def _unmap(self, handles: Sequence[_Registered]) -> None:
        done: list[_Registered] = []
        try:
            with _named("RegisteredMapping.unmap"):
                for handle in handles:
                    handle.mapping.unmap()
                    if self._is_mapped(handle):  # PyCUDA writes of an error to stderr and raises nothing
                        raise MappingError(
                            "PyCUDA could not give a buffer back to OpenGL; stderr says why. Verbs must be called on "
                            "the thread that made PyCUDA's context. Or use interop='cuda'."
                        )
                    done.append(handle)
        except BaseException:
            for handle in done:  # all or none
                handle.mapping = handle.buffer.map()
            raise
        for handle in done:
            handle.mapping = None

    def _is_mapped(self, handle: _Registered) -> bool:
        try:
            handle.mapping.device_ptr_and_size()
        except Exception as error:
            if type(error).__module__.startswith("pycuda"):
                return False
            raise
        return True

    def _behind(self, stream: int) -> torch.cuda.Stream:
        """The default stream, ordered behind torch's current one."""
        default = torch.cuda.default_stream(self._ordinal)
        if stream != default.cuda_stream:
            default.wait_stream(torch.cuda.current_stream(self._ordinal))
        return default

    def address(self, handle: _Registered) -> tuple[int, int]:
        with _named("RegisteredMapping.device_ptr_and_size"):
            address, nbytes = handle.mapping.device_ptr_and_size()
        return int(address), int(nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return tensor_over(address, nbytes, owner, self.device)

    def mark(self) -> None:
        """PyCUDA has no event behind all streams, so this waits on the host, which no stream may be captured for."""
        wait_for_device(self._ordinal)

    def wait(self, event: None, stream: int) -> None: ...

    def synchronize(self) -> None:
        wait_for_device(self._ordinal)

    @property
    def memory(self) -> int:
        return int(torch.cuda.get_device_properties(self._ordinal).total_memory)

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def poison(self, storage: int, message: str) -> None:
        poison(storage, message)


class _named:
    """Turns what PyCUDA raises into gpu_lod's errors."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and "out-of-thread" in str(error):
            raise ContextNotCurrentError(
                f"PyCUDA's context belongs to another thread ({error}). Call verbs on the thread that made it, or use "
                "interop='cuda', which any thread may use."
            ) from None
        if error is not None and type(error).__module__.startswith("pycuda"):
            raise cuda_errors.from_text(str(error), self._where) from None


def _error(lib: Any, code: int, where: str) -> GpuLodError:
    name = ctypes.c_char_p()
    lib.cuGetErrorName(code, ctypes.byref(name))
    return cuda_errors.error(code, (name.value or b"unknown").decode(), where)


def _check(lib: Any, code: int, where: str) -> None:
    if code:
        raise _error(lib, code, where)


def primary_context(ordinal: int) -> int:
    """Handle of a device's primary context, which torch uses."""
    lib = libcuda()
    device, context = ctypes.c_int(0), ctypes.c_void_p(0)
    _check(lib, lib.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    _check(lib, lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    lib.cuDevicePrimaryCtxRelease_v2(device)  # torch holds it
    return context.value or 0


def try_to_register(glo: int) -> None:
    """Register a GL buffer and let it go again; raises what CUDA refuses.

    When PyCUDA cannot register one, it unregisters a handle that it never got: whatever lies in that memory, such as
    the handle of another buffer.
    """
    lib = libcuda()
    handle = ctypes.c_void_p(0)
    registered = lib.cuGraphicsGLRegisterBuffer(ctypes.byref(handle), ctypes.c_uint(glo), 0)
    _check(lib, registered, "cuGraphicsGLRegisterBuffer")
    _check(lib, lib.cuGraphicsUnregisterResource(handle), "cuGraphicsUnregisterResource")
