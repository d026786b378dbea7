"""Learned allocators: what they choose, and that they learn it. Pictures are real, small crops in patches of 8."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_allocate import maps

import gpu_lod as lod
from gpu_lod import checks
from gpu_lod.allocate import (
    AdaptiveStratified,
    Allocator,
    GridTopK,
    Learned,
    PseudoLogPolar,
    SoftTopKCoverage,
    SoftVortex,
    Stratified,
    VortexLearned,
    base,
    coverage_loss,
    dead_bin_loss,
    repulsion_loss,
    soft_vortex,
)
from gpu_lod.allocate.learned import even_points
from gpu_lod.allocate.soft_top_k_coverage import in_spreads
from gpu_lod.allocate.soft_vortex import means
from gpu_lod.errors import InputError

LEARNED = ["AdaptiveStratified", "PseudoLogPolar", "SoftTopKCoverage", "SoftVortex", "VortexLearned"]
P = 8
STEPS = 60
"""Within which everything here is learned: at milliseconds each, seconds on two cores, and not minutes."""


@pytest.fixture(scope="module")
def pictures(photo: torch.Tensor) -> torch.Tensor:
    """A face, a cat and a cup, [3, 3, 128, 128] in [0, 1]."""
    from skimage import data

    cat, cup = (torch.from_numpy(make()).permute(2, 0, 1) for make in (data.chelsea, data.coffee))
    crops = torch.stack([photo[:, 30:286, 100:356], cat[:, 20:276, 100:356], cup[:, 60:316, 170:426]])
    return F.avg_pool2d(crops.float() / 255, 2)


def colours(pictures: torch.Tensor) -> torch.Tensor:
    """The mean of each patch, [B, N, C]."""
    return F.avg_pool2d(pictures, P).flatten(2).transpose(1, 2)


def at(tokens: lod.TokenSet) -> torch.Tensor:
    """The patches that level-0 tokens of a grid of 16 x 16 are, [B, K]."""
    return ((tokens.sites[..., 1] * 16).long() * 16 + (tokens.sites[..., 0] * 16).long()).detach()


def error(
    pictures: torch.Tensor, sites: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[B], of pictures whose every patch is the mean of the tokens' values [B, K, C] about it."""
    x, y = (torch.arange(16) + 0.5) / 16, (torch.arange(16) + 0.5) / 16
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).flatten(0, 1)
    logits = -80 * torch.cdist(places[None], sites[..., :2]).square()
    if weights is not None:
        logits = logits + weights.clamp(min=1e-6).log()[:, None]
    return (logits.softmax(-1) @ values - colours(pictures)).square().mean((1, 2))


def grid_error(pictures: torch.Tensor, tokens: lod.TokenSet) -> torch.Tensor:
    values = colours(pictures)
    return error(pictures, tokens.sites, values.gather(1, at(tokens)[..., None].expand(-1, -1, 3)))


def on_face(tokens: lod.TokenSet) -> torch.Tensor:
    """[B, K]: 1 for tokens of the first picture that are on the face."""
    face = torch.zeros(16, 16)
    face[2:9, 5:11] = 1
    return face.flatten()[at(tokens)]


def fit(learns: Learned | torch.Tensor, loss: Callable[[], torch.Tensor], steps: int, rate: float) -> None:
    """Steps of Adam, few of them; the loss is lower at the end than at the start."""
    assert steps <= STEPS
    optimiser = torch.optim.Adam([learns] if isinstance(learns, torch.Tensor) else learns.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        (value := loss()).backward()
        optimiser.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0]


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def salient(pictures: torch.Tensor) -> torch.Tensor:
    """Saliency of each patch, [3, 16, 16]."""
    maps = lod.feature_maps(pictures)
    assert isinstance(maps, torch.Tensor)
    return F.avg_pool2d(maps[:, 5:6], P)[:, 0]


def test_the_head_learns_which_strata_a_query_asks_for(pictures: torch.Tensor, salient: torch.Tensor) -> None:
    """Two queries that ask for the whole picture and for the face in it: at least 3/4 of what can be won is."""
    picture, relevance = pictures[:1], salient[:1].square()
    sides = range(2, 9)
    grids = [[Stratified(40, P, strata=(r, c))(relevance=relevance) for c in sides] for r in sides]
    whole = torch.tensor([[float(grid_error(picture, tokens)) for tokens in row] for row in grids])
    face = torch.tensor([[1 - float(on_face(tokens).mean()) for tokens in row] for row in grids])
    losses = torch.stack([whole / whole.mean(), face / face.mean()])
    allocator = AdaptiveStratified(40, P, width=32)
    queries = torch.randn(2, 32)
    fit(allocator, lambda: allocator.expected_loss(losses, queries + 0.1 * torch.randn(2, 32)), 60, 2e-2)
    rows, columns = (made.probs.argmax(-1) for made in allocator.distribution(queries + 0.1 * torch.randn(2, 32)))
    found, before, best = losses[range(2), rows, columns], losses[:, 2, 2], losses.flatten(1).amin(1)

    assert (before - found > 0.75 * (before - best)).all() and (before > best + 0.05).all()


