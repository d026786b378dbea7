"""Vision towers of Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
        row = self._row(tokens, size)
        batch, budget = row.order.shape
        hidden, deepstack = row.hidden, []
        for index, block in enumerate(self.tower.blocks):
            hidden = block(hidden, **self._beside(row, index))
            if index in self.deep_layers():
                merger = self.tower.deepstack_merger_list[self.deep_layers().index(index)]
                deepstack.append(row.back(merger(hidden).unflatten(0, (batch, budget))))
        merged = row.back(self.tower.merger(hidden).unflatten(0, (batch, budget)))
        hidden = row.back(hidden.unflatten(0, (batch, budget, -1))).flatten(1, 2)
        return Encoded(hidden, tokens, size, merged=merged, deepstack=tuple(deepstack))

    def attention(self, tokens: TokenSet, size: Any, layer: int) -> tuple[torch.Tensor, ...]:
        """What a block attends to, its keys before they are turned, and its output: [B, heads, 4 K, 4 K], [B, 4 K, D]
        and [B, 4 K, D], the four patches of each token side by side. Tokens of other windows are attended to by 0.

        Args:
            tokens, size: as for a call.
            layer: from 0.

        Raises:
            InputError: as a call.
        """
        tokens, size = self.checked(tokens, size)
        row, entered = self._row(tokens, size), []
        batch, budget = row.order.shape
        hidden, blocks = row.hidden, self.tower.blocks
        for index, block in enumerate(blocks[:layer]):
            hidden = block(hidden, **self._beside(row, index))
        part, beside = blocks[layer].attn, self._beside(row, layer)
        hook = part.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
        try:
            hidden = blocks[layer](hidden, **beside)
        finally:
            hook.remove()

        def arranged(values: torch.Tensor) -> torch.Tensor:
            return row.back(values.unflatten(0, (batch, budget, -1))).flatten(1, 2)

        queries, keys, _ = part.qkv(entered[0]).chunk(3, dim=-1)
        cos, sin = (arranged(values)[:, :, None].float() for values in beside["position_embeddings"])
        turned = []
        for values in (queries, keys):
            heads = arranged(values).unflatten(-1, (part.num_heads, -1)).float()
            one, other = heads.chunk(2, dim=-1)
            turned.append((heads * cos + torch.cat([-other, one], dim=-1) * sin).to(values).transpose(1, 2))
        scores = turned[0] @ turned[1].mT * part.scaling
        if row.window is not None and not self._sees_all(layer):
            window = row.window.repeat_interleave(self.merge**2, dim=1)
            scores = scores.masked_fill((window[:, :, None] != window[:, None, :])[:, None], -torch.inf)
        return scores.float().softmax(-1).to(scores), arranged(keys), arranged(hidden)

    def _row(self, tokens: TokenSet, size: Size | tuple[Size, ...]) -> _Row:
        hidden, at, window = batched(self._start, tokens, size)
        assert hidden is not None and at is not None
        order = (torch.zeros_like(tokens.scores) if window is None else window).argsort(dim=1, stable=True)
        batch, budget = order.shape
        pictures, parts = torch.arange(batch, device=at.device)[:, None], self.merge**2

        def arranged(values: torch.Tensor) -> torch.Tensor:
            return values.unflatten(1, (budget, parts))[pictures, order].flatten(0, 2)

        turns = rotary_embedding(arranged(at), self.tower.rotary_pos_emb.inv_freq)
        whole = torch.arange(batch + 1, dtype=torch.int32, device=at.device) * (budget * parts)
        lengths = whole if window is None else _ends(window.gather(1, order), parts)
        return _Row(arranged(hidden), order, turns, whole, lengths, window)

    def _beside(self, row: _Row, index: int) -> dict[str, Any]:
        """What a block reads beside hidden states."""
        return {
            "cu_seqlens": row.whole if self._sees_all(index) else row.lengths,
            "position_embeddings": row.turns,
        }

    def _sees_all(self, index: int) -> bool:
        """Whether a block has no windows."""
        return index in getattr(self.tower, "fullatt_block_indexes", (index,))

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


class _Row(NamedTuple):
    """Patches of a batch in one row, each picture's in the order of their windows."""

    hidden: torch.Tensor
    """[B * 4 K, D]"""
    order: torch.Tensor
    """[B, K]: the tokens"""
    turns: tuple[torch.Tensor, torch.Tensor]
    """cos and sin of their positions"""
    whole: torch.Tensor
    """Where pictures begin and end,"""
    lengths: torch.Tensor
    """and where windows do."""
    window: torch.Tensor | None
    """[B, K] of each token, in the order of the set"""

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """[B, K, ...] in the order of the set."""
        return values[torch.arange(len(values), device=values.device)[:, None], self.order.argsort(1)]


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
