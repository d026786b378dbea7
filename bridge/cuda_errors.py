"""What CUDA's error codes mean when memory is shared with OpenGL, and what to do about each.

The numbers are the same in the driver and the runtime API.

Source: CUDA Runtime API, cudaError, and "Graphics Interoperability" on cudaErrorUnknown; CUDA Driver API, CUresult.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_lod.errors import (
    CaptureError,
    CudaUnavailableError,
    DeviceLostError,
    DeviceMismatchError,
    GpuLodError,
    InteropError,
    InteropUnavailableError,
    MappingError,
    OutOfMemoryError,
)

_GRAPHICS = (
    "Install the part of the NVIDIA driver that holds OpenGL (libnvidia-gl, the same version as the kernel module); in "
    "a container pass NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility; see `gpu-lod doctor`, or use "
    "backend='torch'."
)
SAME_GPU = (
    "OpenGL and CUDA must run on one GPU: open the context with gpu_lod.Context(device=tensor.device), or use "
    "backend='torch'."
)
_REPORT = "This is a bug in gpu_lod: please report it with the traceback."
_LOST = "The CUDA context is unusable from now on: start a new process. If it happens again, look at `dmesg` for Xid."
_DRIVER = "Install or update the NVIDIA driver; `nvidia-smi` must list the GPU."
CAPTURE = (
    "OpenGL cannot be recorded into a CUDA graph, and shares no memory while one is recorded: call the verb before or "
    "after torch.cuda.graph(), on whatever thread that is. Inside, mipmap and hiz with backend='torch' can be captured."
)


_Row = tuple[type[GpuLodError], str]


def _table(rows: Iterable[tuple[Iterable[int], type[GpuLodError], str]]) -> dict[int, _Row]:
    return {code: (error, remedy) for codes, error, remedy in rows for code in codes}


_ERRORS: dict[int, _Row] = _table(
    [
        ([1], InteropError, _REPORT),
        (
            [2],
            OutOfMemoryError,
            "Use a smaller image or batch, drop results that are no longer needed, or call Context.trim() and "
            "torch.cuda.empty_cache(): OpenGL cannot use what torch keeps in its cache.",
        ),
        ([3, 4], CudaUnavailableError, "CUDA is not initialised, or is shutting down: do not call verbs at exit."),
        ([34, 35, 36, 803, 804], CudaUnavailableError, _DRIVER),
        ([46], CudaUnavailableError, "Another process holds the GPU exclusively: wait, or choose another one."),
        ([100], CudaUnavailableError, "No CUDA device is visible; look at CUDA_VISIBLE_DEVICES. " + _DRIVER),
        ([101], DeviceMismatchError, SAME_GPU),
        ([201], InteropError, "No CUDA context is current on this thread; call torch.cuda.init() first."),
        ([205, 206], MappingError, "Close other programs that share buffers on this GPU, then try again. " + _GRAPHICS),
        ([207, 208, 211, 212, 213], MappingError, _REPORT),
        (
            [216],
            InteropError,
            "Another CUDA context of this process uses the GPU already, such as one that PyCUDA made. Let everything "
            "use the primary context (pycuda.autoprimaryctx).",
        ),
        (
            [219],
            DeviceMismatchError,
            "CUDA does not know the OpenGL context that is current. It belongs to another GPU or to a software "
            "renderer. " + SAME_GPU,
        ),
        (
            [304],
            InteropUnavailableError,
            "The operating system or the driver refuses CUDA-OpenGL sharing. " + _GRAPHICS,
        ),
        ([400], MappingError, _REPORT),
        ([600], InteropError, "CUDA has not finished yet; synchronise and try again."),
        ([214, 700, 702, 709, 710, 713, 714, 715, 716, 717, 718, 719, 721], DeviceLostError, _LOST),
        ([801], InteropUnavailableError, "This GPU or driver does not share memory with OpenGL. " + _GRAPHICS),
        ([802], CudaUnavailableError, "The system is not ready; is nvidia-fabricmanager running?"),
        ([*range(900, 909)], CaptureError, CAPTURE),
        (
            [999],
            InteropUnavailableError,
            "CUDA gives no reason. The usual ones: the OpenGL context is on another GPU or a software renderer, or the "
            "driver's OpenGL part is missing. " + _GRAPHICS,
        ),
    ]
)


_OUT_OF_TURN = (
    "It says so of a buffer that is mapped already, or not mapped, too: if buffers were shared here before, that is a "
    "bug in gpu_lod; please report it with the traceback. If none were: "
)


def error(code: int, name: str, where: str) -> GpuLodError:
    """The named error for CUDA's `code` (`name` is CUDA's own) met in `where`, with what to do about it."""
    kind, remedy = _ERRORS.get(code, (InteropError, "It is not one that sharing memory is known to give; " + _REPORT))
    if (
        code == 999 and "map" in where.lower()
    ):  # of cudaGraphics-MapResources, -UnmapResources, -ResourceGetMappedPointer
        remedy = _OUT_OF_TURN + remedy
    result = kind(f"CUDA reports error {code} ({name}) in {where}. {remedy}")
    if isinstance(result, (InteropError, InteropUnavailableError)):
        result.code = code
    return result


def known() -> dict[int, type[GpuLodError]]:
    """Every code in the table, and the error that it becomes."""
    return {code: kind for code, (kind, _) in _ERRORS.items()}


_TEXTS = {
    "invalid argument": 1,
    "out of memory": 2,
    "initialization error": 3,
    "CUDA driver version is insufficient for CUDA runtime version": 35,
    "no CUDA-capable device is detected": 100,
    "invalid device ordinal": 101,
    "invalid device context": 201,
    "mapping of buffer object failed": 205,
    "unmapping of buffer object failed": 206,
    "resource already mapped": 208,
    "resource not mapped": 211,
    "invalid OpenGL or DirectX context": 219,
    "OS call failed or operation not supported on this OS": 304,
    "invalid resource handle": 400,
    "an illegal memory access was encountered": 700,
    "operation not supported": 801,
    "operation not permitted when stream is capturing": 900,
    "unknown error": 999,
}
"""CUDA's own words for the codes that sharing memory gives, for libraries that report no number."""


def from_text(message: str, where: str) -> GpuLodError:
    """The named error for a message that holds CUDA's words."""
    found = max((text for text in _TEXTS if text in message), key=len, default=None)
    return error(_TEXTS[found] if found else -1, message, where)
