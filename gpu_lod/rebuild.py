"""Tokens back to a picture: what an allocation kept of it, and where it looked at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from gpu_lod import checks, dispatch, operators, token_margins
from gpu_lod.errors import InputError
from gpu_lod.gather_patches import centres_of, on_pixels
from gpu_lod.halving import stored
from gpu_lod.shapes import summary
from gpu_lod.token_set import TokenSet
from gpu_lod.uncompiled import in_one_piece

AT_ONCE = 2**21
"""Pixels worked on at a time, so that memory does not grow with how much tokens overlap."""
BY_TOKEN = 384
"""Pixels of the picture for each token, from which on a CPU paints one after the other in less time."""
_MODES = ("bilinear", "bicubic")


class Rebuilt(NamedTuple):
    """A picture made of tokens."""

    image: torch.Tensor
    """[B, C, H, W], of the patches' dtype."""
    covered: torch.Tensor
    """bool [B, H, W]: which pixels some token covers."""

    def __repr__(self) -> str:
        return summary(self)

    @property
    def coverage(self) -> torch.Tensor:
        """The covered part of each image, [B], in [0, 1]."""
        return self.covered.double().mean((-2, -1)).float()


torch.serialization.add_safe_globals([Rebuilt])  # torch.load's weights_only


@in_one_piece
def rebuild(
    tokens: TokenSet,
    size: tuple[int, int],
    fill: float | Sequence[float] | None = None,
    mode: Literal["bilinear", "bicubic"] = "bilinear",
) -> Rebuilt:
    """Paint tokens where they came from, coarse ones first and finer ones over them.

    Shape: tokens with patches [B, K, C, P, P] give an `image` [B, C, H, W] and what is `covered`, [B, H, W]; without B
        for unbatched tokens.
    Units: those of the patches. uint8 is rounded.
    Convention: a token covers the pixels whose centres lie in the square of P 2^level px round its site, left and top
        edges included, clipped to the image. A pixel shows one token, the finest that covers it, and of equally fine
        ones the first in the token order, that is the most relevant. It is the inverse of `gather_patches`: a pixel
        centre becomes a place in the patch, which is read bilinear, sample u at u + 0.5 and clamped to the outermost
        samples, or bicubic. Level-0 patches on the pixel grid give back their exact pixels. Edges within fp32's
        rounding of a pixel's centre or edge are there, so that tokens that tile leave no seam. Differentiable in the
        patches.

    Args:
        size: (H, W) of the picture in pixels.
        fill: what no token covers, a number or one a channel; None is the mean of the image's tokens.
        mode: "bilinear" shows of each token what it holds by itself. "bicubic" enlarges them together, as the one
            picture that they are: beyond a patch's edge its neighbours' samples count, of finer ones their mean, and
            where there are none its own outermost go on. It keeps more of a picture, takes several times as long, and
            goes beyond the range of the samples at sharp edges (not of uint8, which ends at 0 and 255).

    Raises:
        InputError: tokens without patches, sites outside the image, or a bad size, fill or mode.
        OutOfMemoryError: a picture of that size does not fit a CPU's memory.
        UnsupportedError: forward mode (torch.func.jvp) of "bicubic" where a neighbour is finer.

    Source: the cubic is that of Keys, "Cubic Convolution Interpolation for Digital Image Processing" (1981), with
        a = -0.75, as of torch.nn.functional.interpolate and OpenCV.
    """
    checks.choice(mode, "mode", _MODES)
    size = checks.size(size, at_most=checks.LONGEST)
    patches, sites, batched = _parts(tokens)
    rest = None
    if fill is not None:
        channels = patches.shape[2]
        several = not isinstance(fill, (int, float)) and getattr(fill, "ndim", isinstance(fill, Sequence)) > 0
        rest = checks.numbers(fill, "fill", channels) if several else [checks.number(fill, "fill")] * channels
    if rest is not None and patches.dtype == torch.uint8 and not all(-0.5 <= one < 255.5 for one in rest):
        raise InputError(f"fill is {fill}; expected 0 to 255, for these patches are uint8.")
    found = paint(patches, sites, size, rest, mode)
    return found if batched else Rebuilt(found.image[0], found.covered[0])


