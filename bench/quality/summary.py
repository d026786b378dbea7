"""From units to what a result file says: means, intervals, and the verdict against the baseline.

Convention: the sample is the pictures (one page drawn from two seeds is two pictures). What a method that draws lots
    gets on one picture is averaged over its draws first. Intervals are Student's t, 95%; differences to the baseline
    are taken picture by picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from scipy.stats import t as student

from quality.frame import Task
from quality.journal import Line
from quality.methods import BASELINE, FULL, ORACLE

GAIN, LOSS = 0.03, 0.02
"""A method earns its place by an accuracy higher by GAIN, or by half the tokens at a loss below LOSS."""
EVEN = "Downsample"
"""The other honest baseline: what covers the picture may beat the first and not this one."""
CLAIM = ("LogPolar", 150, 273)
"""Can this one, at so many tokens, match the baseline at so many?"""
LEVEL = "95% Student's t over pictures, draws of one picture averaged first, differences paired by picture"

Key = tuple[str, str | None, str | None, int | None]
"""Method, fixation, relevance, budget."""
Sample = dict[tuple[str, int], float]
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
    drawn: dict[Key, dict[tuple[str, int], list[float]]] = {}
    for line in lines:
        value = line.get("values", {}).get(metric)
        if value is not None:
            place = line["place"]
            drawn.setdefault(key_of(line), {}).setdefault((place["picture"], place["seed"]), []).append(value)
    return {key: {picture: fmean(values) for picture, values in own.items()} for key, own in drawn.items()}


def key_of(line: Line) -> Key:
    place = line["place"]
    return place["method"], place["fixation"], place["relevance"], place["budget"]


def less(one: Sample, other: Sample) -> dict[str, Any] | None:
    """The interval of the differences, over the pictures that both have."""
    both = [picture for picture in one if picture in other]
    return interval(one[picture] - other[picture] for picture in both) if both else None


def summarise(task: Task, lines: Sequence[Line], kinds: Sequence[str]) -> dict[str, Any]:
    """Rows of a task, and what they say of the claim.

    Args:
        kinds: of relevance; methods that look at none are compared with the baseline of the first.
    """
    by_metric = {metric.name: samples(lines, metric.name) for metric in task.metrics}
    primary = by_metric[task.accuracy]
    groups: dict[Key, list[Line]] = {}
    for line in lines:
        groups.setdefault(key_of(line), []).append(line)
    rows, skipped = [], {}
    for key, own in groups.items():
        method, fixation, relevance, budget = key
        done = [line for line in own if "skipped" not in line]
        reasons = {line["skipped"] for line in own if "skipped" in line}
        if reasons:
            skipped[", ".join(str(part) for part in key if part is not None)] = "; ".join(sorted(reasons))
        if not done:
            continue
        kind = relevance or kinds[0]
        row: dict[str, Any] = {
            "method": method, "fixation": fixation, "relevance": relevance, "budget": budget,
            "tokens": round(fmean(line["tokens"] for line in done)),
            "coverage": _short(fmean(line["coverage"] for line in done)),
            "ms": _short(median(line["ms"] for line in done)),
            "values": {name: interval(found[key].values()) for name, found in by_metric.items() if key in found},
            "difference": {},
        }  # fmt: skip
        for metric in task.metrics:
            own_values, baseline = by_metric[metric.name].get(key), baseline_of(by_metric[metric.name], kind, budget)
            if metric.accuracy and own_values and baseline and method != BASELINE:
                row["difference"][metric.name] = less(own_values, baseline)
        even = primary.get((EVEN, None, None, budget))
        row["beyond_even"] = less(primary[key], even) if even and key in primary and method != EVEN else None
        row["verdict"] = verdict(key, primary, kind)
        rows.append(row)
    return {"rows": rows, "claim": claim(primary, kinds[0]), "skipped": skipped}


def baseline_of(found: Mapping[Key, Sample], kind: str, budget: int | None) -> Sample | None:
    return found.get((BASELINE, None, kind, budget))


def verdict(key: Key, found: Mapping[Key, Sample], kind: str) -> str:
    """By the rule: "earns: accuracy", "earns: half the tokens", "no", or "open" where the pictures are too few to say.

    A gain is earned with a mean of GAIN and an interval above 0. For half the tokens this method at K' <= K / 2 loses
    less than LOSS against the baseline at K, the whole interval; that counts only where the baseline itself, at K',
    loses more.
    """
    method, *_, budget = key
    if method == FULL.name:
        return "upper bound"
    if method == BASELINE:
        return "baseline"
    own, baseline = found.get(key), baseline_of(found, kind, budget)
    gain = less(own, baseline) if own and baseline else None
    if gain is None:
        return "open"
    if gain["mean"] >= GAIN and gain["low"] is not None and gain["low"] > 0:
        return "earns: accuracy"
    assert budget is not None and own is not None
    for more in sorted({k for *_, k in found if k is not None and k >= 2 * budget}):
        dear = baseline_of(found, kind, more)
        loss, itself = (less(one, dear) if one and dear else None for one in (own, baseline))
        if loss and itself and loss["low"] is not None and loss["low"] > -LOSS and itself["mean"] <= -LOSS:
            return "earns: half the tokens"
    return "open" if gain["high"] is None or gain["high"] >= GAIN else "no"


def claim(found: Mapping[Key, Sample], kind: str) -> list[dict[str, Any]]:
    """The claimant's few tokens against the baseline's many: a row for each fixation and ablation."""
    name, few, many = CLAIM
    dear = baseline_of(found, kind, many)
    rows = []
    for (method, fixation, relevance, budget), own in found.items():
        if method.partition(",")[0] == name and budget == few and relevance == kind and dear:
            gap = less(own, dear)
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


def _short(value: float) -> float:
    return round(value, 5)
