"""Peaks, shares and thresholds by kernels, on the emulator, against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cuda_emulator import ASCENDING, COMPILER, DESCENDING, SHUFFLED, EmulatedDevice

import gpu_lod as lod
from gpu_lod.allocate.fixations import peaks_of
from gpu_lod.allocate.frequency_aware import given_away, served
from gpu_lod.allocate.learned import _threshold, soft_top_k
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scale import Summable
from gpu_lod.allocate.stratified import ranks_within, shared_out
from gpu_lod.errors import LimitError
from gpu_lod.kernels import choosing, device, sources

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

ORDERS = pytest.mark.parametrize("order", [0, DESCENDING, SHUFFLED], ids=["ascending", "descending", "shuffled"])


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def both(run: Callable[[], torch.Tensor], emulated: EmulatedDevice, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel, and in plain torch."""
    emulated.calls.clear()
    found = run()
    assert [call[1].name for call in emulated.named("launch")][-1] == kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KIND", "cuda")
        return found, run()


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "any": lambda x: x,
    "ties": lambda x: (x * 3).round(),
    "zeros": torch.zeros_like,
    "negative": lambda x: x - 2,
    "one hot": lambda x: (x == x.amax((1, 2), keepdim=True)).float(),
    "infinite": lambda x: torch.where(x > 0.9, torch.inf, torch.where(x < 0.2, -torch.inf, x)),
}


@ORDERS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(16, 16), (64, 64), (5, 31), (1, 40), (40, 1), (1, 1), (2, 2), (11, 14)], ids=str)
def test_peaks(emulated: EmulatedDevice, size: tuple[int, int], kind: str, order: int) -> None:
    emulated.order, emulated.seed = order, 5
    relevance = KINDS[kind](torch.rand(3, *size))
    for count, more in ((1, {}), (4, {"radius": 0.3}), (9, {"inhibition": 0.6}), (70, {"radius": 0.0})):
        find = partial(lod.allocate.find_fixations, relevance, count, **more)
        found, expected = both(find, emulated, "peaks")
        assert torch.equal(found, expected)


def test_a_map_larger_than_a_block(emulated: EmulatedDevice) -> None:
    tables = torch.zeros(17), torch.zeros(16), torch.zeros(17, 16)
    with pytest.raises(LimitError, match="17 x 16 cells"):
        choosing.peaks(device.device_of(tables[0]), torch.rand(1, 17, 16), tables, 1, (17, 16), 0.1, 1.0)


@ORDERS
@pytest.mark.parametrize("scale", [1.0, 2e-38, 1e-25, 1e10, 3e31, 3e38], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "lowest", "highest"])
def test_amounts(emulated: EmulatedDevice, kind: str, scale: float, order: int) -> None:
    emulated.order = order
    if kind in KINDS:
        relevance = KINDS[kind](torch.rand(3, 17, 31)) * scale
    else:
        relevance = torch.full((3, 17, 31), -math.inf if kind == "lowest" else math.inf)
        relevance[1, 3, 5] = scale
    for part in ("amounts", "finite"):
        found, expected = both(lambda part=part: getattr(Summable(relevance), part), emulated, "amounts")  # type: ignore[misc]
        assert torch.equal(found, expected)


def test_other_dtypes(emulated: EmulatedDevice) -> None:
    """Are left to torch, or brought to what the kernel reads."""
    relevance = torch.rand(2, 9, 7, dtype=torch.float64)
    assert torch.equal(Summable(relevance).amounts, relevance)
    assert peaks_of(relevance, 2).dtype == torch.float64 and not emulated.named("launch")
    weight, room = torch.rand(2, 9, dtype=torch.float64), torch.full((2, 9), 4)
    for one, total in ((room.int(), 7), (room, torch.tensor([7, 5], dtype=torch.int32))):
        assert torch.equal(shared_out(weight, one, total), shared_out(weight, room, torch.as_tensor(total).long()))


