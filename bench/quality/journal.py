"""A file of finished units, one line of JSON each: whatever stops a run, the next one goes on from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

Line = dict[str, Any]


class Journal:
    """Lines by their place. A line that is torn, or no JSON, counts as never written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        text = self._file.read()
        self._lines: dict[str, Line] = {}
        for raw in text.split(b"\n"):
            line = _parsed(raw)
            if line is not None:
                self._lines[_key(line["place"])] = line
        if text and not text.endswith(b"\n"):
            self._file.write(b"\n")  # what follows a torn line is one of its own

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, place: Line) -> Line | None:
        return self._lines.get(_key(place))

    def add(self, place: Line, found: Line) -> Line:
        """Write a line, through to the disk."""
        line = {"place": place, **found}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._lines[_key(place)] = line
        return line


def _key(place: Line) -> str:
    return json.dumps(place, sort_keys=True)


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("place"), dict) else None
