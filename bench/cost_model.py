"""The cost model of docs/cost_model.md: its constants, fitted from a result file, and how far they are off.

python bench/cost_model.py [FILE]   constants, crossovers, and measured beside modelled for each point
python bench/cost_model.py --doc    put the tables of all result files into docs/cost_model.md

    t = fixed + per level * levels + work / rate

Chains work in bytes, samplers in samples. The constants are those that make the sum of squared relative errors least,
none below 0.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cost_fit import LARGEST, Fit, crossovers, fits
from report import result_files

from gpu_lod.report.files import between, load, write
from gpu_lod.report.rows import figure, job
from gpu_lod.report.text import machine, on_cuda

DOC = Path(__file__).resolve().parents[1] / "docs" / "cost_model.md"
MARKS = "<!-- tables: python bench/cost_model.py --doc -->", "<!-- end of tables -->"


def tables(path: Path) -> str:
    """All that the doc says of a result file."""
    data = load(path)
    found = fits(data["rows"], borrowed=data.get("borrowed", False))
    title = f"### {machine(data)}, {data['date']}"
    if not found:
        return f"{title}\n\nToo few rows for a fit."
    errors = [abs(error) for one in found for error in one.errors()]
    return "\n\n".join(
        [
            title,
            f"From [{path.name}](../bench/results/{path.name}); copy bandwidth {data['copy_gb_per_s']} GB/s. "
            f"{len(errors)} points, median relative error {statistics.median(errors):.0%}, "
            f"nine in ten below {np.quantile(errors, 0.9):.0%}.",
            _constants_table(found, data["copy_gb_per_s"]),
            "From which size on each of our backends is faster than torch, by the fastest way of each at 1024; "
            "a CUDA graph is set against torch's graphs too"
            + (". No way is taken to be faster than a copy:" if on_cuda(data) else ":"),
            _crossover_table(found, data["copy_gb_per_s"] if on_cuda(data) else math.inf),
            "<details><summary>Measured and modelled, every point</summary>\n",
            _points_table(found),
            "</details>",
        ]
    )


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, ["---"] * len(headings), *lines])


def _constants_table(found: list[Fit], bandwidth: float) -> str:
    lines = []
    for one in found:
        fixed, level, unit = one.constants
        if one.way.unit == "byte":
            rate = 1e-6 / unit if unit else None
            speed = f"{figure(rate)} GB/s ({rate / bandwidth:.0%} of a copy)" if rate else "not seen"
        else:
            speed = f"{figure(unit * 1e6)} ns a sample" if unit else "not seen"
        left_out = "" if one.left_out is None else f"{one.left_out:.0%}"
        lines.append(
            [
                one.way.job, one.way.name, str(len(one.points)), figure(fixed), figure(level * 1e3), speed,
                f"{one.median_error:.0%}", left_out,
            ]
        )  # fmt: skip
    headings = ["verb", "way", "points", "fixed, ms", "a level, us", "work", "median error", "on points left out"]
    return _table(headings, lines)


def _crossover_table(found: list[Fit], fastest: float) -> str:
    lines = []
    for verb, batch, ours, theirs, side, ratio in crossovers(found, fastest):
        if side is None:
            where = f"never up to {LARGEST} px"
        elif side == 32:
            where = "always"
        else:
            where = f"from {side} px"
        lines.append([verb, str(batch), ours.way.name, theirs.way.name, where, f"{ratio:.2f}"])
    return _table(["verb", "batch", "ours", "torch", "ours is faster", "ours / torch at 1024"], lines)


def _points_table(found: list[Fit]) -> str:
    lines = [
        [
            one.way.job, one.way.name, job(point.row), figure(point.ms), figure(one.ms(point.levels, point.work)),
            f"{point.ms / one.ms(point.levels, point.work):.2f}",
        ]
        for one in found
        for point in one.points
    ]  # fmt: skip
    return _table(["verb", "way", "job", "measured, ms", "modelled, ms", "measured / modelled"], lines)


def with_tables(text: str, paths: Sequence[Path]) -> str:
    """The doc's text with the tables between its marks brought up to date."""
    return between(text, MARKS, "\n\n".join(tables(path) for path in paths))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--doc"]:
        write(with_tables(DOC.read_text(), result_files()), DOC)
        return
    for path in [Path(argument) for argument in arguments] or result_files():
        print(tables(path))


if __name__ == "__main__":
    main()
