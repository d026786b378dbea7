"""Adapters: the full grid is the untouched model, and any other set is its patches at its positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from images import noise
from scripts import succeed
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)

import gpu_lod as lod
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
NATIVE = 56


class Whole(lod.allocate.Allocator):
    """Every whole level-0 patch, in some order: row by row, or shuffled."""

    needs = ()

    def __init__(self, size: tuple[int, int], patch: int, shuffled: bool = False) -> None:
        self.rows, self.columns = size[0] // patch, size[1] // patch
        super().__init__(self.rows * self.columns, patch)
        order = torch.arange(self.budget)
        self.order = order[torch.randperm(self.budget)] if shuffled else order

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        cell = self.order // self.columns * scene.grid[1] + self.order % self.columns
        sites = scene.sites(0, cell.expand(scene.batch, -1))
        return sites, torch.ones(sites.shape[:2])


def siglip(attention: str = "sdpa") -> Any:
    config = SiglipVisionConfig(**SMALL, image_size=NATIVE, patch_size=14, attn_implementation=attention)
    return SiglipVisionModel(config).eval()


def siglip2(attention: str = "sdpa") -> Any:
    config = Siglip2VisionConfig(**SMALL, num_patches=16, patch_size=14, attn_implementation=attention)
    return Siglip2VisionModel(config).eval()


def clip(attention: str = "sdpa") -> Any:
    config = CLIPVisionConfig(**SMALL, image_size=NATIVE, patch_size=14, attn_implementation=attention)
    return CLIPVisionModel(config).eval()


def dino(**how: Any) -> Any:
    return shaken(Dinov2Model(Dinov2Config(**SMALL, image_size=NATIVE, patch_size=14, **how)))


def dino_with_registers() -> Any:
    how = {"image_size": NATIVE, "patch_size": 14, "num_register_tokens": 3}
    return shaken(Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SMALL, **how)))


def hf_vit() -> Any:
    return shaken(ViTModel(ViTConfig(**SMALL, image_size=NATIVE, patch_size=14)))


def vit(**how: Any) -> Any:
    how = {"class_token": True, "global_pool": "token" if how.get("class_token", True) else "avg", **how}
    model = timm.models.VisionTransformer(
        img_size=NATIVE, patch_size=14, embed_dim=32, depth=2, num_heads=2, num_classes=5, dynamic_img_size=True, **how
    )
    return shaken(model)


def eva(**how: Any) -> Any:
    model = timm.models.Eva(
        img_size=NATIVE, patch_size=14, embed_dim=32, depth=2, num_heads=2, num_classes=5, dynamic_img_size=True,
        use_rot_pos_emb=True, **how,
    )  # fmt: skip
    return shaken(model)


def shaken(model: Any) -> Any:
    """timm's own start is too near zero to tell anything."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    return model.eval()


def naflex(model: Any, image: torch.Tensor) -> Any:
    rows, columns = image.shape[-2] // 14, image.shape[-1] // 14
    whole = image[..., : rows * 14, : columns * 14]
    patches = whole.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    shapes = torch.tensor([[rows, columns]] * len(image))
    found = model(patches, torch.ones(patches.shape[:2], dtype=torch.long), shapes)
    return found.last_hidden_state, found.pooler_output


def interpolated(model: Any, image: torch.Tensor) -> Any:
    found = model(image, interpolate_pos_encoding=image.shape[-2:] != (NATIVE, NATIVE))
    return found.last_hidden_state, found.pooler_output


def plain(model: Any, image: torch.Tensor) -> Any:
    found = model(image)
    return found.last_hidden_state, found.pooler_output


def features(model: Any, image: torch.Tensor) -> Any:
    hidden = model.forward_features(image)
    return hidden, model.forward_head(hidden, pre_logits=True)


LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
ROPE = {"ref_feat_shape": (4, 4), "attn_type": "rope"}
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[[Any, torch.Tensor], Any]]] = {
    "SigLIP": (siglip, interpolated),
    "SigLIP 2": (siglip2, naflex),
    "CLIP": (clip, interpolated),
    "ViT": (hf_vit, interpolated),
    "DINOv2": (dino, plain),
    "DINOv2, registers": (dino_with_registers, plain),
    "timm, class token": (vit, features),
    "timm, no class token": (lambda: vit(class_token=False), features),
    "timm, registers, class apart": (lambda: vit(reg_tokens=3, no_embed_class=True, pre_norm=True), features),
    "timm, registers with positions": (lambda: vit(reg_tokens=2, global_pool="map"), features),
    "timm, no table": (lambda: vit(pos_embed="none", class_token=False, embed_norm_layer="layernorm"), features),
    "Eva": (lambda: eva(rope_grid_offset=1.0, rope_grid_indexing="xy", **ROPE), features),
    "Eva, halves": (lambda: eva(rope_rotate_half=True, use_abs_pos_emb=False, num_reg_tokens=2, **ROPE), features),
    "DINOv3": (lambda: eva(rope_type="dinov3", rope_rotate_half=True, attn_type="rope"), features),
}


