"""Draw the pictures of gallery.md again: verbs on a photograph or a page, and every allocator on these and a chart; and
the demo's sheet, which the README shows.

python docs/gallery.py [VERB ...]

All of them, or those of some verbs (the names of the commands, and "demo").
"""

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

from gpu_lod import demo
from gpu_lod.context import Context

DOCS = Path(__file__).resolve().parent
OUT = DOCS.parent / "out" / "gallery"
FIXATIONS = {"astronaut": "0.43,0.21", "page": "0.28,0.4", "chart": "0.6,0.3"}
WIDTH, BYTES = 2000, 590_000
"""What a picture in the repository may have, in pixels and bytes."""
SHEET = 1600, 200_000
"""The same of the sheets of one verb."""
VERBS = {
    "foveate": ["--fixation", FIXATIONS["astronaut"]],
    "sites": ["--fixation", FIXATIONS["astronaut"]],
    "patches": ["--fixation", FIXATIONS["astronaut"]],
    "log-polar": ["--fixation", FIXATIONS["astronaut"], "--back"],
    "gaussian": ["--levels", "6"],
    "laplacian": [],
    "energy": [],
    "cull": ["--box", "0.12,0.45,0.3,0.63", "--box", "0.6,0.62,0.97,0.95"],
    "features": ["--fixation", FIXATIONS["astronaut"]],
}
SHEETS = ("patches", "gaussian", "energy", "cull")


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


def shrink(sheet: Path, to: Path, width: int = WIDTH, most: int = BYTES) -> None:
    """As wide as fits a page, and as good as fits the size."""
    with Image.open(sheet) as opened:
        picture = opened.convert("RGB")
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    for quality in range(88, 20, -4):
        encoded = io.BytesIO()
        picture.save(encoded, "JPEG", quality=quality, optimize=True)
        if encoded.tell() <= most:
            break
    to.write_bytes(encoded.getvalue())
    print(f"wrote {to.relative_to(DOCS.parent)}, quality {quality}, {encoded.tell() // 1000} kB")


def main(arguments: list[str]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    np.save(OUT / "query.npy", np.zeros(512, np.float32))  # for AdaptiveStratified, which is not trained to hear one
    pictures = {"astronaut": Image.fromarray(data.astronaut()), "page": Image.fromarray(data.page()), "chart": chart()}
    for name, picture in pictures.items():
        picture.save(OUT / f"{name}.png")
    there = [*VERBS, "demo", "allocate"]
    chosen = arguments or there
    if unknown := {*chosen} - {*there}:
        sys.exit(f"there is no {', '.join(sorted(unknown))}; expected some of {', '.join(there)}")
    for verb in [verb for verb in VERBS if verb in chosen]:
        run(verb, f"{'page' if verb == 'energy' else 'astronaut'}.png", *VERBS[verb], "-o", f"{verb}.png")
        for drawn in (verb, f"{verb}.back") if "--back" in VERBS[verb] else (verb,):
            shrink(OUT / f"{drawn}.png", DOCS / f"{drawn}.jpg", *(SHEET if verb in SHEETS else ()))
    if "demo" in chosen:
        astronaut, _ = demo.pictures(None)
        demo.page.draw(demo.sheet(astronaut, Context()), OUT / "demo.png")
        shrink(OUT / "demo.png", DOCS / "astronaut.jpg")
    if "allocate" not in chosen:
        return
    for name, fixation in FIXATIONS.items():
        options = ["--with", "all", "--fixation", fixation, "--query", "query.npy"]
        run("allocate", f"{name}.png", *options, "-o", f"{name}.sheet.png")
        shrink(OUT / f"{name}.sheet.png", DOCS / f"allocators-{name}.jpg")


def run(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "gpu_lod.cli", *command], cwd=OUT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
