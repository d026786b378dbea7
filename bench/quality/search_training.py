"""Training the reader of the search, from scratch, on tokens of a mixture of allocators, so that it favours none."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

import gpu_lod as lod
from gpu_lod.token_set import TokenSet
from quality.search_reader import KINDS, Reader, loss_of, queries
from quality.search_scenes import COUNT, SIDE, Search, scenes

PATCH = 14
GRID = SIDE // PATCH
MIXTURE = ("Random", "Downsample", "GridTopK", "PyramidTopK", "Stratified", "TokenDAG", "FoveatedPyramid", "LogPolar")
"""Allocators that the reader is trained on, drawn evenly."""
BUDGETS = (64, 96, 128, 192, 273)
"""Drawn evenly, too, but for those above what is tested."""
BUMP = 0.05
"""Deviation of relevance about a place, in sides: what a model that knows what is asked gives."""
BATCH = 16
_RATE = 2e-3
EVERY = 2
"""Samples of a token that look for frames in training: frames are two samples wide."""


@dataclass(frozen=True)
class Training:
    """How much of it."""

    steps: int = 400
    groups: int = 40
    """Batches of pictures."""
    repeats: int = 3
    """Sets of tokens of each."""
    largest: int = 128
    """The largest budget."""


@dataclass(frozen=True)
class Tokens:
    """A batch with its digits."""

    patches: torch.Tensor
    """fp16, [B, K, 3, P, P]"""
    sites: torch.Tensor
    places: torch.Tensor
    classes: torch.Tensor
    colours: torch.Tensor


def bump(places: torch.Tensor, deviation: float = BUMP) -> torch.Tensor:
    """[..., 2] to [..., GRID, GRID]: a Gaussian about each place, 1 at the top."""
    cells = (torch.arange(GRID) + 0.5) / GRID
    x, y = ((cells - places[..., axis, None]).square() for axis in (0, 1))
    return torch.exp(-(y[..., :, None] + x[..., None, :]) / (2 * deviation**2))


def token_batches(training: Training, seed: int) -> list[Tokens]:
    """What there is to train on. Relevance is bumps about some of the digits, so that there is something to read in
    small budgets, and noise; a fixation is one of the digits. So what is learnt is to read, not where to look."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    budgets = [budget for budget in BUDGETS if budget <= training.largest]
    found = []
    for group in range(training.groups):
        batch = scenes("train", seed, range(group * BATCH, (group + 1) * BATCH))
        pyramid = lod.mipmap(batch.image)
        for _ in range(training.repeats):
            some = torch.rand(BATCH, COUNT, generator=generator) < draw.choice((0.5, 1.0))
            noise = 1e-3 * torch.rand(BATCH, GRID, GRID, generator=generator)
            relevance = (bump(batch.places) * some[..., None, None]).amax(1) + noise
            allocator = lod.allocate.make(draw.choice(MIXTURE), draw.choice(budgets), PATCH)
            fixation = {"fixation": batch.places[:, draw.randrange(COUNT)]} if "fixation" in allocator.takes else {}
            tokens = allocator(pyramid, relevance, **fixation)
            assert tokens.patches is not None
            found.append(Tokens(tokens.patches.half(), tokens.sites, batch.places, batch.classes, batch.colours))
    return found


def both_kinds(batch: Search | Tokens) -> torch.Tensor:
    """[B, 2 COUNT, QUERY]: about every digit, by place, then by colour."""
    return torch.cat([queries(batch.places, batch.colours, kind) for kind in KINDS], 1)


def train(training: Training, seed: int, batches: list[Tokens]) -> tuple[Reader, list[float]]:
    """A reader, and the loss of every step. Same arguments, same reader."""
    reader = Reader(seed=seed)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=_RATE / 25, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=training.steps)
    draw, losses = random.Random(seed), []
    for _ in range(training.steps):
        batch = draw.choice(batches)
        # Either question about a digit teaches nearly the same: half of them each, anew in every step.
        order = draw.sample(range(COUNT), COUNT)
        places, colours = batch.places[:, order], batch.colours[:, order]
        cut = COUNT // 2
        asked = [
            queries(places[:, :cut], colours[:, :cut], "place"),
            queries(places[:, cut:], colours[:, cut:], "colour"),
        ]
        reading = reader(batch.patches.float(), batch.sites, torch.cat(asked, 1), every=EVERY)
        loss = loss_of(reading, places[:, cut:], batch.classes[:, order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return reader.eval().requires_grad_(False), losses


@lru_cache(maxsize=1)
def _batches(training: Training) -> list[Tokens]:
    return token_batches(training, 0)


@lru_cache(maxsize=8)
def reader_for(training: Training, seed: int, folder: Path | None = None) -> Reader:
    """The reader of a seed; trained once, and read from `folder` after that. Readers of all seeds learn from the same
    pictures, in another order and from another start."""
    path = None if folder is None else folder / f"reader-{seed}.pt"
    if path is not None and path.exists():
        reader = Reader()
        reader.load_state_dict(torch.load(path, weights_only=True))
        return reader.eval().requires_grad_(False)
    reader, _ = train(training, seed, _batches(training))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        torch.save(reader.state_dict(), unfinished)
        os.replace(unfinished, path)
    return reader


def correct(reader: Reader, tokens: TokenSet, asked: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """bool [B, Q]: whether the reader answers queries about tokens rightly."""
    assert tokens.patches is not None
    return reader(tokens.patches, tokens.sites, asked).logits.argmax(-1) == classes
