"""Language models that read a token set: Qwen2.5-VL and Qwen3-VL, with M-RoPE by site."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from gpu_lod import checks
from gpu_lod.errors import InputError, LimitError, UnsupportedError
from gpu_lod.vlm.adapters import Encoded, adapter_for
from gpu_lod.vlm.adapters.qwen import Qwen3, Qwen25
from gpu_lod.vlm.positions import mrope_extent, mrope_positions


def inputs_for(
    model: Any,
    input_ids: torch.Tensor,
    encoded: Encoded,
    attention_mask: torch.Tensor | None = None,
    rounded: bool = True,
) -> dict[str, Any]:
    """What the model's `forward` and `generate` take to read encoded tokens in the picture's place.

    Shape: input_ids [B, L], each row with one run of image tokens, of any length: it becomes one of K. attention_mask
        [B, L], 0 for padding.
    Convention: the positions of text, and of the full grid, are the model's own; a token's (t, h, w) is that of its
        site (`mrope_positions`), and text after the picture goes on as after the whole grid. The order of the tokens is
        that of the set.

    Args:
        rounded: whole position ids; else fractional ones, fp32, which the model's rotary embedding takes.

    Returns:
        input_ids and attention_mask [B, L'], position_ids [3, B, L'], and mm_encoder_outputs: the features, with
        deepstack features for Qwen3-VL.

    Raises:
        InputError: a model or features of another family, or not one picture a row.
        LimitError: more tokens than the model has positions for.
        UnsupportedError: a transformers whose models take no features of their towers.
    """
    adapter = adapter_for(model)
    if not isinstance(adapter, (Qwen25, Qwen3)) or not hasattr(model, "generate"):
        raise InputError(
            f"{type(model).__name__} does not generate from token sets; expected Qwen2_5_VLForConditionalGeneration or "
            "Qwen3VLForConditionalGeneration."
        )
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            "the models of this transformers take no features of vision towers (mm_encoder_outputs); 5.18 is the first "
            "whose do. Run in the checkout: pip install '.[vlm]'"
        )
    merged, config = encoded.merged, model.config
    deep = [features if features.ndim == 3 else features[None] for features in encoded.deepstack]
    if merged is None or merged.shape[-1] != config.text_config.hidden_size or len(deep) != len(adapter.deep_layers()):
        raise InputError(
            f"the features are not of the tower of this {type(model).__name__}. Make them with "
            "gpu_lod.vlm.encode(model, image, allocator)."
        )
    merged = merged if merged.ndim == 3 else merged[None]
    ids, mask, start = _with_run(input_ids, attention_mask, config.image_token_id, merged.shape[1])
    if len(ids) != len(merged):
        raise InputError(f"there are {len(ids)} rows of input_ids and {len(merged)} pictures; expected one a row.")
    most = getattr(config.text_config, "max_position_embeddings", None)
    if most is not None and ids.shape[1] > most:
        raise LimitError(
            f"the prompt has {ids.shape[1]} tokens with {merged.shape[1]} of the picture, and the model positions for "
            f"{most}. Use a smaller budget."
        )
    visual = ids == config.image_token_id
    sites = encoded.tokens.sites.reshape(len(merged), -1, 3)
    counted = mask.long().cumsum(1) - 1
    first = counted.gather(1, start[:, None])[:, 0]
    places = mrope_positions(sites, encoded.size, adapter.patch, first, rounded)
    extent = mrope_extent(encoded.size, adapter.patch)
    after = torch.arange(ids.shape[1], device=ids.device) > start[:, None]
    text = torch.where(after, counted - merged.shape[1] + extent, counted).clamp(min=0)
    positions = text.to(places.dtype).expand(3, -1, -1).masked_scatter(visual.expand(3, -1, -1), places)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "mm_encoder_outputs": {"image": _output(model, merged, deep)},
    }


def generate(
    model: Any,
    input_ids: torch.Tensor,
    encoded: Encoded,
    attention_mask: torch.Tensor | None = None,
    rounded: bool = True,
    **options: Any,
) -> torch.Tensor:
    """`model.generate` from encoded tokens: `inputs_for`, and the options of transformers, as max_new_tokens.

    Shape: [B, L' + new tokens], the prompt first, with its run of K image tokens.
    """
    found: torch.Tensor = model.generate(**inputs_for(model, input_ids, encoded, attention_mask, rounded), **options)
    return found


def _with_run(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, image: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row with `count` image tokens in the place of its run: ids, mask, and where the runs begin."""
    input_ids = checks.dense(input_ids, "input_ids")
    if input_ids.ndim != 2 or input_ids.is_floating_point():
        raise InputError(f"input_ids are {input_ids.dtype} {tuple(input_ids.shape)}; expected integers [B, L].")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise InputError(f"attention_mask is {tuple(mask.shape)}; expected {tuple(input_ids.shape)}, as input_ids.")
    rows = []
    for ids, kept in zip(input_ids, mask, strict=True):
        places = (ids == image).nonzero()[:, 0]
        if not len(places) or int(places[-1] - places[0]) + 1 != len(places):
            raise InputError(
                f"a row of input_ids has {len(places)} image tokens ({image}), not in one run; expected one picture a "
                "row, as a processor writes it."
            )
        begin, end = int(places[0]), int(places[-1]) + 1
        run = ids.new_full((count,), image)
        rows.append(
            (
                torch.cat([ids[:begin], run, ids[end:]]),
                torch.cat([kept[:begin], kept[begin].expand(count), kept[end:]]),
                begin,
            )
        )
    if len({len(ids) for ids, _, _ in rows}) > 1:
        raise InputError("the rows have runs of image tokens of different lengths. Pad them with equal runs.")
    starts = torch.tensor([begin for _, _, begin in rows], device=input_ids.device)
    return torch.stack([ids for ids, _, _ in rows]), torch.stack([kept for _, kept, _ in rows]), starts


def _output(model: Any, merged: torch.Tensor, deep: list[torch.Tensor]) -> Any:
    """Features as the model's own tower hands them over: a tensor a picture."""
    module: Any = sys.modules[type(model).__module__]
    if not deep:
        return module.BaseModelOutputWithPooling(pooler_output=tuple(merged))
    return module.BaseModelOutputWithDeepstackFeatures(
        pooler_output=tuple(merged), deepstack_features=[tuple(features) for features in deep]
    )
