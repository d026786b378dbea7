"""How oriented_energy compares with a steerable pyramid on real pictures: docs/oriented_energy.md says what it shows.

pip install pyrtools; python bench/compare_steerable.py [--out FILE]

The other side is pyrtools' SteerablePyramidFreq of order 3 (four orientations), complex, so that a band's squared
magnitude is an energy too. Both sides halve their levels, and sample i of level l stands on pixel 2^l i in both.
"""

from __future__ import annotations

import argparse
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import common, write
from scipy.stats import spearmanr
from skimage import color, data

import gpu_lod as lod

LEVELS = 4
BORDER = 8
"""Samples left out at each edge of each level: one side mirrors the picture there, the other repeats it."""
PICTURES = ("astronaut", "camera", "brick", "grass", "gravel", "coins", "page")
OUT = Path(__file__).resolve().parent / "results" / "steerable" / "pyrtools.json"


def picture(name: str) -> np.ndarray[Any, Any]:
    """A picture of scikit-image as grey float64 in [0, 1], cut to whole samples of the coarsest level."""
    image = getattr(data, name)()
    grey = color.rgb2gray(image) if image.ndim == 3 else image / 255
    step = 2**LEVELS
    return np.ascontiguousarray(grey[: grey.shape[0] // step * step, : grey.shape[1] // step * step])


def theirs(image: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """[4, h, w] of each level."""
    import pyrtools

    pyramid = pyrtools.pyramids.SteerablePyramidFreq(image, height=LEVELS, order=3, is_complex=True)
    return [np.stack([abs(pyramid.pyr_coeffs[level, k]) ** 2 for k in range(4)]) for level in range(LEVELS)]


def ours(image: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    found = lod.oriented_energy(torch.from_numpy(image).float()[None], LEVELS)
    return [level[0].double().numpy() for level in found]


def inside(level: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return level[:, BORDER:-BORDER, BORDER:-BORDER]


def strongest(energies: list[np.ndarray[Any, Any]]) -> int:
    return int(inside(energies[0]).mean((1, 2)).argmax())


def mapping() -> list[int]:
    """For each of our orientations, their band: the one that answers most to a grating varying in our direction."""
    y, x = np.mgrid[:128, :128]
    bands = []
    for k in range(4):
        angle = math.pi * k / 4
        grating = np.sin(1.4 * (x * math.cos(angle) + y * math.sin(angle)))
        assert strongest(ours(grating)) == k
        bands.append(strongest(theirs(grating)))
    assert sorted(bands) == [0, 1, 2, 3], bands
    return bands


def compare(name: str, bands: list[int]) -> list[dict[str, Any]]:
    image = picture(name)
    rows = []
    for level, (one, two) in enumerate(zip(ours(image), theirs(image), strict=True)):
        mine, other = inside(one), inside(two)[bands]
        means, others = mine.mean((1, 2)), other.mean((1, 2))
        rows.append(
            {
                "picture": name,
                "level": level,
                "ours": (means / means.sum()).round(4).tolist(),
                "theirs": (others / others.sum()).round(4).tolist(),
                "ratio": round(float(means.sum() / others.sum()), 4),
                "rank": [round(float(spearmanr(a.ravel(), b.ravel())[0]), 4) for a, b in zip(mine, other, strict=True)],
                "rank_if_turned": [
                    round(float(spearmanr(a.ravel(), b.ravel())[0]), 4)
                    for a, b in zip(mine, np.roll(other, 2, axis=0), strict=True)
                ],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    bands = mapping()
    rows = [row for name in PICTURES for row in compare(name, bands)]
    about = common()
    about["versions"]["pyrtools"] = version("pyrtools")
    write({"bands": bands, "border": BORDER, **about, "rows": rows}, options.out)
    for level in range(LEVELS):
        ranks = np.array([row["rank"] for row in rows if row["level"] == level])
        turned = np.array([row["rank_if_turned"] for row in rows if row["level"] == level])
        shares = [np.array([row[key] for row in rows if row["level"] == level]) for key in ("ours", "theirs")]
        apart = abs(shares[0] - shares[1]).max()
        print(
            f"level {level}: rank correlation {np.median(ranks):.2f} ({ranks.min():.2f} to {ranks.max():.2f}), with "
            f"the orthogonal band {np.median(turned):.2f}; shares of energy differ by at most {apart:.2f}"
        )
    print(json.dumps({"bands": bands}), f"wrote {options.out}")


if __name__ == "__main__":
    main()
