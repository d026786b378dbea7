"""What the tests do of themselves in `make gpu-check`, which may be stopped at any time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    assert scripts.patience() == seconds


@pytest.mark.parametrize("fresh", [True, False])
def test_a_script_that_hangs_is_stopped(fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "patience", lambda: 1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        scripts.run("import time; time.sleep(100)", fresh=fresh)
    monkeypatch.undo()
    assert scripts.succeed("print(1)", fresh=fresh) == "1\n"


@pytest.mark.parametrize("fresh", [True, False])
def test_a_script_finds_an_interpreter_of_its_own(fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setenv("ELSEWHERE", "1")
    code = """
        found = [*globals()]
        import atexit, os, sys, threading, time
        import __main__, warnings
        assert __main__.found is found and not {"os", "sys", "torch"} & {*found}, found
        assert "gpu_lod" not in sys.modules and sys.stdin.read() == "" and os.getcwd() == "/"
        assert sys.path[1:] and sys.argv == ["-c"] and threading.active_count() == 1
        files = [os.path.realpath("/proc/self/fd/" + name) for name in os.listdir("/proc/self/fd")]
        files = [name for name in files if "/libffi.so" not in name]  # which libffi 3.5 opens itself
        assert len(files) == 4, files  # standard ones, and this folder
        print(os.environ.pop("ELSEWHERE"), os.environ["MINE"], os.path.dirname(__import__("beside").__file__))
        try:
            warnings.warn("an error")
        except UserWarning:
            sys.stderr.write("raised ")
        threading.Thread(target=lambda: time.sleep(0.1) or print("waited for")).start()
        atexit.register(print, "at exit")
        class Late:
            def __del__(self):
                print("at the end")
        late = Late()
        sys.exit("left")
        """
    for _ in range(2):  # the first leaves nothing to the second
        result = scripts.run(code, fresh=fresh, MINE="2", PYTHONPATH=str(tmp_path))
        assert result.returncode == 1 and result.stderr == "raised left\n", result.stderr
        assert result.stdout.splitlines() == [f"1 2 {tmp_path}", "waited for", "at exit", "at the end"]


@pytest.mark.parametrize("fresh", [True, False])
def test_what_becomes_of_a_script_is_told(fresh: bool) -> None:
    assert scripts.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", fresh=fresh).returncode == -9
    assert scripts.run("import os; os._exit(7)", fresh=fresh).returncode == 7
    failed = scripts.run("def f():\n    raise KeyError('why')\nf()", fresh=fresh)
    assert failed.returncode == 1 and failed.stdout == ""
    assert 'File "<string>", line 2, in f' in failed.stderr and failed.stderr.endswith("KeyError: 'why'\n")
    with pytest.raises(AssertionError, match="why"):
        scripts.succeed("raise KeyError('why')", fresh=fresh)


def test_what_is_read_at_the_start_is_read() -> None:
    """By an interpreter that starts with it."""
    assert scripts.succeed("import torch; print(torch.get_num_threads())", OMP_NUM_THREADS="1") == "1\n"
    assert scripts.succeed("import sys; print(sys.flags.dev_mode)", PYTHONDEVMODE="1") == "True\n"


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
