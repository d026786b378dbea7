"""What makes torch faster on CUDA: compiling a function, and capturing its kernels in a graph."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch


class TimeLimit(BaseException):
    """A step took too long. No Exception, for compilers catch those and go on."""


class GivenUp(RuntimeError):
    """What was waited for takes too long."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Give up what runs inside after some seconds. Python code of the main thread only: C code ends first. Such limits
    may lie inside each other.

    Raises:
        GivenUp: the time ran out.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeLimit

    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, stop)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeLimit:
        raise GivenUp(f"not ready after {seconds:.0f} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), 0.01))


def compiled(function: Callable[[Any], object], inputs: list[Any], seconds: float) -> Callable[[Any], object]:
    """The function by torch.compile, run once on each input. What it cannot compile as a whole raises."""
    torch._dynamo.reset()  # else the ninth size of a function silently runs uncompiled

    def whole(x: Any) -> object:
        return function(x)

    result = torch.compile(whole, fullgraph=True, dynamic=False)
    with at_most(seconds):  # grad mode as in the race, on which what was compiled depends
        for one in inputs:
            result(one)
    return result


def captured(function: Callable[[Any], object], inputs: list[Any]) -> Callable[[], object]:
    """A call that replays the function's kernels on the next input: one CUDA graph an input, results always in the same
    place. A caller who keeps them would have to copy."""
    graphs = []
    for one in inputs:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(one)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function(one)
        graphs.append((graph, result))
    following = cycle(graphs)

    def replay() -> object:
        graph, result = next(following)
        graph.replay()
        return result

    return replay
