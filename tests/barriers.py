"""What OpenGL promises of memory that shaders write to: nothing, until a barrier names how it is used next.

Software renderers run commands in order over one memory, so nothing shows there that a barrier is missing; a GPU reads
what is stale now and then. `Memory` follows the commands of verbs and notes each use that no barrier stands before.

Source: OpenGL 4.6, section 7.13.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import gpu_lod as lod
from gpu_lod import shaders
from gpu_lod.bridge import HostBridge
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.views import Views
from gpu_lod.program import LOCAL_SIZE, Program, Programs

_BLOCK = re.compile(r"binding = (\d+)\)([\w ]*?) buffer \w+ \{ .*?(\w+)\[\]; \}")
_FETCHED = re.compile(r"binding = (\d+)\) uniform \w+ (b_\w+);")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass
class _Use:
    """Of a buffer's bytes, or of a texture's levels, from the first to before the last."""

    kind: str
    name: int
    first: int
    last: int
    by: str
    barriers: int = 0
    """Behind it."""

    def meets(self, other: _Use) -> bool:
        same = (self.kind, self.name) == (other.kind, other.name)
        return same and self.first < other.last and other.first < self.last


class Memory:
    """Follows the commands that a context is given."""

    def __init__(self) -> None:
        self.hazards: list[str] = []
        self._texts: dict[int, tuple[str, str]] = {}
        """Name and text of each program."""
        self._program = 0
        self._storage: dict[int, tuple[int, int, int]] = {}
        self._fetched: dict[int, int] = {}
        self._copy: dict[int, int] = {}
        self._indirect = 0
        self._image, self._target = (0, 0), (0, 0)
        self._texture = 0
        self._writes: list[_Use] = []
        self._reads: list[_Use] = []

    @contextmanager
    def following(self, ctx: lod.Context) -> Iterator[None]:
        compute, render, end, bind = Programs.compute, Programs.render, HostBridge.end, Views.bind

        def noted(make: Callable[..., Program], **always: object) -> Callable[..., Program]:
            def call(programs: Programs, name: str, **defines: object) -> Program:
                program = make(programs, name, **defines)
                self._texts[program._program.glo] = name, _active(shaders.source(name, **{**always, **defines}).text)
                return program

            return call

        def at_end(bridge: HostBridge) -> None:
            # A verb that a plan runs next finds the memory as this one leaves it.
            for write in self._writes:
                if write.kind == "buffer" and not write.barriers & G.SHADER_STORAGE_BARRIER_BIT:
                    self.hazards.append(f"no barrier behind {write.by}, the last to write to a buffer")
            end(bridge)
            self._writes = [write for write in self._writes if write.barriers != G.ALL_BARRIER_BITS]
            self._reads = []  # they are done

        def fetched(views: Views, unit: int, internal_format: int) -> None:
            self._fetched[unit] = views._glo
            bind(views, unit, internal_format)

        with pytest.MonkeyPatch.context() as patch, ctx.gl.recording(self._note):
            patch.setattr(Programs, "compute", noted(compute, LOCAL_SIZE=LOCAL_SIZE))
            patch.setattr(Programs, "render", noted(render))
            patch.setattr(HostBridge, "end", at_end)
            patch.setattr(Views, "bind", fetched)
            yield

    def _note(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if (follow := getattr(self, f"_{name}", None)) is not None:
            follow(*arguments)

    def _before_reading(self, use: _Use, bit: int) -> None:
        self._before(use, bit, self._writes, "writes to")

    def _before_writing(self, use: _Use, bit: int) -> None:
        # Two that write to one range write to other elements of it.
        self._before(use, bit, self._reads, "reads")

    def _before(self, use: _Use, bit: int, earlier: list[_Use], does: str) -> None:
        for one in earlier:
            if one.meets(use) and not one.barriers & bit:
                self.hazards.append(f"no barrier between {one.by}, which {does} a {use.kind}, and {use.by}")

    def _dispatch(self, glo: int) -> None:
        name, text = self._texts[glo]
        reads, writes = [], []
        for binding, how, member in _BLOCK.findall(text):
            if len(re.findall(rf"\b{member}\b", text)) > 1:
                use = _Use("buffer", *self._storage[int(binding)], name)
                if "writeonly" not in how:
                    self._before_reading(use, G.SHADER_STORAGE_BARRIER_BIT)
                    reads.append(use)
                if "readonly" not in how:
                    self._before_writing(use, G.SHADER_STORAGE_BARRIER_BIT)
                    writes.append(use)
        for unit, member in _FETCHED.findall(text):
            if len(re.findall(rf"\b{member}\b", text)) > 1:
                use = _Use("buffer", self._fetched[int(unit)], 0, 2**62, name)
                self._before_reading(use, G.TEXTURE_FETCH_BARRIER_BIT)
                reads.append(use)
        if "sampler2DArray" in text:
            use = _Use("texture", self._texture, 0, 99, name)
            self._before_reading(use, G.TEXTURE_FETCH_BARRIER_BIT)
            reads.append(use)
        if "image2DArray" in text:
            texture, level = self._image
            use = _Use("texture", texture, level, level + 1, name)
            self._before_writing(use, G.SHADER_IMAGE_ACCESS_BARRIER_BIT)
            writes.append(use)
        self._reads += reads
        self._writes += writes

    def _UseProgram(self, glo: int) -> None:
        self._program = glo

    def _DispatchCompute(self, *_: int) -> None:
        self._dispatch(self._program)

    def _DispatchComputeIndirect(self, offset: int) -> None:
        use = _Use("buffer", self._indirect, offset, offset + 12, "an indirect dispatch")
        self._before_reading(use, G.COMMAND_BARRIER_BIT)
        self._dispatch(self._program)

    def _DrawArraysInstanced(self, *_: int) -> None:
        texture, level = self._target
        self._before_reading(_Use("texture", texture, level, level + 1, "a draw"), G.FRAMEBUFFER_BARRIER_BIT)
        self._dispatch(self._program)

    def _MemoryBarrier(self, bits: int) -> None:
        for use in (*self._writes, *self._reads):
            use.barriers |= bits

    def _BindBufferRange(self, _: int, binding: int, glo: int, start: int, size: int) -> None:
        self._storage[binding] = glo, start, start + size

    def _BindBuffer(self, target: int, glo: int) -> None:
        self._copy[target] = glo
        if target == G.DISPATCH_INDIRECT_BUFFER:
            self._indirect = glo

    def _update(self, name: str, target: int, first: int, size: int) -> None:
        use = _Use("buffer", self._copy[target], first, first + size, name)
        self._before_reading(use, G.BUFFER_UPDATE_BARRIER_BIT)

    def _BufferSubData(self, target: int, first: int, size: int, _: Any) -> None:
        self._update("glBufferSubData", target, first, size)

    def _GetBufferSubData(self, target: int, first: int, size: int, _: Any) -> None:
        self._update("glGetBufferSubData", target, first, size)

    def _ClearBufferSubData(self, target: int, _: int, first: int, size: int, *__: Any) -> None:
        self._update("glClearBufferSubData", target, first, size)

    def _BindTexture(self, _: int, glo: int) -> None:
        self._texture = glo

    def _BindImageTexture(self, _: int, glo: int, level: int, *__: int) -> None:
        self._image = glo, level

    def _FramebufferTexture(self, _: int, __: int, glo: int, level: int) -> None:
        self._target = glo, level

    def _GenerateMipmap(self, _: int) -> None:
        use = _Use("texture", self._texture, 0, 99, "glGenerateMipmap")
        self._before_reading(use, G.TEXTURE_UPDATE_BARRIER_BIT)

    def _TexSubImage3D(self, _: int, level: int, *__: Any) -> None:
        use = _Use("texture", self._texture, level, level + 1, "glTexSubImage3D")
        self._before_reading(use, G.TEXTURE_UPDATE_BARRIER_BIT)


def _active(text: str) -> str:
    """What of a shader is compiled, so that blocks which nothing uses are told from the others."""
    macros: dict[str, str] = {}
    result, state = [], [(True, True)]  # of each open #if: whether this branch is taken, and whether one was

    def holds(condition: str) -> bool:
        condition = re.sub(r"defined\s*\(?\s*(\w+)\s*\)?", lambda m: str(int(m[1] in macros)), condition)
        for _ in range(8):
            condition = _WORD.sub(lambda m: macros.get(m[0]) or "0", condition)
        return bool(eval(re.sub(r"!(?!=)", " not ", condition.replace("&&", " and ").replace("||", " or "))))

    for line in re.sub(r"\\\n", "", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        rest = rest.split("//")[0].strip()
        outer = all(taken for taken, _ in state[:-1])
        if word in ("#if", "#ifdef", "#ifndef"):
            inside = all(taken for taken, _ in state)
            met = inside and (holds(rest) if word == "#if" else (rest in macros) == (word == "#ifdef"))
            state.append((met, met))
        elif word in ("#elif", "#else"):
            met = outer and not state[-1][1] and (word == "#else" or holds(rest))
            state[-1] = met, met or state[-1][1]
        elif word == "#endif":
            state.pop()
        elif all(taken for taken, _ in state):
            if word == "#define" and "(" not in (name := rest.split(" ")[0]):
                macros[name] = rest.partition(" ")[2]
            result.append(line.split("//")[0])
    return "\n".join(result)
