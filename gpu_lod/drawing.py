"""Pictures that explain results: level maps, footprints of sites. Drawn with Pillow, coloured as matplotlib does."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from gpu_lod.saliency import colour, unit

_PAPER, _INK = (255, 255, 255), (31, 41, 55)
_LONGEST = 1600
"""Sides below half of this are enlarged by whole numbers before lines are drawn on them."""


def _rgb(image: torch.Tensor) -> Image.Image:
    """[C, H, W], of any stored dtype, without its alpha."""
    values = (unit(colour(image)).clamp(0, 1) * 255).round().byte().expand(3, -1, -1)
    return Image.fromarray(values.permute(1, 2, 0).contiguous().numpy())


def beside_level_map(image: torch.Tensor, levels: torch.Tensor, fixation: tuple[float, float]) -> torch.Tensor:
    """A picture [C, H, W], pixel for pixel, and on its right the map [H, W] of the levels that it was read at.

    The map has a line at each whole level, a cross on the fixation and a bar that says which colour is which level.
    """
    height, width = levels.shape
    highest = max(1.0, float(levels.max()))
    gap, bar, text = max(4, width // 64), max(12, width // 40), max(11, min(height, width) // 32)
    font = ImageFont.load_default(size=text)
    page = Image.new("RGB", (2 * width + 3 * gap + bar + 2 * text, height), _PAPER)
    page.paste(_rgb(image), (0, 0))
    coloured = _coloured(levels / highest)
    whole = levels.floor()
    lines = torch.zeros_like(levels, dtype=torch.bool)
    lines[:, 1:] |= whole[:, 1:] != whole[:, :-1]
    lines[1:] |= whole[1:] != whole[:-1]
    coloured[lines.numpy()] = _PAPER
    page.paste(Image.fromarray(coloured), (width + gap, 0))
    draw = ImageDraw.Draw(page)
    x, y = width + gap + fixation[0] * width, fixation[1] * height
    arm = max(4, min(height, width) // 50)
    for cross in (((x - arm, y), (x + arm, y)), ((x, y - arm), (x, y + arm))):
        draw.line(cross, fill=_PAPER, width=max(1, arm // 5))
    left = 2 * width + 2 * gap
    ramp = torch.linspace(1, 0, height)[:, None].expand(height, bar)
    page.paste(Image.fromarray(_coloured(ramp)), (left, 0))
    for level in range(math.floor(highest) + 1):
        at = (1 - level / highest) * (height - 1)
        draw.line(((left, at), (left + bar, at)), fill=_PAPER)
        middle = min(max(at, text / 2), height - text / 2 - 1)
        draw.text((left + bar + gap // 2, middle), str(level), fill=_INK, font=font, anchor="lm")
    return _tensor(page)


def footprints(image: torch.Tensor, sites: torch.Tensor, patch: int) -> torch.Tensor:
    """A picture [C, H, W], paled, with a circle at each site [K, 3] as wide as its patch: patch * 2^level pixels.

    Colours tell the level, the finest dark.
    """
    height, width = image.shape[-2:]
    times = max(1, round(_LONGEST / 2 / max(height, width)))
    page = Image.blend(_rgb(image), Image.new("RGB", (width, height), _PAPER), 0.45)
    page = page.resize((width * times, height * times), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(page)
    highest = max(1.0, float(sites[:, 2].max()))
    colours = _coloured(sites[:, 2] / highest * 0.85)
    thick = max(1, round(max(page.size) / 700))
    for (x, y, level), shade in zip(sites.tolist(), colours.tolist(), strict=True):
        radius = patch * 2**level * times / 2
        x, y = x * page.width, y * page.height
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=tuple(shade), width=thick)
        draw.ellipse((x - thick, y - thick, x + thick, y + thick), fill=tuple(shade))
    return _tensor(page)


def _tensor(page: Image.Image) -> torch.Tensor:
    """uint8 [3, H, W], as files are written from."""
    return torch.from_numpy(np.array(page)).permute(2, 0, 1)


def _coloured(values: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Values in [0, 1] as uint8 [..., 3]."""
    shades = matplotlib.colormaps["viridis"](values.float().clamp(0, 1).numpy())
    result: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (shades[..., :3] * 255).round().astype(np.uint8)
    return result
