"""Context: one OpenGL context on one device, with its programs, textures and shared buffers.

A context is current only inside a verb and released on exit, under a lock, so any thread may call: autograd runs
backward on threads of its own. Verbs run inside `with context.active():`. Nothing here runs at import.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import moderngl
import torch

from gpu_lod.bridge import Bridge, Device, HostBridge, InteropBridge, Pool, PrivatePool, choose, devices, egl
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.cuda import CudaDriver, check_available
from gpu_lod.bridge.devices import gpu, match
from gpu_lod.bridge.gl import GL
from gpu_lod.bridge.interop import Driver
from gpu_lod.bridge.pycuda import PyCudaDriver
from gpu_lod.errors import (
    ContextBusyError,
    ContextClosedError,
    ContextNotCurrentError,
    DeviceMismatchError,
    ForkedContextError,
    GLUnavailableError,
    GpuLodError,
    InputError,
)
from gpu_lod.glstate import preserved, preserved_for_moderngl
from gpu_lod.program import Programs
from gpu_lod.shield import Shield
from gpu_lod.texture import TexturePool

LOCK_TIMEOUT = 60.0
"""Seconds that a verb waits for a context that another thread holds."""

_REQUIRED = 430

T = TypeVar("T")

Interop = Literal["cuda", "pycuda"]
_DRIVERS: dict[Interop, Callable[[int], Driver]] = {"cuda": CudaDriver, "pycuda": PyCudaDriver}

_registry: dict[int, Context] = {}  # by EGL device
_adopted: list[Context] = []
_registry_lock = threading.RLock()
_lingering: list[Context] = []  # closed while tensors of theirs were alive
_opened_in_pid: int | None = None
_pinned = threading.local()


@dataclass
class Limits:
    """Limits of the device. Lowering `storage_bytes` makes verbs split their work earlier."""

    storage_bytes: int
    """Largest range of a storage-buffer binding."""
    texture_size: int
    """Largest side of a texture."""
    layers: int
    """Most layers of an array texture that can be sampled and rendered to."""


class _Constants:
    """Small tables that verbs keep in GL memory between calls, the least recently used dropped first."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._tables: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._tables:
            self._tables[key] = make()
            if len(self._tables) > self._most:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        table: T = self._tables[key]
        return table

    def clear(self) -> None:
        self._tables.clear()


