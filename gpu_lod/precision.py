"""What programs allow their models and pictures do not: arithmetic of fewer bits than fp32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def _fewer_bits() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextlib.contextmanager
def full() -> Iterator[None]:
    """No autocast."""
    if not _fewer_bits():
        yield
        return
    # Of both, whichever is on: torch.compile cannot follow a choice among contexts.
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def in_full(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what computes as it says under a program's autocast too."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _fewer_bits():  # as `full`, in less time
            return function(*args, **kwargs)
        with full():
            return function(*args, **kwargs)

    return call


def factor(x: torch.Tensor) -> torch.Tensor:
    """x to be multiplied as a matrix: in float64 where products of fp32 may be of fewer bits."""
    return x if exact("matmul", x.device) else x.double()


def exact(kind: Literal["matmul", "conv"], device: torch.device) -> bool:
    """Whether torch's products of matrices, or convolutions, of fp32 are of fp32: TF32 and bfloat16 may be allowed, and
    in convolutions on CUDA TF32 is if nobody says otherwise."""
    cpu = device.type == "cpu"
    backend: Any = torch.backends.mkldnn if cpu else torch.backends.cuda if kind == "matmul" else torch.backends.cudnn
    precision = getattr(getattr(backend, kind, None), "fp32_precision", None)
    if precision is not None:
        return bool(precision in ("none", "ieee"))
    # Before torch 2.9.
    if kind == "matmul":
        return torch.get_float32_matmul_precision() == "highest"
    return cpu or not torch.backends.cudnn.allow_tf32
