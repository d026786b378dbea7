"""The verbs on CUDA tensors, against what torch does best on CUDA: compiled and captured in graphs too.

Rows come in the order of their importance and are saved one by one, so that a run that ends early, by its time or by a
crash, leaves the ones that matter most. What fails is in the file and the rest goes on.

python bench/run.py --device cuda [--minutes 5] [--quick] [--out FILE]
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
from cuda_timer import Budget, CudaStopwatch, Side, Sides, Stopwatch, short
from inputs import ABSENT, generators_of, inputs_for, job, optional, picture, pyramid_bytes
from opponents import captured, compiled
from rows import RESULTS, Row, cuda_facts, slug, write
from timer import Timing

import gpu_lod as lod
from gpu_lod.halving import stored
from gpu_lod.log_polar import Rule, ring_rule
from gpu_lod.mipmap import reference as mip_reference
from gpu_lod.report import files

Size = tuple[int, int, int]
"""(height, width, batch)"""
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
HELD = ", GL memory"
NO_GL = "OpenGL did not open"


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
    compile_seconds: float = 0.0
    """Left for compiling."""

    def fail(self, name: str, error: object) -> None:
        self.failures.append({"name": name, "error": short(error)})

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
            limit = min(COMPILE_SECONDS, self.compile_seconds, self.budget.left() / 2)
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
        """`timer.Race` for rows that are the same on every device."""
        alive = Sides(self.watch)
        for name, side in sides.items():
            alive.add(name, lambda side=side: side)  # type: ignore[misc]
        result = alive.race(seconds=seconds, most=most)
        for name, why in alive.dropped.items():
            self.fail(f"side {name!r} of a row with {', '.join(sides)}", why)
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
        source: Callable[[Any], object],
        other: Mapping[str, str],
        libraries: Mapping[str, Callable[[list[torch.Tensor]], Side]] | None = None,
    ) -> Iterator[Row]:
        """Rows of a verb that makes pyramids.

        Args:
            ways: the sides that are not ours.
            source: what is compiled.
            other: the sides that do another job, and why.
            libraries: makes sides of libraries that may not be there, from the inputs.
        """
        sides = Sides(self.watch)
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
        self, size: Size, dtype: torch.dtype = torch.float32, cache: str = "warm", channels: int = 3
    ) -> Iterator[Row]:
        height, width, batch = size
        image = picture(height, width, batch=batch, channels=channels, dtype=dtype).to(self.device)
        inputs = self.cold(image, cache, lambda x: x)
        functions, other = bench_mipmap.torch_ways(height, width)
        ways: dict[str, Way] = {name: (function, inputs) for name, function in functions.items()}
        source: Callable[[Any], object] = mip_reference
        other |= bench_mipmap.driver_differs(height, width, dtype)
        libraries: dict[str, Callable[[list[torch.Tensor]], Side]] = {}
        if bench_mipmap.is_power(height, width) and dtype == torch.float32:
            libraries = {cuda_peers.CUPY: cuda_peers.cupy_side, cuda_peers.CVCUDA: cuda_peers.cvcuda_side}
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
        yield from self.chains(lod.mipmap, generators, image, cache, ways, source, other, libraries)

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
        pyramids = self.cold(image, cache, lambda x: lod.mipmap(x, backend=backend))
        if self.ctx is not None:
            for pyramid in pyramids:
                pyramid.upload()

        def at(sample: Callable[..., object], source: Any) -> object:
            return sample(source, next(fixations))

        sides = Sides(self.watch)
        ours = partial(lod.log_polar, rings=rings, wedges=wedges)
        sides.add("auto", partial(job, partial(at, ours), pyramids))
        for generator in generators_of(lod.log_polar):
            way = partial(at, partial(ours, generator=generator))
            self.add_gl(sides, f"gl {generator}", partial(job, way, pyramids))
        self.add_kernels(sides, partial(at, partial(ours, backend="cuda")), pyramids, graph=False)
        sides.add("torch two levels a ring", partial(job, partial(at, partial(ours, backend="torch")), pyramids))
        if (rings, wedges) == (RINGS, WEDGES):
            sides.add("torch every level", partial(job, partial(at, bench_log_polar._all_levels), pyramids))
        # Nothing but the fixation comes at the call: it is copied to where the functions, and graphs of them, read it.
        here = torch.rand(batch, 2, device=self.device)
        prepared = [TablesKept(pyramid, rule, here) for pyramid in pyramids]

        def placed(side: Side) -> Side:
            def call() -> object:
                here.copy_(next(fixations))
                return side()

            return call

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


def plan(run: Run, main: list[Size], rest: list[Size]) -> list[tuple[str, Callable[[], Iterator[Row]]]]:
    """All jobs, the most important first."""
    jobs: list[tuple[str, Callable[[], Iterator[Row]]]] = []

    def add(verb: Callable[..., Iterator[Row]], size: Size, *details: Any) -> None:
        words = [verb.__name__, "x".join(map(str, size)), *map(str, details)]
        jobs.append((" ".join(words).replace("torch.", ""), partial(verb, size, *details)))

    def add_all(size: Size) -> None:
        add(run.mipmap, size)
        add(run.hiz, size)
        add(run.log_polar, size)

    for size in main:
        add_all(size)
    first = main[0]
    add(run.mipmap, first, torch.float32, "cold")
    add(run.hiz, first, "cold")
    add(run.log_polar, first, torch.float32, "cold")
    # What GPUs are judged by: RGBA8 from memory, odd sides beside even ones, and outputs of a megapixel.
    add(run.mipmap, main[-1], torch.uint8, "cold", 4)
    add(run.mipmap, (776, 1000, 1))
    add(run.log_polar, main[-1], torch.float32, "warm", 1024, 1024)
    device = str(run.device)
    if run.ctx is not None:
        parts = partial(bench_parts.rows, [height for height, _, _ in main[:2]], run.seconds, run.ctx, device)
        jobs.append(("parts", parts))
    jobs.append(("whole calls", lambda: bench_log_polar.whole_calls(run.seconds, device, run.race)))
    jobs.append(("readers", lambda: bench_hiz.readers(run.seconds, device, run.race)))
    f32 = [torch.float32]
    several: list[tuple[str, Callable[..., Iterator[Row]]]] = [
        ("foveate", partial(bench_samplers.foveate, list(main), f32)),
        ("foveate once", partial(bench_samplers.foveate_once, [first], f32)),
        ("gather_patches", partial(bench_samplers.gather_patches, [first], f32)),
        ("many patches", partial(bench_samplers.gather_patches, [main[-1]], f32, budget=MANY)),
        ("features", partial(bench_features.rows, [(first[0] // 2, first[1] // 2, first[2])])),
    ]
    if first[0] >= 224:
        several += [("batches", bench_samplers.batches), ("batches of readers", bench_hiz.batches)]
    for name, rows in several:
        jobs.append((name, partial(rows, run.seconds, device, run.race)))
    for size in rest:
        add_all(size)
    for dtype in (torch.uint8, torch.float16):
        add(run.mipmap, first, dtype)
        add(run.log_polar, first, dtype)
    return jobs


def measure(
    run: Run,
    jobs: list[tuple[str, Callable[[], Iterator[Row]]]],
    save: Callable[[], object],
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Do the jobs, saving after each row; never raises for what goes wrong in one."""
    for number, (name, rows) in enumerate(jobs):
        if run.budget.left() < ENOUGH_SECONDS:
            run.left_out += [name for name, _ in jobs[number:]]
            say(f"out of time: {len(run.left_out)} jobs left out")
            break
        say(f"{name} ({run.budget.left():.0f} s left)")
        try:
            for row in rows():
                run.rows.append(row)
                save()
        except Exception as error:
            run.fail(name, error)
            say(f"{name} failed: {short(error)}")
        try:
            gc.collect()
            if run.ctx is not None:
                run.ctx.trim()
            if run.device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception as error:
            run.fail(f"tidying up after {name}", error)
    save()


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
        "left_out": run.left_out,
        "failures": run.failures,
        "absent": dict(sorted(ABSENT.items())),
        "rows": [row.as_dict(bandwidth) for row in run.rows],
    }


