"""Gaussian and Laplacian pyramids, and the way back from a log-polar map, beside the best of torch and OpenCV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import peers
import torch
import torch.nn.functional as F
from inputs import inputs_for, job, picture, pyramid_bytes
from rows import Row
from timer import race

import gpu_lod as lod
from gpu_lod.binomial import BINOMIAL

_SIDE = torch.tensor(BINOMIAL)
AND_BACK = "and collapsed again"


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
        theirs, other = peers.gaussians(image, 5)
        yield Row(
            "gaussian", "end to end", height, width, batch, 3, "float32", "warm", pyramid_bytes(image),
            race(sides | theirs, seconds=seconds), note="5 levels", other_job=other,
        )  # fmt: skip
        there: dict[str, Callable[[], object]] = {
            name: job(lambda x, b=backend: lod.collapse(lod.laplacian(x, 5, b), b), inputs)
            for name, backend in (("auto", "auto"), ("gl compute", "gl"), ("torch strided sums", "torch"))
        }
        yield Row(
            "laplacian", "end to end", height, width, batch, 3, "float32", "warm", 2 * pyramid_bytes(image),
            race(there, seconds=seconds), note=f"5 levels, {AND_BACK}",
        )  # fmt: skip


def _expand_conv(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Zeros in between and four times the binomial, in one convolution."""
    y = F.conv_transpose2d(_framed(x), 4 * (_SIDE[:, None] * _SIDE)[None, None], stride=2)
    return y[..., 4 : 4 + height, 4 : 4 + width].view(*x.shape[:2], height, width)


def _expand_separable(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    y = F.conv_transpose2d(_framed(x), 2 * _SIDE[None, None, None], stride=(1, 2))[..., 4 : 4 + width]
    y = F.conv_transpose2d(y, 2 * _SIDE[None, None, :, None], stride=(2, 1))
    return y[..., 4 : 4 + height, :].reshape(*x.shape[:2], height, width)


def _framed(x: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] as [B * C, 1, h + 2, w + 2]: mirrored before the first sample, repeated after the last."""
    y = F.pad(x.flatten(0, 1)[:, None], (0, 1, 0, 1), mode="replicate")
    return F.pad(y, (1, 0, 1, 0), mode="reflect")


Expand = Callable[[torch.Tensor, int, int], torch.Tensor]


def _bands(reduce: Callable[[torch.Tensor], torch.Tensor], expand: Expand, x: torch.Tensor) -> list[torch.Tensor]:
    levels = _chain(reduce, x)
    bands = [fine - expand(coarse, *fine.shape[-2:]) for fine, coarse in pairwise(levels)]
    return [*bands, levels[-1]]


def _collapsed(expand: Expand, levels: tuple[torch.Tensor, ...]) -> torch.Tensor:
    result = levels[-1]
    for band in reversed(levels[:-1]):
        result = band + expand(result, *band.shape[-2:])
    return result


Ways = dict[str, Callable[[Any], object]]


def laplacian_ways() -> tuple[Ways, Ways]:
    """Ways to make a Laplacian pyramid of five levels in plain torch, and to collapse one."""
    there: Ways = {
        "torch strided sums": partial(lod.laplacian, levels=5, backend="torch"),
        "torch conv2d": partial(_bands, _conv, _expand_conv),
        "torch separable conv2d": partial(_bands, _separable, _expand_separable),
    }
    back: Ways = {
        "torch strided sums": partial(lod.collapse, backend="torch"),
        "torch conv_transpose2d": lambda pyramid: _collapsed(_expand_conv, pyramid.levels),
        "torch separable conv_transpose2d": lambda pyramid: _collapsed(_expand_separable, pyramid.levels),
    }
    return there, back


def alone(sizes: list[tuple[int, int, int]], seconds: float) -> Iterator[Row]:
    """The two ways of a Laplacian pyramid of five levels, each by itself."""
    for height, width, batch in sizes:
        image = picture(height, width, batch=batch)
        pyramid = lod.laplacian(image, 5)
        torch_there, torch_back = laplacian_ways()
        peer_there, peer_back = peers.laplacians(image, 5)
        for verb, ours, source, ways, theirs in (
            ("laplacian", partial(lod.laplacian, levels=5), image, torch_there, peer_there),
            ("collapse", lod.collapse, pyramid, torch_back, peer_back),
        ):
            sides: dict[str, Callable[[], object]] = {
                "auto": partial(ours, source),
                "gl compute": partial(ours, source, backend="gl"),
                **{name: partial(way, source) for name, way in ways.items()},
                **theirs,
            }
            yield Row(
                verb, "end to end", height, width, batch, 3, "float32", "warm", image.nbytes + pyramid_bytes(image),
                race(sides, seconds=seconds), note="5 levels",
            )  # fmt: skip


def inverse(sizes: list[tuple[int, int, int]], dtypes: list[torch.dtype], seconds: float) -> Iterator[Row]:
    """A map of 256 x 512 to a picture, about a new fixation every call."""
    for height, width, batch in sizes:
        for dtype in dtypes:
            image = picture(height, width, batch=batch, dtype=dtype)
            polar = lod.log_polar(image, (0.4, 0.6), 256, 512)
            points = cycle(torch.rand(64, batch, 2).unbind())

            def back(backend: Any, polar: Any = polar, points: Any = points, size: Any = (height, width)) -> object:
                return lod.inverse_log_polar(polar, next(points), size, backend=backend)

            sides: dict[str, Callable[[], object]] = {
                name: partial(back, backend)
                for name, backend in (("auto", "auto"), ("gl compute", "gl"), ("torch grid_sample", "torch"))
            }
            yield Row(
                "inverse_log_polar", "end to end", height, width, batch, 3, str(dtype)[6:], "warm",
                polar.nbytes + image.nbytes, race(sides, seconds=seconds), note="from a map of 256 x 512",
            )  # fmt: skip
