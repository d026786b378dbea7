"""Cortical sites, and the e0 of a fovea's share, by kernels, on the emulator, against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from cuda_emulator import ASCENDING, COMPILER, DESCENDING, SHUFFLED, EmulatedDevice
from test_allocate_graphs import Watch
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_lod as lod
from gpu_lod import by_kernel, cached, checks
from gpu_lod.allocate.log_polar import foveal_e0
from gpu_lod.cortical_sites import by_one_launch, direction_of, eccentricity, most_candidates
from gpu_lod.errors import GpuLodWarning, KernelError, LimitError
from gpu_lod.kernels import cortical, device, sources

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

ORDERS = pytest.mark.parametrize(
    "order", [ASCENDING, DESCENDING, SHUFFLED], ids=["ascending", "descending", "shuffled"]
)
PLACES = torch.tensor([[0.31, 0.62], [0, 0], [1, 1], [0.5, 0], [1, 0.3], [0.5, 0.5]]).double()
"""Fixations anywhere, in corners, on edges and in the middle."""
SEARCH = ["foveal"] * 3 + ["foveal_e0"]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def both(run: Callable[[], T], emulated: EmulatedDevice, *launched: str) -> tuple[T, T]:
    """By these kernels alone, and in plain torch."""
    emulated.calls.clear()
    found = run()
    assert [call[1].name for call in emulated.named("launch")] == list(launched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KIND", "cuda")
        return found, run()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for how fp32 rounds."""
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=2e-7)


def check(sites: torch.Tensor) -> None:
    """All inside, and no two of an image the same."""
    assert bool(torch.isfinite(sites).all()) and float(sites[..., 2].min()) >= 0
    assert float(sites[..., :2].min()) >= 0 and float(sites[..., :2].max()) <= 1
    for each in sites:
        assert len(each[:, :2].unique(dim=0)) == len(each)


@pytest.mark.parametrize("fovea", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("budget", [1, 2, 37, 273])
def test_the_e0_of_a_share(emulated: EmulatedDevice, budget: int, fovea: float) -> None:
    """In whatever order threads and blocks run; each of a batch is what it is alone."""
    turn = budget + round(10 * fovea)
    for size, radius in (((64, 64), 0.1), ((37, 64), 1e-3), ((300, 100), 10.0)):
        turn += 1
        emulated.order, emulated.seed = turn % 3, turn
        searched(emulated, PLACES[turn % 6][None], size, budget, fovea, radius)


@ORDERS
def test_the_e0_of_a_batch(emulated: EmulatedDevice, order: int) -> None:
    emulated.order, emulated.seed = order, 2
    found = searched(emulated, PLACES, (48, 64), 60, 0.3, 0.1)
    assert len(found.unique()) == 6


@pytest.mark.parametrize(("size", "budget"), [((64, 64), 1024), ((48, 16384), 1), ((16384, 48), 2)])
def test_the_e0_of_a_share_of_many(emulated: EmulatedDevice, size: tuple[int, int], budget: int) -> None:
    searched(emulated, PLACES[:1], size, budget, 0.3, 0.1)


def searched(
    emulated: EmulatedDevice, points: torch.Tensor, size: tuple[int, int], budget: int, fovea: float, radius: float
) -> torch.Tensor:
    """What is found, which is what plain torch finds."""
    found, expected = both(lambda: foveal_e0(points, size, budget, round(fovea * budget), radius), emulated, *SEARCH)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    return found


@ORDERS
@pytest.mark.parametrize("e0", [1e-4, 0.05, 1e3, 1e6], ids=str)
@pytest.mark.parametrize("budget", [1, 2, 273, 1024])
def test_sites(emulated: EmulatedDevice, budget: int, e0: float, order: int) -> None:
    emulated.order, emulated.seed = order, 3
    for size in ((1024, 1024), (1080, 1920), (700, 40), (1, 1)):
        found, expected = both(
            lambda size=size: lod.cortical_sites(PLACES.float(), budget, size, 14, e0),  # type: ignore[misc]
            emulated,
            "cortical",
        )
        close(found, expected)
        check(found)


def test_sites_of_very_long_pictures(emulated: EmulatedDevice) -> None:
    for size, budget in (((48, 16384), 1), ((16384, 48), 5), ((1, 1000), 3)):
        found, expected = both(
            lambda size=size, budget=budget: lod.cortical_sites(PLACES.float(), budget, size),  # type: ignore[misc]
            emulated,
            "cortical",
        )
        close(found, expected)
        check(found)


@ORDERS
def test_of_sites_that_enter_at_once_the_first_are_taken(emulated: EmulatedDevice, order: int) -> None:
    """As many as are missing; here many are alike, all over the spiral."""
    emulated.order, emulated.seed = order, 5
    emulated.changes = (("enters[i] = (i + 0.5) / magnified(edge, e0);", "enters[i] = 1e4 * (i * 7 % 11 + 1);"),)
    middle, e0, size = PLACES[-1:], 0.05, (64, 64)
    for budget in (3, 4, 57, 301):
        found = by_one_launch(middle, budget, size, 14, e0)
        assert found is not None
        index = torch.arange(most_candidates(size, budget)).double()
        enters, order_of = (1e4 * (index * 7 % 11 + 1)).sort(stable=True)
        density = enters[budget - 1 : budget + 1].mean()
        index = order_of[:budget].sort().values.double()
        expected = middle + eccentricity((index + 0.5) / density, e0)[:, None] * direction_of(index)
        torch.testing.assert_close(found[0][0, :, :2].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"fovea": 0.0}, {"fovea": 1.0, "radius": 0.3}], ids=str)
