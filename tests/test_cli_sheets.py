"""The commands that draw a verb on a sheet, as a subprocess: oriented energy, patches, culling; and Gaussian levels."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import cat, done, refused
from PIL import Image
from skimage import data

import gpu_lod as lod
from gpu_lod.commands import drawing, sheets
from gpu_lod.images import atlas, load
from gpu_lod.patch_grid import pooled, starts_of
from gpu_lod.saliency import saliency


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of real pictures: a photograph, a page, a small grey one, and one of odd sides with alpha."""
    photo = Image.fromarray(data.astronaut())
    photo.save(tmp_path / "photo.png")
    Image.fromarray(data.page()).save(tmp_path / "page.png")
    Image.fromarray(data.camera()).resize((61, 45)).save(tmp_path / "small.png")
    odd = photo.resize((1001, 777)).convert("RGBA")
    odd.putalpha(odd.getchannel("R"))
    odd.save(tmp_path / "odd.png")
    return tmp_path


def colours_of(page: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(colour) for colour in page.flatten(1).T.unique(dim=0).tolist()}


def rgb(shade: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(shade[1:]))


# -- gaussian ----------------------------------------------------------------------------------------------------------


def test_gaussian(tmp_path: Path) -> None:
    image = load(cat(tmp_path))
    found = json.loads(done(tmp_path, "gaussian", "cat.png", "--levels", "3", "--backend", "torch", "--json"))
    levels = lod.gaussian(image, 3).levels
    assert found["shapes"] == [list(level.shape) for level in levels]
    assert torch.equal(load(tmp_path / "out" / "cat.gaussian.png"), atlas(levels))


def test_a_laplacian_pyramid_adds_up_to_the_picture_again(pictures: Path) -> None:
    for name, options in (("odd.png", ()), ("small.png", ("--device", "0"))):
        found = json.loads(done(pictures, "laplacian", name, "--back", "--levels", "3", *options, "--json"))
        assert found["output"] == [f"out/{name[:-4]}.laplacian.png", f"out/{name[:-4]}.laplacian.back.png"]
        assert torch.equal(load(pictures / found["output"][1]), load(pictures / name))


# -- energy ------------------------------------------------------------------------------------------------------------


def test_energy_of_a_page_lies_across_its_lines(pictures: Path) -> None:
    found = json.loads(done(pictures, "energy", "page.png", "--json"))
    assert (found["verb"], found["output"]) == ("oriented_energy", ["out/page.energy.png"])
    assert found["shapes"][0] == [1, 4, 191, 384] and len(found["shapes"]) == 4
    for level in (2, 3):  # where letters have merged to lines
        shares = found["shares"][level]
        assert sum(shares) == pytest.approx(1) and max(shares) == shares[2] > 0.45
    text = done(pictures, "energy", "page.png", "--levels", "1", "-o", "one.png")
    assert "90 degrees" in text and "384 x 191" in text and text.endswith("wrote one.png\n")
    assert load(pictures / "one.png").shape[1] < load(pictures / "out" / "page.energy.png").shape[1]


@pytest.mark.parametrize("name", ["small.png", "odd.png"])
def test_energy_of_any_picture(pictures: Path, name: str) -> None:
    found = json.loads(done(pictures, "energy", name, "--device", "0", "--json"))
    assert found["backend"] == "gl" and found["renderer"]
    drawn = load(pictures / found["output"][0])
    assert drawn.shape[0] == 3 and 1900 <= drawn.shape[2] <= 2600  # five panels wide, whatever the picture


@pytest.mark.parametrize(("angle", "k"), [(0, 0), (45, 1), (90, 2), (135, 3)])
def test_stripes_have_the_colour_of_their_angle(angle: int, k: int) -> None:
    """Grey waves along a direction: its panel and the first one are of its colour, and hardly anything of another's."""
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    radians = torch.deg2rad(torch.tensor(float(angle)))
    image = 0.5 + 0.4 * torch.sin(1.1 * (x * radians.cos() + y * radians.sin()))[None]
    energies = lod.oriented_energy(image, 1)
    least = sheets.noise_of(image)
    [shares] = sheets.shares(energies, least)
    assert max(shares) == shares[k] > 0.6
    page = sheets.energy(energies, "stripes", least)
    first = page[:, 260 : 260 + 300, 60 : 60 + 320].float().mean(dim=(1, 2))
    shade = torch.tensor(rgb(sheets.ORIENTATIONS[k])).float()
    assert torch.allclose(first / first.max(), shade / shade.max(), atol=0.08)


def test_a_flat_picture_has_no_energy() -> None:
    image = torch.full((3, 40, 30), 0.7)
    energies = lod.oriented_energy(image, 2)
    least = sheets.noise_of(image)
    assert sheets.shares(energies, least) == [[0.0] * 4] * 2
    page = sheets.energy(energies, "flat", least)
    assert (page[:, 300:400, 60:200] == 0).all()
    busy = lod.oriented_energy(torch.rand(3, 40, 30), 2)  # what is no rounding error is drawn
    assert (sheets.energy(busy, "busy", least)[:, 300:400, 60:200] > 40).any()


