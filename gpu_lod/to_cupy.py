"""Tensors as CuPy arrays."""

from __future__ import annotations

from typing import Any

import torch

from gpu_lod import checks
from gpu_lod.errors import CudaUnavailableError, InputError


def to_cupy(tensor: torch.Tensor) -> Any:
    """A CUDA tensor as a `cupy.ndarray` over the same memory.

    Shape and dtype: the tensor's; bfloat16 has no CuPy dtype of its own.
    Convention: no copy. The array keeps the memory alive, a GL buffer's too, and is ordered behind the work that is
        queued on torch's current stream. The other way round every verb takes CuPy arrays as they are.

    Raises:
        InputError: not a CUDA tensor, or of a dtype that CuPy has not.
        CudaUnavailableError: CuPy is not installed.

    Source: the DLPack protocol of the Python array API standard.
    """
    tensor = checks.tensor(tensor, "tensor")
    if tensor.device.type != "cuda":
        raise InputError(f"the tensor is on {tensor.device}; CuPy arrays are on CUDA. For numpy: tensor.numpy().")
    if tensor.dtype == torch.bfloat16:
        raise InputError("CuPy has no bfloat16; convert the tensor with .half() or .float().")
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailableError(f"to_cupy needs CuPy ({error}): pip install cupy-cuda13x.") from None
    return cupy.from_dlpack(tensor.detach())
