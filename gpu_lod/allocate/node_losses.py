"""What the nodes of a quadtree lose against their children: the detail that a coarser token does not show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpu_lod import by_kernel, checks
from gpu_lod.allocate.energy import checked
from gpu_lod.allocate.scene import Scene
from gpu_lod.dispatch import needs_grad
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels.losses import losses as levels_of
from gpu_lod.kernels.sources import ELEMENTS
from gpu_lod.saliency import unit

AT_ONCE = 2**20
"""Pixels that a CPU looks at at once: fresh memory for many more costs it more than the sums do; so do small bands."""
DEPTH = 2
"""Levels that it makes of them before it joins what is left."""


def losses(scene: Scene) -> list[torch.Tensor]:
    """What the nodes of levels 1, 2, ... up to the root lose against their children, [B, h_l, w_l] each.

    It is the Laplacian energy of mip level l - 1: the squared differences of its texels from the texel of level l that
    they are averaged to, summed over channels and the node's texels, each times the pixels that it stands for. That is
    what the sum of squares falls by. The chain is the mean mip chain on the nodes' own grid, P x P texels a node, that
    is what the tokens see; a `Pyramid`'s levels are those wherever its sides halve evenly, and elsewhere do not end
    where nodes do. Texels that reach over the edge average what is inside. As far as it is the picture's own chain, it
    is left in `scene.chain`.
    """
    top, patch = scene.top, scene.patch
    root = (max(scene.grid) - 1).bit_length()
    if root == 0:
        return []
    if top.dtype in ELEMENTS and not needs_grad(top) and by_kernel.usable(top):
        device = kernels.device_of(top)
        by_node = by_kernel.attempt(top.device, lambda: levels_of(device, top, patch, root))
        if by_node is not None:
            return _finite(by_node)
    deep, images, rows = root, len(top), top.shape[-2]
    if top.device.type == "cpu":
        deep = min(root, DEPTH)
        images = max(1, AT_ONCE // top[0, 0].numel())
        nodes = 2**deep * patch
        rows = max(1, AT_ONCE // (top.shape[-1] * nodes)) * nodes
    parts = []
    for some in _runs(top, images, 0):
        bands = [_chain(_Mip(unit(band), band.new_empty(0), 1.0, patch), deep) for band in _runs(some, rows, -2)]
        parts.append([_joined(same, -2) for same in zip(*bands, strict=True)])
    chain = [_joined(same, 0) for same in zip(*parts, strict=True)]
    chain += _chain(chain[-1], root - deep)
    if top.dtype == torch.float32:
        scene.chain[:] = [mip.means for mip in chain if isinstance(mip.stands_for, float)]
    return _finite([mip.lost for mip in chain])


def _runs(values: torch.Tensor, count: int, dim: int) -> Iterator[torch.Tensor]:
    """`values.split(count, dim)`, whose views torch lets no gradient pass once the picture is written to."""
    there = values.shape[dim]
    return (values.narrow(dim, first, min(count, there - first)) for first in range(0, there, count))


def _finite(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same, if their sums are."""
    if checks.readable(found[0]):
        checked(torch.stack([level.sum() for level in found]))
    return found


@dataclass(frozen=True)
class _Mip:
    """A mip level on the nodes' grid, of which every node has P x P texels but at the far edges."""

    means: torch.Tensor
    """[B, C, h, w]"""
    lost: torch.Tensor
    """[B, h_l, w_l], what its nodes lose against their children; level 0 has no such thing."""
    stands_for: tuple[torch.Tensor, torch.Tensor] | float
    """The pixels that a texel stands for, if all stand for as many; else how many rows and how many columns of them the
    texels of each row, and of each column, do: fewer where they reach over an edge."""
    patch: int

    def rows_and_columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.stands_for, tuple):
            return self.stands_for
        rows, columns = (self.means.new_full((n,), math.sqrt(self.stands_for)) for n in self.means.shape[-2:])
        return rows, columns

    def coarser(self) -> _Mip:
        """By sums and differences of rows, then of columns. The squared differences of two values from their mean, each
        of a weight p and q, add up to p q / (p + q) times the square of their difference: nothing cancels."""
        means, patch = self.means, self.patch
        # Nodes of the next level have two of these along each side.
        bottom, right = (-n % (2 * patch) for n in means.shape[-2:])
        if isinstance(self.stands_for, float) and not (bottom or right):
            upper, lower = means[..., 0::2, :], means[..., 1::2, :]
            lost = _of_nodes(_squared(upper, lower), patch, 2 * patch)
            both = upper + lower
            first, second = both[..., 0::2], both[..., 1::2]
            lost += _of_nodes(_squared(first, second), patch, patch) / 2
            means = (first + second).mul_(0.25)
            return _Mip(means, lost.sum(1).mul_(self.stands_for / 2), 4 * self.stands_for, patch)
        if bottom or right:
            means = F.pad(means, (0, right, 0, bottom))
        tall, wide = self.rows_and_columns()
        rows, columns = _Pairs.of(F.pad(tall, (0, bottom))), _Pairs.of(F.pad(wide, (0, right)))
        upper, lower = means[..., 0::2, :], means[..., 1::2, :]
        lost = _of_nodes(_squared(upper, lower) * (rows.apart[:, None] * columns.each), patch, 2 * patch)
        means = torch.lerp(upper, lower, rows.share[:, None])
        first, second = means[..., 0::2], means[..., 1::2]
        lost += _of_nodes(_squared(first, second) * (rows.total[:, None] * columns.apart), patch, patch)
        return _Mip(torch.lerp(first, second, columns.share), lost.sum(1), (rows.total, columns.total), patch)


@dataclass(frozen=True)
class _Pairs:
    """Weights along a side, two by two: p and q."""

    each: torch.Tensor
    total: torch.Tensor
    """p + q"""
    share: torch.Tensor
    """q / (p + q)"""
    apart: torch.Tensor
    """p q / (p + q)"""

    @staticmethod
    def of(weights: torch.Tensor) -> _Pairs:
        first, second = weights[0::2], weights[1::2]
        total = first + second
        share = second / total.clamp(min=1)
        return _Pairs(weights, total, share, first * share)


def _squared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squares of differences, in one pass."""
    return F.mse_loss(a, b, reduction="none")


def _of_nodes(values: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Sums over blocks. Rows first: whole rows vectorise."""
    return values.unflatten(-2, (-1, height)).sum(-2).unflatten(-1, (-1, width)).sum(-1)


def _chain(mip: _Mip, levels: int) -> list[_Mip]:
    """So many levels below one."""
    found: list[_Mip] = []
    for _ in range(levels):
        found.append((found[-1] if found else mip).coarser())
    return found


def _joined(parts: Sequence[_Mip], dim: int) -> _Mip:
    """One level of images one after the other (dim 0), or of bands of rows (-2), all but the last of whole nodes."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    stands_for = first.stands_for
    if any(isinstance(part.stands_for, tuple) for part in parts):
        rows, columns = zip(*(part.rows_and_columns() for part in parts), strict=True)
        stands_for = rows[0] if dim == 0 else torch.cat(rows), columns[0]
    return _Mip(
        torch.cat([part.means for part in parts], dim),
        torch.cat([part.lost for part in parts], dim),
        stands_for,
        first.patch,
    )
