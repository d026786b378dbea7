"""bench/bench_kernels.py on the host: torch stands for the kernels, and a wall clock for the GPU's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import gpu_lod as lod
from gpu_lod.kernels import chain, samplers, sources

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import bench_kernels  # noqa: E402

RESULTS = sorted((CHECKOUT / "bench" / "results" / "kernels").glob("*.json"))
HOST = torch.device("cpu")


class Clock:
    def device_ms(self, side: Callable[[], object], calls: int) -> list[float]:
        side()
        return [0.5, *[0.75] * (calls - 1)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pictures, and what is asked of kernels done by torch."""
    chains = [(64, torch.uint8, 4, "cold"), (33, torch.float32, 3, "warm")]
    for name, value in {
        "CHAINS": chains, "BOUNDS": [(33, torch.float32, 1, "warm")], "SIDES": (32, 64), "MAPS": (16,), "MANY": 9,
        "COLD_BYTES": 2**15,
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_kernels, name, value)
    monkeypatch.setattr(bench_kernels, "captured", lambda function, inputs: partial(function, inputs[-1]))
    monkeypatch.setattr(lod.Pyramid, "upload", lambda pyramid, **_: pyramid)
    for name in ("mipmap", "hiz", "log_polar", "foveate", "gather_patches"):
        verb = getattr(lod, name)

        def by_torch(*args: Any, backend: str, verb: Callable[..., Any] = verb) -> Any:
            assert backend == "cuda"
            return verb(*args, backend="torch")

        monkeypatch.setattr(lod, name, by_torch)


def measured(wanted: list[str]) -> tuple[list[Any], dict[str, str]]:
    rows: list[Any] = []
    failures: dict[str, str] = {}
    bench_kernels.measure(HOST, Clock(), 1e9, wanted, rows.append, failures)  # type: ignore[arg-type]
    return rows, failures


def test_every_kernel_has_its_rows(small: None) -> None:
    rows, failures = measured(list(bench_kernels.JOBS))
    assert failures == {}
    found = [(row["kernel"], row["job"], row["side"], row["dtype"], row["cache"]) for row in rows]
    assert found[:2] == [("chain", "", 64, "uint8", "cold"), ("chain", "", 33, "float32", "warm")]
    for dtype in ("float32", "uint8"):
        assert [("foveate", "", side, dtype, "warm") in found for side in (32, 64)] == [True, True]
        assert ("log_polar", "16 x 16", 64, dtype, "warm") in found
        for where in ("cortical", "on the grid"):
            assert ("patches", f"9 x 14 x 14, {where}", 64, dtype, "warm") in found
    assert ("hiz", "", 33, "float32", "warm") in found
    assert len(found) == len(set(found)) == 13
    assert rows[0]["gpu_us"] == 750 and rows[0]["fastest_us"] == 500
    # Four bytes a texel are read and a third is written, at a byte a nanosecond.
    assert rows[0]["floor_us"] == round((64 * 64 * 4 + 64 * 64 * 4 // 3) / 1e3, 2)
    assert {row["kernel"] for row in measured(["log_polar", "patches"])[0]} == {"log_polar", "patches"}


def test_sites_on_the_grid_are_whole_patches_of_level_0() -> None:
    sites = bench_kernels.on_the_grid(4096)
    corner = sites[0, :, :2] * 4096 - 7
    assert sites.shape == (1, bench_kernels.MANY, 3) and not sites[..., 2].any()
    assert torch.equal(corner, corner.round()) and not (corner % 14).any() and corner.max() <= 4096 - 14
    assert len({tuple(cell) for cell in corner.tolist()}) == bench_kernels.MANY


def test_what_fails_is_told_and_the_rest_goes_on(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lod, "foveate", lambda *_, **__: 1 / 0)
    rows, failures = measured(["foveate", "log_polar"])
    assert {row["kernel"] for row in rows} == {"log_polar"}
    assert failures.keys() == {f"foveate {side} 3 {dtype} warm" for side in (32, 64) for dtype in ("float32", "uint8")}
    assert all("ZeroDivisionError" in why for why in failures.values())


def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    facts = {"device": "A GPU", "commit": "0123", "date": "2026-11-28"}
    for name, value in {
        "CudaStopwatch": lambda device: Clock(), "device_bandwidth": lambda *_: 2e12, "cuda_facts": lambda *_: facts,
        "RESULTS": results,
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_kernels, name, value)
    monkeypatch.setattr(torch, "device", lambda *_: HOST)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_the_file(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_if_on_a_gpu(monkeypatch, tmp_path)
    assert bench_kernels.main(["--only", "chain"]) == 0
    data = json.loads((tmp_path / "kernels" / "a-gpu.json").read_text())
    jsonschema.validate(data, bench_kernels.SCHEMA)
    assert data["copy_gb_per_s"] == 2000 and len(data["rows"]) == 2
    monkeypatch.setattr(lod, "foveate", lambda *_, **__: 1 / 0)
    assert bench_kernels.main(["--only", "foveate", "--out", str(tmp_path / "none.json")]) == 1
    assert "nothing was measured" in capsys.readouterr().out and not (tmp_path / "none.json").exists()


def test_without_a_gpu_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main(["--out", str(tmp_path / "kernels.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        bench_kernels.main(["--only", "chains"])
    assert "there is no chains" in capsys.readouterr().err


def test_constants_are_set_in_kernels_and_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = dict(sources.texts())
    monkeypatch.setattr(sources, "texts", lambda: texts)
    monkeypatch.setattr(chain, "RAGGED_GROUP", chain.RAGGED_GROUP)
    monkeypatch.setattr(samplers, "RINGS", samplers.RINGS)
    bench_kernels.set_constant("RINGS=5")
    assert samplers.RINGS == 5 and "#define RINGS 5 " in texts["log_polar.cu"]
    bench_kernels.set_constant("LEAST_BLOCKS:3=2")
    assert "LEAST_BLOCKS 4\n" in texts["reduce.cu"] and "LEAST_BLOCKS 2\n" in texts["reduce.cu"]
    bench_kernels.set_constant("RAGGED_GROUP=2")
    assert chain.RAGGED_GROUP == 2
    for wrong in ("RING=5", "RAGGED_GROUP:7=2", "LEAST_BLOCKS:3=2", "RINGS", "RINGS=five"):
        with pytest.raises(ValueError, match=f"--set is {wrong}"):
            bench_kernels.set_constant(wrong)


def test_nothing_is_written_of_other_constants(small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_if_on_a_gpu(monkeypatch, tmp_path)
    seen: list[str] = []
    monkeypatch.setattr(bench_kernels, "set_constant", seen.append)
    assert bench_kernels.main(["--only", "chain", "--set", "A=1", "--set", "B:1=2"]) == 0
    assert seen == ["A=1", "B:1=2"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_fit_the_schema(path: Path) -> None:
    data = json.loads(path.read_text())
    jsonschema.validate(data, bench_kernels.SCHEMA)
    assert data["failures"] == {}
    assert all(row["floor_us"] <= row["fastest_us"] <= row["gpu_us"] for row in data["rows"])
