"""A function of CUDA tensors as one CUDA graph.

Source: CUDA Programming Guide, "CUDA Graphs"; torch.cuda.graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_spoilt: list[torch.cuda.CUDAGraph] = []
"""Those whose capture failed. torch's allocator of pinned memory goes on asking them whether they are captured, and has
no way to be told: they must live."""


def captured(run: Callable[[], Any], where: torch.device) -> tuple[Callable[[], None], Any]:
    """What repeats all that `run` does on the GPU, on torch's current stream; and what `run` returned, which each
    repetition writes to anew.

    Raises:
        CaptureError, RuntimeError: it does what no graph can hold, such as waiting for the GPU.
    """
    with torch.cuda.device(where):
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        try:
            with torch.cuda.stream(aside):
                run()  # whatever is made once for a stream
        finally:
            current.wait_stream(aside)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # Other threads may wait for the GPU meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            _mend(graph, pool, aside)
            raise
        finally:
            torch.cuda.set_stream(current)  # torch leaves the other one behind where it cannot end the capture

    def replay() -> None:
        with torch.cuda.device(where):
            graph.replay()

    return replay, results


def _mend(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> None:
    """Undo what torch leaves as it was within a capture that CUDA has declared invalid: CUDAGraph::capture_end raises
    before it tells the allocator and the generator of random numbers, which then raises whenever it is used."""
    with suppress(Exception):
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)  # raises if torch has got so far itself
        _spoilt.append(graph)
        torch._C._cuda_releasePool(stream.device.index, pool)
    with suppress(Exception), torch.cuda.stream(stream):
        # Nothing but the end of a capture tells the generator. An empty one would be warned of.
        spare = torch.zeros(1, device=stream.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            spare.zero_()
