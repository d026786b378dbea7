"""`gpu-lod allocate`: what it writes, draws and prints, and how it fails."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import scripts
import torch
from command_line import cat, done, refused
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import save, save_file

import gpu_lod as lod
from gpu_lod import allocate as allocators
from gpu_lod import token_files
from gpu_lod.allocate import base
from gpu_lod.commands import allocation, token_sheet
from gpu_lod.errors import FileError, InputError, UnsupportedError
from gpu_lod.images import load
from gpu_lod.rebuild import psnr

INF = math.inf
SMALL = ("--budget", "20", "--patch", "4")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return cat(tmp_path)


def test_one_allocator(tmp_path: Path, picture: Path) -> None:
    files = ("--sites", "a/s.json", "--rebuilt", "r.png")
    found = json.loads(done(tmp_path, "allocate", "cat.png", "--fixation", "0.2,0.7", *SMALL, *files, "--json"))
    image = load(picture)
    tokens = lod.allocate.FoveatedPyramid(20, 4)(image, fixation=(0.2, 0.7))
    rebuilt = lod.rebuild(tokens, (26, 37), mode="bicubic")
    assert found["output"] == ["out/cat.allocate.FoveatedPyramid.png", "a/s.json", "r.png"]
    [one] = found["allocators"]
    assert one["name"] == "FoveatedPyramid" and one["untrained"] is False
    assert one["coverage"] == 1 and one["psnr"] == pytest.approx(float(psnr(rebuilt.image, image)))
    levels = tokens.sites[:, 2].tolist()
    assert one["levels"] == {str(int(level)): levels.count(level) for level in sorted(set(levels))}

    written = json.loads((tmp_path / "a" / "s.json").read_text())
    assert torch.equal(torch.tensor(written["sites"]), tokens.sites)
    assert torch.equal(torch.tensor(written["scores"]), tokens.scores)
    assert (written["allocator"], written["image"], written["size"]) == ("FoveatedPyramid", "cat.png", [26, 37])
    assert (written["budget"], written["patch"]) == (20, 4) and "y down" in written["convention"]
    assert torch.equal(load(tmp_path / "r.png"), rebuilt.image)
    with Image.open(tmp_path / "out" / "cat.allocate.FoveatedPyramid.png") as sheet:
        assert sheet.mode == "RGB" and min(sheet.size) > 900


def test_the_table(tmp_path: Path, picture: Path) -> None:
    text = done(tmp_path, "allocate", "cat.png", "--with", "GridTopK", "--budget", "35", "--patch", "4")
    tokens = lod.allocate.GridTopK(35, 4)(load(picture))
    rebuilt = lod.rebuild(tokens, (26, 37), mode="bicubic")
    row = next(line for line in text.splitlines() if "GridTopK" in line).split()
    noise = float(psnr(rebuilt.image, load(picture)))
    assert row == ["GridTopK", "35", "35", f"{100 * float(rebuilt.coverage):.1f}%", f"{noise:.2f}"]
    assert "level 0" in text and "level 1" not in text and text.endswith("wrote out/cat.allocate.GridTopK.png\n")


def test_an_exact_picture_has_no_psnr_in_json(tmp_path: Path, picture: Path) -> None:
    options = ("--with", "GridTopK", "--budget", "70", "--patch", "4")
    [one] = json.loads(done(tmp_path, "allocate", "cat.png", *options, "--json"))["allocators"]
    assert one["psnr"] is None and one["coverage"] == 1
    assert "exact" in done(tmp_path, "allocate", "cat.png", *options)


def test_a_picture_of_another_range_has_its_psnr_over_that(tmp_path: Path) -> None:
    """As of a scan in Hounsfield units; and what is rebuilt stays within it."""
    unit = load(cat(tmp_path)).float().mean(0) / 255
    found = []
    for name, pixels in (("unit.tif", unit), ("scan.tif", unit * 4095 - 1024)):
        Image.fromarray(pixels.numpy()).save(tmp_path / name)
        options = ("--with", "FoveatedPyramid", *SMALL, "--json", "--rebuilt", "out/" + name)
        [one] = json.loads(done(tmp_path, "allocate", name, *options))["allocators"]
        found.append(one["psnr"])
        rebuilt = load(tmp_path / "out" / name)
        assert rebuilt.dtype == torch.float32
        assert float(rebuilt.amin()) >= pixels.amin() and float(rebuilt.amax()) <= pixels.amax()
    spread = float(unit.amax() - unit.amin())
    assert 10 < found[1] == pytest.approx(found[0] + 20 * math.log10(spread), abs=0.01)


def test_a_bias_is_of_all_that_do_not_blend(tmp_path: Path, picture: Path) -> None:
    """One that does is not left out of the sheet for it, and alone refuses it."""
    found = json.loads(done(tmp_path, "allocate", "cat.png", "--with", "all", *SMALL, "--bias", "-0.5", "--json"))
    assert found["bias"] == -0.5
    psnrs = {one["name"]: one["psnr"] for one in found["allocators"] if "psnr" in one}
    image = load(picture)
    tokens = lod.allocate.Downsample(20, 4)(image, bias=-0.5)
    sharp = float(psnr(lod.rebuild(tokens, (26, 37), mode="bicubic").image, image))
    assert psnrs["Downsample"] == pytest.approx(sharp) and "SoftVortex" in psnrs
    command = f"allocate cat.png --with SoftVortex {' '.join(SMALL)} --bias -0.5"
    refused(tmp_path, (command, 2, "bias is -0.5, and tokens of SoftVortex are blends"))


def test_safetensors(tmp_path: Path, picture: Path) -> None:
    tokens = lod.allocate.GridTopK(20, 4)(load(picture))
    for options, names in (((), {"sites", "scores"}), (("--patches",), {"sites", "scores", "patches"})):
        done(tmp_path, "allocate", "cat.png", "--with", "GridTopK", *SMALL, "--sites", "s.safetensors", *options)
        with safe_open(tmp_path / "s.safetensors", "pt") as file:
            assert set(file.keys()) == names
            for name in names:
                assert torch.equal(file.get_tensor(name), getattr(tokens, name))
            about = file.metadata()
        assert about["allocator"] == "GridTopK" and json.loads(about["size"]) == [26, 37] and about["patch"] == "4"


def test_features_are_written_beside_patches(tmp_path: Path) -> None:
    tokens = lod.allocate.GridTopK(4, 4)(torch.rand(3, 16, 24))
    held = replace(tokens, features=torch.rand(4, 9)[:, ::2])
    for patches in (False, True):
        token_files.write_sites(tmp_path / "t.safetensors", held, {}, patches)
        with safe_open(tmp_path / "t.safetensors", "pt") as file:
            assert set(file.keys()) == {"sites", "scores", "features", *(("patches",) if patches else ())}
            assert torch.equal(file.get_tensor("features"), held.features)
    with pytest.raises(FileError, match=r"JSON holds no features\. Write \.safetensors"):
        token_files.write_sites(tmp_path / "t.json", held, {})
    assert not (tmp_path / "t.json").exists()


def test_weights_are_written(tmp_path: Path) -> None:
    tokens = lod.allocate.SoftVortex(4, 4)(torch.rand(3, 16, 24)).detach()
    token_files.write_sites(str(tmp_path / "t.safetensors"), tokens, {})
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("weights"), tokens.weights)
    token_files.write_sites(tmp_path / "t.json", tokens)
    assert token_files.read_sites(tmp_path / "t.json")[1] == {}


@pytest.mark.parametrize("name", ["t.json", "t.safetensors"])
def test_sites_are_read_back(tmp_path: Path, name: str) -> None:
    """Tokens and all that is known about them, to the bit; JSON without what it does not hold."""
    about = {"allocator": "SoftVortex", "size": [16, 24], "psnr": None, "image": "12", "of": {"a": [1.5, "b"]}}
    for tokens in (
        lod.allocate.SoftVortex(4, 4)(torch.rand(3, 16, 24)).detach(),
        lod.allocate.GridTopK(6, 4)(relevance=torch.tensor([[INF, 1, 2], [0.3, -INF, 4]])),
        lod.allocate.GridTopK(2, 4)(relevance=torch.full((1, 2), INF)),
    ):
        patches = tokens.patches is not None and name.endswith("tensors")
        if name.endswith("tensors"):
            tokens = replace(tokens, features=torch.rand(tokens.budget, 3).bfloat16())
        token_files.write_sites(tmp_path / name, tokens, about, patches)
        found, said = token_files.read_sites(str(tmp_path / name))
        assert said == about and found.patch == 4
        for field in ("sites", "scores", "patches", "weights", "features"):
            held, read = getattr(tokens, field), getattr(found, field)
            if field in ("sites", "scores") or (name.endswith("tensors") and held is not None):
                assert torch.equal(read, held) and read.dtype == held.dtype, field
            else:
                assert read is None, field


def test_files_that_hold_no_sites(tmp_path: Path) -> None:
    tensor, score = torch.zeros(1, 3), torch.zeros(1)
    whole = {"sites": [[0.5, 0.5, 0]], "scores": [1.0], "patch": 4}
    for number, (change, message) in enumerate(
        (
            (None, "holds no sites and no scores and no patch; expected a file of sites, as --sites"),
            ({"patch": None}, "no file of sites: patch is None"),
            ({"scores": ["a"]}, "no file of sites"),
            ({"scores": 3}, "no file of sites"),
            ({"scores": [1.0, 2.0]}, r"no file of sites: sites are \(1, 3\) and scores \(2,\)"),
            ({"sites": [[0.5, 0.5], [0.5]]}, "no file of sites"),
            ({"sites": [[[0.5, 0.5, 0]]], "scores": [[1.0]]}, r"holds sites \(1, 1, 3\) .*expected finite \[K, 3\]"),
            ({"sites": [[math.nan, 0.5, 0]]}, "expected finite"),
        )
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({} if change is None else whole | change))
        with pytest.raises(FileError, match=message):
            token_files.read_sites(path)
    for name, data, message in (
        ("a.json", b"{", "no JSON that can be read"),
        ("b.json", b"[1]", "holds a list; expected an object"),
        ("c.json", b"[" * 100_000, "no JSON that can be read"),
        ("d.json", b"\xff\xfe\xff", "no JSON that can be read"),
        ("e.safetensors", b"{}", "no safetensors file"),
        ("f.safetensors", save({"query": tensor}), "holds no sites and no scores and no patch"),
        ("g.safetensors", save({"sites": tensor.int(), "scores": score}, {"patch": "4"}), "sites .*torch.int32"),
        ("h.safetensors", save({"sites": tensor, "scores": score}, {"patch": "four"}), "patch is 'four'"),
        ("i.txt", b"", "unknown extension '.txt'"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FileError, match=message):
            token_files.read_sites(tmp_path / name)
    with pytest.raises(FileError, match="does not exist"):
        token_files.read_sites(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["t.json", "t.safetensors"])
def test_what_cannot_be_written(tmp_path: Path, name: str) -> None:
    tokens = lod.allocate.GridTopK(4, 4)(relevance=torch.rand(4, 6))
    circle: list[Any] = []
    circle.append(circle)
    for held, about, patches, message in (
        (tokens, {}, True, "no patches"),
        (lod.allocate.GridTopK(4, 4)(relevance=torch.rand(2, 4, 6)), {}, False, r"\(2, 4, 3\); expected \[K, 3\]"),
        (tokens, {"what": object()}, False, "what JSON does not .*object"),
        (tokens, {"what": {(1, 2): 3}}, False, "what JSON does not .*tuple"),
        (tokens, {"what": circle}, False, "what JSON does not"),
        (tokens, {1: "a"}, False, "keys are strings"),
        (tokens, {"sites": [], "patch": 3}, False, "about holds patch, sites, which the tokens say"),
        (tokens, "a picture", False, "about is .a picture.; expected a dict"),
    ):
        with pytest.raises((FileError, InputError), match=message):
            token_files.write_sites(tmp_path / name, held, about, patches)  # type: ignore[arg-type]
    with pytest.raises(FileError, match=r"cannot be written: .*embedded null"):
        token_files.write_sites(tmp_path / f"a\0{name}", tokens, {})
    assert not list(tmp_path.iterdir())
    token_files.write_sites(tmp_path / name, tokens, {"image": "a\udcff.png"})  # a name that is not UTF-8


def test_all(tmp_path: Path, picture: Path) -> None:
    files = ("--sites", "s.json", "--rebuilt", "r.png")
    options = ("--with", "all", "--budget", "71", "--patch", "4", "--fixation", "0.2,0.7", "-o", "sheet.png")
    found = json.loads(done(tmp_path, "allocate", "cat.png", *options, *files, "--json"))
    results = {one["name"]: one for one in found["allocators"]}
    assert list(results) == allocators.names()
    # 70 patches are too few for those that take whole ones.
    assert results["GridTopK"]["skipped"].startswith("the budget is 71, and there are 70")
    assert results["AdaptiveStratified"]["skipped"].endswith("needs query; pass --query.")  # an option, not an argument
    made = [name for name, one in results.items() if "skipped" not in one]
    assert {"Downsample", "Hexagonal", "PyramidTopK"} <= set(made) and "GridTopK" not in made
    assert found["output"] == [
        "sheet.png",
        *(f"{f}.{name}.{e}" for name in made for f, e in (("s", "json"), ("r", "png"))),
    ]
    for path in found["output"]:
        assert (tmp_path / path).exists()
    written = json.loads((tmp_path / "s.Downsample.json").read_text())
    assert written["allocator"] == "Downsample" and len(written["sites"]) == 71

    before = (tmp_path / "sheet.png").read_bytes()
    text = done(tmp_path, "allocate", "cat.png", *options)
    assert (tmp_path / "sheet.png").read_bytes() == before
    assert all(name in text for name in results)
    assert "skipped GridTopK: the budget is 71, and there are 70" in text


# -- what no allocator of the package may need ------------------------------------------------------------------------


class Asking(base.Allocator):
    """Needs a query and labels; scores tell what came."""

    needs: ClassVar[tuple[base.Need, ...]] = ("query", "labels")

    def choose(self, scene: lod.allocate.Scene) -> tuple[torch.Tensor, torch.Tensor]:
        assert scene.query is not None and scene.labels is not None
        scores = torch.stack([scene.labels.sum().float(), scene.query.sum()])[None]
        return torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 1.0]]]), scores


class Hinted(Asking):
    """Does without a query, and takes those of four numbers."""

    needs: ClassVar[tuple[base.Need, ...]] = ()
    takes: ClassVar[tuple[base.Need, ...]] = ("query",)
    query_width = 4

    def choose(self, scene: lod.allocate.Scene) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros(1) if scene.query is None else scene.query.sum(1)
        return torch.tensor([[[0.5, 0.5, 0.0]]]), total[None]


class Drawn(allocators.Learned):
    """A learned one, whose score is its parameter."""

    def __init__(self, budget: int = 1, patch: int = 14) -> None:
        super().__init__(budget, patch)
        self.weight = torch.nn.Parameter(torch.rand(1))

    def choose(self, scene: lod.allocate.Scene) -> tuple[torch.Tensor, torch.Tensor]:
        score = self.weight + self.training
        return torch.full((1, self.budget, 3), 0.5), score.expand(1, self.budget)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: base.kinds[name] for name in ("Downsample", "FoveatedPyramid")}
    monkeypatch.setattr(base, "kinds", chosen | {"Asking": Asking, "Drawn": Drawn})


def test_each_is_given_what_it_takes_and_skipped_if_it_misses_something(registry: None) -> None:
    image = torch.rand(3, 16, 24)
    said: list[str] = []
    asking, downsample, drawn, foveated = allocation.run_all(image, 4, 4, {"fixation": (0.1, 0.1)}, said.append)
    assert said == ["Asking", "Downsample", "Drawn", "FoveatedPyramid"]
    assert asking == allocation.Skipped("Asking", "Asking needs query; pass query=.")
    assert isinstance(downsample, allocation.Allocation) and not downsample.untrained
    assert isinstance(foveated, allocation.Allocation)
    assert torch.equal(foveated.tokens.sites, lod.allocate.FoveatedPyramid(4, 4)(image, fixation=(0.1, 0.1)).sites)
    # Learned ones are the same at each call, do not train, and leave torch's generator alone.
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = allocation.run("Drawn", image, 4, 4, {})
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(drawn, allocation.Allocation) and drawn.untrained and drawn.tokens.scores[0] < 1
    assert torch.equal(drawn.tokens.scores, again.tokens.scores) and not again.tokens.scores.requires_grad
    labels = torch.ones(16, 24, dtype=torch.int64)
    inputs = {"query": torch.tensor([2.0, 3.0]), "labels": labels, "fixation": None}
    given = allocation.run("Asking", image, 2, 4, inputs)
    assert given.tokens.scores.tolist() == [384.0, 5.0]
    # A query of another width goes to those that need one, and to nobody who can do without.
    base.kinds["Hinted"] = Hinted
    for width, expected in ((4, 4.0), (3, 0.0)):
        *_, hinted = allocation.run_all(image, 1, 4, inputs | {"query": torch.ones(width)})
        assert isinstance(hinted, allocation.Allocation) and hinted.tokens.scores.tolist() == [expected]
    with pytest.raises(InputError, match=r"expected floats \[1, 4\]"):
        allocation.run("Hinted", image, 1, 4, {"query": torch.ones(3)})
    with pytest.raises(InputError, match="Downsample takes no query"):
        allocation.run("Downsample", image, 4, 4, inputs)


@pytest.mark.parametrize("width", [4, 384])
def test_a_query_serves_both_that_take_one(width: int) -> None:
    """Whatever encoder it is of: the head that reads it is a new one."""
    image, query = torch.rand(3, 40, 56), torch.rand(width)
    for name in ("AdaptiveStratified", "FrequencyAware"):
        made = allocation.run(name, image, 20, 4, {"query": query}, suit=True)
        assert made.tokens.sites.shape == (20, 3)
        assert made.untrained == (name == "AdaptiveStratified")


def test_none_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "kinds", {"Asking": Asking})
    with pytest.raises(InputError, match=r"no allocator can do that\. Asking: Asking needs query"):
        allocation.run_all(torch.rand(3, 16, 24), 4, 4, {})


def test_labels_that_fit_no_picture_are_no_reason_to_skip(registry: None) -> None:
    inputs = {"query": torch.ones(2), "labels": torch.ones(7, 9, dtype=torch.int64), "fixation": None}
    with pytest.raises(
        InputError, match=r"\(7, 9\); expected integers, \(26, 37\) one a pixel, or \(7, 10\) one a patch"
    ):
        allocation.run_all(torch.rand(3, 26, 37), 9, 4, inputs)


def test_blends_of_counts_are_compared_in_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blended(allocators.GridTopK):
        blends: ClassVar[bool] = True

        def choose(self, scene: lod.allocate.Scene) -> Any:
            index = torch.arange(self.budget)
            weights = torch.eye(scene.grid[0] * scene.grid[1])[None, : self.budget]
            return scene.sites(0, index)[None], torch.ones(1, self.budget), weights

    monkeypatch.setattr(base, "kinds", {"Blended": Blended})
    image = torch.rand(3, 16, 24).mul(255).byte()
    assert allocation.run("Blended", image, 24, 4, {}).psnr > 100


# -- the sheet --------------------------------------------------------------------------------------------------------

TOP = token_sheet._MARGIN + token_sheet._HEADER + token_sheet._ABOVE


def drawn(image: torch.Tensor, sites: list[tuple[float, float, float]], patch: int) -> torch.Tensor:
    """The panel of tokens alone, of an image of 96 x 96: ten times as large."""
    places = torch.tensor(sites)
    tokens = lod.TokenSet(places, torch.ones(len(sites)), torch.zeros(len(sites), 3, patch, patch), patch)
    one = allocation.Allocation("Mine", tokens, lod.rebuild(tokens, (96, 96)), 10.0, False)
    sheet = token_sheet.sheet(image, [one], len(sites), patch, "cat")
    left = token_sheet._MARGIN
    return sheet[:, TOP : TOP + 960, left : left + 960].int()


def test_convention_footprints_have_their_true_size() -> None:
    # So many that they carry no numbers.
    fine = [(0.25, 0.5, 0.0)] * token_sheet.NUMBERED
    panel = drawn(torch.zeros(3, 96, 96), [*fine, (0.75, 0.5, 1.0)], 16)
    assert panel.shape == (3, 960, 960)
    row = panel[:, 480].sum(0)
    (filled,) = (row > 30).nonzero(as_tuple=True)
    # 16 px about 24, and 32 px about 72, ten times as large.
    assert filled.tolist() == [*range(160, 320), *range(560, 880)]
    (high,) = (panel[:, :, 240].sum(0) > 30).nonzero(as_tuple=True)
    assert high.tolist() == [*range(400, 560)]
    inner, outer = panel[:, 480, 240], panel[:, 480, 720]
    assert (inner - outer).abs().max() > 30  # levels have colours
    assert panel[:, 480, 160].sum() > 2 * inner.sum()  # the outline


def test_finer_tokens_lie_over_coarser_ones_and_few_are_numbered() -> None:
    image = torch.zeros(3, 96, 96)
    both = [(0.5, 0.5, 0.0), (0.5, 0.5, 2.0)]
    panel, turned = drawn(image, both, 16), drawn(image, both[::-1], 16)
    edge = 960 // 2 - 80
    assert torch.equal(panel[:, edge : edge + 40], turned[:, edge : edge + 40])
    blue, red = panel[2], panel[0]
    assert blue[edge + 4, 480] > red[edge + 4, 480] and red[edge - 40, 480] > blue[edge - 40, 480]
    assert (panel.amin(0) == 255).any()  # white figures
    for sites, patch in ((both * token_sheet.NUMBERED, 16), ([(0.5, 0.5, 0.0)], 1)):  # too many, too small
        assert not (drawn(image, sites, patch).amin(0) == 255).any()


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[float, float], Any]]:
    """What is written while it is in use, where, and with which anchor, in the order in which it is."""
    found: list[tuple[str, tuple[float, float], Any]] = []
    inside: list[str] = []
    for name in ("text", "multiline_text"):
        draw = getattr(ImageDraw.ImageDraw, name)

        def write(self: Any, at: Any, text: str, *args: Any, draw: Any = draw, **kwargs: Any) -> Any:
            if not inside:  # one is made of the other
                found.append((text, tuple(at), kwargs.get("anchor")))
            inside.append(text)
            try:
                return draw(self, at, text, *args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(ImageDraw.ImageDraw, name, write)
    return found


def test_ranks_stand_at_their_sites(texts: list[Any]) -> None:
    """1 is the most relevant. They are painted as tokens are, finer ones over coarser, and of equal ones the first on
    top; those of tokens too small for it stand nowhere."""
    sites = [(0.2, 0.3, 2.0), (0.75, 0.5, 1.0), (0.5, 0.9, 0.0), (0.4, 0.6, 3.0), (0.75, 0.55, 1.0)]
    panel = drawn(torch.zeros(3, 96, 96), sites, 1)
    ranks = [(text, at) for text, at, anchor in texts if anchor == "mm"]
    expected = {str(rank): (pytest.approx(x * 960), pytest.approx(y * 960)) for rank, (x, y, _) in enumerate(sites, 1)}
    assert [text for text, _ in ranks] == ["4", "1", "5", "2"]
    for text, at in ranks:
        assert at == expected[text]
        x, y = (round(place) for place in at)
        assert (panel[:, y - 9 : y + 9, x - 9 : x + 9].amin(0) == 255).any(), "white figures"


@pytest.mark.parametrize("count", [token_sheet.NUMBERED, token_sheet.NUMBERED + 1])
def test_few_are_numbered(texts: list[Any], count: int) -> None:
    """All of 64 by the order of the tokens, which is no order of rows, and none of 65."""
    sites = [((index * 37 % count + 0.5) / count, 0.5, 0.0) for index in range(count)]
    drawn(torch.zeros(3, 96, 96), sites, 16)
    ranks = {text: at for text, at, anchor in texts if anchor == "mm"}
    if count > token_sheet.NUMBERED:
        assert not ranks
    else:
        assert list(ranks) == [str(rank) for rank in range(count, 0, -1)]
        for rank, (x, y, _) in enumerate(sites, 1):
            assert ranks[str(rank)] == (pytest.approx(x * 960), pytest.approx(y * 960))


def test_captions_say_coverage_and_psnr_of_each(registry: None, texts: list[Any]) -> None:
    image, times = torch.rand(3, 48, 64), token_sheet.TIMES
    results = allocation.run_all(image, 4, 8, {})
    results.append(allocation.run("FoveatedPyramid", image, 48, 8, {}))  # all there is
    texts.clear()
    token_sheet.sheet(image, results, 4, 8, "cat")
    head, about, *words = [(text.replace("\n", " "), at) for text, at, anchor in texts if anchor in (None, "ld")]
    assert head[0] == "cat" and about[0] == f"4 tokens of 8{times}8 px on 64{times}48 px"
    expected = []
    for result in results:
        expected.append(result.name)
        if isinstance(result, allocation.Skipped):
            expected.append("skipped: Asking needs query; pass query=.")
            continue
        expected += ["untrained"] * result.untrained
        covered = float(lod.rebuild(result.tokens, (48, 64)).covered.double().mean())
        off = float((result.rebuilt.image - image).double().square().mean())
        expected.append(
            f"coverage {100 * covered:.1f}%   PSNR " + (f"{-10 * math.log10(off):.1f} dB" if off else "exact")
        )
    assert [text for text, _ in words] == expected
    assert expected[-1] == "coverage 100.0%   PSNR exact" and len(set(expected)) == 9, "they differ"
    high = token_sheet._ABOVE + round(48 * token_sheet._SIDE / math.sqrt(48 * 64)) + token_sheet._BELOW
    for index, (text, (left, top)) in enumerate(words):
        if text.startswith(("coverage", "skipped")):  # below the name, which "untrained" follows on its line
            name, at = words[index - 1 - (words[index - 1][0] == "untrained")]
            under = 40 if text.startswith("skipped") else high  # and below the pictures
            assert name in allocators.names() and at == (left, top - under)


def test_ranks_are_written_on_a_sheet_of_square_pictures_too(texts: list[Any]) -> None:
    image = torch.rand(3, 96, 96)
    sites = torch.tensor([(0.5, 0.5, 1.0), (0.2, 0.2, 0.0)])
    tokens = lod.TokenSet(sites, torch.ones(2), torch.zeros(2, 3, 8, 8), 8)
    one = allocation.Allocation("Mine", tokens, lod.rebuild(tokens, (96, 96)), 10.0, False)
    token_sheet.sheet(image, [one, one], 2, 8, "cat")
    assert [text for text, _, anchor in texts if anchor == "mm"] == ["1", "2", "1", "2"]


def test_the_sheet_says_who_was_skipped_and_untrained(registry: None) -> None:
    image = torch.rand(3, 48, 64)
    results = allocation.run_all(image, 4, 8, {})
    whole = token_sheet.sheet(image, results, 4, 8, "cat")
    assert whole.dtype == torch.uint8 and whole.shape[0] == 3
    for number in (0, 2):  # Asking and Drawn
        one: Any = results[number]
        other: Any = (
            allocation.Skipped(one.name, "for another reason")
            if isinstance(one, allocation.Skipped)
            else allocation.Allocation(one.name, one.tokens, one.rebuilt, one.psnr, False)
        )
        changed = token_sheet.sheet(image, [*results[:number], other, *results[number + 1 :]], 4, 8, "cat")
        assert not torch.equal(changed, whole)


@pytest.mark.parametrize("size", [(1, 1), (3, 400), (400, 3), (20, 70)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_any_picture_fits_the_sheet(size: tuple[int, int], channels: int) -> None:
    image = torch.rand(channels, *size)
    results = [allocation.run("Downsample", image, 5, 14, {}), allocation.Skipped("Other", "it " + "cannot " * 200)]
    for some in (results, results[:1]):
        sheet = token_sheet.sheet(image, some, 5, 14, "a name that is long " * 20)
        assert sheet.shape[1] < 3000 and sheet.shape[2] < 3000


# -- files ------------------------------------------------------------------------------------------------------------


def test_labels(tmp_path: Path) -> None:
    values = np.arange(12).reshape(3, 4)
    Image.fromarray(values.astype(np.uint8)).save(tmp_path / "8.png")
    Image.fromarray((values * 5000).astype(np.uint16)).save(tmp_path / "16.png")
    palette = Image.fromarray(values.astype(np.uint8))
    palette.putpalette([255 - n // 3 for n in range(768)])
    palette.save(tmp_path / "palette.png")
    np.save(tmp_path / "a.npy", values.astype(np.int16) - 5)
    np.save(tmp_path / "b.npy", values > 3)
    cases = {"8.png": values, "palette.png": values, "16.png": values * 5000, "a.npy": values - 5, "b.npy": values > 3}
    for name, expected in cases.items():
        found = token_files.read_labels(tmp_path / name)
        assert found.dtype == torch.int64 and np.array_equal(found.numpy(), expected), name


def test_labels_are_what_regions_are_made_of(tmp_path: Path, picture: Path) -> None:
    labels = np.zeros((26, 37), np.int64)
    labels[4:20, 8:30] = 3
    np.save(tmp_path / "regions.npy", labels)
    options = ("--with", "HybridAtlas", "--labels", "regions.npy", *SMALL, "--sites", "s.json")
    done(tmp_path, "allocate", "cat.png", *options)
    expected = lod.allocate.HybridAtlas(20, 4)(load(picture), labels=torch.from_numpy(labels))
    written = json.loads((tmp_path / "s.json").read_text())
    assert torch.equal(torch.tensor(written["sites"]), expected.sites)
    plain = lod.allocate.HybridAtlas(20, 4)(load(picture), labels=torch.ones(26, 37, dtype=torch.int64))
    assert not torch.equal(plain.sites, expected.sites)


def test_bad_labels(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(tmp_path / "rgb.png")
    np.save(tmp_path / "floats.npy", np.zeros((3, 4)))
    np.save(tmp_path / "flat.npy", np.zeros(4, np.int64))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "z", np.zeros(3))
    (tmp_path / "z.npz").rename(tmp_path / "z.npy")
    (tmp_path / "text.png").write_text("no picture")
    for name, message in (
        ("rgb.png", "is a picture of mode RGB; expected labels"),
        ("floats.npy", r"holds float64 \(3, 4\); expected labels"),
        ("flat.npy", r"holds int64 \(4,\)"),
        ("objects.npy", r"is no \.npy file"),
        ("z.npy", "an archive"),
        ("text.png", "is no picture"),
        ("none.png", "does not exist"),
        (".", "cannot be read"),
        ("a\0.png", "cannot be read: .*embedded null"),
    ):
        with pytest.raises(FileError, match=message):
            token_files.read_labels(tmp_path / name)


def test_queries(tmp_path: Path) -> None:
    expected = torch.tensor([1.0, -2.0, 0.5])
    np.save(tmp_path / "a.npy", expected.double().numpy())
    save_file({"any": expected[None].half()}, tmp_path / "b.safetensors")
    save_file({"query": expected, "other": torch.zeros(2)}, tmp_path / "c.safetensors")
    for name in ("a.npy", "b.safetensors", "c.safetensors"):
        found = token_files.read_query(tmp_path / name)
        assert found.dtype == torch.float32 and torch.equal(found, expected), name
    save_file({"a": expected, "b": expected.clone()}, tmp_path / "two.safetensors")
    save_file({"query": expected.expand(2, 3).contiguous()}, tmp_path / "wide.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    np.save(tmp_path / "words.npy", np.array(["a"]))
    for name, message in (
        ("two.safetensors", "holds a, b; expected a tensor named query"),
        ("wide.safetensors", r"shape \(2, 3\); expected a query"),
        ("text.safetensors", "is no safetensors file"),
        ("none.safetensors", "does not exist"),
        ("words.npy", "expected a query: numbers"),
        ("query.pt", "unknown extension '.pt'"),
        ("a\0.npy", "cannot be read: .*embedded null"),
        ("a\0.safetensors", "cannot be read: .*embedded null"),
    ):
        with pytest.raises(FileError, match=message):
            token_files.read_query(tmp_path / name)


# -- how it fails -----------------------------------------------------------------------------------------------------


def test_bad_arguments(tmp_path: Path, picture: Path) -> None:
    np.save(tmp_path / "labels.npy", np.zeros((26, 37), np.int64))
    np.save(tmp_path / "small.npy", np.zeros((3, 4), np.int64))
    np.save(tmp_path / "q.npy", np.zeros(3))
    (tmp_path / "file").write_text("")
    choices = ", ".join(map(repr, [*allocators.names(), "all"]))
    refused(
        tmp_path,
        ("allocate cat.png --with Nobody", 2, f"--with is 'Nobody'; expected one of {choices}."),
        ("allocate cat.png --with GridTopK --patch 4 --budget 71", 2, "the budget is 71, and there are 70 patches"),
        ("allocate cat.png --with GridTopK --fixation 0,0", 2, "GridTopK takes no fixation"),
        ("allocate cat.png --with GridTopK --labels labels.npy", 2, "GridTopK takes no labels"),
        ("allocate cat.png --with GridTopK --query q.npy", 2, "GridTopK takes no query"),
        ("allocate cat.png --fixation 2,0", 2, "'--fixation': '2,0'"),
        ("allocate cat.png --budget 0", 2, "'--budget'"),
        ("allocate cat.png --patch 5000", 2, "patch is 5000"),
        ("allocate none.png", 1, "none.png does not exist"),
        ("allocate cat.png --labels none.npy", 1, "none.npy does not exist"),
        (
            "allocate cat.png --with HybridAtlas --labels small.npy",
            2,
            "labels are torch.int64 (3, 4); expected integers, (26, 37) one a pixel",
        ),
        ("allocate cat.png --sites s.txt", 1, "sites are written to .json or .safetensors"),
        ("allocate cat.png --sites s.json --patches", 1, "JSON holds no patches"),
        ("allocate cat.png --patches", 2, "--sites names"),
        ("allocate cat.png --rebuilt r.gif", 1, "the choices are .png"),
        ("allocate cat.png -o x.png --rebuilt ./x.png", 2, "x.png is the drawing's file"),
        ("allocate cat.png -o ./cat.png", 2, "cat.png is read, and would be written over"),
        ("allocate cat.png --rebuilt cat.png", 2, "cat.png is read, and would be written over"),
        ("allocate cat.png --with all --rebuilt cat.png --labels cat.Voronoi.png", 2, "cat.Voronoi.png is read"),
        ("mipmap cat.png -o cat.png", 2, "cat.png is read, and would be written over"),
        ("allocate cat.png --with all -o r.Voronoi.png --rebuilt r.png", 2, "r.Voronoi.png is the drawing's file"),
    )
    assert not (tmp_path / "out").exists()
    refused(
        tmp_path,
        (
            "allocate cat.png --patch 4 --budget 9 --sites file/s.json",
            1,
            "file/s.json cannot be written: Not a directory",
        ),
    )


def test_no_file_that_is_read_is_written_over(tmp_path: Path, picture: Path) -> None:
    """By names that a command makes itself, too."""
    for name in ("b.1.png", "y.back.png", "before.png"):
        shutil.copy(picture, tmp_path / name)
    (tmp_path / "r.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    over = "is read, and would be written over"
    refused(
        tmp_path,
        ("mipmap b.1.png --separate -o b.png", 2, f"b.1.png {over}"),
        ("log-polar y.back.png --back -o y.png", 2, f"y.back.png {over}"),
        ("laplacian y.back.png --back -o y.png", 2, f"y.back.png {over}"),
        ("features cat.png --previous before.png -o before.png", 2, f"before.png {over}"),
        ("demo cat.png -o .", 2, f"cat.png {over}"),
        ("report r.json -o r.json", 2, f"r.json {over}"),
    )
    assert all(path.read_bytes() == data for path, data in before.items())


def test_links_that_go_in_circles(tmp_path: Path, picture: Path) -> None:
    for name, other in (("a.png", "b.png"), ("b.png", "a.png")):
        (tmp_path / name).symlink_to(other)
    refused(
        tmp_path,
        ("mipmap a.png", 1, "a.png cannot be read: Too many levels of symbolic links."),
        ("allocate a.png --rebuilt r.png", 1, "a.png cannot be read"),
        ("mipmap a.png -o a.png", 2, "a.png is read, and would be written over"),
    )


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("safetensors", "safetensors.torch", "PIL"):
        monkeypatch.setitem(sys.modules, module, None)
    tokens = lod.allocate.GridTopK(4, patch=4)(torch.rand(3, 16, 16))
    for name in ("s.safetensors", "labels.png"):
        (tmp_path / name).write_bytes(b"")
    for call, package in (
        (lambda: token_files.write_sites(tmp_path / "new.safetensors", tokens, {}), "safetensors"),
        (lambda: token_files.read_sites(tmp_path / "s.safetensors"), "safetensors"),
        (lambda: token_files.read_query(tmp_path / "s.safetensors"), "safetensors"),
        (lambda: token_files.read_labels(tmp_path / "labels.png"), "pillow"),
    ):
        with pytest.raises(UnsupportedError, match=rf"need {package} \(.*pip install '\.\[cli\]'"):
            call()
    assert not (tmp_path / "new.safetensors").exists()


def test_safetensors_that_is_missing_names_the_extra(tmp_path: Path, picture: Path) -> None:
    arguments = ("allocate", str(picture), *SMALL, "--sites", str(tmp_path / "s.safetensors"))
    code = f"import sys; sys.modules['safetensors'] = None; sys.argv[1:] = {arguments!r}"
    code += "; from gpu_lod.cli import main; main()"
    result = scripts.run(code)
    assert result.returncode == 1
    assert result.stderr.startswith("gpu-lod: files of .safetensors need safetensors (")
    assert result.stderr.endswith("; in the checkout: pip install '.[cli]'\n") and result.stderr.count("\n") == 1


SITES, SCORES = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 1.5]]), torch.tensor([1.0, 0.5])


@pytest.mark.parametrize(
    ("tensors", "metadata", "hint"),
    [
        ({"sites": SITES, "scores": SCORES, "patch": torch.tensor(14)}, {}, "holds no patch"),
        ({"sites": SITES.to(torch.float8_e4m3fn), "scores": SCORES}, {"patch": "14"}, "its sites are torch.float8"),
        ({"sites": SITES, "scores": SCORES > 0.7}, {"patch": "14"}, "its scores are torch.bool"),
        ({"sites": SITES, "scores": SCORES, "weights": torch.zeros(2, 4).int()}, {"patch": "14"}, "its weights are"),
    ],
)
def test_safetensors_of_other_kinds_are_no_sites(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], hint: str
) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path := tmp_path / "sites.safetensors", metadata)
    with pytest.raises(FileError, match=hint):
        token_files.read_sites(path)


def test_metadata_of_any_text(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    deep = "[" * 200_000
    save_file({"sites": SITES, "scores": SCORES}, path := tmp_path / "sites.safetensors", {"patch": "14", "x": deep})
    tokens, about = token_files.read_sites(path)
    assert torch.equal(tokens.sites, SITES) and about == {"x": deep}
    token_files.write_sites(path, tokens, {"\udcff": 1})
    assert token_files.read_sites(path)[1] == {"\\udcff": 1}


@pytest.mark.parametrize("values", [torch.ones(4, dtype=torch.complex64), torch.ones(4) > 0])
def test_queries_are_numbers(tmp_path: Path, values: torch.Tensor) -> None:
    from safetensors.torch import save_file

    save_file({"query": values}, path := tmp_path / "query.safetensors")
    with pytest.raises(FileError, match="expected a query"):
        token_files.read_query(path)


def test_labels_are_turned_upright(tmp_path: Path) -> None:
    labels, exif = np.arange(12, dtype=np.uint8).reshape(3, 4), Image.Exif()
    exif[274] = 3
    for extension in ("png", "tif"):
        Image.fromarray(labels[::-1, ::-1].copy()).save(path := tmp_path / f"labels.{extension}", exif=exif)
        assert token_files.read_labels(path).numpy().tolist() == labels.tolist()
