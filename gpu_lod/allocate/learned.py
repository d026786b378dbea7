"""What learned allocators share: they are torch modules, and choose with gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from gpu_lod import by_kernel, checks, operators
from gpu_lod.allocate.base import Allocator
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError
from gpu_lod.kernels import choosing
from gpu_lod.kernels import device as kernels
from gpu_lod.patch_grid import Pool
from gpu_lod.token_set import TokenSet


class Learned(nn.Module, Allocator):
    """An allocator with parameters: `parameters()`, `state_dict()`, `train()` and `.to(device)` as with any module."""

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean") -> None:
        nn.Module.__init__(self)
        self._made_with = {}
        Allocator.__init__(self, budget, patch, pool)

    def extra_repr(self) -> str:
        return Allocator.extra_repr(self)  # torch's module has one that says nothing

    def forward(self, *args: Any, **kwargs: Any) -> TokenSet:
        return Allocator.__call__(self, *args, **kwargs)

    def _scene(self, *given: Any) -> tuple[Scene, bool]:
        scene, batched = super()._scene(*given)
        for name, parameter in self.named_parameters():
            checks.same_device(scene.relevance, parameter, type(self).__name__)
            if checks.readable(parameter) and not torch.isfinite(checks.values(parameter)).all():
                raise InputError(
                    f"{name} of {type(self).__name__} holds NaN or infinities; expected finite parameters. Load those "
                    "of before it diverged, and train at a lower rate."
                )
        return scene, batched


# torch's module says nothing of what a call takes.
functools.update_wrapper(Learned.forward, Allocator.__call__, assigned=["__doc__"])


def parameter(values: torch.Tensor) -> nn.Parameter:
    """In fp32, where torch makes parameters."""
    return nn.Parameter(torch.empty(values.shape, dtype=torch.float32).copy_(values))


def even_points(count: int) -> torch.Tensor:
    """[count, 2] in the open unit square, the same each time and evenly spread however many.

    Source: Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences" (2018): the golden ratio's counterpart in
        the plane, g^3 = g + 1.
    """
    g = 1.32471795724474602596
    step = torch.tensor([1 / g, 1 / g**2], dtype=torch.float64, device="cpu")
    return (0.5 + torch.arange(count, dtype=torch.float64, device="cpu")[:, None] * step) % 1


FLOOR = 1e-4
"""Of the mean relevance: no logarithm takes a patch for less."""

BEYOND = 100.0
"""Logarithm of an infinite relevance, in units of the mean."""


def log_relevance(scene: Scene) -> torch.Tensor:
    """[B, Hg Wg], float64: the logarithm of relevance in units of its mean, from its least value if that is negative.

    Infinities do not count in the mean.
    """
    values = scene.relevance.flatten(1).double()
    finite = torch.isfinite(values)
    some = torch.where(finite, values, 0.0)
    some = torch.where(finite, some - some.amin(1, keepdim=True).clamp(max=0), 0.0)
    mean = some.sum(1, keepdim=True) / finite.sum(1, keepdim=True).clamp(min=1)
    logs = torch.log(some / torch.where(mean > 0, mean, 1.0) + FLOOR)
    return torch.where(finite, logs, values.sign() * BEYOND)


def convex(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The softmax of [..., N] over N in parts: exp(logits - top), its sum, and the top, [..., 1] each.

    Less than e^-40 of the largest is taken for that: it weighs nothing, and numbers too small for fp32 are slow.
    """
    top = logits.detach().amax(-1, keepdim=True)
    parts = (logits - top).clamp(min=-40).exp()
    return parts, parts.sum(-1, keepdim=True), top


