"""Log-polar and cortical rings: shader against reference() against float64."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import HARDWARE_WEIGHT_ERROR, assert_matches, stored_range
from images import DTYPES, noise, smooth
from oracle import log_polar as oracle
from times import fastest

import gpu_lod as lod
from gpu_lod import shaders
from gpu_lod.bilinear import bilinear, converted
from gpu_lod.errors import GpuLodError, InputError, LimitError, UnsupportedError
from gpu_lod.log_polar import reference, ring_rule

WAYS = ("torch", "compute", "fragment")


def sample(src: object, fixation: object, rings: int, wedges: int, way: str, **options: object) -> torch.Tensor:
    how = {"backend": "torch"} if way == "torch" else {"generator": way}
    return lod.log_polar(src, fixation, rings, wedges, **options, **how)  # type: ignore[arg-type]


def check(
    ctx: lod.Context, pyramid: lod.Pyramid, fixation: torch.Tensor, rings: int, wedges: int, way: str, **options: object
) -> None:
    """Against the float64 sampler of the same stored chain."""
    levels = [level if pyramid.batched else level[None] for level in pyramid]
    points = fixation.expand(pyramid.batch, 2)
    expected, texels, blend = oracle(levels, points, rings, wedges, **options)  # type: ignore[arg-type]
    actual = sample(pyramid, fixation, rings, wedges, way, **options)
    actual = actual if pyramid.batched else actual[None]
    # Positions are fp32: they are off by a few units in the last place of a texel index. Hardware weights have 8 bits.
    position = max(pyramid.size) * 2.0**-22
    weight = position if ctx.software or way == "torch" else HARDWARE_WEIGHT_ERROR
    slack = 2 * weight * texels + (0 if ctx.software or way == "torch" else HARDWARE_WEIGHT_ERROR) * blend
    if options.get("border") == "zero":  # a sample on the very border may fall to either side
        slack = slack + expected.abs() * (border_distance(pyramid, points, rings, wedges, options) < 1e-6)
    assert actual.dtype == pyramid.dtype
    assert actual.is_contiguous()
    scale = 1 if pyramid.dtype == torch.uint8 else max(1.0, float(expected.abs().max())) / stored_range(pyramid.dtype)
    assert_matches(actual, expected, "trilinear", slack=slack + 1e-6 * (scale - 1), where=f"{way} {options}")


def border_distance(
    pyramid: lod.Pyramid, points: torch.Tensor, rings: int, wedges: int, options: dict[str, object]
) -> torch.Tensor:
    height, width = pyramid.size
    longer = max(height, width)
    t = (torch.arange(rings, dtype=torch.float64) + 0.5) / rings
    r_max = float(options.get("r_max", 0.7))  # type: ignore[arg-type]
    radius = (
        0.01 * (r_max / 0.01) ** t if options.get("spacing", "log") == "log" else 0.05 * ((1 + r_max / 0.05) ** t - 1)
    )
    theta = 2 * math.pi * (torch.arange(wedges, dtype=torch.float64) + 0.5) / wedges
    x = points[:, :1, None].double() + radius[:, None] * theta.cos() * longer / width
    y = points[:, 1:, None].double() + radius[:, None] * theta.sin() * longer / height
    return torch.stack([x, 1 - x, y, 1 - y]).abs().amin(0)[:, None]


@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize("spacing", ["log", "cortical"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_parity(ctx: lod.Context, way: str, dtype: torch.dtype, spacing: str, border: str) -> None:
    for shape in ((2, 3, 64, 96), (3, 1, 33, 21), (4, 57, 40), (1, 2, 1, 1), (1, 3, 1, 50)):
        pyramid = lod.mipmap(noise(*shape, dtype=dtype))
        fixation = torch.rand(pyramid.batch, 2)
        for rings, wedges in ((16, 32), (7, 9), (1, 1), (5, 3)):
            check(ctx, pyramid, fixation, rings, wedges, way, spacing=spacing, border=border)


@pytest.mark.parametrize("way", WAYS)
def test_real_pictures(ctx: lod.Context, way: str, photo: torch.Tensor, page: torch.Tensor) -> None:
    for image in (photo, page, photo.float() / 255):
        pyramid = lod.mipmap(image)
        check(ctx, pyramid, torch.tensor([0.43, 0.27]), 96, 200, way)


@pytest.mark.parametrize("way", WAYS)
def test_fixations_at_corners_and_large_radii(ctx: lod.Context, way: str) -> None:
    pyramid = lod.mipmap(noise(4, 3, 40, 60))
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    for border in ("clamp", "zero"):
        check(ctx, pyramid, corners, 12, 20, way, r_max=3.0, border=border)


@pytest.mark.parametrize("way", WAYS)
def test_image_equals_its_pyramid(way: str, sample_error: float) -> None:
    """Of an image shaders filter in fp32 on hardware, too."""
    image = noise(2, 3, 50, 70)
    fixation = torch.rand(2, 2)
    from_image = sample(image, fixation, 8, 16, way)
    from_pyramid = sample(lod.mipmap(image), fixation, 8, 16, way)
    assert torch.allclose(from_image, from_pyramid, atol=1e-5 + sample_error)


@pytest.mark.parametrize("way", WAYS)
def test_convention_angles_run_from_x_towards_y_down(way: str) -> None:
    """Of 40 wedges, 5, 15, 25 and 35 lie at 49.5 degrees and quarter turns on: lower right, lower left, ..."""
    image = torch.zeros(4, 63, 63)
    image[0, 32:, 32:] = 1
    image[1, 32:, :31] = 1
    image[2, :31, :31] = 1
    image[3, :31, 32:] = 1
    result = sample(image, (0.5, 0.5), 8, 40, way, r_min=0.2, r_max=0.4)
    assert torch.allclose(result[:, 3, 5::10], torch.eye(4), atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_convention_circles_stay_circles_on_wide_images(way: str) -> None:
    """A disc drawn in pixels on a 2:1 image fills whole rings and no others."""
    y, x = torch.meshgrid(torch.arange(61.0), torch.arange(121.0), indexing="ij")
    disc = (((x + 0.5 - 60.5) ** 2 + (y + 0.5 - 30.5) ** 2).sqrt() < 18)[None].float()
    result = sample(disc, (0.5, 0.5), 24, 40, way, r_min=0.02, r_max=0.24)
    assert (result.std(dim=-1) < 0.2).all()
    assert result[0, :18].min() > 0.9
    assert result[0, -2:].max() < 0.1


@pytest.mark.parametrize("way", WAYS)
def test_constant_stays_constant(way: str) -> None:
    result = sample(torch.full((3, 45, 30), 0.3), (0.2, 0.9), 16, 16, way)
    assert (result - 0.3).abs().max() < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_rotation_about_the_fixation_shifts_wedges(way: str) -> None:
    """A quarter turn of the image is a shift by a quarter of the wedges, exactly but for rounding."""
    image = noise(3, 64, 64)
    turned = torch.rot90(image, -1, dims=(-2, -1))  # clockwise on the screen, which is from +x towards +y
    a = sample(image, (0.5, 0.5), 12, 40, way)
    b = sample(turned, (0.5, 0.5), 12, 40, way)
    assert (a.roll(10, dims=-1) - b).abs().max() < 2e-4


def waves(u: torch.Tensor, v: torch.Tensor, shortest: float) -> torch.Tensor:
    """A picture [3, ...] in [0, 1] of places in pixels from the fixation, with no shorter wave than said."""
    directions = ((0.7, 1.0), (2.0, 1.4), (2.9, 1.2))
    phases = [2 * math.pi / (n * shortest) * (u * math.cos(angle) + v * math.sin(angle)) for angle, n in directions]
    return torch.stack([0.5 + 0.5 * torch.sin(phase + 0.4) for phase in phases])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("samples", "error"), [(4, 0.1), (16, 0.01)])
@pytest.mark.parametrize(("turn", "zoom"), [(1, 0), (-3, 0), (0, 1), (0, -2), (2, 1)])
def test_turns_and_zooms_about_the_fixation_shift_wedges_and_rings(
    way: str, turn: int, zoom: int, samples: int, error: float
) -> None:
    """By whole wedges and rings, about a fixation off the centre, to the docstring's error of the range for waves of so
    many of the outermost samples."""
    height, width, rings, wedges, r_min, r_max = 256, 320, 24, 48, 0.04, 0.35
    fixation = torch.tensor([0.42, 0.55], dtype=torch.float64)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    x, y = x.double() - fixation[0] * width, y.double() - fixation[1] * height
    angle, ratio = turn * 2 * math.pi / wedges, (r_max / r_min) ** (zoom / rings)
    turned = (x * math.cos(angle) + y * math.sin(angle)) / ratio, (y * math.cos(angle) - x * math.sin(angle)) / ratio
    shortest = samples * width * r_max * 2 * math.pi / wedges
    a, b = (
        sample(waves(*places, shortest).float(), fixation.float(), rings, wedges, way, r_min=r_min, r_max=r_max)
        for places in ((x, y), turned)
    )
    a = a.roll(turn, dims=-1)
    kept = slice(max(zoom, 0), rings + min(zoom, 0)), slice(max(-zoom, 0), rings - max(zoom, 0))
    assert float((b[:, kept[0]] - a[:, kept[1]]).abs().max()) < error
    wrong = a.roll(1, dims=-1)
    assert float((b[:, kept[0]] - wrong[:, kept[1]]).abs().max()) > 5e-2  # which tells a wedge


@pytest.mark.parametrize("way", WAYS)
def test_scaling_shifts_rings(way: str) -> None:
    """Twice the size about the fixation is a shift of ln 2 / ln(r_max / r_min) rings, to 1% on a smooth picture."""
    rings, shift = 40, 8
    r_max = 0.4
    r_min = r_max / 2 ** (rings / shift)
    large = smooth(256, 256)
    half = torch.nn.functional.interpolate(large[None], scale_factor=0.5, mode="area")[0]
    small = torch.zeros(3, 256, 256)
    small[:, 64:192, 64:192] = half
    a = sample(large, (0.5, 0.5), rings, 32, way, r_min=r_min, r_max=r_max)
    b = sample(small, (0.5, 0.5), rings, 32, way, r_min=r_min, r_max=r_max)
    assert (a[:, 2 * shift : rings - 1] - b[:, shift : rings - 1 - shift]).abs().max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8], ids=str)
def test_colours_are_rounded_before_hardware_truncates_them(
    ctx: lod.Context, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some does on its way to canvases of 16 bits a value and of 8: here in the shader."""
    read = shaders._read

    def truncating(name: str, stack: tuple[str, ...]) -> str:
        cut = "f_texel = uintBitsToFloat(floatBitsToUint(texel) & 0xffffe000u);"
        return read(name, stack).replace("f_texel = texel;", cut)

    monkeypatch.setattr(shaders, "_read", truncating)
    monkeypatch.setattr(ctx.programs, "_cache", {})
    pyramid = lod.mipmap(noise(3, 60, 80, dtype=dtype))
    found, expected = (sample(pyramid, (0.4, 0.6), 48, 64, way) for way in ("fragment", "compute"))
    assert torch.equal(found, expected)


