"""Textures with mip levels, leased from a pool; and framebuffers over their levels."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch

from gpu_lod.bridge import Lease, Pool, Returns
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL
from gpu_lod.errors import OutOfMemoryError
from gpu_lod.texture_storage import ArrayTexture, Storage, TexelBuffer, TextureKey

_STORAGE: dict[torch.dtype, Storage] = {
    torch.uint8: "uint8",
    torch.float16: "float16",
    torch.bfloat16: "float32",  # texture units know no bfloat16, and fp32 holds it exactly
    torch.float32: "float32",
}
T = TypeVar("T", ArrayTexture, TexelBuffer)


class Texture(Lease[ArrayTexture]):
    """A leased array texture, linear and clamped to the edge; it returns to the pool with its last reference."""

    __slots__ = ()

    @property
    def key(self) -> TextureKey:
        return self.item.key

    @property
    def glo(self) -> int:
        return self.item.glo

    @property
    def reading(self) -> dict[str, Any]:
        """Uniforms of the shaders that sample it."""
        return {}

    def defines(self, *, software: bool) -> dict[str, bool | int]:
        """Of the same (shaders/texels.glsl): who filters, and where texels are."""
        return {"FETCHED": software and self.key.storage == "uint8"}

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

    def render_to(self, gl: GL, level: int, rows: int | None = None) -> None:
        """Make all layers of a level the render target, or of its first rows."""
        if not self.item.framebuffer:
            self.item.framebuffer = gl.gen("Framebuffers")
        gl.BindFramebuffer(G.DRAW_FRAMEBUFFER, self.item.framebuffer)
        gl.FramebufferTexture(G.DRAW_FRAMEBUFFER, G.COLOR_ATTACHMENT0, self.glo, level)
        width, height = self.size(level)
        gl.ViewportIndexedf(0, 0, 0, width, height if rows is None else rows)


class Texels(Lease[TexelBuffer]):
    """Leased mip levels in a buffer, for shaders that filter by themselves (shaders/texels.glsl)."""

    __slots__ = ()

    @property
    def key(self) -> TextureKey:
        return self.item.key

    @property
    def reading(self) -> dict[str, Any]:
        """Uniforms of the shaders that sample it."""
        return self.item.reading

    def defines(self, *, software: bool) -> dict[str, bool | int]:
        """Of the same."""
        return {"FETCHED": True, "BUFFERED": True, "BFLOAT16_TEXELS": self.key.storage == "bfloat16"}

    def bind(self, gl: GL) -> None:
        """To texture unit 0, where every shader of ours expects it."""
        gl.ActiveTexture(G.TEXTURE0)
        gl.BindTexture(G.TEXTURE_BUFFER, self.item.glo)

    def bind_image(self, gl: GL) -> None:
        """All levels to image unit 0, for writing."""
        gl.BindImageTexture(0, self.item.glo, 0, 0, 0, G.WRITE_ONLY, self.key.internal_format)


Sampled = Texture | Texels


class Readable(Protocol):
    """Mip levels as shaders read them: textures, or planes in memory."""

    @property
    def key(self) -> TextureKey: ...

    @property
    def reading(self) -> dict[str, Any]: ...

    def defines(self, *, software: bool) -> dict[str, bool | int]: ...

    def bind(self, gl: GL) -> None: ...


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
        self.pool: Pool[Any] = Pool(max_idle_bytes)
        self.given = 0
        """Textures that callers hold."""
        self._given: Returns[ArrayTexture] = Returns()

    def storage(self, dtype: torch.dtype, *, filtered: bool, buffered: bool = False) -> Storage:
        """How texels of a dtype are kept; `filtered` if a texture unit's linear filter will read them."""
        if buffered and dtype == torch.bfloat16:
            return "bfloat16"
        return "unorm16" if filtered and self._software and dtype == torch.uint8 else _STORAGE[dtype]

    def reading(self, texture: Readable) -> dict[str, bool | int]:
        """Defines of the shaders that sample it."""
        return texture.defines(software=self._software)

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
        return Texture(self.pool.take(key, lambda: self._make(ArrayTexture, key)), self.pool.returned)

    def texels(self, size: tuple[int, int], *, layers: int, levels: int, dtype: torch.dtype, channels: int) -> Texels:
        """The same in a buffer."""
        storage = self.storage(dtype, filtered=False, buffered=True)
        key = TextureKey(*size, layers, levels, storage, channels, buffered=True)
        return Texels(self.pool.take(key, lambda: self._make(TexelBuffer, key)), self.pool.returned)

    def give(self, size: tuple[int, int], *, layers: int, dtype: torch.dtype, channels: int) -> Texture:
        """A texture for the caller's own shaders, which may set what they like: it never comes back to the pool."""
        key = TextureKey(*size, layers, 1, self.storage(dtype, filtered=False), channels)
        texture = Texture(self._make(ArrayTexture, key), self._given)
        self.given += 1
        return texture

    def _make(self, kind: type[T], key: TextureKey) -> T:
        try:
            return kind(self._gl, key)
        except OutOfMemoryError:
            self.trim()
            return kind(self._gl, key)

    def drain(self) -> None:
        self.pool.drain()
        while self._given:
            self._given.pop().delete()
            self.given -= 1

    def trim(self) -> None:
        self.drain()
        self.pool.trim()
