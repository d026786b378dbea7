"""The cost model: the doc is what the script says, the fit finds constants that are there, and the error is stated."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import cost_fit  # noqa: E402
import cost_model  # noqa: E402
import report  # noqa: E402

from gpu_lod.report.files import load  # noqa: E402

MEDIAN_ERROR = 0.3
"""That the model may have on the results that are kept."""


def rows_of(verb: str, side: str, ms: Any, sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)) -> list[Any]:
    channels = 1 if verb == "hiz" else 3
    return [
        {
            "verb": verb, "part": "end to end", "size": [size, size], "batch": batch, "channels": channels,
            "dtype": "float32", "cache": "warm", "note": "", "floor_ms": 1,
            "sides": {side: {"median_ms": ms(size, batch, channels)}},
        }
        for size in sizes
        for batch in (1, 8)
    ]  # fmt: skip


def test_the_doc_shows_the_result_files() -> None:
    text = cost_model.DOC.read_text()
    assert cost_model.with_tables(text, report.result_files()) == text, "run python bench/cost_model.py --doc"


@pytest.mark.parametrize("path", report.result_files(), ids=lambda path: path.name)
def test_the_model_is_as_good_as_the_doc_says(path: Path) -> None:
    data = load(path)
    found = cost_fit.fits(data["rows"], borrowed=data.get("borrowed", False))
    # Runs on CUDA tensors end with their time, the most important rows first: others come at too few sizes for a fit.
    others = {"hiz", "log_polar", "foveate", "gather_patches"} if data.get("tensors") != "cuda" else set()
    assert {one.way.verb for one in found} >= {"mipmap"} | others
    if data.get("tensors") == "cuda":
        compared = {one[2].way.name.partition(" ")[0] for one in cost_fit.crossovers(found)}
        assert compared == {"gl", "cuda"}
    errors = [abs(error) for one in found for error in one.errors()]
    assert statistics.median(errors) < MEDIAN_ERROR
    assert f"median relative error {statistics.median(errors):.0%}" in cost_model.DOC.read_text()


def test_the_fit_finds_the_constants_that_are_there() -> None:
    def ms(size: int, batch: int, channels: int) -> float:
        moved = cost_fit.TRAFFIC["gl compute"] * batch * channels * size * size * 4
        return 0.5 + 0.02 * (size.bit_length() - 1) + moved / 10e9 * 1e3

    [found] = cost_fit.fits(rows_of("mipmap", "gl compute", ms))
    fixed, level, unit = found.constants
    assert (fixed, level, 1e-6 / unit) == pytest.approx((0.5, 0.02, 10.0), rel=1e-6)
    assert found.median_error < 1e-9 and found.left_out is not None and found.left_out < 1e-9
    [less] = cost_fit.fits(rows_of("mipmap", "gl compute", ms), borrowed=True)  # nothing was copied in
    assert 1e-6 / less.constants[2] == pytest.approx(10.0 * (11 / 3 - 2) / (11 / 3), rel=1e-6)
    shifted = rows_of("mipmap", "gl compute", lambda *size: 2 * ms(*size))
    assert cost_fit.fits(shifted)[0].constants == pytest.approx([2 * value for value in found.constants], rel=1e-6)


def test_no_constant_is_below_zero_and_errors_show() -> None:
    [found] = cost_fit.fits(rows_of("mipmap", "gl compute", lambda size, *_: size**3 / 1e8))
    assert min(found.constants) >= 0
    assert found.median_error > 0.1


def test_few_points_make_no_fit() -> None:
    few = rows_of("mipmap", "gl compute", lambda *_: 1.0)
    assert cost_fit.fits(few[:2]) == []
    assert cost_fit.fits(few[:4])[0].constants[1] == 0, "no cost a level from four points"
    assert cost_fit.fits([{**row, "cache": "cold"} for row in few]) == []


def test_generators_that_are_new_get_a_fit_of_their_own() -> None:
    names = ("gl single-pass", "gl registers", "gl something new", "gl driver")
    made = [row for name in names for row in rows_of("hiz", name, lambda size, *_: size / 100)]
    assert [one.way.name for one in cost_fit.fits(made)] == [*names]
    held = [{**row, "part": "zero-copy in", "note": "the image is in GL memory already"} for row in made]
    assert [one.way.name for one in cost_fit.fits(held)] == [f"{name}, GL memory" for name in names]


@pytest.mark.parametrize(
    ("size", "moved"),
    [
        ([4, 4], 16 + 4 + 4 + 1),  # read 16, write 4, read 4, write 1
        ([2, 1], 2 + 1),
        ([3, 2], 4 * 6 + 3 + 1.5),  # one odd axis of 6, then the even one halves what is left
        ([3, 3], 4 * 9 + 4 * 4.5),
    ],
)
def test_bytes_of_torchs_halvings_are_those_on_paper(size: list[int], moved: float) -> None:
    row = {"size": size, "batch": 2, "channels": 3}
    assert cost_fit._halving_bytes(row) == 2 * 3 * 4 * moved


def test_bytes_of_generators_are_those_on_paper() -> None:
    rgb = {"size": [8, 8], "batch": 1, "channels": 3}
    nbytes = 8 * 8 * 3 * 4
    on_paper = {
        "gl compute": 11 / 3, "gl single-pass": 10 / 3, "gl single-pass-texture": 16 / 3, "gl driver": 22 / 3,
        "gl fragment": 22 / 3,
    }  # fmt: skip
    for side, times in on_paper.items():
        assert cost_fit._generator_bytes(side, 0, rgb) == pytest.approx(times * nbytes)
        assert cost_fit._generator_bytes(side, 2, rgb) == pytest.approx((times - 2) * nbytes)
    grey = {**rgb, "channels": 1}
    assert cost_fit._generator_bytes("gl sampler", 0, grey) == pytest.approx(19 / 3 * nbytes / 3)


@pytest.mark.parametrize(
    ("size", "moved"),
    [
        ([64, 64], 64**2 + 1365 + 0),  # one tile: 32, 16, ... 1, and nothing is left to finish
        ([4096, 4096], 4096**2 + (4**12 - 1) // 3 + 64**2),  # the last block reads 64 x 64 again
        ([4098, 4096], None),  # one even level is too few for tiles of groups of four
    ],
)
def test_bytes_of_kernels_are_those_on_paper(size: list[int], moved: int | None) -> None:
    row = {"size": size, "batch": 2, "channels": 3}
    found = cost_fit._kernel_bytes(row)
    if moved is not None:
        assert found == pytest.approx(2 * 3 * 4 * moved, rel=1e-12)
    else:
        assert found / cost_fit._image_bytes(row) == pytest.approx(4 / 3 + 1 / 64, abs=1e-3)


def test_kernels_have_a_fit_for_even_sides_and_one_for_odd_sides() -> None:
    def ms(fixed: float) -> Any:
        return lambda size, batch, channels: (
            fixed + cost_fit._kernel_bytes({"size": [size, size], "batch": batch, "channels": channels}) / 2e12 * 1e3
        )

    even, odd = (128, 256, 512, 1024), (129, 257, 513, 1025)
    rows = [*rows_of("mipmap", "cuda kernels", ms(0.1), even), *rows_of("mipmap", "cuda kernels", ms(0.3), odd)]
    found = {one.way.name: one for one in cost_fit.fits(rows)}
    assert set(found) == {"cuda kernels", "cuda kernels, odd sides"}
    assert found["cuda kernels"].constants == pytest.approx((0.1, 0, 1e3 / 2e12), rel=1e-6, abs=1e-9)
    assert found["cuda kernels, odd sides"].constants[0] == pytest.approx(0.3, rel=1e-6)
    assert all(len(one.points) == 8 for one in found.values())


def test_samples_are_as_many_as_the_note_says() -> None:
    row = {"batch": 2, "size": [4096, 4096], "note": "1024 x 1024, from a prebuilt pyramid, a texture already"}
    assert cost_fit._samples(lambda _: 7, row) == 2 * 1024 * 1024
    assert cost_fit._samples(lambda _: 7, {**row, "note": "5400 x 14 x 14, cortical sites"}) == 2 * 5400 * 14 * 14
    assert cost_fit._samples(lambda _: 7, {**row, "note": "from a prebuilt pyramid, a texture already"}) == 14


def test_every_backend_meets_torch_and_calls_meet_no_graph() -> None:
    def side(name: str, fixed: float, rate: float) -> list[Any]:
        return rows_of("hiz", name, lambda size, batch, _: fixed + batch * size * size / rate, (256, 512, 1024, 2048))

    sides = {
        "gl compute": (0.6, 1e7), "cuda kernels": (0.08, 1e7), "cuda graph of kernels": (0.01, 1e7),
        "torch max_pool2d": (0.2, 1e6), "torch compiled": (0.15, 8e6), "torch graph of compiled": (0.02, 8e6),
    }  # fmt: skip
    found = cost_fit.fits([row for name, (fixed, rate) in sides.items() for row in side(name, fixed, rate)])
    pairs = {(ours.way.name, theirs.way.name) for _, _, ours, theirs, _, _ in cost_fit.crossovers(found)}
    assert pairs == {
        ("gl compute", "torch compiled"), ("cuda kernels", "torch compiled"),
        ("cuda graph of kernels", "torch graph of compiled"),
    }  # fmt: skip


def test_a_rate_beyond_a_copys_wins_nothing() -> None:
    """The host hides what grows, at the sizes that were measured alone."""
    kernels = rows_of("hiz", "cuda kernels", lambda size, batch, _: 0.08 + batch * size * size * 4 / 3 / 3e9)
    hidden = rows_of("hiz", "torch compiled", lambda *_: 0.16)
    found = cost_fit.fits([*kernels, *hidden])
    assert {where for *_, where, _ in cost_fit.crossovers(found)} == {None}
    assert {where for *_, where, _ in cost_fit.crossovers(found, 3000.0)} == {32}


def test_crossovers_say_from_where_on_gl_is_faster() -> None:
    def side(name: str, fixed: float, rate: float) -> list[Any]:
        return rows_of("hiz", name, lambda size, batch, _: fixed + batch * size * size / rate)

    early = [*side("gl compute", 2.0, 1e6), *side("torch rows then columns", 0.0, 2e5)]
    found = {batch: where for _, batch, _, _, where, _ in cost_fit.crossovers(cost_fit.fits(early))}
    # 2 + n / 1e6 < n / 2e5 from n = 500 000 on: above 707 px; 125 px for 32 images.
    assert found == {1: 1024, 32: 128}
    never = [*side("gl compute", 2.0, 1e5), *side("torch rows then columns", 0.0, 2e5)]
    assert {where for *_, where, _ in cost_fit.crossovers(cost_fit.fits(never))} == {None}
    not_for_long = [*side("gl compute", 0.0, 1e5), *side("torch rows then columns", 1.0, 2e5)]
    assert {where for *_, where, _ in cost_fit.crossovers(cost_fit.fits(not_for_long))} == {None}
    assert cost_fit.crossovers(cost_fit.fits(side("gl compute", 1, 1))) == []


def test_a_file_without_rows_for_it_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [kept] = report.result_files()[:1]
    path = tmp_path / "few.json"
    data = load(kept)
    few = {**data, "rows": [row for row in data["rows"] if row["verb"] == "cull"]}
    path.write_text(json.dumps(few))
    cost_model.main([str(path)])
    assert "Too few rows for a fit." in capsys.readouterr().out
