"""Allocators: exactly K, no site twice, inside the image, the same each time, whatever the relevance."""

from __future__ import annotations

import heapq
import importlib
import io
import json
import math
import pickle
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from images import noise
from relevance import KINDS, maps
from scripts import succeed
from test_gpu_allocate import CASES as CASES_BESIDE
from test_gpu_allocate import agree, choices, needed
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_lod as lod
from gpu_lod.allocate import base, node_losses, ordering, tree_cut
from gpu_lod.allocate.heat_diffusion import steady_state
from gpu_lod.allocate.pyramid_top_k import _shares
from gpu_lod.allocate.scale import HIGHEST, Summable
from gpu_lod.allocate.scene import Scene, cells_of
from gpu_lod.allocate.stratified import shared_out
from gpu_lod.allocate.voronoi import owners
from gpu_lod.errors import InputError
from gpu_lod.patch_grid import pooled

CHECKOUT = Path(__file__).resolve().parents[1]
NAMES = lod.allocate.names()
ANY_BUDGET = [
    "Downsample", "Hexagonal", "LogPolar", "PseudoLogPolar", "Residual", "SoftVortex", "Spiral", "Whirlwind",
]  # fmt: skip
"""Their sites are no nodes of a grid: there are as many as are asked for."""
MONOTONE = [
    "AdaptiveStratified", "GridTopK", "HeatDiffusion", "PyramidTopK", "Residual", "Stratified", "VortexLearned",
]  # fmt: skip
"""Raising a cell's relevance never loses its token."""
COVERS = ["Downsample", "FoveatedPyramid", "Residual", "TokenDAG"]
"""Every pixel is in a token."""


def chosen(
    name: str,
    budget: int,
    relevance: torch.Tensor,
    seed: int = 0,
    ragged: tuple[int, int] = (0, 0),
    order: torch.Tensor | None = None,
    **how: Any,
) -> lod.TokenSet:
    """Tokens of an allocator with whatever it needs beside relevance: a picture of noise, a query, ...

    Args:
        ragged: rows and columns of pixels, 0 to 3, that the last cells of the picture lack.
        order: that the images of the batch are put in.
    """
    allocator = lod.allocate.make(name, budget, 4, **how)
    batch, rows, columns = relevance.shape
    generator = torch.Generator().manual_seed(seed)
    given = {
        "image": lambda: torch.rand(batch, 3, rows * 4 - ragged[0], columns * 4 - ragged[1], generator=generator),
        "query": lambda: torch.randn(batch, allocator.query_width or 8, generator=generator),  # of its own each
        "fixation": lambda: (0.3, 0.6),
        "labels": lambda: torch.arange(columns).expand(batch, rows, columns) // 3,
    }
    arguments = {need: given[need]() for need in allocator.needs if need != "relevance"}
    arguments["relevance"] = relevance
    if order is not None:
        arguments = {need: value if need == "fixation" else value[order] for need, value in arguments.items()}
    with torch.no_grad():
        return allocator(**arguments)


MOST = 1024
"""Of the budgets that are tried."""
CASES = 14
"""For each allocator and kind of relevance."""


class Case(NamedTuple):
    batch: int
    rows: int
    columns: int
    ragged: tuple[int, int]
    budget: int
    there: int
    """Sites; more than any budget, where there are as many as are asked for."""


