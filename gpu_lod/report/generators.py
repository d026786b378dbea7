"""Every generator of a chain beside the others, and what one dispatch a level costs against the best of them."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_lod.report.files import Data
from gpu_lod.report.rows import Row, best, kind_of, median, opponent

VERBS = ("mipmap", "hiz")
SIZES = ([512, 512], [1024, 1024], [2048, 2048], [4096, 4096], [777, 1001])
ONE_DISPATCH_A_LEVEL = "gl compute"
COMPUTE = ("gl compute", "gl single-pass", "gl registers")
"""Those that are compute shaders on buffers."""


@dataclass(frozen=True)
class Line:
    """One size. `times` by generator in milliseconds."""

    size: list[int]
    part: str
    times: dict[str, float]
    other: frozenset[str]
    """Generators that do another job at this size."""
    opponent: str
    opponent_ms: float | None

    @property
    def best_compute(self) -> str | None:
        return min((name for name in self.times if name in COMPUTE), key=self.times.__getitem__, default=None)

    @property
    def against_one_dispatch_a_level(self) -> float | None:
        """One dispatch a level over the best compute generator: 1 if it is that itself."""
        best_one, plain = self.best_compute, self.times.get(ONE_DISPATCH_A_LEVEL)
        return plain / self.times[best_one] if best_one and plain else None


def lines(data: Data, verb: str) -> list[Line]:
    """By part and size, as far as they were measured."""
    return [
        _line(row)
        for part in ("end to end", "zero-copy in")
        for size in SIZES
        for row in data["rows"]
        if row["verb"] == verb and row["part"] == part and row["size"] == size and _is_chain(row)
    ]


def _is_chain(row: Row) -> bool:
    plain = row["batch"] == 1 and row["dtype"] == "float32" and row["cache"] == "warm"
    return plain and (best(row, "gl") or best(row, "cuda")) is not None


def _line(row: Row) -> Line:
    times = {side: median(row, side) for side in row["sides"] if kind_of(side) in ("gl", "cuda")}
    theirs = opponent(row)
    return Line(
        row["size"], row["part"], times, frozenset(row.get("other_job", ())) & times.keys(),
        theirs or "", median(row, theirs) if theirs else None,
    )  # fmt: skip


def names(found: list[Line]) -> list[str]:
    """All generators of a table, in the order in which they first come."""
    return list(dict.fromkeys(name for line in found for name in line.times))
