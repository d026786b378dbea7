"""Verbs where other people's threads and processes call them."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import pytest
import torch
from scripts import HERE, succeed

import gpu_lod as lod

LOADER = """
    import torch, gpu_lod as lod
    from workers import Levels
    from torch.utils.data import DataLoader
    if {opened}:
        lod.mipmap(torch.rand(1, 8, 8), backend="gl")
    loader = DataLoader(Levels("cpu"), num_workers=2, multiprocessing_context="{way}")
    try:
        print(sorted(float(value) for value in loader))
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("way", "opened"), [("fork", False), ("spawn", False), ("spawn", True)])
def test_data_loader_workers(way: str, opened: bool) -> None:
    out = succeed(LOADER.format(way=way, opened=opened), PYTHONPATH=HERE)
    assert out.strip() == "[0.0, 1.0, 2.0, 3.0]"


def test_forked_workers_of_a_parent_that_opened_opengl_say_what_to_do() -> None:
    out = succeed(LOADER.format(way="fork", opened=True), PYTHONPATH=HERE)
    assert "ForkedContextError" in out and "spawn" in out


def test_gradients_do_not_leave_a_worker() -> None:
    """torch says so there alone, and its loader waits for ever."""
    out = succeed("""
        import torch, gpu_lod as lod
        from torch.utils.data import DataLoader

        class Sets(torch.utils.data.Dataset):
            allocator = lod.allocate.VortexLearned(4, patch=8)
            grad = True
            def __len__(self): return 2
            def __getitem__(self, index):
                with torch.set_grad_enabled(self.grad):
                    return self.allocator(relevance=torch.rand(6, 6))

        sets, how = Sets(), dict(batch_size=2, collate_fn=lod.TokenSet.stack)
        assert next(iter(DataLoader(sets, **how))).scores.requires_grad
        for sets.grad in (True, False):
            try:
                print(next(iter(DataLoader(sets, num_workers=1, timeout=60, **how))).scores.shape)
            except Exception as error:
                print(str(error).splitlines()[-1])
    """)
    first, second = out.splitlines()
    assert "scores have gradients" in first and "no_grad" in first and second == "torch.Size([2, 4])"


FORKS = """
    import os, signal, threading, time, torch, gpu_lod as lod
    from gpu_lod import cached, calibration, recording
    torch.set_num_threads(1)

    def left_by(child, told=0):
        end = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, told)
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                raise SystemExit("the child hangs")
            time.sleep(0.01)
"""


@pytest.mark.parametrize("lock", ["calibration._lock", "cached._constants._lock", "recording._reads_lock"])
def test_a_fork_while_another_thread_works_locks_nothing_in_the_child(lock: str) -> None:
    """Where torch may be used, and OpenGL be opened for the first time."""
    succeed(
        FORKS
        + f"""
    held, done = threading.Event(), threading.Event()

    def hold():
        with {lock}:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        image = torch.rand(3, 56, 56)
        lod.foveate(image, (0.4, 0.6))
        lod.allocate.FoveatedPyramid(16)(image)
        lod.plan(lambda image: lod.mipmap(image, backend="gl")[1], image)
        os._exit(0)
    try:
        left_by(child)
    finally:
        done.set()
    """
    )


def test_a_child_hears_signals_though_its_parent_was_in_a_verb() -> None:
    """The main thread's, where another one forks: nobody leaves that verb in the child."""
    succeed(
        FORKS
        + """
    def fork():
        ready, say = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(say, b"x")  # Python drops signals that come before
            while True:
                time.sleep(0.01)
        os.read(ready, 1)
        left_by(child, signal.SIGTERM)  # again and again: Python 3.14 misses one between two calls of the system

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    results = []
    with lod.Context().active():
        thread = threading.Thread(target=lambda: results.append(fork()))
        thread.start()
        thread.join()
    assert results == [None]
    """
    )


def test_a_thread_pool() -> None:
    def work(value: int) -> float:
        return float(lod.mipmap(torch.full((1, 16, 16), float(value)), backend="gl")[4])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(64))) == [float(value) for value in range(64)]


def test_calls_inside_backward_on_any_thread() -> None:
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * lod.mipmap(torch.full((1, 8, 8), 5.0), backend="gl")[3]

    x = torch.ones(1, 1, 1, requires_grad=True)
    thread = threading.Thread(target=lambda: Inside.apply(x).sum().backward())
    thread.start()
    thread.join()
    assert x.grad is not None and float(x.grad) == 5.0


def test_a_pyramid_is_asked_for_its_texture_while_another_thread_makes_one() -> None:
    pyramid = lod.mipmap(torch.rand(1, 8, 8), backend="gl")

    class Closed:
        def usable_here(self) -> bool:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(pyramid.upload).result()
            return False

    pyramid._cache["textures", 0, "float32", False] = (Closed(), [])
    assert pyramid.texture_context() is None  # as it began


def test_a_pyramid_that_was_sent_is_read_where_it_is_now() -> None:
    """Queues move its levels to shared memory; the buffers that they were go to whoever comes next."""
    hz = lod.hiz(torch.rand(1, 1, 64, 48), backend="gl")
    expected = lod.cull(hz, 0.6, backend="torch").mask
    assert torch.equal(lod.cull(hz, 0.6, backend="gl").mask, expected)
    for level in hz:
        level.share_memory_()
    others = [lod.hiz(torch.zeros(1, 1, 64, 48), backend="gl") for _ in range(4)]
    assert torch.equal(lod.cull(hz, 0.6, backend="gl").mask, expected) and len(others) == 4
