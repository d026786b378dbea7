"""The visual search by itself: bench/results/search/search.json and a table on the terminal.

python bench/quality/search_run.py [--full] [--out FILE] [--work FOLDER]

A stopped run goes on where it was: units that are done are lines of a file in the work folder, and so are readers.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import torch
from scipy import stats

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

from rows import RESULTS, common, versions, write  # noqa: E402

from quality import search, search_scenes, search_training, search_verdict  # noqa: E402

Row = dict[str, Any]
CONFIDENCE = 0.95
SOURCES = ("memory", "search", "search_cuts", "search_learned", "search_reader", "search_scenes", "search_scorer",
           "search_training", "search_way")  # fmt: skip
"""Modules that results depend on."""
_ROW = ("budget", "allocator", "relevance", "fixation", "error")
_INTERVAL = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["task", "versions", "commit", "date", "form", "seeds", "about", "rows"],
    "properties": {
        "seeds": {"type": "integer", "minimum": 3},
        "rows": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": [*_ROW, "accuracy", "interval", "by_seed", "place", "colour", "by_eccentricity", "ms"],
                "properties": {
                    "accuracy": {"type": "number", "minimum": 0, "maximum": 1},
                    "interval": _INTERVAL,
                    "over_baseline": {"type": "object", "required": ["difference", "interval"]},
                },
            },
        },
    },
}


def digest(form: search.Form) -> str:
    """Of all that results depend on: the form, the code of the task, the library's version."""
    code = [(HERE / f"{name}.py").read_bytes() for name in SOURCES]
    about = json.dumps([asdict(form), common()["versions"]], sort_keys=True).encode()
    return hashlib.sha256(b"".join([*code, about])).hexdigest()[:12]


def finished(path: Path) -> dict[str, Row]:
    """Metrics by key; a line that is torn counts as never written."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[json.dumps(entry["place"], sort_keys=True)] = entry["metrics"]
    return found


def run_all(form: search.Form, work: Path) -> list[tuple[search.Unit, Row]]:
    """Every unit with its metrics, each computed once."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "units.jsonl"
    done, found = finished(path), []
    with path.open("a") as file:
        file.write("\n")  # what follows a torn line is one of its own
        for unit in search.units(form):
            key = json.dumps(unit.place, sort_keys=True)
            if key not in done:
                done[key] = search.run(unit, form, work)
                file.write(json.dumps({"place": unit.place, "metrics": done[key]}) + "\n")
                file.flush()
            found.append((unit, done[key]))
    return found


def interval(values: list[float]) -> list[float]:
    """Of the mean, by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return [mean, mean]
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return [round(float(mean - half), 5), round(float(mean + half), 5)]


def rows_of(found: list[tuple[search.Unit, Row]]) -> list[Row]:
    """Units of all seeds together: means, intervals over pictures x seeds, and differences to the baseline of the same
    budget on saliency, picture by picture."""

    def row_of(unit: search.Unit) -> tuple[Any, ...]:
        return tuple(unit.place[name] for name in _ROW)

    groups: dict[tuple[Any, ...], list[Row]] = {}
    for unit, metrics in found:
        groups.setdefault(row_of(unit), []).append(metrics)
    pictures = {row: list(itertools.chain(*(part["pictures"] for part in parts))) for row, parts in groups.items()}
    verdicts, result = search_verdict.verdicts(pictures), []
    for row, parts in groups.items():
        mine, base = pictures[row], pictures.get((row[0], search.BASELINE, "saliency", None, 0.0))
        bins = {
            name: [sum(part["by_eccentricity"][name][i] for part in parts) for i in (0, 1)]
            for name in parts[0]["by_eccentricity"]
        }
        entry = {
            **dict(zip(_ROW, row, strict=True)),
            "accuracy": round(statistics.fmean(mine), 5),
            "interval": interval(mine),
            "by_seed": [part["accuracy"] for part in parts],
            **{kind: round(statistics.fmean(part[kind] for part in parts), 5) for kind in ("place", "colour")},
            "by_eccentricity": bins,
            **{name: round(statistics.median(part[name] for part in parts), 3) for name in ("ms", "reader_ms")},
            "peak_bytes": max(part["peak_bytes"] for part in parts),
            **verdicts[row],
        }
        if base is not None:
            apart = [a - b for a, b in zip(mine, base, strict=True)]
            entry["over_baseline"] = {"difference": round(statistics.fmean(apart), 5), "interval": interval(apart)}
        result.append(entry)
    return result


def about(form: search.Form) -> dict[str, Any]:
    """What a reader of the numbers has to know."""
    return {
        "pictures": f"{search_scenes.SIDE} x {search_scenes.SIDE}, {search_scenes.COUNT} digits of "
        f"{search_scenes.DIGIT} px each, patches of {search_training.PATCH} px, a grid of {search_training.GRID}^2; "
        "digits and photographs of the test are in no training picture",
        "reader": "one a seed, for all allocators; trained on tokens of " + ", ".join(search_training.MIXTURE)
        + " drawn evenly, with relevance about some of the digits; seeds share the training pictures, not the order "
        "nor the start, and have test pictures of their own",
        "interval": "95%, Student's t over pictures x seeds; over_baseline is paired by picture, with "
        f"{search.BASELINE} on saliency at the same budget",
        "error": "deviation, in sides, of the noise on the place that the query's relevance or the oracle is about",
        "by_eccentricity": "[right, asked] by the digit's distance from the fixation in sides; from the picture's "
        "centre where there is no fixation",
        "ms": "median of one call for one picture, patches included, from a pyramid and a relevance map; a shared "
        "machine, one thread: rough",
        "reader_ms": "median of one question by colour about one picture's tokens, with the cut of what cuts inside "
        "the reader",
        "peak_bytes": "the tokens, and the most bytes of tensors that the reader holds at once for one such question",
        "trained": "relevance and allocators on training pictures alone, by way of the reader as it is; a row named "
        '"untrained" is the same allocator as it starts',
        "chance": 1 / search_scenes.CLASSES,
        "left_out": search.left_out(form),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all budgets and allocators, and a longer training: hours")
    parser.add_argument("--out", type=Path, default=RESULTS / "search" / "search.json")
    parser.add_argument("--work", type=Path, default=Path("out/quality/search"), help="what a stopped run goes on from")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the jobs are small: more threads wait for each other
    form = search.full() if options.full else search.QUICK
    start = time.perf_counter()
    rows = rows_of(run_all(form, options.work / digest(form)))
    data = {
        "task": "search",
        **common(),
        "form": asdict(form),
        "seeds": form.seeds,
        "about": about(form),
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }
    data["versions"] |= versions(("scikit-learn", "scikit-image"))
    data = json.loads(json.dumps(data))
    jsonschema.validate(data, SCHEMA)
    write(data, options.out)
    for row in sorted(rows, key=lambda row: (row["budget"], -row["accuracy"])):
        low, high = row["interval"]
        what = [row["allocator"], *(str(row[name]) for name in ("relevance", "fixation") if row[name])]
        print(f"{row['budget']:5} {row['accuracy']:.3f} [{low:.3f}, {high:.3f}] {', '.join(what)}, {row['error']}")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
