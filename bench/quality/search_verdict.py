"""The verdict of section "does it help?" on rows of the visual search, by the rule of `summary.verdict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quality import summary
from quality.search import BASELINE, FULL
from quality.search_cuts import CUTS

Name = tuple[int, str, str | None, str | None, float]
"""Budget, allocator, relevance, fixation, error."""


def verdicts(pictures: Mapping[Name, Sequence[float]]) -> dict[Name, dict[str, str]]:
    """Of every row, by its accuracy on each picture, in one order in all of them: {"verdict", "against"}.

    Convention: what a row is told is what its baseline is told. Rows on saliency, and those that look at nothing, stand
    against the baseline on saliency; rows on the query's relevance, and oracle fixations, which know the same place,
    against the baseline on the query's relevance with the same error; trained relevance against the baseline on it. A
    cut inside the reader earns by accuracy alone: half the tokens are not half the work where all are read first.
    """
    found = {_key(name): _sample(values) for name, values in pictures.items()}
    result = {}
    for name in pictures:
        allocator = name[1]
        kind = _kind(name)
        verdict = "every token" if allocator == FULL else summary.verdict(_key(name), found, kind)
        if allocator in CUTS and verdict == "earns: half the tokens":
            verdict = "no"
        result[name] = {"verdict": verdict, "against": f"{BASELINE} on {kind}"}
    return result


def _key(name: Name) -> summary.Key:
    budget, allocator, relevance, fixation, error = name
    return allocator, fixation, relevance and _with(relevance, error), budget


def _kind(name: Name) -> str:
    """Relevance of the baseline that a row stands against."""
    _, _, relevance, fixation, error = name
    return _with("query" if fixation == "oracle" else relevance or "saliency", error)


def _with(relevance: str, error: float) -> str:
    return f"{relevance}, place wrong by {error:g}" if error else relevance


def _sample(values: Sequence[float]) -> summary.Sample:
    return {("", index): value for index, value in enumerate(values)}
