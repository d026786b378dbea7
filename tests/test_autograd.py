"""Gradients of every verb, on every backend, and under torch.func."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from calls import CALLS, CASES, FIXATION, LINEAR, LINEAR_CASES, SITES
from images import noise, smooth
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import gpu_lod as lod
from gpu_lod import dispatch
from gpu_lod.errors import InputChangedError, InputError, PyramidChangedError, UnsupportedError
from gpu_lod.foveate import reference as foveated
from gpu_lod.gaussian import reference as gaussian_chain
from gpu_lod.laplacian import collapse_reference
from gpu_lod.laplacian import reference as laplacian_chain
from gpu_lod.log_polar import reference as samples
from gpu_lod.log_polar import ring_rule
from gpu_lod.mipmap import reference as mip_chain
from gpu_lod.pyramid import burt_sizes
from gpu_lod.saved_tensors import watched

BOUNDS = ("region_max", "region_min", "cull")
"""Verbs without gradients."""
GRADIENTS = [(name, backend) for name, backend in CASES if name not in BOUNDS]
SAMPLED = ("log_polar", "foveate", "gather_patches")
"""Verbs whose texels a texture unit weighs."""
SAMPLERS: dict[str, Callable[..., torch.Tensor]] = {
    "log_polar": lambda x, f, **how: lod.log_polar(x, f, 6, 10, **how),
    "log_polar of a pyramid": lambda x, f, **how: lod.log_polar(lod.mipmap(x), f, 6, 10, **how),
    "foveate": lambda x, f, **how: lod.foveate(x, f, 0.1, **how),
    "foveate, anisotropic": lambda x, f, **how: lod.foveate(x, f, 0.03, anisotropy=3, **how),
    "inverse_log_polar": lambda x, f, **how: lod.inverse_log_polar(x, f, (11, 9), **how),
}


def gradients(name: str, backend: Any, inputs: tuple[torch.Tensor, ...], **how: Any) -> tuple[torch.Tensor, ...]:
    outputs = CALLS[name].run(*inputs, backend=backend)
    energy = sum((output**2).sum() for output in outputs)
    return torch.autograd.grad(energy, inputs, allow_unused=True, materialize_grads=True, **how)  # type: ignore[arg-type]


# -- adjoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), LINEAR_CASES)
def test_backward_is_the_adjoint(name: str, backend: Any, sample_error: float) -> None:
    """<A x, y> = <x, A' y>, for y near A x: then both are sums of squares, of which a part in 10^5 is no small one."""
    weighed = backend == "gl" and name.startswith(SAMPLED)
    if weighed and sample_error and "anisotropic" in name:
        pytest.skip("texture units have anisotropic filters of their own")
    xs = tuple(torch.randn_like(x).requires_grad_() for x in LINEAR[name].inputs())
    outputs = LINEAR[name].run(*xs, backend=backend)
    ys = [output.detach() + output.detach().std() * torch.randn_like(output) / 4 for output in outputs]
    back = torch.autograd.grad(outputs, xs, ys, allow_unused=True, materialize_grads=True)
    left = sum(float((output.detach().double() * y).sum()) for output, y in zip(outputs, ys, strict=True))
    right = sum(float((x.detach().double() * one).sum()) for x, one in zip(xs, back, strict=True))
    assert left == pytest.approx(right, rel=1e-5 + sample_error * weighed)


CHAINS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "mipmap": lambda x: mip_chain(x)[1:],
    "gaussian": lambda x: gaussian_chain(x, len(burt_sizes(*x.shape[-2:]))),
    "laplacian": lambda x: laplacian_chain(x, len(burt_sizes(*x.shape[-2:]))),
    "collapse": lambda x: [collapse_reference([x, *(x[..., :h, :w] for h, w in burt_sizes(*x.shape[-2:])[1:])])],
}


