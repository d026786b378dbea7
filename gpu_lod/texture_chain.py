"""The mean chain of an image that exists as a texture alone, made a tile at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from gpu_lod import dispatch, generators, memory_chain, recording, several_levels
from gpu_lod.adjoints import Adjoint, linear
from gpu_lod.context import Context, context_for
from gpu_lod.copies import put
from gpu_lod.memory_chain import MemoryChain
from gpu_lod.mipmap import image_gradient, mipmap
from gpu_lod.mipmap import reference as mip_chain
from gpu_lod.pyramid import Pyramid, level_sizes
from gpu_lod.several_levels import LEVELS_AT_ONCE
from gpu_lod.texture import Sampled
from gpu_lod.transfer import Planes, packed_bytes, packed_in
from gpu_lod.uploads import STAGING_BYTES, Uploader, finish, new_textures

MOST = 1.8, 1.0
"""Memory beside the image and the result, in images and in results: what textures leave of it, the tiles share."""

TILE_BYTES = (2**16, 2**20)
"""The least and the most that a tile may take."""

Span = tuple[int, int]
"""First and end (exclusive) of rows or columns."""


class TextureChain:
    """An image on its way to samplers: to them a `Pyramid`, but its levels below the image are nowhere else but in its
    textures, so that memory never holds the chain twice.

    Args:
        image: [B, C, H, W] or [C, H, W].
        levels: how many, level 0 included; None goes down to 1 x 1.
        result_bytes: of what is sampled from it. The larger it is, the more room there is for bands.
    """

    def __init__(self, image: torch.Tensor, levels: int | None = None, *, result_bytes: int = 0) -> None:
        self._result_bytes = result_bytes
        self.image = image
        self.size = (image.shape[-2], image.shape[-1])
        self._sizes = level_sizes(*self.size, levels)
        self.batched = image.ndim == 4
        self.batch = image.shape[0] if self.batched else 1
        self.channels = image.shape[-3]
        self.dtype, self.device = image.dtype, image.device

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def levels(self) -> tuple[torch.Tensor, ...]:
        """What gradients pass to."""
        return (self.image,)

    def texture_context(self) -> Context | None:
        """None: it is a texture nowhere yet."""
        return None

    def textures(self, ctx: Context, *, filtered: bool = False) -> list[tuple[int, Sampled]]:
        """As of `Pyramid`, but made anew at each call: with the values that a pyramid of the image would give.

        Raises:
            LimitError: larger than the device's textures.
        """
        image = (self.image if self.batched else self.image[None]).detach()
        finish(ctx)  # a verb round this one may have made the image
        textures = new_textures(
            ctx,
            self.size,
            layers=self.batch,
            levels=len(self),
            dtype=self.dtype,
            channels=self.channels,
            filtered=filtered,
        )
        room = (
            MOST[0] * image.nbytes + MOST[1] * self._result_bytes - sum(texture.key.nbytes for _, texture in textures)
        )
        # Tiles of all stages and what goes into textures are about three times the first tile.
        tiles = _Tiles(ctx, image, self._sizes, int(room / 3 if room > 0 else image.nbytes / 8))
        for first, texture in textures:
            tiles.fill(texture, image[first : first + texture.key.layers])
        return textures


class _Tiles:
    """Makes chains through small buffers of fp32, which carry means unrounded as the generators do.

    A stage makes up to three levels below its first one, a tile at a time: as many whole rows as fit, or a part of one.
    The last of them are texels of the next stage's first. Odd sides ask for a texel more, or a few, which two tiles
    then make alike.
    """

    def __init__(self, ctx: Context, image: torch.Tensor, sizes: Sequence[tuple[int, int]], nbytes: int) -> None:
        self._ctx = ctx
        self._sizes = sizes
        self._channels = image.shape[1]
        self._bytes = min(max(nbytes, TILE_BYTES[0]), TILE_BYTES[1])
        last = len(sizes) - 1
        self._stages = [*range(0, last, LEVELS_AT_ONCE), last]
        """The level that each begins with, and the last."""
        self._together = max(self._bytes // (4 * self._channels * math.prod(sizes[0])), 1)
        self._uploader = Uploader(ctx, min(self._bytes, STAGING_BYTES))
        self._buffers: dict[int, Any] = {}
        self._made: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[list[Planes], list[torch.Tensor]]] = {}

    def fill(self, texture: Sampled, images: torch.Tensor) -> None:
        """All levels of all layers; small images go through the stages together."""
        self._texture = texture
        height, width = self._sizes[-1]
        for layer in range(0, images.shape[0], self._together):
            self._layer, self._images = layer, images[layer : layer + self._together]
            self._uploader.write(self._images, texture, 0, layer=layer)
            if len(self._sizes) > 1:
                self._make(len(self._stages) - 1, (0, height), (0, width), None)

    def _make(self, stage: int, rows: Span, columns: Span, into: torch.Tensor | None) -> None:
        """Texels of the level that a stage begins with, and of the levels above it what they rest on."""
        if stage == 0:
            if into is not None:
                put(self._ctx, into, self._images[:, :, slice(*rows), slice(*columns)])
            return
        top, last = self._stages[stage - 1 : stage + 1]
        texel_bytes = 4 * self._images.shape[0] * self._channels << 2 * (last - top)
        texels = max((self._bytes >> 2 * (stage - 1)) // texel_bytes, 1)
        # Parts of rows are alike.
        across = -(-(columns[1] - columns[0]) // -(-(columns[1] - columns[0]) // texels))
        for row in _steps(rows, max(texels // across, 1)):
            for column in _steps(columns, across):
                tensors, begins = self._tile(stage, row, column)
                if into is not None:
                    y, x = (at[0] - whole[0] for at, whole in ((row, rows), (column, columns)))
                    level = tensors[-1]
                    put(self._ctx, into[:, :, y : y + level.shape[2], x : x + level.shape[3]], level)
                for index, level in enumerate(tensors[1:], start=1):
                    values = level.round() if self._images.dtype == torch.uint8 else level
                    self._uploader.write(values, self._texture, top + index, layer=self._layer, at=begins[index])

    def _tile(self, stage: int, rows: Span, columns: Span) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        """A tile of the level that a stage begins with, and of those of the stage above it: their texels, and which row
        and column they begin with; from the stage's first level on."""
        top, last = self._stages[stage - 1 : stage + 1]
        spans = list(zip(self._spans(0, top, last, rows), self._spans(1, top, last, columns), strict=True))
        heights, widths = (tuple(end - first for first, end in along) for along in zip(*spans, strict=True))
        planes, tensors = self._planes(stage, heights, widths)
        self._make(stage - 1, *spans[0], tensors[0])
        begins = [(row, column) for (row, _), (column, _) in spans]

        def one_level(source: Planes, target: Planes, *_: Any) -> None:
            index = next(i for i, level in enumerate(planes) if level is target)
            part = begins[index], self._sizes[top + index]
            generators.reduce_level(self._ctx, "mean", source, target, part=part)

        several_levels.reduce_chain(self._ctx, planes, "mean", one_level)
        finish(self._ctx)
        return tensors, begins

    def _spans(self, dim: int, top: int, last: int, span: Span) -> list[Span]:
        """Of the levels from `top` on, what a span of rows (dim 0) or columns (1) of the last of them rests on."""
        result = [span]
        for level in range(last, top, -1):
            (first, end), above = result[0], self._sizes[level - 1][dim]
            result.insert(0, (2 * first, above if end == self._sizes[level][dim] else 2 * end + above % 2))
        return result

    def _planes(
        self, stage: int, heights: tuple[int, ...], widths: tuple[int, ...]
    ) -> tuple[list[Planes], list[torch.Tensor]]:
        """Tiles of such sizes of the stage's levels, in its buffer."""
        images = self._images.shape[0]
        key = (stage, (images, *heights), widths)
        found = self._made.get(key)
        if found is None:
            sizes = list(zip(heights, widths, strict=True))
            nbytes = packed_bytes(images, self._channels, sizes, torch.float32)
            lease = self._buffers.get(stage)
            if lease is None or lease.nbytes < nbytes:
                lease = self._buffers[stage] = self._ctx.bridge.lease(nbytes)
            found = self._made[key] = packed_in(lease, images, self._channels, sizes, torch.float32)
        return found


