"""What nodes lose, by kernels, on the emulator, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_emulator import COMPILER, DESCENDING, SHUFFLED, EmulatedDevice
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod.errors import InputError, LimitError
from gpu_lod.kernels import device
from gpu_lod.kernels.losses import losses

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def errors(images: torch.Tensor, patch: int, *, plain: bool) -> tuple[torch.Tensor, ...]:
    """Sums of what nodes lose over all that is below them."""
    with pytest.MonkeyPatch.context() as patched:
        if plain:
            patched.setattr(device, "KIND", "cuda")
            images = images.float() / (255 if images.dtype == torch.uint8 else 1)
        return lod.allocate.TokenDAG(1, patch).errors(images)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses(emulated: EmulatedDevice, dtype: torch.dtype) -> None:
    for shape, patch in (
        ((2, 3, 64, 96), 16), ((1, 3, 61, 47), 14), ((3, 1, 40, 33), 7), ((2, 4, 33, 70), 5), ((1, 2, 90, 19), 1),
        ((1, 3, 17, 1), 4), ((1, 3, 128, 128), 8), ((2, 3, 30, 41), 20),
    ):  # fmt: skip
        images = noise(*shape, dtype=dtype)
        emulated.calls.clear()
        found, expected = errors(images, patch, plain=False), errors(images, patch, plain=True)
        assert [call[1].name for call in emulated.named("launch")] == ["losses"] * (len(found) - 1)
        for level, (one, two) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=f"{shape} {level}")


@pytest.mark.parametrize("order", [DESCENDING, SHUFFLED], ids=["descending", "shuffled"])
def test_no_order_of_threads_matters(emulated: EmulatedDevice, order: int) -> None:
    images = noise(2, 3, 61, 47)
    expected = errors(images, 9, plain=False)
    emulated.order, emulated.seed = order, 4
    assert all(map(torch.equal, errors(images, 9, plain=False), expected))


MOST = "area = p.patch * p.patch;"
UNDEFINED = {
    "an array ends before": ("for (int i = 0; i < 2; ++i)", "for (int i = 0; i <= 2; ++i)"),
    **{
        words: (MOST, f"{MOST} volatile int most = 2147483647, least = -most - 1, unused = {sum_};")
        for words, sum_ in (
            ("fewer bits than it is shifted", "area << (most >> 25)"),
            ("no int is as large", "(int)(2.0f * most)"),
            ("a sum is no int", "most + area"),
            ("a difference is no int", "least - area"),
            ("a product is no int", "most * area"),
            ("a negative is no int", "-least"),
        )
    },
}


@pytest.mark.parametrize("words", UNDEFINED)
def test_what_a_gpu_may_do_as_it_likes_is_seen(emulated: EmulatedDevice, words: str) -> None:
    """A result may be right all the same."""
    emulated.changes = (UNDEFINED[words],)
    with pytest.raises(AssertionError, match=words):
        errors(noise(1, 3, 32, 32), 8, plain=False)


def test_what_is_not_finite_is_named(emulated: EmulatedDevice) -> None:
    for value in (math.nan, math.inf):
        images = noise(1, 3, 40, 40)
        images[0, 1, 20, 20] = value
        with pytest.raises(InputError, match="energy of the picture is not finite"):
            errors(images, 8, plain=False)


def test_what_is_left_to_torch(emulated: EmulatedDevice) -> None:
    errors(noise(1, 3, 40, 40).requires_grad_(), 8, plain=False)
    assert not emulated.named("launch")
    many = torch.zeros(1, 1, 1, 1).expand(2**11, 1, 2**10, 2**10)
    with pytest.raises(LimitError, match="patches of 1"):
        losses(device.device_of(many), many, 1, 1)
