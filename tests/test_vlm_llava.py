"""LLaVA: with the full grid as the token set, the untouched model's logits and words; and any other set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

import gpu_lod as lod
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE, PAD, WORDS = 90, 91, 80
SIZE = 56
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SIZE,
    "patch_size": 14,
}  # fmt: skip


class Whole(lod.allocate.Allocator):
    """The 4 x 4 patches, row by row."""

    needs = ()

    def __init__(self) -> None:
        super().__init__(16, 14)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        return scene.sites(0, torch.arange(16).expand(scene.batch, -1)), torch.ones(scene.batch, 16)


def llava(tower: Any = CLIPVisionConfig, **how: Any) -> Any:
    text = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    how = {"vision_feature_select_strategy": "default" if tower is CLIPVisionConfig else "full"} | how
    config = LlavaConfig(vision_config=tower(**TOWER), text_config=text, image_token_id=IMAGE, **how)
    model = LlavaForConditionalGeneration(config)
    torch.manual_seed(1)
    with torch.no_grad():  # its own start is too near zero to tell anything
        for value in model.parameters():
            value.add_(0.15 * torch.randn_like(value))
    return model.eval()


def prompt(count: int, batch: int = 2) -> torch.Tensor:
    words = torch.randint(WORDS, (batch, 9))
    return torch.cat([words[:, :4], torch.full((batch, count), IMAGE), words[:, 4:]], dim=1)


@pytest.mark.parametrize("layer", [-2, -1, 1, [-2, 3]], ids=str)
@pytest.mark.parametrize("tower", [CLIPVisionConfig, SiglipVisionConfig])
def test_the_full_grid_is_the_untouched_model(tower: Any, layer: Any) -> None:
    model, image = llava(tower, vision_feature_layer=layer), torch.randn(2, 3, SIZE, SIZE)
    ids = prompt(16)
    with torch.no_grad():
        encoded = lod.vlm.encode(model, image, Whole())
        expected = model(input_ids=ids, pixel_values=image).logits
        assert torch.allclose(model(**lod.vlm.inputs_for(model, ids, encoded)).logits, expected, atol=1e-4)
        words = model.generate(input_ids=ids, pixel_values=image, max_new_tokens=4, do_sample=False)
        few = torch.cat([ids[:, :5], ids[:, 20:]], dim=1)  # one placeholder stands for any number
        assert torch.equal(lod.vlm.generate(model, few, encoded, max_new_tokens=4, do_sample=False), words)
    assert float(expected.std()) > 0.1, "too flat to tell anything"


def test_pictures_of_other_sizes_train_the_projector() -> None:
    """In training mode, with labels, on 10 tokens of each."""
    model = llava().train()
    model.model.vision_tower.requires_grad_(False)
    images = [torch.rand(3, 90, 120), torch.rand(3, 70, 200)]
    encoded = lod.vlm.encode(model, images, lod.allocate.FoveatedPyramid(10))
    ids = prompt(1)
    inputs = lod.vlm.inputs_for(model, ids, encoded, labels=ids)
    assert inputs["input_ids"].shape == (2, 19) and (inputs["labels"][:, 4:14] == -100).all()
    model(**inputs).loss.backward()
    weight = model.model.multi_modal_projector.linear_1.weight
    assert weight.grad is not None and float(weight.grad.abs().max()) > 0


def test_only_what_is_run_must_not_be_random() -> None:
    """In training mode a language model may drop out, and the encoder may not."""
    model, image = llava(), torch.rand(1, 3, SIZE, SIZE)
    expected = lod.vlm.encode(model, image, Whole()).features
    model.train()
    model.model.language_model.add_module("lora", torch.nn.Dropout(0.1))
    assert torch.equal(lod.vlm.encode(model, image, Whole()).features, expected)
    model.model.multi_modal_projector.add_module("drop", torch.nn.Dropout(0.2))
    with pytest.raises(InputError, match=r"training mode, .*p of drop is 0\.2"):
        lod.vlm.encode(model, image, Whole())


def test_what_is_no_token_a_patch_is_refused() -> None:
    image = torch.rand(1, 3, SIZE, SIZE)
    for tower, strategy in ((CLIPVisionConfig, "full"), (SiglipVisionConfig, "default")):
        model = llava(tower, vision_feature_select_strategy=strategy)
        with pytest.raises(UnsupportedError, match=f"vision_feature_select_strategy is '{strategy}'"):
            lod.vlm.encode(model, image, Whole())
    with pytest.raises(UnsupportedError, match=r"vision_feature_layer of this Llava.* is 0"):
        lod.vlm.adapter_for(llava(vision_feature_layer=0))
    model = llava()
    alone = lod.vlm.encode(model.model.vision_tower, image, Whole())
    with pytest.raises(InputError, match="not of the tower of this Llava"):
        lod.vlm.inputs_for(model, prompt(16, 1), alone)
