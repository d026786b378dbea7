"""The EGL library, and the drivers behind it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gpu_lod.bridge import egl
from gpu_lod.doctor.finding import Finding

INSTALL = "apt-get install libegl1 libgl1-mesa-dri"
_SHOW = "unset __EGL_VENDOR_LIBRARY_FILENAMES __EGL_VENDOR_LIBRARY_DIRS"
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


def library() -> Iterator[Finding]:
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


def vendors() -> Iterator[Finding]:
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


def nvidia() -> Iterator[Finding]:
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