@pytest.mark.parametrize("budget", [1, 37, 273])
def test_tokens(emulated: EmulatedDevice, budget: int, how: dict[str, float]) -> None:
    """About fixations that are given, and about peaks of relevance."""
    emulated.order, emulated.seed = budget % 3, budget
    allocator, relevance = lod.allocate.LogPolar(budget, 14, **how), torch.rand(2, 33, 47)
    for fixation in (None, PLACES[1:3].float()):
        before = ("amounts", "peaks") if fixation is None else ("amounts",)
        tokens, expected = both(
            lambda fixation=fixation: allocator(relevance=relevance, fixation=fixation),  # type: ignore[misc]
            emulated,
            *(*before, *SEARCH, "cortical", "best"),
        )
        close(tokens.sites, expected.sites)
        torch.testing.assert_close(tokens.scores, expected.scores, rtol=1e-6, atol=1e-7)
        check(tokens.sites)


@torch.no_grad()
def test_nothing_is_waited_for(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything brought, for the verb and for tokens."""
    for module in (cached, checks, by_kernel):
        monkeypatch.setattr(module, "capturing", lambda where: emulated.is_capturing)
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    fixation, relevance = PLACES[:2].float(), torch.rand(2, 33, 47)
    for run, launched in (
        (lambda: lod.cortical_sites(fixation, 60, (480, 640)), ["cortical"]),
        (
            lambda: lod.allocate.LogPolar(60)(relevance=relevance).sites,
            ["amounts", "peaks", *SEARCH, "cortical", "best"],
        ),
    ):
        expected = run()
        emulated.calls.clear()
        emulated.is_capturing = True
        with Watch() as watch:
            found = run()
        emulated.is_capturing = False
        assert not watch.waits and torch.equal(found, expected)
        assert [call[1].name for call in emulated.named("launch")] == launched


@torch.no_grad()
def test_few_operations(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a node of a CUDA graph, which takes a GPU as long as much of the work does."""
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    allocator, relevance = lod.allocate.LogPolar(273), torch.rand(1, 64, 64)
    allocator(relevance=relevance)
    emulated.calls.clear()
    with Operations() as operations:
        allocator(relevance=relevance)
    assert len(emulated.named("launch")) == 8 and operations.count < 30


class Operations(TorchDispatchMode):
    """Counts those that do more than look at memory, or ask for it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        alias = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        self.count += not alias and "empty" not in func._schema.name
        return found


def test_what_is_left_to_torch(emulated: EmulatedDevice) -> None:
    """Gradients, what torch.func transforms, and more sites than a block goes through."""
    points = PLACES.clone().requires_grad_()
    assert by_one_launch(points, 20, (60, 80), 14, 0.05) is None
    e0 = torch.full((6, 1), 0.05).double()
    relevance = torch.rand(6, 5, 6, requires_grad=True)
    assert by_one_launch(PLACES, 20, (60, 80), 14, e0, relevance) is None
    tokens = lod.allocate.LogPolar(20)(relevance=relevance, fixation=PLACES.float())
    assert tokens.scores.requires_grad
    torch.func.grad(lambda one: lod.cortical_sites(one, 20, (60, 80))[..., 0].sum())(PLACES[0].float())
    assert [call[1].name for call in emulated.named("launch")] == [*SEARCH, "best"]
    emulated.calls.clear()
    with torch.no_grad():
        assert by_one_launch(points, 20, (60, 80), 14, e0, relevance) is not None
        assert by_one_launch(points, 20, (60, 80), 14, 0.05) is not None
    emulated.calls.clear()
    long = (48, 16384)
    assert by_one_launch(PLACES, 273, long, 14, 0.05) is None
    found = foveal_e0(PLACES, long, 273, 82, 0.1)
    assert not emulated.named("launch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KIND", "cuda")
        assert torch.equal(found, foveal_e0(PLACES, long, 273, 82, 0.1))
    with pytest.raises(LimitError, match=f"{most_candidates(long, 273)} sites to choose from, 6 times"):
        cortical.sites(device.device_of(PLACES), PLACES, long, 273, most_candidates(long, 273), 14, 0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cortical, "MOST_DENSITIES", 1000)
        assert by_one_launch(PLACES, 20, (60, 80), 14, 0.05) is None


def test_torch_goes_on_where_kernels_fail(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, relevance = lod.allocate.LogPolar(37), torch.rand(2, 20, 30)
    expected = allocator(relevance=relevance, fixation=PLACES[:2].float())
    for _ in range(2):
        monkeypatch.setattr(by_kernel, "_failed", set())
        emulated.fail["launch"] = KernelError("no such kernel")
        with pytest.warns(GpuLodWarning, match="no such kernel"):
            found = allocator(relevance=relevance, fixation=PLACES[:2].float())
        close(found.sites, expected.sites)


def test_what_is_no_fixation_moves_nothing_else(emulated: EmulatedDevice) -> None:
    """In a graph it cannot be refused; the other images are what they are alone."""
    wrong = PLACES.clone()
    wrong[1], wrong[2, 0] = math.nan, 7.0
    e0 = foveal_e0(wrong, (60, 80), 37, 11, 0.1)
    right = torch.tensor([0, 3, 4, 5])
    assert torch.equal(e0[right], foveal_e0(PLACES[right], (60, 80), 37, 11, 0.1))
    relevance = torch.rand(6, 5, 6)
    found, expected = (by_one_launch(points, 37, (60, 80), 14, e0, relevance) for points in (wrong, PLACES))
    assert found is not None and expected is not None
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one[right], two[right])


# -- barriers ----------------------------------------------------------------------------------------------------------


def parts(file: str) -> list[tuple[str, str]]:
    """Changes that leave out one barrier each."""
    pieces = sources.texts()[file].split("__syncthreads();")
    return [(before[-70:] + "__syncthreads();", before[-70:]) for before in pieces[:-1]]


BOUNDED = "sites[3 * place] = (float)i;", "if ((unsigned)place < (unsigned)s.budget) sites[3 * place] = (float)i;"
"""Whatever threads count that did not wait."""
BARRIERS = [*parts("select.cuh"), *parts("cortical.cu"), *parts("block.cuh")[-3:]]


@pytest.mark.parametrize("change", BARRIERS, ids=range(len(BARRIERS)))
def test_every_barrier_is_needed(emulated: EmulatedDevice, change: tuple[str, str]) -> None:
    relevance = torch.rand(2, 20, 30)
    expected = by_one_launch(PLACES[:2], 273, (320, 480), 16, 0.05, relevance)
    assert expected is not None
    emulated.changes = change, BOUNDED
    with pytest.raises(AssertionError):
        for turn, emulated.order in enumerate((ASCENDING, DESCENDING, SHUFFLED, SHUFFLED)):
            emulated.seed = turn
            found = by_one_launch(PLACES[:2], 273, (320, 480), 16, 0.05, relevance)
            assert found is not None
            for one, two in zip(found, expected, strict=True):
                assert torch.equal(one, two)
