"""The table of goals: each figure is the file's, a miss says so, and what no file has is not passed over."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import goal_figures as figures  # noqa: E402
import goals  # noqa: E402
import report  # noqa: E402

NOT_MEASURED = {"CPU time of a plan on OpenGL: at most 40 us"}
"""In the results that are kept."""


def lines(table: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if row[0] != "goal" and row[0] != "---"]


def timing(ms: float, **more: float) -> dict[str, Any]:
    return {"median_ms": ms, "iqr_ms": 0, **more}


def row(verb: str = "mipmap", side: int = 1024, about: str = "", **changes: Any) -> dict[str, Any]:
    about_it = {"part": "end to end", "batch": 1, "channels": 3, "dtype": "float32", "cache": "warm", "floor_ms": 0.02}
    return {"verb": verb, "size": [side, side], "note": about, "sides": {}, **about_it, **changes}


def test_the_page_shows_the_goals() -> None:
    page = report.EVERY_ROW.read_text()
    shown = page.partition(report.GOAL_MARKS[0])[2].partition(report.GOAL_MARKS[1])[0]
    assert shown.strip() == goals.table(), "run python bench/report.py --readme"
    readme = (CHECKOUT / "README.md").read_text()
    assert "## Goals and figures\n" in page and "docs/benchmarks.md#goals-and-figures" in readme


def test_every_figure_is_found_but_for_those_that_no_run_took() -> None:
    found = lines(goals.table())
    assert {line[0] for line in found if "not measured" in line} == NOT_MEASURED
    wanted = sum(len(goal.files) for of in goals.TABLE.values() for goal in of)
    assert len(found) == wanted
    assert all("(../bench/results/" in line[-1] and ", 20" in line[-1] for line in found)


@pytest.mark.parametrize(
    ("bounds", "value", "verdict", "words"),
    [
        ({"most": 30}, 30, "met", "x: at most 30 us"),
        ({"most": 30}, 30.01, "missed", "x: at most 30 us"),
        ({"most": 0}, 0, "met", "x: at most 0 us"),
        ({"most": 0}, 1, "missed", "x: at most 0 us"),
        ({"least": 1.5}, 1.5, "met", "x: at least 1.5 us"),
        ({"least": 1.5}, 1.49, "missed", "x: at least 1.5 us"),
        ({}, 7, "reported", "x"),
    ],
)
def test_a_bound_that_is_reached_is_met(bounds: Any, value: float, verdict: str, words: str) -> None:
    goal = goals.Goal("x", "us", (), lambda data: None, **bounds)
    assert goal.verdict(value) == verdict and goal.words() == words


def test_the_table_follows_the_files(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(CHECKOUT / "bench" / "results", results)
    before = lines(goals.table(results))
    assert before == lines(goals.table())
    path = results / goals.BRIDGE
    data = json.loads(path.read_text())
    for one in data["share"]:
        one["bridge_p50_us"] = 29.0 if one["size"] == 2048 else 1.0
    data["date"] = "2027-01-01"
    path.write_text(json.dumps(data))
    (results / goals.KERNELS).unlink()
    after = lines(goals.table(results))
    [changed] = [line for line in after if line[0].startswith("map and unmap of a verb's")]
    assert changed[1:3] == ["29.0 us (mipmap 2048)", "met"] and changed[3].endswith("2027-01-01")
    gone = [line for line in after if line[-1] == goals.KERNELS]
    assert len(gone) == 3 and all("not measured" in line for line in gone)
    others = [(a, b) for a, b in zip(before, after, strict=True) if "bridge/" not in b[-1] and b not in gone]
    assert others and all(a == b for a, b in others)


def test_a_gain_is_torchs_fastest_over_ours() -> None:
    sides = {
        "gl compute": timing(2.0), "cuda graph of kernels": timing(0.5), "cuda kernels": timing(1.0, device_ms=0.25),
        "torch a": timing(3.0, device_ms=2.0), "torch other": timing(0.1), "torch graph of a": timing(1.5),
        "torch compiled": timing(2.5), "opencv": timing(0.01),
    }  # fmt: skip
    data = {"rows": [row(sides=sides, other_job={"torch other": "another"})]}

    def gain(*of: Callable[[str], bool], clock: str = "median_ms") -> float:
        found = figures.gain(figures.rows_of("mipmap", 1024), data, clock, *of)
        assert found is not None
        return found[0]

    assert gain() == 1.5 / 0.5
    assert gain(figures.is_call, figures.is_eager) == 3.0 / 1.0
    assert gain(figures.is_call, figures.is_compiled) == 2.5 / 1.0
    assert gain(figures.is_graph, figures.is_graph) == 1.5 / 0.5
    assert gain(clock="device_ms") == 2.0 / 0.25
    for other in (figures.rows_of("mipmap", 2048), figures.rows_of("mipmap", 1024, cache="cold")):
        assert figures.gain(other, data) is None


def test_auto_is_set_against_the_ways_that_it_chooses_among() -> None:
    def data(auto: float) -> figures.Data:
        ours = {"gl compute": timing(2.0), "cuda graph of a plan": timing(0.1), "gl less": timing(0.5)}
        sides = {"auto": timing(auto), "torch eager": timing(1.0), **ours}
        return {"rows": [row(sides=sides, other_job={"gl less": "fewer levels"}), row(sides={})]}

    assert figures.behind_our_own(data(2.1)) == (0, "of 1") and figures.behind_our_own(data(2.11)) == (1, "of 1")
    assert figures.behind_our_own({"rows": [row(sides={"auto": timing(9), "torch eager": timing(1)})]}) is None


def test_odd_sides_are_set_beside_their_even_neighbours() -> None:
    times = {4096: 10, 4097: 12, 4095: 20, 1025: 99, 2047: 9, 2048: 10}
    chains = [{"kernel": "chain", "dtype": "uint8", "side": side, "gpu_us": us} for side, us in times.items()]
    assert figures.kernel_odd_over_even("uint8", {"rows": chains}) == (2.0, "4095 over 4096")
    assert figures.kernel_odd_over_even("float32", {"rows": chains}) is None
    less = [one for one in chains if one["side"] not in (4095,)]
    assert figures.kernel_odd_over_even("uint8", {"rows": less}) == (1.2, "4097 over 4096")


def test_the_floor_leaves_ten_microseconds() -> None:
    sides = {"cuda kernels": timing(9, device_ms=0.07), "torch x": timing(1, device_ms=0.001)}
    data = {"rows": [row(side=4096, sides=sides, **figures.BYTES)]}
    assert figures.over_floor(data) == (pytest.approx(70 / (1.25 * 20 + 10)), "70.0 of 35.0 us")


def test_the_slowest_allocator_counts_and_no_opponent_does() -> None:
    about = {"batch": 1, "job": "patches"}
    rows = [
        {**about, "allocator": "GridTopK", "median_ms": 1.0},
        {**about, "allocator": "GridTopK", "median_ms": 2.0, "job": "patches, no relevance"},
        {**about, "allocator": "GridTopK", "median_ms": 30.0, "batch": 32},
        {**about, "allocator": "plain torch top-k", "median_ms": 9.0},
        {**about, "allocator": "plain torch top-k", "median_ms": 900.0, "batch": 32},
        {**about, "allocator": "GridTopK", "median_ms": 7.0, "job": "patches, planned"},
    ]
    data = {"rows": rows}
    assert figures.allocators(["GridTopK"], False, "", data) == (2.0, "GridTopK, picture alone")
    assert figures.allocators(["GridTopK"], False, ", planned", data) == (7.0, "GridTopK, relevance given")
    assert figures.allocators(["Spiral"], False, "", data) is None
    assert figures.batch_over_one(data) == (30.0, "GridTopK, patches")


def test_memory_is_of_the_bound_and_less_the_allowance() -> None:
    one = {"verb": "v", "dtype": "uint8", "backend": "gl", "shape": [1, 2], "result": 100, "picture": 100, "peak": 570}
    data = {"rows": [one, {**one, "graph": "kept", "peak": 9999}, {**one, "backend": "torch", "peak": 9999}]}
    assert figures.memory("gl", 0, data) == (pytest.approx(1.5), "v, uint8 of 1 x 2")
    assert figures.memory("gl", 190, data) == (pytest.approx(1.0), "v, uint8 of 1 x 2")
