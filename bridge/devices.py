"""Which EGL device to open."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpu_lod.errors import GLUnavailableError, InputError

from .egl import EGLDevice as Device
from .egl import devices


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
        raise GLUnavailableError("EGL lists no device.")
    if requested is None and os.environ.get("GPU_LOD_DEVICE"):
        text = os.environ["GPU_LOD_DEVICE"]
        if not text.isdecimal():
            raise InputError(f"GPU_LOD_DEVICE is {text!r}; expected an EGL device index, 0 to {len(found) - 1}.")
        requested = int(text)
    if requested is None:
        return sorted(found, key=lambda device: device.software)
    if not 0 <= requested < len(found):
        raise InputError(
            f"there is no EGL device {requested}; this machine has 0 to {len(found) - 1}. `gpu-lod info` lists them."
        )
    return [found[requested]]


__all__ = ["Device", "choose", "devices"]
