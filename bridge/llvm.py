"""Several LLVMs in one process: that of Mesa's driver, and those that other libraries bring.

Mesa opens its driver with RTLD_GLOBAL, where it opens one (22.3 does, 25.0 is linked with it): its libLLVM then serves
whatever is loaded from there on. Triton's library, which comes with CUDA builds of torch, has an LLVM of its own, of
another version, and exports it since Triton 3.7. Loaded behind Mesa's driver it calls Mesa's, and the process dies at
the first `import torch._dynamo`: of torch.compile, of an optimizer. What is loaded before calls its own.

TensorFlow (since 2.20) lets its LLVM serve all: Mesa's driver, loaded behind it, would die of its first shader.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "name", "address")))


def in_the_way() -> str | None:
    """The file that an LLVM which serves all is in, where it is not the one that Mesa brings."""
    found = _serves_all()
    name = Path(found or "").name
    mesas = name.startswith(("libLLVM", "libgallium")) or name.endswith("_dri.so")
    return None if mesas else found


def _serves_all() -> str | None:
    process, symbol = ctypes.CDLL(None), _Symbol()
    if sys.platform != "linux" or not hasattr(process, "LLVMContextCreate"):
        return None
    process.dladdr(ctypes.cast(process.LLVMContextCreate, ctypes.c_void_p), ctypes.byref(symbol))
    return os.path.realpath(os.fsdecode(symbol.file or b""))


def keep_apart(opening: bool) -> None:
    """Load Triton's library, where it is installed, so that it calls its own LLVM.

    Args:
        opening: a driver is about to be opened that may bring an LLVM. If not, only one that is there already counts.
    """
    # RTLD_DEEPBIND helps once the other one serves all, but also keeps from the library an allocator that a program
    # has put in the place of libc's.
    late = _serves_all() is not None
    if late or (opening and not _is_linked()):
        _load(os.RTLD_NOW | (os.RTLD_DEEPBIND if late else 0))


def _is_linked() -> bool:
    """Whether Mesa's EGL is linked with its driver: that is loaded with it, and its LLVM serves nobody else."""
    with suppress(OSError):
        return "/libgallium-" in Path("/proc/self/maps").read_text()
    return False


@functools.cache
def _load(mode: int) -> None:
    try:
        found = importlib.util.find_spec("triton") if sys.platform == "linux" else None
    except ValueError:  # a stand-in, whose __spec__ is None
        return
    for folder in (found and found.submodule_search_locations) or ():
        for library in Path(folder, "_C").glob("libtriton*.so"):
            with suppress(OSError):  # broken: whoever imports it will hear of it
                ctypes.CDLL(str(library), mode)
