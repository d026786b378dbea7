"""Verbs as custom ops: in torch.compile, torch.export and torch.library's own checks."""

from __future__ import annotations

import io
import math
import random
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import CALLS, CASES
from images import DTYPES, noise
from torch._dynamo.testing import CompileCounterWithBackend

import gpu_lod as lod
from gpu_lod.errors import InputError, PyramidChangedError, UnsupportedError
from gpu_lod.operators import operators

CHECKOUT = Path(__file__).resolve().parents[1]
BACKENDS: list[Any] = ["auto", "torch", "gl"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> tuple[Callable[..., Any], Any]:
    """In one graph or not at all; and a counter of compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic), counter


# -- the ops -----------------------------------------------------------------------------------------------------------


def test_every_verb_is_called_here() -> None:
    assert {CALLS[name].verb.__name__ for name, _ in CASES} == set(operators)
    codes = {name: getattr(getattr(lod, name), "__code__", None) for name in lod.__all__}
    lines = {name: (code.co_filename, code.co_firstlineno) for name, code in codes.items() if code}
    assert {name for name, line in lines.items() if line == lines["mipmap"]} == set(operators)


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_opcheck(name: str, backend: Any) -> None:
    call = CALLS[name]
    operator = operators[call.verb.__name__]
    inputs = tuple(x.requires_grad_(operator.differentiable) for x in call.inputs())
    how = {"backend": backend} if call.backends else {}
    flat = operator.arguments(*call.arguments(*inputs), **how)
    torch.library.opcheck(operator.op, tuple(flat))
    if operator.differentiable:
        gradients = [torch.rand_like(output) for output in call.run(*inputs, backend=backend)]
        wanted = [any(tensor is x for x in inputs) for tensor in tensors(flat)]
        for x in inputs:
            x.requires_grad_(False)
        # Of the last output alone: of all of them the op's own check has run it.
        torch.library.opcheck(operator.adjoint, (gradients[-1:], [len(gradients) - 1], wanted, *flat))


def tensors(flat: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(flat) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_ops_have_fakes_of_every_dtype_and_layout(backend: Any, dtype: torch.dtype) -> None:
    batch = noise(2, 3, 13, 18, dtype=dtype)
    for image in (batch, batch[1], batch.to(memory_format=torch.channels_last), batch.transpose(-1, -2)):
        for verb in (lod.mipmap, lod.gaussian, lod.laplacian, lod.hiz):
            operator = operators[verb.__name__]
            torch.library.opcheck(
                operator.op, tuple(operator.arguments(image, backend=backend)), test_utils="test_faketensor"
            )
        flat = operators["log_polar"].arguments(image, (0.4, 0.5), 4, 6, backend=backend)
        torch.library.opcheck(operators["log_polar"].op, tuple(flat), test_utils="test_faketensor")
    changed: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (lod.mipmap, (), {"mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0]}),
        (lod.gather_patches, (torch.rand(4, 3), 4), {"mean": [0.1, 0.2, 0.3]}),
        (lod.gather_patches, (torch.rand(4, 3), 4), {"std": [1.0, 2.0, 3.0]}),
    ]
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        changed += [(lod.mipmap, (), {"dtype": kind}), (lod.gather_patches, (torch.rand(4, 3), 4), {"dtype": kind})]
        changed += [(lod.feature_maps, (), {"dtype": kind})] * (kind != torch.bfloat16)
    for verb, arguments, more in changed:  # of another dtype than the picture
        flat = operators[verb.__name__].arguments(batch, *arguments, **more, backend=backend)
        torch.library.opcheck(operators[verb.__name__].op, tuple(flat), test_utils="test_faketensor")
    (whole,) = lod.laplacian(batch, 1).levels
    flat = operators["collapse"].arguments(lod.Pyramid((whole,), "laplacian"), backend)
    assert operators["collapse"].op(*flat).data_ptr() != whole.data_ptr()


@pytest.mark.parametrize("name", operators)
def test_arguments_are_bound_as_inspect_binds_them(name: str) -> None:
    operator, choose = operators[name], random.Random(0)
    names = [*operator.signature.parameters]
    outcomes = set()
    for _ in range(300):
        args = tuple(range(choose.randint(0, len(names) + 1)))
        kwargs = {other: other for other in choose.sample([*names, "zoom"], choose.choice([0, 1, 2, len(names)]))}

        def bound() -> list[Any]:
            found = operator.signature.bind(*args, **kwargs)  # noqa: B023
            found.apply_defaults()
            return list(found.arguments.values())

        results = []
        for bind in (bound, lambda: operator._values(args, kwargs)):  # noqa: B023
            try:
                results.append(bind())
            except TypeError as error:
                results.append(str(error))
        assert results[0] == results[1], (args, kwargs)
        outcomes.add(type(results[0]))
    assert outcomes == {list, str}


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_compiled_verbs_equal_eager_ones(name: str, backend: Any, dynamic: bool) -> None:
    call = CALLS[name]
    run, _ = compiled(lambda *inputs: call.run(*inputs, backend=backend), dynamic)
    inputs = call.inputs()
    expected = call.run(*inputs, backend=backend)
    for one, two in zip(run(*inputs), expected, strict=True):
        assert torch.equal(one, two) and not one.requires_grad
    for x in inputs:
        x.requires_grad_()
    expected = call.run(*inputs, backend=backend)
    found = run(*inputs)
    assert [x.requires_grad for x in found] == [x.requires_grad for x in expected]
    if not expected[0].requires_grad:
        return
    ys = [torch.rand_like(x) for x in expected]
    eager = torch.autograd.grad(expected, inputs, ys, allow_unused=True)  # the sampler need not read every level
    for x, one, two in zip(inputs, torch.autograd.grad(found, inputs, ys), eager, strict=True):
        assert torch.allclose(one, torch.zeros_like(x) if two is None else two, atol=1e-6)


FORWARDS = {
    "mipmap": ("mipmap", "halve_mean"), "gaussian": ("gaussian", "_below"),
    "laplacian": ("laplacian", "gaussian_chain"), "collapse": ("laplacian", "added"),
    "log_polar": ("log_polar", "_made"), "foveate": ("foveate", "_made"),
    "log_polar of a pyramid": ("log_polar", "_made"), "foveate, anisotropic": ("foveate", "_made"),
    "gather_patches": ("gather_patches", "_made"), "inverse_log_polar": ("inverse_log_polar", "_made"),
    "oriented_energy": ("oriented_energy", "planewise"), "feature_maps": ("feature_maps", "channels"),
}  # fmt: skip
"""By the names of calls, what makes values in plain torch."""


@pytest.mark.parametrize("name", FORWARDS)
def test_a_backward_of_its_own_is_all_that_a_compiled_one_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, module, forward = CALLS[name], sys.modules[f"gpu_lod.{FORWARDS[name][0]}"], FORWARDS[name][1]
    inputs = [x.requires_grad_() for x in call.inputs()]
    expected = call.run(*inputs, backend="torch")
    run, _ = compiled(lambda *inputs: call.run(*inputs, backend="torch"), False)
    found = run(*inputs)
    weights = [torch.rand_like(x) for x in expected]
    eager = torch.autograd.grad(expected, inputs, weights, allow_unused=True)
    made = [torch.zeros_like(x) if two is None else two for x, two in zip(inputs, eager, strict=True)]
    assert getattr(module, forward)
    monkeypatch.setattr(module, forward, None)
    for one, two in zip(torch.autograd.grad(found, inputs, weights), made, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize(
    "verb",
    [
        lambda x, at: lod.log_polar(x, at[..., :2], 6, 10),
        lambda x, at: lod.foveate(x, at[..., :2], 0.1),
        lambda x, at: lod.foveate(x, at[..., :2], 0.1, anisotropy=3),
        lambda x, at: lod.gather_patches(x, at[:, None], 4),
        lambda x, at: lod.inverse_log_polar(x, at[..., :2], (11, 9)),
        lambda x, at: lod.feature_maps(x, at[..., :2]),
    ],
    ids=["log_polar", "foveate", "foveate, anisotropic", "gather_patches", "inverse_log_polar", "feature_maps"],
)
def test_gradients_in_places_beside_those_in_pictures(verb: Callable[..., torch.Tensor]) -> None:
    """These are a graph's, which reads levels."""
    inputs = [noise(2, 3, 40, 37).requires_grad_(), torch.tensor([[0.4, 0.3, 1.3], [0.7, 0.6, 0.6]]).requires_grad_()]
    expected = verb(*inputs)
    run, _ = compiled(verb)
    found = run(*inputs)
    weights = torch.rand_like(expected)
    eager = torch.autograd.grad(expected, inputs, weights)
    for one, two in zip(torch.autograd.grad(found, inputs, weights), eager, strict=True):
        assert bool(two.any()) and torch.allclose(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_levels_that_nobody_used_pass_nothing_on(backend: Any) -> None:
    """Zeros would: of zeros NaN makes NaN."""
    image = noise(1, 1, 64, 64)
    image[0, 0, 50, 50] = math.nan
    spoiled = []
    for wrap in (compiled, lambda function: (function, None)):
        run, _ = wrap(lambda x: lod.oriented_energy(x, 3, backend=backend)[0][..., :8, :8].sum())
        (gradient,) = torch.autograd.grad(run(x := image.clone().requires_grad_()), x)
        spoiled.append(int(gradient.isnan().sum()))
    assert spoiled[0] == spoiled[1] < 64 * 64 / 4


@pytest.mark.parametrize("name", CALLS)
def test_auto_is_asked_when_the_graph_runs(name: str) -> None:
    call = CALLS[name]
    run, _ = compiled(lambda *inputs: call.run(*inputs))
    inputs = call.inputs()
    for one, two in zip(run(*inputs), call.run(*inputs), strict=True):
        assert torch.equal(one, two)


CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mipmap": lambda x: lod.mipmap(x)[-1],
    "mipmap, some levels": lambda x: lod.mipmap(x, 4)[-1],
    "gaussian": lambda x: lod.gaussian(x)[-1],
    "laplacian and back": lambda x: lod.collapse(lod.laplacian(x, 3)),
    "oriented_energy": lambda x: lod.oriented_energy(x, 3)[-1],
    "log_polar": lambda x: lod.log_polar(lod.mipmap(x), (0.4, 0.6), 8, 8),
    "foveate": lambda x: lod.foveate(lod.mipmap(x), (0.4, 0.6)),
    "region_max": lambda x: lod.region_max(lod.hiz(x), torch.tensor([[0.1, 0.2, 0.6, 0.7]])),
}


@pytest.mark.parametrize("verb", CHAINS)
def test_sizes_of_as_many_levels_share_a_graph(verb: str) -> None:
    """Else a program of ten sizes compiles ten times, and torch gives up at the ninth."""
    run, counter = compiled(CHAINS[verb], dynamic=True)
    sizes = [(33, 40), (41, 60), (63, 38), (34, 35), (57, 50), (62, 61)]
    for height, width in sizes:
        image = noise(1, 1 if verb == "region_max" else 3, height, width)
        assert torch.equal(run(image), CHAINS[verb](image))
    # The first of a level of one pixel may differ where a pyramid is sampled.
    assert counter.frame_count <= (2 if verb in ("log_polar", "foveate") else 1)
    before = counter.frame_count
    image = noise(1, 1 if verb == "region_max" else 3, 100, 70)
    assert torch.equal(run(image), CHAINS[verb](image)) and counter.frame_count == before + 1


def chain(image: torch.Tensor, fixation: Any, backend: Any = "auto") -> Any:
    pyramid = lod.mipmap(image, backend=backend)
    return lod.log_polar(pyramid, fixation, 16, 32, backend=backend), pyramid[2] * 2, pyramid


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_of_verbs_is_one_graph(backend: Any, dynamic: bool) -> None:
    run, counter = compiled(lambda image, fixation: chain(image, fixation, backend), dynamic)
    for height, width in ((40, 37), (44, 39), (35, 60)):
        image, fixation = noise(2, 3, height, width).requires_grad_(), torch.rand(2, 2)
        polar, level, pyramid = run(image, fixation)
        expected = chain(image, fixation, backend)
        assert isinstance(pyramid, lod.Pyramid) and pyramid[0] is image and pyramid.generator == "compiled"
        for one, two in zip((polar, level, *pyramid), (*expected[:2], *expected[2]), strict=True):
            assert torch.equal(one, two)
        y, w = torch.rand_like(polar), torch.rand_like(pyramid[3])
        (one,) = torch.autograd.grad((polar, pyramid[3]), image, (y, w))
        (two,) = torch.autograd.grad((expected[0], expected[2][3]), image, (y, w))
        assert torch.allclose(one, two, atol=1e-6)
    assert counter.frame_count <= 4


def test_a_new_fixation_or_pyramid_does_not_compile_again() -> None:
    run, counter = compiled(lambda pyramid, fixation: lod.log_polar(pyramid, fixation, 4, 8))
    for upload in (False, False, True):
        pyramid = lod.mipmap(noise(3, 20, 24))
        fixation = torch.rand(2)
        expected = lod.log_polar(pyramid, fixation, 4, 8)
        assert torch.equal(run(pyramid.upload() if upload else pyramid, fixation), expected)
    assert counter.frame_count == 1


def test_fixations_may_be_numbers() -> None:
    image, x = noise(1, 3, 20, 24), torch.tensor(0.3)
    for fixation in ((0.3, 0.7), [0.3, 0.7], (x, 0.7), [[0.3, 0.7]], torch.tensor([0.3, 0.7], dtype=torch.float64)):
        run, _ = compiled(lambda image, given: (lod.log_polar(image, given, 4, 8), lod.cortical_sites(given, 9)))
        polar, sites = run(image, fixation)
        assert torch.equal(polar, lod.log_polar(image, (0.3, 0.7), 4, 8))
        assert torch.equal(sites.view(9, 3), lod.cortical_sites((0.3, 0.7), 9))


def test_a_pyramid_goes_in_and_comes_out() -> None:
    run, _ = compiled(lambda pyramid: (lod.collapse(pyramid), pyramid, lod.laplacian(pyramid[1])))
    pyramid = lod.laplacian(noise(1, 17, 20))
    back, same, other = run(pyramid)
    assert torch.equal(back, lod.collapse(pyramid)) and same is pyramid
    assert torch.equal(lod.collapse(other), lod.collapse(lod.laplacian(pyramid[1])))
    other[0].add_(1)
    with pytest.raises(PyramidChangedError):
        lod.collapse(other)


def test_one_level_is_the_image() -> None:
    image = noise(1, 9, 9)
    run, _ = compiled(lambda x: (lod.mipmap(x, 1), lod.laplacian(x, 1)[0] + 1))
    pyramid, plus = run(image)
    assert pyramid[0] is image and torch.equal(plus, image + 1)


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++")))
    or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C++ compiler for inductor, or no headers of Python",
)
def test_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # there may be code for other schemas of our ops
    image, fixation = noise(2, 3, 40, 37).to(memory_format=torch.channels_last).requires_grad_(), torch.rand(2, 2)

    def loss(image: torch.Tensor, fixation: torch.Tensor) -> torch.Tensor:
        polar, level, _ = chain(image * 2, fixation, "gl")
        return polar.sin().sum() + level.cos().sum() + allocator(image * 2).patches.square().sum()

    allocator = lod.allocate.GridTopK(5, 8)
    run = torch.compile(loss, fullgraph=True)
    one, two = run(image, fixation), loss(image, fixation)
    assert torch.allclose(one, two)
    (one,), (two,) = torch.autograd.grad(one, image), torch.autograd.grad(two, image)
    assert torch.allclose(one, two, atol=1e-5)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_while_tracing() -> None:
    """With fullgraph torch wraps what was raised; without it the function runs uncompiled and raises as ever."""
    image = noise(1, 9, 9)
    for bad, words in (
        (lambda x: lod.log_polar(x, (0.5, 0.5), 0, 4), "rings is 0"),
        (lambda x: lod.mipmap(x, 7), "levels is 7"),
        (lambda x: lod.mipmap(x[0]), "unsqueeze"),
        (lambda x: lod.mipmap([[[0.5]]]), "torch.tensor"),  # type: ignore[arg-type]
        (lambda x: lod.gaussian(x, backend="cpu"), "expected one of"),
        (lambda x: lod.collapse(lod.gaussian(x)), "gaussian pyramid"),
        (lambda x: lod.inverse_log_polar(x.double(), (0.5, 0.5), (4, 4)), "float64"),
        (lambda x: lod.cortical_sites(x[0, 0, :2], -3), "budget is -3"),
    ):
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            compiled(bad)[0](image)
        assert words in repr(caught.value.__cause__)
        with pytest.raises(InputError, match=words):
            torch.compile(bad, backend="aot_eager")(image)


