"""Sheets that explain what verbs give: oriented energy by level, patches in their order, what culling prunes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw

import gpu_lod as lod
from gpu_lod.commands.drawing import as_rgb, as_tensor, level_colours
from gpu_lod.commands.lettering import NAME, NOTE, TITLE, fitted, font
from gpu_lod.cull import Culled
from gpu_lod.demo.panels import FAINT, INK, PAPER, TIMES, level_colour, span
from gpu_lod.patch_grid import starts_of
from gpu_lod.pyramid import Pyramid

ORIENTATIONS = ("#ff6a55", "#f4c430", "#27cdb4", "#ab95ff")
"""By angle: 0, 45, 90 and 135 degrees."""
BOX = "#ffffff"

_MARGIN, _GAP, _HEADER, _CAPTION, _NARROWEST = 48, 28, 132, 42, 380
_ENERGY_SIDE, _CULL_SIDE = 360, 900
"""Side in pixels of a square of a panel's area."""
_WIDE = 1700
"""Width in pixels that rows of patches come near."""
_LARGEST, _SMALLEST = 112, 24
"""Pixels a patch, with its frame, where there are few or many of them."""
_LINE = 38
_BRIGHTEST = 99.5
"""Per cent of the energies of a level that are not white."""


def _sheet(inner: tuple[int, int], name: str, about: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A page with a head and room below it for `inner`."""
    page = Image.new("RGB", (2 * _MARGIN + inner[0], 2 * _MARGIN + _HEADER + inner[1]), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN, _MARGIN - 8), fitted(name, font(TITLE, True), inner[0]), INK, font(TITLE, True))
    draw.text((_MARGIN, _MARGIN + 56), fitted(about, font(NOTE), inner[0]), FAINT, font(NOTE))
    return page, draw


def _panel(size: Sequence[int], side: int, longest: float = 2.5) -> tuple[int, int]:
    """How large a picture (height, width) is drawn: (width, height), of much the same area whatever its shape.

    Args:
        longest: times `side`.
    """
    height, width = size
    times = min(side / math.sqrt(width * height), longest * side / max(width, height))
    return max(1, round(width * times)), max(1, round(height * times))


# -- oriented energy ---------------------------------------------------------------------------------------------------


def noise_of(image: torch.Tensor) -> float:
    """Energy of a picture above which it is no rounding error: of a flat one, torch and shaders leave a little."""
    return max((1e-5 * float(image.float().abs().nan_to_num().max())) ** 2, 1e-30)


def shares(energies: Sequence[torch.Tensor], least: float) -> list[list[float]]:
    """How much of the energy of each level is that of each orientation; 0 where there is less than `least` a sample."""
    result = []
    for level in energies:
        sums = level.float().nan_to_num().double().sum(dim=(0, 2, 3))  # no sum of numbers of fp32 is infinite there
        there = float(sums.sum()) > least * level[:, 0].numel()
        result.append((sums / sums.sum() if there else torch.zeros_like(sums)).tolist())
    return result


def energy(energies: Sequence[torch.Tensor], name: str, least: float) -> torch.Tensor:
    """Oriented energies [C, 4, h, w], a row of panels a level, uint8 [3, height, width].

    Convention: the first panel of a row has the colour of the orientation that is strongest there, as bright as its
        energy; the others an orientation each. Brightness is the root of the energy, added over the channels, on one
        scale for all panels of a row.

    Args:
        least: what is drawn black, as `noise_of` the picture gives it.
    """
    height, width = energies[0].shape[-2:]
    panel = _panel((height, width), _ENERGY_SIDE, 1.6)
    cell, columns = max(panel[0], _NARROWEST), 1 + len(ORIENTATIONS)
    high = panel[1] + _CAPTION
    legend = 52
    inner = columns * (cell + _GAP) - _GAP, legend + len(energies) * (high + _GAP) - _GAP - 30
    about = f"oriented energy of {width}{TIMES}{height} px; brightness is its root, on one scale in a row"
    page, draw = _sheet(inner, name, about)
    top = _MARGIN + _HEADER - 24
    lefts = [_MARGIN + column * (cell + _GAP) for column in range(columns)]
    draw.text((lefts[0], top), "strongest orientation", INK, font(NAME, True))
    for k, (left, shade) in enumerate(zip(lefts[1:], ORIENTATIONS, strict=True)):
        _glyph(draw, (left + 16, top + 17), k, shade)
        draw.text((left + 46, top), f"{180 * k // len(ORIENTATIONS)}\N{DEGREE SIGN}", INK, font(NAME, True))
    top += legend
    for level, (values, parts) in enumerate(zip(energies, shares(energies, least), strict=True)):
        total = values.detach().float().cpu().nan_to_num().double().sum(0)
        white = max(float(np.percentile(total.amax(0).numpy(), _BRIGHTEST)), float(total.max()) * 1e-3, least)
        bright = ((total / white).clamp(0, 1).sqrt() if float(total.max()) > least else torch.zeros_like(total)).float()
        captions = [f"level {level}   {total.shape[-1]}{TIMES}{total.shape[-2]}"]
        captions += [f"{100 * part:.0f}% of the energy" for part in parts]
        strongest = torch.eye(len(ORIENTATIONS))[total.argmax(0)].permute(2, 0, 1) * bright.amax(0)
        alone = [
            torch.zeros_like(bright).index_copy(0, torch.tensor([k]), bright[k : k + 1]) for k in range(len(bright))
        ]
        for left, caption, shown in zip(lefts, captions, [strongest, *alone], strict=True):
            draw.text((left, top), caption, FAINT, font(NOTE))
            page.paste(_tinted(shown).resize(panel, _filter(shown, panel)), (left, top + _CAPTION - 6))
        top += high + _GAP
    return as_tensor(page)


def _glyph(draw: ImageDraw.ImageDraw, at: tuple[float, float], k: int, shade: str) -> None:
    """A stroke as the lines run that an orientation answers to: across the derivative's direction."""
    angle = math.pi * k / len(ORIENTATIONS) + math.pi / 2
    x, y = 12 * math.cos(angle), 12 * math.sin(angle)
    draw.rounded_rectangle((at[0] - 16, at[1] - 16, at[0] + 16, at[1] + 16), 5, fill="#15171a")
    draw.line((at[0] - x, at[1] - y, at[0] + x, at[1] + y), shade, 6)


def _tinted(weights: torch.Tensor) -> Image.Image:
    """[4, h, w] in [0, 1] as the sum of the orientations' colours, on black."""
    shades = torch.tensor([tuple(bytes.fromhex(shade[1:])) for shade in ORIENTATIONS]).float()
    values = torch.einsum("khw,kc->hwc", weights, shades)
    return Image.fromarray(values.clamp(0, 255).round().byte().numpy())


def _filter(values: torch.Tensor, panel: tuple[int, int]) -> Image.Resampling:
    """Texels stay squares where they are enlarged much."""
    return Image.Resampling.NEAREST if panel[0] >= 4 * values.shape[-1] else Image.Resampling.LANCZOS


# -- patches -----------------------------------------------------------------------------------------------------------


def patches(values: torch.Tensor, sites: torch.Tensor, name: str, about: str) -> torch.Tensor:
    """Patches [K, C, P, P] in their order, row by row, each in a frame of its level's colour, uint8 [3, h, w].

    Shape: sites [K, 3], of which the levels count.
    Convention: the colours are those of `drawing.footprints`; the bar above says which level they are. A number at the
        left is that of the first patch of its row, counted from 1.
    """
    count, _, patch, _ = values.shape
    wide = min(_LARGEST, max(_SMALLEST, _WIDE / math.sqrt(1.6 * count)))
    times = max(1, round(wide / patch)) if patch < wide else 0  # 0: made smaller
    drawn = patch * times if times else round(wide)
    frame = max(2, round(drawn / 16))
    tile, gap = drawn + 2 * frame, max(2, frame)
    columns = min(count, max(1, round(math.sqrt(1.6 * count)), -(-560 // (tile + gap))))
    rows = -(-count // columns)
    numbers = round(font(NOTE).getlength(str(count))) + 14
    inner = max(numbers + columns * (tile + gap) - gap, 720), 30 + rows * (tile + gap) - gap
    page, draw = _sheet(inner, name, about)
    highest = max(1.0, float(sites[:, 2].max()))
    _level_bar(draw, (_MARGIN, _MARGIN + _HEADER - 34), min(inner[0] - 90, 420), highest)
    top = _MARGIN + _HEADER + 30
    shades = level_colours(sites[:, 2].cpu(), highest).tolist()
    for number, (one, shade) in enumerate(zip(values.cpu(), shades, strict=True)):
        row, column = divmod(number, columns)
        x, y = _MARGIN + numbers + column * (tile + gap), top + row * (tile + gap)
        if not column and (tile >= NOTE or row % 2 == 0):
            draw.text((x - 12, y + tile / 2), str(number + 1), FAINT, font(NOTE), anchor="rm")
        draw.rectangle((x, y, x + tile - 1, y + tile - 1), fill=tuple(shade))
        way = Image.Resampling.NEAREST if times else Image.Resampling.LANCZOS
        page.paste(as_rgb(one).resize((drawn, drawn), way), (x + frame, y + frame))
    return as_tensor(page)


def _level_bar(draw: ImageDraw.ImageDraw, at: tuple[int, int], wide: int, highest: float) -> None:
    """Which colour is which level."""
    left, top = at
    high = 18
    draw.text((left, top + high / 2), "level", FAINT, font(NOTE), anchor="lm")
    left += round(font(NOTE).getlength("level")) + 14
    for x, shade in enumerate(level_colours(torch.linspace(0, highest, wide), highest).tolist()):
        draw.line(((left + x, top), (left + x, top + high)), tuple(shade))
    for level in range(math.floor(highest) + 1):
        at_x = left + level / highest * (wide - 1)
        draw.line(((at_x, top + high), (at_x, top + high + 5)), FAINT, 2)
        draw.text((at_x, top + high + 8), str(level), FAINT, font(NOTE), anchor="mt")


# -- culling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """What is known of the relevance in a box: from its pyramids' few texels, and from all texels that it touches."""

    box: tuple[float, float, float, float]
    lower: float
    least: float
    largest: float
    upper: float


def bounds_of(
    relevance: torch.Tensor, hz: Pyramid, box: tuple[float, float, float, float], size: Sequence[int], patch: int,
    how: dict[str, Any],
) -> Bounds:  # fmt: skip
    """Of the relevance [1, Hg, Wg] with its max pyramid, in a box of the picture of that size (height, width).

    Args:
        how: what the verbs are given beside their input.
    """
    rows, columns = (_touched(box[i], box[i + 2], size[1 - i], patch) for i in (1, 0))
    inside = relevance[0, rows.start : rows.stop, columns.start : columns.stop]
    height, width = relevance.shape[-2:]
    # The same patches as fractions of the map, from within the first one to within the last one of a side.
    corners = [
        [(columns[0] + 0.5) / width, (rows[0] + 0.5) / height, (columns[-1] + 0.75) / width, (rows[-1] + 0.75) / height]
    ]
    upper = lod.region_max(hz, torch.tensor(corners), **how)
    lower = lod.region_min(lod.hiz(relevance, "min", **how), torch.tensor(corners), **how)
    return Bounds(box, float(lower), float(inside.min()), float(inside.max()), float(upper))


def _touched(low: float, high: float, n: int, patch: int) -> range:
    """The patches along a side of n pixels that hold some of low n .. high n."""
    found = [i for i, at in enumerate(starts_of(n, patch)) if at < high * n and min(at + patch, n) > low * n]
    return range(found[0], found[-1] + 1)


def culling(
    image: torch.Tensor, relevance: torch.Tensor, culled: Culled, bounds: Sequence[Bounds], patch: int, name: str,
    about: str,
) -> torch.Tensor:  # fmt: skip
    """The relevance [1, Hg, Wg] of a picture [C, H, W], and what culling keeps and prunes of it, uint8 [3, h, w].

    Convention: kept patches are bright. A frame is a maximal pruned node, of its level's colour, about all patches
        whose canonical ancestor it is. Boxes are numbered from 1.
    """
    height, width = image.shape[-2:]
    panel = _panel((height, width), _CULL_SIDE)
    below = panel[0] > 1.4 * panel[1]  # wide pictures stand over each other
    under = _LINE * len(bounds)
    step = (0, panel[1] + _CAPTION + under + _GAP) if below else (max(panel[0], 620) + _GAP, 0)
    inner = max(panel[0], 620) + step[0], panel[1] + _CAPTION + step[1] + (_LINE if below else max(_LINE, under))
    page, draw = _sheet(inner, name, about)
    top = _MARGIN + _HEADER - 24
    rows, columns = starts_of(height, patch), starts_of(width, patch)
    shade = matplotlib.colormaps["magma"]
    largest = float(relevance.max()) or 1.0
    heat = torch.from_numpy(shade((relevance[0].float().cpu() / largest).clamp(0, 1).pow(0.7).numpy(), bytes=True))
    pixels_y, pixels_x = (_owners(starts, n) for starts, n in ((rows, height), (columns, width)))
    mask = culled.mask[0].cpu()[pixels_y][:, pixels_x]
    picture = np.asarray(as_rgb(image))
    shown = np.where(mask.numpy()[..., None], picture, (picture * 0.26).round().astype(np.uint8))
    panels = (
        (f"relevance of patches of {patch} px", heat[..., :3][pixels_y][:, pixels_x].numpy()),
        ("kept patches, bright, and pruned nodes", shown),
    )
    for number, (caption, values) in enumerate(panels):
        left, y = _MARGIN + number * step[0], top + number * step[1]
        draw.text((left, y), caption, INK, font(NAME, True))
        y += _CAPTION
        page.paste(Image.fromarray(np.ascontiguousarray(values)).resize(panel, _enlarging(width, panel)), (left, y))
        if number:
            _nodes(draw, culled, (rows, columns), (height, width), panel, (left, y))
        for index, bound in enumerate(bounds):
            _box(draw, bound.box, str(index + 1), panel, (left, y))
    for number, one in enumerate(bounds, 1):
        text = f"{number}: bounds {one.lower:.3g} to {one.upper:.3g}, values {one.least:.3g} to {one.largest:.3g}"
        draw.text((_MARGIN, top + _CAPTION + panel[1] + 20 + _LINE * (number - 1)), text, FAINT, font(NOTE))
    levels = sorted({int(level) for level in culled.pruned[:, -3].tolist()})
    _legend(draw, levels, (_MARGIN + step[0], top + step[1] + _CAPTION + panel[1] + 18))
    return as_tensor(page)


def _enlarging(width: int, panel: tuple[int, int]) -> Image.Resampling:
    return Image.Resampling.NEAREST if panel[0] >= 2 * width else Image.Resampling.LANCZOS


def _owners(starts: Sequence[int], n: int) -> torch.Tensor:
    """For each pixel of a side, the patch that it is drawn as: the last one that holds it, as of nodes in `span`."""
    return torch.searchsorted(torch.tensor(starts), torch.arange(n), right=True) - 1


def _nodes(
    draw: ImageDraw.ImageDraw, culled: Culled, starts: tuple[Sequence[int], Sequence[int]], size: tuple[int, int],
    panel: tuple[int, int], corner: tuple[int, int],
) -> None:  # fmt: skip
    rows, columns = starts
    height, width = size
    thick = min(max(1, round(panel[0] / len(columns) / 60)), 4)
    for *_, level, y, x in culled.pruned.tolist():
        left, right = (corner[0] + at * panel[0] / width for at in span(x, level, columns, width))
        top, bottom = (corner[1] + at * panel[1] / height for at in span(y, level, rows, height))
        inset = 2 if level else 1
        if min(right - left, bottom - top) > 2 * inset + 1:  # else there is nothing to be seen of it
            box = (left + inset, top + inset, right - inset - 1, bottom - inset - 1)
            draw.rectangle(box, outline=level_colour(level), width=thick + min(level, 3))


def _box(
    draw: ImageDraw.ImageDraw, box: Sequence[float], label: str, panel: tuple[int, int], corner: tuple[int, int]
) -> None:
    x0, x1 = (corner[0] + at * (panel[0] - 1) for at in box[::2])
    y0, y1 = (corner[1] + at * (panel[1] - 1) for at in box[1::2])
    for more, shade, thick in ((1, "#000000", 6), (0, BOX, 4)):
        draw.rectangle((x0 - more, y0 - more, x1 + more, y1 + more), outline=shade, width=thick)
    draw.text((x0 + 12, y0 + 8), label, BOX, font(NAME, True), stroke_width=3, stroke_fill="black")


def _legend(draw: ImageDraw.ImageDraw, levels: Sequence[int], at: tuple[int, int]) -> None:
    """The colours of the nodes' levels."""
    if not levels:
        return draw.text(at, "nothing is pruned", FAINT, font(NOTE))
    words = "pruned at level"
    draw.text((at[0], at[1] + 16), words, FAINT, font(NOTE), anchor="lm")
    left = at[0] + round(font(NOTE).getlength(words)) + 16
    for level in levels:
        draw.rounded_rectangle((left, at[1], left + 36, at[1] + 32), 6, fill=level_colour(level))
        draw.text((left + 18, at[1] + 16), str(level), "white", font(NOTE, True), anchor="mm")
        left += 46
    return None
