"""What it costs to share memory between CUDA and OpenGL, and what it gains.

- cost: unmapping and mapping 1 to 8 buffers in one call each, by themselves: what it takes the CPU and the GPU.
- share: the same inside a verb, and its share of the verb's time.
- end to end: a mip chain from CUDA tensor to CUDA tensors, against the way through the host and against torch.
- uploads: pyramids to textures by the library's shader pass, and by copies into the texture's own memory.
- small calls: does anything grow over many of them?

Each part is independent of the others; what fails is in the file and the rest goes on.

python bench/bench_bridge.py [--out FILE] [--seconds S]

Source: "Graphics Interoperability" and "OpenGL Interoperability" of the CUDA runtime API.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_mipmap import torch_ways
from bridge_cost import P50_US, P99_US, Rig, cost, p50_p99, repeat, share
from cuda_timer import CudaStopwatch, Sides, short, wall_ms
from inputs import picture
from mapped_arrays import MappedArrays, matches
from rows import cuda_facts, write

import gpu_lod as lod

SHARES = {"cost": 0.06, "share": 0.06, "end_to_end": 0.08, "uploads": 0.1, "small_calls": 0.7}
"""Of the seconds, for each part. Small calls, which come last, end before their time if all have been made."""
TARGETS = {"p50_us": P50_US, "p99_us": P99_US, "share_at_4096": 0.2, "host_factor_at_2048": 10.0}
COUNTS, BUFFER_BYTES = (1, 2, 4, 8), (2**20, 2**26)
SHARE_SIDES, SIDES, UPLOAD_SIDES = (224, 1024, 2048, 4096), (1024, 2048, 4096), (1024, 4096)
CHANNELS = (1, 3, 4)
SMALL_CALLS = 10**5

_MICROSECONDS = {"type": "number", "minimum": 0}
_COST: dict[str, Any] = {
    "anyOf": [
        {"required": ["error"]},
        {
            "required": [
                "calls", "p50_us", "p99_us", "unmap_p50_us", "unmap_p99_us", "map_p50_us", "map_p99_us", "cpu_us",
                "with_synchronise_p50_us", "with_synchronise_p99_us", "back_to_back_p50_us", "back_to_back_p99_us",
                "met",
            ],
        },
    ],
    "patternProperties": {"_us$": _MICROSECONDS},
}  # fmt: skip
"""What `bridge_cost.cost` finds, `gpu_us` on a CUDA device alone."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["schema", "experiment", "device", "gl_renderer", "driver", "targets", "seconds", *SHARES],
    "properties": {
        "schema": {"const": 1},
        "experiment": {"const": "bridge"},
        **{
            part: {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "error": {"type": "string", "minLength": 1}},
                    "minProperties": 2,
                    **(_COST if part == "cost" else {}),
                },
            }
            for part in SHARES
        },
    },
}


@dataclass
class Bench(Rig):
    """The context under test, and the file."""

    seconds: float
    result: dict[str, Any]
    save: Callable[[], object] = lambda: None
    _pictures: dict[int, torch.Tensor] = field(default_factory=dict)

    def attempt(self, part: str, name: str, call: Callable[[], dict[str, Any]]) -> None:
        """Add what `call` finds to a part of the file, or the error that it ends with."""
        try:
            entry = call()
        except Exception as error:
            entry = {"error": short(error)}
        self.result[part].append({"name": name, **entry})
        print(f"{part}: {line(self.result[part][-1])}", flush=True)
        with suppress(OSError):
            self.save()

    def slice(self, part: str, parts: int) -> float:
        """Seconds for one of some equal parts of a part."""
        return self.seconds * SHARES[part] / parts

    def image(self, side: int, channels: int = 3) -> torch.Tensor:
        """A square image of 1 to 4 channels, not to be written to."""
        if side not in self._pictures:
            self._pictures[side] = picture(side, side).to(self.device)
        return self._pictures[side][:, [0, 1, 2, 0][:channels]].contiguous()

    def held(self, image: torch.Tensor) -> torch.Tensor:
        """The image in GL memory."""
        return self.ctx.empty(tuple(image.shape), dtype=image.dtype, device=self.device).copy_(image)


def line(entry: dict[str, Any]) -> str:
    """An entry in one line."""
    plain = {key: value for key, value in entry.items() if not isinstance(value, dict)}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items())


# -- from tensor to tensor ---------------------------------------------------------------------------------------------