def _canvas(
    patches: torch.Tensor,
    sites: torch.Tensor,
    size: tuple[int, int],
    fill: Sequence[float] | None,
    mode: str = "bilinear",
) -> Rebuilt:
    batch, _, channels, *_ = patches.shape
    return Rebuilt(patches.new_empty(batch, channels, *size), patches.new_empty(batch, *size, dtype=torch.bool))


@operators.function(_canvas)
def paint(
    patches: torch.Tensor,
    sites: torch.Tensor,
    size: tuple[int, int],
    fill: Sequence[float] | None,
    mode: str = "bilinear",
) -> Rebuilt:
    """`rebuild` of patches [B, K, C, P, P] at sites [B, K, 3]; of what is not covered each channel has its number."""
    checks.highest_level(sites)  # raises where sites are outside the image
    return dispatch.within_memory(_paint, patches, sites, (size[0], size[1]), fill, mode)


def _paint(
    patches: torch.Tensor, sites: torch.Tensor, size: tuple[int, int], fill: Sequence[float] | None, mode: str
) -> Rebuilt:
    height, width = size
    batch, budget, channels, patch, _ = patches.shape
    work = torch.float64 if patches.dtype == torch.float64 else torch.float32
    rest = patches.mean((1, 3, 4), dtype=work) if fill is None else sites.new_tensor(fill, dtype=work)
    rest = rest.expand(batch, channels)
    plain = not (dispatch.needs_grad(patches) or checks.transformed(patches) or checks.transformed(sites))
    if plain and patches.device.type == "cpu" and height * width >= BY_TOKEN * budget:
        kind = torch.int32 if mode == "bicubic" else torch.bool
        shown = torch.empty(batch, height, width, dtype=kind, device="cpu")
        image = _token_by_token(patches, sites, size, rest, shown)
        covered = shown.bool()
        if mode == "bicubic":
            values = token_margins.extended(patches.to(work), sites, shown.sub_(1), covered, image)
            image = _token_by_token(values, sites, size, rest, None, patches.dtype)
        return Rebuilt(image, covered)
    winners, covered = _winners(sites, patch, size)
    values = patches.to(work)
    image = _pixel_by_pixel(values, sites, winners, covered, rest, patches.dtype)
    if mode == "bicubic":
        values = token_margins.extended(values, sites, winners, covered, image)
        image = _pixel_by_pixel(values, sites, winners, covered, rest, patches.dtype, bicubic=True)
    return Rebuilt(image, covered)


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stored(values.clamp(0, 255) if dtype == torch.uint8 else values, dtype)


def psnr(image: torch.Tensor, other: torch.Tensor, peak: float | None = None) -> torch.Tensor:
    """Peak signal-to-noise ratio of [B, C, H, W] in dB, [B]: inf where they are equal.

    Args:
        peak: what values range over; None is 255 of uint8, and 1 of others.

    Raises:
        InputError: two shapes or dtypes.
    """
    if image.shape != other.shape or image.dtype != other.dtype:
        raise InputError(
            f"the images are {image.dtype} {tuple(image.shape)} and {other.dtype} {tuple(other.shape)}; expected two "
            "alike."
        )
    if peak is None:
        peak = 255.0 if image.dtype == torch.uint8 else 1.0
    error = ((image.double() - other.double()) / peak).square().mean((-3, -2, -1))
    return (-10 * error.log10()).float()


