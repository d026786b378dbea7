"""ViTs of timm: VisionTransformer, and Eva with rotary positions (EVA-02, DINOv3 and their like)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gpu_lod.errors import UnsupportedError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import Adapter, Encoded, embed, register_adapter, whole_cells
from gpu_lod.vlm.position_table import sample_position_table
from gpu_lod.vlm.positions import axial_frequencies, grid_positions, rotary_embedding


@register_adapter("timm.VisionTransformer")
class TimmViT(Adapter):
    """timm's VisionTransformer, with class and register tokens or without, read bicubically and with antialias from its
    table of positions as with `dynamic_img_size=True`; whatever pooling it has, before its classifier.

    Raises:
        UnsupportedError: patches that are no single convolution (hybrid stems), or are not square.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        stem = self.model.patch_embed
        sides = set(getattr(stem, "patch_size", ()))
        if type(stem).__name__ != "PatchEmbed" or len(sides) != 1:
            raise UnsupportedError(
                f"the patch embedding of this {type(model).__name__} is a {type(stem).__name__} of patches {sides}; "
                "expected timm's PatchEmbed of square ones. Use a ViT without a convolutional stem."
            )
        self.patch, self.channels = sides.pop(), stem.proj.in_channels

    def run(self, tokens: TokenSet, size: tuple[int, int]) -> Encoded:
        at = grid_positions(tokens.sites, size, self.patch)[..., 1:]
        hidden = self._blocks(self.model.norm_pre(self._embedded(tokens, at, size)), at, size)
        hidden = self.model.norm(hidden)
        pooled = self.model.forward_head(hidden, pre_logits=True)
        return Encoded(hidden, tokens, size, self.model.num_prefix_tokens, pooled if pooled.ndim == 2 else None)

    def _embedded(self, tokens: TokenSet, at: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """[B, prefix + K, D], positions added."""
        model = self.model
        assert tokens.patches is not None
        layer = model.patch_embed.proj
        hidden = model.patch_embed.norm(embed(tokens.patches, layer.weight, layer.bias))
        first = [one.expand(len(hidden), -1, -1) for one in (model.cls_token, model.reg_token) if one is not None]
        if model.pos_embed is None:
            return torch.cat([*first, hidden], dim=1)
        skip = 0 if model.no_embed_class else model.num_prefix_tokens
        table, grid = model.pos_embed[0, skip:], model.patch_embed.grid_size
        cells = whole_cells(size, self.patch)
        hidden = hidden + sample_position_table(table, at, grid, cells, "bicubic", antialias=True)
        if not first:
            return hidden
        prefix = torch.cat(first, dim=1)
        return torch.cat([prefix + model.pos_embed[:, :skip] if skip else prefix, hidden], dim=1)

    def _blocks(self, hidden: torch.Tensor, at: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        return self.model.blocks(hidden)


@register_adapter("timm.Eva")
class TimmEva(TimmViT):
    """timm's Eva: as VisionTransformer, and rotary positions in each block, on the grid of EVA (whole cells, scaled to
    a reference grid where it has one) or of DINOv3 (from -1 to 1 over the picture).

    Raises:
        UnsupportedError: rotary positions of another kind (mixed, M-RoPE, by pixels).

    Source: Fang et al., "EVA-02" (2023); Simeoni et al., "DINOv3" (2025).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        rope = self.model.rope
        kind = "" if rope is None else type(rope).__name__
        plain = kind == "RotaryEmbeddingCat" and getattr(rope, "grid_type", "index") == "index" and not rope.in_pixels
        if rope is not None and not plain and kind != "RotaryEmbeddingDinoV3":
            raise UnsupportedError(
                f"the rotary positions of this Eva are a {kind}; expected a RotaryEmbeddingCat over whole cells or a "
                "RotaryEmbeddingDinoV3. Use a model with rope_type='cat' or 'dinov3'."
            )

    def _blocks(self, hidden: torch.Tensor, at: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        rope = None if self.model.rope is None else self._rotary(self.model.rope, at, whole_cells(size, self.patch))
        for block in self.model.blocks:
            hidden = block(hidden, rope=rope)
        return hidden

    @staticmethod
    def _rotary(rope: Any, at: torch.Tensor, cells: tuple[int, int]) -> torch.Tensor:
        """[B, 1, K, 2 D]: sin and cos, as its blocks take them."""
        shape = at.new_tensor(cells)
        if type(rope).__name__ == "RotaryEmbeddingDinoV3":
            sides = {"min": shape.amin(), "max": shape.amax(), "separate": shape}[rope.normalize_coords]
            at = 2 * (at + 0.5 + rope.grid_offset) / sides - 1
            frequencies = 2 * math.pi / rope.periods
        else:
            at = at + rope.grid_offset
            if rope.ref_feat_shape is not None:
                at = at / shape * at.new_tensor(rope.ref_feat_shape)
            frequencies = axial_frequencies(rope.dim, 2, rope.temperature)
        at = at.flip(-1) if rope.grid_indexing == "xy" else at
        cos, sin = rotary_embedding(at, frequencies, "half" if getattr(rope, "rotate_half", False) else "interleaved")
        return torch.cat([sin, cos], dim=-1)[:, None]
