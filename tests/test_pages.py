"""Large results in large pages: asked for where that pays, and the same values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gpu_lod as lod
from gpu_lod.pages import LEAST, large


def _asked_for(tensor: torch.Tensor) -> bool:
    """Whether the middle of its memory is marked for large pages."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    return False


on_linux = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no such pages"
)


@on_linux
def test_large_tensors_are_asked_for_and_small_ones_are_not() -> None:
    assert _asked_for(large(torch.empty(16 * LEAST, dtype=torch.uint8)))
    assert not _asked_for(torch.empty(16 * LEAST, dtype=torch.uint8))
    assert not _asked_for(large(torch.empty(LEAST - 1, dtype=torch.uint8)))


@on_linux
def test_forty_maps_of_a_large_picture_lie_in_them() -> None:
    assert _asked_for(lod.feature_maps(torch.rand(3, 640, 640), backend="torch"))


def test_what_has_no_memory_is_left_alone() -> None:
    meta = torch.empty(LEAST, device="meta")
    assert large(meta) is meta
    with FakeTensorMode():
        fake = torch.empty(LEAST)
        assert large(fake) is fake