def test_maps_of_pixels_are_left_to_torch(emulated: EmulatedDevice) -> None:
    relevance = torch.rand(1, 257, 256)
    assert torch.equal(Summable(relevance).amounts, relevance) and not emulated.named("launch")


@ORDERS
def test_shares(emulated: EmulatedDevice, order: int) -> None:
    emulated.order, emulated.seed = order, 3
    generator = torch.Generator().manual_seed(2)

    def below(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    for turn in range(300):
        batch, strata = int(below(4, 1)) + 1, int(below((30, 600)[turn % 20 == 0], 1)) + 1
        room = below((2, 5, 40)[turn % 3], batch, strata)
        weight = torch.rand(batch, strata, dtype=torch.float64, generator=generator)
        some = weight * below(2, batch, strata)
        weight = [weight, weight**8, weight.round(), weight * 0, weight * 0 + 1, some][turn % 6]
        most = int(room.sum(1).min())
        if most:
            total: Any = int(below(most, 1)) + 1
            if turn % 2:
                total = below(most, batch) + 1
            least = int(below(2, 1))
            found, expected = both(partial(shared_out, weight, room, total, least), emulated, "shares")
            assert torch.equal(found, expected), (weight, room, total, least)
            assert bool((found.sum(1) == torch.as_tensor(total)).all())


def wishes(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What bands ask for, and how much each gets."""
    generator = torch.Generator().manual_seed(turn)

    def below(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    batch, bands, patches = int(below(3, 1)) + 1, turn % 8 + 1, (1, 5, 60, 300, 700)[turn % 5]
    worth = torch.rand(batch, bands, patches, generator=generator) ** (1 + 3 * (turn % 2))
    if turn % 3 == 0:
        worth = (worth * 3).round()
    if turn % 4 == 0:
        worth[:, 0] += 1  # all of the best pairs are one band's
    room = torch.full((batch, bands), patches)
    weight = torch.rand(batch, bands, dtype=torch.float64, generator=generator) * below(3, batch, bands)
    return worth, shared_out(weight, room, int(below(patches + 1, 1)), least=0)


@ORDERS
def test_served(emulated: EmulatedDevice, order: int) -> None:
    for turn in range(60):
        worth, counts = wishes(turn)
        emulated.order, emulated.seed = order, turn
        found, expected = both(partial(served, worth, counts), emulated, "served")
        assert torch.equal(found, expected), turn
        assert torch.equal(found, given_away(worth, counts, int(counts.sum(1).max()))), turn


@pytest.mark.parametrize("which", range(sources.texts()["served.cu"].count("__syncthreads();")))
def test_every_barrier_of_served_is_needed(emulated: EmulatedDevice, which: int) -> None:
    parts = sources.texts()["served.cu"].split("__syncthreads();")
    before = parts[which][-60:]
    emulated.changes = ((before + "__syncthreads();", before),)
    with pytest.raises(AssertionError):
        for turn, emulated.order in enumerate((0, DESCENDING, SHUFFLED, DESCENDING, SHUFFLED) * 12):
            worth, counts = wishes(turn)
            emulated.seed = turn
            found, expected = both(partial(served, worth, counts), emulated, "served")
            assert torch.equal(found, expected)


def test_more_bands_than_a_block_has_room_for(emulated: EmulatedDevice) -> None:
    worth, counts = torch.rand(1, 9, 20), torch.full((1, 9), 2)
    taken = given_away(worth, counts, 18)
    assert torch.equal(served(worth, counts), taken)
    with pytest.raises(LimitError, match="9 bands of 20 patches"):
        choosing.served(device.device_of(worth), torch.arange(180)[None], counts)


def test_a_missing_barrier_is_noticed(emulated: EmulatedDevice) -> None:
    """By the orders above: the last thread reads where the peak is before the first has written it."""
    finite = torch.rand(1, 16, 16)
    emulated.order = DESCENDING
    emulated.changes = (("        __syncthreads();\n        float dx", "        float dx"),)
    found, expected = both(lambda: peaks_of(finite, 3), emulated, "peaks")
    assert not torch.equal(found, expected)


# -- the soft top-k ----------------------------------------------------------------------------------------------------


def gradients_of(scores: torch.Tensor, count: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The soft top-k, and gradients of a sum of it with other weights for each, times the temperature."""
    scores = scores.clone().requires_grad_()
    soft = soft_top_k(scores, count, temperature)
    weights = torch.linspace(-1, 1, scores.numel(), dtype=torch.float64).view_as(scores)
    return soft.detach(), torch.autograd.grad((soft * weights).sum(), scores)[0] * temperature


@pytest.mark.parametrize("kind", [*KINDS, "huge", "far apart"])
@pytest.mark.parametrize("scores", [2, 17, 256, 300, 1031], ids=str)
def test_the_soft_top_k(emulated: EmulatedDevice, scores: int, kind: str) -> None:
    """Also where no score is near the threshold, and where many are equal at it."""
    more = {"huge": lambda x: x * 1e300, "far apart": lambda x: (x * 3).round() * 120}
    torch.manual_seed(scores)
    values = {**KINDS, **more}[kind](torch.rand(2, 1, scores, dtype=torch.float64))[:, 0]
    if kind == "one hot":
        values = values.double()
    for count, temperature in ((1, 0.1), (scores - 1, 1.0), (max(1, scores // 4), 0.01)):
        emulated.calls.clear()
        found = gradients_of(values, count, temperature)
        assert [call[1].name for call in emulated.named("launch")] == ["threshold"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "KIND", "cuda")
            expected = gradients_of(values, count, temperature)
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[0].sum(1), torch.full((2,), float(count)).double(), rtol=0, atol=1e-9)


def test_thresholds(emulated: EmulatedDevice) -> None:
    """And shares, where it matters to the sum where they are."""
    for scores, count in ((40, 7), (4096, 273), (4096, 4095)):
        logits = torch.randn(2, scores, dtype=torch.float64) * 3
        found = _threshold(logits, count)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "KIND", "cuda")
            expected = _threshold(logits, count)
        assert torch.equal(found[0], expected[0])
        for one, two in zip(found, expected, strict=True):
            assert one.shape == two.shape
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    assert len(emulated.named("launch")) == 3


def test_a_threshold_with_nothing_near_it(emulated: EmulatedDevice) -> None:
    """Is in the middle, and the nearest share in it, as far as they can be told apart."""
    logits = torch.tensor([[60.0, 61, 75, -60, -62, -80]]).double()
    found = _threshold(logits, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KIND", "cuda")
        expected = _threshold(logits, 3)
    assert len(emulated.named("launch")) == 1 and all(map(torch.equal, found[:2], expected[:2]))
    assert float(found[0]) == float(found[1]) == 0
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-12)


def test_no_order_of_threads_moves_a_threshold(emulated: EmulatedDevice) -> None:
    scores, found = torch.rand(3, 700, dtype=torch.float64), []
    for emulated.order, emulated.seed in ((ASCENDING, 0), (DESCENDING, 1), (SHUFFLED, 2)):
        found.append(gradients_of(scores, 60, 0.1))
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["SoftTopKCoverage", "VortexLearned"])
def test_tokens_by_the_soft_top_k(emulated: EmulatedDevice, name: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        relevance, budget = torch.rand(2, 17, 23), (1, 60, 390)[seed]
        allocator = lod.allocate.make(name, budget, 4)
        found = allocator(relevance=relevance)
        assert "threshold" in [call[1].name for call in emulated.named("launch")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "KIND", "cuda")
            expected = allocator(relevance=relevance)
        assert torch.equal(found.sites, expected.sites)
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=1e-7)


def test_soft_top_ks_of_any_layout_and_dtype(emulated: EmulatedDevice) -> None:
    scores = torch.rand(30, 3)
    for given in (scores.T, scores.T.half(), (scores.T * 9).int(), scores.T[:, ::2], scores.T[:0]):
        found = soft_top_k(given, 5, 0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "KIND", "cuda")
            torch.testing.assert_close(found, soft_top_k(given, 5, 0.1), rtol=0, atol=1e-7)
    assert len(emulated.named("launch")) == 4  # none for no rows


def test_soft_top_ks_that_are_left_to_torch(emulated: EmulatedDevice) -> None:
    """More scores than a block goes through; and where torch.func transforms."""
    many = torch.rand(1, choosing.MOST_SCORES + 1, dtype=torch.float64)
    with pytest.raises(LimitError, match=f"{many.numel()} scores"):
        choosing.threshold(device.device_of(many), many, 3, tail=40.0, halvings=52)
    found = soft_top_k(many, 3, 0.1)
    rows = torch.rand(3, 1, 40, dtype=torch.float64)
    mapped = torch.func.vmap(lambda row: soft_top_k(row, 3, 0.1))(rows)
    assert not emulated.named("launch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KIND", "cuda")
        assert torch.equal(found, soft_top_k(many, 3, 0.1))
        torch.testing.assert_close(mapped[:, 0], soft_top_k(rows[:, 0], 3, 0.1), rtol=0, atol=1e-12)


def test_a_threshold_takes_few_steps(emulated: EmulatedDevice) -> None:
    """By the slope: as many as double the digits that are right, and not one for each bit."""
    logits = torch.randn(1, 4096, dtype=torch.float64) * 3
    tail = 40 + math.log(4096)
    found, few = (
        choosing.threshold(device.device_of(logits), logits, 273, tail=tail, halvings=turns) for turns in (52, 7)
    )
    assert all(map(torch.equal, found, few))


# -- the best, and ranks -----------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **KINDS,
    "zeros of both signs": lambda x: (x > 0.5).to(x.dtype) * 0.0 * (x - 0.75).sign(),
    "tiny": lambda x: x * torch.finfo(x.dtype).tiny,
    "of both signs": lambda x: x - 0.5,
    "NaN of both signs": lambda x: torch.where(x > 0.9, torch.copysign(torch.full_like(x, torch.nan), 0.95 - x), x),
}


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ROWS)
def test_the_best(emulated: EmulatedDevice, kind: str, dtype: torch.dtype, order: int) -> None:
    emulated.order, emulated.seed = order, 3
    for there, count in ((1, 1), (40, 40), (40, 7), (300, 1), (700, 500), (2000, 273), (300, 999)):
        scores = ROWS[kind](torch.rand(2, 1, there, dtype=dtype))[:, 0].to(dtype)
        for given in (scores, scores.flip(1).T.contiguous().T):
            emulated.calls.clear()
            found, places = ordered(given, count)
            assert [call[1].name for call in emulated.named("launch")] == ["best"]
            values, index = torch.sort(given, dim=1, descending=True, stable=True)
            assert torch.equal(places, index[:, :count])
            assert torch.equal(found.nan_to_num(), values[:, :count].nan_to_num())


