"""Oriented energy: shader against reference() against dense filters in float64, and what the angles mean."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from compare import energies_match
from hypothesis import given
from hypothesis import strategies as st
from images import DTYPES, SIZES, noise
from oracle import hilbert_transform, oriented_energy, second_derivative
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_lod as lod
from gpu_lod import binomial, checks, precision, quadrature, transfer
from gpu_lod.errors import InputChangedError, InputError, LimitError
from gpu_lod.oriented_energy import reference
from gpu_lod.quadrature import FILTERS, basis, energy, steering

BACKENDS: list[Any] = ["torch", "gl"]


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend; "bands" is torch as it takes large pictures, "products" where convolutions are of fewer bits, and
    "device" and "device bands" as it does on a GPU."""
    if request.param.startswith("device"):
        monkeypatch.setattr(checks, "on_host", lambda value: False)
        if request.param == "device bands":
            monkeypatch.setattr(quadrature, "_DEVICE_BAND", 2**15)
        return "torch"
    if request.param in ("bands", "products"):
        monkeypatch.setattr(quadrature, "_SMALL", 0)
        if request.param == "products":
            monkeypatch.setattr(precision, "exact", lambda kind, _: kind == "matmul")
        return "torch"
    return str(request.param)


each_way = pytest.mark.parametrize("way", [*BACKENDS, "bands", "products", "device"], indirect=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_way
def test_parity(way: Any, dtype: torch.dtype) -> None:
    for height, width in SIZES:
        for shape in ((2, 5, height, width), (1, height, width)):
            image = noise(*shape, dtype=dtype)
            found = lod.oriented_energy(image, backend=way)
            truth = oriented_energy(image)
            for level, expected in zip(found, truth, strict=True):
                assert level.dtype == (torch.float32 if dtype == torch.uint8 else dtype)
                assert level.shape == expected.shape == (*shape[:-2], 4, *level.shape[-2:])
            energies_match(found, truth, f"{shape}", 255.0**2 if dtype == torch.uint8 else 1.0)


@pytest.mark.parametrize("orientations", [1, 2, 3, 5, 6, 9])
@each_way
def test_any_number_of_orientations(way: Any, orientations: int) -> None:
    image = noise(2, 3, 27, 40)
    energies_match(lod.oriented_energy(image, 3, orientations, way), oriented_energy(image, 3, orientations))


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_pictures(backend: Any, photo: torch.Tensor, page: torch.Tensor) -> None:
    for image in (photo, page):
        energies_match(lod.oriented_energy(image, 4, backend=backend), oriented_energy(image, 4))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_any_size(height: int, width: int, seed: int) -> None:
    image = torch.rand(1, height, width, generator=torch.Generator().manual_seed(seed))
    energies_match(lod.oriented_energy(image, backend="gl"), oriented_energy(image))


@pytest.mark.parametrize("tile", ["_TILE", "_TILE_SOFTWARE"])
def test_both_tilings_give_the_same(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardware's on software too: the shader that a GPU runs is tested here."""
    module = sys.modules["gpu_lod.oriented_energy"]  # the verb's name hides it
    monkeypatch.setattr(module, "_TILE_SOFTWARE", getattr(module, tile))
    for height, width in SIZES:
        image = noise(2, 3, height, width)
        energies_match(lod.oriented_energy(image, backend="gl"), oriented_energy(image), f"{height} x {width}")


@pytest.mark.parametrize("way", ["bands", "products", "device bands"], indirect=True)
def test_the_reference_works_in_bands(way: Any) -> None:
    """Larger pictures and batches than it takes on at once, in rows that are no whole blocks; wider ones."""
    for shape in ((1, 1, 700, 601), (5, 3, 150, 210), (1, 1, 70, 4097)):
        image = noise(*shape)
        truth = oriented_energy(image, 1)
        for values in (image, image.clone().requires_grad_()):  # with a graph parts are joined
            found = lod.oriented_energy(values, 1, backend=way)
            energies_match(tuple(level.detach() for level in found), truth, f"{shape}")


@pytest.mark.parametrize("way", ["device"], indirect=True)
@pytest.mark.parametrize("fewer", [False, True], ids=["exact", "fewer bits"])
def test_the_way_of_a_gpu_in_double_precision(way: Any, fewer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where products of fp32 may be of fewer bits."""
    if fewer:
        monkeypatch.setattr(precision, "exact", lambda kind, _: False)
    for height, width in ((19, 11), (8, 16), (1, 1), (3, 40)):
        x = torch.rand(2, 2, height, width, dtype=torch.float64, requires_grad=True)
        found, expected = energy(x, 5), oriented_energy(x.detach(), 1, 5)[0]
        assert float((found.detach() - expected).abs().max()) < 1e-12
        assert energy(x.detach().float(), 5).dtype == torch.float32
        weights = torch.rand_like(found)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks, "on_host", lambda value: True)
            other = energy(x, 5)
        grads = (torch.autograd.grad(level, x, weights)[0] for level in (found, other))
        assert torch.allclose(*grads, rtol=0, atol=1e-11)


@pytest.mark.parametrize("way", ["device"], indirect=True)
@pytest.mark.parametrize("batch", [1, 32])
def test_a_gpu_has_few_launches_whatever_the_batch(way: Any, batch: int) -> None:
    image = torch.rand(batch, 1, 128, 128)
    for _ in range(2):  # tables are brought by the first
        with Counted() as counted:
            lod.oriented_energy(image, 1, backend=way)
    assert counted.found == ["reflection_pad2d", "clone", "mm", "clone", "bmm", "pow_", "addcmul"]


class Counted(TorchDispatchMode):
    """What torch does that would be launches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(("new_empty", "empty", "_unsafe_view", "detach")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


# -- filters -----------------------------------------------------------------------------------------------------------


def steered(angle: float) -> tuple[torch.Tensor, torch.Tensor]:
    c, s = math.cos(angle), math.sin(angle)
    second = torch.tensor([c * c, 2 * c * s, s * s], dtype=torch.float64)
    third = torch.tensor([c**3, 3 * c * c * s, 3 * c * s * s, s**3], dtype=torch.float64)
    filters = basis()
    return torch.einsum("b,byx->yx", second, filters[:3]), torch.einsum("b,byx->yx", third, filters[3:])


@given(st.floats(-7.0, 7.0))
def test_steering_gives_the_rotated_filter(angle: float) -> None:
    even, odd = steered(angle)
    assert float((even - second_derivative(angle)).abs().max()) < 1e-12
    assert float((odd - hilbert_transform(angle)).abs().max()) < 1e-12


def test_steering_needs_the_right_signs_and_mean() -> None:
    """The check above can say no: to the mirrored angle, and to a filter that kept its mean."""
    even, odd = steered(0.5)
    assert float((even - second_derivative(-0.5)).abs().max()) > 0.1
    assert float((odd - hilbert_transform(-0.5)).abs().max()) > 0.1
    assert float((even - second_derivative(0.5, flat=False)).abs().max()) > 1e-4


def test_without_its_mean_taken_away_it_steers_too() -> None:
    """What is taken is a multiple of the round Gaussian, the same at every angle."""
    gaussian = torch.tensor(FILTERS[0], dtype=torch.float64)
    for angle in (0.0, 0.3, 1.2, 2.9):
        taken = second_derivative(angle, flat=False) - steered(angle)[0]
        share = taken / (gaussian[:, None] * gaussian)
        assert float(share.std()) < 1e-12 and float(share.mean()) == pytest.approx(-2.018e-4, rel=1e-3)


def test_filters_sum_to_nothing() -> None:
    assert float(basis().sum((1, 2)).abs().max()) < 1e-14
    assert abs(sum(FILTERS[2])) < 1e-14


def test_the_table_for_four_angles() -> None:
    second, third = steering(4)
    half = math.sqrt(0.5)
    assert second[0] == (1, 0, 0) and third[0] == (1, 0, 0, 0)
    assert second[1] == pytest.approx((0.5, 1, 0.5)) and third[1] == pytest.approx([half**3 * k for k in (1, 3, 3, 1)])
    assert second[2] == pytest.approx((0, 0, 1)) and third[2] == pytest.approx((0, 0, 0, 1))
    assert second[3] == pytest.approx((0.5, -1, 0.5)) and third[3] == pytest.approx(
        [half**3 * k for k in (-1, 3, -3, 1)]
    )


# -- what the angles mean ---------------------------------------------------------------------------------------------


def strongest(image: torch.Tensor, backend: Any) -> int:
    (level,) = lod.oriented_energy(image, 1, backend=backend)
    return int(level[..., 12:-12, 12:-12].mean((0, -2, -1)).argmax())


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_a_vertical_edge_answers_at_0(backend: Any) -> None:
    image = torch.zeros(1, 40, 40)
    image[..., 20:] = 1
    assert strongest(image, backend) == 0
    assert strongest(image.transpose(-1, -2), backend) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_lines_of_horizontal_text_answer_at_90(backend: Any, page: torch.Tensor) -> None:
    """At the scale of the lines, which lie about 14 pixels apart."""
    level = lod.oriented_energy(page, 4, backend=backend)[2]
    assert int(level[0].mean((-2, -1)).argmax()) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_45_is_towards_the_lower_right(backend: Any) -> None:
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(48.0), indexing="ij")
    assert strongest(torch.sin(0.9 * (x + y))[None], backend) == 1
    assert strongest(torch.sin(0.9 * (x - y))[None], backend) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_energy_hardly_depends_on_the_phase(backend: Any) -> None:
    """A grating's energy swings only by as much as G2 and H2 differ in gain; the square of one alone by 71%."""
    taps = torch.arange(-4, 5, dtype=torch.float64)
    even = float((basis()[0].sum(0) * torch.cos(1.2 * taps)).sum() ** 2)
    odd = float((basis()[3].sum(0) * torch.sin(1.2 * taps)).sum() ** 2)
    swing = abs(even - odd) / (even + odd) / math.sqrt(2)
    assert swing < 0.06
    for phase in (0.0, 0.8, 1.6):
        image = torch.sin(1.2 * torch.arange(96.0) + phase).expand(1, 96, 96).contiguous()
        (level,) = lod.oriented_energy(image, 1, backend=backend)
        inside = level[0, 0, 12:-12, 12:-12]
        assert float(inside.std() / inside.mean()) == pytest.approx(swing, rel=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quarter_turn_permutes_the_orientations(backend: Any) -> None:
    """Turned counterclockwise on the screen, what varied along x varies along y."""
    image = noise(1, 2, 33, 41)
    (before,) = lod.oriented_energy(image, 1, backend=backend)
    (after,) = lod.oriented_energy(torch.rot90(image, 1, (-2, -1)).contiguous(), 1, backend=backend)
    turned = torch.rot90(before, 1, (-2, -1))
    for k in range(4):
        assert torch.allclose(after[:, :, (k + 2) % 4], turned[:, :, k], atol=1e-4), k
    assert not torch.allclose(after[:, :, 1], turned[:, :, 1], atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_flat_pictures_have_no_energy(backend: Any) -> None:
    for level in lod.oriented_energy(torch.full((1, 3, 37, 22), 0.7), backend=backend):
        assert float(level.abs().max()) < 1e-11


@pytest.mark.parametrize("backend", BACKENDS)
def test_levels_are_not_rounded_between(backend: Any, photo: torch.Tensor) -> None:
    half = (photo / 255).half()
    both = (lod.oriented_energy(x, 3, backend=backend) for x in (half, half.float()))
    for one, two in zip(*both, strict=True):
        assert torch.equal(one, two.half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_bytes_a_value_whatever_the_width(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are no groups of four are rounded behind: some planes at a time, or some rows of one, where words are
    shared by planes and by rows."""
    module = sys.modules["gpu_lod.oriented_energy"]
    for height, width in ((35, 33), (48, 21), (1, 5), (9, 1), (64, 64), (7, 6), (3, 9001)):
        image = noise(2, 3, height, width, dtype=dtype)
        for orientations in (1, 3, 4, 6):
            wide = lod.oriented_energy(image.float(), None, orientations, backend="gl")
            for staged in (2**22, 2**14, 1):
                monkeypatch.setattr(module, "_STAGED_BYTES", staged)
                for one, two in zip(lod.oriented_energy(image, None, orientations, backend="gl"), wide, strict=True):
                    assert one.dtype == dtype and torch.equal(one, two.to(dtype)), (height, width, staged)


@given(first=st.integers(0, 9), at=st.integers(0, 9), count=st.integers(1, 40), most=st.sampled_from([600, 2**20]))
def test_rounding_touches_no_neighbours(first: int, at: int, count: int, most: int) -> None:
    ctx, values = lod.Context(), noise(1, 1, 50) * 2 - 1
    limit = ctx.limits.storage_bytes
    with ctx.active():
        source = transfer.planes_of(ctx, values)
        target, result = transfer.new_planes(ctx, (1, 1, 53), torch.float16)
        result.fill_(7)
        ctx.limits.storage_bytes = most  # of which a part is kept for alignment
        try:
            transfer.narrow(ctx, source, first, target, at, count)
        finally:
            ctx.limits.storage_bytes = limit
    expected = torch.full((1, 1, 53), 7, dtype=torch.float16)
    expected[..., at : at + count] = values[..., first : first + count]
    assert torch.equal(result, expected)


# -- limits, gradients, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [53, 64])
def test_work_is_split_to_fit_bindings(restored_limits: lod.Context, width: int, dtype: torch.dtype) -> None:
    image = noise(3, 2, 70, width, dtype=dtype)
    expected = lod.oriented_energy(image, None, 6, backend="gl")
    for limit in (24 * 1024, 5 * 1024):  # some planes at once; some rows
        restored_limits.limits.storage_bytes = limit
        for one, two in zip(lod.oriented_energy(image, None, 6, backend="gl"), expected, strict=True):
            assert torch.equal(one, two)
    restored_limits.limits.storage_bytes = 1024
    with pytest.raises(LimitError):
        lod.oriented_energy(image, 1, backend="gl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_agree(dtype: torch.dtype) -> None:
    image = noise(2, 3, 13, 18, dtype=dtype)
    found = []
    for backend in BACKENDS:
        x = image.clone().requires_grad_()
        sum((level.float() ** 1.5).sum() for level in lod.oriented_energy(x, 3, backend=backend)).backward()
        assert x.grad is not None
        found.append(x.grad)
    assert float(found[0].abs().max()) > 0.1
    assert torch.allclose(found[0], found[1], rtol=1e-3 if dtype == torch.float32 else 5e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["torch", "bands", "products"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "orientations"),
    [((2, 3, 1, 1), 4), ((1, 2, 2, 7), 3), ((3, 40), 1), ((2, 5, 9), 6), ((1, 3, 37, 26), 4), ((1, 300, 601), 5),
     ((5, 3, 150, 210), 4), ((1, 70, 4097), 4), ((1, 9, 12), 360)],
)  # fmt: skip
def test_the_gradient_of_a_level_is_that_of_torchs_own_graph(
    shape: tuple[int, ...], orientations: int, way: Any, dtype: torch.dtype
) -> None:
    """Sides below the filters' reach, rows that are no whole blocks, several planes at a time, and wider ones."""
    x = noise(*shape, dtype=dtype)
    weights = noise(*shape[:-2], orientations, *shape[-2:], dtype=dtype) - 0.5
    exact = x.double().clone().requires_grad_()
    (expected,) = torch.autograd.grad(quadrature._energy(exact, orientations, exact.dtype), exact, weights.double())
    found = quadrature.pull(weights, x, orientations)
    close = {torch.float32: 2e-6, torch.float64: 1e-13}[dtype] * float(expected.abs().max() + 1e-6)
    assert found.shape == x.shape and found.dtype == dtype
    assert float((found - expected).abs().max()) < close
    (asked,) = torch.autograd.grad(energy(x.requires_grad_(), orientations), x, weights)
    assert torch.equal(asked, found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", [(0,), (2,), (0, 3), (1, 2, 3)])
def test_gradients_of_some_levels(backend: Any, asked: tuple[int, ...]) -> None:
    image = noise(2, 1, 21, 14)
    weights = [noise(*level.shape) for level in lod.oriented_energy(image, 4)]
    exact = image.double().requires_grad_()
    wide, levels = exact, []
    for level in range(4):
        wide = binomial.reduce(wide) if level else wide
        levels.append(quadrature._energy(wide, 4, wide.dtype))
    (expected,) = torch.autograd.grad([levels[k] for k in asked], exact, [weights[k].double() for k in asked])
    x = image.clone().requires_grad_()
    found = lod.oriented_energy(x, 4, backend=backend)
    (gradient,) = torch.autograd.grad([found[k] for k in asked], x, [weights[k] for k in asked])
    assert float((gradient - expected).abs().max()) < 2e-6 * float(expected.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_gradients(backend: Any) -> None:
    x = noise(1, 6, 9).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found = []
    for image, level in (
        (x, lod.oriented_energy(x, 2, 3, backend=backend)[1]),
        (exact, quadrature._energy(binomial.reduce(exact), 3, exact.dtype)),
    ):
        (first,) = torch.autograd.grad(level.sum(), image, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), image)[0])
    assert float((found[0] - found[1]).abs().max()) < 1e-5 * float(found[1].abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_reads_the_image_again(backend: Any) -> None:
    x = noise(1, 6, 9).requires_grad_()
    found = lod.oriented_energy(x, 1, backend=backend)[0]
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(InputChangedError):
        found.sum().backward()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients_beside_a_vmap_over_something_else(backend: Any) -> None:
    """Some levels are small, some not."""
    x = noise(1, 150, 140).requires_grad_()

    def run(factor: torch.Tensor) -> torch.Tensor:
        return torch.stack([factor * level.sum() for level in lod.oriented_energy(x, backend=backend)])

    (found,) = torch.autograd.grad(torch.func.vmap(run)(torch.tensor([1.0, 2.0])).sum(), x)
    (expected,) = torch.autograd.grad(run(torch.tensor(3.0)).sum(), x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_in_a_batch() -> None:
    x = noise(1, 3, 5, dtype=torch.float64).requires_grad_()
    level = energy(x, 2)
    every = torch.eye(level.numel(), dtype=torch.float64).view(-1, *level.shape)
    (together,) = torch.autograd.grad(level, x, every, is_grads_batched=True)
    (first,) = torch.autograd.grad(energy(x, 2), x, every[7])
    assert torch.allclose(together[7], first, rtol=0, atol=1e-13)


def test_gradcheck() -> None:
    x = torch.rand(1, 2, 5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: tuple(reference(v, 3, 3)), x)


def test_the_reference_in_double_precision() -> None:
    x = torch.rand(2, 19, 11, dtype=torch.float64)
    assert float((energy(x, 5) - oriented_energy(x, 1, 5)[0]).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"orientations": 0}, "orientations is 0"),
        ({"orientations": -1}, "orientations is -1"),
        ({"orientations": 2.5}, "orientations is 2.5"),
        ({"orientations": True}, "orientations is True"),
        ({"levels": 6}, "has 5 down to 1 x 1"),
        ({"levels": 0}, "levels is 0"),
        ({"image": torch.zeros(9, 4)}, "expected"),
        ({"image": torch.zeros(1, 0, 4)}, "at least 1"),
        ({"image": torch.zeros(1, 9, 4, dtype=torch.float64)}, "float64"),
        ({"image": [1.0]}, "list"),
        ({"backend": "cpu"}, "'auto'"),
    ],
)
def test_bad_input(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        lod.oriented_energy(**{"image": torch.zeros(1, 9, 4), **arguments})


def test_explain_knows_it() -> None:
    assert lod.explain(lod.oriented_energy, torch.zeros(1, 9, 4)).backend == "torch"
    assert lod.explain(lod.oriented_energy, torch.zeros(1, 9, 4), backend="gl").reason == "asked for"
