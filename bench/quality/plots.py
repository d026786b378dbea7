"""Plots of a task as SVG in the colours of the page that they are put into."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_lod.report.plots import figure_of, inline, svg_of
from quality import tables
from quality.methods import BASELINE
from quality.summary import EVEN
from quality.tables import RANDOM, Data, named

SHOWN = 6
"""Methods in colour beside the baselines; the others are grey."""
_COLOURS = ("#d97706", "#2563eb", "#059669", "#db2777", "#7c3aed", "#0891b2")
_GREY = "#9ca3af"
_BASELINES = {BASELINE: ("#000000", "-"), EVEN: ("#6b7280", "--"), RANDOM: ("#6b7280", ":")}
Style = tuple[str, str]


def styles_of(task: Data) -> dict[str, Style]:
    """(colour, line) by name, of the baselines and of what is best where methods are compared."""
    rows = tables.comparable(task, tables.usual_budget(task))
    names = [named(row) for row in rows if row["budget"] is not None and row["method"] not in _BASELINES]
    return {**_BASELINES, **{name: (colour, "-") for name, colour in zip(names[:SHOWN], _COLOURS, strict=False)}}


def costs(task: Data, name: str) -> str:
    """Accuracy with its interval over the budget, and over the time."""
    first, budget, styles = task["accuracy"], tables.usual_budget(task), styles_of(task)
    with figure_of(2, (13, 4.8)) as (figure, axes):
        handles = {}
        every = {k: tables.comparable(task, k) for k in tables.budgets(task)}
        rows = [row for some in every.values() for row in some if row["budget"] is not None and first in row["values"]]
        for label in sorted({named(row) for row in rows}, key=lambda label: (label in styles, label)):
            own = sorted((row for row in rows if named(row) == label), key=lambda row: row["budget"])
            aside = (
                1 + 0.012 * ([*styles].index(label) - len(styles) / 2) if label in styles else 1
            )  # so bars stand apart
            at = [row["budget"] * aside for row in own]
            handle = _line(axes[0], at, [row["values"][first] for row in own], label, styles)
            if label in styles:
                handles[label] = handle
        for row in [row for row in rows if row["budget"] == budget and row["ms"]]:
            _line(axes[1], [row["ms"]], [row["values"][first]], named(row), styles)
            axes[1].annotate(
                named(row), (row["ms"], row["values"][first]["mean"]), xytext=(4, 3), textcoords="offset points",
                fontsize=6, color=styles.get(named(row), (_GREY, ""))[0],
            )  # fmt: skip
        axes[0].set(xlabel="tokens", ylabel=first, xscale="log", title="over the budget, with 95% intervals")
        axes[0].set_xticks(list(every), [str(k) for k in every])
        axes[1].set(xlabel=f"ms: {task['ms']}", ylabel=first, title=f"over the time, {budget} tokens")
        if any(row["ms"] for row in rows):
            axes[1].set(xscale="log")
            axes[1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for axis in axes:
            axis.minorticks_off()
        return _finished(figure, axes, {label: handles[label] for label in styles if label in handles}, name)


def places(task: Data, name: str) -> str:
    """Accuracy by the distance from the fixation, and by how wrong that is; empty where neither was measured."""
    first, budget, styles = task["accuracy"], tables.usual_budget(task), styles_of(task)
    rows = [row for row in tables.comparable(task, budget) if "by_eccentricity" in row and not row["error"]]
    wrong = {_who(row) for row in task["rows"] if row["error"]}
    if not rows and not wrong:
        return ""
    with figure_of(2, (13, 4.8)) as (figure, axes):
        handles = {}
        bins = list(rows[0]["by_eccentricity"]) if rows else []
        for row in sorted(rows, key=lambda row: named(row) in styles):
            known = [
                (i, *row["by_eccentricity"][name]) for i, name in enumerate(bins) if row["by_eccentricity"][name][1]
            ]
            shares = [_share(right, asked) for _, right, asked in known]
            handle = _line(axes[0], [i for i, *_ in known], shares, named(row), styles)
            if named(row) in styles:
                handles[named(row)] = handle
        axes[0].set_xticks(range(len(bins)), bins)
        axes[0].set(xlabel="distance from the fixation, sides", ylabel=first, title=f"by eccentricity, {budget} tokens")
        colours = dict(zip(sorted(wrong), ((c, line) for line in ("-", "--") for c in _COLOURS), strict=False))
        for who in sorted(wrong):
            own = [row for row in task["rows"] if row["budget"] == budget and _who(row) == who]
            own.sort(key=lambda row: row["error"])
            label = f"{who[0]}, {who[1]}"
            values = [row["values"][first] for row in own]
            handle = _line(axes[1], [row["error"] for row in own], values, label, {label: colours[who]})
            handle.set_label(label)
        axes[1].legend(fontsize=8, frameon=False)
        axes[1].set(xlabel="deviation of the place, sides", ylabel=first, title=f"by error, {budget} tokens")
        return _finished(figure, axes, handles, name)


def _who(row: Data) -> tuple[str, str]:
    return row["method"], f"{row['relevance']}{', oracle' if row['fixation'] == 'oracle' else ''}"


def _share(right: int, asked: int) -> Data:
    """With Wilson's 95% interval."""
    mean, z = right / asked, 1.96
    centre, scale = mean + z * z / 2 / asked, 1 + z * z / asked
    half = z * math.sqrt(mean * (1 - mean) / asked + (z / 2 / asked) ** 2)
    return {"mean": mean, "low": (centre - half) / scale, "high": (centre + half) / scale, "n": asked}


def _line(axis: Any, x: Sequence[float], values: Sequence[Data], label: str, styles: dict[str, Style]) -> Any:
    """Means, joined; intervals of what is in colour."""
    colour, dashes = styles.get(label, (_GREY, "-"))
    means = [value["mean"] for value in values]
    if label not in styles:
        return axis.plot(x, means, dashes, color=colour, marker=".", linewidth=0.7, markersize=4, alpha=0.7)[0]
    gaps = list(_gaps(values))
    return axis.errorbar(
        x, means, yerr=[[low for low, _ in gaps], [high for _, high in gaps]], color=colour, linestyle=dashes,
        marker="o", markersize=4, capsize=2, linewidth=2 if label == BASELINE else 1.4, elinewidth=0.8,
    )  # fmt: skip


def _gaps(values: Sequence[Data]) -> Iterator[tuple[float, float]]:
    for value in values:
        known = value["low"] is not None and value["n"] >= tables.FEW
        yield (value["mean"] - value["low"], value["high"] - value["mean"]) if known else (0.0, 0.0)


def _finished(figure: Any, axes: Any, handles: dict[str, Any], name: str) -> str:
    for axis in axes:
        axis.set(ylim=(-0.03, 1.03))
        axis.grid(alpha=0.25)
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", fontsize=8, frameon=False)
    for patch in (figure.patch, *(axis.patch for axis in axes)):
        patch.set_visible(False)
    # Black is the page's own ink, light on dark where that is asked for.
    return re.sub(r"#000000|(?<=: )black", "currentColor", inline(svg_of(figure), name))
