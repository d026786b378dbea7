"""What all allocators share: what they take, how it is checked, and how sites become tokens."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F

from gpu_lod import by_kernel, checks, dispatch, heap, precision
from gpu_lod.allocate.fixations import peaks_of
from gpu_lod.allocate.scale import HIGHEST, Summable
from gpu_lod.cached import constant, known, numbers
from gpu_lod.errors import InputError
from gpu_lod.feature_maps import AT_ONCE
from gpu_lod.gather_patches import gather_patches
from gpu_lod.kernels import choosing
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels.vortices import tiles
from gpu_lod.patch_grid import Pool as Pool
from gpu_lod.patch_grid import pooled
from gpu_lod.planewise import joined
from gpu_lod.pyramid import Pyramid
from gpu_lod.salient_cells import saliency_cells
from gpu_lod.token_set import TokenSet, blended

Coarser = Literal["max", "sum"]
Need = Literal["image", "relevance", "query", "fixation", "labels"]

_registry: dict[str, type[Allocator]] = {}
A = TypeVar("A", bound="type[Allocator]")


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

    def split(self, count: int) -> list[Scene]:
        """Scenes of so many images each, the last of what is left."""
        given = (None if self.image is None else self.top, self.fixation, self.query, self.labels)
        parts = [[None] * -(-self.batch // count) if x is None else x.split(count) for x in given]
        return [
            replace(self, relevance=relevance, image=image, fixation=fixation, query=query, labels=labels, chain=[])
            for relevance, image, fixation, query, labels in zip(self.relevance.split(count), *parts, strict=True)
        ]

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


class Allocator(ABC):
    """Exactly `budget` sites for every image of a batch. Same input, same sites.

    Args:
        budget: K, at least 1.
        patch: P, samples along a patch's side; the grid's cells are P x P pixels.
        pool: how a relevance map of the picture's size becomes one of the grid: "mean" or "max" over each cell.
    """

    needs: ClassVar[tuple[Need, ...]] = ("relevance",)
    """What it must be given. Relevance that is not given is the saliency of the image."""

    takes: ClassVar[tuple[Need, ...]] = ()
    """What it looks at, if given, beyond what it needs; images and relevance are always taken. Others are refused."""

    blends: ClassVar[bool] = False
    """Whether a token is a blend of level-0 patches, by the weights of `choose`; else it is read at its site."""

    finest: ClassVar[bool] = False
    """Whether all sites are of level 0; a class that chooses anew says so anew."""

    nested: bool = False
    """Whether a smaller budget's tokens are the first of a larger one's; a class that chooses anew says so anew."""

    monotone: bool = False
    """Whether raising a cell's relevance, where none is negative, never loses the cell's own token."""

    query_width: int | None = None
    """D of a query; None is any."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in ("finest", "nested"):
            if "choose" in vars(cls) and name not in vars(cls):
                setattr(cls, name, False)

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean") -> None:
        self.budget = checks.integer(budget, "budget", at_least=1, at_most=2**20)
        self.patch = checks.integer(patch, "patch", at_least=1, at_most=2**12)
        self.pool: Pool = checks.choice(pool, "pool", ("mean", "max"))

    @abstractmethod
    def choose(self, scene: Scene) -> tuple[torch.Tensor, ...]:
        """Sites [B, K, 3] and scores [B, K], high scores first; and weights [B, K, Hg Wg] if there are such: how much
        of each level-0 patch, row by row, goes into each token. They sum to 1 for each token."""

    @precision.in_full
    def __call__(
        self,
        image: torch.Tensor | Pyramid | None = None,
        relevance: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        fixation: Any = None,
        labels: torch.Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> TokenSet:
        """Choose sites, and read the patches there.

        Shape: image [B, C, H, W] or [C, H, W], or a mean `Pyramid` of one; relevance [B, Hg, Wg] over the grid of
            level-0 patches, Hg = ceil(H / P), or [B, H, W]; query [B, D] or [D]; fixation [B, 2] or [2]; labels
            [B, H, W] or [B, Hg, Wg], integers; without B for an unbatched image.
        Units: relevance in any units, higher is more relevant, infinities too, compared as fp32; fixation (x, y) in
            [0, 1], y down.

        Args:
            image: None gives sites alone, of a picture of Hg P x Wg P pixels.
            relevance: None is the saliency of the image (channel 5 of `feature_maps`).
            mean, std: a number a channel, of the image; patches are then (value - mean) / std, as in `gather_patches`.

        Raises:
            InputError: something that the allocator needs is missing, is not taken, or does not fit; NaN in the
                relevance; a budget larger than the number of sites there are.
            UnsupportedError: inside `torch.func.vmap`.
        """
        heap.keep_freed()
        scene, batched = self._scene(image, relevance, query, fixation, labels)
        found = self._in_parts(scene, lambda part: self._chosen(part, mean, std))
        if not batched:
            found = tuple(value[0] for value in found)
        sites, scores, weights, patches = (*found, None, None)[:4]
        assert sites is not None and scores is not None
        if scene.image is not None and not self.blends:
            patches = self._read(scene, sites, mean, std)
        return TokenSet(sites, scores, patches, self.patch, weights)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        return f"budget={self.budget}, patch={self.patch}, pool={self.pool!r}"

    def work(self, scene: Scene) -> int:
        """Numbers that it goes through for each image of a scene, where they are many; 0 where they are few."""
        return 0

    def _in_parts(
        self, scene: Scene, job: Callable[..., tuple[torch.Tensor, ...]], *of_images: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`job(scene, *of_images)`. On a CPU for so many images at a time that they are no more than `AT_ONCE` numbers:
        fresh memory for all of a large batch takes it longer than the work does."""
        work = self.work(scene)
        at_once = max(1, AT_ONCE // work) if work and scene.device.type == "cpu" else scene.batch
        if scene.batch <= at_once:
            return job(scene, *of_images)
        parts = zip(scene.split(at_once), *(x.split(at_once) for x in of_images), strict=True)
        return joined((job(*part) for part in parts), scene.batch)

    def _chosen(
        self, scene: Scene, mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> tuple[torch.Tensor, ...]:
        """What `choose` gives, and the patches where they are blends: while their weights are near by."""
        found = self.choose(scene)
        if not isinstance(found, (tuple, list)) or not all(isinstance(values, torch.Tensor) for values in found):
            raise InputError(
                f"choose() of {type(self).__name__} gave a {type(found).__name__}; expected tensors (sites, scores)"
                f"{', and weights' * self.blends}."
            )
        shapes = [(scene.batch, self.budget, 3), (scene.batch, self.budget)]
        shapes += [(*shapes[1], scene.grid[0] * scene.grid[1])] * self.blends
        if [tuple(values.shape) for values in found[: len(shapes)]] != shapes:
            if self._of_the_package:  # whose budget was changed
                raise InputError(
                    f"{type(self).__name__} has parameters for a budget of {found[1].shape[1]}, not {self.budget}. "
                    "Make another one for that."
                )
            raise InputError(
                f"choose() of {type(self).__name__} gave {', '.join(str(tuple(values.shape)) for values in found)}; "
                f"expected sites, scores{' and weights' * self.blends} of {', '.join(map(str, shapes))}: exactly "
                f"{self.budget} for each image."
            )
        if scene.image is None or not self.blends:
            return found
        return *found, self._blended(scene, found[2], mean, std)

    def _blended(
        self,
        scene: Scene,
        weights: torch.Tensor,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Patches [B, K, C, P, P] by weights [B, K, Hg Wg]."""
        grid = self._tiles(scene) if mean is None and std is None else None
        if grid is not None:
            return blended(weights, grid.flatten(-3)).unflatten(-1, grid.shape[-3:])
        every = scene.sites(0, torch.arange(scene.grid[0] * scene.grid[1], device=scene.device))
        kind = torch.float32 if scene.top.dtype == torch.uint8 else scene.top.dtype
        grid = self._gathered(scene.top, every, finest=True, mean=mean, std=std, dtype=kind)
        return blended(weights, grid.flatten(-3)).unflatten(-1, grid.shape[-3:])

    @staticmethod
    def _tiles(scene: Scene) -> torch.Tensor | None:
        """All level-0 patches [B, Hg Wg, C, P, P] of pictures that are whole ones, by a kernel that copies; None where
        they are to be gathered."""
        top, patch = scene.top, scene.patch
        if any(n % patch for n in scene.size) or top.dtype != torch.float32 or not top.numel():
            return None
        if dispatch.needs_grad(top) or not by_kernel.usable(top):
            return None
        return by_kernel.attempt(top.device, lambda: tiles(kernels.device_of(top), top, patch))

    def _read(
        self,
        scene: Scene,
        sites: torch.Tensor,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """The patches at sites, which are without B if the image is."""
        image: Any = scene.image
        if scene.chain and not isinstance(image, Pyramid) and not self._by_kernel(image, sites):
            levels = math.ceil(float(checks.values(sites)[..., 2].max()))
            if 0 < levels <= len(scene.chain):
                chain = scene.chain[:levels]
                image = Pyramid((image, *(chain if image.ndim == 4 else [level[0] for level in chain])))
        return self._gathered(image, sites, finest=self.finest, mean=mean, std=std)

    def _gathered(self, image: Any, sites: torch.Tensor, *, finest: bool, **how: Any) -> torch.Tensor:
        """Patches at sites that were chosen here. On a GPU by one launch, or two where levels are to be made: torch
        would wait for the sites to tell what it reads, which no CUDA graph may.

        Args:
            finest: all sites are of level 0.
        """
        top = image.levels[0] if isinstance(image, Pyramid) else image
        if not top.is_floating_point() and how.get("mean") is None and how.get("std") is None:
            sites = sites.detach()  # counts have no gradients
        if not self._by_kernel(image, sites):
            return gather_patches(image, sites, self.patch, **how)
        if not self._of_the_package and checks.readable(sites):
            checks.highest_level(sites)  # which the kernel does not look at
        source = Pyramid((image,)) if finest and not isinstance(image, Pyramid) else image
        found = by_kernel.attempt(
            sites.device, lambda: gather_patches(source, sites, self.patch, backend="cuda", **how), waits=True
        )
        return gather_patches(image, sites, self.patch, **how) if found is None else found

    @property
    def _of_the_package(self) -> bool:
        """Else it chooses as its author will."""
        return type(self).choose.__module__.startswith(__package__)

    @staticmethod
    def _by_kernel(image: Any, sites: torch.Tensor) -> bool:
        top = image.levels[0] if isinstance(image, Pyramid) else image
        return not dispatch.needs_grad(sites) and by_kernel.usable(sites, top)

    # -- what it is given -------------------------------------------------------------------------------------------

    def _scene(self, image: Any, relevance: Any, query: Any, fixation: Any, labels: Any) -> tuple[Scene, bool]:
        given = {"image": image, "query": query, "fixation": fixation, "labels": labels}
        levels = image.levels if isinstance(image, Pyramid) else (image,)
        for value in (*levels, relevance, query, fixation, labels):
            checks.no_vmap(value, type(self).__name__, "pass all images as one batch.")
        for need in self.needs:
            if need != "relevance" and given[need] is None:
                raise InputError(f"{type(self).__name__} needs {need}; pass {need}=.")
        for name, value in given.items():
            if name != "image" and value is not None and name not in self.needs + self.takes:
                looks = sorted({"image", "relevance", *self.needs, *self.takes})
                raise InputError(f"{type(self).__name__} takes no {name}, but {', '.join(looks)}. Leave {name}= out.")
        if image is None and relevance is None:
            raise InputError(f"{type(self).__name__} needs an image, or a relevance map; pass image= or relevance=.")
        if image is not None and not isinstance(image, Pyramid):
            image = checks.tensor(image, "image")
        batched, batch, size = self._frame(image, relevance)
        if relevance is None:
            top = image.levels[0] if isinstance(image, Pyramid) else image
            top = top if top.ndim == 4 else top[None]
            if "relevance" in self.needs:
                grid = saliency_cells(top, self.patch, self.pool)
                if checks.readable(grid) and not torch.isfinite(grid.detach()).all():
                    raise InputError(
                        "the saliency of the image is not finite: it holds NaN, infinities, or values that are too "
                        "large. Repair it with torch.nan_to_num, scale it to [0, 1], or pass relevance=."
                    )
            else:
                grid = _grid_of(size, self.patch, batch, top.device)
        else:
            grid = self._map(relevance, batched, batch, size)
        points = None
        if fixation is not None:
            points = checks.fixation(fixation, batch)
            if not isinstance(fixation, torch.Tensor) and grid.device.type == kernels.KIND:
                # Which no graph may bring anew.
                points = numbers(tuple(map(tuple, points.tolist())), points.dtype, grid.device)
            points = points.to(grid.device)
        if image is not None:
            top = image.levels[0] if isinstance(image, Pyramid) else image
            checks.same_device(top, grid, "relevance")
        query = None if query is None else self._query(query, batched, batch).to(grid.device)
        if labels is not None:
            labels = label_maps(labels, batched, batch, size, self.patch).to(grid.device)
        return Scene(size, self.patch, grid, points, image, query, labels), batched

    def _frame(self, image: Any, relevance: Any) -> tuple[bool, int, tuple[int, int]]:
        """Whether there is a batch, how many images, and their size in pixels."""
        if image is None:
            values = checks.dense(relevance, "relevance")
            if values.ndim not in (2, 3) or not values.numel():
                raise InputError(
                    f"relevance has shape {tuple(values.shape)}; expected [B, Hg, Wg] or [Hg, Wg], with no side of 0: "
                    "give each patch a number."
                )
            size = values.shape[-2] * self.patch, values.shape[-1] * self.patch
            return values.ndim == 3, values.shape[0] if values.ndim == 3 else 1, size
        top = checks.mean_source(image, type(self).__name__, name="image")
        return top.ndim == 4, top.shape[0] if top.ndim == 4 else 1, (top.shape[-2], top.shape[-1])

    def _map(self, relevance: Any, batched: bool, batch: int, size: tuple[int, int]) -> torch.Tensor:
        values = checks.dense(relevance, "relevance")
        cells = cells_of(size, self.patch)
        expected = [(batch, *cells), (batch, *size)] if batched else [cells, size]
        if tuple(values.shape) not in expected or values.dtype == torch.bool:
            raise InputError(
                f"relevance is {values.dtype} {tuple(values.shape)}; expected numbers of shape {expected[0]}, one a "
                f"patch, or {expected[1]}, one a pixel. Resize it with torch.nn.functional.interpolate, and make masks "
                "numbers with .float()."
            )
        values = (values if batched else values[None]).float()
        checks.no_nan(values, "relevance")
        if tuple(values.shape[1:]) == cells:
            return values
        if not checks.readable(values) or bool((values.detach().abs() > 2.0**HIGHEST).any()):
            return self._pooled(values.double()).float()  # sums of such are no numbers of single precision
        return self._pooled(values)

    def _query(self, query: Any, batched: bool, batch: int) -> torch.Tensor:
        values = checks.dense(query, "query")
        width = self.query_width
        shape = tuple(values.shape)
        lengths = shape[-1:] if width is None else (width,)
        if shape not in ((lengths), (batch, *lengths)) or not values.is_floating_point() or not values.numel():
            wide = "D" if width is None else width
            raise InputError(f"query is {values.dtype} {shape}; expected floats [{batch}, {wide}] or [{wide}].")
        values = values.float()  # of float8, torch knows little else
        if checks.readable(values) and not torch.isfinite(values.detach()).all():
            raise InputError("query holds NaN or infinities; expected finite numbers in fp32.")
        return values.expand(batch, *lengths)

    def _pooled(self, values: torch.Tensor) -> torch.Tensor:
        """[B, H, W] to [B, Hg, Wg]. Where both infinities meet, the mean is the higher one."""
        found = pooled(values, self.patch, self.pool)
        return found.nan_to_num(math.inf, math.inf, -math.inf) if self.pool == "mean" else found

    def enough(self, there: int, what: str = "patches") -> None:
        """Raises InputError where the budget is larger than the number of sites."""
        if self.budget > there:
            raise InputError(
                f"the budget is {self.budget}, and there are {there} {what}. Use a larger image, smaller patches, or a "
                "smaller budget."
            )


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
            f"one a patch{all_alike}."
        )
    return values.long().expand(batch, *shape[-2:])


def unit(values: torch.Tensor) -> torch.Tensor:
    """fp32, uint8 over 255."""
    return values.float() / 255 if values.dtype == torch.uint8 else values.float()


def cells_of(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """(Hg, Wg) of a picture."""
    return math.ceil(size[0] / patch), math.ceil(size[1] / patch)


def _grid_of(size: tuple[int, int], patch: int, batch: int, device: torch.device) -> torch.Tensor:
    return torch.ones(batch, *cells_of(size, patch), dtype=torch.float32, device=device)


_FEW, _MANY = 4, 1024
"""From so many times as many numbers as are wanted on, and from so many, a CPU finds these faster than it sorts all."""


def ordered(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest `count` of [..., N], high first, equal ones by their place: (scores, indices), both [..., count]."""
    made = _by_kernel(scores, count)
    if made is not None:
        return made
    many = scores.shape[-1] >= max(_FEW * count, _MANY)
    if many and scores.dtype == torch.float32 and scores.device.type == "cpu" and not checks.transformed(scores):
        index = _highest(scores.detach(), count)
        return scores.gather(-1, index), index
    found, index = torch.sort(scores, dim=-1, descending=True, stable=True)
    return found[..., :count], index[..., :count]


def _by_kernel(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `ordered`, where a kernel finds them faster than a GPU sorts all; None elsewhere."""
    if scores.ndim != 2 or scores.dtype not in (torch.float32, torch.float64) or not scores.numel():
        return None
    count = min(count, scores.shape[1])
    if not 0 < count <= choosing.MOST_BEST or scores.shape[1] > choosing.MOST_SCORES or not by_kernel.usable(scores):
        return None
    device = kernels.device_of(scores)
    found = by_kernel.attempt(scores.device, lambda: choosing.best(device, scores, count))
    if found is None or not dispatch.needs_grad(scores):
        return found
    return scores.gather(1, found[1]), found[1]


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Their places. torch.topk is not stable, so it is given keys of which no two are equal: a number's bits above, its
    place below."""
    bits = (scores + 0.0).view(torch.int32)  # of 0 for -0, which are equal
    last = scores.shape[-1] - 1
    # Negative numbers of two's complement are in the order of floats when all bits but the sign are turned.
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long().bitwise_left_shift_(32)
    keys += torch.arange(last, -1, -1, device=scores.device)
    return last - torch.topk(keys, count, dim=-1).values.bitwise_and_(0xFFFFFFFF)


def places(taken: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` taken ones of each row of [B, N] are, in order: [B, count]. Asks a GPU for nothing."""
    numbers = torch.arange(taken.shape[1], device=taken.device).expand_as(taken)
    slots = torch.where(taken, taken.cumsum(1) - 1, count)  # all the others into one slot more
    return numbers.new_zeros(len(taken), count + 1).scatter_(1, slots, numbers)[:, :count]


def at_sites(scene: Scene, values: torch.Tensor, sites: torch.Tensor) -> torch.Tensor:
    """[B, K]: values [B, Hg, Wg] of the grid's cells that sites [B, K, 2 or 3] are in."""
    cells = []
    for n, count, place in zip(scene.size, scene.grid, (sites[..., 1], sites[..., 0]), strict=True):
        # Sites of lattices lie on edges of cells, and a GPU divides by a number by multiplying with its inverse.
        along = torch.div(place.detach() * n, scene.patch, rounding_mode="floor")
        cells.append(along.long().clamp(0, count - 1))
    return values.flatten(1).gather(1, cells[0] * scene.grid[1] + cells[1])


def scored(scene: Scene, sites: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sites [B, K, 3] by the relevance at them, high first, equal ones in the order they are in; and that: [B, K]."""
    scores, order = ordered(at_sites(scene, scene.relevance, sites), sites.shape[1])
    return sites.gather(1, order[..., None].expand_as(sites)), scores


def coarser(values: torch.Tensor, pool: Coarser) -> torch.Tensor:
    """[B, h, w] to [B, ceil(h / 2), ceil(w / 2)]: over the 1 to 4 children of each node."""
    height, width = values.shape[-2:]
    bottom, right = height % 2, width % 2

    def padded(x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        # F.pad copies even where there is nothing to pad.
        return (F.pad(x, (0, right, 0, bottom), value=value) if bottom or right else x)[:, None]

    if pool == "max":
        return F.max_pool2d(padded(values, -math.inf), 2)[:, 0]
    return F.avg_pool2d(padded(values), 2, divisor_override=1)[:, 0]


def register(allocator: A) -> A:
    """Add an allocator, by its class's name. Decorates a class.

    Raises:
        InputError: no class of allocators, or another one has that name.
    """
    if not (isinstance(allocator, type) and issubclass(allocator, Allocator)):
        raise InputError(f"{allocator!r} is no class of allocators; derive it from gpu_lod.allocate.Allocator.")
    if inspect.isabstract(allocator):
        raise InputError(f"{allocator.__name__} has no choose() of its own; give it one.")
    there = _registry.get(allocator.__name__, allocator)
    if (there.__module__, there.__qualname__) != (allocator.__module__, allocator.__qualname__):
        # The same one again is a notebook's cell that is run anew.
        raise InputError(
            f"there is an allocator {allocator.__name__} already, that of {there.__module__}; give the class another "
            "name."
        )
    _registry[allocator.__name__] = allocator
    return allocator


def names() -> list[str]:
    """The allocators there are."""
    return sorted(_registry)


def make(name: str, *args: Any, **kwargs: Any) -> Allocator:
    """An allocator by its name."""
    checks.choice(name, "name", names())
    return _registry[name](*args, **kwargs)