def test_coverage_is_learned_where_it_rebuilds_the_picture(pictures: torch.Tensor, salient: torch.Tensor) -> None:
    """From plain top-k on, by the soft mask of all patches: the error of the chosen ones is halved."""
    allocator = SoftTopKCoverage(40, P, strength=0.0)
    every = GridTopK(256, P)(relevance=torch.arange(256).flip(0).view(1, 16, 16)).sites

    def loss() -> torch.Tensor:
        mask = allocator.soft_mask(relevance=salient).flatten(1)
        return error(pictures, every, colours(pictures), mask).mean()

    def measured() -> float:
        with torch.no_grad():
            return float(grid_error(pictures, allocator(relevance=salient)).mean())

    before = measured()
    fit(allocator, loss, 30, 0.1)

    assert measured() < 0.5 * before


def test_centres_move_to_where_they_rebuild_the_picture(pictures: torch.Tensor) -> None:
    """By gradients in the sites, through the patches that are read there: the error falls by a quarter."""
    picture, relevance = pictures[1:2], torch.ones(1, 16, 16)
    allocator = PseudoLogPolar(40, P)

    def loss() -> torch.Tensor:
        tokens = allocator(picture, relevance, fixation=(0.5, 0.5))
        assert tokens.patches is not None
        return error(picture, tokens.sites, tokens.patches.mean((-2, -1))).mean()

    def measured() -> float:
        allocator.eval()
        with torch.no_grad():
            return float(loss())

    before = measured()
    allocator.train()
    fit(allocator, loss, 40, 1e-2)

    assert measured() < 0.75 * before


def test_crowded_centres_spread() -> None:
    """Half of all start in one corner; in the end they have twice as many patches, near their half."""
    allocator = PseudoLogPolar(16, P)
    with torch.no_grad():
        allocator.offsets[8:] = 5 + torch.rand(8, 2)

    def mass() -> torch.Tensor:
        return allocator.mass(relevance=torch.ones(1, 16, 16), fixation=(0.5, 0.5))

    def measured() -> float:
        allocator.eval()
        with torch.no_grad():
            return float(mass()[:, 8:].sum())

    before = measured()
    allocator.train()
    fit(allocator, lambda: dead_bin_loss(mass(), 0.9), 50, 0.1)

    assert measured() > max(2 * before, 100)


def test_vortices_find_the_face(pictures: torch.Tensor, salient: torch.Tensor) -> None:
    """Of 30 patches, at least twice as many as before are on the face, and no two vortices are in one place."""
    allocator = VortexLearned(30, P)

    def loss() -> torch.Tensor:
        tokens = allocator(relevance=salient[:1])
        return 0.1 * allocator.repulsion() - (tokens.scores * on_face(tokens)).mean()

    def measured() -> float:
        return float(on_face(allocator(relevance=salient[:1])).sum())

    before = measured()
    fit(allocator, loss, 60, 0.1)

    assert measured() >= max(2 * before, 15)
    assert float(torch.pdist(allocator.centres.detach()).min()) > 0.02


def test_blends_learn_to_rebuild_the_picture(pictures: torch.Tensor, salient: torch.Tensor) -> None:
    """The error falls by a third."""
    allocator = SoftVortex(40, P)

    def loss() -> torch.Tensor:
        tokens = allocator(relevance=salient)
        return error(pictures, tokens.sites, tokens.blend(colours(pictures))).mean()

    before = float(loss().detach())
    fit(allocator, loss, 50, 0.05)

    assert float(loss().detach()) < 0.67 * before


# -- what all of them are ----------------------------------------------------------------------------------------------


def tokens_of(allocator: Learned, relevance: torch.Tensor, **more: Any) -> lod.TokenSet:
    """With a query if it needs one, always the same."""
    generator = torch.Generator().manual_seed(1)
    if "query" in allocator.needs:
        more["query"] = torch.randn(allocator.query_width, generator=generator)
    tokens = allocator(relevance=relevance, **more)
    assert isinstance(tokens, lod.TokenSet)
    return tokens


@pytest.mark.parametrize("name", LEARNED)
def test_a_call_takes_what_others_take_and_says_so(name: str) -> None:
    """torch's module has a call of any arguments, and a text that tells subclasses to write one."""
    forward = getattr(lod.allocate, name).forward
    assert inspect.signature(forward) == inspect.signature(Allocator.__call__)
    assert inspect.getdoc(forward) == inspect.getdoc(Allocator.__call__) and forward.__name__ == "forward"


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_reach_every_parameter_and_the_relevance(name: str) -> None:
    allocator = lod.allocate.make(name, 20, P)
    assert isinstance(allocator, Learned)
    for kind in ("noise", "ties", "zeros", "one hot", "infinities", "negative"):
        allocator.zero_grad()
        relevance = maps(kind, 2, 9, 13).requires_grad_()
        tokens = tokens_of(allocator, relevance)
        some = torch.randn_like(tokens.scores)
        if isinstance(allocator, AdaptiveStratified):
            loss = allocator.expected_loss(torch.rand(2, 7, 7), torch.randn(2, 512)) + tokens.scores[:, 3].sum()
        else:
            scores = tokens.scores.clamp(max=1e6)
            loss = (some * scores).sum() + (some[..., None] * tokens.sites).sum()
        loss.backward()
        assert relevance.grad is not None and torch.isfinite(relevance.grad).all()
        if kind == "noise":
            assert relevance.grad.abs().sum() > 0
        for label, parameter in allocator.named_parameters():
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), (label, kind)
            if kind == "noise":
                assert parameter.grad.abs().sum() > 0, label


