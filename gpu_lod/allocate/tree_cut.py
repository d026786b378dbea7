"""The budgeted tree cut: best-first refinement of a quadtree as one stable sort, batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Scene, coarser, ordered, places
from gpu_lod.errors import InputError


@dataclass(frozen=True)
class Cut:
    """Nodes of a quadtree that cover the grid exactly once, and detail cells beside them: K together.

    Shape: `leaves[l]` is bool [B, h_l, w_l], level 0 the grid, h_l = ceil(Hg / 2^l); `detail` is bool [B, Hg, Wg].
    """

    leaves: tuple[torch.Tensor, ...]
    detail: torch.Tensor
    """Finest cells that what was left of the budget went to: none of them is a leaf."""


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
    checks.integer(budget, "budget", at_least=1)
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
    gains = _propagated(benefits)
    order_of = [gain.flatten(1) for gain in reversed(gains)]
    split_at = [torch.zeros(batch, h, w, dtype=torch.bool, device=detail.device) for h, w in sizes]
    left = torch.full((batch,), budget - roots, device=detail.device)
    if order_of:
        flat = torch.cat(order_of, dim=1)
        costs = torch.cat([_costs(sizes[level - 1], detail.device) for level in range(top, 0, -1)])
        order = torch.sort(flat, dim=1, descending=True, stable=True).indices
        spent = costs[order].cumsum(1)
        fits = spent <= budget - roots
        split = torch.zeros_like(flat, dtype=torch.bool).scatter(1, order, fits)
        left = left - (costs * split).sum(1)
        parts = split.split([h * w for h, w in reversed(sizes[1:])], dim=1)
        for level, part in zip(range(top, 0, -1), parts, strict=True):
            split_at[level] = part.unflatten(1, sizes[level])
    leaves = []
    for level, size in enumerate(sizes):
        reached = torch.ones_like(split_at[level]) if level == top else children(split_at[level + 1], size)
        leaves.append(reached & ~split_at[level])
    return Cut(tuple(leaves), _left_over(detail, leaves[0], left))


def _numbers(value: torch.Tensor, name: str) -> torch.Tensor:
    """Integers have no -inf, which the propagation pads with."""
    found = checks.real(value, name)
    checks.no_nan(found, name)
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
    return found


def _propagated(benefits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Finest first: each at least as high as what is below it."""
    gains: list[torch.Tensor] = []
    for own in benefits:
        gains.append(own if not gains else torch.maximum(own, coarser(gains[-1], "max")))
    return gains


def _costs(below: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Children less one of each node above a level of this size, row by row."""
    height, width = (-(-n // 2) for n in below)
    costs = torch.full((height, width), 3, device=device)
    for side, n in zip((costs.T, costs), below, strict=True):
        if n % 2:
            side[:, -1] = (side[:, -1] - 1) // 2
    return costs.flatten()


def children(split: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """What nodes have, on the nodes of the next finer level."""
    batch, height, width = split.shape
    twice = split[:, :, None, :, None].expand(-1, -1, 2, -1, 2).reshape(batch, 2 * height, 2 * width)
    return twice[:, : size[0], : size[1]]


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3] and scores [B, K] of nodes, high scores first; of equal ones in the order in which they come.

    Args:
        nodes: a level of the quadtree, and where it is taken, bool [B, h_l, w_l]; K for each image in all.
        values: the score of each node, [B, h_l, w_l] a level, finest first.
        levels: the level that each node is read at, [B, h_l, w_l] for each entry of `nodes`; None is its own.
    """
    taken = torch.cat([mask.flatten(1) for _, mask in nodes], dim=1)
    index = places(taken, budget)
    scores, order = ordered(torch.cat([values[level].flatten(1) for level, _ in nodes], dim=1).gather(1, index), budget)
    index = index.gather(1, order)
    starts = [0, *accumulate(mask[0].numel() for _, mask in nodes)]
    table = torch.tensor([starts[:-1], [level for level, _ in nodes]], device=scene.device)
    entry = torch.bucketize(index, table[0, 1:], right=True)
    first, level = table[:, entry]
    sites = scene.sites(level, index - first)
    if levels is not None:
        sites[..., 2] = torch.cat([level.flatten(1) for level in levels], dim=1).gather(1, index)
    return sites, scores
