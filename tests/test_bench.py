"""The benchmarks: sides take turns, result files fit the schema, and the README shows them as they are."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import as_hardware
import jsonschema
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from filelock import FileLock
from scripts import succeed

import gpu_lod as lod
from gpu_lod import timing as races
from gpu_lod.bridge import InteropBridge, egl
from gpu_lod.bridge import gl as G
from gpu_lod.report import claim, text
from gpu_lod.report.files import load
from gpu_lod.report.shares import shares
from gpu_lod.timing import race

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import bench_bridge  # noqa: E402
import bench_cuda  # noqa: E402
import bench_hiz  # noqa: E402
import bench_log_polar  # noqa: E402
import bench_mipmap  # noqa: E402
import bench_parts  # noqa: E402
import bench_pyramids  # noqa: E402
import bench_samplers  # noqa: E402
import bridge_cost  # noqa: E402
import cuda_peers  # noqa: E402
import cuda_timer  # noqa: E402
import eight_texels  # noqa: E402
import inputs  # noqa: E402
import mapped_arrays  # noqa: E402
import opponents  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import timer  # noqa: E402
from rows import SCHEMA, Row  # noqa: E402

RESULTS = sorted((CHECKOUT / "bench" / "results").glob("*.json"))


def test_there_are_results() -> None:
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_result_files_fit_the_schema(path: Path) -> None:
    data = json.loads(path.read_text())
    jsonschema.validate(data, SCHEMA)
    broken = {**data, "rows": [{**data["rows"][0], "dtype": "int8"}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_readme_shows_the_result_files() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    assert report.with_tables(readme) == readme, "run python bench/report.py --readme"
    document = report.EVERY_ROW.read_text()
    assert report.with_every_row(document) == document, "run python bench/report.py --readme"
    calls = sum(len([r for r in json.loads(path.read_text())["rows"] if text.is_call(r)]) for path in RESULTS)
    tables = document.partition(text.MARKS[0])[2].partition(text.MARKS[1])[0]
    assert sum(line.startswith("| ") for line in tables.splitlines()) == calls + 2 * len(RESULTS)


def test_the_page_answers_the_claim_for_each_machine() -> None:
    document = report.EVERY_ROW.read_text()
    said = document.partition(report.CLAIM_MARKS[0])[2].partition(report.CLAIM_MARKS[1])[0]
    assert claim.CLAIM in said and said.count("\n### ") == len(RESULTS)
    for path in RESULTS:
        assert f"(../bench/results/{path.name})" in said and claim.verdict(json.loads(path.read_text())) in said
    heading = document.partition(report.CLAIM_MARKS[0])[0].rstrip().splitlines()[-1]
    anchor = re.sub(r"[^a-z0-9 -]", "", heading.removeprefix("## ").lower()).replace(" ", "-")
    assert f"docs/benchmarks.md#{anchor})" in (CHECKOUT / "README.md").read_text()
    assert f"](#{anchor})" in document


def test_every_side_follows_every_other() -> None:
    """A side may leave the machine better or worse for the next: caches, threads that still spin."""
    order: list[str] = []
    names = "abcd"
    race({name: functools.partial(order.append, name) for name in names}, seconds=0, fewest=48, pause=0)
    blocks = [name for name, _ in itertools.groupby(order)]
    for name in names:
        before = {x for x, y in itertools.pairwise(blocks) if y == name}
        assert before == set(names) - {name}
        most = max(sum(pair == (x, name) for pair in itertools.pairwise(blocks)) for x in before)
        assert most <= 8  # of 12


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_is_kept_between_calls() -> None:
    """Of a result beyond 32 MiB every page is fresh otherwise, as the first call shows here."""
    faults = succeed(
        """
        import resource, torch
        from timer import keep_memory

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(2**24)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        fresh = faults(), faults()
        assert keep_memory(2**28)
        print(*fresh, faults(), faults())
        """,
        fresh=True,
        PYTHONPATH=str(Path(timer.__file__).parent),
    )
    first, second, third, fourth = map(int, faults.split())
    assert min(first, second) > 10000 and max(third, fourth) < 100


def test_a_restless_race_is_run_again_and_the_calmest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its spread alone, whoever wins."""
    tries = iter([(3.0, 0.9, 1.0), (2.0, 0.5, 0.5), (4.0, 0.3, 3.0), (1.0, 0.01, 1.0)])
    rests: list[float] = []

    def once(sides: Any, **_: Any) -> dict[str, timer.Timing]:
        median, iqr, other = next(tries)
        return {"a": timer.Timing(median, iqr * median, median, 12), "b": timer.Timing(other, iqr * other, other, 12)}

    monkeypatch.setattr("gpu_lod.timing.race", once)
    monkeypatch.setattr(time, "sleep", rests.append)
    monkeypatch.setattr(timer, "repeated", 0)
    monkeypatch.setattr(timer, "TRIES", 3)
    assert timer.race({})["a"].median_ms == 4.0
    assert (timer.repeated, len(rests)) == (1, 2)
    assert timer.race({})["a"].median_ms == 1.0  # calm at once
    assert (timer.repeated, len(rests)) == (1, 2)


def test_sides_take_turns_and_the_slow_one_loses() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    timings = timer.race({"a": lambda: side("a", 0.001), "b": lambda: side("b", 0.004)}, seconds=0.01)
    assert timings["a"].median_ms < timings["b"].median_ms
    assert timings["a"].fastest_ms >= 1
    assert min(timing.calls for timing in timings.values()) >= 12
    switches = sum(x != y for x, y in itertools.pairwise(order))
    assert switches >= 4


def test_rows_tell_losses_and_leave_other_jobs_out() -> None:
    def timing(ms: float) -> timer.Timing:
        return timer.Timing(ms, 0.01, ms, 12)

    row = Row(
        "mipmap", "end to end", 8, 8, 1, 3, "float32", "warm", 1000,
        {"gl compute": timing(4.0), "torch a": timing(1.0), "torch b": timing(2.0), "auto": timing(1.2)},
        other_job={"torch a": "does less"},
    )  # fmt: skip
    result = row.as_dict(bandwidth=1e9)
    assert result["best_torch"] == "torch b"
    assert result["gl_speedup"] == 0.5
    assert result["auto_ok"]
    row.sides["auto"] = timing(2.2)
    assert not row.as_dict(bandwidth=1e9)["auto_ok"]
    # A graph is the fastest way, but nothing that a call could be.
    row.sides |= {"auto": timing(2.0), "torch graph of b": timing(0.5)}
    result = row.as_dict(bandwidth=1e9)
    assert result["best_torch"] == "torch graph of b" and result["auto_ok"] and result["auto_behind_ms"] == 0


# -- CUDA tensors: what needs no GPU -----------------------------------------------------------------------------------


class HostStopwatch:
    """Stands for a device's clocks where there is no device."""

    def synchronize(self) -> None: ...

    def device_ms(self, side: Callable[[], object], calls: int) -> list[float]:
        return [cuda_timer.wall_ms(side, self) / 2 for _ in range(calls)]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [(range(1, 101), 0.99, 99), (range(1, 201), 0.99, 198), ([5.0], 0.99, 5), ([3, 1, 2], 0.5, 2), ([3, 1, 2], 0, 1)],
)
def test_percentiles_are_values_that_were_measured(values: Any, share: float, expected: float) -> None:
    assert timer.percentile(values, share) == expected


def test_timings_of_cpu_tensors_say_nothing_of_a_device() -> None:
    assert timer.Timing(1.0, 0.1, 0.9, 12).as_dict().keys() == {"median_ms", "iqr_ms", "fastest_ms", "calls"}


def test_cuda_sides_are_timed_by_both_clocks_in_turns() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            time.sleep(seconds)

        return call

    sides = cuda_timer.Sides(HostStopwatch())
    sides.add("a", lambda: side("a", 0.0005))
    sides.add("b", lambda: side("b", 0.002))
    assert sides.fastest(["b", "a", "c"]) == "a"
    assert sides.fastest(["c"]) is None
    order.clear()
    timings = sides.race(seconds=0.01)
    for timing in timings.values():
        assert timing.calls >= 16
        assert timing.p99_ms is not None and timing.p99_ms >= timing.median_ms >= timing.fastest_ms > 0
        assert timing.device_ms is not None and timing.device_ms == pytest.approx(timing.median_ms / 2, rel=0.5)
        assert timing.cpu_us is not None and timing.cpu_us < 1e3 * timing.median_ms, "asleep is not at work"
    assert timings["a"].median_ms < timings["b"].median_ms
    blocks = {len(list(calls)) for _, calls in itertools.groupby(order)}
    assert blocks == {25, 50}, "nobody always follows the same neighbour"


def test_cuda_sides_that_fail_are_dropped_with_the_reason() -> None:
    calls = itertools.count()

    def fails_later() -> None:
        if next(calls) > 20:
            raise ValueError("later")

    def fails_at_once() -> Callable[[], object]:
        raise ImportError("no such thing")

    sides = cuda_timer.Sides(HostStopwatch())
    assert not sides.add("a", fails_at_once)
    assert not sides.add("b", lambda: lambda: time.sleep(cuda_timer.TOO_SLOW_MS * 1.1e-3))
    assert sides.add("c", lambda: fails_later)
    assert sides.add("d", lambda: lambda: None)
    assert sides.race(seconds=0.01).keys() == {"d"}
    assert sides.dropped["a"].startswith("ImportError: no such thing (test_bench.py:")
    assert "too long" in sides.dropped["b"]
    assert sides.dropped["c"].startswith("ValueError: later (")
    assert cuda_timer.short(ValueError("a\n  b")) == cuda_timer.short("ValueError: a b") == "ValueError: a b"
    assert len(cuda_timer.short("a" * 1000)) == 400


def test_what_takes_too_long_is_given_up() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # as compilers do
                continue

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(opponents.GivenUp, match="not ready"), opponents.at_most(0.05):
        stubborn()
    with opponents.at_most(0.2):
        time.sleep(0.01)
    with pytest.raises(KeyError), opponents.at_most(0.2):
        raise KeyError
    time.sleep(0.3)  # no alarm is left
    assert signal.getsignal(signal.SIGALRM) is before


def test_limits_may_lie_inside_each_other() -> None:
    start = time.monotonic()
    with pytest.raises(opponents.GivenUp, match="after 0 s"), opponents.at_most(0.3):
        with opponents.at_most(5):
            time.sleep(0.01)
        with pytest.raises(opponents.GivenUp), opponents.at_most(0.05):
            time.sleep(2)
        time.sleep(2)
    assert 0.25 < time.monotonic() - start < 1.5
    time.sleep(0.3)  # no alarm is left


