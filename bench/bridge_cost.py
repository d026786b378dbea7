"""What the calls that hand GL buffers to CUDA and back cost, by themselves and inside a verb."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from cuda_timer import Stopwatch, wall_ms
from timer import percentile

import gpu_lod as lod
from gpu_lod.bridge import InteropBridge, egl

P50_US, P99_US = 30.0, 150.0
"""What the bridge may cost a call."""


@dataclass
class Rig:
    """A context that shares memory with a CUDA device."""

    ctx: lod.Context
    device: torch.device
    watch: Stopwatch

    @property
    def bridge(self) -> InteropBridge:
        assert self.ctx.interop is not None
        return self.ctx.interop


def p50_p99(seconds: Sequence[float], prefix: str = "") -> dict[str, float]:
    """In microseconds."""
    return {
        f"{prefix}p50_us": round(statistics.median(seconds) * 1e6, 3),
        f"{prefix}p99_us": round(percentile(seconds, 0.99) * 1e6, 3),
    }


def repeat(call: Callable[[], None], seconds: float, fewest: int, most: int) -> int:
    """Call it for some seconds; returns how often."""
    end = time.perf_counter() + seconds
    done = 0
    while done < fewest or (done < most and time.perf_counter() < end):
        call()
        done += 1
    return done


class Pairs:
    """Unmaps and maps some leased buffers in one call each, by the driver alone. They are mapped before and after."""

    def __init__(self, bridge: InteropBridge, leases: Sequence[Any]) -> None:
        self.driver, self.stream = bridge.driver, bridge.driver.stream()
        self.buffers = [lease.item for lease in leases]
        self.handles = [buffer.handle for buffer in self.buffers]
        self.unmaps: list[float] = []
        self.maps: list[float] = []
        self.cpu = 0.0
        """Seconds of this thread's CPU time, of all of them."""

    def clear(self) -> None:
        self.unmaps.clear()
        self.maps.clear()
        self.cpu = 0.0

    def once(self) -> None:
        cpu = time.thread_time()
        start = time.perf_counter()
        self.driver.unmap(self.handles, self.stream)
        middle = time.perf_counter()
        try:
            self.driver.map(self.handles, self.stream)
        except BaseException:
            for buffer in self.buffers:  # the bridge maps them when the verb ends
                buffer.mapped = False
            raise
        end = time.perf_counter()
        self.cpu += time.thread_time() - cpu
        self.unmaps.append(middle - start)
        self.maps.append(end - middle)

    def both(self) -> list[float]:
        """Seconds of each pair."""
        return [unmap + map_ for unmap, map_ in zip(self.unmaps, self.maps, strict=True)]

    def addresses(self) -> list[int]:
        return [self.driver.address(handle)[0] for handle in self.handles]


def cost(rig: Rig, count: int, nbytes: int, seconds: float) -> dict[str, Any]:
    """Of one unmap and one map of `count` buffers.

    The calls cost the CPU `p50_us`, and the GPU `gpu_us`, part of it before a verb's shaders begin and the rest after
    they end: it changes from its CUDA context to that of OpenGL, and back.

    - p50_us, p99_us, unmap_*, map_*, met: what the calls take, the GPU idle before them, as it is where every result is
      awaited. cpu_us is the thread's CPU time of it, in the mean.
    - with_synchronise_*: the same until the GPU has done its part.
    - back_to_back_*: what the calls take without a wait between pairs. Where they take the GPU longer than the CPU,
      they fill its queue, and calls wait there for pairs before them.
    - gpu_us: what a pair takes on the GPU's own clock, in the mean. Absent where there is no CUDA device.
    """
    bridge = rig.bridge
    with rig.ctx.active(device=rig.device):
        leases = [bridge.lease(nbytes) for _ in range(count)]
        pairs = Pairs(bridge, leases)
        repeat(pairs.once, 0, 20, 20)
        before = pairs.addresses()
        rig.watch.synchronize()
        pairs.clear()
        waited: list[float] = []
        calls = repeat(lambda: waited.append(wall_ms(pairs.once, rig.watch) * 1e-3), seconds / 2, 100, 4000)
        found: dict[str, Any] = {
            "buffers": count,
            "bytes": nbytes,
            "calls": calls,
            **p50_p99(pairs.both()),
            **p50_p99(pairs.unmaps, "unmap_"),
            **p50_p99(pairs.maps, "map_"),
            "cpu_us": round(pairs.cpu / calls * 1e6, 3),
            **p50_p99(waited, "with_synchronise_"),
        }
        pairs.clear()
        repeat(pairs.once, seconds / 4, 50, 2000)
        found |= p50_p99(pairs.both(), "back_to_back_")
        rig.watch.synchronize()
        if rig.device.type == "cuda":
            found["gpu_us"] = gpu_us(pairs.once, rig.watch)
        found["moved"] = pairs.addresses() != before
        found["met"] = found["p50_us"] <= P50_US and found["p99_us"] <= P99_US
        for buffer in pairs.buffers:
            bridge._locate(buffer)  # should one have moved
        del leases
    return found


