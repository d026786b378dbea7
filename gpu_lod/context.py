"""Context: one OpenGL context on one device, with its programs, textures and shared buffers.

A context is current only inside a verb and released on exit, under a lock, so any thread may call: autograd runs
backward on threads of its own. Verbs run inside `with context.active():`. Nothing here runs at import.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from contextlib import suppress
from typing import Any

import moderngl
import torch

from gpu_lod.bridge import Device, HostBridge, choose, devices, egl, exits, llvm
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.cuda import CudaDriver
from gpu_lod.bridge.devices import gpu, match
from gpu_lod.bridge.gl import GL
from gpu_lod.errors import (
    ContextNotCurrentError,
    DeviceMismatchError,
    ForkedContextError,
    GLUnavailableError,
    GpuLodError,
    InputError,
    OutOfMemoryError,
    UnsupportedError,
)
from gpu_lod.glstate import STORAGE_BINDINGS, TEXTURE_UNITS, preserved, preserved_for_moderngl
from gpu_lod.heap import give_back
from gpu_lod.pinning import few_threads, pinning
from gpu_lod.program import Programs
from gpu_lod.sharing import DRIVERS, Interop, Sharing, torch_device
from gpu_lod.shield import Shield
from gpu_lod.turns import check_not_finalizing, pinned_stack, raise_forked

_REQUIRED = 430

_registry: dict[int, Context] = {}  # by EGL device
_adopted: list[Context] = []
_registry_lock = threading.RLock()
_lingering: list[Context] = []  # closed while tensors of theirs were alive
_opened_in_pid: int | None = None


class Context(Sharing):
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
        GLUnavailableError: no EGL, no device that opens, or OpenGL older than 4.3; in software, another library (such
            as TensorFlow) whose LLVM would compile the shaders; for a CUDA device, OpenGL only on other GPUs or in
            software.
        CudaUnavailableError, InteropUnavailableError: CUDA, or its sharing with OpenGL, does not work here.
        UnsupportedError: no GL_ARB_buffer_storage.
        InputError: no such device.
        ForkedContextError: OpenGL was opened before this process forked.
    """

    _mark: tuple[int, bytes] | None = None
    """Of an adopted context that was closed: a buffer, and what it holds."""

    def __deepcopy__(self, memo: object) -> Context:
        """Itself: what a copy of a module holds works on the same device."""
        return self

    __copy__ = functools.partialmethod(__deepcopy__, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a Context belongs to its process and cannot be pickled: call gpu_lod.Context() in the one that uses it."
        )

    is_default: bool
    extensions: frozenset[str]
    version: int
    """OpenGL version, 450 for 4.5."""
    vendor: str
    driver: str
    """GL_VERSION, which names the driver's own version."""
    programs: Programs
    _mgl: moderngl.Context

    def __new__(cls, device: int | str | torch.device | None = None, interop: Interop | None = None) -> Context:
        check_not_finalizing()
        _check_interop(interop)
        if isinstance(device, (str, torch.device)):
            wanted = torch_device(device)
            if wanted.type == "cuda":
                with Shield():
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
        with _registry_lock:
            open_ones = [*_registry.values()]
        for context in open_ones:
            if context.interop is not None and context.interop.device == wanted:
                context._check_usable()
                return context._sharing_through(interop)
        driver = DRIVERS[interop or "cuda"](wanted.index)
        failures = []
        for candidate in match(gpu(wanted.index), devices()):
            try:
                with _registry_lock:
                    fresh = candidate.index not in _registry
                    context = cls._on(candidate)
                # Without the registry's lock: who holds the context may ask for that.
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
                return context._sharing_through(interop)
            failures.append((candidate.index, DeviceMismatchError(f"it is {context.interop.device}")))
        raise _none_opens(failures, f" on {wanted}")

    def _sharing_through(self, interop: Interop | None) -> Context:
        """Itself, which shares memory with CUDA already."""
        assert self.interop is not None
        if interop not in (None, self.interop.driver.name):
            raise InputError(
                f"the context on {self.interop.device} shares memory through {self.interop.driver.name!r} already, not "
                f"{interop!r}. Close it first."
            )
        return self

    @classmethod
    def _on(cls, device: Device) -> Context:
        """The context on an EGL device, opened if it is not open yet."""
        global _opened_in_pid
        if _opened_in_pid not in (None, os.getpid()):
            raise_forked()
        known = _registry.get(device.index)
        if known is None:
            _reap()
            _opened_in_pid = os.getpid()
            known = _registry[device.index] = cls._create(device)
        return known

    @classmethod
    def _create(cls, device: Device) -> Context:
        import glcontext.egl as backend  # not get_backend_by_name: its environment variables override arguments

        if device.cuda_ordinal is None:  # NVIDIA's driver brings no LLVM
            llvm.keep_apart(opening=True)
        if device.software and (other := llvm.in_the_way()):
            raise GLUnavailableError(
                f"a software renderer would compile shaders by another version's LLVM and crash: {other} has put its "
                "own before all that are loaded after it. Use backend='torch', or OpenGL in a process without it."
            )
        old = egl.release_current()
        try:
            library = egl.soname()
            try:
                # Entry points come from EGL alone, so libGL need not be installed.
                with few_threads(), pinning():
                    window = backend.create_context(
                        mode="standalone", libgl=library, libegl=library, glversion=_REQUIRED, device_index=device.index
                    )
            except Exception as error:  # glcontext raises bare Exception
                raise GLUnavailableError(
                    f"EGL device {device.index} gives no OpenGL {_REQUIRED // 100}.{_REQUIRED // 10 % 10} context: "
                    f"{error}. {egl.hint()}"
                ) from None
            own = egl.current()
            if not own.exists:
                raise GLUnavailableError(f"EGL device {device.index} made a context but did not make it current.")
            try:
                mgl = moderngl.create_context(context=window, standalone=True, require=_REQUIRED)
                made = cls._wrap(mgl, own, window.load_opengl_function, device)
                made.gl.Disable(G.DITHER)  # which is on from the start, and may take a count for its neighbour
                return made
            except BaseException:
                egl.switch(own, egl.NO_CONTEXT)
                window.release()
                raise
        finally:
            egl.switch(egl.current(), old, back=True)

    @classmethod
    def adopt(cls, source: moderngl.Context | None = None, interop: Interop | None = None) -> Context:
        """Use a context that the program already has: a moderngl context, or that of a window.

        The context must be current on the calling thread now and in every call. Each verb leaves the GL state as it
        found it, of core profiles and of compatibility profiles; transform feedback is paused meanwhile. But errors
        that nobody asked glGetError for are dropped, and queries in progress count what a verb draws. Call none between
        glBeginConditionalRender and its end, which OpenGL does not tell of: nothing would be computed. Closing frees
        what gpu_lod made in it and leaves the context itself alone: close before the context goes, for another one may
        get its handle. On graphics hardware results lie in the context's own buffers and end with it: `clone()` what is
        to outlive it, and neither read nor write to any other after that. On llvmpipe they are memory of the process's
        own, and stay.

        Args:
            source: a moderngl context, which is the one that is current, or None for whatever is current on this
                thread, such as a GLFW window's after `glfw.make_context_current(window)`.
            interop: as for `Context`.

        Raises:
            InputError: no moderngl context.
            ContextNotCurrentError: nothing is current.
            GLUnavailableError: OpenGL older than 4.3.
            UnsupportedError: no GL_ARB_buffer_storage.
        """
        _check_interop(interop)
        if source is not None and not isinstance(source, moderngl.Context):
            raise InputError(
                f"source is a {type(source).__name__}; expected a moderngl context, or None for what is current."
            )
        here = egl.current()
        if not here.exists:
            raise ContextNotCurrentError(
                "no OpenGL context is current on this thread: make it current first, for a window with "
                "glfw.make_context_current(window), for a moderngl context with `with context:`."
            )
        llvm.keep_apart(opening=False)
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
        self.is_default = False
        self._start_turns(own, device)
        self.extensions = frozenset(mgl.extensions)
        self._start_sharing(GL(load), self.extensions)
        self.version = mgl.version_code
        self.vendor = self.gl.string(G.VENDOR)
        self.driver = self.gl.string(G.VERSION)
        self.programs = Programs(mgl, self.gl, self.tuning.pairs)
        return self

    def __repr__(self) -> str:
        where = "adopted" if self.device is None else f"device={self.device.index}"
        return f"<gpu_lod.Context {where} {self.renderer!r}{' closed' if self._closed else ''}>"

    def close(self) -> None:
        """Free everything that is not in use by tensors; later use raises `ContextClosedError`. Idempotent.

        Tensors stay valid, those of an adopted context on graphics hardware until the program ends that. The GL context
        itself goes when a context is opened or closed after the last of them died.
        """
        if self._closed or self._pid != os.getpid() or sys.is_finalizing():  # the process frees everything
            return
        try:
            # The context's lock before the registry's, as for a thread that has pinned the context and opens another.
            with Shield(), self.active(), _registry_lock:
                self._mark_closed()
                _lingering.append(self)  # first: whatever fails below is tried again then
                self.programs.clear()
                self.constants.clear()
                self._trim()
                if self.device is None and self._leased():
                    self._leave_mark()
        except GLUnavailableError:  # current on a thread that was killed, it is nobody's any more
            with Shield(), _registry_lock:
                if not self._closed:
                    self._mark_closed()
                    _lingering.append(self)
        _reap()
        self._give_back()

    def trim(self) -> None:
        """Free idle buffers and textures. Those in use, also by tensors, stay. Of a software renderer they lie in the
        process's heap, and what is free there goes back to the kernel."""
        with self.active():
            with suppress(OutOfMemoryError):
                self._take_bindings()
            self._trim()
        self._give_back()

    def _take_bindings(self) -> None:
        """What dispatches and draws were bound to, llvmpipe holds until others take the bindings: with Mesa 25 and 26,
        until shaders do that use them."""
        nothing = self.private.lease(4)
        target = self.textures.lease((1, 1), layers=1, levels=1, dtype=torch.uint8, channels=4)
        for binding in range(STORAGE_BINDINGS):
            nothing.item.bind(binding, 0, 4)
        for unit in range(TEXTURE_UNITS):
            nothing.item.views.bind(unit, G.R32UI)
        target.bind_image(self.gl, 0)
        counts = {"STORAGE_BINDINGS": STORAGE_BINDINGS, "TEXTURE_UNITS": TEXTURE_UNITS}
        for image in (False, True):
            self.programs.compute("nothing.comp", IMAGE=image, **counts).dispatch_groups(1, 1, 1)
        self.gl.MemoryBarrier(G.ALL_BARRIER_BITS)
        target.render_to(self.gl, 0)
        self.programs.render("nothing.frag", **counts).draw_layers(self.programs.vertex_array, 1)
        self.gl.Finish()

    def _give_back(self) -> None:
        """Of a software renderer, buffers and textures lie in the process's heap."""
        if self.software:
            give_back()

    def _leave_mark(self) -> None:
        """By which a context that is not ours is known again: another one may get its handle."""
        value = os.urandom(16)
        self._mark = self.gl.gen("Buffers"), value
        self.gl.BindBuffer(G.COPY_WRITE_BUFFER, self._mark[0])
        self.gl.BufferData(G.COPY_WRITE_BUFFER, len(value), value, G.STREAM_DRAW)

    def _has_mark(self) -> bool:
        """Whether what is current is the context that the mark was left in."""
        assert self._mark is not None
        glo, value = self._mark
        if not self.gl.IsBuffer(glo):
            return False
        found = ctypes.create_string_buffer(len(value))
        before = self.gl.integer(G.COPY_READ_BUFFER_BINDING)
        self.gl.clear_errors()
        self.gl.BindBuffer(G.COPY_READ_BUFFER, glo)
        self.gl.GetBufferSubData(G.COPY_READ_BUFFER, 0, len(value), found)  # of a smaller or mapped one an error
        self.gl.BindBuffer(G.COPY_READ_BUFFER, before)
        self.gl.clear_errors()
        return found.raw == value

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
                self.host.forget()
                return False
            if self.device is not None:
                egl.switch(here, self._own)
            elif self._mark is not None and not self._has_mark():
                return True  # the context has gone, and what was in it
            try:
                self._trim()
                done = not self._leased()
                if done and self._mark is not None:
                    self.gl.delete("Buffers", self._mark[0])
                if done and self.device is not None:
                    self._mgl.release()
            finally:
                if self.device is not None:
                    egl.switch(self._own, here, back=True)
            return done
        finally:
            self._lock.release()


