"""Who builds a Hi-Z pyramid fastest, and what do cull, region_max and region_min cost beside plain torch?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_mipmap import HELD_NOTE, _chain, is_power
from bench_samplers import SEPARATE
from inputs import ANEW, generators_of, inputs_for, job, opens, picture, pyramid_bytes, uploaded
from rows import Row
from timer import Race, able, race

import gpu_lod as lod
from gpu_lod import region


def _max_pool(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.max_pool2d(x, (2 if x.shape[-2] > 1 else 1, 2 if x.shape[-1] > 1 else 1))


def _adaptive(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.adaptive_max_pool2d(x, (h, w))


def _four(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    if min(x.shape[-2:]) < 2:
        return _max_pool(x, h, w)
    top = torch.maximum(x[..., : 2 * h : 2, : 2 * w : 2], x[..., : 2 * h : 2, 1 : 2 * w : 2])
    return torch.maximum(top, torch.maximum(x[..., 1 : 2 * h : 2, : 2 * w : 2], x[..., 1 : 2 * h : 2, 1 : 2 * w : 2]))


def _max_pool_ceil(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.max_pool2d(x, (2 if x.shape[-2] > 1 else 1, 2 if x.shape[-1] > 1 else 1), ceil_mode=True)


DROPS = "drops the last row or column of an odd side: its levels are no bound"
CEIL = "ceil_mode halves odd sides upwards: a bound, of other sizes than OpenGL's levels"


def _ceil_chain(image: torch.Tensor) -> list[torch.Tensor]:
    levels = [image]
    while max(levels[-1].shape[-2:]) > 1:
        levels.append(_max_pool_ceil(levels[-1], 0, 0))
    return levels


def torch_ways(height: int, width: int) -> tuple[dict[str, Callable[[torch.Tensor], object]], dict[str, str]]:
    """Ways to make the pyramid of a map of this size in plain torch, and which of them do another job, and why."""
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "torch max_pool2d": partial(_chain, _max_pool),
        "torch adaptive_max_pool2d": partial(_chain, _adaptive),
        "torch maximum of 4": partial(_chain, _four),
        "torch rows then columns": partial(lod.hiz, backend="torch"),
    }
    if is_power(height, width):
        return ways, {}
    ceil = "torch max_pool2d ceil_mode"
    return ways | {ceil: _ceil_chain}, {"torch max_pool2d": DROPS, "torch maximum of 4": DROPS, ceil: CEIL}


def _generators(inputs: list[torch.Tensor]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    return able({f"gl {name}": job(partial(lod.hiz, generator=name), inputs) for name in generators_of(lod.hiz)})


def rows(sizes: list[tuple[int, int, int]], caches: list[str], seconds: float) -> Iterator[Row]:
    """Single-channel fp32 maps."""
    for height, width, batch in sizes:
        for cache in caches:
            relevance = picture(height, width, batch=batch, channels=1)
            ways, other = torch_ways(height, width)
            inputs = inputs_for(relevance, cache, lambda x: x)
            ours, dropped = _generators(inputs)
            sides: dict[str, Callable[[], object]] = {
                "auto": job(lod.hiz, inputs),
                **ours,
                **{name: job(way, inputs) for name, way in ways.items()},
            }
            yield Row(
                "hiz", "end to end", height, width, batch, 1, "float32", cache, pyramid_bytes(relevance),
                race(sides, seconds=seconds), other_job=other, extra={"dropped": dropped} if dropped else {},
            )  # fmt: skip


def zero_copy(sizes: list[tuple[int, int, int]], seconds: float) -> Iterator[Row]:
    """Every generator, with the map in GL memory; torch reads that memory too."""
    for height, width, batch in sizes:
        held = lod.Context().empty(batch, 1, height, width)
        held.copy_(picture(height, width, batch=batch, channels=1))
        ours, dropped = _generators([held])
        ways, other = torch_ways(height, width)
        fast = {name: job(ways[name], [held]) for name in ("torch max_pool2d", "torch rows then columns")}
        yield Row(
            "hiz", "zero-copy in", height, width, batch, 1, "float32", "warm", pyramid_bytes(held),
            race({"auto": job(lod.hiz, [held]), **ours, **fast}, seconds=seconds), note=HELD_NOTE, other_job=other,
            extra={"dropped": dropped} if dropped else {},
        )  # fmt: skip


COMPARED = {
    "torch one comparison": "the mask alone, without indices and nodes",
    "torch comparison and nonzero": "the mask and indices, without nodes",
}


IN_ONE_ROW = "torch gather, levels in one row"


def in_one_row(hz: lod.Pyramid, boxes: torch.Tensor, verb: Callable[..., object]) -> Callable[[], object]:
    """The bounds in plain torch where all levels were laid out one after the other beforehand, as shaders have their
    texture. Nothing is checked."""
    levels = list(hz.levels)
    row, reduce = region.in_one_row(levels), hz.reduce
    expected = verb(hz, boxes, backend="torch")
    call = partial(region.reference, levels, boxes, reduce, row)
    assert torch.equal(call(), expected)
    return call


def readers(seconds: float, device: str = "cpu", race: Race = race, side: int = 1024) -> Iterator[Row]:
    """Of a pyramid that is there: a sparse map in which culling has something to prune."""
    relevance = picture(side, side, channels=1).to(device) ** 8
    gl = opens(device)
    hz = lod.hiz(relevance, backend="gl" if gl else "auto")
    if gl:
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
            "cull", "end to end", side, side, 1, 1, "float32", "warm", relevance.nbytes, race(sides, seconds=seconds),
            note=f"{share:.0%} kept, {culled.tested} of {relevance.numel()} texels tested",
            other_job=COMPARED,
        )  # fmt: skip
    boxes = torch.rand(1, 4096, 2, 2).sort(dim=2).values.flatten(2).to(device)
    low = uploaded(lod.hiz(relevance, "min", backend="gl" if gl else "auto"))
    for verb, note, source in (
        (lod.region_max, "", lambda: hz),
        (lod.region_max, f"; {ANEW}", lambda: lod.Pyramid(hz.levels, "max")),
        (lod.region_min, "", lambda: low),  # the same shader, so that one row tells whether it is the same time
    ):

        def bounds(backend: Any, verb: Any = verb, source: Any = source) -> object:
            return verb(source(), boxes, backend=backend)

        sides = {
            "auto": partial(bounds, "auto"),
            "gl": partial(bounds, "gl"),
            "torch gather": partial(bounds, "torch"),
        }
        if not note:
            sides[IN_ONE_ROW] = in_one_row(source(), boxes, verb)
        yield Row(
            verb.__name__, "end to end", side, side, 1, 1, "float32", "warm", boxes.nbytes * 2,
            race(sides, seconds=seconds), note=f"4096 boxes{note}",
        )  # fmt: skip


def batches(seconds: float, device: str = "cpu", race: Race = race, batch: int = 32, side: int = 224) -> Iterator[Row]:
    """One call for the pyramids of a batch beside a call for each of them."""
    relevance = picture(side, side, batch=batch, channels=1).to(device) ** 8
    threshold = float(relevance.flatten().quantile(0.8))
    boxes = torch.rand(batch, 256, 2, 2).sort(dim=2).values.flatten(2).to(device)
    verbs: list[tuple[Callable[..., object], str, Any, int]] = [
        (lod.cull, "max", threshold, relevance.nbytes),
        (lod.region_max, "max", boxes, boxes.nbytes * 2),
        (lod.region_min, "min", boxes, boxes.nbytes * 2),
    ]
    for verb, reduce, what, moved in verbs:
        whole = lod.hiz(relevance, reduce, backend="gl").upload()  # type: ignore[arg-type]
        parts = [lod.hiz(one[None], reduce, backend="gl").upload() for one in relevance]  # type: ignore[arg-type]
        each = [what] * batch if verb is lod.cull else list(boxes.split(1))

        def separately(verb: Any = verb, parts: Any = parts, each: Any = each) -> object:
            return [verb(one, its, "gl") for one, its in zip(parts, each, strict=True)]

        sides: dict[str, Callable[[], object]] = {
            "auto": partial(verb, whole, what, "auto"),
            "gl one call": partial(verb, whole, what, "gl"),
            SEPARATE: separately,
            "torch one call": partial(verb, whole, what, "torch"),
        }
        if verb is not lod.cull:
            sides[IN_ONE_ROW] = in_one_row(whole, boxes, verb)  # type: ignore[arg-type]
        if verb is lod.cull:
            sides["torch one comparison"] = lambda: relevance >= threshold
            sides["torch comparison and nonzero"] = lambda: (relevance >= threshold).nonzero()
        other = {SEPARATE: "as many calls as images", **COMPARED}
        yield Row(
            verb.__name__, "end to end", side, side, batch, 1, "float32", "warm", moved, race(sides, seconds=seconds),
            other_job={name: why for name, why in other.items() if name in sides},
            note=f"a batch in one call; {'20% kept' if verb is lod.cull else '256 boxes an image'}",
        )  # fmt: skip
