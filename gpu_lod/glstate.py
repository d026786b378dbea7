"""Save and restore the GL state that gpu_lod's verbs change, for contexts that belong to somebody else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL
from gpu_lod.errors import UnsupportedError

# What the verbs use, and therefore all that needs saving: keep in step with texture.py, program.py and the verbs.
TEXTURE_UNITS = 8
IMAGE_UNITS = 1
STORAGE_BINDINGS = 8
_CAPABILITIES = (
    G.DEPTH_TEST,
    G.CULL_FACE,
    G.STENCIL_TEST,
    G.RASTERIZER_DISCARD,
    G.FRAMEBUFFER_SRGB,
    G.COLOR_LOGIC_OP,
    G.DITHER,
    G.SAMPLE_ALPHA_TO_COVERAGE,
    G.SAMPLE_COVERAGE,
    G.SAMPLE_MASK,
    *(G.CLIP_DISTANCE0 + plane for plane in range(8)),
)
_INDEXED = (G.BLEND, G.SCISSOR_TEST)
"""Capabilities of each draw buffer, and of each viewport: verbs use the first of both, and leave the others alone."""
_FIXED = (G.ALPHA_TEST, G.POLYGON_STIPPLE)
"""Capabilities of compatibility profiles that change what a fragment shader writes."""
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
    """Run with the state a fresh context has, as far as the verbs rely on it, and put the caller's back.

    Raises:
        UnsupportedError: a display list is being compiled, into which commands would go.
    """
    with ExitStack() as others:
        compatible = bool(gl.integer(G.CONTEXT_PROFILE_MASK) & G.CONTEXT_COMPATIBILITY_PROFILE_BIT)
        if compatible and gl.integer(G.LIST_INDEX):
            raise UnsupportedError(
                "a display list is being compiled in this OpenGL context, and would take what a verb does: call it "
                "before glNewList or after glEndList."
            )
        if gl.integer(G.TRANSFORM_FEEDBACK_ACTIVE) and not gl.integer(G.TRANSFORM_FEEDBACK_PAUSED):
            gl.PauseTransformFeedback()  # under which no other program may be used
            others.callback(gl.ResumeTransformFeedback)
        if compatible:
            others.enter_context(_preserved_fixed(gl))
        others.enter_context(_preserved(gl))
        yield


@contextmanager
def _preserved_fixed(gl: GL) -> Iterator[None]:
    """What compatibility profiles do to fragments beside the shader, and to a texture's level of detail."""
    enabled = [capability for capability in _FIXED if gl.IsEnabled(capability)]
    active, biases = gl.integer(G.ACTIVE_TEXTURE), []
    clamped = gl.integer(G.CLAMP_FRAGMENT_COLOR)
    bias = ctypes.c_float()
    for unit in range(TEXTURE_UNITS):
        gl.ActiveTexture(G.TEXTURE0 + unit)
        gl.GetTexEnvfv(G.TEXTURE_FILTER_CONTROL, G.TEXTURE_LOD_BIAS, ctypes.byref(bias))
        if bias.value:
            biases.append((unit, bias.value))

    def put(unit: int, value: float) -> None:
        gl.ActiveTexture(G.TEXTURE0 + unit)
        gl.TexEnvf(G.TEXTURE_FILTER_CONTROL, G.TEXTURE_LOD_BIAS, value)

    try:
        for capability in enabled:
            gl.Disable(capability)
        for unit, _ in biases:
            put(unit, 0.0)
        gl.ClampColor(G.CLAMP_FRAGMENT_COLOR, 0)
        gl.ActiveTexture(active)
        yield
    finally:
        for capability in enabled:
            gl.Enable(capability)
        for unit, value in biases:
            put(unit, value)
        gl.ActiveTexture(active)
        gl.ClampColor(G.CLAMP_FRAGMENT_COLOR, clamped)


@contextmanager
def _preserved(gl: GL) -> Iterator[None]:
    program = gl.integer(G.CURRENT_PROGRAM)
    vertex_array = gl.integer(G.VERTEX_ARRAY_BINDING)
    draw, read = gl.integer(G.DRAW_FRAMEBUFFER_BINDING), gl.integer(G.READ_FRAMEBUFFER_BINDING)
    polygon_mode = gl.integers(G.POLYGON_MODE, 2)[0]
    viewport = gl.floats(G.VIEWPORT, 0, 4)
    mask = gl.flags(G.COLOR_WRITEMASK, 0, 4)
    enabled = [capability for capability in _CAPABILITIES if gl.IsEnabled(capability)]
    first = [capability for capability in _INDEXED if gl.IsEnabledi(capability, 0)]
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
        for capability in first:
            gl.Disablei(capability, 0)
        gl.ColorMaski(0, 1, 1, 1, 1)
        for name in _UNPACKING[1:]:
            gl.PixelStorei(name, 0)
        gl.BindBuffer(G.PIXEL_UNPACK_BUFFER, 0)
        gl.PolygonMode(0x0408, G.FILL)
        yield
    finally:
        gl.UseProgram(program)
        gl.BindVertexArray(vertex_array)
        gl.BindFramebuffer(G.DRAW_FRAMEBUFFER, draw)
        gl.BindFramebuffer(G.READ_FRAMEBUFFER, read)
        gl.PolygonMode(0x0408, polygon_mode)
        gl.ViewportIndexedf(0, *viewport)
        gl.ColorMaski(0, *mask)
        for capability in enabled:
            gl.Enable(capability)
        for capability in first:
            gl.Enablei(capability, 0)
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