def _parts(tokens: Any) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Patches [B, K, C, P, P], sites [B, K, 3], and whether there was a batch."""
    if not isinstance(tokens, TokenSet):
        raise InputError(f"tokens are {type(tokens).__name__}; expected a TokenSet, which allocators return.")
    patches, sites = tokens.patches, tokens.sites.detach()
    if patches is None:
        raise InputError(
            "these tokens have no patches to paint with. Give the allocator an image=, or read them: "
            "dataclasses.replace(tokens, patches=gather_patches(image, tokens.sites, tokens.patch))."
        )
    patches, sites = checks.dense(patches, "patches"), checks.real(sites, "sites")
    shape = (*sites.shape[:-1], patches.shape[-3] if patches.ndim > 2 else "C", tokens.patch, tokens.patch)
    if tuple(patches.shape) != shape or not patches.numel():
        raise InputError(f"patches are {tuple(patches.shape)}; expected {shape}, a patch of each site.")
    if patches.dtype not in (*checks.DTYPES, torch.float64):
        raise InputError(f"patches are {patches.dtype}; expected uint8 or floating point. Convert them with .float().")
    checks.same_device(patches, sites, "sites", "the patches")
    return (patches, sites, True) if sites.ndim == 3 else (patches[None], sites[None], False)


def _winners(sites: torch.Tensor, patch: int, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, W] which token each pixel shows (any where none covers it), and whether one does."""
    batch, budget = sites.shape[:2]
    height, width = size
    device = sites.device
    begin, end = _footprints(sites, patch, size)
    order = torch.sort(sites[..., 2], dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(budget, device=device).expand_as(order))
    # Footprints are cut into spans, a row of one token each, and spans into pixels. The lowest rank stays.
    columns, rows = (end - begin).flatten(0, 1).unbind(-1)
    span = torch.repeat_interleave(rows)
    row = torch.arange(len(span), device=device) - _starts(rows)[span]
    left, top = begin.flatten(0, 1).unbind(-1)
    first = (torch.div(span, budget, rounding_mode="floor") * height + top[span] + row) * width + left[span]
    length = columns[span]
    ranks = rank.flatten().int()[span]
    lowest = torch.full((batch * height * width,), budget, dtype=torch.int32, device=device)
    for part in _parcels(length):
        offset = first[part] - _starts(length[part])
        of = torch.repeat_interleave(length[part])
        pixels = offset[of] + torch.arange(len(of), device=device)
        lowest.scatter_reduce_(0, pixels, ranks[part][of], "amin")
    lowest = lowest.view(batch, -1)
    winners = order.gather(1, lowest.long().clamp(max=budget - 1))
    return winners.view(batch, height, width), (lowest < budget).view(batch, height, width)


