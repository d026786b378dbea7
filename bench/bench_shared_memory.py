"""Experiment: memory that CUDA and OpenGL own at once, so that no frame pays for mapping and unmapping.

A CUDA virtual-memory allocation leaves CUDA as a POSIX file descriptor and enters GL as the storage of a buffer: one
CUDA address and one storage buffer are then the same bytes for good. What remains is to wait. GL has semaphores for
that (GL_EXT_semaphore), but it can only import them, and so can CUDA: neither exports one to the other, a third API
such as Vulkan would have to make them. So each hand-over waits on the host, for the CUDA stream in one direction and
for GL in the other, by glFinish or by a fence. The opponent is the ordinary bridge, which maps and unmaps on the
stream and leaves the waiting to the GPU.

A failure is a result too. Each step is in "steps" and saved before it runs, so that the file of a run that crashed or
hung ends with the step it died in.

python bench/bench_shared_memory.py [--out FILE] [--seconds S]

Source: GL_EXT_memory_object, GL_EXT_memory_object_fd, GL_ARB_sync and glMemoryBarrier (OpenGL 4.6, section 7.13.2);
"Virtual Memory Management" of the CUDA driver API and "Graphics Interoperability" of the CUDA runtime API.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from ctypes import byref, c_int, c_ssize_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gpu_lod as lod
from gpu_lod.bridge import devices, egl
from gpu_lod.bridge import gl as G

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "12 MiB": 12 * 2**20, "192 MiB": 192 * 2**20}
ROUNDS, CHECKED_BYTES = 2000, 2**20
PARTS = ("to GL", "to CUDA", "round trip")
FINISH, FENCE, BRIDGE = "shared, glFinish", "shared, fence", "bridge"
BLOCK, FEWEST, MOST = 8, 16, 400  # frames that a side plays in its turn, and turns

# Names and values of the OpenGL registry that bridge/gl.py does not list.
DEDICATED_MEMORY_OBJECT_EXT, HANDLE_TYPE_OPAQUE_FD_EXT = 0x9581, 0x9586
NUM_DEVICE_UUIDS_EXT, DEVICE_UUID_EXT, UUID_SIZE_EXT = 0x9596, 0x9597, 16
SYNC_GPU_COMMANDS_COMPLETE, SYNC_FLUSH_COMMANDS_BIT = 0x9117, 0x0001
ALREADY_SIGNALED, CONDITION_SATISFIED = 0x911A, 0x911C
BUFFER_UPDATE_BARRIER_BIT = 0x0200
FENCE_TIMEOUT_NS = 10**10

BARRIERS = BUFFER_UPDATE_BARRIER_BIT | G.SHADER_STORAGE_BARRIER_BIT
"""After each dispatch. No bit means "someone outside GL reads next". BUFFER_UPDATE is the nearest to it: it shows what
shaders wrote to copies and reads of the buffer, which do not go through the shader cores' caches. SHADER_STORAGE keeps
the next dispatch from reading what this one left in those caches: GL runs nothing on the buffer in between, so they
cannot fill again with what CUDA then overwrites. Neither promises anything about CUDA; so stale values are counted."""

SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name: (result, *arguments)
    "BufferStorageMemEXT": (None, c_uint, c_ssize_t, c_uint, c_uint64),
    "ClientWaitSync": (c_uint, c_void_p, c_uint, c_uint64),
    "CreateMemoryObjectsEXT": (None, c_int, c_void_p),
    "DeleteMemoryObjectsEXT": (None, c_int, c_void_p),
    "DeleteSync": (None, c_void_p),
    "FenceSync": (c_void_p, c_uint, c_uint),
    "GetUnsignedBytei_vEXT": (None, c_uint, c_uint, c_void_p),
    "ImportMemoryFdEXT": (None, c_uint, c_uint64, c_uint, c_int),
    "MemoryObjectParameterivEXT": (None, c_uint, c_uint, c_void_p),
}

SHADER = """#version 430
layout(local_size_x = 256) in;
layout(std430, binding = 0) buffer Words { uint b_words[]; };
uniform uint u_count;
void main() {
    uint i = gl_GlobalInvocationID.y * (gl_NumWorkGroups.x * gl_WorkGroupSize.x) + gl_GlobalInvocationID.x;
    if (i < u_count) b_words[i] += 1u;
}
"""


class StepFailed(Exception):
    """A step failed and is in the log."""


class Entries:
    """The entry points of bridge/gl.py and those of SIGNATURES, of the context that is current."""

    def __init__(self, listed: Any, load: Callable[[str], int]) -> None:
        self._listed = listed
        for name, (result, *arguments) in SIGNATURES.items():
            if address := load("gl" + name):
                setattr(self, name, ctypes.CFUNCTYPE(result, *arguments)(address))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listed, name)


class Rig:
    """The machine, as far as it is open, and the log of what was done to it."""

    driver: Any  # cuda.bindings.driver
    runtime: Any  # cuda.bindings.runtime
    gl: Any  # Entries
    extensions: frozenset[str]
    program: Any  # SHADER, compiled
    stream: Any  # torch's
    uuid: str  # CUDA's of the device, 32 hex digits

    def __init__(self, device: int, steps: list[dict[str, Any]], save: Callable[[], object]) -> None:
        self.device, self.steps, self.save, self.scope = device, steps, save, ""

    def add(self, name: str, ok: bool, detail: object) -> dict[str, Any]:
        entry = {"name": self.scope + name, "ok": ok, "detail": _short(detail)}
        self.steps.append(entry)
        with suppress(Exception):
            self.save()
        return entry

    def step(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        entry = self.add(name, False, "did not return")
        try:
            value = call(*arguments)
        except Exception as error:
            entry["detail"] = _short(error)
            raise StepFailed(name) from error
        entry.update(ok=True, detail=_short(value) if isinstance(value, (str, int)) else "")
        return value

    def undo(self, stack: ExitStack, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Have the stack call it in the end; it never raises."""

        def clean_up() -> None:
            with suppress(StepFailed):
                self.step(f"cleanup, {name}", call, *arguments)

        stack.callback(clean_up)

    def cuda(self, name: str, *arguments: Any) -> Any:
        """A function of cuda.bindings, its status checked: what it returns besides."""
        status, *values = getattr(self.driver if name.startswith("cuM") else self.runtime, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {getattr(status, 'name', status)}")
        return values[0] if len(values) == 1 else values or None

    def checked(self, name: str, *arguments: Any) -> None:
        """A GL command and what glGetError says of it."""
        for _ in range(8):  # what others left behind
            if not self.gl.GetError():
                break
        getattr(self.gl, name)(*arguments)
        if code := self.gl.GetError():
            raise RuntimeError(f"gl{name} raised GL error {code:#06x}")

    def idle(self) -> None:
        self.gl.Finish()
        self.stream.synchronize()

    def words(self, address: int, nbytes: int) -> torch.Tensor:
        """The tensor that is this memory: int32, for torch has no arithmetic on uint32."""
        memory = {"shape": (nbytes // 4,), "typestr": "<i4", "data": (address, False), "version": 2}
        tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=f"cuda:{self.device}")
        if tensor.data_ptr() != address:
            raise RuntimeError("torch made a copy")
        return tensor

    def same_device(self) -> str:
        """What shows that the current GL context is on CUDA's device: its UUID, else cudaGLGetDevices."""
        # libglvnd has an address for every name that begins with gl: only the extension string tells.
        if missing := {"GL_EXT_memory_object", "GL_EXT_memory_object_fd"} - self.extensions:
            raise RuntimeError(f"this driver has no {' and no '.join(sorted(missing))}")
        count, uuid, found = c_int(0), (ctypes.c_ubyte * UUID_SIZE_EXT)(), []
        self.checked("GetIntegerv", NUM_DEVICE_UUIDS_EXT, byref(count))
        for index in range(count.value):
            self.checked("GetUnsignedBytei_vEXT", DEVICE_UUID_EXT, index, uuid)
            found.append(bytes(uuid).hex())
        if self.uuid in found:
            return self.uuid
        number, ordinals = self.cuda("cudaGLGetDevices", 16, self.runtime.cudaGLDeviceList.cudaGLDeviceListAll)
        if self.device not in list(ordinals)[:number]:
            raise RuntimeError(f"CUDA is on {self.uuid}, GL on {found}")
        return f"cudaGLGetDevices says so, though CUDA's UUID is {self.uuid} and GL's {found}"


def _short(value: object) -> str:
    text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value)
    return " ".join(text.split())[:400]


class Side:
    """One way to hand a buffer over. At rest CUDA owns it."""

    def __init__(self, rig: Rig, glo: int, nbytes: int, address: int) -> None:
        self.rig, self.glo, self.nbytes, self.address = rig, glo, nbytes, address
        self.words = rig.words(address, nbytes)

    def add_one(self, count: int) -> None:
        """GL adds one to the first `count` words."""
        groups = -(-count // 256)
        rows = -(-groups // 65535)
        self.rig.gl.BindBufferRange(G.SHADER_STORAGE_BUFFER, 0, self.glo, 0, self.nbytes)
        self.rig.program["u_count"] = count
        self.rig.program.run(-(-groups // rows), rows, 1)
        self.rig.gl.MemoryBarrier(BARRIERS)

    def to_gl(self) -> None:
        self.rig.stream.synchronize()

    def to_cuda(self) -> None:
        self.rig.gl.Finish()


class Fenced(Side):
    def to_cuda(self) -> None:
        gl = self.rig.gl
        sync = gl.FenceSync(SYNC_GPU_COMMANDS_COMPLETE, 0)
        status = gl.ClientWaitSync(sync, SYNC_FLUSH_COMMANDS_BIT, FENCE_TIMEOUT_NS)
        gl.DeleteSync(sync)
        if status not in (ALREADY_SIGNALED, CONDITION_SATISFIED):
            raise RuntimeError(f"glClientWaitSync returned {status:#06x}")


class Bridged(Side):
    """The ordinary bridge: registered once, mapped and unmapped on torch's stream."""

    mapped = False

    def __init__(self, rig: Rig, glo: int, nbytes: int, resource: Any) -> None:
        self.rig, self.glo, self.nbytes, self.address, self.resource = rig, glo, nbytes, 0, resource
        self.array = (c_void_p * 1)(int(resource))
        self.arguments = 1, ctypes.addressof(self.array), int(rig.stream.cuda_stream)

    def to_gl(self) -> None:
        self.rig.cuda("cudaGraphicsUnmapResources", *self.arguments)
        self.mapped = False

    def to_cuda(self) -> None:
        self.rig.cuda("cudaGraphicsMapResources", *self.arguments)
        self.mapped = True
        address = int(self.rig.cuda("cudaGraphicsResourceGetMappedPointer", self.resource)[0])
        if address != self.address:
            self.words, self.address = self.rig.words(address, self.nbytes), address

    def close(self) -> None:
        if self.mapped:
            self.to_gl()


def properties(d: Any, device: int) -> tuple[Any, Any]:
    """Memory on the device that can leave as a file descriptor, and access to it."""
    prop, access = d.CUmemAllocationProp(), d.CUmemAccessDesc()
    prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    for location in (prop.location, access.location):
        location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
    access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return prop, access


def shared(rig: Rig, stack: ExitStack, nbytes: int) -> dict[str, Side]:
    """The two ways to wait, on one buffer that is CUDA's and GL's. The stack undoes it, what was made last first."""

    def cu(name: str, *arguments: Any) -> Any:
        return rig.step(name, rig.cuda, name, *arguments)

    def gl(name: str, *arguments: Any) -> None:
        rig.step(f"gl{name}", rig.checked, name, *arguments)

    prop, access = rig.step("properties", properties, rig.driver, rig.device)
    advised = rig.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    granularity = int(cu("cuMemGetAllocationGranularity", prop, advised))
    size = -(-nbytes // granularity) * granularity
    handle = cu("cuMemCreate", size, prop, 0)
    rig.undo(stack, "cuMemRelease", rig.cuda, "cuMemRelease", handle)
    address = int(cu("cuMemAddressReserve", size, granularity, 0, 0))
    rig.undo(stack, "cuMemAddressFree", rig.cuda, "cuMemAddressFree", address, size)
    cu("cuMemMap", address, size, 0, handle, 0)
    rig.undo(stack, "cuMemUnmap", rig.cuda, "cuMemUnmap", address, size)
    cu("cuMemSetAccess", address, size, [access], 1)

    def enter_gl(dedicated: bool) -> int:
        with ExitStack() as made:
            memory, glo = c_uint(0), c_uint(0)
            gl("CreateMemoryObjectsEXT", 1, byref(memory))
            rig.undo(made, "glDeleteMemoryObjectsEXT", rig.checked, "DeleteMemoryObjectsEXT", 1, byref(memory))
            if dedicated:
                gl("MemoryObjectParameterivEXT", memory.value, DEDICATED_MEMORY_OBJECT_EXT, byref(c_int(1)))
            with ExitStack() as ours:
                fd = int(cu("cuMemExportToShareableHandle", handle, prop.requestedHandleTypes, 0))
                rig.undo(ours, "close", os.close, fd)
                gl("ImportMemoryFdEXT", memory.value, size, HANDLE_TYPE_OPAQUE_FD_EXT, fd)
                ours.pop_all()  # the descriptor is GL's now
            gl("GenBuffers", 1, byref(glo))
            rig.undo(made, "glDeleteBuffers", rig.checked, "DeleteBuffers", 1, byref(glo))
            gl("BindBuffer", G.COPY_WRITE_BUFFER, glo.value)
            gl("BufferStorageMemEXT", G.COPY_WRITE_BUFFER, nbytes, memory.value, 0)
            stack.enter_context(made.pop_all())
            return glo.value

    try:
        glo = enter_gl(dedicated=False)
    except StepFailed:  # no document says which of the two CUDA's allocations are to GL
        glo = enter_gl(dedicated=True)
    rig.undo(stack, "idle", rig.idle)
    waits = {FINISH: Side, FENCE: Fenced}
    return {way: rig.step(f"tensor, {way}", kind, rig, glo, nbytes, address) for way, kind in waits.items()}


def bridge(rig: Rig, stack: ExitStack, nbytes: int) -> Bridged:
    """The ordinary bridge, to a GL buffer of its own, made as bridge/interop.py makes it and mapped."""
    glo = c_uint(0)
    rig.step("bridge, glGenBuffers", rig.checked, "GenBuffers", 1, byref(glo))
    rig.undo(stack, "bridge, glDeleteBuffers", rig.checked, "DeleteBuffers", 1, byref(glo))
    rig.step("bridge, glBindBuffer", rig.checked, "BindBuffer", G.COPY_WRITE_BUFFER, glo.value)
    rig.step("bridge, glBufferData", rig.checked, "BufferData", G.COPY_WRITE_BUFFER, nbytes, None, G.DYNAMIC_DRAW)
    resource = rig.step("bridge, register", rig.cuda, "cudaGraphicsGLRegisterBuffer", glo.value, 0)
    rig.undo(stack, "bridge, unregister", rig.cuda, "cudaGraphicsUnregisterResource", resource)
    side: Bridged = rig.step("bridge, resource", Bridged, rig, glo.value, nbytes, resource)
    rig.undo(stack, "bridge, idle", rig.idle)
    rig.undo(stack, "bridge, unmap", side.close)
    rig.step("bridge, map", side.to_cuda)
    return side


def check(rig: Rig, result: dict[str, Any]) -> None:
    """Torch writes a counter, the shader adds one, torch reads: 2000 times with each wait, all words of 1 MiB."""
    value = rounds = 0

    def play(side: Side) -> str:
        nonlocal value, rounds
        for _ in range(ROUNDS):
            value += 7  # more than one, so that nothing left over is what is expected next
            side.words.fill_(value)
            side.to_gl()
            side.add_one(side.nbytes // 4)
            side.to_cuda()
            result["stale"] += int((side.words != value + 1).sum()) > 0
            rounds += 1
        return f"{result['stale']} stale so far"

    with ExitStack() as stack:
        sides = shared(rig, stack, CHECKED_BYTES)
        for way, side in sides.items():
            with suppress(StepFailed):
                rig.step(f"{ROUNDS} rounds, {way}", play, side)
        with suppress(StepFailed):
            rig.step("views", lambda: result["views"].update(views(sides[FINISH])))
        if result["stale"] or rounds == 2 * ROUNDS:
            result["correct"] = result["stale"] == 0


def views(side: Side) -> dict[str, dict[str, Any]]:
    """What both see of the same bytes: CUDA writes, the shader adds one. Memory that is not shared at all, memory that
    both lay out otherwise, and stale caches all leave CUDA with wrong words; OpenGL's own reads tell which it is.

    - gl_before, gl_after: wrong words that glGetBufferSubData gives, before the shader and after it.
    - cuda_after: wrong words that CUDA reads then; cuda_kept: those of them that are as CUDA wrote them.
    - first_gl_before, ...: the first words, for the pattern in it.
    """
    count, found = side.nbytes // 4, {}
    for name, wrote in {"one value": torch.full((count,), 7 * 10**6), "counted": torch.arange(count)}.items():
        wrote = wrote.int()
        side.words.copy_(wrote)
        side.to_gl()
        seen = {"gl_before": read_by_gl(side)}
        side.add_one(count)
        side.to_cuda()
        seen |= {"gl_after": read_by_gl(side), "cuda_after": side.words.cpu().clone()}
        wrong = {key: int((words != wrote + (key != "gl_before")).sum()) for key, words in seen.items()}
        kept = int((seen["cuda_after"] == wrote).sum())
        firsts = {f"first_{key}": words[:64].tolist() for key, words in seen.items()}
        found[name] = {"words": count, **wrong, "cuda_kept": kept, **firsts}
    return found


def read_by_gl(side: Side) -> torch.Tensor:
    words = torch.empty(side.nbytes // 4, dtype=torch.int32)
    side.rig.checked("BindBuffer", G.COPY_READ_BUFFER, side.glo)
    side.rig.checked("GetBufferSubData", G.COPY_READ_BUFFER, 0, side.nbytes, c_void_p(words.data_ptr()))
    return words


def frame(side: Side, sink: torch.Tensor, value: int) -> list[tuple[float, float]]:
    """(wall, CPU) milliseconds of each of PARTS. One way goes from a word that one side writes to that word in the
    hands of the other; the round trip writes `value`, adds one and reads, the whole buffer. Each ends with nothing
    left to do. CPU is that of this thread."""
    clocks = [(time.perf_counter(), time.thread_time())]
    side.words[:1].fill_(1)
    side.to_gl()
    side.add_one(1)
    side.rig.gl.Finish()
    clocks.append((time.perf_counter(), time.thread_time()))
    side.add_one(1)
    side.to_cuda()
    sink[:1].copy_(side.words[:1])
    side.rig.stream.synchronize()
    clocks.append((time.perf_counter(), time.thread_time()))
    side.words.fill_(value)
    side.to_gl()
    side.add_one(side.nbytes // 4)
    side.to_cuda()
    sink.copy_(side.words)
    side.rig.stream.synchronize()
    clocks.append((time.perf_counter(), time.thread_time()))
    return [((b[0] - a[0]) * 1e3, (b[1] - a[1]) * 1e3) for a, b in itertools.pairwise(clocks)]


def race(rig: Rig, label: str, sides: dict[str, Side], seconds: float, rows: list[dict[str, Any]]) -> None:
    """Append the rows of one size. The sides take turns as in timer.race, which calls too seldom for a p99 and pauses
    for torch's OpenMP threads, of which there are none here. A side that fails leaves the race."""
    sink = torch.empty_like(next(iter(sides.values())).words)
    samples: dict[str, list[Any]] = {way: [] for way in sides}
    wrong, names, start, turn = dict.fromkeys(sides, 0), list(sides), time.perf_counter(), 0
    while names and turn < MOST and (turn < FEWEST or time.perf_counter() - start < seconds * len(names)):
        for way in tuple(names):
            try:
                new = [frame(sides[way], sink, 7 * number) for number in range(BLOCK + 1)][1:]
                samples[way] += new if turn else []  # the first turn compiles, allocates and touches
                wrong[way] += int((sink != 7 * BLOCK + 1).sum())
            except Exception as error:
                rig.add(f"frames, {way}", False, error)
                names.remove(way)
        names, turn = [*names[1:], *names[:1]], turn + 1  # nobody always follows the same neighbour
    for way, (number, part) in itertools.product([way for way in sides if way in names], enumerate(PARTS)):
        wall, cpu = (sorted(sample[number][clock] for sample in samples[way]) for clock in (0, 1))
        low, median, high = statistics.quantiles(wall, n=4)
        tail = wall[math.ceil(0.99 * len(wall)) - 1]
        times = {"p50_ms": median, "p99_ms": tail, "iqr_ms": high - low, "cpu_ms": statistics.median(cpu)}
        row = {"size": label, "bytes": sides[way].nbytes, "part": part, "way": way, "calls": len(wall)}
        rows.append(row | {key: round(ms, 5) for key, ms in times.items()} | {"wrong_words": wrong[way]})


def experiment(rig: Rig, result: dict[str, Any], seconds: float) -> None:
    """Correctness first, then each size; what fails is left out and the rest goes on."""
    can_share = False
    with suppress(StepFailed):
        rig.step("same device", rig.same_device)
        can_share, rig.scope = True, "check: "
        check(rig, result)
    for label, nbytes in SIZES.items():
        sides: dict[str, Side] = {}
        rig.scope = f"{label}: "
        with suppress(StepFailed), ExitStack() as stack:
            if can_share:
                with suppress(StepFailed):
                    sides |= shared(rig, stack, nbytes)
            with suppress(StepFailed):
                sides[BRIDGE] = bridge(rig, stack, nbytes)
            if sides:
                rig.step("race", race, rig, label, sides, seconds, result["rows"])
                rig.step("glGetError", rig.checked, "Finish")
    rig.scope = ""


def open_gl(device: int) -> lod.Context:
    """The context on CUDA's device, by EGL's word; else on the first one with hardware that opens."""
    errors = []
    for one in sorted(devices(), key=lambda one: (one.software, one.cuda_ordinal != device)):
        try:
            if not one.software:
                return lod.Context(one.index)
        except Exception as error:
            errors.append(_short(error))
    raise RuntimeError(f"no EGL device with hardware opens. {' '.join(errors)}")


def open_all(rig: Rig, stack: ExitStack, result: dict[str, Any]) -> None:
    """CUDA, cuda.bindings and GL, in this order; the stack closes them."""

    def start() -> str:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        stack.enter_context(torch.cuda.device(rig.device))
        torch.zeros(1, device=f"cuda:{rig.device}")
        rig.uuid = str(torch.cuda.get_device_properties(rig.device).uuid)[-36:].replace("-", "").lower()
        rig.stream = torch.cuda.current_stream(rig.device)
        return torch.cuda.get_device_name(rig.device)

    result["device"] = rig.step("CUDA", start)
    rig.driver = rig.step("driver", importlib.import_module, "cuda.bindings.driver")
    rig.runtime = rig.step("runtime", importlib.import_module, "cuda.bindings.runtime")
    ctx = rig.step("OpenGL", lambda: stack.enter_context(open_gl(rig.device)))
    result["gl_renderer"], result["driver"], rig.extensions = ctx.renderer, ctx.driver, frozenset(ctx.extensions)
    rig.gl = rig.step("entry points", lambda: Entries(ctx.gl, egl.loader_of_current().load_opengl_function))
    rig.program = rig.step("shader", lambda: ctx._mgl.compute_shader(SHADER))
    rig.undo(stack, "shader", rig.program.release)


def run(
    seconds: float = 1.0, device: int = 0, save: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """The whole experiment; never raises for what goes wrong in it.

    Args:
        seconds: about so much for each way at each size.
        device: the CUDA ordinal, as torch counts.
        save: called with the result so far before each step.
    """
    result: dict[str, Any] = {"experiment": "shared memory", "device": None, "gl_renderer": None, "driver": None}
    result |= {"torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d"), "steps": [], "correct": None}
    result |= {"stale": 0, "views": {}, "rows": [], "conclusion": "unfinished: the last step did not return"}
    rig = Rig(device, result["steps"], lambda: save(result))
    try:
        with suppress(StepFailed), ExitStack() as stack:
            open_all(rig, stack, result)
            experiment(rig, result, seconds)
    except Exception as error:
        rig.add("unexpected", False, error)
    result["conclusion"] = conclude(result)
    return result


def conclude(result: dict[str, Any]) -> str:
    """What the result says, in words."""
    says, trips = [], {(row["size"], row["way"]): row for row in result["rows"] if row["part"] == PARTS[2]}
    wrong = {f"{size} {way}": row["wrong_words"] for (size, way), row in trips.items() if row["wrong_words"]}
    if result["stale"] or wrong:
        says.append(f"not to be trusted: stale values in {result['stale']} rounds of the check, wrong words {wrong}")
    if says:
        says += [
            "of {words} words, {0}, OpenGL reads {gl_before} wrong before its shader and {gl_after} after it, CUDA "
            "{cuda_after}, {cuda_kept} of them as it wrote them".format(name, **seen)
            for name, seen in result.get("views", {}).items()
        ]
    for size in SIZES:
        ways = [way for way in (FINISH, FENCE) if (size, way) in trips]
        if ways and (size, BRIDGE) in trips:
            way = min(ways, key=lambda way: trips[size, way]["p50_ms"])
            ours, theirs = trips[size, way], trips[size, BRIDGE]
            gain = theirs["p50_ms"] - ours["p50_ms"]
            near = ", within the spread" if abs(gain) <= max(ours["iqr_ms"], theirs["iqr_ms"]) else ""
            verb = "wins" if gain > 0 else "loses"
            says.append(f"shared memory {verb} by {abs(gain):.4f} ms at {size} ({way}{near})")
    failed = [f"step {n} failed: {s['name']}: {s['detail']}" for n, s in enumerate(result["steps"], 1) if not s["ok"]]
    if result["correct"] is None or len(trips) < 3 * len(SIZES):
        says += failed[:1]
    return "; ".join(says) or "nothing was measured"


def show(result: dict[str, Any], console: Console) -> None:
    ways = (FINISH, FENCE, BRIDGE)
    table = Table("size", "part", *(f"{way}\np50 (p99, CPU) ms" for way in ways), box=None)
    cells = {
        (row["size"], row["part"], row["way"]): "{p50_ms:.4f} ({p99_ms:.4f}, {cpu_ms:.4f})".format(**row)
        for row in result["rows"]
    }
    for size, part in dict.fromkeys((size, part) for size, part, _ in cells):
        table.add_row(size, part, *(cells.get((size, part, way), "") for way in ways))
    console.print(table)
    for number, step in enumerate(result["steps"], 1):
        if not step["ok"]:
            console.print(f"step {number} failed: {step['name']}: {step['detail']}", markup=False)
    console.print(result["conclusion"], markup=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/shared-memory.json"), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each way at each size (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < math.inf:
        parser.error("--seconds must be more than 0")
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured, nothing written")
        return 0
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.touch()
    except OSError as error:
        parser.error(f"--out: {error}")

    def save(result: dict[str, Any]) -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    faulthandler.enable()
    result = run(options.seconds, save=save)
    show(result, Console(width=None if sys.stdout.isatty() else 160))
    try:
        save(result)
    except OSError as error:
        print(f"{json.dumps(result)}\n{options.out} could not be written: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
