"""Contact sheets of tokens: where they are, what they cover, and the pictures rebuilt from them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import matplotlib
import torch
from PIL import Image, ImageDraw

from gpu_lod.commands.allocation import Allocation, Skipped
from gpu_lod.commands.drawing import as_rgb, as_tensor
from gpu_lod.commands.lettering import NAME, NOTE, TITLE, fitted, font
from gpu_lod.demo.panels import FAINT, INK, PAPER, TIMES
from gpu_lod.token_set import TokenSet

NUMBERED = 64
"""Up to so many tokens carry their rank, where it fits."""

_SIDE, _SIDE_ALONE = 380, 960
"""Side in pixels of a square of a panel's area, among others and alone."""
_MARGIN, _GAP, _WITHIN = 48, 44, 8
_HEADER, _ABOVE, _BELOW, _NARROWEST = 170, 46, 38, 430
_SMALLEST = 10
"""Size in pixels that a rank is written in at least."""
_COLOURS, _DARK, _PALE = "turbo", 0.2, 0.9
"""The part of the colour map in use: its ends are hard to see on a dimmed picture."""


def sheet(
    image: torch.Tensor, results: Sequence[Allocation | Skipped], budget: int, patch: int, name: str
) -> torch.Tensor:
    """For each allocator the tokens on a dimmed picture and the picture rebuilt from them, uint8 [3, h, w].

    Shape: image [C, H, W].
    Convention: a token is a square of its true size, patch * 2^level pixels; finer ones lie over coarser ones, as
        `rebuild` paints them. Colours tell levels and mean the same all over the sheet; up to 64 tokens carry their
        rank, where it fits. Below them stands which part of the picture is covered, and the PSNR of what was rebuilt.
    """
    height, width = image.shape[-2:]
    side = _SIDE if len(results) > 1 else _SIDE_ALONE
    times = min(side / math.sqrt(width * height), 2.5 * side / max(width, height))
    panel = max(1, round(width * times)), max(1, round(height * times))
    below = panel[0] > 1.4 * panel[1]  # wide pictures stand over each other
    cell = (
        max(panel[0] if below else 2 * panel[0] + _WITHIN, _NARROWEST),
        _ABOVE + (2 * panel[1] + _WITHIN if below else panel[1]) + _BELOW,
    )
    columns = _columns(len(results), cell)
    rows = -(-len(results) // columns)
    page = Image.new(
        "RGB",
        (
            2 * _MARGIN + columns * (cell[0] + _GAP) - _GAP,
            2 * _MARGIN + _HEADER + rows * (cell[1] + _GAP) - _GAP,
        ),
        PAPER,
    )
    made = [result for result in results if isinstance(result, Allocation)]
    highest = max(1.0, *(float(result.tokens.sites[:, 2].max()) for result in made))
    _head(page, name, f"{budget} tokens of {patch}{TIMES}{patch} px on {width}{TIMES}{height} px", highest)
    dimmed = _dimmed(as_rgb(image).resize(panel, Image.Resampling.LANCZOS))
    for number, result in enumerate(results):
        row, column = divmod(number, columns)
        left, top = _MARGIN + column * (cell[0] + _GAP), _MARGIN + _HEADER + row * (cell[1] + _GAP)
        _caption(page, result, left, top, cell)
        top += _ABOVE
        if isinstance(result, Allocation):
            rebuilt = as_rgb(result.rebuilt.image).resize(panel, Image.Resampling.LANCZOS)
            second = (left, top + panel[1] + _WITHIN) if below else (left + panel[0] + _WITHIN, top)
            page.paste(_tokens(dimmed, result.tokens, times, highest), (left, top))
            page.paste(rebuilt, second)
    return as_tensor(page)


def _columns(count: int, cell: tuple[int, int]) -> int:
    """So many that the sheet is about as wide as high."""
    fits = [abs(math.log(n * cell[0] / (-(-count // n) * cell[1]))) for n in range(1, count + 1)]
    return 1 + fits.index(min(fits))


def _head(page: Image.Image, name: str, about: str, highest: float) -> None:
    draw = ImageDraw.Draw(page)
    room = page.width - 2 * _MARGIN
    draw.text((_MARGIN, _MARGIN), fitted(name, font(TITLE, True), room), INK, font(TITLE, True))
    draw.text((_MARGIN, _MARGIN + 60), fitted(about, font(NOTE), room), FAINT, font(NOTE))
    top, high = _MARGIN + 104, 18
    words = "level"
    left = _MARGIN + round(font(NOTE).getlength(words)) + 14
    bar = min(room - left + _MARGIN - 20, 420)
    draw.text((_MARGIN, top + high / 2), words, FAINT, font(NOTE), anchor="lm")
    ramp = _colours(torch.linspace(0, highest, bar), highest)
    for x, shade in enumerate(ramp):
        draw.line(((left + x, top), (left + x, top + high)), shade)
    for level in range(math.floor(highest) + 1):
        at = left + level / highest * (bar - 1)
        draw.line(((at, top + high), (at, top + high + 5)), FAINT, 2)
        draw.text((at, top + high + 8), str(level), FAINT, font(NOTE), anchor="mt")


def _caption(page: Image.Image, result: Allocation | Skipped, left: int, top: int, cell: tuple[int, int]) -> None:
    draw = ImageDraw.Draw(page)
    draw.text((left, top), result.name, INK, font(NAME, True))
    if isinstance(result, Skipped):
        lines = textwrap.wrap(f"skipped: {result.reason}", max(10, int(cell[0] / (0.56 * NOTE))))
        draw.multiline_text((left, top + 40), "\n".join(lines), FAINT, font(NOTE), spacing=6)
        return
    if result.untrained:
        draw.text((left + font(NAME, True).getlength(result.name) + 14, top + 5), "untrained", FAINT, font(NOTE))
    note = f"coverage {100 * result.coverage:.1f}%   PSNR {spoken(result.psnr)}"
    draw.text((left, top + cell[1]), note, FAINT, font(NOTE), anchor="ld")


def spoken(psnr: float) -> str:
    return "exact" if math.isinf(psnr) else f"{psnr:.1f} dB"


def _dimmed(picture: Image.Image) -> Image.Image:
    grey = Image.blend(picture, picture.convert("L").convert("RGB"), 0.6)
    return Image.blend(grey, Image.new("RGB", picture.size), 0.5).convert("RGBA")


def _tokens(dimmed: Image.Image, tokens: TokenSet, times: float, highest: float) -> Image.Image:
    """The footprints on the dimmed picture, which is `times` as large, and ranks where there are few."""
    layer = Image.new("RGBA", dimmed.size)
    draw = ImageDraw.Draw(layer)  # replaces what was there, alpha too, as tokens do
    levels = tokens.sites[:, 2].cpu()
    shades, sites = _colours(levels, highest), tokens.sites.tolist()
    centres = [(x * dimmed.width, y * dimmed.height) for x, y, _ in sites]
    order = torch.sort(levels, stable=True).indices.flip(0).tolist()
    for number in order:
        half = tokens.patch * 2 ** min(sites[number][2], 30) * times / 2
        left, top, right, bottom = (round(at + side * half) for side in (-1, 1) for at in centres[number])
        corners = (left, top, max(left, right - 1), max(top, bottom - 1))
        draw.rectangle(corners, (*shades[number], 70), (*shades[number], 235), width=max(1, round(half / 40)))
    page = Image.alpha_composite(dimmed, layer)
    if tokens.budget <= NUMBERED:
        draw = ImageDraw.Draw(page)
        for number in order:
            token = tokens.patch * 2 ** min(sites[number][2], 30) * times
            size = round(max(min(max(dimmed.size) / 44, token / 2), _SMALLEST))
            if token >= 1.2 * size:  # otherwise it would hide its token
                rank, letters = str(number + 1), font(size, True)
                draw.text(centres[number], rank, "white", letters, anchor="mm", stroke_width=2, stroke_fill="black")
    return page.convert("RGB")


def _colours(levels: torch.Tensor, highest: float) -> list[tuple[int, int, int]]:
    places = _DARK + (_PALE - _DARK) * (levels / highest).clamp(0, 1)
    return [tuple(shade) for shade in matplotlib.colormaps[_COLOURS](places.numpy(), bytes=True)[:, :3].tolist()]
