"""The claim under test: the GPU's texture hardware builds a mip chain in 0.1 ms where PyTorch's pooling takes 5 ms."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_lod.report.files import Data
from gpu_lod.report.rows import Row, best, figure, is_plain, kind_of, median, over_floor, own

CLAIM = "The GPU's texture hardware builds a mip chain in 0.1 ms where PyTorch's pooling takes 5 ms (50x)."
CLAIMED_MS, CLAIMED_RATIO = 0.1, 50.0
SIDES = (1024, 2048, 4096)
POOLING = "torch avg_pool2d"


@dataclass(frozen=True)
class Line:
    """One size of one device. Times in milliseconds, None where not measured."""

    side: int
    part: str
    driver: float | None
    fragment: float | None
    compute: float | None
    best_name: str
    """Of ours, shader or kernel."""
    best: float
    pooling: float | None
    strongest_name: str
    strongest: float | None
    floor: float
    best_over_floor: float | None
    fragment_over_compute_on_gpu: float | None
    """By events on the stream, the change to OpenGL and back included; where they were recorded."""

    @property
    def fragment_over_compute(self) -> float | None:
        return self.fragment / self.compute if self.fragment and self.compute else None

    @property
    def hardware(self) -> float | None:
        """The faster way through texture hardware."""
        return min((ms for ms in (self.driver, self.fragment) if ms is not None), default=None)

    @property
    def ratio(self) -> float | None:
        """Pooling over texture hardware."""
        return self.pooling / self.hardware if self.pooling and self.hardware else None

    @property
    def best_ratio(self) -> float | None:
        """Pooling over the best of ours."""
        return self.pooling / self.best if self.pooling else None

    @property
    def honest_ratio(self) -> float | None:
        """The strongest torch way over the best of ours."""
        return self.strongest / self.best if self.strongest else None


def lines(data: Data) -> list[Line]:
    """End to end and from GL memory, at the claim's sizes, as far as they were measured."""
    found = []
    for part in ("end to end", "zero-copy in"):
        for side in SIDES:
            for row in data["rows"]:
                if row["verb"] == "mipmap" and row["size"] == [side, side] and is_plain(row, part) and own(row):
                    found.append(_line(side, row))
                    break
    return found


def _line(side: int, row: Row) -> Line:
    def ms(name: str) -> float | None:
        return median(row, name) if name in row["sides"] else None

    def on_gpu(name: str) -> float | None:
        return row["sides"].get(name, {}).get("device_ms")

    fragment, compute = on_gpu("gl fragment"), on_gpu("gl compute")
    fastest, strongest = own(row), best(row, "torch")
    assert fastest is not None
    return Line(
        side, row["part"], ms("gl driver"), ms("gl fragment"), ms("gl compute"), fastest, median(row, fastest),
        ms(POOLING), strongest or "", ms(strongest) if strongest else None, row["floor_ms"], over_floor(row, fastest),
        fragment / compute if fragment and compute else None,
    )  # fmt: skip


def verdict(data: Data) -> str:
    """What a device's figures say of the claim, in a sentence or two."""
    found = lines(data)
    if not found:
        return "No mip chain of these sizes was measured here, so nothing is said of the claim."
    if data["software"]:
        shown = [line for line in found if line.hardware and line.pooling]
        if not shown:
            return "A software renderer: no texture hardware here, so the claim is neither proved nor refuted for GPUs."
        line = shown[0]
        slower = line.hardware / line.pooling if line.hardware and line.pooling else 0
        return (
            "A software renderer: there is no texture hardware here, so the claim is neither proved nor refuted for "
            f"GPUs. What was measured at {line.side} x {line.side}: the CPU in the place of texture units takes "
            f"{figure(line.hardware)} ms, pooling {figure(line.pooling)} ms, so pooling takes {figure(1 / slower)} "
            f"times as long; the fastest torch way takes {figure(line.strongest)} ms."
        )
    judged = [line for line in found if line.ratio is not None]
    if not judged:
        # OpenGL's are the only chains that texture hardware makes.
        said = "No way through texture hardware was measured beside pooling, so nothing is said of the claim."
        return said + ours(found)
    held = [line for line in judged if line.ratio and line.hardware and _holds(line)]
    ratios = [line.ratio for line in judged if line.ratio]
    words = "confirmed" if len(held) == len(judged) else "refuted" if not held else "confirmed in part"
    where = ", ".join(f"{line.side} {line.part}" for line in held)
    return (
        f"The claim is {words}: pooling takes {figure(min(ratios))} to {figure(max(ratios))} times as long as texture "
        f"hardware, at its fastest {figure(min(line.hardware for line in judged if line.hardware))} ms; "
        f"it holds {f'at {where}' if held else 'at none of these sizes'}.{ours(found)}"
    )


def markdown(data: Data) -> str:
    """The verdict, and the figures that it rests on, in milliseconds."""
    found = lines(data)
    if not found:
        return verdict(data)
    headings = [
        "side", "input", "driver", "fragment", "compute", "best of ours", "avg_pool2d", "pooling / texture hardware",
        "fragment / compute", "the same by the GPU's clock",
    ]  # fmt: skip
    cells = [
        [
            str(line.side), "GL memory" if line.part == "zero-copy in" else "ordinary tensor", figure(line.driver),
            figure(line.fragment), figure(line.compute), f"{line.best_name}: {figure(line.best)}", figure(line.pooling),
            figure(line.ratio, "x"), figure(line.fragment_over_compute, "x"),
            figure(line.fragment_over_compute_on_gpu, "x"),
        ]
        for line in found
    ]  # fmt: skip
    table = ["| " + " | ".join(line) + " |" for line in [headings, ["---"] * len(headings), *cells]]
    return "\n".join([verdict(data), "", *table, *by_themselves(data)])


def by_themselves(data: Data) -> list[str]:
    """What the generators take without what hands tensors over: a paragraph, where it was measured."""
    for row in data["rows"]:
        if row["verb"] == "mipmap" and is_plain(row, "kernel") and {"gl fragment", "gl compute"} <= row["sides"].keys():
            times = {side: median(row, side) for side in row["sides"] if kind_of(side) == "gl"}
            side, ratio = row["size"][0], times["gl fragment"] / times["gl compute"]
            shown = "; ".join(f"{name.removeprefix('gl ')} {figure(ms)}" for name, ms in times.items())
            return ["", f"Shaders by themselves at {side} x {side}: {shown}. Fragment / compute {figure(ratio, 'x')}."]
    return []


def ours(found: list[Line]) -> str:
    """A sentence on the fastest of ours, whatever it goes through, at the largest size."""
    shown = [line for line in found if line.pooling and line.strongest and line.part == "end to end"]
    if not shown:
        return ""
    line = shown[-1]
    return (
        f" The fastest of ours at {line.side} x {line.side}, {line.best_name}, takes {figure(line.best)} ms: pooling "
        f"takes {figure(line.best_ratio)} times as long, the strongest torch way {figure(line.honest_ratio)} times."
    )


def _holds(line: Line) -> bool:
    return bool(line.ratio and line.hardware and line.hardware <= CLAIMED_MS and line.ratio >= CLAIMED_RATIO)
