"""Floats of storage buffers by themselves, and in pairs as doubles: a CPU takes the one way or the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from images import noise

import gpu_lod as lod
from gpu_lod.sharing import Sharing
from gpu_lod.tuning import tuning

AT = (0.4, 0.6)
VERBS: dict[str, Callable[[torch.Tensor], Any]] = {
    "foveate": lambda x: lod.foveate(x, AT, backend="gl"),
    "log_polar": lambda x: lod.log_polar(x, AT, 12, 20, backend="gl"),
    "inverse_log_polar": lambda x: lod.inverse_log_polar(x, AT, (20, 36), backend="gl"),
    "gather_patches": lambda x: lod.gather_patches(x, torch.rand(9, 3), 16, backend="gl"),
    "gaussian": lambda x: lod.gaussian(x, 3, backend="gl"),
    "laplacian": lambda x: lod.laplacian(x, 3, backend="gl"),
    "oriented_energy": lambda x: lod.oriented_energy(x, 2, backend="gl"),
    "feature_maps": lambda x: lod.feature_maps(x, AT, backend="gl"),
    "feature_maps in halves": lambda x: lod.feature_maps(x, AT, dtype=torch.float16, backend="gl"),
}


@pytest.mark.parametrize("software", [True, False], ids=["textures", "buffers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", VERBS)
def test_both_ways_are_one(
    name: str, dtype: torch.dtype, software: bool, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit."""
    if not software:
        monkeypatch.setattr(Sharing, "software", False)  # what is read lies in storage buffers then
    for shape in ((2, 3, 48, 64), (1, 3, 33, 46)):
        image = noise(*shape, dtype=dtype)
        found = []
        for pairs in (True, False):
            monkeypatch.setattr(ctx.programs, "pairs", pairs)
            torch.manual_seed(0)
            made = VERBS[name](image)
            found.append([made] if isinstance(made, torch.Tensor) else list(made))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), shape


@pytest.mark.parametrize(
    ("capability", "cpu", "pairs"),
    [
        ("AVX512", "Intel(R) Xeon(R) Processor @ 2.60GHz", False),
        ("AVX512", "AMD EPYC", True),
        ("AVX512", "unknown", False),
        ("AVX2", "Intel(R) Xeon(R) Processor @ 2.60GHz", True),
        ("DEFAULT", "unknown", True),
    ],
)
def test_who_takes_pairs(capability: str, cpu: str, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("gpu_lod.tuning.cpu", lambda: cpu)
    assert tuning(software=True).pairs == pairs
    assert not tuning(software=False).pairs
