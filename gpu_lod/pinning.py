"""How many threads a software renderer has, and a CPU of its own for each.

llvmpipe cuts a dispatch into as many equal parts as it has threads, and takes as many threads as there are CPUs. They
sleep between dispatches, and Linux often wakes both of two on one CPU, where the second waits for the first while the
other CPU is idle: the dispatch takes twice as long, for seconds at a time.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.utils import data

_TASKS = Path("/proc/self/task")
_RASTERISER = re.compile(r"llvmpipe-\d+")
_NAMED = 0.25
"""Seconds within which a renderer's threads have got their names, on a machine that is busy with other work."""


_THREADS = "LP_NUM_THREADS"
"""What llvmpipe reads as it starts."""


@contextmanager
def few_threads() -> Iterator[None]:
    """In a worker of a DataLoader the renderer that is started inside has as many threads as torch has there: the other
    cores are the other workers'. $LP_NUM_THREADS says otherwise."""
    if _THREADS in os.environ or data.get_worker_info() is None:
        yield
        return
    os.environ[_THREADS] = str(torch.get_num_threads())
    try:
        yield
    finally:
        os.environ.pop(_THREADS, None)


@contextmanager
def pinning() -> Iterator[None]:
    """Give the renderer's threads that are started inside a CPU each; those of hardware, of renderers that run already,
    and of other systems than Linux stay as they are. $GPU_LOD_PIN "off" leaves all of them to the system."""
    before = _threads()
    yield
    if before and os.environ.get("GPU_LOD_PIN", "").lower() != "off":
        creator = before.get(threading.get_native_id(), "")
        cpus = sorted(os.sched_getaffinity(0))
        end = time.monotonic() + _NAMED
        # A thread is called as the one that started it until it runs for the first time and names itself.
        while not (found := places(started := _started(before), creator, cpus)) and time.monotonic() < end:
            if len(cpus) < 2 or len(started) < 2 * len(cpus) or _named(started, creator):
                break  # no software renderer of this process, or one with more threads than it may use CPUs
            time.sleep(0.001)
        for task, cpu in found.items():
            with suppress(OSError):  # it has ended, or a sandbox forbids it
                os.sched_setaffinity(task, {cpu})


def places(started: Mapping[int, str], creator: str, cpus: Sequence[int]) -> dict[int, int]:
    """The CPU of each thread: {thread: CPU}, and none where it is not certain whose threads they are.

    Args:
        started: names of the threads that were started, by id.
        creator: name of the thread that opened the context. llvmpipe names its rasterisers, and its compute threads,
            as many, are called as the thread that started them.
        cpus: those that the process may use. Where they are more than the threads, the system places them better.
    """
    rasterisers = sorted(task for task, name in started.items() if _RASTERISER.fullmatch(name))
    compute = sorted(task for task, name in started.items() if name == creator)
    if not len(rasterisers) == len(compute) == len(cpus) > 1:
        return {}
    return {task: cpu for group in (rasterisers, compute) for task, cpu in zip(group, cpus, strict=True)}


def _started(before: Mapping[int, str]) -> dict[int, str]:
    """The threads that run now and did not before, but for Python's own."""
    own = {thread.native_id for thread in threading.enumerate()}
    return {task: name for task, name in _threads().items() if task not in before and task not in own}


def _named(started: Mapping[int, str], creator: str) -> bool:
    """Whether a renderer's threads have all got their names: there are as many of either kind then."""
    rasterisers = sum(_RASTERISER.fullmatch(name) is not None for name in started.values())
    return 0 < rasterisers == sum(name == creator for name in started.values())


def _threads() -> dict[int, str]:
    """Names of this process's threads by id; none where there is no such list."""
    found = {}
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has ended
                found[int(task.name)] = (task / "comm").read_text().strip()
    return found
