"""Whether a backend's result is torch's, as far as drivers go wrong: for calibration and the doctor, which meet drivers
that no test of ours has run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch

from gpu_lod.pyramid import Pyramid

FAR = 2**-5
"""Of the largest value. Texture units weigh texels and levels with 8 fractional bits; what is wrong is further off."""
FAR_ON_AVERAGE = 2**-3
"""The same for filters that each texture unit has of its own."""


def difference(result: object, truth: object, *, own_filter: bool = False) -> str:
    """Where and how much a result differs from torch's; empty if it does not, but for rounding.

    Args:
        result, truth: of a verb: a tensor of any shape, a Pyramid, a dataclass, or a list or tuple of these.
        own_filter: by a filter that texture units have each of their own, such as an anisotropic one: only averages
            are compared.
    """
    ours, theirs = list(_tensors(result)), list(_tensors(truth))
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return f"{len(ours)} tensors, expected {len(theirs)}"
    for (name, one), (_, other) in zip(ours, theirs, strict=True):
        if apart := _apart(one, other, own_filter):
            return f"{name}: {apart}" if name else apart
    return ""


def _tensors(result: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        yield "", result
    elif isinstance(result, Pyramid):
        yield from ((f"level {number}", level) for number, level in enumerate(result.levels))
    elif is_dataclass(result):
        for field in fields(result):
            yield from ((field.name, tensor) for _, tensor in _tensors(getattr(result, field.name)))
    elif isinstance(result, (tuple, list)):
        yield from ((f"part {number}", tensor) for number, part in enumerate(result) for _, tensor in _tensors(part))


def _apart(one: torch.Tensor, other: torch.Tensor, own_filter: bool) -> str:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype} of {tuple(one.shape)}, expected {other.dtype} of {tuple(other.shape)}"
    if not one.numel() or torch.equal(one, other):
        return ""
    if not one.is_floating_point() and one.dtype != torch.uint8:  # which texels
        return f"{int((one != other).sum())} of {one.numel()} are others"
    one, other = one.float(), other.float()
    scale = float(other.abs().nan_to_num(0.0, 0.0).max())
    same = (one == other) | (one.isnan() & other.isnan())  # infinities, too
    far = (one - other).abs().masked_fill_(same, 0.0).nan_to_num_(torch.inf)
    most = float(far.mean()) if own_filter else float(far.max())
    if most <= (FAR_ON_AVERAGE if own_filter else FAR) * scale:
        return ""
    return f"{most:.2g} {'on average' if own_filter else 'at most'}, where values are up to {scale:.2g}"
