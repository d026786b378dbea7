"""The calls that the CUDA bridges make: checked against cuda-bindings where there is no GPU, and on stand-ins."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from times import entry

import gpu_lod as lod
from gpu_lod import calibration, dispatch, errors, sharing, tables, turns
from gpu_lod import context as context_module
from gpu_lod.bridge import Device, cuda_errors
from gpu_lod.bridge import cuda as cuda_module
from gpu_lod.bridge import pycuda as pycuda_module
from gpu_lod.bridge.cuda import CudaDriver
from gpu_lod.bridge.devices import Gpu
from gpu_lod.bridge.pycuda import PyCudaDriver

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def torch_has_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch, as if it saw two GPUs."""
    state = SimpleNamespace(stream=0x55, capturing=False, synchronised=0, emptied=0, exchanged=[])
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=state.stream),
        "is_current_stream_capturing": lambda: state.capturing,
        "synchronize": lambda device=None: setattr(state, "synchronised", state.synchronised + 1),
        "_maybe_exchange_device": lambda device: state.exchanged.append(device),
        "empty_cache": lambda: setattr(state, "emptied", state.emptied + 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return state


class Library:
    """libcuda, as far as it is called by ctypes: functions that C can call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}
        for name in ("cuGraphicsMapResources", "cuGraphicsUnmapResources"):
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Any:
        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)
        def call(count: int, handles: int, stream: int | None) -> int:
            self.calls.append((name, list((ctypes.c_void_p * count).from_address(handles)), stream or 0))
            return self.codes.get(name, 0)

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    result, load = Library(), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *args: result if name == "libcuda.so.1" else load(name, *args))
    return result


@without_cuda
def test_no_driver_is_a_named_error(torch_has_cuda: SimpleNamespace) -> None:
    with pytest.raises(errors.CudaUnavailableError, match=r"driver does not load: libcuda\.so\.1.*nvidia-smi"):
        CudaDriver(0)


# -- the real bindings, without a driver -----------------------------------------------------------------------------


@without_cuda
def test_the_runtime_takes_our_arguments(torch_has_cuda: SimpleNamespace, library: Library) -> None:
    """Every call reaches CUDA, which says that there is no driver; wrong arguments would be a TypeError."""
    from cuda.bindings import runtime

    driver = CudaDriver(1)
    handles = [0x1000, 0x2000]
    calls: dict[str, Any] = {
        "activate": lambda: driver.activate(),
        "restore": lambda: driver.restore((1, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal)),
        "register": lambda: driver.register(7),
        "unregister": lambda: driver.unregister(handles[0]),
        "address": lambda: driver.address(handles[0]),
    }
    for name, call in calls.items():
        with pytest.raises(errors.CudaUnavailableError, match=r"35 \(cudaErrorInsufficientDriver"):
            pytest.fail(f"{name} succeeded: {call()}")
    assert "35" in str(driver.check_same_gpu("a renderer"))


def test_the_driver_api_has_what_marking_uses() -> None:
    from cuda.bindings import driver

    for name in ("cuEventCreate", "cuCtxGetCurrent", "cuCtxRecordEvent", "cuStreamWaitEvent"):
        assert callable(getattr(driver, name))
    assert int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING) == 2


def test_cudas_own_words() -> None:
    """PyCUDA reports text, no numbers: the table must have CUDA's words."""
    from cuda.bindings import runtime

    for text, code in cuda_errors._TEXTS.items():
        assert runtime.cudaGetErrorString(runtime.cudaError_t(code))[1].decode() == text
        error = cuda_errors.from_text(f"cuGraphicsMapResources failed: {text}", "map")
        assert type(error) is cuda_errors.known()[code]


def test_the_table_holds_real_codes() -> None:
    from cuda.bindings import runtime

    for code in cuda_errors.known():
        runtime.cudaError_t(code)


# -- the driver, on stand-ins of the bindings ------------------------------------------------------------------------


class Bindings:
    """What cuda.bindings.runtime and .driver do, as far as the bridge uses them."""

    class cudaError_t:
        cudaSuccess = 0

        def __init__(self, code: int) -> None:
            self.name = f"name{code}"

    cudaGLDeviceList = SimpleNamespace(cudaGLDeviceListAll="all")
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="this thread's")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.device = 0
        self.codes: dict[str, int] = {}
        self.gl_devices = [1]
        self.handle = 0xABC0
        self.events = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            code = self.codes.get(name, 0)
            if code:
                return (code,)
            return (0, *self._results(name, args))

        return call

    def _results(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cudaGetDevice":
            return (self.device,)
        if name == "cudaThreadExchangeStreamCaptureMode":
            return ("the former",)
        if name == "cudaSetDevice":
            self.device = args[0]
        if name == "cudaGLGetDevices":
            return (len(self.gl_devices), self.gl_devices)
        if name == "cudaGraphicsGLRegisterBuffer":
            return (self.handle and self.handle + args[0],)
        if name == "cudaGraphicsResourceGetMappedPointer":
            return (0xF000, 4096)
        if name == "cuEventCreate":
            self.events += 1
            return (f"event{self.events}",)
        if name == "cuCtxGetCurrent":
            return ("context",)
        return ()


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch, library: Library) -> Bindings:
    both = Bindings()
    package, module = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    module.driver = module.runtime = both  # type: ignore[attr-defined]
    package.bindings = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)
    return both


