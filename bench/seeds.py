"""Make the tables that `backend="auto"` goes by where nobody has calibrated: gpu_lod/data/, from bench/results/.

python bench/seeds.py

From bench/results/*.json and, of machines that are at hand no more, bench/results/earlier/*.json. Where several rows
are one job to `auto` (it cannot know how much of a map culling will prune), the one where OpenGL gains least counts.

And from bench/results/calibrated/*.json: tables of `gpu-lod calibrate`, as it wrote them. Where several files of a
machine know the same job, the latest measurement counts, as the code was another one before; of one day that of a
result file, which has more calls in it and the worst of several rows.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench_log_polar import RINGS, WEDGES
from bench_pyramids import AND_BACK
from bench_samplers import ANISOTROPIC, BUDGET, IMAGE, WITH_BACKWARD
from inputs import ANEW
from rows import slug

from gpu_lod import dispatch
from gpu_lod.foveate import state as foveated
from gpu_lod.gather_patches import WHOLE
from gpu_lod.gaussian import EIGHTS, RAGGED
from gpu_lod.region import BOX
from gpu_lod.report.files import load
from gpu_lod.report.text import on_cuda
from gpu_lod.tables import Entry, Machine, Question, Table, Timed, read

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "gpu_lod" / "data"

OWN = {
    "torch polyphase", "torch sums", "torch rows then columns", "torch rows as channels", "torch descent",
    "torch strided sums", "torch one call", "torch two levels a ring, split over threads",
    "torch coarse to fine, boxes", "torch sites of a level together", "torch gather",
}  # fmt: skip
"""Sides of rows that are the verb with backend="torch": what `auto` would take, be it the fastest torch way or not."""


SINCE = {
    "foveate": "2026-11-25",
    "oriented_energy": "2026-11-25",
    "feature_maps": "2026-11-25",
    "gather_patches": "2026-11-25",
}
"""Verbs that a way became much faster of, and the day: earlier results say nothing of what it is now."""
SINCE_ON_CPU = {"inverse_log_polar": "2026-11-30"}
SINCE_ON_CUDA = {"oriented_energy": "2026-11-27", "feature_maps": "2026-11-27"}
"""The same of tensors of one kind alone."""
SINCE_WITHOUT_TEXTURE = {"region_max": "2026-11-30"}
"""The same of what is no texture yet, where plain torch came to be the faster."""


def results() -> list[Path]:
    return [*sorted((HERE / "results").glob("*.json")), *sorted((HERE / "results" / "earlier").glob("*.json"))]


def calibrated() -> list[Path]:
    return sorted((HERE / "results" / "calibrated").glob("*.json"))


def table(data: dict[str, Any]) -> Table:
    """The seed from a result file."""
    cuda = on_cuda(data)
    machine = Machine(
        tensors="cuda" if cuda else "cpu",
        name=data["device"] if cuda else data["cpu"],
        threads=0 if cuda else data["threads"],
        driver=data["cuda_driver"] if cuda else "",
        renderer=data["gl_renderer"] if cuda else data["device"],
        gl_driver=data["driver"],
        software=data["software"],
    )
    entries: dict[Question, Entry] = {}
    rows = [row for row in data["rows"] if data["date"] >= _since(row["verb"], cuda)]
    alone = [row for row in rows if not row["note"].endswith(AND_BACK)]
    for row in alone:
        for entry in _entries(row, data["date"], cuda):
            known = entries.setdefault(entry.question, entry)
            if _gain(entry) < _gain(known):
                entries[entry.question] = entry
    for row in rows:  # two verbs that were timed together, where neither was by itself
        if row["note"].endswith(AND_BACK):
            for entry in _entries(row, data["date"], cuda):
                entries.setdefault(entry.question, entry)
    for row in alone if cuda else ():  # and pictures that come from memory, where none from a cache answers
        for entry in _entries(row, data["date"], cuda, "cold"):
            entries.setdefault(entry.question, entry)
    return Table(machine, ()).merged(entries.values())


def _counts(entry: Entry, cuda: bool) -> bool:
    """Whether it says what the verb is now."""
    since = [_since(entry.question.verb, cuda)]
    if entry.question.state == dispatch.NO_TEXTURE:
        since.append(SINCE_WITHOUT_TEXTURE.get(entry.question.verb, ""))
    return entry.date >= max(since)


def _since(verb: str, cuda: bool) -> str:
    return max(SINCE.get(verb, ""), (SINCE_ON_CUDA if cuda else SINCE_ON_CPU).get(verb, ""))


def _gain(entry: Entry) -> float:
    torchs = entry.ways["torch"].median_ms
    return max((torchs / timed.median_ms for way, timed in entry.ways.items() if way != "torch"), default=0.0)


def _entries(row: dict[str, Any], date: str, cuda: bool, cache: str = "warm") -> Iterator[Entry]:
    if row["part"] != "end to end" or row["cache"] != cache:
        return
    for question in _questions(row):
        ways = _ways(row, dispatch.ways(question.verb, cuda=cuda))
        if "torch" in ways:
            shape = [row["batch"], row["channels"], *row["size"]]
            words = [f"{' x '.join(map(str, shape))} {row['dtype']}", *filter(None, [row["note"].partition(";")[0]])]
            words += [ANISOTROPIC] * row["note"].endswith(ANISOTROPIC) + _made(row)
            yield Entry(question, ", ".join(words), date, ways)


def _polar(row: dict[str, Any]) -> tuple[int, int]:
    """Rings and wedges of the map that a log_polar row makes."""
    if row["note"].startswith("a batch in one call"):
        return 64, 128
    found = re.match(r"(\d+) x (\d+), ", row["note"])
    return (int(found[1]), int(found[2])) if found else (RINGS, WEDGES)


def _patches(row: dict[str, Any]) -> tuple[int, int]:
    """How many patches a gather_patches row reads, and their side."""
    if row["note"].startswith("a batch in one call"):
        return 64, 14
    found = re.match(r"(\d+) x (\d+) x (\d+), ", row["note"])
    return (int(found[1]), int(found[2])) if found else (BUDGET, 14)


def _made(row: dict[str, Any]) -> list[str]:
    """What a sampler makes, which its times depend on, in words where the note does not say it."""
    if re.match(r"\d+ x \d+", row["note"]):
        return []
    if row["verb"] == "log_polar":
        return ["to a map of {} x {}".format(*_polar(row))]
    return ["{0} patches of {1} x {1}".format(*_patches(row))] * (row["verb"] == "gather_patches")


def _ways(row: dict[str, Any], known: tuple[str, ...]) -> dict[str, Timed]:
    """By the names that the verb has for them. "torch" is what the verb does in torch, or where a row has no such side
    its fastest torch way. Compiled or captured torch is a program's own, and nothing that a verb could take."""
    found: dict[str, Timed] = {}
    own = OWN & row["sides"].keys()
    for side, timing in row["sides"].items():
        timed = Timed(timing["median_ms"], timing["iqr_ms"])
        if side in row.get("other_job", []) or side.startswith(("torch compiled", "torch graph")):
            continue
        fits = side in own if own else side.startswith("torch ")
        if fits and ("torch" not in found or timed.median_ms < found["torch"].median_ms):
            found["torch"] = timed
        name = {"gl": "gl compute", "gl one call": "gl compute", "cuda kernels": "cuda"}.get(side, side)
        if name in known:
            found[name] = timed
        elif name == "gl compute" and "gl" in known:
            found["gl"] = timed
    return found