class FakeGpu:
    """A GPU beside a host, with clocks that move as calls and kernels say: both in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.free = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = math.inf

            def record(self) -> None:
                self.at = gpu.free = max(gpu.host, gpu.free)

            def query(self) -> bool:
                return self.at <= gpu.host

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / 1e6))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.wait())
        monkeypatch.setattr(cuda_timer.time, "perf_counter", lambda: self.host * 1e-3)

    def launch(self, milliseconds: float) -> None:
        self.free = max(self.host, self.free) + milliseconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)


@pytest.mark.parametrize(("python_ms", "kernel_ms"), [(0.1, 0.04), (3.0, 0.04), (0.1, 2.0)])
def test_the_gpus_time_is_not_the_hosts(python_ms: float, kernel_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def call() -> None:
        gpu.host += python_ms
        gpu.launch(kernel_ms)

    watch = cuda_timer.CudaStopwatch(torch.device("cuda", 0))
    assert watch.device_ms(call, 8) == pytest.approx([kernel_ms] * 8)
    before = gpu.host
    assert watch.device_ms(call, 8) == pytest.approx([kernel_ms] * 8)
    assert gpu.host - before < 60, "queued once: how long that takes is known by now"
    assert cuda_timer.wall_ms(call, watch) == pytest.approx(python_ms + kernel_ms)


def test_a_call_that_waits_for_the_gpu_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def call() -> None:
        gpu.host += 0.1
        gpu.launch(0.04)
        gpu.wait()

    times = cuda_timer.CudaStopwatch(torch.device("cuda", 0)).device_ms(call, 8)
    assert times[1:] == pytest.approx([0.14] * 7)


def test_a_row_whose_time_is_over_keeps_what_was_timed() -> None:
    now = [0.0]

    def side(seconds: float) -> Callable[[], None]:
        def call() -> None:
            now[0] += seconds

        return call

    limits = cuda_timer.Limits(lambda: 10 - now[0], for_the_race=4, barred={"barred": "for a reason"})
    sides = cuda_timer.Sides(HostStopwatch(), limits)
    assert not sides.add("barred", lambda: side(0))
    assert sides.add("quick", lambda: side(0.001)) and sides.add("slow", lambda: side(0.11))
    sides._first["slow"] = 110.0
    now[0] = 9
    assert not sides.add("late", lambda: side(0))
    assert sides.race(seconds=0.01).keys() == {"quick"}
    assert sides.dropped["barred"] == "for a reason" and sides.dropped["late"] == cuda_timer.NO_TIME
    assert "calls were timed, then the time was over" in sides.dropped["slow"]


def test_a_side_that_takes_too_long_to_make_is_dropped() -> None:
    sides = cuda_timer.Sides(HostStopwatch(), cuda_timer.Limits(lambda: 0.05))
    assert not sides.add("a", lambda: lambda: time.sleep(2))
    assert "GivenUp" in sides.dropped["a"]


class LosingStopwatch(HostStopwatch):
    """Of a device that may be lost."""

    is_lost = False

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def losing(after: int = 0) -> tuple[bench_cuda.Run, Callable[[], None]]:
    """A run, and a side that loses its device after some calls."""
    run, calls = run_on_host(ctx=None), itertools.count()
    run.watch = watch = LosingStopwatch()

    def side() -> None:
        if next(calls) >= after:
            watch.is_lost = True
            watch.synchronize()

    return run, side


@pytest.mark.parametrize("after", [0, 10])
def test_a_side_that_loses_the_device_is_left_out_by_a_fresh_process(after: int) -> None:
    run, loses = losing(after)
    timing = timer.Timing(1.0, 0.1, 0.9, 16, 1.2, 0.8)

    def rows(run: bench_cuda.Run, side: Callable[[], None]) -> Iterator[Row]:
        yield row_of("hiz", sides={"auto": timing})
        sides = cuda_timer.Sides(run.watch, run.limits)
        sides.add("gl a", lambda: lambda: None)
        sides.add("gl b", lambda: side)
        yield row_of("mipmap", sides=sides.race(seconds=0.01), extra={"dropped": sides.dropped})

    def jobs(run: bench_cuda.Run, side: Callable[[], None]) -> Any:
        return [("a", partial(rows, run, side)), ("b", lambda: iter([row_of("cull")]))]

    saved: list[int] = []
    rest = bench_cuda.measure(run, jobs(run, loses), lambda: saved.append(len(run.rows)))
    assert rest is not None and rest == bench_cuda.Rest.of(rest.text)
    assert rest.job == "a" and "illegal memory access" in rest.without["gl b"]
    assert [one["name"] for one in run.failures] == ["side 'gl b' of a"]
    assert run.left_out == ["a", "b"] and saved == [1, 1]
    file = json.loads(json.dumps(bench_cuda.result(run, about_cuda(), 1e9)))

    fresh = run_on_host(ctx=None)
    fresh.kept, fresh.failures = file["rows"], file["failures"]
    assert bench_cuda.measure(fresh, jobs(fresh, lambda: None), lambda: None, rest=rest) is None
    found = bench_cuda.result(fresh, about_cuda(), 1e9)
    assert bench_cuda.problem_of(found) is None
    assert [row["verb"] for row in found["rows"]] == ["hiz", "mipmap", "cull"], "no row twice"
    assert found["rows"][1]["sides"].keys() == {"gl a"}
    assert "illegal" in found["rows"][1]["dropped"]["gl b"]
    assert found["left_out"] == [] and len(found["failures"]) == 1


def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch, plan: Callable[..., Any], watch: HostStopwatch) -> None:
    """`run_all` does these jobs on the host, without OpenGL."""

    def no_context(device: object) -> None:
        raise lod.GpuLodError("no EGL here")

    for name, value in {
        "CudaStopwatch": lambda device: watch, "device_bandwidth": lambda *_: 1e12, "plan": plan,
        "cuda_facts": lambda *_: about_cuda(),
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_cuda, name, value)
    monkeypatch.setattr(lod, "Context", no_context)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_a_run_that_loses_the_device_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command that a process is replaced by to the file of both."""
    watch = LosingStopwatch()
    order: list[str] = []

    def loses() -> None:
        order.append("loses")
        watch.is_lost = True
        watch.synchronize()

    def rows(run: bench_cuda.Run) -> Iterator[Row]:
        order.append("rows")
        sides = cuda_timer.Sides(run.watch, run.limits)
        sides.add("auto", lambda: lambda: None)
        sides.add("cuda kernels", lambda: loses)
        yield row_of("mipmap", sides=sides.race(seconds=0.01), extra={"dropped": sides.dropped})

    def plan(run: bench_cuda.Run, *_: object) -> Any:
        return [("a", lambda: iter([row_of("hiz")])), ("b", partial(rows, run)), ("c", lambda: iter([row_of("cull")]))]

    as_if_on_cuda(monkeypatch, plan, watch)
    monkeypatch.setattr(bench_cuda, "START_SECONDS", 1.0)
    out, commands, said = tmp_path / "bench.json", list[list[str]](), list[str]()
    bench_cuda.run_all(2, out, True, said.append, again=commands.append)
    left = json.loads(out.read_text())
    assert [row["verb"] for row in left["rows"]] == ["hiz"] and left["left_out"] == ["b", "c"]
    assert "a fresh process goes on with b" in said
    options = run.parse(commands.pop())
    assert options.quick and options.device == "cuda" and 1 < options.minutes < 2 and options.out == out

    watch.is_lost = False
    path, problem = bench_cuda.run_all(
        options.minutes, options.out, True, said.append, bench_cuda.Rest.of(options.rest), again=commands.append
    )
    found = json.loads(path.read_text())
    assert bench_cuda.problem_of(found) is None and commands == []
    assert [row["verb"] for row in found["rows"]] == ["hiz", "mipmap", "cull"]
    assert "illegal" in found["rows"][1]["dropped"]["cuda kernels"]
    assert order == ["rows", "loses", "rows"] and found["left_out"] == []
    assert [one["name"] for one in found["failures"]] == ["OpenGL", "side 'cuda kernels' of b"]
    assert problem is not None and "2 failures" in problem, "a run that lost a device is no success"


def test_a_run_that_ended_by_its_time_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = [0.0], list[str]()

    def rows(name: str) -> Iterator[Row]:
        for note in ("first", "second", "third"):
            now[0] += 25
            done.append(f"{name}, {note}")
            yield row_of("mipmap", note=done[-1])

    as_if_on_cuda(monkeypatch, lambda *_: [(name, partial(rows, name)) for name in "abc"], HostStopwatch())
    monkeypatch.setattr(bench_cuda, "Budget", lambda minutes: cuda_timer.Budget(minutes, lambda: now[0]))
    first, whole, speeds = tmp_path / "first.json", tmp_path / "whole.json", iter([1e12])
    monkeypatch.setattr(bench_cuda, "device_bandwidth", lambda *_: next(speeds))
    bench_cuda.run_all(110 / 60, first, True, lambda text: None)
    before = json.loads(first.read_text())
    assert done == ["a, first", "a, second", "a, third", "b, first", "b, second"]
    assert before["left_out"] == ["b, what may follow its row 'b, second'", "c"]

    options = run.parse(["--device", "cuda", "--quick", "--minutes", "10", "--out", str(whole), "--go-on", str(first)])
    done.clear()
    bench_cuda.run_all(options.minutes, options.out, options.quick, lambda text: None, earlier=options.go_on)
    found = json.loads(whole.read_text())
    assert [row["note"] for row in found["rows"]] == [
        f"{name}, {n}" for name in "abc" for n in ("first", "second", "third")
    ]
    assert done[0] == "b, first" and len(done) == 6, "of a job that was broken off all rows are measured again"
    assert found["left_out"] == [] and json.loads(first.read_text()) == before
    assert bench_cuda.problem_of(found) is None and found["copy_gb_per_s"] == before["copy_gb_per_s"] == 1000

    monkeypatch.setattr(bench_cuda, "cuda_facts", lambda *_: about_cuda() | {"commit": "another"})
    with pytest.raises(SystemExit, match=r"for it is of commit .*, not another; nothing was measured"):
        bench_cuda.run_all(1, whole, True, lambda text: None, earlier=first)
    assert json.loads(whole.read_text()) == found


