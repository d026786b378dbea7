"""Spirals about the peaks by kernels, on the emulator, against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_emulator import COMPILER, DESCENDING, SHUFFLED, EmulatedDevice

import gpu_lod as lod
from gpu_lod.allocate import ordering
from gpu_lod.allocate.peak_cells import PeakCells, _held
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import LimitError
from gpu_lod.kernels import device, sources, spirals

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

ORDERS = pytest.mark.parametrize("order", [0, DESCENDING, SHUFFLED], ids=["ascending", "descending", "shuffled"])
KINDS = [("Spiral", {"kind": kind}) for kind in ("golden", "archimedean", "fibonacci")] + [("Whirlwind", {})]
EACH = pytest.mark.parametrize(("name", "how"), KINDS, ids=list(sources.SPIRALS))
PATCH = 4


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def both(run: Callable[[], Any], emulated: EmulatedDevice, kernel: str = "spirals") -> tuple[Any, Any]:
    """By the kernel, and in plain torch."""
    emulated.calls.clear()
    found = run()
    assert kernel in [call[1].name for call in emulated.named("launch")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KIND", "cuda")
        return found, run()


def same(found: lod.TokenSet, expected: lod.TokenSet, *, xy: float = 1e-6, level: float = 1e-5) -> None:
    """Tokens, in the same order."""
    assert found.sites.dtype == torch.float32 and found.sites.shape == expected.sites.shape
    torch.testing.assert_close(found.sites[..., :2], expected.sites[..., :2], rtol=0, atol=xy)
    torch.testing.assert_close(found.sites[..., 2], expected.sites[..., 2], rtol=0, atol=level)
    assert torch.equal(found.scores, expected.scores)


def apart(tokens: lod.TokenSet) -> None:
    """No site twice, none outside."""
    for sites in tokens.sites[..., :2]:
        assert len(sites.unique(dim=0)) == tokens.sites.shape[1]
    assert float(tokens.sites[..., :2].min()) > 0 and float(tokens.sites[..., :2].max()) < 1


def scene_of(relevance: torch.Tensor, short: int = 0) -> Scene:
    """Of a picture whose sides are shorter by so much than its grid."""
    size = relevance.shape[1] * PATCH - short, relevance.shape[2] * PATCH - short
    return Scene(size, PATCH, relevance, None, None, None, None)


STEEP: Any = {"xy": 1e-5, "level": 1e-4}
"""Of a whirlwind where relevance is, or its rays cross hundreds of patches. It is read in fp32, and torch itself is off
by as much."""

RELEVANCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "any": lambda x: x,
    "steep": lambda x: x**9,
    "flat": torch.ones_like,
    "zeros": torch.zeros_like,
    "one hot": lambda x: (x == x.amax((1, 2), keepdim=True)).float(),
    "negative": lambda x: x - 2,
    "infinite": lambda x: torch.where(x > 0.9, torch.inf, torch.where(x < 0.2, -torch.inf, x)),
}


# -- what cells hold ---------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("short", [0, 3])
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (12, 17), (64, 64)], ids=str)
def test_what_cells_hold(emulated: EmulatedDevice, size: tuple[int, int], short: int, order: int) -> None:
    """Patches between two peaks too, which the first of them has, and where peaks coincide."""
    emulated.order, emulated.seed = order, 7
    scene = scene_of(torch.rand(3, *size), short)
    for count in (1, 2, 8, 70):
        points = torch.rand(3, count, 2)
        points[1] = (points[1] * 4).round() / 4
        points[2, :, 0] = torch.linspace(0.25, 0.75, count)
        (weight, room), (expected, wanted) = both(lambda at=points: _held(scene, at, 9), emulated, "cells")  # type: ignore[misc]
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)
        assert torch.equal(room, wanted) and room.dtype == wanted.dtype


def test_maps_of_more_cells_than_a_block_takes(emulated: EmulatedDevice) -> None:
    relevance = torch.rand(1, 257, 256)
    with pytest.raises(LimitError, match="257 x 256 cells"):
        spirals.cells(device.device_of(relevance), relevance, torch.rand(1, 2, 2), (257, 256), 1, 1)
    same(*both(lambda: lod.allocate.Spiral(40, PATCH)(relevance=relevance), emulated))


# -- sites -------------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(("relevance", "order"), [("any", 0), *zip(RELEVANCE, [1, 2] * 9, strict=False)])
def test_spirals(emulated: EmulatedDevice, relevance: str, order: int, name: str, how: dict[str, Any]) -> None:
    """In all orders of threads."""
    emulated.order, emulated.seed = order, 3
    given = RELEVANCE[relevance](torch.rand(2, 17, 31))
    allocator = lod.allocate.make(name, 273, PATCH, **how)
    found, expected = both(lambda: allocator(relevance=given), emulated)
    same(found, expected, **(STEEP if relevance == "one hot" else {}))
    apart(found)


@EACH
@pytest.mark.parametrize(
    ("peaks", "budget"), [(1, 1), (1, 273), (1, 1024), (3, 2), (8, 1), (8, 273), (8, 1024), (40, 2), (40, 273)]
)
def test_any_budget_and_number_of_peaks(
    emulated: EmulatedDevice, peaks: int, budget: int, name: str, how: dict[str, Any]
) -> None:
    """More sites than a block keeps the densities of, and cells that get none. Images whose far patches reach over the
    edges."""
    allocator = lod.allocate.make(name, budget, PATCH, peaks=peaks, **how)
    image, relevance = torch.rand(2, 3, 93, 61), torch.rand(2, 24, 16)
    found, expected = both(lambda: allocator(image, relevance), emulated)
    same(found, expected)
    apart(found)


@EACH
def test_more_sites_than_are_kept(emulated: EmulatedDevice, name: str, how: dict[str, Any]) -> None:
    emulated.order = DESCENDING
    allocator, relevance = lod.allocate.make(name, 4000, PATCH, peaks=1, **how), torch.rand(1, 24, 31)
    found, expected = both(lambda: allocator(relevance=relevance), emulated)
    same(found, expected)
    apart(found)


@EACH
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 200), (3, 256), (256, 3)], ids=str)
def test_small_and_long_pictures(
    emulated: EmulatedDevice, size: tuple[int, int], name: str, how: dict[str, Any]
) -> None:
    """More peaks than there are patches stand where others do."""
    for budget, peaks in ((5, 30), (273, 8), (273, 1)):
        allocator = lod.allocate.make(name, budget, 16, peaks=peaks, **how)
        relevance = torch.rand(2, *size)
        found, expected = both(lambda a=allocator, r=relevance: a(relevance=r), emulated)  # type: ignore[misc]
        same(found, expected, **(STEEP if name == "Whirlwind" else {}))
        apart(found)


@EACH
@pytest.mark.parametrize("corner", [(0, 0), (0, -1), (-1, 5), (9, -1)], ids=str)
def test_peaks_in_corners_and_at_edges(
    emulated: EmulatedDevice, corner: tuple[int, int], name: str, how: dict[str, Any]
) -> None:
    relevance = torch.rand(1, 15, 20) / 9
    relevance[0, corner[0], corner[1]] += 5
    for peaks in (1, 4):
        allocator = lod.allocate.make(name, 100, 1, peaks=peaks, **how)
        found, expected = both(lambda a=allocator: a(relevance=relevance), emulated)  # type: ignore[misc]
        same(found, expected)
        apart(found)


def chosen(kind: str, points: torch.Tensor, counts: torch.Tensor, budget: int) -> torch.Tensor:
    """Sites by the kernel, before they are put in order."""
    relevance = torch.rand(len(points), 24, 31)
    weight = torch.rand(points.shape[:2], dtype=torch.float64) + 9
    return spirals.spirals(
        device.device_of(points), kind, points, counts, budget, (24 * PATCH, 31 * PATCH), PATCH, relevance, weight, 0.1
    )


@ORDERS
@pytest.mark.parametrize("kind", sources.SPIRALS)
def test_sites_are_inside_their_cells(emulated: EmulatedDevice, kind: str, order: int) -> None:
    """From peak to peak, the first at each. Peaks close to each other and to edges too; some get nothing."""
    emulated.order, emulated.seed = order, 4
    points = torch.rand(3, 9, 2)
    points[0] = 0.5 + (points[0] - 0.5) * 1e-3
    points[1, :, 1] = 1e-4
    points[2, 3] = points[2, 5]
    counts = torch.tensor([[1, 0, 40, 3, 0, 100, 2, 0, 54], [0, 0, 0, 0, 0, 0, 0, 0, 200], [40] * 5 + [0] * 4])
    sites = chosen(kind, points, counts, 200)
    assert sites.dtype == torch.float64 and sites.shape == (3, 200, 3)
    assert float(sites[..., :2].min()) > 0 and float(sites[..., :2].max()) < 1 and float(sites[..., 2].min()) >= 0
    box = torch.tensor([1, 24 / 31], dtype=torch.float64)
    for places, peaks, shares in zip(sites[..., :2] * box, points.double() * box, counts, strict=True):
        owner = torch.arange(9).repeat_interleave(shares)
        away = torch.cdist(places, peaks)
        assert bool((away.gather(1, owner[:, None]) <= away.amin(1, keepdim=True)).all())
        firsts = (shares.cumsum(0) - shares)[shares > 0]
        assert torch.equal(places[firsts], peaks[shares > 0])
        for peak in range(9):
            if kind == "golden" or kind == "fibonacci":  # each farther out than the one before
                assert bool((away[owner == peak, peak].diff() > 0).all())


TIES = {"in threes": (lambda i: i // 3, "site / 3"), "in turns": (lambda i: 7 * i % 5, "7 * site % 5")}
"""Densities at which sites enter, by their index: in torch, and in C."""


@ORDERS
@pytest.mark.parametrize("ties", TIES)
def test_of_sites_that_enter_at_once_the_first_are_taken(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, ties: str, order: int
) -> None:
    emulated.order = order
    law, source = TIES[ties]
    fill = PeakCells.fill

    def tied(self: PeakCells, enters: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fill(self, (1.0 + law(torch.arange(enters.shape[-1]))).expand_as(enters), needed)

    monkeypatch.setattr(PeakCells, "fill", tied)
    monkeypatch.setattr(ordering, "_by_kernel", lambda *_: None)  # of whose kernel nothing is changed
    scene = scene_of(torch.rand(1, 24, 31))
    for budget in (1, 2, 10, 97, 300):
        cells = PeakCells(scene, 3, budget)
        emulated.changes = (("site > 0 ? turn.within / reach : 0.0", f"1.0 + (double)({source})"),)
        found = cells.launched("golden")
        emulated.changes = ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "KIND", "cuda")
            expected = lod.allocate.Spiral(budget, PATCH, peaks=3).choose(scene)
        assert found is not None
        same(*(lod.TokenSet(tokens[0], tokens[1], None, PATCH) for tokens in (found, expected)))


def test_equal_scores_are_in_the_order_of_peaks_and_outward(emulated: EmulatedDevice) -> None:
    """For nothing else tells them apart."""
    relevance = torch.ones(1, 24, 31)
    for kind in ("golden", "fibonacci"):
        allocator = lod.allocate.Spiral(200, PATCH, kind=kind, peaks=5)
        found, expected = both(lambda a=allocator: a(relevance=relevance), emulated)  # type: ignore[misc]
        assert len(found.scores.unique()) == 1
        same(found, expected)


@EACH
def test_an_image_of_a_batch_is_as_alone(emulated: EmulatedDevice, name: str, how: dict[str, Any]) -> None:
    emulated.order, emulated.seed = SHUFFLED, 11
    allocator, relevance = lod.allocate.make(name, 90, PATCH, **how), torch.rand(5, 12, 17) ** 4
    together = allocator(relevance=relevance)
    for image in range(5):
        alone = allocator(relevance=relevance[image])
        assert torch.equal(alone.sites, together.sites[image]) and torch.equal(alone.scores, together.scores[image])


@EACH
def test_scores_keep_their_gradients(emulated: EmulatedDevice, name: str, how: dict[str, Any]) -> None:
    """And sites have none."""
    relevance = torch.rand(2, 12, 17, requires_grad=True)
    allocator = lod.allocate.make(name, 50, PATCH, **how)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = allocator(relevance=relevance)
        assert not tokens.sites.requires_grad
        weights = torch.linspace(0, 1, 50)
        return tokens.scores.detach(), torch.autograd.grad((tokens.scores * weights).sum(), relevance)[0]

    found, expected = both(run, emulated)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", sources.SPIRALS)
def test_what_is_no_number_stays_in_its_image(emulated: EmulatedDevice, kind: str) -> None:
    """While a graph is captured nobody looks for such: shares and places of them are anything."""
    points = torch.rand(3, 4, 2)
    counts = torch.tensor([[10, 10, 10, 10]] * 3)
    torch.manual_seed(1)
    expected = chosen(kind, points, counts, 40)
    for wrong in ([2**62, -(2**62), 7, 60], [-5, 2**31 - 1, 10, -3], [41, 41, 41, 41]):
        odd, places = counts.clone(), points.clone()
        odd[0], odd[2] = torch.tensor(wrong), torch.tensor(wrong)
        places[0], places[2, 1] = math.nan, math.inf
        torch.manual_seed(1)
        found = chosen(kind, places, odd, 40)
        assert torch.equal(found[1], expected[1])


def test_more_sites_than_a_block_chooses(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    points, counts = torch.rand(1, 1, 2), torch.tensor([[spirals.MOST_SITES + 1]])
    with pytest.raises(LimitError, match=f"{spirals.MOST_SITES + 1} sites"):
        chosen("golden", points, counts, spirals.MOST_SITES + 1)
    monkeypatch.setattr(spirals, "MOST_SITES", 30)
    relevance = torch.rand(1, 9, 12)
    for name, how in KINDS:
        emulated.calls.clear()
        allocator = lod.allocate.make(name, 31, PATCH, **how)
        found = allocator(relevance=relevance)
        assert [call[1].name for call in emulated.named("launch")] == ["amounts", "peaks", "cells", "shares", "best"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "KIND", "cuda")
            same(found, allocator(relevance=relevance))


# -- barriers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(sources.texts()["spirals.cu"].count("__syncthreads();")))
def test_every_barrier_of_spirals_is_needed(emulated: EmulatedDevice, which: int) -> None:
    parts = sources.texts()["spirals.cu"].split("__syncthreads();")
    before = parts[which][-60:]
    points, counts = torch.rand(2, 3, 2), torch.tensor([[30, 300, 10], [1, 0, 339]])
    torch.manual_seed(2)
    expected = chosen("whirlwind", points, counts, 340)
    emulated.changes = ((before + "__syncthreads();", before),)

    def differs() -> bool:
        torch.manual_seed(2)
        return not torch.equal(chosen("whirlwind", points, counts, 340), expected)

    orders = enumerate((0, DESCENDING, SHUFFLED, SHUFFLED, SHUFFLED))
    assert any(differs() for emulated.seed, emulated.order in orders)
