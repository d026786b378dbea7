"""What the kernels of backend="cuda" take the GPU, without opponents: half a minute, to compare one version of a kernel
with another.

Times are by events on the stream, of CUDA graphs queued one behind the other (`cuda_timer`): no launch is in them.

python bench/bench_kernels.py [--only chain,foveate] [--out FILE]
python bench/bench_kernels.py --set ROWS_AT_ONCE=8 --set LEAST_BLOCKS:3=2   with other constants; nothing is written
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_cuda import COLD_BYTES, MANY, device_bandwidth
from cuda_timer import CudaStopwatch, Stopwatch, short
from inputs import inputs_for, picture, pyramid_bytes
from opponents import captured
from rows import RESULTS, cuda_facts, slug, write

import gpu_lod as lod
from gpu_lod.kernels import chain, samplers, sources

ROUNDS, BLOCK = 12, 8
"""Turns, and calls of one."""
POINT = (0.4, 0.6)
JOBS = ("chain", "hiz", "log_polar", "foveate", "patches")
CHAINS = [
    (4096, torch.uint8, 4, "cold"),
    (4097, torch.uint8, 4, "cold"),
    *((side, torch.float32, 3, "warm") for side in (1024, 1025, 2048, 2049, 4096, 4097, 4095)),
    (4097, torch.uint8, 3, "warm"),
    (4097, torch.float16, 3, "warm"),
]
"""(side, dtype, channels, cache)"""
BOUNDS = [(side, torch.float32, 1, "warm") for side in (4096, 4097)]
"""The same, of Hi-Z chains of the maximum."""
SIDES, MAPS = (1024, 2048, 4096), (1024, 2048)
"""Of pictures that are foveated, the last of which maps and patches are read from too; and of maps."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["device", "commit", "date", "copy_gb_per_s", "rows", "failures"],
    "properties": {
        "rows": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["kernel", "job", "side", "channels", "dtype", "cache", "gpu_us", "fastest_us", "floor_us"],
                "properties": {"gpu_us": {"type": "number", "exclusiveMinimum": 0}},
            },
        },
    },
}
Row = dict[str, Any]
Work = tuple[Row, Callable[[Any], object], list[Any], int]
"""What a row says of it, the function, its inputs, and the bytes that it moves at the least."""


def works(device: torch.device, wanted: list[str]) -> Iterator[Work]:
    for kernel, verb, chains in (("chain", lod.mipmap, CHAINS), ("hiz", lod.hiz, BOUNDS)):
        for side, dtype, channels, cache in chains if kernel in wanted else []:
            image = picture(side, side, channels=channels, dtype=dtype).to(device)
            inputs = inputs_for(image, cache, lambda x: x, COLD_BYTES)
            yield about(kernel, "", image, cache), partial(verb, backend="cuda"), inputs, pyramid_bytes(image)
    point = torch.tensor([POINT], device=device)
    for dtype in (torch.float32, torch.uint8):
        for side in SIDES:
            image = picture(side, side, dtype=dtype).to(device)
            pyramid = lod.mipmap(image, backend="cuda").upload(backend="cuda")
            if "foveate" in wanted:
                yield (
                    about("foveate", "", image), lambda at, p=pyramid: lod.foveate(p, at, backend="cuda"), [point],
                    2 * image.nbytes,
                )  # fmt: skip
        for size in MAPS:
            if "log_polar" in wanted:
                yield (
                    about("log_polar", f"{size} x {size}", image),
                    lambda at, p=pyramid, n=size: lod.log_polar(p, at, n, n, backend="cuda"), [point],
                    2 * 3 * size * size * dtype.itemsize,
                )  # fmt: skip
        if "patches" in wanted:
            for job, sites in {"cortical": cortical(side), "on the grid": on_the_grid(side)}.items():
                yield (
                    about("patches", f"{MANY} x 14 x 14, {job}", image),
                    lambda at, p=pyramid: lod.gather_patches(p, at, 14, backend="cuda"), [sites.to(device)],
                    2 * MANY * 14 * 14 * 3 * dtype.itemsize,
                )  # fmt: skip


