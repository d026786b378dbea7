"""Result files: reading, checking, and writing what is made of them in one step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from gpu_lod import whole_file
from gpu_lod.errors import FileError

SCHEMA: dict[str, Any] = json.loads(files(__name__.rpartition(".")[0]).joinpath("schema.json").read_text("utf-8"))
VERSION: int = SCHEMA["properties"]["schema"]["const"]
AGAIN = "Measure again with `make bench`."

Data = dict[str, Any]


def load(path: Path) -> Data:
    """A result file.

    Raises:
        FileError: missing, unreadable, no JSON, no result file, of a newer gpu_lod, or not as the schema says.
    """
    if path.is_dir():
        raise FileError(f"{path} is a folder; expected a result file, such as {path / '*.json'}.")
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise FileError(f"{path} does not exist; expected a result file. `make bench` writes one.") from None
    except UnicodeDecodeError:
        raise FileError(f"{path} is no text; expected a result file, which is JSON.") from None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise FileError(f"{path} is empty; expected a result file. {AGAIN}")
    try:
        data = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is no result file, or corrupt: {error}. {AGAIN}") from None
    if not isinstance(data, dict) or "schema" not in data or "rows" not in data:
        raise FileError(
            f"{path} is JSON but no result file: it has no `schema` and `rows`. Give what bench/run.py wrote."
        )
    version = data["schema"]
    if isinstance(version, int) and version > VERSION:
        raise FileError(f"{path} has schema {version}, and this gpu_lod reads {VERSION}. Update gpu_lod.")
    if problem := problem_of(data):
        raise FileError(f"{path} is no result file of schema {VERSION}: {problem}. {AGAIN}")
    cleaned: Data = _clean(data)
    return cleaned


def between(text: str, marks: tuple[str, str], body: str) -> str:
    """A document with what is between its two marks replaced by `body`."""
    begin, end = marks
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n\n{body}\n\n{end}{tail}"


def load_all(paths: Iterable[Path]) -> list[tuple[Path, Data]]:
    """All files, ordered by device, so that their order in the call changes nothing.

    Raises:
        FileError: as `load`; none; or two that are the same.
    """
    found: list[tuple[Path, Data]] = []
    for path in paths:
        data = load(path)
        for other, known in found:
            if known == data:
                raise FileError(f"{path} and {other} hold the same results. Give one of them.")
        found.append((path, data))
    if not found:
        raise FileError("no result file was given. `make bench` writes one into bench/results/.")
    return sorted(found, key=lambda one: (one[1]["device"], one[1]["cpu"], one[1]["date"], json.dumps(one[1])))


def problem_of(data: Data) -> str | None:
    """What keeps this from being a result file's content, or None."""
    import jsonschema

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(SCHEMA).iter_errors(data))
    if error is not None:
        message = error.message if len(error.message) < 200 else error.message[:200] + " ..."
        return f"{error.json_path}: {message}"
    for number, row in enumerate(data["rows"]):
        for key in ("best_torch", "best_gl", "best_peer"):
            if key in row and row[key] not in row["sides"]:
                return f"$.rows[{number}].{key}: {row[key]!r} is none of its sides"
    return None


def write(text: str, path: Path) -> None:
    """In one step: whoever reads the file finds the old one or the new one, whole.

    Raises:
        FileError: it cannot be written.
    """
    try:
        whole_file.write(path, text.encode("utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}. Choose another place with -o.") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that can be measured")


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) >= 2**63:
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _clean(value: Any) -> Any:
    """Without control characters and lone surrogates, which neither terminals nor pages should get."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\ufffd" for c in value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
