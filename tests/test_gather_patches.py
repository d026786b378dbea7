"""Patches at sites: both backends against float64, and what an encoder relies on."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import HARDWARE_WEIGHT_ERROR, assert_matches, stored_range
from images import DTYPES, grey_levels, noise, smooth
from oracle import gather_patches as oracle
from scripts import succeed
from times import fastest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpu_lod as lod
from gpu_lod.errors import InputError, LimitError, PyramidChangedError, UnsupportedError
from gpu_lod.gather_patches import Look, reference
from gpu_lod.sharing import Sharing

BACKENDS: list[Any] = ["torch", "gl"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def random_sites(batch: int, budget: int, highest: float = 6.0) -> torch.Tensor:
    """Fractional levels, whole ones and level 0, corners and edges among them."""
    sites = torch.rand(batch, budget, 3) * torch.tensor([1.0, 1.0, highest])
    sites[:, ::3, 2] = sites[:, ::3, 2].floor()
    sites[:, 0] = torch.tensor([0.0, 1.0, 0.0])
    sites[:, -1] = torch.tensor([1.0, 0.5, 1.5])
    return sites


def grid_sites(height: int, width: int, patch: int, level: int = 0) -> torch.Tensor:
    """Centres of the whole patches of a level, row-major, [K, 3]."""
    side = patch << level
    y, x = torch.meshgrid(torch.arange(height // side), torch.arange(width // side), indexing="ij")
    x, y = (x.flatten() + 0.5) * side / width, (y.flatten() + 0.5) * side / height
    return torch.stack([x, y, torch.full_like(x, float(level))], dim=-1)


def unfolded(image: torch.Tensor, patch: int) -> torch.Tensor:
    """The patches of [C, H, W], row-major, [K, C, P, P]."""
    return image.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4).flatten(0, 1)


def check(
    ctx: lod.Context,
    pyramid: lod.Pyramid,
    sites: torch.Tensor,
    patch: int,
    *backends: Any,
    border: Any = "clamp",
    bias: float = 0.0,
) -> None:
    levels = [level if pyramid.batched else level[None] for level in pyramid.levels]
    expected, texels, blend = oracle(levels, sites if sites.ndim == 3 else sites[None], patch, border, bias)
    if not pyramid.batched:
        expected, texels, blend = expected[0], texels[0], blend[0]
    beside: torch.Tensor | float = 0.0
    if border == "zero":  # a sample on the very border may fall to either side
        height, width = pyramid.size
        points = sites.expand(pyramid.batch, -1, -1).double()
        steps = (torch.arange(patch) - (patch - 1) / 2) * 2 ** points[..., 2:]
        x, y = points[..., :1] * width + steps, points[..., 1:2] * height + steps
        near = [
            (torch.minimum(at.abs(), (at - side).abs()) < 1e-6 * side + 1e-5) for at, side in ((x, width), (y, height))
        ]
        edge = (near[0][..., None, :] | near[1][..., :, None])[:, :, None]
        beside = float(pyramid[0].abs().max()) * (edge if pyramid.batched else edge[0])
    for backend in backends:
        found = lod.gather_patches(pyramid, sites, patch, border=border, backend=backend, bias=bias)
        assert found.dtype == pyramid.dtype and found.is_contiguous()
        exact = ctx.renderer.startswith("llvmpipe") or backend == "torch"
        # Centres may lie so far from where they are taken to be. Hardware weights have 8 bits.
        position = max(pyramid.size) * 2.0**-22 + (0 if exact else HARDWARE_WEIGHT_ERROR)
        slack = 2 * position * texels + (2.0**-20 if exact else HARDWARE_WEIGHT_ERROR) * blend + beside
        assert_matches(found, expected, "trilinear", slack=slack, where=f"{backend} {border} {patch}")


@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parity(ctx: lod.Context, backend: Any, dtype: torch.dtype, border: Any) -> None:
    for shape, budget, patch in (
        ((2, 3, 64, 96), 9, 14),
        ((3, 1, 33, 21), 5, 16),
        ((4, 57, 40), 6, 7),
        ((1, 2, 1, 1), 3, 3),
        ((1, 3, 1, 50), 4, 1),
        ((2, 3, 40, 40), 4, 5),
    ):
        pyramid = lod.mipmap(noise(*shape, dtype=dtype))
        check(ctx, pyramid, random_sites(pyramid.batch, budget), patch, backend, border=border)


@pytest.mark.parametrize("bias", [-0.5, -1.0, -3.3, 0.6, 2.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_is_of_what_is_read_and_not_of_where(
    ctx: lod.Context, backend: Any, bias: float, sample_error: float
) -> None:
    for shape, budget, patch in (
        ((2, 3, 64, 96), 9, 14),
        ((4, 57, 40), 6, 7),
        ((1, 2, 1, 1), 3, 3),
        ((3, 90, 70), 9, 8),
    ):
        for dtype in (torch.uint8, torch.float32):
            pyramid = lod.mipmap(noise(*shape, dtype=dtype))
            sites = random_sites(pyramid.batch, budget)
            check(ctx, pyramid, sites, patch, backend, border="zero" if budget == 6 else "clamp", bias=bias)
            if dtype == torch.float32:  # an image's chain is as long as it takes
                whole = lod.gather_patches(pyramid, sites, patch, backend=backend, bias=bias)
                alone = lod.gather_patches(pyramid[0], sites, patch, backend=backend, bias=bias)
                assert torch.allclose(alone, whole, atol=1e-5 + sample_error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_at_its_ends(backend: Any, sample_error: float) -> None:
    """Far below every site reads level 0, far above the last one; patches of level 0 stay pixels below."""
    image = noise(3, 60, 84)
    sites = random_sites(1, 9, 3.0)[0]
    for bias in (-1e300, -40.0):
        sharp = lod.gather_patches(image, sites, 6, backend=backend, bias=bias)
        alone = lod.gather_patches(lod.mipmap(image, levels=1), sites, 6, backend=backend)
        assert torch.allclose(sharp, alone, atol=1e-5 + sample_error)
    flat = lod.gather_patches(image, sites, 6, backend=backend, bias=1e300)
    assert torch.allclose(flat, lod.mipmap(image)[-1][None].expand(9, 3, 6, 6), atol=1e-5)
    grid = grid_sites(60, 84, 6)
    assert torch.equal(lod.gather_patches(image, grid, 6, backend=backend, bias=-0.5), unfolded(image, 6))
    assert not torch.equal(lod.gather_patches(image, grid, 6, backend=backend, bias=0.5), unfolded(image, 6))


def test_gradients_where_what_is_read_is_biased() -> None:
    """In the image the adjoint, by both backends, and in the sites what finite differences say."""
    image, sites = noise(1, 2, 40, 52), random_sites(1, 5, 3.0)
    weights = torch.rand(1, 5, 2, 4, 4)
    found = []
    for backend in BACKENDS:
        asked = image.clone().requires_grad_()
        result = lod.gather_patches(asked, sites, 4, backend=backend, bias=-0.4)
        (result * weights).sum().backward()
        assert asked.grad is not None
        assert torch.allclose((asked.grad * image).sum(), (result.detach() * weights).sum(), rtol=1e-5)
        found.append(asked.grad)
    assert torch.allclose(*found, atol=1e-6)
    chain = [level.double() for level in lod.mipmap(image, backend="torch")]
    look, places = Look(4, False, None, (0.0,), torch.float64, -0.4), torch.rand(1, 5, 3).double()
    places[..., 2] = 0.6 + 2 * places[..., 2]
    assert torch.autograd.gradcheck(lambda sites: reference(chain, sites, look), (places.requires_grad_(),), atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_picture_at_cortical_sites(ctx: lod.Context, backend: Any, photo: torch.Tensor) -> None:
    sites = lod.cortical_sites((0.43, 0.27), 273, (512, 512))
    for image in (photo, photo.float() / 255):
        check(ctx, lod.mipmap(image), sites, 14, backend)


@pytest.mark.parametrize("patch", [1, 3, 4, 14, 15, 16, 32, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_grid_sites_return_the_exact_pixels(backend: Any, dtype: torch.dtype, patch: int) -> None:
    image = noise(3, 301, 423, dtype=dtype)
    found = lod.gather_patches(image, grid_sites(301, 423, patch), patch, backend=backend)
    assert torch.equal(found, unfolded(image, patch))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nodes_of_a_quadtree_return_the_exact_texels(backend: Any) -> None:
    image = noise(3, 224, 448)
    pyramid = lod.mipmap(image)
    for level in (1, 2, 3):
        found = lod.gather_patches(pyramid, grid_sites(224, 448, 14, level), 14, backend=backend)
        assert torch.equal(found, unfolded(pyramid[level], 14))


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_where_the_sides_of_a_large_picture_are_no_powers_of_two(backend: Any) -> None:
    image = torch.arange(2 * 5003, dtype=torch.float32).view(1, 2, 5003)
    centre = torch.tensor([[(4990 + 0.5) / 5003, 0.25, 0.0]])
    found = lod.gather_patches(image, centre, 1, backend=backend)
    assert found.item() == 4990


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_offsets_and_levels(backend: Any) -> None:
    """A ramp says where it was read: samples 2^level pixels apart, symmetric about the centre."""
    size, patch = 256, 6
    ramp = ((torch.arange(size) + 0.5) / size).expand(1, size, size).contiguous()
    for level in (0.0, 0.5, 1.0, 1.75, 3.0):
        found = lod.gather_patches(ramp, [[0.5, 0.375, level]], patch, backend=backend)
        expected = 0.5 + (torch.arange(patch) - (patch - 1) / 2) * 2**level / size
        assert torch.allclose(found[0, 0], expected.expand(patch, patch), atol=2e-5)
    down = lod.gather_patches(ramp.transpose(1, 2).contiguous(), [[0.5, 0.375, 0.0]], patch, backend=backend)
    assert torch.allclose(down[0, 0, :, 0], 0.375 + (torch.arange(patch) - 2.5) / size, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_popping_between_levels(backend: Any) -> None:
    """A small step of the level is a small step of the patch, also across whole levels."""
    pyramid = lod.mipmap(smooth(96, 128))
    levels = torch.linspace(0, 4, 401)
    sites = torch.stack([torch.full_like(levels, 0.4), torch.full_like(levels, 0.6), levels], dim=-1)
    found = lod.gather_patches(pyramid, sites, 8, backend=backend)
    assert float((found[1:] - found[:-1]).abs().max()) < 0.05


def test_samples_that_rounding_puts_a_texel_apart(ctx: lod.Context) -> None:
    """Two samples less than a texel apart, the first one just before a texel, may have the other one on the next but
    one."""
    sites = [[0.2540000081, 0.3718389273, 0.9999978542], [0.5120000839, 0.7726207972, 0.9999957681]]
    sites.append([0.4999998808, 0.1916773915, 0.9999999404])
    check(ctx, lod.mipmap(noise(1, 1, 1000, 1000)), torch.tensor([sites]), 14, "gl")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_samples_far_outside_read_the_nearest_edge(dtype: torch.dtype) -> None:
    """Half a patch of the highest level is more pixels than an integer counts."""
    image = noise(1, 8, 8, dtype=dtype)
    found = lod.gather_patches(lod.mipmap(image, levels=1), [[0.5, 0.5, 30.0]], 14, backend="gl")[0, 0]
    corners = image[0, ::7, ::7].repeat_interleave(7, 0).repeat_interleave(7, 1)
    assert torch.allclose(found.float(), corners.float(), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_levels_past_the_last_read_the_last(ctx: lod.Context, backend: Any) -> None:
    pyramid = lod.mipmap(noise(3, 32, 48))
    far = lod.gather_patches(pyramid, [[0.5, 0.5, 7.0], [0.5, 0.5, 1e30]], 4, backend=backend)
    assert torch.allclose(far, pyramid[-1].expand(2, 3, 4, 4), atol=1e-6)
    for levels in (1, 2):
        check(ctx, lod.mipmap(noise(2, 3, 41, 57), levels=levels), random_sites(2, 20, 8.0), 5, backend)
    short = lod.mipmap(noise(1, 64, 64), levels=2)  # read at its last level, still 2^level pixels apart
    found = lod.gather_patches(short, [[0.5, 0.5, 3.0]], 2, backend=backend)
    expected = lod.gather_patches(short, [[0.5 - 4 / 64, 0.5 - 4 / 64, 1.0]], 1, backend=backend)
    assert torch.allclose(found[0, :, :1, :1], expected[0], atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_image_equals_its_pyramid(backend: Any, sample_error: float) -> None:
    image, sites = noise(2, 3, 50, 70), random_sites(2, 7, 3.4)
    whole = lod.gather_patches(lod.mipmap(image), sites, 14, backend=backend)
    alone = lod.gather_patches(image, sites, 14, backend=backend)
    assert torch.allclose(alone, whole, atol=1e-5 + sample_error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sites_for_every_image_and_for_each(backend: Any) -> None:
    image, sites = noise(3, 3, 40, 40), random_sites(1, 6)
    shared = lod.gather_patches(image, sites[0], 8, backend=backend)
    each = lod.gather_patches(image, sites.expand(3, -1, -1), 8, backend=backend)
    assert torch.equal(shared, each) and shared.shape == (3, 6, 3, 8, 8)
    for one in range(3):
        single = lod.gather_patches(image[one], sites[0], 8, backend=backend)
        assert torch.allclose(single, shared[one], atol=1e-5)


@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sites_read_in_parts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch: int, border: Any) -> None:
    """In whichever parts: each patch stands where its site does."""
    module = sys.modules["gpu_lod.gather_patches"]
    pyramid = lod.mipmap(noise(batch, 3, 96, 160, dtype=dtype), backend="torch")
    random, grid = random_sites(batch, 70), grid_sites(96, 160, 8, 1).expand(batch, -1, -1)
    for sites in (random, grid, torch.cat([random, grid[:, :17]], dim=1), random[:, :1]):
        for values in ({}, {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}):
            look = partial(lod.gather_patches, pyramid, sites, 8, border, **values, backend="torch")
            expected = look()
            with monkeypatch.context() as patch:
                patch.setattr(module, "_VALUES", 3 * 8 * 8 * 10)
                found = look()
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_normalised_as_image_processors_do(backend: Any, dtype: torch.dtype) -> None:
    image = noise(2, 3, 56, 70, dtype=dtype)
    sites = grid_sites(56, 70, 14)
    mean, std = (0.481, 0.457, 0.408), (0.268, 0.261, 0.275)
    unit = image.float() / (255 if dtype == torch.uint8 else 1)
    normal = (unit - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    expected = torch.stack([unfolded(one, 14) for one in normal])
    for into, tolerance in ((None, 1e-5), (torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        found = lod.gather_patches(image, sites, 14, mean=mean, std=std, dtype=into, backend=backend)
        stays = image.dtype if dtype.is_floating_point else torch.float32
        assert found.dtype == (into or stays)
        tolerance = max(tolerance, {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(found.dtype, 0.0))
        assert float((found.float() - expected).abs().max()) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_dtypes_are_rounded_once_to_nearest(backend: Any) -> None:
    image = noise(1, 64, 64)
    wide = lod.gather_patches(image, grid_sites(64, 64, 16), 16, backend=backend)
    for dtype in (torch.float16, torch.bfloat16):
        small = lod.gather_patches(image, grid_sites(64, 64, 16), 16, dtype=dtype, backend=backend)
        assert torch.equal(small, wide.to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_become_fractions_only_in_floats(backend: Any) -> None:
    image = torch.full((1, 20, 20), 51, dtype=torch.uint8)
    site = [[0.5, 0.5, 0.0]]
    assert bool((lod.gather_patches(image, site, 4, backend=backend) == 51).all())
    assert torch.allclose(lod.gather_patches(image, site, 4, dtype=torch.float32, backend=backend), torch.tensor(0.2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_border_zero_is_zero_after_normalisation(backend: Any) -> None:
    image = torch.ones(1, 8, 8)
    found = lod.gather_patches(image, [[0.0, 0.5, 0.0]], 4, border="zero", mean=[0.5], std=[0.25], backend=backend)
    assert torch.equal(found[0, 0], torch.tensor([0.0, 0.0, 2.0, 2.0]).expand(4, 4))
    clamped = lod.gather_patches(image, [[0.0, 0.5, 0.0]], 4, mean=[0.5], std=[0.25], backend=backend)
    assert torch.equal(clamped, torch.full((1, 1, 4, 4), 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_on_the_edge_itself_are_inside(backend: Any) -> None:
    """An odd patch at x = 0 has a column on the border, of whatever width the image is."""
    for width in (7, 29, 33, 100, 127):
        image, sites = torch.ones(1, width, width), [[0.0, 0.5, 0.0], [1.0, 0.5, 0.0]]
        found = lod.gather_patches(image, sites, 7, "zero", backend=backend)
        assert found.sum((1, 2, 3)).tolist() == [28.0, 28.0], width


def test_patches_of_the_grid_of_a_wide_picture_are_exact() -> None:
    for width in (20000, 30000, 60000):
        image = torch.arange(2.0 * width).view(1, 2, width)
        across = (torch.arange(0, width - 1, 2) + 1) / width
        sites = torch.stack([across, torch.full_like(across, 0.5), torch.zeros_like(across)], -1)
        found = lod.gather_patches(image, sites, 2, backend="torch")
        assert torch.equal(found, unfolded(image, 2)), width


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_way_of_a_gpu(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A row an invocation instead of a patch."""
    pyramid = lod.mipmap(noise(2, 3, 64, 96, dtype=dtype)).upload()
    monkeypatch.setattr(Sharing, "software", False)
    for patch in (1, 5, 14, 16):
        check(ctx, pyramid, random_sites(2, 9), patch, "gl")


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_stays_constant(backend: Any) -> None:
    found = lod.gather_patches(torch.full((3, 45, 30), 0.3), random_sites(1, 20)[0], 14, backend=backend)
    assert float((found - 0.3).abs().max()) < 1e-6