def about(kernel: str, job: str, image: torch.Tensor, cache: str = "warm") -> Row:
    return {
        "kernel": kernel, "job": job, "side": image.shape[-1], "channels": image.shape[1],
        "dtype": str(image.dtype)[6:], "cache": cache,
    }  # fmt: skip


def cortical(side: int) -> torch.Tensor:
    return lod.cortical_sites(torch.tensor([POINT]), MANY, (side, side))


def on_the_grid(side: int) -> torch.Tensor:
    """Whole patches of level 0, in no order."""
    cells = torch.randperm((side // 14) ** 2, generator=torch.Generator().manual_seed(0))[:MANY]
    centre = torch.stack([cells % (side // 14), cells // (side // 14)], dim=1) * 14 + 7
    return torch.cat([centre / side, torch.zeros(MANY, 1)], dim=1)[None]


def set_constant(change: str) -> None:
    """NAME=VALUE, or NAME:BEFORE=VALUE of those definitions alone: in the kernels' sources, and where the host's code
    has a constant of that name.

    Raises:
        ValueError: there is none.
    """
    found = re.fullmatch(r"([A-Z_]+)(?::(\d+))?=(\d+)", change)
    if found is None:
        raise ValueError(f"--set is {change}; expected NAME=VALUE or NAME:BEFORE=VALUE")
    name, before, value = found.groups()
    definition = re.compile(rf"(#define {name} ){before or '[0-9]+'}\b")
    count = 0
    for file, text in sources.texts().items():
        sources.texts()[file], times = definition.subn(rf"\g<1>{value}", text)
        count += times
    for module in (chain, samplers):
        if isinstance(was := getattr(module, name, None), int) and before in (None, str(was)):
            setattr(module, name, int(value))
            count += 1
    if not count:
        raise ValueError(f"--set is {change}, and neither kernels nor the host's code define that")


def measure(
    device: torch.device,
    watch: Stopwatch,
    bandwidth: float,
    wanted: list[str],
    save: Callable[[Row], object],
    failures: dict[str, str],
) -> None:
    """Args:
    bandwidth: bytes a second of a copy.
    save: called with each row.
    failures: what fails is added to it, by name.
    """
    for row, function, inputs, moved in works(device, wanted):
        name = " ".join(str(value) for value in row.values() if value != "")
        try:
            replay = captured(function, inputs)
            times = [ms for _ in range(ROUNDS) for ms in watch.device_ms(replay, BLOCK)]
        except Exception as error:
            failures[name] = short(error)
            print(f"{name}: {failures[name]}", flush=True)
            continue
        row |= {
            "gpu_us": round(statistics.median(times) * 1e3, 2),
            "fastest_us": round(min(times) * 1e3, 2),
            "floor_us": round(moved / bandwidth * 1e6, 2),
        }
        print(
            f"{name:60} {row['gpu_us']:8.2f} us, fastest {row['fastest_us']:8.2f}, floor {row['floor_us']:8.2f}",
            flush=True,
        )
        save(row)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(JOBS), help="comma-separated kernels (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/kernels/<device>.json)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a kernel's constant; repeatable"
    )
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(JOBS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; expected some of {', '.join(JOBS)}")
    try:
        for change in options.set:
            set_constant(change)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured, nothing written", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    watch = CudaStopwatch(device)
    facts, bandwidth = cuda_facts(device, None, "not opened"), device_bandwidth(device, watch)
    path = options.out or RESULTS / "kernels" / f"{slug(facts['device'])}.json"
    rows: list[Row] = []
    failures: dict[str, str] = {}
    data = {**facts, "copy_gb_per_s": round(bandwidth / 1e9, 2), "rows": rows, "failures": failures}

    def save(row: Row) -> None:
        rows.append(row)
        if not options.set:
            write(data, path)

    measure(device, watch, bandwidth, wanted, save, failures)
    if options.set:
        print(f"with {', '.join(options.set)}: nothing is written")
    else:
        print(f"wrote {path}" if rows else "nothing was measured")
    return int(bool(failures) or not rows)


if __name__ == "__main__":
    sys.exit(main())
