"""Relevance of each patch: from forty feature maps and a query, from embeddings, or from the picture alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gpu_lod import checks, dispatch, operators, precision
from gpu_lod.allocate.scene import cells_of, centres_of
from gpu_lod.cached import constant, numbers
from gpu_lod.errors import InputError
from gpu_lod.feature_channels import CHANNELS, COUNT, SEMANTIC
from gpu_lod.feature_maps import feature_maps
from gpu_lod.gather_patches import on_pixels
from gpu_lod.patch_grid import pooled
from gpu_lod.rebuild import AT_ONCE
from gpu_lod.salient_cells import finite, saliency_cells
from gpu_lod.shapes import summary
from gpu_lod.token_set import TokenSet
from gpu_lod.uncompiled import in_one_piece

PROPOSITIONAL = (6, 7, 8, 12)
"""What is there: gradient and high-pass."""
PERSPECTIVAL = (5, 10, 11)
"""What stands out from here: saliency, motion, eccentricity."""
PARTICIPATORY = tuple(range(CHANNELS["semantic"].start, CHANNELS["semantic"].stop))
"""What it has to do with the query: the semantic features."""
HEADS = ("propositional", "perspectival", "participatory")

_SIGNED = (6, 7, 10)
"""Pooled by magnitude: the mean of a derivative over a patch says only how its edges differ."""
_LEAST_VARIANCE = 1e-5
"""What is flat but for rounding stays flat."""


class Relevance(NamedTuple):
    """Relevance, and what it is made of: `relevance = (weights[:, :, None, None] * heads).sum(1)`."""

    relevance: torch.Tensor
    """[B, Hg, Wg], in (0, 1)"""
    heads: torch.Tensor
    """[B, 3, Hg, Wg], in (0, 1), in the order of `HEADS`"""
    weights: torch.Tensor
    """[B, 3], which sum to 1"""

    def __repr__(self) -> str:
        return summary(self)


torch.serialization.add_safe_globals([Relevance])  # torch.load's weights_only


class ContextualizedRelevance(nn.Module):
    """Relevance on the patch grid by three heads, weighed by what is asked and what the picture is like.

    Shape: a call takes maps [B, 40, H, W], or images [B, C, H, W], C of 1 to 4, of which it makes them; a query
        [B, D] or [D]; and it may take a gestalt [B, G]. The result is [B, Hg, Wg], Hg = ceil(H / P); without B for a
        single picture. `score` gives the heads and their weights too.
    Convention: maps are averaged over the patches of the grid first (gx, gy and motion by magnitude), so that the heads
        see Hg Wg cells instead of H W pixels. Channels of the propositional head (6, 7, 8, 12) and of the perspectival
        one (5, 10, 11) are standardised over each picture's grid; the participatory head takes the semantic channels
        (17-32) as they are, the query brought to their width, and the product of both. Each head is a perceptron of one
        hidden layer with a sigmoid; a softmax over the heads, from [query, gestalt], weighs them. Under autocast they
        compute and answer in its dtype, as layers of torch do, and else in that of their weights; the maps are made in
        fp32.

    Args:
        width: D.
        gestalt_width: G, the width of an embedding of the whole picture; None takes the mean of each of the forty
            pooled maps.
        patch: P.
        hidden: units of each hidden layer.

    Raises:
        InputError: a query or gestalt of another width, maps of another number of channels, or another batch.
    """

    def __init__(self, width: int, gestalt_width: int | None = None, patch: int = 14, hidden: int = 32) -> None:
        super().__init__()
        self.width = checks.integer(width, "width", at_least=1)
        self.gestalt_width = (
            None if gestalt_width is None else checks.integer(gestalt_width, "gestalt_width", at_least=1)
        )
        self.patch = checks.integer(patch, "patch", at_least=1, at_most=2**12)
        hidden = checks.integer(hidden, "hidden", at_least=1)

        def head(inputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, 1), nn.Sigmoid())

        self.propositional = head(len(PROPOSITIONAL))
        self.perspectival = head(len(PERSPECTIVAL))
        self.participatory = head(3 * SEMANTIC)
        self.asked = nn.Linear(self.width, SEMANTIC)
        self.weigh = nn.Linear(self.width + (COUNT if self.gestalt_width is None else self.gestalt_width), len(HEADS))

    def forward(self, source: torch.Tensor, query: torch.Tensor, gestalt: torch.Tensor | None = None) -> torch.Tensor:
        return self.score(source, query, gestalt).relevance

    @in_one_piece
    def score(self, source: torch.Tensor, query: torch.Tensor, gestalt: torch.Tensor | None = None) -> Relevance:
        """The same with its parts."""
        source = checks.tensor(source, "source")
        maps = self._maps(source if source.ndim == 4 else source[None])
        asked = row_of(query, "query", len(maps), self.width)
        cells = _cells(maps, self.patch).permute(0, 2, 3, 1)
        if self.gestalt_width is not None:
            if gestalt is None:
                raise InputError(f"there is no gestalt; pass gestalt= of [{len(maps)}, {self.gestalt_width}].")
            whole = row_of(gestalt, "gestalt", len(maps), self.gestalt_width)
        elif gestalt is not None:
            raise InputError(
                "a gestalt came, and the scorer pools its own. Make it with gestalt_width=, or leave it out."
            )
        else:
            whole = cells.mean((1, 2))
        kind = self.asked.weight.dtype  # of the layers, which .half() and .double() change
        features = cells[..., PARTICIPATORY].to(kind)
        wanted = self.asked(asked.to(kind))[:, None, None].expand_as(features)
        heads = [
            self.propositional(_standardised(cells[..., PROPOSITIONAL]).to(kind)),
            self.perspectival(_standardised(cells[..., PERSPECTIVAL]).to(kind)),
            self.participatory(torch.cat([features, wanted, features * wanted], dim=-1)),
        ]
        weights = self.weigh(torch.cat([asked, whole], dim=-1).to(kind)).softmax(-1)
        each = torch.cat(heads, dim=-1).permute(0, 3, 1, 2)
        found = Relevance((weights[:, :, None, None] * each).sum(1), each, weights)
        return found if source.ndim == 4 else Relevance(*(part[0] for part in found))

    def _maps(self, source: torch.Tensor) -> torch.Tensor:
        if source.ndim != 4 or source.shape[1] not in (1, 2, 3, 4, COUNT) or not source.numel():
            raise InputError(
                f"source has shape {tuple(source.shape)}; expected the {COUNT} channels of feature_maps, "
                f"[B, {COUNT}, H, W], or an image [B, C, H, W] of 1 to 4 channels."
            )
        if source.shape[1] != COUNT:
            return feature_maps(source)
        if not source.is_floating_point():
            raise InputError(f"the maps are {source.dtype}; expected floating point, as feature_maps() gives it.")
        return source


def _row(values: torch.Tensor, name: str, batch: int, width: int) -> torch.Tensor:
    """Checked but for values."""
    values = checks.tensor(values, name)
    if not (values.shape == (width,) or values.shape == (batch, width)) or not values.is_floating_point():
        raise InputError(
            f"{name} is {values.dtype} {tuple(values.shape)}; expected floats [{batch}, {width}] or [{width}]."
        )
    return values


def _like_row(values: torch.Tensor, name: str, batch: int, width: int) -> torch.Tensor:
    return _row(values, name, batch, width).new_empty(batch, width, dtype=torch.float32)


@operators.function(_like_row)
def row_of(values: torch.Tensor, name: str, batch: int, width: int) -> torch.Tensor:
    """[B, width] in fp32; a single one serves the whole batch."""
    values = _row(values, name, batch, width)
    if checks.readable(values) and not torch.isfinite(values.detach()).all():
        raise InputError(f"{name} holds NaN or infinities; expected finite numbers.")
    if torch.is_grad_enabled():
        (values,) = dispatch.keepable(values)
    return values.float().expand(batch, width)


def _cells(maps: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, 40, H, W] to [B, 40, Hg, Wg] in fp32."""
    place = torch.tensor(_SIGNED, device=maps.device)
    grid = pooled(maps, patch)
    return grid.index_copy(1, place, pooled(maps[:, place].abs(), patch)).float()