def gpu_us(once: Callable[[], None], watch: Stopwatch, calls: int = 100) -> float:
    """Microseconds of a call on the device's clock, the mean of some that are queued one behind the other."""

    def all_of_them() -> None:
        for _ in range(calls):
            once()

    return round(watch.device_ms(all_of_them, 1)[0] * 1e3 / calls, 3)


class TimedDriver:
    """An `interop.Driver` whose calls are counted and timed.

    Args:
        before: called, outside the timed part, with the name of each call before it.
    """

    def __init__(self, driver: Any, before: Callable[[str], None] | None = None) -> None:
        self.driver = driver
        self.before = before
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.driver, name)
        if not callable(value):
            return value

        def timed(*arguments: Any) -> Any:
            if self.before is not None:
                self.before(name)
            start = time.perf_counter()
            try:
                return value(*arguments)
            finally:
                self.spent[name] += time.perf_counter() - start
                self.calls[name] += 1

        setattr(self, name, timed)
        return timed

    def clear(self) -> None:
        self.spent.clear()
        self.calls.clear()

    @property
    def bridge_seconds(self) -> float:
        return self.spent["map"] + self.spent["unmap"]


@contextmanager
def timing(bridge: InteropBridge, before: Callable[[str], None] | None = None) -> Iterator[TimedDriver]:
    """Let the bridge call its driver through a TimedDriver."""
    driver = bridge.driver
    timed = TimedDriver(driver, before)
    bridge.driver = timed
    try:
        yield timed
    finally:
        bridge.driver = driver


@contextmanager
def switches(spent: list[float]) -> Iterator[None]:
    """Note the seconds of each change of the thread's current GL context."""
    switch = egl.switch

    def timed(*contexts: egl.Current, **how: bool) -> None:
        start = time.perf_counter()
        try:
            switch(*contexts, **how)
        finally:
            spent.append(time.perf_counter() - start)

    egl.switch = timed
    try:
        yield
    finally:
        egl.switch = switch


def share(rig: Rig, verb: Callable[[], object], seconds: float) -> dict[str, Any]:
    """What map and unmap take of a verb, result awaited. A driver may wait for the shader inside map; "drained" is with
    that wait made before, by glFinish and a synchronise. Beside it stand all other calls of the driver, and making the
    GL context current and letting it go."""

    def drain(name: str) -> None:
        if name == "unmap":
            rig.watch.synchronize()
        elif name == "map":
            rig.ctx.gl.Finish()

    for _ in range(5):
        verb()
    rig.watch.synchronize()
    found: dict[str, Any] = {}
    for prefix, before in (("", None), ("drained_", drain)):
        whole: list[float] = []
        bridge: list[float] = []
        others: list[float] = []
        contexts: list[float] = []
        current: list[float] = []
        with timing(rig.bridge, before) as timed, switches(current):

            def once() -> None:
                timed.clear()
                current.clear()  # noqa: B023
                whole.append(wall_ms(verb, rig.watch) * 1e-3)  # noqa: B023
                bridge.append(timed.bridge_seconds)  # noqa: B023
                others.append(sum(timed.spent.values()) - timed.bridge_seconds)  # noqa: B023
                contexts.append(sum(current))  # noqa: B023

            once()
            for samples in (whole, bridge, others, contexts):
                samples.clear()
            calls = repeat(once, seconds / 2, 50, 1000)
            found |= p50_p99(bridge, f"{prefix}bridge_")
            if before is None:
                found |= {"calls": calls, **p50_p99(whole, "whole_"), **p50_p99(others, "other_driver_calls_")}
                found |= p50_p99(contexts, "context_switch_")
                found["share"] = round(statistics.median(b / w for b, w in zip(bridge, whole, strict=True)), 4)
                found |= {"maps": timed.calls["map"], "unmaps": timed.calls["unmap"]}
    found["met"] = found["bridge_p50_us"] <= P50_US and found["bridge_p99_us"] <= P99_US
    return found
