"""OpenGL entry points that moderngl does not offer, through ctypes.

Only what the bridge and the verbs call is listed. `GL(load)` resolves every name at once with the context's own loader;
a name the driver does not know stays callable and raises `UnsupportedError` when it is called, so that one missing
optional entry point does not keep a context from opening.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_float, c_int, c_ssize_t, c_ubyte, c_uint, c_void_p
from typing import Any

from gpu_lod.errors import GLError, OutOfMemoryError, UnsupportedError

# Names and values of the OpenGL registry.
NO_ERROR = 0
OUT_OF_MEMORY = 0x0505
VENDOR, RENDERER, VERSION = 0x1F00, 0x1F01, 0x1F02

MAP_READ_BIT, MAP_WRITE_BIT = 0x0001, 0x0002
MAP_PERSISTENT_BIT, MAP_COHERENT_BIT = 0x0040, 0x0080
DYNAMIC_STORAGE_BIT, CLIENT_STORAGE_BIT = 0x0100, 0x0200
DYNAMIC_DRAW, STREAM_DRAW = 0x88E8, 0x88E0
EXTERNAL_VIRTUAL_MEMORY_BUFFER_AMD = 0x9160
R32UI, RED_INTEGER, UNSIGNED_INT = 0x8236, 0x8D94, 0x1405
COPY_READ_BUFFER, COPY_WRITE_BUFFER = 0x8F36, 0x8F37
SHADER_STORAGE_BUFFER = 0x90D2
SHADER_STORAGE_BUFFER_BINDING, SHADER_STORAGE_BUFFER_START, SHADER_STORAGE_BUFFER_SIZE = 0x90D3, 0x90D4, 0x90D5
DISPATCH_INDIRECT_BUFFER, DISPATCH_INDIRECT_BUFFER_BINDING = 0x90EE, 0x90EF

MAX_TEXTURE_SIZE = 0x0D33
MAX_ARRAY_TEXTURE_LAYERS = 0x88FF
MAX_SHADER_STORAGE_BLOCK_SIZE = 0x90DE
MAX_FRAMEBUFFER_LAYERS = 0x9317
MAX_COMPUTE_SHARED_MEMORY_SIZE = 0x8262
SUBGROUP_SIZE_KHR, SUBGROUP_SUPPORTED_STAGES_KHR, SUBGROUP_SUPPORTED_FEATURES_KHR = 0x9532, 0x9533, 0x9534
SUBGROUP_FEATURE_SHUFFLE_BIT_KHR, COMPUTE_SHADER_BIT = 0x10, 0x20

TEXTURE0, ACTIVE_TEXTURE = 0x84C0, 0x84E0
TEXTURE_2D_ARRAY, TEXTURE_BINDING_2D_ARRAY = 0x8C1A, 0x8C1D
TEXTURE_BUFFER, TEXTURE_BINDING_BUFFER, MAX_TEXTURE_BUFFER_SIZE = 0x8C2A, 0x8C2C, 0x8C2B
SAMPLER_BINDING = 0x8919
TEXTURE_MAG_FILTER, TEXTURE_MIN_FILTER, TEXTURE_WRAP_S, TEXTURE_WRAP_T = 0x2800, 0x2801, 0x2802, 0x2803
TEXTURE_BASE_LEVEL, TEXTURE_MAX_LEVEL = 0x813C, 0x813D
TEXTURE_REDUCTION_MODE = 0x9366
TEXTURE_MAX_ANISOTROPY, MAX_TEXTURE_MAX_ANISOTROPY = 0x84FE, 0x84FF
NEAREST, LINEAR = 0x2600, 0x2601
LINEAR_MIPMAP_NEAREST, LINEAR_MIPMAP_LINEAR = 0x2701, 0x2703
CLAMP_TO_EDGE = 0x812F
WEIGHTED_AVERAGE, REDUCE_MIN, REDUCE_MAX = 0x9367, 0x8007, 0x8008
RED, RG, RGBA = 0x1903, 0x8227, 0x1908
UNSIGNED_BYTE, UNSIGNED_SHORT, HALF_FLOAT, FLOAT = 0x1401, 0x1403, 0x140B, 0x1406
PIXEL_UNPACK_BUFFER, PIXEL_UNPACK_BUFFER_BINDING = 0x88EC, 0x88EF
UNPACK_ALIGNMENT = 0x0CF5
UNPACK_SWAP_BYTES, UNPACK_LSB_FIRST, UNPACK_ROW_LENGTH = 0x0CF0, 0x0CF1, 0x0CF2
UNPACK_SKIP_ROWS, UNPACK_SKIP_PIXELS, UNPACK_SKIP_IMAGES, UNPACK_IMAGE_HEIGHT = 0x0CF3, 0x0CF4, 0x806D, 0x806E
R8UI = 0x8232
R8, RG8, RGBA8 = 0x8229, 0x822B, 0x8058
R16, RG16, RGBA16 = 0x822A, 0x822C, 0x805B
RGBA32UI = 0x8D70
R16UI, RG16UI, RGBA16UI = 0x8234, 0x823A, 0x8D76
R16F, RG16F, RGBA16F = 0x822D, 0x822F, 0x881A
R32F, RG32F, RGBA32F = 0x822E, 0x8230, 0x8814
WRITE_ONLY = 0x88B9
IMAGE_BINDING_NAME, IMAGE_BINDING_LEVEL, IMAGE_BINDING_LAYERED = 0x8F3A, 0x8F3B, 0x8F3C
IMAGE_BINDING_LAYER, IMAGE_BINDING_ACCESS, IMAGE_BINDING_FORMAT = 0x8F3D, 0x8F3E, 0x906E

READ_FRAMEBUFFER, DRAW_FRAMEBUFFER = 0x8CA8, 0x8CA9
DRAW_FRAMEBUFFER_BINDING, READ_FRAMEBUFFER_BINDING = 0x8CA6, 0x8CAA
COLOR_ATTACHMENT0 = 0x8CE0
CURRENT_PROGRAM, VERTEX_ARRAY_BINDING, VIEWPORT, COLOR_WRITEMASK = 0x8B8D, 0x85B5, 0x0BA2, 0x0C23
COPY_READ_BUFFER_BINDING, COPY_WRITE_BUFFER_BINDING = 0x8F36, 0x8F37
BLEND, DEPTH_TEST, CULL_FACE, SCISSOR_TEST, STENCIL_TEST = 0x0BE2, 0x0B71, 0x0B44, 0x0C11, 0x0B90
RASTERIZER_DISCARD, FRAMEBUFFER_SRGB, COLOR_LOGIC_OP, DITHER = 0x8C89, 0x8DB9, 0x0BF2, 0x0BD0
PRIMITIVE_RESTART, TEXTURE_CUBE_MAP_SEAMLESS, PRIMITIVE_RESTART_INDEX = 0x8F9D, 0x884F, 0x8F9E
BLEND_DST_RGB, BLEND_SRC_RGB, BLEND_DST_ALPHA, BLEND_SRC_ALPHA = 0x80C8, 0x80C9, 0x80CA, 0x80CB
SAMPLE_ALPHA_TO_COVERAGE, SAMPLE_COVERAGE, SAMPLE_MASK = 0x809E, 0x80A0, 0x8E51
TRANSFORM_FEEDBACK_ACTIVE, TRANSFORM_FEEDBACK_PAUSED = 0x8E24, 0x8E23
# Of compatibility profiles alone.
CONTEXT_PROFILE_MASK, CONTEXT_COMPATIBILITY_PROFILE_BIT = 0x9126, 0x2
ALPHA_TEST, POLYGON_STIPPLE, LIST_INDEX, CLAMP_FRAGMENT_COLOR = 0x0BC0, 0x0B42, 0x0B33, 0x891B
TEXTURE_FILTER_CONTROL, TEXTURE_LOD_BIAS = 0x8500, 0x8501
POLYGON_MODE, FILL = 0x0B40, 0x1B02
CLIP_DISTANCE0 = 0x3000
TRIANGLES = 0x0004

TEXTURE_FETCH_BARRIER_BIT = 0x00000008
SHADER_IMAGE_ACCESS_BARRIER_BIT = 0x00000020
TEXTURE_UPDATE_BARRIER_BIT = 0x00000100
COMMAND_BARRIER_BIT = 0x00000040
FRAMEBUFFER_BARRIER_BIT = 0x00000400
SHADER_STORAGE_BARRIER_BIT = 0x00002000
BUFFER_UPDATE_BARRIER_BIT = 0x00000200
CLIENT_MAPPED_BUFFER_BARRIER_BIT = 0x00004000
ALL_BARRIER_BITS = 0xFFFFFFFF

_ERROR_NAMES = {
    0x0500: "GL_INVALID_ENUM",
    0x0501: "GL_INVALID_VALUE",
    0x0502: "GL_INVALID_OPERATION",
    0x0503: "GL_STACK_OVERFLOW",
    0x0504: "GL_STACK_UNDERFLOW",
    0x0505: "GL_OUT_OF_MEMORY",
    0x0506: "GL_INVALID_FRAMEBUFFER_OPERATION",
    0x0507: "GL_CONTEXT_LOST",
}

_u, _i, _p = c_uint, c_int, c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name: (result, *arguments)
    "ActiveTexture": (None, _u),
    "BindBuffer": (None, _u, _u),
    "BindBufferBase": (None, _u, _u, _u),
    "BindBufferRange": (None, _u, _u, _u, c_ssize_t, c_ssize_t),
    "BindFramebuffer": (None, _u, _u),
    "BindImageTexture": (None, _u, _u, _i, c_ubyte, _i, _u, _u),
    "BindSampler": (None, _u, _u),
    "BindTexture": (None, _u, _u),
    "BindVertexArray": (None, _u),
    "BlendFuncSeparate": (None, _u, _u, _u, _u),
    "BufferData": (None, _u, c_ssize_t, _p, _u),
    "BufferStorage": (None, _u, c_ssize_t, _p, _u),
    "BufferSubData": (None, _u, c_ssize_t, c_ssize_t, _p),
    "ClampColor": (None, _u, _u),
    "ClearBufferSubData": (None, _u, _u, c_ssize_t, c_ssize_t, _u, _u, _p),
    "ColorMaski": (None, _u, c_ubyte, c_ubyte, c_ubyte, c_ubyte),
    "DeleteBuffers": (None, _i, _p),
    "DeleteFramebuffers": (None, _i, _p),
    "DeleteTextures": (None, _i, _p),
    "DeleteVertexArrays": (None, _i, _p),
    "Disable": (None, _u),
    "Disablei": (None, _u, _u),
    "DispatchCompute": (None, _u, _u, _u),
    "DispatchComputeIndirect": (None, c_ssize_t),
    "DrawArraysInstanced": (None, _u, _i, _i, _i),
    "Enable": (None, _u),
    "Enablei": (None, _u, _u),
    "Finish": (None,),
    "FramebufferTexture": (None, _u, _u, _u, _i),
    "GenBuffers": (None, _i, _p),
    "GenFramebuffers": (None, _i, _p),
    "GenTextures": (None, _i, _p),
    "GenVertexArrays": (None, _i, _p),
    "GenerateMipmap": (None, _u),
    "GetBooleani_v": (None, _u, _u, _p),
    "GetBufferSubData": (None, _u, c_ssize_t, c_ssize_t, _p),
    "GetError": (_u,),
    "GetFloati_v": (None, _u, _u, _p),
    "GetIntegerv": (None, _u, _p),
    "GetInteger64v": (None, _u, _p),
    "GetIntegeri_v": (None, _u, _u, _p),
    "GetInteger64i_v": (None, _u, _u, _p),
    "GetString": (c_char_p, _u),
    "GetTexEnvfv": (None, _u, _u, _p),
    "IsEnabled": (c_ubyte, _u),
    "IsEnabledi": (c_ubyte, _u, _u),
    "IsTexture": (c_ubyte, _u),
    "IsBuffer": (c_ubyte, _u),
    "MapBufferRange": (_p, _u, c_ssize_t, c_ssize_t, _u),
    "MemoryBarrier": (None, _u),
    "PauseTransformFeedback": (None,),
    "PixelStorei": (None, _u, _i),
    "PolygonMode": (None, _u, _u),
    "PrimitiveRestartIndex": (None, _u),
    "ResumeTransformFeedback": (None,),
    "TexBuffer": (None, _u, _u, _u),
    "TexEnvf": (None, _u, _u, c_float),
    "TexParameteri": (None, _u, _u, _i),
    "TexStorage3D": (None, _u, _i, _u, _i, _i, _i),
    "TexSubImage3D": (None, _u, _i, _i, _i, _i, _i, _i, _i, _u, _u, _p),
    "UseProgram": (None, _u),
    "ViewportIndexedf": (None, _u, c_float, c_float, c_float, c_float),
}


class GL:
    """The entry points of one context, as methods without the `gl` prefix: `gl.BindTexture(target, name)`."""

    noted: Callable[[Callable[..., Any], tuple[Any, ...]], None] | None
    """While commands are recorded: what to tell of a call that does not come through here."""

    def __init__(self, load: Callable[[str], int]) -> None:
        self.noted = None
        for name, (result, *arguments) in _SIGNATURES.items():
            address = load("gl" + name)
            setattr(
                self,
                name,
                ctypes.CFUNCTYPE(result, *arguments)(address) if address else _missing("gl" + name),
            )

    @contextmanager
    def recording(self, note: Callable[[str, Callable[..., Any], tuple[Any, ...]], None]) -> Iterator[None]:
        """Tell `note` of each command given meanwhile: its name, what it calls, the arguments. Shader programs tell of
        theirs through `noted`."""
        before = dict(vars(self))

        def noting(name: str, command: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                note(name, command, arguments)
                return command(*arguments)

            return call

        for name in _SIGNATURES:
            setattr(self, name, noting(name, before[name]))
        self.noted = functools.partial(note, "a program")
        try:
            yield
        finally:
            vars(self).update(before)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Reached only for names that __init__ did not set; it also tells a type checker what the rest are.
        raise AttributeError(f"gl{name} is not listed in bridge/gl.py")

    def integer(self, name: int) -> int:
        """One value of glGetInteger64v."""
        value = ctypes.c_int64(0)
        self.GetInteger64v(name, ctypes.byref(value))
        return value.value

    def integers(self, name: int, count: int) -> tuple[int, ...]:
        """`count` values of glGetIntegerv."""
        values = (c_int * count)()
        self.GetIntegerv(name, values)
        return tuple(values)

    def indexed(self, name: int, index: int) -> int:
        """One value of glGetInteger64i_v."""
        value = ctypes.c_int64(0)
        self.GetInteger64i_v(name, index, ctypes.byref(value))
        return value.value

    def flags(self, name: int, index: int, count: int) -> tuple[int, ...]:
        """`count` values of glGetBooleani_v."""
        values = (c_ubyte * count)()
        self.GetBooleani_v(name, index, values)
        return tuple(values)

    def floats(self, name: int, index: int, count: int) -> tuple[float, ...]:
        """`count` values of glGetFloati_v."""
        values = (c_float * count)()
        self.GetFloati_v(name, index, values)
        return tuple(values)

    def string(self, name: int) -> str:
        return (self.GetString(name) or b"").decode("utf-8", "replace")

    def gen(self, kind: str) -> int:
        """A new object name of glGen<kind>."""
        name = c_uint(0)
        getattr(self, "Gen" + kind)(1, ctypes.byref(name))
        return name.value

    def delete(self, kind: str, *names: int) -> None:
        """glDelete<kind> of all names in one call."""
        if names:
            getattr(self, "Delete" + kind)(len(names), (c_uint * len(names))(*names))

    def clear_errors(self) -> None:
        """Drop errors that somebody else left behind, so that `check` blames only our own calls."""
        for _ in range(16):
            if self.GetError() == NO_ERROR:
                return

    def check(self, where: str) -> None:
        """Raise what glGetError has to say.

        Raises:
            OutOfMemoryError: GL_OUT_OF_MEMORY.
            GLError: anything else.
        """
        code = self.GetError()
        if code == NO_ERROR:
            return
        self.clear_errors()
        if code == OUT_OF_MEMORY:
            raise OutOfMemoryError(
                f"the driver is out of memory in {where}. Use a smaller image or batch, drop results that are no "
                "longer needed, or call Context.trim()."
            )
        raise GLError(f"the driver reports {_ERROR_NAMES.get(code, hex(code))} in {where}; please report this.")


def _missing(name: str) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise UnsupportedError(f"this driver has no {name}. Use backend='torch', or a driver with OpenGL 4.3 or newer.")

    return call
