"""What allocators that look at the picture share."""

from __future__ import annotations

import torch

from gpu_lod import checks
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError
from gpu_lod.feature_channels import luma_of
from gpu_lod.patch_grid import coarser

ROUNDING = 1 / (12 * 255**2)
"""Variance of a pixel's error when it is stored in 8 bits. Added to energies, it keeps what is below it, noise and the
last bits of arithmetic, from deciding anything: places without structure rank by their relevance."""


def luma(scene: Scene) -> torch.Tensor:
    """[B, 1, H, W], the picture's luma."""
    return luma_of(scene.top)


def checked(energy: torch.Tensor) -> torch.Tensor:
    """The energy itself, if it is finite."""
    if checks.readable(energy) and not torch.isfinite(energy).all():
        raise InputError(
            "the energy of the picture is not finite: it holds NaN, infinities, or values that are too large. Repair "
            "it with torch.nan_to_num, and scale it to [0, 1]."
        )
    return energy


def over_patches(values: torch.Tensor, scene: Scene, level: int, step: int, size: tuple[int, int]) -> torch.Tensor:
    """Means [..., h_l, w_l] over the patches of the nodes of a level, shifted inward at the far edges as in
    `Scene.sites`, of values [..., h, w] that stand for step x step pixels each. A value at the end of a patch counts by
    as much of it as lies inside.

    Args:
        size: (height, width) in pixels of what is averaged: the picture, or as much of it as has values.
    """
    for dim, cells, extent in ((-2, scene.grid[0], size[0]), (-1, scene.grid[1], size[1])):
        node = scene.patch * 2**level
        count = -(-cells // 2**level)
        if count * node == extent == values.shape[dim] * step and node % step == 0:
            values = values.unflatten(dim, (count, node // step)).mean(dim)  # whole patches of whole values
            continue
        side = min(node, extent)
        starts = torch.arange(count, device=values.device)[:, None] * node
        starts = starts.clamp(max=extent - side)
        places = starts // step + torch.arange((side - 1) // step + 2, device=values.device)
        inside = torch.minimum((places + 1) * step, starts + side) - torch.maximum(places * step, starts)
        shares = inside.clamp(min=0).to(values.dtype) / side
        parts = values.index_select(dim, places.clamp(max=values.shape[dim] - 1).flatten()).unflatten(dim, places.shape)
        values = (parts * (shares[..., None] if dim == -2 else shares)).sum(dim)
    return values


def relevances(scene: Scene, top: int) -> list[torch.Tensor]:
    """Mean relevance of the nodes of levels 0 to `top`, over the cells that each covers: [B, h_l, w_l], from 0 to 1."""
    values = scene.amounts()
    total = values / values.amax((1, 2), keepdim=True)
    levels, count, cells = [total], None, 1
    for _ in range(top):
        if count is None and (total.shape[1] % 2 or total.shape[2] % 2):
            count = torch.full_like(total[:1], cells)
        total = coarser(total, "sum")
        if count is None:  # all nodes cover as many
            cells *= 4
            levels.append(total / cells)
        else:
            count = coarser(count, "sum")
            levels.append(total / count)
    return levels
