"""Vision towers of Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import Adapter, register_adapter
from gpu_lod.vlm.adapters.encoded import Encoded, Size
from gpu_lod.vlm.adapters.staged import batched, embed, whole_cells
from gpu_lod.vlm.position_table import sample_position_table
from gpu_lod.vlm.positions import grid_positions, rotary_embedding


class _Tower(Adapter):
    """What both share: a token is a merge unit, 2 x 2 neighbouring patches of one level, so `patch` is twice the
    tower's own. Sites choose units; each is split into its four patches, whose positions lie half a unit's side apart,
    2^level cells at a level. A still picture is its own next frame, as for the model."""

    at_once = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        owner = getattr(self.model, "model", self.model)
        self.tower: Any = getattr(owner, "visual", owner)
        self.merge = self.tower.config.spatial_merge_size
        self.side = self.tower.config.patch_size
        self.patch = self.merge * self.side
        self.channels = self.tower.config.in_channels

    def parts(self) -> list[nn.Module]:
        return [self.tower]

    def run(self, tokens: TokenSet, size: Size | tuple[Size, ...]) -> Encoded:
        batch, budget = tokens.sites.shape[:2]
        hidden, at, window = batched(self._start, tokens, size)
        assert hidden is not None and at is not None
        parts = self.merge**2
        pictures = torch.arange(batch, device=at.device)[:, None]
        order = (torch.zeros_like(tokens.scores) if window is None else window).argsort(dim=1, stable=True)

        def arranged(values: torch.Tensor) -> torch.Tensor:
            return values.unflatten(1, (budget, parts))[pictures, order].flatten(0, 2)

        cos, sin = rotary_embedding(arranged(at), self.tower.rotary_pos_emb.inv_freq)
        whole = torch.arange(batch + 1, dtype=torch.int32, device=at.device) * (budget * parts)
        lengths = whole if window is None else _ends(window.gather(1, order), parts)
        hidden, deepstack = arranged(hidden), []
        for index, block in enumerate(self.tower.blocks):
            full = window is None or index in self.tower.fullatt_block_indexes
            hidden = block(hidden, cu_seqlens=whole if full else lengths, position_embeddings=(cos, sin))
            if index in self.deep_layers():
                merger = self.tower.deepstack_merger_list[self.deep_layers().index(index)]
                deepstack.append(merger(hidden).unflatten(0, (batch, budget)))
        back = order.argsort(1)
        merged = self.tower.merger(hidden).unflatten(0, (batch, budget))[pictures, back]
        hidden = hidden.unflatten(0, (batch, budget, parts))[pictures, back].flatten(1, 2)
        deepstack = [features[pictures, back] for features in deepstack]
        return Encoded(hidden, tokens, size, merged=merged, deepstack=tuple(deepstack))

    def _start(self, tokens: TokenSet, size: Size) -> tuple[torch.Tensor | None, ...]:
        """What depends on the size of the picture: [B, 4 K, D] patches, [B, 4 K, 2] their positions, [B, K] windows."""
        assert tokens.patches is not None
        at = self._positions(tokens.sites, size)
        patches = tokens.patches.unfold(-2, self.side, self.side).unfold(-2, self.side, self.side)
        patches = patches.movedim(2, 4).flatten(1, 3)  # [B, 4 K, C, P, P], a unit's row by row
        layer = self.tower.patch_embed.proj
        hidden = self._placed(embed(patches, layer.weight.sum(2), layer.bias), at, size)
        return hidden, at, self._windows(tokens.sites, size)

    def _positions(self, sites: torch.Tensor, size: Size) -> torch.Tensor:
        """[B, 4 K, 2]: (y, x) of each patch of each unit, in the tower's own patches."""
        level, y, x = grid_positions(sites, size, self.side).unbind(-1)
        step = (torch.arange(self.merge, dtype=level.dtype, device=sites.device) - (self.merge - 1) / 2) * torch.exp2(
            level
        )[..., None]
        rows, columns = (y[..., None] + step)[..., :, None], (x[..., None] + step)[..., None, :]
        return torch.stack(torch.broadcast_tensors(rows, columns), dim=-1).flatten(1, 3)

    def _placed(self, hidden: torch.Tensor, at: torch.Tensor, size: Size) -> torch.Tensor:
        """Patches with learned positions, if there are such."""
        return hidden

    def deep_layers(self) -> list[int]:
        """Blocks whose features go to the language model, too."""
        return []

    def _windows(self, sites: torch.Tensor, size: Size) -> torch.Tensor | None:
        """[B, K] the window that each token attends in, by number, if there are windows."""
        return None


def _ends(window: torch.Tensor, parts: int) -> torch.Tensor:
    """Where windows begin and end, of tokens [B, K] that are in order of their windows, each of so many patches."""
    new = torch.ones_like(window, dtype=torch.bool)
    new[:, 1:] = window[:, 1:] != window[:, :-1]
    begins = new.flatten().nonzero()[:, 0]
    return (torch.cat([begins, begins.new_tensor([window.numel()])]) * parts).int()


@register_adapter(
    "transformers.Qwen2_5_VisionTransformerPretrainedModel",
    "transformers.Qwen2_5_VLModel",
    "transformers.Qwen2_5_VLForConditionalGeneration",
)
class Qwen25(_Tower):
    """Qwen2.5-VL's tower: units of 28 x 28 pixels, rotary positions, attention in windows of 112 pixels in most of its
    blocks.

    A token attends in the window that its centre lies in, as in the model, and with the full level-0 grid as the set
    the result is that of the untouched model: what a token less or more changes is little. Where no token is of level
    0, windows are as much larger as the finest ones, so that a level of its own is looked at as a picture of that size.

    Source: Bai et al., "Qwen2.5-VL Technical Report" (2025).
    """

    def _windows(self, sites: torch.Tensor, size: Size) -> torch.Tensor:
        level, y, x = grid_positions(sites.detach(), size, self.patch).unbind(-1)
        finest = torch.exp2(level.amin(1, keepdim=True).round())
        side = max(1, self.tower.config.window_size // self.patch) * finest
        across = whole_cells(size, self.patch)[1] + 1
        row, column = (((at + 0.5) / side).floor().clamp(min=0).long() for at in (y, x))
        return row * across + column


@register_adapter(
    "transformers.Qwen3VLVisionModel", "transformers.Qwen3VLModel", "transformers.Qwen3VLForConditionalGeneration"
)
class Qwen3(_Tower):
    """Qwen3-VL's tower: units of 32 x 32 pixels, rotary positions and a learned table, which is read bilinearly from
    corner to corner; all blocks attend to the whole picture. Features of some of its blocks (`deepstack`) go to the
    first layers of the language model.

    Source: Bai et al., "Qwen3-VL Technical Report" (2025).
    """

    def _placed(self, hidden: torch.Tensor, at: torch.Tensor, size: Size) -> torch.Tensor:
        table = self.tower.pos_embed.weight
        side = math.isqrt(table.shape[0])
        cells = whole_cells(size, self.side)
        return hidden + sample_position_table(table, at, (side, side), cells, "bilinear", align_corners=True)

    def deep_layers(self) -> list[int]:
        return list(self.tower.deepstack_visual_indexes)
