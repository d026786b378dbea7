"""What programs allow their models and pictures do not: arithmetic of fewer bits than fp32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def full() -> Iterator[None]:
    """No autocast."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_full(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what computes as it says under a program's autocast too."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with full():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


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
