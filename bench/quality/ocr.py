"""Task a, OCR recovery: what a reader of print still reads in a page that was rebuilt from K tokens.

A question asks for one region of the page: relevance there is BOOST times what it was, as a query would have it, and
its centre is the oracle fixation. The whole page counts all the same, and another region, and the footer: what starves
the rest fails the second question.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gpu_lod.feature_channels import saliency_map
from gpu_lod.rebuild import Rebuilt
from gpu_lod.saliency import saliency
from gpu_lod.token_set import TokenSet
from quality import documents, pages
from quality.frame import Picture, RebuiltPictures
from quality.pages import Page
from quality.reading import Line, RapidOCR, Reader, Tesseract, accuracy, error_rate, text_in
from quality.task import Metric

BOOST = 4.0
CACHE = Path(__file__).resolve().parents[2] / "out" / "quality" / "documents"


class OCR(RebuiltPictures):
    name = "ocr"
    title = "OCR recovery"
    sources = ("ocr.py", "pages.py", "documents.py", "reading.py")
    metrics = (
        Metric("page", "1 - CER of the whole page against what the reader reads on the full image", accuracy=True),
        Metric("asked", "the same in the region asked for, where relevance is boosted", accuracy=True),
        Metric("other", "the same in the region after it", accuracy=True),
        Metric("footer", "the same in the footer, the last region", accuracy=True),
        Metric("CER", "character error rate of the page against the full image's reading", better="lower"),
        Metric("CER, truth", "character error rate of the page against its true text, where known", better="lower"),
        Metric("Tesseract", "1 - CER of the whole page by Tesseract against its own reading, on some pages"),
    )

    def __init__(
        self, reader: Callable[[], Reader] = RapidOCR, second: Callable[[], Reader] = Tesseract, cache: Path = CACHE
    ) -> None:
        super().__init__()
        self._reader, self._second, self._cache = reader, second, cache
        self._full: dict[tuple[str, int, bool], list[Line]] = {}

    @cached_property
    def reader(self) -> Reader:
        return self._reader()

    @cached_property
    def second(self) -> Reader | None:
        try:
            return self._second()
        except (ImportError, OSError) as error:
            self.skipped["second reader"] = str(error)
            return None

    def settings(self) -> dict[str, Any]:
        return {"reader": self.reader.name, "second reader": self.second.name if self.second else None, "boost": BOOST}

    def pictures(self, seeds: int, quick: bool) -> list[Picture]:
        """Drawn pages of every seed, the scan, and pages of documents. The quick form has one drawn page of each style,
        the scan, and one page of a document."""
        found = [pages.drawn(style, seed) for style in pages.STYLES for seed in range(1 if quick else seeds)]
        found.append(pages.scan())
        for package in list(documents.DOCUMENTS)[: 1 if quick else None]:
            try:
                found += documents.pages(package, self._cache)[: 1 if quick else None]
            except (OSError, subprocess.SubprocessError) as error:
                self.skipped[package] = f"{type(error).__name__}: {error}"
        return [picture_of(page) for page in found]

    def measure(self, picture: Picture, tokens: TokenSet | None, rebuilt: Rebuilt) -> dict[str, float | None]:
        page, names = picture.content
        full = self._read_in_full(page)
        lines = full if tokens is None else self.reader(rebuilt.image)
        read, whole = text_in(lines), text_in(full)
        values = {
            "page": accuracy(read, whole),
            "CER": error_rate(read, whole),
            "CER, truth": None if page.truth is None else error_rate(read, text_in(page.truth)),
            "Tesseract": None,
        }
        for metric, name in names.items():
            box = page.regions[name]
            values[metric] = accuracy(text_in(lines, box), text_in(full, box))
        if page.second and self.second is not None:
            own = self._read_in_full(page, second=True)
            again = own if tokens is None else self.second(rebuilt.image)
            values["Tesseract"] = accuracy(text_in(again), text_in(own))
        return values

    def _read_in_full(self, page: Page, second: bool = False) -> list[Line]:
        key = page.name, page.seed, second
        if key not in self._full:
            reader = self.second if second else self.reader
            assert reader is not None
            self._full[key] = reader(page.image)
        return self._full[key]


def picture_of(page: Page) -> Picture:
    """With a question: pages ask by turns for one region of theirs, never for the footer."""
    names = list(page.regions)
    asked = names[page.turn % (len(names) - 1)]
    other = names[(page.turn + 1) % (len(names) - 1)]
    box = page.regions[asked]
    height, width = page.image.shape[-2:]
    target = (box[0] + box[2]) / 2 / width, (box[1] + box[3]) / 2 / height
    kinds = {"gradient": saliency(page.image, "gradient")[0], "saliency": saliency_map(page.image[None])[0]}
    relevance = {kind: asked_for(values, box) for kind, values in kinds.items()}
    content = page, {"asked": asked, "other": other, "footer": names[-1]}
    about = f"{page.about}; asked for: {asked}, other: {other}"
    return Picture(page.name, page.image, relevance, page.seed, target, content, about)


def asked_for(relevance: torch.Tensor, box: tuple[float, float, float, float]) -> torch.Tensor:
    """Relevance [H, W] in units of its mean, and BOOST times it in the box."""
    height, width = relevance.shape
    left, top, right, bottom = (
        round(min(max(value, 0), n)) for value, n in zip(box, chain((width, height) * 2), strict=True)
    )
    result = relevance.float() / relevance.float().mean().clamp(min=1e-12)
    result[top:bottom, left:right] *= BOOST
    return result


def task() -> OCR:
    return OCR()
