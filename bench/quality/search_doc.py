"""docs/search.md from the results of the visual search: python bench/quality/search_doc.py"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCH))

from rows import RESULTS  # noqa: E402

from gpu_lod.report.files import write  # noqa: E402

DOC = BENCH.parent / "docs" / "search.md"
BEGIN, END = "<!-- tables: python bench/quality/search_doc.py -->", "<!-- end of tables -->"
Row = dict[str, Any]


def figure(value: float, interval: Sequence[float]) -> str:
    return f"{value:.3f} ± {(interval[1] - interval[0]) / 2:.3f}"


def named(row: Row) -> list[str]:
    error = f", place wrong by {row['error']:g}" if row["error"] else ""
    return [row["allocator"], (row["relevance"] or "none") + error, row["fixation"] or ""]


def accuracy(rows: Sequence[Row]) -> list[list[str]]:
    """One line a method, its budgets beside each other; the best at the smallest budget first."""
    budgets = sorted({row["budget"] for row in rows})
    found: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        found.setdefault(tuple(named(row)), {})[row["budget"]] = row
    heading = ["allocator", "relevance", "fixation", *(f"K = {k}" for k in budgets)]
    lines = [
        [*name, *(figure(own[k]["accuracy"], own[k]["interval"]) if k in own else "" for k in budgets)]
        for name, own in found.items()
    ]
    return [heading, *sorted(lines, key=lambda line: [*line[3:]], reverse=True)]


def eccentricity(rows: Sequence[Row], budget: int) -> list[list[str]]:
    """Right answers by the distance of the digit from the fixation, exact places alone."""
    own = [row for row in rows if row["budget"] in (budget, 1024) and not row["error"]]
    bins = list(own[0]["by_eccentricity"])
    lines = []
    for row in own:
        cells = [row["by_eccentricity"].get(name) for name in bins]
        lines.append([*named(row), *(f"{cell[0] / cell[1]:.2f}" if cell and cell[1] else "" for cell in cells)])
    return [["allocator", "relevance", "fixation", *bins], *lines]


def cost(rows: Sequence[Row], budget: int) -> list[list[str]]:
    """Time and memory of a picture and one question, and the verdict."""
    lines = [["allocator", "relevance", "fixation", "tokens, ms", "reader, ms", "both, ms", "peak, MB", "verdict"]]
    for row in (row for row in rows if row["budget"] in (budget, 1024)):
        times = [row["ms"], row["reader_ms"], row["ms"] + row["reader_ms"]]
        memory = f"{row['peak_bytes'] / 1e6:.1f}"
        lines.append([*named(row), *(f"{ms:.1f}" for ms in times), memory, row["verdict"]])
    return lines


def learned(data: Row) -> list[list[str]]:
    lines = [["K", "GridTopK on", "accuracy", "over its start", "over saliency"]]
    for row in data["rows"]:
        gaps = [figure(row[key]["difference"], row[key]["interval"]) for key in ("over_start", "over_saliency")]
        lines.append([str(row["budget"]), row["relevance"], figure(row["accuracy"], row["interval"]), *gaps])
    return lines


def table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def tables() -> str:
    search, relevance = (
        json.loads((RESULTS / "search" / f"{name}.json").read_text("utf-8")) for name in ("search", "relevance")
    )
    budgets = sorted({row["budget"] for row in search["rows"]} - {1024})
    about, form = search["about"], search["form"]
    costs = []
    if "verdict" in search["rows"][0]:  # files of before have none
        heading = "Cost of one picture and one question, and the verdict against GridTopK that is told as much"
        costs = [f"{heading}, at K = {budgets[0]}:", table(cost(search["rows"], budgets[0]))]
    return "\n\n".join(
        [
            f"## The quick form, {search['date']}",
            f"{form['seeds']} seeds, {form['pictures']} pictures of each ({about['pictures']}). The reader: "
            f"{about['reader']}. Interval: {about['interval']}. Chance is {about['chance']}. Place wrong: "
            f"{about['error']} ([file](../bench/results/search/search.json), torch {search['versions']['torch']}).",
            table(accuracy(search["rows"])),
            f"Right answers by the distance of the digit from the fixation, in sides, at K = {budgets[0]}:",
            table(eccentricity(search["rows"], budgets[0])),
            *costs,
            "## Relevance that learns",
            "`ContextualizedRelevance`, trained through a straight-through top-k with the reader frozen, "
            f'{relevance["plan"]["steps"]} steps ([file](../bench/results/search/relevance.json)). "query" is a bump '
            "where the digit is: what a relevance that understood the question would give.",
            table(learned(relevance)),
        ]
    )


def with_tables(text: str) -> str:
    """The doc's text with what is between its marks brought up to date."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"


if __name__ == "__main__":
    write(with_tables(DOC.read_text("utf-8")), DOC)
