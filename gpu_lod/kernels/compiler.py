"""Kernels into machine code: from memory, from disk, or by NVRTC at first use.

Source: NVRTC, the CUDA runtime compilation library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from typing import Any

import torch

from gpu_lod.errors import CudaUnavailableError, KernelError
from gpu_lod.kernels import cubins, sources
from gpu_lod.kernels.sources import Kernel

_lock = threading.Lock()
_made: dict[tuple[Kernel, str], bytes] = {}


def cubin(kernel: Kernel, arch: str, *, anew: bool = False) -> bytes:
    """The kernel's machine code for an architecture such as "sm_90".

    Args:
        anew: whatever is in memory or on disk, compile it.

    Raises:
        CudaUnavailableError: NVRTC, or its bindings, are missing.
        KernelError: it does not compile.
    """
    with _lock:
        if anew or (kernel, arch) not in _made:
            name = _key(kernel, arch)
            code = None if anew else cubins.load(name)
            if code is None:
                code, _ = build(kernel, arch)
                cubins.keep(name, code)
            _made[kernel, arch] = code
        return _made[kernel, arch]


def options(kernel: Kernel, arch: str) -> list[str]:
    """NVRTC's command line."""
    return [f"--gpu-architecture={arch}", "--std=c++17", *(f"--define-macro={name}" for name in kernel.defines)]


def _key(kernel: Kernel, arch: str) -> str:
    """Everything that the machine code depends on."""
    texts = [sources.texts()[kernel.file], *sorted(sources.headers().items())]
    what = json.dumps([texts, options(kernel, arch), version()])
    return hashlib.sha256(what.encode()).hexdigest()


def build(kernel: Kernel, arch: str) -> tuple[bytes, str]:
    """Compile: the machine code, and what the compiler had to say."""
    nvrtc = _nvrtc()
    headers = sources.headers()
    program = _call(
        nvrtc.nvrtcCreateProgram(
            sources.texts()[kernel.file].encode(),
            kernel.file.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        ),
        f"taking {kernel.file}",
    )
    try:
        how = [option.encode() for option in options(kernel, arch)]
        code = int(nvrtc.nvrtcCompileProgram(program, len(how), how)[0])
        log = _bytes(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode()
        if code:
            raise KernelError(
                f"{kernel.file} {' '.join(kernel.defines)} does not compile for {arch} (NVRTC {version()}, error "
                f"{code}). If the GPU is newer than NVRTC, install a newer one with {install_line()}; or use "
                f"backend='torch'.\n{log}"
            )
        return _bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(program: Any, size: Any, get: Any) -> bytes:
    # cuda-bindings writes into the object itself. Python has one object for each single byte, and an empty log is one
    # byte long: that would be written over for the whole process.
    count = _call(size(program), "asking for a result")
    buffer = b" " * (count + 2)
    _call(get(program, buffer), "taking a result")
    return buffer[:count]


def _call(result: tuple[Any, ...], doing: str) -> Any:
    code, *values = result
    if int(code):
        raise KernelError(f"NVRTC reports error {int(code)} {doing}. This is a bug in gpu_lod: please report it.")
    return values[0] if len(values) == 1 else values


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the library is looked for at the first call
        raise CudaUnavailableError(
            f"backend='cuda' compiles its kernels with NVRTC, which cannot be loaded ({error}). Install it with "
            f"{install_line()}, or use backend='torch'."
        ) from None
    return nvrtc


@functools.cache
def version() -> str:
    """Of NVRTC."""
    return ".".join(map(str, _call(_nvrtc().nvrtcVersion(), "telling its version")))


def install_line() -> str:
    """What installs the bindings and NVRTC, of torch's CUDA version."""
    major = (torch.version.cuda or "13").split(".")[0]
    library = "nvidia-cuda-nvrtc-cu12" if major == "12" else f"nvidia-cuda-nvrtc=={major}.*"
    return f"pip install 'cuda-bindings=={major}.*' '{library}' platformdirs"
