"""The visual search: scenes are what they are said to be, what is asked decides the answer, readers and scorers learn,
and a run that is stopped gives the same numbers."""

from __future__ import annotations

import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_lod as lod
from gpu_lod.feature_maps import feature_maps
from gpu_lod.vlm import ContextualizedRelevance

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install '.[quality]'")
pytest.importorskip("skimage", reason="the photographs come with scikit-image: pip install '.[quality]'")

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "bench"))

from quality import search, search_run, search_scorer, search_training, summary, task  # noqa: E402
from quality.search_reader import KINDS, Reader, queries  # noqa: E402
from quality.search_scenes import (  # noqa: E402
    APART,
    BOX,
    COLOURS,
    COUNT,
    DIGIT,
    FRAME,
    PHOTOGRAPHS,
    SIDE,
    Search,
    digits,
    scene,
    scenes,
    sources,
)  # fmt: skip
from quality.search_training import GRID, PATCH, Training  # noqa: E402
from quality.search_way import Way, prepared  # noqa: E402

SMALL = search.Form(budgets=(64,), seeds=2, pictures=2, allocators=("Random", "GridTopK", "LogPolar"))


pytestmark = pytest.mark.usefixtures("one_thread")


class Stopped(Exception):
    """A run that is stopped in the middle."""


@pytest.fixture(scope="module")
def few() -> Search:
    return scenes("test", 3, range(2))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (search_training, search_scorer):
        monkeypatch.setattr(module, "BATCH", 4)
    search_scorer.training_batches.cache_clear()


# -- scenes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "test"])
def test_digits_are_where_they_are_said_to_be(split: Any) -> None:
    found = scene(split, 1, 5)
    ink, classes = digits()
    for k in range(COUNT):
        x, y = (found.places[0, k] * SIDE - BOX / 2).round().int().tolist()
        box = found.image[0, :, y : y + BOX, x : x + BOX]
        colour = torch.tensor(list(COLOURS.values())[found.colours[0, k]])
        for border in (box[:, :FRAME], box[:, -FRAME:], box[..., :FRAME], box[..., -FRAME:]):
            assert torch.equal(border, colour[:, None, None].expand_as(border))
        source = found.sources[0, k]
        seen = box[0, FRAME:-FRAME, FRAME:-FRAME]
        assert torch.corrcoef(torch.stack([seen.flatten(), ink[source].flatten()]))[0, 1] < -0.999  # dark on light
        assert found.classes[0, k] == classes[source]
    apart = torch.cdist(found.places[0], found.places[0]) + 9 * torch.eye(COUNT)
    assert float(apart.min()) >= APART - 1e-6 and len(set(found.colours[0].tolist())) == COUNT


def test_scenes_are_the_same_each_time_and_differ() -> None:
    first, again, other = scene("test", 0, 7), scene("test", 0, 7), scene("test", 1, 7)
    assert all(torch.equal(a, b) for a, b in zip(vars(first).values(), vars(again).values(), strict=True))
    assert not torch.equal(first.places, other.places) and not torch.equal(first.places, scene("test", 0, 8).places)


def test_splits_share_neither_digit_nor_photograph() -> None:
    assert not set(PHOTOGRAPHS["train"]) & set(PHOTOGRAPHS["test"])
    assert not set(sources("train")) & set(sources("test"))
    assert len(sources("train")) + len(sources("test")) == len(digits()[1])
    for split in ("train", "test"):
        drawn = set(scenes(split, 0, range(8)).sources.flatten().tolist())
        assert drawn <= set(sources(split)) and len(drawn) > COUNT


# -- the reader --------------------------------------------------------------------------------------------------------


def all_tokens(image: torch.Tensor) -> lod.TokenSet:
    return lod.allocate.GridTopK(GRID**2, PATCH)(image, torch.ones(len(image), GRID, GRID))


