"""Scripts in interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)


def in_gpu_check() -> bool:
    """True in `make gpu-check`: nothing else says what becomes of the warnings of scripts."""
    return "GPU_LOD_TEST_WARNINGS" in os.environ


def patience() -> float:
    """Seconds that a script may take. `make gpu-check` ends a process of pytest-xdist that hangs for 60 s, and with it
    what is known of the script: there the test must fail first. A slow machine without a GPU needs longer."""
    return 45 if in_gpu_check() and "PYTEST_XDIST_WORKER" in os.environ else 120


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a fresh interpreter, away from the checkout. A PYTHONPATH goes before the one that is set.

    Warnings are errors unless $GPU_LOD_TEST_WARNINGS says otherwise, where the environment's are not what is tested.
    """
    path = {}
    if "PYTHONPATH" in environment:
        path["PYTHONPATH"] = os.pathsep.join(filter(None, [environment["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", os.environ.get("GPU_LOD_TEST_WARNINGS", "error"), "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=patience(),
        cwd="/",
        env={**os.environ, **environment, **path},
        check=False,
    )


def succeed(code: str, **environment: str) -> str:
    result = run(code, **environment)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout
