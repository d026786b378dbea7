"""Plans: what they repeat is what the function does, and what they cannot repeat they do not."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from calls import CALLS
from images import DTYPES, noise
from scripts import succeed
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import gpu_lod as lod
from gpu_lod import recording
from gpu_lod.copies import put
from gpu_lod.errors import BufferMovedError, ContextClosedError, InputError, PyramidChangedError, UnsupportedError
from gpu_lod.sharing import Sharing
from gpu_lod.transfer import new_planes
from gpu_lod.uploads import Uploader

FIXATION = torch.tensor([[0.4, 0.6], [0.7, 0.2]])
REPLAY = set(CALLS) - {"cull"}
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


def test_a_plan_works_where_its_results_are() -> None:
    """Of what a function finds elsewhere nothing else tells: a pyramid on another device than the fixation."""
    planned = lod.plan(lambda fixation: fixation.to("meta"), torch.rand(2))
    assert not planned.replays and "on meta" in planned.reason
    pyramid = lod.Pyramid((torch.rand(1, 3, 8, 8, device="meta"),))
    planned = lod.plan(lambda levels, fixation: fixation + 1, pyramid, torch.rand(2))
    assert not planned.replays and "on meta" in planned.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_inputs_in_another_dtype_are_converted_at_each_call(dtype: torch.dtype) -> None:
    """As fixations are that come from NumPy, and bytes that the function itself makes floats of."""

    def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        fixation = torch.randint(0, 2, (2, 2)) if dtype == torch.int64 else torch.rand(2, 2, dtype=dtype)
        return torch.randint(0, 256, (2, 3, 40, 31), dtype=torch.uint8), fixation

    def chain(image: torch.Tensor, fixation: torch.Tensor) -> torch.Tensor:
        at = fixation.to(torch.float64).to(torch.float16)  # one conversion of another
        return lod.log_polar(lod.mipmap(image.float(), backend="gl"), at, 16, 32, backend="gl")

    planned = lod.plan(chain, *inputs(0))
    assert planned.replays, planned.reason
    for seed in range(1, 4):
        assert torch.equal(planned(*inputs(seed)), chain(*inputs(seed)))


def test_bad_values_of_another_dtype_are_refused_at_the_call_that_brings_them() -> None:
    planned = lod.plan(lod.log_polar, noise(1, 3, 40, 31), torch.rand(1, 2, dtype=torch.float64), 8, 16, backend="gl")
    assert planned.replays, planned.reason
    good = planned(noise(1, 3, 40, 31), torch.tensor([[0.5, 0.5]], dtype=torch.float64)).clone()
    with pytest.raises(InputError, match="nan"):
        planned(noise(1, 3, 40, 31), torch.tensor([[0.5, float("nan")]], dtype=torch.float64))
    again = planned(noise(1, 3, 40, 31), torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    assert again.shape == good.shape and not again.isnan().any()


def test_what_is_computed_from_a_converted_input_is_not_repeated() -> None:
    def halved(image: torch.Tensor, fixation: torch.Tensor) -> torch.Tensor:
        return lod.log_polar(image, fixation.float().mul_(0.5), 8, 16, backend="gl")

    inputs = noise(1, 3, 40, 31), torch.rand(1, 2, dtype=torch.float64)
    planned = lod.plan(halved, *inputs)
    assert not planned.replays and "torch computes in it" in planned.reason
    assert torch.equal(planned(*inputs), halved(*inputs))


def test_a_plan_where_opengl_shares_no_memory(ctx: lod.Context) -> None:
    """What is found on a GPU, of a fixation on the host, whose context is a software renderer's."""
    with FakeTensorMode():
        found = torch.empty(3, device="cuda")
    planned = lod.plan(lambda fixation: (fixation + 1, found), torch.rand(2))
    assert not planned.replays and "OpenGL" not in planned.reason and "on cpu" in planned.reason
    with ctx:  # by name
        planned = lod.plan(lambda fixation: (fixation + 1, found), torch.rand(2))
    assert not planned.replays and "on cpu" in planned.reason
    assert torch.equal(planned(torch.ones(2))[0], torch.full((2,), 2.0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "generator", ["compute", "registers", "single-pass", "single-pass-texture", "fragment", "driver"]
)
def test_plans_of_every_generator(generator: str, dtype: torch.dtype) -> None:
    planned = lod.plan(lod.mipmap, noise(2, 3, 40, 24, dtype=dtype), generator=generator)
    assert planned.replays, planned.reason
    for _ in range(3):
        image = noise(2, 3, 40, 24, dtype=dtype)
        for actual, expected in zip(planned(image), lod.mipmap(image, generator=generator), strict=True):
            assert torch.equal(actual, expected)


def test_feature_maps_of_a_video() -> None:
    planned = lod.plan(lod.feature_maps, noise(1, 3, 20, 31), FIXATION[:1], noise(1, 3, 20, 31), backend="gl")
    assert planned.replays, planned.reason
    inputs = noise(1, 3, 20, 31), FIXATION[1:], noise(1, 3, 20, 31)
    assert torch.equal(planned(*inputs), lod.feature_maps(*inputs, backend="gl"))


def test_no_plan_loads_the_compiler() -> None:
    """Which takes torch seconds. Where it is there, torch's work is seen as well."""
    succeed(
        """
        import sys, torch, gpu_lod as lod
        def computed(image):
            return lod.mipmap(image, backend="gl")[1] + 1
        def planned():
            assert lod.plan(lod.mipmap, torch.rand(1, 8, 8), backend="gl").replays
            assert "torch computes" in lod.plan(computed, torch.rand(1, 8, 8)).reason
        planned()
        assert "torch._dynamo" not in sys.modules
        import torch._dynamo
        planned()
        """
    )


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
        (lambda x: lod.mipmap(x, backend="torch")[1], "torch computes"),
        (lambda x: x[:, :, ::2], "OpenGL has no part in it"),
        (lambda x: lod.mipmap(x * 2, generator="compute")[1], "aten::mul|aten.mul"),
        (lambda x: lod.mipmap(x, generator="compute")[1] + 1, "aten.add"),
        (lambda x: lod.mipmap(x, 2 if x.max() > 0.5 else 3, generator="compute")[1], "aten.max"),
        (lambda x: lod.mipmap(x, 2 + (x.tolist()[0][0][0][0] > 0.5), generator="compute")[1], "tolist"),
        (lambda x: lod.mipmap(x, 2 + (x.numpy().max() > 0.2).item(), generator="compute")[1], "numpy"),
        (lambda x: lod.cull(lod.hiz(x, backend="gl"), 0.5, backend="gl").mask, "host|torch computes"),
        (lambda x: lod.mipmap(x.zero_(), generator="compute")[1], "aten.zero_"),
        (
            lambda x: lod.mipmap(_turned(lod.mipmap(x, backend="gl")), generator="registers").levels[1],
            "torch computes",  # it copies what a verb made
        ),
    ],
)
def test_what_cannot_be_repeated_is_run_again(function: Callable[..., torch.Tensor], why: str) -> None:
    is_run_again(function, why)


