"""What of a call on OpenGL is the shaders' work, and what is the bridge's?

The input is in GL memory or a texture, the output too. "kernel" is what lies between the bridge's begin and end: by
GL_TIME_ELAPSED on a GPU. A software renderer counts rasterisation alone there and no compute work, so on one it is the
time between two glFinish: the work, and what Python and the driver do to set it up. "bridge" is, on the host, the
bridge's begin and end with nothing left to wait for; on CUDA, its map and unmap.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench_log_polar import READY, RINGS, WEDGES
from bench_samplers import BUDGET
from bridge_cost import timing
from cuda_timer import CudaStopwatch
from inputs import generators_of, inputs_for, job, picture, pyramid_bytes
from rows import Row
from timer import able, race

import gpu_lod as lod
from gpu_lod import subgroups
from gpu_lod.bridge import egl

TIME_ELAPSED, QUERY_RESULT = 0x88BF, 0x8866
Side = Callable[[], object]


class Query:
    """GL_TIME_ELAPSED of a context, which is current in every call."""

    def __init__(self) -> None:
        load = egl.loader_of_current().load_opengl_function
        number, pointer = ctypes.c_uint, ctypes.c_void_p

        def entry(name: str, *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(None, *arguments)(load(name))

        self._begin = entry("glBeginQuery", number, number)
        self._end = entry("glEndQuery", number)
        self._result = entry("glGetQueryObjectui64v", number, number, pointer)
        self._delete = entry("glDeleteQueries", ctypes.c_int, pointer)
        self._name = number(0)
        entry("glGenQueries", ctypes.c_int, pointer)(1, ctypes.byref(self._name))

    def begin(self) -> None:
        self._begin(TIME_ELAPSED, self._name)

    def end(self) -> float:
        """Milliseconds since `begin`, once they are known."""
        self._end(TIME_ELAPSED)
        found = ctypes.c_uint64(0)
        self._result(self._name, QUERY_RESULT, ctypes.byref(found))
        return found.value * 1e-6

    def close(self) -> None:
        self._delete(1, ctypes.byref(self._name))


class Parts:
    """Splits calls of verbs on one context. `kernel_ms` and `bridge_ms` are of the last one.

    Args:
        queries: time the kernel by GL_TIME_ELAPSED; None is wherever that counts all work, on GPUs.
    """

    def __init__(self, ctx: lod.Context, queries: bool | None = None) -> None:
        self.ctx = ctx
        self.bridge = ctx.interop if ctx.interop is not None else ctx.host
        self.queries = not ctx.software if queries is None else queries
        self.kernel_ms = self.bridge_ms = 0.0

    def kernel(self, side: Side) -> float:
        self._call(side)
        return self.kernel_ms

    def of_bridge(self, side: Side) -> float:
        self._call(side)
        return self.bridge_ms

    def _call(self, side: Side) -> None:
        if self.ctx.interop is None:
            with self._hooked():
                side()
            return
        with timing(self.ctx.interop) as timed, self._hooked():
            side()
        self.bridge_ms = timed.bridge_seconds * 1e3

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """The bridge's begin and end, timed; outermost verbs alone call them."""
        begin, end = self.bridge.begin, self.bridge.end
        before = {name: value for name, value in vars(self.bridge).items() if name in ("begin", "end")}
        start = spent = 0.0
        query: Query | None = None

        def timed_begin() -> None:
            nonlocal start, spent, query
            start = time.perf_counter()
            begin()
            spent = time.perf_counter() - start
            self.ctx.gl.Finish()
            query = Query() if self.queries else None
            if query is not None:
                query.begin()
            start = time.perf_counter()

        def timed_end() -> None:
            elapsed = None if query is None else query.end()
            self.ctx.gl.Finish()
            middle = time.perf_counter()
            self.kernel_ms = (middle - start) * 1e3 if elapsed is None else elapsed
            if query is not None:
                query.close()
                middle = time.perf_counter()
            end()
            self.bridge_ms = (time.perf_counter() - middle + spent) * 1e3

        self.bridge.begin, self.bridge.end = timed_begin, timed_end  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.bridge.begin, self.bridge.end
            vars(self.bridge).update(before)


