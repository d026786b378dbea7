"""Allocators given what they cannot use: an InputError that says so, and never a wrong result."""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import noise
from torch.utils import _pytree

import gpu_lod as lod
from gpu_lod import allocate, token_files
from gpu_lod.allocate import coverage_loss, dead_bin_loss, repulsion_loss, soft_top_k, tree_cut
from gpu_lod.commands import allocation
from gpu_lod.errors import InputError, UnsupportedError

OTHERS: dict[str, dict[str, Any]] = {
    "AdaptiveStratified": {"width": 8, "hidden": 4, "seed": 1},
    "Downsample": {"rows": 2},
    "FoveatedPyramid": {"e0": 0.2, "max_level": 2},
    "FrequencyAware": {"split": (2, 2, 2, 2)},
    "HeatDiffusion": {"length": 3.0},
    "HybridAtlas": {"background": 0.2, "segments": 5, "compactness": 2.0},
    "LogPolar": {"fovea": 0.5, "radius": 0.2},
    "PseudoLogPolar": {"fovea": 0.5, "sigma": 0.1, "temperatures": (2.0, 0.5)},
    "PyramidTopK": {"weights": (1.0, 0.5), "split": (4, 5)},
    "Random": {"seed": 3},
    "Residual": {"share": 0.5},
    "SoftTopKCoverage": {"bins": (2, 4), "strength": 2.0, "temperature": 0.5},
    "SoftVortex": {"vortices": 3, "radius": 0.2, "twist": 1.0, "width": 0.5},
    "Spiral": {"kind": "fibonacci", "peaks": 2},
    "Stratified": {"strata": (2, 2)},
    "TokenDAG": {"morph": 0.5, "max_level": 3},
    "Voronoi": {"peaks": 2},
    "VortexField": {"vortices": 2, "radius": 0.2},
    "VortexLearned": {"vortices": 2, "radius": 0.2, "temperature": 0.5},
    "Wavelet": {"levels": 2, "wavelet": "db2"},
    "Whirlwind": {"peaks": 2, "floor": 0.2},
}
"""Arguments of their own, none as by default."""
IMAGE, RELEVANCE = noise(2, 3, 56, 56), noise(2, 4, 4)
NAN, INF = math.nan, math.inf


def refuse(hint: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(InputError, match=hint):
        function(*args, **kwargs)


# -- token sets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "hint"),
    [
        (torch.full((2, 16, 2), 7), "int64; expected floating point"),
        (torch.ones(2, 16, 2, dtype=torch.bool), "bool; expected floating point"),
        (torch.ones(3, 16, 2), r"\(3, 16, 2\); expected \[2, 16, D\]"),
        (torch.ones(16, 2), r"\[2, 16, D\]"),
        (torch.ones(7, 2, 16, 2), r"\[2, 16, D\]"),
        (torch.ones(16), r"\[2, 16, D\]"),
        (torch.ones(2, 16, 2, device="meta"), "with data"),
        (torch.ones(2, 16, 2).to_sparse(), "dense"),
        (None, "NoneType"),
        ([[1.0]], "torch.tensor"),
    ],
)
def test_features_that_cannot_be_blended(features: Any, hint: str) -> None:
    refuse(hint, allocate.SoftVortex(3)(IMAGE).blend, features)


@pytest.mark.parametrize("kind", [tuple, torch.tensor, np.array])
@pytest.mark.parametrize("name", ["GridTopK", "FoveatedPyramid", "SoftVortex"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_means_may_be_arrays(name: str, dtype: torch.dtype, kind: Any) -> None:
    image = (IMAGE * 255).byte() if dtype == torch.uint8 else IMAGE
    allocator = allocate.make(name, 6)
    found = allocator(image, mean=kind((0.5, 0.4, 0.3)), std=kind((0.2, 0.2, 0.1))).patches
    expected = allocator(image, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1)).patches
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["GridTopK", "TokenDAG", "LogPolar", "PseudoLogPolar"])
@pytest.mark.parametrize("given", ["image", "relevance", "both"])
def test_vmap_is_refused(name: str, given: str) -> None:
    allocator = allocate.make(name, 4)
    image = None if given == "relevance" and name != "TokenDAG" else IMAGE
    relevance = None if given == "image" else RELEVANCE
    over = tuple(None if value is None else 0 for value in (image, relevance))
    with pytest.raises(UnsupportedError, match="pass all images as one batch"):
        torch.func.vmap(lambda one, its: allocator(one, its).sites, over)(image, relevance)