def test_the_callers_device_is_put_back(torch_has_cuda: SimpleNamespace, bindings: Bindings) -> None:
    driver = CudaDriver(1)
    before = driver.activate()
    assert bindings.device == 1
    assert bindings.calls[-1] == ("cudaThreadExchangeStreamCaptureMode", "this thread's")
    driver.restore(before)
    assert torch_has_cuda.exchanged == [0]
    assert bindings.calls[-1] == ("cudaThreadExchangeStreamCaptureMode", "the former")
    bindings.device = 1
    driver.restore(driver.activate())
    assert torch_has_cuda.exchanged == [0]  # nothing to put back


def test_the_context_is_made_current_whatever_the_device(torch_has_cuda: SimpleNamespace, bindings: Bindings) -> None:
    """A fresh thread has none, and yet says that it is on device 0."""
    CudaDriver(0).activate()
    assert ("cudaSetDevice", 0) in bindings.calls


def test_synchronising_waits_for_the_current_stream(
    torch_has_cuda: SimpleNamespace, bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))
    )
    CudaDriver(1).synchronize()
    assert waited == [1]


def test_capture_is_refused_on_either_device(
    torch_has_cuda: SimpleNamespace, bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CudaDriver(1)
    torch_has_cuda.capturing = True
    with pytest.raises(errors.CaptureError, match=r"torch\.cuda\.graph"):
        driver.activate()
    assert bindings.calls == []  # no call that the capture might forbid
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bindings.device == 1)
    with pytest.raises(errors.CaptureError):
        driver.activate()
    assert torch_has_cuda.exchanged == [0]


def test_many_buffers_are_mapped_in_one_call(
    torch_has_cuda: SimpleNamespace, bindings: Bindings, library: Library
) -> None:
    driver = CudaDriver(0)
    handles = [driver.register(glo) for glo in (3, 4, 5)]
    driver.map(handles, driver.stream())
    driver.unmap(handles[:2], 0)
    assert library.calls == [
        ("cuGraphicsMapResources", [0xABC3, 0xABC4, 0xABC5], 0x55),
        ("cuGraphicsUnmapResources", [0xABC3, 0xABC4], 0),
    ]
    assert driver.address(handles[0]) == (0xF000, 4096)
    library.codes["cuGraphicsMapResources"] = 219
    with pytest.raises(errors.DeviceMismatchError, match=r"219 \(name219\) in cuGraphicsMapResources"):
        driver.map(handles, 0)


def test_a_handle_that_is_none_is_a_named_error(torch_has_cuda: SimpleNamespace, bindings: Bindings) -> None:
    """Some releases of the bindings return success with it."""
    bindings.handle = 0
    with pytest.raises(errors.InteropUnavailableError, match=r"returns no handle.*'cuda-bindings==\d+\.\*,!=[\d.]+'"):
        CudaDriver(0).register(3)


def test_the_gl_context_must_be_on_the_same_gpu(torch_has_cuda: SimpleNamespace, bindings: Bindings) -> None:
    CudaDriver(1).check_same_gpu("NVIDIA H100")
    with pytest.raises(errors.DeviceMismatchError, match=r"on CUDA device \[1\].*cuda:0"):
        CudaDriver(0).check_same_gpu("NVIDIA H100")
    bindings.codes["cudaGLGetDevices"] = 100
    with pytest.raises(errors.DeviceMismatchError, match="no GPU that CUDA can use"):
        CudaDriver(1).check_same_gpu("llvmpipe")
    bindings.codes["cudaGLGetDevices"] = 304
    assert "304" in str(CudaDriver(1).check_same_gpu("NVIDIA H100")), "which says nothing of where it is"


