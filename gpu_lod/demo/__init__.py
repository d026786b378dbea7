"""The demo: contact sheets of what the verbs make of a picture, and a table of what that costs beside torch."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gpu_lod import __version__, whole_file
from gpu_lod.allocate import FoveatedPyramid
from gpu_lod.context import Context
from gpu_lod.cull import cull
from gpu_lod.demo import panels
from gpu_lod.demo import sheet as page
from gpu_lod.demo.rows import REPEATS, Row
from gpu_lod.demo.rows import rows as measure
from gpu_lod.errors import FileError
from gpu_lod.foveate import foveate
from gpu_lod.foveate_tiles import level_map
from gpu_lod.hiz import hiz
from gpu_lod.images import PathLike, load
from gpu_lod.log_polar import log_polar, ring_rule
from gpu_lod.mipmap import mipmap
from gpu_lod.patch_grid import pooled
from gpu_lod.rebuild import psnr, rebuild
from gpu_lod.saliency import PATCH, Kind, saliency, unit

OUT = Path("out/demo")
KEPT = 0.2
"""Share of the patches that `cull` keeps on the sheet."""
BUDGET = 273
"""Tokens that the sheet shows, or as many as there are patches."""

_RINGS, _WEDGES, _R_MIN, _R_MAX = 128, 320, 0.02, 0.7
_E0 = 0.05
_IN_WORDS = {"centre-surround": "centre-surround", "gradient": "gradient energy"}


@dataclass(frozen=True)
class Picture:
    """What the demo runs on."""

    name: str
    image: torch.Tensor
    """[C, H, W] as loaded."""
    fixation: tuple[float, float]
    saliency: Kind


def pictures(path: PathLike | None, fixation: tuple[float, float] | None = None) -> list[Picture]:
    """The given picture, or two that scikit-image brings along: a portrait and a printed page.

    Raises:
        FileError: a file that is no picture, or holds NaN or infinities.
    """
    if path is not None:
        image = load(path)
        if not torch.isfinite(image).all():
            raise FileError(f"{path} holds NaN or infinities, which cannot be compared. Take a picture without.")
        return [Picture(Path(path).stem, image, fixation or (0.5, 0.5), "centre-surround")]
    from skimage import data

    astronaut, page = (torch.from_numpy(array.copy()) for array in (data.astronaut(), data.page()))
    return [
        Picture("astronaut", astronaut.permute(2, 0, 1).contiguous(), fixation or (0.43, 0.21), "centre-surround"),
        Picture("page", page[None], fixation or (0.28, 0.4), "gradient"),
    ]


def run(
    chosen: list[Picture], out: Path = OUT, progress: Callable[[str], None] = lambda step: None
) -> tuple[list[Row], list[Path]]:
    """Draw a sheet a picture, measure, and write `table.json` beside them.

    Args:
        progress: called with the name of each step before it begins.

    Returns:
        The rows of the table, and the paths of everything written.

    Raises:
        GLUnavailableError: no OpenGL.
        FileError: the folder cannot be written to.
    """
    ctx = Context()
    written: list[Path] = []
    rows: list[Row] = []
    try:
        whole_file.make_folder(out)
        for picture in chosen:
            progress(f"{picture.name}: drawing")
            path = out / f"{picture.name}.png"
            page.draw(sheet(picture, ctx), path)
            written.append(path)
            for row in _measured(picture, ctx):
                progress(f"{picture.name}: {row.verb} measured")
                rows.append(row)
        path = out / "table.json"
        whole_file.write(path, (json.dumps(report(rows, written, ctx), indent=2) + "\n").encode())
        written.append(path)
    except OSError as error:
        raise FileError(f"{out} cannot be written to: {error.strerror or error}.") from None
    return rows, written


def sheet(picture: Picture, ctx: Context) -> panels.Sheet:
    """Run the verbs on the GL backend and gather what the page shows."""
    image = picture.image
    mips = mipmap(image, backend="gl")
    rule = ring_rule(_RINGS, _WEDGES, _R_MIN, _R_MAX, "log", 0.05)
    polar = log_polar(mips, picture.fixation, _RINGS, _WEDGES, r_min=_R_MIN, r_max=_R_MAX, backend="gl")
    relevance = pooled(saliency(image, picture.saliency), PATCH)
    threshold = float(torch.quantile(relevance, 1 - KEPT))
    hz = hiz(relevance, backend="gl")
    height, width = image.shape[-2:]
    levels = level_map(torch.tensor(picture.fixation), (height, width), _E0, 0.0)
    allocator = FoveatedPyramid(min(BUDGET, relevance.numel()), PATCH)
    tokens = allocator(image, relevance[0], fixation=picture.fixation)
    rebuilt = rebuild(tokens, (height, width), mode="bicubic")
    return panels.Sheet(
        name=picture.name,
        image=image,
        mips=mips,
        log_polar=panels.LogPolar(
            polar, picture.fixation, _R_MIN, _R_MAX, rule.levels(max(image.shape[-2:]), len(mips) - 1)
        ),
        saliency=_IN_WORDS[picture.saliency],
        hz=hz,
        threshold=threshold,
        culled=cull(hz, threshold, backend="gl"),
        foveated=panels.Foveated(foveate(mips, picture.fixation, e0=_E0, backend="gl"), picture.fixation, levels),
        tokens=panels.Tokens(tokens, rebuilt, float(psnr(image[None], rebuilt.image[None]))),
        renderer=ctx.renderer,
    )


def _measured(picture: Picture, ctx: Context) -> Iterator[Row]:
    image = unit(picture.image)
    return measure(picture.name, image, saliency(picture.image, picture.saliency), picture.fixation, ctx)


def report(rows: list[Row], sheets: list[Path], ctx: Context) -> dict[str, Any]:
    """The table with all that it depends on, ready for JSON."""
    return {
        "renderer": ctx.renderer,
        "driver": ctx.driver,
        "software": ctx.software,
        "versions": {
            "gpu_lod": __version__,
            "torch": torch.__version__,
            "moderngl": metadata.version("moderngl"),
            "python": platform.python_version(),
        },
        "torch_threads": torch.get_num_threads(),
        "timing": f"median of {REPEATS} calls, torch tensor to torch tensor, sides in alternating blocks",
        "rows": [row.as_dict() for row in rows],
        "sheets": [str(path) for path in sheets],
    }
