"""Results that print as their shapes: all their numbers would fill a terminal."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch


def summary(result: Any) -> str:
    """One line about a dataclass or a named tuple: what it holds, tensors by dtype and shape, without what is None."""
    names = [field.name for field in fields(result)] if is_dataclass(result) else result._fields
    held = ((name, getattr(result, name)) for name in names)
    about = (f"{name} {_shown(value)}" for name, value in held if value is not None and value != ())
    return f"<{type(result).__name__}: {', '.join(about)}>"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, tuple) and any(isinstance(one, torch.Tensor) for one in value):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)
