"""Allocators in torch.compile and torch.export: one custom op, which does what a call does."""

from __future__ import annotations

import copy
import gc
import io
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import scripts
import torch
import torch.nn.utils.prune
from images import noise
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import gpu_lod as lod
from gpu_lod import allocate
from gpu_lod.allocate import compiled
from gpu_lod.errors import InputError, UnsupportedError

NAMES = allocate.names()
P, K = 8, 9
OTHERS = {
    "FoveatedPyramid": {"e0": 0.2, "max_level": 2},
    "FrequencyAware": {"split": (2, 2, 2, 3)},
    "GridTopK": {"pool": "max"},
    "PseudoLogPolar": {"sigma": 0.2, "temperatures": (2.0, 0.5)},
    "PyramidTopK": {"weights": (1.0, 0.5)},
    "SoftVortex": {"vortices": 3},
    "Spiral": {"kind": "fibonacci"},
    "Wavelet": {"wavelet": "db2"},
}
"""Arguments of their own, not as by default."""
FIELDS = ("sites", "scores", "patches", "weights")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def in_one_graph(function: Callable[..., Any], dynamic: bool | None = None) -> tuple[Callable[..., Any], Any]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic), counter


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """An allocator, and what it needs besides a picture and relevance."""
    queries = {"query": noise(2, 512)} if name == "AdaptiveStratified" else {}
    return allocate.make(name, K, P), queries


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return noise(2, 3, 64, 72), noise(2, 8, 9)


def there(tokens: lod.TokenSet) -> list[torch.Tensor]:
    return [value for value in (getattr(tokens, name) for name in FIELDS) if value is not None]