def same(found: lod.vlm.Encoded, expected: Any, order: torch.Tensor | None = None) -> None:
    hidden, pooled = expected
    if order is not None:
        hidden = torch.cat([hidden[:, : found.prefix], hidden[:, found.prefix :][:, order]], dim=1)
    assert found.hidden.shape == hidden.shape and torch.allclose(found.hidden, hidden, atol=1e-4)
    assert found.pooled is not None and torch.allclose(found.pooled, pooled, atol=1e-4)
    assert float(hidden.std()) > 0.1, "too flat to tell anything"


@pytest.mark.parametrize("size", [(56, 56), (84, 126), (28, 70)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_grid_is_the_untouched_model(family: str, size: tuple[int, int]) -> None:
    """At its native size, at a larger, and at a smaller one."""
    make, run = FAMILIES[family]
    model, image = make(), torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = run(model, image)
        same(lod.vlm.encode(model, image, Whole(size, 14)), expected)
        if size == (84, 126):
            shuffled = Whole(size, 14, shuffled=True)
            same(lod.vlm.encode(model, image, shuffled), expected, shuffled.order)


@pytest.mark.parametrize("size", [(28, 112), (28, 56)], ids=str)
def test_a_table_of_pictures_that_are_no_squares(size: tuple[int, int]) -> None:
    """Of 16 cells, which might be a square's, and of 8."""
    model, image = shaken(ViTModel(ViTConfig(**SMALL, image_size=size, patch_size=14))), torch.randn(2, 3, *size)
    with torch.no_grad():
        same(lod.vlm.encode(model, image, Whole(size, 14)), plain(model, image))


@pytest.mark.parametrize("family", ["SigLIP", "SigLIP 2", "CLIP", "ViT", "DINOv2", "DINOv2, registers"])
def test_sizes_that_patches_do_not_divide(family: str) -> None:
    """The encoder leaves out the rest, and its table lies over the whole patches."""
    make, run = FAMILIES[family]
    model, image = make(), torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        same(lod.vlm.encode(model, image, Whole((65, 97), 14)), run(model, image))


@pytest.mark.parametrize("family", ["SigLIP", "CLIP", "ViT", "DINOv2, registers", "timm, class token", "Eva"])
def test_states_of_layers(family: str) -> None:
    """As transformers keeps them: no norm follows, and several lie side by side."""
    make, _ = FAMILIES[family]
    model, image = make(), torch.randn(2, 3, NATIVE, NATIVE)
    seen: list[torch.Tensor] = []
    parts = next(part for part in model.modules() if len(list(part.children())) == 2 and isinstance(part, LISTS))
    hooks = [part.register_forward_hook(lambda m, i, out: seen.append(out)) for part in parts]
    with torch.no_grad():
        model(image)
        for hook in hooks:
            hook.remove()
        whole = Whole((NATIVE, NATIVE), 14)
        for layer, expected in (
            (-2, seen[0]),
            (0, seen[0]),
            (1, seen[1]),
            ([1, -2], torch.cat([seen[1], seen[0]], -1)),
        ):
            found = lod.vlm.encode(model, image, whole, layer=layer)
            assert torch.allclose(found.hidden, expected, atol=1e-4) and found.pooled is None
            assert found.features.shape[:2] == (2, 16)
        with pytest.raises(InputError, match=r"layer is 2; .* has 2, from 0 or from -1 backward"):
            lod.vlm.encode(model, image, whole, layer=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_several_sizes_are_one_batch(family: str) -> None:
    """Each as it is alone, with inputs of its own."""
    model = FAMILIES[family][0]()
    images = [torch.rand(3, *size) for size in ((90, 120), (57, 200), (90, 120))]
    allocator, where = lod.allocate.GridTopK(20), [(0.1, 0.2), (0.5, 0.5), (0.9, 0.6)]
    maps = [torch.rand(7, 9), torch.rand(5, 15), torch.rand(7, 9)]
    with torch.no_grad():
        found = lod.vlm.encode(model, images, allocator, relevance=maps)
        assert found.sizes == ((90, 120), (57, 200), (90, 120)) and found.tokens.sites.shape == (3, 20, 3)
        for index, (image, relevance) in enumerate(zip(images, maps, strict=True)):
            alone = lod.vlm.encode(model, image, allocator, relevance=relevance)
            assert torch.allclose(found.hidden[index], alone.hidden, atol=1e-5)
            assert found.pooled is not None and torch.allclose(found.pooled[index], alone.pooled, atol=1e-5)
        about = lod.allocate.FoveatedPyramid(20)
        for points in (where, torch.tensor(where)):
            seen = lod.vlm.encode(model, images, about, fixation=points)
            alone = lod.vlm.encode(model, images[2], about, fixation=where[2])
            assert torch.equal(seen.tokens.sites[2], alone.tokens.sites)
        assert lod.vlm.encode(model, images[::2], allocator).size == (90, 120)


def test_one_fixation_and_one_query_are_for_all_pictures_of_a_list() -> None:
    model, images = siglip(), [torch.rand(3, 90, 120), torch.rand(3, 57, 200)]
    about = lod.allocate.FoveatedPyramid(20)
    with torch.no_grad():
        found = lod.vlm.encode(model, images, about, fixation=(0.2, 0.7))
        alone = lod.vlm.encode(model, images[1], about, fixation=(0.2, 0.7))
        assert torch.equal(found.tokens.sites[1], alone.tokens.sites)
        waves, query = lod.allocate.FrequencyAware(20), torch.tensor([0.1, 0.9, 0.3, 0.2])
        found = lod.vlm.encode(model, images, waves, query=query)
        alone = lod.vlm.encode(model, images[1], waves, query=query)
        assert torch.equal(found.tokens.sites[1], alone.tokens.sites)
        for how, hint in (
            ({"relevance": maps}, rf"relevance is {what}; expected 2, one for each picture")
            for maps, what in (([torch.rand(7, 9)], "1 of them"), (3.0, "3.0"))
        ):
            with pytest.raises(InputError, match=hint):
                lod.vlm.encode(model, images, about, **how)
        for pictures, shapes in (([], "none"), ([images[0][None]], r"\(1, 3, 90, 120\)"), (["a.png"], "str")):
            with pytest.raises(InputError, match=f"pictures of the list are {shapes}; expected tensors"):
                lod.vlm.encode(model, pictures, about)


def test_arrays_of_numpy_are_pictures_places_and_sizes() -> None:
    """Of a list as by themselves; and of several pictures an error says which."""
    model, about = siglip(), lod.allocate.FoveatedPyramid(20)
    images = [torch.randint(0, 256, (3, 90, 120), dtype=torch.uint8), torch.randint(0, 256, (3, 57, 200)).byte()]
    where = torch.tensor([[0.1, 0.2], [0.9, 0.3]])
    with torch.no_grad():
        expected = lod.vlm.encode(model, images, about, fixation=where)
        found = lod.vlm.encode(model, [image.numpy() for image in images], about, fixation=where.numpy())
        assert torch.equal(found.hidden, expected.hidden)
        tokens = about(images[0], mean=(0.0,) * 3)
        adapter = lod.vlm.adapter_for(model)
        assert torch.equal(adapter(tokens, np.array([90, 120])).hidden, adapter(tokens, (90, 120)).hidden)
    with pytest.raises(InputError, match=r"picture 1 of the list, \(3, 20, 20\): .*budget is 20"):
        lod.vlm.encode(model, [images[0], images[1][:, :20, :20]], about)


def test_some_of_what_was_encoded() -> None:
    """Behind the class token, which stays; of a batch, and of one picture."""
    images = [torch.rand(3, 90, 120), torch.rand(3, 57, 200)]
    with torch.no_grad():
        both = lod.vlm.encode(clip(), images, lod.allocate.GridTopK(5))
    index = torch.tensor([[4, 0], [1, 1]])
    found = both.take(index)
    assert found.hidden.shape == (2, 3, both.hidden.shape[2]) and torch.equal(found.hidden[:, 0], both.hidden[:, 0])
    assert torch.equal(found.features[1], both.features[1][[1, 1]]) and found.sizes == both.sizes
    assert torch.equal(found.tokens.sites[0], both.tokens.sites[0][[4, 0]]) and torch.equal(found.pooled, both.pooled)
    with torch.no_grad():
        alone = lod.vlm.encode(clip(), images[0], lod.allocate.GridTopK(5))
    assert torch.equal(alone.take(index[0]).features, alone.features[[4, 0]])
    with pytest.raises(InputError, match="expected 0 to 4"):
        both.take(torch.tensor([5]))


def test_what_was_encoded_is_a_tree_and_goes_to_a_file(tmp_path: Any) -> None:
    encoded = lod.vlm.encode(clip(), [torch.rand(3, 90, 120), torch.rand(3, 57, 200)], lod.allocate.GridTopK(5))
    assert encoded.hidden.requires_grad and not encoded.detach().hidden.requires_grad
    torch.save(encoded.detach(), tmp_path / "e.pt")
    found = torch.load(tmp_path / "e.pt")
    assert torch.equal(found.features, encoded.features) and found.sizes == encoded.sizes and found.prefix == 1
    doubled = torch.utils._pytree.tree_map(lambda value: 2 * value, found)
    assert torch.equal(doubled.pooled, 2 * found.pooled) and torch.equal(doubled.tokens.sites, 2 * found.tokens.sites)
    moved = encoded.to("meta")
    assert moved.hidden.is_meta and moved.tokens.sites.is_meta and moved.pooled is not None and moved.pooled.is_meta
    with pytest.raises(InputError, match="expected a torch device"):
        encoded.to(torch.float16)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["SigLIP", "CLIP"])
def test_merged_features_leave_the_class_token(family: str) -> None:
    model, image = FAMILIES[family][0](), torch.randn(2, 3, 84, 84)
    with torch.no_grad():
        encoded = lod.vlm.encode(model, image, lod.allocate.FoveatedPyramid(20))
        by = lod.vlm.bipartite_merge(encoded.features, encoded.features, 8)
        few = encoded.reduced(by)
        alone = lod.vlm.encode(model, image[0], lod.allocate.FoveatedPyramid(20))
    assert torch.equal(few.features, by.tokens) and few.features.shape[1] == few.tokens.budget == 12
    assert torch.equal(few.hidden[:, : few.prefix], encoded.hidden[:, : few.prefix])
    assert few.prefix == (1 if family == "CLIP" else 0) and few.pooled is encoded.pooled
    with pytest.raises(InputError, match=r"encoded from an image \[1, C, H, W\] if it is one"):
        alone.reduced(by)


@pytest.mark.parametrize("make", [siglip, siglip2, clip])
def test_either_attention(make: Callable[..., Any]) -> None:
    eager = make("eager")
    fused = make("sdpa")
    fused.load_state_dict(eager.state_dict())
    image = torch.randn(2, 3, 84, 84)
    with torch.no_grad():
        one, other = (lod.vlm.encode(model, image, lod.allocate.FoveatedPyramid(20)).hidden for model in (eager, fused))
    assert torch.allclose(one, other, atol=1e-5)


def test_a_token_is_its_patch_at_its_position() -> None:
    """A coarse token alone: the embedding of its averaged pixels, and the table's mean of the four cells it covers,
    which is what bilinear reading in the middle gives."""
    model = siglip2()
    image = torch.randn(1, 3, NATIVE, NATIVE)
    sites = torch.tensor([[[0.25, 0.75, 1.0]]])
    tokens = lod.TokenSet(sites, torch.ones(1, 1), lod.gather_patches(image, sites, 14), 14)
    seen = []
    handle = model.encoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        lod.vlm.adapter_for(model)(tokens, (NATIVE, NATIVE))
        handle.remove()
        small = torch.nn.functional.avg_pool2d(image[..., 28:, :28], 2)[0].permute(1, 2, 0).flatten()
        rows = model.embeddings.position_embedding.weight.view(4, 4, -1)[2:, :2].mean((0, 1))
        expected = model.embeddings.patch_embedding(small) + rows
    assert torch.allclose(seen[0][0, 0], expected, atol=1e-5)


def test_gradients_reach_the_pixels_and_the_sites() -> None:
    model = vit()
    image = torch.randn(1, 3, 70, 70, requires_grad=True)
    sites = torch.rand(1, 5, 3).requires_grad_()
    patches = lod.gather_patches(image, sites, 14, backend="torch")
    tokens = lod.TokenSet(sites, torch.ones(1, 5), patches, 14)
    lod.vlm.adapter_for(model)(tokens, (70, 70)).hidden.square().sum().backward()
    assert image.grad is not None and sites.grad is not None
    assert float(image.grad.abs().max()) > 0 and (sites.grad[..., :2].abs().amax((0, 1)) > 0).all()
    assert torch.isfinite(image.grad).all() and torch.isfinite(sites.grad).all()


def test_one_image_without_a_batch_and_pyramids() -> None:
    model, image = clip(), torch.randn(2, 3, 90, 120)
    allocator = lod.vlm.Saccades(lod.allocate.FoveatedPyramid(12), base=9, budget=12)
    with torch.no_grad():
        both = lod.vlm.encode(model, image, allocator, fixation=(0.3, 0.4))
        alone = lod.vlm.encode(model, image[1], allocator, fixation=(0.3, 0.4))
        again = lod.vlm.encode(lod.vlm.adapter_for(model), lod.mipmap(image), allocator, fixation=(0.3, 0.4))
    assert both.hidden.shape == (2, 22, 32) and both.features.shape == (2, 21, 32) and both.size == (90, 120)
    assert alone.hidden.shape == (22, 32) and alone.pooled is not None and alone.pooled.shape == (32,)
    assert torch.allclose(alone.hidden, both.hidden[1], atol=1e-5)
    assert torch.allclose(again.hidden, both.hidden, atol=1e-5)
    for found, lead in ((both, (2, 21)), (alone, (21,))):
        tokens = dataclasses.replace(found.tokens, features=found.features)
        assert tokens.features is not None and tokens.features.shape == (*lead, 32) and tokens.patches is not None
        with torch.no_grad():  # they are no matter of an encoder
            once_more = lod.vlm.adapter_for(model)(tokens, (90, 120))
        assert torch.allclose(once_more.features, tokens.features, atol=1e-5)


# -- normalisation -----------------------------------------------------------------------------------------------------


class Processor:
    image_mean = (0.4, 0.5, 0.6)
    image_std = (0.2, 0.3, 0.25)
    rescale_factor = 1 / 127.5
    do_rescale = True
    do_normalize = True


def test_pixels_are_normalised_as_the_processor_does() -> None:
    model, image = siglip(), noise(1, 3, NATIVE, NATIVE, dtype=torch.uint8)
    mean, std = (torch.tensor(values)[:, None, None] for values in (Processor.image_mean, Processor.image_std))
    whole = Whole((NATIVE, NATIVE), 14)

    def close(given: Any, **how: Any) -> bool:
        found = lod.vlm.encode(model, image, whole, **how).tokens.patches
        expected = given.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
        return torch.allclose(found, expected, atol=1e-5)

    class Holder:
        image_processor = Processor()

    with torch.no_grad():
        assert close((image / 127.5 - mean) / std, processor=Processor())
        assert close((image / 127.5 - mean) / std, processor=Holder())
        assert close((image / 255 - mean) / std, mean=Processor.image_mean, std=Processor.image_std)
        assert close(image / 255)
        plain = type("Plain", (Processor,), {"do_normalize": False})
        raw = type("Raw", (plain,), {"do_rescale": False})
        assert close(image / 127.5, processor=plain()) and close(image.float(), processor=raw())
        image = image / 255  # values in [0, 1] are as they are where nothing rescales
        assert close((image * 2 - mean) / std, processor=Processor()) and close(image, processor=raw())


def test_blends_are_normalised() -> None:
    class Blend(lod.allocate.Allocator):
        blends = True

        def choose(self, scene: Scene) -> tuple[torch.Tensor, ...]:
            cells = scene.grid[0] * scene.grid[1]
            weights = torch.full((scene.batch, self.budget, cells), 1 / cells)
            return scene.sites(0, torch.zeros(scene.batch, 1).long()), torch.ones(scene.batch, 1), weights

    image = noise(1, 3, NATIVE, NATIVE, dtype=torch.uint8)
    blended = Blend(1)(image, mean=(0.5,) * 3, std=(0.25,) * 3).patches
    mean = (image / 255).unfold(2, 14, 14).unfold(3, 14, 14).mean((2, 3))
    assert blended is not None and torch.allclose(blended[:, 0], (mean - 0.5) / 0.25, atol=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"model": torch.nn.Linear(2, 2)}, "no adapter for Linear.*timm.Eva.*register_adapter"),
        ({"model": None}, "no adapter for NoneType"),
        ({"allocator": lod.allocate.GridTopK(4, patch=16)}, "patch=14"),
        ({"allocator": "GridTopK"}, "expected an Allocator, as those that"),
        ({"allocator": lod.allocate.TokenBank(lod.allocate.GridTopK(4), 8)}, r"on each of its \.unpack\(\)"),
        ({"image": torch.rand(1, 1, 56, 56)}, "1 channels"),
        ({"image": "photo.png"}, "torch tensor"),
        ({"allocator": lod.allocate.GridTopK(40)}, "budget is 40"),
        ({"processor": Processor(), "mean": (0.0,) * 3}, "one of them"),
        ({"processor": torch.nn.Identity()}, "image_mean"),
    ],
)
def test_bad_input(arguments: dict[str, Any], hint: str) -> None:
    given = {"model": siglip(), "image": torch.rand(1, 3, 56, 56), "allocator": lod.allocate.GridTopK(4), **arguments}
    with pytest.raises(InputError, match=hint):
        lod.vlm.encode(**given)


