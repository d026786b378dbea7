"""Positions of sites: exact on the grid, the models' own there, and continuous between."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat, resample_abs_pos_embed
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25
from transformers.models.siglip import modeling_siglip as siglip
from transformers.models.siglip2 import modeling_siglip2 as siglip2

import gpu_lod as lod
from gpu_lod.errors import InputError

pytestmark = pytest.mark.usefixtures("one_thread")


def cells(rows: int, columns: int) -> torch.Tensor:
    """[rows columns, 2]: (y, x), row by row."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()


# -- on the grid -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([8, 14, 16, 32]))
def test_grid_sites_have_whole_positions(rows: int, columns: int, patch: int) -> None:
    """To the last bit, though sites are fp32 fractions."""
    size = rows * patch, columns * patch
    centres = (cells(rows, columns) + 0.5) / torch.tensor([rows, columns])
    sites = torch.cat([centres.flip(-1), torch.zeros(len(centres), 1)], dim=-1)
    found = lod.vlm.grid_positions(sites, size, patch)
    assert torch.equal(found[:, 1:], cells(rows, columns)) and (found[:, 0] == 0).all()


def test_convention_far_edges_and_coarse_patches() -> None:
    """50 x 60 pixels in patches of 14: the last row is shifted inward to pixel 36, the last column to 46."""
    relevance = torch.zeros(4, 5)
    relevance[3, 4] = 1
    site = lod.allocate.GridTopK(1)(torch.rand(3, 50, 60), relevance).sites
    level, y, x = lod.vlm.grid_positions(site, (50, 60), 14)[0].tolist()
    assert level == 0 and math.isclose(y, 36 / 14, rel_tol=1e-6) and math.isclose(x, 46 / 14, rel_tol=1e-6)
    coarse = torch.tensor([[0.25, 0.75, 1.0], [0.5, 0.5, 2.0]])
    assert lod.vlm.grid_positions(coarse, (56, 56), 14).tolist() == [[1, 2.5, 0.5], [2, 1.5, 1.5]]


def test_positions_have_gradients() -> None:
    sites = torch.rand(2, 3, 3, dtype=torch.float64, requires_grad=True)
    lod.vlm.grid_positions(sites, (70, 140), 14)[..., 1:].sum().backward()
    assert sites.grad is not None
    assert torch.equal(sites.grad, torch.tensor([10.0, 5.0, 0.0], dtype=torch.float64).expand(2, 3, 3))


# -- rotary ------------------------------------------------------------------------------------------------------------


def test_rotary_positions_are_those_of_qwen() -> None:
    config = qwen25.Qwen2_5_VLVisionConfig(hidden_size=128, num_heads=2)
    tower = qwen25.Qwen2_5_VLVisionRotaryEmbedding(config)
    at = cells(7, 11)
    cos, sin = tower(torch.zeros(1), at.long())
    found = lod.vlm.rotary_embedding(at, lod.vlm.axial_frequencies(64))
    assert torch.allclose(found[0], cos, atol=1e-6) and torch.allclose(found[1], sin, atol=1e-6)


