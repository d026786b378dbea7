"""Work on planes and rows that do not depend on each other, some of them at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from images import DTYPES, noise
from torch.fx.experimental.proxy_tensor import make_fx

import gpu_lod as lod
from gpu_lod import planewise
from gpu_lod.planewise import joined

VERBS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gaussian": lambda x: lod.gaussian(x, backend="torch").levels,
    "laplacian": lambda x: lod.laplacian(x, backend="torch").levels,
    "collapse": lambda x: lod.collapse(lod.laplacian(x, backend="gl"), backend="torch"),
    "oriented_energy": lambda x: lod.oriented_energy(x, 3, backend="torch"),
    "inverse_log_polar": lambda x: lod.inverse_log_polar(x, (0.3, 0.6), (40, 30), backend="torch"),
    "inverse_log_polar of several fixations": lambda x: lod.inverse_log_polar(
        x,
        torch.linspace(0, 1, x.shape[0] * 2 if x.ndim == 4 else 2).view(-1, 2),
        (9, 11),
        border="zero",
        backend="torch",
    ),
}

EXACT = ("gaussian", "laplacian", "collapse")
TOLERANCES = {torch.uint8: 1 / 255, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Of the others: vector units round the last digit of a logarithm otherwise than what is left over, and small levels
are convolved in another way than large ones."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_parts_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch, verb: str, dtype: torch.dtype) -> None:
    for shape in ((3, 5, 24, 33), (1, 3, 32, 64), (7, 17, 20), (1, 2, 1, 40), (1, 1, 30, 20)):
        image = noise(*shape, dtype=dtype)
        monkeypatch.setattr(planewise, "PART", 2**20)
        whole = VERBS[verb](image)
        for part in (1, 600, 2200, 4000):
            monkeypatch.setattr(planewise, "PART", part)
            found = VERBS[verb](image)
            assert type(found) is type(whole)
            for actual, expected in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, whole)), strict=True):
                assert actual.dtype == expected.dtype and actual.shape == expected.shape
                worst = float((actual.double() - expected.double()).abs().max())
                size = 255.0 if actual.dtype == torch.uint8 else max(float(expected.double().abs().max()), 1.0)
                tolerance = 0.0 if verb in EXACT else TOLERANCES[actual.dtype]
                assert worst <= tolerance * size, (shape, part)


def test_graphs_are_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planewise, "PART", 1)
    calls = []

    def make(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append(x.shape)
        return [x[..., ::2, None, ::2] * 2]

    image = noise(2, 3, 4, 6)
    (found,) = planewise.planewise(make, image)
    assert calls == [(1, 4, 6)] * 6 and found.shape == (2, 3, 2, 1, 3)
    assert torch.equal(found, make(image)[0])
    calls.clear()
    (kept,) = planewise.planewise(make, image.requires_grad_())
    assert calls == [(2, 3, 4, 6)] and kept.requires_grad
    calls.clear()
    doubled = torch.func.vmap(lambda x: planewise.planewise(make, x)[0])(image.detach())
    assert calls == [(3, 4, 6)] and torch.equal(doubled, found)


def test_inputs_that_are_no_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided, expanded and mirrored views; parts of them are views too."""
    wide = noise(2, 20, 24, 3).permute(0, 3, 1, 2)
    for image in (wide, noise(1, 3, 20, 24).expand(4, -1, -1, -1), wide.flip(-1), wide[..., ::2]):
        monkeypatch.setattr(planewise, "PART", 2**20)
        whole = lod.laplacian(image, backend="torch").levels
        monkeypatch.setattr(planewise, "PART", 100)
        assert all(map(torch.equal, lod.laplacian(image, backend="torch").levels, whole))


@pytest.mark.parametrize(
    ("count", "height", "width", "texels"), [(5, 7, 3, 50), (1, 100, 7, 30), (3, 1, 9, 1), (4, 6, 5, 2**20)]
)
def test_bands_cover_every_row_once(count: int, height: int, width: int, texels: int) -> None:
    seen = torch.zeros(count, height, dtype=torch.int64)
    for planes, rows in planewise.bands(count, height, width, texels):
        assert seen[planes, rows].numel() * width <= max(texels, width)
        seen[planes, rows] += 1
    assert bool((seen == 1).all())


def test_the_default_is_a_quarter_of_a_part() -> None:
    texels = planewise.PART // 4
    assert [rows for _, rows in planewise.bands(1, 2 * texels // 64, 64)] == [
        slice(0, texels // 64),
        slice(texels // 64, 2 * texels // 64),
    ]


def test_parts_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is read on the host that depends on what is traced."""
    monkeypatch.setattr(planewise, "PART", 2**12)
    verbs: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: lod.foveate(x, (0.3, 0.4), backend="torch"),
        lambda x: lod.inverse_log_polar(x, (0.3, 0.4), (50, 61), backend="torch"),
        lambda x: lod.log_polar(x, (0.3, 0.4), 20, 30, backend="torch"),
    )
    for verb in verbs:
        for dtype in (torch.float32, torch.float16):
            image = noise(3, 67, 90, dtype=dtype)
            # Traced, no level of a small dtype is cropped to what is read: a step of rounding.
            step = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
            torch.testing.assert_close(make_fx(verb)(image)(image), verb(image), rtol=0, atol=step)


@pytest.mark.parametrize("rows", [1, 50])
def test_joined_is_cat(rows: int) -> None:
    parts = [(torch.rand(n * rows, 16), torch.arange(n * rows)) for n in (3, 1, 2)]
    expected = [torch.cat(same) for same in zip(*parts, strict=True)]
    assert all(map(torch.equal, joined(iter(parts), 6 * rows), expected))
    mapped = torch.func.vmap(lambda *x: joined(((y,) for y in x), 6 * rows))(*(part[0][None] for part in parts))
    assert torch.equal(mapped[0][0], expected[0])


def test_joined_passes_gradients_on() -> None:
    parts = [torch.rand(n, 2, requires_grad=True) for n in (3, 1)]
    joined(((part,) for part in parts), 4)[0].sum().backward()
    assert all(part.grad is not None and torch.equal(part.grad, torch.ones_like(part)) for part in parts)


def test_joined_lets_go_of_each_part() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def parts() -> Iterator[tuple[torch.Tensor]]:
        for n in range(4):
            value = torch.full((2, 3), float(n))
            made.append(weakref.ref(value))
            assert sum(ref() is not None for ref in made) == 1
            part = (value,)
            del value
            yield part
            del part

    assert torch.equal(joined(parts(), 8)[0][:, 0], torch.arange(4.0).repeat_interleave(2))
