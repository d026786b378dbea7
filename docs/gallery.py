"""Draw the pictures of gallery.md again: verbs on a photograph, and every allocator on it, a page and a chart."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from skimage import data

DOCS = Path(__file__).resolve().parent
OUT = DOCS.parent / "out" / "gallery"
FIXATIONS = {"astronaut": "0.43,0.21", "page": "0.28,0.4", "chart": "0.6,0.3"}
WIDTH, BYTES = 2000, 590_000
"""What a picture in the repository may have, in pixels and bytes."""
VERBS = {
    "foveate": ["--fixation", FIXATIONS["astronaut"]],
    "sites": ["--fixation", FIXATIONS["astronaut"]],
    "log-polar": ["--fixation", FIXATIONS["astronaut"], "--back"],
    "laplacian": [],
    "features": ["--fixation", FIXATIONS["astronaut"]],
}


def chart() -> Image.Image:
    """Two noisy lines and bars, with a legend and small print: 720 x 540."""
    draw = np.random.default_rng(7)
    years = np.arange(1990, 2026)
    figure = Figure(figsize=(7.2, 5.4), dpi=100, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)  # not pyplot: no display, no global state
    lines, bars = figure.subplots(2, 1, height_ratios=(2, 1), sharex=True)
    for name, slope in (("north", 1.4), ("south", 0.6)):
        lines.plot(years, slope * (years - 1990) + draw.normal(0, 2.5, len(years)).cumsum(), marker=".", label=name)
    lines.annotate("a new instrument", (2011, 23), (1992, 22), arrowprops={"arrowstyle": "->"})
    lines.set(title="Measured levels, 1990 to 2025", ylabel="level (mm)")
    lines.legend(loc="lower right")
    lines.grid(alpha=0.3)
    bars.bar(years, draw.integers(3, 30, len(years)), color="#7a7c82")
    bars.set(ylabel="samples", xlabel="year")
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])


def shrink(sheet: Path, to: Path) -> None:
    """As wide as fits a page, and as good as fits the size."""
    with Image.open(sheet) as opened:
        picture = opened.convert("RGB")
    if picture.width > WIDTH:
        picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    for quality in range(88, 20, -4):
        encoded = io.BytesIO()
        picture.save(encoded, "JPEG", quality=quality, optimize=True)
        if encoded.tell() <= BYTES:
            break
    to.write_bytes(encoded.getvalue())
    print(f"wrote {to.relative_to(DOCS.parent)}, quality {quality}, {encoded.tell() // 1000} kB")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    np.save(OUT / "query.npy", np.zeros(512, np.float32))  # for AdaptiveStratified, which is not trained to hear one
    pictures = {"astronaut": Image.fromarray(data.astronaut()), "page": Image.fromarray(data.page()), "chart": chart()}
    for name, picture in pictures.items():
        picture.save(OUT / f"{name}.png")
    for verb, options in VERBS.items():
        run(verb, "astronaut.png", *options, "-o", f"{verb}.png")
    for drawn in [*VERBS, "log-polar.back"]:
        shrink(OUT / f"{drawn}.png", DOCS / f"{drawn}.jpg")
    for name, fixation in FIXATIONS.items():
        options = ["--with", "all", "--fixation", fixation, "--query", "query.npy"]
        run("allocate", f"{name}.png", *options, "-o", f"{name}.sheet.png")
        shrink(OUT / f"{name}.sheet.png", DOCS / f"allocators-{name}.jpg")


def run(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "gpu_lod.cli", *command], cwd=OUT, check=True)


if __name__ == "__main__":
    main()
