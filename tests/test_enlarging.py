"""Bilinear enlargement against float64, by every way that it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_lod import enlarging
from gpu_lod.enlarging import enlarged


def exact(samples: torch.Tensor, factor: int, centred: bool) -> torch.Tensor:
    """All pixels, each from the two samples of a side that it lies between."""
    found = samples.double()
    for dim in (-2, -1):
        n = samples.shape[dim]
        pixels = torch.arange(n * factor, dtype=torch.float64)
        at = ((pixels + 0.5) / factor - 0.5 if centred else pixels / factor).clamp(0, n - 1)
        low = at.long()
        share = (at - low).view(-1, 1) if dim == -2 else at - low
        high = (low + 1).clamp(max=n - 1)
        found = torch.lerp(found.index_select(dim, low), found.index_select(dim, high), share)
    return found


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_any_box_by_any_way(
    height: int, width: int, power: int, centred: bool, small: bool, graph: bool, data: st.DataObject
) -> None:
    factor = 2**power
    samples = torch.rand(2, 3, height, width, requires_grad=graph)
    y0, x0 = data.draw(st.integers(0, height * factor - 1)), data.draw(st.integers(0, width * factor - 1))
    y1, x1 = data.draw(st.integers(y0 + 1, height * factor)), data.draw(st.integers(x0 + 1, width * factor))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enlarging, "_SMALL", 2**40 if small else 0)
        found = enlarged(samples, factor, (y0, y1, x0, x1), centred=centred)
    expected = exact(samples.detach(), factor, centred)[..., y0:y1, x0:x1]
    assert found.shape == expected.shape and found.requires_grad == graph
    assert float((found.detach() - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("small", [True, False])
def test_small_dtypes_come_wide(dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enlarging, "_SMALL", 2**40 if small else 0)
    samples = (200 * torch.rand(1, 2, 5, 7)).to(dtype)
    found = enlarged(samples, 4, (3, 17, 2, 28), torch.float32)
    assert found.dtype == torch.float32
    assert float((found - exact(samples, 4, True)[..., 3:17, 2:28]).abs().max()) < 1e-3


def test_gradients_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enlarging, "_SMALL", 0)
    samples = torch.rand(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    for factor, centred in ((2, True), (8, True), (4, False)):
        box = (1, 2 * factor, 1, 3 * factor)
        assert torch.autograd.gradcheck(lambda x, f=factor, c=centred, b=box: enlarged(x, f, b, centred=c), samples)
