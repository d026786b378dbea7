"""What calls take at their peak: bench/results/memory/<device>.json and the tables of docs/memory.md.

python bench/bench_memory.py [--quick] [--allocators] [--gradients] [--out FILE]
python bench/bench_memory.py --doc   put the tables of all result files into docs/memory.md

Each call runs in a process of its own, forked before OpenGL or torch's threads were started. It is made once, so that
shaders are compiled and libraries loaded, and all that it took is given back; what it takes the second time is the
highest resident size the system saw during it, less the size before it. Foreign pages can only add to that, so what is
above the bound is measured again, and the least counts. The bound is twice the result plus 1.8 times the picture: a
chain of RGB in RGBA texels is 1.78 pictures. Beside it stands `ALLOWANCE`, which small pictures use. Where gradients
are asked for, it is that of the forward; what the backward takes stands beside it. Allocators are not held to it.
`--allocators` and `--gradients` measure these alone, and leave the other rows of the file as they were.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import torch
from bench_allocate import BUDGET, PATCH, given_to, ready
from rows import COMMIT
from study import Study

import gpu_lod as lod
from gpu_lod.feature_passes import FeatureTexture

SIZES = (
    (1, 3, 1024, 1024),
    (1, 3, 1080, 1920),
    (1, 3, 1001, 777),
    (8, 3, 512, 512),
    (1, 3, 48, 16384),
    (1, 3, 224, 224),
    (1, 3, 448, 448),
    (1, 4, 511, 511),
    (32, 3, 224, 224),
)
GRADIENT_SIZES = (1, 3, 1024, 1024), (8, 3, 512, 512)
ALLOCATED_SIZES = (1, 3, 1024, 1024), (1, 3, 2048, 2048), (32, 3, 224, 224)
QUICK_SIZES, QUICK_VERBS, QUICK_ALLOCATORS = ((2, 3, 256, 320),), ("mipmap", "foveate"), ("GridTopK",)
DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
BACKENDS = ("gl", "torch")
RUNS = 3
FIXATION = torch.tensor([0.4, 0.6])
OF_RESULT, OF_PICTURE = 2.0, 1.8
ALLOWANCE = {"gl": 2**18, "torch": 3 * 2**20}
"""Bytes beside the bound, whatever the sizes. gl: what one and the same call varies by. torch: what is made on the way
of pictures of one part, of up to `planewise.PART` texels: smaller parts would take chains up to twice the time."""

Data = dict[str, Any]
Call = Callable[[str], Any]


def _patches(image: torch.Tensor) -> Call:
    sites = lod.cortical_sites(FIXATION, budget=273, size=tuple(image.shape[-2:]), patch=14)
    sites = sites.expand(image.shape[0], -1, -1)
    return lambda backend: lod.gather_patches(image, sites, patch=14, backend=backend)


def _many_patches(budget: int, image: torch.Tensor, normalised: bool = False) -> Call:
    """Anywhere, of levels 0 to 5."""
    sites = torch.rand(len(image), budget, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 1, 5.0])
    values = {"mean": [0.5] * image.shape[1], "std": [0.2] * image.shape[1]} if normalised else {}
    return lambda backend: lod.gather_patches(image, sites, patch=14, backend=backend, **values)


def _every_patch(image: torch.Tensor) -> Call:
    """Of the grid, as a vision transformer takes them."""
    height, width = (n // 16 for n in image.shape[-2:])
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    x, y = (x.flatten() + 0.5) * 16 / image.shape[-1], (y.flatten() + 0.5) * 16 / image.shape[-2]
    sites = torch.stack([x, y, torch.zeros_like(x)], dim=-1)
    return lambda backend: lod.gather_patches(image, sites, patch=16, backend=backend)


def _collapse(image: torch.Tensor) -> Call:
    bands = lod.laplacian(image, backend="torch")
    return lambda backend: lod.collapse(bands, backend=backend)


def _cull(image: torch.Tensor) -> Call:
    """A tenth of what there is passes."""
    bounds, threshold = lod.hiz(image, backend="torch"), 0.9 * (255 if image.dtype == torch.uint8 else 1)

    def call(backend: str) -> list[torch.Tensor]:
        found = lod.cull(bounds, threshold, backend=backend)
        return [found.mask, found.indices, found.pruned]

    return call


def _region(reduce: Any, image: torch.Tensor) -> Call:
    bounds, verb = lod.hiz(image, reduce, backend="torch"), lod.region_max if reduce == "max" else lod.region_min
    boxes = torch.rand(image.shape[0], 256, 4, generator=torch.Generator().manual_seed(1)).sort(-1).values
    return lambda backend: verb(bounds, boxes, backend=backend)


def _log_polar(image: torch.Tensor) -> Call:
    rings = 64 if max(image.shape[-2:]) < 512 else 256
    return lambda backend: lod.log_polar(image, FIXATION, rings, 2 * rings, backend=backend)


def _with_a_graph(image: torch.Tensor) -> Call:
    """What a forward takes, and what stays until its backward."""
    return _log_polar(image.requires_grad_())


def _sites(image: torch.Tensor) -> Call:
    size = tuple(image.shape[-2:])
    points = FIXATION.expand(image.shape[0], 2)
    return lambda _: lod.cortical_sites(points, budget=273, size=size, patch=14)


def _allocated(name: str, image: torch.Tensor, relevance: bool = True) -> Call:
    """273 patches of 16 x 16, or as many as there are."""
    batch, (height, width) = len(image), (-(-n // PATCH) for n in image.shape[-2:])
    allocator = ready(name, min(BUDGET, height * width), PATCH, "cpu")
    given = given_to(allocator, batch, "cpu")
    if relevance:
        given["relevance"] = torch.rand(batch, height, width, generator=torch.Generator().manual_seed(1))

    def call(_: str) -> list[torch.Tensor]:
        with torch.no_grad():  # of what is learned
            found = allocator(image, **given)
        return [found.patches, found.sites, found.scores]

    return call


VERBS: dict[str, Callable[[torch.Tensor], Call]] = {
    "mipmap": lambda x: lambda backend: lod.mipmap(x, backend=backend),
    "hiz": lambda x: lambda backend: lod.hiz(x, backend=backend),
    "gaussian": lambda x: lambda backend: lod.gaussian(x, backend=backend),
    "laplacian": lambda x: lambda backend: lod.laplacian(x, backend=backend),
    "collapse": _collapse,
    "oriented_energy": lambda x: lambda backend: lod.oriented_energy(x, backend=backend),
    "log_polar": _log_polar,
    "log_polar, gradients asked for": _with_a_graph,
    "inverse_log_polar": lambda x: (
        lambda backend: lod.inverse_log_polar(x, FIXATION, tuple(x.shape[-2:]), backend=backend)
    ),
    "inverse_log_polar, to 64 x 64": lambda x: (
        lambda backend: lod.inverse_log_polar(x, FIXATION, (64, 64), backend=backend)
    ),
    "log_polar, 1024 x 1024": lambda x: lambda backend: lod.log_polar(x, FIXATION, 1024, 1024, backend=backend),
    "log_polar, cortical, 1024 x 1024": lambda x: (
        lambda backend: lod.log_polar(x, FIXATION, 1024, 1024, spacing="cortical", backend=backend)
    ),
    "log_polar, drawn, 1024 x 1024": lambda x: (
        lambda backend: lod.log_polar(x, FIXATION, 1024, 1024, generator="fragment", backend=backend)
    ),
    "foveate": lambda x: lambda backend: lod.foveate(x, FIXATION, backend=backend),
    "foveate, anisotropy 4": lambda x: lambda backend: lod.foveate(x, FIXATION, anisotropy=4, backend=backend),
    "gather_patches": _patches,
    "gather_patches, anywhere": partial(_many_patches, 273),
    "gather_patches, anywhere, normalised": partial(_many_patches, 273, normalised=True),
    "gather_patches, 16,384 of them": partial(_many_patches, 16384),
    "gather_patches, every one of the grid": _every_patch,
    "feature_maps": lambda x: lambda backend: lod.feature_maps(x, fixation=FIXATION, backend=backend),
    "feature_maps, as_texture": lambda x: (
        lambda backend: lod.feature_maps(x, fixation=FIXATION, as_texture=True, backend=backend)
    ),
    "cull": _cull,
    "region_max": partial(_region, "max"),
    "region_min": partial(_region, "min"),
    "cortical_sites": _sites,
}
ALLOCATORS: dict[str, Callable[[torch.Tensor], Call]] = {
    "GridTopK, no relevance": partial(_allocated, "GridTopK", relevance=False),
    **{name: partial(_allocated, name) for name in lod.allocate.names()},
}

PYRAMIDS = {"collapse": lod.laplacian, "cull": lod.hiz, "region_max": lod.hiz, "region_min": lod.hiz}
"""What verbs take that take no picture."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ONLY = {
    "log_polar, gradients asked for": (FLOATS, ("gl",)),
    "log_polar, drawn, 1024 x 1024": (DTYPES, ("gl",)),
    "feature_maps, as_texture": (DTYPES, ("gl",)),
    "cortical_sites": (FLOATS[-1:], ("torch",)),  # of a fixation
    **dict.fromkeys(ALLOCATORS, (DTYPES[::3], ("torch",))),
}
"""Dtypes and backends of what has not all of them."""

