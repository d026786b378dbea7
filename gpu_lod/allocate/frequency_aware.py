"""Something of every direction that the picture varies in: budgets for bands of orientation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from gpu_lod import by_kernel, checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.energy import ROUNDING, checked, luma, over_patches, relevances
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import shared_out
from gpu_lod.allocate.tree_cut import tokens_at
from gpu_lod.cached import numbers
from gpu_lod.dispatch import Backend, needs_grad
from gpu_lod.errors import InputError
from gpu_lod.feature_channels import luma_weights
from gpu_lod.gaussian import gaussian
from gpu_lod.kernels import choosing
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels.energies import ANGLES, of_half
from gpu_lod.kernels.sources import ELEMENTS
from gpu_lod.oriented_energy import oriented_energy
from gpu_lod.patch_grid import Pool
from gpu_lod.quadrature import FILTERS, SHARES, steering

_OF = 273
"""The budget that the counts of `split` are for."""


@register
class FrequencyAware(Allocator):
    """Level-0 patches, so many for each band of orientation (0, 45, 90 and 135 degrees as in `oriented_energy`: 0 are
    vertical edges), and the best of each band; no patch for two.

    The four counts of `split` go to the bands by rank, the strongest first, and what is left of the budget is shared
    by largest remainder on the bands' weights. Both are for a budget of 273; for another one the sum of the four is
    scaled to it, rounded down, and shared by largest remainder on them. A band's weight is the relevance times the
    energy that it holds, or what the query says.

    What a patch is worth to a band is relevance times energy. Patches are given away as if the best pair of band and
    patch, among bands with tokens left and patches not taken, were served again and again; so no band is first to
    choose, and a patch that several bands want goes to the one that it is worth most to. Of equal pairs the band of
    the smaller angle comes first, then the patch row by row. No band can run out: there are as many patches as tokens.

    Energy is measured on level 1 of the Gaussian pyramid of the luma, at half the resolution, in a quarter of the
    time: strokes finer than two pixels count as what is left of them there. Each patch has the mean over its pixels, at
    the far edges those of the patch shifted inward, and the energy of rounding to 8 bits is added to it, so that where
    there is nothing to see relevance alone decides. Scores are the relevance of the patches.

    Args:
        split: four counts that sum to 273 at most.
        A query [B, 4] gives weights of the bands, 0 or more; one of zeros alone gives none, and energy speaks.

    Source: Freeman and Adelson (1991) for the energy; Gale and Shapley (1962) for giving away in rounds of offers,
        which ends where the greedy order does, since both sides rank a pair by the same number.
    """

    needs: ClassVar[tuple[Need, ...]] = ("image", "relevance")
    takes: ClassVar[tuple[Need, ...]] = ("query",)
    finest = True
    query_width = 4
    query_holds = "weights of the four orientations, no embedding"

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        split: Sequence[int] = (128, 32, 32, 32),
    ) -> None:
        super().__init__(budget, patch, pool)
        counts = (
            tuple(checks.integer(n, "a band's count", at_least=0) for n in split)
            if isinstance(split, (list, tuple))
            else ()
        )
        if len(counts) != 4 or sum(counts) > _OF:
            raise InputError(
                f"split is {split!r}; expected four counts of 0 or more, the strongest band's first, that sum to {_OF} "
                "at most."
            )
        self.split = counts

    def work(self, scene: Scene) -> int:
        return scene.size[0] * scene.size[1]

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        self.enough(scene.grid[0] * scene.grid[1])
        [relevance] = relevances(scene, 0)
        worth = (relevance[:, None] * (energies(scene) + ROUNDING)).flatten(2)
        taken = given_away(worth, self._counts(scene, worth.double().sum(2)), self.budget)
        return tokens_at(scene, [(0, taken.view_as(relevance))], [scene.relevance], self.budget)

    def _counts(self, scene: Scene, weight: torch.Tensor) -> torch.Tensor:
        """Tokens [B, 4] of each band."""
        if scene.query is not None:
            if checks.readable(scene.query) and (scene.query < 0).any():
                raise InputError(
                    "query holds negative weights; expected 0 or more for each of the four bands. query.clamp(min=0) "
                    "is such."
                )
            weight = torch.where((scene.query > 0).any(1, keepdim=True), scene.query.double(), weight)
        anything = torch.full_like(weight, self.budget, dtype=torch.long)
        fixed = self.budget * sum(self.split) // _OF
        by_rank = shared_out(
            numbers(self.split, weight.dtype, weight.device).expand_as(weight), anything, fixed, least=0
        )
        order = torch.sort(weight, dim=1, descending=True, stable=True).indices
        counts = torch.zeros_like(by_rank).scatter(1, order, by_rank)
        return counts + shared_out(weight, anything, self.budget - fixed, least=0)


def energies(scene: Scene) -> torch.Tensor:
    """Mean oriented energy of each patch, [B, 4, Hg, Wg], at 0, 45, 90 and 135 degrees."""
    found = _by_kernels(scene.top)
    if found is None:
        values = luma(scene)
        # A CUDA graph holds nothing of OpenGL, and is to choose what a call does.
        backend: Backend = "auto" if checks.on_host(values) else "torch"
        half = gaussian(values, 2 if max(scene.size) > 1 else 1, backend=backend).levels[-1]
        found = oriented_energy(half, 1, backend=backend)[0][:, 0]
    return over_patches(checked(found), scene, 0, 2, scene.size)


def _by_kernels(images: torch.Tensor) -> torch.Tensor | None:
    """[B, 4, ceil(H / 2), ceil(W / 2)] in two launches, if kernels can and no graph is kept."""
    graph = needs_grad(images) or checks.transformed(images)
    if max(images.shape[-2:]) == 1 or graph or images.dtype not in ELEMENTS or not by_kernel.usable(images):
        return None
    device, weights = kernels.device_of(images), luma_weights(images)
    return by_kernel.attempt(images.device, lambda: of_half(device, images, weights, FILTERS, SHARES, steering(ANGLES)))


def given_away(worth: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """Where [B, N] the patches are that bands get: `counts` [B, S] each, by `worth` [B, S, N], no patch twice.

    Args:
        counts: no more than N together.
        most: at least as many as they are together. A band is turned down where another one is served, so it wishes for
            no more.
    """
    if not checks.on_host(worth):
        return served(worth, counts)
    order = ordered(worth, most)[1]
    open_ = torch.ones_like(order, dtype=torch.bool)  # who was not turned down, in the order of the band's wishes
    while True:
        asked = open_ & (open_.cumsum(2) <= counts[..., None])
        offers = torch.zeros_like(worth, dtype=torch.bool).scatter(2, order, asked)
        value = torch.where(offers, worth, -1.0)
        best = offers & (value == value.amax(1, keepdim=True))
        refused = offers & ~(best & (best.cumsum(1) == 1))  # of equal ones the first
        if not bool(refused.any()):
            return offers.any(1)
        open_ = open_ & ~refused.gather(2, order)


def served(worth: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The same for a GPU, which is not to be waited for: pairs in their order up to where a band is full, once for each
    band."""
    bands, patches = worth.shape[1:]
    order = torch.sort(worth.flatten(1), dim=1, descending=True, stable=True).indices
    if len(order) and by_kernel.usable(order, counts):
        taken = by_kernel.attempt(order.device, lambda: choosing.served(kernels.device_of(order), order, counts))
        if taken is not None:
            return taken
    pairs = torch.arange(bands * patches, device=worth.device)
    rank = torch.empty_like(order).scatter(1, order, pairs.expand_as(order)).view_as(worth)
    band = order // patches == torch.arange(bands, device=worth.device)[:, None, None]  # [S, B, S * N]
    free, left = torch.ones_like(worth[:, 0], dtype=torch.bool), counts
    for _ in range(bands):
        open_ = left > 0
        wanted = torch.where(open_[..., None] & free[:, None], rank, len(pairs))
        best = (wanted == wanted.amin(1, keepdim=True)) & (wanted < len(pairs))
        asked = (band & best.flatten(1).gather(1, order)).cumsum(2).transpose(0, 1)
        full = open_[..., None] & (asked == left[..., None])
        last = torch.where(full, pairs, len(pairs)).amin((1, 2))
        given = best & (rank <= last[:, None, None])
        free, left = free & ~given.any(1), left - given.sum(2)
    return ~free
