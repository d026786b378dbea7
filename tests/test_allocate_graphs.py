"""Allocators as CUDA graphs, as far as a machine without a GPU can tell: what they do while one is captured asks for no
value, brings nothing from the host, and is what they do else. Kernels run in the emulator."""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_emulator import COMPILER, EmulatedDevice
from relevance import KINDS, maps
from test_gpu_allocate import GRAPHS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_lod as lod
from gpu_lod import by_kernel, cached, checks
from gpu_lod.allocate import ordering
from gpu_lod.errors import CaptureError, GpuLodWarning, InputError, KernelError, LimitError, PyramidChangedError
from gpu_lod.kernels import cortical, device, spirals

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

FINEST = [
    *("AdaptiveStratified", "FrequencyAware", "GridTopK", "HeatDiffusion", "Random", "SoftTopKCoverage", "Stratified"),
    *("Voronoi", "VortexField", "VortexLearned"),
]
"""Those whose sites are all of level 0."""
PATCH, ROWS, COLUMNS = 4, 11, 14
CLOSE = {torch.float32: 1e-5, torch.uint8: 1.0, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""How far pixels of each dtype may be from those that another way made: the last bit, of range 1 or 255."""
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

    for module in (cached, checks, by_kernel):
        monkeypatch.setattr(module, "capturing", lambda where: emulated.is_capturing)
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    monkeypatch.setattr(cached, "_constants", cached._Constants())
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


def of_dtype(image: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (image * 255).round().byte() if dtype == torch.uint8 else image.to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("alone", [False, True], ids=["given", "alone"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_waits_while_a_graph_is_captured(
    name: str, calls: int, alone: bool, capture: Callable[[bool], None]
) -> None:
    """Sites are looked up from the second call on."""
    allocator, what = given(name)
    if alone and "relevance" in allocator.needs:
        del what["relevance"]
    for _ in range(calls):
        expected = allocator(**what)
    capture(True)
    with Watch() as watch:
        found = allocator(**what)
    assert not watch.waits
    assert torch.equal(found.sites, expected.sites) and torch.equal(found.scores, expected.scores)
    assert torch.equal(found.patches, expected.patches)


@torch.no_grad()
@pytest.mark.parametrize("name", ["FoveatedPyramid", "PyramidTopK", "Spiral", "Stratified", "Voronoi", "Whirlwind"])
def test_grids_of_more_cells_than_a_block_takes_are_captured_too(name: str, capture: Callable[[bool], None]) -> None:
    """Relevance is scaled, and what peaks' cells hold summed, by torch then, which waits for nothing."""
    allocator, relevance = lod.allocate.make(name, 37, PATCH), torch.rand(1, 300, 300)
    for _ in range(2):
        expected = allocator(relevance=relevance)
    capture(True)
    with Watch() as watch:
        found = allocator(relevance=relevance)
    assert not watch.waits
    assert torch.equal(found.sites, expected.sites) and torch.equal(found.scores, expected.scores)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["golden", "archimedean", "fibonacci"])
@pytest.mark.parametrize("batch", [1, 3])
def test_spirals_of_any_kind_are_captured(kind: str, batch: int, capture: Callable[[bool], None]) -> None:
    allocator, relevance = lod.allocate.make("Spiral", 273, PATCH, kind=kind), torch.rand(batch, 31, 47)
    expected = allocator(relevance=relevance)
    capture(True)
    with Watch() as watch:
        found = allocator(relevance=relevance)
    assert not watch.waits
    assert torch.equal(found.sites, expected.sites) and torch.equal(found.scores, expected.scores)


