"""Run the benchmarks and write bench/results/<device>.json, a plot beside it, and the table on the terminal.

python bench/run.py [--quick] [--only mipmap,hiz,log_polar] [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_hiz
import bench_log_polar
import bench_mipmap
import report
import torch
from rich.console import Console
from rows import Row, save

SIDES = [
    (224, 224, 1),
    (448, 448, 1),
    (1024, 1024, 1),
    (2048, 2048, 1),
    (4096, 4096, 1),
    (1080, 1920, 1),
    (777, 1001, 1),
]
BATCHES = [(224, 224, 8), (224, 224, 32), (1024, 1024, 8)]
SQUARE = [(1024, 1024, 1)]
F32, SMALL = [torch.float32], [torch.uint8, torch.float16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sizes and short rows: to see that it works")
    parser.add_argument("--only", default="mipmap,hiz,log_polar", help="comma-separated")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/<device>.json)")
    options = parser.parse_args()
    console = Console()
    seconds = 0.1 if options.quick else 1.0
    sizes = [(224, 224, 1), (777, 1001, 1)] if options.quick else [*SIDES, *BATCHES]
    square, caches = (sizes[:1], ["warm"]) if options.quick else (SQUARE, ["cold"])
    jobs = {
        "mipmap": lambda: [
            *bench_mipmap.rows(sizes, F32, ["warm"], seconds),
            *bench_mipmap.rows(square, SMALL, ["warm"], seconds),
            *bench_mipmap.rows(square, F32, caches, seconds),
            *bench_mipmap.zero_copy(seconds),
        ],
        "hiz": lambda: [
            *bench_hiz.rows(sizes, ["warm"], seconds),
            *bench_hiz.rows(square, caches, seconds),
            *bench_hiz.readers(seconds),
        ],
        "log_polar": lambda: [
            *bench_log_polar.rows(sizes, F32, ["warm"], seconds),
            *bench_log_polar.rows(square, SMALL, ["warm"], seconds),
            *bench_log_polar.rows(sizes[-1:], [torch.uint8], ["warm"], seconds),
            *bench_log_polar.rows(square, F32, caches, seconds),
            *bench_log_polar.whole_calls(seconds),
        ],
    }
    rows: list[Row] = []
    for name in options.only.split(","):
        with console.status(f"measuring {name} ..."):
            rows += jobs[name]()
        console.print(f"{name} measured")
    path = save(rows, options.out)
    console.print(report.table(path))
    report.plot(path, path.with_suffix(".svg"))
    console.print(f"wrote {path} and {path.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
