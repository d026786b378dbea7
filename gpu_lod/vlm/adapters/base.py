"""What all adapters share: what they give, how they are found, and what is checked before a model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from gpu_lod import checks
from gpu_lod.errors import InputError
from gpu_lod.token_set import TokenSet
from gpu_lod.vlm.merging import Merged

_registry: dict[str, type[Adapter]] = {}
A = TypeVar("A", bound="type[Adapter]")


@dataclass(frozen=True, eq=False)
class Encoded:
    """What an encoder made of tokens, in their order.

    Shape: hidden [B, prefix + K, D], or [B, 4 K, D] where a token is 2 x 2 merged patches; pooled [B, D]; merged
        [B, K, E]; deepstack: [B, K, E] each. Without B for unbatched tokens.
    """

    hidden: torch.Tensor
    """The encoder's own last hidden state, its class and register tokens first."""
    tokens: TokenSet
    size: tuple[int, int]
    """(H, W) of the picture in pixels."""
    prefix: int = 0
    """Class and register tokens."""
    pooled: torch.Tensor | None = None
    """None where the model pools nothing."""
    merged: torch.Tensor | None = None
    """What a language model reads, of encoders that merge."""
    deepstack: tuple[torch.Tensor, ...] = ()
    """What the first layers of the language model add, of encoders that have such."""

    @property
    def features(self) -> torch.Tensor:
        """[B, K, D] of the tokens alone: merged, where there is such."""
        return self.hidden[..., self.prefix :, :] if self.merged is None else self.merged

    def reduced(self, by: Merged) -> Encoded:
        """Fewer tokens after the encoder: what `bipartite_merge`, `vision_zip` or `sparse_vlm` made of the features.

            by = lod.vlm.bipartite_merge(encoded.features, encoded.features, remove=400)
            words = lod.vlm.generate(model, input_ids, encoded.reduced(by))

        Convention: each token stands where the one does that others were merged into, `by.indices`, and has its score;
            what is merged is averaged. Class and register tokens, and what was pooled from all, stay.

        Raises:
            InputError: other tokens than these, or none in a batch.
        """
        sites, scores = self.tokens.sites, self.tokens.scores
        if sites.ndim != 3 or by.owner.shape != scores.shape:
            raise InputError(
                f"{tuple(by.owner.shape)} tokens were merged, and encoded are {tuple(scores.shape)}; expected one "
                "[B, K] of both. Merge this picture's `features`, encoded from an image [1, C, H, W] if it is one."
            )
        indices = by.indices
        tokens = TokenSet(
            sites.gather(1, indices[..., None].expand(-1, -1, 3)), scores.gather(1, indices), None, self.tokens.patch
        )
        first, own = self.hidden[:, : self.prefix], self.hidden[:, self.prefix :]
        own = by.merge(own.unflatten(1, (scores.shape[1], -1))).flatten(1, 2)
        return replace(
            self,
            hidden=torch.cat([first, own], 1),
            tokens=tokens,
            merged=None if self.merged is None else by.merge(self.merged),
            deepstack=tuple(by.merge(features) for features in self.deepstack),
        )


class Adapter(ABC):
    """Runs a frozen encoder on a token set. One family of models is one adapter.

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
    """

    patch: int
    """Side of the patches that it reads, in samples."""
    channels: int

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    @abstractmethod
    def run(self, tokens: TokenSet, size: tuple[int, int]) -> Encoded:
        """Encode tokens with patches [B, K, C, P, P] of pictures of (H, W) pixels; all is checked already."""

    def __call__(self, tokens: TokenSet, size: tuple[int, int]) -> Encoded:
        """Encode a token set.

        Shape: patches [B, K, C, P, P], or without B; normalised as the model expects.

        Raises:
            InputError: patches that do not fit the model or are not there, or a model in training mode.
        """
        size = checks.size(size)
        patches = tokens.patches if isinstance(tokens, TokenSet) else None
        if patches is None:
            raise InputError("there are no patches to encode; pass a TokenSet that an allocator read from an image.")
        expected = (self.channels, self.patch, self.patch)
        if tuple(patches.shape[-3:]) != expected or not patches.is_floating_point():
            raise InputError(
                f"patches are {patches.dtype} {tuple(patches.shape)}; {type(self.model).__name__} takes floating-point "
                f"ones [B, K, {', '.join(map(str, expected))}]. Give the allocator patch={self.patch}, and "
                "mean and std where the image is uint8."
            )
        weight = next(self.model.parameters())
        if weight.device != patches.device:
            raise InputError(f"the patches are on {patches.device}, the model on {weight.device}; move one with .to().")
        if self.model.training:
            raise InputError(
                f"{type(self.model).__name__} is in training mode, in which its results are random. Call model.eval()."
            )
        if tokens.sites.ndim == 3:
            return self.run(tokens, size)
        one = TokenSet(tokens.sites[None], tokens.scores[None], patches[None], tokens.patch)
        found = self.run(one, size)
        return replace(
            found,
            hidden=found.hidden[0],
            tokens=tokens,
            pooled=None if found.pooled is None else found.pooled[0],
            merged=None if found.merged is None else found.merged[0],
            deepstack=tuple(features[0] for features in found.deepstack),
        )


def embed(patches: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A convolution whose stride is its kernel, on patches [..., C, P, P]: one linear map."""
    return F.linear(patches.flatten(-3).to(weight.dtype), weight.flatten(1), bias)


def whole_cells(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """(h, w) of the grid that an encoder makes of a picture: its patches leave out what is less than one."""
    return max(1, size[0] // patch), max(1, size[1] // patch)


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
        for inside in ("_orig_mod", "module"):  # of torch.compile, and of what runs a model on several devices
            if isinstance(model, nn.Module) and isinstance(getattr(model, inside, None), nn.Module):
                raise InputError(
                    f"{name} wraps a model, and an adapter runs its parts; pass the one inside, model.{inside}."
                )
        raise InputError(
            f"there is no adapter for {name} ({kind.__module__}); known are {', '.join(adapters())}. Write one: derive "
            f"a class from gpu_lod.vlm.Adapter and decorate it with @gpu_lod.vlm.register_adapter({name!r})."
        )
    return found(model)
