"""Bipartite soft matching: against the algorithm as published, exact counts, and its inverse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from gpu_lod.errors import InputError
from gpu_lod.vlm import (
    ContextualizedRelevance,
    Glances,
    Merged,
    VisionAttention,
    bipartite_merge,
    straight_through_top_k,
)


def published(tokens: torch.Tensor, keys: torch.Tensor, remove: int, protected: int) -> list[list[int]]:
    """One round of one image as in the paper's appendix, with loops: the members of each token that is left."""
    there = list(range(protected, len(tokens)))
    even, odd = there[::2], there[1::2]
    edges = []
    for a in even:
        likeness = [float(torch.cosine_similarity(keys[a], keys[b], dim=0)) for b in odd]
        best = max(range(len(odd)), key=likeness.__getitem__)
        edges.append((likeness[best], a, odd[best]))
    edges.sort(key=lambda edge: -edge[0])
    members = {place: [place] for place in range(len(tokens))}
    for _, a, b in edges[:remove]:
        members[b] += members.pop(a)
    return [sorted(members[place]) for place in sorted(members)]


@pytest.mark.parametrize(("there", "remove", "protected"), [(12, 4, 0), (13, 6, 0), (13, 6, 1), (9, 2, 3)])
def test_as_published(there: int, remove: int, protected: int) -> None:
    tokens, keys = torch.randn(3, there, 5), torch.randn(3, there, 8)
    found = bipartite_merge(tokens, keys, remove, protected)
    for image in range(3):
        members = published(tokens[image], keys[image], remove, protected)
        assert len(members) == there - remove
        owned = [torch.where(found.owner[image] == k)[0].tolist() for k in range(there - remove)]
        assert owned == members
        assert found.sizes[image].tolist() == [len(group) for group in members]
        for k, group in enumerate(members):
            assert torch.allclose(found.tokens[image, k], tokens[image, group].mean(0), atol=1e-6)
            assert int(found.indices[image, k]) in group
    assert torch.equal(found.tokens[:, :protected], tokens[:, :protected])


@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 40), st.integers(0, 5), st.integers(0, 2**20))
def test_exact_counts_in_as_many_rounds_as_it_takes(
    batch: int, there: int, remove: int, protected: int, seed: int
) -> None:
    torch.manual_seed(seed)
    protected = min(protected, there)
    remove = min(remove, max(there - protected - 1, 0))
    tokens = torch.randn(batch, there, 4, dtype=torch.float64)
    found = bipartite_merge(tokens, tokens.round(), remove, protected)  # ties, zeros too
    left = there - remove
    assert found.tokens.shape == (batch, left, 4) and found.budget == left
    assert torch.equal(found.sizes.sum(1), torch.full((batch,), float(there)))
    assert (found.indices[:, 1:] > found.indices[:, :-1]).all(), "in their order, none twice"
    assert torch.equal(found.owner.gather(1, found.indices), torch.arange(left).expand(batch, left))
    assert torch.equal(found.indices[:, :protected], torch.arange(protected).expand(batch, protected))
    total = (found.tokens * found.sizes[..., None].double()).sum(1)
    assert torch.allclose(total, tokens.sum(1)), "means weighted by sizes keep the sum"


def test_several_rounds_are_rounds_one_after_the_other() -> None:
    tokens, keys = torch.randn(2, 32, 5), torch.randn(2, 32, 6)
    once = bipartite_merge(tokens, keys, 26, protected=2)
    first = bipartite_merge(tokens, keys, 15, protected=2)
    second = bipartite_merge(first.tokens, first.merge(keys), 7, 2, first.sizes)
    third = bipartite_merge(second.tokens, second.merge(first.merge(keys), first.sizes), 4, 2, second.sizes)
    assert torch.equal(third.sizes, once.sizes) and torch.allclose(third.tokens, once.tokens, atol=1e-6)
    assert torch.equal(third.owner.gather(1, second.owner.gather(1, first.owner)), once.owner)


def test_what_is_alike_merges() -> None:
    """Two clusters of many copies: two tokens are left, one of each."""
    centres = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    which = torch.randint(0, 2, (1, 30))
    which[0, :4] = torch.tensor([0, 0, 1, 1])  # both among even and odd
    tokens = centres[which] + 0.01 * torch.randn(1, 30, 3)
    found = bipartite_merge(tokens, tokens, 15)
    for k in range(found.budget):
        assert len(which[found.owner == k].unique()) == 1


def test_unmerge_is_the_inverse() -> None:
    tokens = torch.randn(2, 20, 5)
    found = bipartite_merge(tokens, tokens, 12, 1)
    back = found.unmerge(found.tokens)
    assert back.shape == tokens.shape
    alone = found.unmerge(found.sizes) == 1
    assert alone.any() and torch.equal(back[alone], tokens[alone])
    assert torch.allclose(found.merge(back), found.tokens, atol=1e-6)
    assert torch.equal(found.merge(found.unmerge(found.indices.float())), found.indices.float())
    positions = found.merge(torch.arange(20).expand(2, 20))
    assert positions.shape == (2, 8) and float(positions.min()) >= 0 and float(positions.max()) <= 19


