"""Tokens beyond their edges, so that all of them are enlarged as one picture: samples that their neighbours hold there,
and the weights of a cubic filter."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_lod.gather_patches import Look, centres_of
from gpu_lod.gather_patches import reference as gathered
from gpu_lod.mipmap import sampled

REACH = 2
"""Samples beyond a patch's edges that its outermost pixels are made of."""
_CUBIC = -0.75
"""The free parameter of Keys' cubic, as torch and OpenCV have it."""
_FINER = 0.5
"""Levels by which a neighbour has to be finer, for the mean of its samples to be taken rather than one of them."""
_MET = 1e-6
"""Of a sample: so near to one it is read by itself, for beside it may be NaN."""
_HIGHEST = 60.0
"""Level beyond any image, from which on all are taken for one."""
_AT_ONCE = 2**21
"""Samples that are read at a time."""


def taps(at: torch.Tensor, patch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of places in a patch, -0.5 to P - 0.5: the four samples of the patch with its margins that each is made of, and
    their weights, [..., 4] both. The nearest stands in for one without weight, which may be NaN."""
    low = at.floor()
    share = (at - low)[..., None]
    far = share.new_tensor([1.0, 0.0, 1.0, 2.0])
    distance = torch.cat([share, share, -share, -share], -1) + far
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance.square() + 1
    beyond = _CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    weights = torch.where(distance <= 1, near, beyond)
    index = low.long().clamp(-1, patch - 1)[..., None] + torch.arange(REACH - 1, REACH + 3, device=at.device)
    nearest = torch.where(share < 0.5, index[..., 1:2], index[..., 2:3])
    return torch.where(weights != 0, index, nearest), weights


def extended(
    values: torch.Tensor, sites: torch.Tensor, winners: torch.Tensor, covered: torch.Tensor, image: torch.Tensor
) -> torch.Tensor:
    """Patches with margins, [B, K, C, P + 4, P + 4]: what the token there holds at that place, if it is no finer, else
    the mean of the picture there. Where no token is, and outside the picture, the outermost samples go on.

    Args:
        values: [B, K, C, P, P], float32 or float64, at sites [B, K, 3].
        winners: [B, H, W], which token each pixel shows.
        covered: [B, H, W], whether it shows one.
        image: [B, C, H, W], the picture as each token shows it by itself, of any dtype.
    """
    batch, budget, channels, patch, _ = values.shape
    side, device = patch + 2 * REACH, values.device
    size = image.shape[-2], image.shape[-1]
    inner = torch.zeros(side, side, dtype=torch.bool, device=device)
    inner[REACH:-REACH, REACH:-REACH] = True
    rows, columns = (~inner).nonzero().unbind(-1)
    centres = centres_of(sites, size, torch.float64).flatten(0, 1)
    level = sites[..., 2].double().clamp(max=_HIGHEST).flatten()
    step = torch.exp2(level)
    images = torch.arange(batch, device=device).repeat_interleave(budget)[:, None]
    texels = values.movedim(2, -1).flatten(0, -2)
    offsets = torch.arange(side, dtype=torch.float64, device=device) - REACH - (patch - 1) / 2
    parts, finer = [], []
    first = centres - patch / 2
    needing = ((step != 1) | (first != first.floor()).any(-1)).nonzero()[:, 0]  # others are copied
    whole = F.pad(values, [REACH] * 4)
    if not len(needing):
        return whole
    for tokens in needing.split(max(1, _AT_ONCE // (len(rows) * channels))):
        along = centres[tokens, :, None] + offsets * step[tokens, None, None]
        beyond = along[:, 0, columns], along[:, 1, rows]
        x, y = (place.clamp(0.5, n - 0.5) for place, n in zip(beyond, reversed(size), strict=True))
        pixel = (images[tokens] * size[0] + y.long()) * size[1] + x.long()
        there = covered.flatten()[pixel]
        token = torch.where(there, images[tokens] * budget + winners.flatten()[pixel], tokens[:, None])
        low, high, share = [], [], []
        for axis, inside in enumerate((x, y)):
            place = torch.where(there, inside, beyond[axis])
            at = ((place - centres[token, axis]) / step[token] + (patch - 1) / 2).clamp(0, patch - 1)
            at = torch.where((at - at.round()).abs() < _MET, at.round(), at)
            low.append(at.long())
            high.append(at.ceil().long())
            share.append((at - low[-1]).to(values.dtype)[..., None])
        lines = []
        for line in (low[1], high[1]):
            index = (token * patch + line) * patch
            lines.append(torch.lerp(texels[index + low[0]], texels[index + high[0]], share[0]))
        parts.append(torch.lerp(lines[0], lines[1], share[1]).movedim(-1, 1))
        finer.append(level[token] < level[tokens, None] - _FINER)
    margins, is_finer = torch.cat(parts), torch.cat(finer)[:, None]
    if is_finer.any():
        look = Look(side, zero=False, scale=None, offset=(), dtype=values.dtype)
        there = covered[:, None].to(values.dtype)  # of the rest no mean is to know
        kept = torch.cat([torch.where(covered[:, None], image.to(values.dtype), 0), there], 1)
        means = sampled(kept, None, sites, lambda levels, points: gathered(levels, points, look))
        means = means.flatten(0, 1)[needing][..., rows, columns]
        weight = means[:, channels:]
        means = means[:, :channels] / torch.where(weight > 0, weight, 1)
        margins = torch.where(is_finer & (weight > 0), means, margins)
    order = torch.cat([inner.flatten().nonzero()[:, 0], rows * side + columns]).argsort()
    found = torch.cat([values.flatten(0, 1)[needing].flatten(-2), margins], -1)[..., order].unflatten(-1, (side, side))
    return whole.flatten(0, 1).index_copy(0, needing, found).unflatten(0, (batch, budget))
