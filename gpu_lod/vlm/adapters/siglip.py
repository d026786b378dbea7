"""SigLIP and SigLIP 2 of transformers."""

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


@register_adapter("transformers.SiglipVisionModel", "transformers.SiglipModel")
class Siglip(TwoTowers):
    """SigLIP, and SigLIP 2 of fixed resolution, which is the same class: a learned table of positions, read bicubically
    as the model's `interpolate_pos_encoding=True` does; attention pooling over the tokens.

    Source: Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023).
    """

    def start(self, tokens: TokenSet, size: Size) -> tuple[torch.Tensor]:
        assert tokens.patches is not None
        at = grid_positions(tokens.sites, size, self.patch)[..., 1:]
        return (self.embedded(tokens.patches, at, whole_cells(size, self.patch)),)

    def blocks(self) -> Any:
        return self.tower.encoder.layers

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.tower.post_layernorm(hidden)
        return hidden, self.tower.head(hidden) if self.tower.use_head else None

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