@pytest.mark.parametrize("name", LEARNED)
def test_they_are_modules(name: str) -> None:
    relevance = maps("noise", 2, 9, 13)
    allocator = lod.allocate.make(name, 20, P)
    assert isinstance(allocator, Learned)
    with torch.no_grad():
        for parameter in allocator.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    tokens = tokens_of(allocator, relevance)
    other = lod.allocate.make(name, 20, P)
    assert isinstance(other, Learned)
    file = io.BytesIO()
    torch.save(allocator.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for copied in (other, copy.deepcopy(allocator), pickle.loads(pickle.dumps(allocator))):
        assert torch.equal(tokens_of(copied, relevance).sites, tokens.sites)
        assert torch.equal(tokens_of(copied, relevance).scores, tokens.scores)
    double = tokens_of(copy.deepcopy(allocator).double(), relevance)
    assert torch.allclose(double.sites, tokens.sites, atol=1e-4) and double.sites.dtype == torch.float32
    half = tokens_of(copy.deepcopy(allocator).bfloat16(), relevance)
    assert half.sites.dtype == half.scores.dtype == torch.float32 and torch.isfinite(half.sites).all()
    with pytest.raises(InputError, match=rf"{name} is on meta .*move one with \.to\(\)"):
        tokens_of(allocator.to("meta"), relevance)


@pytest.mark.parametrize("name", ["PseudoLogPolar", "TokenDAG"])
def test_counts_are_read_at_sites_that_have_gradients(name: str) -> None:
    """Patches of uint8 have none."""
    image = (torch.rand(2, 3, 112, 112) * 255).byte()
    relevance = torch.rand(2, 8, 8, requires_grad=True)
    allocator = lod.allocate.make(name, 20, 14)
    for tokens in (allocator(image, relevance), *lod.vlm.glances(allocator, image, relevance)):
        assert tokens.patches is not None and tokens.patches.dtype == torch.uint8
        assert tokens.sites.requires_grad and not tokens.patches.requires_grad


def test_to_make_them_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    for name in lod.allocate.names():
        lod.allocate.make(name, 20, P)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", LEARNED)
def test_parameters_lie_where_torch_makes_them(name: str) -> None:
    with torch.device("meta"):
        made = lod.allocate.make(name, 20, P)
    assert isinstance(made, Learned) and all(parameter.is_meta for parameter in made.parameters())
    allocator = lod.allocate.make(name, 20, P)
    assert isinstance(allocator, Learned)
    made.to_empty(device="cpu").load_state_dict(allocator.state_dict())
    relevance = maps("noise", 2, 9, 13)
    assert torch.equal(tokens_of(made, relevance).sites, tokens_of(allocator, relevance).sites)


# -- strata that a query asks for --------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 100), st.integers(0, 2**20))
def test_each_image_has_its_own_strata(rows: int, columns: int, budget: int, seed: int) -> None:
    torch.manual_seed(seed)
    relevance = torch.rand(3, rows, columns)
    budget = min(budget, rows * columns)
    allocator = AdaptiveStratified(budget, P, width=16)
    torch.nn.init.normal_(allocator.head[-1].weight)
    query = torch.randn(3, 16)
    tokens = allocator(relevance=relevance, query=query)
    grids = torch.stack([made.probs.argmax(-1) + 2 for made in allocator.distribution(query)], dim=-1).tolist()
    for image, strata in enumerate(grids):
        alone = Stratified(budget, P, strata=tuple(strata))(relevance=relevance[image])
        assert torch.equal(alone.sites, tokens.sites[image]) and torch.equal(alone.scores, tokens.scores[image])


def test_the_head_learns_from_queries_of_inference_mode() -> None:
    allocator = AdaptiveStratified(20, P)
    with torch.inference_mode():
        query = torch.randn(2, 512)
    allocator.expected_loss(torch.rand(2, 7, 7), query).backward()
    assert all(parameter.grad is not None for parameter in allocator.parameters())
    assert allocator(relevance=maps("noise", 2, 9, 13), query=query).sites.shape == (2, 20, 3)


def test_a_new_head_says_four_by_four() -> None:
    relevance = torch.rand(5, 24, 32)
    tokens = AdaptiveStratified(60)(relevance=relevance, query=torch.randn(5, 512))
    assert torch.equal(tokens.sites, Stratified(60)(relevance=relevance).sites)


def test_the_loss_to_expect() -> None:
    allocator = AdaptiveStratified(9, width=8)
    query, losses = torch.randn(4, 8), torch.rand(4, 7, 7)
    rows, columns = allocator.distribution(query)
    expected = sum(
        rows.log_prob(torch.tensor(r)).exp() * columns.log_prob(torch.tensor(c)).exp() * losses[:, r, c]
        for r in range(7)
        for c in range(7)
    )
    assert isinstance(expected, torch.Tensor)
    assert torch.allclose(allocator.expected_loss(losses, query), expected.mean())
    with pytest.raises(InputError, match=r"losses are \(3, 7, 7\); expected \(4, 7, 7\)"):
        allocator.expected_loss(losses[:3], query)
    for bad in (torch.randn(4, 9), torch.randn(2, 4, 8)):
        with pytest.raises(InputError, match="expected floats"):
            allocator.distribution(bad)


# -- top-k with coverage -----------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["noise", "ties", "zeros", "one hot", "infinities", "negative"]),
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 99), st.floats(-30, 30), st.integers(0, 2**20),
)  # fmt: skip
def test_no_strength_is_plain_top_k(kind: str, rows: int, columns: int, budget: int, power: float, seed: int) -> None:
    torch.manual_seed(seed)
    relevance = maps(kind, 2, rows, columns) * 10.0**power
    budget = min(budget, rows * columns)
    tokens = SoftTopKCoverage(budget, P, strength=0.0)(relevance=relevance)
    assert torch.equal(tokens.sites, GridTopK(budget, P)(relevance=relevance).sites)


def test_what_is_chosen_is_the_best_of_all_subsets() -> None:
    """Relevance less the penalty, on four bins of three patches, against all 495 sets of four."""
    sets = torch.combinations(torch.arange(12), 4)
    taken = torch.zeros(len(sets), 12, dtype=torch.float64).scatter(1, sets, 1.0)
    for strength in (0.1, 0.5, 1.0, 3.0):
        relevance = torch.randn(1, 2, 6)
        allocator = SoftTopKCoverage(4, P, bins=(2, 2), strength=strength)
        worth = taken @ in_spreads(relevance.flatten(1))[0]
        held = taken.view(-1, 2, 2, 3).sum(-1).flatten(1)  # the share is 1
        goal = worth - strength / 2 * held.square().sum(1)
        x, y, _ = allocator(relevance=relevance).sites[0].unbind(-1)
        found = torch.sort((y * 2).long() * 6 + (x * 6).long()).values
        assert torch.equal(found, sets[goal.argmax()])


def test_strength_spreads_tokens(photo: torch.Tensor) -> None:
    def uneven(strength: float, relevance: torch.Tensor) -> float:
        return float(coverage_loss(SoftTopKCoverage(128, strength=strength)(relevance=relevance).sites))

    relevance = F.avg_pool2d(photo.float().std(0)[None], 16)
    grown = [uneven(strength, relevance) for strength in (0.0, 0.3, 1.0, 3.0, 30.0)]
    assert all(b < a for a, b in itertools.pairwise(grown)) and grown[-1] < 0.1 < grown[0]
    for kind in ("zeros", "one hot"):
        sites = SoftTopKCoverage(128)(relevance=maps(kind, 1, 32, 32)).sites[0]
        held = torch.bincount((sites[:, 1] * 8).long() * 8 + (sites[:, 0] * 8).long(), minlength=64)
        assert held.float().std() < 0.5 and held.sum() == 128 and held.min() >= 1


def test_the_soft_mask() -> None:
    relevance = maps("noise", 2, 12, 15)
    allocator = SoftTopKCoverage(40, P)
    mask = allocator.soft_mask(relevance=relevance)
    assert mask.shape == (2, 12, 15) and torch.allclose(mask.sum((1, 2)), torch.full((2,), 40.0))
    tokens = allocator(relevance=relevance)
    x, y, _ = tokens.sites.unbind(-1)
    at = mask[torch.arange(2)[:, None], (y * 12).long(), (x * 15).long()]
    assert torch.equal(tokens.scores, at) and 30 < float(tokens.scores.detach().sum(1).min()) <= 40
    infinite = allocator(relevance=maps("infinities", 1, 12, 15))
    assert torch.equal(infinite.sites[0, 0], GridTopK(1, P)(relevance=maps("infinities", 1, 12, 15)).sites[0, 0])


@torch.no_grad()
def test_the_coverage_penalty_is_a_soft_histogram_of_the_mask() -> None:
    relevance = maps("noise", 2, 12, 15)
    relevance[:, :, :5] += 0.5
    allocator = SoftTopKCoverage(40, P, bins=(4, 3), temperature=0.5)
    mask = allocator.soft_mask(relevance=relevance).double()
    held = torch.zeros(2, 4, 3, dtype=torch.float64)
    for y in range(12):
        for x in range(15):
            # Centres of bins are 3 rows and 5 columns apart, the first at cells 1 and 2.
            row, column = min(max((y - 1) / 3, 0), 3), min(max((x - 2) / 5, 0), 2)
            for j in range(4):
                for i in range(3):
                    held[:, j, i] += mask[:, y, x] * max(0, 1 - abs(row - j)) * max(0, 1 - abs(column - i))
    expected = (12 * (held / 40).square().sum((1, 2)) - 1).mean()
    found = allocator.coverage_penalty(relevance=relevance)
    assert found.dtype == torch.float32 and abs(float(found - expected)) < 1e-5 < float(expected)
    alone = [float(allocator.coverage_penalty(relevance=one)) for one in relevance]
    assert sum(alone) / 2 == pytest.approx(float(found), rel=1e-5)
    # A sharp mask is the choice itself; a grid of fewer cells than bins has fewer bins.
    sharp = SoftTopKCoverage(40, P, temperature=1e-4)
    assert float(sharp.coverage_penalty(relevance=relevance)) == pytest.approx(
        float(coverage_loss(sharp(relevance=relevance).sites)), abs=1e-4
    )
    assert float(sharp.coverage_penalty(relevance=torch.rand(1, 5, 8))) < 1e-4
    with pytest.raises(InputError, match="there are 16"):
        SoftTopKCoverage(17).coverage_penalty(relevance=torch.rand(4, 4))


