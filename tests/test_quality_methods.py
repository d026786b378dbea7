"""Methods beside the package's allocators: another library's retina, ablations, and what is trained for a task."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import gpu_lod as lod
from gpu_lod.errors import UnsupportedError
from gpu_lod.rebuild import Rebuilt, rebuild
from gpu_lod.saliency import saliency

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from quality import fovi_peer, frame, learned, methods, proxy
from quality.ablations import FoveationOnly, PyramidOnly
from quality.methods import Method
from quality.resized import Resized
from quality.task import Metric

P = 8
fovi = pytest.mark.skipif(find_spec("fovi") is None, reason="fovi is not installed")


class Exact(frame.RebuiltPictures):
    """The share of pixels that are what they were."""

    name = "exact"
    title = "Exact"
    patch = P
    sources: ClassVar[tuple[str, ...]] = ()
    metrics = (Metric("same", "of all pixels", accuracy=True),)

    def pictures(self, seeds: int, quick: bool) -> list[frame.Picture]:
        image = torch.randint(0, 256, (3, 48, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        relevance = torch.rand(48, 64, generator=torch.Generator().manual_seed(1))
        return [frame.Picture("dots", image, {"lots": relevance}, target=(0.25, 0.5))]

    def measure(self, picture: frame.Picture, tokens: Any, rebuilt: Rebuilt) -> dict[str, float | None]:
        assert tokens is not None, "None is the full image"
        return {"same": float((rebuilt.image == picture.image).all(0).float().mean())}


def unit(name: str, fixation: str | None = None, budget: int = 6, **arguments: Any) -> frame.Unit:
    task = Exact()
    [picture] = task.pictures(1, True)
    return frame.Unit(task, picture, Method(name, tuple(arguments.items()), fixation), "lots", budget)


def test_the_quick_form_has_the_rest_at_its_largest_budget_alone() -> None:
    task = Exact()
    every = [Method("GridTopK"), Method("fovi", (), "centre")]
    for quick, budgets in ((True, [6]), (False, [4, 6])):
        units = list(frame.units_of(task, task.pictures(1, True), every, (4, 6), quick))
        assert [unit.budget for unit in units if unit.method.name == "fovi"] == budgets
        assert [unit.budget for unit in units if unit.method.name == "GridTopK"] == [4, 6]


# -- what rebuilds pictures itself -------------------------------------------------------------------------------------


class LeftHalf:
    """Shows the part of the picture that is left of the fixation, and remembers what it was given."""

    needs: ClassVar[tuple[str, ...]] = ("relevance",)
    takes: ClassVar[tuple[str, ...]] = ("fixation",)
    seen: ClassVar[list[Any]] = []

    def __init__(self, budget: int, patch: int) -> None:
        self.seen[:] = [budget, patch]

    def __call__(self, image: torch.Tensor, relevance: torch.Tensor, fixation: Any) -> LeftHalf:
        self.seen += [relevance, fixation]
        self.image = image
        self.covered = (torch.arange(image.shape[2]) < (fixation or (0.5,))[0] * image.shape[2]).expand(image.shape[1:])
        return self

    def rebuilt(self) -> Rebuilt:
        return Rebuilt(torch.where(self.covered, self.image, 255 - self.image), self.covered)

    def choose(self, image: torch.Tensor, relevance: torch.Tensor, fixation: Any) -> None:
        self.seen.append("choose")


def test_a_method_may_rebuild_the_picture_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "class_of", lambda name: LeftHalf)
    for fixation, place, share in (("oracle", (0.25, 0.5), 0.25), ("saliency", None, 0.5), ("centre", (0.5, 0.5), 0.5)):
        one = unit("half", fixation)
        line = frame.compute(one)
        values = {"same": {"dots, seed 0": share}}
        assert line == {"tokens": 6, "coverage": share, "peak_bytes": line["peak_bytes"], "values": values}
        assert line["peak_bytes"] > 0
        assert LeftHalf.seen == [6, P, one.picture.relevance["lots"], place]
        assert frame.choosing_ms(one) > 0 and LeftHalf.seen[2:] == ["choose"] * (frame.CALLS + 1)


def test_a_resized_picture_is_a_grid_of_no_more_than_k_patches() -> None:
    """Of the picture's shape; and where every patch is there, the picture itself."""
    for budget, size, grid in (
        (6, (48, 64), (2, 3)),
        (7, (10, 900), (1, 7)),
        (273, (900, 700), (18, 15)),
        (1, (9, 9), (1, 1)),
    ):
        made = Resized(budget, P)
        assert made.choose(torch.zeros(3, *size)) == grid
        small = made(torch.randint(0, 256, (3, *size), dtype=torch.uint8))
        assert small.image.shape == (3, grid[0] * P, grid[1] * P) and small.rebuilt().image.shape == (3, *size)
    image = torch.randint(0, 256, (3, 3 * P, 2 * P), dtype=torch.uint8)
    found = Resized(6, P)(image).rebuilt()
    assert torch.equal(found.image, image) and bool(found.covered.all())
    line = frame.compute(unit("resize"))
    assert line["tokens"] == 6 and line["coverage"] == 1


