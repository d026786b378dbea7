"""Readers of print, and how wrong they are."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import unicodedata
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

Box = tuple[float, float, float, float]
"""(left, top, right, bottom), in pixels."""


class Line(NamedTuple):
    """A piece of text, and where it stands."""

    text: str
    box: Box

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


class Reader(Protocol):
    name: str

    def __call__(self, image: torch.Tensor) -> list[Line]:
        """The lines of a picture, uint8 [3, H, W]."""
        ...


class RapidOCR:
    """PP-OCRv4 as the wheel rapidocr-onnxruntime holds it, without the classifier of upside-down lines.

    Raises:
        ImportError: it is not installed.
    """

    def __init__(self) -> None:
        from rapidocr_onnxruntime import RapidOCR as Engine

        self.name = f"rapidocr-onnxruntime {version('rapidocr-onnxruntime')}, onnxruntime {version('onnxruntime')}"
        self._engine: Any = Engine(intra_op_num_threads=torch.get_num_threads(), inter_op_num_threads=1)

    def __call__(self, image: torch.Tensor) -> list[Line]:
        pixels = image.permute(1, 2, 0).flip(-1).contiguous().numpy()  # blue, green, red
        found, _ = self._engine(pixels, use_cls=False)
        return [Line(text, bounds(corners)) for corners, text, _ in found or []]


class Tesseract:
    """The program `tesseract`, lines as it groups them.

    Raises:
        FileNotFoundError: it is not installed.
    """

    def __init__(self) -> None:
        self._program = shutil.which("tesseract")
        if self._program is None:
            raise FileNotFoundError("no tesseract: apt-get install tesseract-ocr")
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=True).stdout
        self.name = said.splitlines()[0]

    def __call__(self, image: torch.Tensor) -> list[Line]:
        from PIL import Image

        stored = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(stored, "png", compress_level=1)
        command = [str(self._program), "-", "-", "--psm", "11", "tsv"]
        threads = {**os.environ, "OMP_THREAD_LIMIT": str(torch.get_num_threads())}
        done = subprocess.run(command, input=stored.getvalue(), capture_output=True, check=True, env=threads)
        words: dict[tuple[str, ...], list[Line]] = {}
        for row in done.stdout.decode().splitlines()[1:]:
            cells = row.split("\t")
            if cells[0] == "5" and cells[11].strip():
                left, top, width, height = map(float, cells[6:10])
                words.setdefault(tuple(cells[1:5]), []).append(Line(cells[11], (left, top, left + width, top + height)))
        return [
            Line(" ".join(word.text for word in line), around([word.box for word in line])) for line in words.values()
        ]


def bounds(corners: Iterable[tuple[float, float]]) -> Box:
    x, y = zip(*corners, strict=True)
    return float(min(x)), float(min(y)), float(max(x)), float(max(y))


def around(boxes: Iterable[Box]) -> Box:
    left, top, right, bottom = zip(*boxes, strict=True)
    return min(left), min(top), max(right), max(bottom)


def text_in(lines: Iterable[Line], box: Box | None = None) -> str:
    """The text of those lines whose centre is in the box, row by row and from left to right, as it is compared.

    A line belongs to a row if its centre is above the bottom of the row's first line.
    """
    there = [line for line in lines if box is None or _within(line.centre, box)]
    rows: list[list[Line]] = []
    for line in sorted(there, key=lambda line: line.centre[1]):
        if rows and line.centre[1] < rows[-1][0].box[3]:
            rows[-1].append(line)
        else:
            rows.append([line])
    return compared("".join(line.text for row in rows for line in sorted(row, key=lambda line: line.box[0])))


def compared(text: str) -> str:
    """Compatibility forms, and no white space: readers of Chinese leave blanks between English words out."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def error_rate(read: str, truth: str) -> float | None:
    """Characters to change, insert or delete, over those of the truth; None where the truth is empty."""
    return distance(read, truth) / len(truth) if truth else None


def accuracy(read: str, truth: str) -> float | None:
    """1 less the error rate, and at least 0."""
    rate = error_rate(read, truth)
    return None if rate is None else max(0.0, 1.0 - rate)


def distance(one: str, other: str) -> int:
    """Levenshtein's, a row of the table at a time."""
    letters, steps = np.array([ord(c) for c in other], dtype=np.int64), np.arange(len(other) + 1)
    row = steps.copy()
    for count, letter in enumerate(one, 1):
        changed = row[:-1] + (letters != ord(letter))
        row = np.concatenate([[count], np.minimum(changed, row[1:] + 1)])
        row = np.minimum.accumulate(row - steps) + steps  # insertions, which come one after the other
    return int(row[-1])


def _within(point: tuple[float, float], box: Box) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]
