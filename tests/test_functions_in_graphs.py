"""Functions that are no verbs, and look at values, as custom ops in compiled and exported code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from images import noise
from torch.utils._pytree import tree_leaves

import gpu_lod as lod
from gpu_lod import allocate, vlm
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.operators import functions

BATCH, SIZE = 2, (64, 64)
TOKENS, KEYS, TEXT = noise(BATCH, 64, 6), noise(BATCH, 64, 5), noise(BATCH, 7, 6)
RELEVANCE = noise(BATCH, 8, 8)
IMAGE = noise(BATCH, 3, *SIZE)
CHOSEN = allocate.FoveatedPyramid(20, 8)(IMAGE, RELEVANCE)
ATTENTION = noise(BATCH, 4, 7, 64).softmax(-1)
PLACES = vlm.grid_positions(CHOSEN.sites, SIZE, 8)[0, :, 1:].contiguous()
QUERY, GESTALT = noise(6), noise(BATCH, 4)
SCORER = vlm.ContextualizedRelevance(6, 4, patch=16, hidden=8)
MAPS = lod.feature_maps(IMAGE)
SELECTED = vlm.straight_through_top_k(RELEVANCE, 20)
OFTEN = torch.arange(64.0).expand(BATCH, -1) + 1


@dataclass(frozen=True)
class Case:
    run: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    """Those that gradients are asked in, if it has any."""
    op: str
    refused: Callable[..., Any]
    """A call that is refused for its shapes or numbers."""
    bad: float | None = torch.nan
    """What an element of the first input is refused for when the graph runs; None if it may be anything."""


CASES = {
    "soft_top_k": Case(
        lambda x: allocate.soft_top_k(x, 9, 0.1), (RELEVANCE.flatten(1),), "soft_top_k",
        lambda x: allocate.soft_top_k(x, 65, 0.1),
    ),
    "coverage_loss": Case(
        lambda w, x: allocate.coverage_loss(x, w, (3, 4)), (noise(BATCH, 20), CHOSEN.sites), "coverage_loss",
        lambda w, x: allocate.coverage_loss(x, w[:, 1:]),
    ),
    "dead_bin_loss": Case(
        lambda x: allocate.dead_bin_loss(x, 0.9), (noise(BATCH, 9),), "dead_bin_loss",
        lambda x: allocate.dead_bin_loss(x, 2.0),
    ),
    "find_fixations": Case(
        lambda x: allocate.find_fixations(x, 3, radius=0.1), (RELEVANCE,), "find_fixations",
        lambda x: allocate.find_fixations(x, 0),
    ),
    "rebuild": Case(
        lambda x: lod.rebuild(replace(CHOSEN, patches=x), SIZE, [0.1, 0.2, 0.3]), (CHOSEN.patches,), "paint",
        lambda x: lod.rebuild(replace(CHOSEN, patches=x[:, 1:]), SIZE), None,
    ),
    "rebuild, bicubic": Case(
        lambda x: lod.rebuild(replace(CHOSEN, patches=x), SIZE, mode="bicubic"), (CHOSEN.patches,), "paint",
        lambda x: lod.rebuild(replace(CHOSEN, patches=x), SIZE, mode="cubic"), None,
    ),
    "bipartite_merge": Case(
        lambda sizes, x: vlm.bipartite_merge(x, KEYS, 40, 1, sizes), (OFTEN, TOKENS), "bipartite_merge",
        lambda sizes, x: vlm.bipartite_merge(x, KEYS, 64),
    ),
    "vision_zip": Case(
        lambda received, x: vlm.vision_zip(x, KEYS, received, 20, 5), (OFTEN, TOKENS), "vision_zip",
        lambda received, x: vlm.vision_zip(x, KEYS, received, 60, 5),
    ),
    "sparse_vlm": Case(
        lambda x: vlm.sparse_vlm(x, TEXT, ATTENTION, 20, 4), (TOKENS,), "sparse_vlm",
        lambda x: vlm.sparse_vlm(x, TEXT, ATTENTION, 20, 4, share=2.0), None,
    ),
    "straight_through_top_k": Case(
        lambda x: vlm.straight_through_top_k(x, 20), (RELEVANCE,), "best_of",
        lambda x: vlm.straight_through_top_k(x[0, 0], 20),
    ),
    "gumbel_top_k": Case(
        lambda x: vlm.gumbel_top_k(x, 20), (RELEVANCE.half(),), "best_of", lambda x: vlm.gumbel_top_k(x, 20, noise=-1.0)
    ),
    "query_similarity": Case(
        lambda q, x: vlm.query_similarity(x, q, (8, 8)), (QUERY, TOKENS), "query_similarity",
        lambda q, x: vlm.query_similarity(x, q, (8, 9)),
    ),
    "ContextualizedRelevance": Case(
        lambda x, q: SCORER.score(MAPS, x, q), (QUERY, GESTALT), "row_of", lambda x, q: SCORER(MAPS, x[1:], q)
    ),
    "relevance_map": Case(
        lambda x: vlm.relevance_map(x, CHOSEN, SIZE, -torch.inf), (CHOSEN.scores,), "scattered",
        lambda x: vlm.relevance_map(x[:, 1:], CHOSEN, SIZE),
    ),
    "saliency_relevance": Case(
        lambda x: vlm.saliency_relevance(x, 16), (IMAGE,), "saliency_relevance",
        lambda x: vlm.saliency_relevance(x, 0),
    ),
    "attention_entropy": Case(
        vlm.attention_entropy, (ATTENTION,), "attention_entropy", lambda x: vlm.attention_entropy(x[0, 0, 0])
    ),
    "mrope_positions": Case(
        lambda start, x: vlm.mrope_positions(x, SIZE, 8, start, rounded=False),
        (torch.tensor([3.0, 5.0]), CHOSEN.sites), "mrope_positions",
        lambda start, x: vlm.mrope_positions(x, SIZE, 8, start[:1, None]),
    ),
    "sample_position_table": Case(
        lambda x, table: vlm.sample_position_table(table, x, (8, 8), (16, 16)), (PLACES, TOKENS[0]),
        "sample_position_table", lambda x, table: vlm.sample_position_table(table, x, (8, 9), (16, 16)),
    ),
    "TokenSet.take": Case(
        lambda x: CHOSEN.take(x), (torch.tensor([3, 0, 3]),), "places_among", lambda x: CHOSEN.take(x[None, None]), 20
    ),
    "Selection.take": Case(
        lambda x: SELECTED.take(x), (TOKENS,), "places_in", lambda x: SELECTED.take(x[0]), None
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True, **how)


def tensors(found: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def losses(found: Any) -> torch.Tensor:
    outputs = [x for x in tensors(found)[: 1 if isinstance(found, vlm.Merged) else None] if x.requires_grad]
    return sum((x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in outputs)  # type: ignore[return-value]


def test_every_function_is_called_here() -> None:
    assert {case.op for case in CASES.values()} == set(functions)


@pytest.mark.parametrize("name", CASES)
def test_one_graph_holds_it_and_its_gradients(name: str) -> None:
    case = CASES[name]
    run = compiled(case.run)
    xs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs)
    torch.manual_seed(0)
    expected = case.run(*xs)
    torch.manual_seed(0)
    found = run(*xs)
    assert type(found) is type(expected)
    for one, two in zip(tensors(found), tensors(expected), strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)
        # The sizes of merged tokens are of an op that has gradients.
        assert one.requires_grad == two.requires_grad or (one.requires_grad and isinstance(found, vlm.Merged))
    if not functions[case.op].differentiable:
        return
    some = [x for x in xs if x.requires_grad]
    eager = torch.autograd.grad(losses(expected), some, allow_unused=True, retain_graph=True)
    for one, two in zip(torch.autograd.grad(losses(found), some, allow_unused=True), eager, strict=True):
        # Compiled code has zeros where nothing depends on an input.
        assert torch.equal(torch.zeros_like(one) if two is None else two, one) if one is not None else two is None
    assert any(one is not None and one.any() for one in eager)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bad is not None])
def test_values_are_refused_when_the_graph_runs(name: str) -> None:
    case = CASES[name]
    first, *others = case.inputs
    run = compiled(case.run)
    run(first, *others)
    wrong = first.clone()
    wrong.view(-1)[0] = case.bad
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(InputError, match=r"expected|not finite"):
        run(wrong, *others)
    with pytest.raises(InputError, match=r"expected|not finite"):
        case.run(wrong, *others)


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_numbers_are_refused_while_compiling(name: str) -> None:
    case = CASES[name]
    with pytest.raises(InputError) as plain:
        case.refused(*case.inputs)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="InputError"):
        compiled(case.refused)(*case.inputs)
    torch._dynamo.reset()
    with pytest.raises(InputError) as broken:
        torch.compile(case.refused, backend="eager")(*case.inputs)
    assert str(broken.value) == str(plain.value)


def test_one_function_is_no_other_one_compiled_again() -> None:
    """Torch compiles each of itself where it can go into no graph with others, counts by the code how often it does,
    and may be asked to refuse the second time."""
    calls = [
        (vlm.attention_entropy, RELEVANCE),
        (allocate.dead_bin_loss, RELEVANCE[0]),
        (vlm.saliency_relevance, IMAGE),
    ]

    def each() -> list[torch.Tensor]:
        found = []
        for function, values in calls:
            try:
                torch._dynamo.graph_break()
                found.append(function(values))
            finally:
                found.append(values)
        return found

    with torch._dynamo.config.patch(error_on_recompile=True):
        found = torch.compile(each, backend="aot_eager")()
    for one, two in zip(tensors(found), tensors(each()), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["soft_top_k", "bipartite_merge", "mrope_positions", "find_fixations"])
def test_opcheck(name: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "soft_top_k": (RELEVANCE.flatten(1).double().requires_grad_(), 9, 0.1),
        "bipartite_merge": (TOKENS.half().requires_grad_(), KEYS, 40, 1, OFTEN),
        "mrope_positions": (CHOSEN.sites, SIZE, 8, 3),
        "find_fixations": (RELEVANCE, 3),
    }
    operator = functions[name]
    torch.library.opcheck(operator.op, tuple(operator.arguments(*arguments[name])))


@pytest.mark.parametrize("kind", [torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_fakes_have_the_dtypes_that_functions_give(kind: torch.dtype) -> None:
    values = (RELEVANCE.flatten(1) * 9).to(kind)
    tokens = (TOKENS * 9).to(kind)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("soft_top_k", (values, 9, 0.1)),
        ("coverage_loss", (CHOSEN.sites, values[:, :20])),
        ("dead_bin_loss", (values,)),
        ("find_fixations", (RELEVANCE.to(kind), 2)),
        ("bipartite_merge", (tokens, KEYS, 30)),
        ("vision_zip", (tokens, KEYS.to(kind), values, 20, 0)),
        ("sparse_vlm", (tokens, TEXT.to(kind), ATTENTION[:, 0], 0, 4, torch.ones(BATCH, 7))),
        ("attention_entropy", (values,)),
        ("sample_position_table", (tokens[0], PLACES.to(kind), (8, 8), (8, 8), "bilinear", True)),
        ("mrope_positions", (CHOSEN.sites, SIZE, 8, values[:, 0])),
        ("places_among", (torch.arange(9).to(torch.uint8), 9)),
    ]
    if kind.is_floating_point:
        calls += [("query_similarity", (tokens, QUERY.to(kind))), ("row_of", (QUERY.to(kind), "query", 2, 6))]
        calls += [("query_similarity", (tokens[0], QUERY)), ("best_of", (values, 9, 0.1, torch.float32))]
        calls += [("scattered", (CHOSEN.scores.to(kind), CHOSEN.sites, 8, SIZE, None))]
    if kind != torch.int64:
        assert CHOSEN.patches is not None
        calls += [("paint", ((CHOSEN.patches * 9).to(kind), CHOSEN.sites, SIZE, None))]
    if kind not in (torch.int64, torch.float64):
        calls += [("saliency_relevance", ((IMAGE[0] * 9).to(kind), 16))]
    for name, given in calls:
        flat = functions[name].arguments(*given)
        torch.library.opcheck(functions[name].op, tuple(flat), test_utils=("test_schema", "test_faketensor"))


def test_sizes_share_a_graph() -> None:
    def step(relevance: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        chosen = vlm.straight_through_top_k(relevance, 9)
        kept: torch.Tensor = chosen.take(tokens)
        return vlm.bipartite_merge(kept, kept, 3).tokens.sum() + allocate.soft_top_k(relevance, 5, 0.1).square().sum()

    run = compiled(step, dynamic=True)
    run(noise(BATCH, 40), noise(BATCH, 40, 4))
    for count in (50, 63):
        relevance, tokens = noise(BATCH, count), noise(BATCH, count, 4)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = run(relevance, tokens)
        torch.testing.assert_close(found, step(relevance, tokens))


def test_a_step_of_training_is_one_graph() -> None:
    """What an allocator, its losses and a choice with gradients are together."""
    learner = allocate.VortexLearned(20, 8)
    weight = torch.nn.Parameter(torch.ones(()))

    def step(image: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
        tokens = learner(image, relevance**weight)
        chosen = vlm.straight_through_top_k(tokens.scores, 10)
        picture = lod.rebuild(tokens, SIZE).image
        return (
            allocate.coverage_loss(tokens.sites, tokens.scores.abs() + 1)
            + (chosen.weights * tokens.scores.gather(1, chosen.indices)).sum()
            + (picture - image).square().mean()
        )

    learned = [weight, *learner.parameters()]
    expected = torch.autograd.grad(loss := step(IMAGE, RELEVANCE), learned, allow_unused=True)
    found = torch.autograd.grad(one := compiled(step)(IMAGE, RELEVANCE), learned, allow_unused=True)
    torch.testing.assert_close(one, loss)
    for mine, plain in zip(found, expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, torch.zeros_like(mine) if plain is None else plain)
    assert found[0].abs() > 1e-5


def test_autocast_is_what_it_is_in_plain_calls() -> None:
    def run(tokens: torch.Tensor, query: torch.Tensor) -> list[torch.Tensor]:
        merged = vlm.bipartite_merge(tokens, tokens, 30)
        scores = SCORER(MAPS, query, GESTALT)
        return [merged.tokens, vlm.query_similarity(tokens, query), scores, allocate.soft_top_k(tokens[0], 3, 0.1)]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one, two in zip(compiled(run)(TOKENS, QUERY), run(TOKENS, QUERY), strict=True):
            assert one.dtype == two.dtype
            torch.testing.assert_close(one, two)


def test_a_program_is_exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, relevance: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = vlm.straight_through_top_k(relevance, 9)
            return chosen.take(tokens), allocate.find_fixations(relevance[..., None], 2)

    given, n = (RELEVANCE.flatten(1), TOKENS), torch.export.Dim("n", min=9)
    program = torch.export.export(Model(), given, dynamic_shapes=({1: n}, {1: n}))
    for inputs in (given, (noise(BATCH, 40), noise(BATCH, 40, 6))):
        for one, two in zip(program.module()(*inputs), Model()(*inputs), strict=True):
            assert torch.equal(one, two)
    with pytest.raises(InputError, match="holds NaN"):
        program.module()(given[0] * torch.nan, TOKENS)


def test_gradients_of_gradients_are_refused() -> None:
    x = RELEVANCE.flatten(1).clone().requires_grad_()
    found = torch.compile(lambda x: allocate.soft_top_k(x, 9, 0.1), backend="eager", fullgraph=True)(x)
    with pytest.raises(UnsupportedError, match="gradients of gradients"):
        torch.autograd.grad(found.square().sum(), x, create_graph=True)


def test_numbers_and_arrays_go_where_tensors_do() -> None:
    def run(start: Any, places: Any, scores: Any) -> list[torch.Tensor]:
        return [
            vlm.mrope_positions(CHOSEN.sites, SIZE, 8, start),
            vlm.sparse_vlm(scores, TEXT, ATTENTION, 20, 4).tokens,
            vlm.sample_position_table(TOKENS[0], places, (8, 8), (16, 16)),
        ]

    for start in (7, np.array([3, 4])):
        given = start, PLACES.numpy(), TOKENS.numpy()
        for one, two in zip(compiled(run)(*given), run(*given), strict=True):
            assert torch.equal(one, two)
    with pytest.raises(InputError, match="start is list"):
        torch.compile(lambda: vlm.mrope_positions(CHOSEN.sites, SIZE, 8, [3, 4]), backend="eager")()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda n: allocate.soft_top_k(RELEVANCE.flatten(1), n, 0.1), (3, 4, 5)),
        (lambda n: vlm.bipartite_merge(TOKENS, KEYS, n, n).tokens, (3, 4, 5)),
        (lambda n: vlm.mrope_positions(CHOSEN.sites, (n, 64), 8), (64, 72, 80)),
        (lambda n: lod.rebuild(CHOSEN, SIZE, n).image, (1, 2, 3)),
        (lambda n: lod.mipmap(IMAGE, n)[-1], (3, 4, 5)),
    ],
)
def test_a_number_that_changes_is_one_of_the_graph(
    call: Callable[[int], torch.Tensor], values: tuple[int, ...]
) -> None:
    run = compiled(call)
    for value in values:
        assert torch.equal(run(value), call(value))


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda x: allocate.soft_top_k(RELEVANCE.flatten(1), 9, x), torch.tensor(0.1)),
        (lambda x: allocate.find_fixations(RELEVANCE, 2, radius=x), np.float32(0.1)),
        (lambda x: vlm.straight_through_top_k(RELEVANCE, x).indices, np.int64(3)),
        (lambda x: lod.rebuild(CHOSEN, (x, 64)).image, np.int64(64)),
        (lambda x: lod.mipmap(IMAGE, mean=x)[0], torch.tensor([0.1, 0.2, 0.3])),
    ],
)
def test_what_has_no_value_in_a_graph_breaks_it(call: Callable[[Any], torch.Tensor], value: Any) -> None:
    assert torch.equal(torch.compile(call, backend="aot_eager")(value), call(value))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"no value yet|compiled code holds"):
        compiled(call)(value)


def test_sizes_that_a_graph_does_not_know_fit_those_that_it_does() -> None:
    query, places = torch.nn.Parameter(QUERY.expand(BATCH, -1).clone()), torch.nn.Parameter(torch.ones(BATCH, 3))

    def run(tokens: torch.Tensor, sites: torch.Tensor, start: torch.Tensor) -> list[torch.Tensor]:
        taken = replace(CHOSEN, sites=sites, scores=sites[..., 0], patches=None).take(places.long())
        return [vlm.query_similarity(tokens, query), vlm.mrope_positions(sites, SIZE, 8, start[:BATCH]), taken.sites]

    given = TOKENS, CHOSEN.sites, torch.arange(3)
    for one, two in zip(compiled(run, dynamic=True)(*given), run(*given), strict=True):
        assert torch.equal(one, two)


def test_features_that_are_fewer_than_were_chosen_from_are_refused() -> None:
    def run(relevance: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return vlm.straight_through_top_k(relevance, 64).take(features)

    for call in (run, compiled(run)):
        with pytest.raises(InputError, match="N of 64 or more"):
            call(RELEVANCE, TOKENS[:, :63])
