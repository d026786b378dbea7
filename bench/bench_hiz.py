"""Who builds a Hi-Z pyramid fastest, and what do cull and region_max cost beside one comparison?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from bench_mipmap import _chain
from inputs import inputs_for, job, picture, pyramid_bytes
from rows import Row
from timer import race

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


def rows(sizes: list[tuple[int, int, int]], caches: list[str], seconds: float) -> Iterator[Row]:
    """Single-channel fp32 maps."""
    for height, width, batch in sizes:
        for cache in caches:
            relevance = picture(height, width, batch=batch, channels=1)
            powers = all(side & (side - 1) == 0 for side in (height, width))
            inputs = inputs_for(relevance, cache, lambda x: x)
            sides: dict[str, Callable[[], object]] = {
                "auto": job(lod.hiz, inputs),
                "gl compute": job(partial(lod.hiz, generator="compute"), inputs),
                "gl fragment": job(partial(lod.hiz, generator="fragment"), inputs),
                "gl sampler": job(partial(lod.hiz, generator="sampler"), inputs),
                "torch max_pool2d": job(lambda x: _chain(_max_pool, x), inputs),
                "torch adaptive_max_pool2d": job(lambda x: _chain(_adaptive, x), inputs),
                "torch maximum of 4": job(lambda x: _chain(_four, x), inputs),
                "torch rows then columns": job(partial(lod.hiz, backend="torch"), inputs),
            }
            other = () if powers else ("torch max_pool2d", "torch maximum of 4")  # they drop the last row or column
            yield Row(
                "hiz", "end to end", height, width, batch, 1, "float32", cache, pyramid_bytes(relevance),
                race(sides, seconds=seconds), other_job=other,
            )  # fmt: skip


def readers(seconds: float) -> Iterator[Row]:
    """Of a pyramid that is there: a sparse map in which culling has something to prune."""
    relevance = picture(1024, 1024, channels=1) ** 8
    hz = lod.hiz(relevance, backend="gl")
    lod.region_max(hz, torch.zeros(1, 4), backend="gl")
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
    boxes = torch.rand(1, 4096, 2, 2).sort(dim=2).values.flatten(2)
    sides = {
        "auto": lambda: lod.region_max(hz, boxes),
        "gl": lambda: lod.region_max(hz, boxes, backend="gl"),
        "torch gather": lambda: lod.region_max(hz, boxes, backend="torch"),
    }
    yield Row(
        "region_max", "end to end", 1024, 1024, 1, 1, "float32", "warm", boxes.nbytes * 2, race(sides, seconds=seconds),
        note="4096 boxes",
    )  # fmt: skip
