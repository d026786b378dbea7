"""Which EGL device to open: the one asked for, or the one that is torch's CUDA device.

CUDA device n is not EGL device n, and CUDA_VISIBLE_DEVICES masks and permutes CUDA's numbering alone. `match` goes by
what is certain (UUID, PCI address) before what is a hint (EGL_CUDA_DEVICE_NV); the proof is cudaGLGetDevices with the
context current, for whoever opens the candidates in turn.

Sources: EGL_EXT_device_persistent_id, EGL_EXT_device_drm, EGL_NV_device_cuda; CUDA C++ Programming Guide,
"CUDA Environment Variables".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_lod.errors import GLUnavailableError, InputError

from .egl import EGLDevice as Device
from .egl import devices

_NO_DRIVER = (
    "Install the driver's libnvidia-gl; in a container set NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility; if the "
    "vendor file is elsewhere set __EGL_VENDOR_LIBRARY_FILENAMES=/usr/share/glvnd/egl_vendor.d/10_nvidia.json; or use "
    "backend='torch'."
)
_HIDDEN = (
    "OpenGL does not see that GPU: give this process (or container) its /dev/nvidia* and /dev/dri/* files, or use a "
    "CUDA device that EGL lists, or backend='torch'."
)


def choose(requested: int | None, found: Sequence[Device]) -> list[Device]:
    """The devices to try, in order.

    Args:
        requested: an index into `found`, or None for the default: $GPU_LOD_DEVICE if set, else every device with
            hardware before software, each in EGL's order (a machine's first device is often one that cannot open, such
            as a display controller with no render node permission).
        found: what `devices()` returned.

    Raises:
        InputError: an index that is not there.
        GLUnavailableError: no device at all.
    """
    if not found:
        raise GLUnavailableError("EGL lists no device. gpu-lod doctor says what is missing.")
    if requested is None and os.environ.get("GPU_LOD_DEVICE"):
        text = os.environ["GPU_LOD_DEVICE"]
        if not text.isdecimal() or len(text) > 9 or int(text) >= len(found):
            raise InputError(
                f"GPU_LOD_DEVICE is {text!r:.40}; expected an EGL device index, 0 to {len(found) - 1}. Unset it, or "
                "name one that `gpu-lod info` lists."
            )
        requested = int(text)
    if requested is None:
        return sorted(found, key=lambda device: device.software)
    if not 0 <= requested < len(found):
        raise InputError(
            f"there is no EGL device {requested}; this machine has 0 to {len(found) - 1}. `gpu-lod info` lists them."
        )
    return [found[requested]]


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as torch numbers it."""

    ordinal: int
    """n of torch's "cuda:n": CUDA's numbering after CUDA_VISIBLE_DEVICES."""
    name: str
    uuid: str | None
    """32 lowercase hex digits: the GPU's, or a MIG instance's own."""
    pci: str | None
    """The PCI address as sysfs writes it, "0000:65:00.0"; a MIG instance has its GPU's."""

    def __str__(self) -> str:
        return f"CUDA device {self.ordinal} ({', '.join([self.name, *_identity(self)])})"


def gpu(ordinal: int) -> Gpu:
    """What torch knows of CUDA device `ordinal`; older versions of torch know neither UUID nor PCI address.

    Raises:
        Whatever torch raises for a CUDA device that is not there.
    """
    properties = torch.cuda.get_device_properties(ordinal)
    text = str(getattr(properties, "uuid", "")).lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")
    uuid = text if re.fullmatch("[0-9a-f]{32}", text) and text.strip("0") else None
    address: list[int] = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    # All zeros is what a GPU that is not on a PCI bus has.
    pci = "{:04x}:{:02x}:{:02x}.0".format(*address) if min(address) >= 0 and any(address) else None
    return Gpu(ordinal, properties.name, uuid, pci)


