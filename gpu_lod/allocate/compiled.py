"""Allocators as one custom op, `torch.ops.gpu_lod.allocate`: what stands for their calls in compiled code.

The op runs the allocator when the graph runs, so values and settings are looked at then. In a graph of torch.compile
an allocator is known by its identity, on which torch guards; in a program of torch.export by what it was made with, so
that another process can run it.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from gpu_lod import operators
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.gather_patches import gather_patches
from gpu_lod.pyramid import Pyramid
from gpu_lod.token_set import TokenSet

if TYPE_CHECKING:
    from gpu_lod.allocate.base import Allocator

_alive: WeakValueDictionary[int, Allocator] = WeakValueDictionary()
"""By identity."""

kinds: dict[str, type[Allocator]] = {}
"""Classes of allocators by their names."""


def remember(allocator: Allocator) -> None:
    """So that graphs find it."""
    _alive[id(allocator)] = allocator


def traced(allocator: Allocator, image: Any, *others: Any) -> TokenSet:
    """What stands in a graph for a call of an allocator."""
    if image is None and others[0] is None:
        raise InputError(f"{type(allocator).__name__} needs an image, or a relevance map; pass image= or relevance=.")
    parameters = list(allocator.parameters()) if isinstance(allocator, nn.Module) else []
    shape = allocator.budget, allocator.patch, allocator.blends, allocator.weighs
    found = _operator.traced(parameters, _known_as(allocator), *shape, image, *others)
    sites, scores = found[:2]
    patches = None if image is None else found[2]
    weights = found[-1] if allocator.weighs else None
    return TokenSet(sites if allocator.moves else sites.detach(), scores, patches, allocator.patch, weights)


def _known_as(allocator: Allocator) -> str:
    """Its name in a graph."""
    if torch.compiler.is_dynamo_compiling():
        if torch.compiler.is_exporting():
            raise UnsupportedError("torch.export takes allocators with strict=False alone.")
        return f"#{id(allocator)}"  # torch guards on it
    kind, training = type(allocator).__name__, getattr(allocator, "training", False)
    return repr((kind, allocator._as_made(), training))


def _found(known_as: str) -> Allocator:
    """The allocator of such a name.

    Raises:
        UnsupportedError: it is of another process, or gone.
    """
    if not known_as.startswith("#"):
        return _made(known_as)
    found = _alive.get(int(known_as[1:]))
    if found is None:
        raise UnsupportedError("the graph's allocator is gone. Compile the function anew.")
    return found


@functools.lru_cache(64)
def _made(known_as: str) -> Allocator:
    kind, arguments, training = ast.literal_eval(known_as)
    allocator = kinds[kind](**arguments)
    return allocator.train(training) if isinstance(allocator, nn.Module) else allocator


class _Held(nn.Module):
    """An allocator, called as it is: without hooks, which the graph has."""

    def __init__(self, allocator: Any) -> None:
        super().__init__()
        self.allocator = allocator

    def forward(self, *given: Any) -> TokenSet:
        return self.allocator._tokens(*given)


def allocate(
    parameters: list[torch.Tensor],
    allocator: str,
    budget: int,
    patch: int,
    blends: bool,
    weighs: bool,
    image: torch.Tensor | Pyramid | None = None,
    relevance: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    fixation: Any = None,
    labels: torch.Tensor | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sites and scores, patches where there is an image, weights where the allocator gives some."""
    found, given = _found(allocator), (image, relevance, query, fixation, labels, mean, std)
    if all(map(_same, parameters, found.parameters() if isinstance(found, nn.Module) else ())):
        tokens = found._tokens(*given)
    else:  # of an exported program, or those that gradients are asked for
        held = _Held(copy.deepcopy(found))
        names = (name for name, _ in held.named_parameters())
        tokens = torch.func.functional_call(held, dict(zip(names, parameters, strict=True)), given)
    return tuple(x for x in (tokens.sites, tokens.scores, tokens.patches, tokens.weights) if x is not None)


def _same(given: torch.Tensor, own: torch.Tensor) -> bool:
    return given is own or (given.data_ptr() == own.data_ptr() and not given.requires_grad)


def _like(
    parameters: list[torch.Tensor],
    allocator: str,
    budget: int,
    patch: int,
    blends: bool,
    weighs: bool,
    image: torch.Tensor | Pyramid | None = None,
    relevance: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    fixation: Any = None,
    labels: torch.Tensor | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[torch.Tensor, ...]:
    """What `allocate` returns, without values."""
    top = image.levels[0] if isinstance(image, Pyramid) else image
    seen = relevance if top is None else top
    assert seen is not None
    cells = seen.shape[-2:] if top is None else [-(-side // patch) for side in top.shape[-2:]]
    lead = (*seen.shape[: -2 if top is None else -3], budget)
    sites = seen.new_empty(*lead, 3, dtype=torch.float32)
    found = [sites, seen.new_empty(lead, dtype=torch.float32)]
    if top is not None:
        kind = torch.float32 if blends and top.dtype == torch.uint8 else None
        found.append(operators.operators[gather_patches.__name__].fake(image, sites, patch, "clamp", mean, std, kind))
    if weighs:
        found.append(seen.new_empty(*lead, cells[0] * cells[1], dtype=torch.float32))
    return tuple(found)


_operator = operators.Operator(allocate, _like, differentiable=True)
