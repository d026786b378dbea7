"""The experiment with memory that CUDA and GL both own, on fakes: every failure ends as a record, and nothing leaks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpu_lod as lod
from gpu_lod.bridge import egl
from gpu_lod.bridge import gl as G

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import bench_shared_memory as bench  # noqa: E402

FINISH, FENCE = bench.FINISH, bench.FENCE
GRANULARITY = 2**14
UUID = bytes(range(16))


class Status(int):
    name = "CUDA_ERROR_FAKE"


class Names:
    """An enumeration with any member."""

    def __getattr__(self, name: str) -> str:
        return name


class World:
    """One memory that a fake CUDA and a fake GL see. It records calls, fails where it is told to, and complains."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: Callable[[str], bool] = lambda name: False
        self.raising = False
        """Whether what fails raises instead of returning a status."""
        self.complaints: list[str] = []
        self.live: set[tuple[str, int]] = set()
        self.open: dict[int, int] = {}
        """Our descriptors: to the allocation that each one is."""
        self.memory: dict[int, torch.Tensor] = {}
        self.mapped: dict[int, int] = {}
        self.objects: dict[int, int] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.resources: dict[int, int] = {}
        self.cuda_owns: set[int] = set()
        self.dedicated: set[int] = set()
        self.device = 5
        self.lost_runs: set[int] = set()
        """Dispatches, by number, that CUDA does not see."""
        self.late_runs: set[int] = set()
        """Dispatches, by number, that do not see what CUDA wrote since the one before."""
        self.left = torch.zeros(0, dtype=torch.int32)
        self.runs = self.last = self.error = self.bound = self.count = 0
        self.driver, self.runtime, self.gl = (Api(self, prefix) for prefix in ("driver_", "runtime_", "gl_"))
        self.stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: self.do("synchronize"))

    def do(self, name: str, *arguments: Any) -> bool:
        """Record a call; True if it is one that fails."""
        self.calls.append((name, *arguments))
        return self.failing(name)

    def new(self, kind: str) -> int:
        self.last += 8
        self.live.add((kind, self.last))
        return self.last

    def gone(self, kind: str, number: int) -> None:
        if (kind, number) not in self.live:
            self.complaints.append(f"no {kind} {number}")
        self.live.discard((kind, number))

    # -- CUDA's driver ----------------------------------------------------------------------------------------------

    def driver_cuMemGetAllocationGranularity(self, prop: Any, option: str) -> int:
        assert prop.location.id == self.device
        return GRANULARITY

    def driver_cuMemCreate(self, size: int, prop: Any, flags: int) -> int:
        assert size % GRANULARITY == 0
        handle = self.new("allocation")
        self.memory[handle] = torch.zeros(size // 4, dtype=torch.int32)
        return handle

    def driver_cuMemRelease(self, handle: int) -> None:
        self.gone("allocation", handle)

    def driver_cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        return self.new("range")

    def driver_cuMemAddressFree(self, address: int, size: int) -> None:
        if address in self.mapped:
            self.complaints.append("freed a range that is mapped")
        self.gone("range", address)

    def driver_cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        self.mapped[address] = handle

    def driver_cuMemUnmap(self, address: int, size: int) -> None:
        del self.mapped[address]

    def driver_cuMemSetAccess(self, address: int, size: int, accesses: list[Any], count: int) -> None:
        assert len(accesses) == count == 1

    def driver_cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> int:
        fd = os.open(os.devnull, os.O_RDONLY)
        assert fd not in self.open
        self.open[fd] = handle
        return fd

    # -- CUDA's runtime ---------------------------------------------------------------------------------------------

    def runtime_cudaGraphicsGLRegisterBuffer(self, glo: int, flags: int) -> int:
        resource = self.new("resource")
        self.resources[resource] = glo
        return resource

    def runtime_cudaGraphicsUnregisterResource(self, resource: int) -> None:
        if self.resources[resource] in self.cuda_owns:
            self.complaints.append("unregistered a buffer that is mapped")
        self.gone("resource", resource)

    def _pointed_at(self, count: int, where: int, stream: int) -> int:
        assert (count, stream) == (1, 77)
        return self.resources[bench.c_void_p.from_address(where).value or 0]

    def runtime_cudaGraphicsMapResources(self, *arguments: int) -> None:
        glo = self._pointed_at(*arguments)
        if glo in self.cuda_owns:
            self.complaints.append("mapped twice")
        self.cuda_owns.add(glo)

    def runtime_cudaGraphicsUnmapResources(self, *arguments: int) -> None:
        self.cuda_owns.remove(self._pointed_at(*arguments))

    def runtime_cudaGraphicsResourceGetMappedPointer(self, resource: int) -> tuple[int, int]:
        glo = self.resources[resource]
        assert glo in self.cuda_owns
        return 10**6 + glo, self.buffers[glo].nbytes

    def runtime_cudaGLGetDevices(self, count: int, which: str) -> tuple[int, list[int]]:
        return 1, [4, 0, 0]

    # -- GL ---------------------------------------------------------------------------------------------------------

    def gl_GetIntegerv(self, name: int, value: Any) -> None:
        value._obj.value = 2

    def gl_GetUnsignedBytei_vEXT(self, name: int, index: int, values: Any) -> None:
        values[:] = UUID if index else bytes(16)

    def gl_CreateMemoryObjectsEXT(self, count: int, names: Any) -> None:
        names._obj.value = self.new("memory object")

    def gl_DeleteMemoryObjectsEXT(self, count: int, names: Any) -> None:
        self.gone("memory object", names._obj.value)

    def gl_MemoryObjectParameterivEXT(self, memory: int, name: int, value: Any) -> None:
        assert (name, value._obj.value) == (bench.DEDICATED_MEMORY_OBJECT_EXT, 1)
        self.dedicated.add(memory)

    def gl_ImportMemoryFdEXT(self, memory: int, size: int, kind: int, fd: int) -> None:
        self.objects[memory] = self.open.pop(fd)
        assert size == self.memory[self.objects[memory]].nbytes
        os.close(fd)  # GL's business from here on

    def gl_GenBuffers(self, count: int, names: Any) -> None:
        names._obj.value = self.new("buffer")

    def gl_DeleteBuffers(self, count: int, names: Any) -> None:
        if names._obj.value in self.cuda_owns:
            self.complaints.append("deleted a buffer that is mapped")
        self.gone("buffer", names._obj.value)

    def gl_BindBuffer(self, target: int, glo: int) -> None:
        self.bound = glo

    def gl_BufferData(self, target: int, nbytes: int, data: None, usage: int) -> None:
        self.buffers[self.bound] = torch.zeros(nbytes // 4, dtype=torch.int32)

    def gl_BufferStorageMemEXT(self, target: int, nbytes: int, memory: int, offset: int) -> None:
        self.buffers[self.bound] = self.memory[self.objects[memory]][: nbytes // 4]

    def gl_BindBufferRange(self, target: int, index: int, glo: int, start: int, nbytes: int) -> None:
        assert nbytes <= self.buffers[glo].nbytes
        self.bound = glo

    def gl_MemoryBarrier(self, bits: int) -> None:
        assert bits == 0x2200

    def gl_GetBufferSubData(self, target: int, offset: int, nbytes: int, where: Any) -> None:
        assert (target, offset) == (0x8F36, 0) and self.bound not in self.cuda_owns
        ctypes.memmove(where, self.buffers[self.bound].data_ptr(), nbytes)

    def gl_Finish(self) -> None: ...

    def gl_FenceSync(self, condition: int, flags: int) -> int:
        return self.new("fence")

    def gl_ClientWaitSync(self, fence: int, flags: int, timeout: int) -> int:
        assert (flags, timeout) == (1, 10**10)
        return 0x911C

    def gl_DeleteSync(self, fence: int) -> None:
        self.gone("fence", fence)

    def __setitem__(self, name: str, value: int) -> None:  # the program's uniform
        self.count = value

    def run(self, x: int, y: int, z: int) -> None:
        if self.do("run"):
            raise RuntimeError("run failed")
        if self.bound in self.cuda_owns:
            self.complaints.append("GL used a buffer that is mapped")
        self.runs += 1
        buffer = self.buffers[self.bound]
        if self.runs in self.late_runs:
            buffer.copy_(self.left)
        if self.runs not in self.lost_runs:
            buffer[: min(self.count, 256 * x * y)] += 1
        self.left = buffer.clone()

    def words(self, address: int, nbytes: int) -> torch.Tensor:
        if self.do("words"):
            raise RuntimeError("words failed")
        memory = self.memory[self.mapped[address]] if address in self.mapped else self.buffers[address - 10**6]
        return memory[: nbytes // 4]

    # -- the experiment -----------------------------------------------------------------------------------------------

    def open_all(self, rig: bench.Rig, stack: ExitStack, result: dict[str, Any]) -> None:
        rig.driver, rig.runtime, rig.gl, rig.program, rig.stream = (
            self.driver, self.runtime, self.gl, self, self.stream,
        )  # fmt: skip
        rig.words, rig.uuid = self.words, UUID.hex()  # type: ignore[method-assign]
        rig.extensions = frozenset({"GL_EXT_memory_object", "GL_EXT_memory_object_fd"})

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


class Api:
    """The functions of a `World` whose names have a prefix; GL's fail through glGetError, CUDA's by their status."""

    def __init__(self, world: World, prefix: str) -> None:
        self._world, self._prefix = world, prefix

    def __getattr__(self, name: str) -> Any:
        world, is_gl = self._world, self._prefix == "gl_"
        if name == "GetError":
            return self._get_error
        if name in ("CUmemAllocationProp", "CUmemAccessDesc"):
            return lambda: SimpleNamespace(location=SimpleNamespace())
        if name.startswith("CU") or name == "cudaGLDeviceList":
            return Names()
        function = getattr(world, self._prefix + name)

        def call(*arguments: Any) -> Any:
            if world.do(name, *arguments):
                if world.raising:
                    raise AttributeError(f"{name} is not there")
                world.error = 0x0502
                return None if is_gl else (Status(1), None)
            value = function(*arguments)
            if is_gl:
                return value
            return (Status(0), *(value if isinstance(value, tuple) else () if value is None else (value,)))

        return call

    def _get_error(self) -> int:
        error, self._world.error = self._world.error, 0
        return error


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Small sizes and few rounds, and the descriptors that are ours under watch."""
    fake = World()
    real = os.close

    def close(fd: int) -> None:
        if fake.open.pop(fd, None) is None and sys._getframe(1).f_code.co_filename.endswith("bench_shared_memory.py"):
            fake.complaints.append(f"closed {fd}, which is not ours")
        real(fd)

    monkeypatch.setattr(bench, "os", SimpleNamespace(close=close))
    monkeypatch.setattr(bench, "open_all", fake.open_all)
    monkeypatch.setattr(bench, "SIZES", {"4 KiB": 4096, "20 KiB": 20480})
    for name, value in {"ROUNDS": 5, "CHECKED_BYTES": 4096, "FEWEST": 3, "BLOCK": 2}.items():
        monkeypatch.setattr(bench, name, value)
    return fake


def play(world: World) -> dict[str, Any]:
    """Run the experiment on device 5; what must hold whatever fails."""
    result = bench.run(seconds=0.0, device=5)
    json.dumps(result, allow_nan=False)
    assert world.complaints == []
    assert world.open == {}, "a descriptor that GL did not take is still open"
    keys = "experiment device gl_renderer driver torch date steps correct stale views rows conclusion"
    assert set(result) == set(keys.split())
    assert all(set(step) == {"name", "ok", "detail"} for step in result["steps"])
    return result


def failures(result: dict[str, Any]) -> list[str]:
    return [step["name"] for step in result["steps"] if not step["ok"]]


def ways(result: dict[str, Any]) -> set[str]:
    return {row["way"] for row in result["rows"]}


def test_all_goes_well(world: World) -> None:
    result = play(world)
    assert failures(result) == []
    assert (result["correct"], result["stale"]) == (True, 0)
    assert world.live == set()
    expected = {(size, part, way) for size in bench.SIZES for part in bench.PARTS for way in (FINISH, FENCE, "bridge")}
    assert {(row["size"], row["part"], row["way"]) for row in result["rows"]} == expected
    for row in result["rows"]:
        assert row["wrong_words"] == 0
        assert row["calls"] == 4  # two turns of two, after one that does not count
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["cpu_ms"] >= 0
        assert row["iqr_ms"] >= 0
    assert "shared memory" in result["conclusion"]
    assert "failed" not in result["conclusion"]


def test_what_is_made_last_goes_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "race", lambda *_: world.do("race"))
    monkeypatch.setattr(bench, "check", lambda *_: None)
    monkeypatch.setattr(bench, "SIZES", {"20 KiB": 20480})
    play(world)
    names = [name for name in world.names() if name not in ("words", "GetIntegerv", "GetUnsignedBytei_vEXT")]
    assert names == [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "CreateMemoryObjectsEXT",
        "cuMemExportToShareableHandle",
        "ImportMemoryFdEXT",
        "GenBuffers",
        "BindBuffer",
        "BufferStorageMemEXT",
        "GenBuffers",
        "BindBuffer",
        "BufferData",
        "cudaGraphicsGLRegisterBuffer",
        "cudaGraphicsMapResources",
        "cudaGraphicsResourceGetMappedPointer",
        "race",
        "Finish",
        "cudaGraphicsUnmapResources",
        "Finish",
        "synchronize",
        "cudaGraphicsUnregisterResource",
        "DeleteBuffers",
        "Finish",
        "synchronize",
        "DeleteBuffers",
        "DeleteMemoryObjectsEXT",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
    ]
    sizes = {name: arguments for name, *arguments in world.calls}
    assert sizes["cuMemCreate"][0] == sizes["cuMemAddressReserve"][0] == 2 * GRANULARITY
    assert sizes["BufferStorageMemEXT"][1] == 20480


@pytest.mark.parametrize(
    ("way", "to_gl", "to_cuda"),
    [
        (FINISH, ["synchronize"], ["Finish"]),
        (FENCE, ["synchronize"], ["FenceSync", "ClientWaitSync", "DeleteSync"]),
        (
            "bridge",
            ["cudaGraphicsUnmapResources"],
            ["cudaGraphicsMapResources", "cudaGraphicsResourceGetMappedPointer"],
        ),
    ],
)
def test_order_of_a_frame(world: World, way: str, to_gl: list[str], to_cuda: list[str]) -> None:
    rig = bench.Rig(5, [], lambda: None)
    with ExitStack() as stack:
        world.open_all(rig, stack, {})
        sides = {**bench.shared(rig, stack, 4096), "bridge": bench.bridge(rig, stack, 4096)}
        sink = torch.zeros(1024, dtype=torch.int32)
        world.calls.clear()
        times = bench.frame(sides[way], sink, 70)
        dispatch = ["BindBufferRange", "run", "MemoryBarrier"]
        one = [*to_gl, *dispatch, "Finish"]
        other = [*dispatch, *to_cuda, "synchronize"]
        trip = [*to_gl, *dispatch, *to_cuda, "synchronize"]
        assert world.names() == [*one, *other, *trip]
        assert len(times) == len(bench.PARTS)
        assert (sink == 71).all()
    assert world.live == set()


MADE = [
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "CreateMemoryObjectsEXT",
    "ImportMemoryFdEXT",
    "BufferStorageMemEXT",
]
BRIDGE_MADE = [
    "BufferData",
    "cudaGraphicsGLRegisterBuffer",
    "cudaGraphicsMapResources",
    "cudaGraphicsResourceGetMappedPointer",
]


@pytest.mark.parametrize("raising", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("name", MADE)
def test_a_step_of_sharing_fails(world: World, name: str, raising: bool) -> None:
    world.failing, world.raising = lambda called: called == name, raising
    result = play(world)
    assert {step.split(": ")[-1].removeprefix("gl") for step in failures(result)} == {name}
    assert (result["correct"], result["stale"]) == (None, 0)
    assert ways(result) == {"bridge"}, "the opponent is still measured"
    assert world.live == set()
    assert f"failed: check: {'gl' * (name[:2] != 'cu')}{name}: " in result["conclusion"]
    detail = next(step["detail"] for step in result["steps"] if not step["ok"])
    assert ("is not there" if raising else "CUDA_ERROR_FAKE" if name[:2] == "cu" else "0x0502") in detail


@pytest.mark.parametrize("name", BRIDGE_MADE)
def test_a_step_of_the_bridge_fails(world: World, name: str) -> None:
    world.failing = lambda called: called == name
    result = play(world)
    assert len(failures(result)) == len(bench.SIZES)
    assert result["correct"] is True
    assert ways(result) == {FINISH, FENCE}
    assert world.live == set()
    assert " failed: 4 KiB: " in result["conclusion"]


@pytest.mark.parametrize("name", ["GenBuffers", "BindBuffer", "words", "run", "Finish", "synchronize"])
def test_a_step_of_both_fails(world: World, name: str) -> None:
    world.failing = lambda called: called == name
    if name in ("Finish", "synchronize"):
        world.raising = True
        world.stream.synchronize = world.gl_synchronize = lambda: world.gl.Finish()  # type: ignore[attr-defined]
        world.failing = lambda called: called == "Finish"
    result = play(world)
    assert failures(result)
    assert any("cleanup" in step for step in failures(result)) == (name in ("Finish", "synchronize"))
    assert result["rows"] == []
    assert result["correct"] is None
    assert world.live == set()
    assert "failed: check: " in result["conclusion"]


@pytest.mark.parametrize(
    ("name", "kind", "many"),
    [
        ("cuMemRelease", "allocation", 3),
        ("cuMemAddressFree", "range", 3),
        ("cuMemUnmap", "", 3),
        ("DeleteMemoryObjectsEXT", "memory object", 3),
        ("DeleteBuffers", "buffer", 5),
        ("cudaGraphicsUnregisterResource", "resource", 2),
    ],
)
def test_a_cleanup_fails_and_the_others_go_on(world: World, name: str, kind: str, many: int) -> None:
    world.failing = lambda called: called == name
    result = bench.run(seconds=0.0, device=5)
    assert len(failures(result)) == many
    assert all(": cleanup, " in step for step in failures(result))
    assert {left for left, _ in world.live} == ({kind} if kind else set())
    assert len(result["rows"]) == 3 * 3 * len(bench.SIZES)


def test_the_second_attempt_is_dedicated(world: World) -> None:
    world.failing = lambda called: called == "ImportMemoryFdEXT" and not world.dedicated
    result = play(world)
    assert failures(result) == ["check: glImportMemoryFdEXT"]
    assert world.names().count("MemoryObjectParameterivEXT") == 1
    assert (result["correct"], len(ways(result))) == (True, 3)
    assert world.live == set()
    assert "failed" not in result["conclusion"]


def test_a_descriptor_is_closed_once_by_its_owner(world: World) -> None:
    """Ours if glImportMemoryFdEXT fails, GL's if it succeeds, whatever fails later: `World` complains otherwise."""
    closed: list[int] = []
    close = bench.os.close
    bench.os.close = lambda fd: closed.append(fd) or close(fd)
    for name, ours in {"ImportMemoryFdEXT": 2, "BufferStorageMemEXT": 0, "": 0}.items():
        closed.clear()
        world.failing = lambda called, name=name: called == name
        play(world)
        exported = world.names().count("cuMemExportToShareableHandle")
        assert len(closed) == ours * (1 + len(bench.SIZES))
        assert exported >= len(closed)
        world.calls.clear()


def test_a_fence_that_times_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "gl_ClientWaitSync", lambda *_: 0x911B)
    result = play(world)
    assert failures(result) == [f"check: 5 rounds, {FENCE}", f"4 KiB: frames, {FENCE}", f"20 KiB: frames, {FENCE}"]
    assert "0x911b" in result["conclusion"]
    assert ways(result) == {FINISH, "bridge"}
    assert result["correct"] is None, "half of the check is not a result"
    assert world.live == set()


def test_unmap_fails_in_the_race(world: World) -> None:
    """The bridge leaves the race, the others stay."""
    world.failing = lambda called: called == "cudaGraphicsUnmapResources"
    result = bench.run(seconds=0.0, device=5)
    assert f"4 KiB: frames, {bench.BRIDGE}" in failures(result)
    assert ways(result) == {FINISH, FENCE}


@pytest.mark.parametrize("kind", ["lost_runs", "late_runs"])
def test_stale_words_are_counted(world: World, kind: str) -> None:
    setattr(world, kind, {2, 3, 9})  # of the five rounds with each wait
    result = play(world)
    assert (result["correct"], result["stale"]) == (False, 3)
    assert "not to be trusted: stale values in 3 rounds of the check" in result["conclusion"]
    assert len(ways(result)) == 3


def wrong_in(view: dict[str, Any]) -> list[int]:
    return [view[key] for key in ("gl_before", "gl_after", "cuda_after", "cuda_kept")]


def test_both_views_of_the_memory_are_compared(world: World) -> None:
    """Once the ten rounds are over, with the eleventh dispatch and the twelfth."""
    seen = play(world)["views"]
    assert list(seen) == ["one value", "counted"]
    for view in seen.values():
        assert [view[key] for key in ("words", "gl_before", "gl_after", "cuda_after", "cuda_kept")] == [
            1024,
            0,
            0,
            0,
            0,
        ]
    assert seen["counted"]["first_gl_before"] == [*range(64)]
    assert seen["counted"]["first_gl_after"] == seen["counted"]["first_cuda_after"] == [*range(1, 65)]
    assert seen["one value"]["first_cuda_after"] == [7 * 10**6 + 1] * 64


def test_views_tell_what_the_shader_left(world: World) -> None:
    world.lost_runs = {2, 11}
    result = play(world)
    seen = result["views"]["one value"]
    assert wrong_in(seen) == [0, 1024, 1024, 1024]
    assert result["views"]["counted"]["cuda_after"] == 0
    assert (
        "of 1024 words, one value, OpenGL reads 0 wrong before its shader and 1024 after it, CUDA 1024, 1024 of"
        in (result["conclusion"])
    )


def test_views_tell_memory_that_is_not_shared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = world.gl_BufferStorageMemEXT

    def own(target: int, nbytes: int, memory: int, offset: int) -> None:
        apart(target, nbytes, memory, offset)
        world.buffers[world.bound] = world.buffers[world.bound].clone()

    monkeypatch.setattr(world, "gl_BufferStorageMemEXT", own)
    seen = play(world)["views"]["one value"]
    assert wrong_in(seen) == [1024] * 4


def test_stale_words_in_the_race_are_counted(world: World) -> None:
    # 10 and 2 dispatches in the check; 3 in a frame, 3 frames in a turn: the last one of the first side's first turn.
    world.lost_runs = {21}
    result = play(world)
    assert result["correct"] is True
    assert {row["wrong_words"] for row in result["rows"] if row["size"] == "4 KiB"} == {0, 1024}
    assert result["conclusion"].startswith(
        "not to be trusted: stale values in 0 rounds of the check, wrong words {'4 KiB"
    )


def test_other_devices_share_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "UUID", bytes(16))
    rig = bench.Rig(5, [], lambda: None)
    world.open_all(rig, ExitStack(), {})
    rig.uuid = "ab" * 16
    with pytest.raises(RuntimeError, match="CUDA is on abab"):
        rig.same_device()
    rig.device = 4  # cudaGLGetDevices knows better, as with a MIG instance, whose UUID is its own
    assert "cudaGLGetDevices" in rig.same_device()
    rig.uuid = "00" * 16
    assert rig.same_device() == "00" * 16
    rig.extensions = frozenset({"GL_EXT_memory_object"})
    with pytest.raises(RuntimeError, match=r"this driver has no GL_EXT_memory_object_fd$"):
        rig.same_device()


def test_without_the_extension_the_bridge_runs_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(rig: bench.Rig, stack: ExitStack, result: dict[str, Any]) -> None:
        world.open_all(rig, stack, result)
        rig.extensions = frozenset()

    monkeypatch.setattr(bench, "open_all", bare)
    result = play(world)
    assert failures(result) == ["same device"]
    assert "GL_EXT_memory_object and no GL_EXT_memory_object_fd" in result["conclusion"]
    assert ways(result) == {"bridge"}
    assert not any(name.startswith("cuMem") for name in world.names())


def test_a_step_is_saved_before_it_runs(world: World) -> None:
    seen: dict[str, dict[str, Any]] = {}
    saved: list[dict[str, Any]] = []
    record = world.do

    def do(name: str, *arguments: Any) -> bool:
        if saved and "cuMemMap" not in seen:
            seen[name] = saved[-1]
        return record(name, *arguments)

    world.do = do  # type: ignore[method-assign]
    bench.run(0.0, 5, save=lambda result: saved.append(json.loads(json.dumps(result))))
    last = seen["cuMemMap"]["steps"][-1]
    assert last == {"name": "check: cuMemMap", "ok": False, "detail": "did not return"}
    assert seen["cuMemMap"]["conclusion"].startswith("unfinished")


def test_a_cleanup_never_raises() -> None:
    rig, done = bench.Rig(0, [], lambda: None), []
    with ExitStack() as stack:
        rig.undo(stack, "second", done.append, 2)
        rig.undo(stack, "first", lambda: 1 // 0)
    assert done == [2]
    assert [step["ok"] for step in rig.steps] == [False, True]


def test_a_tensor_is_the_memory_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def as_tensor(memory: Any, device: str) -> SimpleNamespace:
        seen.append((memory.__cuda_array_interface__, device))
        return SimpleNamespace(data_ptr=lambda: 4096)

    monkeypatch.setattr(bench, "torch", SimpleNamespace(as_tensor=as_tensor))
    rig = bench.Rig(3, [], lambda: None)
    assert rig.words(4096, 80).data_ptr() == 4096
    assert seen == [({"shape": (20,), "typestr": "<i4", "data": (4096, False), "version": 2}, "cuda:3")]
    with pytest.raises(RuntimeError, match="torch made a copy"):
        rig.words(8192, 80)


def test_a_save_that_fails_stops_nothing(world: World) -> None:
    def full(result: dict[str, Any]) -> None:
        raise OSError("disk full")

    result = bench.run(0.0, 5, save=full)
    assert failures(result) == []
    assert len(result["rows"]) == 3 * 3 * len(bench.SIZES)


def test_a_mistake_in_the_experiment_is_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "experiment", lambda *_: {}["missing"])
    result = play(world)
    assert result["steps"][-1] == {
        "name": "unexpected", "ok": False, "detail": "KeyError: 'missing'",
    }  # fmt: skip
    assert "step 1 failed: unexpected" in result["conclusion"]


def rows(**ms: float) -> list[dict[str, Any]]:
    names = {"finish": FINISH, "fence": FENCE, "bridge": "bridge"}
    return [
        {"size": "4 KiB", "part": "round trip", "way": names[way], "p50_ms": p50, "iqr_ms": 0.01, "wrong_words": 0}
        for way, p50 in ms.items()
    ]


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (rows(finish=0.3, fence=0.2, bridge=0.5), f"shared memory wins by 0.3000 ms at 4 KiB ({FENCE})"),
        (rows(finish=0.3, fence=0.4, bridge=0.1), f"shared memory loses by 0.2000 ms at 4 KiB ({FINISH})"),
        (rows(finish=0.3, fence=0.4, bridge=0.305), f"wins by 0.0050 ms at 4 KiB ({FINISH}, within the spread)"),
    ],
)
def test_conclusion(measured: list[dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", {"4 KiB": 4096})
    failed = {"name": "x", "ok": False, "detail": "y"}
    result = {"rows": measured, "steps": [failed], "correct": True, "stale": 0}
    assert bench.conclude(result).endswith(says)
    assert "step" not in bench.conclude(result)
    assert bench.conclude({**result, "rows": measured[:2]}) == "step 1 failed: x: y"
    assert bench.conclude({**result, "rows": [], "steps": [], "correct": None}) == "nothing was measured"


def test_without_cuda_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert bench.main([]) == bench.main(["--out", "deep/result.json", "--seconds", "0.1"]) == 0
    line = "no CUDA device here: nothing was measured, nothing written\n"
    assert capsys.readouterr().out == line + line
    assert list(tmp_path.iterdir()) == []
    result = bench.run()
    assert failures(result) == ["CUDA"]
    assert result["conclusion"] == "step 1 failed: CUDA: RuntimeError: torch sees no CUDA device"


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--seconds", "nan"], ["--seconds", "x"], ["--size"], ["a"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench.main(arguments)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_command(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.faulthandler, "enable", lambda: None)
    path, world.device = tmp_path / "deep" / "result.json", 0
    assert bench.main(["--out", str(path), "--seconds", "0.001"]) == 0
    result, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert len(result["rows"]) == 3 * 3 * len(bench.SIZES)
    words = " ".join(printed.split())
    assert result["conclusion"] in words
    for text in ("20 KiB to CUDA", "p50 (p99, CPU) ms", "round trip"):
        assert text in words
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--out", str(tmp_path / "file" / "result.json")])
    assert exit_.value.code == 2
    world.failing = lambda called: called == "cuMemCreate"
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert bench.main(["--out", str(path), "--seconds", "0.001"]) == 1
    printed = capsys.readouterr().out
    assert "failed: check: cuMemCreate" in printed
    assert json.loads(next(line for line in printed.splitlines() if line.startswith("{")))["correct"] is None


# -- opening the machine ----------------------------------------------------------------------------------------------


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch, ctx: lod.Context) -> Iterator[SimpleNamespace]:
    """A torch that has a CUDA device, in front of this machine's GL."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device=lambda device: contextlib.nullcontext(),
        get_device_properties=lambda device: SimpleNamespace(uuid="0A0B0C0D-0000-0000-0000-0000000000FF"),
        current_stream=lambda device: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        get_device_name=lambda device: "a GPU",
    )
    fake = SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: None, __version__="2.11", empty_like=torch.empty_like)
    monkeypatch.setattr(bench, "torch", fake)
    monkeypatch.setattr(bench, "open_gl", lambda device: ctx)
    yield fake


def test_opening_on_real_gl(half: SimpleNamespace, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bench.Rig] = []
    monkeypatch.setattr(bench, "experiment", lambda rig, *_: seen.append(rig))
    before = egl.current()
    result = bench.run(device=0)
    assert failures(result) == []
    assert egl.current() == before
    assert (result["device"], result["gl_renderer"], result["driver"]) == ("a GPU", ctx.renderer, ctx.driver)
    assert seen[0].uuid == "0a0b0c0d0000000000000000000000ff"
    assert seen[0].driver.__name__ == "cuda.bindings.driver"
    assert type(seen[0].program.mglo).__name__ == "InvalidObject", "the program is released"


@pytest.mark.parametrize("name", ["CUDA", "driver", "runtime", "OpenGL", "entry points", "shader"])
def test_opening_fails(name: str, half: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    real = bench.importlib.import_module
    module = f"cuda.bindings.{name}"
    fakes: dict[str, tuple[Any, str, Any]] = {
        "CUDA": (half, "zeros", broken),
        "OpenGL": (bench, "open_gl", broken),
        "entry points": (bench, "Entries", broken),
        "shader": (bench, "SHADER", "#version 430\nvoid main() { nonsense; }"),
    }
    importlib = SimpleNamespace(import_module=lambda wanted: broken() if wanted == module else real(wanted))
    monkeypatch.setattr(*fakes.get(name, (bench, "importlib", importlib)))
    before = egl.current()
    result = bench.run(device=0)
    assert failures(result) == [name]
    assert f"failed: {name}: " in result["conclusion"]
    assert ("broken" if name != "shader" else "nonsense") in result["steps"][-1]["detail"]
    assert egl.current() == before


def test_which_gl_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(index: int, software: bool, ordinal: int | None) -> SimpleNamespace:
        return SimpleNamespace(index=index, software=software, cuda_ordinal=ordinal)

    found = [device(0, True, None), device(1, False, None), device(2, False, 1), device(3, False, 0)]
    broken: set[int] = set()

    def context(index: int) -> int:
        if index in broken:
            raise lod.GpuLodError(f"no {index}")
        return index

    monkeypatch.setattr(bench, "devices", lambda: found)
    monkeypatch.setattr(bench, "lod", SimpleNamespace(Context=context))
    assert [bench.open_gl(ordinal) for ordinal in (0, 1, 2)] == [3, 2, 1]
    broken = {2, 3}
    assert bench.open_gl(1) == 1
    broken = {1, 2, 3}
    with pytest.raises(RuntimeError, match=r"no EGL device with hardware opens.*no 2.*no 1.*no 3"):
        bench.open_gl(1)


# -- on real GL -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rig(ctx: lod.Context) -> Iterator[bench.Rig]:
    made = bench.Rig(0, [], lambda: None)
    with ctx:
        made.gl = bench.Entries(ctx.gl, egl.loader_of_current().load_opengl_function)
        made.program = ctx._mgl.compute_shader(bench.SHADER)
        made.extensions = frozenset(ctx.extensions)
        yield made
        made.program.release()


def test_every_entry_point_is_there(rig: bench.Rig) -> None:
    for name in bench.SIGNATURES:
        assert callable(vars(rig.gl)[name])
    assert rig.gl.Finish == rig.gl._listed.Finish


@pytest.mark.parametrize(("words", "count"), [(1024, 1024), (1024, 1), (1024, 300), (65535 * 256 + 999,) * 2])
def test_the_shader_adds_one(rig: bench.Rig, ctx: lod.Context, words: int, count: int) -> None:
    buffer = ctx._mgl.buffer(reserve=4 * words)
    buffer.clear()
    side = object.__new__(bench.Fenced)
    side.rig, side.glo, side.nbytes = rig, buffer.glo, 4 * words
    for _ in range(2):
        side.add_one(count)
        side.to_cuda()
    result = torch.frombuffer(bytearray(buffer.read()), dtype=torch.int32)
    assert (result[:count] == 2).all()
    assert (result[count:] == 0).all()
    assert torch.equal(bench.read_by_gl(side), result)
    rig.checked("Finish")
    buffer.release()


def test_gl_errors_are_told_and_old_ones_are_not(rig: bench.Rig) -> None:
    rig.gl.Enable(0xBAD)
    rig.checked("Finish")
    with pytest.raises(RuntimeError, match="glEnable raised GL error 0x0500"):
        rig.checked("Enable", 0xBAD)
    # 0 is no fence: the wait fails, and is not mistaken for a signal.
    assert rig.gl.ClientWaitSync(None, 0, 0) == 0x911D
    assert rig.gl.GetError() == 0x0501


def test_registry_values_on_a_real_driver(rig: bench.Rig) -> None:
    """This machine's driver knows the names by the values that the experiment gives them."""
    if "GL_EXT_memory_object" not in rig.extensions:
        with pytest.raises(RuntimeError, match="no GL_EXT_memory_object"):
            rig.same_device()
        return
    rig.uuid, rig.runtime = "none", World().runtime
    with pytest.raises(RuntimeError, match=r"CUDA is on none, GL on \['[0-9a-f]{32}'"):
        rig.same_device()
    memory = bench.c_uint(0)
    rig.checked("CreateMemoryObjectsEXT", 1, bench.byref(memory))
    one = bench.byref(bench.c_int(1))
    rig.checked("MemoryObjectParameterivEXT", memory.value, bench.DEDICATED_MEMORY_OBJECT_EXT, one)
    rig.checked("DeleteMemoryObjectsEXT", 1, bench.byref(memory))
    assert G.SHADER_STORAGE_BARRIER_BIT | 0x0200 == bench.BARRIERS == 0x2200


# -- against the real bindings ----------------------------------------------------------------------------------------


def test_properties_fill_the_real_structs() -> None:
    """Neither cuda.bindings nor what is used of it here needs a driver."""
    from cuda.bindings import driver

    prop, access = bench.properties(driver, 3)
    raw = (bench.c_int * 4).from_address(int(prop.getPtr()))
    # CUmemAllocationProp of cuda.h: type, requestedHandleTypes, location.type, location.id
    assert list(raw) == [1, 1, 1, 3]
    assert list((bench.c_int * 3).from_address(int(access.getPtr()))) == [1, 3, 3]  # location, PROT_READWRITE
    assert int(driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) == 1
    assert int(prop.requestedHandleTypes) == 1  # also what cuMemExportToShareableHandle is given
    assert isinstance(prop.requestedHandleTypes, driver.CUmemAllocationHandleType)


def test_calls_fit_the_real_functions(world: World) -> None:
    """Every CUDA function that is called exists and takes so many arguments, by the first line of its docstring."""
    from cuda.bindings import driver, runtime

    play(world)
    called = {(name, len(arguments)) for name, *arguments in world.calls if name.startswith("cu")}
    assert {name for name, _ in called} >= {*MADE[:6], *BRIDGE_MADE[1:], "cuMemUnmap", "cudaGraphicsUnmapResources"}
    for name, count in {*called, ("cudaGLGetDevices", 2)}:
        function = getattr(driver if name.startswith("cuM") else runtime, name)
        signature = (function.__doc__ or "").strip().splitlines()[0]
        names = signature.partition("(")[2].rpartition(")")[0]
        while "[" in names:  # list[a | tuple[b, c]]
            head, _, tail = names.rpartition("[")
            names = head + tail.partition("]")[2]
        assert len(names.split(",")) == count, signature
    assert runtime.cudaGLDeviceList.cudaGLDeviceListAll == 1


def test_argument_types_fit_the_real_runtime() -> None:
    """Without a driver these return an error; wrong types would raise. With one, they would be asked for nonsense."""
    from cuda.bindings import runtime

    if torch.cuda.is_available():
        return
    side = object.__new__(bench.Bridged)
    rig = SimpleNamespace(stream=SimpleNamespace(cuda_stream=0))
    side.__init__(rig, 1, 4096, runtime.cudaGraphicsResource_t(0))  # type: ignore[misc]
    for function in (runtime.cudaGraphicsMapResources, runtime.cudaGraphicsUnmapResources):
        assert function(*side.arguments)[0] != 0
    assert runtime.cudaGraphicsGLRegisterBuffer(0, 0)[0] != 0
    answer = runtime.cudaGraphicsResourceGetMappedPointer(side.resource)
    assert len(answer) == 3
    rig = bench.Rig(0, [], lambda: None)
    rig.runtime = runtime
    with pytest.raises(RuntimeError, match="cudaGraphicsResourceGetMappedPointer returned cudaError"):
        rig.cuda("cudaGraphicsResourceGetMappedPointer", side.resource)
