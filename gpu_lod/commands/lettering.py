"""Letters on contact sheets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import matplotlib
from PIL import ImageFont

TITLE, NAME, NOTE = 46, 28, 22
"""Sizes of letters in pixels: made for screens of two pixels a point."""


@cache
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The font that matplotlib brings along, the same on every machine."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"DejaVuSans{'-Bold' if bold else ''}.ttf"
    return ImageFont.truetype(path, size)


def fitted(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """The text in one line, shortened to a width in pixels. It may be the name of a file, which may be no text."""
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
