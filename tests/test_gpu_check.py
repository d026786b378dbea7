"""`make gpu-check` without a GPU: an interpreter that says there is one, and stages that do as they are told."""

from __future__ import annotations

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import run

CHECKOUT = Path(__file__).resolve().parents[1]
SCRIPT = CHECKOUT / ".ci" / "gpu-check.sh"
ALLOWED = {
    "doctor.json",
    "gpu-tests.log",
    "bench.json",
    "allocators.json",
    "bridge.json",
    "kernels.json",
    "calibrated.json",
    "summary.txt",
}
STAGES = ("setup", "doctor", "compile", "tests", "kernels", "bench", "bridge", "allocators", "calibrate")

# Stands for python3. Each stage leaves its environment and arguments in $SEEN, and does what $STAGE says, if anything.
FAKE = """#!/usr/bin/env bash
case "$*" in
    *cuda.is_available*) exit 0 ;;
    *"gpu_lod.cli doctor"*) stage=doctor ;;
    *"gpu_lod.cli calibrate"*) stage=calibrate ;;
    *"-m pytest"*) stage=tests ;;
    *bench_bridge.py*) stage=bridge ;;
    *bench_shared_memory.py*) stage=shared_memory ;;
    *bench_allocate.py*) stage=allocators ;;
    *bench_kernels.py*) stage=kernels ;;
    *--compile*) stage=compile ;;
    *run.py*) stage=bench ;;
    *) exec {python} "$@" ;;
esac
env -0 >"$SEEN/$stage.env"
printf '%s\\n' "$@" >"$SEEN/$stage.args"
words=("$@")
pwd >"$SEEN/$stage.cwd"
[[ ${{LOOK_IN:-}} != *$stage* ]] || {python} -c 'import gpu_lod.bridge, gpu_lod.shaders, json
from importlib.metadata import version
print(json.dumps([gpu_lod.__file__, gpu_lod.bridge.__file__, gpu_lod.shaders.__file__, version("gpu-lod")]))' \\
    >"$SEEN/$stage.package"
case "$stage" in
    doctor) echo '{{"ok": true, "findings": [{{"name": "a", "status": "warn", "found": "b", "fix": "c"}}]}}' ;;
    calibrate) mkdir -p "$GPU_LOD_CACHE/calibration" && echo '{{"format": 1}}' >"$GPU_LOD_CACHE/calibration/a.json" ;;
    tests) echo "== 3 passed in 0.01s ==" ;;
    *) echo "$stage done" ;;
esac
while [ $# -gt 0 ]; do [ "$1" = --out ] && echo '{{}}' >"$2"; shift; done
eval "${{!stage:-}}"
"""


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    folder = tmp_path / "seen"
    folder.mkdir()
    return folder


