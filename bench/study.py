"""Benchmarks with result files in a folder of their own, and tables of these in a document."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import torch
from rows import HERE, RESULTS, common, slug, versions, write

from gpu_lod.calibration import cpu
from gpu_lod.report.files import between
from gpu_lod.report.files import write as write_text

Data = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """One such benchmark, of this CPU."""

    about: str
    folder: str
    """Of bench/results."""
    document: str
    """Of docs."""
    marks: tuple[str, str]
    """What its tables stand between there."""
    quick: str
    """What is measured to see that it works."""
    tables: Callable[[Path], str]
    """Of a result file."""
    schema: Data | None = None
    packages: tuple[str, ...] = ()
    """Whose versions matter, beside those of all result files."""

    @property
    def page(self) -> Path:
        return HERE.parent / "docs" / self.document

    def result_files(self) -> list[Path]:
        return sorted((RESULTS / self.folder).glob("*.json"))

    def with_tables(self, text: str) -> str:
        """The document with the tables of all files."""
        return between(text, self.marks, "\n\n".join(map(self.tables, self.result_files())))

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        default = f"bench/results/{self.folder}/<device>.json"
        parser.add_argument(
            "--doc", action="store_true", help=f"bring docs/{self.document} up to date, and measure nothing"
        )
        parser.add_argument("--quick", action="store_true", help=f"{self.quick}: to see that it works")
        parser.add_argument("--out", type=Path, help=f"result file (default: {default})")
        return parser

    def path_of(self, options: argparse.Namespace) -> Path:
        """Where its result goes."""
        return options.out or RESULTS / self.folder / f"{slug(_device())}.json"

    def run(
        self,
        measure: Callable[[argparse.Namespace], Data],
        arguments: list[str] | None = None,
        parser: argparse.ArgumentParser | None = None,
    ) -> int:
        """The script.

        Args:
            measure: what a file says beside the machine and the program.
            parser: `parser()`, with options of the benchmark's own.
        """
        options = (parser or self.parser()).parse_args(arguments)
        if options.doc:
            write_text(self.with_tables(self.page.read_text("utf-8")), self.page)
            return 0
        about = {"device": _device(), **common()}
        about["versions"] |= versions(self.packages)
        data, path = {**about, **measure(options)}, self.path_of(options)
        if self.schema is not None:
            jsonschema.validate(data, self.schema)
        write(data, path)
        print(f"{self.tables(path)}\n\nwrote {path}")
        return 0


def _device() -> str:
    return f"{cpu()} {torch.get_num_threads()} cores"
