"""The calls that the CUDA backend makes of the driver: taken by the real bindings, and answered by a stand-in."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_lod.errors import (
    CaptureError,
    CudaUnavailableError,
    DeviceLostError,
    GpuLodError,
    KernelError,
    OutOfMemoryError,
)
from gpu_lod.kernels import compiler, device, driver, sources
from gpu_lod.kernels.device import TextureKey
from gpu_lod.kernels.driver import CudaDevice
from gpu_lod.kernels.samplers import LogPolar, Rings

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

KERNEL = sources.of_dtype("log_polar", torch.float32)
KEY = TextureKey(20, 30, 3, 4, "float16", 3)
_ATTRIBUTES = {"CAPABILITY_MAJOR": 9, "CAPABILITY_MINOR": 0, "LAYERS": 2048, "SURFACE2D_LAYERED_WIDTH": 30000}


SEEN_BY_CAPTURES = (
    "cuMipmappedArrayCreate", "cuSurfObjectCreate", "cuTexObjectCreate", "cuModuleLoadData", "cuEventSynchronize",
)  # fmt: skip


class StandIn:
    """`cuda.bindings.driver` without a driver. Every call is first taken by the real function, which finds wrong
    arguments; then it is written down and answered.

    Attributes:
        fail: codes that calls report, by their names, in turn.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._real = driver
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, list[int]] = {}
        self.absent: set[str] = set()
        self.depth = 0
        self.mode: Any = "global"
        self.capturing = 0
        self.alive: set[int] = set()
        self._handles = itertools.count(1000)

    def __getattr__(self, name: str) -> Any:
        if name in self.absent:
            raise AttributeError(name)
        real = getattr(self._real, name)
        if not name.startswith("cu") or name.startswith("cuda"):
            return real

        def call(*arguments: Any) -> Any:
            if name != "cuThreadExchangeStreamCaptureMode":  # whose argument is given back as it came
                with contextlib.suppress(RuntimeError):  # there is no library
                    real(*arguments)
            self.calls.append((name, *arguments))
            codes = self.fail.get(name)
            if codes:
                code = codes.pop(0)
                if code:
                    return (self._real.CUresult(code), None)
            return (self._real.CUresult.CUDA_SUCCESS, *self._answer(name, arguments))

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        free = (
            "cuDriverGetVersion",
            "cuDeviceGet",
            "cuDevicePrimaryCtxRetain",
            "cuDeviceGetAttribute",
            "cuCtxPushCurrent",
        )
        assert self.depth or name in free, f"{name} without torch's context"
        if name == "cuCtxPushCurrent":
            self.depth += 1
            return ()
        if name == "cuCtxPopCurrent":
            self.depth -= 1
            return (None,)
        if name == "cuDeviceGetAttribute":
            return (next((n for key, n in _ATTRIBUTES.items() if key in arguments[0].name), 32768),)
        if name == "cuThreadExchangeStreamCaptureMode":
            before, self.mode = self.mode, arguments[0]
            return (before,)
        if name.endswith("Destroy"):
            self.alive.remove(int(arguments[0]))
            return ()
        kind = {
            "cuMipmappedArrayCreate": "CUmipmappedArray", "cuMipmappedArrayGetLevel": "CUarray",
            "cuSurfObjectCreate": "CUsurfObject", "cuTexObjectCreate": "CUtexObject", "cuEventCreate": "CUevent",
            "cuDevicePrimaryCtxRetain": "CUcontext", "cuModuleLoadData": "CUmodule",
            "cuModuleGetFunction": "CUfunction", "cuDeviceGet": "CUdevice",
        }.get(name)  # fmt: skip
        if kind is None:
            return ()
        if name in SEEN_BY_CAPTURES:
            assert self.mode != "global", f"{name} would spoil a capture on another thread"
        handle = next(self._handles)
        if name in ("cuMipmappedArrayCreate", "cuSurfObjectCreate", "cuTexObjectCreate"):
            self.alive.add(handle)
        return (getattr(self._real, kind)(handle),)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls if "Ctx" not in call[0] and "Exchange" not in call[0]]


@pytest.fixture
def cu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    import cuda.bindings

    found = StandIn()
    monkeypatch.setattr(cuda.bindings, "driver", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_made", {})
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "init": lambda: None,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0x55),
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(driver, "_raw_stream", None)
    monkeypatch.setattr(driver, "capturing", lambda _: bool(found.capturing))
    yield found
    assert found.depth == 0 and found.mode == "global", "the context or the mode was not put back"


