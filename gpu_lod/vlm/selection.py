"""Hard choices with gradients: top-k that multiplies by one and differentiates as the soft one, with noise or not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_lod import checks, operators
from gpu_lod.allocate.learned import soft_top_k
from gpu_lod.allocate.ordering import ordered
from gpu_lod.errors import InputError
from gpu_lod.shapes import summary
from gpu_lod.uncompiled import in_one_piece


class Selection(NamedTuple):
    """K of N, by relevance, high first."""

    indices: torch.Tensor
    """int64 [B, K]; of a map [B, Hg, Wg] row by row"""
    weights: torch.Tensor
    """[B, K], exactly 1 each; their gradient is that of the soft top-k"""

    def __repr__(self) -> str:
        return summary(self)

    @in_one_piece
    def take(self, features: torch.Tensor) -> torch.Tensor:
        """Of [B, N, D] those that were chosen, [B, K, D], times their weights: through it a loss reaches relevance.

        Raises:
            InputError: features of another batch, of fewer than were chosen from, or on another device.
        """
        features = checks.dense(features, "features")
        index = places_in(self.indices, features)
        rows = torch.arange(len(index), device=index.device)[:, None]
        return features[rows, index] * self.weights[..., None].to(features.dtype)


def _same(index: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    _fit(index, features, 1)
    return index.new_empty(index.shape)


@operators.function(_same, differentiable=False)
def places_in(index: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The same, which has to be of places among features [B, N, D]."""
    # On a GPU nobody waits to know; there torch's kernel finds out.
    _fit(index, features, int(checks.values(index).max()) + 1 if checks.on_host(index) and index.numel() else 1)
    return index


def _fit(index: torch.Tensor, features: torch.Tensor, least: int) -> None:
    if features.ndim != 3 or features.shape[0] != len(index) or features.shape[1] < least:
        raise InputError(f"features are {tuple(features.shape)}; expected [{len(index)}, N, D], N of {least} or more.")
    checks.same_device(index, features, "features", "the indices")


torch.serialization.add_safe_globals([Selection])  # torch.load's weights_only


@in_one_piece
def straight_through_top_k(relevance: torch.Tensor, count: int, temperature: float = 0.1) -> Selection:
    """The `count` most relevant, and weights to multiply them with: 1 forward, the soft top-k's gradient backward.

    Shape: relevance [B, N], or a map [B, Hg, Wg]; index and weights are [B, K].
    Units: the temperature is in those of relevance: what lies within a few temperatures of the K-th has a gradient.
    Convention: equal ones by their place.

    Raises:
        InputError: a count above N or below 1, a temperature that is not positive, NaN.

    Source: straight-through estimators as in Bengio, Leonard and Courville (2013), of `allocate.soft_top_k`.
    """
    return best_of(_rows(relevance), count, temperature)


@in_one_piece
def gumbel_top_k(
    relevance: torch.Tensor,
    count: int,
    temperature: float = 0.1,
    noise: float = 1.0,
    generator: torch.Generator | None = None,
) -> Selection:
    """`straight_through_top_k` of relevance with Gumbel noise: a sample without replacement, high ones more often.

    The k-th choice falls on one of those that are left with probability proportional to exp(relevance / noise), which
    is the law of Plackett and Luce; the index is in the order of the draw.

    Args:
        noise: how far relevance is shaken, in its units; 0 is none.
        generator: where the noise is from, on relevance's device; None is torch's own.

    Raises:
        InputError: as `straight_through_top_k`, negative noise, or what is no generator.

    Source: Kool, van Hoof and Welling, "Stochastic Beams and Where to Find Them" (2019).
    """
    values = _rows(relevance)
    scale = _noise(noise)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator is {generator!r}; expected a torch.Generator or None. Make one with "
            "torch.Generator(relevance.device).manual_seed(seed)."
        )
    if not scale:
        return best_of(values, count, temperature)
    if not torch.compiler.is_compiling():
        checks.no_nan(values, "relevance")  # before the draw, which moves the generator on
    # In full precision: many of half precision's numbers are equal, and then places would decide. -log of an
    # exponential variable is a Gumbel one, infinite only where that is 0.
    wide = values if values.dtype == torch.float64 else values.float()
    drawn = torch.empty_like(wide).exponential_(generator=generator).clamp_(min=torch.finfo(wide.dtype).tiny)
    return best_of(wide - scale * drawn.log(), count, temperature, values.dtype)


class GumbelTopK(nn.Module):
    """`gumbel_top_k` in training, `straight_through_top_k` after `eval()`: the same each time.

    Args:
        count, temperature, noise: as there.
    """

    def __init__(self, count: int, temperature: float = 0.1, noise: float = 1.0) -> None:
        super().__init__()
        self.count = checks.integer(count, "count", at_least=1)
        self.temperature = checks.number(temperature, "temperature")
        if self.temperature <= 0:
            raise InputError(f"temperature is {temperature}; expected a positive number, in units of relevance.")
        self.noise = _noise(noise)

    def forward(self, relevance: torch.Tensor, generator: torch.Generator | None = None) -> Selection:
        noise = self.noise if self.training else 0.0
        return gumbel_top_k(relevance, self.count, self.temperature, noise, generator)

    def extra_repr(self) -> str:
        return f"count={self.count}, temperature={self.temperature}, noise={self.noise}"


def _rows(relevance: Any) -> torch.Tensor:
    values = checks.dense(relevance, "relevance")
    if values.ndim not in (2, 3) or not values.is_floating_point():
        raise InputError(
            f"relevance is {values.dtype} {tuple(values.shape)}; expected floats [B, N], or a map [B, Hg, Wg]."
        )
    return (values if values.dtype.itemsize > 1 else values.float()).flatten(1)  # torch sorts no float8


def _noise(value: Any) -> float:
    noise = checks.number(value, "noise")
    if noise < 0:
        raise InputError(f"noise is {noise}; expected 0 or more, in units of relevance.")
    return noise


def _selection(values: torch.Tensor, count: int, temperature: float, kind: torch.dtype | None) -> Selection:
    soft = operators.functions["soft_top_k"].fake(values, count, temperature)
    chosen = len(values), count
    return Selection(soft.new_empty(chosen, dtype=torch.int64), soft.new_empty(chosen, dtype=kind or values.dtype))


@operators.function(_selection)
def best_of(values: torch.Tensor, count: int, temperature: float, kind: torch.dtype | None = None) -> Selection:
    """The best of [B, N], with weights of that dtype; None is that of the values."""
    checks.no_nan(values, "relevance")
    soft = soft_top_k(values, count, temperature)
    _, index = ordered(values.detach(), count)
    chosen = soft.gather(1, index)
    return Selection(index, (chosen - chosen.detach() + 1).to(kind or values.dtype))