@pytest.mark.usefixtures("llvmpipe")
def test_blocks_of_a_fixation_that_may_change_are_made_again() -> None:
    """Where there are texture units no block is chosen on the host."""
    is_run_again(
        lambda x: lod.foveate(lod.mipmap(x, backend="gl"), x[0, 0, 0, :2], backend="gl"), "values decide|torch computes"
    )


@pytest.mark.usefixtures("llvmpipe")
def test_a_fixation_that_may_change_is_named() -> None:
    image, point = noise(3, 12, 16), torch.tensor([0.4, 0.6])

    def of_image(x: torch.Tensor, at: Any) -> torch.Tensor:
        return lod.foveate(x, at, backend="gl")

    def of_pyramid(x: torch.Tensor, at: Any) -> torch.Tensor:
        return lod.foveate(lod.mipmap(x, backend="gl"), at, backend="gl")

    for see in (of_image, of_pyramid):
        planned = lod.plan(see, image, point)
        assert not planned.replays and "tiles that the fixation's values decide" in planned.reason
        assert lod.plan(lambda x, see=see: see(x, (0.4, 0.6)), image).replays


def _turned(pyramid: lod.Pyramid) -> torch.Tensor:
    return pyramid.levels[1].transpose(-1, -2)


def is_run_again(function: Callable[..., torch.Tensor], why: str) -> None:
    planned = lod.plan(function, noise(1, 1, 12, 9) / 4)
    assert not planned.replays
    assert any(word in planned.reason for word in why.split("|")), planned.reason
    for _ in range(2):
        image = noise(1, 1, 12, 9)
        assert torch.equal(planned(image), function(image))