@pytest.mark.parametrize("name", [name for name in allocate.names() if name != "AdaptiveStratified"])
def test_functional_gradients_are_those_of_autograd(name: str) -> None:
    allocator, image = allocate.make(name, 4), IMAGE.clone().requires_grad_()

    def energy(one: torch.Tensor) -> torch.Tensor:
        patches = allocator(one, RELEVANCE).patches
        assert patches is not None
        return patches.square().sum()

    (expected,) = torch.autograd.grad(energy(image), image)
    torch.testing.assert_close(torch.func.grad(energy)(IMAGE), expected)


@pytest.mark.parametrize("device", [torch.bfloat16, None, "nonsense"])
def test_tokens_go_to_devices_alone(device: Any) -> None:
    tokens = allocate.GridTopK(4)(IMAGE)
    refuse("expected a torch device", tokens.to, device)
    refuse("expected a torch device", allocate.TokenBank(allocate.GridTopK(4), 8)(IMAGE).to, device)
    assert tokens.to("cpu").sites is tokens.sites


@pytest.mark.parametrize(
    ("other", "hint"),
    [
        (lambda one: allocate.GridTopK(5)(IMAGE[0]), r"set 1 has 5 tokens and set 0 4.*take\(torch\.arange"),
        (lambda one: allocate.GridTopK(4, patch=7)(IMAGE[0]), "patches of side 7 and set 0 of 14.*same patch="),
        (lambda one: replace(one, patches=None), "patches of set 1 are None and of set 0 torch.float32"),
        (lambda one: replace(one, patches=one.patches.half()), "float16 .* on cpu and of set 0 torch.float32"),
        (lambda one: replace(one, features=torch.ones(4, 2)), r"features of set 1 are torch.float32 \(4, 2\)"),
        (lambda one: replace(one, scores=one.scores.to("meta")), "scores of set 1 are .*on meta .*on cpu"),
        (lambda one: allocate.GridTopK(4)(IMAGE), r"sites \(2, 4, 3\).*expected unbatched.*unstack\(\)"),
        (lambda one: one.sites, "Tensor.*expected unbatched"),
    ],
)
def test_token_sets_that_are_no_batch(other: Callable[[lod.TokenSet], Any], hint: str) -> None:
    one = allocate.GridTopK(4)(IMAGE[0])
    refuse(hint, lod.TokenSet.stack, [one, other(one)])


def test_what_is_no_stack() -> None:
    refuse("expected unbatched token sets", lod.TokenSet.stack, [])
    refuse("expected unbatched token sets", lod.TokenSet.stack, 7)
    refuse("of one picture; expected a batch", allocate.GridTopK(4)(IMAGE[0]).unstack)


@pytest.mark.parametrize(
    ("indices", "hint"),
    [
        (torch.tensor([0, 4]), "from 0 to 4; expected 0 to 3, those of 4 tokens"),
        (torch.tensor([-1]), "from -1 to -1"),
        (torch.ones(4, dtype=torch.bool), r"bool \(4,\); expected integers \[k\] or \[2, k\].*mask.nonzero"),
        (torch.ones(2), "float32"),
        (torch.zeros(3, 1, dtype=torch.int64), r"\(3, 1\)"),
        (torch.tensor(0), r"\(\)"),
        ("0", "indices is"),
    ],
)
def test_tokens_that_cannot_be_taken(indices: Any, hint: str) -> None:
    refuse(hint, allocate.GridTopK(4)(IMAGE).take, indices)
    if isinstance(indices, torch.Tensor) and indices.ndim == 2:
        refuse(r"expected integers \[k\]\.", allocate.GridTopK(4)(IMAGE[0]).take, indices)


