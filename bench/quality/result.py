"""What a result file is: its schema."""

from __future__ import annotations

from typing import Any

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
        "budget",
        "tokens",
        "coverage",
        "ms",
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
        "coverage": {"type": "number", "minimum": 0, "maximum": 1},
        "ms": {"type": "number", "minimum": 0},
        "values": {"type": "object", "additionalProperties": _INTERVAL},
        "difference": {"type": "object", "additionalProperties": {"oneOf": [_INTERVAL, {"type": "null"}]}},
        "beyond_even": {"oneOf": [_INTERVAL, {"type": "null"}]},
        "verdict": {"enum": ["upper bound", "baseline", "earns: accuracy", "earns: half the tokens", "open", "no"]},
    },
    "additionalProperties": False,
}
_CLAIM: dict[str, Any] = {
    "type": "object",
    "required": ["method", "fixation", "difference", "answer"],
    "properties": {"difference": _INTERVAL, "answer": {"enum": ["yes", "no", "open"]}},
}
_TASK: dict[str, Any] = {
    "type": "object",
    "required": [
        "title", "accuracy", "metrics", "relevance", "settings", "pictures", "absent", "rows", "claim", "skipped",
    ],
    "properties": {
        "pictures": {"type": "array", "minItems": 1},
        "rows": {"type": "array", "minItems": 1, "items": _ROW},
        "claim": {"type": "array", "items": _CLAIM},
    },
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "schema", "form", "budgets", "seeds", "interval", "left_out", "cpu", "threads", "versions", "commit", "date",
        "tasks",
    ],
    "properties": {
        "schema": {"const": 1},
        "form": {"enum": ["quick", "full"]},
        "tasks": {"type": "object", "minProperties": 1, "additionalProperties": _TASK},
    },
}  # fmt: skip
