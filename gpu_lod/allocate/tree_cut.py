"""The budgeted tree cut: best-first refinement of a quadtree as one stable sort, batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from gpu_lod import checks
from gpu_lod.allocate.ordering import ordered, places
from gpu_lod.allocate.scene import TABLE, Scene, sites_of
from gpu_lod.cached import constant, known, numbers
from gpu_lod.errors import InputError
from gpu_lod.patch_grid import coarser
from gpu_lod.shapes import summary
from gpu_lod.uncompiled import as_it_stands


@dataclass(frozen=True, repr=False)
class Cut:
    """Nodes of a quadtree that cover the grid exactly once, and detail cells beside them: K together.

    Shape: `leaves[l]` is bool [B, h_l, w_l], level 0 the grid, h_l = ceil(Hg / 2^l); `detail` is bool [B, Hg, Wg].
    """

    leaves: tuple[torch.Tensor, ...]
    detail: torch.Tensor
    """Finest cells that what was left of the budget went to: none of them is a leaf."""

    def __repr__(self) -> str:
        return summary(self)


@as_it_stands
def tree_cut(benefits: Sequence[torch.Tensor], detail: torch.Tensor, budget: int, max_level: int | None = None) -> Cut:
    """Split the nodes of a quadtree in the order of their benefit for as long as the budget lasts.

    Shape: `benefits[l - 1]` is [B, h_l, w_l], the benefit of splitting each node of level l = 1, 2, ... up to the root
        (1 x 1), or to `max_level` at least; detail is [B, Hg, Wg]. Any real numbers, infinities too.
    Convention: node (l, y, x) covers cells [y 2^l, (y+1) 2^l) x [x 2^l, (x+1) 2^l) of the grid, clipped, and has 1 to 4
        children; splitting it costs as many tokens as it has children, less one. Benefits are max-propagated up the
        tree first, so that no parent ranks below its child. Inner nodes are sorted by benefit, coarse before fine, row
        by row; the longest prefix is split whose costs fit K less the roots. That is what a priority queue on the
        propagated benefit does that stops at the first node it cannot afford. What is left goes to the best cells, by
        `detail`, that are not at level 0 yet.

    Args:
        budget: K.
        max_level: the level of the roots; None is the level with a single one.

    Raises:
        InputError: more roots than K, or a K larger than the number of cells; shapes that are no quadtree's; NaN.

    Source: best-first refinement as in Luebke et al., "Level of Detail for 3D Graphics" (2003), section 4.3.
    """
    budget = checks.integer(budget, "budget", at_least=1)
    detail = _numbers(detail, "detail")
    if detail.ndim != 3 or 0 in detail.shape[1:]:
        raise InputError(f"detail is {tuple(detail.shape)}; expected [B, Hg, Wg], a number for each cell of the grid.")
    batch, height, width = detail.shape
    root = (max(height, width) - 1).bit_length()
    top = root if max_level is None else min(checks.integer(max_level, "max_level", at_least=0), root)
    sizes = [(-(-height // 2**level), -(-width // 2**level)) for level in range(root + 1)]
    benefits = _checked(benefits, detail, sizes, top)
    sizes = sizes[: top + 1]
    roots = sizes[top][0] * sizes[top][1]
    if budget > height * width:
        raise InputError(
            f"the budget is {budget}, and the grid of {height} x {width} has {height * width} cells. Use a larger "
            "image, smaller patches, or a smaller budget."
        )
    if roots > budget:
        raise InputError(
            f"{roots} roots of level {top} are more than the budget of {budget}. Raise max_level, or the budget."
        )
    reached = torch.ones(batch, roots, dtype=torch.bool, device=detail.device)
    left = torch.full((batch,), budget - roots, device=detail.device)
    if top == 0:
        return Cut((reached.view_as(detail),), _left_over(detail, reached.view_as(detail), left))
    gains = in_a_row(_propagated(benefits))
    costs = constant(detail.device, _costs, tuple(sizes)).expand_as(gains)
    order = torch.sort(gains, dim=1, descending=True, stable=True).indices
    fits = costs.gather(1, order).cumsum(1) <= budget - roots
    split = torch.zeros_like(fits).scatter_(1, order, fits)
    left = left - (costs * split).sum(1)
    reached = torch.cat([reached, of_parents(split, sizes)], dim=1)
    inner, cells = reached.split([split.shape[1], height * width], dim=1)
    leaves = tuple(apart(torch.cat([inner & ~split, cells], dim=1), sizes))
    return Cut(leaves, _left_over(detail, leaves[0], left))


def _numbers(value: torch.Tensor, name: str) -> torch.Tensor:
    """Integers have no -inf, which the propagation pads with."""
    found = checks.real(value, name)
    return found if found.is_floating_point() else found.double()


def _checked(
    benefits: Sequence[torch.Tensor], detail: torch.Tensor, sizes: Sequence[tuple[int, int]], top: int
) -> list[torch.Tensor]:
    """Those of levels 1 to `top`, of a tree whose levels have these sizes."""
    if not isinstance(benefits, (list, tuple)) or not top <= len(benefits) < len(sizes):
        count = str(top) if top == len(sizes) - 1 else f"{top} to {len(sizes) - 1}"
        came = f"{len(benefits)} levels" if isinstance(benefits, (list, tuple)) else f"a {type(benefits).__name__}"
        raise InputError(
            f"benefits are {came}; expected a list of {count} tensors, one for each level above a grid of {sizes[0]}."
        )
    found = [_numbers(values, f"benefits[{index}]") for index, values in enumerate(benefits[:top])]
    for index, values in enumerate(found):
        if tuple(values.shape) != (len(detail), *sizes[index + 1]):
            raise InputError(
                f"benefits[{index}] is {tuple(values.shape)}; expected {(len(detail), *sizes[index + 1])}, the nodes "
                f"of level {index + 1} above a grid of {sizes[0]}."
            )
        checks.same_device(detail, values, f"benefits[{index}]", "detail")
    # One look at all of them, as each asks the device.
    every = [values.detach().flatten(1) for values in (detail, *found)] if checks.readable(detail) else []
    if every and torch.isnan(torch.cat(every, dim=1)).any():
        checks.no_nan(detail, "detail")
        for index, values in enumerate(found):
            checks.no_nan(values, f"benefits[{index}]")
    return found


def _propagated(benefits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Finest first: each at least as high as what is below it."""
    gains: list[torch.Tensor] = []
    for own in benefits:
        gains.append(own if not gains else torch.maximum(own, coarser(gains[-1], "max")))
    return gains