def test_bad_values_are_refused_when_the_graph_runs() -> None:
    run, _ = compiled(lambda image, fixation: lod.log_polar(image, fixation, 4, 4))
    with pytest.raises(InputError, match=r"holds 2\.0"):
        run(noise(1, 9, 9), torch.tensor([0.5, 2.0]))


def test_gl_gives_no_gradient_in_a_fixation() -> None:
    fixation = torch.tensor([0.5, 0.4], requires_grad=True)
    run = torch.compile(lambda x, f: lod.log_polar(x, f, 4, 4, backend="gl"), backend="aot_eager")
    with pytest.raises(UnsupportedError, match="fixation"):
        run(noise(1, 9, 9), fixation)


def test_what_compiled_verbs_cannot_do_is_never_silent() -> None:
    image = noise(1, 9, 9).requires_grad_()

    def tangent(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda x: lod.mipmap(x)[1], (x,), (x,))[1]

    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(tangent)[0](image)
    assert "forward-mode" in repr(caught.value.__cause__)
    assert torch.allclose(torch.compile(tangent, backend="aot_eager")(image), tangent(image))  # runs uncompiled
    for transform in (torch.func.vmap, torch.func.grad):
        run = transform(lambda x: lod.log_polar(x, (0.5, 0.5), 4, 4).sum())
        x = noise(2, 3, 9, 9) if transform is torch.func.vmap else noise(3, 9, 9)
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            compiled(run)[0](x)
        assert "torch.func" in repr(caught.value.__cause__)
        assert torch.equal(torch.compile(run, backend="aot_eager")(x), run(x))
    operator = operators["mipmap"]
    level = operator.op(*operator.arguments(image))[0]
    with pytest.raises(UnsupportedError, match="gradients of gradients"):
        torch.autograd.grad(level.square().sum(), image, create_graph=True)


