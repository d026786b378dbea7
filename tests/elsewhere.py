"""Tensors of another device, on a machine that has none."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

DEVICE = torch.device("cuda", 0)


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it is on a GPU. What is made of it is there too; beside CPU tensors it is refused."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __init__(self, held: torch.Tensor) -> None: ...

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all(isinstance(one, cls) or not one.ndim for one in given):
            raise RuntimeError(f"Expected all tensors to be on the same device ({func})")
        args, kwargs = _pytree.tree_map_only(cls, lambda one: one.held, (args, kwargs or {}))
        return _pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))
