"""Fewer tokens by attention, without training: the ones attended to stay, the others merge or go."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_lod import checks, operators, precision
from gpu_lod.allocate.ordering import ordered, places
from gpu_lod.errors import InputError
from gpu_lod.vlm.merging import Merged, like, merged, one_picture, sizes_of

_NEIGHBOURS = 5
"""Nearest ones that the density of a token is taken from."""


def _zipped(tokens: torch.Tensor, keys: torch.Tensor, received: torch.Tensor, dominant: int, contextual: int) -> Merged:
    tokens, *_ = _three(tokens, keys, received)
    return like(tokens, sum(_counts(dominant, contextual, tokens.shape[1])))


@operators.function(_zipped)
@precision.in_full
def vision_zip(
    tokens: torch.Tensor, keys: torch.Tensor, received: torch.Tensor, dominant: int, contextual: int
) -> Merged:
    """The tokens that get most attention, and the rest merged into contextual ones: dominant + contextual in all.

    Shape: tokens [B, N, D], keys [B, N, E] and received [B, N] of the patches alone (no class token) give
        `Merged.tokens` [B, dominant + contextual, D].
    Convention: first the dominant ones, the most attended to first; then the contextual ones by their place. These
        start from tokens spaced evenly over the rest, each of the rest goes to the one whose key is most like its own
        by cosine, and each is the mean of all that came to it.

    Args:
        keys: of the layer that the attention is from.
        received: `attention_received`.
        dominant, contextual: exact counts, 0 too; without contextual ones the rest is dropped.

    Raises:
        InputError: shapes that do not fit, tensors on several devices, NaN in received, or more tokens than there are.

    Source: Yang et al., "VisionZip: Longer is Better but Not Necessary in Vision Language Models" (2025). There the
        dominant ones keep their order in the picture, which sorting `Merged.indices` restores; the spacing's step is
        rounded down; and its code adds the mean of what came to a contextual token to that token itself.
    """
    tokens, keys, received = _three(tokens, keys, received)
    checks.no_nan(received, "received")
    batch, there, _ = tokens.shape
    dominant, contextual = _counts(dominant, contextual, there)
    _, first = ordered(received, dominant)
    rest = places(torch.ones_like(received, dtype=torch.bool).scatter(1, first, False), there - dominant)
    start = torch.arange(contextual, device=tokens.device) * (there - dominant) // max(contextual, 1)
    owner = torch.full((batch, there), -1, device=tokens.device)
    owner = owner.scatter(1, first, torch.arange(dominant, device=tokens.device).expand(batch, -1))
    if contextual:
        unit = precision.factor(F.normalize(_taken(keys.detach().float(), rest), dim=-1))
        nearest = _nearest(unit @ unit[:, start].transpose(1, 2), start)
        owner = owner.scatter(1, rest, nearest + dominant)
    return merged(tokens, sizes_of(None, tokens), torch.cat([first, rest[:, start]], 1), owner)


def _recycled(
    tokens: torch.Tensor,
    text: torch.Tensor,
    attention: torch.Tensor,
    kept: int,
    recycled: int,
    mask: torch.Tensor | None,
    share: float,
) -> Merged:
    tokens, *_ = _asked(tokens, text, attention, mask)
    _part(share)
    return like(tokens, sum(_counts(kept, recycled, tokens.shape[1])))


@operators.function(_recycled)
@precision.in_full
def sparse_vlm(
    tokens: torch.Tensor,
    text: torch.Tensor,
    attention: torch.Tensor,
    kept: int,
    recycled: int,
    mask: torch.Tensor | None = None,
    share: float = 0.3,
) -> Merged:
    """The tokens that the question's visual words attend to, and the best of the rest in clusters: kept + recycled.

    Shape: tokens [B, N, D] and text [B, T, D], hidden states of one layer of the language model; attention
        [B, heads, T, N] or [B, T, N], text rows to visual columns. Gives `Merged.tokens` [B, kept + recycled, D].
    Convention: first those kept, the most relevant first; then the clusters by their centres' rank.

    Raters are the words of at least average visual relevance: softmax over the words of token . word, averaged over the
    tokens. A token's relevance is the attention it gets from the raters, averaged over them and over the heads. Of
    those not kept, the most relevant `share` (no fewer than `recycled`) are clustered about density peaks, each cluster
    becoming its mean; what is left is dropped.

    Args:
        mask: bool [B, T], False for padding.

    Raises:
        InputError: shapes that do not fit, tensors on several devices, NaN in attention, more tokens than there are, or
            no words.

    Source: Zhang et al., "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference" (2025),
        with density peaks after Rodriguez and Laio (2014) on the 5 nearest. There counts follow from the rank of the
        attention matrix, layer by layer, and clusters are summed; here the counts are given, for one layer, and
        clusters are averaged.
    """
    tokens, text, words, looks = _asked(tokens, text, attention, mask)
    if not words.any(1).all():
        raise InputError(f"mask {tuple(words.shape)} has rows that are all 0; expected a word in each row.")
    looks = looks.masked_fill(~words[..., None], 0.0)  # of padding a softmax may have made NaN
    checks.no_nan(looks, "attention")
    batch, there, _ = tokens.shape
    kept, recycled = _counts(kept, recycled, there)
    share = _part(share)
    by_token, by_word = (precision.factor(states.detach().float()) for states in (tokens, text))
    visual = (by_token @ by_word.transpose(1, 2)).masked_fill(~words[:, None], -torch.inf)
    relevant = visual.softmax(-1).mean(1)
    mean = relevant.sum(1, keepdim=True) / words.sum(1, keepdim=True)
    # Rounding may put the mean of equal ones above all of them.
    raters = (words & (relevant >= mean.minimum(relevant.amax(1, keepdim=True)))).float()
    scores = looks.where(raters[..., None] > 0, 0.0).sum(1) / raters.sum(1, keepdim=True)
    _, rank = ordered(scores, there)
    rest = there - kept
    pool = rank[:, kept : kept + max(recycled, round(share * rest))]
    owner = torch.full((batch, there), -1, device=tokens.device)
    owner = owner.scatter(1, rank[:, :kept], torch.arange(kept, device=tokens.device).expand(batch, -1))
    index = rank[:, :kept]
    if recycled:
        centres, cluster = density_peaks(_taken(tokens.detach().float(), pool), recycled)
        index = torch.cat([index, pool.gather(1, centres)], 1)
        owner = owner.scatter(1, pool, cluster + kept)
    return merged(tokens, sizes_of(None, tokens), index, owner)


@precision.in_full
def density_peaks(points: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters about the points that are dense and far from denser ones: no iteration, the same each time.

    Shape: [B, M, D] gives the centres, int64 [B, count], by their place, and each point's cluster, int64 [B, M].

    Source: Rodriguez and Laio, "Clustering by Fast Search and Find of Density Peaks" (2014); Du et al. (2016) for the
        density from nearest neighbours.
    """
    there = points.shape[1]
    points = precision.factor(points)
    # Without products of matrices, in which what all points have in common drowns their distances.
    away = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") / points.shape[2] ** 0.5
    near = away.topk(min(_NEIGHBOURS + 1, there), dim=-1, largest=False).values  # itself among them
    density = torch.exp(-near.square().mean(-1))
    place = torch.arange(there, device=points.device)
    first = (density[:, None] == density[:, :, None]) & (place < place[:, None])
    denser = (density[:, None] > density[:, :, None]) | first
    apart = away.masked_fill(~denser, torch.inf).amin(-1).minimum(away.amax((1, 2))[:, None])
    _, best = ordered(density * apart, count)
    centres = best.sort(dim=1).values
    to = away.gather(2, centres[:, None].expand(-1, there, -1))
    own = centres[:, None] == place[:, None]
    return centres, to.masked_fill(own, -1.0).argmin(-1)