def problem_of(data: dict[str, Any]) -> str | None:
    """What keeps a result file from being one, or None."""
    if not data["rows"]:
        return "no row was measured"
    try:
        problem = files.problem_of(data)
    except ImportError:
        return None  # without jsonschema; the tests check the files that are kept
    return f"the file does not fit its schema: {problem}" if problem else None


def run_all(minutes: float, out: Path | None, quick: bool, say: Callable[[str], object]) -> tuple[Path, str | None]:
    """Measure on torch's current CUDA device; returns the file and what is wrong with it."""
    budget = Budget(minutes)
    device = torch.device("cuda", torch.cuda.current_device())
    ctx, problem = None, ""
    try:
        ctx = lod.Context(device)
    except Exception as error:
        problem = short(error)
    run = Run(device, CudaStopwatch(device), budget, ctx, seconds=0.05 if quick else 0.3)
    run.compile_seconds = COMPILE_SHARE * 60 * minutes
    if ctx is None:
        run.fail("OpenGL", problem)
        say(f"OpenGL did not open: {problem}")
    for library in ("cupy", "cvcuda"):
        if optional(library) is None:
            say(f"without {library}: {ABSENT[library]}")
    about = cuda_facts(device, ctx, problem)
    bandwidth = device_bandwidth(device, run.watch)
    path = out or RESULTS / f"{slug(about['device'])}.json"
    jobs = plan(run, MAIN[:1], REST[3:4]) if quick else plan(run, MAIN, REST)
    measure(run, jobs, lambda: write(result(run, about, bandwidth), path), say)
    found = result(run, about, bandwidth)
    return path, problem_of(found) or _failed(run.failures)


def _failed(failures: list[dict[str, str]]) -> str | None:
    return f"{len(failures)} failures, the first in {failures[0]['name']}: {failures[0]['error']}" if failures else None