def sites_there(name: str, rows: int, columns: int) -> int:
    if name in ANY_BUDGET:
        return 2**20
    # A wavelet's levels end where one node covers the picture.
    levels = {"PyramidTopK": 4, "Wavelet": min(4, 1 + (max(rows, columns) - 1).bit_length())}.get(name, 1)
    return sum(-(-rows // 2**level) * -(-columns // 2**level) for level in range(levels))


def cases(name: str, kind: str) -> list[Case]:
    """Grids of up to 40 x 40, some of a single row or column, and of the sites that there are one, all, or a part."""
    draw = random.Random(f"{name} {kind}")
    found = []
    for index in range(CASES):
        rows, columns = (draw.choice((1, *(draw.randint(low, 40) for low in (1, 1, 1, 32)))) for _ in range(2))
        there = sites_there(name, rows, columns)
        most = min(there, MOST)
        budget = (most, draw.randint(1, most), draw.randint(-(-most // 2), most))[index % 3] if index else 1
        found.append(Case(draw.randint(1, 3), rows, columns, (draw.randint(0, 3), draw.randint(0, 3)), budget, there))
    return found


def test_cases_reach_from_one_site_to_all_there_are() -> None:
    for name in NAMES:
        every = [case for kind in KINDS for case in cases(name, kind)]
        assert len(set(every)) > 0.9 * len(every), "no case twice"
        assert {case.batch for case in every} == {1, 2, 3} and len({case.ragged for case in every}) == 16
        assert any(case.rows == 1 < case.columns for case in every) and any(case.rows > 35 for case in every)
        budgets = [case.budget for case in every]
        assert min(budgets) == 1 and max(budgets) == MOST and sum(budget > 503 for budget in budgets) > 15
        for kind in KINDS:
            assert len({case.budget for case in cases(name, kind)}) > CASES / 2
        if name not in ANY_BUDGET:
            assert sum(1 < case.budget == case.there for case in every) > 10
            assert sum(1 < case.budget < case.there for case in every) > len(every) / 2


def check_sites(name: str, case: Case, relevance: torch.Tensor) -> None:
    """Exactly K for each image, none twice, inside it, in order, and the same ones again."""
    batch, budget = case.batch, case.budget
    tokens = chosen(name, budget, relevance, ragged=case.ragged)
    assert tokens.sites.shape == (batch, budget, 3) and tokens.scores.shape == (batch, budget), case
    if not lod.allocate.make(name, 1).blends:
        for sites in tokens.sites:
            assert len({*map(tuple, sites.tolist())}) == budget, ("a site twice", case)
    assert torch.isfinite(tokens.sites).all(), case
    assert float(tokens.sites[..., :2].min()) >= 0 and float(tokens.sites[..., :2].max()) <= 1, case
    assert float(tokens.sites[..., 2].min()) >= 0, case
    assert (tokens.scores[:, 1:] <= tokens.scores[:, :-1]).all(), ("by relevance, high first", case)
    again = chosen(name, budget, relevance, ragged=case.ragged)
    assert torch.equal(again.sites, tokens.sites) and torch.equal(again.scores, tokens.scores), case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("one_thread")
def test_exactly_k_sites(name: str, kind: str) -> None:
    for case in cases(name, kind):
        check_sites(name, case, maps(kind, case.batch, case.rows, case.columns))


@given(st.data())
@settings(max_examples=300)
def test_exactly_k_sites_of_what_is_searched_for(data: st.DataObject) -> None:
    """Cases that hypothesis looks for, and makes small if one fails; relevance of few values, and of any. Permuting
    the batch permutes the result."""
    name, batch = data.draw(st.sampled_from(NAMES)), data.draw(st.integers(1, 3))
    rows, columns = (data.draw(st.integers(1, most)) for most in (40, 40))
    there = sites_there(name, rows, columns)
    budget = data.draw(st.integers(1, min(there, MOST)))
    value = data.draw(st.sampled_from([st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf]), st.floats(width=32)]))
    palette = data.draw(st.lists(value.filter(lambda x: not math.isnan(x)), min_size=1, max_size=5))
    picks = torch.randint(len(palette), (batch, rows, columns), generator=torch.Generator().manual_seed(budget))
    ragged = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    relevance = torch.tensor(palette, dtype=torch.float32)[picks]
    check_sites(name, Case(batch, rows, columns, ragged, budget, there), relevance)
    order = torch.tensor(data.draw(st.permutations(range(batch))))
    tokens = chosen(name, budget, relevance, ragged=ragged)
    permuted = chosen(name, budget, relevance, ragged=ragged, order=order)
    same(permuted, tokens.sites[order], tokens.scores[order], lod.allocate.make(name, 1).blends)


@pytest.mark.parametrize("name", NAMES)
def test_relevance_lies_in_memory_as_it_will(name: str) -> None:
    relevance = torch.rand(2, 16, 23)
    expected = chosen(name, 60, relevance)
    same(chosen(name, 60, relevance.mT.contiguous().mT), expected.sites, expected.scores, rounded=False)


@pytest.mark.parametrize("name", NAMES)
def test_each_image_for_itself(name: str) -> None:
    """Permuting the batch permutes the result."""
    relevance = torch.cat([maps(kind, 1, 17, 23) for kind in KINDS])
    order = torch.randperm(len(relevance))
    allocator = lod.allocate.make(name, 99, 4)
    image = torch.rand(len(relevance), 3, 67, 91)
    query = torch.randn(len(relevance), allocator.query_width or 8)

    def choose(which: Any) -> lod.TokenSet:
        more = {"query": query[which]} if "query" in allocator.needs else {}
        with torch.no_grad():
            return allocator(image[which], relevance[which], **more)

    tokens, permuted, alone = choose(slice(None)), choose(order), choose(2)
    same(permuted, tokens.sites[order], tokens.scores[order], allocator.blends)
    same(alone, tokens.sites[2], tokens.scores[2], allocator.blends)


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_batch_are_the_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU looks at a part at a time: pictures, and bands of their rows."""
    allocator = lod.allocate.make(name, 60, 4)
    image, relevance = torch.rand(3, 3, 67, 96), torch.rand(3, 17, 24)
    more = {"query": torch.rand(3, allocator.query_width or 8)} if "query" in allocator.needs + allocator.takes else {}

    def choose() -> lod.TokenSet:
        with torch.no_grad():
            return allocator(image, relevance, **more)

    whole = choose()
    monkeypatch.setattr(base, "AT_ONCE", 1)
    monkeypatch.setattr(node_losses, "AT_ONCE", 16 * 96)
    parts = choose()
    # A band without an edge is summed in another way than a picture with one: TokenDAG's levels differ by rounding.
    same(parts, whole.sites, whole.scores, allocator.blends or name == "TokenDAG")
    assert whole.patches is not None and parts.patches is not None
    assert torch.allclose(parts.patches, whole.patches, atol=1e-5)


class _Counted(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_more_for_more_pictures_or_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the pictures, and 64 times the nodes, take no more of torch's operations but for a level or a label.

    The parts that a CPU works in, and those that patches are read in, are set aside: what is left loops over no
    pictures, patches or nodes. Operations are all that is counted: labels are given, for superpixels are made
    on the host, picture after picture.
    """
    monkeypatch.setattr(base, "AT_ONCE", 2**40)
    monkeypatch.setattr(node_losses, "AT_ONCE", 2**40)
    for module, name_ in (("mipmap", "AT_ONCE"), ("gather_patches", "_AT_ONCE"), ("planewise", "PART")):
        monkeypatch.setattr(importlib.import_module(f"gpu_lod.{module}"), name_, 2**40)
    monkeypatch.setattr(importlib.import_module("gpu_lod.quadrature"), "_BAND", (2**40, 2**40))
    # Of many numbers the highest are found by other operations than of few.
    monkeypatch.setattr(ordering, "_MANY", 2**40)

    def operations(batch: int, side: int) -> int:
        allocator = lod.allocate.make(name, 40, 4)
        image, relevance = torch.rand(batch, 3, 4 * side, 4 * side), torch.rand(batch, side, side)
        more = {"query": torch.rand(batch, allocator.query_width or 8)} if "query" in allocator.needs else {}
        if "labels" in allocator.takes:
            more["labels"] = torch.arange(side).expand(batch, side, side) * 5 // side
        with torch.no_grad():
            for _ in range(2):  # tables are kept of what is asked for again
                allocator(image, relevance, **more)
            with _Counted() as counted:
                allocator(image, relevance, **more)
        return counted.operations

    few = operations(2, 16)
    assert operations(6, 16) < 1.1 * few
    assert operations(6, 128) < 1.35 * few  # 1.5 times 2^20 pixels


def same(tokens: lod.TokenSet, sites: torch.Tensor, scores: torch.Tensor, rounded: bool) -> None:
    """To the last bit, unless rounding has a say."""
    if rounded:
        assert torch.allclose(tokens.sites, sites, atol=1e-5) and torch.allclose(tokens.scores, scores, atol=1e-5)
    else:
        assert torch.equal(tokens.sites, sites) and torch.equal(tokens.scores, scores)


def test_the_table_of_the_documentation_says_what_they_are() -> None:
    """Lists that the tests go by, attributes of the classes, and docs/allocators.md: one changed alone is found out."""
    page = (CHECKOUT / "docs" / "allocators.md").read_text("utf-8").split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    table = {name: (looks, traits) for name, _, looks, traits in rows if name in NAMES}
    assert sorted(table) == NAMES and len(rows) == 2 + len(NAMES), "each has one row"
    words = {"image": "picture"}
    for name, (looks, traits) in table.items():
        allocator = lod.allocate.make(name, 1)
        assert allocator.monotone == (name in MONOTONE)
        own = {
            "learned": isinstance(allocator, lod.allocate.Learned), "blends": allocator.blends,
            "monotone": allocator.monotone, "covers": name in COVERS, "any K": name in ANY_BUDGET,
        }  # fmt: skip
        assert set(filter(None, traits.split(", "))) == {trait for trait, has in own.items() if has}, name
        wanted = {words.get(need, need) for need in allocator.needs + allocator.takes if need != "relevance"}
        assert set(filter(None, looks.removesuffix(", or superpixels").split(", "))) == wanted, name


@pytest.mark.parametrize("name", MONOTONE)
@given(st.data())
def test_more_relevance_never_loses_a_token(name: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    rows, columns = (data.draw(st.integers(1, 13)) for _ in "yx")
    relevance = maps(data.draw(st.sampled_from(KINDS)), 1, rows, columns)
    allocator = lod.allocate.make(name, data.draw(st.integers(1, min(sites_there(name, rows, columns), 100))), 4)
    fixation = (0.4, 0.6) if "fixation" in allocator.takes else None
    query = torch.ones(allocator.query_width or 8) if "query" in allocator.needs else None
    image = torch.rand(1, 3, 4 * rows, 4 * columns) if "image" in allocator.needs else None

    def cells(values: torch.Tensor) -> list[int]:
        """That have a token of their own."""
        with torch.no_grad():
            sites = allocator(image, values, fixation=fixation, query=query).sites[0]
        x, y = (sites[sites[:, 2] == 0, :2] * torch.tensor([columns, rows])).floor().long().unbind(1)
        return (y * columns + x).tolist()

    before = cells(relevance)
    if before:
        cell = data.draw(st.sampled_from(before))
        value, by = float(relevance.view(-1)[cell]), data.draw(st.sampled_from([0.01, 0.5, 9.0, 1e30, math.inf]))
        relevance.view(-1)[cell] = by if value == -math.inf else value + by
        assert cell in cells(relevance)


@pytest.mark.parametrize("name", NAMES)
def test_minus_infinity_is_the_least_and_moves_nothing_else(name: str) -> None:
    relevance = torch.rand(2, 16, 16) * 0.1
    relevance[:, 4:8, 9:13] = 5
    relevance[:, 0, 0] = 0
    masked = relevance.clone()
    masked[:, 0, 0] = -math.inf
    tokens, other = chosen(name, 64, relevance), chosen(name, 64, masked)
    apart = torch.cdist(tokens.sites, other.sites).amin(2)
    assert int((apart < 0.01).sum(1).min()) >= 63


def test_convention_coarse_patches_of_bytes_are_half_a_step_off_at_most(photo: torch.Tensor) -> None:
    torch.manual_seed(0)
    sites = torch.cat([torch.rand(4, 100, 2), torch.arange(4.0)[:, None, None].expand(4, 100, 1)], -1)
    exact, rounded = (
        torch.stack([lod.gather_patches(src, level, dtype=torch.float32) for level in sites])
        for src in (photo.float() / 255, photo)
    )
    steps = ((exact - rounded).abs() * 255).amax((1, 2, 3, 4))
    assert steps[0] < 1e-4 and steps.max() < 0.5 + 1e-4
    assert steps[1:].min() > 0.4, "and that far they are"


@pytest.mark.parametrize("given", [True, False], ids=["relevance", "saliency"])
@pytest.mark.parametrize("size", [(150, 203), (448, 448)])
@pytest.mark.parametrize("name", NAMES)
def test_sites_of_a_picture_are_the_same_in_any_batch(
    name: str, size: tuple[int, int], given: bool, photo: torch.Tensor
) -> None:
    """Of photographs, by what is given and by what they show."""
    whole = F.interpolate(photo[None].float() / 255, size, mode="bilinear", antialias=True)
    pictures = torch.cat([whole, whole.flip(-1), 1 - whole.flip(-2)])
    relevance = pooled(pictures.std(1), 14)
    allocator = lod.allocate.make(name, 100)
    query = torch.randn(3, allocator.query_width or 8) if "query" in allocator.needs else None

    def sites(index: list[int]) -> torch.Tensor:
        amounts = relevance[index] if given else None
        return allocator(pictures[index], amounts, None if query is None else query[index]).sites

    with torch.no_grad():
        together = sites([0, 1, 2])
        for index in ([0], [1], [1, 2], [2, 0, 1]):
            assert torch.equal(sites(index), together[index])


def named(begin: str, end: str) -> set[str]:
    """The allocators that docs/allocators.md names between two phrases."""
    text = " ".join((CHECKOUT / "docs" / "allocators.md").read_text().split())
    return set(re.findall(r"\w+", text[text.index(begin) : text.index(end)])) & set(NAMES)


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    """Relevance [2, 24, 24], more of it to the right: its sums with small whole numbers are exact, 0 is its least."""
    relevance = torch.randint(0, 1024, (2, 24, 24), generator=torch.Generator().manual_seed(0))
    return relevance * torch.arange(24) ** 2 / 2**20


def test_a_loss_of_patches_reaches_those_that_the_page_says() -> None:
    """In parameters and in relevance; scores reach the relevance always, and all parameters but a head's counts."""
    learn, follow = set(), set()
    image, relevance = noise(2, 3, 112, 112), torch.rand(2, 8, 8, requires_grad=True)
    for name in NAMES:
        allocator = lod.allocate.make(name, 20)
        query = torch.randn(2, allocator.query_width or 8) if "query" in allocator.needs else None
        tokens = allocator(image, relevance, query)
        own = [*allocator.parameters()] if isinstance(allocator, lod.allocate.Learned) else []

        def reached(values: torch.Tensor, inputs: list[torch.Tensor]) -> bool:
            if not (inputs and values.requires_grad):
                return False
            found = torch.autograd.grad(values.square().sum(), inputs, retain_graph=True, allow_unused=True)
            return any(part is not None and bool(part.any()) for part in found)

        learn |= {name} if reached(tokens.patches, own) else set()
        follow |= {name} if reached(tokens.patches, [relevance]) else set()
        assert reached(tokens.scores, [relevance]), name
        assert reached(tokens.scores, own) == (bool(own) and name != "AdaptiveStratified"), name
    assert learn == named("A hard choice passes no gradient", "The other three learn otherwise")
    assert follow == named("In the relevance all scores have gradients", "SoftVortex' patches are fp32")


def test_an_offset_moves_the_sites_of_those_that_the_page_says(exact: torch.Tensor) -> None:
    def as_sets(sites: torch.Tensor) -> list[list[list[float]]]:
        return [sorted(each) for each in sites.tolist()]

    still, reordered = set(), set()
    for name in NAMES:
        sites, moved, lower, lowest = (chosen(name, 60, exact + by).sites for by in (0, 1, -0.5, -3))
        assert torch.equal(lower, sites) and torch.equal(lowest, sites), f"{name} does not count from the least"
        if torch.equal(sites, moved):
            still.add(name)
        elif as_sets(sites) == as_sets(moved):
            reordered.add(name)
    assert still == named("An offset moves no site", "LogPolar and PseudoLogPolar give the same")
    assert reordered == named("LogPolar and PseudoLogPolar give the same", "Maps that have negative values")


def test_minus_infinity_is_no_mask_for_those_that_the_page_says(exact: torch.Tensor) -> None:
    there = exact[:1].clone()
    there[:, :, :12] = -math.inf
    tokens = {name: chosen(name, 60, there) for name in NAMES}
    smooth = torch.linspace(0, 1, 96).expand(1, 3, 96, 96)
    tokens["Wavelet"] = lod.allocate.make("Wavelet", 60, 4)(smooth, there)  # noise is nothing but fine levels
    beyond = {name for name, found in tokens.items() if (found.sites[..., 0] < 0.5).any()}
    assert beyond == named("It is no mask", "HybridAtlas and Wavelet") | {"HybridAtlas", "Wavelet"}
    for name in {*NAMES} - beyond:
        many = chosen(name, 500, there)  # more than there are to the right, of all levels
        assert (many.sites[..., 0] < 0.5).any(), name
    hot = torch.ones(1, 24, 24)
    hot[:, 3:6, 3:6] = 100
    hot[:, 4, 4] = -math.inf
    for name, among in (("HeatDiffusion", True), ("GridTopK", False)):
        places = (chosen(name, 9, hot).sites[0, :, :2] * 24 - 0.5).round()
        assert (places == 4).all(1).any() == among


def test_both_infinities_in_one_patch_are_no_nan() -> None:
    relevance = torch.rand(1, 56, 56)
    relevance[0, 3, 4], relevance[0, 5, 6], relevance[0, 20, 20] = math.inf, -math.inf, -math.inf
    tokens = lod.allocate.GridTopK(9)(torch.rand(1, 3, 56, 56), relevance)
    assert tokens.scores[0, 0] == math.inf and not tokens.scores.isnan().any()
    assert tokens.sites[0, 0].tolist() == [0.125, 0.125, 0]


@pytest.mark.parametrize("exponent", [100, 126, -100, -126])
@pytest.mark.parametrize("name", NAMES)
def test_relevance_is_in_any_units(name: str, exponent: int) -> None:
    relevance = torch.rand(2, 9, 11)
    relevance[:, 3:5, 4:7] += 3
    usual, other = chosen(name, 30, relevance), chosen(name, 30, relevance * 2.0**exponent / 4)
    apart = torch.cdist(usual.sites, other.sites).amin(2)
    assert int((apart < 1e-3).sum(1).min()) >= 29
    assert not other.scores.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_numbers_there_are(name: str) -> None:
    relevance = torch.zeros(1, 4, 4)
    relevance[0, 0, 0] = 1e-45
    assert torch.isfinite(chosen(name, 5, relevance).sites).all()


def test_pixels_of_huge_relevance_are_averaged() -> None:
    relevance = torch.full((1, 28, 28), 3e38)
    relevance[:, :14] = -3e38
    scores = lod.allocate.GridTopK(4)(torch.rand(1, 3, 28, 28), relevance).scores
    assert torch.allclose(scores / 3e38, torch.tensor([[1.0, 1, -1, -1]]))


def test_pictures_without_saliency_are_refused() -> None:
    image = torch.rand(1, 3, 56, 56)
    image[0, 0, 3, 3] = math.nan
    for bad in (image, image.nan_to_num(math.inf), torch.rand(1, 3, 56, 56) * 3e38):
        with pytest.raises(InputError, match="saliency of the image is not finite"):
            lod.allocate.GridTopK(3)(bad)


@pytest.mark.parametrize("name", NAMES)
def test_relevance_gets_finite_gradients(name: str) -> None:
    relevance = torch.rand(1, 4, 4, requires_grad=True)
    allocator = lod.allocate.make(name, 5, 4)
    more = {"image": torch.rand(1, 3, 16, 16)} if "image" in allocator.needs else {}
    more |= {"query": torch.ones(allocator.query_width or 8)} if "query" in allocator.needs else {}
    tokens = allocator(relevance=relevance, **more)
    total = tokens.scores.sum() + tokens.sites.sum()
    if total.requires_grad:
        total.backward()
    assert relevance.grad is None or torch.isfinite(relevance.grad).all()


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x[0]], layout=torch.jagged),
    ],
)
def test_only_tensors_with_data(kind: Any) -> None:
    strange = kind(torch.ones(1, 4, 4))
    for call in (
        lambda: lod.allocate.GridTopK(3)(relevance=strange),
        lambda: lod.allocate.Downsample(3)(relevance=strange),
        lambda: lod.allocate.HybridAtlas(3)(relevance=torch.ones(1, 4, 4), labels=strange),
        lambda: lod.allocate.find_fixations(strange),
    ):
        with pytest.raises(InputError, match="expected an ordinary dense tensor"):
            call()


