"""Tokens back to a picture: what an allocation kept of it, and where it looked at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gpu_lod import checks, dispatch, operators
from gpu_lod.errors import InputError
from gpu_lod.gather_patches import centres_of, on_pixels
from gpu_lod.halving import stored
from gpu_lod.token_set import TokenSet
from gpu_lod.uncompiled import in_one_piece

AT_ONCE = 2**21
"""Pixels worked on at a time, so that memory does not grow with how much tokens overlap."""
BY_TOKEN = 384
"""Pixels of the picture for each token, from which on a CPU paints one after the other in less time."""


class Rebuilt(NamedTuple):
    """A picture made of tokens."""

    image: torch.Tensor
    """[B, C, H, W], of the patches' dtype."""
    covered: torch.Tensor
    """bool [B, H, W]: which pixels some token covers."""

    @property
    def coverage(self) -> torch.Tensor:
        """The covered part of each image, [B], in [0, 1]."""
        return self.covered.double().mean((-2, -1)).float()


torch.serialization.add_safe_globals([Rebuilt])  # torch.load's weights_only


@in_one_piece
def rebuild(tokens: TokenSet, size: tuple[int, int], fill: float | Sequence[float] | None = None) -> Rebuilt:
    """Paint tokens where they came from, coarse ones first and finer ones over them.

    Shape: tokens with patches [B, K, C, P, P] give an `image` [B, C, H, W] and what is `covered`, [B, H, W]; without B
        for unbatched tokens.
    Units: those of the patches. uint8 is rounded.
    Convention: a token covers the pixels whose centres lie in the square of P 2^level px round its site, left and top
        edges included, clipped to the image. A pixel shows one token, the finest that covers it, and of equally fine
        ones the first in the token order, that is the most relevant. It is the inverse of `gather_patches`: a pixel
        centre becomes a place in the patch, which is read bilinear, sample u at u + 0.5 and clamped to the outermost
        samples. Level-0 patches on the pixel grid give back their exact pixels. Edges within fp32's rounding of a
        pixel's centre or edge are there, so that tokens that tile leave no seam. Differentiable in the patches.

    Args:
        size: (H, W) of the picture in pixels.
        fill: what no token covers, a number or one a channel; None is the mean of the image's tokens.

    Raises:
        InputError: tokens without patches, sites outside the image, or a bad size or fill.
        OutOfMemoryError: a picture of that size does not fit a CPU's memory.
    """
    size = checks.size(size, at_most=checks.LONGEST)
    patches, sites, batched = _parts(tokens)
    rest = None
    if fill is not None:
        channels = patches.shape[2]
        several = not isinstance(fill, (int, float)) and getattr(fill, "ndim", isinstance(fill, Sequence)) > 0
        rest = checks.numbers(fill, "fill", channels) if several else [checks.number(fill, "fill")] * channels
    if rest is not None and patches.dtype == torch.uint8 and not all(-0.5 <= one < 255.5 for one in rest):
        raise InputError(f"fill is {fill}; expected 0 to 255, for these patches are uint8.")
    found = paint(patches, sites, size, rest)
    return found if batched else Rebuilt(found.image[0], found.covered[0])


def _canvas(patches: torch.Tensor, sites: torch.Tensor, size: tuple[int, int], fill: Sequence[float] | None) -> Rebuilt:
    batch, _, channels, *_ = patches.shape
    return Rebuilt(patches.new_empty(batch, channels, *size), patches.new_empty(batch, *size, dtype=torch.bool))


@operators.function(_canvas)
def paint(patches: torch.Tensor, sites: torch.Tensor, size: tuple[int, int], fill: Sequence[float] | None) -> Rebuilt:
    """`rebuild` of patches [B, K, C, P, P] at sites [B, K, 3]; of what is not covered each channel has its number."""
    checks.highest_level(sites)  # raises where sites are outside the image
    return dispatch.within_memory(_paint, patches, sites, (size[0], size[1]), fill)


def _paint(patches: torch.Tensor, sites: torch.Tensor, size: tuple[int, int], fill: Sequence[float] | None) -> Rebuilt:
    height, width = size
    batch, _, channels, patch, _ = patches.shape
    work = torch.float64 if patches.dtype == torch.float64 else torch.float32
    values = patches.to(work)
    rest = values.mean((1, 3, 4)) if fill is None else values.new_tensor(fill).expand(batch, channels)
    plain = not (dispatch.needs_grad(patches) or checks.transformed(patches) or checks.transformed(sites))
    if plain and patches.device.type == "cpu" and height * width >= BY_TOKEN * sites.shape[1]:
        image, covered = _token_by_token(values, sites, (height, width), rest)
        return Rebuilt(stored(image, patches.dtype), covered)
    winners, covered = _winners(sites, patch, (height, width))
    painted = torch.cat(list(_painted(values, sites, winners))).view(batch, height, width, channels)
    image = torch.where(covered[..., None], painted, rest[:, None, None]).movedim(-1, 1).contiguous()
    return Rebuilt(stored(image, patches.dtype), covered)