def _footprints(sites: torch.Tensor, patch: int, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, K, 2] (x, y): the first pixels that tokens cover along each side, and those after the last."""
    sides = torch.tensor([size[1], size[0]], dtype=torch.float64, device=sites.device)
    centres = sites[..., :2].double() * sides
    half = patch * torch.exp2(sites[..., 2:].double()) / 2
    edges = (on_pixels(at, sides) for at in (centres - half, centres + half))
    begin, end = ((edge - 0.5).ceil().clamp(min=0).minimum(sides).long() for edge in edges)
    return begin, end


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def _parcels(lengths: torch.Tensor) -> list[slice]:
    """Successive spans that hold about as many pixels as are worked on at a time."""
    if not len(lengths):
        return []
    ends = lengths.cumsum(0)
    cuts = AT_ONCE * torch.arange(1, max(1, -(-int(ends[-1]) // AT_ONCE)), device=lengths.device)
    bounds = [0, *torch.searchsorted(ends, cuts, right=True).tolist(), len(lengths)]
    return [slice(a, b) for a, b in pairwise(bounds) if a < b]


def _token_by_token(
    values: torch.Tensor,
    sites: torch.Tensor,
    size: tuple[int, int],
    rest: torch.Tensor,
    numbers: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The picture of values [B, K, C, P, P]: the coarsest first, of equal ones the first one last.

    Args:
        numbers: filled with 1 + the token that each pixel shows, 0 where none does, so that a bool says if one does;
            None, if the values have margins and are read bicubic.
        dtype: of the picture; None is that of the values.
    """
    (height, width), (batch, budget, channels, side, _) = size, values.shape
    margin = token_margins.REACH if numbers is None else 0
    patch, work = side - 2 * margin, rest.dtype
    dtype = dtype or values.dtype
    image = _stored(rest, dtype)[:, :, None, None].expand(batch, channels, height, width).contiguous()
    if numbers is not None:  # not before a picture that may not fit memory
        numbers.zero_()
    order = sites[..., 2].sort(dim=1, stable=True).indices.flip(1)
    begin, end = _footprints(sites, patch, size)
    centres = centres_of(sites, size, torch.float32).to(work)
    step = torch.exp2(sites[..., 2].to(work))
    boxes = torch.cat([begin, end], -1).flatten(0, 1).tolist()
    along = _cubic_along if margin else _along
    across, down = (
        along(begin[..., axis].flatten(), end[..., axis].flatten(), centres[..., axis].flatten(), step.flatten(), patch)
        for axis in (0, 1)
    )
    whole = _whole(centres, step, patch).flatten().tolist()
    skipped = (begin - (centres - patch / 2).long() + margin).flatten(0, 1).tolist()
    for index, tokens in enumerate(order.tolist()):
        for token in tokens:
            number = index * budget + token
            x0, y0, x1, y1 = boxes[number]
            if x0 >= x1 or y0 >= y1:
                continue
            samples, shown = values[index, token], image[index, :, y0:y1, x0:x1]
            if whole[number]:
                x, y = skipped[number]
                samples = samples[:, y : y + y1 - y0, x : x + x1 - x0]
                shown.copy_(_stored(samples, dtype) if samples.dtype != dtype else samples)
            elif margin:
                samples = _weighted(_weighted(samples, 2, *across[number]), 1, *down[number])
                shown.copy_(_stored(samples, dtype))
            else:
                samples = samples.to(work)
                low, high, share = across[number]
                samples = torch.lerp(samples.index_select(2, low), samples.index_select(2, high), share)
                low, high, share = down[number]
                above, below = samples.index_select(1, low), samples.index_select(1, high)
                if dtype == work:
                    torch.lerp(above, below, share[:, None], out=shown)
                else:
                    shown.copy_(_stored(torch.lerp(above, below, share[:, None]), dtype))
            if numbers is not None:
                numbers[index, y0:y1, x0:x1].fill_(token + 1)
    return image


def _whole(centres: torch.Tensor, step: torch.Tensor, patch: int) -> torch.Tensor:
    """Of which tokens all samples are pixels, which are copied: an infinity weighted by 0 would be NaN."""
    first = centres - patch / 2
    return (step == 1) & (first == first.floor()).all(-1)


def _places(
    begin: torch.Tensor, end: torch.Tensor, centre: torch.Tensor, step: torch.Tensor, patch: int
) -> tuple[torch.Tensor, list[int]]:
    """Where in its patch each pixel is that each token covers along an axis, and how many these are."""
    counts = (end - begin).clamp(min=0)
    token = torch.repeat_interleave(counts)
    pixel = (begin - _starts(counts))[token] + torch.arange(len(token), device="cpu")
    return (pixel.to(centre.dtype) + 0.5 - centre[token]) / step[token] + (patch - 1) / 2, counts.tolist()


def _along(
    begin: torch.Tensor, end: torch.Tensor, centre: torch.Tensor, step: torch.Tensor, patch: int
) -> list[tuple[torch.Tensor, ...]]:
    """Of the pixels that each token covers along an axis: the sample before, the one after, and the share of that."""
    at, counts = _places(begin, end, centre, step, patch)
    at = at.clamp(0, patch - 1)
    low = at.long()
    parts = low, at.ceil().long(), at - low
    return list(zip(*(part.split(counts) for part in parts), strict=True))


def _cubic_along(
    begin: torch.Tensor, end: torch.Tensor, centre: torch.Tensor, step: torch.Tensor, patch: int
) -> list[tuple[torch.Tensor, ...]]:
    """The same of a cubic: four samples of the patch with its margins, [4, n], and their weights."""
    at, counts = _places(begin, end, centre, step, patch)
    parts = [part.movedim(-1, 0).contiguous() for part in token_margins.taps(at, patch)]
    return list(zip(*(part.split(counts, 1) for part in parts), strict=True))