def match(gpu: Gpu, found: Sequence[Device], visible: str | None = None) -> list[Device]:
    """The EGL devices that may be `gpu`, best first; to be proved with cudaGLGetDevices, in turn.

    In order: the same UUID; the same PCI address; the UUID that CUDA_VISIBLE_DEVICES names; the same CUDA ordinal, read
    as one after the mask, then as one before it; a CUDA device of another ordinal; one of no ordinal; any other
    hardware. Software devices, and devices that UUID or PCI address show to be other GPUs, are left out.

    Args:
        gpu: from `gpu(n)`.
        found: what `devices()` returned.
        visible: the text of CUDA_VISIBLE_DEVICES; None reads the environment.

    Raises:
        GLUnavailableError: none is left; the message says whether EGL has no device, software only, or other GPUs only.
    """
    hardware = [device for device in found if not device.software]
    if not found:
        raise GLUnavailableError(f"torch is on {gpu}, but EGL lists no device. {_NO_DRIVER}")
    if not hardware:
        raise GLUnavailableError(f"torch is on {gpu}, but OpenGL here is software only (llvmpipe). {_NO_DRIVER}")
    # A MIG instance has a UUID that EGL never shows, and a driver other than NVIDIA's may make up UUIDs of its own. So
    # a different UUID means a different GPU only once a device has shown this very one.
    whole = gpu.uuid is not None and any(device.uuid == gpu.uuid for device in hardware)
    candidates = [device for device in hardware if not _is_another(device, gpu, whole)]
    if not candidates:
        others = "; ".join(f"{device.index}: {', '.join(_identity(device))}" for device in hardware)
        raise GLUnavailableError(
            f"torch is on {gpu}, but the hardware devices of EGL are all other GPUs ({others}). {_HIDDEN}"
        )
    mask = _mask(os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible)
    if mask is not None and gpu.ordinal >= len(mask):
        mask = None  # it was changed after CUDA had read it
    entry = gpu.ordinal if mask is None else mask[gpu.ordinal]
    readings = [gpu.ordinal, entry]
    if mask is not None and any((device.cuda_ordinal or 0) >= len(mask) for device in hardware):
        readings.reverse()  # the mask lets no such ordinal through, so EGL counts without it

    def rank(device: Device) -> tuple[int, bool]:
        says_cuda = "EGL_NV_device_cuda" in device.extensions
        if device.uuid is not None and device.uuid == gpu.uuid:
            tier = 0
        elif _same_pci(device.pci, gpu.pci):
            tier = 1
        elif device.uuid is not None and isinstance(entry, str) and device.uuid.startswith(entry):
            tier = 2
        elif device.cuda_ordinal is not None:
            tier = 3 + readings.index(device.cuda_ordinal) if device.cuda_ordinal in readings else 5
        else:
            tier = 6 if says_cuda else 7
        # One GPU may be listed twice, by NVIDIA's driver and by Mesa: only NVIDIA's shares buffers with CUDA.
        return tier, not says_cuda

    return sorted(candidates, key=rank)


def _is_another(device: Device, gpu: Gpu, whole: bool) -> bool:
    if device.uuid is not None and device.uuid == gpu.uuid:
        return False
    if device.pci is not None and gpu.pci is not None:
        return not _same_pci(device.pci, gpu.pci)
    return whole and device.uuid is not None


def _same_pci(a: str | None, b: str | None) -> bool:
    """Without the function, which torch does not tell."""
    return a is not None and b is not None and a.rpartition(".")[0] == b.rpartition(".")[0]


def _identity(one: Device | Gpu) -> list[str]:
    known = [f"PCI {one.pci}" if one.pci else "", f"UUID {one.uuid}" if one.uuid else ""]
    return [text for text in known if text]


def _mask(visible: str | None) -> list[int | str] | None:
    """What CUDA heeds of CUDA_VISIBLE_DEVICES: numbers, or the first hex digits of a UUID. None: there is no mask."""
    if visible is None:
        return None
    seen: list[int | str] = []
    entries: list[int | str] = []
    for text in visible.lower().split(","):
        text = text.strip()
        number = re.match(r"\+?([0-9]+)", text)  # CUDA reads numbers as strtoul does
        named = re.match(r"(?:mig-)?gpu-([0-9a-f][0-9a-f-]*)", text)  # MIG-GPU-<its GPU's UUID>/<instance>/<instance>
        if number:
            entry: int | str = int(number[1])
        elif named or text.startswith("mig-"):
            entry = text
        else:
            break  # what is not a device, -1 too, hides itself and all that follow
        if entry in seen:
            return []  # a device named twice hides all
        seen.append(entry)
        # MIG-<the instance's UUID> stays as it is and is the beginning of no UUID.
        entries.append(named[1].replace("-", "") if named else entry)
    return entries


__all__ = ["Device", "Gpu", "choose", "devices", "gpu", "match"]
