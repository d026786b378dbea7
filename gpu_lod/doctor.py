"""What works on this machine, as data: one finding a check, with the line that mends what does not."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from gpu_lod import cache, whole_file
from gpu_lod.bridge import choose, devices, egl
from gpu_lod.context import Context
from gpu_lod.errors import GpuLodError, InputError
from gpu_lod.mipmap import mipmap
from gpu_lod.mipmap import reference as mip_reference

Status = Literal["ok", "warn", "fail"]

INSTALL = "apt-get install libegl1 libgl1-mesa-dri"
REPORT = "report it, with what `gpu-lod doctor --json` prints"
_SHOW = "unset __EGL_VENDOR_LIBRARY_FILENAMES __EGL_VENDOR_LIBRARY_DIRS"
_OTHER = "take another device (`gpu-lod info` lists them) or a newer driver"
_TOLERANCE = 2e-6
_MAPS = "/proc/self/maps"

_LIBRARY = "libEGL_nvidia.so.0"
_LIBRARY_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/opt/nvidia/lib64", "/run/opengl-driver/lib")
"""Where it may lie, outside the loader's own folders."""
_VENDOR_FOLDERS = ("/etc/glvnd/egl_vendor.d", "/usr/share/glvnd/egl_vendor.d")
"""Where glvnd looks by itself."""
_OTHER_VENDOR_FOLDERS = (
    "/usr/local/nvidia/share/glvnd/egl_vendor.d",
    "/usr/local/share/glvnd/egl_vendor.d",
    "/usr/local/etc/glvnd/egl_vendor.d",
    "/opt/nvidia/share/glvnd/egl_vendor.d",
    "/run/opengl-driver/share/glvnd/egl_vendor.d",
)
_CONTROL = "/dev/nvidiactl"
_WSL = "/dev/dxg"
_KERNEL = "/proc/driver/nvidia/version"
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CGROUP = "/proc/1/cgroup"
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility"


@dataclass(frozen=True)
class Finding:
    """One check."""

    name: str
    status: Status
    found: str
    fix: str | None = None
    """The line that mends it; None if all is well."""


def examine(device: int | None = None, *, shaders: bool = False) -> list[Finding]:
    """Run every check; raises nothing, and leaves the environment variables and every context's bridge as they were.

    Args:
        device: look at one EGL device only, and at the CUDA device that it is; None looks at all.
        shaders: also compare what every shader and kernel makes with what torch makes: some seconds, and up to a minute
            where the driver has compiled none of them yet.
    """
    from gpu_lod import doctor_cuda, doctor_shaders  # made of this module's parts

    with _environment_kept():
        findings = list(safely("versions", _versions))
        findings += safely("EGL library", _library)
        known: list[egl.EGLDevice] = []
        graphics = findings[-1].fix
        if findings[-1].status != "fail":
            findings += safely("EGL vendors", _vendors)
            if nvidia_there():
                findings += safely("NVIDIA EGL", _nvidia)
                graphics = findings[-1].fix
            findings += safely("EGL devices", partial(_devices, known))
        if known and os.environ.get("GPU_LOD_DEVICE"):
            findings += safely("GPU_LOD_DEVICE", partial(_named, known))
        chosen = [one for one in known if device is None or one.index == device]
        if device is not None and known and not chosen:
            findings.append(Finding("OpenGL context", "fail", f"there is no EGL device {device}", "gpu-lod info"))
        working = 0
        for one in chosen:
            found = list(safely(f"OpenGL on device {one.index}", partial(_context, one, graphics)))
            if found[0].status != "fail":
                found += safely(f"host bridge on device {one.index}", partial(_host_bridge, one))
                if shaders:
                    name = f"shaders of device {one.index}"
                    found += safely(name, partial(doctor_shaders.compare, name, one.index, torch.device("cpu")))
            working += all(finding.status != "fail" for finding in found)
            findings += found
        if working and working < len(chosen):  # one good device is enough
            findings = [replace(one, status="warn") if one.status == "fail" else one for one in findings]
        findings += safely("cache", _cache)
        findings += safely("CUDA", partial(doctor_cuda.examine, known, device, graphics, shaders))
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


