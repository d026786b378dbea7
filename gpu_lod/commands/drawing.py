"""Pictures that explain results: level maps, footprints of sites, feature maps side by side."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from gpu_lod.feature_channels import CHANNELS, SEMANTIC
from gpu_lod.saliency import colour, unit

_PAPER, _INK = (255, 255, 255), (31, 41, 55)
_TALLEST = 8
"""Heights of a map to its width, in the grid; taller ones, which would fill memory, are drawn as high as that."""
_LONGEST = 1600
"""Sides below half of this are enlarged by whole numbers before lines are drawn on them."""


_SIGNED = (6, 7, 10, 38, 39)
_ENERGIES = (*range(13, 17), *range(33, 38))
_LABELS = {
    "rgb": ("red", "green", "blue"),
    "position": ("x", "y"),
    "gradient": ("gradient along x", "gradient along y", "gradient"),
    "high_pass": ("high pass",),
    "orientation": ("0 degrees", "45 degrees", "90 degrees", "135 degrees"),
    "semantic": tuple(f"semantic {k}" for k in range(SEMANTIC)),
    "band_energy": tuple(f"band energy {k}" for k in (1, 2, 3, 4)),
    "opponency": ("red - green", "blue - yellow"),
}


def labels() -> list[str]:
    """What each of the forty channels is called."""
    return [label for name in CHANNELS for label in _LABELS.get(name, (name,))]


def feature_grid(maps: torch.Tensor, columns: int = 6) -> torch.Tensor:
    """Feature maps [40, H, W] side by side, each with its number, name and range. Semantic ones only if there are any.

    Signed channels lie about grey; the others go from black to white between the ends of their ranges, energies and the
    variance by their roots, for a few edges hold most of them.
    """
    height, width = maps.shape[-2:]
    semantic = range(CHANNELS["semantic"].start, CHANNELS["semantic"].stop)
    shown = [k for k in range(len(maps)) if k not in semantic or bool(maps[k].any())]
    wide = min(260, max(120, width)) / 100  # inches a map, at 100 dots each
    high, title, rows = wide * min(height / width, _TALLEST), 0.34, -(-len(shown) // columns)
    figure = Figure(figsize=(columns * (wide + 0.12) + 0.12, rows * (high + title) + 0.12), dpi=100, facecolor="white")
    canvas = FigureCanvasAgg(figure)  # not pyplot: no display, no global state
    across, down = figure.get_size_inches()
    names = labels()
    for place, k in enumerate(shown):
        row, column = divmod(place, columns)
        left, top = 0.12 + column * (wide + 0.12), row * (high + title)
        values = maps[k].double().cpu()  # in which no range is too wide for a number
        finite = values[values.isfinite()]
        low, most = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
        text = f"{k}  {names[k]}   {low:.2g} to {most:.2g}"
        size = min(8.0, 100 * wide / len(text))
        figure.text(left / across, 1 - (top + title - 0.07) / down, text, fontsize=size, color="#1f2937")
        if k in _ENERGIES:
            values, low, most = values.sqrt(), low**0.5, most**0.5
        if k in _SIGNED:
            most = max(-low, most, 1e-12)
            low = -most
        axes = figure.add_axes((left / across, 1 - (top + title + high) / down, wide / across, high / down))
        most = max(most, low + 1e-12)
        values = ((values - low) / (most - low)).clamp(0, 1)  # infinities, too
        axes.imshow(values.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="antialiased", aspect="auto")
        axes.set_axis_off()
    canvas.draw()
    drawn = np.asarray(canvas.buffer_rgba())[..., :3]
    return torch.from_numpy(drawn.copy()).permute(2, 0, 1)


def as_rgb(image: torch.Tensor) -> Image.Image:
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
    page.paste(as_rgb(image), (0, 0))
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
    return as_tensor(page)


def footprints(image: torch.Tensor, sites: torch.Tensor, patch: int) -> torch.Tensor:
    """A picture [C, H, W], paled, with a circle at each site [K, 3] as wide as its patch: patch * 2^level pixels.

    Colours tell the level, the finest dark.
    """
    height, width = image.shape[-2:]
    times = max(1, round(_LONGEST / 2 / max(height, width)))
    page = Image.blend(as_rgb(image), Image.new("RGB", (width, height), _PAPER), 0.45)
    page = page.resize((width * times, height * times), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(page)
    highest = max(1.0, float(sites[:, 2].max()))
    colours = level_colours(sites[:, 2], highest)
    thick = max(1, round(max(page.size) / 700))
    for (x, y, level), shade in zip(sites.tolist(), colours.tolist(), strict=True):
        radius = patch * 2**level * times / 2
        x, y = x * page.width, y * page.height
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=tuple(shade), width=thick)
        draw.ellipse((x - thick, y - thick, x + thick, y + thick), fill=tuple(shade))
    return as_tensor(page)


def level_colours(levels: torch.Tensor, highest: float) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Of sites [K], uint8 [K, 3]: the finest dark, the highest pale, but not too pale for paper."""
    return _coloured(levels / highest * 0.85)


def as_tensor(page: Image.Image) -> torch.Tensor:
    """uint8 [3, H, W], as files are written from."""
    return torch.from_numpy(np.array(page)).permute(2, 0, 1)


def _coloured(values: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Values in [0, 1] as uint8 [..., 3]."""
    shades = matplotlib.colormaps["viridis"](values.float().clamp(0, 1).numpy())
    result: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (shades[..., :3] * 255).round().astype(np.uint8)
    return result
