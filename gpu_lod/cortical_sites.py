"""Sites for a fixed number of tokens about a fixation, as dense as the visual cortex magnifies."""

from __future__ import annotations

import math
from typing import Any

import torch

from gpu_lod import checks, operators
from gpu_lod.errors import InputError

GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))


@operators.verb
def cortical_sites(
    fixation: Any, budget: int = 273, size: tuple[int, int] = (1024, 1024), patch: int = 14, e0: float = 0.05
) -> torch.Tensor:
    """Exactly `budget` sites round each fixation, all inside the image: a golden-angle spiral whose density falls with
    the square of cortical magnification, M(e) = M0 / (e + e0).

    Shape: fixation [2] or [B, 2] gives [K, 3] or [B, K, 3]: (x, y, level), innermost first.
    Units: x and y in [0, 1] of width and height, y down; eccentricity e in units of the longer side; level 0 is full
        resolution and each 1 more halves the sampling rate.
    Convention: site i of the spiral stands at angle i pi (3 - sqrt 5), from +x towards +y, and at the eccentricity
        within which c N(e) = i + 1/2 sites lie, where N(e) = ln(1 + e/e0) + e0/(e + e0) - 1 integrates M^2 over a disc.
        The density c is the one at which exactly K sites of the spiral are inside the image, so no site is moved.
        Neighbours are (e + e0) sqrt(2 pi / c) apart in every direction (rings x wedges, by contrast, stretch their
        cells), and a patch of `patch` samples covers that distance: level = max(0, log2(longer px * spacing / patch)).

    Args:
        fixation: (x, y) in [0, 1], or a tensor of them; gradients pass to it.
        budget: K, at least 1.
        size: (height, width) of the image in pixels.
        patch: P, samples along a patch's side.
        e0: eccentricity of half magnification.

    Returns:
        fp32, on the fixation's device.

    Raises:
        InputError: a fixation outside [0, 1] or not finite, a budget, size, patch or e0 that is not positive.

    Source: Vogel, "A Better Way to Construct the Sunflower Head" (1979), for the spiral; Schwartz (1980) for M.
    """
    checks.integer(budget, "budget", at_least=1, at_most=2**20)
    checks.integer(patch, "patch", at_least=1)
    height, width = checks.size(size)
    e0 = checks.number(e0, "e0")
    if e0 <= 0:
        raise InputError(f"e0 is {e0}; expected a positive eccentricity.")
    checks.no_vmap(fixation, "cortical_sites", "how far it looks depends on the values. Pass all fixations, [B, 2].")
    points, single = checks.fixations(fixation)
    sites = sites_about(points.double(), budget, (height, width), patch, e0).float()
    return sites[0] if single else sites


def _like(fixation: torch.Tensor, budget: int = 273, *_: Any) -> torch.Tensor:
    """What `cortical_sites` returns, without values."""
    return torch.empty(*fixation.shape[:-1], budget, 3, dtype=torch.float32, device=fixation.device)


operators.register(cortical_sites, _like)


def sites_about(
    points: torch.Tensor, budget: int, size: tuple[int, int], patch: int, e0: float | torch.Tensor
) -> torch.Tensor:
    """[B, K, 3] in float64; points [B, 2] are too, and e0 may be [B, 1]."""
    longer = max(size)
    box = box_of(points, size)
    candidates = 2 * budget + 16
    while True:
        index = torch.arange(candidates, dtype=torch.float64, device=points.device)
        angle = index * GOLDEN_ANGLE
        direction = torch.stack([angle.cos(), angle.sin()], dim=-1)
        with torch.no_grad():
            # A site is inside the image once the density is large enough; rays that leave at once never are.
            order = _enters(points, index, direction[None], box, e0).argsort(dim=1, stable=True)
        # Between the last site that is let in and the next. Only these two carry a gradient.
        edge = order[:, budget - 1 : budget + 1]
        density = _enters(points, index[edge], direction[edge], box, e0).mean(dim=1)
        # No later site may be inside: the image's farthest point bounds them.
        farthest = torch.maximum(points, 1 - points) * box
        needed = density[:, None] * magnified(farthest.norm(dim=1, keepdim=True), e0) + 1
        if bool(torch.isfinite(needed).all()) and float(needed.detach().max()) <= candidates:
            break
        candidates *= 2
    chosen = order[:, :budget].sort(dim=1).values
    radius = eccentricity((chosen + 0.5) / density[:, None], e0)
    at = points[:, None] + radius[..., None] * direction[chosen] / box
    spacing = (radius + e0) * (2 * math.pi / density[:, None]).sqrt()
    level = (longer * spacing / patch).log2().clamp(min=0)
    return torch.cat([at.clamp(0, 1), level[..., None]], dim=-1)  # rounding may step over the edge


def _enters(
    points: torch.Tensor, index: torch.Tensor, direction: torch.Tensor, box: torch.Tensor, e0: float | torch.Tensor
) -> torch.Tensor:
    """[B, N] the density from which on a site of the spiral is inside the image; direction is [B or 1, N, 2]."""
    return (index + 0.5) / magnified(reach(points, direction, box), e0)


def box_of(points: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(width, height) of the image in units of its longer side."""
    return points.new_tensor([size[1] / max(size), size[0] / max(size)])


def reach(points: torch.Tensor, direction: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    """[B, N] how far it is from points [B, 2] to the edge of the image, in units of the longer side; direction is
    [B or 1, N, 2]."""
    at = (points * box)[:, None]
    ways = []
    for place, end, step in zip(at.unbind(-1), box, direction.unbind(-1), strict=True):
        still = step == 0  # along an edge it never leaves through that one
        way = torch.where(step > 0, end - place, place) / torch.where(still, 1.0, step.abs())
        ways.append(torch.where(still, math.inf, way))
    return torch.minimum(*ways)


def magnified(e: torch.Tensor, e0: float | torch.Tensor) -> torch.Tensor:
    """N(e): the integral of M^2 over the disc of eccentricity e, up to a factor."""
    u = e / e0
    # Near 0 the terms cancel: u^2 / 2 - 2 u^3 / 3 + 3 u^4 / 4 - ...
    return torch.where(u < 1e-4, u * u * (0.5 - u * (2 / 3 - u * 0.75)), u.log1p() - u / (1 + u))


def eccentricity(n: torch.Tensor, e0: float | torch.Tensor) -> torch.Tensor:
    """The inverse of `magnified`, for n > 0. Differentiable."""
    with torch.no_grad():
        # Newton on s = ln(1 + u), in which N is s + exp(-s) - 1: convex, so that it falls to the root from the right.
        s = n + (2 * n).sqrt()
        for _ in range(40):
            s = s - (s + torch.expm1(-s) - n) / -torch.expm1(-s)
    # One more step carries the gradient.
    s = s - (s + torch.expm1(-s) - n) / -torch.expm1(-s)
    return e0 * torch.expm1(s)
