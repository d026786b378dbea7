"""Allocators that place sites freely: the fovea's share, spirals about the peaks, and one budget for a batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpu_lod as lod
from gpu_lod.allocate.peak_cells import PeakCells
from gpu_lod.errors import InputError

EQUAL = [
    (value, height, width) for value in (0.1, 1 / 3, 0.7, 1e-8) for height, width in ((111, 111), (37, 53), (64, 90))
]


@pytest.mark.parametrize(("value", "height", "width"), EQUAL)
def test_of_equal_relevance_the_middle_is_the_peak(value: float, height: int, width: int) -> None:
    found = lod.allocate.find_fixations(torch.full((1, height, width), value), 3)
    assert torch.equal(found, lod.allocate.find_fixations(torch.ones(1, height, width), 3))


KINDS = ["golden", "archimedean", "fibonacci"]
SPIRALS = [("Spiral", {"kind": kind}) for kind in KINDS] + [("Whirlwind", {})]
unit = st.floats(0, 1)


def bumps(*peaks: tuple[float, float, float], size: tuple[int, int] = (32, 32), width: float = 0.08) -> torch.Tensor:
    """[1, Hg, Wg] of Gaussian peaks (x, y, height), in units of width and height."""
    y = ((torch.arange(size[0]) + 0.5) / size[0])[:, None]
    x = (torch.arange(size[1]) + 0.5) / size[1]
    return sum((h * torch.exp(-((x - px) ** 2 + (y - py) ** 2) / (2 * width**2)) for px, py, h in peaks), 0 * x)[None]


def at(sites: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Places in units of the longer side."""
    return sites[..., :2].double() * torch.tensor([size[1], size[0]], dtype=torch.float64) / max(size)


def nearest(places: torch.Tensor) -> torch.Tensor:
    return torch.cdist(places, places).fill_diagonal_(math.inf).amin(1)


# -- LogPolar ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (37, 64), (64, 20)])
@pytest.mark.parametrize("fovea", [0.2, 0.3, 0.4, 0.6])
@pytest.mark.parametrize("budget", [64, 273, 1000])
def test_the_fovea_holds_its_share(size: tuple[int, int], fovea: float, budget: int) -> None:
    """Exactly, in corners and at edges too, for each image of a batch."""
    fixation = torch.cat([torch.rand(6, 2), torch.tensor([[0.5, 0.5], [0, 0], [1, 1], [0.5, 0], [1, 0.3]])])
    tokens = lod.allocate.LogPolar(budget, 16, fovea=fovea)(relevance=torch.rand(11, *size), fixation=fixation)
    away = (at(tokens.sites, size) - at(fixation, size)[:, None]).norm(dim=-1)
    assert ((away <= 0.1).sum(1) == round(fovea * budget)).all()


@given(
    unit, unit, st.integers(1, 40), st.integers(1, 40), st.integers(1, 400), st.floats(0.05, 0.4), st.floats(0.2, 0.7)
)
def test_the_share_is_within_a_token_where_it_can_be(
    x: float, y: float, rows: int, columns: int, budget: int, radius: float, fovea: float
) -> None:
    tokens = lod.allocate.LogPolar(budget, fovea=fovea, radius=radius)(
        relevance=torch.ones(1, rows, columns), fixation=(x, y)
    )
    away = (at(tokens.sites, (rows, columns)) - at(torch.tensor([x, y]), (rows, columns))).norm(dim=-1)
    missing = int((away <= radius).sum()) - round(fovea * budget)
    spacing = float(tokens.sites[..., 2].exp2().max() / tokens.sites[..., 2].exp2().min())
    # More in the fovea than asked for: its part of the area is more, and sites are even. Fewer: they cannot be denser.
    assert abs(missing) <= 1 or (missing > 0 and spacing < 1.01) or (missing < 0 and fovea > 0.5)


def test_few_sites_in_a_long_picture() -> None:
    """They need many candidates: as many in a batch as alone, where others ask for more."""
    allocator = lod.allocate.LogPolar(2, 4, radius=0.5)
    fixation = torch.cat([torch.linspace(0, 1, 40)[:, None], torch.full((40, 1), 0.5)], dim=1)
    relevance = torch.ones(40, 1, 32)
    together = allocator(relevance=relevance, fixation=fixation)
    for image in range(40):
        alone = allocator(relevance=relevance[image], fixation=fixation[image])
        assert torch.equal(alone.sites, together.sites[image])


