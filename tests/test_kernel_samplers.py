"""log_polar, foveate and gather_patches with backend="cuda", on the emulator, against float64."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compare import HARDWARE_WEIGHT_ERROR, assert_matches
from cuda_emulator import COMPILER, EmulatedDevice
from images import DTYPES, noise
from oracle import foveate as foveate_oracle
from oracle import gather_patches as patch_oracle
from oracle import log_polar as polar_oracle
from test_gather_patches import grid_sites, random_sites, unfolded
from test_log_polar import border_distance

import gpu_lod as lod
from gpu_lod import cached, checks
from gpu_lod.errors import (
    CaptureError,
    InputError,
    LimitError,
    OutOfMemoryError,
    PyramidChangedError,
    UnsupportedError,
)
from gpu_lod.foveate import reference as foveated
from gpu_lod.gather_patches import Look
from gpu_lod.gather_patches import reference as gathered
from gpu_lod.kernels import samplers, textures
from gpu_lod.operators import operators

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

SHAPES = ((2, 3, 64, 96), (3, 1, 33, 21), (4, 57, 40), (1, 2, 1, 1), (1, 3, 1, 50))


def levels_of(pyramid: lod.Pyramid) -> list[torch.Tensor]:
    return [level if pyramid.batched else level[None] for level in pyramid]


def matches(found: torch.Tensor, pyramid: lod.Pyramid, truth: tuple[torch.Tensor, ...], more: Any = 0.0) -> None:
    """Within what weights of 8 bits and fp32 positions leave open."""
    expected, texels, blend = truth
    position = HARDWARE_WEIGHT_ERROR + max(pyramid.size) * 2.0**-22
    slack = 2 * position * texels + HARDWARE_WEIGHT_ERROR * blend + more
    assert found.is_contiguous()
    assert_matches(found if pyramid.batched else found[None], expected, "trilinear", slack=slack)


read_as = pytest.mark.parametrize("read_as", ["texture", "memory"])


def uploaded(pyramid: lod.Pyramid, read_as: str) -> lod.Pyramid:
    return pyramid.upload(backend="cuda") if read_as == "texture" else pyramid


def launched(device: EmulatedDevice) -> set[str]:
    return {call[1].name for call in device.named("launch")}


# -- log_polar --------------------------------------------------------------------------------------------------------


def check_polar(pyramid: lod.Pyramid, fixation: torch.Tensor, rings: int, wedges: int, **how: Any) -> None:
    found = lod.log_polar(pyramid, fixation, rings, wedges, backend="cuda", **how)
    assert found.dtype == pyramid.dtype
    points = fixation.expand(pyramid.batch, 2)
    truth = polar_oracle(levels_of(pyramid), points, rings, wedges, **how)
    more: Any = 0.0
    if how.get("border") == "zero":  # a sample on the very border may fall to either side
        more = truth[0].abs() * (border_distance(pyramid, points, rings, wedges, how) < 1e-6)
    matches(found, pyramid, truth, more)


@read_as
@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize("spacing", ["log", "cortical"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_polar(emulated: EmulatedDevice, dtype: torch.dtype, spacing: str, border: str, read_as: str) -> None:
    for shape in SHAPES:
        pyramid = uploaded(lod.mipmap(noise(*shape, dtype=dtype)), read_as)
        for rings, wedges in ((16, 32), (7, 9), (1, 1)):
            check_polar(pyramid, torch.rand(pyramid.batch, 2), rings, wedges, spacing=spacing, border=border)
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    check_polar(
        uploaded(lod.mipmap(noise(4, 3, 40, 60, dtype=dtype)), read_as), corners, 12, 20, r_max=3.0, border=border
    )
    assert launched(emulated) == ({"fill", "log_polar"} if read_as == "texture" else {"log_polar_of_levels"})


def test_weights_of_maps_from_memory_are_exact(emulated: EmulatedDevice) -> None:
    for shape in SHAPES:
        pyramid = lod.mipmap(noise(*shape))
        points = torch.rand(pyramid.batch, 2)
        found = lod.log_polar(pyramid, points, 16, 32, backend="cuda")
        expected, texels, _ = polar_oracle(levels_of(pyramid), points, 16, 32)
        close = 2e-6 + max(pyramid.size) * 2.0**-22 * texels  # of fp32 places
        assert bool(((found.view_as(expected) - expected).abs() <= close).all())


@read_as
def test_pieces_of_rings_cover_every_wedge(emulated: EmulatedDevice, read_as: str) -> None:
    pyramid = uploaded(lod.mipmap(noise(3, 40, 60)), read_as)
    for wedges, pieces, threads in ((5, 1, 32), (33, 1, 64), (256, 1, 256), (257, 2, 160), (700, 3, 256)):
        for rings in (3, 4, 9):
            check_polar(pyramid, torch.rand(1, 2), rings, wedges)
            rows = -(-rings // samplers.RINGS) if read_as == "texture" else rings
            assert emulated.named("launch")[-1][2:] == ((pieces, rows, 1), threads)


@read_as
@pytest.mark.parametrize("name", ["log_polar", "gather_patches"])
def test_more_rows_and_layers_than_a_grid_has(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, name: str, read_as: str
) -> None:
    """Rings, parts of patches, and images: a block makes one after the other."""
    pyramid = uploaded(lod.mipmap(noise(7, 3, 30, 41)), read_as)
    points, sites = torch.rand(7, 2), random_sites(7, 2)

    def sampled() -> torch.Tensor:
        if name == "log_polar":
            return lod.log_polar(pyramid, points, 29, 13, backend="cuda")
        return lod.gather_patches(pyramid, sites, 60, backend="cuda")

    expected = sampled()
    monkeypatch.setattr(samplers, "MOST_ROWS", 3)
    assert torch.equal(sampled(), expected)
    assert emulated.named("launch")[-1][2][1:] == (3, 3)


# -- foveate ----------------------------------------------------------------------------------------------------------


@read_as
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_foveate(emulated: EmulatedDevice, dtype: torch.dtype, read_as: str) -> None:
    for shape in (*SHAPES, (2, 2, 130, 3), (5, 3, 41, 61)):
        pyramid = uploaded(lod.mipmap(noise(*shape, dtype=dtype)), read_as)
        points = torch.rand(pyramid.batch, 2)
        if pyramid.batch == 5:
            points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]])
        for options in ({}, {"e0": 0.5}, {"e0": 0.004, "bias": 0.7}, {"bias": -2.0}):
            found = lod.foveate(pyramid, points, backend="cuda", **options)
            assert found.dtype == dtype and found.shape == pyramid[0].shape
            matches(found, pyramid, foveate_oracle(levels_of(pyramid), points, **options))
    assert launched(emulated) == ({"fill", "foveate"} if read_as == "texture" else {"foveate_of_levels"})


@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 5, 8193), (1, 1, 8191, 7)], ids=str)
def test_weights_of_pictures_from_memory_are_exact(emulated: EmulatedDevice, shape: tuple[int, ...]) -> None:
    """Of pixels' centres, that is, however large the picture is: fp32's own rounding is in the level alone."""
    pyramid = lod.mipmap(noise(*shape))
    points = torch.rand(pyramid.batch, 2)
    found = lod.foveate(pyramid, points, backend="cuda")
    expected, _, blend = foveate_oracle(levels_of(pyramid), points)
    assert bool(((found.view_as(expected) - expected).abs() <= 2e-6 + 2e-6 * blend).all())


def test_anisotropic_footprints_are_long_along_the_radius(emulated: EmulatedDevice) -> None:
    """As torch's, probe for probe, but for the weights."""
    y, x = torch.meshgrid(torch.linspace(0, 9, 60), torch.linspace(0, 14, 90), indexing="ij")
    image = torch.stack([x.sin(), y.cos(), (x * y / 9).sin()])
    pyramid = lod.mipmap(image)
    for anisotropy in (2.0, 4.0, 16.0):
        found = lod.foveate(pyramid, (0.3, 0.6), anisotropy=anisotropy, backend="cuda")
        expected = foveated(list(pyramid.levels), torch.tensor([[0.3, 0.6]]), 0.05, 0.0, anisotropy)
        plain = foveated(list(pyramid.levels), torch.tensor([[0.3, 0.6]]), 0.05)
        assert (found - expected).abs().max() < 0.05 < (plain - expected).abs().max()


