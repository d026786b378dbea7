"""Quality benchmarks: tables, page, docs and README show what the result files hold, losers included."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

from quality import docs, page, report, summary, tables  # noqa: E402
from quality.methods import FULL  # noqa: E402
from quality.task import Metric, Task  # noqa: E402

FILES = docs.result_files()
GAINS = {"GridTopK": 0.0, "Random": -0.3, "Downsample": 0.1, "Winner": 0.2, "Loser": -0.1}


def line(method: str, budget: int | None, picture: int, error: float = 0.0, **more: Any) -> dict[str, Any]:
    relevance = None if method in (FULL.label, "Random", "Downsample") else "query" if error else "saliency"
    place = {"method": method, "fixation": None, "relevance": relevance, "error": error, "budget": budget, **more}
    value = 1.0 if budget is None else 0.5 + GAINS[method] + budget / 10000 - error + 0.001 * picture
    found = {"place": place, "tokens": budget or 1000, "coverage": 0.25, "peak_bytes": 3 * 2**20}
    bins = {"0-0.1": [1, 2], "0.1-": [picture, 3 * picture]}
    return {**found, "values": {"mean": {str(picture): value}}, "by_eccentricity": bins}


class Fake:
    accuracy = "mean"
    metrics = (Metric("mean", "<nothing>", accuracy=True),)
    told, reads_all = Task.told, Task.reads_all


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    lines = [line(FULL.label, None, picture) for picture in range(3)]
    for budget in (64, 200, 300):
        for picture in range(3):
            lines += [line(method, budget, picture) for method in GAINS]
            lines += [line("Winner", budget, picture, error) for error in (0.1, 0.2)]
    times = {
        summary.place_key({**one["place"], "timing": True}): {"ms": 2.5}
        for one in lines
        if one["place"]["method"] != "Random"
    }
    found = summary.summarise(Fake(), lines, times, ["saliency"])  # type: ignore[arg-type]
    task = {
        "title": "Fakes", "accuracy": "mean", "metrics": [vars(metric) for metric in Fake.metrics], "ms": "choosing",
        "relevance": ["saliency"], "budgets": [64, 200, 300], "settings": {}, "absent": {"this": "that"},
        "measured": {"jobs": 2, "seeds": 3, "cpu": "a CPU", "commit": "abc", "date": "today"},
        "pictures": [{"name": "noise", "seed": 0, "cells": 1000}], "left_out": {"A": "learned", "B": "learned"},
        **found,
    }  # fmt: skip
    whole = {"schema": 2, "form": "quick", "interval": "95%", "versions": {"torch": "2"}, "date": "today"}
    return json.loads(json.dumps({**whole, "tasks": {"fakes": task}}))


@pytest.fixture(scope="module")
def task(data: dict[str, Any]) -> dict[str, Any]:
    return data["tasks"]["fakes"]


def test_every_row_is_shown_best_first(data: dict[str, Any], task: dict[str, Any]) -> None:
    assert tables.budgets(task) == [64, 200, 300] and tables.usual_budget(task) == 300  # 27 from 273, and not 73
    head, *rows = tables.every_row(task, 300)
    by_name = {(row[0], row[2]): dict(zip(head, row, strict=True)) for row in rows}
    assert set(by_name) == {
        (FULL.label, ""), ("Random", ""), ("Downsample", ""), ("GridTopK", "saliency"), ("Winner", "saliency"),
        ("Loser", "saliency"), ("Winner", "query, place wrong by 0.1"), ("Winner", "query, place wrong by 0.2"),
    }  # fmt: skip
    column = [float(row[head.index("mean")].split()[0]) for row in rows]
    assert column == sorted(column, reverse=True)
    loser = by_name["Loser", "saliency"]
    assert (loser["mean"], loser["verdict"], loser["ms"]) == ("0.431 ± 0.002", "no", "2.5")
    assert (loser["peak memory"], loser["coverage"], loser["mean x 1000 / K"]) == ("3.0 MiB", "0.25", "1.44")
    assert loser["mean less GridTopK's"] == "-10.0 ± 0.0 points" and by_name["Random", ""]["ms"] == ""
    text = docs.markdown(data, "file.json")
    assert all(f"| {name} |" in text for name in GAINS) and "Fakes: A and B: learned." in text


def test_cells_of_few_pictures_have_no_interval() -> None:
    few = {"mean": 0.5, "low": -0.1, "high": 1.1}
    assert [tables.figure({**few, "n": n}) for n in (2, 3)] == ["0.500", "0.500 ± 0.600"]
    assert [tables.points({**few, "n": n}) for n in (2, 3)] == ["+50.0 points", "+50.0 ± 60.0 points"]
    assert (tables.milliseconds(123.4), tables.milliseconds(0.456), tables.size(None)) == ("123", "0.46", "")


def test_places_have_tables_of_their_own(task: dict[str, Any]) -> None:
    assert tables.by_error(task, 64) == [
        ["method", "fixation", "relevance", "0.1", "0.2"],
        ["Winner", "", "query", "0.607 ± 0.002", "0.507 ± 0.002"],
    ]
    head, *rows = tables.by_eccentricity(task, 64)
    assert head[3:] == ["0-0.1", "0.1-"] and ["Loser", "", "saliency", "0.50", "0.33"] in rows
    assert len(rows) == 1 + len(GAINS)  # and those where the place is wrong are not among them


def test_a_sentence_says_what_won_and_what_lost(task: dict[str, Any]) -> None:
    said = tables.in_a_sentence(task)
    assert "(mean, 300 tokens): Winner is best on saliency or without relevance, 0.731 ± 0.002; GridTopK has" in said
    assert "GridTopK has 0.531 ± 0.002 on saliency. " in said
    assert "Earning a place over GridTopK (and so does Downsample): Winner." in said
    assert said.endswith("Below it beyond chance: Loser.")
    rows = [row for row in task["rows"] if row["method"] == "Loser"]
    more = [{**row, "method": f"Loser {number}"} for row in rows for number in (2, 3)]
    assert tables.in_a_sentence({**task, "rows": task["rows"] + more}).endswith("all others but Winner.")


def test_the_page_holds_plots_and_every_table(data: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    text = page.html([data])
    assert text.count("<svg") == 2 and text.count('<table class="sortable">') == 1 + 3 * 3
    summed = text[text.index("<h3>Every method") : text.index("</table>")]
    assert all(f"<td>{name}</td>" in summed for name in (*GAINS, FULL.label)) and "<td>query" not in summed
    assert "<nothing>" not in text and "&lt;nothing&gt;" in text
    assert not re.search(r'(?:src|href)="(?!#)', text)  # it needs nothing else
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert "#000000" not in text  # ink is the page's, also in the dark
    assert page.html([data]) == text


# -- what is published ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_committed_files_show_all_baselines_and_no_oracle_alone(path: Path) -> None:
    found = tables.load(path)["tasks"]
    assert found and set(found) <= {"ocr", "features", "search"}
    for task in found.values():
        for budget in tables.budgets(task):
            names = {row["method"] for row in tables.rows_at(task, budget)}
            assert {"GridTopK", "Downsample", "Random", FULL.label} <= names
        assert not any(summary.alone(row, task["rows"]) for row in task["rows"] if not row["error"])


@pytest.mark.parametrize("path", docs.CONTENT, ids=lambda path: path.name)
def test_docs_and_readme_show_the_files(path: Path) -> None:
    assert docs.updated(path) == path.read_text("utf-8"), "python bench/quality/report.py --readme"


def test_the_readme_has_what_matters_of_each_task() -> None:
    text = docs.readme()
    for title in ("OCR recovery", "Feature fidelity", "Visual search"):
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| {title} ")]
        names = [row[2] for row in rows]
        assert {"GridTopK", "Downsample", "Random", FULL.label} <= set(names)
        assert len(set(names) - {"GridTopK", "Downsample", "Random", FULL.label}) == docs.BEST
        assert f"{title} ([full form, " in text
    assert "oracle" not in text


def test_of_each_task_the_longest_form_counts(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full form is measured task by task: until it has one, the quick form's stands."""
    task = data["tasks"]["fakes"]
    files = {"full": {"features": task}, "quick": {"ocr": task, "features": {**task, "title": "short"}}}
    for form, tasks in files.items():
        (tmp_path / f"{form}.json").write_text(json.dumps({**data, "form": form, "tasks": tasks}))
    monkeypatch.setattr(docs, "result_files", lambda: sorted(tmp_path.glob("*.json")))
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "load", lambda path: json.loads(path.read_text()))  # fakes fit no schema
    found = docs.longest()
    assert [(name, task["title"]) for name, (task, _) in found.items()] == [("ocr", "Fakes"), ("features", "Fakes")]
    assert found["ocr"][1] == "([quick form, today](quick.json))" and "full form" in found["features"][1]


def test_the_program_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {}
    monkeypatch.setattr(report, "write", lambda text, path: written.update({path.name: text}))
    for arguments, names in (
        ([], {"quality.md", "search.md"}),
        (["--readme"], {"quality.md", "search.md", "README.md"}),
    ):
        written.clear()
        assert report.main(arguments) == 0 and set(written) == names
