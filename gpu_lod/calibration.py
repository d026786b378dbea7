"""What "auto" takes: the fastest way by measured times, those of this machine or of machines like it.

Times of this machine come from `gpu-lod calibrate`; without them speak those that come with the package (seeds). A way
is taken only where it clearly beats torch: the middle halves of their times do not overlap, and the medians are at
least 5% apart. Between two sizes that were measured it is taken if it is at both; and where dtypes or channels were not
measured, if it takes at most half as long in those most like them. What was never measured near a size runs on torch.
Times of this machine that spread so much that the choice would be a guess (`guessed`) count as not measured.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from gpu_lod import tables
from gpu_lod.errors import CalibrationWarning
from gpu_lod.tables import GL, Entry, Host, Question, Table
from gpu_lod.tuning import cpu

MARGIN = 1.05
"""By how much the medians differ at least."""

GUESS = 1.5
"""How many times as long as another way the one that is taken may take, were all times as far off as they spread."""
GUESS_MS = 0.02
"""And how much longer, where that is more: it matters little."""
FAR = 2.0
"""A way whose lower quartile is so many times the other one's upper is out of the question."""

decided: dict[Any, Any] = {}
"""Choices by what they depend on, for `dispatch`; emptied when the tables change."""

refused: dict[tuple[str, torch.device], dict[str, str]] = {}
"""What drivers said that refused a verb's shaders or kernels, by backend, for `dispatch`; forgotten as the choices
are."""

_lock = threading.RLock()
_loaded: dict[Host, tuple[list[Table], list[Table]]] = {}
"""The user's tables, and the same without what would be guessed."""
_seeds: list[Table] | None = None
_warned: set[Path] = set()
_hearing = threading.local()


@dataclass(frozen=True)
class Verdict:
    """The way to take, and why."""

    way: str
    reason: str
    figures: dict[str, float]
    """Milliseconds by way."""


def decide(
    question: Question, ways: Sequence[str], device: torch.device, threads: int, gl: GL | None
) -> Verdict | None:
    """What to take for a job on tensors of a device.

    Args:
        ways: that the verb has.
        gl: of the context that would be used; None before one is opened.

    Returns:
        None if OpenGL may be fastest, but that depends on the context: open it and ask again.
    """
    groups = _groups(question, host(device, threads), driver(device), gl)
    if gl is None and any(_opengl_may_be_fastest(group, ways) for group in groups):
        return None
    found = next(filter(None, groups), [])
    if not found:
        where = f"on {device}" if device.type == "cuda" else "for CPU tensors"
        if gl is not None:
            where += f" with {gl[0]}"
        return Verdict(
            "torch",
            f"{question.verb} has not been measured {where} near this size and kind yet (`gpu-lod calibrate` measures "
            "common ones); backend='gl' uses the shaders all the same",
            {},
        )
    clear = _clear(found, ways)
    way = min(clear, key=lambda way: max(_ratio(entry, way) for _, entry in found)) if clear else "torch"
    return _verdict(way, found)


def taken(entry: Entry) -> str:
    """The way that a measurement speaks for, by itself."""
    clear = [way for way in entry.ways if _beats(entry, way)]
    return min(clear, key=lambda way: entry.ways[way].median_ms, default="torch")


def guessed(entry: Entry) -> bool:
    """Whether times spread so much, as on a machine that has other things to do, that they do not say what to take."""
    chosen = entry.ways.get(taken(entry))
    if chosen is None:
        return False
    worst = chosen.high + chosen.iqr_ms / 2
    rivals = (way for way in entry.ways.values() if way is not chosen and way.low < FAR * chosen.high)
    best = min((way.low - way.iqr_ms / 2 for way in rivals), default=worst)
    return worst > GUESS * best and worst - best > GUESS_MS


Found = list[tuple[Table, Entry]]


