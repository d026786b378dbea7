"""Straight-through selections: ones forward, the soft top-k's gradient backward, and noise of a known law."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_lod.allocate import GridTopK, soft_top_k
from gpu_lod.errors import InputError
from gpu_lod.vlm import GumbelTopK, gumbel_top_k, straight_through_top_k


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 2**20))
def test_ones_forward(batch: int, there: int, count: int, ties: bool, seed: int) -> None:
    torch.manual_seed(seed)
    count = min(count, there)
    relevance = torch.randn(batch, there) * 10 ** torch.randint(-3, 4, ()).item()
    relevance = (relevance.round() if ties else relevance).requires_grad_()
    for index, weights in (
        straight_through_top_k(relevance, count),
        gumbel_top_k(relevance, count, generator=torch.Generator().manual_seed(seed)),
    ):
        assert torch.equal(weights, torch.ones(batch, count)), "exactly"
        assert index.shape == (batch, count) and all(len(row.unique()) == count for row in index)
    found = relevance.detach().gather(1, straight_through_top_k(relevance, count).indices)
    assert torch.equal(found, relevance.detach().sort(dim=1, descending=True).values[:, :count])


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_the_soft_gradient_backward(temperature: float) -> None:
    relevance = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    features, cost = torch.randn(2, 30, 4, dtype=torch.float64), torch.randn(2, 8, 4, dtype=torch.float64)
    selection = straight_through_top_k(relevance, 8, temperature)
    (selection.take(features) * cost).sum().backward()
    # By finite differences of the soft top-k, that of the chosen ones only.
    slope = (features[torch.arange(2)[:, None], selection.indices] * cost).sum(-1)

    def soft(values: torch.Tensor) -> torch.Tensor:
        return (soft_top_k(values, 8, temperature).gather(1, selection.indices) * slope).sum()

    flat, step = relevance.detach().flatten(1), 1e-6
    expected = torch.zeros_like(flat)
    for place in itertools.product(range(2), range(30)):
        moved = torch.zeros_like(flat)
        moved[place] = step
        expected[place] = (soft(flat + moved) - soft(flat - moved)) / (2 * step)
    assert relevance.grad is not None and expected.abs().max() > 0.1
    assert torch.allclose(relevance.grad.flatten(1), expected, atol=1e-6)


def test_taken_features_are_those_of_the_grid() -> None:
    """The index is that of GridTopK's sites, row by row."""
    relevance, features = torch.rand(2, 5, 6), torch.randn(2, 30, 4)
    selection = straight_through_top_k(relevance, 7)
    taken = selection.take(features)
    sites = GridTopK(7)(relevance=relevance).sites
    for image, k in itertools.product(range(2), range(7)):
        x, y, _ = sites[image, k].tolist()
        assert torch.equal(taken[image, k], features[image, int(y * 5) * 6 + int(x * 6)])


@pytest.mark.parametrize("noise", [1.0, 0.4])
def test_gumbel_follows_plackett_and_luce(noise: float) -> None:
    """Pairs drawn of four, in their order, against the law's probabilities: chi-square, 11 degrees of freedom."""
    draws = 5_000
    relevance = torch.tensor([0.3, -0.5, 1.1, 0.0])
    generator = torch.Generator().manual_seed(5)
    index, _ = gumbel_top_k(relevance.expand(draws, 4), 2, noise=noise, generator=generator)
    strength = torch.exp(relevance.double() / noise)
    deviation = 0.0
    for first, second in itertools.permutations(range(4), 2):
        law = strength[first] / strength.sum() * strength[second] / (strength.sum() - strength[first])
        found = int(((index[:, 0] == first) & (index[:, 1] == second)).sum())
        deviation += float((found - draws * law) ** 2 / (draws * law))
    assert deviation < 31.3  # which 0.1% exceed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_noise_is_in_full_precision(dtype: torch.dtype) -> None:
    """Half precision's numbers about 100 are so few that most noise would be equal, and the first places drawn."""
    relevance = torch.full((200, 1024), 100.0, dtype=dtype)
    index, weights = gumbel_top_k(relevance, 64, generator=torch.Generator().manual_seed(5))
    assert abs(float(index.double().mean()) - 511.5) < 4 * 295.6 / math.sqrt(200 * 64)
    assert weights.dtype == dtype and bool((weights == 1).all())


def test_noise_has_a_seed_and_ends_with_training() -> None:
    relevance = torch.rand(3, 8, 8, requires_grad=True)
    select = GumbelTopK(16)

    def drawn(seed: int) -> torch.Tensor:
        return select(relevance, torch.Generator().manual_seed(seed)).indices

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    torch.manual_seed(3)
    first = select(relevance).indices
    assert not torch.equal(first, select(relevance).indices)
    torch.manual_seed(3)
    assert torch.equal(first, select(relevance).indices), "torch's own seed, if no generator is given"
    select.eval()
    assert torch.equal(drawn(1), drawn(2))
    assert torch.equal(drawn(1), straight_through_top_k(relevance, 16).indices)
    select(relevance).weights.sum().backward()
    assert relevance.grad is not None


def test_infinities() -> None:
    relevance = torch.tensor([[0.0, math.inf, -math.inf, 1.0]])
    for seed in range(20):
        index, _ = gumbel_top_k(relevance, 3, generator=torch.Generator().manual_seed(seed))
        assert index[0, 0] == 1 and 2 not in index


def test_float8_is_as_good_as_its_values() -> None:
    relevance = torch.rand(2, 5).to(torch.float8_e4m3fn)
    found, expected = (straight_through_top_k(values, 2) for values in (relevance, relevance.float()))
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.weights, expected.weights)
    found, expected = (
        gumbel_top_k(values, 2, generator=torch.Generator().manual_seed(1)) for values in (relevance, relevance.float())
    )
    assert torch.equal(found.indices, expected.indices)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: straight_through_top_k(torch.rand(2, 5), 6), "at least the count, 6"),
        (lambda: straight_through_top_k(torch.rand(2, 5), 0), "count"),
        (lambda: straight_through_top_k(torch.rand(2, 5), 2, temperature=0.0), "positive"),
        (lambda: straight_through_top_k(torch.rand(5), 2), r"\[B, Hg, Wg\]"),
        (lambda: straight_through_top_k(torch.ones(2, 5, dtype=torch.long), 2), "floats"),
        (lambda: straight_through_top_k(torch.full((2, 5), math.nan), 2), "NaN"),
        (lambda: gumbel_top_k(torch.rand(2, 5), 2, noise=-1.0), "0 or more"),
        (lambda: straight_through_top_k(torch.rand(2, 5).to("meta"), 2), "relevance is a strided"),
        (lambda: gumbel_top_k(torch.rand(2, 5), 2, generator=0), "generator is 0; expected a torch.Generator"),
        (lambda: GumbelTopK(2)(torch.rand(2, 5), 0), "generator is 0"),
        (lambda: GumbelTopK(0), "count"),
    ],
)
def test_bad_input(call: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        call()


def test_bad_features_are_refused() -> None:
    chosen = straight_through_top_k(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), 2)
    assert chosen.take(torch.rand(2, 3, 5)).shape == (2, 2, 5)
    for shape in ((2, 2, 5), (1, 3, 5), (3, 3, 5), (2, 3)):
        with pytest.raises(InputError, match=r"expected \[2, N, D\], N of 3 or more"):
            chosen.take(torch.rand(shape))
    with pytest.raises(InputError, match="positive number"):
        GumbelTopK(5, temperature=-1)
