"""The token memory: exactly K, little churn, what moves is followed, and patches read when they must be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import gpu_lod as lod
from gpu_lod.allocate import GridTopK
from gpu_lod.errors import InputError
from gpu_lod.saliency import luma
from gpu_lod.vlm import Streamed, TokenMemory, saliency_relevance, streaming

BLANK = torch.zeros(1, 3, 112, 112)  # 8 x 8 patches


def panned(photo: torch.Tensor, frames: int, step: int) -> list[torch.Tensor]:
    """Frames of 112 x 112 pixels, a patch of 7 having the detail that one of 14 has in the photograph."""
    half = photo[None, :, 100:324:2, 60::2]
    return [half[..., step * t : step * t + 112] for t in range(frames)]


def cells(found: Streamed, columns: int) -> list[set[int]]:
    """The patches of each image, row by row, on a grid that divides the picture."""
    x, y, level = found.tokens.sites.unbind(-1)
    assert float(level.abs().max()) == 0
    return [set(row) for row in ((y * columns).long() * columns + (x * columns).long()).tolist()]


def test_what_is_done_to_a_result_is_not_in_the_next() -> None:
    """Patches that stay are held; a caller may normalise what it was given in place."""
    memory, frame = TokenMemory(6, patch=8), torch.rand(3, 32, 40)
    first = memory.update(frame).tokens.patches
    before = first.clone()
    first.sub_(0.5).div_(0.25)
    again = memory.update(frame)
    assert not again.refreshed.any() and torch.equal(again.tokens.patches, before)


def test_an_update_that_is_cut_short_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next would hold other sites in slots that nobody is told of, with the patches that were there before."""
    frame, relevance = torch.rand(3, 32, 40), torch.arange(20.0).view(4, 5)
    memories = [TokenMemory(6, patch=8, patience=2) for _ in range(2)]
    for memory in memories:
        memory.update(frame, relevance)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(memories[0], "_gathered", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        memories[0].update(frame, -relevance)
    found, expected = (memory.update(frame, -relevance) for memory in memories)
    assert expected.replaced.any() and torch.equal(found.replaced, expected.replaced)
    assert torch.equal(found.refreshed, expected.refreshed)
    assert torch.equal(found.tokens.patches, lod.gather_patches(frame, found.tokens.sites, 8))


def test_hysteresis_lessens_churn(photo: torch.Tensor) -> None:
    """Over a panned photograph, with a scorer's noise and without."""
    frames = panned(photo, 8, 2)
    saliency = [saliency_relevance(frame, 7) for frame in frames]
    for noise, share in ((0.0, 0.75), (0.5, 0.5)):
        churn = []
        for margin in (0.0, 1.0):
            torch.manual_seed(1)
            memory, total = TokenMemory(64, 7, margin=margin), 0.0
            for i, relevance in enumerate(saliency):
                shaken = relevance + noise * relevance.std() * torch.randn_like(relevance)
                found = memory.update(frames[i], shaken)
                total += float(found.churn) if i else 0.0
            churn.append(total / (len(frames) - 1))
        assert 0 < churn[1] < share * churn[0], (noise, churn)


def test_without_margin_it_is_grid_top_k(photo: torch.Tensor) -> None:
    memory = TokenMemory(40, 7, margin=0.0)
    for frame in panned(photo, 5, 4):
        found = memory.update(frame)
        sites = GridTopK(40, 7)(frame).sites
        assert torch.equal(found.tokens.sites[0].unique(dim=0), sites[0].unique(dim=0))


def test_a_moving_object_is_followed(photo: torch.Tensor) -> None:
    """Of the 3 x 3 patches that it covers whole, all are resident in every frame, whatever the margin."""
    memory = TokenMemory(25, 7, margin=1.0)
    background = photo[None, :, 100:212, 60:172]
    for t in range(14):
        frame = background.clone()
        left, top = 4 * t, 30 + 2 * t
        frame[..., top : top + 28, left : left + 28] = torch.tensor([255, 50, 20], dtype=torch.uint8)[:, None, None]
        thing = torch.zeros(1, 112, 112)
        thing[:, top : top + 28, left : left + 28] = 1
        found = memory.update(frame, thing + 0.1 * torch.rand(1, 112, 112))
        whole = {
            row * 16 + column
            for row in range(16)
            for column in range(16)
            if top <= row * 7 <= top + 21 and left <= column * 7 <= left + 21
        }
        assert len(whole) >= 9 and whole <= cells(found, 16)[0]


@settings(max_examples=20)
@given(
    st.integers(1, 3), st.integers(1, 64), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([None, 1, 3]),
    st.sampled_from(["noise", "ties", "infinities"]), st.integers(0, 2**20),
)  # fmt: skip
def test_exactly_k(batch: int, budget: int, margin: float, patience: int | None, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    image = torch.zeros(batch, 1, 32, 32)
    one, other = (TokenMemory(budget, 4, margin=margin, patience=patience) for _ in range(2))
    before: list[set[int]] = []
    slots = torch.zeros(0)
    for t in range(4):
        relevance = torch.randn(batch, 8, 8)
        relevance = relevance.round() if kind == "ties" else relevance
        if kind == "infinities":
            relevance[:, t], relevance[:, :, t] = math.inf, -math.inf
        found = one.update(image, relevance)
        now = cells(found, 8)
        assert found.tokens.sites.shape == (batch, budget, 3) and all(len(held) == budget for held in now)
        scores = [[relevance[i].flatten()[int(c)] for c in _cells_of(found, 8)[i]] for i in range(batch)]
        assert torch.equal(found.tokens.scores, torch.tensor(scores))
        if before:
            assert found.churn.tolist() == pytest.approx(
                [len(a - b) / budget for a, b in zip(now, before, strict=True)]
            )
            stayed = ~found.replaced
            assert torch.equal(found.tokens.sites[stayed], slots[stayed]), "residents keep their slots"
        else:
            assert bool(found.replaced.all()) and found.churn.tolist() == [1] * batch
        again = other.update(image, relevance)
        assert torch.equal(again.tokens.sites, found.tokens.sites), "the same frames, the same memory"
        before, slots = now, found.tokens.sites


def _cells_of(found: Streamed, columns: int) -> torch.Tensor:
    x, y, _ = found.tokens.sites.unbind(-1)
    return (y * columns).long() * columns + (x * columns).long()


def test_each_video_for_itself() -> None:
    together, alone = TokenMemory(9), TokenMemory(9)
    for _ in range(5):
        relevance = torch.rand(3, 8, 8)
        pair = together.update(BLANK.expand(3, -1, -1, -1), relevance)
        single = alone.update(BLANK[0], relevance[1])
        assert single.tokens.sites.shape == (9, 3) and single.churn.shape == ()
        assert torch.equal(single.tokens.sites, pair.tokens.sites[1]) and single.churn == pair.churn[1]


def grid(**values: float) -> torch.Tensor:
    """Relevance of 8 x 8 patches whose standard deviation is about 1, with some cells given."""
    relevance = torch.tensor([1.0, -1.0]).repeat(32).view(1, 64) * 1.0
    for name, value in values.items():
        relevance[0, int(name[1:])] = value
    return relevance.view(1, 8, 8)


def test_the_margin_is_in_deviations() -> None:
    for units in (1.0, 1e-3, 1e4):
        memory = TokenMemory(1, margin=2.0, patience=None)
        start = grid(c5=3.0, c9=2.0)
        spread = float(start.std(unbiased=False))
        memory.update(BLANK, units * start)
        close = grid(c5=3.0, c9=3.0 + 1.8 * spread)
        assert cells(memory.update(BLANK, units * close), 8) == [{5}]
        far = grid(c5=3.0, c9=3.0 + 2.6 * spread)
        assert cells(memory.update(BLANK, units * far), 8) == [{9}]


def test_patience() -> None:
    """A newcomer that is a little better gets in when it has been so for some frames in a row."""
    better, worse = grid(c5=3.0, c9=3.1), grid(c5=3.1, c9=3.0)
    for patience, enters in ((3, 3), (1, 1), (None, 99)):
        memory = TokenMemory(1, margin=2.0, patience=patience)
        memory.update(BLANK, worse)
        for frame in range(1, 7):
            assert cells(memory.update(BLANK, better), 8) == [{9 if frame >= enters else 5}], (patience, frame)
    memory = TokenMemory(1, margin=2.0, patience=3)
    memory.update(BLANK, worse)
    for frame in range(12):
        assert cells(memory.update(BLANK, worse if frame % 3 == 2 else better), 8) == [{5}], "flicker never gets in"


def test_masked_cells_do_not_stop_it() -> None:
    memory = TokenMemory(1, margin=0.5, patience=None)
    start, after = grid(c5=3.0), grid(c5=-1.0, c9=9.0)
    start[0, 7], after[0, 7] = -math.inf, -math.inf
    memory.update(BLANK, start)
    assert cells(memory.update(BLANK, after), 8) == [{9}]


# -- what is read ------------------------------------------------------------------------------------------------------


def test_patches_are_read_when_their_content_changed(photo: torch.Tensor) -> None:
    frame = photo[None, :, 100:212, 200:312].clone()
    relevance = torch.arange(64.0).view(1, 8, 8)  # patches 54 to 63 are resident, the most relevant first
    memory = TokenMemory(10, motion=0.05)
    first = memory.update(frame, relevance)
    assert bool(first.refreshed.all())
    assert torch.equal(first.tokens.patches, lod.gather_patches(frame, first.tokens.sites, 14))
    still = memory.update(frame, relevance)
    assert not still.refreshed.any() and torch.equal(still.tokens.patches, first.tokens.patches)
    changed = frame.clone()
    changed[..., 98:112, 98:112] = 255 - changed[..., 98:112, 98:112]  # patch 63, the first slot
    changed[..., :14, :14] = 0  # patch 0, nobody's
    seen = memory.update(changed, relevance)
    assert seen.refreshed[0].tolist() == [True] + [False] * 9 and not seen.replaced.any()
    assert torch.equal(seen.tokens.patches, lod.gather_patches(changed, seen.tokens.sites, 14))
    assert torch.equal(first.tokens.patches, lod.gather_patches(frame, first.tokens.sites, 14)), "old ones stay"
    asked = memory.update(changed, relevance, refresh=True)
    assert bool(asked.refreshed.all()) and not asked.replaced.any()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_change_is_seen_in_every_channel(channels: int) -> None:
    """One that changes by itself, by more than the threshold or by less; bytes do not wrap round."""
    for channel in range(channels):
        for up in (True, False):
            for change, seen in ((30, True), (20, False)):
                frame = torch.full((1, channels, 28, 42), 200 if up else 30, dtype=torch.uint8)
                after = frame.clone()
                after[:, channel, 14:, 28:] += change if up else -change  # the last of 6 patches
                memory, floats = (TokenMemory(6, motion=25 / 255) for _ in range(2))
                relevance = torch.arange(6.0).view(1, 2, 3)  # the last one is in the first slot
                memory.update(frame, relevance)
                floats.update(frame / 255, relevance)
                expected = [[seen] + [False] * 5]
                assert memory.update(after, relevance).refreshed.tolist() == expected
                assert floats.update(after / 255, relevance).refreshed.tolist() == expected


def test_colours_of_equal_luma_are_another_content() -> None:
    red, green = torch.zeros(1, 3, 28, 28), torch.zeros(1, 3, 28, 28)
    red[:, 0], green[:, 1] = 0.5, 0.5 * 0.299 / 0.587
    assert torch.allclose(luma(red[0]), luma(green[0]), atol=1e-6)
    memory = TokenMemory(4)
    memory.update(red)
    found = memory.update(green)
    assert bool(found.refreshed.all()) and torch.equal(found.tokens.patches[0, 0], green[0, :, :14, :14])


def test_slots_keep_their_place_and_order_is_by_relevance() -> None:
    memory = TokenMemory(5, margin=2.0)
    for batch in (2, None):
        memory.reset()
        image = BLANK.expand(batch, -1, -1, -1) if batch else BLANK[0]
        for _ in range(3):
            relevance = torch.rand(*([batch] if batch else []), 8, 8)
            found = memory.update(image, relevance)
        scores = found.tokens.scores
        assert not torch.equal(scores, scores.sort(descending=True).values), "slots are in no order of score"
        assert torch.equal(scores.take_along_dim(found.order, -1), scores.sort(descending=True).values)
        assert found.order.shape == scores.shape


def test_what_it_is_made_of_is_in_its_name() -> None:
    memory = TokenMemory(5, 16, "max", 1, None, 0.1, (0.5,), (0.2,))
    text = "budget=5, patch=16, pool='max', margin=1.0, patience=None, motion=0.1, mean=(0.5,), std=(0.2,)"
    assert repr(memory) == f"TokenMemory({text})"
    assert repr(eval(repr(memory))) == repr(memory)


def test_patches_can_be_embedded_alone() -> None:
    """What each patch gives by itself may be kept slot by slot, bit by bit."""
    memory, embed = TokenMemory(6, patch=8, margin=0.0), torch.nn.Conv2d(3, 5, 8)
    frame, held, kept = torch.rand(3, 32, 40), torch.zeros(6, 5), 0
    with torch.no_grad():
        for t in range(5):
            frame[:, :8, 8 * t :] = torch.rand(3, 8, 40 - 8 * t)
            seen = memory.update(frame, torch.rand(4, 5))
            held[seen.refreshed] = embed(seen.tokens.patches[seen.refreshed]).flatten(1)
            assert torch.allclose(held, embed(seen.tokens.patches).flatten(1), atol=1e-6)
            kept += int((~seen.refreshed).sum())
    assert kept > 0


def test_results_can_be_saved(tmp_path: Path) -> None:
    found = TokenMemory(5).update(BLANK)
    torch.save(found, tmp_path / "seen.pt")
    loaded = torch.load(tmp_path / "seen.pt", weights_only=True)
    assert isinstance(loaded, Streamed) and torch.equal(loaded.tokens.patches, found.tokens.patches)
    assert torch.equal(loaded.order, found.order)


def test_nothing_is_kept_for_gradients() -> None:
    memory = TokenMemory(4)
    for _ in range(2):
        relevance = torch.rand(1, 8, 8, requires_grad=True)
        found = memory.update(BLANK.clone().requires_grad_(), relevance).tokens
    assert found.patches is not None and not found.patches.requires_grad
    found.scores.sum().backward()
    assert relevance.grad is not None and float(relevance.grad.sum()) == 4


def test_slow_change_adds_up() -> None:
    memory = TokenMemory(64, motion=0.05)
    refreshed = []
    for t in range(9):
        frame = BLANK + 0.02 * t
        found = memory.update(frame, torch.rand(1, 8, 8))
        refreshed.append(bool(found.refreshed.all()))
        assert found.tokens.patches is not None
        assert float((found.tokens.patches - 0.02 * t).abs().max()) <= 0.05 + 1e-5, "never further behind"
    assert refreshed == [True, False, False, True, False, False, True, False, False]


def test_a_broken_frame_is_not_kept(photo: torch.Tensor) -> None:
    """NaN is no small change, nor is the difference of infinities."""
    frame, relevance = photo.float() / 255, torch.rand(8, 8)
    frame = torch.nn.functional.interpolate(frame[None], (112, 112))[0]
    for broken in (math.nan, math.inf):
        memory = TokenMemory(8)
        memory.update(frame, relevance)
        for _ in range(2):
            memory.update(torch.full_like(frame, broken), relevance)
        assert bool(memory.update(frame, relevance).refreshed.all())
        again = memory.update(frame, relevance)
        assert not bool(again.refreshed.any())
        assert torch.equal(again.tokens.patches, lod.gather_patches(frame, again.tokens.sites, 14))


def test_patches_are_normalised() -> None:
    frame, how = (torch.rand(2, 3, 56, 56) * 255).byte(), {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    memory = TokenMemory(5, **how)
    for _ in range(2):
        tokens = memory.update(frame).tokens
        frame = frame.flip(-1)
    expected = lod.gather_patches(frame.flip(-1), tokens.sites, 14, **how)
    assert tokens.patches.dtype == torch.float32 and torch.equal(tokens.patches, expected)


def test_a_decoder_may_reuse_its_memory() -> None:
    memory, frame = TokenMemory(4), BLANK.clone()
    memory.update(frame)
    frame.fill_(1)
    assert bool(memory.update(frame).refreshed.all())


def test_newcomers_are_read_and_videos_apart(photo: torch.Tensor) -> None:
    """Of two videos one changes three sites, the other one."""
    image = torch.stack([photo[:, :112, :112], photo[:, 200:312, 200:312]])
    memory = TokenMemory(10, margin=0.0)
    relevance = torch.arange(64.0).view(1, 8, 8).repeat(2, 1, 1)
    memory.update(image, relevance)
    relevance.view(2, 64)[0, :3] = 100
    relevance.view(2, 64)[1, 40] = 100
    brighter = image.clamp(max=254) + 1  # too little to read a resident again
    found = memory.update(brighter, relevance)
    assert found.refreshed.sum(1).tolist() == [3, 1] and torch.equal(found.refreshed, found.replaced)
    assert found.churn.tolist() == pytest.approx([0.3, 0.1])
    old, new = (lod.gather_patches(frame, found.tokens.sites, 14) for frame in (image, brighter))
    assert torch.equal(found.tokens.patches, torch.where(found.refreshed[..., None, None, None], new, old))


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (
            lambda memory: memory.update(BLANK.expand(2, -1, -1, -1)),
            r"\(2, 3, .*before were .*\(1, 3, .*reset\(\)",
        ),
        (lambda memory: memory.update(BLANK.half()), r"float16.*were float32.*reset\(\)"),
        (lambda memory: memory.update(BLANK[0, ..., :100]), r"float32 \(3, 112, 100\) on cpu.*reset\(\)"),
        (lambda memory: memory.update(BLANK, torch.rand(1, 7, 8)), r"\(1, 8, 8\)"),
        (lambda memory: memory.update(None), "image is NoneType"),
        (lambda memory: memory.update(BLANK, refresh=torch.tensor([1.0, 2.0])), "refresh is tensor"),
        (lambda memory: TokenMemory(65).update(BLANK), "budget is 65, and there are 64"),
        (lambda memory: TokenMemory(4, margin=-1.0), "0 or more"),
        (lambda memory: TokenMemory(4, patience=0), "patience"),
    ],
)
def test_bad_input(call: Any, hint: str) -> None:
    memory = TokenMemory(4)
    memory.update(BLANK)
    with pytest.raises(InputError, match=hint):
        call(memory)
    memory.reset()
    assert float(memory.update(BLANK[..., :98]).churn) == 1


def test_frames_of_a_video_are_on_one_gpu() -> None:
    """Of its kind alone torch would say that tensors are on several, in the midst of a frame."""
    with FakeTensorMode():
        first, second = (torch.empty(1, 3, 28, 28, device=f"cuda:{index}") for index in (0, 1))
    streaming._same(first, torch.empty_like(first), True)
    with pytest.raises(InputError, match=r"cuda:1.*cuda:0.*reset"):
        streaming._same(second, first, True)


def test_a_still_video_is_read_once_even_if_any_change_counts() -> None:
    memory, frame = TokenMemory(8, motion=0), torch.rand(1, 3, 112, 112)
    memory.update(frame, torch.rand(1, 8, 8))
    still = memory.update(frame, torch.ones(1, 8, 8))
    assert bool((still.refreshed == still.replaced).all())
    after = frame + 1e-3
    assert bool(memory.update(after, torch.ones(1, 8, 8)).refreshed.all())


def test_a_channel_of_bytes_is_255_wide() -> None:
    memory = TokenMemory(4, motion=0.999)
    black = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    memory.update(black, torch.ones(1, 2, 2))
    assert bool(memory.update(~black, torch.ones(1, 2, 2)).refreshed.all())
