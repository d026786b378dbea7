"""The benchmark of encoders runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import bench_encoder  # noqa: E402


def test_it_runs_and_the_table_has_every_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_encoder, "declare_vision_operators", lambda: None)  # they are declared already
    path = tmp_path / "quick.json"
    assert bench_encoder.main(["--quick", "--out", str(path)]) == 0
    data = json.loads(path.read_text())
    jobs = [row["job"] for row in data["rows"]]
    assert jobs[0] == bench_encoder.FULL and {bench_encoder.OWN, bench_encoder.ADAPTER} < set(jobs) and len(jobs) == 7
    data["rows"][0]["median_ms"], data["rows"][1]["median_ms"] = 90.0, 10.0
    own, adapter = data["rows"][-2:]
    own["median_ms"], adapter["median_ms"] = 100.0, 104.0
    own["iqr_ms"] = adapter["iqr_ms"] = 6.0
    path.write_text(json.dumps(data))
    table = bench_encoder.tables(path)
    assert "| 9.0x |" in table and "takes 4.0% more" in table
    own["iqr_ms"] = 9.0
    path.write_text(json.dumps(data))
    assert "takes as long, within the spread, as" in bench_encoder.tables(path)
