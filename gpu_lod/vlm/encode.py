"""encode: from a picture to an encoder's features in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpu_lod import checks
from gpu_lod.allocate import Allocator, TokenBank
from gpu_lod.errors import InputError
from gpu_lod.pyramid import Pyramid
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters import Adapter, Encoded, adapter_for
from gpu_lod.vlm.adapters.base import Layer
from gpu_lod.vlm.saccades import Saccades


def encode(
    model: Any,
    image: torch.Tensor | Pyramid | Sequence[torch.Tensor],
    allocator: Allocator | Saccades,
    *,
    relevance: Any = None,
    query: torch.Tensor | None = None,
    fixation: Any = None,
    labels: Any = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    processor: Any = None,
    layer: Layer = None,
    bias: float = 0.0,
) -> Encoded:
    """Choose tokens, read them, and run an encoder on them, each at its own position.

    With the full grid of level-0 patches as the set, the result is the untouched model's. No encoder was trained on
    coarser or overlapping patches: what they are worth to it is to be measured.

    Shape: image [B, C, H, W] or [C, H, W], or a mean `Pyramid` of one; or a list of pictures [C, H, W] of any sizes,
        which are one batch for the encoder, for each has K tokens. The result: `Encoded`. Of pictures of several sizes
        tokens that are blends have no weights.

    Args:
        model: an encoder, or a model that holds one, of a class that `adapters()` lists, in eval mode; or an `Adapter`.
            Its parameters have gradients as ever: run it under torch.no_grad() where it is frozen.
        allocator: its patch is the encoder's, and twice that for Qwen2.5-VL and Qwen3-VL, whose tokens are 2 x 2
            patches.
        relevance, query, fixation, labels: go to the allocator. With a list of pictures, relevance and labels are lists
            too, and query and fixation are one for all, or one a picture.
        mean, std: a number a channel, of values in [0, 1]; patches are (value - mean) / std. No family has a default:
            without them values stay as they are, and uint8 becomes value / 255.
        processor: an image processor of transformers in their stead, or a processor that holds one: image_mean,
            image_std, and rescale_factor for 0..255. What it does to sizes is not done: pictures keep theirs. Values in
            floating point are in [0, 1] here, where a processor that rescales would divide them by 255 again.
        layer: of the encoder, as for `Adapter`: -2 gives what LLaVA's projector reads. None is its last hidden state.
        bias: of the levels that patches are read at, as for the allocator: -0.5 is sharper.

    Raises:
        InputError: a model without an adapter, or one in a training mode that does something; an allocator that reads
            other patches than the encoder; an image of other channels; what the allocator refuses.
    """
    adapter = model if isinstance(model, Adapter) else adapter_for(model)
    if not isinstance(allocator, (Allocator, Saccades)):
        raise InputError(
            f"allocator is {type(allocator).__name__}; expected an Allocator, as those that gpu_lod.allocate.names() "
            f"lists, or gpu_lod.vlm.Saccades.{_of_lengths(allocator)}"
        )
    what = type(adapter.model).__name__
    if allocator.patch != adapter.patch:
        raise InputError(
            f"the allocator reads patches of {allocator.patch} and {what} takes {adapter.patch}; make it with "
            f"patch={adapter.patch}."
        )
    if processor is not None and (mean is not None or std is not None):
        raise InputError("mean or std and a processor are given; pass one of them.")

    def tokens_of(picture: Any, inputs: Sequence[Any]) -> tuple[TokenSet, tuple[int, int]]:
        picture = picture if isinstance(picture, Pyramid) else checks.image(picture)
        top = picture.levels[0] if isinstance(picture, Pyramid) else picture
        if top.shape[-3] != adapter.channels:
            raise InputError(f"the image has {top.shape[-3]} channels; {what} takes {adapter.channels}.")
        values = mean, std
        if processor is not None:
            values = normalisation(processor, adapter.channels, top.dtype)
        elif mean is None and std is None and top.dtype == torch.uint8:
            values = (0.0,) * adapter.channels, None  # bytes become fractions
        names = ("relevance", "query", "fixation", "labels")
        given = dict(zip(names, inputs, strict=True))
        found = allocator(picture, **given, mean=values[0], std=values[1], bias=bias)
        return found, (top.shape[-2], top.shape[-1])

    if not isinstance(image, (list, tuple)):
        tokens, size = tokens_of(image, (relevance, query, fixation, labels))
        return adapter(tokens, size, layer)
    if not image or not all(hasattr(one, "__dlpack__") and one.ndim == 3 for one in image):
        shapes = (str(tuple(one.shape)) if hasattr(one, "shape") else type(one).__name__ for one in image)
        raise InputError(
            f"the pictures of the list are {', '.join(shapes) or 'none'}; expected tensors [C, H, W], at least one."
        )
    count = len(image)
    each = [
        _one_each(relevance, "relevance", count),
        [query] * count if _shared(query) else _one_each(query, "query", count),
        [fixation] * count if _shared(fixation) else _one_each(fixation, "fixation", count),
        _one_each(labels, "labels", count),
    ]
    found = []
    for index, (picture, *inputs) in enumerate(zip(image, *each, strict=True)):
        try:
            found.append(tokens_of(picture, inputs))
        except InputError as error:
            raise InputError(f"picture {index} of the list, {tuple(picture.shape)}: {error}") from None
    sets = [tokens for tokens, _ in found]
    if len({one.weights.shape for one in sets if one.weights is not None}) > 1:  # of grids of several sizes
        sets = [replace(one, weights=None) for one in sets]
    return adapter(TokenSet.stack(sets), [size for _, size in found], layer)


def _of_lengths(allocator: Any) -> str:
    bank = isinstance(allocator, TokenBank)
    return " A TokenBank gives sets of several lengths: run an Adapter on each of its .unpack()." * bank


def _one_each(values: Any, name: str, count: int) -> Any:
    """One for each picture of a list."""
    if values is None:
        return [None] * count
    several = isinstance(values, (list, tuple, torch.Tensor, np.ndarray)) and getattr(values, "ndim", 1) > 0
    if not several or len(values) != count:
        what = f"{len(values)} of them" if several else checks.shown(values)
        raise InputError(f"{name} is {what}; expected {count}, one for each picture of the list.")
    return values


def _shared(value: Any) -> bool:
    """Whether it is a row of numbers, and not one a picture."""
    if not isinstance(value, (Sequence, torch.Tensor, np.ndarray)) or getattr(value, "ndim", 1) == 0:
        return True
    return not any(isinstance(one, (list, tuple)) or getattr(one, "ndim", 0) for one in value)


def normalisation(
    processor: Any, channels: int, dtype: torch.dtype = torch.uint8
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of values in [0, 1], of an image processor of transformers.

    It computes (byte * rescale_factor - image_mean) / image_std, or leaves out what `do_rescale` and `do_normalize`
    turn off. Pictures in floating point are as they are where it does not rescale.

    Raises:
        InputError: no such processor.
    """
    processor = getattr(processor, "image_processor", processor)
    if not hasattr(processor, "image_mean") or not hasattr(processor, "image_std"):
        raise InputError(
            f"processor is {type(processor).__name__}, without image_mean and image_std. Pass mean= and std= instead."
        )
    means, stds = processor.image_mean, processor.image_std
    if not getattr(processor, "do_normalize", True) or means is None or stds is None:
        means, stds = [0.0] * channels, [1.0] * channels
    if getattr(processor, "do_rescale", True):
        rescale = getattr(processor, "rescale_factor", None)
        unit = 255 * (1 / 255 if rescale is None else checks.number(rescale, "rescale_factor"))
    else:
        unit = 1.0 if dtype.is_floating_point else 255.0
    if not unit:
        raise InputError("rescale_factor is 0, which leaves nothing of a picture. Pass mean= and std= instead.")
    mean, std = (checks.numbers(values, f"image_{name}", channels) for name, values in (("mean", means), ("std", stds)))
    return tuple(value / unit for value in mean), tuple(value / unit for value in std)
