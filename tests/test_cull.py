"""Culling keeps exactly what a flat threshold keeps, and says truly what it pruned."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod.errors import InputError, LimitError

pytestmark = pytest.mark.threads

WAYS = ("torch", "gl")


def cover(hz: lod.Pyramid, culled: lod.Culled) -> torch.Tensor:
    """How many times each level-0 texel is covered by kept texels and pruned nodes."""
    count = culled.mask.int()
    top = hz.levels[0]
    height, width = top.shape[-2:]
    for *plane, level, y, x in culled.pruned.tolist():
        n_y, n_x = hz.levels[level].shape[-2:]
        rows = (torch.arange(height) >> level).clamp(max=n_y - 1) == y
        columns = (torch.arange(width) >> level).clamp(max=n_x - 1) == x
        count[tuple(plane)] += rows[:, None] & columns
    return count


def same(a: lod.Culled, b: lod.Culled) -> bool:
    return (
        torch.equal(a.mask, b.mask)
        and torch.equal(a.indices, b.indices)
        and torch.equal(a.pruned, b.pruned)
        and a.tested == b.tested
    )


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(WAYS),
    st.sampled_from(DTYPES),
    st.floats(-0.1, 1.1),
    st.integers(0, 2**31),
)
def test_keeps_what_a_flat_threshold_keeps(
    height: int, width: int, way: str, dtype: torch.dtype, threshold: float, seed: int
) -> None:
    values = torch.rand(2, 1, height, width, generator=torch.Generator().manual_seed(seed)) ** 4
    if dtype == torch.uint8:
        values, threshold = values * 255, threshold * 255
    relevance = values.to(dtype)
    hz = lod.hiz(relevance)
    culled = lod.cull(hz, threshold, backend=way)
    assert torch.equal(culled.mask, relevance >= threshold)
    assert torch.equal(culled.indices, culled.mask.nonzero())
    assert bool((cover(hz, culled) == 1).all())
    limit = torch.tensor(threshold, dtype=torch.float32 if dtype == torch.uint8 else dtype)
    for b, c, level, y, x in culled.pruned.tolist():
        assert hz.levels[level][b, c, y, x] < limit
        if level + 1 < len(hz):  # maximal: the parent was not pruned
            n_y, n_x = hz.levels[level + 1].shape[-2:]
            assert hz.levels[level + 1][b, c, min(y >> 1, n_y - 1), min(x >> 1, n_x - 1)] >= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 17, 31), (3, 5, 64, 48), (1, 2, 101, 77), (7, 1, 9)], ids=str)
def test_gl_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hz = lod.hiz((noise(*shape) ** 6 * (255 if dtype == torch.uint8 else 1)).to(dtype))
    for threshold in (0.0, -0.0, 0.3, 12.5, 300.0, float("inf"), float("-inf")):
        a, b = lod.cull(hz, threshold, backend="torch"), lod.cull(hz, threshold, backend="gl")
        assert same(a, b), threshold


@pytest.mark.parametrize("way", WAYS)
def test_every_count_against_thresholds_at_the_ends(way: str) -> None:
    counts = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    hz = lod.hiz(counts)
    for threshold in (-1.0, 0.0, 0.5, 1.0, 254.0, 254.5, 255.0, 255.5, 256.0, 1e9):
        culled = lod.cull(hz, threshold, backend=way)
        assert torch.equal(culled.mask, counts >= threshold), threshold
        assert bool((cover(hz, culled) == 1).all()), threshold


def test_a_threshold_for_each_image() -> None:
    relevance = noise(3, 2, 20, 33)
    thresholds = torch.tensor([0.2, 0.9, 0.999])
    for way in WAYS:
        culled = lod.cull(lod.hiz(relevance), thresholds, backend=way)
        assert torch.equal(culled.mask, relevance >= thresholds.view(3, 1, 1, 1))


def test_nan_is_never_kept_and_never_prunes() -> None:
    relevance = torch.full((1, 1, 9, 9), -1.0)
    relevance[0, 0, 4, 4] = float("nan")
    relevance[0, 0, 5, 4] = 2.0  # under the same nodes as the NaN
    for way in WAYS:
        culled = lod.cull(lod.hiz(relevance), 1.0, backend=way)
        assert culled.indices.tolist() == [[0, 0, 5, 4]]


def test_signed_zeros_are_equal() -> None:
    relevance = torch.tensor([[[0.0, -0.0, -1.0]]])
    for way in WAYS:
        for threshold in (0.0, -0.0):
            assert lod.cull(lod.hiz(relevance), threshold, backend=way).mask.tolist() == [[[True, True, False]]]


def test_prunes_everything_at_the_root() -> None:
    for way in WAYS:
        hz = lod.hiz(noise(2, 1, 50, 61))
        culled = lod.cull(hz, 2.0, backend=way)
        assert not culled.mask.any()
        assert culled.indices.shape == (0, 4)
        assert culled.pruned.tolist() == [[0, 0, 5, 0, 0], [1, 0, 5, 0, 0]]
        assert culled.tested == 2
        kept = lod.cull(hz, -1.0, backend=way)
        assert kept.mask.all()
        assert kept.pruned.shape == (0, 5)


def test_short_pyramids_start_from_their_coarsest_level() -> None:
    image = noise(1, 1, 24, 40)
    hz = lod.mipmap(image, levels=3, reduce="max")
    a, b = (lod.cull(hz, 0.97, backend=way) for way in WAYS)
    assert same(a, b)
    assert torch.equal(a.mask, image >= 0.97)


def test_low_storage_limit_splits(restored_limits: lod.Context) -> None:
    hz = lod.hiz(noise(5, 3, 20, 20))
    expected = lod.cull(hz, 0.9, backend="torch")
    restored_limits.limits.storage_bytes = 4 * 400 * 2 + 1024
    assert same(lod.cull(hz, 0.9, backend="gl"), expected)
    restored_limits.limits.storage_bytes = 2048
    with pytest.raises(LimitError, match="20 x 20 needs 1600 bytes"):
        lod.cull(hz, 0.9, backend="gl")


def test_bad_arguments() -> None:
    hz = lod.hiz(noise(2, 1, 8, 8))
    for way in WAYS:
        for threshold in (
            float("nan"),
            torch.tensor([0.1, float("nan")]),
            torch.rand(3),
            torch.rand(2, 1),
            "high",
            None,
        ):
            with pytest.raises(InputError, match="threshold"):
                lod.cull(hz, threshold, backend=way)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="min one"):
            lod.cull(lod.hiz(noise(1, 8, 8), reduce="min"), 0.5, backend=way)
        with pytest.raises(InputError, match="Pyramid"):
            lod.cull(noise(1, 8, 8), 0.5, backend=way)  # type: ignore[arg-type]
        assert lod.cull(hz, 0.5, backend=way).mask.shape == (2, 1, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tensor_thresholds_compare_as_torch_compares(dtype: torch.dtype) -> None:
    """In the wider dtype of the two: a threshold just above a texel must not round down onto it."""
    relevance = torch.tensor([0.5, -0.5, 0.0, -0.0, 1.0]).to(dtype).view(1, 1, 1, 5)
    for base in (0.5, -0.5, 0.0, 1.0):
        for step in (0.0, 1e-9, -1e-9, 1e-5, -1e-5):
            threshold = torch.tensor([base + step], dtype=torch.float64)
            expected = relevance.double() >= threshold.view(1, 1, 1, 1)
            for way in WAYS:
                assert torch.equal(lod.cull(lod.hiz(relevance), threshold, backend=way).mask, expected), (base, step)


def test_the_default_device_changes_nothing(ctx: lod.Context) -> None:
    """Tables are made on the CPU wherever torch makes tensors by default."""
    hz = lod.hiz(torch.rand(1, 20, 30, device="cpu"), backend="gl")
    pyramid = lod.mipmap(torch.rand(1, 20, 30, device="cpu"), backend="gl")
    expected, polar = lod.cull(hz, 0.5, backend="gl"), lod.log_polar(pyramid, (0.5, 0.5), 7, 9, backend="gl")
    ctx.constants.clear()
    with torch.device("meta"):
        found = lod.cull(hz, 0.5, backend="gl")
        again = lod.log_polar(pyramid, (0.5, 0.5), 7, 9, backend="gl")
    assert torch.equal(found.pruned, expected.pruned) and torch.equal(found.mask, expected.mask)
    assert torch.equal(again, polar)


def test_what_was_culled_is_saved_and_loaded() -> None:
    found, file = lod.cull(lod.hiz(noise(1, 9, 12)), 0.8), io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded.mask, found.mask) and torch.equal(loaded.pruned, found.pruned)
    assert loaded.tested == found.tested


def test_thresholds_follow_images_that_are_culled_in_parts(restored_limits: lod.Context) -> None:
    relevance, thresholds = noise(5, 3, 20, 20), torch.tensor([0.2, 0.9, 0.5, 0.999, 0.7])
    restored_limits.limits.storage_bytes = 4 * 400 * 2 + 1024  # two planes at once
    culled = lod.cull(lod.hiz(relevance), thresholds, backend="gl")
    assert torch.equal(culled.mask, relevance >= thresholds.view(5, 1, 1, 1))