def test_no_more_peaks_than_cells() -> None:
    for name in ("Voronoi", "Spiral", "Whirlwind"):
        assert chosen(name, 7, torch.rand(1, 4, 4), peaks=1024).budget == 7


@pytest.mark.parametrize(
    "arguments",
    [{"inhibition": math.nan}, {"inhibition": -5}, {"inhibition": "x"}, {"radius": -1}, {"count": 0}, {"count": 2**31}],
)
def test_fixations_refuse(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(arguments))):
        lod.allocate.find_fixations(torch.rand(1, 4, 4), **arguments)
    with pytest.raises(InputError, match="NaN"):
        lod.allocate.find_fixations(torch.full((1, 4, 4), math.nan))


def test_level_weights_do_not_turn_round_where_relevance_is_negative() -> None:
    relevance = torch.rand(1, 37, 37)
    shifted = relevance - 20
    levels = [lod.allocate.PyramidTopK(273)(relevance=values).sites[0, :, 2] for values in (relevance, shifted)]
    assert int((levels[1] == 0).sum()) > 250 and int((levels[0] == 0).sum()) > 250
    with pytest.raises(InputError, match="sums to 64; the budget is 63"):
        allocator = lod.allocate.PyramidTopK(64, split=(0, 0, 32, 32))
        allocator.budget = 63
        allocator(relevance=relevance)
    assert not lod.allocate.PyramidTopK(9, weights=(1.0, 2.0)).monotone


def patches_of(relevance: torch.Tensor, weights: tuple[float, ...]) -> list[tuple[float, int, int]]:
    """(score, level, place) of every patch of the levels, each mean taken by itself."""
    found = []
    for level, weight in enumerate(weights):
        rows, columns = (-(-n // 2**level) for n in relevance.shape)
        for y in range(rows):
            for x in range(columns):
                cells = relevance[y << level : y + 1 << level, x << level : x + 1 << level].double()
                found.append((float(cells.mean()) * weight, level, y * columns + x))
    return found


def test_the_best_patches_of_all_levels() -> None:
    relevance, weights = torch.rand(1, 21, 18) ** 3, (1.0, 0.9, 0.8, 0.7)
    tokens = lod.allocate.PyramidTopK(60, 4, weights=weights)(relevance=relevance)
    best = sorted(patches_of(relevance[0], weights), reverse=True)[:60]
    assert torch.allclose(tokens.scores[0].double(), torch.tensor([score for score, *_ in best]).double(), rtol=1e-5)
    assert sorted(tokens.sites[0, :, 2].int().tolist()) == sorted(level for _, level, _ in best)


@pytest.mark.parametrize(
    ("side", "expected"),
    [(64, [17, 64, 128, 64]), (37, [17, 131, 100, 25]), (20, [139, 100, 25, 9])],
    ids=["as asked", "25 of 64 coarsest", "fewer of all"],
)
def test_a_fixed_split_of_levels(side: int, expected: list[int]) -> None:
    """What a level lacks goes to the next finer one; and of each level the best patches are taken."""
    relevance = torch.rand(1, side, side)
    tokens = lod.allocate.PyramidTopK(273, 4, split=(64, 128, 64, 17))(relevance=relevance)
    found = tokens.sites[0, :, 2].int().tolist()
    assert [found.count(level) for level in range(4)] == expected
    for level, count in enumerate(expected):
        scores = sorted(
            (score for score, at, _ in patches_of(relevance[0], (1.0, 0.9, 0.8, 0.7)) if at == level), reverse=True
        )
        taken = tokens.scores[0][tokens.sites[0, :, 2] == level].double()
        assert torch.allclose(taken, torch.tensor(scores[:count]).double(), rtol=1e-5)


def test_what_a_level_lacks_goes_to_the_finer_ones_first() -> None:
    """The third lacks 9, and the second takes them; what no finer one takes, the coarser ones do."""
    assert _shares([10, 20, 10, 0], [64, 40, 1, 1]) == [10, 29, 1, 0]
    assert _shares([10, 20, 1, 0], [64, 16, 4, 1]) == [14, 16, 1, 0]
    assert _shares([60, 20, 1, 0], [62, 16, 4, 1]) == [62, 16, 3, 0]


def test_detail_and_magnification_are_what_a_foveated_cut_goes_by() -> None:
    """Which nodes there are, and their scores, by a priority queue and the law as it is written."""
    relevance, fixation, e0 = torch.rand(1, 16, 32), (0.3, 0.6), 0.1

    def magnification(level: int, y: int, x: int) -> float:
        """At the node's nearest point to the fixation, in units of the longer side, 32 cells."""
        step = 2**level
        dx = max(0.0, x * step - 32 * fixation[0], 32 * fixation[0] - (x + 1) * step)
        dy = max(0.0, y * step - 16 * fixation[1], 16 * fixation[1] - min((y + 1) * step, 16))
        return e0 / (math.hypot(dx, dy) / 32 + e0)

    def within(level: int, y: int, x: int) -> torch.Tensor:
        return relevance[0, y << level : (y + 1) << level, x << level : (x + 1) << level]

    benefits = [
        torch.tensor(
            [
                [float(within(level, y, x).sum()) * magnification(level, y, x) for x in range(32 >> level)]
                for y in range(max(16 >> level, 1))
            ]
        )
        for level in range(1, 6)
    ]
    expected = refined(benefits, (16, 32), 40)
    tokens = lod.allocate.FoveatedPyramid(40, 4, e0=e0)(relevance=relevance, fixation=fixation)
    found = [(int(level), int(y * 16) >> int(level), int(x * 32) >> int(level)) for x, y, level in tokens.sites[0]]
    assert {*found} >= expected and all(level == 0 for level, *_ in {*found} - expected)  # and detail cells
    scores = [float(within(*node).mean()) * magnification(*node) for node in found]
    assert torch.allclose(tokens.scores[0], torch.tensor(scores), rtol=1e-5)


def test_defaults_are_what_is_documented() -> None:
    assert lod.allocate.FoveatedPyramid().e0 == 0.05
    assert lod.allocate.HeatDiffusion().length == 2


def test_an_infinity_is_16_times_the_largest_number_that_there_can_be() -> None:
    amounts = Summable(torch.tensor([[[1.0, math.inf], [0.0, 2.0]]])).amounts
    assert amounts.flatten().tolist() == [1.0, 2.0 ** (HIGHEST + 4), 0.0, 2.0]


def test_a_fixation_that_is_not_given_is_the_peak_of_relevance() -> None:
    relevance = torch.rand(2, 16, 16) + 5 * torch.eye(16).roll(4, 1)
    peaks = lod.allocate.find_fixations(relevance)[:, 0]
    found, expected = (lod.allocate.FoveatedPyramid(40, 4)(relevance=relevance, fixation=f) for f in (None, peaks))
    assert torch.equal(found.sites, expected.sites) and torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("size", [(64, 64), (90, 61), (7, 200), (131, 40)], ids=str)
@pytest.mark.parametrize("name", COVERS)
def test_what_covers_leaves_no_pixel_out(name: str, size: tuple[int, int]) -> None:
    """At sizes that are no multiples of the patch, where tokens at the far edges reach over them."""
    image = noise(2, 3, *size)
    for budget in (9, 20):
        tokens = lod.allocate.make(name, budget, 7)(image)
        assert bool(lod.rebuild(tokens, size).covered.all())


@pytest.mark.parametrize("budget", [1, 7, 150, 273])
def test_downsample_covers_the_picture_in_rows_alike(budget: int) -> None:
    tokens = lod.allocate.Downsample(budget, 4)(image=torch.rand(1, 3, 80, 121))
    rows = tokens.sites[0, :, 1].unique(return_counts=True)[1]
    assert int(rows.sum()) == budget and int(rows.max() - rows.min()) <= 1
    columns = 121 / rows.double().mean()
    assert 0.5 < float(columns) / (80 / len(rows)) < 2 or budget == 1  # near square
    assert float(lod.rebuild(tokens, (80, 121)).coverage) == 1


@pytest.mark.parametrize("name", ["Downsample", "Hexagonal"])
@pytest.mark.parametrize("size", [(84, 126), (79, 123)], ids=str)
def test_what_tiles_evenly_is_ordered_by_the_relevance_at_its_sites(name: str, size: tuple[int, int]) -> None:
    """Without relevance all alike, so row by row; with it the same sites, by the cells of the grid that they are in."""
    image, relevance = torch.rand(2, 3, *size), torch.randint(9, (2, 6, 9)).float()
    relevance[0, 0, 0], relevance[1, 5, 8] = math.inf, -math.inf
    allocator = lod.allocate.make(name, 54)
    plain, tokens = allocator(image), allocator(image, relevance)
    assert (plain.scores == 1).all() and torch.equal(allocator(image, torch.full_like(relevance, 4)).sites, plain.sites)
    rows = plain.sites[0, :, :2].flip(-1).tolist()
    assert rows == sorted(rows) and torch.equal(plain.sites[0], plain.sites[1])
    for b in range(2):
        held = [
            float(relevance[b, int(y * size[0] / 14), int(x * size[1] / 14)]) for x, y, _ in plain.sites[b].tolist()
        ]
        order = sorted(range(54), key=lambda index: -held[index])  # Python's is stable too
        assert tokens.sites[b].tolist() == plain.sites[b, order].tolist()
        assert tokens.scores[b].tolist() == [held[index] for index in order]
    assert tokens.patches is not None
    assert torch.equal(tokens.patches, lod.gather_patches(image, tokens.sites, 14))


@pytest.mark.parametrize("count", [1, 7, 256, 300, 2048])
def test_the_highest_are_those_of_a_stable_sort(count: int) -> None:
    """By whichever way: of many ties, zeros of both signs, infinities, the smallest and the largest numbers."""
    info = torch.finfo(torch.float32)
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, info.max, info.min, info.tiny, -info.tiny, 1.0, -1.0, 0.5])
    generator = torch.Generator().manual_seed(count)
    for scores in (
        odd[torch.randint(len(odd), (3, 2048), generator=generator)],
        torch.randn(2, 3, 2048, generator=generator),
        -odd[2:].abs()[torch.randint(len(odd) - 2, (3, 2048), generator=generator)],
        odd[:2][torch.randint(2, (2, 2048), generator=generator)],
        torch.randn(2, 2048, generator=generator).mul(3).round().requires_grad_(),
    ):
        found, index = ordering.ordered(scores, count)
        values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
        assert torch.equal(index, places[..., :count]) and torch.equal(found, values[..., :count])
        assert found.requires_grad == scores.requires_grad