def _weighted(samples: torch.Tensor, dim: int, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Samples [C, h, w] along a dimension at four indices, each by its weight."""
    if dim == 1:
        weights = weights[..., None]
    taken = [samples.index_select(dim, one) * weight for one, weight in zip(index, weights, strict=True)]
    return (taken[0] + taken[1]).add_(taken[2]).add_(taken[3])


def _pixel_by_pixel(
    values: torch.Tensor,
    sites: torch.Tensor,
    winners: torch.Tensor,
    covered: torch.Tensor,
    rest: torch.Tensor,
    dtype: torch.dtype,
    *,
    bicubic: bool = False,
) -> torch.Tensor:
    """The picture of values [B, K, C, P, P], of a dtype: every pixel as its token shows it.

    Args:
        bicubic: the values have margins.
    """
    batch, height, width = winners.shape
    budget, channels, side = values.shape[1], values.shape[2], values.shape[-1]
    patch = side - 2 * token_margins.REACH if bicubic else side
    texels = values.movedim(2, -1).flatten(0, -2)
    centres = centres_of(sites, (height, width), torch.float32).to(values.dtype)
    step = torch.exp2(sites[..., 2].to(values.dtype))
    whole = _whole(centres, step, patch).flatten()
    centres, step = centres.flatten(0, 1), step.flatten()
    x = torch.arange(width, dtype=values.dtype, device=values.device) + 0.5
    y = (torch.arange(height, dtype=values.dtype, device=values.device) + 0.5).repeat(batch)
    images = torch.arange(batch, device=winners.device).repeat_interleave(height)
    plain = not (dispatch.needs_grad(values) or checks.transformed(values))
    image = values.new_empty((batch * height, width, channels), dtype=dtype) if plain else None
    parts = []
    at_once = max(1, AT_ONCE // (4 * width if bicubic else width))  # of a cubic four samples along each side
    for rows in torch.arange(batch * height, device=winners.device).split(at_once):
        token = winners.flatten(0, 1)[rows] + budget * images[rows, None]
        at = [
            (pixel - centre[token]) / step[token] + (patch - 1) / 2
            for pixel, centre in ((x, centres[:, 0]), (y[rows, None], centres[:, 1]))
        ]
        read, exact = (_cubic if bicubic else _linear)(texels, token, at, patch)
        read = torch.where(whole[token][..., None], exact, read)
        read = torch.where(covered.flatten(0, 1)[rows][..., None], read, rest[images[rows], None])
        if image is None:
            parts.append(_stored(read, dtype))
        else:
            image[rows] = _stored(read, dtype)
    image = torch.cat(parts) if image is None else image
    return image.unflatten(0, (batch, height)).movedim(-1, 1).contiguous()


def _linear(
    texels: torch.Tensor, token: torch.Tensor, at: Sequence[torch.Tensor], patch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texels at places (x, y) in tokens, bilinear, [..., C], and the one before each."""
    low, high, share = [], [], []
    for place in at:
        place = place.clamp(0, patch - 1)
        low.append(place.long())
        high.append(place.ceil().long())
        share.append((place - low[-1])[..., None])
    lines, first = [], []
    for line in (low[1], high[1]):
        index = (token * patch + line) * patch
        first.append(texels[index + low[0]])
        lines.append(torch.lerp(first[-1], texels[index + high[0]], share[0]))
    return torch.lerp(lines[0], lines[1], share[1]), first[0]


def _cubic(
    texels: torch.Tensor, token: torch.Tensor, at: Sequence[torch.Tensor], patch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, bicubic, of patches with margins."""
    side = patch + 2 * token_margins.REACH
    (columns, across), (lines, down) = (token_margins.taps(place, patch) for place in at)
    found = texels.new_zeros(())
    for line, weight in zip(lines.unbind(-1), down.unbind(-1), strict=True):
        first = (token * side + line) * side
        row = texels.new_zeros(())
        for column, share in zip(columns.unbind(-1), across.unbind(-1), strict=True):
            row = row + texels[first + column] * share[..., None]
        found = found + row * weight[..., None]
    return found, texels[(token * side + lines[..., 1]) * side + columns[..., 1]]
