"""Scene: what an allocator chooses from, and where the level-0 patches of a picture are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from gpu_lod import checks
from gpu_lod.allocate.fixations import peaks_of
from gpu_lod.allocate.scale import Summable
from gpu_lod.cached import constant, known, numbers
from gpu_lod.errors import InputError
from gpu_lod.pyramid import Pyramid
from gpu_lod.saliency import unit


@dataclass(frozen=True)
class Scene:
    """What an allocator chooses from: a batch, on one device."""

    size: tuple[int, int]
    """(H, W) in pixels."""
    patch: int
    relevance: torch.Tensor
    """[B, Hg, Wg], fp32; all equal for an allocator that needs none and got none."""
    fixation: torch.Tensor | None
    """[B, 2]"""
    image: torch.Tensor | Pyramid | None
    query: torch.Tensor | None
    """[B, D], fp32"""
    labels: torch.Tensor | None
    """int64 [B, H, W], or [B, Hg, Wg]"""
    chain: list[torch.Tensor] = field(default_factory=list)
    """Levels 1, 2, ... of the image's mean chain, [B, C, h, w], where a choice needed them."""
    _common: dict[str, torch.Tensor] | None = None

    @property
    def batch(self) -> int:
        return self.relevance.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        """(Hg, Wg): level-0 patches along each side."""
        return self.relevance.shape[1], self.relevance.shape[2]

    @property
    def device(self) -> torch.device:
        return self.relevance.device

    @property
    def top(self) -> torch.Tensor:
        """Level 0 of the image, [B, C, H, W]; raises where there is no image."""
        if self.image is None:
            raise InputError("there is no image to look at; pass image=.")
        top = self.image.levels[0] if isinstance(self.image, Pyramid) else self.image
        return top if top.ndim == 4 else top[None]

    def pixels(self) -> torch.Tensor:
        """Level 0 of the image [B, C, H, W], fp32, uint8 over 255."""
        return unit(self.top)

    def amounts(self) -> torch.Tensor:
        """Relevance that can be summed: finite, not negative (the least is 0 if it was; -inf is the least there is, and
        moves nothing else), and not all 0. Very large and very small relevance is scaled, each image by itself. To be
        read, and not written to: it is made once, but where gradients are asked for."""
        return self._summable.amounts

    @property
    def _summable(self) -> Summable:
        return Summable(self.relevance) if self.relevance.requires_grad else self._made_once

    @cached_property
    def _made_once(self) -> Summable:
        return Summable(self.relevance)

    def fixations(self, count: int = 1, **how: float) -> torch.Tensor:
        """Peaks of relevance, [B, count, 2], in parts of the picture, which the grid may reach over; arguments as in
        `find_fixations`."""
        points = peaks_of(self._summable.finite, count, **how)
        sides = numbers((self.size[1], self.size[0]), points.dtype, points.device)
        cells = numbers((self.grid[1], self.grid[0]), points.dtype, points.device)
        half = (self.patch / 2 / sides).clamp(max=0.5)  # a patch at a far edge is flush with it
        return torch.minimum(torch.maximum(points * (cells * self.patch / sides), half), 1 - half)

    def common(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make()` gives, which is the same for all images: made once for all parts of a split."""
        if self._common is None:
            return make()
        if name not in self._common:
            self._common[name] = make()
        return self._common[name]

    def split(self, count: int) -> list[Scene]:
        """Scenes of so many images each, the last of what is left."""
        given = (None if self.image is None else self.top, self.fixation, self.query, self.labels)
        parts = [[None] * -(-self.batch // count) if x is None else x.split(count) for x in given]
        names, common = ("relevance", "image", "fixation", "query", "labels"), dict[str, torch.Tensor]()
        return [
            replace(self, **dict(zip(names, part, strict=True)), chain=[], _common=common)
            for part in zip(self.relevance.split(count), *parts, strict=True)
        ]

    def some(self, index: torch.Tensor) -> Scene:
        """The scene of some of the images."""
        if len(index) == self.batch:
            return self

        def part(value: Any) -> Any:
            if isinstance(value, Pyramid):
                return Pyramid(tuple(level[index] for level in value.levels), value.reduce, value.generator)
            return None if value is None else value[index]

        names = ("relevance", "fixation", "image", "query", "labels")
        given = {name: part(getattr(self, name)) for name in names}
        return replace(self, **given, chain=[], _common=None)  # the levels of these images, not of all

    def centres(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x of the centres of each column of level-0 patches, and y of those of each row, in parts of the sides."""
        rows, columns = self.grid
        x, y = constant(self.device, centres_of, self.size, self.patch).split((columns, rows))
        return x, y

    def sites(self, level: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Sites [..., 3] of nodes of the quadtree, by their row-major index at a level: one for all, or one each.

        A node's patch covers the 2^level x 2^level grid cells that the node does. One that would reach over the edge is
        shifted inward until flush with it, and centred if it is larger than the image.
        """
        if isinstance(level, int) and self.grid[0] * self.grid[1] <= TABLE:
            table = known(index.device, sites_of, self.size, self.patch, (level,))
            if table is not None:
                return table[index]
        return _sites(self.size, self.patch, level, index)


TABLE = 2**18
"""Cells of a grid of which the sites of all nodes are kept, so that a site is looked up and not computed."""


def sites_of(size: tuple[int, int], patch: int, levels: tuple[int, ...]) -> torch.Tensor:
    """[N, 3], the sites of all nodes of some levels, one level after the other."""
    found = []
    for level in levels:
        count = math.prod(-(-cells // 2**level) for cells in cells_of(size, patch))
        found.append(_sites(size, patch, level, torch.arange(count, device="cpu")))
    return torch.cat(found)


def centres_of(size: tuple[int, int], patch: int) -> torch.Tensor:
    """[columns + rows], x of the centres of each column of level-0 patches, and y of those of each row."""
    rows, columns = cells_of(size, patch)
    x = _sites(size, patch, 0, torch.arange(columns, device="cpu"))[:, 0]
    return torch.cat([x, _sites(size, patch, 0, torch.arange(rows, device="cpu") * columns)[:, 1]])


def _sites(size: tuple[int, int], patch: int, level: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[..., 3], as `Scene.sites`."""
    levels = torch.full_like(index, level) if isinstance(level, int) else level
    step = 1 << levels
    columns = (cells_of(size, patch)[1] + step - 1) // step
    side = (step * patch)[..., None].double()
    cells = torch.stack([index % columns, index // columns], dim=-1).to(torch.float64)
    box = numbers((size[1], size[0]), cells.dtype, cells.device)
    centres = torch.minimum((cells + 0.5) * side, box - side / 2)
    centres = torch.where(box <= side, box / 2, centres)
    return torch.cat([centres / box, levels[..., None]], dim=-1).float()


def label_maps(labels: Any, batched: bool, batch: int, size: tuple[int, int], patch: int) -> torch.Tensor:
    """int64 [B, H, W] or [B, Hg, Wg], of labels as an allocator takes them.

    Args:
        size: (H, W) of the pictures in pixels.

    Raises:
        InputError: labels of another shape, or that are no integers.
    """
    values = checks.dense(labels, "labels")
    cells = cells_of(size, patch)
    shape = tuple(values.shape)
    kind = values.dtype
    if shape[-2:] not in (size, cells) or shape[:-2] not in ((), (batch,)) or kind.is_floating_point:
        first, all_alike = ((batch,), ", or one such map for all images") if batched else ((), "")
        raise InputError(
            f"labels are {kind} {shape}; expected integers, {(*first, *size)} one a pixel, or {(*first, *cells)} "
            f"one a patch{all_alike}. torch.nn.functional.interpolate resizes [B, 1, H, W] of floats by nearest "
            "neighbours."
        )
    return values.long().expand(batch, *shape[-2:])


def cells_of(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """(Hg, Wg) of a picture."""
    return math.ceil(size[0] / patch), math.ceil(size[1] / patch)
