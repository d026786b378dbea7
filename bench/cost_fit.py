"""Ways to do a job, the work of each on paper, and the constants that fit what was measured: docs/cost_model.md."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import nnls

from gpu_lod.kernels import chain
from gpu_lod.report.rows import Row, kind_of, median, note

RINGS_TIMES_WEDGES, PATCH_SAMPLES = 256 * 512, 273 * 14 * 14
LARGEST = 16384
"""Where crossovers are no longer looked for: the largest side of a texture on most devices."""

TRAFFIC = {
    "gl compute": 11 / 3,
    "gl single-pass": 10 / 3,
    "gl single-pass-texture": 16 / 3,
    "gl registers": 2 + 64 / 63 + 1 / 3,
}
"""Bytes over those of the image, on paper: see docs/cost_model.md."""
POOLING, ROWS_THEN_COLUMNS = 5 / 3, 3.0
POLYPHASE = 4.0
"""Of what an axis with an odd side reads: three operations on halves."""
COPIED_IN = 2.0
"""What an input that shaders can read where it is saves of them."""
KERNELS = "cuda kernels", "cuda graph of kernels"
COMPILED = "torch compiled", "torch graph of compiled"


@dataclass(frozen=True)
class Point:
    """One measured time, and what the model takes in."""

    row: Row
    levels: int
    work: float
    ms: float


@dataclass(frozen=True)
class Way:
    """A way to do a verb's job, and which of a row's sides it is."""

    verb: str
    name: str
    side: Callable[[Row], str | None]
    work: Callable[[Row], float]
    unit: str
    part: str = "end to end"
    sites: str = ""
    """Of `gather_patches`, which of them: those on the grid are another job, in which nothing is filtered."""
    odd: bool | None = None
    """Of kernels that differ by it, whether sides are odd, down to where four elements or two levels no longer fit."""

    @property
    def job(self) -> str:
        """The verb, and which of its jobs where there are several."""
        return ", ".join(filter(None, (self.verb, self.sites)))

    def points(self, rows: Sequence[Row]) -> list[Point]:
        found = []
        for row in rows:
            if row["verb"] != self.verb or row["part"] != self.part or self.sites not in note(row) or not _is_main(row):
                continue
            if self.odd is not None and self.odd == _rounds(row)[0][2]:
                continue
            side = self.side(row)
            if side is not None and side in row["sides"]:
                levels = max(row["size"]).bit_length() - 1
                found.append(Point(row, levels, self.work(row), median(row, side)))
        return found


@dataclass(frozen=True)
class Fit:
    """The constants of a way: milliseconds, milliseconds a level, milliseconds a unit of work."""

    way: Way
    constants: tuple[float, float, float]
    points: list[Point]
    left_out: float | None
    """Median relative error of points that the fit did not see, each left out in turn."""

    def ms(self, levels: int, work: float) -> float:
        fixed, level, unit = self.constants
        return fixed + level * levels + unit * work

    def errors(self) -> list[float]:
        return [self.ms(point.levels, point.work) / point.ms - 1 for point in self.points]

    @property
    def median_error(self) -> float:
        return statistics.median(map(abs, self.errors()))


def _is_main(row: Row) -> bool:
    """The rows whose jobs differ in size and batch alone."""
    if row["dtype"] != "float32" or row["cache"] != "warm":
        return False
    if row["verb"] in ("mipmap", "hiz"):
        return row["part"] == "zero-copy in" or not note(row)
    return note(row).endswith("a texture already")


def _image_bytes(row: Row) -> float:
    height, width = row["size"]
    return float(row["batch"] * row["channels"] * height * width * 4)


def _traffic(side: str, row: Row) -> float:
    """Of a generator, over the bytes of the image."""
    if side in TRAFFIC:
        return TRAFFIC[side]
    padded = 4 / 3 if row["channels"] == 3 else 1.0  # textures hold 4 channels for 3
    return 2 + 1 + padded * (1 + 5 / 3 + 1 / 3) + 1 / 3


def _generator_bytes(side: str, saved: float, row: Row) -> float:
    return (_traffic(side, row) - saved) * _image_bytes(row)


def _halving_bytes(row: Row) -> float:
    """That torch's mean chain moves: a bilinear halving reads a level and writes the next; odd axes come before it."""
    height, width = row["size"]
    level, moved = _image_bytes(row), 0.0
    while max(height, width) > 1:
        for side in (height, width):
            if side % 2 and side > 1:
                moved += POLYPHASE * level
                level /= 2
        if height % 2 == 0 or width % 2 == 0:
            smaller = level / (1 + (height % 2 == 0)) / (1 + (width % 2 == 0))
            moved += level + smaller
            level = smaller
        height, width = max(1, height // 2), max(1, width // 2)
    return moved


def _sizes(row: Row) -> list[tuple[int, int]]:
    height, width = row["size"]
    return [(max(1, height >> level), max(1, width >> level)) for level in range(max(height, width).bit_length())]


def _rounds(row: Row) -> list[tuple[int, int, bool, bool]]:
    return chain._rounds(_sizes(row), fours=row["size"][1] % 4 == 0)


def _kernel_bytes(row: Row) -> float:
    """That the kernels of a chain move: each launch reads the level it begins at, and the block that finishes a plane
    reads the last level of the tiles; every level is written once."""
    sizes = _sizes(row)
    moved = sum(map(math.prod, sizes[1:]))
    for base, group, _, finish in _rounds(row):
        moved += math.prod(sizes[base]) + finish * math.prod(sizes[base + group])
    return moved / math.prod(sizes[0]) * _image_bytes(row)


def _samples(default: Callable[[Row], float], row: Row) -> float:
    """Of a sampler: those that the note begins with, "1024 x 1024, ...", or else as many as these rows have."""
    said = re.match(r"\d+( x \d+)+", note(row))
    a_picture = math.prod(map(int, said[0].split(" x "))) if said else default(row)
    return float(row["batch"] * a_picture)


def _named(name: str) -> Callable[[Row], str | None]:
    return lambda row: name


def _first(*names: str) -> Callable[[Row], str | None]:
    """The first of some sides that a row has."""
    return lambda row: next((name for name in names if name in row["sides"]), None)


def ways_of(rows: Sequence[Row], *, borrowed: bool = False) -> Iterator[Way]:
    """Of chains every generator that was measured; of samplers the ways that are chosen from.

    Args:
        borrowed: shaders read ordinary tensors where they are.
    """
    halving = _first("torch polyphase", "torch sums", "torch interpolate bilinear")
    yield Way("mipmap", "torch polyphase or sums", halving, _halving_bytes, "byte")
    extremes = _named("torch rows then columns")
    yield Way("hiz", "torch rows then columns", extremes, lambda row: ROWS_THEN_COLUMNS * _image_bytes(row), "byte")
    for verb, pool in (("mipmap", "torch avg_pool2d"), ("hiz", "torch max_pool2d")):
        yield Way(verb, pool, _named(pool), lambda row: POOLING * _image_bytes(row), "byte")
        chains = [row for row in rows if row["verb"] == verb and _is_main(row)]
        generators = dict.fromkeys(side for row in chains for side in row["sides"] if kind_of(side) == "gl")
        for side in generators:
            for part, saved in (("end to end", COPIED_IN if borrowed else 0.0), ("zero-copy in", COPIED_IN)):
                name = f"{side}{', GL memory' if part == 'zero-copy in' else ''}"
                yield Way(verb, name, _named(side), partial(_generator_bytes, side, saved), "byte", part)
        for side in KERNELS:
            yield Way(verb, side, _named(side), _kernel_bytes, "byte", odd=False)
            yield Way(verb, f"{side}, odd sides", _named(side), _kernel_bytes, "byte", odd=True)
        for side in COMPILED:  # a kernel a level
            yield Way(verb, side, _named(side), lambda row: POOLING * _image_bytes(row), "byte")

    ring = "torch two levels a ring"
    samplers: list[tuple[str, Callable[[Row], float], tuple[str, ...]]] = [
        (
            "log_polar",
            lambda row: RINGS_TIMES_WEDGES,
            ("gl compute", "gl fragment", ring, f"{ring}, split over threads"),
        ),
        ("foveate", lambda row: row["size"][0] * row["size"][1], ("gl compute", "torch coarse to fine, boxes")),
    ]
    for verb, a_picture, sides in samplers:
        for side in (*sides, *KERNELS, *COMPILED):
            yield Way(verb, side, _named(side), partial(_samples, a_picture), "sample")
    for sites in ("cortical sites", "sites on the grid"):
        for side in ("gl compute", "torch sites of a level together", *KERNELS, *COMPILED):
            patches = partial(_samples, lambda row: PATCH_SAMPLES)
            yield Way("gather_patches", side, _named(side), patches, "sample", sites=sites)


def fit(way: Way, points: list[Point]) -> Fit | None:
    """None with fewer than three points. With fewer than five, no cost a level: it could not be told apart."""
    if len(points) < 3:
        return None
    left_out = []
    for number, point in enumerate(points):
        rest = Fit(way, _constants([*points[:number], *points[number + 1 :]]), [], None)
        left_out.append(abs(rest.ms(point.levels, point.work) / point.ms - 1))
    return Fit(way, _constants(points), points, statistics.median(left_out))


def _constants(points: list[Point]) -> tuple[float, float, float]:
    levels = 1.0 if len(points) >= 5 else 0.0
    terms = np.array([[1.0, levels * point.levels, point.work] for point in points])
    times = np.array([point.ms for point in points])
    weighed = terms / times[:, None]
    size = weighed.max(axis=0)  # bytes are many and levels few
    size[size == 0] = 1
    found, _ = nnls(weighed / size, np.ones(len(points)))
    fixed, level, unit = (float(value) for value in found / size)
    return fixed, level, unit


def fits(rows: Sequence[Row], *, borrowed: bool = False) -> list[Fit]:
    made = [fit(way, way.points(rows)) for way in ways_of(rows, borrowed=borrowed)]
    found = [one for one in made if one is not None]
    order = list(dict.fromkeys(one.way.job for one in found))
    return sorted(found, key=lambda one: order.index(one.way.job))


def crossovers(found: list[Fit], fastest: float = math.inf) -> list[tuple[str, int, Fit, Fit, int | None, float]]:
    """(job, batch, ours, torch, the side from which on ours is faster, ours over torch at 1024), end to end, for each
    of our backends; by the fastest way of each at 1024. A call meets torch's calls, a CUDA graph torch's graphs too.

    Args:
        fastest: GB/s, which no way exceeds: where a call takes as long as the host does, times of sizes at which it
            no longer would cannot be had from those that were measured.
    """
    result = []
    for job in dict.fromkeys(one.way.job for one in found):
        mine = [one for one in found if one.way.job == job and one.way.part == "end to end" and not one.way.odd]
        channels = 1 if job == "hiz" else 3
        for backend, graphs in (("gl", False), ("cuda", False), ("cuda", True)):
            for batch in (1, 32):

                def ms(one: Fit, side: int, batch: int = batch, channels: int = channels) -> float:
                    row = {"size": [side, side], "batch": batch, "channels": channels}
                    work = one.way.work(row)
                    return max(one.ms(side.bit_length() - 1, work), work / fastest * 1e-6)

                ways = [one for one in mine if kind_of(one.way.name) == backend and _is_graph(one) == graphs]
                rivals = [one for one in mine if kind_of(one.way.name) == "torch" and _is_graph(one) <= graphs]
                if not ways or not rivals:
                    continue
                ours, theirs = (min(group, key=lambda one: ms(one, 1024)) for group in (ways, rivals))
                sides = [2**power for power in range(5, LARGEST.bit_length())]
                wins = [side for side in sides if all(ms(ours, s) < ms(theirs, s) for s in sides if s >= side)]
                at_1024 = ms(ours, 1024) / ms(theirs, 1024)
                result.append((job, batch, ours, theirs, wins[0] if wins else None, at_1024))
    return result


def _is_graph(one: Fit) -> bool:
    return " graph of " in one.way.name
