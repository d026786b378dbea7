"""What a token memory keeps of a video: bench/results/streaming/<device>.json and a table of docs/encoders.md.

python bench/bench_streaming.py [--quick] [--out FILE]
python bench/bench_streaming.py --doc   put the tables of all result files into docs/encoders.md

Three videos of each of three photographs: the camera pans over it, 3 pixels a frame; an object, the middle of the next
photograph, moves over it, 4 pixels a frame; and it stands still under noise that is new at every frame. Relevance is
the saliency of each frame. `lod.vlm.TokenMemory` is as it comes, and without hysteresis (margin 0), where it holds the
K most relevant patches at every frame; `GridTopK` chooses and reads afresh. All but the times is the same on every run;
those are taken on one thread, which does not wait for others.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import jsonschema
import torch
from quality.summary import interval
from skimage import data as photographs
from study import Study

import gpu_lod as lod
from gpu_lod.feature_channels import saliency_map

PATCH, BUDGET, SIZE = 14, 128, (252, 336)
"""18 x 24 patches, of which 128 are held."""
FRAMES, QUICK_FRAMES = 48, 4
PAN, STEP, NOISE = 3, 4, 6.0
"""Pixels a frame, pixels a frame, and counts."""
OBJECT = 70
NAMES = ("astronaut", "chelsea", "coffee")
MEMORIES: dict[str, dict[str, Any]] = {"hysteresis": {}, "none": {"margin": 0.0}}
AFRESH = "afresh"
Data = dict[str, Any]

_INTERVAL = {
    "type": "object",
    "required": ["mean", "low", "high", "n"],
    "additionalProperties": {"type": "number"},
}  # fmt: skip
_TIME = {"type": "object", "required": ["median", "iqr"], "additionalProperties": {"type": "number", "minimum": 0}}
_ROW = {
    "type": "object",
    "required": ["scene", "memory", "churn", "held", "refreshed", "ms"],
    "properties": {
        "scene": {"enum": ["pan", "object", "noise"]},
        "memory": {"enum": [*MEMORIES, AFRESH]},
        **dict.fromkeys(("churn", "held", "refreshed"), _INTERVAL),
        "ms": _TIME,
    },
    "additionalProperties": False,
}
SCHEMA: Data = {
    "type": "object",
    "required": ["device", "cpu", "threads", "versions", "commit", "date", "budget", "patch", "size", "frames", "rows"],
    "properties": {"rows": {"type": "array", "minItems": 9, "maxItems": 9, "items": _ROW}},
}


def panned(photo: torch.Tensor, other: torch.Tensor, frames: int) -> Iterator[torch.Tensor]:
    """There and back, where the photograph ends."""
    height, width = SIZE
    for place in range(0, frames * PAN, PAN):
        room = photo.shape[2] - width
        left = place % (2 * room)
        left = min(left, 2 * room - left)
        yield photo[:, :height, left : left + width]


def with_object(photo: torch.Tensor, other: torch.Tensor, frames: int) -> Iterator[torch.Tensor]:
    height, width = SIZE
    y, x = (other.shape[1] - OBJECT) // 2, (other.shape[2] - OBJECT) // 2
    for number in range(frames):
        frame = photo[:, :height, :width].clone()
        left = number * STEP % (width - OBJECT)
        frame[:, 90 : 90 + OBJECT, left : left + OBJECT] = other[:, y : y + OBJECT, x : x + OBJECT]
        yield frame


def noisy(photo: torch.Tensor, other: torch.Tensor, frames: int) -> Iterator[torch.Tensor]:
    lots = torch.Generator().manual_seed(0)
    still = photo[:, : SIZE[0], : SIZE[1]].float()
    for _ in range(frames):
        yield (still + NOISE * torch.randn(still.shape, generator=lots)).round().clamp(0, 255).to(torch.uint8)


Scene = Callable[[torch.Tensor, torch.Tensor, int], Iterator[torch.Tensor]]
SCENES: dict[str, Scene] = {"pan": panned, "object": with_object, "noise": noisy}


def watched(frames: Iterator[torch.Tensor]) -> dict[str, dict[str, list[float]]]:
    """Of each memory, and of choosing afresh: what each frame after the first gave."""
    memories = {name: lod.vlm.TokenMemory(BUDGET, PATCH, **how) for name, how in MEMORIES.items()}
    grid = lod.allocate.GridTopK(BUDGET, PATCH)
    found: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in ("churn", "held", "refreshed", "ms")} for name in (*MEMORIES, AFRESH)
    }
    before: set[tuple[float, ...]] = set()
    for number, frame in enumerate(frames):
        frame = frame[None].contiguous()
        relevance = saliency_map(frame)
        start = time.perf_counter()
        tokens = grid(frame, relevance)
        ms = (time.perf_counter() - start) * 1e3
        best = float(tokens.scores.sum())
        now = set(map(tuple, tokens.sites[0].tolist()))
        lines = {AFRESH: (len(now - before) / BUDGET, 1.0, 1.0, ms)}
        before = now
        for name, memory in memories.items():
            start = time.perf_counter()
            seen = memory.update(frame, relevance)
            ms = (time.perf_counter() - start) * 1e3
            held = float(seen.tokens.scores.sum()) / best
            lines[name] = float(seen.churn), held, float(seen.refreshed.float().mean()), ms
        for name, line in lines.items() if number else ():  # at the first, everything is new
            for key, value in zip(found[name], line, strict=True):
                found[name][key].append(value)
    return found


def measure(frames: int) -> list[Data]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        photos = [torch.from_numpy(getattr(photographs, name)()).permute(2, 0, 1) for name in NAMES]
        pairs = list(zip(photos, photos[1:] + photos[:1], strict=True))
        return [
            row_of(scene, memory, [video[memory] for video in videos])
            for scene, make in SCENES.items()
            for videos in [[watched(make(photo, other, frames)) for photo, other in pairs]]
            for memory in (*MEMORIES, AFRESH)
        ]
    finally:
        torch.set_num_threads(threads)


def row_of(scene: str, memory: str, videos: list[dict[str, list[float]]]) -> Data:
    low, middle, high = quantiles((ms for video in videos for ms in video["ms"]), n=4)
    shares = {key: interval(fmean(video[key]) for video in videos) for key in ("churn", "held", "refreshed")}
    ms = {"median": round(middle, 4), "iqr": round(high - low, 4)}
    return {"scene": scene, "memory": memory, **shares, "ms": ms}


def tables(path: Path) -> str:
    data: Data = json.loads(path.read_text("utf-8"))
    jsonschema.validate(data, SCHEMA)
    lines = [["video", "memory", "sites replaced", "relevance held", "patches read", "ms a frame"], ["---"] * 6]
    words = {
        "pan": "pan",
        "object": "moving object",
        "noise": "noise",
        "none": "no hysteresis",
        AFRESH: "none: chosen afresh",
    }
    for row in data["rows"]:
        cells = [words[row["scene"]], words.get(row["memory"], row["memory"])]
        cells += [_percent(row[key]) for key in ("churn", "held", "refreshed")]
        lines.append([*cells, f"{row['ms']['median']:.2f} ± {row['ms']['iqr'] / 2:.2f}"])
    height, width = data["size"]
    return "\n\n".join(
        [
            f"### {data['device']}, {data['date']}",
            f"{data['budget']} of {height // data['patch']} x {width // data['patch']} patches, {data['frames']} "
            f"frames of {height} x {width}; means over {len(NAMES)} photographs with their 95% intervals, a frame; the "
            f"relevance of the best {data['budget']} is 100% ([file](../bench/results/streaming/{path.name}), torch "
            f"{data['versions']['torch']}). Times are on one thread and without the saliency, "
            "median ± half the interquartile range.",
            "\n".join("| " + " | ".join(line) + " |" for line in lines),
        ]
    )


def _percent(value: Data) -> str:
    return f"{value['mean']:.1%} ± {50 * (value['high'] - value['low']):.1f}"


STUDY = Study(
    __doc__ or "",
    folder="streaming",
    document="encoders.md",
    marks=("<!-- tables: python bench/bench_streaming.py --doc -->", "<!-- end of the tables of streaming -->"),
    quick="a few frames",
    tables=tables,
    schema=SCHEMA,
    packages=("scipy",),
)


def main(arguments: list[str] | None = None) -> int:
    def measured(options: Namespace) -> Data:
        frames = QUICK_FRAMES if options.quick else FRAMES
        what = {"budget": BUDGET, "patch": PATCH, "size": list(SIZE), "frames": frames}
        return {**what, "rows": measure(frames)}

    return STUDY.run(measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
