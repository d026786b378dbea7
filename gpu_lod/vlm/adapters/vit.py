"""ViT, DINOv2 and DINOv2 with registers of transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gpu_lod.errors import UnsupportedError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import register_adapter
from gpu_lod.vlm.adapters.encoded import Size
from gpu_lod.vlm.adapters.staged import Staged, embed, whole_cells
from gpu_lod.vlm.position_table import sample_position_table
from gpu_lod.vlm.positions import grid_positions


@register_adapter("transformers.ViTModel")
class Vit(Staged):
    """ViT: a class token, and a learned table read bicubically as the model's `interpolate_pos_encoding=True` does.
    `pooled` is what its pooler makes of the class token, if it has one.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021).
    """

    antialias = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        patch = self.model.config.patch_size
        rows, columns = (patch, patch) if isinstance(patch, int) else patch
        if rows != columns:
            raise UnsupportedError(f"patches are {rows} x {columns}; expected squares, as allocators read them.")
        self.patch = rows
        self.channels = self.model.config.num_channels

    def start(self, tokens: TokenSet, size: Size) -> tuple[torch.Tensor]:
        assert tokens.patches is not None
        embeddings = self.model.embeddings
        layer, table = embeddings.patch_embeddings.projection, embeddings.position_embeddings[0]
        at = grid_positions(tokens.sites, size, self.patch)[..., 1:]
        places = sample_position_table(
            table[1:], at, self._grid(table.shape[0] - 1), whole_cells(size, self.patch), antialias=self.antialias
        )
        hidden = embed(tokens.patches, layer.weight, layer.bias) + places
        first = [embeddings.cls_token[0] + table[:1], *self._registers()]
        return (torch.cat([*(one.expand(len(hidden), -1, -1) for one in first), hidden], dim=1),)

    def _grid(self, cells: int) -> Size:
        """(rows, columns) of the table: ViT's is that of its pictures, DINOv2's is a square to it."""
        layer = self.model.embeddings.patch_embeddings
        if self.model.config.model_type == "vit":
            rows, columns = (side // patch for side, patch in zip(layer.image_size, layer.patch_size, strict=True))
            return rows, columns
        return math.isqrt(cells), math.isqrt(cells)

    def _registers(self) -> list[torch.Tensor]:
        registers = getattr(self.model.embeddings, "register_tokens", None)
        return [] if registers is None else [registers[0]]

    def blocks(self) -> Any:
        encoder = getattr(self.model, "encoder", None)
        return self.model.layers if encoder is None else encoder.layer

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.model.layernorm(hidden)
        return hidden, None if self.model.pooler is None else self.model.pooler(hidden)

    def prefix(self) -> int:
        return 1 + sum(len(registers) for registers in self._registers())


@register_adapter("transformers.Dinov2Model")
class Dinov2(Vit):
    """DINOv2: the same, with the table read wherever the picture is of another size. `pooled` is the class token.

    Source: Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision" (2023).
    """

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.model.layernorm(hidden)
        return hidden, hidden[:, 0]


@register_adapter("transformers.Dinov2WithRegistersModel")
class Dinov2WithRegisters(Dinov2):
    """DINOv2 with registers: they follow the class token and have no positions; its table is read with antialias.

    Source: Darcet et al., "Vision Transformers Need Registers" (2024).
    """

    antialias = True
