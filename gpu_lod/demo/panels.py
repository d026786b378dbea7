"""The panels of the demo's contact sheet: what each shows, and how it is drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle

from gpu_lod.cull import Culled
from gpu_lod.images import atlas, atlas_offsets
from gpu_lod.patch_grid import starts_of
from gpu_lod.pyramid import Pyramid
from gpu_lod.rebuild import Rebuilt
from gpu_lod.saliency import PATCH, colour, unit
from gpu_lod.token_set import TokenSet

PAPER, INK, FAINT = "#fbfaf7", "#1d1f23", "#7a7c82"
LEVEL_COLOURS = ("#0b7a75", "#2f9e44", "#e0a100", "#e8590c", "#c2255c", "#7048e8", "#1864ab", "#495057")
"""By level, finest first; the last serves all that follow."""

_LETTER = 0.076
"""Mean width of the notes' letters in inches."""
TIMES = " \N{MULTIPLICATION SIGN} "


@dataclass(frozen=True)
class LogPolar:
    """A log-polar map and how it was made."""

    values: torch.Tensor
    fixation: tuple[float, float]
    r_min: float
    r_max: float
    levels: Sequence[float]
    """Mip level of each ring."""


@dataclass(frozen=True)
class Foveated:
    """A picture as it is seen at a fixation."""

    image: torch.Tensor
    fixation: tuple[float, float]
    levels: torch.Tensor
    """[H, W], the mip level that each pixel is read at."""


@dataclass(frozen=True)
class Tokens:
    """A few tokens for a picture, and what can be made of them alone."""

    chosen: TokenSet
    rebuilt: Rebuilt
    psnr: float
    """dB; not finite where they are all there is of the picture, or it holds NaN."""


@dataclass(frozen=True)
class Sheet:
    """All that one page shows. Tensors [C, H, W]."""

    name: str
    image: torch.Tensor
    mips: Pyramid
    log_polar: LogPolar
    saliency: str
    """How the relevance was found, in words."""
    hz: Pyramid
    """Over patches of PATCH pixels."""
    threshold: float
    culled: Culled
    foveated: Foveated
    tokens: Tokens
    renderer: str


@dataclass(frozen=True)
class Panel:
    title: str
    note: str
    aspect: float
    draw: Callable[[Axes, float], None]
    """Takes the axes and the panel's width in inches."""

    @property
    def slot(self) -> float:
        """Aspect of the place it is given: room for its title however thin the picture, and no row thin as a line."""
        return min(max(self.aspect, 0.6), 6.0)

    def lines(self, tall: float) -> list[str]:
        """The note, wrapped to the width that the panel has at this height."""
        return textwrap.wrap(self.note, max(int(tall * self.slot / _LETTER), 16))


def panels(sheet: Sheet) -> list[Panel]:
    height, width = sheet.image.shape[-2:]
    aspect = width / height
    polar = sheet.log_polar
    rings, wedges = polar.values.shape[-2:]
    kept, total = int(sheet.culled.mask.sum()), sheet.culled.mask.numel()
    mip_size, hz_size = (atlas(p.levels).shape for p in (sheet.mips, sheet.hz))
    return [
        Panel(
            "Mip chain",
            f"{len(sheet.mips)} levels, each the area average of the one above",
            mip_size[-1] / mip_size[-2],
            lambda axes, wide: _draw_mips(axes, sheet.mips, wide),
        ),
        Panel(
            "Hi-Z of saliency",
            f"{sheet.saliency}, mean over patches of {PATCH} px; each texel is the maximum of those under it",
            hz_size[-1] / hz_size[-2],
            lambda axes, wide: _draw_hiz(axes, sheet.hz, wide),
        ),
        Panel(
            "Cull",
            f"{kept} of {total} patches kept (bright) after {sheet.culled.tested} comparisons; "
            f"{len(sheet.culled.pruned)} nodes pruned",
            aspect,
            lambda axes, wide: _draw_cull(axes, sheet.image, sheet.culled, wide),
        ),
        Panel(
            "Rings and wedges",
            f"{rings} rings{TIMES}{wedges} wedges round a fixation, every 8th and 16th drawn, coloured by mip level",
            aspect,
            lambda axes, wide: _draw_rings(axes, sheet.image, polar),
        ),
        Panel(
            "Log-polar map",
            "a ring a row, the innermost on top; a wedge a column, from the right clockwise; mip level at the left",
            wedges / rings,
            lambda axes, wide: _draw_map(axes, polar, wide),
        ),
        Panel(
            "Foveated",
            "each pixel at the mip level of its distance from the fixation; the lines are where the next level begins",
            aspect,
            lambda axes, wide: _draw_foveated(axes, sheet.foveated),
        ),
        Panel(
            f"{sheet.tokens.chosen.budget} token{'s' * (sheet.tokens.chosen.budget > 1)}",
            f"patches of {PATCH}{TIMES}{PATCH} samples, by saliency and fixation; the coarser, the larger",
            aspect,
            lambda axes, wide: _draw_tokens(axes, sheet.image, sheet.tokens.chosen, wide),
        ),
        Panel(
            "Rebuilt",
            _worth(sheet.tokens, height * width),
            aspect,
            lambda axes, wide: _imshow(axes, _shown(sheet.tokens.rebuilt.image)),
        ),
    ]


