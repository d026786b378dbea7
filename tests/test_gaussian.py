"""Gaussian and Laplacian pyramids: shader against reference() against float64, and against OpenCV."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from compare import assert_matches
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, SIZES, noise, smooth
from oracle import gaussian_chain, laplacian_chain
from torch.utils import _pytree

import gpu_lod as lod
from gpu_lod.binomial import BINOMIAL, expand
from gpu_lod.errors import InputError, LimitError, PyramidChangedError
from gpu_lod.gaussian import reference as gaussian_reference
from gpu_lod.laplacian import collapse_reference
from gpu_lod.laplacian import reference as laplacian_reference

module = sys.modules["gpu_lod.gaussian"]

BACKENDS: list[Any] = ["torch", "gl"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gaussian_parity(backend: Any, dtype: torch.dtype) -> None:
    for height, width in SIZES:
        for shape in ((2, 5, height, width), (1, height, width)):
            image = noise(*shape, dtype=dtype)
            pyramid = lod.gaussian(image, backend=backend)
            truth = gaussian_chain(image)
            assert pyramid.reduce == "gaussian" and len(pyramid) == len(truth)
            for level, expected in zip(pyramid, truth, strict=True):
                assert level.dtype == dtype and level.is_contiguous()
                assert_matches(level, expected, "binomial", where=f"{shape}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_laplacian_parity(backend: Any, dtype: torch.dtype) -> None:
    """uint8 images give float32 counts; their tolerance is float32's, of 255."""
    for height, width in SIZES:
        image = noise(2, 3, height, width, dtype=dtype)
        pyramid = lod.laplacian(image, backend=backend)
        counts = dtype == torch.uint8
        assert pyramid.dtype == (torch.float32 if counts else dtype) and pyramid.reduce == "laplacian"
        for level, expected in zip(pyramid, laplacian_chain(image), strict=True):
            scale = 255 if counts else 1
            assert_matches(level / scale, expected / scale, "binomial", where=f"{height} x {width}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "worst"), [(torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.uint8, 1e-6)]
)
def test_collapse_gives_the_image_back(backend: Any, dtype: torch.dtype, worst: float) -> None:
    for height, width in [*SIZES, (333, 257)]:
        for levels in (None, 1, 2):
            if levels is not None and levels > max(height, width):
                continue
            image = noise(2, 3, height, width, dtype=dtype)
            back = lod.collapse(lod.laplacian(image, levels, backend), backend)
            scale = 255 if dtype == torch.uint8 else 1
            assert float((back.double() - image.double()).abs().max()) <= worst * scale, (height, width, levels)


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_pictures(backend: Any, photo: torch.Tensor, page: torch.Tensor) -> None:
    for image in (photo, page):
        for level, expected in zip(lod.gaussian(image, 5, backend), gaussian_chain(image, 5), strict=True):
            assert_matches(level, expected, "binomial")
        back = lod.collapse(lod.laplacian(image, backend=backend), backend)
        assert float((back - image).abs().max()) < 255e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_the_gaussian_is_opencvs_pyrdown(backend: Any, dtype: torch.dtype, photo: torch.Tensor) -> None:
    """OpenCV rounds counts at every level, we once: half a count, and what is left of those above."""
    whole = photo if dtype == torch.uint8 else photo.float() / 255
    for image in (whole, whole[:, :333, :257], noise(3, 7, 5, dtype=dtype)):
        array = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
        for level in lod.gaussian(image, backend=backend).levels[1:]:
            array = cv2.pyrDown(array)
            expected = torch.from_numpy(array).view(*level.shape[-2:], 3).permute(2, 0, 1)
            worst = float((level.float() - expected.float()).abs().max())
            assert worst <= (1 if dtype == torch.uint8 else 1e-5)