def test_token_sets_that_do_not_fit_themselves() -> None:
    tokens = allocate.GridTopK(4)(IMAGE)
    refuse(r"weights are \(2, 5, 16\); expected \[2, 4, Hg Wg\]", replace, tokens, weights=torch.ones(2, 5, 16))
    refuse("patch is '14'", replace, tokens, patch="14")


def test_tokens_are_trees_of_what_is_there() -> None:
    """Functions of tensors are mapped over them, and vmap over their images."""
    tokens = allocate.GridTopK(4)(IMAGE)
    assert torch.equal(_pytree.tree_map(lambda x: x * 2, tokens).patches, tokens.patches * 2)
    assert torch.equal(torch.func.vmap(lambda one: one.sites * 2)(tokens), tokens.sites * 2)
    packed = allocate.TokenBank(allocate.SoftVortex(4), 8)(IMAGE).detach()
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    for other in (packed.clone(), packed.to("cpu"), torch.load(file, weights_only=True)):
        assert torch.equal(other.weights, packed.weights) and torch.equal(other.offsets, packed.offsets)
        assert (other.patch, other.longest) == (packed.patch, packed.longest)


def test_a_bank_normalises() -> None:
    image, how = (IMAGE * 255).byte(), {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    for allocator in (allocate.GridTopK(), allocate.FoveatedPyramid()):
        first, _ = allocate.TokenBank(allocator, 14)(image, **how).unpack()
        assert torch.equal(first.patches, lod.gather_patches(image[0], first.sites, 14, **how))
    (first, _), single = (
        allocate.TokenBank(allocate.SoftVortex(7), 14, 7)(image, **how).unpack(),
        allocate.SoftVortex(7)(image, **how),
    )
    torch.testing.assert_close(first.patches, single.patches[0])


def test_parameters_are_for_one_budget() -> None:
    allocator = allocate.PseudoLogPolar(4)
    allocator.budget = 5
    refuse("PseudoLogPolar has parameters for a budget of 4, not 5", allocator, IMAGE)


def test_allocators_say_what_they_are() -> None:
    assert repr(allocate.GridTopK(9, 4)) == "GridTopK(budget=9, patch=4, pool='mean')"
    assert "budget=9, patch=14" in repr(allocate.SoftVortex(9))
    cut = allocate.FoveatedPyramid(e0=0.2, max_level=2)
    assert repr(cut) == "FoveatedPyramid(budget=273, patch=14, pool='mean', e0=0.2, max_level=2)"
    assert repr(cut) in repr(allocate.TokenBank(cut, 9))
    assert "strength=2.0" in repr(allocate.TokenBank(allocate.SoftTopKCoverage(strength=2), 9))
    refuse("no choose", allocate.register, allocate.Allocator)


@pytest.mark.parametrize("name", [name for name in allocate.names() if vars(allocate).get(name)])
def test_allocators_print_all_that_is_not_as_by_default(name: str) -> None:
    common, others = {"budget": 9, "patch": 4, "pool": "max"}, OTHERS.get(name, {})
    plain = allocate.make(name)
    assert {*common, *others, "self"} == {*inspect.signature(type(plain).__init__).parameters}, "all are tried"
    assert plain.extra_repr() == "budget=273, patch=14, pool='mean'" and plain.extra_repr() in repr(plain)
    every = ", ".join(f"{key}={value!r}" for key, value in (common | others).items())
    assert allocate.make(name, **common, **others).extra_repr() == every


def test_allocators_of_ones_own_print_what_they_hold() -> None:
    class Mine(allocate.Stratified):
        def __init__(self, *args: Any, gain: float = 1.0, other: int = 0, weights: Any = None, **more: Any) -> None:
            super().__init__(*args, **more)
            self.gain, self._other, self.weights = gain, other, weights

    mine = Mine(9, strata=(2, 2), gain=3.0, other=5, weights=torch.ones(3))
    assert repr(mine) == "Mine(budget=9, patch=14, pool='mean', strata=(2, 2), gain=3.0)"


def test_blends_are_learned_from_features_of_inference_mode() -> None:
    allocator = allocate.SoftVortex(3)
    with torch.inference_mode():
        features = noise(2, 16, 2)
    allocator(IMAGE).blend(features).square().sum().backward()
    assert allocator.twists.grad is not None and bool(allocator.twists.grad.any())


def test_blends_take_arrays_and_one_image() -> None:
    tokens = allocate.SoftVortex(3)(IMAGE)
    features = noise(2, 16, 2)
    assert torch.equal(tokens.blend(features.numpy()), tokens.blend(features))
    assert tokens.blend(features.half()).dtype == torch.float16
    one = allocate.SoftVortex(3)(IMAGE[0])
    assert one.blend(features[0]).shape == (3, 2)
    refuse(r"expected \[16, D\]", one.blend, features)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ((None, None, None), "sites"),
        (([[0.5, 0.5, 0.0]], [1.0], None), "sites"),
        ((np.zeros((1, 3)), torch.ones(1), None), "sites"),
        ((torch.zeros(1, 3), [1.0], None), "scores"),
        ((torch.zeros(1, 3), torch.ones(1), np.zeros((1, 3, 4, 4))), "patches"),
    ],
)
def test_token_sets_are_made_of_tensors(parts: tuple[Any, ...], name: str) -> None:
    refuse(f"{name} is a .*; expected a torch tensor", lod.TokenSet, *parts, 4)


