"""Small work for torch that leaves its other threads asleep."""

from __future__ import annotations

from collections.abc import Callable

import torch

FUNCTIONS = 2047
"""Values up to which torch takes one thread for log1p, expm1, floor and the like."""
MKL = 99
"""Values up to which the MKL inside torch does for log, exp, sqrt, sin and cos."""
SEARCHES = 199
"""Values up to which it does for searchsorted and bucketize."""
MOST = 2**14
"""Values from which on more threads save more than they cost."""


def quietly(
    function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, at_once: int = FUNCTIONS
) -> torch.Tensor:
    """`function(values)`, of each value by itself, on the calling thread where there are few.

    After an operation on several threads torch's others spin for milliseconds, each on a core that a software renderer
    needs for what comes next; and some operations wake them for far less than the spinning takes.
    """
    count = values.numel()
    if values.device.type != "cpu" or count <= at_once or count > MOST:
        return function(values)
    return torch.cat([function(part) for part in values.reshape(-1).split(at_once)]).view(values.shape)
