"""Tables of measured times: what they hold, and the files they are kept in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from gpu_lod import cache, whole_file
from gpu_lod.errors import CalibrationBusyError, FileError, InputError

FORMAT = 1
"""Of the files. Raised when a shader or a torch path changes so much that older times say nothing of it."""
NOTHING_KEPT = (
    f"GPU_LOD_CACHE is {cache.OFF!r}, or the user has no home, so nothing is kept. Set it to a folder that can be "
    "written to."
)
OCTAVES = 1.0
"""How far, in octaves of work, a measurement speaks for other sizes."""
BATCH_OCTAVES = 1.5
"""The same in octaves of the batch. A single image speaks for single images alone: torch then shares out its rows
among the cores, else its images."""
GAP = 6.0
"""Octaves of work, at most, from one measurement to the next larger one where both together speak for what lies
between."""
ALIKE = {"bfloat16": ("float16", "float32"), "float16": ("float32",)}
"""Whose times speak for a dtype that has none."""
ANOTHER_KIND = 2.0
"""How many times faster than torch a way was, at least, that is taken for a job of such a dtype or other channels."""


class Question(NamedTuple):
    """What the fastest way depends on, beside the machine."""

    verb: str
    state: str
    """What else today's verbs ask before they choose: mean or max, whole levels or not."""
    channels: int
    """0 where planes are independent of each other: they count as the batch."""
    dtype: str
    batch: int
    work: int
    """What the cost grows with, of the whole batch: pixels of a chain, samples of a sampler (of an image both), texels
    that are culled. Its logarithm to base 2 is the size class."""

    @property
    def series(self) -> tuple[str, str, int, str]:
        return self[:4]


class Timed(NamedTuple):
    median_ms: float
    iqr_ms: float

    @property
    def low(self) -> float:
        return self.median_ms - self.iqr_ms / 2

    @property
    def high(self) -> float:
        return self.median_ms + self.iqr_ms / 2


@dataclass(frozen=True)
class Entry:
    """Times of one job on one machine."""

    question: Question
    at: str
    """The job in words: 1 x 3 x 1024 x 1024 float32."""
    date: str
    ways: dict[str, Timed]
    """By "torch", and by backend and generator: "gl", "gl compute"."""
    gain: float = 1.0
    """How many times faster than torch a way has to be; no matter of the measurement, but of what it speaks for."""


Host = tuple[str, str, int]
"""`Machine.tensors`, `name` and `threads`."""
GL = tuple[str, str, bool]
"""`Machine.renderer`, `gl_driver` and `software`."""


@dataclass(frozen=True)
class Machine:
    """Where times were measured."""

    tensors: str
    """"cpu" or "cuda"."""
    name: str
    """The CPU's model, or the GPU's name."""
    threads: int
    """Torch's, for CPU tensors; else 0."""
    driver: str
    """NVIDIA's, for CUDA tensors; else empty."""
    renderer: str
    """GL_RENDERER and GL_VERSION; empty without OpenGL."""
    gl_driver: str
    software: bool

    @property
    def host(self) -> Host:
        return self.tensors, self.name, self.threads

    @property
    def gl(self) -> GL:
        return self.renderer, self.gl_driver, self.software