@pytest.mark.parametrize(
    ("patches", "hint"),
    [
        (torch.rand(4), r"\(4,\); expected \(2, 'C', 4, 4\)"),
        (torch.rand(2, 4), "a patch of each site"),
        (torch.rand(2, 3, 4, 4, device="meta"), "with data"),
        (torch.rand(2, 3, 4, 4).to_sparse(), "dense"),
        (torch.ones(2, 3, 4, 4, dtype=torch.int64), "int64; expected uint8 or floating point"),
        (torch.ones(2, 3, 4, 4, dtype=torch.bool), "bool; expected uint8 or floating point"),
    ],
)
def test_patches_that_cannot_be_painted(patches: torch.Tensor, hint: str) -> None:
    sites = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 0.0]])
    refuse(hint, lambda: lod.rebuild(lod.TokenSet(sites, torch.ones(2), patches, 4), (8, 8)))


def test_sites_that_cannot_be_painted() -> None:
    sites = torch.zeros(2, 3)
    for bad in (sites.to("meta"), sites.to_sparse(), sites.cfloat(), sites.bool()):
        refuse("sites is a", lod.rebuild, lod.TokenSet(bad, torch.ones(2), torch.rand(2, 3, 4, 4), 4), (8, 8))


# -- the tree cut, the soft top-k --------------------------------------------------------------------------------------

DETAIL, BENEFITS = noise(2, 5, 7), [noise(2, 3, 4), noise(2, 2, 2), noise(2, 1, 1)]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((BENEFITS, DETAIL, True), "budget is True"),
        ((BENEFITS, DETAIL, 9.0), "budget is 9.0"),
        ((BENEFITS, DETAIL, 0), "budget is 0"),
        ((BENEFITS, DETAIL, 36), "35 cells. Use a larger image, smaller patches, or a smaller budget"),
        ((BENEFITS, DETAIL, 9, -1), "max_level is -1"),
        ((BENEFITS, DETAIL, 9, 1.5), "max_level is 1.5"),
        ((BENEFITS[:2], DETAIL, 9), "2 levels; expected a list of 3"),
        ((BENEFITS[:1], DETAIL, 9, 2), "1 levels; expected a list of 2 to 3"),
        (([*BENEFITS, noise(2, 1, 1)], DETAIL, 9), "4 levels; expected a list of 3"),
        (([level[:, :1] for level in BENEFITS], DETAIL, 9), r"benefits\[0\] is \(2, 1, 4\); expected \(2, 3, 4\)"),
        (([level[:1] for level in BENEFITS], DETAIL, 9), r"expected \(2, 3, 4\)"),
        (([level * NAN for level in BENEFITS], DETAIL, 9), r"benefits\[0\] holds NaN"),
        ((BENEFITS, DETAIL * NAN, 9), "detail holds NaN"),
        (([level > 0.5 for level in BENEFITS], DETAIL, 9), "bool tensor"),
        (([level.cfloat() for level in BENEFITS], DETAIL, 9), "complex64 tensor"),
        (([level.to("meta") for level in BENEFITS], DETAIL, 9), "with data"),
        ((BENEFITS, DETAIL[0], 9), r"detail is \(5, 7\); expected \[B, Hg, Wg\]"),
        ((BENEFITS, DETAIL[:, :0], 1), r"expected \[B, Hg, Wg\]"),
        ((BENEFITS, [[1.0]], 9), "detail is list"),
        ((None, DETAIL, 9), "benefits are a NoneType"),
        (("abc", DETAIL, 9), "benefits are a str"),
    ],
)
def test_trees_that_cannot_be_cut(arguments: tuple[Any, ...], hint: str) -> None:
    refuse(hint, tree_cut, *arguments)


