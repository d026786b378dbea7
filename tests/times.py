"""Measured times of a test's own, in the place of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import gpu_lod as lod
from gpu_lod import calibration, dispatch, tables
from gpu_lod.calibrate import machine
from gpu_lod.tables import Entry, Machine, Question, Timed

HERE = torch.device("cpu")


def asked(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Question:
    """What the verb asks the tables before this call."""
    with calibration.hearing() as questions:
        choice = lod.explain(verb, *args, **kwargs)
    assert questions, f"{verb.__name__} asked nothing: {choice}"
    return questions[-1]


def entry(question: Question, **ways: tuple[float, float]) -> Entry:
    """Ways by their names, with _ for the space."""
    named = {name.replace("_", " "): Timed(*timed) for name, timed in ways.items()}
    return Entry(question, "a job", "2026-11-21", named)


def fastest(way: str, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Question:
    """From now on this call, and those near it, were measured here, and `way` took a tenth of what the others did."""
    question = asked(verb, *args, **kwargs)
    times = {name: Timed(1.0 if name == way else 10.0, 0.1) for name in dispatch.ways(question.verb)}
    assert way in times
    tables.store(here(), [Entry(question, "a job", "2026-11-21", times)])
    calibration.reload()
    return question


def here() -> Machine:
    return machine(HERE)
