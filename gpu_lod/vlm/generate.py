"""Language models that read token sets: Qwen2.5-VL and Qwen3-VL, with M-RoPE by site, and LLaVA."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpu_lod import checks
from gpu_lod.errors import InputError, LimitError, UnsupportedError
from gpu_lod.vlm.adapters import Encoded, adapter_for
from gpu_lod.vlm.adapters.qwen import Qwen3, Qwen25
from gpu_lod.vlm.positions import mrope_extent, mrope_positions


def inputs_for(
    model: Any,
    input_ids: torch.Tensor,
    encoded: Encoded | Sequence[Encoded],
    attention_mask: torch.Tensor | None = None,
    rounded: bool = True,
    labels: torch.Tensor | None = None,
) -> dict[str, Any]:
    """What the model's `forward` and `generate` take to read encoded tokens in the place of pictures.

    Shape: input_ids [B, L], with a run of image tokens for each picture, of any length: it becomes one of K, and rows
        grow to a common length L'. attention_mask [B, L], 0 for padding. labels [B, L].
    Convention: pictures are in the order of reading, row by row; a row may have several, or none. The positions of
        text, and of the full grid, are the model's own; a token's (t, h, w) is that of its site (`mrope_positions`),
        and text after the picture goes on as after the whole grid. LLaVA counts its tokens as it does words. The order
        of the tokens is that of the set. Rows are padded on the side where they were padded, or on the left.

    Args:
        encoded: of all pictures in one, or a list of them, such as those of other budgets.
        rounded: whole position ids; else fractional ones, fp32, which the model's rotary embedding takes.
        labels: for training: [B, L'] with -100 for pictures and padding.

    Returns:
        input_ids and attention_mask [B, L'], and mm_encoder_outputs: the features, with deepstack features for
        Qwen3-VL, if there are pictures; position_ids [3, B, L'] for Qwen; labels, if there are any.

    Raises:
        InputError: a model or features of another family, or not one run for each picture.
        LimitError: more tokens than the model has positions for.
        UnsupportedError: a transformers whose models take no features of their towers.
    """
    name = type(model).__name__
    if name not in _GENERATE or not hasattr(model, "generate"):
        raise InputError(
            f"{name} does not generate from token sets; expected one of {', '.join(_GENERATE)}. For another, encode "
            "with its vision tower, project the features as it does, and put them into inputs_embeds."
        )
    checks.flag(rounded, "rounded")
    adapter = adapter_for(model)
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            "the models of this transformers take no features of vision towers (mm_encoder_outputs); 5.18 is the first "
            "whose do. Run in the checkout: pip install '.[vlm]'"
        )
    pictures = _pictures(model, encoded, len(adapter.deep_layers()) if isinstance(adapter, (Qwen25, Qwen3)) else 0)
    config = model.config
    image = config.image_token_id
    rows = _with_runs(input_ids, attention_mask, labels, image, [len(one.merged) for one in pictures])
    pad = getattr(config.text_config, "pad_token_id", None)
    ids, mask, told = _padded(rows, int(image == 0) if pad is None or pad == image else pad)
    most = getattr(config.text_config, "max_position_embeddings", None)
    if most is not None and ids.shape[1] > most:
        raise LimitError(
            f"the prompt has {ids.shape[1]} tokens with {sum(len(one.merged) for one in pictures)} of pictures, and "
            f"the model positions for {most}. Use a smaller budget."
        )
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if pictures:
        found["mm_encoder_outputs"] = {"image": _output(model, pictures)}
    if isinstance(adapter, (Qwen25, Qwen3)):
        found["position_ids"] = _mrope(pictures, ids == image, mask, adapter.patch, rounded)
    if labels is not None:
        found["labels"] = told
    return found


def generate(
    model: Any,
    input_ids: torch.Tensor,
    encoded: Encoded | Sequence[Encoded],
    attention_mask: torch.Tensor | None = None,
    rounded: bool = True,
    **options: Any,
) -> torch.Tensor:
    """`model.generate` from encoded tokens: `inputs_for`, and the options of transformers, as max_new_tokens.

    Shape: [B, L' + new tokens], the prompt first, with its runs of K image tokens.
    """
    if own := {"position_ids", "labels", "mm_encoder_outputs", "pixel_values", "inputs_embeds"} & set(options):
        raise InputError(f"{', '.join(sorted(own))} is given, which is made of the encoded tokens here. Leave it out.")
    inputs = inputs_for(model, input_ids, encoded, attention_mask, rounded)
    found: torch.Tensor = model.generate(**inputs, **options)
    return found


_GENERATE = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "LlavaForConditionalGeneration")


class _Picture(NamedTuple):
    merged: torch.Tensor
    """[K, E]"""
    deepstack: tuple[torch.Tensor, ...]
    sites: torch.Tensor
    size: tuple[int, int]


def _pictures(model: Any, encoded: Any, deep: int) -> list[_Picture]:
    """Each picture by itself, in the order of reading."""
    found = []
    each = list(encoded) if isinstance(encoded, (list, tuple)) else [encoded]
    for one in each:
        if not isinstance(one, Encoded):
            raise InputError(
                f"encoded is {checks.shown(one)}; expected what gpu_lod.vlm.encode(model, image, allocator) gives."
            )
        merged = one.merged
        width = model.config.text_config.hidden_size
        if merged is None or merged.shape[-1] != width or len(one.deepstack) != deep:
            raise InputError(
                f"the features are not of the tower of this {type(model).__name__}. Make them with "
                "gpu_lod.vlm.encode(model, image, allocator)."
            )
        single = merged.ndim == 2
        for index, size in enumerate(one.sizes):
            own = [t if single else t[index] for t in (merged, one.tokens.sites, *one.deepstack)]
            found.append(_Picture(own[0], tuple(own[2:]), own[1], size))
    return found


class _Row(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


def _with_runs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    labels: torch.Tensor | None,
    image: int,
    counts: list[int],
) -> list[_Row]:
    """Each row with as many image tokens in the place of its runs as there are of their pictures."""
    input_ids = checks.dense(input_ids, "input_ids")
    if input_ids.ndim != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise InputError(f"input_ids are {input_ids.dtype} {tuple(input_ids.shape)}; expected integers [B, L].")
    mask = torch.ones_like(input_ids) if attention_mask is None else checks.dense(attention_mask, "attention_mask")
    labels = None if labels is None else checks.dense(labels, "labels")
    for name, values in (("attention_mask", mask), ("labels", input_ids if labels is None else labels)):
        if values.shape != input_ids.shape:
            raise InputError(f"{name} is {tuple(values.shape)}; expected {tuple(input_ids.shape)}, as input_ids.")
    marked = torch.nn.functional.pad((input_ids == image).int(), (1, 1))
    begins, ends = ((marked.diff(dim=1) == sign).nonzero().tolist() for sign in (1, -1))
    if len(begins) != len(counts):
        raise InputError(
            f"input_ids have {len(begins)} runs of image tokens ({image}) and there are {len(counts)} pictures; "
            "expected a run for each, row by row, as a processor writes it, with another token between two."
        )
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for (row, begin), (_, end), count in zip(begins, ends, counts, strict=True):
        runs.setdefault(row, []).append((begin, end, count))
    told = input_ids if labels is None else labels
    rows = []
    for row, own in enumerate(zip(input_ids, mask, told, strict=True)):
        ids, kept, known = own
        parts, done = [], 0
        for begin, end, count in runs.get(row, []):
            parts.append([one[done:begin] for one in own])
            parts.append([ids.new_full((count,), image), kept[begin].expand(count), known.new_full((count,), _IGNORED)])
            done = end
        parts.append([one[done:] for one in own])
        rows.append(_Row(*(torch.cat(values) for values in zip(*parts, strict=True))))
    return rows


_IGNORED = -100
"""Label of what no loss looks at."""


def _padded(rows: list[_Row], pad: int) -> _Row:
    """[B, L'] of rows of several lengths."""
    longest = max(len(row.ids) for row in rows)
    right = any(not row.mask[-1] for row in rows) and all(row.mask[0] for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        each = [getattr(row, name) for row in rows]
        more = [longest - len(one) for one in each]
        return torch.stack(
            [
                torch.nn.functional.pad(one, (0, n) if right else (n, 0), value=value)
                for one, n in zip(each, more, strict=True)
            ]
        )

    return _Row(padded("ids", pad), padded("mask", 0), padded("labels", _IGNORED))


def _mrope(
    pictures: list[_Picture], visual: torch.Tensor, mask: torch.Tensor, patch: int, rounded: bool
) -> torch.Tensor:
    """[3, B, L']: text by its count, tokens by their sites, and text behind a picture as behind the whole of it."""
    text = mask.long().cumsum(1) - 1
    found = text.clamp(min=0).expand(3, -1, -1).to(torch.long if rounded else torch.float32).clone()
    marked = torch.nn.functional.pad(visual.int(), (1, 0)).diff(dim=1)
    for one, (row, begin) in zip(pictures, (marked == 1).nonzero().tolist(), strict=True):
        end = begin + len(one.merged)
        places = mrope_positions(one.sites, one.size, patch, text[row, begin], rounded)
        text[row, end:] += mrope_extent(one.size, patch) - len(one.merged)
        found[:, row, begin:end] = places.to(found)
        found[:, row, end:] = text[row, end:].clamp(min=0).to(found)
    return found


def _output(model: Any, pictures: list[_Picture]) -> Any:
    """Features as the model's own tower hands them over: a tensor a picture."""
    module: Any = sys.modules[type(model).__module__]
    merged = tuple(one.merged for one in pictures)
    deep = list(zip(*(one.deepstack for one in pictures), strict=True))
    if not deep:
        return module.BaseModelOutputWithPooling(pooler_output=merged)
    return module.BaseModelOutputWithDeepstackFeatures(pooler_output=merged, deepstack_features=deep)