def _groups(question: Question, host: Host, driver: str, gl: GL | None) -> list[Found]:
    """Measurements that speak for a job, by how well they know this machine: the first that holds any decides."""
    (users, sure), seeds = _of_user(host), _of_package()

    def matching(group: list[Table]) -> list[Table]:
        return [
            t for t in group if t.machine.host == host and t.machine.driver == driver and gl in (None, t.machine.gl)
        ]

    own = matching(users)
    if users and not own:
        old = users[0].machine
        what = " ".join(filter(None, (old.driver, old.renderer, old.gl_driver)))
        _warn({table.path: f"it was measured with another driver, {what}" for table in users if table.path})
    alike = []
    software = host[0] == "cpu"
    if gl is None or gl[2] == software:
        alike = [t for t in seeds if t.machine.tensors == host[0] and t.machine.software == software]
    same = [t for t in alike if t.machine.host == host]  # under another driver
    return [
        [(table, entry) for table in group if _agree(entries := table.around(question)) for entry in entries]
        for group in (matching(sure), matching(seeds), same, alike)
    ]


def _agree(entries: Sequence[Entry]) -> bool:
    """Whether some way clearly beats torch by all measurements, or none by any."""
    clear = [{way for way in entry.ways if _beats(entry, way)} for entry in entries]
    return not any(clear) or bool(set.intersection(*clear))


def _clear(found: Found, ways: Sequence[str]) -> list[str]:
    """The ways that clearly beat torch by all of these measurements."""
    return [way for way in ways if way != "torch" and found and all(_beats(entry, way) for _, entry in found)]


def _opengl_may_be_fastest(found: Found, ways: Sequence[str]) -> bool:
    """Whether it is on any of these machines, of the ways that gain on all: if not, no context need be opened."""
    clear = _clear(found, ways)
    return bool(clear) and any(min(clear, key=functools.partial(_ratio, entry)).startswith("gl") for _, entry in found)


def _beats(entry: Entry, way: str) -> bool:
    torchs, other = entry.ways.get("torch"), entry.ways.get(way)
    if torchs is None or other is None:
        return False
    return other.high * entry.gain < torchs.low and other.median_ms * max(MARGIN, entry.gain) <= torchs.median_ms


def _ratio(entry: Entry, way: str) -> float:
    return entry.ways[way].median_ms / entry.ways["torch"].median_ms


def _verdict(way: str, found: Found) -> Verdict:
    def least(pair: tuple[Table, Entry]) -> float:
        """How badly OpenGL does here."""
        ways = pair[1].ways
        others = [way] if way != "torch" else [name for name in ways if name != "torch" and "torch" in ways]
        return min((_ratio(pair[1], other) for other in others), default=0.0)

    table, entry = max(found, key=least)
    figures = {name: timed.median_ms for name, timed in entry.ways.items()}
    others = [name for name in figures if name not in ("torch", way)]
    against = "torch" if way != "torch" else min(others, key=figures.__getitem__, default="")
    if way not in figures or not against:
        reason = f"no other way could be measured at {entry.at}"
    else:
        reason = (
            f"{figures[way]:.3g} ms against {figures[against]:.3g} ms for {spoken(against)}, measured at {entry.at}"
        )
    if table.path is not None:
        reason += f" on this machine (calibrated {entry.date})"
    else:
        renderer = table.machine.renderer.partition("(")[0].strip()
        if table.machine.tensors == "cuda" or not renderer:
            renderer = table.machine.name
        machines = len({id(table) for table, _ in found})
        several = f"{machines} machines" if machines > 1 else "a machine"
        where = f", on the one where {'it' if way != 'torch' else 'OpenGL'} does worst" if machines > 1 else ""
        reason += f" on {several} like this one ({renderer}, seeds{where})"
    beside = [other.at for of, other in found if of is table and other is not entry]
    if beside:
        reason += f"; {'faster' if way != 'torch' else 'no other way is'} at {beside[0]} too, and this lies between"
    if way == "torch" and against and figures[against] < figures[way]:
        reason += "; that is no clear gain" + (" for a job of another kind" if entry.gain > 1 else "")
    return Verdict(way, reason, figures)


