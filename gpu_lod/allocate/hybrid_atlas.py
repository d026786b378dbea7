"""Regions of the picture for the foreground, the grid for what is behind them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from gpu_lod import by_kernel, checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.energy import checked, relevances
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import best_of, held, shared_out
from gpu_lod.allocate.tree_cut import tokens_at
from gpu_lod.cached import constant, numbers
from gpu_lod.errors import CaptureError, InputError, UnsupportedError
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels.superpixels import patch_means, superpixels
from gpu_lod.kernels.superpixels import runs as runs_of
from gpu_lod.patch_grid import Pool
from gpu_lod.planewise import bands
from gpu_lod.saliency import unit


@register
class HybridAtlas(Allocator):
    """Foreground regions get level-0 patches by area x relevance; the background gets a few, spread evenly.

    Regions come from a label map, one for each value. Labels of pixels become labels of patches by majority (the
    smallest of equally frequent ones). Of labels that are given, 0 is background and all others are foreground;
    `labels_of` makes such a map of any segmenter's masks. Without labels regions are SLIC's superpixels of the picture
    (of the relevance map, if there is no picture), and those are foreground whose mean relevance is above the
    picture's. SLIC sees each patch as a pixel. On CUDA tensors it runs on the GPU, on all images at once, and finds the
    same superpixels as scikit-image's, but for colours whose last bits decide. Elsewhere, and of grids of more than
    2^16 patches, or more than 2^26 pairs of a patch and a superpixel, it is scikit-image's: that runs on the host,
    images side by side on torch's threads, and takes milliseconds each.

    The background's share of the budget is rounded to whole tokens. Its patches, along a Z-order curve, are cut into as
    many runs of even length, and each run gets one token: read at the level at which its P x P samples span the
    smallest square about the run. So no patch of the background is left out; the squares overlap, and may reach over
    the foreground and past the border. The rest is shared by
    largest remainder on area x mean relevance, the relevance that each region holds; no region gets more than it has
    patches, and the most relevant ones of each are taken. What the foreground cannot take goes to the background, and
    the other way round.

    Scores are the relevance of the patch that a token stands on, or that is in the middle of its run.

    Args:
        background: its share of the budget, from 0 to 1.
        segments: about how many superpixels.
        compactness: of superpixels: how much near counts against alike, as in scikit-image, on Lab colours.

    Raises:
        UnsupportedError: no labels, and scikit-image is needed and not installed.
        CaptureError: a CUDA graph is being captured, no labels, and kernels cannot be used.
        LimitError: a CUDA graph is being captured, and the grid is larger than kernels take: as above, or of more than
            2^12 patches with labels, or with room for more than 2^12 superpixels of half the usual size.

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
        region, count, ahead = self._superpixels(scene) if scene.labels is None else given_regions(scene, scene.labels)
        room, weight = held(scene, region, count)
        if ahead is None:
            # More than the picture's mean, and none where relevance is even: sums of equal numbers are exact.
            ahead = weight * room.sum(1, keepdim=True) > weight.sum(1, keepdim=True) * room
        behind = ~ahead.gather(1, region).view_as(scene.relevance)
        ground = behind.flatten(1).sum(1)
        most = room.sum(1) - ground
        spare = ground.clamp(max=round(self.background * self.budget))
        spare = torch.maximum(spare, self.budget - most)
        counts = shared_out(weight * ahead, room * ahead, self.budget - spare, least=0)
        front = best_of(scene.relevance, region, room, counts)
        every = scene.sites(0, torch.arange(front[0].numel(), device=scene.device))
        rest, spread = self._background(scene, behind, spare, every)
        sites = [every.expand(scene.batch, -1, -1), spread]
        return tokens_at(scene, [(0, front), (0, rest)], [scene.relevance], self.budget, sites=sites)

    def _background(
        self, scene: Scene, behind: torch.Tensor, spare: torch.Tensor, every: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the middles of `spare` [B] runs of cells are, bool [B, Hg, Wg], and the sites there, [B, Hg Wg, 3]."""
        if by_kernel.usable(behind):
            device, order = kernels.device_of(behind), constant(behind.device, _z_order, *scene.grid)[0]
            made = by_kernel.attempt(
                behind.device,
                lambda: runs_of(device, behind, spare, order, every, scene.size, scene.patch, self.budget),
            )
            if made is not None:
                return made
        run, middle = runs(behind, spare)
        return middle, squares(scene, behind, run, self.budget)

    def _superpixels(self, scene: Scene) -> tuple[torch.Tensor, int, None]:
        """Which one each patch is in, from 0 on, [B, Hg Wg], and how many there can be."""
        if scene.image is None:
            seen = relevances(scene, 0)[0][:, None]
        else:
            seen = checked(_patch_means(scene.top.detach(), scene.patch))
        colour = seen.shape[1] >= 3
        # Grey is from 0 to 1, and not from 0 to 100 as in Lab.
        compactness = self.compactness if colour else self.compactness / 100
        if by_kernel.usable(seen):
            device = kernels.device_of(seen)
            made = by_kernel.attempt(
                seen.device, lambda: superpixels(device, seen, self.segments, compactness), waits=True
            )
            if made is not None:
                return made[0].flatten(1), made[1], None
        if not checks.readable(seen):
            raise CaptureError(
                "a CUDA graph is being captured, and superpixels are made by kernels there alone, which cannot be used "
                f"for tensors on {seen.device}. Pass labels=, or call the allocator outside the graph."
            )
        try:
            from skimage.segmentation import slic
        except ImportError as error:
            raise UnsupportedError(
                f"superpixels need scikit-image ({error}); in the checkout: pip install '.[allocate]'. Or pass labels=."
            ) from None
        pictures = checks.array(seen[:, : 3 if colour else 1].permute(0, 2, 3, 1).double())
        make = partial(slic, n_segments=self.segments, compactness=compactness, start_label=1)
        # It takes one picture, and leaves Python to others while it works.
        with ThreadPoolExecutor(min(torch.get_num_threads(), len(pictures))) as threads:
            found = list(map(torch.from_numpy, threads.map(make, pictures)))
        region = torch.stack(found).flatten(1) - 1
        return region.to(scene.device), int(region.max()) + 1, None


def _patch_means(image: torch.Tensor, patch: int) -> torch.Tensor:
    """Of [B, C, H, W]: [B, C, Hg, Wg], fp32, uint8 over 255, at the far edges of what is inside. On a CPU some rows of
    patches at a time, so that no more than those are fp32."""
    if by_kernel.usable(image):
        found = by_kernel.attempt(image.device, lambda: patch_means(kernels.device_of(image), unit(image), patch))
        if found is not None:
            return found
    if not checks.on_host(image):
        return F.avg_pool2d(unit(image), patch, ceil_mode=True)
    count, channels, height, width = image.shape
    grid = -(-height // patch), -(-width // patch)
    result = image.new_empty((count, channels, *grid), dtype=torch.float32)
    for some, rows in bands(count, grid[0], channels * patch * width):
        strip = image[some, :, rows.start * patch : rows.stop * patch]
        result[some, :, rows] = F.avg_pool2d(unit(strip), patch, ceil_mode=True)
    return result


def given_regions(scene: Scene, labels: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Regions of a label map, in the order of their labels: which one each patch is in, [B, Hg Wg], how many there can
    be, and which are foreground, [B, R]."""
    labels = majority(labels, scene).flatten(1)
    if checks.readable(labels):
        values, region = torch.unique(labels, return_inverse=True)
        return region, len(values), (values != 0).expand(len(labels), -1)
    # Nobody may ask how many there are: as many as there are patches, if need be.
    found, order = torch.sort(labels, dim=1)
    ranks = F.pad(found[:, 1:] != found[:, :-1], (1, 0)).cumsum(1)
    region = torch.empty_like(order).scatter_(1, order, ranks)
    ahead = torch.zeros_like(labels, dtype=torch.bool).scatter_(1, region, labels != 0)
    return region, labels.shape[1], ahead


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
    return _most_frequent(labels[:, rows[:, None, :, None], columns[:, None, :]].flatten(3))


_MODE = 2048
"""Numbers of which a GPU finds the most frequent one in one launch; of more torch waits for it."""


def _most_frequent(values: torch.Tensor) -> torch.Tensor:
    """Of [..., N], the smallest of equally frequent ones."""
    if checks.on_host(values) or values.shape[-1] <= _MODE:
        return values.mode(-1).values
    found, place = values.sort(-1).values, torch.arange(values.shape[-1], device=values.device)
    begins = F.pad(found[..., 1:] != found[..., :-1], (1, 0)) * place
    longest = (place - begins.cummax(-1).values).argmax(-1, keepdim=True)
    return found.gather(-1, longest)[..., 0]


def runs(eligible: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eligible cells along a Z-order curve, cut into `count` [B] runs of even length: which run each cell is in,
    int64 [B, Hg, Wg] (of the others any that there is), and which cells are in the middle of theirs, bool.

    Args:
        count: no more than are eligible.
    """
    order, back = constant(eligible.device, _z_order, *eligible.shape[1:])
    along = eligible.flatten(1).index_select(1, order)
    there, parts = along.sum(1, keepdim=True).clamp(min=1), count[:, None]
    turn = (along.cumsum(1) - 1).clamp(min=0)
    run = turn * parts // there
    first, end = (-(-number * there // parts.clamp(min=1)) for number in (run, run + 1))
    middle = along & (parts > 0) & (turn == (first + end - 1) // 2)
    run, middle = (x.index_select(1, back).view_as(eligible) for x in (run, middle))
    return run, middle


def squares(scene: Scene, cells: torch.Tensor, run: torch.Tensor, most: int) -> torch.Tensor:
    """For each cell of the grid the site [B, Hg Wg, 3] whose samples span the smallest square about its run, of those
    cells [B, Hg, Wg]. No two runs of a Z-order curve have the same: of two boxes about one centre, as long at their
    longer sides, one is the wider and the other the higher, and each would come first.

    Args:
        most: runs there can be.
    """
    index, columns = run.flatten(1), cells.shape[2]
    ends = constant(cells.device, _ends, *cells.shape[1:])
    # What counts for nothing is spread among all runs: where many go to one, a GPU adds one after the other.
    index = index.where(cells.flatten(1), constant(cells.device, _in_turn, ends.shape[1], most))
    ends = ends.where(cells.flatten(1)[:, None], 2**24)
    # The least and, of those that are turned round, the greatest.
    box = ends.new_zeros(len(index), 4, most)
    box = box.scatter_reduce(2, index[:, None].expand_as(ends), ends, "amin", include_self=False)
    low, high = box[:, :2], -box[:, 2:]
    sides = numbers(((scene.size[1],), (scene.size[0],)), torch.float64, cells.device)
    start, end = (low * scene.patch).double(), torch.minimum(((high + 1) * scene.patch).double(), sides)
    level = torch.log2((end - start).amax(1).clamp(min=1) / scene.patch).clamp(min=0)
    found = torch.cat([(start + end) / (2 * sides), level[:, None]], dim=1).transpose(1, 2).float()
    # A cell by itself is read where it lies: at a far edge that is not about its middle.
    single = scene.sites(0, (low[:, 1] * columns + low[:, 0]).clamp(0, cells[0].numel() - 1))
    found = torch.where((low == high).all(1)[..., None], single, found)
    return found.gather(1, index[..., None].expand(-1, -1, 3))


def _ends(rows: int, columns: int) -> torch.Tensor:
    """[4, rows * columns]: x and y of the cells of a grid, and both of them negative."""
    y, x = torch.meshgrid(torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu"), indexing="ij")
    return torch.stack([x, y, -x, -y]).flatten(1)


def _in_turn(count: int, most: int) -> torch.Tensor:
    """[count]: 0, 1, ... `most` - 1, and so on."""
    return torch.arange(count, device="cpu") % most


def _z_order(rows: int, columns: int) -> torch.Tensor:
    """[2, rows * columns]: the cells of a grid along the curve, and where on it each cell is."""
    y, x = (torch.arange(n, device="cpu") for n in (rows, columns))
    order = torch.argsort((_apart(y)[:, None] * 2 + _apart(x)).flatten())
    return torch.stack([order, torch.argsort(order)])


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