@read_as
def test_extreme_arguments(emulated: EmulatedDevice, read_as: str) -> None:
    pyramid = uploaded(lod.mipmap(noise(3, 33, 50)), read_as)
    blurred = pyramid[-1].expand(3, 33, 50)
    for options in ({"bias": 3e9}, {"bias": 1e300}, {"e0": 1e-30}):
        found = lod.foveate(pyramid, (0.01, 0.02), backend="cuda", **options)
        assert torch.allclose(found, blurred, atol=1e-5), options
    for options in ({"bias": -1e300}, {"e0": 1e300}):
        assert torch.equal(lod.foveate(pyramid, (0.01, 0.02), backend="cuda", **options), pyramid[0])


# -- gather_patches ---------------------------------------------------------------------------------------------------


@read_as
@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_patches(emulated: EmulatedDevice, dtype: torch.dtype, border: Any, read_as: str) -> None:
    for shape, budget, patch in zip(SHAPES, (9, 5, 6, 3, 4), (14, 16, 7, 3, 1), strict=True):
        pyramid = uploaded(lod.mipmap(noise(*shape, dtype=dtype)), read_as)
        sites = random_sites(pyramid.batch, budget)
        found = lod.gather_patches(pyramid, sites, patch, border, backend="cuda")
        assert found.dtype == dtype
        expected, texels, blend = patch_oracle(levels_of(pyramid), sites, patch, border)
        more = max(pyramid.size) * 2.0**-20 * texels  # positions are fp32, and centres may be moved as far
        if border == "zero":
            height, width = pyramid.size
            steps = (torch.arange(patch) - (patch - 1) / 2) * 2 ** sites[..., 2:].double()
            x, y = sites[..., :1].double() * width + steps, sites[..., 1:2].double() * height + steps
            near = [torch.minimum(at.abs(), (at - n).abs()) < 1e-6 * n + 1e-5 for at, n in ((x, width), (y, height))]
            more = more + expected.abs() * (near[0][..., None, :] | near[1][..., :, None])[:, :, None]
        matches(found, pyramid, (expected, texels, blend), more)
    assert launched(emulated) == ({"fill", "patches"} if read_as == "texture" else {"patches_of_levels"})


