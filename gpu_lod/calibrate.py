"""Measuring on this machine what "auto" decides: `gpu-lod calibrate`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from gpu_lod import calibration, tables
from gpu_lod.context import Context
from gpu_lod.cortical_sites import cortical_sites
from gpu_lod.cull import cull
from gpu_lod.dispatch import explain, ways
from gpu_lod.errors import GpuLodError, InputError, OutOfMemoryError
from gpu_lod.feature_maps import feature_maps
from gpu_lod.foveate import foveate
from gpu_lod.gather_patches import gather_patches
from gpu_lod.gaussian import gaussian
from gpu_lod.hiz import hiz
from gpu_lod.inverse_log_polar import inverse_log_polar
from gpu_lod.laplacian import collapse, laplacian
from gpu_lod.log_polar import log_polar
from gpu_lod.mipmap import mipmap
from gpu_lod.oriented_energy import oriented_energy
from gpu_lod.region import region_max
from gpu_lod.tables import Entry, Machine, Timed
from gpu_lod.timing import PAUSE, race

HOPELESS = 3.0
"""A way whose first calls take so many times torch's is measured no further."""

Arguments = Callable[[], tuple[Any, ...]]
"""The arguments of the next call: a fixation is a new one every time."""


@dataclass(frozen=True)
class Case:
    """A job that some way does fastest."""

    verb: Callable[..., Any]
    at: str
    prepare: Callable[[torch.device], Arguments]