def test_the_best_have_gradients(emulated: EmulatedDevice) -> None:
    scores = torch.rand(2, 50, requires_grad=True)
    found, places = ordered(scores, 3)
    found.sum().backward()
    assert len(emulated.named("launch")) == 1 and scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros(2, 50).scatter(1, places, 1.0))


def test_more_than_a_block_finds_are_sorted(emulated: EmulatedDevice) -> None:
    for there, count in ((choosing.MOST_SCORES + 1, 2), (600, choosing.MOST_BEST + 1)):
        scores = torch.rand(1, there, dtype=torch.float64)
        with pytest.raises(LimitError, match=f"{count} of {there} scores"):
            choosing.best(device.device_of(scores), scores, count)
        assert torch.equal(ordered(scores, count)[1], torch.sort(scores, descending=True, stable=True)[1][:, :count])
    assert not emulated.named("launch")


@ORDERS
@pytest.mark.parametrize("kind", ROWS)
def test_ranks_within_strata(emulated: EmulatedDevice, kind: str, order: int) -> None:
    emulated.order, emulated.seed = order, 4
    for cells, strata in ((1, 1), (300, 1), (300, 300), (700, 9), (2000, 64), (4096, 2)):
        values = ROWS[kind](torch.rand(2, 1, cells))[:, 0]
        stratum = torch.randint(0, strata, (2, cells))
        found, expected = both(lambda v=values, s=stratum, n=strata: ranks_within(v, s, n), emulated, "ranks")
        assert torch.equal(found, expected)