GRADIENTS = tuple(verb for verb in VERBS if verb not in {*PYRAMIDS, *ONLY} and not verb.startswith("hiz"))
"""Whose forwards and backwards are measured in plain torch."""
GRADIENT_DTYPES = (torch.float16, torch.float32)

_COUNTS = ("picture", "result", "peak", "backward")
_ROW = {
    "type": "object",
    "required": ["verb", "dtype", "backend", "shape", "picture", "result", "peak"],
    "properties": {
        "verb": {"enum": [*VERBS, *ALLOCATORS]},
        "dtype": {"enum": [str(dtype)[6:] for dtype in DTYPES]},
        "backend": {"enum": list(BACKENDS)},
        "shape": {"type": "array", "minItems": 4, "maxItems": 4, "items": {"type": "integer", "minimum": 1}},
        **{key: {"type": "integer", "minimum": 0} for key in _COUNTS},
    },
    "additionalProperties": False,
}
_PART = {
    "type": "object",
    "required": ["commit", "date", "rows"],
    "properties": {"rows": {"type": "array", "minItems": 1, "items": _ROW}},
}
SCHEMA: Data = {
    "type": "object",
    "required": ["device", "cpu", "threads", "versions", "commit", "date", "rows"],
    "properties": {
        "rows": {"type": "array", "minItems": 1, "items": _ROW},
        "gradients": _PART,
        "allocators": _PART,
    },
}


