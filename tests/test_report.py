"""The report: what it says of files, that it writes a whole page or none, and that nothing in a file can break it."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import done, refused
from rich.console import Console

from gpu_lod.errors import FileError
from gpu_lod.report import claim, generators, plots, rows, text
from gpu_lod.report.files import VERSION, load, load_all, problem_of, write
from gpu_lod.report.losses import REASONS, losses
from gpu_lod.report.page import html, report
from gpu_lod.report.shares import shares

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = sorted((CHECKOUT / "bench" / "results").glob("*.json"))
EVIL = "</style><script>alert('1')</script>&\"$x^$ [/red] | \x1b[31m \u202e"


def timing(ms: float, **more: float) -> dict[str, Any]:
    return {"median_ms": ms, "iqr_ms": ms / 10, "fastest_ms": ms * 0.9, "calls": 16, **more}


def row(verb: str = "mipmap", size: int = 1024, part: str = "end to end", **changes: Any) -> dict[str, Any]:
    sides = {"gl compute": 1.0, "gl driver": 2.0, "gl fragment": 3.0, "torch avg_pool2d": 5.0, "torch x": 0.5}
    made: dict[str, Any] = {
        "verb": verb, "part": part, "size": [size, size], "batch": 1, "channels": 3, "dtype": "float32",
        "cache": "warm", "floor_ms": 0.25, "note": "", "other_job": {},
        "sides": {name: timing(ms * size / 1024) for name, ms in sides.items()},
    }  # fmt: skip
    return {**made, **changes}


def data(*made: dict[str, Any], **changes: Any) -> dict[str, Any]:
    about = {
        "schema": VERSION, "device": "llvmpipe", "software": True, "driver": "Mesa", "cpu": "a CPU", "threads": 2,
        "versions": {"gpu_lod": "1", "torch": "2"}, "commit": "abc", "date": "2026-01-01", "copy_gb_per_s": 10.0,
    }  # fmt: skip
    return {**about, "rows": list(made) or [row()], **changes}


def on_cuda(*made: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same as a run on CUDA tensors writes it, with both clocks."""
    found = copy.deepcopy(data(*made))
    for one in found["rows"]:
        for side in one["sides"].values():
            side |= {"p99_ms": side["median_ms"] * 2, "device_ms": side["median_ms"] / 2}
    about = {
        "tensors": "cuda", "device": "NVIDIA X", "gl_renderer": "NVIDIA X/PCIe", "software": False, "cuda": "13.0",
        "cuda_driver": "580", "left_out": ["hiz 448x448x1"], "failures": [],
    }  # fmt: skip
    return {**found, **about, **changes}