def test_a_recording_ends_where_torch_would_read_what_hardware_has_yet_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        level = lod.mipmap(x, generator="compute")[1]
        read.append(float(level.sum()))
        return level

    monkeypatch.setattr(Sharing, "software", False)
    image = noise(1, 8, 8)
    planned = lod.plan(function, image)
    assert not planned.replays and "aten.sum" in planned.reason
    assert len(read) == 2, "those before it was recorded"
    assert torch.equal(planned(image), lod.mipmap(image, generator="compute")[1])


def test_what_torch_writes_after_shaders_fetch_it(llvmpipe: lod.Context) -> None:
    """The plan writes before all of its commands, so that it must not write to what one of them reads before."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with llvmpipe.active():
            planes, values = new_planes(llvmpipe, (1, 8, 8), torch.float32)
            planes.fetch(1)
            put(llvmpipe, values, x)
        return lod.mipmap(x, generator="compute")[1]

    planned = lod.plan(function, noise(1, 8, 8))
    assert not planned.replays and "torch computes" in planned.reason


def test_what_torch_writes_after_the_host_read_it(llvmpipe: lod.Context) -> None:
    """The same of a step of the host between commands."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with llvmpipe.active():
            _, values = new_planes(llvmpipe, (1, 8, 8), torch.float32)
            recording.step(values.sum, reads=[values])
            put(llvmpipe, values, x)
        return lod.mipmap(x, generator="compute")[1]

    planned = lod.plan(function, noise(1, 8, 8))
    assert not planned.replays and "torch computes" in planned.reason


@pytest.mark.usefixtures("llvmpipe")
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_textures_are_made_again_as_calls_make_them(
    monkeypatch: pytest.MonkeyPatch, restored_limits: lod.Context, dtype: torch.dtype, *, buffered: bool
) -> None:
    """By the host, between commands: shaders that store texels take a software renderer several times as long."""
    if not buffered:
        restored_limits.limits.texels = 0
    written: list[int] = []
    write = Uploader.write
    monkeypatch.setattr(Uploader, "write", lambda *args: written.append(args[3]) or write(*args))

    def function(image: torch.Tensor, fixation: torch.Tensor) -> Any:
        pyramid = lod.mipmap(image, 4, backend="gl").upload()
        first = lod.log_polar(pyramid, fixation, 8, 16, backend="gl")
        inner = lod.mipmap(first, 2, backend="gl").upload()
        return first, lod.log_polar(inner, fixation, 5, 6, backend="gl")

    with restored_limits:
        shape = (2, 3, 101, 134)
        planned = lod.plan(function, noise(*shape, dtype=dtype), FIXATION)
        assert planned.replays, planned.reason
        for _ in range(3):
            image = noise(*shape, dtype=dtype)
            written.clear()
            found = [one.clone() for one in planned(image, FIXATION.flip(0))]
            assert written == [0, 1, 2, 3, 0, 1]
            for ours, called in zip(found, function(image, FIXATION.flip(0)), strict=True):
                assert torch.equal(ours, called)


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


