"""One budget for a whole batch: more tokens for the images that have more to show."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from gpu_lod import checks, precision
from gpu_lod.allocate.base import Allocator
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import shared_out
from gpu_lod.errors import InputError
from gpu_lod.pyramid import Pyramid
from gpu_lod.token_set import TokenSet, device_of, register_tree
from gpu_lod.uncompiled import as_it_stands


@dataclass(frozen=True, eq=False, repr=False)
class PackedTokens:
    """The tokens of a batch, as many of each image as it was given: image after image, each by relevance, high first.
    It is a pytree.

    Shape: sites [T, 3], scores [T], patches [T, C, P, P] or None where no image was given, weights [T, Hg Wg] or None
        (see `TokenSet`), T the sum over all images; offsets [B + 1], int32: image b has tokens offsets[b] to
        offsets[b + 1] - 1.
    Convention: offsets are what attention over sequences of several lengths takes as `cu_seqlens`, and `longest` is its
        `max_seqlen`.
    """

    sites: torch.Tensor
    scores: torch.Tensor
    patches: torch.Tensor | None
    patch: int
    """P."""
    offsets: torch.Tensor
    longest: int
    """The most tokens that an image has."""
    weights: torch.Tensor | None = None

    @property
    def counts(self) -> torch.Tensor:
        """[B], the tokens of each image."""
        return self.offsets.diff()

    def unpack(self) -> list[TokenSet]:
        """The tokens of each image, unbatched: views of these."""
        sizes = self.counts.tolist()
        patches, weights = (
            [None] * len(sizes) if values is None else values.split(sizes) for values in (self.patches, self.weights)
        )
        parts = zip(self.sites.split(sizes), self.scores.split(sizes), patches, weights, strict=True)
        return [TokenSet(sites, scores, pixels, self.patch, shares) for sites, scores, pixels, shares in parts]

    def clone(self) -> PackedTokens:
        """The same in memory of its own."""
        return self._each(torch.Tensor.clone)

    def detach(self) -> PackedTokens:
        """The same tensors without their gradients."""
        return self._each(torch.Tensor.detach)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedTokens:
        """The same on a device; `non_blocking` as torch's."""
        where = device_of(device)
        return self._each(lambda value: value.to(where, non_blocking=non_blocking))

    def pin_memory(self) -> PackedTokens:
        """The same in page-locked memory, as `TokenSet.pin_memory`."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedTokens:
        changed: PackedTokens = _pytree.tree_map(change, self)
        return changed

    def __repr__(self) -> str:
        what = "no patches" if self.patches is None else f"patches {tuple(self.patches.shape)}"
        return f"<PackedTokens of {len(self.offsets) - 1} images, sites {tuple(self.sites.shape)}, {what}>"


register_tree(PackedTokens, ("sites", "scores", "patches", "offsets", "weights"), "patch", "longest")


class TokenBank(nn.Module):
    """An allocator for a batch that shares one budget: each image gets tokens by its total benefit, all together
    exactly `total`.

    An image's benefit is the sum of its relevance over the grid, above the least of the whole batch if that is
    negative (-inf counts as nothing): relevance has to mean the same in all images. Shares are whole, by largest
    remainder, after each image got `least`; none is above `most`, and what an image cannot take goes to the others in
    the same way. If no image has any benefit, shares are equal. It is a torch module, whose parameters are the
    allocator's if it learns.

    Args:
        allocator: what chooses the sites; its own budget is not looked at, and it is called once if it is
            `nested`, else once for each share that occurs, with all images of that share.
        total: tokens of the whole batch.
        least: tokens that each image gets whatever its benefit, at least 1.
        most: tokens that an image may get; None is as many as it has level-0 patches.
    """

    __call__: Callable[..., PackedTokens]

    def __init__(self, allocator: Allocator, total: int, least: int = 1, most: int | None = None) -> None:
        super().__init__()
        if not isinstance(allocator, Allocator):
            raise InputError(f"allocator is {allocator!r}; expected one of gpu_lod.allocate, such as GridTopK().")
        self.allocator = allocator
        self.total = checks.integer(total, "total", at_least=1, at_most=2**30)
        self.least = checks.integer(least, "least", at_least=1)
        self.most = None if most is None else checks.integer(most, "most", at_least=self.least)

    def extra_repr(self) -> str:
        found = f"total={self.total}, least={self.least}, most={self.most}"
        return found if isinstance(self.allocator, nn.Module) else f"{self.allocator!r}, {found}"

    @as_it_stands
    @precision.in_full
    def forward(
        self,
        image: torch.Tensor | Pyramid | None = None,
        relevance: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        fixation: Any = None,
        labels: torch.Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bias: float = 0.0,
    ) -> PackedTokens:
        """Share, choose sites, and read the patches there. It takes what the allocator takes.

        Raises:
            InputError: a total that is more than all images may get together, or less than `least` for each; an
                allocator whose number of tokens cannot be changed; what the allocator raises.
        """
        self.allocator._check_bias(bias)
        scene, batched = self.allocator._scene(image, relevance, query, fixation, labels)
        counts = self.shares(scene)
        longest = int(counts.max())
        sites = scene.relevance.new_zeros(scene.batch, longest, 3)
        scores = sites.new_zeros(scene.batch, longest)
        weights: torch.Tensor | None = None
        # Where the first of many are the few, what an image has too many of is left out below.
        asked = counts if not self.allocator.nested else torch.full_like(counts, longest)
        for count in asked.unique().tolist():
            which = (asked == count).nonzero()[:, 0]
            chosen = self._choose(scene.some(which), count)
            if len(chosen) > 2 and weights is None:
                weights = sites.new_zeros(*scores.shape, scene.grid[0] * scene.grid[1])
            for values, found in zip((sites, scores, weights), chosen, strict=False):
                assert values is not None
                values[which, :count] = found.to(values.dtype)
        taken = torch.arange(longest, device=scene.device) < counts[:, None]
        patches = None
        if scene.image is not None:
            if weights is None or not self.allocator.blends:
                # For all at once: a pyramid cannot be parted, and a chain is made once.
                read = self.allocator._read(scene, sites if batched else sites[0], mean, std, bias)
                patches = (read if batched else read[None])[taken]
            else:
                (read,) = self.allocator._in_parts(
                    scene, lambda part, own: (self.allocator._blended(part, own, mean, std),), weights
                )
                patches = read[taken]
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        packed = None if weights is None else weights[taken]
        return PackedTokens(sites[taken], scores[taken], patches, self.allocator.patch, offsets, longest, packed)

    def shares(self, scene: Scene) -> torch.Tensor:
        """[B] how many tokens each image gets."""
        cells = scene.grid[0] * scene.grid[1]
        most = cells if self.most is None else self.most
        if self.total > scene.batch * most:
            raise InputError(
                f"the total is {self.total}, and {scene.batch} images may get {most} tokens each, {scene.batch * most} "
                "together. Use a smaller total, or set most= for an allocator that has more sites than patches."
            )
        if self.total < scene.batch * self.least:
            raise InputError(
                f"the total is {self.total}, less than {self.least} for each of {scene.batch} images. Use a larger "
                "total, or a smaller least=."
            )
        benefit = _benefit(scene.relevance.detach())
        given = self.least - 1  # the first of each is shared_out's own
        room = torch.full_like(benefit, most - given, dtype=torch.long)
        return given + shared_out(benefit[None], room[None], self.total - given * scene.batch)[0]

    def _choose(self, scene: Scene, count: int) -> tuple[torch.Tensor, ...]:
        allocator = copy.copy(self.allocator)
        allocator.budget = count
        chosen = allocator.choose(scene)
        if chosen[0].shape[1] != count:
            raise InputError(
                f"{type(allocator).__name__} was made for {chosen[0].shape[1]} tokens and cannot choose {count}. Share "
                "the total among images with another allocator."
            )
        return allocator.checked(scene, chosen)


def _benefit(relevance: torch.Tensor) -> torch.Tensor:
    """[B], not negative: one scale for all images, so sums are of double precision."""
    largest = torch.finfo(torch.float32).max
    none = relevance == -math.inf
    values = relevance.double().clamp(-largest, 16 * largest)
    low = values.where(~none, 0.0).min().clamp(max=0)
    return (values - low).where(~none, 0.0).sum((1, 2))
