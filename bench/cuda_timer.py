"""Timing on a GPU, where a call returns before its work is done.

Each side is timed in two ways, in turns with the others: by the wall clock with a synchronise behind every call, which
is what a caller who needs the result waits for; and by events on the stream before and behind a call, with calls queued
one behind the other, which is what a caller who goes on without waiting pays. A side that fails is left out, and the
row says why.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from timer import Timing, percentile

Side = Callable[[], object]

BLOCK, FEWEST, MOST = 8, 16, 200
"""Calls of a turn; and counted calls of a side by each of the two clocks, at the least and at the most."""
TOO_SLOW_MS = 300.0


class Stopwatch(Protocol):
    """A device's two clocks."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def device_ms(self, side: Side, calls: int) -> list[float]:
        """Milliseconds on the device of each of some calls, queued one behind the other."""


class CudaStopwatch:
    """That of torch's current stream on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def device_ms(self, side: Side, calls: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for before, behind in events:
            before.record()
            side()
            behind.record()
        self.synchronize()
        return [before.elapsed_time(behind) for before, behind in events]


def wall_ms(side: Side, watch: Stopwatch) -> float:
    """One call by the wall clock, the device idle before and after."""
    start = time.perf_counter()
    side()
    watch.synchronize()
    return (time.perf_counter() - start) * 1e3


def short(error: object) -> str:
    """An error in one line of about 400 characters at most, and where it came from."""
    if not isinstance(error, BaseException):
        return " ".join(str(error).split())[:400]
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


class Sides:
    """The ways to do one job. What cannot be made, fails or is far too slow is dropped, and `dropped` says why."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.ways: dict[str, Side] = {}
        self.dropped: dict[str, str] = {}
        self._first: dict[str, float] = {}

    def add(self, name: str, make: Callable[[], Side]) -> bool:
        """Make a side and warm it up; False if that failed."""
        try:
            side = make()
            side()
            self.watch.synchronize()
            self._first[name] = min(wall_ms(side, self.watch) for _ in range(2))
        except Exception as error:
            self.dropped[name] = short(error)
            return False
        if self._first[name] > TOO_SLOW_MS:
            self.dropped[name] = f"takes {self._first[name]:.0f} ms a call, too long to time it with the others"
            return False
        self.ways[name] = side
        return True

    def fastest(self, names: list[str]) -> str | None:
        """The fastest of some sides in their first calls."""
        there = [name for name in names if name in self.ways]
        return min(there, key=self._first.__getitem__) if there else None

    def race(
        self, *, seconds: float = 0.3, most: int = MOST, fewest: int = FEWEST, block: int = BLOCK
    ) -> dict[str, Timing]:
        """Time all sides in turns of `block` calls, `seconds` a side by the wall clock once each has its fewest."""
        walls: dict[str, list[float]] = {name: [] for name in self.ways}
        devices: dict[str, list[float]] = {name: [] for name in self.ways}
        names = list(self.ways)
        while True:
            open_ = [
                name
                for name in names
                if len(walls[name]) < fewest or (len(walls[name]) < most and sum(walls[name]) < seconds * 1e3)
            ]
            if not open_:
                break
            for name in open_:
                side = self.ways[name]
                try:
                    wall_ms(side, self.watch)  # not counted: it follows another side
                    walls[name] += [wall_ms(side, self.watch) for _ in range(block)]
                    devices[name] += self.watch.device_ms(side, block)
                except Exception as error:
                    self.dropped[name] = short(error)
                    del self.ways[name]
                    names.remove(name)
            names = [*names[1:], *names[:1]]  # nobody always follows the same neighbour
        return {name: _timing(walls[name], devices[name]) for name in self.ways}


def _timing(wall: list[float], device: list[float]) -> Timing:
    low, _, high = statistics.quantiles(wall, n=4)
    return Timing(
        statistics.median(wall), high - low, min(wall), len(wall), percentile(wall, 0.99), statistics.median(device)
    )


class Budget:
    """The time that a run may take, counted from now."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + 60 * minutes

    def left(self) -> float:
        """Seconds."""
        return self._end - self._clock()
