"""SigLIP and SigLIP 2 of transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import Adapter, Encoded, embed, register_adapter, whole_cells
from gpu_lod.vlm.position_table import sample_position_table
from gpu_lod.vlm.positions import grid_positions


@register_adapter("transformers.SiglipVisionModel", "transformers.SiglipModel")
class Siglip(Adapter):
    """SigLIP, and SigLIP 2 of fixed resolution, which is the same class: a learned table of positions, read bicubically
    as the model's `interpolate_pos_encoding=True` does; attention pooling over the tokens.

    Source: Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tower = getattr(self.model, "vision_model", self.model)
        self.patch = self.tower.config.patch_size
        self.channels = self.tower.config.num_channels

    def run(self, tokens: TokenSet, size: tuple[int, int]) -> Encoded:
        assert tokens.patches is not None
        at = grid_positions(tokens.sites, size, self.patch)[..., 1:]
        hidden = self.embedded(tokens.patches, at, whole_cells(size, self.patch))
        hidden = self.tower.post_layernorm(self.tower.encoder(inputs_embeds=hidden).last_hidden_state)
        return Encoded(hidden, tokens, size, pooled=self.tower.head(hidden) if self.tower.use_head else None)

    def embedded(self, patches: torch.Tensor, at: torch.Tensor, cells: tuple[int, int]) -> torch.Tensor:
        """[B, K, D] of patches [B, K, C, P, P] at positions [B, K, 2]."""
        layer, table, grid = self._parts()
        return embed(patches, layer.weight, layer.bias) + sample_position_table(table, at, grid, cells)

    def _parts(self) -> tuple[Any, torch.Tensor, tuple[int, int]]:
        """The embedding of patches, the table of positions, and its grid."""
        embeddings = self.tower.embeddings
        table = embeddings.position_embedding.weight
        return embeddings.patch_embedding, table, (math.isqrt(table.shape[0]),) * 2


@register_adapter("transformers.Siglip2VisionModel", "transformers.Siglip2Model")
class Siglip2(Siglip):
    """SigLIP 2 of native aspect ratio (NaFlex): patches as vectors, row by row with the channels last; the table of
    positions read bilinearly, with antialias where there are fewer cells than rows. Every token of a set is one, so
    there is nothing to pad or mask.

    Source: Tschannen et al., "SigLIP 2" (2025).
    """

    def embedded(self, patches: torch.Tensor, at: torch.Tensor, cells: tuple[int, int]) -> torch.Tensor:
        layer, table, grid = self._parts()
        hidden = embed(patches.movedim(-3, -1), layer.weight, layer.bias)
        return hidden + sample_position_table(table, at, grid, cells, "bilinear", antialias=True)
