"""Wheel, sdist and editable install each hold the whole package, and importing it opens nothing.

Each install goes to a venv of its own that shares this environment's other packages, and is looked at from outside the
checkout. No step needs the network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
CLI_EXTRA = ("typer", "rich", "PIL", "matplotlib", "skimage", "safetensors")
KINDS = ("wheel", "sdist", "editable")
# Folders of the checkout, and where they are installed.
PACKAGES = {"gpu_lod": "gpu_lod", "bridge": "gpu_lod/bridge", "shaders": "gpu_lod/shaders"}

# Prints what the installed package is and what importing it brought in, beyond what torch and moderngl bring.
PROBE = """
import json, sys
def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1].rpartition("/")[2] for line in maps if ".so" in line}
import torch, moderngl
modules, loaded = set(sys.modules), libraries()
import gpu_lod
import gpu_lod.bridge
import gpu_lod.shaders
from importlib.metadata import metadata
from importlib.resources import files
names = gpu_lod.shaders.names()
result = {
    "root": gpu_lod.__path__[0],
    "bridge": gpu_lod.bridge.__file__,
    "typed": files("gpu_lod").joinpath("py.typed").is_file(),
    "shaders": {name: gpu_lod.shaders.source(name).text for name in names if not name.endswith(".glsl")},
    "includes": [name for name in names if name.endswith(".glsl")],
    "version": [gpu_lod.__version__, metadata("gpu-lod")["Version"]],
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "libraries": sorted(libraries() - loaded),
}
json.dump(result, sys.stdout)
"""


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The finished process. Its environment leaves out what would lead Python to other packages."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done


def copy_checkout(target: Path) -> Path:
    """What a build reads, so that nothing is left in the checkout and nothing stale in it is used."""
    target.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, target)
    (target / "tests").mkdir()
    shutil.copy(Path(__file__), target / "tests")
    for name in PACKAGES:
        shutil.copytree(CHECKOUT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def installed_names() -> dict[str, str]:
    """Every file that an installed package holds, and where the checkout has it."""
    return {
        f"{package}/{path.relative_to(CHECKOUT / folder)}": str(path.relative_to(CHECKOUT))
        for folder, package in PACKAGES.items()
        for path in (CHECKOUT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def shader_files() -> set[str]:
    return {path.name for path in (CHECKOUT / "shaders").iterdir() if path.suffix != ".py" and path.is_file()}


def pip(python: Path | str, *arguments: str | Path, cwd: Path) -> None:
    common = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "pip", "--python", python, *arguments, *common, cwd=cwd)


@pytest.fixture(scope="module")
def area(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def new_venv(area: Path) -> Callable[..., Path]:
    """Make a venv that has this environment's packages, but neither gpu_lod nor what is left out; gives its Python."""

    def make(name: str, leave_out: tuple[str, ...] = ()) -> Path:
        shared = area / f"{name}-packages"
        shared.mkdir()
        for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(site).iterdir():
                if not entry.name.startswith(("gpu_lod", "__editable__", *leave_out)):
                    (shared / entry.name).symlink_to(entry)
        root = area / name
        venv.create(root, symlinks=True)
        [packages] = root.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text(f"{shared}\n")
        return root / "bin" / "python"

    return make


@pytest.fixture(scope="module")
def wheel(area: Path) -> Path:
    source = copy_checkout(area / "wheel-source")
    pip(sys.executable, "wheel", "-w", area / "wheel-dist", source, cwd=area)
    [built] = (area / "wheel-dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(area: Path) -> Path:
    source = copy_checkout(area / "sdist-source")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", area / "sdist-dist", source, cwd=area)
    [built] = (area / "sdist-dist").glob("*.tar.gz")
    return built


@pytest.fixture(scope="module", params=KINDS)
def probed(request: pytest.FixtureRequest, area: Path, new_venv: Callable[..., Path]) -> dict[str, Any]:
    kind: str = request.param
    python = new_venv(f"{kind}-venv")
    if kind == "editable":
        pip(python, "install", "-e", copy_checkout(area / "editable-source"), cwd=area)
    else:
        pip(python, "install", request.getfixturevalue(kind), cwd=area)
    elsewhere = area / f"{kind}-elsewhere"
    elsewhere.mkdir()
    result: dict[str, Any] = json.loads(run(python, "-c", PROBE, cwd=elsewhere).stdout)
    expected = area / "editable-source" if kind == "editable" else python.parents[1]
    assert Path(result["root"]).is_relative_to(expected), f"looked at another install: {result['root']}"
    return result


def test_installed_package_holds_bridge_and_shaders(probed: dict[str, Any]) -> None:
    assert Path(probed["bridge"]).is_file()
    assert probed["typed"], "py.typed is missing"
    assert {*probed["shaders"], *probed["includes"]} == shader_files()
    for name, text in probed["shaders"].items():
        assert "#version" in text, f"{name} has no #version"
        assert "#include" not in text, f"{name} has an include left"
    assert probed["version"][0] == probed["version"][1]


def test_a_checkout_imports_as_it_stands() -> None:
    """A Python that is started there finds it before any installed package."""
    program = "import gpu_lod, gpu_lod.shaders; print(gpu_lod.bridge.__file__, len(gpu_lod.shaders.names()))"
    found, shaders = run(sys.executable, "-c", program, cwd=CHECKOUT).stdout.split()
    assert Path(found) == CHECKOUT / "bridge" / "__init__.py"
    assert int(shaders) == len(shader_files())


def test_import_opens_no_gl_and_no_cuda(probed: dict[str, Any]) -> None:
    assert gl_or_cuda(probed["libraries"]) == []


def test_import_brings_no_extra(probed: dict[str, Any]) -> None:
    assert not {*probed["modules"]} & {*CLI_EXTRA, "kornia", "cv2", "jsonschema", "glfw", "cupy", "cuda", "pycuda"}


def gl_or_cuda(libraries: list[str]) -> list[str]:
    return [name for name in libraries if name.startswith(("libEGL", "libGL", "libOpenGL", "libcuda", "libnvidia"))]


def test_probe_sees_a_library_that_is_opened(tmp_path: Path) -> None:
    """Else the test that import opens none could never fail."""
    opening = PROBE.replace("import gpu_lod.shaders\n", "import gpu_lod.shaders, ctypes; ctypes.CDLL('libEGL.so.1')\n")
    assert opening != PROBE
    libraries = json.loads(run(sys.executable, "-c", opening, cwd=tmp_path).stdout)["libraries"]
    assert any(name.startswith("libEGL.so") for name in gl_or_cuda(libraries)), libraries


def test_wheel_holds_every_file_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        [licence] = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(licence) == (CHECKOUT / "LICENSE").read_bytes()
    assert {name for name in names if ".dist-info/" not in name} == {*installed_names()}


def test_sdist_holds_every_file_and_the_licence(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*installed_names().values(), "LICENSE", "README.md", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith("tests/")]  # some of them without the others are no tests


def test_command_without_its_extra_says_so_in_one_line(
    area: Path, wheel: Path, new_venv: Callable[..., Path], tmp_path: Path
) -> None:
    python = new_venv("bare-venv", leave_out=CLI_EXTRA)
    pip(python, "install", wheel, cwd=area)
    done = run(python.parent / "gpu-lod", "doctor", cwd=tmp_path, check=False)
    assert done.returncode != 0
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    assert "'.[cli]'" in lines[0]
