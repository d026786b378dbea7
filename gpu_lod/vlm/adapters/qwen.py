"""Vision towers of Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import Adapter, Encoded, embed, register_adapter, whole_cells
from gpu_lod.vlm.position_table import sample_position_table
from gpu_lod.vlm.positions import grid_positions, rotary_embedding


class _Tower(Adapter):
    """What both share: a token is a merge unit, 2 x 2 neighbouring patches of one level, so `patch` is twice the
    tower's own. Sites choose units; each is split into its four patches, whose positions lie half a unit's side apart,
    2^level cells at a level. A still picture is its own next frame, as for the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        owner = getattr(self.model, "model", self.model)
        self.tower: Any = getattr(owner, "visual", owner)
        self.merge = self.tower.config.spatial_merge_size
        self.side = self.tower.config.patch_size
        self.patch = self.merge * self.side
        self.channels = self.tower.config.in_channels

    def run(self, tokens: TokenSet, size: tuple[int, int]) -> Encoded:
        assert tokens.patches is not None
        batch, budget = tokens.sites.shape[:2]
        at = self._positions(tokens.sites, size)  # [B, 4 K, 2]
        patches = tokens.patches.unfold(-2, self.side, self.side).unfold(-2, self.side, self.side)
        patches = patches.movedim(2, 4).flatten(1, 3)  # [B, 4 K, C, P, P], a unit's row by row
        layer = self.tower.patch_embed.proj
        hidden = self._placed(embed(patches, layer.weight.sum(2), layer.bias), at, size)
        order, windows = self._windows(tokens.sites, size)
        images = torch.arange(batch, device=at.device)[:, None]
        parts = self.merge**2

        def arranged(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            return values.unflatten(1, (budget, parts))[images, by].flatten(0, 2)

        cos, sin = rotary_embedding(arranged(at, order), self.tower.rotary_pos_emb.inv_freq)
        whole = torch.arange(batch + 1, dtype=torch.int32, device=at.device) * (budget * parts)
        hidden, deepstack = arranged(hidden, order), []
        for index, block in enumerate(self.tower.blocks):
            lengths = whole if windows is None or index in self.tower.fullatt_block_indexes else windows
            hidden = block(hidden, cu_seqlens=lengths, position_embeddings=(cos, sin))
            if index in self.deep_layers():
                merger = self.tower.deepstack_merger_list[self.deep_layers().index(index)]
                deepstack.append(merger(hidden).unflatten(0, (batch, budget)))
        back = order.argsort(1)
        merged = self.tower.merger(hidden).unflatten(0, (batch, budget))[images, back]
        hidden = hidden.unflatten(0, (batch, budget, parts))[images, back].flatten(1, 2)
        deepstack = [features[images, back] for features in deepstack]
        return Encoded(hidden, tokens, size, merged=merged, deepstack=tuple(deepstack))

    def _positions(self, sites: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """[B, 4 K, 2]: (y, x) of each patch of each unit, in the tower's own patches."""
        level, y, x = grid_positions(sites, size, self.side).unbind(-1)
        step = (torch.arange(self.merge, dtype=level.dtype, device=sites.device) - (self.merge - 1) / 2) * torch.exp2(
            level
        )[..., None]
        rows, columns = (y[..., None] + step)[..., :, None], (x[..., None] + step)[..., None, :]
        return torch.stack(torch.broadcast_tensors(rows, columns), dim=-1).flatten(1, 3)

    def _placed(self, hidden: torch.Tensor, at: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Patches with learned positions, if there are such."""
        return hidden

    def deep_layers(self) -> list[int]:
        """Blocks whose features go to the language model, too."""
        return []

    def _windows(self, sites: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, K] the order of the tokens, and where windows of patches begin and end, if there are such."""
        return torch.arange(sites.shape[1], device=sites.device).expand(sites.shape[:2]), None


@register_adapter(
    "transformers.Qwen2_5_VisionTransformerPretrainedModel",
    "transformers.Qwen2_5_VLModel",
    "transformers.Qwen2_5_VLForConditionalGeneration",
)
class Qwen25(_Tower):
    """Qwen2.5-VL's tower: units of 28 x 28 pixels, rotary positions, attention in windows of 112 pixels in most of its
    blocks.

    A free set of sites has no windows: a coarse token would lie in several, and a window could hold one token. So every
    block attends to all tokens of the picture. Only where the set is the full level-0 grid, in whatever order, the
    windows are the model's own, and the result is that of the untouched model.

    Source: Bai et al., "Qwen2.5-VL Technical Report" (2025).
    """

    def _windows(self, sites: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, columns = whole_cells(size, self.patch)
        plain = super()._windows(sites, size)
        if sites.shape[1] != rows * columns or size != (rows * self.patch, columns * self.patch):
            return plain
        level, y, x = grid_positions(sites, size, self.patch).unbind(-1)
        cells = y * columns + x
        every = torch.arange(rows * columns, dtype=cells.dtype, device=cells.device)
        if not bool(((level == 0) & (y == y.round()) & (cells.sort(1).values == every)).all()):
            return plain
        side = max(1, self.tower.config.window_size // self.patch)
        across = -(-columns // side)
        window = (y.long() // side) * across + x.long() // side
        counts = torch.zeros(len(sites), across * -(-rows // side), dtype=torch.long, device=sites.device)
        counts.scatter_add_(1, window, torch.ones_like(window))
        ends = (counts.flatten() * self.merge**2).cumsum(0)
        return window.argsort(dim=1, stable=True), torch.cat([ends.new_zeros(1), ends]).int()


@register_adapter(
    "transformers.Qwen3VLVisionModel", "transformers.Qwen3VLModel", "transformers.Qwen3VLForConditionalGeneration"
)
class Qwen3(_Tower):
    """Qwen3-VL's tower: units of 32 x 32 pixels, rotary positions and a learned table, which is read bilinearly from
    corner to corner; all blocks attend to the whole picture. Features of some of its blocks (`deepstack`) go to the
    first layers of the language model.

    Source: Bai et al., "Qwen3-VL Technical Report" (2025).
    """

    def _placed(self, hidden: torch.Tensor, at: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        table = self.tower.pos_embed.weight
        side = math.isqrt(table.shape[0])
        cells = whole_cells(size, self.side)
        return hidden + sample_position_table(table, at, (side, side), cells, "bilinear", align_corners=True)

    def deep_layers(self) -> list[int]:
        return list(self.tower.deepstack_visual_indexes)