def test_tensors_by_name_stand_in_the_order_they_came_in() -> None:
    image, before = noise(3, 20, 30), noise(3, 20, 30)
    planned = lod.plan(lod.feature_maps, previous=before, image=image, backend="gl")
    assert planned.replays and torch.equal(planned.inputs[0], before) and torch.equal(planned.inputs[1], image)
    assert torch.equal(planned(image, before), lod.feature_maps(before, previous=image, backend="gl"))


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
    for named in ({"fixation": FIXATION}, {"backend": "torch"}):
        with pytest.raises(InputError, match="by position"):
            planned(noise(2, 3, 50, 37), **named)
    with pytest.raises(InputError, match="no argument"):
        lod.plan(lod.cortical_sites, (0.5, 0.5))
    with pytest.raises(InputError, match="gradients"):
        lod.plan(lod.mipmap, noise(1, 4, 4).requires_grad_())
    image = noise(1, 4, 4).requires_grad_()
    with torch.no_grad():  # nothing asks for them there, as at a call
        assert torch.equal(lod.plan(lod.mipmap, image, generator="compute")(image)[1], lod.mipmap(image)[1])
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
    assert "RuntimeError: now" in lod.plan(third_time, image).reason
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


def test_threads_that_a_plan_runs_the_function_for_have_their_own_results() -> None:
    """As of an allocator on a CPU."""
    both: list[threading.Barrier] = []

    def function(image: torch.Tensor) -> lod.Pyramid:
        for barrier in both:
            barrier.wait(30)
        return lod.mipmap(image, backend="torch")

    images = [noise(1, 8, 8), noise(2, 8, 8)[1:]]
    planned = lod.plan(function, images[0])
    assert not planned.replays
    both.append(threading.Barrier(2))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(planned, images))
    both.clear()
    planned(torch.zeros(1, 8, 8))
    for image, pyramid in zip(images, found, strict=True):
        assert torch.equal(pyramid[0], image) and torch.equal(pyramid[1], lod.mipmap(image)[1])
    swapped = lod.plan(lambda a, b: (a.clone(), b.clone()), *images)
    assert torch.equal(swapped(*reversed(swapped.inputs))[0], images[1])


