"""Learned allocators, trained for a task on pictures that it does not test on.

For features that is photographs which scikit-image brings and the task leaves out, in crops and flips; for OCR, pages
drawn with other seeds, so of other text in other places, on such photographs. A quarter of them is held out, and the
proxy (`proxy.py`) is reported on those, before and after. Training is single-threaded, seeded, and in one order:
weights are the same whoever asks first. They are kept in out/quality/learned under a digest of what they depend on.

PseudoLogPolar has parameters for each of its K tokens and is trained at every budget; the others at MIDDLE alone, since
their parameters do not depend on K. The fixation is by turns each that rows have. AdaptiveStratified is asked the same
constant query always, so that it learns one grid for the task: the 49 errors are those of `Stratified`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from gpu_lod.allocate.adaptive_stratified import COARSEST, FINEST
from gpu_lod.allocate.adaptive_stratified import AdaptiveStratified as Adaptive
from gpu_lod.allocate.base import Need
from gpu_lod.allocate.losses import dead_bin_loss
from gpu_lod.allocate.pseudo_log_polar import PseudoLogPolar as Retina
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.soft_top_k_coverage import SoftTopKCoverage as Coverage
from gpu_lod.allocate.soft_vortex import SoftVortex as Soft
from gpu_lod.allocate.stratified import Stratified
from gpu_lod.allocate.vortex_learned import VortexLearned as Vortices
from gpu_lod.errors import UnsupportedError
from gpu_lod.saliency import saliency
from quality.proxy import Example, example

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "out" / "quality" / "learned"
MIDDLE = 150
BESIDE = 0.1
"""Weight of an allocator's own loss beside the proxy: repulsion of vortices, dead bins of the retina."""
PHOTOGRAPHS = ("camera", "coins", "immunohistochemistry", "retina", "brick", "gravel", "moon", "motorcycle")
CROP, CROPS = 448, 2
PAGES = range(1000, 1004)
"""Seeds; those of a test begin at 0."""
PAPER = ("coins", "immunohistochemistry", "gravel", "camera")
"""Photographs that text is drawn on; those of a test are `pages.PHOTOGRAPHS`."""


class Trained:
    """Weights of an allocator's class for a task, from the cache or trained now."""

    trained_on: ClassVar[str] = "a task"
    each_budget: ClassVar[bool] = False
    steps: ClassVar[int] = 240
    rate: ClassVar[float] = 0.05

    def __init__(self, budget: int, patch: int, task: str | None = None, **arguments: Any) -> None:
        super().__init__(budget, patch, **arguments)  # type: ignore[call-arg]
        if task is not None:
            self.load_state_dict(weights(type(self), budget, patch, task)["state"])  # type: ignore[attr-defined]
            self.eval()  # type: ignore[attr-defined]

    @staticmethod
    def depends() -> str:
        return _digest()

    def prepare(self, examples: list[Example]) -> None:
        """What is computed once, before the first step."""

    def error(self, example: Example, turn: int) -> torch.Tensor:
        """The proxy on one picture."""
        raise NotImplementedError

    def own_loss(self, example: Example, turn: int) -> torch.Tensor:
        """What its authors would have beside the proxy."""
        return torch.zeros(())


class AdaptiveStratified(Trained, Adaptive):
    needs: ClassVar[tuple[Need, ...]] = ("relevance",)
    takes: ClassVar[tuple[Need, ...]] = ("query",)
    query = torch.tensor([1.0, -1.0]).repeat(4)

    def __init__(self, budget: int, patch: int, task: str | None = None) -> None:
        super().__init__(budget, patch, task, width=len(self.query))

    def _scene(self, image: Any, relevance: Any, query: Any, fixation: Any, labels: Any) -> tuple[Scene, bool]:
        return super()._scene(image, relevance, self.query if query is None else query, fixation, labels)

    def prepare(self, examples: list[Example]) -> None:
        sides = range(COARSEST, FINEST + 1)
        makers = [[Stratified(self.budget, self.patch, strata=(rows, columns)) for columns in sides] for rows in sides]
        self.losses = {
            id(one): torch.stack([torch.stack([one.masked(_taken(one, maker)) for maker in row]) for row in makers])
            for one in examples
        }

    def error(self, example: Example, turn: int) -> torch.Tensor:
        return self.expected_loss(self.losses[id(example)][None], self.query[None])


class SoftTopKCoverage(Trained, Coverage):
    def error(self, example: Example, turn: int) -> torch.Tensor:
        return example.masked(self.soft_mask(relevance=example.relevance))


class VortexLearned(Trained, Vortices):
    def error(self, example: Example, turn: int) -> torch.Tensor:
        scene, _ = self._scene(None, example.relevance, None, None, None)
        return example.masked(self._soft(scene, self._log_pull(scene))[1].float())

    def own_loss(self, example: Example, turn: int) -> torch.Tensor:
        return self.repulsion((example.relevance.shape[1], example.relevance.shape[2]))


class SoftVortex(Trained, Soft):
    def _blended(self, *given: Any) -> torch.Tensor:
        """Counts, as those of allocators that do not blend: pictures are uint8."""
        return (255 * super()._blended(*given)).round().to(torch.uint8)

    def error(self, example: Example, turn: int) -> torch.Tensor:
        return example.seen(self(relevance=example.relevance).sites, blends=True)


