"""The command line, as a subprocess."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image

SERVER = """
import atexit, contextlib, io, json, os, sys, threading
import gpu_lod.cli, gpu_lod.commands.allocation, gpu_lod.commands.drawing
sys.argv = ["gpu-lod", "mipmap", "--levels", "none"]
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    gpu_lod.cli.main()  # reads an option, and says what is wrong
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        sys.argv = ["gpu-lod", *job["arguments"]]
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
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs each command in a process of its own, forked from one that has imported torch and matplotlib, and what typer
needs to read an option and to print an error: that is all that takes long. It opens no OpenGL itself. All that a
process does at its end is done, but for taking torch's modules apart, which takes longer than most commands."""


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """While the block runs, commands do. `folder` is not in the checkout, so that the installed package is found."""
    global _server
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as _server:
        yield
        assert _server.stdin is not None
        _server.stdin.close()


_server: subprocess.Popen[str]


def run(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`gpu-lod ARGUMENTS` in `folder`."""
    files = {name: folder / f".{name}" for name in ("stdout", "stderr")}
    for file in files.values():
        file.write_text("")
    job = {"arguments": arguments, "cwd": str(folder), "env": {"COLUMNS": "200"} | (env or {})}
    job |= {name: str(file) for name, file in files.items()}
    assert _server.stdin is not None and _server.stdout is not None
    print(json.dumps(job), file=_server.stdin, flush=True)
    code = int(_server.stdout.readline())
    return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files.values()))


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
