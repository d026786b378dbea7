"""The package's own timer, which `gpu-lod calibrate` uses too."""

from gpu_lod.timing import BLOCK, PAUSE, Race, Timing, percentile, race

__all__ = ["BLOCK", "PAUSE", "Race", "Timing", "percentile", "race"]
