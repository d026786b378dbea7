"""docs/oriented_energy.md beside its result file, and the result file beside what the verb gives now."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import compare_steerable  # noqa: E402

RESULT = json.loads(compare_steerable.OUT.read_text())
DOC = (ROOT / "docs" / "oriented_energy.md").read_text()


def levels_of(picture: str) -> list[dict[str, list[float]]]:
    return [row for row in RESULT["rows"] if row["picture"] == picture]


@pytest.mark.parametrize("picture", compare_steerable.PICTURES)
def test_the_table_is_the_files(picture: str) -> None:
    [(ranks, apart)] = re.findall(rf"^\| {picture} \| (.*?) \| (.*?) \|$", DOC, re.MULTILINE)
    rows = levels_of(picture)
    assert ranks == ", ".join(f"{np.mean(row['rank']):.2f}" for row in rows)
    shares = [np.abs(np.subtract(row["ours"], row["theirs"])).max() for row in rows]
    assert apart == ", ".join(f"{share:.2f}" for share in shares)


def test_the_medians_are_the_files() -> None:
    def medians(key: str) -> str:
        found = [
            np.median([row[key] for row in RESULT["rows"] if row["level"] == level])
            for level in range(compare_steerable.LEVELS)
        ]
        return ", ".join(f"{one:.2f}" for one in found)

    text = " ".join(DOC.split())
    assert f"the median falls from {medians('rank')} to {medians('rank_if_turned')}" in text


@pytest.mark.parametrize("picture", compare_steerable.PICTURES)
def test_the_verb_gives_what_was_compared(picture: str) -> None:
    for row, level in zip(levels_of(picture), compare_steerable.ours(compare_steerable.picture(picture)), strict=True):
        means = compare_steerable.inside(level).mean((1, 2))
        assert means / means.sum() == pytest.approx(row["ours"], abs=2e-4)


def test_both_sides_rank_the_pixels_alike() -> None:
    """Of every picture and level; far closer than with the orthogonal band in the other's place."""
    for row in RESULT["rows"]:
        assert np.mean(row["rank"]) > 0.4 and np.mean(row["rank"]) > np.mean(row["rank_if_turned"]) + 0.05, row
