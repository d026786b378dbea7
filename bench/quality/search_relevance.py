"""Does `ContextualizedRelevance` learn where to look? It is trained on the visual search through the straight-through
top-k, with a reader that stays as it is, and compared with its own start, with saliency, and with knowing the place.

python bench/quality/search_relevance.py [--steps 1500] [--seeds 3] [--out FILE] [--work FOLDER]

Logs for TensorBoard are in the work folder, and checkpoints: a stopped run goes on from the last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rows import RESULTS, common, write

import gpu_lod as lod
from gpu_lod.feature_maps import CHANNELS, SEMANTIC, feature_maps
from gpu_lod.saliency import patches as patch_means
from gpu_lod.vlm import ContextualizedRelevance, gumbel_top_k
from gpu_lod.vlm.training import Trainer
from quality import search
from quality.search_reader import KINDS, Reader, queries
from quality.search_run import interval
from quality.search_scenes import COLOURS, COUNT, SIDE, Search, scenes
from quality.search_training import BATCH, GRID, PATCH, bump, correct, reader_for

ALONG = 5
"""Gaussians along each axis that a place is told by; they and a channel for each colour are the semantic channels."""
_WIDE, _ALIKE = 0.12, 0.15
_MAGNITUDES = [6, 7, 10]
"""Channels that the scorer pools by magnitude."""
_RATE, _TEMPERATURE, _NOISE = 3e-3, 0.05, 0.1
FIRST = 100_000
"""Index of the first training picture: the reader has seen none of them."""


@dataclass(frozen=True)
class Plan:
    steps: int = 1500
    groups: int = 12
    """Batches of training pictures."""
    budget: int = 128
    every: int = 100


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
    return patch_means(maps, PATCH)


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


def loss_of(scorer: ContextualizedRelevance, reader: Reader, batch: Batch, plan: Plan) -> torch.Tensor:
    """Cross-entropy of the reader's answers to one question a picture, drawn by torch's random numbers."""
    digit, kind = int(torch.randint(COUNT, ())), KINDS[int(torch.randint(len(KINDS), ()))]
    where = batch.search
    asked = queries(where.places[:, digit, None], where.colours[:, digit, None], kind)
    chosen = gumbel_top_k(scorer(batch.maps, query_code(asked[:, 0])), plan.budget, _TEMPERATURE, _NOISE)
    rows = torch.arange(len(asked))[:, None]
    # Contents fade to a random part, so that gradients add up to what the answer gains by all the tokens (integrated
    # gradients). At full contrast alone they say that a reader that is sure and wrong had better see less.
    weights = chosen.weights * torch.rand(len(asked), 1)
    reading = reader(batch.patches[rows, chosen.indices].float(), grid_sites()[chosen.indices], asked, weights)
    return torch.nn.functional.cross_entropy(reading.logits[:, 0], where.classes[:, digit])


def trained(plan: Plan, seed: int, work: Path, reader: Reader, log: bool = True) -> tuple[Any, list[float]]:
    """The scorer of a seed and all losses; goes on from the checkpoint in the work folder."""
    reader.train()  # it has no dropout; and layers fused for evaluation pass no gradient to weights of tokens
    scorer = new_scorer(seed)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=_RATE)
    config = {**asdict(plan), "seed": seed, "rate": _RATE, "temperature": _TEMPERATURE, "noise": _NOISE}
    torch.manual_seed(seed)  # before the trainer, which resumes random numbers too
    trainer = Trainer(scorer, optimizer, work / f"seed-{seed}", config, every=plan.every, log=log)
    batches = training_batches(plan.groups)
    losses = trainer.fit(
        lambda step: loss_of(scorer, reader, batches[int(torch.randint(len(batches), ()))], plan), plan.steps
    )
    trainer.close()
    return scorer.eval().requires_grad_(False), losses


def accuracies(seed: int, budget: int, pictures: int, reader: Reader, scorer: Any, name: str) -> list[float]:
    """Of each test picture; GridTopK throughout.

    Args:
        name: "saliency", "query" (a Gaussian about the place), or whatever the scorer is called.
    """
    allocator = lod.allocate.make(search.BASELINE, budget, PATCH)
    found = []
    for index in range(pictures):
        test = search.prepared(seed, index)
        maps = pooled_maps(test.search.image) if name not in ("saliency", "query") else None
        right = []
        for digit in range(COUNT):
            for kind in KINDS:
                asked = queries(test.search.places[:, digit, None], test.search.colours[:, digit, None], kind)
                if maps is not None:
                    relevance = scorer(maps, query_code(asked[:, 0]))
                else:
                    relevance = test.saliency if name == "saliency" else bump(test.search.places[:, digit])
                tokens = allocator(test.pyramid, relevance)
                right.append(bool(correct(reader, tokens, asked, test.search.classes[:, digit, None])))
        found.append(statistics.fmean(right))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=search.QUICK.pictures)
    parser.add_argument("--readers", type=Path, help="folder of readers that search_run.py trained")
    parser.add_argument("--out", type=Path, default=RESULTS / "search" / "relevance.json")
    parser.add_argument("--work", type=Path, default=Path("out/quality/search_relevance"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan, start = Plan(steps=options.steps), time.perf_counter()
    found: dict[tuple[int, str], list[float]] = {}
    losses = []
    for seed in range(options.seeds):
        reader = reader_for(search.QUICK.training, seed, options.readers or options.work)
        scorer, history = trained(plan, seed, options.work, reader)
        losses.append([round(statistics.fmean(part), 4) for part in (history[:100], history[-100:])])
        with torch.no_grad():
            for budget in search.QUICK.budgets:
                for name, model in (
                    ("saliency", None),
                    ("query", None),
                    ("start", new_scorer(seed)),
                    ("trained", scorer),
                ):
                    values = accuracies(seed, budget, options.pictures, reader, model, name)
                    found.setdefault((budget, name), []).extend(values)
        print(f"seed {seed}: loss {losses[-1][0]} at first, {losses[-1][1]} at last", flush=True)
    rows = []
    for (budget, name), values in found.items():
        row = {"budget": budget, "relevance": name, "accuracy": round(statistics.fmean(values), 5),
               "interval": interval(values)}  # fmt: skip
        for other in ("start", "saliency"):
            apart = [a - b for a, b in zip(values, found[budget, other], strict=True)]
            row[f"over_{other}"] = {"difference": round(statistics.fmean(apart), 5), "interval": interval(apart)}
        rows.append(row)
        print(f"{budget:5} {row['accuracy']:.3f} {row['interval']} {name}")
    data = {
        "task": "search, relevance learned",
        **common(),
        "plan": asdict(plan),
        "seeds": options.seeds,
        "pictures": options.pictures,
        "picture_side": SIDE,
        "semantic_channels": f"{CHANNELS['semantic'].stop - CHANNELS['semantic'].start}: x and y by {ALONG} Gaussians "
        "each, likeness to each colour; the query names its place or colour in the same channels",
        "interval": "95%, Student's t over pictures x seeds; differences are paired by picture",
        "loss_first_and_last_100_steps": losses,
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }
    write(json.loads(json.dumps(data)), options.out)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
