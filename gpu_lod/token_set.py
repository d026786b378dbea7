"""TokenSet: what a vision encoder reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch.utils import _pytree

from gpu_lod import checks, dispatch, operators
from gpu_lod.errors import InputError
from gpu_lod.uncompiled import in_one_piece

_TENSORS = ("sites", "scores", "patches", "weights", "features")


@dataclass(frozen=True, eq=False, repr=False)
class TokenSet:
    """Exactly K tokens for every image of a batch, by relevance, high first. It is a pytree.

    Allocators read patches and leave features None: those are what an encoder makes of the patches, or pools at the
    sites. What `gpu_lod.vlm.encode` gives has them beside its tokens, and

        tokens = dataclasses.replace(encoded.tokens, features=encoded.features)

    puts them in.

    Shape: sites [B, K, 3], scores [B, K], patches [B, K, C, P, P] or None where no image was given, weights
        [B, K, Hg Wg] or None, features [B, K, D], floating point, or None; without B for an unbatched one.
    Convention: a site is (x, y, level), x and y in [0, 1] of width and height, y down: P x P samples 2^level pixels
        apart.
    """

    sites: torch.Tensor
    scores: torch.Tensor
    patches: torch.Tensor | None
    patch: int
    """P."""
    weights: torch.Tensor | None = None
    """How much of each level-0 patch, row by row, goes into each token, where an allocator blends: they sum to 1."""
    features: torch.Tensor | None = None

    def __post_init__(self) -> None:
        checks.integer(self.patch, "patch", at_least=1)
        for name in _TENSORS:
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor) and (value is not None or name in ("sites", "scores")):
                raise InputError(
                    f"{name} is a {type(value).__name__}; expected a torch tensor. Make it one with torch.as_tensor."
                )
        if self.sites.ndim not in (2, 3) or self.sites.shape[-1] != 3 or self.scores.shape != self.sites.shape[:-1]:
            raise InputError(
                f"sites are {tuple(self.sites.shape)} and scores {tuple(self.scores.shape)}; expected [B, K, 3] and "
                "[B, K]."
            )
        lead = tuple(self.sites.shape[:-1])
        if self.patches is not None and (
            tuple(self.patches.shape[:-3]) != lead or tuple(self.patches.shape[-2:]) != (self.patch, self.patch)
        ):
            raise InputError(
                f"patches are {tuple(self.patches.shape)}; expected {(*lead, 'C', self.patch, self.patch)}, a patch of "
                "each site. Read them with gather_patches, or leave them None."
            )
        if self.weights is not None and tuple(self.weights.shape[:-1]) != lead:
            expected = ", ".join(map(str, (*lead, "Hg Wg")))
            raise InputError(f"weights are {tuple(self.weights.shape)}; expected [{expected}], those of each site.")
        if self.features is not None:
            shape, kind = tuple(self.features.shape), self.features.dtype
            if shape[:-1] != lead or not shape[-1] or not kind.is_floating_point:
                expected = ", ".join(map(str, (*lead, "D")))
                raise InputError(
                    f"features are {kind} {shape}; expected floating-point ones [{expected}], those of each site. "
                    "Reorder them with the tokens, or leave them None."
                )
            checks.same_device(self.sites, self.features, "features", "the sites")

    @property
    def budget(self) -> int:
        """K."""
        return self.sites.shape[-2]

    def clone(self) -> TokenSet:
        """The same in memory of its own: what a plan returned lasts beyond its next call so."""
        return self._each(torch.Tensor.clone)

    def detach(self) -> TokenSet:
        """The same tensors without their gradients."""
        return self._each(torch.Tensor.detach)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> TokenSet:
        """The same on a device; `non_blocking` as torch's: without waiting, from pinned memory.

        Raises:
            InputError: no device, as a dtype, in which sites would be others.
        """
        where = device_of(device)
        return self._each(lambda value: value.to(where, non_blocking=non_blocking))

    def pin_memory(self) -> TokenSet:
        """The same in page-locked memory, as a DataLoader's `pin_memory=True` asks for; torch raises where it has no
        such."""
        return self._each(torch.Tensor.pin_memory)

    @staticmethod
    def stack(sets: Iterable[TokenSet]) -> TokenSet:
        """Unbatched sets to a batch, in copies: what a DataLoader takes as `collate_fn`. `unstack` gives them back.

        Shape: sites [K, 3] of B sets to [B, K, 3], and so each field that is there.

        Raises:
            InputError: no sets, batched ones, or sets of another K, patch, dtype, device or size of a field, or of
                which some have one and others do not; in a worker of a DataLoader also those that have gradients.
        """
        members = list(sets) if isinstance(sets, Iterable) else [sets]
        if not members or not all(isinstance(one, TokenSet) and one.sites.ndim == 2 for one in members):
            what = ", ".join(repr(one) if isinstance(one, TokenSet) else type(one).__name__ for one in members[:4])
            raise InputError(
                f"sets are [{what}]; expected unbatched token sets, one a picture. Part batches with unstack(), and "
                "join them with [*first.unstack(), *second.unstack()]."
            )
        first = members[0]
        for index, one in enumerate(members):
            if one.patch != first.patch:
                raise InputError(
                    f"set {index} has patches of side {one.patch} and set 0 of {first.patch}; expected one for all. "
                    "Give their allocators the same patch=."
                )
            if one.budget != first.budget:
                raise InputError(
                    f"set {index} has {one.budget} tokens and set 0 {first.budget}; expected one K for all. Give their "
                    "allocators the same budget, keep the best few of each with tokens.take(torch.arange(few)), or "
                    "share a budget with TokenBank, which packs sets of several lengths."
                )
            for name in _TENSORS:
                kinds = [_kind(getattr(each, name)) for each in (one, first)]
                if kinds[0] != kinds[1]:
                    raise InputError(
                        f"{name} of set {index} are {kinds[0]} and of set 0 {kinds[1]}; expected the same for all. "
                        "Make all sets alike, in one size of picture if they blend, move them with .to(device), or "
                        f"leave out what some lack with dataclasses.replace(tokens, {name}=None)."
                    )
        there = [name for name in _TENSORS if getattr(first, name) is not None]
        data: Any = sys.modules.get("torch.utils.data")
        if data is not None and data.get_worker_info() is not None:
            learned = [name for name in there if any(getattr(one, name).requires_grad for one in members)]
            if learned:  # torch says so in the worker alone, and its loader waits for ever
                raise InputError(
                    f"{', '.join(learned)} have gradients, which do not pass from a DataLoader's worker. Allocate "
                    "under torch.no_grad() there, or where the gradients are wanted."
                )
        joined: dict[str, Any] = {name: torch.stack([getattr(one, name) for one in members]) for name in there}
        return replace(first, **joined)

    def unstack(self) -> list[TokenSet]:
        """The tokens of each picture of a batch, unbatched: views of these.

        Raises:
            InputError: tokens of one picture, without a batch.
        """
        if self.sites.ndim == 2:
            raise InputError(
                f"sites are {tuple(self.sites.shape)}, of one picture; expected a batch, [B, K, 3]. Some of its tokens "
                "are tokens.take(indices)."
            )
        return [self._each(itemgetter(b)) for b in range(len(self.sites))]

    @in_one_piece
    def take(self, indices: torch.Tensor) -> TokenSet:
        """Some of the tokens, in the order of their indices, with all that belongs to them. Differentiable.

        Shape: indices [k], of the same tokens of every picture, or [B, k], of each picture's own; sites become
            [B, k, 3], and so each field; without B for an unbatched set.
        Convention: integers from 0 to K - 1; one may be taken several times. Take in ascending order to keep the best
            first.

        Raises:
            InputError: indices that are no such integers, or of another shape.
        """
        index = checks.dense(indices, "indices")
        lead, kind = tuple(self.sites.shape[:-2]), index.dtype
        fits = index.ndim == 1 or (index.ndim > 1 and index.shape[:-1] == lead)  # `in` knows no sizes to be
        if kind == torch.bool or kind.is_floating_point or not fits:
            expected = " or ".join(f"[{', '.join(map(str, (*first, 'k')))}]" for first in dict.fromkeys([(), lead]))
            raise InputError(
                f"indices are {kind} {tuple(index.shape)}; expected integers {expected}. Those of a mask [K] are "
                "mask.nonzero()[:, 0]."
            )
        index = places_among(index, self.budget).to(self.sites.device)
        if not lead:
            return self._each(lambda value: value[index])
        rows = torch.arange(lead[0], device=index.device)[:, None]
        return self._each(lambda value: value[rows, index])

    def reading_order(self) -> torch.Tensor:
        """Indices that put the tokens as one reads, from the top down, and from left to right at the same height; equal
        sites in their order. `tokens.take(tokens.reading_order())` is the set so.

        Shape: int64 [B, K], or [K].
        """
        sites = self.sites.detach()
        along = sites[..., 0].argsort(dim=-1, stable=True)
        return along.gather(-1, sites[..., 1].gather(-1, along).argsort(dim=-1, stable=True))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenSet:
        there = {name: getattr(self, name) for name in _TENSORS}
        changed: dict[str, Any] = {name: change(value) for name, value in there.items() if value is not None}
        return replace(self, **changed)

    def blend(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the level-0 patches, [B, Hg Wg, D], to those of the tokens, [B, K, D], by the weights.

        Shape: without B for unbatched tokens.
        Convention: floating point, and so is the result, of the features' dtype, under autocast too.

        Raises:
            InputError: tokens that have no weights, features that are not floating point, or another number of them.
        """
        if self.weights is None:
            raise InputError("these tokens are no blends: they have no weights. Read their patches instead.")
        features = checks.dense(features, "features")
        checks.same_device(self.weights, features, "features", "the tokens")
        *batch, _, cells = self.weights.shape
        if tuple(features.shape[:-1]) != (*batch, cells):
            expected = ", ".join(map(str, (*batch, cells, "D")))
            raise InputError(f"features are {tuple(features.shape)}; expected [{expected}], one of each level-0 patch.")
        if not features.is_floating_point():  # shares of one are no whole numbers
            raise InputError(f"features are {features.dtype}; expected floating point. Convert them with .float().")
        return blended(self.weights, features)

    def __repr__(self) -> str:
        what = "no patches" if self.patches is None else f"patches {tuple(self.patches.shape)}"
        if self.features is not None:
            what += f", features {tuple(self.features.shape)}"
        return f"<TokenSet of {self.budget} sites {tuple(self.sites.shape)}, {what}>"