def in_a_row(levels: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, N] of levels [B, h_l, w_l], finest first: all their nodes, coarse before fine, row by row."""
    return torch.cat([level.flatten(1) for level in reversed(levels)], dim=1)


def apart(nodes: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The levels, of such sizes, that `in_a_row` took, finest first."""
    parts = nodes.split([height * width for height, width in reversed(sizes)], dim=1)
    return [part.unflatten(1, size) for part, size in zip(reversed(parts), sizes, strict=True)]


def of_parents(nodes: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Of nodes in a row, what the parent of each has that has one: of all below the roots."""
    return nodes.index_select(1, constant(nodes.device, _parents, tuple(sizes)))


def _parents(sizes: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Of the nodes of a quadtree's levels in a row: the places of the parents, for all below the roots."""
    found, start = [np.zeros(0, dtype=np.int64)], 0
    for (height, width), (rows, columns) in pairwise(reversed(sizes)):
        found.append(start + _own(width, rows, columns).ravel())
        start += height * width
    return torch.from_numpy(np.concatenate(found))


def _costs(sizes: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The children less one, for all above the cells."""
    found = [np.zeros(0, dtype=np.int64)]
    for (_, width), (rows, columns) in pairwise(reversed(sizes)):
        found.append(np.bincount(_own(width, rows, columns).ravel()) - 1)
    return torch.from_numpy(np.concatenate(found))


def _own(width: int, rows: int, columns: int) -> np.ndarray:
    """The place in its level, `width` wide, of the parent of each node of the next."""
    return (np.arange(rows) // 2 * width)[:, None] + np.arange(columns) // 2


def _left_over(detail: torch.Tensor, reached: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Where the best cells are that are not reached, `left` [B] of them; equal ones by their place. At most 2: three
    more tokens split any node."""
    values = detail.clamp(min=torch.finfo(detail.dtype).min).masked_fill(reached, -math.inf).flatten(1)
    taken = torch.zeros_like(values, dtype=torch.bool)
    for count in (1, 2):
        index = values.argmax(1, keepdim=True)
        taken.scatter_(1, index, left[:, None] >= count)
        values.scatter_(1, index, -math.inf)
    return taken.view_as(detail)


def tokens_of(scene: Scene, cut: Cut, values: Sequence[torch.Tensor], budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3] and scores [B, K] of a cut, high scores first; of equal ones fine before coarse, row by row.

    Args:
        values: the score of each node, [B, h_l, w_l] a level, finest first; detail cells have level 0's.
    """
    return tokens_at(scene, [*enumerate(cut.leaves), (0, cut.detail)], values, budget)


def tokens_at(
    scene: Scene,
    nodes: Sequence[tuple[int, torch.Tensor]],
    values: Sequence[torch.Tensor],
    budget: int,
    levels: Sequence[torch.Tensor] | None = None,
    sites: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3] and scores [B, K] of nodes, high scores first; of equal ones in the order in which they come.

    Args:
        nodes: a level of the quadtree, and where it is taken, bool [B, h_l, w_l]; K for each image in all.
        values: the score of each node, [B, h_l, w_l] a level, finest first.
        levels: the level that each node is read at, [B, h_l, w_l] for each entry of `nodes`; None is its own.
        sites: the site of each node, [B, h_l w_l, 3] for each entry of `nodes`; None is where the node lies.
    """
    taken = torch.cat([mask.flatten(1) for _, mask in nodes], dim=1)
    index = places(taken, budget)
    scores, order = ordered(torch.cat([values[level].flatten(1) for level, _ in nodes], dim=1).gather(1, index), budget)
    index = index.gather(1, order)
    if sites is not None:
        return torch.cat(list(sites), dim=1).gather(1, index[..., None].expand(-1, -1, 3)), scores
    table = None
    if scene.grid[0] * scene.grid[1] <= TABLE:
        table = known(scene.device, sites_of, scene.size, scene.patch, tuple(level for level, _ in nodes))
    if table is not None:
        found = table[index]
    else:
        starts = [0, *accumulate(mask[0].numel() for _, mask in nodes)]
        entries = numbers((tuple(starts[:-1]), tuple(level for level, _ in nodes)), torch.int64, scene.device)
        first, level = entries[:, torch.bucketize(index, entries[0, 1:], right=True)]
        found = scene.sites(level, index - first)
    if levels is not None:
        found[..., 2] = torch.cat([level.flatten(1) for level in levels], dim=1).gather(1, index)
    return found, scores