def _standardised(cells: torch.Tensor) -> torch.Tensor:
    """Each channel of [B, Hg, Wg, C] less its mean over the grid, over its deviation."""
    centred = cells - cells.mean((1, 2), keepdim=True)
    return centred / (centred.square().mean((1, 2), keepdim=True) + _LEAST_VARIANCE).sqrt()


def _in_cells(
    features: torch.Tensor, query: torch.Tensor, grid: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [B, Hg, Wg, D], or [B, K, D], and the query, checked but for values."""
    features = checks.tensor(features, "features")
    features = features[None] if features.ndim == 2 else features
    if grid is not None and features.ndim == 3:
        rows, columns = checks.size(grid)
        if features.shape[1] != rows * columns:
            raise InputError(
                f"features are {tuple(features.shape)}; expected [B, {rows * columns}, D], one of each cell of the "
                f"{rows} x {columns} grid. Leave class tokens out."
            )
        features = features.unflatten(1, (rows, columns))
    if grid is not None and features.ndim == 4 and tuple(features.shape[1:3]) != checks.size(grid):
        raise InputError(f"features are {tuple(features.shape)} and grid is {grid}; expected the same. Leave grid out.")
    if features.ndim not in (3, 4) or not features.is_floating_point():
        raise InputError(
            f"features are {features.dtype} {tuple(features.shape)}; expected floats [B, Hg, Wg, D], or [B, Hg Wg, D] "
            "and grid=(Hg, Wg), or [B, K, D] of tokens."
        )
    query = _row(query, "query", len(features), features.shape[-1])
    checks.same_device(features, query, "query", "the features")
    return features, query


def _cosines(features: torch.Tensor, query: torch.Tensor, grid: tuple[int, int] | None) -> torch.Tensor:
    cells, _ = _in_cells(features, query, grid)
    return cells.new_empty(cells.shape[features.ndim == 2 : -1], dtype=torch.float32)


@operators.function(_cosines)
@precision.in_full
def query_similarity(features: torch.Tensor, query: torch.Tensor, grid: tuple[int, int] | None = None) -> torch.Tensor:
    """Cosine similarity of patch embeddings with the embedding of a query, for models whose two towers share a space.

    Shape: features [B, Hg, Wg, D], or [B, Hg Wg, D] row by row with `grid` = (Hg, Wg), give [B, Hg, Wg]; features of
        tokens, [B, K, D] or [K, D], give [B, K] or [K], in their order. query [B, D] or [D].
    Units: [-1, 1]; 0 where an embedding is 0.
    Convention: features have to be in the text's space, which equal widths do not tell. Those of CLIP's patches are
        there after the steps that its class token takes:

            patches = model.vision_model.post_layernorm(encoded.features)
            features = model.visual_projection(patches)

        Trained on the class token alone, they agree with texts as far as that reaches: measure it. Patch features of
        SigLIP are not in that space: its head pools them by attention before they meet a text.

        A cosine's 0 means nothing, and all cosines of a picture may be 0.2 or more. GridTopK goes by their order alone;
        allocators that go by how much relevance there is above 0 (FoveatedPyramid, TokenDAG, PyramidTopK, Stratified,
        Spiral, Wavelet and most others) want what is above the least: `r - r.amin((-2, -1), keepdim=True)`.

        `grid` is for features that are row by row, as of `Downsample(Hg Wg, rows=Hg)` without relevance. Allocators
        sort by relevance: such features would come to lie elsewhere, and nothing tells. Leave `grid` out there, and
        have `relevance_map` bring the cosines to where the tokens are.

    Raises:
        InputError: features that do not fill the grid, or a query of another width or on another device.

    Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021).
    """
    features = checks.tensor(features, "features")
    cells, query = _in_cells(features, query, grid)
    wanted = F.normalize(row_of(query, "query", len(cells), cells.shape[-1]), dim=-1)
    unit = F.normalize(cells.float(), dim=-1)
    found = torch.einsum("b...d,bd->b...", precision.factor(unit), precision.factor(wanted)).to(unit.dtype)
    return found[0] if features.ndim == 2 else found


@in_one_piece
def relevance_map(
    values: torch.Tensor, tokens: TokenSet, size: tuple[int, int], fill: float | None = None
) -> torch.Tensor:
    """Scatter a number a token onto the grid of level-0 patches: relevance for a second look, from whatever was read
    first.

        attention = lod.vlm.attention_received(...)                      # [B, K], of tokens at any sites
        relevance = lod.vlm.relevance_map(attention, tokens, (H, W))     # [B, Hg, Wg]

    Shape: values [B, K] of tokens [B, K] give [B, Hg, Wg], Hg = ceil(H / P), as allocators take it; without B for
        unbatched tokens.
    Units: those of the values, in their dtype; whole numbers become fp32.
    Convention: a token covers the patches whose centres lie in the square of P 2^level px round its site, left and top
        edges included. A patch has the value of the finest token that covers it; of equally fine ones of that whose
        centre is nearest, and of equally near ones of the first. So tokens that are patches of the grid give each its
        own value, in whatever order they come. Edges within fp32's rounding of half a pixel are there. Differentiable
        in the values.

    Args:
        size: (H, W) of the picture in pixels, `Encoded.size`; of relevance alone P times the grid.
        fill: what patches have that no token covers; -inf, so that allocators leave them, too. None is the least value
            of each picture.

    Raises:
        InputError: values that are not one a token, or hold NaN; sites outside the picture; a bad size or fill.
    """
    size = checks.size(size, at_most=checks.LONGEST)
    values, sites = _one_each(values, tokens)
    fill = None if fill is None else _filling(fill)
    if tokens.sites.ndim == 2:
        return scattered(values[None], sites[None], tokens.patch, size, fill)[0]
    return scattered(values, sites, tokens.patch, size, fill)


def _one_each(values: Any, tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats [B, K] and sites [B, K, 3], or both without B."""
    if not isinstance(tokens, TokenSet):
        raise InputError(f"tokens are {type(tokens).__name__}; expected a TokenSet, which allocators return.")
    values, sites = checks.real(values, "values"), checks.real(tokens.sites.detach(), "sites")
    if values.shape != tokens.scores.shape or not values.numel():
        raise InputError(
            f"values are {tuple(values.shape)}; expected {tuple(tokens.scores.shape)}, one of each token. Leave class "
            "tokens out."
        )
    checks.same_device(values, sites, "sites", "the values")
    # Of float8, torch finds neither minima nor NaN.
    return values if values.is_floating_point() and values.dtype.itemsize > 1 else values.float(), sites


