"""Copies into memory that OpenGL works on next, and threads of torch that verbs leave asleep."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod import copies

SIDE = 200
"""Of pictures whose planes torch copies on several threads."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_put_is_what_torch_copies(ctx: lod.Context, dtype: torch.dtype) -> None:
    whole = noise(2, 3, SIDE, SIDE + 2, dtype=dtype)
    sources = [
        whole,
        whole.contiguous(memory_format=torch.channels_last),
        whole.transpose(2, 3)[..., 1:-1].flip(2),
        whole[:1, :, :, :1].expand(2, -1, SIDE, SIDE),
        whole[..., ::2],
        whole.double(),  # is converted
        torch.empty(0),
    ]
    for source in sources:
        target = torch.full(source.shape, 7, dtype=dtype)
        copies.put(ctx, target, source)
        assert torch.equal(target, source.to(dtype))
    for one in (whole[:1], whole[1], whole[:, :1].double(), whole[:1].double(), whole[1].double()):  # for several
        target = torch.full(whole.shape, 7, dtype=dtype)
        copies.put(ctx, target, one)
        assert torch.equal(target, one.to(dtype).expand(whole.shape))
    wide = torch.full((2, SIDE, SIDE + 2, 4), 7, dtype=dtype)
    copies.put(ctx, wide[..., 1], whole[:, 1])  # every fourth
    assert torch.equal(wide[..., 1], whole[:, 1])
    assert (wide[..., [0, 2, 3]] == 7).all()
    copies.put(ctx, wide, 0.0)
    assert not wide.any()
    copies.put(ctx, wide, 3.0)
    assert (wide == 3).all()


def test_what_torch_has_yet_to_negate(ctx: lod.Context) -> None:
    lazy = torch.rand(SIDE, SIDE, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    target = torch.empty(SIDE, SIDE)
    copies.put(ctx, target, lazy)
    assert torch.equal(target, lazy.clone())


def test_copies_are_changes_in_place(ctx: lod.Context) -> None:
    target = torch.zeros(SIDE, SIDE)
    before = target._version
    copies.put(ctx, target, torch.ones(SIDE, SIDE, requires_grad=True))
    assert target._version > before
    with torch.inference_mode():
        made_there = torch.ones(SIDE, SIDE)
        copies.put(ctx, target, made_there * 2)
    assert (target == 2).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
def test_plans_repeat_them(dtype: torch.dtype) -> None:
    images = noise(2, 1, 3, SIDE, SIDE, dtype=dtype)
    for verb in (lod.laplacian, lod.mipmap, lod.feature_maps):
        if verb is lod.feature_maps:
            planned = lod.plan(lambda x: lod.feature_maps(x, (0.5, 0.5), backend="gl"), images[0])
        else:
            planned = lod.plan(verb, images[0], 3, backend="gl")
        assert planned.replays, planned.reason
        for image in images:
            found = planned(image)
            wanted = verb(image, (0.5, 0.5) if verb is lod.feature_maps else 3, backend="gl")
            for one, two in zip(*(x.levels if isinstance(x, lod.Pyramid) else x for x in (found, wanted)), strict=True):
                assert torch.equal(one, two)


def _slices(threads: list[str]) -> list[int]:
    """How often each thread has been run."""
    return [int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[2]) for thread in threads]


@pytest.fixture
def workers() -> Iterator[Callable[[], list[int]]]:
    """Waits until torch's other threads sleep; tells how often each was run."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("needs Linux's count of when threads ran")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    mine = Path("/proc/thread-self").resolve().name

    def others() -> list[str]:
        return sorted({path.name for path in Path("/proc/self/task").iterdir()} - {mine})

    def parallel() -> None:
        torch.rand(2**20).add_(1)

    parallel()  # makes them
    known = others()

    def asleep() -> list[int]:
        for _ in range(200):
            found = _slices(known)
            time.sleep(0.05)
            if found == _slices(known):
                return found
        pytest.fail("the threads of this process never rest")

    rest = asleep()
    parallel()
    known = [thread for thread, a, b in zip(known, rest, asleep(), strict=True) if a != b]
    assert known, "torch works on one thread"
    yield asleep
    torch.set_num_threads(before)


def _verbs() -> dict[str, Callable[[], Any]]:
    size = (SIDE, SIDE)
    image, fixation = noise(1, 3, *size), torch.tensor([[0.4, 0.6]])
    ready = lod.mipmap(image).upload()
    polar = noise(1, 3, SIDE, SIDE)
    bands = lod.laplacian(image, 3)
    semantic = noise(1, 16, *size)
    sites = lod.cortical_sites(fixation, 273, size)
    planned = lod.plan(lod.mipmap, image, backend="gl")
    batch, fixations = noise(8, 3, 48, 48), torch.rand(8, 2)
    each = lod.mipmap(batch).upload()
    eight = lod.cortical_sites(fixations, 273, (48, 48))
    depth = lod.hiz(noise(1, 1, 64, 64)).upload()
    boxes = torch.tensor([0.1, 0.2, 0.7, 0.6]).expand(1, 2**12, 4)
    return {
        "mipmap": lambda: lod.mipmap(image, backend="gl"),
        "mipmap, planned": lambda: planned(image),
        "hiz": lambda: lod.hiz(image[:, :1], backend="gl"),
        "gaussian": lambda: lod.gaussian(image, 3, backend="gl"),
        "laplacian": lambda: lod.laplacian(image, 3, backend="gl"),
        "collapse": lambda: lod.collapse(bands, backend="gl"),
        "oriented_energy": lambda: lod.oriented_energy(image, 2, backend="gl"),
        "log_polar": lambda: lod.log_polar(ready, fixation, 64, 128, backend="gl"),
        "inverse_log_polar": lambda: lod.inverse_log_polar(polar, fixation, size, backend="gl"),
        "foveate": lambda: lod.foveate(ready, fixation, backend="gl"),
        "foveate, from an image": lambda: lod.foveate(image, fixation, backend="gl"),
        "gather_patches": lambda: lod.gather_patches(ready, sites, backend="gl"),
        "feature_maps": lambda: lod.feature_maps(image, fixation=fixation, backend="gl"),
        "feature_maps of all": lambda: lod.feature_maps(
            image, fixation=fixation, previous=image, semantic=semantic, backend="gl"
        ),
        "cull": lambda: lod.cull(depth, 0.5, backend="gl"),
        "region_max": lambda: lod.region_max(depth, boxes, backend="gl"),
        "log_polar of 8": lambda: lod.log_polar(each, fixations, 64, 64, backend="gl"),
        "inverse_log_polar of 8": lambda: lod.inverse_log_polar(batch, fixations, size, backend="gl"),
        "foveate of 8": lambda: lod.foveate(each, fixations, backend="gl"),
        "gather_patches of 8": lambda: lod.gather_patches(each, eight, backend="gl"),
        "feature_maps of 8": lambda: lod.feature_maps(batch, fixation=fixations, backend="gl"),
        "the choice for 8": lambda: lod.explain(lod.gather_patches, each, eight),
        "sites of 1": lambda: lod.cortical_sites(fixation, 273, size),
        "sites of 8": lambda: lod.cortical_sites(fixations, 273, size),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_verbs_leave_torchs_threads_asleep(ctx: lod.Context, workers: Callable[[], list[int]]) -> None:
    # They would spin for milliseconds on the cores that a software renderer is about to need.
    if not ctx.software:
        pytest.skip("hardware has its own cores")
    woken = []
    for name, verb in _verbs().items():
        verb()  # compiles
        before = workers()
        verb()
        if workers() != before:
            woken.append(name)
    assert not woken