@pytest.mark.parametrize("size", [(3, 2000), (2000, 3), (8, 4000)])
def test_long_pictures_have_their_share_too(size: tuple[int, int]) -> None:
    """Nearly all candidates leave them at once; the fovea's share is exact, and each image's its own."""
    allocator = lod.allocate.LogPolar(273, 7)
    fixation = torch.tensor([[0, 0], [0.5, 0.5], [0.31, 0.9], [1, 0.4]])
    relevance = torch.rand(4, *size)
    together = allocator(relevance=relevance, fixation=fixation).sites
    away = (at(together, size) - at(fixation, size)[:, None]).norm(dim=-1)
    assert ((away <= 0.1).sum(1) == 82).all()
    for image in range(4):
        assert len(together[image, :, :2].unique(dim=0)) == 273
        assert torch.equal(allocator(relevance=relevance[image], fixation=fixation[image]).sites, together[image])


def test_cortical_sites_with_another_e0() -> None:
    """The sites of the verb, levels too, with the e0 that scores tell of."""
    allocator = lod.allocate.LogPolar(273, 16)
    tokens = allocator(relevance=torch.ones(1, 64, 48), fixation=(0.3, 0.6))
    sites = tokens.sites[0]
    away = (at(sites, (64, 48)) - at(torch.tensor([0.3, 0.6]), (64, 48))).norm(dim=-1)
    e0 = away * tokens.scores[0] / (1 - tokens.scores[0])  # scores are e0 / (e + e0)
    assert float(e0.max() / e0.min()) < 1.001
    expected = lod.cortical_sites((0.3, 0.6), 273, (1024, 768), 16, e0=float(e0.median()))
    assert torch.allclose(sites, expected, atol=1e-4)
    assert bool((away.diff() >= 0).all())  # magnification alone: innermost first
    wide, narrow = (
        lod.allocate.LogPolar(273, 16, fovea=fovea)(relevance=torch.ones(1, 64, 48), fixation=(0.3, 0.6)).scores
        for fovea in (0.2, 0.5)
    )
    assert float(narrow.mean()) < float(wide.mean())  # a smaller e0


def test_the_peak_is_the_fixation_where_none_is_given() -> None:
    relevance = bumps((0.7, 0.3, 1.0))
    [best] = lod.allocate.LogPolar(50)(relevance=relevance).sites[:, 0].tolist()
    assert math.dist(best[:2], (0.7, 0.3)) < 0.03
    low, high = (lod.allocate.LogPolar(50, fovea=fovea)(relevance=relevance).sites[0, :, 2] for fovea in (0.0, 1.0))
    assert float(high.max()) > float(low.max()) + 1


# -- Spiral and Whirlwind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), SPIRALS)
def test_sites_are_shared_among_the_cells_of_the_peaks(name: str, how: dict[str, Any]) -> None:
    """Every site is nearest to the peak whose share it is of; shares follow the relevance of the cells."""
    size = (30, 40)
    relevance = bumps((0.2, 0.3, 3.0), (0.8, 0.3, 2.0), (0.5, 0.8, 1.0), size=size)
    tokens = lod.allocate.make(name, 200, 16, peaks=3, **how)(relevance=relevance)
    points = at(lod.allocate.find_fixations(relevance, 3)[0], size)
    owner = torch.cdist(at(tokens.sites[0], size), points).argmin(1)
    counts = torch.bincount(owner, minlength=3).tolist()
    y, x = torch.meshgrid(torch.arange(30) + 0.5, torch.arange(40) + 0.5, indexing="ij")
    cells = torch.cdist(torch.stack([x, y], dim=-1).view(-1, 2).double() / 40, points).argmin(1)
    held = torch.zeros(3).index_add(0, cells, relevance.flatten())
    assert sum(counts) == 200 and counts[0] > counts[1] > counts[2] > 0
    for count, share in zip(counts, (held / held.sum()).tolist(), strict=True):
        assert abs(count - (1 + 197 * share)) < 1
    # The first of each stands at its peak.
    assert float(torch.cdist(points, at(tokens.sites[0], size)).amin(1).max()) < 1e-6


