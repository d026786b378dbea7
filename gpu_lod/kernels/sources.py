"""The CUDA sources as package data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.resources import files

import torch

ELEMENTS = {
    torch.uint8: "UINT8",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
}
"""What elements.cuh calls a dtype."""

REDUCTIONS = {"mean": "REDUCE_MEAN", "max": "REDUCE_MAX", "min": "REDUCE_MIN"}


@dataclass(frozen=True)
class Kernel:
    """A kernel and what it is compiled for."""

    name: str
    """Of the function, and of the file without .cu."""
    defines: tuple[str, ...]

    @property
    def file(self) -> str:
        return f"{self.name}.cu"


def reduction(dtype: torch.dtype, reduce: str, even: bool) -> Kernel:
    """Args:
    even: of an image whose sides are even at every level of a tile.
    """
    return Kernel("reduce", (ELEMENTS[dtype], REDUCTIONS[reduce], *(("EVEN",) if even else ())))


def of_dtype(name: str, dtype: torch.dtype) -> Kernel:
    """One of `OF_DTYPES`."""
    return Kernel(name, (ELEMENTS[dtype],))


_ALONE = (
    *("amounts", "best", "cells", "cortical", "foveal", "foveal_e0", "oriented", "peaks", "ranks", "runs", "salient"),
    *("served", "shares", "threshold", "tiles", "vortices"),
)
ALONE = tuple(Kernel(name, ()) for name in _ALONE)
AMOUNTS, BEST, CELLS, CORTICAL, FOVEAL, FOVEAL_E0, ORIENTED, PEAKS, RANKS, RUNS, SALIENT, *_REST = ALONE
SERVED, SHARES, THRESHOLD, TILES, VORTICES = _REST
"""Those that know one dtype alone."""
SUPERPIXELS = PATCH_MEANS, LAB, NEAREST, MEANS, CONNECTED = tuple(
    Kernel(name, ()) for name in ("patch_means", "lab", "nearest", "means", "connected")
)
"""So do these."""
BEST_DOUBLE = Kernel("best", ("DOUBLE",))
VORTICES_WEIGHTS = Kernel("vortices", ("WEIGHTS",))

SPIRALS = {kind: Kernel("spirals", (kind.upper(),)) for kind in ("golden", "archimedean", "fibonacci", "whirlwind")}
"""By the kind of spiral."""

SAMPLERS = tuple(f"{name}{of}" for name in ("log_polar", "foveate", "patches") for of in ("", "_of_levels"))
OF_DTYPES = "binomial", "fill", "losses", *SAMPLERS


def variants() -> list[Kernel]:
    """Every kernel that can be asked for."""
    return [
        *(reduction(dtype, reduce, even) for dtype in ELEMENTS for reduce in REDUCTIONS for even in (False, True)),
        *(of_dtype(name, dtype) for name in OF_DTYPES for dtype in ELEMENTS),
        *ALONE,
        *SUPERPIXELS,
        BEST_DOUBLE,
        VORTICES_WEIGHTS,
        *SPIRALS.values(),
    ]


@functools.cache
def texts() -> dict[str, str]:
    """Every source file by its name."""
    return {
        item.name: item.read_text(encoding="utf-8")
        for item in files(__package__).iterdir()
        if item.name.endswith((".cu", ".cuh"))
    }


def headers() -> dict[str, str]:
    return {name: text for name, text in texts().items() if name.endswith(".cuh")}