def test_a_tree_of_integers_or_arrays_is_cut_alike() -> None:
    numbers, values = [(level * 99).int() for level in BENEFITS], (DETAIL * 99).int()
    expected = tree_cut([level.float() for level in numbers], values.float(), 9)
    for cut in (tree_cut(numbers, values, 9), tree_cut([level.numpy() for level in numbers], values.numpy(), 9)):
        assert all(torch.equal(one, other) for one, other in zip(cut.leaves, expected.leaves, strict=True))
        assert torch.equal(cut.detail, expected.detail)


@pytest.mark.parametrize(
    ("scores", "hint"),
    [
        ([[1.0, 2.0]], "scores is list"),
        (None, "NoneType"),
        (torch.ones(2, 4).to_sparse(), "dense"),
        (torch.ones(2, 4, dtype=torch.bool), "bool tensor"),
        (torch.ones(2, 4, dtype=torch.complex64), "complex64 tensor"),
        (torch.tensor([[NAN, 1.0, 2.0]]), "scores holds NaN"),
        (torch.ones(4), r"expected \[B, N\]"),
    ],
)
def test_scores_that_have_no_soft_top_k(scores: Any, hint: str) -> None:
    refuse(hint, soft_top_k, scores, 1, 0.1)
    if isinstance(scores, torch.Tensor) and scores.ndim == 2:
        refuse(hint, soft_top_k, scores, scores.shape[1], 0.1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("count", [3, 10])
def test_the_soft_top_k_of_integers(dtype: torch.dtype, count: int) -> None:
    scores = (noise(2, 10) * 9).to(dtype)
    soft = soft_top_k(scores, count, 1.0)
    assert soft.dtype == torch.float32 and torch.equal(soft, soft_top_k(scores.float(), count, 1.0))
    assert torch.allclose(soft.sum(1), torch.full((2,), float(count)))
    assert torch.equal(soft, soft_top_k(scores.numpy(), count, 1.0))


# -- losses ------------------------------------------------------------------------------------------------------------

SITES, WEIGHTS = noise(2, 6, 3), noise(2, 6) + 0.1


@pytest.mark.parametrize(
    ("loss", "arguments", "hint"),
    [
        (coverage_loss, (None,), "sites is NoneType"),
        (coverage_loss, ([[0.1, 0.2]],), "sites is list"),
        (coverage_loss, (torch.tensor(1.0),), "at least one"),
        (coverage_loss, (SITES > 0.5,), "bool tensor"),
        (coverage_loss, (SITES.cfloat(),), "complex64 tensor"),
        (coverage_loss, (SITES[:, :0],), "at least one"),
        (coverage_loss, (SITES[:0],), "at least one"),
        (coverage_loss, (SITES, [1.0]), "weights is list"),
        (coverage_loss, (SITES, WEIGHTS.to("meta")), "with data"),
        (coverage_loss, (SITES, torch.tensor([[0.0], [1.0]]) * WEIGHTS), "weights are all 0 for an image"),
        (coverage_loss, (SITES, -WEIGHTS), "0 or more"),
        (coverage_loss, (SITES, WEIGHTS * NAN), "finite numbers"),
        (coverage_loss, (SITES, WEIGHTS * INF), "finite numbers"),
        (repulsion_loss, (None,), "centres is NoneType"),
        (repulsion_loss, ([[1.0, 2.0]],), "centres is list"),
        (repulsion_loss, (torch.rand(0, 2),), r"expected \[B, V, 2\]"),
        (repulsion_loss, (torch.rand(0, 3, 2),), r"expected \[B, V, 2\]"),
        (repulsion_loss, (torch.rand(3, 2).cfloat(),), "complex64 tensor"),
        (dead_bin_loss, (None,), "mass is NoneType"),
        (dead_bin_loss, ([1.0],), "mass is list"),
        (dead_bin_loss, (torch.tensor(1.0),), r"\[B, K\] or \[K\]"),
        (dead_bin_loss, (torch.rand(0),), "at least one"),
        (dead_bin_loss, (torch.rand(0, 3),), "at least one"),
        (dead_bin_loss, (-WEIGHTS,), "0 or more"),
        (dead_bin_loss, (WEIGHTS * NAN,), "finite numbers"),
        (dead_bin_loss, (WEIGHTS > 0.5,), "bool tensor"),
        (dead_bin_loss, (WEIGHTS.cfloat(),), "complex64 tensor"),
    ],
)
def test_what_losses_refuse(loss: Callable[..., torch.Tensor], arguments: tuple[Any, ...], hint: str) -> None:
    refuse(hint, loss, *arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_losses_of_other_dtypes_are_those_in_fp32(dtype: torch.dtype) -> None:
    values = (noise(2, 6, 2) * 3).to(dtype)
    for loss in (repulsion_loss, coverage_loss, lambda both: dead_bin_loss(both[..., 0])):
        found = loss(values)
        assert found.dtype == torch.float32 and torch.equal(found, loss(values.float()))
        assert torch.equal(loss(values.float().numpy()), found)
    found = coverage_loss(SITES, WEIGHTS.double())
    assert found.dtype == torch.float64 and torch.allclose(found.float(), coverage_loss(SITES, WEIGHTS))


def test_vortices_in_half_precision_repel() -> None:
    learned = allocate.VortexLearned(9)
    expected = learned.repulsion(distance=0.5).item()
    assert expected > 0 and learned.half().repulsion(distance=0.5).item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("masks", "hint"),
    [
        (torch.ones(2, 4, 4, dtype=torch.bool).to_sparse(), "dense"),
        (torch.ones(2, 4, 4, dtype=torch.bool, device="meta"), "with data"),
        ([torch.ones(4, 4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool, device="meta")], "with data"),
        ([torch.ones(4, 4, dtype=torch.bool).to_sparse()], "dense"),
        ([torch.ones(3, 4, 4, dtype=torch.bool)] * 2, r"\[\(3, 4, 4\)\]; expected a single one, \(H, W\)"),
    ],
)
def test_masks_that_give_no_labels(masks: Any, hint: str) -> None:
    refuse(hint, allocate.labels_of, masks)


def test_nested_masks_give_no_labels() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4, 4), torch.ones(1, 4, 4)], layout=torch.jagged)
    refuse("nested tensor", allocate.labels_of, nested)