def flattened(allocator: Any, *batch: Any) -> list[Any]:
    """The op's arguments, as a graph has them."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled._operator, "traced", lambda *flat: found.extend(flat) or pytest.fail("traced"))
        with pytest.raises(pytest.fail.Exception):
            compiled.traced(allocator, *batch, *[None] * (7 - len(batch)))
    return compiled._operator.arguments(*found)


def same(one: lod.TokenSet, other: lod.TokenSet) -> None:
    assert (one.patch, [getattr(one, name) is None for name in FIELDS]) == (
        other.patch,
        [getattr(other, name) is None for name in FIELDS],
    )
    for found, expected in zip(there(one), there(other), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_graph_is_told_is_what_comes(name: str) -> None:
    """Shapes and dtypes, with a picture and without one; whose sites have gradients; and what it was made with."""
    arguments = OTHERS.get(name, {})
    allocator, (image, relevance) = allocate.make(name, K, P, **arguments), given()
    query = noise(2, 512) if name == "AdaptiveStratified" else None
    for given_image in (image, image[0]) if "image" in allocator.needs else (image, image[0], None):
        single = given_image is not None and given_image.ndim == 3
        maps = [x if x is None or not single else x[0] for x in (relevance, query)]
        flat = flattened(allocator, given_image, *maps)
        torch.library.opcheck(compiled._operator.op, tuple(flat), test_utils="test_faketensor")
        expected = there(allocator(given_image, *maps))
        for one, other in zip(compiled._operator.op(*flat), expected, strict=True):
            assert torch.equal(one, other)
    if isinstance(allocator, torch.nn.Module):
        assert [name for name, _ in allocator.named_parameters()] == [*allocator.learns]
    sites = allocator(image.requires_grad_(), relevance.requires_grad_(), query).sites
    assert sites.requires_grad == allocator.moves


LIKE_OTHERS = ["AdaptiveStratified", "Downsample", "GridTopK", "PseudoLogPolar", "SoftVortex", "TokenDAG"]
"""One of each kind: by what it needs, learns, and gives."""


@pytest.mark.parametrize("name", LIKE_OTHERS)
def test_allocators_and_their_gradients(name: str) -> None:
    """Those of the picture, of relevance and of what is learned."""
    allocator, more = made(name)
    run, counter = in_one_graph(lambda *images: allocator(*images, **more))
    found, start = [], given()
    for call in (run, lambda *images: allocator(*images, **more)):
        images = [x.clone().requires_grad_() for x in start]
        tokens = call(*images)
        leaves = images + (list(allocator.parameters()) if isinstance(allocator, torch.nn.Module) else [])
        moving = tokens.sites if type(allocator).moves else tokens.scores
        energy = tokens.scores.square().sum() + tokens.patches.square().sum() + moving.square().sum()
        gradients = torch.autograd.grad(energy, leaves, allow_unused=True, materialize_grads=True)
        found.append((tokens, gradients))
    (tokens, gradients), (expected, slopes) = found
    same(tokens, expected)
    assert tokens.sites.requires_grad == expected.sites.requires_grad
    for one, other in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["LogPolar", "PseudoLogPolar", "FoveatedPyramid"])
def test_gradients_in_the_fixation(name: str) -> None:
    """Of sites and of what is read there, and none where an eager call has none."""
    allocator, _ = made(name)
    run, _ = in_one_graph(lambda image, relevance, at: allocator(image, relevance, fixation=at))
    image, relevance = given()
    slopes = []
    for call in (run, lambda image, relevance, at: allocator(image, relevance, fixation=at)):
        at = torch.tensor([[0.4, 0.6], [0.7, 0.2]], requires_grad=True)
        tokens = call(image, relevance, at)
        moving = tokens.sites.square().sum() if tokens.sites.requires_grad else torch.zeros(())
        gradient = torch.autograd.grad(moving + 0 * at.sum(), at, retain_graph=True)[0]
        slopes.append((tokens.sites.requires_grad, gradient))
    assert slopes[0][0] == slopes[1][0] == (name != "FoveatedPyramid")
    torch.testing.assert_close(slopes[0][1], slopes[1][1])
    if name == "LogPolar":
        assert (gradient != 0).all()
        assert not run(image, relevance.requires_grad_(), at.detach()).sites.requires_grad


@pytest.mark.parametrize("name", ["GridTopK", "SoftVortex", "PseudoLogPolar", "TokenDAG"])
def test_what_they_are_given(name: str) -> None:
    allocator, _ = made(name)
    image, relevance = given()
    batches: list[tuple[Any, ...]] = [
        (image,),
        ((image * 255).byte(), relevance),
        (image.half(), relevance),
        (image[0], relevance[0]),
        (image[:, :1, :61, :70], relevance),
        (lod.mipmap(image), relevance),
        (image, torch.nn.functional.interpolate(relevance[:, None], (64, 72))[:, 0].double()),
        (image, relevance, None, None, None, [0.5] * 3, [0.2] * 3),
        ((image * 255).byte(), relevance, None, None, None, [0.5] * 3, None),
        ((image * 255).byte(), relevance, None, None, None, None, [0.5] * 3),
    ]
    if name != "TokenDAG":
        batches += [(None, relevance), (None, relevance[0])]
    if name == "PseudoLogPolar":
        batches += [(image, None, None, place) for place in ((0.2, 0.7), torch.tensor([[0.2, 0.7], [0.4, 0.4]]))]
    for batch in batches:
        expected = allocator(*batch)
        flat = flattened(allocator, *batch)
        torch.library.opcheck(compiled._operator.op, tuple(flat), test_utils="test_faketensor")
        for one, other in zip(compiled._operator.op(*flat), there(expected), strict=True):
            assert torch.equal(one, other)
    run, _ = in_one_graph(allocator.__call__)
    for batch in (batches[3], batches[5], batches[7], batches[-1]):
        expected = allocator(*batch)
        same(run(*batch), expected)
        with torch.autocast("cpu"):
            same(run(*batch), expected)


def test_labels_and_queries() -> None:
    image, _ = given()
    labels = (torch.arange(64)[:, None] // 20 * 3 + torch.arange(72) // 25).expand(2, -1, -1)
    atlas = allocate.HybridAtlas(K, P)
    same(in_one_graph(lambda x, its: atlas(x, labels=its))[0](image, labels), atlas(image, labels=labels))
    adaptive, query = allocate.AdaptiveStratified(K, P, width=5), noise(2, 5)
    same(in_one_graph(lambda x, asked: adaptive(x, query=asked))[0](image, query), adaptive(image, query=query))


@pytest.mark.parametrize("name", ["GridTopK", "SoftVortex"])
def test_opcheck(name: str) -> None:
    allocator, _ = made(name)
    image, relevance = (x.requires_grad_() for x in given())
    flat = flattened(allocator, image, relevance)
    torch.library.opcheck(compiled._operator.op, tuple(flat), rtol=1e-4, atol=1e-5)


# -- graphs and allocators that change ---------------------------------------------------------------------------------


def test_another_allocator_has_a_graph_of_its_own() -> None:
    image, relevance = given()
    run, counter = in_one_graph(lambda allocator, *images: allocator(*images))
    one, other = allocate.GridTopK(K, P), allocate.FoveatedPyramid(K, P)
    for allocator in (one, other, one, copy.copy(one), copy.deepcopy(one)):
        same(run(allocator, image, relevance), allocator(image, relevance))
    assert 2 <= counter.frame_count <= 4


def test_settings_are_those_of_the_call() -> None:
    """Also while a backward runs, and where the function itself changes them."""
    image, relevance = given()
    allocator = allocate.PseudoLogPolar(K, P)

    def annealed(image: torch.Tensor, temperature: float) -> lod.TokenSet:
        allocator.temperatures = temperature, temperature / 2
        allocator.train()
        tokens = allocator(image)
        allocator.eval()
        return tokens

    run = torch.compile(annealed, fullgraph=True, backend="aot_eager")
    for temperature in (1.0, 0.1, 3.0, 0.7):
        gradients = []
        for call in (run, annealed):
            tokens = call(image, temperature)
            allocator.temperatures = 5.0, 5.0
            energy = tokens.patches.square().sum() + tokens.sites.square().sum()
            gradients.append((tokens, torch.autograd.grad(energy, allocator.offsets)[0]))
        same(gradients[0][0], gradients[1][0])
        torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-4, atol=1e-5)

    top = allocate.GridTopK(K, P)

    def fewer(relevance: torch.Tensor) -> lod.TokenSet:
        before, top.budget = top.budget, 5
        tokens = top(image, relevance)
        top.budget = before
        return tokens

    assert in_one_graph(fewer)[0](relevance).budget == 5 and top.budget == K
    run, _ = in_one_graph(lambda *images: top(*images))
    for budget in (K, 5, 7):
        top.budget = budget
        same(run(image, relevance), top(image, relevance))


def test_regions_that_share_a_graph() -> None:
    image, relevance = given()
    allocators = torch.nn.ModuleList(allocate.SoftVortex(K, P, width=width, vortices=4) for width in (0.1, 0.5, 1.0))

    @torch.compiler.nested_compile_region
    def region(allocator: Any, *images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(there(allocator(*images)))

    with torch.no_grad():
        run, _ = in_one_graph(lambda *images: [region(allocator, *images) for allocator in allocators])
        for found, allocator in zip(run(image, relevance), allocators, strict=True):
            for one, other in zip(found, there(allocator(image, relevance)), strict=True):
                assert torch.equal(one, other)


def test_what_hangs_on_an_allocator_is_left_alone() -> None:
    """Nobody copies a model whose method is a hook of the allocator, or what it was given to keep."""
    image, relevance = given()

    class Owner:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # which nothing can copy
            self.allocator = allocate.SoftVortex(K, P)
            self.allocator.register_forward_hook(self.hook)

        def hook(self, *_: Any) -> None: ...

    owner = Owner()
    owner.allocator.last = owner.allocator(image).scores
    slopes = []
    for call in (torch.compile(owner.allocator, backend="aot_eager"), owner.allocator):
        loss = call(image, relevance).patches.square().sum()
        slopes.append(torch.autograd.grad(loss, list(owner.allocator.parameters())))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_allocators_made_on_the_way() -> None:
    """In the graph, or gone when the backward comes."""
    image, relevance = given()
    run, _ = in_one_graph(lambda *images: allocate.GridTopK(5, P)(*images))
    same(run(image, relevance), allocate.GridTopK(5, P)(image, relevance))

    def loss(image: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor:
        allocator = allocate.SoftVortex(K, P)
        return call(lambda x: allocator(x, relevance).patches.square().sum())(image)

    slopes = []
    for call in (lambda function: in_one_graph(function)[0], lambda function: function):
        leaf = image.clone().requires_grad_()
        found = loss(leaf, call)
        torch._dynamo.reset()
        gc.collect()
        slopes.append(torch.autograd.grad(found, leaf)[0])
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


def test_threads_share_a_graph() -> None:
    images = [noise(2, 3, 64, 72) for _ in range(4)]
    allocators = [allocate.SoftVortex(K, P) for _ in images]
    for number, allocator in enumerate(allocators):
        allocator.log_radii.data -= 0.2 * number
    runs = [torch.compile(allocator, backend="aot_eager") for allocator in allocators]

    def slopes(run: Any, allocator: Any, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(run(image).patches.square().sum(), list(allocator.parameters()))

    expected = [slopes(*each) for each in zip(allocators, allocators, images, strict=True)]
    for each in zip(runs, allocators, images, strict=True):
        slopes(*each)  # compiled one after the other
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            for found, others in zip(threads.map(slopes, runs, allocators, images), expected, strict=True):
                for one, other in zip(found, others, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_learned_moves_on() -> None:
    """Trained in a graph as without one, a step after the other."""
    image, relevance = given()
    losses = []
    for whether in (True, False):
        allocator = allocate.SoftVortex(K, P)
        run = in_one_graph(lambda *images: allocator(*images))[0] if whether else allocator  # noqa: B023
        optimizer = torch.optim.Adam(allocator.parameters(), 0.05)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = run(image, relevance).patches.square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)
    assert len({*losses[0]}) == 4


def test_a_module_of_which_one_is_part() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.allocator = allocate.VortexLearned(K, P)
            self.head = torch.nn.Linear(3 * P * P, 4)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            tokens = self.allocator(image)
            return (self.head(tokens.patches.flatten(2)) * tokens.scores[..., None]).sum(1)

    model, (image, _) = Model(), given()
    calls: list[str] = []
    model.allocator.register_forward_hook(lambda *_: calls.append("hook"))
    found = torch.compile(model, backend="aot_eager")(image)
    assert calls == ["hook"]
    found.sum().backward()
    slopes = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = model(image)
    expected.sum().backward()
    torch.testing.assert_close(found, expected)
    for one, parameter in zip(slopes, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


def test_batches_and_sizes_that_change() -> None:
    allocator, first = allocate.TokenDAG(K, P), 0
    run, counter = in_one_graph(lambda *images: allocator(*images), dynamic=True)
    for batch, height, width in ((2, 64, 72), (3, 64, 72), (2, 57, 90), (5, 129, 40)):
        image, relevance = noise(batch, 3, height, width), noise(batch, math.ceil(height / P), math.ceil(width / P))
        same(run(image, relevance), allocator(image, relevance))
        first = counter.frame_count if batch == 2 and height == 64 else first
    assert counter.frame_count == first  # torch begins again once where it makes a symbol of a number


class First(allocate.Allocator):
    calls = 0

    def choose(self, scene: allocate.Scene) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        index = torch.arange(self.budget).expand(scene.batch, -1)
        return scene.sites(0, index), torch.ones(scene.batch, self.budget)


class GridTopK(allocate.GridTopK):
    """Of the same name as the package's."""

    def _pooled(self, values: torch.Tensor) -> torch.Tensor:
        return -super()._pooled(values)