def test_what_is_asked_decides_the_answer(few: Search) -> None:
    """Asked by colour it looks where the frame of that colour is, and what stands elsewhere has no say."""
    reader = Reader().requires_grad_(False)
    reader.metric *= 4  # as sharp as training makes it
    asked = search_training.both_kinds(few)
    tokens = all_tokens(few.image)
    assert tokens.patches is not None
    found = reader(tokens.patches, tokens.sites, asked)
    assert torch.equal(found.places[:, :COUNT], few.places)
    assert float((found.places[:, COUNT:] - few.places).norm(dim=-1).max()) * SIDE < 3
    assert float(torch.cdist(found.logits[0, :COUNT], found.logits[0, :COUNT])[0, 1:].min()) > 1e-3
    covered = few.image.clone()
    for picture, (x, y) in enumerate((few.places[:, 2] * SIDE).round().int().tolist()):
        covered[picture, :, y - DIGIT // 2 : y + DIGIT // 2, x - DIGIT // 2 : x + DIGIT // 2] = 0.9
    without = all_tokens(covered)
    assert without.patches is not None
    change = (reader(without.patches, without.sites, asked).logits - found.logits).abs().amax(-1)[:, :COUNT]
    assert float(change[:, 2].min()) > 1e-3 and float(change[:, [0, 1, 3, 4, 5]].max()) == 0


def test_tokens_of_all_levels_are_seen_in_one_frame() -> None:
    """Two slopes without detail look the same from one token of level 2 and from one of level 3, set aside."""
    reader = Reader().requires_grad_(False)
    reader.where.weight.zero_()
    x = torch.linspace(0, 1, SIDE)
    image = (0.7 * x + 0.3 * x[:, None]).square().expand(1, 3, -1, -1)
    place = torch.tensor([[[0.4, 0.6]]])
    asked = queries(place, torch.zeros(1, 1, dtype=torch.int64), "place")

    def seen(picture: torch.Tensor, x: float, y: float, level: float) -> torch.Tensor:
        sites = torch.tensor([[[x, y, level]]])
        return reader(lod.gather_patches(picture, sites, PATCH), sites, asked).logits

    fine, coarse = seen(image, 0.4, 0.6, 2.0), seen(image, 0.45, 0.63, 3.0)
    other = seen(image.flip(-1), 0.4, 0.6, 2.0)
    assert float((fine - coarse).abs().max()) < 0.01 * float((fine - other).abs().max())


def test_weights_fade_tokens_and_have_gradients(few: Search) -> None:
    reader, tokens = Reader(), all_tokens(few.image)
    asked = queries(few.places, few.colours, "place")[:, :1]
    assert tokens.patches is not None
    ones = torch.ones(2, tokens.budget, requires_grad=True)
    faded = reader(tokens.patches, tokens.sites, asked, ones).logits
    assert torch.equal(faded, reader(tokens.patches, tokens.sites, asked).logits)
    faded.sum().backward()
    assert ones.grad is not None
    away = (tokens.sites[..., :2] - few.places[:, :1]).abs().amax(-1) * SIDE
    assert (ones.grad[away > BOX + PATCH] == 0).all() and (ones.grad != 0).sum(1).min() >= 4


def test_a_little_training_helps(small_batches: None) -> None:
    training = Training(steps=40, groups=4, repeats=1, largest=64)
    batches = search_training.token_batches(training, 0)
    reader, losses = search_training.train(training, 0, batches)
    assert sum(losses[-10:]) < sum(losses[:10]) - 2
    again, same = search_training.train(Training(3, 4, 1, 64), 0, batches)
    once, too = search_training.train(Training(3, 4, 1, 64), 0, batches)
    assert same == too and all(torch.equal(a, b) for a, b in zip(again.parameters(), once.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in reader.parameters())


def test_readers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_training, "_batches", lambda training: [])
    monkeypatch.setattr(search_training, "train", lambda training, seed, batches: (Reader(seed=seed + 8), []))
    search_training.reader_for.cache_clear()
    kept = search_training.reader_for(Training(), 1, tmp_path)
    search_training.reader_for.cache_clear()
    monkeypatch.setattr(search_training, "train", None)
    again = search_training.reader_for(Training(), 1, tmp_path)
    search_training.reader_for.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), again.parameters(), strict=True))


