"""What becomes of memory that was freed."""

from __future__ import annotations

import ctypes
import sys

import numpy as np

_BLOCK = 31 * 2**20
"""Bytes, just below what glibc goes along with."""
_done = False


def keep_freed() -> None:
    """Let freed memory be used again, once a process.

    glibc takes blocks larger than any it ever gave back from the kernel each time, and gives back what is free at the
    end of its heap beyond twice that: until a program has freed a large tensor, every page of what a call makes on the
    way is fresh, and to come by it takes as long as the work. So one block that nobody writes to, and that costs no
    page, is freed here. What a program told glibc itself (mallopt, MALLOC_MMAP_THRESHOLD_) stays as it is, and other
    allocators do as they do.

    Source: mallopt(3), "dynamic adjustment of the mmap threshold".
    """
    global _done
    if not _done and sys.platform == "linux":
        np.empty(_BLOCK, np.uint8)  # of the same heap as torch's, and of no concern to torch's modes
    _done = True


def give_back() -> None:
    """Give the kernel what is free, wherever in the heap it lies: of its own accord glibc gives back the end alone."""
    if sys.platform == "linux":
        give = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if give is not None:
            give(0)
