"""The benchmark of the token memory runs, and is the same each time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import bench_streaming


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("streaming") / "quick.json"
    assert bench_streaming.main(["--quick", "--out", str(path)]) == 0
    return dict(json.loads(path.read_text()))


def test_rows_are_the_same_but_for_the_times(quick: dict[str, Any]) -> None:
    again = bench_streaming.measure(bench_streaming.QUICK_FRAMES)
    for one, other in zip(quick["rows"], again, strict=True):
        assert {**one, "ms": 0} == {**other, "ms": 0} and one["ms"]["median"] > 0


def test_what_hysteresis_does(quick: dict[str, Any]) -> None:
    rows = {(row["scene"], row["memory"]): row for row in quick["rows"]}
    for scene in bench_streaming.SCENES:
        own, plain, afresh = (rows[scene, name] for name in ("hysteresis", "none", "afresh"))
        assert own["churn"]["mean"] < plain["churn"]["mean"], "fewer sites change"
        assert 0.9 < own["held"]["mean"] <= 1 and own["held"]["n"] == 3
        assert plain["churn"] == afresh["churn"] and plain["held"]["mean"] == pytest.approx(1, abs=1e-5)
        assert own["refreshed"]["mean"] <= 1 == afresh["refreshed"]["mean"]


def test_videos_are_what_they_are_called() -> None:
    photo, other = torch.randint(0, 256, (2, 3, 300, 451), dtype=torch.uint8)
    height, width = bench_streaming.SIZE
    frames = list(bench_streaming.panned(photo, other, 90))
    for before, after in ((0, 1), (30, 31)):
        assert torch.equal(frames[before][:, :, 3:], frames[after][:, :, :-3])
    assert torch.equal(frames[60][:, :, :-3], frames[61][:, :, 3:]), "back"
    first, second = list(bench_streaming.with_object(photo, other, 2))
    left = bench_streaming.OBJECT
    assert torch.equal(first[:, 90 : 90 + left, :left], second[:, 90 : 90 + left, 4 : left + 4])
    assert torch.equal(second[:, 90 : 90 + left, :4], photo[:, 90 : 90 + left, :4]), "what it leaves is seen again"
    grains = torch.stack([frame.float() for frame in bench_streaming.noisy(photo // 4 + 96, other, 3)])
    assert abs(float(grains.std(0).mean()) - 0.886 * bench_streaming.NOISE) < 0.2  # of three draws
    assert grains.shape == (3, 3, height, width)


def test_a_bad_file_is_refused(quick: dict[str, Any]) -> None:
    for name, value in (("scene", "zoom"), ("churn", {"mean": 0.5})):
        bad = json.loads(json.dumps(quick))
        bad["rows"][0][name] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, bench_streaming.SCHEMA)
