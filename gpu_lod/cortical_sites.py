"""Sites for a fixed number of tokens about a fixation, as dense as the visual cortex magnifies."""

from __future__ import annotations

import math
from typing import Any

import torch

from gpu_lod import by_kernel, checks, operators
from gpu_lod.cached import constant, numbers
from gpu_lod.dispatch import needs_grad
from gpu_lod.errors import CaptureError, InputError
from gpu_lod.kernels import cortical
from gpu_lod.kernels import device as kernels
from gpu_lod.quiet import MKL, SEARCHES, quietly

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
        The density c is the one at which exactly K sites of the spiral are inside the image, so no site is moved: of
        273 as many are within any e as M^2 says to 2% of K, in pictures up to 40 : 1.
        Neighbours are (e + e0) sqrt(2 pi / c) apart in every direction (rings x wedges, by contrast, stretch their
        cells), and a patch of `patch` samples covers that distance: level = max(0, log2(longer px * spacing / patch)).

    Args:
        fixation: (x, y) in [0, 1], or a tensor of them; gradients pass to it.
        budget: K, 1 to 2^20.
        size: (height, width) of the image in pixels.
        patch: P, samples along a patch's side.
        e0: eccentricity of half magnification.

    Returns:
        fp32, on the fixation's device.

    Raises:
        InputError: a fixation outside [0, 1] or not finite, a budget, size, patch or e0 that is not positive; or
            an image so long, or an e0 so far from its sides, that there are too many sites to choose from.

    Source: Vogel, "A Better Way to Construct the Sunflower Head" (1979), for the spiral; Schwartz (1980) for M.
    """
    budget, (height, width), patch, e0 = _checked(budget, size, patch, e0)
    checks.no_vmap(fixation, "cortical_sites", "how far it looks depends on the values. Pass all fixations, [B, 2].")
    points, single = checks.fixations(fixation)
    points = points.double()
    found = by_one_launch(points, budget, (height, width), patch, e0)
    sites = sites_about(points, budget, (height, width), patch, e0).float() if found is None else found[0]
    return sites[0] if single else sites


def _checked(budget: int, size: tuple[int, int], patch: int, e0: float) -> tuple[int, tuple[int, int], int, float]:
    budget = checks.integer(budget, "budget", at_least=1, at_most=2**20)
    patch = checks.integer(patch, "patch", at_least=1)
    size = checks.size(size)
    e0 = checks.number(e0, "e0")
    if e0 <= 0:
        raise InputError(f"e0 is {e0}; expected a positive eccentricity.")
    return budget, size, patch, e0


def _like(fixation: torch.Tensor, budget: int, size: tuple[int, int], patch: int, e0: float) -> torch.Tensor:
    """What `cortical_sites` returns, without values."""
    budget, *_ = _checked(budget, size, patch, e0)
    return torch.empty(*fixation.shape[:-1], budget, 3, dtype=torch.float32, device=fixation.device)


operators.register(cortical_sites, _like)


def by_one_launch(
    points: torch.Tensor,
    budget: int,
    size: tuple[int, int],
    patch: int,
    e0: float | torch.Tensor,
    relevance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """`sites_about` in fp32, and if relevance [B, Hg, Wg] is given, [B, K] that times magnification there. None where
    torch is to make them."""
    given = [value for value in (points, e0, relevance) if isinstance(value, torch.Tensor)]
    if needs_grad(*given) or not by_kernel.usable(*given):
        return None
    candidates = most_candidates(size, budget)
    return by_kernel.attempt(
        points.device,
        lambda: cortical.sites(
            kernels.device_of(points), points, size, budget, candidates, patch, e0, relevance=relevance
        ),
    )


Candidates = tuple[torch.Tensor, torch.Tensor]
"""Indices [N] of sites of the spiral, and [B, N] how far it is to the edge in the direction of each."""


def sites_about(
    points: torch.Tensor,
    budget: int,
    size: tuple[int, int],
    patch: int,
    e0: float | torch.Tensor,
    among: Candidates | None = None,
) -> torch.Tensor:
    """[B, K, 3] in float64; points [B, 2] are too, and e0 may be [B, 1].

    Args:
        among: as of `first_to_enter`.
    """
    box = box_of(points, size)
    with torch.no_grad():
        each = e0 if isinstance(e0, torch.Tensor) else points.new_full((1, 1), e0)
        among = among or every_candidate(points, size, budget, each.numel())
        if among is None:
            index, enters, _ = first_to_enter(points, size, budget, each)
            order = index.gather(1, enters[:, 0].argsort(dim=1, stable=True)[:, : budget + 1])
        else:
            index, edge = among
            enters, order = ((index + 0.5) / magnified(edge, each)).topk(budget + 1, largest=False)
            if checks.on_host(points) and not enters.isfinite().all():  # magnification vanishes
                raise _too_many(box, each)
            order = index[order]
    # Between the last site that is let in and the next. Only these two carry a gradient.
    edge = order[:, budget - 1 :]
    density = ((edge + 0.5) / magnified(reach(points, direction_of(edge), box), e0)).mean(dim=1)
    chosen = order[:, :budget].sort(dim=1).values
    radius = eccentricity((chosen + 0.5) / density[:, None], e0)
    at = points[:, None] + radius[..., None] * direction_of(chosen) / box
    spacing = (radius + e0) * (2 * math.pi / density[:, None]).sqrt()
    level = quietly(torch.log1p, (max(size) * spacing / patch).clamp(min=1) - 1) / math.log(2)
    return torch.cat([at.clamp(0, 1), level[..., None]], dim=-1)  # rounding may step over the edge


def first_to_enter(
    points: torch.Tensor,
    size: tuple[int, int],
    budget: int,
    e0: torch.Tensor,
    limit: torch.Tensor | None = None,
    among: Candidates | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sites among which, for each e0 [B or 1, T], are the K + 1 that are inside the image from the least densities on:
    indices [B, N], the densities [B, T, N], and that of the K-th and of the one after it, [B, T, 2].

    Convention: some may be of index inf, and enter at inf: rows with fewer sites than the others have them.

    Args:
        limit: [B, T] about what the last of the densities are, where the caller knows.
        among: what `every_candidate` gave, where the caller has asked before.
    """
    e0, box = e0.expand(len(points), -1), box_of(points, size)
    among = among or every_candidate(points, size, budget, e0.numel())
    if among is not None:
        enters, last = _entering(*among, budget, e0)
        return among[0].expand(len(points), -1), enters, last
    if limit is None:
        # What an even spread would need, and some sites more.
        turn, weight = _turns(box)
        limit = (budget + 8) / (magnified(reach(points, turn, box)[:, None], e0[..., None]) @ weight)
    limit = 1.1 * limit
    for _ in range(_ATTEMPTS):
        index, edge = _candidates(points, box, limit, e0)
        # Any K + 1 sites tell of a density that is enough; where these are too dear, all that need less are among the
        # next ones.
        enough = torch.full_like(limit, math.inf)
        if index.shape[1] > budget:
            enters, last = _entering(index, edge, budget, e0)
            enough = last[..., 1]
            if bool((enough <= limit).all()):
                return index, enters, last
        limit = torch.where(enough <= limit, limit, enough.minimum(4 * limit))
    raise InputError(
        f"No density has {budget} sites inside an image of {_sides(box)}. Pass a smaller budget, or a larger image."
    )


