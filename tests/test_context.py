"""The context's life: threads, forks, closing, adoption, and machines without OpenGL."""

from __future__ import annotations

import _thread
import concurrent.futures
import copy
import ctypes
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import moderngl
import numpy as np
import pytest
import torch
from images import noise
from scripts import run, succeed

import gpu_lod as lod
from gpu_lod import turns
from gpu_lod.bridge import Device, choose, egl
from gpu_lod.bridge import gl as G
from gpu_lod.errors import (
    ContextBusyError,
    ContextClosedError,
    ContextNotCurrentError,
    GLError,
    GLUnavailableError,
    InputError,
    UnsupportedError,
)
from gpu_lod.program import Program


def test_import_opens_nothing() -> None:
    out = succeed("""
        import gpu_lod
        maps = open("/proc/self/maps").read()
        print([name for name in ("libEGL", "libGL.", "libGLX", "libgallium", "swrast_dri") if name in maps])
        print(gpu_lod.context._registry)
    """)
    assert out.split() == ["[]", "{}"]


def test_one_context_per_device(ctx: lod.Context) -> None:
    assert lod.Context() is ctx
    assert ctx.device is not None
    assert lod.Context(device=ctx.device.index) is ctx
    assert ctx.renderer in repr(ctx)


@pytest.mark.parametrize("device", [99, -1, 1.5, "0", True])
def test_bad_device(device: object) -> None:
    with pytest.raises(InputError, match="device"):
        lod.Context(device=device)  # type: ignore[arg-type]
    lod.mipmap(noise(1, 4, 4), generator="compute")


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_LOD_DEVICE", raising=False)
    found = [
        Device(0, ("EGL_MESA_device_software",), None, None),
        Device(1, ("EGL_EXT_device_drm",), "/dev/dri/card0", None),
        Device(2, ("EGL_NV_device_cuda",), None, 0),
    ]
    assert [device.index for device in choose(None, found)] == [1, 2, 0]
    assert [device.index for device in choose(0, found)] == [0]
    monkeypatch.setenv("GPU_LOD_DEVICE", "2")
    assert [device.index for device in choose(None, found)] == [2]
    assert [device.index for device in choose(1, found)] == [1]
    monkeypatch.setenv("GPU_LOD_DEVICE", "fast")
    with pytest.raises(InputError, match="GPU_LOD_DEVICE"):
        choose(None, found)
    for none in ("3", "9" * 5000):  # the caller named no device, and is told who did
        monkeypatch.setenv("GPU_LOD_DEVICE", none)
        with pytest.raises(InputError, match=r"GPU_LOD_DEVICE is '[39]{1,40}.*; expected .* 0 to 2\. Unset it"):
            choose(None, found)
    with pytest.raises(GLUnavailableError):
        choose(None, [])


def test_nothing_is_current_outside_a_verb(ctx: lod.Context) -> None:
    lod.mipmap(noise(1, 8, 8), generator="compute")
    assert not egl.current().exists
    with ctx:
        assert egl.current().exists
        lod.mipmap(noise(1, 8, 8), generator="compute")
        assert egl.current().exists
    assert not egl.current().exists


def test_the_api_that_is_bound_stays() -> None:
    """EGL's default of a thread is OpenGL ES, of which the next context is that somebody makes."""
    succeed("""
        import threading
        import torch, gpu_lod as lod
        from gpu_lod.bridge import egl

        ES = 0x30A0
        def check():
            assert egl._egl().query_api() == ES
            lod.mipmap(torch.rand(1, 8, 8), generator="compute")
            assert egl._egl().query_api() == ES
            with lod.Context():
                lod.mipmap(torch.rand(1, 8, 8), generator="compute")
            assert egl._egl().query_api() == ES
            done.append(True)
        done = []
        check()
        thread = threading.Thread(target=check)
        thread.start(), thread.join()
        assert len(done) == 2
    """)


def test_a_thread_that_loads_libraries_is_not_waited_for() -> None:
    """An import holds the interpreter's lock while it waits for the loader's: whoever held the loader's and waited for
    the interpreter's would wait for ever."""
    succeed("""
        import ctypes, faulthandler, os, threading, time
        from gpu_lod.bridge import egl

        faulthandler.dump_traceback_later(60, exit=True)
        loader = ctypes.PyDLL(None)  # keeps the interpreter's lock, as imports do
        loader.dlopen.restype, loader.dlclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        until = time.monotonic() + 2

        def load():
            while time.monotonic() < until:
                assert loader.dlclose(loader.dlopen(b"libanl.so.1", os.RTLD_NOW)) == 0

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        while thread.is_alive():
            egl.current()
    """)


def test_a_library_that_was_loaded_is_noticed() -> None:
    succeed("""
        import ctypes
        from gpu_lod.bridge import egl

        before = egl._library_loads()
        assert egl._library_loads() == before
        ctypes.CDLL("libanl.so.1")
        assert egl._library_loads() != before
    """)


def test_the_callers_own_context_stays_current() -> None:
    succeed("""
        import moderngl, torch, gpu_lod as lod
        from gpu_lod.bridge import egl
        mine = moderngl.create_context(standalone=True, backend="egl", require=430)
        before = egl.current()
        assert before.exists
        lod.mipmap(torch.rand(1, 8, 8), generator="compute")   # opens a context of its own
        assert egl.current() == before
        assert mine.buffer(b"abcd").read() == b"abcd"
    """)


def test_any_thread_may_call() -> None:
    image = noise(3, 40, 56)
    expected = lod.mipmap(image, generator="compute")

    def work(_: int) -> bool:
        pyramid = lod.mipmap(image, generator="compute")
        polar = lod.log_polar(pyramid, (0.4, 0.6), 8, 8, generator="compute")
        return all(torch.equal(a, b) for a, b in zip(pyramid, expected, strict=True)) and polar.shape == (3, 8, 8)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(160)))


