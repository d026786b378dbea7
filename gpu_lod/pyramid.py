"""Pyramid: a frozen stack of mip levels, built once and sampled many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils import _pytree

from gpu_lod import recording
from gpu_lod.bridge.borrowed import Borrowed
from gpu_lod.context import Context, context_for
from gpu_lod.errors import InputError, PyramidChangedError, UnsupportedError
from gpu_lod.kernels.device import device_of
from gpu_lod.kernels.memory import Memory
from gpu_lod.kernels.textures import Source
from gpu_lod.texture import Sampled
from gpu_lod.transfer import Planes, planes_of
from gpu_lod.uploads import new_textures, tensors_to_textures

Reduce = Literal["mean", "max", "min"]
Kind = Literal["mean", "max", "min", "gaussian", "laplacian"]
BURT = ("gaussian", "laplacian")
"""Kinds with Burt and Adelson's sizes: sides halve and round up."""
OWN_LEVEL_0 = ("laplacian",)
"""Kinds whose level 0 is not the source itself."""


def halvings(height: int, width: int) -> int:
    """How often sides are halved, rounding up, until both are 1. By comparisons: of sides that compiled code does not
    know these ask for the powers of two alone, and other sides of as many levels run the same code."""
    count = 0
    while height > 1 << count or width > 1 << count:
        count += 1
    return count


def depth(height: int, width: int) -> int:
    """Levels down to 1 x 1, by OpenGL's rule."""
    return halvings(height + 1, width + 1)