def jobs(ctx: lod.Context, side: int, device: str = "cpu") -> Iterator[tuple[str, str, int, int, dict[str, Side]]]:
    """(verb, note, channels, bytes that must move, ways) of the main jobs, from GL memory and from textures.

    A note is that of the rows end to end, to which the parts belong.
    """
    for verb, channels in ((lod.mipmap, 3), (lod.hiz, 1)):
        held = ctx.empty(1, channels, side, side, device=device)
        held.copy_(picture(side, side, channels=channels))
        ways: dict[str, Side] = {f"gl {name}": partial(verb, held, generator=name) for name in generators_of(verb)}
        with ctx.active():
            lanes = subgroups.usable(ctx)
        if lanes:
            ways["gl single-pass, no subgroups"] = partial(_without_subgroups, ctx, ways["gl single-pass"])
        yield verb.__name__, "", channels, pyramid_bytes(held), ways
    pyramid = lod.mipmap(picture(side, side).to(device), backend="gl").upload()
    fixation = torch.tensor([[0.4, 0.6]])
    polar = partial(lod.log_polar, pyramid, fixation, RINGS, WEDGES)
    ways = {f"gl {name}": partial(polar, generator=name) for name in generators_of(lod.log_polar)}
    yield "log_polar", READY, 3, 2 * 3 * RINGS * WEDGES * 4, ways
    ways = {"gl compute": partial(lod.foveate, pyramid, fixation, backend="gl")}
    yield "foveate", READY, 3, 2 * 3 * side * side * 4, ways
    sites = lod.cortical_sites(fixation, BUDGET, (side, side))
    ways = {"gl compute": partial(lod.gather_patches, pyramid, sites, backend="gl")}
    note = f"{BUDGET} x 14 x 14, cortical sites; {READY}"
    yield "gather_patches", note, 3, 2 * BUDGET * 3 * 14 * 14 * 4, ways


def kernels(sides: list[int], seconds: float, device: torch.device) -> Iterator[Row]:
    """What the verbs' kernels take by themselves on CUDA tensors, by events; a call allocates its result too."""
    if device.type != "cuda":
        return
    watch = CudaStopwatch(device)
    for side in sides:
        image, relevance = (picture(side, side, channels=channels).to(device) for channels in (3, 1))
        pyramid = lod.mipmap(image, backend="cuda").upload(backend="cuda")
        point = torch.tensor([[0.4, 0.6]])
        sites = lod.cortical_sites(point, BUDGET, (side, side)).to(device)
        point = point.to(device)
        texels, patches = 3 * RINGS * WEDGES, BUDGET * 3 * 14 * 14
        for verb, note, channels, moved, way in (
            ("mipmap", "", 3, pyramid_bytes(image), partial(lod.mipmap, image)),
            ("hiz", "", 1, pyramid_bytes(relevance), partial(lod.hiz, relevance)),
            ("log_polar", READY, 3, 8 * texels, partial(lod.log_polar, pyramid, point, RINGS, WEDGES)),
            ("foveate", READY, 3, 2 * image.nbytes, partial(lod.foveate, pyramid, point)),
            (
                "gather_patches", f"{BUDGET} x 14 x 14, cortical sites; {READY}", 3, 8 * patches,
                partial(lod.gather_patches, pyramid, sites),
            ),
        ):  # fmt: skip
            ways = {"cuda kernels": partial(way, backend="cuda")}
            timed = race(ways, seconds=seconds, pause=0.0, clock=lambda call: watch.device_ms(call, 1)[0])
            yield Row(
                verb, "kernel", side, side, 1, channels, "float32", "warm", moved, timed,
                note=f"{note}; by kernels" if note else "by kernels",
            )  # fmt: skip


def _without_subgroups(ctx: lod.Context, side: Side) -> object:
    before = ctx.tuning
    ctx.tuning = replace(before, subgroups=False)
    try:
        return side()
    finally:
        ctx.tuning = before


def large_chain(
    side: int, seconds: float, ctx: lod.Context | None = None, device: str = "cpu", cold_bytes: int | None = None
) -> Iterator[Row]:
    """A chain of RGBA8 in GL memory, of more images in turn than the caches hold: its kernels, and its bridge."""
    ctx = ctx or lod.Context()
    image = picture(side, side, channels=4, dtype=torch.uint8)
    images = inputs_for(
        image, "cold", lambda x: ctx.empty(tuple(x.shape), dtype=x.dtype, device=device).copy_(x), cold_bytes
    )
    verb: Callable[..., object] = lod.mipmap
    ways: dict[str, Side] = {f"gl {name}": job(partial(verb, generator=name), images) for name in generators_of(verb)}
    parts, moved = Parts(ctx), pyramid_bytes(image)
    yield from _split(parts, "mipmap", side, 4, moved, ways, seconds, dtype="uint8", cache="cold")


def rows(sides: list[int], seconds: float, ctx: lod.Context | None = None, device: str = "cpu") -> Iterator[Row]:
    """Two rows a job: its kernels, and its bridge."""
    ctx = ctx or lod.Context()
    parts = Parts(ctx)
    for side in sides:
        for verb, note, channels, moved, ways in jobs(ctx, side, device):
            yield from _split(parts, verb, side, channels, moved, ways, seconds, note=note)


def _split(
    parts: Parts,
    verb: str,
    side: int,
    channels: int,
    moved: int,
    ways: dict[str, Side],
    seconds: float,
    *,
    dtype: str = "float32",
    cache: str = "warm",
    note: str = "",
) -> Iterator[Row]:
    """The two rows of a job."""
    ways, dropped = able(ways)
    for part, clock in (("kernel", parts.kernel), ("bridge", parts.of_bridge)):
        yield Row(
            verb, part, side, side, 1, channels, dtype, cache, moved, race(ways, seconds=seconds, clock=clock),
            note=note, extra={"dropped": dropped} if dropped else {},
        )  # fmt: skip