def safely(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check, the last of them the error that ended it."""
    try:
        yield from check()
    except GpuLodError as error:
        found, fix = advice(error)
        yield Finding(name, "fail", found, fix)
    except Exception as error:  # a doctor that dies of the illness is no help
        yield Finding(name, "fail", " ".join(f"{type(error).__name__}: {error}".split()), REPORT)


def advice(error: GpuLodError) -> tuple[str, str]:
    """What happened, and what to do about it: messages say it in this order, what happened in one sentence."""
    found, _, fix = " ".join(str(error).split()).partition(". ")
    return found, fix or REPORT


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


def _library() -> Iterator[Finding]:
    name = egl.soname()
    fix = "unset GPU_LOD_LIBEGL, or " + INSTALL if os.environ.get("GPU_LOD_LIBEGL") else INSTALL
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        yield Finding("EGL library", "fail", f"none: {error}", fix)
        return
    if hasattr(library, "eglGetProcAddress"):
        yield Finding("EGL library", "ok", _mapped(Path(name).name.split(".so")[0]) or name)
    else:
        yield Finding("EGL library", "fail", f"{name} is another library", fix)


def _mapped(stem: str) -> str | None:
    """Path of a loaded library, with links followed."""
    for line in _text(_MAPS).splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and Path(path).name.startswith(stem + ".so"):
            return path
    return None


def _text(file: str) -> str:
    """What a file holds; nothing if it cannot be read."""
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""


# -- the drivers behind EGL -------------------------------------------------------------------------------------------


def _vendors() -> Iterator[Finding]:
    """The drivers that glvnd's EGL hands calls to."""
    listed, installed = _listed(), _files(_VENDOR_FOLDERS)
    loads, broken = [], []
    for file in listed:
        library = _library_of(file)
        if _loads(file):
            loads.append(f"{library} ({Path(file).name})")
        else:
            broken.append((file, library))
    text = ", ".join(loads) or "none listed for glvnd"
    if broken:
        text += "; listed but not loadable: " + ", ".join(file for file, _ in broken)
    # NVIDIA's is left over where there is no such GPU, and where there is one it has a finding of its own.
    well = bool(loads) and all(_is_nvidia(library) for _, library in broken)
    fix = _SHOW if listed != installed and any(map(_loads, installed)) else INSTALL
    yield Finding("EGL vendors", "ok" if well else "warn", text, None if well else fix)


def _listed() -> list[str]:
    """The vendor files that glvnd reads. A variable that is set and empty means none."""
    listed = os.environ.get("__EGL_VENDOR_LIBRARY_FILENAMES")
    if listed is not None:
        return [file for file in listed.split(":") if file]
    folders = os.environ.get("__EGL_VENDOR_LIBRARY_DIRS")
    return _files(_VENDOR_FOLDERS if folders is None else [folder for folder in folders.split(":") if folder])


def _files(folders: Sequence[str]) -> list[str]:
    return [str(file) for folder in folders for file in sorted(Path(folder).glob("*.json"))]


def _library_of(file: str) -> str | None:
    """The library that a vendor file names."""
    try:
        return str(json.loads(Path(file).read_text())["ICD"]["library_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refused(library: str) -> str | None:
    """Why a library does not load, or None."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


def _loads(file: str) -> bool:
    """Whether a vendor file names a library that loads."""
    library = _library_of(file)
    return library is not None and _refused(library) is None


def _is_nvidia(library: str | None) -> bool:
    return Path(library or "").name.startswith("libEGL_nvidia.so")


def _nvidia() -> Iterator[Finding]:
    """Whether glvnd finds NVIDIA's EGL, and whether that is of the kernel module's version, as it must be."""
    lacking = _lacking()
    if lacking is not None:
        yield Finding("NVIDIA EGL", "warn", f"there is an NVIDIA GPU, and {lacking[0]}", lacking[1])
        return
    kernel = _kernel_version()
    found = re.search(r"\.so\.(\d+(?:\.\d+)+)$", _mapped("libEGL_nvidia") or "")
    library = None if found is None else found[1]
    text = f"{_LIBRARY} of driver {library or 'unknown'}, kernel module {kernel or 'unknown'}"
    if kernel is None or library is None or kernel == library:
        yield Finding("NVIDIA EGL", "ok", text)
        return
    fix = "reboot, so that the kernel module of the installed driver is loaded"
    if _in_container():
        fix = f"remove the image's own NVIDIA libraries, and start the container with {_CAPABILITIES}"
    yield Finding("NVIDIA EGL", "warn", f"{text}: they must be of one version", fix)


def _lacking() -> tuple[str, str] | None:
    """What keeps glvnd from NVIDIA's EGL and the line that mends it, or None."""
    listed = _listed()
    files = [*listed, *_files((*_VENDOR_FOLDERS, *_OTHER_VENDOR_FOLDERS))]
    file = next((one for one in files if _is_nvidia(_library_of(one))), None)
    refused = _refused((file and _library_of(file)) or _LIBRARY)
    folder = next((one for one in _LIBRARY_FOLDERS if os.path.exists(f"{one}/{_LIBRARY}")), None)
    why, lines = [], []
    if refused is not None:
        why.append(f"its EGL does not load ({refused})")
        if folder is None:
            return why[0], _install()
        lines.append(f"export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH")
    if file is None:
        why.append(f"no vendor file names its {_LIBRARY}")
        text = json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": _LIBRARY}})
        lines.append(f"mkdir -p {_VENDOR_FOLDERS[0]} && echo '{text}' > {_VENDOR_FOLDERS[0]}/10_nvidia.json")
    elif file not in listed:
        why.append(f"its vendor file {file} is not one that glvnd reads")
        hidden = file in _files(_VENDOR_FOLDERS)  # by a variable
        lines.append(_SHOW if hidden else f"export __EGL_VENDOR_LIBRARY_FILENAMES={file}")
    return (", and ".join(why), " && ".join(lines)) if why else None


def _install() -> str:
    """The line that installs NVIDIA's OpenGL."""
    if os.path.exists(_WSL) and not has_driver():
        return "use backend='torch': under WSL CUDA shares no memory with OpenGL"
    version = _kernel_version()
    line = "install the driver's libnvidia-gl, of the same version as its kernel module"
    if version is not None:
        line = f"apt-get install libnvidia-gl-{version.split('.')[0]} (of the kernel module's version, {version})"
    return f"start the container with {_CAPABILITIES}, or inside it {line}" if _in_container() else line


def _in_container() -> bool:
    return any(map(os.path.exists, _CONTAINER_FILES)) or bool(
        re.search("docker|kubepods|containerd|libpod|lxc", _text(_CGROUP))
    )


def _kernel_version() -> str | None:
    """Of the NVIDIA kernel module that is loaded: "580.65.06"."""
    found = re.search(r"NVRM version:.*?\s(\d{3,}(?:\.\d+)+)", _text(_KERNEL))
    return None if found is None else found[1]


def has_driver() -> bool:
    """Whether an NVIDIA kernel module is loaded, and this process may see it."""
    return os.path.exists(_CONTROL)


def nvidia_there() -> bool:
    """Whether there is an NVIDIA GPU."""
    return has_driver() or look()[0]


def look() -> tuple[bool, str]:
    """Whether torch has a CUDA device, and what it warned of when it looked (it does so once)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = torch.version.cuda is not None and torch.cuda.is_available()
    return seen, " ".join(str(one.message) for one in caught)


# -- EGL devices and their contexts -----------------------------------------------------------------------------------


def _devices(known: list[egl.EGLDevice]) -> Iterator[Finding]:
    known += devices()
    yield Finding("EGL devices", "ok", "; ".join(map(describe, known)))


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
        yield Finding("GPU_LOD_DEVICE", "ok", describe(device))


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


def describe(device: egl.EGLDevice) -> str:
    """One device in a few words."""
    parts = ["software" if device.software else "hardware"]
    if device.drm_file:
        parts.append(device.drm_file)
    if device.pci:
        parts.append(f"PCI {device.pci}")
    if device.cuda_ordinal is not None:
        parts.append(f"CUDA device {device.cuda_ordinal}")
    return f"{device.index}: {', '.join(parts)}"


def _context(device: egl.EGLDevice, graphics: str | None) -> Iterator[Finding]:
    """What a context says of itself; `graphics` is the line that brings NVIDIA's OpenGL to a machine that lacks it."""
    ctx = Context(device.index)
    fix = graphics if ctx.software else None
    yield Finding(
        f"OpenGL on device {device.index}",
        "warn" if fix else "ok",
        f"{ctx.renderer} ({'software' if ctx.software else 'hardware'}), {ctx.driver}",
        fix,
    )
    limits = ctx.limits
    roomy = limits.storage_bytes >= 2**27 and limits.texture_size >= 16384
    yield Finding(
        f"limits of device {device.index}",
        "ok" if roomy else "warn",
        f"storage binding {limits.storage_bytes / 2**20:.0f} MiB, textures to {limits.texture_size}, "
        f"{limits.layers} layers (smaller limits split work earlier, or refuse it)",
        None if roomy else _OTHER,
    )
    for extension, use in _EXTENSIONS.items():
        there = extension in ctx.extensions or extension.replace("EXT", "ARB") in ctx.extensions
        there |= extension == "GL_ARB_buffer_storage" and ctx.version >= 440
        yield Finding(
            f"{extension} of device {device.index}",
            "ok" if there else "warn",
            f"{'there' if there else 'missing'}: {use}",
            None if there else _OTHER,
        )


_EXTENSIONS = {
    "GL_ARB_buffer_storage": "the zero-copy host bridge",
    "GL_EXT_texture_filter_minmax": "hiz(generator='sampler'); other generators need it not",
}


def _host_bridge(device: egl.EGLDevice) -> Iterator[Finding]:
    ctx = Context(device.index)
    yield round_trip(f"host bridge on device {device.index}", ctx, torch.device("cpu"))
    how = (
        "shaders read them where they are, unless they must be converted"
        if ctx.host.borrows
        else "copied once a call; not those of Context.empty()"
    )
    yield Finding(f"ordinary CPU tensors on device {device.index}", "ok", how)


def round_trip(name: str, ctx: Context, device: torch.device) -> Finding:
    """GL memory written by torch on `device`, reduced by a shader, read by torch."""
    image = ctx.empty(1, 3, 37, 53, device=device)
    image.copy_(torch.rand(image.shape, generator=torch.Generator().manual_seed(0)))
    pyramid = mipmap(image, generator="compute")
    truth = mip_reference(image.cpu().double())
    apart = [(level.cpu().double() - true).abs().max() for level, true in zip(pyramid, truth, strict=True)]
    far = float(torch.stack(apart).max())  # not Python's max, which may drop a NaN
    if not far <= _TOLERANCE:
        found = f"a mip chain differs from torch's by {far:.2g}; at most {_TOLERANCE} is expected"
        return Finding(name, "fail", found, f"update the driver, or use backend='torch'; and {REPORT}")
    if pyramid[0].data_ptr() != image.data_ptr() or not all(ctx.owns(level) for level in pyramid):
        return Finding(name, "fail", "a mip chain was copied on its way between OpenGL and torch", REPORT)
    return Finding(name, "ok", f"torch wrote, a shader made {len(pyramid)} levels in place, no copy; within {far:.1g}")


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "ok": all(finding.status != "fail" for finding in findings),
        "findings": [vars(finding) for finding in findings],
    }
