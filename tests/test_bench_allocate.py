"""The benchmark of the allocators: every one of them is in it, files fit the schema, and the doc shows them as they
are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import gpu_lod as lod

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import allocate_doc  # noqa: E402
import bench_allocate  # noqa: E402

FILES = allocate_doc.result_files()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "quick.json"
    assert bench_allocate.main(["--quick", "--only", "GridTopK,FoveatedPyramid", "--out", str(path)]) == 0
    return path


def test_the_opponent_does_the_same_job() -> None:
    image, relevance = torch.rand(2, 3, 64, 96), torch.rand(2, 4, 6)
    tokens = lod.allocate.GridTopK(7, bench_allocate.PATCH)(image, relevance)
    assert torch.equal(tokens.patches, bench_allocate.plain(image, relevance, 7))


@pytest.mark.parametrize("name", ["TokenDAG", "AdaptiveStratified"])
def test_calls_one_by_one_do_the_job_of_the_batch(name: str) -> None:
    image, relevance = torch.rand(3, 3, 64, 96), torch.rand(3, 4, 6)
    allocator = bench_allocate.ready(name, 7, bench_allocate.PATCH, "cpu")
    whole = allocator(image, relevance, **bench_allocate.given_to(allocator, 3, "cpu"))
    for number, tokens in enumerate(bench_allocate.one_by_one(allocator, image, relevance)):
        assert torch.allclose(tokens.patches, whole.patches[number : number + 1], atol=1e-5)


def test_files_fit_the_schema_and_a_broken_one_does_not(measured: Path) -> None:
    data = json.loads(measured.read_text())
    jsonschema.validate(data, bench_allocate.SCHEMA)
    assert {row["allocator"] for row in data["rows"]} == {"GridTopK", "FoveatedPyramid", bench_allocate.TORCH}
    data["rows"][0]["calls"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, bench_allocate.SCHEMA)


def test_without_jsonschema_it_measures_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has torch and little else."""
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    out = tmp_path / "a.json"
    assert bench_allocate.main(["--quick", "--only", "GridTopK", "--seconds", "0", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["rows"]
    assert "jsonschema" not in vars(bench_allocate)


def test_what_fails_or_has_no_time_left_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(lod.allocate.FoveatedPyramid, "choose", fails)
    path = tmp_path / "quick.json"
    names = "GridTopK,FoveatedPyramid"
    assert bench_allocate.main(["--quick", "--only", names, "--out", str(path), "--seconds", "1e-9"]) == 1
    data = json.loads(path.read_text())
    jsonschema.validate(data, bench_allocate.SCHEMA)
    assert [row["allocator"] for row in data["rows"]] == ["GridTopK", bench_allocate.TORCH], "of the first job alone"
    [(name, why)] = data["failures"].items()
    assert name.endswith("FoveatedPyramid") and "no kernel image" in why and why in capsys.readouterr().err


def test_a_run_that_is_stopped_leaves_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, calls = bench_allocate.timed, []

    def once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(bench_allocate, "timed", once)
    path = tmp_path / "quick.json"
    with pytest.raises(KeyboardInterrupt):
        bench_allocate.main(["--quick", "--only", "GridTopK", "--out", str(path)])
    jsonschema.validate(json.loads(path.read_text()), bench_allocate.SCHEMA)


def test_the_tables_show_every_side_and_the_plot_every_allocator(measured: Path) -> None:
    table = allocate_doc.tables(measured)
    for name in ("GridTopK", "FoveatedPyramid", bench_allocate.TORCH):
        assert f"| {name} |" in table
    data = json.loads(measured.read_text())
    one = next(row for row in data["rows"] if row["allocator"] == "GridTopK" and row["batch"] == 2)
    assert f"| {one['median_ms'] / 2:.2f} ± {one['iqr_ms'] / 4:.2f} |" in table
    assert "GridTopK" in allocate_doc.plot(data)


def test_the_goals_are_judged_by_the_slowest() -> None:
    def row(name: str, ms: float, batch: int = 1) -> dict[str, Any]:
        return {"allocator": name, "median_ms": ms, "iqr_ms": 0.2, "batch": batch}

    given, alone = bench_allocate.JOBS
    found = {
        ("GridTopK", given, False): row("GridTopK", 3.9),
        ("GridTopK", alone, False): row("GridTopK", 4.1),
        ("FoveatedPyramid", given, False): row("FoveatedPyramid", 7.0),
        ("TokenDAG", given, False): row("TokenDAG", 8.5),
        ("SoftVortex", given, False): row("SoftVortex", 99.0),  # learned: no goal
    }
    text = allocate_doc.goals(found)
    assert "| GridTopK at most 4 ms | reached: GridTopK 3.90 ± 0.10 | missed: GridTopK 4.10 ± 0.10 |" in text
    assert "| tree cuts at most 8 ms | missed: TokenDAG 8.50 ± 0.10 |  |" in text
    assert "| all that do not learn at most 40 ms | reached: TokenDAG 8.50 ± 0.10 | reached: GridTopK" in text
    batch = {
        ("GridTopK", given, True): row("GridTopK", 66.0, 32),
        ("GridTopK", f"{given}, {bench_allocate.EACH}", True): row("GridTopK", 60.0, 32),
        ("Voronoi", given, True): row("Voronoi", 60.1, 32),
        ("Voronoi", f"{given}, {bench_allocate.EACH}", True): row("Voronoi", 60.0, 32),
    }
    batch |= {("Voronoi", given, False): row("Voronoi", 1.7)}
    text = allocate_doc.batches(batch)
    assert "as many times one picture, beyond the spread: Voronoi (relevance given) 1.10 times. " in text
    assert text.endswith("as many calls, beyond the spread: GridTopK (relevance given) 1.10 times.")
    batch[("Voronoi", given, False)] = row("Voronoi", 1.9)
    assert "one picture, beyond the spread: none. " in allocate_doc.batches(batch)


def test_what_the_plot_has_not_is_named(measured: Path) -> None:
    assert "Not measured, for want of time: grid 16, K 256; " in allocate_doc.tables(measured)
    data = json.loads(measured.read_text())
    every = bench_allocate.over(bench_allocate.GRIDS, bench_allocate.BUDGETS)
    data["rows"] = [{"job": "sites", "grid": [side, side], "budget": budget} for side, budget in every]
    assert allocate_doc.left_out(data) == ""
    del data["rows"][-1]
    assert allocate_doc.left_out(data) == "Not measured, for want of time: grid 64, K 1024."


def test_the_goals_of_a_gpu_are_judged_by_calls_and_plans() -> None:
    given, alone = bench_allocate.JOBS
    plan = f"{given}, {bench_allocate.PLANNED}"
    times = {
        ("GridTopK", given, False): 0.7,
        ("GridTopK", plan, False): 0.2,
        ("TokenDAG", given, False): 2.0,
        ("TokenDAG", plan, False): 0.6,
        ("GridTopK", given, True): 2.5,
        (bench_allocate.TORCH, given, True): 9.0,
        ("GridTopK", alone, False): 0.4,
    }
    text = allocate_doc.gpu_goals({key: {"median_ms": ms} for key, ms in times.items()})
    one = "reached by 1 of 2 as plans, 0 of 2 in calls; missed: TokenDAG 0.60"
    assert f"| one picture at most 0.5 ms | {one} | reached by 1 of 1 in calls |" in text
    assert "| 32 pictures at most 3 ms | reached by 1 of 1 in calls | not measured |" in text


def test_plans_are_measured_where_they_repeat_something(monkeypatch: pytest.MonkeyPatch, measured: Path) -> None:
    allocator = bench_allocate.ready("GridTopK", 7, bench_allocate.PATCH, "cpu")
    image, maps = torch.rand(1, 3, 64, 64), torch.rand(1, 4, 4)
    side = bench_allocate.Planned(allocator, image, maps, {})
    with pytest.raises(RuntimeError, match="each call runs the function"):  # a CPU has no graphs
        side()
    made: list[Any] = []

    class Plan:
        replays = True

        def __call__(self, *tensors: torch.Tensor) -> int:
            made.append(tensors)
            return len(tensors)

    monkeypatch.setattr(lod, "plan", lambda *given, **more: made.append("made") or Plan())
    assert side() == side() == 2 and made.count("made") == 1
    side.forget()
    assert side() == 2 and made.count("made") == 2
    # The table of a GPU has columns for them.
    data = json.loads(measured.read_text())
    data["tensors"] = "cuda"
    data["rows"] += [
        {**row, "job": f"{row['job']}, planned"} for row in data["rows"] if row["job"] in allocate_doc.GIVEN
    ]
    path = measured.with_name("gpu.json")
    path.write_text(json.dumps(data))
    jsonschema.validate(data, bench_allocate.SCHEMA)
    assert "| planned, given | of 32 planned, given |" in allocate_doc.tables(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_committed_files_hold_every_allocator(path: Path) -> None:
    data = json.loads(path.read_text())
    jsonschema.validate(data, bench_allocate.SCHEMA)
    there = {name for name in lod.allocate.names() if data["date"] > allocate_doc.LATER.get(name, "")}
    assert {row["allocator"] for row in data["rows"]} == {*there, bench_allocate.TORCH}


def test_the_doc_shows_the_files() -> None:
    text = allocate_doc.DOC.read_text("utf-8")
    assert allocate_doc.with_tables(text) == text, "python bench/bench_allocate.py --doc"


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_allocate.main(["--only", "Nobody"])
    assert "there is no Nobody" in capsys.readouterr().err
