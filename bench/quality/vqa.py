"""Data sets of questions about pictures: DocVQA, TextVQA and VQAv2, from the Hugging Face hub or from files.

for sample in load("docvqa"):                              # streamed from the hub
for sample in load("vqav2", "VQAv2/data"):                 # validation*.parquet in a folder
for sample in load("textvqa", "questions.jsonl"):          # needs no `datasets`: pictures are files beside it
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from gpu_lod import checks
from gpu_lod.errors import FileError, InputError, UnsupportedError


@dataclass(frozen=True, eq=False)
class Sample:
    """One question about a picture."""

    id: str
    image: torch.Tensor
    """uint8 [3, H, W]"""
    question: str
    answers: tuple[str, ...]
    """What people answered."""


@dataclass(frozen=True)
class DataSet:
    """Where a data set is, what its columns are called, and what is reported of it: as in the tasks of lmms-eval."""

    hub: str
    name: str | None
    """Its configuration on the hub."""
    id: str
    """The column of the question's number."""
    metric: str
    """In `vqa_metrics.METRICS`."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.id, "image", "question", "answers"


DATASETS = {
    "docvqa": DataSet("lmms-lab-encoder/DocVQA", "DocVQA", "questionId", "anls"),
    "textvqa": DataSet("lmms-lab-encoder/textvqa", None, "question_id", "textvqa_accuracy"),
    "vqav2": DataSet("lmms-lab-encoder/VQAv2", None, "question_id", "vqa_accuracy"),
}
_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl"}
Row = Mapping[str, Any]


def load(
    name: str, source: str | Path | None = None, split: str = "validation", limit: int | None = None
) -> Iterator[Sample]:
    """The questions of a data set, one after the other: nothing is read or sent for before its turn.

    Args:
        name: "docvqa", "textvqa" or "vqav2"; files have its columns: questionId (the others: question_id), image,
            question, answers.
        source: None is the hub, streamed. A file or a folder that is there: .parquet, .arrow, or .jsonl, in which
            pictures are paths, seen from the file; of a folder all files whose names begin with the split's, or what
            `Dataset.save_to_disk` wrote. Any other name is one of the hub, of a copy: "lmms-lab/DocVQA".
        split: test sets hold no answers.
        limit: how many at most.

    Raises:
        InputError: an unknown name, a column or a split that is missing, a question without answers.
        FileError: what is no such file, or does not come from the hub.
        UnsupportedError: no `datasets`, which all but .jsonl needs.
    """
    kind = DATASETS[checks.choice(name, "name", tuple(DATASETS))]
    if limit is not None:
        checks.integer(limit, "limit", at_least=1)
    path = None if source is None else Path(source)
    if path is None or not path.exists():
        rows, folder = _streamed(kind, None if source is None else str(source), split), Path()
    else:
        rows, folder = _stored(path, split), path if path.is_dir() else path.parent
    where = str(source or kind.hub)
    return (_sample(kind, row, folder, where) for row in islice(rows, limit))


def rgb(picture: Any, folder: Path = Path()) -> torch.Tensor:
    """A picture as data sets hold it, to uint8 [3, H, W]: Pillow's, a path, or {"bytes": ..., "path": ...}.

    Upright as EXIF says; grey becomes RGB and alpha is dropped, as in lmms-eval.
    """
    try:
        if isinstance(picture, Mapping):
            stored = picture.get("bytes")
            picture = io.BytesIO(stored) if stored else picture.get("path")
        if isinstance(picture, (str, Path)):
            picture = folder / picture
        if not isinstance(picture, Image.Image):
            picture = Image.open(picture)
        values = np.array(ImageOps.exif_transpose(picture).convert("RGB"))
    except Exception as error:  # Pillow's parsers raise many kinds
        what = picture if isinstance(picture, Path) else type(picture).__name__
        raise FileError(
            f"the picture ({what}) cannot be read: {error}. Expected a picture, its bytes or path."
        ) from None
    return torch.from_numpy(values).permute(2, 0, 1).contiguous()


def _sample(kind: DataSet, row: Row, folder: Path, where: str) -> Sample:
    if missing := [column for column in kind.columns if column not in row]:
        raise InputError(
            f"{where} has the columns {', '.join(row)}; expected {', '.join(kind.columns)}, and there is no "
            f"{', '.join(missing)}. Rename its columns, or pass the name of another data set."
        )
    answers = row["answers"]
    if isinstance(answers, Mapping):  # a list of records, column by column
        answers = answers.get("answer")
    # VQAv2 says of each answer how sure people were, too.
    said = tuple(str(one["answer"] if isinstance(one, Mapping) else one) for one in answers or ())
    if not said:
        raise InputError(f"question {row[kind.id]} of {where} has no answers. Use a split with answers: 'validation'.")
    return Sample(str(row[kind.id]), rgb(row["image"], folder), str(row["question"]), said)


def _streamed(kind: DataSet, hub: str | None, split: str) -> Iterator[Row]:
    where = hub or kind.hub
    library = datasets()
    try:
        yield from library.load_dataset(where, kind.name, split=split, streaming=True)
    except Exception as error:  # of the library and of the network, of many kinds
        raise FileError(
            f"{where} (split {split!r}) is no file or folder here, and does not come from the hub: {error} Pass "
            "source= a local copy: a folder of .parquet files, or a .jsonl file."
        ) from error


def _stored(path: Path, split: str) -> Iterator[Row]:
    saved = path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    files = [path]
    if path.is_dir() and not saved:
        there = sorted(file for file in path.iterdir() if file.suffix in _FORMATS)
        files = [file for file in there if file.name.startswith(split)]
        if not files:
            names = ", ".join(file.name for file in there) or "none"
            raise FileError(f"{path} holds no {split}*{{{','.join(_FORMATS)}}}; of these kinds there are: {names}.")
    for file in files:
        yield from _saved(file, split) if saved else _rows(file)


def _saved(path: Path, split: str) -> Iterator[Row]:
    found = datasets().load_from_disk(str(path))
    if isinstance(found, Mapping):
        if split not in found:
            raise InputError(f"{path} has no split {split!r}; there are {', '.join(found)}. Pass split=.")
        found = found[split]
    yield from found


def _rows(file: Path) -> Iterator[Row]:
    kind = _FORMATS.get(file.suffix)
    if kind is None:
        raise FileError(f"{file} is of an unknown kind; expected {', '.join(_FORMATS)}, or a folder of them.")
    if kind != "jsonl":
        library = datasets()
        try:
            yield from library.load_dataset(kind, data_files=[str(file)], split="train", streaming=True)
        except Exception as error:
            raise FileError(f"{file} cannot be read: {error}") from error
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FileError(f"{file}, line {number} is no JSON: {error}.") from None
            if not isinstance(row, dict):
                raise FileError(f"{file}, line {number} is a {type(row).__name__}; expected an object, {{...}}.")
            yield row


def datasets() -> Any:
    """The library of Hugging Face.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            "the data set needs the library `datasets`, which is missing. Run in the checkout: pip install '.[vqa]'"
        ) from None
    return datasets