@pytest.mark.parametrize("size", [(2, 2), (3, 3), (5, 4), (8, 9), (64, 33)])
def test_convention_up_is_opencvs_pyrup(size: tuple[int, int]) -> None:
    """Mirrored before the first sample, repeated after the last."""
    height, width = size
    coarse = noise(3, -(-height // 2), -(-width // 2))
    array = np.ascontiguousarray(coarse.permute(1, 2, 0).numpy())
    expected = torch.from_numpy(cv2.pyrUp(array, dstsize=(width, height))).permute(2, 0, 1)
    assert float((expand(coarse, height, width) - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_samples_stand_on_every_other_texel(backend: Any) -> None:
    """A single bright texel at (4, 6) is the peak of sample (2, 3), and of (1, 1.5) a level further."""
    image = torch.zeros(1, 16, 16)
    image[0, 6, 4] = 1.0
    one = lod.gaussian(image, 2, backend)
    assert one[1].flatten().argmax() == 3 * 8 + 2 and float(one[1].max()) == pytest.approx((6 / 16) ** 2)
    assert one.position(0) == one.position(1) == (0.5, 0.5)
    assert lod.mipmap(image).position(1) == (1.0, 1.0)
    assert lod.mipmap(torch.zeros(1, 5, 7)).position(1) == pytest.approx((7 / 3 / 2, 5 / 2 / 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_constants_stay(backend: Any) -> None:
    image = torch.full((1, 3, 37, 22), 0.7)
    for level in lod.gaussian(image, backend=backend):
        assert torch.allclose(level, torch.tensor(0.7), atol=1e-6)
    for level in lod.laplacian(image, backend=backend).levels[:-1]:
        assert float(level.abs().max()) < 1e-6


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_any_size(height: int, width: int, seed: int) -> None:
    image = torch.rand(1, height, width, generator=torch.Generator().manual_seed(seed))
    for one, two in zip(lod.gaussian(image, backend="gl"), gaussian_chain(image), strict=True):
        assert_matches(one, two, "binomial")
    assert torch.allclose(lod.collapse(lod.laplacian(image, backend="gl"), "gl"), image, atol=1e-6)


@pytest.mark.parametrize("height", [1, 2, 3, 4, 7, 9, 70])
@pytest.mark.parametrize("width", [8, 16, 24, 40, 72])
def test_rows_of_whole_vectors_take_a_shader_of_their_own(
    ctx: lod.Context, monkeypatch: pytest.MonkeyPatch, height: int, width: int
) -> None:
    image = noise(2, 3, height, width)
    if ctx.software:
        monkeypatch.setattr(module, "reduce_by", None)
    found = lod.gaussian(image, levels=2, backend="gl")
    assert_matches(found[-1], gaussian_chain(image)[len(found) - 1], "binomial")


@pytest.mark.parametrize("first", [0, 4, 8, 16, 32])
def test_images_anywhere_in_gl_memory(ctx: lod.Context, first: int) -> None:
    image = noise(2, 3, 12, 16)
    whole = ctx.empty(image.numel() + first // 4)
    inside = whole[first // 4 :].view(image.shape)
    inside.copy_(image)
    assert_matches(lod.gaussian(inside, backend="gl")[1], gaussian_chain(image)[1], "binomial")


def test_vectors_are_split_to_fit_bindings(restored_limits: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(3, 2, 70, 56)
    whole = lod.gaussian(image, levels=2, backend="gl")
    if restored_limits.software:
        monkeypatch.setattr(module, "reduce_by", None)
    for limit in (40_000, 6 * 1024, 3 * 1024):
        restored_limits.limits.storage_bytes = limit
        assert torch.equal(lod.gaussian(image, levels=2, backend="gl")[1], whole[1])


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "bound"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_work_is_split_to_fit_bindings(restored_limits: lod.Context, dtype: torch.dtype, fetched: bool) -> None:
    if not fetched:
        restored_limits.limits.texels = 0
    image = noise(3, 2, 70, 53, dtype=dtype)
    gaussians, differences = lod.gaussian(image, backend="gl"), lod.laplacian(image, backend="gl")
    back = lod.collapse(differences, "gl")
    restored_limits.limits.storage_bytes = 6 * 1024
    for one, two in zip(lod.gaussian(image, backend="gl"), gaussians, strict=True):
        assert torch.equal(one, two)
    for one, two in zip(lod.laplacian(image, backend="gl"), differences, strict=True):
        assert torch.equal(one, two)
    assert torch.equal(lod.collapse(differences, "gl"), back)
    restored_limits.limits.storage_bytes = 512
    with pytest.raises(LimitError):
        lod.gaussian(image, backend="gl")


# -- gradients ---------------------------------------------------------------------------------------------------------


VERBS: dict[str, Callable[[torch.Tensor, Any], list[torch.Tensor]]] = {
    "gaussian": lambda x, backend: list(lod.gaussian(x, backend=backend))[1:],
    "laplacian": lambda x, backend: list(lod.laplacian(x, backend=backend)),
    "collapse": lambda x, backend: [lod.collapse(lod.laplacian(x, backend=backend), backend)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("verb", VERBS)
def test_backward_is_the_adjoint(verb: str, backend: Any) -> None:
    """<A x, y> = <x, A' y>"""
    x = noise(2, 3, 23, 18).requires_grad_()
    outputs = VERBS[verb](x, backend)
    ys = [torch.rand_like(output) for output in outputs]
    (back,) = torch.autograd.grad(outputs, x, ys)
    left = sum(float((output.detach() * y).double().sum()) for output, y in zip(outputs, ys, strict=True))
    assert float((x.detach() * back).double().sum()) == pytest.approx(left, rel=1e-5)


def test_gradcheck() -> None:
    x = torch.rand(1, 2, 5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: tuple(gaussian_reference(v, 3)[1:]), x)
    assert torch.autograd.gradcheck(lambda v: tuple(laplacian_reference(v, 3)), x)
    levels = [level.detach().requires_grad_() for level in laplacian_reference(x, 3)]
    assert torch.autograd.gradcheck(lambda *v: collapse_reference(list(v)), levels)


# -- pyramids and errors ----------------------------------------------------------------------------------------------


def test_they_are_pyramids() -> None:
    pyramid = lod.laplacian(noise(1, 2, 9, 6))
    copy = pickle.loads(pickle.dumps(pyramid))
    assert copy.reduce == "laplacian" and all(torch.equal(a, b) for a, b in zip(copy, pyramid, strict=True))
    half = _pytree.tree_map(lambda level: level * 0.5, pyramid)
    assert torch.allclose(lod.collapse(half), lod.collapse(pyramid) * 0.5, atol=1e-6)
    with pytest.raises(InputError, match="round up"):
        lod.Pyramid((torch.zeros(1, 5, 5), torch.zeros(1, 2, 2)), "gaussian")
    with pytest.raises(InputError, match="round down"):
        lod.Pyramid((torch.zeros(1, 5, 5), torch.zeros(1, 3, 3)), "mean")


def test_samplers_do_not_take_them() -> None:
    pyramid = lod.gaussian(noise(1, 16, 16))
    with pytest.raises(InputError, match="mean"):
        lod.log_polar(pyramid, (0.5, 0.5), 4, 4)
    with pytest.raises(InputError, match="texel centres"):
        pyramid.upload()
    with pytest.raises(InputError, match="max pyramid"):
        lod.cull(pyramid, 0.5)


@pytest.mark.parametrize("verb", [lod.gaussian, lod.laplacian])
def test_bad_input(verb: Any) -> None:
    with pytest.raises(InputError, match="has 5 down to 1 x 1"):
        verb(torch.zeros(1, 9, 4), 6)
    with pytest.raises(InputError, match="expected"):
        verb(torch.zeros(9, 4))
    with pytest.raises(InputError, match="float64"):
        verb(torch.zeros(1, 9, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="'auto'"):
        verb(torch.zeros(1, 9, 4), backend="cpu")
    assert lod.explain(verb, torch.zeros(1, 9, 4)).backend == "torch"


def test_collapse_wants_a_laplacian_pyramid() -> None:
    for other in (lod.gaussian(smooth(8, 8)), lod.mipmap(smooth(8, 8)), torch.zeros(1, 4, 4)):
        with pytest.raises(InputError, match="laplacian"):
            lod.collapse(other)  # type: ignore[arg-type]
    pyramid = lod.laplacian(smooth(8, 8))
    pyramid[0].add_(1)
    with pytest.raises(PyramidChangedError):
        lod.collapse(pyramid)
    assert lod.explain(lod.collapse, lod.laplacian(smooth(8, 8))).backend == "torch"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # its own
def test_convention_beside_kornia() -> None:
    """kornia's pyrdown blurs with the same binomial and mirrors alike, but then resamples bilinearly, halfway between
    samples: our level is every other sample of its blurred picture, its own the mean of 2 x 2 of them."""
    from kornia.filters import filter2d
    from kornia.geometry.transform import build_pyramid, pyrdown

    image = noise(2, 3, 40, 56)
    side = torch.tensor(BINOMIAL)
    blurred = filter2d(image, (side[:, None] * side)[None], border_type="reflect")
    for backend in BACKENDS:
        ours = lod.gaussian(image, 2, backend=backend)[1]
        assert torch.allclose(ours, blurred[..., ::2, ::2], atol=1e-6)
    theirs = pyrdown(image)
    assert torch.allclose(theirs, torch.nn.functional.avg_pool2d(blurred, 2), atol=1e-6)
    assert torch.allclose(build_pyramid(image, 2)[1], theirs, atol=1e-6)
    assert float((theirs - ours).abs().max()) > 0.05  # not the same grid


def test_sums_in_place_are_those_of_mirrored_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes the ones for large levels, the others for small ones."""
    module = sys.modules["gpu_lod.binomial"]
    for height in range(1, 10):
        for width in range(1, 10):
            x = noise(2, height, width).double()
            made = []
            for large in (1, 2**40):
                monkeypatch.setattr(module, "_LARGE", large)
                made.append(module.reduce(x))
            torch.testing.assert_close(*made, rtol=0, atol=1e-14)


def test_levels_expanded_in_place_are_those_of_joined_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes the ones for large levels, the others for small ones."""
    module = sys.modules["gpu_lod.binomial"]
    for height in range(1, 10):
        for width in range(1, 10):
            image = noise(2, height, width).double()
            made, back = [], []
            for large in (1, 2**40):
                monkeypatch.setattr(module, "_LARGE", large)
                made.append(laplacian_reference(image, 3 if max(height, width) > 2 else 1))
                back.append(collapse_reference(made[0]))
            for one, other in zip(*made, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
            torch.testing.assert_close(*back, rtol=0, atol=1e-14)
            torch.testing.assert_close(back[0], image, rtol=0, atol=1e-14)
