"""Gaussian and Laplacian pyramids, and the way back from a log-polar map, beside the best of torch and OpenCV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from inputs import inputs_for, job, optional, picture, pyramid_bytes
from rows import Row
from timer import race

import gpu_lod as lod
from gpu_lod.gaussian import BINOMIAL

_SIDE = torch.tensor(BINOMIAL)


def _planes(x: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] as [B * C, 1, h + 4, w + 4], mirrored; sides from 3 up."""
    return F.pad(x.flatten(0, 1)[:, None], (2, 2, 2, 2), mode="reflect")


def _conv(x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(_planes(x), (_SIDE[:, None] * _SIDE)[None, None], stride=2).view(*x.shape[:2], *_half(x))


def _separable(x: torch.Tensor) -> torch.Tensor:
    y = F.conv2d(_planes(x), _SIDE[None, None, None], stride=(1, 2))
    return F.conv2d(y, _SIDE[None, None, :, None], stride=(2, 1)).view(*x.shape[:2], *_half(x))


def _half(x: torch.Tensor) -> tuple[int, int]:
    return -(-x.shape[-2] // 2), -(-x.shape[-1] // 2)


def _chain(reduce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    levels = [x]
    for _ in range(4):
        levels.append(reduce(levels[-1]))
    return levels


def rows(sizes: list[tuple[int, int, int]], seconds: float) -> Iterator[Row]:
    """Five levels of fp32 RGB: down to where sides are small for every size here."""
    cv2 = optional("cv2")
    for height, width, batch in sizes:
        image = picture(height, width, batch=batch)
        inputs = inputs_for(image, "warm", lambda x: x)
        sides: dict[str, Callable[[], object]] = {
            "auto": job(partial(lod.gaussian, levels=5), inputs),
            "gl compute": job(partial(lod.gaussian, levels=5, backend="gl"), inputs),
            "torch strided sums": job(partial(lod.gaussian, levels=5, backend="torch"), inputs),
            "torch conv2d": job(partial(_chain, _conv), inputs),
            "torch separable conv2d": job(partial(_chain, _separable), inputs),
        }
        if cv2 is not None and batch == 1:
            array = image[0].permute(1, 2, 0).contiguous().numpy()
            sides["opencv pyrDown"] = lambda array=array: _chain(cv2.pyrDown, array)
        yield Row(
            "gaussian", "end to end", height, width, batch, 3, "float32", "warm", pyramid_bytes(image),
            race(sides, seconds=seconds), note="5 levels",
        )  # fmt: skip
        there: dict[str, Callable[[], object]] = {
            name: job(lambda x, b=backend: lod.collapse(lod.laplacian(x, 5, b), b), inputs)
            for name, backend in (("auto", "auto"), ("gl compute", "gl"), ("torch strided sums", "torch"))
        }
        yield Row(
            "laplacian", "end to end", height, width, batch, 3, "float32", "warm", 2 * pyramid_bytes(image),
            race(there, seconds=seconds), note="5 levels, and collapsed again",
        )  # fmt: skip


def inverse(seconds: float) -> Iterator[Row]:
    """A map of 256 x 512 to a picture of 1024 x 1024."""
    for batch in (1, 8):
        polar = lod.log_polar(picture(1024, 1024, batch=batch), (0.4, 0.6), 256, 512)
        sides: dict[str, Callable[[], object]] = {
            name: partial(lod.inverse_log_polar, polar, (0.4, 0.6), (1024, 1024), backend=backend)
            for name, backend in (("auto", "auto"), ("gl compute", "gl"), ("torch grid_sample", "torch"))
        }
        yield Row(
            "inverse_log_polar", "end to end", 1024, 1024, batch, 3, "float32", "warm",
            polar.nbytes + batch * 3 * 1024 * 1024 * 4, race(sides, seconds=seconds), note="from a map of 256 x 512",
        )  # fmt: skip
