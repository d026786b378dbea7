"""A function of CUDA tensors as one CUDA graph.

Source: CUDA Programming Guide, "CUDA Graphs"; torch.cuda.graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], Any], where: torch.device) -> tuple[Callable[[], None], Any]:
    """What repeats all that `run` does on the GPU, on torch's current stream; and what `run` returned, which each
    repetition writes to anew.

    Raises:
        CaptureError, RuntimeError: it does what no graph can hold, such as waiting for the GPU.
    """
    with torch.cuda.device(where):
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            run()  # whatever is made once for a stream
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for the GPU meanwhile.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            results = run()

    def replay() -> None:
        with torch.cuda.device(where):
            graph.replay()

    return replay, results