def _cells_of(
    values: torch.Tensor, sites: torch.Tensor, patch: int, size: tuple[int, int], fill: float | None
) -> torch.Tensor:
    return values.new_empty(len(values), *cells_of((size[0], size[1]), patch))


@operators.function(_cells_of)
def scattered(
    values: torch.Tensor, sites: torch.Tensor, patch: int, size: tuple[int, int], fill: float | None
) -> torch.Tensor:
    """`relevance_map` of [B, K] at sites [B, K, 3]."""
    checks.no_nan(values.detach(), "values")
    checks.highest_level(sites)  # raises where sites are outside the picture
    size, (batch, budget) = (size[0], size[1]), values.shape
    rows, columns = cells_of(size, patch)
    centres = constant(sites.device, centres_of, size, patch).double().split((columns, rows))
    half = patch * torch.exp2(sites[..., 2, None].double()) / 2
    inside, away = [], []
    for axis, n in ((0, size[1]), (1, size[0])):
        sides = numbers(float(n), torch.float64, sites.device)
        cell, at = on_pixels(centres[axis] * n, sides), on_pixels(sites[..., axis, None].double() * n, sides)
        inside.append((on_pixels(at - half, sides) <= cell) & (cell < on_pixels(at + half, sides)))  # [B, K, cells]
        away.append((cell - at).square())
    levels = sites[..., 2, None, None]
    rest = values.amin(1)[:, None, None] if fill is None else fill
    found = []
    for part in torch.arange(rows, device=sites.device).split(max(1, AT_ONCE // (batch * budget * columns))):
        covers = inside[1][:, :, part, None] & inside[0][:, :, None]
        finest = torch.where(covers, levels, math.inf).amin(1, keepdim=True)
        apart = away[1][:, :, part, None] + away[0][:, :, None]
        nearest, token = torch.where(covers & (levels == finest), apart, math.inf).min(1)
        taken = values.gather(1, token.flatten(1)).view_as(nearest)
        found.append(torch.where(nearest < math.inf, taken, rest))
    return torch.cat(found, 1)


def _filling(fill: Any) -> float:
    return -math.inf if isinstance(fill, (float, np.floating)) and fill == -math.inf else checks.number(fill, "fill")


def _salient(image: torch.Tensor, patch: int) -> torch.Tensor:
    image = checks.image(image)
    patch = checks.integer(patch, "patch", at_least=1, at_most=2**12)
    cells = cells_of((image.shape[-2], image.shape[-1]), patch)
    return image.new_empty(*image.shape[:-3], *cells, dtype=torch.float32)


@operators.function(_salient)
def saliency_relevance(image: torch.Tensor, patch: int = 14) -> torch.Tensor:
    """What stands out, with no model and no query: channel 5 of `feature_maps`, averaged over the patches of the grid.

    Shape: image [B, C, H, W] or [C, H, W] gives [B, Hg, Wg] or [Hg, Wg].

    Raises:
        InputError: no such image, one that holds NaN, infinities or values that are too large, or a patch that is no
            side.
    """
    image = checks.image(image)
    patch = checks.integer(patch, "patch", at_least=1, at_most=2**12)
    found = finite(saliency_cells(image if image.ndim == 4 else image[None], patch))
    return found if image.ndim == 4 else found[0]