@fovi
@pytest.mark.parametrize(
    ("reach", "fixation"), [("area", (0.3, 0.6)), ("corners", (0.3, 0.6)), ("corners", (0.9, 0.1))]
)
def test_pixels_show_the_sample_that_is_nearest_on_the_cortex(reach: str, fixation: tuple[float, float]) -> None:
    """By fovi's own function for the cortical coordinates of its samples, one pixel at a time."""
    from fovi.sensing.manifold import vis_cartesian_to_cortical_cartesian_coords

    height, width = 60, 84
    x, y = torch.arange(width), torch.arange(height)[:, None]
    image = torch.stack([(x + 0 * y), (0 * x + y), 0 * x + 0 * y]).to(torch.uint8)  # a pixel says where it is
    found = fovi_peer.Fovi(4, P, reach)(image, image[0].float(), fixation).rebuilt()
    diameter = fovi_peer.Fovi(4, P, reach)._diameter(height, width, fixation)
    gaze = torch.tensor(fixation) * torch.tensor([width, height])
    away = (torch.stack([x + 0.5 + 0 * y, 0 * x + y + 0.5], -1) - gaze).norm(dim=-1)
    assert torch.equal(found.covered, away <= diameter / 2) and (reach == "area" or bool(found.covered.all()))
    retina = fovi_peer.retina_of(4 * P**2)
    assert 0.8 * 4 * P**2 < len(retina.sampler.coords) <= 4 * P**2
    samples = retina.sampler.coords.cartesian.double()  # y up
    places = gaze + samples * torch.tensor([1, -1]) * diameter / 2
    inside = ((places >= 0) & (places < torch.tensor([width, height]))).all(1)
    cortex = torch.from_numpy(vis_cartesian_to_cortical_cartesian_coords(samples[inside].numpy(), 0.5, 16))
    for pixel in found.covered.nonzero()[:: 1 + height * width // 60]:
        own = (pixel.flip(0) + 0.5 - gaze) * torch.tensor([1, -1]) / (diameter / 2)
        mine = torch.from_numpy(vis_cartesian_to_cortical_cartesian_coords(own[None].double().numpy(), 0.5, 16))
        apart = (cortex - mine).norm(dim=1)
        near = places[inside][apart <= apart.min() + 1e-3].floor()
        shown = found.image[:2, pixel[0], pixel[1]].double()
        assert (shown == near).all(1).any(), (pixel, shown, near)


@fovi
def test_fovi_looks_at_the_peak_where_no_fixation_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    relevance = torch.zeros(48, 64)
    relevance[8:16, 40:48] = 1
    image = torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8)
    itself, given = (fovi_peer.Fovi(4, P)(image, relevance, at).rebuilt() for at in (None, (44 / 64, 12 / 48)))
    assert torch.equal(itself.image, given.image) and torch.equal(itself.covered, given.covered)
    lines = [frame.compute(unit("fovi", at, 4, reach="corners")) for at in ("centre", "saliency", "oracle")]
    assert all(line["tokens"] == 4 and line["coverage"] == 1 for line in lines)
    assert len({line["values"]["same"]["dots, seed 0"] for line in lines}) > 1


def test_what_is_not_installed_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(count: int) -> None:
        raise ModuleNotFoundError("No module named 'trimesh'")

    monkeypatch.setattr(fovi_peer, "retina_of", missing)
    assert "No module named 'trimesh': pip install" in methods.left_out()["fovi"]
    assert not any(method.name == "fovi" for method in methods.methods(1, False))


# -- ablations ---------------------------------------------------------------------------------------------------------


