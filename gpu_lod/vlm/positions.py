"""Where tokens came from, as encoders and language models take it: grid positions, rotary embeddings, M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from gpu_lod import checks, operators
from gpu_lod.allocate.scene import cells_of
from gpu_lod.errors import InputError
from gpu_lod.gather_patches import centres_of

Layout = Literal["half", "interleaved"]


def grid_positions(sites: torch.Tensor, size: tuple[int, int], patch: int) -> torch.Tensor:
    """Sites as positions on the grid of level-0 patches, fractional between its cells.

    Shape: sites [..., K, 3] as (x, y, level) give [..., K, 3] as (level, y, x), fp32 (float64 sites: float64).
    Units: cells of P x P pixels, whatever the level.
    Convention: the position of cell (j, i)'s own patch is (0, j, i) exactly, so a centre p pixels from the edge is at
        p / P - 1/2. A patch that was shifted inward at a far edge is where it is: at n / P - 1 for n pixels, between
        the last two cells. A level-1 patch over cells 0 and 1 is at 1/2. Centres within fp32's rounding of a
        whole or half pixel are there, as in `gather_patches`; gradients pass as if none were moved.

    Args:
        size: (height, width) of the picture in pixels.
        patch: P.

    Raises:
        InputError: bad shapes.
    """
    height, width = checks.size(size)
    patch = checks.integer(patch, "patch", at_least=1)
    if not isinstance(sites, torch.Tensor) or sites.shape[-1:] != (3,) or not sites.is_floating_point():
        what = tuple(sites.shape) if isinstance(sites, torch.Tensor) else type(sites).__name__
        raise InputError(f"sites are {what}; expected a floating-point tensor [..., K, 3]: (x, y, level).")
    work = sites if sites.dtype == torch.float64 else sites.float()
    x, y = (centres_of(work, (height, width), work.dtype) / patch - 0.5).unbind(-1)
    return torch.stack([work[..., 2], y, x], dim=-1)


def axial_frequencies(dim: int, axes: int = 2, theta: float = 10000.0) -> torch.Tensor:
    """Frequencies [dim / (2 axes)] of an axis: theta^(-i / n), i of n. Each axis turns dim / axes of a head's channels.

    They are on the CPU; `rotary_embedding` takes them to where its positions are.

    With two axes they are those of Qwen2.5-VL's and Qwen3-VL's vision towers and of timm's axial RoPE.

    Raises:
        InputError: a dim that the axes cannot share.

    Source: Su et al., "RoFormer" (2021); Heo et al., "Rotary Position Embedding for Vision Transformer" (2024).
    """
    axes = checks.integer(axes, "axes", at_least=1)
    dim = checks.integer(dim, "dim", at_least=1)
    theta = checks.number(theta, "theta")
    if dim % (2 * axes) or theta <= 0:
        raise InputError(f"dim is {dim}, theta {theta}; expected a multiple of {2 * axes} and a positive number.")
    count = dim // (2 * axes)
    return theta ** (-torch.arange(count, dtype=torch.float32, device="cpu") / count)


def rotary_embedding(
    positions: torch.Tensor, frequencies: torch.Tensor | Sequence[torch.Tensor], layout: Layout = "half"
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of an axial rotary embedding, at any positions: fractional ones lie between the trained.

    Shape: positions [..., A] and frequencies [F], the same for each axis, or A tensors, [F_a] each, give two tensors
        [..., 2 sum F_a], fp32.
    Convention: the angles of the first axis come first. "half": the angles twice over, for rotations of the first half
        of the channels with the second (Qwen2.5-VL, Qwen3-VL). "interleaved": each angle twice in a row, for rotations
        of neighbouring channels (timm). Positions (y, x) are `grid_positions(...)[..., 1:]`; with the level before
        them they have three axes, which no published encoder was trained with.

    Raises:
        InputError: another number of axes, frequencies of another shape, or an unknown layout.
    """
    checks.choice(layout, "layout", ("half", "interleaved"))
    positions = checks.real(positions, "positions")
    axes = positions.shape[-1] if positions.ndim else 0
    if not axes:
        raise InputError(f"positions are {tuple(positions.shape)}, 0 axes; expected [..., A], one or more.")
    each = list(frequencies) if isinstance(frequencies, Sequence) else [frequencies] * max(axes, 1)
    each = [checks.real(one, "frequencies") for one in each]
    if len(each) != axes:
        raise InputError(f"positions are {tuple(positions.shape)}, {axes} axes; expected {len(each)}, one a frequency.")
    if any(one.ndim != 1 for one in each):
        raise InputError(
            f"frequencies are {', '.join(str(tuple(one.shape)) for one in each)}; expected [F], or {axes} tensors "
            "[F_a], one an axis. Flatten them."
        )
    angles = torch.cat(
        [positions[..., axis, None].float() * each[axis].to(positions.device, torch.float32) for axis in range(axes)],
        dim=-1,
    )
    angles = torch.cat([angles, angles], dim=-1) if layout == "half" else angles.repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def _begun(
    sites: torch.Tensor, size: tuple[int, int], patch: int, start: int | torch.Tensor, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and where they begin, checked but for values."""
    positions = grid_positions(sites, size, patch)
    checks.flag(rounded, "rounded")
    whole = hasattr(start, "__dlpack__")
    begin = checks.real(start, "start").to(positions) if whole else positions.new_tensor(checks.number(start, "start"))
    if not (begin.shape == () or begin.shape == (1,) or begin.shape == positions.shape[:-2]):
        raise InputError(
            f"start is {tuple(begin.shape)}; expected a number, or {tuple(positions.shape[:-2])}, one a picture."
        )
    return positions, begin


def _ids(
    sites: torch.Tensor, size: tuple[int, int], patch: int, start: int | torch.Tensor, rounded: bool
) -> torch.Tensor:
    positions, _ = _begun(sites, size, patch, start, rounded)
    return positions.new_empty(3, *positions.shape[:-1], dtype=torch.int64 if rounded else None)


@operators.function(_ids)
def mrope_positions(
    sites: torch.Tensor, size: tuple[int, int], patch: int, start: int | torch.Tensor = 0, rounded: bool = True
) -> torch.Tensor:
    """Position ids (t, h, w) of a still picture's tokens in a language model with M-RoPE (Qwen2-VL and later).

    Shape: sites [B, K, 3] give [3, B, K]; [K, 3] give [3, K].
    Units: merge units, so `patch` is the side of one: 2 P for P x P patches that are merged 2 x 2.
    Convention: t is start; h and w are start plus the position on the grid, so that the full grid has the model's own
        ids. Rounded ones are whole, halves up, as a level-1 unit over 0 and 1 goes to 1: int64. Unrounded ones are
        fp32, which the models' rotary embeddings take. Text goes on at start + `mrope_extent`.

    Args:
        start: of the picture; one for all, or [B].

    Raises:
        InputError: bad shapes, or a start that is no finite number.

    Source: Wang et al., "Qwen2-VL" (2024).
    """
    positions, begin = _begun(sites, size, patch, start, rounded)
    _, y, x = positions.unbind(-1)
    if not torch.isfinite(checks.values(begin)).all():
        raise InputError("start holds NaN or infinities; expected finite numbers.")
    begin = begin[..., None]
    ids = torch.stack([torch.zeros_like(y), y, x])
    if rounded:
        return (torch.floor(ids + 0.5) + begin).long()
    return ids + begin


def mrope_extent(size: tuple[int, int], patch: int) -> int:
    """How many position ids a picture takes: merge units along its longer side, as in the model.

    Raises:
        InputError: a bad size or patch.
    """
    return max(cells_of(checks.size(size), checks.integer(patch, "patch", at_least=1)))
