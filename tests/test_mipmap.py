"""Mip chains: shader against reference() against float64."""

from __future__ import annotations

import copy
import importlib
import io
import math
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_matches
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, SIZES, noise
from oracle import extreme_chain, mean_chain
from torch.fx.experimental.proxy_tensor import make_fx

import gpu_lod as lod
from gpu_lod import halving
from gpu_lod.conversion import conversion
from gpu_lod.errors import InputError, LimitError, PyramidChangedError, UnsupportedError
from gpu_lod.halving import halve_mean
from gpu_lod.mipmap import reference
from gpu_lod.pyramid import level_sizes

pytestmark = pytest.mark.threads

EXACT_GENERATORS = ("compute", "registers", "single-pass", "fragment")


def expected_chain(image: torch.Tensor, reduce: str, levels: int | None = None) -> list[torch.Tensor]:
    return mean_chain(image, levels) if reduce == "mean" else extreme_chain(image, reduce, levels)


def check(pyramid: lod.Pyramid, image: torch.Tensor, reduce: str) -> None:
    kind = "box" if reduce == "mean" else "exact"
    expected = expected_chain(image, reduce, len(pyramid))
    for level, (actual, oracle) in enumerate(zip(pyramid, expected, strict=True)):
        assert actual.dtype == image.dtype
        assert actual.is_contiguous() or level == 0
        assert_matches(actual, oracle, kind, where=f"level {level} of {tuple(image.shape)}")


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["torch", *EXACT_GENERATORS])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_parity(way: str, size: tuple[int, int], dtype: torch.dtype, reduce: str) -> None:
    for batch, channels in ((1, 1), (2, 3), (3, 4), (1, 2)):
        image = noise(batch, channels, *size, dtype=dtype)
        if way == "torch":
            pyramid = lod.mipmap(image, reduce=reduce, backend="torch")
        else:
            pyramid = lod.mipmap(image, reduce=reduce, generator=way)
        assert pyramid.generator == way
        check(pyramid, image, reduce)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (16, 16), (64, 16), (8, 128)], ids=str)
def test_driver_parity_at_powers_of_two(size: tuple[int, int], dtype: torch.dtype) -> None:
    for batch, channels in ((1, 1), (2, 3), (3, 4), (1, 2)):
        image = noise(batch, channels, *size, dtype=dtype)
        check(lod.mipmap(image, generator="driver"), image, "mean")


def test_driver_rounds_at_every_level() -> None:
    """Within a count of the average of its own last level, not of the exact mean."""
    image = noise(2, 3, 64, 64, dtype=torch.uint8)
    pyramid = lod.mipmap(image, generator="driver")
    for above, level in zip(pyramid.levels, pyramid.levels[1:], strict=False):
        assert_matches(level, mean_chain(above, 2)[1], "box")


@pytest.mark.parametrize("way", ["torch", *EXACT_GENERATORS])
def test_real_pictures(way: str, photo: torch.Tensor, page: torch.Tensor) -> None:
    for image in (photo, page):
        pyramid = lod.mipmap(image, backend="torch") if way == "torch" else lod.mipmap(image, generator=way)
        check(pyramid, image, "mean")


@pytest.mark.parametrize("generator", EXACT_GENERATORS)
def test_convention_level_sizes_and_unbatched(generator: str) -> None:
    image = noise(3, 13, 22)
    pyramid = lod.mipmap(image, generator=generator)
    assert [tuple(level.shape) for level in pyramid] == [(3, 13, 22), (3, 6, 11), (3, 3, 5), (3, 1, 2), (3, 1, 1)]
    assert len(lod.mipmap(image, levels=2, generator=generator)) == 2
    only = lod.mipmap(image, levels=1, generator=generator)
    assert torch.equal(only[0], image)


def test_convention_odd_side_weights() -> None:
    """n = 5, m = 2: output 0 weighs inputs 0, 1, 2 by 2/5, 2/5, 1/5; output 1 weighs 2, 3, 4 by 1/5, 2/5, 2/5."""
    for generator in EXACT_GENERATORS:
        impulse = torch.eye(5).view(5, 1, 1, 5)
        level = lod.mipmap(impulse, levels=2, generator=generator)[1].view(5, 2).T
        assert torch.allclose(level, torch.tensor([[2, 2, 1, 0, 0], [0, 0, 1, 2, 2]]) / 5)


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(["torch", *EXACT_GENERATORS]), st.integers(0, 2**31))
def test_every_level_keeps_the_mean(height: int, width: int, way: str, seed: int) -> None:
    image = torch.rand(2, 1, height, width, generator=torch.Generator().manual_seed(seed))
    pyramid = lod.mipmap(image, backend="torch") if way == "torch" else lod.mipmap(image, generator=way)
    mean = image.double().mean(dim=(-2, -1))
    for level in pyramid:
        assert (level.double().mean(dim=(-2, -1)) - mean).abs().max() < 2e-6


