"""Several glances: fixations with inhibition of return, and a second glance only for who needs one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_lod import checks, operators, precision
from gpu_lod.allocate import Allocator, Downsample, FoveatedPyramid
from gpu_lod.allocate.fixations import asked
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError
from gpu_lod.gather_patches import gather_patches
from gpu_lod.pyramid import Pyramid
from gpu_lod.shapes import summary
from gpu_lod.token_set import TokenSet
from gpu_lod.uncompiled import as_it_stands


@as_it_stands
@precision.in_full
def glances(
    allocator: Allocator,
    image: torch.Tensor | Pyramid | None = None,
    relevance: torch.Tensor | None = None,
    count: int = 2,
    query: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    *,
    radius: float = 0.15,
    inhibition: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    bias: float = 0.0,
) -> tuple[TokenSet, ...]:
    """What an allocator takes at one fixation after the other, no site twice: `count` token sets of its budget each.

    Shape: as a call of the allocator takes and gives them.
    Convention: fixations are `find_fixations` of the relevance on the grid, by the same radius and inhibition, in parts
        of the picture. Before the second glance and every later one, relevance within the radius of the fixations so
        far is inhibited: what it has above the map's least value but -inf is multiplied by 1 - inhibition (inf counts
        as the largest number there; -inf stays). The allocator chooses by that, about its fixation if it takes one. A
        site that an earlier glance has already gives way to the most relevant level-0 patch that no glance has, whose
        score is its relevance. Each glance is ordered by score.

    Args:
        radius: in units of the longer side.
        inhibition: 1 is complete, 0 none.
        mean, std, bias: as an allocator takes them.

    Raises:
        InputError: an allocator that blends, whose tokens have no site of their own; more tokens in all than level-0
            patches; an inhibition outside [0, 1]; and what the allocator raises.

    Source: Koch and Ullman (1985) for inhibition of return; Mnih et al., "Recurrent Models of Visual Attention" (2014).
    """
    count = checks.integer(count, "count", at_least=1)
    scene, batched = _scene(allocator, image, relevance, query, labels)
    _room(scene, count * allocator.budget)
    chosen = _successive(allocator, scene, count, radius, inhibition, scene.relevance.new_zeros(scene.batch, 0, 3))
    whole = _tokens(scene, batched, allocator.patch, chosen, mean, std, bias)
    return tuple(_part(whole, i * allocator.budget, (i + 1) * allocator.budget) for i in range(count))


def _spread_out(attention: torch.Tensor) -> torch.Tensor:
    """[B, N], checked but for values."""
    values = checks.dense(attention, "attention")
    if values.ndim < 2 or not values.numel():
        raise InputError(f"attention is {tuple(values.shape)}; expected [B, N] or [B, Hg, Wg].")
    return values.flatten(1)


def _of_each(attention: torch.Tensor) -> torch.Tensor:
    spread = _spread_out(attention)
    return spread.new_empty(len(spread), dtype=torch.float32)


@operators.function(_of_each)
def attention_entropy(attention: torch.Tensor) -> torch.Tensor:
    """How spread attention is: its entropy over that of an even spread, 0 for a single place, 1 for all alike.

    Shape: [B, ...] gives [B]: attention over tokens [B, N] (`attention_received`), or relevance [B, Hg, Wg].
    Units: any, as long as none is below 0: each picture's are divided by their sum. All 0 counts as even. Gradients are
        finite: at a share of 0, where the slope is not, it counts as 0.

    Raises:
        InputError: values below 0, infinite or NaN, or nothing to spread over.
    """
    flat = _spread_out(attention).double()
    if not bool(((flat >= 0) & (flat < math.inf)).all()):
        raise InputError("attention holds values below 0, infinite or NaN; expected weights. Take a softmax of scores.")
    there = flat.shape[1]
    total = flat.sum(1, keepdim=True)
    share = torch.where(total > 0, flat / total.clamp(min=torch.finfo(torch.float64).tiny), 1 / there)
    # Of a share of 0 the entropy is 0 and its slope infinite: such a share is left as it is.
    some = share > 0
    spread = torch.special.entr(torch.where(some, share, 1.0)).where(some, 0.0)
    return (spread.sum(1) / math.log(max(there, 2))).clamp(0, 1).float()


class Glanced(NamedTuple):
    """The tokens of two glances, and who bought the second. Shapes are the same whoever did."""

    tokens: TokenSet
    """Those of the first glance, then those of the second, each by score. Where the second was not bought, its places
    are blank: sites in the middle of the picture, scores and patches of 0."""
    bought: torch.Tensor
    """bool [B]"""
    entropy: torch.Tensor
    """fp32 [B], in [0, 1]"""
    base: int
    """How many tokens are the first glance's."""

    def __repr__(self) -> str:
        return summary(self)

    @property
    def mask(self) -> torch.Tensor:
        """bool [B, base + more]: the tokens that count. Mask the others out of attention, or leave them by `ragged`."""
        places = torch.arange(self.tokens.budget, device=self.bought.device)
        return (places < self.base) | self.bought[..., None]

    @as_it_stands
    def ragged(self) -> list[TokenSet]:
        """One image's tokens each, base or base + more of them."""
        batch = (
            [self.tokens] if self.tokens.sites.ndim == 2 else [_image(self.tokens, i) for i in range(len(self.bought))]
        )
        counts = torch.where(self.bought, self.tokens.budget, self.base).view(-1).tolist()
        return [_part(tokens, 0, count) for tokens, count in zip(batch, counts, strict=True)]


