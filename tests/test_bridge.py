"""The host bridge: one memory, two owners, and its life cycle."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import pickle
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import noise

import gpu_lod as lod
from gpu_lod.bridge import HostBridge, Lease, Pool, Returns, egl
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.pool import size_class
from gpu_lod.errors import GLError, InputError, OutOfMemoryError, UnsupportedError


class Item:
    def __init__(self, key: int, deleted: list[int]) -> None:
        self.key = self.nbytes = key
        self._deleted = deleted

    def delete(self) -> None:
        self._deleted.append(self.key)


def test_pool_reuses_and_evicts_least_recently_used() -> None:
    deleted: list[int] = []
    pool: Pool[Item] = Pool(max_idle_bytes=100)

    def lease(key: int) -> Lease[Item]:
        return Lease(pool.take(key, lambda: Item(key, deleted)), pool.returned)

    first = lease(40)
    item = first.item
    del first
    assert pool.leased == 1  # only queued: finalizers do nothing else
    pool.drain()
    assert (pool.leased, pool.idle) == (0, 1)
    again = lease(40)
    assert again.item is item
    others = [lease(30), lease(50)]
    del again, others
    pool.drain()
    assert deleted == [40]
    pool.trim()
    assert sorted(deleted) == [30, 40, 50]
    assert pool.idle_bytes == 0


def test_a_class_that_is_used_is_not_the_least_recently_used() -> None:
    """Though an item of it lies idle from before."""
    deleted: list[int] = []
    pool: Pool[Item] = Pool(max_idle_bytes=120)

    def use(*keys: int) -> None:
        leases = [Lease(pool.take(key, lambda key=key: Item(key, deleted)), pool.returned) for key in keys]
        del leases
        pool.drain()

    use(30, 30)
    use(40)
    use(30)
    use(25)
    assert deleted == [40]


def test_lease_finalizer_is_safe_in_any_thread() -> None:
    returned: Returns[Item] = Returns()
    leases = [Lease(Item(1, []), returned) for _ in range(200)]
    threads = [threading.Thread(target=leases.pop) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(returned) == len(returned.take()) == 200
    assert not returned._ways  # what came back is kept no longer


def test_lease_in_a_garbage_cycle_gives_its_item_back() -> None:
    returned: Returns[Item] = Returns()
    cycle: list[object] = [Lease(Item(3, []), returned)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert [item.key for item in returned.take()] == [3]


def test_no_signal_is_swallowed_and_no_item_lost_where_a_lease_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals come while nothing happens but that leases die."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    swallowed: list[object] = []
    cut: list[int] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(20):
            returned: Returns[Item] = Returns()
            leases = [Lease(Item(1, []), returned) for _ in range(20_000)]
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                for _ in range(len(leases)):  # of a `while` Python 3.13 leaves the last jump out of the `with`
                    del leases[-1]
                time.sleep(5)  # a signal that comes late ends it
            assert not swallowed
            cut.append(len(leases))
            leases.clear()
            assert len(returned.take()) == 20_000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert any(0 < left < 20_000 for left in cut), "signals came while leases died"


def test_size_classes_waste_little() -> None:
    for nbytes in (1, 4096, 4097, 5000, 10**6, 2**20, 2**20 + 1, 3 * 2**28 + 5):
        size = size_class(nbytes)
        assert nbytes <= size <= max(4096, nbytes * 1.25)
        assert size % 1024 == 0
    assert size_class(2**20) == 2**20


def test_tensor_memory_is_the_mapping(ctx: lod.Context) -> None:
    """No copy in either direction: the tensor's address is the mapped one, and a shader sees what torch writes."""
    with ctx.active():
        lease = ctx.bridge.lease(4000)
        tensor = lease.tensor(torch.float32, (10, 100))
        assert tensor.data_ptr() == lease.address
    image = ctx.empty(1, 16, 16)
    address = image.data_ptr()
    for value in (0.25, 0.75):
        image.fill_(value)
        pyramid = lod.mipmap(image, generator="compute")
        assert image.data_ptr() == address
        assert float(pyramid[4]) == value
        found = ctx.bridge.find(pyramid[1])
        assert found is not None
        assert pyramid[1].data_ptr() == found[0].address + found[1]


def test_no_copy_on_the_way_out(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs on tensors in GL memory call no copying function of torch at all, but for a few bytes of parameters. A
    texture is a copy by nature, and made before."""
    image = ctx.empty(3, 64, 64)
    image.copy_(noise(3, 64, 64))
    uploaded = lod.mipmap(image, generator="compute").upload()

    def work() -> None:
        lod.mipmap(image, generator="compute")
        lod.mipmap(image, generator="fragment")
        lod.hiz(image, generator="sampler")
        polar = lod.log_polar(uploaded, fixation, 64, 64, generator="compute")
        assert ctx.owns(polar)

    fixation = torch.tensor([0.5, 0.5])
    work()

    def copied(*_: object, **__: object) -> None:
        raise AssertionError("copied")

    def only_small(name: str) -> Callable[..., Any]:
        real = getattr(torch.Tensor, name)
        return lambda self, *a, **k: real(self, *a, **k) if self.nbytes <= 64 else copied()

    for name in ("copy_", "clone", "contiguous", "to"):
        monkeypatch.setattr(torch.Tensor, name, only_small(name))
    with pytest.raises(AssertionError, match="copied"):
        noise(3, 64, 64).clone()
    work()


@pytest.mark.parametrize("borrows", [True, False])
def test_an_ordinary_tensor_is_copied_once_at_the_most(
    ctx: lod.Context, monkeypatch: pytest.MonkeyPatch, borrows: bool
) -> None:
    if not borrows:
        monkeypatch.setattr(ctx.host, "borrow", lambda tensor: None)
    image = noise(3, 64, 64)
    lod.mipmap(image, generator="compute")
    calls = []
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *a, **k: calls.append(self.shape) or real(self, *a, **k))
    lod.mipmap(image, generator="compute")
    assert calls == ([] if borrows and ctx.host.borrows else [torch.Size([1, 3, 64, 64])])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
def test_empty(ctx: lod.Context, dtype: torch.dtype) -> None:
    for shape in ((3,), (2, 3, 5, 7)):
        tensor = ctx.empty(*shape, dtype=dtype)
        assert tensor.shape == shape == ctx.empty(shape, dtype=dtype).shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert ctx.owns(tensor)
        assert ctx.owns(tensor[1:])
        assert not ctx.owns(tensor.clone())
        tensor.fill_(1)
        assert torch.equal(tensor, torch.ones(shape, dtype=dtype))
    assert not torch.equal(ctx.empty(4).zero_(), ctx.empty(4).fill_(1))


@pytest.mark.parametrize("arguments", [(), (0,), (2, -1), (2.5,), ("a",)])
def test_empty_refuses_bad_shapes(ctx: lod.Context, arguments: tuple[object, ...]) -> None:
    with pytest.raises(InputError, match="shape"):
        ctx.empty(*arguments)
    with pytest.raises(InputError, match="dtype"):
        ctx.empty(2, dtype=torch.float64)


def test_results_live_as_long_as_their_last_alias(ctx: lod.Context) -> None:
    image = noise(3, 64, 64)
    alias: torch.Tensor | np.ndarray = lod.mipmap(image, generator="compute")[1][1:, ::2]
    expected = alias.clone()
    for _ in range(20):
        lod.mipmap(torch.rand(3, 64, 64), generator="compute")
        gc.collect()
    assert torch.equal(alias, expected)
    array = alias.numpy()  # a numpy alias of the alias
    del alias
    for _ in range(20):
        lod.mipmap(torch.rand(3, 64, 64), generator="compute")
    assert np.array_equal(array, expected.numpy())
    pointer = array.__array_interface__["data"][0]
    del array
    gc.collect()
    seen = {lod.mipmap(image, generator="compute")[1][1:].data_ptr() for _ in range(4)}
    assert pointer in seen  # the buffer came back


def test_results_pickle_and_copy_like_any_tensor() -> None:
    level = lod.mipmap(noise(3, 32, 32), generator="compute")[2]
    assert torch.equal(pickle.loads(pickle.dumps(level)), level)
    assert torch.equal(level.clone(), level)


def count_objects(ctx: lod.Context) -> tuple[int, int, int, int]:
    with ctx.active():
        pools = (ctx.bridge.pool, ctx.textures.pool)
        return tuple(number for pool in pools for number in (pool.leased, pool.idle))  # type: ignore[return-value]


def count_names(ctx: lod.Context) -> int:
    """GL objects that exist, of every kind that gpu_lod makes, asked of the driver."""
    kinds = ("Buffer", "Texture", "Framebuffer", "VertexArray", "Program")
    with ctx.active():
        load = egl.loader_of_current().load_opengl_function
        known = [ctypes.CFUNCTYPE(ctypes.c_ubyte, ctypes.c_uint)(load(f"glIs{kind}")) for kind in kinds]
        return sum(bool(is_one(name)) for is_one in known for name in range(1, 4000))


def resident() -> int:
    """Bytes, without what is free already and stays in the heap or not."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)  # glibc's
    return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])