def psnr(image: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of [B, C, H, W] in dB, [B]: inf where they are equal. uint8 peaks at 255, others at 1.

    Raises:
        InputError: two shapes or dtypes.
    """
    if image.shape != other.shape or image.dtype != other.dtype:
        raise InputError(
            f"the images are {image.dtype} {tuple(image.shape)} and {other.dtype} {tuple(other.shape)}; expected two "
            "alike."
        )
    peak = 255.0 if image.dtype == torch.uint8 else 1.0
    error = ((image.double() - other.double()) / peak).square().mean((-3, -2, -1))
    return (-10 * error.log10()).float()


def _parts(tokens: Any) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Patches [B, K, C, P, P], sites [B, K, 3], and whether there was a batch."""
    if not isinstance(tokens, TokenSet):
        raise InputError(f"tokens are {type(tokens).__name__}; expected a TokenSet, which allocators return.")
    patches, sites = tokens.patches, tokens.sites.detach()
    if patches is None:
        raise InputError("these tokens have no patches to paint with; give the allocator an image=.")
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
    values: torch.Tensor, sites: torch.Tensor, size: tuple[int, int], rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Picture and what is covered, of values [B, K, C, P, P]: the coarsest first, of equal ones the first one last."""
    (height, width), (batch, budget, channels, patch, _) = size, values.shape
    image = rest[:, :, None, None].expand(batch, channels, height, width).contiguous()
    covered = torch.zeros(batch, height, width, dtype=torch.bool, device="cpu")
    order = sites[..., 2].sort(dim=1, stable=True).indices.flip(1)
    begin, end = _footprints(sites, patch, size)
    centres = centres_of(sites, size, torch.float32).to(values.dtype)
    step = torch.exp2(sites[..., 2].to(values.dtype))
    boxes = torch.cat([begin, end], -1).flatten(0, 1).tolist()
    across, down = (
        _along(
            begin[..., axis].flatten(), end[..., axis].flatten(), centres[..., axis].flatten(), step.flatten(), patch
        )
        for axis in (0, 1)
    )
    # Where all samples are pixels, which are copied, and of what sample the first pixel is.
    first = centres - patch / 2
    whole = ((step == 1) & (first == first.floor()).all(-1)).flatten().tolist()
    skipped = (begin - first.long()).flatten(0, 1).tolist()
    for index, tokens in enumerate(order.tolist()):
        for token in tokens:
            number = index * budget + token
            x0, y0, x1, y1 = boxes[number]
            if x0 >= x1 or y0 >= y1:
                continue
            samples, shown = values[index, token], image[index, :, y0:y1, x0:x1]
            if whole[number]:
                x, y = skipped[number]
                shown.copy_(samples[:, y : y + y1 - y0, x : x + x1 - x0])
            else:
                low, high, share = across[number]
                samples = torch.lerp(samples.index_select(2, low), samples.index_select(2, high), share)
                low, high, share = down[number]
                torch.lerp(samples.index_select(1, low), samples.index_select(1, high), share[:, None], out=shown)
            covered[index, y0:y1, x0:x1].fill_(True)
    return image, covered


def _along(
    begin: torch.Tensor, end: torch.Tensor, centre: torch.Tensor, step: torch.Tensor, patch: int
) -> list[tuple[torch.Tensor, ...]]:
    """Of the pixels that each token covers along an axis: the sample before, the one after, and the share of that."""
    counts = (end - begin).clamp(min=0)
    token = torch.repeat_interleave(counts)
    pixel = (begin - _starts(counts))[token] + torch.arange(len(token), device="cpu")
    at = ((pixel.to(centre.dtype) + 0.5 - centre[token]) / step[token] + (patch - 1) / 2).clamp(0, patch - 1)
    low = at.long()
    parts = low, (low + 1).clamp(max=patch - 1), at - low
    return list(zip(*(part.split(counts.tolist()) for part in parts), strict=True))


def _painted(values: torch.Tensor, sites: torch.Tensor, winners: torch.Tensor) -> Iterator[torch.Tensor]:
    """Every pixel as its token shows it, [N, W, C], some rows of the batch after the other."""
    batch, height, width = winners.shape
    budget, patch = values.shape[1], values.shape[-1]
    texels = values.movedim(2, -1).flatten(0, -2)
    centres = centres_of(sites, (height, width), torch.float32).to(values.dtype).flatten(0, 1)
    step = torch.exp2(sites[..., 2].to(values.dtype)).flatten()
    x = torch.arange(width, dtype=values.dtype, device=values.device) + 0.5
    y = (torch.arange(height, dtype=values.dtype, device=values.device) + 0.5).repeat(batch)
    tokens = winners + budget * torch.arange(batch, device=winners.device)[:, None, None]
    for rows in torch.arange(batch * height, device=winners.device).split(max(1, AT_ONCE // width)):
        token = tokens.flatten(0, 1)[rows]
        low, high, share = [], [], []
        for pixel, centre in ((x, centres[:, 0]), (y[rows, None], centres[:, 1])):
            at = ((pixel - centre[token]) / step[token] + (patch - 1) / 2).clamp(0, patch - 1)
            low.append(at.floor().long())
            high.append((low[-1] + 1).clamp(max=patch - 1))
            share.append((at - low[-1])[..., None])
        lines = []
        for line in (low[1], high[1]):
            index = (token * patch + line) * patch
            lines.append(torch.lerp(texels[index + low[0]], texels[index + high[0]], share[0]))
        yield torch.lerp(lines[0], lines[1], share[1])