def test_tokens_that_do_not_fit() -> None:
    adapter = lod.vlm.adapter_for(siglip())
    image = noise(1, 3, 56, 56, dtype=torch.uint8)
    for tokens, hint in (
        (lod.allocate.GridTopK(4)(relevance=torch.rand(1, 4, 4)), "no patches"),
        (lod.allocate.GridTopK(4)(image), "uint8"),
        (lod.allocate.GridTopK(4, patch=7)(image.float()), "patch=14"),
    ):
        with pytest.raises(InputError, match=hint):
            adapter(tokens, (56, 56))


def test_arguments_of_adapters_that_do_not_fit() -> None:
    adapter = lod.vlm.adapter_for(siglip())
    tokens = lod.allocate.GridTopK(4)(torch.rand(2, 3, 56, 70))
    pixels = dataclasses.replace(tokens, sites=tokens.sites * torch.tensor([70.0, 56.0, 1.0]))
    below = dataclasses.replace(tokens, sites=tokens.sites - torch.tensor([0.0, 0.0, 1.0]))
    none = lod.TokenSet(tokens.sites[:, :0], tokens.scores[:, :0], tokens.patches[:, :0], 14)  # type: ignore[index]
    packed = lod.allocate.TokenBank(lod.allocate.GridTopK(4), 8)(torch.rand(2, 3, 56, 70))
    for given, size, hint in (
        (pixels, (56, 70), r"Divide pixel positions by \(width, height\)"),
        (below, (56, 70), "level"),
        (none, (56, 70), r"sites are \(2, 0, 3\), that is none"),
        (packed, (56, 70), r"tokens\.unpack\(\)"),
        ([tokens], (56, 70), r"TokenSet\.stack\(sets\)"),
        (None, (56, 70), "expected a TokenSet"),
        (tokens, (56,), "size"),
        (tokens, [(56, 70)], "1 sizes and 2 pictures"),
        (tokens, [(56, 70), (56, 0)], "height|width"),
    ):
        with pytest.raises(InputError, match=hint):
            adapter(given, size)
    with torch.no_grad():
        expected = adapter(tokens, (56, 70)).hidden
        for size in ([(56, 70)] * 2, torch.tensor([[56, 70]] * 2), [56, 70]):
            found = adapter(tokens, size)
            assert torch.equal(found.hidden, expected) and found.size == (56, 70)
    with pytest.raises(UnsupportedError, match="no states of single layers"):
        Own(torch.nn.Linear(2, 2))(lod.allocate.GridTopK(4, 1)(torch.rand(2, 2, 3)), (2, 3), layer=-1)


