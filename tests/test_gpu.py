"""The bridge on a real GPU: shaders and torch on one memory. `make gpu-check` runs these."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from compare import HARDWARE_WEIGHT_ERROR, assert_matches, energies_match
from images import DTYPES, SIZES, grey_levels, noise
from oracle import extreme_chain, gaussian_chain, laplacian_chain, mean_chain, oriented_energy
from oracle import foveate as foveate_oracle
from oracle import gather_patches as patch_oracle
from oracle import inverse_log_polar as inverse_oracle
from oracle import log_polar as polar_oracle
from scripts import HERE, succeed
from test_feature_maps import check as check_features
from test_feature_maps import truth as feature_oracle
from test_memory_chain import SAMPLERS, SHAPES, bound, oracle

import gpu_lod as lod
from gpu_lod import errors, subgroups
from gpu_lod.bridge.devices import gpu
from gpu_lod.bridge.interop import InteropBridge
from gpu_lod.memory_chain import LevelsInMemory

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"
__all__ = ["bound"]
"""Fixtures of another module."""


@pytest.fixture(scope="module")
def gl() -> Iterator[lod.Context]:
    yield lod.Context(CUDA)


def bridge_of(context: lod.Context) -> InteropBridge:
    assert context.interop is not None
    return context.interop


def on_host(levels: Any) -> list[torch.Tensor]:
    return [level.cpu() for level in levels]


def resident(context: lod.Context, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in GL memory."""
    result = context.empty(tensor.shape, dtype=tensor.dtype)
    result.copy_(tensor)
    return result


# -- the right device -----------------------------------------------------------------------------------------------


def test_the_context_is_hardware_on_torchs_gpu(gl: lod.Context) -> None:
    assert not gl.software
    assert gl.tensor_device == torch.device(CUDA)
    device, wanted = gl.device, gpu(0)
    assert device is not None
    if device.pci is not None and wanted.pci is not None:
        assert device.pci[:-2] == wanted.pci[:-2]
    with gl.active(device=torch.device(CUDA)):
        bridge_of(gl).driver.check_same_gpu(gl.renderer)


def test_a_permuted_mask_is_no_trouble() -> None:
    """Every GPU alone, and all of them backwards, each in a process of its own."""
    count = torch.cuda.device_count()
    # Where there is one, both are the same.
    for mask in dict.fromkeys([*(str(i) for i in range(count)), ",".join(map(str, reversed(range(count))))]):
        succeed(
            """
            import torch, gpu_lod as lod
            for i in range(torch.cuda.device_count()):
                x = torch.rand(1, 8, 8, device=f"cuda:{i}")
                level = lod.mipmap(x, backend="gl")[3]
                assert level.device == x.device
                assert torch.allclose(level, x.mean((1, 2), keepdim=True), atol=1e-6)
            """,
            CUDA_VISIBLE_DEVICES=mask,
        )


# -- every verb against the float64 oracle ---------------------------------------------------------------------------


