"""The benchmark of gradients runs, and its ways agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import bench_gradients


def test_two_jobs_and_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    assert bench_gradients.main(["--quick", "--out", str(path)]) == 0
    quick = json.loads(path.read_text())
    patches, chain = quick["rows"]
    assert patches["ways"].keys() == {"gl", "torch", "auto", "graph"} and chain["ways"].keys() == {
        "gl",
        "torch",
        "auto",
    }
    for name, value in (("job", "zoom"), ("ways", {"torch": patches["ways"]["torch"]})):
        bad = json.loads(json.dumps(quick))
        bad["rows"][0][name] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, bench_gradients.SCHEMA)


@pytest.mark.parametrize("job", bench_gradients.JOBS)
def test_ways_give_the_same_gradients(job: str) -> None:
    image, calls = bench_gradients.sides(job, (2, 3, 48, 64))
    for _ in range(2):
        found = {way: call() for way, call in calls.items()}
        largest = float(found["torch"].abs().max())
        for gradient in found.values():
            assert gradient.shape == image.shape
            assert largest > 0 and float((gradient - found["torch"]).abs().max()) < 2e-4 * largest
