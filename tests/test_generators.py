"""What the generators of mip chains do each in their own way: tiles, blocks, layouts, conversions, limits."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import as_hardware
import pytest
import torch
from compare import HARDWARE_WEIGHT_ERROR, assert_matches, stored_range
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, noise
from oracle import extreme_chain, mean_chain

import gpu_lod as lod
from gpu_lod import shaders
from gpu_lod.conversion import conversion
from gpu_lod.errors import InputError, LimitError, ShaderError, UnsupportedError
from gpu_lod.program import Program
from gpu_lod.several_levels import together
from gpu_lod.transfer import Planes, packed_planes, wrapped
from gpu_lod.tuning import tuning

pytestmark = pytest.mark.threads

ONE_DISPATCH = ("single-pass", "registers")
SMALL_TILES = 300
"""Bytes of shared memory with which a tile is 8 x 8 texels: small pictures then have many tiles and several passes."""


def check(pyramid: lod.Pyramid, image: torch.Tensor, reduce: str = "mean") -> None:
    expected = mean_chain(image, len(pyramid)) if reduce == "mean" else extreme_chain(image, reduce, len(pyramid))
    for level, (actual, oracle) in enumerate(zip(pyramid, expected, strict=True)):
        kind = "box" if reduce == "mean" else "exact"
        assert_matches(actual, oracle, kind, where=f"level {level} of {tuple(image.shape)}")


@pytest.mark.parametrize("generator", ONE_DISPATCH)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_every_odd_size_of_extremes(generator: str, reduce: str) -> None:
    check_every_odd_size(generator, reduce)


def check_every_odd_size(generator: str, reduce: str) -> None:
    """Sides 1, 3, ... 67, all pairs, negative values and infinities among them."""
    sheet = noise(1, 67, 67) - 0.5
    sheet.view(-1)[::97] = float("inf")
    sheet.view(-1)[1::89] = -float("inf")
    for height in range(1, 68, 2):
        for width in range(1, 68, 2):
            image = sheet[:, :height, :width].contiguous()
            for actual, expected in zip(
                lod.hiz(image, reduce, generator=generator), lod.hiz(image, reduce, backend="torch"), strict=True
            ):
                assert torch.equal(actual, expected), (height, width)


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 64), (65, 63), (200, 131), (129, 258), (1, 700), (515, 3)], ids=str)
def test_tiles_and_passes(restored_limits: lod.Context, size: tuple[int, int], dtype: torch.dtype, reduce: str) -> None:
    """The last workgroup goes on with the tail, tile by tile, as often as it takes."""
    image = noise(2, 3, *size, dtype=dtype)
    for shared_bytes in (SMALL_TILES, 1500, 6000):
        restored_limits.limits.shared_bytes = shared_bytes
        check(lod.mipmap(image, reduce=reduce, generator="single-pass"), image, reduce)


@pytest.mark.parametrize("threads", [(32, 8), (16, 16), (64, 1), (1, 1)], ids=str)
def test_workgroups_of_any_shape(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch, threads: tuple[int, int]) -> None:
    """Hardware takes others than software renderers."""
    monkeypatch.setattr(ctx, "tuning", dataclasses.replace(ctx.tuning, single_pass=threads, registers=8))
    for size in ((131, 200), (64, 64)):
        for dtype in (torch.uint8, torch.float32):
            image = noise(2, 3, *size, dtype=dtype)
            for generator in ONE_DISPATCH:
                check(lod.mipmap(image, generator=generator), image)
                check(lod.mipmap(image, reduce="max", generator=generator), image, "max")
            check(lod.mipmap(image, levels=4, dtype=torch.float32, generator="single-pass"), _fractions(image))


def _fractions(image: torch.Tensor) -> torch.Tensor:
    return image / 255 if image.dtype == torch.uint8 else image


def test_what_is_taken_where_nothing_is_named(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(1, 8, 8)
    monkeypatch.setattr(ctx, "tuning", tuning(software=True))
    assert lod.mipmap(image, backend="gl").generator == lod.hiz(image, backend="gl").generator == "registers"
    monkeypatch.setattr(ctx, "tuning", tuning(software=False))
    assert lod.mipmap(image, backend="gl").generator == "single-pass"
    assert lod.explain(lod.hiz, image, backend="gl").generator == "single-pass"
    even = noise(1, 64, 192)
    assert lod.mipmap(even, backend="gl").generator == lod.hiz(even, backend="gl").generator == "registers"
    assert lod.explain(lod.mipmap, even, backend="gl").generator == "registers"
    for how in ({"dtype": torch.float16}, {"mean": [0.5]}):
        assert lod.mipmap(even, backend="gl", **how).generator == "single-pass"
        assert lod.explain(lod.mipmap, even, backend="gl", **how).generator == "single-pass"


def test_every_number_of_levels(restored_limits: lod.Context) -> None:
    image = noise(1, 2, 77, 40)
    restored_limits.limits.shared_bytes = SMALL_TILES
    for levels in range(1, 8):
        for generator in ("single-pass", "single-pass-texture", "registers"):
            pyramid = lod.mipmap(image, levels=levels, generator=generator)
            assert len(pyramid) == levels
            check(pyramid, image)


def test_calls_leave_nothing_behind() -> None:
    """The counters of a call are those of the next: other sizes, other batches, and an error in between."""
    for _ in range(3):
        for shape in ((1, 1, 300, 200), (5, 3, 70, 65), (2, 2, 130, 130)):
            image = noise(*shape)
            check(lod.mipmap(image, generator="single-pass"), image)


def test_an_error_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tiles of it were counted, and the next call begins at none."""
    image, dispatch = noise(2, 3, 300, 200), Program.dispatch_groups

    def broken(program: Program, x: int, y: int, z: int) -> None:
        dispatch(program, x - 1, y, z)
        raise KeyboardInterrupt

    check(lod.mipmap(image, generator="single-pass"), image)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Program, "dispatch_groups", broken)
        lod.mipmap(image, generator="single-pass")
    other = noise(2, 3, 300, 200)
    check(lod.mipmap(other, generator="single-pass"), other)