@pytest.mark.filterwarnings("ignore")  # torch's, of what it cannot trace
@pytest.mark.parametrize("kind", ["own", "derived", "changed", "pruned"])
def test_allocators_of_your_own_break_the_graph(kind: str) -> None:
    """What they do besides choosing, nobody knows."""
    kinds = {"own": First, "derived": GridTopK, "changed": allocate.GridTopK, "pruned": allocate.VortexLearned}
    allocator: Any = kinds[kind](K, P)
    if kind == "pruned":
        torch.nn.utils.prune.random_unstructured(allocator, "log_strengths", 3)
    if kind == "changed":
        allocator.choose = First(K, P).choose
    image, relevance = noise(2, 3, 64, 72), noise(2, 64, 72)
    expected = allocator(image, relevance)
    same(torch.compile(lambda *images: allocator(*images), backend="aot_eager")(image, relevance), expected)
    if kind == "own":
        assert allocator.calls == 2
    with pytest.raises(Exception, match=r"(?i)dynamo|guard|unsupported"):
        in_one_graph(lambda *images: allocator(*images))[0](image, relevance)


def test_what_is_refused() -> None:
    image, relevance = given()
    allocator = allocate.GridTopK(K, P)
    run, _ = in_one_graph(lambda *images: allocator(*images))
    with pytest.raises(InputError, match="relevance is "):
        run(image, relevance[:, :3])
    with pytest.raises(InputError, match="relevance holds NaN"):
        run(image, relevance * math.nan)
    with pytest.raises(InputError, match="needs an image, or a relevance map"):
        torch.compile(lambda: allocator(None, None), backend="aot_eager")()
    with pytest.raises(InputError, match="image has shape"):
        torch.compile(allocator.__call__, backend="aot_eager")(image[0, 0])
    with pytest.raises(UnsupportedError, match="given a complex"):
        width = allocate.SoftVortex(K, P)
        width.width = 1j  # type: ignore[assignment]
        torch.export.export(Front(width), (image,), strict=False)
    with pytest.raises(UnsupportedError, match=r"log_radii.*Export it with this version"):
        flat = flattened(allocate.SoftVortex(K, P), image)
        flat[1] = flat[1].replace("strengths", "weights")
        compiled._operator.op(*flat)
    with pytest.raises(UnsupportedError, match="this version has none"):
        flat = flattened(allocator, image)
        flat[1] = flat[1].replace("GridTopK", "Later")
        compiled._operator.op(*flat)
    with pytest.raises(InputError, match="the budget is 100"):
        large = allocate.GridTopK(100, P)
        in_one_graph(lambda *images: large(*images))[0](image, relevance)
    same(run(image, relevance), allocator(image, relevance))