class Context:
    """An OpenGL context that verbs run on.

    Verbs open the default one by themselves; make one to choose the device, to pin it to a thread, or to get tensors
    that live in GL memory. There is one context per device and process: `Context(device=n)` again gives the same
    object, until it is closed.

    Args:
        device: a torch device ("cuda", "cuda:1": the EGL device that is that GPU, whatever EGL and CUDA_VISIBLE_DEVICES
            call it), the index of an EGL device as `gpu-lod info` lists them, or None, which takes $GPU_LOD_DEVICE, or
            the first device that opens, hardware before software.
        interop: what shares memory with CUDA: "cuda" (cuda-bindings), or "pycuda" for a program that lives in PyCUDA;
            None is what the device's context has already, else "cuda".

    Threads: any thread may call a verb; the context is current only inside it. `with context:` pins it to the calling
    thread (verbs there use it by default and save the switch); other threads wait, `LOCK_TIMEOUT` seconds at most.

    Forks: a context does not survive one. In the child every use raises `ForkedContextError`; tensors stay readable.

    Raises:
        GLUnavailableError: no EGL, no device that opens, or OpenGL older than 4.3; for a CUDA device, OpenGL only on
            other GPUs or in software.
        CudaUnavailableError, InteropUnavailableError: CUDA, or its sharing with OpenGL, does not work here.
        UnsupportedError: no GL_ARB_buffer_storage.
        InputError: no such device.
        ForkedContextError: OpenGL was opened before this process forked.
    """

    device: Device | None
    """The EGL device; None for an adopted context."""
    is_default: bool
    gl: GL
    bridge: Bridge
    """That of the running verb: `host` or `interop`."""
    host: HostBridge
    interop: InteropBridge | None
    """The bridge to CUDA tensors, made with the first of them."""
    private: PrivatePool
    extensions: frozenset[str]
    version: int
    """OpenGL version, 450 for 4.5."""
    vendor: str
    renderer: str
    driver: str
    """GL_VERSION, which names the driver's own version."""
    limits: Limits
    programs: Programs
    textures: TexturePool
    constants: _Constants
    _interop_by: Interop
    _mgl: moderngl.Context
    _own: egl.Current
    _pid: int
    _lock: threading.RLock
    _owner: int | None
    _active: int
    _outer: list[egl.Current]
    _unfinished: bool
    _closed: bool

    def __new__(cls, device: int | str | torch.device | None = None, interop: Interop | None = None) -> Context:
        _check_interop(interop)
        if isinstance(device, (str, torch.device)):
            wanted = _torch_device(device)
            if wanted.type == "cuda":
                with Shield(), _registry_lock:
                    return cls._open_on_gpu(wanted, interop)
            device = None
        if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
            raise InputError(
                f"device is {device!r}; expected the index of an EGL device, a torch device such as 'cuda:0', or None."
            )
        with Shield(), _registry_lock:
            for known, context in _registry.items():
                if (device is None and context.is_default) or device == known:
                    context._check_usable()
                    return context
            return cls._open(device)

    @classmethod
    def _open(cls, device: int | None) -> Context:
        failures = []
        for candidate in choose(device, devices()):
            try:
                context = cls._on(candidate)
            except ForkedContextError:
                raise
            except GpuLodError as error:
                failures.append((candidate.index, error))
                continue
            context.is_default |= device is None
            return context
        raise _none_opens(failures)

    @classmethod
    def _open_on_gpu(cls, wanted: torch.device, interop: Interop | None) -> Context:
        """The context on the EGL device that is a CUDA device, with its bridge."""
        for context in _registry.values():
            if context.interop is not None and context.interop.device == wanted:
                context._check_usable()
                if interop not in (None, context.interop.driver.name):
                    raise InputError(
                        f"the context on {wanted} shares memory through {context.interop.driver.name!r} already, not "
                        f"{interop!r}. Close it first."
                    )
                return context
        driver = _DRIVERS[interop or "cuda"](wanted.index)
        failures = []
        for candidate in match(gpu(wanted.index), devices()):
            fresh = candidate.index not in _registry
            try:
                context = cls._on(candidate)
                with context.active():
                    if context.interop is None:
                        context.interop = context._connect(wanted, driver)
            except ForkedContextError:
                raise
            except GpuLodError as error:
                failures.append((candidate.index, error))
                if fresh and candidate.index in _registry:  # it opened, on another GPU
                    _registry[candidate.index].close()
                continue
            if context.interop.device == wanted:
                return context
            failures.append((candidate.index, DeviceMismatchError(f"it is {context.interop.device}")))
        raise _none_opens(failures, f" on {wanted}")

    @classmethod
    def _on(cls, device: Device) -> Context:
        """The context on an EGL device, opened if it is not open yet."""
        global _opened_in_pid
        if _opened_in_pid not in (None, os.getpid()):
            _raise_forked()
        known = _registry.get(device.index)
        if known is None:
            _reap()
            _opened_in_pid = os.getpid()
            known = _registry[device.index] = cls._create(device)
        return known

    @classmethod
    def _create(cls, device: Device) -> Context:
        import glcontext.egl as backend  # not get_backend_by_name: its environment variables override arguments

        old = egl.release_current()
        try:
            library = egl.soname()
            try:
                # Entry points come from EGL alone, so libGL need not be installed.
                window = backend.create_context(
                    mode="standalone", libgl=library, libegl=library, glversion=_REQUIRED, device_index=device.index
                )
            except Exception as error:  # glcontext raises bare Exception
                raise GLUnavailableError(
                    f"EGL device {device.index} gives no OpenGL {_REQUIRED // 100}.{_REQUIRED // 10 % 10} context: "
                    f"{error}. {egl.INSTALL_HINT}"
                ) from None
            own = egl.current()
            if not own.exists:
                raise GLUnavailableError(f"EGL device {device.index} made a context but did not make it current.")
            try:
                mgl = moderngl.create_context(context=window, standalone=True, require=_REQUIRED)
                return cls._wrap(mgl, own, window.load_opengl_function, device)
            except BaseException:
                egl.switch(own, egl.NO_CONTEXT)
                window.release()
                raise
        finally:
            egl.switch(egl.current(), old)

    @classmethod
    def adopt(cls, source: moderngl.Context | None = None, interop: Interop | None = None) -> Context:
        """Use a context that the program already has: a moderngl context, or that of a window.

        The context must be current on the calling thread now and in every call. Each verb leaves the GL state as it
        found it. Closing frees what gpu_lod made in it and leaves the context itself alone.

        Args:
            source: a moderngl context, or None for whatever is current on this thread, such as a GLFW window's after
                `glfw.make_context_current(window)`.
            interop: as for `Context`.

        Raises:
            ContextNotCurrentError: nothing is current.
            GLUnavailableError: OpenGL older than 4.3.
            UnsupportedError: no GL_ARB_buffer_storage.
        """
        _check_interop(interop)
        here = egl.current()
        if not here.exists:
            raise ContextNotCurrentError(
                "no OpenGL context is current on this thread: make it current first, for a window with "
                "glfw.make_context_current(window), for a moderngl context with `with context:`."
            )
        loader = egl.loader_of_current()
        gl = GL(loader.load_opengl_function)
        if source is None:
            with preserved_for_moderngl(gl):
                try:
                    source = moderngl.create_context(context=loader, standalone=True, require=_REQUIRED)
                except ValueError as error:
                    raise GLUnavailableError(f"the current context is too old: {error}.") from None
        elif source.version_code < _REQUIRED:
            raise GLUnavailableError(f"the moderngl context has OpenGL {source.version_code}; 430 or newer is needed.")
        with preserved(gl):
            context = cls._wrap(source, here, loader.load_opengl_function, None)
            context._interop_by = interop or "cuda"
        with _registry_lock:
            _adopted.append(context)
        return context

    @classmethod
    def _wrap(cls, mgl: moderngl.Context, own: egl.Current, load: Any, device: Device | None) -> Context:
        HostBridge.check_supported(mgl.extensions, mgl.version_code)
        self = object.__new__(cls)
        self._mgl = mgl
        self._own = own
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._owner = None
        self._active = 0
        self._outer = []
        self._unfinished = False
        self._closed = False
        self.is_default = False
        self.device = device
        self.gl = gl = GL(load)
        self.host = self.bridge = HostBridge(gl)
        self.interop = None
        self._interop_by = "cuda"
        self.private = PrivatePool(gl)
        self.extensions = frozenset(mgl.extensions)
        self.version = mgl.version_code
        self.vendor = gl.string(G.VENDOR)
        self.renderer = gl.string(G.RENDERER)
        self.driver = gl.string(G.VERSION)
        self.limits = Limits(
            # Element indices must stay below 2^31.
            storage_bytes=min(gl.integer(G.MAX_SHADER_STORAGE_BLOCK_SIZE), 2**31 - 2**20),
            texture_size=gl.integer(G.MAX_TEXTURE_SIZE),
            layers=min(gl.integer(G.MAX_ARRAY_TEXTURE_LAYERS), gl.integer(G.MAX_FRAMEBUFFER_LAYERS)),
        )
        self.programs = Programs(mgl, gl)
        self.textures = TexturePool(gl, self.software)
        self.constants = _Constants()
        return self

    @property
    def software(self) -> bool:
        """True on a software renderer (llvmpipe, softpipe, SwiftShader)."""
        return any(name in self.renderer.lower() for name in ("llvmpipe", "softpipe", "swiftshader", "swrast"))

    @property
    def closed(self) -> bool:
        return self._closed

    def usable_here(self) -> bool:
        """True unless it was closed, belongs to a parent process, or was adopted and is not current on this thread."""
        if self._closed or self._pid != os.getpid():
            return False
        return self.device is not None or egl.current().same_context(self._own)

    def __repr__(self) -> str:
        where = "adopted" if self.device is None else f"device={self.device.index}"
        return f"<gpu_lod.Context {where} {self.renderer!r}{' closed' if self._closed else ''}>"

    # -- use ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            _raise_forked()
        if self._closed:
            raise ContextClosedError("this context was closed; make another with gpu_lod.Context().")

    def _acquire(self) -> None:
        """Take the lock and make the context current on this thread; reentrant."""
        self._check_usable()
        if not self._lock.acquire(timeout=LOCK_TIMEOUT):
            raise ContextBusyError(
                f"thread {self._owner} has held this context for more than {LOCK_TIMEOUT:g} s. A `with context:` block "
                "pins it to its thread: do not wait for another thread's verbs inside one."
            )
        try:
            self._check_usable()
            # At every depth: a `with` block of another context, or the program itself, may have come in between.
            here = egl.current()
            if not here.same_context(self._own):
                if self.device is None:
                    raise ContextNotCurrentError(
                        "this context was adopted and is not current on the calling thread: make it current here, "
                        "or use gpu_lod.Context() for a context of gpu_lod's own, which any thread may use."
                    )
                egl.switch(here, self._own)
            self._outer.append(here)
            self._owner = threading.get_ident()
        except BaseException:
            self._lock.release()
            raise

    def _release(self) -> None:
        try:
            outer = self._outer.pop()
            if not self._outer:
                self._owner = None
            if not outer.same_context(self._own):
                egl.switch(egl.current(), outer)
        finally:
            self._lock.release()

    @contextmanager
    def active(self, *tensors: torch.Tensor, device: torch.device | None = None) -> Iterator[Context]:
        """What every verb runs in: the lock, the context current, and on exit GL's work visible to torch.

        Args:
            tensors: what the verb reads; those in GL memory become GL's.
            device: where the results shall be; None is where the first tensor is, or the CPU.
        """
        if device is None:
            device = tensors[0].device if tensors else torch.device("cpu")
        with Shield():
            self._acquire()
            try:
                if self._active:  # a verb inside a verb: the outer one waits
                    yield self
                    return
                self._active += 1
                try:
                    if self.device is None:
                        with preserved(self.gl):
                            yield from self._work(tensors, device)
                    else:
                        yield from self._work(tensors, device)
                finally:
                    self._active -= 1
            finally:
                self._release()

    def _work(self, tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[Context]:
        if self._unfinished:  # a signal cut the last verb short: its work may still use what comes back now
            self._finish()
        self.bridge = bridge = self._bridge_for(device)
        bridge.begin(tensors)
        self._unfinished = True
        self.textures.drain()
        self.private.drain()
        self.gl.clear_errors()
        try:
            yield self
            self.gl.check("this call")
        finally:
            # Also after an exception: buffers go back to the pool, and torch may write to them at once.
            self._finish()

    def _finish(self) -> None:
        try:
            self.bridge.end()
        finally:
            self._unfinished = False
            self.bridge = self.host

    def _bridge_for(self, device: torch.device) -> Bridge:
        """The bridge to tensors on `device`; the context must be current."""
        if self.interop is not None and device == self.interop.device:
            return self.interop
        if device.type != "cuda":
            return self.host
        if self.interop is None:
            self.interop = self._connect(device)
        else:
            raise DeviceMismatchError(
                f"the tensor is on {device}, and this context ({self.renderer}) shares memory with "
                f"{self.interop.device}. Leave the `with` block of this context, open "
                f"gpu_lod.Context({str(device)!r}), or move the tensor."
            )
        return self.interop

    def _connect(self, device: torch.device, driver: Driver | None = None) -> InteropBridge:
        """A bridge to a CUDA device, which must be the GPU that this context is on."""
        if self.software:
            raise DeviceMismatchError(
                f"the tensor is on {device}, and this OpenGL context is a software renderer ({self.renderer}), which "
                f"shares no memory with CUDA. {egl.INSTALL_HINT} Or use backend='torch'."
            )
        driver = driver or _DRIVERS[self._interop_by](device.index)
        before = driver.activate()
        try:
            driver.check_same_gpu(self.renderer)
        finally:
            driver.restore(before)
        return InteropBridge(self.gl, driver)

    def __enter__(self) -> Context:
        with Shield():
            self._acquire()
            _pinned_stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with Shield():
            _pinned_stack().remove(self)
            self._release()

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def tensor_device(self) -> torch.device:
        """Where `empty` makes tensors by default: the CUDA device that this context is on, if torch has it, else the
        CPU."""
        return self.interop.device if self.interop is not None else self.host.device

    def empty(
        self, *shape: Any, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """A tensor whose memory is a GL buffer, so that verbs read it without a copy. Contents are undefined.

        Args:
            shape: sides, or one sequence of them.
            dtype: uint8, float16 or float32.
            device: "cpu" or the CUDA device that this context is on; None is `tensor_device`, which is CUDA for a
                context opened with a CUDA device or used with a CUDA tensor before.

        Returns:
            A contiguous tensor. Its memory returns to the context's pool when its last alias dies. On CUDA it is
            OpenGL's while a verb reads it: no other thread may use it meanwhile.

        Raises:
            InputError: a shape, dtype or device that cannot be had.
            DeviceMismatchError: the CUDA device is not the GPU that this context is on.
            OutOfMemoryError: the device has no room left.
        """
        sides = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if dtype not in (torch.uint8, torch.float16, torch.float32):
            raise InputError(f"dtype is {dtype}; GL buffers hold uint8, float16 or float32.")
        if not sides or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
            raise InputError(f"shape is {sides}; expected one or more positive integers.")
        count = 1
        for side in sides:
            count *= side
        with self.active(device=self.tensor_device if device is None else _torch_device(device)):
            return self.bridge.lease(count * dtype.itemsize).tensor(dtype, sides)

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's memory is one of this context's GL buffers."""
        return self._bridge_of(tensor).find(tensor) is not None

    def _bridge_of(self, tensor: torch.Tensor) -> Bridge:
        return self.interop if self.interop is not None and tensor.device == self.interop.device else self.host

    def trim(self) -> None:
        """Free idle buffers and textures. Those in use, also by tensors, stay."""
        with self.active():
            self._trim()

    def _trim(self) -> None:
        self.host.trim()
        if self.interop is not None:
            self.interop.trim()
        self.private.trim()
        self.textures.trim()

    def _leased(self) -> int:
        pools: list[Pool[Any]] = [self.host.pool, self.private.pool, self.textures.pool]
        if self.interop is not None:
            pools.append(self.interop.pool)
        return sum(pool.leased for pool in pools)

    def close(self) -> None:
        """Free everything that is not in use by tensors; later use raises `ContextClosedError`. Idempotent.

        Tensors stay valid. The GL context itself goes when the last of them has died.
        """
        if self._closed or self._pid != os.getpid():
            return
        # The context's lock before the registry's, as for a thread that has pinned the context and opens another one.
        with Shield(), self.active(), _registry_lock:
            self._mark_closed()
            self.programs.clear()
            self.constants.clear()
            self._trim()
            _lingering.append(self)
        _reap()

    def _mark_closed(self) -> None:
        self._closed = True
        if self.device is None:
            _adopted.remove(self)
        elif _registry.get(self.device.index) is self:
            del _registry[self.device.index]

    def _reap(self) -> bool:
        """Free what closing left to living tensors; True when nothing of it is left."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            here = egl.current()
            if self._outer or (self.device is None and not here.same_context(self._own)):
                return False
            if self.device is not None:
                egl.switch(here, self._own)
            try:
                self._trim()
                done = not self._leased()
                if done and self.device is not None:
                    self._mgl.release()
            finally:
                if self.device is not None:
                    egl.switch(self._own, here)
            return done
        finally:
            self._lock.release()


def _reap() -> None:
    with Shield(), _registry_lock:
        _lingering[:] = [context for context in _lingering if context._pid == os.getpid() and not context._reap()]


def _after_fork() -> None:
    """A thread that is not in the child may have held the lock."""
    global _registry_lock
    _registry_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _pinned_stack() -> list[Context]:
    if not hasattr(_pinned, "stack"):
        _pinned.stack = []
    stack: list[Context] = _pinned.stack
    return stack


def context_for(*tensors: torch.Tensor) -> Context:
    """The context a verb runs on: that of a GL-backed input, else the one pinned to this thread, else the default one
    for the device that the tensors are on."""
    for context in (*_registry.values(), *_adopted):
        if any(context.owns(tensor) for tensor in tensors):
            return context
    stack = _pinned_stack()
    if stack:
        return stack[-1]
    return Context(tensors[0].device) if tensors else Context()


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why OpenGL cannot share memory with tensors on a CUDA device, or None. Opens no context."""
    try:
        CudaDriver(device.index or 0)
        match(gpu(device.index or 0), devices())
    except GpuLodError as error:
        return str(error)
    return None


def _torch_device(device: torch.device | str) -> torch.device:
    """A CPU or CUDA device, the latter with its index."""
    try:
        result = torch.device(device)
    except RuntimeError as error:
        raise InputError(
            f"device is {device!r}; expected a torch device such as 'cpu' or 'cuda:0' ({error})."
        ) from None
    if result.type not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}; OpenGL shares memory with 'cpu' and 'cuda' tensors.")
    if result.type == "cuda":
        check_available(index := 0 if str(result) == "cuda" else result.index)
        return torch.device("cuda", torch.cuda.current_device() if str(result) == "cuda" else index)
    return result


def _check_interop(interop: Any) -> None:
    if interop is not None and interop not in _DRIVERS:
        raise InputError(f"interop is {interop!r}; expected {' or '.join(map(repr, _DRIVERS))}.")


def _none_opens(failures: list[tuple[int, GpuLodError]], where: str = "") -> GpuLodError:
    if len(failures) == 1:
        return failures[0][1]
    return GLUnavailableError(
        f"no EGL device opens{where}: " + "; ".join(f"device {index}: {error}" for index, error in failures)
    )


def _raise_forked() -> NoReturn:
    raise ForkedContextError(
        "OpenGL was opened before this process was forked, and GL contexts do not survive a fork. Start workers with "
        "the 'spawn' method (torch.multiprocessing.set_start_method('spawn')), make the first gpu_lod call in the "
        "child, or use backend='torch' there."
    )