class Own(lod.vlm.Adapter):
    """Of a user: nothing but `run`, which takes one size."""

    patch, channels = 1, 2

    def run(self, tokens: lod.TokenSet, size: tuple[int, int]) -> lod.vlm.Encoded:
        assert tokens.patches is not None and isinstance(size[0], int)
        hidden = self.model(tokens.patches.flatten(2)) * size[0]
        return lod.vlm.Encoded(hidden, tokens, size, pooled=hidden.mean(1), deepstack=(hidden, -hidden))


def test_an_adapter_of_one_size_runs_pictures_one_by_one() -> None:
    adapter, allocator = Own(torch.nn.Linear(2, 2)), lod.allocate.GridTopK(3, 1)
    images = [torch.rand(2, 2, 3), torch.rand(2, 3, 5)]
    found = lod.vlm.encode(adapter, images, allocator)
    alone = [lod.vlm.encode(adapter, image, allocator) for image in images]
    assert found.sizes == ((2, 3), (3, 5)) and found.pooled is not None and found.merged is None
    for index, one in enumerate(alone):
        for ours, own in (
            (found.hidden, one.hidden),
            (found.pooled, one.pooled),
            (found.deepstack[1], one.deepstack[1]),
        ):
            assert torch.allclose(ours[index], own, atol=1e-6)
    assert torch.equal(found.tokens.sites[1], alone[1].tokens.sites)


