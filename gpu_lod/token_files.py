"""Files about tokens: sites to JSON or safetensors, and the labels and queries that allocators take."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from gpu_lod import whole_file
from gpu_lod.errors import FileError, InputError
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


def write_sites(path: Path, tokens: TokenSet, about: dict[str, Any], patches: bool = False) -> None:
    """Sites [K, 3] and scores [K] of unbatched tokens, with what is known about them. Makes the parent folder.

    JSON has no infinity and no NaN: null stands for them. Features [K, D] are written too if there are any, which JSON
    does not hold, and weights [K, Hg Wg], which JSON leaves out. `safetensors.torch.load_file` reads the tensors.

    Args:
        about: allocator, image, size and so on, by name; strings or what JSON holds. safetensors keeps it as metadata,
            in JSON.
        patches: [K, C, P, P] too, in safetensors.

    Raises:
        FileError: an unknown extension, patches or features in JSON, or the file cannot be written.
        InputError: tokens of a batch, patches where the tokens have none, or what JSON does not hold.
    """
    path = Path(path)
    check_sites_path(path, patches)
    if tokens.sites.ndim != 2:
        raise InputError(
            f"sites are {tuple(tokens.sites.shape)}; expected [K, 3]. Write each image of a batch by itself."
        )
    if patches and tokens.patches is None:
        raise InputError("these tokens hold no patches to write. Allocate with image=, or leave patches out.")
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
        from safetensors.torch import save

        tensors = {"sites": tokens.sites, "scores": tokens.scores}
        if patches and tokens.patches is not None:
            tensors["patches"] = tokens.patches
        tensors |= {
            name: values
            for name, values in (("features", tokens.features), ("weights", tokens.weights))
            if values is not None
        }
        metadata = {key: value if isinstance(value, str) else _json(value) for key, value in about.items()}
        # Names of files need not be UTF-8, which metadata is: as in JSON, what is not is escaped.
        metadata = {key: value.encode(errors="backslashreplace").decode() for key, value in metadata.items()}
        # Copies, for tensors that share memory are refused.
        data = save(
            {key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}, metadata
        )
    try:
        whole_file.write(path, data)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise FileError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from None


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"about holds what JSON does not ({error}). Give strings, numbers, None, and lists and dicts of them."
        ) from None


def _finite(value: Any) -> Any:
    """The same with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_labels(path: Path) -> torch.Tensor:
    """A label map, int64 [H, W]: a .npy of integers, or a picture of one integer a pixel (palettes give their indices).

    Raises:
        FileError: missing, unreadable, or no such map.
    """
    if path.suffix.lower() == ".npy":
        values = _numpy(path)
    else:
        _look(path)
        try:
            with Image.open(path) as picture:
                picture.load()
                mode, values = picture.mode, np.array(picture)
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
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        values = _numpy(path)
        if values.dtype.kind not in "fiu":
            raise FileError(f"{path} holds {values.dtype} {values.shape}; expected a query: numbers of shape (D,).")
        query = torch.from_numpy(values.astype(np.float32))
    elif suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(_look(path))
        except SafetensorError as error:
            raise FileError(f"{path} is no safetensors file that can be read: {error}.") from None
        if len(tensors) != 1 and "query" not in tensors:
            raise FileError(f"{path} holds {', '.join(sorted(tensors)) or 'nothing'}; expected a tensor named query.")
        query = tensors.get("query", next(iter(tensors.values()))).float()
    else:
        raise FileError(f"{path}: unknown extension {path.suffix!r}; a query is a .npy or .safetensors file.")
    if query.ndim == 2 and query.shape[0] == 1:
        query = query[0]
    if query.ndim != 1 or not query.numel():
        raise FileError(f"{path} holds a tensor of shape {tuple(query.shape)}; expected a query of shape (D,).")
    return query


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