def _questions(row: dict[str, Any]) -> Iterable[Question]:
    """What the verb asks before it does the row's job."""
    verb, note, batch, channels, dtype = (row[name] for name in ("verb", "note", "batch", "channels", "dtype"))
    height, width = row["size"]
    if note.endswith(WITH_BACKWARD):  # whose forward alone is chosen
        return []
    area, planes, together = height * width, batch * channels, note.startswith("a batch in one call")
    if together and note.endswith(IMAGE):  # nothing is asked
        return []

    def sampler(work: int, state: str = "") -> list[Question]:
        return [Question(verb, state, channels, dtype, batch, batch * work)]

    def maps(names: tuple[str, ...], state: str = "") -> list[Question]:
        return [Question(name, state, 0, dtype, planes, planes * area) for name in names]

    if verb == "mipmap":
        return [Question(verb, "mean", channels, dtype, batch, planes * area)]
    if verb in ("gaussian", "laplacian", "collapse"):
        timed = ("laplacian", "collapse") if note.endswith(AND_BACK) else (verb,)
        return maps(timed, RAGGED if width % EIGHTS else "")
    if verb in ("hiz", "oriented_energy", "cull"):
        return maps((verb,))
    if verb in ("region_max", "region_min") and (boxes := re.search(r"(\d+) boxes", note)):
        state = dispatch.NO_TEXTURE if note.endswith(ANEW) else ""
        return [Question("region_max", state, 0, dtype, planes, planes * (area + BOX * int(boxes[1])))]
    if verb == "feature_maps":
        state = "ragged rows" if width % 4 else ""
        made = dtype if together else note.rpartition(" ")[2]  # the maps' own dtype
        return [Question(verb, state, 0, made, batch, batch * area)]
    if verb == "inverse_log_polar":
        return sampler(area)
    if verb == "foveate" and "torch has kept" not in note and note != IMAGE:
        whole_words = width % {"uint8": 4, "float16": 2}.get(dtype, 1) == 0
        probes = int(ANISOTROPIC.split()[-1]) if note.endswith(ANISOTROPIC) else 1
        how = foveated(texture=not note.endswith(ANEW), whole_words=whole_words, anisotropic=probes > 1)
        return sampler(area * probes, how)
    there = not note.endswith(ANEW)
    if verb == "log_polar" and not note.startswith("from an image"):
        return sampler(math.prod(_polar(row)), dispatch.textured(there))
    if verb == "gather_patches" and not note.endswith(IMAGE):
        count, side = _patches(row)
        return sampler(count * side**2, dispatch.textured(there, WHOLE if "sites on the grid" in note else ""))
    return []


