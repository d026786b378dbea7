"""Encoders that are a row of blocks, of which any may be the last, on pictures of any sizes at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpu_lod.errors import InputError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import Adapter, Layer, some_of
from gpu_lod.vlm.adapters.encoded import Encoded, Size


class Staged(Adapter):
    """An encoder of one kind of block, of which any may be the last: what goes in depends on the picture's size, and
    the blocks do not look at it."""

    layered = True
    at_once = True

    @abstractmethod
    def start(self, tokens: TokenSet, size: Size) -> tuple[torch.Tensor | None, ...]:
        """What the first block reads, [B, T, D], and what each block reads beside it, [B, ...]."""

    @abstractmethod
    def blocks(self) -> Sequence[Any]:
        """The blocks, in their order."""

    @abstractmethod
    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last hidden state of the model, and what it pools, of the last block's output."""

    def step(self, block: Any, hidden: torch.Tensor, *beside: torch.Tensor | None) -> torch.Tensor:
        """One block."""
        found: torch.Tensor = block(hidden, None)
        return found

    def prefix(self) -> int:
        """Class and register tokens."""
        return 0

    def run(self, tokens: TokenSet, size: Size | tuple[Size, ...], layer: Layer = None) -> Encoded:
        blocks = self.blocks()
        wanted = None if layer is None else _layers(layer, len(blocks), type(self.model).__name__)
        hidden, *beside = batched(self.start, tokens, size)
        assert hidden is not None
        kept: dict[int, torch.Tensor] = {}
        for index, block in enumerate(blocks if wanted is None else blocks[: max(wanted) + 1]):
            hidden = self.step(block, hidden, *beside)
            if wanted is not None and index in wanted:
                kept[index] = hidden
        if wanted is None:
            hidden, pooled = self.finish(hidden)
            return Encoded(hidden, tokens, size, self.prefix(), pooled)
        return Encoded(torch.cat([kept[index] for index in wanted], -1), tokens, size, self.prefix())


class TwoTowers(Staged):
    """A vision tower of transformers, or the model of two towers that holds it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tower = getattr(self.model, "vision_model", self.model)
        self.patch = self.tower.config.patch_size
        self.channels = self.tower.config.num_channels

    def parts(self) -> list[nn.Module]:
        return [self.tower]


def batched(
    start: Callable[[TokenSet, Size], tuple[torch.Tensor | None, ...]], tokens: TokenSet, size: Size | tuple[Size, ...]
) -> list[torch.Tensor | None]:
    """Of every picture what depends on its size, in one batch."""
    if not isinstance(size[0], tuple):
        return list(start(tokens, size))
    each = [start(some_of(tokens, index), one) for index, one in enumerate(size)]
    return [None if values[0] is None else torch.cat(values) for values in zip(*each, strict=True)]


def embed(patches: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A convolution whose stride is its kernel, on patches [..., C, P, P]: one linear map."""
    return F.linear(patches.flatten(-3).to(weight.dtype), weight.flatten(1), bias)


def whole_cells(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """(h, w) of the grid that an encoder makes of a picture: its patches leave out what is less than one."""
    return max(1, size[0] // patch), max(1, size[1] // patch)


def _layers(layer: Any, count: int, what: str) -> list[int]:
    """Blocks by index, from the front."""
    each = list(layer) if isinstance(layer, (tuple, list)) else [layer]
    whole = all(isinstance(one, int) and not isinstance(one, bool) and -count <= one < count for one in each)
    if not each or not whole:
        raise InputError(f"layer is {layer!r}; {what} has {count}, from 0 or from -1 backward.")
    return [one % count for one in each]
