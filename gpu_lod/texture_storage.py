"""What textures are made of: GL objects that hold the mip levels of several layers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gpu_lod.bridge import MappedBuffer
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL

Storage = Literal["uint8", "unorm16", "float16", "bfloat16", "float32"]
_FORMATS = {
    "uint8": (G.R8, G.RG8, G.RGBA8, G.RGBA8),
    "unorm16": (G.R16, G.RG16, G.RGBA16, G.RGBA16),
    "float16": (G.R16F, G.RG16F, G.RGBA16F, G.RGBA16F),
    "bfloat16": (G.R16UI, G.RG16UI, G.RGBA16UI, G.RGBA16UI),  # the bits, for shaders that fetch single texels
    "float32": (G.R32F, G.RG32F, G.RGBA32F, G.RGBA32F),
}
DTYPES: dict[Storage, torch.dtype] = {
    "uint8": torch.uint8,
    "unorm16": torch.int16,  # the bits
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""What their channels are to torch."""

MOST_LEVELS = 16
"""Of a texture in a buffer: a uniform array of shaders/texels.glsl holds where they begin."""


@dataclass(frozen=True)
class TextureKey:
    """Size class of a texture: exactly its storage."""

    width: int
    height: int
    layers: int
    levels: int
    storage: Storage
    channels: int
    buffered: bool = False
    """Texels in a buffer rather than an array texture."""

    @property
    def internal_format(self) -> int:
        return _FORMATS[self.storage][self.channels - 1]

    @property
    def stored_channels(self) -> int:
        return 4 if self.channels == 3 else self.channels

    @property
    def texel_bytes(self) -> int:
        return DTYPES[self.storage].itemsize * self.stored_channels

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(width, height) of each level."""
        return [(max(1, self.width >> level), max(1, self.height >> level)) for level in range(self.levels)]

    @property
    def texels(self) -> int:
        return self.layers * sum(width * height for width, height in self.sizes)

    @property
    def nbytes(self) -> int:
        return self.texels * self.texel_bytes


class ArrayTexture:
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


class TexelBuffer:
    """Levels as texels in a mapped buffer, one level behind the other, which shaders see as a buffer texture: llvmpipe
    fetches from it in half the time, and torch writes straight into it."""

    __slots__ = ("_buffer", "_gl", "glo", "key", "reading", "starts")

    def __init__(self, gl: GL, key: TextureKey) -> None:
        self._gl = gl
        self.key = key
        self.starts = [0]
        for width, height in key.sizes:
            self.starts.append(self.starts[-1] + key.layers * width * height)
        self.reading: dict[str, Any] = {
            "u_starts": (*self.starts[:-1], *(0,) * (MOST_LEVELS - key.levels)),
            "u_top": (key.width, key.height),
            "u_levels": key.levels,
        }
        self._buffer = MappedBuffer(gl, key.nbytes, {})  # no tensor of a caller is made of it
        self.glo = 0
        try:
            self.glo = gl.gen("Textures")
            gl.BindTexture(G.TEXTURE_BUFFER, self.glo)
            gl.TexBuffer(G.TEXTURE_BUFFER, key.internal_format, self._buffer.glo)
            gl.check(f"making a texture of a buffer of {key.nbytes / 2**20:.1f} MiB")
        except BaseException:
            self.delete()
            raise
        if key.channels != key.stored_channels:  # nobody writes the last one, which is to be quick to compute with
            ctypes.memset(self._buffer.address, 0, key.nbytes)

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    def level(self, level: int) -> torch.Tensor:
        """[layers, h, w, stored channels], to be written to while no command reads it."""
        key = self.key
        width, height = key.sizes[level]
        memory = (ctypes.c_uint8 * key.nbytes).from_address(self._buffer.address)
        texels = torch.frombuffer(memory, dtype=DTYPES[key.storage]).view(-1, key.stored_channels)
        return texels[self.starts[level] : self.starts[level + 1]].view(key.layers, height, width, -1)

    def delete(self) -> None:
        self._gl.delete("Textures", self.glo)
        self._buffer.delete()
