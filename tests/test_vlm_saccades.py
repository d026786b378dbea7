"""Gestalt and saccades: the whole picture evenly, then an allocator's tokens, always as many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from images import noise

import gpu_lod as lod
from gpu_lod.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_529_tokens_of_a_batch(photo: torch.Tensor) -> None:
    image = torch.stack([photo[:, :440, :], photo[:, 60:500, :].flip(-1)])
    saccades = lod.vlm.Saccades(lod.allocate.FoveatedPyramid(64, e0=0.1))
    tokens = saccades(image, fixation=(0.4, 0.3))
    assert saccades.budget == 529 and saccades.patch == 14
    assert tokens.sites.shape == (2, 529, 3) and tokens.scores.shape == (2, 529)
    assert tokens.patches is not None and tokens.patches.shape == (2, 529, 3, 14, 14)
    # The last are the allocator's own, made with the budget of 273 and the rest of its settings.
    own = lod.allocate.FoveatedPyramid(273, e0=0.1)(image, fixation=(0.4, 0.3))
    assert torch.equal(tokens.sites[:, 256:], own.sites) and torch.equal(tokens.scores[:, 256:], own.scores)
    assert torch.equal(tokens.patches, lod.gather_patches(lod.mipmap(image), tokens.sites, 14))
    assert (tokens.scores[:, 257:] <= tokens.scores[:, 256:-1]).all()


def test_convention_the_base_is_a_square_grid() -> None:
    """16 x 16 cells whatever the picture's shape, row by row, read at the level that spans a cell's longer side."""
    tokens = lod.vlm.Saccades(lod.allocate.GridTopK(1, patch=14), budget=1)(torch.rand(1, 3, 224, 448))
    x, y, level = tokens.sites[0, :256].double().view(16, 16, 3).unbind(-1)
    centres = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    assert torch.allclose(x, centres.expand(16, 16)) and torch.allclose(y, centres[:, None].expand(16, 16))
    assert torch.equal(level, torch.ones_like(level))  # cells are 28 x 14, patches 14
    assert (tokens.scores[0, :256] == 1).all()


def test_any_other_base_is_downsampled() -> None:
    image = torch.rand(1, 3, 100, 301)
    tokens = lod.vlm.Saccades(lod.allocate.GridTopK(5), base=47, budget=5)(image)
    assert torch.equal(tokens.sites[:, :47], lod.allocate.Downsample(47)(image).sites)


def test_sites_alone_and_one_image() -> None:
    saccades = lod.vlm.Saccades(lod.allocate.GridTopK(4), base=9, budget=4)
    relevance = torch.rand(5, 7)
    alone = saccades(relevance=relevance)
    image = torch.rand(3, 70, 98)
    tokens = saccades(image, relevance)
    assert alone.patches is None and torch.equal(alone.sites, tokens.sites) and tokens.sites.shape == (13, 3)
    assert tokens.patches is not None and tokens.patches.shape == (13, 3, 14, 14)
    whole = saccades(lod.mipmap(image), relevance)
    assert torch.equal(whole.sites, tokens.sites) and torch.equal(whole.patches, tokens.patches)


def test_relevance_leaves_the_base_row_by_row() -> None:
    relevance = torch.arange(35.0).view(5, 7)
    for image in (None, torch.rand(3, 70, 98)):
        tokens = lod.vlm.Saccades(lod.allocate.GridTopK(4), base=9, budget=4)(image, relevance)
        places = tokens.sites[:9, :2].flip(-1).tolist()
        assert places == sorted(places) and (tokens.scores[:9] == 1).all()
        assert tokens.scores[9:].tolist() == [34, 33, 32, 31]


def test_normalised_patches() -> None:
    saccades = lod.vlm.Saccades(lod.allocate.GridTopK(4), base=9, budget=4)
    image = noise(1, 3, 56, 56, dtype=torch.uint8)
    plain, scaled = saccades(image).patches, saccades(image, mean=(0.5,) * 3, std=(0.25,) * 3).patches
    assert plain is not None and scaled is not None
    assert torch.allclose(scaled, (plain / 255 - 0.5) / 0.25, atol=0.02)  # bytes are rounded


class Blend(lod.allocate.Allocator):
    """Each token the mean of all patches."""

    blends = True

    def choose(self, scene: Any) -> tuple[torch.Tensor, ...]:
        cells = scene.grid[0] * scene.grid[1]
        weights = torch.full((scene.batch, self.budget, cells), 1 / cells)
        sites = scene.sites(0, torch.zeros(scene.batch, self.budget).long())
        return sites, torch.ones(scene.batch, self.budget), weights


def test_blends_beside_patches_that_are_read() -> None:
    """Both in the same units: fractions, where blends of bytes are fractions."""
    image = torch.full((1, 3, 56, 56), 200, dtype=torch.uint8)
    tokens = lod.vlm.Saccades(Blend(3), base=4, budget=3)(image)
    assert tokens.patches is not None and tokens.weights is None
    assert torch.allclose(tokens.patches, torch.full_like(tokens.patches, 200 / 255))


class Learns(lod.allocate.Learned):
    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.bias = torch.nn.Parameter(torch.zeros(budget))

    def choose(self, scene: Any) -> tuple[torch.Tensor, ...]:
        sites = scene.sites(0, torch.arange(self.budget).expand(scene.batch, -1))
        return sites, self.bias.expand(scene.batch, -1)


def test_learned_allocators_are_not_copied() -> None:
    learned = Learns(6)
    saccades = lod.vlm.Saccades(learned, base=4, budget=6)
    assert saccades.allocator is learned
    saccades(torch.rand(2, 3, 56, 56)).scores.sum().backward()
    assert learned.bias.grad is not None and (learned.bias.grad == 2).all()
    with pytest.raises(InputError, match="budget=273, or pass budget=6"):
        lod.vlm.Saccades(learned)


def test_the_given_allocator_keeps_its_budget() -> None:
    given = lod.allocate.GridTopK(7)
    saccades = lod.vlm.Saccades(given, base=4, budget=3)
    assert given.budget == 7 and saccades.allocator.budget == 3


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: lod.vlm.Saccades("GridTopK"), "expected one of gpu_lod.allocate"),
        (lambda: lod.vlm.Saccades(lod.allocate.GridTopK(), base=0), "base"),
        (lambda: lod.vlm.Saccades(lod.allocate.GridTopK(), budget=0), "budget"),
        (lambda: lod.vlm.Saccades(lod.allocate.GridTopK())(), "pass image= or relevance="),
        (lambda: lod.vlm.Saccades(lod.allocate.GridTopK())(torch.rand(1, 3, 56, 56)), "budget is 273"),
        (lambda: lod.vlm.Saccades(lod.allocate.GridTopK())(torch.rand(1, 3, 560, 560), query=torch.rand(4)), "query"),
        (
            lambda: lod.vlm.Saccades(lod.allocate.PyramidTopK(4, split=(1, 1, 1, 1)))(torch.rand(1, 3, 560, 560)),
            "budget=273",
        ),
        (lambda: lod.allocate.Downsample(4, rows=5), "rows"),
    ],
)
def test_bad_input(make: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        make()


def test_a_bias_is_of_the_base_too() -> None:
    image = noise(1, 3, 112, 112)
    tokens = lod.vlm.Saccades(lod.allocate.GridTopK(4), base=9, budget=4)(image, bias=1.0)
    assert tokens.patches is not None
    assert torch.equal(tokens.patches, lod.gather_patches(lod.mipmap(image), tokens.sites, 14, bias=1.0))
