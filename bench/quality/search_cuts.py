"""Training-free cuts of the field, inside the reader: from the whole grid of tokens to K, after its first look at them.

The reader's first look (step 1) is the attention of queries by colour over the samples of all tokens; it is the only
layer that sees all of them, so each cut is made at once, right after it, on what it has:

- tokens are patches; a merged one is the mean of patches, and stands at the site of the one they were merged into;
- the key of a sample is (k, |k|^2), k its colour by the reader's metric: an inner product of keys with (2 q, -1) is the
  reader's distance but for what is the same for all, as softmax has it. The key of a token is those of its samples;
- attention of a query by place, which has none in step 1, falls with the remoteness by which the reader takes tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_lod.vlm import bipartite_merge, sparse_vlm, vision_zip
from quality.search_reader import Held, Pixels, Reader, remoteness
from quality.search_scenes import COLOURS

Cut = Callable[[Reader, torch.Tensor, torch.Tensor, torch.Tensor, Pixels], Held]
_SECOND = 10 / 64
"""Of K, those that others merge into: VisionZip's share, and taken for SparseVLM too."""
_LAYERS = 12


def keys(reader: Reader, patches: torch.Tensor) -> torch.Tensor:
    """[B, N, 4 P P], of patches [B, N, 3, P, P]."""
    own = patches.movedim(2, -1).flatten(2, 3) @ reader.metric
    return torch.cat([own, own.square().sum(-1, keepdim=True)], -1).flatten(2)


def tome(budget: int) -> Cut:
    """ToMe: by likeness of keys, whatever is asked. The paper merges r a layer, so that only what is most alike merges;
    one layer sees all tokens here, so the N - K that go do so after it, in as many equal parts as a small ViT has
    layers. Attention is proportional to sizes from then on."""

    def cut(reader: Reader, patches: torch.Tensor, sites: torch.Tensor, asked: torch.Tensor, pixels: Pixels) -> Held:
        tokens, own = patches.flatten(2), keys(reader, patches)
        index, sizes = torch.arange(tokens.shape[1]).expand(len(tokens), -1), torch.ones(tokens.shape[:2])
        for left in range(_LAYERS, 0, -1):
            found = bipartite_merge(tokens, own, (tokens.shape[1] - budget) // left, sizes=sizes)
            own, index = found.merge(own, sizes), index.gather(1, found.indices)
            tokens, sizes = found.tokens, found.sizes
        return _held(tokens, index, patches, sites, sizes)

    return cut


def visionzip(budget: int) -> Cut:
    """VisionZip: 54 of 64 by attention received, whatever is asked, and contextual ones. There is no class token: the
    attention is that of all colours that can be asked for, on average. Not proportional, as in the paper."""
    second = round(_SECOND * budget)

    def cut(reader: Reader, patches: torch.Tensor, sites: torch.Tensor, asked: torch.Tensor, pixels: Pixels) -> Held:
        palette = torch.tensor(list(COLOURS.values())).expand(len(patches), -1, -1)
        received = _by_token(reader.pixels(patches, sites, palette), patches.shape[1]).mean(1)
        found = vision_zip(patches.flatten(2), keys(reader, patches), received, budget - second, second)
        return _held(found.tokens, found.indices, patches, sites)

    return cut


def sparsevlm(budget: int) -> Cut:
    """SparseVLM: 54 of 64 by the attention that the query pays, and clusters of the best of the rest. A query is one
    word, so it is its own rater; and one query a batch row is asked, for the cut is its own."""
    second = round(_SECOND * budget)

    def cut(reader: Reader, patches: torch.Tensor, sites: torch.Tensor, asked: torch.Tensor, pixels: Pixels) -> Held:
        assert asked.shape[1] == 1
        tokens = patches.flatten(2)
        if asked[0, 0, 2:].any():
            looks = _by_token(pixels, patches.shape[1])
        else:
            looks = (-remoteness(sites, asked[..., :2], patches.shape[-1]) / patches.shape[-1]).softmax(-1)
        # What the only word says decides nothing.
        found = sparse_vlm(tokens, torch.zeros_like(tokens[:, :1]), looks, budget - second, second)
        return _held(found.tokens, found.indices, patches, sites)

    return cut


CUTS: dict[str, Callable[[int], Cut]] = {"ToMe": tome, "VisionZip": visionzip, "SparseVLM": sparsevlm}
BY_QUERY = ("SparseVLM",)
"""Those whose tokens depend on what is asked."""


def _by_token(pixels: Pixels, count: int) -> torch.Tensor:
    """[B, Qc, N]: how much attention all samples of a token get."""
    return pixels.scores.softmax(-1).unflatten(-1, (count, -1)).sum(-1)


def _held(
    tokens: torch.Tensor,
    index: torch.Tensor,
    patches: torch.Tensor,
    sites: torch.Tensor,
    sizes: torch.Tensor | None = None,
) -> Held:
    """Of tokens [B, K, 3 P P] that stand where those at index [B, K] of the patches do."""
    rows = torch.arange(len(patches))[:, None]
    sizes = tokens.new_ones(tokens.shape[:2]) if sizes is None else sizes
    return Held(tokens.unflatten(-1, patches.shape[2:]), sites[rows, index], sizes)