@read_as
@pytest.mark.parametrize("bias", [-0.5, -2.3, 1.25])
def test_bias_is_of_what_is_read_and_not_of_where(emulated: EmulatedDevice, bias: float, read_as: str) -> None:
    for shape, budget, patch in zip(SHAPES, (9, 5, 6, 3, 4), (14, 16, 7, 3, 1), strict=True):
        pyramid = uploaded(lod.mipmap(noise(*shape)), read_as)
        sites = random_sites(pyramid.batch, budget)
        found = lod.gather_patches(pyramid, sites, patch, backend="cuda", bias=bias)
        expected, texels, blend = patch_oracle(levels_of(pyramid), sites, patch, bias=bias)
        matches(found, pyramid, (expected, texels, blend), max(pyramid.size) * 2.0**-20 * texels)
    image = noise(3, 101, 223)
    found = lod.gather_patches(
        uploaded(lod.mipmap(image), read_as), grid_sites(101, 223, 14), backend="cuda", bias=bias
    )
    assert torch.equal(found, unfolded(image, 14)) is (bias < 0)


@pytest.mark.parametrize("border", ["clamp", "zero"])
def test_weights_of_what_is_read_from_memory_are_exact(emulated: EmulatedDevice, border: Any) -> None:
    """Those of texture units are of 8 bits; here places are as exact as fp32 sites are."""
    for shape, budget, patch in zip(SHAPES, (9, 5, 6, 3, 4), (14, 16, 7, 3, 1), strict=True):
        pyramid = lod.mipmap(noise(*shape))
        sites = random_sites(pyramid.batch, budget)
        found = lod.gather_patches(pyramid, sites, patch, border, backend="cuda")
        expected, texels, _ = patch_oracle(levels_of(pyramid), sites, patch, border)
        inside = expected != 0 if border == "zero" else torch.ones_like(expected, dtype=torch.bool)
        close = 2e-6 + max(pyramid.size) * 2.0**-22 * texels
        assert bool(
            ((found.view_as(expected) - expected).abs() <= close)[inside & (found.view_as(expected) != 0)].all()
        )


def test_places_in_large_pictures_are_exact(emulated: EmulatedDevice) -> None:
    """From memory, in white noise, where a hundredth of a texel shows."""
    pyramid = lod.mipmap(noise(1, 901, 2999), levels=5)
    sites = random_sites(1, 40, 7.0)[0]
    found = lod.gather_patches(pyramid, sites, 14, backend="cuda")
    look = Look(14, False, None, (0.0,), torch.float64)
    expected = gathered([level.double() for level in pyramid.levels], sites[None].double(), look)
    assert float((found - expected).abs().max()) < 5e-6


