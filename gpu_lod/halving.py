"""From a level of a mip chain to the next, in plain torch."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from gpu_lod import checks, dispatch
from gpu_lod.planewise import bands
from gpu_lod.pyramid import Reduce, level_sizes

WHOLE = 2**21
"""Texels of small dtypes that a CPU makes fp32 of, or halves, at once; of larger images and batches it is a part at a
time, which takes down to a third of the time and a fraction of the memory."""

SUMS = 2**23
"""Texels up to which a CPU halves by sums of rows and then of columns: in down to two thirds of the time of the one
kernel that is fastest beyond, where what lies between would be fresh memory at every call."""

_COUNTED = 2**30
"""Texels that torch surely makes on CUDA by interpolation: it may refuse those that 32 bits do not count."""

FEW = 2**12
"""Texels up to which one kernel takes less time than the three operations of the sums: 3 to 8 instead of 9 us."""

_EVEN_BYTES = 0x00FF00FF
_DEPTH = 2
"""Levels that are made of a part before the next: what stays in fp32 is then a sixteenth of the texels, and more would
take rows that are read twice."""


def stored(values: torch.Tensor, dtype: torch.dtype, *, in_place: bool = False) -> torch.Tensor:
    """Values as they are stored: rounded for uint8.

    Args:
        in_place: they may be written over.
    """
    if dtype != torch.uint8:
        return values.to(dtype)
    return (values.round_() if in_place else values.round()).to(dtype)


def halve_mean(x: torch.Tensor, height: int, width: int, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Area average to (height, width), the next level's size; fp32 of small dtypes.

    Args:
        rows: of a band of a level, which row of the next level is its first and how many rows the level has; None is
            the whole level.
    """
    if x.dtype == torch.uint8 and tuple(x.shape[-2:]) == (2 * height, 2 * width) and _in_words(x):
        return _halved_counts(x)
    h, w = x.shape[-2:]
    if h % 2 and h > 1:
        x = _polyphase(x, -2, *(rows or (0, h)))
    if w % 2 and w > 1:
        x = _polyphase(x, -1, 0, w)
    if x.dtype != _work(x):  # to() takes a microsecond to do nothing
        x = x.to(_work(x))
    cpu, few, threads = x.device.type == "cpu", x.numel() <= FEW, torch.get_num_threads() > 1
    if x.shape[-2] != height and x.shape[-1] != width and (few or not cpu or (x.numel() > SUMS and threads)):
        if cpu and not threads:  # it would wake all of them, however few the texels
            return F.avg_pool2d(x, 2)
        # Bilinear at half the size has its taps at the centres, with weights of exactly 1/2.
        batched = x if x.ndim == 4 else x[None]
        batched = F.interpolate(batched, size=(height, width), mode="bilinear", align_corners=False)
        return batched if x.ndim == 4 else batched[0]
    # On a single thread torch interpolates large levels in five times the time of sums. And where one
    # side alone is even it weighs a neighbour on the other side with 0, and 0 * inf is NaN.
    share = 1.0
    if x.shape[-2] != height:
        x, share = torch.add(x[..., 0::2, :], x[..., 1::2, :]), 0.5
    if x.shape[-1] != width:
        x, share = torch.add(x[..., 0::2], x[..., 1::2]), share / 2
    return x if share == 1 else x.mul_(share)


