"""ViTs of timm: VisionTransformer, and Eva with rotary positions (EVA-02, DINOv3 and their like)."""

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
from gpu_lod.vlm.positions import axial_frequencies, grid_positions, rotary_embedding


@register_adapter("timm.VisionTransformer")
class TimmViT(Staged):
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

    def start(self, tokens: TokenSet, size: Size) -> tuple[torch.Tensor | None, ...]:
        stem = self.model.patch_embed
        if getattr(stem, "dynamic_img_pad", False) and any(side % self.patch for side in size):
            raise UnsupportedError(
                f"this {type(self.model).__name__} pads pictures to whole patches (dynamic_img_pad), and {size} pixels "
                f"are no multiple of {self.patch}. Pad or crop the picture first."
            )
        at = grid_positions(tokens.sites, size, self.patch)[..., 1:]
        return self.model.norm_pre(self._embedded(tokens, at, size)), self.rotary(at, size)

    def blocks(self) -> Any:
        return self.model.blocks

    def step(self, block: Any, hidden: torch.Tensor, *beside: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = block(hidden)
        return found

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.model.norm(hidden)
        pooled = self.model.forward_head(hidden, pre_logits=True)
        return hidden, pooled if pooled.ndim == 2 else None

    def prefix(self) -> int:
        return int(self.model.num_prefix_tokens)

    def rotary(self, at: torch.Tensor, size: Size) -> torch.Tensor | None:
        """What blocks take beside hidden states, if they turn them by positions."""
        return None

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

    def step(self, block: Any, hidden: torch.Tensor, *beside: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = block(hidden, rope=beside[0])
        return found

    def rotary(self, at: torch.Tensor, size: Size) -> torch.Tensor | None:
        return None if self.model.rope is None else self._rotary(self.model.rope, at, whole_cells(size, self.patch))

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
