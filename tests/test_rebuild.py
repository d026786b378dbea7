"""Tokens back to a picture, against a loop over pixels."""

from __future__ import annotations

import importlib
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from skimage import data
from torch.utils import _pytree

import gpu_lod as lod
from gpu_lod import token_margins
from gpu_lod.errors import InputError
from gpu_lod.rebuild import psnr

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from quality.memory import peak_bytes

Site = tuple[float, float, float]


def token_set(sites: Sequence[Any], patches: torch.Tensor) -> lod.TokenSet:
    places = torch.tensor(sites, dtype=torch.float32)
    return lod.TokenSet(places, torch.zeros(places.shape[:-1]), patches, patches.shape[-1])


def met(at: float, n: int) -> float:
    """A place in pixels; the whole or half one that fp32 positions may mean by it."""
    near = round(2 * at) / 2
    return near if abs(at - near) <= n / 2**22 else at


def slow(tokens: lod.TokenSet, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One image, pixel by pixel, token by token, in double precision; the image and which token each pixel shows."""
    assert tokens.patches is not None
    patches, patch, (height, width) = tokens.patches.double(), tokens.patch, size
    image = patches.mean((0, 2, 3))[:, None, None].repeat(1, height, width)
    shown = torch.full(size, -1)
    for y in range(height):
        for x in range(width):
            finest = math.inf
            for number, (cx, cy, level) in enumerate(tokens.sites.double().tolist()):
                step = 2**level
                places, inside = [], True
                for pixel, n, at in ((x, width, cx), (y, height, cy)):
                    edge = [met(at * n + side * patch * step / 2, n) for side in (-1, 1)]
                    inside &= edge[0] <= pixel + 0.5 < edge[1]
                    place = (pixel + 0.5 - met(at * n, n)) / step + (patch - 1) / 2
                    places.append(min(max(place, 0.0), patch - 1.0))
                if not inside or level >= finest:
                    continue
                finest, shown[y, x] = level, number
                u, v = places
                (u0, fu), (v0, fv) = ((int(place), place - int(place)) for place in (u, v))
                u1, v1 = min(u0 + 1, patch - 1), min(v0 + 1, patch - 1)
                p = patches[number]
                upper = p[:, v0, u0] * (1 - fu) + p[:, v0, u1] * fu
                lower = p[:, v1, u0] * (1 - fu) + p[:, v1, u1] * fu
                image[:, y, x] = upper * (1 - fv) + lower * fv
    return image, shown


def bicubic(tokens: lod.TokenSet, size: tuple[int, int]) -> torch.Tensor:
    """`slow`, enlarged together: 16 samples a pixel, those beyond the patch's edge from what is shown there."""
    assert tokens.patches is not None
    patches, patch, (height, width) = tokens.patches.double(), tokens.patch, size
    image, shown = slow(tokens, size)
    sites = tokens.sites.double().tolist()
    kept = torch.cat([torch.where(shown >= 0, image, 0), (shown >= 0)[None]]).float()  # nothing of the rest
    means = lod.gather_patches(kept, tokens.sites, patch + 4, backend="torch")
    means = means[:, :-1] / means[:, -1:]

    def centre(number: int) -> tuple[float, float]:
        return met(sites[number][0] * width, width), met(sites[number][1] * height, height)

    def sample(number: int, u: int, v: int) -> torch.Tensor:
        at = [middle + (index - (patch - 1) / 2) * 2.0 ** sites[number][2]
              for middle, index in zip(centre(number), (u, v), strict=True)]  # fmt: skip
        x, y = (min(max(place, 0.5), n - 0.5) for place, n in zip(at, (width, height), strict=True))
        other = int(shown[int(y), int(x)])
        inside = 0 <= u < patch and 0 <= v < patch
        if not inside and other >= 0 and sites[other][2] < sites[number][2] - 0.5:
            return means[number, :, v + 2, u + 2].double()
        if inside or other < 0:
            return patches[number, :, min(max(v, 0), patch - 1), min(max(u, 0), patch - 1)]
        u0, v0 = ((place - middle) / 2.0 ** sites[other][2] + (patch - 1) / 2
                  for place, middle in zip((x, y), centre(other), strict=True))  # fmt: skip
        u0, v0 = min(max(u0, 0.0), patch - 1.0), min(max(v0, 0.0), patch - 1.0)
        values = patches[other]
        total = torch.zeros(len(values), dtype=torch.float64)
        for i in (math.floor(v0), math.ceil(v0)):
            for j in (math.floor(u0), math.ceil(u0)):
                weight = max(1 - abs(v0 - i), 0.0) * max(1 - abs(u0 - j), 0.0)
                share = (2 if v0 == int(v0) else 1) * (2 if u0 == int(u0) else 1)  # both are the same one
                total += values[:, i, j] * weight / share
        return total

    def weight(d: float) -> float:
        a, d = -0.75, abs(d)
        return (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a

    for y, x in (shown >= 0).nonzero().tolist():
        number = int(shown[y, x])
        u, v = ((pixel + 0.5 - middle) / 2.0 ** sites[number][2] + (patch - 1) / 2
                for pixel, middle in zip((x, y), centre(number), strict=True))  # fmt: skip
        image[:, y, x] = sum(
            sample(number, math.floor(u) + i, math.floor(v) + j)
            * weight(u - math.floor(u) - i) * weight(v - math.floor(v) - j)
            for i in range(-1, 3) for j in range(-1, 3)
        )  # fmt: skip
    return image


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("size", "patch", "dtype"),
    [((56, 70), 14, torch.uint8), ((37, 51), 7, torch.float32), ((1, 9), 4, torch.float16), ((6, 4), 8, torch.uint8)],
)
def test_level_0_patches_give_back_exact_pixels(
    size: tuple[int, int], patch: int, dtype: torch.dtype, mode: Any
) -> None:
    image = torch.rand(2, 3, *size).mul(255).to(dtype)
    cells = -(-size[0] // patch) * -(-size[1] // patch)
    tokens = lod.allocate.GridTopK(cells, patch)(image)
    found = lod.rebuild(tokens, size, mode=mode)
    assert found.image.dtype == dtype and found.image.is_contiguous()
    assert torch.equal(found.image, image)
    assert found.covered.all() and found.coverage.tolist() == [1.0, 1.0]


def test_a_coarse_token_is_enlarged_and_finer_ones_are_painted_over_it() -> None:
    coarse = torch.tensor([[0.0, 4.0], [8.0, 12.0]])
    patches = torch.stack([coarse, torch.full((2, 2), 99.0)])[:, None]
    found = lod.rebuild(token_set([(0.5, 0.5, 1), (0.25, 0.75, 0)], patches), (4, 4))
    expected = torch.tensor([[0, 1, 3, 4], [2, 3, 5, 6], [99, 99, 9, 10], [99, 99, 11, 12]], dtype=torch.float32)
    assert torch.equal(found.image[0], expected)
    # Whatever their order.
    turned = lod.rebuild(token_set([(0.25, 0.75, 0), (0.5, 0.5, 1)], patches.flip(0)), (4, 4))
    assert torch.equal(turned.image[0], expected)


def test_of_equally_fine_tokens_the_first_is_shown() -> None:
    patches = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None].expand(3, 1, 2, 2)
    found = lod.rebuild(token_set([(0.25, 0.5, 0), (0.5, 0.5, 0), (0.25, 0.5, 0)], patches), (2, 4))
    assert found.image[0].tolist() == [[1, 1, 2, 0 + 2]] * 2  # the last pixel is no token's: the mean, 2
    assert found.covered.tolist() == [[True, True, True, False]] * 2


def test_what_no_token_covers_is_filled() -> None:
    patches = torch.stack([torch.full((2, 2, 2), 10.0), torch.full((2, 2, 2), 30.0)])
    patches[:, 1] += 5
    tokens = token_set([(0.25, 0.25, 0), (0.75, 0.25, 0)], patches)
    for fill, expected in ((None, [20.0, 25.0]), (7, [7.0, 7.0]), ((1.0, 2.0), [1.0, 2.0])):
        found = lod.rebuild(tokens, (4, 4), fill)
        assert found.image[:, 2:].flatten(1).unique(dim=1).flatten().tolist() == expected
        assert found.image[:, 0, 0].tolist() == [10.0, 15.0]
        assert found.coverage == 0.5
    counts = lod.rebuild(
        replace(tokens, patches=torch.tensor([1, 2]).byte()[:, None, None, None].expand(2, 1, 2, 2)), (4, 4)
    )
    assert counts.image[0, 3].tolist() == [2, 2, 2, 2]  # 1.5, rounded


@given(st.data())
def test_any_sites_against_a_loop_over_pixels(data: st.DataObject) -> None:
    size = data.draw(st.tuples(st.integers(1, 13), st.integers(1, 13)))
    patch, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    part = st.one_of(st.floats(0, 1, width=32), st.integers(0, 26).map(lambda n: n / 26))
    level = st.one_of(st.floats(0, 6, width=32), st.sampled_from([0.0, 1.0, 2.0, 200.0]))
    sites = [[data.draw(st.lists(st.tuples(part, part, level), min_size=count, max_size=count))] for _ in range(2)]
    patches = torch.rand(2, count, 2, patch, patch)
    tokens = token_set([one[0] for one in sites], patches)
    found = lod.rebuild(tokens, size)
    for b in range(2):
        image, shown = slow(token_set(sites[b][0], patches[b]), size)
        assert torch.equal(found.covered[b], shown >= 0)
        assert (found.image[b].double() - image).abs().max() < 1e-4
        together = lod.rebuild(token_set(sites[b][0], patches[b]), size, mode="bicubic")
        assert (together.image.double() - bicubic(token_set(sites[b][0], patches[b]), size)).abs().max() < 1e-3
        assert torch.equal(together.covered, found.covered[b])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("fill", [None, 3.0])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_token_by_token_is_pixel_by_pixel(
    dtype: torch.dtype, fill: float | None, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: few tokens in a large picture are painted one after the other."""
    for seed, (height, width) in enumerate([(150, 131), (64, 260)]):
        torch.manual_seed(seed)
        sites = torch.rand(3, 17, 3) * torch.tensor([1.0, 1.0, 4.0])
        sites[:, ::3, 2] = sites[:, ::3, 2].round()
        grid = torch.randint(0, 8, (3, 6, 2)) * 8 + 4
        sites[:, :6] = torch.cat([grid / torch.tensor([width, height]), torch.zeros(3, 6, 1)], dim=-1)
        sites[0, -1] = torch.tensor([0.001, 0.999, 7.0])  # over all of it
        patches = (torch.rand(3, 17, 2, 8, 8) * 255).to(dtype)
        tokens = lod.TokenSet(sites, torch.zeros(3, 17), patches, 8)
        found = lod.rebuild(tokens, (height, width), fill, mode)
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module("gpu_lod.rebuild"), "BY_TOKEN", 10**9)
            expected = lod.rebuild(tokens, (height, width), fill, mode)
        assert torch.equal(found.image, expected.image) and torch.equal(found.covered, expected.covered)
        assert found.image.dtype == dtype and not bool(found.covered[1].all())


def test_pieces_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pixels are worked on at a time."""
    image = torch.rand(2, 1, 23, 31)
    tokens = lod.allocate.PyramidTopK(12, 3)(image)
    for mode in ("bilinear", "bicubic"):
        whole = lod.rebuild(tokens, (23, 31), mode=mode)
        for at_once in (1, 7, 31, 100):
            with monkeypatch.context() as patch:
                patch.setattr(sys.modules["gpu_lod.rebuild"], "AT_ONCE", at_once)
                patch.setattr(token_margins, "_AT_ONCE", at_once)
                parts = lod.rebuild(tokens, (23, 31), mode=mode)
            assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


@pytest.mark.parametrize(("size", "budget"), [((75, 75), 100), ((61, 97), 37), ((512, 375), 273)])
def test_tokens_that_tile_leave_no_seam(size: tuple[int, int], budget: int) -> None:
    """Edges of fractional levels meet in pixel centres: 75 px in 10 columns, each of 7.5."""
    image = torch.rand(1, 1, *size)
    for allocator in (lod.allocate.Downsample(budget, 3), lod.allocate.FoveatedPyramid(budget, 3)):
        assert lod.rebuild(allocator(image), size).covered.all(), allocator


def test_a_smooth_picture_survives_coarse_tokens() -> None:
    """That levels and centres mean to `rebuild` what they mean to `gather_patches`."""
    x, y = torch.meshgrid(torch.arange(128.0), torch.arange(128.0), indexing="xy")
    image = (0.2 + 0.004 * x + 0.002 * y)[None, None]
    tokens = lod.allocate.Downsample(30, 8)(image)
    assert (tokens.sites[..., 2] > 1).all()
    inner = (slice(None), slice(None), slice(8, 120), slice(8, 120))  # mips are flat at the edges
    found = lod.rebuild(tokens, (128, 128))
    # Half a step of the outermost samples, at 2^1.6 px each and 0.004 + 0.002 a pixel, is the most that clamping takes.
    assert (found.image - image)[inner].abs().max() <= 0.006 * 2**1.6 / 2


def test_images_of_a_batch_are_on_their_own() -> None:
    image = torch.rand(3, 3, 40, 33)
    tokens = lod.allocate.FoveatedPyramid(20, 6)(image, fixation=torch.tensor([[0.1, 0.2], [0.9, 0.9], [0.5, 0.5]]))
    found = lod.rebuild(tokens, (40, 33))
    assert tokens.patches is not None
    for b in range(3):
        one = lod.TokenSet(tokens.sites[b], tokens.scores[b], tokens.patches[b], 6)
        alone = lod.rebuild(one, (40, 33))
        assert torch.equal(alone.image, found.image[b]) and torch.equal(alone.covered, found.covered[b])
        assert alone.coverage == found.coverage[b]
        together = lod.rebuild(one, (40, 33), mode="bicubic").image
        assert torch.equal(together, lod.rebuild(tokens, (40, 33), mode="bicubic").image[b])
        assert not torch.equal(together, alone.image)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_gradients_in_the_patches(mode: Any) -> None:
    patches = torch.rand(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    sites = [(0.3, 0.4, 0.0), (0.6, 0.6, 0.7), (0.5, 0.2, 1.5)]
    assert torch.autograd.gradcheck(lambda x: lod.rebuild(token_set(sites, x), (7, 9), mode=mode).image, [patches])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tokens_of_a_smaller_picture_are_enlarged_as_that_is(dtype: torch.dtype) -> None:
    small = (torch.rand(3, 24, 30) * 255).to(dtype)
    patches = small.unfold(1, 6, 6).unfold(2, 6, 6).movedim(0, 2).flatten(0, 1)
    for times in (2, 4):
        level = float(math.log2(times))
        sites = [((column + 0.5) / 5, (row + 0.5) / 4, level) for row in range(4) for column in range(5)]
        size = (24 * times, 30 * times)
        expected = F.interpolate(small[None].float(), size, mode="bicubic", align_corners=False)[0]
        found = lod.rebuild(token_set(sites, patches), size, mode="bicubic").image
        if dtype == torch.uint8:
            assert (found.float() - expected.clamp(0, 255)).abs().max() <= 0.501
        else:
            assert (found - expected).abs().max() < 1e-3
            assert bool((found > small.amax() * 1.001).any())  # beyond the samples, as a cubic is


def test_bicubic_keeps_more_of_a_picture() -> None:
    picture = torch.from_numpy(data.astronaut()).permute(2, 0, 1)
    for name in ("Downsample", "FoveatedPyramid", "TokenDAG"):
        tokens = lod.allocate.make(name, 273, 14)(picture)
        alone, together = (
            float(psnr(lod.rebuild(tokens, (512, 512), mode=mode).image[None], picture[None]))
            for mode in ("bilinear", "bicubic")
        )
        assert together > alone + 0.5, (name, alone, together)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("by_token", [0, 10**9])
def test_pixels_of_no_data_stay_what_they_are(
    value: float, mode: Any, by_token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gpu_lod.rebuild"], "BY_TOKEN", by_token)
    image = torch.rand(2, 2, 38, 51)
    image[:, :, 9:21, 14:30] = value
    tokens = lod.allocate.GridTopK(20, 10)(image, relevance=torch.rand(2, 4, 6))
    found = lod.rebuild(tokens, (38, 51), fill=0.0, mode=mode)
    expected = torch.where(found.covered[:, None], image, 0)
    assert torch.equal(found.image.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("by_token", [0, 10**9])
def test_a_sample_that_is_nan_spoils_no_more_than_it_makes(by_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples a pixel along each side; those without weight are not read."""
    monkeypatch.setattr(sys.modules["gpu_lod.rebuild"], "BY_TOKEN", by_token)
    patches = torch.rand(4, 1, 6, 6)
    patches[0, 0, 2, 5] = math.nan  # beside another token
    quarters = [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)]
    found = lod.rebuild(token_set([(*place, 1.0) for place in quarters], patches), (24, 24), mode="bicubic")
    away = found.image.isnan()[0].nonzero() + 0.5 - torch.tensor([5.0, 11.0])
    assert 0 < len(away) <= 8 * 8 and float(away.abs().max()) < 4
    still = lod.rebuild(token_set([(*place, 0.0) for place in quarters], patches), (12, 12), mode="bicubic")
    assert int(still.image.isnan().sum()) == 1


def test_a_token_may_cover_no_pixel_centre() -> None:
    for site in ((0, 0, 0), (0, 0.5, 0), (0.5, 0, 0)):  # left of the first, or above it
        found = lod.rebuild(token_set([site], torch.full((1, 1, 1, 1), 3.0)), (3, 3))
        assert not found.covered.any() and found.coverage == 0
        assert torch.equal(found.image, torch.full((1, 3, 3), 3.0))


def test_psnr() -> None:
    image = torch.zeros(2, 1, 4, 4)
    image[1] = 0.1
    assert psnr(image, torch.zeros_like(image)).tolist() == [math.inf, pytest.approx(20)]
    counts = torch.full((1, 1, 2, 2), 51, dtype=torch.uint8)
    assert psnr(counts, torch.zeros_like(counts)).item() == pytest.approx(20 * math.log10(5))
    with pytest.raises(InputError, match="two alike"):
        psnr(image, counts)


def test_bad_input_says_what_came() -> None:
    good = token_set([(0.5, 0.5, 0)], torch.zeros(1, 1, 2, 2))
    halved = _pytree.tree_map(lambda leaf: leaf[..., :1, :] if leaf is good.patches else leaf, good)  # unchecked
    cases: list[tuple[Any, Any, Any, str]] = [
        (
            replace(good, patches=None),
            (4, 4),
            None,
            r"an image=, or read them: .*gather_patches\(image, ",
        ),
        (halved, (4, 4), None, r"patches are \(1, 1, 1, 2\); expected \(1, 1"),
        (good.sites, (4, 4), None, "expected a TokenSet"),
        (good, (4, 0), None, "width is 0"),
        (good, 4, None, "size is 4"),
        (good, torch.zeros(3, 5, 5), None, r"size is .*tensor \(3, 5, 5\); .*image.shape\[-2:\]"),
        (good, (4, 4), (1.0, 2.0), "expected 1 numbers"),
        (good, (4, 4), math.nan, "fill is nan"),
        (token_set([(0.5, 1.5, 0)], torch.zeros(1, 1, 2, 2)), (4, 4), None, "sites have y from"),
        (token_set([(0.5, 0.5, math.nan)], torch.zeros(1, 1, 2, 2)), (4, 4), None, "sites have levels"),
    ]
    for tokens, size, fill, message in cases:
        with pytest.raises(InputError, match=message):
            lod.rebuild(tokens, size, fill)
    with pytest.raises(InputError, match="mode is 'cubic'; expected"):
        lod.rebuild(good, (4, 4), mode="cubic")  # type: ignore[arg-type]


def test_a_rebuilt_picture_is_saved_and_loaded() -> None:
    found, file = lod.rebuild(lod.allocate.make("Random", 4, 4)(torch.rand(1, 3, 16, 16)), (16, 16)), io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is type(found) and torch.equal(loaded.image, found.image)
    assert torch.equal(loaded.coverage, found.coverage)


def test_a_fill_that_bytes_do_not_hold_is_refused() -> None:
    """It would come out as another one."""
    tokens = lod.allocate.GridTopK(1, 8)(torch.zeros(3, 32, 32, dtype=torch.uint8))
    for fill in (256, -5, 255.6, (3, -1, 7)):
        with pytest.raises(InputError, match="expected 0 to 255"):
            lod.rebuild(tokens, (32, 32), fill)
    assert int(lod.rebuild(tokens, (32, 32), 255.4).image.max()) == 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_what_it_holds_is_little_more_than_the_picture(dtype: torch.dtype) -> None:
    """In fp32 a slide of bytes would be four times that."""
    image = torch.zeros(3, 1200, 1600, dtype=dtype)
    tokens = lod.allocate.GridTopK(20, 224)(image, relevance=torch.rand(6, 8))
    found, peak = peak_bytes(lambda: lod.rebuild(tokens, (1200, 1600)))
    assert peak < 1.2 * (found.image.nbytes + found.covered.nbytes)


def test_a_token_that_is_on_the_grid_along_one_side_alone() -> None:
    """Its samples lie between pixels along the other, whichever way it is painted."""
    for site in ((12 / 64, 20.25 / 64, 0.0), (20.25 / 64, 12 / 64, 0.0)):
        tokens = token_set([[site]], torch.rand(1, 1, 1, 8, 8))
        assert tokens.patches is not None
        found = lod.rebuild(tokens, (64, 64))  # many pixels a token: painted one after the other
        expected, shown = slow(token_set([site], tokens.patches[0]), (64, 64))
        assert torch.equal(found.covered[0], shown >= 0)
        assert (found.image[0].double() - expected).abs().max() < 1e-5


def test_coverage_counts_every_pixel() -> None:
    covered = torch.ones(1, 64, 65, dtype=torch.bool)
    covered[0, 0, 0] = False
    assert lod.Rebuilt(torch.zeros(1, 1, 64, 65), covered).coverage.item() == pytest.approx(1 - 1 / (64 * 65), abs=1e-7)


def test_what_no_token_covers_has_no_part_in_those_beside_it() -> None:
    sites, patches = [(0.25, 0.5, 3.0), (68 / 128, 0.5, 0.0)], torch.full((2, 1, 8, 8), 0.5)
    for fill in (0.0, 1e6):
        found = lod.rebuild(token_set(sites, patches), (128, 128), fill, "bicubic")
        assert (found.image[0][found.covered] - 0.5).abs().max() < 1e-5


def test_margins_at_the_edge_of_the_picture_are_samples_themselves() -> None:
    """However places round: beside them is NaN, which is not read."""
    for _ in range(30):
        level = float(torch.rand(()) * 2 + 1)
        x, y = float(torch.rand(()) * 0.2 + 0.4), 6 * 2**level / 2 / 60  # the upper edge is the picture's
        sites, patches = torch.tensor([[x, y, level]]), torch.rand(1, 1, 6, 6)
        patches[0, 0, 0, 2] = math.nan
        found = lod.rebuild(lod.TokenSet(sites, torch.zeros(1), patches, 6), (60, 60), 0.0, "bicubic")
        at = (torch.arange(60) + 0.5 - sites[0, 0].double() * 60) / 2 ** sites[0, 2].double() + 2.5
        read = (at.floor() - 1 <= 2) & (at.floor() + 2 >= 2) & (at >= -0.5) & (at < 5.5)
        assert torch.equal(found.image[0, 0].isnan(), read)
