"""Results print as their shapes."""

from __future__ import annotations

import pytest
import torch

import gpu_lod as lod
from gpu_lod.shapes import summary

pytestmark = pytest.mark.usefixtures("one_thread")


def test_tensors_are_shapes_and_what_is_none_is_left_out() -> None:
    tokens = lod.allocate.GridTopK(3, 4)(torch.rand(2, 3, 8, 12))
    hidden, layers = torch.zeros(2, 3, 5), (torch.zeros(2, 3, 7), torch.zeros(2, 3, 7))
    encoded = lod.vlm.Encoded(hidden, tokens, (8, 12), prefix=1, deepstack=layers)
    assert repr(encoded) == (
        "<Encoded: hidden float32 (2, 3, 5), tokens <TokenSet of 3 sites (2, 3, 3), patches (2, 3, 3, 4, 4)>, "
        "size (8, 12), prefix 1, deepstack (float32 (2, 3, 7), float32 (2, 3, 7))>"
    )
    assert "deepstack" not in repr(lod.vlm.Encoded(hidden, tokens, (8, 12)))
    rebuilt = lod.rebuild(tokens, (8, 12))
    assert repr(rebuilt) == "<Rebuilt: image float32 (2, 3, 8, 12), covered bool (2, 8, 12)>" == summary(rebuilt)


def test_no_result_prints_its_numbers() -> None:
    image, relevance = torch.rand(1, 3, 32, 48), torch.rand(1, 8, 12)
    states, keys = torch.rand(1, 9, 4), torch.rand(1, 9, 4)
    glances = lod.vlm.Glances(4, 2, threshold=0.5, patch=4)
    attention = lod.vlm.attention_received(torch.full((1, 2, 4, 4), 0.25))
    results = [
        lod.cull(lod.hiz(image[:, :1]), 0.5),
        lod.rebuild(lod.allocate.GridTopK(4, 4)(image), (32, 48)),
        lod.allocate.tree_cut([torch.rand(1, 4, 6), torch.rand(1, 2, 3), torch.rand(1, 1, 2)], relevance, 9, 3),
        lod.allocate.TokenBank(lod.allocate.GridTopK(4, 4), 6)(image),
        lod.vlm.bipartite_merge(states, keys, remove=3),
        glances(image, relevance, attention),
        lod.vlm.TokenMemory(4, patch=4).update(image[0]),
        lod.vlm.gumbel_top_k(relevance, 3),
        lod.vlm.ContextualizedRelevance(4, patch=4).score(image, torch.rand(1, 4)),
        lod.vlm.VisionAttention(torch.rand(1, 2, 3, 3), keys, states),
    ]
    for result in results:
        said = repr(result)
        assert "\n" not in said and "tensor(" not in said and type(result).__name__ in said, said