def test_rotary_positions_are_those_of_timm() -> None:
    own = RotaryEmbeddingCat(64, in_pixels=False, feat_shape=[7, 11]).get_embed()
    cos, sin = lod.vlm.rotary_embedding(cells(7, 11), lod.vlm.axial_frequencies(64), "interleaved")
    assert torch.allclose(torch.cat([sin, cos], dim=-1), own, atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_attention_depends_on_distance_alone(layout: Any) -> None:
    """At fractional positions, and on three axes, with frequencies of their own."""
    frequencies = [lod.vlm.axial_frequencies(16, 1, theta) for theta in (10.0, 100.0, 10000.0)]
    key, query = torch.randn(2, 48, dtype=torch.float64)

    def score(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        turned = []
        for vector, at in ((query, here), (key, there)):
            cos, sin = lod.vlm.rotary_embedding(at, frequencies, layout)
            emb = torch.cat([sin, cos], dim=-1).double()
            turned.append(apply_rot_embed_cat(vector, emb, half=layout == "half"))
        return turned[0] @ turned[1]

    here, there, shift = torch.rand(3, 3) * 9
    assert torch.allclose(score(here, there), score(here + shift, there + shift), atol=1e-4)
    assert not torch.allclose(score(here, there), score(here + shift, there), atol=1e-2)


# -- M-RoPE ------------------------------------------------------------------------------------------------------------


def test_language_positions_are_those_of_the_model_on_the_full_grid() -> None:
    sites = lod.allocate.GridTopK(15, patch=28)(relevance=torch.arange(15.0).flip(0).view(1, 3, 5)).sites
    own = qwen25.Qwen2_5_VLModel.get_vision_position_ids(None, 7, torch.tensor([1, 6, 10]), 1, 2)
    found = lod.vlm.mrope_positions(sites, (84, 140), 28, start=7)
    assert found.dtype == torch.int64 and torch.equal(found[:, 0], own)
    assert torch.equal(lod.vlm.mrope_positions(sites[0], (84, 140), 28, start=7), own)
    assert torch.equal(
        lod.vlm.mrope_positions(sites, (84, 140), 28, torch.tensor([7]), rounded=False)[:, 0], own.float()
    )
    assert lod.vlm.mrope_extent((84, 140), 28) == 5


def test_convention_halves_round_up() -> None:
    """Level-1 units stand between cells: 1/2, 5/2, ... and stay apart."""
    sites = torch.tensor([[[(2 * i + 1) / 8, 0.5, 1.0] for i in range(4)]])
    whole = lod.vlm.mrope_positions(sites, (28, 224), 28, torch.tensor([3]))
    assert whole[2, 0].tolist() == [3 + 1, 3 + 3, 3 + 5, 3 + 7] and (whole[0] == 3).all()
    exact = lod.vlm.mrope_positions(sites, (28, 224), 28, torch.tensor([3]), rounded=False)
    assert exact[2, 0].tolist() == [3.5, 5.5, 7.5, 9.5]


# -- learned tables ----------------------------------------------------------------------------------------------------

HOWS = {
    "SigLIP": {"mode": "bicubic"},
    "SigLIP 2": {"mode": "bilinear", "antialias": True},
    "timm": {"mode": "bicubic", "antialias": True},
    "Qwen3-VL": {"mode": "bilinear", "align_corners": True},
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_the_native_grid_gives_the_rows_exactly(how: Any) -> None:
    table = torch.randn(7 * 9, 5)
    assert torch.equal(lod.vlm.sample_position_table(table, cells(7, 9), (7, 9), (7, 9), **how), table)


@pytest.mark.parametrize("to", [(12, 17), (9, 3), (4, 5), (1, 2), (7, 7)], ids=str)
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_other_grids_are_what_torch_interpolates(how: Any, to: tuple[int, int]) -> None:
    table = torch.randn(7 * 7, 5)
    image = table.T.reshape(1, 5, 7, 7)
    expected = torch.nn.functional.interpolate(image, size=to, **{"align_corners": False, **how})
    found = lod.vlm.sample_position_table(table, cells(*to), (7, 7), to, **how)
    assert torch.allclose(found, expected[0].flatten(1).T, atol=1e-5)


def test_other_grids_are_what_the_models_interpolate() -> None:
    config = siglip.SiglipVisionConfig(hidden_size=8, image_size=56, patch_size=14, num_attention_heads=1)
    table = torch.randn(16, 8)
    own = siglip.SiglipVisionEmbeddings(config)
    own.position_embedding.weight.data = table
    expected = own.interpolate_pos_encoding(torch.zeros(1, 30, 8), 70, 84)[0]
    found = lod.vlm.sample_position_table(table, cells(5, 6), (4, 4), (5, 6))
    assert torch.allclose(found, expected, atol=1e-5)
    resize = siglip2.Siglip2VisionEmbeddings.resize_positional_embeddings
    expected = resize(table.view(4, 4, 8), torch.tensor([[3, 2]]), 6)[0]
    found = lod.vlm.sample_position_table(table, cells(3, 2), (4, 4), (3, 2), **HOWS["SigLIP 2"])
    assert torch.allclose(found, expected, atol=1e-5)
    expected = resample_abs_pos_embed(table[None], [3, 7], num_prefix_tokens=0)[0]
    found = lod.vlm.sample_position_table(table, cells(3, 7), (4, 4), (3, 7), **HOWS["timm"])
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_between_the_cells_it_is_continuous(how: Any) -> None:
    """And reads a constant as a constant, to the edges of the picture; beyond them the edges stay."""
    at = torch.stack([torch.linspace(-4, 9, 4000), torch.linspace(14, -4, 4000)], dim=-1)
    table = torch.randn(16, 3)
    found = lod.vlm.sample_position_table(table, at, (4, 4), (6, 9), **how)
    assert float(found.diff(dim=0).abs().max()) < 0.05
    edge = lod.vlm.sample_position_table(
        table, at.clamp(torch.tensor(-0.5), torch.tensor([5.5, 8.5])), (4, 4), (6, 9), **how
    )
    assert torch.allclose(found, edge, atol=1e-5)
    constant = lod.vlm.sample_position_table(torch.full((16, 3), 2.0), at, (4, 4), (6, 9), **how)
    assert torch.allclose(constant, torch.full_like(constant, 2.0), atol=1e-5)


def test_half_precision_tables() -> None:
    table = torch.randn(16, 3)
    at = torch.rand(2, 5, 2) * 3
    found = lod.vlm.sample_position_table(table.bfloat16(), at, (4, 4), (4, 4))
    exact = lod.vlm.sample_position_table(table, at, (4, 4), (4, 4))
    assert (
        found.dtype == torch.bfloat16 and found.shape == (2, 5, 3) and torch.allclose(found.float(), exact, atol=0.05)
    )


def test_transforms_pass() -> None:
    """Through tables that are trained as well, of which torch's embedding_bag has no second derivative."""
    table, at = torch.nn.Parameter(torch.randn(16, 3)), torch.rand(2, 5, 2) * 3

    def total(at: torch.Tensor, table: torch.Tensor = table) -> torch.Tensor:
        return lod.vlm.sample_position_table(table, at, (4, 4), (4, 4)).square().sum()

    asked = at.clone().requires_grad_()
    expected = torch.autograd.grad(total(asked), [asked, table])
    found = torch.func.grad(total, (0, 1))(at, table)
    assert torch.allclose(torch.func.grad(total)(at), expected[0], atol=1e-4)
    assert all(torch.allclose(mine, theirs, atol=1e-4) for mine, theirs in zip(found, expected, strict=True))
    each = torch.func.vmap(total)(at)
    assert torch.allclose(each.sum(), total(at), rtol=1e-5)
    slope = torch.func.jvp(total, (at,), (torch.ones_like(at),))[1]
    assert torch.allclose(slope, expected[0].sum(), rtol=1e-4)


def test_starts_of_each_picture() -> None:
    found = lod.vlm.mrope_positions(SITES, (56, 56), 14, start=torch.tensor([3, 50]))
    for i, start in enumerate((3, 50)):
        for one in (start, torch.tensor(start), torch.tensor([start])):
            assert torch.equal(found[:, i], lod.vlm.mrope_positions(SITES[i], (56, 56), 14, start=one))


SITES, EDGE = torch.rand(2, 4, 3), torch.ones(1, 2)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: lod.vlm.grid_positions(torch.rand(4, 2), (56, 56), 14), r"\[..., K, 3\]"),
        (lambda: lod.vlm.grid_positions([(0.5, 0.5, 0.0)], (56, 56), 14), "list"),
        (lambda: lod.vlm.grid_positions(torch.rand(4, 3), 56, 14), "height, width"),
        (lambda: lod.vlm.grid_positions(torch.rand(4, 3), (56, 56), 0), "patch"),
        (lambda: lod.vlm.axial_frequencies(10), "multiple of 4"),
        (lambda: lod.vlm.axial_frequencies(12, theta=-1.0), "positive"),
        (lambda: lod.vlm.rotary_embedding(torch.rand(4, 3), [torch.ones(2)] * 2), "3 axes"),
        (lambda: lod.vlm.rotary_embedding(torch.rand(4, 2), torch.ones(2), "quarter"), "interleaved"),
        (lambda: lod.vlm.rotary_embedding(None, torch.ones(2)), "positions is NoneType"),
        (lambda: lod.vlm.rotary_embedding(torch.tensor(1.0), torch.ones(2)), "0 axes"),
        (lambda: lod.vlm.rotary_embedding(torch.rand(4, 0), torch.ones(2)), "0 axes"),
        (lambda: lod.vlm.rotary_embedding(torch.rand(4, 2), None), "frequencies is NoneType"),
        (lambda: lod.vlm.rotary_embedding(torch.rand(4, 2), [0.5, 0.5]), "frequencies is float 0.5"),
        (lambda: lod.vlm.rotary_embedding(torch.rand(4, 2), torch.ones(2, 2)), r"\(2, 2\), \(2, 2\); expected \[F\]"),
        (lambda: lod.vlm.rotary_embedding(torch.rand(4, 1), [torch.tensor(1.0)]), r"\(\); expected \[F\]"),
        (lambda: lod.vlm.mrope_positions(SITES, (56, 56), 14, start="x"), "start is str 'x'"),
        (lambda: lod.vlm.mrope_positions(SITES, (56, 56), 14, start=[]), "start is list"),
        (lambda: lod.vlm.mrope_positions(SITES, (56, 56), 14, start=None), "start is NoneType"),
        (lambda: lod.vlm.mrope_positions(SITES, (56, 56), 14, start=math.nan), "start is nan"),
        (lambda: lod.vlm.mrope_positions(SITES, (56, 56), 14, start=torch.tensor(math.inf)), "start holds"),
        (lambda: lod.vlm.mrope_positions(SITES, (56, 56), 14, start=torch.ones(3)), r"start is \(3,\); .* \(2,\)"),
        (lambda: lod.vlm.mrope_positions(SITES[0], (56, 56), 14, start=torch.ones(4)), r"start is \(4,\)"),
        (lambda: lod.vlm.mrope_positions(SITES, (56, 56), 14, rounded=1), "rounded is 1"),
        (lambda: lod.vlm.mrope_extent((56, 56), 0), "patch is 0"),
        (lambda: lod.vlm.mrope_extent((56, 56), None), "patch is None"),
        (lambda: lod.vlm.rotary_embedding(torch.zeros(3, 0), []), "0 axes"),
        (lambda: lod.vlm.sample_position_table(None, torch.rand(1, 2), (4, 4), (4, 4)), "table is NoneType"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), 0.5, (4, 4), (4, 4)), "positions is float"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), torch.rand(1, 2), 4, (4, 4)), "grid is 4; .*rows"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), torch.rand(1, 2), (4, 4), None), "cells is None"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), EDGE, (4, 4), (4, 0)), "side of cells is 0"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), EDGE * math.nan, (4, 4), (4, 4)), "NaN or inf"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), -EDGE * math.inf, (4, 4), (4, 4)), "NaN or inf"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), EDGE, (4, 4), (4, 4), antialias=0), "antialias is 0"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), EDGE, (4, 4), (4, 4), align_corners=1), "s is 1"),
        (lambda: lod.vlm.sample_position_table(torch.rand(9, 2), torch.rand(1, 2), (4, 4), (4, 4)), "4 x 4"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), torch.rand(1, 3), (4, 4), (4, 4)), r"\[..., 2\]"),
        (lambda: lod.vlm.sample_position_table(torch.rand(16, 2), torch.rand(1, 2), (4, 4), (4, 4), "nearest"), "mode"),
        (
            lambda: lod.vlm.sample_position_table(
                torch.rand(16, 2), torch.rand(1, 2), (4, 4), (4, 4), antialias=True, align_corners=True
            ),
            "exclude",
        ),
    ],
)  # fmt: skip
def test_bad_input(make: Any, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        make()


def test_positions_far_down_a_prompt_are_rounded_as_those_at_its_beginning() -> None:
    """fp32 does not tell 2^17 + 0.995 from 2^17 + 1."""
    sites = torch.tensor([[[(i + 0.995) / 8, 0.5, 0.3] for i in range(7)]])
    near, far = (lod.vlm.mrope_positions(sites, (28, 224), 28, start=start) for start in (0, 2**17))
    assert torch.equal(far - 2**17, near) and near[2, 0].tolist() == list(range(7))
