"""Signals wait, and none is lost."""

from __future__ import annotations

import ast
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import succeed

import gpu_lod
from gpu_lod import shield
from gpu_lod.shield import Shield

HELD = tuple(getattr(signal, f"SIG{name}") for name in ["INT", "TERM", "ALRM", "HUP", "QUIT", "USR1", "USR2", "CHLD"])


@pytest.fixture
def delivered() -> Iterator[list[int]]:
    """Numbers of the signals whose handlers ran; each handler raises."""
    found: list[int] = []

    def handler(number: int, _frame: object) -> None:
        found.append(number)
        raise KeyboardInterrupt(number)

    previous = {number: signal.signal(number, handler) for number in HELD}
    yield found
    now = {number: signal.getsignal(number) for number in HELD}
    for number, before in previous.items():
        signal.signal(number, before)
    assert {*now.values()} == {handler}, "handlers were not put back"
    assert not shield._active


def test_every_signal_is_delivered_though_handlers_raise(delivered: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), Shield():
        for number in (*HELD, signal.SIGINT):
            signal.raise_signal(number)
        assert delivered == []
    assert delivered == [*HELD, signal.SIGINT]


def test_what_the_c_library_does_on_signals_stays() -> None:
    """More than Python knows of: what faulthandler registered over a Python handler, and that system calls go on."""
    succeed(
        """
        import ctypes, faulthandler, signal
        import torch, gpu_lod as lod

        class Action(ctypes.Structure):
            _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128), ("flags", ctypes.c_int),
                        ("restorer", ctypes.c_void_p)]

        def actions():
            found = []
            for number in (signal.SIGUSR1, signal.SIGTERM):
                ctypes.CDLL(None).sigaction(number, None, ctypes.byref(action := Action()))
                found.append((action.handler, action.flags))
            return found

        signal.signal(signal.SIGUSR1, lambda *about: None)
        faulthandler.register(signal.SIGUSR1, chain=True)
        signal.signal(signal.SIGTERM, lambda *about: None)
        signal.siginterrupt(signal.SIGTERM, False)
        before = actions()
        assert before[0][0] != before[1][0], "faulthandler's, and Python's"
        lod.mipmap(torch.rand(1, 8, 8), backend="gl")
        assert actions() == before
        """
    )


def test_nested_ones_wait_for_the_outermost(delivered: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), Shield():
        with Shield():
            signal.raise_signal(signal.SIGTERM)
        assert delivered == []
    assert delivered == [signal.SIGTERM]


@pytest.mark.parametrize("at", range(2 * len(HELD)))
def test_handlers_come_back_wherever_a_signal_meets_their_exchange(
    at: int, delivered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way in before, on the way out after the signal's own handler was exchanged."""
    real, calls = shield._signal.signal, []

    def exchange(number: int, handler: Any) -> None:
        into = len(calls) < len(HELD)
        calls.append(number)
        if into and len(calls) == at + 1:
            signal.raise_signal(number)
        real(number, handler)
        if not into and len(calls) == at + 1:
            signal.raise_signal(number)

    monkeypatch.setattr(shield._signal, "signal", exchange)
    with pytest.raises(KeyboardInterrupt), Shield():
        assert at >= len(HELD), "the block was begun"
    assert len(delivered) == 1


def loops_that_exceptions_leave(node: ast.AST, guarded: bool = False) -> Iterator[int]:
    """Lines of each `while` right in a `try` or `with`: Python 3.13 leaves the jump at its end out of both, where a
    signal's handler may raise. The lock would stay taken, the handlers away."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                inside = guarded or (isinstance(node, (ast.Try, ast.With)) and field == "body")
                inside &= not isinstance(child, (ast.FunctionDef, ast.Lambda))
                if inside and isinstance(child, ast.While):
                    yield child.lineno
                yield from loops_that_exceptions_leave(child, inside)


def test_no_exception_of_a_signal_gets_past_a_guard() -> None:
    found = {
        f"{path.name}:{line}"
        for path in Path(gpu_lod.__file__).parent.rglob("*.py")
        for line in loops_that_exceptions_leave(ast.parse(path.read_text("utf-8")))
    }
    assert not found
    guarded = "with lock:\n    while x:\n        pass\n    def f():\n        while y:\n            pass"
    assert [*loops_that_exceptions_leave(ast.parse(guarded))] == [2]
