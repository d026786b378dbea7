"""Allocators in torch.compile and torch.export: one custom op, which does what a call does."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import scripts
import torch
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
    parameters = list(allocator.parameters()) if isinstance(allocator, torch.nn.Module) else []
    for names in (f"#{id(allocator)}", compiled._known_as(allocator)):
        known = names, K, P, allocator.blends, allocator.weighs
        for given_image in (image, image[0]) if "image" in allocator.needs else (image, image[0], None):
            single = given_image is not None and given_image.ndim == 3
            maps = [x if x is None or not single else x[0] for x in (relevance, query)]
            flat = compiled._operator.arguments(parameters, *known, given_image, *maps)
            torch.library.opcheck(compiled._operator.op, tuple(flat), test_utils="test_faketensor")
            expected = there(allocator(given_image, *maps))
            for one, other in zip(compiled._operator.op(*flat), expected, strict=True):
                assert torch.equal(one, other)
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
    parameters = list(allocator.parameters()) if isinstance(allocator, torch.nn.Module) else []
    for batch in batches:
        expected = allocator(*batch)
        known = f"#{id(allocator)}", K, P, allocator.blends, allocator.weighs
        flat = compiled._operator.arguments(parameters, *known, *batch)
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
    parameters = list(allocator.parameters()) if isinstance(allocator, torch.nn.Module) else []
    known = f"#{id(allocator)}", K, P, allocator.blends, allocator.weighs
    flat = compiled._operator.arguments(parameters, *known, image, relevance)
    torch.library.opcheck(compiled._operator.op, tuple(flat), rtol=1e-4, atol=1e-5)


# -- graphs and allocators that change ---------------------------------------------------------------------------------


def test_another_allocator_has_a_graph_of_its_own() -> None:
    image, relevance = given()
    run, counter = in_one_graph(lambda allocator, *images: allocator(*images))
    one, other = allocate.GridTopK(K, P), allocate.FoveatedPyramid(K, P)
    for allocator in (one, other, one, copy.copy(one), copy.deepcopy(one)):
        same(run(allocator, image, relevance), allocator(image, relevance))
    assert 2 <= counter.frame_count <= 4


def test_settings_are_looked_at_when_the_graph_runs() -> None:
    image, relevance = given()
    allocator = allocate.PseudoLogPolar(K, P)
    run, _ = in_one_graph(lambda *images: allocator(*images))
    for temperatures in ((1.0, 0.1), (0.3, 2.0)):
        allocator.temperatures = temperatures
        for training in (True, False):
            allocator.train(training)
            same(run(image, relevance), allocator(image, relevance))
    top = allocate.GridTopK(K, P)
    run, _ = in_one_graph(lambda *images: top(*images))
    for budget in (K, 5, 7):
        top.budget = budget
        assert run(image, relevance).budget == budget
        same(run(image, relevance), top(image, relevance))


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
    allocator = allocate.TokenDAG(K, P)
    run, counter = in_one_graph(lambda *images: allocator(*images), dynamic=True)
    for batch, height, width in ((2, 64, 72), (3, 64, 72), (2, 57, 90), (5, 129, 40)):
        image, relevance = noise(batch, 3, height, width), noise(batch, math.ceil(height / P), math.ceil(width / P))
        same(run(image, relevance), allocator(image, relevance))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore")  # torch's, of what it cannot trace
def test_allocators_of_your_own_break_the_graph() -> None:
    """What they do besides choosing, nobody knows."""

    class First(allocate.Allocator):
        calls = 0

        def choose(self, scene: allocate.Scene) -> tuple[torch.Tensor, ...]:
            self.calls += 1
            index = torch.arange(self.budget).expand(scene.batch, -1)
            return scene.sites(0, index), torch.ones(scene.batch, self.budget)

    allocator, (image, relevance) = First(K, P), given()
    expected = allocator(image, relevance)
    same(torch.compile(lambda *images: allocator(*images), backend="aot_eager")(image, relevance), expected)
    assert allocator.calls == 2


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
    with pytest.raises(InputError, match="the budget is 100"):
        large = allocate.GridTopK(100, P)
        in_one_graph(lambda *images: large(*images))[0](image, relevance)
    same(run(image, relevance), allocator(image, relevance))


def test_graphs_keep_no_allocator() -> None:
    image, relevance = given()
    allocator = allocate.GridTopK(K, P)
    flat = compiled._operator.arguments([], f"#{id(allocator)}", K, P, False, False, image, relevance)
    assert len(compiled._operator.op(*flat)) == 3
    del allocator
    gc.collect()
    with pytest.raises(UnsupportedError, match="the graph's allocator is gone"):
        compiled._operator.op(*flat)


# -- programs ----------------------------------------------------------------------------------------------------------


class Front(torch.nn.Module):
    def __init__(self, allocator: Any) -> None:
        super().__init__()
        self.allocator = allocator

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(there(self.allocator(image)))


def program(module: torch.nn.Module, image: torch.Tensor, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (image,), strict=False, **how), file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["FrequencyAware", "GridTopK", "PseudoLogPolar", "SoftVortex"])
def test_exported(name: str) -> None:
    """With their settings, and what they have learned."""
    module, (image, _) = Front(allocate.make(name, K, P, **OTHERS.get(name, {}))).eval(), given()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.rand_like(parameter)
    expected = module(image)
    saved = program(module, image)
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


def test_strict_export_is_refused() -> None:
    with pytest.raises(Exception, match="strict=False alone"):
        torch.export.export(Front(allocate.GridTopK(K, P)), (given()[0],), strict=True)
