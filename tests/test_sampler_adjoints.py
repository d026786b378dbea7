"""What samplers give the levels they read, against torch's own graph of the same samples in double precision."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images import noise
from torch.multiprocessing.reductions import StorageWeakRef

import gpu_lod as lod
from gpu_lod import bilinear, checks, foveate_adjoint
from gpu_lod.gather_patches import Look
from gpu_lod.inverse_log_polar import Frame
from gpu_lod.log_polar import ring_rule
from gpu_lod.mipmap import reference as mip_chain

# Verbs hide the modules of their names.
foveate, gather_patches, inverse_log_polar, log_polar = (
    sys.modules[f"gpu_lod.{name}"] for name in ("foveate", "gather_patches", "inverse_log_polar", "log_polar")
)
Made = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def check(made: Made, adjoint: Any, levels: Sequence[torch.Tensor]) -> None:
    """
    Args:
        made: the samples of levels, by a graph of torch's own.
        adjoint: of them.
    """
    exact = [level.double().requires_grad_() for level in levels]
    samples = made(exact)
    weights = noise(*samples.shape) - 0.5
    expected = torch.autograd.grad(samples, exact, weights.to(samples.dtype), allow_unused=True)
    found = adjoint(weights)
    assert len(found) == len(levels)
    largest = max(float(one.abs().max()) for one in expected if one is not None)
    for level, one, other in zip(levels, found, expected, strict=True):
        one = torch.zeros_like(level) if one is None else one
        other = torch.zeros_like(level) if other is None else other
        assert one.dtype == level.dtype and one.shape == level.shape
        assert float((one - other).abs().max()) <= 2e-5 * max(largest, 1e-3)


def places(count: int) -> torch.Tensor:
    """Inside, at an edge, in a corner; away from where fp32 and double precision fall on different sides of a texel."""
    return torch.tensor([[0.41, 0.63], [0.0, 0.37], [0.99, 0.98], [0.77, 0.05]])[torch.arange(count) % 4]


SHAPES = [(1, 3, 64, 64), (3, 19, 42), (3, 2, 33, 47), (2, 1, 1, 9), (1, 1, 5, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize("spacing", ["log", "cortical"])
def test_log_polar(shape: tuple[int, ...], border: str, spacing: str) -> None:
    levels, points = mip_chain(noise(*shape)), places(shape[0] if len(shape) == 4 else 1)
    for rings, wedges in ((12, 20), (3, 1), (64, 40)):
        rule = ring_rule(rings, wedges, None, 0.9, spacing, 0.05)
        adjoint = log_polar._adjoint_of(levels[0], len(levels), points, rule, border)
        check(lambda x, rule=rule: log_polar._made(x, points, rule, border), adjoint, levels)


@pytest.mark.parametrize("shape", [(1, 3, 16, 32), (2, 9, 12), (3, 2, 5, 7), (1, 1, 1, 1), (2, 1, 4, 8)], ids=str)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("cortical", [False, True])
def test_inverse_log_polar(shape: tuple[int, ...], zero: bool, cortical: bool) -> None:
    polar, points = noise(*shape), places(shape[0] if len(shape) == 4 else 1)
    for size in ((24, 31), (64, 64), (1, 5)):
        frame = Frame(size, shape[-2], shape[-1], 0.02, 0.6, cortical, zero)
        adjoint = inverse_log_polar._adjoint_of(polar, points, frame)
        check(lambda x, frame=frame: inverse_log_polar._made(x[0], points, frame), adjoint, [polar])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("anisotropy", [1.0, 1.5, 4.0, 16.0])
def test_foveate(shape: tuple[int, ...], anisotropy: float) -> None:
    levels, points = mip_chain(noise(*shape)), places(shape[0] if len(shape) == 4 else 1)
    for e0, bias in ((0.05, 0.0), (0.01, 0.7), (0.3, -1.5), (0.05, 30.0), (0.05, -30.0)):
        rule = e0, bias, anisotropy
        adjoint = foveate._adjoint_of(levels[0], len(levels), points, *rule)
        check(lambda x, rule=rule: foveate._made(x, points, *rule), adjoint, levels)


SITES = torch.tensor(
    [
        [0.25, 0.25, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 1.0], [0.25, 0.75, 1.0], [0.51, 0.33, 0.0], [0.3, 0.71, 1.0],
        [0.13, 0.9, 0.4], [0.95, 0.02, 1.7], [0.6, 0.4, 2.5], [0.5, 0.5, 9.0], [0.2, 0.6, 30.0], [0.0, 1.0, 3.0],
    ]
)  # fmt: skip
"""On texels and between them, at whole levels and between them, at the last one and beyond it."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("patch", [1, 8, 13])
@pytest.mark.parametrize("bias", [0.0, -0.6, 0.5])
def test_gather_patches(shape: tuple[int, ...], patch: int, bias: float) -> None:
    batch, channels = shape[0] if len(shape) == 4 else 1, shape[-3]
    levels = mip_chain(noise(*shape))[:3]  # others lie beyond the last
    each = torch.stack([SITES.roll(k, 0) for k in range(batch)])
    for sites in (SITES[None], each, SITES[None, :1], SITES[None, 8:9]):
        for zero, scale in ((False, None), (True, tuple(0.5 + k for k in range(channels)))):
            look = Look(patch, zero, scale, (0.25,) * channels, torch.float32, bias)
            adjoint = gather_patches._adjoint_of(levels[0], len(levels), sites, look)
            check(lambda x, s=sites, look=look: gather_patches._made(x, s, look), adjoint, levels)


