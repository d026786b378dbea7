"""The single-pass shader with subgroups, on a device that may have none: lanes exchange values through shared memory.

What a driver that has them makes of the shader is for the tests on a GPU to say; the reference compiler takes it.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import reference_compiler
import torch
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, noise
from test_generators import SMALL_TILES, check, check_every_odd_size

import gpu_lod as lod
from gpu_lod import shaders, sharing, single_pass, subgroups
from gpu_lod.bridge import gl as G
from gpu_lod.errors import ShaderError
from gpu_lod.pyramid import level_sizes
from gpu_lod.transfer import packed_planes
from gpu_lod.tuning import tuning

LANES = """
shared uint s_lanes[THREADS_X * THREADS_Y];
uint other_lane(uint value, uint mask) {
    s_lanes[gl_LocalInvocationIndex] = value;
    barrier();
    uint other = s_lanes[gl_LocalInvocationIndex ^ mask];
    barrier();
    return other;
}
float other_lane(float value, uint mask) { return uintBitsToFloat(other_lane(floatBitsToUint(value), mask)); }
#define LANE int(gl_LocalInvocationIndex)
#define LANES_MEET(count_, threads_) true
#define LANES_TOGETHER
#define OTHER_LANE(value_, mask_) other_lane(value_, mask_)
"""
"""What lanes.glsl defines, for workgroups whose lanes all take the same way: of 16 threads."""


_programs: dict[tuple[lod.Context, str], Any] = {}


def emulate(
    ctx: lod.Context, patch: pytest.MonkeyPatch, lanes: str = LANES, threads: tuple[int, int] = (16, 1)
) -> None:
    """Make the context take lanes.glsl to be this."""
    read = shaders._read
    patch.setattr(shaders, "_read", lambda name, stack: lanes if name == "lanes.glsl" else read(name, stack))
    patch.setattr(ctx.programs, "_cache", _programs.setdefault((ctx, lanes), {}))
    patch.setattr(ctx.limits, "subgroup", 32)
    patch.setattr(ctx.limits, "lanes", None)
    patch.setattr(ctx, "tuning", dataclasses.replace(ctx.tuning, single_pass=threads, subgroups=True))


@pytest.fixture
def lanes(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> lod.Context:
    emulate(ctx, monkeypatch)
    return ctx


def layout_of(ctx: lod.Context, size: tuple[int, int]) -> Any:
    chain, _ = packed_planes(ctx, 1, 1, level_sizes(*size, max(size).bit_length()), torch.float32)
    return single_pass._layout(ctx, chain, with_top=False, lanes=True)


def both(image: torch.Tensor, levels: int | None = None) -> None:
    check(lod.mipmap(image, levels=levels, generator="single-pass"), image)
    check(lod.mipmap(image, levels=levels, reduce="max", generator="single-pass"), image, "max")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size",
    [(64, 64), (192, 128), (16, 16), (64, 16), (16, 128), (256, 32), (80, 48), (65, 63), (129, 258), (1, 700), (64, 3)],
    ids=str,
)
def test_tiles(lanes: lod.Context, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Whole tiles, tiles that end in the middle, and sizes whose tiles do without."""
    both(noise(2, 3, *size, dtype=dtype))


@pytest.mark.parametrize("size", [(128, 64), (64, 16), (65, 129), (129, 65), (65, 17)], ids=str)
def test_the_source_kept_as_level_0(lanes: lod.Context, size: tuple[int, int]) -> None:
    """Tiles cover level 0 then, where an odd side takes one more."""
    image = noise(2, 3, *size, dtype=torch.uint8)
    check(lod.mipmap(image, dtype=torch.float32, generator="single-pass"), image / 255)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_every_odd_size_of_extremes(lanes: lod.Context, reduce: str) -> None:
    check_every_odd_size("single-pass", reduce)
    assert lanes.limits.lanes, "refused"


