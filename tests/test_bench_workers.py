"""The benchmark of a DataLoader's workers runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import bench_workers


def test_a_job_in_workers_and_alone_and_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    assert bench_workers.main(["--quick", "--out", str(path)]) == 0
    quick = json.loads(path.read_text())
    [row] = quick["rows"]
    assert row["job"] == "log_polar" and row["workers"].keys() == row["alone"].keys() == {"torch", "gl", "auto"}
    none = {"torch": 1.0, "gl": 0.0, "auto": 1.0}
    for name, value in (("job", "zoom"), ("alone", {"torch": 1.0}), ("workers", none)):
        bad = json.loads(json.dumps(quick))
        bad["rows"][0][name] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, bench_workers.SCHEMA)


@pytest.mark.parametrize("job", bench_workers.JOBS)
def test_ways_make_the_same_at_every_place(job: str) -> None:
    made = {way: [bench_workers.Made(job, way, 3)[index] for index in range(3)] for way in bench_workers.WAYS}
    verb = job.partition(",")[0]
    close = {"foveate": 0.15} if job.endswith("anisotropic") else {}  # texture units filter in their own way
    for way in ("gl", "auto"):
        for one, other in zip(made[way], made["torch"], strict=True):
            assert len(one) >= 64
            torch.testing.assert_close(one, other, rtol=0, atol=close.get(verb, 1.0 if other.max() > 1 else 1e-3))
    nowhere = verb in ("oriented_energy", "region_max")
    assert torch.equal(made["torch"][0], made["torch"][1]) == nowhere