def test_gradient_in_the_image_is_the_adjoint() -> None:
    sites = random_sites(2, 9)
    for border in ("clamp", "zero"):
        for backend in BACKENDS:
            image = noise(2, 3, 24, 30).requires_grad_()
            y = torch.randn(2, 9, 3, 7, 7)
            forward = (lod.gather_patches(image, sites, 7, border=border, backend=backend) * y).sum()
            (adjoint,) = torch.autograd.grad(forward, image)
            assert abs(float(((image * adjoint).sum() - forward).detach())) < 1e-5 * float(y.abs().sum()), backend


class Largest(TorchDispatchMode):
    """Notes the most bytes that a tensor takes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.nbytes = max([self.nbytes, *(x.untyped_storage().nbytes() for x in made)])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradient_takes_no_more_than_what_is_read(dtype: torch.dtype) -> None:
    """Slices that overlap, and samples between texels: whatever the patch, no tensor is larger than picture or
    result in fp32."""
    image = noise(2, 3, 160, 200, dtype=dtype).requires_grad_()
    grid = grid_sites(160, 200, 8)[:50]
    near = grid - torch.tensor([2 / 200, 1 / 160, 0.0]) * (grid > 0.1)
    expected = torch.zeros(2, 3, 160, 200)
    y = torch.randn(2, 100, 3, 8, 8).to(dtype)
    at = torch.cat([grid, near])
    corner = ((at[:, :2] * torch.tensor([200, 160])).round() - 4).int().tolist()
    for k, (left, top) in enumerate(corner):
        expected[:, :, top : top + 8, left : left + 8] += y[:, k].float()
    with Largest() as largest:
        found = lod.gather_patches(image, at, 8, backend="torch")
        found.backward(y)
    assert found.grad_fn is not None and image.grad is not None
    assert torch.equal(image.grad, expected.to(dtype)), "rounded once"
    assert largest.nbytes <= 4 * max(image.numel(), found.numel())
    image.grad = None
    with Largest() as largest:
        lod.gather_patches(image, at + torch.tensor([0, 0, 0.4]), 8, backend="torch").backward(y)
    assert largest.nbytes <= 4 * max(image.numel(), 4 * found.numel())
    image.grad = None
    many = lod.gather_patches(image, grid[:1].expand(2000, -1), 8, dtype=torch.float32, backend="torch")
    (1.0005 * many).sum().backward()  # whose half is 1.001
    assert float(image.grad.max()) == pytest.approx(2001, abs=0.5)


def test_slices_of_several_levels_are_copied_as_they_are() -> None:
    pyramid = lod.mipmap(noise(3, 512, 512, dtype=torch.uint8), backend="torch")
    sites = torch.cat([grid_sites(512, 512, 16, level) for level in (0, 1, 2)])
    with Largest() as largest:
        found = lod.gather_patches(pyramid, sites, 16, backend="torch")
    assert largest.nbytes <= found.nbytes and found.dtype == torch.uint8


@pytest.mark.parametrize("level", [0.0, 1.0, 0.4, 2.5])
@pytest.mark.parametrize("shift", [0.0, 0.003])
def test_gradient_in_the_image_is_the_same_beside_one_in_the_sites(level: float, shift: float) -> None:
    """Of slices, whole levels, between them, and beyond the last."""
    sites = grid_sites(64, 64, 8, 1) + torch.tensor([shift, shift, 0.0])
    sites[:, 2] = level
    chain, look, found = (
        lod.mipmap(noise(3, 64, 64), levels=2).levels,
        Look(8, False, None, (0.0,) * 3, torch.float32),
        [],
    )
    for asked in (False, True):
        levels = [x.detach().clone().requires_grad_() for x in chain]
        made = reference(levels, sites[None].clone().requires_grad_(asked), look)
        loss = (made * made.detach()).sum()
        found.append(torch.autograd.grad(loss, levels, materialize_grads=True, allow_unused=True))
    for one, expected in zip(*found, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


def test_border_of_large_patches_does_not_depend_on_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = lod.gather_patches(torch.ones(1, 700, 700).float(), [[0.7, 0.5, 0.0]], 600, "zero", backend="torch")
    finally:
        torch.set_default_dtype(before)
    assert int((found[0, 0, 300] == 0).sum()) == 90


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(2048, 2048), (777, 3001)], ids=str)
def test_places_in_large_pictures_are_exact(backend: Any, size: tuple[int, int], sample_error: float) -> None:
    """In white noise a hundredth of a texel shows; float64 moves centres near half pixels there as fp32 does."""
    pyramid = lod.mipmap(noise(1, *size), levels=5)
    sites = random_sites(1, 60, 7.0)[0]
    found = lod.gather_patches(pyramid, sites, 14, backend=backend)
    look = Look(14, False, None, (0.0,), torch.float64)
    expected = reference([level.double() for level in pyramid.levels], sites[None].double(), look)
    slack = sample_error if backend == "gl" else 0.0
    assert_matches(found, expected, "trilinear", slack=slack, where=f"{backend} {size}")


def test_gradients_in_the_sites_are_the_torch_backends() -> None:
    torch.manual_seed(3)
    levels = [level.double()[None] for level in lod.mipmap(smooth(40, 56)).levels]
    look = Look(4, False, None, (0.0,) * 3, torch.float64)
    sites = torch.tensor([[[0.41, 0.37, 0.6], [0.52, 0.71, 1.3]]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(reference(levels, sites, look).sum(), sites)
    for index in range(6):
        small = torch.zeros(6, dtype=torch.float64)
        small[index] = 1e-6
        step = small.view_as(sites)
        after, before = (reference(levels, (sites + sign * step).detach(), look).sum() for sign in (1, -1))
        slope = float(after - before) / 2e-6
        assert math.isclose(float(found.flatten()[index]), slope, rel_tol=1e-5, abs_tol=1e-6), index
    image = smooth(40, 56)
    points = sites[0].detach().float().requires_grad_()
    assert lod.explain(lod.gather_patches, lod.mipmap(image).upload(), points, 4).backend == "torch"
    with pytest.raises(UnsupportedError, match="sites"):
        lod.gather_patches(image, points, 4, backend="gl")


@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize(("size", "patch"), [((13, 18), 4), ((16, 8), 3), ((7, 22), 8)], ids=str)
def test_every_pixel_and_edge_as_a_centre(ctx: lod.Context, border: Any, size: tuple[int, int], patch: int) -> None:
    """Samples are texels of the picture and of levels of even sides, inside it, across its edges, and nowhere else."""
    height, width = size
    centres = torch.cartesian_prod(torch.arange(2 * width + 1), torch.arange(2 * height + 1), torch.arange(3))
    sites = (centres * torch.tensor([0.5 / width, 0.5 / height, 1.0])).expand(2, -1, -1)
    check(ctx, lod.mipmap(noise(2, 3, *size)), sites, patch, *BACKENDS, border=border)


def test_sites_on_the_grid_and_on_whole_levels_have_gradients() -> None:
    """What is copied texel by texel where nobody asks; a plane's slope is the same on both sides of a texel."""
    y, x = (torch.arange(n, dtype=torch.float64) + 0.5 for n in (32, 48))
    levels = [(3 * x + 5 * y[:, None])[None, None], (7 - 2 * x[:24] + 11 * y[:16, None])[None, None]]
    look = Look(4, False, None, (0.0,), torch.float64)
    on_grid = [[0.25, 0.25, 0.0], [0.5, 0.5, 1.0]]
    sites = torch.tensor([[*on_grid, [0.26, 0.41, 0.0], [0.3, 0.7, 0.6]]], dtype=torch.float64)
    for chosen in (sites, sites[:, :1], sites[:, 2:]):
        for chain in (levels, levels[:1]):
            asked = chosen.clone().requires_grad_()
            made = reference(chain, asked, look)
            weights = torch.randn(made.shape, dtype=torch.float64)
            (found,) = torch.autograd.grad((made * weights).sum(), asked)
            assert torch.equal(made.detach(), reference(chain, chosen, look))
            for index in range(chosen.numel()):
                small = torch.zeros(chosen.numel(), dtype=torch.float64)
                small[index] = 1e-5
                after = reference(chain, chosen + small.view_as(chosen), look)
                slope = float(((after - made.detach()) * weights).sum()) / 1e-5
                assert math.isclose(float(found.flatten()[index]), slope, rel_tol=1e-4, abs_tol=1e-2), index
    image = noise(1, 3, 28, 42)
    image[0, 0, 0, 0], image[0, 1, 15, 20] = math.inf, math.nan
    points = torch.tensor([[1 / 6, 0.25, 0.0], [0.5, 0.75, 0.0], [0.5, 0.5, 0.0]])
    asked = points.clone().requires_grad_()
    found = lod.gather_patches(image, asked, 14)
    assert torch.equal(found.nan_to_num(7), lod.gather_patches(image, points, 14).nan_to_num(7))
    clean = image.nan_to_num(0, 0)
    of_image, of_pyramid = (
        torch.autograd.grad(lod.gather_patches(src, asked, 14).square().sum(), asked)[0]
        for src in (clean, lod.mipmap(clean))
    )
    assert torch.equal(of_image, of_pyramid) and bool(of_image.all()), "also in the level, of a picture alone"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("patch", [7, 14])
