"""What works on this machine, as data: one finding a check, with the line that mends what does not."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from gpu_lod.bridge import devices, egl
from gpu_lod.context import Context
from gpu_lod.errors import GpuLodError
from gpu_lod.mipmap import mipmap
from gpu_lod.mipmap import reference as mip_reference

Status = Literal["ok", "warn", "fail"]

INSTALL = "apt-get install libegl1 libgl1-mesa-dri"
_TOLERANCE = 2e-6
_VENDOR_FOLDERS = ("/etc/glvnd/egl_vendor.d", "/usr/share/glvnd/egl_vendor.d")


@dataclass(frozen=True)
class Finding:
    """One check."""

    name: str
    status: Status
    found: str
    fix: str | None = None
    """The line that mends it, or None."""


def examine(device: int | None = None) -> list[Finding]:
    """Run every check; raises nothing.

    Args:
        device: look at one EGL device only; None looks at all.
    """
    findings = [_versions()]
    findings += _safely("EGL library", lambda: iter([_library()]))
    known: list[egl.EGLDevice] = []
    if findings[-1].status != "fail":
        findings += _safely("EGL vendors", lambda: iter([_vendors()]))
        findings += _safely("EGL devices", lambda: _devices(known))
    chosen = [one for one in known if device is None or one.index == device]
    if device is not None and known and not chosen:
        findings.append(Finding("OpenGL context", "fail", f"there is no EGL device {device}", "gpu-lod info"))
    working = 0
    for one in chosen:
        found = list(_safely(f"OpenGL on device {one.index}", partial(_context, one)))
        opens = found[0].status != "fail"
        if opens:
            found += _safely(f"host bridge on device {one.index}", partial(_round_trip, one))
        working += all(finding.status != "fail" for finding in found)
        findings += found
    if working and working < len(chosen):  # one good device is enough
        findings = [_softened(finding) for finding in findings]
    findings += _safely("CUDA", lambda: iter([_cuda(known)]))
    return findings


def _safely(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check, the last of them the error that ended it."""
    try:
        yield from check()
    except GpuLodError as error:
        fix = INSTALL if "apt-get" in str(error) else None
        yield Finding(name, "fail", " ".join(str(error).split()).replace(egl.INSTALL_HINT, "").strip(), fix)
    except Exception as error:  # a doctor that dies of the illness is no help
        yield Finding(name, "fail", " ".join(f"{type(error).__name__}: {error}".split()))


def _softened(finding: Finding) -> Finding:
    return Finding(finding.name, "warn", finding.found, finding.fix) if finding.status == "fail" else finding


def _versions() -> Finding:
    names = ("gpu-lod", "torch", "moderngl", "glcontext", "numpy")
    found = [f"Python {platform.python_version()}"]
    missing = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        text = ", ".join(found) + "; not installed: " + ", ".join(missing)
        return Finding("versions", "warn", text, "pip install " + " ".join(missing))
    return Finding("versions", "ok", ", ".join(found))


def _library() -> Finding:
    name = egl.soname()
    try:
        ctypes.CDLL(name)
    except OSError as error:
        fix = "unset GPU_LOD_LIBEGL, or " + INSTALL if os.environ.get("GPU_LOD_LIBEGL") else INSTALL
        return Finding("EGL library", "fail", f"none: {error}", fix)
    return Finding("EGL library", "ok", _mapped(Path(name).name.split(".so")[0]) or name)


def _mapped(stem: str) -> str | None:
    """Path of a loaded library."""
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith("/") and Path(path).name.startswith(stem + ".so"):
                return path
    except OSError:
        pass
    return None


def _vendors() -> Finding:
    """The drivers that glvnd's EGL hands calls to."""
    listed = os.environ.get("__EGL_VENDOR_LIBRARY_FILENAMES")
    folders = (os.environ.get("__EGL_VENDOR_LIBRARY_DIRS") or ":".join(_VENDOR_FOLDERS)).split(":")
    files = listed.split(":") if listed else [str(f) for folder in folders for f in sorted(Path(folder).glob("*.json"))]
    found, broken = [], []
    for file in files:
        try:
            library = json.loads(Path(file).read_text())["ICD"]["library_path"]
            ctypes.CDLL(library)
            found.append(f"{library} ({Path(file).name})")
        except (OSError, ValueError, KeyError, TypeError):
            broken.append(file)
    text = ", ".join(found) or "none listed for glvnd"
    if broken:
        return Finding("EGL vendors", "warn", f"{text}; listed but not loadable: {', '.join(broken)}", INSTALL)
    return Finding("EGL vendors", "ok" if found else "warn", text, None if found else INSTALL)


