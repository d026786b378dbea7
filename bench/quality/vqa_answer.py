"""Qwen2.5-VL and Qwen3-VL answer questions about pictures from the tokens of an allocator.

result = evaluate(model, processor, load("docvqa", limit=100), "FoveatedPyramid", metric="anls", budget=273)
result.mean, result.answers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

import gpu_lod as lod
from gpu_lod import checks
from gpu_lod.allocate import Allocator, make
from gpu_lod.errors import InputError
from gpu_lod.vlm import Saccades
from quality.vqa import Sample
from quality.vqa_metrics import METRICS, Metric

SHORT = "\nAnswer the question using a single word or phrase."
"""What lmms-eval puts after the questions of all three data sets."""
Hints = Mapping[str, Any]
"""What `lod.vlm.encode` takes for an allocator beside the picture: relevance, query, fixation, labels."""


@dataclass(frozen=True)
class Answer:
    id: str
    question: str
    text: str
    """What the model answered."""
    answers: tuple[str, ...]
    """What people did."""
    score: float


@dataclass(frozen=True)
class Evaluation:
    metric: str
    mean: float
    answers: tuple[Answer, ...]


def evaluate(
    model: Any,
    processor: Any,
    samples: Iterable[Sample],
    allocator: str | Allocator | Saccades,
    *,
    metric: str | Metric,
    budget: int | None = None,
    batch_size: int = 1,
    hints: Callable[[Sample], Hints] | None = None,
    after: str = SHORT,
    **options: Any,
) -> Evaluation:
    """Let a model answer, and score its answers.

    Args:
        model, processor, allocator, budget: as `Answerer` takes them.
        metric: a name in `METRICS`, that of the data set (`DATASETS[name].metric`), or a function.
        batch_size: questions in one batch, whatever the sizes of their pictures; it changes no answer but by rounding.
        hints: what the allocator gets to know of a sample, beside its picture.
        after: goes behind each question.
        options: `Answerer.answer`'s, max_new_tokens too.

    Raises:
        InputError: no samples, and what `Answerer` refuses.
    """
    checks.integer(batch_size, "batch_size", at_least=1)
    if isinstance(metric, str):
        name, score = metric, METRICS[checks.choice(metric, "metric", tuple(METRICS))]
    else:
        name, score = getattr(metric, "__name__", type(metric).__name__), metric
    answerer = Answerer(model, processor, allocator, budget)
    remaining, answers = iter(samples), []
    while batch := list(islice(remaining, batch_size)):
        texts = answerer.answer(
            [one.image for one in batch],
            [one.question + after for one in batch],
            None if hints is None else [hints(one) for one in batch],
            **options,
        )
        answers += [
            Answer(one.id, one.question, text, one.answers, score(text, one.answers))
            for one, text in zip(batch, texts, strict=True)
        ]
    if not answers:
        raise InputError("there are no samples to answer; expected one at least.")
    return Evaluation(name, math.fsum(one.score for one in answers) / len(answers), tuple(answers))


class Answerer:
    """A model that reads K tokens of each picture, and its processor, which writes the prompt.

    A picture of fewer patches than tokens is enlarged until it has as many, for every allocator alike, as Qwen's own
    processor enlarges small pictures. Others are read at the size they have.

    Args:
        model: Qwen2.5-VL or Qwen3-VL for generation, in eval mode.
        processor: the model's own: apply_chat_template, tokenizer, and the normalisation of its image_processor.
        allocator: a name in `lod.allocate.names()`, made with the budget, 273 if None, for the model's patches; or an
            allocator that is made.
        system: goes before the question; None and "" leave what the chat template has.

    Raises:
        InputError: a model or an allocator that does not fit, or a budget beside an allocator of another.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        allocator: str | Allocator | Saccades,
        budget: int | None = None,
        system: str | None = None,
    ) -> None:
        self.adapter = lod.vlm.adapter_for(model)
        if isinstance(allocator, str):
            allocator = make(allocator, 273 if budget is None else budget, self.adapter.patch)
        elif budget not in (None, allocator.budget):
            raise InputError(
                f"the budget is {budget}, and the {type(allocator).__name__} has one of {allocator.budget}. Leave "
                "budget= out, or pass the name of an allocator."
            )
        self.model, self.processor, self.allocator, self.system = model, processor, allocator, system
        eos, pad = processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id
        self.pad = eos if pad is None else pad

    @torch.no_grad()
    def answer(
        self,
        images: Sequence[torch.Tensor],
        texts: Sequence[str],
        hints: Sequence[Hints] | None = None,
        max_new_tokens: int = 32,
        **options: Any,
    ) -> list[str]:
        """What the model says to each picture and text, greedily unless the options of transformers say otherwise.

        Shape: images [3, H, W], each of its own size.
        """
        each = [{}] * len(texts) if hints is None else hints
        rows = [self.inputs(*one) for one in zip(images, map(self.prompt, texts), each, strict=True)]
        inputs = joined(rows, self.pad)
        greedy = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
        settings = {**greedy, "pad_token_id": self.pad, "max_new_tokens": max_new_tokens, **options}
        found = self.model.generate(**inputs, **settings)
        words = found[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.tokenizer.batch_decode(words, skip_special_tokens=True)]

    @torch.no_grad()
    def log_likelihood(
        self, image: torch.Tensor, text: str, continuation: str, hints: Hints | None = None
    ) -> tuple[float, bool]:
        """The log-probability of a continuation, and whether the model would say it greedily."""
        before, more = self.prompt(text), self._ids(continuation)
        if not more:
            raise InputError(f"the continuation {continuation!r} has no tokens; expected one at least.")
        logits = self.model(**self.inputs(image, before + more, hints or {})).logits[0]
        found = logits[-len(more) - 1 : -1].float().log_softmax(-1)
        said = torch.tensor(more, device=found.device)
        return float(found.gather(1, said[:, None]).sum()), bool((found.argmax(-1) == said).all())

    def prompt(self, text: str) -> list[int]:
        """Token ids of a question about one picture."""
        content = [{"type": "image"}, {"type": "text", "text": text}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": self.system}]})
        return self._ids(self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def inputs(self, image: torch.Tensor, ids: Sequence[int], hints: Hints) -> dict[str, Any]:
        """What the model's `forward` takes for one picture and the ids of its prompt."""
        choice = self.allocator.allocator if isinstance(self.allocator, Saccades) else self.allocator
        image = enlarged(checks.image(image), choice.patch, choice.budget).to(self.model.device)
        encoded = lod.vlm.encode(self.adapter, image, self.allocator, processor=self.processor, **hints)
        return lod.vlm.inputs_for(self.model, torch.tensor([ids], device=self.model.device), encoded)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def enlarged(image: torch.Tensor, patch: int, budget: int) -> torch.Tensor:
    """A picture uint8 [3, H, W] of `budget` patches at least, of its shape."""
    height, width = image.shape[-2:]
    if math.ceil(height / patch) * math.ceil(width / patch) >= budget:
        return image
    scale = math.sqrt(budget / (height * width)) * patch
    size = (math.ceil(height * scale), math.ceil(width * scale))
    grown = F.interpolate(image[None].float(), size, mode="bicubic", antialias=True)[0]
    return grown.round().clamp(0, 255).to(torch.uint8)


def joined(rows: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Any]:
    """Several of `lod.vlm.inputs_for`, of pictures of any size, as one batch, padded on the left."""
    length = max(row["input_ids"].shape[-1] for row in rows)
    fill = {"input_ids": pad, "attention_mask": 0, "position_ids": 0}
    found: dict[str, Any] = {}
    for name, value in fill.items():
        padded = [F.pad(row[name], (length - row[name].shape[-1], 0), value=value) for row in rows]
        found[name] = torch.cat(padded, dim=-2)  # the batch, of positions [3, B, L] too
    outputs = [row["mm_encoder_outputs"]["image"] for row in rows]
    features = {"pooler_output": _pictures([one.pooler_output for one in outputs])}
    if hasattr(outputs[0], "deepstack_features"):
        layers = zip(*(one.deepstack_features for one in outputs), strict=True)
        features["deepstack_features"] = [_pictures(layer) for layer in layers]
    return {**found, "mm_encoder_outputs": {"image": type(outputs[0])(**features)}}


def _pictures(parts: Iterable[Sequence[torch.Tensor]]) -> Any:
    return tuple(picture for part in parts for picture in part)
