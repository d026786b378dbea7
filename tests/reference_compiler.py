"""Khronos's reference compiler (glslangValidator) beside the driver's: a driver takes what others may refuse."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import pytest

from gpu_lod.program import Program, Programs
from gpu_lod.shaders import Source

STAGES = {"compute_shader": "comp", "vertex_shader": "vert", "geometry_shader": "geom", "fragment_shader": "frag"}


def is_here() -> bool:
    return shutil.which("glslangValidator") is not None


def refuse(stages: Mapping[str, Source]) -> None:
    """
    Raises:
        AssertionError: what it says of the shaders, where it refuses one.
    """
    for stage, source in stages.items():
        if log := _problems(STAGES[stage], source.text):
            raise AssertionError(f"the reference compiler refuses {source.name}:\n{source.translate(log)}")


@cache
def _problems(stage: str, text: str) -> str:
    run = subprocess.run(["glslangValidator", "--stdin", "-S", stage], input=text, capture_output=True, text=True)
    return (run.stdout + run.stderr).strip() if run.returncode or "WARNING" in run.stdout else ""


@contextmanager
def beside_the_driver() -> Iterator[None]:
    """Every shader that the driver compiles must pass here too."""
    by_driver = Programs._compile

    def by_both(self: Programs, stages: dict[str, Source]) -> Program:
        program = by_driver(self, stages)
        refuse(stages)
        return program

    with pytest.MonkeyPatch.context() as patch:
        if is_here():
            patch.setattr(Programs, "_compile", by_both)
        yield
