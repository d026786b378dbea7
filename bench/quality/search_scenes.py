"""Pictures to search: handwritten digits, small, framed in colour, far apart on photographs.

What is asked of one is a digit, by its place or by the colour of its frame; the answer is its class. Digits are those
that scikit-learn comes with, 8 x 8; the last 450 of them, and photographs of their own, are for testing alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F

Split = Literal["train", "test"]
SIDE, DIGIT, FRAME = 448, 20, 2
CLASSES = 10
"""Of a picture, of a digit and of the frame round it, in pixels."""
BOX = DIGIT + 2 * FRAME
COUNT, APART = 6, 0.2
"""Digits a picture, and how far their centres are apart at the least, in sides."""
TESTED = 450
COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.75, 0.15),
    "blue": (0.1, 0.2, 0.95),
    "yellow": (0.95, 0.85, 0.1),
    "magenta": (0.9, 0.1, 0.85),
    "cyan": (0.1, 0.85, 0.9),
}
PHOTOGRAPHS: dict[Split, tuple[str, ...]] = {
    "train": ("astronaut", "brick", "camera", "cell", "china.jpg", "coffee", "grass", "hubble_deep_field", "retina",
              "rocket"),
    "test": ("chelsea", "coins", "flower.jpg", "gravel", "immunohistochemistry", "moon", "stereo_motorcycle"),
}  # fmt: skip
"""By their names in skimage.data, those that end in .jpg by those in sklearn.datasets."""


@dataclass(frozen=True)
class Search:
    """A batch of pictures with what is in them.

    Shape: image [B, 3, SIDE, SIDE], fp32 in [0, 1]; places [B, COUNT, 2], (x, y) of the digits' centres in [0, 1];
        classes, sources (which digits of the data set) and colours [B, COUNT], int64.
    """

    image: torch.Tensor
    places: torch.Tensor
    classes: torch.Tensor
    colours: torch.Tensor
    sources: torch.Tensor


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Ink in [0, 1], [1797, DIGIT, DIGIT], and classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    ink = torch.from_numpy(found.images).float()[:, None] / 16
    large = F.interpolate(ink, size=(DIGIT, DIGIT), mode="bicubic", align_corners=False)
    return large[:, 0].clamp(0, 1), torch.from_numpy(found.target).long()


def sources(split: Split) -> range:
    """Which digits belong to a split: neighbours in the data set are often of one hand, so it is cut once."""
    total = len(digits()[1])
    return range(total - TESTED) if split == "train" else range(total - TESTED, total)


@cache
def photograph(name: str) -> torch.Tensor:
    """[3, H, W] in [0, 1], both sides at least SIDE."""
    import skimage.data

    if name.endswith(".jpg"):
        from sklearn.datasets import load_sample_image

        values: Any = load_sample_image(name)
    else:
        values = getattr(skimage.data, name)()
        values = values[0] if isinstance(values, tuple) else values
    photo = torch.from_numpy(values.copy()).float() / 255
    photo = photo.expand(3, -1, -1) if photo.ndim == 2 else photo.permute(2, 0, 1)
    scale = SIDE / min(photo.shape[-2:])
    if scale > 1:
        size = [max(SIDE, round(n * scale)) for n in photo.shape[-2:]]
        photo = F.interpolate(photo[None], size=size, mode="bilinear", align_corners=False)[0]
    return photo.contiguous()


def scene(split: Split, seed: int, index: int) -> Search:
    """One picture, a batch of 1: the same for the same arguments."""
    generator = torch.Generator().manual_seed((seed * 2 + (split == "test")) * 1_000_003 + index)

    def draw(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=generator)

    names = PHOTOGRAPHS[split]
    photo = photograph(names[int(draw(len(names), 1))])
    top, left = (int(draw(n - SIDE + 1, 1)) for n in photo.shape[-2:])
    image = photo[:, top : top + SIDE, left : left + SIDE].clone()
    if draw(2, 1):
        image = image.flip(-1)
    corners = _corners(generator)
    source = draw(len(sources(split)), COUNT) + sources(split).start
    colours = torch.randperm(len(COLOURS), generator=generator)[:COUNT]
    palette, (ink, classes) = torch.tensor(list(COLOURS.values())), digits()
    shade = torch.rand(COUNT, 2, generator=generator)
    for k in range(COUNT):
        x, y = corners[k].tolist()
        box = image[:, y : y + BOX, x : x + BOX]
        box[:] = palette[colours[k]][:, None, None]
        paper, dark = 0.8 + 0.2 * shade[k, 0], 0.3 * shade[k, 1]
        box[:, FRAME:-FRAME, FRAME:-FRAME] = paper + (dark - paper) * ink[source[k]]
    places = (corners + BOX / 2) / SIDE
    return Search(image[None], places[None], classes[source][None], colours[None], source[None])


def _corners(generator: torch.Generator) -> torch.Tensor:
    """[COUNT, 2] (x, y) of the boxes' corners in pixels, drawn until they are far apart."""
    found: list[torch.Tensor] = []
    while len(found) < COUNT:
        corner = torch.randint(SIDE - BOX + 1, (2,), generator=generator)
        if all((corner - other).float().norm() >= APART * SIDE for other in found):
            found.append(corner)
    return torch.stack(found)


def scenes(split: Split, seed: int, indices: range) -> Search:
    parts = [scene(split, seed, index) for index in indices]
    return Search(*(torch.cat(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))