def test_an_expected_loss_of_a_list() -> None:
    for losses in ([1.0], None):
        refuse("losses is", allocate.AdaptiveStratified().expected_loss, losses, torch.zeros(1, 512))


def test_a_bank_may_give_fewer_tokens_than_there_are_rows() -> None:
    tokens = allocate.TokenBank(allocate.Downsample(16, rows=16), 4)(IMAGE, RELEVANCE)
    assert tokens.sites.shape == (4, 3) and len(tokens.sites[: tokens.offsets[1]].unique(dim=0)) == tokens.counts[0]


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        *(("PyramidTopK", {"weights": weights}, "weights are") for weights in (None, 3, "ab", (), torch.tensor(1.0))),
        *(("PyramidTopK", {"weights": (weight,)}, "a level's weight is") for weight in ("a", [1.0], 0, 1e300, NAN)),
        *(("PyramidTopK", {"split": split}, "split is") for split in (5, "abcdefghi", (3, 3, 3), (9, 9, 9, 9))),
        *(
            ("PyramidTopK", {"split": (count, 8, 1, 1)}, "a level's count is")
            for count in (None, -1.0, -1, 0.5, True, "a")
        ),
        ("FoveatedPyramid", {"e0": 1e-300}, "positive number from 1e-06 to 1e"),
        ("FoveatedPyramid", {"e0": 1e300}, "e0 is 1e"),
        ("FoveatedPyramid", {"e0": torch.tensor(0.1, requires_grad=True)}, "e0 asks for gradients, and none pass"),
        ("Random", {"seed": 2**64}, "18446744073709551615"),
        ("AdaptiveStratified", {"seed": 2**64}, "18446744073709551615"),
        ("HeatDiffusion", {"length": 1e160}, "from 0 to 1e"),
        ("VortexField", {"radius": 1e300}, "radius is"),
        ("VortexLearned", {"radius": 1e300}, "radius is"),
        ("SoftVortex", {"twist": 1e300}, "from -1000 to 1000"),
        ("SoftVortex", {"radius": 1e30}, "radius is"),
        ("SoftVortex", {"width": 1e300}, "width is"),
        ("SoftTopKCoverage", {"strength": 1e39}, "strength is"),
        ("SoftTopKCoverage", {"temperature": 1e300}, "temperature is"),
        ("PseudoLogPolar", {"sigma": 1e-30}, "positive number from 0.0001 to 10"),
        ("TokenDAG", {"morph": 1.5}, "from 0 to 1"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], hint: str) -> None:
    refuse(hint, allocate.make, name, 9, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("PyramidTopK", {"weights": (1e6, 1e-6)}),
        ("FoveatedPyramid", {"e0": 1e-6}),
        ("FoveatedPyramid", {"e0": 1e6}),
        ("Random", {"seed": 2**64 - 1}),
        ("AdaptiveStratified", {"seed": 2**64 - 1}),
        ("HeatDiffusion", {"length": 1e6}),
        ("VortexField", {"radius": 1e-6}),
        ("VortexField", {"radius": 1e6}),
        ("VortexLearned", {"radius": 1e-6}),
        ("VortexLearned", {"radius": 1e6}),
        ("VortexLearned", {"temperature": 1e-6}),
        ("SoftVortex", {"twist": -1e3}),
        ("SoftVortex", {"radius": 1e-6, "width": 1e-6}),
        ("SoftVortex", {"radius": 1e6, "width": 1e6}),
        ("SoftTopKCoverage", {"strength": 1e6, "temperature": 1e-6}),
        ("PseudoLogPolar", {"sigma": 1e-4}),
        ("PseudoLogPolar", {"sigma": 10}),
    ],
)
def test_options_at_the_ends_of_their_range(name: str, options: dict[str, Any]) -> None:
    allocator = allocate.make(name, 7, **options)
    query = torch.zeros(512) if "query" in allocator.needs else None
    for relevance in (RELEVANCE, torch.zeros(2, 4, 4)):
        tokens = allocator(relevance=relevance, query=query)
        assert torch.isfinite(tokens.sites).all() and torch.isfinite(tokens.scores).all()
        assert ((tokens.sites[..., :2] >= 0) & (tokens.sites[..., :2] <= 1)).all()
        if not allocator.blends:
            assert all(len(sites.unique(dim=0)) == 7 for sites in tokens.sites)


