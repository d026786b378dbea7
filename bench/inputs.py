"""Pictures to measure on, and jobs that take a new one at every call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from skimage import data

import gpu_lod as lod
from gpu_lod.errors import GpuLodError

T = TypeVar("T")
ANEW = "from a pyramid that is no texture yet"
"""Note of a row whose source is sampled once: OpenGL makes it a texture first."""
NO_GL = "OpenGL did not open"
COLD_BYTES = 96 * 2**20
"""Inputs of a cold row together: beyond any cache that a CPU of this class has."""


ABSENT: dict[str, str] = {}
"""Modules of other libraries that could not be imported, and why."""


def optional(name: str) -> Any:
    """A module of another library, or None where it cannot be imported: the rows then do without its sides, and
    `ABSENT` says why."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # not ImportError alone: a broken install raises anything
        ABSENT[name] = " ".join(f"{type(error).__name__}: {error}".split())
        return None


def declare_vision_operators() -> None:
    """The torchvision of the package index is built for CUDA builds of torch. Beside a CPU build it imports only, and
    transformers with it, if these are declared; nothing here calls them."""
    if torch.version.cuda is None:
        for operator in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(f"torchvision::{operator}", schema)


def generators_of(verb: Callable[..., object]) -> tuple[str, ...]:
    """What makes a verb's result on the GL backend, as its signature lists them."""
    annotation = get_type_hints(inspect.unwrap(verb))["generator"]
    return tuple(name for name in get_args(annotation) if name != "auto")


def hwc(image: torch.Tensor) -> Any:
    """The first image of a batch as a numpy array [H, W, C], as other libraries have pictures."""
    return image[0].permute(1, 2, 0).contiguous().numpy()


def picture(
    height: int, width: int, *, batch: int = 1, channels: int = 3, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The astronaut at any size, [batch, channels, height, width]; each image of the batch another crop."""
    photo = torch.from_numpy(data.astronaut()).permute(2, 0, 1)[None].float()
    sheet = torch.nn.functional.interpolate(photo, size=(height + batch, width + batch), mode="bilinear")
    images = torch.cat([sheet[..., i : i + height, i : i + width] for i in range(batch)])[:, torch.arange(channels) % 3]
    values = images.round() if dtype == torch.uint8 else images / 255
    return values.to(dtype).contiguous()


def job(function: Callable[[Any], object], inputs: list[Any]) -> Callable[[], object]:
    """Call `function` with the next input at each call."""
    if len(inputs) == 1:
        return lambda: function(inputs[0])
    following = cycle(inputs)
    return lambda: function(next(following))


def inputs_for(
    image: torch.Tensor, cache: str, prepare: Callable[[torch.Tensor], T], cold_bytes: int | None = None
) -> list[T]:
    """One prepared input for a warm row, as many as leave no cache warm for a cold one."""
    count = 1 if cache == "warm" else max(2, -(-(cold_bytes or COLD_BYTES) // image.nbytes))
    return [prepare(image.clone() if count > 1 else image) for _ in range(count)]


def pyramid_bytes(image: torch.Tensor) -> int:
    """Read the image once, write the levels below it once."""
    return image.nbytes + image.nbytes // 3


def uploaded(pyramid: lod.Pyramid) -> lod.Pyramid:
    """The pyramid, a texture of all that its device has: of OpenGL where that opens, and of CUDA."""
    for backend in ("gl", "cuda"):
        with suppress(GpuLodError):
            if backend == "gl" or pyramid.device.type == "cuda":
                pyramid.upload(backend=backend)
    return pyramid


def opens(device: torch.device | str) -> bool:
    """Whether there is OpenGL on a device."""
    try:
        lod.Context(device)
    except GpuLodError:
        return False
    return True


def _fail(error: Exception, *_: object) -> None:
    raise error


PLAN = "gl plan"
PLANNED = {PLAN: "repeats what it recorded, and its result lasts until the next call"}
"""As `Row.other_job` takes it."""


def planned(function: Callable[..., Any], *args: Any, following: Callable[[], Any], **kwargs: Any) -> dict[str, Any]:
    """A plan as a side, which takes the next of what changes at each call; none where it would not replay."""
    try:
        plan = lod.plan(function, *args, **kwargs)
    except GpuLodError as error:
        return {PLAN: partial(_fail, error)}
    return {PLAN: lambda: plan(following())} if plan.replays else {}