@pytest.mark.parametrize("large", [1, 2**40])
@pytest.mark.parametrize("chain", CHAINS)
def test_adjoints_are_what_torch_makes_of_the_sums(monkeypatch: pytest.MonkeyPatch, chain: str, large: int) -> None:
    """At every small size, with sums in place and without; torch.func differentiates the forward itself."""
    monkeypatch.setattr(sys.modules["gpu_lod.binomial"], "_LARGE", large)
    for height, width in itertools.product(range(1, 10), repeat=2):
        x = noise(2, height, width).double().requires_grad_()
        outputs = CHAINS[chain](x)
        if not outputs:
            continue
        weights = [torch.rand_like(output) for output in outputs]
        _, back = torch.func.vjp(lambda x: tuple(CHAINS[chain](x)), x.detach())
        (expected,) = back(tuple(weights))
        (one,) = torch.autograd.grad(outputs, x, weights)
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-13)
        # Of one level alone.
        zeros = tuple(torch.zeros_like(weight) for weight in weights[:-1])
        (expected,) = back((*zeros, weights[-1]))
        (one,) = torch.autograd.grad(CHAINS[chain](x)[-1], x, weights[-1])
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", ["torch", "gl"])
@pytest.mark.parametrize("side", [13, 600])
@pytest.mark.parametrize("verb", [lod.mipmap, lod.gaussian, lod.laplacian])
def test_gradients_in_a_batch(verb: Any, side: int, backend: Any) -> None:
    """As torch.autograd.functional.jacobian asks for them with vectorize=True; 600 is made in place elsewhere."""
    image = noise(1, side, side + 1).requires_grad_()
    level = verb(image, 3, backend=backend)[1]
    weights = torch.rand(3, *level.shape)
    (found,) = torch.autograd.grad(level, image, weights, is_grads_batched=True, retain_graph=True)
    for one, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(level, image, weight, retain_graph=True)[0])


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_every_linear_verb_in_a_batch(name: str) -> None:
    xs = tuple(x.requires_grad_() for x in LINEAR[name].inputs())
    result = LINEAR[name].run(*xs, backend="torch")[-1]
    weights = torch.rand(3, *result.shape).to(result.dtype)
    how: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    found = torch.autograd.grad(result, xs, weights, is_grads_batched=True, **how)
    for number, weight in enumerate(weights):
        for one, alone in zip(found, torch.autograd.grad(result, xs, weight, **how), strict=True):
            torch.testing.assert_close(one if one is None else one[number], alone)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_beside_a_vmap_over_something_else(name: str, backend: Any) -> None:
    """torch wraps what it maps over alone; what a function brings with it is an ordinary tensor."""
    xs = tuple(x.requires_grad_() for x in LINEAR[name].inputs())

    def loss(factor: torch.Tensor) -> torch.Tensor:
        return (LINEAR[name].run(*xs, backend=backend)[-1] * factor).sum()

    how: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(torch.func.vmap(loss)(torch.tensor([1.0, 2.0, 3.0])).sum(), xs, **how)
    for one, expected in zip(found, torch.autograd.grad(loss(torch.tensor(6.0)), xs, **how), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [[(n, m) for n in (1, 2, 5, 8) for m in (1, 4, 7, 16)], [(64, 96)], [(61, 96)]])
def test_adjoint_of_foveation(sizes: Any) -> None:
    """Beside torch.func's, of the plain sums: fixations at the edge and elsewhere, all levels or few, sharp or not."""
    rules = [(0.1, 0.0), (0.02, 0.0), (0.3, 1.5), (0.01, -3.0), (1e-6, 0.0)]
    for (height, width), rule, levels in itertools.product(sizes, rules, (None, 2)):
        fixation = torch.rand(2, 2)
        fixation[0] = fixation[0].round()
        made = mip_chain(noise(2, 2, height, width).double(), levels)
        chain = [level.clone().requires_grad_() for level in made]  # below 1 x 1 it is the same tensor
        found = foveated(chain, fixation, *rule)
        weights = torch.rand_like(found)
        plain = partial(foveated, fixation=fixation, e0=rule[0], bias=rule[1])
        _, back = torch.func.vjp(plain, [level.detach() for level in chain])
        mine = torch.autograd.grad(found, chain, weights, allow_unused=True)
        for one, expected in zip(mine, back(weights)[0], strict=True):
            one = torch.zeros_like(expected) if one is None else one
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "gl"])
@pytest.mark.parametrize("size", [(96, 128), (45, 61)])
def test_gradients_of_foveation_in_a_batch_and_under_autocast(size: tuple[int, int], backend: Any) -> None:
    image = noise(2, 3, *size).requires_grad_()
    fixation = torch.rand(2, 2)
    found = lod.foveate(image, fixation, backend=backend)
    weights = torch.rand(3, *found.shape)
    (batch,) = torch.autograd.grad(found, image, weights, is_grads_batched=True, retain_graph=True)
    fixation.fill_(0.5)  # a backward knows where they were
    for one, weight in zip(batch, weights, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            (alone,) = torch.autograd.grad(found, image, weight, retain_graph=True)
        torch.testing.assert_close(one, alone, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.reference])
