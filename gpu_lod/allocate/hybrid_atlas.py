"""Regions of the picture for the foreground, the grid for what is behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, Pool, Scene, register
from gpu_lod.allocate.energy import checked, relevances
from gpu_lod.allocate.stratified import best_of, held, shared_out
from gpu_lod.allocate.tree_cut import tokens_at
from gpu_lod.errors import InputError, UnsupportedError


@register
class HybridAtlas(Allocator):
    """Foreground regions get level-0 patches by area x relevance; the background gets a few, spread evenly.

    Regions come from a label map, one for each value. Labels of pixels become labels of patches by majority (the
    smallest of equally frequent ones). Of labels that are given, 0 is background and all others are foreground;
    `labels_of` makes such a map of any segmenter's masks. Without labels regions are SLIC's superpixels of the picture
    (of the relevance map, if there is no picture), and those are foreground whose mean relevance is above the
    picture's. SLIC is scikit-image's: it runs on the host, image after image, and sees each patch as a pixel, so that
    it takes milliseconds.

    The background's share of the budget is rounded to whole tokens. It goes to patches that are evenly spaced along a
    Z-order curve through the background, each read at the level at which its P x P samples span its share of the
    background's area. These squares need not meet: some overlap, reach past the border or over the foreground, and
    a quarter of the background, or more, may lie between them. The rest is shared by
    largest remainder on area x mean relevance, the relevance that each region holds; no region gets more than it has
    patches, and the most relevant ones of each are taken. What the foreground cannot take goes to the background, and
    the other way round.

    Scores are the relevance of the patch that a token stands on.

    Args:
        background: its share of the budget, from 0 to 1.
        segments: about how many superpixels.
        compactness: of superpixels: how much near counts against alike, as in scikit-image, on Lab colours.

    Raises:
        UnsupportedError: no labels, and scikit-image is not installed.

    Source: Achanta et al., "SLIC Superpixels" (2012); Morton (1966) for the Z-order.
    """

    takes: ClassVar[tuple[Need, ...]] = ("labels",)

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        background: float = 0.1,
        segments: int = 64,
        compactness: float = 10.0,
    ) -> None:
        super().__init__(budget, patch, pool)
        self.background = checks.number(background, "background")
        self.segments = checks.integer(segments, "segments", at_least=1, at_most=2**16)
        self.compactness = checks.number(compactness, "compactness")
        if not 0 <= self.background <= 1:
            raise InputError(f"background is {background}; expected a share of the budget, from 0 to 1.")
        if self.compactness <= 0:
            raise InputError(f"compactness is {compactness}; expected a positive number.")

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        self.enough(scene.grid[0] * scene.grid[1])
        labels = self._superpixels(scene) if scene.labels is None else majority(scene.labels, scene)
        values, region = torch.unique(labels.flatten(1), return_inverse=True)
        room, weight = held(scene, region, len(values))
        if scene.labels is None:
            # More than the picture's mean, and none where relevance is even: sums of equal numbers are exact.
            ahead = weight * room.sum(1, keepdim=True) > weight.sum(1, keepdim=True) * room
        else:
            ahead = (values != 0).expand_as(room)
        behind = ~ahead.gather(1, region).view_as(labels)
        ground = behind.flatten(1).sum(1)
        most = room.sum(1) - ground
        spare = torch.minimum(torch.full_like(ground, round(self.background * self.budget)), ground)
        spare = torch.maximum(spare, self.budget - most)
        counts = shared_out(weight * ahead, room * ahead, self.budget - spare, least=0)
        front = best_of(scene.relevance, region, room, counts)
        rest = spread(behind, spare)
        level = torch.log2(ground.float() / spare.clamp(min=1)).clamp(min=0) / 2
        levels = [torch.zeros_like(scene.relevance), level[:, None, None].expand_as(scene.relevance)]
        return tokens_at(scene, [(0, front), (0, rest)], [scene.relevance], self.budget, levels)

    def _superpixels(self, scene: Scene) -> torch.Tensor:
        """[B, Hg, Wg], from 1 on."""
        try:
            from skimage.segmentation import slic
        except ImportError as error:
            raise UnsupportedError(
                f"superpixels need scikit-image ({error}): pip install 'gpu-lod[allocate]'. Or pass labels=."
            ) from None
        if scene.image is None:
            seen = relevances(scene, 0)[0][:, None]
        else:
            seen = checked(F.avg_pool2d(scene.pixels(), scene.patch, ceil_mode=True))
        colour = seen.shape[1] >= 3
        pictures = seen[:, : 3 if colour else 1].permute(0, 2, 3, 1).detach().double().cpu().numpy()
        # Grey is from 0 to 1, and not from 0 to 100 as in Lab.
        weight = self.compactness if colour else self.compactness / 100
        found = [
            torch.from_numpy(slic(one, n_segments=self.segments, compactness=weight, start_label=1)) for one in pictures
        ]
        return torch.stack(found).to(scene.device)


def majority(labels: torch.Tensor, scene: Scene) -> torch.Tensor:
    """Labels [B, H, W] of pixels to [B, Hg, Wg]: the most frequent one of each patch, the smallest of equal ones.
    Those of patches stay."""
    if tuple(labels.shape[1:]) == scene.grid:
        return labels
    pixels = []
    for n in scene.size:
        side = min(scene.patch, n)
        starts = torch.arange(-(-n // scene.patch), device=labels.device) * scene.patch
        pixels.append(starts.clamp(max=n - side)[:, None] + torch.arange(side, device=labels.device))
    rows, columns = pixels
    return labels[:, rows[:, None, :, None], columns[:, None, :]].flatten(3).mode(-1).values


def spread(eligible: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Where `count` [B] of the eligible cells are that are evenly spaced along a Z-order curve: bool [B, Hg, Wg].

    Args:
        count: no more than are eligible.
    """
    rows, columns = (torch.arange(n, device=eligible.device) for n in eligible.shape[1:])
    curve = _apart(rows)[:, None] * 2 + _apart(columns)
    order = torch.argsort(curve.flatten())
    along = eligible.flatten(1)[:, order]
    there = along.sum(1, keepdim=True).clamp(min=1)
    # Each cell adds count / there, from one half on: those are taken at which the sum passes a whole number.
    steps = along.cumsum(1) * count[:, None] + there // 2
    taken = along & (steps // there > (steps - count[:, None]) // there)
    return torch.zeros_like(along).index_copy(1, order, taken).view_as(eligible)


def _apart(values: torch.Tensor) -> torch.Tensor:
    """Bits of integers, each moved to twice its place."""
    return sum(((values >> bit & 1) << 2 * bit for bit in range(21)), start=torch.zeros_like(values))


def labels_of(masks: torch.Tensor | Sequence[dict[str, Any]]) -> torch.Tensor:
    """A label map of masks that may overlap: 1, 2, ... in their order, smaller ones on top of larger ones, 0 elsewhere.

    Shape: bool [B, M, H, W] gives int64 [B, H, W]; without B for one image.
    Convention: size is a mask's number of pixels. Of equal ones the earlier one is on top.

    Args:
        masks: or what SAM's automatic mask generator returns for an image: a list of dicts, of which "segmentation",
            bool [H, W], counts. An empty one has no size: pass torch.zeros(0, H, W, dtype=torch.bool).

    Raises:
        InputError: no masks, masks that are no booleans, of several shapes or devices, run-length encoded ones.
    """
    if not isinstance(masks, torch.Tensor) and isinstance(masks, (list, tuple)):
        found = [mask.get("segmentation") if isinstance(mask, dict) else mask for mask in masks]
        if not found or any(isinstance(mask, dict) or mask is None for mask in found):
            raise InputError(
                'masks are an empty list, or hold no arrays under "segmentation"; expected bool [H, W] in each. Set '
                'output_mode="binary_mask" in SAM, and pass torch.zeros(0, H, W, dtype=torch.bool) where it finds none.'
            )
        arrays = [checks.dense(mask, "a mask") for mask in found]
        shapes = sorted({tuple(mask.shape) for mask in arrays})
        if len(shapes) > 1 or len(shapes[0]) != 2:
            raise InputError(f"masks have shapes {shapes}; expected a single one, (H, W).")
        for mask in arrays:
            checks.same_device(arrays[0], mask, "a mask", "the first")
        masks = torch.stack(arrays)
    stack = checks.dense(masks, "masks")
    if stack.ndim not in (3, 4) or stack.dtype != torch.bool:
        raise InputError(
            f"masks are {stack.dtype} {tuple(stack.shape)}; expected bool [B, M, H, W] or [M, H, W]. Threshold logits "
            "with > 0."
        )
    batched = stack if stack.ndim == 4 else stack[None]
    images = torch.arange(len(batched), device=stack.device)
    labels = torch.zeros(len(batched), *stack.shape[-2:], dtype=torch.long, device=stack.device)
    area = batched.flatten(2).sum(2)
    order = torch.sort(area, dim=1, stable=True).indices
    for which in reversed(order.unbind(1)):  # the largest first: later ones paint over it
        labels = torch.where(batched[images, which], which[:, None, None] + 1, labels)
    return labels if stack.ndim == 4 else labels[0]
