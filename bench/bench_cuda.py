"""The verbs on CUDA tensors, against what torch does best on CUDA: compiled and captured in graphs too.

Rows come in the order of their importance and are saved one by one, so that a run that ends early, by its time or by a
crash, leaves the ones that matter most. What fails is in the file and the rest goes on: in a process of its own where a
side has left the device unusable, or hangs.

python bench/run.py --device cuda [--minutes 5] [--quick] [--out FILE] [--go-on FILE]
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import bench_features
import bench_hiz
import bench_log_polar
import bench_mipmap
import bench_parts
import bench_samplers
import cuda_peers
import peers
import torch
import torch.nn.functional as F
from bench_log_polar import RINGS, WEDGES
from cuda_timer import Budget, CudaStopwatch, DeviceLostError, Limits, Side, Sides, Stopwatch, lost, short
from eight_texels import Later
from inputs import ABSENT, NO_GL, generators_of, inputs_for, job, optional, picture, pyramid_bytes, uploaded
from opponents import GivenUp, at_most, captured, compiled
from rows import RESULTS, Row, cuda_facts, slug, write
from timer import Timing

import gpu_lod as lod
from gpu_lod.halving import stored
from gpu_lod.log_polar import Rule, ring_rule
from gpu_lod.mipmap import reference as mip_reference
from gpu_lod.report import files

Size = tuple[int, int, int]
"""(height, width, batch)"""
Jobs = list[tuple[str, Callable[[], Iterable[Row]]]]
Way = tuple[Callable[[Any], object], list[Any]]
"""A function, and the inputs that it takes in turn."""

MANY = 5400
"""Patches of 14 x 14 that are more than a megapixel."""
MAIN: list[Size] = [(1024, 1024, 1), (2048, 2048, 1), (4096, 4096, 1)]
REST: list[Size] = [
    (224, 224, 1),
    (448, 448, 1),
    (1080, 1920, 1),
    (777, 1001, 1),
    (224, 224, 8),
    (224, 224, 32),
    (1024, 1024, 8),
]
COLD_BYTES = 256 * 2**20
"""Inputs of a cold row together: well beyond the 50 to 60 MB of second-level cache that a large GPU has."""
COMPILE_SECONDS, COMPILE_SHARE = 60.0, 0.4
"""For one function at the most, and of the whole run for all of them."""
ENOUGH_SECONDS = 12.0
"""With less time than this left, no further row is begun."""
ROW_SECONDS, ROW_SHARE = 45.0, 0.4
"""For a row at the most, and of what is left."""
RACE_SHARE = 0.4
"""Of a row's time, for timing the sides that were made in the rest of it."""
LATE_SECONDS = 15.0
"""So much later a row that still makes or times its sides is given up, and twice as much later the process."""
START_SECONDS = 15.0
"""For a fresh process to come as far as its first row."""
TRIES = 3
"""Sides that a job may lose the device to, each left out of the next try, before it is given up."""
HELD = ", GL memory"
FURTHER = ", what may follow its row "


