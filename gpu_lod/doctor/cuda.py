"""The doctor's checks of CUDA: which EGL device is which CUDA device, and the bridges between the two."""

from __future__ import annotations

import gc
import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata
from time import perf_counter_ns
from typing import Any, Literal

import torch

from gpu_lod.bridge import Device, InteropBridge
from gpu_lod.bridge.cuda import INSTALL as BINDINGS
from gpu_lod.bridge.devices import Gpu, gpu, match
from gpu_lod.context import Context, _registry
from gpu_lod.doctor import parity
from gpu_lod.doctor.drivers import has_driver, look
from gpu_lod.doctor.finding import Finding, advice, safely
from gpu_lod.doctor.opengl import round_trip
from gpu_lod.errors import GLUnavailableError, InputError

_HAND_OVERS, _WARM_UP, _QUEUED = 1000, 50, 100
_SLOW_P50, _SLOW_P99 = 30.0, 150.0
"""Microseconds for unmap and map; less is usual."""


def examine(
    known: Sequence[Device], device: int | None, graphics: str | None, shaders: bool = False
) -> Iterator[Finding]:
    """Every check of CUDA.

    Args:
        known: the EGL devices.
        device: the only one of them to look at, or None.
        graphics: the line that brings NVIDIA's OpenGL to a machine that lacks it, or None.
        shaders: also compare what shaders and kernels make with what torch makes.
    """
    seen, warned = look()
    if not seen:
        yield _no_cuda(warned)
        return
    count = torch.cuda.device_count()
    yield Finding("CUDA", "ok", f"torch is built for CUDA {torch.version.cuda} and sees {count} of its devices")
    packages = list(safely("cuda-bindings", _bindings))
    bound = packages[-1].status == "ok"
    yield from packages
    yield from safely("CuPy", _cupy)
    yield from safely("PyCUDA", _pycuda)
    for ordinal in range(count):
        name = f"CUDA device {ordinal}"
        matches: list[Device] = []
        yield from safely(name, partial(_match, name, ordinal, known, graphics, matches))
        if device not in (None, *(one.index for one in matches[:1])):
            continue
        cuda = torch.device("cuda", ordinal)
        if matches:
            yield from _bridges(cuda, bound)
        if shaders:
            name = f"{'shaders and ' if matches else ''}kernels on {cuda}"
            yield from safely(name, partial(parity.compare, name, cuda if matches else None, cuda))


def _bridges(cuda: torch.device, bound: bool) -> Iterator[Finding]:
    name = f"CUDA bridge on {cuda}"
    if bound:
        yield from safely(name, partial(_bridge, name, cuda.index, "cuda"))
    else:
        yield Finding(name, "warn", "skipped: cuda-bindings is missing", BINDINGS)
    name = f"PyCUDA bridge on {cuda}"
    yield from safely(name, partial(_pycuda_bridge, name, cuda.index))


def _no_cuda(warned: str) -> Finding:
    built = torch.version.cuda
    why = f"torch is built for CUDA {built}, and finds no device" if built else "torch is built without CUDA"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if built and mask is not None and not re.match(r"\s*(\+?\d|(mig-)?gpu-|mig-)", mask, re.IGNORECASE):
        why += f": CUDA_VISIBLE_DEVICES={mask!r} hides them all"
    elif has_driver():
        fix = "pip install --force-reinstall torch (PyPI's for Linux has CUDA; pytorch.org lists others)"
        if built:
            fix = "`nvidia-smi` must list a GPU; then update the driver, or install a torch built for an older CUDA"
        return Finding("CUDA", "warn", f"none ({why}), and there is an NVIDIA driver. {warned}".strip(), fix)
    return Finding("CUDA", "ok", f"none ({why}); verbs run on CPU tensors")


def _bindings() -> Iterator[Finding]:
    version = _version("cuda-bindings")
    refused = version and _refused("cuda.bindings.runtime")
    if version is None:
        yield Finding("cuda-bindings", "warn", "not installed; the CUDA bridge needs it", BINDINGS)
    elif refused:
        yield Finding("cuda-bindings", "warn", f"{version}, does not load: {refused}", BINDINGS)
    else:
        yield Finding("cuda-bindings", "ok", version)