def end_to_end(bench: Bench, side: int, seconds: float) -> dict[str, Any]:
    """A mip chain of an RGB image. Level 0 is the image, so only the levels below it are to come back."""
    ctx, device = bench.ctx, bench.device
    image = bench.image(side)
    held = bench.held(image)

    def back(pyramid: lod.Pyramid) -> list[torch.Tensor]:
        return [level.to(device) for level in pyramid.levels[1:]]

    def through_host(generator: str) -> list[torch.Tensor]:
        with ctx:
            return back(lod.mipmap(image.cpu(), generator=generator))  # type: ignore[arg-type]

    def through_mapped_memory() -> list[torch.Tensor]:
        with ctx:
            here = ctx.empty(tuple(image.shape), dtype=image.dtype, device="cpu").copy_(image)
            return back(lod.mipmap(here, backend="gl"))

    ways, _ = torch_ways(side, side)
    planned = lod.plan(lod.mipmap, image, backend="gl")
    sides = Sides(bench.watch)
    for name, way in {
        "gl": lambda: lod.mipmap(image, backend="gl"),
        "gl, planned": lambda: planned(image),
        "gl, image in GL memory": lambda: lod.mipmap(held, backend="gl"),
        "gl fragment": lambda: lod.mipmap(image, generator="fragment"),
        "host, compute": lambda: through_host("compute"),
        "host, texture and fragment": lambda: through_host("fragment"),
        "host, straight into mapped GL memory": through_mapped_memory,
        **{name: partial(way, image) for name, way in ways.items()},
    }.items():
        sides.add(name, lambda way=way: way)  # type: ignore[misc]
    timings = sides.race(seconds=seconds / max(2 * len(sides.ways), 1), block=4, fewest=12)
    medians = {name: timing.median_ms for name, timing in timings.items()}
    return {
        "size": side,
        "sides": {name: timing.as_dict() for name, timing in timings.items()},
        **({"dropped": sides.dropped} if sides.dropped else {}),
        **factors(medians),
    }


def factors(medians: dict[str, float]) -> dict[str, Any]:
    """How many times as long as "gl" the best way through the host takes, and the best torch."""
    found: dict[str, Any] = {}
    for kind in ("host", "torch"):
        names = [name for name in medians if name.startswith(kind)]
        if names and "gl" in medians:
            best = min(names, key=medians.__getitem__)
            found[f"best_{kind}"] = best
            found[f"{kind}_factor"] = round(medians[best] / medians["gl"], 3)
    return found


# -- uploads -----------------------------------------------------------------------------------------------------------


def upload(bench: Bench, levels: list[torch.Tensor], seconds: float) -> dict[str, Any]:
    """The library's way: staging buffers where the levels are in ordinary memory, and a shader pass."""
    took: list[float] = []

    def once() -> None:
        took.append(wall_ms(lambda: lod.Pyramid(tuple(levels)).upload(bench.ctx), bench.watch) * 1e-3)

    repeat(once, 0, 3, 3)
    took.clear()
    calls = repeat(once, seconds, 30, 500)
    pyramid = lod.Pyramid(tuple(levels)).upload(bench.ctx)
    with bench.ctx.active(levels[0].device):
        [(_, texture)] = pyramid.textures(bench.ctx)
        correct = matches(bench.ctx, texture, levels)
    return {"calls": calls, **_speed(took, levels), "correct": bool(correct())}


def copy_into_arrays(bench: Bench, levels: list[torch.Tensor], flags: int, seconds: float) -> dict[str, Any]:
    """Copies on the device into the memory of the texture itself, of texels that torch interleaves."""
    from cuda.bindings import runtime

    took: list[float] = []
    interleaving: list[float] = []
    with bench.ctx.active(bench.device):
        arrays = MappedArrays(bench.ctx, bench.bridge.driver, runtime, levels, flags)
        try:

            def once() -> None:
                start = time.perf_counter()
                texels = arrays.interleave(levels)
                bench.watch.synchronize()
                middle = time.perf_counter()
                arrays.copy(texels)
                bench.watch.synchronize()
                interleaving.append(middle - start)
                took.append(time.perf_counter() - start)

            repeat(once, 0, 3, 3)
            took.clear()
            interleaving.clear()
            calls = repeat(once, seconds, 30, 500)
            correct = matches(bench.ctx, arrays.texture, levels)
        finally:
            arrays.close()
    return {
        "calls": calls,
        **_speed(took, levels),
        **p50_p99(interleaving, "interleave_"),
        "register_us": round(arrays.register_seconds * 1e6, 3),
        "way": arrays.way,
        "correct": bool(correct()),
    }


