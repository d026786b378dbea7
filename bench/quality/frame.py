"""What a task is, what is done once for each unit of work, and what is kept of it.

A task is a module of this folder with a function `task()`, and is named in `run.TASKS`. It gives pictures with a
relevance map each, and says how good a picture is that was rebuilt from K tokens. The frame does the rest: which
allocators, at which fixations and budgets, how often, and what comes out of it.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from gpu_lod.errors import GpuLodError
from gpu_lod.rebuild import Rebuilt, rebuild
from gpu_lod.token_set import TokenSet
from quality.journal import Journal
from quality.methods import BASELINE, CENTRE, FULL, ORACLE, SALIENCY, Method

CALLS = 3
"""Timed choices of each unit, after the one that counts."""


@dataclass(frozen=True)
class Metric:
    """A number that says how good a rebuilt picture is."""

    name: str
    meaning: str
    accuracy: bool = False
    """In [0, 1], 1 the best: compared with the baseline. A task's first accuracy is the one that the verdict is on."""
    better: str = "higher"


@dataclass(frozen=True, eq=False)
class Picture:
    """What tokens are spent on. Two seeds of one name are two pictures."""

    name: str
    image: torch.Tensor
    """uint8 [C, H, W]"""
    relevance: Mapping[str, torch.Tensor]
    """[H, W] by kind; the first kind is the one that the verdict is on."""
    seed: int = 0
    target: tuple[float, float] | None = None
    """(x, y) of what is asked for: the oracle fixation. None where nothing is."""
    content: Any = None
    """What the task needs to measure."""
    about: str = ""

    @cached_property
    def digest(self) -> str:
        shape = json.dumps([list(self.image.shape), self.target, self.about])
        return digest_of(shape.encode(), self.image.contiguous().numpy().tobytes())


class Task(ABC):
    """What an allocation is good for.

    Convention: `measure` gets the tokens (None for the full image, none at all of a method that has its own instead of
        ours) and what was rebuilt from them, and gives a value of every metric, None where there is none, such as a
        truth that nobody knows.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    patch: ClassVar[int] = 14
    metrics: ClassVar[tuple[Metric, ...]]
    sources: ClassVar[tuple[str, ...]]
    """Files of this folder that results depend on: a change to one makes them stale."""

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        """What could not be had, and why."""

    @abstractmethod
    def pictures(self, seeds: int, quick: bool) -> list[Picture]: ...

    @abstractmethod
    def measure(self, picture: Picture, tokens: TokenSet | None, rebuilt: Rebuilt) -> dict[str, float | None]: ...

    def settings(self) -> dict[str, Any]:
        """What else results depend on, such as versions of other libraries."""
        return {}

    @property
    def accuracy(self) -> str:
        return next(metric.name for metric in self.metrics if metric.accuracy)

    @cached_property
    def digest(self) -> str:
        here = Path(__file__).resolve().parent
        code = [(here / name).read_bytes() for name in ("frame.py", *self.sources)]
        return digest_of(*code, json.dumps([self.settings(), self.patch], sort_keys=True).encode())


@dataclass(frozen=True, eq=False)
class Unit:
    """A method on a picture: what is computed once, and never again."""

    task: Task
    picture: Picture
    method: Method
    relevance: str | None
    """The kind; None for a method that looks at none."""
    budget: int | None
    """None is the full image."""
    place: dict[str, Any] = field(init=False)
    """What the journal files it under."""

    def __post_init__(self) -> None:
        place = {
            "task": self.task.name, "picture": self.picture.name, "seed": self.picture.seed,
            "method": self.method.label, "fixation": self.method.fixation, "draw": self.method.draw,
            "relevance": self.relevance, "budget": self.budget,
            "config": digest_of(self.task.digest.encode(), self.picture.digest.encode(), self.method.digest.encode()),
        }  # fmt: skip
        object.__setattr__(self, "place", place)


def units_of(
    task: Task, pictures: Sequence[Picture], methods: Sequence[Method], budgets: Sequence[int], quick: bool
) -> Iterator[Unit]:
    """Every unit of a task: picture by picture, so that a stopped run has whole ones. The quick form has relevance of
    other kinds than the first for the baseline alone."""
    for picture in pictures:
        yield Unit(task, picture, FULL, None, None)
        for budget in budgets:
            for method in methods:
                if method.fixation == ORACLE and picture.target is None:
                    continue
                kinds: list[str | None] = list(picture.relevance) if method.looks else [None]
                for kind in kinds if method.name == BASELINE or not quick else kinds[:1]:
                    yield Unit(task, picture, method, kind, budget)


def run(
    units: Sequence[Unit], journal: Journal, done: Callable[[Unit], None] = lambda unit: None
) -> list[dict[str, Any]]:
    """The journal's line of each unit; computed and written there where it has none yet."""
    lines = []
    for unit in units:
        line = journal.get(unit.place)
        if line is None:
            line = journal.add(unit.place, compute(unit))
        lines.append(line)
        done(unit)
    return lines


def compute(unit: Unit) -> dict[str, Any]:
    """What one unit gives: values of the metrics, coverage, tokens and the time that choosing took, or why not."""
    picture, image = unit.picture, unit.picture.image
    height, width = image.shape[-2:]
    if unit.budget is None:
        whole = Rebuilt(image, torch.ones(height, width, dtype=torch.bool))
        cells = -(-height // unit.task.patch) * -(-width // unit.task.patch)
        return {"tokens": cells, "coverage": 1.0, "ms": 0.0, "values": unit.task.measure(picture, None, whole)}
    with torch.no_grad():
        try:
            allocator = unit.method.make(unit.budget, unit.task.patch, unit.task.name)
            relevance = None if unit.relevance is None else picture.relevance[unit.relevance]
            places = {CENTRE: (0.5, 0.5), SALIENCY: None, ORACLE: picture.target, None: None}
            fixation = places[unit.method.fixation]
            if hasattr(allocator, "rebuild"):  # it has tokens of its own
                tokens = TokenSet(torch.empty(0, 3), torch.empty(0), None, unit.task.patch)
                rebuilt, ms = allocator.rebuild(image, relevance, fixation)
            else:
                tokens = allocator(image, relevance, fixation=fixation)
                ms = choosing_ms(allocator, image, relevance, fixation)
                rebuilt = rebuild(tokens, (height, width))
        except GpuLodError as error:
            return {"skipped": " ".join(f"{type(error).__name__}: {error}".split())}
        values = unit.task.measure(picture, tokens, rebuilt)
    return {"tokens": unit.budget, "coverage": float(rebuilt.coverage), "ms": ms, "values": values}


def choosing_ms(allocator: Any, image: torch.Tensor, relevance: torch.Tensor | None, fixation: Any) -> float:
    """Median time from the relevance of the grid to the sites: no pooling before, no patches after."""
    scene, _ = allocator._scene(image, relevance, None, fixation, None)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        allocator.choose(scene)
        times.append((time.perf_counter() - start) * 1e3)
    return round(median(times), 4)


def digest_of(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:16]
