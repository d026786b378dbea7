"""What allocators cost, from a picture to its patches: bench/results/allocate/<device>.json and docs/allocators.md.

python bench/bench_allocate.py [--quick] [--device cuda] [--only GridTopK,Voronoi] [--out FILE] [--seconds S]
python bench/bench_allocate.py --doc   put the tables and plots of all result files into docs/allocators.md

The first job is one picture of 1024 x 1024 on a grid of 64 x 64, K = 273, with the relevance given and without; then 32
such pictures, of which no cache holds them all, in a call and, by turns with that, in a call each; then the sites alone
over the side of the grid and over K (with patches of 4 x 4 for those that look at the picture). On a GPU, where
launches cost more than what is launched, pictures are measured as plans too: CUDA graphs, new pictures copied in.
Learned allocators are as they are made, untrained, without gradients. The file is saved after each job, and an
allocator that fails is in it with the reason: a run that is stopped, or trips on a device, leaves what it has measured.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import timer
import torch
from cuda_timer import short
from inputs import picture
from rows import RESULTS, common, slug, write
from timer import race, wall_ms

import gpu_lod as lod

JOBS = "patches", "patches, no relevance"
EACH, PLANNED = "a call each", "planned"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["device", "tensors", "cpu", "threads", "versions", "commit", "date", "rows"],
    "properties": {
        "tensors": {"enum": ["cpu", "cuda"]},
        "rows": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["allocator", "job", "grid", "patch", "batch", "budget", "median_ms", "iqr_ms", "calls"],
                "properties": {
                    "job": {"enum": [*JOBS, *(f"{job}, {how}" for job in JOBS for how in (EACH, PLANNED)), "sites"]},
                    "median_ms": {"type": "number", "exclusiveMinimum": 0},
                    "calls": {"type": "integer", "minimum": 4},
                },
            },
        },
    },
}
TORCH = "plain torch top-k"
"""topk of the relevance and patches by indexing: what one writes without a library, and what GridTopK has to face."""
BUDGET, GRID, PATCH = 273, 64, 16
GRIDS, BUDGETS = (16, 32, 64, 128, 256), (64, 128, 273, 576, 1024)
Row = dict[str, Any]
Side = Callable[[], object]
Key = tuple[str, str]
"""(allocator, job)"""


def plain(image: torch.Tensor, relevance: torch.Tensor, budget: int) -> torch.Tensor:
    """[B, K, C, P, P] of sides that are multiples of P."""
    index = torch.topk(relevance.flatten(1), budget).indices
    every = image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)  # a view: nothing is copied
    columns = every.shape[2]
    return every[torch.arange(len(index), device=index.device)[:, None], index // columns, index % columns]


def ready(name: str, budget: int, patch: int, device: str) -> Any:
    allocator = lod.allocate.make(name, budget, patch)
    return allocator.eval().to(device) if isinstance(allocator, torch.nn.Module) else allocator


def given_to(allocator: Any, batch: int, device: str) -> dict[str, Any]:
    """What it needs beside a picture and relevance."""
    generator = torch.Generator().manual_seed(0)
    values = {
        "query": torch.randn(batch, allocator.query_width or 8, generator=generator).to(device),
        "fixation": torch.rand(batch, 2, generator=generator),
    }
    return {need: value for need, value in values.items() if need in allocator.needs}


def rows(names: list[str], device: str, quick: bool, failures: dict[str, str]) -> Iterator[list[Row]]:
    """One job after the other, its allocators by turns; what fails is added to `failures`, by job and allocator."""
    grid, batch = (16, 2) if quick else (GRID, 32)
    for count in (1, batch):
        budget = 20 if quick else BUDGET
        image = picture(grid * PATCH, grid * PATCH, batch=count).to(device)
        relevance = torch.rand(count, grid, grid, generator=torch.Generator().manual_seed(1)).to(device)
        for job, maps in zip(JOBS, (relevance, None), strict=True):
            sides: dict[Key, Side] = {}
            for name in names:
                allocator = ready(name, budget, PATCH, device)
                given = given_to(allocator, count, device)
                sides[name, job] = partial(allocator, image, maps, **given)
                if device == "cuda":
                    sides[name, f"{job}, {PLANNED}"] = Planned(allocator, image, maps, given)
                if count > 1:
                    sides[name, f"{job}, {EACH}"] = partial(one_by_one, allocator, image, maps)
            if maps is not None:
                sides[TORCH, job] = partial(plain, image, relevance, budget)
            # No other allocator between a batch and its pictures one by one: a machine's mood lasts for minutes.
            races = [sides]
            if count > 1:
                races = [{key: side for key, side in sides.items() if key[0] == name} for name in [*names, TORCH]]
            yield [row for some in races for row in timed(some, grid, PATCH, count, budget, device, failures)]
    for side, budget in [(16, 64), (32, 64)] if quick else over(GRIDS, BUDGETS):
        patch = 4
        image = picture(side * patch, side * patch).to(device)
        relevance = torch.rand(1, side, side, generator=torch.Generator().manual_seed(1)).to(device)
        sides = {}
        for name in names:
            allocator = ready(name, budget, patch, device)
            pixels = image if "image" in allocator.needs else None
            sides[name, "sites"] = partial(allocator, pixels, relevance, **given_to(allocator, 1, device))
        yield timed(sides, side, patch, 1, budget, device, failures)


class Planned:
    """Calls of a plan, which the first one makes; an error if it repeats nothing."""

    def __init__(self, allocator: Any, image: torch.Tensor, maps: torch.Tensor | None, given: dict[str, Any]) -> None:
        self._arguments = allocator, image, maps, given
        self._tensors = [value for value in (image, maps, *given.values()) if value is not None]
        self._plan: lod.Plan | None = None

    def __call__(self) -> object:
        if self._plan is None:
            allocator, image, maps, given = self._arguments
            plan = lod.plan(allocator, image, maps, **given)
            if not plan.replays:
                raise RuntimeError(plan.reason)
            self._plan = plan
        return self._plan(*self._tensors)

    def forget(self) -> None:
        """Its graph holds memory of its own."""
        self._plan = None


def one_by_one(allocator: Any, image: torch.Tensor, maps: torch.Tensor | None) -> list[object]:
    """A call for each picture."""
    given = given_to(allocator, len(image), image.device.type)
    return [
        allocator(
            image[i : i + 1], None if maps is None else maps[i : i + 1], **{k: v[i : i + 1] for k, v in given.items()}
        )
        for i in range(len(image))
    ]


def over(grids: tuple[int, ...], budgets: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each side at K (or the cells there are), and each K at the usual side."""
    return [(side, min(BUDGET, side * side)) for side in grids] + [(GRID, k) for k in budgets if k != BUDGET]


