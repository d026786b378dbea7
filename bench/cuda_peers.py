"""CuPy and CV-CUDA beside the verbs on CUDA tensors. One that cannot be imported drops out, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from inputs import job

CUPY, CVCUDA = "cupy fused mean of 4", "cv-cuda resize AREA (HWC)"
Side = Callable[[], object]


def cupy_chain(mean: Callable[..., Any], image: Any) -> list[Any]:
    """A mean chain of an array [B, C, H, W] whose sides are powers of two, one kernel a level."""
    levels = [image]
    while max(levels[-1].shape[-2:]) > 1:
        x = levels[-1]
        rows = (x[..., 0::2, :], x[..., 1::2, :]) if x.shape[-2] > 1 else (x, x)
        four = [part for y in rows for part in ((y[..., 0::2], y[..., 1::2]) if x.shape[-1] > 1 else (y, y))]
        levels.append(mean(*four))
    return levels


def cupy_side(inputs: list[torch.Tensor]) -> Side:
    """On torch's current stream, and on its memory without a copy."""
    import cupy

    mean = "(a + b + c + d + 2) / 4" if inputs[0].dtype == torch.uint8 else "(a + b + c + d) * (T)0.25"
    kernel = cupy.ElementwiseKernel("T a, T b, T c, T d", "T mean", f"mean = {mean}", "mean_of_four")
    arrays = [cupy.from_dlpack(image) for image in inputs]
    call = job(lambda image: cupy_chain(kernel, image), arrays)

    def on_torchs_stream() -> object:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return call()

    return on_torchs_stream


def cvcuda_chain(cvcuda: Any, image: Any) -> list[Any]:
    """A chain of a tensor in NHWC order, by the area filter."""
    levels = [image]
    while max(levels[-1].shape[1:3]) > 1:
        count, height, width, channels = levels[-1].shape
        half = (count, max(1, height // 2), max(1, width // 2), channels)
        levels.append(cvcuda.resize(levels[-1], half, cvcuda.Interp.AREA))
    return levels


def cvcuda_side(inputs: list[torch.Tensor]) -> Side:
    """On torch's current stream, for CV-CUDA has one of its own, which neither torch's events nor what torch has queued
    know of; pictures are put in NHWC order beforehand."""
    import cvcuda

    as_stream = getattr(cvcuda, "as_stream", None) or cvcuda.cuda.as_stream  # where it was before
    images = [cvcuda.as_tensor(image.permute(0, 2, 3, 1).contiguous(), "NHWC") for image in inputs]
    call = job(lambda image: cvcuda_chain(cvcuda, image), images)

    def on_torchs_stream() -> object:
        with as_stream(torch.cuda.current_stream()):
            return call()

    return on_torchs_stream
