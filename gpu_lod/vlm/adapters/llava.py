"""LLaVA of transformers: a tower, a layer of it, and a projector into a language model."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gpu_lod.errors import UnsupportedError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.base import Adapter, adapter_for, register_adapter
from gpu_lod.vlm.adapters.encoded import Encoded, Size


@register_adapter("transformers.LlavaModel", "transformers.LlavaForConditionalGeneration")
class Llava(Adapter):
    """LLaVA: the states of the layers that it was trained on (`vision_feature_layer`), without a class token, and
    `merged`, what its projector makes of them: a token of the language model each.

    Raises:
        UnsupportedError: features that are no layer's output, or that are not just those of the patches.

    Source: Liu et al., "Visual Instruction Tuning" (2023).
    """

    at_once = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.owner = getattr(self.model, "model", self.model)
        self.tower = adapter_for(self.owner.vision_tower)
        self.patch, self.channels = self.tower.patch, self.tower.channels
        chosen = self.model.config.vision_feature_layer
        states = [chosen] if isinstance(chosen, int) else list(chosen)
        if 0 in states:
            raise UnsupportedError(
                f"vision_feature_layer of this {type(model).__name__} is {chosen}: its features are what its tower's "
                "first block reads. Use a model that takes those of blocks."
            )
        # Hidden states count from what the first block reads, and blocks from the first.
        self.layer = [state - 1 if state > 0 else state for state in states]

    def parts(self) -> list[nn.Module]:
        return [*self.tower.parts(), self.owner.multi_modal_projector]

    def run(self, tokens: TokenSet, size: Size | tuple[Size, ...]) -> Encoded:
        found = self.tower(tokens, size, self.layer)
        strategy = self.model.config.vision_feature_select_strategy
        if strategy != ("default" if found.prefix == 1 else "full") or found.prefix > 1:
            raise UnsupportedError(
                f"vision_feature_select_strategy is {strategy!r}, and {type(self.tower.model).__name__} has "
                f"{found.prefix} tokens before the patches: features would not be those of the patches alone. It has "
                'to be "default" with a class token and "full" without one.'
            )
        return replace(found, merged=self.owner.multi_modal_projector(found.features))