@given(
    st.sampled_from(SPIRALS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 1024), st.integers(1, 80),
    st.integers(0, 2**20),
)  # fmt: skip
def test_any_number_of_peaks_and_tokens(
    which: tuple[str, dict[str, Any]], rows: int, columns: int, budget: int, peaks: int, seed: int
) -> None:
    """More tokens than pixels, more peaks than tokens, peaks that stand on each other: no site twice, none outside."""
    torch.manual_seed(seed)
    relevance = torch.rand(1, rows, columns).pow(seed % 9)
    name, how = which
    sites = lod.allocate.make(name, budget, 2, peaks=peaks, **how)(relevance=relevance).sites[0]
    assert sites.shape == (budget, 3) and bool(torch.isfinite(sites).all())
    assert len(sites[:, :2].unique(dim=0)) == budget
    assert float(sites[:, :2].min()) > 0 and float(sites[:, :2].max()) < 1


@pytest.mark.parametrize("kind", ["archimedean", "fibonacci"])
def test_even_spirals_are_even(kind: str) -> None:
    """The distance of neighbours is what the level says, everywhere; the whole picture has its sites."""
    size = (30, 40)
    sites = lod.allocate.Spiral(273, 4, kind=kind, peaks=1)(relevance=bumps((0.4, 0.5, 1.0), size=size)).sites[0]
    assert float(sites[:, 2].max() - sites[:, 2].min()) < 1e-6
    spacing = 4 * 2 ** float(sites[0, 2]) / 160
    assert spacing == pytest.approx(math.sqrt(0.75 / 273), rel=0.05)
    apart = nearest(at(sites, size)) / spacing
    assert float(apart.min()) > 0.6 and float(apart.max()) < 1.2 and 0.85 < float(apart.median()) < 1.1
    for column, row in itertools.product(range(4), range(3)):
        inside = ((sites[:, :2] * sites.new_tensor([4, 3])).long() == torch.tensor([column, row])).all(-1)
        assert abs(int(inside.sum()) - 273 / 12) <= 4


def test_golden_arms() -> None:
    """Sites are on a few arms of the golden spiral, each turned by as much, and as far apart as the level says."""
    size = (128, 128)
    relevance = bumps((0.5, 0.5, 1.0), size=size)
    sites = lod.allocate.Spiral(200, 4, kind="golden", peaks=1)(relevance=relevance).sites[0]
    [peak] = at(lod.allocate.find_fixations(relevance)[0], size)
    offset = at(sites, size) - peak
    radius = offset.norm(dim=-1)
    away = radius > 1e-6
    assert int(away.sum()) == 199 and float(radius[away].min()) == pytest.approx(4 / 512, rel=0.3)
    angle = torch.atan2(offset[:, 1], offset[:, 0])[away]
    golden = math.log((1 + math.sqrt(5)) / 2) / (math.pi / 2)
    turned = (angle - radius[away].log() / golden) / (2 * math.pi)

    def astray(arms: int) -> float:
        """Of the sites from that many arms, evenly turned, in parts of an arm's distance."""
        mean = torch.polar(torch.ones_like(turned), 2 * math.pi * arms * turned).mean()
        return 1 - float(mean.abs())

    fewest = min(arms for arms in range(1, 30) if astray(arms) < 1e-6)
    assert 2 <= fewest <= 12
    spacing = 4 * sites[:, 2].double().exp2() / 512
    told = away & (sites[:, 2] > 0)
    assert int(told.sum()) > 120
    ratio = nearest(at(sites, size))[told] / spacing[told]
    assert float(ratio.min()) > 0.6 and float(ratio.max()) < 1.3
    growth = spacing[told] / radius[told]
    assert float(growth.max() / growth.min()) < 1.001  # self-similar
    # On a golden arm neighbours are as far along it as the arms are from each other.
    across = 2 * math.pi * math.sin(math.atan(golden)) / fewest
    assert 0.7 < across / float(growth.mean()) < 1.4


