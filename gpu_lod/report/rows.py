"""What one row of a result file says: who is fastest, by how much, and how far from the floor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

Row = dict[str, Any]
Kind = Literal["gl", "cuda", "torch", "peer", "auto"]


def kind_of(side: str) -> Kind:
    """Whose side it is, by the first word of its name: shaders, kernels of CUDA, torch, or another library."""
    word = side.partition(" ")[0]
    return word if word in ("gl", "cuda", "torch", "auto") else "peer"  # type: ignore[return-value]


def best(row: Row, kind: Kind) -> str | None:
    """The fastest side of a kind that does the row's job."""
    names = [side for side in row["sides"] if kind_of(side) == kind and side not in row.get("other_job", ())]
    return row.get(f"best_{kind}") or min(names, key=lambda side: median(row, side), default=None)


def median(row: Row, side: str) -> float:
    """Milliseconds."""
    value: float = row["sides"][side]["median_ms"]
    return value


def opponent(row: Row) -> str | None:
    """The fastest side that is not ours and does the job."""
    names = [name for name in (best(row, "torch"), best(row, "peer")) if name]
    return min(names, key=lambda side: median(row, side), default=None)


def own(row: Row) -> str | None:
    """The fastest side of ours that does the job."""
    names = [name for name in (best(row, "gl"), best(row, "cuda")) if name]
    return min(names, key=lambda side: median(row, side), default=None)


def has_kernels(rows: Iterable[Row]) -> bool:
    """Whether kernels of CUDA were measured, so that the best of ours need not be a shader."""
    return any(kind_of(side) == "cuda" for row in rows for side in row["sides"])


def gain(row: Row) -> float | None:
    """How many times as fast the best way of ours, shaders or kernels, is as the fastest opponent; below 1 it lost."""
    ours, theirs = own(row), opponent(row)
    return median(row, theirs) / median(row, ours) if ours and theirs else None


def over_floor(row: Row, side: str | None) -> float | None:
    """Time over the least that moving the row's bytes takes."""
    floor = row["floor_ms"]
    return median(row, side) / floor if side and floor else None


def why_other(row: Row, side: str) -> str:
    """Which other job a side does: empty for none, and for files that do not say a word that it is one."""
    other = row.get("other_job", ())
    if side not in other:
        return ""
    return str(other[side]) if isinstance(other, dict) else "another job"


def pixels(row: Row) -> int:
    return row["size"][0] * row["size"][1] * row["batch"]


def job(row: Row) -> str:
    """What identifies the work, in words."""
    height, width = row["size"]
    batch = "" if row["batch"] == 1 else f"{row['batch']} x "
    return f"{batch}{row['channels']} x {height} x {width} {row['dtype']}, {row['cache']}"


def note(row: Row) -> str:
    return str(row.get("note", ""))


def is_plain(row: Row, part: str = "end to end") -> bool:
    """One warm fp32 square: the rows that differ in size alone."""
    return bool(
        row["part"] == part and row["batch"] == 1 and row["dtype"] == "float32" and row["cache"] == "warm"
        and row["size"][0] == row["size"][1]
    )  # fmt: skip


def figure(value: float | None, unit: str = "") -> str:
    """Three significant digits, without an exponent; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return f"0{unit}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}{unit}"


def time(row: Row, side: str) -> str:
    """Median ± half the interquartile range, milliseconds."""
    timing = row["sides"][side]
    return f"{timing['median_ms']:.3g} ± {timing['iqr_ms'] / 2:.2g}"


def way(side: str) -> str:
    """A side's name in a column that says already whose it is."""
    return side.removeprefix("gl ").removeprefix("torch ")
