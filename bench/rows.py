"""What a benchmark row is, and how result files are written and checked."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timer
import torch
from inputs import ABSENT
from timer import Timing

import gpu_lod as lod
from gpu_lod.calibration import cpu
from gpu_lod.report.files import SCHEMA, problem_of
from gpu_lod.report.rows import kind_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

_LIBRARIES = ("moderngl", "kornia", "opencv-python-headless", "scikit-image", "pillow")
HWC = "sides marked HWC get their picture in that order, put so outside the timed part"

ALLOWED_RATIO, ALLOWED_MS = 1.05, 0.020
"""How far `auto` may be behind the fastest call: the larger of the two, plus the row's spread."""
GRAPH = "graph of "
"""In the names of sides that repeat a CUDA graph."""


def keeps_up(auto: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether `auto` is no further behind than that, of two sides' times."""
    most = max(other["median_ms"] * ALLOWED_RATIO, other["median_ms"] + ALLOWED_MS)
    return auto["median_ms"] <= most + max(other["iqr_ms"], auto["iqr_ms"])


@dataclass
class Row:
    """One job at one size. Names of sides: "torch ..." are plain torch, "gl ..." ours, "auto" what a caller gets, and
    anything else another library."""

    verb: str
    part: str
    """end to end; zero-copy in; kernel or bridge, which are parts of a call; or fixed cost, of a call without work."""
    height: int
    width: int
    batch: int
    channels: int
    dtype: str
    cache: str
    moved_bytes: int
    """That must be read and written at the least."""
    sides: dict[str, Timing]
    note: str = ""
    other_job: Mapping[str, str] = field(default_factory=dict)
    """Sides that do less or something else, listed but never an opponent, and why."""
    extra: dict[str, Any] = field(default_factory=dict)

    def best(self, kind: str, *, called: bool = False) -> str | None:
        """The fastest side of a kind that does the job: gl, torch, or a peer, which is another library's.

        Args:
            called: of those that are calls, and no graphs of them: only a plan, as `auto` is none, can be one.
        """
        names = [name for name in self.sides if kind_of(name) == kind and name not in self.other_job]
        names = [name for name in names if not (called and GRAPH in name)]
        return min(names, key=lambda name: self.sides[name].median_ms) if names else None

    def as_dict(self, bandwidth: float) -> dict[str, Any]:
        torch_best, gl_best = self.best("torch"), self.best("gl")
        floor_ms = self.moved_bytes / bandwidth * 1e3
        result: dict[str, Any] = {
            "verb": self.verb,
            "part": self.part,
            "size": [self.height, self.width],
            "batch": self.batch,
            "channels": self.channels,
            "dtype": self.dtype,
            "cache": self.cache,
            "floor_ms": round(floor_ms, 5),
            "sides": {name: timing.as_dict() for name, timing in self.sides.items()},
            "other_job": {name: why for name, why in self.other_job.items() if name in self.sides},
            "note": self.note,
            **self.extra,
        }
        if any("HWC" in name for name in self.sides):
            result["layout"] = HWC
        if peer_best := self.best("peer"):
            result["best_peer"] = peer_best
        if torch_best and gl_best:
            result["best_torch"], result["best_gl"] = torch_best, gl_best
            result["gl_speedup"] = round(self.sides[torch_best].median_ms / self.sides[gl_best].median_ms, 3)
        called = self.best("torch", called=True)
        if called and "auto" in self.sides:
            best, auto = self.sides[called], self.sides["auto"]
            result["auto_behind_ms"] = round(auto.median_ms - best.median_ms, 5)
            result["auto_ok"] = keeps_up(vars(auto), vars(best))
        return result


def _commit() -> str:
    if given := os.environ.get("GPU_LOD_COMMIT"):  # where there is a copy without its history
        return given
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


COMMIT = _commit()
"""Of what runs: asked for when it is loaded, for the checkout may be another by the time that all is measured."""


def common() -> dict[str, Any]:
    """What a result file says of the machine and the program, whatever the tensors are on."""
    return {
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"gpu_lod": lod.__version__, "torch": torch.__version__, **versions(_LIBRARIES)},
        "commit": COMMIT,
        "races_repeated": timer.repeated,
        "date": time.strftime("%Y-%m-%d"),
    }


def slug(name: str) -> str:
    """A device's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def nvidia_driver() -> str:
    """The version of NVIDIA's driver."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    except (OSError, StopIteration):
        return "unknown"


def cuda_facts(device: torch.device, ctx: lod.Context | None, problem: str) -> dict[str, Any]:
    """What the result files of CUDA tensors say of the machine.

    Args:
        problem: why there is no context.
    """
    about = common()
    about["versions"] |= versions(("triton", "cuda-bindings"))
    return {
        "device": torch.cuda.get_device_name(device),
        "gl_renderer": ctx.renderer if ctx else f"none: {problem}",
        "software": bool(ctx and ctx.software),
        "driver": ctx.driver if ctx else "none",
        "cuda": torch.version.cuda or "unknown",
        "cuda_driver": nvidia_driver(),
        **about,
    }


def copy_bandwidth() -> float:
    """Bytes a second of torch's copy, read plus written, beyond the caches."""
    source, target = torch.rand(2**26), torch.empty(2**26)
    target.copy_(source)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / best


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def save(rows: list[Row], path: Path | None = None, *, memory_kept: bool = False) -> Path:
    """Write a result file for this device; it must fit the schema.

    Args:
        memory_kept: `timer.keep_memory`.
    """
    ctx = lod.Context()
    bandwidth = copy_bandwidth()
    data = {
        "schema": SCHEMA["properties"]["schema"]["const"],
        "device": ctx.renderer,
        "software": ctx.software,
        "driver": ctx.driver,
        "borrowed": ctx.host.borrows,
        "memory_kept": memory_kept,
        **common(),
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "absent": dict(sorted(ABSENT.items())),
        "rows": [row.as_dict(bandwidth) for row in rows],
    }
    if problem := problem_of(data):
        raise ValueError(f"the rows do not fit the schema: {problem}")
    if path is None:
        name, _, _ = ctx.renderer.partition("(")
        path = RESULTS / f"{slug(f'{name} {torch.get_num_threads()} cores')}.json"
    write(data, path)
    return path


def write(data: dict[str, Any], path: Path) -> None:
    """In one step, so that whoever reads it, or a run that is killed, finds a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(unfinished, path)


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Of the packages among these that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    result = {}
    for name in names:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result
