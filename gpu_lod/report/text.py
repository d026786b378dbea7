"""The table of a result file, for a terminal, for the README and for docs/benchmarks.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_lod.report.files import Data, between, load
from gpu_lod.report.rows import Row, best, has_kernels, job, kind_of, median, note, own, time, way

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = [
    "verb",
    "job",
    "best GL, ms",
    "best torch, ms",
    "GL against torch",
    "auto, ms",
    "other library, ms",
    "floor, ms",
]
_WITH_KERNELS = {"best GL, ms": "best of ours, ms", "GL against torch": "ours against torch"}
MARKS = "<!-- table: python bench/report.py --readme -->", "<!-- end of table -->"
_SHOWN = [1024, 1024]
"""The size that the README shows."""
_BACKWARD = "forward and backward"
"""In the note of rows of gradients."""


def on_cuda(data: Data) -> bool:
    return bool(data.get("tensors") == "cuda")


def machine(data: Data) -> str:
    if on_cuda(data):
        return f"{data['device']}, CUDA tensors, driver {data['cuda_driver']}, CUDA {data['cuda']}"
    return f"{data['device']}, {data['cpu']}, {data['threads']} cores"


def missing(data: Data, *, every: bool = True) -> str:
    """What the file says was not measured.

    Args:
        every: name what was left out, else say how much it is.
    """
    parts = []
    if left := data.get("left_out"):
        said = ", ".join(left) if every else f"{len(left)} {'job' if len(left) == 1 else 'jobs'}"
        parts.append(f"Left out for lack of time: {said}.")
    if data.get("failures"):
        parts.append(f"Failed: {', '.join(dict.fromkeys(one['name'] for one in data['failures']))}.")
    if data.get("absent"):
        parts.append(f"Not installed: {', '.join(data['absent'])}.")
    return " ".join(parts)


def long_job(row: Row) -> str:
    """The job, and what a reader of its figures must know."""
    more = f"; {note(row)}" if note(row) else ""
    if "torch one comparison" in row["sides"]:  # the honest opponent of cull, which gives the mask alone
        more += f"; for the mask alone one torch comparison takes {time(row, 'torch one comparison')}"
    if "gl a call for each image" in row["sides"]:
        more += f"; a call for each image takes {time(row, 'gl a call for each image')}"
    if row["part"] == "fixed cost":  # which is the host's
        times = {side: timing["cpu_us"] for side, timing in row["sides"].items() if "cpu_us" in timing}
        more += "; CPU time a call: " * bool(times) + ", ".join(f"{side} {us:.3g} us" for side, us in times.items())
    if row.get("dropped"):  # of no machine's OpenGL, or of this machine's compiler: the file says why
        more += f"; without {', '.join(sorted(row['dropped']))}"
    return job(row) + more


def headings(data: Data) -> list[str]:
    """HEADINGS, in words of all of ours where kernels were measured beside shaders."""
    return [_WITH_KERNELS.get(word, word) for word in HEADINGS] if has_kernels(data["rows"]) else HEADINGS


def speedup_of(row: Row, kernels: bool) -> float | None:
    """The best torch way over the best of ours: of shaders alone, or of kernels too."""
    ours, theirs = own(row), best(row, "torch")
    if not kernels:
        return row.get("gl_speedup")
    return median(row, theirs) / median(row, ours) if ours and theirs else None


def verdict(row: Row, kernels: bool = False) -> str:
    speedup = speedup_of(row, kernels)
    if speedup is None:
        return ""
    return f"{speedup:.2f}x" if speedup >= 1 else f"{speedup:.2f}x (slower)"


def other_library(row: Row) -> str:
    """The fastest that does the job, else the fastest that comes near it."""
    found = best(row, "peer")
    if found:
        return f"{found}: {time(row, found)}"
    near = min((s for s in row["sides"] if kind_of(s) == "peer"), key=lambda side: median(row, side), default=None)
    return f"{near}: {time(row, near)}, another job" if near else ""


def cells(row: Row, kernels: bool = False) -> list[str]:
    """A row under the headings.

    Args:
        kernels: the best of ours may be one, and the row says whose it is.
    """
    ours, theirs = own(row) if kernels else best(row, "gl"), best(row, "torch")
    auto = f"{time(row, 'auto')}{'' if row.get('auto_ok', True) else ' (behind)'}" if "auto" in row["sides"] else ""
    return [
        row["verb"],
        long_job(row),
        f"{ours if kernels else way(ours)}: {time(row, ours)}" if ours else "",
        f"{way(theirs)}: {time(row, theirs)}" if theirs else "",
        verdict(row, kernels),
        auto,
        other_library(row),
        f"{row['floor_ms']:.3g}",
    ]


def table(path: Path) -> Table:
    """Every row but those of a call's parts, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    data = load_any(path)
    kernels = has_kernels(data["rows"])
    result = Table(*headings(data), title=Text(f"{machine(data)}, {data['date']}"), caption=Text(missing(data)))
    for row in data["rows"]:
        if row["part"] not in ("kernel", "bridge"):
            lost = (speedup_of(row, kernels) or 1) < 1
            result.add_row(*map(Text, cells(row, kernels)), style="dim" if lost else "")
    return result


def load_any(path: Path) -> Data:
    """Also the file of a run in which nothing could be measured, which the terminal should show."""
    import json

    data: Data = json.loads(path.read_text(encoding="utf-8"))
    return data if not data.get("rows") else load(path)


def is_call(row: Row) -> bool:
    """Parts of calls are on the page alone."""
    return row["part"] not in ("kernel", "bridge")


def in_readme(row: Row) -> bool:
    """A picture of one size in fp32, warm, in ordinary memory, without gradients, and what tells of the cost of a call;
    chosen by what was measured, never by who has won."""
    if row["part"] == "fixed cost":
        return True
    one = row["size"] == _SHOWN and row["batch"] == 1 and row["dtype"] == "float32" and row["cache"] == "warm"
    return row["part"] == "end to end" and one and _BACKWARD not in row["note"]


def markdown(path: Path, folder: Path, data: Data | None = None, *, every: bool = False) -> str:
    """The table of one file, linked as seen from a folder: the README's, or every call.

    Args:
        data: what the file holds, if it was read: a pipe is read once.
    """
    data = load_any(path) if data is None else data
    kernels = has_kernels(data["rows"])
    calls = [row for row in data["rows"] if is_call(row)]
    clock = " of the wall clock, with a synchronise behind every call" if on_cuda(data) else ""
    link = Path(os.path.relpath(path, folder)).as_posix()
    lines = [
        f"Measured on {_escape(machine(data))}, torch {_escape(data['versions']['torch'])}, {data['date']} "
        f"([file]({link})). Median ± half the interquartile range{clock}, milliseconds. {_balance(calls, kernels)}",
        "",
        "| " + " | ".join(headings(data)) + " |",
        "|" + " --- |" * len(HEADINGS),
        *("| " + " | ".join(map(_escape, cells(row, kernels))) + " |" for row in calls if every or in_readme(row)),
    ]
    if left := missing(data, every=every):
        lines += ["", _escape(left)]
    return "\n".join(lines)


def _balance(rows: list[Row], kernels: bool) -> str:
    """How many of the file's rows ours are faster in: of all of them, whichever are shown."""
    speedups = [found for row in rows if (found := speedup_of(row, kernels)) is not None]
    faster = sum(found >= 1 for found in speedups)
    return f"{'Ours' if kernels else 'GL'} is the faster in {faster} of {len(speedups)} rows."


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def with_tables(text: str, tables: str) -> str:
    """A document with the tables between the two marks brought up to date."""
    return between(text, MARKS, tables)
