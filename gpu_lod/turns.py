"""Whose turn it is: one thread at a time has a GL context current, and only while it needs it."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from gpu_lod.bridge import Device, egl
from gpu_lod.errors import (
    ContextBusyError,
    ContextClosedError,
    ContextError,
    ContextNotCurrentError,
    ForkedContextError,
)
from gpu_lod.shield import Shield

if TYPE_CHECKING:
    from typing_extensions import Self

LOCK_TIMEOUT = 60.0
"""Seconds that a verb waits for a context that another thread holds."""

_pinned = threading.local()


class Turns:
    """A GL context behind a reentrant lock, current only while a verb runs or a `with` block pins it."""

    device: Device | None
    """The EGL device; None for an adopted context."""
    _own: egl.Current
    _pid: int
    _lock: threading.RLock
    _owner: int | None
    _outer: list[egl.Current]
    _closed: bool

    def _start_turns(self, own: egl.Current, device: Device | None) -> None:
        self.device = device
        self._own = own
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._owner = None
        self._outer = []
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def usable_here(self) -> bool:
        """True unless it was closed, belongs to a parent process, or was adopted and is not current on this thread."""
        if self._closed or self._pid != os.getpid():
            return False
        return self.device is not None or egl.current().same_context(self._own)

    def _check_usable(self) -> None:
        check_not_finalizing()
        if self._pid != os.getpid():
            raise_forked()
        if self._closed:
            raise ContextClosedError("this context was closed; make another with gpu_lod.Context().")

    def _acquire(self) -> None:
        """Take the lock and make the context current on this thread; reentrant."""
        self._check_usable()
        if not self._lock.acquire(timeout=LOCK_TIMEOUT):
            owner = self._owner
            # Of all that run Python, also those that threading did not start, as autograd's.
            if owner is not None and owner not in sys._current_frames():
                raise ContextBusyError(
                    f"thread {owner} has ended inside a `with context:` block, and holds this context for good: leave "
                    "the block on the thread that entered it. backend='torch' needs no context."
                )
            raise ContextBusyError(
                f"thread {owner} has held this context for more than {LOCK_TIMEOUT:g} s. A `with context:` block "
                "pins it to its thread: do not wait for another thread's verbs inside one."
            )
        try:
            self._check_usable()
            # At every depth: a `with` block of another context, or the program itself, may have come in between.
            here = egl.current()
            if not here.same_context(self._own):
                if self.device is None:
                    raise ContextNotCurrentError(
                        "this context was adopted and is not current on the calling thread: make it current here, "
                        "or use gpu_lod.Context() for a context of gpu_lod's own, which any thread may use."
                    )
                egl.switch(here, self._own)
            self._outer.append(here)
            self._owner = threading.get_ident()
        except BaseException:
            self._lock.release()
            raise

    def _release(self) -> None:
        try:
            outer = self._outer.pop()
            if not self._outer:
                self._owner = None
            if not outer.same_context(self._own):
                egl.switch(egl.current(), outer, back=True)
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        entered = False
        try:
            with Shield():
                self._acquire()
                pinned_stack().append(self)
                entered = True
        except BaseException:  # of a signal that waited: nobody will leave a block that was never begun
            if entered:
                self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with Shield():
            if self not in pinned_stack():
                raise ContextNotCurrentError(
                    f"this context is not pinned to this thread, but to {self._owner}: leave a `with context:` block "
                    "on the thread that entered it, also that of a generator which another thread closes."
                    if self._owner
                    else "this context is not pinned: nobody is in a `with context:` block of it."
                )
            pinned_stack().remove(self)
            self._release()


def pinned_stack() -> list[Any]:
    if not hasattr(_pinned, "stack"):
        _pinned.stack = []
    stack: list[Any] = _pinned.stack
    return stack


def check_not_finalizing() -> None:
    """Raises ContextError while modules are torn down: what verbs stand on is partly gone then, and torch aborts."""
    if sys.is_finalizing():
        raise ContextError(
            "the interpreter is shutting down, and OpenGL cannot be used any more, as in a __del__ that runs at exit. "
            "Register with atexit, or weakref.finalize, what is to be done at the end: that runs before."
        )


def raise_forked() -> NoReturn:
    raise ForkedContextError(
        "OpenGL was opened before this process was forked, and GL contexts do not survive a fork. Start workers with "
        "the 'spawn' method (torch.multiprocessing.set_start_method('spawn')), make the first gpu_lod call in the "
        "child, or use backend='torch' there."
    )
