"""What an encoder costs on a token set: bench/results/encoder/<device>.json and the table of docs/encoders.md.

python bench/bench_encoder.py [--quick] [--out FILE]
python bench/bench_encoder.py --doc   put the tables of all result files into docs/encoders.md

A SigLIP vision tower of the shape of ViT-B/16 with random weights, fp32, on a picture of 1024 x 1024. "full grid" is
the untouched model on all 4096 patches. The others are `lod.vlm.encode`, from the picture to the features, allocation
included. Then, on a picture of 23 x 23 patches, the model's own forward beside the adapter's on the same 529 tokens:
what an adapter adds.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timer
import torch
from inputs import declare_vision_operators, picture
from study import Study
from timer import race

import gpu_lod as lod

FULL, OWN, ADAPTER = "full grid", "the model's own forward, 529 tokens", "the adapter, the same 529 tokens"
Data = dict[str, Any]


def tower(side: int, quick: bool) -> Any:
    """Random weights, ViT-B/16."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    if not quick:
        shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    torch.manual_seed(0)
    return SiglipVisionModel(SiglipVisionConfig(image_size=side, patch_size=16, **shape)).eval()


def measure(quick: bool) -> list[Data]:
    side = 512 if quick else 1024
    image = picture(side, side) * 2 - 1
    relevance = torch.rand(1, side // 16, side // 16, generator=torch.Generator().manual_seed(0))
    large, small = tower(side, quick), tower(23 * 16, quick)
    cell = picture(23 * 16, 23 * 16) * 2 - 1
    every = lod.allocate.GridTopK(529, 16)(cell, torch.arange(529.0).flip(0).view(1, 23, 23))
    adapter = lod.vlm.adapter_for(small)
    choices = {
        "GridTopK, 273, relevance given": (lod.allocate.GridTopK(273, 16), relevance),
        "GridTopK, 273": (lod.allocate.GridTopK(273, 16), None),
        "FoveatedPyramid, 273": (lod.allocate.FoveatedPyramid(273, 16), None),
        "Saccades of FoveatedPyramid, 256 + 273": (lod.vlm.Saccades(lod.allocate.FoveatedPyramid(273, 16)), None),
    }
    first: dict[str, Callable[[], object]] = {FULL: partial(large, image)}
    for name, (allocator, maps) in choices.items():
        first[name] = partial(lod.vlm.encode, large, image, allocator, relevance=maps)
    second: dict[str, Callable[[], object]] = {OWN: partial(small, cell), ADAPTER: partial(adapter, every, (368, 368))}
    rows = []
    with torch.no_grad():
        assert torch.allclose(small(cell).last_hidden_state, adapter(every, (368, 368)).hidden, atol=1e-4)
        for size, sides in ((side, first), (368, second)):
            few = {"fewest": 4, "most": 4, "warm_up": 1} if size == side and not quick else {}
            for name, timing in race(sides, seconds=0.1 if quick else 6.0, **few).items():
                rows.append({"job": name, "size": [size, size], **timing.as_dict()})
    return rows


def tables(path: Path) -> str:
    data: Data = json.loads(path.read_text("utf-8"))
    times = {row["job"]: row for row in data["rows"]}
    lines = [["job", "ms", f"{FULL} / this"], ["---"] * 3]
    for name, row in times.items():
        ratio = f"{times[FULL]['median_ms'] / row['median_ms']:.1f}x" if name not in (FULL, OWN, ADAPTER) else ""
        lines.append([name, f"{row['median_ms']:.0f} ± {row['iqr_ms'] / 2:.0f}", ratio])
    own, adapter = times[OWN], times[ADAPTER]
    added = adapter["median_ms"] / own["median_ms"] - 1
    beside = f"{abs(added):.1%} {'more' if added > 0 else 'less'} than"
    if abs(adapter["median_ms"] - own["median_ms"]) <= max(adapter["iqr_ms"], own["iqr_ms"]) / 2:
        beside = "as long, within the spread, as"
    return "\n\n".join(
        [
            f"### {data['device']}, {data['date']}",
            f"Milliseconds, median ± half the interquartile range ([file](../bench/results/encoder/{path.name}), torch "
            f"{data['versions']['torch']}, transformers {data['versions']['transformers']}). The adapter takes "
            f"{beside} the model's own forward on the same 529 tokens.",
            "\n".join("| " + " | ".join(line) + " |" for line in lines),
        ]
    )


STUDY = Study(
    __doc__ or "",
    folder="encoder",
    document="encoders.md",
    marks=("<!-- tables: python bench/bench_encoder.py --doc -->", "<!-- end of tables -->"),
    quick="a tiny model",
    tables=tables,
    packages=("transformers",),
)


def main(arguments: list[str] | None = None) -> int:
    def measured(options: Namespace) -> Data:
        if options.quick:
            timer.TRIES = 1
        declare_vision_operators()
        return {"rows": measure(options.quick)}

    return STUDY.run(measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