def timed(
    sides: dict[Key, Side],
    grid: int,
    patch: int,
    batch: int,
    budget: int,
    device: str,
    failures: dict[str, str],
) -> list[Row]:
    """A row for each side that runs."""
    often = {"fewest": 4, "most": 4, "warm_up": 0} if batch > 1 else {"most": 16}  # a large batch takes a second
    clock = wall_ms if device == "cpu" else synchronised_ms
    able: dict[Key, Side] = {}
    with torch.no_grad():
        for (name, job), side in sides.items():
            try:
                clock(side)  # the warm-up of large batches
                able[name, job] = side
            except Exception as error:
                failures[f"{job}, grid {grid}, K {budget}, batch {batch}: {name}"] = short(error)
        found = race(able, seconds=0.3, clock=clock, **often)
    for side in sides.values():
        if isinstance(side, Planned):
            side.forget()
    return [
        {
            "allocator": name, "job": job, "grid": [grid, grid], "patch": patch, "batch": batch, "budget": budget,
            **timing.as_dict(),
        }
        for (name, job), timing in found.items()
    ]  # fmt: skip


def synchronised_ms(side: Side) -> float:
    torch.cuda.synchronize()
    return wall_ms(lambda: (side(), torch.cuda.synchronize()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doc", action="store_true", help="bring docs/allocators.md up to date, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="small pictures: to see that it works")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="comma-separated names (default: all)")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/allocate/<device>.json)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many no further job begins")
    options = parser.parse_args(arguments)
    if options.doc:
        import allocate_doc

        allocate_doc.update()
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured, nothing written", file=sys.stderr)
        return 1
    names = options.only.split(",") if options.only else lod.allocate.names()
    if unknown := set(names) - set(lod.allocate.names()):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    if options.quick or options.device == "cuda":  # time on a GPU is short
        timer.TRIES = 1
    about = common() | {"memory_kept": not options.quick and timer.keep_memory()}
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{about['cpu']} {about['threads']} cores"
    path = options.out or RESULTS / "allocate" / f"{slug(device)}.json"
    found: list[Row] = []
    failures: dict[str, str] = {}
    data: dict[str, Any] = {"device": device, "tensors": options.device, **about, "rows": found, "failures": failures}
    end = time.monotonic() + options.seconds
    for part in rows(names, options.device, options.quick, failures):
        found += part
        write(data, path)
        for first in part[:1]:
            print(f"{first['job']}: grid {first['grid'][0]}, K {first['budget']}, batch {first['batch']}", flush=True)
        if time.monotonic() > end:
            print("out of time: further jobs are left out", flush=True)
            break
    try:
        import jsonschema

        jsonschema.validate(data, SCHEMA)
    except ImportError:
        pass  # the tests check the files that are kept
    print(f"wrote {path}")
    for name, why in failures.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
