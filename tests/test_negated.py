"""Tensors that torch has yet to negate, as the imaginary part of a conjugate is: their memory holds the opposite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import CALLS, CASES
from images import noise

import gpu_lod as lod


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same values."""
    found: torch.Tensor = torch._neg_view(-x)
    assert found.is_neg()
    return found


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_pictures_and_levels(name: str, backend: Any) -> None:
    call = CALLS[name]
    inputs = call.inputs()
    how = backend if call.backends else None
    found, expected = (call.run(*xs, backend=how) for xs in (map(negated, inputs), inputs))
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("backend", ["torch", "gl"])
@pytest.mark.parametrize(
    ("verb", "place"),
    [
        (lambda x, at, how: lod.log_polar(x, at, 8, 12, backend=how), torch.rand(2)),
        (lambda x, at, how: lod.inverse_log_polar(x, at, (20, 30), backend=how), torch.rand(2)),
        (lambda x, at, how: lod.foveate(x, at, backend=how), torch.rand(2)),
        (lambda x, at, how: lod.feature_maps(x, at, backend=how), torch.rand(2)),
        (lambda x, at, how: lod.gather_patches(x, at, 4, backend=how), torch.rand(7, 3)),
        (lambda x, at, how: lod.region_max(lod.hiz(x[:1]), at, backend=how), torch.tensor([[0.1, 0.2, 0.5, 0.6]])),
        (lambda x, at, how: lod.cull(lod.hiz(x[:1]), at, backend=how).mask, torch.tensor(0.5)),
    ],
    ids=["log_polar", "inverse_log_polar", "foveate", "feature_maps", "gather_patches", "region_max", "cull"],
)
def test_places_and_thresholds(verb: Callable[..., torch.Tensor], place: torch.Tensor, backend: str) -> None:
    image = noise(3, 40, 56)
    assert torch.equal(verb(image, negated(place), backend), verb(image, place, backend))
