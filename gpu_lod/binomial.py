"""What Gaussian and Laplacian pyramids are made by, in plain torch: from a level to the next coarser one, back to its
size, and the adjoints of both."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from gpu_lod import checks, dispatch

BINOMIAL = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)
_LARGE = 2**18
"""Samples, of the finer level, from which a CPU takes less for several sums in place than for a few that make something
on the way."""
_PADDED = 2**30
"""Samples that torch surely pads on CUDA: it refuses those that 32 bits do not count."""


def reduce(x: torch.Tensor, along: tuple[int, ...] = (-2, -1), steady: bool = False) -> torch.Tensor:
    """One level down: [..., h, w] to [..., ceil(h / 2), ceil(w / 2)]. Rows first: whole rows vectorise.

    Args:
        along: which sides alone.
        steady: always in the order of sums of large levels, so that what a level is does not depend on how many images
            there are; small ones take some 15% longer.
    """
    graph = dispatch.needs_grad(x) or checks.transformed(x)
    in_place = checks.on_host(x) and not graph
    dims = [dim for dim in along if x.shape[dim] > 1]  # on a single sample every tap falls, and the weights sum to 1
    while dims and in_place and x.numel() >= _LARGE and x.shape[dims[0]] > 2:
        x = _summed_in_place(x, dims.pop(0))
    if dims:
        counts = [-(-x.shape[dim] // 2) for dim in dims]
        x = mirrored(x, 2 * (-2 in dims), 2 * (-1 in dims))
        for dim, count in zip(dims, counts, strict=True):
            x = _summed(x, dim, count, steady)
    return x


def _summed(x: torch.Tensor, dim: int, count: int, steady: bool) -> torch.Tensor:
    """So many binomial sums, every other one, along a side that has two samples more at both ends."""

    def tap(k: int) -> torch.Tensor:
        end = k + 2 * count - 1
        return x[..., k:end:2] if dim == -1 else x[..., k:end:2, :]

    side, near, middle = BINOMIAL[:3]
    # Strided sums: three to eight times as fast on a CPU as any convolution with stride 2.
    result = tap(2) * middle
    if steady:  # the order of `_summed_in_place`
        result.add_(tap(3), alpha=near).add_(tap(1), alpha=near)
        return result.add_(tap(0), alpha=side).add_(tap(4), alpha=side)
    return result.add_(tap(1) + tap(3), alpha=near).add_(tap(0) + tap(4), alpha=side)


def _summed_in_place(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same along a side of 3 and more, with nothing made on the way: of large levels that is fresh memory."""
    n, (side, near, middle) = x.shape[dim], BINOMIAL[:3]
    even, odd = (x[..., k::2] if dim == -1 else x[..., k::2, :] for k in (0, 1))
    count, odds = even.shape[dim], odd.shape[dim]
    result = even * middle

    def add(first: int, taps: torch.Tensor, begin: int, many: int, weight: float) -> None:
        result.narrow(dim, first, many).add_(taps.narrow(dim, begin, many), alpha=weight)

    # The first and the last once more where they are mirrored, in the order of `_summed`.
    add(0, odd, 0, odds, near)
    if n % 2:
        add(count - 1, odd, odds - 1, 1, near)
    add(0, odd, 0, 1, near)
    add(1, odd, 0, count - 1, near)
    add(0, even, 1, 1, side)
    add(1, even, 0, count - 1, side)
    add(0, even, 1, count - 1, side)
    add(count - 1, even, count - 2 if n % 2 else count - 1, 1, side)
    return result


