"""Tables and plots from result files.

python bench/report.py [FILE]      the table on the terminal
python bench/report.py --readme    put the tables of all result files into README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- table: python bench/report.py --readme -->", "<!-- end of table -->"


def load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def _job(row: dict[str, Any]) -> str:
    height, width = row["size"]
    batch = "" if row["batch"] == 1 else f"{row['batch']} x "
    note = f"; {row['note']}" if row["note"] else ""
    if "torch one comparison" in row["sides"]:  # the honest opponent of cull, which gives the mask alone
        note += f"; for the mask alone one torch comparison takes {_ms(row, 'torch one comparison')}"
    if "gl a call for each image" in row["sides"]:
        note += f"; a call for each image takes {_ms(row, 'gl a call for each image')}"
    if row.get("dropped"):  # of no machine's OpenGL, or of this machine's compiler: the file says why
        note += f"; without {', '.join(sorted(row['dropped']))}"
    return f"{batch}{row['channels']} x {height} x {width} {row['dtype']}, {row['cache']}{note}"


def _ms(row: dict[str, Any], side: str) -> str:
    timing = row["sides"][side]
    return f"{timing['median_ms']:.3g} ± {timing['iqr_ms'] / 2:.2g}"


def _best(row: dict[str, Any], prefix: str) -> str | None:
    """The fastest side that does the row's job; files name it where both OpenGL and torch have one."""
    names = [name for name in row["sides"] if name.startswith(prefix) and name not in row.get("other_job", [])]
    return row.get(f"best_{prefix}") or min(names, key=lambda name: row["sides"][name]["median_ms"], default=None)


def _verdict(row: dict[str, Any]) -> str:
    if "gl_speedup" not in row:
        return ""
    speedup = row["gl_speedup"]
    return f"{speedup:.2f}x" if speedup >= 1 else f"{speedup:.2f}x (slower)"


def _cells(row: dict[str, Any]) -> list[str]:
    gl, best = _best(row, "gl"), _best(row, "torch")
    auto = "auto" in row["sides"]
    return [
        row["verb"],
        _job(row),
        f"{gl.removeprefix('gl').strip() or 'gl'}: {_ms(row, gl)}" if gl else "",
        f"{best.removeprefix('torch ')}: {_ms(row, best)}" if best else "",
        _verdict(row),
        f"{_ms(row, 'auto')}{'' if row.get('auto_ok', True) else ' (behind)'}" if auto else "",
        f"{row['floor_ms']:.3g}",
    ]


HEADINGS = ["verb", "job", "best GL, ms", "best torch, ms", "GL against torch", "auto, ms", "floor, ms"]


def on_cuda(data: dict[str, Any]) -> bool:
    return bool(data.get("tensors") == "cuda")


def _machine(data: dict[str, Any]) -> str:
    if on_cuda(data):
        return f"{data['device']}, CUDA tensors, driver {data['cuda_driver']}, CUDA {data['cuda']}"
    return f"{data['device']}, {data['cpu']}, {data['threads']} cores"


def _left_out(data: dict[str, Any]) -> str:
    """What the file says is missing."""
    parts = []
    if data.get("left_out"):
        parts.append(f"Left out for lack of time: {', '.join(data['left_out'])}.")
    if data.get("failures"):
        parts.append(f"Failed: {', '.join(dict.fromkeys(one['name'] for one in data['failures']))}.")
    return " ".join(parts)


def table(path: Path) -> Table:
    """Every row, for a terminal."""
    data = load(path)
    result = Table(*HEADINGS, title=f"{_machine(data)}, {data['date']}", caption=_left_out(data) or None)
    for row in data["rows"]:
        style = "" if row.get("gl_speedup", 1) >= 1 else "dim"
        result.add_row(*_cells(row), style=style)
    return result


def markdown(path: Path) -> str:
    """The rows of the README: warm fp32 at the common sizes, and everything that is not a plain mip chain or Hi-Z."""
    data = load(path)
    clock = " of the wall clock, with a synchronise behind every call" if on_cuda(data) else ""
    lines = [
        f"Measured on {_machine(data)}, torch {data['versions']['torch']}, {data['date']} "
        f"([file](bench/results/{path.name})). Median ± half the interquartile range{clock}, milliseconds.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + " --- |" * len(HEADINGS),
    ]
    for row in data["rows"]:
        if row["verb"] in ("mipmap", "hiz") and (
            row["size"] not in ([224, 224], [1024, 1024], [777, 1001], [4096, 4096])
        ):
            continue
        lines.append("| " + " | ".join(_cells(row)) + " |")
    if missing := _left_out(data):
        lines += ["", missing]
    return "\n".join(lines)


def readme_tables() -> str:
    return "\n\n".join(markdown(path) for path in sorted((HERE / "results").glob("*.json")))


def with_tables(text: str) -> str:
    """README text with the tables between the two marks brought up to date."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{readme_tables()}\n\n{END}{tail}"


def plot(path: Path, target: Path) -> None:
    """Time over image size for each verb, best GL way against best torch way and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = load(path)
    verbs = ["mipmap", "hiz", "log_polar"]
    figure, axes = plt.subplots(1, len(verbs), figsize=(13, 4.2), layout="constrained")
    for axis, verb in zip(axes, verbs, strict=True):
        rows = sorted(
            (r for r in data["rows"] if r["verb"] == verb and r["batch"] == 1 and r["dtype"] == "float32"
             and r["cache"] == "warm" and r["part"] == "end to end" and not r["note"].startswith("from an image")
             and r["size"][0] == r["size"][1] and "best_gl" in r and "best_torch" in r),
            key=lambda r: r["size"][0],
        )  # fmt: skip
        if not rows:
            continue
        sides = [r["size"][0] for r in rows]
        for key, label, colour in (("best_gl", "best GL way", "#c2410c"), ("best_torch", "best torch way", "#1d4ed8")):
            timings = [r["sides"][r[key]] for r in rows]
            axis.errorbar(
                sides, [t["median_ms"] for t in timings], yerr=[t["iqr_ms"] / 2 for t in timings],
                marker="o", markersize=4, capsize=2, label=label, color=colour,
            )  # fmt: skip
        axis.plot(sides, [r["floor_ms"] for r in rows], ":", color="#6b7280", label="floor: bytes / copy bandwidth")
        axis.set(title=verb, xlabel="side of the image, px", xscale="log", yscale="log")
        axis.set_xticks(sides, [str(side) for side in sides])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("milliseconds")
    for axis in [axis for axis in axes if axis.has_data()][:1]:
        axis.legend(frameon=False, fontsize=9)
    figure.suptitle(f"{_machine(data)}; fp32, batch 1, warm", fontsize=10)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    if sys.argv[1:] == ["--readme"]:
        README.write_text(with_tables(README.read_text()))
        return
    paths = [Path(argument) for argument in sys.argv[1:]] or sorted((HERE / "results").glob("*.json"))
    for path in paths:
        Console().print(table(path))


if __name__ == "__main__":
    main()
