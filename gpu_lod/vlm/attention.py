"""Attention maps of vision encoders: what pruning goes by."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters import adapter_for


class VisionAttention(NamedTuple):
    """What one layer of a vision encoder computed. T tokens: the patches, after the class token if there is one."""

    attention: torch.Tensor
    """[B, heads, T, T]; rows sum to 1"""
    keys: torch.Tensor
    """[B, T, E], all heads side by side"""
    hidden: torch.Tensor
    """[B, T, D], the layer's output"""


torch.serialization.add_safe_globals([VisionAttention])  # torch.load's weights_only


def vision_attention(
    model: nn.Module, pixel_values: torch.Tensor | TokenSet, layer: int = -2, size: Any = None, **inputs: Any
) -> VisionAttention:
    """Attention, keys and output of one layer of a vision model of `transformers`, in one forward pass.

    It sets the model's attention to "eager" for the call, since the fast kernels never form the map, and back again. It
    keeps one layer's map, where `output_attentions=True` holds those of all layers: a gigabyte an image for a large
    tower at 384 pixels. CLIP and its like have a class token before the patches: `attention_received(..., prefix=1)`.

    Args:
        model: a vision tower whose attention has a `k_proj` and returns its weights, as CLIPVisionModel and
            SiglipVisionModel do; of a model with two towers its `vision_model` is taken.
        pixel_values: as the model takes them, [B, 3, H, W], normalised and of its native size, as 224 x 224. Or tokens
            that an allocator read, [B, K]: T is then the prefix of `Encoded` and these, in their order.
        layer: from 0, or from the last one backward: -2 is the one that LLaVA takes its features from.
        size: of the pictures that tokens are of, as an `Adapter` takes it.
        inputs: what else its forward takes: `interpolate_pos_encoding=True` for pictures of another size; of
            Siglip2VisionModel, `pixel_attention_mask` and `spatial_shapes`. Padding is among the tokens then.

    Raises:
        InputError: a layer that is not there, pixels or tokens that do not fit the model, or an input that is missing.
        UnsupportedError: a model without such attention, or one that reads text too and has no `vision_model`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {checks.shown(model)}; expected a vision tower of transformers.")
    tokens = pixel_values if isinstance(pixel_values, TokenSet) else None
    if (tokens is None) is not (size is None) or (tokens is not None and inputs):
        raise InputError(
            "pixel_values go without size, and tokens with size and nothing else; expected (H, W), or one a picture."
        )
    run: Callable[[], Any] | None = None if tokens is None else partial(adapter_for(model), tokens, size)
    if "input_ids" in inspect.signature(model.forward).parameters:
        model = _tower(model)
    names = _layers(model)
    if not names or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(
            f"{type(model).__name__} is no transformers model whose attention has a k_proj. Pass CLIPVisionModel, "
            "SiglipVisionModel or one like them, or hand attention maps of your own to the pruners."
        )
    if not isinstance(layer, int) or isinstance(layer, bool) or not -len(names) <= layer < len(names):
        raise InputError(f"layer is {layer!r}; {type(model).__name__} has {len(names)}, from 0 or from -1 backward.")
    if run is None:
        _fit(model, pixel_values, inputs)
        run = partial(model, pixel_values=pixel_values, **inputs)
    part: Any = model.get_submodule(names[layer])
    tower: Any = model
    whole = model.get_submodule(names[layer].rpartition(".")[0])
    found: dict[str, list[torch.Tensor | None]] = {"attention": [], "keys": [], "hidden": []}

    def keep(name: str) -> Any:
        """What it gives each time: an adapter may run pictures of several sizes one by one."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if name == "attention":
                output = output[1] if isinstance(output, tuple) else None
            found[name].append(output[0] if isinstance(output, tuple) else output)

        return hook

    watched = {"attention": part, "keys": part.k_proj, "hidden": whole}
    hooks = []
    before = tower.config._attn_implementation
    try:
        hooks += [module.register_forward_hook(keep(name)) for name, module in watched.items()]
        tower.set_attn_implementation("eager")
        run()
    finally:
        for hook in hooks:
            hook.remove()
        tower.set_attn_implementation(before)
    if any(one is None for one in found["attention"]):
        raise UnsupportedError(
            f'the attention of {type(model).__name__} returns no weights, with "eager" either. Hand attention maps of '
            "your own to the pruners."
        )
    return VisionAttention(*(_together([one for one in each if one is not None]) for each in found.values()))