@pytest.mark.parametrize("shape", [(3, 2, 33, 47), (1, 3, 64, 64), (2, 1, 1, 9)], ids=str)
def test_parts_add_up(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of more samples than a CPU takes on at once, in levels of which they read a part."""
    monkeypatch.setattr(bilinear, "_SMALL", 0)
    monkeypatch.setattr(log_polar, "_AT_ONCE", 8)
    monkeypatch.setattr(gather_patches, "_VALUES", 300)
    monkeypatch.setattr(inverse_log_polar.planewise, "PART", 400)
    monkeypatch.setattr(foveate_adjoint, "PART", 600)
    test_log_polar(shape, "zero", "log")
    test_gather_patches(shape, 8, 0.0)
    test_inverse_log_polar(shape, True, False)
    test_foveate(shape, 4.0)


@pytest.mark.parametrize("sampler", ["log_polar", "inverse_log_polar", "foveate", "gather_patches"])
def test_as_on_a_gpu(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once."""
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    arguments: Any = {
        "log_polar": (test_log_polar, ((3, 2, 33, 47), "zero", "log")),
        "inverse_log_polar": (test_inverse_log_polar, ((3, 2, 5, 7), True, False)),
        "foveate": (test_foveate, ((3, 2, 33, 47), 4.0)),
        "gather_patches": (test_gather_patches, ((3, 2, 33, 47), 8, 0.0)),
    }
    test, given = arguments[sampler]
    test(*given)


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.integers(1, 30), st.integers(1, 4), st.integers(1, 5)
)
def test_threads_share_the_samples_of_an_image(
    height: int, width: int, rows: int, columns: int, channels: int, threads: int
) -> None:
    grid = torch.rand(1, rows, columns, 2) * 2.4 - 1.2
    weights = torch.rand(1, channels, rows, columns) - 0.5
    image = torch.rand(1, channels, height, width).requires_grad_()
    (expected,) = torch.autograd.grad(bilinear._grid_sample(image, grid), image, weights)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = bilinear.scattered(weights, grid, image.shape)
        (asked,) = torch.autograd.grad(bilinear.grid_sample(image, grid, None), image, weights)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4) and torch.equal(asked, found)


VERBS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "log_polar": lambda x, way: lod.log_polar(x, (0.4, 0.6), 9, 14, backend=way),
    "inverse_log_polar": lambda x, way: lod.inverse_log_polar(x, (0.4, 0.6), (12, 17), backend=way),
    "foveate": lambda x, way: lod.foveate(x, (0.4, 0.6), backend=way),
    "foveate, probed": lambda x, way: lod.foveate(x, (0.4, 0.6), anisotropy=3, backend=way),
    "gather_patches": lambda x, way: lod.gather_patches(x, SITES, 4, mean=[0.5], std=[0.3], backend=way),
}
each_verb = pytest.mark.parametrize("sampler", VERBS)
each_backend = pytest.mark.parametrize("backend", ["torch", "gl"])


@each_verb
@each_backend
def test_a_backward_reads_no_pixel(sampler: str, backend: Any) -> None:
    """The picture may be written to, and NaN there is no NaN in a gradient."""
    found = []
    for spoilt in (False, True):
        x = torch.full((1, 24, 31), 0.5).requires_grad_()
        result = VERBS[sampler](x, backend)
        if spoilt:
            with torch.no_grad():
                x.fill_(float("nan"))
        found.append(torch.autograd.grad(result, x, torch.ones_like(result))[0])
    assert bool(found[0].any()) and torch.equal(*found)


@each_verb
@each_backend
def test_a_gradient_that_torch_negates_when_it_is_read(sampler: str, backend: Any) -> None:
    x = noise(1, 20, 20).requires_grad_()
    found = VERBS[sampler](x, backend)
    negated = torch.complex(torch.zeros(found.shape), torch.ones(found.shape)).conj().imag
    assert negated.is_neg()
    one, other = (torch.autograd.grad(found, x, g, retain_graph=True)[0] for g in (negated, negated.resolve_neg()))
    assert torch.equal(one, other)


@each_verb
@each_backend
def test_a_graph_keeps_no_picture(sampler: str, backend: Any) -> None:
    image = noise(1, 64, 64).requires_grad_() * 1
    found, memory = VERBS[sampler](image, backend), StorageWeakRef(image.untyped_storage())
    assert not memory.expired()
    del image
    gc.collect()
    assert memory.expired() and found.requires_grad


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [79.0, 130.0, 1e9])
def test_footprints_beyond_any_number(bias: float, dtype: torch.dtype, backend: Any) -> None:
    """Whatever lies in them, all of it is the last level."""
    x = noise(2, 3, 33, 47, dtype=dtype).requires_grad_()
    for anisotropy in (1.5, 3, 4, 16):
        found = lod.foveate(x, (0.5, 0.5), bias=bias, anisotropy=anisotropy, backend=backend)
        last = mip_chain(x.detach())[-1].expand_as(found)
        assert torch.allclose(found, last, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-3)
        (gradient,) = torch.autograd.grad(found.float().sum(), x)
        assert torch.allclose(gradient, torch.ones_like(gradient), rtol=0, atol=1e-2)


def test_coarse_levels_of_two_bytes_are_given_more_than_they_hold() -> None:
    """98,000 to a level of one texel are 383 to each pixel."""
    x = noise(1, 16, 16, dtype=torch.float16).requires_grad_()
    found = lod.gather_patches(x, torch.tensor([[0.5, 0.5, 9.0]]), 7, backend="gl")
    (gradient,) = torch.autograd.grad(found, x, torch.full_like(found, 2000))
    assert torch.allclose(gradient, torch.full_like(gradient, 7 * 7 * 2000 / 256), rtol=1e-3)
