"""Run the benchmarks and write bench/results/<device>.json, a plot beside it, and the table on the terminal.

python bench/run.py [--quick] [--only mipmap,hiz,log_polar,pyramids,samplers,features,parts] [--out FILE]
python bench/run.py --device cuda [--minutes 5] [--quick] [--out FILE] [--go-on FILE]
python bench/run.py --device cuda --compile 2/6   compile what the third of six parts of the rows needs; time nothing
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import bench_features
import bench_hiz
import bench_log_polar
import bench_mipmap
import bench_parts
import bench_pyramids
import bench_samplers
import inputs
import report
import timer
import torch
from rich.console import Console
from rows import Row, save

Size = tuple[int, int, int]
"""(height, width, batch)"""
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
HELD = [(512, 512, 1), (1024, 1024, 1), (2048, 2048, 1), (4096, 4096, 1), (777, 1001, 1)]
"""From GL memory too, by every generator; the first of them is measured end to end for this alone."""
QUICK = [(64, 64, 1), (45, 61, 1)]
FEATURES = [(224, 224, 1), (512, 512, 1), (1024, 1024, 1), (777, 1001, 1), (224, 224, 8)]
VERBS = "mipmap,hiz,log_polar,pyramids,samplers,features,parts"
F32, SMALL = [torch.float32], [torch.uint8, torch.float16]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda":
        return cuda(options)
    kept = not options.quick and timer.keep_memory()
    console = Console()
    jobs = plan(options.quick)
    rows: list[Row] = []
    for name in options.only.split(","):
        with console.status(f"measuring {name} ..."):
            for rows_of in jobs[name]:
                rows += rows_of
        console.print(f"{name} measured")
    for name, why in sorted(inputs.ABSENT.items()):
        console.print(f"without {name}: {why}", markup=False)
    path = save(rows, options.out, memory_kept=kept)
    show(path, console)
    return 0


def plan(quick: bool) -> dict[str, list[Iterator[Row]]]:
    """The rows of each verb, measured as they are drawn."""
    seconds = 0.03 if quick else 0.6
    if quick:
        sizes, square, held, sides, features = QUICK, QUICK[:1], QUICK[:1], [64], QUICK[:1]
        inputs.COLD_BYTES, timer.PAUSE, timer.TRIES = 2**16, 0.0, 1
    else:
        sizes, square, held, sides, features = [*SIDES, *BATCHES], SQUARE, HELD, [1024, 2048], FEATURES
    main = [(side, side, 1) for side in sides]
    cold, few = ["cold"], list(dict.fromkeys([sizes[0], *square, *sizes[-2:]]))
    odd = [size for size in sizes if size[1] % 4]
    extra = [size for size in held[:1] if size not in sizes]
    all_sizes = list(dict.fromkeys([*sizes, *main]))
    one, small = square[0][0], SMALL[:1] if quick else SMALL
    return {
        "mipmap": [
            bench_mipmap.rows([*sizes, *extra], F32, ["warm"], seconds),
            bench_mipmap.rows(square, small, ["warm"], seconds),
            bench_mipmap.rows(main, F32, cold, seconds),
            bench_mipmap.zero_copy(held, seconds),
        ],
        "hiz": [
            bench_hiz.rows([*sizes, *extra], ["warm"], seconds),
            bench_hiz.rows(main, cold, seconds),
            bench_hiz.zero_copy(held, seconds),
            *(bench_hiz.readers(seconds, side=side) for side in ([one] if quick else [sizes[0][0], one, 2 * one])),
            bench_hiz.batches(seconds, batch=2 if quick else 32, side=sizes[0][0]),
        ],
        "log_polar": [
            bench_log_polar.rows(sizes, F32, ["warm"], seconds),
            bench_log_polar.rows(square, small, ["warm"], seconds),
            bench_log_polar.rows(sizes[-1:], [torch.uint8], ["warm"], seconds),
            bench_log_polar.rows(main, F32, cold, seconds),
            bench_log_polar.whole_calls(seconds, side=one),
        ],
        "pyramids": [
            bench_pyramids.rows(few if quick else [*few, *main[1:], *SIDES[-2:]], seconds),
            bench_pyramids.alone(square, seconds),
            bench_pyramids.inverse(list(dict.fromkeys([*few, *odd])), F32, seconds),
            bench_pyramids.inverse(square, small, seconds),
            bench_pyramids.inverse(odd, small[:1], seconds),
        ],
        "samplers": [
            bench_samplers.foveate(all_sizes, F32, seconds),
            bench_samplers.foveate(square, small, seconds),
            bench_samplers.foveate(odd, small, seconds),
            bench_samplers.foveate(main, F32, seconds, cache="cold"),
            bench_samplers.foveate_once([*few, *main[1:]], F32, seconds),
            bench_samplers.foveate_once(square, small, seconds),
            bench_samplers.others_once(square, [*F32, torch.uint8], seconds),
            bench_samplers.foveate_at_one_place(seconds, side=one),
            bench_samplers.anisotropic(seconds, side=one),
            bench_samplers.gradients(seconds, side=one),
            bench_samplers.cortical_sites([1, 2] if quick else [1, 32], seconds),
            bench_samplers.gather_patches(all_sizes, F32, seconds),
            bench_samplers.gather_patches(square, small, seconds),
            bench_samplers.gather_patches(main, F32, seconds, cache="cold"),
            bench_samplers.batches(seconds, batch=2 if quick else 32, side=sizes[0][0]),
        ],
        "features": [bench_features.rows(features, seconds)],
        "parts": [bench_parts.rows(sides, seconds)],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="few sizes and short rows: to see that it works")
    parser.add_argument("--only", help=f"comma-separated (default: {VERBS}); CPU tensors only")
    parser.add_argument("--minutes", type=float, help="how long it may take (default: 5); CUDA tensors only")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/<device>.json)")
    parser.add_argument(
        "--go-on",
        type=Path,
        metavar="FILE",
        help="measure what this file left out, and keep its rows; CUDA tensors only",
    )
    parser.add_argument("--compile", metavar="I/N", help="compile for part I of N, from 0; CUDA tensors only")
    parser.add_argument("--rest", help=argparse.SUPPRESS)  # what a process that lost the device leaves to the next
    options = parser.parse_args(arguments)
    if options.device == "cuda" and options.only is not None:
        parser.error("--only is for --device cpu; CUDA rows come in the order of their importance: use --minutes")
    if options.device == "cpu" and options.go_on is not None:
        parser.error("--go-on is for --device cuda; use --only")
    if options.go_on is not None and not options.go_on.is_file():
        parser.error(f"--go-on: there is no file {options.go_on}")
    if options.compile is not None:
        part, slash, parts = options.compile.partition("/")
        if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
            parser.error(f"--compile is {options.compile}; expected a part and how many there are, such as 0/6")
        if options.device == "cpu":
            parser.error("--compile is for --device cuda: nothing is compiled for CPU tensors")
        options.compile = int(part), int(parts)
    if options.device == "cpu" and options.minutes is not None:
        parser.error("--minutes is for --device cuda; use --only or --quick")
    options.only = options.only or VERBS
    options.minutes = 5.0 if options.minutes is None else options.minutes
    if not 0 < options.minutes < math.inf:
        parser.error("--minutes must be more than 0")
    if unknown := set(options.only.split(",")) - set(VERBS.split(",")):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    return options


def cuda(options: argparse.Namespace) -> int:
    """CUDA tensors: 1 if there is no device, nothing was measured, or something failed."""
    import bench_cuda

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured, nothing written", file=sys.stderr)
        return 1
    # Plain lines, for this runs where the output is a log.
    if options.compile is not None:
        bench_cuda.compile_ahead(*options.compile, lambda text: print(text, flush=True))
        return 0
    rest = bench_cuda.Rest.of(options.rest) if options.rest else None
    path, problem = bench_cuda.run_all(
        options.minutes, options.out, options.quick, lambda text: print(text, flush=True), rest, earlier=options.go_on
    )
    try:
        show(path, Console(width=None if sys.stdout.isatty() else 200))
    except Exception as error:  # the file is there, and holds everything
        problem = problem or f"the table or the plot failed: {error!r}"
    if problem:
        print(f"{path}: {problem}", file=sys.stderr)
    return int(problem is not None)


def show(path: Path, console: Console) -> None:
    """The table on the terminal and the plot beside the file."""
    console.print(report.table(path))
    report.plot(path, path.with_suffix(".svg"))
    console.print(f"wrote {path} and {path.with_suffix('.svg')}")


if __name__ == "__main__":
    sys.exit(main())
