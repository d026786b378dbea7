"""Tensors on several devices: by name, and before torch is in the midst of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from elsewhere import DEVICE, Elsewhere

from gpu_lod.errors import InputError
from gpu_lod.vlm import (
    bipartite_merge,
    query_similarity,
    sample_position_table,
    sparse_vlm,
    straight_through_top_k,
    vision_zip,
)

TOKENS, RECEIVED = torch.rand(2, 12, 8), torch.rand(2, 12)
TEXT, LOOKS, MASK = torch.rand(2, 5, 8), torch.rand(2, 5, 12), torch.ones(2, 5, dtype=torch.bool)
MERGED = bipartite_merge(TOKENS, TOKENS, 4)

Move = Callable[[torch.Tensor], torch.Tensor]
MIXED: list[tuple[str, Callable[[Move], Any]]] = [
    ("keys", lambda move: bipartite_merge(TOKENS, move(TOKENS), 4)),
    ("values", lambda move: MERGED.merge(move(TOKENS))),
    ("values", lambda move: MERGED.unmerge(move(TOKENS[:, :8]))),
    ("features", lambda move: straight_through_top_k(RECEIVED, 5).take(move(TOKENS))),
    ("keys", lambda move: vision_zip(TOKENS, move(TOKENS), RECEIVED, 4, 2)),
    ("received", lambda move: vision_zip(TOKENS, TOKENS, move(RECEIVED), 4, 2)),
    ("text", lambda move: sparse_vlm(TOKENS, move(TEXT), LOOKS, 4, 2, MASK)),
    ("attention", lambda move: sparse_vlm(TOKENS, TEXT, move(LOOKS), 4, 2)),
    ("mask", lambda move: sparse_vlm(TOKENS, TEXT, LOOKS, 4, 2, move(MASK))),
    ("query", lambda move: query_similarity(TOKENS, move(TEXT[:, 0]))),
    ("positions", lambda move: sample_position_table(torch.rand(12, 8), move(torch.rand(7, 2)), (3, 4), (3, 4))),
]


@pytest.mark.parametrize(("name", "call"), MIXED)
def test_tensors_on_two_devices(name: str, call: Callable[[Move], Any]) -> None:
    call(lambda tensor: tensor)
    with pytest.raises(InputError, match=f"^{name} is on {DEVICE} and the .* on cpu; move one"):
        call(Elsewhere)


def test_what_is_elsewhere_stays_there() -> None:
    """Else the test above would show nothing."""
    tensor = Elsewhere(torch.rand(3))
    assert tensor.device == DEVICE and (tensor + 1).device == DEVICE
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.rand(3)
