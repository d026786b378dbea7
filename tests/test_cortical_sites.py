"""Cortical sites: how many, where, how dense, and how round."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpu_lod as lod
from gpu_lod import checks
from gpu_lod.cortical_sites import box_of, eccentricity, first_to_enter, magnified, most_candidates, sites_about
from gpu_lod.errors import CaptureError, InputError

unit = st.floats(0, 1)


@given(unit, unit, st.integers(1, 500), st.integers(1, 3000), st.integers(1, 3000), st.floats(0.005, 2))
def test_exactly_k_inside_the_image(x: float, y: float, budget: int, height: int, width: int, e0: float) -> None:
    sites = lod.cortical_sites((x, y), budget, (height, width), e0=e0)
    assert sites.shape == (budget, 3) and sites.dtype == torch.float32
    assert bool(torch.isfinite(sites).all())
    assert float(sites[:, :2].min()) >= 0 and float(sites[:, :2].max()) <= 1
    assert float(sites[:, 2].min()) >= 0
    assert len(sites[:, :2].unique(dim=0)) == budget
    assert torch.equal(sites, lod.cortical_sites((x, y), budget, (height, width), e0=e0))


@pytest.mark.parametrize("corner", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize("size", [(1024, 1024), (300, 900), (900, 20), (1, 1)])
def test_corners_and_edges(corner: tuple[float, float], size: tuple[int, int]) -> None:
    sites = lod.cortical_sites(corner, 273, size)
    assert sites.shape == (273, 3)
    assert float(sites[:, :2].min()) >= 0 and float(sites[:, :2].max()) <= 1


@pytest.mark.parametrize("fixation", [(0.5, 0.5), (0.2, 0.7), (0.0, 0.0), (1.0, 0.4)])
@pytest.mark.parametrize("size", [(1024, 1024), (600, 1000), (40, 1600)])
def test_density_follows_the_integral_of_magnification(fixation: tuple[float, float], size: tuple[int, int]) -> None:
    """The share of sites within an eccentricity is M^2's share there, within 2% of K, over the image that there is."""
    height, width = size
    longer, e0 = max(size), 0.05
    sites = lod.cortical_sites(fixation, 273, size, e0=e0).double()
    y, x = torch.meshgrid(
        (torch.arange(2 * height) + 0.5) / (2 * height), (torch.arange(2 * width) + 0.5) / (2 * width), indexing="ij"
    )
    e = _eccentricities(torch.stack([x, y], dim=-1).double(), fixation, size)
    weight = 1 / (e + e0) ** 2
    mine = _eccentricities(sites[:, :2], fixation, size)
    for radius in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
        share = float(weight[e < radius].sum() / weight.sum())
        assert float((mine < radius).double().mean()) == pytest.approx(share, abs=0.02), radius
    assert longer == max(size)


def _eccentricities(at: torch.Tensor, fixation: tuple[float, float], size: tuple[int, int]) -> torch.Tensor:
    height, width = size
    delta = (at - at.new_tensor(fixation)) * at.new_tensor([width, height]) / max(size)
    return delta.norm(dim=-1)


def _nearest(at: torch.Tensor) -> torch.Tensor:
    """How far the nearest other site of each is, [N]."""
    distance = torch.cdist(at, at)
    distance.fill_diagonal_(math.inf)
    return distance.min(dim=1).values


@pytest.mark.parametrize("fixation", [(0.5, 0.5), (0.0, 0.0), (1.0, 0.3), (0.7, 0.95)], ids=str)
@pytest.mark.parametrize("size", [(1024, 1024), (600, 1500), (1700, 400)], ids=str)
def test_neighbours_are_as_far_in_every_direction(size: tuple[int, int], fixation: tuple[float, float]) -> None:
    """The nearest neighbour is 0.75 to 1.15 spacings away, wherever."""
    sites = lod.cortical_sites(fixation, 273, size, patch=14, e0=0.05).double()
    spacing = 14 * 2 ** sites[:, 2] / max(size)
    places = sites[:, :2] * sites.new_tensor([size[1], size[0]]) / max(size)
    ratio = (_nearest(places) / spacing)[(sites[:, 2] > 0) & (torch.arange(273) >= 20)]
    assert len(ratio) > 150  # the levels of the innermost are clamped to 0, and tell no spacing
    assert float(ratio.min()) > 0.75 and float(ratio.max()) < 1.15


def test_cells_of_rings_stretch_far_more() -> None:
    e0 = 0.05
    # 13 rings x 21 wedges = 273 cells, the same cortical law: side along the ring over side across it.
    t = (torch.arange(13, dtype=torch.float64) + 0.5) / 13
    e = e0 * torch.expm1(t * math.log1p(0.7 / e0))
    aspect = (2 * math.pi * e / 21) / ((e + e0) * math.log1p(0.7 / e0) / 13)
    assert float(aspect.max() / aspect.min()) > 9
    angle = (torch.arange(21, dtype=torch.float64) + 0.5) * 2 * math.pi / 21
    cells = torch.stack([e[:, None] * angle.cos(), e[:, None] * angle.sin()], dim=-1).flatten(0, 1)
    side = ((2 * math.pi * e / 21) * ((e + e0) * math.log1p(0.7 / e0) / 13)).sqrt().repeat_interleave(21)
    stretched = _nearest(cells) / side
    assert float(stretched.min()) < 0.45 and float(stretched.max()) > 0.8