def test_a_dead_plan_gives_its_memory_back(ctx: lod.Context) -> None:
    lod.plan(retina, noise(2, 3, 50, 37), FIXATION)  # tables that the context keeps are not the plan's
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
        except ContextClosedError as error:
            assert "plan the function again" in str(error), error
        else:
            raise SystemExit("replayed in a closed context")
        """
    )
    assert ContextClosedError


# -- what a plan must not lose sight of --------------------------------------------------------------------------------


def test_tables_that_other_calls_push_out_stay(ctx: lod.Context) -> None:
    planned = lod.plan(lod.mipmap, noise(1, 100, 129), generator="single-pass")
    polar = lod.plan(retina, noise(1, 3, 40, 31), FIXATION[:1])
    small = lod.mipmap(noise(1, 16, 16), backend="gl").upload()
    for rings in range(3, 80):
        lod.log_polar(small, (0.4, 0.6), rings, 2 * rings, backend="gl")
    ctx.trim()
    for _ in range(3):
        lod.log_polar(small, (0.4, 0.6), 90, 180, backend="gl")
        image, colours = noise(1, 100, 129), noise(1, 3, 40, 31)
        for actual, expected in zip(planned(image), lod.mipmap(image, generator="single-pass"), strict=True):
            assert torch.equal(actual, expected)
        assert torch.equal(polar(colours, FIXATION[:1])[1], retina(colours, FIXATION[:1])[1])


def test_a_pyramid_that_is_returned_has_no_old_texture() -> None:
    planned = lod.plan(lod.mipmap, noise(1, 3, 32, 32), backend="gl")
    first, second = noise(1, 3, 32, 32), noise(1, 3, 32, 32)
    pyramid = planned(first)
    lod.log_polar(pyramid, (0.4, 0.6), 8, 16, backend="gl")
    sampled = lod.plan(lod.log_polar, pyramid, FIXATION[:1], 8, 16, backend="gl")
    derived = lod.mipmap(pyramid[1]).upload()
    assert planned(second) is pyramid
    expected = lod.log_polar(lod.mipmap(second, backend="gl"), (0.4, 0.6), 8, 16, backend="gl")
    assert torch.equal(lod.log_polar(pyramid, (0.4, 0.6), 8, 16, backend="gl"), expected)
    with pytest.raises(PyramidChangedError, match="planned"):
        sampled(FIXATION[:1])
    with pytest.raises(PyramidChangedError):
        lod.log_polar(derived, (0.4, 0.6), 8, 16)


@pytest.mark.parametrize("which", ["input", "result", "elsewhere"])
def test_tensors_that_were_given_other_memory_are_told_of(ctx: lod.Context, which: str) -> None:
    """As a queue to another process does it: GL commands know the old memory alone."""
    elsewhere = ctx.empty(3, 24, 40).copy_(noise(3, 24, 40))

    def both(image: torch.Tensor) -> Any:
        return [lod.mipmap(x, generator="single-pass")[1] for x in (image, elsewhere)]

    image = noise(3, 37, 50)
    planned = lod.plan(both, image)
    assert planned.replays and torch.equal(planned(image)[0], both(image)[0])
    {"input": planned.inputs[0], "result": planned(image)[0], "elsewhere": elsewhere}[which].share_memory_()
    with pytest.raises(BufferMovedError, match=r"clone\(\)"):
        planned(noise(3, 37, 50))
    assert torch.equal(lod.plan(both, image)(image)[1], both(image)[1])


def test_results_that_are_overwritten_count_as_changed() -> None:
    planned = lod.plan(lod.mipmap, noise(1, 8, 8), backend="gl")
    weight = torch.ones(1, 4, 4, requires_grad=True)
    loss = (planned(noise(1, 8, 8))[1] * weight).sum()
    planned(noise(1, 8, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@dataclass
class Seen:
    """A result that torch does not look into."""

    inside: Any


def test_results_in_dataclasses_count_as_changed_too() -> None:
    """Where they do not, a backward takes the next call's values, and a pyramid is never what the plan made last."""
    planned = lod.plan(lambda image: Seen({"seen": Seen(lod.mipmap(image, backend="gl"))}), noise(1, 3, 16, 16))
    assert planned.replays, planned.reason
    for seed in range(2):
        torch.manual_seed(seed)
        image = noise(1, 3, 16, 16)
        pyramid = planned(image).inside["seen"].inside
        expected = lod.mipmap(image, backend="gl")
        found, oracle = (lod.log_polar(x.upload(), (0.4, 0.6), 4, 8, backend="gl") for x in (pyramid, expected))
        assert torch.equal(found, oracle)
    loss = (pyramid[1] * torch.ones(1, requires_grad=True)).sum()
    planned(image)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_calls_in_compiled_code() -> None:
    """What is compiled is what stands round them."""
    planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    by_torch = lod.plan(lod.mipmap, noise(2, 3, 50, 37), backend="torch")
    run = torch.compile(lambda image: planned(2 * image, FIXATION)[1] + by_torch(image)[0].mean(), backend="eager")
    for seed in range(2):
        torch.manual_seed(seed)
        image = noise(2, 3, 50, 37)
        assert torch.equal(run(image), retina(2 * image, FIXATION)[1] + image.mean())


def test_tensors_of_torch_func_are_refused() -> None:
    image = noise(2, 3, 50, 37)
    for planned in (lod.plan(lod.mipmap, image, backend="gl"), lod.plan(lod.mipmap, image, backend="torch")):

        def run(image: torch.Tensor, planned: lod.Plan = planned) -> torch.Tensor:
            result: torch.Tensor = planned(image)[1]
            return result

        with pytest.raises(UnsupportedError, match="Call the function itself"):
            torch.vmap(run)(image[None])
        with pytest.raises(UnsupportedError, match="Call the function itself"):
            torch.func.jvp(run, (image,), (image,))
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="Call the function itself"):
            run(forward_ad.make_dual(image, image))


