"""CUDA as the bridge sees it, on a machine that has none.

"Device memory" is a host array beside each GL buffer. Mapping copies the GL buffer into it; unmapping copies it back
and fills it with rubbish. So whoever writes through a tensor while GL owns the buffer loses the write, and whoever
reads gets rubbish. Every call is checked against the rules of the real ones and written down.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu_lod.bridge import cuda_errors, egl
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL
from gpu_lod.errors import CaptureError, GpuLodError

RUBBISH = 0xCD


class _Resource:
    def __init__(self, glo: int, nbytes: int) -> None:
        self.glo = glo
        self.memory = np.full(nbytes, RUBBISH, np.uint8)
        self.mapped = False
        self.moved = 0


class _View:
    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class FakeCuda:
    """`interop.Driver` without CUDA.

    Attributes:
        calls: what was called, in order: ("map", (glo, ...), stream) and so on.
        fail, always: name of a call to the error code that it gives, once or whenever.
        stream_now: torch's current stream.
        capturing: torch's current stream is being captured.
        captures: what other threads capture on streams of theirs, by any name, and whether it is still valid.
        move: addresses change at the next map.
        doubt: why it is not known whether GL is on this GPU.
    """

    name = "fake"
    device = torch.device("cpu")
    memory = 2**31

    def __init__(self, gl: GL) -> None:
        self.gl = copy.copy(gl)  # the driver's own copies are no commands of the program's
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, int] = {}
        self.always: dict[str, int] = {}
        self.resources: dict[int, _Resource] = {}
        self.stream_now = 7
        self.capturing = False
        self.captures: dict[str, bool] = {}
        self.move = False
        self.active = 0
        self.poisoned: list[tuple[int, str]] = []
        self.marks = 0
        self.doubt: GpuLodError | None = None
        self.waited: list[tuple[Any, int]] = []

    def _call(self, name: str, *what: Any) -> None:
        assert self.active or name in ("activate", "restore"), f"{name} without the CUDA context"
        self.calls.append((name, *what))
        if name in self.always:
            raise cuda_errors.error(self.always[name], "fake", name)
        if name in self.fail:
            raise cuda_errors.error(self.fail.pop(name), "fake", name)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls if call[0] not in ("activate", "restore", "stream", "address")]

    @property
    def mapped(self) -> set[int]:
        return {one.glo for one in self.resources.values() if one.mapped}

    def activate(self) -> str:
        self._call("activate")
        if self.capturing:
            raise CaptureError("capturing")
        self.active += 1
        return "before"

    def restore(self, before: str) -> None:
        assert before == "before"
        self.active -= 1
        assert self.active >= 0
        self._call("restore")

    def check_same_gpu(self, renderer: str) -> GpuLodError | None:
        self._call("check_same_gpu", renderer)
        return self.doubt

    def stream(self) -> int:
        self._call("stream")
        return self.stream_now

    def register(self, glo: int) -> _Resource:
        assert glo not in self.resources, "registered twice"
        self._call("register", glo)
        self.gl.BindBuffer(G.COPY_READ_BUFFER, glo)
        resource = self.resources[glo] = _Resource(glo, _buffer_size())
        # A new buffer holds anything, not the zeros that Mesa has there.
        rubbish = ctypes.c_void_p(resource.memory.ctypes.data)
        self.gl.BufferSubData(G.COPY_READ_BUFFER, 0, len(resource.memory), rubbish)
        return resource

    def unregister(self, handle: _Resource) -> None:
        assert not handle.mapped, "unregistered while mapped"
        self._call("unregister", handle.glo)
        del self.resources[handle.glo]

    def map(self, handles: Sequence[_Resource], stream: int) -> None:
        self._call("map", tuple(one.glo for one in handles), stream)
        assert handles and len(set(map(id, handles))) == len(handles)
        for one in handles:
            if one.mapped:
                raise cuda_errors.error(999, "already mapped", "cudaGraphicsMapResources")  # as the runtime does
        self.gl.Finish()
        for one in handles:
            if self.move:
                one.moved += 1
                one.memory = np.full(len(one.memory), RUBBISH, np.uint8)
            self.gl.BindBuffer(G.COPY_READ_BUFFER, one.glo)
            self.gl.GetBufferSubData(G.COPY_READ_BUFFER, 0, len(one.memory), ctypes.c_void_p(one.memory.ctypes.data))
            one.mapped = True

    def unmap(self, handles: Sequence[_Resource], stream: int) -> None:
        self._call("unmap", tuple(one.glo for one in handles), stream)
        assert handles
        for one in handles:
            if not one.mapped:
                raise cuda_errors.error(999, "not mapped", "cudaGraphicsUnmapResources")
        for one in handles:
            self.gl.BindBuffer(G.COPY_WRITE_BUFFER, one.glo)
            self.gl.BufferSubData(G.COPY_WRITE_BUFFER, 0, len(one.memory), ctypes.c_void_p(one.memory.ctypes.data))
            one.memory[:] = RUBBISH
            one.mapped = False

    def address(self, handle: _Resource) -> tuple[int, int]:
        self._call("address", handle.glo)
        if not handle.mapped:
            raise cuda_errors.error(999, "not mapped", "cudaGraphicsResourceGetMappedPointer")
        return handle.memory.ctypes.data, len(handle.memory)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(_View(address, nbytes, owner)))

    def mark(self) -> int:
        self._call("mark")
        if self.captures:  # what looks at all streams spoils them, whatever this thread's capture mode
            self.captures = dict.fromkeys(self.captures, False)
            raise cuda_errors.error(900, "cudaErrorStreamCaptureUnsupported", "cuCtxRecordEvent")
        self.marks += 1
        return self.marks

    def wait(self, event: int, stream: int) -> None:
        self._call("wait", event, stream)
        self.waited.append((event, stream))

    def synchronize(self) -> None:
        self._call("synchronize")

    def release_cache(self) -> None:
        self._call("release_cache")

    def poison(self, storage: int, message: str) -> None:
        self.poisoned.append((storage, message))


def _buffer_size() -> int:
    address = egl.loader_of_current().load_opengl_function("glGetBufferParameteriv")
    size = ctypes.c_int(0)
    ctypes.CFUNCTYPE(None, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)(address)(
        G.COPY_READ_BUFFER, 0x8764, ctypes.byref(size)
    )
    return size.value
