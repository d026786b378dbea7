"""Tensors that are made once, of what does not change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def cached(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that makes tensors of hashable arguments: `functools.lru_cache`, of ordinary tensors whoever
    asks first. One made in inference mode could not be used where gradients are asked for, later; one that is traced
    stands for no values."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        remembered = functools.lru_cache(maxsize)(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch._C._len_torch_dispatch_stack():
                return function(*args, **kwargs)
            with torch.inference_mode(False):
                return remembered(*args, **kwargs)  # type: ignore[arg-type]

        return call

    return decorate