@pytest.mark.parametrize("make", [siglip, clip, dino, vit, lambda: vit(global_pool="map"), eva])
def test_models_in_training_mode_are_taken_where_nothing_is_random(make: Callable[..., Any]) -> None:
    model, image = make(), torch.rand(1, 3, NATIVE, NATIVE)
    expected = lod.vlm.encode(model, image, lod.allocate.GridTopK(4)).hidden
    model.train()
    assert torch.equal(lod.vlm.encode(model, image, lod.allocate.GridTopK(4)).hidden, expected)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: vit(proj_drop_rate=0.1), "p of .* is 0.1"),
        (lambda: vit(drop_path_rate=0.2), "drop_prob of .* is 0.[12]"),
        (lambda: vit(patch_drop_rate=0.3), "prob of patch_drop is 0.3"),
        (lambda: vit(attn_drop_rate=0.1), "is 0.1"),
        (lambda: dino(drop_path_rate=0.2), "drop_prob of .* is 0.2"),
        (lambda: dino(attention_probs_dropout_prob=0.2), "attention_dropout of .* is 0.2"),
        (
            lambda: SiglipVisionModel(SiglipVisionConfig(**SMALL, patch_size=14, attention_dropout=0.1)),
            "dropout of .* 0.1",
        ),
        (lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(2)), "0 is a BatchNorm"),
    ],
)
def test_random_models_in_training_mode_are_refused(make: Callable[..., Any], what: str) -> None:
    model = make()
    adapter = Own(model) if isinstance(model, torch.nn.Sequential) else lod.vlm.adapter_for(model)
    model.train()
    tokens = lod.allocate.GridTopK(4, adapter.patch)(torch.rand(1, adapter.channels, 56, 56))
    with pytest.raises(InputError, match=rf"training mode, .*{what}\)\. Call model\.eval\(\)"):
        adapter(tokens, (56, 56))