@dataclass(frozen=True)
class Table:
    """All that was measured on one machine."""

    machine: Machine
    entries: tuple[Entry, ...]
    path: Path | None = None
    """Of the user's file; None for a seed that comes with the package."""

    def around(self, question: Question) -> tuple[Entry, ...]:
        """What speaks for a job: the measurement that is near enough, or the next smaller and the next larger one.
        Where there are none, those of the dtype or the channels most like its own."""
        for kind, gain in self._kinds(question):
            near = self.nearest(kind)
            found = self._between(kind) if near is None else (near,)
            if found:
                return found if gain == 1 else tuple(replace(entry, gain=gain) for entry in found)
        return ()

    def _kinds(self, question: Question) -> Iterator[tuple[Question, float]]:
        """The question, and of other kinds of jobs what stands for it, with how much has to be gained there."""
        dtypes = question.dtype, *ALIKE.get(question.dtype, ())
        measured = {entry.question.channels for entry in self.entries if entry.question[:2] == question[:2]}
        others = measured - {0, question.channels} if question.channels else set()
        for channels in (question.channels, *sorted(others, key=lambda count: (abs(count - question.channels), count))):
            for dtype in dtypes:
                kind = question._replace(channels=channels, dtype=dtype)
                yield kind, 1.0 if kind == question else ANOTHER_KIND

    def _between(self, question: Question) -> tuple[Entry, ...]:
        """The next smaller and the next larger job that were measured, if there are both."""
        able = [e for e in self.entries if e.question.series == question.series and _as_many(e.question, question)]
        low = max((e for e in able if e.question.work < question.work), key=lambda e: e.question.work, default=None)
        high = min((e for e in able if e.question.work > question.work), key=lambda e: e.question.work, default=None)
        if low is None or high is None or math.log2(high.question.work / low.question.work) > GAP:
            return ()
        return low, high

    def nearest(self, question: Question) -> Entry | None:
        """The measurement of a job of that kind that is near enough."""
        found = [(far, entry) for entry in self.entries if (far := _apart(entry.question, question)) is not None]
        return min(found, key=lambda pair: (*pair[0], pair[1].question))[1] if found else None

    def merged(self, newer: Iterable[Entry], weak: Collection[Question] = ()) -> Table:
        """With newer measurements, which replace those of the same job, but for weak ones."""
        own = {entry.question: entry for entry in self.entries}
        by_job = own | {new.question: new for new in newer if new.question not in weak or new.question not in own}
        return Table(self.machine, tuple(by_job[job] for job in sorted(by_job)), self.path)

    def as_dict(self) -> dict[str, Any]:
        """What its file holds, and the file."""
        entries = [
            {
                **entry.question._asdict(),
                "at": entry.at,
                "date": entry.date,
                "ways": {name: [round(ms, 5) for ms in way] for name, way in entry.ways.items()},
            }
            for entry in self.entries
        ]
        path = None if self.path is None else str(self.path)
        return {"format": FORMAT, "path": path, "machine": asdict(self.machine), "entries": entries}

    def as_text(self) -> str:
        """JSON, an entry a line."""
        data = self.as_dict()
        lines = ",\n  ".join(map(json.dumps, data["entries"]))
        return f'{{"format": {FORMAT},\n "machine": {json.dumps(data["machine"])},\n "entries": [\n  {lines}\n]}}\n'


def _apart(measured: Question, asked: Question) -> tuple[float, float] | None:
    """How far apart two jobs are, in octaves of work and of the batch; None for too far."""
    if measured.series != asked.series:
        return None
    work, batch = abs(math.log2(measured.work / asked.work)), abs(math.log2(measured.batch / asked.batch))
    return (work, batch) if work <= OCTAVES and _as_many(measured, asked) else None


def _as_many(measured: Question, asked: Question) -> bool:
    """Whether batches are near enough to each other."""
    if measured.batch == 1 or asked.batch == 1:
        return measured.batch == asked.batch
    return abs(math.log2(measured.batch / asked.batch)) <= BATCH_OCTAVES


# -- files ---------------------------------------------------------------------------------------------------------


def parse(text: str, path: Path | None = None) -> Table:
    """A table from a file's text.

    Raises:
        ValueError: it is none, or of another format; the message says what is wrong.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT or isinstance(data["format"], bool):
            found = data.get("format") if isinstance(data, dict) else None
            raise ValueError(f"it has format {found!r}, and this version reads {FORMAT}")
        machine = Machine(**{field.name: data["machine"][field.name] for field in fields(Machine)})
        for field in fields(Machine):
            _check_type(getattr(machine, field.name), str(field.type), field.name)
        _check_type(data["entries"], "list", "entries")
        return Table(machine, tuple(map(_entry, data["entries"])), path)
    except ValueError as error:
        raise ValueError(f"{error}".partition("\n")[0][:200]) from None
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no table of times ({type(error).__name__}: {error})"[:200]) from None


def _check_type(value: Any, kind: str, name: str) -> None:
    if type(value).__name__ != kind:
        raise ValueError(f"{name} is {value!r:.40}, no {kind}")


def _entry(data: dict[str, Any]) -> Entry:
    question = Question(**{name: data[name] for name in Question._fields})
    for name, kind in Question.__annotations__.items():
        _check_type(getattr(question, name), str(getattr(kind, "__forward_arg__", kind)), name)
    if not (1 <= question.batch < 2**62 and 1 <= question.work < 2**62):
        raise ValueError(f"batch and work are {question.batch:.3g} and {question.work:.3g}")
    for name in ("at", "date"):
        _check_type(data[name], "str", name)
    ways = {}
    for way, (median, iqr) in data["ways"].items():
        for value in (median, iqr):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{way} takes {value!r:.40} ms")
        ways[way] = Timed(float(median), float(iqr))
        if not (0 < ways[way].median_ms < math.inf and 0 <= ways[way].iqr_ms < math.inf):
            raise ValueError(f"{way} takes {median} ms, give or take {iqr}")
    if ways and "torch" not in ways:  # all are compared with it
        raise ValueError("it has no time of torch")
    return Entry(question, data["at"], data["date"], ways)


def folder() -> Path | None:
    """Where the user's tables are, if anywhere."""
    return cache.folder("calibration")


