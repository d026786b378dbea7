"""Quality benchmarks: several processes give what one gives, whatever stops them, and memory is counted rightly."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

import quality_task  # noqa: E402
from quality import workers  # noqa: E402
from quality.journal import Journal  # noqa: E402
from quality.memory import peak_bytes  # noqa: E402
from quality.task import Plan  # noqa: E402

NAMES = {"sums": "quality_task"}


def computed(folder: Path, processes: int, only: str = "", done: Callable[..., Any] = lambda *_: None) -> Any:
    """Lines of all units, by number."""
    plan = Plan(True, folder, only=(only,))
    task = quality_task.task()
    jobs = [(task, unit) for unit in task.units(plan)]
    with Journal(folder / "units.jsonl") as journal:
        workers.run(jobs, journal, NAMES, plan, processes, done)
        return [journal.get(unit.place) for _, unit in jobs]


def times_computed(folder: Path) -> list[int]:
    return [len((folder / f"computed-{n}").read_text().splitlines()) for n in range(12)]


def test_several_processes_give_what_one_gives(tmp_path: Path) -> None:
    """And share the work, and what the first of a group makes; an interrupt is none of their business."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    seen: list[int] = []
    alone = computed(tmp_path / "one", 1)
    assert computed(tmp_path / "two", 2, "interrupt", lambda _, unit: seen.append(unit.number)) == alone
    assert sorted(seen) == list(range(12)) and times_computed(tmp_path / "two") == [1] * 12
    assert [path.read_text() for path in (tmp_path / "two").glob("*.begun")] == ["once\n"] * 2
    by = {int((tmp_path / "two" / f"computed-{n}").read_text()) for n in range(12)}
    assert len(by) == 2 and os.getpid() not in by
    assert multiprocessing.active_children() == []


def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupt(_: Any, unit: Any) -> None:
        seen.append(unit.number)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        computed(tmp_path, 2, done=interrupt)
    assert multiprocessing.active_children() == []
    with Journal(tmp_path / "units.jsonl") as journal:
        assert len(journal) == 4
    before = {n: (tmp_path / f"computed-{n}").read_text() for n in seen}
    lines = computed(tmp_path, 1)
    assert [line["values"]["sum"]["one"] for line in lines] == [n / 12 for n in range(12)]
    assert {n: (tmp_path / f"computed-{n}").read_text() for n in seen} == before


@pytest.mark.parametrize(("only", "said"), [("fail", "five is right out"), ("quit", "the process is gone")])
def test_a_process_that_fails_says_so_and_leaves_what_is_done(tmp_path: Path, only: str, said: str) -> None:
    with pytest.raises(workers.WorkerError, match=f"(?s)'method': 'm5'.*{said}"):
        computed(tmp_path, 2, only)
    with Journal(tmp_path / "units.jsonl") as journal:
        assert 2 <= len(journal) < 12  # at least those of its group before it


def test_times_are_taken_here_and_once(tmp_path: Path) -> None:
    plan = Plan(True, tmp_path)
    task = quality_task.task()
    jobs = [(task, unit) for unit in task.units(plan)]
    done: list[int] = []
    with Journal(tmp_path / "units.jsonl") as journal:
        for _, unit in jobs[:3]:
            journal.add(unit.place, {"skipped": "too dear"} if unit.number == 1 else {"values": {}})
        for _ in range(2):
            workers.time(jobs, journal, lambda _, unit: done.append(unit.number))
        assert len(journal) == 3 + 2
        for number in (0, 2):
            assert (journal.get(workers.timing_of(jobs[number][1].place)) or {})["ms"] == os.getpid()
    assert done == [*range(12)] * 2
    assert len((tmp_path / "units.jsonl").read_text().splitlines()) == 5
    assert json.loads((tmp_path / "units.jsonl").read_text().splitlines()[-1])["place"]["timing"] is True


# -- memory -----------------------------------------------------------------------------------------------------------


def chain(count: int) -> torch.Tensor:
    values = torch.zeros(1000)
    for _ in range(count):
        values = values + 1
    return values


def both() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1000), torch.ones(500, dtype=torch.float64)


GIVEN = torch.rand(100_000)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: None, 0),
        (lambda: chain(0), 4000),
        (lambda: chain(9), 8000),  # one is read while the next is made
        (both, 8000),
        (lambda: (chain(0).view(10, 100).T, 1)[0], 4000),  # views are no memory
        (lambda: GIVEN[:10].add(GIVEN[10:20]), 40),  # nor is what was there before
        (lambda: GIVEN.view(10, -1).clone().add_(1), 400_000),
        (lambda: torch.zeros(1000).sum().item(), 4004),
        (lambda: GIVEN.view(10, -1).split(2), 0),
        (lambda: torch.cat([GIVEN[:5], GIVEN[:5]]), 40),
        (lambda: GIVEN[:10].sort(stable=True), 40 + 80),
    ],
)
def test_peaks_by_hand(call: Callable[[], Any], expected: int) -> None:
    for _ in range(2):
        assert peak_bytes(call)[1] == expected


def test_the_result_comes_with_the_peak_and_errors_pass() -> None:
    result, peak = peak_bytes(lambda: chain(2))
    assert torch.equal(result, torch.full((1000,), 2.0)) and peak == 8000
    with pytest.raises(RuntimeError, match="size"):
        peak_bytes(lambda: torch.zeros(2) + torch.zeros(3))
    assert peak_bytes(lambda: chain(0))[1] == 4000
