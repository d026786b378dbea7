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
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import gpu_lod as lod
from gpu_lod.allocate import find_fixations
from gpu_lod.feature_maps import saliency_map
from gpu_lod.pyramid import Pyramid
from gpu_lod.token_set import TokenSet
from quality.memory import peak_bytes
from quality.search_cuts import BY_QUERY, CUTS
from quality.search_learned import Learning, allocator_for, new
from quality.search_reader import KINDS, Reader, queries
from quality.search_scenes import COUNT, Search, scenes
from quality.search_scorer import Scoring, new_scorer, pooled_maps, query_code, scorer_for
from quality.search_training import GRID, PATCH, Training, bump, reader_for

BASELINE = "GridTopK"
FULL = "full picture"
ERRORS = (0.0, 0.1, 0.2, 0.4)
ECCENTRICITIES = (0.0, 0.1, 0.2, 0.3, 0.45, math.inf)
"""Bounds of the bins, in sides."""
_QUICK = ("Random", "Downsample", "GridTopK", "PyramidTopK", "Stratified", "TokenDAG", "VortexField", "Voronoi",
          "FoveatedPyramid", "LogPolar", "AdaptiveStratified", "PseudoLogPolar", "SoftTopKCoverage", "SoftVortex",
          "VortexLearned", *CUTS)  # fmt: skip
UNTRAINED = ", untrained"
BY_RELEVANCE = ("saliency", "query", "trained", "start")
TRAINED = ("GridTopK", "FoveatedPyramid", "TokenDAG")
"""Those that see relevance that was trained."""
CHUNK, TIMED = 10, 5
"""Pictures at once, and how many are timed one by one."""
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
    """One of BY_RELEVANCE; None for those that look at none"""
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


@dataclass(frozen=True, eq=False)
class _Test:
    search: Search
    pyramid: Pyramid
    saliency: torch.Tensor
    """[B, GRID, GRID]"""
    noise: torch.Tensor
    """[B, COUNT, 2], standard normal"""


@lru_cache(maxsize=16)
def prepared(seed: int, first: int, count: int) -> _Test:
    """Test pictures with what all units read of them."""
    search = scenes("test", seed, range(first, first + count))
    saliency = F.avg_pool2d(saliency_map(search.image)[:, None], PATCH)[:, 0]
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + first + index) for index in range(count)]
    noise = torch.stack([torch.randn(COUNT, 2, generator=generator) for generator in generators])
    return _Test(search, lod.mipmap(search.image), saliency, noise)


@lru_cache(maxsize=16)
def _maps(seed: int, first: int, count: int) -> torch.Tensor:
    return pooled_maps(prepared(seed, first, count).search.image)


