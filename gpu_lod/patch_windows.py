"""Patches in plain torch: of windows that are copied out of the levels. In so few texels places are exact in fp32, too;
nothing else is converted; and the backward adds to what was read alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch

from gpu_lod import checks
from gpu_lod.adjoints import linear
from gpu_lod.bilinear import grid_sample, scattered
from gpu_lod.dispatch import needs_grad

_WHOLE, _SLICES, _BETWEEN, _BEYOND = range(4)
"""What sites read: a level; its texels as they are; a level and a share of the next one; the last one, their samples
being further apart than its texels."""

Shape = tuple[int, int]
"""Columns and rows."""


class Sites(NamedTuple):
    """Sites [N] of a batch. Places are float64: there are few, and in pixels of a large picture fp32 is too coarse."""

    image: torch.Tensor
    """Of each."""
    centres: torch.Tensor
    """[N, 2], (x, y), in pixels."""
    level: torch.Tensor
    """That their samples are as far apart as the texels of."""
    lod: torch.Tensor
    """That they are read at."""
    reads: torch.Tensor
    """Four times the level that is read, and what of it."""
    texel: torch.Tensor
    """[N, 2], that slices begin at."""

    def of(self, which: slice | torch.Tensor) -> Sites:
        return Sites(*(value[which] for value in self))

    def windows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of slices: images, and the texels that they begin at."""
        return self.image, self.texel.long()

    def are_slices(self) -> bool:
        """Whether all samples are texels."""
        return bool((self.reads % 4 == _SLICES).all())


def sites_of(
    shapes: Sequence[Shape],
    image: torch.Tensor,
    centres: torch.Tensor,
    level: torch.Tensor,
    patch: int,
    bias: float = 0.0,
) -> Sites:
    """Sites of a chain of such shapes, and what they read. At whole levels that are read as such samples are texels
    where the sides halve without a rest and the first sample is one."""
    last = len(shapes) - 1
    lod = (level + bias).clamp(min=0) if bias else level
    with torch.no_grad():
        index = lod.floor().clamp(max=last)
        whole = torch.exp2(index)[:, None]
        texel, room = centres / whole - patch / 2, centres.new_tensor(shapes[0]) / whole
        met = (texel == texel.floor()) & (room == room.floor()) & (texel >= 0) & (texel <= room - patch)
        apart = _BETWEEN * (lod > index) + (_BEYOND - _BETWEEN) * (lod > last)
        slices = met.all(dim=1) & (level == index)
        reads = 4 * index.long() + torch.where(slices & (lod == level) if bias else slices, _SLICES, apart)
    return Sites(image, centres, level, lod, reads, texel)


def read(
    chain: list[torch.Tensor], sites: Sites, patch: int, *, work: torch.dtype, graph: bool, bias: float = 0.0
) -> torch.Tensor:
    """[N, C, P, P] of levels [B, C, h, w], in `work`; where all are slices, in the levels' dtype, but for gradients.
    Differentiable in the levels.

    Args:
        graph: whether also in the centres and the level.
        bias: of `sites_of`.
    """
    runs, order = _runs(sites)
    sites = sites if order is None else sites.of(order)
    exact = not graph and all(run.kind == _SLICES for run in runs)
    samples = None if exact else _Samples(chain, sites, runs, patch, work, graph, bias)
    # Where windows overlap, gradients are to be rounded once.
    as_stored = exact and not needs_grad(*chain)
    result = None
    for alike in [[run] for run in runs] if samples is None else samples.together(runs):
        run = _Run(alike[0].level, alike[0].kind, alike[0].begin, alike[-1].end)
        some = sites if order is None else sites.of(slice(run.begin, run.end))
        values = samples.of(alike) if samples is not None and (run.kind != _SLICES or graph) else None
        if run.kind == _SLICES:
            level = chain[run.level]
            dtype = level.dtype if as_stored else work
            texels = _windows(level, *some.windows(), (patch, patch), dtype)
            # All gradients are those of the samples.
            values = texels if values is None else texels.detach() + (values - values.detach()).nan_to_num(0.0)
        assert values is not None
        if order is None:
            return values
        if result is None:
            result = values.new_empty((len(order), *values.shape[1:]))
        if checks.transformed(values):
            result[order[run.begin : run.end]] = values  # which torch.func.vmap has a rule for
        else:
            result.index_copy_(0, order[run.begin : run.end], values)
    assert result is not None
    return result


