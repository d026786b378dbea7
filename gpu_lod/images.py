"""Picture files to tensors and back, by Pillow; and the atlas, the classical layout of a mip chain in one picture."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps

from gpu_lod import whole_file
from gpu_lod.errors import FileError, InputError

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF", ".tiff": "TIFF", ".webp": "WEBP"}
_MODES = ("L", "LA", "RGB", "RGBA")  # by number of channels
_OPTIONS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "JPEG": {"quality": 95, "subsampling": 0},
    "TIFF": {"compression": "tiff_adobe_deflate"},
    "WEBP": {"lossless": True, "exact": True},  # exact: colours under transparent pixels are kept
}
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_SAMPLE_FORMAT, _PHOTOMETRIC, _BITS = 339, 262, 258
"""TIFF tags: 1, or none, for unsigned integers, 2 for signed ones; 0 where the least value is white; bits a sample."""
_LARGEST_SIDE = {"JPEG": 65500, "WEBP": 16383}

PathLike = str | os.PathLike[str]


def load(path: PathLike | BinaryIO) -> torch.Tensor:
    """A PNG, JPEG, TIFF or WebP picture as a tensor, of a file's path, or of a binary file that is open (an upload, or
    `io.BytesIO(data)`).

    Shape: [C, H, W], C = 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA).
    Units: uint8 as stored; 16-bit grey becomes float32 in [0, 1], and 32-bit TIFF float32 as stored. Pillow reads
        16-bit colour, and grey with alpha, as 8-bit.
    Convention: turned upright as EXIF says; palettes become RGB or RGBA; CMYK becomes RGB; alpha is kept, not applied,
        but for a colour of a PNG that is not of 8 bits that stands for it. Of several frames or pages, the first.

    Raises:
        FileError: missing, a directory, unreadable, no picture, truncated, or so large that it looks like an attack.
    """
    path, data = _read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of large pictures well before it refuses them
        try:
            picture: Image.Image = Image.open(io.BytesIO(data), formats=sorted(set(FORMATS.values())))
        except Image.DecompressionBombError as error:
            raise FileError(f"{path} is refused: {_reason(error)}.") from None
        except Exception:  # a broken header makes Pillow's parsers raise many kinds
            if data[:4] in _TIFF:
                raise FileError(
                    f"{path} is a TIFF of a kind that Pillow does not read, as colours in floating point are. Write "
                    "each channel as a picture, or another kind."
                ) from None
            raise FileError(f"{path} is not a PNG, JPEG, TIFF or WebP picture.") from None
        try:
            picture.load()
            if picture.format == "PNG":  # whose checksums loading does not look at
                Image.open(io.BytesIO(data), formats=["PNG"]).verify()
            tags = getattr(picture, "tag_v2", {})
            unsigned = tags.get(_SAMPLE_FORMAT) in ((1,), 1, None)
            if not unsigned and picture.mode == "L":
                raise ValueError("it holds signed bytes, which Pillow takes for others")
            values = _values(upright(picture), picture.format, unsigned)
            if picture.mode.startswith("I;16") and picture.format == "TIFF":  # which Pillow leaves as they are
                bits = tags.get(_BITS, 16)
                values = values * np.float32(65535 / (2 ** (bits[0] if isinstance(bits, tuple) else bits) - 1))
                values = 1 - values if tags.get(_PHOTOMETRIC) == 0 else values
        except Exception as error:  # so do its decoders
            raise FileError(f"{path} is truncated, damaged or of an unknown kind: {_reason(error)}.") from None
    if values.ndim == 2:
        values = values[..., None]
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


def _read(path: PathLike | BinaryIO) -> tuple[str, bytes]:
    """What to call a file, and what is in it."""
    name = str(getattr(path, "name", "the picture") if hasattr(path, "read") else path)
    try:
        data = path.read() if hasattr(path, "read") else Path(path).read_bytes()
    except FileNotFoundError:
        raise FileError(f"{name} does not exist.") from None
    except IsADirectoryError:
        raise FileError(f"{name} is a directory; expected a picture file.") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{name} cannot be read: {_reason(error)}.") from None
    if not isinstance(data, bytes):
        raise FileError(f"{name} is open as text; open it with 'rb'.")
    return name, data


def upright(picture: Image.Image) -> Image.Image:
    """As EXIF says, if that can be read."""
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # of what is no EXIF its parser raises many kinds
        return picture


def _values(picture: Image.Image, source: str | None, unsigned: bool) -> np.ndarray[Any, Any]:
    """Pixels [H, W] or [H, W, C], uint8 or float32. `source`: the file's format, which transposing forgets, as it does
    whether 32-bit integers are unsigned."""
    mode = picture.mode
    if mode.startswith("I;16") or (mode == "I" and source == "PNG"):
        return (np.array(picture).astype(np.float64) / 65535).astype(np.float32)
    if mode in ("I", "F"):
        values = np.array(picture)
        if mode == "I" and unsigned:  # which Pillow takes for signed
            values = values.view(np.uint32)
        return values.astype(np.float32)
    transparent = "transparency" in picture.info  # one colour, or a palette's
    if mode not in _MODES or transparent:
        grey = mode in ("1", "L", "LA", "La")
        alpha = transparent or mode in ("LA", "RGBA", "La", "RGBa", "PA")
        picture = picture.convert(("LA" if alpha else "L") if grey else ("RGBA" if alpha else "RGB"))
    return np.array(picture)


def save(tensor: torch.Tensor, path: PathLike) -> None:
    """Write a picture; the extension says how. Makes the parent folder.

    Shape: [C, H, W], C = 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA).
    Units: uint8 0..255, or floating point in [0, 1], clamped, NaN as 0. One channel of floating point becomes a
        16-bit PNG, or a 32-bit TIFF that keeps every value that fp32 holds; otherwise 8 bits are written. All but JPEG
        are lossless; WebP has no grey, so grey comes back as RGB, and no alpha that is opaque all over.

    Raises:
        InputError: not such a tensor.
        FileError: an unknown extension, alpha in JPEG, too large for the format, or the file cannot be written.
    """
    path = Path(path)
    kind = file_format(path)
    picture = _picture(tensor, kind)
    if kind == "JPEG" and tensor.shape[0] in (2, 4):
        raise FileError(f"{path}: JPEG holds no alpha. Write .png, .tiff or .webp, or drop the last channel.")
    largest = _LARGEST_SIDE.get(kind)
    if largest is not None and max(picture.size) > largest:
        raise FileError(f"{path}: {kind} ends at {largest} px a side, and this is {picture.size}. Write .png or .tiff.")
    encoded = io.BytesIO()  # so that a failing encoder leaves no half a file
    picture.save(encoded, format=kind, **_OPTIONS[kind])
    try:
        whole_file.write(path, encoded.getvalue())
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be written: {_reason(error)}.") from None


def file_format(path: PathLike) -> str:
    """The format that a file name's extension stands for.

    Raises:
        FileError: none that `save` can write.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise FileError(f"{path}: unknown picture extension {suffix!r}; the choices are {', '.join(FORMATS)}.")
    return FORMATS[suffix]