def test_convention_a_site_on_an_edge_is_in_the_cell_after_it() -> None:
    """Whatever the division rounds to: 16 rows of a picture of 32 cells are all on edges."""
    for patch in range(2, 64):
        scene = Scene((32 * patch, 32 * patch), patch, torch.arange(32.0).expand(1, 32, 32), *[None] * 4)
        sites = ((torch.arange(16) + 0.5) / 16)[None, :, None].expand(1, 16, 2)
        assert ordering.at_sites(scene, scene.relevance, sites)[0].tolist() == list(range(1, 32, 2))


def test_random_differs_by_its_seed() -> None:
    relevance = torch.rand(1, 16, 16)
    one, same, other = (lod.allocate.Random(20, 4, seed=seed)(relevance=relevance).sites for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


# -- the tree cut ------------------------------------------------------------------------------------------------------


def refined(benefits: list[torch.Tensor], size: tuple[int, int], budget: int) -> set[tuple[int, int, int]]:
    """Best-first refinement of one image, with a priority queue that stops at the first node it cannot afford."""
    sizes = [(-(-size[0] // 2**level), -(-size[1] // 2**level)) for level in range(len(benefits) + 1)]
    gain: dict[tuple[int, int, int], float] = {}

    def children(node: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        level, y, x = node
        h, w = sizes[level - 1]
        return [(level - 1, j, i) for j in (2 * y, 2 * y + 1) for i in (2 * x, 2 * x + 1) if j < h and i < w]

    for level in range(1, len(sizes)):
        for y in range(sizes[level][0]):
            for x in range(sizes[level][1]):
                below = [gain[child] for child in children((level, y, x)) if level > 1]
                gain[level, y, x] = max([float(benefits[level - 1][y, x]), *below])
    top = len(sizes) - 1
    leaves = {(top, 0, 0)}
    queue = [(-gain[top, 0, 0], -top, 0, 0)] if top else []
    spent = 1
    while queue:
        _, level, y, x = heapq.heappop(queue)
        node = (-level, y, x)
        parts = children(node)
        if spent + len(parts) - 1 > budget:
            break
        spent += len(parts) - 1
        leaves.remove(node)
        leaves.update(parts)
        for part in parts:
            if part[0]:
                heapq.heappush(queue, (-gain[part], -part[0], part[1], part[2]))
    return leaves


def pyramid_of(values: torch.Tensor) -> list[torch.Tensor]:
    """Benefits of some kind, not propagated: noise on every inner level."""
    rows, columns = values.shape[-2:]
    top = (max(rows, columns) - 1).bit_length()
    return [
        (torch.rand(values.shape[0], -(-rows // 2**level), -(-columns // 2**level)) * 4).round()
        for level in range(1, top + 1)
    ]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**20))
def test_the_cut_is_best_first_refinement(rows: int, columns: int, budget: int, seed: int) -> None:
    torch.manual_seed(seed)
    budget = min(budget, rows * columns)
    detail = torch.rand(2, rows, columns)
    benefits = pyramid_of(detail)
    cut = tree_cut(benefits, detail, budget)
    for image in range(2):
        expected = refined([level[image] for level in benefits], (rows, columns), budget)
        found = {
            (level, *place) for level, leaves in enumerate(cut.leaves) for place in leaves[image].nonzero().tolist()
        }
        assert found == expected
        check_cover(cut, image, budget)
        left = detail[image].masked_fill(cut.leaves[0][image], -1).flatten()
        best = left.argsort(descending=True, stable=True)[: int(cut.detail[image].sum())]
        assert torch.equal(best.sort().values, cut.detail[image].flatten().nonzero()[:, 0])


def check_cover(cut: Any, image: int, budget: int) -> None:
    """The whole grid, each cell once; and K tokens with the detail cells, the best that are not at level 0 yet."""
    rows, columns = cut.detail.shape[1:]
    covered = torch.zeros(rows, columns, dtype=torch.long)
    for level, leaves in enumerate(cut.leaves):
        covered += leaves[image].long().repeat_interleave(2**level, 0).repeat_interleave(2**level, 1)[:rows, :columns]
    assert (covered == 1).all()
    assert sum(int(leaves[image].sum()) for leaves in cut.leaves) + int(cut.detail[image].sum()) == budget
    assert not (cut.detail[image] & cut.leaves[0][image]).any()


def test_every_ragged_grid() -> None:
    """All sizes 1..40 squared, at three budgets."""
    for rows in range(1, 41):
        for columns in range(1, 41):
            detail = torch.rand(1, rows, columns)
            benefits = pyramid_of(detail)
            for budget in {1, (rows * columns + 1) // 2, rows * columns}:
                check_cover(tree_cut(benefits, detail, budget), 0, budget)


def test_several_roots_and_what_is_refused() -> None:
    detail = torch.rand(2, 16, 16)
    benefits = pyramid_of(detail)
    cut = tree_cut(benefits, detail, 30, max_level=2)
    assert len(cut.leaves) == 3
    for image in range(2):
        check_cover(cut, image, 30)
    with pytest.raises(InputError, match="16 roots"):
        tree_cut(benefits, detail, 15, max_level=2)
    with pytest.raises(InputError, match="256 cells"):
        tree_cut(benefits, detail, 257)


def test_the_fovea_is_fine_and_the_rest_coarse() -> None:
    tokens = lod.allocate.FoveatedPyramid(200)(relevance=torch.ones(1, 64, 64), fixation=(0.25, 0.75))
    x, y, level = tokens.sites[0].unbind(-1)
    away = torch.hypot(x - 0.25, y - 0.75)
    near, far = level[away < 0.05], level[away > 0.6]
    assert float(near.min()) == 0 and float(near.max()) <= 1 and float(far.min()) >= 2
    cell = 2.0 ** (2 * level) / 64**2
    covered = float(cell.sum())
    assert 1 <= covered < 1 + 3 / 64**2  # once, and the detail


# -- the soft top-k ----------------------------------------------------------------------------------------------------


@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**20), st.floats(0.001, 10))
def test_soft_top_k_sums_to_k(kind: str, rows: int, count: int, seed: int, temperature: float) -> None:
    torch.manual_seed(seed)
    scores = maps(kind, 2, rows, 9).flatten(1)
    count = min(count, rows * 9)
    soft = lod.allocate.soft_top_k(scores, count, temperature)
    assert ((soft >= 0) & (soft <= 1)).all() and torch.allclose(soft.sum(1), torch.full((2,), float(count)), rtol=1e-5)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    ranked = soft.gather(1, order)
    assert (ranked[:, 1:] <= ranked[:, :-1]).all()


def test_soft_top_k_has_exact_gradients() -> None:
    scores = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: lod.allocate.soft_top_k(s, 4, 0.7), (scores,))
    hard = lod.allocate.soft_top_k(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), 2, 0.01)
    assert torch.allclose(hard, torch.tensor([[1.0, 0.0, 1.0, 0.0]]), atol=1e-6)
    for bad, hint in (((scores, 13, 1.0), "at least the count"), ((scores, 4, 0.0), "positive")):
        with pytest.raises(InputError, match=hint):
            lod.allocate.soft_top_k(*bad)


@pytest.mark.parametrize("count", [1, 4, 11, 12])
def test_the_soft_top_k_bends_as_it_should(count: int) -> None:
    """Gradients of gradients, and forward mode, in which torch.no_grad keeps nothing back."""

    def soft(scores: torch.Tensor) -> torch.Tensor:
        return lod.allocate.soft_top_k(scores, count, 0.7)

    scores = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(soft, (scores,))
    slopes = torch.func.jacrev(soft)(scores.detach())
    torch.testing.assert_close(torch.func.jacfwd(soft)(scores.detach()), slopes, rtol=0, atol=1e-12)
    bends = [
        outer(torch.func.jacrev(lambda s: soft(s).square().sum()))(scores.detach())
        for outer in (torch.func.jacfwd, torch.func.jacrev)
    ]
    torch.testing.assert_close(*bends, rtol=0, atol=1e-12)


def test_all_of_them_are_in_the_graph() -> None:
    """However many patches a picture has, a loss of its scores has a backward."""
    scores = torch.tensor([[1.0, -torch.inf, 3.0, torch.inf]], requires_grad=True)
    soft = lod.allocate.soft_top_k(scores, 4, 0.1)
    assert soft.tolist() == [[1.0] * 4]
    assert torch.autograd.grad(soft.sum(), scores)[0].tolist() == [[0.0] * 4]
    assert lod.allocate.VortexLearned(16)(torch.rand(3, 56, 56)).scores.requires_grad
    assert lod.vlm.straight_through_top_k(scores, 4).weights.requires_grad


# -- fixations and strata ----------------------------------------------------------------------------------------------


def test_fixations_are_peaks_and_are_not_looked_at_twice() -> None:
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(96.0), indexing="ij")
    peaks = [(20.0, 15.0, 1.0), (70.0, 40.0, 0.8), (85.0, 10.0, 0.6)]
    relevance = sum(h * torch.exp(-((x - px) ** 2 + (y - py) ** 2) / 60) for px, py, h in peaks)
    found = lod.allocate.find_fixations(torch.as_tensor(relevance)[None], 3)[0]
    for (px, py, _), (fx, fy) in zip(peaks, found.tolist(), strict=True):
        assert abs(fx - (px + 0.5) / 96) < 0.02 and abs(fy - (py + 0.5) / 64) < 0.03  # a coarse cell is 0.06
    flat = lod.allocate.find_fixations(torch.zeros(2, 8, 8), 4)
    for points in flat:
        assert len(points.unique(dim=0)) == 4
        assert all(math.dist(a, b) > 0.15 for a, b in zip(points.tolist(), points.tolist()[1:], strict=False))


def test_of_equal_peaks_the_first_of_those_as_near_the_middle() -> None:
    """To the last bit: a pair that mirrors each other about the middle has its first one looked at first."""
    for n in range(2, 17):
        for i in range(n // 2):
            row = torch.zeros(1, 1, n)
            row[0, 0, [i, n - 1 - i]] = 1
            along, down = lod.allocate.find_fixations(row)[0, 0], lod.allocate.find_fixations(row.mT)[0, 0]
            assert along[0] <= 0.5 and down[1] <= 0.5


@pytest.mark.parametrize("n", [5, 10, 13])
def test_what_is_as_far_as_the_radius_is_within(n: int) -> None:
    """Wherever the peak is."""
    for i in range(1, n - 1):
        row = torch.zeros(1, 1, n)
        row[0, 0, i - 1 : i + 2] = torch.tensor([1.0, 2.0, 1.0])
        first, second = (lod.allocate.find_fixations(row, 2, radius=1 / n)[0, :, 0] * n).tolist()
        assert int(first) == i and abs(int(second) - i) > 1


def test_what_is_far_above_the_rest_is_looked_at_again_if_little_inhibited() -> None:
    relevance = torch.zeros(1, 16, 16)
    relevance[0, 4, 4], relevance[0, 12, 12] = 1.0, 0.6
    first, second = ((4 + 0.5) / 16,) * 2, ((12 + 0.5) / 16,) * 2
    for inhibition, expected in ((0.0, [first] * 3), (0.3, [first, first, second]), (0.5, [first, second, first])):
        found = lod.allocate.find_fixations(relevance, 3, inhibition=inhibition)[0]
        torch.testing.assert_close(found, torch.tensor(expected))


def test_fixations_are_found_on_16_cells_and_refined_between_them() -> None:
    """The parabola through 2, 4, 3 has its vertex at a sixth of a cell."""
    for axis in (0, 1):
        relevance = torch.zeros(16, 16)
        relevance.movedim(axis, 0)[8:11, 5] = torch.tensor([2.0, 4.0, 3.0])
        fine = relevance.repeat_interleave(4, 0).repeat_interleave(4, 1)
        for values in (relevance, fine):
            [point] = lod.allocate.find_fixations(values[None])[0].tolist()
            assert point[1 - axis] == pytest.approx((9.5 + 1 / 6) / 16, abs=1e-5)
            assert point[axis] == pytest.approx(5.5 / 16, abs=1e-5)


def test_fixations_are_in_the_picture_that_the_grid_reaches_over() -> None:
    """The last patch of a ragged picture is flush with its edge."""
    for width in (29, 43, 57, 400):
        grid = cells_of((20, width), 14)
        slack = 14 * (grid[1] > 16)  # of the coarse pass
        for cell in {0, 1, grid[1] - 2, grid[1] - 1}:
            relevance = torch.zeros(1, *grid)
            relevance[0, :, cell] = 1
            tokens = lod.allocate.Spiral(1, peaks=1)(torch.rand(1, 3, 20, width), relevance)
            begin = min(cell * 14, width - 14)
            assert begin - slack <= float(tokens.sites[0, 0, 0]) * width <= begin + 14 + slack


def test_where_nothing_stands_out_one_looks_at_the_middle() -> None:
    for values in (torch.ones(1, 16, 16), torch.zeros(1, 15, 11)):
        [[x, y]] = lod.allocate.find_fixations(values)[0].tolist()
        assert abs(x - 0.5) < 0.04 and abs(y - 0.5) < 0.04


def by_largest_remainder(weight: list[float], room: list[int], total: int) -> list[int]:
    """Textbook, with capacities: whoever's quota is beyond its room is filled, and the rest is shared anew."""
    counts, open_ = [0] * len(room), [i for i, there in enumerate(room) if there]
    while open_ and total:
        whole = sum(weight[i] for i in open_)
        quota = {i: total * (weight[i] / whole if whole else 1 / len(open_)) for i in open_}
        if full := [i for i in open_ if quota[i] > room[i]]:
            for i in full:
                counts[i], total = room[i], total - room[i]
            open_ = [i for i in open_ if i not in full]
            continue
        for i in open_:
            counts[i] = int(quota[i])
        rest = total - sum(counts[i] for i in open_)
        for i in sorted(open_, key=lambda i: (int(quota[i]) - quota[i], i))[:rest]:
            counts[i] += 1
        break
    return counts


@given(st.integers(2, 9), st.integers(0, 2**20))
def test_shares_are_those_of_the_textbook(strata: int, seed: int) -> None:
    torch.manual_seed(seed)
    room = torch.randint(1, 6, (20, strata))
    weight = torch.rand(20, strata, dtype=torch.float64).pow(3)
    total = 1 + seed % int(room.sum(1).min())
    found = shared_out(weight, room, total, least=0)
    expected = [by_largest_remainder(w, r, total) for w, r in zip(weight.tolist(), room.tolist(), strict=True)]
    assert found.tolist() == expected


@given(st.integers(1, 20), st.integers(0, 2**20), st.booleans())
def test_shares_are_whole_and_fit(strata: int, seed: int, tight: bool) -> None:
    torch.manual_seed(seed)
    room = torch.randint(1, 9, (3, strata))
    weight = torch.rand(3, strata, dtype=torch.float64).pow(6)
    weight[1] = 0
    room = room[:1].expand(3, -1)
    there = int(room[0].sum())
    total = there if tight else 1 + seed % there
    counts = shared_out(weight, room, total)
    assert (counts.sum(1) == total).all() and (counts <= room).all() and (counts >= 0).all()
    if total >= strata:
        assert (counts >= 1).all()


def test_shares_by_largest_remainder() -> None:
    none = torch.tensor([[0, 5, 5]])
    assert shared_out(torch.ones(1, 3, dtype=torch.float64), none, 10).tolist() == [[0, 5, 5]]
    assert shared_out(torch.ones(1, 3, dtype=torch.float64), none, 2).tolist() == [[0, 1, 1]]
    weight = torch.tensor([[5.0, 3.0, 2.0]], dtype=torch.float64)
    assert shared_out(weight, torch.full((1, 3), 99), 3 + 7).tolist() == [[1 + 4, 1 + 2, 1 + 1]]  # 3.5, 2.1, 1.4
    assert shared_out(weight, torch.tensor([[2, 99, 99]]), 10).tolist() == [[2, 5, 3]]  # 6 for 3 : 2, so 3.6 and 2.4


def test_strata_all_have_a_token() -> None:
    hot = torch.zeros(1, 20, 20)
    hot[:, :3, :3] = 100
    sites = lod.allocate.Stratified(40, strata=(4, 5))(relevance=hot).sites[0]
    assert len({(int(y * 4), int(x * 5)) for x, y, _ in sites.tolist()}) == 20


def test_cells_belong_to_the_nearest_peak() -> None:
    """Two peaks, one with twice the relevance: two thirds of the tokens go to its cell."""
    relevance = torch.zeros(1, 20, 40)
    relevance[0, 8:12, 6:10] = 2
    relevance[0, 8:12, 30:34] = 1
    sites = lod.allocate.Voronoi(31, peaks=2)(relevance=relevance).sites[0]
    left = int((sites[:, 0] < 0.5).sum())
    assert left in (20, 21)
    assert sum(float(x) * 40 < 10 and 8 <= float(y) * 20 < 12 for x, y, _ in sites) >= 16


def test_a_patch_between_two_peaks_is_the_higher_ones() -> None:
    """Midway, however distances round."""
    for n in range(3, 17, 2):
        for flip in (False, True):
            row = torch.zeros(1, 1, n)
            row[0, 0, 0], row[0, 0, -1] = 2, 1.5
            scene, _ = lod.allocate.Voronoi(3)._scene(None, row.flip(2) if flip else row, None, None, None)
            points = torch.tensor([[[0.5 / n, 0.5], [1 - 0.5 / n, 0.5]]])
            owner = owners(scene, points.flip(1) if flip else points)[0]
            assert int(owner[n // 2]) == 0 and int((owner == 0).sum()) == n // 2 + 1


def test_vortices_share_by_what_they_hold() -> None:
    relevance = torch.zeros(1, 20, 40)
    relevance[0, 9:11, 5:8] = 3
    relevance[0, 9:11, 30:33] = 1
    sites = lod.allocate.VortexField(9, vortices=2)(relevance=relevance).sites[0]
    cells = [(int(y * 20), int(x * 40)) for x, y, _ in sites.tolist()]
    left, right = (sum(y in (9, 10) and start <= x < start + 3 for y, x in cells) for start in (5, 30))
    assert (left, right) == (6, 3)  # one each, and 7 by 18 : 6 is 5.25 and 1.75


@pytest.mark.parametrize("name", ["Voronoi", "VortexField"])
def test_every_patch_goes_to_its_own_peak(name: str) -> None:
    """Counted one by one, on a map that is not the same on both sides of a border."""
    rows, columns, radius = 12, 19, 0.1
    relevance = torch.rand(1, rows, columns).pow(3)
    relevance[0, :, :6] *= 4
    points = lod.allocate.find_fixations(relevance, 3, **({"radius": radius} if name == "VortexField" else {}))[0]
    centres = [((x + 0.5) / columns, (y + 0.5) / rows) for y in range(rows) for x in range(columns)]

    def away(centre: tuple[float, float], point: list[float]) -> float:
        return (centre[0] - point[0]) ** 2 + ((centre[1] - point[1]) * rows / columns) ** 2

    flat = relevance.flatten().tolist()
    strength = [sum(v for v, c in zip(flat, centres, strict=True) if away(c, p) <= radius**2) for p in points.tolist()]

    def owner(centre: tuple[float, float]) -> int:
        if name == "Voronoi":
            return min(range(3), key=lambda i: away(centre, points[i].tolist()))
        return max(range(3), key=lambda i: strength[i] / (away(centre, points[i].tolist()) + radius**2))

    owners = [owner(centre) for centre in centres]
    weight = [sum(v for v, o in zip(flat, owners, strict=True) if o == i) for i in range(3)]
    room = torch.tensor([[owners.count(i) for i in range(3)]])
    expected = shared_out(torch.tensor([weight], dtype=torch.float64), room, 50)[0].tolist()
    how = {"peaks": 3} if name == "Voronoi" else {"vortices": 3, "radius": radius}
    sites = lod.allocate.make(name, 50, **how)(relevance=relevance).sites[0].tolist()
    taken = [owners[int(y * rows) * columns + int(x * columns)] for x, y, _ in sites]
    assert [taken.count(i) for i in range(3)] == expected


def test_heat_spreads_and_stays() -> None:
    relevance = torch.zeros(1, 15, 21)
    relevance[0, 7, 10] = 1
    heat = steady_state(relevance.double(), 2.0)
    assert abs(float(heat.sum()) - 1) < 1e-12 and float(heat.min()) > 0
    padded = torch.nn.functional.pad(heat[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    laplace = padded[:, 1:-1, 2:] + padded[:, 1:-1, :-2] + padded[:, 2:, 1:-1] + padded[:, :-2, 1:-1] - 4 * heat
    assert torch.allclose(heat - 4 * laplace, relevance.double(), atol=1e-12)
    hottest = lod.allocate.HeatDiffusion(5)(relevance=relevance).sites[0]
    cells = {(int(y * 15), int(x * 21)) for x, y, _ in hottest.tolist()}
    assert cells == {(7, 10), (6, 10), (8, 10), (7, 9), (7, 11)}
    wide = torch.zeros(1, 37, 37)
    wide[0, 5, 6] = 1
    assert torch.equal(
        lod.allocate.HeatDiffusion(273, length=0.0)(relevance=wide).sites,
        lod.allocate.GridTopK(273)(relevance=wide).sites,
    )
    assert float(lod.allocate.HeatDiffusion(37 * 37, length=0.5)(relevance=wide).scores.min()) == 0
    noisy = torch.rand(2, 9, 9)
    none = lod.allocate.HeatDiffusion(30, length=0.0)(relevance=noisy)
    assert torch.equal(none.sites, lod.allocate.GridTopK(30)(relevance=noisy).sites)


def least_distance(name: str, budget: int, height: int, width: int) -> float:
    sites = lod.allocate.make(name, budget)(torch.empty(1, 1, height, width)).sites[0, :, :2].double()
    places = sites * torch.tensor([width, height])
    return float(torch.cdist(places, places).fill_diagonal_(math.inf).min())


@pytest.mark.parametrize(("height", "width"), [(448, 448), (224, 448), (448, 252)])
def test_sites_of_a_hexagonal_grid_are_farther_apart_than_of_a_square_one(height: int, width: int) -> None:
    for budget in range(16, 400, 5):
        hexagonal, square = (least_distance(name, budget, height, width) for name in ("Hexagonal", "Downsample"))
        assert hexagonal > square * (1 - 1e-5)
        assert hexagonal > 0.86 * math.sqrt(2 / math.sqrt(3) * height * width / budget), "the densest there is"


def test_hexagons_zigzag_in_a_narrow_picture() -> None:
    """The next period would be nearer than the other sites are, but is outside."""
    assert least_distance("Hexagonal", 30, 30, 900) == pytest.approx(math.hypot(30, 15))


def test_hexagons_are_regular_where_the_budget_allows() -> None:
    """Six neighbours at the same distance, in rows shifted by half a step; patches as wide as a step."""
    height, width = 1400, 1616  # 10 rows of 10, 2 / sqrt(3) as far apart along a row as rows are
    sites = lod.allocate.Hexagonal(100)(torch.empty(1, 1, height, width)).sites[0].double()
    places = sites[:, :2] * torch.tensor([width, height])
    apart = torch.cdist(places, places) / 161.6
    inner = ((places > 165) & (places < torch.tensor([width - 165, height - 165]))).all(1)
    assert inner.sum() > 50 and ((apart[inner] > 0.99) & (apart[inner] < 1.01)).sum(1).eq(6).all()
    assert torch.allclose(14 * 2 ** sites[:, 2], torch.tensor(161.6, dtype=torch.float64))
    assert float(places[0, 0]) == pytest.approx(161.6 / 4, abs=0.01) and float(places[0, 1]) == pytest.approx(70)


@pytest.mark.parametrize("budget", [1, 2, 17, 37, 100, 273, 311])
@pytest.mark.parametrize(("height", "width"), [(448, 448), (30, 900)])
def test_hexagons_leave_no_gaps(budget: int, height: int, width: int) -> None:
    """Of a picture that goes on periodically, every pixel is in a patch, and smaller patches would leave gaps."""
    sites = lod.allocate.Hexagonal(budget, 2)(torch.empty(1, 1, height, width)).sites[0].double()
    size, side = torch.tensor([width, height]), float(2 * 2 ** sites[0, 2])
    assert torch.equal(sites[:, 2], sites[:1, 2].expand(budget)), "all are alike"
    x, y = (torch.arange(0.5, n, 1 + n // 150).double() for n in (width, height))
    gaps = [(a[:, None] - s * n).abs() for a, s, n in zip((x, y), sites[:, :2].T, size, strict=True)]
    across, down = (torch.minimum(gap, n - gap) for gap, n in zip(gaps, size, strict=True))
    away = torch.maximum(across[None], down[:, None]).amin(2)
    assert float(away.max()) <= side / 2 + 1e-3
    mirrored = torch.cdist(sites[:, :2], 1 - sites[:, :2]).amin(1)
    assert float(mirrored.max()) < 1e-5, "symmetric about the middle"


# -- patches and pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_patches_are_read_at_the_sites(name: str, photo: torch.Tensor) -> None:
    image = photo[None, :, :300, :421]
    rows, columns = cells_of((300, 421), 14)
    allocator = lod.allocate.make(name, 100)
    more = {"query": torch.randn(allocator.query_width or 8)} if "query" in allocator.needs else {}
    tokens = allocator(image, maps("noise", 1, rows, columns), **more)
    if allocator.blends:
        every = lod.allocate.GridTopK(rows * columns)(
            image, torch.arange(rows * columns).flip(0).view(1, rows, columns)
        )
        blended = torch.einsum("bkn,bncij->bkcij", tokens.weights, every.patches.float() / 255)
        assert torch.allclose(tokens.patches, blended, atol=1e-3)
    else:
        assert torch.equal(tokens.patches, lod.gather_patches(image, tokens.sites.detach(), 14))
    pyramid = lod.mipmap(image)
    again = allocator(pyramid, maps("noise", 1, rows, columns) * 0 + 1, **more)
    assert again.patches is not None and again.patches.shape == (1, 100, 3, 14, 14)
    single = allocator(image[0], **more)
    assert single.sites.shape == (100, 3) and single.patches is not None and single.patches.shape == (100, 3, 14, 14)


def test_grid_patches_are_the_pixels(photo: torch.Tensor) -> None:
    """Level-0 sites give exact pixels; at far edges the patch is flush with the image."""
    image = photo[None, :, :50, :60]
    relevance = torch.zeros(1, 4, 5)
    relevance[0, 3, 4] = 2
    relevance[0, 1, 2] = 1
    patches = lod.allocate.GridTopK(2)(image, relevance).patches
    assert patches is not None
    assert torch.equal(patches[0, 0], image[0, :, 36:50, 46:60]) and torch.equal(
        patches[0, 1], image[0, :, 14:28, 28:42]
    )


def test_relevance_of_pixels_pools_to_the_grid() -> None:
    pixels = torch.rand(1, 50, 60)
    for pool in ("mean", "max"):
        allocator = lod.allocate.GridTopK(20, pool=pool)
        [scores] = allocator(torch.rand(1, 3, 50, 60), pixels).scores
        cells = [
            pixels[0, min(14 * j, 36) : min(14 * j, 36) + 14, min(14 * i, 46) : min(14 * i, 46) + 14]
            for j in range(4)
            for i in range(5)
        ]
        expected = torch.stack([cell.mean() if pool == "mean" else cell.max() for cell in cells])
        assert torch.allclose(scores, expected.sort(descending=True).values, atol=1e-6)


def test_saliency_where_no_relevance_is_given() -> None:
    image = torch.zeros(1, 3, 140, 140)
    image[..., 70:84, 42:56] = 1
    x, y, level = lod.allocate.GridTopK(3)(image).sites[0, 0].tolist()
    assert (round(x * 140), round(y * 140), level) == (49, 77, 0)


def test_budgets_that_do_not_fit() -> None:
    for name in NAMES:
        if name in ANY_BUDGET:
            assert chosen(name, 40, torch.rand(1, 3, 3)).budget == 40
            continue
        # PyramidTopK has as many levels as it is asked for, also where one node covers the picture.
        there = {"PyramidTopK": 9 + 4 + 1 + 1, "Wavelet": 9 + 4 + 1}.get(name, 9)
        with pytest.raises(InputError, match=rf"budget is 40, and (there are|the grid of 3 x 3 has) {there} [pc]"):
            chosen(name, 40, torch.rand(1, 3, 3))
        with pytest.raises(InputError, match=f"budget is {there + 1}"):
            chosen(name, there + 1, torch.rand(1, 3, 3))
        assert chosen(name, there, torch.rand(1, 3, 3)).budget == there


@pytest.mark.parametrize("shape", [(3, 4), (12, 16)], ids=["a number a patch", "a number a pixel"])
@pytest.mark.parametrize("name", NAMES)
def test_relevance_that_is_no_number(name: str, shape: tuple[int, int]) -> None:
    """One, of all the batch, in the cell of least effect."""
    allocator = lod.allocate.make(name, 2, 4)
    relevance = torch.rand(2, *shape)
    relevance[1, -1, -1] = math.nan
    more = {"query": torch.rand(2, allocator.query_width or 8)} if "query" in allocator.needs else {}
    with pytest.raises(InputError, match="relevance holds NaN"):
        allocator(torch.rand(2, 3, 12, 16), relevance, **more)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({}, "pass image= or relevance="),
        ({"relevance": torch.full((1, 4, 4), float("nan"))}, "NaN"),
        ({"relevance": torch.rand(4)}, r"expected \[B, Hg, Wg\]"),
        ({"relevance": torch.rand(0, 4, 4)}, "no side of 0"),
        ({"image": torch.rand(50, 60)}, r"image has shape \(50, 60\)"),
        ({"image": lod.mipmap(torch.rand(3, 50, 60), reduce="max")}, "image is a max pyramid"),
        ({"image": torch.rand(1, 3, 50, 60), "relevance": torch.rand(1, 4, 4)}, r"\(1, 4, 5\)"),
        ({"image": torch.rand(1, 3, 50, 60), "fixation": (0.5, 2.0)}, "fixation"),
        ({"image": torch.rand(1, 3, 50, 60), "query": torch.rand(8)}, "takes no query, but fixation, image, relevance"),
        (
            {"image": torch.rand(3, 50, 60), "relevance": torch.rand(1, 4, 5)},
            r"pass relevance\[0\], or image",
        ),
        ({"image": torch.rand(3, 50, 60), "relevance": torch.rand(1, 50, 60)}, r"no batch: pass relevance\[0\]"),
        ({"image": torch.rand(3, 50, 60), "relevance": torch.rand(1, 5, 4)}, "Resize it with"),
        ({"image": torch.rand(1, 3, 50, 60), "labels": torch.zeros(1, 50, 60)}, "takes no labels"),
    ],
)
def test_bad_input(arguments: dict[str, Any], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        lod.allocate.FoveatedPyramid(9)(**arguments)


@pytest.mark.parametrize(
    ("labels", "hint"),
    [
        (torch.zeros(2, 50, 61).long(), r"int64 \(2, 50, 61\); expected integers, \(2, 50, 60\) one a pixel"),
        (torch.zeros(2, 5, 4).long(), r"int64 \(2, 5, 4\); .* or \(2, 4, 5\) one a patch"),
        (torch.zeros(3, 50, 60).long(), r"int64 \(3, 50, 60\)"),
        (torch.zeros(50).long(), r"int64 \(50,\)"),
        (torch.zeros(2, 50, 60), r"labels are torch\.float32 \(2, 50, 60\); expected integers"),
        (torch.zeros(4, 5).half(), r"labels are torch\.float16 \(4, 5\); expected integers"),
    ],
)
def test_bad_labels(labels: torch.Tensor, hint: str) -> None:
    allocator, image = lod.allocate.HybridAtlas(9), torch.rand(2, 3, 50, 60)
    with pytest.raises(InputError, match=hint):
        allocator(image, labels=labels)
    with pytest.raises(InputError, match=hint):
        allocator(lod.mipmap(image), torch.rand(2, 4, 5), labels=labels)


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        (torch.rand(7), r"float32 \(7,\); expected floats \[2, 8\] or \[8\]"),
        (torch.rand(2, 9), r"float32 \(2, 9\); expected floats \[2, 8\] or \[8\]\. For queries 9 wide .* width=9\."),
        (torch.rand(3, 8), r"float32 \(3, 8\); expected floats \[2, 8\] or \[8\]\.$"),
        (torch.rand(2, 0), r"expected floats \[2, 8\] or \[8\]\.$"),
        (torch.rand(1, 2, 8), r"float32 \(1, 2, 8\)"),
        (torch.ones(8).long(), r"int64 \(8,\); expected floats"),
        (torch.full((8,), math.nan), "query holds NaN"),
        (torch.full((8,), math.nan).to(torch.float8_e4m3fn), "query holds NaN"),
        (torch.full((8,), 1e300, dtype=torch.float64), "infinities; expected finite numbers in fp32"),
    ],
)
def test_bad_queries(query: torch.Tensor, hint: str) -> None:
    allocator = lod.allocate.AdaptiveStratified(9, width=8)
    for what in ({"image": torch.rand(2, 3, 50, 60)}, {"relevance": torch.rand(2, 4, 5)}):
        with pytest.raises(InputError, match=hint):
            allocator(**what, query=query)


def test_a_query_that_is_no_embedding_says_what_it_is() -> None:
    expected = r"expected floats \[1, 4\] or \[4\], weights of the four orientations, no embedding\. Leave query= out"
    with pytest.raises(InputError, match=expected):
        lod.allocate.FrequencyAware(9)(torch.rand(3, 50, 60), query=torch.rand(768))


def test_an_allocator_of_no_module_is_one_of_ones_own() -> None:
    """As `exec` makes it, where globals have no name."""
    code = """
class Bare(lod.allocate.Allocator):
    needs = ()

    def choose(self, scene):
        scores = torch.ones(scene.batch, self.budget)
        return self.sites.expand(scene.batch, -1, -1), scores
"""
    there: dict[str, Any] = {"lod": lod, "torch": torch}
    exec(code, there)
    bare = there["Bare"](2)
    assert type(bare).choose.__module__ is None and lod.allocate.register(type(bare)) is type(bare)
    del lod.allocate.base.kinds["Bare"]
    bare.sites = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 1.0]])
    assert torch.equal(bare(torch.rand(2, 3, 28, 28)).sites[1], bare.sites)
    bare.sites = bare.sites.long()
    with pytest.raises(InputError, match="sites of torch"):
        bare(torch.rand(2, 3, 28, 28))


def test_a_query_of_float8_is_that_in_fp32() -> None:
    allocator, relevance = lod.allocate.AdaptiveStratified(9, width=8), torch.rand(2, 4, 5)
    query = torch.randn(2, 8).to(torch.float8_e4m3fn)
    found, expected = (allocator(relevance=relevance, query=one) for one in (query, query.float()))
    assert torch.equal(found.sites, expected.sites)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: lod.allocate.GridTopK(0), "budget"),
        (lambda: lod.allocate.GridTopK(-3), "budget"),
        (lambda: lod.allocate.GridTopK(9, pool="sum"), "'mean', 'max'"),
        (lambda: lod.allocate.PyramidTopK(9, weights=(1.0, -1.0)), "positive"),
        (lambda: lod.allocate.PyramidTopK(9, split=(1, 2, 3, 4)), "sum to 9"),
        (lambda: lod.allocate.FoveatedPyramid(9, e0=0.0), "positive"),
        (lambda: lod.allocate.Stratified(9, strata=(0, 4)), "at least 1"),
        (lambda: lod.allocate.Voronoi(9, peaks=0), "peaks"),
        (lambda: lod.allocate.VortexField(9, radius=0.0), "positive"),
        (lambda: lod.allocate.HeatDiffusion(9, length=-1.0), "from 0 to"),
        (lambda: lod.allocate.make("Nobody"), "'GridTopK'"),
        (lambda: lod.allocate.register(int), "Allocator"),
        (
            lambda: lod.allocate.register(type("GridTopK", (lod.allocate.GridTopK,), {})),
            "GridTopK already, that of gpu",
        ),
    ],
)
def test_bad_settings(make: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        make()


def test_an_allocator_of_ones_own() -> None:
    succeed(
        """
        import torch, gpu_lod as lod

        @lod.allocate.register
        class Middle(lod.allocate.Allocator):
            needs = ("relevance", "fixation")
            def choose(self, scene):
                scores = torch.ones(scene.batch, self.budget)
                return scene.sites(0, torch.zeros_like(scores, dtype=torch.long)), scores

        assert "Middle" in lod.allocate.names()
        tokens = lod.allocate.make("Middle", 2)(relevance=torch.rand(1, 3, 3), fixation=(0.5, 0.5))
        assert tokens.sites.shape == (1, 2, 3)
        try:
            lod.allocate.make("Middle", 2)(relevance=torch.rand(1, 3, 3))
        except lod.GpuLodError as error:
            assert "needs fixation" in str(error)
        else:
            raise SystemExit("nobody asked for the fixation")
        lod.allocate.register(type("Middle", (Middle,), {"__module__": "__main__", "__qualname__": "Middle"}))  # again
        """
    )


@pytest.mark.parametrize("shapes", [((1, 3, 3), (1, 3)), ((1, 4, 2), (1, 4)), ((1, 4, 3), (1, 3)), ((2, 4, 3), (2, 4))])
def test_an_allocator_of_ones_own_gives_exactly_k(shapes: tuple[tuple[int, ...], ...]) -> None:
    class Liar(lod.allocate.Allocator):
        def choose(self, scene: Any) -> tuple[torch.Tensor, ...]:
            return tuple(map(torch.zeros, shapes))

    expected = rf"choose\(\) of Liar gave {re.escape(', '.join(map(str, shapes)))}; .* \(1, 4, 3\), \(1, 4\): exactly 4"
    with pytest.raises(InputError, match=expected):
        Liar(4)(relevance=torch.rand(1, 3, 3))


@pytest.mark.parametrize(
    ("sites", "scores", "expected"),
    [
        ([0.5, 0.5, 0.0], [1.0, 2.0], "scores that rise"),
        ([0.5, 0.5, 0.0], [2.0, math.nan], "scores that rise or are NaN"),
        ([0.5, 1.5, 0.0], [2.0, 1.0], "sites have y from 0.5 to 1.5"),
        ([math.nan, 0.5, 0.0], [2.0, 1.0], "sites have x from nan"),
        ([0.5, 0.5, -1.0], [2.0, 1.0], "sites have levels from -1"),
        ([1, 1, 0], [2.0, 1.0], "sites of torch.int64"),
        ([0.5, 0.5, 0.0], [2, 1], "scores of torch.int64"),
    ],
)
def test_what_an_allocator_of_ones_own_gives_is_looked_at(
    sites: list[float], scores: list[float], expected: str
) -> None:
    """By itself, in a bank, and in glances; with a picture or without."""

    class Strange(lod.allocate.Allocator):
        def choose(self, scene: Any) -> tuple[torch.Tensor, ...]:
            middle = torch.tensor([0.5, 0.5, 0.0] if isinstance(sites[0], float) else [1, 1, 0])
            both = torch.stack([middle, torch.tensor(sites)])
            return both.expand(scene.batch, 2, 3), torch.tensor(scores).expand(scene.batch, 2)

    strange, image = Strange(2), torch.rand(2, 3, 42, 42)
    for call in (
        lambda: strange(relevance=torch.rand(3, 3)),
        lambda: strange(image),
        lambda: lod.allocate.TokenBank(strange, 4, least=2)(image),
        lambda: lod.vlm.glances(strange, image),
    ):
        with pytest.raises(InputError, match=expected):
            call()


def test_importing_the_package_loads_no_allocator() -> None:
    succeed("import sys, gpu_lod; assert 'gpu_lod.allocate' not in sys.modules; gpu_lod.allocate.names")


def test_token_sets_are_pytrees() -> None:
    tokens = lod.allocate.GridTopK(4)(torch.rand(2, 3, 28, 28))
    doubled = torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf * 2, tokens)
    assert isinstance(doubled, lod.TokenSet) and torch.equal(doubled.sites, tokens.sites * 2)
    assert doubled.patch == 14 and doubled.budget == 4
    assert json.dumps(tokens.sites.tolist())
    with pytest.raises(InputError, match=r"\[B, K, 3\]"):
        lod.TokenSet(noise(2, 4, 2), noise(2, 4), None, 14)
    for shape in ((5, 5), (2, 4, 3, 8, 8), (2, 5, 3, 14, 14), (4, 3, 14, 14)):
        with pytest.raises(InputError, match="a patch of each site"):
            lod.TokenSet(noise(2, 4, 3), noise(2, 4), torch.zeros(shape), 14)


