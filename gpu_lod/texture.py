"""Array textures with mip levels, pooled; and framebuffers over their levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gpu_lod.bridge import Lease, Pool, Returns
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL
from gpu_lod.errors import OutOfMemoryError

Storage = Literal["uint8", "unorm16", "float16", "float32"]
_FORMATS = {
    "uint8": (G.R8, G.RG8, G.RGBA8, G.RGBA8),
    "unorm16": (G.R16, G.RG16, G.RGBA16, G.RGBA16),
    "float16": (G.R16F, G.RG16F, G.RGBA16F, G.RGBA16F),
    "float32": (G.R32F, G.RG32F, G.RGBA32F, G.RGBA32F),
}
_CHANNEL_BYTES = {"uint8": 1, "unorm16": 2, "float16": 2, "float32": 4}
_STORAGE: dict[torch.dtype, Storage] = {
    torch.uint8: "uint8",
    torch.float16: "float16",
    torch.float32: "float32",
}


@dataclass(frozen=True)
class TextureKey:
    """Size class of a texture: exactly its storage."""

    width: int
    height: int
    layers: int
    levels: int
    storage: Storage
    channels: int

    @property
    def internal_format(self) -> int:
        return _FORMATS[self.storage][self.channels - 1]

    @property
    def stored_channels(self) -> int:
        return 4 if self.channels == 3 else self.channels

    @property
    def texel_bytes(self) -> int:
        return _CHANNEL_BYTES[self.storage] * self.stored_channels

    @property
    def nbytes(self) -> int:
        return sum(
            max(1, self.width >> level) * max(1, self.height >> level) * self.layers * self.texel_bytes
            for level in range(self.levels)
        )


class _TextureObject:
    """One GL array texture with immutable storage."""

    __slots__ = ("_gl", "framebuffer", "glo", "key")

    def __init__(self, gl: GL, key: TextureKey) -> None:
        self._gl = gl
        self.key = key
        self.framebuffer = 0
        gl.check("an earlier command of this call")
        self.glo = gl.gen("Textures")
        gl.BindTexture(G.TEXTURE_2D_ARRAY, self.glo)
        gl.TexStorage3D(G.TEXTURE_2D_ARRAY, key.levels, key.internal_format, key.width, key.height, key.layers)
        try:
            gl.check(f"making a {key.width} x {key.height} x {key.layers} texture ({key.nbytes / 2**20:.1f} MiB)")
        except BaseException:
            gl.delete("Textures", self.glo)
            raise
        for name, value in (
            (G.TEXTURE_WRAP_S, G.CLAMP_TO_EDGE),
            (G.TEXTURE_WRAP_T, G.CLAMP_TO_EDGE),
            (G.TEXTURE_MAG_FILTER, G.LINEAR),
            (G.TEXTURE_MIN_FILTER, G.LINEAR_MIPMAP_LINEAR),
        ):
            gl.TexParameteri(G.TEXTURE_2D_ARRAY, name, value)

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    def delete(self) -> None:
        if self.framebuffer:
            self._gl.delete("Framebuffers", self.framebuffer)
        self._gl.delete("Textures", self.glo)


class Texture(Lease[_TextureObject]):
    """A leased array texture, linear and clamped to the edge; it returns to the pool with its last reference."""

    __slots__ = ()

    @property
    def key(self) -> TextureKey:
        return self.item.key

    @property
    def glo(self) -> int:
        return self.item.glo

    @property
    def texel_scale(self) -> float:
        """What a sampled value is to be multiplied with: integer texels are sampled as fractions."""
        return 255.0 if self.key.storage in ("uint8", "unorm16") else 1.0

    def size(self, level: int) -> tuple[int, int]:
        """(width, height) of a level."""
        return max(1, self.key.width >> level), max(1, self.key.height >> level)

    def bind(self, gl: GL) -> None:
        """To texture unit 0, where every shader of ours expects it."""
        gl.ActiveTexture(G.TEXTURE0)
        gl.BindTexture(G.TEXTURE_2D_ARRAY, self.glo)

    def clamp_levels(self, gl: GL, first: int, last: int) -> None:
        """Let samplers see levels first..last only, first as their level 0. Binds."""
        self.bind(gl)
        gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_BASE_LEVEL, first)
        gl.TexParameteri(G.TEXTURE_2D_ARRAY, G.TEXTURE_MAX_LEVEL, last)

    def bind_image(self, gl: GL, level: int) -> None:
        """All layers of a level to image unit 0, for writing."""
        gl.BindImageTexture(0, self.glo, level, 1, 0, G.WRITE_ONLY, self.key.internal_format)

    def render_to(self, gl: GL, level: int) -> None:
        """Make all layers of a level the render target."""
        if not self.item.framebuffer:
            self.item.framebuffer = gl.gen("Framebuffers")
        gl.BindFramebuffer(G.DRAW_FRAMEBUFFER, self.item.framebuffer)
        gl.FramebufferTexture(G.DRAW_FRAMEBUFFER, G.COLOR_ATTACHMENT0, self.glo, level)
        gl.Viewport(0, 0, *self.size(level))


class TexturePool:
    """Textures of one context.

    Args:
        software: a software renderer. Mesa's filter 8-bit textures in 8-bit arithmetic, off by more than a count: there
            shaders filter such textures themselves. In 16-bit ones, which hold the same values exactly, the texture
            unit filters in fp32.
    """

    def __init__(self, gl: GL, software: bool, max_idle_bytes: int = 512 * 2**20) -> None:
        self._gl = gl
        self._software = software
        self.pool: Pool[_TextureObject] = Pool(max_idle_bytes)
        self._given: Returns[_TextureObject] = Returns()

    def storage(self, dtype: torch.dtype, *, filtered: bool) -> Storage:
        """How texels of a dtype are kept; `filtered` if a texture unit's linear filter will read them."""
        return "unorm16" if filtered and self._software and dtype == torch.uint8 else _STORAGE[dtype]

    def fetched(self, texture: Texture) -> bool:
        """True where shaders filter the texture themselves (shaders/trilinear.glsl)."""
        return self._software and texture.key.storage == "uint8"

    def lease(
        self,
        size: tuple[int, int],
        *,
        layers: int,
        levels: int,
        dtype: torch.dtype,
        channels: int,
        filtered: bool = False,
    ) -> Texture:
        """A texture of `size` (width, height), contents undefined. The context must be current."""
        key = TextureKey(*size, layers, levels, self.storage(dtype, filtered=filtered), channels)
        return Texture(self.pool.take(key, lambda: self._make(key)), self.pool.returned)

    def give(self, size: tuple[int, int], *, layers: int, dtype: torch.dtype, channels: int) -> Texture:
        """A texture for the caller's own shaders, which may set what they like: it never comes back to the pool."""
        key = TextureKey(*size, layers, 1, self.storage(dtype, filtered=False), channels)
        return Texture(self._make(key), self._given)

    def _make(self, key: TextureKey) -> _TextureObject:
        try:
            return _TextureObject(self._gl, key)
        except OutOfMemoryError:
            self.trim()
            return _TextureObject(self._gl, key)

    def drain(self) -> None:
        self.pool.drain()
        while self._given:
            self._given.pop().delete()

    def trim(self) -> None:
        self.drain()
        self.pool.trim()