def _nearest(likeness: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[B, M, S] to which of S each of M is most like; the S themselves, at `start`, to themselves."""
    found = likeness.argmax(-1)
    found[:, start] = torch.arange(len(start), device=start.device)
    return found


def _taken(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))


def _part(share: float) -> float:
    share = checks.number(share, "share")
    if not 0 <= share <= 1:
        raise InputError(f"share is {share}; expected a part from 0 to 1.")
    return share


def _counts(first: int, second: int, there: int) -> tuple[int, int]:
    first = checks.integer(first, "the count of tokens that stay", at_least=0)
    second = checks.integer(second, "the count of tokens that others merge into", at_least=0)
    if not 0 < first + second <= there:
        raise InputError(f"{first} + {second} tokens are asked for, of {there}; expected 1 to {there} in all.")
    return first, second


def _three(
    tokens: torch.Tensor, keys: torch.Tensor, received: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, keys = checks.dense(tokens, "tokens"), checks.dense(keys, "keys")
    received = checks.dense(received, "received").detach().float()
    if tokens.ndim != 3 or keys.ndim != 3 or keys.shape[:2] != tokens.shape[:2] or received.shape != tokens.shape[:2]:
        raise InputError(
            f"tokens are {tuple(tokens.shape)}, keys {tuple(keys.shape)} and received {tuple(received.shape)}; "
            f"expected [B, N, D], [B, N, E] and [B, N], without the class token.{one_picture(tokens)}"
        )
    checks.same_device(tokens, keys, "keys", "the tokens")
    checks.same_device(tokens, received, "received", "the tokens")
    return tokens, keys, received


def _asked(
    tokens: torch.Tensor, text: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and text, which words there are, bool [B, T], and how they look at tokens, [B, T, N]: checked but for
    values."""
    tokens, text = checks.dense(tokens, "tokens"), checks.dense(text, "text")
    looks = checks.dense(attention, "attention").detach().float()
    looks = looks.mean(1) if looks.ndim == 4 else looks
    if (
        tokens.ndim != 3
        or text.ndim != 3
        or text.shape[::2] != tokens.shape[::2]
        or looks.shape != (len(tokens), text.shape[1], tokens.shape[1])
    ):
        raise InputError(
            f"tokens are {tuple(tokens.shape)}, text {tuple(text.shape)} and attention {tuple(attention.shape)}; "
            f"expected [B, N, D], [B, T, D] and [B, heads, T, N].{one_picture(tokens)}"
        )
    words = (
        torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        if mask is None
        else checks.dense(mask, "mask").bool()
    )
    for name, value in (("text", text), ("attention", looks), ("mask", words)):
        checks.same_device(tokens, value, name, "the tokens")
    if words.shape != text.shape[:2]:
        raise InputError(f"mask is {tuple(words.shape)}; expected {tuple(text.shape[:2])}, one of each word.")
    return tokens, text, words, looks