def test_gradient_in_the_image_is_the_adjoint(sample_error: float) -> None:
    for way in WAYS:
        image = noise(2, 3, 24, 30).requires_grad_()
        y = torch.randn(2, 3, 6, 10)
        forward = (sample(image, torch.rand(2, 2), 6, 10, way) * y).sum()
        (adjoint,) = torch.autograd.grad(forward, image)
        most = 1e-4 + sample_error * float(y.abs().sum())
        assert abs(float(((image * adjoint).sum() - forward).detach())) < most, way


def test_gradient_through_a_pyramid(sample_error: float) -> None:
    image = noise(3, 24, 30).requires_grad_()
    fixation = torch.tensor([0.4, 0.6])
    gradients = [
        torch.autograd.grad(sample(lod.mipmap(image), fixation, 6, 10, way).square().sum(), image)[0] for way in WAYS
    ]
    for found in gradients[1:]:  # of squares
        assert torch.allclose(found, gradients[0], atol=1e-5 + 2 * sample_error * float(gradients[0].abs().max()))


def test_fixation_gradient_is_the_torch_backends() -> None:
    image = smooth(40, 40)
    fixation = torch.tensor([[0.4, 0.6]], requires_grad=True)
    result = lod.log_polar(image, fixation, 6, 10)  # auto
    (gradient,) = torch.autograd.grad(result.sum(), fixation)
    assert gradient.abs().sum() > 0
    with pytest.raises(UnsupportedError, match="fixation"):
        lod.log_polar(image, fixation, 6, 10, backend="gl")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