def test_low_storage_limit_splits(
    restored_limits: lod.Context, patch: int, dtype: torch.dtype, sample_error: float
) -> None:
    pyramid = lod.mipmap(noise(5, 3, 32, 32, dtype=dtype), backend="gl").upload()
    sites = random_sites(5, 20)
    whole = lod.gather_patches(pyramid, sites, patch, backend="gl")
    for limit in (6000, 1300):
        restored_limits.limits.storage_bytes = limit
        split = lod.gather_patches(pyramid, sites, patch, backend="gl")
        assert float((split.float() - whole.float()).abs().max()) <= sample_error * stored_range(dtype)
    restored_limits.limits.storage_bytes = 1024
    with pytest.raises(LimitError, match="sites"):
        lod.gather_patches(pyramid, sites, patch, backend="gl")


@pytest.mark.parametrize("most", [300, 200], ids=["of a buffer", "of an array"])
def test_more_images_than_layers(restored_limits: lod.Context, most: int) -> None:
    restored_limits.limits.layers = 256
    restored_limits.limits.texels = most * (6 * 6 + 3 * 3 + 1)
    pyramid = lod.mipmap(noise(600, 1, 6, 6))
    check(restored_limits, pyramid, random_sites(600, 2), 3, "gl")


@pytest.mark.parametrize(("dtype", "patch"), [(torch.uint8, 14), (torch.uint8, 4), (torch.float32, 4)])
def test_65536_sites(dtype: torch.dtype, patch: int, sample_error: float) -> None:
    image = noise(2, 1, 64, 64, dtype=dtype)
    sites = torch.rand(2, 65536, 3) * torch.tensor([1.0, 1.0, 3.0])
    found = lod.gather_patches(image, sites, patch, backend="gl")
    expected = lod.gather_patches(image, sites, patch, backend="torch")
    assert found.shape == (2, 65536, 1, patch, patch)
    most = 1 + 255 * sample_error if dtype == torch.uint8 else 5e-5 + sample_error
    assert float((found.float() - expected.float()).abs().max()) <= most


