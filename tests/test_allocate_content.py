"""Allocators that look at the picture: TokenDAG, FrequencyAware, Wavelet, HybridAtlas."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images import noise

import gpu_lod as lod
from gpu_lod import planewise
from gpu_lod.allocate import node_losses, residual
from gpu_lod.allocate.energy import ROUNDING, relevances
from gpu_lod.allocate.frequency_aware import energies, given_away, served
from gpu_lod.allocate.hybrid_atlas import majority, runs, squares
from gpu_lod.allocate.scene import Scene, cells_of
from gpu_lod.allocate.stratified import shared_out
from gpu_lod.allocate.wavelet import band_energies
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.patch_grid import pooled
from gpu_lod.rebuild import psnr

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from quality.memory import peak_bytes

LOOKING = ["TokenDAG", "FrequencyAware", "Wavelet", "HybridAtlas"]


def scene_of(image: torch.Tensor, patch: int, labels: torch.Tensor | None = None) -> Scene:
    size = image.shape[-2], image.shape[-1]
    return Scene(size, patch, torch.ones(len(image), *cells_of(size, patch)), None, image, None, labels)


def stripes(angle: float, size: int, wavelength: float = 6.0) -> torch.Tensor:
    """Varying along (cos, sin) of the angle, y down."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    phase = x * math.cos(math.radians(angle)) + y * math.sin(math.radians(angle))
    return 0.5 + 0.4 * torch.cos(2 * math.pi * phase / wavelength)