def by_score(scores: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scores [B, K] and values [B, K, ...] alike, high scores first, equal ones in the order they are in."""
    found, order = torch.sort(scores, dim=1, descending=True, stable=True)
    images = torch.arange(len(order), device=order.device)[:, None]
    return found, *(value[images, order] for value in values)


_HALVINGS = 52
"""Of the interval that holds the threshold: as many as double precision has bits."""


def _asked(scores: torch.Tensor, count: int, temperature: float) -> tuple[torch.Tensor, int, float, torch.dtype]:
    """Checked but for values, and the result's dtype."""
    temperature = checks.number(temperature, "temperature")
    count = checks.integer(count, "count", at_least=1)
    scores = checks.real(scores, "scores")
    if scores.ndim != 2 or count > scores.shape[1]:
        raise InputError(f"scores are {tuple(scores.shape)}; expected [B, N] with N of at least the count, {count}.")
    if temperature <= 0:
        raise InputError(f"temperature is {temperature}; expected a positive number.")
    return scores, count, temperature, scores.dtype if scores.is_floating_point() else torch.float32


def _like(scores: torch.Tensor, count: int, temperature: float) -> torch.Tensor:
    scores, _, _, kind = _asked(scores, count, temperature)
    return scores.new_empty(scores.shape, dtype=kind)


@operators.function(_like)
def soft_top_k(scores: torch.Tensor, count: int, temperature: float) -> torch.Tensor:
    """How much each of [B, N] is among the best `count`: in [0, 1], and `count` in sum for each row.

    It is sigmoid((score - t) / temperature) with the threshold t at which the sum is right, found by bisection or, on
    a GPU, by its slope; gradients, and gradients of gradients, are exact, by the implicit function theorem: they pass
    through t. As the temperature falls the result approaches the indicator of the best `count`. Infinite scores are
    those of very large ones; of integers it is fp32.

    Raises:
        InputError: a count below 1 or above N, a temperature that is not positive, or scores that are no real numbers,
            or NaN.

    Source: the entropy-regularised linear program of top-k; Cuturi et al., "Differentiable Ranks and Sorting using
        Optimal Transport" (2019); Amos et al., "The Limited Multi-Label Projection Layer" (2019).
    """
    scores, count, temperature, kind = _asked(scores, count, temperature)
    checks.no_nan(scores, "scores")
    if count == scores.shape[1]:  # all, whatever their scores: the gradient is 0, and there is one
        return torch.where(torch.ones_like(scores, dtype=torch.bool), 1.0, scores.to(kind))
    logits = (scores.double() / temperature).clamp(-1e30, 1e30)
    with torch.no_grad():
        centre, threshold, share = _threshold(logits.detach(), count)  # no_grad alone is not for forward mode
    # Round the K-th score, where it counts, so that large scores keep their small differences.
    logits = logits - centre
    # The threshold's first and second derivatives, without values of their own. Where F is the sum of sigmoids less the
    # count, the second one is that of F along a change of logits and threshold together, over the slope of F.
    change = logits - logits.detach()
    moved = (share * change).sum(1, keepdim=True)
    bent = share * (1 - 2 * torch.sigmoid(logits.detach() - threshold))
    moved = moved + (bent * (change - moved).square()).sum(1, keepdim=True) / 2
    return torch.sigmoid(logits - threshold - moved).to(kind)


def _threshold(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The middle [B, 1] between the last of logits [B, N], float64, that counts and the next one; from there, the
    threshold [B, 1]; and the share of each logit in it: its derivative, [B, N]."""
    tail = 40 + math.log(logits.shape[1])  # beyond it all sigmoids together are nothing
    if len(logits) and by_kernel.usable(logits):
        device = kernels.device_of(logits)
        found = by_kernel.attempt(
            logits.device,
            lambda: choosing.threshold(device, logits, count, tail=tail, halvings=_HALVINGS),
        )
        if found is not None:
            return found
    last, next_ = torch.sort(logits, dim=1, descending=True).values[:, count - 1 : count + 1].chunk(2, dim=1)
    centre, gap = (last + next_) / 2, (last - next_) / 2
    logits = logits - centre
    high = torch.where(gap > tail, 0.0, gap + tail)
    low = -high
    for _ in range(_HALVINGS):
        threshold = (low + high) / 2
        more = torch.sigmoid(logits - threshold).sum(1, keepdim=True) > count
        low, high = torch.where(more, threshold, low), torch.where(more, high, threshold)
    soft = torch.sigmoid(logits - threshold)
    slope = soft * (1 - soft)
    return centre, threshold, slope / slope.sum(1, keepdim=True).clamp(min=1e-300)