def _worth(tokens: Tokens, pixels: int) -> str:
    samples = tokens.chosen.budget * tokens.chosen.patch**2
    found = f"from the tokens alone, {samples:,} samples for {pixels:,} pixels"
    return found + (f"; {tokens.psnr:.1f} dB" if math.isfinite(tokens.psnr) else "")


def _draw_mips(axes: Axes, mips: Pyramid, wide: float) -> None:
    _show_levels(axes, [_shown(level) for level in mips.levels], wide, "lanczos")


def _draw_hiz(axes: Axes, hz: Pyramid, wide: float) -> None:
    largest = float(hz.levels[-1].max()) or 1.0
    colours = matplotlib.colormaps["magma"]
    levels = [
        torch.from_numpy(colours((level[0].float() / largest).clamp(0, 1).pow(0.7).numpy())).permute(2, 0, 1)
        for level in hz.levels
    ]
    _show_levels(axes, levels, wide, "nearest")


def _show_levels(axes: Axes, levels: Sequence[torch.Tensor], wide: float, interpolation: str) -> None:
    """The atlas, a hair of paper between levels; the size of each inside it where there is room, else beside it."""
    full_height, full_width = atlas(levels).shape[-2:]
    texels = full_width / wide  # an inch
    for level, corner in zip(levels, atlas_offsets(levels), strict=True):
        _imshow(axes, level, interpolation, corner)
    axes.set_xlim(-0.5, full_width - 0.5)
    axes.set_ylim(full_height - 0.5, -0.5)
    bottom = -math.inf
    for number, (level, (x, y)) in enumerate(zip(levels, atlas_offsets(levels), strict=True)):
        height, width = level.shape[-2:]
        if x and height > 0.05 * texels:
            left, top, corners = x - 0.5, y - 0.5, 3 if y else 2
            edge = [(left, top + height), (left, top), (left + width, top)][:corners]
            axes.plot(*zip(*edge, strict=True), color=PAPER, linewidth=2.5)
        text = f"{number}   {width}{TIMES}{height}"
        if width > 1.2 * texels and height > 0.4 * texels:
            axes.annotate(
                text, (x - 0.5, y + height - 0.5), (9, 10), textcoords="offset points", color="white", fontsize=8.5,
                va="bottom", annotation_clip=False,
                bbox={"boxstyle": "round,pad=0.4", "fc": (0.1, 0.1, 0.12, 0.75), "ec": "none"},
            )  # fmt: skip
        elif number and y + height / 2 - bottom > 0.17 * texels:
            bottom = y + height / 2
            axes.annotate(
                text, (x + width - 0.5, bottom - 0.5), (6, 0), textcoords="offset points", color=FAINT, fontsize=8.5,
                va="center", annotation_clip=False,
            )  # fmt: skip


def _draw_rings(axes: Axes, image: torch.Tensor, polar: LogPolar) -> None:
    height, width = image.shape[-2:]
    longer = max(height, width)
    rings, wedges = polar.values.shape[-2:]
    _imshow(axes, _shown(image, dim=0.78))
    centre = polar.fixation[0] * width - 0.5, polar.fixation[1] * height - 0.5
    ratio = polar.r_max / polar.r_min
    for wedge in range(0, wedges, 16):
        angle = 2 * math.pi * wedge / wedges
        ends = [longer * polar.r_min * ratio ** (16 / rings), longer * polar.r_max]
        axes.plot(
            [centre[0] + r * math.cos(angle) for r in ends], [centre[1] + r * math.sin(angle) for r in ends],
            color="white", linewidth=0.5, alpha=0.45,
        )  # fmt: skip
    for ring in range(8, rings + 1, 8):
        radius = longer * polar.r_min * ratio ** (ring / rings)
        tint = level_colour(polar.levels[ring - 1])
        for stroke, line, alpha in (("black", 2.6, 0.5), (tint, 1.5, 1)):
            axes.add_patch(Circle(centre, radius, fill=False, ec=stroke, lw=line, alpha=alpha))
    _cross(axes, centre)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)


def _draw_map(axes: Axes, polar: LogPolar, wide: float) -> None:
    rings, wedges = polar.values.shape[-2:]
    _imshow(axes, _shown(polar.values))
    strip = 0.1 / wide * wedges  # beside the map, in the gap
    for ring in range(rings):
        tint = level_colour(polar.levels[ring])
        axes.add_patch(Rectangle((-1.6 * strip - 0.5, ring - 0.5), strip, 1.02, color=tint, lw=0, clip_on=False))