def like_levels(
    image: torch.Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Tensors [..., h, w] of these sizes, without values, else like the image."""
    return [image.new_empty(*image.shape[:-2], *size, dtype=dtype or image.dtype) for size in sizes]


def level_sizes(height: int, width: int, levels: int | None = None) -> list[tuple[int, int]]:
    """(h, w) of each level, OpenGL's rule: max(1, n >> l). None: down to 1 x 1."""
    count = depth(height, width) if levels is None else levels
    return [(max(1, height >> level), max(1, width >> level)) for level in range(count)]


def burt_sizes(height: int, width: int, levels: int | None = None) -> list[tuple[int, int]]:
    """(h, w) of each level of a Gaussian or Laplacian pyramid: ceil(n / 2^l). None: down to 1 x 1."""
    count = halvings(height, width) + 1 if levels is None else levels
    return [(-(-height >> level), -(-width >> level)) for level in range(count)]


@dataclass(frozen=True, eq=False, repr=False)
class Pyramid:
    """Mip levels of an image or map, finest first.

    Shape: `levels[l]` is [B, C, h_l, w_l], or [C, h_l, w_l] for an unbatched source, with h_l = max(1, H >> l); for
        Gaussian and Laplacian pyramids h_l = ceil(H / 2^l).
    Convention: level 0 is full resolution. It is the source tensor itself where that needs no copy; the levels below it
        lie one behind the other in one buffer if a shader made them. `packed` gives all of them in one tensor.
    Frozen: writing to a level, or to the source, after the pyramid was built makes every later use raise
        `PyramidChangedError` (changes to inference-mode tensors, and through numpy or
        `.data`, cannot be seen, nor can any inside compiled code). Build it again instead.

    It is a pytree: `torch.utils._pytree.tree_map` and everything built on it see its levels.
    """

    levels: tuple[torch.Tensor, ...]
    reduce: Kind = "mean"
    """What the levels hold: "mean", "max" or "min" of footprints, "gaussian" or "laplacian"."""
    generator: str = "torch"
    """What made it: "torch", "cuda", the name of a GL generator, "compiled" where compiled code left that open, or
    "pytree" where other code put the levels together."""
    _versions: tuple[int, ...] = field(default=(), init=False)
    _cache: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self.levels or not all(isinstance(x, torch.Tensor) and x.ndim in (3, 4) for x in self.levels):
            raise InputError("a Pyramid is made of tensors [B, C, h, w] or [C, h, w], finest first; see mipmap().")
        if self.reduce not in ("mean", "max", "min", *BURT):
            raise InputError(f"reduce is {self.reduce!r}; expected 'mean', 'max', 'min', 'gaussian' or 'laplacian'.")
        top = self.levels[0]
        planes, dtype, device = top.shape[:-2], top.dtype, top.device
        sizes = (burt_sizes if self.reduce in BURT else level_sizes)(*top.shape[-2:])
        if len(self.levels) > len(sizes):
            raise InputError(f"{len(self.levels)} levels are more than {tuple(top.shape)} has down to 1 x 1.")
        for level, size in zip(self.levels, sizes, strict=False):
            if level.shape != planes + size or level.dtype != dtype or level.device != device:
                raise InputError(
                    f"a level is {level.dtype} {tuple(level.shape)} on {level.device}; expected {dtype} "
                    f"{(*planes, *size)} on {device}: sides halve and round "
                    + ("up, as gaussian() makes them." if self.reduce in BURT else "down, as mipmap() makes them.")
                )
        if not torch.compiler.is_compiling():
            if any(level.is_neg() for level in self.levels):  # which shaders and kernels would not see
                object.__setattr__(self, "levels", tuple(level.resolve_neg() for level in self.levels))
            object.__setattr__(self, "_versions", tuple(map(_version, self.levels)))

    @classmethod
    def made(cls, levels: tuple[torch.Tensor, ...], reduce: Kind, generator: str) -> Pyramid:
        """Of levels that are known to belong together, which takes a quarter of the time."""
        return _unflatten(levels, (reduce, generator), tensors=True)

    def __reduce__(self) -> Any:
        return _unflatten, (
            self.levels,
            (self.reduce, self.generator),
        )  # without the cache: copies and other processes make their own textures

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, level: int) -> torch.Tensor:
        return self.levels[level]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.levels)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.levels[0].shape))
        return f"<Pyramid {self.reduce} of {shape} {str(self.dtype)[6:]}, {len(self)} levels, by {self.generator}>"

    @property
    def dtype(self) -> torch.dtype:
        return self.levels[0].dtype

    @property
    def device(self) -> torch.device:
        return self.levels[0].device

    @property
    def batched(self) -> bool:
        return self.levels[0].ndim == 4

    @property
    def batch(self) -> int:
        return self.levels[0].shape[0] if self.batched else 1

    @property
    def channels(self) -> int:
        return self.levels[0].shape[-3]

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of level 0."""
        height, width = self.levels[0].shape[-2:]
        return height, width

    def position(self, level: int) -> tuple[float, float]:
        """(x, y) of the centre of sample 0 of a level, in pixels of level 0 (the first texel's centre is at 1/2).

        Samples of mean, max and min pyramids stand in the middle of what they cover; those of Gaussian and Laplacian
        ones stand on every 2^level-th texel, the first on the first.
        """
        if self.reduce in BURT:
            return 0.5, 0.5
        height, width = self.levels[level].shape[-2:]
        return self.size[1] / width / 2, self.size[0] / height / 2

    @property
    def packed(self) -> torch.Tensor:
        """All levels in one flat tensor, finest first, without gaps. A copy, and differentiable."""
        self.check_unchanged()
        return torch.cat([level.flatten() for level in self.levels])

    def check_unchanged(self) -> None:
        """Raises PyramidChangedError if a level was written to since the pyramid was built."""
        if torch.compiler.is_compiling():
            return  # versions are unknown before the graph runs
        recording.uses(self)
        if not self._versions:  # made in compiled code: from now on
            object.__setattr__(self, "_versions", tuple(map(_version, self.levels)))
        if tuple(map(_version, self.levels)) != self._versions:
            raise PyramidChangedError(
                "a tensor of this pyramid was changed in place after the pyramid was built, so its levels no longer "
                "belong together. Build the pyramid again, or build it from image.clone()."
            )

    @property
    def state(self) -> tuple[Any, ...]:
        """What tells whether the levels were written to, and what was made of them for GL and CUDA so far."""
        return tuple(map(_version, self.levels)), dict(self._cache)

    def renew(self, made: Mapping[Any, Any]) -> None:
        """Take the levels as they are now for those of a new pyramid: whoever wrote to them wrote all of them.

        Args:
            made: what was written along with them, of the second part of `state`.
        """
        object.__setattr__(self, "_versions", tuple(map(_version, self.levels)))
        self._cache.clear()
        self._cache.update(made)

    # -- in GL memory ---------------------------------------------------------------------------------------------

    def planes(self, ctx: Context, level: int) -> Planes:
        """A level in GL memory. What GL cannot read where it is gets copied once, and kept."""
        self.check_unchanged()
        key = ("planes", level, id(ctx))
        if key not in self._cache:
            found = planes_of(ctx, self.levels[level])
            if found.owner is self.levels[level] or isinstance(found.owner, Borrowed):
                return found  # the level may have other memory by the next call (`share_memory_`, as queues do it)
            self._forget_closed()
            self._cache[key] = (ctx, found)
        planes: Planes = self._cache[key][1]
        planes.buffer.take()
        return planes

    def texture_context(self) -> Context | None:
        """The context in which the pyramid is a texture already and that can be used here and now, or None."""
        for (kind, *_), (ctx, _) in tuple(self._cache.items()):  # other threads may add to it meanwhile
            if kind == "textures" and ctx.usable_here():
                found: Context = ctx
                return found
        return None

    def upload(self, context: Context | None = None, backend: Literal["gl", "cuda"] = "gl") -> Pyramid:
        """Make the pyramid a texture now rather than at the first sample by a texture unit; returns itself.

        With `backend="auto"` samplers use the texture units where they are faster once the texture is there. In
        compiled code this does nothing.

        Args:
            context: of OpenGL; None is the device's own.
            backend: "gl", or "cuda" for samplers with backend="cuda", which else read the levels where they are. While
                a CUDA graph is captured none can be made, so one that a graph samples is made before; the pyramid must
                then live as long as the graph.

        Raises:
            InputError: an unknown backend, a context for "cuda", or a pyramid that cannot be such a texture.
            LimitError: larger than the device's textures.
            CaptureError: a CUDA graph is being captured.
        """
        if backend not in ("gl", "cuda"):
            raise InputError(f"backend is {backend!r}; a pyramid becomes a texture of 'gl' or of 'cuda'.")
        if backend == "cuda" and context is not None:
            raise InputError("a context of OpenGL makes no texture of backend='cuda'; leave it out.")
        if torch.compiler.is_compiling():
            return self
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, self.levels)):
            raise UnsupportedError("a pyramid inside a torch.func transform has no memory to upload; leave that out.")
        if backend == "cuda":
            self.cuda_textures()
            return self
        ctx = context or context_for(*self.levels)
        with ctx.active(self.device):
            self.textures(ctx)
        return self

    def textures(self, ctx: Context, *, filtered: bool = False) -> list[tuple[int, Sampled]]:
        """The pyramid as textures: (first layer, texture), more than one for huge batches.

        A layer of a mean pyramid is an image, for filtering; of a max or min pyramid one channel, for exact fetches.

        Args:
            filtered: nothing but a texture unit's own filter will do, on software renderers too.

        Raises:
            InputError: a mean pyramid of more than 4 channels.
            LimitError: larger than the device's textures.
        """
        self.check_unchanged()
        for buffered in (False,) if filtered else (True, False):
            storage = ctx.textures.storage(self.dtype, filtered=filtered, buffered=buffered)
            if found := self._cache.get(("textures", id(ctx), storage, buffered)):
                return found[1]
        channels = self.channels if self.reduce == "mean" else 1
        textures = self._make_textures(ctx, channels, filtered=filtered)
        self._keep_textures(ctx, textures)
        return textures

    @property
    def is_texture(self) -> bool:
        """Whether it was uploaded, to OpenGL or to CUDA."""
        return self.is_cuda_texture or self.texture_context() is not None

    @property
    def is_cuda_texture(self) -> bool:
        """Whether it was uploaded to CUDA."""
        return ("cuda",) in self._cache

    def cuda_textures(self) -> Source:
        """The mean pyramid as layered textures of its CUDA device, made once and kept.

        Raises:
            InputError: no mean pyramid, or one of more than 4 channels.
            UnsupportedError: it is on no CUDA device, or CUDA cannot be used here.
            LimitError: larger than the device's textures.
            CaptureError: it is none yet, and a CUDA graph is being captured.
        """
        self.check_unchanged()
        if ("cuda",) not in self._cache:
            if self.reduce != "mean":
                raise InputError(f"a {self.reduce} pyramid is no texture of backend='cuda'; mean ones are: mipmap().")
            self._check_channels(self.channels)
            device = device_of(self.levels[0])
            self._cache["cuda",] = (device, Source(device, self.levels))
        source: Source = self._cache["cuda",][1]
        return source

    def cuda_source(self) -> Source | Memory:
        """What kernels sample: its textures, if it was uploaded, else its levels where they are, which can be captured
        at once."""
        if self.is_cuda_texture:
            return self.cuda_textures()
        self.check_unchanged()
        return Memory(device_of(self.levels[0]), self.levels)

    @staticmethod
    def _check_channels(channels: int) -> None:
        if channels > 4:
            raise InputError(f"the pyramid has {channels} channels; textures hold 1 to 4. Use backend='torch'.")

    def _make_textures(self, ctx: Context, channels: int, *, filtered: bool) -> list[tuple[int, Sampled]]:
        if self.reduce in BURT:
            raise InputError(
                f"a {self.reduce} pyramid cannot be a texture: its samples do not stand at texel centres. Samplers "
                "take mipmap() and hiz()."
            )
        self._check_channels(channels)
        result = new_textures(
            ctx,
            self.size,
            layers=self.batch * self.channels // channels,
            levels=len(self),
            dtype=self.dtype,
            channels=channels,
            filtered=filtered,
        )
        tensors_to_textures(ctx, self.levels, result)
        return result

    def _forget_closed(self) -> None:
        """What was made in contexts that are closed: nobody can use it any more."""
        for key, (ctx, _) in tuple(self._cache.items()):  # other threads may add to it meanwhile
            if getattr(ctx, "closed", False):
                self._cache.pop(key, None)

    def _keep_textures(self, ctx: Context, textures: list[tuple[int, Sampled]]) -> None:
        """Textures of the levels, which a generator may have made on the way."""
        self._forget_closed()
        key = textures[0][1].key
        self._cache["textures", id(ctx), key.storage, key.buffered] = (ctx, textures)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _flatten(pyramid: Pyramid) -> tuple[list[Any], tuple[Kind]]:
    # What made it is left out: torch.export takes trees of the very same context alone.
    return list(pyramid.levels), (pyramid.reduce,)


def _flatten_with_keys(pyramid: Pyramid) -> tuple[list[tuple[Any, Any]], tuple[Kind]]:
    levels, context = _flatten(pyramid)
    return [(_pytree.SequenceKey(level), value) for level, value in enumerate(levels)], context


def _unflatten(levels: Any, context: Any, tensors: bool | None = None) -> Pyramid:
    """Of levels, what they hold, and what made them, if that is known."""
    pyramid = object.__new__(Pyramid)
    levels = tuple(levels)
    if tensors is None:  # tree_map may put anything here
        tensors = all(isinstance(level, torch.Tensor) for level in levels)
    reduce, generator = (*context, "pytree")[:2]
    versions = tuple(map(_version, levels)) if tensors and not torch.compiler.is_compiling() else ()
    for name, value in zip(
        ("levels", "reduce", "generator", "_versions", "_cache"), (levels, reduce, generator, versions, {}), strict=True
    ):
        object.__setattr__(pyramid, name, value)
    return pyramid


_pytree.register_pytree_node(
    Pyramid,
    _flatten,
    _unflatten,
    serialized_type_name="gpu_lod.Pyramid",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
torch.serialization.add_safe_globals([_unflatten])  # torch.load's weights_only
