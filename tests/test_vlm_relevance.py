"""Relevance scorers: each head sees its own channels, on the grid, and the parts add up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpu_lod as lod
import gpu_lod.vlm.relevance as relevance_module
from gpu_lod.errors import InputError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm import ContextualizedRelevance, query_similarity, relevance_map, saliency_relevance
from gpu_lod.vlm.relevance import HEADS, _cells

MAPS = (2, 40, 50, 73)


def cells(values: torch.Tensor, patch: int = 14) -> torch.Tensor:
    """The mean of [H, W] over each patch, those at the far edges shifted inward."""
    height, width = values.shape
    return torch.stack(
        [
            torch.stack([values[y : y + patch, x : x + patch].mean() for x in starts(width, patch)])
            for y in starts(height, patch)
        ]
    )


def starts(n: int, patch: int) -> list[int]:
    return [min(i, n - patch) for i in range(0, n, patch)]


def test_maps_are_pooled_over_patches() -> None:
    maps = torch.randn(MAPS)
    found = _cells(maps, 14)
    assert found.shape == (2, 40, 4, 6)
    for channel in range(40):
        values = maps[1, channel].abs() if channel in (6, 7, 10) else maps[1, channel]
        assert torch.allclose(found[1, channel], cells(values), atol=1e-6), channel


def test_parts_add_up() -> None:
    scorer = ContextualizedRelevance(8)
    maps, query = torch.randn(MAPS), torch.randn(2, 8)
    relevance, heads, weights = scorer.score(maps, query)
    assert relevance.shape == (2, 4, 6) and heads.shape == (2, 3, 4, 6) and weights.shape == (2, 3)
    assert torch.allclose(weights.sum(1), torch.ones(2)) and bool(((heads > 0) & (heads < 1)).all())
    assert torch.allclose(relevance, torch.einsum("bhyx,bh->byx", heads, weights), atol=1e-6)
    assert torch.equal(scorer(maps, query), relevance)


def test_it_learns_from_what_inference_mode_made() -> None:
    scorer = ContextualizedRelevance(8)
    with torch.inference_mode():
        maps, query = torch.randn(MAPS), torch.randn(2, 8)
    scorer(maps, query).sum().backward()
    assert all(parameter.grad is not None for parameter in scorer.parameters())


def test_each_head_sees_its_channels_alone() -> None:
    """Of forty-one pictures, picture c differs from the last in channel c."""
    scorer = ContextualizedRelevance(8, gestalt_width=5, patch=4)
    maps = torch.randn(1, 40, 12, 15).repeat(41, 1, 1, 1)
    for channel in range(40):
        maps[channel, channel] = torch.randn(12, 15) * 2
    with torch.no_grad():
        found = scorer.score(maps, torch.randn(8), torch.randn(5))
    assert torch.allclose(found.weights, found.weights[-1:].expand(41, 3)), "a gestalt was given"
    apart = (found.heads[:-1] - found.heads[-1:]).abs().amax((2, 3))
    for head, channels in enumerate(((6, 7, 8, 12), (5, 10, 11), range(17, 33))):
        assert [c for c in range(40) if apart[c, head] > 1e-5] == list(channels), HEADS[head]


def test_what_the_query_decides() -> None:
    scorer = ContextualizedRelevance(8)
    maps = torch.randn(MAPS)
    one, other = scorer.score(maps, torch.randn(2, 8)), scorer.score(maps, torch.randn(2, 8))
    assert torch.equal(one.heads[:, :2], other.heads[:, :2])
    assert not torch.allclose(one.heads[:, 2], other.heads[:, 2])
    assert not torch.allclose(one.weights, other.weights)


def test_the_gestalt_is_in_the_weights() -> None:
    scorer = ContextualizedRelevance(8)
    maps, query = torch.randn(MAPS), torch.randn(8)
    brighter = maps.clone()
    brighter[1, 0] += 1  # red, which no head sees
    one, other = scorer.score(maps, query).weights, scorer.score(brighter, query).weights
    assert torch.equal(one[0], other[0]) and not torch.allclose(one[1], other[1])


def test_images_become_maps(photo: torch.Tensor) -> None:
    image = photo[None, :, 100:171, 200:290]
    scorer, query = ContextualizedRelevance(8, patch=16), torch.randn(8)
    found = scorer(image, query)
    assert found.shape == (1, 5, 6)
    assert torch.allclose(found, scorer(lod.feature_maps(image), query), atol=1e-6)
    assert torch.allclose(found[0], scorer(image[0], query), atol=1e-6)
    pair = scorer(torch.cat([image, image.flip(3)]), query)
    assert torch.allclose(pair[0], found[0], atol=1e-5) and not torch.allclose(pair[1], found[0], atol=1e-5)


def test_gradients_reach_every_parameter() -> None:
    scorer = ContextualizedRelevance(8)
    maps = torch.randn(MAPS, requires_grad=True)
    query = torch.randn(2, 8, requires_grad=True)
    scorer(maps, query).square().sum().backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert maps.grad is not None and query.grad is not None and query.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_layers_of_another_dtype(kind: torch.dtype) -> None:
    scorer, maps, query = ContextualizedRelevance(8), torch.rand(2, 40, 28, 28), torch.rand(2, 8)
    expected = scorer(maps, query)
    found = scorer.to(kind)(maps.to(kind), query.to(kind))
    assert found.dtype == kind
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


def test_units_of_the_maps_do_not_matter_to_two_heads() -> None:
    """They are standardised over the grid of each picture."""
    scorer = ContextualizedRelevance(8)
    maps, query = torch.randn(MAPS), torch.randn(8)
    scaled = maps.clone()
    scaled[:, [5, 6, 12]] *= 7
    one, other = scorer.score(maps, query).heads, scorer.score(scaled, query).heads
    assert torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize(
    ("source", "query", "gestalt", "hint"),
    [
        (torch.rand(2, 40, 28, 28), torch.rand(2, 7), None, r"floats \[2, 8\] or \[8\]"),
        (torch.rand(2, 40, 28, 28), torch.rand(3, 8), None, r"query is .* \(3, 8\)"),
        (torch.rand(2, 40, 28, 28), torch.ones(2, 8, dtype=torch.long), None, "floats"),
        (torch.rand(2, 39, 28, 28), torch.rand(8), None, "40 channels"),
        (torch.rand(40, 28), torch.rand(8), None, r"\[B, 40, H, W\]"),
        (torch.ones(1, 40, 28, 28, dtype=torch.uint8), torch.rand(8), None, "maps are torch.uint8"),
        (torch.rand(2, 40, 28, 28), torch.rand(8), torch.rand(2, 40), "gestalt_width="),
    ],
)
def test_bad_input(source: torch.Tensor, query: torch.Tensor, gestalt: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        ContextualizedRelevance(8)(source, query, gestalt)


def test_nothing_is_asked_by_nan() -> None:
    with pytest.raises(InputError, match="query holds NaN"):
        ContextualizedRelevance(8)(torch.rand(40, 28, 28), torch.full((8,), float("nan")))


def test_a_gestalt_that_is_missing_or_of_another_width() -> None:
    scorer = ContextualizedRelevance(8, gestalt_width=5)
    with pytest.raises(InputError, match="pass gestalt="):
        scorer(torch.rand(2, 40, 28, 28), torch.rand(8))
    with pytest.raises(InputError, match=r"gestalt is .* \[5\]"):
        scorer(torch.rand(2, 40, 28, 28), torch.rand(8), torch.rand(2, 6))
    with pytest.raises(InputError, match="width"):
        ContextualizedRelevance(0)


# -- without training --------------------------------------------------------------------------------------------------


def test_query_similarity() -> None:
    features, query = torch.randn(2, 12, 6), torch.randn(2, 6)
    features[0, 5] = 3 * query[0]
    features[1, 7] = 0
    found = query_similarity(features, query, grid=(3, 4))
    assert found.shape == (2, 3, 4)
    for image in range(2):
        for cell in range(12):
            expected = torch.cosine_similarity(features[image, cell], query[image], dim=0)
            assert torch.allclose(found[image, cell // 4, cell % 4], expected, atol=1e-6)
    assert found[0].argmax() == 5 and found[1, 1, 3] == 0
    assert torch.equal(found, query_similarity(features.view(2, 3, 4, 6), query))
    assert torch.allclose(found, query_similarity(features, 100 * query, grid=(3, 4)), atol=1e-6)


@pytest.mark.parametrize(
    ("features", "query", "grid", "hint"),
    [
        (torch.rand(2, 13, 6), torch.rand(6), (3, 4), "Leave class tokens out"),
        (torch.rand(2, 3, 4, 1, 6), torch.rand(6), None, "grid="),
        (torch.rand(6), torch.rand(6), None, "grid="),
        (torch.rand(12, 6), torch.rand(6), (3, 5), "Leave class tokens out"),
        (torch.rand(2, 4, 3, 6), torch.rand(6), (3, 4), "expected the same"),
        (torch.rand(2, 12, 6), torch.rand(5), (3, 4), r"query is .* expected floats \[2, 6\]"),
    ],
)
def test_similarities_that_do_not_fit(features: torch.Tensor, query: torch.Tensor, grid: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        query_similarity(features, query, grid)


def test_similarity_of_tokens() -> None:
    features, query = torch.randn(2, 12, 6), torch.randn(2, 6)
    found = query_similarity(features, query)
    assert torch.equal(found, query_similarity(features, query, (3, 4)).flatten(1))
    assert torch.allclose(query_similarity(features[1], query[1]), found[1], atol=1e-6)


# -- from tokens to the grid -------------------------------------------------------------------------------------------


def painted(values: list[float], tokens: TokenSet, size: tuple[int, int], fill: float | None) -> torch.Tensor:
    """`relevance_map` of one picture with loops."""
    patch = tokens.patch

    def centres(n: int) -> list[float]:
        return [min(i * patch, n - patch) + patch / 2 if n > patch else n / 2 for i in range(math.ceil(n / patch))]

    def near(at: float) -> float:  # sites are in fp32
        return round(at * 2) / 2 if abs(at * 2 - round(at * 2)) < 1e-3 else at

    rest = min(values) if fill is None else fill
    rows = []
    for y in centres(size[0]):
        rows.append([])
        for x in centres(size[1]):
            ranks = []
            for k, (u, v, level) in enumerate(tokens.sites.tolist()):
                at, half = (near(u * size[1]), near(v * size[0])), patch * 2**level / 2
                if all(near(a - half) <= c < near(a + half) for a, c in zip(at, (x, y), strict=True)):
                    ranks.append((level, (at[0] - x) ** 2 + (at[1] - y) ** 2, k))
            rows[-1].append(values[min(ranks)[2]] if ranks else rest)
    return torch.tensor(rows)


SETS = {
    "grid": lambda image: lod.allocate.GridTopK(12, 8)(image),
    "pyramid": lambda image: lod.allocate.PyramidTopK(20, 8)(image),
    "tree": lambda image: lod.allocate.FoveatedPyramid(11, 8)(image),
    "rows": lambda image: lod.allocate.Downsample(11, 8)(image),
    "spiral": lambda image: lod.allocate.LogPolar(14, 8)(image),
    "anywhere": lambda image: TokenSet(torch.rand(2, 9, 3) * torch.tensor([1, 1, 2.5]), torch.rand(2, 9), None, 8),
    "one level": lambda image: TokenSet(torch.rand(2, 30, 3) * torch.tensor([1, 1, 0]), torch.rand(2, 30), None, 8),
}


@pytest.mark.parametrize("size", [(48, 40), (43, 61), (37, 33), (50, 90)], ids=str)
@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("fill", [None, 0.0, -math.inf])
def test_relevance_map_step_by_step(
    kind: str, size: tuple[int, int], fill: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = SETS[kind](torch.rand(2, 3, *size))
    values = torch.randn(tokens.scores.shape)
    found = relevance_map(values, tokens, size, fill)
    for i in range(2):
        one = TokenSet(tokens.sites[i], tokens.scores[i], None, tokens.patch)
        assert torch.equal(found[i], painted(values[i].tolist(), one, size, fill))
        assert torch.equal(found[i], relevance_map(values[i], one, size, fill))
    monkeypatch.setattr(relevance_module, "AT_ONCE", 1)
    assert torch.equal(found, relevance_map(values, tokens, size, fill)), "a row at a time"


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 16), st.integers(0, 2**20))
def test_convention_patches_of_the_grid_have_their_own_values(height: int, width: int, patch: int, seed: int) -> None:
    """In any order, and where the last ones are shifted so far inward that they cover the centres of others."""
    torch.manual_seed(seed)
    grid = torch.rand(-(-height // patch), -(-width // patch))
    tokens = lod.allocate.GridTopK(grid.numel(), patch)(torch.zeros(3, height, width), grid)
    assert torch.equal(relevance_map(tokens.scores, tokens, (height, width)), grid)


def test_the_second_look_goes_where_the_first_said() -> None:
    """Tokens out of order: values given to the grid row by row would send it elsewhere."""
    image, where = torch.rand(1, 3, 128, 128), torch.zeros(1, 16, 16)
    where[0, 11, 4] = 1
    coarse = lod.allocate.Downsample(64, 8)(image, torch.rand(1, 16, 16))
    away = (coarse.sites[0, :, :2] - torch.tensor([4.5, 11.5]) / 16).norm(dim=-1)
    relevance = relevance_map((away < 0.07).float()[None], coarse, (128, 128))
    fine = lod.allocate.GridTopK(1, 8)(image, relevance)
    assert float((fine.sites[0, 0, :2] - torch.tensor([4.5, 11.5]) / 16).abs().max()) <= 1.01 / 16


def test_relevance_map_has_gradients_and_dtypes() -> None:
    tokens = lod.allocate.GridTopK(4, 8)(torch.zeros(1, 3, 16, 24), torch.arange(6.0).view(1, 2, 3))
    values = torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float16, requires_grad=True)
    found = relevance_map(values, tokens, (16, 24), fill=0.5)
    assert found.dtype == torch.float16 and found.tolist() == [[[0.5, 0.5, 4], [3, 2, 1]]]
    found.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[1, 1, 1, 1]]
    assert relevance_map(torch.tensor([[1, 2, 3, 4]]), tokens, (16, 24)).dtype == torch.float32
    eighths = torch.tensor([[1.0, 2.0, 0.5, 4.0]]).to(torch.float8_e4m3fn)
    assert torch.equal(relevance_map(eighths, tokens, (16, 24)), relevance_map(eighths.float(), tokens, (16, 24)))


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda values, tokens: (values, tokens.sites, (16, 24)), "tokens are Tensor; expected a TokenSet"),
        (lambda values, tokens: (values[:, 1:], tokens, (16, 24)), r"expected \(1, 4\), one of each token"),
        (lambda values, tokens: (values * math.nan, tokens, (16, 24)), "values holds NaN"),
        (lambda values, tokens: (values > 0, tokens, (16, 24)), "expected numbers"),
        (lambda values, tokens: (values, tokens, 16), "size is 16"),
        (lambda values, tokens: (values, tokens, (16, 24), math.inf), "fill is inf"),
        (lambda values, tokens: (values, tokens, (16, 24), "mean"), "fill is str"),
        (lambda values, tokens: (values, replace(tokens, sites=tokens.sites * 24), (16, 24)), r"expected \[0, 1\]"),
    ],
)
def test_what_cannot_be_put_on_the_grid(change: Any, hint: str) -> None:
    tokens = lod.allocate.GridTopK(4, 8)(torch.zeros(1, 3, 16, 24), torch.arange(6.0).view(1, 2, 3))
    with pytest.raises(InputError, match=hint):
        relevance_map(*change(torch.rand(1, 4), tokens))


def test_saliency_relevance_is_what_allocators_fall_back_on(photo: torch.Tensor) -> None:
    image = photo[None, :, :75, 150:251]
    found = saliency_relevance(image)
    assert found.shape == (1, 6, 8) and torch.equal(found[0], saliency_relevance(image[0]))
    assert torch.allclose(found[0], cells(lod.feature_maps(image)[0, 5]), atol=1e-6)
    scores = lod.allocate.GridTopK(48)(image).scores[0]
    assert torch.allclose(found.flatten().sort(descending=True).values, scores, atol=1e-6)


def test_rounding_is_not_standardised() -> None:
    """What is flat but for rounding stays flat, and no head sees a pattern in it."""
    flat = torch.full((1, 4, 6, 1), 0.5)
    flat[:, ::2] += 2**-20
    assert relevance_module._standardised(flat).abs().max() < 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_saliency_of_a_broken_picture(bad: float) -> None:
    image = torch.rand(2, 3, 56, 56)
    image[1, 2, 20, 30] = bad
    with pytest.raises(InputError, match="saliency of the image is not finite"):
        saliency_relevance(image)
