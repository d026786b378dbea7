"""The one comparer, and the one table of tolerances."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TOLERANCES: dict[str, dict[torch.dtype, float]] = {
    # Largest difference from the float64 oracle, in units of the stored range (1 for floats, 255 counts for uint8).
    "box": {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.uint8: 1 / 255},
    # Weights of the binomial are exact. uint8 images give fp32 differences, in counts.
    "binomial": {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.uint8: 1 / 255},
    "exact": {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0, torch.uint8: 0.0},
    # Energies are squares, of no fixed range: in units of the picture's largest.
    "energy": {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.uint8: 1 / 255},
    # Feature maps of pictures in [0, 1], each channel in units of its largest value if that is above 1.
    "features": {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.uint8: 1 / 255},
    # Where filter weights are exact. Hardware weighs with 8 fractional bits: `weight_error` widens the band.
    "trilinear": {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.uint8: 1 / 255},
}
HARDWARE_WEIGHT_ERROR = 2.0**-8


def stored_range(dtype: torch.dtype) -> float:
    return 255.0 if dtype == torch.uint8 else 1.0


def assert_matches(
    actual: torch.Tensor,
    expected: torch.Tensor,
    kind: str,
    *,
    slack: torch.Tensor | float = 0.0,
    where: str = "",
) -> None:
    """Fail unless `actual` is within the table's tolerance of the float64 `expected`.

    Args:
        kind: the row of TOLERANCES.
        slack: an extra allowance, a number or one per element (weight error times local difference).

    NaN matches NaN only, and infinities only themselves.
    """
    assert actual.shape == expected.shape, f"{where}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert expected.dtype == torch.float64, "the oracle must be float64"
    tolerance = TOLERANCES[kind][actual.dtype] * stored_range(actual.dtype)
    value = actual.double()
    same = (value == expected) | (value.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (value - expected).abs())
    bad = ~(difference <= tolerance + torch.as_tensor(slack, dtype=torch.float64))
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{where}: {int(bad.sum())} of {bad.numel()} differ, at most by {float(difference.nan_to_num(1e9).max())}"
            f" (tolerance {tolerance}); first at {index}: {float(value[index])}, expected {float(expected[index])}"
        )


def energies_match(
    found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor], where: str = "", scale: float = 1.0
) -> None:
    """Fail unless energies are within tolerance, in units of the largest one of a level; of 1% of what values in [0, 1]
    may have, where all are smaller."""
    assert len(found) == len(truth)
    for level, expected in zip(found, truth, strict=True):
        largest = max(float(expected.abs().max()), 0.01 * scale)
        assert_matches((level.double() / largest).to(level.dtype), expected / largest, "energy", where=where)
