"""Oriented energy of patches by kernels, on the emulator, against plain torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cuda_emulator import COMPILER, DESCENDING, SHUFFLED, EmulatedDevice
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod.allocate.frequency_aware import energies
from gpu_lod.errors import LimitError
from gpu_lod.feature_channels import LUMA
from gpu_lod.gaussian import reference as gaussian_chain
from gpu_lod.kernels import device
from gpu_lod.kernels.energies import of_half
from gpu_lod.kernels.sources import ORIENTED, Kernel, texts
from gpu_lod.oriented_energy import reference
from gpu_lod.quadrature import FILTERS, SHARES, steering

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def made(images: torch.Tensor) -> torch.Tensor:
    unit = 1 / 255 if images.dtype == torch.uint8 else 1.0
    weights = [unit * weight for weight in (LUMA if images.shape[1] > 2 else (1.0,))]
    return of_half(device.device_of(images), images, weights, FILTERS, SHARES, steering(4))


def truth(images: torch.Tensor) -> torch.Tensor:
    unit = images.double() / (255 if images.dtype == torch.uint8 else 1)
    luma = sum(w * unit[:, i] for i, w in enumerate(LUMA)) if images.shape[1] > 2 else unit[:, 0]
    assert isinstance(luma, torch.Tensor)
    return reference(gaussian_chain(luma[:, None], 2)[1], 1)[0][:, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_energies(emulated: EmulatedDevice, dtype: torch.dtype) -> None:
    """Of sides about those of a tile, and below the filters'."""
    for shape in ((2, 3, 64, 128), (1, 4, 61, 47), (3, 1, 34, 67), (1, 2, 1, 90), (2, 3, 66, 1), (1, 3, 5, 6)):
        images = noise(*shape, dtype=dtype)
        found, expected = made(images), truth(images)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * max(float(expected.max()), 0.01))


def scene_of(images: torch.Tensor, patch: int) -> lod.allocate.Scene:
    cells = -(-images.shape[2] // patch), -(-images.shape[3] // patch)
    relevance = torch.ones(len(images), *cells)
    return lod.allocate.Scene((images.shape[2], images.shape[3]), patch, relevance, None, images, None, None)


def test_patches_take_two_launches(emulated: EmulatedDevice) -> None:
    """But for what is left to torch: a single pixel, and where gradients are asked for."""
    images = noise(2, 3, 48, 33)
    found = energies(scene_of(images, 8))
    assert [call[1].name for call in emulated.named("launch")] == ["binomial", "oriented"]
    assert [call[2] for call in emulated.named("launch")] == [(1, 3, 2), (1, 2, 2)], "as many blocks as there are tiles"
    emulated.calls.clear()
    plain = energies(scene_of(images.clone().requires_grad_(), 8)).detach()
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-7)
    assert energies(scene_of(noise(1, 3, 1, 1), 8)).shape == (1, 4, 1, 1)
    assert not emulated.named("launch")


@pytest.mark.parametrize("order", [DESCENDING, SHUFFLED], ids=["descending", "shuffled"])
def test_no_order_of_threads_matters(emulated: EmulatedDevice, order: int) -> None:
    images = noise(3, 3, 75, 80)
    expected = made(images)
    emulated.order, emulated.seed = order, 4
    assert torch.equal(made(images), expected)


@pytest.mark.parametrize("which", range(texts()["oriented.cu"].count("__syncthreads();")))
def test_every_barrier_is_needed(emulated: EmulatedDevice, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other where a block goes on to another layer."""
    monkeypatch.setattr("gpu_lod.kernels.energies.MOST_ROWS", 2)
    images = noise(3, 3, 30, 80)
    expected = made(images)
    torch.testing.assert_close(expected.double(), truth(images), rtol=0, atol=1e-5)
    before = texts()["oriented.cu"].split("__syncthreads();")[which][-60:]
    launch = emulated.launch

    def changed(kernel: Kernel, *more: Any) -> None:
        emulated.changes = ((before + "__syncthreads();", before),) if kernel == ORIENTED else ()
        launch(kernel, *more)

    monkeypatch.setattr(emulated, "launch", changed)
    orders = enumerate((0, DESCENDING, SHUFFLED, SHUFFLED))
    assert not all(torch.equal(made(images), expected) for emulated.seed, emulated.order in orders)


def test_what_is_not_finite_stays_so(emulated: EmulatedDevice) -> None:
    for value in (math.nan, math.inf):
        images = noise(1, 3, 40, 40)
        images[0, 1, 20, 20] = value
        assert not bool(torch.isfinite(made(images)).all())


def test_larger_images_than_a_launch_covers(emulated: EmulatedDevice) -> None:
    with pytest.raises(LimitError, match="images of 1 x 2000000"):
        made(torch.zeros(1, 1, 1, 1).expand(1, 1, 2_000_000, 1))