def test_golden_is_dense_at_the_peak_and_even_ones_are_not() -> None:
    relevance = bumps((0.3, 0.6, 1.0))
    near = {}
    for kind in KINDS:
        sites = lod.allocate.Spiral(200, 14, kind=kind, peaks=1)(relevance=relevance).sites[0]
        near[kind] = int(((sites[:, :2] - torch.tensor([0.3, 0.6])).norm(dim=-1) < 0.15).sum())
    even = 200 * math.pi * 0.15**2
    assert near["golden"] > 4 * even
    assert abs(near["archimedean"] - even) < 4 and abs(near["fibonacci"] - even) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_convention_spirals_turn_from_x_towards_y_down(kind: str) -> None:
    """Along the arm of the single peak, from site to site outward."""
    relevance = bumps((0.5, 0.5, 1.0))
    sites = lod.allocate.Spiral(80, 14, kind=kind, peaks=1)(relevance=relevance).sites[0].double()
    offset = sites[:, :2] - lod.allocate.find_fixations(relevance)[0].double()
    offset = offset[offset.norm(dim=-1).argsort()][1:40]
    turned = torch.atan2(offset[:, 1], offset[:, 0]).diff() / (2 * math.pi) % 1
    if kind == "fibonacci":
        assert torch.allclose(turned, turned.new_tensor((3 - math.sqrt(5)) / 2), atol=1e-3)
    elif kind == "archimedean":
        assert float(turned[3:].max()) < 0.25 and float(turned.min()) > 0
        slope = offset.norm(dim=-1).diff() / turned
        assert float(slope.max() / slope.min()) < 1.001
    else:
        assert float(turned.max() - turned.min()) < 1e-3 and float(turned.min()) > 0


@pytest.mark.parametrize("peaks", [1, 5])
def test_a_whirlwind_over_even_relevance_is_a_sunflower(peaks: int) -> None:
    relevance = torch.ones(1, 24, 31)
    sites = lod.allocate.Whirlwind(300, 4, peaks=peaks)(relevance=relevance).sites
    expected = lod.allocate.Spiral(300, 4, kind="fibonacci", peaks=peaks)(relevance=relevance).sites
    assert torch.allclose(sites, expected, atol=1e-5)


def test_whirlwinds_are_tight_where_relevance_is() -> None:
    """Areal density is relevance plus the floor, in each direction for itself."""
    relevance = torch.ones(1, 48, 48)
    relevance[..., 24:] = 3
    relevance[0, 20:28, 20:28] += 0.5  # where to look
    for floor in (0.1, 2.0):
        sites = lod.allocate.Whirlwind(1000, 4, peaks=1, floor=floor)(relevance=relevance).sites[0]
        right = sites[:, 0] > 0.5
        mean = float(relevance.mean())
        expected = (3 / mean + floor) / (1 / mean + floor)
        assert float(right.sum() / (~right).sum()) == pytest.approx(expected, rel=0.07)
        far = (sites[:, :2] - 0.5).abs().amax(-1) > 0.2
        finer = sites[far & ~right, 2].mean() - sites[far & right, 2].mean()
        assert float(finer) == pytest.approx(math.log2(expected) / 2, abs=0.05)
    spiral = lod.allocate.Spiral(1000, 4, kind="fibonacci", peaks=1)(relevance=relevance).sites[0]
    assert abs(int((spiral[:, 0] > 0.5).sum()) - 500) < 20


def test_a_whirlwind_has_turns_where_relevance_is() -> None:
    """A ring of relevance about the peak gets its sites, and what is within it few."""
    y, x = torch.meshgrid((torch.arange(64) + 0.5) / 64, (torch.arange(64) + 0.5) / 64, indexing="ij")
    away = torch.hypot(x - 0.5, y - 0.5)
    ring = (away - 0.3).abs() < 0.05
    relevance = ring * 1.0 + 1.2 * (away < 0.06)
    tokens = lod.allocate.Whirlwind(300, 4, peaks=1)(relevance=relevance[None])
    e = (tokens.sites[0, :, :2] - 0.5).norm(dim=-1)
    density = relevance / relevance.mean() + 0.1
    for low, high in ((0.0, 0.08), (0.08, 0.23), (0.23, 0.37), (0.37, 0.5)):
        band = (away >= low) & (away < high)
        share = float(density[band].sum() / density.sum())
        assert float(((e >= low) & (e < high)).float().mean()) == pytest.approx(share, abs=0.02)
    assert float(tokens.sites[0, (e - 0.3).abs() < 0.04, 2].mean()) < float(tokens.sites[0, e > 0.4, 2].mean()) - 1