def test_upload_in_compiled_code() -> None:
    """There is no texture in a graph, so it does nothing."""
    image = noise(1, 9, 9)
    run, _ = compiled(lambda x: lod.log_polar(lod.mipmap(x).upload(), (0.5, 0.5), 4, 4))
    assert torch.equal(run(image), lod.log_polar(image, (0.5, 0.5), 4, 4))


# -- torch.export ------------------------------------------------------------------------------------------------------


class Retina(torch.nn.Module):
    def forward(self, image: torch.Tensor, fixation: torch.Tensor) -> torch.Tensor:
        return lod.log_polar(image, fixation, 6, 10)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    batch = torch.export.Dim("batch")
    example = (noise(2, 3, 20, 24), torch.rand(2, 2))
    shapes = ({0: batch}, {0: batch})
    program = torch.export.export(Retina(), example, dynamic_shapes=shapes, strict=strict)
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"][-1] == (
        "gpu_lod.log_polar.default"
    )
    image, fixation = noise(3, 3, 20, 24), torch.rand(3, 2)
    assert torch.equal(program.module()(image, fixation), Retina()(image, fixation))


class Fovea(torch.nn.Module):
    def forward(self, pyramid: lod.Pyramid, tokens: lod.TokenSet) -> tuple[torch.Tensor, lod.TokenSet]:
        return lod.foveate(pyramid, (0.4, 0.6)), tokens.take(torch.arange(3))