def spoken(way: str) -> str:
    """A way in words: gl (compute)."""
    backend, _, generator = way.partition(" ")
    return f"{backend} ({generator})" if generator else backend


# -- the tables ----------------------------------------------------------------------------------------------------


def in_force(host: Host) -> list[Table]:
    """The tables that are asked for tensors of a host, in that order: the first that knows a job decides."""
    seeds = [table for table in _of_package() if table.machine.tensors == host[0]]
    return [*_of_user(host)[0], *sorted(seeds, key=lambda table: table.machine.host != host)]


def refuse(job: tuple[str, torch.device], backend: str, why: str) -> None:
    """Let no job of that name go to a backend any more."""
    with _lock:
        refused[job] = refused.get(job, {}) | {backend: why}
        decided.clear()


def forgive(job: tuple[str, torch.device], backend: str) -> None:
    """Take that back."""
    with _lock:
        refused[job] = {name: why for name, why in refused.get(job, {}).items() if name != backend}
        decided.clear()


def _after_fork() -> None:
    """A thread that is not in the child may have held the lock."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def reload() -> None:
    """Forget what was read and decided: the next question reads the tables again."""
    global _seeds
    with _lock:
        _seeds = None
        _loaded.clear()
        _warned.clear()
        decided.clear()
        refused.clear()


def _of_user(host: Host) -> tuple[list[Table], list[Table]]:
    found = _loaded.get(host)
    if found is None:
        with _lock:
            read, wrong = tables.load(host)
            sure = [
                replace(table, entries=tuple(entry for entry in table.entries if not guessed(entry))) for table in read
            ]
            _loaded[host] = found = read, sure
        _warn(dict(wrong))
    return found


def _of_package() -> list[Table]:
    global _seeds
    with _lock:
        if _seeds is None:
            files = (
                file for file in resources.files("gpu_lod").joinpath("data").iterdir() if file.name.endswith(".json")
            )
            _seeds = [tables.parse(file.read_text(encoding="utf-8")) for file in sorted(files, key=lambda f: f.name)]
        return _seeds


def _warn(wrong: dict[Path, str]) -> None:
    """Once a file."""
    new = {path: what for path, what in wrong.items() if path not in _warned}
    _warned.update(new)
    if new:
        warnings.warn(
            "ignored " + "; ".join(f"{path}: {what}" for path, what in new.items()) + ". Run `gpu-lod calibrate`.",
            CalibrationWarning,
            stacklevel=2,
        )


# -- the machine ---------------------------------------------------------------------------------------------------


def host(device: torch.device, threads: int) -> Host:
    """What a table's machine is called before a GL context is opened."""
    if device.type == "cuda":
        return "cuda", _gpu(device.index or 0), 0
    return "cpu", cpu(), threads


def driver(device: torch.device) -> str:
    return nvidia() if device.type == "cuda" else ""


@functools.cache
def _gpu(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def nvidia() -> str:
    """The version of NVIDIA's driver, or of the CUDA that it brings."""
    try:
        found = re.search(r"\s(\d+\.\d[\d.]*)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else str(getattr(torch._C, "_cuda_getDriverVersion", str)())


# -- what verbs ask ------------------------------------------------------------------------------------------------


@contextmanager
def hearing() -> Iterator[list[Question]]:
    """The questions that verbs of this thread ask inside the block, unanswered: what is in force does not matter."""
    _hearing.questions = []
    try:
        yield _hearing.questions
    finally:
        del _hearing.questions


def listener() -> Callable[[Question], None] | None:
    """What takes the questions of this thread now, if something does."""
    questions = getattr(_hearing, "questions", None)
    return None if questions is None else questions.append
