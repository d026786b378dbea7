"""Measuring on this machine what "auto" decides: `gpu-lod calibrate`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from gpu_lod import agreement, calibration, tables
from gpu_lod.bridge.cuda import check_available
from gpu_lod.context import Context
from gpu_lod.dispatch import explain, named, ways
from gpu_lod.errors import GpuLodError, InputError, OutOfMemoryError
from gpu_lod.jobs import Job, jobs
from gpu_lod.tables import Entry, Machine, Timed
from gpu_lod.timing import BLOCK, PAUSE, at_work, race

HOPELESS = 3.0
"""A way whose first calls take so many times torch's is measured no further."""
MOST = 40
"""Calls of a way."""


@dataclass
class Report:
    """What a calibration measured."""

    entries: dict[Machine, list[Entry]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Jobs for which there was no time, or which failed, and why."""
    paths: list[Path] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)
    """Jobs whose times spread too much to say what is fastest."""
    wrong: list[str] = field(default_factory=list)
    """What gave other results than torch, and how far apart they were: times of that way are not kept, of any job of
    the verb."""
    busy: str = ""
    """What the machine was at when the measuring began, if that was much: times then say little."""


Progress = Callable[[int, int, str], None]
"""Told how many jobs are done, of how many, and what comes next."""


def calibrate(
    minutes: float = 1.0,
    verbs: Sequence[str] | None = None,
    *,
    quick: bool = False,
    devices: Sequence[str | torch.device] | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Report:
    """Measure every way of the verbs on this machine, and keep the times: "auto" goes by them from then on.

    The ways of a job take turns, with a pause before each turn; a job's times are medians and interquartile ranges by
    the wall clock, on a GPU with a synchronise behind every call. They are kept in the user's cache folder, a file a
    machine and driver, and replace older times of the same job; $GPU_LOD_CACHE is another folder, or "off". What was
    measured when something raises, Ctrl-C too, is kept. Times that spread too much to say what is fastest, as on a
    machine that is busy, replace none, and "auto" does not go by them. What a way makes is compared with what torch
    makes first: no driver that gets it wrong is gone by, however fast it is.

    Units: minutes.

    Args:
        minutes: how long it may take, roughly. The most telling jobs come first; those for which no time is left are
            in the report.
        verbs: their names; None is all.
        quick: few jobs, and short.
        devices: where the tensors are; None is the CPU, and the current CUDA device if there is one.
        progress: called before every job.
        report: filled while the jobs run, for a caller who wants what was measured before something was raised.

    Raises:
        InputError: unknown verbs, no time, $GPU_LOD_CACHE is "off".
        CalibrationBusyError: another process does this now.
        CudaUnavailableError: there is no such CUDA device.
        FileError: the times cannot be kept; where that shows at once, nothing was measured.
    """
    report = Report() if report is None else report
    if not 0 < minutes < math.inf:
        raise InputError(f"minutes is {minutes}; expected more than 0.")
    if tables.folder() is None:
        raise InputError(tables.NOTHING_KEPT)
    if devices is None:
        devices = ["cpu", *([torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else [])]
    todo = [(job, device) for job in jobs(verbs, quick=quick) for device in map(_device, devices)]
    todo = [(job, device) for job, device in todo if device.type in job.tensors]
    report.busy = at_work()
    wrong: dict[Machine, set[tuple[str, str]]] = {}
    try:
        with tables.measuring(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            end = time.monotonic() + 60 * minutes
            torch.manual_seed(0)
            for number, (job, device) in enumerate(todo):
                name = f"{job.verb.__name__}, {job.at}" + (f" on {device}" if len(devices) > 1 else "")
                left = end - time.monotonic()
                if left <= 0:
                    report.left_out.append(f"{name}: no time was left")
                    continue
                if progress is not None:
                    progress(number, len(todo), name)
                try:
                    machine, entry, apart = _measure(job, device, left / (len(todo) - number), quick=quick)
                    report.entries.setdefault(machine, []).append(entry)
                    for way, difference in apart.items():
                        report.wrong.append(f"{name}, {calibration.spoken(way)}: {difference}")
                        wrong.setdefault(machine, set()).add((entry.question.verb, way))
                    if calibration.guessed(entry):
                        report.unsteady.append(name)
                except (GpuLodError, MemoryError, RuntimeError) as error:
                    report.left_out.append(f"{name}: {error}".partition("\n")[0])
            if progress is not None:
                progress(len(todo), len(todo), "")
    finally:
        if report.entries:
            report.entries = {
                machine: tables.without(entries, wrong.get(machine, ())) for machine, entries in report.entries.items()
            }
            report.paths = [
                tables.store(
                    machine,
                    entries,
                    {one.question for one in entries if calibration.guessed(one)},
                    wrong.get(machine, ()),
                )
                for machine, entries in report.entries.items()
            ]
            calibration.reload()
    return report


def _device(device: str | torch.device) -> torch.device:
    """With its number, which tables and contexts ask for."""
    device = torch.device(device)
    if device.type == "cuda":
        check_available(device.index or 0)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _measure(job: Job, device: torch.device, seconds: float, *, quick: bool) -> tuple[Machine, Entry, dict[str, str]]:
    """The times of one job, by every way that can do it here, and by which ways it comes out how different."""
    following = job.prepare(device)
    with calibration.hearing() as questions:
        chosen = explain(job.verb, *following())
    if not questions:  # nothing that times decide
        raise GpuLodError(chosen.reason)
    question = questions[-1]
    cuda = device.type == "cuda"
    wait = partial(torch.cuda.synchronize, device) if cuda else None
    sides: dict[str, Callable[[], object]] = {}
    times: dict[str, Timed] = {}
    wrong: dict[str, str] = {}
    truth, same = None, following()
    for way in ways(question.verb, cuda=cuda):
        how = named(way)

        def side(how: dict[str, str] = how) -> object:
            return job.verb(*following(), **how)

        try:
            result = job.verb(*same, **how)
            first = [_milliseconds(side, wait) for _ in range(2)]
        except (MemoryError, OutOfMemoryError, torch.cuda.OutOfMemoryError):
            raise
        except (GpuLodError, RuntimeError):
            if way == "torch":
                raise
            continue
        truth = result if way == "torch" else truth
        if apart := agreement.difference(result, truth, own_filter=job.own_filter):
            wrong[way] = apart
            continue
        times[way] = Timed(sum(first) / 2, abs(first[0] - first[1]))
        if way == "torch" or min(first) < HOPELESS * times["torch"].median_ms:
            sides[way] = side
    del truth, result
    seconds = 0.02 if quick else min(max(seconds / len(sides), 0.05), 0.5)
    timed = race(
        sides,
        seconds=seconds,
        most=MOST if cuda else min(MOST, BLOCK * (1 + int(seconds / PAUSE))),  # or short calls would be all pauses
        fewest=8,  # a turn in which the machine was busy shows in the spread
        warm_up=0,
        pause=0 if cuda else PAUSE,
        clock=partial(_milliseconds, wait=wait),
    )
    times |= {way: Timed(timing.median_ms, timing.iqr_ms) for way, timing in timed.items()}
    return machine(device), Entry(question, job.at, time.strftime("%Y-%m-%d"), times), wrong


def _milliseconds(side: Callable[[], object], wait: Callable[[], object] | None) -> float:
    start = time.perf_counter()
    side()
    if wait is not None:
        wait()
    return (time.perf_counter() - start) * 1e3


def machine(device: torch.device) -> Machine:
    """This one, with the OpenGL that verbs use for tensors on a device."""
    try:
        context = Context(device)
        gl = context.renderer, context.driver, context.software
    except Exception:  # whatever a driver raises: torch and CUDA ways are measured all the same
        gl = "", "", False
    host = calibration.host(device, torch.get_num_threads())
    return Machine(*host, calibration.driver(device), *gl)
