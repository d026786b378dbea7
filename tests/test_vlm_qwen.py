"""Qwen2.5-VL and Qwen3-VL: tokens are merge units, the full grid is the untouched model, and any set generates."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import gpu_lod as lod
from gpu_lod.allocate.scene import Scene
from gpu_lod.errors import InputError, LimitError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE, PAD, WORDS = 90, 91, 80
SIDE = 8
"""Of a patch; a unit is 16."""


def language(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    return {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD, **more,
    }  # fmt: skip


def qwen25(attention: str = "sdpa", side: int = SIDE) -> Any:
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": side,
        "window_size": 4 * side, "fullatt_block_indexes": [1], "out_hidden_size": 32,
    }  # fmt: skip
    return started(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, vision, attention)


def qwen3(attention: str = "sdpa") -> Any:
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": SIDE,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2], "out_hidden_size": 32,
    }  # fmt: skip
    return started(Qwen3VLForConditionalGeneration, Qwen3VLConfig, vision, attention)


def started(model: Any, config: Any, vision: Any, attention: str) -> Any:
    tokens = {"image_token_id": IMAGE, "video_token_id": 92, "vision_start_token_id": 93, "vision_end_token_id": 94}
    made = model(config(text_config=language(), vision_config=vision, attn_implementation=attention, **tokens))
    torch.manual_seed(1)
    with torch.no_grad():  # its own start is too near zero to tell anything
        for value in made.parameters():
            value.add_(0.15 * torch.randn_like(value))
    return made.eval()


MODELS = {"Qwen2.5-VL": qwen25, "Qwen3-VL": qwen3}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


class Whole(lod.allocate.Allocator):
    """Every unit, in some order: row by row, or shuffled."""

    needs = ()

    def __init__(self, units: int, shuffled: bool = False) -> None:
        super().__init__(units, 2 * SIDE)
        self.order = torch.randperm(units) if shuffled else torch.arange(units)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        return scene.sites(0, self.order.expand(scene.batch, -1)), torch.ones(scene.batch, self.budget)


def pixel_values(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches in the order of merge units, each twice in time, as the image processor lays them out."""
    batch, channels, height, width = image.shape
    rows, columns = height // SIDE, width // SIDE
    cut = image.view(batch, channels, rows // 2, 2, SIDE, columns // 2, 2, SIDE).permute(0, 2, 5, 3, 6, 1, 4, 7)
    twice = cut.unsqueeze(6).expand(*cut.shape[:6], 2, SIDE, SIDE)
    return twice.reshape(batch * rows * columns, -1), torch.tensor([[1, rows, columns]] * batch)


def prompt(count: int, batch: int) -> torch.Tensor:
    words = torch.randint(WORDS, (batch, 9))
    return torch.cat([words[:, :4], torch.full((batch, count), IMAGE), words[:, 4:]], dim=1)


# -- the towers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 80), (48, 112)], ids=str)
@each_model
def test_the_full_grid_is_the_untouched_tower(make: Any, size: tuple[int, int]) -> None:
    """In any order of the units, with windows that the picture does not fill."""
    tower = make().model.visual
    image = torch.randn(2, 3, *size)
    pixels, grid = pixel_values(image)
    units = size[0] * size[1] // 256
    with torch.no_grad():
        expected = tower(pixels, grid)
        for shuffled in (False, True):
            allocator = Whole(units, shuffled)
            found = lod.vlm.encode(tower, image, allocator)
            merged = expected.pooler_output.view(2, units, 32)[:, allocator.order]
            assert found.merged is not None and torch.allclose(found.merged, merged, atol=1e-4)
            assert torch.equal(found.features, found.merged) and found.hidden.shape == (2, 4 * units, 32)
            for own, other in zip(getattr(expected, "deepstack_features", []), found.deepstack, strict=True):
                assert torch.allclose(other, own.view(2, units, 32)[:, allocator.order], atol=1e-4)
    assert float(merged.std()) > 0.1, "too flat to tell anything"


@each_model
def test_hidden_states_are_in_the_order_of_the_tokens(make: Any) -> None:
    tower = make().model.visual
    with torch.no_grad():
        found = lod.vlm.encode(tower, torch.randn(2, 3, 48, 80), Whole(15, shuffled=True))
        merged = tower.merger(found.hidden.flatten(0, 1)).view(2, 15, 32)
    assert found.merged is not None and torch.allclose(merged, found.merged, atol=1e-5)


def looked_at(sites: torch.Tensor, size: tuple[int, int] = (80, 80)) -> list[list[int]]:
    """The tokens whose pixels each token depends on, in a tower of windows of 2 x 2 units alone."""
    tower, image = qwen25().model.visual, torch.randn(len(sites), 3, *size)
    tower.fullatt_block_indexes = []
    found = []
    for token in range(sites.shape[1]):
        patches = lod.gather_patches(image, sites, 16).requires_grad_()
        tokens = lod.TokenSet(sites, torch.ones(sites.shape[:2]), patches, 16)
        lod.vlm.adapter_for(tower)(tokens, size).features[0, token].sum().backward()
        assert patches.grad is not None
        found.append((patches.grad[0].abs().amax((1, 2, 3)) > 0).nonzero()[:, 0].tolist())
    return found


def test_a_token_attends_in_the_window_of_its_centre() -> None:
    """As in the model on the full grid, where one is missing, and where one is coarse."""
    whole = Whole(25)(torch.rand(1, 3, 80, 80)).sites
    windows = [[n for n in range(25) if (n // 10, n % 5 // 2) == (m // 10, m % 5 // 2)] for m in range(25)]
    assert looked_at(whole) == windows
    assert looked_at(whole[:, :24]) == [[n for n in window if n < 24] for window in windows[:24]]
    coarse = whole.clone()
    coarse[0, 7] = torch.tensor([0.61, 0.2, 1.0])  # from the second window of the first row to the same
    assert looked_at(coarse)[7] == windows[7]


def test_windows_of_a_coarse_set_are_those_of_a_smaller_picture() -> None:
    """A whole level in the windows that the picture of that size has, each picture of a batch by its own level."""
    small = Whole(16)(torch.rand(1, 3, 64, 64)).sites
    coarse = small.clone()
    coarse[..., 2] = 1
    windows = [[n for n in range(16) if (n // 8, n % 4 // 2) == (m // 8, m % 4 // 2)] for m in range(16)]
    assert looked_at(coarse, (128, 128)) == windows
    assert looked_at(torch.cat([coarse, small]), (128, 128)) == windows


@each_model
def test_either_attention_and_a_free_set(make: Any) -> None:
    eager, fused = make("eager"), make("sdpa")
    fused.load_state_dict(eager.state_dict())
    image = torch.randn(2, 3, 96, 128)
    saccades = lod.vlm.Saccades(lod.allocate.FoveatedPyramid(10, patch=16), base=4, budget=10)
    with torch.no_grad():
        one, other = (lod.vlm.encode(model, image, saccades) for model in (eager, fused))
    assert one.merged is not None and other.merged is not None and one.merged.shape == (2, 14, 32)
    assert torch.allclose(one.merged, other.merged, atol=1e-4)


@each_model
def test_a_batch_is_its_images(make: Any) -> None:
    """No token sees another picture's."""
    model, image = make(), torch.randn(2, 3, 96, 128)
    allocator = lod.allocate.FoveatedPyramid(10, patch=16)
    with torch.no_grad():
        both = lod.vlm.encode(model, image, allocator)
        alone = lod.vlm.encode(model, image[1], allocator)
    assert both.merged is not None and alone.merged is not None and alone.merged.shape == (10, 32)
    assert torch.allclose(both.merged[1], alone.merged, atol=1e-5)
    assert all(torch.allclose(a[1], b, atol=1e-5) for a, b in zip(both.deepstack, alone.deepstack, strict=True))


def test_convention_the_patches_of_a_coarse_unit() -> None:
    """A unit of level 1 over units 0 and 1: its patches stand two patches apart, in the middle of 2 x 2 each."""
    adapter = lod.vlm.adapter_for(qwen3())
    at = adapter._positions(torch.tensor([[[0.25, 0.25, 1.0], [7 / 8, 1 / 8, 0.0]]]), (64, 64))
    assert at.tolist() == [
        [[0.5, 0.5], [0.5, 2.5], [2.5, 0.5], [2.5, 2.5], [0.0, 6.0], [0.0, 7.0], [1.0, 6.0], [1.0, 7.0]]
    ]


@each_model
def test_gradients_reach_the_pixels(make: Any) -> None:
    image = torch.randn(1, 3, 64, 64, requires_grad=True)
    lod.vlm.encode(make(), image, lod.allocate.FoveatedPyramid(7, patch=16)).features.square().sum().backward()
    assert image.grad is not None and torch.isfinite(image.grad).all() and float(image.grad.abs().max()) > 0


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@each_model
def test_the_full_grid_gives_the_untouched_models_words(make: Any, padded: bool) -> None:
    """Logits and generated tokens, with rows of unequal length, from any number of placeholders."""
    model, image = make(), torch.randn(2, 3, 48, 112)
    pixels, grid = pixel_values(image)
    ids = prompt(21, 2)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :2], mask[0, :2] = PAD, 0
    kinds = (ids == IMAGE).int()
    own = {
        "input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }  # fmt: skip
    short = torch.cat([ids[:, :4], ids[:, 24:]], dim=1), torch.cat([mask[:, :4], mask[:, 24:]], dim=1)
    with torch.no_grad():
        encoded = lod.vlm.encode(model, image, Whole(21))
        expected = model(**own).logits
        places, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grid, attention_mask=mask)
        for given, kept in ((ids, mask), short):
            inputs = lod.vlm.inputs_for(model, given, encoded, kept)
            logits = model(**inputs).logits
            assert torch.equal(inputs["position_ids"][:, mask.bool()], places[:, mask.bool()])
            assert torch.allclose(logits[mask.bool()], expected[mask.bool()], atol=1e-4)
        words = model.generate(**own, max_new_tokens=5, do_sample=False)
        assert torch.equal(
            lod.vlm.generate(model, *short[:1], encoded, short[1], max_new_tokens=5, do_sample=False), words
        )
    assert float(expected.std()) > 0.1, "too flat to tell anything"


@pytest.mark.parametrize("right", [False, True])
@each_model
def test_several_pictures_of_several_sizes_in_a_prompt(make: Any, right: bool) -> None:
    """Two in one row, one in the next, none in the last: words, positions and labels of the untouched model."""
    model = make()
    images = [torch.randn(3, *size) for size in ((48, 112), (80, 80), (64, 32))]
    sides = [pixel_values(image[None]) for image in images]
    counts = [21, 25, 8]
    texts = torch.randint(WORDS, (3, 9))
    runs = [[IMAGE] * count for count in counts]
    one, two, three = texts.tolist()
    rows = [[*one[:3], *runs[0], *one[3:5], *runs[1], *one[5:]], [*two[:4], *runs[2], *two[4:]], three]
    longest = max(map(len, rows))

    def laid_out(rows: list[list[int]], pad: int) -> torch.Tensor:
        more = [[pad] * (longest - len(row)) for row in rows]
        return torch.tensor([[*row, *end] if right else [*end, *row] for row, end in zip(rows, more, strict=True)])

    ids, mask = laid_out(rows, PAD), laid_out([[1] * len(row) for row in rows], 0)
    kinds, grid = (ids == IMAGE).int(), torch.cat([grid for _, grid in sides])
    with torch.no_grad():
        expected = model(
            input_ids=ids, attention_mask=mask, pixel_values=torch.cat([pixels for pixels, _ in sides]),
            image_grid_thw=grid, mm_token_type_ids=kinds,
        ).logits  # fmt: skip
        places, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grid, attention_mask=mask)
        encoded = [lod.vlm.encode(model, image, Whole(n)) for image, n in zip(images, counts, strict=True)]
        labels = torch.where(ids == IMAGE, IMAGE, ids)
        inputs = lod.vlm.inputs_for(model, ids, encoded, mask, labels=labels)
        assert torch.equal(inputs["input_ids"], ids) and torch.equal(inputs["attention_mask"], mask)
        there = mask.bool()
        assert torch.equal(inputs["position_ids"][:, there], places[:, there])
        assert torch.allclose(model(**inputs).logits[there], expected[there], atol=1e-4)
        assert torch.equal(inputs["labels"], torch.where(ids == IMAGE, -100, ids))
        # From a placeholder each, rows of other lengths grow to the same ones.
        short = [[*one[:3], IMAGE, *one[3:5], IMAGE, *one[5:]], [*two[:4], IMAGE, *two[4:]], three]
        longest = 11
        given, kept = laid_out(short, PAD), laid_out([[1] * len(row) for row in short], 0)
        again = lod.vlm.inputs_for(model, given, encoded, kept, labels=torch.where(kept > 0, given, -100))
        own = again["attention_mask"].bool()
        assert own.sum(1).tolist() == there.sum(1).tolist() and bool(own[:, 0].all()) is right
        assert torch.equal(again["input_ids"][own], ids[there])
        assert torch.allclose(model(**again).logits[own], expected[there], atol=1e-4)
        assert (again["labels"][~own] == -100).all()
        assert torch.equal(again["labels"][own], torch.where(ids == IMAGE, -100, ids)[there])


@each_model
def test_pictures_of_several_sizes_are_one_batch(make: Any) -> None:
    model, images = make(), [torch.rand(3, *size) for size in ((96, 128), (80, 80), (64, 176))]
    allocator = lod.allocate.FoveatedPyramid(10, patch=16)
    with torch.no_grad():
        found = lod.vlm.encode(model, images, allocator)
        alone = [lod.vlm.encode(model, image, allocator) for image in images]
        assert found.sizes == ((96, 128), (80, 80), (64, 176))
        for index, one in enumerate(alone):
            assert torch.allclose(found.features[index], one.features, atol=1e-5)
            assert all(
                torch.allclose(a[index], b, atol=1e-5) for a, b in zip(found.deepstack, one.deepstack, strict=True)
            )
        ids = prompt(1, 3)
        both, apart = (lod.vlm.inputs_for(model, ids, encoded) for encoded in (found, alone))
        assert torch.equal(both["position_ids"], apart["position_ids"])
        assert torch.allclose(model(**both).logits, model(**apart).logits, atol=1e-4)


@each_model
def test_tokens_in_reading_order_are_what_the_model_itself_reads(make: Any) -> None:
    """Which an order by relevance is not, for a language model that looks back."""
    model, image, ids = make(), torch.rand(2, 3, 64, 96), prompt(1, 2)
    with torch.no_grad():
        found = lod.vlm.encode(model, image, lod.allocate.GridTopK(24, patch=16))
        ordered = found.take(found.tokens.reading_order())
        rows = lod.vlm.encode(model, image, lod.allocate.Downsample(24, patch=16, rows=4))
        assert torch.equal(ordered.tokens.sites, rows.tokens.sites) and ordered.size == found.size
        assert torch.allclose(ordered.hidden, rows.hidden, atol=1e-5)
        assert torch.allclose(ordered.features, rows.features, atol=1e-5)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ordered.deepstack, rows.deepstack, strict=True))
        logits = [model(**lod.vlm.inputs_for(model, ids, one)).logits for one in (ordered, rows, found)]
        assert torch.allclose(logits[0], logits[1], atol=1e-4) and not torch.allclose(logits[2], logits[1], atol=1e-4)
        few = found.take(torch.tensor([3, 0]))
        assert torch.equal(few.features, found.features[:, [3, 0]]) and len(few.deepstack) == len(found.deepstack)
        assert torch.equal(few.hidden, found.hidden.unflatten(1, (24, -1))[:, [3, 0]].flatten(1, 2))


@each_model
def test_529_tokens_generate(make: Any) -> None:
    """As many words with the cache as without it, sampled by beams too, at whole and at fractional positions."""
    model, image = make(), torch.rand(1, 3, 400, 480)
    saccades = lod.vlm.Saccades(lod.allocate.FoveatedPyramid(patch=16))
    with torch.no_grad():
        encoded = lod.vlm.encode(model, image, saccades, mean=(0.5,) * 3, std=(0.5,) * 3)
        assert encoded.features.shape == (1, 529, 32)
        for rounded in (True, False):
            inputs = lod.vlm.inputs_for(model, prompt(1, 1), encoded, rounded=rounded)
            length = inputs["input_ids"].shape[1]
            assert length == 9 + 529 and inputs["position_ids"].is_floating_point() is not rounded
            words = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            slow = model.generate(**inputs, max_new_tokens=4, do_sample=False, use_cache=False)
            assert words.shape == (1, length + 4) and torch.equal(words, slow)
    beams = lod.vlm.generate(model, prompt(1, 1), encoded, max_new_tokens=3, num_beams=2, do_sample=False)
    assert beams.shape == (1, length + 3)


@each_model
def test_what_was_merged_or_pruned_generates(make: Any) -> None:
    """The baselines on the adapters: a token stands at the site of the one that others were merged into."""
    model, image = make(), torch.rand(2, 3, 96, 128)
    with torch.no_grad():
        encoded = lod.vlm.encode(model, image, Whole(48, shuffled=True))
        features = encoded.features
        cuts = {
            "ToMe": lod.vlm.bipartite_merge(features, features, 28),
            "VisionZip": lod.vlm.vision_zip(features, features, features.norm(dim=-1), 15, 5),
        }
        for name, by in cuts.items():
            few = encoded.reduced(by)
            assert few.features.shape == (2, 20, 32) and torch.equal(few.features, by.tokens), name
            assert torch.equal(few.tokens.sites, encoded.tokens.sites[0, by.indices]) and few.tokens.budget == 20
            assert few.hidden.shape == (2, 80, 32) and [one.shape for one in few.deepstack] == [
                (2, 20, 32) for _ in encoded.deepstack
            ]
            words = lod.vlm.generate(model, prompt(48, 2), few, max_new_tokens=3, do_sample=False)
            assert words.shape == (2, 9 + 20 + 3)
        ids = prompt(48, 2)
        same = encoded.reduced(lod.vlm.bipartite_merge(features, features, 0))
        assert torch.equal(same.hidden, encoded.hidden)
        given, whole = (lod.vlm.inputs_for(model, ids, one) for one in (same, encoded))
        assert torch.equal(model(**given).logits, model(**whole).logits)
    with pytest.raises(InputError, match=r"\(2, 48\) tokens were merged, and encoded are \(2, 20\)"):
        encoded.reduced(cuts["ToMe"]).reduced(cuts["ToMe"])


def test_positions_of_text_and_sites() -> None:
    model = qwen25()
    image = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        encoded = lod.vlm.encode(model, image, lod.vlm.Saccades(lod.allocate.GridTopK(2, patch=16), base=1, budget=2))
    inputs = lod.vlm.inputs_for(model, prompt(7, 1), encoded, rounded=False)
    time, rows, columns = inputs["position_ids"][:, 0]
    assert time.tolist() == [0, 1, 2, 3, 4, 4, 4, 10, 11, 12, 13, 14]  # the picture takes 6, its longer side
    assert rows[4] == 4 + 1.5 and columns[4] == 4 + 2.5  # the whole picture, in its middle
    assert torch.equal(rows[:4], time[:4]) and torch.equal(columns[7:], time[7:])


def test_what_does_not_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = qwen25(), qwen3()
    image = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        encoded = lod.vlm.encode(model, image, Whole(16))
        deep = lod.vlm.encode(other, image, Whole(16))
    ids = prompt(16, 2)
    twice = torch.cat([ids, ids], dim=1)
    for arguments, hint in (
        ((model.model.visual, ids, encoded), "does not generate"),
        ((model, ids, deep), "not of the tower"),
        ((other, ids, encoded), "not of the tower"),
        ((model, ids[:1], encoded), "have 1 runs of image tokens .* there are 2 pictures"),
        ((model, twice, encoded), "have 4 runs of image tokens .* there are 2 pictures"),
        ((model, torch.randint(WORDS, (2, 9)), encoded), "have 0 runs of image tokens"),
        ((model, ids, [encoded, encoded]), "have 2 runs .* there are 4 pictures"),
        ((model, ids, [encoded.tokens]), "encoded is .*TokenSet.*; expected what gpu_lod.vlm.encode"),
        ((model, ids.float(), encoded), "integers"),
        ((model, ids, encoded, torch.ones(2, 3)), "attention_mask"),
        ((model, ids, encoded, None, True, torch.ones(2, 3)), r"labels is \(2, 3\)"),
    ):
        with pytest.raises(InputError, match=hint):
            lod.vlm.inputs_for(*arguments)
    with pytest.raises(InputError, match="position_ids is given, which is made of the encoded tokens"):
        lod.vlm.generate(model, ids, encoded, position_ids=ids)
    model.config.text_config.max_position_embeddings = 20
    with pytest.raises(LimitError, match="positions for 20"):
        lod.vlm.inputs_for(model, ids, encoded)
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids: None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[vlm\]'"):
        lod.vlm.inputs_for(model, ids, encoded)


@each_model
def test_a_batch_without_pictures(make: Any) -> None:
    model, ids = make(), torch.randint(WORDS, (2, 5))
    with torch.no_grad():
        found = lod.vlm.generate(model, ids, [], max_new_tokens=3, do_sample=False)
        assert torch.equal(found, model.generate(input_ids=ids, max_new_tokens=3, do_sample=False))
    with pytest.raises(InputError, match="expected integers"):
        lod.vlm.inputs_for(model, ids[:0], [])
    for name in ("attention_mask", "labels"):
        with pytest.raises(InputError, match=f"{name} is"):
            lod.vlm.inputs_for(model, ids, [], **{name: 5})
    with pytest.raises(InputError, match="does not generate from token sets"):
        lod.vlm.generate(torch.nn.Linear(2, 2), ids, [])


def test_windows_of_levels_between_are_those_of_the_nearest() -> None:
    """A little above level 0, windows are still those of the picture itself."""
    sites = Whole(16)(torch.rand(1, 3, 64, 64)).sites
    sites[..., 2] = 0.45
    windows = [[n for n in range(16) if (n // 8, n % 4 // 2) == (m // 8, m % 4 // 2)] for m in range(16)]
    assert looked_at(sites, (64, 64)) == windows


# -- attention ---------------------------------------------------------------------------------------------------------


def order_in(tower: Any, grid: torch.Tensor) -> torch.Tensor:
    """The units of pictures of one size in the row that a tower makes of them: Qwen2.5-VL has them window by window,
    each of 2 x 2."""
    rows, columns = (int(side) // 2 for side in grid[0, 1:])
    order = torch.arange(rows * columns)
    if hasattr(tower, "fullatt_block_indexes"):
        window = order // columns // 2 * columns + order % columns // 2
        order = window.argsort(stable=True)
    return torch.cat([order + picture * len(order) for picture in range(len(grid))])


def maps_of(tower: Any, pixels: torch.Tensor, grid: torch.Tensor, layer: int) -> torch.Tensor:
    """[B, heads, T, T] that the model's own eager attention makes of whole pictures, in the order of the units."""
    module, seen = sys.modules[type(tower).__module__], []
    own = module.eager_attention_forward

    def kept(part: Any, *inputs: Any, **how: Any) -> Any:
        found = own(part, *inputs, **how)
        if part is tower.blocks[layer].attn:
            seen.append(found[1][0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", kept)
        tower.set_attn_implementation("eager")
        tower(pixels, grid)
        tower.set_attn_implementation("sdpa")
    # Windows of each picture lie one after the other.
    batch, total = len(grid), sum(one.shape[-1] for one in seen)
    whole, begin = pixels.new_zeros(seen[0].shape[0], total, total), 0
    for one in seen:
        whole[:, begin : begin + one.shape[-1], begin : begin + one.shape[-1]] = one
        begin += one.shape[-1]
    order = order_in(tower, grid)
    back = (4 * order.argsort()[:, None] + torch.arange(4)).flatten()
    whole = whole[:, back][:, :, back].unflatten(1, (batch, -1)).unflatten(3, (batch, -1))
    return torch.stack([whole[:, index, :, index] for index in range(batch)])


@pytest.mark.parametrize("layer", [0, 1, 2])
@each_model
def test_attention_of_tokens(make: Any, layer: int) -> None:
    """With all units, in any order, the maps, keys and states of the untouched tower."""
    model = make()
    tower, size, entered, left = model.model.visual, (48, 80), [], []
    image, part = torch.randn(2, 3, *size), tower.blocks[layer]
    pixels, grid = pixel_values(image)
    with torch.no_grad():
        expected = maps_of(tower, pixels, grid, layer)
        hook = part.register_forward_hook(lambda module, inputs, output: left.append(output))
        other = part.attn.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
        whole = Whole(15)
        lod.vlm.encode(tower, image, whole)
        hook.remove()
        other.remove()
        allocator = Whole(15, shuffled=True)
        tokens = allocator(image)
        found = lod.vlm.vision_attention(model, tokens, layer, size=size)
        in_order = lod.vlm.vision_attention(tower, whole(image), layer - 3, size=[size, size])
    places = (4 * allocator.order[:, None] + torch.arange(4)).flatten()
    torch.testing.assert_close(in_order.attention, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.attention, expected[..., places, :][..., places], atol=1e-5, rtol=1e-4)
    back = order_in(tower, grid).argsort()
    keys = entered[0] @ part.attn.qkv.weight[32:64].T + part.attn.qkv.bias[32:64]
    assert in_order.keys.shape == in_order.hidden.shape == (2, 60, 32)
    for one, others, row in ((in_order.keys, found.keys, keys), (in_order.hidden, found.hidden, left[0])):
        torch.testing.assert_close(one, row.unflatten(0, (30, 4))[back].view(2, 60, 32), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(others, one[:, places], atol=1e-5, rtol=1e-4)
    windows = make is qwen25 and layer != 1
    assert bool((found.attention == 0).any()) is windows
    torch.testing.assert_close(found.attention.sum(-1), torch.ones(2, 2, 60))
    assert not part.attn._forward_pre_hooks


@each_model
def test_fewer_tokens_by_attention(make: Any) -> None:
    model, image, size = make(), torch.randn(2, 3, 64, 96), (64, 96)
    with torch.no_grad():
        seen = lod.vlm.encode(model, image, lod.allocate.FoveatedPyramid(14, patch=16))
        look = lod.vlm.vision_attention(model, seen.tokens, 1, size=seen.size)
        received = lod.vlm.attention_received(look.attention).unflatten(1, (14, 4)).mean(2)
        keys = look.keys.unflatten(1, (14, 4)).mean(2)
        fewer = seen.reduced(lod.vlm.vision_zip(seen.features, keys, received, 6, 2))
        said = lod.vlm.generate(model, prompt(3, 2), fewer, max_new_tokens=2, do_sample=False)
        one = lod.vlm.vision_attention(model, seen.tokens.unstack()[1], 1, size=size)
    assert said.shape == (2, 9 + 8 + 2)
    torch.testing.assert_close(one.attention[0], look.attention[1], atol=1e-5, rtol=1e-4)


def test_attention_asks_for_tokens() -> None:
    tower = qwen25().model.visual
    pixels, grid = pixel_values(torch.randn(1, 3, 48, 80))
    with pytest.raises(UnsupportedError, match="Qwen's towers with tokens"):
        lod.vlm.vision_attention(tower, pixels, grid_thw=grid)
    with pytest.raises(InputError, match="has 3, from 0"):
        lod.vlm.vision_attention(tower, Whole(15)(torch.randn(1, 3, 48, 80)), 3, size=(48, 80))
    tokens = Whole(15)(torch.randn(1, 3, 48, 80))
    tower.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lod.vlm.vision_attention(tower, tokens, 0, size=(48, 80))
    assert not tower.blocks[0].attn._forward_pre_hooks