def test_token_sets_hold_features() -> None:
    """With patches or without; they go wherever the rest of the tokens does."""
    tokens = lod.allocate.GridTopK(4)(torch.rand(2, 3, 28, 28))
    assert tokens.features is None and "features" not in repr(tokens)
    features = torch.rand(2, 4, 7)
    both, alone = replace(tokens, features=features), replace(tokens, patches=None, features=features.bfloat16())
    assert torch.equal(both.sites, tokens.sites) and both.patches is tokens.patches and both.features is features
    assert repr(both).endswith("patches (2, 4, 3, 14, 14), features (2, 4, 7)>")
    assert repr(alone) == "<TokenSet of 4 sites (2, 4, 3), no patches, features (2, 4, 7)>"
    doubled = torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf * 2, both)
    assert torch.equal(doubled.features, features * 2) and torch.equal(doubled.patches, both.patches * 2)
    assert doubled.weights is None and doubled.patch == 14
    one = lod.TokenSet(tokens.sites[0], tokens.scores[0], None, 14, features=features[0])
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(one)), torch.load(file, weights_only=True)):
        assert repr(other) == repr(one) and torch.equal(other.features, features[0])


@pytest.mark.parametrize(
    ("features", "hint"),
    [
        (torch.zeros(2, 5, 7), r"float32 \(2, 5, 7\); expected floating-point ones \[2, 4, D\]"),
        (torch.zeros(4, 7), r"\(4, 7\)"),
        (torch.zeros(2, 4), r"\(2, 4\)"),
        (torch.zeros(2, 4, 1, 7), r"\(2, 4, 1, 7\)"),
        (torch.zeros(2, 4, 0), r"\(2, 4, 0\)"),
        (torch.zeros(2, 4, 7).long(), r"features are torch\.int64"),
        (torch.zeros(2, 4, 7, device="meta"), r"features is on meta and the sites on cpu"),
        ([1.0], "features is a list; expected a torch tensor"),
    ],
)
def test_bad_features(features: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        lod.TokenSet(noise(2, 4, 3), noise(2, 4), None, 14, features=features)


FIELDS = ("sites", "scores", "patches", "weights", "features")


def same_tokens(one: lod.TokenSet, other: lod.TokenSet) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in FIELDS]
    return one.patch == other.patch and all(a is b if b is None else torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def blends() -> lod.TokenSet:
    """All fields are there."""
    tokens = lod.allocate.SoftVortex(4)(noise(3, 3, 28, 28))
    return replace(tokens, features=noise(3, 4, 7)).detach()


def test_token_sets_are_stacked_and_unstacked(blends: lod.TokenSet) -> None:
    sets = blends.unstack()
    assert [one.sites.shape for one in sets] == [(4, 3)] * 3
    assert sets[1].sites.data_ptr() == blends.sites[1].data_ptr() and torch.equal(sets[1].features, blends.features[1])
    assert same_tokens(lod.TokenSet.stack(sets), blends) and same_tokens(lod.TokenSet.stack(iter(sets)), blends)
    bare = [replace(one, patches=None, weights=None, features=None) for one in sets]
    assert lod.TokenSet.stack(bare[1:]).patches is None and torch.equal(lod.TokenSet.stack(bare).sites, blends.sites)
    part = replace(sets[0], features=sets[0].features.clone().requires_grad_())
    lod.TokenSet.stack([part, sets[1]]).unstack()[0].features.sum().backward()
    assert torch.equal(part.features.grad, torch.ones(4, 7))


def test_a_loader_stacks_and_pins(blends: lod.TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = torch.utils.data.DataLoader(blends.unstack(), batch_size=3, collate_fn=lod.TokenSet.stack)  # type: ignore[arg-type]
    (batch,) = loader
    assert same_tokens(batch, blends)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda value: pinned.append(value) or value.clone())
    loaded = torch.utils.data._utils.pin_memory.pin_memory([batch])[0]
    assert loaded is not batch and same_tokens(loaded, blends) and len(pinned) == len(FIELDS)
    packed = lod.allocate.TokenBank(lod.allocate.GridTopK(), 7)(noise(2, 3, 28, 28))
    again = packed.pin_memory()
    assert torch.equal(again.sites, packed.sites) and again.longest == packed.longest and len(pinned) == 9


def test_moves_need_not_wait(blends: lod.TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = lod.allocate.TokenBank(lod.allocate.GridTopK(), 7)(noise(2, 3, 28, 28))
    waits: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda value, where, non_blocking: waits.append(non_blocking) or value)
    for tokens in (blends, packed):
        tokens.to("cpu")
        assert set(waits) == {False}
        waits.clear()
        tokens.to("cpu", non_blocking=True)
        assert set(waits) == {True}
        waits.clear()


def test_some_tokens_are_taken_with_all_that_is_theirs(blends: lod.TokenSet) -> None:
    own = torch.tensor([[3, 0], [1, 1], [0, 2]])
    for index in (own, own.to(torch.uint8), own.to(torch.uint16), own.numpy()):
        taken = blends.take(index)
        for name in FIELDS:
            value = getattr(blends, name)
            expected = torch.stack([torch.stack([value[b, k] for k in row]) for b, row in enumerate(own.tolist())])
            assert torch.equal(getattr(taken, name), expected), name
    alike, one = torch.tensor([2, 0, 1]), blends.unstack()[2]
    assert same_tokens(blends.take(alike), blends.take(alike.expand(3, -1)))
    assert same_tokens(one.take(alike), blends.take(alike).unstack()[2])
    assert same_tokens(blends.take(torch.arange(4)), blends)
    learned = replace(blends, features=blends.features.clone().requires_grad_())
    learned.take(own).features.sum().backward()
    assert learned.features.grad[:, :, 0].tolist() == [[1, 0, 0, 1], [0, 2, 0, 0], [1, 0, 1, 0]]


def test_cpu_and_cuda_are_compared_with_all_that_allocators_look_at() -> None:
    assert {look for _, look in CASES_BESIDE} == {None, "fixation", "labels", "query"}
    for name, look in CASES_BESIDE:
        tokens = choices(name, 3, lambda x: x, look=look)
        if look is not None:
            assert not torch.equal(tokens.sites, choices(name, 3, lambda x: x).sites), "what is given counts"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "look"), CASES_BESIDE)
