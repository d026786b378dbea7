"""What all adapters share: how they are found, and what is checked before a model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.allocate.token_bank import PackedTokens
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.adapters.encoded import Encoded, Size, joined

_registry: dict[str, type[Adapter]] = {}
A = TypeVar("A", bound="type[Adapter]")
Layer = int | Sequence[int] | None


class Adapter(ABC):
    """Runs an encoder on a token set. One family of models is one adapter.

    One of your own sets `patch` and `channels` in its `__init__`, defines `run`, and is registered for the name of the
    model's class:

        @lod.vlm.register_adapter("MyViT")
        class MyAdapter(lod.vlm.Adapter):
            def __init__(self, model):
                super().__init__(model)
                self.patch, self.channels = 16, 3

            def run(self, tokens, size):
                where = lod.vlm.grid_positions(tokens.sites, size, self.patch)[..., 1:]  # [B, K, 2]
                hidden = self.model.blocks(self.model.embed(tokens.patches) + self.model.positions(where))
                return lod.vlm.Encoded(hidden, tokens, size)

    One whose class is derived from a known one and computes the same is a line:

        lod.vlm.register_adapter("MyCLIP")(type(lod.vlm.adapter_for(clip)))
    """

    patch: int
    """Side of the patches that it reads, in samples."""
    channels: int
    layered: ClassVar[bool] = False
    """Whether `run` takes a layer."""
    at_once: ClassVar[bool] = False
    """Whether `run` takes a size a picture, a tuple of them. If not, pictures of several sizes go one by one."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, patch={self.patch}, channels={self.channels})"

    def parts(self) -> Sequence[nn.Module]:
        """What of the model is run: all of it, but for what is a part of a larger one."""
        return [self.model]

    @abstractmethod
    def run(self, tokens: TokenSet, size: Any) -> Encoded:
        """Encode tokens with patches [B, K, C, P, P] of pictures of (H, W) pixels; all is checked already."""

    def __call__(self, tokens: TokenSet, size: Any, layer: Layer = None) -> Encoded:
        """Encode a token set.

        Shape: patches [B, K, C, P, P], or without B; normalised as the model expects.

        Args:
            size: (H, W) of the pictures in pixels; or [B, 2], one of each: sets of pictures of several sizes go in
                together, for they have K tokens each.
            layer: the block whose output is taken, from 0, or from the last one backward: -2 is LLaVA's, and no norm
                follows. Several give their states side by side, as [B, K, n D]. None is all of the model, norm and
                pooling included.

        Raises:
            InputError: patches that do not fit the model or are not there; sites that are no fractions of the picture;
                other than one size a picture; a layer that is not there; a model in training mode that does something
                at random in it.
            UnsupportedError: a layer of a family whose models merge, or that has none.
        """
        one, size = self.checked(tokens, size)
        how: dict[str, Any] = {}
        if layer is not None:
            if not self.layered:
                raise UnsupportedError(
                    f"{type(self).__name__} gives no states of single layers. Leave layer out, and take .hidden."
                )
            how["layer"] = layer
        if tokens.sites.ndim == 3:
            if isinstance(size[0], tuple) and not self.at_once:
                return joined([self.run(some_of(tokens, index), one, **how) for index, one in enumerate(size)], tokens)
            return self.run(tokens, size, **how)
        found = self.run(one, size, **how)
        return replace(
            found,
            hidden=found.hidden[0],
            tokens=tokens,
            pooled=None if found.pooled is None else found.pooled[0],
            merged=None if found.merged is None else found.merged[0],
            deepstack=tuple(features[0] for features in found.deepstack),
        )

    def checked(self, tokens: TokenSet, size: Any) -> tuple[TokenSet, Size | tuple[Size, ...]]:
        """Tokens in a batch, [B, K, ...], and (H, W) of their pictures, or of each.

        Raises:
            InputError: as a call.
        """
        patches = self._patches(tokens)
        if what := next(filter(None, map(_random, self.parts())), None):
            raise InputError(
                f"{type(self.model).__name__} is in training mode, in which its results are random ({what}). Call "
                "model.eval(), or set that to 0."
            )
        sizes = _size(size, tokens)
        if tokens.sites.ndim == 3:
            return tokens, sizes
        return TokenSet(tokens.sites[None], tokens.scores[None], patches[None], tokens.patch), sizes

    def _patches(self, tokens: Any) -> torch.Tensor:
        """Those of tokens that are what the model takes."""
        if isinstance(tokens, PackedTokens):
            raise InputError("these are PackedTokens, of several lengths. Encode each of tokens.unpack() by itself.")
        if not isinstance(tokens, TokenSet):
            hint = " Join a list with TokenSet.stack(sets)." if isinstance(tokens, (list, tuple)) else ""
            raise InputError(f"tokens are {checks.shown(tokens)}; expected a TokenSet.{hint}")
        patches, sites = tokens.patches, tokens.sites
        if patches is None:
            raise InputError("there are no patches to encode; pass a TokenSet that an allocator read from an image.")
        expected = (self.channels, self.patch, self.patch)
        if tuple(patches.shape[-3:]) != expected or not patches.is_floating_point():
            raise InputError(
                f"patches are {patches.dtype} {tuple(patches.shape)}; {type(self.model).__name__} takes floating-point "
                f"ones [B, K, {', '.join(map(str, expected))}]. Give the allocator patch={self.patch}, and "
                "mean and std where the image is uint8."
            )
        if not sites.numel():
            raise InputError(
                f"sites are {tuple(sites.shape)}, that is none; expected at least one. Leave the call out."
            )
        checks.highest_level(sites.detach())  # raises where they are not in the picture
        weight = next(self.parts()[0].parameters())
        if weight.device != patches.device:
            raise InputError(f"the patches are on {patches.device}, the model on {weight.device}; move one with .to().")
        return patches


