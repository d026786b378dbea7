"""CLIP of transformers."""

from __future__ import annotations

import math
from typing import Any

import torch

from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import register_adapter
from gpu_lod.vlm.adapters.encoded import Size
from gpu_lod.vlm.adapters.staged import TwoTowers, embed, whole_cells
from gpu_lod.vlm.position_table import sample_position_table
from gpu_lod.vlm.positions import grid_positions


@register_adapter(
    "transformers.CLIPVisionModel", "transformers.CLIPVisionModelWithProjection", "transformers.CLIPModel"
)
class Clip(TwoTowers):
    """CLIP: a class token, which has a position of its own, and a learned table, read bicubically as the model's
    `interpolate_pos_encoding=True` does. `pooled` is the class token after the last norm, before any projection.

    Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021).
    """

    def start(self, tokens: TokenSet, size: Size) -> tuple[torch.Tensor]:
        assert tokens.patches is not None
        embeddings = self.tower.embeddings
        at = grid_positions(tokens.sites, size, self.patch)[..., 1:]
        table = embeddings.position_embedding.weight
        side = math.isqrt(table.shape[0] - 1)
        hidden = embed(tokens.patches, embeddings.patch_embedding.weight, None)
        hidden = hidden + sample_position_table(table[1:], at, (side, side), whole_cells(size, self.patch))
        first = (embeddings.class_embedding + table[0]).expand(len(hidden), 1, -1)
        return (self.tower.pre_layrnorm(torch.cat([first.to(hidden.dtype), hidden], dim=1)),)

    def blocks(self) -> Any:
        return self.tower.encoder.layers

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.tower.post_layernorm(hidden[:, 0])

    def prefix(self) -> int:
        return 1
