"""Visual search: how well a reader that has K tokens tells small digits in a photograph.

`units(form)` are independent; `run(unit, form)` gives the metrics of one, the same ones each time; `Unit.place` is its
key. What varies:

- relevance: the picture's saliency; "query", a Gaussian about the place that is asked for, as a good query model would
  give it; or "trained", what `ContextualizedRelevance` has learned to give ("start": before it has).
- fixation, for those that take one: the centre, the peak of relevance ("saliency"), or the place that is asked for
  ("oracle").
- error: deviation of the noise, in sides, on the place that the query's relevance, or the oracle, is about.

Learned allocators have a row as they start, "..., untrained", and one as they are trained. Cuts inside the reader
(search_cuts.py) are rows too: they are given every patch, and K is what is left.

Of one seed all units see the same pictures, questions and noise, so that they can be compared in pairs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import gpu_lod as lod
from quality.search_cuts import BY_QUERY, CUTS
from quality.search_learned import Learning, allocator_for, new
from quality.search_reader import KINDS
from quality.search_scorer import Scoring, new_scorer, scorer_for
from quality.search_training import GRID, PATCH, Training, reader_for
from quality.search_way import Way

BASELINE = "GridTopK"
FULL = "full picture"
ERRORS = (0.0, 0.1, 0.2, 0.4)
ECCENTRICITIES = (0.0, 0.1, 0.2, 0.3, 0.45, math.inf)
"""Bounds of the bins, in sides."""
_QUICK = ("Random", "Downsample", "GridTopK", "PyramidTopK", "Stratified", "TokenDAG", "VortexField", "Voronoi",
          "FoveatedPyramid", "LogPolar", "AdaptiveStratified", "PseudoLogPolar", "SoftTopKCoverage", "SoftVortex",
          "VortexLearned", *CUTS)  # fmt: skip
UNTRAINED = ", untrained"
TRAINED = ("GridTopK", "FoveatedPyramid", "TokenDAG")
"""Those that see relevance that was trained."""
CHUNK, TIMED = 8, 2
"""Pictures at once, and how many are looked at one by one for what they cost."""
WITH_ERROR = ("GridTopK", "Stratified", "FoveatedPyramid")
"""By the query's relevance; fixations that are an oracle have all errors always."""


@dataclass(frozen=True)
class Form:
    """How much is done."""

    budgets: tuple[int, ...] = (64, 128)
    seeds: int = 3
    pictures: int = 16
    """A seed, each with COUNT digits, each asked for by place and by colour."""
    allocators: tuple[str, ...] = _QUICK
    training: Training = field(default_factory=Training)
    scoring: Scoring = field(default_factory=Scoring)
    learning: Learning = field(default_factory=Learning)


QUICK = Form()


def full() -> Form:
    """Every allocator that is not left out."""
    names = [*(name for name in lod.allocate.names() if _reason(name) is None), *CUTS]
    budgets, longer = (64, 128, 150, 273, 576), (Scoring(1500, 12), Learning(300, 12))
    return Form(budgets, 3, 60, tuple(names), Training(2000, 200, 4, 273), *longer)


@cache
def _class(name: str) -> Any:
    return type(lod.allocate.make(name))


def _reason(name: str) -> str | None:
    """Why it is left out, if it is."""
    known = {"image", "relevance", "fixation", *(["query"] if issubclass(_class(name), lod.allocate.Learned) else [])}
    lacking = sorted(set(_class(name).needs) - known)
    return f"needs {', '.join(lacking)}" if lacking else None


def left_out(form: Form) -> dict[str, str]:
    """Allocators that a form has not, and why."""
    others = [name for name in lod.allocate.names() if name not in form.allocators]
    return {name: _reason(name) or "in the full form alone" for name in others}


@dataclass(frozen=True)
class Unit:
    """One row of one seed."""

    seed: int
    budget: int
    allocator: str
    relevance: str | None
    """saliency, query, trained or start; None for those that look at none"""
    fixation: str | None
    """centre, saliency or oracle; None for those that take none"""
    error: float = 0.0

    @property
    def place(self) -> dict[str, Any]:
        """Its key."""
        return asdict(self)

    @property
    def asks(self) -> bool:
        """Whether tokens depend on the place that is asked for."""
        return self.relevance == "query" or self.fixation == "oracle"

    @property
    def by_kind(self) -> bool:
        """Whether they depend on the question, which a digit has two of."""
        return self.relevance in ("trained", "start") or self.allocator in BY_QUERY or "query" in self.given

    @property
    def given(self) -> tuple[str, ...]:
        """What the allocator needs."""
        return () if self.allocator in CUTS or self.allocator == FULL else tuple(_class(self.name).needs)

    @property
    def name(self) -> str:
        """The allocator's, trained or not."""
        return self.allocator.removesuffix(UNTRAINED)


