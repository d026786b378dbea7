"""The comparer itself: it must let right results pass and must fail wrong ones."""

from __future__ import annotations

import pytest
import torch
from compare import TOLERANCES, assert_matches


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_equal_passes(kind: str, dtype: torch.dtype) -> None:
    value = (torch.rand(3, 4) * 100).to(dtype)
    assert_matches(value, value.double(), kind)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.50001], dtype=torch.float64)),
        (torch.tensor([0.5]), torch.tensor([float("nan")], dtype=torch.float64)),
        (torch.tensor([float("nan")]), torch.tensor([0.5], dtype=torch.float64)),
        (torch.tensor([float("inf")]), torch.tensor([1e30], dtype=torch.float64)),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")], dtype=torch.float64)),
        (torch.tensor([3, 5], dtype=torch.uint8), torch.tensor([3.0, 6.5], dtype=torch.float64)),
        (torch.rand(2, 3), torch.rand(3, 2, dtype=torch.float64)),
        (torch.rand(2), torch.rand(2)),
    ],
    ids=[
        "off",
        "number for nan",
        "nan for number",
        "inf for number",
        "inf for -inf",
        "two counts",
        "shape",
        "fp32 oracle",
    ],
)
def test_wrong_fails(actual: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        assert_matches(actual, expected, "box")


def test_slack_is_per_element() -> None:
    actual, expected = torch.tensor([0.0, 0.0]), torch.tensor([0.1, 0.1], dtype=torch.float64)
    assert_matches(actual, expected, "box", slack=torch.tensor([0.2, 0.2]))
    with pytest.raises(AssertionError, match=r"1 of 2 .* first at \(1,\)"):
        assert_matches(actual, expected, "box", slack=torch.tensor([0.2, 0.0]))
