"""Back from the log-polar map: shader against reference() against float64, and the round trip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import assert_matches
from images import DTYPES, noise, smooth
from oracle import inverse_log_polar as oracle

import gpu_lod as lod
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.inverse_log_polar import reference

BACKENDS: list[Any] = ["torch", "gl"]


@pytest.mark.parametrize("border", ["zero", "clamp"])
@pytest.mark.parametrize("spacing", ["log", "cortical"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parity(backend: Any, dtype: torch.dtype, spacing: Any, border: Any) -> None:
    for shape, size in (
        ((2, 3, 12, 20), (17, 26)),
        ((1, 1, 1, 1), (5, 3)),
        ((1, 5, 7, 9), (12, 12)),
        ((2, 2, 3, 1), (1, 9)),
    ):
        polar, fixation = noise(*shape, dtype=dtype), torch.rand(shape[0], 2)
        found = lod.inverse_log_polar(polar, fixation, size, r_max=0.5, spacing=spacing, border=border, backend=backend)
        assert found.dtype == dtype and found.shape == (*shape[:2], *size) and found.is_contiguous()
        truth, spread = oracle(polar, fixation, size, r_max=0.5, spacing=spacing, border=border)
        # Ring and wedge are computed in fp32: off by a few millionths of the map's sides, near the fixation by more.
        slack = spread * 1e-5 * max(shape[2:]) + truth.abs() * (_distance(fixation, size, 0.5) < 1e-6)
        assert_matches(found, truth, "trilinear", slack=slack, where=f"{shape} to {size}")


def _distance(fixation: torch.Tensor, size: tuple[int, int], r_max: float) -> torch.Tensor:
    """[B, 1, H, W] how far each pixel is from the outer rim."""
    height, width = size
    y, x = ((torch.arange(n, dtype=torch.float64) + 0.5) / n for n in size)
    dx = (x - fixation[:, :1].double())[:, None] * width / max(size)
    dy = (y - fixation[:, 1:].double())[:, :, None] * height / max(size)
    return (torch.hypot(dx.expand(-1, height, -1), dy.expand(-1, -1, width)) - r_max).abs()[:, None]


@pytest.mark.parametrize("spacing", ["log", "cortical"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_round_trip_of_a_smooth_picture(backend: Any, spacing: Any) -> None:
    """Inside r_max, and outside the innermost ring: within 0.02 at 64 x 128, and finer maps come closer."""
    image = smooth(96, 128)
    worst = []
    for rings, wedges in ((32, 64), (64, 128), (128, 256)):
        there = {"r_max": 0.4, "spacing": spacing}
        polar = lod.log_polar(image, (0.5, 0.5), rings, wedges, **there)  # type: ignore[arg-type]
        back = lod.inverse_log_polar(polar, (0.5, 0.5), (96, 128), backend=backend, **there)  # type: ignore[arg-type]
        y, x = torch.meshgrid(torch.arange(96) + 0.5 - 48, torch.arange(128) + 0.5 - 64, indexing="ij")
        r = torch.hypot(x, y) / 128
        seen = (r < 0.39) & (r > 0.015) & ((x / 128).abs() < 0.37) & ((y / 128).abs() < 0.36)
        worst.append(float((back - image).abs().amax(0)[seen].max()))
        assert bool((back[:, r > 0.4] == 0).all())
    assert worst[1] < 0.02 and worst[0] > worst[1] > worst[2], worst


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_wedges_run_from_x_towards_y_down_and_go_round(backend: Any) -> None:
    polar = torch.zeros(1, 8, 4)
    polar[0, :, 1] = 1.0  # 90 to 180 degrees: down and left
    image = lod.inverse_log_polar(polar, (0.5, 0.5), (9, 9), r_max=1.0, backend=backend)[0]
    assert float(image[7, 1]) == pytest.approx(1, abs=1e-5) and float(image[1, 7]) == pytest.approx(0, abs=1e-5)
    polar = torch.zeros(1, 8, 4)
    polar[0, :, 0] = polar[0, :, 3] = 1.0  # the two that meet on +x
    image = lod.inverse_log_polar(polar, (0.5, 0.5), (9, 9), r_max=1.0, backend=backend)[0]
    assert float(image[4, 8]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("spacing", ["log", "cortical"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_places_are_exact_to_a_few_bits(backend: Any, spacing: Any) -> None:
    """White noise is off by as much of the range as a place is of a texel, and fp32 counts 512 wedges
    in steps of 3e-5. llvmpipe's own angles and logarithms are five times as far off."""
    polar, size, fixation = torch.rand(1, 1, 256, 512), (256, 512), torch.tensor([[0.375, 0.625]])
    inner = {"log": 0.01, "cortical": 0.05}[spacing]
    expected = reference(polar.double(), fixation.double(), size, inner, 0.7, spacing == "cortical", False)
    found = lod.inverse_log_polar(polar, fixation, size, spacing=spacing, border="clamp", backend=backend)
    assert float((found.double() - expected).abs().max()) < 5e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_constants_stay(backend: Any) -> None:
    image = lod.inverse_log_polar(torch.full((1, 2, 5, 9), 0.3), (0.1, 0.9), (20, 11), border="clamp", backend=backend)
    assert torch.allclose(image, torch.tensor(0.3), atol=1e-6)


