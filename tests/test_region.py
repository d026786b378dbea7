"""Region bounds: conservative, tight where they can be, the same on every backend."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, noise
from times import fastest

import gpu_lod as lod
from gpu_lod.errors import InputError

WAYS = ("torch", "gl")


def random_boxes(*shape: int, low: float = -0.2, high: float = 1.2) -> torch.Tensor:
    corners = torch.rand(*shape, 2, 2) * (high - low) + low
    return corners.sort(dim=-2).values.flatten(-2)


def touched(box: list[float], height: int, width: int) -> tuple[slice, slice] | None:
    """Texels of a box by the definition, in fp32 as the verb states."""
    scaled = torch.tensor(box) * torch.tensor([width, height, width, height]).float()
    x0, y0 = (max(math.floor(v), 0) for v in scaled[:2].tolist())
    x1, y1 = (min(math.ceil(v), n) for v, n in zip(scaled[2:].tolist(), (width, height), strict=True))
    return None if x1 <= x0 or y1 <= y0 else (slice(y0, y1), slice(x0, x1))


@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.sampled_from(WAYS),
    st.sampled_from(["max", "min"]),
    st.integers(0, 2**31),
)
def test_bounds_hold_and_are_tight_for_small_boxes(height: int, width: int, way: str, reduce: str, seed: int) -> None:
    torch.manual_seed(seed)
    relevance = torch.randn(1, height, width)
    hz = lod.hiz(relevance, reduce=reduce)  # type: ignore[arg-type]
    boxes = random_boxes(24)
    bounds = (lod.region_max if reduce == "max" else lod.region_min)(hz, boxes, backend=way)[0]
    for box, bound in zip(boxes.tolist(), bounds.tolist(), strict=True):
        part = touched(box, height, width)
        if part is None:
            assert bound == (-math.inf if reduce == "max" else math.inf)
            continue
        texels = relevance[0][part]
        exact = float(texels.max() if reduce == "max" else texels.min())
        assert bound >= exact if reduce == "max" else bound <= exact
        if max(texels.shape) <= 2:
            assert bound == exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 17, 31), (3, 5, 64, 48), (4, 33, 9)], ids=str)
def test_gl_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    relevance = noise(*shape, dtype=dtype)
    if dtype.is_floating_point:
        relevance.view(-1)[::29] = float("nan")
    for reduce, verb in (("max", lod.region_max), ("min", lod.region_min)):
        hz = lod.hiz(relevance, reduce=reduce)  # type: ignore[arg-type]
        batch = (shape[0],) if len(shape) == 4 else ()
        for boxes in (random_boxes(*batch, 13), random_boxes(7), random_boxes(0)):
            a, b = verb(hz, boxes, backend="torch"), verb(hz, boxes, backend="gl")
            assert a.shape == b.shape == (*shape[:-2], boxes.shape[-2])
            assert torch.equal(a.nan_to_num(-7), b.nan_to_num(-7))


@pytest.mark.parametrize("way", WAYS)
def test_convention_half_open(way: str) -> None:
    """On a side of 5: [0.2, 0.4) touches texel 1 alone, and an empty box gives the identity."""
    hz = lod.hiz(torch.arange(5.0).view(1, 1, 5))
    boxes = torch.tensor([[0.21, 0, 0.39, 1], [0.4, 0, 0.4, 1], [0.0, 0, 1.0, 1], [-3.0, -3, -2, -2], [0.5, 0, 0.5, 1]])
    assert lod.region_max(hz, boxes, backend=way)[0].tolist() == [1.0, -math.inf, 4.0, -math.inf, 2.0]
    counts = lod.hiz(torch.zeros(1, 4, 4, dtype=torch.uint8), reduce="min")
    assert lod.region_min(counts, torch.zeros(1, 4), backend=way).item() == 255


@pytest.mark.parametrize("most", [400, 200], ids=["of a buffer", "of an array"])
def test_low_limits_split(restored_limits: lod.Context, most: int) -> None:
    hz = lod.hiz(noise(300, 1, 6, 7))
    boxes = random_boxes(300, 9)
    expected = lod.region_max(hz, boxes, backend="torch")
    restored_limits.limits.layers = 256
    restored_limits.limits.texels = most * (7 * 6 + 3 * 3 + 1)
    restored_limits.limits.storage_bytes = 11_000  # fewer boxes than there are: 300 x 9 x 16 bytes
    assert torch.equal(lod.region_max(hz, boxes, backend="gl"), expected)


@pytest.mark.parametrize(
    ("boxes", "hint"),
    [
        (torch.rand(4, 3), r"\[N, 4\]"),
        (torch.rand(4), r"\[N, 4\]"),
        (torch.rand(3, 2, 4), r"\[2, N, 4\]"),
        (torch.zeros(2, 4, dtype=torch.int64), "floats"),
        (torch.tensor([[0.1, 0.1, float("nan"), 0.2]]), "NaN"),
        (torch.tensor([[0.1, 0.1, float("inf"), 0.2]]), "infinity"),
        (torch.tensor([[0.5, 0.1, 0.4, 0.2]]), "x1 < x0"),
        ([[0, 0, 1, 1]], "tensor"),
    ],
)
def test_bad_boxes(boxes: torch.Tensor, hint: str) -> None:
    hz = lod.hiz(noise(2, 1, 8, 8))
    for way in WAYS:
        with pytest.raises(InputError, match=hint):
            lod.region_max(hz, boxes, backend=way)
        assert lod.region_max(hz, torch.tensor([[0.0, 0, 1, 1]]), backend=way).shape == (2, 1, 1)


@pytest.mark.parametrize("backend", ["auto", *WAYS])
@pytest.mark.parametrize("verb", [lod.region_max, lod.region_min])
def test_pyramids_of_other_filters_have_no_bounds(verb: Any, backend: str) -> None:
    for pyramid in (lod.gaussian(noise(1, 8, 8)), lod.laplacian(noise(1, 8, 8)), lod.mipmap(noise(1, 8, 8))):
        with pytest.raises(InputError, match=f"this is a {pyramid.reduce} one: pass hiz"):
            verb(pyramid, torch.rand(3, 4), backend=backend)


def test_wrong_pyramids() -> None:
    boxes = torch.tensor([[0.0, 0, 1, 1]])
    with pytest.raises(InputError, match="min one"):
        lod.region_max(lod.hiz(noise(1, 8, 8), reduce="min"), boxes)
    with pytest.raises(InputError, match="mean one"):
        lod.region_min(lod.mipmap(noise(1, 8, 8)), boxes)
    with pytest.raises(InputError, match="levels"):
        lod.region_max(lod.mipmap(noise(1, 8, 8), levels=2, reduce="max"), boxes)


def test_boxes_far_outside() -> None:
    hz = lod.hiz(noise(1, 4, 5))
    boxes = torch.tensor([[1e9, 0, 2e9, 1], [-2e9, 0, -1e9, 1], [-3e38, -3e38, 3e38, 3e38], [0, 5e8, 1, 9e9]])
    expected = [-math.inf, -math.inf, float(hz[0].max()), -math.inf]
    for way in WAYS:
        assert lod.region_max(hz, boxes, backend=way)[0].tolist() == expected


def test_auto_uses_the_texture_once_it_is_there(unseeded: Path) -> None:
    hz = lod.hiz(noise(1, 40, 50))
    boxes = random_boxes(20)
    fastest("gl", lod.region_max, lod.hiz(hz[0]).upload(), boxes)
    assert lod.explain(lod.region_max, hz, boxes).backend == "torch"
    before = lod.region_max(hz, boxes)
    hz.upload()
    assert lod.explain(lod.region_max, hz, boxes).backend == "gl"
    assert torch.equal(lod.region_max(hz, boxes), before)


def test_auto_makes_a_texture_where_that_pays_at_once(ctx: lod.Context, unseeded: Path) -> None:
    hz, boxes = lod.hiz(noise(1, 40, 50)), random_boxes(20)
    fastest("gl", lod.region_max, hz, boxes)
    found = lod.region_max(hz, boxes)
    assert ctx.owns(found) and hz.is_texture
    strip = lod.hiz(noise(1, 1, 16_400))
    assert lod.region_max(strip, boxes, backend="torch").equal(lod.region_max(strip, boxes))
    assert "16400" in lod.explain(lod.region_max, strip, boxes).reason
    assert torch.equal(found, lod.region_max(hz, boxes, backend="torch"))
    assert lod.explain(lod.region_max, hz, random_boxes(4096)).backend == "torch"  # far more boxes than were measured