def _size(size: Any, tokens: TokenSet) -> Size | tuple[Size, ...]:
    """(H, W) of all pictures, or of each where they differ."""
    if isinstance(size, (torch.Tensor, np.ndarray)):
        size = size.tolist()
    if not isinstance(size, (tuple, list)) or not any(isinstance(one, (tuple, list)) for one in size):
        return checks.size(size)
    count = len(tokens.sites) if tokens.sites.ndim == 3 else 1
    sizes = tuple(checks.size(one) for one in size)
    if len(sizes) != count:
        raise InputError(
            f"there are {len(sizes)} sizes and {count} pictures; expected one (H, W) for all, or one each."
        )
    return sizes[0] if len(set(sizes)) == 1 else sizes


def some_of(tokens: TokenSet, index: int) -> TokenSet:
    """A picture of a batch, in a batch of one."""
    assert tokens.patches is not None
    own = slice(index, index + 1)
    return TokenSet(tokens.sites[own], tokens.scores[own], tokens.patches[own], tokens.patch)


_CHANCES = ("p", "drop_prob", "dropout", "attention_dropout", "prob")
"""Names under which modules of torch, transformers and timm keep the share that they drop in training."""


def _random(model: nn.Module) -> str | None:
    """What a model that is in training mode does at random, or to batches as wholes."""
    if not model.training:
        return None
    for name, part in model.named_modules():
        if not part.training:
            continue
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return f"{name} is a BatchNorm"
        for kind in _CHANCES:
            chance = getattr(part, kind, None)
            if isinstance(chance, (int, float)) and chance > 0:
                return f"{kind} of {name or type(model).__name__} is {chance:g}"
    return None


def register_adapter(*names: str) -> Callable[[A], A]:
    """Use an adapter for models of these classes. Decorates a class.

    Args:
        names: of the model's class, alone ("MyViT") or with the package ("timm.VisionTransformer"). Derived classes do
            not count: they may compute something else. A name that is taken has the new adapter from now on.

    Raises:
        InputError: no names, or no class of adapters.
    """

    def add(adapter: A) -> A:
        if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
            raise InputError(f"{adapter!r} is no class of adapters; derive it from gpu_lod.vlm.Adapter.")
        _registry.update(dict.fromkeys(names, adapter))
        return adapter

    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"names are {names!r}; expected names of classes, as in @register_adapter('MyViT').")
    return add


def adapters() -> list[str]:
    """Names of the classes of models that there are adapters for."""
    return sorted(_registry)


def adapter_for(model: Any) -> Adapter:
    """The adapter of a model, by its class's name. No package is imported for it.

    Raises:
        InputError: a model that none is registered for; the message lists those that are known.
    """
    kind = type(model)
    name = kind.__name__
    found = _registry.get(f"{kind.__module__.partition('.')[0]}.{name}") or _registry.get(name)
    if found is None or not isinstance(model, nn.Module):
        if name.startswith("FSDP") and hasattr(model, "unshard"):
            raise InputError(
                f"{name} is sharded by fully_shard, which acts where the model's own forward is called, and an adapter "
                "runs its parts. Shard its blocks alone, each by fully_shard(block), and not the model."
            )
        for inside in ("_orig_mod", "module"):  # of torch.compile, and of what runs a model on several devices
            if isinstance(model, nn.Module) and isinstance(getattr(model, inside, None), nn.Module):
                raise InputError(
                    f"{name} wraps a model, and an adapter runs its parts; pass the one inside, model.{inside}."
                )
        for base in kind.__mro__[1:] if isinstance(model, nn.Module) else ():
            if f"{base.__module__.partition('.')[0]}.{base.__name__}" in _registry or base.__name__ in _registry:
                raise InputError(
                    f"there is no adapter for {name}, which is derived from {base.__name__} and may compute something "
                    f"else. If it does not, take that one's: gpu_lod.vlm.register_adapter({name!r})(type(adapter)), "
                    f"with the adapter of a {base.__name__}."
                )
        raise InputError(
            f"there is no adapter for {name} ({kind.__module__}); known are {', '.join(adapters())}. Pass the encoder "
            "that is in it, if it is one of those, or write one: derive a class from gpu_lod.vlm.Adapter and decorate "
            f"it with @gpu_lod.vlm.register_adapter({name!r})."
        )
    return found(model)
