"""Foveation: both backends against float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import HARDWARE_WEIGHT_ERROR, assert_matches, stored_range
from images import DTYPES, noise, smooth
from oracle import foveate as oracle
from oracle import probes
from times import asked, fastest

import gpu_lod as lod
from gpu_lod import foveate_adjoint, foveate_blocks, planewise
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.foveate import reference
from gpu_lod.foveate_tiles import Tile, level_map, probed
from gpu_lod.sharing import Sharing

module = sys.modules["gpu_lod.foveate"]

WAYS = ("torch", "gl", "texture units")


@pytest.fixture
def way(ctx: lod.Context, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A software renderer filters in the shader; as "texture units" it is asked to take the way of a GPU, by a context
    that is open already: one that is opened meanwhile would stay so."""
    if request.param == "texture units":
        monkeypatch.setattr(Sharing, "software", False)
    yield request.param


each_way = pytest.mark.parametrize("way", WAYS, indirect=True)


def run(src: Any, fixation: Any, way: str, **options: Any) -> torch.Tensor:
    return lod.foveate(src, fixation, backend="torch" if way == "torch" else "gl", **options)


def check(ctx: lod.Context, pyramid: lod.Pyramid, fixation: torch.Tensor, way: str, **options: float) -> None:
    found = run(pyramid, fixation, way, **options)
    levels = [level if pyramid.batched else level[None] for level in pyramid.levels]
    expected, texels, blend = oracle(levels, fixation.expand(pyramid.batch, 2), **options)
    if not pyramid.batched:
        expected, texels, blend = expected[0], texels[0], blend[0]
    assert found.dtype == pyramid.dtype and found.shape == pyramid[0].shape and found.is_contiguous()
    exact = ctx.renderer.startswith("llvmpipe") or way == "torch"
    # Positions are fp32, and so is the logarithm. Hardware weights have 8 bits.
    position = max(pyramid.size) * 2.0**-22 + (0 if exact else HARDWARE_WEIGHT_ERROR)
    slack = 2 * position * texels + (2.0**-18 if exact else HARDWARE_WEIGHT_ERROR) * blend
    assert_matches(found, expected, "trilinear", slack=slack, where=f"{way} {options}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_way
def test_parity(ctx: lod.Context, way: str, dtype: torch.dtype) -> None:
    for shape in (
        (2, 3, 64, 96),
        (3, 1, 33, 21),
        (4, 57, 40),
        (1, 2, 1, 1),
        (1, 3, 1, 50),
        (2, 2, 130, 3),
        (3, 128, 128),
        (2, 122, 258),
    ):
        pyramid = lod.mipmap(noise(*shape, dtype=dtype))
        for options in ({}, {"e0": 0.5}, {"e0": 0.004, "bias": 0.7}, {"bias": -2.0}, {"e0": 0.2, "bias": 1.3}):
            check(ctx, pyramid, torch.rand(pyramid.batch, 2), way, **options)


@pytest.fixture
def rows_of_eight(llvmpipe: lod.Context, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether some tiles were made eight neighbours at a time since it was asked last: by CPUs that take floats in
    pairs, which here all do."""
    used: list[str] = []
    monkeypatch.setattr(llvmpipe.programs, "pairs", True)
    compute = llvmpipe.programs.compute
    monkeypatch.setattr(llvmpipe.programs, "compute", lambda name, **how: used.append(name) or compute(name, **how))

    def were() -> bool:
        found = "foveate_rows.comp" in used
        used.clear()
        return found

    return were


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_parity_of_rows_of_eight(ctx: lod.Context, dtype: torch.dtype, rows_of_eight: Callable[[], bool]) -> None:
    for shape, options in (
        ((3, 448, 448), {}),
        ((2, 1, 64, 768), {"e0": 0.1, "bias": 0.9}),
        ((4, 512, 64), {"e0": 0.06, "bias": -0.6}),
        ((2, 2, 128, 512), {}),
    ):
        pyramid = lod.mipmap(noise(*shape, dtype=dtype))
        for fixation in (torch.rand(pyramid.batch, 2), torch.zeros(pyramid.batch, 2)):
            check(ctx, pyramid, fixation, "gl", **options)
        assert rows_of_eight(), shape


def test_levels_in_rows_of_eight_are_quadratic(rows_of_eight: Callable[[], bool]) -> None:
    """As nearly as is said, where levels are far apart; from level 2 on positions are exact at all sides of halves."""
    used = 0
    for width, origin, e0s in ((1024, 0, (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)), (8064, 6000, (0.01,))):
        rows, columns = torch.arange(128)[:, None], torch.arange(width)
        board = ((rows >> 3) + (columns >> 3) & 1) * 0.5 + ((rows >> 4) + (columns >> 4) & 1) * 0.5
        pyramid = lod.mipmap(board[None])
        point = torch.tensor([[(origin + 205) / width, 0.4]])
        for e0 in e0s:
            expected = reference([level.double() for level in pyramid.levels], point.double(), e0)
            found = run(pyramid, point, "gl", e0=e0)
            used += rows_of_eight()
            away = (found - expected).abs()
            if width & width - 1:  # of which fp32 holds no pixel's place exactly
                away = away[level_map(point[0], (128, width), e0, 0.0)[None] > 2.1]
            assert float(away.max()) <= foveate_blocks.ROUNDING / 2 + 4e-7, (width, e0)
    assert used >= 4


@pytest.mark.parametrize("levels", [4, 5, 6])
def test_rows_of_eight_at_the_last_level(ctx: lod.Context, levels: int, rows_of_eight: Callable[[], bool]) -> None:
    check(ctx, lod.mipmap(noise(3, 256, 768), levels=levels), torch.tensor([0.1, 0.9]), "gl", bias=0.5)
    assert rows_of_eight()


def test_storage_splits_rows_of_eight(restored_limits: lod.Context, rows_of_eight: Callable[[], bool]) -> None:
    pyramid = lod.mipmap(noise(3, 3, 128, 768), backend="gl").upload()
    fixation = torch.rand(3, 2)
    whole = lod.foveate(pyramid, fixation, backend="gl")
    for limit in (1_700_000, 150_000):  # two images at a time, and rows of one
        restored_limits.limits.storage_bytes = limit
        assert torch.equal(lod.foveate(pyramid, fixation, backend="gl"), whole)
        assert rows_of_eight()


@each_way
def test_real_pictures(ctx: lod.Context, way: str, photo: torch.Tensor, page: torch.Tensor) -> None:
    for image in (photo, page, photo.float() / 255, photo[:, :400, :333].contiguous()):
        check(ctx, lod.mipmap(image), torch.tensor([0.43, 0.27]), way)


@each_way
def test_corners_and_texel_centres(ctx: lod.Context, way: str) -> None:
    pyramid = lod.mipmap(noise(5, 3, 41, 61))
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]])
    check(ctx, pyramid, points, way)


@each_way
def test_short_pyramids_read_their_last_level(ctx: lod.Context, way: str) -> None:
    for levels in (1, 2, 3, 4):
        check(ctx, lod.mipmap(noise(3, 96, 128), levels=levels), torch.tensor([0.3, 0.6]), way, bias=1.0)


@each_way
def test_results_have_memory_of_their_own(way: str) -> None:
    """Also where every pixel is read from level 0."""
    for image in (noise(1, 3, 8, 8), noise(1, 1, 1), noise(2, 1, 4, 4)):
        for src in (image, lod.mipmap(image, levels=1)):
            found = run(src, (0.5, 0.5), way, bias=-50.0)
            assert torch.equal(found, image) and found.data_ptr() != image.data_ptr()


@each_way
def test_extreme_arguments(way: str) -> None:
    pyramid = lod.mipmap(noise(3, 33, 50))
    blurred = pyramid[-1].expand(3, 33, 50)
    for options in ({"bias": 3e9}, {"bias": 1e300}, {"e0": 1e-30}):
        assert torch.allclose(run(pyramid, (0.01, 0.02), way, **options), blurred, atol=1e-5), options
    wide = lod.mipmap(noise(1, 64, 128))
    assert torch.allclose(run(wide, (0.01, 0.02), way, e0=1e-30), wide[-1].expand(1, 64, 128), atol=1e-5)
    assert torch.allclose(run(pyramid, (0.01, 0.02), way, bias=-1e300), pyramid[0], atol=1e-4)
    assert torch.allclose(run(pyramid, (0.01, 0.02), way, e0=1e300), pyramid[0], atol=1e-4)
    assert run(pyramid, (0.5, 0.5), way, e0=1e-310).isfinite().all()


@each_way
def test_image_equals_its_pyramid(way: str, sample_error: float) -> None:
    image, fixation = noise(2, 3, 50, 70), torch.rand(2, 2)
    whole = run(lod.mipmap(image), fixation, way)
    assert torch.allclose(run(image, fixation, way), whole, atol=1e-6 + sample_error)


@each_way
def test_convention_sharp_at_the_fixation_and_an_octave_at_e0(way: str) -> None:
    """With bias 0 the pixel on the fixation is itself, and at e = e0 level 1 is read."""
    image = noise(1, 128, 128)
    pyramid = lod.mipmap(image)
    at = (torch.tensor([40, 88]) + 0.5) / 128  # x, y
    found = run(pyramid, at, way, e0=16 / 128)
    assert math.isclose(float(found[0, 88, 40]), float(image[0, 88, 40]), abs_tol=1e-6)
    for x, y in ((56, 88), (40, 72)):  # 16 pixels to the right, and up
        level1 = lod.gather_patches(pyramid, [[(x + 0.5) / 128, (y + 0.5) / 128, 1.0]], 1, backend="torch")
        assert math.isclose(float(found[0, y, x]), float(level1), abs_tol=1e-5)


@each_way
def test_circles_stay_circles_on_wide_images(way: str) -> None:
    """Equally far in pixels is equally blurred, across and down: a chessboard's contrast tells the level."""
    y, x = torch.meshgrid(torch.arange(100), torch.arange(200), indexing="ij")
    found = run(((x + y) % 2).float()[None], (100.5 / 200, 50.5 / 100), way, e0=0.3)
    contrast = (found[0] - 0.5).abs()
    assert torch.allclose(contrast[50, 100:140], contrast[50:90, 100], atol=1e-5)
    assert 0.1 < float(contrast[50, 130]) < 0.4


@each_way
def test_constant_stays_constant(way: str) -> None:
    found = run(torch.full((3, 45, 30), 0.3), (0.2, 0.9), way)
    assert float((found - 0.3).abs().max()) < 1e-6


@each_way
def test_blur_grows_with_eccentricity(way: str, photo: torch.Tensor) -> None:
    image = photo.float() / 255
    found = run(image, (0.5, 0.5), way)
    loss = (found - image).square().mean(0)
    y, x = torch.meshgrid(torch.arange(512) - 255.5, torch.arange(512) - 255.5, indexing="ij")
    e = torch.hypot(x, y) / 512
    rings = [float(loss[(e >= low) & (e < low + 0.1)].mean()) for low in (0.0, 0.1, 0.2, 0.3)]
    assert rings[0] < rings[1] < rings[2] and rings[0] < rings[3]


def test_gradient_in_the_image_is_the_adjoint() -> None:
    for backend in ("torch", "gl"):
        image = noise(2, 3, 24, 30).requires_grad_()
        y = torch.randn(2, 3, 24, 30)
        forward = (lod.foveate(image, torch.rand(2, 2), backend=backend) * y).sum()  # type: ignore[arg-type]
        (adjoint,) = torch.autograd.grad(forward, image)
        assert abs(float(((image * adjoint).sum() - forward).detach())) < 1e-5 * float(y.abs().sum()), backend


def test_reference_with_a_graph_equals_the_one_without() -> None:
    levels = list(lod.mipmap(noise(2, 3, 48, 64)).levels)
    fixation = torch.rand(2, 2)
    plain = reference(levels, fixation, 0.05)
    graph = reference([level.clone().requires_grad_() for level in levels], fixation, 0.05)
    assert graph.requires_grad
    assert torch.allclose(plain, graph, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("one_thread")  # on several torch interpolates by another kernel, which rounds otherwise
def test_reference_in_bands_equals_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    made: list[int] = []
    rows_of, level_map = [], Tile.level_map
    monkeypatch.setattr(Tile, "level_map", lambda tile: (rows_of.append(tile.rows), level_map(tile))[1])
    for shape in ((2, 3, 96, 70), (1, 1, 64, 64), (3, 80, 33), (1, 3, 33, 80), (1, 2, 67, 45)):
        image = noise(*shape, dtype=dtype)
        levels = list(lod.mipmap(image, backend="torch").levels)
        points = torch.tensor([[0.3, 0.8], [1.0, 0.0]])[: 1 if len(shape) == 3 else shape[0]]
        results = []
        for band in (2**18, 16 * shape[-1], 7 * shape[-1]):
            monkeypatch.setattr(planewise, "PART", 4 * band if dtype == torch.float32 else 16 * band)
            rows_of.clear()
            results.append(reference(levels, points, 0.2))
            made.append(len(rows_of) // len(points))
        # Rows of a coarse level that bands cut are blended before columns are: in another order.
        slack = {torch.uint8: 1.0, torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6}[dtype]
        for result in results[1:]:
            assert float((result.float() - results[0].float()).abs().max()) <= slack, shape
    if dtype == torch.float32:
        assert made == [1, 6, 14, 1, 4, 12, 1, 5, 12, 1, 3, 5, 1, 5, 10]
    else:  # a tenth of the picture at least
        assert made == [1, 6, 11, 1, 4, 12, 1, 5, 10, 1, 3, 5, 1, 5, 10]


def test_gradcheck_of_the_reference() -> None:
    torch.manual_seed(1)
    levels = [level.double()[None].requires_grad_() for level in lod.mipmap(noise(1, 6, 9)).levels]
    fixation = torch.tensor([[0.31, 0.62]], dtype=torch.float64, requires_grad=True)

    def function(point: torch.Tensor, *chain: torch.Tensor) -> torch.Tensor:
        return reference(list(chain), point, 0.2)

    assert torch.autograd.gradcheck(function, (fixation, *levels), atol=1e-4)


def test_fixation_gradients_are_the_torch_backends() -> None:
    image = smooth(40, 40)
    fixation = torch.tensor([0.4, 0.6], requires_grad=True)
    (gradient,) = torch.autograd.grad(lod.foveate(image, fixation).square().sum(), fixation)
    assert float(gradient.abs().sum()) > 0
    with pytest.raises(UnsupportedError, match="fixation"):
        lod.foveate(image, fixation, backend="gl")


@pytest.mark.parametrize("limit", [40_000, 10_000, 3_000, 1_100])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
def test_low_storage_limit_splits(
    restored_limits: lod.Context, dtype: torch.dtype, channels: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into images, or rows of them; by the shader for renderers without texture units all the same."""
    pyramid = lod.mipmap(noise(5, channels, 20, 32, dtype=dtype), backend="gl").upload()
    fixation = torch.rand(5, 2)
    whole = lod.foveate(pyramid, fixation, backend="gl")
    if restored_limits.software:
        monkeypatch.setattr(module, "_pixels", None)
    restored_limits.limits.storage_bytes = limit // 4 * dtype.itemsize + 512
    split = lod.foveate(pyramid, fixation, backend="gl")
    tolerance = {torch.uint8: 1, torch.float16: 1e-3}.get(dtype, 1e-5)
    assert float((split.float() - whole.float()).abs().max()) <= tolerance


def test_storage_that_holds_no_tile_splits_into_words(restored_limits: lod.Context) -> None:
    pyramid = lod.mipmap(noise(2, 3, 20, 512), backend="gl").upload()
    fixation = torch.rand(2, 2)
    whole = lod.foveate(pyramid, fixation, backend="gl")
    restored_limits.limits.storage_bytes = 4096
    split = lod.foveate(pyramid, fixation, backend="gl")
    assert float((split - whole).abs().max()) <= 1e-3


@pytest.mark.parametrize("most", [300, 200], ids=["of a buffer", "of an array"])
def test_more_images_than_layers(restored_limits: lod.Context, most: int) -> None:
    restored_limits.limits.layers = 256
    restored_limits.limits.texels = most * (6 * 6 + 3 * 3 + 1)
    check(restored_limits, lod.mipmap(noise(600, 1, 6, 6)), torch.rand(600, 2), "gl")


def test_more_images_than_a_table_of_tiles_numbers(ctx: lod.Context) -> None:
    assert foveate_blocks.IMAGES < 600
    check(ctx, lod.mipmap(noise(600, 1, 8, 8)), torch.rand(600, 2), "gl")


def test_no_anisotropy_is_anisotropy_of_one() -> None:
    levels = [level[None] for level in lod.mipmap(noise(3, 40, 56)).levels]
    point = torch.tensor([0.4, 0.6])
    level = level_map(point, (40, 56), 0.05, 0.0)
    expected = reference(levels, point[None], 0.05)
    for in_place in (True, False):
        last = len(levels) - 1
        tile = Tile((40, 56), slice(0, 40), slice(0, 56), point, (0.4, 0.6), 0.05, 0.0, last, in_place)
        found = probed(levels, tile, level, 1.0)
        assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(reference(levels, point[None], 0.05, kept=level), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probes_in_bands_equal_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """And those with a graph, which are made of the whole."""
    rows_of, level_map = [], Tile.level_map
    monkeypatch.setattr(Tile, "level_map", lambda tile: (rows_of.append(tile.rows), level_map(tile))[1])
    slack = {torch.uint8: 1.0, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-5}[dtype]
    for shape, more in (((2, 3, 96, 70), {}), ((1, 1, 33, 80), {"bias": 2.0}), ((3, 240, 40), {"bias": 2.0})):
        levels = list(lod.mipmap(noise(*shape, dtype=dtype), backend="torch").levels)
        points = torch.tensor([[0.3, 0.8], [1.0, 0.0]])[: 1 if len(shape) == 3 else shape[0]]
        for anisotropy in (1.5, 4.0, 16.0):
            results, made = [], []
            for part in (2**24, 2**16, 16):
                monkeypatch.setattr(planewise, "PART", part)
                rows_of.clear()
                results.append(reference(levels, points, **{"e0": 0.1, "anisotropy": anisotropy, **more}))
                made.append(len(rows_of) // len(points))
            assert made[0] == 1 < made[1] <= made[2]
            wide = points.clone().requires_grad_()
            results.append(reference(levels, wide, **{"e0": 0.1, "anisotropy": anisotropy, **more}).detach())
            for result in results[1:]:
                assert float((result.float() - results[0].float()).abs().max()) <= slack, (shape, anisotropy)


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_anisotropy_keeps_detail_across_the_radius(backend: Any) -> None:
    """Right of the fixation the radius lies along x: stripes along it stay, stripes across it go."""
    size = 256
    along = ((torch.arange(size) // 2 % 2).float())[:, None].expand(1, size, size).contiguous()  # horizontal stripes
    across = along.transpose(1, 2).contiguous()
    place = slice(120, 136), slice(200, 216)
    contrast = {}
    for a in (1.0, 4.0, 16.0):
        for name, image in (("along", along), ("across", across)):
            found = lod.foveate(image, (0.5, 0.5), e0=0.1, anisotropy=a, backend=backend)
            contrast[a, name] = float(found[0][place].std())
    assert contrast[16.0, "along"] > 3 * contrast[1.0, "along"]
    assert contrast[4.0, "along"] > 1.5 * contrast[1.0, "along"]
    assert contrast[16.0, "along"] > 3 * contrast[16.0, "across"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("anisotropy", [1.5, 2.0, 4.0, 16.0])
@pytest.mark.usefixtures("llvmpipe")
def test_anisotropic_parity(photo: torch.Tensor, anisotropy: float, dtype: torch.dtype) -> None:
    """Which takes the same samples as torch; from both kinds of textures."""
    picture = torch.stack([photo[:, :203, :257], photo[:, 101:304, 55:312]])
    picture = picture if dtype == torch.uint8 else (picture.float() / 255).to(dtype)
    pyramids = lod.mipmap(picture), lod.mipmap(picture, generator="fragment")
    fixation = torch.tensor([[0.4, 0.3], [0.9, 0.5]])
    # Beside them the bits that fp32 tells apart.
    close = {torch.float32: 2e-5, torch.uint8: 1, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for more in ({}, {"bias": 2.0}, {"e0": 0.01}):
        for src in (picture, *pyramids):
            found, expected = (
                lod.foveate(src, fixation, anisotropy=anisotropy, backend=way, **more)  # type: ignore[arg-type]
                for way in ("gl", "torch")
            )
            assert found.dtype == dtype
            assert float((found.float() - expected.float()).abs().max()) <= close, more


def check_probes(pyramid: lod.Pyramid, fixation: torch.Tensor, anisotropy: float, **options: float) -> None:
    """Against float64, in torch and on a renderer that takes the samples itself."""
    levels = [level if pyramid.batched else level[None] for level in pyramid.levels]
    expected, texels, blend = probes(levels, fixation.expand(pyramid.batch, 2), anisotropy, **options)
    if not pyramid.batched:
        expected, texels, blend = expected[0], texels[0], blend[0]
    # Positions are fp32, of places as far out as the footprint, and so is the logarithm.
    slack = 4 * max(pyramid.size) * 2.0**-22 * texels + 2.0**-18 * blend
    # Of a pixel whose centre is the fixation but for rounding, rounding says which way the radius points.
    height, width = pyramid.size
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    points = fixation.double().expand(pyramid.batch, 2)[:, :, None, None]
    here = torch.hypot(x / width - points[:, 0], y / height - points[:, 1]) * max(height, width) < 1e-4
    slack = slack + stored_range(pyramid.dtype) * (here[:, None] if pyramid.batched else here)
    for way in ("torch", "gl"):
        found = lod.foveate(pyramid, fixation, anisotropy=anisotropy, backend=way, **options)  # type: ignore[arg-type]
        assert found.dtype == pyramid.dtype and found.shape == pyramid[0].shape and found.is_contiguous()
        assert_matches(found, expected, "trilinear", slack=slack, where=f"{way} {anisotropy} {options}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("llvmpipe")
def test_anisotropic_parity_with_float64(dtype: torch.dtype) -> None:
    for shape in ((2, 3, 64, 96), (3, 1, 33, 21), (4, 57, 40), (1, 2, 1, 1), (1, 3, 1, 50), (2, 2, 130, 3)):
        pyramid = lod.mipmap(noise(*shape, dtype=dtype))
        for anisotropy, options in (
            (1.5, {}),
            (2.0, {"e0": 0.5}),
            (4.0, {"e0": 0.01}),
            (5.2, {"e0": 0.004, "bias": 0.7}),
            (16.0, {"e0": 0.002, "bias": 2.0}),
        ):
            check_probes(pyramid, torch.rand(pyramid.batch, 2), anisotropy, **options)


@pytest.mark.usefixtures("llvmpipe")
def test_anisotropic_parity_at_corners_and_texel_centres() -> None:
    pyramid = lod.mipmap(noise(5, 3, 41, 61))
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]])
    for anisotropy in (2.0, 7.0):
        check_probes(pyramid, points, anisotropy, e0=0.02)


@pytest.mark.usefixtures("llvmpipe")
def test_anisotropic_parity_of_short_pyramids() -> None:
    for levels in (1, 2, 3):
        pyramid = lod.mipmap(noise(3, 48, 64), levels=levels)
        check_probes(pyramid, torch.tensor([0.3, 0.6]), 3.0, e0=0.01, bias=1.0)


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_anisotropy_follows_its_arguments(photo: torch.Tensor, backend: Any) -> None:
    image = photo.float() / 255
    made = {
        (a, bias): lod.foveate(image, (0.4, 0.3), bias=bias, anisotropy=a, backend=backend)
        for a in (2.0, 8.0, 16.0)
        for bias in (0.0, 3.0)
    }
    for a in (2.0, 8.0, 16.0):
        assert made[a, 3.0].std() < 0.97 * made[a, 0.0].std()  # blurred more
    assert float((made[2.0, 0.0] - made[16.0, 0.0]).abs().max()) > 0.1
    assert float((made[8.0, 0.0] - made[16.0, 0.0]).abs().max()) > 0.1
    flat = lod.foveate(torch.full((1, 40, 40), 0.3), (0.4, 0.3), anisotropy=8, backend=backend)
    assert float((flat - 0.3).abs().max()) < 1e-5


def test_anisotropy_leaves_the_texture_as_it_was() -> None:
    pyramid = lod.mipmap(noise(3, 64, 64)).upload()
    before = lod.log_polar(pyramid, (0.5, 0.5), 16, 32, generator="compute")
    lod.foveate(pyramid, (0.5, 0.5), anisotropy=16, backend="gl")
    assert torch.equal(lod.log_polar(pyramid, (0.5, 0.5), 16, 32, generator="compute"), before)


def test_no_anisotropy_of_a_gpu_without_the_extension(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharing, "software", False)
    monkeypatch.setattr(ctx, "extensions", ctx.extensions - {name for name in ctx.extensions if "aniso" in name})
    with pytest.raises(UnsupportedError, match="anisotropy=1"):
        lod.foveate(noise(1, 8, 8), (0.5, 0.5), anisotropy=2, backend="gl")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"fixation": (float("nan"), 0.5)}, "nan"),
        ({"fixation": (1.2, 0.5)}, r"\[0, 1\]"),
        ({"fixation": torch.rand(3, 2)}, r"\[2, 2\]"),
        ({"fixation": torch.rand(2, device="meta")}, "with data"),
        ({"fixation": torch.nested.nested_tensor([torch.rand(2)], layout=torch.jagged)}, "nested"),
        ({"e0": 0.0}, "e0"),
        ({"e0": -1}, "e0"),
        ({"e0": float("inf")}, "finite"),
        ({"e0": "wide"}, "number"),
        ({"e0": b"1"}, "number"),
        ({"anisotropy": "3"}, "number"),
        ({"bias": float("nan")}, "finite"),
        ({"anisotropy": 0.5}, "1 .none. to 16"),
        ({"anisotropy": 17}, "1 .none. to 16"),
        ({"backend": "metal"}, "'torch'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], hint: str) -> None:
    image = noise(2, 3, 16, 16)
    for backend in ("torch", "gl"):
        with pytest.raises(InputError, match=hint):
            lod.foveate(image, **{"backend": backend, "fixation": (0.5, 0.5), **arguments})
    assert lod.foveate(image, (0.5, 0.5), backend="gl").shape == image.shape


def test_wrong_sources() -> None:
    with pytest.raises(InputError, match="gaussian pyramid"):
        lod.foveate(lod.gaussian(noise(1, 8, 8)), (0.5, 0.5))
    with pytest.raises(InputError, match="tensor"):
        lod.foveate(None, (0.5, 0.5))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="channels"):
        lod.foveate(noise(5, 8, 8), (0.5, 0.5))


def test_auto_takes_probes_by_their_times(
    photo: torch.Tensor, unseeded: Path, llvmpipe: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both backends take the same ones; each counts as a sample."""
    pyramid = lod.mipmap(photo).upload()
    asked_ = [asked(lod.foveate, pyramid, (0.5, 0.5), anisotropy=a) for a in (1.0, 2.5, 4.0)]
    assert [question.state for question in asked_] == ["", "anisotropic", "anisotropic"]
    assert asked_[2].work == 4 * asked_[0].work
    fastest("gl", lod.foveate, pyramid, (0.5, 0.5), anisotropy=4)
    assert lod.explain(lod.foveate, pyramid, (0.5, 0.5)).backend == "torch"
    assert lod.explain(lod.foveate, pyramid, (0.5, 0.5), anisotropy=4).backend == "gl"
    found = lod.foveate(pyramid, (0.4, 0.3), anisotropy=4)
    assert llvmpipe.owns(found)
    expected = lod.foveate(pyramid, (0.4, 0.3), anisotropy=4, backend="torch")
    assert float((found.float() - expected.float()).abs().max()) <= 1
    monkeypatch.setattr(Sharing, "software", False)
    chosen = lod.explain(lod.foveate, pyramid, (0.5, 0.5), anisotropy=4)
    assert chosen.backend == "torch"
    assert "in their own way" in chosen.reason or "not been measured" in chosen.reason


def test_auto_makes_a_texture_where_that_pays_at_once(
    photo: torch.Tensor, ctx: lod.Context, unseeded: Path, sample_error: float
) -> None:
    """Of a pyramid, and of an image, whose chain torch makes: as fast as chains are made."""
    image = photo.float() / 255
    for source in (photo, image):
        assert lod.explain(lod.foveate, source, (0.5, 0.5)).backend == "torch"
        fastest("gl", lod.foveate, lod.mipmap(source), (0.5, 0.5))
        assert lod.explain(lod.foveate, lod.mipmap(source), (0.5, 0.5)).backend == "gl"
        if source is photo:  # its own question, and never measured near this size
            assert lod.explain(lod.foveate, lod.mipmap(source).upload(), (0.5, 0.5)).backend == "torch"
        for at in (source, source[None].expand(2, -1, -1, -1)):
            assert lod.explain(lod.foveate, at, (0.5, 0.5), anisotropy=2).backend == "torch"
            assert lod.explain(lod.foveate, at, torch.tensor([0.5, 0.5], requires_grad=True)).backend == "torch"
        for at in (source, lod.mipmap(source)):
            assert (at is source) == ("beside the image's chain" in lod.explain(lod.foveate, at, (0.5, 0.5)).reason)
        found = lod.foveate(source, (0.3, 0.6))
        assert ctx.owns(found)
        expected = lod.foveate(source, (0.3, 0.6), backend="torch")
        most = 1 + 255 * sample_error if source is photo else 2e-5 + sample_error
        assert float((found.float() - expected.float()).abs().max()) <= most
    strip = noise(3, 4, 16_400)  # longer than textures are sure to be
    fastest("gl", lod.foveate, strip[..., :16_000], (0.5, 0.5))
    assert lod.explain(lod.foveate, strip[..., :16_000], (0.5, 0.5)).backend == "gl"
    for source in (strip, lod.mipmap(strip)):
        assert "16400" in lod.explain(lod.foveate, source, (0.5, 0.5)).reason
        assert torch.isfinite(lod.foveate(source, (0.5, 0.5))).all()


def test_auto_passes_gradients_to_an_image(photo: torch.Tensor, cache: Path) -> None:
    image = photo.float() / 255
    fastest("gl", lod.foveate, image, (0.5, 0.5))
    image.requires_grad_()
    weights = torch.rand(image.shape)
    made = [(lod.foveate(image, (0.3, 0.6), backend=way) * weights).sum() for way in ("auto", "torch")]
    found, expected = (torch.autograd.grad(loss, image)[0] for loss in made)
    assert torch.allclose(found, expected, atol=1e-5)


def test_auto_stays_out_of_traces_and_contexts_of_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    image = noise(3, 256, 256)
    fastest("gl", lod.foveate, image, (0.5, 0.5))
    traced = make_fx(lambda x: lod.foveate(x, (0.3, 0.4)))(image)
    expected = lod.foveate(image * 0.5, (0.3, 0.4), backend="torch")
    assert torch.allclose(traced(image * 0.5), expected, atol=1e-6)  # nothing of the first image is in it
    monkeypatch.setattr(lod.Context, "usable_here", lambda self: False)  # an adopted one, or after a fork
    assert "another process or thread" in lod.explain(lod.foveate, image, (0.5, 0.5)).reason
    assert torch.equal(lod.foveate(image * 0.5, (0.3, 0.4)), expected)


def test_auto_uses_the_texture_once_it_is_there(photo: torch.Tensor, unseeded: Path) -> None:
    pyramid = lod.mipmap(photo)
    fastest("gl", lod.foveate, lod.mipmap(photo).upload(), (0.5, 0.5))
    assert lod.explain(lod.foveate, photo, (0.5, 0.5)).backend == "torch"
    assert lod.explain(lod.foveate, pyramid, (0.5, 0.5)).backend == "torch"
    assert lod.explain(lod.foveate, pyramid.upload(), (0.5, 0.5)).backend == "gl"
    assert lod.explain(lod.foveate, pyramid, (0.5, 0.5), anisotropy=4).backend == "torch"  # a question of its own
    assert lod.explain(lod.foveate, pyramid, torch.tensor([0.5, 0.5], requires_grad=True)).backend == "torch"
    small = lod.mipmap(photo[:, :120, :120].contiguous()).upload()
    assert lod.explain(lod.foveate, small, (0.5, 0.5)).backend == "torch"
    half = lod.mipmap(photo.half() / 255).upload()
    assert lod.explain(lod.foveate, half, (0.5, 0.5)).backend == "torch"
    ragged = lod.mipmap(photo[..., :511].contiguous()).upload()  # rows that are no whole words: another shader
    assert lod.explain(lod.foveate, ragged, (0.5, 0.5)).backend == "torch"
    fastest("torch", lod.foveate, pyramid, (0.5, 0.5))
    assert lod.explain(lod.foveate, pyramid, (0.5, 0.5)).backend == "torch"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("anisotropy", [1.0, 4.0])
def test_torch_leaves_out_what_counts_for_nothing(value: float, anisotropy: float) -> None:
    """One NaN is in every coarse level, which pixels about the fixation do not read."""
    for size, spot in (((64, 64), (60, 60)), ((301, 517), (280, 500))):
        image = noise(1, *size)
        image[0, spot[0], spot[1]] = value
        sharp = lod.foveate(image, (0.1, 0.1), anisotropy=anisotropy, backend="torch")
        clean = image.nan_to_num(0.5, 0.5)
        expected = lod.foveate(clean, (0.1, 0.1), anisotropy=anisotropy, backend="torch")
        finite = sharp.isfinite()
        # A level's texel that holds the spot reaches two texels at most.
        y, x = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
        near = torch.hypot((x + 0.5) / size[1] - 0.1, (y + 0.5) / size[0] - 0.1) < 0.15
        assert bool(finite[0][near].all()) and not bool(finite[0, spot[0], spot[1]])
        assert torch.allclose(sharp[finite], expected[finite], atol=1e-6)
        graph = lod.foveate(image.requires_grad_(), (0.1, 0.1), anisotropy=anisotropy, backend="torch")
        assert torch.equal(graph.isfinite(), finite)


@pytest.mark.parametrize("size", [(191, 187), (350, 99), (192, 256)])
def test_backward_of_larger_pictures_is_the_adjoint(size: tuple[int, int]) -> None:
    """Of so many values boxes of levels are brought to full size, and back, by torch's interpolation no more."""
    image, weights = noise(3, *size).requires_grad_(), noise(3, *size)
    assert image.numel() >= foveate_adjoint.SMALL
    for fixation in ((0.3, 0.6), (0.99, 0.01)):
        found = lod.foveate(image, fixation, backend="torch")
        (gradient,) = torch.autograd.grad((found * weights).sum(), image)
        for other in (noise(3, *size), noise(3, *size)):
            forward = (lod.foveate(other, fixation, backend="torch").double() * weights).sum()
            assert float((gradient.double() * other).sum()) == pytest.approx(float(forward), rel=1e-5)
        (batch,) = torch.autograd.grad(
            lod.foveate(image, fixation, backend="torch"), image, weights[None], is_grads_batched=True
        )
        assert torch.allclose(batch[0], gradient, atol=1e-5)
