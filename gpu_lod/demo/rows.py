"""The demo's table: every verb and generator against the fastest torch way, in time and in value."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpu_lod.context import Context
from gpu_lod.cull import cull
from gpu_lod.errors import UnsupportedError
from gpu_lod.hiz import hiz
from gpu_lod.log_polar import log_polar as log_polar_verb
from gpu_lod.log_polar import reference as log_polar_reference
from gpu_lod.log_polar import ring_rule
from gpu_lod.mipmap import mipmap
from gpu_lod.mipmap import reference as mip_reference
from gpu_lod.pyramid import Pyramid
from gpu_lod.region import reference as region_reference
from gpu_lod.region import region_max

REPEATS, BLOCKS = 15, 5
PAUSE = 0.01
"""Seconds between blocks: torch's OpenMP threads keep spinning for a few ms and would slow the other side down."""

RINGS, WEDGES = 256, 512
BOXES = 256

Run = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table. Times are medians, from torch tensor to torch tensor."""

    picture: str
    verb: str
    generator: str
    size: str
    gl_ms: float
    gl_iqr_ms: float
    torch_ms: float
    torch_iqr_ms: float
    torch_way: str
    difference: float
    """Largest, from the reference in float64; exact verbs must have 0."""
    tolerance: float

    @property
    def ratio(self) -> float:
        """torch time / GL time: above 1 GL is faster."""
        return self.torch_ms / self.gl_ms

    @property
    def steady(self) -> bool:
        """False if the machine was too busy to say: the middle half of the times spans more than half the median."""
        return self.gl_iqr_ms <= self.gl_ms / 2 and self.torch_iqr_ms <= self.torch_ms / 2

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance  # also False for NaN

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "steady": self.steady, "ok": self.ok}


def measure(sides: dict[str, Run], repeats: int = REPEATS) -> dict[str, tuple[float, float]]:
    """Median and interquartile range in ms of each side, measured in alternating blocks after a warm-up."""
    slowest = 0.0
    for run in sides.values():
        run()
        start = time.perf_counter()
        run()
        slowest = max(slowest, time.perf_counter() - start)
    in_block = math.ceil(min(repeats, max(2 / max(slowest, 1e-6), BLOCKS)) / BLOCKS)  # some two seconds a side at most
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(BLOCKS):
        for name, run in sides.items():
            time.sleep(PAUSE)
            run()
            for _ in range(in_block):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    result = {}
    for name, found in times.items():
        low, median, high = (1000 * t for t in statistics.quantiles(found, n=4, method="inclusive"))
        result[name] = median, high - low
    return result


def rows(
    picture: str, image: torch.Tensor, relevance: torch.Tensor, fixation: tuple[float, float], ctx: Context
) -> Iterator[Row]:
    """All rows of one picture.

    Args:
        image: [C, H, W] float32, finite; in [0, 1] as a rule, else tolerances are as many times larger.
        relevance: [1, H, W] float32, a map at pixel size.
    """
    yield from _mipmap(picture, image, ctx)
    yield from _hiz(picture, relevance, ctx)
    yield from _log_polar(picture, image, fixation, ctx)
    hz = hiz(relevance, generator="compute")
    yield from _cull(picture, hz)
    yield from _region_max(picture, hz)


def _mipmap(picture: str, image: torch.Tensor, ctx: Context) -> Iterator[Row]:
    truth = mip_reference(image.double())
    powers = all(n & (n - 1) == 0 for n in image.shape[-2:])
    # At odd sides OpenGL leaves glGenerateMipmap's filter open, so there is nothing to compare it with.
    names = ["compute", "registers", "single-pass", "fragment"] + ["driver"] * powers
    gl = {name: _runner(mipmap, image, generator=name) for name in names}
    torch_ways: dict[str, Run] = {"interpolate bilinear": lambda: mip_reference(image)}
    if powers:
        torch_ways["avg_pool2d"] = lambda: _halvings(image, F.avg_pool2d)
        torch_ways["interpolate area"] = lambda: _halvings(image, _area)
    yield from _race(
        picture, "mipmap", _size(image), gl, torch_ways, lambda p: _farthest(p.levels, truth), 2e-6 * _range(image)
    )


def _hiz(picture: str, relevance: torch.Tensor, ctx: Context) -> Iterator[Row]:
    truth = mip_reference(relevance.double(), reduce="max")
    names = ["compute", "registers", "single-pass", "fragment", "sampler"]
    gl = {name: _runner(hiz, relevance, generator=name) for name in names}
    torch_ways: dict[str, Run] = {"maximum": lambda: mip_reference(relevance, reduce="max")}
    if all(n & (n - 1) == 0 for n in relevance.shape[-2:]):
        torch_ways["max_pool2d"] = lambda: _halvings(relevance, F.max_pool2d)
    yield from _race(picture, "hiz", _size(relevance), gl, torch_ways, lambda p: _farthest(p.levels, truth), 0.0)


def _log_polar(picture: str, image: torch.Tensor, fixation: tuple[float, float], ctx: Context) -> Iterator[Row]:
    pyramid = mipmap(image, backend="gl").upload(ctx)
    plain = Pyramid(tuple(mip_reference(image)))
    truth = log_polar_reference(
        [level.double() for level in pyramid.levels],
        torch.tensor([fixation], dtype=torch.float32).double(),
        ring_rule(RINGS, WEDGES, None, 0.7, "log", 0.05),
    )
    gl = {
        name: _runner(log_polar_verb, pyramid, fixation, RINGS, WEDGES, generator=name)
        for name in ("compute", "fragment")
    }
    torch_ways = {"grid_sample": _runner(log_polar_verb, plain, fixation, RINGS, WEDGES, backend="torch")}
    # Texture units of GPUs weigh texels, and levels, with 8 fractional bits; software renderers with fp32.
    tolerance = (2e-5 if ctx.software else 2 * 2**-8) * _range(image)
    size = f"{RINGS} x {WEDGES} of {_size(image)}"
    yield from _race(picture, "log_polar", size, gl, torch_ways, lambda x: _farthest([x], [truth]), tolerance)


def _range(image: torch.Tensor) -> float:
    """At least 1."""
    return max(1.0, float(image.abs().max()))


def _cull(picture: str, hz: Pyramid) -> Iterator[Row]:
    top = hz.levels[0]
    threshold = float(torch.quantile(top.flatten()[:: 1 + top.numel() // 2**20], 0.8))
    mask = top >= threshold

    def difference(culled: Any) -> float:
        """How many entries of the mask and the list of indices are wrong."""
        indices = mask.nonzero()
        if culled.indices.shape != indices.shape:
            return math.inf
        return float((culled.mask != mask).sum() + (culled.indices != indices).any(dim=1).sum())

    def compare() -> torch.Tensor:
        return (top >= threshold).nonzero()

    gl = {"descent": _runner(cull, hz, threshold, backend="gl")}
    yield from _race(picture, "cull", _size(top), gl, {"one comparison": compare}, difference, 0.0)


def _region_max(picture: str, hz: Pyramid) -> Iterator[Row]:
    corners = torch.rand(BOXES, 2, 2, generator=torch.Generator().manual_seed(0)).sort(dim=1).values
    boxes = corners.flatten(1)
    truth = region_reference([level[None].double() for level in hz.levels], boxes[None])[0]
    gl = {"texel fetches": _runner(region_max, hz, boxes, backend="gl")}
    torch_ways = {"gather": _runner(region_max, hz, boxes, backend="torch")}
    size = f"{BOXES} boxes on {_size(hz.levels[0])}"
    yield from _race(picture, "region_max", size, gl, torch_ways, lambda x: _farthest([x], [truth]), 0.0)


def _race(
    picture: str,
    verb: str,
    size: str,
    gl: dict[str, Run],
    torch_ways: dict[str, Run],
    difference: Callable[[Any], float],
    tolerance: float,
) -> Iterator[Row]:
    differences = {}
    for name in list(gl):
        try:
            differences[name] = difference(gl[name]())
        except UnsupportedError:  # no GL_EXT_texture_filter_minmax
            del gl[name]
    times = measure({**{f"gl {name}": run for name, run in gl.items()}, **torch_ways})
    best = min(torch_ways, key=lambda way: times[way])
    for name in gl:
        yield Row(picture, verb, name, size, *times[f"gl {name}"], *times[best], best, differences[name], tolerance)


def _runner(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
    return lambda: verb(*args, **kwargs)


def _farthest(found: Any, truth: Any) -> float:
    """Largest absolute difference over pairs of tensors; infinite values agree if they are equal."""
    largest = 0.0
    for a, b in zip(found, truth, strict=True):
        a = a.double()
        b = b.view(a.shape)
        apart = torch.where(a == b, torch.zeros_like(a), (a - b).abs())
        largest = max(largest, float(apart.max().nan_to_num(nan=math.inf)))
    return largest


def _halvings(image: torch.Tensor, halve: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Power-of-two sides only."""
    levels = [image[None]]
    while max(levels[-1].shape[-2:]) > 1:
        kernel = tuple(min(n, 2) for n in levels[-1].shape[-2:])
        levels.append(halve(levels[-1], kernel))
    return levels


def _area(x: torch.Tensor, kernel: tuple[int, int]) -> torch.Tensor:
    return F.interpolate(x, size=(x.shape[-2] // kernel[0], x.shape[-1] // kernel[1]), mode="area")


def _size(image: torch.Tensor) -> str:
    """Width x height, and the channels."""
    channels, height, width = image.shape[-3:]
    return f"{width} x {height}" + (f" x {channels}" if channels > 1 else "")
