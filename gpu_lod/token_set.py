"""TokenSet: what a vision encoder reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils import _pytree

from gpu_lod.errors import InputError


@dataclass(frozen=True, eq=False, repr=False)
class TokenSet:
    """Exactly K tokens for every image of a batch, by relevance, high first. It is a pytree.

    Shape: sites [B, K, 3], scores [B, K], patches [B, K, C, P, P] or None where no image was given; without B for an
        unbatched one.
    Convention: a site is (x, y, level), x and y in [0, 1] of width and height, y down: P x P samples 2^level pixels
        apart.
    """

    sites: torch.Tensor
    scores: torch.Tensor
    patches: torch.Tensor | None
    patch: int
    """P."""

    def __post_init__(self) -> None:
        if self.sites.ndim not in (2, 3) or self.sites.shape[-1] != 3 or self.scores.shape != self.sites.shape[:-1]:
            raise InputError(
                f"sites are {tuple(self.sites.shape)} and scores {tuple(self.scores.shape)}; expected [B, K, 3] and "
                "[B, K]."
            )

    @property
    def budget(self) -> int:
        """K."""
        return self.sites.shape[-2]

    def __repr__(self) -> str:
        what = "no patches" if self.patches is None else f"patches {tuple(self.patches.shape)}"
        return f"<TokenSet of {self.budget} sites {tuple(self.sites.shape)}, {what}>"


def _flatten(tokens: TokenSet) -> tuple[list[object], int]:
    return [tokens.sites, tokens.scores, tokens.patches], tokens.patch


def _unflatten(values: object, patch: int) -> TokenSet:
    tokens = object.__new__(TokenSet)  # tree_map may put anything here
    for name, value in zip(("sites", "scores", "patches", "patch"), (*values, patch), strict=True):  # type: ignore[misc]
        object.__setattr__(tokens, name, value)
    return tokens


_pytree.register_pytree_node(TokenSet, _flatten, _unflatten, serialized_type_name="gpu_lod.TokenSet")
