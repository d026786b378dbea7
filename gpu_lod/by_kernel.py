"""Where kernels stand in for many operations of torch, and what goes on where they fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from gpu_lod import dispatch
from gpu_lod.cached import capturing
from gpu_lod.errors import GpuLodWarning, KernelError, LimitError, UnsupportedError
from gpu_lod.kernels import device as kernels

T = TypeVar("T")

_failed: set[torch.device] = set()
"""Where they did."""


def usable(*tensors: torch.Tensor) -> bool:
    """Whether kernels take these tensors, which are on one device."""
    where = tensors[0].device
    return (
        where.type == kernels.KIND
        and where not in _failed
        and dispatch.barred(*tensors) is None
        and kernels.usable(where)
    )


def attempt(where: torch.device, run: Callable[[], T], *, waits: bool = False) -> T | None:
    """What kernels make; or None if they cannot, and plain torch is to: which is told once where it is for good.

    Args:
        waits: plain torch would wait for the GPU.

    Raises:
        GpuLodError: they cannot, and a CUDA graph is being captured, in which torch could not do it either.
    """
    try:
        return run()
    except (KernelError, LimitError, UnsupportedError) as error:
        if waits and capturing(where):
            raise
        if not isinstance(error, LimitError):  # the next call would fail alike
            _failed.add(where)
            warnings.warn(
                f"allocation goes on in plain torch for tensors on {where}; its kernels failed: {error}",
                GpuLodWarning,
                stacklevel=2,
            )
    return None