def test_rounding_decides_nothing_where_cpu_and_cuda_are_compared(name: str, look: str | None, batch: int) -> None:
    """Else the comparison, which runs on GPUs alone, would fail there for what is no bug."""

    def nudged(x: torch.Tensor) -> torch.Tensor:
        signs = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).sub(0.5).sign()
        return x * (1 + 5e-7 * signs) if x.is_floating_point() else x

    assert agree(choices(name, batch, nudged, look=look), choices(name, batch, lambda x: x, look=look))


@pytest.mark.parametrize("package", ["ptwt", "pywt"])
def test_a_package_that_is_missing_skips_one_allocator_on_gpus_and_names_itself(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed("Wavelet")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(pytest.skip.Exception, match=f"{package} is not installed, which Wavelet needs"):
        needed("Wavelet")
    for name in NAMES:
        if name != "Wavelet":
            needed(name)


@pytest.mark.parametrize("name", ["GridTopK", "HeatDiffusion", "PyramidTopK"])
def test_scores_are_no_part_of_all_scores(name: str) -> None:
    """Which safetensors does not write."""
    found = lod.allocate.make(name, 16, 16)(torch.rand(2, 3, 160, 128))
    assert found.scores.is_contiguous() and found.scores.untyped_storage().nbytes() == found.scores.nbytes


def test_reading_order_goes_down_and_along_and_keeps_what_is_equal() -> None:
    sites = torch.tensor([[0.9, 0.5, 0.0], [0.1, 0.5, 1.0], [0.5, 0.1, 0.0], [0.1, 0.5, 0.0], [0.2, 0.9, 2.0]])
    one = lod.TokenSet(sites, torch.arange(5.0), None, 14)
    assert one.reading_order().tolist() == [2, 1, 3, 0, 4]
    both = lod.TokenSet(torch.stack([sites, sites.flip(0)]), torch.rand(2, 5), None, 14)
    assert both.reading_order().tolist() == [[2, 1, 3, 0, 4], [2, 1, 3, 4, 0]]
    grid = lod.allocate.GridTopK(24, 16)(relevance=torch.rand(4, 6))
    assert torch.equal(
        grid.take(grid.reading_order()).sites, lod.allocate.Downsample(24, 16, rows=4)(relevance=torch.ones(4, 6)).sites
    )


@pytest.mark.parametrize("name", ["Downsample", "Hexagonal", "LogPolar", "Spiral"])
def test_bias_is_of_what_is_read_and_moves_no_site(name: str) -> None:
    """Of pictures, pyramids, and of a shared budget."""
    image, allocator = torch.rand(2, 3, 160, 208), lod.allocate.make(name, 20, 16)
    plain, sharp = allocator(image), allocator(image, bias=-0.5)
    assert torch.equal(plain.sites, sharp.sites) and plain.patches is not None and sharp.patches is not None
    expected = lod.gather_patches(image, plain.sites, 16, bias=-0.5)
    assert torch.allclose(sharp.patches, expected, atol=1e-5) and not torch.allclose(plain.patches, expected, atol=1e-3)
    assert torch.equal(allocator(lod.mipmap(image), bias=-0.5).patches, sharp.patches)
    blurred = allocator(image, bias=1.0).patches
    assert blurred is not None
    assert torch.allclose(blurred, lod.gather_patches(image, plain.sites, 16, bias=1.0), atol=1e-5)
    for index, one in enumerate(lod.allocate.TokenBank(allocator, 40)(image, bias=-0.5).unpack()):
        assert torch.allclose(one.patches, lod.gather_patches(image[index], one.sites, 16, bias=-0.5), atol=1e-5)


def test_bias_of_blends_is_refused() -> None:
    with pytest.raises(InputError, match="tokens of SoftVortex are blends"):
        lod.allocate.make("SoftVortex", 20, 16)(torch.rand(3, 64, 96), bias=-0.5)
    with pytest.raises(InputError, match="bias is nan"):
        lod.allocate.GridTopK(4, 16)(torch.rand(3, 64, 96), bias=math.nan)


@pytest.mark.parametrize("n", [11, 15])
def test_what_is_as_far_as_the_radius_is_within_on_all_sides(n: int) -> None:
    """Several cells away, too, to either side of the middle and above and below it."""
    for k in range(1, n // 2 + 1):
        relevance, c = torch.zeros(1, n, n), n // 2
        relevance[0, c, c], relevance[0, 0, 0] = 3.0, 1.0
        relevance[0, [c, c, c - k, c + k], [c - k, c + k, c, c]] = 2.0
        found = lod.allocate.find_fixations(relevance, 2, radius=k / n)[0]
        assert (found * n).floor().tolist() == [[c, c], [0, 0]], k


def test_a_peaks_own_cell_is_inhibited_whatever_the_radius() -> None:
    """Also where the vertex is farther from the cell's middle than the radius."""
    row = torch.zeros(1, 1, 16)
    row[0, 0, 4:7] = torch.tensor([2.0, 4.0, 3.0])
    found = lod.allocate.find_fixations(row, 3, radius=0.0)[0, :, 0]
    assert (found * 16).floor().tolist() == [5, 6, 4]


def test_little_heat_far_away_is_no_rounding_error() -> None:
    """What arrives is told apart down to a trillionth of the most."""
    relevance = torch.zeros(1, 1, 12)
    relevance[0, 0, 0] = 1
    tokens = lod.allocate.HeatDiffusion(12, length=0.5)(relevance=relevance)
    assert (tokens.sites[0, :, 0] * 12).int().tolist() == list(range(12))
    ratios = tokens.scores[0, 1:9] / tokens.scores[0, :8]  # of an infinite row it is 3 - 2 sqrt 2
    assert torch.allclose(ratios[1:], torch.full((7,), 3 - 2 * math.sqrt(2)), rtol=1e-5)


@pytest.mark.parametrize(("budget", "rows"), [(18, 6), (25, 5), (30, 6)])
def test_of_equal_lattices_that_of_the_fewest_rows(budget: int, rows: int) -> None:
    """Rounding does not choose among them."""
    sites = lod.allocate.Hexagonal(budget)(torch.empty(1, 1, 224, 224)).sites[0]
    assert len(sites[:, 1].unique()) == rows