def _cupy() -> Iterator[Finding]:
    names = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda14x")
    found = {name: version for name in names if (version := _version(name)) is not None}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        yield Finding("CuPy", "ok", "not installed (optional)")
    elif len(found) > 1:  # they overwrite each other
        yield Finding("CuPy", "warn", text, f"pip uninstall {' '.join(found)}, then install one of them")
    elif refused := _refused("cupy"):
        fix = f"pip install --force-reinstall {' '.join(found)}"
        yield Finding("CuPy", "warn", f"{text}, does not load: {refused}", fix)
    else:
        yield Finding("CuPy", "ok", text)


def _pycuda() -> Iterator[Finding]:
    version = _version("pycuda")
    if version is None:
        yield Finding("PyCUDA", "ok", "not installed (optional)")
    elif refused := _refused("pycuda.driver"):
        yield Finding("PyCUDA", "warn", f"{version}, does not load: {refused}", "pip install --force-reinstall pycuda")
    elif refused := _refused("pycuda.gl"):
        fix = "in its source: python configure.py --cuda-enable-gl && pip install . (needs nvcc and libgl-dev)"
        yield Finding("PyCUDA", "warn", f"{version}, without OpenGL: {refused}", fix)
    else:
        yield Finding("PyCUDA", "ok", f"{version}, with OpenGL")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _refused(module: str) -> str | None:
    """Why a module cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:  # compiled packages fail in ways of their own
        return f"{type(error).__name__}: {error}"
    return None


def _match(
    name: str, ordinal: int, known: Sequence[Device], graphics: str | None, matches: list[Device]
) -> Iterator[Finding]:
    one = gpu(ordinal)
    try:
        matches += match(one, known)
    except GLUnavailableError as error:
        found, fix = advice(error)
        yield Finding(name, "warn", found, graphics or fix)
        return
    best = matches[0]
    own = "no CUDA ordinal" if best.cuda_ordinal is None else f"CUDA device {best.cuda_ordinal}"
    yield Finding(
        name,
        "ok",
        f"{one.name}, PCI {one.pci or 'unknown'}, UUID {one.uuid or 'unknown'}: EGL device {best.index} by "
        f"{_how(one, best)}; EGL says {own}",
    )


def _how(one: Gpu, device: Device) -> str:
    """What tells that an EGL device is a GPU; only the bridge proves hints."""
    if device.uuid is not None and device.uuid == one.uuid:
        return "UUID"
    if device.pci is not None and one.pci is not None and device.pci[:-1] == one.pci[:-1]:  # less the function
        return "PCI address"
    return "CUDA ordinal, a hint" if device.cuda_ordinal == one.ordinal else "elimination, a hint"


# -- the bridges ------------------------------------------------------------------------------------------------------


def _bridge(name: str, ordinal: int, interop: Literal["cuda", "pycuda"]) -> Iterator[Finding]:
    device = torch.device("cuda", ordinal)
    with _bridges_kept():
        try:
            ctx = Context(device, interop)
        except InputError as error:  # the program shares memory by the other bridge
            yield Finding(name, "ok", f"skipped: {advice(error)[0]}")
            return
        # As a list: what an error's traceback holds must be gone before the bridge is.
        found = list(safely(name, lambda: [round_trip(name, ctx, device)]))
        yield replace(found[0], found=f"{found[0].found}; in {ctx!r}")
        if interop == "cuda" and found[0].status == "ok" and ctx.interop is not None:
            name = f"map and unmap on cuda:{ordinal}"
            yield from list(safely(name, partial(_hand_over, name, ctx, ctx.interop)))


@contextmanager
def _bridges_kept() -> Iterator[None]:
    """Drop the bridges that the block makes, so that contexts give tensors where they gave them before."""
    before = {context: context.interop for context in list(_registry.values())}
    try:
        yield
    finally:
        for context in list(_registry.values()):
            made = context.interop
            if made is None or made is before.get(context):
                continue
            if made.pool.leased != len(made.pool.returned):
                gc.collect()  # the traceback of an error may hold a tensor, in a cycle
            with context.active():
                try:
                    made.trim()
                finally:
                    if made.pool.leased == len(made.pool.returned):  # no other thread has tensors of it by now
                        context.interop = before.get(context)


def _hand_over(name: str, ctx: Context, bridge: InteropBridge) -> Iterator[Finding]:
    """What unmap and map take the CPU, the GPU idle before them as it is where every result is awaited: in a queue that
    is full they would wait for those before them. And what they take the GPU."""
    times = []
    with ctx.active(device=bridge.device):
        lease = bridge.lease(2**16)
        buffer = lease.item
        driver, stream = bridge.driver, bridge.driver.stream()

        def once() -> None:
            driver.unmap([buffer.handle], stream)
            buffer.mapped = False  # should map fail, the bridge maps it when the block ends
            driver.map([buffer.handle], stream)
            buffer.mapped = True

        for _ in range(_WARM_UP + _HAND_OVERS):
            driver.synchronize()
            start = perf_counter_ns()
            once()
            times.append((perf_counter_ns() - start) / 1000)
        on_gpu = _on_gpu(once, bridge.device)
        bridge.give_to_gl(buffer, 0)  # so that the bridge maps it, and sees whether it has moved
        driver.mark()
    p50, p99 = (percentile(times[_WARM_UP:], q) for q in (50, 99))
    slow = p50 > _SLOW_P50 or p99 > _SLOW_P99
    yield Finding(
        name,
        "warn" if slow else "ok",
        f"p50 {p50:.1f} us, p99 {p99:.1f} us over {_HAND_OVERS} hand-overs of a buffer"
        + (f"; at most {_SLOW_P50:g} and {_SLOW_P99:g} are usual" if slow else "")
        + ("" if on_gpu is None else f"; for each the GPU takes {on_gpu:.3g} us to change between CUDA and OpenGL"),
        "unset CUDA_LAUNCH_BLOCKING, stop other work on this GPU and CPU and measure again; give verbs whole batches, "
        "since each hands over once"
        if slow
        else None,
    )
    if not getattr(driver, "context_events", True):
        yield Finding(
            f"events on {bridge.device}",
            "warn",
            "none stands behind all streams (cuCtxRecordEvent), so the host waits for the GPU whenever a result died",
            "update the NVIDIA driver and cuda-bindings to CUDA 12.5 or newer",
        )


def _on_gpu(once: Callable[[], None], device: torch.device) -> float | None:
    """Microseconds of one on the GPU's own clock, the mean of some that are queued; or None where it cannot be had."""
    before = _event(device, busy=True)
    if before is None:
        return None
    for _ in range(_QUEUED):
        once()
    behind = _event(device)
    if behind is None:
        return None
    try:
        behind.synchronize()
        return float(before.elapsed_time(behind)) * 1000 / _QUEUED
    except Exception:  # an extra: it fails no finding
        return None


def _event(device: torch.device, busy: bool = False) -> torch.cuda.Event | None:
    """One on torch's current stream, or None.

    Args:
        busy: give the GPU some milliseconds of work before it, in which the host queues what follows: on an idle GPU
            the time up to the next event is the host's, where that takes longer.
    """
    if device.type != "cuda":
        return None
    try:
        with torch.cuda.device(device):
            if busy:
                torch.cuda._sleep(10**7)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event
    except Exception:  # no finding may fail for it
        return None


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least `q` percent of all do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * q / 100) - 1)]


def _pycuda_bridge(name: str, ordinal: int) -> Iterator[Finding]:
    refused = _refused("pycuda.driver") or _refused("pycuda.gl")
    if refused:
        yield Finding(name, "ok", f"skipped: no PyCUDA with OpenGL ({refused})")
        return
    driver: Any = importlib.import_module("pycuda.driver")
    try:
        driver.init()
        primary = driver.Device(ordinal).retain_primary_context()
        primary.push()
    except Exception as error:  # PyCUDA's own kinds
        yield Finding(name, "ok", f"skipped: PyCUDA cannot have the primary context ({error})")
        return
    try:
        yield from _bridge(name, ordinal, "pycuda")
    finally:
        primary.pop()
