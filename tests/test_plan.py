"""Plans: what they repeat is what the function does, and what they cannot repeat they do not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import CALLS
from images import noise
from scripts import succeed

import gpu_lod as lod
from gpu_lod.errors import ContextClosedError, InputError, PyramidChangedError

FIXATION = torch.tensor([[0.4, 0.6], [0.7, 0.2]])
REPLAY = set(CALLS) - {"cull", "gather_patches"}
"""Verbs whose work is all OpenGL's, on a software renderer too."""


def tensors(result: Any) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def retina(image: torch.Tensor, fixation: torch.Tensor) -> Any:
    pyramid = lod.mipmap(image, backend="gl").upload()
    return pyramid, lod.log_polar(pyramid, fixation, 16, 32, backend="gl")


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "gl" in call.backends])
def test_a_plan_of_each_verb_does_what_the_verb_does(name: str) -> None:
    """With values that it has not seen, three times over."""
    call = CALLS[name]

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return call.run(*inputs, backend="gl")

    planned = lod.plan(run, *call.inputs())
    assert planned.replays == (name in REPLAY), planned.reason
    for seed in range(3):
        torch.manual_seed(100 + seed)
        inputs = call.inputs()
        expected = run(*inputs)
        for actual, oracle in zip(planned(*inputs), expected, strict=True):
            assert torch.equal(actual, oracle), name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "generator", ["compute", "registers", "single-pass", "single-pass-texture", "fragment", "driver"]
)
def test_plans_of_every_generator(generator: str, dtype: torch.dtype) -> None:
    planned = lod.plan(lod.mipmap, noise(2, 3, 40, 24, dtype=dtype), generator=generator)
    assert planned.replays == (dtype != torch.bfloat16), planned.reason  # which travels as fp32: torch converts it
    for _ in range(3):
        image = noise(2, 3, 40, 24, dtype=dtype)
        for actual, expected in zip(planned(image), lod.mipmap(image, generator=generator), strict=True):
            assert torch.equal(actual, expected)


def test_feature_maps_of_a_video() -> None:
    planned = lod.plan(lod.feature_maps, noise(1, 3, 20, 31), FIXATION[:1], noise(1, 3, 20, 31), backend="gl")
    assert planned.replays, planned.reason
    inputs = noise(1, 3, 20, 31), FIXATION[1:], noise(1, 3, 20, 31)
    assert torch.equal(planned(*inputs), lod.feature_maps(*inputs, backend="gl"))


def test_several_verbs_in_one_plan() -> None:
    planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    assert planned.replays and "GL commands" in repr(planned)
    before = None
    for _ in range(4):
        image, fixation = noise(2, 3, 50, 37), torch.rand(2, 2)
        pyramid, polar = planned(image, fixation)
        for actual, expected in zip(tensors((pyramid, polar)), tensors(retina(image, fixation)), strict=True):
            assert torch.equal(actual, expected)
        again = lod.log_polar(pyramid, fixation, 16, 32, backend="gl")  # the pyramid is a good one, with its texture
        assert torch.equal(again, polar)
        assert before is None or before.data_ptr() == polar.data_ptr()
        before = polar


def test_a_call_allocates_and_compiles_nothing(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    made: list[str] = []
    real = ctx.gl.gen
    monkeypatch.setattr(ctx.gl, "gen", lambda kind: made.append(kind) or real(kind))
    monkeypatch.setattr(ctx.programs, "compute", lambda *a, **k: pytest.fail("a program was looked up"))
    leased = ctx._leased()
    for _ in range(5):
        planned(noise(2, 3, 50, 37), torch.rand(2, 2))
        assert ctx._leased() == leased
    assert not made


def test_inputs_can_be_written_in_place() -> None:
    planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    image, fixation = noise(2, 3, 50, 37), torch.rand(2, 2)
    planned.inputs[0].copy_(image)
    planned.inputs[1].copy_(fixation)
    assert torch.equal(planned()[1], retina(image, fixation)[1])


def test_other_work_in_between_disturbs_nothing(ctx: lod.Context) -> None:
    """Pools, textures and uniforms are used by other calls between two of a plan."""
    first, second = (lod.plan(retina, noise(2, 3, *size), FIXATION) for size in ((50, 37), (64, 64)))
    for _ in range(3):
        images = noise(2, 3, 50, 37), noise(2, 3, 64, 64)
        polar = first(images[0], FIXATION)[1].clone()
        other = second(images[1], FIXATION)[1].clone()
        retina(noise(2, 3, 50, 37), torch.rand(2, 2))
        ctx.trim()
        assert torch.equal(first()[1], polar) and torch.equal(second()[1], other)
        assert torch.equal(polar, retina(images[0], FIXATION)[1])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: lod.mipmap(x, backend="torch")[1], "no part|torch computes"),
        (lambda x: lod.mipmap(x * 2, generator="compute")[1], "aten::mul|aten.mul"),
        (lambda x: lod.mipmap(x, generator="compute")[1] + 1, "aten.add"),
        (lambda x: lod.mipmap(x, 2 if x.max() > 0.5 else 3, generator="compute")[1], "aten.max"),
        (lambda x: lod.mipmap(x, 2 + (x.tolist()[0][0][0][0] > 0.5), generator="compute")[1], "tolist"),
        (lambda x: lod.mipmap(x, 2 + (x.numpy().max() > 0.2).item(), generator="compute")[1], "numpy"),
        (lambda x: lod.cull(lod.hiz(x, backend="gl"), 0.5, backend="gl").mask, "host|torch computes"),
        (lambda x: lod.mipmap(x.zero_(), generator="compute")[1], "aten.zero_"),
        (lambda x: lod.foveate(lod.mipmap(x, backend="gl"), x[0, 0, 0, :2], backend="gl"), "tolist|torch computes"),
        (lambda x: lod.gather_patches(x, torch.tensor([[0.5, 0.5, 1.0]]), 4, backend="gl"), "levels"),
    ],
)
def test_what_cannot_be_repeated_is_run_again(function: Callable[..., torch.Tensor], why: str) -> None:
    planned = lod.plan(function, noise(1, 1, 12, 9) / 4)
    assert not planned.replays
    assert any(word in planned.reason for word in why.split("|")), planned.reason
    for _ in range(2):
        image = noise(1, 1, 12, 9)
        assert torch.equal(planned(image), function(image))


