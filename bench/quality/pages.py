"""Pages that are drawn: a title, a body and a footer whose text is known, on paper, on grey, and on a photograph."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from quality.reading import Box, Line, around

HEIGHT, WIDTH = 900, 700
"""A grid of 65 x 50 patches of 14 pixels: 3250, of which print touches some 500."""
STYLES = ("noise", "photograph", "neutral")
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket")
"""Of skimage.data: what text is drawn on, by seed."""
MARGIN = 4
"""Pixels round a region's text that still belong to it."""
_VOCABULARY = (
    "about above across after again along already always among answer around before began behind below between boat "
    "bridge bright brother called carry centre certain change circle clear cloud coast colour common corner country "
    "course cover distance early earth enough evening field figure final follow forest garden glass ground harbour "
    "history island journey language large letter light listen machine market measure middle minute morning mountain "
    "nature never north notice number object often order paper pattern people picture place plain problem question "
    "quiet reason record river round school season second sentence several shadow silver simple sound south station "
    "story street summer surface system table thought travel under valley voice water weather window winter written"
)


@dataclass(frozen=True, eq=False)
class Page:
    """A picture of text."""

    name: str
    image: torch.Tensor
    """uint8 [3, H, W]"""
    regions: Mapping[str, Box]
    """The last one is the footer."""
    truth: list[Line] | None = None
    """What is written there, where it is known."""
    seed: int = 0
    about: str = ""
    turn: int = 0
    """Which of its regions is asked for."""
    second: bool = False
    """Whether the second reader reads it."""


def drawn(style: str, seed: int, photographs: Sequence[str] = PHOTOGRAPHS) -> Page:
    """A page of a style: the seed gives its words, where they stand, and the noise or the photograph."""
    from PIL import Image, ImageDraw

    random_ = random.Random(f"{style} {seed}")
    picture = Image.fromarray(paper(style, seed, photographs))
    pen = ImageDraw.Draw(picture)
    truth: list[Line] = []
    regions: dict[str, Box] = {}
    left = 50 + random_.randrange(60)
    blocks = [
        ("title", 34, True, 1, 60),
        ("first paragraph", 18, False, 3, 230),
        ("second paragraph", 18, False, 3, 480),
    ]
    for name, points, bold, lines, top in [*blocks, ("footer", 15, False, 1, 830)]:
        top += random_.randrange(40)
        for number in range(lines):
            place = left, top + number * round(points * 1.5)
            text = _sentence(random_, 3 if bold else 6)
            pen.text(place, text, font=_font(points, bold), fill=(16, 16, 24))
            truth.append(Line(text, tuple(map(float, pen.textbbox(place, text, font=_font(points, bold))))))
        regions[name] = grown(around([line.box for line in truth[-lines:]]))
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
    turn = STYLES.index(style) + seed
    return Page(style, image, regions, truth, seed, f"drawn, {style}", turn, second=(style, seed) == ("neutral", 0))


def paper(style: str, seed: int, photographs: Sequence[str] = PHOTOGRAPHS) -> np.ndarray:
    """What text is drawn on, uint8 [H, W, 3]."""
    if style == "neutral":
        return np.full((HEIGHT, WIDTH, 3), 190, dtype=np.uint8)
    if style == "noise":
        grain = np.random.default_rng(seed).normal(225, 18, (HEIGHT, WIDTH, 1))
        return np.repeat(grain.clip(0, 255).round().astype(np.uint8), 3, axis=2)
    from PIL import Image, ImageOps
    from skimage import data

    photo = Image.fromarray(getattr(data, photographs[seed % len(photographs)])()).convert("RGB")
    fitted = ImageOps.fit(photo, (WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    return (255 - 0.5 * (255 - np.asarray(fitted, dtype=np.float32))).round().astype(np.uint8)


def scan() -> Page:
    """scikit-image's scanned page, twice its size: its thirds are its regions, and nobody wrote down what it says."""
    from PIL import Image
    from skimage import data

    source = Image.fromarray(data.page())
    width, height = 2 * source.width, 2 * source.height
    grey = torch.from_numpy(np.array(source.resize((width, height), Image.Resampling.BICUBIC)))
    bands = {
        name: (0.0, i * height / 3, float(width), (i + 1) * height / 3)
        for i, name in enumerate(("top", "middle", "footer"))
    }
    about = "skimage.data.page(), enlarged twice"
    return Page("scan", grey.expand(3, -1, -1).contiguous(), bands, about=about)


def grown(box: Box) -> Box:
    return box[0] - MARGIN, box[1] - MARGIN, box[2] + MARGIN, box[3] + MARGIN


def _sentence(random_: random.Random, words: int) -> str:
    return " ".join(random_.choice(_VOCABULARY.split()) for _ in range(words)).capitalize()


@cache
def _font(points: int, bold: bool):  # type: ignore[no-untyped-def]
    """DejaVu Sans, which matplotlib brings: the same letters on every machine."""
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), points)
