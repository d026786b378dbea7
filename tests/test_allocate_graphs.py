"""Allocators as CUDA graphs, as far as a machine without a GPU can tell: what they do while one is captured asks for no
value, brings nothing from the host, and is what they do else. Kernels run in the emulator."""

from __future__ import annotations

import importlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_emulator import COMPILER, EmulatedDevice
from test_gpu_allocate import GRAPHS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_lod as lod
from gpu_lod import cached, checks, salient_cells
from gpu_lod.errors import CaptureError, InputError, KernelError
from gpu_lod.kernels import device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

FINEST = [
    *("AdaptiveStratified", "FrequencyAware", "GridTopK", "HeatDiffusion", "Random", "SoftTopKCoverage", "Stratified"),
    *("Voronoi", "VortexField", "VortexLearned"),
]
"""Those whose sites are all of level 0."""
PATCH, ROWS, COLUMNS = 4, 11, 14
_WAITS = "local_scalar_dense", "nonzero", "unique", "lift_fresh", "masked_select", "equal"
"""Operations that wait for a GPU, or bring it something."""


class Watch(TorchDispatchMode):
    """Counts those."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        if masks or name.startswith(_WAITS):
            frames = [frame for frame in traceback.extract_stack() if "gpu_lod" in frame.filename]
            self.waits[f"{name} in {frames[-1].name}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def capture(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says whether a graph is being captured."""

    def set_to(value: bool) -> None:
        emulated.is_capturing = value

    for module in (cached, checks):
        monkeypatch.setattr(module, "capturing", lambda where: emulated.is_capturing)
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    monkeypatch.setattr(salient_cells, "_LEAST", 2**30)  # as on a GPU
    monkeypatch.setattr(cached, "_kept", {})
    device.usable.cache_clear()
    yield set_to
    device.usable.cache_clear()


def given(name: str, budget: int = 37, batch: int = 2) -> tuple[Any, dict[str, Any]]:
    """An allocator, and what it is called with."""
    torch.manual_seed(3)
    allocator = lod.allocate.make(name, budget, PATCH)
    if isinstance(allocator, torch.nn.Module):
        allocator.eval()
    size = ROWS * PATCH - 1, COLUMNS * PATCH - 2
    more = {"query": torch.randn(batch, allocator.query_width or 8)} if "query" in allocator.needs else {}
    return allocator, {"image": torch.rand(batch, 3, *size), "relevance": torch.rand(batch, ROWS, COLUMNS), **more}


@torch.no_grad()
@pytest.mark.parametrize("alone", [False, True], ids=["given", "alone"])
@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_waits_while_a_graph_is_captured(name: str, alone: bool, capture: Callable[[bool], None]) -> None:
    allocator, what = given(name)
    if alone and "relevance" in allocator.needs:
        del what["relevance"]
    if name == "TokenDAG":  # of fp32 a CPU reads the levels that losses are made of, and asks how many it needs
        what["image"] = what["image"].half()
    expected = allocator(**what)
    capture(True)
    with Watch() as watch:
        found = allocator(**what)
    assert not watch.waits
    assert torch.equal(found.sites, expected.sites) and torch.equal(found.scores, expected.scores)
    assert torch.equal(found.patches, expected.patches)


@torch.no_grad()
@pytest.mark.parametrize("name", sorted({*lod.allocate.names()} - {*GRAPHS}))
def test_the_others_would(name: str, capture: Callable[[bool], None]) -> None:
    if name in ("Wavelet", "HybridAtlas"):
        pytest.importorskip({"Wavelet": "ptwt", "HybridAtlas": "skimage"}[name])
    allocator, what = given(name)
    allocator(**what)
    capture(True)
    with Watch() as watch:
        allocator(**what)
    assert watch.waits


@torch.no_grad()
@pytest.mark.parametrize("name", lod.allocate.names())
def test_whose_sites_are_all_of_the_finest_level(name: str) -> None:
    """Of these no other level is made on a GPU: what says so of itself and is not would be read wrongly."""
    if name == "Wavelet":
        pytest.importorskip("ptwt")
    if name == "HybridAtlas":
        pytest.importorskip("skimage")
    allocator, what = given(name, budget=23)
    assert allocator.finest == (name in FINEST)
    levels = allocator(**what).sites[..., 2]
    assert bool((levels == 0).all()) or not allocator.finest


