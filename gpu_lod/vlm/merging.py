"""Fewer tokens by merging those that are alike: ToMe's bipartite soft matching."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils import _pytree

from gpu_lod import checks, operators, precision
from gpu_lod.allocate.ordering import ordered, places
from gpu_lod.errors import InputError
from gpu_lod.shapes import summary
from gpu_lod.token_set import device_of, register_tree


@dataclass(frozen=True, eq=False, repr=False)
class Merged:
    """K tokens made of N, and which went into which. It is a pytree."""

    tokens: torch.Tensor
    """[B, K, D]"""
    sizes: torch.Tensor
    """fp32 [B, K]: how many tokens each stands for. Attention over merged tokens is proportional if log(sizes) is added
    to its logits, one for each key."""
    indices: torch.Tensor
    """int64 [B, K]: where, of the N, each token stands: the one that the others were merged into."""
    owner: torch.Tensor
    """int64 [B, N]: which of the K each of the N went into; -1 for none."""

    def __repr__(self) -> str:
        return summary(self)

    def merge(self, values: torch.Tensor, sizes: torch.Tensor | None = None) -> torch.Tensor:
        """Other things of the N, [B, N, ...], averaged as the tokens were, [B, K, ...]: positions, say.

        Args:
            sizes: [B, N], if the N stood for several tokens each already.

        Raises:
            InputError: another number of values, values on another device, or sizes as `bipartite_merge` refuses them.
        """
        _check(values, self.owner)
        weights = sizes_of(sizes, self.owner)
        found = averaged(values.flatten(2) if values.ndim > 2 else values[..., None], weights, self.owner, self.budget)
        return found.reshape(*self.sizes.shape, *values.shape[2:])

    def unmerge(self, values: torch.Tensor) -> torch.Tensor:
        """Back to N places: of [B, K, ...] each of the N gets its owner's, and 0 if it has none.

        Raises:
            InputError: another number of values, or values on another device.
        """
        _check(values, self.sizes)
        rows = torch.arange(len(self.owner), device=self.owner.device)[:, None]
        lost = (self.owner < 0).view(*self.owner.shape, *(1,) * (values.ndim - 2))
        return values[rows, self.owner.clamp(min=0)].masked_fill(lost, 0)

    def detach(self) -> Merged:
        """The same tensors without their gradients."""
        found: Merged = _pytree.tree_map(torch.Tensor.detach, self)
        return found

    def to(self, device: torch.device | str | int) -> Merged:
        """The same on a device.

        Raises:
            InputError: no device, as a dtype, in which indices would be others.
        """
        where = device_of(device)
        found: Merged = _pytree.tree_map(lambda value: value.to(where), self)
        return found

    @property
    def budget(self) -> int:
        """K."""
        return self.sizes.shape[1]


register_tree(Merged, ("tokens", "sizes", "indices", "owner"))


def _given(
    tokens: torch.Tensor, keys: torch.Tensor, remove: int, protected: int, sizes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Checked but for values."""
    tokens, keys = checks.dense(tokens, "tokens"), checks.dense(keys, "keys")
    if tokens.ndim != 3 or keys.ndim != 3 or keys.shape[:2] != tokens.shape[:2]:
        raise InputError(
            f"tokens are {tuple(tokens.shape)} and keys {tuple(keys.shape)}; expected [B, N, D] and [B, N, E]."
            f"{one_picture(tokens)}"
        )
    checks.same_device(tokens, keys, "keys", "the tokens")
    there = tokens.shape[1]
    remove = checks.integer(remove, "remove", at_least=0)
    protected = checks.integer(protected, "protected", at_least=0)
    if protected > there:
        raise InputError(f"{protected} tokens are protected, and there are {there}. Protect fewer.")
    most = max(there - protected - 1, 0)
    if remove > most:
        raise InputError(
            f"{remove} of {there} tokens are to go, and with {protected} protected ones {most} can. Remove fewer."
        )
    if sizes is not None:
        _as_many(sizes, tokens)
    return tokens, keys, remove, protected


def _left(tokens: torch.Tensor, keys: torch.Tensor, remove: int, protected: int, sizes: torch.Tensor | None) -> Merged:
    tokens, _, remove, _ = _given(tokens, keys, remove, protected, sizes)
    return like(tokens, tokens.shape[1] - remove)