torch.serialization.add_safe_globals([Glanced])  # torch.load's weights_only


class Glances(nn.Module):
    """A coarse glance, and a fine one only where the coarse one's attention is undecided.

    A picture buys more if the entropy of its attention (`attention_entropy`) is above the threshold. The second glance
    is chosen and read for those pictures alone, no site twice, and shapes are fixed all the same: a mask says which
    tokens count. Attention decides whether a picture is looked at again, and relevance where: its saliency, if none is
    given. `relevance_map(attention, coarse, size)` has the second glance go where the first attended. (On a GPU, who
    buys is read on the host, which waits for the attention.) It is a torch module, whose parameters are those of
    allocators that learn.

        look = Glances(256, 128)
        coarse = look.first(image)                        # [B, 256]
        attention = ...                                   # [B, 256], from an encoder that reads them
        tokens, bought, *_ = look(image, relevance, attention)

    Args:
        base: tokens of the first glance, or its allocator; a number is `Downsample`: even over the whole picture. One
            that needs no relevance gets none: its tokens are those of `first`, in their order, whatever is given.
        more: tokens of the second, or its allocator; a number is `FoveatedPyramid`.
        threshold: in [0, 1]; 1 never buys, and below 0 all do. How spread attention is differs between encoders: take a
            quantile of entropies on pictures of your own, which is the share that does not buy.
        patch: P, where numbers are given.

    Raises:
        InputError: allocators of different patches; a threshold that is no number; in a call, allocators that blend.
    """

    __call__: Callable[..., Glanced]

    def __init__(
        self, base: int | Allocator = 256, more: int | Allocator = 128, threshold: float = 0.9, patch: int = 14
    ) -> None:
        super().__init__()
        self.base = base if isinstance(base, Allocator) else Downsample(base, patch)
        self.more = more if isinstance(more, Allocator) else FoveatedPyramid(more, patch)
        self.threshold = checks.number(threshold, "threshold")
        if self.base.patch != self.more.patch:
            raise InputError(
                f"the first glance has patches of {self.base.patch} and the second of {self.more.patch}; expected one "
                "size."
            )

    def first(
        self,
        image: torch.Tensor | Pyramid | None = None,
        relevance: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bias: float = 0.0,
    ) -> TokenSet:
        """The coarse glance alone."""
        if relevance is not None and "relevance" not in self.base.needs:
            relevance = torch.ones_like(checks.dense(relevance, "relevance"))
        return self.base(image, relevance, self._asked(query), mean=mean, std=std, bias=bias)

    def _asked(self, query: torch.Tensor | None) -> torch.Tensor | None:
        """The query may be the second glance's alone."""
        return query if "query" in self.base.needs + self.base.takes else None

    def extra_repr(self) -> str:
        parts = [
            f"{name}={part!r}"
            for name, part in (("base", self.base), ("more", self.more))
            if not isinstance(part, nn.Module)
        ]
        return ", ".join([*parts, f"threshold={self.threshold}"])

    @as_it_stands
    @precision.in_full
    def forward(
        self,
        image: torch.Tensor | Pyramid | None = None,
        relevance: torch.Tensor | None = None,
        attention: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bias: float = 0.0,
    ) -> Glanced:
        """Both glances.

        Shape: as a call of an allocator takes them; attention [B, N], over whatever was attended to; without B for an
            unbatched image.

        Args:
            attention: of the coarse pass; None takes the relevance on the grid instead.
            mean, std, bias: as an allocator takes them.
        """
        scene, batched = _scene(self.base, image, relevance, self._asked(query), None)
        if "relevance" not in self.base.needs:
            scene = replace(scene, relevance=torch.ones_like(scene.relevance))
        # Saliency is dear: where attention decides, it is taken of those that buy, and a stand-in has the rest checked.
        later = relevance is None and attention is not None
        even = scene.relevance if batched else scene.relevance[0]
        fine, _ = _scene(self.more, image, even if later else relevance, query, None)
        _room(scene, self.base.budget + self.more.budget)
        if attention is None:
            entropy = attention_entropy(fine.amounts())
        else:
            attention = checks.dense(attention, "attention")
            entropy = attention_entropy(attention if batched else attention[None])
            if len(entropy) != scene.batch:
                raise InputError(f"attention is {tuple(attention.shape)}; expected [{scene.batch}, N].")
        bought = (entropy > self.threshold).to(scene.device)
        sites, scores, *_ = self.base.checked(scene, self.base.choose(scene))
        first = _tokens(scene, batched, self.base.patch, [(sites, scores)], mean, std, bias)
        second = _blank(first, self.more.budget)
        if len(index := bought.nonzero()[:, 0]):
            fine = fine.some(index)
            if later:
                fine, _ = _scene(self.more, fine.image, None, fine.query, None)
            chosen = _successive(self.more, fine, 1, 0.15, 1.0, sites[index])
            second = _spread(second, index, _tokens(fine, batched, self.more.patch, chosen, mean, std, bias))
        tokens = _joined(first, second)
        return Glanced(tokens, *((bought, entropy) if batched else (bought[0], entropy[0])), self.base.budget)


def _scene(allocator: Allocator, image: Any, relevance: Any, query: Any, labels: Any) -> tuple[Scene, bool]:
    if not isinstance(allocator, Allocator):
        raise InputError(f"allocator is {type(allocator).__name__}; expected one of gpu_lod.allocate.")
    if allocator.blends:
        raise InputError(
            f"{type(allocator).__name__} blends patches, and glances take whole ones. Use an allocator of sites."
        )
    anywhere = (0.5, 0.5) if _fixates(allocator) else None
    return allocator._scene(image, relevance, query, anywhere, labels)


def _fixates(allocator: Allocator) -> bool:
    return "fixation" in allocator.needs + allocator.takes


def _room(scene: Scene, count: int) -> None:
    there = scene.grid[0] * scene.grid[1]
    if count > there:
        raise InputError(
            f"all glances together are {count} tokens, and there are {there} level-0 patches. Use a larger image, "
            "smaller patches, or fewer tokens."
        )


def _successive(
    allocator: Allocator, scene: Scene, count: int, radius: float, inhibition: float, taken: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sites and scores of `count` glances, none of them at a site of `taken` [B, T, 3] or of another."""
    count, radius, inhibition = asked(count, radius, inhibition)
    points = scene.fixations(count, radius=radius, inhibition=inhibition)
    chosen = []
    for i in range(count):
        fixation = points[:, i] if _fixates(allocator) else None
        values = _inhibited(scene, points[:, :i], radius, inhibition) if i else scene.relevance
        now = replace(scene, relevance=values, fixation=fixation)
        sites, scores, *_ = allocator.checked(now, allocator.choose(now))
        chosen.append(_replaced(now, sites, scores, taken))
        taken = torch.cat([taken, chosen[-1][0]], dim=1)
    return chosen


def _inhibited(scene: Scene, points: torch.Tensor, radius: float, inhibition: float) -> torch.Tensor:
    """Relevance [B, Hg, Wg], less of it within the radius of points [B, n, 2]."""
    if not inhibition:
        return scene.relevance
    values = scene.relevance.double()  # in which no difference is too large for a number
    size = points.new_tensor([scene.size[1], scene.size[0]]) / max(scene.size)
    cells = scene.sites(0, torch.arange(values[0].numel(), device=scene.device))[:, :2]
    near = (
        (torch.cdist(cells * size, points * size, compute_mode="donot_use_mm_for_euclid_dist") <= radius)
        .any(-1)
        .view_as(values)
    )
    nothing = values == -math.inf
    highest = torch.finfo(torch.float32).max
    least = values.masked_fill(nothing, highest).amin((1, 2), keepdim=True).clamp(max=highest)
    less = least + (values.clamp(max=highest) - least) * (1 - inhibition)
    return torch.where(near & ~nothing, less, values).float()


def _replaced(
    scene: Scene, sites: torch.Tensor, scores: torch.Tensor, taken: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3] and scores, by score, with the best free level-0 patches instead of sites that are taken."""
    there = scene.grid[0] * scene.grid[1]
    again = (sites[:, :, None] == taken[:, None]).all(-1).any(-1)
    held = _cells(scene, torch.cat([taken, sites], dim=1))
    busy = torch.zeros(scene.batch, there + 1, dtype=torch.bool, device=scene.device).scatter(1, held, True)[:, :there]
    values = scene.relevance.flatten(1).clamp(min=torch.finfo(torch.float32).min)  # -inf is for what is busy
    best, cells = ordered(values.masked_fill(busy, -math.inf), sites.shape[1])
    turn = (again.cumsum(1) - 1).clamp(min=0)
    sites = torch.where(again[..., None], scene.sites(0, cells.gather(1, turn)), sites)
    scores, order = ordered(torch.where(again, best.gather(1, turn), scores), scores.shape[1])
    return sites.gather(1, order[..., None].expand_as(sites)), scores


def _cells(scene: Scene, sites: torch.Tensor) -> torch.Tensor:
    """The level-0 patch that each of [B, T, 3] is, row by row, and Hg Wg for what is none."""
    rows, columns = scene.grid
    along = torch.arange(max(rows, columns), device=scene.device)
    found, hit = [], sites[..., 2] == 0
    for axis, step, n in ((0, 1, columns), (1, columns, rows)):
        centres = scene.sites(0, along[:n] * step)[:, axis].contiguous()
        at = sites[..., axis].contiguous()
        found.append(torch.searchsorted(centres, at).clamp(max=n - 1))
        hit = hit & (centres[found[-1]] == at)
    return torch.where(hit, found[1] * columns + found[0], rows * columns)


def _tokens(
    scene: Scene,
    batched: bool,
    patch: int,
    chosen: list[tuple[torch.Tensor, torch.Tensor]],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    bias: float,
) -> TokenSet:
    """All glances in one, their patches read at once."""
    checks.number(bias, "bias")
    sites, scores = (torch.cat(parts, dim=1) for parts in zip(*chosen, strict=True))
    if not batched:
        sites, scores = sites[0], scores[0]
    patches = None
    if scene.image is not None:
        counts = not scene.top.is_floating_point() and mean is None and std is None
        # Counts have no gradients.
        points = sites.detach() if counts else sites
        patches = gather_patches(scene.image, points, patch, mean=mean, std=std, bias=bias)
    return TokenSet(sites, scores, patches, patch)


def _blank(tokens: TokenSet, count: int) -> TokenSet:
    """So many tokens for each image, which say nothing."""
    lead = tokens.sites.shape[:-2]
    sites = tokens.sites.new_tensor([0.5, 0.5, 0.0]).expand(*lead, count, 3)
    patches = None if tokens.patches is None else tokens.patches.new_zeros(*lead, count, *tokens.patches.shape[-3:])
    return TokenSet(sites, tokens.scores.new_zeros(*lead, count), patches, tokens.patch)


def _spread(blank: TokenSet, index: torch.Tensor, tokens: TokenSet) -> TokenSet:
    """Tokens of some images of a batch at their places among blank ones."""
    if tokens.sites.shape == blank.sites.shape:  # of all images, or of the one there is
        return tokens
    patches = tokens.patches
    if patches is not None and blank.patches is not None:
        patches = blank.patches.index_put((index,), patches)
    sites, scores = blank.sites.index_put((index,), tokens.sites), blank.scores.index_put((index,), tokens.scores)
    return TokenSet(sites, scores, patches, tokens.patch)


def _joined(first: TokenSet, second: TokenSet) -> TokenSet:
    """Two token sets of the same images in one."""
    sites, scores = torch.cat([first.sites, second.sites], -2), torch.cat([first.scores, second.scores], -1)
    if first.patches is None or second.patches is None:
        return TokenSet(sites, scores, None, first.patch)
    return TokenSet(sites, scores, torch.cat([first.patches, second.patches], -4), first.patch)


def _part(tokens: TokenSet, first: int, last: int) -> TokenSet:
    """Some of the tokens of one image, or of each."""
    one = tokens.sites.ndim == 2
    patches = tokens.patches
    if patches is not None:
        patches = patches[first:last] if one else patches[:, first:last]
    return replace(
        tokens,
        sites=tokens.sites[..., first:last, :],
        scores=tokens.scores[..., first:last],
        patches=patches,
        features=None if tokens.features is None else tokens.features[..., first:last, :],
    )


def _image(tokens: TokenSet, i: int) -> TokenSet:
    patches, features = (None if x is None else x[i] for x in (tokens.patches, tokens.features))
    return replace(tokens, sites=tokens.sites[i], scores=tokens.scores[i], patches=patches, features=features)
