"""A forward and its backward, by shaders and in torch: bench/results/gradients/<device>.json, and a table of
docs/gradients.md.

python bench/bench_gradients.py [--quick] [--out FILE]
python bench/bench_gradients.py --doc   put the tables of all result files into docs/gradients.md

From a picture, of which nothing is made yet, to its gradient, at a new place each. Ways take turns. "graph" is the
torch that a verb would take, differentiated by torch, where the verb has a backward of its own.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import jsonschema
import torch
from inputs import picture
from study import Study
from timer import race

import gpu_lod as lod
from gpu_lod import binomial, quadrature
from gpu_lod.gather_patches import Look
from gpu_lod.inverse_log_polar import Frame
from gpu_lod.log_polar import ring_rule
from gpu_lod.mipmap import reference as mip_chain

# Verbs hide the modules of their names.
_feature_maps, _foveate, _gather_patches, _inverse_log_polar, _log_polar = (
    sys.modules[f"gpu_lod.{name}"]
    for name in ("feature_maps", "foveate", "gather_patches", "inverse_log_polar", "log_polar")
)

WAYS = "gl", "torch", "auto", "graph"
SHAPES = (1, 3, 1024, 1024), (8, 3, 256, 256)
BUDGET, LEVELS, E0, MAP = 273, 5, 0.05, (256, 512)
SECONDS = 2.0
"""Of a way."""
Data = dict[str, Any]
Call = Callable[[torch.Tensor, torch.Tensor, Any], Any]
"""Of a picture, a place [B, 2] and a backend."""
Graph = Callable[[torch.Tensor, torch.Tensor], Any]


def _map_of(image: torch.Tensor) -> torch.Tensor:
    return lod.log_polar(image, (0.5, 0.5), *MAP, backend="torch")


def _sites(image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return lod.cortical_sites(at, BUDGET, (image.shape[-2], image.shape[-1]))


def _sampled(image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    rule = ring_rule(*MAP, None, 0.7, "log", E0)
    return _log_polar._made(mip_chain(image), at, rule, "clamp")


def _drawn(polar: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return _inverse_log_polar._made(polar, at, Frame((512, 512), *MAP, 0.01, 0.7, False, True))


def _foveated(anisotropy: float, image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    levels = _foveate._levels(image, at, E0, 0.0)
    return _foveate._made(mip_chain(image, levels), at, E0, 0.0, anisotropy)


def _patches(image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    look = Look(14, False, None, (), image.dtype)
    return _gather_patches._made(mip_chain(image), _sites(image, at), look)


def _energies(image: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
    levels = [image]
    while len(levels) < LEVELS:
        levels.append(binomial.reduce(levels[-1]))
    return [quadrature._energy(level, 4, level.dtype) for level in levels]


def _maps(image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return _feature_maps._made(image, at, None, None, image.dtype, False)


JOBS: dict[str, tuple[str, Call, Graph | None]] = {
    "mipmap": ("all levels", lambda x, _, way: lod.mipmap(x, backend=way).levels[1:], None),
    "gaussian": ("all levels", lambda x, _, way: lod.gaussian(x, backend=way).levels[1:], None),
    "laplacian": ("all levels", lambda x, _, way: lod.laplacian(x, backend=way).levels, None),
    "log_polar": (
        f"{MAP[0]} x {MAP[1]} samples", lambda x, at, way: lod.log_polar(x, at, *MAP, backend=way), _sampled,
    ),
    "inverse_log_polar": (
        f"512 x 512 from {MAP[0]} x {MAP[1]}",
        lambda x, at, way: lod.inverse_log_polar(x, at, (512, 512), backend=way), _drawn,
    ),
    "foveate": ("", lambda x, at, way: lod.foveate(x, at, backend=way), partial(_foveated, 1.0)),
    "foveate, anisotropic": (
        "anisotropy 4", lambda x, at, way: lod.foveate(x, at, anisotropy=4, backend=way), partial(_foveated, 4.0),
    ),
    "gather_patches": (
        f"{BUDGET} x 14 x 14, cortical sites",
        lambda x, at, way: lod.gather_patches(x, _sites(x, at), backend=way), _patches,
    ),
    "oriented_energy": (f"{LEVELS} levels", lambda x, _, way: lod.oriented_energy(x, LEVELS, backend=way), _energies),
    "feature_maps": ("40 channels", lambda x, at, way: lod.feature_maps(x, at, backend=way), _maps),
}  # fmt: skip
"""By name: what is made, the verb, and the same by a graph of torch's own."""