def saved(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


class Page(HTMLParser):
    """The tags that a page opens, the words between them, and whether each is closed in its turn."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# -- files -------------------------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Any, str]] = {
    "empty": (" \n", "is empty"),
    "no JSON": ("{", "no result file, or corrupt"),
    "cut short": (json.dumps(data())[:-20], "no result file, or corrupt"),
    "NaN": (json.dumps(data(row(floor_ms=float("nan")))), "NaN is no number"),
    "infinite": (json.dumps(data()).replace("0.25", "1e999"), "1e999 is too large"),
    "too many digits": (data(row(batch=10**400)), "is too large for a number"),
    "nested too deep": ("[" * 100_000, "no result file, or corrupt"),
    "a list": ([1, 2], "no `schema` and `rows`"),
    "another file": ({"name": "x"}, "no `schema` and `rows`"),
    "newer": (data(schema=VERSION + 1), f"schema {VERSION + 1}, and this gpu_lod reads {VERSION}. Update gpu_lod"),
    "older": (data(schema=0), "no result file of schema"),
    "schema of words": (data(schema="1"), "no result file of schema"),
    "wrong dtype": (data(row(dtype="int8")), r"\$\.rows\[0\]\.dtype: 'int8' is not one of"),
    "no sides": (data(row(sides={})), r"\$\.rows\[0\]\.sides"),
    "time without end": (data(row(sides={"gl": timing(1e308)})), r"\$\.rows\[0\]\.sides\.gl\.(median|fastest|iqr)_ms"),
    "time of 0": (data(row(sides={"gl": timing(0)})), r"\$\.rows\[0\]\.sides\.gl\.median_ms"),
    "no rows": (data(rows=[]), r"\$\.rows"),
    "unknown best": (data(row(best_gl="gl magic")), r"\$\.rows\[0\]\.best_gl: 'gl magic' is none of its sides"),
    "CUDA without its clock": ({**on_cuda(), "rows": [row()]}, "p99_ms|device_ms"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_result_file_is_refused_by_name_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    content, why = BROKEN[name]
    good, bad = saved(tmp_path, "good.json", data()), saved(tmp_path, "bad.json", content)
    target = saved(tmp_path, "page.html", "the page before")
    with pytest.raises(FileError, match=why) as raised:
        report([good, bad], target)
    assert str(bad) in str(raised.value)
    assert re.search(r"make bench|Update|Give what", str(raised.value)), "the way out"
    assert target.read_text() == "the page before"
    assert len(list(tmp_path.iterdir())) == 3


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.json does not exist"):
        load(tmp_path / "none.json")
    with pytest.raises(FileError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="is no text"):
        load(tmp_path / "bytes.json")
    with pytest.raises(FileError, match="no result file was given"):
        load_all([])


def test_the_same_results_twice_are_refused(tmp_path: Path) -> None:
    one, two = saved(tmp_path, "a.json", data()), saved(tmp_path, "b.json", json.dumps(data(), indent=3))
    for pair in ([one, one], [one, two]):
        with pytest.raises(FileError, match="hold the same results") as raised:
            load_all(pair)
        assert str(pair[0]) in str(raised.value) and str(pair[1]) in str(raised.value)
    assert len(load_all([one, saved(tmp_path, "c.json", data(date="2026-01-02"))])) == 2


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path, "a.json", data())
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "page.html", tmp_path):
        with pytest.raises(FileError, match="cannot be written"):
            report([source], target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "file"]


def test_files_are_written_with_the_rights_that_new_files_have(tmp_path: Path) -> None:
    plain = saved(tmp_path, "plain", "")
    write("x", tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").stat().st_mode == plain.stat().st_mode
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_schema_takes_other_jobs_with_and_without_reasons(path: Path) -> None:
    found = load(path)
    one = found["rows"][0]
    assert problem_of({**found, "rows": [one]}) is None
    for other in (["gl driver"], {"gl driver": "rounds"}):
        assert problem_of({**found, "rows": [{**one, "other_job": other}]}) is None
    assert problem_of({**found, "rows": [{**one, "other_job": "gl driver"}]}) is not None


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the files that are kept, and a device beside them."""
    folder = tmp_path_factory.mktemp("page")
    gpu = on_cuda(*(row(size=size) for size in (1024, 2048)), row(part="zero-copy in"))
    return html(load_all([*RESULTS, saved(folder, "gpu.json", gpu)]))


def test_the_page_stands_alone(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & {*parsed.tags}
    assert all(link.startswith("#") for link in parsed.links)
    assert {link[1:] for link in parsed.links} <= {*parsed.ids}
    assert not re.search(r"https?:|//|@import|url\((?!#)", re.sub(r"<!doctype html>", "", page)), "another resource"
    assert len({*parsed.ids}) == len(parsed.ids), "ids of several plots must not meet"


def test_the_page_has_every_row_device_and_section(page: str) -> None:
    parsed = Page(page)
    words = " ".join(parsed.words)
    for heading in ("Devices", "The claim", "Where it loses, and why", "Time over size", "Generators", "All rows"):
        assert heading in words
    assert "NVIDIA X, CUDA tensors, driver 580, CUDA 13.0" in words and "hiz 448x448x1" in words
    count = sum(len(load(path)["rows"]) for path in RESULTS)
    assert parsed.tags.count("details") >= count + 3
    assert parsed.tags.count("svg") == parsed.tags.count("figure") > 5
    assert 'class="lost"' in page and 'class="won"' in page
    assert all(REASONS[verb] in words for verb in ("mipmap", "hiz"))


def test_a_side_that_wins_is_not_coloured_as_lost() -> None:
    won, lost = row(sides={"gl": timing(1), "torch": timing(2)}), row(sides={"gl": timing(2), "torch": timing(1)})
    for one, colour in ((won, "won"), (lost, "lost")):
        rows_of = html([(Path("a.json"), data(one))]).partition('id="rows"')[2]
        assert f'<tr class="{colour}">' in rows_of
        assert rows_of.count("<tr class=") == 1


def test_the_page_is_the_same_whatever_the_order_and_the_day(tmp_path: Path) -> None:
    one = saved(tmp_path, "a.json", data(*(row(size=size) for size in (512, 1024))))
    two = saved(tmp_path, "b.json", on_cuda(*(row(size=size) for size in (512, 1024))))
    targets = [tmp_path / "1.html", tmp_path / "2.html"]
    report([one, two], targets[0])
    report([two, one], targets[1])
    assert targets[0].read_bytes() == targets[1].read_bytes()
    report([one], targets[1])
    assert targets[0].read_bytes() != targets[1].read_bytes()


def test_two_runs_on_one_device_are_told_apart() -> None:
    runs = [(Path("old.json"), data()), (Path("new.json"), data(date="2026-02-02"))]
    for found, names in ((runs[:1], ["llvmpipe, a CPU, 2 cores"]), (runs, ["2 cores, old.json", "2 cores, new.json"])):
        made = html(found)
        assert all(f"{name}</h3>" in made for name in names)


def test_what_a_file_says_is_words_and_never_markup(tmp_path: Path) -> None:
    evil = [row(note=EVIL, size=size, dropped={EVIL: EVIL}, layout=EVIL) for size in (512, 1024)]
    for one in evil:
        one["sides"] |= {f"torch {EVIL}": timing(0.1), f"gl {EVIL}": timing(0.2), EVIL: timing(0.3)}
        one["other_job"] = {EVIL: EVIL}
    source = saved(tmp_path, "<b>.json", data(*evil, device=EVIL, cpu=EVIL, driver=EVIL, absent={EVIL: EVIL}))
    made = html(load_all([source]))
    assert "<script" not in made and "\x1b" not in made and "\u202e" not in made and "<b>.json" not in made
    words = " ".join(Page(made).words)
    assert "<script>alert('1')</script>" in words and "$x^$" in words and "<b>.json" in words
    terminal = io.StringIO()
    Console(width=400, file=terminal).print(text.table(source))
    assert "[/red]" in terminal.getvalue()
    [line] = [line for line in text.markdown(source, tmp_path).splitlines() if line.startswith("| mipmap | 3 x 1024")]
    assert "<script>" not in line and len(re.findall(r"(?<!\\)\|", line)) == len(text.HEADINGS) + 1


def test_what_a_file_may_lack_leaves_no_gap(tmp_path: Path) -> None:
    lacking = [
        row(sides={"torch avg_pool2d": timing(1)}),
        row("hiz", sides={"gl compute": timing(1)}, floor_ms=0),
        row("cull", sides={"auto": timing(1)}),
        row("log_polar", other_job=["gl compute", "gl driver", "gl fragment", "torch x", "torch avg_pool2d"]),
    ]
    for one in lacking:
        del one["note"], one["other_job"]
    parsed = Page(html([(Path("a.json"), data(*lacking))]))
    assert "svg" not in parsed.tags, "one size gives no curve"
    assert "Nowhere among the rows" not in html([(Path("a.json"), data())])
    assert "Nowhere among the rows" in html([(Path("a.json"), data(lacking[0]))])


# -- what it says ------------------------------------------------------------------------------------------------------


def test_peers_are_opponents_unless_they_do_another_job() -> None:
    one = row(sides={"gl compute": timing(2), "torch x": timing(3), "opencv": timing(1), "auto": timing(0.1)})
    assert (rows.best(one, "gl"), rows.best(one, "torch"), rows.best(one, "peer")) == (
        "gl compute",
        "torch x",
        "opencv",
    )
    assert rows.opponent(one) == "opencv" and rows.gain(one) == 0.5
    kernels = one | {"sides": one["sides"] | {"cuda kernels": timing(0.5), "cuda graph of kernels": timing(0.25)}}
    assert rows.opponent(kernels) == "opencv" and rows.own(kernels) == "cuda graph of kernels"
    assert rows.gain(kernels) == 4 and rows.best(kernels, "gl") == "gl compute"
    one["other_job"] = {"opencv": "rounds"}
    assert rows.best(one, "peer") is None and rows.opponent(one) == "torch x" and rows.gain(one) == 1.5
    assert rows.why_other(one, "opencv") == "rounds" and rows.why_other(one, "torch x") == ""
    one["other_job"] = ["opencv"]
    assert rows.opponent(one) == "torch x" and rows.why_other(one, "opencv") == "another job"
    assert rows.over_floor(one, "gl compute") == 8 and rows.over_floor({**one, "floor_ms": 0}, "gl compute") is None


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "-"), (0, "0ms"), (0.00123456, "0.00123ms"), (12.345, "12.3ms"), (123.4, "123ms"), (12345.6, "12,346ms")],
)
def test_figures_have_three_digits(value: float | None, words: str) -> None:
    assert rows.figure(value, "ms") == words