def test_values_are_checked_at_every_call() -> None:
    pyramid = lod.mipmap(noise(2, 3, 20, 20), backend="gl").upload()
    planned = lod.plan(lod.log_polar, pyramid, FIXATION, 8, 8, backend="gl")
    assert planned.replays
    expected = planned().clone()
    for bad in (torch.tensor([[0.5, 1.5], [0.1, 0.1]]), torch.full((2, 2), float("nan"))):
        with pytest.raises(InputError, match="fixation"):
            planned(bad)
    assert torch.equal(planned(FIXATION), expected)
    sites = torch.tensor([[[0.5, 0.5, 0.0]]]).repeat(2, 1, 1)
    patches = lod.plan(lod.gather_patches, pyramid, sites, 4, backend="gl")
    assert patches.replays
    with pytest.raises(InputError, match="levels"):
        patches(sites - torch.tensor([0.0, 0.0, 1.0]))
    boxes = lod.plan(lod.region_max, lod.hiz(noise(1, 8, 8)), torch.tensor([[0.1, 0.1, 0.5, 0.5]]), backend="gl")
    assert boxes.replays
    with pytest.raises(InputError, match="x1 < x0"):
        boxes(torch.tensor([[0.5, 0.1, 0.1, 0.5]]))
    pyramid[0].mul_(2)
    with pytest.raises(PyramidChangedError):
        planned(FIXATION)


def test_bad_tensors_are_refused() -> None:
    planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    for bad, hint in (
        ((noise(2, 3, 50, 38), FIXATION), "planned for"),
        ((noise(2, 3, 50, 37).half(), FIXATION), "float16"),
        ((noise(2, 3, 50, 37),), "takes 2"),
        ((noise(2, 3, 50, 37), (0.5, 0.5)), "tuple"),
        ((noise(2, 3, 50, 37).requires_grad_(), FIXATION), "gradients"),
    ):
        with pytest.raises(InputError, match=hint):
            planned(*bad)
    with pytest.raises(InputError, match="no argument"):
        lod.plan(lod.cortical_sites, (0.5, 0.5))
    with pytest.raises(InputError, match="gradients"):
        lod.plan(lod.mipmap, noise(1, 4, 4).requires_grad_())
    with pytest.raises(InputError, match="channels"):
        lod.plan(lod.mipmap, noise(5, 4, 4), backend="gl")


def test_a_function_that_raises_leaves_the_context_whole(ctx: lod.Context) -> None:
    calls = []

    def third_time(image: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        result = lod.mipmap(image, generator="compute")[1]
        if len(calls) == 3:
            raise RuntimeError("now")
        return result

    image = noise(1, 8, 8)
    with pytest.raises(RuntimeError, match="now"):
        lod.plan(third_time, image)
    assert ctx.gl.noted is None and ctx.gl.BindBuffer.__class__.__name__ != "function"
    assert lod.plan(third_time, image).replays


def test_threads_take_turns() -> None:
    planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    wrong: list[int] = []

    def work(seed: int) -> None:
        own = lod.plan(retina, noise(2, 3, 20, 31), FIXATION)
        for _ in range(5):
            image, fixation = torch.rand(2, 3, 20, 31), torch.rand(2, 2)
            if not torch.equal(own(image, fixation)[1], retina(image, fixation)[1]):
                wrong.append(seed)
            planned(torch.rand(2, 3, 50, 37), FIXATION)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_dead_plan_gives_its_memory_back(ctx: lod.Context) -> None:
    gc.collect()
    ctx.trim()
    before = ctx._leased()
    planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    assert ctx._leased() > before
    del planned
    gc.collect()
    ctx.trim()
    assert ctx._leased() == before


def test_closed_contexts_and_forks_are_named_errors() -> None:
    succeed(
        """
        import os, torch, gpu_lod as lod
        from gpu_lod.errors import ContextClosedError, ForkedContextError
        planned = lod.plan(lod.mipmap, torch.rand(1, 8, 8), backend="gl")
        assert planned.replays
        child = os.fork()
        if not child:
            try:
                planned()
            except ForkedContextError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        lod.Context().close()
        try:
            planned()
        except ContextClosedError:
            pass
        else:
            raise SystemExit("replayed in a closed context")
        """
    )
    assert ContextClosedError