def _devices(known: list[egl.EGLDevice]) -> Iterator[Finding]:
    known += devices()
    yield Finding("EGL devices", "ok", "; ".join(map(describe, known)))


def describe(device: egl.EGLDevice) -> str:
    """One device in a few words."""
    parts = ["software" if device.software else "hardware"]
    if device.drm_file:
        parts.append(device.drm_file)
    if device.cuda_ordinal is not None:
        parts.append(f"CUDA device {device.cuda_ordinal}")
    return f"{device.index}: {', '.join(parts)}"


def _context(device: egl.EGLDevice) -> Iterator[Finding]:
    ctx = Context(device.index)
    name = f"OpenGL on device {device.index}"
    kind = "software" if ctx.software else "hardware"
    fix = None
    if ctx.software and Path("/dev/nvidiactl").exists():
        # The GPU is there for CUDA, and only its OpenGL part is not.
        fix = "install the driver's libnvidia-gl; containers: NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility"
    yield Finding(name, "warn" if fix else "ok", f"{ctx.renderer} ({kind}), {ctx.driver}", fix)
    limits = ctx.limits
    yield Finding(
        f"limits of device {device.index}",
        "ok" if limits.storage_bytes >= 2**27 and limits.texture_size >= 16384 else "warn",
        f"storage binding {limits.storage_bytes / 2**20:.0f} MiB, textures to {limits.texture_size}, "
        f"{limits.layers} layers (smaller limits split work earlier, or refuse it)",
    )
    for extension, use in _EXTENSIONS.items():
        there = extension in ctx.extensions or extension.replace("EXT", "ARB") in ctx.extensions
        core = extension == "GL_ARB_buffer_storage" and ctx.version >= 440
        yield Finding(
            f"{extension} of device {device.index}",
            "ok" if there or core else "warn",
            f"{'there' if there or core else 'missing'}: {use}",
        )


_EXTENSIONS = {
    "GL_ARB_buffer_storage": "the zero-copy host bridge",
    "GL_EXT_texture_filter_minmax": "hiz(generator='sampler'); other generators need it not",
}


def _round_trip(device: egl.EGLDevice) -> Iterator[Finding]:
    """GL memory written by torch, reduced by a shader, read by torch."""
    ctx = Context(device.index)
    name = f"host bridge on device {device.index}"
    image = ctx.empty(1, 3, 37, 53)
    image.copy_(torch.rand(image.shape, generator=torch.Generator().manual_seed(0)))
    pyramid = mipmap(image, generator="compute")
    far = max(
        float((level.double() - truth).abs().max())
        for level, truth in zip(pyramid.levels, mip_reference(image.double()), strict=True)
    )
    if not far <= _TOLERANCE:
        yield Finding(name, "fail", f"a mip chain differs from torch's by {far:.2g}; at most {_TOLERANCE} is expected")
        return
    if pyramid[0].data_ptr() != image.data_ptr() or not all(ctx.owns(level) for level in pyramid):
        yield Finding(name, "fail", "a mip chain was copied on its way between OpenGL and torch")
        return
    yield Finding(name, "ok", f"torch wrote, a shader made {len(pyramid)} levels in place, no copy; within {far:.1g}")


def _cuda(known: list[egl.EGLDevice]) -> Finding:
    host = "tensors in GL memory are CPU tensors for now"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, and finds no device" if built else "torch is built without CUDA"
        return Finding("CUDA", "ok", f"none ({why}); {host}")
    names = ", ".join(f"{i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))
    matched = any(one.cuda_ordinal is not None for one in known)
    return Finding(
        "CUDA",
        "ok" if matched else "warn",
        f"{names}; {'one or more are EGL devices too' if matched else 'none of them is an EGL device'}; {host}",
        None if matched else "install the driver's libnvidia-gl",
    )


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "ok": all(finding.status != "fail" for finding in findings),
        "findings": [vars(finding) for finding in findings],
    }
