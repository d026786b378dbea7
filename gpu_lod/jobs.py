"""What `gpu-lod calibrate` measures: jobs of every verb that "auto" decides, at common sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from gpu_lod.cortical_sites import cortical_sites
from gpu_lod.cull import cull
from gpu_lod.dispatch import NO_TEXTURE
from gpu_lod.errors import GpuLodError, InputError
from gpu_lod.feature_maps import feature_maps
from gpu_lod.foveate import foveate
from gpu_lod.gather_patches import gather_patches
from gpu_lod.gaussian import gaussian
from gpu_lod.hiz import hiz
from gpu_lod.inverse_log_polar import inverse_log_polar
from gpu_lod.laplacian import collapse, laplacian
from gpu_lod.log_polar import log_polar
from gpu_lod.mipmap import mipmap
from gpu_lod.oriented_energy import oriented_energy
from gpu_lod.pyramid import Pyramid
from gpu_lod.region import region_max

Arguments = Callable[[], tuple[Any, ...]]
"""The arguments of the next call: a fixation is a new one every time."""


@dataclass(frozen=True)
class Job:
    """A job that some way does fastest."""

    verb: Callable[..., Any]
    at: str
    prepare: Callable[[torch.device], Arguments]
    tensors: tuple[str, ...] = ("cpu", "cuda")
    """Types of the devices for whose tensors times decide it."""
    own_filter: bool = False
    """Texture units filter in a way of their own there, and results are alike on average alone."""


PROBES = 4
"""Of anisotropic foveation: most callers' is far from the 16 there may be."""

_ROUNDS = (
    (512, 1, True), (1024, 1, True), (224, 8, True), (224, 1, True), (512, 1, False), (1024, 1, False), (224, 8, False),
    (2048, 1, True), (512, 8, True), (224, 32, True), (2048, 1, False), (224, 1, False), (512, 8, False),
    (224, 32, False),
)  # fmt: skip
"""(side, batch, whether it is what most callers do), the most telling ones first."""


def jobs(verbs: Sequence[str] | None, *, quick: bool) -> list[Job]:
    """What to measure, the most telling jobs first; of some verbs, by their names, or of all.

    Raises:
        InputError: unknown verbs.
    """
    rounds = ((224, 1, True),) if quick else _ROUNDS
    found = [job for side, batch, common in rounds for job in (_common if common else _rare)(side, batch)]
    names = {job.verb.__name__ for job in found}
    if unknown := {*(verbs or ())} - names:
        raise InputError(f"there is no {', '.join(sorted(unknown))} to measure; expected {', '.join(sorted(names))}.")
    return [job for job in found if not verbs or job.verb.__name__ in verbs]


def small() -> Iterator[Job]:
    """Every verb on small pictures of every dtype, with even and with odd sides: to compare results, not times."""
    for height, width in ((64, 96), (37, 53)):
        shape, maps = (2, 3, height, width), (2, 1, height, width)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
            yield _job(mipmap, shape, dtype, _image, "")
            yield _job(mipmap, shape, dtype, _maximum, "max")
            yield _job(hiz, maps, dtype, _image, "")
            yield _job(gaussian, shape, dtype, _five_levels, "5 levels")
            if dtype.is_floating_point:
                yield _job(laplacian, shape, dtype, _five_levels, "5 levels")
                yield _job(collapse, shape, dtype, _bands, "5 levels")
            yield _job(oriented_energy, shape, dtype, _five_levels, "5 levels")
            yield _job(feature_maps, shape, dtype, partial(_features, torch.float32), "40 channels of float32")
            yield _job(log_polar, shape, dtype, partial(_seen, 16, 32), "16 x 32 samples")
            yield _job(inverse_log_polar, shape, dtype, _polar, "from a map of 256 x 512")
            yield _job(foveate, shape, dtype, _seen, "")
            yield replace(_job(foveate, shape, dtype, _by_probes, f"anisotropy {PROBES}"), own_filter=True)
            yield _job(gather_patches, shape, dtype, partial(_sites, 32, False, False), "32 x 14 x 14 samples")
            # Of an image OpenGL makes no texture, but on software renderers.
            yield _job(log_polar, shape, dtype, partial(_alone, 16, 32), "16 x 32 samples of an image")
            yield _job(foveate, shape, dtype, _alone, "of an image")
            yield _job(gather_patches, shape, dtype, partial(_sites_alone, 8), "8 x 14 x 14 samples of an image")
            yield _job(cull, maps, dtype, _sparse, "20% kept")
            yield _job(region_max, maps, dtype, _boxes, "4096 boxes")