@dataclass
class Run:
    """A run on one device, and what it has found so far."""

    device: torch.device
    watch: Stopwatch
    budget: Budget
    ctx: lod.Context | None
    seconds: float = 0.3
    """For a side and clock, at the most."""
    rows: list[Row] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    coming: list[str] = field(default_factory=list)
    """Jobs that are not done yet: the file of a run that is killed names them as left out."""
    compile_seconds: float = 0.0
    """Left for compiling."""
    limits: Limits = field(default_factory=Limits)
    """Of the row that is being measured."""
    kept: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the process before this one, as they are in the file."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Sides of the row that `race` has timed, and why they are not in it."""

    def fail(self, name: str, error: object) -> None:
        self.failures.append({"name": name, "error": short(error)})

    def begin_row(self) -> None:
        """From now on a row's time is counted."""
        seconds = min(ROW_SECONDS, max(ENOUGH_SECONDS, ROW_SHARE * self.budget.left()))
        self.limits.left = Budget(seconds / 60).left
        self.limits.for_the_race = RACE_SHARE * seconds
        self.limits.side = ""

    # -- sides ------------------------------------------------------------------------------------------------------

    def add_gl(self, sides: Sides, name: str, make: Callable[[], Side]) -> None:
        if self.ctx is None:
            sides.dropped[name] = NO_GL
        else:
            sides.add(name, make)

    def add_kernels(self, sides: Sides, function: Callable[[Any], object], inputs: list[Any], graph: bool) -> None:
        """A verb with backend="cuda", and that in a CUDA graph."""
        if self.device.type == "cuda":
            sides.add("cuda kernels", partial(job, function, inputs))
            if graph:
                sides.add("cuda graph of kernels", lambda: captured(function, inputs))

    def add_fast_torch(
        self,
        sides: Sides,
        eager: Mapping[str, Way],
        source: Callable[[Any], object] | None,
        inputs: list[Any],
        placed: Callable[[Side], Side] = lambda side: side,
    ) -> None:
        """The fastest eager way in a CUDA graph; `source` compiled; and that in a graph.

        Args:
            eager: sides that do the row's job.
            source: None is not to compile.
            placed: makes a call of one that first copies something to where it is read.
        """
        best = sides.fastest(list(eager))
        if best is not None:
            name = f"torch graph of {best.removeprefix('torch ')}"
            sides.add(name, lambda: placed(captured(*eager[best])))
        if source is None:
            return
        made: list[Callable[[Any], object]] = []

        def compile_it() -> Side:
            time_of_row = self.limits.left() - self.limits.for_the_race
            limit = min(COMPILE_SECONDS, self.compile_seconds, self.budget.left() / 2, time_of_row)
            if limit < 5:
                raise TimeoutError("no time left for compiling")
            before = self.budget.left()
            try:
                made.append(compiled(source, inputs, limit))
            finally:
                self.compile_seconds -= before - self.budget.left()
            return placed(job(made[0], inputs))

        if sides.add("torch compiled", compile_it):
            sides.add("torch graph of compiled", lambda: placed(captured(made[0], inputs)))

    def split(self, sides: Sides, row: Row, note: str) -> Iterator[Row]:
        """The row of the sides that take an ordinary tensor, and that of those with the image in GL memory."""
        timings = sides.race(seconds=self.seconds)
        for held in (False, True):
            mine = {n.removesuffix(HELD): t for n, t in timings.items() if _takes_part(n, held)}
            dropped = {n.removesuffix(HELD): why for n, why in sides.dropped.items() if _takes_part(n, held)}
            ours = any(name.startswith("gl") for name in mine)
            if not mine or (held and not ours):
                continue
            yield Row(
                row.verb, "zero-copy in" if held else row.part, row.height, row.width, row.batch, row.channels,
                row.dtype, row.cache, row.moved_bytes, mine, other_job=row.other_job,
                note="the image is in GL memory already" if held else note,
                extra={"dropped": dropped} if dropped else {},
            )  # fmt: skip

    def race(self, sides: Mapping[str, Side], *, seconds: float = 0.3, most: int = 200) -> dict[str, Timing]:
        """`timer.Race` for rows that are the same on every device. What torch cannot do is no failure, nor is it that
        there is no OpenGL, or no time."""
        alive = Sides(self.watch, self.limits)
        for name, side in sides.items():
            if self.ctx is None and name.startswith("gl"):
                alive.dropped[name] = NO_GL
            else:
                alive.add(name, side.make if isinstance(side, Later) else lambda side=side: side)  # type: ignore[misc]
        result = alive.race(seconds=seconds, most=most)
        self.dropped = alive.dropped
        for name in sorted(alive.failed):
            if not name.startswith("torch "):
                self.fail(f"side {name!r} of a row with {', '.join(sides)}", alive.dropped[name])
        if not result:
            raise RuntimeError("no side ran")
        return result

    # -- rows -------------------------------------------------------------------------------------------------------

    def cold(self, image: torch.Tensor, cache: str, prepare: Callable[[torch.Tensor], Any]) -> list[Any]:
        return inputs_for(image, cache, prepare, COLD_BYTES)

    def held(self, image: torch.Tensor, cache: str) -> list[torch.Tensor]:
        """The image in GL memory."""
        assert self.ctx is not None

        def hold(x: torch.Tensor) -> torch.Tensor:
            assert self.ctx is not None
            result = self.ctx.empty(tuple(x.shape), dtype=x.dtype, device=self.device)
            return result.copy_(x)

        return self.cold(image, cache, hold)

    def chains(
        self,
        verb: Callable[..., object],
        generators: tuple[str, ...],
        image: torch.Tensor,
        cache: str,
        ways: Mapping[str, Way],
        source: Callable[[Any], object] | None,
        other: Mapping[str, str],
        libraries: Mapping[str, Callable[[list[torch.Tensor]], Side]] | None = None,
    ) -> Iterator[Row]:
        """Rows of a verb that makes pyramids.

        Args:
            ways: the sides that are not ours.
            source: what is compiled; None is nothing.
            other: the sides that do another job, and why.
            libraries: makes sides of libraries that may not be there, from the inputs.
        """
        sides = Sides(self.watch, self.limits)
        inputs = self.cold(image, cache, lambda x: x)
        sides.add("auto", partial(job, verb, inputs))
        for generator in generators:
            self.add_gl(sides, f"gl {generator}", partial(job, partial(verb, generator=generator), inputs))
        self.add_kernels(sides, partial(verb, backend="cuda"), inputs, graph=True)
        for name, way in ways.items():
            sides.add(name, partial(job, *way))
        for name, make in (libraries or {}).items():
            sides.add(name, partial(make, inputs))
        held: list[torch.Tensor] = []
        for generator in generators:

            def from_gl_memory(generator: str = generator) -> Side:
                held[:] = held or self.held(image, cache)
                return job(partial(verb, generator=generator), held)

            self.add_gl(sides, f"gl {generator}{HELD}", from_gl_memory)
        eager = {name: way for name, way in ways.items() if name.startswith("torch") and name not in other}
        self.add_fast_torch(sides, eager, source, inputs)
        batch, channels, height, width = image.shape
        row = Row(
            verb.__name__, "end to end", height, width, batch, channels, str(image.dtype)[6:], cache,
            pyramid_bytes(image), {}, other_job=other,
        )  # fmt: skip
        yield from self.split(sides, row, "")

    def mipmap(
        self,
        size: Size,
        dtype: torch.dtype = torch.float32,
        cache: str = "warm",
        channels: int = 3,
        compiles: bool = True,
    ) -> Iterator[Row]:
        height, width, batch = size
        image = picture(height, width, batch=batch, channels=channels, dtype=dtype).to(self.device)
        inputs = self.cold(image, cache, lambda x: x)
        functions, other = bench_mipmap.torch_ways(height, width)
        ways: dict[str, Way] = {name: (function, inputs) for name, function in functions.items()}
        source: Callable[[Any], object] = mip_reference
        other |= bench_mipmap.driver_differs(height, width, dtype)
        libraries: dict[str, Callable[[list[torch.Tensor]], Side]] = {}
        if bench_mipmap.is_power(height, width) and dtype in (torch.float32, torch.uint8):
            libraries = {cuda_peers.CUPY: cuda_peers.cupy_side, cuda_peers.CVCUDA: cuda_peers.cvcuda_side}
            if dtype == torch.uint8:
                other |= dict.fromkeys(libraries, peers.ROUNDS)
        if "torch reshape mean" in ways:
            source = partial(bench_mipmap._stored_chain, bench_mipmap._avg_pool)
        if dtype == torch.float32:
            last = self.cold(image, cache, lambda x: x.to(memory_format=torch.channels_last))
            ways |= {name: (way, last) for name, way in bench_mipmap.channels_last(height, width).items()}
        if peers.kornia and dtype == torch.float32:
            name = "kornia build_pyramid (Gaussian)"
            ways[name] = partial(peers.kornia.build_pyramid, max_level=peers.kornia_depth(height, width)), inputs
            other[name] = peers.GAUSSIAN
        generators = generators_of(lod.mipmap)
        to_compile = source if compiles else None
        yield from self.chains(lod.mipmap, generators, image, cache, ways, to_compile, other, libraries)

    def odd_sides(self, size: Size) -> Iterator[Row]:
        """A chain beside that of even sides: nothing is compiled for it, for the comparison is with ourselves."""
        yield from self.mipmap(size, compiles=False)

    def hiz(self, size: Size, cache: str = "warm") -> Iterator[Row]:
        height, width, batch = size
        image = picture(height, width, batch=batch, channels=1).to(self.device)
        inputs = self.cold(image, cache, lambda x: x)
        functions, other = bench_hiz.torch_ways(height, width)
        ways: dict[str, Way] = {name: (function, inputs) for name, function in functions.items()}
        source = partial(mip_reference, reduce="max")
        yield from self.chains(lod.hiz, generators_of(lod.hiz), image, cache, ways, source, other)

    def log_polar(
        self,
        size: Size,
        dtype: torch.dtype = torch.float32,
        cache: str = "warm",
        rings: int = RINGS,
        wedges: int = WEDGES,
    ) -> Iterator[Row]:
        height, width, batch = size
        image = picture(height, width, batch=batch, dtype=dtype).to(self.device)
        rule = ring_rule(rings, wedges, None, 0.7, "log", 0.05)
        fixations = itertools.cycle(torch.rand(64, batch, 2).unbind())
        backend: Literal["torch", "gl"] = "torch" if self.ctx is None else "gl"
        pyramids = self.cold(image, cache, lambda x: uploaded(lod.mipmap(x, backend=backend)))

        def at(sample: Callable[..., object], source: Any) -> object:
            return sample(source, next(fixations))

        # Nothing but the fixation comes at the call: it is copied to where the functions, and graphs of them, read it.
        here = torch.rand(batch, 2, device=self.device)

        def placed(side: Side) -> Side:
            def call() -> object:
                here.copy_(next(fixations), non_blocking=True)
                return side()

            return call

        sides = Sides(self.watch, self.limits)
        ours = partial(lod.log_polar, rings=rings, wedges=wedges)
        sides.add("auto", partial(job, partial(at, ours), pyramids))
        for generator in generators_of(lod.log_polar):
            way = partial(at, partial(ours, generator=generator))
            self.add_gl(sides, f"gl {generator}", partial(job, way, pyramids))
        self.add_kernels(sides, partial(at, partial(ours, backend="cuda")), pyramids, graph=False)
        if self.device.type == "cuda":
            memory = partial(at, bench_samplers.from_memory(ours))
            sides.add(bench_samplers.FROM_MEMORY, partial(job, memory, pyramids))

            def kernels(pyramid: lod.Pyramid) -> object:
                return ours(pyramid, here, backend="cuda")

            sides.add("cuda graph of kernels", lambda: placed(captured(kernels, pyramids)))
        sides.add("torch two levels a ring", partial(job, partial(at, partial(ours, backend="torch")), pyramids))
        if (rings, wedges) == (RINGS, WEDGES):
            sides.add("torch every level", partial(job, partial(at, bench_log_polar._all_levels), pyramids))
        prepared = [TablesKept(pyramid, rule, here) for pyramid in pyramids]
        name = "torch two levels a ring, tables kept"
        kept: Way = (TablesKept.__call__, prepared)
        sides.add(name, lambda: placed(job(*kept)))
        # Each pyramid's tables would be compiled anew.
        source = TablesKept.__call__ if len(prepared) == 1 else None
        self.add_fast_torch(sides, {name: kept}, source, prepared, placed)
        out = batch * 3 * rings * wedges * dtype.itemsize
        row = Row("log_polar", "end to end", height, width, batch, 3, str(dtype)[6:], cache, 2 * out, {})
        texture = ", a texture already" if self.ctx is not None else ""
        large = "" if (rings, wedges) == (RINGS, WEDGES) else f"{rings} x {wedges}, "
        yield from self.split(sides, row, f"{large}from a prebuilt pyramid{texture}")


