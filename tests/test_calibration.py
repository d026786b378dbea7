"""Measured times: what is looked up, what is taken, where it is kept, and what verbs make of it."""

from __future__ import annotations

import builtins
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import pytest
import scripts
import torch
from cuda_emulator import EmulatedDevice
from hypothesis import given
from hypothesis import strategies as st
from images import noise
from rich.console import Console
from times import HERE, asked, entry, fastest, here

import gpu_lod as lod
from gpu_lod import calibration, dispatch, several_levels, shaders, tables, timing
from gpu_lod.calibrate import Report, _measure, calibrate
from gpu_lod.commands import printing
from gpu_lod.demo.rows import Row
from gpu_lod.dispatch import NO_TEXTURE
from gpu_lod.errors import (
    CalibrationWarning,
    CudaUnavailableError,
    FileError,
    GpuLodError,
    GpuLodWarning,
    InputError,
    LimitError,
    ShaderError,
)
from gpu_lod.jobs import Job, jobs
from gpu_lod.kernels import device as kernels
from gpu_lod.tables import Entry, Machine, Question, Table, Timed
from gpu_lod.timing import race

JOB = Question("mipmap", "mean", 3, "float32", 1, 2**20)
WAYS = ("torch", "gl compute", "gl fragment")
MACHINE = Machine("cpu", "a CPU", 2, "", "llvmpipe (LLVM 1, 256 bits)", "4.5 Mesa 1", True)
GAIN = entry(JOB, torch=(10, 1), gl_compute=(5, 1))
LOSS = entry(JOB, torch=(5, 1), gl_compute=(10, 1))

# A call of every verb that asks, small.
CALLS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "mipmap": lambda: (lod.mipmap, (noise(3, 40, 52),)),
    "mipmap max": lambda: (lod.mipmap, (noise(3, 40, 52), None, "max")),
    "hiz": lambda: (lod.hiz, (noise(1, 40, 52),)),
    "gaussian": lambda: (lod.gaussian, (noise(3, 40, 52), 3)),
    "laplacian": lambda: (lod.laplacian, (noise(3, 40, 52), 3)),
    "collapse": lambda: (lod.collapse, (lod.laplacian(noise(3, 40, 52), 3),)),
    "oriented_energy": lambda: (lod.oriented_energy, (noise(1, 40, 52), 3)),
    "feature_maps": lambda: (lod.feature_maps, (noise(3, 40, 52),)),
    "log_polar": lambda: (lod.log_polar, (texture(), (0.4, 0.6), 16, 32)),
    "inverse_log_polar": lambda: (lod.inverse_log_polar, (noise(3, 16, 32), (0.4, 0.6), (40, 52))),
    "foveate": lambda: (lod.foveate, (texture(), (0.4, 0.6))),
    "gather_patches": lambda: (lod.gather_patches, (texture(), [[0.4, 0.6, 0.7]], 5)),
    "cull": lambda: (lod.cull, (lod.hiz(noise(1, 40, 52)), 0.5)),
    "region_max": lambda: (lod.region_max, (lod.hiz(noise(1, 40, 52)).upload(), torch.tensor([[0.1, 0.1, 0.4, 0.3]]))),
    "region_min": lambda: (
        lod.region_min,
        (lod.hiz(noise(1, 40, 52), "min").upload(), torch.tensor([[0.1, 0.1, 0.4, 0.3]])),
    ),
}


def texture() -> lod.Pyramid:
    return lod.mipmap(noise(3, 40, 52)).upload()


def seeded(monkeypatch: pytest.MonkeyPatch, *seeds: Table) -> None:
    calibration.reload()
    monkeypatch.setattr(calibration, "_seeds", [*seeds])


