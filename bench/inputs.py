"""Pictures to measure on, and jobs that take a new one at every call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import cycle
from typing import Any, TypeVar

import torch
from skimage import data

T = TypeVar("T")
COLD_BYTES = 96 * 2**20
"""Inputs of a cold row together: beyond any cache that a CPU of this class has."""


def optional(name: str) -> Any:
    """A module of another library, or None where it cannot be imported: the rows then do without its sides."""
    try:
        return importlib.import_module(name)
    except Exception:  # not ImportError alone: a broken install raises anything
        return None


def picture(
    height: int, width: int, *, batch: int = 1, channels: int = 3, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The astronaut at any size, [batch, channels, height, width]; each image of the batch another crop."""
    photo = torch.from_numpy(data.astronaut()).permute(2, 0, 1)[None].float()
    sheet = torch.nn.functional.interpolate(photo, size=(height + batch, width + batch), mode="bilinear")
    images = torch.cat([sheet[..., i : i + height, i : i + width] for i in range(batch)])[:, :channels]
    values = images.round() if dtype == torch.uint8 else images / 255
    return values.to(dtype).contiguous()


def job(function: Callable[[Any], object], inputs: list[Any]) -> Callable[[], object]:
    """Call `function` with the next input at each call."""
    if len(inputs) == 1:
        return lambda: function(inputs[0])
    following = cycle(inputs)
    return lambda: function(next(following))


def inputs_for(
    image: torch.Tensor, cache: str, prepare: Callable[[torch.Tensor], T], cold_bytes: int = COLD_BYTES
) -> list[T]:
    """One prepared input for a warm row, as many as leave no cache warm for a cold one."""
    count = 1 if cache == "warm" else max(2, -(-cold_bytes // image.nbytes))
    return [prepare(image.clone() if count > 1 else image) for _ in range(count)]


def pyramid_bytes(image: torch.Tensor) -> int:
    """Read the image once, write the levels below it once."""
    return image.nbytes + image.nbytes // 3
