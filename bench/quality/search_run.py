"""Task c, visual search: `search` as `run.py` runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import gpu_lod as lod
from gpu_lod import vlm
from gpu_lod.errors import GpuLodError
from quality import search, search_scenes, search_training, summary
from quality.methods import FULL, ORACLE, class_of, code_of
from quality.search_cuts import CUTS
from quality.search_learned import LOSSES
from quality.task import HERE, Found, Metric, Plan, Task, digest_of, digest_of_files, reason_of


@dataclass(frozen=True)
class Unit:
    """One of `search`, and where it is filed."""

    own: search.Unit
    place: dict[str, Any]

    @property
    def groups(self) -> tuple[str, ...]:
        """The reader of a seed, and what is trained with it."""
        own, seed = self.own, f"seed {self.own.seed}"
        trained = [own.relevance] if own.relevance in ("trained", "start") else []
        trained += [f"{own.allocator}, {own.budget}"] if own.allocator in LOSSES else []
        return (seed, *(f"{seed}, {what}" for what in trained))

    @property
    def timed(self) -> bool:
        return self.own.seed == 0 and self.place["budget"] is not None


class VisualSearch(Task):
    name = "search"
    title = "Visual search"
    sources = ("memory.py", *sorted(path.name for path in HERE.glob("search*.py")))
    libraries = (*Task.libraries, "scikit-image", "scikit-learn")  # whose photographs and digits there are
    ms = "one call for a picture, patches included, from a pyramid and a relevance map"
    metrics = (
        Metric("answers", "share of questions that are answered rightly", accuracy=True),
        Metric("place", "of those that ask by place, each seed's share a value", accuracy=True),
        Metric("colour", "of those that ask by the colour of the frame", accuracy=True),
    )

    def __init__(self) -> None:
        super().__init__()
        self._form, self._folder = search.QUICK, Path()

    def settings(self) -> dict[str, Any]:
        return {
            "reader": "one a seed, for all allocators; trained on tokens of " + ", ".join(search_training.MIXTURE)
            + " drawn evenly, with relevance about some of the digits; seeds share the training pictures, not the "
            "order nor the start, and have test pictures of their own",
            "error": "deviation, in sides, of the noise on the place that the query's relevance or the oracle is about",
            "by_eccentricity": "[right, asked] by the digit's distance from the fixation in sides; from the picture's "
            "centre where there is no fixation",
            "trained": "relevance and allocators on training pictures alone, by way of the reader as it is; a row "
            'named "untrained" is the same allocator as it starts',
            "reader_ms": "one question by colour about one picture's tokens, with the cut of what cuts inside it",
            "chance": 1 / search_scenes.CLASSES,
        }  # fmt: skip

    def units(self, plan: Plan) -> list[Unit]:
        form = search.QUICK if plan.quick else search.full()
        names = tuple(name for name in form.allocators if plan.only is None or name in plan.only)
        self._form = replace(form, budgets=plan.budgets or form.budgets, seeds=plan.seeds, allocators=names)
        digest = self.digest_for(self._form)
        self._folder = plan.folder / "search" / digest
        return [Unit(unit, self._place(unit, digest)) for unit in search.units(self._form)]

    def digest_for(self, form: search.Form) -> str:
        """Of all that readers depend on, and what all units share."""
        same = json.dumps([form.pictures, asdict(form.training)])
        mixture = [code_of(class_of(name).__module__) for name in search_training.MIXTURE]
        return digest_of(self.digest.encode(), same.encode(), *(code.encode() for code in mixture))

    def _place(self, unit: search.Unit, digest: str) -> dict[str, Any]:
        place = {"task": self.name, "method": unit.allocator, **unit.place}
        del place["allocator"]
        if unit.allocator == search.FULL:
            place |= {"method": FULL.label, "budget": None}
        learns = unit.relevance in ("trained", "start") or unit.allocator in (*CUTS, *LOSSES)
        code = _code(unit.name) + (_vlm() if learns else "")
        return place | {"config": digest_of(digest.encode(), code.encode())}

    def compute(self, unit: Unit) -> Found:
        try:
            found = search.run(unit.own, self._form, self._folder, weights_in(self._folder, unit.own))
        except GpuLodError as error:
            return {"skipped": reason_of(error)}
        seed = unit.own.seed
        values = {kind: {f"seed {seed}": found[kind]} for kind in ("place", "colour")}
        values["answers"] = {f"seed {seed}, picture {i}": value for i, value in enumerate(found["pictures"])}
        return {
            "tokens": unit.own.budget,
            "coverage": found["coverage"],
            "peak_bytes": found["peak_bytes"],
            "values": values,
            "by_eccentricity": found["by_eccentricity"],
        }

    def time(self, unit: Unit) -> Found:
        return search.cost(unit.own, self._form, self._folder, weights_in(self._folder, unit.own))

    def told(self, method: str, fixation: str | None, relevance: str | None) -> str | None:
        """Where the place asked for is known, so it is by the query's relevance; the question, by the trained one."""
        if fixation == ORACLE:
            return "query"
        own = search.Unit(0, 0, method, relevance, fixation)
        return "trained" if method != FULL.label and relevance != "query" and own.by_kind else relevance

    def reads_all(self, method: str) -> bool:
        return method in CUTS

    def about(self) -> Found:
        side, cells = search_scenes.SIDE, search_training.GRID**2
        name = f"{self._form.pictures} photographs, {search_scenes.COUNT} digits of {search_scenes.DIGIT} px in each"
        about = "digits and photographs of the test are in no training picture"
        pictures = [
            {"name": name, "seed": seed, "size": [side, side], "about": about, "cells": cells}
            for seed in range(self._form.seeds)
        ]
        kinds = [unit.relevance for unit in search.units(replace(self._form, seeds=1)) if unit.relevance is not None]
        return {
            "relevance": list(dict.fromkeys(["saliency", *kinds])),
            "pictures": pictures,
            "budgets": list(self._form.budgets),
            "left_out": search.left_out(self._form),
        }


def interval(values: Sequence[float]) -> list[float]:
    """Of the mean, by Student's t."""
    found = summary.interval(values)
    return [fmean(values)] * 2 if found["low"] is None else [found["low"], found["high"]]


@cache
def _code(name: str) -> str:
    """A digest of what chooses; cuts inside the reader and the full picture are given what the baseline gives."""
    return code_of(class_of(name if name in lod.allocate.names() else search.BASELINE).__module__)


@cache
def _vlm() -> str:
    """A digest of what trains and cuts, and of the maps that relevance is learned from."""
    home = Path(str(lod.__file__)).parent
    maps = [home / f"{name}.py" for name in ("feature_maps", "feature_passes", "laplacian", "oriented_energy")]
    return digest_of_files([*Path(str(vlm.__file__)).parent.rglob("*.py"), *maps])


def weights_in(folder: Path, unit: search.Unit) -> Path:
    """Where scorers and allocators are kept that were trained by the code there is: those of other code are not."""
    own = _code(unit.allocator) if unit.allocator in LOSSES else ""
    return folder / digest_of(_vlm().encode(), own.encode())


def task() -> VisualSearch:
    return VisualSearch()