# -- programs ----------------------------------------------------------------------------------------------------------


class Front(torch.nn.Module):
    def __init__(self, allocator: Any) -> None:
        super().__init__()
        self.allocator = allocator

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(there(self.allocator(image)))


def program(module: torch.nn.Module, image: torch.Tensor, strict: bool = False, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (image,), strict=strict, **how), file)
    return file.getvalue()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["FrequencyAware", "GridTopK", "PseudoLogPolar", "SoftVortex"])
def test_exported(name: str, strict: bool) -> None:
    """With their settings, and what they have learned."""
    module, (image, _) = Front(allocate.make(name, K, P, **OTHERS.get(name, {}))).eval(), given()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.rand_like(parameter)
    expected = module(image)
    saved = program(module, image, strict)
    del module
    gc.collect()
    loaded = torch.export.load(io.BytesIO(saved)).module()
    for one, other in zip(loaded(image), expected, strict=True):
        assert torch.equal(one, other)


def test_exported_for_any_size() -> None:
    module = Front(allocate.TokenDAG(K, P))
    sides = {0: Dim("batch", max=64), 2: Dim("height", min=32, max=512), 3: Dim("width", min=32, max=512)}
    saved = program(module, given()[0], dynamic_shapes={"image": sides})
    loaded = torch.export.load(io.BytesIO(saved)).module()
    for shape in ((2, 3, 64, 72), (1, 3, 57, 90), (5, 3, 129, 40)):
        image = noise(*shape)
        for one, other in zip(loaded(image), module(image), strict=True):
            assert torch.equal(one, other)


def test_another_process_runs_a_program(tmp_path: Any) -> None:
    module, (image, _) = Front(allocate.SoftVortex(K, P, vortices=3)).eval(), given()
    (tmp_path / "front.pt2").write_bytes(program(module, image))
    torch.save((image, module(image)), tmp_path / "expected.pt")
    scripts.succeed(f"""
        import warnings
        import torch
        import gpu_lod.allocate
        warnings.simplefilter("ignore")
        image, expected = torch.load({str(tmp_path / "expected.pt")!r})
        found = torch.export.load({str(tmp_path / "front.pt2")!r}).module()(image)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    """)
