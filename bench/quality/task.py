"""What a task is to the program that runs it: units of work, each computed once, and what a result file says of it.

A task is a class in a module of this folder, and named in `run.TASKS`. `frame.RebuiltPictures` is what tasks have in
common that look at pictures rebuilt from K tokens.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Protocol

HERE = Path(__file__).resolve().parent
Found = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """A number that says how good tokens are."""

    name: str
    meaning: str
    accuracy: bool = False
    """In [0, 1], 1 the best: compared with the baseline. A task's first accuracy is the one that the verdict is on."""
    better: str = "higher"


@dataclass(frozen=True)
class Plan:
    """What a run is to do. It goes to worker processes, which make the same units of it."""

    quick: bool
    folder: Path
    """What is kept between runs beside the journal, such as trained readers."""
    budgets: tuple[int, ...] | None = None
    """None is the task's own, of the form."""
    seeds: int = 3
    only: tuple[str, ...] | None = None
    """Names of allocators; None is all."""


class Unit(Protocol):
    """What is computed once, and never again."""

    @property
    def place(self) -> dict[str, Any]:
        """What the journal files it under: task, method, fixation, relevance, error, budget, and what else tells it
        apart; `config` is a digest of all that its result depends on."""
        ...

    @property
    def groups(self) -> tuple[str, ...]:
        """What it shares with others that the first one of them makes, such as a trained reader: the others wait."""
        ...

    @property
    def timed(self) -> bool:
        """Whether `Task.time` is asked about it."""
        ...


class Task(ABC):
    """What an allocation is good for."""

    name: ClassVar[str]
    title: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    ms: ClassVar[str]
    """What a row's time is the time of."""
    shared: ClassVar[tuple[str, ...]] = ("task.py",)
    sources: ClassVar[tuple[str, ...]]
    """Files of this folder that results depend on, beside `shared`: a change to one makes them stale."""
    libraries: ClassVar[tuple[str, ...]] = ("torch", "numpy")
    """Packages whose version does the same."""

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        """What could not be had, and why."""

    @abstractmethod
    def units(self, plan: Plan) -> Sequence[Unit]:
        """All there is to do, the same of the same plan."""

    @abstractmethod
    def compute(self, unit: Any) -> Found:
        """What a unit gives: `values`, of each metric by the name of the sample (a picture; None where there is none),
        `tokens`, `coverage` and `peak_bytes` (None where unknown), and `by_eccentricity`, [right, asked] by bin, if
        answers have a distance from the fixation. Or `skipped`, why there is nothing."""

    @abstractmethod
    def time(self, unit: Any) -> Found:
        """`ms` of a unit, as `Task.ms` says; called in turn, while nothing else runs."""

    @abstractmethod
    def about(self) -> Found:
        """`relevance`, its kinds, the first one that of the verdict; `pictures`; `budgets`; `left_out`, methods that
        are not compared, and why. After `units`."""

    def settings(self) -> dict[str, Any]:
        """What else results depend on, such as versions of other libraries."""
        return {}

    def told(self, method: str, fixation: str | None, relevance: str | None) -> str | None:
        """The relevance of the baseline that a row stands against: what it is told, too."""
        return relevance

    def reads_all(self, method: str) -> bool:
        """Whether a method pays for every token before it cuts: then half the tokens are not half the work."""
        return False

    @property
    def accuracy(self) -> str:
        return next(metric.name for metric in self.metrics if metric.accuracy)

    @cached_property
    def digest(self) -> str:
        code = [(HERE / name).read_bytes() for name in (*self.shared, *self.sources)]
        versions = [version(name) for name in self.libraries]
        return digest_of(*code, json.dumps([self.settings(), versions], sort_keys=True).encode())


def reason_of(error: Exception) -> str:
    """Why there is nothing, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def digest_of(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:16]


def digest_of_files(paths: Iterable[Path]) -> str:
    return digest_of(*(path.read_bytes() for path in sorted(paths)))
