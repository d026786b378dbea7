"""EGL and GLX through ctypes: devices, and which context is current on this thread.

Contexts are made by moderngl (glcontext); this module fills two gaps. glcontext's exit leaves *no* context current, so
a caller who had one of their own would lose it: `switch` puts it back, EGL or GLX. And it enumerates the EGL devices
with what they say of themselves.

Sources: EGL 1.5, EGL_EXT_device_enumeration, EGL_EXT_device_query, EGL_MESA_device_software, EGL_EXT_device_drm,
EGL_EXT_device_drm_render_node, EGL_EXT_device_persistent_id, EGL_NV_device_cuda.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import re
from ctypes import c_char_p, c_int, c_ssize_t, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass, field
from typing import Any

from gpu_lod.errors import GLUnavailableError

_OPENGL_API = 0x30A2
_BAD_CONTEXT = 0x3006
_READ, _DRAW = 0x305A, 0x3059
_EXTENSIONS = 0x3055
_DRM_DEVICE_FILE_EXT, _DRM_RENDER_NODE_FILE_EXT = 0x3233, 0x3377
_CUDA_DEVICE_NV = 0x323A
_DEVICE_UUID_EXT = 0x335C

_SYSFS_DRM = "/sys/class/drm"
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

INSTALL_HINT = (
    "On Debian or Ubuntu: apt-get install libegl1 libgl1-mesa-dri. For an NVIDIA GPU install the driver's "
    "libnvidia-gl; in a container pass NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility."
)

_STEERING = (
    "GPU_LOD_LIBEGL",
    "GALLIUM_DRIVER",
    "LIBGL_DRIVERS_PATH",
    "MESA_LOADER_DRIVER_OVERRIDE",
    "MESA_GL_VERSION_OVERRIDE",
    "__EGL_VENDOR_LIBRARY_FILENAMES",
    "__EGL_VENDOR_LIBRARY_DIRS",
)
"""Variables that lead to another library or driver, or to an older OpenGL, than there would be."""


def hint() -> str:
    """The way out where OpenGL does not open: what keeps from it one that is there, then how to install one."""
    steering = [name for name in _STEERING if name in os.environ]
    return (f"Unset {', '.join(steering)}, or: " if steering else "") + INSTALL_HINT


def soname() -> str:
    """The EGL library to load: $GPU_LOD_LIBEGL or libEGL.so.1."""
    return os.environ.get("GPU_LOD_LIBEGL") or "libEGL.so.1"


class _EGL:
    def __init__(self) -> None:
        name = soname()
        try:
            lib = ctypes.CDLL(name)
        except OSError as error:
            raise GLUnavailableError(f"no EGL on this machine: {error}. {hint()}") from None
        if not hasattr(lib, "eglGetProcAddress"):
            raise GLUnavailableError(f"{name} is no EGL library. {hint()}")
        self.get_proc_address = _typed(lib.eglGetProcAddress, c_void_p, c_char_p)
        self.get_error = _typed(lib.eglGetError, c_int)
        self.bind_api = _typed(lib.eglBindAPI, c_uint, c_uint)
        self.query_api = _typed(lib.eglQueryAPI, c_uint)
        self.make_current = _typed(lib.eglMakeCurrent, c_uint, c_void_p, c_void_p, c_void_p, c_void_p)
        self.current_context = _typed(lib.eglGetCurrentContext, c_void_p)
        self.current_display = _typed(lib.eglGetCurrentDisplay, c_void_p)
        self.current_surface = _typed(lib.eglGetCurrentSurface, c_void_p, c_int)
        self.query_devices = self._extension("eglQueryDevicesEXT", c_uint, c_int, c_void_p, c_void_p)
        self.device_string = self._extension("eglQueryDeviceStringEXT", c_char_p, c_void_p, c_int)
        self.device_attribute = self._extension("eglQueryDeviceAttribEXT", c_uint, c_void_p, c_int, c_void_p)
        self.device_binary = self._extension(
            "eglQueryDeviceBinaryEXT", c_uint, c_void_p, c_int, c_int, c_void_p, c_void_p
        )

    def _extension(self, name: str, result: Any, *arguments: Any) -> Any:
        address = self.get_proc_address(name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


class _GLX:
    """The few GLX calls needed to step aside for a window of the caller's; only if the process has loaded GLX."""

    def __init__(self, lib: Any) -> None:
        self.current_context = _typed(lib.glXGetCurrentContext, c_void_p)
        self.current_display = _typed(lib.glXGetCurrentDisplay, c_void_p)
        self.current_drawable = _typed(lib.glXGetCurrentDrawable, ctypes.c_ulong)
        self.current_read = _typed(lib.glXGetCurrentReadDrawable, ctypes.c_ulong)
        self.make_current = _typed(lib.glXMakeContextCurrent, c_int, c_void_p, ctypes.c_ulong, ctypes.c_ulong, c_void_p)
        self.get_proc_address = _typed(lib.glXGetProcAddressARB, c_void_p, c_char_p)


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, list(arguments)
    return function