def test_gradcheck(name: str) -> None:
    reference = CALLS[name].reference
    assert reference is not None
    xs = tuple(x.double().requires_grad_() for x in CALLS[name].inputs())

    def run(*xs: torch.Tensor) -> Any:
        result = reference(*xs)
        return result if isinstance(result, torch.Tensor) else tuple(result)

    assert torch.autograd.gradcheck(run, xs, fast_mode=True)


def test_gradcheck_of_log_polars_fixation() -> None:
    """Of a pyramid that is linear in x and y the gradient is exact wherever no sample is clamped."""
    levels = [
        (torch.arange(n)[:, None] * 2.0 + torch.arange(n)).double()[None, None] * (32 / n) for n in (32, 16, 8, 4, 2, 1)
    ]

    def run(fixation: torch.Tensor) -> torch.Tensor:
        return samples(levels, fixation, ring_rule(6, 10, None, 0.3, "log", 0.05))

    fixation = torch.tensor([[0.4812, 0.5133]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (fixation,), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("name", "backend"), GRADIENTS)
def test_gradients_of_gradients(name: str, backend: Any, sample_error: float) -> None:
    """Asking for them changes no gradient, and the square of the energy's gradient has that of the torch backend."""
    xs = tuple(x.requires_grad_() for x in CALLS[name].inputs())

    def twice(backend: Any) -> tuple[torch.Tensor, ...]:
        once = gradients(name, backend, xs, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in once), xs, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]

    for one, two in zip(gradients(name, backend, xs, create_graph=True), gradients(name, backend, xs), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)
    found = twice(backend)
    weighed = sample_error if backend == "gl" and name.startswith(SAMPLED) else 0.0
    assert any(bool(g.abs().sum() > 0) for g in found)
    # They are linear in the samples: what one is off by is at most 4 times that of a sample of 1/4 or more.
    for one, two in zip(found, twice("torch"), strict=True):
        assert torch.allclose(one, two, rtol=1e-3 + 4 * weighed, atol=1e-4 + 4 * weighed)


# -- what has no gradient, and what changes ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_integers_have_no_gradients(backend: Any) -> None:
    counts = noise(1, 3, 12, 12, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="floating point"):
        counts.requires_grad_()
    verbs: list[Callable[..., torch.Tensor]] = [
        *(lambda x, verb=verb: verb(x, backend=backend)[1] for verb in (lod.mipmap, lod.gaussian, lod.laplacian)),
        lambda x: lod.oriented_energy(x, 2, backend=backend)[0],
        lambda x: lod.feature_maps(x, backend=backend),
        lambda x: lod.gather_patches(x, SITES[:1], 4, backend=backend),
        *(lambda x, verb=verb: verb(x, FIXATION[:1], backend=backend) for verb in SAMPLERS.values()),
    ]
    for verb in verbs:
        with pytest.raises(RuntimeError, match="does not require grad"):
            verb(counts).float().sum().backward()
    if backend == "gl":  # has none in places anyway
        return
    place, sites = FIXATION[:1].clone().requires_grad_(), SITES[:1].clone().requires_grad_()
    for sampler in SAMPLERS.values():
        with pytest.raises(InputError, match=r"fixation.*float\(\) / 255, or fixation.detach"):
            sampler(counts, place)
        with torch.no_grad():
            sampler(counts, place)
    with pytest.raises(InputError, match=r"sites.*torch.float32, or sites.detach"):
        lod.gather_patches(counts, sites, 4)
    lod.gather_patches(counts, sites, 4, dtype=torch.float32).sum().backward()
    assert sites.grad is not None and bool(sites.grad.any())


