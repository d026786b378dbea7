"""Large results in large pages.

The system hands out fresh memory a page at a time, at the first write, and a page of 4 KiB takes it longer than torch
takes to fill one. Linux has pages of 2 MiB for those who ask. They are slower to come by on virtual machines that give
free memory back to their host, so that it is no gain everywhere: measure before another verb asks.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch

LEAST = 8 * 2**20
"""Bytes from which on asking pays."""

_HUGE_PAGES = 14
"""MADV_HUGEPAGE."""


def large(result: torch.Tensor) -> torch.Tensor:
    """The same tensor, of which nothing was written yet: from now on it lies in large pages, where there are such."""
    if (
        type(result) is torch.Tensor
        and not torch.compiler.is_compiling()
        and result.device.type == "cpu"
        and result.nbytes >= LEAST
    ):
        begin = -(-result.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (result.data_ptr() + result.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise = _advise()
        if advise is not None:
            advise(begin, end - begin, _HUGE_PAGES)  # advice: what comes of it changes no value
    return result


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise
