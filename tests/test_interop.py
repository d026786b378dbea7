"""The CUDA bridge's state machine, on a fake of CUDA's calls that checks their order.

These tests prove what the bridge asks of CUDA and when; that CUDA does what it is asked is for the tests marked `gpu`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_cuda import RUBBISH, FakeCuda
from images import noise
from scripts import HERE, succeed

import gpu_lod as lod
from gpu_lod import errors
from gpu_lod.bridge import InteropBridge, cuda_errors
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.interop import InteropBuffer


@pytest.fixture
def cuda(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The context, sharing "CUDA" memory: verbs on CPU tensors run over the fake. GL must not touch mapped buffers."""
    fake = FakeCuda(ctx.gl)
    ctx.interop = InteropBridge(ctx.gl, fake)
    bind, name, clear = ctx.gl.BindBufferRange, ctx.gl.BindBuffer, ctx.gl.ClearBufferSubData
    named: dict[int, int] = {}

    def guarded(target: int, binding: int, glo: int, start: int, size: int) -> None:
        assert glo not in fake.mapped, f"GL buffer {glo} is bound while it is CUDA's"
        bind(target, binding, glo, start, size)

    def noted(target: int, glo: int) -> None:
        named[target] = glo
        name(target, glo)

    def cleared(target: int, *how: Any) -> None:
        assert named[target] not in fake.mapped, f"GL buffer {named[target]} is cleared while it is CUDA's"
        clear(target, *how)

    for command, seen in (("BindBufferRange", guarded), ("BindBuffer", noted), ("ClearBufferSubData", cleared)):
        monkeypatch.setattr(ctx.gl, command, seen)
    yield fake
    bridge, ctx.interop = ctx.interop, None
    assert not fake.active
    gc.collect()
    with ctx.active():
        fake.fail.clear()
        fake.capturing = False
        bridge.trim()


def bridge_of(ctx: lod.Context) -> InteropBridge:
    assert ctx.interop is not None
    return ctx.interop


def buffer_of(ctx: lod.Context, tensor: torch.Tensor) -> InteropBuffer:
    found = bridge_of(ctx).find(tensor)
    assert found is not None
    return found[0]


# -- every verb, over the fake ---------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "compute": lambda x: list(lod.mipmap(x, generator="compute")),
    "fragment": lambda x: list(lod.mipmap(x, generator="fragment")),
    "registers": lambda x: list(lod.mipmap(x, generator="registers")),
    "single-pass": lambda x: list(lod.mipmap(x, generator="single-pass")),
    "single-pass of a view": lambda x: list(lod.mipmap(x[..., 1:, 2:], generator="single-pass")),
    "single-pass converted": lambda x: list(lod.mipmap(x, std=[0.5] * 3, dtype=torch.float16, generator="single-pass")),
    "single-pass-texture": lambda x: list(lod.mipmap(x, generator="single-pass-texture")),
    "hiz": lambda x: list(lod.hiz(x, generator="compute")),
    "sampler": lambda x: list(lod.hiz(x, generator="sampler")),
    "log_polar": lambda x: [lod.log_polar(lod.mipmap(x, backend="torch"), (0.4, 0.6), 13, 21, backend="gl")],
    "log_polar fragment": lambda x: [lod.log_polar(x, (0.4, 0.6), 13, 21, generator="fragment")],
    "foveate": lambda x: [lod.foveate(x, (0.4, 0.6), backend="gl")],
    "foveate anisotropic": lambda x: [lod.foveate(lod.Pyramid((x,)), (0.4, 0.6), anisotropy=4, backend="gl")],
    "gather_patches": lambda x: [lod.gather_patches(x, _sites(), 5, backend="gl")],
    "gather_patches bfloat16": lambda x: [
        lod.gather_patches(x, _sites(), 6, mean=(0.5, 0.4, 0.3), dtype=torch.bfloat16, backend="gl")
    ],
    "oriented_energy": lambda x: list(lod.oriented_energy(x, 3, backend="gl")),
    "feature_maps": lambda x: [lod.feature_maps(x, semantic=_features(x), video=True, backend="gl")],
    "feature_maps half": lambda x: [lod.feature_maps(x, previous=x[:1], dtype=torch.float16, backend="gl")],
    "cull": lambda x: [*_parts(lod.cull(lod.hiz(x, backend="gl"), 0.7, backend="gl"))],
    "region_max": lambda x: [
        lod.region_max(lod.hiz(x, backend="gl"), torch.tensor([[0.1, 0.2, 0.4, 0.5], [0, 0, 1, 1]]), backend="gl")
    ],
}


