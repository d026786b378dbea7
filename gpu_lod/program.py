"""Compiled shader programs of one context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import moderngl

from gpu_lod import shaders
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL
from gpu_lod.errors import ShaderError

LOCAL_SIZE = 64
"""Invocations a workgroup of the one-dimensional compute shaders."""

MAX_GROUPS = 65535
"""Workgroups in one dimension of a dispatch: the least that OpenGL promises."""


class Program:
    """A linked program. Uniforms that the compiler dropped may be set; they do nothing."""

    def __init__(self, gl: GL, program: Any, known: frozenset[str]) -> None:
        self._gl = gl
        self._program = program
        self._known = known
        self._uniforms = {name: program[name] for name in program if isinstance(program[name], moderngl.Uniform)}
        self._held: dict[str, Any] = {}

    def set(self, **values: Any) -> Program:
        """Set uniforms: numbers or tuples of numbers."""
        for name, value in values.items():
            if name in self._uniforms:
                self._put(name, value)
                if self._gl.noted is not None:
                    self._gl.noted(self._put, (name, value))
            elif name not in self._known:
                raise ShaderError(f"the shader has no uniform {name}; it has {', '.join(sorted(self._known))}.")
        return self

    def _put(self, name: str, value: Any) -> None:
        if name not in self._held or self._held[name] != value:  # writing it takes ten times as long
            self._held[name] = value  # first: what comes in between puts it back; after an error `forget` is called
            self._uniforms[name].value = value

    def forget(self) -> None:
        self._held.clear()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Uniforms that were set, or are about to be, have their values again afterwards."""
        before = dict(self._held)
        try:
            yield
        finally:
            for name, value in before.items():
                self._put(name, value)

    def dispatch(self, invocations: int) -> None:
        """Run at least so many invocations, over as many rows of workgroups as the limit of a dimension asks for."""
        groups = -(-invocations // LOCAL_SIZE)
        rows = -(-groups // MAX_GROUPS)
        self.dispatch_groups(-(-groups // rows), rows, 1)

    def dispatch_groups(self, x: int, y: int, z: int) -> None:
        # Not by moderngl's run(): that keeps the interpreter's lock for as long as a software renderer computes.
        self._gl.UseProgram(self._program.glo)
        self._gl.DispatchCompute(x, y, z)

    def dispatch_indirect(self, glo: int, offset: int) -> None:
        """Run as many workgroups as the three integers at byte `offset` of buffer `glo` say."""
        self._gl.UseProgram(self._program.glo)
        self._gl.BindBuffer(G.DISPATCH_INDIRECT_BUFFER, glo)
        self._gl.DispatchComputeIndirect(offset)

    def draw_layers(self, vertex_array: int, layers: int) -> None:
        """Cover the viewport once a layer."""
        self._gl.UseProgram(self._program.glo)
        self._gl.BindVertexArray(vertex_array)
        self._gl.DrawArraysInstanced(G.TRIANGLES, 0, 3, layers)

    def release(self) -> None:
        self._program.release()


class Programs:
    """Compiles on first use and keeps the result.

    Args:
        pairs: `Tuning.pairs`.
    """

    def __init__(self, mgl: moderngl.Context, gl: GL, pairs: bool = False) -> None:
        self._mgl = mgl
        self.pairs = pairs
        self._gl = gl
        self._cache: dict[tuple[object, ...], Program] = {}
        self._vertex_array = 0

    def compute(self, name: str, **defines: object) -> Program:
        """The compute shader `name` with these defines.

        Raises:
            ShaderError: it does not compile; the message has file, line and what the driver said.
        """
        key = (name, self.pairs, *defines.items())
        program = self._cache.get(key)
        if program is None:
            always = {"LOCAL_SIZE": LOCAL_SIZE, "PAIRS": self.pairs}
            program = self._cache[key] = self._compile(
                {"compute_shader": shaders.source(name, **{**always, **defines})}
            )
        return program

    def render(self, name: str, **defines: object) -> Program:
        """The fragment shader `name` behind one that covers every layer of the framebuffer."""
        key = (name, *defines.items())
        program = self._cache.get(key)
        if program is None:
            program = self._cache[key] = self._compile(
                {
                    "vertex_shader": shaders.source("layered.vert"),
                    "geometry_shader": shaders.source("layered.geom"),
                    "fragment_shader": shaders.source(name, **defines),
                }
            )
        return program

    @property
    def vertex_array(self) -> int:
        """An empty vertex array: core profiles draw nothing without one."""
        if not self._vertex_array:
            self._vertex_array = self._gl.gen("VertexArrays")
        return self._vertex_array

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Uniforms of all programs have their values again afterwards."""
        with ExitStack() as stack:
            for program in self._cache.values():
                stack.enter_context(program.kept())
            yield

    def forget(self) -> None:
        """That uniforms have the values they were given: after an error it is open which of them the driver took."""
        for program in self._cache.values():
            program.forget()

    def clear(self) -> None:
        for program in self._cache.values():
            program.release()
        self._cache.clear()
        if self._vertex_array:
            self._gl.delete("VertexArrays", self._vertex_array)
            self._vertex_array = 0

    def _compile(self, stages: dict[str, shaders.Source]) -> Program:
        texts = {stage: source.text for stage, source in stages.items()}
        make: Any = self._mgl.compute_shader if "compute_shader" in texts else self._mgl.program
        try:
            program = make(*texts.values()) if "compute_shader" in texts else make(**texts)
        except moderngl.Error as error:
            log = str(error)
            # A failed stage's log starts with its kind; with one stage there is no question.
            blamed = next(
                (source for stage, source in stages.items() if stage in log.lower().replace(" ", "_")),
                next(reversed(stages.values())),
            )
            raise ShaderError(
                f"{blamed.name} does not compile on this driver:\n{blamed.translate(log).strip()}\nUse "
                "backend='torch', or where a verb has several, another generator, and please report this."
            ) from None
        known = frozenset(word for text in texts.values() for word in _uniform_names(text))
        return Program(self._gl, program, known)


def _uniform_names(text: str) -> set[str]:
    return {
        line.split(";")[0].split("[")[0].split()[-1]
        for line in text.splitlines()
        if line.lstrip().startswith("uniform ")
    }
