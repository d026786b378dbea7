"""The benchmarks: sides take turns, result files fit the schema, and the README shows them as they are."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import jsonschema
import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import report  # noqa: E402
import timer  # noqa: E402
from rows import SCHEMA, Row  # noqa: E402

RESULTS = sorted((CHECKOUT / "bench" / "results").glob("*.json"))


def test_there_are_results() -> None:
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_result_files_fit_the_schema(path: Path) -> None:
    data = json.loads(path.read_text())
    jsonschema.validate(data, SCHEMA)
    broken = {**data, "rows": [{**data["rows"][0], "dtype": "int8"}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_readme_shows_the_result_files() -> None:
    text = (CHECKOUT / "README.md").read_text()
    assert report.with_tables(text) == text, "run python bench/report.py --readme"


def test_sides_take_turns_and_the_slow_one_loses() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    timings = timer.race({"a": lambda: side("a", 0.001), "b": lambda: side("b", 0.004)}, seconds=0.01)
    assert timings["a"].median_ms < timings["b"].median_ms
    assert timings["a"].fastest_ms >= 1
    assert min(timing.calls for timing in timings.values()) >= 12
    switches = sum(x != y for x, y in itertools.pairwise(order))
    assert switches >= 4


def test_rows_tell_losses_and_leave_other_jobs_out() -> None:
    def timing(ms: float) -> timer.Timing:
        return timer.Timing(ms, 0.01, ms, 12)

    row = Row(
        "mipmap", "end to end", 8, 8, 1, 3, "float32", "warm", 1000,
        {"gl compute": timing(4.0), "torch a": timing(1.0), "torch b": timing(2.0), "auto": timing(1.2)},
        other_job=("torch a",),
    )  # fmt: skip
    result = row.as_dict(bandwidth=1e9)
    assert result["best_torch"] == "torch b"
    assert result["gl_speedup"] == 0.5
    assert result["auto_ok"]
    row.sides["auto"] = timing(2.2)
    assert not row.as_dict(bandwidth=1e9)["auto_ok"]
