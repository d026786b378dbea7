"""Allocators on CUDA tensors: they choose what they choose on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from relevance import KINDS, maps

import gpu_lod as lod

pytestmark = pytest.mark.gpu


NEEDS = {"Wavelet": ("ptwt", "pywt")}
"""Packages of the extra `allocate` without which an allocator chooses nothing; a machine with a GPU may lack them."""


def needed(name: str) -> None:
    """Skip the test of an allocator whose packages are missing, and of no other."""
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"{package} is not installed, which {name} needs")


GRAPHS = lod.allocate.names()
"""Those that a CUDA graph can hold: all of them."""


ORDERED = "GridTopK", "PyramidTopK", "Random"
"""Those that compare relevance, and compute nothing of it."""


def moved(allocator: Any) -> Any:
    return allocator.cuda() if isinstance(allocator, torch.nn.Module) else allocator


LOOKS = {
    name: [None, *({"fixation", "labels", "query"} & {*made.takes})]
    for name, made in ((name, lod.allocate.make(name, 1)) for name in lod.allocate.names())
}
"""What each is given beside a picture and relevance: nothing that it can do without, and one such thing."""
CASES = [(name, look) for name, looks in LOOKS.items() for look in sorted(looks, key=str)]


def choices(
    name: str,
    batch: int,
    place: Callable[[torch.Tensor], torch.Tensor],
    move: Callable[[Any], Any] = lambda x: x,
    look: str | None = None,
) -> lod.TokenSet:
    """What an allocator chooses where rounding decides nothing: no two cells, or means of cells, are alike, and the
    picture has edges, for superpixels of noise alone grow as the last bits will.

    Args:
        place: of what it is given.
        move: of the allocator.
        look: what is given though it can do without: a fixation for each picture, labels of pixels, or a query.
    """
    torch.manual_seed(0)
    rows, columns, patch = 19, 26, 14
    size = (rows * patch - 5, columns * patch - 3)
    blocks = torch.nn.functional.interpolate(torch.rand(batch, 3, 8, 11), size)
    image = 0.8 * blocks + 0.2 * torch.rand(batch, 3, *size)
    image[:, :, 60:120, 80:200] = 0.1
    relevance = torch.rand(batch, rows, columns) * torch.linspace(0.1, 1, columns)
    allocator = lod.allocate.make(name, 97, patch)
    more = {"query": torch.randn(batch, allocator.query_width or 8)} if "query" in allocator.needs else {}
    if look == "query":  # weights of bands are not negative
        more["query"] = torch.rand(batch, allocator.query_width or 8)
    if look == "fixation":
        more["fixation"] = torch.tensor([[0.31, 0.62], [0.93, 0.07], [0.52, 0.48]])[:batch]
    if look == "labels":  # ellipses of other sizes: 0 is what is behind them
        y, x = (torch.linspace(-1, 1, n) for n in size)
        away = (y[:, None] * torch.linspace(1, 2, batch)[:, None, None]) ** 2 + x**2
        more["labels"] = (3 - (away * 4).floor().clamp(max=3)).long()
    with torch.no_grad():
        tokens: lod.TokenSet = move(allocator)(
            place(image), place(relevance), **{key: place(value) for key, value in more.items()}
        )
    return tokens


def agree(one: lod.TokenSet, two: lod.TokenSet) -> bool:
    return (
        torch.allclose(one.sites.cpu(), two.sites, atol=1e-4)
        and torch.allclose(one.scores.cpu(), two.scores, rtol=1e-3, atol=1e-4)
        and float((one.patches.cpu() - two.patches).abs().mean()) < 5e-3
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "look"), CASES)
def test_cpu_and_cuda_agree(name: str, look: str | None, batch: int) -> None:
    needed(name)
    there = choices(name, batch, torch.Tensor.cuda, moved, look)
    assert there.sites.is_cuda and there.scores.is_cuda and there.patches.is_cuda
    assert agree(there, choices(name, batch, lambda x: x, look=look))


@torch.no_grad()
@pytest.mark.parametrize("alone", [False, True], ids=["given", "alone"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_is_a_cuda_graph(name: str, alone: bool) -> None:
    """And chooses of new pictures what a call does."""
    needed(name)
    allocator = moved(lod.allocate.make(name, 97, 14))
    more = {"query": torch.randn(2, allocator.query_width or 8).cuda()} if "query" in allocator.needs else {}
    image, relevance = torch.rand(2, 3, 19 * 14, 26 * 14, device="cuda"), torch.rand(2, 19, 26, device="cuda")
    alone = alone and "relevance" in allocator.needs
    plan = lod.plan(allocator, image, None if alone else relevance, **more)
    assert plan.replays and "CUDA graph" in plan.reason, plan.reason
    for _ in range(3):
        image, relevance = torch.rand_like(image), torch.rand_like(relevance)
        found = plan(image, *([] if alone else [relevance]), *more.values())
        expected = allocator(image, None if alone else relevance, **more)
        assert torch.allclose(found.sites, expected.sites, atol=1e-5)
        assert torch.allclose(found.patches, expected.patches, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compilers
@pytest.mark.parametrize("compiler", ["aot_eager", "cudagraphs"])
@pytest.mark.parametrize("name", ["GridTopK", "PseudoLogPolar", "SoftVortex", "TokenDAG"])
def test_compiled(name: str, compiler: str) -> None:
    """In one graph, of new pictures too; with gradients, but in a CUDA graph."""
    torch._dynamo.reset()
    allocator = moved(lod.allocate.make(name, 97, 14))
    run = torch.compile(lambda *images: allocator(*images), fullgraph=True, backend=compiler)
    for _ in range(3):
        image, relevance = torch.rand(2, 3, 19 * 14, 26 * 14, device="cuda"), torch.rand(2, 19, 26, device="cuda")
        gradients = []
        for call in (run, allocator):
            leaf = image.clone().requires_grad_(compiler == "aot_eager")
            with torch.set_grad_enabled(compiler == "aot_eager"):
                tokens = call(leaf, relevance)
            gradients.append([tokens.sites.detach().clone(), tokens.patches.detach().clone()])
            if leaf.requires_grad:
                gradients[-1].append(torch.autograd.grad(tokens.patches.square().sum(), leaf)[0])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", lod.allocate.names())
def test_exactly_k_of_any_relevance(name: str, kind: str) -> None:
    """Ties, zeros, infinities: what a stable sort has to order. Where no sum is rounded, as on the CPU."""
    needed(name)
    torch.manual_seed(0)
    relevance, image = maps(kind, 2, 9, 9), torch.rand(2, 3, 36, 36)
    allocator = lod.allocate.make(name, 30, 4)
    more = {"query": torch.randn(2, allocator.query_width or 8)} if "query" in allocator.needs else {}
    expected = allocator(image, relevance, **more)
    tokens = moved(allocator)(image.cuda(), relevance.cuda(), **{key: value.cuda() for key, value in more.items()})
    assert tokens.sites.shape == (2, 30, 3) and torch.isfinite(tokens.sites).all()
    if not allocator.blends:
        assert all(len(sites.unique(dim=0)) == 30 for sites in tokens.sites)
    if name in ORDERED:
        assert torch.equal(tokens.sites.cpu(), expected.sites) and torch.equal(tokens.scores.cpu(), expected.scores)
