"""Plots of result files as SVG: the same rows give the same bytes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_lod.report.files import Data
from gpu_lod.report.rows import Row, best, has_kernels, is_plain, kind_of, median, note, over_floor, own
from gpu_lod.report.text import machine

Curves = dict[str, list[Row]]
"""A job in words (its verb and note), and the rows that differ in size alone, small ones first."""

_COLOURS = {
    "gl": ("#c2410c", "#ea580c", "#f59e0b", "#b91c1c", "#db2777", "#7c2d12"),
    "cuda": ("#a16207", "#ca8a04"),
    "torch": ("#1d4ed8", "#0284c7", "#0891b2", "#4f46e5", "#7c3aed", "#64748b", "#38bdf8", "#93c5fd", "#a5b4fc"),
    "peer": ("#15803d", "#65a30d", "#0d9488", "#4d7c0f", "#166534"),
    "auto": ("#111827",),
}
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "gpu_lod", "text.parse_math": False, "font.size": 9,
    "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def curves(data: Data) -> Curves:
    """Jobs that were measured end to end at two sizes or more."""
    found: Curves = {}
    for row in data["rows"]:
        if is_plain(row):
            found.setdefault(f"{row['verb']}; {note(row)}" if note(row) else row["verb"], []).append(row)
    several = {name: rows for name, rows in found.items() if len({row["size"][0] for row in rows}) > 1}
    return {name: sorted(rows, key=lambda row: row["size"][0]) for name, rows in several.items()}


def time_over_size(rows: list[Row], limits: tuple[float, float], name: str) -> str:
    """Every side's time over the size, its interquartile range as a band, and time over the floor, beside each other.

    Args:
        limits: of the time, so that devices can be compared.
        name: what makes the ids of this plot its own.
    """
    with figure_of(2, (9.6, 4.0)) as (figure, axes):
        handles = []
        for side, colour, line in _sides(rows):
            there = [row for row in rows if side in row["sides"]]
            sizes = [row["size"][0] for row in there]
            times = [row["sides"][side] for row in there]
            low = [max(t["median_ms"] - t["iqr_ms"] / 2, t["median_ms"] * 1e-2) for t in times]
            high = [t["median_ms"] + t["iqr_ms"] / 2 for t in times]
            handles += axes[0].plot(sizes, [t["median_ms"] for t in times], line, color=colour, markersize=3)
            handles[-1].set_label(side)
            axes[0].fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            ratios = [(row["size"][0], over_floor(row, side)) for row in there]
            known = [(size, ratio) for size, ratio in ratios if ratio is not None]
            axes[1].plot([x for x, _ in known], [y for _, y in known], line, color=colour, markersize=3)
        floors = [(row["size"][0], row["floor_ms"]) for row in rows if row["floor_ms"] > 0]
        handles += axes[0].plot([x for x, _ in floors], [y for _, y in floors], ":", color="#6b7280", label="floor")
        axes[1].axhline(1, color="#6b7280", linestyle=":")
        axes[0].set(ylabel="milliseconds", ylim=limits)
        axes[1].set(ylabel="time / floor")
        for axis in axes:
            _over_sizes(axis, rows)
        figure.legend(handles, [handle.get_label() for handle in handles], loc="outside right upper", fontsize=7)
        return inline(svg_of(figure), name)


def limits_of(several: list[list[Row]]) -> tuple[float, float]:
    """That hold every time of some plots."""
    times = [t["median_ms"] for rows in several for row in rows for t in row["sides"].values()]
    floors = [row["floor_ms"] for rows in several for row in rows if row["floor_ms"] > 0]
    return min(times + floors) / 1.5, max(times) * 1.5


def overview(data: Data, target: Path) -> None:
    """The README's plot: the best of ours against the best torch way and the floor, for three verbs."""
    found, kernels = curves(data), has_kernels(data["rows"])
    with figure_of(3, (13, 4.2)) as (figure, axes):
        for axis, verb in zip(axes, ("mipmap", "hiz", "log_polar"), strict=True):
            names = [name for name in found if name.partition(";")[0] == verb]
            rows = [row for row in (found[names[0]] if names else []) if own(row) and best(row, "torch")]
            if not rows:
                continue
            sizes = [row["size"][0] for row in rows]
            names = list(dict.fromkeys(str(own(row)) for row in rows))
            label_of_ours = f"best of ours ({', '.join(names)})" if kernels else "best GL way"
            for fastest, label, colour in (
                (own, label_of_ours, "#c2410c"),
                (lambda row: best(row, "torch"), "best torch way", "#1d4ed8"),
            ):
                timings = [row["sides"][fastest(row)] for row in rows]
                axis.errorbar(
                    sizes, [t["median_ms"] for t in timings], yerr=[t["iqr_ms"] / 2 for t in timings],
                    marker="o", markersize=4, capsize=2, label=label, color=colour,
                )  # fmt: skip
            floors = [row["floor_ms"] for row in rows]
            axis.plot(sizes, floors, ":", color="#6b7280", label="floor: bytes / copy bandwidth")
            axis.set(title=verb)
            _over_sizes(axis, rows)
        axes[0].set_ylabel("milliseconds")
        for axis in [axis for axis in axes if axis.has_data()][: None if kernels else 1]:
            axis.legend(frameon=False, fontsize=9)
        figure.suptitle(f"{machine(data)}; fp32, batch 1, warm", fontsize=10)
        target.write_text(svg_of(figure), encoding="utf-8")


def _sides(rows: list[Row]) -> Iterator[tuple[str, str, str]]:
    """(side, colour, line) of every side of some rows; dashed where it does another job."""
    names = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    counts = dict.fromkeys(_COLOURS, 0)
    for side in sorted(names, key=lambda name: ("gl", "cuda", "auto", "torch", "peer").index(kind_of(name))):
        kind = kind_of(side)
        colour = _COLOURS[kind][counts[kind] % len(_COLOURS[kind])]
        counts[kind] += 1
        yield side, colour, "o--" if all(side in row.get("other_job", ()) for row in rows) else "o-"


def _over_sizes(axis: Any, rows: list[Row]) -> None:
    sides = sorted({row["size"][0] for row in rows})
    axis.set(xlabel="side of the image, px", xscale="log", yscale="log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # mathtext is off, for names may hold a dollar
    labelled: list[int] = []
    for side in sorted(sides):  # labels that would overlap are left out
        if not labelled or side >= 1.3 * labelled[-1]:
            labelled.append(side)
    axis.set_xticks(sides, [str(side) if side in labelled else "" for side in sides])
    axis.minorticks_off()
    axis.grid(alpha=0.25)


@contextmanager
def figure_of(columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure with axes beside each other, without a window and without a word of what the user has set."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that a font lacks: the page's reader has another
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(1, columns)


def svg_of(figure: Any) -> str:
    written = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=nothing)
    return written.getvalue()


def inline(svg: str, name: str) -> str:
    """For a page with several: no declaration, nothing that names another place, and ids of its own."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r' xmlns(:xlink)?="[^"]*"', "", body).replace("xlink:href", "href")
    return re.sub(r'( id="|url\(#|href="#)', lambda found: f"{found[1]}{name}-", body)


def summary(rows: list[Row]) -> str:
    """A plot in words, for those who cannot see it."""
    parts = []
    for row in rows:
        side = min(row["sides"], key=lambda one: median(row, one))
        parts.append(f"{row['size'][0]} px: {side} fastest, {median(row, side):.3g} ms")
    return "; ".join(parts)
