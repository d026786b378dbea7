"""Timing several ways of doing one job against each other.

The sides take turns in one run, in blocks of a few calls, so that a machine that speeds up or slows down does so for
all of them. Before each block comes a pause: torch's OpenMP threads spin for some milliseconds after a parallel
operation, and would otherwise be charged to whoever comes next. Then come calls that are not counted, for some
milliseconds: a core that has slept is slow at first.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

Name = TypeVar("Name", bound=Hashable)

PAUSE = 0.02
WARM = 0.005
"""Seconds of calls that are not counted, at least one."""
BLOCK = 4
BUSY = 0.5
"""Load a core, from which on the machine has other things to do."""
LONG_MS = 300.0
"""From here on a call is too long for its neighbours to be seen in it, and none is spent uncounted."""


def at_work() -> str:
    """What the machine is at, if that is much: times that begin now say little. Else nothing."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"a load of {load:.1f} on {cores} cores" if load > BUSY * cores else ""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one side, by the wall clock."""

    median_ms: float
    iqr_ms: float
    fastest_ms: float
    calls: int
    p99_ms: float | None = None
    device_ms: float | None = None
    """Median on the GPU, by events; of CUDA tensors only, like the one above and the one below."""
    cpu_us: float | None = None
    """Microseconds of the calling thread's CPU time, median over blocks of calls."""

    def as_dict(self) -> dict[str, float]:
        return {key: round(value, 5) for key, value in asdict(self).items() if value is not None}


class Race(Protocol):
    """What times the sides of a row."""

    def __call__(
        self, sides: Mapping[str, Callable[[], object]], *, seconds: float = ..., most: int = ...
    ) -> dict[str, Timing]: ...


def wall_ms(side: Callable[[], object]) -> float:
    start = time.perf_counter()
    side()
    return (time.perf_counter() - start) * 1e3


def race(
    sides: Mapping[Name, Callable[[], object]],
    *,
    seconds: float = 2.0,
    most: int = 40,
    fewest: int = 12,
    warm_up: int = 2,
    pause: float = PAUSE,
    clock: Callable[[Callable[[], object]], float] = wall_ms,
) -> dict[Name, Timing]:
    """Time all sides, about `seconds` a side and at most `most` counted calls each, at least `fewest`.

    Args:
        clock: makes one call of a side, and gives the milliseconds that count.
    """
    samples: dict[Name, list[float]] = {name: [] for name in sides}
    spent = dict.fromkeys(sides, 0.0)
    for side in sides.values():  # warm-up: compile, allocate, touch
        for _ in range(warm_up):
            clock(side)
    names, order = list(sides), random.Random(0)
    while True:
        open_ = [n for n in names if len(samples[n]) < fewest or (len(samples[n]) < most and spent[n] < seconds)]
        if not open_:
            break
        for name in open_:
            side = sides[name]
            time.sleep(pause)
            if not samples[name] or samples[name][-1] < LONG_MS:
                warm = time.perf_counter() + (WARM if pause else 0)
                clock(side)
                while time.perf_counter() < warm:
                    clock(side)
            for _ in range(BLOCK):
                elapsed = clock(side)
                samples[name].append(elapsed)
                spent[name] += elapsed * 1e-3
        order.shuffle(names)  # nobody always follows the same neighbour
    return {name: _timing(values) for name, values in samples.items()}


def _timing(values: list[float]) -> Timing:
    low, _, high = statistics.quantiles(values, n=4)
    return Timing(statistics.median(values), high - low, min(values), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]
