"""What no verb can read a number, a size or a dtype from is a named error that does not come from inside torch."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scripts import run

import gpu_lod as lod
from gpu_lod import checks
from gpu_lod.errors import InputError

IMAGE, SITES, HUGE = torch.rand(1, 3, 16, 16), torch.tensor([[0.5, 0.5, 0.0]]), 10**5000
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is a prototype, and will not even say its sizes
    NESTED = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)])
META, BOXES = torch.tensor(0.5, device="meta"), torch.tensor([[0.1, 0.2, 0.6, 0.7]])


def hz() -> lod.Pyramid:
    return lod.hiz(torch.rand(1, 1, 16, 16), backend="torch")


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a number on meta": (lambda: lod.foveate(IMAGE, (0.5, 0.5), META), r"e0 is strided float32 tensor \(\) on meta"),
    "a complex number": (lambda: lod.foveate(IMAGE, (0.5, 0.5), torch.tensor(1j)), "e0 is strided complex64 tensor"),
    "a nested number": (lambda: lod.log_polar(IMAGE, (0.5, 0.5), 4, 4, r_max=NESTED), "r_max is nested tensor"),
    "a mean on meta": (lambda: lod.gather_patches(IMAGE, SITES, 4, mean=META.expand(3)), "mean is a .* on meta"),
    "a sparse std": (lambda: lod.mipmap(IMAGE, std=torch.ones(3).to_sparse()), "std is a sparse_coo"),
    "a threshold on meta": (lambda: lod.cull(hz(), META), "threshold is a .* on meta"),
    "nested boxes": (lambda: lod.region_max(hz(), NESTED), "boxes is a nested tensor"),
    "nested boxes, explained": (lambda: lod.explain(lod.region_max, hz().upload(), NESTED), "boxes is a nested tensor"),
    "a huge patch": (lambda: lod.cortical_sites((0.5, 0.5), 7, (33, 40), HUGE), "patch is beyond 64 bits"),
    "huge levels": (lambda: lod.mipmap(IMAGE, HUGE), "levels is beyond 64 bits"),
    "a huge negative size": (lambda: lod.log_polar(IMAGE, (0.5, 0.5), -HUGE, 4), "rings is beyond 64 bits"),
    "a huge threshold": (lambda: lod.cull(hz(), HUGE), "threshold is <int of very many digits>"),
    "a huge number": (lambda: lod.foveate(IMAGE, (0.5, 0.5), HUGE), "e0 is int <int of very many digits"),
    "a huge choice": (lambda: lod.mipmap(IMAGE, reduce=HUGE), "reduce is <int of very many digits>"),  # type: ignore
    "a huge flag": (lambda: lod.feature_maps(IMAGE, video=HUGE), "video is <int of very many digits>"),  # type: ignore
    "a tensor's integer": (lambda: lod.mipmap(IMAGE, torch.tensor(2)), r"levels is .*2.*Make it one with int\(\)"),  # type: ignore
    "too many levels by numpy": (lambda: lod.mipmap(IMAGE, np.int64(9)), "levels is 9, but"),
    "a boolean of numpy's": (lambda: lod.mipmap(IMAGE, np.bool_(True)), "levels is .*True"),  # type: ignore
    "a huge size": (lambda: lod.cortical_sites((0.5, 0.5), 7, (HUGE, 40)), "height is beyond 64 bits"),
    "orientations": (lambda: lod.oriented_energy(IMAGE, orientations=10**9), "from 1 to 360"),
    "a size beyond fp32's pixels": (lambda: lod.inverse_log_polar(IMAGE, (0.5, 0.5), (4, 2**24 + 1)), "width is"),
    "an array for a dtype": (lambda: lod.gather_patches(IMAGE, SITES, 4, dtype=np.ones(2)), "dtype is"),
    "an array for the maps' dtype": (lambda: lod.feature_maps(IMAGE, dtype=np.array([])), "dtype is"),  # type: ignore
    "another byte order": (lambda: lod.mipmap(np.zeros((3, 4, 4), ">f4")), "in the machine's byte order"),  # type: ignore
    "a masked image": (lambda: lod.mipmap(np.ma.zeros((3, 4, 4), np.float32)), "image is a masked array"),  # type: ignore
    "a masked fixation": (lambda: lod.foveate(IMAGE, np.ma.zeros(2)), "fixation is a masked array"),
    "a set for a verb": (lambda: lod.explain(set()), "chooses no backend"),  # type: ignore[arg-type]
    "no function to plan": (lambda: lod.plan(5, IMAGE), "function is a int; expected a verb"),  # type: ignore[arg-type]
    "a nested argument of a plan": (lambda: lod.plan(lambda x: x, NESTED), "plan is a nested tensor"),
    "a sparse argument of a plan": (lambda: lod.plan(lambda x: x, torch.eye(3).to_sparse()), "plan is a sparse_coo"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_input_errors(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("previous", lambda away: lod.feature_maps(IMAGE, previous=torch.zeros_like(IMAGE, device=away))),
        ("semantic", lambda away: lod.feature_maps(IMAGE, semantic=torch.rand(16, 16, 16, device=away))),
        ("boxes", lambda away: lod.region_max(hz(), BOXES.to(away))),
        ("boxes", lambda away: lod.region_min(lod.hiz(IMAGE, "min"), BOXES.to(away))),
        ("features", lambda away: lod.TokenSet(SITES, SITES[:, 0], None, 4, features=SITES.to(away))),
        ("sites", lambda away: lod.rebuild(lod.TokenSet(SITES, SITES[:, 0], IMAGE[..., :4, :4].to(away), 4), (9, 9))),
    ],
)
def test_tensors_on_two_devices(monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[str], object]) -> None:
    """There is one here, so meta, which is refused before, stands for another."""
    monkeypatch.setattr(checks, "dense", checks.tensor)
    with pytest.raises(InputError, match=rf"{name} is on (meta and .* on cpu|cpu and .* on meta); move one with"):
        call("meta")
    call("cpu")


NUMPY: dict[str, Callable[[Callable[[int], Any]], Any]] = {
    "levels": lambda n: lod.mipmap(IMAGE, n(3), backend="gl").levels[2],
    "levels in torch": lambda n: lod.gaussian(IMAGE, n(3), backend="torch").levels[2],
    "patch": lambda n: lod.gather_patches(IMAGE, SITES, n(7), backend="gl"),
    "rings, wedges": lambda n: lod.log_polar(IMAGE, (0.5, 0.5), n(6), n(9), backend="gl"),
    "size": lambda n: lod.inverse_log_polar(IMAGE, (0.5, 0.5), (n(20), n(30)), backend="gl"),
    "orientations": lambda n: lod.oriented_energy(IMAGE, n(2), n(3), backend="gl")[1],
    "sites": lambda n: lod.cortical_sites((0.5, 0.5), n(30), (n(40), n(50)), n(7)),
    "budget": lambda n: lod.allocate.GridTopK(n(5), n(4))(IMAGE).patches,
    "split": lambda n: lod.allocate.FrequencyAware(n(5), n(4), split=[n(8)] * 4)(IMAGE).sites,
    "peaks": lambda n: lod.allocate.Voronoi(n(5), n(4), peaks=n(2))(IMAGE).sites,
    "vortices": lambda n: lod.allocate.SoftVortex(n(5), n(4), vortices=n(3))(IMAGE).sites,
}


@pytest.mark.parametrize("name", NUMPY)
def test_integers_of_numpy_are_integers(name: str) -> None:
    call = NUMPY[name]
    assert call(np.int64).equal(call(int)) and call(np.uint8).equal(call(int))


def test_shapes_of_buffers() -> None:
    with lod.Context() as ctx:
        made = ctx.empty((np.int64(2), np.uint8(3)), torch.uint8)
        assert (*made.shape, made.dtype) == (2, 3, torch.uint8)
        made = ctx.empty(2, 3, torch.float16)
        assert (*made.shape, made.dtype) == (2, 3, torch.float16)
        with pytest.raises(InputError, match="expected one or more positive integers"):
            ctx.empty(2, 3, torch.float16, dtype=torch.uint8)
        for shape in ((), (torch.uint8,), (2, True), (2, 0), (2.0, 3), (-2, -3)):
            with pytest.raises(InputError, match="expected one or more positive integers"):
                ctx.empty(*shape)


def test_results_beyond_memory_are_named() -> None:
    done: subprocess.CompletedProcess[str] = run("""
        import resource, torch
        import gpu_lod as lod
        image = torch.rand(1, 8, 8)
        lod.log_polar(image, (0.5, 0.5), 4, 4, backend="torch")
        tokens = lod.allocate.GridTopK(4, 4)(torch.rand(3, 16, 16))
        resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
        for call in (
            lambda: lod.inverse_log_polar(image, (0.5, 0.5), (10**5, 10**5), backend="torch"),
            lambda: lod.log_polar(image, (0.5, 0.5), 10**6, 10**6, backend="torch"),
            lambda: lod.rebuild(tokens, (10**5, 10**5)),
            lambda: lod.rebuild(tokens, (2**24, 2**24)),
        ):
            try:
                call()
            except lod.errors.OutOfMemoryError as error:
                assert "does not fit memory" in str(error) and isinstance(error, MemoryError)
            else:
                raise AssertionError
        print(lod.log_polar(image, (0.5, 0.5), 4, 4, backend="torch").shape)
    """)
    assert done.stdout == "torch.Size([1, 4, 4])\n", done.stderr


def test_the_way_out_fits_what_came() -> None:
    pictures = [torch.rand(1, 32, 32), torch.rand(1, 40, 32)]
    with pytest.raises(InputError, match=r"torch\.stack; of several sizes, call this for each"):
        lod.mipmap(pictures)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"torch\.tensor\(values\)"):
        lod.mipmap([[1.0, 2.0]])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"13 channels; expected 1 to 4\. Take some of them: .* gather_patches"):
        lod.allocate.GridTopK(4, 8)(torch.rand(13, 40, 40))
    with pytest.raises(InputError, match=r"768 channels; expected 1 to 4\. Take some of them"):
        lod.foveate(torch.rand(1, 768, 24, 24), (0.5, 0.5))
    for shape in ((40, 50, 3), (250, 330, 13)):
        with pytest.raises(InputError, match="channels seem to come last"):
            lod.mipmap(torch.rand(shape))


def test_arrays_that_may_not_be_written_to_are_read_without_a_word() -> None:
    sites, image = np.array([[0.5, 0.5, 0.0]], np.float32), torch.rand(1, 32, 32)
    sites.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lod.gather_patches(image, sites, 8)
        lod.foveate(image, np.broadcast_to(np.float32(0.5), 2))
    assert torch.equal(found, lod.gather_patches(image, sites.tolist(), 8))
