"""Tasks that look at pictures rebuilt from K tokens.

Such a task gives pictures with a relevance map each, and says how good a picture is that was rebuilt. The frame does
the rest: which allocators, at which fixations and budgets, how often, and what comes out of it.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any, ClassVar

import torch

import gpu_lod as lod
from gpu_lod.errors import GpuLodError
from gpu_lod.rebuild import Rebuilt, rebuild
from gpu_lod.token_set import TokenSet
from quality.learned import trained
from quality.memory import peak_bytes
from quality.methods import BASELINE, CENTRE, FULL, ORACLE, OWN, SALIENCY, Method, class_of, left_out, methods
from quality.task import Found, Plan, Task, digest_of, reason_of

BUDGETS, QUICK_BUDGETS = (64, 128, 150, 273, 576), (150, 273)
TIMED, CALLS = 2, 3
"""How many pictures are timed, and choices of each unit, after one to warm up."""


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


class RebuiltPictures(Task):
    """What a rebuilt picture is good for.

    Convention: `measure` gets the tokens (None for the full image, none at all of a method that has its own instead of
        ours) and what was rebuilt from them, and gives a value of every metric, None where there is none, such as a
        truth that nobody knows.
    """

    shared = ("task.py", "frame.py", "memory.py")
    patch: ClassVar[int] = 14
    ms = "choosing, from the grid's relevance to the sites"

    def __init__(self) -> None:
        super().__init__()
        self._pictures: list[Picture] = []
        self._budgets: tuple[int, ...] = ()

    @abstractmethod
    def pictures(self, seeds: int, quick: bool) -> list[Picture]: ...

    @abstractmethod
    def measure(self, picture: Picture, tokens: TokenSet | None, rebuilt: Rebuilt) -> dict[str, float | None]: ...

    def units(self, plan: Plan) -> list[Unit]:
        self._pictures = self.pictures(plan.seeds, plan.quick)
        self._budgets = plan.budgets or (QUICK_BUDGETS if plan.quick else BUDGETS)
        every = methods(plan.seeds, plan.quick, plan.only)
        return list(units_of(self, self._pictures, every, self._budgets, plan.quick))

    @property
    def pictures_timed(self) -> list[Picture]:
        return self._pictures[:TIMED]

    def compute(self, unit: Unit) -> Found:
        return compute(unit)

    def time(self, unit: Unit) -> Found:
        return {"ms": choosing_ms(unit)}

    def about(self) -> Found:
        return {
            "relevance": list(self._pictures[0].relevance) if self._pictures else [""],
            "pictures": [
                {
                    "name": p.name, "seed": p.seed, "size": list(p.image.shape[-2:]), "about": p.about,
                    "cells": cells_of(p.image, self.patch),
                }
                for p in self._pictures
            ],
            "budgets": list(self._budgets),
            "left_out": left_out(),
            "trained": trained([self.name], self._budgets),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Unit:
    """A method on a picture."""

    task: RebuiltPictures
    picture: Picture
    method: Method
    relevance: str | None
    """The kind; None for a method that looks at none."""
    budget: int | None
    """None is the full image."""
    place: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        place = {
            "task": self.task.name, "picture": self.picture.name, "seed": self.picture.seed,
            "method": self.method.label, "fixation": self.method.fixation, "draw": self.method.draw,
            "relevance": self.relevance, "error": 0.0, "budget": self.budget,
            "config": digest_of(self.task.digest.encode(), self.picture.digest.encode(), self.method.digest.encode()),
        }  # fmt: skip
        object.__setattr__(self, "place", place)

    @property
    def groups(self) -> tuple[str, ...]:
        """What is trained is trained once."""
        trained = self.method != FULL and hasattr(class_of(self.method.name), "trained_on")
        return (f"{self.method.name}, {self.budget}",) if trained else ()

    @property
    def timed(self) -> bool:
        timed = self.picture in self.task.pictures_timed
        return timed and self.budget is not None and self.method.draw in (None, 0)

    def allocator(self) -> tuple[Any, tuple[Any, ...], Any]:
        """What chooses, and what it is given: picture and relevance; and the fixation."""
        places = {CENTRE: (0.5, 0.5), SALIENCY: None, ORACLE: self.picture.target, None: None}
        relevance = None if self.relevance is None else self.picture.relevance[self.relevance]
        made = self.method.make(self.budget or 0, self.task.patch, self.task.name)
        return made, (self.picture.image, relevance), places[self.method.fixation]


def units_of(
    task: RebuiltPictures, pictures: Sequence[Picture], methods: Sequence[Method], budgets: Sequence[int], quick: bool
) -> Iterator[Unit]:
    """Every unit of a task: picture by picture, so that a stopped run has whole ones. The quick form has relevance of
    other kinds than the first for the baseline alone, and what is not the package's at its largest budget alone."""
    for picture in pictures:
        yield Unit(task, picture, FULL, None, None)
        for budget in budgets:
            for method in methods:
                if method.fixation == ORACLE and picture.target is None:
                    continue
                if quick and method.name in OWN and budget < max(budgets):
                    continue
                kinds: list[str | None] = list(picture.relevance) if method.looks else [None]
                for kind in kinds if method.name == BASELINE or not quick else kinds[:1]:
                    yield Unit(task, picture, method, kind, budget)


def compute(unit: Unit) -> Found:
    """What one unit gives, as `Task.compute` says."""
    picture, image = unit.picture, unit.picture.image
    height, width = image.shape[-2:]
    sample = f"{picture.name}, seed {picture.seed}"
    if unit.budget is None:
        whole = Rebuilt(image, torch.ones(height, width, dtype=torch.bool))
        values = unit.task.measure(picture, None, whole)
        found: Found = {"tokens": cells_of(image, unit.task.patch), "coverage": 1.0, "peak_bytes": None}
    else:
        with torch.no_grad():
            try:
                allocator, given, fixation = unit.allocator()
                tokens, peak = peak_bytes(lambda: allocator(*given, fixation=fixation))
            except GpuLodError as error:
                return {"skipped": reason_of(error)}
            if isinstance(tokens, TokenSet):
                rebuilt = rebuild(tokens, (height, width), mode="bicubic")  # as a smaller picture is shown
            else:  # what it has instead of ours
                rebuilt, tokens = tokens.rebuilt(), TokenSet(torch.empty(0, 3), torch.empty(0), None, unit.task.patch)
            values = unit.task.measure(picture, tokens, rebuilt)
        found = {"tokens": unit.budget, "coverage": float(rebuilt.coverage), "peak_bytes": peak}
    return found | {"values": {metric: {sample: value} for metric, value in values.items()}}


def choosing_ms(unit: Unit) -> float:
    """Median time from the relevance of the grid to the sites: no pooling before, no patches after."""
    allocator, (image, relevance), fixation = unit.allocator()
    with torch.no_grad():
        choose = chooser(allocator, image, relevance, fixation)
        times = []
        for _ in range(CALLS + 1):
            start = time.perf_counter()
            choose()
            times.append((time.perf_counter() - start) * 1e3)
    return round(median(times[1:]), 4)


def chooser(allocator: Any, image: torch.Tensor, relevance: torch.Tensor | None, fixation: Any) -> Callable[[], Any]:
    """What is timed."""
    if not isinstance(allocator, lod.allocate.Allocator):
        return partial(allocator.choose, image, relevance, fixation)
    return partial(allocator.choose, allocator._scene(image, relevance, None, fixation, None)[0])


def cells_of(image: torch.Tensor, patch: int) -> int:
    """Patches of the full picture."""
    height, width = image.shape[-2:]
    return -(-height // patch) * -(-width // patch)