def _common(side: int, batch: int) -> Iterator[Job]:
    """The jobs of most callers at one size."""
    shape, maps = (batch, 3, side, side), (batch, 1, side, side)
    for dtype in (torch.float32, torch.uint8):
        yield from _samplers(shape, dtype)
        yield _job(foveate, shape, dtype, _seen_once, NO_TEXTURE)
        for job in _samplers(shape, dtype, once=True):
            yield replace(job, tensors=("cuda",))
        yield from _of_images(shape, dtype)
    by_probes = _job(foveate, shape, torch.float32, _by_probes, f"anisotropy {PROBES}")
    yield replace(by_probes, own_filter=True)
    for dtype in (torch.float32, torch.uint8):
        by_probes = _job(foveate, shape, dtype, _by_probes_once, f"anisotropy {PROBES}, {NO_TEXTURE}")
        yield replace(by_probes, own_filter=True)
    yield _job(region_max, maps, torch.float32, _boxes, "4096 boxes")
    yield _job(cull, maps, torch.float32, _sparse, "20% kept")
    if batch * side**2 <= 2**20:  # forty channels of more are a strain on memory
        for dtype in (torch.float32, torch.float16):
            yield _features_as(shape, dtype)
    yield _job(hiz, maps, torch.float32, _image, "")
    for dtype in (torch.float32, torch.uint8):
        yield _job(mipmap, shape, dtype, _image, "")
    yield _job(mipmap, shape, torch.float32, _maximum, "max")
    yield _job(inverse_log_polar, shape, torch.float32, _polar, "from a map of 256 x 512")
    for planes in (maps, shape):
        yield _job(oriented_energy, planes, torch.float32, _five_levels, "5 levels")
    for verb in (gaussian, laplacian):
        yield _job(verb, shape, torch.float32, _five_levels, "5 levels")
    yield _job(collapse, shape, torch.float32, _bands, "5 levels")


def _rare(side: int, batch: int) -> Iterator[Job]:
    """Other dtypes and channels, and sides that are no multiples of 4, which take other shaders."""
    shape, ragged = (batch, 3, side, side), (batch, 3, side, side + 1)
    yield from _samplers(shape, torch.float16)
    yield from _of_images(shape, torch.float16)
    for channels in (1, 4):
        yield from _samplers((batch, channels, side, side), torch.float32)
    for dtype in (torch.uint8, torch.float16):
        yield _job(inverse_log_polar, shape, dtype, _polar, "from a map of 256 x 512")
        yield _job(oriented_energy, shape, dtype, _five_levels, "5 levels")
    yield _job(mipmap, shape, torch.float16, _image, "")
    yield _job(foveate, ragged, torch.uint8, _seen, "")
    yield _job(region_max, (batch, 1, side, side), torch.float32, _boxes_once, f"4096 boxes, {NO_TEXTURE}")
    if batch * side**2 <= 2**20:
        yield _features_as(ragged, torch.float32)


def _features_as(shape: tuple[int, ...], dtype: torch.dtype) -> Job:
    return _job(feature_maps, shape, torch.float32, partial(_features, dtype), f"40 channels of {str(dtype)[6:]}")


