"""Scripts in interpreters of their own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)

READ_AT_THE_START = ("GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_")
"""How the names of variables begin that an interpreter, or torch, has read when a script begins."""


def in_gpu_check() -> bool:
    """True in `make gpu-check`: nothing else says what becomes of the warnings of scripts."""
    return "GPU_LOD_TEST_WARNINGS" in os.environ


def patience() -> float:
    """Seconds that a script may take. `make gpu-check` ends a process of pytest-xdist that hangs for 60 s, and with it
    what is known of the script: there the test must fail first. A slow machine without a GPU needs longer."""
    return 45 if in_gpu_check() and "PYTEST_XDIST_WORKER" in os.environ else 120


class Forker:
    """A process that has imported what takes long, and forks one for each script. It ends when this process does.

    To the script it is an interpreter of its own: `__main__` is empty, standard input too, and Python ends as it does.

    Args:
        prepare: what it does before the first one.
        flags: of Python.
    """

    _SERVE = """
import json, os, select, signal, sys, types

def script():
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            return job
        process = os.pidfd_open(child)
        in_time = bool(select.select([process], [], [], job["seconds"])[0])
        if not in_time:
            os.kill(child, signal.SIGKILL)
        os.close(process)
        print(json.dumps([in_time, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)
    sys.exit()

job = script()
for number, name in enumerate((os.devnull, job["stdout"], job["stderr"])):
    file = os.open(name, os.O_RDWR)
    os.dup2(file, number)
    os.close(file)
os.chdir(job["folder"])
os.environ.clear()
os.environ.update(job["environment"])
sys.path[1:1] = job["path"]
sys.modules["__main__"] = main = types.ModuleType("__main__")
exec(compile(job["code"], "<string>", "exec"), main.__dict__)
"""

    def __init__(self, prepare: str, *flags: str) -> None:
        self._lock = threading.Lock()
        command = [sys.executable, *flags, "-c", prepare + self._SERVE]
        self._process = subprocess.Popen(command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, code: str, environment: dict[str, str], *, folder: str = "/", path: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """
        Args:
            environment: all of it.
            path: where modules are looked for before they are elsewhere.

        Raises:
            subprocess.TimeoutExpired: it was stopped after `patience()`.
        """
        with self._lock, tempfile.TemporaryDirectory() as own:
            files = {name: Path(own, name) for name in ("stdout", "stderr")}
            for file in files.values():
                file.touch()
            job = {"code": code, "environment": environment, "folder": folder, "path": path, "seconds": patience()}
            job |= {name: str(file) for name, file in files.items()}
            assert self._process.stdin is not None and self._process.stdout is not None
            print(json.dumps(job), file=self._process.stdin, flush=True)
            in_time, exit_code = json.loads(self._process.stdout.readline())
            said = [file.read_text() for file in files.values()]
        if not in_time:
            raise subprocess.TimeoutExpired(code, patience(), *said)
        return subprocess.CompletedProcess(code, exit_code, *said)


def run(code: str, *, fresh: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, away from the checkout. A PYTHONPATH goes before the one that is set.

    Warnings are errors unless $GPU_LOD_TEST_WARNINGS says otherwise, where the environment's are not what is tested.

    Args:
        fresh: in an interpreter that has just been started, not one that has imported torch: where it matters what the
            process did before, or more than one run at once. In `make gpu-check` every script is, and one that is given
            a variable which is read at the start.

    Raises:
        subprocess.TimeoutExpired: it was stopped after `patience()`.
    """
    code = textwrap.dedent(code)
    path = environment.pop("PYTHONPATH", None)
    fresh = fresh or in_gpu_check() or any(name.startswith(READ_AT_THE_START) for name in environment)
    environment = {**os.environ, **environment}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    if not fresh:
        return _with_torch().run(code, environment, path=() if path is None else (path,))
    warnings = os.environ.get("GPU_LOD_TEST_WARNINGS", "error")
    command, seconds = [sys.executable, "-W", warnings, "-c", code], patience()
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd="/", env=environment, check=False
    )


@functools.cache
def _with_torch() -> Forker:
    return Forker("import torch", "-W", "error")


def succeed(code: str, *, fresh: bool = False, **environment: str) -> str:
    result = run(code, fresh=fresh, **environment)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout
