"""Filters and rules that are made once serve whoever comes next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from images import noise
from torch._subclasses.fake_tensor import FakeTensorMode

import gpu_lod as lod

# Arguments that no other test has: what is made for them is made here.
CALLS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "small pictures": lambda x, some: lod.oriented_energy(x, 1, 6 + some, backend="torch")[0],
    "large pictures": lambda x, some: lod.oriented_energy(x.tile(1, 1, 8, 8), 1, 16 + some, backend="torch")[0],
    "rings": lambda x, some: lod.log_polar(x, (0.4, 0.6), 17, 31 + some, backend="torch"),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_after_a_call_in_inference_mode(name: str) -> None:
    call, image = CALLS[name], noise(1, 3, 40, 50)
    with torch.inference_mode():
        expected = call(image, 0).clone()
    found = call(image.requires_grad_(), 0)
    (gradient,) = torch.autograd.grad(found.square().sum(), image)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)
    assert bool(gradient.any())


@pytest.mark.parametrize("name", CALLS)
def test_values_after_a_call_without_values(name: str) -> None:
    call, image = CALLS[name], noise(1, 3, 40, 50)
    with FakeTensorMode() as mode:
        try:
            fake = call(mode.from_tensor(image), 1)
        except Exception as error:  # values decide there
            fake = error
    found = call(image, 1)
    assert bool(torch.isfinite(found).all()), fake
