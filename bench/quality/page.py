"""All result files as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quality import plots, tables
from quality.tables import Data
from quality.task import HERE

TEMPLATE = HERE / "page.html"


def html(found: Sequence[Data]) -> str:
    """The page. The same files give the same text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    forms = [
        {
            "name": data["form"],
            "date": data["date"],
            "about": tables.about(data),
            "summary": [line for task in data["tasks"].values() for line in _summary(task)],
            "tasks": [_task(f"{data['form']}-{name}", task, Markup) for name, task in data["tasks"].items()],
            "left_out": list(tables.left_out(data)),
        }
        for data in found
    ]
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(forms=forms)


def _summary(task: Data) -> list[dict[str, Any]]:
    """Every method where tasks are compared; where it was told the right place, if it was told one."""
    budget = tables.usual_budget(task)
    lines = []
    for row in [row for row in tables.rows_at(task, budget) if not row["error"]]:
        value = row["values"].get(task["accuracy"])
        lines.append(
            {
                "task": task["title"],
                "row": row,
                "accuracy": value,
                "figure": tables.figure(value),
                "per_token": tables.number(row["per_token"], ".2f"),
                "ms": tables.milliseconds(row["ms"]),
                "size": tables.size(row["peak_bytes"]),
                "coverage": tables.number(row["coverage"], ".2f"),
                "kind": _kind(row),
            }
        )
    return lines


def _task(name: str, task: Data, markup: Any) -> dict[str, Any]:
    budgets, usual = tables.budgets(task), tables.usual_budget(task)
    places = plots.places(task, f"{name}-places")
    shown: list[tuple[str, tables.Cells]] = [
        (f"Every row at {budget} tokens", tables.every_row(task, budget)) for budget in budgets
    ]
    for budget in budgets:
        shown.append((f"By eccentricity, {budget} tokens", tables.by_eccentricity(task, budget)))
        shown.append((f"By how wrong the place is, {budget} tokens", tables.by_error(task, budget)))
    return {
        "id": name,
        "title": task["title"],
        "sentence": tables.in_a_sentence(task).replace("**", ""),
        "paragraphs": list(tables.paragraphs(task)),
        "plots": [markup(svg) for svg in (plots.costs(task, f"{name}-costs"), places) if svg],
        "tables": [
            {"title": title, "head": cells[0], "rows": cells[1:], "open": title == f"Every row at {usual} tokens"}
            for title, cells in shown
            if cells
        ],
    }


def _kind(row: Data) -> str:
    verdict: str = row["verdict"]
    return {"baseline": "base", "every token": "base", "no": "lost", "open": "open"}.get(verdict, "won")