@dataclass
class Report:
    """What a calibration measured."""

    entries: dict[Machine, list[Entry]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Jobs for which there was no time, or which failed, and why."""
    paths: list[Path] = field(default_factory=list)
    busy: str = ""
    """What the machine was at when the measuring began, if that was much: times then say little."""


Progress = Callable[[int, int, str], None]
"""Told how many jobs are done, of how many, and what comes next."""


def calibrate(
    minutes: float = 1.0,
    verbs: Sequence[str] | None = None,
    *,
    quick: bool = False,
    devices: Sequence[str | torch.device] | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Report:
    """Measure every way of the verbs on this machine, and keep the times: "auto" goes by them from then on.

    The ways of a job take turns, with a pause before each turn; a job's times are medians and interquartile ranges by
    the wall clock, on a GPU with a synchronise behind every call. They are kept in the user's cache folder, a file a
    machine and driver, and replace older times of the same job; $GPU_LOD_CACHE is another folder, or "off". What was
    measured when something raises, Ctrl-C too, is kept.

    Units: minutes.

    Args:
        minutes: how long it may take, roughly. The most telling jobs come first; those for which no time is left are
            in the report.
        verbs: their names; None is all.
        quick: few jobs, and short.
        devices: where the tensors are; None is the CPU, and the current CUDA device if there is one.
        progress: called before every job.
        report: filled while the jobs run, for a caller who wants what was measured before something was raised.

    Raises:
        InputError: unknown verbs, no time, $GPU_LOD_CACHE is "off".
        FileError: the times cannot be kept.
    """
    report = Report() if report is None else report
    if not 0 < minutes < math.inf:
        raise InputError(f"minutes is {minutes}; expected more than 0.")
    if devices is None:
        devices = ["cpu", *([torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else [])]
    jobs = [(case, torch.device(device)) for case in _cases(verbs, quick=quick) for device in devices]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cores:
        report.busy = f"a load of {load:.1f} on {cores} cores"
    end = time.monotonic() + 60 * minutes
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for number, (case, device) in enumerate(jobs):
                name = f"{case.verb.__name__}, {case.at}" + (f" on {device}" if len(devices) > 1 else "")
                left = end - time.monotonic()
                if left <= 0:
                    report.left_out.append(f"{name}: no time was left")
                    continue
                if progress is not None:
                    progress(number, len(jobs), name)
                try:
                    machine, entry = _measure(case, device, left / (len(jobs) - number), quick=quick)
                    report.entries.setdefault(machine, []).append(entry)
                except (GpuLodError, MemoryError, RuntimeError) as error:
                    report.left_out.append(f"{name}: {error}".partition("\n")[0])
            if progress is not None:
                progress(len(jobs), len(jobs), "")
    finally:
        if report.entries:
            report.paths = [tables.store(machine, entries) for machine, entries in report.entries.items()]
            calibration.reload()
    return report


def _measure(case: Case, device: torch.device, seconds: float, *, quick: bool) -> tuple[Machine, Entry]:
    """The times of one job, by every way that can do it here."""
    following = case.prepare(device)
    with calibration.hearing() as questions:
        chosen = explain(case.verb, *following())
    if not questions:  # nothing that times decide
        raise GpuLodError(chosen.reason)
    question = questions[-1]
    cuda = device.type == "cuda"
    wait = partial(torch.cuda.synchronize, device) if cuda else None
    sides: dict[str, Callable[[], object]] = {}
    times: dict[str, Timed] = {}
    for way in ways(question.verb):
        backend, _, generator = way.partition(" ")
        how = {"backend": backend, **({"generator": generator} if generator else {})}

        def side(how: dict[str, str] = how) -> object:
            return case.verb(*following(), **how)

        try:
            side()
            first = [_milliseconds(side, wait) for _ in range(2)]
        except (MemoryError, OutOfMemoryError, torch.cuda.OutOfMemoryError):
            raise
        except (GpuLodError, RuntimeError):
            if way == "torch":
                raise
            continue
        times[way] = Timed(sum(first) / 2, abs(first[0] - first[1]))
        if way == "torch" or min(first) < HOPELESS * times["torch"].median_ms:
            sides[way] = side
    timed = race(
        sides,
        seconds=0.02 if quick else min(max(seconds / len(sides), 0.05), 0.5),
        fewest=8,  # a turn in which the machine was busy shows in the spread
        warm_up=0,
        pause=0 if cuda else PAUSE,
        synchronize=wait,
    )
    times |= {way: Timed(timing.median_ms, timing.iqr_ms) for way, timing in timed.items()}
    return machine(device), Entry(question, case.at, time.strftime("%Y-%m-%d"), times)


def _milliseconds(side: Callable[[], object], wait: Callable[[], object] | None) -> float:
    start = time.perf_counter()
    side()
    if wait is not None:
        wait()
    return (time.perf_counter() - start) * 1e3


def machine(device: torch.device) -> Machine:
    """This one, with the OpenGL that verbs use for tensors on a device."""
    try:
        context = Context(device)
        gl = context.renderer, context.driver, context.software
    except Exception:  # whatever a driver raises: torch and CUDA ways are measured all the same
        gl = "", "", False
    host = calibration.host(device, torch.get_num_threads())
    return Machine(*host, calibration.driver(device), *gl)


# -- the jobs ------------------------------------------------------------------------------------------------------

_ROUNDS = (
    (512, 1, True), (1024, 1, True), (224, 8, True), (224, 1, True), (512, 1, False), (1024, 1, False), (224, 8, False),
    (2048, 1, True), (512, 8, True), (224, 32, True), (2048, 1, False), (224, 1, False), (512, 8, False),
    (224, 32, False),
)  # fmt: skip
"""(side, batch, whether it is what most callers do), the most telling ones first."""
_BUSY = 0.5
"""Load a core, from which on the machine has other things to do."""


def _cases(verbs: Sequence[str] | None, *, quick: bool) -> list[Case]:
    rounds = ((224, 1, True),) if quick else _ROUNDS
    cases = [case for side, batch, common in rounds for case in (_common if common else _rare)(side, batch)]
    names = {case.verb.__name__ for case in cases}
    if unknown := {*(verbs or ())} - names:
        raise InputError(f"there is no {', '.join(sorted(unknown))} to measure; expected {', '.join(sorted(names))}.")
    return [case for case in cases if not verbs or case.verb.__name__ in verbs]


def _common(side: int, batch: int) -> Iterator[Case]:
    """The jobs of most callers at one size."""
    shape, maps = (batch, 3, side, side), (batch, 1, side, side)
    for dtype in (torch.float32, torch.uint8):
        yield from _samplers(shape, dtype)
    yield _case(region_max, maps, torch.float32, _boxes, "4096 boxes")
    yield _case(cull, maps, torch.float32, _sparse, "20% kept")
    if batch * side**2 <= 2**20:  # forty channels of more are a strain on memory
        for dtype in (torch.float32, torch.float16):
            yield _features_as(shape, dtype)
    yield _case(hiz, maps, torch.float32, _image, "")
    yield _case(mipmap, shape, torch.float32, _image, "")
    yield _case(mipmap, shape, torch.float32, _maximum, "")
    yield _case(inverse_log_polar, shape, torch.float32, _polar, "from a map of 256 x 512")
    yield _case(oriented_energy, maps, torch.float32, _five_levels, "5 levels")
    for verb in (gaussian, laplacian):
        yield _case(verb, shape, torch.float32, _five_levels, "5 levels")
    yield _case(collapse, shape, torch.float32, _bands, "5 levels")


def _rare(side: int, batch: int) -> Iterator[Case]:
    """Other dtypes, and sides that are no multiples of 4, which take other shaders."""
    shape, ragged = (batch, 3, side, side), (batch, 3, side, side + 1)
    yield from _samplers(shape, torch.float16)
    for dtype in (torch.uint8, torch.float16):
        yield _case(mipmap, shape, dtype, _image, "")
    yield _case(foveate, ragged, torch.uint8, _seen, "")
    if batch * side**2 <= 2**20:
        yield _features_as(ragged, torch.float32)


def _features_as(shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    return _case(feature_maps, shape, torch.float32, partial(_features, dtype), f"40 channels of {str(dtype)[6:]}")


def _samplers(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Case]:
    yield _case(foveate, shape, dtype, _seen, "")
    side = shape[-1]
    rings = 256 if side >= 1024 else 64 if side < 512 else 128
    yield _case(log_polar, shape, dtype, partial(_seen, rings, 2 * rings), f"{rings} x {2 * rings} samples")
    budget = 273 if side >= 512 else 64
    for whole in (False, True):
        yield _case(gather_patches, shape, dtype, partial(_sites, budget, whole), f"{budget} x 14 x 14 samples")


def _case(
    verb: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    prepare: Callable[[torch.Tensor], Arguments],
    words: str,
) -> Case:
    kind = str(dtype).removeprefix("torch.")

    def on(device: torch.device) -> Arguments:
        values = torch.rand(shape)
        image = values.mul_(255).to(dtype) if dtype == torch.uint8 else values.to(dtype)
        return prepare(image.to(device))

    return Case(verb, ", ".join(filter(None, [f"{' x '.join(map(str, shape))} {kind}", words])), on)


def _image(image: torch.Tensor) -> Arguments:
    return lambda: (image,)


def _maximum(image: torch.Tensor) -> Arguments:
    return lambda: (image, None, "max")


def _five_levels(image: torch.Tensor) -> Arguments:
    return lambda: (image, 5)


def _bands(image: torch.Tensor) -> Arguments:
    bands = laplacian(image, 5, backend="torch")
    return lambda: (bands,)


def _features(dtype: torch.dtype, image: torch.Tensor) -> Arguments:
    points = _points(image)
    return lambda: (image, next(points), None, None, dtype)


def _polar(image: torch.Tensor) -> Arguments:
    points, size = _points(image), image.shape[-2:]
    polar = torch.rand(*image.shape[:2], 256, 512, device=image.device)
    return lambda: (polar, next(points), size)


def _seen(*numbers: Any) -> Arguments:
    *sizes, image = numbers
    pyramid, points = mipmap(image, backend="torch").upload(), _points(image)
    return lambda: (pyramid, next(points), *sizes)


def _sites(budget: int, whole: bool, image: torch.Tensor) -> Arguments:
    pyramid = mipmap(image, backend="torch").upload()
    batch, _, height, width = image.shape
    several = []
    for _ in range(8):
        if whole:  # patches of the grid, as a top-k gives them
            columns = width // 14
            cells = torch.stack([torch.randperm(columns * (height // 14))[:budget] for _ in range(batch)])
            x, y = (cells % columns + 0.5) * 14 / width, (cells // columns + 0.5) * 14 / height
            several.append(torch.stack([x, y, torch.zeros_like(x)], dim=-1))
        else:
            several.append(cortical_sites(torch.rand(batch, 2), budget, (height, width)))
    sites = cycle([one.to(image.device) for one in several])
    return lambda: (pyramid, next(sites))


def _boxes(image: torch.Tensor) -> Arguments:
    hz = hiz(image, backend="torch").upload()
    boxes = torch.rand(image.shape[0], 4096, 2, 2).sort(dim=2).values.flatten(2).to(image.device)
    return lambda: (hz, boxes)


def _sparse(image: torch.Tensor) -> Arguments:
    """How much is pruned decides, and `auto` cannot know it: a map with little to prune."""
    hz = hiz(image, backend="torch")
    return lambda: (hz, 0.8)


def _points(image: torch.Tensor) -> Iterator[torch.Tensor]:
    return cycle(torch.rand(16, image.shape[0], 2).unbind())
