"""Allocators on CUDA tensors: they choose what they choose on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpu_lod as lod

pytestmark = pytest.mark.gpu


def moved(allocator: Any) -> Any:
    return allocator.cuda() if isinstance(allocator, torch.nn.Module) else allocator


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", lod.allocate.names())
def test_cpu_and_cuda_agree(name: str, batch: int) -> None:
    torch.manual_seed(0)
    rows, columns, patch = 19, 26, 14
    image = torch.rand(batch, 3, rows * patch - 5, columns * patch - 3)
    image[:, :, 60:120, 80:200] = 0.1
    relevance = torch.randperm(batch * rows * columns).view(batch, rows, columns) / 100  # no ties to break
    allocator = lod.allocate.make(name, 97, patch)
    more = {"query": torch.randn(batch, allocator.query_width or 8)} if "query" in allocator.needs else {}
    with torch.no_grad():
        here = allocator(image, relevance, **more)
        there = moved(allocator)(image.cuda(), relevance.cuda(), **{key: value.cuda() for key, value in more.items()})
    assert there.sites.is_cuda and there.scores.is_cuda and there.patches.is_cuda
    assert torch.allclose(there.sites.cpu(), here.sites, atol=1e-4)
    assert torch.allclose(there.scores.cpu(), here.scores, rtol=1e-3, atol=1e-4)
    assert float((there.patches.cpu() - here.patches).abs().mean()) < 5e-3


@pytest.mark.parametrize("name", lod.allocate.names())
def test_exactly_k_without_ties_or_relevance(name: str) -> None:
    """All equal, all zero, one hot: what a stable sort has to order."""
    for relevance in (torch.ones(2, 9, 9), torch.zeros(2, 9, 9), torch.eye(9).expand(2, 9, 9)):
        allocator = moved(lod.allocate.make(name, 30, 4))
        image = torch.rand(2, 3, 36, 36, device="cuda")
        more = {"query": torch.randn(2, allocator.query_width or 8).cuda()} if "query" in allocator.needs else {}
        with torch.no_grad():
            tokens = allocator(image, relevance.cuda(), **more)
        assert tokens.sites.shape == (2, 30, 3) and torch.isfinite(tokens.sites).all()
        if not allocator.blends:
            assert all(len(sites.unique(dim=0)) == 30 for sites in tokens.sites)
