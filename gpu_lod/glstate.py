"""Save and restore the GL state that gpu_lod's verbs change, for contexts that belong to somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL

# What the verbs use, and therefore all that needs saving: keep in step with texture.py, program.py and the verbs.
TEXTURE_UNITS = 8
IMAGE_UNITS = 1
STORAGE_BINDINGS = 8
_CAPABILITIES = (
    G.BLEND,
    G.DEPTH_TEST,
    G.CULL_FACE,
    G.SCISSOR_TEST,
    G.STENCIL_TEST,
    G.RASTERIZER_DISCARD,
    G.FRAMEBUFFER_SRGB,
    G.COLOR_LOGIC_OP,
    G.SAMPLE_ALPHA_TO_COVERAGE,
    G.SAMPLE_COVERAGE,
    G.SAMPLE_MASK,
    *(G.CLIP_DISTANCE0 + plane for plane in range(8)),
)
_UNPACKING = (  # how pixels lie in memory: all but the alignment are 0 in a fresh context
    G.UNPACK_ALIGNMENT,
    G.UNPACK_SWAP_BYTES,
    G.UNPACK_LSB_FIRST,
    G.UNPACK_ROW_LENGTH,
    G.UNPACK_SKIP_ROWS,
    G.UNPACK_SKIP_PIXELS,
    G.UNPACK_SKIP_IMAGES,
    G.UNPACK_IMAGE_HEIGHT,
)
_BUFFERS = (
    (G.PIXEL_UNPACK_BUFFER, G.PIXEL_UNPACK_BUFFER_BINDING),
    (G.COPY_READ_BUFFER, G.COPY_READ_BUFFER_BINDING),
    (G.COPY_WRITE_BUFFER, G.COPY_WRITE_BUFFER_BINDING),
    (G.DISPATCH_INDIRECT_BUFFER, G.DISPATCH_INDIRECT_BUFFER_BINDING),
    (G.SHADER_STORAGE_BUFFER, G.SHADER_STORAGE_BUFFER_BINDING),
)


@contextmanager
def preserved(gl: GL) -> Iterator[None]:
    """Run with the state a fresh context has, as far as the verbs rely on it, and put the caller's back."""
    program = gl.integer(G.CURRENT_PROGRAM)
    vertex_array = gl.integer(G.VERTEX_ARRAY_BINDING)
    draw, read = gl.integer(G.DRAW_FRAMEBUFFER_BINDING), gl.integer(G.READ_FRAMEBUFFER_BINDING)
    viewport = gl.integers(G.VIEWPORT, 4)
    mask = gl.integers(G.COLOR_WRITEMASK, 4)
    polygon_mode = gl.integers(G.POLYGON_MODE, 2)[0]
    enabled = [capability for capability in _CAPABILITIES if gl.IsEnabled(capability)]
    unpacking = [gl.integer(name) for name in _UNPACKING]
    # The general binding points come last when restoring: binding an index sets them too.
    buffers = [(target, gl.integer(name)) for target, name in _BUFFERS]
    storage = [
        tuple(
            gl.indexed(name, index)
            for name in (
                G.SHADER_STORAGE_BUFFER_BINDING,
                G.SHADER_STORAGE_BUFFER_START,
                G.SHADER_STORAGE_BUFFER_SIZE,
            )
        )
        for index in range(STORAGE_BINDINGS)
    ]
    active = gl.integer(G.ACTIVE_TEXTURE)
    textures = []
    for unit in range(TEXTURE_UNITS):
        gl.ActiveTexture(G.TEXTURE0 + unit)
        names = (G.TEXTURE_BINDING_2D_ARRAY, G.TEXTURE_BINDING_BUFFER, G.SAMPLER_BINDING)
        textures.append(tuple(map(gl.integer, names)))
    images = [
        [
            gl.indexed(name, unit)
            for name in (
                G.IMAGE_BINDING_NAME,
                G.IMAGE_BINDING_LEVEL,
                G.IMAGE_BINDING_LAYERED,
                G.IMAGE_BINDING_LAYER,
                G.IMAGE_BINDING_ACCESS,
                G.IMAGE_BINDING_FORMAT,
            )
        ]
        for unit in range(IMAGE_UNITS)
    ]
    try:
        for unit in range(TEXTURE_UNITS):
            gl.BindSampler(unit, 0)
        for capability in enabled:
            gl.Disable(capability)
        for name in _UNPACKING[1:]:
            gl.PixelStorei(name, 0)
        gl.BindBuffer(G.PIXEL_UNPACK_BUFFER, 0)
        gl.ColorMask(1, 1, 1, 1)
        gl.PolygonMode(0x0408, G.FILL)
        yield
    finally:
        gl.UseProgram(program)
        gl.BindVertexArray(vertex_array)
        gl.BindFramebuffer(G.DRAW_FRAMEBUFFER, draw)
        gl.BindFramebuffer(G.READ_FRAMEBUFFER, read)
        gl.Viewport(*viewport)
        gl.ColorMask(*mask)
        gl.PolygonMode(0x0408, polygon_mode)
        for capability in enabled:
            gl.Enable(capability)
        for name, value in zip(_UNPACKING, unpacking, strict=True):
            gl.PixelStorei(name, value)
        for index, (name, start, size) in enumerate(storage):
            if size:
                gl.BindBufferRange(G.SHADER_STORAGE_BUFFER, index, name, start, size)
            else:
                gl.BindBufferBase(G.SHADER_STORAGE_BUFFER, index, name)
        for target, name in buffers:
            gl.BindBuffer(target, name)
        for unit, (texture, buffer, sampler) in enumerate(textures):
            gl.ActiveTexture(G.TEXTURE0 + unit)
            gl.BindTexture(G.TEXTURE_2D_ARRAY, texture)
            gl.BindTexture(G.TEXTURE_BUFFER, buffer)
            gl.BindSampler(unit, sampler)
        for unit, (name, level, layered, layer, access, image_format) in enumerate(images):
            gl.BindImageTexture(unit, name, level, layered, layer, access, image_format)
        gl.ActiveTexture(active)


@contextmanager
def preserved_for_moderngl(gl: GL) -> Iterator[None]:
    """Undo what moderngl sets when it wraps a context."""
    blend = [gl.integer(name) for name in (G.BLEND_SRC_RGB, G.BLEND_DST_RGB, G.BLEND_SRC_ALPHA, G.BLEND_DST_ALPHA)]
    seamless, restart = gl.IsEnabled(G.TEXTURE_CUBE_MAP_SEAMLESS), gl.IsEnabled(G.PRIMITIVE_RESTART)
    index = gl.integer(G.PRIMITIVE_RESTART_INDEX)
    framebuffers = gl.integer(G.DRAW_FRAMEBUFFER_BINDING), gl.integer(G.READ_FRAMEBUFFER_BINDING)
    try:
        yield
    finally:
        gl.BlendFuncSeparate(*blend)
        if not seamless:
            gl.Disable(G.TEXTURE_CUBE_MAP_SEAMLESS)
        if not restart:
            gl.Disable(G.PRIMITIVE_RESTART)
        gl.PrimitiveRestartIndex(index & 0xFFFFFFFF)
        gl.BindFramebuffer(G.DRAW_FRAMEBUFFER, framebuffers[0])
        gl.BindFramebuffer(G.READ_FRAMEBUFFER, framebuffers[1])