def test_the_claim_is_neither_proved_nor_refuted_in_software() -> None:
    found = data(*(row(size=size) for size in (512, 1024, 2048)))
    [first, second] = claim.lines(found)
    assert (first.side, second.side) == (1024, 2048)
    assert first.hardware == 2 and first.ratio == 2.5 and first.best_ratio == 5 and first.honest_ratio == 0.5
    assert first.best_over_floor == 4 and first.best_name == "gl compute" and first.strongest_name == "torch x"
    said = claim.verdict(found)
    assert "neither proved nor refuted" in said and "2.50 times" in said and "0.500 ms" in said


@pytest.mark.parametrize(
    ("driver", "pooling", "words"),
    [(0.1, 5.0, "confirmed:"), (0.1, 4.9, "refuted:"), (0.2, 50.0, "refuted:"), (0.05, 10.0, "confirmed:")],
)
def test_on_a_gpu_the_claim_is_judged_by_time_and_ratio(driver: float, pooling: float, words: str) -> None:
    sides = {"gl driver": timing(driver), "torch avg_pool2d": timing(pooling), "gl compute": timing(0.001)}
    assert words in claim.verdict(on_cuda(row(sides=sides)))
    assert "in part" in claim.verdict(on_cuda(row(sides=sides), row(size=2048), row(size=4096, sides={
        "gl fragment": timing(0.01), "torch avg_pool2d": timing(9)
    })))  # fmt: skip
    assert "nothing is said" in claim.verdict(on_cuda(row("hiz")))
    assert "nothing is said" in claim.verdict(on_cuda(row(sides={"gl compute": timing(1)})))