# -- modes of torch ----------------------------------------------------------------------------------------------------


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "name", ["Downsample", "FoveatedPyramid", "SoftVortex", "VortexLearned", "SoftTopKCoverage", "PseudoLogPolar"]
)
def test_the_default_dtype_changes_nothing(name: str, double_by_default: None) -> None:
    allocator = allocate.make(name, 5)
    if isinstance(allocator, allocate.Learned):
        assert {parameter.dtype for parameter in allocator.parameters()} == {torch.float32}
    found = allocator(relevance=RELEVANCE)
    torch.set_default_dtype(torch.float32)
    expected = allocate.make(name, 5)(relevance=RELEVANCE)
    assert (found.sites.dtype, found.scores.dtype) == (torch.float32, torch.float32)
    assert torch.allclose(found.sites, expected.sites, atol=1e-6)
    assert torch.allclose(found.scores, expected.scores, atol=1e-6)


def test_autocast_leaves_blends_alone() -> None:
    allocator = allocate.SoftVortex(5)
    with torch.autocast("cpu", torch.bfloat16):
        found = allocator(IMAGE, RELEVANCE)
        features = found.blend(RELEVANCE.flatten(1)[..., None])
    expected = allocator(IMAGE, RELEVANCE)
    assert torch.equal(found.sites, expected.sites)
    assert found.patches is not None and expected.patches is not None
    assert torch.equal(found.patches, expected.patches) and features.dtype == torch.float32