@functools.cache
def _egl() -> _EGL:
    return _EGL()


_glx_cache: _GLX | None = None
_glx_looked: set[int] = set()
_walk = _typed(ctypes.CDLL(None).dl_iterate_phdr, c_int, c_void_p, c_void_p)
_hash = c_void_p.from_address(_typed(ctypes.pythonapi.PyHash_GetFuncDef, c_void_p)()).value


def _library_loads() -> int:
    """Another number whenever this process has loaded one more library, and on each thread: half a microsecond, where
    looking one up takes eighty.

    It is a hash of what the loader says of the program itself, which has the count in it (dl_phdr_info.dlpi_adds), by
    the function that Python hashes bytes with. The loader holds its lock while it says that: a callback in Python
    would wait for the interpreter's, which an import on another thread holds while it waits for the loader's.
    """
    number: int = _walk(_hash, None)
    return number


def _glx() -> _GLX | None:
    global _glx_cache
    if _glx_cache is None:
        loads = _library_loads()
        if loads not in _glx_looked:
            if len(_glx_looked) > 1000:
                _glx_looked.clear()
            _glx_looked.add(loads)
            for name in ("libGLX.so.0", "libGL.so.1"):
                try:
                    # RTLD_NOLOAD: only if somebody loaded it already; nobody else can have a GLX context.
                    _glx_cache = _GLX(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
                    break
                except (OSError, AttributeError):
                    continue
    return _glx_cache


@dataclass(frozen=True)
class EGLDevice:
    """What one EGL device says of itself; None where it says nothing."""

    index: int
    extensions: tuple[str, ...]
    drm_file: str | None
    cuda_ordinal: int | None
    """EGL_CUDA_DEVICE_NV. A hint: the specification does not say whether CUDA_VISIBLE_DEVICES changes the numbering."""
    uuid: str | None = None
    """EGL_DEVICE_UUID_EXT, 32 lowercase hex digits: the physical GPU, in CUDA and in Vulkan too."""
    pci: str | None = None
    """The PCI address of its DRM node, as sysfs writes it: "0000:65:00.0"."""

    @property
    def software(self) -> bool:
        return "EGL_MESA_device_software" in self.extensions


def devices() -> list[EGLDevice]:
    """All EGL devices, in the order in which `Context(device=n)` counts them.

    Raises:
        GLUnavailableError: no EGL library, one without EGL_EXT_device_enumeration, or one that lists no device.
    """
    egl = _egl()
    if egl.query_devices is None:
        raise GLUnavailableError(f"this EGL library cannot list devices (EGL_EXT_device_enumeration). {hint()}")
    count = c_int(0)
    if not egl.query_devices(0, None, ctypes.byref(count)) or count.value == 0:
        raise GLUnavailableError(f"EGL knows no device (error {egl.get_error():#x}). {hint()}")
    handles = (c_void_p * count.value)()
    if not egl.query_devices(count.value, handles, ctypes.byref(count)):
        raise GLUnavailableError(
            f"EGL counts its devices but does not list them (error {egl.get_error():#x}). {hint()}"
        )
    return [_describe(egl, index, handle) for index, handle in enumerate(handles[: count.value])]


def _describe(egl: _EGL, index: int, handle: int | None) -> EGLDevice:
    """Asks only what the device's extensions allow: glvnd hands out functions that the device's driver may lack."""
    extensions = tuple((_string(egl, handle, _EXTENSIONS) or "").split())
    drm_file = render_node = ordinal = uuid = None
    if "EGL_EXT_device_drm" in extensions:
        drm_file = _string(egl, handle, _DRM_DEVICE_FILE_EXT)
    if "EGL_EXT_device_drm_render_node" in extensions:
        render_node = _string(egl, handle, _DRM_RENDER_NODE_FILE_EXT)
    if "EGL_NV_device_cuda" in extensions and egl.device_attribute is not None:
        value = c_ssize_t(-1)
        if egl.device_attribute(handle, _CUDA_DEVICE_NV, ctypes.byref(value)) and value.value >= 0:
            ordinal = value.value
    if "EGL_EXT_device_persistent_id" in extensions and egl.device_binary is not None:
        digits, size = (c_ubyte * 16)(), c_int(0)
        answered = egl.device_binary(handle, _DEVICE_UUID_EXT, len(digits), digits, ctypes.byref(size))
        if answered and size.value == len(digits) and any(digits):
            uuid = bytes(digits).hex()
    egl.get_error()  # an error of a query that failed is not for the caller to find
    return EGLDevice(index, extensions, drm_file, ordinal, uuid, _pci_address(drm_file) or _pci_address(render_node))


def _string(egl: _EGL, handle: int | None, name: int) -> str | None:
    text = egl.device_string(handle, name) if egl.device_string is not None else None
    return text.decode(errors="replace") if text else None


def _pci_address(node: str | None) -> str | None:
    """Of the GPU behind a DRM node such as "/dev/dri/card0"; None: not a PCI device, or not in sysfs."""
    if node is None:
        return None
    try:
        device = os.path.realpath(os.path.join(_SYSFS_DRM, os.path.basename(node), "device"))
    except OSError:  # a sandbox that lists the link but does not let it be read
        return None
    address = os.path.basename(device)
    return address if _PCI_ADDRESS.fullmatch(address) else None


@dataclass(frozen=True)
class Current:
    """The context that is current on a thread. All None: there is none."""

    egl: tuple[int | None, int | None, int | None, int | None] | None = None
    """(display, draw surface, read surface, context)"""
    glx: tuple[int | None, int, int, int | None] | None = None
    """(display, draw drawable, read drawable, context)"""
    api: int | None = field(default=None, compare=False)
    """What eglBindAPI said on the thread; None says nothing."""

    @property
    def exists(self) -> bool:
        return self.egl is not None or self.glx is not None

    def same_context(self, other: Current) -> bool:
        return (self.egl or (None,))[-1] == (other.egl or (None,))[-1] and (self.glx or (None,))[-1] == (
            other.glx or (None,)
        )[-1]


NO_CONTEXT = Current()


def current() -> Current:
    """The context that is current on the calling thread."""
    try:
        egl = _egl()
    except GLUnavailableError:
        egl = None
    api = None
    if egl is not None:
        api = egl.query_api()
        context = egl.current_context()
        if context:
            surfaces = egl.current_surface(_DRAW), egl.current_surface(_READ)
            return Current(egl=(egl.current_display(), *surfaces, context), api=api)
    glx = _glx()
    if glx is not None:
        context = glx.current_context()
        if context:
            drawables = glx.current_drawable(), glx.current_read()
            return Current(glx=(glx.current_display(), *drawables, context), api=api)
    return Current(api=api)


def switch(old: Current, new: Current, *, back: bool = False) -> None:
    """Make `new` current on this thread in place of `old`, which is what `current()` returned.

    EGL refuses to make a context current where GLX has one, and the other way round, so the old one is let go first if
    it is of the other kind.

    Args:
        back: to what was current before. A context may be destroyed while it is, as moderngl's are by `release()`, and
            goes when it no longer is: then none is left current.

    Raises:
        GLUnavailableError: EGL or GLX refused.
    """
    if old.glx is not None and new.glx is None:
        glx = _glx()
        assert glx is not None
        glx.make_current(old.glx[0], 0, 0, None)
    if old.egl is not None and new.egl is None:
        _egl().make_current(old.egl[0], None, None, None)
    if new.egl is not None:
        egl = _egl()
        if egl.query_api() != _OPENGL_API:
            egl.bind_api(_OPENGL_API)  # the API binding is per thread and starts as OpenGL ES
        if not egl.make_current(*new.egl):
            error = egl.get_error()
            if not (back and error == _BAD_CONTEXT):
                raise GLUnavailableError(
                    f"eglMakeCurrent failed with error {error:#x}: the context is current on another thread, or was "
                    "destroyed. Release it there, or make a new one."
                )
            if old.egl is not None:
                egl.make_current(old.egl[0], None, None, None)
    elif new.glx is not None:
        glx = _glx()
        assert glx is not None
        if not glx.make_current(*new.glx):
            raise GLUnavailableError(
                "glXMakeContextCurrent failed: the context is current on another thread, or its window was closed. "
                "Release it there, or make a new one."
            )
    if new.api is not None and _egl().query_api() != new.api:
        _egl().bind_api(new.api)  # or the next context that somebody makes is of another kind


def release_current() -> Current:
    """Leave no context current on this thread; returns the one that was, for `switch(NO_CONTEXT, it)`."""
    old = current()
    switch(old, NO_CONTEXT)
    return old


def loader_of_current() -> Any:
    """An object that moderngl takes as its context: it loads entry points of the context that is current now."""
    here = current()
    if here.egl is not None:
        return _Loader(_egl().get_proc_address)
    glx = _glx()
    if here.glx is not None and glx is not None:
        return _Loader(glx.get_proc_address)
    raise GLUnavailableError("no OpenGL context is current on this thread: make the window's context current first.")


class _Loader:
    """Entry points only: entering, leaving and releasing are the owner's business."""

    def __init__(self, get_proc_address: Any) -> None:
        self._get = get_proc_address

    def load_opengl_function(self, name: str) -> int:
        return self._get(name.encode()) or 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def release(self) -> None: ...