def test_what_the_device_is(cu: StandIn) -> None:
    gpu = CudaDevice(1)
    assert gpu.torch_device == torch.device("cuda:1")
    assert (gpu.arch, gpu.texture_side, gpu.texture_layers) == ("sm_90", 30000, 2048)
    assert gpu.stream() == 0x55 and not gpu.capturing()
    cu.capturing = 1
    assert gpu.capturing()


def test_the_default_stream_is_torchs(cu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cuda-bindings takes 0 for."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    assert CudaDevice(0).stream() == 0
    for value in ("1", "0"):  # bindings before 13.2.1 take any value for yes
        monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", value)
        assert CudaDevice(0).stream() == 1, "the legacy stream by name"


def test_a_launch(cu: StandIn) -> None:
    gpu = CudaDevice(0)
    parameters = LogPolar(texture=1, ring_count=77)
    for _ in range(2):
        gpu.launch(KERNEL, (5, 2, 1), 256, parameters)
    assert cu.names().count("cuModuleLoadData") == 1
    code = next(call[1] for call in cu.calls if call[0] == "cuModuleLoadData")
    assert code == compiler.cubin(KERNEL, "sm_90")
    [asked] = [call[1:] for call in cu.calls if call[0] == "cuModuleGetFunction"]
    assert asked[1] == b"log_polar"
    launch = [call[1:] for call in cu.calls if call[0] == "cuLaunchKernel"][-1]
    shape, shared, stream, extra = launch[1:7], launch[7], launch[8], launch[10]
    assert shape == (5, 2, 1, 256, 1, 1) and (shared, stream, extra) == (0, 0x55, 0)


def test_the_parameter_is_passed_by_address(cu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CudaDevice(0)
    seen: list[int] = []

    def launch(*arguments: Any) -> Any:
        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        assert pointer is not None
        seen.append(LogPolar.from_address(pointer).rings.ring_count)
        return (0,)

    gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar())
    cu.cuLaunchKernel = launch
    gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar(rings=Rings(ring_count=77)))
    assert seen == [77]


def test_damaged_code_is_compiled_again(cu: StandIn) -> None:
    gpu = CudaDevice(0)
    for code in (200, 209):
        cu.fail["cuModuleLoadData"] = [code]
        gpu._functions.clear()
        gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar())
    cu.fail["cuModuleLoadData"] = [209, 209]
    gpu._functions.clear()
    with pytest.raises(KernelError, match=r"209 \(CUDA_ERROR_NO_BINARY_FOR_GPU\) in cuModuleLoadData"):
        gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar())


def test_nothing_is_loaded_during_a_capture(cu: StandIn) -> None:
    gpu = CudaDevice(0)
    cu.capturing = 1
    with pytest.raises(CaptureError, match=r"'log_polar' \(FLOAT32\) is not loaded yet.*the same arguments before"):
        gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar())
    cu.capturing = 0
    gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar())
    cu.capturing = 1
    gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar())


def test_a_texture(cu: StandIn) -> None:
    gpu = CudaDevice(0)
    texture = gpu.make_texture(KEY)
    [wanted] = [call[1:] for call in cu.calls if call[0] == "cuMipmappedArrayCreate"]
    assert (wanted[0].Width, wanted[0].Height, wanted[0].Depth, wanted[0].NumChannels, wanted[1]) == (20, 30, 3, 4, 4)
    assert wanted[0].Format.name == "CU_AD_FORMAT_HALF"
    assert len(set(texture.surfaces)) == 4
    first = texture.filtered, texture.nearest, texture.anisotropic
    assert first == (texture.filtered, texture.nearest, texture.anisotropic) and len(set(first)) == 3
    made = [call[2] for call in cu.calls if call[0] == "cuTexObjectCreate"]
    modes = [(one.filterMode.name[-6:], one.mipmapFilterMode.name[-6:], one.maxAnisotropy) for one in made]
    assert modes == [("LINEAR", "LINEAR", 1), ("_POINT", "_POINT", 1), ("LINEAR", "LINEAR", 16)]
    assert all(one.flags == 2 | 32 and one.maxMipmapLevelClamp == 3.0 for one in made)
    assert len(cu.alive) == 1 + 4 + 3
    texture.delete()
    assert not cu.alive


def test_an_object_that_a_capture_asks_for_first_does_not_end_it(cu: StandIn) -> None:
    """Of a texture that was made before, as by pyramid.upload: creating one may allocate."""
    gpu = CudaDevice(0)
    texture = gpu.make_texture(KEY)
    cu.capturing = 1
    assert texture.anisotropic
    names = [call[0] for call in cu.calls]
    before = len(names) - names[::-1].index("cuTexObjectCreate")
    modes = [call[1] for call in cu.calls[:before] if call[0] == "cuThreadExchangeStreamCaptureMode"]
    assert modes[-1].name == "CU_STREAM_CAPTURE_MODE_RELAXED", (
        "a thread-local mode forbids it to the thread that captures"
    )
    cu.capturing = 0
    texture.delete()


