"""Foveation and patches from a pyramid that is there, at a new fixation every call; and batches in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import eight_texels
import torch
import torch.nn.functional as F
from bench_log_polar import READY, RINGS, WEDGES
from inputs import ANEW, PLANNED, inputs_for, job, picture, planned, uploaded
from rows import Row
from timer import Race, able, race

import gpu_lod as lod
from gpu_lod.foveate import reference
from gpu_lod.foveate_tiles import level_map
from gpu_lod.halving import stored

Size = tuple[int, int, int]
BUDGET = 273


def _foveate_every_level(pyramid: lod.Pyramid, fixation: torch.Tensor) -> torch.Tensor:
    """The way one writes it first: bring every level to full size, blend by weight."""
    height, width = pyramid.size
    total = torch.zeros((), device=pyramid.device)
    points = fixation.to(pyramid.device)
    level = torch.stack([level_map(point, (height, width), 0.05, 0.0) for point in points])[:, None]
    for index, image in enumerate(pyramid):
        weight = (1 - (level - index).abs()).clamp(min=0)
        if weight.any():
            total = total + weight * F.interpolate(image.float(), (height, width), mode="bilinear")
    return total


def _patches_every_level(pyramid: lod.Pyramid, sites: torch.Tensor, patch: int = 14) -> torch.Tensor:
    """The same of patches: all samples of every level that a site reads, blended by weight."""
    height, width = pyramid.size
    sites = sites.to(pyramid.device).expand(pyramid.batch, -1, -1)
    steps = torch.arange(patch, device=pyramid.device) - (patch - 1) / 2
    step = torch.exp2(sites[..., 2, None])
    x = (sites[..., 0, None] + steps * step / width)[:, :, None, :].expand(-1, -1, patch, -1)
    y = (sites[..., 1, None] + steps * step / height)[:, :, :, None].expand(-1, -1, -1, patch)
    grid = torch.stack([2 * x - 1, 2 * y - 1], -1).flatten(2, 3)
    total = torch.zeros((), device=pyramid.device)
    for index, image in enumerate(pyramid):
        weight = (1 - (sites[..., 2] - index).abs()).clamp(min=0)
        if weight.any():
            sampled = F.grid_sample(image.float(), grid, padding_mode="border", align_corners=False)
            total = total + weight[:, None, :, None] * sampled
    return total.transpose(1, 2).unflatten(-1, (patch, patch))


class OnePicture:
    """A mean pyramid laid out as one picture in fp32, so that one `grid_sample` of a batch of two reads both levels of
    all sites: level 0 to the left, the others below each other beside it, a texel of their edge about each."""

    def __init__(self, pyramid: lod.Pyramid) -> None:
        self.size, self.dtype, device = pyramid.size, pyramid.dtype, pyramid.device
        top, *rest = (F.pad(level.float(), (1, 1, 1, 1), mode="replicate") for level in pyramid)
        height = max(top.shape[-2], sum(level.shape[-2] for level in rest))
        width = top.shape[-1] + max((level.shape[-1] for level in rest), default=0)
        picture = top.new_zeros(*top.shape[:2], height, width)
        boxes, below = [], 0  # of each level without its edge: x, y, width, height
        for level in (top, *rest):
            h, w = level.shape[-2:]
            x, y = (0, 0) if level is top else (top.shape[-1], below)
            picture[..., y : y + h, x : x + w] = level
            boxes.append((x + 1, y + 1, w - 2, h - 2))
            below += 0 if level is top else h
        self.twice = picture.repeat(2, 1, 1, 1)
        first, sides = torch.tensor(boxes, dtype=torch.float32, device=device).split(2, dim=1)
        whole = torch.tensor([width, height], dtype=torch.float32, device=device)
        scale, shift = 2 * sides / whole, 2 * first / whole - 1
        low, high = 2 * (first + 0.5) / whole - 1, 2 * (first + sides - 0.5) / whole - 1
        self.table = torch.stack([scale, shift, low, high], dim=1)[..., None]
        """[levels, 4, 2, 1]: from parts of the sides to what grid_sample counts, and a level's outermost texels."""
        self.next = torch.tensor([[[0]], [[1]]], device=device)

    def gather_patches(self, sites: torch.Tensor, patch: int = 14) -> torch.Tensor:
        """At sites [B, K, 3], whose centres are taken as they are."""
        sites = sites.to(self.twice.device).expand(len(self.twice) // 2, -1, -1)
        level = sites[..., 2]
        fine = level.floor()
        sides = sites.new_tensor([self.size[1], self.size[0]])[:, None]
        steps = (torch.arange(patch, device=sites.device) - (patch - 1) / 2) / sides
        along = torch.addcmul(sites[..., :2, None], steps, level.exp2()[..., None, None])  # [B, K, 2, P]
        of_level = self.table[(fine.long() + self.next).clamp_(max=len(self.table) - 1)]  # [2, B, K, 4, 2, 1]
        scale, shift, low, high = of_level.unbind(-3)
        places = torch.addcmul(shift, along, scale).clamp_(low, high)
        x, y = places.unbind(-2)
        grid = x.new_empty(*x.shape[:3], patch, patch, 2)
        grid[..., 0], grid[..., 1] = x[..., None, :], y[..., :, None]
        made = F.grid_sample(self.twice, grid.view(len(self.twice), -1, patch, 2), align_corners=False)
        fine_one, coarse = made.unflatten(0, (2, -1)).unflatten(3, (-1, patch)).transpose(2, 3)
        return stored(torch.lerp(fine_one, coarse, (level - fine)[..., None, None, None]), self.dtype)


def _at(sample: Callable[..., object], points: Iterator[torch.Tensor]) -> Callable[[Any], object]:
    return lambda src: sample(src, next(points))


def _kernels(verb: Callable[..., object], device: str) -> list[tuple[str, Callable[..., object]]]:
    return [("cuda kernels", partial(verb, backend="cuda"))] if torch.device(device).type == "cuda" else []


FROM_MEMORY = "cuda kernels from memory"
"""A side whose pyramid is a texture that it does not read."""


def from_memory(verb: Callable[..., object]) -> Callable[..., object]:
    """A verb of a pyramid, by kernels that read its levels where they are."""
    return lambda pyramid, at: verb(lod.Pyramid(pyramid.levels), at, backend="cuda")


def _both(verb: Callable[..., object], device: str) -> list[tuple[str, Callable[..., object]]]:
    kernels = _kernels(verb, device)
    return kernels + [(FROM_MEMORY, from_memory(verb))] * bool(kernels)


def foveate(
    sizes: list[Size],
    dtypes: list[torch.dtype],
    seconds: float,
    device: str = "cpu",
    race: Race = race,
    cache: str = "warm",
) -> Iterator[Row]:
    for height, width, batch in sizes:
        for dtype in dtypes:
            image = picture(height, width, batch=batch, dtype=dtype).to(device)
            pyramids = inputs_for(image, cache, lambda x: uploaded(lod.mipmap(x)))
            points = cycle(torch.rand(64, batch, 2).unbind())
            sides: dict[str, Callable[[], object]] = {
                name: job(_at(way, points), pyramids)
                for name, way in (
                    ("auto", lod.foveate),
                    ("gl compute", partial(lod.foveate, backend="gl")),
                    *_both(lod.foveate, device),
                    ("torch coarse to fine, boxes", partial(lod.foveate, backend="torch")),
                    ("torch every level", _foveate_every_level),
                )
            }
            sides |= eight_texels.sides(lod.foveate, pyramids, points)
            yield Row(
                "foveate", "end to end", height, width, batch, 3, str(dtype)[6:], cache, 2 * image.nbytes,
                race(sides, seconds=seconds), note=READY,
            )  # fmt: skip


IMAGE = "from an image"


def foveate_once(
    sizes: list[Size], dtypes: list[torch.dtype], seconds: float, device: str = "cpu", race: Race = race
) -> Iterator[Row]:
    """Of a source that is sampled once: OpenGL makes it a texture first, of an image also its chain."""
    for size in sizes:
        for dtype in dtypes:
            points = cycle(torch.rand(64, size[2], 2).unbind())
            moved = 2 * 3 * math.prod(size) * dtype.itemsize
            yield from _once(
                lod.foveate, "torch coarse to fine, boxes", size, dtype, points, moved, "", seconds, device, race
            )


def others_once(
    sizes: list[Size], dtypes: list[torch.dtype], seconds: float, device: str = "cpu", race: Race = race
) -> Iterator[Row]:
    """The same of the other samplers."""
    for size in sizes:
        height, width, batch = size
        for dtype in dtypes:
            fixations = torch.rand(64, batch, 2).unbind()
            mapped = partial(lod.log_polar, rings=RINGS, wedges=WEDGES)
            moved = 2 * 3 * batch * RINGS * WEDGES * dtype.itemsize
            yield from _once(
                mapped, "torch two levels a ring", size, dtype, cycle(fixations), moved, "", seconds, device, race
            )
            patched, moved = lod.gather_patches, 2 * 3 * batch * BUDGET * 14**2 * dtype.itemsize
            for words, sites in (
                ("cortical sites", [lod.cortical_sites(at, BUDGET, (height, width)) for at in fixations[:16]]),
                ("sites on the grid", [_grid_sites(height, width, batch, 14, BUDGET) for _ in range(16)]),
            ):
                words, own = f"{BUDGET} x 14 x 14, {words}; ", "torch sites of a level together"
                yield from _once(patched, own, size, dtype, cycle(sites), moved, words, seconds, device, race)


def _once(
    verb: Callable[..., object],
    own: str,
    size: Size,
    dtype: torch.dtype,
    points: Iterator[torch.Tensor],
    moved: int,
    words: str,
    seconds: float,
    device: str,
    race: Race,
) -> Iterator[Row]:
    """A row from a pyramid that is no texture, and one from an image.

    Args:
        own: what the verb does in torch.
        moved: bytes.
        words: before the note.
    """
    height, width, batch = size
    image = picture(height, width, batch=batch, dtype=dtype).to(device)
    levels = lod.mipmap(image).levels
    for note, source in ((ANEW, partial(lod.Pyramid, levels)), (IMAGE, partial(torch.Tensor.detach, image))):

        def once(way: Callable[..., object], source: Any = source) -> object:
            return way(source(), next(points))

        sides: dict[str, Callable[[], object]] = {
            name: partial(once, way)
            for name, way in (
                ("auto", verb),
                ("gl compute", partial(verb, backend="gl")),
                *_kernels(verb, device),
                (own, partial(verb, backend="torch")),
            )
        }
        other = {}
        if note == IMAGE and _kernels(verb, device):
            planned = lod.plan(partial(verb, backend="cuda"), image, next(points).to(device))
            sides["cuda plan"] = lambda planned=planned: planned(image, next(points).to(device))  # type: ignore[misc]
            other["cuda plan"] = "its result lasts until the next call"
        name = getattr(verb, "func", verb).__name__
        yield Row(
            name, "end to end", height, width, batch, 3, str(dtype)[6:], "warm", moved,
            race(sides, seconds=seconds), note=words + note, other_job=other,
        )  # fmt: skip


def foveate_at_one_place(seconds: float, device: str = "cpu", race: Race = race, side: int = 1024) -> Iterator[Row]:
    """Torch may keep what depends on the fixation alone; the shader works it out at each call."""
    image = picture(side, side).to(device)
    pyramid = lod.mipmap(image).upload()
    point = torch.tensor([[0.4, 0.6]], device=device)
    kept = level_map(point[0], (side, side), 0.05, 0.0)
    sides: dict[str, Callable[[], object]] = {
        "gl compute": partial(lod.foveate, pyramid, point, backend="gl"),
        "torch coarse to fine, boxes, levels kept": lambda: reference(list(pyramid.levels), point, 0.05, kept=kept),
    }
    yield Row(
        "foveate", "end to end", side, side, 1, 3, "float32", "warm", 2 * image.nbytes,
        race(sides, seconds=seconds), note=f"{READY}; the fixation stays, and torch has kept its level map",
    )  # fmt: skip


def anisotropic(seconds: float, device: str = "cpu", race: Race = race, side: int = 1024) -> Iterator[Row]:
    """Sixteen times as sharp across the radius: 16 samples along it; a GPU's texture units choose theirs."""
    image = picture(side, side).to(device)
    pyramid = lod.mipmap(image).upload()
    points = cycle(torch.rand(64, 1, 2).unbind())
    sides: dict[str, Callable[[], object]] = {
        name: job(_at(partial(lod.foveate, anisotropy=16, backend=backend), points), [pyramid])
        for name, backend in (("auto", "auto"), ("gl compute", "gl"), ("torch 16 probes", "torch"))
    }
    sides, dropped = able(sides)
    yield Row(
        "foveate", "end to end", side, side, 1, 3, "float32", "warm", 2 * image.nbytes,
        race(sides, seconds=seconds), note=f"{READY}; {ANISOTROPIC}", extra={"dropped": dropped} if dropped else {},
    )  # fmt: skip


ANISOTROPIC = "anisotropy 16"


WITH_BACKWARD = "forward and backward"


def gradients(seconds: float, device: str = "cpu", race: Race = race, side: int = 1024) -> Iterator[Row]:
    """From an image to its gradient. What a sampler's shader has made is differentiated by torch, which makes the chain
    again; pyramids have adjoints of their own."""
    image = picture(side, side).to(device).requires_grad_()
    points = cycle(torch.rand(16, 1, 2).unbind())
    sites = cycle([lod.cortical_sites(next(points), BUDGET, (side, side)) for _ in range(16)])
    rings, wedges = min(side // 4, 256), min(side // 2, 512)

    def levels(verb: Callable[..., lod.Pyramid], first: int) -> Callable[..., list[torch.Tensor]]:
        return lambda image, _, backend: list(verb(image, backend=backend).levels[first:])

    verbs: list[tuple[str, Callable[..., Any], Iterator[torch.Tensor], str, tuple[int, ...]]] = [
        ("log_polar", lod.log_polar, points, f"{rings} x {wedges} samples", (rings, wedges)),
        ("foveate", lod.foveate, points, "", ()),
        ("gather_patches", lod.gather_patches, sites, f"{BUDGET} x 14 x 14, cortical sites", ()),
        ("mipmap", levels(lod.mipmap, 1), points, "", ()),
        ("gaussian", levels(lod.gaussian, 1), points, "", ()),
        ("laplacian", levels(lod.laplacian, 0), points, "", ()),
    ]
    for name, verb, places, words, sizes in verbs:
        result = verb(image.detach(), next(places), *sizes, backend="torch")
        weights = [torch.rand_like(one) for one in (result if isinstance(result, list) else [result])]

        def there_and_back(
            backend: str, verb: Any = verb, places: Any = places, sizes: Any = sizes, weights: Any = weights
        ) -> object:
            made = verb(image, next(places), *sizes, backend=backend)
            return torch.autograd.grad(made if isinstance(made, list) else [made], image, weights)

        sides: dict[str, Callable[[], object]] = {
            "auto": partial(there_and_back, "auto"),
            "gl compute": partial(there_and_back, "gl"),
            "torch": partial(there_and_back, "torch"),
        }
        moved = 2 * (image.nbytes + sum(one.nbytes for one in weights))
        yield Row(
            name, "end to end", side, side, 1, 3, "float32", "warm", moved,
            race(sides, seconds=seconds), note="; ".join(filter(None, [words, f"{IMAGE}, {WITH_BACKWARD}"])),
        )  # fmt: skip


def sites_by_search(fixation: torch.Tensor, budget: int, size: tuple[int, int], patch: int = 14) -> torch.Tensor:
    """Cortical sites as one would write them: the density by bisection, N inverted by a table."""
    height, width = size
    e0, longer = 0.05, max(size)
    box = torch.tensor([width, height]) / longer
    table = torch.linspace(0, 1.5, 4096).square()
    within = torch.log1p(table / e0) + e0 / (table + e0) - 1
    index = torch.arange(8 * budget) + 0.5
    angle = (index - 0.5) * torch.pi * (3 - 5**0.5)
    away = torch.stack([angle.cos(), angle.sin()], dim=-1) / box

    def radius(density: torch.Tensor) -> torch.Tensor:
        wanted = (index / density[:, None]).clamp(max=float(within[-1]))
        above = torch.searchsorted(within, wanted).clamp(1, len(table) - 1)
        low, high = within[above - 1], within[above]
        return torch.lerp(table[above - 1], table[above], (wanted - low) / (high - low))

    low, high = fixation.new_full((len(fixation),), 1.0), fixation.new_full((len(fixation),), 1e4)
    for _ in range(24):
        middle = (low * high).sqrt()
        at = fixation[:, None] + radius(middle)[..., None] * away
        enough = ((at >= 0) & (at <= 1)).all(-1).sum(-1) >= budget
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    e = radius(high)
    at = fixation[:, None] + e[..., None] * away
    inside = ((at >= 0) & (at <= 1)).all(-1)
    order = (~inside).byte().argsort(dim=1, stable=True)[:, :budget]
    spacing = (e.gather(1, order) + e0) * (2 * torch.pi / high[:, None]).sqrt()
    level = (longer * spacing / patch).clamp(min=1).log2()
    return torch.cat([at.gather(1, order[..., None].expand(-1, -1, 2)), level[..., None]], dim=-1)


def cortical_sites(batches: list[int], seconds: float) -> Iterator[Row]:
    """A verb without a backend: closed form beside search."""
    size = 1024, 1024
    for batch in batches:
        points = cycle(torch.rand(64, batch, 2).unbind())
        sides: dict[str, Callable[[], object]] = {
            "auto": lambda points=points: lod.cortical_sites(next(points), BUDGET, size),  # type: ignore[misc]
            "torch bisection": lambda points=points: sites_by_search(next(points), BUDGET, size),  # type: ignore[misc]
        }
        yield Row(
            "cortical_sites", "end to end", *size, batch, 1, "float32", "warm", 12 * batch * BUDGET,
            race(sides, seconds=seconds), note=f"{BUDGET} sites",
        )  # fmt: skip


def _grid_sites(height: int, width: int, batch: int, patch: int, budget: int) -> torch.Tensor:
    """A random choice of the patches of the grid, as a top-k gives them."""
    columns = width // patch
    chosen = torch.stack([torch.randperm(columns * (height // patch))[:budget] for _ in range(batch)])
    x, y = (chosen % columns + 0.5) * patch / width, (chosen // columns + 0.5) * patch / height
    return torch.stack([x, y, torch.zeros_like(x)], dim=-1)


def gather_patches(
    sizes: list[Size],
    dtypes: list[torch.dtype],
    seconds: float,
    device: str = "cpu",
    race: Race = race,
    cache: str = "warm",
    budget: int = BUDGET,
) -> Iterator[Row]:
    """273 patches of 14 x 14: cortical sites of fractional level, and patches of the grid."""
    for height, width, batch in sizes:
        for dtype in dtypes:
            image = picture(height, width, batch=batch, dtype=dtype).to(device)
            pyramids = inputs_for(image, cache, lambda x: uploaded(lod.mipmap(x)))
            cortical = [lod.cortical_sites(torch.rand(batch, 2), budget, (height, width)) for _ in range(16)]
            grid = [_grid_sites(height, width, batch, 14, budget) for _ in range(16)]
            for note, sites in (("cortical sites", cortical), ("sites on the grid", grid)):
                if sites[0].shape[1] < budget:
                    continue
                points = cycle(sites)
                sides: dict[str, Callable[[], object]] = {
                    name: job(_at(way, points), pyramids)
                    for name, way in (
                        ("auto", lod.gather_patches),
                        ("gl compute", partial(lod.gather_patches, backend="gl")),
                        *_both(lod.gather_patches, device),
                        ("torch sites of a level together", partial(lod.gather_patches, backend="torch")),
                        ("torch every level", _patches_every_level),
                    )
                }
                pictures = [OnePicture(pyramid) for pyramid in pyramids]
                sides["torch levels in one picture"] = job(_at(OnePicture.gather_patches, points), pictures)
                if cache == "warm":
                    following = partial(next, points)
                    sides |= planned(lod.gather_patches, pyramids[0], following(), backend="gl", following=following)
                sides |= eight_texels.sides(lod.gather_patches, pyramids, points)
                moved = 2 * batch * budget * 3 * 14 * 14 * dtype.itemsize
                yield Row(
                    "gather_patches", "end to end", height, width, batch, 3, str(dtype)[6:], cache, moved,
                    race(sides, seconds=seconds), other_job=PLANNED, note=f"{budget} x 14 x 14, {note}; {READY}",
                )  # fmt: skip


SEPARATE = "gl a call for each image"


def batches(seconds: float, device: str = "cpu", race: Race = race, batch: int = 32, side: int = 224) -> Iterator[Row]:
    """One call for a batch beside a call for each of its images."""
    image = picture(side, side, batch=batch).to(device)
    whole = uploaded(lod.mipmap(image))
    parts = [uploaded(lod.mipmap(one[None])) for one in image]
    fixations = torch.rand(batch, 2)
    sites = lod.cortical_sites(fixations, 64, (side, side))
    maps, bands, each = image[:, :1].split(1), lod.laplacian(image), [lod.laplacian(one[None]) for one in image]
    images, laid = image.split(1), lod.log_polar(whole, fixations, 64, 128)
    samplers: list[tuple[str, Callable[..., object]]] = [
        ("log_polar", lambda src, at, backend: lod.log_polar(src, at, 64, 128, backend=backend)),
        ("foveate", lambda src, at, backend: lod.foveate(src, at, backend=backend)),
        ("gather_patches", lambda src, at, backend: lod.gather_patches(src, at, backend=backend)),
    ]
    verbs: list[tuple[str, Callable[..., object], Any, Any]] = [
        ("mipmap", lambda src, _, backend: lod.mipmap(src, backend=backend), image, images),
        ("hiz", lambda src, _, backend: lod.hiz(src, backend=backend), image[:, :1].contiguous(), maps),
        ("gaussian", lambda src, _, backend: lod.gaussian(src, backend=backend), image, images),
        ("laplacian", lambda src, _, backend: lod.laplacian(src, backend=backend), image, images),
        ("collapse", lambda src, _, backend: lod.collapse(src, backend=backend), bands, each),
        ("oriented_energy", lambda src, _, backend: lod.oriented_energy(src, backend=backend), image, images),
        (
            "inverse_log_polar",
            lambda src, at, backend: lod.inverse_log_polar(src, at, (side, side), backend=backend),
            laid,
            laid.split(1),
        ),
        ("feature_maps", lambda src, at, backend: lod.feature_maps(src, at, backend=backend), image, images),
        *((*sampler, whole, parts) for sampler in samplers),
        *((*sampler, image, images) for sampler in samplers),
    ]
    for name, verb, together, apart in verbs:
        at = sites if name == "gather_patches" else fixations

        def separately(verb: Any = verb, apart: Any = apart, at: Any = at) -> object:
            return [verb(one, at[i : i + 1], "gl") for i, one in enumerate(apart)]

        sides: dict[str, Callable[[], object]] = {
            "auto": partial(verb, together, at, "auto"),
            "gl one call": partial(verb, together, at, "gl"),
            SEPARATE: separately,
            "torch one call": partial(verb, together, at, "torch"),
        }
        yield Row(
            name, "end to end", side, side, batch, 1 if name == "hiz" else 3, "float32", "warm",
            2 * image.nbytes // (3 if name == "hiz" else 1), race(sides, seconds=seconds),
            other_job={SEPARATE: "as many calls as images"},
            note="a batch in one call" + f", {IMAGE}" * (together is image and name in dict(samplers)),
        )  # fmt: skip
