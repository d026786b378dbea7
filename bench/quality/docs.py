"""What docs/quality.md, docs/search.md and README.md show of the result files, between their marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rows import RESULTS

from gpu_lod.report.files import between
from quality import tables
from quality.tables import Cells, Data, figure, number, piped

ROOT = Path(__file__).resolve().parents[2]
QUALITY, SEARCH, README = ROOT / "docs" / "quality.md", ROOT / "docs" / "search.md", ROOT / "README.md"
MARKS = "<!-- quality: python bench/quality/report.py -->", "<!-- end of quality -->"
BEST = 3
"""Methods of each task in the README."""


def result_files() -> list[Path]:
    return sorted((RESULTS / "quality").glob("*.json"))


def updated(path: Path) -> str:
    """A file's text with what is between its marks brought up to date."""
    return between(path.read_text("utf-8"), MARKS, CONTENT[path]())


def quality() -> str:
    return "\n\n".join(markdown(tables.load(path), f"../bench/results/quality/{path.name}") for path in result_files())


def markdown(data: Data, link: str) -> str:
    """A result file in Markdown."""
    parts = [f"## The {data['form']} form, {data['date']}", f"{tables.about(data)} ([file]({link}))."]
    for name, task in data["tasks"].items():
        more = [f"By eccentricity, and by how wrong the fixation is: [{SEARCH.name}]({SEARCH.name})."]
        parts += [f"### {task['title']}", *tables.paragraphs(task), *(more if name == "search" else [])]
        for budget in tables.budgets(task):
            parts += [f"**{task['title']}, {budget} tokens**", piped(tables.every_row(task, budget))]
    parts += ["### Not in the tables", "\n".join(f"- {line}" for line in tables.left_out(data))]
    return "\n\n".join(part for part in parts if part)


def search() -> str:
    parts = []
    for path in result_files():
        data = tables.load(path)
        for task in [task for name, task in data["tasks"].items() if name == "search"]:
            settings = task["settings"]
            parts += [
                f"## The {data['form']} form, {task['measured']['date']}",
                f"The reader: {settings['reader']}. Chance is {settings['chance']}. All rows, and what they cost, are "
                f"in [quality.md](quality.md) ([file](../bench/results/quality/{path.name})).",
                *search_tables(task),
            ]
    learned = json.loads((RESULTS / "search" / "relevance.json").read_text("utf-8"))
    parts += [
        "## Relevance that learns",
        "`ContextualizedRelevance`, trained through a straight-through top-k with the reader frozen, "
        f'{learned["plan"]["steps"]} steps ([file](../bench/results/search/relevance.json)). "query" is a bump where '
        "the digit is: what a relevance that understood the question would give.",
        piped(learned_relevance(learned)),
    ]
    return "\n\n".join(parts)


def search_tables(task: Data) -> list[str]:
    parts = []
    for budget in tables.budgets(task):
        parts += [
            f"Right answers by how wrong the place is that relevance (query) or the fixation (oracle) is about, K = "
            f"{budget}: {task['settings']['error']}.",
            piped(tables.by_error(task, budget)),
            f"Right answers by the distance of the digit from the fixation, in sides, K = {budget}:",
            piped(tables.by_eccentricity(task, budget)),
        ]
    return parts


def learned_relevance(data: Data) -> Cells:
    lines = [["K", "GridTopK on", "accuracy", "over its start", "over saliency"]]
    for row in data["rows"]:
        gaps = [(row[key]["difference"], row[key]["interval"]) for key in ("over_start", "over_saliency")]
        every = [(row["accuracy"], row["interval"]), *gaps]
        lines.append([str(row["budget"]), row["relevance"], *(f"{v:.3f} ± {(b - a) / 2:.3f}" for v, (a, b) in every)])
    return lines


def readme() -> str:
    """Of each task the rows that matter, by the longest form that has it."""
    cells = [["task", "K", "method", "relevance", "accuracy", "x 1000 / K", "peak memory", "verdict"]]
    forms = []
    for task, form in longest().values():
        budget = tables.usual_budget(task)
        forms.append(f"{task['title']} {form}")
        shown = tables.best_of(task, budget, BEST) + tables.baselines(task, budget)
        for row in [row for row in tables.rows_at(task, budget) if row in shown]:
            cells.append(
                [
                    task["title"], str(row["tokens"]), tables.named(row), row["relevance"] or "",
                    figure(row["values"].get(task["accuracy"])), number(row["per_token"], ".2f"),
                    tables.size(row["peak_bytes"]), row["verdict"],
                ]
            )  # fmt: skip
    about = f"Means ± half the 95% interval over pictures: {', '.join(forms)}."
    return "\n\n".join([about, piped(cells)])


def longest() -> dict[str, tuple[Data, str]]:
    """Tasks by name, in the order of the program that runs them, and a link to where each comes from."""
    found = {}
    for path in sorted(result_files(), key=lambda path: path.stem == "full"):
        data = tables.load(path)
        for name, task in data["tasks"].items():
            date = task["measured"]["date"]
            link = f"([{data['form']} form, {date}]({path.relative_to(ROOT).as_posix()}))"
            found[name] = task, link
    return found


CONTENT: dict[Path, Callable[[], str]] = {QUALITY: quality, SEARCH: search, README: readme}
