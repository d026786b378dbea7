"""What holds of every linear verb, and of the work that a batch takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import BOXES, FIXATION, LINEAR, SIZE
from images import noise

import gpu_lod as lod
from gpu_lod.program import Program
from gpu_lod.pyramid import level_sizes

AS_THEY_ARE = [name for name in LINEAR if "normalised" not in name]
"""Verbs that neither scale values nor read zeros beyond the border."""


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["torch", "gl"])
@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_a_constant_stays_constant(name: str, backend: str, dtype: torch.dtype) -> None:
    """Weights are a partition of unity; and the bands of a Laplacian pyramid hold none of it."""
    value = 201.0 if dtype == torch.uint8 else 0.625
    xs = [torch.full_like(x, value, dtype=dtype) for x in LINEAR[name].inputs()]
    if name == "collapse":
        if dtype == torch.uint8:
            xs = [x.float() for x in xs]  # bands are never counts
        xs[:-1] = [torch.zeros_like(x) for x in xs[:-1]]
    if name == "inverse_log_polar":  # which is 0 beyond r_max if it is not told
        found = [lod.inverse_log_polar(xs[0], FIXATION, SIZE, border="clamp", backend=backend)]
    else:
        found = LINEAR[name].run(*xs, backend=backend)
    expected = [value] * len(found)
    if name == "laplacian":
        expected[:-1] = [0.0] * (len(found) - 1)
    for level, constant in zip(found, expected, strict=True):
        assert float((level.double() - constant).abs().max()) <= 2e-6 * value, name


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (lambda x, p, f, s: lod.gather_patches(p, s, 8, backend="gl"), 1),
        (lambda x, p, f, s: lod.log_polar(p, f, 16, 32, backend="gl"), 1),
        (lambda x, p, f, s: lod.foveate(p, f, backend="gl"), 3),
        (lambda x, p, f, s: lod.inverse_log_polar(x, f, (40, 48), backend="gl"), 1),
        (lambda x, p, f, s: lod.mipmap(x, 5, generator="compute"), 4),
        (lambda x, p, f, s: lod.mipmap(x, generator="single-pass"), 1),
        (lambda x, p, f, s: lod.gaussian(x, 4, backend="gl"), 3),
        (lambda x, p, f, s: lod.laplacian(x, 4, backend="gl"), 6),
        (lambda x, p, f, s: lod.oriented_energy(x, 2, backend="gl"), 3),
        (lambda x, p, f, s: lod.feature_maps(x, f, backend="gl"), 15),  # 11 of them are luma and levels
        (lambda x, p, f, s: lod.foveate(p, f, anisotropy=3, backend="gl"), 1),
        (lambda x, p, f, s: lod.hiz(x, generator="compute"), 6),
        (lambda x, p, f, s: lod.hiz(x, generator="single-pass"), 1),
        (lambda x, p, f, s: lod.collapse(lod.laplacian(x, 4, backend="torch"), backend="gl"), 3),
        (lambda x, p, f, s: lod.cull(lod.hiz(x, backend="torch"), 0.9, backend="gl"), 1),
        (lambda x, p, f, s: lod.region_max(lod.hiz(x, backend="torch"), BOXES, backend="gl"), 1),
        (lambda x, p, f, s: lod.region_min(lod.hiz(x, "min", backend="torch"), BOXES, backend="gl"), 1),
    ],
    ids=[
        "gather_patches", "log_polar", "foveate", "inverse_log_polar", "compute", "single-pass", "gaussian",
        "laplacian", "oriented_energy", "feature_maps", "foveate, anisotropic", "hiz", "hiz, single-pass", "collapse",
        "cull", "region_max", "region_min",
    ],
)  # fmt: skip
def test_a_batch_takes_no_more_dispatches(
    ctx: lod.Context,
    verb: Callable[..., Any],
    expected: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Software renderers take the most: pictures are foveated in blocks, and what is left of them, there alone. What
    becomes a texture on the way is a dispatch a level on hardware, and none there."""
    if not ctx.software and request.node.callspec.id.startswith("region"):
        expected += len(level_sizes(64, 64))
    counts = dispatches(verb, (1, 8), monkeypatch)
    assert counts[0] == counts[1] <= expected
    if expected == 1 or ctx.software:
        assert counts[0] == expected


@pytest.mark.parametrize("side", [64, 200])
@pytest.mark.parametrize(
    "verb",
    [
        lambda x, p, f, s: lod.gather_patches(x, s, 8, backend="gl"),
        lambda x, p, f, s: lod.log_polar(x, f, 16, 32, backend="gl"),
        lambda x, p, f, s: lod.foveate(x, f, backend="gl"),
    ],
    ids=["gather_patches", "log_polar", "foveate"],
)
def test_a_batch_of_images_takes_dispatches_by_its_chains(
    ctx: lod.Context, verb: Callable[..., Any], side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A software renderer makes chains of images a tile at a time, to keep memory's bound: as many images together as
    a tile holds, so never more dispatches than image by image. Elsewhere the chains are one pyramid's."""
    one, several = dispatches(verb, (1, 8), monkeypatch, side)
    assert one <= several <= 8 * one if ctx.software else several == one


def dispatches(
    verb: Callable[..., Any], batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, side: int = 64
) -> list[int]:
    """How many a call takes, of each batch."""
    counts = []
    dispatch = Program.dispatch_groups

    def counted(self: Program, x: int, y: int, z: int) -> None:
        counts[-1] += 1
        dispatch(self, x, y, z)

    for batch in batches:
        image = noise(batch, 3, side, side)
        sites = torch.rand(batch, 5, 3)
        arguments = image, lod.mipmap(image).upload(), torch.rand(batch, 2), sites
        verb(*arguments)  # whatever is made once
        counts.append(0)
        with monkeypatch.context() as watched:
            watched.setattr(Program, "dispatch_groups", counted)
            verb(*arguments)
    return counts