def test_levels_and_tiles(lanes: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(1, 2, 128, 64)
    for levels in range(1, 9):
        both(image, levels)
    for shared_bytes, size in ((SMALL_TILES, (512, 256)), (1500, (512, 256)), (6000, (512, 256))):
        monkeypatch.setattr(lanes.limits, "shared_bytes", shared_bytes)
        both(noise(1, 2, *size, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shared_bytes", "size", "steps"), [(1364, (512, 1024), 5), (1500, (1024, 512), 5)], ids=str)
def test_the_last_workgroup_uses_lanes_too(
    lanes: lod.Context,
    monkeypatch: pytest.MonkeyPatch,
    shared_bytes: int,
    size: tuple[int, int],
    steps: int,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(lanes.limits, "shared_bytes", shared_bytes)
    with lanes.active():
        layout = layout_of(lanes, size)
    assert layout.steps == steps and layout._quads(0) and layout._quads(steps)
    both(noise(2, 2, *size, dtype=dtype))


def test_lanes_meet_in_whole_subgroups_alone(lanes: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 of a tile of four steps has 16 texels, which are half a subgroup's lanes: the others would wait elsewhere.
    The last four levels of 1024 x 1024 are made by such a tile."""
    with lanes.active():
        layout = layout_of(lanes, (1024, 1024))
        assert layout.steps == 6 and layout.subgroups and layout._quads(0) and not layout._quads(6)
        assert layout_of(lanes, (2048, 2048))._quads(6)
        assert not layout_of(lanes, (16, 16)).subgroups
        assert layout_of(lanes, (32, 32)).subgroups
    emulate(lanes, monkeypatch, LANES.replace("^ mask]", "^ mask] * 0u"))
    monkeypatch.setattr(lanes.limits, "lanes", True)
    both(noise(1, 1, 16, 16) + 1)  # right, with lanes that give zeros
    image = noise(1, 1, 32, 32) + 1
    assert not torch.allclose(lod.mipmap(image, generator="single-pass")[3], lod.mipmap(image, backend="torch")[3])


def test_workgroups(lanes: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in ((4, 4), (32, 8)):
        emulate(lanes, monkeypatch, threads=threads)
        both(noise(1, 3, 128, 192), levels=7)


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from([2, 8, 16]), st.sampled_from(DTYPES))
def test_any_size(rows: int, columns: int, unit: int, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        emulate(lod.Context(), patch)
        both(noise(1, 2, rows * unit, columns * unit, dtype=dtype))


def test_lanes_are_what_makes_the_levels(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """From level 3 on: with lanes that give zeros the pictures are wrong there, or nothing above tests them."""
    emulate(ctx, monkeypatch, LANES.replace("^ mask]", "^ mask] * 0u"))
    monkeypatch.setattr(ctx.limits, "lanes", True)  # no questions asked
    image = noise(1, 1, 64, 64) + 1
    wrong, right = lod.mipmap(image, generator="single-pass"), lod.mipmap(image, backend="torch")
    assert [torch.allclose(a, b) for a, b in zip(wrong, right, strict=True)] == [True] * 3 + [False] * 4


@pytest.mark.parametrize(
    ("lanes", "why"),
    [
        (LANES, ""),
        (LANES.replace("^ mask]", "^ mask] * 0u"), "they exchange nothing"),
        (LANES.replace("LANE int(gl_LocalInvocationIndex)", "LANE int(gl_LocalInvocationIndex / 2u)"), "lanes twice"),
        (LANES.replace("true", "(gl_LocalInvocationIndex < 8u)"), "half of them do not meet"),
        ("#extension GL_no_such_thing : require\n", "refused"),
    ],
    ids=lambda value: value[:12] if "\n" not in value else "",
)
def test_a_first_try_says_whether_to_use_them(
    ctx: lod.Context, monkeypatch: pytest.MonkeyPatch, lanes: str, why: str
) -> None:
    emulate(ctx, monkeypatch, lanes)
    both(noise(1, 2, 64, 32))  # right, either way
    assert ctx.limits.lanes is (not why)


@pytest.mark.skipif(not reference_compiler.is_here(), reason="no glslangValidator: apt-get install glslang-tools")
@pytest.mark.parametrize("keep_top", [False, True])
@pytest.mark.parametrize("reduce", ["MEAN", "MAX"])
@pytest.mark.parametrize("per_word", [1, 2, 4])
def test_the_reference_compiler_takes_the_real_one(per_word: int, reduce: str, keep_top: bool) -> None:
    defines: dict[str, Any] = {f"REDUCE_{reduce}": True, "KEEP_TOP": keep_top, "CONVERT": keep_top and reduce == "MEAN"}
    source = shaders.source(
        "single_pass.comp", SUBGROUPS=True, PER_WORD=per_word, SOURCE_PER_WORD=per_word, STEPS=6, FIRST_SIDE=63,
        THREADS_X=32, THREADS_Y=8, **defines,
    )  # fmt: skip
    assert "subgroupShuffleXor(" in source.text
    reference_compiler.refuse({"compute_shader": source})
    reference_compiler.refuse({"compute_shader": shaders.source("lanes.comp", THREADS_X=32, THREADS_Y=8)})


def test_a_driver_that_refuses_the_extension(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shader that uses it, if not in the one that tries it."""
    emulate(ctx, monkeypatch, "#extension GL_no_such_thing : require\n")
    monkeypatch.setattr(ctx.limits, "lanes", True)
    both(noise(1, 2, 64, 32))
    assert ctx.limits.lanes is False
    emulate(ctx, monkeypatch, "// nothing compiled yet")
    monkeypatch.setattr(ctx.limits, "lanes", True)
    real = shaders.source
    broken = real("single_pass.comp", PER_WORD=1)
    broken = dataclasses.replace(broken, text=broken.text + "no such thing;")
    monkeypatch.setattr(shaders, "source", lambda name, **_: broken if name == "single_pass.comp" else real(name, **_))
    with pytest.raises(ShaderError, match="single_pass"):
        lod.mipmap(noise(1, 64, 64), generator="single-pass")
    assert ctx.limits.lanes, "it was not they"


def test_when_they_are_used(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def device(stages: int, features: int, size: int = 32) -> Any:
        answers = {
            G.SUBGROUP_SUPPORTED_STAGES_KHR: stages,
            G.SUBGROUP_SUPPORTED_FEATURES_KHR: features,
            G.SUBGROUP_SIZE_KHR: size,
        }
        return SimpleNamespace(integer=answers.__getitem__)

    here = {"GL_KHR_shader_subgroup"}
    assert sharing._subgroup(device(0x3F, 0xFF), here) == 32
    assert sharing._subgroup(device(0x3F, 0xFF), set()) == 0
    assert sharing._subgroup(device(0x1F, 0xFF), here) == 0  # not in compute shaders
    assert sharing._subgroup(device(0x20, 0xEF), here) == 0  # no shuffles
    monkeypatch.setattr(ctx, "tuning", tuning(software=False))
    monkeypatch.setattr(ctx.limits, "lanes", True)
    for size, used in ((0, False), (8, False), (16, True), (32, True), (64, True), (128, False)):
        monkeypatch.setattr(ctx.limits, "subgroup", size)
        assert subgroups.usable(ctx) is used
    monkeypatch.setattr(ctx, "tuning", tuning(software=True))
    assert not subgroups.usable(ctx)


def test_shared_memory_that_lanes_take(lanes: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step more for each that is made at once: a device that has just not enough takes smaller tiles."""
    with lanes.active():
        asked = layout_of(lanes, (64, 64)).shared_bytes
        assert asked == 4 * (32**2 + 16**2 + 8**2 + 4**2 + 1)
        assert layout_of(lanes, (126, 126)).shared_bytes == 4 * (63**2 + 32**2 + 1), "its tiles cannot use them"
        monkeypatch.setattr(lanes.limits, "shared_bytes", asked - 1)
        assert layout_of(lanes, (64, 64)).steps == 5