_ATTEMPTS, _BLOCK, _MOST = 16, 2**15, 2**29
_AT_ONCE = 2**23
"""Densities of candidates that a GPU computes rather than to wait for how many are needed; some tensors of them."""
_FEW = 2**14
"""The same on a CPU, rather than to find it out."""


def _entering(
    index: torch.Tensor, edge: torch.Tensor, budget: int, e0: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The densities [B, T, N] from which on sites are inside, by how far it is to the edge where they stand; and of
    these the K-th and the next, [B, T, 2]."""
    enters = (index + 0.5)[..., None, :] / magnified(edge[:, None], e0[..., None])
    least = enters.topk(budget + 1, largest=False, sorted=False).values
    return enters, least.topk(2).values.flip(-1)


def every_candidate(points: torch.Tensor, size: tuple[int, int], budget: int, tries: int) -> Candidates | None:
    """All sites that could be among the first, where a GPU would else be waited for to know how many are needed, and a
    CPU takes longer to find that out; None if that many of them times `tries` is too much.

    Raises:
        CaptureError: it is, and a CUDA graph is being captured.
    """
    count = most_candidates(size, budget)
    if checks.on_host(points):
        if len(points) * tries * count > _FEW:
            return None
        with torch.no_grad():
            index, directions = (constant(points.device, make, count) for make in (_indices, _directions))
            return index, reach(points, directions, box_of(points, size))
    if tries * count > _AT_ONCE:
        if checks.readable(points):
            return None
        raise CaptureError(
            f"a CUDA graph is being captured, and of an image of {size[0]} x {size[1]} there are {count} sites to "
            f"choose from, {tries} times, which is too much without waiting. Call it outside the graph."
        )
    index = torch.arange(count, dtype=points.dtype, device=points.device)
    with torch.no_grad():
        return index, reach(points, direction_of(index)[None], box_of(points, size))


def _indices(count: int) -> torch.Tensor:
    """[N], of the first sites."""
    return torch.arange(count, dtype=torch.float64, device="cpu")


def _directions(count: int) -> torch.Tensor:
    """[1, N, 2], theirs."""
    return direction_of(_indices(count))[None]


def most_candidates(size: tuple[int, int], budget: int) -> int:
    """As many sites of the spiral as hold the K + 1 in any case, wherever the fixation is and whatever e0.

    N(e) / e^2 falls with e. So in the mean over all directions N at the edge is at least N(diagonal) times the mean of
    e^2 over diagonal^2; and that mean is the image's area / pi. The golden angle keeps to the mean but for a few sites.
    """
    height, width = size
    return math.ceil((1.01 * budget + 16) * math.pi * (width / height + height / width))


def _turns(box: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions [1, N, 2] of all turns, close together along the axes as long images need it, and their shares."""
    decades = 1.5 - math.log10(float(box.min()))
    angle = torch.logspace(-decades, decades, 32, dtype=box.dtype, device=box.device).atan()
    border = torch.cat([angle.new_zeros(1), (angle[1:] + angle[:-1]) / 2, angle.new_tensor([math.pi / 2])])
    quarter = torch.stack([angle.cos(), angle.sin()], dim=-1)
    signs = quarter.new_tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    return (quarter * signs[:, None]).view(1, -1, 2), (border.diff() / (2 * math.pi)).repeat(4)


def _candidates(
    points: torch.Tensor, box: torch.Tensor, limit: torch.Tensor, e0: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [B, N] of all sites that are inside the image at one of its pairs of density and e0, [B, T], and of a few
    others; and how far it is to the edge in the direction of each.

    Convention: of most directions in a long image, those that leave it at once, it takes the first few sites alone.
    """
    short = float(box.min())
    radii = torch.logspace(math.log10(short / 16), math.log10(1.5), 64, dtype=box.dtype, device=box.device)
    # How many sites of the spiral are within each radius at most. It grows with the radius, but for rounding.
    most = ((limit[..., None] * magnified(radii, e0[..., None])).amax(1) * (1 + 1e-6)).cummax(dim=1).values
    farthest = (torch.maximum(points, 1 - points) * box).norm(dim=1, keepdim=True) * (1 + 1e-6)
    count = float(most.gather(1, torch.bucketize(farthest, radii)).max())
    if not count < _MOST:
        raise _too_many(box, e0)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, math.ceil(count), _BLOCK):
        index = torch.arange(start, min(start + _BLOCK, math.ceil(count)), dtype=box.dtype, device=box.device)
        beyond = int((most < start).sum(1).min())
        if beyond:
            # Only directions close to the longer side's leave the image beyond a radius with fewer sites than that.
            half = index * (GOLDEN_ANGLE / math.pi) - (0.5 if box[0] < box[1] else 0)
            index = index[(half - half.round()).abs() <= short / float(radii[beyond - 1]) / 2 + 1e-6]
        edge = reach(points, direction_of(index)[None], box)
        wanted = index + 0.5 <= most.gather(1, quietly(lambda e: torch.bucketize(e, radii), edge, SEARCHES))
        row, order = torch.where(wanted, index, math.inf).sort(dim=1)
        held = int(wanted.sum(1).max())
        found.append((row[:, :held], edge.gather(1, order[:, :held])))
    rows, edges = zip(*found, strict=True)
    return torch.cat(rows, dim=1), torch.cat(edges, dim=1)


def _too_many(box: torch.Tensor, e0: torch.Tensor) -> InputError:
    return InputError(
        f"An image of {_sides(box)} with an e0 of {float(e0.max()):g} has more than {_MOST} sites to choose from; "
        "expected a shorter image, or an e0 nearer to its sides. Pass a smaller budget, or the image in parts."
    )


def _sides(box: torch.Tensor) -> str:
    height, width = box.flip(0).tolist()
    return f"{height:g} x {width:g} (height x width, in units of the longer side)"


def direction_of(index: torch.Tensor) -> torch.Tensor:
    """[..., 2] of sites of the spiral."""
    angle = index * GOLDEN_ANGLE
    return torch.view_as_real(torch.polar(torch.ones_like(angle), angle))  # quieter than cos and sin


def box_of(points: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(width, height) of the image in units of its longer side: a `constant`."""
    return numbers((size[1] / max(size), size[0] / max(size)), points.dtype, points.device)


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
    return torch.where(u < 1e-4, u * u * (0.5 - u * (2 / 3 - u * 0.75)), quietly(torch.log1p, u) - u / (1 + u))


def eccentricity(n: torch.Tensor, e0: float | torch.Tensor) -> torch.Tensor:
    """The inverse of `magnified`, for n > 0. Differentiable."""
    with torch.no_grad():
        # Newton on s = ln(1 + u), in which N is s + exp(-s) - 1: convex, so that it falls to the root from the right.
        s = n + quietly(torch.sqrt, 2 * n, MKL)
        for _ in range(7):  # from there on, only rounding changes
            s = _step(s, n)
    s = _step(s, n)  # one more carries the gradient,
    if needs_grad(n) or checks.transformed(n):
        s = _step(s, n)  # and another one the gradient's
    return e0 * quietly(torch.expm1, s)


def _step(s: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    fallen = quietly(torch.expm1, -s)
    return s + (s + fallen - n) / fallen