_TIMES = {
    "type": "object",
    "required": ["median_ms", "iqr_ms"],
    "additionalProperties": {"type": "number", "minimum": 0},
}
_ROW = {
    "type": "object",
    "required": ["job", "what", "shape", "ways"],
    "properties": {
        "job": {"enum": [*JOBS]},
        "ways": {"type": "object", "required": ["gl", "torch", "auto"], "additionalProperties": _TIMES},
    },
}
SCHEMA: Data = {
    "type": "object",
    "required": ["device", "cpu", "threads", "versions", "commit", "date", "rows"],
    "properties": {"rows": {"type": "array", "minItems": 1, "items": _ROW}},
}


def sides(job: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, Callable[[], torch.Tensor]]]:
    """What the gradients are in, and for each way what gives the next one."""
    _, verb, graph = JOBS[job]
    batch, channels, height, width = shape
    image = picture(height, width, batch=batch, channels=channels)
    image = (_map_of(image) if job == "inverse_log_polar" else image).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    places = [torch.rand(batch, 2, generator=generator) for _ in range(16)]

    def results(made: Any) -> list[torch.Tensor]:
        return [made] if isinstance(made, torch.Tensor) else list(made)

    weights = [torch.rand(one.shape, generator=generator) for one in results(verb(image.detach(), places[0], "torch"))]

    def there_and_back(make: Callable[[torch.Tensor, torch.Tensor], Any], at: Iterator[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor
        (found,) = torch.autograd.grad(results(make(image, next(at))), image, weights)
        return found

    ways: dict[str, Graph] = {way: lambda x, at, way=way: verb(x, at, way) for way in WAYS[:3]}  # type: ignore[misc]
    if graph is not None:
        ways["graph"] = graph
    return image, {way: partial(there_and_back, make, cycle(places)) for way, make in ways.items()}


def measure(jobs: list[str], shapes: tuple[tuple[int, ...], ...], seconds: float) -> list[Data]:
    rows: list[Data] = []
    for job in jobs:
        for shape in shapes:
            _, calls = sides(job, shape)
            times = {
                way: {"median_ms": round(found.median_ms, 3), "iqr_ms": round(found.iqr_ms, 3)}
                for way, found in race(calls, seconds=seconds).items()
            }
            rows.append({"job": job, "what": JOBS[job][0], "shape": list(shape), "ways": times})
            print(rows[-1], file=sys.stderr)
    return rows


def tables(path: Path) -> str:
    data: Data = json.loads(path.read_text("utf-8"))
    jsonschema.validate(data, SCHEMA)
    head = ["", "picture", "forward by a shader, ms", "by torch", "by `auto`", "by a graph of torch's own"]
    lines = [head, ["---"] * len(head)]
    for row in data["rows"]:
        name = f"`{row['job'].partition(',')[0]}`"
        shown = [row["ways"].get(way) for way in WAYS]
        times = ["" if one is None else f"{one['median_ms']:.3g}" for one in shown]
        lines.append([", ".join(filter(None, [name, row["what"]])), " x ".join(map(str, row["shape"])), *times])
    return "\n\n".join(
        [
            f"On {data['device']}, {data['date']} ([file](../bench/results/gradients/{path.name}), torch "
            f"{data['versions']['torch']}):",
            "\n".join("| " + " | ".join(line) + " |" for line in lines),
        ]
    )


STUDY = Study(
    __doc__ or "",
    folder="gradients",
    document="gradients.md",
    marks=("<!-- tables: python bench/bench_gradients.py --doc -->", "<!-- end of the tables of gradients -->"),
    quick="small, and short",
    tables=tables,
    schema=SCHEMA,
)


def main(arguments: list[str] | None = None) -> int:
    def measured(options: Namespace) -> Data:
        if options.quick:
            return {"rows": measure(["gather_patches", "mipmap"], ((2, 3, 64, 64),), 0.02)}
        return {"rows": measure([*JOBS], SHAPES, SECONDS)}

    return STUDY.run(measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