@read_as
@pytest.mark.parametrize("patch", [1, 3, 14, 16, 32, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grid_sites_return_the_exact_pixels(
    emulated: EmulatedDevice, dtype: torch.dtype, patch: int, read_as: str
) -> None:
    image = noise(3, 101, 223, dtype=dtype)
    pyramid = uploaded(lod.mipmap(image), read_as)
    found = lod.gather_patches(pyramid, grid_sites(101, 223, patch), patch, backend="cuda")
    assert torch.equal(found, unfolded(image, patch))


@read_as
def test_nodes_of_a_quadtree_return_the_exact_texels(emulated: EmulatedDevice, read_as: str) -> None:
    pyramid = uploaded(lod.mipmap(noise(3, 224, 448)), read_as)
    for level in (1, 2, 3):
        found = lod.gather_patches(pyramid, grid_sites(224, 448, 14, level), 14, backend="cuda")
        assert torch.equal(found, unfolded(pyramid[level], 14))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalised_into_every_dtype(emulated: EmulatedDevice, dtype: torch.dtype) -> None:
    image = noise(2, 3, 56, 70, dtype=dtype)
    sites = grid_sites(56, 70, 14)
    mean, std = (0.481, 0.457, 0.408), (0.268, 0.261, 0.275)
    unit = image.double() / (255 if dtype == torch.uint8 else 1)
    normal = (unit - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    expected = torch.stack([unfolded(one, 14) for one in normal])
    for into, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        found = lod.gather_patches(image, sites, 14, mean=mean, std=std, dtype=into, backend="cuda")
        assert found.dtype == into
        assert float((found.double() - expected).abs().max()) < tolerance
    zero = lod.gather_patches(image, [[0.0, 0.5, 0.0]], 4, "zero", mean, std, torch.float32, backend="cuda")
    assert bool((zero[..., :2] == 0).all()) and bool((zero[..., 2:] != 0).all())


def test_sites_for_all_images_and_levels_past_the_last(emulated: EmulatedDevice) -> None:
    image, sites = noise(3, 3, 40, 40), random_sites(1, 6)
    shared = lod.gather_patches(image, sites[0], 8, backend="cuda")
    assert torch.equal(shared, lod.gather_patches(image, sites.expand(3, -1, -1), 8, backend="cuda"))
    far = lod.gather_patches(image, [[0.5, 0.5, 7.0], [0.5, 0.5, 1e30]], 4, backend="cuda")
    assert torch.allclose(far, lod.mipmap(image)[-1][:, None].expand_as(far), atol=1e-6)


def wrong_rows(patch: int, share: int) -> bool:
    """Of a patch's samples, found as sites.cuh does: rows do not fall, so that only their ends can be wrong."""
    begins = np.arange(patch, dtype=np.uint64) * np.uint64(patch)
    ends = begins + np.uint64(patch - 1)
    return any(bool((at * np.uint64(share) >> np.uint64(32) != at // np.uint64(patch)).any()) for at in (begins, ends))


def test_rows_of_patches_are_found_by_multiplying() -> None:
    shares = {patch: samplers._share(patch) for patch in range(1, 2000)}
    assert [patch for patch, share in shares.items() if share] == list(range(2, 1626))
    assert all(share < 2**32 and not wrong_rows(patch, share) for patch, share in shares.items() if share)
    assert wrong_rows(1649, -(-(2**32) // 1649)) and wrong_rows(14, 2**32 // 14)


def test_rows_of_the_largest_patches_are_divided_by(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pyramid, sites = lod.mipmap(noise(3, 40, 60)), random_sites(1, 3)
    for read in (pyramid, pyramid.upload(backend="cuda")):
        with monkeypatch.context() as here:
            expected = lod.gather_patches(read, sites, 14, backend="cuda")
            here.setattr(samplers, "_share", lambda _: 0)
            assert torch.equal(lod.gather_patches(read, sites, 14, backend="cuda"), expected)


# -- what is not finite -----------------------------------------------------------------------------------------------


def beside_a_bad_row(value: float) -> torch.Tensor:
    """Samples of rows 3 to 6, halfway between columns, of a picture whose row 2 is `value`."""
    image = noise(1, 16, 16)
    image[:, 2] = value
    pyramid = lod.mipmap(image, levels=1)
    return lod.gather_patches(pyramid, [[8.5 / 16, 5.0 / 16, 0.0]], 4, backend="cuda")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_texels_that_weigh_nothing_are_not_read(emulated: EmulatedDevice, value: float) -> None:
    assert bool(beside_a_bad_row(value).isfinite().all())
    image = noise(2, 16, 16)
    image[0, 3, 5], image[1, 7, 7:9] = value, math.inf
    found = lod.foveate(image, (0.5, 0.5), 1e30, backend="cuda")
    assert torch.equal(found.nan_to_num(7.0), image.nan_to_num(7.0))
    emulated.changes = (("c.below = y.share != 0.0f ? width : 0;", "c.below = y.first + 1 < (int)height ? width : 0;"),)
    image[:, :] = torch.arange(16.0)[:, None]
    image[:, 5] = value
    found = lod.foveate(image, (0.5, 0.5), 1e30, backend="cuda")
    assert not bool(found[:, 4].isfinite().all()), "a texel that weighs nothing was read, and nobody saw it"


# -- what all samplers share ------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[..., torch.Tensor]] = {
    "log_polar": lambda src, at=(0.4, 0.6), **how: lod.log_polar(src, at, 8, 12, **how),
    "foveate": lambda src, at=(0.4, 0.6), **how: lod.foveate(src, at, 0.1, **how),
    "gather_patches": lambda src, at=(0.4, 0.6), **how: lod.gather_patches(
        src, torch.cat([torch.as_tensor(at), torch.tensor([0.7])])[None], 5, **how
    ),
}
each = pytest.mark.parametrize("name", SAMPLERS)


@each
def test_an_image_is_its_pyramid(emulated: EmulatedDevice, name: str) -> None:
    image = noise(2, 3, 50, 70)
    pyramid = lod.mipmap(image, backend="cuda")
    assert pyramid.generator == "cuda"
    assert torch.allclose(SAMPLERS[name](image, backend="cuda"), SAMPLERS[name](pyramid, backend="cuda"), atol=1e-6)


@each
def test_gradients_are_the_references(emulated: EmulatedDevice, name: str) -> None:
    image = noise(2, 3, 21, 30).requires_grad_()
    found, expected = (SAMPLERS[name](image, backend=backend) for backend in ("cuda", "torch"))
    y = torch.rand_like(found)
    assert torch.allclose(*(torch.autograd.grad(one, image, y)[0] for one in (found, expected)), atol=1e-5)


@each
def test_more_images_than_layers(emulated: EmulatedDevice, name: str) -> None:
    image = noise(7, 3, 20, 30)
    whole = SAMPLERS[name](lod.mipmap(image).upload(backend="cuda"), backend="cuda")
    emulated.texture_layers = 3
    found = SAMPLERS[name](lod.mipmap(image).upload(backend="cuda"), backend="cuda")
    assert [call[1].layers for call in emulated.named("make_texture")] == [7, 3, 3, 1]
    assert torch.equal(found, whole)


@each
def test_compiled_code_runs_the_kernels(emulated: EmulatedDevice, name: str) -> None:
    """Level 0 and all that a graph holds is a tensor, so the op runs the verb on the backend that was named."""
    torch._dynamo.reset()
    image = noise(2, 3, 21, 30)

    def whole(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pyramid = lod.mipmap(x, backend="cuda")
        return SAMPLERS[name](pyramid, backend="cuda"), pyramid[2]

    run = torch.compile(whole, fullgraph=True, backend="aot_eager")
    expected, count = whole(image), len(emulated.named("launch"))
    for one, two in zip(run(image), expected, strict=True):
        assert torch.equal(one, two)
    assert len(emulated.named("launch")) > count
    x = image.clone().requires_grad_()
    y = torch.rand_like(expected[0])
    (found,) = torch.autograd.grad(run(x)[0], x, y)
    x = image.clone().requires_grad_()
    assert torch.allclose(found, torch.autograd.grad(whole(x)[0], x, y)[0], atol=1e-6)


@pytest.mark.parametrize("verb", [lod.mipmap, lod.hiz], ids=["mipmap", "hiz"])
def test_opcheck(emulated: EmulatedDevice, verb: Any) -> None:
    operator = operators[verb.__name__]
    torch.library.opcheck(operator.op, tuple(operator.arguments(noise(2, 3, 13, 18), backend="cuda")))


# -- textures: made once, kept, taken again ---------------------------------------------------------------------------


@each
def test_a_pyramid_is_made_a_texture_once(emulated: EmulatedDevice, name: str) -> None:
    pyramid = lod.mipmap(noise(3, 24, 30), backend="cuda").upload(backend="cuda")
    for _ in range(3):
        SAMPLERS[name](pyramid, backend="cuda")
    assert len(emulated.named("make_texture")) == 1
    assert [call[1].name for call in emulated.named("launch")].count("fill") == 1


def test_textures_of_pyramids_that_died_are_taken_again(emulated: EmulatedDevice) -> None:
    """On whatever stream: after all work that was queued by then."""
    for stream in (7, 8):
        emulated.stream_now = stream
        pyramid = lod.mipmap(noise(3, 24, 30)).upload(backend="cuda")
        SAMPLERS["foveate"](pyramid, backend="cuda")
        del pyramid
        gc.collect()
    assert len(emulated.named("make_texture")) == 1
    # Only the second stream waits, before it fills the texture anew.
    names = [call[:1] + call[-1:] for call in emulated.named("mark", "wait")]
    assert names == [("mark", 8), ("wait", 8)]
    lod.mipmap(noise(3, 25, 30)).upload(backend="cuda")
    assert len(emulated.named("make_texture")) == 2


def test_idle_textures_beyond_the_limit_are_deleted_when_nothing_uses_them(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(textures, "MOST_IDLE_BYTES", 0)
    for side in (24, 25):
        lod.mipmap(noise(3, side, 30)).upload(backend="cuda")
        gc.collect()
    assert [call[0] for call in emulated.named("mark", "finish", "delete")] == ["mark", "finish", "delete"]


def test_a_second_stream_waits_until_the_texture_is_filled(emulated: EmulatedDevice) -> None:
    pyramid = lod.mipmap(noise(3, 24, 30)).upload(backend="cuda")
    SAMPLERS["log_polar"](pyramid, backend="cuda")
    assert not emulated.named("wait")
    emulated.stream_now = 9
    SAMPLERS["log_polar"](pyramid, backend="cuda")
    assert [call[2] for call in emulated.named("wait")] == [9]


def test_out_of_memory_gives_back_what_is_idle(emulated: EmulatedDevice) -> None:
    lod.mipmap(noise(3, 24, 30)).upload(backend="cuda")
    gc.collect()
    emulated.fail["make_texture"] = OutOfMemoryError("none left")
    lod.mipmap(noise(3, 99, 30)).upload(backend="cuda")
    assert len(emulated.named("delete")) == 1 and emulated.named("release_cache")


# -- capture ----------------------------------------------------------------------------------------------------------


@each
def test_capture(emulated: EmulatedDevice, name: str) -> None:
    """What was made before can be captured; nothing is made meanwhile, and no event is waited for. What is no texture
    needs none."""
    pyramid = lod.mipmap(noise(3, 24, 30), backend="cuda").upload(backend="cuda")
    expected = SAMPLERS[name](pyramid, backend="cuda")
    emulated.is_capturing, emulated.stream_now = True, 11
    emulated.calls.clear()
    assert torch.equal(SAMPLERS[name](pyramid, backend="cuda"), expected)
    for src in (pyramid[0], lod.mipmap(pyramid[0], backend="cuda")):
        assert torch.allclose(SAMPLERS[name](src, backend="cuda"), expected, atol=0.02)
    assert {call[0] for call in emulated.calls} == {"launch"}
    with pytest.raises(CaptureError, match="upload"):
        lod.mipmap(noise(3, 24, 30)).upload(backend="cuda")


def test_capture_of_texture_units_needs_a_texture(emulated: EmulatedDevice) -> None:
    image = noise(3, 24, 30)
    emulated.is_capturing = True
    with pytest.raises(CaptureError, match="upload"):
        lod.foveate(image, (0.5, 0.5), anisotropy=4.0, backend="cuda")


def test_capture_of_new_rings_is_refused(emulated: EmulatedDevice) -> None:
    pyramid = lod.mipmap(noise(3, 24, 30)).upload(backend="cuda")
    lod.log_polar(pyramid, (0.5, 0.5), 9, 13, backend="cuda")
    emulated.is_capturing = True
    with pytest.raises(CaptureError, match="same arguments"):
        lod.log_polar(pyramid, (0.5, 0.5), 9, 13, r_max=0.61, backend="cuda")


def test_capture_of_points_on_the_host_is_refused(emulated: EmulatedDevice) -> None:
    emulated.is_capturing = True
    with pytest.raises(CaptureError, match="on cpu"):
        samplers.placed(emulated, torch.rand(1, 2), torch.device("cuda:0"))


def test_tables_of_equal_maps_are_the_same(emulated: EmulatedDevice) -> None:
    """Whatever became of the object that laid them out."""
    pyramid = lod.mipmap(noise(3, 24, 30))
    kept = cached._constants._kept[torch.device("cpu")]
    for _ in range(2):
        lod.log_polar(pyramid, (0.5, 0.5), 9, 13, backend="cuda")
        sys.modules["gpu_lod.log_polar"]._make_rule.cache_clear()
    assert sorted(len(tensor) for tensor, _ in kept.values()) == [9, 13]
    lod.log_polar(pyramid, (0.5, 0.5), 9, 13, spacing="cortical", backend="cuda")
    assert sorted(len(tensor) for tensor, _ in kept.values()) == [9, 9, 13]


@each
def test_places_may_begin_at_any_float(emulated: EmulatedDevice, name: str) -> None:
    """As gaze[i, :2] of [N, 3] does, at four bytes past a multiple of eight."""
    gaze = torch.rand(4, 3)
    pyramid = lod.mipmap(noise(3, 24, 30))
    for one in gaze:
        found = SAMPLERS[name](pyramid, one[:2], backend="cuda")
        assert torch.equal(found, SAMPLERS[name](pyramid, one[:2].clone(), backend="cuda"))
    if name != "gather_patches":
        batch, points = lod.mipmap(noise(2, 3, 24, 30)), torch.rand(5)
        for first in (0, 1):
            fixations = points[first : first + 4].view(2, 2)
            found = SAMPLERS[name](batch, fixations, backend="cuda")
            assert torch.equal(found, SAMPLERS[name](batch, fixations.clone(), backend="cuda"))


def test_pinned_places_may_be_written_to_after_the_call(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read when the GPU comes to it, which for memory that is not pinned the call waits for."""
    pinned, plain = torch.rand(2, 2), torch.rand(2, 2)
    read: list[int] = []

    def inside(address: int) -> bool:
        return pinned.data_ptr() <= address < pinned.data_ptr() + pinned.nbytes

    class Elsewhere(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default:
                read.append(args[0].data_ptr())
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: inside(self.data_ptr()))
    with Elsewhere():
        for points in (pinned, pinned[1:].expand(2, 2), plain):
            assert samplers.placed(emulated, points, torch.device("meta")).is_meta
    assert len(read) == 3 and read[2] == plain.data_ptr()
    assert not any(map(inside, read))


@each
def test_images_may_begin_at_any_element(emulated: EmulatedDevice, name: str) -> None:
    for dtype in DTYPES:
        image = noise(3 * 32 * 32 + 1, 1, 1, dtype=dtype).flatten()[1:].view(3, 32, 32)
        found = SAMPLERS[name](image, backend="cuda")
        assert torch.equal(found, SAMPLERS[name](image.clone(), backend="cuda"))


# -- errors -----------------------------------------------------------------------------------------------------------


@each
def test_cpu_tensors_are_refused(name: str) -> None:
    for src in (noise(3, 24, 30), lod.mipmap(noise(3, 24, 30))):
        with pytest.raises(UnsupportedError, match=r"takes CUDA tensors.*\.to\('cuda'\)"):
            SAMPLERS[name](src, backend="cuda")
    for verb in (lod.mipmap, lod.hiz):
        with pytest.raises(UnsupportedError, match="takes CUDA tensors"):
            verb(noise(3, 24, 30), backend="cuda")
    with pytest.raises(UnsupportedError, match="takes CUDA tensors"):
        lod.mipmap(noise(3, 24, 30)).upload(backend="cuda")


OTHERS: dict[str, Callable[[Any], object]] = {
    "gaussian": lambda backend: lod.gaussian(noise(3, 8, 8), backend=backend),
    "laplacian": lambda backend: lod.laplacian(noise(3, 8, 8), backend=backend),
    "collapse": lambda backend: lod.collapse(lod.laplacian(noise(3, 8, 8)), backend=backend),
    "oriented_energy": lambda backend: lod.oriented_energy(noise(3, 8, 8), backend=backend),
    "feature_maps": lambda backend: lod.feature_maps(noise(3, 8, 8), backend=backend),
    "inverse_log_polar": lambda backend: lod.inverse_log_polar(noise(3, 8, 8), (0.5, 0.5), (8, 8), backend=backend),
    "cull": lambda backend: lod.cull(lod.hiz(noise(1, 8, 8)), 0.5, backend=backend),
    "region_max": lambda backend: lod.region_max(
        lod.hiz(noise(1, 8, 8)), torch.tensor([[0.0, 0.0, 1.0, 1.0]]), backend=backend
    ),
    "region_min": lambda backend: lod.region_min(
        lod.hiz(noise(1, 8, 8), "min"), torch.tensor([[0.0, 0.0, 1.0, 1.0]]), backend=backend
    ),
}


def test_every_verb_with_a_backend_is_here() -> None:
    taken = {"mipmap", "hiz", *SAMPLERS}
    assert {*OTHERS} | taken == {*operators} - {"cortical_sites"}


@pytest.mark.parametrize("name", OTHERS)
def test_other_verbs_say_which_have_kernels(emulated: EmulatedDevice, name: str) -> None:
    OTHERS[name]("torch")
    with pytest.raises(UnsupportedError, match="foveate, gather_patches, hiz, log_polar, mipmap have one"):
        OTHERS[name]("cuda")


def test_what_no_kernel_takes(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(3, 24, 30)
    with pytest.raises(UnsupportedError, match=r"is a GL one.*'cuda'"):
        lod.mipmap(image, generator="compute", backend="cuda")
    with pytest.raises(UnsupportedError, match=r"is a GL one.*'cuda'"):
        lod.log_polar(image, (0.5, 0.5), 4, 4, generator="compute", backend="cuda")
    for name, sample in SAMPLERS.items():
        with pytest.raises(UnsupportedError, match="the CUDA backend gives them in the image only"):
            sample(image, torch.tensor([0.4, 0.6], requires_grad=True), backend="cuda")
        with pytest.raises(InputError, match="max pyramid"):
            sample(lod.hiz(image), backend="cuda")
        with pytest.raises(UnsupportedError, match="CUDA backend knows reverse-mode"):
            torch.func.grad(lambda x, sample=sample: sample(x, backend="cuda").sum())(image)
        with pytest.raises(InputError, match=r"\[0, 1\]"):
            sample(image, (0.4, 1.6), backend="cuda")
        assert (
            lod.explain(
                getattr(lod, name),
                *{"log_polar": (image, (0.5, 0.5), 4, 4)}.get(
                    name, (image, (0.5, 0.5) if name == "foveate" else [[0.5, 0.5, 0.0]])
                ),
                backend="cuda",
            ).backend
            == "cuda"
        )
    with pytest.raises(InputError, match="5 channels"):
        lod.gather_patches(noise(5, 24, 30), [[0.5, 0.5, 0.0]], backend="cuda")
    for kind, pyramid in (("max", lod.hiz(image)), ("gaussian", lod.gaussian(image))):
        with pytest.raises(InputError, match=f"{kind} pyramid is no texture"):
            pyramid.upload(backend="cuda")
    with pytest.raises(InputError, match="'gl' or of 'cuda'"):
        lod.mipmap(image).upload(backend="torch")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave it out"):
        lod.mipmap(image).upload(lod.Context(), backend="cuda")
    emulated.texture_side = 29
    with pytest.raises(LimitError, match="textures end at 29"):
        lod.mipmap(image).upload(backend="cuda")
    assert lod.foveate(image, (0.5, 0.5), backend="cuda").shape == image.shape  # which takes none
    with pytest.raises(LimitError, match="524280 rows"):
        lod.foveate(torch.zeros(1, 524281, 1), (0.5, 0.5), backend="cuda")
    with pytest.raises(LimitError, match="rows of 8388608"):
        lod.foveate(lod.Pyramid((torch.zeros(1, 1, 2**23 + 1),)), (0.5, 0.5), backend="cuda")
    with pytest.raises(LimitError, match="2\\^31 - 1"):
        lod.log_polar(lod.mipmap(noise(1, 4, 4)), (0.5, 0.5), 2**16, 2**15, backend="cuda")


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA graphs as far as plans know them: a run that is captured, and repetitions that write where that one did."""
    done: list[str] = []

    def leaves(results: Any) -> list[torch.Tensor]:
        return [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]

    def captured(run: Callable[[], Any], where: torch.device) -> tuple[Callable[[], None], Any]:
        run()
        emulated.is_capturing = True
        try:
            results = run()
        finally:
            emulated.is_capturing = False
        done.append("captured")

        def replay() -> None:
            done.append("replayed")
            for old, new in zip(leaves(results), leaves(run()), strict=True):
                old.data.copy_(new)

        return replay, results

    monkeypatch.setattr(sys.modules["gpu_lod.plan"], "captured", captured)
    return done


@each
def test_a_plan_of_kernels_is_a_graph(graphs: list[str], name: str) -> None:
    pyramid = lod.mipmap(noise(3, 24, 30), backend="cuda").upload(backend="cuda")
    points = [torch.tensor([0.3, 0.6]), torch.tensor([0.7, 0.2]), torch.tensor([0.5, 0.5])]

    def sample(at: torch.Tensor) -> torch.Tensor:
        return SAMPLERS[name](pyramid, at, backend="cuda")

    planned = lod.plan(sample, points[0])
    assert planned.replays and "CUDA graph" in planned.reason and graphs == ["captured"]
    first = planned(points[1])
    assert torch.equal(first, sample(points[1]))
    assert planned(points[2]) is first and torch.equal(first, sample(points[2])) and graphs.count("replayed") == 2
    planned.inputs[0].copy_(points[0])
    assert torch.equal(planned(), sample(points[0]))
    with pytest.raises(InputError, match="planned for"):
        planned(torch.zeros(3))
    pyramid.levels[1].add_(1)
    with pytest.raises(PyramidChangedError, match="Plan again"):
        planned(points[1])


@each
def test_a_plan_from_an_image_is_a_graph(graphs: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chain and the sampler, of new pictures."""
    monkeypatch.setattr(checks, "on_host", lambda value: False)  # as if they were on a GPU

    def sample(image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return SAMPLERS[name](image, at, backend="cuda")

    planned = lod.plan(sample, noise(3, 24, 30), torch.tensor([0.3, 0.6]))
    assert planned.replays and graphs == ["captured"], planned.reason
    for _ in range(2):
        image, at = noise(3, 24, 30), torch.rand(2)
        assert torch.equal(planned(image, at), sample(image, at))


def test_a_plan_of_a_chain_of_kernels(graphs: list[str]) -> None:
    planned = lod.plan(lod.mipmap, noise(3, 24, 30), backend="cuda")
    assert planned.replays and graphs == ["captured"]
    for _ in range(3):
        image = noise(3, 24, 30)
        found = planned(image)
        assert all(map(torch.equal, found.levels, lod.mipmap(image, backend="cuda").levels))
        assert lod.foveate(found, (0.5, 0.5), backend="torch").shape == (3, 24, 30)  # a good pyramid still


def test_a_plan_of_what_cannot_be_captured_runs_it(graphs: list[str]) -> None:
    def sample(image: torch.Tensor) -> torch.Tensor:
        return lod.foveate(lod.mipmap(image, backend="cuda").upload(backend="cuda"), (0.5, 0.5), backend="cuda")

    planned, image = lod.plan(sample, noise(3, 24, 30)), noise(3, 24, 30)
    assert not planned.replays and "CaptureError" in planned.reason and graphs == []
    assert torch.equal(planned(image), sample(image))
