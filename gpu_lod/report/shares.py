"""What of a call is shader work, what the bridge's, and what the rest."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_lod.report.files import Data
from gpu_lod.report.rows import Row, median, note, way


@dataclass(frozen=True)
class Share:
    """One way at one size, in milliseconds. Parts were timed apart, so that together they may exceed the whole."""

    side: int
    way: str
    whole: float
    kernel: float
    bridge: float

    @property
    def rest(self) -> float:
        """Copying the input in, finding memory, Python."""
        return max(0.0, self.whole - self.kernel - self.bridge)

    def percent(self, part: float) -> float:
        return 100 * part / max(self.whole, self.kernel + self.bridge)


def shares(data: Data, verb: str) -> list[Share]:
    """Of a verb's rows that were measured in parts and as a whole, by size and way."""
    found = []
    for row in data["rows"]:
        if row["verb"] != verb or row["part"] != "kernel":
            continue
        whole, bridge = (_partner(data, row, part) for part in ("end to end", "bridge"))
        if whole is None or bridge is None:
            continue
        for side in row["sides"]:
            if side in whole["sides"] and side in bridge["sides"]:
                times = (median(one, side) for one in (whole, row, bridge))
                found.append(Share(row["size"][0], way(side), *times))
    return found


def _partner(data: Data, row: Row, part: str) -> Row | None:
    """The row of another part of the same job."""
    for other in data["rows"]:
        same = all(other[key] == row[key] for key in ("verb", "size", "batch", "channels", "dtype", "cache"))
        if same and other["part"] == part and note(other) == note(row):
            result: Row = other
            return result
    return None
