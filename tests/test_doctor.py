"""What the doctor finds, on machines made up of files, packages and GPUs that are not there."""

from __future__ import annotations

import ctypes.util
import gc
import json
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_emulator import EmulatedDevice
from fake_cuda import FakeCuda

import gpu_lod as lod
from gpu_lod import dispatch, doctor, several_levels
from gpu_lod.bridge import Device, InteropBridge
from gpu_lod.bridge.devices import Gpu
from gpu_lod.commands import printing
from gpu_lod.doctor import Finding, drivers, opengl, parity
from gpu_lod.doctor import cuda as cuda_checks
from gpu_lod.doctor.finding import REPORT, advice, safely
from gpu_lod.errors import (
    BufferMovedError,
    GLUnavailableError,
    InputError,
    InteropError,
    ShaderError,
    UnsupportedError,
)
from gpu_lod.jobs import small

UUID, OTHER_UUID = "4b" * 16, "7e" * 16
GPU = Gpu(0, "NVIDIA H100", UUID, "0000:65:00.0")
NVIDIA = ("EGL_NV_device_cuda", "EGL_EXT_device_persistent_id")
SOFTWARE = Device(1, ("EGL_MESA_device_software",), None, None)
EGL_LIBRARY = "libEGL_nvidia.so.0"


def device(index: int = 0, ordinal: int | None = 0, uuid: str | None = UUID, pci: str | None = None) -> Device:
    return Device(index, NVIDIA, None, ordinal, uuid, pci)


def only(findings: Any) -> Finding:
    (finding,) = findings
    checked([finding])
    return finding


def checked(findings: list[Finding]) -> dict[str, Finding]:
    """By name; whatever is not well must come with a line that mends it, and what is well with none."""
    for finding in findings:
        assert finding.status in ("ok", "warn", "fail")
        assert bool(finding.fix) == (finding.status != "ok"), finding
        assert "\n" not in finding.found and "\n" not in (finding.fix or "")
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


