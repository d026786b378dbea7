"""Units through one process or several: each computed once, written to the journal by this process alone."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quality.journal import Journal, Line
from quality.task import Found, Plan, Task, Unit

Done = Callable[[Task, Unit], None]
Job = tuple[Task, Unit]


class WorkerError(RuntimeError):
    """A worker process failed; the message holds what it said."""


def made(names: Mapping[str, str]) -> list[Task]:
    """Tasks, from the modules that hold them."""
    return [importlib.import_module(module).task() for module in names.values()]


def run(
    jobs: Sequence[Job], journal: Journal, names: Mapping[str, str], plan: Plan, processes: int, done: Done
) -> None:
    """Compute what the journal has no line of yet.

    Args:
        jobs: units of all tasks, in the order in which they are begun.
        names: modules of the tasks, by which worker processes make them again.
        processes: 1 is this one alone. A worker has one thread.
        done: called for each unit as it is finished, or found finished.
    """
    todo = []
    for task, unit in jobs:
        if journal.get(unit.place) is None:
            todo.append((task, unit))
        else:
            done(task, unit)
    processes = min(processes, len(todo))
    if processes <= 1:
        for task, unit in todo:
            journal.add(unit.place, task.compute(unit))
            done(task, unit)
        return
    with _workers(processes, names, plan) as links:
        _deal(todo, links, journal, done)


def time(jobs: Sequence[Job], journal: Journal, done: Done) -> None:
    """Times of what was computed, by this process while the others are gone: a line each, filed as `timing_of`."""
    for task, unit in jobs:
        line = journal.get(unit.place)
        if line is not None and "skipped" not in line and journal.get(timing_of(unit.place)) is None:
            journal.add(timing_of(unit.place), task.time(unit))
        done(task, unit)


def timing_of(place: Line) -> Line:
    return {**place, "timing": True}


# -- several processes ------------------------------------------------------------------------------------------------


def _deal(todo: list[Job], links: list[Any], journal: Journal, done: Done) -> None:
    """The next unit to whoever is free. Of those that share something the first makes it, and the others wait."""
    waiting, claimed, shared = dict(enumerate(todo)), set[Any](), set[Any]()
    busy: dict[Any, Job] = {}

    def groups(job: Job) -> set[Any]:
        return {(job[0].name, group) for group in job[1].groups}

    while waiting or busy:
        for link in links:
            if link in busy:
                continue
            ready = next((i for i, job in waiting.items() if not (groups(job) & claimed) - shared), None)
            if ready is None:
                break
            busy[link] = waiting.pop(ready)
            claimed |= groups(busy[link])
            link.send(busy[link][1].place)
        for link in multiprocessing.connection.wait(list(busy)):
            task, unit = job = busy.pop(link)
            journal.add(unit.place, _received(link, unit))
            shared |= groups(job)
            done(task, unit)


def _received(link: Any, unit: Unit) -> Found:
    try:
        found, problem = link.recv()
    except EOFError:
        found, problem = {}, "the process is gone; was it killed for want of memory?"
    if problem:
        raise WorkerError(f"{unit.place}: {problem}")
    return dict(found)


@contextmanager
def _workers(count: int, names: Mapping[str, str], plan: Plan) -> Iterator[list[Any]]:
    """Links to processes that compute what they are sent the place of. They end with the block."""
    context = multiprocessing.get_context("spawn")  # OpenGL does not survive a fork
    processes, links = [], []
    try:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts means this program, which ends them
        try:
            for _ in range(count):
                link, theirs = context.Pipe()
                links.append(link)
                processes.append(context.Process(target=_work, args=(theirs, dict(names), plan), daemon=True))
                processes[-1].start()
                theirs.close()
        finally:
            signal.signal(signal.SIGINT, handler)
        yield links
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        for link in links:
            link.close()


def _work(link: Any, names: dict[str, str], plan: Plan) -> None:
    torch.set_num_threads(1)
    known: dict[str, Job] = {}
    while True:
        try:
            place = link.recv()
        except EOFError:
            return
        try:
            if not known:
                known = {_key(unit.place): (task, unit) for task in made(names) for unit in task.units(plan)}
            task, unit = known[_key(place)]
            link.send((task.compute(unit), ""))
        except Exception:
            link.send(({}, traceback.format_exc()))


def _key(place: Line) -> str:
    return repr(sorted(place.items()))