def _speed(seconds: list[float], levels: list[torch.Tensor]) -> dict[str, float]:
    """Time, and the pyramid's bytes over it."""
    nbytes = sum(level.nbytes for level in levels)
    return p50_p99(seconds) | {"gb_per_s": round(nbytes / statistics.median(seconds) / 1e9, 3)}


# -- many small calls --------------------------------------------------------------------------------------------------


def footprint(bench: Bench) -> dict[str, int]:
    """What grows if something leaks: host and device memory, and objects in the pools."""
    gc.collect()
    with bench.ctx.active(bench.device):
        pass  # takes back what has died
    bench.watch.synchronize()
    ctx = bench.ctx
    pools = {"shared": bench.bridge.pool, "private": ctx.private.pool, "texture": ctx.textures.pool}
    found = {f"{name}_{kind}": getattr(pool, kind) for name, pool in pools.items() for kind in ("leased", "idle")}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free = torch.cuda.mem_get_info(bench.device)[0] if bench.device.type == "cuda" else 0
    return {"host_bytes": resident, "device_free_bytes": free, **found}


def small_calls(bench: Bench, seconds: float, most: int = SMALL_CALLS) -> dict[str, Any]:
    """Mip chains and now and then a log-polar map of so small an image that there is time for many, over and over."""
    image = torch.rand(1, 1, 4, 4, device=bench.device)

    def once() -> None:
        lod.mipmap(image, backend="gl")

    def sampled() -> None:
        lod.log_polar(image, (0.4, 0.6), 4, 8, backend="gl")

    def fifty() -> None:
        for _ in range(49):
            once()
        sampled()

    with bench.ctx:
        repeat(fifty, 0, 4, 4)
        before = footprint(bench)
        start = time.perf_counter()
        calls = 50 * repeat(fifty, seconds / 2, 1, most // 100)
        half = footprint(bench)
        calls += 50 * repeat(fifty, seconds / 2, 1, most // 100)
        took = time.perf_counter() - start
        after = footprint(bench)
    return {
        "calls": calls,
        "wanted_calls": most,
        "us_a_call": round(took / calls * 1e6, 3),
        **growth(before, half, after),
        "before": before,
        "after": after,
    }


def growth(before: dict[str, int], half: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Over all calls, and over the second half of them, in which nothing has to warm up any more."""
    pools = [name for name in before if name.endswith(("leased", "idle"))]
    return {
        "host_growth_bytes": after["host_bytes"] - before["host_bytes"],
        "host_growth_second_half_bytes": after["host_bytes"] - half["host_bytes"],
        "device_growth_bytes": before["device_free_bytes"] - after["device_free_bytes"],
        "device_growth_second_half_bytes": half["device_free_bytes"] - after["device_free_bytes"],
        "pools_flat": all(before[name] == half[name] == after[name] for name in pools),
    }


# -- all of it ---------------------------------------------------------------------------------------------------------


def run(bench: Bench) -> None:
    """All parts; never raises for what goes wrong in one."""
    attempt = bench.attempt
    seconds = bench.slice("cost", len(COUNTS) * len(BUFFER_BYTES) + 1)
    with suppress(Exception):  # what a process does once, in the driver and the clocks, is no row's
        cost(bench, COUNTS[0], BUFFER_BYTES[0], seconds)
    for nbytes in BUFFER_BYTES:
        for count in COUNTS:
            name = f"{count} buffers of {nbytes >> 20} MiB"
            attempt("cost", name, partial(cost, bench, count, nbytes, seconds))
    for side in SHARE_SIDES:
        seconds = bench.slice("share", 2 * len(SHARE_SIDES))
        attempt("share", f"mipmap {side}", partial(_share_of_mipmap, bench, side, False, seconds))
        held = f"mipmap {side}, image in GL memory"
        attempt("share", held, partial(_share_of_mipmap, bench, side, True, seconds))
    for side in SIDES:
        attempt("end_to_end", f"mipmap {side}", partial(end_to_end, bench, side, bench.slice("end_to_end", len(SIDES))))
        _tidy(bench)
    for side in UPLOAD_SIDES:
        for channels in CHANNELS:
            _uploads(bench, side, channels, bench.slice("uploads", 4 * len(UPLOAD_SIDES) * len(CHANNELS)))
            _tidy(bench)
    attempt("small_calls", "4 x 4", partial(small_calls, bench, bench.slice("small_calls", 1)))


def _share_of_mipmap(bench: Bench, side: int, in_gl_memory: bool, seconds: float) -> dict[str, Any]:
    image = bench.image(side)
    if in_gl_memory:
        image = bench.held(image)
    return {"size": side, **share(bench, lambda: lod.mipmap(image, backend="gl"), seconds)}


def _uploads(bench: Bench, side: int, channels: int, seconds: float) -> None:
    what = f"{channels} x {side} x {side}"
    levels: list[torch.Tensor] = []

    def made(backend: str) -> list[torch.Tensor]:
        levels[:] = lod.mipmap(bench.image(side, channels), backend=backend)  # type: ignore[arg-type]
        return levels

    attempt = partial(bench.attempt, "uploads")
    attempt(f"library, levels in GL memory, {what}", lambda: upload(bench, made("gl"), seconds))
    attempt(f"library, levels in ordinary memory, {what}", lambda: upload(bench, made("torch"), seconds))
    for name, flags in (("none", 0), ("surface load and store", 4)):

        def copied(flags: int = flags) -> dict[str, Any]:
            return copy_into_arrays(bench, made("torch"), flags, seconds)

        attempt(f"copy into mapped arrays, flags {name}, {what}", copied)


def _tidy(bench: Bench) -> None:
    gc.collect()
    try:
        bench.ctx.trim()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    except Exception as error:
        print(f"tidying up: {short(error)}")


def verdicts(result: dict[str, Any]) -> list[str]:
    """The figures that have a target, in words."""
    says = []
    for entry in result["cost"]:
        if "p50_us" in entry:
            gpu = f", GPU {entry['gpu_us']:.1f} us" if "gpu_us" in entry else ""
            says.append(
                f"map and unmap of {entry['name']}: p50 {entry['p50_us']:.1f} us (target {TARGETS['p50_us']:g}), "
                f"p99 {entry['p99_us']:.1f} us (target {TARGETS['p99_us']:g}), CPU {entry['cpu_us']:.1f} us{gpu}"
            )
    for entry in result["share"]:
        if "share" in entry:
            target = f" (target {TARGETS['share_at_4096']:.0%})" if entry["size"] == 4096 else ""
            says.append(
                f"{entry['name']}: bridge p50 {entry['bridge_p50_us']:.1f} us, p99 {entry['bridge_p99_us']:.1f} us, "
                f"{entry['share']:.1%} of the call{target}"
            )
    for entry in result["end_to_end"]:
        if "host_factor" in entry:
            target = f" (target {TARGETS['host_factor_at_2048']:g})" if entry["size"] == 2048 else ""
            says.append(
                f"{entry['name']}: {entry['host_factor']:.2f}x of {entry['best_host']}{target}, "
                f"{entry.get('torch_factor', math.nan):.2f}x of {entry.get('best_torch', 'torch')}"
            )
    for entry in result["small_calls"]:
        if "calls" in entry:
            says.append(
                f"{entry['calls']} of {entry['wanted_calls']} small calls, {entry['us_a_call']:.0f} us each: device "
                f"memory grew by {entry['device_growth_bytes']} bytes (target 0), the host's by "
                f"{entry['host_growth_bytes']}, in the second half {entry['host_growth_second_half_bytes']}; pools "
                + ("stayed as they were" if entry["pools_flat"] else "GREW")
            )
    failed = sum("error" in entry for part in SHARES for entry in result[part])
    return [*says, f"{failed} of {sum(len(result[part]) for part in SHARES)} measurements failed"]


def unmeasured(result: dict[str, Any]) -> list[str]:
    """Parts of which nothing was measured."""
    return [part for part in SHARES if all("error" in entry for entry in result[part])]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="What sharing memory between CUDA and OpenGL costs, and what it gains."
    )
    parser.add_argument("--out", type=Path, default=Path("out/bridge.json"), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=80.0, help="for everything, about (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < math.inf:
        parser.error("--seconds must be more than 0")
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured, nothing written", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        ctx = lod.Context(device)
    except Exception as error:
        print(f"no OpenGL on {device}: {short(error)}", file=sys.stderr)
        return 1
    result: dict[str, Any] = {
        "schema": 1,
        "experiment": "bridge",
        **cuda_facts(device, ctx, ""),
        "targets": TARGETS,
        "seconds": options.seconds,
        **{part: [] for part in SHARES},
    }
    save = partial(write, result, options.out)
    run(Bench(ctx, device, CudaStopwatch(device), options.seconds, result, save))
    print("\n".join(verdicts(result)))
    problems = [f"nothing measured of {part}" for part in unmeasured(result)]
    try:
        import jsonschema

        jsonschema.validate(result, SCHEMA)
    except ImportError:
        pass
    except jsonschema.ValidationError as error:
        problems.append(f"the file does not fit its schema: {error.message}")
    if problems:
        print(f"{options.out}: {'; '.join(problems)}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