def test_a_plan_that_needs_more_buffers_than_its_rehearsal(ctx: lod.Context, cuda: FakeCuda) -> None:
    """It keeps them all: what is dropped between verbs lies in one buffer before, and in six then."""

    def function(image: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            image = lod.foveate(image, (0.4, 0.6), backend="gl")
        return image

    bridge_of(ctx).trim()
    planned = lod.plan(function, noise(1, 3, 40, 31))
    assert planned.replays, planned.reason
    image = noise(1, 3, 40, 31)
    assert torch.equal(planned(image), function(image))


@pytest.mark.parametrize("how", ["torch", "tolist", "numpy"])
def test_a_plan_computes_with_nothing_that_is_opengls(ctx: lod.Context, cuda: FakeCuda, how: str) -> None:
    """While it records: that would be rubbish, and an index on a GPU that is none costs the process its device."""
    seen: list[float] = []

    def function(image: torch.Tensor) -> torch.Tensor:
        level = lod.mipmap(image, generator="compute")[4]
        value = {"torch": lambda: level.sum().item(), "tolist": level.tolist, "numpy": lambda: level.numpy().item()}
        found = value[how]()
        seen.append(found if how != "tolist" else found[0][0][0])
        return lod.foveate(image, (0.4, 0.6), backend="gl")

    planned = lod.plan(function, torch.ones(1, 16, 16))
    assert not planned.replays and {"torch": "aten.sum"}.get(how, how) in planned.reason, planned.reason
    assert seen == [1, 1] and not cuda.active and len(cuda.mapped) == len(cuda.resources)
    image = noise(1, 16, 16)
    assert torch.equal(planned(image), function(image))
    assert seen[2] == seen[3]


@pytest.mark.parametrize("outer", [True, False])
def test_a_verb_on_tensors_of_the_other_device_inside_another(ctx: lod.Context, cuda: FakeCuda, outer: bool) -> None:
    """As a plan of both holds the context for both: each has its own memory."""
    cuda.device = torch.device("cuda", 0)
    devices, bridges = [cuda.device, ctx.host.device], [ctx.interop, ctx.host]
    if outer:
        devices, bridges = devices[::-1], bridges[::-1]
    for _ in range(2):
        with ctx.active(devices[0]):
            with ctx.active(devices[1]):
                assert ctx.bridge is bridges[1]
                lease = ctx.bridge.lease(64)
                lease.item.bind(0, 0, 64)
                with ctx.active():
                    assert ctx.bridge is bridges[1]
                with ctx.active(devices[0]):
                    assert ctx.bridge is bridges[0] and cuda.active == 1
                assert ctx.bridge is bridges[1] and cuda.active == 1
            assert ctx.bridge is bridges[0] and cuda.active == (not outer)
            assert not outer or len(cuda.mapped) == len(cuda.resources) > 0
            del lease
        assert ctx.bridge is ctx.host and not cuda.active


def test_a_plan_hands_over_once_a_call(ctx: lod.Context, cuda: FakeCuda) -> None:
    """All buffers of all verbs to GL in one call, and back in one."""

    def retina(image: torch.Tensor, fixation: torch.Tensor) -> torch.Tensor:
        pyramid = lod.mipmap(image, backend="gl").upload()
        return lod.log_polar(pyramid, fixation, 8, 16, backend="gl")

    planned = lod.plan(retina, noise(2, 3, 40, 31), torch.tensor([[0.4, 0.6], [0.1, 0.9]]))
    assert planned.replays, planned.reason
    for _ in range(3):
        image, fixation = noise(2, 3, 40, 31), torch.rand(2, 2)
        cuda.calls.clear()
        actual = planned(image, fixation).clone()
        names = cuda.names()
        assert names.count("unmap") == names.count("map") == 1
        assert torch.equal(actual, retina(image, fixation))


def _sites() -> torch.Tensor:
    return torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.5, 1.3], [1.0, 0.2, 3.0]])


def _features(x: torch.Tensor) -> torch.Tensor:
    """Sixteen semantic channels."""
    return x.float()[:, :1].expand(-1, 16, -1, -1)


def _parts(culled: lod.Culled) -> list[torch.Tensor]:
    return [culled.mask, culled.indices, culled.pruned, torch.tensor(culled.tested)]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("dtype", "resident"),
    [
        (dtype, resident)
        for dtype in (torch.float32, torch.float16, torch.uint8, torch.bfloat16)
        for resident in (False, True)
    ],
    ids=str,
)
def test_every_verb_gives_what_the_host_bridge_gives(
    ctx: lod.Context, cuda: FakeCuda, verb: str, dtype: torch.dtype, resident: bool
) -> None:
    """No buffer is used by the side that does not own it: such a use would read rubbish, or fail."""
    image = (noise(2, 3, 37, 53) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    interop, ctx.interop = ctx.interop, None
    expected = VERBS[verb](image)
    ctx.interop = interop
    source = image
    if resident:
        source = ctx.empty(image.shape, dtype=dtype)
        source.copy_(image)
    cuda.calls.clear()
    found = VERBS[verb](source)
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)
    assert torch.equal(source, image), "the input came back changed"
    assert cuda.mapped == set(cuda.resources), "between verbs every buffer is CUDA's"


