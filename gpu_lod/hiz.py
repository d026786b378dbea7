"""Hierarchical Z: conservative max or min pyramids."""

from __future__ import annotations

import math
from typing import Literal

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.dispatch import Backend, Choice
from gpu_lod.mipmap import choose_generator, empty, make
from gpu_lod.mipmap import reference as mip_chain
from gpu_lod.pyramid import Pyramid, depth, level_sizes

_REDUCES = ("max", "min")
_GENERATORS = ("auto", "compute", "registers", "single-pass", "fragment", "sampler")


@operators.verb
def hiz(
    relevance: torch.Tensor,
    reduce: Literal["max", "min"] = "max",
    generator: Literal["auto", "compute", "registers", "single-pass", "fragment", "sampler"] = "auto",
    backend: Backend = "auto",
) -> Pyramid:
    """A conservative pyramid of a relevance map, down to 1 x 1: no texel is above (below) the texels that cover it.

    Shape: relevance [B, C, H, W] or [C, H, W], any C (a batch of single maps [B, H, W] reads as its B channels).
    Units: any; uint8, float16, bfloat16 or float32, kept exactly. Negative values and infinities are fine.
    Convention: each texel is the max (min) of every texel that its footprint touches: 2 x 2, or 3 along an odd side.
        The canonical ancestor of texel j at level l is min(j >> l, n_l - 1) along each side. A footprint that holds a
        NaN is NaN (torch.amax's rule), the same on every backend and by every generator but "sampler", which refuses
        it: NaN says "unknown", and `cull` never prunes there.

    Args:
        reduce: "max" or "min".
        generator: what makes it on the GL backend: "compute" (one dispatch a level), "registers" (up to three),
            "single-pass" (one for all), "fragment", or "sampler" (the texture unit's min/max filter,
            GL_EXT_texture_filter_minmax; takes no NaN). "auto" takes the one for the device; naming one implies
            backend="gl". The fragment and sampler paths may flush subnormal numbers to zero.
        backend: "gl", "cuda" (one launch, or two or three for large pictures; CUDA tensors only), "torch" or "auto";
            `explain(hiz, relevance)` says why.

    Returns:
        A `Pyramid` with `reduce` set, for `cull` and `region_max`.

    Raises:
        InputError: wrong rank, dtype, an empty side, NaN for the sampler generator.
        UnsupportedError: a generator or backend that is not available.
        LimitError: larger than the device allows.
        CaptureError: inside a CUDA-graph capture, and not called before it; or by OpenGL.

    Source: Greene, Kass and Miller, "Hierarchical Z-Buffer Visibility" (SIGGRAPH 1993).
    """
    relevance = checks.tensor(relevance, "relevance")
    chosen = _choose(relevance, reduce, generator, backend)
    return make(relevance, depth(*relevance.shape[-2:]), reduce, chosen)


def _choose(relevance: torch.Tensor, reduce: str = "max", generator: str = "auto", backend: Backend = "auto") -> Choice:
    relevance = checks.image(relevance, "relevance", max_channels=None)
    checks.choice(reduce, "reduce", _REDUCES)
    checks.choice(generator, "generator", _GENERATORS)
    planes = math.prod(relevance.shape[:-2])
    return choose_generator("hiz", relevance, generator, backend, "", 0, planes)


def _like(relevance: torch.Tensor, reduce: Literal["max", "min"] = "max", *_: str) -> Pyramid:
    """What `hiz` returns, without values."""
    return empty(relevance, level_sizes(*relevance.shape[-2:]), reduce)


dispatch.register(hiz, _choose, cuda=True)
operators.register(hiz, _like)


def reference(relevance: torch.Tensor, reduce: Literal["max", "min"] = "max") -> list[torch.Tensor]:
    """The pyramid in plain torch: a list of levels."""
    return mip_chain(relevance, None, reduce)
