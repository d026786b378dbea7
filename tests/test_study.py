"""Documents show the committed result files of the benchmarks that have tables there."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))


@pytest.mark.parametrize("name", ["encoder", "gradients", "memory", "streaming", "workers"])
def test_the_doc_shows_the_files(name: str) -> None:
    study = import_module(f"bench_{name}").STUDY
    assert study.result_files()
    text = study.page.read_text("utf-8")
    assert study.with_tables(text) == text, f"python bench/bench_{name}.py --doc"
