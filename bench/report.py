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
    if row["verb"] == "cull":  # the honest opponent, which gives the mask alone
        note += f"; for the mask alone one torch comparison takes {_ms(row, 'torch one comparison')}"
    return f"{batch}{row['channels']} x {height} x {width} {row['dtype']}, {row['cache']}{note}"


def _ms(row: dict[str, Any], side: str) -> str:
    timing = row["sides"][side]
    return f"{timing['median_ms']:.3g} ± {timing['iqr_ms'] / 2:.2g}"


def _verdict(row: dict[str, Any]) -> str:
    if "gl_speedup" not in row:
        return ""
    speedup = row["gl_speedup"]
    return f"{speedup:.2f}x" if speedup >= 1 else f"{speedup:.2f}x (slower)"


def _cells(row: dict[str, Any]) -> list[str]:
    gl = row.get("best_gl") or next(iter(name for name in row["sides"] if name.startswith("gl")))
    best = row.get("best_torch")
    auto = "auto" in row["sides"]
    return [
        row["verb"],
        _job(row),
        f"{gl.removeprefix('gl').strip() or 'gl'}: {_ms(row, gl)}",
        f"{best.removeprefix('torch ')}: {_ms(row, best)}" if best else "",
        _verdict(row),
        f"{_ms(row, 'auto')}{'' if row.get('auto_ok', True) else ' (behind)'}" if auto else "",
        f"{row['floor_ms']:.3g}",
    ]


HEADINGS = ["verb", "job", "best GL, ms", "best torch, ms", "GL against torch", "auto, ms", "floor, ms"]


def table(path: Path) -> Table:
    """Every row, for a terminal."""
    data = load(path)
    result = Table(*HEADINGS, title=f"{data['device']}, {data['cpu']}, {data['threads']} threads, {data['date']}")
    for row in data["rows"]:
        style = "" if row.get("gl_speedup", 1) >= 1 else "dim"
        result.add_row(*_cells(row), style=style)
    return result


def markdown(path: Path) -> str:
    """The rows of the README: warm fp32 at the common sizes, and everything that is not a plain mip chain or Hi-Z."""
    data = load(path)
    lines = [
        f"Measured on {data['device']}, {data['cpu']}, {data['threads']} cores, torch {data['versions']['torch']}, "
        f"{data['date']} ([file](bench/results/{path.name})). Median ± half the interquartile range, milliseconds.",
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
             and r["size"][0] == r["size"][1]),
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
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"{data['device']}, {data['cpu']}, {data['threads']} cores; fp32, batch 1, warm", fontsize=10)
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
