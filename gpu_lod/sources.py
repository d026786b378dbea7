"""What samplers read: pyramids, or images, whose chain is made for one call; and the gradients of what is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from gpu_lod import dispatch, memory_chain, recording
from gpu_lod.adjoints import Adjoint, linear
from gpu_lod.context import context_for
from gpu_lod.memory_chain import MemoryChain
from gpu_lod.mipmap import image_gradient, mipmap
from gpu_lod.pyramid import Pyramid, level_sizes

MANY = 0.25
"""Of an image, samples of which a software renderer makes a texture first: it fetches a texel's channels at once."""

SAMPLE = 8
"""Texels of an image whose chain takes about as long as a sample of it."""

FEW = 0.125
"""Of an image, samples to which its chain takes longer than they do."""

AN_IMAGE, MANY_SAMPLES, BY_TEXTURE = "an image", "an image, many samples", "an image, by texture"
"""States of a source whose chain is made for one call."""

MOST = 1.8, 1.0
"""Memory beside the image and the result, in images and in results: a texture is made where there is room for it."""

Source = Pyramid | MemoryChain


def asked(src: torch.Tensor | Pyramid, samples: int, result_bytes: int, state: str = "") -> dict[str, Any]:
    """What the times of a sampler depend on, for `dispatch.measured`.

    Args:
        samples, result_bytes: as of `source`.
        state: what they depend on beside sizes and the source.
    """
    image = src.levels[0] if isinstance(src, Pyramid) else src
    known = {
        "adjoint": True,
        "channels": image.shape[-3],
        "batch": image.shape[0] if image.ndim == 4 else 1,
        "context": src.texture_context() if isinstance(src, Pyramid) else None,
    }
    if isinstance(src, Pyramid) or dispatch.by_kernels(image):  # a pyramid is made first for these
        there = isinstance(src, Pyramid) and src.is_texture
        return {"state": dispatch.textured(there, state), "work": samples, **known}
    texels = image.numel() // image.shape[-3]
    how = AN_IMAGE if samples < FEW * texels else MANY_SAMPLES
    if _texture_pays(image, samples, result_bytes):
        how = BY_TEXTURE
    return {"state": how, "work": texels + SAMPLE * samples, **known}


def source(
    src: torch.Tensor | Pyramid,
    levels: int | None = None,
    *,
    samples: int,
    result_bytes: int,
    backend: Literal["gl", "cuda", "torch"],
) -> Source:
    """What a sampler's shaders or kernels read.

    Of an image it is a chain in memory, unless that is more than buffers hold. A software renderer makes a pyramid of
    it, and a texture of that, where samples are many and memory allows it.

    Args:
        levels: that an image's chain is to have.
        samples: of all images.
        result_bytes: of what the sampler makes of them.
    """
    if isinstance(src, Pyramid):
        return src
    if backend == "gl":
        ctx = context_for(src)
        if memory_chain.fits(ctx, src, levels) and not (ctx.software and _texture_pays(src, samples, result_bytes)):
            return MemoryChain(src, levels)
    return mipmap(src, levels, backend=backend)


def _texture_pays(image: torch.Tensor, samples: int, result_bytes: int) -> bool:
    if samples * image.shape[-3] < MANY * image.numel():
        return False
    height, width = image.shape[-2:]
    # In images: RGB lies in RGBA; and of odd sides chains of small dtypes carry two levels unrounded, in fp32.
    texture = 16 / 9 if image.shape[-3] == 3 else 4 / 3
    odd = image.dtype.itemsize < 4 and (height % 8 or width % 8)
    chain = 1 / 3 + (0.4 * 4 / image.dtype.itemsize if odd else 0.2)
    copied = not image.is_contiguous() or image.is_neg() or recording.current() is not None
    room = MOST[0] * image.nbytes + MOST[1] * result_bytes
    return room >= (texture + chain + copied) * image.nbytes


def run(source: Source, sample: Callable[[], torch.Tensor], adjoint: Adjoint) -> torch.Tensor:
    """What a sampler makes of its source, differentiable in the pyramid's levels or the image.

    Args:
        sample: shader or kernel path.
        adjoint: of the samples, to gradients in the levels.
    """
    sizes, dtype = level_sizes(*source.size, len(source)), source.dtype

    def of_image(gradient: torch.Tensor) -> list[torch.Tensor | None]:
        return [image_gradient(adjoint(gradient), sizes, dtype)]

    (result,) = linear(lambda *_: [sample()], adjoint if isinstance(source, Pyramid) else of_image, *source.levels)
    return result