def test_the_claim_is_answered_with_the_ratio_of_fragment_to_compute() -> None:
    sides = {"gl compute": timing(2.0), "gl fragment": timing(3.0), "gl registers": timing(0.5)}
    kernel = row(part="kernel", size=512, sides=sides)
    found = on_cuda(row(), kernel)
    found["rows"][0]["sides"]["gl fragment"]["device_ms"] = 2.5
    [line] = claim.lines(found)
    assert (line.fragment_over_compute, line.fragment_over_compute_on_gpu) == (3, 5)
    made = claim.markdown(found)
    assert made.startswith(claim.verdict(found)) and made.splitlines()[4].endswith("| 2.50x | 3.00x | 5.00x |")
    assert "by themselves at 512 x 512: compute 2.00; fragment 3.00; registers 0.500. Fragment / compute 1.50x." in made
    plain = claim.markdown(data(row()))
    assert plain.splitlines()[4].endswith("| 3.00x | - |") and "themselves" not in plain
    assert claim.markdown(data(row("hiz"))) == claim.verdict(data(row("hiz")))


def with_kernels(*, gl: bool) -> dict[str, Any]:
    """A row in which kernels are the best of ours, or all that there is."""
    sides = {"cuda kernels": timing(0.2), "torch avg_pool2d": timing(5), "torch x": timing(1)}
    return row(sides=sides | ({"gl compute": timing(0.5), "gl driver": timing(0.08 * 5)} if gl else {}))


@pytest.mark.parametrize("gl", [True, False])
def test_kernels_are_shown_where_they_are_the_best_of_ours(gl: bool, tmp_path: Path) -> None:
    found = on_cuda(with_kernels(gl=gl), {**with_kernels(gl=gl), "size": [2048, 2048]})
    line = claim.lines(found)[0]
    assert (line.best_name, line.best, line.best_ratio, line.honest_ratio) == ("cuda kernels", 0.2, 25, 5)
    said = claim.verdict(found)
    assert "The fastest of ours at 2048 x 2048, cuda kernels, takes 0.200 ms: pooling takes 25.0 times" in said
    assert ("refuted" in said) == gl and ("nothing is said of the claim" in said) == (not gl)
    path = saved(tmp_path, "a.json", found)
    made = text.markdown(path, tmp_path)
    assert "| best of ours, ms | best torch, ms | ours against torch |" in made and "GL against" not in made
    assert "| cuda kernels: 0.2 ± 0.01 | x: 1 ± 0.05 | 5.00x |" in made
    assert text.table(path).row_count == 2
    plots.overview(found, tmp_path / "a.svg")
    assert "best of ours (cuda kernels)" in (tmp_path / "a.svg").read_text()
    assert "cuda kernels: 0.200" in html([(path, found)])
    shaders = data()
    assert text.headings(shaders) == text.HEADINGS and "best of ours" not in text.markdown(
        saved(tmp_path, "b.json", shaders), tmp_path
    )


def test_a_fixed_cost_tells_the_hosts_time() -> None:
    sides = {"cuda kernels": timing(0.1, cpu_us=31.24), "cuda plan": timing(0.1, cpu_us=8.5)}
    assert problem_of(on_cuda(row("bridge", part="fixed cost", sides=sides))) is None
    fixed = text.long_job(row("bridge", part="fixed cost", sides=sides))
    assert fixed.endswith("; CPU time a call: cuda kernels 31.2 us, cuda plan 8.5 us")
    assert "CPU time" not in text.long_job(row(sides=sides)) + text.long_job(row("bridge", part="fixed cost"))


def test_losses_are_by_verb_worst_first_with_a_reason() -> None:
    worse = row(sides={"gl": timing(4), "torch": timing(1)})
    milder = row(sides={"gl": timing(2), "torch": timing(1)})
    won = row(sides={"gl": timing(1), "torch": timing(2)})
    [found] = losses(data(won, milder, worse, row("cull", sides={"gl": timing(1), "torch": timing(2)})))
    assert found.verb == "mipmap" and found.rows == [worse, milder] and found.measured == 3
    assert (found.worst, found.mildest) == (0.25, 0.5)
    assert "renderer is software" in found.why
    assert "software" not in losses(on_cuda(milder))[0].why and "CUDA's context" in losses(on_cuda(milder))[0].why
    schema = json.loads((Path(rows.__file__).parent / "schema.json").read_text())
    verbs = schema["properties"]["rows"]["items"]["properties"]["verb"]["enum"]
    # Sites are plain torch, for which there is no shader that could lose.
    assert {*REASONS} == {*verbs} - {"bridge", "cortical_sites"}, "a reason for every verb that has an opponent"


def test_generators_stand_beside_each_other_new_ones_too() -> None:
    sides = {"gl compute": timing(4), "gl registers": timing(2), "gl driver": timing(1), "torch x": timing(3)}
    found = generators.lines(
        data(row(sides=sides, other_job={"gl driver": "rounds"}), row(part="zero-copy in")), "mipmap"
    )
    assert [line.part for line in found] == ["end to end", "zero-copy in"]
    assert found[0].best_compute == "gl registers" and found[0].against_one_dispatch_a_level == 2
    assert found[0].other == {"gl driver"} and (found[0].opponent, found[0].opponent_ms) == ("torch x", 3)
    assert generators.names(found) == ["gl compute", "gl registers", "gl driver", "gl fragment"]
    assert generators.lines(data(row(size=448), row(batch=8)), "mipmap") == []
    for gl in (True, False):
        (line,) = generators.lines(on_cuda(with_kernels(gl=gl)), "mipmap")
        assert line.times["cuda kernels"] == 0.2 and "torch x" not in line.times
        assert line.best_compute == ("gl compute" if gl else None), "which is of shaders alone"


def test_shares_are_of_the_same_job() -> None:
    ours = {"gl compute": timing(10.0)}
    parts = [
        row(part="kernel", sides={"gl compute": timing(6.0)}, note="a"),
        row(part="bridge", sides={"gl compute": timing(1.0)}, note="a"),
    ]
    [share] = shares(data(row(sides={"gl compute": timing(99)}), row(sides=ours, note="a"), *parts), "mipmap")
    assert (share.whole, share.kernel, share.bridge, share.rest) == (10, 6, 1, 3)
    assert share.percent(share.kernel) == 60
    assert shares(data(row(sides=ours, note="b"), *parts), "mipmap") == []
    assert shares(data(row(sides=ours, note="a"), parts[0]), "mipmap") == []


def test_plots_hold_every_side_and_band() -> None:
    found = plots.curves(data(*(row(size=size) for size in (512, 1024)), row(size=2048, cache="cold"), row("cull")))
    assert list(found) == ["mipmap"] and len(found["mipmap"]) == 2
    svg = plots.time_over_size(found["mipmap"], plots.limits_of([found["mipmap"]]), "p")
    for side in row()["sides"]:
        assert f">{side}</text>" in svg
    assert svg.count('id="p-FillBetweenPolyCollection') == len(row()["sides"])


# -- the README and the command ----------------------------------------------------------------------------------------


def test_the_readme_shows_one_size_and_the_document_every_call(tmp_path: Path) -> None:
    lost = {"gl compute": timing(2), "torch x": timing(1)}
    separate = {"gl one call": timing(1), "gl a call for each image": timing(30), "torch one call": timing(1)}
    shown = [row(), row("log_polar"), row(sides=lost), row("bridge", 64, part="fixed cost")]
    batch = row(size=224, batch=32, sides=separate)  # has no opponent
    elsewhere = [
        row(size=2048), row("foveate", cache="cold"), row(dtype="uint8"), row(batch=8),
        row(part="zero-copy in"), row(size=4096, part="zero-copy in"),
        row(note="x; from an image, forward and backward"),
    ]  # fmt: skip
    parts = [row(part="kernel"), row(part="bridge")]
    for one in shown + elsewhere + parts:
        one["gl_speedup"] = 0.5 if one["sides"] is lost else 2.0
    elsewhere.append(batch)
    assert all(map(text.in_readme, shown)) and not any(map(text.in_readme, elsewhere + parts))
    path = saved(tmp_path, "a.json", data(*shown, *elsewhere, *parts))
    made = text.markdown(path, tmp_path.parent)
    for found, there in ((made, shown), (text.markdown(path, tmp_path, every=True), shown + elsewhere)):
        assert len([line for line in found.splitlines() if line.startswith("|")]) == 2 + len(there)
        assert "GL is the faster in 10 of 11 rows." in found, "of all of them, whichever are shown"
    assert f"([file]({tmp_path.name}/a.json))" in made
    begin, end = text.MARKS
    readme = f"a\n{begin}\nold\n{end}\nb\n"
    assert text.with_tables(readme, made) == f"a\n{begin}\n\n{made}\n\n{end}\nb\n"


