"""Virtual tokens by kernels, on the emulator, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_emulator import COMPILER, DESCENDING, SHUFFLED, EmulatedDevice

import gpu_lod as lod
from gpu_lod.errors import InputError, LimitError
from gpu_lod.kernels import device, sources, vortices

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

CASES: dict[str, tuple[tuple[int, int], int, int, dict[str, Any]]] = {
    "even": ((128, 192), 16, 37, {}),
    "odd sides": ((100, 333), 14, 20, {"vortices": 3}),
    "one token": ((40, 40), 8, 1, {}),
    "a narrow picture": ((6, 700), 7, 9, {"vortices": 2, "radius": 0.5}),
    "one patch": ((5, 9), 16, 4, {}),
    "points": ((96, 96), 8, 12, {"radius": 1e-6, "width": 1e-6}),
    "discs": ((96, 96), 8, 12, {"radius": 1e3, "width": 10.0}),
}
RELEVANCE = {
    "any": lambda x: x,
    "flat": torch.ones_like,
    "negative": lambda x: x - 2,
    "infinite": lambda x: torch.where(x > 0.9, torch.inf, torch.where(x < 0.2, -torch.inf, x)),
    "one hot": lambda x: (x == x.amax((1, 2), keepdim=True)).float(),
}


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def tokens(emulated: EmulatedDevice, case: str, kind: str, *, plain: bool) -> lod.TokenSet:
    size, patch, budget, how = CASES[case]
    generator = torch.Generator().manual_seed(3)
    relevance = torch.rand(2, -(-size[0] // patch), -(-size[1] // patch), generator=generator)
    allocator = lod.allocate.SoftVortex(budget, patch, **how)
    emulated.calls.clear()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        if plain:
            patched.setattr(device, "KIND", "cuda")
        found = allocator(torch.rand(2, 3, *size, generator=generator), RELEVANCE[kind](relevance))
    launched = [call[1].name for call in emulated.named("launch")]
    assert launched.count("vortices") == (0 if plain else 2)
    return found


@pytest.mark.parametrize("order", [0, DESCENDING, SHUFFLED], ids=["ascending", "descending", "shuffled"])
@pytest.mark.parametrize("kind", RELEVANCE)
@pytest.mark.parametrize("case", CASES)
def test_tokens(emulated: EmulatedDevice, case: str, kind: str, order: int) -> None:
    emulated.order, emulated.seed = order, 5
    found, expected = (tokens(emulated, case, kind, plain=plain) for plain in (False, True))
    assert found.weights is not None and expected.weights is not None
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-6)
    assert (found.scores[:, :-1] >= found.scores[:, 1:]).all()
    torch.testing.assert_close(found.weights.sum(-1), torch.ones_like(found.scores), rtol=0, atol=1e-5)
    # Tokens whose scores differ by rounding alone may stand in another order: each has one like it there.
    for image in range(2):
        pair = [
            torch.cat([one.weights[image], one.sites[image], one.patches[image].flatten(1)], dim=1)  # type: ignore[index]
            for one in (found, expected)
        ]
        apart = (pair[0][:, None] - pair[1]).abs().amax(-1)
        assert float(apart.amin(0).max()) < 5e-5 and float(apart.amin(1).max()) < 5e-5
    gaps = expected.scores[:, :-1] - expected.scores[:, 1:]
    if kind == "flat" or (gaps > 1e-5 * expected.scores.abs().amax(1, keepdim=True)).all():
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.sites, expected.sites, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(found.patches, expected.patches, rtol=1e-4, atol=1e-5)


def test_most_cases_have_an_order(emulated: EmulatedDevice) -> None:
    """Else the test above would compare tokens whatever their order is."""
    found = tokens(emulated, "even", "any", plain=True).scores
    assert ((found[:, :-1] - found[:, 1:]) > 1e-5 * found.abs().max()).all()


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("even", ("weight * p.y[row]", "weight * p.x[row]")),
        ("points", ("below < LEAST ? LEAST : below", "below")),
        ("even", ("* (amounts[i] - least)", "* amounts[i]")),
        ("even", ("int token = (int)p.order[blockIdx.x];", "int token = (int)(blockIdx.x % (unsigned)p.tokens);")),
    ],
    ids=["y is x", "underflow", "scores from 0", "no order"],
)
def test_a_broken_kernel_differs(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, case: str, change: tuple[str, str]
) -> None:
    launch = emulated.launch

    def broken(kernel: sources.Kernel, *given: Any) -> None:
        emulated.changes = (change,) if kernel.name == "vortices" else ()
        launch(kernel, *given)

    pair = [tokens(emulated, case, "any", plain=plain) for plain in (False, True)]
    assert _agree(*pair)
    monkeypatch.setattr(emulated, "launch", broken)
    assert not _agree(tokens(emulated, case, "any", plain=False), pair[1])


def _agree(one: lod.TokenSet, two: lod.TokenSet) -> bool:
    assert one.weights is not None and two.weights is not None
    return (
        torch.allclose(one.sites, two.sites, rtol=1e-5, atol=2e-5)
        and torch.allclose(one.scores, two.scores, rtol=1e-5, atol=1e-6)
        and torch.equal(one.weights == 0, two.weights == 0)
    )


def test_gradients_are_torchs(emulated: EmulatedDevice) -> None:
    allocator = lod.allocate.SoftVortex(5, 8)
    found = allocator(torch.rand(1, 3, 40, 40), torch.rand(1, 5, 5))
    assert "vortices" not in [call[1].name for call in emulated.named("launch")]
    found.scores.sum().backward()  # type: ignore[no-untyped-call]
    assert allocator.centre_logits.grad is not None
    with torch.no_grad():
        allocator(torch.rand(1, 3, 40, 40), torch.rand(1, 5, 5))
    assert "vortices" in [call[1].name for call in emulated.named("launch")]


def test_more_patches_than_a_block_has_room_for(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vortices, "MOST_PATCHES", 24)
    with torch.no_grad():
        lod.allocate.SoftVortex(5, 8)(torch.rand(1, 3, 40, 40), torch.rand(1, 5, 5))
        assert "vortices" not in [call[1].name for call in emulated.named("launch")]
    one = torch.rand(1, 25)
    with pytest.raises(LimitError, match="1 x 1 tokens of 25 patches"):
        vortices.vortices(
            device.device_of(one), one, one, one[:, :2], one[0, :1], one[0, :1], (one[0, :5], one[0, :5]), (40, 40)
        )


def test_sites_that_are_nan_are_named(emulated: EmulatedDevice) -> None:
    allocator = lod.allocate.SoftVortex(5, 8)
    with torch.no_grad():
        allocator.log_radii.fill_(1000.0)
        with pytest.raises(InputError, match="sites are NaN"):
            allocator(torch.rand(1, 3, 40, 40), torch.rand(1, 5, 5))
    assert "vortices" in [call[1].name for call in emulated.named("launch")]


@pytest.mark.parametrize("patch", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("grid", [(1, 1), (3, 4), (2, 9)], ids=str)
def test_tiles(emulated: EmulatedDevice, grid: tuple[int, int], patch: int) -> None:
    """Also where a picture begins in the middle of two or four pixels, and in an order of its own."""
    height, width = grid[0] * patch, grid[1] * patch
    memory = torch.rand(2 * 3 * height * width + 2)
    for start in range(3):
        pictures = memory[start : start + 2 * 3 * height * width].view(2, 3, height, width)
        for given in (pictures, pictures.transpose(0, 1), pictures.flip(3)):
            found = vortices.tiles(device.device_of(given), given, patch)
            expected = given.unflatten(3, (grid[1], patch)).unflatten(2, (grid[0], patch)).permute(0, 2, 4, 1, 3, 5)
            assert torch.equal(found, expected.flatten(1, 2))


def test_which_patches_are_tiles(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of whole ones, as they are; and they blend to the same."""
    allocator, image = lod.allocate.SoftVortex(5, 4), torch.rand(2, 3, 24, 32)

    def launched(picture: torch.Tensor, **how: object) -> bool:
        emulated.calls.clear()
        with torch.no_grad():
            found = allocator(picture, **how)
        names = [call[1].name for call in emulated.named("launch")]
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(lod.allocate.SoftVortex, "_tiles", staticmethod(lambda scene: None))
            expected = allocator(picture, **how)
        assert torch.equal(found.patches, expected.patches)
        return "tiles" in names

    assert launched(image)
    assert not launched(image, mean=[0.5] * 3) and not launched(image, std=[0.5] * 3)
    assert not launched(image[..., :23, :]) and not launched(image.double().float().half())
    assert not launched((image * 255).byte())
    monkeypatch.setattr(vortices, "MOST_BLOCKS", 23)
    with pytest.raises(lod.errors.LimitError, match="2 x 48 patches"):
        vortices.tiles(device.device_of(image), image, 4)