def _draw_cull(axes: Axes, image: torch.Tensor, culled: Culled, wide: float) -> None:
    height, width = image.shape[-2:]
    rows, columns = starts_of(height, PATCH), starts_of(width, PATCH)
    shown = _shown(image, dim=0.26)
    bright = _shown(image)
    for _, y, x in culled.indices.tolist():
        part = (slice(None), slice(rows[y], rows[y] + PATCH), slice(columns[x], columns[x] + PATCH))
        shown[part] = bright[part]
    _imshow(axes, shown)
    used = set()
    for _, level, y, x in culled.pruned.tolist():
        left, right = span(x, level, columns, width)
        top, bottom = span(y, level, rows, height)
        inset = 0.004 * max(height, width) if level else 0.0015 * max(height, width)
        axes.add_patch(
            Rectangle(
                (left + inset - 0.5, top + inset - 0.5), right - left - 2 * inset, bottom - top - 2 * inset, fill=False,
                ec=level_colour(level), lw=0.5 + 0.45 * min(level, 4), alpha=0.5 if level == 0 else 1,
            )
        )  # fmt: skip
        used.add(level)
    if used:
        _legend(axes, sorted(used), wide, "pruned at level")


def _draw_foveated(axes: Axes, seen: Foveated) -> None:
    height, width = seen.image.shape[-2:]
    _imshow(axes, _shown(seen.image))
    highest = float(seen.levels.max())
    for level in range(1, math.floor(highest) + 1):
        if height > 1 and width > 1 and float(seen.levels.min()) < level < highest:
            axes.contour(seen.levels.numpy(), [level], colors=[level_colour(level)], linewidths=1.3)
    _cross(axes, (seen.fixation[0] * width - 0.5, seen.fixation[1] * height - 0.5))
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)


def _draw_tokens(axes: Axes, image: torch.Tensor, tokens: TokenSet, wide: float) -> None:
    height, width = image.shape[-2:]
    _imshow(axes, _shown(image, dim=0.55))
    levels = set()
    for x, y, level in tokens.sites.flip(0).tolist():  # the most relevant ones on top
        side = tokens.patch * 2**level
        left, right = max(x * width - side / 2, 0), min(x * width + side / 2, width)
        top, bottom = max(y * height - side / 2, 0), min(y * height + side / 2, height)
        axes.add_patch(
            Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec=level_colour(level), lw=1.1)
        )
        levels.add(round(level))
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
    _legend(axes, sorted(levels), wide, "level")


def _cross(axes: Axes, at: tuple[float, float]) -> None:
    """The fixation."""
    axes.plot(*at, "+", color="black", markersize=13, markeredgewidth=3)
    axes.plot(*at, "+", color="white", markersize=12, markeredgewidth=1.4)


def span(index: int, level: int, starts: Sequence[int], n: int) -> tuple[int, int]:
    """Pixels along a side that a node covers: those of every patch whose canonical ancestor it is."""
    last = max(1, len(starts) >> level) - 1
    begin = index << level
    end = len(starts) if index == last else min((index + 1) << level, len(starts))
    return starts[begin], starts[end] if end < len(starts) else n


def _legend(axes: Axes, levels: Sequence[int], wide: float, what: str) -> None:
    """The level colours, under the panel."""
    step = 0.25 / wide
    texts = [(what, FAINT, None)] + [(f"{level}", "white", level_colour(level)) for level in levels]
    x = 1 - step * (len(levels) + 0.15)
    for number, (text, ink, fill) in enumerate(texts):
        axes.annotate(
            text, (x + step * number - (0.25 * step if number == 0 else 0), 0), (0, -14), xycoords="axes fraction",
            textcoords="offset points", fontsize=9, color=ink, weight="bold" if fill else "normal", va="center",
            ha="right",
            bbox={"boxstyle": "round,pad=0.3", "fc": fill, "ec": "none"} if fill else None,
        )  # fmt: skip


def level_colour(level: float) -> str:
    return LEVEL_COLOURS[min(round(level), len(LEVEL_COLOURS) - 1)]


def _imshow(
    axes: Axes, picture: torch.Tensor, interpolation: str = "antialiased", corner: tuple[int, int] = (0, 0)
) -> None:
    height, width = picture.shape[-2:]
    x, y = corner[0] - 0.5, corner[1] - 0.5
    axes.imshow(
        picture.clamp(0, 1).permute(1, 2, 0).numpy(), aspect="auto", interpolation=interpolation,
        extent=(x, x + width, y + height, y),
    )  # fmt: skip


def _shown(image: torch.Tensor, dim: float = 1.0) -> torch.Tensor:
    """RGB in [0, 1], times `dim`, alpha applied over white; pictures beyond [0, 1] are scaled into it."""
    values = unit(image)
    alpha = values[-1:] if image.shape[0] in (2, 4) else torch.ones_like(values[:1])
    colours = colour(values)
    if image.dtype != torch.uint8 and float(colours.max()) > 1:
        colours = colours / colours.max()
    return (colours * alpha + 1 - alpha).expand(3, -1, -1) * dim
