"""Who builds a Hi-Z pyramid fastest, and what do cull and region_max cost beside one comparison?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from bench_mipmap import _chain
from inputs import inputs_for, job, picture, pyramid_bytes
from rows import Row
from timer import Race, race

import gpu_lod as lod


def _max_pool(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.max_pool2d(x, (2 if x.shape[-2] > 1 else 1, 2 if x.shape[-1] > 1 else 1))


def _adaptive(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.adaptive_max_pool2d(x, (h, w))


def _four(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    if min(x.shape[-2:]) < 2:
        return _max_pool(x, h, w)
    top = torch.maximum(x[..., : 2 * h : 2, : 2 * w : 2], x[..., : 2 * h : 2, 1 : 2 * w : 2])
    return torch.maximum(top, torch.maximum(x[..., 1 : 2 * h : 2, : 2 * w : 2], x[..., 1 : 2 * h : 2, 1 : 2 * w : 2]))


def torch_ways(height: int, width: int) -> tuple[dict[str, Callable[[torch.Tensor], object]], tuple[str, ...]]:
    """Ways to make the pyramid of a map of this size in plain torch, and which of them do another job."""
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "torch max_pool2d": partial(_chain, _max_pool),
        "torch adaptive_max_pool2d": partial(_chain, _adaptive),
        "torch maximum of 4": partial(_chain, _four),
        "torch rows then columns": partial(lod.hiz, backend="torch"),
    }
    powers = all(side & (side - 1) == 0 for side in (height, width))
    return ways, () if powers else ("torch max_pool2d", "torch maximum of 4")  # they drop the last row or column


def rows(sizes: list[tuple[int, int, int]], caches: list[str], seconds: float) -> Iterator[Row]:
    """Single-channel fp32 maps."""
    for height, width, batch in sizes:
        for cache in caches:
            relevance = picture(height, width, batch=batch, channels=1)
            ways, other = torch_ways(height, width)
            inputs = inputs_for(relevance, cache, lambda x: x)
            sides: dict[str, Callable[[], object]] = {
                "auto": job(lod.hiz, inputs),
                "gl compute": job(partial(lod.hiz, generator="compute"), inputs),
                "gl fragment": job(partial(lod.hiz, generator="fragment"), inputs),
                "gl sampler": job(partial(lod.hiz, generator="sampler"), inputs),
                **{name: job(way, inputs) for name, way in ways.items()},
            }
            yield Row(
                "hiz", "end to end", height, width, batch, 1, "float32", cache, pyramid_bytes(relevance),
                race(sides, seconds=seconds), other_job=other,
            )  # fmt: skip


def readers(seconds: float, device: str = "cpu", race: Race = race) -> Iterator[Row]:
    """Of a pyramid that is there: a sparse map in which culling has something to prune."""
    relevance = picture(1024, 1024, channels=1).to(device) ** 8
    hz = lod.hiz(relevance, backend="gl")
    lod.region_max(hz, torch.zeros(1, 4, device=device), backend="gl")
    for share in (0.2, 0.01):
        threshold = float(relevance.flatten().quantile(1 - share))
        culled = lod.cull(hz, threshold)
        sides: dict[str, Callable[[], object]] = {
            "auto": lambda t=threshold: lod.cull(hz, t),
            "gl": lambda t=threshold: lod.cull(hz, t, backend="gl"),
            "torch descent": lambda t=threshold: lod.cull(hz, t, backend="torch"),
            "torch one comparison": lambda t=threshold: relevance >= t,
            "torch comparison and nonzero": lambda t=threshold: (relevance >= t).nonzero(),
        }
        yield Row(
            "cull", "end to end", 1024, 1024, 1, 1, "float32", "warm", relevance.nbytes, race(sides, seconds=seconds),
            note=f"{share:.0%} kept, {culled.tested} of {relevance.numel()} texels tested",
            other_job=("torch one comparison", "torch comparison and nonzero"),
        )  # fmt: skip
    boxes = torch.rand(1, 4096, 2, 2).sort(dim=2).values.flatten(2).to(device)
    sides = {
        "auto": lambda: lod.region_max(hz, boxes),
        "gl": lambda: lod.region_max(hz, boxes, backend="gl"),
        "torch gather": lambda: lod.region_max(hz, boxes, backend="torch"),
    }
    yield Row(
        "region_max", "end to end", 1024, 1024, 1, 1, "float32", "warm", boxes.nbytes * 2, race(sides, seconds=seconds),
        note="4096 boxes",
    )  # fmt: skip