# -- parameters that diverged ------------------------------------------------------------------------------------------

LEARNED = [name for name in allocate.names() if isinstance(allocate.make(name, 1), allocate.Learned)]


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_parameters_that_are_not_finite(name: str, value: float) -> None:
    allocator = allocate.make(name, 5)
    assert isinstance(allocator, allocate.Learned)
    query = torch.zeros(512) if "query" in allocator.needs else None
    for which, _ in allocator.named_parameters():
        broken = copy.deepcopy(allocator)
        with torch.no_grad():
            broken.get_parameter(which).view(-1)[-1] = value
        refuse(f"{which} of {name} holds NaN or infinities", broken, relevance=RELEVANCE, query=query)


@pytest.mark.parametrize(("parameter", "value"), [("log_radii", 1e4), ("twists", 1e38)])
def test_vortices_that_are_too_large(parameter: str, value: float) -> None:
    allocator = allocate.SoftVortex(5)
    with torch.no_grad():
        allocator.get_parameter(parameter).fill_(value)
    refuse("radii or twists", allocator, relevance=RELEVANCE)


# -- files -------------------------------------------------------------------------------------------------------------


def test_json_holds_no_number_that_is_none(tmp_path: Path) -> None:
    tokens = lod.TokenSet(torch.zeros(3, 3), torch.tensor([INF, 1.0, NAN]), None, 4)
    token_files.write_sites(tmp_path / "s.json", tokens, {"about": {"psnr": -INF}})

    def fail(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    written = json.loads((tmp_path / "s.json").read_text(), parse_constant=fail)
    assert written["scores"] == [None, 1.0, None] and written["about"] == {"psnr": None}


@pytest.mark.parametrize("psnr", [INF, NAN])
def test_a_psnr_that_is_not_finite_is_none(psnr: float) -> None:
    tokens = allocate.GridTopK(2)(IMAGE[0])
    made = allocation.Allocation("GridTopK", tokens, lod.rebuild(tokens, (56, 56)), psnr, False)
    assert made.as_dict()["psnr"] is None


def test_relevance_as_networks_give_it_says_what_makes_it_a_map() -> None:
    allocator = allocate.GridTopK(5, patch=4)
    batch, height, width = RELEVANCE.shape
    image = torch.rand(batch, 3, 4 * height, 4 * width)
    for relevance in (RELEVANCE[:, None], RELEVANCE.flatten(1)):
        with pytest.raises(InputError) as caught:
            allocator(image, relevance)
        hint = str(caught.value).rpartition(": ")[2].rstrip(".")
        assert torch.equal(eval(hint, {"relevance": relevance}), RELEVANCE)
    with pytest.raises(InputError, match=r"relevance\[:, 0\]"):
        allocator(relevance=RELEVANCE[:, None])
    with pytest.raises(InputError, match="interpolate"):
        allocator(image, RELEVANCE[:, 1:])
