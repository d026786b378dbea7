"""The channels of `feature_maps` in plain torch, and what they give the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F

from gpu_lod import checks, quadrature
from gpu_lod.binomial import added, expand, expand_adjoint, mirrored, mirrored_adjoint, reduce_adjoint
from gpu_lod.dispatch import needs_grad
from gpu_lod.enlarging import enlarged, enlarged_adjoint
from gpu_lod.gaussian import reference as gaussian_chain
from gpu_lod.planewise import bands
from gpu_lod.pyramid import burt_sizes
from gpu_lod.quadrature import energy

CHANNELS = MappingProxyType(
    {
        "rgb": slice(0, 3),
        "position": slice(3, 5),
        "saliency": slice(5, 6),
        "gradient": slice(6, 9),
        "luma": slice(9, 10),
        "motion": slice(10, 11),
        "eccentricity": slice(11, 12),
        "high_pass": slice(12, 13),
        "orientation": slice(13, 17),
        "semantic": slice(17, 33),
        "band_energy": slice(33, 37),
        "variance": slice(37, 38),
        "opponency": slice(38, 40),
    }
)
"""Where each feature is: name to channels."""
COUNT = 40
SEMANTIC = 16

LUMA = (0.299, 0.587, 0.114)
PAIRS = ((1, 3), (2, 4), (3, 5))
"""Centre and surround of the saliency, levels of the Gaussian pyramid."""
BANDS = 4
AT_ONCE = 2**20
"""Pixels whose saliency is worked on at a time, on a CPU."""
LEVELS = 6
"""Of the Gaussian pyramid: to the coarsest surround, and one below the last band."""


def luma_of(image: torch.Tensor) -> torch.Tensor:
    """Channel 9 of [B, C, H, W]: [B, 1, H, W], fp32. On a CPU in bands of rows: of bytes, whole colours would be four
    times the picture."""
    if not checks.on_host(image) or needs_grad(image) or checks.transformed(image):
        return _luma(_unit(image, torch.float32))
    count, _, height, width = image.shape
    result = image.new_empty((count, 1, height, width), dtype=torch.float32)
    for some, rows in bands(count, height, width):
        result[some, :, rows] = _luma(_unit(image[some, :, rows], torch.float32))
    return result


def luma_weights(image: torch.Tensor) -> tuple[float, ...]:
    """Of the first channels of [B, C, H, W], as they are stored, in that."""
    unit = 1 / 255 if image.dtype == torch.uint8 else 1.0
    return tuple(unit * weight for weight in (LUMA if image.shape[1] > 2 else (1.0,)))


def _working(image: torch.Tensor) -> torch.dtype:
    return image.dtype if image.dtype in (torch.float32, torch.float64) else torch.float32


def _unit(x: torch.Tensor, work: torch.dtype) -> list[torch.Tensor]:
    """Red, green and blue [B, 1, H, W] in [0, 1]; three times the same if it is grey."""
    colours = x[:, : 1 if x.shape[1] <= 2 else 3].to(work)
    colours = colours / 255 if x.dtype == torch.uint8 else colours
    return list(colours.split(1, dim=1)) * (1 if colours.shape[1] == 3 else 3)


def _luma(colours: list[torch.Tensor]) -> torch.Tensor:
    if colours[0] is colours[1]:
        return colours[0]
    result = colours[0] * LUMA[0]
    for colour, weight in zip(colours[1:], LUMA[1:], strict=True):
        result = torch.add(result, colour, alpha=weight)
    return result


def channels(
    image: torch.Tensor,
    fixation: torch.Tensor,
    previous: torch.Tensor | None,
    semantic: torch.Tensor | None,
    video: bool,
) -> Iterator[torch.Tensor]:
    """All channels in order, in parts [B or 1, k, H or 1, W or 1]."""
    work = _working(image)
    height, width = image.shape[-2:]
    colours = _unit(image, work)
    red, green, blue = colours
    luma = _luma(colours)
    yield from colours
    x, y = _centres(image, work)
    yield x.expand(1, 1, height, width)
    yield y[:, None].expand(1, 1, height, width)
    levels = _levels(luma)
    yield _centre_surround(levels, height, width)
    padded = mirrored(luma, 2, 2)
    yield from _gradient(padded)
    yield luma
    yield _motion(luma, previous, video, work)
    dx, dy = _away(fixation, x, y)
    yield _length(dx[:, None, None, :], dy[:, None, :, None])
    yield (luma - expand(levels[1], height, width)).abs() if len(levels) > 1 else torch.zeros_like(luma[:1])
    yield energy(luma[:, 0], 4)
    if semantic is None:
        yield luma.new_zeros(1, 1, 1, 1).expand(1, SEMANTIC, height, width)
    else:
        yield (semantic if semantic.ndim == 4 else semantic[None]).to(work)
    squares = [(fine - expand(coarse, *fine.shape[-2:])).square() for fine, coarse in pairwise(levels[1:])]
    for level in range(1, 1 + BANDS):
        yield _read(squares[level - 1], level, height, width) if level <= len(squares) else torch.zeros_like(luma[:1])
    yield _variance(padded)
    yield red - green
    yield torch.sub(blue, red + green, alpha=0.5)


def _centres(image: torch.Tensor, work: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [W] and y [H] of the pixels."""
    x, y = (torch.arange(n, dtype=work, device=image.device).add_(0.5).div_(n) for n in image.shape[:-3:-1])
    return x, y


