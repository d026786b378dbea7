"""The grid of level-0 patches, and saliency on it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from images import noise
from scripts import succeed

from gpu_lod import between_samples as between
from gpu_lod.patch_grid import Pool, pooled, starts_of
from gpu_lod.salient_cells import saliency_cells

cells_module = sys.modules["gpu_lod.salient_cells"]


@pytest.mark.parametrize(("n", "starts"), [(28, [0, 14]), (30, [0, 14, 16]), (14, [0]), (5, [0])])
def test_convention_patches_at_the_edge_shift_inward(n: int, starts: list[int]) -> None:
    assert starts_of(n, 14) == starts
    row = torch.arange(n, dtype=torch.float32)[None, None]
    expected = [row[0, 0, start : start + 14].mean().item() for start in starts]
    assert pooled(row, 14)[0, 0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize("shape", [(2, 3, 33, 47), (1, 5, 9), (1, 28, 14), (1, 29, 13)], ids=str)
def test_every_patch_is_pooled_by_itself(shape: tuple[int, ...], pool: Pool) -> None:
    values = torch.rand(shape, dtype=torch.float64) - 0.5
    height, width = shape[-2:]
    one: Callable[[torch.Tensor], torch.Tensor] = (
        (lambda x: x.amax((-2, -1))) if pool == "max" else (lambda x: x.mean((-2, -1)))
    )
    rows = [
        torch.stack([one(values[..., y : y + 14, x : x + 14]) for x in starts_of(width, 14)], -1)
        for y in starts_of(height, 14)
    ]
    torch.testing.assert_close(pooled(values, 14, pool), torch.stack(rows, -2), rtol=1e-12, atol=0)


def the_map(images: torch.Tensor) -> torch.Tensor:
    """Channel 5 in float64."""
    values = images.double() / 255 if images.dtype == torch.uint8 else images.double()
    reference = sys.modules["gpu_lod.feature_maps"].reference
    channels: torch.Tensor = reference(values, torch.full((1, 2), 0.5, dtype=torch.float64))
    return channels[:, 5]


def by_the_map(images: torch.Tensor, patch: int, pool: Pool) -> torch.Tensor:
    return pooled(the_map(images), patch, pool)


SHAPES = (
    (1, 3, 64, 64), (2, 3, 65, 77), (1, 1, 33, 101), (3, 4, 17, 260), (1, 2, 8, 500), (1, 3, 500, 9), (1, 3, 7, 300),
    (1, 1, 1, 1), (40, 3, 32, 30),
)  # fmt: skip


@pytest.mark.parametrize("band", [1, 2**12, 2**18])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_saliency_of_cells_is_that_of_the_map(dtype: torch.dtype, band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "_BAND", band)
    monkeypatch.setattr(cells_module, "_POOLED", band)
    monkeypatch.setattr(cells_module, "_AT_ONCE", 4 * band)
    monkeypatch.setattr(between, "_SMALL", 0 if band == 2**12 else 128)
    for shape in SHAPES:
        image = noise(*shape, dtype=dtype)
        whole = the_map(image)
        for patch in (1, 7, 14, 16, 2000):
            for pool in ("mean", "max"):
                found, expected = saliency_cells(image, patch, pool), pooled(whole, patch, pool)
                assert found.dtype == torch.float32
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6, msg=f"{shape}, {patch}, {pool}")


@pytest.mark.parametrize("limit", [0, 128, 1000])
def test_levels_are_read_between_their_samples(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "_SMALL", limit)
    for height, width in ((1, 5), (4, 8), (33, 16), (21, 40)):
        samples = noise(3, height, width)
        for factor in (2, 4):
            found = samples.new_empty(3, 4 * height // 16 * 16 + 16, (width + 8) // 8 * 8 * factor)
            between.spread(samples, factor, found)
            expected = samples.double()
            for dim, n in ((1, height), (2, width)):
                at = torch.arange(found.shape[dim]) / factor
                share = (at % 1).double().view(-1, *[1] * (2 - dim))
                low, high = (expected.index_select(dim, (at.long() + k).clamp(max=n - 1)) for k in (0, 1))
                expected = torch.lerp(low, high, share)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
            turned = torch.empty_like(found)
            between.spread(samples, factor, turned, signs=True)
            assert torch.equal(turned[:, ::2], found[:, ::2]) and torch.equal(turned[:, 1::2], -found[:, 1::2])


@pytest.mark.parametrize("kernels", ["", "AVX2", "SSE4_2"])
def test_saliency_of_cells_depends_on_no_other_image_and_no_place(kernels: str) -> None:
    """To the bit, whatever kernels MKL takes for products: sites must not, and equal cells are taken in their order."""
    succeed(
        """
        import torch
        from gpu_lod.salient_cells import saliency_cells

        for size in ((65, 77), (64, 64), (150, 203), (224, 224), (301, 517), (640, 96)):
            images = torch.rand(5, 3, *size)
            for patch in (14, 16):
                for count in (2, 3, 5):
                    together = saliency_cells(images[:count], patch)
                    for image, cells in zip(images, together):
                        assert torch.equal(saliency_cells(image[None].clone(), patch)[0], cells), (size, patch, count)
                for value in (0.1, 0.37, 0.5911534, 0.9690406):
                    flat = saliency_cells(torch.full((1, 3, *size), value), patch)
                    assert len(flat.unique()) == 1, (size, patch, value)
        """,
        MKL_ENABLE_INSTRUCTIONS=kernels,
    )


def test_saliency_of_cells_is_fp32_where_products_are_not() -> None:
    image = noise(1, 3, 64, 80)
    expected = by_the_map(image, 16, "mean")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(saliency_cells(image, 16).double(), expected, rtol=0, atol=1e-6)
    torch.set_float32_matmul_precision("medium")
    try:
        torch.testing.assert_close(saliency_cells(image, 16).double(), expected, rtol=0, atol=1e-6)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_saliency_of_cells_passes_gradients() -> None:
    image = noise(1, 3, 64, 64).double().requires_grad_()
    for source in (image, image.float()):
        (grad,) = torch.autograd.grad(saliency_cells(source, 16).square().sum(), image)
        assert bool((grad != 0).any())
    plain, asked = image.detach().float(), image.float()
    assert torch.equal(saliency_cells(plain, 16), saliency_cells(asked, 16))  # to the bit, or sites would differ
    vmapped = torch.func.vmap(lambda x: saliency_cells(x, 16))(image.detach()[None].float())
    torch.testing.assert_close(vmapped[0], saliency_cells(image.detach().float(), 16), rtol=0, atol=1e-6)


def test_what_is_not_finite_stays_so() -> None:
    """Allocators refuse it."""
    for bad in (float("nan"), float("inf")):
        image = noise(1, 3, 64, 64)
        image[0, 1, 40, 20] = bad
        assert not bool(torch.isfinite(saliency_cells(image, 16)).all())


@pytest.mark.parametrize("side", [14, 16])
@pytest.mark.parametrize("width", [118, 111, 360])
def test_patches_of_the_same_values_have_the_same_mean(side: int, width: int) -> None:
    """Wherever they are: else an even map would have peaks."""
    for value in (0.1, 0.5911534, 0.9690406):
        found = pooled(torch.full((1, 130, width), value), side)
        assert len(found.unique()) == 1 and float(found.mean()) == pytest.approx(value, rel=1e-6)