def checks_of(block: int, rows: int, columns: int, amplitude: float) -> torch.Tensor:
    """A chequerboard of blocks: all of its energy is in one band of the Haar transform."""
    y, x = torch.meshgrid(torch.arange(rows) // block, torch.arange(columns) // block, indexing="ij")
    return 0.5 + amplitude * (1 - 2.0 * ((x + y) % 2))


def over_patches(pixels: torch.Tensor, side: int, nodes: tuple[int, int]) -> torch.Tensor:
    """Means of [H, W] over patches of a side, one by one, shifted inward at the far edges."""
    height, width = pixels.shape
    high, wide = min(side, height), min(side, width)
    starts = [[min(i * side, n - min(side, n)) for i in range(k)] for n, k in zip((height, width), nodes, strict=True)]
    return torch.tensor([[float(pixels[y : y + high, x : x + wide].mean()) for x in starts[1]] for y in starts[0]])


RAGGED = [(50, 61, 8), (45, 37, 5), (33, 20, 14), (3, 40, 14), (7, 9, 1), (64, 48, 8)]


def test_relevance_of_nodes_is_the_mean_of_their_cells() -> None:
    """Also where they have 2 or 1 of 4 children."""
    relevance = torch.zeros(1, 3, 3)
    relevance[0, 2, 2] = 5
    score = lod.allocate.TokenDAG(1, 8)(torch.rand(1, 1, 24, 24), relevance).scores
    assert float(score) == pytest.approx(1 / 9)
    values = torch.rand(2, 13, 6)
    scene = Scene((26, 12), 2, values, None, None, None, None)
    for level, found in enumerate(relevances(scene, 4)):
        for y, x in itertools.product(range(found.shape[1]), range(found.shape[2])):
            cells = values[:, y << level : (y + 1) << level, x << level : (x + 1) << level]
            assert torch.allclose(found[:, y, x], cells.mean((1, 2)) / values.amax((1, 2)))


# -- TokenDAG ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (61, 64), (67, 90)])
def test_errors_by_bands_of_rows(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(3, 3, *size)
    whole = lod.allocate.TokenDAG(1, 4).errors(image)
    monkeypatch.setattr(node_losses, "AT_ONCE", 16 * size[1])
    for one, other in zip(lod.allocate.TokenDAG(1, 4).errors(image), whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (61, 90)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_patches_are_those_of_the_picture(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Whether its levels are made once for all, or again to be read."""
    image = noise(2, 3, *size, dtype=dtype)
    for picture in (image, image[0]):
        tokens = lod.allocate.TokenDAG(20, 8, morph=1)(picture)
        assert tokens.sites[..., 2].max() > 1
        patches = lod.gather_patches(picture, tokens.sites, 8)
        # Levels of few texels are summed in another order where they are made anew.
        assert torch.allclose(tokens.patches, patches, rtol=0, atol=3e-7 if dtype == torch.float32 else 0)


@pytest.mark.parametrize(("height", "width", "patch"), [(50, 61, 4), (64, 64, 4), (1, 9, 2), (5, 13, 14), (23, 40, 1)])
def test_errors_are_what_block_means_lose(height: int, width: int, patch: int) -> None:
    """Counted in float64, block by block; and no parent has less than its children together."""
    image = torch.rand(2, 3, height, width)
    errors = lod.allocate.TokenDAG(1, patch).errors(image)
    rows, columns = cells_of((height, width), patch)
    assert len(errors) == 1 + (max(rows, columns) - 1).bit_length()
    for level, found in enumerate(errors):
        step, side = 2**level, 2**level * patch
        assert found.shape == (2, -(-rows // step), -(-columns // step))
        for y in range(found.shape[1]):
            for x in range(found.shape[2]):
                node = image[0, :, y * side : (y + 1) * side, x * side : (x + 1) * side].double()
                blocks = [rest for part in node.split(step, 1) for rest in part.split(step, 2)]
                lost = sum(float((block - block.mean((1, 2), keepdim=True)).square().sum()) for block in blocks)
                assert float(found[0, y, x]) == pytest.approx(lost, rel=1e-5, abs=1e-9)
        if level:
            padded = torch.nn.functional.pad(errors[level - 1], (0, found.shape[2] * 2, 0, found.shape[1] * 2))
            below = padded.unfold(1, 2, 2).unfold(2, 2, 2).sum((3, 4))[:, : found.shape[1], : found.shape[2]]
            assert (found >= below * (1 - 1e-6)).all()


@pytest.mark.parametrize("width", [64, 61])
def test_errors_of_faint_detail_beside_a_step(width: int) -> None:
    """What is flat loses nothing, whatever lies beside it, and digits do not go to the level of the light."""
    image = torch.full((1, 1, 32, width), 0.3)
    image[..., 32:] = 0.9 + 1e-4 * noise(1, 1, 32, width - 32)
    finest = lod.allocate.TokenDAG(1, 4).errors(image)[1]
    assert (finest[..., :4] == 0).all()
    for y, x in itertools.product(range(4), range(4, finest.shape[2])):
        node = image[0, 0, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8].double()
        blocks = [rest for part in node.split(2, 0) for rest in part.split(2, 1)]
        lost = sum(float((block - block.mean()).square().sum()) for block in blocks)
        assert float(finest[0, y, x]) == pytest.approx(lost, rel=1e-3)


def test_errors_of_pyramids_and_single_images(photo: torch.Tensor) -> None:
    allocator = lod.allocate.TokenDAG(1)
    errors = allocator.errors(photo[None, :, :200, :99])
    for other in (allocator.errors(photo[:, :200, :99]), allocator.errors(lod.mipmap(photo[:, :200, :99]))):
        assert all(torch.equal(level, single[None]) for level, single in zip(errors, other, strict=True))
    assert float(allocator.errors(torch.full((3, 91, 77), 0.3))[-1]) == 0, "what is flat loses nothing"


def field(sites: torch.Tensor, nodes: torch.Tensor, cells: int) -> torch.Tensor:
    """The level of the token over each cell of a square grid whose side is a power of two."""
    result = torch.full((cells, cells), -1.0)
    for (x, y, level), node in zip(sites.tolist(), nodes.long().tolist(), strict=True):
        side = 2**node
        left, top = round(x * cells - side / 2), round(y * cells - side / 2)
        result[top : top + side, left : left + side] = level
    assert (result >= 0).all(), "the cover has a hole"
    return result


def test_the_cut_is_at_a_threshold_of_the_error(photo: torch.Tensor) -> None:
    """All that was split had a larger error than all that was not."""
    image = photo[None, :, :256, :256].float() / 255
    relevance = torch.ones(1, 32, 32)
    allocator = lod.allocate.TokenDAG(1 + 3 * 50, 8, morph=0)
    sites = allocator(image, relevance).sites[0]
    levels = field(sites, sites[:, 2], 32)
    errors = allocator.errors(image)
    kept, split = [], []
    for level in range(1, 6):
        coarse = levels.view(32 // 2**level, 2**level, 32 // 2**level, 2**level).amax((1, 3))
        finest = levels.view(32 // 2**level, 2**level, 32 // 2**level, 2**level).amin((1, 3))
        kept += errors[level][0][(coarse == level) & (finest == level)].tolist()
        split += errors[level][0][coarse < level].tolist()
    slack = 3 * 8**2 * ROUNDING * 341  # what rounding to 8 bits adds, at the root
    assert split and kept and min(split) > max(kept) - slack > slack


def test_a_cut_by_error_loses_less_than_an_even_one(photo: torch.Tensor) -> None:
    image = photo[None, :, :256, :256]
    allocator = lod.allocate.TokenDAG(256, 8, morph=0)
    errors = allocator.errors(image)
    sites = allocator(image, torch.ones(1, 32, 32)).sites[0]
    lost = 0.0
    for x, y, level in sites.tolist():
        side = 2 ** int(level)
        lost += float(errors[int(level)][0, round(y * 32 - side / 2) // side, round(x * 32 - side / 2) // side])
    assert lost < 0.7 * float(errors[1].sum())


def test_levels_move_without_a_pop(photo: torch.Tensor) -> None:
    """From one picture to another in small steps: the level over every cell moves in small steps, while tokens split
    and merge; twice the steps, half as far."""
    first, last = (part.float() / 255 for part in (photo[:, :128, :128], photo[:, 100:228, 100:228]))
    allocator = lod.allocate.TokenDAG(1 + 3 * 20, 8)
    whole = lod.allocate.TokenDAG(1 + 3 * 20, 8, morph=0)

    def jumps(steps: int) -> tuple[float, int]:
        fields, swaps = [], set()
        for share in torch.linspace(0, 0.5, steps):
            image = torch.lerp(first, last, float(share))[None]
            nodes, sites = (one.choose(scene_of(image, 8))[0][0] for one in (whole, allocator))
            assert torch.equal(sites[:, :2], nodes[:, :2]) and torch.equal(sites[:, 2].floor(), nodes[:, 2])
            fields.append(field(sites, nodes[:, 2], 16))
            swaps.add(tuple(nodes.flatten().tolist()))
        moves = [float((a - b).abs().max()) for a, b in itertools.pairwise(fields)]
        return max(moves), len(swaps)

    coarse, _ = jumps(60)
    fine, swaps = jumps(120)
    assert swaps > 2, "nothing split, so nothing could pop"
    assert fine < 0.6 * coarse < 0.3


def test_tokens_rise_over_the_last_part_of_the_way(photo: torch.Tensor) -> None:
    picture = photo[None, :, :128, :128]
    nodes, whole, last = (
        lod.allocate.TokenDAG(60, 8, morph=morph)(picture).sites[0, :, 2].double() for morph in (0, 1, 0.25)
    )
    way = whole - nodes
    assert 0.2 < float(way.mean()) < 0.8 and len(way.unique()) > 30
    assert torch.allclose(last - nodes, ((way - 0.75) / 0.25).clamp(min=0), atol=1e-5)
    assert float((last > nodes).double().mean()) > 0.05


def test_levels_stay_below_the_next_by_ties_too() -> None:
    """Half of a level is split, and all of it is worth the same."""
    image, relevance = torch.full((1, 1, 64, 64), 0.5), torch.ones(1, 8, 8)
    nodes = lod.allocate.TokenDAG(10, 8, morph=0)(image, relevance).sites
    sites = lod.allocate.TokenDAG(10, 8)(image, relevance).sites
    assert torch.equal(sites[..., 2].floor(), nodes[..., 2])
    assert (sites[..., 2] > nodes[..., 2] + 0.99).any()


def test_detail_and_relevance_decide_where_tokens_go() -> None:
    image = torch.full((2, 3, 128, 128), 0.5)
    image[:, :, :64] += torch.rand(2, 3, 64, 128) / 4
    relevance = torch.ones(2, 16, 16)
    relevance[1, :, :8] = 0.01
    sites = lod.allocate.TokenDAG(60, 8, morph=0)(image, relevance).sites
    for (x, y, level), wanted in ((sites[0].T, lambda x, y: y < 0.5), (sites[1].T, lambda x, y: (y < 0.5) & (x > 0.5))):
        assert wanted(x, y)[level == 0].all() and (level == 0).sum() >= 30
    flat = lod.allocate.TokenDAG(60, 8, morph=0)(torch.ones(1, 1, 128, 128), relevance[1:]).sites[0]
    assert (flat[:, 2] == 0).sum() >= 30
    assert (flat[flat[:, 2] == 0, 0] > 0.5).all(), "where there is nothing to see, relevance alone decides"


def test_another_budget_scales_the_split_and_rounds_down() -> None:
    """Of 64 tokens 64 * 224 / 273 = 52.5 are split; the 12 that are left go by weight, here to the first band alone."""
    scene = Scene((64, 64), 8, torch.ones(1, 8, 8), *[None] * 4)
    counts = lod.allocate.FrequencyAware(64, 8)._counts(scene, torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))
    assert counts.tolist() == [[42, 8, 7, 7]]


# -- FrequencyAware ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 30), st.booleans(), st.integers(0, 2**20))
def test_patches_are_given_away_by_the_best_pair(bands: int, patches: int, ties: bool, seed: int) -> None:
    torch.manual_seed(seed)
    worth = torch.rand(2, bands, patches)
    worth = (worth * 3).round() if ties else worth
    total = seed % (patches + 1)
    anything = torch.full((2, bands), patches)
    counts = shared_out(torch.rand(2, bands).double(), anything, total, least=0)
    taken = given_away(worth, counts, int(counts.sum(1).max()))
    assert torch.equal(served(worth, counts), taken)
    for image in range(2):
        pairs = sorted((-float(worth[image, b, p]), b, p) for b in range(bands) for p in range(patches))
        left: list[int] = counts[image].tolist()
        expected: set[int] = set()
        for _, b, p in pairs:
            if left[b] and p not in expected:
                left[b] -= 1
                expected.add(p)
        assert set(taken[image].nonzero()[:, 0].tolist()) == expected and len(expected) == total


def four_quadrants() -> torch.Tensor:
    """0 and 45 degrees above, 90 and 135 below."""
    top, bottom = (torch.cat([stripes(a, 160), stripes(a + 45, 160)], dim=1) for a in (0, 90))
    return torch.cat([top, bottom])[None, None]


def quadrants(sites: torch.Tensor) -> list[int]:
    return torch.bincount((sites[:, 1] > 0.5).long() * 2 + (sites[:, 0] > 0.5), minlength=4).tolist()


@pytest.mark.parametrize("band", range(4))
def test_the_query_names_the_band(band: int) -> None:
    """128 / 32 / 32 / 32, and the rest for what the query names: each from the quadrant with stripes of that angle."""
    image, relevance = four_quadrants(), torch.ones(1, 40, 40)
    hint = torch.nn.functional.one_hot(torch.tensor(band), 4).float()
    sites = lod.allocate.FrequencyAware(273, 8)(image, relevance, hint).sites[0]
    assert quadrants(sites) == [128 + 49 if k == band else 32 for k in range(4)]
    sites = lod.allocate.FrequencyAware(100, 8)(image, relevance, hint).sites[0]
    found = quadrants(sites)  # 82 of 100 by 128 : 32 : 32 : 32 are 46.9 and 11.7 each, and 18 by the query
    assert found.pop(band) == 47 + 18 and sorted(found) == [11, 12, 12]


def test_the_strongest_band_has_128_and_the_rest_is_shared_by_weight() -> None:
    hint = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    sites = lod.allocate.FrequencyAware(273, 8)(four_quadrants(), torch.ones(1, 40, 40), hint).sites[0]
    assert quadrants(sites) == [128 + 33, 32 + 16, 32, 32]


def test_energy_speaks_where_no_query_does() -> None:
    """Of each image, also in one batch with a query."""
    strong = torch.stack([four_quadrants()[0], four_quadrants()[0]])
    strong[:, :, 160:, :160] = 0.5 + (strong[:, :, 160:, :160] - 0.5) * 1.2
    query = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    allocator = lod.allocate.FrequencyAware(273, 8, split=(128, 48, 48, 49))
    relevance = torch.ones(2, 40, 40)
    hinted = allocator(strong, relevance, query).sites
    assert torch.equal(hinted[0], allocator(strong, relevance).sites[0])
    assert quadrants(hinted[0])[2] == 128 and quadrants(hinted[1])[0] == 128


def test_energies_of_patches_on_every_grid(photo: torch.Tensor) -> None:
    """About the mean of full resolution's, where there is no finer detail: stripes 12 pixels apart, whatever P."""
    for patch in (1, 5, 8, 15):
        image = torch.stack([stripes(a, 63, 12.0) for a in (0, 45, 90, 135)])[:, None]
        found = energies(scene_of(image, patch))
        assert found.shape[2:] == cells_of((63, 63), patch)
        inner = found[:, :, 1:-1, 1:-1].mean((2, 3))
        assert (inner.argmax(1) == torch.arange(4)).all()
        assert torch.allclose(inner.diagonal().mean() / inner.diagonal(), torch.ones(4), atol=0.1)
    one = energies(scene_of(photo[None, :, :1, :1], 14))
    assert one.shape == (1, 4, 1, 1)


@pytest.mark.parametrize(("height", "width", "patch"), RAGGED)
def test_energies_are_of_the_patches_handed_out(height: int, width: int, patch: int) -> None:
    image = torch.rand(1, 1, height, width)
    [found] = lod.oriented_energy(lod.gaussian(image, 2).levels[1], 1)
    pixels = found[0, 0].double().repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :height, :width]
    cells = cells_of((height, width), patch)
    for band, energy in zip(pixels, energies(scene_of(image, patch))[0], strict=True):
        assert torch.allclose(energy, over_patches(band, patch, cells), rtol=1e-5)


def test_roots_may_be_patches_of_the_grid() -> None:
    """With max_level=0 they are the tokens, and there is nothing to split."""
    image, relevance = torch.rand(1, 3, 40, 50), torch.rand(1, 5, 7)
    for name in ("TokenDAG", "FoveatedPyramid"):
        sites = lod.allocate.make(name, 35, 8, max_level=0)(image, relevance).sites[0]
        assert (sites[:, 2] == 0).all() and len(sites[:, :2].unique(dim=0)) == 35
        with pytest.raises(InputError, match="34"):
            lod.allocate.make(name, 34, 8, max_level=0)(image, relevance)


# -- Wavelet -----------------------------------------------------------------------------------------------------------


def test_band_energies_are_those_of_pywavelets(photo: torch.Tensor) -> None:
    import pywt

    image = photo[None, :1, :128, :192].float() / 255
    found = band_energies(scene_of(image, 8), 4)
    details = pywt.wavedec2(image[0, 0].double().numpy(), "haar", level=4)[:0:-1]
    for level, bands in enumerate(details):
        energy = torch.from_numpy(sum(np.square(band) for band in bands))
        nodes = energy.unfold(0, 4, 4).unfold(1, 4, 4).sum((2, 3))
        assert torch.allclose(found[level][0].double(), nodes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wavelet", ["haar", "db2", "bior4.4"])
def test_band_energies_stay_in_place(wavelet: str) -> None:
    """A spot of noise in the middle of a node, at sides that are no multiples of anything."""
    for patch, level in ((14, 0), (15, 0), (14, 1), (5, 2)):
        image = torch.full((1, 1, 20 * patch + 3, 17 * patch + 1), 0.5)
        side = patch * 2**level
        image[..., 2 * side + side // 4 : 3 * side - side // 4, side + side // 4 : 2 * side - side // 4] += 0.3
        image = image + 0.1 * (torch.rand_like(image) - 0.5) * (image > 0.6)
        found = band_energies(scene_of(image, patch), 3, wavelet)
        assert [tuple(band.shape[1:]) for band in found] == [(-(-21 // 2**k), -(-18 // 2**k)) for k in range(3)]
        assert int(found[level][0].flatten().argmax()) == 2 * found[level].shape[2] + 1


def test_coefficients_between_the_nodes_of_an_odd_side() -> None:
    """Of patches of one pixel, two share each coefficient along each side."""
    found = band_energies(scene_of(torch.rand(1, 1, 4, 4), 1), 3)
    assert [tuple(band.shape) for band in found] == [(1, 4, 4), (1, 2, 2), (1, 1, 1)]
    assert torch.equal(found[0][:, ::2, ::2], found[0][:, 1::2, 1::2]) and float(found[2]) > 0


@pytest.mark.parametrize(("height", "width", "patch"), RAGGED)
def test_band_energies_are_of_the_patches_handed_out(height: int, width: int, patch: int) -> None:
    """Of whole coefficients, those that PyWavelets finds in the picture without the pixels that are too few for one."""
    import pywt

    image = torch.rand(1, 1, height, width)
    rows, columns = cells_of((height, width), patch)
    for level, found in enumerate(band_energies(scene_of(image, patch), 3)):
        step = 2 ** (level + 1)
        if step > min(height, width):
            continue
        whole = image[0, 0, : height // step * step, : width // step * step].double().numpy()
        bands = pywt.wavedec2(whole, "haar", level=level + 1)[1]
        energy = torch.from_numpy(sum(np.square(band) for band in bands))
        pixels = energy.repeat_interleave(step, 0).repeat_interleave(step, 1)
        expected = over_patches(pixels, patch << level, (-(-rows >> level), -(-columns >> level)))
        assert torch.allclose(found[0], expected * (patch / 2) ** 2, rtol=1e-4)


def test_levels_count_no_pixel_twice() -> None:
    """As much energy in two bands, and 5 x 5 coarse patches over 4.5 x 4.5 nodes' worth of picture."""
    image = (checks_of(1, 72, 72, 0.2) + checks_of(2, 72, 72, 0.2))[None, None]
    sites = lod.allocate.Wavelet(18, 8, levels=2)(image, torch.ones(1, 9, 9)).sites[0]
    assert (sites[:, 2] == 1).sum() == 9


@pytest.mark.parametrize("level", range(4))
def test_tokens_go_to_the_level_that_shows_it(level: int) -> None:
    image = checks_of(2**level, 128, 128, 0.2)[None, None]
    sites = lod.allocate.Wavelet(4, 8)(image, torch.ones(1, 16, 16)).sites[0]
    assert (sites[:, 2] == level).all()


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_no_more_levels_than_are_asked_for(levels: int) -> None:
    """Where all that there is to see is in a coarser one, and as many tokens as there are patches."""
    image, relevance = checks_of(2**levels, 128, 128, 0.2)[None, None], torch.ones(1, 16, 16)
    there = [(16 >> level) ** 2 for level in range(levels)]
    sites = lod.allocate.Wavelet(sum(there), 8, levels=levels)(image, relevance).sites[0]
    assert [int((sites[:, 2] == level).sum()) for level in range(levels)] == there
    with pytest.raises(InputError, match=f"there are {sum(there)} patches of {levels} level"):
        lod.allocate.Wavelet(sum(there) + 1, 8, levels=levels)(image, relevance)


def test_levels_share_by_energy_and_relevance() -> None:
    """Fine detail on the left, coarse detail of twice the amplitude, four times the energy, on the right."""
    image = torch.cat([checks_of(1, 128, 64, 0.1), checks_of(4, 128, 64, 0.2)], dim=1)[None, None]
    relevance = torch.ones(1, 16, 16)
    allocator = lod.allocate.Wavelet(10, 8)
    x, _, level = allocator(image, relevance).sites[0].T
    assert (level == 2).sum() == 8 and (level == 0).sum() == 2
    assert (x[level == 2] > 0.5).all() and (x[level == 0] < 0.5).all()
    relevance[..., :8] = 16
    x, _, level = allocator(image, relevance).sites[0].T
    assert (level == 2).sum() == 2 and (level == 0).sum() == 8
    full = lod.allocate.Wavelet(9 + 120, 8)(image, torch.ones(1, 16, 16)).sites[0]
    assert (full[:, 2] == 2).sum() == 16, "no more than there are; the rest goes on"


def test_wavelets_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.rand(1, 3, 32, 32)
    with pytest.raises(InputError, match="'db2'"):
        lod.allocate.Wavelet(4, 8, wavelet="wave")(image)
    with pytest.raises(InputError, match="budget is 22, and there are 21 patches of 3 levels"):
        lod.allocate.Wavelet(22, 8)(image)
    monkeypatch.setitem(sys.modules, "pywt", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[allocate\]'"):
        lod.allocate.Wavelet(4, 8)(image)


# -- HybridAtlas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width", "patch"), [(50, 61, 8), (64, 32, 16), (3, 40, 14), (9, 9, 1)])
def test_labels_of_patches_are_those_of_most_pixels(height: int, width: int, patch: int) -> None:
    """Counted one by one, patches at the far edges shifted inward; the smallest of equally frequent ones."""
    labels = torch.randint(-1, 3, (2, height, width))
    scene = scene_of(torch.zeros(2, 1, height, width), patch, labels)
    found = majority(labels, scene)
    for y in range(scene.grid[0]):
        for x in range(scene.grid[1]):
            top, left = max(min(y * patch, height - patch), 0), max(min(x * patch, width - patch), 0)
            for image in range(2):
                part = labels[image, top : top + patch, left : left + patch]
                values, counts = part.unique(return_counts=True)
                assert int(found[image, y, x]) == int(values[counts == counts.max()].min())


def test_regions_share_by_the_relevance_that_they_hold() -> None:
    labels = torch.zeros(1, 20, 30, dtype=torch.long)
    labels[0, 2:8, 2:8] = 7
    labels[0, 10:18, 20:29] = -3
    relevance = torch.ones(1, 20, 30)
    relevance[0, 2:8, 2:8] = 4  # holds 144, the other region 72
    sites = lod.allocate.HybridAtlas(30, background=0.1)(relevance=relevance, labels=labels).sites[0]
    cells = [(int(y * 20), int(x * 30)) for x, y, _ in sites.tolist()]
    found = [int(labels[0, y, x]) for y, x in cells]
    assert (found.count(7), found.count(-3), found.count(0)) == (18, 9, 3)
    assert all((level > 0) == (label == 0) for level, label in zip(sites[:, 2].tolist(), found, strict=True))
    # Pixels say the same as patches do.
    pixels = labels.repeat_interleave(4, 1).repeat_interleave(4, 2)
    image = torch.rand(1, 3, 80, 120)
    again = lod.allocate.HybridAtlas(30, patch=4)(image, relevance, labels=pixels)
    assert torch.equal(again.sites, sites[None])


def test_what_one_side_cannot_take_goes_to_the_other() -> None:
    labels = torch.zeros(2, 6, 6, dtype=torch.long)
    labels[0, 0, :4] = 1
    labels[1, :, 1:] = 1
    sites = lod.allocate.HybridAtlas(20, background=0.5)(relevance=torch.rand(2, 6, 6), labels=labels).sites
    ahead = [sum(int(labels[b, int(y * 6), int(x * 6)]) for x, y, _ in sites[b].tolist()) for b in range(2)]
    assert ahead == [4, 14], "4 of 4, and 20 less the 6 of the background"
    levels = sites[..., 2].sort(dim=1).values
    assert not levels[0, :4].any() and (levels[0, 4:] >= 1).all(), "16 tokens stand for two patches each"
    assert not levels[1].any()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**20))
def test_runs_of_the_background_are_even_and_covered(rows: int, columns: int, patch: int, seed: int) -> None:
    """Each has one cell in its middle, and a square of its own about it."""
    torch.manual_seed(seed)
    size = rows * patch - int(torch.randint(patch, ())), columns * patch - int(torch.randint(patch, ()))
    scene = scene_of(torch.zeros(3, 1, *size), patch)
    eligible = torch.rand(3, rows, columns) < torch.rand(3, 1, 1)
    count = (torch.rand(3) * (eligible.sum((1, 2)) + 1)).long().clamp(max=rows * columns)
    run, middle = runs(eligible, count)
    assert not (middle & ~eligible).any() and torch.equal(middle.sum((1, 2)), count)
    sites = squares(scene, eligible, run, int(count.max()) + 1).view(3, rows, columns, 3)
    for image in range(3):
        numbers = run[image][eligible[image]]
        if int(count[image]) == 0:
            continue
        assert run[image][middle[image]].sort().values.tolist() == list(range(int(count[image])))
        lengths = numbers.bincount()
        assert len(lengths) == count[image] and int(lengths.max()) - int(lengths.min()) <= 1
        own = sites[image][middle[image]]
        assert len(own.unique(dim=0)) == len(own)
        for y, x in eligible[image].nonzero().tolist():
            (at_x, at_y, level), reach = sites[image, y, x].tolist(), 1e-3
            half = patch * 2**level / 2 + reach
            for at, cell, n in ((at_x, x, size[1]), (at_y, y, size[0])):
                assert at * n - half <= cell * patch and min((cell + 1) * patch, n) <= at * n + half


def test_squares_are_the_smallest() -> None:
    scene = scene_of(torch.zeros(1, 1, 70, 78), 10)  # 7 x 8 cells, the last column 8 pixels wide
    cells = torch.zeros(1, 7, 8, dtype=torch.bool)
    cells[0, 0, 0] = cells[0, 0, 7] = True
    cells[0, 4:6, 2:4] = True
    run, _ = runs(cells, torch.tensor([3]))
    found = squares(scene, cells, run, 3).view(7, 8, 3)
    assert run[cells].tolist() == [0, 0, 1, 1, 2, 2], "the corners, then a row of the block each"
    corners, first, second = (found[at].tolist() for at in ((0, 0), (4, 2), (5, 3)))
    assert corners == pytest.approx([0.5, 5 / 70, math.log2(7.8)], abs=1e-6)
    assert first == pytest.approx([30 / 78, 45 / 70, 1.0], abs=1e-6)
    assert second == pytest.approx([30 / 78, 55 / 70, 1.0], abs=1e-6)
    run, _ = runs(cells, torch.tensor([6]))
    alone = squares(scene, cells, run, 6).view(7, 8, 3)[0, 7]
    assert alone.tolist() == pytest.approx([73 / 78, 5 / 70, 0.0], abs=1e-6), "flush with the edge"


def test_runs_are_compact() -> None:
    """Quarters, sixteenths and so on of a whole grid; and no large square in a background of any shape."""
    whole = torch.ones(1, 32, 32, dtype=torch.bool)
    _, row = runs(torch.ones(1, 1, 8, dtype=torch.bool), torch.tensor([2]))
    assert row.nonzero()[:, 2].tolist() == [1, 5], "in the middle"
    run, middle = runs(whole, torch.tensor([64]))
    assert (middle.view(8, 4, 8, 4).sum((1, 3)) == 1).all()
    assert all(len(run[0, y : y + 4, x : x + 4].unique()) == 1 for y in range(0, 32, 4) for x in range(0, 32, 4))
    eligible = whole.clone()
    eligible[:, 8:20, 5:25] = False
    run, _ = runs(eligible, torch.tensor([49]))
    levels = squares(scene_of(torch.zeros(1, 1, 32, 32), 1), eligible, run, 49)[0, :, 2][eligible[0].flatten()]
    assert float(levels.mean()) < math.log2(784 / 49) / 2 + 1.5


def test_superpixels_find_what_stands_out(photo: torch.Tensor) -> None:
    """A square that looks and matters differently gets the tokens, and the background is covered all the same."""
    image = torch.full((1, 3, 160, 160), 0.4)
    image[..., 32:80, 80:128] = torch.tensor([0.9, 0.2, 0.1]).view(3, 1, 1)
    relevance = torch.full((1, 20, 20), 0.1)
    relevance[:, 4:10, 10:16] = 1
    allocator = lod.allocate.HybridAtlas(40, 8)
    tokens = allocator(image, relevance)
    x, y, level = tokens.sites[0].T
    inside, fine = (x > 0.5) & (x < 0.8) & (y > 0.2) & (y < 0.5), level == 0
    assert fine.sum() == 36 and inside[fine].all() and (level[~fine] > 1).all()
    assert lod.rebuild(tokens, (160, 160)).covered.all()
    x, y, _ = allocator(image, torch.ones(1, 20, 20)).sites[0].T
    assert quadrants(torch.stack([x, y], dim=1)) == [pytest.approx(10, abs=3)] * 4, (
        "nothing matters more: all is behind"
    )
    for source in (photo[None], photo[None, :1], lod.mipmap(photo[None])):
        tokens = lod.allocate.HybridAtlas(100, 16)(source)
        assert (tokens.sites[..., 2] > 0).sum() == 10


def test_superpixels_of_relevance_where_there_is_no_picture() -> None:
    relevance = torch.zeros(1, 20, 20)
    relevance[:, 4:10, 10:16] = 5
    x, y, _ = lod.allocate.HybridAtlas(36, background=0.0)(relevance=relevance).sites[0].T
    assert ((x > 0.5) & (x < 0.8) & (y > 0.2) & (y < 0.5)).all()


def test_smaller_masks_lie_on_top() -> None:
    masks = torch.zeros(4, 8, 8, dtype=torch.bool)
    masks[0, 2:4, 2:4] = True
    masks[1, 1:7, 1:7] = True
    masks[2, 3:5, 3:5] = True  # as large as the first
    expected = torch.zeros(8, 8, dtype=torch.long)
    expected[1:7, 1:7] = 2
    expected[3:5, 3:5] = 3
    expected[2:4, 2:4] = 1
    assert torch.equal(lod.allocate.labels_of(masks), expected)
    found = lod.allocate.labels_of(torch.stack([masks, masks.flip(0)]))
    assert torch.equal(found[0], expected) and int(found[1, 2, 2]) == 4 and int(found[1, 3, 3]) == 2
    sam = [{"segmentation": mask.numpy(), "area": int(mask.sum()), "predicted_iou": 1.0} for mask in masks]
    assert torch.equal(lod.allocate.labels_of(sam), expected)
    assert not lod.allocate.labels_of(torch.zeros(0, 3, 5, dtype=torch.bool)).any()
    tokens = lod.allocate.HybridAtlas(9, 1)(torch.rand(3, 8, 8), labels=found[0])
    assert tokens.sites.shape == (9, 3)


@pytest.mark.parametrize(
    ("masks", "hint"),
    [
        ([], r"torch.zeros\(0, H, W"),
        ([{"segmentation": {"size": [2, 2], "counts": "x"}}], "binary_mask"),
        ([{"area": 3}], "segmentation"),
        ([{"segmentation": np.zeros((2, 2), bool)}, {"segmentation": np.zeros((2, 3), bool)}], "a single one"),
        (torch.rand(3, 4, 4), "Threshold"),
        (torch.zeros(4, 4, dtype=torch.bool), r"\[M, H, W\]"),
        (7, "DLPack"),
    ],
)
def test_masks_that_are_none(masks: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        lod.allocate.labels_of(masks)


def test_no_superpixels_without_scikit_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[allocate\]'. Or pass labels="):
        lod.allocate.HybridAtlas(4, 8)(torch.rand(1, 3, 32, 32))
    labels = torch.zeros(1, 4, 4, dtype=torch.long)
    assert lod.allocate.HybridAtlas(4, 8)(torch.rand(1, 3, 32, 32), labels=labels).budget == 4


# -- all of them -------------------------------------------------------------------------------------------------------


def test_noise_is_the_same_at_every_edge() -> None:
    """At sides of a few pixels more than patches of any level."""
    scene = scene_of(torch.rand(4, 1, 14 * 32 + 3, 14 * 32 + 5), 14)
    for values in (energies(scene).sum(1), *band_energies(scene, 4)):
        inner = values[:, 1:-1, 1:-1].mean()
        for edge in (values[:, -1, 1:-1], values[:, 1:-1, -1]):
            assert float(edge.mean() / inner) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("name", LOOKING)
def test_no_picture_of_nothing(name: str) -> None:
    for value in (math.nan, math.inf):
        image = torch.rand(1, 3, 32, 32)
        image[0, 1, 20, 7] = value
        with pytest.raises(InputError, match="nan_to_num"):
            lod.allocate.make(name, 4, 8)(image, torch.rand(1, 4, 4))


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: lod.allocate.TokenDAG(9, max_level=-1), "max_level"),
        (lambda: lod.allocate.FrequencyAware(9, split=(128, 32, 32)), "four counts"),
        (lambda: lod.allocate.FrequencyAware(9, split=5), "four counts"),  # type: ignore[arg-type]
        (lambda: lod.allocate.FrequencyAware(9, split=(200, 32, 32, 32)), "273 at most"),
        (lambda: lod.allocate.FrequencyAware(9, 8)(torch.rand(3, 32, 32), query=torch.tensor([1, -1, 0, 0.0])), "0 or"),
        (lambda: lod.allocate.FrequencyAware(9, 8)(torch.rand(3, 32, 32), query=torch.ones(5)), r"\[4\]"),
        (lambda: lod.allocate.Wavelet(9, levels=0), "levels"),
        (lambda: lod.allocate.Wavelet(9, wavelet=2), "'haar'"),  # type: ignore[arg-type]
        (lambda: lod.allocate.HybridAtlas(9, background=1.5), "from 0 to 1"),
        (lambda: lod.allocate.HybridAtlas(9, segments=0), "segments"),
        (lambda: lod.allocate.HybridAtlas(9, compactness=0.0), "positive"),
    ],
)
def test_bad_settings(make: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        make()


def test_continuous_levels_have_gradients_where_relevance_is_infinite() -> None:
    relevance = torch.rand(2, 6, 8)
    relevance = torch.where(relevance < 0.9, relevance, torch.inf).requires_grad_()
    tokens = lod.allocate.TokenDAG(7, patch=4)(image=noise(2, 3, 23, 30), relevance=relevance)
    (tokens.sites.sum() + tokens.patches.sum()).backward()
    assert relevance.grad is not None and not relevance.grad.isnan().any()


def test_the_backgrounds_share_is_rounded() -> None:
    """0.1 of 16 are 2 tokens, and of 14 one."""
    labels = torch.zeros(1, 8, 8, dtype=torch.long)
    labels[..., 4:] = 1
    for budget, share in ((16, 2), (14, 1)):
        tokens = lod.allocate.HybridAtlas(budget, 4)(relevance=torch.ones(1, 8, 8), labels=labels)
        assert int((tokens.sites[..., 0] < 0.5).sum()) == share


def test_what_weighs_nothing_shares_evenly_what_others_leave() -> None:
    found = shared_out(torch.tensor([[1.0, 0, 0]]).double(), torch.tensor([[1, 5, 9]]), 9, least=0)
    assert found.tolist() == [[1, 4, 4]]


def test_peaks_of_a_picture_lower_than_a_patch_are_in_its_middle() -> None:
    scene = Scene((5, 70), 14, torch.rand(2, 1, 5), None, None, None, None)
    assert (scene.fixations(2)[..., 1] == 0.5).all()


# -- what a smaller picture loses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(160, 160), (131, 203), (75, 240)], ids=str)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_residual_tiles_and_takes_what_they_lose_most_of(size: tuple[int, int], share: float) -> None:
    """Against a picture that is foveated to that level everywhere."""
    image = noise(2, 3, *size)
    budget, tiles = 60, round(share * 60)
    tokens = lod.allocate.Residual(budget, 8, share=share)(image)
    assert torch.equal(tokens.sites[:, :tiles], lod.allocate.Downsample(tiles, 8)(image).sites)
    assert (tokens.scores == 1).all() and (tokens.sites[:, tiles:, 2] == 0).all()
    gray = (image * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    level = float(tokens.sites[:, :tiles, 2].max())
    coarse = lod.foveate(gray, (0.5, 0.5), e0=1e9, bias=level, backend="torch")
    lost = pooled((gray - coarse).square()[:, 0], 8)
    grid = Scene(size, 8, lost, None, None, None, None).sites(0, torch.arange(lost[0].numel()))
    for relevance in (None, torch.rand(lost.shape)):
        found = lod.allocate.Residual(budget, 8, share=share)(image, relevance)
        worth = lost if relevance is None else (lost + ROUNDING) * relevance
        best = worth.flatten(1).argsort(1, descending=True)[:, : budget - tiles]
        for b in range(2):
            fine = {tuple(site) for site in found.sites[b].tolist() if site[2] == 0}
            assert len(fine) == budget - tiles
            assert len(fine ^ {tuple(site) for site in grid[best[b]].tolist()}) <= 2  # but for rounding


def test_residual_keeps_more_of_a_picture_than_the_same_tiles_everywhere(photo: torch.Tensor) -> None:
    image = photo[None]
    size = (image.shape[-2], image.shape[-1])

    def kept(allocator: lod.allocate.Allocator) -> float:
        return float(psnr(lod.rebuild(allocator(image, bias=-0.75), size, mode="bicubic").image, image))

    assert kept(lod.allocate.Residual(share=0.9)) > kept(lod.allocate.Downsample()) + 0.5


def tiled(tokens: lod.TokenSet) -> list[float]:
    """How large a part of the tokens of each picture are tiles."""
    return (tokens.sites[..., 2] > 0).float().mean(-1).tolist()


def test_residual_tiles_photographs_and_takes_patches_of_print(photo: torch.Tensor, page: torch.Tensor) -> None:
    """Each of a batch by itself, and as it would with the share that it finds."""
    sheet = torch.full((3, 512, 512), 0.9)
    sheet[:, 40:231, 30:414] = page / 255
    both = torch.stack([photo / 255, sheet])
    tokens = lod.allocate.Residual()(both)
    shares = tiled(tokens)
    assert shares[0] > 0.6 and shares[1] < 0.4
    for image, sites, share in zip(both, tokens.sites, shares, strict=True):
        alone = lod.allocate.Residual()(image)
        assert torch.equal(alone.sites, sites)
        told = lod.allocate.Residual(share=round(share, 1))(image)
        assert torch.equal(told.sites, sites)


def test_residual_takes_the_share_that_leaves_least(photo: torch.Tensor) -> None:
    """Of every share by itself: n / (n + s) of what has no patch of its own, each time its relevance."""
    image = photo[:, 100:388, 60:400] / 255
    size, side = (image.shape[-2], image.shape[-1]), 8
    relevance = torch.rand(cells_of(size, side)) ** 3
    gray = (image * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0, keepdim=True)[None]
    cells = Scene(size, side, relevance[None], None, None, None, None).sites(0, torch.arange(relevance.numel()))
    numbers = {tuple(site): number for number, site in enumerate(cells.tolist())}
    variance = (pooled(gray[:, 0].square(), side) - pooled(gray[:, 0], side).square()).flatten()
    for budget in (3, 5, 8, 12, 20, 60, 273, 700):
        left = {}
        for share in residual.SHARES:
            sites = lod.allocate.Residual(budget, side, share=share)(image, relevance).sites
            level = float(sites[sites[:, 2] > 0, 2].min())  # of the rows with most tiles
            coarse = lod.foveate(gray, (0.5, 0.5), e0=1e9, bias=level, backend="torch")
            lost = pooled((gray - coarse).square()[:, 0], side).flatten()
            missed = relevance.flatten() * lost / (lost + variance + 0.03**2)
            missed[[numbers[tuple(site)] for site in sites.tolist() if site[2] == 0]] = 0
            left[share] = float(missed.sum())
        found = tiled(lod.allocate.Residual(budget, side)(image[None], relevance[None]))[0]
        best = min(left, key=left.__getitem__)
        assert found == pytest.approx(round(best * budget) / budget), left


def test_residual_has_no_more_patches_than_there_is_to_see() -> None:
    """No level but the first shows any of a chequerboard of pixels; of 20 tokens a tenth is 2."""
    for count, tiles in ((0, 20), (1, 18), (2, 18), (3, 16), (4, 16), (5, 14)):
        image = torch.full((1, 96, 96), 0.5)
        for cell in range(count):
            image[:, 8 * cell : 8 * cell + 8, 40:48] = checks_of(1, 8, 8, 0.2)
        tokens = lod.allocate.Residual(20, 8)(image)
        assert int((tokens.sites[:, 2] > 0).sum()) == tiles
        places = tokens.sites[tokens.sites[:, 2] == 0, :2] * 96
        assert {(44, 8 * cell + 4) for cell in range(count)} <= {tuple(map(round, place)) for place in places.tolist()}


def test_residual_has_tiles_alone_where_they_are_of_level_0() -> None:
    image = noise(1, 3, 50, 60)
    for budget in (20, 21, 40, 100):
        tokens = lod.allocate.Residual(budget, 14)(image)
        assert torch.equal(tokens.sites, lod.allocate.Downsample(budget, 14)(image).sites)
    few = lod.allocate.Residual(12, 14, share=0.5)(image)  # of 20
    assert int((few.sites[..., 2] > 0).sum()) == 6
    assert lod.allocate.Residual(1, 14, share=0.0)(image).sites.shape == (1, 1, 3)
    flat = lod.allocate.Residual(12, 14, share=0.5)(torch.zeros(1, 3, 50, 60), torch.arange(20.0).view(1, 4, 5))
    cells = flat.sites[flat.sites[..., 2] == 0]
    assert len(cells) == 6 and bool((cells[:, 1] > 0.5).all())  # nothing to see: the most relevant ones


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most"), [("HybridAtlas", 1.6), ("FrequencyAware", 5.4), ("Wavelet", 3.5), ("Residual", 4.7)]
)
def test_a_picture_of_bytes_is_not_made_four_times_as_large(name: str, most: float, unseeded: Path) -> None:
    """In fp32 it would be, twice: before and after it is divided by 255. In torch, for OpenGL's memory is not seen."""
    image = torch.randint(0, 256, (1, 3, 1024, 1024), dtype=torch.uint8)
    allocator, relevance = lod.allocate.make(name, 273, 16), torch.rand(1, 64, 64)
    allocator(image, relevance=relevance)  # tables are made once
    assert peak_bytes(lambda: allocator(image, relevance=relevance))[1] < most * image.nbytes


def test_pictures_in_parts_are_seen_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    image, patch = torch.randint(0, 256, (3, 3, 61, 45), dtype=torch.uint8), 7
    relevance = torch.rand(3, 9, 7)
    names = ("HybridAtlas", "FrequencyAware", "Wavelet", "Residual")
    whole = [lod.allocate.make(name, 30, patch)(image, relevance=relevance).sites for name in names]
    monkeypatch.setattr(planewise, "PART", 4 * 45 * 16)
    for name, sites in zip(names, whole, strict=True):
        assert torch.equal(lod.allocate.make(name, 30, patch)(image, relevance=relevance).sites, sites), name