# -- units -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [search.QUICK, search.full()], ids=["quick", "full"])
def test_units_are_distinct_and_oracles_are_never_alone(form: search.Form) -> None:
    found = list(search.units(form))
    keys = {json.dumps(unit.place, sort_keys=True) for unit in found}
    assert len(keys) == len(found) and form.seeds >= 3
    rows = {(u.seed, u.budget, u.allocator, u.relevance, u.fixation) for u in found}
    for seed, budget, name, relevance, fixation in rows:
        if fixation == "oracle":
            assert {(seed, budget, name, relevance, other) for other in ("centre", "saliency")} <= rows
    for seed in range(form.seeds):
        assert (seed, GRID**2, search.FULL, None, None) in rows
        for budget in form.budgets:
            for name in ("Random", "Downsample", "GridTopK"):
                assert any(row[:3] == (seed, budget, name) for row in rows)
    assert not {unit.allocator for unit in found} & set(search.left_out(form))


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader().eval().requires_grad_(False)
    monkeypatch.setattr(search, "reader_for", lambda training, seed, folder: reader)
    monkeypatch.setattr(search, "scorer_for", lambda scoring, seed, work, reader: search_scorer.new_scorer(seed + 1))


@pytest.mark.parametrize(
    ("unit", "bins"),
    [
        (search.Unit(0, 64, "GridTopK", "query", None), {"0.0-0.1"}),
        (search.Unit(0, 64, "LogPolar", "saliency", "oracle", 0.4), None),
        (search.Unit(0, 64, "LogPolar", "saliency", "centre"), None),
        (search.Unit(0, GRID**2, search.FULL, None, None), None),
        (search.Unit(0, 64, "FoveatedPyramid", "trained", "saliency"), None),
        (search.Unit(0, 64, "SparseVLM", None, None), None),
        (search.Unit(0, 64, "AdaptiveStratified, untrained", "saliency", None), None),
    ],
)
def test_a_unit_gives_the_same_each_time_and_counts_every_question(
    unit: search.Unit, bins: set[str] | None, untrained: None
) -> None:
    first, again = (search.run(unit, SMALL) for _ in range(2))
    assert first == again and 0 < first["coverage"] <= 1
    assert min(search.cost(unit, SMALL).values()) > 0
    asked = {name: count for name, (_, count) in first["by_eccentricity"].items() if count}
    assert sum(asked.values()) == SMALL.pictures * COUNT * len(KINDS) and len(first["pictures"]) == SMALL.pictures
    assert set(asked) == bins if bins else len(asked) > 1


def test_error_moves_what_is_looked_at() -> None:
    given: list[dict[str, Any]] = []

    def allocator(image: Any, relevance: torch.Tensor, **more: Any) -> None:
        given.append({"relevance": relevance, **more})

    test = prepared(0, 0, 2)
    where = test.search.places[:, 3]
    for relevance, fixation in (("query", None), ("saliency", "oracle")):
        for error in (0.0, 0.2):
            unit = search.Unit(0, 64, "LogPolar", relevance, fixation, error)
            make, looked = Way(unit, Reader(), allocator).tokens(0, 2, 3, "place")
            make()
            expected = (where + error * test.noise[:, 3]).clamp(0, 1)
            assert torch.equal(looked, expected)
            assert bool(((expected - where).norm(dim=-1) > 0.02).all()) == (error > 0)
            found = given[-1]["fixation"] if fixation else lod.allocate.find_fixations(given[-1]["relevance"])[:, 0]
            assert float((found - expected).norm(dim=-1).max()) < 1.5 / GRID


def test_metrics_by_hand() -> None:
    right = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]]])  # [pictures, digits, kinds]
    found = search._metrics(right, torch.tensor([[0.05, 0.25], [0.1, 2.0]])[..., None].expand(2, 2, 2))
    assert (found["accuracy"], found["place"], found["colour"], found["pictures"]) == (0.5, 0.75, 0.25, [0.75, 0.25])
    assert found["by_eccentricity"] == {
        "0.0-0.1": [1, 2], "0.1-0.2": [0, 2], "0.2-0.3": [2, 2], "0.3-0.45": [0, 0], "0.45-": [1, 2],
    }  # fmt: skip


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "QUICK", SMALL)


def plan(folder: Path, **more: Any) -> task.Plan:
    return task.Plan(True, folder, seeds=2, **more)