def _takes_part(side: str, held: bool) -> bool:
    """Torch's sides are in both rows; "auto" is what a caller with an ordinary tensor gets."""
    if side.startswith("gl"):
        return side.endswith(HELD) == held
    return not held or side.startswith("torch")


class TablesKept:
    """`log_polar` in torch with all that does not depend on the fixation computed beforehand, the levels in fp32.

    Args:
        fixation: [B, 2] on the pyramid's device, read at every call.
    """

    def __init__(self, pyramid: lod.Pyramid, rule: Rule, fixation: torch.Tensor) -> None:
        height, width = pyramid.size
        longer, device = max(height, width), pyramid.device
        self.dtype, self.fixation = pyramid.dtype, fixation
        # In torch's own memory: a graph would not notice that OpenGL's had moved.
        self.levels = [level.float().clone() for level in pyramid]
        angle = 2 * math.pi * (torch.arange(rule.wedges, dtype=torch.float64) + 0.5) / rule.wedges
        ring = torch.tensor(rule.radii, dtype=torch.float64)[:, None, None]
        aspect = torch.tensor([longer / width, longer / height], dtype=torch.float64)
        offsets = ring * torch.stack([angle.cos(), angle.sin()], dim=-1) * 2 * aspect
        self.offsets = offsets.float().to(device)
        self.bands: list[tuple[int, int, int, torch.Tensor | None]] = []
        levels = rule.levels(longer, len(pyramid) - 1)
        for fine, band in itertools.groupby(range(rule.rings), key=lambda ring: int(levels[ring])):
            rings = list(band)
            blend = [levels[ring] - fine for ring in rings]
            weights = torch.tensor(blend, device=device)[:, None] if any(blend) else None
            self.bands.append((fine, rings[0], rings[-1] + 1, weights))

    def __call__(self) -> torch.Tensor:
        grid = (2 * self.fixation - 1)[:, None, None] + self.offsets
        parts = []
        for fine, first, last, weights in self.bands:
            part = _sample(self.levels[fine], grid[:, first:last])
            if weights is not None:
                part = torch.lerp(part, _sample(self.levels[fine + 1], grid[:, first:last]), weights)
            parts.append(part)
        return stored(torch.cat(parts, dim=2), self.dtype)


