"""Attention maps of vision encoders: what pruning goes by."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.errors import InputError, UnsupportedError


class VisionAttention(NamedTuple):
    """What one layer of a vision encoder computed. T tokens: the patches, after the class token if there is one."""

    attention: torch.Tensor
    """[B, heads, T, T]; rows sum to 1"""
    keys: torch.Tensor
    """[B, T, E], all heads side by side"""
    hidden: torch.Tensor
    """[B, T, D], the layer's output"""


def vision_attention(model: nn.Module, pixel_values: torch.Tensor, layer: int = -2) -> VisionAttention:
    """Attention, keys and output of one layer of a vision model of `transformers`, in one forward pass.

    It sets the model's attention to "eager" for the call, since the fast kernels never form the map, and back again. It
    keeps one layer's map, where `output_attentions=True` holds those of all layers: a gigabyte an image for a large
    tower at 384 pixels.

    Args:
        model: a vision tower whose attention has a `k_proj` and returns its weights, as CLIPVisionModel and
            SiglipVisionModel do; of a model with two towers pass its `vision_model`.
        pixel_values: as the model takes them, [B, 3, H, W].
        layer: from 0, or from the last one backward: -2 is the one that LLaVA takes its features from.

    Raises:
        InputError: a layer that is not there.
        UnsupportedError: a model without such attention.
    """
    names = [name for name, part in model.named_modules() if hasattr(part, "k_proj")]
    if not names or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(
            f"{type(model).__name__} is no transformers model whose attention has a k_proj. Pass CLIPVisionModel, "
            "SiglipVisionModel or one like them, or hand attention maps of your own to the pruners."
        )
    if not isinstance(layer, int) or not -len(names) <= layer < len(names):
        raise InputError(f"layer is {layer!r}; {type(model).__name__} has {len(names)}, from 0 or from -1 backward.")
    part: Any = model.get_submodule(names[layer])
    tower: Any = model
    whole = model.get_submodule(names[layer].rpartition(".")[0])
    found: dict[str, Any] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: found.__setitem__(name, output)

    watched = {"attention": part, "keys": part.k_proj, "hidden": whole}
    hooks = []
    before = tower.config._attn_implementation
    try:
        hooks += [module.register_forward_hook(keep(name)) for name, module in watched.items()]
        tower.set_attn_implementation("eager")
        model(pixel_values=pixel_values)
    finally:
        for hook in hooks:
            hook.remove()
        tower.set_attn_implementation(before)
    weights = found["attention"][1] if isinstance(found["attention"], tuple) else None
    if weights is None:
        raise UnsupportedError(
            f'the attention of {type(model).__name__} returns no weights, with "eager" either. Hand attention maps of '
            "your own to the pruners."
        )
    hidden = found["hidden"][0] if isinstance(found["hidden"], tuple) else found["hidden"]
    return VisionAttention(weights, found["keys"], hidden)


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
