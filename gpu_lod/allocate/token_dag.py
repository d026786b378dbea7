"""Detail where the picture has it, by error bounds that grow towards the root: a tree cut after Nanite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from gpu_lod import checks
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.energy import ROUNDING, relevances
from gpu_lod.allocate.node_losses import losses
from gpu_lod.allocate.scene import Scene, cells_of
from gpu_lod.allocate.tree_cut import Cut, apart, in_a_row, of_parents, tokens_at, tree_cut
from gpu_lod.patch_grid import Pool, coarser
from gpu_lod.uncompiled import as_it_stands

_MOST = 1 - 2**-16
"""How much of a level a token rises at most: a whole one could, by ties, bring it onto a token of the next level."""


@register
class TokenDAG(Allocator):
    """The budgeted tree cut with benefit = relevance x error: no token has a higher one than any node that was split.

    What a node of level l loses against its children is the Laplacian energy of mip level l - 1 over its pixels
    (`losses`); its error is what it loses and what its children lose in turn. The benefit is the same sum with every
    loss times the mean relevance of its node, so it never falls towards the root, and the cut is the one at a
    threshold: all that was split has a higher benefit than all that was not. (Propagating the largest loss alone would
    also keep cuts consistent, but gives parent and child the same bound, and no room to change between them.) What
    rounding to 8 bits would add is added to every loss, so that relevance alone decides where there is nothing to see,
    and a picture of nothing is shared out evenly.

    Continuous: a token of level l, benefit g, parent's benefit G, has come the share (t - g) / (G - g) of the way to
    its parent, t being the threshold, the highest benefit that was not split. Over the last part of the way, `morph`,
    it rises from its own level to that of its parent, which it has reached when its parent is about to be put back (t =
    G), as its siblings have. So as a picture, or relevance, changes, tokens come and go at the level of those that they
    replace, and no level pops; and most tokens are as sharp as the cut made them. Positions stay those of the nodes; so
    footprints of tokens that rose overlap their neighbours, and near the border reach past it, by half a node at most.

    Tokens cover the picture exactly once, but for what rose and for the few detail cells that what is left of the
    budget goes to. Scores are the mean relevance of what a token covers, 1 being the highest of the picture.

    Args:
        morph: the part of the way to its parent over which a token rises, from 0 to 1. 0 reads every token at the level
            of its node, which is the sharpest and pops; 1 is the smoothest, and blurs.
        max_level: level of the coarsest tokens; None lets a single token be the whole picture.

    Source: Karis et al., "Nanite: A Deep Dive" (SIGGRAPH 2021) for bounds that grow towards the root; Hoppe,
        "Smooth View-Dependent Level-of-Detail Control" (1998) for geomorphs; Strugar, "Continuous Distance-Dependent
        Level of Detail for Rendering Heightmaps" (2009) for a morph over the last part of the way.
    """

    needs: ClassVar[tuple[Need, ...]] = ("image", "relevance")
    moves: ClassVar[bool] = True

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        morph: float = 0.3,
        max_level: int | None = None,
    ) -> None:
        super().__init__(budget, patch, pool)
        self.morph = checks.between(morph, "morph", 0.0, 1.0)
        self.max_level = None if max_level is None else checks.integer(max_level, "max_level", at_least=0)

    @as_it_stands
    def errors(self, image: Any) -> tuple[torch.Tensor, ...]:
        """The error of every node, [B, h_l, w_l] a level, finest first: no parent's is below its child's.

        Units: the picture's squared (uint8 over 255), times pixels, over all channels: exactly the sum of squares that
        is lost if the node's pixels are replaced by their means over blocks of 2^l x 2^l. Level 0 loses nothing.
        """
        top = checks.mean_source(image, type(self).__name__, name="image")
        grid = cells_of((top.shape[-2], top.shape[-1]), self.patch)
        scene, batched = self._scene(image, torch.ones(*top.shape[:-3], *grid, device=top.device), None, None, None)
        errors = _bounds(losses(scene), scene)
        return tuple(level if batched else level[0] for level in errors)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        lost = losses(scene)
        relevance = relevances(scene, len(lost))
        rounding = 3 * self.patch**2 * ROUNDING
        weighted = [(loss + rounding) * share for loss, share in zip(lost, relevance[1:], strict=True)]
        benefits = _bounds(weighted, scene)
        cut = tree_cut(benefits[1:], relevance[0], self.budget, self.max_level)
        nodes = [*enumerate(cut.leaves), (0, cut.detail)]
        levels = [*_risen(cut, benefits, self.morph), torch.zeros_like(relevance[0])] if self.morph else None
        return tokens_at(scene, nodes, relevance, self.budget, levels)


def _bounds(lost: Sequence[torch.Tensor], scene: Scene) -> list[torch.Tensor]:
    """From losses of levels 1, 2, ... the sums over all that is below each node, level 0 first."""
    bounds = [torch.zeros_like(scene.relevance)]
    for level in lost:
        bounds.append(level + coarser(bounds[-1], "sum"))
    return bounds


def _risen(cut: Cut, benefits: Sequence[torch.Tensor], morph: float) -> list[torch.Tensor]:
    """The continuous level of each node of each level, for those that are leaves."""
    sizes = [(leaves.shape[1], leaves.shape[2]) for leaves in cut.leaves]
    own, leaf = in_a_row(benefits[: len(sizes)]), in_a_row(cut.leaves)
    threshold = torch.where(leaf, own, 0.0).amax(1, keepdim=True)
    roots = math.prod(sizes[-1])  # they have no parents, and stay where they are
    room = F.pad(of_parents(own, sizes) - own[:, roots:], (roots, 0))
    climbed = threshold - own
    # No quotient that is cut off, or that infinities have a part in, is made: its gradient would be NaN.
    within = (climbed > 0) & (climbed < room * _MOST) & (room < torch.inf)
    share = torch.where(within, climbed, 0.0) / torch.where(within, room, 1.0)
    share = share + ((room > 0) & (climbed >= room * _MOST)).to(share.dtype)
    risen = ((share - (1 - morph)) / morph).clamp(0, _MOST)
    return [level + part for level, part in enumerate(apart(risen, sizes))]
