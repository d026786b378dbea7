"""Chains that are textures alone: the values of pyramids, made a tile at a time."""

from __future__ import annotations

import pytest
import torch
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod import texture_chain
from gpu_lod.texture import Sampled, Texels, Texture
from gpu_lod.texture_chain import TextureChain
from gpu_lod.transfer import new_planes, texture_to_planes


def texels(ctx: lod.Context, textures: list[tuple[int, Sampled]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every level of every texture."""
    found = []
    for _, texture in textures:
        key = texture.key
        for level in range(key.levels):
            if isinstance(texture, Texels):
                channels = texture.item.level(level).permute(0, 3, 1, 2)[:, : key.channels]
                found.append(channels.reshape(-1, *channels.shape[2:]).clone())
                continue
            width, height = texture.size(level)
            planes, values = new_planes(ctx, (key.layers * key.channels, height, width), dtype)
            texture_to_planes(ctx, texture, level, planes)
            found.append(values)
    return found


@pytest.mark.parametrize("least", [1, 3000, 2**20], ids="tile {} bytes".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_texels_of_a_pyramid(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, least: int) -> None:
    monkeypatch.setattr(texture_chain, "TILE_BYTES", (least, max(least, 9000)))
    for shape in ((3, 64, 96), (2, 3, 63, 45), (1, 1, 127, 8), (2, 101, 77), (4, 5, 1), (3, 1, 300), (9, 3, 14, 14)):
        image = noise(*shape, dtype=dtype)
        pyramid = lod.mipmap(image, generator="compute")
        with lod.Context() as ctx, ctx.active():
            found = texels(ctx, TextureChain(image).textures(ctx), dtype)
            expected = texels(ctx, pyramid.textures(ctx), dtype)
            ctx.gl.Finish()
            assert len(found) == len(expected) == len(pyramid)
            assert all(map(torch.equal, found, expected)), shape


@pytest.mark.parametrize("most", [300, 200], ids=["of a buffer", "of an array"])
def test_more_images_than_a_texture_has_layers(restored_limits: lod.Context, most: int) -> None:
    restored_limits.limits.layers = 256
    restored_limits.limits.texels = most * (7 * 6 + 3 * 3 + 1)
    for dtype in DTYPES:
        image = noise(300, 3, 7, 6, dtype=dtype)
        pyramid = lod.mipmap(image, generator="compute")
        with restored_limits as ctx, ctx.active():
            textures = TextureChain(image).textures(ctx)
            assert all(
                isinstance(texture, Texels if most > 256 and ctx.fetches else Texture) for _, texture in textures
            )
            found = texels(ctx, textures, dtype)
            expected = texels(ctx, pyramid.textures(ctx), dtype)
            ctx.gl.Finish()
            assert len(found) == len(expected) == 2 * len(pyramid)
            assert all(map(torch.equal, found, expected))
