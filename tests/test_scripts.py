"""What the tests do of themselves in `make gpu-check`, which may be stopped at any time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scripts

PATH = os.pathsep.join(filter(None, [scripts.HERE, os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize(
    ("checks", "beside", "seconds"), [(True, True, 45), (True, False, 120), (False, True, 120), (False, False, 120)]
)
def test_a_script_that_hangs_fails_its_test_before_the_process_is_ended(
    checks: bool, beside: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, there in (("GPU_LOD_TEST_WARNINGS", checks), ("PYTEST_XDIST_WORKER", beside)):
        if there:
            monkeypatch.setenv(name, "default")
        else:
            monkeypatch.delenv(name, raising=False)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: seen.update(options) or SimpleNamespace())
    scripts.run("pass")
    assert seen["timeout"] == seconds


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("checks", [True, False])
def test_a_run_that_is_killed_has_told_what_failed(tmp_path: Path, checks: bool, beside: bool) -> None:
    (tmp_path / "test_some.py").write_text(
        """
import os, pytest, time

@pytest.fixture
def broken():
    raise KeyError("before it began")

def test_one():
    assert 1 + 1 == 3, "the reason"

def test_two(broken):
    pass

def test_three():
    pass

def test_ends_all():
    time.sleep(1)  # until the others have been reported
    os.kill(int(os.environ["MAIN"]), 9)
    os._exit(1)
"""
    )
    (tmp_path / "main.py").write_text("import os, pytest; os.environ['MAIN'] = str(os.getpid()); pytest.main()")
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "GPU_LOD_TEST"))}
    mine |= {"PYTHONPATH": PATH, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    mine["PYTEST_ADDOPTS"] = f"-p at_once -v -p no:cacheprovider -c {os.devnull} --rootdir {tmp_path} {tmp_path}"
    if beside:
        mine["PYTEST_ADDOPTS"] += " -p xdist.plugin -n 1"
    if checks:
        mine["GPU_LOD_TEST_WARNINGS"] = "default"
    done = subprocess.run(
        [sys.executable, "main.py"], env=mine, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -9 and "test_three" in done.stdout, done.stdout + done.stderr
    for words in ("the reason", "assert (1 + 1) == 3", "before it began", "test_some.py::test_two (setup)"):
        assert (words in done.stdout) is checks, done.stdout
