"""Glances: no site twice, where they look, and who buys the second."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpu_lod as lod
from gpu_lod.allocate import Downsample, GridTopK, Hexagonal, LogPolar, Random, Stratified, find_fixations
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError
from gpu_lod.vlm import Glanced, Glances, attention_entropy, glances, relevance_map
from gpu_lod.vlm.glances import _cells

ALLOCATORS = ["GridTopK", "PyramidTopK", "FoveatedPyramid", "Stratified", "VortexField", "Hexagonal", "Downsample"]


def bumps(size: int, *places: tuple[float, float, float]) -> torch.Tensor:
    """Relevance with peaks (x, y, height)."""
    at = (torch.arange(size) + 0.5) / size
    parts = [h * torch.exp(-((at - x) ** 2 + (at[:, None] - y) ** 2) / 0.01) for x, y, h in places]
    return torch.stack(parts).sum(0)[None]


@given(
    st.sampled_from(ALLOCATORS), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(["noise", "ties", "zeros", "infinities"]), st.integers(0, 2**20),
)  # fmt: skip
def test_exact_and_no_site_twice(
    name: str, batch: int, count: int, budget: int, inhibition: float, kind: str, seed: int
) -> None:
    torch.manual_seed(seed)
    relevance = torch.rand(batch, 12, 14)
    if kind == "infinities":
        relevance[:, 0, 0], relevance[:, 5] = math.inf, -math.inf
    relevance = {"ties": (relevance * 2).round(), "zeros": relevance * 0}.get(kind, relevance)
    found = glances(lod.allocate.make(name, budget), None, relevance, count, inhibition=inhibition)
    assert len(found) == count and all(glance.sites.shape == (batch, budget, 3) for glance in found)
    for sites in torch.cat([glance.sites for glance in found], dim=1):
        assert len(sites.unique(dim=0)) == count * budget
    for glance in found:
        assert (glance.scores[:, 1:] <= glance.scores[:, :-1]).all()
    first = lod.allocate.make(name, budget)(
        relevance=relevance, **({"fixation": find_fixations(relevance)[:, 0]} if name == "FoveatedPyramid" else {})
    )
    assert torch.equal(found[0].sites, first.sites), "the first glance is the allocator's own"


def test_every_cell_once() -> None:
    """As many glances as there are patches for: all of them, on a ragged picture too."""
    image = torch.rand(1, 3, 50, 60)
    found = glances(GridTopK(4), image, None, 5, inhibition=0.5)
    every = GridTopK(20)(image).sites
    sites = torch.cat([glance.sites for glance in found], dim=1)
    assert torch.equal(sites[0].unique(dim=0), every[0].unique(dim=0))


def test_the_second_glance_looks_elsewhere() -> None:
    relevance = bumps(30, (0.2, 0.3, 1.0), (0.75, 0.6, 0.35))
    first, second = glances(GridTopK(20), None, relevance, 2)
    for glance, x, y in ((first, 0.2, 0.3), (second, 0.75, 0.6)):
        away = (glance.sites[0, :, :2] - torch.tensor([x, y])).norm(dim=1)
        assert float(away.max()) < 0.15
    whole = torch.cat([first.sites, second.sites], dim=1)
    stays = torch.cat([glance.sites for glance in glances(GridTopK(20), None, relevance, 2, inhibition=0.0)], dim=1)
    assert not torch.equal(whole, stays)
    assert torch.equal(stays, GridTopK(40)(relevance=relevance).sites), "uninhibited: one glance twice as large"


class Watch(GridTopK):
    """Which keeps what it was given."""

    takes = ("fixation",)

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.seen: list[Scene] = []

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(scene)
        return super().choose(scene)


def test_each_glance_has_its_fixation_and_what_earlier_ones_left() -> None:
    watch = Watch(9)
    relevance = bumps(32, (0.2, 0.25, 1.0), (0.8, 0.7, 0.9), (0.3, 0.8, 0.8)) + 0.1
    glances(watch, None, relevance, 3, radius=0.2, inhibition=0.75)
    points = find_fixations(relevance, 3, radius=0.2, inhibition=0.75)
    at = (torch.arange(32) + 0.5) / 32
    cells = torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1)
    least = relevance.min()
    for i, scene in enumerate(watch.seen):
        assert torch.equal(scene.fixation, points[:, i])
        near = ((cells[..., None, :] - points[0, :i]).norm(dim=-1) <= 0.2).any(-1)
        expected = torch.where(near, least + (relevance - least) * 0.25, relevance)
        assert torch.allclose(scene.relevance, expected, atol=1e-6)


def test_later_glances_see_relevance_as_it_was_given() -> None:
    """Beyond the radius it is what it was, -inf and negative numbers too, and so are the scores."""
    relevance = torch.linspace(-9, -1, 400).view(1, 20, 20)
    relevance[0, 0], relevance[0, 10, 3], relevance[0, 19, 17:] = -math.inf, math.inf, -math.inf
    watch = Watch(9)
    _, second = glances(watch, None, relevance, 2, radius=0.1)
    later = watch.seen[1].relevance
    changed = later != relevance
    assert 5 < int(changed.sum()) < 25 and changed[0, 10, 3]
    assert (later[changed] == relevance[relevance > -math.inf].min()).all(), "-inf is not the least of what is there"
    assert set(second.scores[0].tolist()) <= set(relevance[0].flatten().tolist())
    for inhibition in (0.0, 0.5):
        glances(watch, None, relevance, 2, radius=0.1, inhibition=inhibition)
        there = float(watch.seen[-1].relevance[0, 10, 3])
        assert there == math.inf if inhibition == 0 else -1 < there < math.inf


def test_huge_differences_are_inhibited() -> None:
    relevance = torch.full((1, 8, 8), -3e38)
    relevance[0, 2, 2] = 3e38
    watch = Watch(3)
    glances(watch, None, relevance, 2, inhibition=0.5)
    assert abs(float(watch.seen[1].relevance[0, 2, 2])) < 1e32


def test_fixations_are_in_parts_of_the_picture() -> None:
    """The grid of a ragged one reaches over it."""
    relevance = bumps(4, (0.9, 0.9, 1.0))
    watch = Watch(2)
    glances(watch, torch.rand(1, 3, 43, 43), relevance, 1)
    scene = watch.seen[0]
    assert torch.equal(scene.fixation, scene.fixations()[:, 0])
    assert not torch.allclose(scene.fixation, find_fixations(relevance)[:, 0])


def test_attention_decides_whether_and_relevance_where() -> None:
    """The same attention, elsewhere in the picture: by itself it moves nothing, as relevance it does."""
    image, look = torch.rand(1, 3, 128, 128), Glances(64, GridTopK(4, 8), threshold=-1, patch=8)
    coarse, relevance = look.first(image), bumps(16, (0.2, 0.3, 1.0))
    for x, y in ((0.8, 0.7), (0.3, 0.8)):
        attention = torch.exp(-(coarse.sites[..., :2] - torch.tensor([x, y])).square().sum(-1) / 0.005)
        attended = relevance_map(attention, coarse, (128, 128))
        for by, place in ((relevance, (0.2, 0.3)), (attended, (x, y))):
            found = look(image, by, attention).tokens.sites[0, 64:, :2]
            assert float((found - torch.tensor(place)).norm(dim=-1).max()) < 0.15


def test_which_patch_a_site_is() -> None:
    scene, _ = GridTopK(1)._scene(torch.rand(1, 3, 50, 60), None, None, None, None)
    every = scene.sites(0, torch.arange(20))[None]
    assert _cells(scene, every).tolist() == [list(range(20))]
    coarser, beside = every.clone(), every.clone()
    coarser[..., 2] = 1
    beside[..., 1] += 0.01
    assert (_cells(scene, coarser) == 20).all() and (_cells(scene, beside) == 20).all()


def test_what_is_worth_nothing_is_still_taken_once() -> None:
    relevance = torch.rand(1, 6, 6)
    relevance[:, :3] = -math.inf
    found = Glances(GridTopK(10), GridTopK(26), threshold=-1)(None, relevance)
    assert len(found.tokens.sites[0].unique(dim=0)) == 36


def test_patches_are_read_at_the_sites(photo: torch.Tensor) -> None:
    image = photo[:, :300, :421]
    found = glances(Stratified(50), image, None, 2)
    for glance in found:
        assert glance.sites.shape == (50, 3) and glance.patches is not None
        assert torch.equal(glance.patches, lod.gather_patches(image, glance.sites, 14))
    again = glances(Stratified(50), lod.mipmap(image), None, 2)
    assert torch.equal(again[1].sites, found[1].sites)


# -- the second glance -------------------------------------------------------------------------------------------------


def test_patches_are_normalised(photo: torch.Tensor) -> None:
    image = torch.nn.functional.interpolate(photo[None].float(), (112, 112))[0].byte()
    how = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    look = Glances(GridTopK(10), GridTopK(6), threshold=-1)
    for tokens in (look.first(image, **how), look(image, **how).tokens, *glances(GridTopK(5), image, **how)):
        assert torch.equal(tokens.patches, lod.gather_patches(image, tokens.sites, 14, **how))


def test_a_bias_reads_sharper_and_moves_no_site(photo: torch.Tensor) -> None:
    look = Glances(30, LogPolar(20, 14), threshold=-1)
    plain, sharp = look(photo), look(photo, bias=-0.5)
    assert torch.equal(plain.tokens.sites, sharp.tokens.sites) and plain.tokens.patches is not None
    expected = lod.gather_patches(photo, plain.tokens.sites, 14, bias=-0.5)
    assert torch.equal(sharp.tokens.patches, expected) and not torch.equal(expected, plain.tokens.patches)
    assert torch.equal(look.first(photo, bias=-0.5).patches, expected[:30])
    for one, before in zip(glances(look.more, photo, bias=-0.5), glances(look.more, photo), strict=True):
        assert torch.equal(one.sites, before.sites)
        assert torch.equal(one.patches, lod.gather_patches(photo, one.sites, 14, bias=-0.5))


def test_entropy() -> None:
    even, one = torch.full((1, 50), 0.3), torch.zeros(1, 50)
    one[0, 7] = 2
    half = torch.cat([torch.ones(1, 25), torch.zeros(1, 25)], 1)
    found = attention_entropy(torch.cat([even, one, half, even * 0]))
    assert torch.allclose(found, torch.tensor([1, 0, math.log(25) / math.log(50), 1]), atol=1e-6)
    weights = torch.rand(3, 5, 6)
    share = weights.flatten(1) / weights.flatten(1).sum(1, keepdim=True)
    expected = torch.distributions.Categorical(share).entropy() / math.log(30)
    assert torch.allclose(attention_entropy(weights), expected, atol=1e-6)
    assert torch.allclose(attention_entropy(weights * 100), expected, atol=1e-6)
    assert attention_entropy(torch.ones(2, 1)).tolist() == [0, 0]
    # Attention that is masked, or too little for fp32, is 0, where the slope of entropy is infinite.
    masked = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(attention_entropy(masked)[0], masked)
    assert torch.isfinite(gradient).all() and not gradient[0, :2].any()  # at its highest for two
    logits = torch.tensor([[1.0, 0.0, -200.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(attention_entropy(logits.softmax(-1)).sum(), logits)
    assert gradient[0, 0] < 0 < gradient[0, 1]


def test_who_is_undecided_buys(photo: torch.Tensor) -> None:
    image = torch.stack([photo[:, :280, :280], photo[:, 200:480, 100:380], photo[:, 50:330, 60:340]])
    look = Glances(100, 50, threshold=0.8)
    coarse = look.first(image)
    attention = torch.ones(3, 100)
    attention[1] = torch.nn.functional.one_hot(torch.tensor(3), 100)
    tokens, bought, entropy, base = found = look(image, None, attention)
    assert bought.tolist() == [True, False, True] and entropy.tolist() == [1, 0, 1] and base == 100
    assert tokens.sites.shape == (3, 150, 3) and tokens.patches is not None
    assert torch.equal(tokens.sites[:, :100], coarse.sites) and torch.equal(tokens.patches[:, :100], coarse.patches)
    expected = lod.gather_patches(image, tokens.sites, 14)
    assert torch.equal(tokens.patches[found.mask], expected[found.mask])
    assert float(tokens.patches[1, 100:].float().abs().max()) == 0 == float(tokens.scores[1, 100:].abs().max())
    assert found.mask.sum(1).tolist() == [150, 100, 150] and bool(found.mask[1, :100].all())
    assert [part.budget for part in found.ragged()] == [150, 100, 150]
    for i, part in enumerate(found.ragged()):
        assert torch.equal(part.sites, tokens.sites[i][found.mask[i]])
        assert part.patches is not None and torch.equal(part.patches, tokens.patches[i][found.mask[i]])
        assert len(part.sites.unique(dim=0)) == part.budget
    features = torch.rand(3, 150, 5)
    parts = found._replace(tokens=replace(tokens, features=features)).ragged()
    for i, part in enumerate(parts):
        assert torch.equal(part.features, features[i][found.mask[i]])


def test_relevance_decides_without_attention() -> None:
    peak, flat = bumps(40, (0.5, 0.5, 1.0)), torch.rand(1, 40, 40) + 1
    look = Glances(64, GridTopK(32), threshold=0.9)
    found = look(None, torch.cat([peak, flat]))
    assert found.bought.tolist() == [False, True] and found.tokens.patches is None
    single = look(None, flat[0])
    assert single.bought.shape == () and bool(single.bought) and single.mask.shape == (96,)
    assert torch.equal(single.tokens.sites, found.tokens.sites[1]) and single.ragged()[0].budget == 96
    assert not Glances(64, 32, threshold=1)(None, torch.ones(1, 40, 40)).bought.any()


@pytest.mark.parametrize("given", ["image", "pyramid", "relevance"])
def test_only_who_buys_is_looked_at_again(photo: torch.Tensor, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.stack([photo[:, y : y + 140, 100:240] for y in (0, 100, 200, 300)])
    relevance = lod.feature_maps(image)[:, 5] if given == "relevance" else None
    source = lod.mipmap(image) if given == "pyramid" else None if given == "relevance" else image
    attention = torch.ones(4, 20)
    attention[0, 1:], attention[2, 1:] = 0, 0
    watch = Watch(30)
    some, every = (Glances(40, watch, threshold=t)(source, relevance, attention) for t in (0.5, -1))
    assert some.bought.tolist() == [False, True, False, True] and bool(every.bought.all())
    assert [scene.batch for scene in watch.seen] == [2, 4]
    assert torch.equal(watch.seen[0].relevance, watch.seen[1].relevance[1::2])
    for mine, all_of_them in ((some.tokens.sites, every.tokens.sites), (some.tokens.scores, every.tokens.scores)):
        assert mine.shape == all_of_them.shape and torch.equal(mine[some.mask], all_of_them[some.mask])
    if source is not None:
        assert some.tokens.patches is not None and every.tokens.patches is not None
        assert torch.equal(some.tokens.patches[some.mask], every.tokens.patches[some.mask])

    def refuse(*_: object) -> None:
        raise AssertionError("saliency costs, and nobody asks for it")

    monkeypatch.setattr("gpu_lod.allocate.base.saliency_cells", refuse)
    none = Glances(40, watch, threshold=1)(source, relevance, attention)
    assert len(watch.seen) == 2 and none.tokens.sites.shape == (4, 70, 3) and not none.bought.any()
    assert torch.equal(none.tokens.sites[:, :40], every.tokens.sites[:, :40])


def test_what_does_not_fit_is_said_whoever_buys(photo: torch.Tensor) -> None:
    class Asks(GridTopK):
        needs = ("relevance", "query")

    with pytest.raises(InputError, match="needs query"):
        Glances(40, Asks(10), threshold=1)(photo[None, :, :140, :140], None, torch.ones(1, 9))


def test_gradients_go_through_what_was_bought() -> None:
    image = torch.rand(2, 3, 70, 70, requires_grad=True)
    attention = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    tokens = Glances(9, GridTopK(5))(image, torch.rand(2, 5, 5), attention).tokens
    assert tokens.patches is not None
    tokens.patches[:, 9:].sum().backward()
    assert image.grad is not None and image.grad.sum((1, 2, 3)).tolist() == [0, 5 * 14 * 14 * 3]


@pytest.mark.parametrize("image", [None, torch.rand(2, 3, 168, 280)], ids=["sites alone", "image"])
@pytest.mark.parametrize("base", [20, Hexagonal(20), Random(20)], ids=["number", "Hexagonal", "Random"])
def test_the_first_glance_is_the_one_that_was_encoded(base: Any, image: torch.Tensor | None) -> None:
    """Even ones look at no relevance: given for the second glance, it would turn the order of the first."""
    relevance = torch.arange(240.0).view(12, 20).expand(2, 12, 20)
    look = Glances(base, 9, threshold=-1)
    tokens = look(image, relevance).tokens
    for first in (look.first(image, relevance), look.first(torch.rand(2, 3, 168, 280))):
        assert torch.equal(tokens.sites[:, :20], first.sites) and (first.scores == 1).all()
    assert (tokens.scores[:, 20] > 20).all()
    with pytest.raises(InputError, match="relevance is"):
        look.first(torch.rand(2, 3, 168, 280), torch.rand(2, 5, 5))


def test_glances_are_modules_of_what_learns_in_them() -> None:
    """So are saccades and banks: optimizers, checkpoints and `.to()` see it."""
    for make in (
        lambda learned: Glances(16, learned, threshold=-1.0, patch=16),
        lambda learned: lod.vlm.Saccades(learned, 16, 8),
        lambda learned: lod.allocate.TokenBank(learned, 16),
    ):
        learned = lod.allocate.VortexLearned(8, patch=16)
        around = make(learned)
        assert {*around.parameters()} == {*learned.parameters()} and len(around.state_dict()) == 4
        found = around(torch.rand(2, 3, 160, 160))
        (found.tokens if isinstance(found, Glanced) else found).scores.sum().backward()
        assert learned.centre_logits.grad is not None
        assert "VortexLearned(budget=8" in repr(around)
        plain = make(lod.allocate.GridTopK(8, patch=16))
        assert not [*plain.parameters()] and "GridTopK(budget=8" in repr(plain)


def test_a_second_glance_over_the_finest_grid() -> None:
    """A first glance that is level-0 patches leaves the second none of them."""
    found = Glances(Downsample(100), GridTopK(60))(None, torch.rand(1, 20, 20))
    assert len(found.tokens.sites[0].unique(dim=0)) == 160
    grid = Glances(GridTopK(100), GridTopK(60))(None, relevance := torch.rand(1, 20, 20))
    assert torch.equal(grid.tokens.sites, GridTopK(160)(relevance=relevance).sites)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda r: glances(GridTopK(40), None, r, 4), "160 tokens, and there are 144"),
        (lambda r: glances(GridTopK(4), None, r, 0), "count"),
        (lambda r: glances(GridTopK(4), None, r, 2, inhibition=1.5), "from 0 to 1"),
        (lambda r: glances(GridTopK(4), None, r, 2, torch.rand(8)), "takes no query"),
        (lambda r: glances(GridTopK(4)), "needs an image"),
        (lambda r: Glances(100, 50)(None, r), "150 tokens"),
        (lambda r: Glances(10, 5)(None, r, torch.rand(3, 10)), r"expected \[2, N\]"),
        (lambda r: Glances(10, Hexagonal(5, patch=16)), "patches of 14 and the second of 16"),
        (lambda r: Glances(10, 5, threshold="much"), "threshold"),
        (lambda r: attention_entropy(r - 0.5), "softmax"),
        (lambda r: attention_entropy(r * math.nan), "NaN"),
        (lambda r: attention_entropy(r[0, 0]), r"\[B, N\]"),
        (lambda r: attention_entropy(r.to("meta")), "attention is a strided"),
        (lambda r: attention_entropy(r.to_sparse()), "attention is a sparse_coo"),
        (lambda r: Glances(10, 5)(None, r, r.to("meta")), "attention is a strided"),
        (lambda r: Glances(10, 5)(None, r[0], r[0].to_sparse()), "attention is a sparse_coo"),
    ],
)
def test_bad_input(call: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        call(torch.rand(2, 12, 12))


def test_blends_have_no_site_of_their_own() -> None:
    class Blend(GridTopK):
        blends = True

    with pytest.raises(InputError, match="Blend blends patches"):
        glances(Blend(4), None, torch.rand(1, 8, 8))