@pytest.mark.parametrize("way", ["torch", *EXACT_GENERATORS])
def test_constant_stays_constant(way: str) -> None:
    image = torch.full((1, 3, 37, 53), 0.7)
    pyramid = lod.mipmap(image, backend="torch") if way == "torch" else lod.mipmap(image, generator=way)
    for level in pyramid:
        assert (level - 0.7).abs().max() < 3e-7


@pytest.mark.parametrize("generator", [*EXACT_GENERATORS, "driver"])
def test_input_layouts(generator: str) -> None:
    """Views, broadcasts and foreign memory formats give what a contiguous copy gives."""
    base = noise(2, 3, 32, 64)
    layouts = {
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": base.transpose(-1, -2),
        "strided": noise(2, 3, 64, 128)[..., ::2, ::2],
        "expanded": noise(1, 1, 32, 32).expand(2, 3, 32, 32),
        "flipped": base.flip(-1),
        "offset": noise(2 * 3 * 32 * 32 + 1)[1:].view(2, 3, 32, 32),
    }
    for name, image in layouts.items():
        expected = lod.mipmap(image.contiguous().clone(), generator=generator)
        for actual, level in zip(lod.mipmap(image, generator=generator), expected, strict=True):
            assert torch.equal(actual, level), name


def test_inference_mode(ctx: lod.Context) -> None:
    with torch.inference_mode():
        image = noise(1, 3, 33, 17)
        for pyramid in (lod.mipmap(image, generator="compute"), lod.mipmap(image)):
            check(pyramid, image, "mean")


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_gradients_through_gl_equal_the_reference(reduce: str) -> None:
    image = noise(2, 3, 21, 30).requires_grad_()
    weights = [torch.rand_like(level) for level in lod.mipmap(image.detach(), reduce=reduce)]

    def gradient(**how: str) -> torch.Tensor:
        pyramid = lod.mipmap(image, reduce=reduce, **how)
        loss = sum((level * weight).sum() for level, weight in zip(pyramid, weights, strict=True))
        return torch.autograd.grad(loss, image)[0]

    assert torch.allclose(gradient(generator="compute"), gradient(backend="torch"), atol=1e-6)


def test_mean_backward_is_the_adjoint() -> None:
    """<A x, y> = <x, A' y>."""
    x = noise(1, 2, 19, 24).requires_grad_()
    pyramid = lod.mipmap(x, generator="compute")
    ys = [torch.randn_like(level) for level in pyramid]
    forward = sum((level * y).sum() for level, y in zip(pyramid, ys, strict=True))
    (adjoint,) = torch.autograd.grad(forward, x)
    assert abs(float(((x * adjoint).sum() - forward).detach())) < 1e-4


def test_gl_tensor_in_is_level_zero(ctx: lod.Context) -> None:
    """A tensor in GL memory is not copied on the way in, and results are in GL memory too."""
    image = ctx.empty(2, 3, 24, 31)
    image.copy_(noise(2, 3, 24, 31))
    pyramid = lod.mipmap(image, generator="compute")
    assert pyramid[0].data_ptr() == image.data_ptr()
    assert all(ctx.owns(level) for level in pyramid)
    check(pyramid, image.clone(), "mean")
    part = image[1:, :, 3:]  # a view that is not contiguous, and one at an odd offset
    check(lod.mipmap(part, generator="compute"), part.clone(), "mean")
    tail = ctx.empty(1 * 1 * 9 * 11 + 3, dtype=torch.uint8)
    tail.copy_(noise(tail.numel(), dtype=torch.uint8))
    view = tail[3:].view(1, 1, 9, 11)
    for reduce in ("mean", "max"):
        check(lod.mipmap(view, reduce=reduce, generator="compute"), view.clone(), reduce)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("generator", ["compute", "registers", "fragment", "driver"])
