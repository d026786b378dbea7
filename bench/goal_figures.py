"""Figures that goals are set against, each read from a result file: None where the file does not have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from allocate_doc import ALONE, GIVEN
from bench_memory import OF_PICTURE, OF_RESULT
from rows import keeps_up

import gpu_lod as lod
from gpu_lod.report import claim, generators
from gpu_lod.report.rows import Row, figure, kind_of, note

Data = dict[str, Any]
Figure = tuple[float, str]
"""A value, and what it is of."""


def _worst(found: Iterable[Figure], *, least: bool = False) -> Figure | None:
    return (min if least else max)(found, key=lambda one: one[0], default=None)


# Of result files of bench/run.py.


def _rows(data: Data, verb: str, side: int, about: str = "", **more: Any) -> Iterator[Row]:
    """Whole calls for one square picture of 3 fp32 channels, warm, unless it is said otherwise."""
    wanted = {"part": "end to end", "batch": 1, "channels": 3, "dtype": "float32", "cache": "warm", **more}
    for row in data["rows"]:
        mine = row["verb"] == verb and row["size"] == [side, side] and note(row) == about
        if mine and all(row[key] == value for key, value in wanted.items()):
            yield row


def _fastest(row: Row, kinds: Sequence[str], clock: str, wanted: Callable[[str], bool]) -> tuple[str, float] | None:
    sides = (
        (name, float(times[clock]))
        for name, times in row["sides"].items()
        if kind_of(name) in kinds and name not in row.get("other_job", ()) and wanted(name) and clock in times
    )
    return min(sides, key=lambda one: one[1], default=None)


def _any(_: str) -> bool:
    return True


def is_graph(name: str) -> bool:
    return " graph of " in name


def is_call(name: str) -> bool:
    return not is_graph(name)


def is_compiled(name: str) -> bool:
    return name == "torch compiled"


def is_eager(name: str) -> bool:
    return is_call(name) and not is_compiled(name)


def gain(
    rows: Callable[[Data], Iterable[Row]], data: Data, clock: str = "median_ms",
    ours: Callable[[str], bool] = _any, theirs: Callable[[str], bool] = _any,
) -> Figure | None:  # fmt: skip
    """How many times as long the fastest torch way takes as the fastest of ours, at the first such row."""
    for row in rows(data):
        mine, torchs = (_fastest(row, *one) for one in ((("gl", "cuda"), clock, ours), (("torch",), clock, theirs)))
        if mine and torchs:
            ms = " against ".join(f"{name} {figure(ms)}" for name, ms in (mine, torchs))
            return torchs[1] / mine[1], f"{ms} ms"
    return None


def rows_of(verb: str, side: int, about: str = "", **more: Any) -> Callable[[Data], Iterable[Row]]:
    return lambda data: _rows(data, verb, side, about, **more)


BYTES: dict[str, Any] = {"channels": 4, "dtype": "uint8", "cache": "cold"}


def time_of(rows: Callable[[Data], Iterable[Row]], side: str, clock: str, scale: float, data: Data) -> Figure | None:
    for row in rows(data):
        if clock in row["sides"].get(side, {}):
            return scale * row["sides"][side][clock], side
    return None


def fixed(data: Data, about: str) -> Iterable[Row]:
    return _rows(data, "bridge", 64, f"a log-polar map of 4 x 8{about}: everything but the work", part="fixed cost")


def behind(data: Data) -> Figure | None:
    judged = [row["auto_ok"] for row in data["rows"] if "auto_ok" in row]
    return (float(len(judged) - sum(judged)), f"of {len(judged)}") if judged else None


def behind_our_own(data: Data) -> Figure | None:
    """The same against the ways that auto chooses among."""
    judged = []
    for row in data["rows"]:
        sides, ours = row["sides"], _fastest(row, ("gl", "cuda"), "median_ms", is_call)
        if ours and "auto" in sides:
            judged.append(keeps_up(sides["auto"], sides[ours[0]]))
    return (float(len(judged) - sum(judged)), f"of {len(judged)}") if judged else None


def over_a_level(verb: str, data: Data) -> Figure | None:
    for line in generators.lines(data, verb):
        if line.size == [2048, 2048] and line.part == "end to end" and line.against_one_dispatch_a_level:
            return line.against_one_dispatch_a_level, line.best_compute or ""
    return None


def ours_over_a_level(data: Data) -> Figure | None:
    for row in _rows(data, "mipmap", 2048):
        mine = _fastest(row, ("gl", "cuda"), "median_ms", is_call)
        if mine and "gl compute" in row["sides"]:
            return row["sides"]["gl compute"]["median_ms"] / mine[1], mine[0]
    return None


def _of_floor(us: float, floor_us: float) -> Figure:
    bound = 1.25 * floor_us + 10
    return us / bound, f"{figure(us)} of {figure(bound)} us"


def over_floor(data: Data) -> Figure | None:
    for row in _rows(data, "mipmap", 4096, **BYTES):
        mine = _fastest(row, ("gl", "cuda"), "device_ms", _any)
        return _of_floor(mine[1] * 1e3, row["floor_ms"] * 1e3) if mine else None
    return None


def odd_over_even(data: Data) -> Figure | None:
    def ms(side: int) -> float | None:
        found = time_of(rows_of("mipmap", side), "cuda kernels", "device_ms", 1, data)
        return found[0] if found else None

    even = ms(4096)
    times = ((ms(side), side) for side in (4097, 4095))
    return _worst((time / even, f"{side} over 4096") for time, side in times if time and even)


def calls_over_batch(data: Data) -> Figure | None:
    """The least that a batch in one call gains over a call for each image."""
    one, each = "gl one call", "gl a call for each image"
    times = [(row["verb"], row["sides"]) for row in data["rows"] if {one, each} <= row["sides"].keys()]
    return _worst(((of[each]["median_ms"] / of[one]["median_ms"], verb) for verb, of in times), least=True)


def fragment_over_compute(data: Data) -> Figure | None:
    ratios = [
        (line.fragment_over_compute, f"{line.side}{', image in GL memory' * (line.part != 'end to end')}")
        for line in claim.lines(data)
    ]
    return _worst((ratio, of) for ratio, of in ratios if ratio is not None)


# Of the other files.


def _chains(data: Data, dtype: str) -> list[Data]:
    return [row for row in data["rows"] if row["kernel"] == "chain" and row["dtype"] == dtype]


def kernel_over_floor(data: Data) -> Figure | None:
    for row in _chains(data, "uint8"):
        if row["side"] == 4096 and row["cache"] == "cold":
            return _of_floor(row["gpu_us"], row["floor_us"])
    return None


def kernel_odd_over_even(dtype: str, data: Data) -> Figure | None:
    times = {row["side"]: row["gpu_us"] for row in _chains(data, dtype)}
    pairs = ((side, side & ~1 if side & 2 == 0 else side + 1) for side in times if side % 2)
    return _worst((times[odd] / times[even], f"{odd} over {even}") for odd, even in pairs if even in times)


def bridge(part: str, key: str, data: Data, scale: float = 1.0, size: int | None = None) -> Figure | None:
    """The worst of a part."""
    rows = [row for row in data[part] if key in row and size in (None, row.get("size"))]
    return _worst((row[key] * scale, row["name"]) for row in rows)


def host_over(way: str, data: Data) -> Figure | None:
    for row in data["end_to_end"]:
        if row["size"] == 2048 and way in row["sides"] and row["best_host"] in row["sides"]:
            host, ours = (row["sides"][name]["median_ms"] for name in (row["best_host"], way))
            return host / ours, f"{way} {figure(ours)} against {row['best_host']} {figure(host)} ms"
    return None


def eager_torch_over(data: Data) -> Figure | None:
    for row in data["end_to_end"]:
        if row["size"] == 1024:
            torchs, ours = (row["sides"][name]["median_ms"] for name in (row["best_torch"], "gl"))
            return torchs / ours, f"gl {figure(ours)} against {row['best_torch']} {figure(torchs)} ms"
    return None


def repeated(key: str, data: Data) -> Figure | None:
    return _worst(
        ((row[key], "" if key == "calls" else f"in {row['calls']:,} calls") for row in data["small_calls"]),
        least=key == "calls",
    )


def memory(backend: str, allowance: int, data: Data) -> Figure | None:
    rows = (row for row in data["rows"] if row["backend"] == backend and "graph" not in row)
    shares = (
        ((row["peak"] - allowance) / (OF_RESULT * row["result"] + OF_PICTURE * row["picture"]), row) for row in rows
    )
    return _worst(
        (share, f"{row['verb']}, {row['dtype']} of {' x '.join(map(str, row['shape']))}") for share, row in shares
    )


def allocators(names: Iterable[str], many: bool, way: str, data: Data) -> Figure | None:
    """The slowest, relevance given or not."""
    jobs = {f"{job}{way}": words for job, words in ((GIVEN, "relevance given"), (ALONE, "picture alone"))}
    rows = (row for row in data["rows"] if row["job"] in jobs and (row["batch"] > 1) == many)
    wanted = set(names)
    return _worst(
        (row["median_ms"], f"{row['allocator']}, {jobs[row['job']]}") for row in rows if row["allocator"] in wanted
    )


def batch_over_one(data: Data) -> Figure | None:
    times = {(row["allocator"], row["job"], row["batch"]): row["median_ms"] for row in data["rows"]}
    names = lod.allocate.names()
    many = (
        (name, job, ms)
        for (name, job, batch), ms in times.items()
        if batch == 32 and job in (GIVEN, ALONE) and name in names
    )
    return _worst((ms / times[name, job, 1], f"{name}, {job}") for name, job, ms in many if (name, job, 1) in times)
