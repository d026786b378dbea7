"""Who builds a mean mip chain fastest?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from inputs import inputs_for, job, optional, picture, pyramid_bytes
from rows import Row
from timer import race

import gpu_lod as lod

cv2 = optional("cv2")
kornia = optional("kornia.geometry.transform")


def _chain(step: Callable[[torch.Tensor, int, int], torch.Tensor], image: torch.Tensor) -> list[torch.Tensor]:
    levels = [image]
    while max(levels[-1].shape[-2:]) > 1:
        h, w = levels[-1].shape[-2:]
        levels.append(step(levels[-1], max(1, h // 2), max(1, w // 2)))
    return levels


def _float(image: torch.Tensor) -> torch.Tensor:
    return image if image.dtype == torch.float32 else image.float()


def _stored_chain(step: Callable[[torch.Tensor, int, int], torch.Tensor], image: torch.Tensor) -> list[torch.Tensor]:
    """Carried in fp32 and stored in the image's dtype, as the verb does it."""
    if image.dtype == torch.float32:
        return _chain(step, image)
    levels = _chain(step, image.float())[1:]
    return [image, *((x.round() if image.dtype == torch.uint8 else x).to(image.dtype) for x in levels)]


def _avg_pool(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.avg_pool2d(x, (2 if x.shape[-2] > 1 else 1, 2 if x.shape[-1] > 1 else 1))


def _reshape_mean(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], h, x.shape[-2] // h, w, x.shape[-1] // w).mean(dim=(3, 5))


def _interpolate(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.interpolate(x, size=(h, w), mode="bilinear", align_corners=False)


def _area(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return F.interpolate(x, size=(h, w), mode="area")


def _opencv(image: object) -> list[object]:
    levels = [image]
    while max(levels[-1].shape[:2]) > 1:  # type: ignore[attr-defined]
        h, w = levels[-1].shape[:2]  # type: ignore[attr-defined]
        half = max(1, w // 2), max(1, h // 2)
        levels.append(cv2.resize(levels[-1], half, interpolation=cv2.INTER_AREA))
    return levels


def torch_ways(height: int, width: int) -> tuple[dict[str, Callable[[torch.Tensor], object]], list[str]]:
    """Ways to make the chain of an image of this size in plain torch, and which of them do another job."""
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "torch interpolate bilinear": partial(_stored_chain, _interpolate),
        "torch interpolate area": partial(_stored_chain, _area),
        "torch avg_pool2d": partial(_stored_chain, _avg_pool),
    }
    if all(side & (side - 1) == 0 for side in (height, width)):
        return ways | {"torch reshape mean": partial(_stored_chain, _reshape_mean)}, []
    # Nobody else has the exact filter for odd sides: our own torch path is the opponent.
    return ways | {"torch polyphase": partial(lod.mipmap, backend="torch")}, list(ways)


def depth_of(height: int, width: int) -> int:
    """Levels of kornia's pyramid: its blur needs a few pixels."""
    return min(height, width).bit_length() - 2


def rows(
    sizes: list[tuple[int, int, int]], dtypes: list[torch.dtype], caches: list[str], seconds: float
) -> Iterator[Row]:
    """A row for each (height, width, batch), dtype and cache state."""
    for height, width, batch in sizes:
        for dtype in dtypes:
            for cache in caches:
                image = picture(height, width, batch=batch, dtype=dtype)
                ways, other = torch_ways(height, width)
                inputs = inputs_for(image, cache, lambda x: x)
                sides: dict[str, Callable[[], object]] = {
                    "auto": job(lod.mipmap, inputs),
                    "gl compute": job(partial(lod.mipmap, generator="compute"), inputs),
                    "gl fragment": job(partial(lod.mipmap, generator="fragment"), inputs),
                    "gl driver": job(partial(lod.mipmap, generator="driver"), inputs),
                    **{name: job(way, inputs) for name, way in ways.items()},
                }
                if other:
                    other.append("gl driver")
                else:
                    last = inputs_for(image, cache, lambda x: _float(x).to(memory_format=torch.channels_last))
                    sides["torch channels_last bilinear"] = job(lambda x: _chain(_interpolate, x), last)
                if cv2 and batch == 1 and dtype != torch.float16:
                    arrays = inputs_for(image, cache, lambda x: x[0].permute(1, 2, 0).contiguous().numpy())
                    sides["opencv INTER_AREA (HWC)"] = job(_opencv, arrays)
                if kornia and dtype == torch.float32:
                    build = partial(kornia.build_pyramid, max_level=depth_of(height, width))
                    sides["kornia build_pyramid (Gaussian)"] = job(build, inputs)
                    other.append("kornia build_pyramid (Gaussian)")
                if dtype == torch.uint8:
                    other.append("gl driver")
                yield Row(
                    "mipmap", "end to end", height, width, batch, 3, str(dtype)[6:], cache, pyramid_bytes(image),
                    race(sides, seconds=seconds), other_job=tuple(other),
                )  # fmt: skip


def zero_copy(seconds: float) -> Iterator[Row]:
    """With the image in GL memory already."""
    held = lod.Context().empty(1, 3, 1024, 1024)
    held.copy_(picture(1024, 1024))
    sides = {
        "gl compute": lambda: lod.mipmap(held, generator="compute"),
        "torch interpolate bilinear": lambda: _chain(_interpolate, held),
    }
    yield Row(
        "mipmap", "zero-copy in", 1024, 1024, 1, 3, "float32", "warm", pyramid_bytes(held),
        race(sides, seconds=seconds), note="the image is in GL memory already",
    )  # fmt: skip