def test_each_ablation_leaves_one_thing_out() -> None:
    relevance, other = torch.rand(2, 1, 16, 16)
    foveated = FoveationOnly(40, P)
    near = foveated(relevance=relevance, fixation=(0.2, 0.7))
    assert torch.equal(near.sites, foveated(relevance=other, fixation=(0.2, 0.7)).sites)
    away = [
        (near.sites[0, near.sites[0, :, 2] == level, :2] - torch.tensor([0.2, 0.7])).norm(dim=1) for level in (0, 2)
    ]
    assert float(away[0].max()) < float(away[1].mean())
    peak = lod.allocate.find_fixations(relevance)[:, 0]
    assert torch.equal(foveated(relevance=relevance).sites, foveated(relevance=other, fixation=peak).sites)

    symmetric = relevance + relevance.flip(2)
    sites = PyramidOnly(40, P)(relevance=symmetric.square()).sites[0]
    assert float((sites[:, 0].mean() - 0.5).abs()) < 0.05, "no side is preferred"
    assert not torch.equal(sites, PyramidOnly(40, P)(relevance=other).sites[0])
    labels = {(method.label, method.fixation) for method in methods.methods(1, True)}
    assert ("FoveatedPyramid, pyramid only", None) in labels
    assert {("FoveatedPyramid, foveation only", at) for at in ("centre", "saliency", "oracle")} <= labels


# -- what is trained ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crops(photo: torch.Tensor) -> list[torch.Tensor]:
    return [photo[:, y : y + 128, x : x + 128] for y, x in ((0, 180), (100, 300))]


def examples_of(crops: list[torch.Tensor]) -> list[proxy.Example]:
    return [proxy.example(crop, saliency(crop, "gradient")[0], P, (0.4, 0.3)) for crop in crops]


def test_the_proxy_is_the_error_of_rebuilt_pictures(crops: list[torch.Tensor]) -> None:
    """Of tokens that tile, within a sixth; and 0 and 1 at its ends."""
    crop = crops[0]
    [example] = examples_of([crop])
    assert float(example.masked(torch.ones(1, 16, 16))) == 0
    assert float(example.masked(torch.zeros(1, 16, 16))) == pytest.approx(1)
    alone = torch.tensor([[[0.5, 0.5, 0.0]]])
    assert float(example.seen(alone, False)) > 0.9
    unit = float((crop.float() - crop.float().mean((1, 2), keepdim=True)).square().mean())
    errors = []
    for budget in (40, 100, 190, 256):
        tokens = lod.allocate.TokenDAG(budget, P, morph=0)(crop)
        error = float((rebuild(tokens, (128, 128)).image.float() - crop.float()).square().mean()) / unit
        assert abs(float(example.seen(tokens.sites[None], False)) - error) < error / 6 + 0.01, (budget, error)
        errors.append(error)
    over = torch.cat([torch.tensor([[0.5, 0.5, 4.0]]), tokens.sites])
    assert float(example.seen(over[None], False)) < 0.01, "a pixel shows the finest token that covers it"
    assert errors[0] > 2 * errors[2] > errors[3] == 0


def test_the_proxy_of_blends(crops: list[torch.Tensor]) -> None:
    """A token of level 1 that is the mean of the four patches in its square."""
    [example] = examples_of(crops[:1])
    patches = crops[0].float().unfold(1, P, P).unfold(2, P, P)
    mean = torch.stack([patches[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]).mean(0)
    sites = torch.tensor([[[(x + 0.5) / 8, (y + 0.5) / 8, 1.0] for y in range(8) for x in range(8)]])
    tokens = lod.TokenSet(sites[0], torch.ones(64), mean.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous(), P)
    shown = rebuild(tokens, (128, 128)).image
    unit = float((crops[0].float() - crops[0].float().mean((1, 2), keepdim=True)).square().mean())
    error = float((shown - crops[0].float()).square().mean()) / unit
    assert float(example.blend_error[1].mean()) == pytest.approx(error, rel=0.1)
    assert float(example.seen(sites, True)) == pytest.approx(error, rel=0.1)
    assert float(example.seen(sites, False)) < 0.5 * error


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, crops: list[torch.Tensor]) -> Iterator[Path]:
    """A task to train for, with few steps on one crop, which is held out too."""
    monkeypatch.setattr(learned, "SETS", {"exact": lambda patch: iter(examples_of(crops[:1] * 4))})
    monkeypatch.setattr(learned, "CACHE", tmp_path)
    monkeypatch.setattr(learned.Trained, "steps", 30)
    monkeypatch.setattr(learned.PseudoLogPolar, "steps", 30)
    learned._examples.cache_clear()
    yield tmp_path
    learned._examples.cache_clear()


