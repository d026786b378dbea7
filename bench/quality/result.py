"""What a result file is: its schema."""

from __future__ import annotations

from typing import Any

MEASURED = ("cpu", "commit", "date")
"""What a task says of its own run, beside processes and seeds: tasks of one file may be measured one by one."""

_INTERVAL: dict[str, Any] = {
    "type": "object",
    "required": ["mean", "low", "high", "n"],
    "properties": {
        "mean": {"type": "number"},
        "low": {"type": ["number", "null"]},
        "high": {"type": ["number", "null"]},
        "n": {"type": "integer", "minimum": 1},
    },
    "additionalProperties": False,
}
_ROW: dict[str, Any] = {
    "type": "object",
    "required": [
        "method",
        "fixation",
        "relevance",
        "error",
        "budget",
        "tokens",
        "coverage",
        "peak_bytes",
        "ms",
        "reader_ms",
        "per_token",
        "values",
        "difference",
        "beyond_even",
        "verdict",
    ],
    "properties": {
        "method": {"type": "string"},
        "fixation": {"enum": [None, "centre", "saliency", "oracle"]},
        "relevance": {"type": ["string", "null"]},
        "budget": {"type": ["integer", "null"], "minimum": 1},
        "tokens": {"type": "integer", "minimum": 1},
        "error": {"type": "number", "minimum": 0},
        "coverage": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "peak_bytes": {"type": ["number", "null"], "minimum": 0},
        "ms": {"type": ["number", "null"], "minimum": 0},
        "reader_ms": {"type": ["number", "null"], "minimum": 0},
        "per_token": {"type": ["number", "null"]},
        "by_eccentricity": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        },
        "values": {"type": "object", "additionalProperties": _INTERVAL},
        "difference": {"type": "object", "additionalProperties": {"oneOf": [_INTERVAL, {"type": "null"}]}},
        "beyond_even": {"oneOf": [_INTERVAL, {"type": "null"}]},
        "verdict": {"enum": ["every token", "baseline", "earns: accuracy", "earns: half the tokens", "open", "no"]},
    },
    "additionalProperties": False,
}
_CLAIM: dict[str, Any] = {
    "type": "object",
    "required": ["method", "fixation", "difference", "answer"],
    "properties": {"difference": _INTERVAL, "answer": {"enum": ["yes", "no", "open"]}},
}
_TRAINED: dict[str, Any] = {
    "type": "object",
    "required": ["method", "task", "budget", "untrained", "trained"],
    "properties": {name: {"type": "number"} for name in ("untrained", "trained")},
}
_TASK: dict[str, Any] = {
    "type": "object",
    "required": [
        "title", "accuracy", "metrics", "ms", "relevance", "budgets", "settings", "measured", "pictures",
        "left_out", "absent", "rows", "claim", "skipped",
    ],
    "properties": {
        "measured": {
            "type": "object",
            "required": ["jobs", "seeds", *MEASURED],
            "properties": {"jobs": {"type": ["integer", "null"], "minimum": 1}, "seeds": {"type": "integer"}},
        },
        "pictures": {"type": "array", "minItems": 1},
        "rows": {"type": "array", "minItems": 1, "items": _ROW},
        "claim": {"type": "array", "items": _CLAIM},
        "trained": {"type": "array", "items": _TRAINED},
    },
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "schema", "form", "interval", "cpu", "threads", "versions", "commit", "date", "tasks",
    ],
    "properties": {
        "schema": {"const": 2},
        "form": {"enum": ["quick", "full"]},
        "run": {
            "type": "object",
            "required": ["tasks", "jobs", "seconds", "went_on"],
            "properties": {"seconds": {"type": "number", "minimum": 0}, "went_on": {"type": "boolean"}},
        },
        "tasks": {"type": "object", "minProperties": 1, "additionalProperties": _TASK},
    },
}  # fmt: skip