def _together(each: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(each) if len(each) > 1 else each[0]


def _layers(model: nn.Module) -> list[str]:
    """The names of the attention of each layer: a head that pools by attention is none."""
    names = [name for name, part in model.named_modules() if hasattr(part, "k_proj")]
    kinds = [re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in names]
    layered = Counter(kind for kind in kinds if "#" in kind)
    if not layered:
        return names
    kind, _ = layered.most_common(1)[0]
    return [name for name, its in zip(names, kinds, strict=True) if its == kind]


def _tower(model: Any) -> nn.Module:
    """The vision tower of a model that reads text too."""
    tower = getattr(model, "vision_model", None)
    if not isinstance(tower, nn.Module) or not hasattr(tower, "set_attn_implementation"):
        raise UnsupportedError(
            f"{type(model).__name__} reads text too, and has no vision_model. Pass its vision tower alone, as "
            "model.model.vision_tower is one of LLaVA's."
        )
    return tower


def _fit(model: Any, pixels: Any, inputs: dict[str, Any]) -> None:
    """Raises what the model would, in words of its own."""
    name = type(model).__name__
    if not isinstance(pixels, torch.Tensor) or not pixels.is_floating_point():
        what = str(pixels.dtype) if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        raise InputError(
            f"pixel_values is {what}; expected a tensor of floats [B, 3, H, W], whole pictures: not tokens. Resize the "
            f"pictures to what {name} reads and normalise them, as its processor does."
        )
    takes = inspect.signature(model.forward).parameters
    missing = [
        key
        for key, one in takes.items()
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and key not in ("pixel_values", *inputs)
    ]
    if missing:
        raise InputError(
            f"{name} reads {' and '.join(missing)} beside pixel_values. Pass them by name, as its processor gives them."
        )
    config = getattr(model.config, "vision_config", model.config)
    side = getattr(config, "image_size", None)
    if "interpolate_pos_encoding" not in takes or side is None:
        return
    height, width = (side, side) if isinstance(side, int) else side
    channels, shape = getattr(config, "num_channels", 3), tuple(pixels.shape)
    free = bool(inputs.get("interpolate_pos_encoding"))
    if len(shape) != 4 or shape[1] != channels or not (free or shape[2:] == (height, width)):
        raise InputError(
            f"pixel_values are {shape}; {name} reads [B, {channels}, {height}, {width}]. Resize the pictures, or pass "
            "interpolate_pos_encoding=True, which has the model interpolate its positions for another size."
        )


def attention_received(attention: torch.Tensor, prefix: int = 0) -> torch.Tensor:
    """How much each patch is attended to: by the class token where there is one, else on average by all patches.

    Shape: attention [B, heads, T, T], or [B, T, T], rows the ones that look; gives [B, T - prefix].

    Args:
        prefix: tokens before the patches, the first of which is the class token; 0 is none.

    Raises:
        InputError: another shape, or a prefix that leaves no patch.

    Source: Yang et al., "VisionZip" (2025), sections 3.2 and 3.4.
    """
    values = checks.tensor(attention, "attention")
    prefix = checks.integer(prefix, "prefix", at_least=0)
    if values.ndim not in (3, 4) or values.shape[-1] != values.shape[-2] or values.shape[-1] <= prefix:
        raise InputError(f"attention is {tuple(values.shape)}; expected [B, heads, T, T] with T above {prefix}.")
    heads = values.float() if values.ndim == 4 else values.float()[:, None]
    looks = heads[:, :, :1] if prefix else heads
    return looks.mean((1, 2))[:, prefix:]