def test_events_are_used_again_once_nobody_waits(torch_has_cuda: SimpleNamespace, bindings: Bindings) -> None:
    driver = CudaDriver(0)
    first, second = driver.mark(), driver.mark()
    assert first is not None and second is not None and first.handle != second.handle
    driver.wait(first, 0x77)
    assert bindings.calls[-1] == ("cuStreamWaitEvent", 0x77, first.handle, 0)
    handle = first.handle
    del first
    third = driver.mark()
    assert third is not None and third.handle == handle
    assert bindings.events == 2
    assert torch_has_cuda.synchronised == 0


@pytest.mark.parametrize("how", ["not supported", "refused", "not in the driver"])
def test_without_context_events_the_device_is_waited_for(
    torch_has_cuda: SimpleNamespace, bindings: Bindings, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CudaDriver(0)
    if how == "not supported":
        bindings.codes["cuCtxRecordEvent"] = 801
    elif how == "refused":
        bindings.codes["cuCtxRecordEvent"] = 400
    else:

        def missing(*_: Any) -> Any:
            raise RuntimeError('Function "cuCtxRecordEvent" not found')

        monkeypatch.setattr(bindings, "cuCtxRecordEvent", missing, raising=False)
    assert driver.mark() is None
    assert driver.mark() is None
    assert torch_has_cuda.synchronised == 2
    assert bindings.events == 1


def test_an_event_that_cannot_be_recorded_is_a_named_error(torch_has_cuda: SimpleNamespace, bindings: Bindings) -> None:
    bindings.codes["cuCtxRecordEvent"] = 900
    with pytest.raises(errors.CaptureError):
        CudaDriver(0).mark()


@pytest.mark.parametrize("driver", [CudaDriver, PyCudaDriver])
def test_waiting_for_the_device_while_another_thread_captures_is_a_named_error(
    driver: Any, pycuda: SimpleNamespace, bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no events behind all streams."""
    bindings.codes["cuCtxRecordEvent"] = 801

    def synchronize(device: Any = None) -> None:
        raise RuntimeError(
            f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported at some other call"
        )

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for text, kind in (
        ("operation not permitted when stream is capturing", errors.CaptureError),
        ("an illegal memory access was encountered", errors.DeviceLostError),
        ("something new", errors.InteropError),
    ):
        with pytest.raises(kind, match=text):
            driver(0).mark()


def test_memory_is_described_as_torch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    where = SimpleNamespace(address=0xF00)

    def as_tensor(value: Any, device: torch.device) -> Any:
        if where.address is None:
            raise RuntimeError("The specified pointer resides on host memory")
        seen.append((value, device))
        return SimpleNamespace(data_ptr=lambda: where.address)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    owner = object()
    cuda_module.tensor_over(0xF00, 64, owner, torch.device("cuda", 1))
    memory, device = seen[0]
    assert memory.__cuda_array_interface__ == {
        "shape": (64,), "typestr": "|u1", "data": (0xF00, False), "strides": None, "version": 3,
    }  # fmt: skip
    assert memory._owner is owner and device == torch.device("cuda", 1)
    for elsewhere, words in ((0xE00, "another device"), (None, "resides on host memory")):
        where.address = elsewhere
        with pytest.raises(errors.DeviceMismatchError, match=words):
            cuda_module.tensor_over(0xF00, 64, owner, torch.device("cuda", 1))


def test_poison_uses_what_cuda_builds_of_torch_have(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        torch._C, "_set_storage_data_ptr_access_error_msg", lambda *args: seen.append(args), raising=False
    )
    cuda_module.poison(0x123, "moved")
    assert seen == [(0x123, "moved")]


# -- no CUDA, no bindings, no device ----------------------------------------------------------------------------------


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda")])
def test_a_cuda_device_without_cuda(device: Any) -> None:
    with pytest.raises(errors.CudaUnavailableError, match=r"torch is built without CUDA|finds no device"):
        lod.Context(device)
    lod.Context()


@pytest.mark.parametrize(("device", "words"), [("mps", "cpu"), ("nonsense", "torch device"), (1.5, "EGL device")])
def test_devices_that_are_none(device: Any, words: str) -> None:
    with pytest.raises(errors.InputError, match=words):
        lod.Context(device)


def test_a_torch_cpu_device_is_the_default_context(ctx: lod.Context) -> None:
    assert lod.Context("cpu") is ctx
    assert lod.Context(torch.device("cpu")) is ctx
    assert ctx.tensor_device == torch.device("cpu")


def test_an_ordinal_that_torch_has_not(torch_has_cuda: SimpleNamespace) -> None:
    with pytest.raises(errors.CudaUnavailableError, match="sees 0 to 1"):
        lod.Context("cuda:2")


def test_bindings_that_are_missing(torch_has_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(errors.CudaUnavailableError, match="pip install 'cuda-bindings"):
        CudaDriver(0)


def test_interop_must_be_known() -> None:
    with pytest.raises(errors.InputError, match="'cuda' or 'pycuda'"):
        lod.Context("cuda", interop="vulkan")  # type: ignore[arg-type]


# -- which context serves a CUDA device --------------------------------------------------------------------------------


class OnGpu(FakeCuda):
    """The fake, as if it were GPU 1. Tells candidates apart by the order in which it is asked."""

    name = "cuda"
    device = torch.device("cuda", 1)

    def __init__(self, gl: Any, verdicts: list[bool]) -> None:
        super().__init__(gl)
        self.verdicts = verdicts

    def check_same_gpu(self, renderer: str) -> errors.GpuLodError | None:
        doubt = super().check_same_gpu(renderer)
        if not self.verdicts.pop(0):
            raise errors.DeviceMismatchError("another GPU")
        return doubt


@pytest.fixture
def gpu_machine(
    ctx: lod.Context, torch_has_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """llvmpipe, passed off as the OpenGL of a GPU."""
    state = SimpleNamespace(verdicts=[True], candidates=[ctx.device], software=False)
    monkeypatch.setattr(lod.Context, "software", property(lambda self: state.software))
    monkeypatch.setitem(sharing.DRIVERS, "cuda", lambda ordinal: OnGpu(ctx.gl, state.verdicts))
    monkeypatch.setattr(context_module, "gpu", lambda ordinal: Gpu(ordinal, "GPU", None, None))
    monkeypatch.setattr(context_module, "match", lambda gpu, found: state.candidates)
    yield state
    ctx.interop = None


def test_a_context_on_a_gpu(ctx: lod.Context, gpu_machine: SimpleNamespace) -> None:
    context = lod.Context("cuda:1")
    assert context is ctx and context.interop is not None
    assert context.tensor_device == torch.device("cuda", 1)
    assert lod.Context(torch.device("cuda", 1)) is context
    with pytest.raises(errors.InputError, match="through 'cuda' already"):
        lod.Context("cuda:1", interop="pycuda")


def test_a_context_is_joined_to_a_gpu_while_another_thread_works_on_it(
    ctx: lod.Context, gpu_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which opens contexts itself meanwhile: neither waits for the other one's lock for good."""
    monkeypatch.setattr(turns, "LOCK_TIMEOUT", 5)
    asked, acquire = threading.Event(), lod.Context._acquire

    def announced(context: lod.Context) -> None:
        if threading.current_thread() is not threading.main_thread():
            asked.set()
        acquire(context)

    monkeypatch.setattr(lod.Context, "_acquire", announced)
    with ThreadPoolExecutor(1) as pool:
        with ctx:
            joining = pool.submit(lod.Context, "cuda:1")
            assert asked.wait(30)
            assert lod.Context() is ctx
        assert joining.result(30) is ctx


def test_candidates_are_tried_until_one_is_the_gpu(ctx: lod.Context, gpu_machine: SimpleNamespace) -> None:
    gpu_machine.candidates = [Device(77, (), None, None), ctx.device]  # the first does not open
    assert lod.Context("cuda:1") is ctx


def test_no_candidate_is_the_gpu(ctx: lod.Context, gpu_machine: SimpleNamespace) -> None:
    gpu_machine.verdicts[:] = [False]
    gpu_machine.candidates = [Device(77, (), None, None), ctx.device]
    with pytest.raises(errors.GLUnavailableError, match=r"opens on cuda:1: device 77: .*device 0: another"):
        lod.Context("cuda:1")
    assert not ctx.closed and ctx.interop is None  # it was open before, for CPU tensors
    assert float(lod.mipmap(torch.ones(1, 8, 8), backend="gl")[3]) == 1.0


def test_a_shared_buffer_tells_where_cuda_does_not(
    ctx: lod.Context, gpu_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether GL and CUDA are on one GPU."""
    doubt = cuda_errors.error(304, "cudaErrorOperatingSystem", "cudaGLGetDevices")
    drivers: list[OnGpu] = []

    def driver(ordinal: int) -> OnGpu:
        drivers.append(OnGpu(ctx.gl, [True]))
        drivers[-1].doubt, drivers[-1].always = doubt, dict(failing)
        return drivers[-1]

    monkeypatch.setitem(sharing.DRIVERS, "cuda", driver)
    for failing, kind in (
        ({"register": 101}, errors.DeviceMismatchError),
        ({"map": 211}, errors.DeviceMismatchError),
        ({"register": 700}, errors.DeviceLostError),
    ):
        with ctx, pytest.raises(kind, match=f"{[*failing.values()][-1]}"):
            ctx._connect(torch.device("cuda", 1))
        assert not drivers[-1].resources
    failing = {}

    def elsewhere(self: OnGpu, address: int, nbytes: int, owner: object) -> torch.Tensor:
        try:
            raise RuntimeError("the pointer resides on another device")
        except RuntimeError as error:
            raise errors.DeviceMismatchError(f"torch finds it elsewhere: {error}") from None

    with (
        ctx,
        monkeypatch.context() as patch,
        pytest.raises(errors.DeviceMismatchError, match="torch finds it elsewhere"),
    ):
        patch.setattr(OnGpu, "tensor", elsewhere)
        ctx._connect(torch.device("cuda", 1))
    assert not drivers[-1].resources and not drivers[-1].active, "nothing is left of the buffer"
    with ctx:
        ctx.gl.Enable(0xFFFF)  # an error of the program's own
        bridge = ctx._connect(torch.device("cuda", 1))
    assert [name for name in drivers[-1].names() if name in ("register", "map")] == ["register", "map"]
    with ctx.active():
        bridge.trim()


def test_software_opengl_beside_cuda(ctx: lod.Context, gpu_machine: SimpleNamespace) -> None:
    gpu_machine.software = True
    with pytest.raises(errors.DeviceMismatchError, match=r"software renderer.*libnvidia-gl"):
        lod.Context("cuda:1")
    with pytest.raises(errors.DeviceMismatchError, match="software renderer"):
        ctx.empty(3, device="cuda:1")
    assert ctx.empty(3).device.type == "cpu"


def test_a_tensor_on_another_gpu(ctx: lod.Context, gpu_machine: SimpleNamespace) -> None:
    lod.Context("cuda:1")
    with pytest.raises(errors.DeviceMismatchError, match=r"cuda:0.*shares memory with cuda:1"):
        ctx.empty(3, device="cuda:0")
    with pytest.raises(errors.DeviceMismatchError), ctx.active(device=torch.device("cuda", 0)):
        raise AssertionError
    on_cpu = ctx.empty(3, device="cpu")
    assert ctx.host.find(on_cpu) is not None and ctx.owns(on_cpu)


# -- what auto says --------------------------------------------------------------------------------------------------


def test_auto_says_why_it_does_not_take_gl(
    torch_has_cuda: SimpleNamespace, bindings: Bindings, unseeded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.float32)

    def said() -> str:
        context_module.why_not.cache_clear()
        calibration.reload()
        choice = dispatch.measured("mipmap", image, 2**20, state="mean", channels=3)  # type: ignore[arg-type]
        assert choice.backend == "torch"
        return choice.reason

    monkeypatch.setattr(calibration, "_gpu", lambda index: "GPU")
    monkeypatch.setattr(calibration, "nvidia", lambda: "600")
    monkeypatch.setattr(context_module, "gpu", lambda ordinal: Gpu(ordinal, "GPU", None, None))

    def nothing(gpu: Gpu, found: Any) -> Any:
        raise errors.GLUnavailableError("OpenGL here is software only")

    monkeypatch.setattr(context_module, "match", nothing)
    assert "cannot share memory with it: OpenGL here is software only" in said()
    monkeypatch.setattr(context_module, "match", lambda gpu, found: ["one"])
    assert "has not been measured on cuda:1" in said()
    monkeypatch.setattr(context_module, "devices", lambda: 1 // 0)
    assert "ZeroDivisionError" in said()
    barred = dispatch.barred(torch.zeros(1, device="meta"))
    assert barred is not None and "CPU and CUDA tensors only" in barred.reason
    calibration.reload()


QUESTION = tables.Question("mipmap", "mean", 3, "float32", 1, 2**20)


class SaidToBeOnGpu(torch.Tensor):
    """A CPU tensor that says otherwise."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


@pytest.mark.parametrize("broken", ["gl", "cuda", "gl, cuda"])
def test_what_a_driver_refuses_goes_to_the_next_fastest(
    broken: str, torch_has_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to torch once none is left. A verb of the test's own stands for all."""
    failures = {"gl": errors.ShaderError("no shader"), "cuda": errors.KernelError("no kernel")}
    tried: list[str] = []

    def choose(image: torch.Tensor, backend: str = "auto") -> dispatch.Choice:
        if backend != "auto":
            return dispatch.Choice(backend, "asked for")  # type: ignore[arg-type]
        return dispatch.measured("toy", image, 2**20, state="mean", channels=3, dtype=torch.float32)

    def toy(image: torch.Tensor, backend: dispatch.Backend = "auto") -> str:
        used = choose(image, backend).backend
        tried.append(used)
        if used in broken:
            raise failures[used]
        return used

    first, second = ("cuda", "gl") if broken == "cuda" else ("gl", "cuda")
    times = {first: (1.0, 0.1), second: (2.0, 0.1), "torch": (10.0, 0.1)}
    machine = tables.Machine("cuda", "GPU", 0, "600", "a GPU", "4.6", False)
    monkeypatch.setattr(calibration, "_gpu", lambda index: "GPU")
    monkeypatch.setattr(calibration, "nvidia", lambda: "600")
    monkeypatch.setattr(dispatch, "why_not", lambda device: None)
    opened = SimpleNamespace(usable_here=lambda: True, renderer="a GPU", driver="4.6", software=False)
    monkeypatch.setattr(dispatch, "context_for", lambda tensor: opened)
    monkeypatch.setattr(dispatch, "_choosers", {toy: choose})
    monkeypatch.setattr(dispatch, "_with_kernels", ["toy"])
    calibration.reload()
    monkeypatch.setattr(
        calibration, "_seeds", [tables.Table(machine, (entry(QUESTION._replace(verb="toy"), **times),))]
    )
    image, call = torch.zeros(1).as_subclass(SaidToBeOnGpu), dispatch.with_way_on(toy)
    with pytest.warns(errors.GpuLodWarning) as told:
        found = call(image)
    left = "torch" if broken == "gl, cuda" else second
    assert found == left and tried == [first, second, "torch"][: 3 if left == "torch" else 2]
    how = "in plain torch" if left == "torch" else f"with backend={second!r}"
    said = [str(one.message).partition(";")[0] for one in told]
    assert said == [f"toy goes on {how} for tensors on cuda:1"] * (len(tried) - 1)
    chosen = choose(image)
    assert chosen.backend == left and all(
        f"backend={name!r} failed before" in chosen.reason for name in broken.split(", ")
    )
    tried.clear()
    assert call(image) == left and tried == [left], "told once"
    with pytest.raises(errors.GpuLodError, match="no "):
        call(image, backend=first)
    calibration.reload()


@pytest.mark.parametrize("why", ["no device shares memory", "no context opens", "a context of another thread"])
def test_without_opengl_auto_takes_the_fastest_of_the_other_ways(
    why: str, torch_has_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenGL was fastest where the times were measured."""
    image = SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.float32)
    machine = tables.Machine("cuda", "GPU", 0, "600", "a GPU", "4.6", False)
    monkeypatch.setattr(calibration, "_gpu", lambda index: "GPU")
    monkeypatch.setattr(calibration, "nvidia", lambda: "600")
    if why == "no device shares memory":
        monkeypatch.setattr(dispatch, "why_not", lambda device: why)
    else:
        monkeypatch.setattr(dispatch, "why_not", lambda device: None)

    def none_opens(tensor: object) -> Any:
        if why == "no context opens":
            raise errors.GLUnavailableError(why)
        return SimpleNamespace(usable_here=lambda: False)

    monkeypatch.setattr(dispatch, "context_for", none_opens)

    def chosen(verb: str = "mipmap", **times: tuple[float, float]) -> dispatch.Choice:
        measured = entry(QUESTION._replace(verb=verb), **times)
        calibration.reload()
        monkeypatch.setattr(calibration, "_seeds", [tables.Table(machine, (measured,))])
        choices = [
            dispatch.measured(verb, image, 2**20, state="mean", channels=3)  # type: ignore[arg-type]
            for _ in range(2)
        ]
        assert choices[0] == choices[1]
        return choices[0]

    reason = "belongs to another process or thread" if "thread" in why else why
    try:
        found = chosen(torch=(10, 0.1), cuda=(2, 0.1), gl_compute=(1, 0.1))
        assert found.backend == "cuda" and found.generator is None and found.figures["cuda"] == 2
        assert found.reason.startswith("2 ms against 10 ms for torch") and reason in found.reason
        found = chosen(torch=(2, 0.1), cuda=(10, 0.1), gl_compute=(1, 0.1))
        assert found.backend == "torch" and reason in found.reason
        found = chosen("gaussian", torch=(10, 0.1), cuda=(2, 0.1), gl=(1, 0.1))
        assert found.backend == "torch" and reason in found.reason, "which has no kernel"
        assert chosen(torch=(10, 0.1), cuda=(1, 0.1), gl_compute=(20, 0.1)).backend == "cuda"
    finally:
        calibration.reload()


# -- PyCUDA ------------------------------------------------------------------------------------------------------------


class Mapping:
    def __init__(self, log: list[Any], glo: int, stuck: Callable[[], bool]) -> None:
        self._log, self._glo, self._stuck, self._mapped = log, glo, stuck, True

    def unmap(self) -> None:
        """As PyCUDA's, which raises nothing."""
        if self._stuck():
            print("PyCUDA WARNING: a clean-up operation failed", file=sys.stderr)
            return
        self._log.append(("unmap", self._glo))
        self._mapped = False

    def device_ptr_and_size(self) -> tuple[int, int]:
        if not self._mapped:
            raise LogicError("cuGraphicsResourceGetMappedPointer failed: resource not mapped")
        return 0xE000 + self._glo, 512


class LogicError(Exception):
    __module__ = "pycuda._driver"


class Libcuda:
    """What PyCUDA's driver asks libcuda for, whose arguments are C's."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.primary = 0x9
        self.gl_devices = [0]
        self.retained = 0
        self.registered: list[int] = []

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_NAME"
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = self.primary
        code = self.codes.get("cuDevicePrimaryCtxRetain", 0)
        self.retained += not code
        return code

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:
        self.retained -= 1
        return 0

    def cuGLGetDevices_v2(self, count: Any, found: Any, most: int, which: int) -> int:
        assert len(found) == most and which == 1
        count._obj.value = len(self.gl_devices)
        found[: len(self.gl_devices)] = self.gl_devices
        return self.codes.get("cuGLGetDevices", 0)

    def cuGraphicsGLRegisterBuffer(self, handle: Any, glo: ctypes.c_uint, flags: int) -> int:
        code = self.codes.get("cuGraphicsGLRegisterBuffer", 0)
        if not code:
            handle._obj.value = 0xABC0 + glo.value
            self.registered.append(handle._obj.value)
        return code

    def cuGraphicsUnregisterResource(self, handle: ctypes.c_void_p) -> int:
        assert handle.value is not None
        self.registered.remove(handle.value)
        return 0


@pytest.fixture
def pycuda(torch_has_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """PyCUDA built with OpenGL, in torch's context."""
    state = SimpleNamespace(log=[], fail=None, context=SimpleNamespace(handle=0x9), library=Libcuda())

    class RegisteredBuffer:
        def __init__(self, glo: int) -> None:
            self.glo = glo
            assert not state.library.registered, "registered twice"
            state.log.append(("register", glo))
            if state.fail == "register":
                raise LogicError("cuGraphicsGLRegisterBuffer failed: invalid OpenGL or DirectX context")

        def map(self) -> Mapping:
            if state.fail == self.glo:
                raise LogicError("cuGraphicsMapResources failed: mapping of buffer object failed")
            state.log.append(("map", self.glo))
            return Mapping(state.log, self.glo, lambda: state.fail == f"unmap {self.glo}")

        def unregister(self) -> None:
            state.log.append(("unregister", self.glo))

    package = types.ModuleType("pycuda")
    driver, gl = types.ModuleType("pycuda.driver"), types.ModuleType("pycuda.gl")
    driver.Context = SimpleNamespace(get_current=lambda: state.context)  # type: ignore[attr-defined]
    gl.RegisteredBuffer = RegisteredBuffer  # type: ignore[attr-defined]
    package.driver, package.gl = driver, gl  # type: ignore[attr-defined]
    for module in (package, driver, gl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(pycuda_module, "libcuda", lambda: state.library)
    default = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: state.log.append("default waits"))
    current = SimpleNamespace(cuda_stream=0x55, wait_stream=lambda other: state.log.append("current waits"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    return state


def test_pycuda_maps_on_the_default_stream_in_order_with_the_current_one(pycuda: SimpleNamespace) -> None:
    driver = PyCudaDriver(0)
    driver.activate()
    handles = [driver.register(glo) for glo in (3, 4)]
    pycuda.log.clear()
    driver.map(handles, driver.stream())
    assert pycuda.log == ["default waits", ("map", 3), ("map", 4), "current waits"]
    assert driver.address(handles[1]) == (0xE004, 512)
    pycuda.log.clear()
    driver.unmap(handles, driver.stream())
    assert pycuda.log == ["default waits", ("unmap", 3), ("unmap", 4)]
    driver.unregister(handles[0])
    assert pycuda.log[-1] == ("unregister", 3)


def test_pycuda_maps_all_or_none(pycuda: SimpleNamespace) -> None:
    driver = PyCudaDriver(0)
    handles = [driver.register(glo) for glo in (3, 4)]
    pycuda.log.clear()
    pycuda.fail = 4
    with pytest.raises(errors.MappingError, match="mapping of buffer object failed"):
        driver.map(handles, 0)
    assert pycuda.log == [("map", 3), ("unmap", 3)]


def test_pycuda_errors_are_named(pycuda: SimpleNamespace) -> None:
    pycuda.fail = "register"
    with pytest.raises(errors.DeviceMismatchError, match="219"):
        PyCudaDriver(0).register(3)


def test_pycuda_is_not_asked_to_register_what_cuda_refuses(pycuda: SimpleNamespace) -> None:
    """It would unregister a handle that it never got."""
    driver = PyCudaDriver(0)
    for code, kind in ((2, errors.OutOfMemoryError), (219, errors.DeviceMismatchError)):
        pycuda.library.codes["cuGraphicsGLRegisterBuffer"] = code
        with pytest.raises(kind, match=rf"{code} \(CUDA_ERROR_NAME\) in cuGraphicsGLRegisterBuffer"):
            driver.register(3)
    assert not pycuda.log
    pycuda.library.codes.clear()
    driver.register(3)
    assert pycuda.log == [("register", 3)]


def test_pycuda_context_on_another_gpu(pycuda: SimpleNamespace) -> None:
    driver, library = PyCudaDriver(0), pycuda.library
    assert driver.check_same_gpu("NVIDIA H200") is None
    library.gl_devices = [1]
    with pytest.raises(errors.DeviceMismatchError, match=r"on CUDA device \[1\], and the tensor on cuda:0"):
        driver.check_same_gpu("NVIDIA H200")
    library.codes["cuGLGetDevices"] = 100
    with pytest.raises(errors.DeviceMismatchError, match="on no GPU that CUDA can use"):
        driver.check_same_gpu("llvmpipe")
    for code, kind in ((304, errors.InteropUnavailableError), (219, errors.DeviceMismatchError)):
        library.codes["cuGLGetDevices"] = code  # then sharing a buffer tells
        assert isinstance(driver.check_same_gpu("NVIDIA H200"), kind)


def test_pycuda_that_unmaps_nothing_is_noticed(pycuda: SimpleNamespace) -> None:
    """It prints what went wrong and goes on, and OpenGL would use what is CUDA's. All or none go over."""
    driver = PyCudaDriver(0)
    handles = [driver.register(3), driver.register(4)]
    driver.map(handles, 0)
    pycuda.fail = "unmap 4"
    with pytest.raises(errors.MappingError, match="stderr says why"):
        driver.unmap(handles, 0)
    assert pycuda.log[-2:] == [("unmap", 3), ("map", 3)]
    assert [driver.address(handle)[0] for handle in handles] == [0xE003, 0xE004]
    pycuda.fail = None
    driver.unmap(handles, 0)  # where it was the thread, and now is another
    assert pycuda.log[-2:] == [("unmap", 3), ("unmap", 4)]


def test_pycuda_is_used_on_one_thread(pycuda: SimpleNamespace) -> None:
    """Another may have pushed the same context, and could not unmap there."""
    driver = PyCudaDriver(0)
    driver.activate()
    driver.activate()
    with ThreadPoolExecutor(1) as pool, pytest.raises(errors.ContextNotCurrentError, match="on thread MainThread"):
        pool.submit(driver.activate).result()
    ended = PyCudaDriver(0)
    for number in range(2):  # the second may have the number of the first
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(ended.activate)
            assert isinstance(made.exception(), errors.ContextNotCurrentError if number else type(None))


def test_pycuda_refuses_captures_and_waits_for_the_device(
    pycuda: SimpleNamespace, torch_has_cuda: SimpleNamespace
) -> None:
    driver = PyCudaDriver(0)
    driver.synchronize()
    assert torch_has_cuda.synchronised == 1
    torch_has_cuda.capturing = True
    with pytest.raises(errors.CaptureError):
        driver.activate()


def test_pycuda_without_a_context_or_in_one_of_its_own(pycuda: SimpleNamespace) -> None:
    driver = PyCudaDriver(0)
    pycuda.context = None
    with pytest.raises(errors.ContextNotCurrentError, match="autoprimaryctx"):
        driver.activate()
    pycuda.context = SimpleNamespace(handle=0x8)
    with pytest.raises(errors.DeviceMismatchError, match="primary context"):
        driver.activate()
    assert pycuda.library.retained == 0
    pycuda.library.codes["cuDevicePrimaryCtxRetain"] = 2
    with pytest.raises(errors.OutOfMemoryError, match="cuDevicePrimaryCtxRetain"):
        driver.activate()


def test_pycuda_built_without_gl_says_how_to_build_it(pycuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda.gl", None)
    monkeypatch.delattr(sys.modules["pycuda"], "gl")
    with pytest.raises(errors.InteropUnavailableError, match="CUDA_ENABLE_GL"):
        PyCudaDriver(0)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(errors.CudaUnavailableError, match="needs PyCUDA"):
        PyCudaDriver(0)
