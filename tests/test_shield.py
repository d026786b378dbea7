"""Signals wait, and none is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_lod import shield
from gpu_lod.shield import Shield

HELD = tuple(getattr(signal, f"SIG{name}") for name in ["INT", "TERM", "ALRM", "HUP", "QUIT", "USR1", "USR2"])


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
