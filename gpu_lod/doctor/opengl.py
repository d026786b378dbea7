"""OpenGL on one EGL device: its context, its limits, and memory shared with torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_lod.bridge import egl
from gpu_lod.context import Context
from gpu_lod.doctor.finding import REPORT, Finding
from gpu_lod.mipmap import mipmap
from gpu_lod.mipmap import reference as mip_reference

_OTHER = "take another device (`gpu-lod info` lists them) or a newer driver"
_TOLERANCE = 2e-6
_EXTENSIONS = {
    "GL_ARB_buffer_storage": "the zero-copy host bridge",
    "GL_EXT_texture_filter_minmax": "hiz(generator='sampler'); other generators need it not",
}


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


def context(device: egl.EGLDevice, graphics: str | None) -> Iterator[Finding]:
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


def host_bridge(device: egl.EGLDevice) -> Iterator[Finding]:
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