def test_levels_cover_the_spacing() -> None:
    """A patch is as wide as its neighbours are far; next to the fixation, no finer than the pixels."""
    sites = lod.cortical_sites((0.5, 0.5), 273, (2048, 2048), patch=14)
    coarse = lod.cortical_sites((0.5, 0.5), 273, (2048, 2048), patch=28)
    finer = lod.cortical_sites((0.5, 0.5), 273, (1024, 1024), patch=14)
    outside = sites[:, 2] > 1
    assert torch.allclose(sites[outside, 2] - 1, coarse[outside, 2], atol=1e-4)
    assert torch.allclose(sites[outside, 2] - 1, finer[outside, 2], atol=1e-4)
    assert bool((sites[1:, 2] >= sites[:-1, 2]).all())  # innermost first


@pytest.mark.parametrize(("patch", "e0"), [(14, 0.05), (16, 0.02)])
def test_levels_follow_the_closed_form(patch: int, e0: float) -> None:
    """About the middle no site is left out near by, so each tells the density: (i + 1/2) / N(e)."""
    sites = lod.cortical_sites((0.5, 0.5), 273, (2048, 2048), patch, e0).double()
    e = _eccentricities(sites[:, :2], (0.5, 0.5), (2048, 2048))[5:100]
    number = torch.arange(5, 100) + 0.5
    density = number / ((1 + e / e0).log() + e0 / (e + e0) - 1)
    expected = (2048 * (e + e0) * (2 * math.pi / density).sqrt() / patch).log2().clamp(min=0)
    torch.testing.assert_close(sites[5:100, 2], expected, rtol=0, atol=2e-3)


def test_convention_the_spiral_turns_from_x_towards_y_down() -> None:
    """Site 0 on +x; site 1 at 137.5 degrees, so below the fixation."""
    sites = lod.cortical_sites((0.5, 0.5), 100, (100, 100))
    assert float(sites[0, 1]) == 0.5 and float(sites[0, 0]) > 0.5
    angle = math.atan2(float(sites[1, 1]) - 0.5, float(sites[1, 0]) - 0.5)
    assert angle == pytest.approx(math.pi * (3 - math.sqrt(5)), abs=1e-4)


def test_batches_are_their_images() -> None:
    fixation = torch.rand(5, 2)
    together = lod.cortical_sites(fixation, 64, (480, 640))
    assert together.shape == (5, 64, 3)
    for one, sites in zip(fixation, together, strict=True):
        assert torch.equal(lod.cortical_sites(one, 64, (480, 640)), sites)


@pytest.mark.parametrize("size", [(3, 500), (500, 3), (1, 400), (40, 90), (64, 64)])
@pytest.mark.parametrize(("budget", "e0"), [(1, 0.05), (7, 0.001), (100, 0.01), (100, 10.0), (2000, 0.0001)])
def test_the_first_to_enter_of_all_sites(size: tuple[int, int], budget: int, e0: float) -> None:
    """Against a search among all that could be inside, none left out."""
    fixation = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.31, 0.9], [1.0, 0.4]], dtype=torch.float64)
    box = torch.tensor([size[1], size[0]], dtype=torch.float64) / max(size)
    index = torch.arange(2**18, dtype=torch.float64)
    angle = index * math.pi * (3 - math.sqrt(5))
    way = torch.stack([angle.cos(), angle.sin()], dim=-1)
    found = lod.cortical_sites(fixation.float(), budget, size, e0=e0).double()
    for point, sites in zip(fixation.float().double(), found, strict=True):
        ahead = (torch.where(way > 0, (1 - point) * box, point * box) / way.abs()).nan_to_num(math.inf)
        enters = (index + 0.5) / magnified(ahead.amin(-1), e0)
        inside = enters.argsort()[: budget + 1]
        density = enters[inside[-2:]].mean()
        assert float(density * magnified((torch.maximum(point, 1 - point) * box).norm(), e0)) < len(index)
        first = inside[:-1].sort().values
        radius = eccentricity((first + 0.5) / density, e0)[:, None]
        # The density is the edge's, and as rounded where e is 1e-4 e0. Another site would be far more astray.
        assert torch.allclose(sites[:, :2], point + radius * way[first] / box, atol=1e-4)


@pytest.mark.parametrize("share", [1e-3, 0.5, 0.95, 3.0])
def test_a_wrong_guess_of_the_density_is_found_out(share: float) -> None:
    points = torch.rand(5, 2, dtype=torch.float64)
    e0 = torch.tensor([[0.01, 0.1, 1.0]], dtype=torch.float64)
    _, _, expected = first_to_enter(points, (3, 700), 50, e0)
    _, _, found = first_to_enter(points, (3, 700), 50, e0, share * expected[..., 1])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [(64, 64), (480, 640), (40, 90), (900, 30), (3, 500), (48, 16384)])