def _samplers(shape: tuple[int, ...], dtype: torch.dtype, *, once: bool = False) -> Iterator[Job]:
    """
    Args:
        once: from a pyramid that is no texture yet, and of `foveate` none.
    """
    words, seen = (f", {NO_TEXTURE}", _seen_once) if once else ("", _seen)
    side = shape[-1]
    if not once:
        yield _job(foveate, shape, dtype, _seen, "")
    # What they make grows with the side: the times depend on that alone, and equal jobs would replace each other's.
    rings = max(side // 4, 64)
    yield _job(log_polar, shape, dtype, partial(seen, rings, 2 * rings), f"{rings} x {2 * rings} samples{words}")
    budget = {224: 64, 512: 273, 1024: 729, 2048: 2916}[side]
    for whole in (False, True):
        sites = partial(_sites, budget, whole, once)
        yield _job(gather_patches, shape, dtype, sites, f"{budget} x 14 x 14 samples{words}")


def _of_images(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Job]:
    """Samplers of an image on the host: of few samples, of more, and of so many that a texture is made."""
    side = shape[-1]
    for share, rings in ((1 / 16, 3 * side // 16), (1 / 4, 3 * side // 8), (3 / 4, 5 * side // 8)):
        sizes, budget = (rings, 2 * rings), int(share * side**2) // 14**2
        words = f"{rings} x {2 * rings} samples of an image"
        yield replace(_job(log_polar, shape, dtype, partial(_alone, *sizes), words), tensors=("cpu",))
        words = f"{budget} x 14 x 14 samples of an image"
        yield replace(_job(gather_patches, shape, dtype, partial(_sites_alone, budget), words), tensors=("cpu",))


def _job(
    verb: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    prepare: Callable[[torch.Tensor], Arguments],
    words: str,
) -> Job:
    kind = str(dtype).removeprefix("torch.")

    def on(device: torch.device) -> Arguments:
        values = torch.rand(shape)
        image = values.mul_(255).to(dtype) if dtype == torch.uint8 else values.to(dtype)
        return prepare(image.to(device))

    return Job(verb, ", ".join(filter(None, [f"{' x '.join(map(str, shape))} {kind}", words])), on)


def _image(image: torch.Tensor) -> Arguments:
    return lambda: (image,)


def _maximum(image: torch.Tensor) -> Arguments:
    return lambda: (image, None, "max")


def _five_levels(image: torch.Tensor) -> Arguments:
    return lambda: (image, 5)


def _bands(image: torch.Tensor) -> Arguments:
    bands = laplacian(image, 5, backend="torch")
    return lambda: (bands,)


def _features(dtype: torch.dtype, image: torch.Tensor) -> Arguments:
    points = _points(image)
    return lambda: (image, next(points), None, None, dtype)


def _polar(image: torch.Tensor) -> Arguments:
    points, size = _points(image), image.shape[-2:]
    polar = torch.nn.functional.interpolate(image.float(), (256, 512)).to(image.dtype)
    return lambda: (polar, next(points), size)


def _seen(*numbers: Any) -> Arguments:
    *sizes, image = numbers
    pyramid, points = _uploaded(mipmap(image, backend="torch")), _points(image)
    return lambda: (pyramid, next(points), *sizes)


def _uploaded(pyramid: Pyramid) -> Pyramid:
    """A texture of all that its device has."""
    if pyramid.device.type == "cuda":
        pyramid.upload(backend="cuda")
        with suppress(GpuLodError):  # there may be no OpenGL
            pyramid.upload()
        return pyramid
    return pyramid.upload()


def _by_probes(image: torch.Tensor) -> Arguments:
    seen = _seen(image)
    return lambda: (*seen(), 0.05, 0.0, float(PROBES))


def _by_probes_once(image: torch.Tensor) -> Arguments:
    seen = _seen_once(image)
    return lambda: (*seen(), 0.05, 0.0, float(PROBES))


def _seen_once(*numbers: Any) -> Arguments:
    *sizes, image = numbers
    levels, points = mipmap(image, backend="torch").levels, _points(image)
    return lambda: (Pyramid(levels), next(points), *sizes)


def _alone(*numbers: Any) -> Arguments:
    *sizes, image = numbers
    points = _points(image)
    return lambda: (image, next(points), *sizes)


def _sites_alone(budget: int, image: torch.Tensor) -> Arguments:
    batch, _, height, width = image.shape
    device = image.device
    sites = cycle([cortical_sites(torch.rand(batch, 2), budget, (height, width)).to(device) for _ in range(8)])
    return lambda: (image, next(sites))


def _sites(budget: int, whole: bool, once: bool, image: torch.Tensor) -> Arguments:
    levels = mipmap(image, backend="torch").levels
    pyramid = Pyramid(levels) if once else _uploaded(Pyramid(levels))
    batch, _, height, width = image.shape
    several = []
    for _ in range(8):
        if whole:  # patches of the grid, as a top-k gives them
            columns = width // 14
            cells = torch.stack([torch.randperm(columns * (height // 14))[:budget] for _ in range(batch)])
            x, y = (cells % columns + 0.5) * 14 / width, (cells // columns + 0.5) * 14 / height
            several.append(torch.stack([x, y, torch.zeros_like(x)], dim=-1))
        else:
            several.append(cortical_sites(torch.rand(batch, 2), budget, (height, width)))
    sites = cycle(several)  # on the host, where it shows that all levels are whole
    return lambda: (Pyramid(levels) if once else pyramid, next(sites))


def _boxes(image: torch.Tensor) -> Arguments:
    hz, boxes = hiz(image, backend="torch").upload(), _rectangles(image)
    return lambda: (hz, boxes)


def _boxes_once(image: torch.Tensor) -> Arguments:
    levels, boxes = hiz(image, backend="torch").levels, _rectangles(image)
    return lambda: (Pyramid(levels, "max"), boxes)


def _rectangles(image: torch.Tensor) -> torch.Tensor:
    return torch.rand(image.shape[0], 4096, 2, 2).sort(dim=2).values.flatten(2).to(image.device)


def _sparse(image: torch.Tensor) -> Arguments:
    """How much is pruned decides, and `auto` cannot know it: a map with little to prune."""
    hz = hiz(image, backend="torch")
    return lambda: (hz, 0.8)


def _points(image: torch.Tensor) -> Iterator[torch.Tensor]:
    return cycle(torch.rand(16, image.shape[0], 2).unbind())
