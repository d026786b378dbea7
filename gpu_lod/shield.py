"""Signals wait until a verb is done.

A Python signal handler may raise between any two bytecodes: between taking a lock and guarding it, or inside
moderngl's C code while it compiles, which does not survive it. Verbs take milliseconds, so Ctrl-C waits for the end of
the one it meets.
"""

from __future__ import annotations

import _signal  # signal's own functions, without making enumerations of what they return: a quarter of the time
import ctypes
import os
import signal
import threading
from typing import Any

_SIGNALS = tuple(
    int(number)
    for number in (
        *(signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2),  # by which Celery, for one, tells a worker that its time is up
        signal.SIGCHLD,  # by which torch's DataLoader learns that a worker was killed
    )
)
"""Those whose handlers may raise. SIGPROF and SIGVTALRM, of profilers, are handled where they come."""
_sigaction = getattr(ctypes.PyDLL(None), "sigaction", None) if os.name == "posix" else None
_actions = {number: ctypes.create_string_buffer(512) for number in _SIGNALS}
"""What the C library did on a signal, which is more than Python knows of: faulthandler's handlers, and whether system
calls go on afterwards. As the library has it; nobody looks inside."""
_active = False  # touched by the main thread alone: only there do Python handlers run
_holder: Shield | None = None  # what has handlers of its own in place, or may


class Shield:
    """Hold back Python signal handlers of the main thread; they run on exit. Does nothing elsewhere or when nested."""

    __slots__ = ("_handlers", "_pending", "_thread")

    def __enter__(self) -> None:
        global _active, _holder
        self._handlers: dict[int, Any] = {}
        self._pending: list[int] = []
        if _active or threading.get_ident() != threading.main_thread().ident:
            return
        self._thread, _holder = threading.get_ident(), self
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    if _sigaction is not None:
                        _sigaction(number, None, _actions[number])
                    self._handlers[number] = handler
                    _signal.signal(number, self._later)
            _active = bool(self._handlers)
        except BaseException:  # of one that was not held back yet
            self.__exit__()
            raise

    def _later(self, number: int, frame: object) -> None:
        if threading.get_ident() != self._thread:  # in a child, before `_after_fork`
            self._handlers[number](number, frame)
        else:
            self._pending.append(number)

    def __exit__(self, *_: object) -> None:
        global _active, _holder
        if not self._handlers:
            return
        _active = False
        raised: BaseException | None = None
        left = list(self._handlers.items())
        while left:
            try:
                for number, handler in reversed(tuple(left)):  # of a `while` Python 3.13 leaves the last jump outside
                    _signal.signal(number, handler)
                    if _sigaction is not None:
                        _sigaction(number, _actions[number], None)
                    left.pop()
            except BaseException as error:  # of one that is back already; the others come back all the same
                raised = error
        _holder = None
        try:
            self._deliver()
        finally:
            if raised is not None:
                raise raised

    def _deliver(self) -> None:
        """Run what was held back, all of it, whichever raises."""
        if self._pending:
            number = self._pending.pop(0)
            try:
                self._handlers[number](number, None)
            finally:
                self._deliver()


def _after_fork() -> None:
    """Where another thread forked meanwhile, nobody leaves the verb in the child, which would not hear of a signal any
    more. What was held back goes to the parent."""
    global _active, _holder
    if _holder is not None and _holder._thread != threading.get_ident():
        for number, handler in _holder._handlers.items():
            _signal.signal(number, handler)
        _active, _holder = False, None


os.register_at_fork(after_in_child=_after_fork)
