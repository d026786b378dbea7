"""Other libraries' arrays in, CuPy arrays out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import noise
from PIL import Image

import gpu_lod as lod
from gpu_lod.errors import CudaUnavailableError, InputError


class Speaker:
    """An array of a library that torch does not know, but that speaks DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.asked = 0

    def __dlpack__(self, **options: Any) -> Any:
        self.asked += 1
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("backend", ["torch", "gl"])
def test_verbs_take_any_array_that_speaks_dlpack(backend: Any) -> None:
    image = noise(3, 20, 31)
    array = Speaker(image)
    pyramid = lod.mipmap(array, backend=backend)  # type: ignore[arg-type]
    assert array.asked == 1
    for one, two in zip(pyramid, lod.mipmap(image, backend=backend), strict=True):
        assert torch.equal(one, two)
    polar = lod.log_polar(image.numpy(), (0.5, 0.5), 8, 8, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(polar, lod.log_polar(image, (0.5, 0.5), 8, 8, backend=backend))
    hz = lod.hiz(image.numpy(), backend=backend)  # type: ignore[arg-type]
    boxes = np.array([[0.1, 0.1, 0.5, 0.5]], np.float32)
    bound = lod.region_max(hz, boxes, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(bound, lod.region_max(hz, torch.from_numpy(boxes), backend=backend))


def test_no_copy_is_made_of_them() -> None:
    array = np.zeros((3, 16, 16), np.float32)
    pyramid = lod.mipmap(array, backend="torch")  # type: ignore[arg-type]
    assert pyramid[0].data_ptr() == array.ctypes.data


def test_negative_strides_are_refused() -> None:
    """torch itself ends the process over them."""
    with pytest.raises(InputError, match="negative stride"):
        lod.mipmap(np.zeros((3, 16, 16), np.float32)[:, ::-1])  # type: ignore[arg-type]


def test_what_torch_refuses_is_an_input_error() -> None:
    class Broken(Speaker):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(InputError, match="not today"):
        lod.mipmap(Broken(torch.zeros(3, 16, 16)))  # type: ignore[arg-type]


def test_a_picture_of_pillow_is_told_how_to_become_a_tensor() -> None:
    picture = Image.new("RGB", (5, 4))
    with pytest.raises(InputError, match=r"Pillow one: torch.from_numpy\(numpy.array\(picture.convert"):
        lod.mipmap(picture)  # type: ignore[arg-type]
    for path in ("photo.jpg", Path("photo.jpg")):
        with pytest.raises(InputError, match=r"images.load, or torch.from_numpy\(numpy.array\(Image.open\(path\)"):
            lod.mipmap(path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"torch.tensor\(values\)"):
        lod.mipmap([[[0.5]]])  # type: ignore[arg-type]


def test_to_cupy_wants_a_cuda_tensor() -> None:
    with pytest.raises(InputError, match="on CUDA"):
        lod.to_cupy(torch.zeros(3))


class _OnCuda:
    device = torch.device("cuda", 0)
    dtype = torch.float32

    def detach(self) -> str:
        return "the tensor"


def test_to_cupy_goes_through_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for CuPy: this machine need not have it."""
    import types

    from gpu_lod import checks

    monkeypatch.setattr(checks, "tensor", lambda value, name: value)
    cupy = types.ModuleType("cupy")
    cupy.from_dlpack = lambda value: ("array of", value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert lod.to_cupy(_OnCuda()) == ("array of", "the tensor")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaUnavailableError, match="pip install cupy"):
        lod.to_cupy(_OnCuda())  # type: ignore[arg-type]