def _sample(level: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(level, grid, mode="bilinear", padding_mode="border", align_corners=False)


def plan(run: Run, main: list[Size], rest: list[Size]) -> Jobs:
    """All jobs, the most important first."""
    jobs: Jobs = []

    def add(verb: Callable[..., Iterator[Row]], size: Size, *details: Any) -> None:
        words = [verb.__name__, "x".join(map(str, size)), *map(str, details)]
        jobs.append((" ".join(words).replace("torch.", ""), partial(verb, size, *details)))

    def add_rows(name: str, rows: Callable[..., Iterator[Row]], *details: Any, **more: Any) -> None:
        jobs.append((name, partial(rows, *details, run.seconds, device, run.race, **more)))

    device, f32 = str(run.device), [torch.float32]
    first, last = main[0], main[-1]
    height, width, batch = last
    # What GPUs are judged by: RGBA8 from memory, its shaders by themselves and the whole call, large chains, outputs
    # of a megapixel, the least that a call costs, odd sides beside even ones, and one pass beside many.
    shaders = partial(bench_parts.large_chain, height, run.seconds, run.ctx, device, COLD_BYTES)
    jobs.append((f"parts {height}x{width} uint8 cold 4", shaders if run.ctx is not None else list))
    add(run.mipmap, last, torch.uint8, "cold", 4)
    for size in reversed(main):
        add(run.mipmap, size)
    for dtype in (torch.float32, torch.uint8):
        add(run.log_polar, last, dtype, "warm", 1024, 1024)
        words = "" if dtype == torch.float32 else " uint8"
        add_rows(f"foveate {first[0]}{words}", bench_samplers.foveate, [first], [dtype])
        add_rows(f"many patches{words}", bench_samplers.gather_patches, [last], [dtype], budget=MANY)
    add_rows("fixed cost", bench_log_polar.fixed_cost)
    add(run.odd_sides, (height + 1, width + 1, batch))
    add(run.odd_sides, (height - 1, width - 1, batch))
    parts = partial(bench_parts.rows, [size[0] for size in main[:2]], run.seconds, run.ctx, device)
    jobs.append(("parts", parts if run.ctx is not None else list))  # in its place on every device
    jobs.append(("kernels", partial(bench_parts.kernels, [size[0] for size in main[:2]], run.seconds, run.device)))
    add_rows("gather_patches", bench_samplers.gather_patches, [first], f32)
    for size in reversed(main):
        add(run.hiz, size)
        add(run.log_polar, size)
    add(run.mipmap, first, torch.float32, "cold")
    add(run.hiz, first, "cold")
    add(run.log_polar, first, torch.float32, "cold")
    for size in main[1:]:
        add_rows(f"foveate {size[0]}", bench_samplers.foveate, [size], f32)
    add_rows("whole calls", bench_log_polar.from_an_image)
    add_rows("readers", bench_hiz.readers)
    add_rows("foveate once", bench_samplers.foveate_once, [first], f32)
    add_rows("others once", bench_samplers.others_once, [first], f32)
    add_rows("features", bench_features.rows, [(first[0] // 2, first[1] // 2, batch)])
    add_rows("gradients", bench_samplers.gradients, side=first[0])
    if first[0] >= 224:
        add_rows("batches", bench_samplers.batches)
        add_rows("batches of readers", bench_hiz.batches)

    def add_all(size: Size) -> None:
        add(run.mipmap, size)
        add(run.hiz, size)
        add(run.log_polar, size)

    for size in rest:
        add_all(size)
    for dtype in (torch.uint8, torch.float16):
        add(run.mipmap, first, dtype)
        add(run.log_polar, first, dtype)
    return jobs


@dataclass(frozen=True)
class Rest:
    """What a process leaves to a fresh one, for it has lost the device."""

    job: str
    """The first that is to be done."""
    without: dict[str, str]
    """Sides of it that are not to be called, and why."""

    @property
    def text(self) -> str:
        return json.dumps([self.job, self.without])

    @classmethod
    def of(cls, text: str) -> Rest:
        return cls(*json.loads(text))


def measure(
    run: Run,
    jobs: Jobs,
    save: Callable[[], object],
    say: Callable[[str], object] = lambda text: None,
    rest: Rest | None = None,
    hung: Callable[[Rest | None], object] | None = None,
) -> Rest | None:
    """Do the jobs, saving after each row; never raises for what goes wrong in one.

    Args:
        rest: what the process before this one has left.
        hung: called from another thread, with what is left, if a row does not end.

    Returns:
        What is left to a fresh process if this one has lost the device.
    """
    names = [name for name, _ in jobs]
    first = names.index(rest.job) if rest else 0
    for number in range(first, len(jobs)):
        name, rows = jobs[number]
        run.coming = names[number:]
        if run.budget.left() < ENOUGH_SECONDS:
            run.left_out, run.coming = [*run.left_out, *run.coming], []
            say(f"out of time: {len(run.left_out)} jobs left out")
            break
        say(f"{name} ({run.budget.left():.0f} s left)")
        run.limits.barred = dict(rest.without) if rest and number == first else {}

        def left_by(error: object, number: int = number, name: str = name) -> Rest | None:
            """The same job without the side that was being called, or the next job."""
            side, barred = run.limits.side, run.limits.barred
            run.fail(f"side {side!r} of {name}" if side else name, error)
            if side and len(barred) < TRIES:
                left = Rest(name, {**barred, side: short(error)})
            elif number + 1 < len(jobs):
                left = Rest(names[number + 1], {})
            else:
                run.coming = []
                return None
            run.left_out, run.coming = [*run.left_out, *names[names.index(left.job) :]], []
            return left

        def bark(left_by: Callable[[object], Rest | None] = left_by) -> None:
            if hung is not None:
                hung(left_by("does not end"))

        run.begin_row()
        try:
            with Watchdog(run, bark):
                _rows(run, name, rows, save)
        except DeviceLostError as error:
            left = left_by(error)
        except Exception as error:
            if not lost(run.watch):
                run.fail(name, error)
                say(f"{name} failed: {short(error)}")
                _tidy(run, name)
                continue
            run.limits.side = ""
            left = left_by(error)
        else:
            _tidy(run, name)
            continue
        say(f"{run.failures[-1]['name']} has lost the device: {run.failures[-1]['error']}")
        save()
        return left
    run.coming = []
    save()
    return None


def _rows(run: Run, name: str, rows: Callable[[], Iterable[Row]], save: Callable[[], object]) -> None:
    """A job, each of whose rows has a time limit. Its rows after the end of the run are left out."""
    following = iter(rows())
    while True:
        late = max(run.limits.left(), 0) + LATE_SECONDS
        try:
            with at_most(late):
                row = next(following, None)
        except GivenUp as error:
            side = run.limits.side
            raise GivenUp(f"{error}, at side {side!r}" if side else str(error)) from None
        if row is None:
            return
        if run.dropped:
            row.extra["dropped"], run.dropped = {**row.extra.get("dropped", {}), **run.dropped}, {}
        run.rows.append(row)
        save()
        if run.budget.left() < 0:
            run.left_out.append(f"{name}{FURTHER}{row.note or row.part!r}")
            return
        run.begin_row()


def _tidy(run: Run, name: str) -> None:
    try:
        gc.collect()
        if run.ctx is not None:
            run.ctx.trim()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    except Exception as error:
        run.fail(f"tidying up after {name}", error)


class Watchdog:
    """Says so if the row of a run does not end, as when the GPU never does: no alarm ends a wait for it."""

    def __init__(self, run: Run, bark: Callable[[], object], poll: float = 0.5) -> None:
        self.run, self.bark, self.poll = run, bark, poll
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.over.wait(self.poll):
            if self.run.limits.left() < -2 * LATE_SECONDS:
                self.bark()
                return


def device_bandwidth(device: torch.device, watch: Stopwatch, elements: int = 2**28) -> float:
    """Bytes a second of torch's copy on the device, read plus written, far beyond the caches."""
    source, target = torch.rand(elements, device=device), torch.empty(elements, device=device)
    watch.device_ms(lambda: target.copy_(source), 3)
    return 2 * source.nbytes / (min(watch.device_ms(lambda: target.copy_(source), 10)) * 1e-3)


def result(run: Run, about: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """What the file holds."""
    return {
        "schema": files.VERSION,
        "tensors": "cuda",
        **about,
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "left_out": [*run.left_out, *run.coming],
        "failures": run.failures,
        "absent": dict(sorted(ABSENT.items())),
        "rows": _together(run.kept, [row.as_dict(bandwidth) for row in run.rows]),
    }


def _together(kept: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the process before and of this one; what both have measured, by this one."""

    def job_of(row: dict[str, Any]) -> list[Any]:
        return [row[key] for key in ("verb", "part", "size", "batch", "channels", "dtype", "cache", "note")]

    again = [job_of(row) for row in rows]
    return [*(row for row in kept if job_of(row) not in again), *rows]


def left_of(jobs: Jobs, left_out: list[str]) -> Jobs:
    """Those that a file names as left out, be it only some of their rows."""
    return [one for one in jobs if any(text == one[0] or text.startswith(f"{one[0]}{FURTHER}") for text in left_out)]


def differs(before: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """Why the rows of a file and those of a run are not of one kind, or None."""
    facts = ("device", "gl_renderer", "driver", "cuda_driver", "cpu", "python", "versions", "commit")
    there = [
        f"{fact} {before.get(fact)}, not {about.get(fact)}" for fact in facts if before.get(fact) != about.get(fact)
    ]
    return f"it is of {'; of '.join(there)}" if there else None


def problem_of(data: dict[str, Any]) -> str | None:
    """What keeps a result file from being one, or None."""
    if not data["rows"]:
        return "no row was measured"
    try:
        problem = files.problem_of(data)
    except ImportError:
        return None  # without jsonschema; the tests check the files that are kept
    return f"the file does not fit its schema: {problem}" if problem else None


def run_all(
    minutes: float,
    out: Path | None,
    quick: bool,
    say: Callable[[str], object],
    rest: Rest | None = None,
    again: Callable[[list[str]], object] | None = None,
    earlier: Path | None = None,
) -> tuple[Path, str | None]:
    """Measure on torch's current CUDA device; returns the file and what is wrong with it.

    Args:
        rest: what the process before this one has left; its file is at `out`.
        again: replaces the process by one that is given these arguments.
        earlier: the file of a run that ended by its time, whose rows are kept: what it has left out is measured.

    Raises:
        SystemExit: `earlier` is of another commit, device or library.
    """
    again = again or replace_process
    budget = Budget(minutes)
    device = torch.device("cuda", torch.cuda.current_device())
    source = out if rest else earlier
    before: dict[str, Any] = json.loads(source.read_text()) if source else {}
    ctx, problem = None, ""
    try:
        ctx = lod.Context(device)
    except Exception as error:
        problem = short(error)
    run = Run(device, CudaStopwatch(device), budget, ctx, seconds=0.05 if quick else 0.3)
    run.kept, run.failures = before.get("rows", []), before.get("failures", [])
    run.compile_seconds = COMPILE_SHARE * 60 * minutes
    if ctx is None:
        if not before:
            run.fail("OpenGL", problem)
        say(f"OpenGL did not open: {problem}")
    for library in ("cupy", "cvcuda"):
        if optional(library) is None:
            say(f"without {library}: {ABSENT[library]}")
    about = cuda_facts(device, ctx, problem)
    path = out or RESULTS / f"{slug(about['device'])}.json"
    if earlier and (why := differs(before, about)):
        raise SystemExit(f"{earlier} cannot be gone on with, for {why}; nothing was measured")
    bandwidth = before["copy_gb_per_s"] * 1e9 if before else device_bandwidth(device, run.watch)
    jobs = plan(run, MAIN[:1], REST[3:4]) if quick else plan(run, MAIN, REST)
    if before:
        jobs = left_of(jobs, before["left_out"])

    def save() -> None:
        write(result(run, about, bandwidth), path)

    def go_on(rest: Rest) -> None:
        """In a fresh process, if there is time for one."""
        left = budget.left() - START_SECONDS
        if left >= ENOUGH_SECONDS:
            save()
            say(f"a fresh process goes on with {rest.job}")
            arguments = ["--device", "cuda", "--minutes", f"{left / 60:.3f}", "--out", str(path), "--rest", rest.text]
            again([*arguments, *(["--quick"] if quick else [])])

    def hung(rest: Rest | None) -> None:
        say(f"{run.failures[-1]['name']} {run.failures[-1]['error']}")
        save()
        if rest is not None:
            go_on(rest)
        os._exit(1)  # the process cannot end by itself

    if left := measure(run, jobs, save, say, rest, hung):
        go_on(left)
    found = result(run, about, bandwidth)
    return path, problem_of(found) or _failed(run.failures)


def compile_ahead(part: int, parts: int, say: Callable[[str], object]) -> None:
    """Compile what a part of the jobs compiles, and note no time: torch keeps it on disk for the run that measures.
    Sides on OpenGL are left out."""
    device = torch.device("cuda", torch.cuda.current_device())
    run = Run(device, CudaStopwatch(device), Budget(60), None, seconds=0.0, compile_seconds=math.inf)
    measure(run, plan(run, MAIN, REST)[part::parts], lambda: None, say)
    say(f"{len(run.rows)} rows, {len(run.failures)} failures")


def replace_process(arguments: list[str]) -> NoReturn:
    """By a fresh one of this program, which keeps the number that others know it by, and nothing of the device."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # it would outlive the program
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            try:
                os.set_inheritable(number, False)
            except OSError:  # that of the listing
                continue
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("run.py")), *arguments])


def _failed(failures: list[dict[str, str]]) -> str | None:
    return f"{len(failures)} failures, the first in {failures[0]['name']}: {failures[0]['error']}" if failures else None