def test_one_unmap_and_one_map_a_verb(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(3, 64, 48)
    image.copy_(noise(3, 64, 48))
    lod.mipmap(image, generator="compute")  # registers its buffers
    cuda.calls.clear()
    pyramid = lod.mipmap(image, generator="compute")
    glos = {buffer_of(ctx, image).glo, buffer_of(ctx, pyramid[1]).glo}
    calls = [call for call in cuda.calls if call[0] in ("map", "unmap", "register")]
    assert [call[0] for call in calls] == ["unmap", "map"]
    assert set(calls[0][1]) == set(calls[1][1]) == glos
    assert calls[0][2] == calls[1][2] == cuda.stream_now


IN_MEMORY = ["log_polar fragment", "foveate", "gather_patches", "gather_patches bfloat16"]


@pytest.mark.parametrize("verb", IN_MEMORY)
@pytest.mark.parametrize("resident", [False, True])
def test_samplers_of_an_image_on_hardware_hand_over_once(
    ctx: lod.Context, cuda: FakeCuda, verb: str, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their chain is made and read within the verb."""
    image = noise(2, 3, 37, 53)
    expected = VERBS[verb](image)
    monkeypatch.setattr(ctx, "renderer", "hardware")
    source = ctx.empty(image.shape) if resident else image
    source.copy_(image)
    VERBS[verb](source)
    cuda.calls.clear()
    found = VERBS[verb](source)
    assert [name for name in cuda.names() if name in ("map", "unmap")] == ["unmap", "map"]
    for one, two in zip(found, expected, strict=True):
        last = torch.finfo(one.dtype).eps if one.dtype == torch.bfloat16 else 0  # place of what is rounded
        torch.testing.assert_close(one, two, atol=2e-5, rtol=last)
    assert torch.equal(source, image) and cuda.mapped == set(cuda.resources)


@pytest.mark.parametrize("verb", ["fragment", "sampler", "oriented_energy", "feature_maps half"])
def test_one_unmap_and_one_map_whatever_a_verb_makes_of_an_image(ctx: lod.Context, cuda: FakeCuda, verb: str) -> None:
    image = ctx.empty(2, 3, 37, 56)
    image.copy_(noise(2, 3, 37, 56))
    VERBS[verb](image)
    cuda.calls.clear()
    VERBS[verb](image)
    assert [name for name in cuda.names() if name in ("map", "unmap")] == ["unmap", "map"]


def test_gls_writes_are_flushed_before_the_buffers_are_mapped(
    ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ctx.empty(1, 16, 16)
    image.zero_()
    barrier = ctx.gl.MemoryBarrier
    monkeypatch.setattr(ctx.gl, "MemoryBarrier", lambda bits: (cuda.calls.append(("barrier", bits)), barrier(bits)))
    lod.mipmap(image, generator="compute")
    cuda.calls.clear()
    lod.mipmap(image, generator="compute")
    last = [call for call in cuda.calls if call[0] in ("barrier", "map")][-2:]
    assert last[0] == ("barrier", G.ALL_BARRIER_BITS) and last[1][0] == "map"


def test_an_ordinary_tensor_is_copied_before_gl_begins(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = noise(3, 64, 48)
    lod.mipmap(image, generator="compute")
    cuda.calls.clear()
    pyramid = lod.mipmap(image, generator="compute")
    assert cuda.names() == ["mark", "wait", "unmap", "map"]  # the last call's buffer, behind its last use
    assert torch.equal(pyramid[0], image)
    assert pyramid[0].data_ptr() != image.data_ptr()


def test_tensors_are_rubbish_while_gl_owns_them(ctx: lod.Context, cuda: FakeCuda) -> None:
    """The fake does what it is there for."""
    tensor = ctx.empty(4, 4)
    tensor.fill_(1.0)
    with ctx.active(cuda.device):
        buffer = buffer_of(ctx, tensor)
        buffer.bind(0, 0, 64)
        assert bytes(tensor.numpy().tobytes()) == bytes([RUBBISH]) * 64
    assert bool((tensor == 1.0).all())


def test_the_stream_of_the_call_is_used(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(1, 32, 32)
    image.zero_()
    for stream in (11, 13):
        cuda.stream_now = stream
        cuda.calls.clear()
        lod.mipmap(image, generator="compute")
        assert {call[2] for call in cuda.calls if call[0] in ("map", "unmap", "wait")} == {stream}


def test_a_counter_goes_to_and_fro_and_is_never_stale(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(1, 8, 8)
    for count in range(200):
        image.fill_(float(count))
        pyramid = lod.mipmap(image, generator="compute")
        assert float(pyramid[3]) == count
        assert float(image[0, 7, 7]) == count


# -- lives of buffers ------------------------------------------------------------------------------------------------


def test_buffers_are_registered_once_and_reused_behind_their_last_use(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = noise(3, 64, 64)
    for _ in range(5):
        lod.mipmap(image, generator="compute")
    cuda.calls.clear()
    cuda.waited.clear()
    for _ in range(50):
        lod.mipmap(image, generator="compute")
    assert "register" not in cuda.names()
    assert len(cuda.resources) <= 2
    # Each time: an event behind all streams' work when the buffer comes back, and its next user waits for it.
    assert cuda.names() == ["mark", "wait", "unmap", "map"] * 50
    assert [event for event, _ in cuda.waited] == sorted({event for event, _ in cuda.waited})


def test_each_of_several_buffers_waits(ctx: lod.Context, cuda: FakeCuda) -> None:
    """One event stands behind the last use of all that came back together."""
    first, second = ctx.empty(2**14), ctx.empty(2**15)
    glos = {buffer_of(ctx, one).glo for one in (first, second)}
    del first, second
    cuda.calls.clear()
    again = ctx.empty(2**14), ctx.empty(2**15)
    assert {buffer_of(ctx, one).glo for one in again} == glos
    assert cuda.names() == ["mark", "wait", "wait"]


def test_what_dies_while_the_event_is_recorded_waits_for_the_next_one(
    ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may queue its last work on a tensor, and drop it, just after the event."""
    first, second = ctx.empty(2**14), ctx.empty(2**15)
    held = [second]
    late = buffer_of(ctx, second)
    mark = cuda.mark
    del first, second

    def and_then() -> int:
        event = mark()
        held.clear()
        return event

    monkeypatch.setattr(cuda, "mark", and_then)
    ctx.empty(16)
    assert late.event is None and bridge_of(ctx).pool.returned
    ctx.empty(16)
    assert late.event == cuda.marks


def test_large_buffers_are_kept_for_the_next_call(ctx: lod.Context, cuda: FakeCuda) -> None:
    assert bridge_of(ctx).pool.max_idle_bytes == FakeCuda.memory // 4


def test_nothing_of_cudas_stays_bound(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(3, 32, 32)
    image.zero_()
    lod.cull(lod.hiz(image, backend="gl"), 0.5, backend="gl")
    with ctx:
        bound = {ctx.gl.indexed(G.SHADER_STORAGE_BUFFER_BINDING, index) for index in range(8)}
    assert not bound & set(cuda.resources)


def test_levels_that_torch_made_go_over_together(ctx: lod.Context, cuda: FakeCuda) -> None:
    hz = lod.hiz(noise(1, 64, 64), backend="torch")
    lod.cull(hz, 0.5, backend="gl")  # copies the levels, once
    cuda.calls.clear()
    lod.cull(hz, 0.5, backend="gl")
    assert [name for name in cuda.names() if name in ("map", "unmap")] == ["unmap", "map"]


def test_what_becomes_a_texture_on_the_way_goes_over_with_the_result(ctx: lod.Context, cuda: FakeCuda) -> None:
    image, boxes = noise(2, 3, 37, 53), torch.tensor([[0.1, 0.2, 0.4, 0.5]])
    for sample in (
        lambda: lod.log_polar(lod.mipmap(image, backend="torch"), (0.4, 0.6), 13, 21, backend="gl"),
        lambda: lod.foveate(lod.mipmap(image, backend="torch"), (0.4, 0.6), backend="gl"),
        lambda: lod.gather_patches(lod.mipmap(image, backend="torch"), _sites(), 5, backend="gl"),
        lambda: lod.region_max(lod.hiz(image, backend="torch"), boxes, backend="gl"),
    ):
        sample()  # registers its buffers
        cuda.calls.clear()
        sample()
        assert [name for name in cuda.names() if name in ("map", "unmap")] == ["unmap", "map"]


def test_only_what_is_bound_goes_over(ctx: lod.Context, cuda: FakeCuda) -> None:
    """A sampler of a texture leaves the pyramid's own levels to CUDA."""
    pyramid = lod.mipmap(noise(3, 64, 64), backend="gl").upload()
    lod.log_polar(pyramid, (0.5, 0.5), 8, 16, backend="gl")
    cuda.calls.clear()
    polar = lod.log_polar(pyramid, (0.5, 0.5), 8, 16, backend="gl")
    handed = [call[1] for call in cuda.calls if call[0] in ("map", "unmap")]
    assert handed == [(buffer_of(ctx, polar).glo,)] * 2


def test_an_alias_keeps_its_buffer(ctx: lod.Context, cuda: FakeCuda) -> None:
    pyramid = lod.mipmap(noise(3, 64, 64), generator="compute")
    alias = pyramid[3][1:, 2:]
    kept, glo = alias.clone(), buffer_of(ctx, alias).glo
    del pyramid
    gc.collect()
    for _ in range(3):
        other = lod.mipmap(noise(3, 64, 64), generator="compute")
        assert buffer_of(ctx, other[0]).glo != glo
    assert torch.equal(alias, kept)


def test_pool_exhaustion_trims_and_tries_again(ctx: lod.Context, cuda: FakeCuda) -> None:
    idle = ctx.empty(2**16)
    del idle
    cuda.calls.clear()
    cuda.fail["register"] = 2
    tensor = ctx.empty(2**18)  # another size class
    assert cuda.names() == ["mark", "register", "wait", "unmap", "synchronize", "unregister", "register", "map"]
    tensor.fill_(3)


def test_out_of_memory_gives_torchs_cache_back_and_then_says_so(
    ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(glo: int) -> Any:
        cuda.calls.append(("register", glo))
        raise cuda_errors.error(2, "cudaErrorMemoryAllocation", "register")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "register", register)
        with pytest.raises(errors.OutOfMemoryError, match="empty_cache"):
            ctx.empty(2**18)
    assert [name for name in cuda.names() if name in ("register", "release_cache")] == [
        "register", "register", "release_cache", "register",
    ]  # fmt: skip
    ctx.empty(2**18).fill_(1)


@pytest.mark.parametrize("stage", ["register", "map"])
@pytest.mark.parametrize("code", [205, 304, 999])
def test_a_shortage_by_another_name(ctx: lod.Context, cuda: FakeCuda, code: int, stage: str) -> None:
    """OpenGL may look for the memory only when CUDA asks for it."""
    kind = cuda_errors.known()[code]
    cuda.always[stage] = code
    with pytest.raises(kind):  # nothing could be shared yet, so memory need not be why
        ctx.empty(2**16)
    cuda.always.clear()
    small = ctx.empty(2**16)
    cuda.always[stage] = code
    with pytest.raises(kind):
        ctx.empty(2**14)
    cuda.calls.clear()
    for nbytes in (2**20, 2**16):
        with pytest.raises(
            errors.OutOfMemoryError, match=rf"(?s){nbytes * 4 / 2**20:.1f} MiB.*trim.*error {code} \("
        ) as caught:
            ctx.empty(nbytes)
        assert isinstance(caught.value.__cause__, kind)
    assert cuda.names().count("release_cache") == 2 and len(cuda.resources) == 1
    cuda.always.clear()
    ctx.empty(2**20).fill_(1)
    small.fill_(2)


@pytest.mark.parametrize("code", [400, 801])
def test_what_is_no_shortage_keeps_its_name(ctx: lod.Context, cuda: FakeCuda, code: int) -> None:
    small = ctx.empty(2**12)
    cuda.always["register"] = code
    with pytest.raises(cuda_errors.known()[code]):
        ctx.empty(2**16)
    cuda.always.clear()
    small.fill_(1)


def test_trim_and_close_unmap_and_unregister(cuda: FakeCuda, ctx: lod.Context) -> None:
    tensor = ctx.empty(100)
    pyramid = lod.mipmap(noise(3, 64, 64), generator="compute")
    assert len(cuda.resources) == 2
    del pyramid
    gc.collect()
    ctx.trim()
    assert list(cuda.resources) == [buffer_of(ctx, tensor).glo]
    tensor.fill_(2.0)
    assert float(tensor.sum()) == 200.0
    del tensor
    ctx.trim()
    assert not cuda.resources and not bridge_of(ctx)._by_address


def test_closing_with_live_aliases_keeps_them_valid() -> None:
    """What is idle is freed at once, the rest with its last tensor."""
    succeed(
        """
        import gc, torch, gpu_lod as lod
        from fake_cuda import FakeCuda
        from gpu_lod.bridge import InteropBridge
        ctx = lod.Context()
        fake = FakeCuda(ctx.gl)
        ctx.interop = InteropBridge(ctx.gl, fake)
        level = lod.mipmap(torch.rand(1, 32, 32), generator="compute")[2]
        idle = ctx.empty(2**16)
        expected = level.clone()
        assert len(fake.resources) == 2
        del idle
        ctx.close()
        assert torch.equal(level, expected)
        assert len(fake.resources) == 1 and fake.mapped, fake.resources
        try:
            ctx.empty(4)
        except lod.GpuLodError as error:
            assert type(error).__name__ == "ContextClosedError"
        else:
            raise AssertionError
        del level
        gc.collect()
        fake.fail["unmap"] = 700  # a close that fails is not forgotten
        lod.Context()
        assert fake.resources
        lod.Context().close()  # frees what is left
        assert not fake.resources
        """,
        PYTHONPATH=HERE,
    )


def test_many_calls_leave_nothing_behind(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(3, 40, 40)
    image.zero_()

    def counts() -> tuple[int, ...]:
        bridge = bridge_of(ctx)
        with ctx.active(device=cuda.device):
            return len(cuda.resources), bridge.pool.leased, bridge.pool.idle, len(bridge._by_address)

    for _ in range(3):
        lod.log_polar(lod.mipmap(image, backend="gl"), (0.5, 0.5), 8, 8, backend="gl")
    before = counts()
    for _ in range(100):
        lod.log_polar(lod.mipmap(image, backend="gl"), (0.5, 0.5), 8, 8, backend="gl")
    assert counts() == before


def test_threads_take_turns(ctx: lod.Context, cuda: FakeCuda) -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(10):
            pyramid = lod.mipmap(torch.full((1, 16, 16), float(value)), generator="compute")
            if float(pyramid[4]) != value:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cuda.mapped == set(cuda.resources)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_tensor_whose_memory_was_taken_away(
    ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What poisoning makes of a tensor: asking for its memory raises, and the verb says why."""
    image = ctx.empty(1, 16, 16)

    def gone(self: torch.Tensor) -> Any:
        raise RuntimeError("this tensor is no longer valid: its GL buffer came back at another address.")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "untyped_storage", gone)
        for call in (
            lambda: lod.mipmap(image, generator="compute"),
            lambda: lod.mipmap(image, backend="torch"),
            lambda: lod.explain(lod.mipmap, image),
            lambda: lod.gather_patches(lod.Pyramid((noise(1, 16, 16),)), image, 4),
            lambda: lod.allocate.GridTopK(3, 4)(image),
        ):
            with pytest.raises(errors.BufferMovedError, match="no longer valid"):
                call()
    image.zero_()
    lod.mipmap(image, generator="compute")


def test_a_plan_whose_inputs_were_taken_away(ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = lod.plan(lambda x: lod.mipmap(x, generator="compute")[1], noise(1, 16, 16))

    def gone(self: torch.Tensor) -> Any:
        raise RuntimeError("this tensor is no longer valid: its GL buffer came back at another address.")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "untyped_storage", gone)
        with pytest.raises(errors.BufferMovedError, match="no longer valid"):
            planned(noise(1, 16, 16))
    planned(noise(1, 16, 16))


def test_an_exception_inside_a_verb_gives_the_buffers_back(ctx: lod.Context, cuda: FakeCuda) -> None:
    tensor = ctx.empty(4, 4)
    tensor.fill_(5.0)
    with pytest.raises(ZeroDivisionError), ctx.active(cuda.device):
        buffer_of(ctx, tensor).bind(0, 0, 64)
        raise ZeroDivisionError
    assert bool((tensor == 5.0).all())
    assert cuda.active == 0


def test_a_moved_buffer_is_an_error_and_its_tensors_are_poisoned(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(1, 16, 16)
    image.fill_(1.0)
    alias = image[:, 2:]
    storage = image.untyped_storage()._cdata
    cuda.move = True
    with pytest.raises(errors.BufferMovedError, match="another CUDA address"):
        lod.mipmap(image, generator="compute")
    cuda.move = False
    assert storage in [one for one, _ in cuda.poisoned]
    assert "no longer valid" in cuda.poisoned[0][1]
    del image, alias
    again = ctx.empty(1, 16, 16)
    again.fill_(2.0)
    assert float(lod.mipmap(again, generator="compute")[4]) == 2.0


def test_a_buffer_that_cannot_be_found_again_does_not_keep_others_from_poison(ctx: lod.Context, cuda: FakeCuda) -> None:
    images = [ctx.empty(1, 3, 16, 16).fill_(0.5) for _ in range(2)]
    lod.feature_maps(images[0], previous=images[1], backend="gl")
    address, asked = cuda.address, []

    def lost(handle: Any) -> Any:
        asked.append(handle)
        if len(asked) == 2:
            raise errors.MappingError("nobody knows")
        return address(handle)

    cuda.address, cuda.move = lost, True  # type: ignore[method-assign]
    with pytest.raises(errors.MappingError, match="nobody knows"):
        lod.feature_maps(images[0], previous=images[1], backend="gl")
    cuda.address, cuda.move = address, False  # type: ignore[method-assign]
    storages = {image.untyped_storage()._cdata for image in images}
    assert storages <= {one for one, _ in cuda.poisoned}
    assert any("cannot be told: nobody knows" in why for _, why in cuda.poisoned)


def test_a_buffer_that_cannot_be_mapped_again_poisons_its_tensors(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(1, 16, 16)
    image.fill_(1.0)
    lod.mipmap(image, generator="compute")  # so that the next call makes no new buffer, and maps once, when it ends
    storage = image.untyped_storage()._cdata
    cuda.fail["map"] = 999
    with pytest.raises(errors.InteropUnavailableError):
        lod.mipmap(image, generator="compute")
    assert storage in [one for one, _ in cuda.poisoned]
    assert "could not be mapped" in cuda.poisoned[0][1]
    del image
    gc.collect()
    again = ctx.empty(1, 16, 16)
    again.fill_(2.0)
    assert float(lod.mipmap(again, generator="compute")[4]) == 2.0
    assert cuda.mapped == set(cuda.resources)


def test_all_that_could_not_be_mapped_again_is_poisoned(ctx: lod.Context, cuda: FakeCuda) -> None:
    image, previous = (ctx.empty(1, 3, 16, 16) for _ in range(2))
    for tensor in (image, previous):
        tensor.fill_(0.5)
    lod.feature_maps(image, previous=previous, backend="gl")
    cuda.fail["map"] = 999
    with pytest.raises(errors.InteropUnavailableError):
        lod.feature_maps(image, previous=previous, backend="gl")
    storages = {tensor.untyped_storage()._cdata for tensor in (image, previous)}
    assert storages <= {one for one, _ in cuda.poisoned}


def test_a_buffer_that_was_not_mapped_is_found_where_it_comes_back(ctx: lod.Context, cuda: FakeCuda) -> None:
    tensor = ctx.empty(1, 128, 128)
    tensor.fill_(1.0)
    lod.mipmap(tensor, generator="compute")
    buffer, before = buffer_of(ctx, tensor), tensor.data_ptr()
    cuda.fail["map"] = 999
    with pytest.raises(errors.InteropUnavailableError):
        lod.mipmap(tensor, generator="compute")
    del tensor
    gc.collect()
    cuda.move = True
    again = ctx.empty(1, 128, 128)
    cuda.move = False
    assert again.data_ptr() != before and buffer_of(ctx, again) is buffer
    again.fill_(2.0)
    assert float(lod.mipmap(again, generator="compute")[7]) == 2.0


def test_whatever_ends_a_map_poisons(ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    image = ctx.empty(1, 16, 16)
    image.fill_(1.0)
    lod.mipmap(image, generator="compute")

    def broken(handles: Any, stream: int) -> None:
        raise TypeError("wrong argument")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "map", broken)
        with pytest.raises(TypeError):
            lod.mipmap(image, generator="compute")
    assert image.untyped_storage()._cdata in [one for one, _ in cuda.poisoned]


def test_a_failure_right_after_the_beginning_ends_what_began(
    ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise errors.GLError("drain")

    with monkeypatch.context() as patch:
        patch.setattr(ctx.textures, "drain", broken)
        with pytest.raises(errors.GLError, match="drain"):
            lod.mipmap(torch.ones(1, 8, 8), generator="compute")
    assert cuda.active == 0 and not ctx._unfinished and ctx.bridge is ctx.host
    assert float(lod.mipmap(torch.ones(1, 8, 8), generator="compute")[3]) == 1.0


@pytest.mark.parametrize("stage", ["register", "map", "unmap", "address", "mark", "wait"])
@pytest.mark.parametrize("code", [2, 219, 304, 700, 900, 999])
def test_an_error_anywhere_leaves_the_context_usable(ctx: lod.Context, cuda: FakeCuda, stage: str, code: int) -> None:
    """Whatever CUDA says, and wherever."""
    lod.mipmap(noise(1, 24, 24), generator="compute")  # so that there is something to mark and to wait for
    kind = cuda_errors.known()[code]
    cuda.fail[stage] = code
    size = 96 if stage == "register" else 24
    if stage == "register" and code in (2, 304, 999):  # may be a shortage: is tried again, with success
        lod.mipmap(noise(1, size, size), generator="compute")
        return
    with pytest.raises(kind) as caught:
        lod.mipmap(noise(1, size, size), generator="compute")
    assert str(code) in str(caught.value)
    cuda.fail.clear()
    del caught
    gc.collect()
    assert cuda.active == 0
    assert float(lod.mipmap(torch.full((1, 24, 24), 0.5), generator="compute")[4]) == 0.5
    assert cuda.mapped == set(cuda.resources)


@pytest.mark.parametrize("code", sorted(cuda_errors.known()))
def test_every_error_code_is_a_named_error_with_a_remedy(code: int) -> None:
    error = cuda_errors.error(code, "cudaErrorSomething", "cudaGraphicsMapResources")
    assert isinstance(error, errors.GpuLodError) and type(error) is not errors.GpuLodError
    assert f"error {code} (cudaErrorSomething) in cudaGraphicsMapResources. " in str(error)
    assert len(str(error).split("cudaGraphicsMapResources. ", 1)[1]) > 20
    if isinstance(error, errors.InteropError):
        assert error.code == code


def test_an_unknown_code_is_reported_as_such() -> None:
    error = cuda_errors.error(12345, "cudaErrorNew", "cudaGraphicsMapResources")
    assert type(error) is errors.InteropError
    assert error.code == 12345
    assert "cudaErrorNew" in str(error) and "report" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, errors.OutOfMemoryError),
        (100, errors.CudaUnavailableError),
        (101, errors.DeviceMismatchError),
        (208, errors.MappingError),
        (211, errors.MappingError),
        (219, errors.DeviceMismatchError),
        (304, errors.InteropUnavailableError),
        (700, errors.DeviceLostError),
        (900, errors.CaptureError),
        (999, errors.InteropUnavailableError),
    ],
)
def test_which_error_a_code_becomes(code: int, kind: type[Exception]) -> None:
    assert cuda_errors.known()[code] is kind


def test_double_map_and_unmap_without_map_are_refused(ctx: lod.Context, cuda: FakeCuda) -> None:
    tensor = ctx.empty(16)
    buffer, bridge = buffer_of(ctx, tensor), bridge_of(ctx)
    with ctx.active(cuda.device):
        buffer.take()
        before = len(cuda.calls)
        with pytest.raises(errors.MappingError, match="CUDA's already"):
            bridge._map([buffer])
        bridge._unmap([buffer])
        with pytest.raises(errors.MappingError, match="GL's already"):
            bridge._unmap([buffer])
        assert [call[0] for call in cuda.calls[before:]] == ["unmap"]  # the misuse never reached CUDA
    assert buffer.mapped


@pytest.mark.parametrize("misuse", ["map", "unmap", "address"])
def test_what_the_runtime_says_of_buffers_out_of_turn_is_no_matter_of_gpus(
    ctx: lod.Context, cuda: FakeCuda, misuse: str
) -> None:
    """The runtime has no code of its own for it."""
    tensor = ctx.empty(16)
    handle = buffer_of(ctx, tensor).handle
    with ctx.active(cuda.device):
        if misuse != "map":
            cuda.unmap([handle], 0)
        with pytest.raises(errors.InteropUnavailableError, match=r"999.*or not mapped.* bug in gpu_lod"):
            if misuse == "address":
                cuda.address(handle)
            else:
                getattr(cuda, misuse)([handle], 0)
        if misuse != "map":
            cuda.map([handle], 0)
    for where in ("cudaGraphicsGLRegisterBuffer", "cudaGraphicsUnregisterResource"):
        assert "not mapped" not in str(cuda_errors.error(999, "cudaErrorUnknown", where))


def test_verbs_refuse_to_be_captured(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(1, 16, 16)
    image.fill_(1.0)
    cuda.calls.clear()
    cuda.capturing = True
    with pytest.raises(errors.CaptureError):
        lod.mipmap(image, generator="compute")
    assert cuda.names() == []  # nothing was unmapped
    cuda.capturing = False
    assert float(lod.mipmap(image, generator="compute")[4]) == 1.0


def test_a_capture_on_another_thread_bears_a_verb_but_not_a_buffer_that_comes_back(
    ctx: lod.Context, cuda: FakeCuda
) -> None:
    """As docs/bridge.md says: the event that recycles a buffer stands behind every stream, captured ones too."""
    image = ctx.empty(1, 16, 16)
    image.fill_(1.0)
    result = lod.mipmap(image, generator="compute")
    glo = buffer_of(ctx, result[1]).glo
    cuda.captures = {"a training step": True}
    again = lod.mipmap(image, generator="compute")  # makes a buffer: nothing has come back
    assert float(again[4]) == 1.0 and cuda.captures["a training step"]
    del result
    gc.collect()
    cuda.calls.clear()
    for _ in range(2):
        with pytest.raises(errors.CaptureError, match=r"before or after torch\.cuda\.graph\(\), on whatever thread"):
            lod.mipmap(image, generator="compute")
    assert not cuda.captures["a training step"]
    assert cuda.names() == ["mark", "mark"] and cuda.active == 0  # and nothing of the verb's own
    assert len(bridge_of(ctx).pool.returned) == 1, "none is recycled without its event, and none is lost"
    assert bool((image == 1.0).all())
    cuda.captures.clear()
    after = lod.mipmap(image, generator="compute")
    assert buffer_of(ctx, after[1]).glo == glo and cuda.waited[-1][0] == cuda.marks
    assert float(after[4]) == 1.0


def test_a_failed_unmap_leaves_the_input_as_it_was(ctx: lod.Context, cuda: FakeCuda) -> None:
    image = ctx.empty(1, 16, 16)
    image.fill_(4.0)
    cuda.fail["unmap"] = 219
    with pytest.raises(errors.DeviceMismatchError, match="software renderer"):
        lod.mipmap(image, generator="compute")
    assert bool((image == 4.0).all())
    assert cuda.mapped == set(cuda.resources)


def test_buffers_that_came_back_smaller_are_refused(
    ctx: lod.Context, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "address", lambda handle: (handle.memory.ctypes.data, 16))
        with pytest.raises(errors.MappingError, match="16 bytes"):
            ctx.empty(2**15)
    assert not cuda.resources  # and no half-made buffer stays
