"""A GPU's memory, measured and filled, for real: with nothing else on it. `make gpu-check` runs these last: a driver
that does not bear a full one would fail all that follow."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import gpu_lod as lod
from gpu_lod import errors
from gpu_lod.kernels.device import device_of
from gpu_lod.kernels.textures import textures_of

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"


@pytest.fixture(scope="module")
def gl() -> Iterator[lod.Context]:
    yield lod.Context(CUDA)


def test_textures_do_not_pile_up() -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    at = torch.rand(2, device=CUDA)
    for count in range(200):
        lod.foveate(lod.mipmap(torch.rand(3, 512, 512, device=CUDA)).upload(backend="cuda"), at, backend="cuda")
        if count == 20:
            before = used()
    assert used() - before < 2**25
    assert textures_of(device_of(at)).pool.leased <= 1


def test_a_counter_goes_to_and_fro_ten_thousand_times(gl: lod.Context) -> None:
    """Shader writes, torch reads, torch writes, shader reads, on two streams in turn; no stale byte, nothing grows."""
    image = gl.empty(1, 64, 64)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    streams = [torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA)]
    torch.cuda.synchronize()
    before: tuple[int, ...] | None = None
    for count in range(10_000):
        stream, last = streams[count % 2], streams[1 - count % 2]
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            image.fill_(float(count))
            pyramid = lod.mipmap(image, generator="compute")
            for level in (pyramid[1], pyramid[6]):
                wrong += (level != count).sum()
            wrong += (image != count).sum()
        if count == 100:
            before = _usage(gl)
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert before is not None
    after = _usage(gl)
    assert after[:3] == before[:3], "registered buffers and pools"
    assert after[3] - before[3] < 2**25, "device memory"


def _usage(context: lod.Context) -> tuple[int, int, int, int]:
    gc.collect()
    torch.cuda.synchronize()
    bridge = context.interop
    assert bridge is not None
    with context.active(device=torch.device(CUDA)):
        free, total = torch.cuda.mem_get_info(0)
        return len(bridge._by_address), bridge.pool.leased, bridge.pool.idle, total - free


def test_out_of_memory(gl: lod.Context) -> None:
    _, total = torch.cuda.mem_get_info(0)
    kept: list[torch.Tensor] = []
    try:
        try:
            while len(kept) < total // 2**30 + 16:
                kept.append(gl.empty(2**30, dtype=torch.uint8))
                kept[-1][::4096] = 7
        except errors.OutOfMemoryError:
            pass  # a driver may also make room in host memory
        assert all(int(tensor[-4096]) == 7 for tensor in kept[:-1])
    finally:  # a traceback would keep all of it, and later tests would find no memory
        kept.clear()
        gc.collect()
        gl.trim()
    assert float(lod.mipmap(torch.ones(1, 16, 16, device=CUDA), backend="gl")[4]) == 1.0


def test_torchs_cache_makes_room(gl: lod.Context) -> None:
    """Memory that torch has cached, and does not use, is given back when OpenGL needs it."""
    free, _ = torch.cuda.mem_get_info(0)
    block = torch.empty(free - 2**30, dtype=torch.uint8, device=CUDA)
    del block
    tensors: list[torch.Tensor] = []
    try:
        while len(tensors) < 3:
            tensors.append(gl.empty(2**30, dtype=torch.uint8))
        assert all(int(tensor.fill_(1)[-1]) == 1 for tensor in tensors)
    finally:
        tensors.clear()
        gc.collect()
        gl.trim()
        torch.cuda.empty_cache()
