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
    """What makes mip chains where none is named."""
    single_pass: tuple[int, int]
    """Workgroup (x, y) of the single-pass generator."""
    subgroups: bool
    """Whether it uses subgroups where the device has them."""
    registers: int
    """Invocations in a workgroup of the registers generator."""
    pairs: bool
    """Whether storage buffers hold floats in pairs, as doubles (shaders/pairs.glsl)."""


def tuning(*, software: bool) -> Tuning:
    """What measured fastest; for hardware renderers, what vendors recommend (see docs/cost_model.md)."""
    if software:
        # A software renderer runs a workgroup as one loop over vectors of 8, and barriers save and restore all of it.
        # It stores doubles in the time of floats, but for LLVM's code with AVX-512 on Intel's CPUs: half as long again
        # on a Xeon. On an EPYC with AVX-512 pairs save a tenth of what stores much, or more.
        pairs = torch.backends.cpu.get_cpu_capability() != "AVX512" or "AMD" in cpu()
        return Tuning(generator="registers", single_pass=(8, 1), subgroups=False, registers=64, pairs=pairs)
    return Tuning(generator="single-pass", single_pass=(32, 8), subgroups=True, registers=64, pairs=False)


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
