"""Each use of memory that shaders wrote to stands behind a barrier that names it (barriers.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from barriers import Memory
from calls import CALLS
from images import noise

import gpu_lod as lod
from gpu_lod.program import Program
from gpu_lod.sharing import Sharing
from gpu_lod.tuning import tuning

GENERATORS = ["compute", "registers", "single-pass", "single-pass-texture", "fragment", "driver", "sampler"]


@pytest.fixture(params=["software", "hardware"])
def followed(request: pytest.FixtureRequest, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both ways that verbs take, on this renderer."""
    if request.param == "hardware":
        monkeypatch.setattr(Sharing, "software", False)
        monkeypatch.setattr(ctx, "tuning", tuning(software=False))
        monkeypatch.setattr(ctx.programs, "pairs", ctx.tuning.pairs)
    memory = Memory()
    with memory.following(ctx):
        yield memory


def test_a_missing_barrier_is_seen(followed: Memory, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks below can say no: to shaders, textures and the host's reads alike."""
    monkeypatch.setattr(ctx.gl, "MemoryBarrier", lambda bits: None)
    image = noise(2, 3, 45, 70)
    for generator in ("compute", "fragment"):
        lod.mipmap(image, generator=generator)
    lod.cull(lod.hiz(image, generator="sampler"), 0.5, backend="gl")
    seen = " | ".join(followed.hazards)
    for first, then in (
        ("reduce_level.comp, which writes to a buffer", "reduce_level.comp"),
        ("planes_to_texels.comp, which writes to a texture", "reduce_level.frag"),
        ("minmax_level.comp, which writes to a texture", "minmax_level.comp"),
        ("cull.comp, which writes to a buffer", "an indirect dispatch"),
        ("cull.comp, which writes to a buffer", "glGetBufferSubData"),
    ):
        assert f"no barrier between {first}, and {then}" in seen, (first, then)
    assert "no barrier behind texels_to_planes.comp" in seen


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "gl" in call.backends])
def test_every_verb(followed: Memory, name: str) -> None:
    call = CALLS[name]
    call.run(*call.inputs(), backend="gl")
    assert not followed.hazards


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("generator", GENERATORS)
def test_every_generator(followed: Memory, generator: Any, dtype: torch.dtype) -> None:
    for size in ((48, 80), (45, 70)):
        image = noise(2, 3, *size, dtype=dtype)
        if generator != "sampler":
            lod.mipmap(image, generator=generator)
        if generator not in ("driver", "single-pass-texture"):
            lod.hiz(image, generator=generator)
    assert not followed.hazards


def test_work_in_parts(followed: Memory, restored_limits: lod.Context) -> None:
    restored_limits.limits.storage_bytes = 2**15
    image = noise(2, 3, 300, 40)
    for generator in GENERATORS[:4]:
        lod.mipmap(image, generator=generator)
    for verb in (lod.oriented_energy, lod.feature_maps, lod.laplacian):
        verb(image, backend="gl")
    lod.log_polar(image, (0.3, 0.6), 120, 150, generator="fragment")
    assert not followed.hazards


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=str)
def test_rows_that_are_no_whole_words(followed: Memory, dtype: torch.dtype) -> None:
    image = noise(2, 3, 24, 31, dtype=dtype)
    lod.foveate(lod.mipmap(image), (0.3, 0.6), backend="gl")
    lod.inverse_log_polar(image, (0.3, 0.6), (20, 29), backend="gl")
    lod.feature_maps(image, backend="gl")
    assert not followed.hazards


def test_pooled_memory_is_written_anew(followed: Memory, ctx: lod.Context) -> None:
    """What shaders wrote to in one verb holds tables in the next, or is cleared."""
    ctx.trim()
    image = noise(1, 3, 24, 32, dtype=torch.uint8)
    lod.gaussian(image, backend="gl")
    lod.inverse_log_polar(image, (0.5, 0.5), (20, 20), backend="gl")
    hz = lod.hiz(image, backend="gl")
    for _ in range(2):
        lod.cull(hz, 100, backend="gl")
    assert not followed.hazards


def test_counters_are_cleared_behind_the_dispatches_that_count(
    followed: Memory, restored_limits: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a chain fails on the way."""
    restored_limits.limits.storage_bytes = 2**15
    done = []
    run = Program.dispatch_groups

    def fails(program: Program, *groups: int) -> None:
        run(program, *groups)
        done.append(groups)
        if len(done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Program, "dispatch_groups", fails)
    with pytest.raises(KeyboardInterrupt):
        lod.mipmap(noise(2, 3, 300, 40), generator="single-pass")
    assert [hazard for hazard in followed.hazards if "glClear" in hazard] == []
