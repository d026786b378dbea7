"""Timing on a GPU, where a call returns before its work is done.

Each side is timed in two ways, in turns with the others: by the wall clock with a synchronise behind every call, which
is what a caller who needs the result waits for; and by events on the stream before and behind a call, with calls queued
one behind the other while the GPU is kept busy, which is the GPU's own work. What a call costs the host is counted
beside it, as CPU time of the calling thread. A side that fails is left out, and the row says why.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from opponents import at_most
from timer import Timing, percentile

Side = Callable[[], object]

BLOCK, FEWEST, MOST = 8, 16, 200
"""Calls of a turn; and counted calls of a side by each of the two clocks, at the least and at the most."""
TOO_SLOW_MS = 300.0
LEAST_AHEAD_MS, MOST_AHEAD_MS = 1.0, 100.0
"""For how long the GPU is kept busy before the first of some calls."""
SOON_MS = 250.0
NO_TIME = "no time was left for it"


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
        self._cycles = 0.0
        """Of a millisecond."""
        self._ahead: dict[int, float] = {}

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def device_ms(self, side: Side, calls: int) -> list[float]:
        """As the protocol says. On an idle stream, the time between two events would be the host's, wherever queueing
        takes longer than the work: so the GPU has something else to do until all calls are queued. A call that waits
        for the GPU itself cannot be queued, and keeps the time that it takes."""
        ahead = self._ahead.get(id(side), LEAST_AHEAD_MS)
        times, host_ms, dry = self._queued(side, calls, ahead)
        if dry and ahead < MOST_AHEAD_MS:
            self._ahead[id(side)] = ahead = min(1.5 * host_ms + LEAST_AHEAD_MS, MOST_AHEAD_MS)
            times, _, _ = self._queued(side, calls, ahead)
        return times

    def _queued(self, side: Side, calls: int, ahead_ms: float) -> tuple[list[float], float, bool]:
        """Milliseconds of each call on the GPU and of all of them on the host, and whether the GPU was at a call before
        the host had queued it."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        dry = False
        self._busy(ahead_ms)
        start = time.perf_counter()
        for before, behind in events:
            before.record()
            side()
            dry = dry or before.query()
            behind.record()
        host_ms = (time.perf_counter() - start) * 1e3
        self.synchronize()
        return [before.elapsed_time(behind) for before, behind in events], host_ms, dry

    def _busy(self, milliseconds: float) -> None:
        """Give the GPU something to do for so long."""
        if not self._cycles:
            probe = 10**7
            torch.cuda._sleep(probe // 10)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            torch.cuda._sleep(probe)
            events[1].record()
            self.synchronize()
            self._cycles = probe / max(events[0].elapsed_time(events[1]), 1e-3)
        torch.cuda._sleep(int(self._cycles * milliseconds))


def wall_ms(side: Side, watch: Stopwatch) -> float:
    """One call by the wall clock, the device idle before and after."""
    start = time.perf_counter()
    side()
    watch.synchronize()
    return (time.perf_counter() - start) * 1e3


def cpu_us(side: Side, calls: int) -> float:
    """Microseconds of this thread's CPU time a call, without waiting for the device."""
    start = time.thread_time()
    for _ in range(calls):
        side()
    return (time.thread_time() - start) * 1e6 / calls


def short(error: object) -> str:
    """An error in one line of about 400 characters at most, and where it came from."""
    if not isinstance(error, BaseException):
        return " ".join(str(error).split())[:400]
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


class DeviceLostError(RuntimeError):
    """A side has left the device unusable for all that follows in this process."""

    def __init__(self, side: str, error: object) -> None:
        super().__init__(f"{side} leaves the device unusable: {short(error)}")
        self.side = side


def lost(watch: Stopwatch) -> bool:
    """Whether an error stays, as that of an illegal address does: then every later call of the process has it."""
    for _ in range(2):
        try:
            watch.synchronize()
        except Exception:
            continue
        return False
    return True


@dataclass
class Limits:
    """What a row may take, and what it is about."""

    left: Callable[[], float] = lambda: math.inf
    """Seconds of the row's time."""
    for_the_race: float = 0.0
    """Seconds of it in which no further side is made."""
    barred: dict[str, str] = field(default_factory=dict)
    """Sides that are not to be called, and why."""
    side: str = ""
    """The one that is being called."""


class Sides:
    """The ways to do one job. What cannot be made, fails or is far too slow is dropped, and `dropped` says why.

    Raises:
        DeviceLostError: in `add` and `race`, if a side has left the device unusable.
    """

    def __init__(self, watch: Stopwatch, limits: Limits | None = None) -> None:
        self.watch = watch
        self.limits = limits or Limits()
        self.ways: dict[str, Side] = {}
        self.dropped: dict[str, str] = {}
        self.failed: set[str] = set()
        """Those among them that raised something."""
        self._first: dict[str, float] = {}

    def add(self, name: str, make: Callable[[], Side]) -> bool:
        """Make a side and warm it up; False if that failed."""
        if name in self.limits.barred:
            self.dropped[name] = self.limits.barred[name]
            return False
        if self.limits.left() < self.limits.for_the_race:
            self.dropped[name] = NO_TIME
            return False
        self.limits.side = name
        try:
            with self._in_time():
                side = make()
                side()
                self.watch.synchronize()
                self._first[name] = min(wall_ms(side, self.watch) for _ in range(2))
        except Exception as error:
            self._drop(name, error)
            return False
        if self._first[name] > TOO_SLOW_MS:
            self.dropped[name] = f"takes {self._first[name]:.0f} ms a call, too long to time it with the others"
            return False
        self.ways[name] = side
        return True

    def _in_time(self) -> AbstractContextManager[None]:
        left = self.limits.left()
        return at_most(left) if math.isfinite(left) else nullcontext()

    def _drop(self, name: str, error: Exception) -> None:
        self.dropped[name] = short(error)
        self.failed.add(name)
        if lost(self.watch):
            raise DeviceLostError(name, error) from error

    def fastest(self, names: list[str]) -> str | None:
        """The fastest of some sides in their first calls."""
        there = [name for name in names if name in self.ways]
        return min(there, key=self._first.__getitem__) if there else None

    def race(
        self, *, seconds: float = 0.3, most: int = MOST, fewest: int = FEWEST, block: int = BLOCK
    ) -> dict[str, Timing]:
        """Time all sides in turns of `block` calls, `seconds` a side by the wall clock once each has its fewest. When
        the row's time is over, those that will not have them soon are dropped."""
        walls: dict[str, list[float]] = {name: [] for name in self.ways}
        devices: dict[str, list[float]] = {name: [] for name in self.ways}
        hosts: dict[str, list[float]] = {name: [] for name in self.ways}
        names = list(self.ways)
        if names:  # each side is called about as long again for the other clocks
            seconds = min(seconds, max(self.limits.left(), 0.0) / (3 * len(names)))
        while True:
            open_ = [
                name
                for name in names
                if len(walls[name]) < fewest or (len(walls[name]) < most and sum(walls[name]) < seconds * 1e3)
            ]
            if not open_:
                break
            for name in open_:
                lacking = fewest - len(walls[name])
                if self.limits.left() < 0 and (lacking <= 0 or 3 * lacking * self._first[name] > SOON_MS):
                    if lacking > 0:
                        self.dropped[name] = f"{len(walls[name])} of {fewest} calls were timed, then the time was over"
                        del self.ways[name]
                    names.remove(name)
                    continue
                side = self.ways[name]
                self.limits.side = name
                try:
                    wall_ms(side, self.watch)  # not counted: it follows another side
                    walls[name] += [wall_ms(side, self.watch) for _ in range(block)]
                    devices[name] += self.watch.device_ms(side, block)
                    hosts[name].append(cpu_us(side, block))
                    self.watch.synchronize()
                except Exception as error:
                    del self.ways[name]
                    names.remove(name)
                    self._drop(name, error)
            names = [*names[1:], *names[:1]]  # nobody always follows the same neighbour
        return {name: _timing(walls[name], devices[name], hosts[name]) for name in self.ways}


def _timing(wall: list[float], device: list[float], host: list[float]) -> Timing:
    low, _, high = statistics.quantiles(wall, n=4)
    return Timing(
        statistics.median(wall), high - low, min(wall), len(wall), percentile(wall, 0.99), statistics.median(device),
        statistics.median(host),
    )  # fmt: skip


class Budget:
    """The time that a run may take, counted from now."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + 60 * minutes

    def left(self) -> float:
        """Seconds."""
        return self._end - self._clock()
