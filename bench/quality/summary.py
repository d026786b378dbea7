"""From units to what a result file says: means, intervals, and the verdict against the baseline.

Convention: the sample is the pictures (one page drawn from two seeds is two pictures). What a method that draws lots
    gets on one picture is averaged over its draws first. Intervals are Student's t, 95%; differences to the baseline
    are taken picture by picture.

A row is compared with the baseline at the same budget, on the same relevance, which is wrong by the same where that was
measured; what looks at no relevance, or at one that the baseline was not given, with the baseline on the first kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from scipy.stats import t as student

from quality.journal import Line
from quality.methods import BASELINE, FULL, ORACLE
from quality.task import Task
from quality.workers import timing_of

GAIN, LOSS = 0.03, 0.02
"""A method earns its place by an accuracy higher by GAIN, or by half the tokens at a loss below LOSS."""
EVEN = "Downsample"
"""The other honest baseline: what covers the picture may beat the first and not this one."""
CLAIM = ("LogPolar", 150, 273)
"""Can this one, at so many tokens, match the baseline at so many?"""
LEVEL = "95% Student's t over pictures, draws of one picture averaged first, differences paired by picture"

PER_TOKEN = 1000
"""Accuracy per token is the accuracy x PER_TOKEN / K: points of a thousandth for each token."""
KEY = ("method", "fixation", "relevance", "error", "budget")
"""What makes a row, in the place of a line."""

Key = tuple[Any, ...]
Sample = dict[str, float]
"""By picture."""


def interval(values: Iterable[float]) -> dict[str, Any]:
    """Mean and 95% interval; without bounds for a single value, which has none."""
    values = list(values)
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": _short(mean), "low": None, "high": None, "n": len(values)}
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return {"mean": _short(mean), "low": _short(mean - half), "high": _short(mean + half), "n": len(values)}


def samples(lines: Sequence[Line], metric: str) -> dict[Key, Sample]:
    """A value of the metric for each picture, of every method; those without one are left out."""
    drawn: dict[Key, dict[str, list[float]]] = {}
    for line in lines:
        for picture, value in line.get("values", {}).get(metric, {}).items():
            if value is not None:
                drawn.setdefault(key_of(line), {}).setdefault(picture, []).append(value)
    return {key: {picture: fmean(values) for picture, values in own.items()} for key, own in drawn.items()}


def key_of(line: Line) -> Key:
    return tuple(line["place"][name] for name in KEY)


def less(one: Sample, other: Sample) -> dict[str, Any] | None:
    """The interval of the differences, over the pictures that both have."""
    both = [picture for picture in one if picture in other]
    return interval(one[picture] - other[picture] for picture in both) if both else None


def summarise(task: Task, lines: Sequence[Line], times: Mapping[str, Line], kinds: Sequence[str]) -> dict[str, Any]:
    """Rows of a task, and what they say of the claim.

    Args:
        times: lines of `workers.time`, by `place_key`.
        kinds: of relevance; the first is that of the verdict.
    """
    by_metric = {metric.name: samples(lines, metric.name) for metric in task.metrics}
    primary = by_metric[task.accuracy]
    groups: dict[Key, list[Line]] = {}
    for line in lines:
        groups.setdefault(key_of(line), []).append(line)
    rows, skipped = [], {}
    for key, own in groups.items():
        done = [line for line in own if "skipped" not in line]
        reasons = {line["skipped"] for line in own if "skipped" in line}
        if reasons:
            skipped[", ".join(str(part) for part in key if part)] = "; ".join(sorted(reasons))
        if not done:
            continue
        rival = (*key[:2], task.told(*key[:3]), *key[3:])
        timed = [times[name] for line in done if (name := place_key(timing_of(line["place"]))) in times]
        row: dict[str, Any] = {
            **dict(zip(KEY, key, strict=True)),
            "tokens": round(fmean(line["tokens"] for line in done)),
            "coverage": _middle(fmean, done, "coverage"),
            "peak_bytes": _middle(median, done, "peak_bytes"),
            "ms": _middle(median, timed, "ms"),
            "reader_ms": _middle(median, timed, "reader_ms"),
            "values": {name: interval(found[key].values()) for name, found in by_metric.items() if key in found},
            "difference": {},
        }
        first = row["values"].get(task.accuracy)
        row["per_token"] = _short(first["mean"] * PER_TOKEN / row["tokens"]) if first else None
        for metric in task.metrics:
            own_values = by_metric[metric.name].get(key)
            baseline = baseline_of(by_metric[metric.name], rival, kinds[0])
            if metric.accuracy and own_values and baseline and row["method"] != BASELINE:
                row["difference"][metric.name] = less(own_values, baseline)
        even = primary.get((EVEN, None, None, 0.0, row["budget"]))
        row["beyond_even"] = less(primary[key], even) if even and key in primary and row["method"] != EVEN else None
        row["verdict"] = verdict(key, primary, kinds[0], rival, halves=not task.reads_all(row["method"]))
        if bins := [line["by_eccentricity"] for line in done if "by_eccentricity" in line]:
            row["by_eccentricity"] = {
                name: [sum(one[name][0] for one in bins), sum(one[name][1] for one in bins)] for name in bins[0]
            }
        rows.append(row)
    return {"rows": rows, "claim": claim(primary, kinds[0], task.told), "skipped": skipped}


def place_key(place: Line) -> str:
    return json.dumps(place, sort_keys=True)


def baseline_of(found: Mapping[Key, Sample], key: Key, kind: str, budget: int | None = None) -> Sample | None:
    """What a row is compared with: as the module says, at the row's budget unless another is asked for."""
    _, _, relevance, error, own = key
    for where in ((relevance, error), (relevance, 0.0), (kind, 0.0)):
        if sample := found.get((BASELINE, None, *where, budget or own)):
            return sample
    return None