def test_pictures_that_timm_pads() -> None:
    model, allocator = vit(dynamic_img_pad=True), lod.allocate.GridTopK(4)
    with torch.no_grad():
        lod.vlm.encode(model, torch.rand(1, 3, 56, 70), allocator)
        with pytest.raises(UnsupportedError, match=r"dynamic_img_pad\), and \(60, 70\) pixels .* Pad or crop"):
            lod.vlm.encode(model, torch.rand(1, 3, 60, 70), allocator)


def test_models_that_compute_something_else() -> None:
    stem = vit(embed_layer=lambda **how: timm.layers.HybridEmbed(torch.nn.Conv2d(3, 8, 1), **how), class_token=False)
    with pytest.raises(UnsupportedError, match="HybridEmbed"):
        lod.vlm.adapter_for(stem)
    with pytest.raises(UnsupportedError, match="rope_type"):
        lod.vlm.adapter_for(eva(rope_type="mixed", attn_type="rope"))
    derived = type("Derived", (timm.models.VisionTransformer,), {})
    with pytest.raises(InputError, match="no adapter for Derived, which is derived from VisionTransformer"):
        lod.vlm.adapter_for(derived(img_size=28, patch_size=14, embed_dim=8, depth=1, num_heads=1))
    sharded = type("FSDPViT", (timm.models.VisionTransformer,), {"unshard": None})
    with pytest.raises(InputError, match=r"FSDPViT is sharded .*fully_shard\(block\)"):
        lod.vlm.adapter_for(sharded(img_size=28, patch_size=14, embed_dim=8, depth=1, num_heads=1))


