"""What one check found, and the line that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gpu_lod.errors import GpuLodError

Status = Literal["ok", "warn", "fail"]

REPORT = "report it, with what `gpu-lod doctor --json` prints"


@dataclass(frozen=True)
class Finding:
    """One check."""

    name: str
    status: Status
    found: str
    fix: str | None = None
    """The line that mends it; None if all is well."""


def safely(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check, the last of them the error that ended it."""
    try:
        yield from check()
    except GpuLodError as error:
        found, fix = advice(error)
        yield Finding(name, "fail", found, fix)
    except Exception as error:  # a doctor that dies of the illness is no help
        yield Finding(name, "fail", " ".join(f"{type(error).__name__}: {error}".split()), REPORT)


def advice(error: GpuLodError) -> tuple[str, str]:
    """What happened, and what to do about it: messages say it in this order, what happened in one sentence."""
    found, _, fix = " ".join(str(error).split()).partition(". ")
    return found, fix or REPORT


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "ok": all(finding.status != "fail" for finding in findings),
        "findings": [vars(finding) for finding in findings],
    }
