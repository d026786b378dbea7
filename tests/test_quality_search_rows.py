"""The visual search, what is more than an allocator: cuts inside the reader, allocators that learn, what a row holds in
memory and what the rule says of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_lod as lod

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install '.[quality]'")
pytest.importorskip("skimage", reason="the photographs come with scikit-image: pip install '.[quality]'")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from quality import search, search_cuts, search_learned, search_run, search_scenes, search_training, summary
from quality.memory import peak_bytes
from quality.search_reader import Held, Reader, queries, remoteness
from quality.search_scenes import SIDE, Search, scenes
from quality.search_training import GRID, PATCH
from quality.search_way import Way, prepared

LEARNED = sorted(search_learned.LOSSES)
SMALL = search_learned.Learning(steps=4, groups=1, batch=2, every=2)


class Stopped(Exception):
    """A run that is stopped in the middle."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def few() -> Search:
    return scenes("test", 3, range(2))


@pytest.fixture(scope="module")
def reader() -> Reader:
    found = Reader().eval().requires_grad_(False)
    found.metric *= 4  # as sharp as training makes it
    return found


def grid(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = lod.allocate.GridTopK(GRID**2, PATCH)(image, torch.ones(len(image), GRID, GRID))
    assert tokens.patches is not None
    return tokens.patches, tokens.sites


# -- cuts inside the reader --------------------------------------------------------------------------------------------


def held_by(name: str, budget: int, reader: Reader, image: torch.Tensor, asked: torch.Tensor) -> Held:
    """What a cut hands on, in the middle of the reader."""
    found: list[Held] = []

    def watched(*given: Any) -> Held:
        found.append(search_cuts.CUTS[name](budget)(*given))
        return found[-1]

    reader(*grid(image), asked, cut=watched)
    return found[0]


@pytest.mark.parametrize("name", sorted(search_cuts.CUTS))
def test_cuts_leave_so_many_tokens_of_the_grid(name: str, few: Search, reader: Reader) -> None:
    asked = queries(few.places, few.colours, "colour")[:, :1]
    patches, sites = grid(few.image)
    held = held_by(name, 70, reader, few.image, asked)
    assert held.patches.shape == (2, 70, 3, PATCH, PATCH) and held.sites.shape == (2, 70, 3)
    for picture in range(2):
        places = {tuple(site) for site in held.sites[picture].tolist()}
        assert len(places) == 70 and places <= {tuple(site) for site in sites[picture].tolist()}
    assert (held.sizes.sum(1) == GRID**2).all() == (name == "ToMe")
    whole = search_cuts.CUTS[name](GRID**2)
    if name == "ToMe":  # nothing to merge: nothing changes
        assert torch.equal(reader(patches, sites, asked, cut=whole).logits, reader(patches, sites, asked).logits)
    else:
        assert not torch.equal(held.sites, sites[:, :70])


def test_what_is_merged_is_alike(few: Search, reader: Reader) -> None:
    """Two colours: merged tokens are of one of them each, and their sizes say how much of it there is."""
    image = torch.zeros(1, 3, SIDE, SIDE)
    image[:, 0, :, : SIDE // 4] = 0.8
    image[:, 2, :, SIDE // 4 :] = 0.4
    held = held_by("ToMe", 2, reader, image, queries(few.places, few.colours, "colour")[:1, :1])
    red = held.patches[0, :, 0].mean((1, 2))
    order = red.argsort()
    assert torch.allclose(red[order], torch.tensor([0.0, 0.8]), atol=1e-4)
    assert held.sizes[0, order].tolist() == [GRID**2 * 3 / 4, GRID**2 / 4]


def test_attention_is_proportional_to_sizes(few: Search, reader: Reader) -> None:
    """A token of size 2 is as good as two of size 1."""
    asked = queries(few.places, few.colours, "place")[:, :1]
    index = remoteness(grid(few.image)[1], few.places[:, :1], PATCH)[:, 0].topk(6, largest=False).indices
    rows = torch.arange(2)[:, None]

    def logits(index: torch.Tensor, sizes: list[float]) -> torch.Tensor:
        def cut(_: Reader, patches: torch.Tensor, sites: torch.Tensor, *more: Any) -> Held:
            return Held(patches[rows, index], sites[rows, index], torch.tensor([sizes, sizes]))

        return reader(*grid(few.image), asked, cut=cut).logits

    twice = logits(torch.cat([index, index[:, :1]], 1), [1.0] * 7)
    assert torch.allclose(logits(index, [2.0] + [1.0] * 5), twice, atol=1e-5)
    assert float((logits(index, [1.0] * 6) - twice).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["VisionZip", "SparseVLM"])
def test_pruners_keep_what_has_the_colour(name: str, few: Search, reader: Reader) -> None:
    """The frame that is asked for is among what is left; other frames too where it is not asked who asks."""
    at = (few.places[:, None] - grid(few.image)[1][:, :, None, :2]).abs().amax(-1).argmin(1)  # [2, COUNT]
    for digit in range(2):
        asked = queries(few.places, few.colours, "colour")[:, digit : digit + 1]
        held = held_by(name, 64, reader, few.image, asked)
        near = torch.cdist(few.places, held.sites[:, :54, :2])
        count = (near < 1.5 / GRID).sum(-1)
        assert (count[:, digit] >= 3).all()
        if name == "VisionZip":
            assert (count >= 1).float().mean() > 0.7
    by_place = held_by("SparseVLM", 64, reader, few.image, queries(few.places, few.colours, "place")[:, :1])
    sites = grid(few.image)[1]
    assert torch.equal(by_place.sites[:, 0], sites[torch.arange(2), at[:, 0]])


# -- allocators that learn ---------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Which scenes are drawn, and the cheapest of grids."""
    drawn: list[Any] = []
    real = search_learned.scenes

    def watched(split: Any, seed: int, indices: range) -> Search:
        drawn.append((split, seed, indices))
        return real(split, seed, indices)

    monkeypatch.setattr(search_learned, "scenes", watched)
    search_learned.training_batches.cache_clear()
    return drawn


def test_learning_sees_training_pictures_alone(counted: list[Any]) -> None:
    batches = search_learned.training_batches(SMALL)
    assert [split for split, *_ in counted] == ["train"] and len(batches) == 1
    assert not set(batches[0].search.sources.flatten().tolist()) & set(search_scenes.sources("test"))
    assert min(indices.start for *_, indices in counted) > search_training.BATCH * 1000  # none of the reader's


@pytest.mark.parametrize("name", LEARNED)
def test_allocators_learn_and_go_on_where_they_stopped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Reader
) -> None:
    monkeypatch.setattr(
        search_learned,
        "_losses_of_grids",
        lambda budget, reader, batch: torch.linspace(1, 2, 24 * 49).view(2, 12, 7, 7),
    )
    real, rate = search_learned.LOSSES[name]
    whole, losses = search_learned.trained(SMALL, name, 20, 0, tmp_path / "whole", reader)
    start = search_learned.new(name, 20)
    assert len(losses) == SMALL.steps
    for (label, value), before in zip(whole.named_parameters(), start.parameters(), strict=True):
        assert not torch.equal(value, before) and not value.requires_grad, label
    calls: list[int] = []

    def killed(*given: Any) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 4:
            raise Stopped
        return real(*given)

    monkeypatch.setitem(search_learned.LOSSES, name, (killed, rate))
    with pytest.raises(Stopped):
        search_learned.trained(SMALL, name, 20, 0, tmp_path / "part", reader)
    resumed, same = search_learned.trained(SMALL, name, 20, 0, tmp_path / "part", reader)
    assert same == losses and len(calls) == 4 + 2
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_losses_of_grids_are_those_of_each(reader: Reader) -> None:
    batch = search_learned.training_batches(SMALL)[0]
    found = search_learned._losses_of_grids(20, reader, batch)
    assert found.shape == (2, 12, 7, 7)
    tokens = lod.allocate.Stratified(20, PATCH, strata=(3, 6))(batch.pyramid, batch.saliency)
    assert tokens.patches is not None
    asked = search_training.both_kinds(batch.search)
    logits = reader(tokens.patches, tokens.sites, asked, every=search_training.EVERY).logits
    likely = logits.log_softmax(-1).gather(-1, batch.search.classes.repeat(1, 2)[..., None])[..., 0]
    assert torch.allclose(found[..., 1, 4], -likely, atol=1e-5)


def test_grain_is_the_level_that_covers_digits(reader: Reader) -> None:
    """Of even tokens it is their level; of tokens that are all in a corner, much more."""
    batch = search_learned.training_batches(SMALL)[0]

    class Fixed:
        takes = ()

        def __init__(self, sites: torch.Tensor) -> None:
            self.sites = sites.expand(2, -1, -1)

        def eval(self) -> Fixed:
            return self

        def __call__(self, relevance: torch.Tensor) -> lod.TokenSet:
            return lod.TokenSet(self.sites, torch.ones(self.sites.shape[:2]), None, PATCH)

    even = lod.allocate.Downsample(64, PATCH)(relevance=torch.ones(1, GRID, GRID)).sites
    assert abs(float(search_learned.by_grain(Fixed(even), reader, batch)) - 2) < 0.3
    corner = even * torch.tensor([0.1, 0.1, 1.0])
    assert float(search_learned.by_grain(Fixed(corner), reader, batch)) > 5


# -- memory and the rule -----------------------------------------------------------------------------------------------


def test_more_tokens_take_more_memory(reader: Reader) -> None:
    def way(budget: int, name: str) -> Way:
        allocator = lod.allocate.GridTopK(GRID**2 if name in search_cuts.CUTS else budget, PATCH)
        cut = search_cuts.CUTS[name](budget) if name in search_cuts.CUTS else None
        return Way(search.Unit(0, budget, name, None, None), reader, allocator, cut)

    def peak(budget: int, name: str) -> int:
        return way(budget, name).peak()

    picture = prepared(0, 0, 1).search
    asked = queries(picture.places[:, :1], picture.colours[:, :1], "colour")
    own = way(64, "Random").tokens(0, 1, 0, "colour")[0]()
    small, large, cut = peak(64, "Random"), peak(256, "Random"), peak(64, "ToMe")
    tokens = 64 * (3 * PATCH**2 + 3) * 4
    assert tokens < small < large - 3 * tokens and cut > GRID**2 * 3 * PATCH**2 * 4 > large
    assert peak(64, "Random") == small == tokens + peak_bytes(lambda: way(64, "Random").read(own, asked))[1]


def test_verdicts_by_hand() -> None:
    """What a row stands against is told as much; and a cut inside the reader is no half of the work."""
    base = [0.5, 0.4, 0.6, 0.5]

    def more(gain: float) -> list[float]:
        return [value + gain for value in base]

    rows: dict[tuple[Any, ...], tuple[list[float], str]] = {
        ("full image", None, None, 0.0, None): (more(0.05), "every token"),
        ("GridTopK", None, "saliency", 0.0, 64): (base, "baseline"),
        ("GridTopK", None, "query", 0.0, 64): (more(0.05), "baseline"),
        ("GridTopK", None, "query", 0.1, 64): (more(-0.2), "baseline"),
        ("GridTopK", None, "trained", 0.0, 64): (more(0.05), "baseline"),
        ("GridTopK", None, "saliency", 0.0, 128): (more(0.025), "baseline"),
        ("Stratified", None, "saliency", 0.0, 64): (more(0.02), "earns: half the tokens"),
        ("Random", None, None, 0.0, 64): (more(0.05), "earns: accuracy"),
        ("LogPolar", "centre", "saliency", 0.0, 64): (more(0.05), "earns: accuracy"),
        ("LogPolar", "oracle", "saliency", 0.0, 64): (more(0.05), "no"),
        ("LogPolar", "oracle", "saliency", 0.1, 64): (base, "earns: accuracy"),
        ("TokenDAG", "saliency", "trained", 0.0, 64): (more(0.05), "no"),
        ("ToMe", None, None, 0.0, 64): (more(0.02), "no"),
        ("VisionZip", None, None, 0.0, 64): (more(0.05), "earns: accuracy"),
        ("SparseVLM", None, None, 0.0, 64): (more(0.05), "no"),
        ("AdaptiveStratified", None, "saliency", 0.0, 64): (more(0.05), "no"),
        ("AdaptiveStratified, untrained", None, "saliency", 0.0, 64): (more(0.05), "no"),
    }
    lines = [
        {
            "place": {**dict(zip(summary.KEY, key, strict=True)), "task": "search"},
            "tokens": key[-1] or 1024,
            "values": {"answers": {str(at): value for at, value in enumerate(values)}},
        }
        for key, (values, _) in rows.items()
    ]
    found = summary.summarise(search_run.task(), lines, {}, ["saliency", "query", "trained"])["rows"]
    assert [row["verdict"] for row in found] == [verdict for _, verdict in rows.values()]
    [oracle] = [row for row in found if row["fixation"] == "oracle" and row["error"]]
    assert oracle["difference"]["answers"]["mean"] == 0.2


def test_rows_of_what_learns_and_of_what_cuts() -> None:
    found = {unit.place["allocator"]: unit for unit in search.units(search.QUICK) if unit.seed == 0}
    for name in LEARNED:
        assert {name, name + search.UNTRAINED} <= set(found)
    assert set(search_cuts.CUTS) <= set(found)
    trained = {unit.allocator for unit in search.units(search.QUICK) if unit.relevance == "trained"}
    assert trained == {"GridTopK", "FoveatedPyramid", "TokenDAG"}
    assert all(unit.by_kind for unit in search.units(search.QUICK) if unit.relevance == "trained")
    assert [found[name].by_kind for name in ("SparseVLM", "ToMe", "AdaptiveStratified", "SoftVortex")] == [
        True, False, True, False,
    ]  # fmt: skip
