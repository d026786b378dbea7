"""Khronos's reference compiler (glslangValidator) beside the driver's: a driver takes what others may refuse."""

from __future__ import annotations

import os
import re
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


def contractible(source: Source, function: str) -> list[str]:
    """The float operations of a function of a compute shader that a driver may fuse with others, as SPIR-V.

    Raises:
        AssertionError: there is no such function, or it has no such operations.
    """
    command = ["glslangValidator", "--stdin", "-S", "comp", "-G", "--aml", "--amb", "-H", "-o", os.devnull]
    listing = subprocess.run(command, input=source.text, capture_output=True, text=True, check=True).stdout
    body = re.search(rf"^ *\d+\({function}\(.*? Function .*?^ +FunctionEnd$", listing, re.DOTALL | re.MULTILINE)
    assert body, f"{source.name} has no function {function}"
    found = re.findall(r"^ *(\d+): +\S+ +(F(?:Add|Sub|Mul)|VectorTimesScalar|Dot) .*$", body[0], re.MULTILINE)
    assert found, f"{function} of {source.name} computes nothing"
    return [
        f"{name} {number}" for number, name in found if not re.search(rf"Decorate {number}\(?.* NoContraction", listing)
    ]


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
