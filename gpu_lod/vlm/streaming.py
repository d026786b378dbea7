"""A token memory across video frames, as a texture streamer keeps its pool: residents stay unless clearly beaten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpu_lod import checks
from gpu_lod.allocate import GridTopK
from gpu_lod.allocate.ordering import ordered, places
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError
from gpu_lod.gather_patches import gather_patches
from gpu_lod.patch_grid import Pool, pooled
from gpu_lod.shapes import summary
from gpu_lod.token_set import TokenSet
from gpu_lod.uncompiled import as_it_stands


class Streamed(NamedTuple):
    """What the memory holds after a frame, and what is new in it."""

    tokens: TokenSet
    """In the order of their slots, which a token keeps for as long as it stays, and so not by relevance as other token
    sets: what is cached slot by slot stays where it is. Scores are this frame's relevance; `order` sorts by them."""
    replaced: torch.Tensor
    """bool [B, K]: slots that hold another site than before; all of them at the first frame."""
    refreshed: torch.Tensor
    """bool [B, K]: slots whose patch was read from this frame, replaced ones among them. The patches of all others are
    what they were, bit by bit, and so is all that is made of each patch alone."""
    churn: torch.Tensor
    """fp32 [B]: the share of slots that were replaced."""

    def __repr__(self) -> str:
        return summary(self)

    @property
    def order(self) -> torch.Tensor:
        """int64 [B, K]: the slots by relevance, high first, equal ones by their place. What is kept slot by slot comes
        into this order by `features.take_along_dim(seen.order[..., None], -2)`."""
        return ordered(self.tokens.scores, self.tokens.budget)[1]


torch.serialization.add_safe_globals([Streamed])  # torch.load's weights_only