def test_two_threads_make_one_object(cu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    texture = CudaDevice(0).make_texture(KEY)
    answer = StandIn._answer

    def slowly(self: StandIn, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuTexObjectCreate":
            time.sleep(0.2)
        return answer(self, name, arguments)

    monkeypatch.setattr(StandIn, "_answer", slowly)
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(lambda _: texture.filtered, range(2)))
    assert len(found) == 1 and cu.names().count("cuTexObjectCreate") == 1
    texture.delete()
    assert not cu.alive


def test_a_texture_that_fails_half_way_leaves_nothing(cu: StandIn) -> None:
    gpu = CudaDevice(0)
    cu.fail["cuSurfObjectCreate"] = [0, 0, 2]
    with pytest.raises(OutOfMemoryError, match="smaller image"):
        gpu.make_texture(KEY)
    assert not cu.alive


def test_events_are_used_again(cu: StandIn) -> None:
    gpu = CudaDevice(0)
    event = gpu.record()
    gpu.wait(event)
    gpu.finish(event)
    handle = event.handle
    del event
    assert gpu.mark().handle is handle
    assert [name for name in cu.names() if "Event" in name or "Wait" in name] == [
        "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventSynchronize",
    ]  # fmt: skip
    assert cu.calls[-2][0] == "cuCtxRecordEvent"


@pytest.mark.parametrize("why", ["old driver", "old bindings"])
def test_marks_without_context_events_synchronise(cu: StandIn, why: str) -> None:
    gpu = CudaDevice(0)
    if why == "old driver":
        cu.fail["cuCtxRecordEvent"] = [500]
    else:
        cu.absent.add("cuCtxRecordEvent")
    gpu.mark()
    assert [call[0] for call in cu.calls][-3:-1] == ["cuCtxSynchronize", "cuEventRecord"]
    cu.absent.clear()
    cu.fail["cuCtxRecordEvent"] = [900]
    with pytest.raises(CaptureError):
        gpu.mark()


@pytest.mark.parametrize(
    ("code", "kind", "hint"),
    [
        (2, OutOfMemoryError, "smaller image"),
        (901, CaptureError, "before the capture"),
        (700, DeviceLostError, "new process"),
        (100, CudaUnavailableError, "nvidia-smi"),
        (1, KernelError, "bug in gpu_lod"),
        (304, KernelError, "bug in gpu_lod"),
        (12345, KernelError, "bug in gpu_lod"),
    ],
)
def test_errors_have_names_and_remedies(code: int, kind: type[GpuLodError], hint: str) -> None:
    found = driver.error(code, "CUDA_ERROR_X", "cuLaunchKernel")
    assert type(found) is kind
    assert f"error {code} (CUDA_ERROR_X) in cuLaunchKernel" in str(found) and hint in str(found)
    assert "OpenGL" not in str(found)


def test_a_failing_launch_is_named(cu: StandIn) -> None:
    gpu = CudaDevice(0)
    cu.fail["cuLaunchKernel"] = [719]
    with pytest.raises(DeviceLostError, match="719"):
        gpu.launch(KERNEL, (1, 1, 1), 32, LogPolar())


def test_no_driver() -> None:
    with pytest.raises(CudaUnavailableError, match="no CUDA"):
        CudaDevice(0)


def test_no_bindings_or_no_library(cu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CudaUnavailableError, match="no CUDA device 2"):
        CudaDevice(2)

    def missing() -> Any:
        raise RuntimeError('"cuda" can only be found via system search')

    cu.cuDriverGetVersion = missing
    with pytest.raises(CudaUnavailableError, match=r"(?s)system search.*pip install 'cuda-bindings"):
        CudaDevice(0)
    import cuda.bindings

    monkeypatch.delattr(cuda.bindings, "driver")
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(CudaUnavailableError, match=r"(?s)driver.*pip install 'cuda-bindings"):
        CudaDevice(0)


def test_a_tensors_device_is_opened_once(cu: StandIn) -> None:
    device.open_device.cache_clear()
    try:
        assert device.open_device(torch.device("cuda:1")) is device.open_device(torch.device("cuda:1"))
        assert cu.names().count("cuDeviceGet") == 1
    finally:
        device.open_device.cache_clear()