COMMAND = [sys.executable, "-W", "error", "-m", "gpu_lod.cli"]
NO_EGL = {"GPU_LOD_LIBEGL": "/nonexistent.so"}


def test_the_command_writes_the_page_without_opengl(tmp_path: Path) -> None:
    gpu = saved(tmp_path, "gpu.json", on_cuda(row(), row(size=2048)))
    made = subprocess.run(
        [*COMMAND, "report", str(RESULTS[-1]), "gpu.json", "-o", "new/page.html"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **NO_EGL},
    )  # fmt: skip
    assert (made.returncode, made.stdout, made.stderr) == (0, "wrote new/page.html\n", "")
    assert (tmp_path / "new" / "page.html").read_text() == html(load_all([RESULTS[-1], gpu]))


def test_the_command_prints_a_table_or_what_it_wrote(tmp_path: Path) -> None:
    gpu = saved(tmp_path, "gpu.json", on_cuda(row(), row(size=2048)))
    assert done(tmp_path, "report", "gpu.json", "--markdown", env=NO_EGL) == text.markdown(gpu, tmp_path) + "\n"
    wrote = json.loads(done(tmp_path, "report", "gpu.json", "--json", env=NO_EGL))
    assert wrote == {"input": ["gpu.json"], "output": ["out/report.html"]}


def test_tables_are_made_of_what_was_read(tmp_path: Path) -> None:
    """A pipe is read once."""
    file = saved(tmp_path, "file.json", data(row(), row(size=2048)))
    os.mkfifo(pipe := tmp_path / "pipe.json")
    writer = threading.Thread(target=pipe.write_text, args=(file.read_text(),))
    writer.start()
    printed = done(tmp_path, "report", "pipe.json", "--markdown", env=NO_EGL)
    writer.join()
    assert printed.replace("pipe.json", "file.json") == text.markdown(file, tmp_path) + "\n"


def test_the_command_fails_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, "bad.json", "{")
    refused(
        tmp_path,
        ("report bad.json", 1, "bad.json is no result file, or corrupt"),
        ("report", 2, "FILES"),
        env=NO_EGL,
    )
    assert not (tmp_path / "out").exists()


def test_the_table_names_the_best_of_the_other_libraries() -> None:
    sides = {"gl compute": timing(1.0), "torch x": timing(0.5)}
    peers = {"opencv INTER_AREA (HWC)": timing(0.4), "kornia build_pyramid": timing(0.2), "pillow reduce": timing(0.3)}
    near = {"kornia build_pyramid": "a Gaussian", "pillow reduce": "rounds"}
    at = text.HEADINGS.index("other library, ms")
    assert len(text.cells(row())) == len(text.HEADINGS)
    assert text.cells(row(sides=sides))[at] == ""
    found = text.cells(row(sides=sides | peers, other_job=near))[at]
    assert found.startswith("opencv INTER_AREA (HWC): 0.4 ") and "another job" not in found
    del peers["opencv INTER_AREA (HWC)"]
    found = text.cells(row(sides=sides | peers, other_job=near))[at]
    assert found.startswith("kornia build_pyramid: 0.2 ") and found.endswith(", another job")
