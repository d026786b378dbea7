"""Cortical sites, and the e0 at which a fovea holds its share of them: memory and launches of cortical.cu, foveal.cu
and foveal_e0.cu."""

from __future__ import annotations

import ctypes
import math

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.device import THREADS, Device
from gpu_lod.kernels.sources import CORTICAL, FOVEAL, FOVEAL_E0

TRIES = 32
"""Eccentricities of half magnification that are tried at once; foveal.cuh has it too."""
MOST_CANDIDATES = 2**16
"""Sites of the spiral that a block goes through; in single precision their numbers are exact."""
MOST_DENSITIES = 2**24
"""Of candidates that are kept at once."""


class Spiral(ctypes.Structure):
    """Of spiral.cuh."""

    _fields_ = (
        ("points", ctypes.c_void_p),
        ("enters", ctypes.c_void_p),
        ("width", ctypes.c_double),
        ("height", ctypes.c_double),
        ("candidates", ctypes.c_int),
        ("budget", ctypes.c_int),
    )


class Tried(ctypes.Structure):
    """Of foveal.cuh."""

    _fields_ = (
        ("logs", ctypes.c_void_p),
        ("within", ctypes.c_void_p),
        ("images", ctypes.c_int),
        ("count", ctypes.c_int),
    )


class Foveal(ctypes.Structure):
    """The parameter of foveal.cu."""

    _fields_ = (
        ("spiral", Spiral),
        ("tried", Tried),
        ("low", ctypes.c_double),
        ("high", ctypes.c_double),
        ("radius", ctypes.c_double),
        ("round", ctypes.c_int),
    )


class FovealE0(ctypes.Structure):
    """The parameter of foveal_e0.cu."""

    _fields_ = (("tried", Tried), ("e0", ctypes.c_void_p), ("rounds", ctypes.c_int))


class Cortical(ctypes.Structure):
    """The parameter of cortical.cu."""

    _fields_ = (
        ("spiral", Spiral),
        ("e0s", ctypes.c_void_p),
        ("relevance", ctypes.c_void_p),
        ("sites", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("e0", ctypes.c_double),
        ("height", ctypes.c_int),
        ("width", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
    )


def foveal_e0(
    device: Device,
    points: torch.Tensor,
    size: tuple[int, int],
    budget: int,
    candidates: int,
    *,
    count: int,
    radius: float,
    between: tuple[float, float],
    rounds: int,
) -> torch.Tensor:
    """[B, 1] the e0 at which `count` of the sites about points [B, 2], in float64, are within the radius: as `LogPolar`
    has it.

    Args:
        candidates: sites of the spiral, from the first on, that are more than enough.
        between: the least e0 and the largest.

    Raises:
        LimitError: more candidates than blocks go through, or there is memory for.
    """
    images = len(points)
    points = points.contiguous()
    enters = _densities(points, candidates, images * TRIES)
    logs = points.new_empty(rounds, images, TRIES)
    within = torch.empty_like(logs, dtype=torch.int32)
    tried = Tried(logs=logs.data_ptr(), within=within.data_ptr(), images=images, count=count)
    parameters = Foveal(
        spiral=_spiral(points, enters, size, candidates, budget),
        tried=tried,
        low=math.log(between[0]),
        high=math.log(between[1]),
        radius=radius,
    )
    for parameters.round in range(rounds):
        device.launch(FOVEAL, (images * TRIES, 1, 1), THREADS, parameters)
    e0 = points.new_empty(images, 1)
    found = FovealE0(tried=tried, e0=e0.data_ptr(), rounds=rounds)
    device.launch(FOVEAL_E0, (-(-images // THREADS), 1, 1), THREADS, found)
    return e0


def sites(
    device: Device,
    points: torch.Tensor,
    size: tuple[int, int],
    budget: int,
    candidates: int,
    patch: int,
    e0: float | torch.Tensor,
    relevance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """[B, K, 3] sites about points [B, 2], in float64, as `cortical_sites` has them; and if relevance [B, Hg, Wg], in
    fp32, is given, [B, K] that times magnification there.

    Args:
        candidates: as of `foveal_e0`.
        e0: one for all, or [B, 1] in float64.

    Raises:
        LimitError: more candidates than a block goes through, or there is memory for.
    """
    images = len(points)
    points = points.contiguous()
    enters = _densities(points, candidates, images)
    each = e0.contiguous() if isinstance(e0, torch.Tensor) else None
    found = points.new_empty(images, budget, 3, dtype=torch.float32)
    parameters = Cortical(
        spiral=_spiral(points, enters, size, candidates, budget),
        e0s=None if each is None else each.data_ptr(),
        sites=found.data_ptr(),
        e0=0.0 if isinstance(e0, torch.Tensor) else e0,
        height=size[0],
        width=size[1],
        patch=patch,
    )
    made = [found]
    if relevance is not None:
        relevance = relevance.contiguous()
        made.append(points.new_empty(images, budget, dtype=torch.float32))
        parameters.relevance, parameters.scores = relevance.data_ptr(), made[1].data_ptr()
        parameters.rows, parameters.columns = relevance.shape[1:]
    device.launch(CORTICAL, (images, 1, 1), THREADS, parameters)
    return tuple(made)


def _densities(points: torch.Tensor, candidates: int, blocks: int) -> torch.Tensor:
    """Scratch [blocks, candidates] for the densities from which on sites are inside."""
    if candidates > MOST_CANDIDATES or blocks * candidates > MOST_DENSITIES:
        raise LimitError(
            f"{candidates} sites to choose from, {blocks} times, are more than blocks go through ({MOST_CANDIDATES}, "
            f"{MOST_DENSITIES} in all)."
        )
    return points.new_empty(blocks, candidates)


def _spiral(points: torch.Tensor, enters: torch.Tensor, size: tuple[int, int], candidates: int, budget: int) -> Spiral:
    height, width = size
    return Spiral(
        points=points.data_ptr(),
        enters=enters.data_ptr(),
        width=width / max(size),
        height=height / max(size),
        candidates=candidates,
        budget=budget,
    )
