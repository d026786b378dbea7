"""The densest even packing: a lattice as close to hexagonal as K allows."""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch

from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.ordering import scored
from gpu_lod.allocate.scene import Scene
from gpu_lod.cached import constant


@register
class Hexagonal(Allocator):
    """K patches on a lattice over the whole picture, whatever is in it: of all lattices that have exactly K sites in a
    picture that goes on periodically, the one whose nearest sites are farthest apart; of equal ones that of the fewest
    rows. It is symmetric about the picture's middle. (A hexagonal grid with one site more in some of its rows, for a K
    that does not fit, loses its stagger along these.)

    So every site has the same neighbours, at the same distances, as far as they lie inside. Where K allows that is the
    hexagonal grid itself, rows shifted by half a step in turn and 7% more between neighbours than in a square one; for
    most K it is a nearly hexagonal one, tilted. For K from 16 to 399 in pictures of 1:1 and 2:1 the least distance is
    97% of the hexagonal grid's in the median, 86% at least, and nowhere below that of `Downsample`.

    Each is read at the level at which its P samples span the longest side, along x or y, of the triangles that
    neighbours make (on the hexagonal grid the larger of a row's step and the distance of rows): no gap is left between
    them. Along the border some stay open, where patches reach past it: 1 to 3% of the picture at K = 273, up to 11% at
    K = 17.

    Scores, and with them the order, are the relevance that was given, of the grid's cells that the sites are in; equal
    ones, and all without relevance, which score 1, go row by row.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        sites = constant(scene.device, _sites, self.budget, *scene.size, self.patch)
        return scored(scene, sites.expand(scene.batch, -1, -1))


def _sites(count: int, height: int, width: int, patch: int) -> torch.Tensor:
    """[K, 3]"""
    rows, slant, side = _lattice(count, height, width)
    columns = count // rows
    row = torch.arange(rows, dtype=torch.float64, device="cpu")[:, None]
    column = torch.arange(columns, dtype=torch.float64, device="cpu")
    across = (row - (rows - 1) / 2) * slant / rows + column
    # Both are symmetric about the middle of the picture; one may have sites on its very edge.
    x = max(((across + shift) / columns % 1 for shift in (0.5, 0.0)), key=lambda x: -float((x - 0.5).abs().max()))
    y = ((row + 0.5) / rows).expand_as(x)
    level = torch.full_like(x, math.log2(max(1.0, side / patch)))
    return torch.stack([x.sort(dim=1).values, y, level], dim=-1).flatten(0, 1).float()


@functools.lru_cache(maxsize=256)
def _lattice(count: int, height: int, width: int) -> tuple[int, int, float]:
    """Rows, how many of as many parts of a step each is shifted from the one before, and the side of squares about the
    sites that cover the plane."""
    heights = [rows for rows in range(1, count + 1) if count % rows == 0]
    # The other slants mirror these.
    choices = [(rows, torch.arange(rows // 2 + 1, dtype=torch.float64, device="cpu")) for rows in heights]
    slants = torch.cat([slants for _, slants in choices])
    rows = torch.cat([torch.full_like(slants, rows) for rows, slants in choices])
    step, zero = width * rows / count, torch.zeros_like(rows)
    long, short = torch.stack([step, zero], dim=1), torch.stack([step * slants / rows, height / rows], dim=1)
    while True:  # Lagrange's reduction, of all of them at once
        swapped = (long.square().sum(1) < short.square().sum(1))[:, None]
        long, short = torch.where(swapped, short, long), torch.where(swapped, long, short)
        times = ((long * short).sum(1) / short.square().sum(1) * (1 - 1e-12)).round()
        if not times.any():
            break
        long = long - times[:, None] * short
    steps = torch.stack([long, short, long + short, long - short], dim=1)
    # In a narrow picture the next period may be nearer than any other site, and is outside.
    there = (steps.abs() < steps.new_tensor([width, height]) * (1 - 1e-9)).all(2)
    least = torch.where(there, steps.norm(dim=2), math.inf).amin(1)
    best = int((least >= least.max() * (1 - 1e-9)).long().argmax())
    long, short = long[best], short[best]
    third = min(long + short, long - short, key=lambda step: float(step.norm()))
    side = float(torch.stack([long, short, third]).abs().max())
    return int(rows[best]), int(slants[best]), side
