"""Trilinear samples of a pyramid in plain torch without a look at the host: what can be compiled to one kernel, and be
captured in a graph, whatever the positions are. And the sides of CUDA tensors that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from inputs import job
from opponents import captured, compiled

import gpu_lod as lod
from gpu_lod.halving import stored

Side = Callable[[], object]
NAME = "eight texels a sample"
COMPILE_SECONDS = 25.0
KIND = "cuda"


@dataclass(frozen=True)
class Later:
    """A side that is made when its turn comes, by a race that knows of such."""

    make: Callable[[], Side]

    def __call__(self) -> object:
        return self.make()()


class Stack:
    """A mean pyramid in one tensor, [B, C, texels], and where its levels lie. Texels stay as small as they are: what
    reads them makes fp32 of them, in the same kernel where it is compiled."""

    def __init__(self, pyramid: lod.Pyramid) -> None:
        self.dtype, self.size = pyramid.dtype, pyramid.size
        self.texels = torch.cat([level.flatten(2) for level in pyramid], dim=2)
        sides = torch.tensor([level.shape[-2:] for level in pyramid])
        self.heights, self.widths = sides.to(pyramid.device).unbind(1)
        self.first = torch.cat([torch.zeros(1, dtype=torch.long), sides.prod(1).cumsum(0)[:-1]]).to(pyramid.device)

    def at(self, x: torch.Tensor, y: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """[B, C, N] at positions [B, N] in [0, 1] and levels [B, N], clamped to the edge and to the last level."""
        level = level.clamp(0, len(self.first) - 1)
        fine = level.floor()
        low = fine.long()
        high = (low + 1).clamp(max=len(self.first) - 1)
        return torch.lerp(self._on(x, y, low), self._on(x, y, high), (level - fine)[:, None])

    def _on(self, x: torch.Tensor, y: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        height, width, first = self.heights[level], self.widths[level], self.first[level]
        u = torch.minimum((x * width - 0.5).clamp(min=0), width - 1.0)
        v = torch.minimum((y * height - 0.5).clamp(min=0), height - 1.0)
        left, top = u.floor(), v.floor()
        x0, y0 = left.long(), top.long()
        x1, y1 = torch.minimum(x0 + 1, width - 1), torch.minimum(y0 + 1, height - 1)

        def read(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            index = (first + row * width + column)[:, None]
            return self.texels.gather(2, index.expand(-1, self.texels.shape[1], -1)).float()

        across, down = (u - left)[:, None], (v - top)[:, None]
        upper = torch.lerp(read(y0, x0), read(y0, x1), across)
        return torch.lerp(upper, torch.lerp(read(y1, x0), read(y1, x1), across), down)


def foveate(stack: Stack, fixation: torch.Tensor, e0: float = 0.05) -> torch.Tensor:
    """`lod.foveate` at fixations [B, 2] on the stack's device."""
    height, width = stack.size
    device, longer = fixation.device, max(stack.size)
    x = ((torch.arange(width, device=device) + 0.5) / width).repeat(height)[None]
    y = ((torch.arange(height, device=device) + 0.5) / height).repeat_interleave(width)[None]
    away = torch.hypot((x - fixation[:, :1]) * (width / longer), (y - fixation[:, 1:]) * (height / longer))
    made = stack.at(x.expand(len(fixation), -1), y.expand(len(fixation), -1), torch.log2(1 + away / e0))
    return stored(made.unflatten(2, (height, width)), stack.dtype)


def gather_patches(stack: Stack, sites: torch.Tensor, patch: int = 14) -> torch.Tensor:
    """`lod.gather_patches` at sites [B, K, 3] on the stack's device, whose centres are taken as they are."""
    height, width = stack.size
    steps = torch.arange(patch, device=sites.device) - (patch - 1) / 2
    along = steps * torch.exp2(sites[..., 2, None])  # [B, K, P]
    x = (sites[..., 0, None] + along / width)[:, :, None, :].expand(-1, -1, patch, -1)
    y = (sites[..., 1, None] + along / height)[:, :, :, None].expand(-1, -1, -1, patch)
    level = sites[..., 2, None, None].expand_as(x)
    made = stack.at(x.flatten(1), y.flatten(1), level.flatten(1)).unflatten(2, x.shape[1:])
    return stored(made.transpose(1, 2), stack.dtype)


WAYS: dict[str, Callable[[Stack, torch.Tensor], torch.Tensor]] = {"foveate": foveate, "gather_patches": gather_patches}


def sides(
    verb: Callable[..., object], pyramids: list[lod.Pyramid], points: Iterator[torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """Kernels in a graph; and eight texels a sample in a graph, compiled, and both. On CUDA tensors only.

    Args:
        points: fixations or sites. They are copied to where the functions, and graphs of them, read them.
    """
    device = pyramids[0].device
    if device.type != KIND:
        return {}
    here = next(points).to(device)
    stacks: list[Stack] = []
    made: list[Callable[[Stack], object]] = []

    def placed(side: Side) -> Side:
        def call() -> object:
            here.copy_(next(points), non_blocking=True)
            return side()

        return call

    def source(stack: Stack) -> torch.Tensor:
        return WAYS[verb.__name__](stack, here)

    def stacked() -> list[Stack]:
        stacks[:] = stacks or [Stack(pyramid) for pyramid in pyramids]
        return stacks

    def compile_it() -> Side:
        made.append(compiled(source, stacked(), COMPILE_SECONDS))
        return placed(job(made[0], stacked()))

    def graph_of_compiled() -> Side:
        if not made:
            raise RuntimeError("it was not compiled")
        return placed(captured(made[0], stacked()))

    def graph_of_kernels() -> Side:
        return placed(captured(lambda pyramid: verb(pyramid, here, backend="cuda"), pyramids))

    found: dict[str, Callable[[], object]] = {
        "cuda graph of kernels": Later(graph_of_kernels),
        f"torch graph of {NAME}": Later(lambda: placed(captured(source, stacked()))),
    }
    if len(pyramids) == 1:  # else it would be compiled anew for each
        found |= {"torch compiled": Later(compile_it), "torch graph of compiled": Later(graph_of_compiled)}
    return found
