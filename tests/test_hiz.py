"""Hi-Z: conservative, exact, and the NaN rule on every backend."""

from __future__ import annotations

import pytest
import torch
from compare import assert_matches
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, noise
from oracle import extreme_chain

import gpu_lod as lod
from gpu_lod import halving, planewise
from gpu_lod.errors import InputError, UnsupportedError

pytestmark = pytest.mark.threads

GENERATORS = ("compute", "registers", "single-pass", "fragment", "sampler")
WAYS = ("torch", *GENERATORS)


def build(relevance: torch.Tensor, way: str, reduce: str = "max") -> lod.Pyramid:
    if way == "torch":
        return lod.hiz(relevance, reduce=reduce, backend="torch")
    return lod.hiz(relevance, reduce=reduce, generator=way)


def check(relevance: torch.Tensor, way: str, reduce: str = "max") -> None:
    expected = extreme_chain(relevance, reduce)
    for level, (actual, oracle) in enumerate(zip(build(relevance, way, reduce), expected, strict=True)):
        assert_matches(actual, oracle, "exact", where=f"{way} {reduce} level {level} of {tuple(relevance.shape)}")


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("way", WAYS)
def test_every_size_up_to_67(way: str, reduce: str) -> None:
    """All widths, and with each a height of another residue, so that both sides see every size."""
    for width in range(1, 68):
        check(noise(1, 1, (width * 29) % 67 + 1, width), way, reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_dtypes_batches_and_any_channels(way: str, dtype: torch.dtype) -> None:
    for shape in ((1, 1, 1, 1), (2, 3, 17, 31), (3, 7, 20, 9), (5, 40, 6)):
        check(noise(*shape, dtype=dtype), way)


@pytest.mark.parametrize("way", WAYS)
def test_large_odd(way: str) -> None:
    check(noise(1, 1, 777, 1001), way)


@pytest.mark.parametrize("way", WAYS)
def test_negative_and_infinite(way: str) -> None:
    relevance = torch.randn(2, 2, 23, 18)
    relevance.view(-1)[::7] = float("-inf")
    relevance.view(-1)[5::31] = float("inf")
    relevance[0, 0] = float("-inf")
    for reduce in ("max", "min"):
        check(relevance, way, reduce)


@pytest.mark.parametrize("size", [(23, 18), (32, 64), (70, 130)], ids=str)
@pytest.mark.parametrize("way", ["torch", "compute", "registers", "single-pass", "fragment"])
def test_nan_is_contagious(way: str, size: tuple[int, int]) -> None:
    """torch.amax's rule, on every backend but `sampler`: a footprint that holds a NaN is NaN."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        relevance = torch.randn(1, 2, *size).to(dtype)
        relevance.view(-1)[::53] = float("nan")
        for reduce in ("max", "min"):
            check(relevance, way, reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 64), (65, 33), (7, 129), (2, 90), (3, 1), (1, 70), (90, 2)])
def test_large_levels_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], dtype: torch.dtype
) -> None:
    """In plain torch on a CPU: the same values, NaN's too, from no more rows at once than are said."""
    relevance = noise(2, 3, *size, dtype=dtype)
    if dtype.is_floating_point:
        relevance[..., size[0] // 2, size[1] // 2] = float("nan")
    whole = {reduce: list(lod.hiz(relevance, reduce=reduce, backend="torch")) for reduce in ("max", "min")}
    monkeypatch.setattr(halving, "SUMS", 8)
    monkeypatch.setattr(planewise, "PART", 4 * 2 * 3 * size[1])  # three rows of a level
    extreme, tallest = halving._extreme, []
    monkeypatch.setattr(halving, "_extreme", lambda x, reduce: (tallest.append(x.shape[-2]), extreme(x, reduce))[1])
    for reduce, levels in whole.items():
        parts = lod.hiz(relevance, reduce=reduce, backend="torch")
        for level, expected in zip(parts, levels, strict=True):
            assert torch.equal(level.nan_to_num(), expected.nan_to_num())
            assert torch.equal(level.isnan(), expected.isnan())
    if size[0] > 7:
        assert tallest[0] <= 7


def test_sampler_refuses_nan() -> None:
    relevance = torch.rand(1, 8, 8)
    relevance[0, 3, 3] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        lod.hiz(relevance, generator="sampler")
    check(torch.rand(1, 8, 8), "sampler")


@pytest.mark.parametrize("way", ["torch", "compute", "registers", "single-pass"])
def test_subnormals_survive(way: str) -> None:
    relevance = torch.full((1, 1, 4, 4), -1e-40)
    relevance[0, 0, 1, 2] = 1e-42
    check(relevance, way)


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(WAYS),
    st.sampled_from(["max", "min"]),
    st.integers(0, 2**31),
)
def test_canonical_ancestors_bound_their_texels(height: int, width: int, way: str, reduce: str, seed: int) -> None:
    """Every texel's canonical ancestor min(j >> l, n_l - 1) bounds it, at every level and size."""
    relevance = torch.randn(1, height, width, generator=torch.Generator().manual_seed(seed))
    for level, values in enumerate(build(relevance, way, reduce)):
        rows = (torch.arange(height) >> level).clamp(max=values.shape[-2] - 1)
        columns = (torch.arange(width) >> level).clamp(max=values.shape[-1] - 1)
        ancestor = values[:, rows][:, :, columns]
        assert bool((ancestor >= relevance).all() if reduce == "max" else (ancestor <= relevance).all())


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="'max', 'min'"):
        lod.hiz(torch.rand(1, 4, 4), reduce="mean")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="shape"):
        lod.hiz(torch.rand(4, 4))
    with pytest.raises(UnsupportedError):
        lod.hiz(torch.rand(1, 4, 4), generator="sampler", backend="torch")


def test_sampler_without_the_extension(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctx, "extensions", frozenset())
    with pytest.raises(UnsupportedError, match="GL_EXT_texture_filter_minmax"):
        lod.hiz(torch.rand(1, 4, 4), generator="sampler")