def _reap() -> None:
    with Shield(), _registry_lock:
        for context in tuple(_lingering):
            with suppress(GpuLodError):  # a lost device, or one that is being captured: it stays for the next time
                if context._pid != os.getpid() or context._reap():
                    _lingering.remove(context)


def _after_fork() -> None:
    """A thread that is not in the child may have held the lock."""
    global _registry_lock
    _registry_lock = threading.RLock()
    if _opened_in_pid is not None:
        exits.end_without_handlers()


os.register_at_fork(after_in_child=_after_fork)


def context_for(*tensors: torch.Tensor, device: torch.device | None = None) -> Context:
    """The context a verb runs on: that of a GL-backed input, else the one pinned to this thread, else the default one
    for the device that the tensors are on.

    Args:
        device: which one it works on, where the tensors are on several; None is the first tensor's.
    """
    for context in (*_registry.values(), *_adopted):
        if any(context.owns(tensor) for tensor in tensors):
            return context
    stack = pinned_stack()
    if stack:
        return stack[-1]
    if device is None and tensors:
        device = tensors[0].device
    return Context(device)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why OpenGL cannot share memory with tensors on a CUDA device, or None. Opens no context."""
    try:
        CudaDriver(device.index or 0)
        match(gpu(device.index or 0), devices())
    except GpuLodError as error:
        return str(error)
    except Exception as error:  # whatever a driver or a library raises: "auto" must still reach torch
        return f"{type(error).__name__}: {error}"
    return None


def _check_interop(interop: Any) -> None:
    if interop is not None and interop not in DRIVERS:
        raise InputError(f"interop is {interop!r}; expected {' or '.join(map(repr, DRIVERS))}.")


def _none_opens(failures: list[tuple[int, GpuLodError]], where: str = "") -> GpuLodError:
    if len(failures) == 1:
        return failures[0][1]
    return GLUnavailableError(
        f"no EGL device opens{where}: " + "; ".join(f"device {index}: {error}" for index, error in failures)
    )