def decide(gl: tables.GL | None = MACHINE.gl, question: Question = JOB, name: str = "a CPU") -> Any:
    """What is taken on a machine of that name, without a table of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "cpu", lambda: name)
        return calibration.decide(question, WAYS, HERE, 2, gl)


# -- what is looked up -------------------------------------------------------------------------------------------------


def test_the_nearest_measurement_within_reach_speaks() -> None:
    one = replace(GAIN, question=JOB._replace(work=2**18))
    table = Table(MACHINE, (one, GAIN))
    for octave, expected in ((16.9, None), (17, one), (18.9, one), (19.1, GAIN), (21, GAIN), (21.1, None)):
        assert table.nearest(JOB._replace(work=round(2**octave))) is expected, octave
    assert Table(MACHINE, (GAIN, one)).nearest(JOB._replace(work=2**19)) is one  # as far from both
    for other in ({"verb": "hiz"}, {"state": ""}, {"channels": 1}, {"dtype": "uint8"}):
        assert table.nearest(JOB._replace(**other)) is None, other


def test_single_images_and_batches_do_not_speak_for_each_other() -> None:
    batch = replace(GAIN, question=JOB._replace(batch=8))
    table = Table(MACHINE, (GAIN, batch))
    found = {count: table.nearest(JOB._replace(batch=count)) for count in (1, 2, 3, 16, 22, 23)}
    assert found == {1: GAIN, 2: None, 3: batch, 16: batch, 22: batch, 23: None}
    larger = replace(GAIN, question=JOB._replace(batch=32))
    table = Table(MACHINE, (batch, larger))
    assert [table.nearest(JOB._replace(batch=count)) for count in (12, 20)] == [batch, larger]


def test_between_two_sizes_the_way_that_is_fastest_at_both(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(GAIN, question=JOB._replace(work=2**16), at="a small job")
    for high, way in ((GAIN, "gl compute"), (LOSS, "torch")):
        seeded(monkeypatch, Table(MACHINE, (small, high)))
        verdict = decide(question=JOB._replace(work=2**18))
        assert verdict.way == way
        assert ("; faster at a job too, and this lies between" in verdict.reason) == (high is GAIN)
        assert ("has not been measured" in verdict.reason) == (high is LOSS), "sizes that disagree say nothing"
    lost = replace(LOSS, question=small.question)
    seeded(monkeypatch, Table(MACHINE, (lost, LOSS)))
    verdict = decide(question=JOB._replace(work=2**18))
    assert verdict.way == "torch" and "no other way is at a job too" in verdict.reason and "seeds" in verdict.reason
    assert "machines" not in verdict.reason
    far = replace(GAIN, question=JOB._replace(work=2**13))
    for entries, batch in (((far, GAIN), 1), ((GAIN,), 1), ((small, GAIN), 4)):
        assert Table(MACHINE, entries).around(JOB._replace(work=2**18, batch=batch)) == ()


def test_other_channels_and_dtypes_speak_where_none_of_the_own_kind_does(monkeypatch: pytest.MonkeyPatch) -> None:
    three, half = JOB._replace(verb="foveate", state=""), JOB._replace(verb="foveate", state="", dtype="float16")
    clear, little = ({"torch": (10, 0), "gl": (time, 0)} for time in (4.9, 5.1))

    def way(question: Question, *measured: tuple[Question, dict[str, Any]]) -> str:
        seeded(monkeypatch, Table(MACHINE, tuple(entry(job, **ways) for job, ways in measured)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibration, "cpu", lambda: "a CPU")
            verdict = calibration.decide(question, ("torch", "gl"), HERE, 2, MACHINE.gl)
        assert verdict is not None
        if "kind" in verdict.reason and measured[0][1] is little:
            assert verdict.reason.endswith("no clear gain for a job of another kind")
        return verdict.way

    for own in (three._replace(channels=1), three._replace(channels=4), half):
        assert way(own, (three, clear)) == "gl"
        assert way(own, (three, little)) == "torch", "twice as fast is asked for"
        assert way(own, (three, clear), (own, {"torch": (10, 0), "gl": (20, 0)})) == "torch"
        assert way(own, (three, {"torch": (10, 0), "gl": (20, 0)}), (own, little)) == "gl"
        small, large = (three._replace(work=three.work * share // 8) for share in (1, 64))
        assert way(own, (small, clear), (large, clear)) == "gl"
        assert way(own, (small, clear), (large, little)) == "torch"
    bfloat16 = three._replace(dtype="bfloat16")
    assert (
        way(bfloat16, (half, clear), (three, little)) == "gl"
        and way(bfloat16, (half, little), (three, clear)) == "torch"
    )
    assert way(bfloat16, (three, clear)) == "gl"
    assert way(three._replace(channels=2), (three, clear), (three._replace(channels=4), little)) == "gl"
    one, four = (three._replace(channels=count) for count in (1, 4))
    assert way(three, (one, clear), (four, little)) == "torch", "the nearest number of channels"
    for other in (three._replace(dtype="uint8"), three._replace(verb="hiz"), three._replace(channels=0)):
        assert way(other, (three, clear)) == "torch"
    assert way(three, (half, clear)) == "torch", "the smaller dtype does not speak for the larger one"


@pytest.mark.parametrize(
    ("torchs", "other", "taken"),
    [
        ((10, 0), (9, 0), True),
        ((10, 0), (9.53, 0), False),  # less than 5%
        ((10, 0), (9.51, 0), True),
        ((10, 2), (8, 1.9), True),
        ((10, 2), (8, 2.1), False),  # the middle halves meet
        ((10, 100), (1, 0.1), False),
    ],
)
def test_a_way_is_taken_only_where_it_clearly_gains(torchs: Any, other: Any, taken: bool) -> None:
    one = entry(JOB, torch=torchs, gl_compute=other)
    assert (calibration.taken(one) == "gl compute") == taken


@pytest.mark.parametrize(
    ("torchs", "other", "guess"),
    [
        ((10, 1), (5, 1), False),
        ((10, 1), (10, 1), False),  # whichever is taken
        ((10, 1.5), (8, 1.5), False),
        ((47, 266), (20, 30), True),  # torch is taken, for nothing is clear
        ((190, 306), (12, 20), True),  # it may be 32 ms against none
        ((10, 9), (4, 1), True),  # OpenGL is taken, and torch's may be 1 ms
        ((10, 3), (4, 1), False),
        ((10, 1), (60, 70), False),  # a way that lost in its first calls
        ((0.03, 0.02), (0.03, 0.02), True),
        ((0.01, 0.008), (0.01, 0.008), False),  # of some microseconds
    ],
)
def test_times_that_spread_are_a_guess(torchs: Any, other: Any, guess: bool) -> None:
    assert calibration.guessed(entry(JOB, torch=torchs, gl_compute=other)) == guess


def test_a_guess_counts_as_not_measured(cache: Path) -> None:
    image = noise(3, 40, 52)
    question = asked(lod.mipmap, image)
    calm = {"torch": Timed(10, 1), "gl compute": Timed(5, 1)}
    busy = {"torch": Timed(10, 30), "gl compute": Timed(5, 20)}

    def store(ways: dict[str, Timed], *weak: Question) -> str:
        tables.store(here(), [Entry(question, "a job", "2026-11-28", ways)], weak)
        calibration.reload()
        return lod.explain(lod.mipmap, image).reason

    assert "calibrated" not in store(busy), "the seeds are asked"
    assert "5 ms against 10 ms" in store(calm)
    assert "5 ms against 10 ms" in store(busy, question), "which took no other one's place"
    [table, *_] = calibration.in_force(calibration.host(HERE, torch.get_num_threads()))
    assert [one.ways for one in table.entries] == [calm]


def test_jobs_that_are_unsteady_are_told_and_take_no_place(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "guessed", lambda entry: False)
    first = calibrate(1, ["region_max"], quick=True)
    assert first.unsteady == []
    monkeypatch.setattr(calibration, "guessed", lambda entry: entry.question.verb == "region_max")
    report = calibrate(1, ["region_max", "hiz"], quick=True)
    assert [name.partition(",")[0] for name in report.unsteady] == ["region_max"]
    [(machine, measured)] = report.entries.items()
    kept = {one.question.verb: one for one in tables.read(report.paths[0]).entries}
    [before], [after] = first.entries[machine], [one for one in measured if one.question.verb == "region_max"]
    assert kept["region_max"] == rounded(before) != rounded(after) and "hiz" in kept
    printing.show_tables([Table(machine, tuple(measured))], new=True)
    printing.show_left_out([], report.unsteady, "")
    printing.show_left_out(["a: no time was left"] * 3, [], "", 2, 0.5)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("unsteady: as before") == 1 and "The times of 1 jobs spread too much" in printed
    assert "No time was left for the 3 least telling jobs of 5: --minutes 2 would do for all." in printed


def test_the_fastest_of_several_clear_ways() -> None:
    assert calibration.taken(entry(JOB, torch=(10, 1), gl_compute=(5, 1), gl_fragment=(4, 1))) == "gl fragment"
    assert calibration.taken(entry(JOB, gl_compute=(5, 1))) == "torch"  # beats nothing


def test_a_machine_that_nobody_measured_gains_only_where_all_seeds_do(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(MACHINE, name="another CPU", gl_driver="4.5 Mesa 2")
    seeded(monkeypatch, Table(MACHINE, (GAIN,)), Table(other, (GAIN,)))
    verdict = decide(name="a third")
    assert verdict.way == "gl compute" and "on 2 machines like this one (llvmpipe, seeds" in verdict.reason
    assert verdict.reason.startswith("5 ms against 10 ms for torch, measured at a job")
    assert verdict.figures == {"torch": 10, "gl compute": 5}
    assert decide(name="a third", gl=("a GPU", "4.6", False)).way == "torch"  # no machine of that kind
    seeded(monkeypatch, Table(MACHINE, (GAIN,)), Table(other, (LOSS,)))
    verdict = decide(name="a third")
    assert verdict.way == "torch" and verdict.reason.startswith("5 ms against 10 ms for gl (compute)")
    assert decide(name="a CPU").way == "gl compute"  # its own alone decide
    assert decide(name="another CPU", gl=other.gl).way == "torch"
    hardware = replace(MACHINE, name="another CPU", renderer="a GPU", software=False)
    seeded(monkeypatch, Table(MACHINE, (GAIN,)), Table(other, ()), Table(hardware, (LOSS,)))
    assert decide(name="a third").way == "gl compute"  # who did not measure it, or is of another kind, has no say


def test_of_two_ways_the_one_that_gains_on_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    both = entry(JOB, torch=(10, 1), gl_compute=(5, 1), gl_fragment=(2, 1))
    one = entry(JOB, torch=(10, 1), gl_compute=(5, 1), gl_fragment=(20, 1))
    seeded(monkeypatch, Table(MACHINE, (both,)), Table(replace(MACHINE, name="another"), (one,)))
    assert decide(name="a third").way == "gl compute"


def test_what_was_never_measured_runs_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded(monkeypatch, Table(MACHINE, (GAIN,)))
    verdict = decide(question=JOB._replace(work=2**30))
    assert verdict.way == "torch" and "has not been measured for CPU tensors" in verdict.reason
    monkeypatch.setattr(calibration, "_gpu", lambda index: "a GPU")
    monkeypatch.setattr(calibration, "nvidia", lambda: "600")
    cuda = torch.device("cuda", 0)
    verdict = calibration.decide(JOB, WAYS, cuda, 2, None)
    assert verdict is not None and verdict.way == "torch" and "cuda:0" in verdict.reason
    on_gpu = Machine("cuda", "a GPU", 0, "600", "a GPU", "4.6", False)
    seeded(monkeypatch, Table(on_gpu, (GAIN,)))
    assert calibration.decide(JOB, WAYS, cuda, 2, None) is None
    verdict = calibration.decide(JOB, WAYS, cuda, 2, on_gpu.gl)
    assert verdict is not None and verdict.way == "gl compute"
    verdict = calibration.decide(JOB, WAYS, cuda, 2, ("llvmpipe", "4.5", True))
    assert verdict is not None and verdict.way == "torch", "no seed is of such a machine"


def test_a_gpu_that_nobody_measured_goes_by_its_relatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """By those of its own name under another driver, or else by all GPUs, where all have to gain."""
    first = Machine("cuda", "one", 0, "600", "one/PCIe", "4.6 600", False)
    old, other = replace(first, driver="500", gl_driver="4.6 500"), replace(first, name="two", renderer="two/PCIe")
    both = entry(JOB, torch=(10, 1), gl_compute=(5, 1), cuda=(2, 0.1))
    kernel, shader = entry(JOB, torch=(10, 1), cuda=(5, 0.1)), entry(JOB, torch=(10, 1), gl_compute=(5, 1))
    on_cpu = Table(MACHINE, (LOSS,))

    def way(name: str, driver: str, *seeds: Table, question: Question = JOB) -> str:
        seeded(monkeypatch, on_cpu, *seeds)
        monkeypatch.setattr(calibration, "_gpu", lambda index: name)
        monkeypatch.setattr(calibration, "nvidia", lambda: driver)
        gl = f"{name}/PCIe", f"4.6 {driver}", False
        verdict = calibration.decide(question, (*WAYS, "cuda"), torch.device("cuda", 0), 2, gl)
        assert verdict is not None
        return verdict.way

    assert way("one", "600", Table(first, (LOSS,)), Table(old, (both,)), Table(other, (both,))) == "torch"
    assert way("one", "600", Table(first, (both,)), Table(old, (LOSS,))) == "cuda", "the very machine alone"
    assert way("one", "700", Table(first, (shader,)), Table(old, (both,)), Table(other, (LOSS,))) == "gl compute"
    assert way("three", "700", Table(first, (both,)), Table(other, (both,))) == "cuda"
    assert way("three", "700", Table(first, (both,)), Table(other, (kernel,))) == "cuda"
    assert way("three", "700", Table(first, (shader,)), Table(other, (kernel,))) == "torch"
    assert way("three", "700", Table(first, (both,)), Table(other, (LOSS,))) == "torch"
    far = replace(both, question=JOB._replace(work=2**30))
    assert way("one", "600", Table(first, (both,)), Table(other, (far,)), question=far.question) == "cuda"
    assert way("three", "700") == "torch", "a CPU's times say nothing of it"


def test_a_context_is_asked_for_only_where_opengl_may_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded(monkeypatch, Table(MACHINE, (GAIN,)))
    assert decide(gl=None) is None
    seeded(monkeypatch, Table(MACHINE, (LOSS,)))
    assert decide(gl=None).way == "torch"
    monkeypatch.setattr(calibration, "_gpu", lambda index: "a GPU")
    monkeypatch.setattr(calibration, "nvidia", lambda: "600")
    gpu = Machine("cuda", "a GPU", 0, "600", "a GPU", "4.6", False)
    for kernel, asks in ((4, False), (6, True), (20, True)):
        seeded(monkeypatch, Table(gpu, (entry(JOB, torch=(10, 1), gl_compute=(5, 1), cuda=(kernel, 0.1)),)))
        verdict = calibration.decide(JOB, (*WAYS, "cuda"), torch.device("cuda", 0), 2, None)
        assert (verdict is None) == asks, "where a kernel is faster yet, what OpenGL gains does not matter"
    calibration.reload()
    monkeypatch.setattr(dispatch, "context_for", lambda *_: pytest.fail("opened a context"))
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "_seeds", [])
        assert lod.explain(lod.mipmap, noise(3, 40, 52)).backend == "torch"
        lod.mipmap(noise(3, 40, 52))


def test_ways_that_a_verb_does_not_have_are_not_taken(cache: Path) -> None:
    question = asked(lod.mipmap, noise(3, 40, 52))
    tables.store(here(), [entry(question, torch=(10, 0.1), gl=(1, 0.1), gl_driver=(1, 0.1), nonsense=(1, 0.1))])
    calibration.reload()
    assert lod.explain(lod.mipmap, noise(3, 40, 52)).backend == "torch"
    assert lod.mipmap(noise(3, 40, 52)).generator == "torch"


def test_strips_are_no_pictures(cache: Path) -> None:
    """They may be as small as a picture that was measured, and wider than any texture."""
    fastest("gl fragment", lod.mipmap, noise(3, 40, 52))
    assert lod.explain(lod.mipmap, noise(3, 40, 52)).generator == "fragment"
    assert lod.explain(lod.mipmap, noise(3, 4, 520)).backend == "torch"


# -- what verbs make of it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_auto_follows_the_times_in_both_directions(name: str, cache: Path, ctx: lod.Context) -> None:
    verb, arguments = CALLS[name]()
    for way in dispatch.ways(asked(verb, *arguments).verb):
        fastest(way, verb, *arguments)
        chosen = lod.explain(verb, *arguments)
        assert " ".join(filter(None, [chosen.backend, chosen.generator])) == way
        assert chosen.figures[way] == 1 and "1 ms against 10 ms" in chosen.reason
        assert "on this machine (calibrated 2026-11-21)" in chosen.reason
        result = verb(*arguments)
        if isinstance(result, lod.Pyramid) and result.reduce in ("mean", "max", "min"):
            assert result.generator == (chosen.generator or "torch")
        elif isinstance(result, torch.Tensor):
            assert ctx.owns(result) == (chosen.backend == "gl")


AGAIN = ("mipmap max", "hiz")
"""Whose backward begins with the forward in torch; those of the others are of their own."""


@pytest.mark.parametrize("name", CALLS)
def test_a_cpu_that_makes_gradients_takes_opengl_where_that_still_gains(name: str, cache: Path) -> None:
    verb, (source, *others) = CALLS[name]()
    question = asked(verb, source, *others)
    way = next(way for way in dispatch.ways(question.verb) if way.startswith("gl"))
    none = name in ("cull", "region_max", "region_min")  # have no gradients
    for torchs, gains in ((2.5, name not in AGAIN), (1.5, none)):
        image = source.levels[0] if isinstance(source, lod.Pyramid) else source
        tables.store(
            here(), [Entry(question, "a job", "2026-11-27", {"torch": Timed(torchs, 0.01), way: Timed(1, 0.01)})]
        )
        calibration.reload()
        image.requires_grad_(False)
        assert lod.explain(verb, source, *others).backend == "gl"
        image.requires_grad_()
        chosen = lod.explain(verb, source, *others)
        assert chosen.backend == ("gl" if gains else "torch") and chosen.figures[way] == 1
        assert gains or "gradients are asked for" in chosen.reason
        with torch.no_grad():
            assert lod.explain(verb, source, *others).backend == "gl"


@pytest.mark.parametrize("name", CALLS)
def test_a_worker_takes_opengl_where_one_core_of_it_still_gains(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, arguments = CALLS[name]()
    question = asked(verb, *arguments)
    way = next(way for way in dispatch.ways(question.verb) if way.startswith("gl"))
    for torchs, backend in ((1.35, "gl"), (1.25, "torch")):
        tables.store(
            here(), [Entry(question, "a job", "2026-11-30", {"torch": Timed(torchs, 0.01), way: Timed(1, 0.01)})]
        )
        calibration.reload()
        with monkeypatch.context() as patched:
            patched.setattr(torch.utils.data, "get_worker_info", object)
            chosen = lod.explain(verb, *arguments)
            assert chosen.backend == backend and chosen.figures[way] == 1
            assert ("in a DataLoader's worker" in chosen.reason) == (backend == "torch")
        assert lod.explain(verb, *arguments).backend == "gl"


def test_every_verb_that_chooses_is_in_that_test_and_is_calibrated() -> None:
    verbs = {verb.__name__ for verb in dispatch._choosers}
    assert {CALLS[name]()[0].__name__ for name in CALLS} == verbs
    assert {job.verb.__name__ for job in jobs(None, quick=False)} == verbs - {"region_min"}  # as region_max


@pytest.mark.parametrize("verb", [lod.gaussian, lod.laplacian])
def test_ragged_rows_have_times_of_their_own(verb: Callable[..., Any], unseeded: Path) -> None:
    """Their shaders take twice as long there; those of oriented_energy do not mind."""
    fastest("gl", verb, noise(3, 64, 64))
    fastest("gl", lod.oriented_energy, noise(3, 64, 64))
    assert lod.explain(verb, noise(3, 64, 64)).backend == "gl"
    assert lod.explain(verb, noise(3, 64, 60)).backend == "torch"
    assert lod.explain(lod.oriented_energy, noise(3, 64, 60)).backend == "gl"


def values(result: Any) -> list[torch.Tensor]:
    if isinstance(result, lod.Pyramid):
        return list(result.levels)
    if isinstance(result, lod.Culled):
        return [result.mask, result.indices]
    return [result] if isinstance(result, torch.Tensor) else [x for part in result for x in values(part)]


@contextmanager
def refused_shaders(ctx: lod.Context) -> Iterator[None]:
    """A driver that compiles none."""
    real = shaders.source

    def broken(name: str, **defines: object) -> shaders.Source:
        source = real(name, **defines)
        return dataclasses.replace(source, text=source.text + "no such thing;")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctx.programs, "_cache", {})
        patch.setattr(shaders, "source", broken)
        yield


@pytest.mark.parametrize("name", CALLS)
def test_auto_goes_on_where_a_driver_refuses_the_shader(
    name: str, cache: Path, ctx: lod.Context, sample_error: float
) -> None:
    verb, arguments = CALLS[name]()
    expected = values(verb(*arguments, backend="torch"))
    fastest(dispatch.ways(asked(verb, *arguments).verb)[1], verb, *arguments)
    with refused_shaders(ctx):
        with pytest.warns(GpuLodWarning, match="goes on in plain torch"):
            found = verb(*arguments)
        torch.testing.assert_close(values(found), expected)
        chosen = lod.explain(verb, *arguments)
        assert chosen.backend == "torch" and "failed before" in chosen.reason
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # told once
            torch.testing.assert_close(values(verb(*arguments)), expected)
        with pytest.raises(ShaderError, match="does not compile"):
            verb(*arguments, backend="gl")
    calibration.reload()
    assert lod.explain(verb, *arguments).backend == "gl"
    torch.testing.assert_close(values(verb(*arguments)), expected, rtol=1e-4, atol=1e-4 + sample_error)


def test_plans_and_graphs_go_on_too(cache: Path, ctx: lod.Context) -> None:
    image = noise(3, 40, 52)
    fastest("gl compute", lod.mipmap, image)
    with refused_shaders(ctx), pytest.warns(GpuLodWarning, match="goes on"):
        planned = lod.plan(lod.mipmap, image)
    other = noise(3, 40, 52) + 1
    for found in (planned(other), torch.compile(lambda x: lod.mipmap(x), backend="eager", fullgraph=True)(other)):
        torch.testing.assert_close(values(found), values(lod.mipmap(other, backend="torch")))


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [(lod.log_polar, ((0.4, 0.6), 600, 32)), (lod.gather_patches, (torch.rand(600, 3).numpy(), 4))],
    ids=["log_polar", "gather_patches"],
)
def test_auto_goes_on_beyond_a_limit(
    verb: Callable[..., Any], arguments: tuple[Any, ...], cache: Path, restored_limits: lod.Context
) -> None:
    source = texture()
    fastest(dispatch.ways(verb.__name__)[1], verb, source, *arguments)
    restored_limits.limits.storage_bytes = 2048
    with pytest.raises(LimitError):
        verb(source, *arguments, backend="gl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that is nobody's fault
        found = verb(source, *arguments)
    assert torch.equal(found, verb(source, *arguments, backend="torch"))
    assert lod.explain(verb, source, *arguments).backend == "gl", "fewer would do"
    places, rest = torch.as_tensor(arguments[0], dtype=torch.float32), arguments[1:]
    planned = lod.plan(lambda where: verb(source, where, *rest), places)
    assert torch.equal(planned(places / 2), verb(source, places / 2, *rest, backend="torch"))


def test_what_torch_cannot_either_raises_what_was_in_the_way(cache: Path, ctx: lod.Context) -> None:
    image = noise(3, 40, 52)
    fastest("gl", lod.feature_maps, image)
    with refused_shaders(ctx), pytest.raises(ShaderError):
        lod.feature_maps(image, as_texture=True)


def test_a_generator_asked_for_by_name_raises(cache: Path, ctx: lod.Context) -> None:
    with refused_shaders(ctx), pytest.raises(ShaderError):
        lod.mipmap(noise(3, 40, 52), generator="compute")


DIRECT = ["mipmap", "hiz", "gaussian", "laplacian", "collapse", "oriented_energy", "inverse_log_polar", "cull"]


@pytest.mark.parametrize("name", DIRECT)
def test_what_no_shader_can_is_asked_before_the_times(name: str, cache: Path) -> None:
    verb, arguments = CALLS[name]()
    fastest(dispatch.ways(asked(verb, *arguments).verb)[1], verb, *arguments)
    said: list[dispatch.Choice] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        wrapped = lod.Pyramid((x, *arguments[0].levels[1:]), arguments[0].reduce) if name in ("collapse", "cull") else x
        said.append(lod.explain(verb, wrapped, *arguments[1:]))
        return x.sum()

    image = arguments[0][0] if name in ("collapse", "cull") else arguments[0]
    torch.func.grad(inside)(image)
    assert said[0].backend == "torch" and "torch.func" in said[0].reason


def test_the_same_question_has_the_same_answer(cache: Path) -> None:
    image = noise(3, 40, 52)
    fastest("gl compute", lod.mipmap, image)
    first = lod.explain(lod.mipmap, image)
    calibration.reload()
    assert lod.explain(lod.mipmap, image) == first == lod.explain(lod.mipmap, image)
    assert hash(first) == hash(lod.explain(lod.mipmap, image))


def test_looking_up_touches_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [CALLS[name]() for name in ("mipmap", "foveate", "feature_maps")]
    fastest("gl compute", calls[0][0], *calls[0][1])
    for verb, arguments in calls:
        lod.explain(verb, *arguments)

    def touched(*args: Any, **_: Any) -> NoReturn:
        raise AssertionError(f"touched {args}")

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "decide", touched)
        for verb, arguments in calls:
            lod.explain(verb, *arguments)
    for module, names in ((builtins, ["open"]), (os, ["open", "stat", "scandir", "listdir"]), (json, ["loads"])):
        for name in names:
            monkeypatch.setattr(module, name, touched)
    monkeypatch.setattr(Path, "read_text", touched)
    for verb, arguments in calls:
        lod.explain(verb, *arguments)
    lod.explain(lod.mipmap, noise(3, 400, 520))  # nor at another size
    calibration.reload()
    with pytest.raises(AssertionError, match="touched"):  # so that the lines above could have failed
        lod.explain(*[calls[0][0], *calls[0][1]])


def test_importing_reads_no_table() -> None:
    code = """
        import sys
        seen = []
        sys.addaudithook(lambda event, args: seen.append(str(args[0])) if event == "open" else None)
        import gpu_lod
        print([name for name in seen if name.endswith(".json") or "cpuinfo" in name], "platformdirs" in sys.modules)
        gpu_lod.explain(gpu_lod.mipmap, __import__("torch").zeros(1, 8, 8))
        print(any(name.endswith(".json") for name in seen))
    """
    assert scripts.succeed(code).splitlines() == ["[] False", "True"]


# -- files -------------------------------------------------------------------------------------------------------------


def put(cache: Path, text: str | bytes) -> Path:
    """A file in the place of this machine's table."""
    path = tables.path_of(here())
    assert path is not None and path.is_relative_to(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    calibration.reload()
    return path


def valid() -> dict[str, Any]:
    return Table(here(), (GAIN,)).as_dict()


def test_a_table_comes_back_as_it_was_stored(cache: Path) -> None:
    path = tables.store(here(), [GAIN])
    assert tables.read(path) == Table(here(), (GAIN,), path)
    newer = replace(LOSS, date="2027-01-01")
    other = replace(GAIN, question=JOB._replace(work=7))
    tables.store(here(), [other, newer])
    assert tables.read(path).entries == (other, newer)  # the last measurement of a job
    assert [one.name for one in path.parent.iterdir() if one.name != ".lock"] == [path.name]


BROKEN: dict[str, Callable[[], str | bytes]] = {
    "empty": lambda: "",
    "truncated": lambda: json.dumps(valid())[:-20],
    "bytes": lambda: b"\xff\xfe\x00",
    "a list": lambda: "[]",
    "deep": lambda: "[" * 100_000,
    "another version": lambda: json.dumps(valid() | {"format": 2}),
    "version true": lambda: json.dumps(valid() | {"format": True}),
    "no version": lambda: json.dumps({"entries": []}),
    "no machine": lambda: json.dumps(valid() | {"machine": None}),
    "another device": lambda: json.dumps(valid() | {"machine": {**valid()["machine"], "name": "another"}}),
    "another driver": lambda: json.dumps(valid() | {"machine": {**valid()["machine"], "gl_driver": "another"}}),
    "no time": lambda: json.dumps(valid()).replace("[5, 1]", "[0, 1]"),
    "no number": lambda: json.dumps(valid()).replace("[5, 1]", '["5", 1]'),
    "NaN": lambda: json.dumps(valid()).replace("[5, 1]", "[NaN, 1]"),
    "endless": lambda: json.dumps(valid()).replace("[5, 1]", "[5, Infinity]"),
    "huge": lambda: json.dumps(valid()).replace("[5, 1]", f"[{10**400}, 1]"),
    "negative spread": lambda: json.dumps(valid()).replace("[5, 1]", "[5, -1]"),
    "no torch": lambda: json.dumps(valid()).replace('"torch"', '"tprch"'),
    "no list of entries": lambda: json.dumps(valid() | {"entries": {}}),
    "work 0": lambda: json.dumps(valid()).replace(str(2**20), "0"),
    "a number for a date": lambda: json.dumps(valid()).replace(f'"{GAIN.date}"', "7"),
    "work true": lambda: json.dumps(valid()).replace(str(2**20), "true"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_table_is_ignored_with_one_warning_and_rebuilt(name: str, cache: Path) -> None:
    path = put(cache, BROKEN[name]())
    image = noise(3, 40, 52)
    with pytest.warns(CalibrationWarning) as warned:
        before = lod.explain(lod.mipmap, image)
        lod.mipmap(image)
        lod.explain(lod.hiz, image)
    assert len(warned) == 1, [str(one.message) for one in warned]
    assert str(path) in str(warned[0].message) and "`gpu-lod calibrate`" in str(warned[0].message)
    assert before.backend == "torch"
    fastest("gl compute", lod.mipmap, image)
    assert lod.explain(lod.mipmap, image).generator == "compute"
    assert tables.read(path).machine == here()


@pytest.mark.parametrize(("text", "found"), [('{"format": 99}', "99"), ("{}", "None"), ("[]", "None")])
def test_another_format_is_told(text: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"has format {found}, and this version reads {tables.FORMAT}"):
        tables.parse(text)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_is_ignored(kind: str, cache: Path) -> None:
    path = put(cache, "")
    path.unlink()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path)}[kind]()
    with pytest.warns(CalibrationWarning, match="gpu-lod calibrate"):
        assert lod.explain(lod.mipmap, noise(3, 40, 52)).backend == "torch"


def test_a_valid_file_warns_of_nothing(cache: Path) -> None:
    put(cache, json.dumps(valid()))
    lod.explain(lod.mipmap, noise(3, 40, 52))  # warnings are errors here


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_raise_from_a_verb(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    unharmed(tmp_path_factory, text)


@given(st.data())
def test_no_table_with_a_changed_value_raises_from_a_verb(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Some are tables still, of other times or ways."""
    table: Any = Table(
        here(), (entry(asked(lod.mipmap, noise(3, 40, 52)), torch=(5, 1), gl_compute=(1, 0.1)),)
    ).as_dict()
    node: Any = table
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    if data.draw(st.booleans()):
        del node[key]
    else:
        node[key] = data.draw(json_values)
    unharmed(tmp_path_factory, json.dumps(table).encode())


def unharmed(factory: pytest.TempPathFactory, text: bytes) -> None:
    """Verbs run, whatever that file in the place of the table holds."""
    with pytest.MonkeyPatch.context() as patch:
        folder = factory.mktemp("cache")
        patch.setenv("GPU_LOD_CACHE", str(folder))
        put(folder, text)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            image = noise(3, 40, 52)
            lod.explain(lod.mipmap, image)
            lod.mipmap(image)
        assert {one.category for one in said} <= {CalibrationWarning} and len(said) <= 1
    calibration.reload()


def test_folders_that_are_not_there_and_no_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(3, 40, 52)
    for value in (tmp_path / "none" / "yet", tmp_path):
        monkeypatch.setenv("GPU_LOD_CACHE", str(value))
        calibration.reload()
        lod.explain(lod.mipmap, image)
        assert fastest("gl compute", lod.mipmap, image) and lod.explain(lod.mipmap, image).backend == "gl"
    monkeypatch.setenv("GPU_LOD_CACHE", "off")
    calibration.reload()
    assert lod.explain(lod.mipmap, image).backend == "torch"
    with pytest.raises(InputError, match="GPU_LOD_CACHE"):
        tables.store(here(), [GAIN])
    with pytest.raises(InputError, match="GPU_LOD_CACHE"):  # and before anything is measured
        calibrate(1, progress=lambda *_: pytest.fail("measured"))
    assert tables.forget() == []
    monkeypatch.setenv("GPU_LOD_CACHE", "OFF")
    assert tables.folder() is None
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPU_LOD_CACHE", "~/times")  # as it comes from a quoted line
    assert tables.folder() == tmp_path / "times" / "calibration"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for unset in (lambda: monkeypatch.setenv("GPU_LOD_CACHE", ""), lambda: monkeypatch.delenv("GPU_LOD_CACHE")):
        unset()
        assert tables.folder() == tmp_path / "home" / "gpu_lod" / "calibration"
    calibration.reload()


@pytest.mark.parametrize("old", [False, True])
def test_a_user_without_a_home(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a number that no account has: nothing is kept, and verbs run."""
    import platformdirs

    def nowhere(*names: str, **how: bool) -> str:
        if old:
            return "~/.cache/gpu_lod"
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(platformdirs, "user_cache_dir", nowhere)
    monkeypatch.delenv("GPU_LOD_CACHE", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    calibration.reload()
    lod.mipmap(noise(3, 40, 52))
    assert tables.folder() is None
    with pytest.raises(InputError, match="no home, so nothing is kept"):
        tables.store(here(), [GAIN])
    calibration.reload()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPU_LOD_CACHE", str(tmp_path / "file"))
    calibration.reload()
    lod.explain(lod.mipmap, noise(3, 40, 52))
    report = Report()
    with pytest.raises(FileError, match="GPU_LOD_CACHE"):
        calibrate(1, ["region_max"], quick=True, report=report, progress=lambda *_: pytest.fail("measured"))
    assert not report.entries
    calibration.reload()


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_without_permission_nothing_is_measured(tmp_path: Path) -> None:
    """Neither where no folder can be made, nor in one that was calibrated in before."""
    closed, bare, used, foreign = (tmp_path / name for name in ("closed", "bare", "used", "foreign"))
    for folder in (closed, bare / "calibration", used / "calibration", foreign / "calibration"):
        folder.mkdir(parents=True)
    for folder in (used, foreign):
        for lock in (".measuring", ".lock"):
            (folder / "calibration" / lock).touch()
    shut = {closed: 0o500, bare / "calibration": 0o500, used / "calibration": 0o500}
    for path, mode in {**shut, foreign / "calibration" / ".lock": 0o400}.items():
        path.chmod(mode)
    said = scripts.succeed(f"""
        import ctypes, os
        libc = ctypes.CDLL(None)
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, sets) == 0
        sets[0] &= ~0b110  # root, too, needs permission now, to write and to read
        assert libc.capset(header, sets) == 0
        from gpu_lod.calibrate import calibrate
        from gpu_lod.errors import FileError
        for folder in {[str(closed), str(bare), str(used), str(foreign)]}:
            os.environ["GPU_LOD_CACHE"] = folder
            try:
                calibrate(1, ["region_max"], quick=True, progress=lambda *_: print("measured"))
            except FileError as error:
                print(error)
    """)
    for path in shut:
        path.chmod(0o700)
    assert said.count("Permission denied") == said.count("Set GPU_LOD_CACHE") == len(said.splitlines()) == 4, said


def test_a_folder_that_is_lost_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is in the report."""
    monkeypatch.setenv("GPU_LOD_CACHE", str(tmp_path / "cache"))
    calibration.reload()
    report = Report()

    def lose(*_: Any) -> None:
        if report.entries and (tmp_path / "cache").is_dir():
            shutil.rmtree(tmp_path / "cache")
            (tmp_path / "cache").write_text("")

    with pytest.raises(FileError, match="GPU_LOD_CACHE"):
        calibrate(1, ["region_max"], quick=True, report=report, progress=lose)
    assert [one.question.verb for entries in report.entries.values() for one in entries] == ["region_max"]
    calibration.reload()


WRITER = """
    import sys
    from gpu_lod import tables
    from gpu_lod.tables import Entry, Machine, Question, Timed
    machine = Machine("cpu", "a CPU", 2, "", "llvmpipe", "4.5", True)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(1, 41):
        question = Question("mipmap", sys.argv[1], 3, "float32", 1, number)
        path = tables.store(machine, [Entry(question, "a job", "2026-11-21", {"torch": Timed(number, 0.0)})])
        assert any(entry.question == question for entry in tables.read(path).entries)
"""


def test_processes_that_calibrate_at_once_lose_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "GPU_LOD_CACHE": str(tmp_path)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd="/",
        )
        for name in "ab"
    ]  # fmt: skip
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for writer in writers:
            _, errors = writer.communicate(timeout=120)
            assert writer.returncode == 0, errors
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    [path] = (tmp_path / "calibration").glob("*.json")
    found = {(one.question.state, one.question.work) for one in tables.read(path).entries}
    assert found == {*itertools.product("ab", range(1, 41))}
    assert sorted(one.name for one in path.parent.iterdir()) == [".lock", path.name]


def test_a_second_process_measures_nothing_while_one_does(cache: Path) -> None:
    said = []

    def second(*_: Any) -> None:
        code = "from gpu_lod.calibrate import calibrate; calibrate(1, ['region_max'], quick=True)"
        said.append(scripts.run(code).stderr)

    report = calibrate(1, ["region_max"], quick=True, progress=second)
    assert report.entries and all("CalibrationBusyError: another process calibrates" in one for one in said)
    second()  # it is free again
    assert said[-1] == ""


def test_times_of_another_driver_are_ignored_with_one_warning(cache: Path) -> None:
    image = noise(3, 40, 52)
    questions = [asked(verb, image) for verb in (lod.mipmap, lod.hiz)]
    old = replace(here(), gl_driver="4.5 Mesa 0")
    path = tables.store(old, [entry(question, torch=(10, 1), gl_compute=(1, 0.1)) for question in questions])
    calibration.reload()
    with pytest.warns(CalibrationWarning, match="another driver, .*4.5 Mesa 0.*`gpu-lod calibrate`") as warned:
        assert lod.explain(lod.mipmap, image).backend == lod.explain(lod.hiz, image).backend == "torch"
    assert len(warned) == 1 and str(path) in str(warned[0].message)
    fastest("gl compute", lod.mipmap, image)
    assert lod.explain(lod.mipmap, image).backend == "gl"  # and no warning: both drivers have their files
    assert path.exists()


def test_resetting_removes_the_tables_alone(cache: Path) -> None:
    path = put(cache, json.dumps(valid()))
    others = cache / "else.json", path.with_name("camera.json")
    for other in others:
        other.write_text("{}")
    assert tables.forget() == [path]
    assert not path.exists() and all(other.exists() for other in others)
    assert tables.forget() == []


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_every_way_of_a_job_is_measured_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "guessed", lambda entry: False)  # this machine may be busy
    steps: list[tuple[int, int, str]] = []
    report = calibrate(1, ["hiz", "log_polar"], quick=True, progress=lambda *step: steps.append(step))
    [(machine, entries)] = report.entries.items()
    assert machine == here() and report.left_out == []
    for one in entries:
        assert one.ways.keys() == {*dispatch.ways(one.question.verb)}
        assert {"torch", "gl compute", "gl fragment"} <= one.ways.keys()
    assert [step[:2] for step in steps] == [(done, 9) for done in range(10)]
    assert report.paths == [tables.path_of(machine)]
    assert [*tables.read(report.paths[0]).entries] == sorted(map(rounded, entries), key=lambda one: one.question)
    image = noise(1, 224, 224)
    chosen = lod.explain(lod.hiz, image)
    assert "on this machine (calibrated" in chosen.reason and chosen.figures.keys() == set(entries[-1].ways)


def rounded(one: Entry) -> Entry:
    return replace(one, ways={name: Timed(*(round(ms, 5) for ms in way)) for name, way in one.ways.items()})


def test_what_was_measured_before_ctrl_c_is_kept(cache: Path) -> None:
    def stop(number: int, of: int, what: str) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(1, ["region_max", "hiz"], quick=True, progress=stop)
    path = tables.path_of(here())
    assert path is not None and [one.question.verb for one in tables.read(path).entries] == ["region_max"]


def test_calibrating_mends_a_file_that_is_no_table_without_a_word(cache: Path) -> None:
    path = put(cache, "{")
    calibrate(1, ["region_max"], quick=True)  # a warning is an error here
    assert [one.question.verb for one in tables.read(path).entries] == ["region_max"]


def test_jobs_for_which_no_time_is_left_are_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 40)
    monkeypatch.setattr("gpu_lod.calibrate.time.monotonic", lambda: float(next(clock)))
    report = calibrate(1, ["region_max", "hiz", "cull"], quick=True)
    assert [len(entries) for entries in report.entries.values()] == [1]
    assert len(report.left_out) == 2 and all(job.endswith("no time was left") for job in report.left_out)


def test_a_job_that_cannot_be_done_is_told_and_the_others_are_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: lod.Pyramid) -> lod.Pyramid:
        raise GpuLodError("no texture today")

    monkeypatch.setattr(lod.Pyramid, "upload", broken)
    report = calibrate(1, ["region_max", "hiz"], quick=True)
    assert [one.question.verb for entries in report.entries.values() for one in entries] == ["hiz"]
    [job] = report.left_out
    assert job.startswith("region_max") and job.endswith("no texture today")


def test_a_driver_that_gets_it_wrong_is_not_gone_by(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "guessed", lambda entry: False)  # this machine may be busy
    earlier = calibrate(1, ["hiz"], quick=True)
    [(machine, [before])] = earlier.entries.items()
    assert "gl registers" in before.ways and earlier.wrong == []
    larger = replace(before, question=before.question._replace(work=64 * before.question.work))
    tables.store(machine, [larger])
    rightly = several_levels.reduce_chain
    monkeypatch.setattr(several_levels, "reduce_chain", lambda ctx, chain, reduce, one: rightly(ctx, chain, "min", one))
    report = calibrate(1, ["hiz", "region_max"], quick=True)
    [wrong] = report.wrong
    assert re.fullmatch(
        r"hiz, 1 x 1 x 224 x 224 float32, gl \(registers\): level 1: [0-9.]+ at most, where values are up to 1", wrong
    )
    [(_, entries)] = report.entries.items()
    assert len(entries) == 2 and all("gl registers" not in one.ways and "torch" in one.ways for one in entries)
    kept = tables.read(report.paths[0]).entries
    assert len(kept) == 3 and all("gl registers" not in one.ways for one in kept)
    assert sum("gl single-pass" in one.ways for one in kept) == 2
    printing.show_wrong(report.wrong)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"wrong: {wrong}" in printed and "what this driver makes differs from torch's" in printed


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf])
def test_time_is_needed(minutes: float, cache: Path) -> None:
    with pytest.raises(InputError, match="minutes"):
        calibrate(minutes)


def test_unknown_verbs(cache: Path) -> None:
    with pytest.raises(InputError, match=r"no mipmaps to measure; expected collapse, "):
        calibrate(1, ["mipmaps"])


def test_cuda_tensors_are_not_asked_for_where_there_are_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaUnavailableError, match="no CUDA"):
        calibrate(1, devices=["cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    asked: list[torch.device] = []

    def measure(job: Any, device: torch.device, *_: Any, **__: Any) -> Any:
        asked.append(device)
        raise GpuLodError("measured enough")

    monkeypatch.setattr(sys.modules["gpu_lod.calibrate"], "_measure", measure)
    calibrate(1, ["hiz"], quick=True, devices=["cuda"])
    calibrate(1, ["hiz"], quick=True, devices=["cuda:0"])
    assert {*asked} == {torch.device("cuda", 0), torch.device("cuda", 1)}
    with pytest.raises(CudaUnavailableError, match="there is no CUDA device 2"):
        calibrate(1, devices=["cuda:2"])


def test_the_kernels_are_a_way_for_cuda_tensors_alone() -> None:
    assert "cuda" in dispatch.ways("mipmap", cuda=True) and "cuda" not in dispatch.ways("mipmap")
    assert "cuda" not in dispatch.ways("gaussian", cuda=True)


def test_kernels_sample_what_is_no_texture(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """So times decide it, as the benchmark's rows say them; without kernels images have times of their own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import seeds

    image, fixation = noise(1, 3, 1024, 1024), (0.4, 0.6)
    sites = lod.cortical_sites(fixation, 273, (1024, 1024))
    calls: tuple[tuple[Any, ...], ...] = (
        (lod.log_polar, fixation, 256, 512),
        (lod.gather_patches, sites),
        (lod.gather_patches, sites.floor()),
    )
    words = "", "273 x 14 x 14, cortical sites; ", "273 x 14 x 14, sites on the grid; "
    row = {"batch": 1, "channels": 3, "dtype": "float32", "size": [1024, 1024]}
    kernels.usable.cache_clear()
    for (verb, *arguments), note in zip(calls, words, strict=True):
        named = row | {"verb": verb.__name__}
        for source in (image, lod.mipmap(image, backend="torch")):
            [question] = seeds._questions(named | {"note": note + "from a pyramid that is no texture yet"})
            assert asked(verb, source, *arguments) == question and question.state.endswith("no texture yet")
            assert not seeds._questions(named | {"note": note + "from an image"})
    kernels.usable.cache_clear()
    monkeypatch.setattr(kernels, "KIND", "cuda")
    pyramid = lod.mipmap(image, backend="torch")
    for source, many in ((image, 2), (pyramid, 0)):
        with calibration.hearing() as questions:
            assert {lod.explain(verb, source, *arguments).backend for verb, *arguments in calls} == {"torch"}
        assert len(questions) == many and all(question.state.startswith("an image") for question in questions)


def test_jobs_of_cuda_tensors_are_left_out_on_a_cpu(cache: Path) -> None:
    found = [job for job in jobs(["log_polar", "gather_patches"], quick=True) if job.tensors == ("cuda",)]
    assert len(found) == 6 and all(job.at.endswith("no texture yet") for job in found)
    report = calibrate(1, ["log_polar"], quick=True)
    assert not report.left_out
    assert not [one for entries in report.entries.values() for one in entries if "no texture" in one.question.state]
    for job in found:  # they are samplers' jobs, here too
        source, *_ = job.prepare(torch.device("cpu"))()
        assert isinstance(source, lod.Pyramid) and not source.is_texture


def test_no_job_answers_what_another_one_does() -> None:
    """It would replace its times: those of a pyramid's samplers depend on what they make alone."""
    asked_before: dict[Any, str] = {}
    for job in jobs(["log_polar", "gather_patches", "mipmap"], quick=False):
        if job.at.startswith("1 x 3") and "float32" in job.at and NO_TEXTURE not in job.at:
            arguments = job.prepare(HERE)()
            question = asked(job.verb, *arguments)
            assert question not in asked_before, (job.at, asked_before[question])
            asked_before[question] = job.at
    assert len(asked_before) == 4 * 11


@pytest.mark.parametrize(("load", "cores", "words"), [(2.2, 2, "a load of 2.2 on 2 cores"), (2.2, 8, ""), (0.9, 2, "")])
def test_a_machine_that_is_at_work_is_told(
    load: float, cores: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert timing.at_work() == words
    steady, other = (Row("a", "hiz", "compute", "8 x 8", 1, iqr, 2, 0, "torch", 0, 0) for iqr in (0.1, 0.9))
    printing.show_rows([steady, steady, other], timing.at_work())
    printed = " ".join(capsys.readouterr().out.split())
    assert "GL is faster in 2 of 3 rows, slower in 0, unsteady in 1." in printed
    assert (f"other things to do ({words})" in printed) == bool(words)


def test_tables_are_whole_on_narrow_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(printing, "_console", lambda: Console(file=out, width=40, highlight=False))
    row = Row("a-picture", "mipmap", "single-pass", "512 x 512 x 3", 1, 0, 2, 0, "interpolate bilinear", 0.5, 0)
    printing.show_rows([row], "")
    printing.show_tables([Table(MACHINE, (dataclasses.replace(GAIN, at="1 x 3 x 512 x 512 float32, of many words"),))])
    lines = out.getvalue().splitlines()
    assert any("a-picture" in x and "single-pass" in x and "interpolate bilinear" in x for x in lines)
    verb = GAIN.question.verb
    assert "…" not in out.getvalue() and any(verb in x and "1 x 3 x 512 x 512" in x for x in lines)


def test_pauses_do_not_take_the_time_of_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def raced(sides: Any, most: int, **how: Any) -> dict[str, Any]:
        given.append(most)
        return {}

    monkeypatch.setattr("gpu_lod.calibrate.race", raced)
    image = noise(1, 1, 24, 24)
    job = Job(lod.hiz, "a job", lambda _: lambda: (image,))
    for seconds in (0.0, 1.0, 60.0):
        _measure(job, HERE, seconds, quick=False)
    assert given[0] == 12 < given[1] <= given[2] == 40


def test_cuda_tensors_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for them here; a GPU's tests are in test_gpu."""
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(calibration, "_gpu", lambda index: "a GPU")
    monkeypatch.setattr(calibration, "nvidia", lambda: "600")
    device, image = torch.device("cuda", 0), noise(1, 1, 24, 24)
    job = Job(lod.hiz, "a job", lambda _: lambda: (image,))
    machine, one, wrong = _measure(job, device, 0.1, quick=True)
    assert not wrong and machine == Machine("cuda", "a GPU", 0, "600", "", "", False)
    assert one.ways.keys() == {*dispatch.ways("hiz")}
    assert len(waits) > 8 * 3 and {*waits} == {device}


def test_on_a_gpu_every_call_is_waited_for() -> None:
    order: list[str] = []

    def clock(side: Callable[[], object]) -> float:
        side()
        order.append("|")
        return 1.0

    race({"a": lambda: order.append("a")}, seconds=0, fewest=4, pause=0, clock=clock)
    assert "".join(order) == "a|" * 7


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_the_package_holds_seeds_that_are_tables() -> None:
    calibration.reload()
    seeds = calibration._of_package()
    assert len(seeds) >= 2 and all(seed.entries and seed.path is None for seed in seeds)
    known = {verb.__name__ for verb in dispatch._choosers}
    for one in itertools.chain.from_iterable(seed.entries for seed in seeds):
        assert one.question.dtype in ("uint8", "float16", "bfloat16", "float32"), one
        assert one.question.verb in known and "torch" in one.ways
    for seed in seeds:
        cuda = seed.machine.tensors == "cuda"
        assert all({*one.ways} <= {*dispatch.ways(one.question.verb, cuda=cuda)} for one in seed.entries)


def test_seeds_are_what_the_script_makes_of_the_committed_results(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import rows
    import seeds

    for path in seeds.results():
        jsonschema.validate(seeds.load(path), rows.SCHEMA)
    made = {path.name: path.read_text() for path in seeds.write(tmp_path)}
    shipped = {file.name: file.read_text() for file in resources.files("gpu_lod").joinpath("data").iterdir()}
    assert made == shipped, "run python bench/seeds.py"
    found = [tables.parse(text).machine for text in made.values()]
    measured = {seeds.table(seeds.load(path)).machine for path in seeds.results()}
    measured |= {tables.parse(path.read_text()).machine for path in seeds.calibrated()}
    assert len({*found}) == len(found) and {*found} == measured


def test_of_calibrations_and_results_the_latest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one day the result; of no day before a verb became much faster."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import seeds

    def of(machine: Machine, *entries: tuple[int, str, float]) -> Table:
        """(work, date, torch's milliseconds)"""
        return Table(
            machine,
            tuple(Entry(JOB._replace(work=work), "", date, {"torch": Timed(ms, 0)}) for work, date, ms in entries),
        )

    monkeypatch.setattr(seeds, "SINCE", {JOB.verb: "2026-01-02"})
    calibration = of(MACHINE, (1, "2026-01-01", 1), (2, "2026-01-02", 2), (3, "2026-01-03", 3), (4, "2026-01-04", 4))
    result = of(MACHINE, (2, "2026-01-03", 20), (3, "2026-01-03", 30), (4, "2026-01-03", 40), (5, "2026-01-03", 50))
    other = of(replace(MACHINE, gl_driver="another"), (3, "2026-01-05", 300))
    one, two = seeds.merged([calibration, other], [result])
    assert (one.machine, two) == (MACHINE, other)
    assert {entry.question.work: entry.ways["torch"].median_ms for entry in one.entries} == {2: 20, 3: 30, 4: 4, 5: 50}
    [one] = seeds.merged([], [result, of(MACHINE, (5, "2026-01-02", 1))])
    assert {entry.question.work for entry in one.entries if entry.ways["torch"].median_ms == 50} == {5}


def test_machines_that_differ_in_their_opengl_have_seeds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import seeds

    paths = []
    for version in "ab":
        paths.append(tmp_path / f"{version}.json")
        paths[-1].write_text(Table(replace(MACHINE, gl_driver=version), (GAIN,)).as_text())
    monkeypatch.setattr(seeds, "results", list)
    monkeypatch.setattr(seeds, "calibrated", lambda: paths)
    made = seeds.write(tmp_path / "made")
    assert sorted(tables.read(path).machine.gl_driver for path in made) == ["a", "b"]


def results_of(*rows: tuple[str, int, int, int, str, dict[str, float]]) -> dict[str, Any]:
    """A result file of rows (verb, batch, channels, side, note, median of each side)."""
    return {
        "device": "llvmpipe", "cpu": "a CPU", "threads": 2, "driver": "Mesa", "software": True, "date": "2026-01-01",
        "rows": [
            {
                "verb": verb, "part": "end to end", "size": [side, side], "batch": batch, "channels": channels,
                "dtype": "float32", "cache": "warm", "note": note, "other_job": {"gl a call for each image": "", **{
                    name: "" for name in sides if "comparison" in name
                }},
                "sides": {name: {"median_ms": ms, "iqr_ms": 0.1} for name, ms in sides.items()},
            }
            for verb, batch, channels, side, note, sides in rows
        ],
    }  # fmt: skip


def test_rows_of_bounds_and_batches_become_what_the_verbs_ask() -> None:
    """region_min goes by the times of region_max, and of both kinds of rows the one counts where OpenGL gains least."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import seeds

    batch = {"auto": 2.0, "gl one call": 1.0, "gl a call for each image": 0.1, "torch one call": 3.0}
    data = results_of(
        ("region_max", 1, 1, 1024, "4096 boxes", {"gl": 1.0, "torch gather": 4.0}),
        ("region_min", 1, 1, 1024, "4096 boxes", {"gl": 1.0, "torch gather": 2.0}),
        ("region_max", 4, 1, 64, "a batch in one call; 256 boxes an image", batch),
        ("cull", 4, 1, 64, "a batch in one call; 20% kept", {**batch, "torch one comparison": 0.01}),
    )
    found = {one.question: one.ways for one in seeds.table(data).entries}
    one, several = lod.hiz(noise(1, 1, 1024, 1024)).upload(), lod.hiz(noise(4, 1, 64, 64)).upload()
    low = lod.hiz(noise(1, 1, 1024, 1024), "min").upload()
    assert len(found) == 3
    for verb, hz in ((lod.region_max, one), (lod.region_min, low)):
        assert {way: timed.median_ms for way, timed in found[asked(verb, hz, torch.zeros(1, 4096, 4))].items()} == {
            "gl": 1.0, "torch": 2.0
        }  # fmt: skip
    for question in (asked(lod.region_max, several, torch.zeros(4, 256, 4)), asked(lod.cull, several, 0.5)):
        assert {way: timed.median_ms for way, timed in found[question].items()} == {"gl": 1.0, "torch": 3.0}


def test_a_verb_that_was_timed_alone_goes_by_that() -> None:
    """Not by a row in which a pyramid was made and collapsed again, wherever in the file it stands."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import seeds

    both = ("laplacian", 1, 3, 1024, "5 levels, and collapsed again", {"gl compute": 9.0, "torch strided sums": 3.0})
    no_verbs = {"torch compiled": 1.0, "torch graph of conv2d": 1.5}  # but a program's own
    eager = {"torch conv2d": 3.0, "torch strided sums": 4.0}
    there = ("laplacian", 1, 3, 1024, "5 levels", {"gl compute": 2.0, **eager, **no_verbs})
    for rows in ((both, there), (there, both)):
        found = {one.question.verb: one for one in seeds.table(results_of(*rows)).entries}
        # What the verb does in torch, and not what is fastest there.
        assert {way: timed.median_ms for way, timed in found["laplacian"].ways.items()} == {"gl": 2.0, "torch": 4.0}
        assert {way: timed.median_ms for way, timed in found["collapse"].ways.items()} == {"gl": 9.0, "torch": 3.0}
        image = noise(1, 3, 1024, 1024)
        assert found["laplacian"].question == asked(lod.laplacian, image, 5)
        assert found["collapse"].question == asked(lod.collapse, lod.laplacian(image, 5))


def test_results_from_before_a_verb_became_faster_are_no_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import seeds

    sides = {"gl compute": 2.0, "torch strided sums": 3.0}
    data = results_of(*((verb, 1, 3, 1024, "5 levels", sides) for verb in ("gaussian", "laplacian")))
    monkeypatch.setattr(seeds, "SINCE", {"laplacian": f"{data['date']}x", "gaussian": data["date"]})
    assert [one.question.verb for one in seeds.table(data).entries] == ["gaussian"]


def test_seeds_answer_what_the_verbs_ask() -> None:
    """At the sizes of the benchmark a verb's question is one of the seeds' own."""
    calibration.reload()
    questions = {one.question for seed in calibration._of_package() for one in seed.entries}
    image = noise(1, 3, 224, 224)
    big, grey = noise(1, 3, 1024, 1024), noise(1, 1, 1024, 1024)
    pyramid, hz = lod.mipmap(big).upload(), lod.hiz(grey).upload()
    sites = lod.cortical_sites((0.5, 0.5), 273, (1024, 1024))
    for verb, *arguments in (
        (lod.mipmap, image), (lod.hiz, grey), (lod.gaussian, image, 5), (lod.laplacian, image, 5),
        (lod.collapse, lod.laplacian(image, 5)), (lod.oriented_energy, grey, 5), (lod.feature_maps, image),
        (lod.feature_maps, big), (lod.log_polar, pyramid, (0.4, 0.6), 256, 512), (lod.foveate, pyramid, (0.4, 0.6)),
        (lod.gather_patches, pyramid, sites), (lod.gather_patches, pyramid, sites.floor()),
        (lod.inverse_log_polar, noise(1, 3, 256, 512), (0.4, 0.6), (1024, 1024)), (lod.cull, hz, 0.5),
        (lod.region_max, hz, torch.zeros(4096, 4)),
    ):  # fmt: skip
        assert asked(verb, *arguments) in questions, verb.__name__


def test_on_a_gpu_that_was_not_measured_the_packages_own_times_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration.reload()
    monkeypatch.setattr(calibration, "_gpu", lambda index: "a GPU of next year")
    monkeypatch.setattr(calibration, "nvidia", lambda: "999")
    question = Question("mipmap", "mean", 3, "float32", 1, 3 * 2**20)
    verdict = calibration.decide(question, dispatch.ways("mipmap", cuda=True), torch.device("cuda", 0), 2, None)
    assert verdict is not None and verdict.way == "cuda" and "NVIDIA" in verdict.reason


def test_rows_that_differ_in_their_counts_alone_are_other_questions() -> None:
    """One for a map, or for patches, of a megapixel and more; as the verbs ask it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import seeds

    def of(verb: str, note: str) -> Any:
        row = {"verb": verb, "note": note, "batch": 1, "channels": 3, "dtype": "float32", "size": [1024, 1024]}
        [question] = seeds._questions(row)
        return question

    ready = "from a prebuilt pyramid, a texture already"
    pyramid = lod.mipmap(noise(1, 3, 1024, 1024)).upload()
    for rings, wedges, note in ((256, 512, ready), (1024, 1024, f"1024 x 1024, {ready}")):
        assert of("log_polar", note) == asked(lod.log_polar, pyramid, (0.4, 0.6), rings, wedges)
    for budget in (273, 5400):
        sites = lod.cortical_sites((0.5, 0.5), budget, (1024, 1024))
        note = f"{budget} x 14 x 14, cortical sites; {ready}"
        assert of("gather_patches", note) == asked(lod.gather_patches, pyramid, sites)