def _picture(tensor: torch.Tensor, kind: str) -> Image.Image:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 3 or not 1 <= tensor.shape[0] <= 4 or not tensor.numel():
        what = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InputError(f"the picture is {what}; expected a tensor [C, H, W] with 1 to 4 channels.")
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.uint8:
        if not tensor.dtype.is_floating_point:
            raise InputError(f"the picture is {tensor.dtype}; expected uint8, or floating point in [0, 1].")
        if tensor.shape[0] == 1 and kind == "TIFF":
            return Image.fromarray(tensor[0].float().numpy())
        tensor = tensor.double().nan_to_num(nan=0.0).clamp(0, 1)
        if tensor.shape[0] == 1 and kind == "PNG":
            return Image.fromarray((tensor[0] * 65535).round().numpy().astype(np.uint16))
        tensor = (tensor * 255).round().to(torch.uint8)
    values = tensor.permute(1, 2, 0).contiguous().numpy()
    height, width, channels = values.shape
    return Image.frombytes(_MODES[channels - 1], (width, height), values.tobytes())


def atlas_offsets(levels: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(x, y) of each level's top left corner in `atlas`."""
    offsets, x, y = [(0, 0)], levels[0].shape[-1], 0
    for level in levels[1:]:
        offsets.append((x, y))
        y += level.shape[-2]
    return offsets


def atlas(levels: Sequence[torch.Tensor], background: float = 0) -> torch.Tensor:
    """All levels in one picture: level 0 on the left, the others stacked on its right.

    Shape: levels [C, h, w] each, finest first; the result is [C, h', w'], of their dtype, `background` in between.
    """
    offsets = atlas_offsets(levels)
    height = max(y + level.shape[-2] for level, (_, y) in zip(levels, offsets, strict=True))
    width = max(x + level.shape[-1] for level, (x, _) in zip(levels, offsets, strict=True))
    result = levels[0].new_full((levels[0].shape[0], height, width), background)
    for level, (x, y) in zip(levels, offsets, strict=True):
        result[:, y : y + level.shape[-2], x : x + level.shape[-1]] = level
    return result


def _reason(error: BaseException) -> str:
    """An exception's own words on one line, without the path that an OSError repeats."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split()).rstrip(".")
