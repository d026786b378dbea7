"""Does `ContextualizedRelevance` learn where to look? What GridTopK is worth on it after a long training on the visual
search, compared with its own start, with saliency, and with knowing the place.

python bench/quality/search_relevance.py [--steps 1500] [--seeds 3] [--out FILE] [--work FOLDER]

Logs for TensorBoard are in the work folder, and checkpoints, under a digest of the code that they depend on: a stopped
run goes on from the last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rows import RESULTS, common, write

from gpu_lod.feature_channels import CHANNELS
from quality import search, search_run, search_scorer
from quality.search_run import interval
from quality.search_scenes import SIDE
from quality.search_training import reader_for

STEPS, GROUPS = 1500, 12


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=search.QUICK.pictures)
    parser.add_argument("--out", type=Path, default=RESULTS / "search" / "relevance.json")
    parser.add_argument("--work", type=Path, default=Path("out/quality/search_relevance"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.perf_counter()
    scoring = search_scorer.Scoring(options.steps, GROUPS)
    form = replace(search.QUICK, pictures=options.pictures, scoring=scoring)
    folder = options.work / search_run.task().digest_for(form)
    found: dict[tuple[int, str], list[float]] = {}
    losses = []
    for seed in range(options.seeds):
        reader = reader_for(form.training, seed, folder)
        weights = search_run.weights_in(folder, search.Unit(seed, 0, search.BASELINE, "trained", None))
        _, history = search_scorer.trained(scoring, seed, weights, reader, log=True)
        losses.append([round(statistics.fmean(part), 4) for part in (history[:100], history[-100:])])
        for budget in form.budgets:
            for name in ("saliency", "query", "start", "trained"):
                unit = search.Unit(seed, budget, search.BASELINE, name, None)
                found.setdefault((budget, name), []).extend(search.run(unit, form, folder, weights)["pictures"])
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
        "plan": asdict(scoring),
        "seeds": options.seeds,
        "pictures": options.pictures,
        "picture_side": SIDE,
        "semantic_channels": f"{CHANNELS['semantic'].stop - CHANNELS['semantic'].start}: x and y by "
        f"{search_scorer.ALONG} Gaussians each, likeness to each colour; the query names its place or colour in the "
        "same channels",
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