def test_low_storage_limit_splits(restored_limits: lod.Context, dtype: torch.dtype) -> None:
    pyramid = lod.mipmap(noise(5, 3, 32, 32, dtype=dtype), backend="gl")
    fixation = torch.rand(5, 2)
    whole = {way: sample(pyramid, fixation, 16, 24, way) for way in ("compute", "fragment")}
    restored_limits.limits.storage_bytes = 5500
    again = lod.mipmap(pyramid[0].clone(), backend="gl")
    for way, expected in whole.items():
        assert (sample(again, fixation, 16, 24, way).float() - expected.float()).abs().max() < 1e-5, way


@pytest.mark.parametrize("most", [300, 200], ids=["of a buffer", "of an array"])
def test_more_images_than_layers(restored_limits: lod.Context, most: int) -> None:
    restored_limits.limits.layers = 256
    restored_limits.limits.texels = most * (6 * 6 + 3 * 3 + 1)
    pyramid = lod.mipmap(noise(600, 1, 6, 6))
    for way in ("compute", "fragment"):
        check(restored_limits, pyramid, torch.rand(600, 2), 3, 5, way)


def test_more_images_than_a_rendered_texture_has_layers(ctx: lod.Context) -> None:
    """The driver's own limit: what images are read from may have more."""
    count = ctx.limits.layers + 1
    check(ctx, lod.mipmap(noise(count, 1, 6, 6)), torch.rand(count, 2), 3, 5, "fragment")