def test_plans_inside_plans() -> None:
    inner = lod.plan(lod.mipmap, noise(1, 20, 20), backend="gl")

    def both(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inner(image)[2], lod.hiz(image, backend="gl")[2]

    outer = lod.plan(both, noise(1, 20, 20))
    assert outer.replays
    length = len(inner._recorded.tape)
    for _ in range(3):
        image = noise(1, 20, 20)
        expected = lod.mipmap(image, backend="gl")[2], lod.hiz(image, backend="gl")[2]
        assert all(torch.equal(a, b) for a, b in zip(outer(image), expected, strict=True))
        assert torch.equal(inner(image)[2], expected[0]) and len(inner._recorded.tape) == length

    def planning(image: torch.Tensor) -> torch.Tensor:
        return lod.plan(lod.mipmap, image, backend="gl")(image)[2]

    again = lod.plan(planning, noise(1, 20, 20))
    assert not again.replays and "makes a plan" in again.reason
    assert torch.equal(again(image), expected[0])


def test_inputs_that_are_each_other() -> None:
    """Frame after frame: the last one is the other input."""
    frames = [noise(1, 3, 20, 31) for _ in range(4)]
    planned = lod.plan(lambda a, b: lod.feature_maps(a, previous=b, backend="gl"), *frames[:2])
    assert planned.replays, planned.reason

    def expected(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return lod.feature_maps(now, previous=before, backend="gl")

    planned(frames[0], frames[1])
    assert torch.equal(planned(frames[2], planned.inputs[0]), expected(frames[2], frames[0]))
    assert torch.equal(planned(planned.inputs[1], planned.inputs[0]), expected(frames[0], frames[2]))
    square = lod.plan(lod.mipmap, noise(1, 8, 8), backend="gl")
    image = noise(1, 8, 8)
    square(image)
    assert torch.equal(square(square.inputs[0].transpose(1, 2))[1], lod.mipmap(image.mT, backend="gl")[1])


def test_what_the_function_finds_elsewhere_is_kept(ctx: lod.Context) -> None:
    frame = ctx.empty(1, 16, 16)
    frame.fill_(3.0)
    state: dict[str, Any] = {"pyramid": lod.mipmap(noise(1, 3, 24, 24), backend="gl").upload(), "frame": frame}

    def look(fixation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        polar = lod.log_polar(state["pyramid"], fixation, 8, 16, backend="gl")
        return polar, lod.mipmap(state["frame"], backend="gl")[2]

    planned = lod.plan(look, FIXATION[:1])
    assert planned.replays, planned.reason
    expected = [tensor.clone() for tensor in planned()]
    state.clear()
    del frame
    gc.collect()
    ctx.trim()
    others: list[Any] = [lod.mipmap(noise(1, 3, 24, 24), backend="gl").upload() for _ in range(3)]
    others.append(ctx.empty(1, 16, 16).fill_(9.0))
    assert all(torch.equal(a, b) for a, b in zip(planned(), expected, strict=True))


def test_a_pyramid_elsewhere_that_changes() -> None:
    pyramid = lod.mipmap(noise(1, 3, 24, 24), backend="gl").upload()
    planned = lod.plan(lambda at: lod.log_polar(pyramid, at, 8, 16, backend="gl"), FIXATION[:1])
    assert planned.replays
    pyramid[0].mul_(2)
    with pytest.raises(PyramidChangedError, match="planned"):
        planned()


def write_after(image: torch.Tensor) -> torch.Tensor:
    level = lod.mipmap(image, backend="gl")[1]
    level.zero_()
    return level


def last_as_fixation(image: torch.Tensor) -> torch.Tensor:
    pyramid = lod.mipmap(image, backend="gl").upload()
    return lod.log_polar(pyramid, pyramid[-1].view(2), 8, 16, backend="gl")


def random_place(image: torch.Tensor) -> torch.Tensor:
    return lod.log_polar(lod.mipmap(image, backend="gl").upload(), torch.rand(2), 8, 16, backend="gl")


@pytest.mark.parametrize(
    ("function", "shape", "why"),
    [
        (write_after, (1, 16, 16), "zero_"),
        (last_as_fixation, (2, 16, 16), "on the host what a verb made"),
        (random_place, (1, 16, 16), "random"),
    ],
)
def test_more_that_cannot_be_repeated(function: Callable[..., torch.Tensor], shape: Any, why: str) -> None:
    planned = lod.plan(function, noise(*shape))
    assert not planned.replays and why in planned.reason
    image = noise(*shape)
    torch.manual_seed(5)
    actual = planned(image).clone()
    torch.manual_seed(5)
    assert torch.equal(actual, function(image))


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x, f: lod.log_polar(lod.mipmap(x, backend="gl").upload(), f, 9, 8, backend="gl"), (2,)),
        (lambda x, f: lod.log_polar(lod.mipmap(x, backend="gl").upload(), f, 9, 8, backend="gl"), (1, 2)),
        (lambda x, f: lod.inverse_log_polar(x, f, (9, 8), backend="gl"), (2,)),
        (lambda x, f: lod.feature_maps(x, f, backend="gl"), (2,)),
        (lambda x, b: lod.region_max(lod.hiz(x, backend="gl"), b, backend="gl"), (5, 4)),
        (lambda x, s: lod.gather_patches(lod.mipmap(x, backend="gl").upload(), s, 4, backend="gl"), (5, 3)),
    ],
)
def test_one_place_for_all_images_of_a_batch(function: Callable[..., torch.Tensor], rows: tuple[int, ...]) -> None:
    """Each image's is read from the same memory, by every call anew."""
    planned = lod.plan(function, noise(3, 3, 13, 17), torch.rand(rows).sort().values)
    assert planned.replays, planned.reason
    for _ in range(2):
        image, places = torch.rand(3, 3, 13, 17), torch.rand(rows).sort().values
        assert torch.equal(planned(image, places), function(image, places))