@torch.no_grad()
def test_what_only_kernels_do_without_waiting_is_named(
    capture: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    strata, cells = lod.allocate.Stratified(37, PATCH, strata=(65, 65)), torch.rand(1, 130, 130)
    polar, spiral = lod.allocate.LogPolar(37, PATCH), lod.allocate.Spiral(37, PATCH)
    for allocator in (strata, polar, spiral):
        allocator(relevance=cells)
    monkeypatch.setattr(by_kernel, "_failed", {cells.device})
    capture(True)
    with pytest.raises(CaptureError, match="shared out by a kernel"):
        strata(relevance=cells)
    monkeypatch.setattr(by_kernel, "_failed", set())
    with pytest.raises(LimitError, match="4225 strata"):
        strata(relevance=cells)
    monkeypatch.setattr(spirals, "MOST_SITES", 36)
    with pytest.raises(LimitError, match="37 sites"):
        spiral(relevance=cells)
    capture(False)
    monkeypatch.setattr(cortical, "MOST_CANDIDATES", 0)
    polar(relevance=cells)
    capture(True)
    polar(relevance=cells)
    monkeypatch.setattr(sys.modules["gpu_lod.cortical_sites"], "_AT_ONCE", 0)
    with pytest.raises(CaptureError, match="sites to choose from"):
        polar(relevance=cells)


def test_amounts_keep_their_gradients(capture: Callable[[bool], None]) -> None:
    """Whatever was asked for before, and with gradients off."""
    relevance = torch.rand(2, ROWS, COLUMNS, requires_grad=True)
    scene = lod.allocate.Scene((ROWS * PATCH, COLUMNS * PATCH), PATCH, relevance, None, None, None, None)
    with torch.no_grad():
        scene.fixations()
    assert scene.amounts().requires_grad
    plain = replace(scene, relevance=relevance.detach())
    assert plain.amounts() is plain.amounts() and torch.equal(plain.amounts(), scene.amounts())


@torch.no_grad()
@pytest.mark.parametrize(("kind", "dtype"), [*zip(KINDS, itertools.cycle(CLOSE))], ids=str)
@pytest.mark.parametrize("name", lod.allocate.names())
def test_kernels_choose_what_plain_torch_does(
    name: str, kind: str, dtype: torch.dtype, capture: Callable[[bool], None]
) -> None:
    """With all that is done otherwise on a GPU: of ties and infinities too, and of pictures of any dtype."""
    if name in ("Wavelet", "HybridAtlas"):
        pytest.importorskip({"Wavelet": "ptwt", "HybridAtlas": "skimage"}[name])
    allocator, what = given(name)
    what |= {"relevance": maps(kind, 2, ROWS, COLUMNS), "image": of_dtype(what["image"], dtype)}
    found = allocator(**what)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "on_host", lambda value: True)
        patch.setattr(device, "KIND", "cuda")
        expected = allocator(**what)
    assert torch.allclose(found.sites, expected.sites, atol=1e-6)
    assert torch.allclose(found.scores, expected.scores, atol=1e-6)
    assert found.patches.dtype == expected.patches.dtype
    assert torch.allclose(found.patches.float(), expected.patches.float(), atol=CLOSE[dtype])


@torch.no_grad()
def test_a_fixation_of_numbers_is_brought_once(capture: Callable[[bool], None]) -> None:
    allocator, what = given("FoveatedPyramid")
    expected = allocator(**what, fixation=(0.3, 0.7))
    capture(True)
    with Watch() as watch:
        found = allocator(**what, fixation=(0.3, 0.7))
    assert {wait.partition(" ")[0] for wait in watch.waits} <= {"lift_fresh"}  # a tensor of it, on the host
    assert torch.equal(found.sites, expected.sites)
    with pytest.raises(CaptureError):
        allocator(**what, fixation=(0.3, 0.71))


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
    """Or two, where there are levels to be made, after those that choose."""
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    allocator, what = given(name)
    what["image"] = of_dtype(what["image"], dtype)
    device.usable.cache_clear()
    tokens = allocator(**what)
    launched = [call[1].name for call in emulated.named("launch")]
    chosen = {
        "GridTopK": ["best"],
        "FoveatedPyramid": ["amounts", "peaks", "best", "reduce"],
        "SoftVortex": ["amounts", "vortices", "best", "vortices"],
    }[name]
    assert launched == [*chosen, "patches_of_levels"]
    emulated.calls.clear()
    expected = lod.gather_patches(what["image"], tokens.sites, PATCH, backend="torch")
    if name != "SoftVortex":  # whose tokens are blends
        assert float((tokens.patches.float() - expected.float()).abs().max()) <= CLOSE[dtype]
    one = allocator(**{key: value[0] for key, value in what.items()})
    assert torch.equal(one.patches, tokens.patches[0])


