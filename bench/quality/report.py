"""docs/quality.md, docs/search.md, README.md and one page from the result files of run.py.

python bench/quality/report.py                           bring the docs up to date
python bench/quality/report.py --readme                  and the table of the README
python bench/quality/report.py --html out/quality.html   one self-contained page: all methods, plots, and all tables
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path[0] = str(BENCH)  # modules here are `quality.x`, and do not hide those of bench/

from gpu_lod.report.files import write  # noqa: E402
from quality import docs, page, tables  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="of the page (default: those in bench/results/quality/)")
    parser.add_argument("--readme", action="store_true", help="the table of README.md too")
    parser.add_argument("--html", type=Path, help="write this page, and leave the docs as they are")
    options = parser.parse_args(arguments)
    if options.html:
        write(page.html([tables.load(path) for path in options.files or docs.result_files()]), options.html)
        return 0
    for path in (docs.QUALITY, docs.SEARCH, *([docs.README] if options.readme else [])):
        write(docs.updated(path), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
