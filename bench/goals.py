"""What was aimed at, beside what the result files say: the table of goals in docs/benchmarks.md.

python bench/report.py --readme    brings it up to date
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import goal_figures as of
from allocate_doc import GOALS, GPU_GOALS
from bench_memory import ALLOWANCE
from goal_figures import BYTES, Data, Figure

import gpu_lod as lod
from gpu_lod.report import generators
from gpu_lod.report.rows import figure

RESULTS = Path(__file__).resolve().parent / "results"
CPU, GPU = "llvmpipe-2-cores.json", "nvidia-h200.json"
BRIDGE, KERNELS = "bridge/nvidia-h200.json", "kernels/nvidia-h200.json"
ALLOCATE = "allocate/amd-epyc-2-cores.json", "allocate/intel-r-xeon-r-processor-2-cores.json"
ALLOCATE_GPU, MEMORY = "allocate/nvidia-h200.json", "memory/amd-epyc-2-cores.json"
READY = "from a prebuilt pyramid, a texture already"
PATCHES = f"273 x 14 x 14, cortical sites; {READY}", f"273 x 14 x 14, sites on the grid; {READY}"


@dataclass(frozen=True)
class Goal:
    """One number. Without a bound it was to be reported, won or lost."""

    what: str
    unit: str
    files: tuple[str, ...]
    read: Callable[[Data], Figure | None]
    most: float | None = None
    least: float | None = None

    def words(self) -> str:
        for word, bound in (("most", self.most), ("least", self.least)):
            if bound is not None:
                return f"{self.what}: at {word} {_with_unit(f'{bound:,g}', self.unit)}"
        return self.what

    def verdict(self, value: float) -> str:
        if self.most is None and self.least is None:
            return "reported"
        above = self.most is not None and value > self.most
        missed = above or (self.least is not None and value < self.least)
        return "missed" if missed else "met"


def _with_unit(number: str, unit: str) -> str:
    return f"{number}{unit}" if unit in ("", "x", "%") else f"{number} {unit}"


_whole = of.rows_of("mipmap", 4096)
_whole_bytes = of.rows_of("mipmap", 4096, **BYTES)

TABLE: dict[str, list[Goal]] = {
    "The bridge": [
        *(
            Goal(words, "us", (BRIDGE,), partial(of.bridge, part, f"{before}{name}_us"), most)
            for what, part, before in (
                ("a verb's buffers", "share", "bridge_"),
                ("1 to 8 buffers by themselves", "cost", ""),
            )
            for words, name, most in (
                (f"map and unmap of {what}, median", "p50", 30),
                ("the same, 99th percentile", "p99", 150),
            )
        ),
        Goal(
            "their share of a chain of 4096 x 4096",
            "%",
            (BRIDGE,),
            partial(of.bridge, "share", "share", scale=100, size=4096),
            20,
        ),
        Goal(
            "a chain of 2048 x 2048 against a round trip through the host, called",
            "x",
            (BRIDGE,),
            partial(of.host_over, "gl"),
            least=10,
        ),
        Goal("the same, as a plan", "x", (BRIDGE,), partial(of.host_over, "gl, planned"), least=10),
        Goal("a chain of 1024 x 1024 on OpenGL against eager torch", "x", (BRIDGE,), of.eager_torch_over),
        Goal("calls in a row, memory watched", "", (BRIDGE,), partial(of.repeated, "calls"), least=100_000),
        Goal("what device memory grows by in them", "bytes", (BRIDGE,), partial(of.repeated, "device_growth_bytes"), 0),
        Goal("what host memory grows by in them", "bytes", (BRIDGE,), partial(of.repeated, "host_growth_bytes"), 0),
    ],
    "Verbs on two cores": [
        Goal(
            "foveate 1024 x 1024, prebuilt pyramid, a new fixation, against torch",
            "x",
            (CPU,),
            partial(of.gain, of.rows_of("foveate", 1024, READY)),
            least=2,
        ),
        Goal(
            "the same, the fixation stays and torch has kept its level map",
            "x",
            (CPU,),
            partial(
                of.gain, of.rows_of("foveate", 1024, f"{READY}; the fixation stays, and torch has kept its level map")
            ),
            least=1,
        ),
        *(
            Goal(
                f"gather_patches 273 x 14 x 14, {about.split('; ')[0].split(', ')[1]}, against torch",
                "x",
                (CPU,),
                partial(of.gain, of.rows_of("gather_patches", 1024, about), ours=lambda name: name != "gl plan"),
                least=1.8,
            )
            for about in PATCHES
        ),
        Goal(
            "feature_maps 40 x 512 x 512",
            "ms",
            (CPU,),
            partial(
                of.time_of, of.rows_of("feature_maps", 512, "40 channels of float32"), "gl compute", "median_ms", 1
            ),
            60,
        ),
        Goal(
            "the same against torch",
            "x",
            (CPU,),
            partial(of.gain, of.rows_of("feature_maps", 512, "40 channels of float32")),
            least=1,
        ),
        Goal("32 pictures in a call against 32 calls, of all verbs", "x", (CPU,), of.calls_over_batch, least=1),
        *(
            Goal(
                f"peak memory over twice the result and 1.8 times the picture, {name}{less}",
                "x",
                (MEMORY,),
                partial(of.memory, backend, amount),
                1,
            )
            for backend, name in (("gl", "OpenGL"), ("torch", "torch"))
            for amount, less in ((0, ""), (ALLOWANCE[backend], f", less {ALLOWANCE[backend] / 2**20:g} MiB"))
        ),
    ],
    "Speed": [
        Goal(
            "rows in which auto is behind torch's fastest by more than 5% or 20 us and the spread",
            "",
            (CPU, GPU),
            of.behind,
            0,
        ),
        Goal("rows in which it is as far behind the fastest of our own ways", "", (CPU, GPU), of.behind_our_own, 0),
        *(
            Goal(
                f"{verb} 2048 x 2048, the best compute shader against one dispatch a level",
                "x",
                (CPU,),
                partial(of.over_a_level, verb),
                least=1.4,
            )
            for verb in generators.VERBS
        ),
        Goal(
            "mipmap 2048 x 2048, the best compute shader against one dispatch a level",
            "x",
            (GPU,),
            partial(of.over_a_level, "mipmap"),
            least=1.75,
        ),
        Goal("the same, the best call of ours, kernels too", "x", (GPU,), of.ours_over_a_level, least=1.75),
        Goal(
            "fixed cost of a call on OpenGL",
            "ms",
            (CPU,),
            partial(of.time_of, partial(of.fixed, about=""), "gl compute", "median_ms", 1),
            0.15,
        ),
        Goal(
            "the same of a plan",
            "ms",
            (CPU,),
            partial(of.time_of, partial(of.fixed, about=""), "gl plan", "median_ms", 1),
            0.15,
        ),
        *(
            Goal(
                f"CPU time of {what}",
                "us",
                (GPU,),
                partial(of.time_of, partial(of.fixed, about=about), side, "cpu_us", 1),
                40,
            )
            for what, about, side in (
                ("a call of kernels", " by kernels", "cuda kernels"),
                ("a plan of kernels", " by kernels", "cuda plan"),
                ("a call on OpenGL", "", "gl compute"),
                ("a plan on OpenGL", "", "gl plan"),
            )
        ),
        Goal(
            "chain of 4096 x 4096 RGBA8, cold, GPU time over 1.25 times the floor and 10 us",
            "x",
            (GPU,),
            of.over_floor,
            1,
        ),
        Goal("the same, kernels by themselves", "x", (KERNELS,), of.kernel_over_floor, 1),
        Goal("odd sides against even ones, fp32, GPU time", "x", (GPU,), of.odd_over_even, 1.25),
        *(
            Goal(
                f"odd sides against even ones, {dtype}, kernels by themselves",
                "x",
                (KERNELS,),
                partial(of.kernel_odd_over_even, dtype),
                1.25,
            )
            for dtype in ("float32", "uint8")
        ),
        *(
            Goal(
                f"chain of 4096 x 4096 {what}, a call against eager torch",
                "x",
                (GPU,),
                partial(of.gain, rows, ours=of.is_call, theirs=of.is_eager),
                least=4,
            )
            for what, rows in (("RGBA8", _whole_bytes), ("RGB fp32", _whole))
        ),
        Goal(
            "chain of 1024 x 1024 RGB fp32, a call against eager torch",
            "x",
            (GPU,),
            partial(of.gain, of.rows_of("mipmap", 1024), ours=of.is_call, theirs=of.is_eager),
            least=1,
        ),
        *(
            Goal(
                f"chain of 4096 x 4096 {what}, {how}",
                "x",
                (GPU,),
                partial(of.gain, rows, ours=one, theirs=other),
                least=1.5,
            )
            for what, rows in (("RGBA8", _whole_bytes), ("RGB fp32", _whole))
            for how, one, other in (
                ("a call against compiled torch", of.is_call, of.is_compiled),
                ("a CUDA graph against torch's, compiled or not", of.is_graph, of.is_graph),
            )
        ),
        Goal(
            "log_polar 1024 x 1024 against torch, GPU time",
            "x",
            (GPU,),
            partial(of.gain, of.rows_of("log_polar", 4096, f"1024 x 1024, {READY}"), clock="device_ms"),
            least=8,
        ),
        Goal(
            "foveate 1024 x 1024 against torch, GPU time",
            "x",
            (GPU,),
            partial(of.gain, of.rows_of("foveate", 1024, READY), clock="device_ms"),
            least=8,
        ),
        *(
            Goal(
                f"gather_patches 5400 x 14 x 14, {where}, against torch, GPU time",
                "x",
                (GPU,),
                partial(
                    of.gain, of.rows_of("gather_patches", 4096, f"5400 x 14 x 14, {where}; {READY}"), clock="device_ms"
                ),
                least=8,
            )
            for where in ("cortical sites", "sites on the grid")
        ),
        Goal("fragment over compute, at its largest", "x", (CPU, GPU), of.fragment_over_compute),
    ],
    "Allocators": [
        *(
            Goal(
                f"{what}, picture of 1024 x 1024 to 273 patches, two cores",
                "ms",
                ALLOCATE,
                partial(of.allocators, names, False, ""),
                most,
            )
            for what, names, most in GOALS
        ),
        Goal("a batch of 32 against one picture", "x", ALLOCATE, of.batch_over_one, 32),
        *(
            Goal(
                f"{what} to 273 patches, {how}, the slowest allocator",
                "ms",
                (ALLOCATE_GPU,),
                partial(of.allocators, lod.allocate.names(), many, way),
                most,
            )
            for what, many, most in GPU_GOALS
            for how, way in (("in a call", ""), ("as a plan", ", planned"))
        ),
    ],
}


def table(results: Path = RESULTS) -> str:
    """Each goal beside the figure of each of its files."""
    parts = []
    for heading, goals in TABLE.items():
        lines = [["goal", "figure", "", "file"], ["---"] * 4]
        lines += [_line(goal, results / name, name) for goal in goals for name in goal.files]
        parts.append(f"### {heading}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts)


def _line(goal: Goal, path: Path, name: str) -> list[str]:
    if not path.exists():
        return [goal.words(), "", "not measured", name]
    data: Data = json.loads(path.read_text("utf-8"))
    link = f"[{name.removesuffix('.json')}](../bench/results/{name}), {data['date']}"
    found = goal.read(data)
    if found is None:
        return [goal.words(), "", "not measured", link]
    value, about = found
    number = f"{value:,.0f}" if goal.unit in ("", "bytes") else figure(value)
    shown = _with_unit(number, goal.unit) + f" ({about})" * bool(about)
    return [goal.words(), shown.replace("|", "\\|"), goal.verdict(value), link]