def units(form: Form) -> Iterator[Unit]:
    for seed in range(form.seeds):
        yield Unit(seed, GRID**2, FULL, None, None)
        for budget in form.budgets:
            for name in form.allocators:
                yield from _units(seed, budget, name)


def _units(seed: int, budget: int, name: str) -> Iterator[Unit]:
    if name in CUTS:
        yield Unit(seed, budget, name, None, None)
        return
    kind = _class(name)
    fixed = "fixation" in kind.takes
    if issubclass(kind, lod.allocate.Learned):
        for label in (name + UNTRAINED, name):
            for fixation in ("centre", "saliency", "oracle") if fixed else (None,):
                yield Unit(seed, budget, label, "saliency", fixation)
        return
    if "relevance" not in kind.needs:
        yield Unit(seed, budget, name, None, None)
    elif fixed:
        for fixation in ("centre", "saliency"):
            yield Unit(seed, budget, name, "saliency", fixation)
        for error in ERRORS:
            yield Unit(seed, budget, name, "saliency", "oracle", error)
    else:
        yield Unit(seed, budget, name, "saliency", None)
    # The peak of what follows is the place asked for.
    peak = "saliency" if fixed else None
    if "relevance" in kind.needs:
        for error in ERRORS if name in WITH_ERROR else ERRORS[:1]:
            yield Unit(seed, budget, name, "query", peak, error)
    if name in TRAINED:
        yield Unit(seed, budget, name, "trained", peak)


def run(unit: Unit, form: Form = QUICK, folder: Path | None = None, weights: Path | None = None) -> dict[str, Any]:
    """Metrics of a unit.

    - accuracy over all questions, by kind, of each picture, and by eccentricity of the digit from the fixation (from
      the centre of the picture where there is none) as [right, asked];
    - coverage, the part of the picture that lies under some token, in the mean;
    - peak_bytes: the tokens and the most that the reader holds at once beside them, for one question by colour
      (`memory`).

    Args:
        folder: keeps the readers that were trained.
        weights: keeps scorers and allocators; if not given, `folder` does.
    """
    with tempfile.TemporaryDirectory() as spare:
        way = _way(unit, form, folder, weights or folder or Path(spare))
    with torch.no_grad():
        starts = range(0, form.pictures, CHUNK)
        parts = [way.right(first, min(CHUNK, form.pictures - first)) for first in starts]
        right, away = (torch.cat(values) for values in zip(*parts, strict=True))
        return _metrics(right, away) | {"coverage": way.coverage(min(TIMED, form.pictures)), "peak_bytes": way.peak()}


def cost(unit: Unit, form: Form = QUICK, folder: Path | None = None, weights: Path | None = None) -> dict[str, Any]:
    """ms, the median time that an allocator takes for one picture's tokens, patches included, and reader_ms, that of
    the reader for one question by colour about them: where it cuts inside, the whole of it."""
    with tempfile.TemporaryDirectory() as spare:
        way = _way(unit, form, folder, weights or folder or Path(spare))
    with torch.no_grad():
        return way.times(min(TIMED, form.pictures))


def _way(unit: Unit, form: Form, folder: Path | None, work: Path) -> Way:
    reader = reader_for(form.training, unit.seed, folder)
    scorer = None
    if unit.relevance == "start":
        scorer = new_scorer(unit.seed)
    elif unit.relevance == "trained":
        scorer = scorer_for(form.scoring, unit.seed, work, reader)
    if unit.allocator in CUTS or unit.allocator == FULL:
        cut = CUTS[unit.allocator](unit.budget) if unit.allocator in CUTS else None
        return Way(unit, reader, lod.allocate.make(BASELINE, GRID**2, PATCH), cut)
    if not issubclass(_class(unit.name), lod.allocate.Learned):
        more = {"seed": unit.seed} if unit.allocator == "Random" else {}
        allocator = lod.allocate.make(unit.name, unit.budget, PATCH, **more)
    elif unit.allocator == unit.name:
        allocator = allocator_for(form.learning, unit.name, unit.budget, unit.seed, work, reader)
    else:
        allocator = new(unit.name, unit.budget).eval()
    return Way(unit, reader, allocator, scorer=scorer)


def _metrics(right: torch.Tensor, away: torch.Tensor) -> dict[str, Any]:
    """Of [pictures, digits, kinds] both."""
    bins = {}
    for low, high in pairwise(ECCENTRICITIES):
        inside = (away >= low) & (away < high)
        bins[f"{low}-{high}" if high < math.inf else f"{low}-"] = [int(right[inside].sum()), right[inside].numel()]
    return {
        "accuracy": round(float(right.mean()), 5),
        **{kind: round(float(right[..., at].mean()), 5) for at, kind in enumerate(KINDS)},
        "by_eccentricity": bins,
        "pictures": [round(float(value), 5) for value in right.mean((1, 2))],
    }
