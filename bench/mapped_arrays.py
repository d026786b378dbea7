"""Textures whose memory CUDA copies into: the way that uploads would go without a shader.

A texture is registered with CUDA as an image; mapped, each level of each layer is a CUDA array, which is opaque memory
that only copies and texture units reach. An array holds 1, 2 or 4 channels a texel, so a planar image is interleaved
first, and RGB padded.

Source: CUDA runtime API, cudaGraphicsGLRegisterImage, cudaGraphicsSubResourceGetMappedArray, cudaMemcpy2DToArrayAsync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gpu_lod as lod
from gpu_lod.bridge import gl as G
from gpu_lod.texture import Sampled, Texels
from gpu_lod.transfer import new_planes, texture_to_planes


class MappedArrays:
    """A texture with room for some levels [1, C, h, w], registered with CUDA. Everything inside `ctx.active()`.

    Args:
        driver: the bridge's; it maps and unmaps.
        runtime: cuda.bindings.runtime.
        flags: those of cudaGraphicsGLRegisterImage.
    """

    def __init__(self, ctx: lod.Context, driver: Any, runtime: Any, levels: Sequence[torch.Tensor], flags: int) -> None:
        _, channels, height, width = levels[0].shape
        self._driver, self._runtime = driver, runtime
        self.texture = ctx.textures.lease(
            (width, height), layers=1, levels=len(levels), dtype=levels[0].dtype, channels=channels, filtered=True
        )
        self.texture.clamp_levels(ctx.gl, 0, len(levels) - 1)
        ctx.gl.check("making the texture")
        self.way = "cudaMemcpy2DToArrayAsync"
        start = time.perf_counter()
        self._resource = self._call("cudaGraphicsGLRegisterImage", self.texture.glo, G.TEXTURE_2D_ARRAY, flags)
        self.register_seconds = time.perf_counter() - start

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._runtime, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name}: {getattr(status, 'name', status)}")
        return values[0] if values else None

    def interleave(self, levels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[h, w, channels of a texel] of each level."""
        result = []
        for level in levels:
            planes = level[0]
            channels, height, width = planes.shape
            if channels == 1:
                result.append(planes.reshape(height, width, 1))
                continue
            texels = planes.new_empty(height, width, 4 if channels == 3 else channels)
            texels[..., :channels].copy_(planes.permute(1, 2, 0))
            result.append(texels)
        return result

    def copy(self, texels: Sequence[torch.Tensor]) -> None:
        """All levels into the texture, on the driver's current stream; the texture is GL's again afterwards."""
        stream = self._driver.stream()
        self._driver.map([self._resource], stream)
        try:
            for number, level in enumerate(texels):
                array = self._call("cudaGraphicsSubResourceGetMappedArray", self._resource, 0, number)
                try:
                    self._copy(array, level, stream)
                except RuntimeError as error:
                    if self.way == "cudaMemcpy3DAsync":
                        raise
                    self.way = "cudaMemcpy3DAsync"  # the array may count as a layered one
                    try:
                        self._copy(array, level, stream)
                    except RuntimeError as again:
                        raise RuntimeError(f"{error}; {again}") from None
        finally:
            self._driver.unmap([self._resource], stream)

    def _copy(self, array: Any, texels: torch.Tensor, stream: int) -> None:
        height, width, channels = texels.shape
        pitch = width * channels * texels.element_size()
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        if self.way == "cudaMemcpy2DToArrayAsync":
            self._call(self.way, array, 0, 0, texels.data_ptr(), pitch, pitch, height, kind, stream)
            return
        what = self._runtime.cudaMemcpy3DParms()
        what.srcPtr = self._call_plain("make_cudaPitchedPtr", texels.data_ptr(), pitch, width, height)
        what.dstArray = array
        what.extent = self._call_plain("make_cudaExtent", width, height, 1)
        what.kind = kind
        self._call(self.way, what, stream)

    def _call_plain(self, name: str, *arguments: Any) -> Any:
        return getattr(self._runtime, name)(*arguments)

    def close(self) -> None:
        """Unregister; the context must be current."""
        self._call("cudaGraphicsUnregisterResource", self._resource)


def matches(ctx: lod.Context, texture: Sampled, levels: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Read a texture's levels back, inside `ctx.active()`; the result tells, once the verb has ended, if they are
    these, bit by bit."""
    found = []
    for number, level in enumerate(levels):
        if isinstance(texture, Texels):
            ctx.gl.Finish()
            found.append(
                texture.item.level(number)[..., : texture.key.channels].permute(0, 3, 1, 2).view_as(level).clone()
            )
            continue
        planes, tensor = new_planes(ctx, tuple(level.shape), level.dtype)
        texture_to_planes(ctx, texture, number, planes)
        found.append(tensor)
    return lambda: all(torch.equal(mine, level) for mine, level in zip(found, levels, strict=True))