def test_the_coverage_penalty_has_exact_gradients() -> None:
    """In relevance, strength and temperature alike."""
    scene, _ = GridTopK(9, P)._scene(None, maps("noise", 2, 6, 7), None, None, None)
    relevance = scene.relevance.double().requires_grad_()
    strength, temperature = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.7, -0.5))

    def penalty(relevance: torch.Tensor, strength: torch.Tensor, log_temperature: torch.Tensor) -> torch.Tensor:
        allocator = SoftTopKCoverage(9, P, bins=(3, 2))
        for name, value in (("strength", strength), ("log_temperature", log_temperature)):
            delattr(allocator, name)
            setattr(allocator, name, value)
        return allocator._penalty(dataclasses.replace(scene, relevance=relevance))

    assert torch.autograd.gradcheck(penalty, (relevance, strength, temperature))
    penalty(relevance, strength, temperature).backward()
    assert relevance.grad is not None and (relevance.grad != 0).all()
    assert strength.grad is not None and float(strength.grad) < 0 and temperature.grad is not None


@pytest.mark.parametrize("what", ["strength", "relevance"])
def test_training_on_the_coverage_penalty_covers_the_picture(what: str, salient: torch.Tensor) -> None:
    """Of a face, a cat and a cup more parts have tokens, half as unevenly: by what trades, or by what is relevant."""
    allocator = SoftTopKCoverage(64, P, strength=0.0)
    relevance = torch.nn.Parameter(salient / salient.mean((1, 2), keepdim=True))

    def measured() -> tuple[float, int]:
        with torch.no_grad():
            sites = allocator(relevance=relevance).sites
        bins = (sites[..., 1] * 8).long() * 8 + (sites[..., 0] * 8).long() + 64 * torch.arange(3)[:, None]
        return float(coverage_loss(sites)), len(bins.unique())

    before = measured()
    if what == "strength":
        fit(allocator, lambda: allocator.coverage_penalty(relevance=relevance.detach()), 20, 0.1)
    else:
        fit(relevance, lambda: allocator.coverage_penalty(relevance=relevance), 20, 0.1)
        assert float(allocator.strength.detach()) == 0

    after = measured()
    assert after[0] < 0.5 * before[0] and after[1] > 1.3 * before[1], (before, after)


def test_a_strength_below_nothing_comes_back() -> None:
    relevance = maps("noise", 1, 16, 16)
    allocator = SoftTopKCoverage(40, P, temperature=1.0)
    with torch.no_grad():
        allocator.strength.fill_(-0.5)
    assert torch.equal(allocator(relevance=relevance).sites, GridTopK(40, P)(relevance=relevance).sites)
    crowded = torch.zeros(1, 16, 16)
    crowded[0, :4, :4] = relevance[0, :4, :4] + 1
    (allocator.soft_mask(relevance=crowded) * (crowded > 0)).sum().backward()
    assert allocator.strength.grad is not None and float(allocator.strength.grad) < 0


# -- a retina ----------------------------------------------------------------------------------------------------------


def test_a_quarter_starts_in_the_fovea() -> None:
    offsets = PseudoLogPolar(400).offsets.detach()
    radius = offsets.norm(dim=1)
    assert torch.equal(radius[:100].argsort(), torch.arange(100))
    # Of a normal distribution in the plane, 39 in 100 are within one sigma and 86 within two.
    assert abs(int((radius[:100] < 0.05).sum()) - 39) <= 1 and abs(int((radius[:100] < 0.1).sum()) - 86) <= 1
    sites = PseudoLogPolar(400)(relevance=torch.rand(1, 20, 20), fixation=(0.5, 0.5)).sites.detach()
    rest = sites[0][(sites[0, :, :2] - 0.5).norm(dim=1) > 0.25]
    inside = math.pi * 0.25**2
    assert abs(len(rest) - 300 * (1 - inside)) < 12 and float(coverage_loss(rest)) < 0.6


@pytest.mark.parametrize("grid", [(1, 1), (3, 11), (40, 40)])
@pytest.mark.parametrize("gaze", [(0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.3, 1.0)])
def test_centres_stay_in_the_picture_and_apart(grid: tuple[int, int], gaze: tuple[float, float]) -> None:
    allocator = PseudoLogPolar(1024, 4)
    with torch.no_grad():
        allocator.offsets[:50] *= 30
        for mode in (True, False):
            tokens = allocator.train(mode)(relevance=torch.rand(1, *grid), fixation=gaze)
            assert len(tokens.sites[0, :, :2].unique(dim=0)) == 1024
            assert float(tokens.sites[..., :2].min()) >= 0 and float(tokens.sites[..., :2].max()) <= 1
            assert tokens.weights is not None and torch.isfinite(tokens.weights).all()
            assert torch.allclose(tokens.weights.sum(-1), torch.ones(1, 1024), atol=1e-5), "dead bins too"


