"""mipmap and hiz with backend="cuda", on the emulator, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compare import assert_matches
from cuda_emulator import ASCENDING, COMPILER, DESCENDING, SHUFFLED, EmulatedDevice
from images import DTYPES, noise
from oracle import extreme_chain, mean_chain
from scripts import HERE, run

import gpu_lod as lod
from gpu_lod.errors import LimitError
from gpu_lod.kernels import chain as chains
from gpu_lod.kernels import sources
from gpu_lod.kernels.device import DEFAULT_STREAMS
from gpu_lod.mipmap import reference

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

SMALL = list(itertools.product(range(1, 18), repeat=2))
SPREAD = [(height, (height * 29) % 67 + 1) for height in range(18, 68)] + [(67, 67), (63, 64), (64, 63), (33, 2)]
EVEN = [
    (64, 64),
    (128, 192),
    (256, 256),
    (1024, 64),
    (448, 448),
    (32, 32),
    (16, 48),
    (4, 4),
    (2, 2),
    (136, 72),
    (192, 76),
    (2048, 128),
]
"""The first three levels and more have even sides, down to a level of 1, 2, 4, 7, 8 or more texels a side."""
LARGE = [(200, 131), (127, 127), (191, 383), (1, 300), (300, 1), (513, 3), (257, 514), (130, 640)]
DEEP = [(1, 8191), (9001, 2), (3, 4100)]
"""Sides above 4096, whose twelfth level is read again."""


@pytest.fixture(params=chains.WINDOWS)
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of all tiles with odd sides, whatever the size of the image."""
    monkeypatch.setattr(chains, "WINDOWS", (request.param,))
    chains._layout.cache_clear()
    yield request.param
    chains._layout.cache_clear()


