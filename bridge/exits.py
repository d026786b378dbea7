"""How a forked child ends whose parent had opened a driver.

A fork copies one thread. Mesa's exit handler joins those of the driver all the same: up to glibc 2.42 that returned at
once, since 2.43 it waits for ever.
"""

from __future__ import annotations

import ctypes
import os
import sys


def end_without_handlers() -> None:
    """To be called in the child: let it end, with the status it ends with, without the exit handlers that C libraries
    have registered so far, as children of multiprocessing do by `os._exit`. Python's own run, and C's streams are
    flushed. Does nothing where handlers do not wait."""
    if sys.platform == "linux" and _waits(os.confstr("CS_GNU_LIBC_VERSION")):
        _register(ctypes.CDLL(None))


def _waits(version: str | None) -> bool:
    """Whether a libc, "glibc 2.43", waits in pthread_join for threads that a fork has not copied."""
    name, _, number = (version or "").partition(" ")
    return name == "glibc" and tuple(map(int, number.split(".")[:2])) >= (2, 43)


def _register(libc: ctypes.CDLL) -> None:
    # The last one registered is the first to run. None of them is Python's, which is gone by then.
    libc.on_exit(libc._exit, None)  # called with the status
    libc.__cxa_atexit(libc.fflush, None, None)
