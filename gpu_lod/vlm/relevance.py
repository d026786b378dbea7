"""Relevance of each patch: from forty feature maps and a query, from embeddings, or from the picture alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from gpu_lod import checks, dispatch, precision
from gpu_lod.errors import InputError
from gpu_lod.feature_maps import CHANNELS, COUNT, SEMANTIC, feature_maps
from gpu_lod.patch_grid import pooled
from gpu_lod.salient_cells import finite, saliency_cells

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

    def score(self, source: torch.Tensor, query: torch.Tensor, gestalt: torch.Tensor | None = None) -> Relevance:
        """The same with its parts."""
        source = checks.tensor(source, "source")
        maps = self._maps(source if source.ndim == 4 else source[None])
        asked = _row(query, "query", len(maps), self.width)
        cells = _cells(maps, self.patch).permute(0, 2, 3, 1)
        if self.gestalt_width is not None:
            if gestalt is None:
                raise InputError(f"there is no gestalt; pass gestalt= of [{len(maps)}, {self.gestalt_width}].")
            whole = _row(gestalt, "gestalt", len(maps), self.gestalt_width)
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
        return source if source.shape[1] == COUNT else feature_maps(source)


def _row(values: torch.Tensor, name: str, batch: int, width: int) -> torch.Tensor:
    """[B, width] in fp32; a single one serves the whole batch."""
    values = checks.tensor(values, name)
    if tuple(values.shape) not in ((width,), (batch, width)) or not values.is_floating_point():
        raise InputError(
            f"{name} is {values.dtype} {tuple(values.shape)}; expected floats [{batch}, {width}] or [{width}]."
        )
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


@precision.in_full
def query_similarity(features: torch.Tensor, query: torch.Tensor, grid: tuple[int, int] | None = None) -> torch.Tensor:
    """Cosine similarity of patch embeddings with the embedding of a query, for models whose two towers share a space.

    Shape: features [B, Hg, Wg, D], or [B, Hg Wg, D] row by row with `grid` = (Hg, Wg); query [B, D] or [D]. The result
        is [B, Hg, Wg].
    Units: [-1, 1]; 0 where an embedding is 0.

    Raises:
        InputError: features that do not fill the grid, or a query of another width.

    Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021).
    """
    features = checks.tensor(features, "features")
    if grid is not None and features.ndim == 3:
        rows, columns = checks.size(grid)
        if features.shape[1] != rows * columns:
            raise InputError(
                f"features are {tuple(features.shape)}; expected [B, {rows * columns}, D], one of each cell of the "
                f"{rows} x {columns} grid. Leave class tokens out."
            )
        features = features.unflatten(1, (rows, columns))
    if features.ndim != 4 or not features.is_floating_point():
        raise InputError(
            f"features are {features.dtype} {tuple(features.shape)}; expected floats [B, Hg, Wg, D], or [B, Hg Wg, D] "
            "and grid=(Hg, Wg)."
        )
    wanted = F.normalize(_row(query, "query", len(features), features.shape[-1]), dim=-1)
    found = F.normalize(features.float(), dim=-1)
    return torch.einsum("bhwd,bd->bhw", precision.factor(found), precision.factor(wanted)).to(found.dtype)


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