def test_sites_that_stay_decide_nothing() -> None:
    """How many levels of an image's chain they read is known, then."""
    sites = torch.tensor([[0.5, 0.5, 1.2], [0.2, 0.3, 0.0]])

    def patches(image: torch.Tensor) -> torch.Tensor:
        return lod.gather_patches(image, sites, 14, backend="gl")

    planned = lod.plan(patches, noise(2, 3, 50, 37))
    assert planned.replays, planned.reason
    for seed in range(2):
        torch.manual_seed(seed)
        image = noise(2, 3, 50, 37)
        assert torch.equal(planned(image), patches(image))
    assert "sites' values" in lod.plan(lod.gather_patches, noise(2, 3, 50, 37), sites, 14, backend="gl").reason


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy])
def test_plans_are_not_copied(copying: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedError, match="plan the function where"):
        copying(lod.plan(lod.mipmap, noise(1, 8, 8)))


def on(image: torch.Tensor, place: Any) -> torch.Tensor:
    return lod.log_polar(lod.mipmap(image, backend="gl"), place, 6, 8, backend="gl")


MADE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "tuple": lambda image, x, y: on(image, (x, y)),
    "parts": lambda image, x, y: on(image, tuple(torch.Tensor.view(y, 1).expand(2))),
    "tensor": lambda image, x, y: on(image, torch.tensor([x, y])),
    "as_tensor": lambda image, x, y: on(image, torch.as_tensor((x, y))),
    "asarray": lambda image, x, y: on(image, torch.asarray([x, y])),
    "new_tensor": lambda image, x, y: on(image, image.new_tensor([x, y])),
    "Tensor": lambda image, x, y: on(image, torch.Tensor([x, y])),
    "nested": lambda image, x, y: lod.gather_patches(image, [[x, y, 0.0]], 4, backend="gl"),
    "index": lambda image, x, y: on(image, [(0.2, 0.3), (0.7, 0.6)][(x * 1.5).long()]),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_made_of_sequences_of_inputs_are_not_repeated(name: str, ctx: lod.Context) -> None:
    """Torch reads their values past its dispatcher."""
    image = noise(3, 16, 16)
    plan = lod.plan(MADE[name], image, torch.tensor(0.2), torch.tensor(0.3))
    for x, y in ((0.8, 0.6), (0.4, 0.9)):
        given = image, torch.tensor(x), torch.tensor(y)
        assert torch.equal(plan(*given), MADE[name](*given))
    assert (not plan.replays and "host" in plan.reason) or name == "index"


