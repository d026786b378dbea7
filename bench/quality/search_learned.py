"""Learned allocators, trained on the visual search with a reader that stays as it is.

They see training pictures alone, none of them the reader's or the scorer's, and saliency for relevance. What each
learns by is in `LOSSES`: the reader's cross-entropy where gradients reach what an allocator decides; the same to expect
over all its grids for `AdaptiveStratified`; and a stated proxy for `PseudoLogPolar` and `SoftVortex`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gpu_lod as lod
from gpu_lod.allocate.adaptive_stratified import CHOICES, COARSEST, FINEST
from gpu_lod.feature_channels import SEMANTIC, saliency_map
from gpu_lod.pyramid import Pyramid
from gpu_lod.vlm.training import Trainer
from quality.search_reader import KINDS, Reader
from quality.search_scenes import COUNT, DIGIT, SIDE, Search, scenes
from quality.search_scorer import query_code
from quality.search_training import EVERY, PATCH, both_kinds

FIRST = 200_000
"""Index of the first training picture."""
_SOFT, _BESIDE = 0.25, 16.0
"""Levels that tell tokens apart, and pixels that count as a level, in the proxy."""
_REPULSION = 0.1


@dataclass(frozen=True)
class Learning:
    """How much of it."""

    steps: int = 40
    groups: int = 2
    """Batches of training pictures."""
    batch: int = 8
    every: int = 20


@dataclass(frozen=True, eq=False)
class Batch:
    search: Search
    pyramid: Pyramid
    saliency: torch.Tensor
    """[B, GRID, GRID]"""


@lru_cache(maxsize=1)
def training_batches(learning: Learning) -> list[Batch]:
    found = []
    for group in range(learning.groups):
        first = FIRST + group * learning.batch
        search = scenes("train", 0, range(first, first + learning.batch))
        saliency = F.avg_pool2d(saliency_map(search.image)[:, None], PATCH)[:, 0]
        found.append(Batch(search, lod.mipmap(search.image), saliency))
    return found


Loss = Callable[[Any, Reader, Batch], torch.Tensor]
"""Of an allocator, by torch's random numbers."""


def by_reader(allocator: Any, reader: Reader, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the reader's answers to all questions about the pictures, by scores that are a soft top-k:
    straight through, so 1 forward. Contents fade to a random part, as they do for the scorer."""
    tokens = allocator(batch.pyramid, batch.saliency)
    weights = (1 + tokens.scores - tokens.scores.detach()) * torch.rand(len(tokens.scores), 1)
    reading = reader(tokens.patches, tokens.sites, both_kinds(batch.search), weights, every=EVERY)
    return F.cross_entropy(reading.logits.flatten(0, 1), batch.search.classes.repeat(1, len(KINDS)).flatten())


def apart_by_reader(allocator: Any, reader: Reader, batch: Batch) -> torch.Tensor:
    """And with vortices that keep apart."""
    return by_reader(allocator, reader, batch) + _REPULSION * allocator.repulsion()


def by_grain(allocator: Any, reader: Reader, batch: Batch) -> torch.Tensor:
    """A proxy: how coarsely digits are covered. A token serves a point of a digit at its level, and `_BESIDE` pixels
    that the point lies beside it are one level more; of all tokens the best one counts, softly; the mean over points.

    For where the reader's own loss says next to nothing: which tokens it takes has no gradient, a patch that is read
    beside is seen in the same frame, and blends are far from anything it has seen. Run as it is used, for the levels.
    A fixation is one of the digits, as in the reader's training.
    """
    del reader
    fixation = {}
    if "fixation" in allocator.takes:
        fixation = {"fixation": batch.search.places[:, int(torch.randint(COUNT, ()))]}
    tokens = allocator.eval()(relevance=batch.saliency, **fixation)
    at = torch.tensor([-1.0, 0.0, 1.0]) * (DIGIT / 2 - 1) / SIDE
    points = (batch.search.places[:, :, None] + torch.cartesian_prod(at, at)).flatten(1, 2)
    sites, levels = tokens.sites[:, None, :, :2], tokens.sites[:, None, :, 2]
    beside = ((sites - points[:, :, None]).abs().amax(-1) * SIDE - levels.exp2() * PATCH / 2).clamp(min=0)
    return -_SOFT * (-(levels + beside / _BESIDE) / _SOFT).logsumexp(-1).mean()


def expected(allocator: Any, reader: Reader, batch: Batch) -> torch.Tensor:
    """The reader's loss to expect over all 49 grids, of all questions about the pictures."""
    losses = _losses_of_grids(allocator.budget, reader, batch)
    codes = torch.stack([query_code(asked) for asked in both_kinds(batch.search).unbind(1)], 1)
    return allocator.expected_loss(losses.flatten(0, 1), codes.flatten(0, 1))


@lru_cache(maxsize=8)
def _losses_of_grids(budget: int, reader: Reader, batch: Batch) -> torch.Tensor:
    """[B, 2 COUNT, 7, 7]: of each question with 2 to 8 rows and columns of strata."""
    asked, classes = both_kinds(batch.search), batch.search.classes.repeat(1, len(KINDS))
    rows = []
    with torch.no_grad():
        for strata in itertools.product(range(COARSEST, FINEST + 1), repeat=2):
            tokens = lod.allocate.Stratified(budget, PATCH, strata=strata)(batch.pyramid, batch.saliency)
            logits = reader(tokens.patches, tokens.sites, asked, every=EVERY).logits
            rows.append(F.cross_entropy(logits.movedim(-1, 1), classes, reduction="none"))
    return torch.stack(rows, -1).unflatten(-1, (CHOICES, CHOICES))


LOSSES: dict[str, tuple[Loss, float]] = {
    "AdaptiveStratified": (expected, 1e-2),
    "PseudoLogPolar": (by_grain, 3e-2),
    "SoftTopKCoverage": (by_reader, 1e-1),
    "SoftVortex": (by_grain, 2e-1),
    "VortexLearned": (apart_by_reader, 1e-1),
}
"""What each learns by, and Adam's rate."""


def new(name: str, budget: int) -> Any:
    """As it starts."""
    more = {"width": SEMANTIC} if "query" in type(lod.allocate.make(name)).needs else {}
    return lod.allocate.make(name, budget, PATCH, **more)


def trained(
    learning: Learning, name: str, budget: int, seed: int, work: Path, reader: Reader
) -> tuple[Any, list[float]]:
    """The allocator and all losses; goes on from the checkpoint in the work folder."""
    allocator = new(name, budget)
    loss, rate = LOSSES[name]
    optimizer = torch.optim.Adam(allocator.parameters(), lr=rate)
    config = {**asdict(learning), "name": name, "budget": budget, "seed": seed, "rate": rate}
    torch.manual_seed(seed)
    trainer = Trainer(allocator, optimizer, work / f"{name}-{budget}-{seed}", config, every=learning.every)
    batches = training_batches(learning)
    losses = trainer.fit(
        lambda step: loss(allocator, reader, batches[int(torch.randint(len(batches), ()))]), learning.steps
    )
    return allocator.eval().requires_grad_(False), losses


@lru_cache(maxsize=32)
def allocator_for(learning: Learning, name: str, budget: int, seed: int, work: Path, reader: Reader) -> Any:
    """The allocator, trained once."""
    return trained(learning, name, budget, seed, work, reader)[0]