def test_more_than_a_block_ranks_are_sorted(emulated: EmulatedDevice) -> None:
    for cells, strata in ((choosing.MOST_RANKED + 1, 3), (50, choosing.MOST_RANKED + 1)):
        values, stratum = torch.rand(1, cells), torch.randint(0, strata, (1, cells))
        with pytest.raises(LimitError, match=f"{cells} values of {strata} strata"):
            choosing.ranks(device.device_of(values), values, stratum, strata)
        ranks = ranks_within(values, stratum, strata)
        assert torch.equal(torch.sort(ranks).values[0, :1], torch.zeros(1, dtype=torch.long))
    assert not emulated.named("launch")


ORDER_INSIDE = {
    "best": (
        ("scores[place]", "scores[place & 511]"),
        ("p.found[first + (unsigned)rank]", "p.found[first + (unsigned)rank % 273]"),
        ("(unsigned)rank] = place", "(unsigned)rank % 273] = place"),
    ),
    "ranks": (
        ("members[atomicAdd(&ends[strata[i]], 1u)]", "members[atomicAdd(&ends[strata[i]], 1u) % MOST]"),
        ("int other = members[i];", "int other = members[i] % MOST;"),
        ("i < end;", "i < end && i < MOST;"),
    ),
}
"""Where a thread would read and write what is none of its memory without a barrier."""