def test_auto_uses_the_texture_units_once_the_texture_is_there(photo: torch.Tensor, unseeded: Path) -> None:
    pyramid = lod.mipmap(photo)
    fastest("gl fragment", lod.log_polar, lod.mipmap(photo).upload(), (0.5, 0.5), 256, 512)
    assert lod.explain(lod.log_polar, pyramid, (0.5, 0.5), 256, 512).backend == "torch"
    pyramid.upload()
    chosen = lod.explain(lod.log_polar, pyramid, (0.5, 0.5), 256, 512)
    assert (chosen.backend, chosen.generator) == ("gl", "fragment")
    assert chosen.figures == {"torch": 10.0, "gl compute": 10.0, "gl fragment": 1.0}
    assert lod.explain(lod.log_polar, pyramid, (0.5, 0.5), 4, 4).backend == "torch"
    floats = lod.mipmap(photo.float()).upload()
    assert lod.explain(lod.log_polar, floats, (0.5, 0.5), 256, 512).backend == "torch"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"fixation": (float("nan"), 0.5)}, "nan"),
        ({"fixation": (float("inf"), 0.5)}, "inf"),
        ({"fixation": (1.2, 0.5)}, r"\[0, 1\]"),
        ({"fixation": (-0.1, 0.5)}, r"\[0, 1\]"),
        ({"fixation": (0.5,)}, "shape"),
        ({"fixation": torch.rand(3, 2)}, r"\[2, 2\]"),
        ({"fixation": "centre"}, "fixation"),
        ({"rings": 0}, "rings"),
        ({"wedges": 0}, "wedges"),
        ({"rings": 2.5}, "rings"),
        ({"r_min": 0.0}, "r_min"),
        ({"r_min": -1.0}, "r_min"),
        ({"r_min": 0.7}, "r_min"),
        ({"r_max": 0.005}, "r_max"),
        ({"r_max": float("inf")}, "finite"),
        ({"r_min": "a"}, "number"),
        ({"r_min": "0.1"}, "number"),
        ({"r_min": 1e-40}, "least that fp32 holds"),
        ({"spacing": "cortical", "e0": 1e-300}, "least that fp32 holds"),
        ({"spacing": "linear"}, "'log', 'cortical'"),
        ({"spacing": "cortical", "r_min": 0.01}, "r_min"),
        ({"spacing": "cortical", "e0": 0.0}, "e0"),
        ({"border": "wrap"}, "'clamp', 'zero'"),
        ({"backend": "metal"}, "'torch'"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], hint: str) -> None:
    image = noise(2, 3, 16, 16)
    good: dict[str, object] = {"fixation": (0.5, 0.5), "rings": 4, "wedges": 8}
    for backend in ("torch", "gl"):
        with pytest.raises(InputError, match=hint):
            lod.log_polar(image, **{"backend": backend, **good, **arguments})  # type: ignore[arg-type]
    assert lod.log_polar(image, **good, backend="gl").shape == (2, 3, 4, 8)  # type: ignore[arg-type]


