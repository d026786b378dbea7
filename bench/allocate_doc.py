"""docs/allocators.md from the result files of bench_allocate.py: a table and a plot for each device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bench_allocate import BUDGETS, GRIDS, over
from rows import RESULTS

import gpu_lod as lod
from gpu_lod.report.files import between, write
from gpu_lod.report.plots import figure_of, svg_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
DOC = DOCS / "allocators.md"
MARKS = "<!-- tables: python bench/bench_allocate.py --doc -->", "<!-- end of tables -->"
HEADINGS = [
    "allocator",
    "relevance given",
    "picture alone",
    "a picture of 32, given",
    "of 32 calls, given",
    "a picture of 32, alone",
    "of 32 calls, alone",
]
GIVEN, ALONE = "patches", "patches, no relevance"
COLUMNS = [
    (GIVEN, False),
    (ALONE, False),
    (GIVEN, True),
    (f"{GIVEN}, a call each", True),
    (ALONE, True),
    (f"{ALONE}, a call each", True),
]
PLANNED = [(f"{job}, planned", many) for job in (GIVEN, ALONE) for many in (False, True)]
PLANNED_HEADINGS = ["planned, given", "of 32 planned, given", "planned, alone", "of 32 planned, alone"]
Data = dict[str, Any]
Found = dict[tuple[str, str, bool], dict[str, Any]]
"""Rows by allocator, job, and whether they are of a batch."""

TREE_CUTS = "FoveatedPyramid", "TokenDAG"
LATER = {"Residual": "2026-11-30"}
"""Allocators that some files are too old to hold, and the last day of these."""
LEARNED = {name for name in lod.allocate.names() if isinstance(lod.allocate.make(name), torch.nn.Module)}
GOALS = [
    ("GridTopK", ["GridTopK"], 4.0),
    ("tree cuts", [*TREE_CUTS], 8.0),
    ("all that do not learn", [name for name in lod.allocate.names() if name not in LEARNED], 40.0),
]
"""Milliseconds for one picture on two cores, at most."""
GPU_GOALS = [("one picture", False, 0.5), ("32 pictures", True, 3.0)]
"""Milliseconds on a GPU, at most."""


def result_files() -> list[Path]:
    return sorted((RESULTS / "allocate").glob("*.json"))


def update() -> None:
    """Write the doc's tables, and a plot beside it for each file."""
    for path in result_files():
        if any(row["job"] == "sites" for row in load(path)["rows"]):
            write(plot(load(path)), plot_of(path))
    write(with_tables(DOC.read_text("utf-8")), DOC)


def load(path: Path) -> Data:
    data: Data = json.loads(path.read_text("utf-8"))
    return data


def plot_of(path: Path) -> Path:
    return DOCS / f"allocators-{path.stem}.svg"


def with_tables(text: str) -> str:
    return between(text, MARKS, "\n\n".join(tables(path) for path in result_files()))


def tables(path: Path) -> str:
    """Milliseconds a picture, median and half the interquartile range."""
    data = load(path)
    batch = max(row["batch"] for row in data["rows"])
    found = {(row["allocator"], row["job"], row["batch"] > 1): row for row in data["rows"] if row["job"] != "sites"}
    names = list(dict.fromkeys(name for name, _, _ in found))
    gpu = data["tensors"] == "cuda"
    headings, columns_of = (HEADINGS + PLANNED_HEADINGS, COLUMNS + PLANNED) if gpu else (HEADINGS, COLUMNS)
    lines = [headings, ["---"] * len(headings)]
    for name in sorted(names, key=lambda name: found[name, GIVEN, False]["median_ms"]):
        cells = [found.get((name, job, many)) for job, many in columns_of]
        lines.append([name, *("" if row is None else figure(row) for row in cells)])
    first = next(iter(found.values()))
    rows, columns = first["grid"]
    drawn = f"![Cost of choosing the sites over the side of the grid and over K]({plot_of(path).name})"
    later = [name for name in lod.allocate.names() if name not in names]
    failed = dict.fromkeys(name.rpartition(": ")[2] for name in data["failures"] if ", planned, " in name)
    return "\n\n".join(
        part
        for part in [
            f"### {data['device']}, {data['date']}",
            f"Picture of {rows * first['patch']} x {columns * first['patch']}, grid {rows} x {columns}, K = "
            f"{first['budget']}, fp32, from the picture to its patches, milliseconds a picture: median ± half the "
            f"interquartile range; of {batch} pictures in a call, and of {batch} calls, another picture each, "
            f"a part in {batch} ([file](../bench/results/allocate/{path.name}), torch {data['versions']['torch']}, "
            f"commit {data['commit']}{'' if data.get('memory_kept') else ', with fresh memory for large results'}).",
            "\n".join("| " + " | ".join(line) + " |" for line in lines),
            gpu_goals(found) if gpu else goals(found),
            batches(found),
            *([f"Added since, and not measured here: {', '.join(later)}."] if later else []),
            *([f"No plans: {', '.join(failed)} wait for the GPU."] if failed else []),
            *([drawn, left_out(data)] if any(row["job"] == "sites" for row in data["rows"]) else []),
        ]
        if part
    )


