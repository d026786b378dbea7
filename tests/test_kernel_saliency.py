"""The saliency of patches by kernels, on the emulator, against plain torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cuda_emulator import ASCENDING, COMPILER, DESCENDING, SHUFFLED, EmulatedDevice
from images import DTYPES, noise

from gpu_lod.errors import LimitError
from gpu_lod.feature_channels import saliency_map
from gpu_lod.kernels import device, saliency
from gpu_lod.patch_grid import pooled
from gpu_lod.salient_cells import _of_map, saliency_cells

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def by_the_map(images: torch.Tensor, patch: int, pool: Any) -> torch.Tensor:
    unit = images.double() / (255 if images.dtype == torch.uint8 else 1)
    return pooled(saliency_map(unit)[:, None], patch, pool)[:, 0]


def made(emulated: EmulatedDevice) -> list[str]:
    return [call[1].name for call in emulated.named("launch")]


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cells(emulated: EmulatedDevice, dtype: torch.dtype, pool: Any) -> None:
    for shape, patch in (
        ((2, 3, 64, 96), 16), ((1, 3, 61, 47), 14), ((3, 1, 40, 33), 7), ((2, 4, 33, 70), 20), ((1, 2, 90, 19), 1),
        ((1, 3, 50, 21), 100), ((1, 3, 17, 1), 4), ((1, 1, 1, 40), 14), ((1, 3, 97, 80), 33), ((1, 1, 18, 530), 9),
        ((1, 1, 20, 700), 256), ((2, 1, 34, 600), 300), ((1, 3, 3, 64), 8), ((1, 1, 2, 64), 8),
    ):  # fmt: skip
        images = noise(*shape, dtype=dtype)
        emulated.calls.clear()
        found = saliency_cells(images, patch, pool)
        assert made(emulated) == 5 * ["binomial"] + ["salient"] and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), by_the_map(images, patch, pool), rtol=0, atol=2e-6)


@pytest.mark.parametrize("order", [DESCENDING, SHUFFLED], ids=["descending", "shuffled"])
def test_no_order_of_threads_matters(emulated: EmulatedDevice, order: int) -> None:
    images = noise(2, 3, 61, 47)
    expected = saliency_cells(images, 20)
    emulated.order, emulated.seed = order, 4
    assert torch.equal(saliency_cells(images, 20), expected)


MUTANTS = {
    "binomial": ("        }\n        __syncthreads();\n        float along", "        }\n        float along"),
    "salient": ("DIFFERENCES(2);\n                    __syncthreads();", "DIFFERENCES(2);"),
    "salient's sums": ("all[me] = found;\n            __syncthreads();", "all[me] = found;"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_barrier_is_seen(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    images = noise(2, 3, 61, 47)
    expected = saliency_cells(images, 20)
    launch = emulated.launch

    def broken(kernel: Any, *rest: Any) -> None:
        emulated.changes = (MUTANTS[name],) if name.startswith(kernel.name) else ()
        launch(kernel, *rest)

    monkeypatch.setattr(emulated, "launch", broken)
    found = []
    for emulated.order in (ASCENDING, DESCENDING):
        found.append(torch.equal(saliency_cells(images, 20), expected))
    assert not all(found)


def beside(images: torch.Tensor) -> torch.Tensor:
    """The same, one element off."""
    return torch.empty(images.numel() + 1, dtype=images.dtype)[1:].view(images.shape).copy_(images)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images_may_begin_at_any_element(emulated: EmulatedDevice, dtype: torch.dtype) -> None:
    images = noise(2, 3, 40, 64, dtype=dtype)
    torch.testing.assert_close(saliency_cells(beside(images), 8), saliency_cells(images, 8), rtol=0, atol=1e-6)


def test_elements_at_odd_places_are_not_read_in_fours(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = beside(noise(2, 3, 40, 64, dtype=torch.uint8))
    saliency_cells(images, 8)
    monkeypatch.setattr(saliency, "_fours", lambda *_: True)
    with pytest.raises(AssertionError, match="nothing of its type may begin"):
        saliency_cells(images, 8)


def test_more_rows_and_layers_than_a_grid_has(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    images = noise(3, 3, 32, 60)
    expected = saliency_cells(images, 7)
    monkeypatch.setattr(saliency, "MOST_ROWS", 2)
    assert torch.equal(saliency_cells(images, 7), expected)
    assert [call[2][1:] for call in emulated.named("launch")[-6:]] == [(2, 2), *[(1, 2)] * 4, (2, 2)]
    with pytest.raises(LimitError):
        saliency.cells(device.device_of(images), noise(1, 1, 33, 60), [], (1.0,), 7, most=False)


def test_large_values_and_what_is_not_finite(emulated: EmulatedDevice) -> None:
    images = noise(1, 3, 40, 40) * 1e30
    expected = by_the_map(images, 8, "mean")
    torch.testing.assert_close(saliency_cells(images, 8).double(), expected, rtol=0, atol=2e-6 * 1e30)
    for value in (math.nan, math.inf):
        images = noise(1, 3, 40, 40)
        images[0, 1, 20, 20] = value
        for pool in ("mean", "max"):
            assert not bool(torch.isfinite(saliency_cells(images, 8, pool)).all())  # type: ignore[arg-type]


def test_what_is_left_to_torch(emulated: EmulatedDevice) -> None:
    """Small pictures, whose pyramids end before level 5; and float64."""
    for images in (noise(1, 3, 16, 16), noise(1, 3, 40, 40).double()):
        found = saliency_cells(images, 8)
        torch.testing.assert_close(found.double(), by_the_map(images, 8, "mean"), rtol=0, atol=2e-6)
    assert not made(emulated)
    many = torch.zeros(1, 1, 1, 1).expand(2**11, 1, 2**10, 2**10)
    with pytest.raises(LimitError, match="patches of 1"):
        saliency.cells(device.device_of(many), many, [], (1.0,), 1, most=False)


def test_gradients_change_no_value(emulated: EmulatedDevice) -> None:
    images = noise(1, 3, 40, 40)
    asked = images.clone().requires_grad_()
    found = saliency_cells(asked, 8)
    assert made(emulated) and torch.equal(found, saliency_cells(images, 8))
    (gradient,) = torch.autograd.grad(found.square().sum(), asked)
    (expected,) = torch.autograd.grad(_of_map(asked, 8, "mean").square().sum(), asked)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)


def test_views_and_batches(emulated: EmulatedDevice) -> None:
    images = noise(3, 3, 80, 60)
    whole = saliency_cells(images.permute(0, 1, 3, 2), 14)
    for one, cells in zip(images, whole, strict=True):
        assert torch.equal(saliency_cells(one.permute(0, 2, 1)[None].contiguous(), 14)[0], cells)