def verdict(key: Key, found: Mapping[Key, Sample], kind: str, rival: Key | None = None, halves: bool = True) -> str:
    """By the rule: "earns: accuracy", "earns: half the tokens", "no", or "open" where the pictures are too few to say.

    A gain is earned with a mean of GAIN and an interval above 0. Twice the speed is half the tokens: what an encoder
    pays for is each token, and choosing them is little beside it. So for the second half of the rule this method at
    K' <= K / 2 loses less than LOSS against the baseline at K, the whole interval; that counts only where the baseline
    itself, at K', loses more.

    Args:
        rival: the same row as the baseline is told of it, if not as it is.
        halves: whether half the tokens are half the work.
    """
    rival = rival or key
    method, budget = key[0], key[-1]
    if method == FULL.name:
        return "every token"
    if method == BASELINE:
        return "baseline"
    own, baseline = found.get(key), baseline_of(found, rival, kind)
    gain = less(own, baseline) if own and baseline else None
    if gain is None:
        return "open"
    if gain["mean"] >= GAIN and gain["low"] is not None and gain["low"] > 0:
        return "earns: accuracy"
    assert own is not None
    for more in sorted({other[-1] for other in found if halves and other[-1] is not None and other[-1] >= 2 * budget}):
        dear = baseline_of(found, rival, kind, more)
        loss, itself = (less(one, dear) if one and dear else None for one in (own, baseline))
        if loss and itself and loss["low"] is not None and loss["low"] > -LOSS and itself["mean"] <= -LOSS:
            return "earns: half the tokens"
    return "open" if gain["high"] is None or gain["high"] >= GAIN else "no"


def claim(
    found: Mapping[Key, Sample], kind: str, told: Callable[[str, str | None, str | None], str | None]
) -> list[dict[str, Any]]:
    """The claimant's few tokens against the baseline's many: a row for each fixation and ablation.

    Args:
        told: `Task.told`.
    """
    name, few, many = CLAIM
    rows = []
    for key, own in found.items():
        method, fixation, relevance, error, budget = key
        if method.partition(",")[0] == name and (relevance, error, budget) == (kind, 0.0, few):
            rival = (method, fixation, told(method, fixation, relevance), error, budget)
            dear = baseline_of(found, rival, kind, many)
            gap = less(own, dear) if dear else None
            if gap is None:
                continue
            if gap["low"] is None:
                answer = "open"
            else:
                answer = "yes" if gap["low"] > -LOSS else "no" if gap["high"] < -LOSS else "open"
            rows.append({"method": method, "fixation": fixation, "difference": gap, "answer": answer})
    return rows


def alone(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an oracle's row stands without the rows of the centre and of saliency."""
    same = [other for other in rows if all(other[k] == row[k] for k in ("method", "relevance", "budget"))]
    return row["fixation"] == ORACLE and len({other["fixation"] for other in same}) < 3


def _middle(of: Callable[[list[float]], float], lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return _short(of(values)) if values else None


def _short(value: float) -> float:
    return round(value, 5)