class TokenMemory:
    """K level-0 patches that stay from frame to frame, but for those that others clearly outdo.

    A patch's priority is its relevance, and residents have a margin on top. The K of the highest priority are resident
    after a frame (equal ones: residents first, then row by row), each newcomer in the slot of one that left. A patch
    that has been among the K most relevant for `patience` frames in a row without getting in has the margin too, so
    that a small change that lasts is followed, and flicker is not. A resident's patch is read again when the content
    under it has changed. The same frames give the same memory.

    What is saved is exact where each patch is worked on by itself, as by the layer that embeds patches: keep what came
    of it slot by slot, and make the refreshed ones anew. Behind attention every token's features depend on all tokens:
    to encode the refreshed ones alone, and keep the features of the others, is an approximation there, whose error has
    to be measured on the model. All of `Streamed.tokens` encoded again have none.

    Args:
        budget: K.
        patch: P.
        pool: how relevance of the picture's size becomes one of the grid.
        margin: in standard deviations of the frame's relevance over the grid; 0 is no hysteresis: the K most relevant
            at every frame.
        patience: in frames; None is for ever.
        motion: how much change refreshes a patch: the mean absolute difference over it from frame to frame, of the
            channel where it is largest, added up since the patch was read. In units of a channel's range: 1 is from
            black to white, 255 of uint8. No channel of a patch that is held is further, on average over the patch, from
            the frame.
        mean, std: as an allocator takes them.

    Source: priority and eviction as in streaming texture pools; Mayer, "Virtual Texturing" (2010). The margin is a
        Schmitt trigger's.
    """

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        margin: float = 0.5,
        patience: int | None = 8,
        motion: float = 0.03,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        self._grid = GridTopK(budget, patch, pool)
        self.budget, self.patch, self.pool = self._grid.budget, self._grid.patch, self._grid.pool
        self.margin, self.motion = checks.number(margin, "margin"), checks.number(motion, "motion")
        if self.margin < 0 or self.motion < 0:
            raise InputError(f"margin is {margin} and motion {motion}; expected 0 or more.")
        self.mean, self.std = mean, std
        self.patience = None if patience is None else checks.integer(patience, "patience", at_least=1)
        self.reset()

    def __repr__(self) -> str:
        names = ("budget", "patch", "pool", "margin", "patience", "motion", "mean", "std")
        return f"TokenMemory({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def reset(self) -> None:
        """Forget all frames."""
        self._frame: torch.Tensor | None = None

    @as_it_stands
    def update(self, image: torch.Tensor, relevance: torch.Tensor | None = None, refresh: bool = False) -> Streamed:
        """Take in the next frame.

        Shape: image [B, C, H, W] or [C, H, W], B videos side by side, of the same shape every time; relevance as an
            allocator takes it, None is the image's saliency. Results are without B for an unbatched image.

        Args:
            refresh: read all patches anew.

        Raises:
            InputError: a frame of another shape, dtype or device than those before; a budget above the patches there
                are; and what an allocator raises. The memory is then as it was before the call.
        """
        before = dict(vars(self))
        try:
            return self._update(image, relevance, refresh)
        except BaseException:  # no tensor of it is ever written to
            vars(self).update(before)
            raise

    def _update(self, image: torch.Tensor, relevance: torch.Tensor | None, refresh: bool) -> Streamed:
        checks.flag(refresh, "refresh")
        image = checks.image(image)
        scene, batched = self._grid._scene(image, relevance, None, None, None)
        self._grid.enough(scene.grid[0] * scene.grid[1])
        frame = (image if batched else image[None]).detach()  # gradients through all frames would keep them all
        before = self._frame
        if before is None:
            self._cells = ordered(scene.relevance.flatten(1), self.budget)[1]
            self._waited = torch.zeros_like(scene.relevance, dtype=torch.int32).flatten(1)
            self._moved = torch.zeros(self._cells.shape, dtype=torch.float32, device=scene.device)
            stays = frame.is_floating_point() or (self.mean is None and self.std is None)
            shape = (*self._cells.shape, frame.shape[1], self.patch, self.patch)
            self._patches = frame.new_zeros(shape, dtype=frame.dtype if stays else torch.float32)
            replaced = torch.ones_like(self._cells, dtype=torch.bool)
        else:
            _same(frame, before, batched)
            replaced = self._exchange(scene)
            self._moved = self._moved + _change(frame, before, self.patch).flatten(1).gather(1, self._cells)
        # NaN, as of a broken frame, is no small change.
        refreshed = torch.ones_like(replaced) if refresh else replaced | ~(self._moved <= self.motion)
        self._moved = self._moved.masked_fill(refreshed, 0)
        sites = scene.sites(0, self._cells)
        self._patches = self._read(frame, sites, refreshed)
        self._frame = frame.clone()  # a decoder may write the next frame into the same memory
        scores = scene.relevance.flatten(1).gather(1, self._cells)
        # A copy: what a caller does to the patches is not to be in those of the next frame.
        found = (sites, scores, self._patches.clone(), replaced, refreshed, replaced.float().mean(1))
        sites, scores, patches, replaced, refreshed, churn = found if batched else (part[0] for part in found)
        return Streamed(TokenSet(sites, scores, patches, self.patch), replaced, refreshed, churn)

    def _exchange(self, scene: Scene) -> torch.Tensor:
        """Let newcomers in. bool [B, K]: the slots that they took."""
        largest = torch.finfo(torch.float32).max / 2**24
        values = scene.relevance.flatten(1).clamp(-largest, largest).double()
        resident = torch.zeros_like(values, dtype=torch.bool).scatter(1, self._cells, True)
        wanted = torch.zeros_like(resident).scatter(1, _best(values, resident, self.budget), True)
        self._waited = torch.where(wanted & ~resident, self._waited + 1, 0)
        favoured = resident if self.patience is None else resident | (self._waited >= self.patience)
        best = _best(values + self.margin * _spread(scene.relevance.flatten(1)) * favoured, resident, self.budget)
        stays = torch.zeros_like(resident).scatter(1, best, True)
        left = ~stays.gather(1, self._cells)
        new = best.gather(1, places(~resident.gather(1, best), self.budget))
        self._cells = torch.where(left, new.gather(1, (left.cumsum(1) - 1).clamp(min=0)), self._cells)
        return left

    def _gathered(self, frame: torch.Tensor, sites: torch.Tensor) -> torch.Tensor:
        return gather_patches(frame, sites, self.patch, mean=self.mean, std=self.std)

    def _read(self, frame: torch.Tensor, sites: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The stored patches, the wanted ones read anew; of each video as many as of the one with the most."""
        most = int(wanted.sum(1).max())
        if not most:
            return self._patches
        slots = torch.sort(wanted.byte(), dim=1, descending=True, stable=True).indices[:, :most]
        rows = torch.arange(len(frame), device=frame.device)[:, None]
        new = self._gathered(frame, sites[rows, slots])
        held = self._patches[rows, slots]
        fits = wanted[rows, slots][..., None, None, None]
        return self._patches.index_put((rows, slots), torch.where(fits, new, held))


def _change(frame: torch.Tensor, before: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, Hg, Wg]: the mean absolute difference over each patch, of the channel of [B, C, H, W] where it is largest."""
    apart = torch.maximum(frame, before) - torch.minimum(frame, before)  # of bytes too
    work = torch.float64 if frame.dtype == torch.float64 else torch.float32
    change = pooled(apart.to(work), patch).amax(1)
    return change / 255 if frame.dtype == torch.uint8 else change


def _spread(values: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each row of [B, N], fp64 [B, 1]; infinities, which mask cells out, do not count."""
    finite = torch.isfinite(values)
    count = finite.sum(1, keepdim=True).clamp(min=1)
    known = values.double().masked_fill(~finite, 0)
    centred = (known - known.sum(1, keepdim=True) / count).masked_fill(~finite, 0)
    return (centred.square().sum(1, keepdim=True) / count).sqrt()


def _best(values: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` highest of [B, N], high first; of equal ones those that are `first` come first."""
    order = torch.sort(first.byte(), dim=1, descending=True, stable=True).indices
    return order.gather(1, ordered(values.gather(1, order), count)[1])


def _same(frame: torch.Tensor, before: torch.Tensor, batched: bool) -> None:
    def words(x: torch.Tensor) -> str:
        shape = x.shape if batched or len(x) > 1 else x.shape[1:]
        return f"{str(x.dtype)[6:]} {tuple(shape)} on {x.device}"

    if (frame.shape, frame.dtype, frame.device) != (before.shape, before.dtype, before.device):
        raise InputError(
            f"a frame is {words(frame)}, and those before were {words(before)}: call reset() to begin another video."
        )
