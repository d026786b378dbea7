"""Rows of small elements that are no whole words: made longer, and copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from images import noise

import gpu_lod as lod
from gpu_lod.program import Programs

SMALL = [torch.uint8, torch.float16, torch.bfloat16]


def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shaders that verbs ask for from now on."""
    names = []
    compute = Programs.compute

    def noted(self: Programs, name: str, **defines: object) -> Any:
        names.append(name)
        return compute(self, name, **defines)

    monkeypatch.setattr(Programs, "compute", noted)
    return names


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_width(dtype: torch.dtype, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that is all fovea comes back as it is."""
    names = used(monkeypatch)
    for width in (*range(1, 40), 127, 129, 511, 513):
        names.clear()
        image = noise(2, 3, 5, width, dtype=dtype)
        found = lod.foveate(lod.mipmap(image), (0.3, 0.6), e0=1e9, backend="gl")
        assert torch.equal(found, image), width
        per_word = 4 // dtype.itemsize
        longer = ctx.software and bool(width % per_word) and width >= 2 * per_word
        assert ("narrower_rows.comp" in names) == longer, width


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_some_rows_at_a_time(dtype: torch.dtype, restored_limits: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    names = used(monkeypatch)
    image = noise(3, 2, 401, 37, dtype=dtype)
    for rows in (256, 700, 10**4):
        restored_limits.limits.storage_bytes = rows * 37 * dtype.itemsize + 1024
        names.clear()
        assert torch.equal(lod.foveate(lod.mipmap(image), (0.3, 0.6), e0=1e9, backend="gl"), image)
        assert not restored_limits.software or "narrower_rows.comp" in names


def test_no_second_result_beside_the_texture_of_an_image(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    names = used(monkeypatch)
    image = noise(1, 3, 20, 31, dtype=torch.uint8)
    found = lod.foveate(image, (0.3, 0.6), backend="gl")
    assert "narrower_rows.comp" not in names
    assert (found.int() - lod.foveate(lod.mipmap(image), (0.3, 0.6), backend="gl").int()).abs().max() <= 1