def test_large_pictures() -> None:
    """Two passes with many tiles in the second; a side of more than 2^14."""
    for shape, dtype in (((1, 1, 1700, 4500), torch.uint8), ((1, 1, 3, 20_001), torch.float32)):
        image = noise(*shape, dtype=dtype)
        check(lod.mipmap(image, generator="single-pass"), image)
        check(lod.hiz(image, generator="single-pass"), image, "max")


@given(
    st.integers(1, 140), st.integers(1, 140), st.integers(1, 3), st.sampled_from(DTYPES), st.sampled_from(ONE_DISPATCH)
)
def test_any_size(height: int, width: int, channels: int, dtype: torch.dtype, generator: str) -> None:
    image = noise(2, channels, height, width, dtype=dtype)
    check(lod.mipmap(image, generator=generator), image)
    check(lod.mipmap(image, reduce="min", generator=generator), image, "min")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 96), (37, 53), (4, 300), (1, 1), (2, 1), (300, 3000)], ids=str)
def test_bilinear_fetches(size: tuple[int, int], dtype: torch.dtype, ctx: lod.Context) -> None:
    """A fetch in the middle of four texels is their mean, as precise as the texture unit places it: a coordinate is
    fp32 in [0, 1], and rounded twice on its way to texels."""
    image = noise(2, 3, *size, dtype=dtype)
    for level, (actual, oracle) in enumerate(
        zip(lod.mipmap(image, generator="single-pass-texture"), mean_chain(image), strict=True)
    ):
        slack = max(size) * 2.0**-23 * stored_range(dtype)
        if dtype == torch.uint8 and ctx.renderer == as_hardware.RENDERER:  # Mesa filters bytes in 8 bits
            slack += 255 * 2 * HARDWARE_WEIGHT_ERROR
        assert_matches(actual, oracle, "box", slack=slack, where=f"level {level} of {size}")


