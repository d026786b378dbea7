"""What allocators make of one picture, for the command line: the tokens, and what can be rebuilt from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_lod import allocate as allocators
from gpu_lod.allocate.scene import label_maps
from gpu_lod.errors import GpuLodError, InputError
from gpu_lod.rebuild import Rebuilt, psnr, rebuild
from gpu_lod.saliency import unit
from gpu_lod.token_set import TokenSet


@dataclass(frozen=True)
class Allocation:
    """What an allocator made of a picture."""

    name: str
    tokens: TokenSet
    """[K, 3]"""
    rebuilt: Rebuilt
    psnr: float
    """In dB, of the rebuilt picture, over the range of a picture that is not within 0 and 1; inf where they are
    equal."""
    untrained: bool
    """A learned allocator with the parameters that it starts with."""

    @property
    def coverage(self) -> float:
        return float(self.rebuilt.coverage)

    @property
    def levels(self) -> dict[int, int]:
        """How many tokens there are of each level, fractions dropped."""
        level, count = self.tokens.sites[:, 2].floor().int().unique(return_counts=True)
        return dict(zip(level.tolist(), count.tolist(), strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity and no NaN: an exact picture has no PSNR, nor has one that holds NaN."""
        return {
            "name": self.name,
            "levels": self.levels,
            "coverage": self.coverage,
            "psnr": self.psnr if math.isfinite(self.psnr) else None,
            "untrained": self.untrained,
        }


@dataclass(frozen=True)
class Skipped:
    """An allocator that could not do it, and why."""

    name: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "skipped": self.reason}


def run(
    name: str, image: torch.Tensor, budget: int, patch: int, inputs: dict[str, Any], *, suit: bool = False
) -> Allocation:
    """One allocator by its name, on an image [C, H, W].

    Args:
        inputs: fixation, labels and query, each as the allocator takes it, or None; and a bias.
        suit: leave out inputs that the allocator can do without and does not take as they are; else it refuses them.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # parameters that are drawn are the same ones each time
        allocator = allocators.make(name, budget=budget, patch=patch)
        query = inputs.get("query")
        if isinstance(allocator, allocators.AdaptiveStratified) and query is not None:
            # Its head is a new one either way: one for the encoder that this query is of.
            allocator = type(allocator)(budget, patch, width=query.shape[-1])
        untrained = isinstance(allocator, allocators.Learned)
        if isinstance(allocator, allocators.Learned):
            allocator.eval()
        tokens = allocator(image, **(_suited(allocator, inputs) if suit else inputs))
        rebuilt = rebuild(tokens, (image.shape[-2], image.shape[-1]), mode="bicubic")
        # Blends of counts are fractions.
        original = image if rebuilt.image.dtype == image.dtype else unit(image)
        peak = None
        if original.is_floating_point():
            least, most = float(original.amin()), float(original.amax())
            if least <= most:  # no NaN
                rebuilt = Rebuilt(rebuilt.image.clamp(least, most), rebuilt.covered)
            if not 0 <= least <= most <= 1:
                peak = most - least or None
        return Allocation(name, tokens, rebuilt, float(psnr(rebuilt.image, original, peak)), untrained)


def _suited(allocator: allocators.Allocator, inputs: dict[str, Any]) -> dict[str, Any]:
    suited: dict[str, Any] = {k: value for k, value in inputs.items() if k in allocator.needs + allocator.takes}
    if not allocator.blends:
        suited["bias"] = inputs.get("bias", 0.0)
    query = suited.get("query")
    other = query is not None and allocator.query_width not in (None, query.shape[-1])  # another encoder's
    if other and "query" not in allocator.needs:
        del suited["query"]
    return suited


def run_all(
    image: torch.Tensor,
    budget: int,
    patch: int,
    inputs: dict[str, Any],
    progress: Callable[[str], None] = lambda name: None,
) -> list[Allocation | Skipped]:
    """Every allocator there is, in the order of their names, each with what it takes of the inputs. One that fails is
    skipped.

    Raises:
        InputError: all of them were, or the labels are of no size that the image's could have.
    """
    if inputs.get("labels") is not None:  # else the one that looks at them would be skipped
        label_maps(inputs["labels"], False, 1, (image.shape[-2], image.shape[-1]), patch)
    results: list[Allocation | Skipped] = []
    for name in allocators.names():
        progress(name)
        try:
            results.append(run(name, image, budget, patch, inputs, suit=True))
        except GpuLodError as error:
            results.append(Skipped(name, " ".join(str(error).split())))
    skipped = [result for result in results if isinstance(result, Skipped)]
    if len(skipped) == len(results):
        raise InputError(f"no allocator can do that. {skipped[0].name}: {skipped[0].reason}")
    return results
