"""Pruning by attention: against plain loops, exact counts, and maps from real classes with random weights."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripts import succeed

from gpu_lod.allocate import GridTopK
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.gather_patches import gather_patches
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm import attention_received, sparse_vlm, vision_attention, vision_zip
from gpu_lod.vlm.adapters import Adapter, adapter_for
from gpu_lod.vlm.pruning import density_peaks

attention_module = sys.modules["gpu_lod.vlm.attention"]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a, b, dim=0))


def test_vision_zip_step_by_step() -> None:
    tokens, keys, received = torch.randn(2, 17, 4), torch.randn(2, 17, 6), torch.rand(2, 17)
    found = vision_zip(tokens, keys, received, 5, 4)
    assert found.tokens.shape == (2, 9, 4) and float(found.sizes.sum()) == 2 * 17
    for image in range(2):
        dominant = sorted(range(17), key=lambda i: -float(received[image, i]))[:5]
        rest = [i for i in range(17) if i not in dominant]
        targets = [rest[i * 12 // 4] for i in range(4)]
        groups = {target: [target] for target in targets}
        for i in rest:
            if i not in targets:
                groups[max(targets, key=lambda t: cosine(keys[image, i], keys[image, t]))].append(i)
        assert found.indices[image].tolist() == dominant + targets
        assert torch.equal(found.tokens[image, :5], tokens[image, dominant])
        for k, target in enumerate(targets):
            assert torch.allclose(found.tokens[image, 5 + k], tokens[image, groups[target]].mean(0), atol=1e-6)
            assert (found.owner[image, groups[target]] == 5 + k).all()


def test_sparse_vlm_step_by_step() -> None:
    tokens, text = torch.randn(2, 20, 8), torch.randn(2, 6, 8)
    attention = torch.rand(2, 3, 6, 20).softmax(-1)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    found = sparse_vlm(tokens, text, attention, 5, 3, mask, share=0.4)
    for image, words in ((0, 6), (1, 4)):
        relevance = (tokens[image] @ text[image, :words].T).softmax(-1).mean(0)
        raters = [w for w in range(words) if relevance[w] >= relevance.mean()]
        assert 0 < len(raters) < words
        scores = attention[image].mean(0)[raters].mean(0)
        rank = scores.argsort(descending=True).tolist()
        assert found.indices[image, :5].tolist() == rank[:5]
        assert torch.equal(found.tokens[image, :5], tokens[image, rank[:5]])
        pool = rank[5 : 5 + round(0.4 * 15)]
        centres, cluster = density_peaks(tokens[image, pool][None], 3)
        assert found.indices[image, 5:].tolist() == [pool[c] for c in centres[0].tolist()]
        for k in range(3):
            members = [pool[i] for i in torch.where(cluster[0] == k)[0].tolist()]
            assert torch.allclose(found.tokens[image, 5 + k], tokens[image, members].mean(0), atol=1e-6)
        assert sorted(torch.where(found.owner[image] < 0)[0].tolist()) == sorted(rank[11:])


def test_dropped_tokens_come_back_as_nothing() -> None:
    tokens = torch.randn(1, 10, 4)
    found = vision_zip(tokens, tokens, torch.arange(10.0)[None], 3, 0)
    assert torch.equal(found.tokens, tokens[:, [9, 8, 7]])
    back = found.unmerge(found.tokens)
    assert torch.equal(back[:, 7:], tokens[:, 7:]) and float(back[:, :7].abs().max()) == 0


def test_words_that_see_nothing_do_not_rate() -> None:
    """A word that no token is like attends to one token with all its might, and loses it all the same."""
    tokens = torch.zeros(1, 6, 4)
    tokens[..., 0] = 1
    text = torch.tensor([[[5.0, 0, 0, 0], [-5, 0, 0, 0]]])
    attention = torch.tensor([[[0.1, 0.5, 0.1, 0.1, 0.1, 0.1], [0, 0, 0, 0, 0, 1.0]]])
    assert sparse_vlm(tokens, text, attention, 1, 0).indices.tolist() == [[1]]
    assert sparse_vlm(tokens, text, attention, 1, 0, torch.tensor([[False, True]])).indices.tolist() == [[5]]


@pytest.mark.parametrize("words", [7, 10])  # of the tenths of 1 the mean rounds up
def test_words_that_are_all_alike_rate_alike(words: int) -> None:
    tokens, attention = torch.randn(1, 20, 4), torch.rand(1, 2, words, 20)
    found = sparse_vlm(tokens, torch.zeros(1, words, 4), attention, 20, 0)
    assert torch.equal(found.indices, attention.mean((1, 2)).argsort(descending=True))


@given(st.integers(1, 3), st.integers(1, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 2**20))
def test_exact_counts(batch: int, there: int, first: int, second: int, seed: int) -> None:
    torch.manual_seed(seed)
    first = min(first, there)
    second = max(min(second, there - first), 0 if first else 1)
    tokens = torch.randn(batch, there, 3).round()  # equal ones, and zeros
    looks = torch.rand(batch, 2, 4, there).round(decimals=1)
    for found in (
        vision_zip(tokens, tokens, looks[:, 0, 0], first, second),
        sparse_vlm(tokens, torch.zeros(batch, 4, 3), looks, first, second),
    ):
        count = first + second
        assert found.tokens.shape == (batch, count, 3) and torch.isfinite(found.tokens).all()
        assert all(len(row.unique()) == count for row in found.indices), "none twice"
        assert torch.equal(found.owner.gather(1, found.indices), torch.arange(count).expand(batch, count))
        assert torch.equal(found.sizes.sum(1), (found.owner >= 0).sum(1).float())


def test_density_peaks_find_clusters() -> None:
    which = torch.arange(60) % 3
    centres = torch.tensor([[0.0, 0], [4, 0], [0, 4]])
    points = (centres[which] + 0.3 * torch.randn(2, 60, 2)).requires_grad_()
    _, cluster = density_peaks(points.detach(), 3)
    for image in range(2):
        assert all(len(cluster[image, which == k].unique()) == 1 for k in range(3))
        assert len(cluster[image].unique()) == 3


def test_density_peaks_do_not_see_what_all_tokens_have_in_common() -> None:
    for _ in range(10):
        points = torch.randn(1, 200, 32)
        found, expected = density_peaks(points + 100, 20), density_peaks((points + 100).double(), 20)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_attention_received() -> None:
    attention = torch.rand(2, 3, 7, 7).softmax(-1)
    assert torch.allclose(attention_received(attention), attention.mean(1).mean(1))
    assert torch.allclose(attention_received(attention, prefix=1), attention[:, :, 0, 1:].mean(1))
    assert torch.allclose(attention_received(attention, prefix=3), attention[:, :, 0, 3:].mean(1))
    assert torch.equal(attention_received(attention[:, 0]), attention_received(attention[:, :1]))


def tower(kind: str) -> Any:
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}VisionConfig")(**sizes, image_size=32, patch_size=8)
    return getattr(transformers, f"{kind}VisionModel")(config).eval()


@pytest.mark.parametrize(("kind", "prefix"), [("CLIP", 1), ("Siglip", 0)])
@pytest.mark.parametrize("layer", [-2, 0])
def test_attention_of_vision_models(kind: str, prefix: int, layer: int) -> None:
    model = tower(kind)
    pixels = torch.randn(2, 3, 32, 32)
    before = model.config._attn_implementation
    assert before != "eager"
    with torch.no_grad():
        found = vision_attention(model, pixels, layer)
        assert model.config._attn_implementation == before
        assert not any(part._forward_hooks for part in model.modules())
        model.set_attn_implementation("eager")
        expected = model(pixel_values=pixels, output_attentions=True, output_hidden_states=True)
    assert found.attention.shape == (2, 2, 16 + prefix, 16 + prefix)
    assert torch.allclose(found.attention, expected.attentions[layer], atol=1e-6)
    assert torch.allclose(found.hidden, expected.hidden_states[layer + 1 if layer >= 0 else layer], atol=1e-5)
    encoder = next(part for name, part in model.named_modules() if name.endswith("encoder"))
    block = encoder.layers[layer]
    entered = expected.hidden_states[layer if layer >= 0 else layer - 1]
    assert torch.allclose(found.keys, block.self_attn.k_proj(block.layer_norm1(entered)), atol=1e-5)
    received = attention_received(found.attention, prefix)
    zipped = vision_zip(found.hidden[:, prefix:], found.keys[:, prefix:], received, 6, 2)
    assert zipped.tokens.shape == (2, 8, 24)


@pytest.mark.parametrize(("kind", "prefix"), [("CLIP", 1), ("Siglip", 0)])
def test_pictures_of_another_size(kind: str, prefix: int) -> None:
    model, pixels = tower(kind), torch.randn(1, 3, 40, 48)
    with pytest.raises(
        InputError, match=rf"{kind}VisionModel reads \[B, 3, 32, 32\]. .* interpolate_pos_encoding=True"
    ):
        vision_attention(model, pixels)
    with torch.no_grad():
        found = vision_attention(model, pixels, interpolate_pos_encoding=True)
        whole = model(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state
        last = vision_attention(model, pixels, -1, interpolate_pos_encoding=True).hidden
    assert attention_received(found.attention, prefix).shape == (1, 5 * 6)
    assert torch.allclose(last if prefix else model.post_layernorm(last), whole, atol=1e-5)


@pytest.mark.parametrize(("kind", "prefix"), [("CLIP", 1), ("Siglip", 0)])
def test_attention_of_tokens(kind: str, prefix: int) -> None:
    """With all patches, in some order, that of the whole picture; and of any others each at its place."""
    model, image = tower(kind), torch.randn(2, 3, 32, 32)
    y, x = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    order = torch.randperm(16)
    sites = torch.stack([(x + 0.5) / 4, (y + 0.5) / 4, 0 * x], -1).flatten(0, 1)[order].expand(2, -1, -1)
    tokens = TokenSet(sites, torch.ones(2, 16), gather_patches(image, sites, 8), 8)
    with torch.no_grad():
        whole = vision_attention(model, image)
        found = vision_attention(model, tokens, size=(32, 32))
        rows = torch.cat([torch.arange(prefix), order + prefix])
        assert torch.allclose(found.attention, whole.attention[..., rows, :][..., rows], atol=1e-5)
        assert torch.allclose(found.hidden, whole.hidden[:, rows], atol=1e-5)
        assert torch.allclose(found.keys, whole.keys[:, rows], atol=1e-5)
        few = vision_attention(model, tokens.take(torch.arange(5)), -1, size=[(32, 32), (32, 40)])
    assert few.attention.shape == (2, 2, 5 + prefix, 5 + prefix)
    with pytest.raises(InputError, match="pixel_values go without size"):
        vision_attention(model, image, size=(32, 32))
    with pytest.raises(InputError, match="Divide pixel positions"):
        vision_attention(model, TokenSet(sites * 32, tokens.scores, tokens.patches, 8), size=(32, 32))
    assert not any(part._forward_hooks for part in model.modules()) and model.config._attn_implementation != "eager"


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_of_two_towers_the_vision_model_is_taken(kind: str) -> None:
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**sizes, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    model, pixels = getattr(transformers, f"{kind}Model")(config).eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        for one, other in zip(
            vision_attention(model, pixels), vision_attention(model.vision_model, pixels), strict=True
        ):
            assert torch.equal(one, other)
    del model.vision_model
    with pytest.raises(UnsupportedError, match=f"{kind}Model reads text too"):
        vision_attention(model, pixels)


def test_inputs_beside_pixels() -> None:
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.Siglip2VisionConfig(**sizes, patch_size=8, num_patches=16)
    model, patches = transformers.Siglip2VisionModel(config).eval(), torch.randn(2, 12, 192)
    with pytest.raises(InputError, match="reads pixel_attention_mask and spatial_shapes beside pixel_values"):
        vision_attention(model, patches)
    more = {"pixel_attention_mask": torch.ones(2, 12), "spatial_shapes": torch.tensor([[3, 4], [4, 3]])}
    with torch.no_grad():
        found = vision_attention(model, patches, **more)
        model.set_attn_implementation("eager")
        expected = model(pixel_values=patches, **more, output_attentions=True).attentions[-2]
    assert found.attention.shape == (2, 2, 12, 12) and torch.allclose(found.attention, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("pixels", "hint"),
    [
        ([torch.rand(1, 3, 32, 32)], "list; .* not tokens"),
        (TokenSet(torch.rand(1, 4, 3), torch.rand(1, 4), torch.rand(1, 4, 3, 8, 8), 8), "and tokens with size"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), r"torch.uint8; expected a tensor of floats"),
        (torch.rand(3, 32, 32), r"\(3, 32, 32\); SiglipVisionModel reads"),
        (torch.rand(1, 1, 32, 32), r"\(1, 1, 32, 32\); SiglipVisionModel reads"),
        (torch.rand(1, 4, 3, 8, 8), r"\(1, 4, 3, 8, 8\); SiglipVisionModel reads"),
    ],
)
def test_what_are_no_pixels(pixels: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        vision_attention(tower("Siglip"), pixels)


def test_importing_loads_no_transformers() -> None:
    succeed(
        "import sys, gpu_lod; assert 'gpu_lod.vlm' not in sys.modules; gpu_lod.vlm.sparse_vlm; "
        "assert not {'transformers', 'timm', 'tensorboard'} & sys.modules.keys()"
    )


def test_models_without_attention_maps() -> None:
    with pytest.raises(UnsupportedError, match="no transformers model"):
        vision_attention(torch.nn.Linear(2, 2), torch.rand(1, 3, 8, 8))
    model = tower("CLIP")
    with pytest.raises(InputError, match="CLIPVisionModel has 3"):
        vision_attention(model, torch.rand(1, 3, 32, 32), 3)


def test_attention_that_returns_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tower("CLIP")
    part = model.encoder.layers[1].self_attn
    own = part.forward
    monkeypatch.setattr(part, "forward", lambda *inputs, **how: (own(*inputs, **how)[0], None))
    with pytest.raises(UnsupportedError, match="CLIPVisionModel returns no weights"):
        vision_attention(model, torch.rand(1, 3, 32, 32))


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    model = tower("CLIP")
    hook = model.encoder.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vision_attention(model, torch.rand(1, 3, 32, 32))
    hook.remove()
    assert model.config._attn_implementation == "sdpa" and not any(part._forward_hooks for part in model.modules())


T, K, R = torch.rand(2, 9, 4), torch.rand(2, 9, 6), torch.rand(2, 9)
LOOKS = torch.rand(2, 3, 5, 9)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: vision_zip(T[0], K[0], R[0], 4, 2), r"batch of one: tokens\[None\]"),
        (lambda: sparse_vlm(T[0], torch.rand(5, 4), LOOKS[0], 2, 1), r"batch of one: tokens\[None\]"),
        (lambda: vision_zip(T, K, R, 8, 2), r"8 \+ 2 tokens are asked for, of 9"),
        (lambda: vision_zip(T, K, R, 0, 0), "expected 1 to 9"),
        (lambda: vision_zip(T, K, R, -1, 2), "stay is -1"),
        (lambda: vision_zip(T, K, torch.rand(2, 10), 2, 2), "without the class token"),
        (lambda: vision_zip(T, K, R * math.nan, 2, 2), "received holds NaN"),
        (lambda: vision_zip(T, K, R.to("meta"), 2, 2), "received is a strided"),
        (lambda: vision_zip(T.to_sparse(), K, R, 2, 2), "tokens is a sparse_coo"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS * math.nan, 2, 1), "attention holds NaN"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS.to_sparse(), 2, 1), "attention is a sparse_coo"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4).to("meta"), LOOKS, 2, 1), "text is a strided"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS, 2, 1, [[True] * 5] * 2), "mask is list"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS, 2, 1, 1), "mask is int 1"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS, 2, 1, np.zeros((2, 5))), "a word in each row"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS, 9, 1), r"9 \+ 1"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 3), LOOKS, 2, 1), r"expected \[B, N, D\], \[B, T, D\]"),
        (lambda: sparse_vlm(T, torch.rand(2, 6, 4), LOOKS, 2, 1), r"attention \(2, 3, 5, 9\)"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS, 2, 1, torch.zeros(2, 5)), "a word in each row"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS, 2, 1, torch.ones(2, 4)), r"expected \(2, 5\), one of each"),
        (lambda: sparse_vlm(T, torch.rand(2, 5, 4), LOOKS, 2, 1, share=math.pi), "from 0 to 1"),
        (lambda: attention_received(LOOKS), "T above 0"),
        (lambda: attention_received(torch.rand(2, 3, 3), prefix=3), "T above 3"),
    ],
)
def test_bad_input(call: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        call()


def test_a_head_that_pools_by_attention_is_no_layer() -> None:
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**sizes, image_size=32, patch_size=8)).eval()
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        found = [vision_attention(model, pixels, layer) for layer in (-1, -2, 2, 1)]
    assert torch.equal(found[0].hidden, found[2].hidden) and torch.equal(found[1].hidden, found[3].hidden)
    with pytest.raises(InputError, match="has 3, from 0"):
        vision_attention(model, pixels, 3)
    with pytest.raises(InputError, match="layer is True"):
        vision_attention(model, pixels, True)
    with pytest.raises(InputError, match="model is None"):
        vision_attention(None, pixels)  # type: ignore[arg-type]


def test_attention_of_pictures_that_are_run_one_by_one() -> None:
    class OneByOne(Adapter):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.inner = adapter_for(model)
            self.patch, self.channels = self.inner.patch, self.inner.channels

        def run(self, tokens: TokenSet, size: Any, layer: Any = None) -> Any:
            return self.inner.run(tokens, size)

    model, sizes = tower("Siglip"), [(32, 40), (40, 32)]
    tokens = TokenSet.stack([GridTopK(10, 8)(torch.rand(3, *size)) for size in sizes])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        expected = vision_attention(model, tokens, size=sizes)
        patch.setattr(attention_module, "adapter_for", lambda model: OneByOne(model))
        found = vision_attention(model, tokens, size=sizes)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("filled", [math.nan, -math.inf, math.inf])
def test_what_padding_looks_at_counts_for_nothing(filled: float) -> None:
    """A softmax of a row that is all masked is NaN."""
    tokens, text = torch.randn(1, 12, 8), torch.randn(1, 5, 8)
    looks, mask = torch.rand(1, 2, 5, 12).softmax(-1), torch.tensor([[True] * 3 + [False] * 2])
    expected = sparse_vlm(tokens, text, looks, 4, 2, mask)
    looks[..., 3:, :] = filled
    found = sparse_vlm(tokens, text, looks, 4, 2, mask)
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.tokens, expected.tokens)


def test_every_row_of_a_mask_has_a_word() -> None:
    tokens, text = torch.randn(2, 6, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[True] * 3, [False] * 3])
    with pytest.raises(InputError, match="a word in each row"):
        sparse_vlm(tokens, text, torch.rand(2, 3, 6), 2, 1, mask)


def test_density_peaks_step_by_step() -> None:
    """The density of each point from its five nearest, times how far a denser one is, in units of a coordinate's."""
    points = 0.5 * torch.randn(2, 24, 9)
    found, cluster = density_peaks(points, 4)
    for image in range(2):
        away = torch.cdist(points[image].double(), points[image].double()) / math.sqrt(9)
        density = torch.exp(-away.sort(dim=1).values[:, :6].square().mean(1))  # itself and five more
        denser = density[None] > density[:, None]
        apart = away.masked_fill(~denser, math.inf).amin(1).clamp(max=away.max())
        centres = sorted((density * apart).argsort(descending=True)[:4].tolist())
        assert found[image].tolist() == centres
        assert torch.equal(cluster[image], away[:, centres].argmin(1))


def test_the_share_that_is_clustered_is_rounded() -> None:
    tokens, text, attention = torch.randn(1, 18, 8), torch.randn(1, 3, 8), torch.rand(1, 2, 3, 18).softmax(-1)
    found = sparse_vlm(tokens, text, attention, 5, 2, share=0.3)  # 3.9 of 13
    assert int((found.owner >= 5).sum()) == 4
