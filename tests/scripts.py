"""Scripts in interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)


def run(code: str, *, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
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
        timeout=timeout,
        cwd="/",
        env={**os.environ, **environment, **path},
        check=False,
    )


def succeed(code: str, **environment: str) -> str:
    result = run(code, **environment)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout
