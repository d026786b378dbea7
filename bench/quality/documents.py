"""Pages of PDF documents that Debian packages hold: drawn by pdftoppm, and what pdftotext says of them as the truth."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import torch

from quality.pages import Page, grown
from quality.reading import Line, around, compared

DOCUMENTS = {
    "bash-doc": "usr/share/doc/bash/bashref.pdf",
    "developers-reference": "usr/share/developers-reference/developers-reference.pdf",
    "debian-policy": "usr/share/doc/debian-policy/policy.pdf.gz",
}
DPI = 80
"""A page in letter size is 680 x 880 pixels, ten-point print eleven pixels high."""
LINES = range(7, 13)
"""Pages with so many lines are taken: on a full one no budget reads anything."""
PAGES = 2
"""Of each document, the first ones."""


def pages(package: str, cache: Path) -> list[Page]:
    """Some pages of a package's document.

    Raises:
        OSError, subprocess.SubprocessError: a program is missing or fails, the message says which.
    """
    path = fetched(package, cache)
    found = []
    for number, size, lines in layout(path):
        if len(lines) in LINES:
            found.append(page(package, path, number, size, lines, turn=len(found)))
        if len(found) == PAGES:
            break
    return found


def fetched(package: str, cache: Path) -> Path:
    """The document of a package, from the cache or by apt-get download and dpkg -x."""
    target = cache / f"{package}.pdf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            _call(["apt-get", "download", package], folder)
            archive = next(Path(folder).glob("*.deb"))
            _call(["dpkg", "-x", str(archive), "unpacked"], folder)
            stored = Path(folder) / "unpacked" / DOCUMENTS[package]
            data = stored.read_bytes()
            unfinished = target.with_suffix(".part")
            unfinished.write_bytes(gzip.decompress(data) if stored.suffix == ".gz" else data)
            unfinished.replace(target)
    return target


def layout(path: Path) -> list[tuple[int, tuple[float, float], list[Line]]]:
    """Of each page: its number, its size in points, and its lines, boxes in points."""
    said = _call(["pdftotext", "-bbox-layout", str(path), "-"])
    root = ET.fromstring(said)
    pages = []
    for number, page_ in enumerate(root.iterfind(".//{*}page"), 1):
        lines = []
        for line in page_.iterfind(".//{*}line"):
            text = " ".join(word.text or "" for word in line.iterfind("{*}word"))
            box = tuple(float(line.attrib[key]) for key in ("xMin", "yMin", "xMax", "yMax"))
            if compared(text):
                lines.append(Line(text, box))  # type: ignore[arg-type]
        pages.append((number, (float(page_.attrib["width"]), float(page_.attrib["height"])), lines))
    return pages


def page(package: str, path: Path, number: int, size: tuple[float, float], lines: list[Line], turn: int) -> Page:
    """One page as a picture; its lines by thirds are its regions, from the top."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        span = ["-f", str(number), "-l", str(number), "-r", str(DPI), "-singlefile"]
        _call(["pdftoppm", *span, "-png", str(path), f"{folder}/page"])
        with Image.open(f"{folder}/page.png") as opened:
            pixels = np.array(opened.convert("RGB"))
    scale = pixels.shape[1] / size[0]
    placed = [Line(line.text, tuple(scale * value for value in line.box)) for line in lines]  # type: ignore[arg-type]
    placed.sort(key=lambda line: line.centre[1])
    cuts = [round(len(placed) * part / 3) for part in range(4)]
    regions = {
        name: grown(around([line.box for line in placed[begin:end]]))
        for name, begin, end in zip(("top", "middle", "footer"), cuts, cuts[1:], strict=False)
    }
    image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    name = f"{package}, page {number}"
    about = f"{Path(DOCUMENTS[package]).name} at {DPI} dpi"
    return Page(name, image, regions, placed, about=about, turn=turn, second=turn == 0)


def _call(command: list[str], folder: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        package = "poppler-utils" if command[0].startswith("pdf") else command[0]
        raise FileNotFoundError(f"no {command[0]}: apt-get install {package}")
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command[:2])}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return done.stdout