@functools.cache
def pictures(dtype: torch.dtype) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Of every size, with their mean chains, which take longer than the shaders."""
    images = [noise(2, 3, height, width, dtype=dtype) for height, width in [*SIZES, (1001, 777)]]
    return [(image, mean_chain(image)) for image in images]


@pytest.mark.parametrize("in_gl", [False, True], ids=["ordinary", "in GL memory"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("generator", ["compute", "registers", "single-pass", "fragment"])
def test_mean_chains(gl: lod.Context, generator: Any, dtype: torch.dtype, in_gl: bool) -> None:
    for picture, chain in pictures(dtype):
        image = picture.to(CUDA)
        source = resident(gl, image) if in_gl else image
        pyramid = lod.mipmap(source, generator=generator)
        for level, truth in zip(on_host(pyramid), chain, strict=True):
            assert_matches(level, truth, "box", where="{} x {}".format(*image.shape[-2:]))
        assert torch.equal(source, image)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("generator", ["compute", "registers", "single-pass", "fragment", "sampler"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_hiz(gl: lod.Context, generator: Any, dtype: torch.dtype, reduce: Any) -> None:
    for height, width in SIZES:
        image = noise(2, 5, height, width, dtype=dtype).to(CUDA)
        pyramid = lod.hiz(image, reduce=reduce, generator=generator)
        for level, truth in zip(on_host(pyramid), extreme_chain(image.cpu(), reduce), strict=True):
            assert_matches(level, truth, "exact", where=f"{height} x {width}")


def test_single_pass_is_single_pass_at_any_size(gl: lod.Context) -> None:
    """Many workgroups race for the last place: large batches and pictures, again and again."""
    for shape in ((1, 3, 4096, 4096), (64, 3, 224, 224), (1, 1, 5001, 7777), (1, 4, 1080, 1920)):
        image = torch.rand(shape, device=CUDA)
        expected = lod.mipmap(image, generator="compute")
        for _ in range(10):
            for actual, level in zip(lod.mipmap(image, generator="single-pass"), expected, strict=True):
                assert torch.allclose(actual, level, rtol=0, atol=2e-6)
        for actual, level in zip(lod.hiz(image, generator="single-pass"), lod.hiz(image, backend="torch"), strict=True):
            assert torch.equal(actual, level)


def test_subgroups_change_no_bit(gl: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that invocations hand to one another, and the same through shared memory."""
    with gl.active():
        # A device that says it has them and fails the first try would go on without, and nobody would know.
        assert subgroups.usable(gl) is (subgroups.LEAST <= gl.limits.subgroup <= subgroups.MOST), gl.limits
    shapes = ((2, 3, 4096, 4096), (8, 3, 224, 224), (1, 4, 1080, 1920), (2, 3, 1024, 1024), (2, 3, 2048, 2048))
    images = [torch.rand(shape, device=CUDA) for shape in shapes]
    images += [(255 * images[0]).to(torch.uint8), images[0].half()]

    def chains() -> list[torch.Tensor]:
        return [
            level
            for image in images
            for reduce in ("mean", "max")
            for level in lod.mipmap(image, reduce=reduce, generator="single-pass")  # type: ignore[arg-type]
        ]

    found = chains()
    assert gl.limits.lanes is not False, "a shader with them was refused"
    monkeypatch.setattr(gl, "tuning", dataclasses.replace(gl.tuning, subgroups=False))
    for actual, expected in zip(found, chains(), strict=True):
        assert torch.equal(actual, expected)


def test_interleaved_frames_are_converted_on_the_way(gl: lod.Context) -> None:
    frame = gl.empty(2, 301, 200, 3, dtype=torch.uint8)
    frame.copy_(noise(2, 301, 200, 3, dtype=torch.uint8))
    how: dict[str, Any] = {"mean": [0.5, 0.4, 0.3], "std": [0.25] * 3, "dtype": torch.float16}
    image = frame.permute(0, 3, 1, 2)
    found = lod.mipmap(image, generator="single-pass", **how)
    for actual, expected in zip(found, lod.mipmap(image.cpu(), backend="torch", **how), strict=True):
        assert (actual.cpu().float() - expected.float()).abs().max() < 4e-3


def test_bilinear_fetches(gl: lod.Context) -> None:
    for dtype in (torch.uint8, torch.float16, torch.float32):
        image = noise(2, 3, 128, 64, dtype=dtype).to(CUDA)
        found = on_host(lod.mipmap(image, generator="single-pass-texture"))
        for level, truth in zip(found, mean_chain(image.cpu()), strict=True):
            slack = HARDWARE_WEIGHT_ERROR * (255 if dtype == torch.uint8 else 1)
            assert_matches(level, truth, "trilinear", slack=slack)


def test_plans_repeat_what_verbs_do(gl: lod.Context) -> None:
    def retina(image: torch.Tensor, fixation: torch.Tensor) -> torch.Tensor:
        pyramid = lod.mipmap(image, backend="gl").upload()
        return lod.log_polar(pyramid, fixation, 16, 32, backend="gl")

    planned = lod.plan(retina, torch.rand(2, 3, 150, 100, device=CUDA), torch.rand(2, 2))
    assert planned.replays, planned.reason
    for _ in range(20):
        image, fixation = torch.rand(2, 3, 150, 100, device=CUDA), torch.rand(2, 2)
        assert torch.equal(planned(image, fixation), retina(image, fixation))


