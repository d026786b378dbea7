"""CUDA as the kernels see it, on a machine that has none: the same sources and the same host code, on CPU tensors.

Kernels are compiled as C++ with cuda_shim.h, which says what is emulated and what is checked, and linked to
cuda_runner.cc.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_lod.kernels import sources
from gpu_lod.kernels.device import Grid, TextureKey
from gpu_lod.kernels.sources import Kernel

SHIM, RUNNER = (Path(__file__).with_name(name) for name in ("cuda_shim.h", "cuda_runner.cc"))
COMPILER = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
ASCENDING, DESCENDING, SHUFFLED = range(3)
RUBBISH = 0xCD
_POPCOUNT = ("-mpopcnt",) if platform.machine() == "x86_64" else ()
_FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-w", *_POPCOUNT),
    "-U_FORTIFY_SOURCE",  # which takes a jump to another stack for an error
)
_CHECKS = ("-fsanitize=alignment,bounds,shift,signed-integer-overflow,float-cast-overflow",)
"""Of what a GPU does otherwise than a CPU, or says nothing about. Only to compile with: what they call is in the
runner."""
_BYTES = {"uint8": 1, "float16": 2, "float32": 4}


class _Index(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def _made(suffix: str, texts: dict[str, str], *commands: list[str]) -> Path:
    """A file that the compiler makes of texts, named "made" in the last command; or made before, of the same."""
    digest = hashlib.sha256(repr((sorted(texts.items()), commands, COMPILER)).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"gpu_lod-emulator-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{digest}{suffix}"
    if not path.exists():
        assert COMPILER is not None
        with tempfile.TemporaryDirectory(dir=folder) as build:
            for name, text in texts.items():
                (Path(build) / name).write_text(text)
            for command in commands:
                done = subprocess.run([COMPILER, *command], cwd=build, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
            os.replace(Path(build) / "made", path)
    return path


@functools.cache
def _runner(alone: bool) -> Path:
    """
    Args:
        alone: threads meet at no barrier. They need not be fibers, which take longer.
    """
    flags = [*_FLAGS, "-O2", *(["-DNO_BARRIERS"] if alone else [])]
    texts = {file.name: file.read_text() for file in (SHIM, RUNNER)}
    return _made(".o", texts, [*flags, "-c", RUNNER.name, "-o", "made"])


@functools.cache
def library(kernel: Kernel, parameter: str, changes: tuple[tuple[str, str], ...] = ()) -> Any:
    """A kernel as a shared library.

    Args:
        parameter: the name of its parameter's type.
        changes: of the source or of a header, for tests that break it: (what stands there once, what is put in its
            place).
    """
    texts = {**sources.texts(), "intrinsics.cuh": SHIM.read_text()}
    for before, after in changes:
        file = next((name for name in (kernel.file, *sources.headers()) if before in texts[name]), kernel.file)
        assert texts[file].count(before) == 1, f"{before!r} stands {texts[file].count(before)} times in {file}"
        texts[file] = texts[file].replace(before, after)
    unit = f"""
        #include "intrinsics.cuh"
        #include "{kernel.file}"
        static const {parameter}* given;
        static void call() {{ {kernel.name}(*given); }}
        #define EXPORTED extern "C" __attribute__((visibility("default")))
        EXPORTED size_t parameter_bytes() {{ return sizeof({parameter}); }}
        EXPORTED const char* run(const {parameter}* all, Index grid, int threads, int order, unsigned seed) {{
            given = all;
            return run_grid(call, grid, threads, order, seed);
        }}
    """
    alone = not any(barrier in texts[kernel.file] for barrier in ("__syncthreads", "_of_block(", "_in_block("))
    flags = [*_FLAGS, *_CHECKS, *(f"-D{name}" for name in kernel.defines)]
    made = _made(
        ".so",
        {**texts, "unit.cc": unit},
        [*flags, "-c", "unit.cc", "-o", "unit.o"],
        ["-shared", "unit.o", str(_runner(alone)), "-o", "made"],
    )
    result = ctypes.CDLL(str(made))
    result.parameter_bytes.restype = ctypes.c_size_t
    result.run.restype = ctypes.c_char_p
    result.run.argtypes = (ctypes.c_void_p, _Index, ctypes.c_int, ctypes.c_int, ctypes.c_uint)
    return result


class _Texture(ctypes.Structure):
    _fields_ = (
        ("level", ctypes.c_void_p * 16),
        *((name, ctypes.c_int) for name in ("width", "height", "layers", "levels", "channels")),
        *((name, ctypes.c_int) for name in ("bytes", "filtered", "anisotropy")),
    )


class _Surface(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("width", "height", "layers", "texel_bytes")),
    )


class EmulatedTexture:
    """`device.DeviceTexture` in host memory."""

    def __init__(self, device: EmulatedDevice, key: TextureKey) -> None:
        self._device, self.key = device, key
        self.deleted = False
        channels, size = key.stored_channels, _BYTES[key.storage]
        self._memory, self._surfaces = [], []
        for level in range(key.levels):
            width, height = key.size(level)
            memory = np.full(width * height * key.layers * channels * size, RUBBISH, np.uint8)
            self._memory.append(memory)
            self._surfaces.append(_Surface(memory.ctypes.data, width, height, key.layers, channels * size))
        levels = (ctypes.c_void_p * 16)(*(memory.ctypes.data for memory in self._memory))
        whole = (levels, key.width, key.height, key.layers, key.levels, channels, size)
        self._objects = [_Texture(*whole, 1, 1), _Texture(*whole, 0, 1), _Texture(*whole, 1, 16)]

    def _address(self, thing: ctypes.Structure) -> int:
        assert not self.deleted, "used after it was deleted"
        return ctypes.addressof(thing)

    @property
    def surfaces(self) -> list[int]:
        return [self._address(surface) for surface in self._surfaces]

    @property
    def filtered(self) -> int:
        return self._address(self._objects[0])

    @property
    def nearest(self) -> int:
        return self._address(self._objects[1])

    @property
    def anisotropic(self) -> int:
        return self._address(self._objects[2])

    def delete(self) -> None:
        assert not self.deleted
        self.deleted = True
        self._device.calls.append(("delete", self.key))


class EmulatedDevice:
    """`device.Device` on CPU tensors.

    Attributes:
        calls: what was called, in order: ("launch", kernel, grid, threads) and so on.
        order, seed: of threads, and of blocks (0 is ascending).
        changes: made to sources before they are compiled.
        fail: errors that calls raise, by their names, once.
    """

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.order, self.seed = ASCENDING, 0
        self.changes: tuple[tuple[str, str], ...] = ()
        self.fail: dict[str, Exception] = {}
        self.texture_side, self.texture_layers = 32768, 2048
        self.multiprocessors, self.shared_bytes = 1, 233472
        self.stream_now, self.is_capturing = 7, False
        self._events = 0

    def _call(self, name: str, *what: Any) -> None:
        self.calls.append((name, *what))
        if name in self.fail:
            raise self.fail.pop(name)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]

    def capturing(self) -> bool:
        return self.is_capturing

    def stream(self) -> int:
        return self.stream_now

    def launch(self, kernel: Kernel, grid: Grid, threads: int, parameters: ctypes.Structure) -> None:
        self._call("launch", kernel, grid, threads)
        assert all(1 <= n <= most for n, most in zip(grid, (2**31 - 1, 65535, 65535), strict=True)), grid
        assert threads % 32 == 0 and 32 <= threads <= 1024
        code = library(kernel, type(parameters).__name__, self.changes)
        assert code.parameter_bytes() == ctypes.sizeof(parameters), "host and kernel differ in the parameter's layout"
        wrong = code.run(ctypes.addressof(parameters), _Index(*grid), threads, self.order, self.seed)
        assert wrong is None, wrong.decode()

    def make_texture(self, key: TextureKey) -> EmulatedTexture:
        self._call("make_texture", key)
        assert not self.is_capturing
        return EmulatedTexture(self, key)

    def record(self) -> int:
        return self._event("record")

    def mark(self) -> int:
        return self._event("mark")

    def _event(self, kind: str) -> int:
        self._call(kind, self.stream_now)
        assert not self.is_capturing
        self._events += 1
        return self._events

    def wait(self, event: int) -> None:
        self._call("wait", event, self.stream_now)

    def finish(self, event: int) -> None:
        self._call("finish", event)

    def release_cache(self) -> None:
        self._call("release_cache")