@pytest.mark.parametrize("part", [0, 2])
def test_what_jobs_compile_is_compiled_ahead(
    part: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of the jobs, whose sides are made, with time for each that compiles; nothing is written."""
    done: list[str] = []

    def rows(name: str, run: bench_cuda.Run) -> Iterator[Row]:
        run.begin_row()
        sides = cuda_timer.Sides(run.watch, run.limits)
        run.add_gl(sides, "gl compute", lambda: pytest.fail("OpenGL"))
        run.add_fast_torch(sides, {}, lambda x: x + 1, [torch.ones(2)])
        done.append(name)
        yield row_of("mipmap", sides=sides.race(seconds=run.seconds))

    def plan(run: bench_cuda.Run, *_: object) -> Any:
        return [(name, partial(rows, name, run)) for name in "abcde"]

    compiled: list[float] = []

    def compile_(source: Any, inputs: Any, limit: float) -> Any:
        compiled.append(limit)
        return source

    as_if_on_cuda(monkeypatch, plan, HostStopwatch())
    monkeypatch.setattr(bench_cuda, "compiled", compile_)
    monkeypatch.setattr(bench_cuda, "write", lambda *_: pytest.fail("a file"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run.main(["--device", "cuda", "--compile", f"{part}/3"]) == 0
    assert done == ["abcde"[i] for i in range(part, 5, 3)]
    assert len(compiled) == len(done) and min(compiled) > 20
    assert f"{len(done)} rows, 0 failures" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--device cuda --compile 3/3", "--device cuda --compile 1", "--compile 0/2"])
def test_parts_that_are_none_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(words.split())
    assert "--compile is" in capsys.readouterr().err


def test_the_file_of_a_run_that_was_killed_says_what_was_to_come() -> None:
    run, files = run_on_host(ctx=None), list[list[str]]()
    jobs = [(name, lambda: iter([row_of("mipmap"), row_of("hiz")])) for name in "ab"]
    bench_cuda.measure(run, jobs, lambda: files.append(bench_cuda.result(run, about_cuda(), 1e9)["left_out"]))
    assert files == [["a", "b"], ["a", "b"], ["b"], ["b"], []]


@pytest.mark.parametrize(
    "words, why",
    [
        ("--go-on {here}", "--go-on is for --device cuda"),
        ("--device cuda --go-on {here}/none.json", "there is no file"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    words: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.parse(words.format(here=tmp_path).split())
    assert why in capsys.readouterr().err


def test_a_job_that_loses_the_device_otherwise_is_not_tried_again() -> None:
    run, loses = losing()
    jobs = [("a", lambda: iter([row_of("hiz")])), ("b", lambda: loses()), ("c", lambda: iter([row_of("mipmap")]))]
    rest = bench_cuda.measure(run, jobs, lambda: None)  # type: ignore[arg-type]
    assert rest == bench_cuda.Rest("c", {}) and len(run.rows) == 1
    assert bench_cuda.measure(losing()[0], jobs, lambda: None, rest=rest) is None
    run, loses = losing()
    assert bench_cuda.measure(run, [("b", lambda: loses())], lambda: None) is None, "nothing is left"  # type: ignore
    assert "illegal" in run.failures[0]["error"] and run.left_out == []


def test_a_job_that_loses_the_device_again_and_again_is_given_up() -> None:
    run, loses = losing()

    def rows() -> Iterator[Row]:
        cuda_timer.Sides(run.watch, run.limits).add("d", lambda: loses)
        yield row_of("hiz")

    jobs = [("a", rows), ("b", lambda: iter([row_of("mipmap")]))]
    before = bench_cuda.Rest("a", dict.fromkeys("abc", "lost"))
    assert bench_cuda.measure(run, jobs, lambda: None, rest=before) == bench_cuda.Rest("b", {})


def test_a_row_that_does_not_end_is_told_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cuda, "LATE_SECONDS", 0.0)
    run, barked = run_on_host(ctx=None), threading.Event()
    told: list[bench_cuda.Rest | None] = []

    def hung(rest: bench_cuda.Rest | None) -> None:
        told.append(rest)
        barked.set()

    def rows() -> Iterator[Row]:
        run.limits.side, run.limits.left = "gl b", lambda: -1.0
        assert barked.wait(20)
        yield row_of("hiz")

    monkeypatch.setattr(bench_cuda, "at_most", lambda seconds: contextlib.nullcontext())
    bench_cuda.measure(run, [("a", rows)], lambda: None, hung=hung)
    assert told == [bench_cuda.Rest("a", {"gl b": "does not end"})]
    quiet = bench_cuda.Watchdog(run, lambda: told.append(None), poll=0.01)
    run.begin_row()
    with quiet:
        time.sleep(0.05)
    assert len(told) == 1 and not quiet.thread.is_alive()


def test_a_row_that_is_late_is_given_up_and_the_next_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("ROW_SECONDS", 0.1), ("ENOUGH_SECONDS", 0.05), ("LATE_SECONDS", 0.1)):
        monkeypatch.setattr(bench_cuda, name, seconds)
    run = run_on_host(ctx=None)

    def rows() -> Iterator[Row]:
        run.limits.side = "gl b"
        time.sleep(5)
        yield row_of("hiz")

    bench_cuda.measure(run, [("a", rows), ("b", lambda: iter([row_of("mipmap")]))], lambda: None)
    [failure] = run.failures
    assert failure["name"] == "a" and "at side 'gl b'" in failure["error"]
    assert [row.verb for row in run.rows] == ["mipmap"]


def test_a_process_is_replaced_by_one_that_goes_on(tmp_path: Path) -> None:
    """Without its files, its alarms, or another number."""
    (tmp_path / "run.py").write_text(
        """
import os, signal, sys
print(sys.argv[1:], os.getpid(), signal.getitimer(signal.ITIMER_REAL)[0], len(os.listdir("/proc/self/fd")))
"""
    )
    code = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(CHECKOUT / "bench")!r})
import bench_cuda
bench_cuda.__file__ = {str(tmp_path / "bench_cuda.py")!r}
signal.setitimer(signal.ITIMER_REAL, 100)
file = open(os.devnull); os.set_inheritable(file.fileno(), True)
print(os.getpid(), flush=True)
thread = threading.Thread(target=bench_cuda.replace_process, args=(["--rest", '["a", {{}}]'],))
thread.start()
thread.join()
"""
    number, after = succeed(code).splitlines()
    assert after == f"['--rest', '[\"a\", {{}}]'] {number} 0.0 4"


def test_tables_that_are_kept_give_the_same_map() -> None:
    pyramid = lod.mipmap(torch.rand(2, 3, 60, 100), backend="torch")
    fixation = torch.rand(2, 2)
    rule = bench_cuda.ring_rule(12, 20, None, 0.7, "log", 0.05)
    expected = lod.log_polar(pyramid, fixation, 12, 20, backend="torch")
    assert torch.allclose(bench_cuda.TablesKept(pyramid, rule, fixation)(), expected, atol=1e-5)
    other = bench_cuda.TablesKept(pyramid, rule, torch.rand(2, 2))()
    assert not torch.allclose(other, expected, atol=1e-2)


def run_on_host(budget: cuda_timer.Budget | None = None, **changes: Any) -> bench_cuda.Run:
    """A run "on CUDA" on the host, with this machine's OpenGL."""
    device = torch.device("cpu")
    budget = budget or cuda_timer.Budget(10)
    if "ctx" not in changes:
        changes["ctx"] = lod.Context()
    return bench_cuda.Run(device, HostStopwatch(), budget, **{"seconds": 0.001, **changes})


def about_cuda() -> dict[str, Any]:
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "gl_renderer": "NVIDIA H100 80GB HBM3/PCIe/SSE2",
        "software": False,
        "driver": "4.6.0 NVIDIA 580.1",
        "cuda": "13.0",
        "cuda_driver": "580.1",
        **rows.common(),
    }


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny images gain nothing by more, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def measured(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A result file's content: real rows of tiny images, made once for all processes that test."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return made_on_host()
    path = tmp_path_factory.getbasetemp().parent / "made-on-host.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(json.dumps(made_on_host()))
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def in_haste(patch: pytest.MonkeyPatch) -> None:
    """Where times are no matter: of each side a few calls stand for all, and a race is not repeated, calm or not."""

    def seldom(clock: Callable[..., float]) -> Callable[..., float]:
        times: dict[int, tuple[object, list[float]]] = {}  # with the sides, whose numbers no others may have

        def timed(side: Callable[[], object], *watch: Any) -> float:
            _, of = times.setdefault(id(side), (side, []))
            of.append(of[-1] if len(of) % 4 else clock(side, *watch))
            return of[-1]

        return timed

    patch.setattr(timer, "TRIES", 1)
    patch.setattr(cuda_timer, "wall_ms", seldom(cuda_timer.wall_ms))
    patch.setattr(races.race, "__kwdefaults__", {**races.race.__kwdefaults__, "clock": seldom(races.wall_ms)})


def made_on_host() -> dict[str, Any]:
    run = run_on_host()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_cuda, "COLD_BYTES", 2**15)
        patch.setattr(cuda_timer, "TOO_SLOW_MS", 60_000)  # this machine may be busy
        patch.setattr(bench_cuda, "ROW_SECONDS", 600)
        patch.setattr(cuda_timer.Sides.race, "__kwdefaults__", {"seconds": 0, "most": 200, "fewest": 12, "block": 4})
        in_haste(patch)
        patch.setattr(timer, "PAUSE", 0.0)
        # One call stands for all that the other clocks would time.
        once, cpu_us = HostStopwatch.device_ms, cuda_timer.cpu_us
        patch.setattr(HostStopwatch, "device_ms", lambda watch, side, calls: once(watch, side, 1) * calls)
        patch.setattr(cuda_timer, "cpu_us", lambda side, calls: cpu_us(side, 1))
        # Without the rows that are the same on every device, at sizes that cannot be chosen.
        plan = bench_cuda.plan(run, [(32, 32, 1)], [(13, 21, 2)])
        jobs = [job for job in plan if job[0] not in ("readers", "whole calls", "fixed cost")]
        assert len(jobs) == len(plan) - 3
        bench_cuda.measure(run, jobs, lambda: None)
    result: dict[str, Any] = json.loads(json.dumps(bench_cuda.result(run, about_cuda(), 1e12)))
    return result


def test_cuda_rows_fit_the_schema_and_miss_only_what_needs_a_gpu(measured: dict[str, Any]) -> None:
    assert bench_cuda.problem_of(measured) is None
    assert measured["failures"] == measured["left_out"] == []
    kinds = [(row["verb"], row["part"], row["size"], row["dtype"], row["cache"]) for row in measured["rows"]]
    for size in ([32, 32], [13, 21]):
        for verb in ("mipmap", "hiz"):
            assert (verb, "end to end", size, "float32", "warm") in kinds
            assert (verb, "zero-copy in", size, "float32", "warm") in kinds
        assert ("log_polar", "end to end", size, "float32", "warm") in kinds
    assert ("mipmap", "end to end", [32, 32], "float32", "cold") in kinds
    assert ("mipmap", "end to end", [32, 32], "uint8", "warm") in kinds
    for row in measured["rows"]:
        needs_gpu = ("torch graph of", "torch compiled", cuda_peers.CUPY, cuda_peers.CVCUDA)
        dropped = {name for name in row.get("dropped", {}) if not name.startswith(needs_gpu)}
        assert not dropped, row["dropped"]
        assert any(name.startswith("gl") for name in row["sides"])
        assert ("auto" in row["sides"]) == (row["part"] == "end to end")
    shaders, bridge, mip = measured["rows"][:3]
    assert [row["part"] for row in (shaders, bridge, mip)] == ["kernel", "bridge", "end to end"]
    assert (shaders["size"], shaders["channels"], shaders["dtype"], shaders["cache"]) == ([32, 32], 4, "uint8", "cold")
    assert shaders["sides"].keys() >= {"gl compute", "gl single-pass", "gl driver"}
    assert {"gl compute", "gl fragment", "gl driver", "torch avg_pool2d", "torch reshape mean"} <= mip["sides"].keys()
    assert "no time left for compiling" in mip["dropped"]["torch compiled"]
    odd = measured["rows"][[kind[2] for kind in kinds].index([13, 21])]
    assert {"gl driver", "torch avg_pool2d"} <= {*odd["other_job"]}
    assert odd["best_torch"] == "torch polyphase"


