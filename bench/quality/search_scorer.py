"""Relevance that is learned: `ContextualizedRelevance`, trained on the search through the straight-through top-k, with
a reader that stays as it is. It sees training pictures alone, none of them the reader's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpu_lod.feature_channels import SEMANTIC
from gpu_lod.feature_maps import feature_maps
from gpu_lod.vlm import ContextualizedRelevance, gumbel_top_k
from gpu_lod.vlm.training import Trainer
from quality.search_reader import KINDS, Reader, queries
from quality.search_scenes import COLOURS, COUNT, Search, scenes
from quality.search_training import BATCH, EVERY, GRID, PATCH

ALONG = 5
"""Gaussians along each axis that a place is told by; they and a channel for each colour are the semantic channels."""
_WIDE, _ALIKE = 0.12, 0.15
_MAGNITUDES = [6, 7, 10]
"""Channels that the scorer pools by magnitude."""
_RATE, _TEMPERATURE, _NOISE = 3e-3, 0.05, 0.1
FIRST = 100_000
"""Index of the first training picture: the reader has seen none of them."""


@dataclass(frozen=True)
class Scoring:
    """How much the scorer is trained."""

    steps: int = 150
    groups: int = 4
    """Batches of training pictures."""
    budget: int = 128
    every: int = 50


class Batch(NamedTuple):
    search: Search
    maps: torch.Tensor
    """[B, 40, GRID, GRID]"""
    patches: torch.Tensor
    """fp16, [B, GRID^2, 3, P, P]"""


def along(values: torch.Tensor) -> torch.Tensor:
    """[...] in [0, 1] to [..., ALONG]."""
    return torch.exp(-((values[..., None] - torch.linspace(0, 1, ALONG)) ** 2) / (2 * _WIDE**2))


def semantic(image: torch.Tensor) -> torch.Tensor:
    """[B, 16, H, W]: where a pixel is, along x and y, and how much it has each of the colours."""
    batch, _, height, width = image.shape
    x = along((torch.arange(width) + 0.5) / width).T[:, None, :].expand(-1, height, -1)
    y = along((torch.arange(height) + 0.5) / height).T[:, :, None].expand(-1, -1, width)
    palette = torch.tensor(list(COLOURS.values()))
    alike = [torch.exp(-(image - c[:, None, None]).square().sum(1) / (2 * _ALIKE**2)) for c in palette]
    return torch.cat([torch.cat([x, y]).expand(batch, -1, -1, -1), torch.stack(alike, 1)], 1)


def query_code(asked: torch.Tensor) -> torch.Tensor:
    """Queries [B, QUERY] to [B, 16]: the place or the colour, as the semantic channels say it."""
    by_colour = asked[:, 2:].any(-1, keepdim=True)
    palette = torch.tensor(list(COLOURS.values()))
    which = (asked[:, None, 2:] - palette).abs().amax(-1) < 1e-6
    place = torch.cat([along(asked[:, 0]), along(asked[:, 1])], -1)
    return torch.cat([place * ~by_colour, which.float() * by_colour], -1)


def pooled_maps(image: torch.Tensor) -> torch.Tensor:
    """Feature maps as the scorer pools them, once for all steps: [B, 40, GRID, GRID]."""
    maps = feature_maps(image, semantic=semantic(image))
    maps[:, _MAGNITUDES] = maps[:, _MAGNITUDES].abs()
    return F.avg_pool2d(maps, PATCH)  # patches fill the picture


def new_scorer(seed: int) -> ContextualizedRelevance:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ContextualizedRelevance(width=SEMANTIC, patch=1)  # of maps that are pooled already


@lru_cache(maxsize=1)
def training_batches(groups: int) -> list[Batch]:
    found = []
    for group in range(groups):
        batch = scenes("train", 0, range(FIRST + group * BATCH, FIRST + (group + 1) * BATCH))
        tiles = batch.image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
        found.append(Batch(batch, pooled_maps(batch.image), tiles.half()))
    return found


def grid_sites() -> torch.Tensor:
    """[GRID^2, 3], row by row."""
    at = (torch.arange(GRID) + 0.5) / GRID
    y, x = torch.meshgrid(at, at, indexing="ij")
    return torch.stack([x, y, torch.zeros_like(x)], -1).flatten(0, 1)


def loss_of(scorer: ContextualizedRelevance, reader: Reader, batch: Batch, scoring: Scoring) -> torch.Tensor:
    """Cross-entropy of the reader's answers to one question a picture, drawn by torch's random numbers."""
    digit, kind = int(torch.randint(COUNT, ())), KINDS[int(torch.randint(len(KINDS), ()))]
    where = batch.search
    asked = queries(where.places[:, digit, None], where.colours[:, digit, None], kind)
    chosen = gumbel_top_k(scorer(batch.maps, query_code(asked[:, 0])), scoring.budget, _TEMPERATURE, _NOISE)
    rows = torch.arange(len(asked))[:, None]
    # Contents fade to a random part, so that gradients add up to what the answer gains by all the tokens (integrated
    # gradients). At full contrast alone they say that a reader that is sure and wrong had better see less.
    weights = chosen.weights * torch.rand(len(asked), 1)
    reading = reader(
        batch.patches[rows, chosen.indices].float(), grid_sites()[chosen.indices], asked, weights, every=EVERY
    )
    return F.cross_entropy(reading.logits[:, 0], where.classes[:, digit])


def trained(
    scoring: Scoring, seed: int, work: Path, reader: Reader, log: bool = False
) -> tuple[ContextualizedRelevance, list[float]]:
    """The scorer of a seed and all losses; goes on from the checkpoint in the work folder.

    Args:
        log: for TensorBoard, in the same folder.
    """
    scorer = new_scorer(seed)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=_RATE)
    config = {**asdict(scoring), "seed": seed, "rate": _RATE, "temperature": _TEMPERATURE, "noise": _NOISE}
    torch.manual_seed(seed)  # before the trainer, which resumes random numbers too
    trainer = Trainer(scorer, optimizer, work / f"scorer-{seed}", config, every=scoring.every, log=log)
    batches = training_batches(scoring.groups)
    losses = trainer.fit(
        lambda step: loss_of(scorer, reader, batches[int(torch.randint(len(batches), ()))], scoring), scoring.steps
    )
    trainer.close()
    return scorer.eval().requires_grad_(False), losses


@lru_cache(maxsize=8)
def scorer_for(scoring: Scoring, seed: int, work: Path, reader: Reader) -> ContextualizedRelevance:
    """The scorer of a seed, trained once."""
    return trained(scoring, seed, work, reader)[0]