def test_models_in_wrappers_are_told_of() -> None:
    """Compiled ones and those on several devices run whole, and adapters run parts."""
    model = torch.nn.Linear(2, 2)
    for wrapped, inside in ((torch.compile(model), "_orig_mod"), (torch.nn.DataParallel(model), "module")):
        with pytest.raises(InputError, match=rf"wraps a model.*model\.{inside}"):
            lod.vlm.adapter_for(wrapped)


def test_an_adapter_of_ones_own() -> None:
    succeed(
        """
        import sys, torch, gpu_lod as lod
        assert "gpu_lod.vlm" not in sys.modules and "gpu_lod.allocate" not in sys.modules

        class MyViT(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Linear(3 * 64, 6))

        @lod.vlm.register_adapter("MyViT")
        class MyAdapter(lod.vlm.Adapter):
            def __init__(self, model):
                super().__init__(model)
                self.patch, self.channels = 8, 3

            def run(self, tokens, size):
                where = lod.vlm.grid_positions(tokens.sites, size, self.patch)[..., 1:]
                return lod.vlm.Encoded(torch.cat([self.model.embed(tokens.patches), where], -1), tokens, size)

        assert "MyViT" in lod.vlm.adapters()
        found = lod.vlm.encode(MyViT().eval(), torch.rand(2, 3, 40, 40), lod.allocate.GridTopK(5, patch=8))
        assert found.features.shape == (2, 5, 8)
        for bad in (int, lod.vlm.Encoded):
            try:
                lod.vlm.register_adapter("Other")(bad)
            except lod.GpuLodError as error:
                assert "Adapter" in str(error)
            else:
                raise SystemExit("registered")
        assert "transformers" not in sys.modules and "timm" not in sys.modules
        """
    )


def test_blends_of_pictures_of_several_sizes() -> None:
    """Whose weights are of grids of several sizes, and no encoder reads them."""
    model, pictures = siglip(), [torch.rand(3, 84, 112), torch.rand(3, 112, 112)]
    allocator = lod.allocate.SoftVortex(8)
    with torch.no_grad():
        found = lod.vlm.encode(model, pictures, allocator)
        assert found.tokens.weights is None
        for index, picture in enumerate(pictures):
            alone = lod.vlm.encode(model, picture, allocator)
            torch.testing.assert_close(found.hidden[index], alone.hidden)
        assert lod.vlm.encode(model, pictures[:1] * 2, allocator).tokens.weights is not None
    with pytest.raises(InputError, match="fixation"):
        lod.vlm.encode(model, pictures, lod.allocate.FoveatedPyramid(8), fixation=5)


def test_patches_that_are_written_as_two_sides() -> None:
    made = [ViTModel(ViTConfig(**SMALL, image_size=NATIVE, patch_size=side)).eval() for side in (14, (14, 14))]
    made[1].load_state_dict(made[0].state_dict())
    with torch.no_grad():
        image = torch.rand(3, NATIVE, NATIVE)
        one, other = (lod.vlm.encode(model, image, lod.allocate.GridTopK(5)) for model in made)
    assert torch.equal(one.hidden, other.hidden)
    with pytest.raises(UnsupportedError, match="expected squares"):
        lod.vlm.adapter_for(ViTModel(ViTConfig(**SMALL, image_size=NATIVE, patch_size=(14, 28))))


def test_no_positions_have_no_rows() -> None:
    found = lod.vlm.sample_position_table(torch.rand(16, 8), torch.zeros(2, 0, 2), (4, 4), (4, 4))
    assert found.shape == (2, 0, 8)


def test_a_processor_without_a_factor_rescales_bytes_to_fractions() -> None:
    from gpu_lod.vlm.encode import normalisation

    unnamed = type("Unnamed", (Processor,), {"rescale_factor": None})
    mean, std = normalisation(unnamed(), 3)
    assert mean == pytest.approx(Processor.image_mean) and std == pytest.approx(Processor.image_std)


