"""Kernels of allocators on a GPU, each against plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod import by_kernel
from gpu_lod.allocate.frequency_aware import energies, given_away, served
from gpu_lod.allocate.learned import soft_top_k
from gpu_lod.allocate.log_polar import foveal_e0
from gpu_lod.allocate.scale import Summable
from gpu_lod.allocate.stratified import shared_out
from gpu_lod.salient_cells import saliency_cells

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_failed() -> None:
    assert by_kernel.usable(torch.zeros(1, device="cuda"))


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "any": lambda x: x,
    "ties": lambda x: (x * 3).round(),
    "zeros": torch.zeros_like,
    "negative": lambda x: x - 2,
    "infinite": lambda x: torch.where(x > 0.9, torch.inf, torch.where(x < 0.2, -torch.inf, x)),
    "huge": lambda x: x * 3e38,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(16, 16), (64, 64), (5, 31), (1, 40), (1, 1)], ids=str)
def test_amounts_and_peaks(size: tuple[int, int], kind: str) -> None:
    relevance = KINDS[kind](torch.rand(3, *size))
    there = relevance.cuda()
    for part in ("amounts", "finite"):
        assert torch.equal(getattr(Summable(there), part).cpu(), getattr(Summable(relevance), part))
    for count in (1, 4):
        found = lod.allocate.find_fixations(there, count).cpu()
        assert torch.allclose(found, lod.allocate.find_fixations(relevance, count), atol=1e-5)


@pytest.mark.parametrize("strata", [1, 16, 64, 600])
def test_shares(strata: int) -> None:
    for least in (0, 1):
        weight, room = torch.rand(5, strata, dtype=torch.float64) ** 4, torch.randint(1, 9, (5, strata))
        total = 2 * strata // 3 + 1
        found = shared_out(weight.cuda(), room.cuda(), total, least).cpu()
        assert torch.equal(found, shared_out(weight, room, total, least))


def test_served() -> None:
    for patches in (20, 4096):
        worth = torch.rand(3, 4, patches) ** 3
        counts = torch.tensor([[patches // 2, 3, 0, 1], [2, 2, 2, patches - 6], [1, 0, 0, 0]])
        taken = given_away(worth, counts, patches)
        assert torch.equal(served(worth.cuda(), counts.cuda()).cpu(), taken)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_energies(dtype: torch.dtype) -> None:
    for size in ((256, 320), (61, 47), (1, 90)):
        images = noise(3, 3, *size, dtype=dtype)
        scenes = [
            lod.allocate.Scene(size, 16, torch.ones(3, -(-size[0] // 16), -(-size[1] // 16)), None, images, None, None)
        ]
        scenes.append(replace(scenes[0], relevance=scenes[0].relevance.cuda(), image=images.cuda()))
        expected, found = (energies(scene).cpu() for scene in scenes)
        assert float((found - expected).abs().max()) < 1e-4 * float(expected.max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scores", [2, 17, 300, 4096, 2**14 + 1])  # the last by torch there too
def test_the_soft_top_k(scores: int, kind: str) -> None:
    values = KINDS[kind](torch.rand(3, scores, dtype=torch.float64))
    weights = torch.linspace(-1, 1, scores, dtype=torch.float64)
    for count, temperature in ((1, 0.1), (scores - 1, 1.0), ((scores + 3) // 4, 0.01)):
        soft, gradient = [], []
        for where in ("cuda", "cpu"):
            given = values.detach().to(where).requires_grad_()
            soft.append(soft_top_k(given, count, temperature))
            found = torch.autograd.grad((soft[-1] * weights.to(where)).sum(), given)[0]
            gradient.append(found.cpu() * temperature)
        torch.testing.assert_close(soft[0].cpu(), soft[1], rtol=0, atol=1e-12)
        torch.testing.assert_close(*gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saliency_and_losses(dtype: torch.dtype) -> None:
    for shape, patch in (((2, 3, 256, 384), 16), ((3, 1, 131, 97), 14), ((1, 4, 61, 300), 7)):
        images = noise(*shape, dtype=dtype)
        found = saliency_cells(images.cuda(), patch).cpu()
        torch.testing.assert_close(found, saliency_cells(images, patch), rtol=0, atol=3e-6)
        allocator = lod.allocate.TokenDAG(1, patch)
        for one, two in zip(allocator.errors(images.cuda()), allocator.errors(images), strict=True):
            torch.testing.assert_close(one.cpu(), two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budget", [1, 2, 273, 1024])
def test_cortical_sites(budget: int) -> None:
    points = torch.tensor([[0.31, 0.62], [0, 0], [1, 1], [0.5, 0], [1, 0.3], [0.5, 0.5]])
    for size in ((1024, 1024), (1080, 1920), (700, 40)):
        for e0 in (1e-3, 0.05, 1e3):
            found = lod.cortical_sites(points.cuda(), budget, size, 14, e0).cpu()
            expected = lod.cortical_sites(points, budget, size, 14, e0)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for fovea, radius in ((0.0, 0.1), (0.3, 0.1), (1.0, 0.3)):
        where = points.double(), (1080, 1920), budget, round(fovea * budget), radius
        found = foveal_e0(where[0].cuda(), *where[1:]).cpu()
        torch.testing.assert_close(found, foveal_e0(*where), rtol=1e-12, atol=0)


def test_nothing_failed_above() -> None:
    """Else plain torch was compared with itself."""
    assert not by_kernel._failed
