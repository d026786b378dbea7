"""The errors of gpu_lod: one root, and a message that says what came, what was expected, and the way out."""

from __future__ import annotations


class GpuLodError(Exception):
    """Root of every error that gpu_lod raises on purpose."""


class InputError(GpuLodError, ValueError):
    """An argument has the wrong shape, dtype, range or value."""


class FileError(GpuLodError, OSError):
    """A file could not be read or written, or is not what it should be."""


class CheckpointError(FileError):
    """A checkpoint cannot be read, or is one of another configuration."""


class LimitError(GpuLodError):
    """The request is well formed but larger than a limit of the device."""


class UnsupportedError(GpuLodError):
    """The device, driver or backend lacks something that was asked for by name."""


class CalibrationBusyError(GpuLodError, RuntimeError):
    """Another process calibrates, and times that are taken meanwhile would be wrong, its own too."""


class GLUnavailableError(UnsupportedError):
    """No usable OpenGL context can be made on this machine."""


class ShaderError(GpuLodError):
    """A shader could not be found, assembled, compiled or linked."""


class GLError(GpuLodError):
    """The driver reported an error."""


class OutOfMemoryError(GLError, MemoryError):
    """The driver reported that it is out of memory, in OpenGL or in CUDA."""


class ContextError(GpuLodError, RuntimeError):
    """A context cannot be used here and now."""


class ContextClosedError(ContextError):
    """The context was closed."""


class ForkedContextError(ContextError):
    """OpenGL was opened before a fork; GL contexts do not survive it."""


class ContextBusyError(ContextError):
    """Another thread holds the context and does not let go."""


class ContextNotCurrentError(ContextError):
    """An adopted context is not current on the calling thread."""


class PyramidChangedError(GpuLodError, RuntimeError):
    """A tensor of a pyramid was written to after the pyramid had been built."""


class InputChangedError(GpuLodError, RuntimeError):
    """What a verb was given, or returned, was written to between the forward and the backward, which reads it."""


class InteropError(GpuLodError, RuntimeError):
    """Sharing memory between CUDA and OpenGL failed. The root of what the CUDA bridges raise, but for
    `UnsupportedError` and `OutOfMemoryError`."""

    code: int | None = None
    """CUDA's error code, if CUDA reported one."""


class BufferMovedError(InteropError):
    """A GL buffer came back at another CUDA address, or did not come back: tensors over it are no longer valid. Or
    tensors of a plan were given other memory than its commands know."""


class MappingError(InteropError):
    """A buffer was mapped, unmapped or used out of turn."""


class DeviceMismatchError(InteropError):
    """A tensor, a CUDA context and an OpenGL context are not on the same GPU."""


class CaptureError(InteropError):
    """While a CUDA graph was being captured a verb was called that the graph cannot hold: one on OpenGL, or a CUDA
    kernel whose code, texture or tables were not there yet."""


class DeviceLostError(InteropError):
    """The GPU or its CUDA context failed and stays unusable in this process."""


class KernelError(GpuLodError, RuntimeError):
    """A CUDA kernel could not be compiled, loaded or launched."""


class CudaUnavailableError(UnsupportedError):
    """No usable CUDA device, driver or library."""


class InteropUnavailableError(UnsupportedError):
    """CUDA and OpenGL both work here, and cannot share memory."""

    code: int | None = None
    """CUDA's error code, if CUDA reported one."""


class GpuLodWarning(UserWarning):
    """Root of every warning that gpu_lod gives."""


class CalibrationWarning(GpuLodWarning):
    """Measured times in the user's cache folder cannot be used: "auto" does without them."""
