"""What all allocators share: what they take, how it is checked, and how sites become tokens."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch

from gpu_lod import by_kernel, checks, dispatch, heap, precision
from gpu_lod.allocate.compiled import kinds, traceable, traced
from gpu_lod.allocate.scale import HIGHEST
from gpu_lod.allocate.scene import Scene, cells_of, label_maps
from gpu_lod.cached import numbers
from gpu_lod.errors import InputError
from gpu_lod.feature_channels import AT_ONCE
from gpu_lod.gather_patches import gather_patches
from gpu_lod.kernels import device as kernels
from gpu_lod.kernels.vortices import tiles
from gpu_lod.patch_grid import Pool, pooled
from gpu_lod.planewise import joined
from gpu_lod.pyramid import Pyramid
from gpu_lod.salient_cells import finite, saliency_cells
from gpu_lod.token_set import TokenSet, blended
from gpu_lod.uncompiled import apart, would_compile

Need = Literal["image", "relevance", "query", "fixation", "labels"]

A = TypeVar("A", bound="type[Allocator]")


class Allocator(ABC):
    """Exactly `budget` sites for every image of a batch. Same input, same sites.

    Args:
        budget: K, at least 1.
        patch: P, samples along a patch's side; the grid's cells are P x P pixels. Where P does not divide a side, the
            last ones end with the picture, and so overlap those before.
        pool: how a relevance map of the picture's size becomes one of the grid: "mean" or "max" over each cell.
    """

    needs: ClassVar[tuple[Need, ...]] = ("relevance",)
    """What it must be given. Relevance that is not given is the saliency of the image."""

    takes: ClassVar[tuple[Need, ...]] = ()
    """What it looks at, if given, beyond what it needs; images and relevance are always taken. Others are refused."""

    blends: ClassVar[bool] = False
    """Whether a token is a blend of level-0 patches, by the weights of `choose`; else it is read at its site."""

    weighs: ClassVar[bool] = False
    """Whether `choose` gives weights."""

    moves: ClassVar[bool] = False
    """Whether sites have gradients."""

    follows: ClassVar[bool] = False
    """Whether sites have gradients in the fixation, if in nothing else."""

    finest: ClassVar[bool] = False
    """Whether all sites are of level 0; a class that chooses anew says so anew."""

    nested: bool = False
    """Whether a smaller budget's tokens are the first of a larger one's; a class that chooses anew says so anew."""

    monotone: bool = False
    """Whether raising a cell's relevance, where none is negative, never loses the cell's own token."""

    learns: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters of a class of the package, in their order."""

    _own: ClassVar[type | None] = None
    """The class of the package, which those derived from it are not."""

    _arguments: ClassVar[tuple[str, ...]] = ()
    """What that one's `__init__` takes."""

    _made_with: dict[str, Any]
    """Arguments of a module's that parameters were made of, which have moved on since."""

    query_width: int | None = None
    """D of a query; None is any. Where `__init__` takes it, as `width`, a query of another one is told so."""

    query_holds: ClassVar[str] = ""
    """What the numbers of a query are, where they are no embedding."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in ("finest", "nested"):
            if "choose" in vars(cls) and name not in vars(cls):
                setattr(cls, name, False)

    def __init__(self, budget: int = 273, patch: int = 14, pool: Pool = "mean") -> None:
        self.budget = checks.integer(budget, "budget", at_least=1, at_most=2**20)
        self.patch = checks.integer(patch, "patch", at_least=1, at_most=2**12)
        self.pool: Pool = checks.choice(pool, "pool", ("mean", "max"))

    @abstractmethod
    def choose(self, scene: Scene) -> tuple[torch.Tensor, ...]:
        """Sites [B, K, 3] and scores [B, K], high scores first; and weights [B, K, Hg Wg] if there are such: how much
        of each level-0 patch, row by row, goes into each token. They sum to 1 for each token."""

    def __call__(
        self,
        image: torch.Tensor | Pyramid | None = None,
        relevance: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        fixation: Any = None,
        labels: torch.Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bias: float = 0.0,
    ) -> TokenSet:
        """Choose sites, and read the patches there.

        Shape: image [B, C, H, W] or [C, H, W], or a mean `Pyramid` of one; relevance [B, Hg, Wg] over the grid of
            level-0 patches, Hg = ceil(H / P), or [B, H, W]; query [B, D] or [D]; fixation [B, 2] or [2]; labels
            [B, H, W] or [B, Hg, Wg], integers; without B for an unbatched image.
        Units: relevance in any units, higher is more relevant, compared as fp32; fixation (x, y) in [0, 1], y down.
        Convention: a factor moves no site, but for rounding; an offset does, for tokens are shared by amounts, and zero
            is nothing. A map with negative values counts from its least, one without from 0. Subtract each map's least
            value where zero means nothing, as in cosine similarities.
            inf is more than all finite numbers. -inf ranks last and adds nothing to what tokens are shared by, but is
            no mask: where a budget or a rule asks for tokens they are chosen there too. Crop the picture instead.

        Args:
            image: None gives sites alone, of a picture of Hg P x Wg P pixels.
            relevance: None is the saliency of the image (channel 5 of `feature_maps`). An image's sites are the same
                in any batch, those of blends but for rounding.
            mean, std: a number a channel, of the image; patches are then (value - mean) / std, as in `gather_patches`.
            bias: of the levels that patches are read at, as in `gather_patches`: -0.5 is sharper.

        Raises:
            InputError: something that the allocator needs is missing, is not taken, or does not fit, as a bias where
                patches are blends of level 0; NaN in the relevance; a budget larger than the number of sites there are.
            UnsupportedError: inside `torch.func.vmap`.
        """
        given = image, relevance, query, fixation, labels, mean, std, bias
        if torch.compiler.is_compiling():
            return traced(self, *given) if traceable(self) else _alone(self, *given)
        return _alone(self, *given) if would_compile() else self._tokens(*given)

    @precision.in_full
    def _tokens(
        self,
        image: Any,
        relevance: Any,
        query: Any,
        fixation: Any,
        labels: Any,
        mean: Any,
        std: Any,
        bias: float = 0.0,
    ) -> TokenSet:
        """As a call of the allocator, by itself: without hooks, and with no eye on compiled code."""
        heap.keep_freed()
        self._check_bias(bias)
        scene, batched = self._scene(image, relevance, query, fixation, labels)
        found = self._in_parts(scene, lambda part: self._chosen(part, mean, std))
        if not batched:
            found = tuple(value[0] for value in found)
        sites, scores, weights, patches = (*found, None, None)[:4]
        assert sites is not None and scores is not None
        scores = scores.contiguous()  # the best few of many are a part of them, which safetensors refuses
        if scene.image is not None and not self.blends:
            patches = self._read(scene, sites, mean, std, bias)
        return TokenSet(sites, scores, patches, self.patch, weights)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """What every allocator has, and the arguments of its own that are not as by default, where it holds them under
        their names."""
        found = {"budget": self.budget, "patch": self.patch, "pool": self.pool}
        held = vars(self) | vars(self).get("_made_with", {})
        for name, default in _arguments(type(self)).items():
            value = held.get(name, default)
            # As they are printed, for not everything that is equal is True.
            if not isinstance(value, (torch.Tensor, torch.nn.Module)) and repr(value) != repr(default):
                found.setdefault(name, value)
        return ", ".join(f"{name}={value!r}" for name, value in found.items())

    def _settings(self) -> list[tuple[str, Any]]:
        """Arguments by which another one is made like it, but for parameters; of a class of the package."""
        made_with: dict[str, Any] = self._made_with if isinstance(self, torch.nn.Module) else {}
        return [(name, made_with[name] if name in made_with else getattr(self, name)) for name in self._arguments]

    def work(self, scene: Scene) -> int:
        """Numbers that it goes through for each image of a scene, where they are many; 0 where they are few."""
        return 0

    def _in_parts(
        self, scene: Scene, job: Callable[..., tuple[torch.Tensor, ...]], *of_images: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`job(scene, *of_images)`. On a CPU for so many images at a time that they are no more than `AT_ONCE` numbers:
        fresh memory for all of a large batch takes it longer than the work does."""
        work = self.work(scene)
        at_once = max(1, AT_ONCE // work) if work and scene.device.type == "cpu" else scene.batch
        if scene.batch <= at_once:
            return job(scene, *of_images)
        parts = zip(scene.split(at_once), *(x.split(at_once) for x in of_images), strict=True)
        return joined((job(*part) for part in parts), scene.batch)

    def _chosen(
        self, scene: Scene, mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> tuple[torch.Tensor, ...]:
        """What `choose` gives, and the patches where they are blends: while their weights are near by."""
        found = self.checked(scene, self.choose(scene))
        if scene.image is None or not self.blends:
            return found
        return *found, self._blended(scene, found[2], mean, std)

    def checked(self, scene: Scene, found: Any) -> tuple[torch.Tensor, ...]:
        """What `choose` gave, as it is.

        Raises:
            InputError: it is not what `choose` promises. Values are looked at where the class is not of this package.
        """
        what = f"choose() of {type(self).__name__} gave"
        if not isinstance(found, (tuple, list)) or not all(isinstance(values, torch.Tensor) for values in found):
            raise InputError(
                f"{what} a {type(found).__name__}; expected tensors (sites, scores){', and weights' * self.blends}."
            )
        shapes = [(scene.batch, self.budget, 3), (scene.batch, self.budget)]
        shapes += [(*shapes[1], scene.grid[0] * scene.grid[1])] * self.blends
        if [tuple(values.shape) for values in found[: len(shapes)]] != shapes:
            if self._of_the_package:  # whose budget was changed
                raise InputError(
                    f"{type(self).__name__} has parameters for a budget of {found[1].shape[1]}, not {self.budget}. "
                    "Make another one for that."
                )
            raise InputError(
                f"{what} {', '.join(str(tuple(values.shape)) for values in found)}; "
                f"expected sites, scores{' and weights' * self.blends} of {', '.join(map(str, shapes))}: exactly "
                f"{self.budget} for each image."
            )
        if self._of_the_package or not checks.readable(scene.relevance):
            return tuple(found)
        for name, values in zip(("sites", "scores", "weights"), found, strict=False):
            if not values.is_floating_point():
                raise InputError(f"{what} {name} of {values.dtype}; expected floating point, as scene.sites() gives.")
            checks.same_device(scene.relevance, values, name, "the relevance")
        checks.highest_level(found[0])
        scores = found[1].detach()
        if not (scores[:, 1:] <= scores[:, :-1]).all() or scores.isnan().any():
            raise InputError(
                f"{what} scores that rise or are NaN; expected high ones first: torch.sort(scores, descending=True, "
                "stable=True), and sites in the same order."
            )
        return tuple(found)

    def _blended(
        self,
        scene: Scene,
        weights: torch.Tensor,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Patches [B, K, C, P, P] by weights [B, K, Hg Wg]."""
        grid = self._tiles(scene) if mean is None and std is None else None
        if grid is not None:
            return blended(weights, grid.flatten(-3)).unflatten(-1, grid.shape[-3:])
        every = scene.sites(0, torch.arange(scene.grid[0] * scene.grid[1], device=scene.device))
        kind = torch.float32 if scene.top.dtype == torch.uint8 else scene.top.dtype
        grid = self._gathered(scene.top, every, finest=True, mean=mean, std=std, dtype=kind)
        return blended(weights, grid.flatten(-3)).unflatten(-1, grid.shape[-3:])

    @staticmethod
    def _tiles(scene: Scene) -> torch.Tensor | None:
        """All level-0 patches [B, Hg Wg, C, P, P] of pictures that are whole ones, copied as they lie; None where they
        are to be gathered, at twice the cost."""
        top, patch = scene.top, scene.patch
        if any(n % patch for n in scene.size) or top.dtype != torch.float32 or not top.numel():
            return None
        if not dispatch.needs_grad(top) and by_kernel.usable(top):
            found = by_kernel.attempt(top.device, lambda: tiles(kernels.device_of(top), top, patch))
            if found is not None:
                return found
        rows, columns = scene.grid
        split = top.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))
        return split.permute(0, 2, 4, 1, 3, 5).flatten(1, 2).contiguous()

    def _read(
        self,
        scene: Scene,
        sites: torch.Tensor,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bias: float = 0.0,
    ) -> torch.Tensor:
        """The patches at sites, which are without B if the image is."""
        image: Any = scene.image
        if scene.chain and not isinstance(image, Pyramid) and not self._by_kernel(image, sites):
            levels = math.ceil(float(checks.values(sites)[..., 2].max()) + bias)
            if 0 < levels <= len(scene.chain):
                chain = scene.chain[:levels]
                image = Pyramid((image, *(chain if image.ndim == 4 else [level[0] for level in chain])))
        return self._gathered(image, sites, finest=self.finest and bias <= 0, mean=mean, std=std, bias=bias)

    def _check_bias(self, bias: Any) -> None:
        if checks.number(bias, "bias") and self.blends:
            raise InputError(
                f"bias is {bias:g}, and tokens of {type(self).__name__} are blends of level-0 patches. Leave it out."
            )

    def _gathered(self, image: Any, sites: torch.Tensor, *, finest: bool, **how: Any) -> torch.Tensor:
        """Patches at sites that were chosen here. On a GPU by one launch, or two where levels are to be made: torch
        would wait for the sites to tell what it reads, which no CUDA graph may.

        Args:
            finest: all sites are of level 0.
        """
        top = image.levels[0] if isinstance(image, Pyramid) else image
        if not top.is_floating_point() and how.get("mean") is None and how.get("std") is None:
            sites = sites.detach()  # counts have no gradients
        if not self._by_kernel(image, sites):
            return gather_patches(image, sites, self.patch, **how)
        source = Pyramid((image,)) if finest and not isinstance(image, Pyramid) else image
        found = by_kernel.attempt(
            sites.device, lambda: gather_patches(source, sites, self.patch, backend="cuda", **how), waits=True
        )
        return gather_patches(image, sites, self.patch, **how) if found is None else found

    @property
    def _of_the_package(self) -> bool:
        """Else it chooses as its author will."""
        # Functions that were made by exec may be of no module.
        return (type(self).choose.__module__ or "").startswith(__package__)

    @staticmethod
    def _by_kernel(image: Any, sites: torch.Tensor) -> bool:
        top = image.levels[0] if isinstance(image, Pyramid) else image
        return not dispatch.needs_grad(sites) and by_kernel.usable(sites, top)

    # -- what it is given -------------------------------------------------------------------------------------------

    def _scene(self, image: Any, relevance: Any, query: Any, fixation: Any, labels: Any) -> tuple[Scene, bool]:
        given = {"image": image, "query": query, "fixation": fixation, "labels": labels}
        levels = image.levels if isinstance(image, Pyramid) else (image,)
        for value in (*levels, relevance, query, fixation, labels):
            checks.no_vmap(value, type(self).__name__, "pass all images as one batch.")
        for need in self.needs:
            if need != "relevance" and given[need] is None:
                raise InputError(f"{type(self).__name__} needs {need}; pass {need}=.")
        for name, value in given.items():
            if name != "image" and value is not None and name not in self.needs + self.takes:
                looks = sorted({"image", "relevance", *self.needs, *self.takes})
                raise InputError(f"{type(self).__name__} takes no {name}, but {', '.join(looks)}. Leave {name}= out.")
        if image is None and relevance is None:
            raise InputError(f"{type(self).__name__} needs an image, or a relevance map; pass image= or relevance=.")
        if image is not None and not isinstance(image, Pyramid):
            image = checks.tensor(image, "image")
        batched, batch, size = self._frame(image, relevance)
        if relevance is None:
            top = image.levels[0] if isinstance(image, Pyramid) else image
            top = top if top.ndim == 4 else top[None]
            if "relevance" in self.needs:
                grid = finite(saliency_cells(top, self.patch, self.pool))
            else:
                grid = _grid_of(size, self.patch, batch, top.device)
        else:
            grid = self._map(relevance, batched, batch, size)
        points = None
        if fixation is not None:
            points = checks.fixation(fixation, batch)
            if not isinstance(fixation, torch.Tensor) and grid.device.type == kernels.KIND:
                # Which no graph may bring anew.
                points = numbers(tuple(map(tuple, points.tolist())), points.dtype, grid.device)
            points = points.to(grid.device)
        if image is not None:
            top = image.levels[0] if isinstance(image, Pyramid) else image
            checks.same_device(top, grid, "relevance")
        query = None if query is None else self._query(query, batch).to(grid.device)
        if labels is not None:
            labels = label_maps(labels, batched, batch, size, self.patch).to(grid.device)
        return Scene(size, self.patch, grid, points, image, query, labels), batched

    def _frame(self, image: Any, relevance: Any) -> tuple[bool, int, tuple[int, int]]:
        """Whether there is a batch, how many images, and their size in pixels."""
        if image is None:
            values = checks.dense(relevance, "relevance")
            if values.ndim not in (2, 3) or not values.numel():
                hint = _shaped(values) or "Give each patch a number."
                raise InputError(
                    f"relevance has shape {tuple(values.shape)}; expected [B, Hg, Wg] or [Hg, Wg], with no side of 0. "
                    f"{hint}"
                )
            size = values.shape[-2] * self.patch, values.shape[-1] * self.patch
            return values.ndim == 3, values.shape[0] if values.ndim == 3 else 1, size
        top = checks.mean_source(image, type(self).__name__, name="image")
        return top.ndim == 4, top.shape[0] if top.ndim == 4 else 1, (top.shape[-2], top.shape[-1])

    def _map(self, relevance: Any, batched: bool, batch: int, size: tuple[int, int]) -> torch.Tensor:
        values = checks.dense(relevance, "relevance")
        cells = cells_of(size, self.patch)
        expected = [(batch, *cells), (batch, *size)] if batched else [cells, size]
        if tuple(values.shape) not in expected or values.dtype == torch.bool:
            hint = "Resize it with torch.nn.functional.interpolate, and make masks numbers with .float()."
            if not batched and tuple(values.shape) in [(1, *shape) for shape in expected]:
                hint = "The picture is no batch: pass relevance[0], or image[None]."
            elif values.dtype != torch.bool:
                hint = _shaped(values, cells) or hint
            raise InputError(
                f"relevance is {values.dtype} {tuple(values.shape)}; expected numbers of shape {expected[0]}, one a "
                f"patch, or {expected[1]}, one a pixel. {hint}"
            )
        values = (values if batched else values[None]).float()
        checks.no_nan(values, "relevance")
        if tuple(values.shape[1:]) == cells:
            return values.contiguous()  # sums of another order are rounded otherwise
        if not checks.readable(values) or bool((values.detach().abs() > 2.0**HIGHEST).any()):
            return self._pooled(values.double()).float()  # sums of such are no numbers of single precision
        return self._pooled(values)

    def _query(self, query: Any, batch: int) -> torch.Tensor:
        values = checks.dense(query, "query")
        width = self.query_width
        shape = tuple(values.shape)
        lengths = shape[-1:] if width is None else (width,)
        if shape not in ((lengths), (batch, *lengths)) or not values.is_floating_point() or not values.numel():
            wide = "D" if width is None else width
            holds = self.query_holds and f", {self.query_holds}"
            way_out = ""
            if shape[-1:] not in ((), (0,), (width,)) and "width" in _arguments(type(self)):
                way_out = f" For queries {shape[-1]} wide make it with width={shape[-1]}."
            elif "query" in self.takes:
                way_out = " Leave query= out to do without."
            raise InputError(
                f"query is {values.dtype} {shape}; expected floats [{batch}, {wide}] or [{wide}]{holds}.{way_out}"
            )
        values = values.float()  # of float8, torch knows little else
        if checks.readable(values) and not torch.isfinite(values.detach()).all():
            raise InputError(
                "query holds NaN or infinities; expected finite numbers in fp32. torch.nan_to_num makes them so."
            )
        return values.expand(batch, *lengths)

    def _pooled(self, values: torch.Tensor) -> torch.Tensor:
        """[B, H, W] to [B, Hg, Wg]. Where both infinities meet, the mean is the higher one."""
        found = pooled(values, self.patch, self.pool)
        return found.nan_to_num(math.inf, math.inf, -math.inf) if self.pool == "mean" else found

    def enough(self, there: int, what: str = "patches") -> None:
        """Raises InputError where the budget is larger than the number of sites."""
        if self.budget > there:
            raise InputError(
                f"the budget is {self.budget}, and there are {there} {what}. Use a larger image, smaller patches, or a "
                "smaller budget."
            )


_alone = apart(Allocator._tokens)


def _arguments(kind: type) -> dict[str, Any]:
    """What `__init__` takes, by name, with defaults; and that of a parent where it hands on whatever it is given."""
    found: dict[str, Any] = {}
    for cls in kind.__mro__:
        if "__init__" in vars(cls):
            taken = inspect.signature(vars(cls)["__init__"]).parameters.values()
            handed_on = [one for one in taken if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
            found = {one.name: one.default for one in taken if one not in handed_on} | found
            if not handed_on:
                break
    return found


def _grid_of(size: tuple[int, int], patch: int, batch: int, device: torch.device) -> torch.Tensor:
    return torch.ones(batch, *cells_of(size, patch), dtype=torch.float32, device=device)


def _shaped(values: torch.Tensor, cells: tuple[int, int] | None = None) -> str:
    """What makes relevance of what networks give, maps with a channel and tokens in a row, or nothing."""
    if values.ndim == 4 and values.shape[1] == 1:
        return "Drop its channel: relevance[:, 0]."
    if cells is not None and values.ndim in (1, 2) and values.shape[-1] == cells[0] * cells[1]:
        return f"Give its tokens rows: relevance.unflatten(-1, {cells})."
    return ""


def register(allocator: A) -> A:
    """Add an allocator, by its class's name. Decorates a class.

    Raises:
        InputError: no class of allocators, or another one has that name.
    """
    if not (isinstance(allocator, type) and issubclass(allocator, Allocator)):
        raise InputError(f"{allocator!r} is no class of allocators; derive it from gpu_lod.allocate.Allocator.")
    if inspect.isabstract(allocator):
        raise InputError(f"{allocator.__name__} has no choose() of its own; give it one.")
    there = kinds.get(allocator.__name__, allocator)
    if (there.__module__, there.__qualname__) != (allocator.__module__, allocator.__qualname__):
        # The same one again is a notebook's cell that is run anew.
        raise InputError(
            f"there is an allocator {allocator.__name__} already, that of {there.__module__}; give the class another "
            "name."
        )
    kinds[allocator.__name__] = allocator
    if allocator.__module__.startswith(f"{__package__}."):
        allocator._own = allocator
        allocator._arguments = tuple(name for name in _arguments(allocator) if name != "self")
    return allocator


def names() -> list[str]:
    """The allocators there are."""
    return sorted(kinds)


def make(name: str, *args: Any, **kwargs: Any) -> Allocator:
    """An allocator by its name.

    Raises:
        InputError: an unknown name; the message lists those there are.
    """
    checks.choice(name, "name", names())
    return kinds[name](*args, **kwargs)