@pytest.mark.parametrize("limit", [5500, 9000, 40_000])
def test_low_storage_limit_splits(restored_limits: lod.Context, generator: str, dtype: torch.dtype, limit: int) -> None:
    image = noise(5, 3, 64, 64, dtype=dtype)
    whole = lod.mipmap(image, generator=generator)
    restored_limits.limits.storage_bytes = limit
    for actual, expected in zip(lod.mipmap(image, generator=generator), whole, strict=True):
        assert torch.equal(actual, expected)
    if generator != "driver":
        odd = noise(2, 3, 61, 67, dtype=dtype)
        check(lod.mipmap(odd, generator=generator), odd, "mean")


@pytest.mark.parametrize("channels", [1, 3])
def test_more_images_than_layers(restored_limits: lod.Context, channels: int) -> None:
    image = noise(600, channels, 5, 6, dtype=torch.uint8)
    whole = lod.mipmap(image, generator="driver")  # leaves odd sides open
    restored_limits.limits.layers = 256
    for generator in ("fragment", "compute"):
        check(lod.mipmap(image, generator=generator), image, "mean")
    check(lod.hiz(image[:, :1], generator="sampler"), image[:, :1], "max")
    for actual, expected in zip(lod.mipmap(image, generator="driver"), whole, strict=True):
        assert torch.equal(actual, expected)


def test_a_row_above_the_limit_is_refused(restored_limits: lod.Context) -> None:
    image = noise(1, 1, 4, 4096)
    restored_limits.limits.storage_bytes = 2048
    with pytest.raises(LimitError, match="storage-buffer"):
        lod.mipmap(image, generator="compute")
    restored_limits.limits.storage_bytes = 2**27
    check(lod.mipmap(image, generator="compute"), image, "mean")


def test_texture_limit_is_refused_where_textures_are_needed(restored_limits: lod.Context) -> None:
    restored_limits.limits.texture_size = 32
    image = noise(1, 1, 8, 33)
    for generator in ("fragment", "driver"):
        with pytest.raises(LimitError, match="compute"):
            lod.mipmap(image, generator=generator)
    check(lod.mipmap(image, generator="compute"), image, "mean")


def test_auto_never_picks_the_driver() -> None:
    for image in (noise(3, 64, 64, dtype=torch.uint8), noise(3, 63, 65)):
        assert lod.mipmap(image, backend="gl").generator != "driver"
        assert lod.explain(lod.mipmap, image).generator != "driver"


BAD = {
    "a list": ([[1.0]], "torch.tensor"),
    "rank 2": (torch.rand(4, 4), "unsqueeze"),
    "rank 5": (torch.rand(1, 1, 1, 4, 4), "expected"),
    "5 channels": (torch.rand(5, 4, 7), "1 to 4"),
    "channels last": (torch.rand(8, 8, 3), "movedim"),
    "float64": (torch.rand(3, 4, 4).double(), "float32"),
    "int64": (torch.ones(3, 4, 4, dtype=torch.int64), "uint8"),
    "bool": (torch.ones(3, 4, 4, dtype=torch.bool), "uint8"),
    "complex": (torch.ones(3, 4, 4, dtype=torch.complex64), "ordinary"),
    "empty side": (torch.rand(3, 0, 4), "at least 1"),
    "empty batch": (torch.rand(0, 3, 4, 4), "at least 1"),
    "sparse": (torch.rand(3, 4, 4).to_sparse(), "dense"),
    "meta": (torch.rand(3, 4, 4, device="meta"), "with data"),
}


@pytest.mark.parametrize("generator", ["auto", "compute"])
@pytest.mark.parametrize("name", BAD)
def test_bad_image(name: str, generator: str) -> None:
    image, hint = BAD[name]
    with pytest.raises(InputError, match=hint):
        lod.mipmap(image, generator=generator)
    image = noise(3, 8, 8)
    check(lod.mipmap(image, generator="compute"), image, "mean")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ({"levels": 5}, InputError, "has 4"),
        ({"levels": 0}, InputError, "at least 1"),
        ({"levels": 2.0}, InputError, "integer"),
        ({"levels": True}, InputError, "integer"),
        ({"reduce": "median"}, InputError, "'mean', 'max', 'min'"),
        ({"generator": "magic"}, InputError, "'compute'"),
        ({"backend": "vulkan"}, InputError, "'torch'"),
        ({"generator": "driver", "reduce": "max"}, UnsupportedError, "averages"),
        ({"generator": "compute", "backend": "torch"}, UnsupportedError, "leave it out"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], hint: str) -> None:
    with pytest.raises(error, match=hint):
        lod.mipmap(noise(3, 8, 8), **arguments)  # type: ignore[arg-type]


