"""From a row of the visual search to its tokens, its answers and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import gpu_lod as lod
from gpu_lod.allocate import find_fixations
from gpu_lod.feature_channels import saliency_map
from gpu_lod.pyramid import Pyramid
from gpu_lod.rebuild import rebuild
from gpu_lod.token_set import TokenSet
from quality.memory import peak_bytes
from quality.search_reader import KINDS, Reader, queries
from quality.search_scenes import COUNT, SIDE, Search, scenes
from quality.search_scorer import pooled_maps, query_code
from quality.search_training import PATCH, bump

if TYPE_CHECKING:
    from quality.search import Unit


@dataclass(frozen=True, eq=False)
class Test:
    search: Search
    pyramid: Pyramid
    saliency: torch.Tensor
    """[B, GRID, GRID]"""
    noise: torch.Tensor
    """[B, COUNT, 2], standard normal"""


@lru_cache(maxsize=16)
def prepared(seed: int, first: int, count: int) -> Test:
    """Test pictures with what all units read of them."""
    search = scenes("test", seed, range(first, first + count))
    saliency = F.avg_pool2d(saliency_map(search.image)[:, None], PATCH)[:, 0]
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + first + index) for index in range(count)]
    noise = torch.stack([torch.randn(COUNT, 2, generator=generator) for generator in generators])
    return Test(search, lod.mipmap(search.image), saliency, noise)


@lru_cache(maxsize=16)
def maps_of(seed: int, first: int, count: int) -> torch.Tensor:
    return pooled_maps(prepared(seed, first, count).search.image)


@dataclass(frozen=True)
class Way:
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
            relevance = self.scorer(maps_of(unit.seed, first, count), query_code(asked))
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

    def times(self, pictures: int) -> dict[str, float]:
        """Of one picture and a question by colour, after one to warm up."""
        times: list[tuple[float, float]] = []
        for index in (0, *range(pictures)):
            make, asked = self._one(index)
            start = time.perf_counter()
            tokens = make()
            between = time.perf_counter()
            self.read(tokens, asked)
            times.append((between - start, time.perf_counter() - between))
        ms, reader_ms = (round(median(values) * 1e3, 3) for values in zip(*times[1:], strict=True))
        return {"ms": ms, "reader_ms": reader_ms}

    def peak(self) -> int:
        """Bytes of one picture's tokens, and the most that reading them for a question by colour holds."""
        make, asked = self._one(0)
        tokens = make()
        assert tokens.patches is not None
        return tokens.patches.nbytes + tokens.sites.nbytes + peak_bytes(partial(self.read, tokens, asked))[1]

    def coverage(self, pictures: int) -> float:
        """The part of a picture that lies under some token, of those for a first question; a cut has read all of it."""
        if self.cut is not None:
            return 1.0
        shares = []
        for index in range(pictures):
            make, _ = self._one(index)
            shares.append(float(rebuild(make(), (SIDE, SIDE)).coverage))
        return round(fmean(shares), 5)

    def _one(self, index: int) -> tuple[Callable[[], TokenSet], torch.Tensor]:
        """What makes the tokens of a picture, and a question by colour."""
        asked = _asked(prepared(self.unit.seed, index, 1).search, slice(0, 1), ("colour",))
        return self.tokens(index, 1, 0, "colour")[0], asked


def _asked(search: Search, digit: slice, kinds: tuple[str, ...]) -> torch.Tensor:
    """[B, kinds x digits, QUERY], kind by kind."""
    return torch.cat([queries(search.places[:, digit], search.colours[:, digit], kind) for kind in kinds], 1)