def test_two_thousand_calls_leave_nothing_behind(ctx: lod.Context) -> None:
    image = noise(3, 96, 64)
    relevance = noise(1, 33, 40)

    def work() -> None:
        pyramid = lod.mipmap(image, generator="compute")
        lod.log_polar(pyramid, (0.5, 0.5), 16, 16, generator="compute")
        hz = lod.hiz(relevance, generator="fragment")
        lod.cull(hz, 0.9, backend="gl")
        lod.mipmap(image, generator="driver")

    for _ in range(20):
        work()
    names = count_names(ctx)
    before, sizes = count_objects(ctx), []
    for count in range(401):
        if count >= 200 and count % 50 == 0:
            sizes.append(resident())
        work()
    after = count_objects(ctx)
    assert sum(after) <= sum(before), (before, after)
    assert count_names(ctx) <= names
    # By the median, for what others do in this process, a thread that begins for one, takes its memory in one part.
    parts = [(now - last) / 250 for last, now in itertools.pairwise(sizes)]
    assert statistics.median_low(parts) < 512, f"{parts} bytes a call more resident memory"
    assert sum(parts) / len(parts) < 4096, f"{parts} bytes a call more resident memory"


def test_exception_in_the_middle_gives_everything_back(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(3, 40, 40)
    expected = lod.mipmap(image, generator="compute")[3].clone()
    gc.collect()
    before = sum(count_objects(ctx))
    for error in (RuntimeError("boom"), KeyboardInterrupt()):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(ctx.gl, "MemoryBarrier", fail)
            with pytest.raises(type(error)):
                lod.mipmap(image, generator="compute")
    gc.collect()
    assert torch.equal(lod.mipmap(image, generator="compute")[3], expected)
    gc.collect()
    assert sum(count_objects(ctx)) <= before + 2


def test_out_of_memory_is_named(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx.trim()  # no idle buffer will do
    with monkeypatch.context() as patch:
        patch.setattr(ctx.gl, "MapBufferRange", lambda *_: None)
        with pytest.raises(OutOfMemoryError, match="MiB"):
            ctx.empty(123, 4567)
    assert ctx.empty(123, 4567).fill_(2).sum() == 2 * 123 * 4567


def test_gl_errors_are_named(ctx: lod.Context) -> None:
    with pytest.raises(lod.GpuLodError, match="GL_INVALID_ENUM"), ctx.active():
        ctx.gl.Enable(0xBAD)
    lod.mipmap(noise(1, 4, 4), generator="compute")


def test_without_buffer_storage_the_error_names_it() -> None:
    HostBridge.check_supported({"GL_ARB_buffer_storage"}, 430)
    HostBridge.check_supported(set(), 440)
    with pytest.raises(UnsupportedError, match="GL_ARB_buffer_storage"):
        HostBridge.check_supported(set(), 430)


def test_missing_entry_points_say_so() -> None:
    gl = G.GL(lambda _: 0)
    with pytest.raises(UnsupportedError, match="glFinish"):
        gl.Finish()


def test_every_verb_ends_with_the_gpu_idle(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last GL command before torch sees a result waits for all others, with the barrier before it. A test of call
    order: a software renderer is often done by itself."""
    image = noise(3, 24, 30)
    pyramid = lod.mipmap(image, generator="compute").upload()
    hz = lod.hiz(image, generator="compute").upload()
    boxes = torch.tensor([[0.1, 0.1, 0.6, 0.7]])
    verbs = {
        "mipmap": lambda: lod.mipmap(image, generator="fragment"),
        "hiz": lambda: lod.hiz(image, generator="sampler"),
        "log_polar": lambda: lod.log_polar(pyramid, (0.5, 0.5), 4, 4, generator="compute"),
        "cull": lambda: lod.cull(hz, 0.5, backend="gl"),
        "region_max": lambda: lod.region_max(hz, boxes, backend="gl"),
    }
    calls: list[str] = []
    for name in ("MemoryBarrier", "Finish", "BindBufferRange", "BindTexture", "DrawArraysInstanced"):
        real = getattr(ctx.gl, name)
        monkeypatch.setattr(ctx.gl, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    for name, verb in verbs.items():
        calls.clear()
        verb()
        assert calls[-2:] == ["MemoryBarrier", "Finish"], name
        assert "BindBufferRange" in calls, name


def test_a_verb_is_waited_for_inside_a_block_of_the_context_too(
    ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens one may read results with torch before it ends."""
    waited: list[int] = []
    finish = ctx.gl.Finish
    monkeypatch.setattr(ctx.gl, "Finish", lambda: waited.append(1) or finish())
    with ctx.active():
        for count in (1, 2):
            lod.mipmap(noise(3, 24, 30), generator="compute")
            assert len(waited) == count


def test_what_dies_in_a_cycle_still_has_its_texture(ctx: lod.Context) -> None:
    """The garbage collector calls weak references back before the finalizers of what it found."""
    read: list[float] = []

    class Model:
        def __init__(self) -> None:
            self.pyramid = lod.mipmap(torch.full((1, 3, 16, 16), 0.25)).upload()
            self.itself = self

        def __del__(self) -> None:
            lod.mipmap(torch.full((1, 3, 16, 16), 0.75)).upload()
            read.append(float(lod.log_polar(self.pyramid, (0.5, 0.5), 4, 4, generator="compute").mean()))

    Model()
    gc.collect()
    assert read == [0.25]


@pytest.mark.parametrize("generator", ["compute", "single-pass", "fragment"])
def test_a_finalizer_calls_a_verb_amid_another(
    ctx: lod.Context, generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two of its GL commands."""
    image, other = noise(3, 40, 56), noise(3, 24, 32)
    expected = lod.mipmap(image, generator=generator)
    inside: list[bool] = []

    def between(name: str) -> Any:
        real = getattr(ctx.gl, name)

        def command(*given: Any) -> Any:
            if not inside:
                inside.append(True)
                lod.mipmap(other, generator=generator)
                found.append(name)
                inside.clear()
            return real(*given)

        return command

    found: list[str] = []
    for name in ("BindBufferRange", "UseProgram", "DispatchCompute", "DrawArraysInstanced", "TexParameteri"):
        monkeypatch.setattr(ctx.gl, name, between(name))
    for level, same in zip(lod.mipmap(image, generator=generator), expected, strict=True):
        assert torch.equal(level, same)
    assert {"BindBufferRange", "UseProgram"} <= {*found}


def test_what_is_bound_may_be_deleted_inside_a_block(ctx: lod.Context) -> None:
    """And is not there to be bound again when the inner call ends; errors of the block's own still come out."""
    with ctx.active():
        lod.log_polar(noise(3, 24, 30), (0.5, 0.5), 4, 4, generator="fragment")
        with ctx.active():
            buffer = ctx.gl.gen("Buffers")
            ctx.gl.BindBuffer(G.COPY_READ_BUFFER, buffer)
        ctx.gl.BindBuffer(G.COPY_READ_BUFFER, buffer)
        with ctx.active():
            ctx.gl.delete("Buffers", buffer)
        ctx.trim()
    with pytest.raises(GLError, match="INVALID_ENUM"), ctx.active():
        ctx.gl.Disable(0xFFFF)
        lod.mipmap(noise(3, 8, 8), generator="compute")
    lod.mipmap(noise(3, 8, 8), generator="compute")


def test_addresses_of_deleted_buffers_are_forgotten(ctx: lod.Context) -> None:
    """The next malloc may hand such an address to an ordinary tensor."""
    kept = ctx.empty(7)
    for size in (10_000, 300_000, 5_000_000):
        ctx.empty(size)
    ctx.trim()
    bridge = ctx.bridge
    assert isinstance(bridge, HostBridge)
    assert len(bridge._by_address) == bridge.pool.leased
    assert ctx.owns(kept)


def test_what_cannot_be_deleted_now_stays_in_the_pool() -> None:
    deleted: list[int] = []
    pool: Pool[Item] = Pool(max_idle_bytes=100)

    class Stubborn(Item):
        def delete(self) -> None:
            if not deleted:
                deleted.append(0)
                raise KeyboardInterrupt
            super().delete()

    lease = Lease(pool.take(40, lambda: Stubborn(40, deleted)), pool.returned)
    del lease
    pool.drain()
    with pytest.raises(KeyboardInterrupt):
        pool.trim()
    assert (pool.idle, pool.idle_bytes) == (1, 40)
    pool.trim()
    assert deleted == [0, 40] and (pool.idle, pool.idle_bytes) == (0, 0)


def test_idle_buffers_make_room_where_memory_is_short(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx.empty(1 << 20).fill_(1)  # idle from now on
    gc.collect()
    make, idle = ctx.host._make, ctx.gl.MapBufferRange
    with ctx.active():
        ctx.host.drain()
        assert ctx.host.pool.idle_bytes

        def full(*arguments: Any) -> Any:
            return None if ctx.host.pool.idle_bytes else idle(*arguments)

        monkeypatch.setattr(ctx.gl, "MapBufferRange", full)
        buffer = make(size_class(123 * 4567))
        assert buffer.nbytes >= 123 * 4567 and not ctx.host.pool.idle_bytes
        buffer.delete()