def check(image: torch.Tensor, reduce: Any, **how: Any) -> None:
    pyramid = lod.mipmap(image, reduce=reduce, backend="cuda", **how)
    truth = mean_chain(image, len(pyramid)) if reduce == "mean" else extreme_chain(image, reduce, len(pyramid))
    for level, (found, expected) in enumerate(zip(pyramid, truth, strict=True)):
        kind = "box" if reduce == "mean" else "exact"
        assert found.dtype == image.dtype and (found.is_contiguous() or level == 0)
        assert_matches(found, expected, kind, where=f"{reduce} level {level} of {tuple(image.shape)}")


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
@pytest.mark.parametrize("sizes", [SMALL, SPREAD], ids=["1 to 17 squared", "18 to 67"])
def test_every_size(emulated: EmulatedDevice, sizes: list[tuple[int, int]], reduce: str) -> None:
    emulated.order = SHUFFLED
    for size in sizes:
        check(noise(1, 1, *size) - 0.5, reduce)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_every_odd_size(emulated: EmulatedDevice, reduce: str) -> None:
    sheet = noise(1, 1, 67, 67) - 0.5
    sheet.view(-1)[::97], sheet.view(-1)[1::89] = torch.inf, -torch.inf
    for size in itertools.product(range(1, 68, 2), repeat=2):
        check(sheet[..., : size[0], : size[1]], reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_dtypes_batches_and_more_than_one_tile(
    emulated: EmulatedDevice, reduce: str, dtype: torch.dtype, window: int
) -> None:
    emulated.seed = 3
    for shape in ((2, 3, 17, 31), (3, 40, 36), (1, 2, 1, 1), (2, 2, 68, 132), (1, 200, 131)):
        check(noise(*shape, dtype=dtype), reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_even_sides(emulated: EmulatedDevice, reduce: str, dtype: torch.dtype) -> None:
    """Two levels at a time. They are to the last bit what a kernel makes of odd sides too."""
    emulated.order, emulated.seed = SHUFFLED, 5
    for size in EVEN:
        check(noise(2, 1, *size, dtype=dtype), reduce)
    made = {"EVEN" in kernel.defines for _, kernel, *_ in emulated.named("launch")}
    assert made == {True, False}  # (2, 2) has one level below it, and (16, 48) odd sides
    few = emulated.named("launch")[-1]
    emulated.multiprocessors = 1000  # a block a tile
    check(noise(2, 1, *size, dtype=dtype), reduce)
    many = emulated.named("launch")[-1]
    assert many[2][0] == 2 * 32 * 2 and few[2][0] == chains.RESIDENT
    emulated.multiprocessors, emulated.shared_bytes = 1, 3 * chains.BLOCK_BYTES  # of some GPUs
    check(noise(2, 1, *size, dtype=dtype), reduce)
    assert emulated.named("launch")[-1][2][0] == 3
    image = noise(1, 2, 128, 192, dtype=dtype)
    before = len(emulated.named("launch"))
    same = [lod.mipmap(image, reduce=reduce, backend="cuda")]  # type: ignore[arg-type]
    for by in (4, 1):  # groups of four begin there, but none of 16 bytes of small dtypes; not even these
        offset = torch.cat([image.new_zeros(by), image.flatten()])[by:].view_as(image)
        same.append(lod.mipmap(offset, reduce=reduce, backend="cuda"))  # type: ignore[arg-type]
    assert ["EVEN" in kernel.defines for _, kernel, *_ in emulated.named("launch")[before:]] == [True, True, False]
    assert agree(same)


@pytest.mark.parametrize("stream", DEFAULT_STREAMS)
def test_counters_are_zero_again(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """The default stream has some that stay, and a graph its own for good; other streams bring theirs."""
    monkeypatch.setattr(chains, "_counters", {})
    image = noise(3, 2, 150, 70)
    check(image, "mean")
    assert not chains._counters
    emulated.stream_now = stream
    for _ in range(3):
        check(image, "mean")
        check(noise(1, 200, 300), "max")
    kept = chains._counters[emulated]
    assert not kept.all.any() and kept.taken == chains.COUNTERS
    emulated.is_capturing = True
    check(image, "mean")
    check(image, "mean")
    assert not kept.all.any() and kept.taken == chains.COUNTERS + 12
    kept.taken = 2 * chains.COUNTERS - 5
    check(image, "mean")
    assert kept.taken == 2 * chains.COUNTERS - 5
    emulated.is_capturing = False
    emulated.changes = (("if (*last) c.finished[plane] = 0;", ""),)
    check(image, "mean")
    assert kept.all.any()


@pytest.mark.parametrize("size", LARGE + DEEP, ids=str)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_levels_that_the_last_block_makes(
    emulated: EmulatedDevice, reduce: str, size: tuple[int, int], window: int
) -> None:
    emulated.seed = 1
    for dtype in (torch.float32, torch.uint8):
        check(noise(2, 1, *size, dtype=dtype), reduce)


def test_a_chain_is_one_launch(emulated: EmulatedDevice) -> None:
    emulated.multiprocessors = 1000  # too many for large tiles
    lod.mipmap(noise(5, 3, 200, 131), backend="cuda")
    lod.hiz(noise(2, 7, 67, 67), backend="cuda")
    assert [call[2] for call in emulated.named("launch")] == [(5 * 3 * 4 * 3, 1, 1), (2 * 7 * 2 * 2, 1, 1)]
    assert len(lod.mipmap(noise(3, 9, 9), levels=1, backend="cuda")) == 1
    assert len(emulated.named("launch")) == 2


def test_few_launches(emulated: EmulatedDevice, window: int) -> None:
    """A tile gives six levels, or as many as have even sides above them, or three; or four, where three leave more than
    a tile has. A block makes what is left of 128 texels a side."""
    for size, expected in {
        (1024, 1024): [(0, 6, True, True)],
        (8192, 4096): [(0, 6, True, True)],
        (16384, 4096): [(0, 6, True, False), (6, 3, False, True)],
        (224, 224): [(0, 5, True, True)],
        (1080, 1920): [(0, 3, True, False), (3, 3, False, True)],
        (1001, 777): [(0, 4, False, True)],
        (449, 513): [(0, 3, False, True)],
        (1023, 2047): [(0, 4, False, True)],
        (4097, 4097): [(0, 3, False, False), (3, 3, False, True)],
        (300, 500): [(0, 2, True, True)],
        (1060, 1080): [(0, 2, True, False), (2, 3, False, True)],
        (63, 5): [(0, 5, False, False)],
    }.items():
        sizes = [(max(1, size[0] >> level), max(1, size[1] >> level)) for level in range(max(size).bit_length())]
        assert chains._rounds(sizes, fours=True) == expected, size
        unaligned = chains._rounds(sizes, fours=False)
        assert not unaligned[0][2] and len(unaligned) <= len(expected) + 1
    emulated.order, emulated.seed = SHUFFLED, 4
    for dtype in (torch.float32, torch.uint8):
        for shape in ((1, 1060, 36), (2, 77, 2081), (1, 1, 2177)):
            check(noise(1, *shape, dtype=dtype), "mean")
            check(noise(1, *shape, dtype=dtype), "min")
    assert len(emulated.named("launch")) == 2 * 12


def test_fewer_levels(emulated: EmulatedDevice, window: int) -> None:
    for levels in range(1, 9):
        check(noise(1, 2, 199, 150, dtype=torch.uint8), "mean", levels=levels)


# -- order: what no schedule may change -------------------------------------------------------------------------------


def orders(emulated: EmulatedDevice, image: torch.Tensor, reduce: Any) -> list[lod.Pyramid]:
    """The chain by several schedules of threads and blocks."""
    result = []
    for order, seed in ((ASCENDING, 0), (DESCENDING, 0), (SHUFFLED, 1), (SHUFFLED, 2), (SHUFFLED, 3)):
        emulated.order, emulated.seed = order, seed
        result.append(lod.mipmap(image, reduce=reduce, backend="cuda"))
    return result


def agree(pyramids: list[lod.Pyramid]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for other in pyramids[1:]
        for a, b in zip(pyramids[0], other, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float16], ids=str)
@pytest.mark.parametrize("reduce", ["mean", "min"])
def test_results_do_not_depend_on_the_schedule(
    emulated: EmulatedDevice, reduce: str, dtype: torch.dtype, window: int
) -> None:
    assert agree(orders(emulated, noise(2, 1, 200, 131, dtype=dtype), reduce))


def test_what_other_blocks_wrote_is_read_past_the_cache() -> None:
    """The emulator has none, so that it sees no difference."""
    text = sources.texts()["reduce.cu"]
    of_level = text[text.index("struct OfLevel {") : text.index("struct OfTile {")]
    assert [line.strip() for line in of_level.splitlines() if "typedef" in line] == [
        "typedef const volatile float* Pointer;",
        "typedef const volatile element* Pointer;",
    ]
    # All else that reads levels reads those of an earlier launch.
    assert text.count("make_level<OfEarlier") == text.count("make_first_level(c,") == 1
    assert "} else if (base == c.base) {\n            make_first_level(c" in text


BARRIERS = sources.texts()["reduce.cu"].count("__syncthreads();")


@pytest.mark.parametrize("which", range(BARRIERS))
def test_every_barrier_is_needed(which: int) -> None:
    """Without one of them schedules disagree, or the emulator sees it otherwise. In a process of its own, for threads
    that run on with what is not there yet may write anywhere."""
    parts = sources.texts()["reduce.cu"].split("__syncthreads();")
    before = parts[which][-60:]
    done = run(
        f"""
        import torch
        from cuda_emulator import EmulatedDevice
        from gpu_lod.kernels import device
        from test_kernel_chains import agree, orders
        emulated = EmulatedDevice()
        device.KIND, device.open_device = "cpu", lambda _: emulated
        torch.manual_seed(0)
        images = torch.rand(1, 1, 200, 131), torch.rand(1, 1, 128, 256), torch.rand(1, 1, 64, 6400).half()
        assert all(agree(orders(emulated, image, "mean")) for image in images)
        emulated.changes = (({before + "__syncthreads();"!r}, {before!r}),)
        print("began", flush=True)
        print("agree" if all(agree(orders(emulated, image, "mean")) for image in images) else "differ")
        """,
        PYTHONPATH=HERE,
    )
    assert done.stdout.startswith("began\n"), done.stderr
    assert done.stdout.strip() != "began\nagree"
    assert "differ" in done.stdout or "thread" in done.stderr or done.returncode < 0, done.stderr


def test_a_count_before_the_fence_is_seen(emulated: EmulatedDevice) -> None:
    emulated.changes = (("        __threadfence();  // what the block wrote is there before the count says so\n", ""),)
    with pytest.raises(AssertionError, match="fence"):
        lod.mipmap(noise(1, 200, 131), backend="cuda")


@pytest.mark.parametrize(
    "change",
    [
        ("shift = 8u *", "shift = 0u *"),
        ("4 * i < before + wanted", "4 * i < wanted"),
        ("8u * (unsigned)before);", "0u);"),
        ("texel >= 0 && texel", "texel"),
        ("at >= 0 && at + 4 <= bytes", "at >= 0"),
        ("(n / 2 - x - i)", "(n / 2 - x)"),
        ("c.width < WIDEST", "true"),
    ],
    ids=[
        *("rows begin at words", "a word too few", "levels begin at words", "a texel before its row"),
        *("texels behind a row", "one weight for a run", "sums of any size"),
    ],
)
def test_parity_fails_for_broken_runs(emulated: EmulatedDevice, change: tuple[str, str]) -> None:
    image = (
        noise(2, 131, 131, dtype=torch.uint8)[1:] if "WIDEST" not in change[0] else noise(1, 3, 40001).mul(255).byte()
    )
    check(image, "mean")
    emulated.changes = (change,)
    with pytest.raises(AssertionError, match="differ"):
        check(image.roll(1, -1), "mean")


@pytest.mark.parametrize(
    "change",
    [
        ("2 * end + n % 2", "2 * end"),
        ("made = ODD_COLUMNS ? three(a, b, Texels::at(at[1 + ODD_COLUMNS]), by_width) : ", "made = "),
        ("c.first_wide[index] != NOT_KEPT", "false"),
        ("== all - mine", "== all - 2 * mine"),
    ],
    ids=["no halo", "two taps at odd sides", "unrounded values are not kept", "the last but one finishes"],
)
def test_parity_fails_for_a_broken_kernel(emulated: EmulatedDevice, change: tuple[str, str]) -> None:
    check(noise(1, 1, 255, 263, dtype=torch.float16), "mean")
    emulated.changes = (change,)
    with pytest.raises(AssertionError, match="differ"):
        for emulated.seed in range(5):
            check(
                noise(1, 1, 255, 263, dtype=torch.float16), "mean"
            )  # another one: the memory has the last one's levels


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_levels_are_views_of_one_packed_tensor(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Level-major, each aligned; and what lies between them is not written to."""
    kept: list[torch.Tensor] = []

    def marked(*size: Any, **how: Any) -> torch.Tensor:
        kept.append(torch.zeros(*size, **how))
        kept[-1].view(torch.uint8).fill_(0xAB)
        return kept[-1]

    monkeypatch.setattr(chains.torch, "empty", marked)
    image = noise(2, 3, 53, 131, dtype=dtype)
    pyramid = lod.mipmap(image, backend="cuda")
    monkeypatch.undo()
    packed = kept[0]
    assert pyramid[0].data_ptr() == image.data_ptr()
    ends = [packed.data_ptr()]
    for level in pyramid.levels[1:]:
        assert level.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        assert (level.data_ptr() - packed.data_ptr()) % chains.ALIGNMENT == 0
        assert 0 <= level.data_ptr() - ends[-1] < chains.ALIGNMENT
        ends.append(level.data_ptr() + level.nbytes)
        level.view(torch.uint8).fill_(0xAB)
    assert bool((packed.view(torch.uint8) == 0xAB).all())


@pytest.mark.parametrize("size", [(17, 31), (64, 64), (67, 36), (1, 40), (130, 200)], ids=str)
def test_nothing_outside_the_image_is_read(emulated: EmulatedDevice, size: tuple[int, int]) -> None:
    """The image stands between NaNs."""
    count = size[0] * size[1]
    around = torch.full((3 * count + 64,), float("nan"))
    begin = -(-count // 16) * 16
    image = around[begin : begin + count].view(1, *size)
    image.copy_(noise(1, *size))
    for reduce in ("mean", "max"):
        check(image, reduce)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_small_types_from_any_address(emulated: EmulatedDevice, reduce: str, dtype: torch.dtype, window: int) -> None:
    """Rows begin anywhere in a word, and what is beside them in it, which differs from call to call, counts nowhere."""
    others = (0, 255) if dtype == torch.uint8 else (float("nan"), float("inf"))
    sizes, offsets = [(5, 7), (130, 67), (67, 130), (131, 133), (2, 3), (3, 2)], range(4 // dtype.itemsize)
    for (size, by), other in zip(itertools.product(sizes, offsets), itertools.cycle(others), strict=False):
        inside = noise(2, *size, dtype=dtype)
        memory = torch.full((by + inside.numel() + 4,), other, dtype=dtype)
        image = memory[by : by + inside.numel()].view_as(inside).copy_(inside)
        assert image.data_ptr() % 4 == by * dtype.itemsize
        check(image, reduce)


@pytest.mark.parametrize("size", [(2, 32767), (3, 40001)], ids=str)
def test_counts_of_wide_images(emulated: EmulatedDevice, size: tuple[int, int]) -> None:
    """Where sums by whole weights would be too large for fp32 they are not made; up to there they are exact."""
    check(torch.full((1, *size), 255, dtype=torch.uint8), "mean")
    check(noise(1, *size, dtype=torch.uint8), "mean")


def test_layouts(emulated: EmulatedDevice) -> None:
    """Views, broadcasts, other memory formats, and memory that no vector load may begin at."""
    layouts = {
        "channels last": noise(2, 3, 32, 64).to(memory_format=torch.channels_last),
        "strided": noise(2, 3, 64, 128)[..., ::2, ::2],
        "expanded": noise(1, 1, 32, 32).expand(2, 3, 32, 32),
        "offset": noise(2 * 3 * 32 * 32 + 1)[1:].view(2, 3, 32, 32),
    }
    for name, image in layouts.items():
        expected = lod.mipmap(image.contiguous().clone(), backend="cuda")
        for found, level in zip(lod.mipmap(image, backend="cuda"), expected, strict=True):
            assert torch.allclose(found, level, atol=1e-6), name


def test_a_vector_load_where_none_may_begin_is_seen(emulated: EmulatedDevice) -> None:
    emulated.changes = (("base == 0 && c.fours", "base == 0"),)
    lod.mipmap(noise(32 * 32).view(1, 32, 32), backend="cuda")
    with pytest.raises(AssertionError, match="where nothing of its type may begin"):
        lod.mipmap(noise(32 * 32 + 1)[1:].view(1, 32, 32), backend="cuda")


# -- values -----------------------------------------------------------------------------------------------------------


def test_negative_infinite_and_subnormal(emulated: EmulatedDevice) -> None:
    relevance = torch.randn(2, 2, 23, 18)
    relevance.view(-1)[::7] = float("-inf")
    relevance.view(-1)[5::31] = float("inf")
    relevance[0, 0] = float("-inf")
    relevance[1, 1] = -1e-40
    relevance[1, 1, 1, 2] = 1e-42
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for reduce in ("max", "min"):
            check(relevance.to(dtype), reduce)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_nan_is_contagious(emulated: EmulatedDevice, dtype: torch.dtype) -> None:
    """torch.amax's rule, whatever the sign of the NaN."""
    relevance = torch.randn(1, 2, 23, 70).to(dtype)
    relevance.view(-1)[::53] = float("nan")
    relevance.view(-1)[7::101] = -torch.tensor(float("nan"), dtype=dtype)
    for reduce in ("max", "min"):
        check(relevance, reduce)


@pytest.mark.parametrize("size", [(4, 5), (5, 4), (1, 6), (6, 1), (8, 8), (5, 7)], ids=str)
def test_nan_and_infinity_stay_inside_their_footprints(emulated: EmulatedDevice, size: tuple[int, int]) -> None:
    for value in (float("nan"), float("inf")):
        for index in range(size[0] * size[1]):
            image = torch.zeros(1, *size)
            image.view(-1)[index] = value
            touched = extreme_chain((~image.isfinite()).float(), "max")
            for level, reached in zip(lod.mipmap(image, backend="cuda"), touched, strict=True):
                assert torch.equal(~level.isfinite(), reached > 0), (value, index)


def test_constant_stays_constant(emulated: EmulatedDevice) -> None:
    for level in lod.mipmap(torch.full((1, 3, 37, 153), 0.7), backend="cuda"):
        assert (level - 0.7).abs().max() < 3e-7


def test_convention_odd_side_weights(emulated: EmulatedDevice) -> None:
    impulse = torch.eye(5).view(5, 1, 1, 5)
    level = lod.mipmap(impulse, levels=2, backend="cuda")[1].view(5, 2).T
    assert torch.allclose(level, torch.tensor([[2, 2, 1, 0, 0], [0, 0, 1, 2, 2]]) / 5)


def test_small_types_are_rounded_once(emulated: EmulatedDevice) -> None:
    """Also by the last block, which begins with unrounded values."""
    for dtype in (torch.uint8, torch.float16, torch.bfloat16):
        image = noise(1, 1, 256, 192, dtype=dtype)
        wide = lod.mipmap(image.float(), backend="cuda")
        for found, exact in zip(lod.mipmap(image, backend="cuda"), wide, strict=True):
            assert torch.equal(found, exact.round().to(dtype) if dtype == torch.uint8 else exact.to(dtype))


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_gradients_are_the_references(emulated: EmulatedDevice, reduce: Any) -> None:
    image = noise(2, 3, 21, 30).requires_grad_()
    pyramid = lod.mipmap(image, reduce=reduce, backend="cuda")
    weights = [torch.rand_like(level) for level in pyramid]
    (found,) = torch.autograd.grad(sum((a * w).sum() for a, w in zip(pyramid, weights, strict=True)), image)
    expected = sum((a * w).sum() for a, w in zip(reference(image, reduce=reduce), weights, strict=True))
    assert torch.allclose(found, torch.autograd.grad(expected, image)[0], atol=1e-6)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_more_than_a_launch_covers(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MOST_BLOCKS", 7)
    check(noise(7, 1, 9, 9), "mean")
    with pytest.raises(LimitError, match="smaller batch"):
        lod.mipmap(noise(8, 1, 9, 9), backend="cuda")
    monkeypatch.setattr(chains, "MOST_TEXELS", 16)
    with pytest.raises(LimitError, match="17 x 3"):
        lod.mipmap(noise(1, 3, 17), backend="cuda")