@pytest.mark.parametrize("changed", [0, -1])
@pytest.mark.parametrize(("name", "backend"), GRADIENTS)
def test_an_input_changed_before_the_backward(name: str, backend: Any, changed: int) -> None:
    """It is noticed, or makes no difference."""
    leaves = tuple(x.requires_grad_() for x in CALLS[name].inputs())
    weights: list[torch.Tensor] = []

    def gradient(*, change: bool) -> tuple[torch.Tensor, ...]:
        xs = tuple(leaf * 1 for leaf in leaves)
        outputs = CALLS[name].run(*xs, backend=backend)
        weights.extend(torch.rand_like(output) for output in outputs if len(weights) < len(outputs))
        if change:
            xs[changed].mul_(0.5)
        loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]

    expected = gradient(change=False)
    try:
        found = gradient(change=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        assert isinstance(error, InputChangedError) and "clone" in str(error)
        return
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("backend", ["torch", "gl"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_fixation_changed_before_the_backward(sampler: str, backend: Any) -> None:
    image = noise(2, 3, 13, 18).requires_grad_()

    def gradient(*, change: bool) -> torch.Tensor:
        fixation = FIXATION.clone()
        loss = SAMPLERS[sampler](image, fixation, backend=backend).square().sum()
        if change:
            fixation.mul_(0.5)
        return torch.autograd.grad(loss, image)[0]

    assert torch.equal(gradient(change=True), gradient(change=False))


@pytest.mark.parametrize("sampler", [*SAMPLERS, "gather_patches", "gather_patches of a pyramid"])
def test_places_have_gradients_beside_a_picture_of_inference_mode(sampler: str) -> None:
    """What a program decodes in inference mode, it may well learn to look at."""
    sample, place = SAMPLERS.get(sampler), FIXATION
    if sample is None:
        whole = sampler.endswith("pyramid")
        sample, place = (lambda x, s, **how: lod.gather_patches(lod.mipmap(x) if whole else x, s, 4, **how)), SITES
    with torch.inference_mode():
        picture = noise(2, 3, 13, 18)

    def gradient(image: torch.Tensor) -> torch.Tensor:
        asked = place.clone().requires_grad_()
        return torch.autograd.grad(sample(image, asked).square().sum(), asked)[0]

    assert torch.equal(gradient(picture), gradient(picture.clone()))


def test_samples_have_gradients_in_places_beside_levels_of_inference_mode() -> None:
    with torch.inference_mode():
        pyramid = lod.mipmap(noise(2, 3, 13, 18))
    fixation = FIXATION.clone().requires_grad_()
    lod.log_polar(pyramid, fixation, 6, 10).square().sum().backward()
    assert fixation.grad is not None and bool(fixation.grad.all())


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_a_pyramid_changed_before_it_is_used_or_differentiated(backend: Any) -> None:
    image = noise(1, 13, 18).requires_grad_()
    asked = FIXATION[0].clone().requires_grad_(backend == "torch")  # whose gradient reads the levels
    pyramid = lod.mipmap(image * 1, backend=backend)
    result = lod.log_polar(pyramid, asked, 6, 10, backend=backend)
    pyramid[0].mul_(0.5)
    if backend == "torch":
        with pytest.raises(InputChangedError, match="inplace"):
            result.sum().backward()
    else:
        result.sum().backward()  # of the adjoint, which reads no level
    with pytest.raises(PyramidChangedError):
        lod.log_polar(pyramid, (0.5, 0.5), 6, 10, backend=backend)


def test_a_result_changed_before_the_backward() -> None:
    """What a backward reads may be a result, or on the way to one."""
    image = noise(3, 24, 31).requires_grad_()
    chain = lod.mipmap(image * 1, reduce="max", backend="torch")
    chain[1].mul_(0.5)
    with pytest.raises(InputChangedError, match="result"):
        chain[2].sum().backward()


@pytest.mark.parametrize(("name", "backend"), LINEAR_CASES)
def test_results_are_written_to_in_place(name: str, backend: Any) -> None:
    """As `relu(inplace=True)` does, also where they are views of one buffer."""
    xs = tuple(x.requires_grad_() for x in LINEAR[name].inputs())
    for number, expected in enumerate(LINEAR[name].run(*xs, backend=backend)):
        if not expected.requires_grad:  # level 0 is the image
            continue
        (expected * 3).square().sum().backward()
        apart = [x.grad for x in xs]
        for x in xs:
            x.grad = None
        result = LINEAR[name].run(*xs, backend=backend)[number]
        if result is not xs[0]:
            result.mul_(3).square().sum().backward()
            assert [x.grad is None for x in xs] == [one is None for one in apart]
            assert all(torch.equal(x.grad, one) for x, one in zip(xs, apart, strict=True) if x.grad is not None)
        for x in xs:
            x.grad = None


@pytest.mark.parametrize("backend", ["auto", "torch", "gl"])
@pytest.mark.parametrize("shape", [(3, 9, 12), (1, 3, 9, 12), (2, 3, 64, 64)])
def test_results_of_one_picture_are_written_to_in_place(shape: tuple[int, ...], backend: Any) -> None:
    x = noise(*shape).requires_grad_()
    for verb in (
        lambda x: lod.mipmap(x, backend=backend)[-1],
        lambda x: lod.mipmap(x, mean=(0.5,) * 3, std=(0.2,) * 3, backend=backend)[-1],
        lambda x: lod.gaussian(x, backend=backend)[-1],
        lambda x: lod.laplacian(x, 2, backend=backend)[0],
        lambda x: lod.collapse(lod.laplacian(x, 2, backend=backend), backend=backend),
        lambda x: lod.oriented_energy(x, 2, backend=backend)[0],
        lambda x: lod.log_polar(x, (0.3, 0.7), 7, 9, backend=backend),
        lambda x: lod.foveate(x, (0.3, 0.7), backend=backend),
        lambda x: lod.foveate(x, (0.3, 0.7), anisotropy=2, backend=backend),
        lambda x: lod.gather_patches(x, torch.tensor([[0.3, 0.7, 1]]).expand(*shape[:-3], 1, 3), 4, backend=backend),
        lambda x: lod.feature_maps(x, backend=backend),
    ):
        expected = torch.autograd.grad((verb(x) * 3).square().sum(), x)[0]
        result = verb(x)
        result.mul_(3)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), x)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["hiz", "oriented_energy"])
