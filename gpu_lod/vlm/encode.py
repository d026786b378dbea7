"""encode: from a picture to an encoder's features in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpu_lod import checks
from gpu_lod.allocate import Allocator
from gpu_lod.errors import InputError
from gpu_lod.pyramid import Pyramid
from gpu_lod.vlm.adapters import Adapter, Encoded, adapter_for
from gpu_lod.vlm.saccades import Saccades


def encode(
    model: Any,
    image: torch.Tensor | Pyramid,
    allocator: Allocator | Saccades,
    *,
    relevance: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    fixation: Any = None,
    labels: torch.Tensor | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    processor: Any = None,
) -> Encoded:
    """Choose tokens, read them, and run a frozen encoder on them, each at its own position.

    With the full grid of level-0 patches as the set, the result is the untouched model's. No encoder was trained on
    coarser or overlapping patches: what they are worth to it is to be measured.

    Shape: image [B, C, H, W] or [C, H, W], or a mean `Pyramid` of one. The result: `Encoded`.

    Args:
        model: an encoder, or a model that holds one, of a class that `adapters()` lists, in eval mode; or an `Adapter`.
        allocator: its patch is the encoder's, and twice that for Qwen2.5-VL and Qwen3-VL, whose tokens are 2 x 2
            patches.
        relevance, query, fixation, labels: go to the allocator.
        mean, std: a number a channel, of values in [0, 1]; patches are (value - mean) / std. No family has a default:
            without them values stay as they are, and uint8 becomes value / 255.
        processor: an image processor of transformers in their stead, or a processor that holds one: image_mean,
            image_std, and rescale_factor for 0..255.

    Raises:
        InputError: a model without an adapter, or one in training mode; an allocator that reads other patches than the
            encoder; an image of other channels; what the allocator refuses.
    """
    adapter = model if isinstance(model, Adapter) else adapter_for(model)
    if not isinstance(allocator, (Allocator, Saccades)):
        raise InputError(
            f"allocator is {type(allocator).__name__}; expected one of gpu_lod.allocate, or gpu_lod.vlm.Saccades."
        )
    what = type(adapter.model).__name__
    if allocator.patch != adapter.patch:
        raise InputError(
            f"the allocator reads patches of {allocator.patch} and {what} takes {adapter.patch}; make it with "
            f"patch={adapter.patch}."
        )
    if not isinstance(image, Pyramid):
        image = checks.image(image)
    top = image.levels[0] if isinstance(image, Pyramid) else image
    if top.shape[-3] != adapter.channels:
        raise InputError(f"the image has {top.shape[-3]} channels; {what} takes {adapter.channels}.")
    if processor is not None:
        if mean is not None or std is not None:
            raise InputError("mean or std and a processor are given; pass one of them.")
        mean, std = normalisation(processor, adapter.channels)
    elif mean is None and std is None and top.dtype == torch.uint8:
        mean = (0.0,) * adapter.channels  # bytes become fractions
    tokens = allocator(image, relevance, query, fixation, labels, mean=mean, std=std)
    return adapter(tokens, (top.shape[-2], top.shape[-1]))


def normalisation(processor: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of values in [0, 1], of an image processor of transformers.

    It computes (byte * rescale_factor - image_mean) / image_std, or leaves out what `do_rescale` and `do_normalize`
    turn off.

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
    rescale = getattr(processor, "rescale_factor", None) if getattr(processor, "do_rescale", True) else 1.0
    unit = 255 * (1 / 255 if rescale is None else checks.number(rescale, "rescale_factor"))
    if not unit:
        raise InputError("rescale_factor is 0, which leaves nothing of a picture. Pass mean= and std= instead.")
    mean, std = (checks.numbers(values, f"image_{name}", channels) for name, values in (("mean", means), ("std", stds)))
    return tuple(value / unit for value in mean), tuple(value / unit for value in std)
