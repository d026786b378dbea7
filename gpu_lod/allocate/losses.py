"""Losses that keep learned allocators from collapsing: onto one place, onto each other, onto nothing."""

from __future__ import annotations

import torch

from gpu_lod import checks, operators, precision
from gpu_lod.errors import InputError


def _placed(
    sites: torch.Tensor, weights: torch.Tensor | None, bins: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Checked but for values."""
    bins = checks.size(bins)
    sites = _wide(sites, "sites")
    weights = sites.new_ones(sites.shape[:-1]) if weights is None else _wide(weights, "weights")
    if sites.ndim not in (2, 3) or sites.shape[-1] < 2 or weights.shape != sites.shape[:-1] or not weights.numel():
        raise InputError(
            f"sites are {tuple(sites.shape)} and weights {tuple(weights.shape)}; expected [B, K, 3] and [B, K], at "
            "least one of each."
        )
    checks.same_device(sites, weights, "weights", "the sites")
    kind = torch.promote_types(sites.dtype, weights.dtype)
    return sites.to(kind), weights.to(kind), bins


def _of_places(sites: torch.Tensor, weights: torch.Tensor | None, bins: tuple[int, int]) -> torch.Tensor:
    return _placed(sites, weights, bins)[0].new_empty(())


@operators.function(_of_places)
@precision.in_full
def coverage_loss(
    sites: torch.Tensor, weights: torch.Tensor | None = None, bins: tuple[int, int] = (8, 8)
) -> torch.Tensor:
    """How unevenly tokens are spread over the picture: 0 if every bin holds as much, rows x columns - 1 if one holds
    all. The mean over the batch.

    Shape: sites [B, K, 2 or more] (x, y, ...), weights [B, K]; or both without B.
    Convention: a soft histogram: a site's weight is shared between the two bins along each side whose centres it lies
        between, in proportion, and beyond the outermost centres goes to the outermost bin. So evenly spread sites are
        even, and the loss has gradients in weights, and in sites but for those beyond the outermost centres, so none if
        all are in one corner. It is n sum h^2 - 1 over the n bins' shares h.

    Args:
        weights: how much each token counts, not negative, such as the scores of a soft top-k; None is all alike.
        bins: (rows, columns).

    Raises:
        InputError: shapes that do not fit, no sites, or weights that are negative, not finite, or 0 for a whole image.
    """
    sites, weights, (rows, columns) = _placed(sites, weights, bins)
    _no_negative(weights, "weights")
    if not checks.values(weights).sum(-1).all():
        raise InputError("weights are all 0 for an image; expected some that count. Leave that image out.")
    weights = weights / weights.detach().amax(-1, keepdim=True)  # so that their sum is a number; shares are the same
    by_column, by_row = (_shares(sites[..., axis], n) for axis, n in ((0, columns), (1, rows)))
    parts = (precision.factor(part) for part in (weights, by_row, by_column))
    held = torch.einsum("...k,...kj,...ki->...ji", *parts).to(sites).flatten(-2)
    held = held / held.sum(-1, keepdim=True)
    return (rows * columns * held.square().sum(-1) - 1).mean()


def _shares(place: torch.Tensor, count: int) -> torch.Tensor:
    """[..., count]: of places in [0, 1], how much goes to each bin along a side."""
    at = (place * count - 0.5).clamp(0, count - 1)
    centres = torch.arange(count, dtype=place.dtype, device=place.device)
    return (1 - (at[..., None] - centres).abs()).clamp(min=0)


@precision.in_full
def repulsion_loss(centres: torch.Tensor, distance: float = 0.2) -> torch.Tensor:
    """How close centres come to each other: the sum over pairs of (1 - d / distance)^2 where d is below the distance, a
    centre. The mean over the batch; 0 if all keep the distance.

    Shape: [B, V, 2] or [V, 2].
    Units: of the centres; multiply normalised ones by (W, H) / max(W, H) for units of the longer side.

    Raises:
        InputError: another shape, no centres, or a distance that is not positive.
    """
    distance = checks.number(distance, "distance")
    centres = _wide(centres, "centres")
    if centres.ndim not in (2, 3) or centres.shape[-1] != 2 or not centres.numel() or distance <= 0:
        raise InputError(
            f"centres are {tuple(centres.shape)} and the distance {distance}; expected [B, V, 2] and a positive number."
        )
    first, second = torch.triu_indices(count := centres.shape[-2], count, 1, device=centres.device)
    squared = (centres[..., first, :] - centres[..., second, :]).square().sum(-1)
    met = squared == 0  # where a root has no slope, and its gradient counts as 0
    apart = torch.where(met, 1.0, squared).sqrt().masked_fill(met, 0.0)
    return (1 - apart / distance).clamp(min=0).square().sum(-1).mean() / count


def _held(mass: torch.Tensor, least: float) -> tuple[torch.Tensor, float]:
    """Checked but for values."""
    least = checks.number(least, "least")
    if not 0 < least <= 1:
        raise InputError(f"least is {least}; expected a part of the mean mass, above 0 and at most 1.")
    mass = _wide(mass, "mass")
    if mass.ndim not in (1, 2) or not mass.numel():
        raise InputError(f"mass is {tuple(mass.shape)}; expected [B, K] or [K], at least one of each.")
    return mass, least


def _of_mass(mass: torch.Tensor, least: float) -> torch.Tensor:
    return _held(mass, least)[0].new_empty(())


@operators.function(_of_mass)
@precision.in_full
def dead_bin_loss(mass: torch.Tensor, least: float = 0.1) -> torch.Tensor:
    """How many tokens hold next to nothing: the mean of (1 - mass / (least x mean mass))^2 where the mass is below
    `least` of the mean. 0 if it is for none, and 1 - 1/K if one token holds all.

    Shape: [B, K] or [K], not negative: how much is assigned to each token.
    Convention: the gradient in a token's mass grows with how little it holds, so that dead ones come back.

    Raises:
        InputError: a `least` outside (0, 1], another shape, no tokens, or mass that is negative or not finite.
    """
    mass, least = _held(mass, least)
    _no_negative(mass, "mass")
    wide = mass.double()  # where a share of the least mass is no subnormal number
    mean = wide.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (1 - wide / (least * mean)).clamp(min=0).square().mean().to(mass.dtype)


def _wide(value: torch.Tensor, name: str) -> torch.Tensor:
    """Real numbers in fp32, or float64: sums of half precision are none, and cdist knows none."""
    found = checks.real(value, name)
    return found if found.dtype == torch.float64 else found.float()


def _no_negative(value: torch.Tensor, name: str) -> None:
    """They are read on the host: on a GPU that waits for the work that makes them."""
    low, high = torch.aminmax(checks.values(value))
    if not (low >= 0 and high < torch.inf):  # also NaN
        raise InputError(
            f"{name} from {float(low):g} to {float(high):g}; expected finite numbers of 0 or more. Clamp with "
            ".clamp(min=0)."
        )