def goals(found: Found) -> str:
    """What was aimed at on two cores, and whether it was reached: by the slowest of each kind, or missed by which."""
    lines = ["| aimed at on two cores | relevance given | picture alone |", "| --- | --- | --- |"]
    for what, names, most in GOALS:
        cells = [f"{what} at most {most:g} ms"]
        for job in (GIVEN, ALONE):
            rows = [found[name, job, False] for name in names if (name, job, False) in found]
            if not rows:
                cells.append("")
                continue
            rows.sort(key=lambda row: row["median_ms"], reverse=True)
            missed = [row for row in rows if row["median_ms"] > most]
            shown = ", ".join(f"{row['allocator']} {figure(row)}" for row in missed or rows[:1])
            cells.append(f"{'missed' if missed else 'reached'}: {shown}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gpu_goals(found: Found) -> str:
    """What was aimed at on a GPU, and which allocators reach it: called, or as a plan."""
    lines = ["| aimed at on a GPU | relevance given | picture alone |", "| --- | --- | --- |"]
    for what, many, most in GPU_GOALS:
        cells = [f"{what} at most {most:g} ms"]
        for job in (GIVEN, ALONE):
            ways = {"as plans": f"{job}, planned", "in calls": job}
            times = {
                how: {
                    name: row["median_ms"]
                    for (name, of, batch), row in found.items()
                    if batch == many and of == way and name in lod.allocate.names()
                }
                for how, way in ways.items()
            }
            best = {name: min(of[name] for of in times.values() if name in of) for of in times.values() for name in of}
            missed = [f"{name} {ms:.2f}" for name, ms in sorted(best.items(), key=lambda one: one[1]) if ms > most]
            reached = [f"{sum(ms <= most for ms in of.values())} of {len(of)} {how}" for how, of in times.items() if of]
            tail = [f"missed: {', '.join(missed)}"] if missed else []
            cells.append("; ".join([f"reached by {', '.join(reached)}", *tail]) if best else "not measured")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def batches(found: Found) -> str:
    """Which allocators take longer for a batch than for as many times one picture, of a row of its own, and than for
    calls with another picture each, by more than both spread."""
    lines = []
    for against, what in ((("", False), "as many times one picture"), ((", a call each", True), "as many calls")):
        slower = []
        for name, job, many in found:
            together, apart = found[name, job, True], found.get((name, job + against[0], against[1]))
            if not many or job not in (GIVEN, ALONE) or apart is None:
                continue
            times = together["batch"] // apart["batch"]
            if together["median_ms"] > times * apart["median_ms"] + (together["iqr_ms"] + times * apart["iqr_ms"]) / 2:
                ratio = together["median_ms"] / (times * apart["median_ms"])
                slower.append(f"{name} ({'relevance given' if job == GIVEN else 'picture alone'}) {ratio:.2f} times")
        lines.append(f"A batch takes longer than {what}, beyond the spread: {', '.join(slower) or 'none'}.")
    return " ".join(lines)


def left_out(data: Data) -> str:
    """Sides of grids and K that the plot has not."""
    there = {(row["grid"][0], row["budget"]) for row in data["rows"] if row["job"] == "sites"}
    lacking = [f"grid {side}, K {budget}" for side, budget in over(GRIDS, BUDGETS) if (side, budget) not in there]
    return f"Not measured, for want of time: {'; '.join(lacking)}." if lacking else ""


def figure(row: Data) -> str:
    batch = row["batch"]
    return f"{row['median_ms'] / batch:.2f} ± {row['iqr_ms'] / 2 / batch:.2f}"


def plot(data: Data) -> str:
    """Sites alone: over the grid's side, and over K."""
    sites = [row for row in data["rows"] if row["job"] == "sites"]
    usual = max({row["budget"] for row in sites}, key=lambda k: sum(row["budget"] == k for row in sites))
    grid = max({row["grid"][0] for row in sites}, key=lambda n: sum(row["grid"][0] == n for row in sites))
    by_grid = [row for row in sites if row["budget"] == min(usual, row["grid"][0] ** 2)]
    by_budget = [row for row in sites if row["grid"][0] == grid]
    with figure_of(2, (11, 6.0)) as (drawn, axes):
        handles = []
        for number, name in enumerate(dict.fromkeys(row["allocator"] for row in sites)):
            style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10], "marker": "."}
            for axis, rows, x in (
                (axes[0], by_grid, lambda row: row["grid"][0]),
                (axes[1], by_budget, lambda row: row["budget"]),
            ):
                own = sorted((x(row), row["median_ms"]) for row in rows if row["allocator"] == name)
                lines = axis.plot([at for at, _ in own], [ms for _, ms in own], label=name, **style)
            handles += lines
        for axis, rows, label in ((axes[0], by_grid, "side of the grid, patches"), (axes[1], by_budget, "K")):
            ticks = sorted({row["grid"][0] if axis is axes[0] else row["budget"] for row in rows})
            axis.set(xscale="log", yscale="log", xlabel=label)
            axis.set_xticks(ticks, map(str, ticks))
            axis.minorticks_off()
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.grid(alpha=0.25)
        axes[0].set(ylabel="milliseconds", title=f"K = {usual}, or all cells there are")
        axes[1].set(title=f"grid {grid} x {grid}")
        drawn.legend(handles, [handle.get_label() for handle in handles], loc="outside right upper", fontsize=8)
        drawn.suptitle(f"Choosing the sites, {data['device']}", fontsize=10)
        return svg_of(drawn)
