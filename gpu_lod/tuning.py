"""Tuning constants: what differs between devices in speed alone."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Tuning:
    """For one device."""

    generator: str
    """What makes mip chains where none is named, of images whose sides are multiples of 64."""
    other_generator: str
    """Of all others, and where values are converted on the way."""
    single_pass: tuple[int, int]
    """Workgroup (x, y) of the single-pass generator."""
    subgroups: bool
    """Whether it uses subgroups where the device has them."""
    registers: int
    """Invocations in a workgroup of the registers generator."""
    pairs: bool
    """Whether storage buffers hold floats in pairs, as doubles (shaders/pairs.glsl)."""


def tuning(*, software: bool) -> Tuning:
    """What measured fastest (docs/cost_model.md); workgroups for hardware renderers are what vendors recommend."""
    if software:
        # A software renderer runs a workgroup as one loop over vectors of 8, and barriers save and restore all of it.
        # It stores doubles in the time of floats, but for LLVM's code with AVX-512 on Intel's CPUs: half as long again
        # on a Xeon. On an EPYC with AVX-512 pairs save a tenth of what stores much, or more.
        pairs = torch.backends.cpu.get_cpu_capability() != "AVX512" or "AMD" in cpu()
        return Tuning(
            generator="registers",
            other_generator="registers",
            single_pass=(8, 1),
            subgroups=False,
            registers=64,
            pairs=pairs,
        )
    # On an H200 three levels in registers take as long as a single pass at 1024 x 1024, and from 2048 on up to a third
    # less. Below odd sides they are a dispatch each.
    return Tuning(
        generator="registers",
        other_generator="single-pass",
        single_pass=(32, 8),
        subgroups=True,
        registers=64,
        pairs=False,
    )


def generator_of(tuned: Tuning, image: torch.Tensor, *, converted: bool = False) -> str:
    """What makes the mip chain of an image [..., H, W] where no generator is named.

    Args:
        converted: its values are scaled, or become another dtype, on the way.
    """
    even = image.shape[-2] % 64 == 0 and image.shape[-1] % 64 == 0
    return tuned.generator if even and not converted else tuned.other_generator


@functools.cache
def cpu() -> str:
    """The CPU's model."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