@pytest.mark.parametrize(("name", "how"), SPIRALS)
def test_levels_span_the_spacing(name: str, how: dict[str, Any]) -> None:
    """Patches all together have about the picture's area, and most neighbours touch."""
    relevance = bumps((0.3, 0.3, 1.0), (0.7, 0.6, 1.0)) + 0.05
    sites = lod.allocate.make(name, 273, 1, peaks=2, **how)(
        relevance=torch.nn.functional.interpolate(relevance[None], (256, 256), mode="bilinear")[0]
    ).sites[0]
    side = sites[:, 2].double().exp2() / 256
    assert 0.75 < float(side.square().sum()) < 1.25
    apart = nearest(sites[:, :2].double()) / side
    assert 0.6 < float(apart.median()) < 1.05


def test_cells_end_where_they_should() -> None:
    """How far a cell reaches, against a walk along the ray."""
    relevance = torch.rand(1, 24, 31)
    scene, _ = lod.allocate.Spiral(50, 4)._scene(None, relevance, None, None, None)
    cells = PeakCells(scene, 5, 50)
    angle = torch.linspace(0, 6, 17, dtype=torch.float64)
    found = cells.reach(angle)[0]
    box = torch.tensor([1, 24 / 31], dtype=torch.float64)
    points = cells.points[0] * box
    steps = torch.linspace(0, 1.5, 15001, dtype=torch.float64)
    for peak, turn in itertools.product(range(5), range(17)):
        way = torch.stack([angle[turn].cos(), angle[turn].sin()])
        walk = points[peak] + steps[:, None] * way
        outside = ((walk < 0) | (walk > box)).any(-1) | (torch.cdist(walk, points).argmin(1) != peak)
        assert float(found[peak, turn]) == pytest.approx(float(steps[outside.long().argmax()]), abs=2e-4)


# -- the bank ----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["GridTopK", "PyramidTopK", "Spiral", "FoveatedPyramid", "Random"]),
    st.sampled_from([1, 2, 3, 5, 7]),
    st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.9, 1.0]), st.sampled_from([1, 2, 4, 9]), st.integers(0, 2**20),
)  # fmt: skip
def test_a_bank_spends_its_total(name: str, batch: int, share: float, least: int, seed: int) -> None:
    torch.manual_seed(seed)
    relevance = torch.rand(batch, 5, 7).pow(3) * torch.rand(batch, 1, 1).pow(6)
    lowest, there = batch * least, batch * 35
    total = lowest + round(share * (there - lowest))
    bank = lod.allocate.TokenBank(lod.allocate.make(name), total, least)
    packed = bank(relevance=relevance)
    counts = packed.counts.tolist()
    assert sum(counts) == total == len(packed.sites) and packed.longest == max(counts)
    assert min(counts) >= least and max(counts) <= 35
    assert packed.offsets.dtype == torch.int32 and packed.offsets.tolist() == [0, *itertools.accumulate(counts)]
    # Each image's tokens are those that the allocator chooses with that budget.
    for image, tokens in enumerate(packed.unpack()):
        expected = lod.allocate.make(name, counts[image])(relevance=relevance[image])
        assert torch.equal(tokens.sites, expected.sites) and torch.equal(tokens.scores, expected.scores)


@given(
    st.sampled_from(["GridTopK", "HeatDiffusion", "PyramidTopK"]), st.integers(1, 60), st.integers(1, 60),
    st.integers(1, 9), st.integers(0, 2**20),
)  # fmt: skip
def test_a_smaller_budgets_tokens_are_the_first(name: str, budget: int, smaller: int, ties: int, seed: int) -> None:
    torch.manual_seed(seed)
    relevance = (torch.rand(2, 7, 9) * ties).round()
    few, many = (lod.allocate.make(name, k)(relevance=relevance) for k in sorted((smaller, budget)))
    assert lod.allocate.make(name, 1).nested
    assert torch.equal(few.sites, many.sites[:, : few.budget]) and torch.equal(few.scores, many.scores[:, : few.budget])


class Backwards(lod.allocate.PyramidTopK):
    """Somebody's own: the last of those that it is given."""

    def choose(self, scene: lod.allocate.Scene) -> tuple[torch.Tensor, ...]:
        sites, scores = super().choose(scene)
        return sites.flip(1), -scores.flip(1)