@pytest.mark.parametrize("patch", [1, 1030])
def test_smallest_and_huge_patches(patch: int) -> None:
    image = noise(1, 40, 1100)
    site = [[0.5, 0.5, 0.0]]
    found, expected = (lod.gather_patches(image, site, patch, backend=backend) for backend in BACKENDS)
    assert float((found - expected).abs().max()) < 2e-4


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"sites": torch.tensor([[0.5, 1.01, 0.0]])}, r"y from .*\[0, 1\]"),
        ({"sites": torch.tensor([[-0.1, 0.5, 0.0]])}, r"x from"),
        ({"sites": torch.tensor([[float("nan"), 0.5, 0.0]])}, "nan"),
        ({"sites": torch.tensor([[0.5, 0.5, -0.5]])}, "levels from -0.5"),
        ({"sites": torch.tensor([[0.5, 0.5, float("inf")]])}, "levels"),
        ({"sites": torch.tensor([[0.5, 0.5, float("nan")]])}, "levels"),
        ({"sites": torch.zeros(0, 3)}, "none"),
        ({"sites": torch.zeros(4, 2)}, r"\(4, 2\)"),
        ({"sites": torch.zeros(3)}, r"\(3,\)"),
        ({"sites": torch.zeros(3, 4, 3)}, r"\[2, K, 3\]"),
        ({"sites": "everywhere"}, "sites"),
        ({"sites": torch.zeros(4, 3, dtype=torch.complex64)}, "complex"),
        ({"sites": torch.ones(4, 3, dtype=torch.bool)}, "bool"),
        ({"sites": torch.zeros(4, 3).to_sparse()}, "sparse"),
        ({"sites": torch.zeros(4, 3, device="meta")}, "with data"),
        ({"patch": 0}, "patch"),
        ({"patch": -3}, "patch"),
        ({"patch": 2.5}, "patch"),
        ({"patch": True}, "patch"),
        ({"border": "wrap"}, "'clamp', 'zero'"),
        ({"mean": [0.5]}, "3 numbers"),
        ({"mean": 0.5}, "3 numbers"),
        ({"std": [1.0, 0.0, 1.0]}, "differ from 0"),
        ({"std": [1.0, float("nan"), 1.0]}, "finite"),
        ({"dtype": torch.int32}, "torch.float16"),
        ({"dtype": torch.uint8, "mean": [0.5, 0.5, 0.5]}, "fractions"),
        ({"dtype": "half"}, "torch.float16"),
        ({"backend": "metal"}, "'torch'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], hint: str) -> None:
    image = noise(2, 3, 16, 16)
    good: dict[str, Any] = {"sites": torch.full((5, 3), 0.5), "patch": 4}
    for backend in BACKENDS:
        with pytest.raises(InputError, match=hint):
            lod.gather_patches(image, **{"backend": backend, **good, **arguments})
    assert lod.gather_patches(image, **good, backend="gl").shape == (2, 5, 3, 4, 4)


def test_wrong_sources() -> None:
    site = [[0.5, 0.5, 0.0]]
    with pytest.raises(InputError, match="gaussian pyramid"):
        lod.gather_patches(lod.gaussian(noise(1, 8, 8)), site, 4)
    with pytest.raises(InputError, match="max pyramid"):
        lod.gather_patches(lod.hiz(noise(1, 8, 8)), site, 4)
    with pytest.raises(InputError, match="tensor"):
        lod.gather_patches(None, site, 4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="channels"):
        lod.gather_patches(noise(40, 16, 16), site, 4, backend="gl")
    assert lod.gather_patches(noise(40, 16, 16), site, 4).shape == (1, 40, 4, 4)  # feature maps


def test_sites_changed_before_backward_change_nothing() -> None:
    def gradient(backend: Any, *, change: bool) -> torch.Tensor:
        torch.manual_seed(2)
        image, sites = noise(3, 24, 30).requires_grad_(), random_sites(1, 4)[0]
        loss = lod.gather_patches(image, sites, 6, backend=backend).square().sum()
        if change:
            sites.mul_(0.5)
        return torch.autograd.grad(loss, image)[0]

    for backend in BACKENDS:
        assert torch.equal(gradient(backend, change=True), gradient(backend, change=False))


def test_auto_uses_the_texture_units_once_the_texture_is_there(photo: torch.Tensor, unseeded: Path) -> None:
    pyramid = lod.mipmap(photo)
    sites = lod.cortical_sites((0.5, 0.5), 273, (512, 512))
    fastest("gl", lod.gather_patches, lod.mipmap(photo).upload(), sites)
    assert lod.explain(lod.gather_patches, photo, sites).backend == "torch"
    assert lod.explain(lod.gather_patches, pyramid, sites).backend == "torch"
    assert lod.explain(lod.gather_patches, pyramid.upload(), sites).backend == "gl"
    grid = grid_sites(512, 512, 14)[:273]
    fastest("torch", lod.gather_patches, pyramid, grid)
    assert lod.explain(lod.gather_patches, pyramid, grid).backend == "torch"
    fastest("gl", lod.gather_patches, pyramid, grid)
    assert lod.explain(lod.gather_patches, pyramid, grid).backend == "gl"


SAMPLERS: dict[str, Any] = {
    "log_polar": lambda src: lod.log_polar(src, (0.4, 0.6), 8, 12, generator="compute"),
    "foveate": lambda src: lod.foveate(src, (0.4, 0.6), backend="gl"),
    "gather_patches": lambda src: lod.gather_patches(src, [[0.4, 0.6, 0.7]], 5, backend="gl"),
}


def test_pyramids_uploaded_to_a_context_that_was_closed() -> None:
    """Samplers make the texture again in the context that is there."""
    succeed(
        """
        import torch, gpu_lod as lod
        image = torch.rand(3, 24, 30)
        for run in (
            lambda src: lod.log_polar(src, (0.4, 0.6), 8, 12, generator="compute"),
            lambda src: lod.foveate(src, (0.4, 0.6), backend="gl"),
            lambda src: lod.gather_patches(src, [[0.4, 0.6, 0.7]], 5, backend="gl"),
        ):
            pyramid = lod.mipmap(image).upload()
            expected = run(pyramid).clone()
            lod.Context().close()
            assert pyramid.texture_context() is None
            assert torch.equal(run(pyramid), expected)
        """
    )


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_pyramid_whose_source_was_written_to_is_refused(name: str) -> None:
    image = noise(3, 24, 30)
    pyramid = lod.mipmap(image).upload()
    SAMPLERS[name](pyramid)
    image.mul_(0.5)
    with pytest.raises(PyramidChangedError):
        SAMPLERS[name](pyramid)


@pytest.mark.parametrize("backend", ["gl", "torch"])
def test_levels_are_blended_in_proportion(backend: Any) -> None:
    levels, sites, expected = grey_levels("cpu")
    found = lod.gather_patches(lod.Pyramid(levels), sites, 1, backend=backend).flatten()
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