@pytest.mark.parametrize("width", [52, 53])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_work_is_split_to_fit_bindings(restored_limits: lod.Context, dtype: torch.dtype, width: int) -> None:
    """Whole images, some channels of one, and parts of a channel."""
    polar, fixation = noise(3, 5, 8, 12, dtype=dtype), torch.rand(3, 2)
    expected = lod.inverse_log_polar(polar, fixation, (70, width), backend="gl")
    for planes in (7, 2.5, 0.6):
        restored_limits.limits.storage_bytes = int(planes * 70 * width * dtype.itemsize) + 512
        found = lod.inverse_log_polar(polar, fixation, (70, width), backend="gl")
        assert_matches(found, expected.double(), "trilinear", slack=1e-6, where=f"bindings of {planes} planes")


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_is_the_adjoint(backend: Any) -> None:
    x = noise(2, 3, 6, 10).requires_grad_()
    out = lod.inverse_log_polar(x, torch.rand(2, 2), (15, 18), backend=backend)
    y = torch.rand_like(out)
    (back,) = torch.autograd.grad(out, x, y)
    left = float((out.detach() * y).double().sum())
    assert float((x.detach() * back).double().sum()) == pytest.approx(left, rel=1e-5)


def test_gradcheck_in_the_map_and_the_fixation() -> None:
    x = torch.rand(1, 1, 4, 6, dtype=torch.float64, requires_grad=True)
    f = torch.tensor([[0.43, 0.57]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: reference(a, b, (5, 6), 0.01, 0.9, False, True), (x, f))
    with pytest.raises(UnsupportedError, match="fixation: gradients"):
        lod.inverse_log_polar(x.detach().float(), f.float(), (5, 6), backend="gl")


@pytest.mark.parametrize("cortical", [False, True])
def test_a_fixation_on_a_pixel_has_gradients(cortical: bool) -> None:
    """As in the middle of odd sides. That pixel itself, nearer than the rings, reads the innermost ring wherever it is
    a little later, but turns about."""
    x = torch.rand(1, 1, 4, 8, dtype=torch.float64)  # no neighbour at the middle of a wedge
    middle = torch.tensor([[0.5, 0.5]], dtype=torch.float64)

    def others(at: torch.Tensor) -> torch.Tensor:
        made = reference(x, at, (5, 7), 0.01, 0.9, cortical, False)
        return torch.where(torch.arange(35).view(5, 7) == 17, 0.0, made)

    point = middle.clone().requires_grad_()
    (found,) = torch.autograd.grad(reference(x, point, (5, 7), 0.01, 0.9, cortical, False).sum(), point)
    slopes = [
        float((others(middle + step) - others(middle - step)).sum()) / 2e-6 for step in 1e-6 * torch.eye(2).double()
    ]
    assert found[0].tolist() == pytest.approx(slopes, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"polar": torch.zeros(4, 6)}, "shape"),
        ({"size": (5,)}, "height, width"),
        ({"size": (5, 0)}, "width"),
        ({"fixation": (0.5, 2.0)}, "2.0"),
        ({"fixation": torch.zeros(3, 2)}, "fixation"),
        ({"r_min": 0.9}, "r_min"),
        ({"spacing": "linear"}, "spacing"),
        ({"spacing": "cortical", "r_min": 0.1}, "r_min"),
        ({"border": "wrap"}, "border"),
        ({"backend": "cpu"}, "backend"),
        ({"r_max": math.inf}, "finite"),
    ],
)
def test_bad_input(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        lod.inverse_log_polar(**{"polar": torch.zeros(1, 4, 6), "fixation": (0.5, 0.5), "size": (5, 5), **arguments})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spacing", ["log", "cortical"])
@pytest.mark.parametrize("cut", [False, True])  # by another shader, word by word
def test_the_last_rings_edge_is_inside(restored_limits: lod.Context, cut: bool, spacing: Any, backend: Any) -> None:
    """Sixteen pixels of 64 away from a pixel's centre, exactly; seventeen are beyond."""
    if cut:
        restored_limits.limits.storage_bytes = int(0.6 * 64 * 16 * 4) + 512
    polar, fixation = torch.ones(1, 1, 8, 16), (0.5 / 16, 0.5 / 64)
    found = lod.inverse_log_polar(polar, fixation, (64, 16), r_max=0.25, spacing=spacing, backend=backend)
    assert torch.allclose(found[0, 0, :, 0], (torch.arange(64) <= 16).float())