def test_the_task_has_the_units_of_the_search(small: None, tmp_path: Path) -> None:
    visual = search_run.task()
    found = visual.units(plan(tmp_path))
    assert [unit.own for unit in found] == list(search.units(SMALL))
    assert len({summary.place_key(unit.place) for unit in found}) == len(found)
    full = [unit for unit in found if unit.own.allocator == search.FULL]
    assert [(unit.place["method"], unit.place["budget"], unit.timed) for unit in full] == [
        ("full image", None, False)
    ] * 2
    assert all(unit.timed == (unit.own.seed == 0 and unit not in full) for unit in found)
    assert {unit.groups[0] for unit in found} == {"seed 0", "seed 1"}
    assert {unit.groups[1:] for unit in found} == {
        (),
        *((f"seed {n}, trained",) for n in (0, 1)),
    }
    few = visual.units(plan(tmp_path, budgets=(9,), only=("Random",)))
    assert [(unit.own.budget, unit.own.allocator) for unit in few] == [
        (GRID**2, search.FULL), (9, "Random"), (GRID**2, search.FULL), (9, "Random"),
    ]  # fmt: skip


def test_what_changed_is_computed_again(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def configs() -> dict[str, str]:
        units = [unit for unit in search_run.task().units(plan(tmp_path)) if unit.own.relevance != "trained"]
        return {unit.place["method"]: unit.place["config"] for unit in units}

    before = configs()
    assert configs() == before
    with monkeypatch.context() as patch:
        patch.setattr(search_run, "_code", lambda name: f"changed {name}" if name == "LogPolar" else "")
        changed = configs()
    assert changed["GridTopK"] == changed["Random"] != changed["LogPolar"]
    assert configs() == before
    for name in ("torch", "scikit-learn", "scikit-image"):
        with monkeypatch.context() as patch:
            patch.setattr(task, "version", lambda own, name=name: "another" if own == name else version(own))
            assert not set(configs().values()) & set(before.values()), name
    monkeypatch.setattr(search, "QUICK", search.Form((64,), 2, 3, SMALL.allocators))
    assert not set(configs().values()) & set(before.values())


@pytest.mark.parametrize(
    ("unit", "reads"),
    [
        (search.Unit(0, 64, "GridTopK", "trained", None), "_vlm"),
        (search.Unit(0, 64, "SoftVortex", "saliency", None), "_vlm"),
        (search.Unit(0, 64, "SoftVortex", "saliency", None), "_code"),
    ],
)
def test_weights_of_other_code_are_not_taken(
    unit: search.Unit, reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained is kept, and goes on, in a folder of its own: a checkpoint tells no code apart."""
    asked: list[Path] = []
    monkeypatch.setattr(search, "reader_for", lambda training, seed, folder: asked.append(folder))
    monkeypatch.setattr(search, "scorer_for", lambda scoring, seed, work, reader: asked.append(work))
    monkeypatch.setattr(search, "allocator_for", lambda learning, name, budget, seed, work, reader: asked.append(work))
    monkeypatch.setattr(search.Way, "times", lambda self, pictures: {})
    visual = search_run.task()
    visual.units(plan(tmp_path))

    def asked_for() -> tuple[list[Path], str]:
        asked.clear()
        place = visual._place(unit, "same")
        visual.time(search_run.Unit(unit, place))
        return list(asked), place["config"]

    (reader, weights), config = asked_for()
    assert asked_for() == ([reader, weights], config)
    monkeypatch.setattr(search_run, reads, lambda *name: "changed")
    (same, others), changed = asked_for()
    assert same == reader and others != weights and changed != config


def test_a_unit_becomes_values_by_picture(small: None, untrained: None, tmp_path: Path) -> None:
    visual = search_run.task()
    found = visual.units(plan(tmp_path))
    unit = next(unit for unit in found if unit.own.allocator == "GridTopK" and unit.own.seed == 1)
    own, line = search.run(unit.own, SMALL), visual.compute(unit)
    assert list(line["values"]["answers"].values()) == own["pictures"] and line["tokens"] == 64
    assert list(line["values"]["answers"]) == ["seed 1, picture 0", "seed 1, picture 1"]
    assert line["values"]["place"] == {"seed 1": own["place"]} and line["by_eccentricity"] == own["by_eccentricity"]
    assert visual.time(unit)["ms"] > 0
    beyond = next(unit for unit in visual.units(plan(tmp_path, budgets=(GRID**2 + 1,))) if unit.own.relevance)
    assert f"the budget is {GRID**2 + 1}, and there are {GRID**2} patches" in visual.compute(beyond)["skipped"]
    visual.units(plan(tmp_path))
    lines = [
        {"place": one.place, **visual.compute(one)} for one in found if one.own.allocator in ("GridTopK", "Random")
    ]
    rows = summary.summarise(visual, lines, {}, visual.about()["relevance"])["rows"]
    random = next(row for row in rows if row["method"] == "Random")
    saliency = next(row for row in rows if (row["method"], row["relevance"]) == ("GridTopK", "saliency"))
    assert random["values"]["answers"]["n"] == 4 and random["values"]["place"]["n"] == 2
    assert random["difference"]["answers"]["mean"] == pytest.approx(
        random["values"]["answers"]["mean"] - saliency["values"]["answers"]["mean"], abs=2e-5
    )
    assert sum(asked for _, asked in random["by_eccentricity"].values()) == 2 * SMALL.pictures * COUNT * len(KINDS)


def test_intervals_by_hand() -> None:
    low, high = search_run.interval([1.0, 2.0, 3.0, 4.0])
    half = 3.18245 * math.sqrt(5 / 3) / 2  # Student's t of 3 degrees
    assert abs(low - (2.5 - half)) < 1e-4 and abs(high - (2.5 + half)) < 1e-4
    assert search_run.interval([0.5]) == [0.5, 0.5]


# -- relevance that learns ---------------------------------------------------------------------------------------------


def test_pooled_maps_are_what_the_scorer_pools(few: Search) -> None:
    torch.manual_seed(0)
    whole = ContextualizedRelevance(width=16, patch=PATCH).requires_grad_(False)
    small = ContextualizedRelevance(width=16, patch=1).requires_grad_(False)
    small.load_state_dict(whole.state_dict())
    code = search_scorer.query_code(queries(few.places, few.colours, "colour")[:, 0])
    maps = feature_maps(few.image, semantic=search_scorer.semantic(few.image))
    pooled = search_scorer.pooled_maps(few.image)
    assert torch.allclose(whole(maps, code), small(pooled, code), atol=1e-5)


def test_queries_are_told_in_the_channels_of_the_picture(few: Search) -> None:
    maps = search_scorer.semantic(few.image)
    at = (few.places[:, 0] * SIDE).int()
    by_place = search_scorer.query_code(queries(few.places, few.colours, "place")[:, 0])
    by_colour = search_scorer.query_code(queries(few.places, few.colours, "colour")[:, 0])
    for picture, (x, y) in enumerate(at.tolist()):
        assert torch.allclose(maps[picture, :10, y, x], by_place[picture, :10], atol=0.02)
        corner = maps[picture, 10:, y - BOX // 2 + FRAME // 2, x - BOX // 2 + FRAME // 2]
        assert corner.argmax() == by_colour[picture, 10:].argmax() and float(corner.max()) > 0.999
    assert (by_place[:, 10:] == 0).all() and (by_colour[:, :10] == 0).all() and (by_colour.sum(1) == 1).all()


def test_a_killed_training_goes_on_and_gives_the_same(
    small_batches: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = search_scorer.Scoring(steps=6, groups=1, budget=64, every=2)
    reader = Reader().eval().requires_grad_(False)
    whole, losses = search_scorer.trained(scoring, 0, tmp_path / "whole", reader)
    start = search_scorer.new_scorer(0)
    assert len(losses) == 6 and not torch.equal(start.weigh.weight, whole.weigh.weight)
    real, calls = search_scorer.loss_of, []

    def killed(*arguments: Any) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 6:
            raise Stopped
        return real(*arguments)

    monkeypatch.setattr(search_scorer, "loss_of", killed)
    with pytest.raises(Stopped):
        search_scorer.trained(scoring, 0, tmp_path / "part", reader)
    torch.rand(9)
    calls.append(0)
    resumed, same = search_scorer.trained(scoring, 0, tmp_path / "part", reader)
    assert same == losses and torch.equal(resumed.weigh.weight, whole.weigh.weight)
    assert len(calls) == 7 + 2  # those after the last checkpoint again, and no others
