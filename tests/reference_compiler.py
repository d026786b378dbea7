"""Khronos's reference compiler (glslangValidator) beside the driver's: a driver takes what others may refuse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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
    note(stages)
    settle()


_noted: dict[tuple[str, str], Source] = {}
_taken: set[int] = set()


def note(stages: Mapping[str, Source]) -> None:
    """Have `settle` look at shaders, but for those that it has seen."""
    for stage, source in stages.items():
        key = STAGES[stage], source.text
        if hash(key) not in _taken:
            _noted[key] = source


def settle() -> None:
    """Look at all that was noted, in one process: starting it takes ten times as long as a shader does.

    Raises:
        AssertionError: what it says of the first shader that it refuses.
    """
    shaders = list(_noted.items())
    _noted.clear()
    if not shaders:
        return
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{index}.{stage}" for index, ((stage, _), _) in enumerate(shaders)]
        for file, ((_, text), _) in zip(files, shaders, strict=True):
            Path(folder, file).write_text(text, "utf-8")
        run = subprocess.run(["glslangValidator", *files], cwd=folder, capture_output=True, text=True, check=False)
    lines = (run.stdout + run.stderr).splitlines()
    lines = lines if len(files) > 1 else [*files, *lines]  # it names a file before it says anything, but a single one
    said: dict[str, list[str]] = {}
    for line in lines:
        said.setdefault(line if line in files else next(reversed(said), ""), []).append(line)
    assert [*said] == files, run.stdout + run.stderr
    for file, (key, source) in zip(files, shaders, strict=True):
        log = "\n".join(line for line in said[file] if line != file).strip()
        assert not log, f"the reference compiler refuses {source.name}:\n{source.translate(log)}"
        _taken.add(hash(key))
    assert run.returncode == 0, run.stdout + run.stderr


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
    """Every shader that the driver compiles must pass here too: `settle` says whether it did."""
    by_driver = Programs._compile

    def by_both(self: Programs, stages: dict[str, Source]) -> Program:
        program = by_driver(self, stages)
        note(stages)
        return program

    with pytest.MonkeyPatch.context() as patch:
        if is_here():
            patch.setattr(Programs, "_compile", by_both)
        yield