@dataclass(frozen=True)
class _Way:
    """How a unit comes to its tokens and its answers."""

    unit: Unit
    reader: Reader
    allocator: Any
    cut: Any = None
    scorer: Any = None

    def tokens(self, first: int, count: int, digit: int, kind: str) -> tuple[Callable[[], TokenSet], torch.Tensor]:
        """What makes the tokens of test pictures for a question, and the fixation [B or 1, 2] that eccentricity is
        counted from; a way whose tokens depend on less takes any question."""
        unit, test = self.unit, prepared(self.unit.seed, first, count)
        relevance, looked = test.saliency, torch.tensor([[0.5, 0.5]])
        more: dict[str, Any] = {}
        asked = _asked(test.search, slice(digit, digit + 1), (kind,))[:, 0]
        if unit.asks:
            looked = (test.search.places[:, digit] + unit.error * test.noise[:, digit]).clamp(0, 1)
            relevance = bump(looked) if unit.relevance == "query" else relevance
        if self.scorer is not None:
            relevance = self.scorer(_maps(unit.seed, first, count), query_code(asked))
        if unit.fixation == "saliency" and not unit.asks:
            looked = find_fixations(relevance)[:, 0]
        if unit.fixation in ("centre", "oracle"):
            more["fixation"] = looked.expand(count, 2)
        if "query" in unit.given:
            more["query"] = query_code(asked)
        if not unit.given:
            relevance = torch.ones_like(relevance)  # row by row
        return partial(self.allocator, test.pyramid, relevance, **more), looked

    def right(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether answers are right, and how far digits are from the fixation: [B, COUNT, kinds]."""
        unit, search = self.unit, prepared(self.unit.seed, first, count).search
        digits = [slice(at, at + 1) for at in range(COUNT)] if unit.asks or unit.by_kind else [slice(0, COUNT)]
        right, away = torch.empty(2, count, COUNT, len(KINDS)).unbind()
        for digit in digits:
            for kinds in [(kind,) for kind in KINDS] if unit.by_kind else [KINDS]:
                make, looked = self.tokens(first, count, digit.start, kinds[0])
                found = self.read(make(), _asked(search, digit, kinds)).argmax(-1).unflatten(1, (len(kinds), -1))
                own = [KINDS.index(kind) for kind in kinds]
                right[:, digit, own] = (found == search.classes[:, None, digit]).float().mT
                away[:, digit, own] = (search.places[:, digit] - looked[:, None]).norm(dim=-1)[..., None]
        return right, away

    def read(self, tokens: TokenSet, asked: torch.Tensor) -> torch.Tensor:
        assert tokens.patches is not None
        logits: torch.Tensor = self.reader(tokens.patches, tokens.sites, asked, cut=self.cut).logits
        return logits

    def cost(self, pictures: int) -> dict[str, Any]:
        """Of one picture and a question by colour."""
        times: list[tuple[float, float]] = []
        for index in range(pictures):
            make, _ = self.tokens(index, 1, 0, "colour")
            asked = _asked(prepared(self.unit.seed, index, 1).search, slice(0, 1), ("colour",))
            start = time.perf_counter()
            tokens = make()
            between = time.perf_counter()
            self.read(tokens, asked)
            times.append((between - start, time.perf_counter() - between))
        assert tokens.patches is not None
        held = tokens.patches.nbytes + tokens.sites.nbytes
        ms, reader_ms = (round(median(values) * 1e3, 3) for values in zip(*times, strict=True))
        return {"ms": ms, "reader_ms": reader_ms, "peak_bytes": held + peak_bytes(partial(self.read, tokens, asked))}


def _asked(search: Search, digit: slice, kinds: tuple[str, ...]) -> torch.Tensor:
    """[B, kinds x digits, QUERY], kind by kind."""
    return torch.cat([queries(search.places[:, digit], search.colours[:, digit], kind) for kind in kinds], 1)


def run(unit: Unit, form: Form = QUICK, folder: Path | None = None) -> dict[str, Any]:
    """Metrics of a unit.

    - accuracy over all questions, by kind, of each picture, and by eccentricity of the digit from the fixation (from
      the centre of the picture where there is none) as [right, asked];
    - ms, the median time that an allocator takes for one picture's tokens, patches included, and reader_ms, that of
      the reader for one question by colour about them: where it cuts inside, the whole of it;
    - peak_bytes: the tokens and the most that the reader holds at once beside them, for the same question (`memory`).

    Args:
        folder: keeps what was trained: readers, scorers, allocators.
    """
    with tempfile.TemporaryDirectory() as spare:
        way = _way(unit, form, folder, Path(spare))
    with torch.no_grad():
        starts = range(0, form.pictures, CHUNK)
        parts = [way.right(first, min(CHUNK, form.pictures - first)) for first in starts]
        right, away = (torch.cat(values) for values in zip(*parts, strict=True))
        return _metrics(right, away) | way.cost(min(TIMED, form.pictures))


def _way(unit: Unit, form: Form, folder: Path | None, spare: Path) -> _Way:
    reader, work = reader_for(form.training, unit.seed, folder), folder or spare
    scorer = None
    if unit.relevance == "start":
        scorer = new_scorer(unit.seed)
    elif unit.relevance == "trained":
        scorer = scorer_for(form.scoring, unit.seed, work, reader)
    if unit.allocator in CUTS or unit.allocator == FULL:
        cut = CUTS[unit.allocator](unit.budget) if unit.allocator in CUTS else None
        return _Way(unit, reader, lod.allocate.make(BASELINE, GRID**2, PATCH), cut)
    if not issubclass(_class(unit.name), lod.allocate.Learned):
        more = {"seed": unit.seed} if unit.allocator == "Random" else {}
        allocator = lod.allocate.make(unit.name, unit.budget, PATCH, **more)
    elif unit.allocator == unit.name:
        allocator = allocator_for(form.learning, unit.name, unit.budget, unit.seed, work, reader)
    else:
        allocator = new(unit.name, unit.budget).eval()
    return _Way(unit, reader, allocator, scorer=scorer)


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