def _work(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _in_words(x: torch.Tensor) -> bool:
    """Whether a CPU may take counts for words of four of them."""
    if x.device.type != "cpu" or sys.byteorder != "little" or x.shape[-1] % 4 or x.is_neg():
        return False
    if checks.transformed(x) or torch._C._len_torch_dispatch_stack():  # traced: other tensors may lie elsewhere
        return False
    return x.stride(-1) == 1 and not any(n % 4 for n in (*x.stride()[:-1], x.storage_offset(), x.data_ptr()))


def _halved_counts(x: torch.Tensor) -> torch.Tensor:
    """Means of 2 x 2 counts, four in a word: sums of two are below 2^16 and leave their neighbours alone. In half the
    time that it takes to make fp32 of them all first."""
    words = x.view(torch.int32)
    pairs = words.bitwise_and(_EVEN_BYTES).add_(words.bitwise_right_shift(8).bitwise_and_(_EVEN_BYTES))
    return torch.add(pairs[..., 0::2, :], pairs[..., 1::2, :]).view(torch.int16).float().mul_(0.25)


def _polyphase(x: torch.Tensor, dim: int, begin: int, n: int) -> torch.Tensor:
    """The 3-tap box filter along an odd side n = 2m + 1, or of what outputs from `begin` on rest on."""
    m, count = n // 2, x.shape[dim] // 2
    work = _work(x)
    i = torch.arange(begin, begin + count, dtype=work, device=x.device)
    if dim == -2:
        i = i[:, None]
        even, middle = x[..., 0::2, :], x[..., 1::2, :]
    else:
        even, middle = x[..., 0::2], x[..., 1::2]
    graph = dispatch.needs_grad(x) or checks.transformed(x)
    if x.dtype != work:  # a half after the other: never all of it twice, and without gaps
        result, even = middle.to(work).mul_(m / n), even.to(work)
    else:
        result = middle * (m / n)
    first, last = even.narrow(dim, 0, count), even.narrow(dim, 1, count)
    if graph:
        return torch.addcmul(torch.addcmul(result, first, (m - i) / n), last, (i + 1) / n)
    return result.addcmul_(first, (m - i) / n).addcmul_(last, (i + 1) / n)


def halve_mean_adjoint(x: torch.Tensor, height: int, width: int, fine: torch.Tensor | None = None) -> torch.Tensor:
    """The adjoint of `halve_mean`, from the next level's size to (height, width), and `fine` added; fp32 or fp64."""
    even = [n % 2 == 0 for n in (height, width)]
    few = checks.on_host(x) or height * width * x[..., 0, 0].numel() <= _COUNTED
    if all(even) and x.ndim in (3, 4) and few:  # as torch takes them: two thirds of the time of joining copies
        batched = x if x.ndim == 4 else x[None]
        batched = F.interpolate(batched * 0.25, size=(height, width), mode="nearest")
        x = batched if x.ndim == 4 else batched[0]
    else:
        for dim, n in ((-2, height), (-1, width)):
            if n % 2 == 0:
                x = (x * 0.5).repeat_interleave(2, dim)
            elif n > 1:
                x = _polyphase_adjoint(x, dim, n)
    if fine is None:
        return x
    own = max(height, width) > 1 and not (dispatch.needs_grad(x, fine) or any(map(checks.transformed, (x, fine))))
    return x.add_(fine) if own else x + fine


def _polyphase_adjoint(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    m, shape = n // 2, list(x.shape)
    shape[dim] = n
    result = x.new_empty(shape)
    even, middle = (result[..., k::2] if dim == -1 else result[..., k::2, :] for k in (0, 1))
    i = torch.arange(m, dtype=x.dtype, device=x.device)
    i = i if dim == -1 else i[:, None]
    middle.copy_(x * (m / n))
    even.narrow(dim, 0, m).copy_(x * ((m - i) / n))
    even.narrow(dim, m, 1).zero_()
    even.narrow(dim, 1, m).add_(x * ((i + 1) / n))
    return result


def halve_extreme(x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Max or min of each footprint, of rows first: whole rows vectorise. Of large levels some rows at a time, as what
    lies between would be fresh memory at every call."""
    h, w = x.shape[-2:]
    if x.device.type != "cpu" or x.numel() <= SUMS or h < 2 or dispatch.needs_grad(x) or checks.transformed(x):
        return _extreme(x, reduce)
    result = x.new_empty(*x.shape[:-2], h // 2, max(w // 2, 1))
    planes, targets = x.flatten(0, -3), result.flatten(0, -3)
    for some, rows in bands(len(planes), h // 2, 2 * w):
        targets[some, rows] = _extreme(planes[some, 2 * rows.start : 2 * rows.stop + h % 2], reduce)
    return result


def _extreme(x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    take = torch.maximum if reduce == "max" else torch.minimum
    h, w = x.shape[-2:]
    if h > 1:
        m = h // 2 * 2
        y = take(x[..., 0:m:2, :], x[..., 1:m:2, :])
        x = take(y, x[..., 2::2, :]) if h % 2 else y
    if w > 1:
        m = w // 2 * 2
        y = take(x[..., 0:m:2], x[..., 1:m:2])
        x = take(y, x[..., 2::2]) if w % 2 else y
    return x


def parts_pay(image: torch.Tensor, whole: int = WHOLE) -> bool:
    """Whether a mean chain is to be made by `in_parts`. Else it is no gain, or cannot be: the chain is made of the
    whole then, with the same values but for rounding.

    Args:
        whole: texels up to which it is made of the whole.
    """
    small = image.dtype not in (torch.float32, torch.float64) and image.device.type == "cpu"
    return small and image.numel() > whole and not checks.transformed(image)


def in_parts(image: torch.Tensor, levels: int | None, part: int) -> list[torch.Tensor]:
    """Levels 1, 2, ... of a mean chain of a small dtype, some planes or rows at a time: in fp32 the image would be
    several. Without a graph.

    Args:
        part: texels of the image that are fp32 at once; more where the rows that one of the next but one level rests on
            have more.
    """
    sizes = level_sizes(image.shape[-2], image.shape[-1], levels)
    result = [image.new_empty(*image.shape[:-2], *size) for size in sizes[1:]]
    source = image
    for first in range(0, len(result), _DEPTH):
        end = min(first + _DEPTH, len(result))
        below = image.new_empty(result[end - 1].shape, dtype=torch.float32) if end < len(result) else None
        _descend(source, sizes[first : end + 1], result[first:end], below, part)
        source = image if below is None else below
    return result


def _descend(
    source: torch.Tensor,
    sizes: list[tuple[int, int]],
    levels: list[torch.Tensor],
    wide_last: torch.Tensor | None,
    part: int,
) -> None:
    """Make some levels.

    Args:
        sizes: of the source and of each level.
        wide_last: where the last of them is left as it is before it is rounded.
    """
    planes, height = source.flatten(0, -3), sizes[-1][0]
    targets = [level.flatten(0, -3) for level in levels]
    for some, rows in bands(len(planes), height, sizes[0][1] << len(levels), part):
        # What rows of each level rest on, up to the source: at odd heights a row more.
        spans = [(rows.start, rows.stop)]
        for tall, _ in sizes[-2::-1]:
            first, end = spans[0]
            spans.insert(0, (2 * first, 2 * end + tall % 2) if tall > 1 else (0, 1))
        wide = planes[some, slice(*spans[0])]
        for index, target in enumerate(targets):
            first, end = spans[index + 1]
            wide = halve_mean(wide, end - first, sizes[index + 1][1], (first, sizes[index][0]))
            target[some, first:end] = stored(wide, target.dtype)
        if wide_last is not None:
            wide_last.flatten(0, -3)[some, rows] = wide