def _away(fixation: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How far pixels are from the fixation along x [n, W] and y [n, H], in units of the longer side."""
    points, longer = fixation.to(x), max(len(x), len(y))
    return (x - points[:, :1]) * (len(x) / longer), (y - points[:, 1:]) * (len(y) / longer)


def _levels(luma: torch.Tensor) -> list[torch.Tensor]:
    return gaussian_chain(luma, min(LEVELS, len(burt_sizes(*luma.shape[-2:]))))


def saliency_map(image: torch.Tensor) -> torch.Tensor:
    """Channel 5 alone, [B, H, W] of images [B, C, H, W], in plain torch: an eighth of the work of all channels."""
    height, width = image.shape[-2:]
    at_once = max(1, AT_ONCE // (height * width))
    if image.device.type == "cpu" and image.shape[0] > at_once:
        # Fresh memory for the temporaries of a whole batch costs a CPU three times the work.
        return torch.cat([saliency_map(part) for part in image.split(at_once)])
    work = _working(image)
    levels = _levels(_luma(_unit(image, work)))
    return _centre_surround(levels, height, width)[:, 0]


def _centre_surround(levels: list[torch.Tensor], height: int, width: int) -> torch.Tensor:
    """The mean of |G_c - G_s| at every pixel, [B, 1, H, W].

    Samples of a level are among those of every finer one, so that the surround is read at the centre's samples first,
    and only the difference of both at the pixels.
    """
    parts = [_read(difference(levels, *pair), pair[0], height, width) for pair in PAIRS]
    if needs_grad(*parts) or any(map(checks.transformed, parts)):
        return (parts[0].abs() + parts[1].abs() + parts[2].abs()) / len(parts)
    total = parts[0].abs_()  # in place: fresh megabytes cost more than the sums
    for part in parts[1:]:
        total.add_(part.abs_())
    return total.div_(len(parts))


def difference(levels: list[torch.Tensor], centre: int, surround: int) -> torch.Tensor:
    """G_c - G_s at the samples of G_c, of the levels of a Gaussian pyramid; the last stands for those beyond it."""
    last = len(levels) - 1
    fine, coarse = levels[min(centre, last)], levels[min(surround, last)]
    return fine - _read(coarse, surround - centre, *fine.shape[-2:])


def _read(samples: torch.Tensor, level: int, height: int, width: int) -> torch.Tensor:
    """Samples that stand 2^level pixels apart, read at every pixel bilinearly; beyond the last the last is read."""
    return enlarged(samples, 1 << level, (0, height, 0, width), centred=False)


def _gradient(padded: torch.Tensor) -> Iterator[torch.Tensor]:
    """gx, gy and their length, of a luma with two mirrored pixels about it."""
    inner = padded[..., 1:-1, 1:-1]
    along, down = (inner.shape[dim] - 2 for dim in (-1, -2))
    gx = _smoothed((inner.narrow(-1, 2, along) - inner.narrow(-1, 0, along)) * 0.125, -2)
    gy = _smoothed((inner.narrow(-2, 2, down) - inner.narrow(-2, 0, down)) * 0.125, -1)
    yield gx
    yield gy
    yield _length(gx, gy)


def _smoothed(x: torch.Tensor, dim: int) -> torch.Tensor:
    count = x.shape[dim] - 2
    return torch.add(x.narrow(dim, 0, count) + x.narrow(dim, 2, count), x.narrow(dim, 1, count), alpha=2)


def _length(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """sqrt(x^2 + y^2), whose gradient at 0 is 0."""
    squared = x * x + y * y
    if not (needs_grad(squared) or checks.transformed(squared)):
        return squared.sqrt()
    safe = torch.where(squared > 0, squared, torch.ones_like(squared))
    return torch.where(squared > 0, safe.sqrt(), torch.zeros_like(squared))


def _motion(luma: torch.Tensor, previous: torch.Tensor | None, video: bool, work: torch.dtype) -> torch.Tensor:
    before = None
    if previous is not None:
        before = _luma(_unit(previous if previous.ndim == 4 else previous[None], work))
    if not video:
        return torch.zeros_like(luma[:1]) if before is None else luma - before
    first = torch.zeros_like(luma[:1]) if before is None else luma[:1] - before
    return torch.cat([first, luma[1:] - luma[:-1]])


_CACHED = 2**15
"""Pixels whose variances are made at a time."""


def _variance(padded: torch.Tensor) -> torch.Tensor:
    """Over 5 x 5, of a luma with two mirrored pixels about it. In float64, where the mean square less the squared mean
    loses nothing that fp32 could show: on a CPU some rows at a time, which stay in its cache."""
    batch, _, height, width = padded.shape
    height, width = height - 4, width - 4
    if padded.device.type != "cpu" or height * width <= _CACHED or needs_grad(padded) or checks.transformed(padded):
        return _variances(padded)
    result = padded.new_empty(batch, 1, height, width)
    for images, rows in bands(batch, height, width, _CACHED):
        result[images, :, rows] = _variances(padded[images, :, rows.start : rows.stop + 4])
    return result


def _variances(padded: torch.Tensor) -> torch.Tensor:
    wide = padded.double()
    mean = _five_by_five(wide) * (1 / 25)
    square = _five_by_five(wide * wide) * (1 / 25)
    return (square - mean * mean).clamp(min=0).to(padded.dtype)


def _five_by_five(x: torch.Tensor) -> torch.Tensor:
    """Sums over 5 x 5, four rows and columns fewer."""
    for dim in (-2, -1):
        count = x.shape[dim] - 4
        pairs = x.narrow(dim, 0, count + 3) + x.narrow(dim, 1, count + 3)
        x = pairs.narrow(dim, 0, count) + pairs.narrow(dim, 2, count) + x.narrow(dim, 4, count)
    return x


# -- backwards ---------------------------------------------------------------------------------------------------------


def pull(
    gradient: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    video: bool,
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradients in the inputs (image, fixation [n, 2], previous, semantic), where they are wanted, from that in
    their maps; without a graph. No map is made again but those whose values a derivative needs."""
    image, fixation, previous, semantic = inputs
    given = gradient if gradient.ndim == 4 else gradient[None]
    work = _working(image)

    def of(name: str, images: slice = slice(None), rows: slice = slice(None)) -> torch.Tensor:
        return given[images, CHANNELS[name], rows].to(work)

    found: list[torch.Tensor | None] = [None] * 4
    if wanted[0]:
        found[0] = _pull_image(of, image if image.ndim == 4 else image[None], previous, video).view_as(image)
    if wanted[1]:
        found[1] = _pull_fixation(of("eccentricity")[:, 0], fixation, image)
    if wanted[2]:
        assert previous is not None
        frames = previous if previous.ndim == 4 else previous[None]
        motion = of("motion")[:1] if video else of("motion")
        found[2] = _from_colours(-_shared(motion, frames), frames).view_as(previous)
    if wanted[3]:
        assert semantic is not None
        features = semantic if semantic.ndim == 4 else semantic[None]
        # In memory of its own, or it would hold the gradients of all channels.
        found[3] = torch.empty_like(features).copy_(_shared(of("semantic"), features)).view_as(semantic)
    return found


def _shared(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of each image, or what all give to x if that is one for all."""
    return gradient.sum(0, keepdim=True) if len(x) < len(gradient) else gradient


Channels = Callable[..., torch.Tensor]
"""The gradients in channels [B, k, H, W], by their name; of some images and rows alone."""


def _from_colours(luma: torch.Tensor, image: torch.Tensor, of: Channels | None = None) -> torch.Tensor:
    """The gradient in an image [B, C, H, W] from that in its luma, and those in what is made of colours alone."""
    count = 1 if image.shape[1] <= 2 else 3
    result = torch.empty_like(image, memory_format=torch.contiguous_format)
    result[:, count:] = 0
    if count == 1:  # whose opponency is 0
        result[:, :1] = luma if of is None else luma + of("rgb").sum(1, keepdim=True)
        return result
    colours = luma * torch.tensor(LUMA, dtype=luma.dtype, device=luma.device)[:, None, None]
    if of is not None:
        colours += of("rgb")
        red_green, blue_yellow = of("opponency").split(1, dim=1)
        colours[:, :1] += red_green
        colours[:, 1:2] -= red_green
        colours[:, :2].sub_(blue_yellow, alpha=0.5)
        colours[:, 2:] += blue_yellow
    result[:, :3] = colours
    return result


def _pull_fixation(gradient: torch.Tensor, fixation: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    gradient = _shared(gradient, fixation)
    dx, dy = _away(fixation, *_centres(image, gradient.dtype))
    length = _length(dx[:, None, :], dy[:, :, None])
    pulled = _over(gradient, length)
    longer = max(pulled.shape[-2:])
    along = [(pulled.sum(dim) * away).sum(-1) * (-away.shape[-1] / longer) for dim, away in ((-2, dx), (-1, dy))]
    return torch.stack(along, dim=-1).to(fixation)


def _over(gradient: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """gradient / length; 0 where that is 0, as the gradient of a length there."""
    return (gradient / length).masked_fill_(length == 0, 0)


def _pull_image(of: Channels, image: torch.Tensor, previous: torch.Tensor | None, video: bool) -> torch.Tensor:
    luma = _luma(_unit(image, _working(image)))
    found = of("luma").clone()
    motion = of("motion")
    if video:
        found[1:] += motion[1:]
        found[:-1] -= motion[1:]
        motion = motion[:1]
    if previous is not None:
        found[: len(motion)] += motion
    found += quadrature.pull(of("orientation"), luma[:, 0], 4)[:, None]
    found += _pull_windows(of, luma)
    return _from_colours(_pull_levels(of, luma, found), image, of)


def _pull_windows(of: Channels, luma: torch.Tensor) -> torch.Tensor:
    """The gradient in the luma from those in what is made of 3 x 3 and 5 x 5 pixels: on a CPU some rows at a time."""
    padded = mirrored(luma, 2, 2)
    result = torch.zeros_like(padded)
    height, width = luma.shape[-2:]
    whole = [(slice(None), slice(0, height))]
    for images, rows in bands(len(luma), height, width, _CACHED) if checks.on_host(luma) else whole:
        around = slice(rows.start, rows.stop + 4)
        result[images, :, around] += _of_windows(partial(of, images=images, rows=rows), padded[images, :, around])
    return mirrored_adjoint(result, 2, 2)


def _of_windows(of: Channels, padded: torch.Tensor) -> torch.Tensor:
    """What gradients of some rows give those, and two more on both sides."""
    gx, gy, length = _gradient(padded)
    along, down, steep = of("gradient").split(1, dim=1)
    steep = _over(steep, length)
    wide, weights = padded.double(), of("variance").double() * (2 / 25)

    def back(x: torch.Tensor) -> torch.Tensor:
        return _five_by_five(F.pad(x, (4, 4, 4, 4)))

    around = wide * back(weights) - back(weights * (_five_by_five(wide) * (1 / 25)))
    result = around.to(padded.dtype)
    inner = result[..., 1:-1, 1:-1]
    for gradient, dim, across in ((torch.addcmul(along, steep, gx), -1, -2), (torch.addcmul(down, steep, gy), -2, -1)):
        sums = F.pad(gradient, (0, 0, 2, 2) if across == -2 else (2, 2))
        sums = _smoothed(sums, across) * 0.125
        count = gradient.shape[dim]
        inner.narrow(dim, 2, count).add_(sums)
        inner.narrow(dim, 0, count).sub_(sums)
    return result


def _pull_levels(of: Channels, luma: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """`found`, and the gradient in the luma from those in what is made of levels of its Gaussian pyramid."""
    levels = _levels(luma)
    last = len(levels) - 1
    gradients: list[torch.Tensor | None] = [found, *[None] * last]

    def add(level: int, more: torch.Tensor, sign: int = 1) -> None:
        there = gradients[level]
        gradients[level] = more * sign if there is None else there.add_(more, alpha=sign)

    def add_band(level: int, more: torch.Tensor) -> None:
        add(level, more)
        add(level + 1, expand_adjoint(more), -1)

    if last:
        add_band(0, added(luma, levels[1], -1).sign_().mul_(of("high_pass")))
    saliency = of("saliency") / len(PAIRS)
    for centre, surround in PAIRS:
        values = difference(levels, centre, surround)
        signed = _read(values, centre, *luma.shape[-2:]).sign().mul_(saliency)
        back = _read_adjoint(signed, centre, values)
        add(min(centre, last), back)
        add(min(surround, last), _read_adjoint(back, surround - centre, levels[min(surround, last)]), -1)
    for level, gradient in zip(range(1, last), of("band_energy").split(1, dim=1), strict=False):
        band = added(levels[level], levels[level + 1], -1)
        add_band(level, _read_adjoint(gradient, level, band).mul_(band).mul_(2))
    total = gradients[last]
    for level in range(last - 1, -1, -1):
        assert total is not None
        total = reduce_adjoint(total, levels[level].shape[-2], levels[level].shape[-1], gradients[level])
    assert total is not None
    return total


def _read_adjoint(pixels: torch.Tensor, level: int, samples: torch.Tensor) -> torch.Tensor:
    """The adjoint of `_read`, to samples of that size."""
    box = (0, pixels.shape[-2], 0, pixels.shape[-1])
    return enlarged_adjoint(pixels, 1 << level, box, (samples.shape[-2], samples.shape[-1]), centred=False)