def _slug(host: Host) -> str:
    """Of all tables of a host: readable, and different for different hosts."""
    tensors, name, _ = host
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return f"{tensors}-{words}-{sha256(repr(host).encode()).hexdigest()[:8]}"


def path_of(machine: Machine) -> Path | None:
    """The file of a machine's table."""
    where = folder()
    if where is None:
        return None
    return where / f"{_slug(machine.host)}-{sha256(repr((machine.driver, machine.gl)).encode()).hexdigest()[:8]}.json"


def load(host: Host) -> tuple[list[Table], list[tuple[Path, str]]]:
    """The user's tables of a host, and the files that are none, each with what is wrong with it."""
    tables: list[Table] = []
    wrong: list[tuple[Path, str]] = []
    where = folder()
    try:
        paths = [] if where is None else sorted(where.glob(f"{_slug(host)}-*.json"))
    except OSError as error:
        return [], [(where or Path(), str(error))]
    for path in paths:
        try:
            table = read(path)
            if table.machine.host != host or path_of(table.machine) != path:
                raise ValueError(f"it was measured on another device, {table.machine.name} {table.machine.renderer}")
            tables.append(table)
        except (OSError, ValueError) as error:
            wrong.append((path, str(error)))
    return tables, wrong


def read(path: Path) -> Table:
    """The table in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no table.
    """
    if not path.is_file():  # opening a pipe would wait for somebody to write to it
        raise ValueError("it is no file")
    return parse(path.read_text(encoding="utf-8"), path)


def without(entries: Iterable[Entry], wrong: Collection[tuple[str, str]]) -> list[Entry]:
    """Entries without the times of some ways of some verbs, (verb, way)."""
    return [
        replace(one, ways={way: timed for way, timed in one.ways.items() if (one.question.verb, way) not in wrong})
        for one in entries
    ]


def store(
    machine: Machine,
    entries: Iterable[Entry],
    weak: Collection[Question] = (),
    wrong: Collection[tuple[str, str]] = (),
) -> Path:
    """Add measurements to the user's table of a machine; returns its path. A file that is no table is replaced.
    Those of jobs that are `weak` replace no others. Ways of verbs, (verb, way), that are `wrong` leave the table.

    Processes that do so at once wait for each other, and whoever reads meanwhile finds a whole file.

    Raises:
        InputError: $GPU_LOD_CACHE is "off".
        FileError: the folder cannot be written to.
    """
    path = path_of(machine)
    if path is None:
        raise InputError(NOTHING_KEPT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            table = Table(machine, (), path)
            with suppress(OSError, ValueError):
                found = read(path)
                table = found if found.machine == machine else table
            merged = table.merged(entries, weak)
            whole_file.write(path, replace(merged, entries=tuple(without(merged.entries, wrong))).as_text().encode())
    except OSError as error:
        raise _not_kept(path.parent, error) from None
    return path


def _not_kept(where: Path, error: OSError) -> FileError:
    return FileError(
        f"the times cannot be kept in {where}: {error}. Set GPU_LOD_CACHE to a folder that can be written to."
    )


@contextmanager
def _locked(where: Path) -> Iterator[None]:
    import fcntl

    with (where / ".lock").open("a") as lock:  # closing it unlocks it
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def measuring() -> Iterator[None]:
    """While this process measures, with no other one that would keep its times in the same folder.

    Raises:
        CalibrationBusyError: there is one.
        FileError: the folder cannot be written to, as far as that shows before there are times.
    """
    import fcntl
    import tempfile

    where = folder()
    with ExitStack() as stack:
        try:
            assert where is not None
            where.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((where / ".measuring").open("a"))  # closing it unlocks it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (where / ".lock").open("a").close()
            tempfile.TemporaryFile(dir=where).close()  # the locks may be there from a time when it took new files
        except BlockingIOError:
            raise CalibrationBusyError(
                f"another process calibrates for {where} now, and times of two at once would be wrong. Wait until it "
                "is done, or stop it."
            ) from None
        except OSError as error:
            assert where is not None
            raise _not_kept(where, error) from None
        yield


def forget() -> list[Path]:
    """Remove the user's tables, of all machines; returns their paths.

    Raises:
        FileError: one cannot be removed.
    """
    where = folder()
    removed = []
    try:
        for path in sorted(where.glob("*-????????-????????.json")) if where else []:  # as `path_of` names them
            path.unlink()
            removed.append(path)
    except OSError as error:
        raise FileError(f"the tables in {where} cannot be removed: {error}.") from None
    return removed