class PseudoLogPolar(Trained, Retina):
    each_budget = True
    steps, rate = 60, 0.01

    def error(self, example: Example, turn: int) -> torch.Tensor:
        place = example.places[turn % len(example.places)]
        return example.seen(self(relevance=example.relevance, fixation=place).sites, blends=False)

    def own_loss(self, example: Example, turn: int) -> torch.Tensor:
        return dead_bin_loss(
            self.mass(relevance=example.relevance, fixation=example.places[turn % len(example.places)])
        )


KINDS: tuple[type[Any], ...] = (AdaptiveStratified, PseudoLogPolar, SoftTopKCoverage, SoftVortex, VortexLearned)


def weights(kind: type[Any], budget: int, patch: int, task: str) -> dict[str, Any]:
    """`state` of a class for a task, and its proxy on the held-out pictures, `untrained` and `trained`.

    Raises:
        UnsupportedError: there is nothing to train on for that task.
    """
    if task not in SETS:
        raise UnsupportedError(f"there are no pictures to train on for {task}; there are for {', '.join(SETS)}.")
    path = _path(kind, budget, patch, task)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(train(kind, budget if kind.each_budget else MIDDLE, patch, task), unfinished)
        os.replace(unfinished, path)
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def trained(tasks: Sequence[str], budgets: Sequence[int], patch: int = 14) -> list[dict[str, Any]]:
    """What training did to the proxy on held-out pictures, of the weights that there are: for a result file."""
    found = []
    for task in tasks:
        for kind in KINDS:
            for budget in budgets if kind.each_budget else [MIDDLE]:
                path = _path(kind, budget, patch, task)
                if path.exists():
                    line = torch.load(path, weights_only=True)
                    numbers = {key: round(line[key], 5) for key in ("untrained", "trained")}
                    found.append({"method": f"{kind.__name__}, trained", "task": task, "budget": budget, **numbers})
    return found


def train(kind: type[Any], budget: int, patch: int, task: str) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over several differ in the last bits
    try:
        examples = _examples(task, patch)
        with torch.enable_grad():
            return fitted(kind(budget, patch), examples)
    finally:
        torch.set_num_threads(threads)


def fitted(allocator: Any, examples: tuple[Example, ...]) -> dict[str, Any]:
    """Adam, one picture a step by turns; every fourth picture is held out."""
    held, used = examples[3::4], [one for number, one in enumerate(examples) if number % 4 != 3]
    allocator.prepare(list(examples))

    def proxy() -> float:
        allocator.eval()
        with torch.no_grad():
            errors = [float(allocator.error(one, turn)) for turn, one in enumerate(held)]
        allocator.train()
        return sum(errors) / len(errors)

    untrained = proxy()
    optimiser = torch.optim.Adam(allocator.parameters(), lr=allocator.rate)
    for step in range(allocator.steps):
        one, turn = used[step % len(used)], step // len(used) + step
        optimiser.zero_grad()
        (allocator.error(one, turn) + BESIDE * allocator.own_loss(one, turn)).backward()
        optimiser.step()
    return {"state": allocator.state_dict(), "untrained": untrained, "trained": proxy()}


def _taken(one: Example, allocator: Any) -> torch.Tensor:
    """bool [Hg, Wg]: the level-0 patches that an allocator chooses."""
    rows, columns = one.relevance.shape[1:]
    x, y, _ = allocator(relevance=one.relevance).sites[0].unbind(-1)
    mask = torch.zeros(rows * columns)
    return mask.scatter(0, (y * rows).long() * columns + (x * columns).long(), 1.0).view(rows, columns)


@cache
def _examples(task: str, patch: int) -> tuple[Example, ...]:
    return tuple(SETS[task](patch))


def _photographs(patch: int) -> Iterator[Example]:
    from skimage import data

    lots = np.random.default_rng(0)
    for _ in range(CROPS):
        for name in PHOTOGRAPHS:
            pixels = data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(data, name)()
            pixels = pixels[::2, ::2] if name == "retina" else pixels
            pixels = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels
            top, left = (int(lots.integers(max(1, n - CROP + 1))) for n in pixels.shape[:2])
            crop = torch.from_numpy(pixels[top : top + CROP, left : left + CROP].copy()).permute(2, 0, 1).contiguous()
            crop = crop.flip(-1) if lots.integers(2) else crop
            yield example(crop, saliency(crop, "gradient")[0] if lots.integers(2) else _salient(crop), patch)


def _pages(patch: int) -> Iterator[Example]:
    from quality import ocr, pages

    for seed in PAGES:
        for number, style in enumerate(pages.STYLES):
            picture = ocr.picture_of(pages.drawn(style, seed, PAPER))
            kind = sorted(picture.relevance)[(seed + number) % len(picture.relevance)]
            yield example(picture.image, picture.relevance[kind], patch, picture.target)


def _salient(image: torch.Tensor) -> torch.Tensor:
    from gpu_lod.feature_channels import saliency_map

    return saliency_map(image[None])[0]


SETS = {"features": _photographs, "ocr": _pages}


def _path(kind: type[Any], budget: int, patch: int, task: str) -> Path:
    at = budget if kind.each_budget else MIDDLE
    return CACHE / f"{task}-{kind.__name__}-{at}-{patch}-{_digest()}.pt"


@cache
def _digest() -> str:
    """Of all that weights depend on."""
    from quality.methods import code_of

    code = [(HERE / name).read_text("utf-8") for name in ("pages.py", "ocr.py", "reading.py")]
    code += [code_of(f"quality.{name}") for name in ("learned", "proxy")]  # and of the allocators that they import
    code += [version(name) for name in ("torch", "numpy", "scikit-image", "pillow", "matplotlib")]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]