def picture(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return values.mul_(255).to(dtype) if dtype == torch.uint8 else values.to(dtype)


def nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, FeatureTexture):
        return value.texture.key.nbytes
    return sum(map(nbytes, value.levels if isinstance(value, lod.Pyramid) else value))


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def _backward(result: Any, image: torch.Tensor) -> Callable[[], object]:
    levels = [result] if isinstance(result, torch.Tensor) else list(result)
    levels = [level for level in levels if level is not image]
    weights = [torch.ones_like(level) for level in levels]
    return lambda: torch.autograd.grad(levels, image, weights, retain_graph=True)


def _peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and the bytes that it takes at its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest size so far
    before = _resident("VmRSS")
    result = call()
    return result, max(_resident("VmHWM") - before, 0)


def _one(
    verb: str, dtype: torch.dtype, backend: str, shape: tuple[int, ...], gradients: bool = False
) -> dict[str, int]:
    """The picture, the result, the peak, and, where gradients are asked for, that of the backward, in bytes. Runs in a
    process of its own."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed is the system's again at once
    image = picture(dtype, shape).requires_grad_(gradients)
    call = {**VERBS, **ALLOCATORS}[verb](image)
    result = call(backend)
    if gradients:
        _backward(result, image)()
    del result
    if backend == "gl" or verb in ALLOCATORS:  # whose patches "auto" may read by OpenGL
        gc.collect()
        lod.Context().trim()
    given = image.nbytes
    if verb == "cortical_sites":
        given = FIXATION.expand(shape[0], 2).contiguous().nbytes
    elif verb in PYRAMIDS:
        given = nbytes(PYRAMIDS[verb](image, backend="torch"))
    result, peak = _peak(partial(call, backend))
    found = {"picture": given, "result": nbytes(result), "peak": peak}
    if gradients:
        found["backward"] = _peak(_backward(result, image))[1]
    return found


def measure(
    verbs: Iterable[str], sizes: tuple[tuple[int, ...], ...], runs: int = RUNS, gradients: bool = False
) -> list[Data]:
    rows = []
    # A fresh process a call; this one must start neither OpenGL nor torch's threads. What it holds is frozen: to look
    # through all of torch for garbage takes a process longer than most calls, and copies every page.
    gc.collect()
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for verb in verbs:
            dtypes, backends = ONLY.get(verb, (DTYPES, BACKENDS))
            if gradients:
                dtypes, backends = GRADIENT_DTYPES, ("torch",)
            for shape in sizes:
                for dtype in (dtype for dtype in DTYPES if dtype in dtypes):
                    for backend in backends:
                        row: Data = {"verb": verb, "dtype": str(dtype)[6:], "backend": backend, "shape": list(shape)}
                        for _ in range(runs):
                            found = pool.apply(_one, (verb, dtype, backend, shape, gradients))
                            row |= {key: min(value, row.get(key, value)) for key, value in found.items()}
                            if share(row) <= 1:
                                break
                        rows.append(row)
            print(f"{verb} measured" + ", with its backward" * gradients, file=sys.stderr)
    return rows


def share(row: Data) -> float:
    """Of the bound."""
    return float(row["peak"] / (OF_RESULT * row["result"] + OF_PICTURE * row["picture"]))


def tables(path: Path) -> str:
    data: Data = json.loads(path.read_text("utf-8"))
    jsonschema.validate(data, SCHEMA)
    lines = [["verb", "dtype", "result"], ["---"] * 3]
    for backend in BACKENDS:
        lines[0] += [f"backend={backend!r}", "share of the bound, at worst"]
        lines[1] += ["---"] * 2
    calls = data["rows"]
    first = calls[0]["shape"]
    for verb in dict.fromkeys(row["verb"] for row in calls):
        for dtype in DTYPES:
            own = [row for row in calls if row["verb"] == verb and row["dtype"] == str(dtype)[6:]]
            if not own:
                continue
            shown = [row for row in own if row["shape"] == first]
            cells = [f"`{verb}`", str(dtype)[6:], f"{shown[0]['result'] / shown[0]['picture']:.2f}"]
            for backend in BACKENDS:
                here = next((row for row in shown if row["backend"] == backend), None)
                if here is None:
                    cells += [""] * 2
                    continue
                worst = max((row for row in own if row["backend"] == backend), key=share)
                over = worst["peak"] * (1 - 1 / share(worst)) / 2**20
                cells.append(f"{here['peak'] / here['picture']:.2f}")
                cells.append(f"{share(worst):.2f}" + (f" ({over:.1f} MiB over, {_name(worst)})" if over > 0 else ""))
            lines.append(cells)
    sizes = ", ".join(dict.fromkeys(_name(row) for row in calls))
    return "\n\n".join(
        [
            f"### {data['device']}, {data['date']}",
            f"The result, and the peak beside the picture, in pictures of {_name(calls[0])} (of "
            "`cortical_sites`, which takes none, in fixations of 8 bytes); and the largest "
            f"share of the bound among {sizes} ([file](../bench/results/memory/{path.name}), torch "
            f"{data['versions']['torch']}).",
            _table(lines),
            *_with_gradients(data.get("gradients")),
            *_of_allocators(data.get("allocators")),
        ]
    )


def _with_gradients(data: Data | None) -> list[str]:
    if data is None:
        return []
    rows = data["rows"]
    lines = [["verb", "dtype", "forward, share of the bound", "backward, pictures of fp32"], ["---"] * 4]
    for verb, dtype in dict.fromkeys((row["verb"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["verb"], row["dtype"]) == (verb, dtype)]
        wide = 4 // getattr(torch, dtype).itemsize
        worst = max(map(share, own)), max(row["backward"] / (wide * row["picture"]) for row in own)
        lines.append([f"`{verb}`", dtype, *(f"{value:.2f}" for value in worst)])
    sizes = ", ".join(dict.fromkeys(_name(row) for row in rows))
    about = (
        f"Where gradients are asked for, in plain torch, at worst among {sizes}: the forward, and the backward beside "
        f"the gradient that it is given ({data['date']}, commit {data['commit']})."
    )
    return [about, _table(lines)]


def _of_allocators(data: Data | None) -> list[str]:
    if data is None:
        return []
    shapes = list(dict.fromkeys(_name(row) for row in data["rows"]))
    kinds = [(str(dtype)[6:], shape) for dtype in ONLY["GridTopK"][0] for shape in shapes]
    lines = [["allocator", *(f"{dtype}, {shape}" for dtype, shape in kinds)], ["---"] * (1 + len(kinds))]
    for name in dict.fromkeys(row["verb"] for row in data["rows"]):
        own = {(row["dtype"], _name(row)): row["peak"] / row["picture"] for row in data["rows"] if row["verb"] == name}
        lines.append([name, *(f"{own[kind]:.2f}" for kind in kinds)])
    about = (
        f"Allocators, {BUDGET} patches of {PATCH} x {PATCH} (of fewer all), relevance given: the peak beside the "
        f"pictures, the result too, in those ({data['date']}, commit {data['commit']})."
    )
    return [about, _table(lines)]


def _table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _name(row: Data) -> str:
    batch, channels, height, width = row["shape"]
    return f"{batch} x {channels} x {height} x {width}"


STUDY = Study(
    __doc__ or "",
    folder="memory",
    document="memory.md",
    marks=("<!-- tables: python bench/bench_memory.py --doc -->", "<!-- end of the tables -->"),
    quick="one small size, once",
    tables=tables,
    schema=SCHEMA,
)


def main(arguments: list[str] | None = None) -> int:
    parser = STUDY.parser()
    for part in ("allocators", "gradients"):
        parser.add_argument(f"--{part}", action="store_true", help="measure these, and keep the other rows of the file")
    return STUDY.run(_measured, arguments, parser)


def _measured(options: Namespace) -> Data:
    quick, everything = options.quick, not (options.allocators or options.gradients)

    def part(rows: list[Data]) -> Data:
        return {"commit": COMMIT, "date": time.strftime("%Y-%m-%d"), "rows": rows}

    data: Data = {}
    if everything:
        data["rows"] = measure(QUICK_VERBS, QUICK_SIZES, 1) if quick else measure(VERBS, SIZES)
    else:
        data = json.loads(STUDY.path_of(options).read_text("utf-8"))
    if everything or options.gradients:
        found = measure(QUICK_VERBS, QUICK_SIZES, 1, True) if quick else measure(GRADIENTS, GRADIENT_SIZES, RUNS, True)
        data["gradients"] = part(found)
    if everything or options.allocators:
        found = measure(QUICK_ALLOCATORS, QUICK_SIZES, 1) if quick else measure(ALLOCATORS, ALLOCATED_SIZES)
        data["allocators"] = part(found)
    return data


if __name__ == "__main__":
    sys.exit(main())