def test_each_image_for_itself_and_low_precision() -> None:
    tokens = torch.randn(3, 24, 6)
    together = bipartite_merge(tokens, tokens, 9)
    alone = bipartite_merge(tokens[1:2], tokens[1:2], 9)
    assert torch.equal(together.owner[1], alone.owner[0]) and torch.allclose(together.tokens[1], alone.tokens[0])
    half = bipartite_merge(tokens.half(), tokens, 9)
    assert half.tokens.dtype == torch.float16 and torch.allclose(half.tokens.float(), together.tokens, atol=2e-3)


def test_gradients_are_the_shares() -> None:
    tokens = torch.randn(1, 10, 3, requires_grad=True)
    found = bipartite_merge(tokens, tokens, 7)
    found.tokens.sum().backward()
    expected = 1 / found.unmerge(found.sizes)
    assert tokens.grad is not None and torch.allclose(tokens.grad, expected[..., None].expand_as(tokens))


RESULTS = {
    "Merged": lambda: bipartite_merge(torch.rand(2, 10, 4), torch.rand(2, 10, 4), 3),
    "Glanced": lambda: Glances(4, 4, patch=8)(torch.rand(2, 3, 40, 40)),
    "Relevance": lambda: ContextualizedRelevance(4).score(torch.rand(1, 3, 28, 28), torch.rand(4)),
    "Selection": lambda: straight_through_top_k(torch.rand(2, 9), 3),
    "VisionAttention": lambda: VisionAttention(torch.rand(1, 2, 4, 4), torch.rand(1, 4, 6), torch.rand(1, 4, 6)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_can_be_saved_and_are_pytrees(name: str, tmp_path: Path) -> None:
    found = _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, RESULTS[name]())
    assert type(found).__name__ == name
    torch.save(found, tmp_path / "found.pt")
    loaded = torch.load(tmp_path / "found.pt", weights_only=True)
    assert type(loaded) is type(found)
    one, other = _pytree.tree_leaves(loaded), _pytree.tree_leaves(found)
    assert len(one) >= 2 and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True)
    )


def test_merged_tensors_move_together() -> None:
    tokens = torch.rand(2, 10, 4, requires_grad=True)
    found = bipartite_merge(tokens, tokens, 3)
    assert found.tokens.requires_grad and not found.detach().tokens.requires_grad
    moved = found.to("meta")
    assert isinstance(moved, Merged) and moved.indices.dtype == torch.int64
    assert all(getattr(moved, name).is_meta for name in ("tokens", "sizes", "indices", "owner"))
    with pytest.raises(InputError, match="expected a torch device"):
        found.to(torch.float16)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda x: bipartite_merge(x[0], x[0], 2), r"batch of one: tokens\[None\]"),
        (lambda x: bipartite_merge(x, x, 10), "0 protected ones 9 can"),
        (lambda x: bipartite_merge(x, x, 7, 3), "3 protected ones 6 can"),
        (lambda x: bipartite_merge(x, x[:, 1:], 2), r"keys \(2, 9, 4\)"),
        (lambda x: bipartite_merge(x, x, -1), "remove"),
        (lambda x: bipartite_merge(x, x, 2, sizes=x[:, :3, 0]), r"sizes are \(2, 3\)"),
        (lambda x: bipartite_merge(x, x, 2, sizes=x[..., 0].fill_(0)), "above 0"),
        (lambda x: bipartite_merge(x, x, 2, sizes=x[..., 0].fill_(-1)), "above 0"),
        (lambda x: bipartite_merge(x, x, 2, sizes=x[..., 0].fill_(math.nan)), "above 0"),
        (lambda x: bipartite_merge(x, x, 2, sizes=x[..., 0].fill_(math.inf)), "above 0"),
        (lambda x: bipartite_merge(x, x, 2, sizes=x[..., 0].double().fill_(1e300)), "above 0"),
        (lambda x: bipartite_merge(x, x, 2, sizes=x[..., 0] > 0), "sizes is a strided bool tensor"),
        (lambda x: bipartite_merge(x, x, 2, sizes=[[1.0] * 10] * 2), "sizes is list"),
        (lambda x: bipartite_merge(x, x, 2).merge(x, sizes=x[..., 0].fill_(0)), "above 0"),
        (lambda x: bipartite_merge(x.to_sparse(), x, 2), "tokens is a sparse_coo"),
        (lambda x: bipartite_merge(x, x.to("meta"), 2), "keys is a strided"),
        (lambda x: bipartite_merge(x, x, 2).unmerge(x), r"expected \[2, 8, ...\]"),
        (lambda x: bipartite_merge(x, x, 2).merge(x[:, :8]), r"expected \[2, 10, ...\]"),
    ],
)
def test_bad_input(call: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        call(torch.randn(2, 10, 4))


def test_what_nothing_was_merged_into_stays_as_it_was() -> None:
    """To the bit, whatever it stands for already."""
    tokens, sizes = torch.randn(1, 300, 5), torch.arange(1.0, 301.0)[None]
    assert torch.equal(bipartite_merge(tokens, tokens, 0, sizes=sizes).tokens, tokens)