def test_a_changed_pyramid_is_refused() -> None:
    for generator in ("auto", "compute"):
        image = noise(3, 16, 16)
        pyramid = lod.mipmap(image, generator=generator)
        lod.log_polar(pyramid, (0.5, 0.5), 4, 4)
        pyramid[0].mul_(2)
        with pytest.raises(PyramidChangedError, match="again"):
            lod.log_polar(pyramid, (0.5, 0.5), 4, 4)
        with pytest.raises(PyramidChangedError):
            pyramid.packed  # noqa: B018


@pytest.mark.parametrize("way", ["torch", *EXACT_GENERATORS])
@pytest.mark.parametrize("size", [(4, 5), (5, 4), (1, 6), (6, 1), (6, 6), (5, 7)], ids=str)
def test_nan_and_infinity_stay_inside_their_footprints(way: str, size: tuple[int, int]) -> None:
    for value in (float("nan"), float("inf")):
        for index in range(size[0] * size[1]):
            image = torch.zeros(1, *size)
            image.view(-1)[index] = value
            pyramid = lod.mipmap(image, backend="torch") if way == "torch" else lod.mipmap(image, generator=way)
            touched = extreme_chain((~image.isfinite()).float(), "max")
            for level, reached in zip(pyramid, touched, strict=True):
                assert torch.equal(~level.isfinite(), reached > 0), (value, index)


def test_gradients_of_gradients() -> None:
    """A penalty on the gradient reaches the image through the GL path as through the reference."""

    def penalised(**how: str) -> torch.Tensor:
        torch.manual_seed(1)
        image = noise(2, 10, 14).requires_grad_()
        energy = sum((level**2).sum() for level in lod.mipmap(image, **how).levels[1:])
        (gradient,) = torch.autograd.grad(energy, image, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), image)[0]

    assert torch.allclose(penalised(generator="compute"), penalised(backend="torch"), atol=1e-6)


def test_pyramids_pickle_and_copy() -> None:
    for generator in ("auto", "compute"):
        pyramid = lod.mipmap(noise(3, 20, 30), generator=generator)
        expected = lod.log_polar(pyramid.upload(), (0.5, 0.5), 6, 6, backend="gl")
        file = io.BytesIO()
        torch.save(pyramid, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for other in (loaded, pickle.loads(pickle.dumps(pyramid)), copy.deepcopy(pyramid), copy.copy(pyramid)):
            assert repr(other) == repr(pyramid)
            assert torch.equal(lod.log_polar(other, (0.5, 0.5), 6, 6, backend="gl"), expected)


def test_pytree_sees_the_levels() -> None:
    pyramid = lod.mipmap(noise(3, 20, 30))
    doubled = torch.utils._pytree.tree_map(lambda level: level * 2, pyramid)
    assert isinstance(doubled, lod.Pyramid) and doubled.generator == "pytree" and doubled.reduce == "mean"
    assert all(torch.equal(a, 2 * b) for a, b in zip(doubled, pyramid, strict=True))
    wide = torch.utils._pytree.tree_map(lambda level: level.double(), lod.hiz(noise(1, 8, 8)))
    with pytest.raises(InputError, match="float64"):
        lod.cull(wide, 0.5, backend="gl")


def test_levels_that_do_not_belong_together_are_refused() -> None:
    for levels in (
        (noise(3, 64, 64), noise(3, 16, 16)),
        (noise(3, 5, 5), noise(3, 3, 3)),
        (noise(1, 2, 2), noise(2, 1, 1)),
    ):
        with pytest.raises(InputError, match="halve"):
            lod.Pyramid(levels)


def test_what_gl_cannot_differentiate_is_refused() -> None:
    image = noise(3, 8, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(image, torch.ones_like(image))
        with pytest.raises(UnsupportedError, match="reverse-mode"):
            lod.mipmap(dual, generator="compute")
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.func.vmap(lambda x: lod.mipmap(x, generator="compute")[1])(image[None])
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: lod.mipmap(x, generator="compute")[1].sum())(image)


def test_more_bad_input() -> None:
    with pytest.raises(InputError, match="expected one of"):
        lod.mipmap(noise(3, 8, 8), backend=["gl"])  # type: ignore[arg-type]
    for levels in ((), (noise(4, 4),), (1,), (torch.zeros(1, 1, 1),) * 5):
        with pytest.raises(InputError):
            lod.Pyramid(levels)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="reduce"):
        lod.Pyramid((noise(1, 2, 2),), "median")  # type: ignore[arg-type]
    hz = lod.hiz(noise(1, 8, 8))
    for threshold in (torch.tensor(1j), 10**400):
        with pytest.raises(InputError, match="threshold"):
            lod.cull(hz, threshold)
    for fixation in ((10**400, 0.5), torch.tensor([0.5 + 9j, 0.5])):
        with pytest.raises(InputError, match="fixation"):
            lod.log_polar(noise(3, 8, 8), fixation, 4, 4)


