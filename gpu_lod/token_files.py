"""Files about tokens: sites to JSON or safetensors and back, and the labels and queries that allocators take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_lod import whole_file
from gpu_lod.errors import FileError, GpuLodError, InputError, UnsupportedError
from gpu_lod.token_set import TokenSet

CONVENTION = (
    "A site is (x, y, level): x and y in [0, 1] of width and height, y down; patch x patch samples 2^level pixels "
    "apart, centred on it. Scores are high first. size is (H, W)."
)
_LABEL_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N")


def check_sites_path(path: Path, patches: bool) -> None:
    """Raises FileError where `write_sites` would, before any work."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".safetensors"):
        raise FileError(f"{path}: unknown extension {path.suffix!r}; sites are written to .json or .safetensors.")
    if patches and suffix == ".json":
        raise FileError(f"{path}: JSON holds no patches. Write .safetensors, or leave --patches out.")


def write_sites(path: str | Path, tokens: TokenSet, about: dict[str, Any] | None = None, patches: bool = False) -> None:
    """Sites [K, 3] and scores [K] of unbatched tokens, with what is known about them. Makes the parent folder.

    JSON has no infinity and no NaN: null stands for them. Features [K, D] are written too if there are any, which JSON
    does not hold, and weights [K, Hg Wg], which JSON leaves out. `read_sites` reads either.

    Args:
        about: allocator, image, size and so on, by name; strings or what JSON holds. safetensors keeps it as metadata:
            strings as they are where they read as no JSON, anything else in JSON.
        patches: [K, C, P, P] too, in safetensors.

    Raises:
        FileError: an unknown extension, patches or features in JSON, or the file cannot be written.
        InputError: tokens of a batch, patches where the tokens have none, or what JSON does not hold.
        UnsupportedError: safetensors is not installed, and it is such a file.
    """
    path = Path(path)
    check_sites_path(path, patches)
    if tokens.sites.ndim != 2:
        raise InputError(
            f"sites are {tuple(tokens.sites.shape)}; expected [K, 3]. Write each image of a batch by itself."
        )
    if patches and tokens.patches is None:
        raise InputError("these tokens hold no patches to write. Allocate with image=, or leave patches out.")
    about = {} if about is None else about
    if not isinstance(about, dict) or not all(isinstance(key, str) for key in about):
        raise InputError(f"about is {about!r}; expected a dict whose keys are strings.")
    if own := {"sites", "scores", "budget", "patch", "convention"} & set(about):
        raise InputError(f"about holds {', '.join(sorted(own))}, which the tokens say; leave them out.")
    if tokens.features is not None and path.suffix.lower() == ".json":
        raise FileError(f"{path}: JSON holds no features. Write .safetensors, or tokens whose features are None.")
    about = about | {"budget": tokens.budget, "patch": tokens.patch, "convention": CONVENTION}
    if path.suffix.lower() == ".json":
        data = _json(about | {"sites": tokens.sites.tolist(), "scores": tokens.scores.tolist()}, indent=1).encode()
    else:
        with _package("safetensors", "files of .safetensors"):
            from safetensors.torch import save

        tensors = {"sites": tokens.sites, "scores": tokens.scores}
        if patches and tokens.patches is not None:
            tensors["patches"] = tokens.patches
        tensors |= {
            name: values
            for name, values in (("features", tokens.features), ("weights", tokens.weights))
            if values is not None
        }
        metadata = {
            key: value if isinstance(value, str) and _said(value) is value else _json(value)
            for key, value in about.items()
        }
        # Names of files need not be UTF-8, which metadata is: as in JSON, what is not is escaped.
        metadata = {_escaped(key): _escaped(value) for key, value in metadata.items()}
        # Copies, for tensors that share memory are refused.
        data = save(
            {key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}, metadata
        )
    try:
        whole_file.write(path, data)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise FileError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from None