def test_a_programs_own_hooks_come_first(name: str) -> None:
    """Checkpoints are such, and would keep what a verb hid from them."""
    run: Callable[[torch.Tensor], torch.Tensor] = {
        "hiz": lambda x: lod.hiz(x, backend="torch")[1],
        "oriented_energy": lambda x: lod.oriented_energy(x, 2, backend="torch")[1],
    }[name]
    image = noise(3, 24, 31).requires_grad_()
    (expected,) = torch.autograd.grad(run(image).square().sum(), image)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        run(image)
    assert packed
    again = checkpoint(run, image, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.square().sum(), image)[0], expected)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert torch.equal(torch.autograd.grad(run(image).square().sum(), image)[0], expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_checkpoints(name: str, backend: Any, reentrant: bool) -> None:
    """They make a verb's graph when the backward comes to it: the reentrant ones run the forward without any."""
    call = CALLS[name]
    inputs = tuple(x.requires_grad_() for x in call.inputs())
    expected = call.run(*inputs, backend=backend)
    found = checkpoint(lambda *x: tuple(call.run(*x, backend=backend)), *inputs, use_reentrant=reentrant)
    pairs = [(one, two) for one, two in zip(found, expected, strict=True) if two.requires_grad]
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in pairs)
    if not pairs:
        return
    gradients = []
    for outputs in zip(*pairs, strict=True):
        torch.autograd.backward(outputs, [torch.linspace(0, 1, x.numel()).view_as(x) for x in outputs])
        gradients.append([x.grad for x in inputs])
        for x in inputs:
            x.grad = None
    for one, two in zip(*gradients, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.allclose(one, two, atol=1e-6)


def test_a_graph_that_is_dropped_is_freed() -> None:
    """Without the garbage collector: what a node keeps of its own result must not keep the node."""

    class Mark:
        def __call__(self, *_: Any) -> None:
            pass

    gc.disable()
    try:
        image = noise(3, 24, 31).requires_grad_()
        for way in (torch.exp, lambda x: lod.oriented_energy(x, 2, backend="torch")[1]):
            with watched([image]):
                result = way(image)
            mark = Mark()
            there = weakref.ref(mark)
            assert result.grad_fn is not None
            result.grad_fn.register_hook(mark)
            del mark
            assert there() is not None
            del result
            assert there() is None
    finally:
        gc.enable()


# -- torch.func --------------------------------------------------------------------------------------------------------


def stacked(function: Callable[..., Any], *xs: torch.Tensor) -> list[torch.Tensor]:
    """What vmap should give: a loop."""
    results = [function(*(x[i] for x in xs)) for i in range(xs[0].shape[0])]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.backends and name != "cull"])
