"""The mean chain of an image that is sampled once, read where it is in memory: no texture is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gpu_lod.bridge import Buffer
from gpu_lod.bridge.gl import GL
from gpu_lod.context import Context
from gpu_lod.generators import chain_of
from gpu_lod.pyramid import level_sizes
from gpu_lod.texture import Readable
from gpu_lod.texture_storage import MOST_LEVELS, Storage, TextureKey
from gpu_lod.transfer import ALIGNMENT, Planes, layer_groups, packed_bytes
from gpu_lod.tuning import generator_of
from gpu_lod.uploads import new_textures, planes_to_textures

_TOP, _BELOW = 6, 7
"""Bindings of level 0 and of the others (shaders/texels.glsl)."""
_STORAGE: dict[torch.dtype, Storage] = {
    torch.uint8: "uint8",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}
_ELEMENTS = 2**31
"""Shaders count them by 32-bit integers."""
_LONGEST = 2**16
"""Of a side: what shaders count of its texels, and twice that far beside it, are integers in fp32."""
_PAGE = 2**16
"""Bytes, at most, before a tensor's memory in the buffer that is made over it."""


class MemoryChain:
    """An image on its way to samplers: to them a `Pyramid`, but one that is made anew at each call. It stays in memory,
    and shaders filter it there by weights of fp32: a texture would be 1.78 times an RGB image beside that.

    Args:
        image: [B, C, H, W] or [C, H, W].
        levels: how many, level 0 included; None goes down to 1 x 1.
    """

    def __init__(self, image: torch.Tensor, levels: int | None = None) -> None:
        self.image = image
        self.size = (image.shape[-2], image.shape[-1])
        self._levels = len(level_sizes(*self.size, levels))
        self.batched = image.ndim == 4
        self.batch = image.shape[0] if self.batched else 1
        self.channels = image.shape[-3]
        self.dtype, self.device = image.dtype, image.device

    def __len__(self) -> int:
        return self._levels

    @property
    def levels(self) -> tuple[torch.Tensor, ...]:
        """What gradients pass to."""
        return (self.image,)

    def texture_context(self) -> Context | None:
        """None: it is a texture nowhere."""
        return None

    def textures(self, ctx: Context, *, filtered: bool = False) -> Sequence[tuple[int, Readable]]:
        """As of `Pyramid`, but levels in memory, unless nothing but a texture unit's own filter will do.

        Raises:
            LimitError: `filtered`, and larger than the device's textures.
        """
        image = (self.image if self.batched else self.image[None]).detach()
        generator = generator_of(ctx.tuning, image)
        chain, _ = chain_of(ctx, image, len(self), "mean", generator, private=True)
        if filtered:
            how: dict[str, Any] = {"dtype": self.dtype, "channels": self.channels, "filtered": True}
            textures = new_textures(ctx, self.size, layers=self.batch, levels=len(self), **how)
            for level, planes in enumerate(chain.planes):
                planes_to_textures(ctx, planes, textures, level)
            return textures
        viewed = all(level.fetchable(ctx) for level in chain.planes)
        groups = [(0, self.batch)] if viewed else layer_groups(ctx, self.batch, _at_once(ctx, self.image))
        return [(first, LevelsInMemory(chain.planes, first, count, self.channels, viewed)) for first, count in groups]


def fits(ctx: Context, image: torch.Tensor, levels: int | None) -> bool:
    """Whether shaders can read an image's chain where it is: all levels below the first are in one buffer."""
    sizes = level_sizes(image.shape[-2], image.shape[-1], levels)
    batch = image.shape[0] if image.ndim == 4 else 1
    below = packed_bytes(batch, image.shape[-3], sizes[1:], image.dtype)
    if len(sizes) > MOST_LEVELS or max(sizes[0]) > _LONGEST:
        return False
    if ctx.fetches and ctx.coherent_with(image) and image.nbytes + below <= _seen(ctx, image.dtype):
        return True
    # Images go into groups that begin at whole words of the result.
    return _at_once(ctx, image) >= min(batch, ALIGNMENT) and below <= _room(ctx, image.dtype)


def _seen(ctx: Context, dtype: torch.dtype) -> int:
    """Bytes of such elements that a buffer texture has, but for where they begin."""
    return min(ctx.limits.texels, _ELEMENTS) * dtype.itemsize - _PAGE


def _room(ctx: Context, dtype: torch.dtype) -> int:
    """Bytes of such elements that a binding holds, wherever they begin."""
    return max(min(ctx.limits.storage_bytes, _ELEMENTS * dtype.itemsize) - 2 * ALIGNMENT, 0)


def _at_once(ctx: Context, image: torch.Tensor) -> int:
    """How many images a binding holds."""
    return _room(ctx, image.dtype) // (math.prod(image.shape[-3:]) * image.dtype.itemsize)


class LevelsInMemory:
    """Some images of a chain, as samplers read a texture.

    Args:
        planes: of all images, a level each; those below the first are in one buffer.
        first, layers: the images.
        viewed: shaders read buffer textures, which software renderers fetch faster; else storage buffers.
    """

    def __init__(self, planes: Sequence[Planes], first: int, layers: int, channels: int, viewed: bool = False) -> None:
        top, *below = self._parts = [level.layers(first * channels, layers * channels) for level in planes]
        self.key = TextureKey(top.width, top.height, layers, len(planes), _STORAGE[top.dtype], channels)
        self._viewed = viewed
        self._ranges = [(_TOP, *_range([top])), (_BELOW, *_range(below or [top]))]
        begins = [0 if self._viewed else begin for _, _, begin, _ in self._ranges]
        starts = [
            (level.offset - begin) // level.dtype.itemsize
            for levels, begin in zip(([top], below), begins, strict=True)
            for level in levels
        ]
        self.reading: dict[str, Any] = {
            "u_starts": (*starts, *(0,) * (MOST_LEVELS - len(planes))),
            "u_top": (top.width, top.height),
            "u_levels": len(planes),
        }

    def defines(self, *, software: bool) -> dict[str, bool | int]:
        """Of the shaders that sample it (shaders/texels.glsl)."""
        how = {"CHANNELS": self.key.channels, "TEXELS_PER_WORD": self._parts[0].per_word, "VIEWED": self._viewed}
        return {"FETCHED": True, "PLANAR": True, "BFLOAT16_TEXELS": self.key.storage == "bfloat16", **how}

    def bind(self, gl: GL) -> None:
        """To texture units 0 and 1, or to the storage-buffer bindings, where every shader of ours expects it."""
        if self._viewed:
            self._parts[0].fetch(0)
            self._parts[min(1, len(self._parts) - 1)].fetch(1)
            return
        for binding, buffer, begin, end in self._ranges:
            buffer.bind(binding, begin, end - begin)


def _range(levels: Sequence[Planes]) -> tuple[Buffer, int, int]:
    """The buffer of some levels, and the first and the last byte (exclusive) of them: whole words, aligned."""
    first, last = levels[0], levels[-1]
    assert all(level.buffer is first.buffer for level in levels), "generators pack what they make"
    return first.buffer, first.offset // ALIGNMENT * ALIGNMENT, -(-(last.offset + last.nbytes) // 4) * 4