def test_the_fovea_goes_with_the_gaze_and_is_round() -> None:
    allocator = PseudoLogPolar(64, P)
    with torch.no_grad():
        allocator.offsets.copy_(0.01 * F.normalize(torch.randn(64, 2)))
    for gaze in ((0.3, 0.6), (0.8, 0.2)):
        sites = allocator(relevance=torch.rand(1, 10, 40), fixation=gaze).sites[0, :, :2]
        away = (sites - torch.tensor(gaze)) * torch.tensor([1.0, 0.25])
        # An offset of 0.01 loses 0.01 / (room + 0.01), and the least room is a fifth of a side of 0.25: a sixth.
        least, most = away.detach().norm(dim=1).aminmax()
        assert float(least) >= 0.01 * 5 / 6 - 1e-6 and float(most) <= 0.01 + 1e-6


def test_every_patch_is_assigned_once() -> None:
    relevance = maps("noise", 2, 12, 15)
    for mode in (True, False):
        allocator = PseudoLogPolar(20, P).train(mode)
        mass = allocator.mass(relevance=relevance, fixation=(0.4, 0.5))
        assert torch.allclose(mass.sum(1), torch.full((2,), 180.0))
        tokens = allocator(relevance=relevance, fixation=(0.4, 0.5))
        assert torch.allclose(tokens.scores.sum(1), relevance.sum((1, 2)), rtol=1e-4)
        levels = tokens.sites[..., 2].sort(dim=1).values
        assert torch.allclose(levels, (0.5 * mass.log2()).clamp(min=0).sort(dim=1).values, atol=1e-5)
        # The assignment itself, from softmax(-d / T) by hand.
        assert tokens.weights is not None
        x, y = (torch.arange(15) + 0.5) / 15, (torch.arange(12) + 0.5) / 15
        places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).flatten(0, 1)
        apart = torch.cdist(tokens.sites[0, :, :2] * torch.tensor([1, 0.8]), places)
        shares = (-apart / math.sqrt(0.8 / 20) / (1.0 if mode else 0.1)).softmax(0)
        assert torch.allclose(tokens.weights[0], shares / shares.sum(1, keepdim=True), atol=1e-4)

        assert (float(shares.detach().amax(0).mean()) > 0.7) != mode, "sharper in running"


def test_gradients_reach_offsets_through_patches(pictures: torch.Tensor) -> None:
    allocator = PseudoLogPolar(16, P)
    patches = allocator(pictures, fixation=(0.4, 0.5)).patches
    assert patches is not None
    patches.square().mean().backward()
    assert allocator.offsets.grad is not None and (allocator.offsets.grad.abs().sum(1) > 0).all()


# -- vortices ----------------------------------------------------------------------------------------------------------


def test_what_vortices_pull_most_is_chosen() -> None:
    rows, columns = 9, 12
    relevance = torch.rand(1, rows, columns) + 0.1
    allocator = VortexLearned(25, P, vortices=3, radius=0.2)
    with torch.no_grad():
        allocator.log_strengths.copy_(torch.tensor([0.0, 1.0, -1.0]))
    worth = {}
    for y in range(rows):
        for x in range(columns):
            pull = 0.0
            for (cx, cy), strength in zip(allocator.centres.tolist(), (1.0, math.e, 1 / math.e), strict=True):
                away = ((x + 0.5) / columns - cx) ** 2 + (((y + 0.5) / rows - cy) * rows / columns) ** 2
                pull += strength / (away + 0.2**2)
            worth[x, y] = float(relevance[0, y, x]) * pull
    best = sorted(worth, key=lambda cell: -worth[cell])[:25]
    sites = allocator(relevance=relevance).sites[0].tolist()
    assert [(int(x * columns), int(y * rows)) for x, y, _ in sites] == best


def test_soft_counts_sum_to_k_and_follow_the_strengths() -> None:
    relevance = maps("noise", 2, 16, 16)
    allocator = VortexLearned(40, P, vortices=4)
    before = allocator.soft_counts(relevance=relevance)
    assert before.shape == (2, 4) and torch.allclose(before.sum(1), torch.full((2,), 40.0))
    with torch.no_grad():
        allocator.log_strengths[2] += 2
    after = allocator.soft_counts(relevance=relevance)
    assert (after[:, 2] > before[:, 2] + 5).all() and torch.allclose(after.sum(1), torch.full((2,), 40.0))
    after[0, 2].backward()
    assert allocator.log_strengths.grad is not None and float(allocator.log_strengths.grad[2]) > 0


def test_vortices_repel() -> None:
    allocator = VortexLearned(10)
    assert float(allocator.repulsion().detach()) == 0
    with torch.no_grad():
        allocator.centre_logits[1] = allocator.centre_logits[0] + 0.2
    fit(allocator, allocator.repulsion, 60, 0.1)
    assert float(torch.pdist(allocator.centres.detach()).min()) > 0.19
    # In a picture four times as wide as high, what is close in height is closer.
    assert float(allocator.repulsion((1, 4)).detach()) > 0


def test_blends_are_convex_and_stand_where_they_look() -> None:
    relevance = maps("noise", 2, 10, 14)
    allocator = SoftVortex(31, P)
    tokens = allocator(relevance=relevance)
    weights = tokens.weights
    assert weights is not None and weights.shape == (2, 31, 140)
    assert (weights >= 0).all() and torch.allclose(weights.sum(-1), torch.ones(2, 31), atol=1e-5)
    places = torch.tensor([[(x + 0.5) / 14, (y + 0.5) / 10] for y in range(10) for x in range(14)])
    assert torch.allclose(tokens.sites[..., :2], weights @ places, atol=1e-5)
    assert torch.allclose(4 ** tokens.sites[..., 2], 1 / weights.square().sum(-1), rtol=1e-4)
    assert torch.allclose(tokens.scores, tokens.blend(relevance.flatten(1)[..., None])[..., 0], atol=1e-5)


