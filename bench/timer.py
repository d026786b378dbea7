"""The package's own timer, which `gpu-lod calibrate` uses too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu_lod.errors import GpuLodError
from gpu_lod.timing import BLOCK, LONG_MS, PAUSE, Race, Timing, percentile, race, wall_ms

__all__ = ["BLOCK", "LONG_MS", "PAUSE", "Race", "Timing", "able", "percentile", "race", "wall_ms"]


def able(sides: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The sides that run here, each called once, and why the others do not: a device or driver may lack something."""
    able_, dropped = {}, {}
    for name, side in sides.items():
        try:
            side()
        except GpuLodError as error:
            dropped[name] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            able_[name] = side
    return able_, dropped
