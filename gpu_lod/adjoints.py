"""Backwards of verbs' own: of linear ones an adjoint, which needs neither the values of the forward nor its graph; of
others a pullback, which reads the inputs again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpu_lod import checks, precision
from gpu_lod.dispatch import differentiated, keepable, needs_grad, pull, writable
from gpu_lod.pyramid import level_sizes
from gpu_lod.saved_tensors import saved

Adjoint = Callable[..., Sequence[torch.Tensor | None]]
"""From the gradients in all results, None where nothing asks for one, to those in all inputs; made of what torch can
differentiate again."""


def of_samples(
    plain: Adjoint, made: Callable[[list[torch.Tensor]], torch.Tensor], image: torch.Tensor, levels: int
) -> Adjoint:
    """The adjoint of samples of a mean chain, to gradients in its levels: of small dtypes in fp32, which holds what
    coarse levels may be given, and which autograd rounds.

    Args:
        plain: makes them of a gradient that has memory of its own, without a graph.
        made: the samples of levels, by a graph of torch's own: the way of gradients in a batch and of gradients of
            gradients; and on a GPU where all is to be deterministic, which torch's own know.
        image: of the shape, dtype and device of level 0, [B, C, H, W] or [C, H, W].
        levels: how many there are.
    """
    shape, dtype, device = image.shape, image.dtype, image.device

    def by_graph(gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            kind: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
            zeros = [torch.zeros(*shape[:-2], *size, **kind) for size in level_sizes(shape[-2], shape[-1], levels)]
            return pull([made(zeros)], zeros, [gradient], again=again)

    def adjoint(gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        steady = device.type != "cpu" and torch.are_deterministic_algorithms_enabled()
        if steady or needs_grad(gradient) or checks.transformed(gradient):
            return by_graph(gradient)
        gradient = gradient.resolve_neg()  # of which no tensor could be made alike
        found = plain(gradient if len(shape) == 4 else gradient[None])
        return [None if one is None else one.view(*shape[:-2], *one.shape[-2:]) for one in found]

    return adjoint


_here = threading.local()


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """For a backward that calls a verb for its gradients alone: what `linear` and `pulled` give has no values where
    gradients are asked for and they know what it is like."""
    _here.without_values = True
    try:
        yield
    finally:
        _here.without_values = False


def _valued(forward: Callable[..., Any], like: Callable[[], Any] | None) -> Callable[..., Any]:
    if like is None or not getattr(_here, "without_values", False):
        return forward
    return lambda *_: like()


def linear(
    forward: Callable[..., Sequence[torch.Tensor]],
    adjoint: Adjoint,
    *inputs: torch.Tensor,
    like: Callable[[], Sequence[torch.Tensor]] | None = None,
) -> Sequence[torch.Tensor]:
    """`forward(*inputs)`, differentiable by the adjoint where an input asks for it: in a fraction of the time and the
    memory that a graph of sums takes. Inside torch.func and in forward mode a forward in plain torch differentiates
    itself; no other comes there.

    Args:
        like: gives tensors like its results, of no values.
    """
    if needs_grad(*inputs) and not any(map(checks.transformed, inputs)):
        result: tuple[torch.Tensor, ...] = _ByAdjoint.apply(_valued(forward, like), adjoint, *inputs)
        return result
    return forward(*inputs)


class _ByAdjoint(torch.autograd.Function):
    generate_vmap_rule = True
    """Inside torch.func.vmap over something else, too."""

    @staticmethod
    def forward(forward: Any, adjoint: Any, *inputs: torch.Tensor) -> Any:
        return writable(forward(*inputs), inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.adjoint = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        asked = any(gradient is not None for gradient in gradients)
        with precision.full():
            found = ctx.adjoint(*gradients) if asked else [None] * len(ctx.needs_input_grad[2:])
        return (None, None, *(one if want else None for one, want in zip(found, ctx.needs_input_grad[2:], strict=True)))


Pullback = Callable[..., Sequence[torch.Tensor | None]]
"""From which inputs are wanted, the gradients in all results, None where nothing asks for one, and the inputs, to the
gradients in those; without a graph. It reads the values of those inputs alone that ask for gradients."""


def pulled(
    forward: Callable[..., Sequence[torch.Tensor]],
    pullback: Pullback,
    *inputs: torch.Tensor,
    graph: Callable[..., Sequence[torch.Tensor]] | None = None,
    like: Callable[[], Sequence[torch.Tensor]] | None = None,
) -> Sequence[torch.Tensor]:
    """`forward(*inputs)`, no linear function, differentiable by a pullback that reads the inputs again.

    Args:
        graph: `forward` in plain torch, for gradients of gradients and those in a batch; None: that is `forward`.
        like: as of `linear`.
    """
    if needs_grad(*inputs) and not any(map(checks.transformed, inputs)):
        made = _valued(forward, like)
        result: tuple[torch.Tensor, ...] = _ByPullback.apply(made, pullback, graph or forward, *keepable(*inputs))
        return result
    return forward(*inputs)


class _ByPullback(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(forward: Any, pullback: Any, graph: Any, *inputs: torch.Tensor) -> Any:
        return writable(forward(*inputs), inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pullback, ctx.graph = inputs[1:3]
        # Of what nothing reads torch need not say that it was written to: an alias has a version of its own.
        ctx.save_for_backward(*(x if x.requires_grad or checks.transformed(x) else x.data for x in inputs[3:]))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        inputs, wanted = saved(ctx), ctx.needs_input_grad[3:]
        if all(gradient is None for gradient in gradients):
            return (None,) * (3 + len(inputs))
        with precision.full():
            if torch.is_grad_enabled() or any(map(checks.transformed, gradients)):
                return (None, None, None, *differentiated(ctx.graph, inputs, wanted, gradients))
            found = ctx.pullback(wanted, gradients, inputs)
        return (None, None, None, *(one if want else None for one, want in zip(found, wanted, strict=True)))


def chain_adjoint(
    *gradients: torch.Tensor | None,
    sizes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    step: Callable[..., torch.Tensor],
    finest: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """The gradient in the finest level of a chain in which each level is made of the one above.

    Args:
        gradients: in the levels below the finest.
        sizes: (height, width) of all levels.
        dtype: of the finest.
        step: the adjoint of what makes a level, of (gradient, height, width of the level above, a gradient in that or
            None).
        finest: another gradient in the finest, to be added.
    """
    found = wide(gradients[-1])
    for level in range(len(sizes) - 2, -1, -1):
        more = wide(gradients[level - 1] if level else finest)
        found = more if found is None else step(found, *sizes[level], more)
    return [None if found is None else found.to(dtype)]


def wide(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """In fp32, if in less."""
    return gradient if gradient is None or gradient.dtype.itemsize >= 4 else gradient.float()
