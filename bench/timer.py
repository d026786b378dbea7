"""Timing several ways of doing one job against each other.

The sides take turns in one run, in blocks of a few calls, so that a machine that speeds up or slows down does so for
all of them. Before each block comes a pause: torch's OpenMP threads spin for some milliseconds after a parallel
operation, and would otherwise be charged to whoever comes next; and one call that is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

PAUSE = 0.02
BLOCK = 4


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one side."""

    median_ms: float
    iqr_ms: float
    fastest_ms: float
    calls: int

    def as_dict(self) -> dict[str, float]:
        return {key: round(value, 5) for key, value in asdict(self).items()}


def race(sides: Mapping[str, Callable[[], object]], *, seconds: float = 2.0, most: int = 40) -> dict[str, Timing]:
    """Time all sides, about `seconds` a side and at most `most` counted calls each, at least 12."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    spent = dict.fromkeys(sides, 0.0)
    for side in sides.values():  # warm-up: compile, allocate, touch
        side()
        side()
    names = list(sides)
    while True:
        open_ = [n for n in names if len(samples[n]) < 12 or (len(samples[n]) < most and spent[n] < seconds)]
        if not open_:
            break
        for name in open_:
            side = sides[name]
            time.sleep(PAUSE)
            side()
            for _ in range(BLOCK):
                start = time.perf_counter()
                side()
                elapsed = time.perf_counter() - start
                samples[name].append(elapsed * 1e3)
                spent[name] += elapsed
        names.append(names.pop(0))  # nobody always follows the same neighbour
    return {name: _timing(values) for name, values in samples.items()}


def _timing(values: list[float]) -> Timing:
    low, _, high = statistics.quantiles(values, n=4)
    return Timing(statistics.median(values), high - low, min(values), len(values))
