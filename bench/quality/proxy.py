"""What learned allocators are trained on: the squared error that a rebuilt picture is expected to have, differentiable.

Cell by cell of the grid of level-0 patches. A cell that is shown at level l loses what level l loses of it: nothing at
level 0, the squared difference to the mip level read bilinearly at whole levels, and in between linearly. For what
blends patches, a level is the mean of 2^l x 2^l patches stretched over all of them. A cell that no token shows has its
squared distance from the picture's mean. A token covers a cell by the part of the cell's area that is in it; of several
tokens over a cell the finer weigh more, e^4 a level. Of an allocator of whole level-0 patches a cell is shown as far as
its soft mask says. All is in units of the error of a picture that is its mean, so 1 is no token at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpu_lod.allocate.grid_top_k import GridTopK

FINER = 4.0
"""What a level counts among tokens over one cell, in natural logarithms."""
LEVELS = 7


@dataclass(frozen=True, eq=False)
class Example:
    """A picture to train on, as allocators and the error take it."""

    relevance: torch.Tensor
    """[1, Hg, Wg]"""
    places: tuple[tuple[float, float] | None, ...]
    """Fixations that its rows have: None is the peak of relevance."""
    mean_error: torch.Tensor
    """[Hg Wg]: of each cell that shows the picture's mean."""
    level_error: torch.Tensor
    """[levels, Hg Wg]: of each cell that is shown at a whole level."""
    blend_error: torch.Tensor
    """The same for blends of patches."""

    def masked(self, mask: torch.Tensor) -> torch.Tensor:
        """The error where each cell is shown as far as a mask [1, Hg, Wg] in [0, 1] says."""
        return ((1 - mask.flatten()) * self.mean_error).mean()

    def seen(self, sites: torch.Tensor, blends: bool) -> torch.Tensor:
        """The error of tokens at sites [1, K, 3]."""
        rows, columns = self.relevance.shape[1:]
        across, down = torch.arange(columns) + 0.5, torch.arange(rows) + 0.5
        cells = torch.stack(torch.meshgrid(across, down, indexing="xy"), dim=-1).flatten(0, 1)
        at, level = sites[0, :, :2] * torch.tensor([columns, rows]), sites[0, :, 2].clamp(0, LEVELS - 1)
        reach = 0.5 * level.exp2()[:, None, None] + 0.5
        cover = (reach - (cells - at[:, None]).abs()).clamp(0, 1).prod(-1)
        curve = self.blend_error if blends else self.level_error
        below = level.detach().floor().long().clamp(max=LEVELS - 2)
        error = torch.lerp(curve[below], curve[below + 1], (level - below)[:, None])
        weight = cover * (-FINER * level[:, None]).exp()
        share = weight / weight.sum(0).clamp(min=1e-12)
        bare = torch.log1p(-cover.clamp(max=1 - 1e-6)).sum(0).exp()
        return ((1 - bare) * (share * error).sum(0) + bare * self.mean_error).mean()


def example(image: torch.Tensor, relevance: torch.Tensor, patch: int, target: Any = None) -> Example:
    """
    Args:
        image: uint8 [C, H, W].
        relevance: [H, W].
        target: the oracle fixation, if there is one.
    """
    scene, _ = GridTopK(1, patch)._scene(image, relevance, None, None, None)
    rows, columns = scene.grid
    pixels = image[None].float()
    pixels = F.pad(pixels, (0, columns * patch - image.shape[-1], 0, rows * patch - image.shape[-2]), mode="replicate")
    mean = pixels.mean((-2, -1), keepdim=True)
    flat = _by_cell(mean.expand_as(pixels), pixels, patch)
    whole, blends = [torch.zeros_like(flat)], [torch.zeros_like(flat)]
    for level in range(1, LEVELS):
        whole.append(_by_cell(_stretched(_pooled(pixels, 2**level), pixels, 2**level), pixels, patch))
        blends.append(_by_cell(_blended(pixels, patch, 2**level), pixels, patch))
    unit = flat.mean().clamp(min=1e-6)
    places = ((0.5, 0.5), None) if target is None else ((0.5, 0.5), None, target)
    return Example(scene.relevance, places, flat / unit, torch.stack(whole) / unit, torch.stack(blends) / unit)


def _by_cell(shown: torch.Tensor, pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """The mean squared difference over each cell, [Hg Wg]."""
    return F.avg_pool2d((shown - pixels).square().mean(1), patch).flatten()


def _pooled(values: torch.Tensor, side: int) -> torch.Tensor:
    return F.avg_pool2d(values, side, ceil_mode=True, count_include_pad=False)


def _stretched(values: torch.Tensor, pixels: torch.Tensor, times: int) -> torch.Tensor:
    """Read bilinearly, `times` as large, and cut to the picture."""
    height, width = pixels.shape[-2:]
    return F.interpolate(values, scale_factor=float(times), mode="bilinear")[..., :height, :width]


def _blended(pixels: torch.Tensor, patch: int, cells: int) -> torch.Tensor:
    """Every square of cells x cells patches shows the mean of its patches, stretched over it."""
    patches = F.pixel_unshuffle(pixels, patch)
    return _stretched(F.pixel_shuffle(_pooled(patches, cells), patch), pixels, cells)