@pytest.mark.parametrize("budget", [1, 3, 5, 17, 64, 273, 1000])
def test_the_most_candidates_are_enough(size: tuple[int, int], budget: int) -> None:
    """At corners, edges and anywhere; the larger e0, the more there are."""
    points = torch.cat([torch.rand(24, 2).round(), torch.rand(24, 2), torch.rand(24, 2).round(decimals=1)]).double()
    points[:8, 0] = 0.5
    box = box_of(points, size)
    farthest = (torch.maximum(points, 1 - points) * box).norm(dim=1)[:, None]
    for e0 in (1e-3, 0.05, 1.0, 300.0):
        each = torch.full((1, 1), e0, dtype=torch.float64)
        _, _, last = first_to_enter(points, size, budget, each)
        assert float((last[:, 0, 1:] * magnified(farthest, e0)).max()) < most_candidates(size, budget)


@pytest.mark.parametrize(("size", "budget"), [((480, 640), 273), ((30, 900), 9), ((64, 64), 1)])
def test_a_gpu_is_not_waited_for(size: tuple[int, int], budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates at once there; the sites are the same."""
    points = torch.cat([torch.rand(4, 2), torch.rand(4, 2).round()]).double()
    expected = sites_about(points, budget, size, 14, 0.05)
    module = sys.modules["gpu_lod.cortical_sites"]
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    monkeypatch.setattr(module, "_candidates", lambda *_: pytest.fail("asked how many are needed"))
    assert torch.allclose(sites_about(points, budget, size, 14, 0.05), expected, rtol=0, atol=1e-12)
    monkeypatch.setattr(module, "_AT_ONCE", 0)
    with pytest.raises(pytest.fail.Exception):  # too many at once
        sites_about(points, budget, size, 14, 0.05)
    monkeypatch.setattr(checks, "readable", lambda value: False)
    with pytest.raises(CaptureError, match="sites to choose from"):
        sites_about(points, budget, size, 14, 0.05)


def test_the_inverse() -> None:
    n = torch.logspace(-9, 2, 200, dtype=torch.float64)
    for e0 in (0.01, 0.05, 1.0):
        assert torch.allclose(magnified(eccentricity(n, e0), e0), n, rtol=1e-9)


def test_gradients_of_levels_far_below_0_are_none() -> None:
    fixation = torch.tensor([0.4, 0.6], requires_grad=True)
    sites = lod.cortical_sites(fixation, 16, (1024, 1024), 14, e0=1e-20)
    (gradient,) = torch.autograd.grad(sites.sum(), fixation)
    assert bool(torch.isfinite(gradient).all())


def test_gradients_pass_to_the_fixation() -> None:
    fixation = torch.tensor([[0.43, 0.61], [0.0, 0.0]], requires_grad=True)
    sites = lod.cortical_sites(fixation, 20, (60, 80))
    (gradient,) = torch.autograd.grad(sites[..., :2].sum(), fixation)
    assert bool(torch.isfinite(gradient).all())
    step = 1e-4  # the sites move along, by finite differences
    with torch.no_grad():
        moved = fixation.double() + step * torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        after, before = (lod.cortical_sites(f, 20, (60, 80)) for f in (moved, fixation))
        numeric = float((after[0, :, :2] - before[0, :, :2]).double().sum()) / step
    assert float(gradient[0, 0]) == pytest.approx(numeric, rel=0.05)


def test_eccentricities_have_gradients_of_gradients() -> None:
    n = torch.rand(6, dtype=torch.float64) * 5 + 0.05
    assert torch.autograd.gradgradcheck(lambda x: eccentricity(x, 0.05), (n.requires_grad_(),))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fixation": (1.5, 0.5)}, "1.5"),
        ({"fixation": (0.5, math.nan)}, "nan"),
        ({"fixation": (0.5, 0.5, 0.5)}, "shape"),
        ({"fixation": torch.zeros(0, 2)}, "shape"),
        ({"budget": 0}, "budget"),
        ({"size": 1024}, "height, width"),
        ({"size": (0, 5)}, "height"),
        ({"patch": 0}, "patch"),
        ({"e0": 0.0}, "e0"),
        ({"e0": math.inf}, "finite"),
        ({"e0": 1e300}, "e0 of 1e\\+300"),
        ({"size": (1, 10**9)}, "in parts"),
    ],
)
def test_bad_input(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        lod.cortical_sites(**{"fixation": (0.5, 0.5), **arguments})


@pytest.mark.parametrize("corner", [(0.5, 0.0), (0.0, 0.0), (1.0, 0.0), (0.5, 1.0)])
def test_rays_along_an_edge_stay_inside(corner: tuple[float, float]) -> None:
    """A fixation on the edge has the sites of one next to it, the first one too."""
    near = tuple(min(max(c, 1e-7), 1 - 1e-7) for c in corner)
    found, expected = (lod.cortical_sites(point, 64, size=(448, 448)) for point in (corner, near))
    assert torch.allclose(found, expected, atol=1e-3)
