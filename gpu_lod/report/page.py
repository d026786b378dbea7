"""One self-contained HTML page from any result files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import gpu_lod.report.claim as claim
import gpu_lod.report.generators as generators
from gpu_lod.report import plots, rows
from gpu_lod.report.files import Data, load_all, write
from gpu_lod.report.losses import losses
from gpu_lod.report.shares import shares
from gpu_lod.report.text import machine, missing, on_cuda


def report(paths: Sequence[Path], target: Path) -> None:
    """Write the page of some result files.

    Raises:
        FileError: a file is missing, corrupt, of another kind or of a newer gpu_lod, two are the same, or the page
            cannot be written. Then nothing is written.
    """
    write(html(load_all(paths)), target)


def html(found: list[tuple[Path, Data]]) -> str:
    """The page. The same files give the same text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["ms"] = rows.figure
    template = files("gpu_lod.report").joinpath("page.html").read_text("utf-8")
    devices = [_device(path, data, number) for number, (path, data) in enumerate(found, start=1)]
    names = [device["name"] for device in devices]
    for device in devices:
        if names.count(device["name"]) > 1:  # two runs on one device
            device["name"] += f", {device['file']}"
    return environment.from_string(template).render(
        devices=devices, claim=claim.CLAIM, claimed_ms=claim.CLAIMED_MS, claimed_ratio=claim.CLAIMED_RATIO,
        verbs=[_verb(verb, devices, Markup) for verb in _verbs(found)], best=rows.best, gain=rows.gain, job=rows.job,
        opponent=rows.opponent, over_floor=rows.over_floor, time=rows.time, why_other=rows.why_other, note=rows.note,
        way=rows.way, median=rows.median, own=rows.own,
    )  # fmt: skip


def _device(path: Path, data: Data, number: int) -> dict[str, Any]:
    return {
        "number": number,
        "file": path.name,
        "data": data,
        "name": machine(data),
        "missing": missing(data),
        "clock": "wall clock, with a synchronise behind every call" if on_cuda(data) else "wall clock",
        "claim": claim.lines(data),
        "verdict": claim.verdict(data),
        "losses": losses(data),
        "generators": [(verb, found, generators.names(found)) for verb, found in _generators(data)],
    }


def _generators(data: Data) -> list[tuple[str, list[generators.Line]]]:
    tables = [(verb, generators.lines(data, verb)) for verb in generators.VERBS]
    return [(verb, found) for verb, found in tables if found]


def _verbs(found: list[tuple[Path, Data]]) -> list[str]:
    return list(dict.fromkeys(row["verb"] for _, data in found for row in data["rows"]))


def _verb(verb: str, devices: list[dict[str, Any]], markup: Any) -> dict[str, Any]:
    """Its plots, those of a job beside each other for all devices; and its shares."""
    by_device = [(device, plots.curves(device["data"])) for device in devices]
    names = [name for _, found in by_device for name in found if name.partition(";")[0] == verb]
    jobs = []
    for number, name in enumerate(dict.fromkeys(names)):
        limits = plots.limits_of([found[name] for _, found in by_device if name in found])
        drawn = [
            {
                "device": device["name"],
                "words": plots.summary(found[name]),
                "svg": markup(plots.time_over_size(found[name], limits, f"{verb}-{number}-{device['number']}")),
            }
            for device, found in by_device
            if name in found
        ]
        jobs.append({"name": name, "plots": drawn})
    parts = [(device["name"], shares(device["data"], verb)) for device in devices]
    return {"name": verb, "jobs": jobs, "shares": [(name, found) for name, found in parts if found]}