class Given:
    """What patches give the levels of a chain, added up.

    Args:
        shapes: of the levels, [B, C, h, w] each.
        patch: side of the patches.
        bias: of `sites_of`.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], patch: int, bias: float) -> None:
        self._shapes, self._patch, self._bias = shapes, patch, bias
        self._sums: list[torch.Tensor | None] = [None] * len(shapes)

    def add(self, gradient: torch.Tensor, sites: Sites) -> None:
        """The adjoint of `read`: of [N, C, P, P], fp32 or float64, at sites [N]."""
        runs, order = _runs(sites)
        sites = sites if order is None else sites.of(order)
        samples = None
        if any(run.kind != _SLICES for run in runs):
            unread = [gradient.new_empty(()).expand(*shape) for shape in self._shapes]
            samples = _Samples(unread, sites, runs, self._patch, gradient.dtype, False, self._bias)
        for run in runs:
            values = gradient if order is None else gradient[order[run.begin : run.end]]
            if run.kind == _SLICES:
                self.add_windows(run.level, *sites.of(slice(run.begin, run.end)).windows(), values)
            elif samples is not None:
                samples.give(run, values, self)

    def add_windows(self, level: int, image: torch.Tensor, begin: torch.Tensor, values: torch.Tensor) -> None:
        self._sums[level] = _added(self._sums[level], self._shapes[level], image, begin, values)

    def add_texels(self, level: int, texel: torch.Tensor, values: torch.Tensor) -> None:
        """
        Args:
            texel: [M], counted through the images of the level.
            values: [C, M].
        """
        self._sums[level] = _added_at(self._sums[level], self._shapes[level], texel, values)

    def found(self) -> list[torch.Tensor | None]:
        """[B, C, h, w] of each level; None where nothing was read."""
        return [
            None if sums is None else _as_level(sums, shape)
            for sums, shape in zip(self._sums, self._shapes, strict=True)
        ]


def _runs(sites: Sites) -> tuple[list[_Run], torch.Tensor | None]:
    """Sites that read the same, and the order in which they are neighbours; None: all do."""
    reads = sites.reads
    low, high = (int(bound) for bound in torch.aminmax(reads))
    if low == high:
        return [_Run(low // 4, low % 4, 0, len(reads))], None
    reads, order = reads.sort(stable=True)
    numbers, counts = reads.unique_consecutive(return_counts=True)
    ends = [0, *counts.cumsum(0).tolist()]
    runs = [
        _Run(number // 4, number % 4, begin, end)
        for number, (begin, end) in zip(numbers.tolist(), pairwise(ends), strict=True)
    ]
    return runs, order


class _Run(NamedTuple):
    """Sites that read the same, one after the other."""

    level: int
    kind: int
    begin: int
    end: int


class _Samples:
    """Bilinear samples of runs of sites, from windows of the level that they read and of the next one."""

    def __init__(
        self,
        chain: list[torch.Tensor],
        sites: Sites,
        runs: list[_Run],
        patch: int,
        work: torch.dtype,
        graph: bool,
        bias: float,
    ) -> None:
        self._chain, self._sites, self._patch, self._work, self._graph = chain, sites, patch, work, graph
        self._shapes = [(level.shape[3], level.shape[2]) for level in chain]
        self._wider = 2 ** max(-bias, 0.0)  # than what is read: where that is sharper, samples are further apart
        last, sizes = len(chain) - 1, sites.centres.new_tensor(self._shapes)
        index = sites.reads // 4
        self._share = (sites.lod.clamp(max=last) - index).to(work)[:, None, None, None]
        further = (0, 1) if graph or any(run.kind == _BETWEEN for run in runs) else (0,)
        here = sizes[torch.stack([(index + i).clamp(max=last) for i in further])]
        # Texels from sample to sample, and where the first is, [1 or 2, N, 2].
        self._step = torch.exp2(sites.level)[:, None] * (here / sizes[0])
        self._first = sites.centres * (here / sizes[0]) - 0.5 - (patch - 1) / 2 * self._step
        windows = sizes.new_tensor([[self._window(run, i) for run in runs] for i in further])
        if len(runs) > 1:
            windows = windows.repeat_interleave(index.new_tensor([run.end - run.begin for run in runs]), dim=1)
        # The texels that windows begin at, and the samples in them, [..., N, P, P, 2], as grid_sample counts.
        begin = (self._first.detach().floor() - 1).clamp(min=0).minimum(here - windows)
        counts = torch.arange(patch, dtype=work, device=begin.device)
        along = (self._first - begin).to(work)[..., None] + self._step.to(work)[..., None] * counts
        x, y = ((2 * along + 1) / windows.to(work)[..., None] - 1).unbind(-2)
        self._begin = begin.long()
        self._grid = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., :, None]), dim=-1)

    def _window(self, run: _Run, further: int) -> Shape:
        """Of the windows that a run reads of its level, or of the one `further` on."""
        index = min(run.level + further, len(self._chain) - 1)
        step = 2 ** (run.level + (run.kind == _BETWEEN)) * self._wider  # at most, in pixels
        # A texel more before the first sample than it reads: grid_sample has no gradients at an edge.
        columns, rows = (
            min(math.ceil((self._patch - 1) * step * side / whole) + 3, side)
            for side, whole in zip(self._shapes[index], self._shapes[0], strict=True)
        )
        return columns, rows

    def together(self, runs: list[_Run]) -> list[list[_Run]]:
        """Neighbours whose windows are of the same sizes: a CPU reads them with fewer calls, in less time."""
        chain = self._chain
        if chain[0].device.type != "cpu" or self._graph or needs_grad(*chain) or any(map(checks.transformed, chain)):
            return [[run] for run in runs]
        return [list(alike) for _, alike in groupby(runs, key=self._alike)]

    def _alike(self, run: _Run) -> tuple[Any, ...]:
        if run.kind != _BETWEEN:
            return run
        return self._window(run, 0), self._window(run, 1)

    def of(self, runs: list[_Run]) -> torch.Tensor:
        """[n, C, P, P] of the level of each run, and between levels of the next one."""
        first, end = runs[0], runs[-1].end
        if first.kind == _BEYOND:
            return self._apart(first)
        values = self._read(runs, 0)
        # At a whole level, too, the next one is a gradient in the level.
        if first.kind == _BETWEEN or (self._graph and first.level + 1 < len(self._chain)):
            values = torch.lerp(values, self._read(runs, 1), self._share[first.begin : end])
        return values

    def _read(self, runs: list[_Run], further: int) -> torch.Tensor:
        begin, end, shape = runs[0].begin, runs[-1].end, self._window(runs[0], further)
        levels = [self._chain[run.level + further] for run in runs]
        image, at = self._sites.image, self._begin[further]
        if len(runs) == 1:
            seen = _windows(levels[0], image[begin:end], at[begin:end], shape, self._work)
        else:
            seen = levels[0].new_empty((end - begin, levels[0].shape[1], shape[1], shape[0]), dtype=self._work)
            for level, run in zip(levels, runs, strict=True):
                every, index = _in_memory(level, image[run.begin : run.end], at[run.begin : run.end], shape)
                out = seen[run.begin - begin : run.end - begin]
                if level.dtype == self._work:
                    torch.index_select(every, 0, index, out=out)
                else:
                    out.copy_(every.index_select(0, index))
        return grid_sample(seen, self._grid[further, begin:end])

    def give(self, run: _Run, gradient: torch.Tensor, to: Given) -> None:
        """The adjoint of `of` a run, without a graph."""
        if run.kind == _BEYOND:
            self._give_apart(run, gradient, to)
            return
        if run.kind == _BETWEEN:
            coarse = gradient * self._share[run.begin : run.end]
            self._give(run, 1, coarse, to)
            gradient = torch.sub(gradient, coarse, out=coarse)
        self._give(run, 0, gradient, to)

    def _give(self, run: _Run, further: int, gradient: torch.Tensor, to: Given) -> None:
        which = slice(run.begin, run.end)
        shape = *gradient.shape[:2], *self._window(run, further)[::-1]
        seen = scattered(gradient, self._grid[further, which], shape)
        to.add_windows(run.level + further, self._sites.image[which], self._begin[further, which], seen)

    def _corners(self, run: _Run) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Along x, then y, [n, P]: the two texels about each sample, and the share of the second."""
        which, corners = slice(run.begin, run.end), []
        counts = torch.arange(self._patch, device=self._first.device)
        for axis, side in enumerate(self._shapes[run.level]):
            at = self._first[0, which, axis, None] + self._step[0, which, axis, None] * counts
            at = at.clamp(0, side - 1)
            first = at.detach().floor().clamp(max=max(side - 2, 0))
            corners.append((first.long(), (first.long() + 1).clamp(max=side - 1), (at - first).to(self._work)))
        return corners

    def _give_apart(self, run: _Run, gradient: torch.Tensor, to: Given) -> None:
        columns, rows = self._shapes[run.level]
        image = self._sites.image[run.begin : run.end, None, None]
        (left, right, across), (above, below, down) = self._corners(run)
        lower = gradient * down[:, None, :, None]
        for y, part in ((above, gradient - lower), (below, lower)):
            outer = part * across[:, None, None, :]
            for x, values in ((left, part - outer), (right, outer)):
                texel = (image * rows + y[:, :, None]) * columns + x[:, None, :]
                to.add_texels(run.level, texel.flatten(), values.transpose(0, 1).flatten(1))

    def _apart(self, run: _Run) -> torch.Tensor:
        """Samples further apart than texels: the four about each by themselves."""
        which, level = slice(run.begin, run.end), self._chain[run.level]
        (left, right, across), (above, below, down) = self._corners(run)
        image, channel = self._sites.image[which, None, None, None], torch.arange(level.shape[1], device=level.device)

        def texels(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return level[image, channel[:, None, None], y[:, None, :, None], x[:, None, None, :]].to(self._work)

        share = across[:, None, None, :]
        one, other = (torch.lerp(texels(left, y), texels(right, y), share) for y in (above, below))
        return torch.lerp(one, other, down[:, None, :, None])


def _windows(
    level: torch.Tensor, image: torch.Tensor, begin: torch.Tensor, shape: Shape, dtype: torch.dtype
) -> torch.Tensor:
    """[n, C, rows, columns] of a level [B, C, h, w]: of images [n], from texels `begin` [n, 2], (x, y), on, all inside.

    Differentiable in the level, of whose values the backward needs none.

    Args:
        dtype: of the result.
    """
    (columns, rows), whole, stored = shape, level.shape, level.dtype

    def copied(level: torch.Tensor) -> list[torch.Tensor]:
        if level.device.type != "cpu":
            every = level.unfold(2, rows, 1).unfold(3, columns, 1)
            return [every[image, :, begin[:, 1], begin[:, 0]].to(dtype)]
        every, index = _in_memory(level, image, begin, shape)
        return [every.index_select(0, index).to(dtype)]

    def adjoint(gradient: torch.Tensor) -> list[torch.Tensor]:
        return [_as_level(_added(None, whole, image, begin, gradient), whole).to(stored)]

    if checks.transformed(level):  # torch's own derivatives
        x, y = (at[:, None] + torch.arange(n, device=at.device) for at, n in zip(begin.unbind(1), shape, strict=True))
        channel = torch.arange(whole[1], device=begin.device)[:, None, None]
        return level[image[:, None, None, None], channel, y[:, None, :, None], x[:, None, None, :]].to(dtype)
    (result,) = linear(copied, adjoint, level)
    return result


def _added(
    sums: torch.Tensor | None, whole: Sequence[int], image: torch.Tensor, begin: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Windows [n, C, rows, columns] from texels `begin` on added to the sums of a level of that shape."""
    columns, rows = (
        at[:, None] + torch.arange(n, device=at.device)
        for at, n in zip(begin.unbind(1), (values.shape[3], values.shape[2]), strict=True)
    )
    texel = (image[:, None, None] * whole[2] + rows[:, :, None]) * whole[3] + columns[:, None, :]
    return _added_at(sums, whole, texel.flatten(), values.transpose(0, 1).reshape(values.shape[1], -1))


def _added_at(
    sums: torch.Tensor | None, whole: Sequence[int], texel: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    count, channels, height, width = whole
    sums = values.new_zeros(channels, count * height * width) if sums is None else sums
    # In place: else all of the level is copied once more.
    return (sums.index_add if checks.transformed(values) else sums.index_add_)(1, texel, values)


def _as_level(sums: torch.Tensor, whole: Sequence[int]) -> torch.Tensor:
    count, channels, height, width = whole
    return sums.view(channels, count, height, width).transpose(0, 1)


def _in_memory(
    level: torch.Tensor, image: torch.Tensor, begin: torch.Tensor, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of a level of one dimension more, with a window at every number of its memory, and which of them are asked
    for: a CPU takes windows whole, in half the time."""
    steps = level.stride(0), level.stride(2), level.stride(3)
    ends = level.shape[0] - 1, level.shape[2] - shape[1], level.shape[3] - shape[0]
    reach = sum(step * end for step, end in zip(steps, ends, strict=True))
    every = level.as_strided((reach + 1, level.shape[1], shape[1], shape[0]), (1, *level.stride()[1:]))
    x, y = begin.unbind(1)
    return every, image * steps[0] + y * steps[1] + x * steps[2]