@pytest.mark.parametrize(
    ("allocator", "calls"),
    [(lod.allocate.GridTopK(), 1), (lod.allocate.PyramidTopK(), 1), (Backwards(), 3), (lod.allocate.Spiral(), 3)],
    ids=lambda value: type(value).__name__,
)
def test_a_bank_chooses_once_where_it_can(
    allocator: lod.allocate.Allocator, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    relevance = torch.rand(3, 6, 6) * torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    batches, choose = [], type(allocator).choose

    def counted(self: lod.allocate.Allocator, scene: lod.allocate.Scene) -> tuple[torch.Tensor, ...]:
        batches.append(scene.batch)
        return choose(self, scene)

    monkeypatch.setattr(type(allocator), "choose", counted)
    packed = lod.allocate.TokenBank(allocator, 40)(relevance=relevance)
    assert batches == [3] if calls == 1 else batches == [1] * calls
    assert not lod.allocate.PyramidTopK(4, split=(1, 1, 1, 1)).nested and not Backwards(4).nested
    for image, tokens in enumerate(packed.unpack()):
        allocator.budget = tokens.budget
        assert torch.equal(tokens.sites, allocator(relevance=relevance[image]).sites)


def test_shares_by_total_benefit() -> None:
    relevance = torch.ones(4, 10, 10) * torch.tensor([4.0, 2.0, 1.0, 0.0])[:, None, None]
    bank = lod.allocate.TokenBank(lod.allocate.GridTopK(), 74)
    assert bank(relevance=relevance).counts.tolist() == [41, 21, 11, 1]  # one each, and 70 by 4 : 2 : 1 : 0
    assert bank(relevance=relevance[[3, 1, 0, 2]]).counts.tolist() == [1, 21, 41, 11]
    assert lod.allocate.TokenBank(lod.allocate.GridTopK(), 74, least=2)(relevance=relevance).counts.tolist() == [
        40, 21, 11, 2,
    ]  # fmt: skip
    assert lod.allocate.TokenBank(lod.allocate.GridTopK(), 74, most=20)(relevance=relevance).counts.tolist() == [
        20, 20, 20, 14,
    ]  # fmt: skip
    assert bank(relevance=relevance * 0).counts.tolist() == [19, 19, 18, 18]
    # Negative relevance counts from the least of the batch, and what is masked not at all.
    assert bank(relevance=relevance - 9).counts.tolist() == [41, 21, 11, 1]
    masked = relevance.clone()
    masked[0, :5] = -math.inf
    assert bank(relevance=masked).counts.tolist() == [29, 29, 15, 1]
    spiral = lod.allocate.TokenBank(lod.allocate.Spiral(), 900, most=500)(relevance=relevance)
    assert spiral.counts.tolist() == [500, 266, 133, 1]


def test_a_bank_reads_patches(photo: torch.Tensor) -> None:
    images = torch.stack([photo[:, :140, :210], photo[:, 40:180, 60:270], photo[:, 90:230, 10:220]])
    relevance = torch.rand(3, 10, 15) * torch.tensor([1.0, 2.0, 5.0])[:, None, None]
    fixation = torch.tensor([[0.2, 0.3], [0.5, 0.5], [0.9, 0.4]])
    bank = lod.allocate.TokenBank(lod.allocate.FoveatedPyramid(), 120)
    for source in (images, lod.mipmap(images)):
        packed = bank(source, relevance, fixation=fixation)
        assert packed.patches is not None and packed.patches.shape == (120, 3, 14, 14)
        for image, tokens in enumerate(packed.unpack()):
            expected = lod.allocate.FoveatedPyramid(tokens.budget)(
                images[image], relevance[image], fixation=fixation[image]
            )
            assert torch.equal(tokens.sites, expected.sites)
            assert tokens.patches is not None and expected.patches is not None
            assert torch.allclose(tokens.patches.float(), expected.patches.float(), atol=1)
    alone = bank(images[0], relevance[0], fixation=fixation[0])
    assert alone.counts.tolist() == [120] and alone.patches is not None
    saliency = bank(images)
    assert int(saliency.counts.sum()) == 120


def test_a_bank_of_shares_that_differ_keeps_each_parts_levels() -> None:
    images, relevance = torch.rand(3, 3, 128, 128), torch.rand(3, 32, 32) * torch.tensor([4.0, 1.0, 1.0])[:, None, None]
    packed = lod.allocate.TokenBank(lod.allocate.TokenDAG(273, 4), 100)(images, relevance)
    for image, tokens in enumerate(packed.unpack()):
        expected = lod.allocate.TokenDAG(tokens.budget, 4)(images[image], relevance[image])
        assert torch.equal(tokens.sites, expected.sites)


@torch.no_grad()
@pytest.mark.parametrize("name", lod.allocate.names())
def test_a_banks_images_get_what_they_would_alone(name: str, photo: torch.Tensor) -> None:
    """Of shares that differ, but for two: those are chosen together, and each looks at its own."""
    images = torch.stack([photo[:, i * 9 : i * 9 + 90, i * 20 : i * 20 + 133] for i in range(4)])
    relevance = torch.rand(4, 10, 15).round(decimals=1) * torch.tensor([1.0, 2.0, 5.0, 2.0])[:, None, None]
    relevance[3] = relevance[1].flip(-1)  # as much as that
    own = {
        "fixation": torch.tensor([[0.2, 0.3], [0.5, 0.5], [0.9, 0.4], [0.1, 0.8]]),
        "labels": torch.arange(150).reshape(10, 15) // torch.tensor([40, 25, 7, 60])[:, None, None],
        "query": torch.rand(4, lod.allocate.make(name, 1).query_width or 8),
    }
    allocator = lod.allocate.make(name, 90, 9)
    own = {key: value for key, value in own.items() if key in allocator.needs + allocator.takes}
    bank = lod.allocate.TokenBank(allocator, 100)
    if name == "PseudoLogPolar":  # which learned where so many sites are
        with pytest.raises(InputError, match="with another allocator"):
            bank(images, relevance, **own)
        return
    packed = bank(images, relevance, **own)
    counts = packed.counts.tolist()
    assert counts[1] == counts[3] and len({*counts}) == 3
    for image, tokens in enumerate(packed.unpack()):
        allocator.budget = tokens.budget
        alone = allocator(images[image], relevance[image], **{key: value[image] for key, value in own.items()})
        assert torch.equal(tokens.sites, alone.sites)
        assert torch.allclose(tokens.scores, alone.scores, atol=1e-6)
        assert tokens.patches is not None and alone.patches is not None
        assert torch.allclose(tokens.patches.float(), alone.patches.float(), atol=1)


class Blend(lod.allocate.Allocator):
    """Tokens that are means of all patches."""

    blends = True

    def choose(self, scene: lod.allocate.Scene) -> tuple[torch.Tensor, ...]:
        scores = torch.ones(scene.batch, self.budget)
        sites = scene.sites(0, torch.zeros_like(scores, dtype=torch.long))
        return sites, scores, torch.full((*scores.shape, scene.relevance[0].numel()), 1 / scene.relevance[0].numel())


class Mean(lod.allocate.Allocator):
    """Scores that tell what picture it looked at."""

    def choose(self, scene: lod.allocate.Scene) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scene.pixels().mean((1, 2, 3))[:, None].expand(-1, self.budget)
        return scene.sites(0, torch.zeros_like(scores, dtype=torch.long)), scores


def test_a_bank_shows_each_image_its_own() -> None:
    image = torch.rand(3, 3, 28, 42)
    relevance = torch.ones(3, 2, 3) * torch.tensor([1.0, 3.0, 2.0])[:, None, None]
    for source in (image, lod.mipmap(image)):
        packed = lod.allocate.TokenBank(Mean(), 12)(source, relevance)
        for tokens, own in zip(packed.unpack(), image, strict=True):
            assert torch.allclose(tokens.scores, own.mean())


class Seven(lod.allocate.Allocator):
    def choose(self, scene: lod.allocate.Scene) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.ones(scene.batch, 7)
        return scene.sites(0, torch.zeros_like(scores, dtype=torch.long)), scores


@pytest.mark.parametrize("name", [name for name in lod.allocate.names() if name != "AdaptiveStratified"])
def test_a_bank_of_one_image_is_its_allocator(name: str, photo: torch.Tensor) -> None:
    image, relevance = photo[:, :140, :210], torch.rand(10, 15)
    allocator = lod.allocate.make(name, 60, 14)
    expected = allocator(image, relevance)
    packed = lod.allocate.TokenBank(allocator, 60)(image, relevance)
    for part in ("sites", "scores", "patches", "weights"):
        found, wanted = getattr(packed, part), getattr(expected, part)
        assert (found is None) == (wanted is None), part
        if wanted is not None:
            torch.testing.assert_close(found, wanted)


def test_a_bank_of_blends() -> None:
    image = torch.rand(2, 3, 28, 42)
    relevance = torch.ones(2, 2, 3) * torch.tensor([1.0, 3.0])[:, None, None]
    packed = lod.allocate.TokenBank(Blend(), 6)(image, relevance)
    assert packed.weights is not None and packed.weights.shape == (6, 6) and packed.counts.tolist() == [2, 4]
    tokens = packed.unpack()[1]
    whole = image[1].unfold(1, 14, 14).unfold(2, 14, 14).flatten(1, 2).mean(1)
    assert tokens.patches is not None and torch.allclose(tokens.patches[3], whole, atol=1e-6)
    assert tokens.weights is not None and torch.allclose(tokens.weights.sum(1), torch.ones(4))


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: lod.allocate.TokenBank(lod.allocate.GridTopK(), 61)(relevance=torch.rand(3, 4, 5)), "60 together"),
        (lambda: lod.allocate.TokenBank(lod.allocate.GridTopK(), 5, 2)(relevance=torch.rand(3, 4, 5)), "less than 2"),
        (lambda: lod.allocate.TokenBank(lod.allocate.GridTopK, 5), "GridTopK()"),  # type: ignore[arg-type]
        (lambda: lod.allocate.TokenBank(lod.allocate.GridTopK(), 5, most=0), "at least 1"),
        (lambda: lod.allocate.TokenBank(Seven(), 20)(relevance=torch.rand(2, 4, 5)), "made for 7 tokens"),
        (lambda: lod.allocate.LogPolar(9, fovea=1.5), r"in \[0, 1\]"),
        (lambda: lod.allocate.LogPolar(9, radius=0.0), "positive"),
        (lambda: lod.allocate.LogPolar(9, radius=1e-4), "0.001 to 10"),
        (lambda: lod.allocate.LogPolar(7, radius=1e300), "0.001 to 10"),
        (lambda: lod.allocate.Spiral(9, kind="square"), "'golden', 'archimedean', 'fibonacci'"),  # type: ignore
        (lambda: lod.allocate.Spiral(9, peaks=0), "peaks"),
        (lambda: lod.allocate.Whirlwind(9, floor=0.0), "positive"),
    ],
)
def test_what_is_refused(make: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        make()


@pytest.mark.parametrize("budget", [40, 100, 150, 273])
def test_convention_golden_arms_are_the_nearest_whole_number(budget: int) -> None:
    """As many as make arms as far from each other as sites along them are."""
    relevance = torch.ones(1, 81, 81)
    tokens = lod.allocate.Spiral(budget, kind="golden", peaks=1)(relevance=relevance)
    away = tokens.sites[0, :, :2].double() - lod.allocate.find_fixations(relevance)[0]
    radius, order = away.norm(dim=1).sort()
    angle = torch.atan2(away[order, 1], away[order, 0])
    inner = slice(3, budget // 2)  # none of these is left out
    growth = float((radius[1:] / radius[:-1])[inner].log().median())
    turn = float((angle.diff()[inner] % (2 * math.pi)).median())
    pitch = 2 * math.log((1 + math.sqrt(5)) / 2) / math.pi
    wanted = 2 * math.pi * math.sin(math.atan(pitch)) / math.sqrt(2 * math.pi * growth)
    assert abs(2 * math.pi / (turn - growth / pitch) - max(1, round(wanted))) < 0.05


def test_infinite_relevance_is_worth_more_than_all_that_is_finite() -> None:
    relevance = torch.zeros(2, 1, 40)
    relevance[0, 0, 0], relevance[1, 0, 0] = math.inf, torch.finfo(torch.float32).max
    packed = lod.allocate.TokenBank(lod.allocate.GridTopK(), total=36)(relevance=relevance)
    assert packed.counts[0] > 8 * packed.counts[1]
