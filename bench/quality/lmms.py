"""lmms-eval runs its tasks on Qwen2.5-VL and Qwen3-VL that read the tokens of an allocator.

python bench/quality/lmms.py --tasks docvqa_val --batch_size 8 --device cuda --limit 100 \\
    --model_args pretrained=Qwen/Qwen2.5-VL-3B-Instruct,allocator=FoveatedPyramid,budget=273

All options are those of lmms-eval; --model is gpu_lod_qwen. In a program: simple_evaluate(model=GpuLodQwen(...)).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_lod import checks
from gpu_lod.allocate import make
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.vlm import Saccades, adapter_for
from quality.vqa import rgb
from quality.vqa_answer import Answerer

NAME = "gpu_lod_qwen"
MAX_NEW_TOKENS = 128
"""Where a task says nothing, as of lmms-eval's own Qwen-VL."""
SAMPLING = ("max_new_tokens", "temperature", "top_p", "num_beams")


class Requests:
    """The methods that lmms-eval calls; `GpuLodQwen` is this and lmms-eval's base class.

    Args:
        pretrained: a name on the hub or a folder.
        allocator, budget: as of `Answerer`; base: so many tokens of the whole picture come before them (`Saccades`),
            none if 0.
        dtype, attn_implementation: transformers'. device: None is CUDA where there is one.
        max_batch_size: lmms-eval passes it; batches have batch_size.

    Raises:
        InputError: an unknown allocator, and requests about no picture, or several.
    """

    task_dict: Any
    cache_hook: Any

    def __init__(
        self,
        pretrained: str,
        allocator: str = "FoveatedPyramid",
        budget: int = 273,
        base: int = 0,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        system: str | None = "You are a helpful assistant.",
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.batch_size = checks.integer(int(batch_size), "batch_size", at_least=1)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model: Any = AutoModelForImageTextToText.from_pretrained(
            pretrained, dtype=dtype, attn_implementation=attn_implementation
        )
        processor = AutoProcessor.from_pretrained(pretrained)
        choice = make(allocator, budget, adapter_for(model).patch)
        tokens = Saccades(choice, base, budget) if base else choice
        self.answerer = Answerer(model.to(self.device).eval(), processor, tokens, system=system)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """An answer to each request (context, settings, doc_to_visual, doc_id, task, split), up to its stop strings."""
        found = [""] * len(requests)
        for batch in self._batches(requests):
            images, contexts = [], []
            settings = requests[batch[0]].args[1]
            for index in batch:
                context, _, doc_to_visual, doc_id, task, split = requests[index].args
                images.append(picture(doc_to_visual(self.task_dict[task][split][doc_id])))
                contexts.append(context)
            for index, context, text in zip(batch, contexts, self._answers(images, contexts, settings), strict=True):
                found[index] = text
                self.cache_hook.add_partial("generate_until", (context, settings), text)
        return found

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of each request (context, continuation or doc_to_target, doc_to_visual, doc_id, task, split)."""
        found = []
        for request in requests:
            context, target, doc_to_visual, doc_id, task, split = request.args
            document = self.task_dict[task][split][doc_id]
            continuation = target if isinstance(target, str) else target(document)
            image = picture(doc_to_visual(document))
            found.append(self.answerer.log_likelihood(image, without_marks(context), continuation))
            self.cache_hook.add_partial("loglikelihood", (context, continuation), found[-1])
        return found

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[list[str]]:
        """The answers of all rounds of each request (context, settings, doc_to_visual, doc_to_text, doc_id, task,
        split): doc_to_text makes the next round from those before, until it says that it was the last."""
        found = []
        for request in requests:
            context, settings, doc_to_visual, doc_to_text, doc_id, task, split = request.args
            document = self.task_dict[task][split][doc_id]
            visuals, text, rounds, about, last = doc_to_visual(document), context, [], None, False
            while not last:
                rounds += self._answers([picture(visuals)], [text], settings)
                visuals, text, last, kept, about = doc_to_text(
                    document, previous_output=rounds, round_idx=len(rounds), previous_round_info=about
                )
                rounds = list(kept)
            found.append(rounds)
            self.cache_hook.add_partial("generate_until_multi_round", (context, settings), rounds)
        return found

    def _batches(self, requests: Sequence[Any]) -> Iterator[list[int]]:
        """Indices of requests of the same settings."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for group in groups.values():
            for begin in range(0, len(group), self.batch_size):
                yield group[begin : begin + self.batch_size]

    def _answers(self, images: list[torch.Tensor], contexts: list[str], settings: dict[str, Any]) -> list[str]:
        # What transformers does not know is the task's own, and left out, as lmms-eval's models do.
        options = {"max_new_tokens": MAX_NEW_TOKENS} | {
            name: settings[name] for name in SAMPLING if settings.get(name) is not None
        }
        if options.get("temperature", 0) > 0:
            options["do_sample"] = True
        else:
            options |= {"temperature": None, "top_p": None}
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        texts = self.answerer.answer(images, [without_marks(context) for context in contexts], **options)
        return [cut(text, stops) for text in texts]


def cut(text: str, stops: Sequence[str]) -> str:
    """What stands before the first stop. Blank lines are none: lmms-eval's own Qwen-VL answers over them, too."""
    for stop in stops:
        if stop and stop != "\n\n":
            text = text.split(stop)[0]
    return text


def without_marks(context: str) -> str:
    """The chat template says where the picture is."""
    return context.replace("<image>", "")


def picture(visuals: Any) -> torch.Tensor:
    """The one picture of a request, uint8 [3, H, W]."""
    if not isinstance(visuals, (list, tuple)) or len(visuals) != 1 or not hasattr(visuals[0], "convert"):
        kinds = [type(one).__name__ for one in visuals] if isinstance(visuals, (list, tuple)) else visuals
        raise InputError(f"a request is about {kinds}; expected one picture. Choose tasks of one picture a question.")
    return rgb(visuals[0])


def imported(module: str) -> Any:
    """A module of lmms-eval.

    Raises:
        UnsupportedError: it is not installed, or something that it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{module} cannot be imported ({error}); lmms-eval is not installed, or not whole. Run: pip install "
            "lmms-eval"
        ) from None


@lru_cache(maxsize=1)
def registered() -> Any:
    """The class of models, made and registered with lmms-eval under `NAME` at the first call.

    Raises:
        UnsupportedError: no lmms-eval.
    """
    base: Any = imported("lmms_eval.api.model").lmms
    made = type("GpuLodQwen", (Requests, base), {"__module__": "quality.lmms", "__doc__": Requests.__doc__})
    imported("lmms_eval.api.registry").register_model(NAME)(made)
    # The command looks names up here, and finds the class by its path.
    manifest = imported("lmms_eval.models.registry_v2").ModelManifest(NAME, "quality.lmms.GpuLodQwen")
    imported("lmms_eval.models").MODEL_REGISTRY_V2.register_manifest(manifest, overwrite=True)
    return made


def __getattr__(name: str) -> Any:
    if name == "GpuLodQwen":
        return registered()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    importlib.import_module("quality.lmms").registered()  # not __main__'s: its path is in the registry
    sys.argv[1:1] = ["--model", NAME]
    imported("lmms_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