@pytest.mark.parametrize("shared", [False, True], ids=["places of their own", "the same places"])
def test_torch_samples_large_batches_in_parts(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values and gradients, and levels of no more images at once than fit."""
    module = importlib.import_module("gpu_lod.mipmap")
    image = torch.rand(5, 3, 24, 33, requires_grad=True)
    sites = torch.rand(1 if shared else 5, 7, 3) * torch.tensor([1, 1, 3.0])
    points = sites[:, 0, :2].expand(5, -1)
    verbs = (
        lambda: lod.gather_patches(image, sites[0] if shared else sites, 4, backend="torch"),
        lambda: lod.log_polar(image, points, rings=6, wedges=8, backend="torch"),
        lambda: lod.foveate(image, points, backend="torch"),
    )
    whole = [verb() for verb in verbs]
    gradients = [torch.autograd.grad(values.square().sum(), image)[0] for values in whole]
    made: list[int] = []
    reference = module.reference
    monkeypatch.setattr(module, "reference", lambda x, *more: (made.append(len(x)), reference(x, *more))[1])
    monkeypatch.setattr(module, "AT_ONCE", 2 * 24 * 33 + 1)
    for verb, expected, gradient in zip(verbs, whole, gradients, strict=True):
        made.clear()
        values = verb()
        assert made == [2, 2, 1]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)
        found = torch.autograd.grad(values.square().sum(), image)[0]
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16], ids=str)
def test_large_images_of_small_dtypes_in_parts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    mipmap = sys.modules["gpu_lod.mipmap"]
    monkeypatch.setattr(sys.modules["gpu_lod.halving"], "WHOLE", 0)
    for shape, part in (
        ((3, 33, 47), 1),
        ((3, 67, 47), 47 * 17),
        ((2, 3, 32, 64), 5000),
        ((2, 33, 40), 800),
        ((1, 3, 37, 64), 2600),
        ((5, 1, 7, 9), 200),
        ((2, 4, 1, 40), 100),
    ):
        monkeypatch.setattr(mipmap, "PART", part)  # rows of planes, planes, or several
        image = noise(*shape, dtype=dtype)
        for levels in (None, 1, 2, 3, 4):
            if levels is not None and levels > len(level_sizes(*shape[-2:])):
                continue
            found = lod.mipmap(image, levels, backend="torch").levels
            expected = mipmap.reference(image, levels)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), shape
            assert all(map(torch.equal, mipmap._chain(image, levels), expected)), shape


@pytest.mark.parametrize("of", ["images", "pyramid"])
def test_torch_samples_a_quarter_of_a_batch_of_small_dtypes_at_once(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of all images in fp32 would be several times the batch."""
    module = sys.modules["gpu_lod.mipmap"]
    read: list[int] = []
    gather = sys.modules["gpu_lod.gather_patches"]
    reference = gather.reference
    monkeypatch.setattr(
        gather, "reference", lambda levels, *more: (read.append(len(levels[0])), reference(levels, *more))[1]
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sites = torch.rand(9, 5, 3) * torch.tensor([1, 1, 3.0])
    for dtype in (torch.uint8, torch.float16, torch.float32):
        image = noise(9, 2, 24, 33, dtype=dtype)
        src = lod.mipmap(image, backend="torch") if of == "pyramid" else image
        whole = lod.gather_patches(src, sites, 4, backend="torch")
        monkeypatch.setattr(module, "WHOLE", image.numel() - 1)
        read.clear()
        assert torch.equal(lod.gather_patches(src, sites, 4, backend="torch"), whole)
        assert read == ([9] if dtype == torch.float32 else [3, 3, 3])
        monkeypatch.setattr(module, "WHOLE", image.numel())


@pytest.mark.parametrize(
    "shape", [(3, 64, 64), (2, 3, 62, 60), (3, 65, 64), (3, 64, 66), (1, 2, 4), (3, 1, 8)], ids=str
)
def test_counts_are_halved_alike_wherever_they_lie(shape: tuple[int, ...]) -> None:
    """Four at a time in words, where memory lets torch: the same sums."""
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    image[..., :2, :4] = 255  # the largest sums
    sizes = [(max(1, n // 2)) for n in shape[-2:]]
    expected = halve_mean(image.float(), *sizes)
    sources = {
        "contiguous": image,
        "a byte further": torch.cat([image.flatten()[:1], image.flatten()])[1:].view(shape),
        "transposed": image.transpose(-1, -2).contiguous().transpose(-1, -2),
        "cropped": F.pad(image, (1, 2, 3, 0))[..., 3:, 1:-2],
        "of odd rows": F.pad(image, (0, 1))[..., :-1],
        "every other": image.repeat_interleave(2, -2)[..., ::2, :],
        "every other column": image.repeat_interleave(2, -1)[..., ::2],
    }
    for name, source in sources.items():
        assert torch.equal(source, image)
        assert torch.equal(halve_mean(source, *sizes), expected), name


@pytest.mark.parametrize("shape", [(1, 64, 64), (1, 1, 2, 2), (2, 3, 6, 10), (3, 8, 9), (3, 1, 8), (2, 8, 1)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_few_texels_are_halved_as_many_are(
    shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = torch.randn(shape)
    image.view(-1)[::7] = math.inf
    image.requires_grad_()
    sizes = [(max(1, n // 2)) for n in shape[-2:]]
    assert image.numel() <= halving.FEW
    pools: list[int] = []
    pool = halving.F.avg_pool2d
    monkeypatch.setattr(halving.F, "avg_pool2d", lambda *of: (pools.append(1), pool(*of))[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    few = halve_mean(image, *sizes)
    assert len(pools) == (threads == 1 and not any(n % 2 for n in shape[-2:]))  # it would wake the other
    monkeypatch.setattr(halving, "FEW", 0)
    many = halve_mean(image, *sizes)
    assert torch.allclose(few, many, rtol=3e-7, atol=1e-7)
    toward = torch.randn(few.shape)
    ours, theirs = (torch.autograd.grad(result, image, toward)[0] for result in (few, many))
    assert torch.allclose(ours, theirs, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_chains_of_counts_are_traced_for_any_memory(mode: str) -> None:
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
    traced = make_fx(lambda x: list(lod.mipmap(x, backend="torch").levels), tracing_mode=mode)(image)
    elsewhere = torch.cat([image.flatten()[:1], image.flatten()])[1:].view(3, 64, 64)
    for got, want in zip(traced(elsewhere), lod.mipmap(image, backend="torch"), strict=True):
        assert torch.equal(got, want)


def test_negated_values_are_converted() -> None:
    negated = torch.view_as_complex(torch.rand(2, 3, 20, 28, 2)).conj().imag
    assert negated.is_neg()
    found = lod.mipmap(negated, mean=[0.5] * 3, backend="torch")
    expected = lod.mipmap(negated.resolve_neg(), mean=[0.5] * 3, backend="torch")
    assert all(map(torch.equal, found.levels, expected.levels))


def test_negated_counts() -> None:
    image = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8)
    view = torch._neg_view(image)
    for got, want in zip(
        lod.mipmap(view, backend="torch"), lod.mipmap(view.resolve_neg(), backend="torch"), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("generator", ["compute", "single-pass"])
@pytest.mark.parametrize(("dtype", "to"), [(torch.float32, None), (torch.float16, torch.float32)])
def test_gradients_of_converted_chains_are_made_of_gradients_alone(
    generator: Any, dtype: torch.dtype, to: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"mean": [0.5, 0.4, 0.3], "std": [0.5, 1.0, 2.0]}
    image = noise(2, 3, 13, 18).to(dtype)
    exact = image.double().requires_grad_()
    values = conversion(exact, **how, dtype=None)
    levels = reference(exact, None, "mean", values)
    weights = [torch.rand(level.shape) for level in levels]
    for some in (range(len(levels)), [0], [2, 3]):
        (expected,) = torch.autograd.grad(
            [levels[k] for k in some], exact, [weights[k].double() for k in some], retain_graph=True
        )
        given = image.clone().requires_grad_()
        made = lod.mipmap(given, generator=generator, dtype=to, **how)
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules["gpu_lod.mipmap"], "reference", None)
            (found,) = torch.autograd.grad([made[k] for k in some], given, [weights[k] for k in some])
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=1e-6)