@pytest.mark.parametrize(
    ("kernel", "which"),
    [(name, i) for name in ("best", "ranks") for i in range(sources.texts()[f"{name}.cu"].count("__syncthreads();"))],
)
def test_every_barrier_of_an_order_is_needed(emulated: EmulatedDevice, kernel: str, which: int) -> None:
    values, stratum = torch.rand(1, 900), torch.randint(0, 7, (1, 900))

    def made() -> torch.Tensor:
        return ordered(values, 273)[1] if kernel == "best" else ranks_within(values, stratum, 7)

    expected, differ = made(), []
    before = sources.texts()[f"{kernel}.cu"].split("__syncthreads();")[which][-60:]
    inside = ORDER_INSIDE[kernel]
    for emulated.seed, emulated.order in enumerate((ASCENDING, DESCENDING, SHUFFLED)):
        emulated.changes = inside
        assert torch.equal(made(), expected)
        emulated.changes = ((before + "__syncthreads();", before), *inside)
        differ.append(not torch.equal(made(), expected))
    assert any(differ)


BARRIERS = {
    "before a sum": "T sum_of_block(T value, T* shared) {\n    shared[threadIdx.x] = value;\n",
    "in it": "+= shared[threadIdx.x + step];\n    ",
    "after it": "T total = shared[0];\n",
}
"""What stands before each."""


@pytest.mark.parametrize("before", BARRIERS.values(), ids=BARRIERS)
def test_every_barrier_of_a_sum_is_needed(emulated: EmulatedDevice, before: str) -> None:
    scores, differ = torch.rand(1, 300, dtype=torch.float64), []
    expected = soft_top_k(scores, 30, 0.1)
    emulated.changes = ((f"{before}    __syncthreads();\n", before),)
    for emulated.order in (ASCENDING, DESCENDING):
        differ.append(not torch.equal(soft_top_k(scores, 30, 0.1), expected))
    assert any(differ)