def _kind(value: torch.Tensor | None) -> str:
    """What of a field has to be the same for all that are stacked."""
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)} on {value.device}"


def device_of(device: torch.device | str | int) -> torch.device:
    """For tokens: what is none would be a dtype."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(
            f"device is {device!r}; expected a torch device. Sites keep their dtype: convert patches or features "
            "alone, by dataclasses.replace(tokens, patches=tokens.patches.half())."
        ) from None


def blended(weights: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """`TokenSet.blend`, unchecked."""
    if dispatch.needs_grad(weights, features):
        weights, features = dispatch.keepable(weights, features)
    with torch.autocast(features.device.type, enabled=False):
        return weights.to(features.dtype) @ features


def register_tree(kind: type[Any], tensors: tuple[str, ...], *constants: str) -> None:
    """Make a frozen dataclass a pytree of the tensors that are there, and known to torch.load's weights_only."""

    def flatten(value: Any) -> tuple[list[object], tuple[object, ...]]:
        # Functions of tensors are mapped over what is there, and None is none.
        there = [name for name in tensors if getattr(value, name) is not None]
        return [getattr(value, name) for name in there], (*(getattr(value, name) for name in constants), *there)

    def unflatten(values: Iterable[object], context: tuple[Any, ...]) -> Any:
        kept, there = context[: len(constants)], context[len(constants) :]
        fields = dict.fromkeys(tensors) | dict(zip(there, values, strict=True))
        made = object.__new__(kind)  # unchecked: tree_map may put anything here
        for name, value in (fields | dict(zip(constants, kept, strict=True))).items():
            object.__setattr__(made, name, value)
        return made

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, object]], tuple[object, ...]]:
        values, context = flatten(value)
        return [
            (_pytree.GetAttrKey(str(name)), one) for name, one in zip(context[len(constants) :], values, strict=True)
        ], context

    _pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"gpu_lod.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=list,
        from_dumpable_context=_in_tuples,
    )
    torch.serialization.add_safe_globals([kind])


def _in_tuples(value: Any) -> Any:
    """What JSON makes lists of."""
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


register_tree(TokenSet, _TENSORS, "patch")


def _places(index: torch.Tensor, count: int) -> torch.Tensor:
    return index.new_empty(index.shape, dtype=torch.int64)


@operators.function(_places, differentiable=False)
def places_among(index: torch.Tensor, count: int) -> torch.Tensor:
    """int64 of integers that are to be places among so many tokens."""
    index = index.long()
    if index.numel() and checks.readable(index):
        low, high = (int(end) for end in checks.values(index).aminmax())
        if low < 0 or high >= count:
            raise InputError(f"indices are from {low} to {high}; expected 0 to {count - 1}, those of {count} tokens.")
    return index