# -- attention ---------------------------------------------------------------------------------------------------------


class Recorder(torch.nn.Module):
    """Stands for the dropout of an attention: what goes through it is the map."""

    def forward(self, attention: torch.Tensor) -> torch.Tensor:
        self.seen = attention
        return attention


def looked(model: Any, image: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
    """What vision_attention is to give, by way of another part in each block's place."""
    drops, entered, left = [], [], []
    for block in model.blocks:
        drops.append(block.attn.attn_drop)
        block.attn.attn_drop, block.attn.fused_attn = Recorder(), False
    block = model.blocks[layer]
    hooks = [
        block.attn.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0])),
        block.register_forward_hook(lambda module, inputs, output: left.append(output)),
    ]
    model.forward_features(image)
    for hook in hooks:
        hook.remove()
    own = block.attn
    if own.qkv is None:
        keys = own.k_proj(entered[0])
    else:
        bias = own.qkv.bias[32:64] if own.qkv.bias is not None else own.k_bias
        keys = entered[0] @ own.qkv.weight[32:64].T + bias
    seen = own.attn_drop.seen
    for block, drop in zip(model.blocks, drops, strict=True):
        block.attn.attn_drop, block.attn.fused_attn = drop, True
    return seen, keys, left[0]


ATTENTIVE = [name for name in FAMILIES if name.startswith(("timm", "Eva", "DINOv3"))]


@pytest.mark.parametrize("layer", [-2, 1])
@pytest.mark.parametrize("family", [*ATTENTIVE, "Eva, parts"])
def test_attention_of_timm(family: str, layer: int) -> None:
    """Of the whole picture, and of all its patches in some order."""
    model = eva(qkv_fused=False) if family == "Eva, parts" else FAMILIES[family][0]()
    for block in model.blocks:
        if getattr(block.attn, "k_bias", None) is not None:
            block.attn.k_bias += torch.randn(32)
    image, shuffled = torch.randn(2, 3, 56, 56), Whole((56, 56), 14, shuffled=True)
    with torch.no_grad():
        expected = looked(model, image, layer)
        found = lod.vlm.vision_attention(model, image, layer)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        prefix = model.num_prefix_tokens
        rows = torch.cat([torch.arange(prefix), shuffled.order + prefix])
        found = lod.vlm.vision_attention(model, shuffled(image), layer, size=(56, 56))
        for one, other in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(one, other[:, rows], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.attention, expected[0][..., rows, :][..., rows], atol=1e-5, rtol=1e-4)
    assert found.attention.shape == (2, 2, 16 + prefix, 16 + prefix) and float(found.attention.std()) > 0.01
    assert all(block.attn.fused_attn for block in model.blocks)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    received = lod.vlm.attention_received(found.attention, prefix)
    assert lod.vlm.vision_zip(found.hidden[:, prefix:], found.keys[:, prefix:], received, 6, 2).tokens.shape[1] == 8


def test_attention_of_timm_at_sizes() -> None:
    model = vit()
    with torch.no_grad():
        assert lod.vlm.vision_attention(model, torch.rand(1, 3, 84, 70)).attention.shape == (1, 2, 31, 31)
        tokens = lod.TokenSet.stack([lod.allocate.GridTopK(9)(torch.rand(3, *size)) for size in ((70, 84), (98, 56))])
        found = lod.vlm.vision_attention(model, tokens, size=[(70, 84), (98, 56)])
        assert found.attention.shape == (2, 2, 10, 10)
        alone = lod.vlm.vision_attention(model, tokens.unstack()[1], size=(98, 56))
    torch.testing.assert_close(alone.attention[0], found.attention[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("pixels", "hint"),
    [
        (torch.zeros(1, 3, 56, 56, dtype=torch.uint8), r"torch.uint8; expected a tensor of floats \[B, 3, H, W\]"),
        ([1.0], "list; expected a tensor of floats"),
        (torch.rand(3, 56, 56), r"\(3, 56, 56\); VisionTransformer reads \[B, 3, 56, 56\]. .* dynamic_img_size=True"),
        (torch.rand(1, 1, 56, 56), r"\(1, 1, 56, 56\); VisionTransformer reads"),
        (torch.rand(1, 3, 70, 56), r"\(1, 3, 70, 56\); VisionTransformer reads"),
    ],
)
def test_pixels_that_timm_does_not_take(pixels: Any, hint: str) -> None:
    model = timm.models.VisionTransformer(
        img_size=NATIVE, patch_size=14, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    with pytest.raises(InputError, match=hint):
        lod.vlm.vision_attention(model.eval(), pixels)
    with pytest.raises(InputError, match="VisionTransformer has 2, from 0"):
        lod.vlm.vision_attention(model, torch.rand(1, 3, 56, 56), -3)
    model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lod.vlm.vision_attention(model, torch.rand(1, 3, 56, 56), 0)
    assert model.blocks[0].attn.fused_attn and not model.blocks[0].attn._forward_pre_hooks
