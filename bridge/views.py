"""Buffers that shaders see as storage buffers and as buffer textures.

A software renderer fetches a texel of four floats in a third of the time that it takes to load them from a storage
buffer: it walks over the invocations of a vector one by one for these, and fetches texels for all of them at once.

Source: GL_ARB_texture_buffer_object (core in OpenGL 3.1).
"""

from __future__ import annotations

from . import gl as G
from .gl import GL


def alike(nbytes: int) -> int:
    """So many bytes or up to 768 more, for a buffer that shaders read as a texture. For all of these sizes llvmpipe
    compiles a shader once; else it does so anew, which takes up to a second, where a size is a power of two, and where
    bits 8 to 15 of it are 0, which it takes for the number of the last mip level.

    Source: Mesa, lp_sampler_static_texture_state.
    """
    while nbytes & (nbytes - 1) == 0 or nbytes & 0xFF00 == 0:
        nbytes = (nbytes | 0xFF) + 1
    return nbytes


class Views:
    """The buffer textures of one buffer, each made when it is first bound."""

    __slots__ = ("_gl", "_glo", "_textures")

    def __init__(self, gl: GL, glo: int) -> None:
        self._gl = gl
        self._glo = glo
        self._textures: dict[int, int] = {}

    def bind(self, unit: int, internal_format: int) -> None:
        """Bind the whole buffer, as texels of a format, to a texture unit."""
        gl = self._gl
        gl.ActiveTexture(G.TEXTURE0 + unit)
        texture = self._textures.get(internal_format)
        if texture is None:
            texture = self._textures[internal_format] = gl.gen("Textures")
            gl.BindTexture(G.TEXTURE_BUFFER, texture)
            gl.TexBuffer(G.TEXTURE_BUFFER, internal_format, self._glo)
        else:
            gl.BindTexture(G.TEXTURE_BUFFER, texture)

    def delete(self) -> None:
        """Before the buffer: what a texture is made of lives as long as it does."""
        while self._textures:
            self._gl.delete("Textures", self._textures.popitem()[1])


class OwnBuffer:
    """A GL buffer object that is never handed over, and its buffer textures."""

    __slots__ = ("_gl", "glo", "views")

    def __init__(self, gl: GL, glo: int) -> None:
        self._gl = gl
        self.glo = glo
        self.views = Views(gl, glo)

    def take(self) -> None:
        """Nothing to hand over."""

    def bind(self, binding: int, start: int, size: int) -> None:
        """Bind a range to a storage-buffer binding."""
        self._gl.BindBufferRange(G.SHADER_STORAGE_BUFFER, binding, self.glo, start, size)

    def delete(self) -> None:
        self.views.delete()
        self._gl.delete("Buffers", self.glo)