def test_wrong_sources(restored_limits: lod.Context) -> None:
    with pytest.raises(InputError, match="max pyramid"):
        lod.log_polar(lod.hiz(noise(1, 8, 8)), (0.5, 0.5), 4, 4)
    with pytest.raises(InputError, match="tensor"):
        lod.log_polar(None, (0.5, 0.5), 4, 4)  # type: ignore[arg-type]
    restored_limits.limits.texture_size = 16
    with pytest.raises(LimitError, match="textures"):
        lod.log_polar(lod.mipmap(noise(1, 8, 17)), (0.5, 0.5), 4, 4, backend="gl")
    assert issubclass(LimitError, GpuLodError)


def test_fixation_changed_before_backward_changes_nothing() -> None:
    def gradient(way: str, *, change: bool) -> torch.Tensor:
        torch.manual_seed(2)
        image = noise(3, 24, 30).requires_grad_()
        fixation = torch.tensor([0.4, 0.6])
        loss = sample(image, fixation, 6, 10, way).square().sum()
        if change:
            fixation.add_(0.2)
        return torch.autograd.grad(loss, image)[0]

    for way in WAYS:
        assert torch.equal(gradient(way, change=True), gradient(way, change=False))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rings", "wedges"), [(1, 3), (2, 5), (3, 7), (5, 9), (21, 13), (8, 16)])
def test_bands_of_rings_share_words(ctx: lod.Context, dtype: torch.dtype, rings: int, wedges: int) -> None:
    """Rings are drawn in bands, which end in the middle of words of small dtypes, and so do planes."""
    for channels in (1, 3):
        check(ctx, lod.mipmap(noise(3, channels, 16, 20, dtype=dtype)), torch.rand(3, 2), rings, wedges, "fragment")


def test_tables_and_canvas_respect_the_limits(restored_limits: lod.Context) -> None:
    pyramid = lod.mipmap(noise(1, 16, 16)).upload()
    restored_limits.limits.texture_size = 64
    assert sample(pyramid, (0.5, 0.5), 130, 5, "fragment").shape == (1, 130, 5)  # more bands
    with pytest.raises(LimitError, match="generator='compute'"):
        sample(pyramid, (0.5, 0.5), 4, 65, "fragment")
    assert sample(pyramid, (0.5, 0.5), 4, 65, "compute").shape == (1, 4, 65)
    restored_limits.limits.storage_bytes = 2048
    with pytest.raises(LimitError, match="table"):
        sample(pyramid, (0.5, 0.5), 1, 300, "compute")


def test_extreme_radii() -> None:
    image = noise(1, 16, 16)
    for way in WAYS:
        for r_max, e0 in ((1e-18, 0.05), (1e18, 0.05), (0.7, 1e-12)):
            assert sample(image, (0.5, 0.5), 4, 4, way, spacing="cortical", r_max=r_max, e0=e0).isfinite().all()


def test_one_image_is_split_over_threads_without_a_difference() -> None:
    levels = lod.mipmap(noise(3, 40, 50)).levels
    rule = ring_rule(8, 12, None, 0.7, "log", 0.05)
    point = torch.tensor([[0.4, 0.6]])
    whole = reference(list(levels), point, rule, parts=1)
    for parts in (2, 3, 5, None):
        assert torch.equal(reference(list(levels), point, rule, parts=parts), whole)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", ["opencv", "skimage"])