def mirrored(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[..., h, w] with so many rows and columns more on both sides, mirrored about the outermost ones (reflect-101) as
    often as it takes."""
    height, width = x.shape[-2:]
    # On CUDA its backward would not be deterministic.
    plain = checks.on_host(x) or not (x.numel() > _PADDED or dispatch.needs_grad(x) or checks.transformed(x))
    if plain and rows < height and columns < width:
        # A fifth of the time of joining parts, and half of the launches.
        around = (columns, columns, rows, rows)
        if x.ndim in (3, 4):  # as torch takes them
            return F.pad(x, around, mode="reflect")
        return F.pad(x.flatten(0, -3), around, mode="reflect").unflatten(0, x.shape[:-2])
    return _joined(_joined(x, -2, rows), -1, columns)


def _joined(x: torch.Tensor, dim: int, reach: int) -> torch.Tensor:
    samples = [x.narrow(dim, i, 1) for i in _mirror(x.shape[dim], reach)]
    return torch.cat([*samples[:reach], x, *samples[reach:]], dim=dim) if reach else x


def _mirror(n: int, reach: int) -> list[int]:
    """Which of n samples are seen in the mirrors before the first, then in those behind the last."""
    period = max(2 * n - 2, 1)
    return [min(i % period, period - i % period) % n for i in range(-reach, n + reach) if not 0 <= i < n]


def mirrored_adjoint(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The adjoint of `mirrored`, in place: what fell on mirrored samples is added to those that were seen there."""
    for dim, reach in ((-2, rows), (-1, columns)):
        n = x.shape[dim] - 2 * reach
        result = x.narrow(dim, reach, n)
        outside = [*range(reach), *range(reach + n, n + 2 * reach)]
        for place, seen in zip(outside, _mirror(n, reach), strict=True):
            result.select(dim, seen).add_(x.select(dim, place))
        x = result
    return x


def reduce_adjoint(x: torch.Tensor, height: int, width: int, fine: torch.Tensor | None = None) -> torch.Tensor:
    """The adjoint of `reduce`, from a level [..., ceil(height / 2), ceil(width / 2)] on, and `fine` added.

    Between the edges it is half of what `expand` makes of each side. At them `expand` mirrors or repeats samples, and
    this adds what fell on mirrored ones.
    """
    x = x * 0.5 ** ((height > 1) + (width > 1))
    for dim, size, more in ((-1, width, None), (-2, height, fine)):
        result = _expanded(x, dim, size, more)
        if size > 2:
            ends = [(0, 1, -0.125), (1, 0, 0.5), (2, 0, 0.125)]
            ends += [(-1, -1, -0.125), (-2, -1, 0.5), (-3, -1, 0.125)] if size % 2 else [(-1, -1, -0.5)]
            _add_ends(result, x, dim, ends)
        x = result
    return x


def expand_adjoint(x: torch.Tensor) -> torch.Tensor:
    """The adjoint of `expand`, from the finer level on: between the edges twice what `reduce` makes of each side."""
    factor = 1
    for dim in (-2, -1):
        size = x.shape[dim]
        if size == 1:
            continue
        result = reduce(x, (dim,))
        if size > 2:
            ends = [(0, 2, -0.0625), (0, 1, -0.25), (1, 0, 0.0625)]
            ends += [(-1, -3, -0.0625), (-1, -2, -0.25), (-1, -1, 0.0625)] if size % 2 else [(-1, -1, 0.25)]
            _add_ends(result, x, dim, ends)
        x, factor = result, 2 * factor
    return x * factor


def _add_ends(result: torch.Tensor, x: torch.Tensor, dim: int, ends: list[tuple[int, int, float]]) -> None:
    """To samples of the result those of x with a weight, for (place, place in x, weight) along a side."""
    for place, other, weight in ends:
        result.select(dim, place).add_(x.select(dim, other), alpha=weight)


def added(fine: torch.Tensor, coarse: torch.Tensor, sign: int) -> torch.Tensor:
    """`fine` + `sign` times `coarse` at its size."""
    height, width = fine.shape[-2:]
    return _expanded(_expanded(coarse, -1, width), -2, height, fine, sign)


def _expanded(x: torch.Tensor, dim: int, size: int, fine: torch.Tensor | None = None, sign: int = 1) -> torch.Tensor:
    """`fine`, or 0, + `sign` times `x` at its size along a side."""
    shape = list(x.shape)
    shape[dim] = size
    given = (x,) if fine is None else (x, fine)
    kept = dispatch.needs_grad(*given) or any(map(checks.transformed, given))
    if x.device.type != "cpu" or math.prod(shape) < _LARGE or kept:
        wide = _expand_side(x, dim, size)
        return wide if fine is None else torch.add(fine, wide, alpha=sign)
    result = x.new_empty(shape)
    _add_side(x, dim, fine, sign, result)
    return result


def _add_side(x: torch.Tensor, dim: int, fine: torch.Tensor | None, sign: int, out: torch.Tensor) -> None:
    """`fine`, or 0, + `sign` times `x` at its size along a side, in place: of large levels, all that is made on the way
    is fresh memory."""
    n, size = x.shape[dim], out.shape[dim]
    before, after = x.narrow(dim, 0, n - 1), x.narrow(dim, 1, n - 1)
    second, last = x.narrow(dim, min(1, n - 1), 1), x.narrow(dim, n - 1, 1)
    between = min(size // 2, n - 1)

    def every_other(y: torch.Tensor, k: int) -> torch.Tensor:
        return y[..., k::2] if dim == -1 else y[..., k::2, :]

    def start(begin: int, many: int, k: int, x: torch.Tensor, weight: float) -> torch.Tensor:
        there = every_other(out, k).narrow(dim, begin, many)
        if fine is None:
            return torch.mul(x, sign * weight, out=there)
        return torch.add(every_other(fine, k).narrow(dim, begin, many), x, alpha=sign * weight, out=there)

    if size == 1:
        start(0, 1, 0, x, 1)
        return
    on = start(0, n, 0, x, 0.75)
    for begin, near in ((0, after), (1, before), (0, second), (n - 1, last)):
        on.narrow(dim, begin, near.shape[dim]).add_(near, alpha=sign * 0.125)
    start(0, between, 1, x.narrow(dim, 0, between), 0.5).add_(x.narrow(dim, 1, between), alpha=sign * 0.5)
    if size // 2 == n:
        start(n - 1, 1, 1, last, 1)


def expand(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """A level [..., ceil(height / 2), ceil(width / 2)] brought to the size of the next finer one."""
    return _expand_side(_expand_side(x, -1, width), -2, height)


def _expand_side(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    n = x.shape[dim]
    if size == 1:
        return x
    after = torch.cat([x.narrow(dim, 1, n - 1), x.narrow(dim, n - 1, 1)], dim=dim)
    between = (x + after).mul_(0.5)
    before = torch.cat([x.narrow(dim, min(1, n - 1), 1), x.narrow(dim, 0, n - 1)], dim=dim)
    on = after.add_(before).mul_(0.125).add_(x * 0.75)
    del before, after
    axis = x.ndim + dim
    joined = torch.stack([on, between], dim=axis + 1)
    # Not by flatten, which gradients in a batch, as of a Jacobian, refuse.
    return joined.reshape(*x.shape[:axis], 2 * n, *x.shape[axis + 1 :]).narrow(dim, 0, size)