def test_bilinear_fetches_only_average(restored_limits: lod.Context) -> None:
    with pytest.raises(UnsupportedError, match="single-pass"):
        lod.mipmap(noise(1, 8, 8), reduce="max", generator="single-pass-texture")
    restored_limits.limits.texture_size = 16
    with pytest.raises(LimitError, match="compute"):
        lod.mipmap(noise(1, 8, 17), generator="single-pass-texture")
    restored_limits.limits.layers = 256
    image = noise(100, 3, 5, 6, dtype=torch.uint8)
    check(lod.mipmap(image, generator="single-pass-texture"), image)


LAYOUTS = {
    "channels last": lambda t: t.permute(0, 3, 1, 2),
    "crop": lambda t: t.permute(0, 3, 1, 2)[..., 3:40, 5:42],
    "every second": lambda t: t.permute(0, 3, 1, 2)[..., ::2, 1::2],
    "transposed": lambda t: t.permute(0, 3, 2, 1),
    "one channel for three": lambda t: t.permute(0, 3, 1, 2)[:, :1].expand(-1, 3, -1, -1),
    "an image of the batch": lambda t: t[1].permute(2, 0, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gl_memory_is_read_as_it_stands(ctx: lod.Context, layout: str, dtype: torch.dtype) -> None:
    """Whatever its strides: no copy on the way in, so level 0 is the very image."""
    whole = ctx.empty(2, 44, 52, 3, dtype=dtype)
    whole.copy_(noise(2, 44, 52, 3, dtype=dtype))
    image = LAYOUTS[layout](whole)
    for reduce in ("mean", "max"):
        pyramid = lod.mipmap(image, reduce=reduce, generator="single-pass")
        assert pyramid[0].data_ptr() == image.data_ptr() and pyramid[0].stride()[-3:] == image.stride()[-3:]
        copy = image.clone(memory_format=torch.contiguous_format)
        batched = copy if copy.ndim == 4 else copy[None]
        check(lod.Pyramid(tuple(x if x.ndim == 4 else x[None] for x in pyramid), "mean"), batched, reduce)


@pytest.mark.parametrize(
    ("generator", "reduce"),
    [
        (generator, reduce)
        for generator in ("compute", "registers", "single-pass", "fragment")
        for reduce in ("mean", "max", "min")
    ]
    + [("single-pass-texture", "mean")],
)
def test_bfloat16_is_the_fp32_chain_rounded_once(generator: str, reduce: str) -> None:
    for size in ((64, 64), (48, 96), (37, 21), (1, 50)):
        image = 1e30 * (noise(2, 3, *size, dtype=torch.bfloat16) - 0.5)  # beyond float16's range
        image[0, 0, 0, :2] = torch.tensor([torch.inf, -torch.inf])[: size[1]] if reduce != "mean" else 0
        found = lod.mipmap(image, reduce=reduce, generator=generator)
        for level, wide in zip(found, lod.mipmap(image.float(), reduce=reduce, generator=generator), strict=True):
            assert level.dtype == torch.bfloat16 and torch.equal(level, wide.bfloat16()), (size, tuple(level.shape))


@pytest.mark.parametrize("generator", ["torch", "compute", "registers", "single-pass", "fragment"])
@pytest.mark.parametrize("target", [None, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversion_on_the_way(source: torch.dtype, target: torch.dtype | None, generator: str) -> None:
    how = {"backend": "torch"} if generator == "torch" else {"generator": generator}
    for size in ((64, 48), (37, 21), (1, 1)):
        image = noise(2, 3, *size, dtype=source)
        for mean, std in ((None, None), ([0.5, 0.4, 0.3], [0.5, 0.25, 1.0]), ([0.1, 0.2, 0.3], None)):
            if (target, mean) == (None, None):
                continue
            values = conversion(image, mean, std, target)
            unit = 255.0 if source == torch.uint8 and values.dtype.is_floating_point else 1.0
            exact = image.double() / unit
            exact = (exact - torch.tensor(mean or [0.0] * 3).double().view(3, 1, 1)) / torch.tensor(
                std or [1.0] * 3
            ).double().view(3, 1, 1)
            pyramid = lod.mipmap(image, mean=mean, std=std, dtype=target, **how)
            for level, (actual, oracle) in enumerate(zip(pyramid, mean_chain(exact), strict=True)):
                assert actual.dtype == values.dtype
                slack = 3 * torch.finfo(values.dtype).eps  # values reach 3 in size
                assert_matches(actual, oracle, "box", slack=slack, where=f"level {level}")


def test_conversion_of_extremes_and_layouts(ctx: lod.Context) -> None:
    frame = ctx.empty(2, 30, 41, 3, dtype=torch.uint8)
    frame.copy_(noise(2, 30, 41, 3, dtype=torch.uint8))
    image = frame.permute(0, 3, 1, 2)
    expected = lod.mipmap(image, backend="torch", dtype=torch.float16, mean=[0.5] * 3)
    for actual, oracle in zip(
        lod.mipmap(image, generator="single-pass", dtype=torch.float16, mean=[0.5] * 3), expected, strict=True
    ):
        assert (actual.float() - oracle.float()).abs().max() < 1e-3 and ctx.owns(actual)
    for generator in ONE_DISPATCH:
        kept = lod.mipmap(image, reduce="min", generator=generator, dtype=torch.float32)
        for actual, level in zip(kept, lod.mipmap(image, reduce="min", backend="torch"), strict=True):
            assert torch.allclose(actual, level / 255, rtol=0, atol=1e-7)


def test_conversion_has_gradients_and_compiles() -> None:
    image = noise(2, 3, 21, 30).requires_grad_()

    def loss(x: torch.Tensor, **how: str) -> torch.Tensor:
        pyramid = lod.mipmap(x, mean=[0.5] * 3, std=[0.25, 0.5, 2.0], **how)
        return sum((level**2).sum() for level in pyramid)  # type: ignore[return-value]

    (expected,) = torch.autograd.grad(loss(image, backend="torch"), image)
    (actual,) = torch.autograd.grad(loss(image, generator="single-pass"), image)
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (through_op,) = torch.autograd.grad(compiled(image), image)
    assert torch.allclose(through_op, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"mean": [0.5]}, "one a channel"),
        ({"std": [1.0, 0.0, 1.0]}, "differ from 0"),
        ({"std": [1.0, 1e-45, 1.0]}, "differ from 0"),
        ({"std": [1.0, float("nan"), 1.0]}, "finite"),
        ({"dtype": torch.float64}, "bfloat16"),
        ({"dtype": torch.uint8, "mean": [0.0] * 3}, "fractions"),
    ],
)
def test_bad_conversions(arguments: dict[str, object], hint: str) -> None:
    for how in ({}, {"generator": "single-pass"}):
        with pytest.raises(InputError, match=hint):
            lod.mipmap(noise(3, 8, 8), **arguments, **how)  # type: ignore[arg-type]


def test_bytes_are_no_fractions() -> None:
    """Not if they are the image's own dtype, either."""
    with pytest.raises(InputError, match="mean and std give fractions"):
        lod.mipmap(noise(3, 8, 8, dtype=torch.uint8), dtype=torch.uint8, std=[0.5] * 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("generator", ONE_DISPATCH)
@pytest.mark.parametrize("limit", [9000, 20_000, 60_000])
def test_parts_of_planes_and_rows(restored_limits: lod.Context, generator: str, dtype: torch.dtype, limit: int) -> None:
    """Where bindings are small: planes in groups, and a plane in bands of rows, counted together."""
    restored_limits.limits.shared_bytes = 1500  # tiles of 16 x 16
    many, tall = noise(7, 3, 32, 32, dtype=dtype), noise(1, 1, 233, 33, dtype=dtype)
    restored_limits.limits.storage_bytes = limit
    for image in (many, tall):
        check(lod.mipmap(image, generator=generator), image)
        check(lod.mipmap(image, reduce="max", generator=generator), image, "max")


@pytest.mark.parametrize("generator", ["compute", "registers"])
def test_any_limit_that_holds_a_row_is_enough(restored_limits: lod.Context, generator: str) -> None:
    """What is bound begins at an aligned byte, before the range that is asked for."""
    restored_limits.limits.texels = 0
    image = noise(2, 3, 50, 37)
    expected = lod.mipmap(image, backend="torch")
    for limit in range(3000, 12000, 300):
        restored_limits.limits.storage_bytes = limit
        for found, level in zip(lod.mipmap(image, generator=generator), expected, strict=True):
            torch.testing.assert_close(found, level, rtol=0, atol=1e-6)


def test_bindings_beyond_4_gib() -> None:
    """Offsets of bytes are whole numbers of any size; what a shader counts begins anew in every binding."""
    bound: list[tuple[int, ...]] = []

    class Buffer:
        def bind(self, *where: int) -> None:
            bound.append(where)

    ctx: Any = SimpleNamespace(limits=SimpleNamespace(storage_bytes=2**27))
    planes = Planes(Buffer(), 64, 40, 10_000, 10_000, torch.float32, None)  # type: ignore[arg-type]
    first = 37 * planes.area + 12_345
    index = planes.bind(ctx, 0, first, first + 999)
    (_, start, size), begin = bound[0], 64 + 4 * first
    assert start > 2**33 and start <= begin and begin + 4000 <= start + size and size < 2**12
    assert start + 4 * (index + first) == begin
    assert wrapped(index + first) == (begin - start) // 4  # inside 32 bits, whatever is added up to it
    assert wrapped(wrapped(index) + wrapped(first)) == (begin - start) // 4


@pytest.mark.parametrize("limit", [20_000, 60_000, None])
def test_interleaved_memory_in_parts_is_converted_on_the_way(restored_limits: lod.Context, limit: int | None) -> None:
    """Many tiles, read where they stand, in bindings that hold a part of them."""
    restored_limits.limits.shared_bytes = 1500  # tiles of 16 x 16
    whole = restored_limits.empty(1, 200, 131, 3, dtype=torch.uint8)
    whole.copy_(noise(1, 200, 131, 3, dtype=torch.uint8))
    image = whole.permute(0, 3, 1, 2)
    how: Any = {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.25, 1.0], "dtype": torch.float16}
    expected = lod.mipmap(image.clone(), backend="torch", **how)
    restored_limits.limits.storage_bytes = limit or restored_limits.limits.storage_bytes
    found = lod.mipmap(image, generator="single-pass", **how)
    for level, (actual, oracle) in enumerate(zip(found, expected, strict=True)):
        assert actual.dtype == torch.float16, level
        assert float((actual.float() - oracle.float()).abs().max()) <= 4e-3, level


def test_what_does_not_fit_one_dispatch_is_refused(restored_limits: lod.Context) -> None:
    image = noise(40, 3, 64, 64)
    restored_limits.limits.storage_bytes = 20_000
    with pytest.raises(LimitError, match="generator='compute'"):
        lod.mipmap(image, generator="single-pass")
    check(lod.mipmap(image, generator="compute"), image)
    check(lod.mipmap(image[:2], generator="single-pass"), image[:2])


def test_too_little_shared_memory_is_refused(restored_limits: lod.Context) -> None:
    restored_limits.limits.shared_bytes = 60
    with pytest.raises(UnsupportedError, match="shared memory"):
        lod.mipmap(noise(1, 9, 9), generator="single-pass")
    image = noise(1, 9, 9)
    check(lod.mipmap(image[None], generator="registers"), image[None])


def test_a_driver_that_refuses_a_shader(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, **defines: object) -> shaders.Source:
        source = real(name, **defines)
        return (
            dataclasses.replace(source, text=source.text + "no such thing;") if name == "single_pass.comp" else source
        )

    real = shaders.source
    monkeypatch.setattr(shaders, "source", refused)
    monkeypatch.setattr(ctx.programs, "_cache", {})
    image = noise(1, 1, 9, 11)
    for how in ({"dtype": torch.float16, "levels": 3}, {"reduce": "max", "levels": 2}):
        with pytest.raises(ShaderError, match=r"single_pass\.comp:\d+(.|\n)*another generator"):
            lod.mipmap(image, generator="single-pass", **how)  # type: ignore[arg-type]
    check(lod.mipmap(image, generator="compute"), image)


def test_registers_take_levels_together(ctx: lod.Context) -> None:
    """Three at a time where sides allow it; never across an odd side or a row that is no whole words."""

    def plan(height: int, width: int, dtype: torch.dtype) -> list[int]:
        sizes = [(max(1, height >> i), max(1, width >> i)) for i in range(max(height, width).bit_length())]
        with ctx.active():
            chain, _ = packed_planes(ctx, 1, 1, sizes, dtype)
        steps, level = [], 0
        while level < len(chain) - 1:
            steps.append(max(together(chain, level), 1))
            level += steps[-1]
        return steps

    assert plan(1024, 1024, torch.float32) == [3, 3, 3, 1]
    assert plan(1024, 1024, torch.uint8) == [3, 3, 2, 1, 1]
    assert plan(24, 40, torch.float32) == [3, 1, 1]
    assert plan(1001, 777, torch.float32)[0] == 1


def test_gl_memory_that_starts_anywhere(ctx: lod.Context) -> None:
    """Vectors of four words start at multiples of 16 bytes; an image need not."""
    for dtype in DTYPES:
        flat = ctx.empty(64 * 64 + 5, dtype=dtype)
        flat.copy_(noise(64 * 64 + 5, dtype=dtype))
        for start in (1, 2, 4, 5):
            image = flat[start : start + 64 * 64].view(1, 1, 64, 64)
            for generator in ONE_DISPATCH:
                check(lod.mipmap(image, generator=generator), image.clone())


@pytest.mark.parametrize("size", [(65, 65), (257, 256), (64, 257), (33, 64), (3, 129)], ids=str)
def test_converted_levels_are_whole_where_one_texel_is_left_over(ctx: lod.Context, size: tuple[int, int]) -> None:
    """Level 0 may need a row or column of tiles that level 1 does not."""
    for levels in (None, 2, 3):
        for _ in range(2):
            ctx.empty(4, *size).fill_(7e7)  # what is not written shows
            image = noise(1, 2, *size)
            check(lod.mipmap(image, levels=levels, generator="single-pass", dtype=torch.float32), image)


def test_layers_of_every_part(restored_limits: lod.Context) -> None:
    image = noise(4, 2, 64, 64)
    restored_limits.limits.storage_bytes = 20_000
    for level, (actual, oracle) in enumerate(
        zip(lod.mipmap(image, generator="single-pass-texture"), mean_chain(image), strict=True)
    ):
        assert_matches(actual, oracle, "trilinear", where=f"level {level}")


def test_strides_that_nothing_is_behind(ctx: lod.Context) -> None:
    """A side of 1 may have any stride, beyond 2^31 too."""
    values = noise(64)
    memory = ctx.empty(64)
    memory.copy_(values)
    image = memory.as_strided((1, 1, 8, 8), (2**33, 1, 1, 8))
    pyramid = lod.mipmap(image, generator="single-pass")
    plain = values.view(1, 1, 8, 8).mT.contiguous()
    check(lod.Pyramid((plain, *pyramid.levels[1:])), plain)


def test_batches_in_any_order_of_memory(ctx: lod.Context, restored_limits: lod.Context) -> None:
    """Groups of planes that straddle images reach further than the first group."""
    memory = ctx.empty(3, 5, 32, 32)
    memory.copy_(noise(3, 5, 32, 32))
    image = memory.transpose(0, 1)  # 5 images of 3 channels, a channel's images side by side
    restored_limits.limits.storage_bytes = 40_000
    restored_limits.limits.shared_bytes = 1500
    check(lod.mipmap(image, generator="single-pass"), image.contiguous())