def test_vmap_is_a_loop(name: str, backend: Any) -> None:
    xs = [torch.stack([x, x.flip(-1), x * 0.5]) for x in CALLS[name].inputs()]

    def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(CALLS[name].run(*xs, backend=backend))

    for one, two in zip(torch.func.vmap(run)(*xs), stacked(run, *xs), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("upload", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_vmap_over_fixations(sampler: str, upload: bool) -> None:
    """Also where auto would take the texture units."""
    image, fixations = noise(3, 13, 18), torch.rand(4, 2)
    source = lod.mipmap(image).upload() if upload and sampler != "inverse_log_polar" else image

    def run(fixation: torch.Tensor) -> tuple[torch.Tensor]:
        if sampler == "foveate":
            return (lod.foveate(source, fixation, 0.1),)
        if isinstance(source, lod.Pyramid):
            return (lod.log_polar(source, fixation, 256, 256),)
        return (SAMPLERS[sampler](source, fixation),)

    (found,), (expected,) = torch.func.vmap(run)(fixations), stacked(run, fixations)
    assert torch.allclose(found, expected, atol=2e-5)
    with pytest.raises(InputError, match=r"\[0, 1\]"):
        torch.func.vmap(run)(fixations + torch.tensor([[0.0], [0.0], [0.0], [1.0]]))


def test_vmap_over_boxes() -> None:
    hz = lod.hiz(noise(2, 3, 20, 30))
    boxes = torch.rand(4, 5, 2, 2).sort(dim=2).values.flatten(2)
    for upload in (False, True):
        if upload:
            hz.upload()
        found = torch.func.vmap(lambda b: lod.region_max(hz, b))(boxes)
        assert torch.equal(found, torch.stack([lod.region_max(hz, b) for b in boxes]))
    with pytest.raises(InputError, match="NaN"):
        torch.func.vmap(lambda b: lod.region_max(hz, b))(boxes * torch.nan)


def test_what_does_not_run_under_vmap_says_so() -> None:
    image, points = noise(2, 3, 9, 9), torch.rand(3, 2)
    hz = lod.hiz(image)
    for function, argument, words in (
        (lambda f: lod.cortical_sites(f, 9), points, r"all fixations, \[B, 2\]"),
        (lambda x: lod.cull(lod.hiz(x), 0.5).mask, image, r"Pass \[B, C, H, W\]"),
        (lambda t: lod.cull(hz, t).mask, points[0], r"Pass \[B, C, H, W\]"),
        (lambda f: lod.log_polar(image, f, 4, 4, backend="gl"), points, "backend='torch'"),
        (lambda b: lod.region_max(hz, b, backend="gl"), torch.zeros(2, 3, 4), "backend='torch'"),
        (lambda x: lod.mipmap(x).upload()[1], image, "upload"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            torch.func.vmap(function)(argument)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in BOUNDS])
def test_func_grad(name: str) -> None:
    xs = CALLS[name].inputs()

    def energy(*xs: torch.Tensor) -> torch.Tensor:
        return sum((output**2).sum() for output in CALLS[name].run(*xs))  # type: ignore[return-value]

    found = torch.func.grad(energy, tuple(range(len(xs))))(*xs)
    expected = gradients(name, None, tuple(x.requires_grad_() for x in xs))
    for one, two in zip(found, expected, strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("name", LINEAR)
def test_func_jvp_of_a_linear_verb_is_the_verb(name: str) -> None:
    xs = LINEAR[name].inputs()
    tangents = tuple(torch.rand_like(x) for x in xs)

    def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(LINEAR[name].run(*xs))

    between_texels = any(part in name for part in ("polar", "gather", "anisotropic"))
    if between_texels and torch.torch_version.TorchVersion(torch.__version__) < "2.15":
        with pytest.raises(UnsupportedError, match="reverse mode"):
            torch.func.jvp(run, xs, tangents)
        return
    for one, two in zip(torch.func.jvp(run, xs, tangents)[1], run(*tangents), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "gl" in call.backends])
def test_gl_refuses_torch_func(name: str) -> None:
    xs = CALLS[name].inputs()

    def run(*xs: torch.Tensor) -> torch.Tensor:
        return CALLS[name].run(*xs, backend="gl")[0].sum()

    for transform in (torch.func.grad, torch.func.vmap, lambda f: lambda *x: torch.func.jvp(f, x, x)):
        with pytest.raises(UnsupportedError, match=r"backend='torch'|under torch\.func\.vmap"):
            transform(run)(*xs)


# -- tensors without memory --------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """Stands for another tensor, as DTensor and quantised ones do."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)  # type: ignore[attr-defined]
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inside if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, op(*args, **kwargs))


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "gl" in call.backends])
def test_gl_refuses_tensors_without_memory(name: str) -> None:
    """A fake one crashed the process."""
    call = CALLS[name]
    mode = FakeTensorMode()
    for wrap in (Wrapped, mode.from_tensor):
        inputs = [wrap(x) for x in call.inputs()]
        with pytest.raises(UnsupportedError, match=r"has no memory of its own.*backend='torch'"):
            call.run(*inputs, backend="gl")
    given = call.inputs()
    with pytest.raises(UnsupportedError, match="inside a FakeTensorMode"), FakeTensorMode(allow_non_fake_inputs=True):
        call.run(*given, backend="gl")