def test_convention_beside_opencv_and_skimage(library: str, way: str) -> None:
    """Both put their first sample at angle 0 and the innermost radius, without half steps, and never filter: at twice
    the resolution their odd rows and columns are our wedges and rings, of level 0 alone. skimage's radii are our log
    ones from 1 px on; opencv's are 1 px less, which makes them our cortical ones with e0 = 1 px."""
    height, width, rings, wedges, longest = 90, 120, 24, 40, 40.0
    image, fixation = smooth(height, width), (0.45, 0.55)
    pyramid = lod.mipmap(image, levels=1)
    centre = fixation[0] * width - 0.5, fixation[1] * height - 0.5  # pixel centres at whole numbers
    array = image.permute(1, 2, 0).contiguous().numpy()
    if library == "opencv":
        import cv2

        ours: dict[str, object] = {"spacing": "cortical", "e0": 1 / width, "r_max": (longest - 1) / width}
        flags = cv2.WARP_POLAR_LOG | cv2.INTER_LINEAR
        theirs = cv2.warpPolar(array, (2 * rings, 2 * wedges), centre, longest, flags)
    else:
        from skimage.transform import warp_polar

        ours = {"r_min": 1 / width, "r_max": longest / width}
        theirs = warp_polar(
            array, centre[::-1], radius=longest, output_shape=(2 * wedges, 2 * rings), scaling="log", order=1,
            channel_axis=-1,
        )  # fmt: skip
    found = sample(pyramid, fixation, rings, wedges, way, **ours)
    tolerance = 1e-3 if library == "opencv" else 1e-4  # opencv weighs with 5 bits
    expected = torch.from_numpy(theirs)[1::2, 1::2].permute(2, 1, 0).float()
    assert float((found - expected).abs().max()) < tolerance


@pytest.mark.parametrize(
    ("low", "high"),
    [((-0.2, -0.3), (0.1, 0.1)), ((-1.5, 0.8), (-0.9, 1.4)), ((2.0, 2.0), (2.0, 2.0)), ((1, 1), (1, 1))],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=str)
def test_no_more_is_converted_than_is_read(
    dtype: torch.dtype, low: tuple[float, float], high: tuple[float, float]
) -> None:
    level = noise(2, 3, 301, 202, dtype=dtype)
    low_, high_ = torch.tensor(low), torch.tensor(high)
    grid = low_ + torch.rand(2, 20, 30, 2) * (high_ - low_)
    part, places = converted(level, grid, torch.float32)
    assert part.dtype == torch.float32 and part.numel() < 0.2 * level.numel()
    expected = bilinear(level.float(), grid, torch.float32)
    assert torch.allclose(bilinear(part, places, torch.float32), expected, atol=2e-2 if dtype == torch.uint8 else 1e-4)


def test_where_nearly_all_is_read_all_is_converted() -> None:
    level, grid = noise(1, 1, 400, 700, dtype=torch.uint8), torch.rand(1, 30, 30, 2) * 2 - 1
    part, places = converted(level, grid, torch.float32)
    assert part.shape == level.shape and places is grid
    wide = level.float()
    assert converted(wide, grid[:, :1, :1], torch.float32)[0] is wide  # there is nothing to convert


def test_samples_of_small_dtypes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rings of a level at a time, whatever share of a level's rings that is."""
    module = sys.modules["gpu_lod.log_polar"]
    rings, sampled = [], module.bilinear
    monkeypatch.setattr(module, "bilinear", lambda *a: (rings.append(a[1].shape[1]), sampled(*a))[1])
    for dtype in (torch.uint8, torch.float16, torch.float32):
        image = noise(2, 3, 60, 80, dtype=dtype)
        whole = lod.log_polar(image, (0.3, 0.6), 20, 30, border="zero", backend="torch")
        monkeypatch.setattr(module, "_AT_ONCE", 2 * 30 * 3)  # three rings
        rings.clear()
        found = lod.log_polar(image, (0.3, 0.6), 20, 30, border="zero", backend="torch")
        assert (max(rings) == 3) == (dtype != torch.float32)
        assert float((found.float() - whole.float()).abs().max()) <= (1 if dtype == torch.uint8 else 1e-3)
        monkeypatch.undo()
        monkeypatch.setattr(module, "bilinear", lambda *a: (rings.append(a[1].shape[1]), sampled(*a))[1])


@pytest.mark.parametrize("spacing", ["log", "cortical"])
def test_rings_beyond_all_numbers_read_the_edge(spacing: Any) -> None:
    """Of bytes plain torch converts what is read alone, which is found by where that ends."""
    image = noise(3, 300, 340, dtype=torch.uint8)
    for border in ("clamp", "zero"):
        how: dict[str, Any] = {"spacing": spacing, "r_max": 1e300, "border": border, "backend": "torch"}
        found = lod.log_polar(image, (0.5, 0.5), 9, 12, **how)
        other = lod.log_polar(image.float(), (0.5, 0.5), 9, 12, **how)
        assert torch.equal(found.float(), other.round())
