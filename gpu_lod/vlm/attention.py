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
from gpu_lod.shapes import summary
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters import adapter_for
from gpu_lod.vlm.adapters.qwen import Qwen3, Qwen25


class VisionAttention(NamedTuple):
    """What one layer of a vision encoder computed. T tokens: the patches, after the class token if there is one. Of
    Qwen's towers the four patches of each token lie side by side, T = 4 K."""

    attention: torch.Tensor
    """[B, heads, T, T]; rows sum to 1"""
    keys: torch.Tensor
    """[B, T, E], all heads side by side, before rotary positions"""
    hidden: torch.Tensor
    """[B, T, D], the layer's output"""

    def __repr__(self) -> str:
        return summary(self)


torch.serialization.add_safe_globals([VisionAttention])  # torch.load's weights_only


def vision_attention(
    model: nn.Module, pixel_values: torch.Tensor | TokenSet, layer: int = -2, size: Any = None, **inputs: Any
) -> VisionAttention:
    """Attention, keys and output of one layer of a vision model of `transformers` or `timm`, in one forward pass.

    The fast kernels never form the map. So models of transformers have their attention set to "eager" for the call, and
    back again, and the layer alone of timm's and Qwen's computes its map beside. It keeps one layer's map, where
    `output_attentions=True` holds those of all layers: a gigabyte an image for a large tower at 384 pixels. CLIP and
    its like have a class token before the patches: `attention_received(..., prefix=1)`; of timm's it is
    `prefix=model.num_prefix_tokens`.

    Most layers of Qwen2.5-VL attend in windows: take one of `fullatt_block_indexes` of its tower, the last as a rule.

    Args:
        model: a vision tower of transformers whose attention has a `k_proj` and returns its weights, as CLIPVisionModel
            and SiglipVisionModel do; of a model with two towers its `vision_model` is taken. timm's VisionTransformer
            or Eva. Or Qwen2.5-VL or Qwen3-VL, their towers or all of them, for tokens.
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
        raise InputError(f"model is {checks.shown(model)}; expected a vision tower of transformers or timm.")
    tokens = pixel_values if isinstance(pixel_values, TokenSet) else None
    if (tokens is None) is not (size is None) or (tokens is not None and inputs):
        raise InputError(
            "pixel_values go without size, and tokens with size and nothing else; expected (H, W), or one a picture."
        )
    run: Callable[[], Any] | None = None
    if tokens is not None:
        adapter = adapter_for(model)
        if isinstance(adapter, (Qwen25, Qwen3)):
            index = _index(layer, len(adapter.tower.blocks), model)
            return VisionAttention(*adapter.attention(tokens, size, index))
        run = partial(adapter, tokens, size)
    if names := _fused_layers(model):
        kept = _of_fused(model, names[_index(layer, len(names), model)], run, pixel_values, inputs)
    else:
        kept = _of_transformers(model, layer, run, pixel_values, inputs)
    return VisionAttention(*map(_together, kept))


Kept = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""Attention, keys and output of a layer each time that it ran: an adapter may run pictures of several sizes one by
one."""


def _of_transformers(
    model: nn.Module, layer: int, run: Callable[[], Any] | None, pixels: Any, inputs: dict[str, Any]
) -> Kept:
    if "input_ids" in inspect.signature(model.forward).parameters:
        model = _tower(model)
    names = _layers(model)
    if not names or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(
            f"{type(model).__name__} is no transformers model whose attention has a k_proj, and no ViT of timm. Pass "
            "CLIPVisionModel, SiglipVisionModel or one like them (Qwen's towers with tokens), or hand attention maps "
            "of your own to the pruners."
        )
    name = names[_index(layer, len(names), model)]
    if run is None:
        _fit(model, pixels, inputs)
        run = partial(model, pixel_values=pixels, **inputs)
    part: Any = model.get_submodule(name)
    tower: Any = model
    found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found[0].append(output[1] if isinstance(output, tuple) else None)

    before = tower.config._attn_implementation
    hooks = []
    try:
        hooks.append(part.register_forward_hook(keep))
        hooks.append(part.k_proj.register_forward_hook(_output(found[1])))
        hooks.append(model.get_submodule(name.rpartition(".")[0]).register_forward_hook(_output(found[2])))
        tower.set_attn_implementation("eager")
        run()
    finally:
        for hook in hooks:
            hook.remove()
        tower.set_attn_implementation(before)
    if any(one is None for one in found[0]):
        raise UnsupportedError(
            f'the attention of {type(model).__name__} returns no weights, with "eager" either. Hand attention maps of '
            "your own to the pruners."
        )
    return found


