"""Tables and plots from result files, on `gpu_lod.report`.

python bench/report.py [FILE]      the table on the terminal
python bench/report.py --readme    put the tables of all result files into README.md and, with every row, into
                                   docs/benchmarks.md, beside what each says of the claim under test and the table of
                                   goals, and a plot beside each file
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpu_lod.report import claim, plots, text
from gpu_lod.report.files import between, load, write

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
EVERY_ROW = HERE.parent / "docs" / "benchmarks.md"
CLAIM_MARKS = "<!-- claim: python bench/report.py --readme -->", "<!-- end of the claim -->"
GOAL_MARKS = "<!-- goals: python bench/report.py --readme -->", "<!-- end of goals -->"


def result_files() -> list[Path]:
    return sorted((HERE / "results").glob("*.json"))


def readme_tables() -> str:
    return "\n\n".join(text.markdown(path, HERE.parent) for path in result_files())


def with_tables(readme: str) -> str:
    """README text with the tables between its marks brought up to date."""
    return text.with_tables(readme, readme_tables())


def with_every_row(document: str) -> str:
    """The same of docs/benchmarks.md, and there the verdicts on the claim and the goals."""
    import goals  # makes every allocator, which run.py should not for one table on the terminal

    tables = (text.markdown(path, HERE.parent / "docs", every=True) for path in result_files())
    document = between(text.with_tables(document, "\n\n".join(tables)), CLAIM_MARKS, claim_of_each())
    return between(document, GOAL_MARKS, goals.table(HERE / "results"))


def claim_of_each() -> str:
    """The claim, what would confirm it, and what each file says of it."""
    said = [
        f"> {claim.CLAIM}\n\nIt is confirmed at a size where the faster of driver and fragment, the generators that go "
        f"through texture hardware, takes {claim.CLAIMED_MS} ms at most and pooling (avg_pool2d, eager) at least "
        f"{claim.CLAIMED_RATIO:.0f} times as long. Chains of 3 x side x side fp32 down to 1 x 1, milliseconds of the "
        "wall clock. Compute is one dispatch a level."
    ]
    for path in result_files():
        data = load(path)
        link = f"[file](../bench/results/{path.name})"
        said.append(f"### {text.machine(data)}, {data['date']}\n\n{claim.markdown(data)}\n\n({link})")
    return "\n\n".join(said)


def table(path: Path) -> Table:
    """Every row, for a terminal."""
    return text.table(path)


def plot(path: Path, target: Path) -> None:
    """The plot beside a result file."""
    plots.overview(text.load_any(path), target)


def main() -> None:
    if sys.argv[1:] == ["--readme"]:
        for path in result_files():
            plot(path, path.with_suffix(".svg"))
        write(with_tables(README.read_text()), README)
        write(with_every_row(EVERY_ROW.read_text()), EVERY_ROW)
        return
    for path in [Path(argument) for argument in sys.argv[1:]] or result_files():
        Console().print(table(path))


if __name__ == "__main__":
    main()