@operators.function(_left)
@precision.in_full
def bipartite_merge(
    tokens: torch.Tensor,
    keys: torch.Tensor,
    remove: int,
    protected: int = 0,
    sizes: torch.Tensor | None = None,
) -> Merged:
    """Remove exactly `remove` tokens by merging each into one that is like it, without training.

    Shape: tokens [B, N, D] and keys [B, N, E] give `Merged.tokens` [B, N - remove, D].
    Convention: tokens at even places (after the protected ones) look for the most alike of those at odd places, by the
        cosine of their keys; the `remove` most alike pairs merge, as the mean weighted by sizes, at the odd one's
        place. What is left keeps its order, so that positions and priorities stay sorted. One round removes at most
        half; beyond that there are as many rounds as it takes, the keys merged as the tokens are. Equal ones by their
        place.

    Args:
        keys: what likeness is judged by: in the paper the keys of the attention, averaged over its heads.
        remove: r; N - K for a budget of K.
        protected: the first so many are left alone: class tokens, registers.
        sizes: [B, N], how many tokens each stands for already, from `Merged.sizes` of an earlier layer.

    Raises:
        InputError: shapes that do not fit, tensors on several devices, more to remove than all unprotected tokens but
            one, or sizes that are not positive and finite.

    Source: Bolya et al., "Token Merging: Your ViT But Faster" (2023), which merges r a layer, and leaves order alone.
    """
    tokens, keys, remove, protected = _given(tokens, keys, remove, protected, sizes)
    whole = sizes_of(sizes, tokens)
    batch, there, _ = tokens.shape
    free = there - protected
    weights, likeness = whole[:, protected:], keys[:, protected:].detach().float()
    index = torch.arange(free, device=tokens.device).expand(batch, free)
    owner = index
    left = remove
    while left:
        now = min(left, likeness.shape[1] // 2)
        kept, went = _matched(likeness, now)
        count = kept.shape[1]
        likeness = averaged(likeness, weights, went, count)
        weights = weights.new_zeros(batch, count).scatter_add(1, went, weights)
        index, owner, left = index.gather(1, kept), went.gather(1, owner), left - now
    first = torch.arange(protected, device=tokens.device).expand(batch, protected)
    index, owner = torch.cat([first, index + protected], 1), torch.cat([first, owner + protected], 1)
    return merged(tokens, whole, index, owner)


def _matched(keys: torch.Tensor, remove: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One round: which of [B, N, E] stay, [B, N - remove], and which of those each of the N goes into, [B, N]."""
    unit = precision.factor(F.normalize(keys, dim=-1))
    likeness, partner = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).max(-1)
    _, even = ordered(likeness, remove)
    gone, into = 2 * even, 2 * partner.gather(1, even) + 1
    stays = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device).scatter(1, gone, False)
    slot = stays.cumsum(1) - 1
    return places(stays, keys.shape[1] - remove), slot.scatter(1, gone, slot.gather(1, into))


def like(tokens: torch.Tensor, count: int) -> Merged:
    """What `merged` makes of [B, N, D], without values."""
    batch, there, width = tokens.shape
    sizes = tokens.new_empty(batch, count, dtype=torch.float32)
    index, owner = (tokens.new_empty(batch, n, dtype=torch.int64) for n in (count, there))
    kind = tokens.dtype if tokens.is_floating_point() else torch.float32
    return Merged(tokens.new_empty(batch, count, width, dtype=kind), sizes, index, owner)


def merged(tokens: torch.Tensor, sizes: torch.Tensor, index: torch.Tensor, owner: torch.Tensor) -> Merged:
    """Tokens [B, N, D] by their owners."""
    count = index.shape[1]
    counts = sizes.new_zeros(len(sizes), count + 1).scatter_add(1, _slots(owner, count), sizes)[:, :count]
    return Merged(averaged(tokens, sizes, owner, count), counts, index, owner)


def averaged(values: torch.Tensor, weights: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    """The weighted mean of [B, N, D] over those with the same owner, [B, count, D], summed in fp32 or better."""
    work = values.dtype if values.dtype == torch.float64 else torch.float32
    slots = _slots(owner, count)
    weights = weights.to(work)
    total = weights.new_zeros(len(owner), count + 1).scatter_add(1, slots, weights)
    # Shares before sums: what nothing was merged into stays as it was, to the bit.
    shares = weights / total.gather(1, slots)
    sums = torch.zeros(len(owner), count + 1, values.shape[2], dtype=work, device=values.device)
    sums = sums.scatter_add(1, slots[..., None].expand_as(values), values.to(work) * shares[..., None])
    return sums[:, :count].to(values.dtype if values.is_floating_point() else work)


def one_picture(tokens: torch.Tensor) -> str:
    """The way out for features of one picture that have no B."""
    return " Give those of one picture a batch of one: tokens[None]." if tokens.ndim == 2 else ""


def sizes_of(sizes: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 [B, N]; one each if none are given. They are read on the host: on a GPU that waits for them."""
    if sizes is None:
        return torch.ones(tokens.shape[:2], dtype=torch.float32, device=tokens.device)
    found = _as_many(sizes, tokens)
    held = checks.values(found)
    if not ((held > 0) & (held < torch.inf)).all():
        raise InputError(
            "sizes hold 0 or less, infinities or NaN; expected in fp32 how many tokens each stands for, above 0. "
            "Leave them out for one each."
        )
    return found


def _as_many(sizes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    found = checks.real(sizes, "sizes").float()
    if found.shape != tokens.shape[:2]:
        raise InputError(f"sizes are {tuple(found.shape)}; expected {tuple(tokens.shape[:2])}, one of each token.")
    checks.same_device(tokens, found, "sizes", "the tokens")
    return found


def _slots(owner: torch.Tensor, count: int) -> torch.Tensor:
    """Owners, with one slot more for what has none."""
    return torch.where(owner < 0, count, owner)


def _check(values: torch.Tensor, like: torch.Tensor) -> None:
    checks.dense(values, "values")
    if values.shape[:2] != like.shape:
        raise InputError(f"values are {tuple(values.shape)}; expected [{like.shape[0]}, {like.shape[1]}, ...].")
    checks.same_device(like, values, "values", "the tokens")
