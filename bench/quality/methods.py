"""Which allocators are compared, with which arguments, at which fixations."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import gpu_lod as lod

BASELINE = "GridTopK"
CENTRE, SALIENCY, ORACLE = "centre", "saliency", "oracle"
"""Where a method looks that takes a fixation: the middle of the picture; the peak of relevance; what is asked for."""

ABLATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "LogPolar": ({"fovea": 0.2}, {"fovea": 0.4}),  # the default is 0.3
    "Residual": ({"share": 0.9}, {"share": 0.1}),  # the default is the picture's own
    "Stratified": ({"strata": (8, 8)},),  # the default is 4 x 4
    "fovi": ({"reach": "corners"},),  # the default is a field of the picture's area
}
OWN = {
    "FoveatedPyramid, pyramid only": "ablations.PyramidOnly",
    "FoveatedPyramid, foveation only": "ablations.FoveationOnly",
    "Downsample, bias -0.75": "ablations.SharpDownsample",
    "Residual, bias -0.75": "ablations.SharpResidual",
    "fovi": "fovi_peer.Fovi",
    "resize": "resized.Resized",
    **{f"{name}, trained": f"learned.{name}" for name in (
        "AdaptiveStratified", "PseudoLogPolar", "SoftTopKCoverage", "SoftVortex", "VortexLearned",
    )},
}  # fmt: skip
"""What is compared beside the allocators of the package, and the class of this folder that does it: an allocator, or
what is called like one, has `choose(image, relevance, fixation)`, and gives no `TokenSet` but what has `rebuilt()`."""
READERS = (
    "rebuild", "token_margins", "enlarging", "gather_patches", "patch_windows", "patch_grid", "bilinear",
    "cortical_sites", "feature_maps", "saliency", "salient_cells", "mipmap", "halving", "gaussian", "binomial",
    "pyramid",
)  # fmt: skip
"""Modules beside the allocator's that decide what is rebuilt: saliency is read off a Gaussian pyramid."""


@dataclass(frozen=True)
class Method:
    """An allocator as it is compared: its arguments, where it looks, and which draw of those that draw lots."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    fixation: str | None = None
    draw: int | None = None

    @property
    def label(self) -> str:
        words = {"fovea": "fovea {:.0%}", "share": "tiles {:.0%}", "strata": "{0[0]} x {0[1]}"}
        return ", ".join([self.name, *(words.get(key, key + " {}").format(value) for key, value in self.arguments)])

    @property
    def looks(self) -> bool:
        """At relevance."""
        return self != FULL and "relevance" in class_of(self.name).needs

    @cached_property
    def digest(self) -> str:
        if self == FULL:
            code, other = "", ""
        else:
            made = class_of(self.name)
            code, other = code_of(made.__module__), made.depends() if hasattr(made, "depends") else ""
        return hashlib.sha256(json.dumps([code, other, self.arguments]).encode()).hexdigest()

    def make(self, budget: int, patch: int, task: str) -> Any:
        """
        Args:
            task: its name, for what is trained for one.
        """
        seed = {} if self.draw is None else {"seed": self.draw}
        made = class_of(self.name)
        for_task = {"task": task} if hasattr(made, "trained_on") else {}
        return made(budget, patch, **dict(self.arguments), **seed, **for_task)


FULL = Method("full image")
"""The upper bound: every patch there is."""


def class_of(name: str) -> Any:
    if name in OWN:
        module, _, own = OWN[name].partition(".")
        return getattr(importlib.import_module(f"quality.{module}"), own)
    return type(lod.allocate.make(name))


def left_out() -> dict[str, str]:
    """Methods that are not compared, and why."""
    reasons = {}
    for name in lod.allocate.names():
        allocator = class_of(name)
        if issubclass(allocator, lod.allocate.Learned):
            reasons[name] = "learned: what it starts with says nothing of it, and it is compared trained"
        elif lacking := set(allocator.needs) - {"image", "relevance", "fixation"}:
            reasons[name] = f"needs {', '.join(sorted(lacking))}"
    for name in OWN:
        own = class_of(name)
        if reason := own.absent() if hasattr(own, "absent") else "":
            reasons[name] = reason
    return reasons


def methods(seeds: int, quick: bool, only: Sequence[str] | None = None) -> list[Method]:
    """Every method that is not left out, and the ablations. Those that take a fixation have a row for each of the
    three; ablations of the quick form for saliency alone.

    Args:
        only: names as they are before a comma: what is trained, and ablations, come with the allocator.
    """
    found, out = [], left_out()
    for name in (*lod.allocate.names(), *OWN):
        if name in out or (only is not None and name.partition(",")[0] not in only):
            continue
        fixed = "fixation" in (*class_of(name).needs, *class_of(name).takes)
        for arguments in ({}, *ABLATIONS.get(name, ())):
            looks = ((SALIENCY,) if quick and arguments else (CENTRE, SALIENCY, ORACLE)) if fixed else (None,)
            for fixation in looks:
                for draw in range(seeds) if name == "Random" else (None,):
                    found.append(Method(name, tuple(arguments.items()), fixation, draw))
    return found


@cache
def code_of(module: str) -> str:
    """A digest of an allocator's source, of all that it imports from `gpu_lod.allocate`, of the verbs that those call,
    and of what reads pictures: the same at every commit that changes none of them."""
    wanted, seen = [module, *(f"gpu_lod.{name}" for name in READERS)], {}
    while wanted:
        name = wanted.pop()
        if name not in seen:
            path = importlib.import_module(name).__file__
            seen[name] = Path(str(path)).read_text("utf-8")
            wanted += re.findall(r"^from (gpu_lod\.allocate\.\w+) import", seen[name], re.MULTILINE)
            if name == module or name.startswith("gpu_lod.allocate."):
                wanted += re.findall(r"^from (gpu_lod\.(?!errors)\w+) import", seen[name], re.MULTILINE)
    return hashlib.sha256(json.dumps(sorted(seen.items())).encode()).hexdigest()
