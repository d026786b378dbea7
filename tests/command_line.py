"""The command line, as a subprocess."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import torch
from PIL import Image
from scripts import Forker

PREPARED = """
import contextlib, io, sys
import gpu_lod.cli, gpu_lod.commands.allocation, gpu_lod.commands.drawing
sys.argv = ["gpu-lod", "mipmap", "--levels", "none"]
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    gpu_lod.cli.main()  # reads an option, and says what is wrong
"""
"""torch and matplotlib, and what typer needs to read an option and to print an error: that is all that takes long. It
opens no OpenGL."""

COMMAND = """
import atexit, os, sys, threading
import gpu_lod.cli
sys.argv = {arguments!r}
code = 0
try:
    gpu_lod.cli.main()
except SystemExit as left:
    code = left.code or 0
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""
"""All that a process does at its end is done, but for taking torch's modules apart, which takes longer than most
commands."""


@functools.cache
def _prepared() -> Forker:
    return Forker(PREPARED)


def run(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`gpu-lod ARGUMENTS` in `folder`."""
    code = COMMAND.format(arguments=["gpu-lod", *arguments])
    return _prepared().run(code, {**os.environ, "COLUMNS": "200", **(env or {})}, folder=str(folder))


def done(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """The same, which must succeed and say nothing on stderr; returns stdout."""
    result = run(folder, *arguments, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def refused(folder: Path, *cases: tuple[str, int, str], env: dict[str, str] | None = None) -> None:
    """Every case (arguments, exit code, what the message holds) must fail in one line that a person can read."""
    for arguments, code, message in cases:
        result = run(folder, *arguments.split(), env=env)
        assert result.returncode == code, (arguments, result.stderr)
        assert result.stdout == "", arguments
        assert "Traceback" not in result.stderr
        if "Usage:" in result.stderr:  # wrong arguments are framed, and help is offered
            assert code == 2 and message in " ".join(result.stderr.replace("│", " ").split())
        else:
            assert result.stderr.startswith("gpu-lod: ") and result.stderr.count("\n") == 1, (arguments, result.stderr)
            assert message in result.stderr


def cat(folder: Path) -> Path:
    """An RGB picture of 37 x 26."""
    values = torch.rand(26, 37, 3, generator=torch.Generator().manual_seed(0)).mul(255).byte()
    path = folder / "cat.png"
    Image.fromarray(values.numpy()).save(path)
    return path