def test_other_threads_run_while_a_renderer_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pyramid = lod.mipmap(noise(3, 512, 512), backend="gl").upload()
    turns_taken, gained, done = [0], [], threading.Event()
    dispatch = Program.dispatch_groups

    def count() -> None:
        while not done.is_set():
            turns_taken[0] += 1
            time.sleep(0)

    def watched(self: Program, *groups: int) -> None:
        before = turns_taken[0]
        dispatch(self, *groups)
        gained.append(turns_taken[0] - before)

    monkeypatch.setattr(Program, "dispatch_groups", watched)
    interval, other = sys.getswitchinterval(), threading.Thread(target=count)
    sys.setswitchinterval(1000)  # nobody is made to let go of the interpreter
    try:
        other.start()
        lod.foveate(pyramid, (0.4, 0.6), anisotropy=16, backend="gl")
    finally:
        sys.setswitchinterval(interval)
        done.set()
        other.join()
    assert max(gained) > 0


def test_backward_on_another_thread() -> None:
    image = noise(3, 24, 24).requires_grad_()
    loss = lod.log_polar(lod.mipmap(image, generator="compute"), (0.5, 0.5), 6, 6, generator="compute").sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert image.grad is not None


def test_a_pinned_context_makes_others_wait_and_then_says_so(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(1, 8, 8)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with ctx:
            waiting = pool.submit(lod.mipmap, image, generator="compute")
            time.sleep(0.1)
            assert not waiting.done()
        assert len(waiting.result(timeout=30)) == 4
        monkeypatch.setattr(turns, "LOCK_TIMEOUT", 0.05)
        with ctx, pytest.raises(ContextBusyError, match="pins"):
            pool.submit(lod.mipmap, image, generator="compute").result(timeout=30)
        assert len(pool.submit(lod.mipmap, image, generator="compute").result(timeout=30)) == 4


def test_a_block_is_left_on_the_thread_that_entered_it(ctx: lod.Context) -> None:
    def pinned() -> Iterator[None]:
        with ctx:
            yield

    block = pinned()
    next(block)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(ContextNotCurrentError, match=f"but to {threading.get_ident()}: leave"):
            pool.submit(block.close).result(timeout=30)
        ctx.__exit__()
        assert len(pool.submit(lod.mipmap, noise(1, 8, 8), backend="gl").result(timeout=30)) == 4
    with pytest.raises(ContextNotCurrentError, match="nobody is in"):
        ctx.__exit__()


def test_a_thread_that_ended_inside_a_block_is_told_of() -> None:
    """In a process of its own: the context is lost to it."""
    succeed("""
        import threading
        import torch
        import gpu_lod as lod
        from gpu_lod import turns

        turns.LOCK_TIMEOUT = 0.05
        thread = threading.Thread(target=lod.Context().__enter__)
        thread.start()
        thread.join()
        try:
            lod.mipmap(torch.rand(1, 8, 8), backend="gl")
        except lod.GpuLodError as error:
            assert f"thread {thread.ident} has ended inside" in str(error), error
        else:
            raise AssertionError("taken from a thread that is gone")
    """)


def test_a_thread_of_somebody_elses_that_holds_a_context_has_not_ended(
    ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As autograd's, of which threading knows nothing."""
    held, done, left = threading.Lock(), threading.Lock(), threading.Lock()

    def hold() -> None:
        with ctx:
            held.release()
            done.acquire()
        left.release()

    for lock in (held, done, left):
        lock.acquire()
    _thread.start_new_thread(hold, ())
    held.acquire()
    monkeypatch.setattr(turns, "LOCK_TIMEOUT", 0.05)
    try:
        with pytest.raises(ContextBusyError, match="has held"):
            lod.mipmap(noise(1, 8, 8), backend="gl")
    finally:
        done.release()
        left.acquire()


def test_contexts_are_copied_by_reference_and_never_pickled(ctx: lod.Context) -> None:
    """As by a module that holds one."""
    assert copy.deepcopy({"context": ctx})["context"] is ctx and copy.copy(ctx) is ctx
    with pytest.raises(UnsupportedError, match="belongs to its process"):
        pickle.dumps(ctx)
    maps = lod.feature_maps(noise(3, 16, 16), as_texture=True)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="pass the tensor"):
            copying(maps)


def test_a_signal_while_a_block_begins_pins_nothing(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    image, acquire = noise(1, 8, 8), turns.Turns._acquire
    lod.mipmap(image, backend="gl")

    def interrupted(self: turns.Turns) -> None:
        acquire(self)
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(turns.Turns, "_acquire", interrupted)
            with ctx:
                raise AssertionError("the block was begun")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert turns.pinned_stack() == []
    monkeypatch.setattr(turns, "LOCK_TIMEOUT", 5)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(lod.mipmap, image, backend="gl").result(timeout=30)


def test_a_signal_in_the_middle_of_a_call() -> None:
    image = noise(3, 700, 700)
    expected = lod.mipmap(image, generator="compute")[3].clone()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    hits = 0
    try:
        for step in range(40):
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0002 * step)
            try:
                for _ in range(3):
                    lod.mipmap(image, generator="compute")
            except KeyboardInterrupt:
                hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits > 5
    assert torch.equal(lod.mipmap(image, generator="compute")[3], expected)


def test_who_waits_for_a_context_that_closes_is_told() -> None:
    out = succeed("""
        import threading, time, gpu_lod as lod
        closed = lod.Context()
        def enter():
            try:
                with closed:
                    print("went in")
            except lod.GpuLodError as error:
                print(type(error).__name__)
        with closed:
            waiting = threading.Thread(target=enter)
            waiting.start()
            time.sleep(0.3)  # so that it waits for the lock
            closed.close()
        waiting.join(20)
        """)
    assert out == "ContextClosedError\n"


def test_errors_of_others_are_not_blamed_on_a_verb(ctx: lod.Context) -> None:
    with ctx:
        ctx.gl.Enable(0xFFFF)  # no capability
        lod.mipmap(noise(1, 8, 8), generator="compute")


def test_close_keeps_tensors_and_a_fresh_context_follows() -> None:
    succeed("""
        import gc, pytest, torch, gpu_lod as lod
        from gpu_lod.errors import ContextClosedError
        from gpu_lod import context
        ctx = lod.Context()
        image = torch.rand(3, 32, 32)
        pyramid = lod.mipmap(image, generator="compute")
        held = pyramid[1]
        expected = held.clone()
        ctx.close()
        ctx.close()
        assert ctx.closed and "closed" in repr(ctx)
        with pytest.raises(ContextClosedError):
            ctx.empty(3)
        with pytest.raises(ContextClosedError):
            with ctx:
                pass
        assert torch.equal(held, expected)
        fresh = lod.Context()
        assert fresh is not ctx
        again = lod.mipmap(image, generator="compute")
        assert torch.equal(again[1], expected)
        assert torch.equal(lod.log_polar(pyramid, (.5, .5), 4, 4, generator="compute"),
                           lod.log_polar(again, (.5, .5), 4, 4, generator="compute"))
        assert context._lingering == [ctx]
        del pyramid, held
        gc.collect()
        fresh.close()
        lod.Context()
        assert ctx not in context._lingering
    """)


def test_a_feature_texture_outlives_the_context_that_was_adopted() -> None:
    succeed("""
        import gc
        import moderngl, torch, gpu_lod as lod
        from gpu_lod import context

        mine = moderngl.create_context(standalone=True, backend="egl", require=430)
        adopted = lod.Context.adopt(mine)
        with adopted:
            features = lod.feature_maps(torch.rand(1, 3, 16, 16), backend="gl", as_texture=True)
        glo, exists = features.glo, adopted.gl.IsTexture
        adopted.close()
        assert exists(glo)
        del features
        gc.collect()
        lod.Context.adopt(mine).close()
        assert not exists(glo) and adopted not in context._lingering
    """)


def test_a_context_that_was_destroyed_while_it_was_current_is_not_missed() -> None:
    """moderngl's `release` leaves its context current; that a verb cannot make it so again is nobody's fault."""
    succeed("""
        import moderngl, torch, gpu_lod as lod
        from gpu_lod.bridge import egl

        for call in (lod.Context, lambda: lod.mipmap(torch.rand(3, 8, 8), backend="gl")):
            moderngl.create_context(standalone=True, backend="egl", require=430).release()
            assert egl.current().exists
            call()  # newer Mesa makes it current again
        alive = moderngl.create_context(standalone=True, backend="egl", require=430)
        lod.mipmap(torch.rand(3, 8, 8), backend="gl")
        assert egl.current().exists
    """)


def test_results_outlive_the_context_that_was_adopted() -> None:
    """On a software renderer they are memory of the process's own, which is freed with the last alias."""
    succeed("""
        import gc
        from pathlib import Path
        import moderngl, numpy as np, torch, gpu_lod as lod

        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

        def made():
            image, before = torch.rand(1, 3, 1000, 1500), resident()
            mine = moderngl.create_context(standalone=True, backend="egl", require=430)
            adopted = lod.Context.adopt(mine)
            with adopted:
                chain = lod.mipmap(image, backend="gl")
                held = adopted.empty(3, 700, 800).fill_(7)
                expected = [level.clone() for level in chain]
                assert adopted.owns(chain[1])
                inside = lod.mipmap(held, backend="gl")
                assert all(torch.allclose(level, torch.tensor(7.0)) for level in inside)
            adopted.close()
            mine.release()
            lod.mipmap(torch.rand(1, 8, 8), backend="gl")  # it was current until now
            return image, chain, held, expected

        made()
        gc.collect()
        lod.Context()
        before = resident()
        image, chain, held, expected = made()
        junk = [np.full(n, 255, np.uint8) for n in range(100_000, 20_000_000, 1_000_000)]  # where freed memory was
        assert all(map(torch.equal, chain, expected)) and bool((held == 7).all())
        held.mul_(2)
        assert bool((held == 14).all())
        again = lod.mipmap(held, backend="gl")  # of an ordinary tensor by now
        assert all(torch.allclose(level, torch.tensor(14.0)) for level in again)
        del junk, image, chain, held, expected, again
        for _ in range(8):
            made()
        gc.collect()
        lod.Context().trim()
        lod.Context().close()
        assert resident() - before < 60, resident() - before
    """)


def test_what_lingers_is_not_deleted_in_another_context_of_the_same_handle() -> None:
    succeed("""
        import gc
        import moderngl, torch, gpu_lod as lod
        from gpu_lod import context
        from gpu_lod.bridge import egl

        first = moderngl.create_context(standalone=True, backend="egl", require=430)
        adopted = lod.Context.adopt(first)
        with adopted:
            results = [adopted.empty(64) for _ in range(8)]
        adopted.close()
        assert context._lingering == [adopted]
        first.release()
        second = moderngl.create_context(standalone=True, backend="egl", require=430)
        with second:
            adopted._own = egl.current()  # as if it had the handle of the first
            buffers = [second.buffer(bytes([i]) * 64) for i in range(20)]
            del results
            gc.collect()
            lod.Context.adopt(second).close()
            assert context._lingering == []
            assert all(buffer.read() == bytes([i]) * 64 for i, buffer in enumerate(buffers))
    """)


def test_a_pyramid_keeps_nothing_of_contexts_that_are_closed() -> None:
    succeed("""
        import torch, gpu_lod as lod

        pyramid = lod.mipmap(torch.rand(3, 32, 32), backend="torch")
        expected = lod.log_polar(pyramid, (0.5, 0.5), 4, 4, backend="torch")
        for _ in range(3):
            found = lod.log_polar(pyramid.upload(), (0.5, 0.5), 4, 4, backend="gl")
            assert torch.allclose(found, expected, atol=1e-2)
            assert len(pyramid._cache) == 1
            lod.Context().close()
    """)


def test_closing_is_a_way_back_from_a_thread_that_died_with_the_context() -> None:
    succeed("""
        import threading
        import torch, gpu_lod as lod
        from gpu_lod.bridge import egl
        from gpu_lod.errors import GLUnavailableError

        ctx, image = lod.Context(), torch.rand(3, 16, 16)
        lod.mipmap(image, backend="gl")
        thread = threading.Thread(target=lambda: egl.switch(egl.current(), ctx._own))
        thread.start()
        thread.join()
        try:
            lod.mipmap(image, backend="gl")
        except GLUnavailableError as error:
            assert "make a new one" in str(error)
        else:
            raise SystemExit("the thread gave the context back")
        ctx.close()
        assert ctx.closed and lod.Context() is not ctx
        assert torch.allclose(lod.mipmap(image, backend="gl")[2], lod.mipmap(image, backend="torch")[2], atol=1e-5)
    """)


def test_a_pyramid_alive_at_interpreter_exit() -> None:
    out = succeed("""
        import torch, gpu_lod as lod
        pyramid = lod.mipmap(torch.rand(3, 64, 64), generator="driver").upload()
        cycle = [pyramid, lod.log_polar(pyramid, (.5, .5), 8, 8, generator="compute")]
        cycle.append(cycle)
        print("done")
    """)
    assert out == "done\n"


def test_finalizers_at_interpreter_exit_are_refused_by_name() -> None:
    """Torch may abort the process there; atexit is in time."""
    out = succeed("""
        import atexit, torch, gpu_lod as lod
        image = torch.rand(3, 32, 32)
        class Late:
            def __init__(self, context):
                self.calls = [self.mipmap(), lod.Context, *([context.trim, context.__enter__] if context else [])]
                self.close, self.error = getattr(context, "close", int), lod.GpuLodError
            def mipmap(self):
                verb, image = lod.mipmap, torch.rand(3, 32, 32)
                return lambda: verb(image, backend="gl")
            def __del__(self):
                for call in self.calls:
                    try:
                        call()
                    except self.error as error:
                        assert "atexit" in str(error)
                        print("refused")
                self.close()
        late = Late(None)
        atexit.register(lambda: print(len(lod.mipmap(image, backend="gl"))))
        later = Late(lod.Context())
    """)
    assert out.split() == ["6", *["refused"] * 6]


def test_fork() -> None:
    """In a child every use is a named error, tensors stay readable, auto falls back to torch, and exit is clean."""
    out = succeed("""
        import os, sys, torch, gpu_lod as lod
        from gpu_lod.errors import ForkedContextError
        torch.set_num_threads(1)
        ctx = lod.Context()
        image = torch.rand(3, 32, 32)
        pyramid = lod.mipmap(image, generator="compute").upload()
        total = float(pyramid[1].sum())
        child = os.fork()
        if child == 0:
            for use in (lambda: lod.mipmap(image, generator="compute"), lambda: ctx.empty(3), lod.Context,
                        lambda: lod.log_polar(pyramid, (.5, .5), 64, 256, backend="gl")):
                try:
                    use()
                except ForkedContextError as error:
                    assert "spawn" in str(error)
                else:
                    os._exit(3)
            assert float(pyramid[1].sum()) == total
            assert lod.log_polar(pyramid, (.5, .5), 64, 512).shape == (3, 64, 512)
            ctx.close()
            del pyramid
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert float(lod.mipmap(image, generator="compute")[1].sum()) == total
        print("done")
    """)
    assert out == "done\n"


def test_first_use_after_a_fork_works() -> None:
    succeed("""
        import os, torch, gpu_lod as lod
        torch.set_num_threads(1)
        child = os.fork()
        if child == 0:
            os._exit(0 if len(lod.mipmap(torch.rand(1, 8, 8), generator="compute")) == 4 else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)


def test_no_egl_says_what_to_install() -> None:
    succeed(
        """
        import pytest, torch, gpu_lod as lod
        from gpu_lod.errors import GLUnavailableError
        image = torch.rand(3, 16, 16)
        with pytest.raises(GLUnavailableError, match="apt-get install libegl1 libgl1-mesa-dri"):
            lod.mipmap(image, backend="gl")
        pyramid = lod.mipmap(image)   # auto works without OpenGL
        assert lod.log_polar(pyramid, (.5, .5), 256, 256).shape == (3, 256, 256)
        with pytest.raises(GLUnavailableError):
            pyramid.upload()
        """,
        GPU_LOD_LIBEGL="libEGL-is-not-here.so.1",
    )


def test_a_library_that_is_no_egl() -> None:
    succeed(
        """
        import pytest, torch, gpu_lod as lod
        from gpu_lod.errors import GLUnavailableError
        image = torch.rand(3, 16, 16)
        with pytest.raises(GLUnavailableError, match="libc.so.6 is no EGL library. Unset GPU_LOD_LIBEGL, or"):
            lod.mipmap(image, backend="gl")
        lod.mipmap(image)  # auto works without OpenGL
        """,
        GPU_LOD_LIBEGL="libc.so.6",
    )


def test_old_opengl_says_so() -> None:
    out = run("import gpu_lod as lod; lod.Context()", MESA_GL_VERSION_OVERRIDE="4.2")
    assert "GLUnavailableError" in out.stderr
    assert "OpenGL 4.3" in out.stderr
    assert "Unset MESA_GL_VERSION_OVERRIDE, or: On Debian" in out.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent.json"), ("GALLIUM_DRIVER", "softpipe")]
)
def test_a_variable_that_keeps_opengl_away_is_named(name: str, value: str) -> None:
    out = run("import gpu_lod as lod; lod.Context()", **{name: value})
    assert f"Unset {name}, or: On Debian" in out.stderr


def snapshot(gl: G.GL) -> dict[str, object]:
    """GL state that a program of its own may rely on; read independently of gpu_lod's list of what to save."""
    scalars = {
        name: gl.integer(getattr(G, name))
        for name in (
            "CURRENT_PROGRAM", "VERTEX_ARRAY_BINDING", "DRAW_FRAMEBUFFER_BINDING", "READ_FRAMEBUFFER_BINDING",
            "COPY_READ_BUFFER_BINDING", "COPY_WRITE_BUFFER_BINDING", "DISPATCH_INDIRECT_BUFFER_BINDING",
            "SHADER_STORAGE_BUFFER_BINDING", "ACTIVE_TEXTURE", "BLEND_SRC_RGB", "BLEND_DST_RGB", "BLEND_SRC_ALPHA",
            "BLEND_DST_ALPHA", "PRIMITIVE_RESTART_INDEX",
        )
    }  # fmt: skip
    scalars["array buffer"] = gl.integer(0x8894)
    scalars["pixel pack"] = gl.integer(0x88ED)
    scalars["pixel unpack"] = gl.integer(0x88EF)
    scalars["uniform buffer"] = gl.integer(0x8A28)
    lists = {
        "viewports": [gl.floats(G.VIEWPORT, index, 4) for index in range(16)],
        "masks": [gl.flags(G.COLOR_WRITEMASK, index, 4) for index in range(8)],
        "by index": [[gl.IsEnabledi(name, index) for index in range(8)] for name in (G.BLEND, G.SCISSOR_TEST)],
        "polygon": gl.integers(G.POLYGON_MODE, 2)[0],
        "scissor": gl.integers(0x0C10, 4),
        "enabled": [
            gl.IsEnabled(getattr(G, name))
            for name in (
                "BLEND", "DEPTH_TEST", "CULL_FACE", "SCISSOR_TEST", "STENCIL_TEST", "RASTERIZER_DISCARD",
                "FRAMEBUFFER_SRGB", "COLOR_LOGIC_OP", "PRIMITIVE_RESTART", "TEXTURE_CUBE_MAP_SEAMLESS",
                "SAMPLE_ALPHA_TO_COVERAGE", "SAMPLE_COVERAGE", "SAMPLE_MASK",
            )
        ],
        "storage": [
            [
                gl.indexed(name, index)
                for name in (
                    G.SHADER_STORAGE_BUFFER_BINDING,
                    G.SHADER_STORAGE_BUFFER_START,
                    G.SHADER_STORAGE_BUFFER_SIZE,
                )
            ]
            for index in range(8)
        ],
        "images": [[gl.indexed(name, unit) for name in range(0x8F3A, 0x8F3F)] for unit in range(8)],
    }  # fmt: skip
    units = []
    for unit in range(16):
        gl.ActiveTexture(G.TEXTURE0 + unit)
        names = (G.TEXTURE_BINDING_2D_ARRAY, G.TEXTURE_BINDING_BUFFER, 0x8069, G.SAMPLER_BINDING)
        units.append(tuple(map(gl.integer, names)))
    gl.ActiveTexture(scalars["ACTIVE_TEXTURE"])
    return {**scalars, **lists, "units": units}


def use_every_verb() -> None:
    image = noise(2, 3, 33, 48)
    for generator in ("compute", "fragment", "driver"):
        pyramid = lod.mipmap(image, generator=generator)
        for sampler in ("compute", "fragment"):
            lod.log_polar(pyramid, (0.5, 0.5), 8, 8, generator=sampler)
    lod.feature_maps(image, backend="gl")
    for generator in ("compute", "fragment", "sampler"):
        hz = lod.hiz(image, generator=generator)
        lod.cull(hz, 0.9, backend="gl")
        lod.region_max(hz, torch.tensor([[0.1, 0.2, 0.5, 0.6]]), backend="gl")


def test_adopted_moderngl_context_keeps_its_state() -> None:
    mine = moderngl.create_context(standalone=True, backend="egl", require=430)
    with mine:
        program = mine.program(
            vertex_shader="#version 430\nvoid main() { gl_Position = vec4(0.0, 0.0, 0.0, 1.0); }",
            fragment_shader="#version 430\nout vec4 f; void main() { f = vec4(1.0); }",
        )
        gl = G.GL(egl.loader_of_current().load_opengl_function)
        framebuffer = mine.simple_framebuffer((20, 10))
        framebuffer.use()
        framebuffer.viewport = (1, 2, 3, 4)
        texture = mine.texture_array((4, 4, 2), 4)
        texture.use(0)
        mine.sampler(texture=texture).use(0)
        for unit in (0, 1, 2, 5, 7):
            gl.ActiveTexture(G.TEXTURE0 + unit)
            gl.BindTexture(G.TEXTURE_BUFFER, gl.gen("Textures"))
        texture.bind_to_image(0)
        storage = [mine.buffer(reserve=1024) for _ in range(6)]
        for index, buffer in enumerate(storage):
            buffer.bind_to_storage_buffer(index, offset=256 if index % 2 else 0, size=512)
        gl.UseProgram(program.glo)
        gl.BindVertexArray(mine.vertex_array(program, []).glo)
        mine.enable_only(moderngl.BLEND | moderngl.DEPTH_TEST | moderngl.CULL_FACE | moderngl.RASTERIZER_DISCARD)
        framebuffer.color_mask = (True, False, True, False)
        gl.ColorMaski(2, 0, 1, 1, 0)
        gl.Disablei(G.BLEND, 1)
        gl.Enablei(G.SCISSOR_TEST, 3)
        gl.ViewportIndexedf(0, 0.5, 2, 10.25, 4)
        gl.ViewportIndexedf(5, 3, 2, 1, 4)
        framebuffer.scissor = (0, 0, 1, 1)
        mine.wireframe = True
        gl.ActiveTexture(G.TEXTURE0 + 3)
        for target in (G.COPY_READ_BUFFER, G.COPY_WRITE_BUFFER, G.DISPATCH_INDIRECT_BUFFER):
            gl.BindBuffer(target, storage[0].glo)
        before = snapshot(gl)
        assert before["units"][0][0] and before["units"][0][1] and before["units"][7][1]
        adopted = lod.Context.adopt(mine)
        assert snapshot(gl) == before
        with adopted:
            use_every_verb()
            result = lod.mipmap(noise(3, 16, 16), generator="fragment")
            assert adopted.owns(result[1])
        assert snapshot(gl) == before
        with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(ContextNotCurrentError, match="adopted"):
            pool.submit(adopted.empty, 3).result(timeout=30)
        adopted.close()
        assert snapshot(gl) == before
        with pytest.raises(ContextClosedError):
            adopted.empty(3)
        assert storage[0].read(4) == b"\0\0\0\0"
    with pytest.raises(ContextNotCurrentError, match="make it current first"):
        egl.release_current()
        lod.Context.adopt()
    mine.release()


@pytest.mark.parametrize("paused", [True, False])
def test_transform_feedback_goes_on(paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under it no other program may be used: it is paused, and else a call that fails leaves the next one right."""
    mine = moderngl.create_context(standalone=True, backend="egl", require=430)
    image = noise(1, 40, 61)
    expected = lod.gaussian(image, 2, backend="torch")[1]
    with mine:
        source = "#version 430\nuniform ivec2 u_size; out float v; void main() { v = u_size.x; gl_Position = vec4(v); }"
        program = mine.program(vertex_shader=source, varyings=["v"])
        program["u_size"].value = 7, 8
        points, captured = mine.vertex_array(program, []), mine.buffer(reserve=64)
        mine.simple_framebuffer((4, 4)).use()
        adopted = lod.Context.adopt(mine)
        load = egl.loader_of_current().load_opengl_function
        begin = ctypes.CFUNCTYPE(None, ctypes.c_uint)(load("glBeginTransformFeedback"))
        end = ctypes.CFUNCTYPE(None)(load("glEndTransformFeedback"))
        gl = adopted.gl
        with adopted:
            lod.gaussian(image, 4, backend="gl")
            gl.UseProgram(program.glo)
            gl.BindVertexArray(points.glo)
            gl.BindBufferBase(0x8C8E, 0, captured.glo)
            begin(0)
            if paused:
                torch.testing.assert_close(lod.gaussian(image, 2, backend="gl")[1], expected, rtol=0, atol=1e-6)
                gl.DrawArraysInstanced(0, 0, 3, 1)
                end()
                assert program["u_size"].value == (7, 8)
                assert np.frombuffer(captured.read(12), np.float32).tolist() == [7, 7, 7]
            else:
                monkeypatch.setattr(gl, "PauseTransformFeedback", lambda: None)
                with pytest.raises(GLError, match="INVALID_OPERATION"):
                    lod.gaussian(image, 2, backend="gl")
                end()
                gl.clear_errors()
            torch.testing.assert_close(lod.gaussian(image, 2, backend="gl")[1], expected, rtol=0, atol=1e-6)
        adopted.close()
    mine.release()


def test_colours_are_not_dithered(ctx: lod.Context) -> None:
    with ctx.active():
        assert not ctx.gl.IsEnabled(G.DITHER)


def test_what_is_no_context_is_not_adopted() -> None:
    for source in (3, "cuda:0", lod.Context()):
        with pytest.raises(InputError, match="expected a moderngl context, or None"):
            lod.Context.adopt(source)  # type: ignore[arg-type]


WINDOW = """
    import ctypes, glfw, torch, gpu_lod as lod
    from gpu_lod.bridge import egl, gl as G
    assert glfw.init()
    glfw.window_hint(glfw.VISIBLE, False)
    glfw.window_hint(glfw.CONTEXT_VERSION_MAJOR, 4)
    glfw.window_hint(glfw.CONTEXT_VERSION_MINOR, 5)
    glfw.window_hint(glfw.OPENGL_PROFILE, glfw.OPENGL_CORE_PROFILE)
    window = glfw.create_window(64, 64, "gpu_lod", None, None)
    glfw.make_context_current(window)
    here = egl.current()
    assert here.glx is not None, "expected a GLX window"
    image = torch.rand(3, 33, 48)
    # A context of our own beside the window's: EGL steps in for GLX and back.
    own = lod.mipmap(image, generator="compute")
    assert egl.current() == here
    gl = G.GL(egl.loader_of_current().load_opengl_function)
    state = lambda: [gl.integer(getattr(G, n)) for n in dir(G) if n.endswith("_BINDING") and "IMAGE" not in n] + [
        gl.integer(G.CURRENT_PROGRAM), gl.integer(G.BLEND_SRC_RGB), gl.integer(G.BLEND_DST_RGB),
        gl.IsEnabled(G.PRIMITIVE_RESTART), gl.IsEnabled(G.TEXTURE_CUBE_MAP_SEAMLESS),
        gl.integer(G.PRIMITIVE_RESTART_INDEX), gl.integer(G.ACTIVE_TEXTURE), *gl.integers(G.VIEWPORT, 4)]
    before = state()
    adopted = lod.Context.adopt()
    assert state() == before
    with adopted:
        for generator in ("compute", "fragment"):
            pyramid = lod.mipmap(image, generator=generator)
            assert adopted.owns(pyramid[1])
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(pyramid, own))
        lod.log_polar(pyramid, (.5, .5), 8, 8, generator="fragment")
        lod.cull(lod.hiz(image, generator="sampler"), .5, backend="gl")
    assert state() == before
    assert egl.current() == here
    glfw.swap_buffers(window)
    adopted.close()
    # A compatibility profile has more that changes fragments, and levels of detail.
    glfw.default_window_hints()
    glfw.window_hint(glfw.VISIBLE, False)
    old = glfw.create_window(64, 64, "gpu_lod", None, None)
    glfw.make_context_current(old)
    gl = G.GL(egl.loader_of_current().load_opengl_function)
    assert gl.integer(G.CONTEXT_PROFILE_MASK) == G.CONTEXT_COMPATIBILITY_PROFILE_BIT
    load = egl.loader_of_current().load_opengl_function
    u, f = ctypes.c_uint, ctypes.c_float
    ctypes.CFUNCTYPE(None, u, f)(load("glAlphaFunc"))(0x0200, 0.5)  # never
    new_list, end_list = ctypes.CFUNCTYPE(None, u, u)(load("glNewList")), ctypes.CFUNCTYPE(None)(load("glEndList"))
    gl.Enable(G.ALPHA_TEST)
    gl.Enable(G.POLYGON_STIPPLE)
    gl.ClampColor(G.CLAMP_FRAGMENT_COLOR, 1)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(load("glPolygonStipple"))(bytes(128))
    gl.ActiveTexture(G.TEXTURE0)
    gl.TexEnvf(G.TEXTURE_FILTER_CONTROL, G.TEXTURE_LOD_BIAS, 1.5)
    with lod.Context.adopt() as adopted:
        for verb, generator in ((lod.mipmap, "fragment"), (lod.hiz, "fragment"), (lod.hiz, "sampler")):
            for a, b in zip(verb(3 * image, generator=generator), verb(3 * image, backend="torch")):
                assert torch.allclose(a, b, atol=3e-6), (verb, generator)
        new_list(1, 0x1300)
        try:
            lod.mipmap(image, backend="gl")
        except lod.errors.UnsupportedError as error:
            assert "display list" in str(error)
        else:
            raise SystemExit("a verb went into a display list")
        end_list()
        assert gl.IsEnabled(G.ALPHA_TEST) and gl.IsEnabled(G.POLYGON_STIPPLE) and gl.IsEnabled(G.DITHER)
        assert gl.integer(G.CLAMP_FRAGMENT_COLOR) == 1
        with adopted.active():
            assert not gl.IsEnabled(G.DITHER)
        gl.GetTexEnvfv(G.TEXTURE_FILTER_CONTROL, G.TEXTURE_LOD_BIAS, ctypes.byref(bias := f()))
        assert bias.value == 1.5 and gl.GetError() == 0
    adopted.close()
    glfw.terminate()
    print("done")
"""


def test_a_glfw_window_is_adopted_and_left_as_it_was() -> None:
    xvfb = shutil.which("Xvfb")
    if xvfb is None:
        pytest.skip("Xvfb is not installed, so there is no screen for a window")
    read, write = os.pipe()
    server = subprocess.Popen(
        [xvfb, "-displayfd", str(write), "-screen", "0", "320x240x24"], pass_fds=[write], stderr=subprocess.DEVNULL
    )
    try:
        os.close(write)
        display = os.read(read, 32).decode().strip()
        assert succeed(WINDOW, DISPLAY=f":{display}") == "done\n"
    finally:
        os.close(read)
        server.terminate()
        server.wait(timeout=20)


def test_contexts_may_be_nested_and_displaced() -> None:
    """A tensor's own context is made current even inside another's block, or when the program switched in between."""
    succeed("""
        import moderngl, torch, gpu_lod as lod
        from gpu_lod.bridge import egl
        mine = moderngl.create_context(standalone=True, backend="egl", require=430)
        image = torch.rand(3, 20, 30)
        with mine:
            adopted = lod.Context.adopt(mine)
            with adopted:
                held = adopted.empty(3, 20, 30)
                held.copy_(image)
                expected = lod.mipmap(held, generator="compute")
                assert adopted.owns(expected[1])
                with lod.Context() as own:
                    inner = lod.mipmap(image, generator="compute")
                    assert own.owns(inner[1]) and not adopted.owns(inner[1])
                    try:
                        lod.mipmap(held, generator="compute")   # adopted, and no longer current
                    except lod.GpuLodError as error:
                        assert "adopted" in str(error)
                    else:
                        raise AssertionError
                assert egl.current().same_context(adopted._own)
                assert torch.equal(lod.mipmap(held, generator="compute")[1], expected[1])
        with lod.Context() as own:
            with mine:
                there = egl.current()
                seen, finish = [], own.bridge.end
                own.bridge.end = lambda: (seen.append(egl.current().same_context(own._own)), finish())
                again = lod.mipmap(image, generator="compute")
                assert egl.current() == there
                assert own.owns(again[1]) and torch.equal(again[1], inner[1])
                assert seen == [True]
    """)


def test_pyramids_are_sampled_in_any_context() -> None:
    """Whichever they are a texture of: where that one cannot be used, another texture is made."""
    succeed("""
        import moderngl, torch, gpu_lod as lod
        image, at, sites = torch.rand(3, 20, 30), (0.4, 0.6), torch.tensor([[0.5, 0.4, 0.7]])
        def samples(pyramid):
            return (
                lod.foveate(pyramid, at, backend="gl"), lod.log_polar(pyramid, at, 8, 9, backend="gl"),
                lod.gather_patches(pyramid, sites, 4, backend="gl"),
            )
        expected = samples(lod.mipmap(image))
        def same(pyramid):
            assert all(map(torch.equal, samples(pyramid), expected))
        mine = moderngl.create_context(standalone=True, backend="egl", require=430)
        own = lod.Context()
        with mine:
            adopted = lod.Context.adopt(mine)
            theirs = lod.mipmap(image).upload(adopted)
            with adopted:
                same(theirs)
                ours = lod.mipmap(image).upload(own)
                same(ours)           # a texture of the default context, and another one is pinned
                assert ours.texture_context() is not None
        same(theirs)                 # its context is not current any more
        own.close()
        same(ours)                   # nor open
        same(theirs)
    """)


def test_pyramids_are_bounded_culled_and_collapsed_in_any_context() -> None:
    """Whichever they are a texture of, a closed one too; memory of a context that is not current says so."""
    succeed("""
        import moderngl, torch, gpu_lod as lod
        relevance, boxes = torch.rand(2, 20, 30), torch.tensor([[0.1, 0.2, 0.5, 0.4], [0.0, 0.0, 1.0, 1.0]])
        def bounds(high, low, bands):
            culled = lod.cull(high, 0.7, backend="gl")
            return [
                value.clone() for value in (
                    lod.region_max(high, boxes, backend="gl"), lod.region_min(low, boxes, backend="gl"),
                    culled.mask, culled.indices, culled.pruned, lod.collapse(bands, backend="gl"),
                )
            ]
        def pyramids(context=None, backend="torch"):
            made = lod.hiz(relevance, backend=backend), lod.hiz(relevance, "min", backend=backend)
            if context is not None:
                made = [pyramid.upload(context) for pyramid in made]
            return *made, lod.laplacian(relevance, 3, backend=backend)
        expected = bounds(*pyramids())
        assert torch.allclose(expected[-1], relevance, atol=1e-5)
        def same(found):
            for one, two in zip(bounds(*found), expected):
                assert torch.allclose(one.double(), two.double(), atol=1e-5)
        mine = moderngl.create_context(standalone=True, backend="egl", require=430)
        own = lod.Context()
        ours, held = pyramids(own), pyramids(own, "gl")
        with mine:
            adopted = lod.Context.adopt(mine)
            with adopted:
                theirs, in_its_memory = pyramids(adopted), pyramids(adopted, "gl")
                for found in (theirs, in_its_memory, ours):
                    same(found)
        same(theirs)  # its context is not current any more
        high, low, bands = in_its_memory  # and neither can what lies in its memory be read by shaders
        for call in (
            lambda: lod.region_max(high, boxes, backend="gl"), lambda: lod.region_min(low, boxes, backend="gl"),
            lambda: lod.cull(high, 0.7, backend="gl"), lambda: lod.collapse(bands, backend="gl"),
        ):
            try:
                call()
            except lod.errors.ContextNotCurrentError as error:
                assert "not current" in str(error)
            else:
                raise AssertionError("used where it is not current")
        same(held)
        own.close()
        same(ours)    # nor open
        same(theirs)
    """)


def test_an_interrupt_while_compiling_waits() -> None:
    """moderngl's C code does not survive an exception from a signal handler, so the verb ends first."""
    out = succeed("""
        import os, signal, sys, threading, torch, _moderngl, gpu_lod as lod
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
        sent = []
        def trace(frame, event, argument):
            if event == "call" and frame.f_code.co_filename == _moderngl.__file__ and not sent:
                sent.append(1)
                os.kill(os.getpid(), signal.SIGINT)
            return trace
        image = torch.rand(1, 37, 21)
        lod.Context()
        sys.settrace(trace)
        try:
            lod.mipmap(image, backend="gl")
        except KeyboardInterrupt:
            print("interrupted")
        sys.settrace(None)
        results = []
        thread = threading.Thread(target=lambda: results.append(lod.mipmap(image, backend="gl")))
        thread.start(); thread.join(20)
        print(len(results), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """)
    assert out.split() == ["interrupted", "1", "True"]


LARGE: list[tuple[Callable[[torch.Tensor], torch.Tensor], int, float]] = [
    (lambda image: lod.foveate(image, fixation=(0.5, 0.5), backend="gl"), 2048, 2.0),
    (lambda image: lod.feature_maps(image, fixation=(0.5, 0.5), backend="gl"), 1024, 0.0),
    (lambda image: lod.log_polar(image, (0.5, 0.5), 64, 64, backend="gl"), 2048, 0.3),
    (lambda image: lod.mipmap(image, generator="fragment")[1], 2048, 1.3),  # drawn
    (lambda image: lod.mipmap(image, generator="driver")[1], 2048, 1.3),
]
"""Verbs, sides of their pictures, and how much more than the result they take at least, in pictures."""


@pytest.mark.parametrize(("verb", "side", "more"), LARGE, ids=["foveate", "features", "map", "drawn", "driver"])
def test_trim_gives_memory_back(
    ctx: lod.Context, verb: Callable[[torch.Tensor], torch.Tensor], side: int, more: float
) -> None:
    """Also what the last dispatches and draws were bound to, and what they saw as textures."""
    if not ctx.software or not Path("/proc/self/statm").exists():
        pytest.skip("a GPU's memory, or none that /proc tells of")
    image = torch.rand(1, 3, side, side)
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # glibc's

    def resident() -> int:
        gc.collect()
        malloc_trim(0)  # what is free already, and stays in the heap or not by what was freed before it
        return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])

    verb(image)  # compiled shaders stay
    ctx.trim()
    before = resident()
    result = verb(image)
    taken = resident() - before
    assert taken > 0.95 * result.nbytes + more * image.nbytes  # chains and texels; small things may fit the heap
    del result
    ctx.trim()
    assert resident() - before < 0.05 * taken
