"""A task that worker processes can import: sums, in groups whose first unit makes a file that the others read."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from quality.task import Found, Metric, Plan, Task


@dataclass(frozen=True)
class Unit:
    number: int
    timed: bool = True

    @property
    def place(self) -> dict[str, Any]:
        row = {"method": f"m{self.number}", "fixation": None, "relevance": None, "error": 0.0, "budget": 1}
        return {"task": "sums", **row, "config": ""}

    @property
    def groups(self) -> tuple[str, ...]:
        return (f"group-{self.number % 2}",)


class Sums(Task):
    """What a unit does follows from the name of the plan's only method: "quit", "fail", "interrupt", or nothing."""

    name = "sums"
    title = "Sums"
    ms = "adding"
    sources: ClassVar[tuple[str, ...]] = ()
    metrics = (Metric("sum", "a sum", accuracy=True),)

    def units(self, plan: Plan) -> list[Unit]:
        self.plan = plan
        return [Unit(number) for number in range(12)]

    def compute(self, unit: Unit) -> Found:
        self._make(unit)
        wanted = (self.plan.only or ("",))[0]
        if unit.number == 5 and wanted == "quit":
            os._exit(1)
        if unit.number == 5 and wanted == "fail":
            raise ValueError("five is right out")
        if wanted == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        with (self.plan.folder / f"computed-{unit.number}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return {"tokens": 1, "values": {"sum": {"one": unit.number / 12}}}

    def _make(self, unit: Unit) -> None:
        path = self.plan.folder / unit.groups[0]
        if not path.exists():
            with path.with_suffix(".begun").open("a") as file:
                file.write("once\n")
            time.sleep(0.3)
            path.touch()

    def time(self, unit: Unit) -> Found:
        return {"ms": float(os.getpid())}

    def about(self) -> Found:
        return {"relevance": ["none"], "pictures": [{}], "budgets": [1], "left_out": {}}


def task() -> Sums:
    return Sums()
