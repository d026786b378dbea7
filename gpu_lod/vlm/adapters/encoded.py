"""Encoded: what an encoder made of a token set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree

from gpu_lod import checks
from gpu_lod.errors import InputError
from gpu_lod.shapes import summary
from gpu_lod.token_set import TokenSet, device_of, register_tree
from gpu_lod.vlm.merging import Merged

Size = tuple[int, int]
"""(H, W) in pixels."""


@dataclass(frozen=True, eq=False, repr=False)
class Encoded:
    """What an encoder made of tokens, in their order. It is a pytree.

    Shape: hidden [B, prefix + K, D], or [B, 4 K, D] where a token is 2 x 2 merged patches; pooled [B, D]; merged
        [B, K, E]; deepstack: [B, K, E] each. Without B for unbatched tokens.
    """

    hidden: torch.Tensor
    """The encoder's own last hidden state, or that of the layer asked for, its class and register tokens first."""
    tokens: TokenSet
    size: Size | tuple[Size, ...]
    """(H, W) of the pictures in pixels, or of each."""
    prefix: int = 0
    """Class and register tokens."""
    pooled: torch.Tensor | None = None
    """None where the model pools nothing."""
    merged: torch.Tensor | None = None
    """What a language model reads, of encoders that merge."""
    deepstack: tuple[torch.Tensor, ...] = ()
    """What the first layers of the language model add, of encoders that have such."""

    def __repr__(self) -> str:
        return summary(self)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """(H, W) of each picture."""
        if isinstance(self.size[0], tuple):
            return self.size
        return (self.size,) * (len(self.tokens.sites) if self.tokens.sites.ndim == 3 else 1)

    @property
    def features(self) -> torch.Tensor:
        """[B, K, D] of the tokens alone: merged, where there is such."""
        return self.hidden[..., self.prefix :, :] if self.merged is None else self.merged

    def detach(self) -> Encoded:
        """The same tensors without their gradients."""
        found: Encoded = _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self)
        return found

    def to(self, device: torch.device | str | int) -> Encoded:
        """The same on a device.

        Raises:
            InputError: no device, as a dtype, in which sites would be others.
        """
        where = device_of(device)
        found: Encoded = _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), self)
        return found

    def take(self, indices: torch.Tensor) -> Encoded:
        """Some of the tokens, in the order of their indices, with what was made of them. Class and register tokens, and
        what was pooled from all, stay. Differentiable.

            words = lod.vlm.generate(model, input_ids, encoded.take(encoded.tokens.reading_order()))

        Shape: indices [k], of the same tokens of every picture, or [B, k], of each picture's own.

        Raises:
            InputError: indices that `TokenSet.take` refuses.
        """
        tokens = self.tokens.take(indices)
        index = checks.dense(indices, "indices").to(self.hidden.device).long()
        index = index.expand(*self.tokens.scores.shape[:-1], index.shape[-1])

        def some(values: torch.Tensor) -> torch.Tensor:
            each = values.unflatten(-2, (self.tokens.budget, -1))
            at = index[..., None, None].expand(*index.shape, *each.shape[-2:])
            return each.gather(-3, at).flatten(-3, -2)

        first, own = self.hidden[..., : self.prefix, :], self.hidden[..., self.prefix :, :]
        return replace(
            self,
            hidden=torch.cat([first, some(own)], -2),
            tokens=tokens,
            merged=None if self.merged is None else some(self.merged),
            deepstack=tuple(map(some, self.deepstack)),
        )

    def reduced(self, by: Merged) -> Encoded:
        """Fewer tokens after the encoder: what `bipartite_merge`, `vision_zip` or `sparse_vlm` made of the features.

            by = lod.vlm.bipartite_merge(encoded.features, encoded.features, remove=400)
            words = lod.vlm.generate(model, input_ids, encoded.reduced(by))

        Convention: each token stands where the one does that others were merged into, `by.indices`, and has its score;
            what is merged is averaged. Class and register tokens, and what was pooled from all, stay.

        Raises:
            InputError: other tokens than these, or none in a batch.
        """
        if not isinstance(by, Merged):
            raise InputError(f"by is {type(by).__name__}; expected what bipartite_merge and its like return.")
        sites, scores = self.tokens.sites, self.tokens.scores
        if sites.ndim != 3 or by.owner.shape != scores.shape:
            raise InputError(
                f"{tuple(by.owner.shape)} tokens were merged, and encoded are {tuple(scores.shape)}; expected one "
                "[B, K] of both. Merge this picture's `features`, encoded from an image [1, C, H, W] if it is one."
            )
        indices = by.indices
        tokens = TokenSet(
            sites.gather(1, indices[..., None].expand(-1, -1, 3)), scores.gather(1, indices), None, self.tokens.patch
        )
        first, own = self.hidden[:, : self.prefix], self.hidden[:, self.prefix :]
        own = by.merge(own.unflatten(1, (scores.shape[1], -1))).flatten(1, 2)
        return replace(
            self,
            hidden=torch.cat([first, own], 1),
            tokens=tokens,
            merged=None if self.merged is None else by.merge(self.merged),
            deepstack=tuple(by.merge(features) for features in self.deepstack),
        )


register_tree(Encoded, ("hidden", "tokens", "pooled", "merged", "deepstack"), "size", "prefix")


def joined(found: list[Encoded], tokens: TokenSet) -> Encoded:
    """Pictures that were encoded one by one, in a batch."""

    def together(values: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
        there = [value for value in values if value is not None]
        return torch.cat(there) if there else None

    first = found[0]
    return replace(
        first,
        hidden=torch.cat([one.hidden for one in found]),
        tokens=tokens,
        size=tuple(size for one in found for size in one.sizes),
        pooled=together(one.pooled for one in found),
        merged=together(one.merged for one in found),
        deepstack=tuple(torch.cat(values) for values in zip(*(one.deepstack for one in found), strict=True)),
    )