@pytest.fixture
def check(tmp_path: Path, seen: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the script with a fake interpreter; keyword arguments are environment variables."""
    python = tmp_path / "python3"
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "__EGL", "LD_"))}
        mine |= {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "SEEN": str(seen), "TMPDIR": str(tmp_path)}
        command = ["bash", str(SCRIPT)]
        return subprocess.run(
            command, env=mine | environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the last lines say of each stage."""
    lines = done.stdout.splitlines()[-len(STAGES) - 1 : -1]
    assert [line.split()[0] for line in lines] == list(STAGES), done.stdout + done.stderr
    return {line.split()[0]: line.split()[1] for line in lines}


def environment(seen: Path, stage: str) -> dict[str, str]:
    pairs = (seen / f"{stage}.env").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


# -- no GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["a GPU", "torch", "an interpreter"])
def test_without_a_gpu_it_says_so_in_one_line(without: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    if without != "an interpreter":
        hide = "-S" if without == "torch" else ""  # no site-packages
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {hide} "$@"\n')
        python.chmod(0o755)
    mine = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    mine |= {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=mine, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    [line] = (done.stdout + done.stderr).splitlines()
    assert line.startswith("gpu-check: no GPU here")
    expected = {"a GPU": "finds no CUDA device", "torch": "no PyTorch", "an interpreter": "python3"}
    assert expected[without] in line
    assert not (tmp_path / "out").exists()


def test_minutes_that_are_no_number_are_refused(check: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = check(MINUTES="soon")
    assert done.returncode == 2
    assert "MINUTES is soon" in done.stdout


def test_make_hands_its_variables_on() -> None:
    given = [
        "WHEELS=w",
        "LIBS=l",
        "MINUTES=3",
        "STAGES=doctor tests",
        "TESTS=not hiz",
        "WORKERS=8",
        "GO_ON=b.json",
        "CACHE=c",
    ]
    command = ["make", "-n", "-C", str(CHECKOUT), "gpu-check", *given, "CACHE=c"]
    mine = {key: value for key, value in os.environ.items() if key not in ("OUT", "MAKEFLAGS", "MAKELEVEL")}
    line = subprocess.run(command, env=mine, capture_output=True, text=True, check=True).stdout
    passed = (
        "OUT='out/gpu-check' MINUTES='3' STAGES='doctor tests' TESTS='not hiz' WORKERS='8' GO_ON='b.json' CACHE='c'"
    )
    assert f"WHEELS='w' LIBS='l' {passed} .ci/gpu" in line
    assert os.access(SCRIPT, os.X_OK)


def test_stages_that_are_none_are_refused(check: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = check(STAGES="doctor test")
    assert done.returncode == 2
    assert "STAGES names test;" in done.stdout


# -- all is well -------------------------------------------------------------------------------------------------------


def test_every_stage_runs_the_copy_of_the_package(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    old = tmp_path / "out" / "bench.json.part"
    old.parent.mkdir()
    old.write_text("an earlier run's")
    done = check(LOOK_IN="tests bench")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(verdicts(done).values()) == {"ok"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == ALLOWED and len(ALLOWED) == 8
    assert json.loads((tmp_path / "out" / "calibrated.json").read_text()) == {"format": 1}
    assert not old.exists(), "what no stage wrote this time"
    assert "warn: a: b; c" in done.stdout, "what the doctor finds wrong is shown"
    for stage in ("tests", "bench"):
        package, *parts, version = json.loads((seen / f"{stage}.package").read_text())
        assert not Path(package).is_relative_to(CHECKOUT)
        assert [Path(part).relative_to(Path(package).parent) for part in parts] == [
            Path("bridge/__init__.py"),
            Path("shaders/__init__.py"),
        ]
        assert f'version = "{version}"' in (CHECKOUT / "pyproject.toml").read_text()
        assert not Path(package).exists(), "the copy is gone in the end"
    for stage in ("doctor", "compile", "tests", "kernels", "bridge", "allocators", "calibrate", "bench"):
        where = (seen / f"{stage}.cwd").read_text().strip()
        assert not Path(where).is_relative_to(CHECKOUT), "the checkout would shadow the copy"
    assert environment(seen, "tests")["GPU_LOD_TEST_INSTALLED"] == "1"


def test_warnings_of_the_environment_fail_no_script(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tests that run scripts, as of pytest itself."""
    warn = "import warnings; warnings.warn('of a package that is here by chance')"
    assert run(warn).returncode == 1, "elsewhere they are errors"
    check()
    monkeypatch.setenv("GPU_LOD_TEST_WARNINGS", environment(seen, "tests")["GPU_LOD_TEST_WARNINGS"])
    assert run(warn).returncode == 0


def small_calls_share() -> float:
    code = (CHECKOUT / "bench" / "bench_bridge.py").read_text()
    shares = next(node for node in ast.parse(code).body if ast.unparse(node).startswith("SHARES = "))
    return float(ast.literal_eval(shares.value)["small_calls"])  # type: ignore[attr-defined]


def test_stages_are_told_where_to_write_and_how_long_they_have(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    check(MINUTES="9")
    out = str(tmp_path / "out")
    bench = (seen / "bench.args").read_text().split()
    assert bench[1:3] == ["--device", "cuda"]
    assert f"{out}/bench.json" in bench
    assert 3.5 < float(bench[bench.index("--minutes") + 1]) < 4, "about half of all, less a reserve"
    bridge = (seen / "bridge.args").read_text().split()
    assert f"{out}/bridge.json" in bridge
    seconds = int(bridge[bridge.index("--seconds") + 1])
    assert 50 < seconds < 90, "well below its limit"
    assert seconds * small_calls_share() > 1.2 * 1e5 * 429e-6, "there is time for all small calls, as a GPU took them"
    allocators = (seen / "allocators.args").read_text().split()
    assert 40 < int(allocators[allocators.index("--seconds") + 1]) < 60, "a job that has begun may end"
    calibrate = (seen / "calibrate.args").read_text().split()
    assert calibrate[calibrate.index("--tensors") + 1] == "cuda"
    assert 0.7 < float(calibrate[calibrate.index("--minutes") + 1]) < 1, "four fifths of its part"
    tests = (seen / "tests.args").read_text().split()
    assert tests[tests.index("-m", 2) + 1] == "gpu"
    marked = [word for word in tests if word.endswith(".py")]
    assert all("mark.g" + "pu" in Path(file).read_text() for file in marked)  # in two words, lest this file be one
    assert str(Path(__file__)) not in marked


def test_stages_that_are_wanted_share_the_time(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    done = check(MINUTES="9", STAGES="tests bridge", TESTS="mean_chains or hiz", WORKERS="3")
    assert [line.split()[0] for line in done.stdout.splitlines()[-4:-1]] == ["setup", "tests", "bridge"]
    assert "0 of 3 stages failed" in done.stdout and done.returncode == 0
    assert {path.stem for path in seen.glob("*.args")} == {"tests", "bridge"}
    words = (seen / "tests.args").read_text().splitlines()
    assert words[words.index("-k") + 1] == "mean_chains or hiz"
    assert words[words.index("-n") + 1] == "3"
    bridge = (seen / "bridge.args").read_text().split()
    assert 140 < int(bridge[bridge.index("--seconds") + 1]) < 160, "three fifths of less than a half"
    files = [Path(word).stem for word in words if word.endswith(".py")]
    assert files[-2:] == ["test_gpu_allocate", "test_gpu_memory"], "what may do harm comes last"
    check()
    assert "-k" not in (seen / "tests.args").read_text().splitlines()


def test_what_measures_the_memory_runs_by_itself(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    """Behind what was compiled beside the other tests."""
    order = 'echo "$stage ${words[*]: -1}" >>"$SEEN/order"'
    slow = f"sleep 1; {order.replace('${words[*]: -1}', 'is over')}"
    done = check(STAGES="compile tests bench", WORKERS="4", tests=order, compile=slow, bench=order)
    assert done.returncode == 0, done.stdout
    lines = [line.split()[0] for line in done.stdout.splitlines()[-6:-1]]
    assert lines == ["setup", "tests", "compile", "tests-alone", "bench"]
    told = [line.rsplit("/", 1)[-1] for line in (seen / "order").read_text().splitlines()]
    assert told[0] == "test_gpu_allocate.py" and told[1] == "compile is over"
    assert "compile is over" not in told[-2:] and told[-2] == "test_gpu_memory.py"
    words = (seen / "tests.args").read_text().splitlines()
    assert words[words.index("-n") + 1] == "1"
    assert (tmp_path / "out" / "gpu-tests.log").read_text().count("3 passed") == 2


def test_what_is_compiled_ahead_is_what_is_measured(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    """The same folders; without what was chosen by times that were taken beside one another."""
    leave = 'mkdir -p "$TORCHINDUCTOR_CACHE_DIR/a" && touch "$TORCHINDUCTOR_CACHE_DIR/a/"{kernel.py,kernel.best_config}'
    look = '(cd "$TORCHINDUCTOR_CACHE_DIR" && find . -type f) >"$SEEN/kept"'
    done = check(STAGES="compile bench", CACHE="cache", compile=leave, bench=look)
    assert done.returncode == 0, done.stdout
    assert (seen / "kept").read_text().split() == ["./a/kernel.py"]
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert environment(seen, "compile")[name] == environment(seen, "bench")[name]
        assert environment(seen, "bench")[name].startswith(f"{tmp_path}/cache/")
    part, parts = (seen / "compile.args").read_text().split()[-1].split("/")
    assert int(part) < int(parts) <= 6
    check(STAGES="bench")
    assert not Path(environment(seen, "bench")["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path / "cache")


def test_a_run_of_the_benchmarks_is_gone_on_with(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    """The earlier file may be where the new one goes."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bench.json").write_text('{"earlier": 1}')
    done = check(STAGES="bench", GO_ON="out/bench.json", bench='cp "${words[-1]}" "$SEEN/earlier"')
    assert done.returncode == 0, done.stdout
    assert json.loads((seen / "earlier").read_text()) == {"earlier": 1}
    check(STAGES="bench")
    assert "--go-on" not in (seen / "bench.args").read_text().splitlines()


def test_the_tests_are_collected_and_skipped_ones_are_no_success(
    check: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The real pytest, of which everything is skipped for want of a GPU."""
    real = tmp_path / "real"
    real.write_text(f'#!/bin/sh\ncase "$*" in *cuda.is_available*|*bench/*) ;; *) exec {sys.executable} "$@" ;; esac\n')
    real.chmod(0o755)
    done = check(PYTHON=str(real), CUDA_VISIBLE_DEVICES="", STAGES="tests")
    assert done.returncode == 1 and "1 of 2 stages failed" in done.stdout
    log = (tmp_path / "out" / "gpu-tests.log").read_text()
    assert log.splitlines()[-1] == "no test ran"
    assert "instead of the installed wheel" not in log, "the checkout stands in for the copy"
    assert " error" not in log and (" skipped in" in log or "no tests ran" in log or "deselected" in log)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage", ["doctor", "compile", "tests", "kernels", "bridge", "allocators", "calibrate", "bench"]
)
def test_a_failure_is_told_and_later_stages_run(
    stage: str, check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    done = check(**{stage: "echo the reason >&2; echo the end >&2; exit 3"})
    assert done.returncode == 1
    found = verdicts(done)
    assert found.pop(stage) == "FAILED"
    assert set(found.values()) == {"ok"}
    assert (seen / "allocators.args").exists()
    assert "the reason" in done.stdout and "the reason" in (tmp_path / "out" / "summary.txt").read_text()
    assert "1 of 9 stages failed" in done.stdout


def test_a_stage_that_hangs_is_stopped(check: Callable[..., subprocess.CompletedProcess[str]], seen: Path) -> None:
    # The bridge may take 24% of 30 s.
    done = check(bridge="trap '' INT; exec -a hanging sleep 60", MINUTES="0.5")
    found = verdicts(done)
    assert found["bridge"] == "TIMED"
    assert found["calibrate"] == found["allocators"] == "ok"
    assert done.returncode == 1
    assert "stopped after 7 s" in done.stdout


def test_without_time_a_stage_is_skipped_and_that_is_no_success(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path
) -> None:
    done = check(MINUTES="0.1")
    assert set(verdicts(done).values()) == {"ok", "SKIPPED"}
    assert not (seen / "bench.args").exists()
    assert done.returncode == 1


def test_a_doctor_that_says_nothing_leaves_no_file(
    check: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text(python.read_text().replace("doctor) echo '{", "doctor) echo '"))
    assert "the doctor wrote no JSON" in check().stdout
    assert not (tmp_path / "out" / "doctor.json").exists()


def test_a_test_that_loses_the_gpu_takes_no_other_with_it(tmp_path: Path) -> None:
    """In the process beside pytest's, in which the script runs them. What they ask of torch they replace."""
    (tmp_path / "torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: False)\n")
    (tmp_path / "test_some.py").write_text(
        """
import torch

def test_before():
    pass

def test_loses_it():
    def lost():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost
    raise ValueError("what it found")

def test_after():
    assert not torch.cuda.is_initialized()
"""
    )
    mine = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    mine |= {
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist.plugin",
        "-n",
        "1",
        "-p",
        "lost_gpu",
        "-v",
        "-c",
        os.devnull,
    ]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path)],
        env=mine | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 passed" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert "what it found" in done.stdout and "leaves CUDA unusable: an illegal" in done.stdout + done.stderr


# -- folders of wheels and libraries -----------------------------------------------------------------------------------


def wheel(folder: Path, name: str, *, broken: bool = False, under: str = "") -> None:
    """A package of one module, which knows its name; of a namespace, if it is under one."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    if broken:
        path.write_text("no wheel")
        return
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{under}{name}.py", f"NAME = {name!r}\n")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{about}/RECORD", f"{under}{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n"
        )


LOOK = (
    """{python} -c 'import tiny_package as t, os; open(os.environ["SEEN"] + "/tiny", "w").write(t.__file__ + t.NAME)'"""
)


def test_wheels_that_are_missing_are_put_on_the_path(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    wheel(tmp_path / "wheels", "tiny_package")
    wheel(tmp_path / "wheels", "torch")  # there already
    done = check(WHEELS="wheels", doctor=LOOK.format(python=sys.executable))
    assert done.returncode == 0, done.stdout
    assert (seen / "tiny").read_text().endswith("tiny_package.pytiny_package")
    assert "torch-1.0" not in (tmp_path / "out" / "summary.txt").read_text()


def test_a_broken_wheel_does_not_spoil_the_others(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    wheel(tmp_path / "wheels", "tiny_package")
    wheel(tmp_path / "wheels", "a_broken_one", broken=True)
    done = check(WHEELS=str(tmp_path / "wheels"), doctor=LOOK.format(python=sys.executable))
    assert verdicts(done)["setup"] == "FAILED"
    assert done.returncode == 1
    assert (seen / "tiny").exists()
    assert "could not install a_broken_one" in done.stdout


def test_beside_a_broken_wheel_a_namespace_keeps_all_of_its_packages(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        wheel(tmp_path / "wheels", name, under="tiny_space/")
    wheel(tmp_path / "wheels", "a_broken_one", broken=True)
    look = """{python} -c 'import os, tiny_space.one, tiny_space.two; open(os.environ["SEEN"] + "/both", "w")'"""
    check(WHEELS=str(tmp_path / "wheels"), doctor=look.format(python=sys.executable))
    assert (seen / "both").exists()


def test_the_commit_may_be_told(check: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    check(GPU_LOD_COMMIT="0123abc")
    assert "gpu-check of 0123abc\n" in (tmp_path / "out" / "summary.txt").read_text()
    ask = f"import sys; sys.path.insert(0, {str(CHECKOUT / 'bench')!r}); import rows; print(rows.COMMIT)"
    assert run(ask, GPU_LOD_COMMIT="0123abc").stdout.strip() == "0123abc"


def test_a_warning_after_the_last_line_of_pytest_is_no_failure(
    check: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert verdicts(check(tests="echo late >&2"))["tests"] == "ok"


def test_without_pip_wheels_are_unpacked(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text(python.read_text().replace('case "$*" in', 'case "$*" in "-m pip "*) exit 1 ;;'))
    wheel(tmp_path / "wheels", "tiny_package")
    done = check(WHEELS=str(tmp_path / "wheels"), doctor=LOOK.format(python=sys.executable))
    assert done.returncode == 0, done.stdout
    assert (seen / "tiny").exists()


@pytest.mark.parametrize("variable", ["WHEELS", "LIBS"])
def test_a_folder_that_is_not_there_is_told(
    variable: str, check: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = check(**{variable: "nowhere"})
    found = verdicts(done)
    assert found.pop("setup") == "FAILED"
    assert set(found.values()) == {"ok"}, "the rest is tried all the same"
    assert f"there is no folder {tmp_path}/nowhere" in done.stdout


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg here, so no .deb files")
@pytest.mark.parametrize("brings", ["10_nvidia.json", "20_another.json"])
def test_libraries_are_unpacked_and_vendors_named(
    brings: str, check: Callable[..., subprocess.CompletedProcess[str]], seen: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    vendors = tree / "usr/share/glvnd/egl_vendor.d"
    for folder in (tree / "DEBIAN", libraries, vendors, tmp_path / "libs"):
        folder.mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: tiny\n"
    )
    (libraries / "libtiny.so.1").write_text("a library")
    (vendors / brings).write_text("{}")
    (vendors / "50_other.json").write_text("{}")
    subprocess.run(["dpkg-deb", "--build", tree, tmp_path / "libs/tiny.deb"], check=True, capture_output=True)
    look = 'ls "${LD_LIBRARY_PATH%%:*}" >"$SEEN/libraries"'
    done = check(LIBS=str(tmp_path / "libs"), LD_LIBRARY_PATH="/before", doctor=look)
    assert done.returncode == 0, done.stdout
    assert (seen / "libraries").read_text() == "libtiny.so.1\n"
    for stage in ("doctor", "tests", "bench"):
        mine = environment(seen, stage)
        paths = mine["LD_LIBRARY_PATH"].split(":")
        assert paths[0].endswith("/usr/lib/x86_64-linux-gnu")
        assert paths[-1] == "/before"
        assert "" not in paths, "an empty entry is the current folder"
        there = [
            file for folder in ("/etc", "/usr/share") for file in Path(folder, "glvnd/egl_vendor.d").glob("*.json")
        ]
        named = [Path(file).name for file in mine.get("__EGL_VENDOR_LIBRARY_FILENAMES", "").split(":")]
        if any("nvidia" in file.name for file in there):
            assert named == [""], "glvnd finds it by itself"
        elif brings != "10_nvidia.json" and not Path("/usr/local/nvidia").exists():
            assert named == [""], "there is nothing of NVIDIA's to point at"
        else:
            assert named[0] == "10_nvidia.json"
            assert {"50_other.json", *(file.name for file in there)} <= {*named}, "a list hides what is not in it"
    assert not Path("/usr/lib/x86_64-linux-gnu/libtiny.so.1").exists()


def test_without_folders_the_environment_stays_as_it_is(
    check: Callable[..., subprocess.CompletedProcess[str]], seen: Path
) -> None:
    check(LD_LIBRARY_PATH="/before", PYTHONPATH="/elsewhere")
    mine = environment(seen, "bench")
    assert "__EGL_VENDOR_LIBRARY_FILENAMES" not in mine or "/nvidia" in mine["__EGL_VENDOR_LIBRARY_FILENAMES"]
    assert mine["LD_LIBRARY_PATH"].split(":")[-1] == "/before"
    assert mine["PYTHONPATH"].split(":")[-1] == "/elsewhere"