def test_zero_copy_rows_take_their_image_from_gl_memory() -> None:
    run = run_on_host()
    image, owned = torch.rand(1, 3, 8, 8), {True: 0, False: 0}

    def mipmap(x: torch.Tensor, generator: str = "auto") -> None:
        assert run.ctx is not None and torch.equal(x, image)
        owned[run.ctx.owns(x)] += generator == "compute"

    [ordinary, zero_copy] = run.chains(mipmap, ("compute",), image, "warm", {}, mipmap, {})
    assert owned[True] > 2 * 16 and owned[False] > 2 * 16
    assert (ordinary.part, zero_copy.part) == ("end to end", "zero-copy in")
    assert ordinary.sides.keys() == {"auto", "gl compute"} and zero_copy.sides.keys() == {"gl compute"}


def test_cold_rows_take_turns_with_more_than_the_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_cuda.COLD_BYTES >= 2 * 60 * 2**20
    run = run_on_host(ctx=None)
    monkeypatch.setattr(bench_cuda, "COLD_BYTES", 1000)
    image, seen = torch.rand(1, 1, 8, 8), set()

    def verb(x: torch.Tensor) -> None:
        seen.add(x.data_ptr())

    [_] = run.chains(verb, (), image, "cold", {}, lambda x: x, {})
    assert len(seen) == 4, "1000 bytes in images of 256"


@pytest.mark.parametrize("verb", ["foveate", "gather_patches"])
@pytest.mark.parametrize(("cache", "count"), [("cold", 3), ("warm", 1)])
def test_cold_rows_of_samplers_read_another_pyramid_at_each_call(
    verb: str, cache: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()

    def race(sides: Any, **_: Any) -> dict[str, timer.Timing]:
        for _ in range(6):
            sides["auto"]()
        return {"auto": timer.Timing(1.0, 0.1, 0.9, 12)}

    nbytes = 3 * 64 * 64 * 4
    monkeypatch.setattr(inputs, "COLD_BYTES", 3 * nbytes)
    monkeypatch.setattr(lod, verb, lambda src, point, **_: seen.add(id(src)))
    [row, *_] = getattr(bench_samplers, verb)([(64, 64, 1)], [torch.float32], 0.1, race=race, cache=cache)
    assert (row.cache, len(seen)) == (cache, count)


@pytest.mark.parametrize("missing", ["device_ms", "p99_ms"])
def test_cuda_rows_without_a_clock_do_not_fit_the_schema(measured: dict[str, Any], missing: str) -> None:
    broken = copy.deepcopy(measured)
    whole = next(row for row in broken["rows"] if row["part"] == "end to end")
    del next(iter(whole["sides"].values()))[missing]
    assert missing in str(bench_cuda.problem_of(broken))
    broken["tensors"] = "cpu"
    assert bench_cuda.problem_of(broken) is None


@pytest.mark.parametrize("missing", ["cuda", "cuda_driver", "gl_renderer", "left_out", "failures"])
def test_cuda_files_must_say_what_they_were_measured_with(measured: dict[str, Any], missing: str) -> None:
    broken = {key: value for key, value in measured.items() if key != missing}
    assert missing in str(bench_cuda.problem_of(broken))
    assert bench_cuda.problem_of({**measured, "rows": []}) == "no row was measured"


def test_the_most_important_rows_come_first() -> None:
    names = [name for name, _ in bench_cuda.plan(run_on_host(ctx=None), bench_cuda.MAIN, bench_cuda.REST)]
    assert len(set(names)) == len(names)
    assert names[:14] == [
        "parts 4096x4096 uint8 cold 4",
        "mipmap 4096x4096x1 uint8 cold 4",
        "mipmap 4096x4096x1",
        "mipmap 2048x2048x1",
        "mipmap 1024x1024x1",
        "log_polar 4096x4096x1 float32 warm 1024 1024",
        "foveate 1024",
        "many patches",
        "log_polar 4096x4096x1 uint8 warm 1024 1024",
        "foveate 1024 uint8",
        "many patches uint8",
        "fixed cost",
        "odd_sides 4097x4097x1",
        "odd_sides 4095x4095x1",
    ]
    assert {"hiz 4096x4096x1", "log_polar 224x224x32", "kernels", "parts", "batches", "readers"} <= {*names}
    assert names == [name for name, _ in bench_cuda.plan(run_on_host(), bench_cuda.MAIN, bench_cuda.REST)], (
        "what a fresh process goes on with, whether OpenGL opens there or not"
    )


@pytest.fixture
def no_gl(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise lod.GpuLodError("no EGL here")

    monkeypatch.setattr(lod.Context, "__new__", refuse)


@pytest.mark.parametrize(
    "name", ["foveate", "foveate once", "others once", "gather_patches", "batches", "readers", "whole calls"]
)
def test_without_opengl_rows_drop_its_sides_and_say_so(name: str, no_gl: None, one_thread: None) -> None:
    run = run_on_host(ctx=None)
    size, f32 = [(64, 64, 1)], [torch.float32]
    jobs: dict[str, Any] = {
        "foveate": partial(bench_samplers.foveate, size, f32),
        "foveate once": partial(bench_samplers.foveate_once, size, f32),
        "others once": partial(bench_samplers.others_once, size, f32),
        "gather_patches": partial(bench_samplers.gather_patches, size, f32, budget=16),
        "batches": partial(bench_samplers.batches, batch=2, side=64),
        "readers": partial(bench_hiz.readers, side=64),
        "whole calls": partial(bench_log_polar.from_an_image, side=64),
    }
    bench_cuda.measure(run, [(name, partial(jobs[name], 0.001, "cpu", run.race))], lambda: None)
    assert run.failures == [] and run.rows
    for row in run.rows:
        assert row.best("torch") and not row.best("gl")
        assert any(side.startswith("gl") for side in row.extra["dropped"])
        assert set(row.extra["dropped"].values()) == {inputs.NO_GL}
    assert bench_cuda.problem_of(bench_cuda.result(run, about_cuda(), 1e9)) is None


def test_eight_texels_a_sample_do_what_the_verbs_do() -> None:
    pyramid = lod.mipmap(torch.rand(2, 3, 45, 61), backend="torch")
    stack, fixation = eight_texels.Stack(pyramid), torch.rand(2, 2)
    expected = lod.foveate(pyramid, fixation, backend="torch")
    assert torch.allclose(eight_texels.foveate(stack, fixation), expected, atol=1e-5)
    assert not torch.allclose(eight_texels.foveate(stack, torch.rand(2, 2)), expected, atol=1e-2)
    sites = torch.rand(2, 7, 3) * torch.tensor([1, 1, 7])
    expected = lod.gather_patches(pyramid, sites, 5, backend="torch")
    assert torch.allclose(eight_texels.gather_patches(stack, sites, 5), expected, atol=1e-4)
    one_picture = bench_samplers.OnePicture(pyramid)
    assert torch.allclose(one_picture.gather_patches(sites, 5), expected, atol=1e-4)
    counts = lod.mipmap((pyramid.levels[0] * 255).byte(), backend="torch")
    made, expected = eight_texels.foveate(eight_texels.Stack(counts), fixation), lod.foveate(counts, fixation)
    assert made.dtype == torch.uint8 and (made.int() - expected.int()).abs().max() <= 1
    assert eight_texels.sides(lod.foveate, [pyramid], iter([])) == {}, "of CPU tensors there are others"


def test_sides_of_cuda_tensors_take_a_new_position_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pyramid = lod.mipmap(torch.rand(1, 3, 16, 16), backend="torch")
    asked: list[torch.Tensor] = []

    def verb(src: lod.Pyramid, at: torch.Tensor, backend: str) -> None:
        assert backend == "cuda"
        asked.append(at.clone())

    verb.__name__ = "foveate"
    monkeypatch.setattr(eight_texels, "captured", lambda function, inputs: lambda: function(inputs[0]))
    monkeypatch.setattr(eight_texels, "compiled", lambda function, inputs, seconds: function)
    monkeypatch.setattr(eight_texels, "KIND", "cpu")
    points = list(torch.rand(4, 1, 2).unbind())
    sides = eight_texels.sides(verb, [pyramid], itertools.cycle(points))
    run = run_on_host(ctx=None)
    found = run.race(sides, seconds=0.001)
    assert found.keys() == {
        *("cuda graph of kernels", "torch graph of eight texels a sample", "torch compiled"),
        "torch graph of compiled",
    }
    assert {tuple(at[0].tolist()) for at in asked} == {tuple(at[0].tolist()) for at in points}
    several = eight_texels.sides(verb, [pyramid] * 2, itertools.cycle(points))
    assert several.keys() == {"cuda graph of kernels", "torch graph of eight texels a sample"}


def row_of(name: str, **details: Any) -> Row:
    timing = timer.Timing(1.0, 0.1, 0.9, 16, 1.2, 0.8)
    made: dict[str, Any] = {
        "verb": name, "part": "end to end", "height": 1024, "width": 1024, "batch": 1, "channels": 3,
        "dtype": "float32", "cache": "warm", "moved_bytes": 1000,
        "sides": {"gl compute": timing, "torch avg_pool2d": timing, "auto": timing},
    }  # fmt: skip
    return Row(**{**made, **details})


def test_when_time_runs_out_the_rest_is_left_out_and_said_so() -> None:
    now = [0.0]
    run = run_on_host(cuda_timer.Budget(1, lambda: now[0]), ctx=None)
    saved: list[int] = []

    def job(name: str) -> Iterator[Row]:
        now[0] += 25
        yield row_of(name)

    jobs = [(name, partial(job, "mipmap")) for name in ("a", "b", "c", "d")]
    said: list[str] = []
    bench_cuda.measure(run, jobs, lambda: saved.append(len(run.rows)), said.append)
    assert len(run.rows) == 2, "after the second 10 of 60 seconds are left, too few for a third"
    assert run.left_out == ["c", "d"]
    assert saved == [1, 2, 2], "after each row, and in the end"
    assert "2 jobs left out" in said[-1]
    assert bench_cuda.result(run, about_cuda(), 1e9)["left_out"] == ["c", "d"]


def test_a_job_that_fails_is_recorded_and_the_rest_goes_on() -> None:
    run = run_on_host(ctx=None)

    def fails() -> Iterator[Row]:
        yield row_of("hiz")
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    bench_cuda.measure(run, [("a", fails), ("b", lambda: iter([row_of("mipmap")]))], lambda: None)
    assert [row.verb for row in run.rows] == ["hiz", "mipmap"]
    [failure] = run.failures
    assert failure["name"] == "a"
    assert failure["error"].startswith("RuntimeError: CUDA error: an illegal memory access (test_bench.py:")
    found = bench_cuda.result(run, about_cuda(), 1e9)
    assert bench_cuda.problem_of(found) is None
    assert "illegal" in str(bench_cuda._failed(run.failures))


def test_without_opengl_torch_is_measured_and_rows_say_so() -> None:
    run = run_on_host(ctx=None)
    bench_cuda.measure(run, [("a", lambda: run.mipmap((16, 16, 1)))], lambda: None)
    [row] = run.rows
    assert row.extra["dropped"]["gl compute"] == bench_cuda.NO_GL
    assert row.best("gl") is None and row.best("torch") is not None
    assert bench_cuda.problem_of(bench_cuda.result(run, about_cuda(), 1e9)) is None


def test_rows_that_are_the_same_on_every_device_tell_their_failures() -> None:
    run = run_on_host(ctx=None)
    assert run.race({"a": lambda: None, "b": lambda: 1 / 0}, seconds=0.01).keys() == {"a"}
    [failure] = run.failures
    assert failure["name"] == "side 'b' of a row with a, b" and "division by zero" in failure["error"]
    with pytest.raises(RuntimeError, match="no side ran"):
        run.race({"b": lambda: 1 / 0})


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    rows.write({"a": 1}, path)
    with pytest.raises(TypeError):
        rows.write({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert rows.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


# -- the report on CUDA files ------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of bench/results, with the files that are there."""
    folder = tmp_path / "bench" / "results"
    shutil.copytree(CHECKOUT / "bench" / "results", folder)
    monkeypatch.setattr(report, "HERE", tmp_path / "bench")
    return folder


def test_a_cuda_file_gets_a_table_of_its_own(results: Path, measured: dict[str, Any]) -> None:
    before = report.readme_tables()
    extra = {"left_out": ["mipmap 448x448x1"], "failures": [{"name": "readers", "error": "x"}]}
    synthetic = [row_of("mipmap"), row_of("cull", extra={"dropped": {"torch compiled": "no compiler"}})]
    data = {**measured, **extra, "rows": [row.as_dict(1e12) for row in synthetic]}
    assert bench_cuda.problem_of(data) is None
    (results / "nvidia-h100-80gb-hbm3.json").write_text(json.dumps(data))
    after = report.readme_tables()
    above, found, own = after.partition("Measured on NVIDIA H100")
    below = own.partition("\n\nMeasured on ")[2]
    assert found and before == (f"{above}Measured on {below}" if below else above.rstrip()), "others stay as they are"
    headings = "| " + " | ".join(text.HEADINGS) + " |"
    assert after.count(headings) == before.count(headings) + 1
    assert "NVIDIA H100 80GB HBM3, CUDA tensors, driver 580.1, CUDA 13.0" in after
    assert "(bench/results/nvidia-h100-80gb-hbm3.json)" in after
    assert (
        after.count("with a synchronise behind every call") == before.count("with a synchronise behind every call") + 1
    )
    assert "| mipmap | 3 x 1024 x 1024 float32, warm | compute: 1 ± 0.05 | avg_pool2d: 1 ± 0.05 | 1.00x |" in after
    assert "warm; without torch compiled |" in after
    assert "Left out for lack of time: 1 job. Failed: readers." in after
    every = report.with_every_row(report.EVERY_ROW.read_text())
    assert "Left out for lack of time: mipmap 448x448x1. Failed: readers." in every
    readme = (CHECKOUT / "README.md").read_text()
    assert after in report.with_tables(readme)
    assert report.with_tables(report.with_tables(readme)) == report.with_tables(readme)


def test_tables_and_plots_cope_with_what_a_cuda_file_may_lack(results: Path, measured: dict[str, Any]) -> None:
    timing = timer.Timing(1.0, 0.1, 0.9, 16, 1.2, 0.8)
    lacking = [
        row_of("mipmap", sides={"torch avg_pool2d": timing}),
        row_of("hiz", sides={"gl compute": timing}),
        row_of("cull", sides={"kornia": timing}),
        row_of("log_polar"),
    ]
    path = results / "some-gpu.json"
    for chosen in (lacking, []):
        path.write_text(json.dumps({**measured, "rows": [row.as_dict(1e12) for row in chosen]}))
        assert report.table(path).row_count == len(chosen)
        assert "Measured on" in text.markdown(path, results)
        report.plot(path, path.with_suffix(".svg"))
        assert "<svg" in path.with_suffix(".svg").read_text()


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["run.py", "bench_bridge.py"])
def test_without_cuda_the_benchmarks_say_so_in_one_line(script: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ["--device", "cuda"] if script == "run.py" else ["--seconds", "5"]
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "bench" / script), *options, "--out", str(out)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert (done.stdout + done.stderr).splitlines() == ["no CUDA device here: nothing was measured, nothing written"]
    assert not out.exists()


@pytest.fixture
def broken_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA that is there and of which nothing works, and no OpenGL on it."""

    def no_context(device: Any) -> Any:
        raise lod.GpuLodError("EGL is not for you")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 99)
    for module in (bench_cuda, bench_bridge):
        monkeypatch.setattr(module, "CudaStopwatch", lambda device: HostStopwatch())
        monkeypatch.setattr(module, "cuda_facts", lambda *_: about_cuda())
    monkeypatch.setattr(bench_cuda, "device_bandwidth", lambda *_: 1e12)
    monkeypatch.setattr(bench_cuda, "COLD_BYTES", 2**15)  # of which nothing is read
    monkeypatch.setattr(lod, "Context", no_context)


def test_where_nothing_works_every_failure_is_in_the_file(
    broken_cuda: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    assert run.main(["--device", "cuda", "--quick", "--out", str(out)]) == 1
    data = json.loads(out.read_text())
    assert data["rows"] == [] and data["left_out"] == []
    names = [one["name"] for one in data["failures"]]
    assert names[:2] == ["OpenGL", "mipmap 1024x1024x1 uint8 cold 4"] and len(names) > 10
    assert "no row was measured" in capsys.readouterr().err
    assert out.with_suffix(".svg").exists()


def test_without_opengl_the_bridge_is_not_measured(
    broken_cuda: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_bridge.main(["--out", str(tmp_path / "bridge.json")]) == 1
    assert "EGL is not for you" in capsys.readouterr().err


def test_a_bridge_that_never_works_is_recorded(
    broken_cuda: None,
    ctx: lod.Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lod, "Context", lambda device: ctx)
    for name in ("SHARE_SIDES", "SIDES", "UPLOAD_SIDES"):
        monkeypatch.setattr(bench_bridge, name, (8,))
    out = tmp_path / "bridge.json"
    assert bench_bridge.main(["--out", str(out), "--seconds", "1"]) == 1
    data = json.loads(out.read_text())
    jsonschema.validate(data, bench_bridge.SCHEMA)
    entries = [entry for part in bench_bridge.SHARES for entry in data[part]]
    assert len(entries) > 20 and all("error" in entry for entry in entries)
    assert "nothing measured of cost" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "--device cuda --only hiz",
        "--minutes 3",
        "--device cuda --minutes 0",
        "--device cuda --minutes nan",
        "--device tpu",
        "--only hiz,nothing",
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.parse(arguments.split())
    assert stopped.value.code == 2
    assert "--" in capsys.readouterr().err


def test_arguments_have_the_defaults_that_they_had() -> None:
    options = run.parse([])
    assert (options.device, options.only, options.quick, options.out) == ("cpu", run.VERBS, False, None)
    assert run.parse(["--device", "cuda", "--minutes", "3.5"]).minutes == 3.5
    for arguments in (["--seconds", "0"], ["--seconds", "inf"]):
        with pytest.raises(SystemExit):
            bench_bridge.main(arguments)


# -- the bridge's benchmark, over a fake of CUDA -----------------------------------------------------------------------


@pytest.fixture
def bench(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[bench_bridge.Bench]:
    """A context that shares "CUDA" memory, which is the host's, and an empty file."""
    fake = FakeCuda(ctx.gl)
    ctx.interop = InteropBridge(ctx.gl, fake)
    result = {"schema": 1, "experiment": "bridge", "targets": bench_bridge.TARGETS, "seconds": 0.2, **about_cuda()}
    for part in bench_bridge.SHARES:
        result[part] = []
    yield bench_bridge.Bench(ctx, torch.device("cpu"), HostStopwatch(), 0.2, result)
    shared, ctx.interop = ctx.interop, None
    gc.collect()
    with ctx.active():
        shared.trim()


def fake_of(bench: bench_bridge.Bench) -> FakeCuda:
    driver = bench.bridge.driver
    assert isinstance(driver, FakeCuda)
    return driver


def test_bridge_parts_share_the_seconds() -> None:
    assert sum(bench_bridge.SHARES.values()) == pytest.approx(1)


def test_bridge_figures() -> None:
    assert bridge_cost.p50_p99([1e-6, 2e-6, 9e-6], "x_") == {"x_p50_us": 2.0, "x_p99_us": 9.0}
    medians = {"gl": 2.0, "host, a": 30.0, "host, b": 24.0, "torch a": 1.0, "gl, image in GL memory": 1.0}
    assert bench_bridge.factors(medians) == {
        "best_host": "host, b", "host_factor": 12.0, "best_torch": "torch a", "torch_factor": 0.5
    }  # fmt: skip
    assert bench_bridge.factors({"host, a": 1.0}) == {}
    before = {"host_bytes": 100, "device_free_bytes": 1000, "shared_leased": 2, "shared_idle": 1}
    half = {**before, "host_bytes": 180}
    after = {**before, "host_bytes": 190, "device_free_bytes": 900}
    found = bench_bridge.growth(before, half, after)
    assert found == {
        "host_growth_bytes": 90, "host_growth_second_half_bytes": 10, "device_growth_bytes": 100,
        "device_growth_second_half_bytes": 100, "pools_flat": True,
    }  # fmt: skip
    assert not bench_bridge.growth(before, {**half, "shared_idle": 2}, after)["pools_flat"]


def test_the_timed_driver_counts_and_passes_on() -> None:
    class Driver:
        name = "d"
        device = torch.device("cpu")

        def map(self, handles: list[int], stream: int) -> str:
            time.sleep(0.01)
            return f"{handles} {stream}"

        def unmap(self, handles: list[int], stream: int) -> None:
            raise ValueError("no")

    heard: list[str] = []
    timed = bridge_cost.TimedDriver(Driver(), heard.append)
    assert timed.name == "d" and timed.device == torch.device("cpu")
    assert timed.map([1], 7) == timed.map([1], 7) == "[1] 7"
    with pytest.raises(ValueError, match="no"):
        timed.unmap([1], 7)
    assert heard == ["map", "map", "unmap"]
    assert timed.calls == {"map": 2, "unmap": 1}
    assert 0.02 <= timed.bridge_seconds < 0.5
    timed.clear()
    assert timed.bridge_seconds == 0 and not timed.calls


def test_the_timed_driver_is_taken_out_again(bench: bench_bridge.Bench) -> None:
    driver = bench.bridge.driver
    with pytest.raises(ValueError, match="mine"), bridge_cost.timing(bench.bridge):
        assert bench.bridge.driver is not driver
        raise ValueError("mine")
    assert bench.bridge.driver is driver


def test_the_share_of_a_verb_is_that_of_its_one_map_and_unmap(bench: bench_bridge.Bench) -> None:
    image = torch.rand(1, 3, 16, 16)
    found = bridge_cost.share(bench, lambda: lod.mipmap(image, backend="gl"), 0.05)
    assert (found["maps"], found["unmaps"]) == (1, 1)
    assert 0 < found["share"] < 1
    assert 0 < found["bridge_p50_us"] <= found["bridge_p99_us"]
    assert found["bridge_p50_us"] < found["whole_p50_us"]
    assert isinstance(bench.bridge.driver, FakeCuda)
    assert 0 < found["context_switch_p50_us"] < found["whole_p50_us"]
    with bench.ctx:  # nothing to change
        assert bridge_cost.share(bench, lambda: lod.mipmap(image, backend="gl"), 0.05)["context_switch_p99_us"] == 0


def test_the_share_grows_with_what_the_driver_takes(bench: bench_bridge.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, image = fake_of(bench), torch.rand(1, 3, 16, 16)
    quick = fake.map

    def slow(handles: Any, stream: int) -> None:
        time.sleep(0.02)  # a busy machine takes ten milliseconds for the rest
        quick(handles, stream)

    monkeypatch.setattr(fake, "map", slow)
    found = bridge_cost.share(bench, lambda: lod.mipmap(image, backend="gl"), 0.05)
    assert found["bridge_p50_us"] > 20_000 and not found["met"]
    assert found["share"] > 0.5


def test_pairs_leave_all_buffers_mapped(bench: bench_bridge.Bench) -> None:
    found = bridge_cost.cost(bench, 3, 5000, 0.02)
    fake = fake_of(bench)
    assert fake.mapped == set(fake.resources) and len(fake.resources) == 3
    assert found["calls"] >= 100 and found["buffers"] == 3 and not found["moved"]
    assert found["p50_us"] <= found["p99_us"] and found["cpu_us"] > 0
    assert "gpu_us" not in found, "there is none"
    names = fake.names()
    assert names.count("map") - 3 == names.count("unmap"), "each was mapped when it was made"
    assert {len(call[1]) for call in fake.calls if call[0] == "unmap"} == {3}, "all in one call"


class Queue:
    """Stands for a GPU whose queue is full from the second pair on: then unmap waits, until somebody synchronises."""

    def __init__(self, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unmap = fake.unmap
        self.filled = 0
        monkeypatch.setattr(fake, "unmap", self.unmapped)

    def unmapped(self, handles: Any, stream: int) -> None:
        if self.filled:
            time.sleep(0.004)
        self.filled += 1
        self.unmap(handles, stream)

    def synchronize(self) -> None:
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass
        self.filled = 0

    def device_ms(self, side: Callable[[], object], calls: int) -> list[float]:
        """0.318 for each unmap."""
        self.filled = 0
        for _ in range(calls):
            side()
        return [0.318 * self.filled / calls] * calls


def test_pairs_are_timed_on_an_idle_gpu(bench: bench_bridge.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they wait in a full queue is told apart, and no wait is counted as theirs."""
    bench.watch = Queue(fake_of(bench), monkeypatch)
    found = bridge_cost.cost(bench, 1, 5000, 0.02)
    assert found["p50_us"] < 1900 and found["unmap_p50_us"] < 1900
    assert found["with_synchronise_p50_us"] > 2000 and found["back_to_back_p50_us"] > 4000
    assert found["back_to_back_p99_us"] >= found["back_to_back_p50_us"]
    assert found["cpu_us"] < 1900


def test_what_a_pair_takes_a_gpu(bench: bench_bridge.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.watch = Queue(fake_of(bench), monkeypatch)
    active = bench.ctx.active
    monkeypatch.setattr(bench.ctx, "active", lambda device=None: active())  # its bridge is on the host
    bench.device = torch.device("cuda")
    assert bridge_cost.cost(bench, 2, 5000, 0.02)["gpu_us"] == 318


def test_a_map_that_fails_is_made_up_for(bench: bench_bridge.Bench) -> None:
    fake = fake_of(bench)
    with pytest.raises(lod.GpuLodError), bench.ctx.active():
        leases = [bench.bridge.lease(5000) for _ in range(2)]
        pairs = bridge_cost.Pairs(bench.bridge, leases)
        fake.fail["map"] = 999
        pairs.once()
    assert fake.mapped == set(fake.resources)


def test_the_whole_bridge_benchmark_runs_and_records_what_fails(
    bench: bench_bridge.Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "COUNTS": (1, 2), "BUFFER_BYTES": (2**12,), "SHARE_SIDES": (16,), "SIDES": (16,), "UPLOAD_SIDES": (16,),
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_bridge, name, value)
    monkeypatch.setattr(bench_bridge, "copy_into_arrays", lambda *_: 1 / 0)
    costs: list[tuple[int, int]] = []
    real = bench_bridge.cost
    monkeypatch.setattr(bench_bridge, "cost", lambda *given: costs.append(given[1:3]) or real(*given))
    saves: list[int] = []
    bench.save = lambda: saves.append(1)
    bench_bridge.run(bench)
    assert costs == [(1, 2**12), (1, 2**12), (2, 2**12)], "the first, for which all is new, is thrown away"
    assert [entry["buffers"] for entry in bench.result["cost"]] == [1, 2]
    result = json.loads(json.dumps(bench.result))
    jsonschema.validate(result, bench_bridge.SCHEMA)
    assert bench_bridge.unmeasured(result) == []
    failed = [entry for part in bench_bridge.SHARES for entry in result[part] if "error" in entry]
    assert all(entry["error"].startswith("ZeroDivisionError: division by zero (") for entry in failed)
    assert len(failed) == 6, "two sets of flags, three numbers of channels"
    assert len(saves) == sum(len(result[part]) for part in bench_bridge.SHARES)
    [chain] = result["end_to_end"]
    assert chain["host_factor"] > 0 and chain["torch_factor"] > 0 and "dropped" not in chain
    assert all(entry["correct"] for entry in result["uploads"] if "correct" in entry)
    [calls] = result["small_calls"]
    assert calls["pools_flat"] and calls["calls"] < calls["wanted_calls"] == 100_000
    says = "\n".join(bench_bridge.verdicts(result))
    assert "target 30" in says and "target 150" in says and "6 of " in says and "GPU" not in says
    result["cost"][0]["gpu_us"] = 318.04
    assert f"CPU {result['cost'][0]['cpu_us']:.1f} us, GPU 318.0 us" in bench_bridge.verdicts(result)[0]
    jsonschema.validate(result, bench_bridge.SCHEMA)
    for wrong in ({"gpu_us": -1}, {"gpu_us": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**result, "cost": [result["cost"][0] | wrong]}, bench_bridge.SCHEMA)
    for lacking in ("p50_us", "back_to_back_p99_us"):
        entry = {name: value for name, value in result["cost"][0].items() if name != lacking}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**result, "cost": [entry]}, bench_bridge.SCHEMA)
    assert "uploads: name library" in capsys.readouterr().out


def test_a_part_of_which_nothing_was_measured_is_told() -> None:
    result: dict[str, Any] = {"schema": 1, "experiment": "bridge", "targets": {}, "seconds": 0.2, **about_cuda()}
    result |= {part: [{"name": "a", "calls": 1}] for part in bench_bridge.SHARES}
    result["cost"] = [{"name": "a", "error": "b"}]
    result["uploads"] = []
    assert bench_bridge.unmeasured(result) == ["cost", "uploads"]
    jsonschema.validate(result, bench_bridge.SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**result, "share": [{"name": "a"}]}, bench_bridge.SCHEMA)


# -- other libraries ---------------------------------------------------------------------------------------------------


def planes(levels: Any) -> list[torch.Tensor]:
    """A chain in HWC order as float64 [C, h, w]."""
    return [torch.from_numpy(np.array(level)).permute(2, 0, 1).double() for level in levels]


@pytest.mark.parametrize("size", [(32, 32), (21, 13), (1, 7)])
def test_libraries_that_are_opponents_do_the_job(size: tuple[int, int]) -> None:
    image = inputs.picture(*size)
    sides, other, dropped = peers.chains(image, "warm", torch.float32)
    powers = {"scikit-image downscale_local_mean (HWC)"} if size == (32, 32) else set()
    assert {*sides} == {"opencv INTER_AREA (HWC)", "kornia build_pyramid (Gaussian)", *powers}
    assert {*other} == {"kornia build_pyramid (Gaussian)"} and not dropped
    for name in sides.keys() - other.keys():
        for level, expected in zip(planes(sides[name]()), lod.mipmap(image, backend="torch"), strict=True):
            assert torch.allclose(level, expected[0].double(), atol=1e-5), name


def test_searching_finds_the_sites_of_the_closed_form() -> None:
    """But for its table of 4096 values."""
    points = torch.tensor([[0.5, 0.5], [0.02, 0.97], [0.3, 0.6]])
    found = bench_samplers.sites_by_search(points, 273, (768, 1024))
    assert float((found - lod.cortical_sites(points, 273, (768, 1024)))[..., :2].abs().max()) < 5e-3
    assert found.shape == (3, 273, 3) and bool((found[..., :2] >= 0).all() and (found[..., :2] <= 1).all())


def test_uint8_libraries_round_at_every_level() -> None:
    image = inputs.picture(64, 64, dtype=torch.uint8)
    sides, other, _ = peers.chains(image, "warm", torch.uint8)
    names = {"opencv INTER_AREA (HWC)", "pillow reduce(2) (HWC)", "pillow resize BOX (HWC)"}
    assert {*sides} == {*other} == names
    expected = image[0].double()
    for name in names:
        chain = planes(sides[name]())
        assert [level.shape[-1] for level in chain] == [64, 32, 16, 8, 4, 2, 1]
        for number, level in enumerate(chain):
            halved = expected.unflatten(1, (level.shape[1], -1)).unflatten(3, (level.shape[2], -1)).mean((2, 4))
            steps = 2 if "BOX" in name else 1  # rows and columns apart
            assert (level - halved).abs().max() <= 0.5 * steps * number + 1e-6, name
    odd, _, _ = peers.chains(inputs.picture(21, 13, dtype=torch.uint8), "warm", torch.uint8)
    assert [level.size for level in odd["pillow reduce(2) (HWC)"]()][1] == (7, 11), "halved upwards"


def test_large_pictures_are_spared_the_slow_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SLOW_PIXELS", 100)
    sides, _, dropped = peers.chains(inputs.picture(16, 16), "warm", torch.float32)
    assert {*sides} == {"opencv INTER_AREA (HWC)"}
    assert {*dropped} == {"scikit-image downscale_local_mean (HWC)", "kornia build_pyramid (Gaussian)"}
    assert all("left out above 100 pixels" in why for why in dropped.values())
    assert peers.gaussians(inputs.picture(16, 16), 3)[0].keys() == {"opencv pyrDown (HWC)"}


def test_gaussian_and_log_polar_libraries_run() -> None:
    image = inputs.picture(40, 56)
    sides, other = peers.gaussians(image, 4)
    assert {*other} == {"scikit-image pyramid_gaussian (HWC)", "kornia build_pyramid"}
    chain = planes(sides["opencv pyrDown (HWC)"]())
    for level, expected in zip(chain, lod.gaussian(image, 4, backend="torch"), strict=True):
        assert torch.allclose(level, expected[0].double(), atol=1e-5)
    assert all(len(list(sides[name]())) == 4 for name in other)  # type: ignore[call-overload]
    ramp = (torch.arange(40.0)[:, None] + 2 * torch.arange(56.0)).expand(1, 3, -1, -1)
    ways, why = peers.log_polars(ramp, "warm", 16, 32)
    assert len(ways) == 2 and {*why} == {*ways}
    maps = [way(arrays[0], torch.tensor([[0.4, 0.6]])) for way, arrays in ways.values()]
    assert all(found.shape == (32, 16, 3) for found in maps)
    assert np.abs(maps[0] - maps[1])[:, :12].max() < 6, "the rings inside the picture, within two pixels"


@pytest.mark.parametrize("size", [(64, 48), (53, 77)])
def test_laplacian_opponents_do_the_job(size: tuple[int, int]) -> None:
    image = inputs.picture(*size, batch=2)
    expected = lod.laplacian(image, 5, backend="torch")
    there, back = bench_pyramids.laplacian_ways()
    assert len(there) == len(back) == 3
    for name, way in there.items():
        for level, right in zip(way(image), expected, strict=True):  # type: ignore[call-overload]
            assert torch.allclose(level, right, atol=1e-5), name
    for name, way in back.items():
        assert torch.allclose(way(expected), image, atol=1e-5), name  # type: ignore[arg-type]
    assert peers.laplacians(image, 5) == ({}, {})
    [opencv], [again] = (list(sides.values()) for sides in peers.laplacians(image[:1], 5))
    for level, right in zip(planes(opencv()), expected, strict=True):
        assert torch.allclose(level, right[0].double(), atol=1e-5)
    assert torch.allclose(planes([again()])[0], image[0].double(), atol=1e-5)


def test_rows_of_verbs_alone_and_of_batches_of_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "TRIES", 1)
    rows = [*bench_pyramids.alone([(32, 48, 1)], 0.001), *bench_hiz.batches(0.001, batch=3, side=16)]
    assert [row.verb for row in rows] == ["laplacian", "collapse", "cull", "region_max", "region_min"]
    for row in rows[:2]:
        assert row.note == "5 levels" and {"auto", "gl compute", "torch strided sums"} <= {*row.sides}
        assert row.moved_bytes == 32 * 48 * 3 * 4 * 2 + 32 * 48 * 3 * 4 // 3
    for row in rows[2:]:
        assert row.note.startswith("a batch in one call; ") and (row.batch, row.channels) == (3, 1)
        assert {"auto", "gl one call", "gl a call for each image", "torch one call"} <= {*row.sides}
        assert "gl a call for each image" in row.other_job and {*row.other_job} <= {*row.sides}
        assert row.best("gl") == "gl one call" and row.best("torch") in ("torch one call", bench_hiz.IN_ONE_ROW)
        assert (bench_hiz.IN_ONE_ROW in row.sides) == (row.verb != "cull")


@pytest.mark.parametrize(
    ("sides", "name"), [((32, 16), "torch interpolate bilinear antialias"), ((9, 16), "torch avg_pool2d")]
)
def test_torch_ways_that_do_another_job_say_which(sides: tuple[int, int], name: str) -> None:
    image = inputs.picture(*sides)
    ways, other = bench_mipmap.torch_ways(*sides)
    expected = lod.mipmap(image, backend="torch")
    assert name in other and all(len(why) > 20 for why in other.values())
    for way, chain in ((way, ways[way](image)) for way in ways):
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(chain, expected, strict=True))  # type: ignore[call-overload]
        assert same == (way not in other), way
    last = image.to(memory_format=torch.channels_last)
    for chain in (way(last) for way in bench_mipmap.channels_last(*sides).values()):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(chain, expected, strict=True))  # type: ignore[call-overload]
    assert len(bench_mipmap.channels_last(*sides)) == (0 if 9 in sides else 4)


@pytest.mark.parametrize("sides", [(16, 8), (13, 21)])
def test_max_pooling_is_an_opponent_where_it_is_a_bound(sides: tuple[int, int]) -> None:
    relevance = torch.rand(1, 1, *sides)
    ways, other = bench_hiz.torch_ways(*sides)
    expected = lod.hiz(relevance, backend="torch")
    for name, way in ways.items():
        chain = list(way(relevance))  # type: ignore[call-overload]
        same = len(chain) == len(expected) and all(map(torch.equal, chain, expected))
        assert same == (name not in other), name
    assert len(other) == (0 if sides == (16, 8) else 3)


def test_cupy_takes_the_mean_of_four_at_each_level() -> None:
    image = torch.rand(2, 3, 8, 32)
    chain = cuda_peers.cupy_chain(lambda a, b, c, d: (a + b + c + d) / 4, image.numpy())
    for level, expected in zip(chain, lod.mipmap(image, backend="torch"), strict=True):
        assert np.allclose(level, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_cupys_kernel_is_of_its_arrays_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of counts a sum of ints, rounded at each level; numpy stands for CuPy, and Python for C."""

    def kernel(inputs: str, output: str, text: str, name: str) -> Any:
        body = text.removeprefix("mean = ").replace("(T)", "").replace("/", "//")

        def mean(*four: Any) -> Any:
            wide = [one.astype(np.int64 if one.dtype == np.uint8 else one.dtype) for one in four]
            return eval(body, dict(zip("abcd", wide, strict=True))).astype(four[0].dtype)

        return mean

    stream = SimpleNamespace(ExternalStream=lambda handle: contextlib.nullcontext())
    library = SimpleNamespace(ElementwiseKernel=kernel, from_dlpack=lambda x: x.numpy(), cuda=stream)
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    image = (torch.rand(1, 3, 16, 8) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    levels: Any = cuda_peers.cupy_side([image])()
    for level, expected in zip(levels, lod.mipmap(image, backend="torch"), strict=True):
        assert np.allclose(level, expected.numpy(), atol=2 if dtype == torch.uint8 else 1e-6)


def test_cvcuda_is_asked_for_half_the_size_at_each_level() -> None:
    asked: list[tuple[int, ...]] = []

    def resize(image: Any, shape: tuple[int, ...], how: str) -> Any:
        assert how == "area"
        asked.append(shape)
        return SimpleNamespace(shape=shape)

    library = SimpleNamespace(resize=resize, Interp=SimpleNamespace(AREA="area"))
    cuda_peers.cvcuda_chain(library, SimpleNamespace(shape=(2, 4, 8, 3)))
    assert asked == [(2, 2, 4, 3), (2, 1, 2, 3), (2, 1, 1, 3)]


@pytest.mark.parametrize("where", ["cvcuda", "cvcuda.cuda"])
def test_cvcuda_works_on_torchs_stream(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[object] = []

    @contextlib.contextmanager
    def as_stream(stream: object) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def resize(image: Any, shape: tuple[int, ...], how: str) -> Any:
        assert streams == ["torch's"]
        return SimpleNamespace(shape=shape)

    parts = {"as_stream": as_stream} if where == "cvcuda" else {"cuda": SimpleNamespace(as_stream=as_stream)}
    as_tensor = lambda image, layout: SimpleNamespace(shape=image.shape)  # noqa: E731
    library = SimpleNamespace(as_tensor=as_tensor, resize=resize, Interp=SimpleNamespace(AREA="area"), **parts)
    monkeypatch.setitem(sys.modules, "cvcuda", library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "torch's")
    side = cuda_peers.cvcuda_side([torch.rand(1, 3, 4, 8)])
    assert [level.shape for level in side()][-1] == (1, 1, 1, 3)  # type: ignore[attr-defined]
    assert streams == []


def test_a_library_that_is_not_there_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "ABSENT", {})
    assert inputs.optional("no_such_library") is None
    assert inputs.ABSENT == {"no_such_library": "ModuleNotFoundError: No module named 'no_such_library'"}
    assert inputs.optional("json") is json and len(inputs.ABSENT) == 1


def test_generators_are_those_of_the_signature() -> None:
    def verb(image: torch.Tensor, generator: Literal["auto", "compute", "new"] = "auto") -> None: ...

    assert inputs.generators_of(verb) == ("compute", "new")
    assert {"compute", "fragment", "driver"} <= {*inputs.generators_of(lod.mipmap)}
    assert {"compute", "fragment", "sampler"} <= {*inputs.generators_of(lod.hiz)}
    assert "auto" not in inputs.generators_of(lod.log_polar)


def test_sides_that_a_device_lacks_are_dropped_and_mistakes_are_not() -> None:
    def lacks() -> None:
        raise lod.GpuLodError("no such\n extension")

    ran, dropped = timer.able({"a": lambda: 1, "b": lacks})
    assert ran.keys() == {"a"} and dropped == {"b": "GpuLodError: no such extension"}
    with pytest.raises(ZeroDivisionError):
        timer.able({"c": lambda: 1 / 0})


def test_a_race_may_count_by_another_clock() -> None:
    calls = itertools.count(1)
    found = timer.race({"a": lambda: next(calls)}, seconds=0.001, clock=lambda side: float(bool(side())) * 7)
    assert found["a"].median_ms == 7 and found["a"].iqr_ms == 0
    assert next(calls) > 12


def test_a_result_names_the_commit_that_was_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the one that is checked out once all is measured."""
    asked = rows.common()["commit"]
    monkeypatch.setattr(rows, "HERE", tmp_path)
    assert rows.common()["commit"] == asked and rows._commit() == "unknown"


# -- the parts of a call -----------------------------------------------------------------------------------------------


def test_a_call_is_split_into_kernel_and_bridge(ctx: lod.Context) -> None:
    if ctx.renderer == as_hardware.RENDERER:
        pytest.skip("llvmpipe's queries tell no times")
    held = ctx.empty(1, 3, 256, 256).fill_(0.5)
    parts = bench_parts.Parts(ctx)
    small = ctx.empty(1, 3, 4, 4).fill_(0.5)
    times = []
    for image in (small, held):
        parts.kernel(lambda image=image: lod.mipmap(image, backend="gl"))  # type: ignore[misc]
        times.append(min(parts.kernel(lambda i=image: lod.mipmap(i, backend="gl")) for _ in range(5)))  # type: ignore[misc]
    assert 0 < times[0] < times[1], "more texels, more work"
    start = time.perf_counter()
    bridge = parts.of_bridge(lambda: lod.mipmap(held, backend="gl"))
    whole = (time.perf_counter() - start) * 1e3
    assert bridge > 0 and parts.kernel_ms > 0 and bridge + parts.kernel_ms < whole
    assert not {"begin", "end"} & {*vars(ctx.host)}, "the bridge is as it was"


def test_the_bridge_counts_for_the_bridge(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = ctx.host.begin, ctx.host.end
    held = ctx.empty(1, 1, 8, 8).fill_(0.5)
    lod.hiz(held, backend="gl")
    for name, slow in (
        ("begin", lambda: (time.sleep(0.2), begin())),
        ("end", lambda: (time.sleep(0.2), end())),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ctx.host, name, slow)
            parts = bench_parts.Parts(ctx)
            assert parts.of_bridge(lambda: lod.hiz(held, backend="gl")) > 200, name
            assert parts.kernel_ms < 200


def test_gpu_queries_see_the_rasteriser(ctx: lod.Context) -> None:
    held = ctx.empty(1, 3, 256, 256).fill_(0.5)
    lod.mipmap(held, generator="fragment")
    by_query, by_wall = bench_parts.Parts(ctx, queries=True), bench_parts.Parts(ctx, queries=False)
    elapsed = by_query.kernel(lambda: lod.mipmap(held, generator="fragment"))
    assert elapsed > 0.01
    assert elapsed < 20 * by_wall.kernel(lambda: lod.mipmap(held, generator="fragment"))
    assert by_wall.queries is False and bench_parts.Parts(ctx).queries is not ctx.software


def test_single_pass_is_timed_without_subgroups_too(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def ways() -> dict[str, Any]:
        return next(bench_parts.jobs(ctx, 64))[-1]

    monkeypatch.setattr(ctx.limits, "subgroup", 0)
    monkeypatch.setattr(ctx, "tuning", dataclasses.replace(ctx.tuning, subgroups=True))
    assert "gl single-pass, no subgroups" not in ways()
    monkeypatch.setattr(ctx.limits, "subgroup", 32)
    monkeypatch.setattr(ctx.limits, "lanes", True)
    assert len(ways()["gl single-pass, no subgroups"]()) == 7
    assert ctx.tuning.subgroups and ctx.limits.lanes, "neither used nor refused"


def test_a_verb_that_fails_leaves_the_bridge_as_it_was(ctx: lod.Context) -> None:
    with pytest.raises(ZeroDivisionError):
        bench_parts.Parts(ctx).kernel(lambda: 1 / 0)
    assert not {"begin", "end"} & {*vars(ctx.host)}


def test_on_a_cuda_bridge_map_and_unmap_are_what_counts(
    bench: bench_bridge.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, image = fake_of(bench), torch.rand(1, 1, 16, 16)
    parts = bench_parts.Parts(bench.ctx)
    lod.mipmap(image, backend="gl")
    for name in ("map", "unmap"):  # the one at the end of a verb, the other inside it
        quick = getattr(fake, name)
        with monkeypatch.context() as patch:
            patch.setattr(fake, name, lambda *given, quick=quick: (time.sleep(0.2), quick(*given)))
            assert parts.of_bridge(lambda: lod.mipmap(image, backend="gl")) > 200, name
    assert bench.bridge.driver is fake


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_a_quick_run_has_rows_of_every_kind(one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "COLD_BYTES", inputs.COLD_BYTES)
    monkeypatch.setattr(timer, "PAUSE", timer.PAUSE)
    monkeypatch.setattr(rows, "copy_bandwidth", lambda: 1e10)
    in_haste(monkeypatch)
    out = tmp_path / "quick.json"
    assert run.main(["--quick", "--out", str(out)]) == 0
    data = load(out)
    main = {"mipmap", "hiz", "log_polar", "foveate", "gather_patches"}
    kinds = {(row["verb"], row["part"], row["cache"]) for row in data["rows"]}
    assert {(verb, "end to end", cache) for verb in main for cache in ("warm", "cold")} <= kinds
    assert {(verb, part, "warm") for verb in main for part in ("kernel", "bridge")} <= kinds
    assert {(verb, "zero-copy in", "warm") for verb in ("mipmap", "hiz")} | {("bridge", "fixed cost", "warm")} <= kinds
    assert {row["verb"] for row in data["rows"]} == {*SCHEMA_VERBS}
    for row in data["rows"]:
        assert ("layout" in row) == any("HWC" in side for side in row["sides"])
        assert all(row["other_job"].values()) and {*row["other_job"]} <= {*row["sides"]}
        chains = row["verb"] in ("mipmap", "hiz") and not row["note"].endswith(bench_samplers.WITH_BACKWARD)
        if chains and row["note"] != "a batch in one call":
            names = inputs.generators_of(getattr(lod, row["verb"]))
            assert {f"gl {name}" for name in names} <= {*row["sides"], *row.get("dropped", {})}
    assert all(shares(data, verb) for verb in main), "parts find the whole that they belong to"
    assert out.with_suffix(".svg").exists()


SCHEMA_VERBS = SCHEMA["properties"]["rows"]["items"]["properties"]["verb"]["enum"]


# -- copies into mapped arrays, over a fake of CUDA's images -----------------------------------------------------------


class FakeImages:
    """cuda.bindings.runtime and a driver as MappedArrays calls them: "arrays" that are written through GL.

    Attributes:
        fail: names of calls to the status that they return.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3)

    def __init__(self, width: int) -> None:
        self.width = width
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self.mapped = False
        self._glo = 0

    def _call(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        return (self.fail.get(name, 0), *values)

    def stream(self) -> int:
        return 7

    def map(self, handles: list[Any], stream: int) -> None:
        assert (handles, stream, self.mapped) == (["resource"], 7, False)
        self.mapped = True

    def unmap(self, handles: list[Any], stream: int) -> None:
        assert (handles, stream, self.mapped) == (["resource"], 7, True)
        self.mapped = False

    def cudaGraphicsGLRegisterImage(self, glo: int, target: int, flags: int) -> tuple[Any, ...]:
        assert target == G.TEXTURE_2D_ARRAY
        self._glo = glo
        return self._call("register", "resource")

    def cudaGraphicsUnregisterResource(self, resource: str) -> tuple[Any, ...]:
        assert resource == "resource" and not self.mapped
        return self._call("unregister")

    def cudaGraphicsSubResourceGetMappedArray(self, resource: str, layer: int, level: int) -> tuple[Any, ...]:
        assert self.mapped and layer == 0
        return self._call("array", level)

    def cudaMemcpy2DToArrayAsync(
        self, level: int, x: int, y: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int
    ) -> tuple[Any, ...]:
        assert self.mapped and (x, y, kind, stream) == (0, 0, 3, 7) and pitch >= width
        return self._call("2d") if "2d" in self.fail else self._write("2d", level, source, pitch, height)

    def make_cudaPitchedPtr(self, source: int, pitch: int, width: int, height: int) -> tuple[int, int]:
        assert width == max(1, self.width >> self.calls.count("3d"))
        return source, pitch

    def make_cudaExtent(self, width: int, height: int, depth: int) -> tuple[int, int, int]:
        return width, height, depth

    def cudaMemcpy3DParms(self) -> SimpleNamespace:
        return SimpleNamespace()

    def cudaMemcpy3DAsync(self, what: SimpleNamespace, stream: int) -> tuple[Any, ...]:
        assert self.mapped and (what.kind, stream) == (3, 7) and what.extent[2] == 1
        return self._call("3d") if "3d" in self.fail else self._write("3d", what.dstArray, *what.srcPtr, what.extent[1])

    def _write(self, name: str, level: int, source: int, pitch: int, height: int) -> tuple[Any, ...]:
        width = max(1, self.width >> level)
        layout = {4: 0x1903, 8: 0x8227, 16: 0x1908}[pitch // width]  # R, RG, RGBA
        load = egl.loader_of_current().load_opengl_function
        number, pointer = ctypes.c_int, ctypes.c_void_p
        ctypes.CFUNCTYPE(None, ctypes.c_uint, ctypes.c_uint)(load("glBindTexture"))(G.TEXTURE_2D_ARRAY, self._glo)
        ctypes.CFUNCTYPE(None, *[number] * 10, pointer)(load("glTexSubImage3D"))(
            G.TEXTURE_2D_ARRAY, level, 0, 0, 0, width, height, 1, layout, 0x1406, source
        )
        return self._call(name)


def arrays_of(ctx: lod.Context, images: FakeImages, levels: list[torch.Tensor]) -> mapped_arrays.MappedArrays:
    return mapped_arrays.MappedArrays(ctx, images, images, levels, 0)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["2d", "3d"])
def test_copies_into_mapped_arrays_arrive(ctx: lod.Context, channels: int, way: str) -> None:
    levels = list(lod.mipmap(torch.rand(1, channels, 13, 21), backend="torch"))
    images = FakeImages(21)
    if way == "3d":
        images.fail["2d"] = 1
    with ctx.active():
        arrays = arrays_of(ctx, images, levels)
        arrays.copy(arrays.interleave(levels))
        right = mapped_arrays.matches(ctx, arrays.texture, levels)
        wrong = mapped_arrays.matches(ctx, arrays.texture, [*levels[:-1], levels[-1] + 1])
        arrays.close()
    assert right() and not wrong()
    assert images.calls[0] == "register" and images.calls[-1] == "unregister"
    assert images.calls.count(way) == len(levels)
    assert arrays.way == {"2d": "cudaMemcpy2DToArrayAsync", "3d": "cudaMemcpy3DAsync"}[way]


def test_a_copy_that_fails_leaves_the_texture_to_gl(ctx: lod.Context) -> None:
    levels = list(lod.mipmap(torch.rand(1, 3, 8, 8), backend="torch"))
    images = FakeImages(8)
    images.fail = {"2d": 1, "3d": 2}
    with ctx.active():
        arrays = arrays_of(ctx, images, levels)
        with pytest.raises(RuntimeError, match="cudaMemcpy2DToArrayAsync: 1; cudaMemcpy3DAsync: 2"):
            arrays.copy(arrays.interleave(levels))
        assert not images.mapped
        images.fail = {"register": 304}
        with pytest.raises(RuntimeError, match="cudaGraphicsGLRegisterImage: 304"):
            arrays_of(ctx, images, levels)


def test_the_bindings_take_these_calls() -> None:
    """What they are handed, they convert; no driver hears of it."""
    if torch.cuda.is_available():
        pytest.skip("made-up handles must not reach a driver")
    from cuda.bindings import runtime

    arrays = object.__new__(mapped_arrays.MappedArrays)
    arrays._runtime = runtime
    for way in ("cudaMemcpy2DToArrayAsync", "cudaMemcpy3DAsync"):
        arrays.way = way
        with pytest.raises(RuntimeError, match=f"{way}: cudaError"):
            arrays._copy(runtime.cudaArray_t(1), torch.rand(4, 4, 4), 0)
    with pytest.raises(RuntimeError, match="cudaGraphicsSubResourceGetMappedArray: cudaError"):
        arrays._call("cudaGraphicsSubResourceGetMappedArray", runtime.cudaGraphicsResource_t(1), 0, 1)
    with pytest.raises(RuntimeError, match="cudaGraphicsGLRegisterImage: cudaError"):
        arrays._call("cudaGraphicsGLRegisterImage", 1, G.TEXTURE_2D_ARRAY, 4)
