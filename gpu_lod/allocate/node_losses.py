"""What the nodes of a quadtree lose against their children: the detail that a coarser token does not show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from gpu_lod.allocate.base import Scene, coarser, unit
from gpu_lod.allocate.energy import checked
from gpu_lod.halving import halve_mean

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
    deep, images, rows = root, len(top), top.shape[-2]
    if top.device.type == "cpu":
        deep = min(root, DEPTH)
        images = max(1, AT_ONCE // top[0, 0].numel())
        nodes = 2**deep * patch
        rows = max(1, AT_ONCE // (top.shape[-1] * nodes)) * nodes
    held, parts = [], []
    for some in top.split(images):
        base = unit(some[..., :1, :1])
        bands = [_chain(_Mip.of(unit(band), 1.0, base, patch), deep) for band in some.split(rows, dim=-2)]
        held.append(torch.cat([level.held for level, *_ in bands], dim=-2))
        parts.append([_joined(same, -2) for same in zip(*(below for _, *below in bands), strict=True)])
    chain = [_joined(same, 0) for same in zip(*parts, strict=True)]
    chain += _chain(chain[-1], root - deep)[1:]
    if top.dtype == torch.float32:
        scene.chain[:] = [mip.means for mip in chain if isinstance(mip.stands_for, float)]
    sums = [torch.cat(held), *(mip.held for mip in chain)]
    found = [(coarser(fine, "sum") - coarse).clamp(min=0) for fine, coarse in pairwise(sums)]
    checked(torch.stack([level.sum() for level in found]))
    return found


@dataclass(frozen=True)
class _Mip:
    """A mip level on the nodes' grid, of which every node has P x P texels but at the far edges."""

    means: torch.Tensor
    """[B, C, h, w]"""
    held: torch.Tensor
    """[B, h_l, w_l], the sum of squared differences from the base over each node's pixels."""
    stands_for: tuple[torch.Tensor, torch.Tensor] | float
    """The pixels that a texel stands for, if all stand for as many; else how many rows and how many columns of them the
    texels of each row, and of each column, do: fewer where they reach over an edge."""
    base: torch.Tensor
    """[B, C, 1, 1], a value of each picture: differences of squares lose no digits where it is flat."""
    patch: int

    def rows_and_columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.stands_for, tuple):
            return self.stands_for
        rows, columns = (self.means.new_full((n,), math.sqrt(self.stands_for)) for n in self.means.shape[-2:])
        return rows, columns

    @staticmethod
    def of(
        means: torch.Tensor, stands_for: tuple[torch.Tensor, torch.Tensor] | float, base: torch.Tensor, patch: int
    ) -> _Mip:
        squares = F.mse_loss(means, base.expand_as(means), reduction="none")
        if isinstance(stands_for, tuple):
            squares = squares * (stands_for[0][:, None] * stands_for[1])
        bottom, right = (-n % patch for n in squares.shape[-2:])
        if bottom or right:
            squares = F.pad(squares, (0, right, 0, bottom))
        held = squares.unflatten(-2, (-1, patch)).sum(-2).unflatten(-1, (-1, patch)).sum(-1).sum(1)
        return _Mip(means, held * stands_for if isinstance(stands_for, float) else held, stands_for, base, patch)

    def coarser(self) -> _Mip:
        means, stands_for = self.means, self.stands_for
        # Nodes of the next level have two of these along each side.
        bottom, right = (-n % (2 * self.patch) for n in means.shape[-2:])
        if isinstance(stands_for, float) and not (bottom or right):
            halved = halve_mean(means, means.shape[-2] // 2, means.shape[-1] // 2)
            return _Mip.of(halved, 4 * stands_for, self.base, self.patch)
        if bottom or right:
            means = F.pad(means, (0, right, 0, bottom))
        rows, columns = self.rows_and_columns()
        (row_share, rows), (column_share, columns) = (
            _pairs(F.pad(rows, (0, bottom))),
            _pairs(F.pad(columns, (0, right))),
        )
        means = torch.lerp(means[..., 0::2, :], means[..., 1::2, :], row_share[:, None])
        means = torch.lerp(means[..., 0::2], means[..., 1::2], column_share)
        return _Mip.of(means, (rows, columns), self.base, self.patch)


def _chain(mip: _Mip, levels: int) -> list[_Mip]:
    """A level and so many below it."""
    found = [mip]
    for _ in range(levels):
        found.append(found[-1].coarser())
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
        torch.cat([part.held for part in parts], dim),
        stands_for,
        torch.cat([part.base for part in parts]) if dim == 0 else first.base,
        first.patch,
    )


def _pairs(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of pairs of weights p, q: q / (p + q), and p + q."""
    total = weights[0::2] + weights[1::2]
    return weights[1::2] / total.clamp(min=1), total