def _of_fused(model: nn.Module, name: str, run: Callable[[], Any] | None, pixels: Any, inputs: dict[str, Any]) -> Kept:
    if run is None:
        run = partial(model, _fits_timm(model, pixels), **inputs)
    part: Any = model.get_submodule(name)
    found: Kept = ([], [], [])

    def keep_keys(module: Any, inputs: Any) -> None:
        x = inputs[0]
        if module.qkv is None:
            found[1].append(module.k_proj(x))
            return
        keys = module.qkv(x).chunk(3, dim=-1)[1]  # once more: with a q_bias the module itself is not called
        found[1].append(keys if getattr(module, "q_bias", None) is None else keys + module.k_bias)

    before = part.fused_attn
    hooks = []
    try:
        hooks.append(part.attn_drop.register_forward_pre_hook(lambda module, inputs: found[0].append(inputs[0])))
        hooks.append(part.register_forward_pre_hook(keep_keys))
        hooks.append(model.get_submodule(name.rpartition(".")[0]).register_forward_hook(_output(found[2])))
        part.fused_attn = False
        run()
    finally:
        for hook in hooks:
            hook.remove()
        part.fused_attn = before
    return found


def _output(found: list[torch.Tensor]) -> Any:
    """A hook that keeps what a module gives each time."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    return keep


def _index(layer: Any, count: int, model: nn.Module) -> int:
    """From the front."""
    if not isinstance(layer, int) or isinstance(layer, bool) or not -count <= layer < count:
        raise InputError(f"layer is {layer!r}; {type(model).__name__} has {count}, from 0 or from -1 backward.")
    return layer % count


def _fused_layers(model: nn.Module) -> list[str]:
    """The names of the attention of each block of a ViT of timm; none of any other model."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.Sequential, nn.ModuleList)):
        return []
    parts = [getattr(block, "attn", None) for block in blocks]
    if not all(all(hasattr(part, name) for name in ("fused_attn", "attn_drop", "qkv")) for part in parts):
        return []
    return [f"blocks.{index}.attn" for index in range(len(parts))]


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
    if what := _no_floats(pixels):
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


def _no_floats(pixels: Any) -> str:
    """What they are, if no tensor of floats."""
    if not isinstance(pixels, torch.Tensor):
        return type(pixels).__name__
    return "" if pixels.is_floating_point() else str(pixels.dtype)


def _fits_timm(model: Any, pixels: Any) -> torch.Tensor:
    """Raises what the model would, in words of its own."""
    what = type(model).__name__
    stem = model.patch_embed
    height, width = getattr(stem, "img_size", None) or (0, 0)
    channels = getattr(getattr(stem, "proj", None), "in_channels", 3)
    if kind := _no_floats(pixels):
        raise InputError(f"pixel_values is {kind}; expected a tensor of floats [B, {channels}, H, W], normalised.")
    shape = tuple(pixels.shape)
    free = not height or bool(getattr(model, "dynamic_img_size", False))
    if len(shape) != 4 or shape[1] != channels or not (free or shape[2:] == (height, width)):
        sides = "H, W" if free else f"{height}, {width}"
        raise InputError(
            f"pixel_values are {shape}; {what} reads [B, {channels}, {sides}]. Resize the pictures, or make it with "
            "dynamic_img_size=True."
        )
    return pixels


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
