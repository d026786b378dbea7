"""What is captured in CUDA graphs, on a stand-in for torch's: what a capture that fails must not leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_lod as lod
from gpu_lod.errors import CaptureError
from gpu_lod.kernels import device, graphs
from gpu_lod.kernels.graphs import captured

CPU = torch.device("cpu", 0)


class Stream:
    device = CPU

    def wait_stream(self, other: Stream) -> None: ...


class Gpu:
    """torch.cuda as far as captures go. `torch.cuda.graph` itself is torch's.

    Attributes:
        generator_captures: flag of the generator, which a capture that ends well resets and no other.
        pools: those that memory is taken from for captures.
        released: those that torch was told to give back.
        ended: graphs, in the order of their captures.
        lost: whatever it is asked is an error.
    """

    def __init__(self) -> None:
        self.default = self.stream = Stream()
        self.capturing: Graph | None = None
        self.generator_captures = False
        self.pools: list[tuple[int, int]] = []
        self.released: list[tuple[int, int]] = []
        self.ended: list[Graph] = []
        self.lost = False

    def wait(self) -> None:
        """As .item() does."""
        if self.capturing:
            self.capturing.valid = False
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def rand(self) -> torch.Tensor:
        if self.generator_captures and not self.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return torch.zeros(4)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def set_stream(self, stream: Stream) -> None:
        self.stream = stream

    def end_allocate(self, index: int, pool: tuple[int, int]) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def release(self, index: int, pool: tuple[int, int]) -> None:
        self.released.append(pool)


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph, in the order of its C++; it notes operations while it is captured."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.valid = gpu, True
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "", **_: Any) -> None:
        assert self.gpu.capturing is None and self.gpu.stream is not self.gpu.default
        assert capture_error_mode == "thread_local"
        self.gpu.generator_captures = True
        self.pool = pool or (id(self), 0)
        assert self.pool not in self.gpu.pools
        self.gpu.pools.append(self.pool)
        self.stream = self.gpu.stream
        self.gpu.capturing = self
        self.__enter__()

    def capture_end(self) -> None:
        assert self.gpu.capturing is self and self.gpu.stream is self.stream
        self.__exit__(None, None, None)
        self.gpu.capturing = None
        self.gpu.ended.append(self)
        if not self.valid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.gpu.pools.remove(self.pool)
        self.gpu.generator_captures = False
        assert self.operations, "torch warns of an empty graph"

    def replay(self) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    handles = iter(range(1, 100))
    for name, value in {
        "device": lambda where: nullcontext(),
        "current_stream": lambda: made.stream,
        "Stream": Stream,
        "stream": made.on,
        "set_stream": made.set_stream,
        "CUDAGraph": lambda: Graph(made),
        "graph_pool_handle": lambda: (0, next(handles)),
        "synchronize": made.wait,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": made.end_allocate,
        "_cuda_releasePool": made.release,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(graphs, "_spoilt", [])
    return made


def test_a_capture_that_succeeds(gpu: Gpu) -> None:
    x = torch.zeros(2)
    replay, results = captured(lambda: x.add_(1), CPU)
    replay()
    assert results is x and gpu.stream is gpu.default and not gpu.pools
    assert len(gpu.ended) == 1 and not gpu.released, "its pool lives as long as it does"
    assert not graphs._spoilt


def waits(gpu: Gpu) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        made = torch.ones(3) + 1
        gpu.wait()
        return made

    return run


def test_a_capture_that_fails_leaves_nothing_behind(gpu: Gpu) -> None:
    """Neither its stream as the current one, nor its pool, nor the generator as if still captured."""
    with pytest.raises(RuntimeError, match="previous error during capture") as error:
        captured(waits(gpu), CPU)
    assert "not permitted" in str(error.value.__context__)
    assert gpu.stream is gpu.default
    assert gpu.rand().shape == (4,)
    failed, small = gpu.ended
    assert not failed.valid and not gpu.pools and gpu.released == [failed.pool]
    assert small.operations == ["aten.zero_.default"], "no memory is taken in it"
    assert graphs._spoilt == [failed], "the allocator of pinned memory still asks it"
    captured(gpu.rand, CPU)
    assert gpu.rand().shape == (4,)


def test_an_error_that_spoils_no_capture(gpu: Gpu) -> None:
    """torch ends it well, and gives its memory back with it."""

    def run() -> None:
        torch.zeros(1)
        if gpu.capturing:
            raise CaptureError("mine")

    with pytest.raises(CaptureError, match="mine"):
        captured(run, CPU)
    assert gpu.stream is gpu.default and gpu.rand().shape == (4,)
    assert not gpu.pools and not gpu.released and not graphs._spoilt


@pytest.mark.parametrize("stands_in_its_way", ["the GPU", "torch"])
def test_mending_hides_no_error(stands_in_its_way: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is lost, or beside a torch that names things otherwise."""

    def run() -> None:
        if gpu.capturing:
            gpu.lost = stands_in_its_way == "the GPU"
        gpu.wait()

    if stands_in_its_way == "torch":
        monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(run, CPU)
    assert gpu.stream is gpu.default
    assert gpu.generator_captures == gpu.lost, "each part of the mending is tried"


def test_a_plan_of_what_waits_runs_it_and_the_next_is_a_graph(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "KIND", "cpu")
    x = torch.ones(4)

    def waiting(x: torch.Tensor) -> torch.Tensor:
        gpu.wait()
        return x + gpu.rand()

    planned = lod.plan(waiting, x)
    assert not planned.replays and "previous error during capture" in planned.reason
    assert torch.equal(planned(x), x)
    assert lod.plan(lambda x: x + gpu.rand(), x).replays


def test_what_came_before_is_there_and_what_comes_after_waits(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs before a capture are on a stream of their own, between two waits."""
    order: list[Any] = []
    monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: order.append((stream, other)))

    def run() -> torch.Tensor:
        order.append(gpu.stream)
        return torch.zeros(1).add_(1)

    captured(run, CPU)
    _, aside, *_ = order
    assert aside is not gpu.default
    assert order == [(aside, gpu.default), aside, (gpu.default, aside), aside]
