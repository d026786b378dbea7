"""What shaders gain in the workers of a DataLoader: bench/results/workers/<device>.json, and a table of
docs/benchmarks.md.

python bench/bench_workers.py [--quick] [--out FILE]
python bench/bench_workers.py --doc   put the tables of all result files into docs/benchmarks.md

As many workers as torch has threads, each of which has one thread of torch and one of llvmpipe, make one result after
the other, at a new place each; and one process, in which torch and llvmpipe have all cores. Only small parts of results
leave the workers. Ways take turns.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import torch
from inputs import picture
from study import Study
from torch.utils.data import DataLoader, Dataset

import gpu_lod as lod

WAYS = "torch", "gl", "auto"
SECONDS, ROUNDS = 1.0, 3
"""Of a way in a round."""
Data = dict[str, Any]

JOBS: dict[str, tuple[str, tuple[int, int, int], str]] = {
    "gather_patches": ("273 x 14 x 14 of an image, cortical sites", (3, 1024, 1024), "uint8"),
    "log_polar": ("128 x 256 samples of an image", (3, 1024, 1024), "uint8"),
    "foveate": ("of an image", (3, 1024, 1024), "uint8"),
    "foveate, anisotropic": ("of an image, anisotropy 4", (3, 512, 512), "float32"),
    "inverse_log_polar": ("from a map of 128 x 256", (3, 512, 512), "float32"),
    "feature_maps": ("40 channels of float32", (3, 512, 512), "uint8"),
    "oriented_energy": ("5 levels", (3, 512, 512), "float32"),
    "region_max": ("4096 boxes, a texture already", (1, 512, 512), "float32"),
}
"""By name: what is made, of a picture of which shape and dtype."""

_NUMBERS = {"type": "object", "required": [*WAYS], "additionalProperties": {"type": "number", "exclusiveMinimum": 0}}
_ROW = {
    "type": "object",
    "required": ["job", "what", "shape", "dtype", "workers", "alone"],
    "properties": {"job": {"enum": [*JOBS]}, "workers": _NUMBERS, "alone": _NUMBERS},
}
SCHEMA: Data = {
    "type": "object",
    "required": ["device", "cpu", "threads", "versions", "commit", "date", "rows"],
    "properties": {"rows": {"type": "array", "minItems": 1, "items": _ROW}},
}


class Made(Dataset[torch.Tensor]):
    """Results of a job, one after the other.

    Args:
        count: how many.
    """

    def __init__(self, job: str, way: str, count: int) -> None:
        self.job, self.way, self.count = job, way, count
        self._make: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._make is None:  # in the process that uses it
            self._make = _maker(self.job, self.way)
        made = self._make(torch.rand(2, generator=torch.Generator().manual_seed(index)))
        return made.flatten()[:: made.numel() // 64].float()


def _maker(job: str, way: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    _, (channels, height, width), dtype = JOBS[job]
    image = picture(height, width, channels=channels, dtype=getattr(torch, dtype))[0]
    if job == "gather_patches":
        return lambda at: lod.gather_patches(image, lod.cortical_sites(at, 273, (height, width)), backend=way)
    if job == "log_polar":
        return lambda at: lod.log_polar(image, at, 128, 256, backend=way)
    if job == "inverse_log_polar":
        laid = lod.log_polar(image, (0.5, 0.5), 128, 256, backend="torch")
        return lambda at: lod.inverse_log_polar(laid, at, (height, width), backend=way)
    if job == "feature_maps":
        return lambda at: lod.feature_maps(image, at, dtype=torch.float32, backend=way)
    if job == "oriented_energy":
        return lambda at: lod.oriented_energy(image, 5, backend=way)[0]
    if job == "region_max":
        corners = torch.rand(4096, 2, 2, generator=torch.Generator().manual_seed(0))
        hz, boxes = lod.hiz(image, backend="torch"), corners.sort(1).values.flatten(1)
        hz = hz if way == "torch" else hz.upload()
        return lambda at: lod.region_max(hz, boxes, backend=way)
    anisotropy = 4.0 if "anisotropic" in job else 1.0
    return lambda at: lod.foveate(image, at, anisotropy=anisotropy, backend=way)


def _alone(job: str, way: str, seconds: float, threads: int) -> float:
    """Results a second in this process."""
    torch.set_num_threads(threads)
    made = Made(job, way, 2**40)
    for index in range(5):
        made[index]
    start, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or done < 3:
        made[5 + done]
        done += 1
    return done / spent


def _in_workers(job: str, way: str, seconds: float, threads: int) -> float:
    """Results a second that workers make."""
    each = 4
    loader = DataLoader(
        Made(job, way, 2**20), batch_size=each, num_workers=threads, multiprocessing_context="spawn", timeout=120
    )
    batches = iter(loader)
    for _ in range(3 * threads):  # until all have begun
        next(batches)
    start, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or done < 3:
        next(batches)
        done += 1
    return each * done / spent


def measure(jobs: list[str], seconds: float, rounds: int) -> list[Data]:
    threads = torch.get_num_threads()
    rows = []
    with get_context("spawn").Pool(1) as pool:
        for job in jobs:
            found: dict[str, dict[str, list[float]]] = {"workers": {}, "alone": {}}
            for _ in range(rounds):
                for way in WAYS:
                    found["workers"].setdefault(way, []).append(_in_workers(job, way, seconds, threads))
                    found["alone"].setdefault(way, []).append(pool.apply(_alone, (job, way, seconds, threads)))
            what, shape, dtype = JOBS[job]
            numbers = {
                where: {way: round(median(each), 2) for way, each in ways.items()} for where, ways in found.items()
            }
            rows.append({"job": job, "what": what, "shape": list(shape), "dtype": dtype, **numbers})
            print(rows[-1], file=sys.stderr)
    return rows


def tables(path: Path) -> str:
    data: Data = json.loads(path.read_text("utf-8"))
    jsonschema.validate(data, SCHEMA)
    lines = [["job", "picture", "workers: torch", "gl", "gain", "auto", "one process: torch", "gl", "gain"]]
    lines.append(["---"] * 9)
    for row in data["rows"]:
        cells = [
            f"`{row['job'].partition(',')[0]}` {row['what']}",
            " x ".join(map(str, row["shape"])) + " " + row["dtype"],
        ]
        for where in ("workers", "alone"):
            torchs, gl, auto = (row[where][way] for way in WAYS)
            cells += [f"{torchs:.3g}", f"{gl:.3g}", f"{gl / torchs:.2f}x"] + [f"{auto:.3g}"] * (where == "workers")
        lines.append(cells)
    return "\n\n".join(
        [
            f"Results a second on {data['device']}, {data['date']} ([file](../bench/results/workers/{path.name}), "
            f"torch {data['versions']['torch']}): in {data['threads']} workers, each of which has a thread of torch "
            f"and one of llvmpipe, and in one process with {data['threads']} of both; medians of {data['rounds']} "
            "rounds.",
            "\n".join("| " + " | ".join(line) + " |" for line in lines),
        ]
    )


STUDY = Study(
    __doc__ or "",
    folder="workers",
    document="benchmarks.md",
    marks=("<!-- tables: python bench/bench_workers.py --doc -->", "<!-- end of the tables of workers -->"),
    quick="one job, and short",
    tables=tables,
    schema=SCHEMA,
)


def main(arguments: list[str] | None = None) -> int:
    def measured(options: Namespace) -> Data:
        jobs, seconds, rounds = (["log_polar"], 0.02, 1) if options.quick else ([*JOBS], SECONDS, ROUNDS)
        return {"rounds": rounds, "rows": measure(jobs, seconds, rounds)}

    return STUDY.run(measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