@pytest.mark.parametrize("kind", learned.KINDS)
def test_training_lowers_the_proxy(kind: type[Any], tiny: Path, crops: list[torch.Tensor]) -> None:
    [held] = examples_of(crops[:1])
    found = learned.weights(kind, learned.MIDDLE, P, "exact")
    assert found["trained"] < found["untrained"]
    before, after = kind(learned.MIDDLE, P), kind(learned.MIDDLE, P, "exact")
    for allocator, name in ((before, "untrained"), (after, "trained")):
        allocator.prepare([held])
        assert float(allocator.eval().error(held, 0).detach()) == pytest.approx(found[name], abs=1e-5)
    assert not after.training and len(list(tiny.iterdir())) == 1


def test_weights_are_the_same_in_any_order_and_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = learned.PseudoLogPolar, learned.SoftVortex
    first = [learned.weights(kind, 20, P, "exact")["state"] for kind in kinds]
    torch.manual_seed(7)
    again = [learned.train(kind, budget, P, "exact")["state"] for kind, budget in zip(kinds, (20, 150), strict=True)][
        ::-1
    ]
    for one, other in zip(first, again[::-1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    monkeypatch.setattr(learned, "train", None)
    learned.weights(learned.SoftVortex, 33, P, "exact")  # of no budget of its own
    with pytest.raises(TypeError):
        learned.weights(learned.PseudoLogPolar, 33, P, "exact")
    notes = learned.trained(["exact", "other"], [20, 33], P)
    assert [(note["method"], note["budget"]) for note in notes] == [
        ("PseudoLogPolar, trained", 20), ("SoftVortex, trained", learned.MIDDLE),
    ]  # fmt: skip
    assert all(note["trained"] < note["untrained"] for note in notes)
    monkeypatch.setattr(learned, "_digest", lambda: "changed")
    assert not learned.trained(["exact"], [20, 33], P)


@pytest.mark.parametrize("module", ["allocate.losses", "allocate.vortex_learned", "saliency"])
def test_weights_depend_on_all_that_training_calls(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest() -> str:
        methods.code_of.cache_clear()
        learned._digest.cache_clear()
        return learned._digest()

    before, own = digest(), importlib.import_module(f"gpu_lod.{module}")
    changed = tmp_path / "changed.py"
    changed.write_text(Path(str(own.__file__)).read_text() + "# changed\n")
    monkeypatch.setattr(own, "__file__", str(changed))
    assert digest() != before
    monkeypatch.undo()
    assert digest() == before


@pytest.mark.parametrize("kind", learned.KINDS)
def test_trained_rows(kind: type[Any], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MIDDLE", 20)
    line = frame.compute(unit(f"{kind.__name__}, trained", budget=20))
    assert "skipped" not in line and 0 < line["coverage"] <= 1 and line["peak_bytes"] > 0
    if kind is learned.SoftVortex:
        assert learned.SoftVortex(20, P)(torch.full((3, 48, 64), 200, dtype=torch.uint8)).patches.unique().tolist() == [
            200
        ]


def test_nothing_to_train_on_is_said(tiny: Path) -> None:
    with pytest.raises(UnsupportedError, match="no pictures to train on for vqa"):
        learned.weights(learned.SoftVortex, 20, P, "vqa")


def test_no_picture_is_trained_on_and_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    from quality import ocr, pages
    from quality.features import Features
    from skimage import data

    taken: list[str] = []
    photographs = {name: getattr(data, name) for name in (*pages.PHOTOGRAPHS, *learned.PAPER)}
    for name, real in photographs.items():
        monkeypatch.setattr(data, name, lambda name=name, real=real: (taken.append(name), real())[1], raising=False)
    monkeypatch.setattr(ocr, "picture_of", lambda page: SimpleNamespace(image=0, relevance={"": 0}, target=0))
    monkeypatch.setattr(learned, "example", lambda *_: None)
    for seed in range(len(pages.PHOTOGRAPHS)):
        pages.drawn("photograph", seed)
    tested = taken.copy()
    taken.clear()
    list(learned._pages(P))
    assert len(set(tested)) == len(set(taken)) == 4 and not set(tested) & set(taken)
    assert not set(learned.PHOTOGRAPHS) & {name for name, _ in Features(network=None)._photographs()}
    assert min(learned.PAGES) > 100, "tests have a few seeds"
    assert pages.drawn("noise", learned.PAGES[0]).truth != pages.drawn("noise", 0).truth