def test_patches_that_are_whole_are_copied_as_they_lie(pictures: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """And blend, with their gradients, to what gathered ones do."""
    allocator, relevance = SoftVortex(9, P), maps("noise", 2, 5, 7)
    found = []
    for copied in (True, False):
        image = pictures[:2, :, :40, :56].transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
        with monkeypatch.context() as patch:
            if copied:
                patch.setattr(allocator, "_gathered", lambda *given, **how: pytest.fail("they were gathered"))
            else:
                patch.setattr(SoftVortex, "_tiles", staticmethod(lambda scene: None))
            patches = allocator(image, relevance).patches
        found.append((patches, torch.autograd.grad(patches.square().sum(), image)[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


def test_what_all_images_share_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the parts of one call, of which each gets what it would alone; another budget makes its own."""
    relevance = maps("noise", 5, 10, 14)
    alone = [SoftVortex(31, P)(relevance=one) for one in relevance]
    made: list[torch.Size] = []
    distances = soft_vortex.distances
    monkeypatch.setattr(soft_vortex, "distances", lambda *given: made.append(given[1].shape) or distances(*given))
    monkeypatch.setattr(base, "AT_ONCE", 2 * 31 * 140)
    for budget in (31, 17):
        made.clear()
        tokens = SoftVortex(budget, P)(relevance=relevance)
        assert made == [(1, budget, 2)]
        if budget == 31:
            assert all(torch.equal(tokens.weights[i], one.weights) for i, one in enumerate(alone))


def test_means_of_places_are_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their gradients."""
    found = []
    for on_host in (True, False):
        monkeypatch.setattr(checks, "on_host", lambda value, here=on_host: here)
        generator = torch.Generator().manual_seed(3)
        weights, places = (
            torch.rand(*shape, dtype=torch.float64, generator=generator).requires_grad_()
            for shape in ((2, 5, 7), (7, 2))
        )
        centres = means(weights, places)
        towards = torch.rand(centres.shape, dtype=torch.float64, generator=generator)
        found.append((centres, *torch.autograd.grad(centres, (weights, places), towards)))
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-14)


def test_tokens_are_dealt_to_vortices_at_growing_depth() -> None:
    """On even relevance and a fine grid a token stands on the spiral, and the deeper the wider."""
    allocator = SoftVortex(11, 4, vortices=3, radius=0.2, twist=1.5, width=0.2)
    with torch.no_grad():
        allocator.centre_logits.copy_(torch.tensor([[0.35, 0.45], [0.6, 0.4], [0.5, 0.55]]).logit())
    sites = allocator(relevance=torch.ones(1, 60, 80)).sites[0].detach()
    index = 0
    for depth in range(4):
        for vortex, members in enumerate((4, 4, 3)):
            if depth < members:
                t = (depth + 0.5) / members
                radius = 0.2 * 20 ** (t - 1)
                x, y = allocator.centres[vortex].tolist()
                angle = 2 * math.pi * 1.5 * t
                expected = torch.tensor([x + radius * math.cos(angle), y + radius * math.sin(angle) * 80 / 60])
                assert torch.allclose(sites[index, :2], expected, atol=2e-3)
                width = math.hypot(0.2 * radius, 0.5 / 80) * 80
                # Of a Gaussian, 1 / sum w^2 is 4 pi s^2 cells.
                assert abs(float(sites[index, 2]) - 0.5 * math.log2(4 * math.pi * width**2)) < 0.05
                index += 1
    assert index == 11


# -- losses ------------------------------------------------------------------------------------------------------------


def test_coverage_is_even_or_not() -> None:
    even = torch.cartesian_prod(torch.arange(40.0), torch.arange(40.0)) / 40 + 0.5 / 40
    assert abs(float(coverage_loss(even))) < 1e-6
    assert abs(float(coverage_loss(even, bins=(5, 3)))) < 1e-2  # 40 are no whole number for each of 3
    one = torch.full((2, 9, 3), 0.5 / 8)
    assert abs(float(coverage_loss(one)) - 63) < 1e-4
    halves = torch.tensor([[0.25, 0.5], [0.75, 0.5]])
    assert abs(float(coverage_loss(halves, bins=(1, 2)))) < 1e-6
    assert abs(float(coverage_loss(halves, torch.tensor([3.0, 1.0]), bins=(1, 2))) - 0.25) < 1e-6  # 2 (9 + 1) / 16 - 1
    large = torch.tensor([3e38, 1e38])  # whose sum is no number of fp32
    assert abs(float(coverage_loss(halves, large, bins=(1, 2))) - 0.25) < 1e-6
    with pytest.raises(InputError, match=r"weights \(3,\)"):
        coverage_loss(halves, torch.ones(3))


def test_repulsion_ends_at_the_distance() -> None:
    centres = torch.tensor([[0.2, 0.2], [0.3, 0.2], [0.9, 0.9]])
    assert abs(float(repulsion_loss(centres)) - 0.25 / 3) < 1e-6  # one pair, half as far as it should be
    assert float(repulsion_loss(centres, 0.05)) == 0
    met = torch.zeros(2, 2, requires_grad=True)
    repulsion_loss(met).backward()
    assert met.grad is not None and torch.isfinite(met.grad).all()
    for bad in ((centres[:, :1], 0.2), (centres, 0.0)):
        with pytest.raises(InputError, match=r"\[B, V, 2\] and a positive"):
            repulsion_loss(*bad)


def test_dead_bins_count_by_what_they_lack() -> None:
    assert float(dead_bin_loss(torch.tensor([10.0, 1.0, 19.0]))) == 0
    assert abs(float(dead_bin_loss(torch.tensor([[4.0, 0.0, 0.0, 0.0]]))) - 0.75) < 1e-6
    assert abs(float(dead_bin_loss(torch.tensor([17.5, 2.5]), 0.5)) - 0.125) < 1e-6
    with pytest.raises(InputError, match="least"):
        dead_bin_loss(torch.ones(3), 0.0)


def test_losses_have_exact_gradients() -> None:
    def made(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64).requires_grad_()

    assert torch.autograd.gradcheck(lambda s, w: coverage_loss(s, w, (3, 4)), (made(2, 7, 3), made(2, 7)))
    assert torch.autograd.gradcheck(lambda c: repulsion_loss(c, 0.5), (made(2, 6, 2),))
    assert torch.autograd.gradcheck(lambda m: dead_bin_loss(m, 0.9), (made(2, 6),))
    assert torch.autograd.gradcheck(in_spreads, (made(2, 9),))
    assert torch.autograd.gradgradcheck(lambda c: repulsion_loss(c, 0.5), (made(2, 6, 2),))


def test_even_points_are_apart() -> None:
    for count in (1, 2, 8, 100):
        points = even_points(count)
        assert float(points.min()) > 0 and float(points.max()) < 1
        if count > 1:
            assert float(torch.pdist(points).min()) > 0.5 / math.sqrt(count)
    assert even_points(1).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: AdaptiveStratified(9, width=0), "width"),
        (lambda: AdaptiveStratified(9, hidden=0), "hidden"),
        (lambda: AdaptiveStratified(9)(relevance=torch.rand(1, 4, 4)), "needs query"),
        (lambda: SoftTopKCoverage(9, bins=(0, 8)), "at least 1"),
        (lambda: SoftTopKCoverage(9, strength=-1.0), "from 0 to"),
        (lambda: SoftTopKCoverage(9, temperature=0.0), "positive"),
        (lambda: SoftTopKCoverage(17).soft_mask(relevance=torch.rand(4, 4)), "there are 16"),
        (lambda: PseudoLogPolar(9, fovea=1.5), "from 0 to 1"),
        (lambda: PseudoLogPolar(9, temperatures=(1.0,)), "temperatures"),
        (lambda: PseudoLogPolar(9, temperatures=(1.0, 0.0)), "positive"),
        (lambda: VortexLearned(9, vortices=0), "vortices"),
        (lambda: VortexLearned(9, radius=0.0), "positive"),
        (lambda: VortexLearned(17).soft_counts(relevance=torch.rand(4, 4)), "there are 16"),
        (lambda: SoftVortex(9, width=0.0), "positive"),
    ],
)
def test_bad_settings(make: Callable[[], object], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        make()


def test_gradients_beside_what_ranks_last() -> None:
    relevance = torch.rand(1, 6, 6)
    relevance[0, :2] = -math.inf
    for temperature in (1e-4, 1e-6):
        allocator = SoftTopKCoverage(4, P, temperature=temperature)
        allocator(relevance=relevance).scores.sum().backward()
        for parameter in allocator.parameters():
            assert parameter.grad is None or bool(parameter.grad.isfinite().all())


def test_masses_next_to_nothing_have_gradients() -> None:
    mass = torch.tensor([1e-37, 0.0, 0.0, 0.0], requires_grad=True)
    loss = lod.allocate.dead_bin_loss(mass)
    assert loss.dtype == torch.float32 and bool(torch.autograd.grad(loss, mass)[0].isfinite().all())


def test_repulsion_is_a_sum_over_pairs_for_each_centre() -> None:
    """Of three centres there are as many pairs: of four there are six."""
    assert float(repulsion_loss(torch.zeros(2, 2))) == 1 / 2
    assert float(repulsion_loss(torch.zeros(4, 2))) == 6 / 4


def test_dead_bins_know_no_unit_of_mass() -> None:
    mass = torch.tensor([17.5, 2.5])
    for scale in (1e-12, 1e-30, 1e30):
        assert float(dead_bin_loss(mass * scale, 0.5)) == pytest.approx(0.125, abs=1e-6)


def test_all_that_is_below_the_mean_may_be_dead() -> None:
    assert float(dead_bin_loss(torch.tensor([15.0, 5.0]), 1.0)) == pytest.approx(0.125, abs=1e-6)


def test_blends_of_even_relevance_score_alike() -> None:
    """To the last bit, so that tokens keep an order of their own."""
    scores = SoftVortex(40, 4)(relevance=torch.full((1, 9, 11), 0.3)).scores
    assert torch.equal(scores, torch.full_like(scores, 0.3))