def _steps(span: Span, step: int) -> list[Span]:
    return [(first, min(first + step, span[1])) for first in range(*span, step)]


Source = Pyramid | TextureChain | MemoryChain


def source(
    src: torch.Tensor | Pyramid,
    levels: int | None = None,
    *,
    result_bytes: int,
    backend: Literal["gl", "cuda", "torch"],
) -> Source:
    """What a sampler's shaders or kernels read.

    Of an image it is textures alone on a software renderer, where torch and OpenGL share memory in the midst of a verb.
    Hardware would wait for every band of it, and reads levels in memory. A plan that is recorded repeats OpenGL's work
    alone: there, on a software renderer, it is a pyramid, as it is beyond what storage-buffer bindings hold.

    Args:
        levels: that an image's chain is to have.
        result_bytes: of what the sampler makes.
    """
    if isinstance(src, Pyramid):
        return src
    if backend == "gl":
        ctx = context_for(src)
        if not ctx.software and memory_chain.fits(ctx, src, levels):
            return MemoryChain(src, levels)
        if ctx.software and recording.current() is None and ctx.coherent_with(src):
            return TextureChain(src, levels, result_bytes=result_bytes)
    return mipmap(src, levels, backend=backend)


def run(
    source: Source,
    sample: Callable[[], torch.Tensor],
    reference: Callable[[list[torch.Tensor]], torch.Tensor],
    adjoint: Adjoint | None = None,
) -> torch.Tensor:
    """What a sampler makes of its source, differentiable in the pyramid's levels or the image.

    Args:
        sample: shader or kernel path.
        reference: the same of the levels, in plain torch.
        adjoint: of the samples, to gradients in the levels; None differentiates the reference.
    """
    if adjoint is not None:
        sizes = level_sizes(*source.size, len(source))
        of_levels, of_image = adjoint, lambda x: [image_gradient(adjoint(x), sizes, source.dtype)]
        how = of_levels if isinstance(source, Pyramid) else of_image
        (result,) = linear(lambda *inputs: (sample(),), how, *source.levels)
    elif isinstance(source, Pyramid):
        (result,) = dispatch.with_reference_gradient(
            lambda *levels: (sample(),), lambda *levels: (reference(list(levels)),), *source.levels
        )
    else:
        (result,) = dispatch.with_reference_gradient(
            lambda image: (sample(),), lambda image: (reference(mip_chain(image, len(source))),), source.image
        )
    return result
