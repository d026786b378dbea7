"""What runs as it stands where torch.compile cannot take a call into a graph.

Torch runs the call itself then, but compiles each function that it calls, one after the other: that takes minutes, for
pictures of another size again, and rounds otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo as apart  # torch.compiler.disable would import the compiler at once

__all__ = ["apart", "as_it_stands", "in_one_piece", "of_its_own", "would_compile"]

P = ParamSpec("P")
R = TypeVar("R")

_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def would_compile() -> bool:
    """Whether torch would compile the functions that are called from here, where it makes no graph."""
    return callable(_callback())


def as_it_stands(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that breaks the graph of a compiled one, and is run between its parts."""
    alone = apart(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (alone if torch.compiler.is_compiling() or would_compile() else function)(*args, **kwargs)

    return functools.wraps(function)(of_its_own(call, function))


def in_one_piece(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that goes into a graph, and runs as it stands where it is refused there."""
    alone = apart(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (alone if not torch.compiler.is_compiling() and would_compile() else function)(*args, **kwargs)

    return functools.wraps(function)(of_its_own(call, function))


def of_its_own(call: Callable[P, R], function: Callable[P, R]) -> Callable[P, R]:
    """What stands for a function, with code of its own: torch compiles this much, and counts by the code how often."""
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return call