def test_a_sparse_tensor_is_refused(ctx: lod.Context) -> None:
    plan = lod.plan(lambda x: lod.mipmap(x, backend="gl"), noise(3, 8, 8))
    with pytest.raises(InputError, match="expected an ordinary dense tensor"):
        plan(noise(3, 8, 8).to_sparse())


def test_state_that_moves_on_in_gl_memory(ctx: lod.Context) -> None:
    def watching() -> Callable[[torch.Tensor], torch.Tensor]:
        before = ctx.empty(1, 3, 12, 9)
        before.zero_()

        def step(image: torch.Tensor) -> torch.Tensor:
            maps = lod.feature_maps(image, previous=before, backend="gl")
            before.copy_(image)
            return maps

        return step

    planned, plain = lod.plan(watching(), noise(1, 3, 12, 9)), watching()
    assert not planned.replays
    for _ in range(3):
        image = noise(1, 3, 12, 9)
        actual, expected = planned(image), plain(image)
    assert torch.equal(actual, expected)


def test_another_context_is_not_recorded() -> None:
    succeed(
        """
        import torch, gpu_lod as lod, moderngl
        own = lod.Context()
        held = own.empty(1, 12, 12)
        held.copy_(torch.rand(1, 12, 12))
        with moderngl.create_context(standalone=True, backend="egl", require=430) as window:
            adopted = lod.Context.adopt(window)
            with adopted:
                def both(image):
                    return lod.hiz(image, backend="gl")[2], lod.mipmap(held, backend="gl")[2]
                planned = lod.plan(both, torch.rand(1, 12, 12))
                assert not planned.replays and "another" in planned.reason, planned.reason
                held.copy_(torch.rand(1, 12, 12))
                image = torch.rand(1, 12, 12)
                for a, b in zip(planned(image), both(image)):
                    assert torch.equal(a, b)
        """
    )


def test_a_call_that_is_cut_short_spoils_nothing(restored_limits: lod.Context) -> None:
    """The single-pass generator counts tiles in memory that its next user finds at zero."""
    restored_limits.limits.shared_bytes = 1500
    restored_limits.limits.storage_bytes = 20_000
    image = noise(1, 1, 233, 33)
    planned = lod.plan(lod.mipmap, image, generator="single-pass")
    assert planned.replays
    expected = [level.clone() for level in planned(image)]
    tape = planned._recorded.tape
    cut = [i for i, (command, _) in enumerate(tape) if command is restored_limits.gl.DispatchCompute][1]

    def raises() -> None:
        raise MemoryError("now")

    tape.insert(cut, (raises, ()))
    with pytest.raises(MemoryError, match="now"):
        planned(image)
    del tape[cut]
    for actual, one, other in zip(planned(image), expected, lod.mipmap(image, generator="single-pass"), strict=True):
        assert torch.equal(actual, one) and torch.equal(other, one)


def test_inference_mode() -> None:
    with torch.inference_mode():
        planned = lod.plan(retina, noise(2, 3, 50, 37), FIXATION)
    assert planned.replays, planned.reason
    image = noise(2, 3, 50, 37)
    assert torch.equal(planned(image, FIXATION)[1], retina(image, FIXATION)[1])
    with torch.inference_mode():
        assert torch.equal(planned(image, FIXATION)[1], retina(image, FIXATION)[1])


def test_inputs_are_the_plans_own_also_where_it_runs_the_function() -> None:
    image = noise(1, 8, 8)
    planned = lod.plan(lod.mipmap, image, backend="torch")
    assert not planned.replays and planned.inputs[0] is not image
    kept = planned.inputs[0]
    planned(noise(1, 8, 8))
    kept.copy_(image)
    assert torch.equal(planned()[1], lod.mipmap(image)[1]) and planned.inputs[0] is kept