def merged(calibrations: Iterable[Table], results: Iterable[Table]) -> list[Table]:
    """A table a machine."""
    found: dict[Machine, list[Entry]] = {}
    for known in (*calibrations, *results):
        fresh = [entry for entry in known.entries if _counts(entry, known.machine.tensors == "cuda")]
        found.setdefault(known.machine, []).extend(fresh)
    by_date = attrgetter("date")  # results stay behind calibrations of the same day
    return [Table(machine, ()).merged(sorted(entries, key=by_date)) for machine, entries in found.items()]


def name(machine: Machine) -> str:
    """Of a seed's file."""
    if machine.tensors == "cuda":
        return slug(f"cuda {machine.name} driver {machine.driver}")
    return slug(f"cpu {machine.name} {machine.threads} threads {machine.renderer.partition('(')[0]}")


def write(target: Path = DATA) -> list[Path]:
    """A file for each machine."""
    made: dict[str, str] = {}
    alike: Counter[str] = Counter()  # machines that differ in their OpenGL alone
    for seed in merged(map(read, calibrated()), (table(load(path)) for path in reversed(results()))):
        stem = name(seed.machine)
        alike[stem] += 1
        made[f"{stem}-{alike[stem]}" if alike[stem] > 1 else stem] = seed.as_text()
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.json"):
        old.unlink()
    for stem, text in made.items():
        (target / f"{stem}.json").write_text(text)
    return sorted(target.glob("*.json"))


if __name__ == "__main__":
    sys.stdout.writelines(f"wrote {path}\n" for path in write())