class Machine:
    """Files of a machine under one folder. What loads is what `loadable` holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.loadable = {"libEGL_mesa.so.0"}

    def file(self, name: str, text: str = "") -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def vendor(self, folder: str, name: str, library: str) -> str:
        return self.file(f"{folder}/{name}", json.dumps({"ICD": {"library_path": library}}))

    def mesa(self) -> None:
        self.vendor("share/egl", "50_mesa.json", "libEGL_mesa.so.0")

    def nvidia(self, folder: str = "share/egl", *, loads: bool = True) -> str:
        """A vendor file in that folder."""
        if loads:
            self.loadable.add(EGL_LIBRARY)
        return self.vendor(folder, "10_nvidia.json", EGL_LIBRARY)

    def driver(self, version: str | None = None) -> None:
        self.file("nvidiactl")
        if version is not None:
            self.file("version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Sat Aug 19\nGCC 12.2.0\n")

    def refused(self, library: str) -> str | None:
        return None if library in self.loadable else f"{library}: cannot open shared object file"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without files: no vendors, no driver, no container."""
    made = Machine(tmp_path)

    def place(*names: str) -> tuple[str, ...]:
        return tuple(str(tmp_path / name) for name in names)

    for name, value in {
        "_VENDOR_FOLDERS": place("etc/egl", "share/egl"),
        "_OTHER_VENDOR_FOLDERS": place("local/egl"),
        "_LIBRARY_FOLDERS": place("local/lib64", "local/lib"),
        "_CONTAINER_FILES": place("dockerenv", "containerenv"),
        "_CONTROL": place("nvidiactl")[0],
        "_WSL": place("dxg")[0],
        "_KERNEL": place("version")[0],
        "_CGROUP": place("cgroup")[0],
        "_refused": made.refused,
    }.items():
        monkeypatch.setattr(drivers, name, value)
    for variable in ("__EGL_VENDOR_LIBRARY_FILENAMES", "__EGL_VENDOR_LIBRARY_DIRS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return made


def set_torch(monkeypatch: pytest.MonkeyPatch, built: str | None, count: int = 0) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def install(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    """These packages, by name with _ for -, and no others."""
    versions = {name.replace("_", "-"): version for name, version in packages.items()}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def provide(monkeypatch: pytest.MonkeyPatch, *modules: str, broken: tuple[str, ...] = ()) -> None:
    """Make modules importable, and some of them not."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in broken:
        monkeypatch.setitem(sys.modules, name, None)


# -- findings and errors ----------------------------------------------------------------------------------------------


def test_an_error_becomes_the_last_finding_of_its_check() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("a", "ok", "well")
        raise errors.pop()

    errors: list[Exception] = [RuntimeError("two\nlines"), GLUnavailableError("No GL. Install it.\n Or do not.")]
    assert list(safely("b", check)) == [
        Finding("a", "ok", "well"),
        Finding("b", "fail", "No GL", "Install it. Or do not."),
    ]
    assert list(safely("b", check))[1] == Finding("b", "fail", "RuntimeError: two lines", REPORT)


def test_advice_of_an_error_that_gives_none() -> None:
    assert advice(InteropError("libEGL.so.1 and OpenGL 4.3 failed.")) == (
        "libEGL.so.1 and OpenGL 4.3 failed.",
        REPORT,
    )


def test_as_dict() -> None:
    findings = [Finding("a", "warn", "b", "c"), Finding("d", "ok", "e")]
    assert doctor.as_dict(findings) == {
        "ok": True,
        "findings": [
            {"name": "a", "status": "warn", "found": "b", "fix": "c"},
            {"name": "d", "status": "ok", "found": "e", "fix": None},
        ],
    }
    assert not doctor.as_dict([*findings, Finding("f", "fail", "g", "h")])["ok"]


def test_a_fix_is_printed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fix = "export A=" + "/a/long/path" * 30
    printing.show_findings([Finding("one", "ok", "well"), Finding("two", "warn", "ill [b]", fix)])
    lines = capsys.readouterr().out.splitlines()
    assert f"  → {fix}" in lines
    assert "two:" in lines and "one:" not in lines
    assert any(line.startswith("warn") and "ill [b]" in line for line in lines)


# -- the whole examination --------------------------------------------------------------------------------------------


def test_without_cuda(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For real: Mesa's software renderer, or what there is."""
    set_torch(monkeypatch, None)
    monkeypatch.setattr(drivers, "_CONTROL", str(tmp_path / "nvidiactl"))
    findings = checked(doctor.examine())
    assert not [name for name in findings if "NVIDIA" in name or name.startswith("cuda")]
    assert [name for name in findings if "CUDA" in name] == ["CUDA"]
    assert findings["CUDA"].found == "none (torch is built without CUDA); verbs run on CPU tensors"
    assert any(name.startswith("host bridge") and one.status == "ok" for name, one in findings.items())
    [how] = [one.found for name, one in findings.items() if name.startswith("ordinary CPU tensors")]
    assert how.startswith("shaders read them where they are" if ctx.host.borrows else "copied")
    assert doctor.as_dict([*findings.values()])["ok"]


@pytest.mark.parametrize(
    "where, check",
    [
        (doctor, "_versions"),
        (drivers, "library"),
        (drivers, "vendors"),
        (drivers, "nvidia"),
        (doctor, "_devices"),
        (opengl, "context"),
    ],
)
def test_a_check_that_raises_is_a_finding_and_the_others_still_run(
    where: types.ModuleType, check: str, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Iterator[Finding]:
        raise ZeroDivisionError("bang")

    set_torch(monkeypatch, None)
    monkeypatch.setattr(drivers, "nvidia_there", lambda: True)
    monkeypatch.setattr(where, check, broken)
    findings = checked(doctor.examine())
    hit = [finding for finding in findings.values() if "bang" in finding.found]
    assert hit and all(finding.found == "ZeroDivisionError: bang" for finding in hit)
    assert {finding.status for finding in hit} == {"fail"}
    assert "CUDA" in findings and "versions" in findings


def test_cuda_checks_that_raise_are_findings(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise ZeroDivisionError("bang")

    set_torch(monkeypatch, "13.0", 2)
    install(monkeypatch)
    names = {"_bindings": "cuda-bindings", "_cupy": "CuPy", "_pycuda": "PyCUDA", "gpu": "CUDA device 1"}
    for attribute in names:
        monkeypatch.setattr(cuda_checks, attribute, broken)
    findings = checked(list(cuda_checks.examine([device()], None, None)))
    assert set(findings) == {"CUDA", "CUDA device 0", *names.values()}
    assert all(findings[name].status == "fail" for name in names.values())
    monkeypatch.setattr(torch.cuda, "device_count", broken)
    assert checked(doctor.examine())["CUDA"] == Finding("CUDA", "fail", "ZeroDivisionError: bang", REPORT)


def test_environment_variables_stay(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing() -> Iterator[Finding]:
        os.environ["ADDED"] = "1"
        os.environ["CHANGED"] = "2"
        del os.environ["REMOVED"]
        yield Finding("versions", "ok", "")

    monkeypatch.delenv("ADDED", raising=False)
    monkeypatch.setenv("CHANGED", "1")
    monkeypatch.setenv("REMOVED", "1")
    monkeypatch.setattr(doctor, "_versions", changing)
    before = dict(os.environ)
    doctor.examine()
    assert dict(os.environ) == before


def test_one_device_alone_and_one_that_is_not_there(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [device(), SOFTWARE]
    monkeypatch.setattr(doctor, "devices", lambda: listed)
    monkeypatch.setattr(opengl, "Context", lambda index: ctx)
    findings = checked(doctor.examine(1))
    assert "OpenGL on device 1" in findings and "OpenGL on device 0" not in findings
    findings = checked(doctor.examine(7))
    assert findings["OpenGL context"].status == "fail"
    assert not any(name.startswith("OpenGL on") for name in findings)


def test_one_good_device_is_enough(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_one(index: int) -> lod.Context:
        if index in bad:
            raise GLUnavailableError("EGL device gives no OpenGL. Install it.")
        return ctx

    bad = {0}
    monkeypatch.setattr(doctor, "devices", lambda: [device(), SOFTWARE])
    monkeypatch.setattr(opengl, "Context", open_one)
    findings = checked(doctor.examine())
    assert findings["OpenGL on device 0"].status == "warn"
    assert findings["host bridge on device 1"].status == "ok"
    assert "host bridge on device 0" not in findings
    bad.add(1)
    assert checked(doctor.examine())["OpenGL on device 0"].status == "fail"


@pytest.mark.parametrize(("value", "status"), [("0", "ok"), ("7", "fail"), ("abc", "fail"), ("9" * 5000, "fail")])
def test_the_device_that_a_variable_names(
    value: str, status: str, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is none, every verb on OpenGL fails."""
    monkeypatch.setenv("GPU_LOD_DEVICE", value)
    finding = checked(doctor.examine(0))["GPU_LOD_DEVICE"]
    assert finding.status == status and (status == "ok" or "unset GPU_LOD_DEVICE" in str(finding.fix))
    monkeypatch.delenv("GPU_LOD_DEVICE")
    assert "GPU_LOD_DEVICE" not in checked(doctor.examine(0))


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, status in ((tmp_path, "ok"), ("off", "ok"), ("/proc/none", "warn")):
        monkeypatch.setenv("GPU_LOD_CACHE", str(place))
        finding = only(doctor._cache())
        assert finding.status == status and (status == "ok" or "cannot be written" in finding.found)
    assert not [*(tmp_path / "calibration").iterdir()]


def test_no_egl_library_sends_everyone_to_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_LOD_LIBEGL", "/nonexistent.so")
    set_torch(monkeypatch, "13.0", 1)
    monkeypatch.setattr(cuda_checks, "gpu", lambda ordinal: GPU)
    findings = checked(doctor.examine())
    assert "EGL vendors" not in findings and "EGL devices" not in findings
    line = f"unset GPU_LOD_LIBEGL, or {drivers.INSTALL}"
    assert findings["EGL library"].fix == findings["CUDA device 0"].fix == line


# -- the drivers behind EGL -------------------------------------------------------------------------------------------


def test_vendors(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(drivers.vendors()) == Finding("EGL vendors", "warn", "none listed for glvnd", drivers.INSTALL)
    machine.mesa()
    assert only(drivers.vendors()) == Finding("EGL vendors", "ok", "libEGL_mesa.so.0 (50_mesa.json)")
    left = machine.nvidia(loads=False)  # of an image that was made for GPUs
    assert only(drivers.vendors()) == Finding(
        "EGL vendors", "ok", f"libEGL_mesa.so.0 (50_mesa.json); listed but not loadable: {left}"
    )
    machine.loadable.add(EGL_LIBRARY)
    assert only(drivers.vendors()).found == "libEGL_nvidia.so.0 (10_nvidia.json), libEGL_mesa.so.0 (50_mesa.json)"
    machine.loadable.remove("libEGL_mesa.so.0")
    assert only(drivers.vendors()).fix == drivers.INSTALL
    machine.loadable.clear()
    assert only(drivers.vendors()).found.startswith("none listed for glvnd; listed but not loadable: ")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ICD": {}}', '{"ICD": 1}'])
def test_vendor_files_that_say_nothing(text: str, machine: Machine) -> None:
    machine.mesa()
    file = machine.file("etc/egl/60_odd.json", text)
    machine.file("etc/egl/README", "no vendor file")
    finding = only(drivers.vendors())
    assert (finding.status, finding.fix) == ("warn", drivers.INSTALL)
    assert finding.found.endswith(f"not loadable: {file}")


def test_vendors_that_variables_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.mesa()
    other = machine.vendor("else/where", "1.json", "libEGL_mesa.so.0")
    default = only(drivers.vendors()).found
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_DIRS", str(Path(other).parent))
    assert only(drivers.vendors()).found == "libEGL_mesa.so.0 (1.json)"
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_DIRS", "")  # glvnd takes it for a list of none
    assert only(drivers.vendors()).found == "none listed for glvnd"
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", f"{other}:{machine.root}/share/egl/50_mesa.json")
    assert only(drivers.vendors()).found == "libEGL_mesa.so.0 (1.json), libEGL_mesa.so.0 (50_mesa.json)"
    monkeypatch.delenv("__EGL_VENDOR_LIBRARY_DIRS")
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", f"{other}:/nonexistent.json")
    show = "unset __EGL_VENDOR_LIBRARY_FILENAMES __EGL_VENDOR_LIBRARY_DIRS"  # what is installed would do
    found = "libEGL_mesa.so.0 (1.json); listed but not loadable: /nonexistent.json"
    assert only(drivers.vendors()) == Finding("EGL vendors", "warn", found, show)
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "")
    assert only(drivers.vendors()) == Finding("EGL vendors", "warn", "none listed for glvnd", show)
    machine.loadable.clear()
    assert only(drivers.vendors()).fix == drivers.INSTALL
    machine.loadable.add("libEGL_mesa.so.0")
    monkeypatch.delenv("__EGL_VENDOR_LIBRARY_FILENAMES")
    assert only(drivers.vendors()).found == default != "none listed for glvnd"


def test_refused_asks_the_loader() -> None:
    assert drivers._refused(ctypes.util.find_library("c") or "") is None
    assert "/nonexistent.so" in (drivers._refused("/nonexistent.so") or "")


def test_egl_library_that_loads() -> None:
    finding = only(drivers.library())
    assert finding.status == "ok" and "/libEGL.so" in finding.found


def test_a_library_that_is_no_egl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_LOD_LIBEGL", "libc.so.6")
    findings = checked(doctor.examine())
    line = f"unset GPU_LOD_LIBEGL, or {drivers.INSTALL}"
    assert findings["EGL library"] == Finding("EGL library", "fail", "libc.so.6 is another library", line)
    assert "EGL devices" not in findings


def test_nvidia_egl_in_order(machine: Machine) -> None:
    machine.nvidia()
    finding = only(drivers.nvidia())
    assert finding == Finding("NVIDIA EGL", "ok", "libEGL_nvidia.so.0 of driver unknown, kernel module unknown")


def test_nvidia_vendor_file_elsewhere(machine: Machine) -> None:
    machine.mesa()
    file = machine.nvidia("local/egl")
    finding = only(drivers.nvidia())
    assert finding.fix == f"export __EGL_VENDOR_LIBRARY_FILENAMES={file}"
    assert file in finding.found and "there is an NVIDIA GPU" in finding.found


def test_nvidia_vendor_file_that_a_variable_hides(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.nvidia()
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", machine.vendor("a", "50_mesa.json", "libEGL_mesa.so.0"))
    assert only(drivers.nvidia()).fix == "unset __EGL_VENDOR_LIBRARY_FILENAMES __EGL_VENDOR_LIBRARY_DIRS"
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", machine.nvidia("b"))
    assert only(drivers.nvidia()).status == "ok"


def test_nvidia_library_outside_the_loaders_folders(machine: Machine) -> None:
    machine.nvidia(loads=False)
    machine.file(f"local/lib/{EGL_LIBRARY}")
    finding = only(drivers.nvidia())
    assert finding.fix == f"export LD_LIBRARY_PATH={machine.root}/local/lib:$LD_LIBRARY_PATH"
    assert "cannot open shared object file" in finding.found
    (machine.root / "share/egl/10_nvidia.json").unlink()
    file = machine.nvidia("local/egl", loads=False)  # both elsewhere, as where the driver is mounted in one folder
    assert only(drivers.nvidia()).fix == (
        f"export LD_LIBRARY_PATH={machine.root}/local/lib:$LD_LIBRARY_PATH && "
        f"export __EGL_VENDOR_LIBRARY_FILENAMES={file}"
    )


def test_nvidia_library_without_a_vendor_file(machine: Machine) -> None:
    machine.mesa()
    machine.loadable.add(EGL_LIBRARY)
    finding = only(drivers.nvidia())
    assert finding.fix is not None and "no vendor file names its libEGL_nvidia.so.0" in finding.found
    assert os.system(finding.fix) == 0  # the line does what it says
    assert drivers._library_of(f"{machine.root}/etc/egl/10_nvidia.json") == EGL_LIBRARY
    assert only(drivers.nvidia()).status == "ok"


CONTAINER = "start the container with NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility, or inside it "


def test_nvidia_library_nowhere(machine: Machine) -> None:
    machine.mesa()
    machine.driver()
    finding = only(drivers.nvidia())
    assert finding.fix == "install the driver's libnvidia-gl, of the same version as its kernel module"
    assert "cannot open shared object file" in finding.found
    machine.nvidia(loads=False)  # a vendor file alone is no help
    machine.driver("535.104.05")
    line = "apt-get install libnvidia-gl-535 (of the kernel module's version, 535.104.05)"
    assert only(drivers.nvidia()).fix == line
    machine.file("dockerenv")
    assert only(drivers.nvidia()).fix == CONTAINER + line


def test_wsl_has_no_way_out(machine: Machine) -> None:
    machine.file("dxg")
    assert "backend='torch'" in (only(drivers.nvidia()).fix or "")
    machine.driver()  # a Linux that has both is not WSL
    assert "libnvidia-gl" in (only(drivers.nvidia()).fix or "")


@pytest.mark.parametrize(
    ("file", "text", "inside"),
    [
        ("dockerenv", "", True),
        ("containerenv", "", True),
        ("cgroup", "0::/\n", False),
        ("cgroup", "4:memory:/docker/0a1b\n", True),
        ("cgroup", "0::/kubepods.slice/kubepods-pod1.slice\n", True),
        ("cgroup", "0::/system.slice/containerd.service/x\n", True),
        ("cgroup", "0::/machine.slice/libpod-1.scope\n", True),
        ("cgroup", "0::/lxc/one\n", True),
        ("nothing", "docker", False),
    ],
)
def test_containers(file: str, text: str, inside: bool, machine: Machine) -> None:
    machine.file(file, text)
    assert drivers._in_container() is inside


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (a@b)\n", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.120\nGCC version:  gcc 123.4.5\n", "550.120"),
        ("GCC version:  gcc version 123.4.5\n", None),
        ("", None),
    ],
)
def test_version_of_the_kernel_module(text: str, version: str | None, machine: Machine) -> None:
    assert drivers._kernel_version() is None
    machine.file("version", text)
    assert drivers._kernel_version() == version


def test_driver_and_kernel_module_apart(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.nvidia()
    monkeypatch.setattr(drivers, "_MAPS", str(machine.root / "maps"))
    line = "7f00-7f01 r-xp 00000000 08:01 1  /usr/lib/{}\n"
    names = ("libEGL.so.1.1.0", "libEGL_nvidia.so.580.65.06")
    machine.file("maps", "7f00-7f01 rw-p 00000000 00:00 0\n" + "".join(map(line.format, names)))
    machine.driver("580.65.06")
    finding = only(drivers.nvidia())
    assert finding == Finding("NVIDIA EGL", "ok", "libEGL_nvidia.so.0 of driver 580.65.06, kernel module 580.65.06")
    machine.driver("575.57.08")
    finding = only(drivers.nvidia())
    assert finding.status == "warn" and "580.65.06, kernel module 575.57.08" in finding.found
    assert (finding.fix or "").startswith("reboot")
    machine.file("cgroup", "0::/docker/1")
    assert (only(drivers.nvidia()).fix or "").endswith("NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility")


def test_nvidia_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    set_torch(monkeypatch, "13.0")
    assert not drivers.nvidia_there()
    set_torch(monkeypatch, "13.0", 1)
    assert drivers.nvidia_there()
    set_torch(monkeypatch, None, 1)  # ROCm: its devices are "cuda" too
    assert not drivers.nvidia_there()
    machine.driver()
    assert drivers.nvidia_there()


@pytest.mark.parametrize("there", [True, False])
def test_nvidia_egl_is_looked_for_only_where_there_is_a_gpu(
    there: bool, ctx: lod.Context, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it is missing, a software renderer is told how to get it."""
    set_torch(monkeypatch, None)
    machine.mesa()
    if there:
        machine.driver("535.104.05")
    monkeypatch.setattr(doctor, "devices", lambda: [Device(0, SOFTWARE.extensions, None, None)])
    monkeypatch.setattr(opengl, "Context", lambda index: renderer(ctx, "llvmpipe"))
    findings = checked(doctor.examine())
    assert ("NVIDIA EGL" in findings) is there
    shown = findings["OpenGL on device 0"]
    assert shown.found.startswith("llvmpipe (software), ")
    assert shown.status == ("warn" if there else "ok")
    if there:
        assert shown.fix == findings["NVIDIA EGL"].fix


# -- contexts ---------------------------------------------------------------------------------------------------------


def renderer(ctx: lod.Context, name: str, **what: Any) -> Any:
    """The context under another name."""

    class Other:
        def __getattr__(self, attribute: str) -> Any:
            return {"renderer": name, "software": name == "llvmpipe", **what}.get(attribute, getattr(ctx, attribute))

        def __repr__(self) -> str:
            return f"<{name}>"

    return Other()


def test_contexts_good_and_poor(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    rich = SimpleNamespace(storage_bytes=2**27, texture_size=16384, layers=2048)
    poor = SimpleNamespace(storage_bytes=2**27, texture_size=8192, layers=256)
    small = SimpleNamespace(storage_bytes=2**24, texture_size=16384, layers=256)
    every = frozenset({"GL_ARB_buffer_storage", "GL_EXT_texture_filter_minmax"})

    def look(name: str = "NVIDIA H100", graphics: str | None = "fix", **what: Any) -> dict[str, str]:
        what = {"limits": rich, "extensions": every, "version": 430, **what}
        monkeypatch.setattr(opengl, "Context", lambda index: renderer(ctx, name, **what))
        return {name: one.status for name, one in checked([*opengl.context(SOFTWARE, graphics)]).items()}

    names = ("OpenGL on", "limits of", "GL_ARB_buffer_storage of", "GL_EXT_texture_filter_minmax of")
    well = {f"{name} device 1": "ok" for name in names}
    assert look() == well
    assert look("llvmpipe", None) == well
    assert look("llvmpipe") == well | {"OpenGL on device 1": "warn"}
    assert look(limits=poor) == look(limits=small) == well | {"limits of device 1": "warn"}
    bare = {f"{name} device 1": "warn" for name in names[2:]}
    assert look(extensions=frozenset()) == well | bare
    assert look(extensions=frozenset(), version=440) == well | {f"{names[3]} device 1": "warn"}
    assert look(extensions=every - {"GL_EXT_texture_filter_minmax"} | {"GL_ARB_texture_filter_minmax"}) == well


CPU = torch.device("cpu")


def test_round_trip(ctx: lod.Context) -> None:
    finding = opengl.round_trip("a", ctx, CPU)
    assert (finding.name, finding.status, finding.fix) == ("a", "ok", None)
    assert "6 levels in place, no copy" in finding.found


def test_host_bridge_takes_host_memory(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a context whose tensors are on CUDA by default."""
    monkeypatch.setattr(lod.Context, "tensor_device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr(opengl, "Context", lambda index: ctx)
    trip, _ = opengl.host_bridge(SOFTWARE)
    assert trip.name.startswith("host bridge") and trip.status == "ok"


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(("wrong", "text"), [(1e-5, "by 1e-05"), (float("nan"), "by nan")])
def test_round_trip_of_wrong_values(
    level: int, wrong: float, text: str, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(image: torch.Tensor, **options: Any) -> Any:
        levels = list(lod.mipmap(image, **options))
        levels[level] = levels[level] + wrong
        return levels

    monkeypatch.setattr(opengl, "mipmap", off)
    finding = only([opengl.round_trip("a", ctx, CPU)])
    assert finding.status == "fail" and text in finding.found


@pytest.mark.parametrize("level", [0, 3])
def test_round_trip_with_a_copy(level: int, ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(image: torch.Tensor, **options: Any) -> Any:
        levels = list(lod.mipmap(image, **options))
        levels[level] = elsewhere(levels[level])
        return levels

    def in_gl(tensor: torch.Tensor) -> torch.Tensor:
        return ctx.empty(*tensor.shape, device="cpu").copy_(tensor)

    monkeypatch.setattr(opengl, "mipmap", copying)
    for elsewhere in (torch.clone, in_gl):
        finding = only([opengl.round_trip("a", ctx, CPU)])
        # A level below the first one may lie anywhere in GL memory.
        assert finding.status == ("ok" if level and elsewhere is in_gl else "fail")
        assert "copied" in finding.found or finding.status == "ok"


SOME_JOBS = [job for job in small() if job.verb in (lod.hiz, lod.cull) and "37 x 53" not in job.at]


def test_shaders_that_agree_with_torch(ctx: lod.Context) -> None:
    finding = only(parity.compare("shaders", 0, CPU, SOME_JOBS))
    ways = len(dispatch.ways("hiz")) - 1 + len(dispatch.ways("cull")) - 1
    found = f"{4 * ways} results of 2 verbs are torch's, but for rounding"
    assert finding == Finding("shaders", "ok", found)


def test_shaders_that_do_not(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    rightly, error = several_levels.reduce_chain, None

    def wrongly(context: Any, chain: Any, reduce: Any, one: Any) -> None:
        if error is not None:
            raise error
        rightly(context, chain, "min", one)

    monkeypatch.setattr(several_levels, "reduce_chain", wrongly)
    finding = only(parity.compare("shaders", 0, CPU, SOME_JOBS))
    assert finding.status == "fail" and finding.fix is not None and "backend='torch'" in finding.fix
    example = "hiz on gl registers in 4 (2 x 1 x 64 x 96 float32: level 1: "
    assert finding.found.startswith(f"4 of 20 results are not torch's: {example}")
    error = ShaderError("a broken compiler")
    finding = only(parity.compare("shaders", 0, CPU, SOME_JOBS))
    assert finding.found.endswith("hiz on gl registers in 4 (2 x 1 x 64 x 96 float32: a broken compiler)")
    error = UnsupportedError("none of that")
    finding = only(parity.compare("shaders", 0, CPU, SOME_JOBS))
    assert finding.status == "ok" and finding.found.startswith("16 results")


def test_shaders_are_compared_when_asked_for(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def compare(*about: object) -> Iterator[Finding]:
        asked.append(about)
        yield Finding(str(about[0]), "ok", "alike")

    monkeypatch.setattr(parity, "compare", compare)
    assert "shaders of device 0" not in checked(doctor.examine(0)) and asked == []
    assert checked(doctor.examine(0, shaders=True))["shaders of device 0"].found == "alike"
    assert asked == [("shaders of device 0", 0, CPU)]
    monkeypatch.setattr(cuda_checks, "look", lambda: (True, ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        cuda_checks, "_match", lambda name, ordinal, known, graphics, found: found.append(device()) or []
    )
    name, cuda = "shaders and kernels on cuda:0", torch.device("cuda", 0)
    assert name not in checked(list(cuda_checks.examine([device()], None, None)))
    assert checked(list(cuda_checks.examine([device()], None, None, True)))[name].found == "alike"
    assert asked[1:] == [(name, cuda, cuda)]
    monkeypatch.setattr(cuda_checks, "_match", lambda *about: iter(()))
    alone = checked(list(cuda_checks.examine([], None, None, True)))
    assert alone["kernels on cuda:0"].found == "alike" and name not in alone
    assert asked[2:] == [("kernels on cuda:0", None, cuda)]
    assert "kernels on cuda:0" not in checked(list(cuda_checks.examine([device()], 0, None, True)))


def test_kernels_where_there_is_no_opengl(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    mipmaps = sys.modules["gpu_lod.mipmap"]
    chain = mipmaps.chain
    monkeypatch.setattr(parity, "Context", None)
    finding = only(parity.compare("kernels", None, CPU, SOME_JOBS))
    assert finding == Finding("kernels", "ok", "4 results of 1 verbs are torch's, but for rounding")
    monkeypatch.setattr(mipmaps, "chain", lambda *about: [level.zero_() for level in chain(*about)])
    finding = only(parity.compare("kernels", None, CPU, SOME_JOBS))
    assert finding.status == "fail" and finding.found.startswith("4 of 4 results are not torch's: hiz on cuda in 4 (")


def test_every_verb_that_chooses_is_compared() -> None:
    verbs = {job.verb.__name__ for job in small()}
    others = {verb for verb in dir(lod) if verb not in verbs and dispatch.chooser(getattr(lod, verb)) is not None}
    assert others == {"region_min"}  # by the shader of region_max


# -- torch and the packages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "driver", "mask", "status", "text", "fix"),
    [
        (None, False, None, "ok", "torch is built without CUDA); verbs run on CPU", None),
        (None, True, None, "warn", "torch is built without CUDA), and there is an NVIDIA driver", "pip install"),
        (None, True, "", "warn", "torch is built without CUDA), and there is an NVIDIA driver", "pip install"),
        ("13.0", False, None, "ok", "built for CUDA 13.0, and finds no device); verbs", None),
        ("13.0", True, None, "warn", "finds no device), and there is an NVIDIA driver. too old", "`nvidia-smi`"),
        ("13.0", True, "0", "warn", "and there is an NVIDIA driver. too old", "`nvidia-smi`"),
        ("13.0", True, "GPU-4b", "warn", "and there is an NVIDIA driver. too old", "`nvidia-smi`"),
        ("13.0", True, "", "ok", "CUDA_VISIBLE_DEVICES='' hides them all", None),
        ("13.0", True, "-1", "ok", "CUDA_VISIBLE_DEVICES='-1' hides them all", None),
        ("13.0", False, "none", "ok", "CUDA_VISIBLE_DEVICES='none' hides them all", None),
    ],
)
def test_no_cuda(
    built: str | None,
    driver: bool,
    mask: str | None,
    status: str,
    text: str,
    fix: str | None,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_available() -> bool:
        warnings.warn("too old", UserWarning, stacklevel=1)
        return False

    set_torch(monkeypatch, built)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    if driver:
        machine.driver()
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    finding = only(cuda_checks.examine([SOFTWARE], None, None))
    assert (finding.name, finding.status) == ("CUDA", status)
    assert finding.found.startswith("none (") and text in finding.found
    assert (finding.fix or "").startswith(fix or "") and bool(finding.fix) == bool(fix)


def test_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "pip install 'cuda-bindings==13.*'"
    install(monkeypatch)
    assert only(cuda_checks._bindings()) == Finding(
        "cuda-bindings", "warn", "not installed; the CUDA bridge needs it", fix
    )
    install(monkeypatch, cuda_bindings="13.1.0")
    provide(monkeypatch, "cuda", "cuda.bindings", "cuda.bindings.runtime")
    assert only(cuda_checks._bindings()) == Finding("cuda-bindings", "ok", "13.1.0")
    provide(monkeypatch, broken=("cuda.bindings.runtime",))
    finding = only(cuda_checks._bindings())
    assert (finding.status, finding.fix) == ("warn", fix)
    assert finding.found.startswith("13.1.0, does not load: ModuleNotFoundError: ")


def test_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert only(cuda_checks._cupy()) == Finding("CuPy", "ok", "not installed (optional)")
    for name in ("cupy", "cupy_cuda12x", "cupy_cuda13x"):
        install(monkeypatch, **{name: "13.6.0"})
        provide(monkeypatch, "cupy")
        dashed = name.replace("_", "-")
        assert only(cuda_checks._cupy()) == Finding("CuPy", "ok", f"{dashed} 13.6.0")
        provide(monkeypatch, broken=("cupy",))
        assert only(cuda_checks._cupy()).fix == f"pip install --force-reinstall {dashed}"
    install(monkeypatch, cupy_cuda12x="13.5.0", cupy_cuda13x="13.6.0")
    provide(monkeypatch, "cupy")
    assert only(cuda_checks._cupy()) == Finding(
        "CuPy",
        "warn",
        "cupy-cuda12x 13.5.0, cupy-cuda13x 13.6.0",
        "pip uninstall cupy-cuda12x cupy-cuda13x, then install one of them",
    )


def test_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert only(cuda_checks._pycuda()) == Finding("PyCUDA", "ok", "not installed (optional)")
    install(monkeypatch, pycuda="2025.1")
    provide(monkeypatch, "pycuda", "pycuda.driver", "pycuda.gl")
    assert only(cuda_checks._pycuda()) == Finding("PyCUDA", "ok", "2025.1, with OpenGL")
    provide(monkeypatch, broken=("pycuda.gl",))
    finding = only(cuda_checks._pycuda())
    assert finding.status == "warn" and finding.found.startswith("2025.1, without OpenGL: ")
    assert "--cuda-enable-gl" in (finding.fix or "")
    provide(monkeypatch, broken=("pycuda.driver",))
    finding = only(cuda_checks._pycuda())
    assert finding.status == "warn" and finding.found.startswith("2025.1, does not load: ")


# -- which EGL device is which CUDA device ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([device(2, 1)], "EGL device 2 by UUID; EGL says CUDA device 1"),
        ([device(2, None)], "EGL device 2 by UUID; EGL says no CUDA ordinal"),
        ([device(2, None, None, "0000:65:00.1")], "EGL device 2 by PCI address; EGL says no CUDA ordinal"),
        ([device(3, 0, OTHER_UUID), device(4, 1)], "EGL device 4 by UUID; EGL says CUDA device 1"),
        ([device(3, 0, None)], "EGL device 3 by CUDA ordinal, a hint; EGL says CUDA device 0"),
        ([SOFTWARE, device(3, 5, None)], "EGL device 3 by elimination, a hint; EGL says CUDA device 5"),
    ],
)
def test_a_gpu_and_its_egl_device(found: list[Device], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda_checks, "gpu", lambda ordinal: GPU)
    matches: list[Device] = []
    finding = only(cuda_checks._match("a", 0, found, "graphics", matches))
    assert finding == Finding("a", "ok", f"NVIDIA H100, PCI 0000:65:00.0, UUID {UUID}: {text}")
    assert text.startswith(f"EGL device {matches[0].index} ")


def test_a_gpu_that_torch_hardly_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_checks, "gpu", lambda ordinal: Gpu(0, "Tesla", None, None))
    for one, how in ((device(0, None), "elimination"), (device(0, 0, None), "CUDA ordinal")):
        found = only(cuda_checks._match("a", 0, [one], None, [])).found
        assert found.startswith(f"Tesla, PCI unknown, UUID unknown: EGL device 0 by {how}, a hint")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([], "but EGL lists no device"),
        ([SOFTWARE], "but OpenGL here is software only (llvmpipe)"),
        ([device(0, 0, None, "0000:99:00.0")], "but the hardware devices of EGL are all other GPUs"),
    ],
)
def test_a_gpu_that_no_egl_device_is(found: list[Device], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_checks, "gpu", lambda ordinal: GPU)
    matches: list[Device] = []
    finding = only(cuda_checks._match("a", 0, found, None, matches))
    assert finding.status == "warn" and text in finding.found and "NVIDIA H100" in finding.found
    assert finding.fix is not None and "backend='torch'" in finding.fix
    assert not matches
    assert only(cuda_checks._match("a", 0, found, "the line", matches)).fix == "the line"


# -- the bridges ------------------------------------------------------------------------------------------------------


class Cuda:
    """A machine with one GPU, whose CUDA is `fake`; it is the session's context that shares memory with it."""

    def __init__(self, ctx: lod.Context) -> None:
        self.ctx = ctx
        self.fake = FakeCuda(ctx.gl)
        self.opened: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.made: list[InteropBridge] = []

    def open(self, device: torch.device, interop: str = "cuda") -> Any:
        self.opened.append((str(device), interop))
        if self.error is not None:
            raise self.error
        if self.ctx.interop is None:
            self.ctx.interop = InteropBridge(self.ctx.gl, self.fake)
            self.made.append(self.ctx.interop)
        return renderer(self.ctx, "NVIDIA H100", empty=self.empty)

    def empty(self, *shape: int, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        return self.ctx.empty(*shape, device="cpu")  # where the fake's memory is

    def examine(self, device: int | None = None, known: list[Device] | None = None) -> dict[str, Finding]:
        found = cuda_checks.examine([Device(0, NVIDIA, None, 0, UUID)] if known is None else known, device, None)
        return checked(list(found))


@pytest.fixture
def cuda(ctx: lod.Context, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda(ctx)
    set_torch(monkeypatch, "13.0", 1)
    install(monkeypatch, cuda_bindings="13.1.0")
    provide(monkeypatch, "cuda", "cuda.bindings", "cuda.bindings.runtime")
    monkeypatch.setattr(cuda_checks, "gpu", lambda ordinal: GPU)
    monkeypatch.setattr(cuda_checks, "Context", made.open)
    monkeypatch.setattr(cuda_checks, "_HAND_OVERS", 20)
    monkeypatch.setattr(cuda_checks, "_WARM_UP", 3)
    set_clock(monkeypatch, [10_000] * 23)
    before, ctx.interop = ctx.interop, None
    yield made
    ctx.interop = None
    assert opengl.round_trip("", ctx, CPU).status == "ok"  # whatever happened, the context works
    ctx.interop = before


def set_clock(monkeypatch: pytest.MonkeyPatch, durations: list[int]) -> None:
    """Nanoseconds that each hand-over takes."""
    times = iter([time for duration in durations for time in (0, duration)])
    monkeypatch.setattr(cuda_checks, "perf_counter_ns", lambda: next(times))


BRIDGE, TIMES = "CUDA bridge on cuda:0", "map and unmap on cuda:0"


def test_cuda_bridge(cuda: Cuda) -> None:
    findings = cuda.examine()
    assert list(findings) == [
        "CUDA", "cuda-bindings", "CuPy", "PyCUDA", "CUDA device 0", BRIDGE, TIMES, "PyCUDA bridge on cuda:0",
    ]  # fmt: skip
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert findings["CUDA"].found == "torch is built for CUDA 13.0 and sees 1 of its devices"
    assert "6 levels in place, no copy" in findings[BRIDGE].found
    assert findings[BRIDGE].found.endswith("; in <NVIDIA H100>")
    assert findings[TIMES].found == "p50 10.0 us, p99 10.0 us over 20 hand-overs of a buffer"
    assert findings["PyCUDA bridge on cuda:0"].found.startswith("skipped: no PyCUDA with OpenGL")
    assert cuda.opened == [("cuda:0", "cuda")]
    names = cuda.fake.names()
    # The chain maps what it unmaps in one call each, and makes two buffers; the hand-overs make one more.
    assert (names.count("unmap"), names.count("register")) == (1 + 23 + 1 + 3, 3)


def test_nothing_is_left_of_the_bridge(cuda: Cuda) -> None:
    """Neither buffers nor the default device of new tensors."""
    cuda.examine()
    assert cuda.ctx.interop is None and len(cuda.made) == 1
    assert not cuda.fake.resources and not cuda.fake.active
    assert cuda.made[0].pool.leased == 0


def test_a_bridge_of_the_program_is_left_alone(cuda: Cuda) -> None:
    cuda.ctx.interop = mine = InteropBridge(cuda.ctx.gl, cuda.fake)
    image = cuda.ctx.empty(4, 4)
    image.fill_(3)
    address = image.data_ptr()
    assert cuda.examine()[BRIDGE].status == "ok"
    assert cuda.ctx.interop is mine and cuda.ctx.owns(image)
    assert image.data_ptr() == address and image.tolist() == [[3] * 4] * 4
    assert len(cuda.fake.resources) > 1  # not even its idle buffers are gone
    del image
    gc.collect()
    with cuda.ctx.active():
        mine.trim()
    assert not cuda.fake.resources


def test_a_bridge_that_another_thread_uses_by_now_is_left(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def also(*_: object) -> Iterator[Finding]:
        kept.append(cuda.ctx.empty(4, 4))
        yield Finding(TIMES, "ok", "")

    monkeypatch.setattr(cuda_checks, "_hand_over", also)
    cuda.examine()
    assert cuda.ctx.interop is cuda.made[0] and cuda.ctx.owns(kept.pop())
    with cuda.ctx.active():
        cuda.made[0].trim()


def test_a_bridge_that_cannot_be_trimmed_is_dropped_all_the_same(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: InteropBridge) -> None:
        raise InteropError("CUDA reports error 700. Start again.")

    monkeypatch.setattr(InteropBridge, "trim", fail)
    monkeypatch.setattr(InteropBridge, "drain", lambda self: None)  # what tensors gave back is still in its queue
    known = [Device(0, NVIDIA, None, 0, UUID)]
    findings = list(cuda_checks.examine(known, None, None))
    assert [one.status for one in findings if one.name == BRIDGE] == ["ok", "fail"]
    assert findings[-1].name == "PyCUDA bridge on cuda:0"
    assert cuda.ctx.interop is None


@pytest.mark.parametrize(("call", "status"), [("register", "fail"), ("map", "fail"), ("unmap", "fail")])
def test_cuda_bridge_that_fails(call: str, status: str, cuda: Cuda) -> None:
    # What may be a shortage of memory is tried again.
    (cuda.fake.fail if call == "unmap" else cuda.fake.always)[call] = 304
    findings = cuda.examine()
    assert findings[BRIDGE].status == status
    assert "CUDA reports error 304" in findings[BRIDGE].found and "libnvidia-gl" in (findings[BRIDGE].fix or "")
    assert TIMES not in findings and "PyCUDA bridge on cuda:0" in findings
    assert cuda.ctx.interop is None
    assert not cuda.fake.resources


def test_cuda_bridge_that_copies(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lod.Context, "owns", lambda self, tensor: False)
        findings = cuda.examine()
    assert findings[BRIDGE].status == "fail" and "copied" in findings[BRIDGE].found


def test_a_context_that_does_not_open(cuda: Cuda) -> None:
    cuda.error = GLUnavailableError("no EGL device opens on cuda:0. Do this.")
    findings = cuda.examine()
    assert findings[BRIDGE] == Finding(BRIDGE, "fail", "no EGL device opens on cuda:0", "Do this.")
    assert TIMES not in findings
    cuda.error = InputError("the context on cuda:0 shares memory through 'pycuda' already. Close it first.")
    assert cuda.examine()[BRIDGE] == Finding(
        BRIDGE, "ok", "skipped: the context on cuda:0 shares memory through 'pycuda' already"
    )


def test_no_bridge_without_bindings_or_a_match(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = cuda.examine(known=[SOFTWARE])
    assert findings["CUDA device 0"].status == "warn"
    assert BRIDGE not in findings and not cuda.opened
    install(monkeypatch)
    finding = cuda.examine()[BRIDGE]
    assert (finding.status, finding.fix) == ("warn", "pip install 'cuda-bindings==13.*'")
    assert finding.found.startswith("skipped") and not cuda.opened


def test_the_bridge_of_one_device(cuda: Cuda) -> None:
    assert BRIDGE in cuda.examine(device=0)
    cuda.opened.clear()
    findings = cuda.examine(device=1)
    assert "CUDA device 0" in findings and BRIDGE not in findings and not cuda.opened


# -- map and unmap ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durations", "status", "text"),
    [
        ([30_000] * 20, "ok", "p50 30.0 us, p99 30.0 us over 20"),
        ([30_100] * 10 + [1_000] * 10, "ok", "p50 1.0 us, p99 30.1 us"),
        ([30_100] * 11 + [1_000] * 9, "warn", "p50 30.1 us, p99 30.1 us over 20 hand-overs of a buffer; at most 30"),
        ([1_000] * 19 + [150_000], "ok", "p50 1.0 us, p99 150.0 us"),
        ([1_000] * 19 + [150_100], "warn", "p50 1.0 us, p99 150.1 us"),
    ],
)
def test_slow_hand_overs(
    durations: list[int], status: str, text: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, [10**9] * 3 + durations)  # the first ones warm up
    finding = cuda.examine()[TIMES]
    assert finding.status == status and finding.found.startswith(text)


def test_hand_overs_are_timed_on_an_idle_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of them with the wait."""
    order: list[str] = []

    def noted(name: str, real: Callable[..., None], *arguments: Any) -> None:
        order.append(name)
        real(*arguments)

    for name in ("unmap", "map", "synchronize"):
        monkeypatch.setattr(cuda.fake, name, partial(noted, name, getattr(cuda.fake, name)))
    monkeypatch.setattr(cuda_checks, "perf_counter_ns", lambda: order.append("clock") or 0)
    bridge = cuda.ctx.interop = InteropBridge(cuda.ctx.gl, cuda.fake)
    only(cuda_checks._hand_over("a", cuda.ctx, bridge))
    start = order.index("synchronize")
    assert order[start : start + 5 * 23] == ["synchronize", "clock", "unmap", "map", "clock"] * 23
    assert order[start + 5 * 23 :].count("clock") == 0
    bridge_trimmed(cuda)


class Event:
    """torch's, at 2 ms for each that was made before it."""

    def __init__(self, made: list[Event], fails: str) -> None:
        self.made, self.fails = made, fails
        made.append(self)

    def synchronize(self) -> None:
        if self.fails == "synchronize":
            raise RuntimeError("no")

    def elapsed_time(self, end: Event) -> float:
        return 2.0 * (self.made.index(end) - self.made.index(self))


@pytest.mark.parametrize(
    ("fails", "says"), [("", "; for each the GPU takes 20 us to change between CUDA and OpenGL"), ("synchronize", "")]
)
def test_what_a_hand_over_takes_the_gpu(fails: str, says: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []
    monkeypatch.setattr(cuda_checks, "_event", lambda device, busy=False: Event(made, fails))
    for durations in ([10_000] * 23, [40_000] * 23):
        set_clock(monkeypatch, durations)
        finding = cuda.examine()[TIMES]
        assert ("GPU takes" in finding.found) == bool(says) and finding.found.endswith(says)
        assert finding.status == ("ok" if durations[0] < 30_000 else "warn")
    unmaps = cuda.fake.names().count("unmap")
    assert unmaps == 2 * (1 + 23 + 100 + 1 + 3), "100 are timed by the GPU's clock"


def test_events_stand_on_a_gpu_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    event = types.SimpleNamespace(record=lambda: order.append("record"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(order.append(str(device))))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("busy"), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event if enable_timing else None)
    assert cuda_checks._event(CPU) is None and not order
    assert cuda_checks._event(torch.device("cuda", 1)) is event and order == ["cuda:1", "record"]
    assert cuda_checks._event(torch.device("cuda", 1), busy=True) is event and order[3:] == ["busy", "record"]


def test_events_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("no CUDA")

    done: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", fail)
    assert cuda_checks._event(torch.device("cuda", 0)) is None
    assert cuda_checks._on_gpu(lambda: done.append(1), torch.device("cuda", 0)) is None and not done
    events = iter([Event([], ""), None])
    monkeypatch.setattr(cuda_checks, "_event", lambda device, busy=False: next(events))
    assert cuda_checks._on_gpu(lambda: done.append(1), torch.device("cuda", 0)) is None and len(done) == 100


def test_a_thousand_hand_overs() -> None:
    assert cuda_checks._HAND_OVERS == 1000


@pytest.mark.parametrize("call", ["map", "unmap"])
def test_the_buffer_is_mapped_whatever_happens(call: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_later(handles: Any, stream: int) -> None:
        counts[call] += 1
        if counts[call] == 3:
            raise InteropError("CUDA reports error 999. Nobody knows.")
        real(handles, stream)

    counts = {call: 0}
    bridge = cuda.ctx.interop = InteropBridge(cuda.ctx.gl, cuda.fake)
    real = getattr(cuda.fake, call)
    monkeypatch.setattr(cuda.fake, call, fails_later)
    finding = only(safely("a", lambda: cuda_checks._hand_over("a", cuda.ctx, bridge)))
    assert finding == Finding("a", "fail", "CUDA reports error 999", "Nobody knows.")
    assert counts[call] >= 3
    assert cuda.fake.mapped == set(cuda.fake.resources) and len(cuda.fake.resources) == 1
    assert not cuda.fake.active
    with cuda.ctx.active(device=CPU):
        again = bridge.lease(2**16)
        assert again.item.mapped
    del again
    bridge_trimmed(cuda)


def bridge_trimmed(cuda: Cuda) -> None:
    bridge = cuda.ctx.interop
    assert bridge is not None
    with cuda.ctx.active():
        bridge.trim()
    assert not cuda.fake.resources


def test_the_buffer_is_mapped_in_the_end(cuda: Cuda) -> None:
    bridge = cuda.ctx.interop = InteropBridge(cuda.ctx.gl, cuda.fake)
    only(cuda_checks._hand_over("a", cuda.ctx, bridge))
    assert cuda.fake.mapped == set(cuda.fake.resources) and len(cuda.fake.resources) == 1
    streams = {call[2] for call in cuda.fake.calls if call[0] in ("map", "unmap")}
    assert streams == {cuda.fake.stream_now}
    bridge_trimmed(cuda)


def test_events_that_stand_behind_no_stream_are_told(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.fake, "context_events", False, raising=False)
    finding = next(one for name, one in cuda.examine().items() if name.startswith("events on"))
    assert finding.status == "warn" and "waits for the GPU" in finding.found and "12.5" in str(finding.fix)


def test_a_buffer_that_moves_is_noticed(cuda: Cuda) -> None:
    bridge = cuda.ctx.interop = InteropBridge(cuda.ctx.gl, cuda.fake)
    real = cuda.fake.unmap
    before: list[Any] = []

    def unmap(handles: Any, stream: int) -> None:
        cuda.fake.move = True  # from the first hand-over on
        before.extend(handle.memory for handle in handles)  # so that no later one gets its address
        real(handles, stream)

    cuda.fake.unmap = unmap  # type: ignore[method-assign]
    with pytest.raises(BufferMovedError):
        list(cuda_checks._hand_over("a", cuda.ctx, bridge))
    cuda.fake.move = False
    with cuda.ctx.active(device=CPU):
        lease = bridge.lease(2**16)
        assert lease.address == lease.item.handle.memory.ctypes.data
    del lease
    bridge_trimmed(cuda)


@pytest.mark.parametrize("count", [1, 2, 3, 99, 100, 101, 1000])
@pytest.mark.parametrize("q", [0, 1, 50, 99, 100])
def test_percentile(count: int, q: int) -> None:
    values = random.Random(count).sample(range(10 * count), count)
    assert cuda_checks.percentile(values, q) == np.percentile(values, q, method="inverted_cdf")


def test_percentiles_of_a_thousand() -> None:
    values = [float(n) for n in range(1, 1001)]
    random.Random(0).shuffle(values)
    assert cuda_checks.percentile(values, 50) == 500
    assert cuda_checks.percentile(values, 99) == 990


# -- PyCUDA -----------------------------------------------------------------------------------------------------------


class PyCuda(types.ModuleType):
    """pycuda.driver, of which only the primary context is asked."""

    def __init__(self) -> None:
        super().__init__("pycuda.driver")
        self.calls: list[str] = []
        self.fail = ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name + "".join(map(str, arguments)))
            if name == self.fail:
                raise RuntimeError(f"{name} failed")
            return self

        return call


@pytest.fixture
def pycuda(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> PyCuda:
    fake = PyCuda()
    provide(monkeypatch, "pycuda", "pycuda.gl")
    monkeypatch.setitem(sys.modules, "pycuda.driver", fake)
    return fake


PYCUDA = "PyCUDA bridge on cuda:0"


def test_pycuda_bridge(pycuda: PyCuda, cuda: Cuda) -> None:
    findings = cuda.examine()
    assert findings[PYCUDA].status == "ok" and "6 levels in place, no copy" in findings[PYCUDA].found
    assert cuda.opened == [("cuda:0", "cuda"), ("cuda:0", "pycuda")]
    assert len(cuda.made) == 2 and cuda.ctx.interop is None and not cuda.fake.resources
    assert pycuda.calls == ["init", "Device0", "retain_primary_context", "push", "pop"]
    assert sum(name.startswith("map and unmap") for name in findings) == 1


def test_pycuda_bridge_that_fails_leaves_no_context_behind(pycuda: PyCuda, cuda: Cuda) -> None:
    cuda.error = InteropError("CUDA reports error 304. Do this.")
    finding = cuda.examine()[PYCUDA]
    assert finding == Finding(PYCUDA, "fail", "CUDA reports error 304", "Do this.")
    assert pycuda.calls[-1] == "pop"


@pytest.mark.parametrize("call", ["init", "Device", "retain_primary_context", "push"])
def test_pycuda_without_a_primary_context(call: str, pycuda: PyCuda, cuda: Cuda) -> None:
    pycuda.fail = call
    finding = cuda.examine()[PYCUDA]
    assert finding == Finding(PYCUDA, "ok", f"skipped: PyCUDA cannot have the primary context ({call} failed)")
    assert "pop" not in pycuda.calls and cuda.opened == [("cuda:0", "cuda")]


def test_pycuda_without_opengl(pycuda: PyCuda, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(monkeypatch, broken=("pycuda.gl",))
    finding = cuda.examine()[PYCUDA]
    assert finding.status == "ok" and finding.found.startswith("skipped: no PyCUDA with OpenGL")
    assert not pycuda.calls
