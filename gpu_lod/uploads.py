"""Tensors on their way into textures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpu_lod import recording
from gpu_lod.bridge import Shared
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context
from gpu_lod.copies import SERIAL, put
from gpu_lod.texture import Sampled, Texels
from gpu_lod.texture_storage import DTYPES, MOST_LEVELS, TextureKey
from gpu_lod.transfer import (
    ALIGNMENT,
    Planes,
    check_texture_size,
    layer_groups,
    planes_of,
    planes_to_texture,
)

STAGING_BYTES = 2**17
"""Texels that go through memory at once: so few stay in the cache, and torch interleaves them on one thread."""

_TYPES = {
    "uint8": G.UNSIGNED_BYTE,
    "unorm16": G.UNSIGNED_SHORT,
    "float16": G.HALF_FLOAT,
    "float32": G.FLOAT,
}
_FORMATS = (G.RED, G.RG, G.RGBA, G.RGBA)


def by_host(ctx: Context) -> bool:
    """True where `Uploader` is used: on a software renderer, where torch and OpenGL share memory amid a verb.
    Hardware would wait for each piece and read its memory back."""
    return ctx.software and ctx.bridge.coherent


def new_textures(
    ctx: Context,
    size: tuple[int, int],
    *,
    layers: int,
    levels: int,
    dtype: torch.dtype,
    channels: int,
    filtered: bool = False,
) -> list[tuple[int, Sampled]]:
    """Textures of undefined contents for mip levels below `size` (H, W): (first layer, texture).

    Args:
        filtered: array textures such as a texture unit's own filter can read; without it, software renderers get
            theirs in a buffer.

    Raises:
        LimitError: larger than the device's textures.
    """
    check_texture_size(ctx, *size)
    height, width = size
    how: dict[str, Any] = {"levels": levels, "dtype": dtype, "channels": channels}
    if ctx.fetches and not filtered and levels <= MOST_LEVELS:
        most = ctx.limits.texels // TextureKey(width, height, 1, levels, "float32", channels).texels
        if most >= min(layers, ALIGNMENT):
            groups = layer_groups(ctx, layers, most)
            return [(first, ctx.textures.texels((width, height), layers=count, **how)) for first, count in groups]
    result: list[tuple[int, Sampled]] = []
    for first, count in layer_groups(ctx, layers):
        texture = ctx.textures.lease((width, height), layers=count, filtered=filtered, **how)
        texture.clamp_levels(ctx.gl, 0, levels - 1)
        result.append((first, texture))
    return result


def tensors_to_textures(ctx: Context, levels: Sequence[torch.Tensor], textures: Sequence[tuple[int, Sampled]]) -> None:
    """Write the levels of a pyramid, tensors [..., h, w], into textures (first layer, texture) of as many levels.

    Where the bridge allows it they go through a small buffer, and memory holds no second copy of them.
    """
    if by_host(ctx):
        recording.step(_from_host, ctx, levels, textures, reads=levels)
        return
    # All of them first: torch's copies, then GL's work.
    sources = [planes_of(ctx, level) for level in levels]
    for level, source in enumerate(sources):
        planes_to_textures(ctx, source, textures, level)


def _from_host(ctx: Context, levels: Sequence[torch.Tensor], textures: Sequence[tuple[int, Sampled]]) -> None:
    finish(ctx)  # a verb round this one, or before it in a plan, may have made them
    uploader = Uploader(ctx)
    for level, tensor in enumerate(levels):
        for first, texture in textures:
            key = texture.key
            layers = tensor.reshape(-1, key.channels, *tensor.shape[-2:])
            uploader.write(layers[first : first + key.layers], texture, level)


def planes_to_textures(ctx: Context, source: Planes, textures: Sequence[tuple[int, Sampled]], level: int) -> None:
    for first, texture in textures:
        channels = texture.key.channels
        planes_to_texture(ctx, source.layers(first * channels, texture.key.layers * channels), texture, level)


def finish(ctx: Context) -> None:
    """Let torch read what OpenGL wrote, in the midst of a verb on a coherent bridge."""
    ctx.gl.MemoryBarrier(G.CLIENT_MAPPED_BUFFER_BARRIER_BIT)
    ctx.gl.Finish()


class Uploader:
    """Writes planes of tensors into textures: torch interleaves the channels, straight into the buffer that texels lie
    in, or for the driver to copy whole rows. On a software renderer the latter takes an eighth of the time of a shader
    that stores texel by texel, and the former a fifth of that.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._lease: Shared | None = None
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        ctx.gl.PixelStorei(G.UNPACK_ALIGNMENT, 1)

    def write(self, values: torch.Tensor, texture: Sampled, level: int) -> None:
        """Values [layers, channels, rows, columns] of any strides, all of a level."""
        key = texture.key
        rows, width = values.shape[-2:]
        if isinstance(texture, Texels):
            target = texture.item.level(level)[..., : key.channels].permute(0, 3, 1, 2)
            if values.numel() < SERIAL:
                put(self._ctx, target, values)
                return
            for channel in range(key.channels):  # far faster than channels innermost
                put(self._ctx, target[:, channel], values[:, channel])
            return
        row_bytes = width * key.texel_bytes
        if self._lease is None or self._lease.nbytes < row_bytes:  # a single row may be more
            self._lease = self._ctx.bridge.lease(max(STAGING_BYTES, row_bytes))
            # A fourth channel may be anything but slow to compute with.
            self._lease.tensor(torch.uint8, (self._lease.nbytes,)).zero_()
            self._views.clear()
        at_once = self._lease.nbytes // row_bytes
        whole, tall = max(at_once // rows, 1), min(at_once, rows)
        texture.bind(self._ctx.gl)
        texels = values.detach().permute(0, 2, 3, 1)
        for first in range(0, texels.shape[0], whole):
            for top in range(0, rows, tall):
                part = texels[first : first + whole, top : top + tall]
                self._ctx.gl.TexSubImage3D(
                    *(G.TEXTURE_2D_ARRAY, level, 0, top, first, width, part.shape[1], part.shape[0]),
                    *(_FORMATS[key.channels - 1], _TYPES[key.storage], self._stage(part, key)),
                )

    def _stage(self, texels: torch.Tensor, key: TextureKey) -> int:
        """The address of the texels as the driver takes them."""
        dtype = DTYPES[key.storage]
        as_it_is = texels.dtype == dtype and key.channels == key.stored_channels and texels.is_contiguous()
        if as_it_is and not texels.is_neg():  # torch has yet to negate such a view's memory
            return texels.data_ptr()
        shape = (*texels.shape[:3], key.stored_channels)
        staged = self._views.get((dtype, shape))
        if staged is None:
            assert self._lease is not None
            staged = self._views[dtype, shape] = self._lease.tensor(dtype, shape)
        staged[..., : key.channels].copy_(texels)
        if key.storage == "unorm16":
            staged.mul_(257)  # bits of value / 255 in 65535ths
        return staged.data_ptr()
