"""Visual search: how well a reader that has K tokens tells small digits in a photograph.

`units(form)` are independent; `run(unit, form)` gives the metrics of one, the same ones each time; `Unit.place` is its
key. What varies:

- relevance: the picture's saliency, or "query", a Gaussian about the place that is asked for, as a good query model
  would give it.
- fixation, for those that take one: the centre, the peak of relevance ("saliency"), or the place that is asked for
  ("oracle").
- error: deviation of the noise, in sides, on the place that the query's relevance, or the oracle, is about.

Of one seed all units see the same pictures, questions and noise, so that they can be compared in pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gpu_lod as lod
from gpu_lod.allocate import find_fixations
from gpu_lod.feature_maps import saliency_map
from gpu_lod.pyramid import Pyramid
from quality.search_reader import KINDS, queries
from quality.search_scenes import COUNT, Search, scene
from quality.search_training import GRID, PATCH, Training, both_kinds, bump, correct, reader_for

BASELINE = "GridTopK"
FULL = "full picture"
ERRORS = (0.0, 0.1, 0.2, 0.4)
ECCENTRICITIES = (0.0, 0.1, 0.2, 0.3, 0.45, math.inf)
"""Bounds of the bins, in sides."""
_QUICK = ("Random", "Downsample", "GridTopK", "PyramidTopK", "Stratified", "TokenDAG", "VortexField", "Voronoi",
          "FoveatedPyramid", "LogPolar")  # fmt: skip
WITH_ERROR = ("GridTopK", "Stratified", "FoveatedPyramid")
"""By the query's relevance; fixations that are an oracle have all errors always."""


@dataclass(frozen=True)
class Form:
    """How much is done."""

    budgets: tuple[int, ...] = (64, 128)
    seeds: int = 3
    pictures: int = 20
    """A seed, each with COUNT digits, each asked for by place and by colour."""
    allocators: tuple[str, ...] = _QUICK
    training: Training = field(default_factory=Training)


QUICK = Form()


def full() -> Form:
    """Every allocator that is not left out."""
    names = [name for name in lod.allocate.names() if _reason(name) is None]
    return Form((64, 128, 150, 273, 576), 3, 60, tuple(names), Training(2000, 200, 4, 273))


def _class(name: str) -> Any:
    return type(lod.allocate.make(name))


def _reason(name: str) -> str | None:
    """Why it is left out, if it is."""
    if issubclass(_class(name), lod.allocate.Learned):
        return "learned, and there is nothing trained"
    lacking = sorted(set(_class(name).needs) - {"image", "relevance", "fixation"})
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
    """saliency or query; None for those that look at none"""
    fixation: str | None
    """centre, saliency or oracle; None for those that take none"""
    error: float = 0.0

    @property
    def place(self) -> dict[str, Any]:
        """Its key."""
        return asdict(self)

    @property
    def asks(self) -> bool:
        """Whether tokens depend on what is asked for."""
        return self.relevance == "query" or self.fixation == "oracle"


def units(form: Form) -> Iterator[Unit]:
    for seed in range(form.seeds):
        yield Unit(seed, GRID**2, FULL, None, None)
        for budget in form.budgets:
            for name in form.allocators:
                yield from _units(seed, budget, name)


def _units(seed: int, budget: int, name: str) -> Iterator[Unit]:
    kind = _class(name)
    if "relevance" not in kind.needs:
        yield Unit(seed, budget, name, None, None)
    elif "fixation" in kind.takes:
        for fixation in ("centre", "saliency"):
            yield Unit(seed, budget, name, "saliency", fixation)
        for error in ERRORS:
            yield Unit(seed, budget, name, "saliency", "oracle", error)
    else:
        yield Unit(seed, budget, name, "saliency", None)
    if "relevance" in kind.needs:
        # Its peak is the place asked for.
        fixation = "saliency" if "fixation" in kind.takes else None
        for error in ERRORS if name in WITH_ERROR else ERRORS[:1]:
            yield Unit(seed, budget, name, "query", fixation, error)


@dataclass(frozen=True)
class _Test:
    search: Search
    pyramid: Pyramid
    saliency: torch.Tensor
    """[1, GRID, GRID]"""
    noise: torch.Tensor
    """[COUNT, 2], standard normal"""


@lru_cache(maxsize=128)
def prepared(seed: int, index: int) -> _Test:
    """A test picture with what all units read of it."""
    search = scene("test", seed, index)
    saliency = torch.nn.functional.avg_pool2d(saliency_map(search.image)[:, None], PATCH)[:, 0]
    noise = torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(seed * 1_000_003 + index))
    return _Test(search, lod.mipmap(search.image), saliency, noise)


def run(unit: Unit, form: Form = QUICK, folder: Path | None = None) -> dict[str, Any]:
    """Metrics of a unit: accuracy over all questions, by kind, by eccentricity of the digit from the fixation (from the
    centre of the picture where there is none) as [right, asked], and of each picture; and the median time that an
    allocator took for a picture's tokens, patches included.

    Args:
        folder: keeps trained readers.
    """
    reader = reader_for(form.training, unit.seed, folder)
    more = {"seed": unit.seed} if unit.allocator == "Random" else {}
    name = BASELINE if unit.allocator == FULL else unit.allocator
    allocator = lod.allocate.make(name, unit.budget, PATCH, **more)
    right, away, times = [], [], []
    with torch.no_grad():
        for index in range(form.pictures):
            test = prepared(unit.seed, index)
            answers, distances = [], []
            for digit in range(COUNT) if unit.asks else [slice(None)]:
                arguments, looked = _given(unit, test, digit)
                start = time.perf_counter()
                tokens = allocator(test.pyramid, **arguments)
                times.append((time.perf_counter() - start) * 1e3)
                answers.append(_answers(reader, tokens, test.search, digit))
                distances.append((test.search.places[0, digit].view(-1, 2) - looked).norm(dim=-1))
            right.append(torch.cat(answers))
            away.append(torch.cat(distances))
    return _metrics(torch.stack(right).float(), torch.stack(away)) | {"ms": round(median(times), 3)}


def _given(unit: Unit, test: _Test, digit: int | slice) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of the allocator, and the fixation [1, 2] that eccentricity is counted from."""
    relevance, looked = test.saliency, torch.tensor([[0.5, 0.5]])
    if unit.asks:
        assert isinstance(digit, int)
        looked = (test.search.places[0, digit] + unit.error * test.noise[digit]).clamp(0, 1)[None]
        if unit.relevance == "query":
            relevance = bump(looked)
    elif unit.fixation == "saliency":
        looked = find_fixations(relevance)[:, 0]
    fixed = {"fixation": looked} if unit.fixation in ("centre", "oracle") else {}
    return {"relevance": relevance, **fixed}, looked


def _answers(reader: Any, tokens: Any, search: Search, digit: int | slice) -> torch.Tensor:
    """[digits, kinds]"""
    if isinstance(digit, slice):
        return correct(reader, tokens, both_kinds(search), search.classes.repeat(1, len(KINDS))).view(len(KINDS), -1).T
    places, colours = search.places[:, digit, None], search.colours[:, digit, None]
    asked = torch.cat([queries(places, colours, kind) for kind in KINDS], 1)
    return correct(reader, tokens, asked, search.classes[:, digit, None].expand(-1, len(KINDS)))


def _metrics(right: torch.Tensor, away: torch.Tensor) -> dict[str, Any]:
    """Of [pictures, digits, kinds] and [pictures, digits]."""
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
