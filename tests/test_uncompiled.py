"""What breaks the graph of a compiled function runs as it stands between its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from images import noise
from torch.utils._pytree import tree_leaves

import gpu_lod as lod
from gpu_lod import allocate, vlm
from gpu_lod.errors import InputError


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Graphs:
    """What torch compiles of a function, as a backend sees it."""

    def __init__(self) -> None:
        self.traces: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.traces += [node.stack_trace or "" for node in graph.graph.nodes if node.op.startswith("call_")]
        return graph.forward

    @property
    def of_the_package(self) -> list[str]:
        return [trace for trace in self.traces if "gpu_lod/" in trace.replace("\\", "/").replace("/tests/", "")]


class Mine(allocate.GridTopK):
    pass


IMAGE, RELEVANCE = noise(2, 3, 64, 64), noise(2, 8, 8)
KEYS = noise(2, 64, 16)
ODD = allocate.SoftVortex(20, 8)
ODD.width = np.float64(0.3)
BANK = allocate.TokenBank(allocate.GridTopK(20, 8), 50)
VORTICES = allocate.VortexLearned(20, 8)
COVERING = allocate.SoftTopKCoverage(20, 8)
ADAPTIVE = allocate.AdaptiveStratified(20, 8, width=16)
LOOK = vlm.Glances(20, 10, patch=8)
LOOKED = LOOK(IMAGE, RELEVANCE)

CALLS: dict[str, Callable[[], Any]] = {
    "an allocator of one's own": lambda: Mine(20, 8)(IMAGE * 1, RELEVANCE),
    "an allocator with a setting that no graph holds": lambda: ODD(IMAGE * 1, RELEVANCE),
    "TokenBank": lambda: BANK(IMAGE * 1, RELEVANCE),
    "tree_cut": lambda: allocate.tree_cut([RELEVANCE[:, ::n, ::n] * 1 for n in (2, 4, 8)], RELEVANCE, 20).leaves,
    "soft_counts": lambda: VORTICES.soft_counts(IMAGE * 1, RELEVANCE),
    "soft_mask": lambda: COVERING.soft_mask(IMAGE * 1, RELEVANCE),
    "coverage_penalty": lambda: COVERING.coverage_penalty(IMAGE * 1, RELEVANCE),
    "errors": lambda: allocate.TokenDAG(20, 8).errors(IMAGE * 1),
    "expected_loss": lambda: ADAPTIVE.expected_loss(KEYS[:, :49, 0].unflatten(1, (7, 7)) * 1, KEYS[:, 0]),
    "distribution": lambda: ADAPTIVE.distribution(KEYS[:, 0])[0].probs,
    "glances": lambda: vlm.glances(allocate.GridTopK(20, 8), IMAGE * 1, RELEVANCE),
    "Glances": lambda: LOOK(IMAGE * 1, RELEVANCE),
    "ragged": lambda: LOOKED.ragged(),
    "TokenMemory": lambda: vlm.TokenMemory(20, 8).update(IMAGE * 1, RELEVANCE),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_what_a_graph_cannot_take_is_compiled(name: str) -> None:
    call, graphs = CALLS[name], Graphs()
    found = torch.compile(call, backend=graphs)()
    for one, two in zip(tree_leaves(found), tree_leaves(call()), strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    assert graphs.of_the_package == []
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(call, backend=graphs, fullgraph=True)()


def test_one_function_is_no_other_one_compiled_again() -> None:
    """Torch gives up on code that it has compiled eight times, and may be asked to refuse the second."""
    calls = [CALLS[name] for name in ("soft_mask", "errors", "distribution", "glances")]
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.compile(lambda: [call() for call in calls], backend="eager")()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda image: lod.gaussian(image * 1, backend="cpu"), "backend is"),  # type: ignore[arg-type]
        (lambda image: lod.collapse(lod.gaussian(image * 1)), "gaussian pyramid"),
        (lambda image: Mine(20, 8)(image * 1, RELEVANCE[:, 1:]), "relevance is"),
    ],
)
def test_nothing_of_a_call_that_is_refused_is_compiled(call: Callable[..., Any], words: str) -> None:
    graphs = Graphs()
    with pytest.raises(InputError, match=words):
        torch.compile(call, backend=graphs)(IMAGE)
    assert not [trace for trace in graphs.of_the_package if "operators.py" not in trace]  # ops of calls before it


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, but from those for whom it is an error
def test_gradients_flow_through_what_runs_between_graphs() -> None:
    weight = torch.ones((), requires_grad=True)

    def loss() -> torch.Tensor:
        mask = COVERING.soft_mask(IMAGE, RELEVANCE + RELEVANCE.flip(-1) * weight)
        return (mask * RELEVANCE[:, :1]).square().sum() * 2

    (expected,) = torch.autograd.grad(loss(), weight)
    (found,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(), weight)
    assert expected.abs() > 1e-5 and torch.equal(found, expected)


def test_a_compiled_function_inside_stays_compiled() -> None:
    """What a program compiled itself."""
    graphs, ran, relevance = Graphs(), [], noise(2, 64, 64)

    class Compiled(allocate.GridTopK):
        def _pooled(self, values: torch.Tensor) -> torch.Tensor:
            ran.append(torch.compile(lambda x: x * 2, backend=graphs)(values))
            return super()._pooled(ran[-1])

    found = torch.compile(lambda image: Compiled(20, 8)(image, relevance), backend="eager")(IMAGE)
    assert ran and graphs.traces and torch.equal(found.sites, allocate.GridTopK(20, 8)(IMAGE, relevance).sites)