# -- patches -----------------------------------------------------------------------------------------------------------


def test_patches(pictures: Path) -> None:
    options = ("--fixation", "0.43,0.21", "--budget", "20", "--patch", "8")
    found = json.loads(done(pictures, "patches", "photo.png", *options, "--json"))
    image = load(pictures / "photo.png")
    sites = lod.cortical_sites((0.43, 0.21), 20, tuple(image.shape[-2:]), 8)
    assert found["verb"] == "gather_patches" and found["shapes"] == [[20, 3, 8, 8]]
    assert torch.equal(torch.tensor(found["sites"]), sites)
    drawn, frames = load(pictures / "out" / "photo.patches.png"), drawing.level_colours(sites[:, 2], 3.0)
    gathered = lod.gather_patches(image, sites, 8)
    expected = sheets.patches(
        gathered, sites, "photo", "20 patches of 8 \N{MULTIPLICATION SIGN} 8 samples about 0.43, 0.21"
    )
    assert torch.equal(drawn, expected) and len(frames) == 20


def test_patches_outside_are_as_the_border_says(pictures: Path) -> None:
    written = {}
    for border in ("clamp", "zero"):
        done(pictures, "patches", "small.png", "--fixation", "0,0", "--border", border, "-o", f"{border}.png")
        written[border] = load(pictures / f"{border}.png")
    assert not torch.equal(written["clamp"], written["zero"])
    assert (written["zero"] == 0).all(0).sum() > (written["clamp"] == 0).all(0).sum()


def test_patches_lie_in_their_order_in_frames_of_their_level() -> None:
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8)
    sites = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 1.0], [0.5, 0.5, 2.0]])
    page = sheets.patches(colours[:, :, None, None].expand(3, 3, 14, 14), sites, "three", "of one colour each")
    before = -1
    for shade, frame in zip(colours.tolist(), drawing.level_colours(sites[:, 2], 2.0).tolist(), strict=True):
        here = (page == torch.tensor(shade)[:, None, None]).all(0)
        y, x = (here.any(dim).nonzero()[:, 0] for dim in (1, 0))
        assert len(y) == len(x) and len(y) % 14 == 0 and int(here.sum()) == len(y) * len(x)
        assert int(x[0]) > before
        before = int(x[-1])
        for beside in (page[:, y[0] - 1, x[0]], page[:, y[0], x[-1] + 1]):
            assert beside.tolist() == frame


@pytest.mark.parametrize(("count", "patch"), [(1, 1), (1, 200), (7, 14), (2000, 14), (500, 40)])
def test_sheets_of_patches_stay_of_a_size_to_look_at(count: int, patch: int) -> None:
    sites = torch.tensor([[0.5, 0.5, 0.0]]).expand(count, 3)
    page = sheets.patches(torch.zeros(count, 1, patch, patch), sites, "a name that is long " * 9, "")
    assert 700 < page.shape[2] < 3200 and 200 < page.shape[1] < 2500


# -- cull --------------------------------------------------------------------------------------------------------------


def test_cull(pictures: Path) -> None:
    found = json.loads(done(pictures, "cull", "photo.png", "--threshold", "0.3", "--json"))
    relevance = pooled(saliency(load(pictures / "photo.png")), 14)
    culled = lod.cull(lod.hiz(relevance), 0.3)
    assert found["verb"] == "cull" and found["shapes"][0] == [1, 37, 37] and found["shapes"][-1] == [1, 1, 1]
    assert (found["kept"], found["pruned"]) == (int((relevance >= 0.3).sum()), len(culled.pruned))
    assert found["tested"] == culled.tested < found["texels"]
    text = done(pictures, "cull", "photo.png", "--threshold", "0.3", "-o", "again.png")
    assert f"kept {found['kept']} of 1369 patches, of a relevance from 0.3\n" in text
    assert f"pruned {found['pruned']} nodes: " in text and f"tested {found['tested']} of the {found['texels']} " in text
    assert torch.equal(load(pictures / "again.png"), load(pictures / "out" / "photo.cull.png"))


def test_cull_without_a_threshold_keeps_a_fifth(pictures: Path) -> None:
    for name, options in (("page.png", ("--of", "gradient")), ("small.png", ("--patch", "4", "--device", "0"))):
        found = json.loads(done(pictures, "cull", name, *options, "--json"))
        total = np.prod(found["shapes"][0])
        assert found["kept"] == pytest.approx(0.2 * total, abs=1.5)


def test_nothing_or_everything_is_kept(pictures: Path) -> None:
    text = done(pictures, "cull", "odd.png", "--threshold", "inf", "--box", "0,0,1,1")
    assert "kept 0 of 4032 patches" in text and "pruned 1 nodes: 1 at level 6\n" in text and "tested 1 of " in text
    assert "; nothing in it reaches the threshold\n" in text
    found = json.loads(done(pictures, "cull", "odd.png", "--threshold", "inf", "--json"))
    assert found["threshold"] == "inf"  # JSON has none
    text = done(pictures, "cull", "small.png", "--threshold", "0", "--box", "0.2,0.2,0.3,0.9")
    assert "kept 20 of 20" in text and "pruned 0 nodes\n" in text and "; all of it reaches the threshold\n" in text


def test_boxes_have_bounds_and_true_values(pictures: Path) -> None:
    boxes = ("--box", "0.1,0.1,0.3,0.3", "--box", "0.6,0.5,0.95,0.7")
    found = json.loads(done(pictures, "cull", "photo.png", *boxes, "--json"))["boxes"]
    assert [one["box"] for one in found] == [[0.1, 0.1, 0.3, 0.3], [0.6, 0.5, 0.95, 0.7]]
    for one in found:
        assert one["lower"] <= one["least"] < one["largest"] <= one["upper"]
    text = done(pictures, "cull", "photo.png", *boxes, "-o", "b.png")
    assert f"box 2 (0.6, 0.5, 0.95, 0.7): bounds {found[1]['lower']:.3g} to {found[1]['upper']:.3g}, values " in text


@pytest.mark.parametrize("size", [(45, 61), (777, 1001), (10, 200)])
def test_bounds_hold_for_every_patch_that_a_box_touches(size: tuple[int, int]) -> None:
    """The last patch of a side is shifted inward, so that patches lie elsewhere than texels of their map."""
    draw, patch = random.Random(3), 14
    relevance = pooled(torch.rand(1, *size, generator=torch.Generator().manual_seed(1)), patch)
    hz = lod.hiz(relevance)
    for _ in range(200):
        x0, x1, y0, y1 = (*sorted((draw.random(), draw.random())), *sorted((draw.random(), draw.random())))
        found = sheets.bounds_of(relevance, hz, (x0, y0, x1, y1), size, patch, {"backend": "torch"})
        rows, columns = (
            [i for i, at in enumerate(starts_of(n, patch)) if at < high * n and at + patch > low * n]
            for n, low, high in ((size[0], y0, y1), (size[1], x0, x1))
        )
        inside = relevance[0][rows][:, columns]
        assert (found.least, found.largest) == (float(inside.min()), float(inside.max()))
        assert found.lower <= found.least and found.largest <= found.upper


def test_kept_patches_are_bright_and_pruned_nodes_framed() -> None:
    """The left half is kept; the right half is two nodes of level 2, of its colour."""
    image = torch.full((3, 112, 112), 200, dtype=torch.uint8)
    relevance = torch.zeros(1, 8, 8)
    relevance[..., :4] = 1.0
    culled = lod.cull(lod.hiz(relevance), 0.5)
    page = sheets.culling(image, relevance, culled, [], 14, "half", "")
    left = page.shape[2] - 48 - 900  # of the second panel
    row = page[:, 600, left : left + 900].float()
    assert (row[:, 2:448] == 200).all() and (row[:, 500:850] == 52).all()
    frames = page[:, 200:1000, left + 460 : left + 900]
    assert colours_of(frames) == {(52, 52, 52), rgb("#e0a100")}


# -- how they fail -----------------------------------------------------------------------------------------------------


def test_bad_input(tmp_path: Path) -> None:
    cat(tmp_path)
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "locked").mkdir()
    refused(
        tmp_path,
        ("cull cat.png --threshold nan", 2, "threshold is NaN"),
        ("cull cat.png --threshold much", 2, "'--threshold'"),
        ("cull cat.png --box 0,0,1", 2, "'--box': '0,0,1' is not X0,Y0,X1,Y1"),
        ("cull cat.png --box 0.5,0,0.5,1", 2, "'0.5,0,0.5,1' is no box in the picture"),
        ("cull cat.png --box 0,0,2,1", 2, "'--box': '0,0,2,1'"),
        ("cull cat.png --box nan,0,1,1", 2, "'--box': 'nan,0,1,1'"),
        ("cull cat.png --patch 0", 2, "'--patch'"),
        ("cull cat.png --of luma", 2, "'luma' is not one of 'saliency', 'gradient'"),
        ("cull text.png", 1, "text.png is not a PNG"),
        ("patches cat.png --budget 0", 2, "'--budget'"),
        ("patches cat.png --fixation 2,0", 2, "'--fixation': '2,0'"),
        ("patches cat.png --border none", 2, "'none' is not one of 'clamp', 'zero'"),
        ("patches cat.png --device 0 --backend torch", 2, "'--device'"),
        ("patches none.png", 1, "does not exist"),
        ("energy cat.png --levels 99", 2, "levels is 99"),
        ("energy cat.png --levels 0", 2, "levels is 0"),
        ("energy locked", 1, "is a directory"),
        ("energy cat.png -o x.gif", 1, "the choices are .png"),
        ("gaussian cat.png --levels 99", 2, "levels is 99"),
        ("gaussian text.png", 1, "text.png is not a PNG"),
        ("gaussian cat.png -o cat.png/x.png", 1, "cannot be written"),
    )
    assert not (tmp_path / "out").exists()