@pytest.mark.parametrize("held", [True, False])
def test_a_plan_works_where_the_pyramid_is(gl: lod.Context, held: bool) -> None:
    """The fixation is on the host, and the only tensor that it is passed."""
    pyramid = lod.mipmap(torch.rand(2, 3, 64, 64, device=CUDA), backend="gl").upload()

    def look(levels: lod.Pyramid | None, fixation: torch.Tensor) -> torch.Tensor:
        return lod.log_polar(levels or pyramid, fixation, 16, 32, backend="gl")

    planned = lod.plan(look, pyramid if held else None, torch.rand(2, 2))
    assert planned.replays, planned.reason
    for _ in range(20):
        fixation = torch.rand(2, 2)
        found = planned(fixation)
        assert found.device == torch.device(CUDA) and torch.equal(found, look(pyramid, fixation))


def test_a_plan_of_tensors_of_two_devices_calls_its_function(gl: lod.Context) -> None:
    def both(image: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return lod.mipmap(image, backend="gl")[1], lod.mipmap(other, backend="gl")[1]

    images = torch.rand(1, 3, 40, 40, device=CUDA), torch.rand(1, 3, 50, 40)
    planned = lod.plan(both, *images)
    assert not planned.replays and "CUDA" in planned.reason
    for found, expected in zip(planned(*images), both(*images), strict=True):
        assert found.device == expected.device and torch.equal(found, expected)


def test_a_plan_computes_with_nothing_that_is_opengls(gl: lod.Context) -> None:
    """Indices that are none would cost the process its device."""
    table = torch.arange(256.0, device=CUDA)

    def function(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        level = lod.mipmap(image, backend="gl")[1]
        return table[(255 * level).long()], lod.mipmap(image, backend="gl")[2]

    planned = lod.plan(function, torch.rand(1, 64, 64, device=CUDA))
    assert not planned.replays and "torch computes" in planned.reason, planned.reason
    image = torch.rand(1, 64, 64, device=CUDA)
    for found, expected in zip(planned(image), function(image), strict=True):
        assert torch.equal(found, expected)


def test_a_verb_in_a_plan_reads_what_the_one_before_it_wrote(gl: lod.Context) -> None:
    """Nothing but barriers stands between them."""

    def there_and_back(image: torch.Tensor, fixation: torch.Tensor) -> torch.Tensor:
        polar = lod.log_polar(lod.mipmap(image, backend="gl").upload(), fixation, 512, 1024, backend="gl")
        return lod.inverse_log_polar(polar, fixation, (1024, 1024), backend="gl")

    planned = lod.plan(there_and_back, torch.rand(2, 3, 1024, 1024, device=CUDA), torch.rand(2, 2))
    assert planned.replays, planned.reason
    for _ in range(20):
        image, fixation = torch.rand(2, 3, 1024, 1024, device=CUDA), torch.rand(2, 2)
        assert torch.equal(planned(image, fixation), there_and_back(image, fixation))


def test_levels_are_blended_in_proportion(gl: lod.Context) -> None:
    levels, sites, expected = grey_levels(CUDA)
    found = lod.gather_patches(lod.Pyramid(levels), sites, 1, backend="gl").flatten().cpu()
    assert float((found - expected).abs().max()) <= HARDWARE_WEIGHT_ERROR, found.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("generator", ["compute", "fragment"])
@pytest.mark.parametrize("border", ["clamp", "zero"])
def test_log_polar(gl: lod.Context, generator: Any, dtype: torch.dtype, border: Any) -> None:
    pyramid = lod.mipmap(noise(3, 3, 97, 140, dtype=dtype).to(CUDA), backend="torch")
    fixation = torch.rand(3, 2)
    found = lod.log_polar(pyramid, fixation, 17, 40, border=border, generator=generator)
    truth, texels, blend = polar_oracle(on_host(pyramid), fixation, 17, 40, border=border)
    slack = 2 * HARDWARE_WEIGHT_ERROR * texels + HARDWARE_WEIGHT_ERROR * blend
    assert found.device == torch.device(CUDA)
    assert_matches(found.cpu(), truth, "trilinear", slack=slack)
    again = lod.log_polar(pyramid, fixation.to(CUDA), 17, 40, border=border, generator=generator)
    assert torch.equal(again, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_foveate(gl: lod.Context, dtype: torch.dtype) -> None:
    pyramid = lod.mipmap(noise(3, 3, 97, 140, dtype=dtype).to(CUDA), backend="torch")
    fixation = torch.rand(3, 2)
    found = lod.foveate(pyramid, fixation, backend="gl")
    truth, texels, blend = foveate_oracle(on_host(pyramid), fixation)
    assert found.device == torch.device(CUDA)
    slack = 2 * HARDWARE_WEIGHT_ERROR * texels + HARDWARE_WEIGHT_ERROR * blend
    assert_matches(found.cpu(), truth, "trilinear", slack=slack)


def test_anisotropy_by_texture_units(gl: lod.Context) -> None:
    """They filter in their own way: stripes along the radius stay, those across it go, and smooth pictures are as
    blurred as by torch's samples."""
    side, middle = 256, (0.5, 0.5)
    along = (torch.arange(side, device=CUDA) // 2 % 2).float()[:, None].expand(1, side, side).contiguous()
    place = slice(120, 136), slice(200, 216)  # right of the fixation, where the radius lies along x
    contrast = {
        (name, a): float(lod.foveate(image, middle, 0.1, anisotropy=a, backend="gl")[0][place].std())
        for name, image in (("along", along), ("across", along.transpose(1, 2).contiguous()))
        for a in (1.0, 16.0)
    }
    assert contrast["along", 16.0] > 2 * contrast["along", 1.0]
    assert contrast["along", 16.0] > 2 * contrast["across", 16.0]
    waves = torch.linspace(0, 12, side, device=CUDA).sin()
    smooth = (waves[:, None] * waves + 1).expand(3, side, side).contiguous() / 2
    for a in (2.0, 5.5, 16.0):
        found, expected = (lod.foveate(smooth, middle, 0.1, anisotropy=a, backend=way) for way in ("gl", "torch"))
        assert float((found - expected).abs().max()) < 0.03, a  # without anisotropy it is up to 0.06
        flat = lod.foveate(torch.full_like(smooth, 0.75), middle, 0.1, anisotropy=a, backend="gl")
        assert float((flat - 0.75).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_of_images(gl: lod.Context, name: str, dtype: torch.dtype, bound: list[LevelsInMemory]) -> None:
    """Their chains are read in memory, by weights of fp32."""
    for shape in SHAPES:
        image = noise(*shape, dtype=dtype).to(CUDA)
        points = torch.rand(shape[0] if len(shape) == 4 else 1, 2)
        found = SAMPLERS[name](image, points, "gl")
        assert bound and found.device == torch.device(CUDA), shape
        chain = [level.double() for level in on_host(lod.mipmap(image, backend="gl"))]
        assert_matches(found.cpu(), oracle(name, chain, points, image.cpu()), "trilinear", where=str(shape))
        bound.clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("border", ["clamp", "zero"])
def test_gather_patches(gl: lod.Context, dtype: torch.dtype, border: Any) -> None:
    image = noise(3, 3, 96, 144, dtype=dtype).to(CUDA)
    pyramid = lod.mipmap(image, backend="torch")
    sites = torch.rand(3, 20, 3) * torch.tensor([0.5, 0.5, 2.0]) + torch.tensor([0.25, 0.25, 0.0])
    found = lod.gather_patches(pyramid, sites.to(CUDA), 14, border=border, backend="gl")
    truth, texels, blend = patch_oracle(on_host(pyramid), sites, 14, border)
    assert found.device == torch.device(CUDA)
    slack = 2 * (HARDWARE_WEIGHT_ERROR + max(pyramid.size) * 2.0**-21) * texels + HARDWARE_WEIGHT_ERROR * blend
    if border == "clamp":
        assert_matches(found.cpu(), truth, "trilinear", slack=slack)
    grid = torch.tensor([[(7 + 14 * i) / 144, (7 + 14 * (i % 6)) / 96, 0.0] for i in range(10)])
    exact = lod.gather_patches(image, grid, 14, border=border, backend="gl")
    for i in range(10):
        y, x = 14 * (i % 6), 14 * i
        assert torch.equal(exact[:, i], image[:, :, y : y + 14, x : x + 14])
    for into in (torch.float16, torch.bfloat16, torch.float32):
        one, two = (
            lod.gather_patches(image, grid, 14, mean=(0.4,) * 3, std=(0.3,) * 3, dtype=into, backend=backend)
            for backend in ("gl", "torch")
        )
        assert one.dtype == into and torch.allclose(one.float(), two.float(), atol=3e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features(gl: lod.Context, dtype: torch.dtype) -> None:
    for height, width in [(1, 1), (2, 5), (37, 53), (64, 96)]:
        image, size = noise(2, 3, height, width, dtype=dtype), f"{height} x {width}"
        found = on_host(lod.oriented_energy(image.to(CUDA), backend="gl"))
        energies_match(found, oriented_energy(image), size, 255.0**2 if dtype == torch.uint8 else 1.0)
        before, semantic = image.flip(0), noise(2, 16, height, width)
        expected = feature_oracle(image, (0.4, 0.6), before, semantic)
        given = before.to(CUDA), semantic.to(CUDA)
        for into in (torch.float32, torch.float16):
            maps = lod.feature_maps(image.to(CUDA), (0.4, 0.6), *given, into, backend="gl")
            assert maps.device == torch.device(CUDA) and maps.dtype == into
            check_features(maps.cpu(), expected, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_burt_pyramids_and_the_inverse(gl: lod.Context, dtype: torch.dtype) -> None:
    unit = 255.0 if dtype == torch.uint8 else 1.0
    for height, width in [(1, 1), (2, 5), (37, 53), (101, 77)]:
        image, size = noise(2, 3, height, width, dtype=dtype), f"{height} x {width}"
        levels, bands = (verb(image.to(CUDA), backend="gl") for verb in (lod.gaussian, lod.laplacian))
        for level, truth in zip(on_host(levels), gaussian_chain(image), strict=True):
            assert_matches(level, truth, "binomial", where=size)
        for band, truth in zip(on_host(bands), laplacian_chain(image), strict=True):
            assert_matches(band / unit, truth / unit, "binomial", where=f"bands of {size}")
        back = lod.collapse(bands, "gl").cpu()
        worst = {torch.float32: 1e-6, torch.uint8: 255e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        assert float((back.double() - image.double()).abs().max()) <= worst
    polar, fixation = noise(2, 3, 24, 40, dtype=dtype), torch.rand(2, 2)
    found = lod.inverse_log_polar(polar.to(CUDA), fixation, (37, 53), border="clamp", backend="gl")
    truth, spread = inverse_oracle(polar, fixation, (37, 53), border="clamp")
    assert_matches(found.cpu(), truth, "trilinear", slack=2 * HARDWARE_WEIGHT_ERROR * spread)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cull_and_region(gl: lod.Context, dtype: torch.dtype) -> None:
    hz = lod.hiz(noise(2, 2, 61, 90, dtype=dtype).to(CUDA), backend="gl")
    threshold = 200 if dtype == torch.uint8 else 0.75
    found, expected = lod.cull(hz, threshold, backend="gl"), lod.cull(hz, threshold, backend="torch")
    assert torch.equal(found.mask, expected.mask) and torch.equal(found.indices, expected.indices)
    assert torch.equal(found.pruned, expected.pruned) and found.tested == expected.tested
    assert found.mask.device == found.pruned.device == torch.device(CUDA)
    corner = torch.rand(2, 50, 2)
    boxes = torch.cat([corner, (corner + torch.rand(2, 50, 2)).clamp(max=1)], dim=-1).to(CUDA)
    assert torch.equal(lod.region_max(hz, boxes, backend="gl"), lod.region_max(hz, boxes, backend="torch"))


def test_cull_clears_nothing_that_is_still_read(gl: lod.Context) -> None:
    """Its buffers are those of tensors that died, which work that is queued may read yet."""
    hz = lod.hiz(torch.rand(1, 1024, 1024, device=CUDA), backend="gl")
    lod.cull(hz, 0.5, backend="gl")  # makes all that is made once
    for _ in range(10):
        lent = gl.empty(1024, 1024, dtype=torch.uint8, device=CUDA).fill_(1)
        torch.cuda._sleep(20_000_000)  # about ten milliseconds
        copy = lent.clone()
        del lent
        lod.cull(hz, 0.5, backend="gl")
        assert bool((copy == 1).all())


def test_strides_views_and_inference(gl: lod.Context) -> None:
    image = torch.rand(2, 70, 50, 3, device=CUDA).permute(0, 3, 1, 2)
    for view in (image, image[:, :, 5:, 3:], image[..., ::2], image.half(), image[1]):
        for one, two in zip(lod.mipmap(view, backend="gl"), lod.mipmap(view, backend="torch"), strict=True):
            assert torch.allclose(one.float(), two.float(), atol=2e-3)
    with torch.inference_mode():
        assert torch.allclose(lod.mipmap(image, backend="gl")[6], image.mean((2, 3), keepdim=True), atol=1e-5)


# -- one memory ------------------------------------------------------------------------------------------------------


def test_results_are_the_mapped_buffers(gl: lod.Context) -> None:
    image = resident(gl, torch.rand(3, 64, 64, device=CUDA))
    pyramid = lod.mipmap(image, backend="gl")
    assert pyramid[0].data_ptr() == image.data_ptr()
    bridge = bridge_of(gl)
    with gl.active(device=torch.device(CUDA)):
        for level in pyramid:
            found = bridge.find(level)
            assert found is not None
            address, _ = bridge.driver.address(found[0].handle)
            assert level.data_ptr() == address + found[1]
    assert bridge.find(torch.rand(4, device=CUDA)) is None


def test_nothing_is_copied_on_the_way_out(gl: lod.Context) -> None:
    image = resident(gl, torch.rand(3, 512, 512, device=CUDA))
    lod.mipmap(image, backend="gl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's own
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            control = image.clone()
            lod.mipmap(image, backend="gl")
            torch.cuda.synchronize()
    copies = [event for event in seen.key_averages() if event.key.startswith("Memcpy")]  # on the device, not the call
    assert sum(event.count for event in copies) == 1, "only the control's"
    assert torch.equal(control, image)


def test_a_moved_buffer_is_an_error_and_its_tensors_are_poisoned(gl: lod.Context) -> None:
    """As if it had been elsewhere before, in a process of its own."""
    succeed(
        """
        import torch, gpu_lod as lod
        from gpu_lod import errors
        ctx = lod.Context("cuda")
        image = ctx.empty(1, 16, 16, device="cuda").fill_(1)
        alias, other = image[:, 2:], torch.ones(4, device="cuda")
        ctx.interop.find(image)[0].address += 256
        try:
            lod.mipmap(image, generator="compute")
        except errors.BufferMovedError as error:
            assert "another CUDA address" in str(error)
        else:
            raise SystemExit("it was not noticed")
        for use in (image.cpu, alias.sum, image.data_ptr, lambda: image + 1, lambda: lod.mipmap(image, backend="gl")):
            try:
                use()
            except (RuntimeError, errors.BufferMovedError) as error:
                assert "no longer valid" in str(error), error
            else:
                raise SystemExit(f"{use} took it")
        assert float(other.sum()) == 4
        del image, alias, use
        again = ctx.empty(1, 16, 16, device="cuda").fill_(2)
        assert float(lod.mipmap(again, generator="compute")[4]) == 2
        assert float(lod.mipmap(torch.full((1, 16, 16), 3.0, device="cuda"), backend="gl")[4]) == 3
        """
    )


def test_a_buffer_waits_for_the_stream_that_still_reads_it(gl: lod.Context) -> None:
    """The tensor dies while work that reads it is queued on a second stream; the next result must not overwrite it."""
    side = torch.cuda.Stream(CUDA)
    assert bridge_of(gl).driver.context_events, "or the host waits, and this proves nothing"
    for _ in range(20):
        level = lod.mipmap(torch.full((1, 512, 512), 1.0, device=CUDA), generator="compute")[1]
        side.wait_stream(torch.cuda.current_stream(CUDA))
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
            total = level.sum()
        del level
        for value in (2.0, 3.0):  # takes the same buffers from the pool
            lod.mipmap(torch.full((1, 512, 512), value, device=CUDA), generator="compute")
        torch.cuda.synchronize()
        assert float(total) == 256 * 256


def test_work_queued_before_a_verb_is_seen_by_it(gl: lod.Context) -> None:
    image = gl.empty(1, 512, 512)
    for value in range(10):
        torch.cuda._sleep(20_000_000)
        image.fill_(float(value))
        level = lod.mipmap(image, generator="compute")[9]
        assert float(level) == value


# -- threads, contexts, autograd ---------------------------------------------------------------------------------------


def test_two_contexts(gl: lod.Context) -> None:
    import moderngl

    from gpu_lod.bridge import egl

    here = egl.current()
    assert gl.device is not None
    other = moderngl.create_context(  # without `require` it asks for 3.3, and some drivers give no more
        require=430,
        standalone=True,
        backend="egl",
        libgl=egl.soname(),
        libegl=egl.soname(),
        device_index=gl.device.index,
    )
    mine = egl.current()
    try:
        adopted = lod.Context.adopt(other)
        with adopted:
            first = lod.mipmap(torch.full((1, 16, 16), 2.0, device=CUDA), backend="gl")
            assert adopted.owns(first[1]) and not gl.owns(first[1])
        with gl:
            second = lod.mipmap(torch.full((1, 16, 16), 3.0, device=CUDA), backend="gl")
            assert gl.owns(second[1]) and not adopted.owns(second[1])
        assert float(first[4]) == 2.0 and float(second[4]) == 3.0
        del first
        adopted.close()
    finally:
        egl.switch(mine, here)
    assert float(second[4]) == 3.0


def test_threads_and_pools(gl: lod.Context) -> None:
    def work(value: int) -> float:
        stream = torch.cuda.Stream(CUDA)
        with torch.cuda.stream(stream):
            image = torch.full((1, 64, 64), float(value), device=CUDA)
            return float(lod.mipmap(image, backend="gl")[6])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == [float(value) for value in range(200)]
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(work(7)))
    thread.start()
    thread.join()
    assert seen == [7.0]


def test_calls_from_the_backward_thread(gl: lod.Context) -> None:
    """autograd runs CUDA backward on a thread of its own."""
    threads: list[int] = []

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            return gradient * lod.mipmap(torch.full((1, 8, 8), 5.0, device=CUDA), backend="gl")[3]

    x = torch.ones(1, 1, 1, device=CUDA, requires_grad=True)
    Inside.apply(x).sum().backward()
    assert x.grad is not None and float(x.grad) == 5.0
    assert threads and threads[0] != threading.get_ident()


def test_gradients(gl: lod.Context) -> None:
    image = torch.rand(2, 3, 37, 53, device=CUDA)

    def gradient(backend: Any, loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = image.clone().requires_grad_()
        loss(lod.log_polar(lod.mipmap(x, backend=backend), (0.4, 0.6), 9, 14, backend=backend)).backward()
        assert x.grad is not None
        return x.grad

    found, expected = (gradient(backend, lambda polar: polar.square().sum()) for backend in ("gl", "torch"))
    # Twice a sample's error, of three weights between pixels in [0, 1], times what the sample takes of the pixel.
    taken = gradient("torch", torch.sum)
    assert ((found - expected).abs() <= 6 * HARDWARE_WEIGHT_ERROR * taken + 1e-5).all()


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_data_loader_workers(way: str) -> None:
    """CUDA does not survive a fork, and says so; spawned workers have contexts of their own."""
    out = succeed(
        f"""
        import torch, warnings, gpu_lod as lod
        from workers import Levels
        from torch.utils.data import DataLoader
        # Python 3.12 warns of forks beside threads, of which CUDA has some: as an error that would hide what CUDA says.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        if __name__ == "__main__":
            lod.mipmap(torch.rand(1, 8, 8, device="cuda"), backend="gl")
            loader = DataLoader(Levels("cuda"), num_workers=2, multiprocessing_context="{way}")
            try:
                print(sorted(float(value) for value in loader))
            except Exception as error:
                print(type(error).__name__, error)
        """,
        PYTHONPATH=HERE,
    )
    if way == "spawn":
        assert out.split("\n")[0] == "[0.0, 1.0, 2.0, 3.0]"
    else:
        assert "CUDA in forked subprocess" in out


# -- other libraries ---------------------------------------------------------------------------------------------------


def test_cupy_in_and_out(gl: lod.Context) -> None:
    import cupy

    array = cupy.asarray(np.random.default_rng(0).random((3, 40, 50), np.float32))
    pyramid = lod.mipmap(array, backend="gl")  # type: ignore[arg-type]
    out = lod.to_cupy(pyramid[1])
    assert out.data.ptr == pyramid[1].data_ptr()
    expected = cupy.asnumpy(out)
    del pyramid
    gc.collect()
    for _ in range(3):  # the array keeps the buffer
        lod.mipmap(torch.zeros(3, 40, 50, device=CUDA), backend="gl")
    assert np.array_equal(cupy.asnumpy(out), expected)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_capture_is_refused_and_harmless(gl: lod.Context) -> None:
    image = resident(gl, torch.ones(1, 16, 16, device=CUDA))
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device=CUDA)
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(errors.CaptureError):
            lod.mipmap(image, backend="gl")
    graph.replay()
    assert float(y.sum()) == 4.0
    assert float(lod.mipmap(image, backend="gl")[4]) == 1.0


def test_closing_leaves_tensors_valid() -> None:
    succeed(
        """
        import gc, torch, gpu_lod as lod
        context = lod.Context("cuda")
        level = lod.mipmap(torch.full((1, 64, 64), 4.0, device="cuda"), backend="gl")[2]
        context.close()
        assert float(level.sum()) == 4 * 256
        again = lod.mipmap(torch.full((1, 64, 64), 5.0, device="cuda"), backend="gl")[2]
        assert float(level.sum()) == 4 * 256 and float(again.sum()) == 5 * 256
        del level
        gc.collect()
        """
    )


def test_exit_with_tensors_alive_is_quiet() -> None:
    succeed(
        """
        import torch, gpu_lod as lod
        kept = lod.mipmap(torch.rand(1, 64, 64, device="cuda"), backend="gl")
        also = lod.Context("cuda").empty(100)
        """
    )


def test_host_tensors_in_the_same_context(gl: lod.Context) -> None:
    image = noise(3, 37, 53)
    for one, two in zip(lod.mipmap(image, backend="gl"), mean_chain(image), strict=True):
        assert_matches(one, two, "box")
    sites = torch.tensor([[0.4, 0.6, 0.0], [0.5, 0.5, 1.3]])
    for verb in (
        lambda how: lod.log_polar(image, (0.4, 0.6), 12, 20, backend=how),
        lambda how: lod.foveate(image, (0.4, 0.6), backend=how),
        lambda how: lod.gather_patches(image, sites, 8, backend=how),
    ):
        assert float((verb("gl") - verb("torch")).abs().max()) < 4 * HARDWARE_WEIGHT_ERROR
    on_cpu = gl.empty(3, 5, device="cpu")
    assert on_cpu.device.type == "cpu" and gl.owns(on_cpu)


def test_explain_says_what_auto_does(gl: lod.Context) -> None:
    choice = lod.explain(lod.mipmap, torch.rand(1, 8, 8, device=CUDA))
    assert choice.backend == "torch" and CUDA in choice.reason
