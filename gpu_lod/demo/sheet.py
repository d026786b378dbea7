"""The demo's contact sheet: what the verbs make of one picture, on one page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gpu_lod import whole_file
from gpu_lod.demo.panels import FAINT, INK, PAPER, TIMES, Sheet
from gpu_lod.demo.panels import panels as panels_of

_WIDTH, _MARGIN, _GAP, _CAPTION = 17.0, 0.6, 0.5, 0.52  # inches
_HEADER, _FOOTER, _ROW, _TALLEST = 1.3, 0.6, 3.8, 7.5
_DPI = 130
_NOTE, _LINE = 9.8, 0.19
"""Size of the notes in points, and the height of their lines in inches."""
# The font that matplotlib brings along; no formulas, as a file's name may hold dollar signs.
_FONT: Any = {"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK, "text.parse_math": False}


def draw(sheet: Sheet, path: Path) -> None:
    """Write the page as a PNG."""
    panels = panels_of(sheet)
    rows = _justify([panel.slot for panel in panels])
    inner = _WIDTH - 2 * _MARGIN
    talls, captions = [], []
    for row in rows:
        natural = (inner - _GAP * (len(row) - 1)) / sum(panels[i].slot for i in row)
        talls.append(min(natural, _TALLEST))
        captions.append(_CAPTION + _LINE * max(len(panels[i].lines(talls[-1])) for i in row))
    height = _HEADER + sum(talls) + sum(captions) + _GAP * (len(rows) - 1) + _FOOTER
    with matplotlib.rc_context(_FONT):
        figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor=PAPER)
        FigureCanvasAgg(figure)  # not pyplot: no display, no global state
        _header(figure, sheet, height)
        top = height - _HEADER
        for row, tall, caption in zip(rows, talls, captions, strict=True):
            left = _MARGIN
            for i in row:
                panel, x = panels[i], left / _WIDTH
                wide = tall * min(panel.aspect, panel.slot)
                high = wide / panel.aspect
                figure.text(x, (top - 0.2) / height, panel.title, fontsize=13, weight="bold", va="baseline")
                note = "\n".join(panel.lines(tall))
                figure.text(x, (top - 0.33) / height, note, fontsize=_NOTE, color=FAINT, va="top", linespacing=1.3)
                axes = figure.add_axes((x, (top - caption - high) / height, wide / _WIDTH, high / height))
                axes.set_axis_off()
                panel.draw(axes, wide)
                left += tall * panel.slot + _GAP
            top -= tall + caption + _GAP
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", facecolor=PAPER, metadata={"Software": "gpu_lod"})
    whole_file.write(path, drawn.getvalue())


def _justify(aspects: Sequence[float]) -> list[list[int]]:
    """Split panels into rows of full width whose heights are as near to the wanted one as can be."""
    inner = _WIDTH - 2 * _MARGIN
    best: tuple[float, list[list[int]]] = (math.inf, [])
    for cuts in range(2 ** (len(aspects) - 1)):
        rows = [[0]]
        for i in range(1, len(aspects)):
            if cuts >> (i - 1) & 1:
                rows.append([])
            rows[-1].append(i)
        heights = [(inner - _GAP * (len(row) - 1)) / sum(aspects[i] for i in row) for row in rows]
        cost = sum(math.log(max(height, 0.1) / _ROW) ** 2 for height in heights)
        best = min(best, (cost, rows), key=lambda pair: pair[0])
    return best[1]


def _header(figure: Figure, sheet: Sheet, height: float) -> None:
    channels, rows, columns = sheet.image.shape
    kind = {1: "grey", 2: "grey and alpha", 3: "RGB", 4: "RGBA"}[channels]
    x = _MARGIN / _WIDTH
    figure.text(x, 1 - 0.56 / height, sheet.name, fontsize=25, weight="bold", va="baseline")
    about = f"{columns}{TIMES}{rows} {kind}   ·   made by shaders on {sheet.renderer}"
    figure.text(x, 1 - 0.86 / height, about, fontsize=10.5, color=FAINT, va="baseline")
    figure.text(1 - x, 1 - 0.56 / height, "gpu_lod", fontsize=15, weight="bold", color=FAINT, ha="right", va="baseline")
    line = Line2D([x, 1 - x], [1 - 1.04 / height] * 2, color=INK, linewidth=0.8)
    figure.add_artist(line)
