"""Arithmetic that GLSL leaves open: a quotient may be off by 2.5 units in the last place, and hardware's are."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from images import noise
from torch.nn.functional import unfold

import gpu_lod as lod
from gpu_lod import shaders

OFF = 1 + 2.0**-22
"""Of a quotient, as a factor."""


@pytest.fixture(params=[OFF, 2 - OFF], ids=["above", "below"])
def hardware_quotients(
    request: pytest.FixtureRequest, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """In the shaders whose results promise more than their tolerances."""
    read = shaders._read

    def worse(name: str, stack: tuple[str, ...]) -> str:
        text = read(name, stack)
        if name in ("polyphase.glsl", "patches.glsl"):
            # Not by constants: compilers multiply with their inverse, which they know in full.
            text = re.sub(r"/ (float\(.*?\)|[a-z_]+)(?=[ ;,)])", rf"/ \1 * {request.param:.9f}", text)
        return text

    def forget() -> None:
        with ctx.active():
            ctx.programs.clear()

    monkeypatch.setattr(shaders, "_read", worse)
    forget()
    yield
    forget()


@pytest.mark.parametrize("generator", ["compute", "single-pass", "fragment"])
def test_means_are_kept_over_a_whole_chain(hardware_quotients: None, generator: str) -> None:
    """Every level of 2^n - 1 is odd, and takes weights that are quotients."""
    for level in lod.mipmap(torch.ones(1, 1023, 511), generator=generator):
        assert float((level - 1).abs().max()) < 1e-6


def test_patches_of_the_grid_are_exact(hardware_quotients: None) -> None:
    image = noise(1, 3, 96, 64)
    pyramid = lod.mipmap(image)
    for level in range(4):
        height, width = pyramid[level].shape[-2:]
        y, x = torch.meshgrid(torch.arange(height // 4), torch.arange(width // 4), indexing="ij")
        sites = torch.stack([(x + 0.5) * 4 / width, (y + 0.5) * 4 / height, torch.full(x.shape, float(level))], -1)
        found = lod.gather_patches(pyramid, sites.flatten(0, 1), 4, backend="gl")
        expected = unfold(pyramid[level], 4, stride=4)[0].T.view(-1, 3, 4, 4)
        assert torch.equal(found[0], expected), level
