"""What works on this machine, as data: one finding a check, with the line that mends what does not."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata

import torch

from gpu_lod import cache, whole_file
from gpu_lod.bridge import choose, devices, egl
from gpu_lod.doctor import cuda, drivers, opengl, parity
from gpu_lod.doctor.finding import Finding, advice, as_dict, safely
from gpu_lod.errors import InputError

__all__ = ["Finding", "as_dict", "examine"]


def examine(device: int | None = None, *, shaders: bool = False) -> list[Finding]:
    """Run every check; raises nothing, and leaves the environment variables and every context's bridge as they were.

    Args:
        device: look at one EGL device only, and at the CUDA device that it is; None looks at all.
        shaders: also compare what every shader and kernel makes with what torch makes: some seconds, and up to a minute
            where the driver has compiled none of them yet.
    """
    with _environment_kept():
        findings = list(safely("versions", _versions))
        findings += safely("EGL library", drivers.library)
        known: list[egl.EGLDevice] = []
        graphics = findings[-1].fix
        if findings[-1].status != "fail":
            findings += safely("EGL vendors", drivers.vendors)
            if drivers.nvidia_there():
                findings += safely("NVIDIA EGL", drivers.nvidia)
                graphics = findings[-1].fix
            findings += safely("EGL devices", partial(_devices, known))
        if known and os.environ.get("GPU_LOD_DEVICE"):
            findings += safely("GPU_LOD_DEVICE", partial(_named, known))
        chosen = [one for one in known if device is None or one.index == device]
        if device is not None and known and not chosen:
            findings.append(Finding("OpenGL context", "fail", f"there is no EGL device {device}", "gpu-lod info"))
        working = 0
        for one in chosen:
            found = list(safely(f"OpenGL on device {one.index}", partial(opengl.context, one, graphics)))
            if found[0].status != "fail":
                found += safely(f"host bridge on device {one.index}", partial(opengl.host_bridge, one))
                if shaders:
                    name = f"shaders of device {one.index}"
                    found += safely(name, partial(parity.compare, name, one.index, torch.device("cpu")))
            working += all(finding.status != "fail" for finding in found)
            findings += found
        if working and working < len(chosen):  # one good device is enough
            findings = [replace(one, status="warn") if one.status == "fail" else one for one in findings]
        findings += safely("cache", _cache)
        findings += safely("CUDA", partial(cuda.examine, known, device, graphics, shaders))
    return findings


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo what imports and torch do to the environment variables."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


def _versions() -> Iterator[Finding]:
    names = ("gpu-lod", "torch", "moderngl", "glcontext", "numpy")
    found = [f"Python {platform.python_version()}"]
    missing = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    text = ", ".join(found)
    if missing:
        yield Finding(
            "versions", "warn", f"{text}; not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    else:
        yield Finding("versions", "ok", text)


def _devices(known: list[egl.EGLDevice]) -> Iterator[Finding]:
    known += devices()
    yield Finding("EGL devices", "ok", "; ".join(map(opengl.describe, known)))


def _named(known: list[egl.EGLDevice]) -> Iterator[Finding]:
    """The device that is to be the default one; where there is no such, no verb runs on OpenGL."""
    try:
        (device,) = choose(None, known)
    except InputError as error:
        found, _ = advice(error)
        yield Finding(
            "GPU_LOD_DEVICE", "fail", found, "unset GPU_LOD_DEVICE, or name a device that `gpu-lod info` lists"
        )
    else:
        yield Finding("GPU_LOD_DEVICE", "ok", opengl.describe(device))


def _cache() -> Iterator[Finding]:
    """Where measured times and compiled kernels are kept."""
    where = cache.folder("calibration")
    if where is None:
        yield Finding("cache", "ok", "none (it is off, or the user has no home): nothing is kept between processes")
        return
    try:
        whole_file.write(where / ".doctor", b"")
        (where / ".doctor").unlink()
    except OSError as error:
        fix = "make it writable, name another place with GPU_LOD_CACHE, or turn it off with GPU_LOD_CACHE=off"
        yield Finding("cache", "warn", f"{where} cannot be written: {error.strerror}", fix)
    else:
        yield Finding("cache", "ok", str(where))