@pytest.mark.parametrize("backend", ["auto", "torch", "gl"])
def test_values_without_memory_cannot_be_read(backend: Any) -> None:
    image = noise(2, 3, 42, 42)
    for call in (
        lambda: lod.log_polar(image, Wrapped(FIXATION), 6, 10, backend=backend),
        lambda: lod.gather_patches(image, Wrapped(SITES), 4, backend=backend),
        lambda: lod.allocate.GridTopK(4)(image, Wrapped(torch.rand(2, 3, 3))),
    ):
        with pytest.raises(InputError, match="is a Wrapped, which has no memory of its own"):
            call()


def test_auto_takes_torch_for_tensors_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(1, 3, 8, 8)
    monkeypatch.setattr(dispatch, "measured", lambda *_, **__: dispatch.Choice("gl", "measured"))
    assert lod.explain(lod.mipmap, image).backend == "gl"
    assert lod.explain(lod.mipmap, torch.nn.Parameter(image)).backend == "gl"
    found = lod.explain(lod.mipmap, Wrapped(image))
    assert found.backend == "torch" and "no memory of its own" in found.reason
    assert isinstance(lod.mipmap(Wrapped(image))[1], Wrapped)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_jit_traces_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shader gave would be in the trace as a constant."""
    image, other = noise(2, 1, 3, 8, 8)
    monkeypatch.setattr(dispatch, "measured", lambda *_, **__: dispatch.Choice("gl", "measured"))
    traced = torch.jit.trace(lambda x: lod.mipmap(x)[1], image)
    assert torch.equal(traced(other), lod.mipmap(other, backend="torch")[1])
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace.*torch\.export"):
        torch.jit.trace(lambda x: lod.mipmap(x, backend="gl")[1], image)
    assert lod.mipmap(image, backend="gl").generator != "torch"


# -- what a result shares with its input -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_a_pyramid_of_one_level_is_no_memory_of_the_images(backend: Any) -> None:
    """Nobody would tell that it was written to: the gradient of what came before would be another one's."""
    batch = noise(2, 3, 8, 8).requires_grad_()
    verbs: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: lod.laplacian(x, 1, backend=backend)[0],
        lambda x: lod.collapse(lod.Pyramid((x,), "laplacian"), backend=backend),
    )
    for verb in verbs:
        x = batch[0]
        loss = (x**2).sum()
        with torch.no_grad():
            verb(x.detach()).mul_(0)
        verb(x).mul_(0)
        (found,) = torch.autograd.grad(loss, batch)
        assert torch.equal(found[0], 2 * batch[0])