@torch.no_grad()
@pytest.mark.parametrize("name", ["GridTopK", "FoveatedPyramid", "SoftVortex"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
def test_patches_are_read_by_one_launch(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Or two, where there are levels to be made."""
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    allocator, what = given(name)
    image = what["image"]
    what["image"] = (image * 255).round().byte() if dtype == torch.uint8 else image.to(dtype)
    device.usable.cache_clear()
    tokens = allocator(**what)
    assert [call[1].name for call in emulated.named("launch")] == (["reduce"] if name == "FoveatedPyramid" else []) + [
        "patches_of_levels"
    ]
    emulated.calls.clear()
    expected = lod.gather_patches(what["image"], tokens.sites, PATCH, backend="torch")
    if name != "SoftVortex":  # whose tokens are blends
        close = {torch.uint8: 1, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
        assert float((tokens.patches.float() - expected.float()).abs().max()) <= close
    one = allocator(**{key: value[0] for key, value in what.items()})
    assert torch.equal(one.patches, tokens.patches[0])


@torch.no_grad()
def test_patches_are_read_by_torch_where_kernels_fail(emulated: EmulatedDevice) -> None:
    allocator, what = given("GridTopK")
    device.usable.cache_clear()
    emulated.fail["launch"] = KernelError("no such kernel")
    tokens = allocator(**what)
    assert emulated.named("launch") and not emulated.fail
    assert torch.equal(tokens.patches, lod.gather_patches(what["image"], tokens.sites, PATCH, backend="torch"))


def test_gradients_pass_through_patches_of_kernels(emulated: EmulatedDevice) -> None:
    allocator, what = given("FoveatedPyramid")
    device.usable.cache_clear()
    found = []
    for kind in ("cpu", "cuda"):
        device.KIND = kind
        image = what["image"].clone().requires_grad_()
        tokens = allocator(image, what["relevance"])
        torch.manual_seed(0)
        found.append(torch.autograd.grad(tokens.patches, image, torch.rand_like(tokens.patches))[0])
    assert emulated.named("launch") and torch.allclose(*found, atol=1e-5)


@torch.no_grad()
def test_a_plan_of_an_allocator_repeats_a_graph(
    capture: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured(run: Callable[[], Any], where: torch.device) -> tuple[Callable[[], None], Any]:
        run()
        capture(True)
        results = run()
        capture(False)

        def replay() -> None:
            for old, new in zip((results.sites, results.scores, results.patches), _parts(run()), strict=True):
                old.copy_(new)

        return replay, results

    monkeypatch.setattr(importlib.import_module("gpu_lod.plan"), "captured", captured)
    allocator, what = given("FoveatedPyramid")
    plan = lod.plan(allocator, what["image"], what["relevance"])
    assert plan.replays and "CUDA graph" in plan.reason
    image, relevance = torch.rand_like(what["image"]), torch.rand_like(what["relevance"])
    found, expected = plan(image, relevance), allocator(image, relevance)
    for one, two in zip(_parts(found), _parts(expected), strict=True):
        assert torch.equal(one, two)


def _parts(tokens: lod.TokenSet) -> tuple[torch.Tensor, ...]:
    assert tokens.patches is not None
    return tokens.sites, tokens.scores, tokens.patches


@torch.no_grad()
@pytest.mark.parametrize("name", ["Downsample", "Hexagonal", "Random"])
def test_sites_that_are_always_the_same_are_brought_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_kept", {})
    allocator, what = given(name)
    first = allocator(**what)
    assert type(allocator).__module__ in {make.__module__ for make, *_ in cached._kept}
    assert torch.equal(allocator(**what).sites, first.sites)


# -- constants --------------------------------------------------------------------------------------------------------


def test_a_constant_is_brought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_kept", {})
    where = torch.device("cpu")
    with torch.inference_mode():
        first = cached.numbers((1, 2), torch.float64, where)
    assert not first.is_inference() and first.tolist() == [1, 2] and first.dtype == torch.float64
    assert cached.numbers((1, 2), torch.float64, where) is first
    assert cached.numbers((1, 2), torch.float32, where).dtype == torch.float32
    assert cached.numbers((1, 3), torch.float64, where).tolist() == [1, 3]
    with FakeTensorMode():  # which knows no values
        assert cached.numbers((1, 2), torch.float64, where) is not first
    assert cached.numbers((1, 2), torch.float64, where) is first
    monkeypatch.setattr(cached, "MOST_BYTES", 0)
    again = cached.numbers((5,), torch.float64, where)
    assert cached.numbers((5,), torch.float64, where) is not again


def test_no_constant_is_brought_while_a_graph_is_captured(capture: Callable[[bool], None]) -> None:
    where = torch.device("cpu")
    there = cached.numbers((7, 8), torch.int64, where)
    capture(True)
    assert cached.numbers((7, 8), torch.int64, where) is there
    with pytest.raises(CaptureError, match="Call the function once"):
        cached.numbers((7, 9), torch.int64, where)


@torch.no_grad()
def test_values_are_checked_where_they_can_be_read(capture: Callable[[bool], None]) -> None:
    allocator, what = given("GridTopK")
    allocator(**what)
    what["relevance"][0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        allocator(**what)
    capture(True)
    assert allocator(**what).sites.shape == (2, 37, 3)
    assert not checks.readable(what["relevance"])