@torch.no_grad()
def test_patches_are_read_by_torch_where_kernels_fail(
    capture: Callable[[bool], None], emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is told once."""
    monkeypatch.setattr(by_kernel, "_failed", set())
    monkeypatch.setattr(ordering, "_by_kernel", lambda *_: None)  # which would be the first to fail
    allocator, what = given("GridTopK")
    emulated.fail["launch"] = LimitError("too large")
    expected = allocator(**what)  # no word of that: the next one may be smaller
    assert torch.equal(expected.patches, lod.gather_patches(what["image"], expected.sites, PATCH, backend="torch"))
    emulated.fail["launch"] = KernelError("no such kernel")
    capture(True)
    with pytest.raises(KernelError):  # torch would wait
        allocator(**what)
    capture(False)
    emulated.fail["launch"] = KernelError("no such kernel")
    with pytest.warns(GpuLodWarning, match="in plain torch for tensors on cpu; its kernels failed: no such kernel"):
        assert torch.equal(allocator(**what).patches, expected.patches)
    emulated.calls.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(allocator(**what).patches, expected.patches)
    assert not emulated.named("launch")


class Coarse(lod.allocate.GridTopK):
    """Somebody's own."""

    by = 1.0

    def choose(self, scene: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sites, scores = super().choose(scene)
        sites[..., 2] = self.by
        return sites, scores


@torch.no_grad()
def test_an_allocator_derived_of_one_of_the_finest_level(emulated: EmulatedDevice) -> None:
    device.usable.cache_clear()
    _, what = given("GridTopK")
    tokens = Coarse(37, PATCH)(**what)
    assert emulated.named("launch") and not Coarse.finest
    expected = lod.gather_patches(what["image"], tokens.sites, PATCH, backend="torch")
    assert torch.allclose(tokens.patches, expected, atol=1e-5)
    Coarse.by = -1.0
    with pytest.raises(InputError, match="levels from -1"):
        Coarse(37, PATCH)(**what)
    Coarse.by = 1.0


@torch.no_grad()
def test_a_changed_pyramid_is_refused(emulated: EmulatedDevice) -> None:
    device.usable.cache_clear()
    allocator, what = given("FoveatedPyramid")
    pyramid = lod.mipmap(what["image"], backend="torch")
    expected = allocator(**what).patches
    assert torch.allclose(allocator(pyramid, what["relevance"]).patches, expected, atol=1e-5)
    pyramid.levels[1].zero_()
    with pytest.raises(PyramidChangedError):
        allocator(pyramid, what["relevance"])


@torch.no_grad()
def test_huge_relevance_of_pixels_chooses_the_same_in_a_graph(capture: Callable[[bool], None]) -> None:
    allocator = lod.allocate.GridTopK(5, 4)
    relevance = torch.full((1, 16, 16), 1e38)
    relevance[:, :4, 4:8], relevance[:, 8:12, 12:] = 3e38, 2e38
    expected = allocator(relevance=relevance)
    capture(True)
    found = allocator(relevance=relevance)
    assert torch.equal(found.sites, expected.sites) and torch.equal(found.scores, expected.scores)


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
    monkeypatch.setattr(cached, "_constants", cached._Constants())
    allocator, what = given(name)
    first = allocator(**what)
    assert type(allocator).__module__ in {
        make.__module__ for kept in cached._constants._kept.values() for make, _ in kept
    }
    assert torch.equal(allocator(**what).sites, first.sites)


def test_tokens_are_cloned_detached_and_moved() -> None:
    allocator, what = given("PseudoLogPolar")
    tokens = allocator(**what)
    assert tokens.sites.requires_grad
    for other in (tokens.clone(), tokens.detach(), tokens.to("cpu")):
        assert all(map(torch.equal, _parts(other), _parts(tokens))) and other.patch == PATCH and other.features is None
    assert tokens.clone().scores.data_ptr() != tokens.scores.data_ptr() and tokens.clone().sites.requires_grad
    assert not tokens.detach().sites.requires_grad
    assert copy.deepcopy(tokens.detach()).sites.equal(tokens.sites)
    assert tokens.to("meta").patches.is_meta


@pytest.mark.parametrize(
    "wrong", [None, torch.zeros(2, 5, 3), (torch.zeros(2, 5, 3), None)], ids=["none", "one", "part"]
)
def test_what_choose_gives_is_checked(wrong: Any) -> None:
    class Wrong(lod.allocate.Allocator):
        def choose(self, scene: Any) -> Any:
            return wrong

    with pytest.raises(InputError, match=r"choose\(\) of Wrong gave a \w+; expected tensors \(sites, scores\)"):
        Wrong(5, PATCH)(relevance=torch.rand(2, ROWS, COLUMNS))


# -- constants --------------------------------------------------------------------------------------------------------


def test_a_constant_is_brought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_constants", cached._Constants())
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


def test_constants_are_ordinary_tensors_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.device("cpu")
    asks = {
        "functionalize": lambda x: torch.func.functionalize(lambda y: y + cached.numbers((1,), y.dtype, where))(x),
        "grad": lambda x: torch.func.grad(lambda y: (y * cached.numbers((1,), y.dtype, where)).sum())(x),
        "vmap": lambda x: torch.func.vmap(lambda y: y + cached.numbers((1,), y.dtype, where))(x),
        "Watch": lambda x: x + cached.numbers((1,), x.dtype, where),
    }
    for name, ask in asks.items():
        monkeypatch.setattr(cached, "_constants", cached._Constants())
        with Watch() if name == "Watch" else torch.enable_grad():
            ask(torch.ones(3))
        found = cached.numbers((1,), torch.float32, where)
        assert not torch._C._functorch.is_functorch_wrapped_tensor(found), name
        assert torch.zeros(1).add_(found).item() == 1 and type(found) is torch.Tensor, name


def test_allocators_run_after_they_were_transformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_constants", cached._Constants())
    allocator, what = given("Stratified")
    torch.func.functionalize(lambda image: allocator(image, what["relevance"]).sites)(what["image"])
    assert allocator(**what).sites.shape == (2, 37, 3)


def test_constants_that_were_used_least_recently_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_constants", cached._Constants())
    monkeypatch.setattr(cached, "MOST_BYTES", 3 * cached._LEAST_BYTES)
    where = torch.device("cpu")

    def ask(value: int) -> torch.Tensor:
        return cached.numbers((value,), torch.float64, where)

    one, two, three = ask(1), ask(2), ask(3)
    assert ask(1) is one  # and two is the oldest
    four = ask(4)
    assert ask(1) is one and ask(3) is three and ask(4) is four and ask(2) is not two
    large = cached.numbers(tuple(range(10**4)), torch.float64, where)  # more than all: alone
    assert len(cached._constants._kept[where]) == 1
    assert cached.numbers(tuple(range(10**4)), torch.float64, where) is large


def test_what_a_graph_reads_is_kept_for_good(capture: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "MOST_BYTES", cached._LEAST_BYTES)
    where = torch.device("cpu")
    there = cached.numbers((7,), torch.int64, where)
    capture(True)
    assert cached.numbers((7,), torch.int64, where) is there
    capture(False)
    cached.numbers((8,), torch.int64, where)  # takes its place
    assert cached.numbers((7,), torch.int64, where) is not there
    assert there is next(iter(cached._constants._captured.values()))


def test_what_can_be_done_without_is_made_when_it_is_asked_for_again(
    capture: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, made = torch.device("cpu"), []

    def make(count: int) -> torch.Tensor:
        made.append(count)
        return torch.arange(count)

    assert cached.known(where, make, 3) is None and not made
    capture(True)
    assert cached.known(where, make, 3) is None and cached.known(where, make, 4) is None and not made
    capture(False)
    found = cached.known(where, make, 3)
    assert found is not None and found.tolist() == [0, 1, 2] and made == [3]
    assert cached.known(where, make, 4) is None
    monkeypatch.setattr(cached, "MOST_BYTES", 0)
    capture(True)
    assert cached.known(where, make, 3) is found and made == [3]
    capture(False)
    monkeypatch.setattr(cached, "_MOST_ASKED", 1)
    assert cached.known(where, make, 5) is None and cached.known(where, make, 6) is None
    assert cached.known(where, make, 5) is None and len(cached._constants._asked) == 1


def test_sites_of_the_first_call_are_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_constants", cached._Constants())
    for name in ("GridTopK", "FoveatedPyramid", "TokenDAG", "PyramidTopK"):
        allocator, what = given(name)
        first, second, third = (allocator(**what) for _ in range(3))
        assert torch.equal(first.sites, second.sites) and torch.equal(first.sites, third.sites)
        assert not torch.equal(first.sites[0], first.sites[1])


def test_no_constant_is_brought_while_a_graph_is_captured(capture: Callable[[bool], None]) -> None:
    where = torch.device("cpu")
    there = cached.numbers((7, 8), torch.int64, where)
    capture(True)
    assert cached.numbers((7, 8), torch.int64, where) is there
    with pytest.raises(CaptureError, match="Call the function with"):
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


def test_a_constant_that_another_stream_reads_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory goes to nobody else before that stream is through."""
    now, told = ["first"], []
    monkeypatch.setattr(cached, "_constants", cached._Constants())
    monkeypatch.setattr(cached, "_stream", lambda device: now[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append((tensor, stream)))
    where = torch.device("cpu")
    there = cached.numbers((7,), torch.int64, where)
    assert cached.numbers((7,), torch.int64, where) is there and not told
    now[0] = "second"
    assert cached.numbers((7,), torch.int64, where) is there
    assert [(one is there, stream) for one, stream in told] == [(True, "second")]