def test_levels_that_nobody_used_pass_nothing_on() -> None:
    image = noise(1, 1, 64, 64)
    image[0, 0, 50, 50] = math.nan
    spoiled = {}
    for backend in ("torch", "gl"):
        x = image.clone().requires_grad_()
        lod.oriented_energy(x, 3, backend=backend)[0][..., :8, :8].sum().backward()  # type: ignore[arg-type]
        assert x.grad is not None
        spoiled[backend] = int(x.grad.isnan().sum())
    assert spoiled["gl"] == spoiled["torch"] < 64 * 64 / 4


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_gradients_are_not_lost_in_tuples(backend: Any) -> None:
    """Whose values are read: a gradient would be none without a word."""
    image, one = noise(3, 16, 16), torch.tensor(0.4, requires_grad=True)
    for fixation in ((one, 0.5), [[0.5, one]]):
        with pytest.raises(InputError, match=r"torch\.stack"):
            lod.foveate(image, fixation, backend=backend)
    with pytest.raises(InputError, match=r"torch\.stack"):
        torch.func.grad(lambda a: lod.foveate(image, (a, 0.5), backend=backend).sum())(torch.tensor(0.4))
    with pytest.raises(InputError, match="mean asks for gradients"):
        lod.mipmap(image, mean=torch.zeros(3, requires_grad=True), backend="torch")
    with torch.no_grad():
        lod.foveate(image, (one, 0.5), backend=backend)
    stacked = torch.stack([one, one.detach()])
    assert torch.autograd.grad(lod.foveate(smooth(16, 16), stacked).sum(), one)[0] != 0


def test_a_fixation_that_nothing_rests_on_has_a_gradient_of_zero() -> None:
    point = torch.tensor([0.4, 0.6], requires_grad=True)
    (found,) = torch.autograd.grad(lod.foveate(noise(3, 16, 16), point, bias=9).sum(), point)
    assert torch.equal(found, torch.zeros(2))


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_what_is_outside_is_zero_beside_infinities(backend: Any) -> None:
    image = noise(1, 16, 16)
    image[..., 0] = math.inf
    for found in (
        lod.gather_patches(image, [[0.0, 0.5, 0.0]], 8, border="zero", backend=backend)[0, 0],
        lod.log_polar(image, (0.0, 0.5), 12, 16, border="zero", backend=backend)[0],
    ):
        assert int((found == 0).sum()) >= 16
    patch = lod.gather_patches(image, [[0.0, 0.5, 0.0]], 8, border="zero", backend=backend)[0, 0]
    assert torch.equal(patch[:, :3], torch.zeros(8, 3))