def read_sites(path: str | Path) -> tuple[TokenSet, dict[str, Any]]:
    """What `write_sites` wrote: tokens on the CPU, of fp32 where they come from JSON, and what is known about them.

    A score that JSON does not hold is infinite: scores are high first, so it is inf before a finite one and -inf after.

    Raises:
        FileError: missing, unreadable, or no such file.
        UnsupportedError: safetensors is not installed, and it is such a file.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        try:
            about = json.loads(_look(path))
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is no JSON that can be read: {error}.") from None
        if not isinstance(about, dict):
            raise FileError(f"{path} holds a {type(about).__name__}; expected an object with sites and scores.")
        found = {name: about.pop(name) for name in ("sites", "scores") if name in about}
    elif suffix == ".safetensors":
        found, metadata = _safetensors(path)
        about = {key: _said(value) for key, value in metadata.items()}
    else:
        raise FileError(f"{path}: unknown extension {path.suffix!r}; sites are read from .json or .safetensors.")
    there = {"sites": found, "scores": found, "patch": about}
    if missing := [name for name, where in there.items() if name not in where]:
        raise FileError(f"{path} holds no {' and no '.join(missing)}; expected a file of sites, as --sites writes it.")
    patch = about.pop("patch")
    try:
        if suffix == ".json":
            found = {"sites": torch.tensor(found["sites"]), "scores": torch.tensor(_unbounded(found["scores"]))}
            found = {name: values.float() for name, values in found.items()}
        for name in ("sites", "scores", "weights"):
            if name in found and (not found[name].is_floating_point() or found[name].itemsize < 2):
                raise InputError(f"its {name} are {found[name].dtype}; expected floating point of 16 bits or more.")
        tokens = TokenSet(
            found["sites"], found["scores"], found.get("patches"), patch, found.get("weights"), found.get("features")
        )
    except (GpuLodError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path} is no file of sites: {error}") from None
    if tokens.sites.ndim != 2 or not tokens.sites.is_floating_point() or not tokens.sites.isfinite().all():
        raise FileError(
            f"{path} holds sites {tuple(tokens.sites.shape)} of {tokens.sites.dtype}; expected finite [K, 3]."
        )
    return tokens, {key: value for key, value in about.items() if key not in ("budget", "convention")}


def _unbounded(scores: list[float | None]) -> list[float]:
    """Infinities again for what JSON does not hold."""
    last = max((index for index, score in enumerate(scores) if score is not None), default=len(scores))
    return [
        score if score is not None else math.inf if index < last else -math.inf for index, score in enumerate(scores)
    ]


def _said(value: str) -> Any:
    """Metadata of safetensors, which are strings: JSON, or the string itself."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with _package("safetensors", "files of .safetensors"):
        from safetensors import SafetensorError, safe_open

    _look(path)
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise FileError(f"{path} is no safetensors file that can be read: {error}.") from None


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(finite(value), indent=indent, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"about holds what JSON does not ({error}). Give strings, numbers, None, and lists and dicts of them."
        ) from None


def finite(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not hold."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_labels(path: Path) -> torch.Tensor:
    """A label map, int64 [H, W]: a .npy of integers, or a picture of one integer a pixel (palettes give their indices),
    turned upright as EXIF says.

    Raises:
        FileError: missing, unreadable, or no such map.
        UnsupportedError: Pillow is not installed, and it is a picture.
    """
    if path.suffix.lower() == ".npy":
        values = _numpy(path)
    else:
        with _package("pillow", "pictures of labels"):
            from PIL import Image

            from gpu_lod.images import upright

        _look(path)
        try:
            with Image.open(path) as picture:
                picture.load()
                mode, values = picture.mode, np.array(upright(picture))
        except Exception as error:  # Pillow raises many kinds
            raise FileError(f"{path} is no picture that can be read: {' '.join(str(error).split())}") from None
        if mode not in _LABEL_MODES:
            raise FileError(
                f"{path} is a picture of mode {mode}; expected labels, one integer a pixel: a grey PNG of 8 or 16 "
                "bits, one with a palette, or a .npy of integers."
            )
    if values.ndim != 2 or values.dtype.kind not in "iub":
        raise FileError(f"{path} holds {values.dtype} {values.shape}; expected labels: integers of shape (H, W).")
    return torch.from_numpy(values.astype(np.int64))


def read_query(path: Path) -> torch.Tensor:
    """A query embedding, fp32 [D]: a .npy, or a .safetensors with one tensor, or one named query.

    Raises:
        FileError: missing, unreadable, or no such thing.
        UnsupportedError: safetensors is not installed, and it is such a file.
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        values = _numpy(path)
        if values.dtype.kind not in "fiu":
            raise FileError(f"{path} holds {values.dtype} {values.shape}; expected a query: numbers of shape (D,).")
        with np.errstate(over="ignore"):  # which is told where it is used
            query = torch.from_numpy(values.astype(np.float32))
    elif suffix == ".safetensors":
        tensors, _ = _safetensors(path)
        if len(tensors) != 1 and "query" not in tensors:
            raise FileError(f"{path} holds {', '.join(sorted(tensors)) or 'nothing'}; expected a tensor named query.")
        query = tensors.get("query", next(iter(tensors.values())))
        if query.is_complex() or query.dtype == torch.bool:
            raise FileError(
                f"{path} holds {query.dtype} {tuple(query.shape)}; expected a query: numbers of shape (D,)."
            )
        query = query.float()
    else:
        raise FileError(f"{path}: unknown extension {path.suffix!r}; a query is a .npy or .safetensors file.")
    if query.ndim == 2 and query.shape[0] == 1:
        query = query[0]
    if query.ndim != 1 or not query.numel():
        raise FileError(f"{path} holds a tensor of shape {tuple(query.shape)}; expected a query of shape (D,).")
    return query


@contextmanager
def _package(name: str, what: str) -> Iterator[None]:
    """Import it inside: where it is missing, that is said with the way out."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(f"{what} need {name} ({error}); in the checkout: pip install '.[cli]'") from None


def _look(path: Path) -> bytes:
    """The file's bytes."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _numpy(path: Path) -> np.ndarray[Any, Any]:
    _look(path)
    try:
        values = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged header raises many kinds
        raise FileError(f"{path} is no .npy file that can be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, np.ndarray):
        raise FileError(f"{path} is an archive of arrays; expected a single one, as numpy.save writes it.")
    return values