@pytest.mark.parametrize("strict", [False, True])
def test_pyramids_and_token_sets_are_inputs_of_programs(strict: bool) -> None:
    """Pyramids that something else made, too."""
    image = noise(2, 3, 20, 24)
    tokens = lod.allocate.GridTopK(5, 4)(image)
    program = torch.export.export(Fovea(), (lod.mipmap(image, backend="torch"), tokens), strict=strict)
    torch.export.save(program, file := io.BytesIO())
    file.seek(0)
    loaded = torch.export.load(file).module()
    for pyramid in (lod.mipmap(noise(2, 3, 20, 24), backend=backend) for backend in ("torch", "gl")):
        view, few = loaded(pyramid, tokens)
        assert torch.equal(view, lod.foveate(pyramid, (0.4, 0.6)))
        assert isinstance(few, lod.TokenSet) and torch.equal(few.patches, tokens.patches[:, :3])
    with pytest.raises(Exception, match="spec"):
        loaded(lod.hiz(noise(2, 3, 20, 24)), tokens)


class Chained(torch.nn.Module):
    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return CHAINS[self.verb](image)


@pytest.mark.parametrize("verb", CHAINS)
def test_programs_take_batches_and_sizes_of_as_many_levels(verb: str) -> None:
    channels = 1 if verb == "region_max" else 3
    sides = {0: torch.export.Dim("batch", max=64)}
    sides |= {dim: torch.export.Dim(f"side{dim}", min=33, max=63) for dim in (2, 3)}
    example = (noise(3, channels, 40, 56),)
    program = torch.export.export(Chained(verb), example, dynamic_shapes=(sides,), strict=False).module()
    for batch, height, width in ((3, 40, 56), (1, 33, 63), (5, 61, 34)):
        image = noise(batch, channels, height, width)
        assert torch.equal(program(image), CHAINS[verb](image))
