"""Allocators as one custom op, `torch.ops.gpu_lod.allocate`: what stands for their calls in compiled code.

The op is given what an allocator is made with, and its parameters, as they are where it is called; it makes such a one
when the graph runs, and values are looked at then. So a graph holds no allocator, and another process can run it.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.gather_patches import gather_patches
from gpu_lod.operators import Operator, operators
from gpu_lod.pyramid import Pyramid
from gpu_lod.token_set import TokenSet

if TYPE_CHECKING:
    from gpu_lod.allocate.base import Allocator

kinds: dict[str, type[Allocator]] = {}
"""Classes of allocators by their names."""


def traceable(allocator: Allocator) -> bool:
    """Whether it is of a class of the package, and no more than that, as pruned ones are: what another does besides,
    nobody knows."""
    if type(allocator)._own is not type(allocator) or "choose" in allocator.__dict__:
        return False
    return _names(allocator) == list(type(allocator).learns)


def _names(allocator: Allocator) -> list[str]:
    return [name for name, _ in allocator.named_parameters()] if isinstance(allocator, nn.Module) else []


def traced(allocator: Allocator, image: Any, relevance: Any, *others: Any) -> TokenSet:
    """What stands in a graph for a call of an allocator."""
    if image is None and relevance is None:
        raise InputError(f"{type(allocator).__name__} needs an image, or a relevance map; pass image= or relevance=.")
    allocator._frame(image, relevance)  # for what it refuses
    parameters = list(allocator.parameters()) if isinstance(allocator, nn.Module) else []
    training = isinstance(allocator, nn.Module) and allocator.training
    ints: list[int] = []
    floats: list[float] = []
    settings = [
        f"{name!r}: {_written(value, ints, floats)}" for name, value in allocator._settings() if name not in _SHAPE
    ]
    known_as = f"({type(allocator).__name__!r}, {training}, {{{', '.join(settings)}}}, {_names(allocator)!r})"
    found = _operator.traced(
        parameters, known_as, ints, floats, allocator.budget, allocator.patch,
        allocator.blends, allocator.weighs, image, relevance, *others,
    )  # fmt: skip
    sites, scores = found[:2]
    patches = None if image is None else found[2]
    weights = found[-1] if allocator.weighs else None
    fixation = others[1]
    moves = allocator.moves or (allocator.follows and isinstance(fixation, torch.Tensor) and fixation.requires_grad)
    return TokenSet(sites if moves else sites.detach(), scores, patches, allocator.patch, weights)


_SHAPE = ("budget", "patch")
"""Settings that are arguments of their own."""


def _written(value: Any, ints: list[int], floats: list[float]) -> str:
    """A setting as Python writes it, but numbers, which a graph may have as symbols: each as the set of its place among
    the integers, or as a list of that among the others."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, int):
        ints.append(value)
        return f"{{{len(ints) - 1}}}"
    if isinstance(value, float):
        floats.append(value)
        return f"[{len(floats) - 1}]"
    if isinstance(value, (tuple, list)):
        return f"({''.join(f'{_written(item, ints, floats)}, ' for item in value)})"
    raise UnsupportedError(
        f"an allocator was given a {type(value).__name__}; in compiled code expected numbers, strings and tuples of "
        "them. Set a number."
    )


def _read(value: Any, ints: Sequence[int], floats: Sequence[float]) -> Any:
    """The setting that `_written` wrote."""
    if isinstance(value, (set, list)):
        (place,) = value
        return ints[place] if isinstance(value, set) else floats[place]
    return tuple(_read(item, ints, floats) for item in value) if isinstance(value, tuple) else value


@functools.lru_cache(64)
def _made(kind: str, training: bool, settings: tuple[tuple[str, Any], ...]) -> Allocator:
    if kind not in kinds:
        raise UnsupportedError(f"the program calls an allocator {kind}, and this version has none. Take a later one.")
    allocator = kinds[kind](**dict(settings))
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
    known_as: str,
    ints: Sequence[int],
    floats: Sequence[float],
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
    bias: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Sites and scores, patches where there is an image, weights where the allocator gives some."""
    kind, training, written, names = ast.literal_eval(known_as)
    settings = {name: _read(value, ints, floats) for name, value in written.items()}
    found = _made(kind, training, tuple((settings | {"budget": budget, "patch": patch}).items()))
    given = image, relevance, query, fixation, labels, mean, std, bias
    if isinstance(found, nn.Module):
        held = _Held(copy.deepcopy(found))  # calls at once replace parameters of their own
        if names != (own := list(found.learns)):
            raise UnsupportedError(
                f"the parameters of {kind} are {', '.join(names)} in the program; expected {', '.join(own)}. Export it "
                "with this version."
            )
        replaced = {f"allocator.{name}": value for name, value in zip(own, parameters, strict=True)}
        tokens = torch.func.functional_call(held, replaced, given)
    else:
        tokens = found._tokens(*given)
    return tuple(x for x in (tokens.sites, tokens.scores, tokens.patches, tokens.weights) if x is not None)


def _like(
    parameters: list[torch.Tensor],
    known_as: str,
    ints: Sequence[int],
    floats: Sequence[float],
    budget: int,
    patch: int,
    blends: bool,
    weighs: bool,
    image: torch.Tensor | Pyramid | None,
    relevance: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, ...]:
    """What `allocate` returns, without values."""
    mean, std, bias = others[-3:]
    top = image.levels[0] if isinstance(image, Pyramid) else image
    seen = relevance if top is None else top
    assert seen is not None
    cells = seen.shape[-2:] if top is None else [-(-side // patch) for side in top.shape[-2:]]
    lead = (*seen.shape[: -2 if top is None else -3], budget)
    sites = seen.new_empty(*lead, 3, dtype=torch.float32)
    found = [sites, seen.new_empty(lead, dtype=torch.float32)]
    if top is not None:
        kind = torch.float32 if blends and top.dtype == torch.uint8 else None
        found.append(
            operators[gather_patches.__name__].fake(image, sites, patch, "clamp", mean, std, kind, "auto", bias)
        )
    if weighs:
        found.append(seen.new_empty(*lead, cells[0] * cells[1], dtype=torch.float32))
    return tuple(found)


_operator = Operator(allocate, _like, differentiable=True)
