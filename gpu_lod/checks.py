"""Argument checks shared by the verbs. Every message says what came, what was expected, and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils.dlpack import from_dlpack

from gpu_lod import recording
from gpu_lod.bridge.pool import check_alive
from gpu_lod.cached import capturing
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.kernels import device
from gpu_lod.pyramid import Pyramid, level_sizes

DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
_DTYPE_NAMES = "uint8, float16, bfloat16 or float32"

_FEW = 32
"""Channels that a picture may have; a side is longer."""

T = TypeVar("T")


def tensor(value: Any, name: str) -> torch.Tensor:
    """A torch tensor; from another library's array (CuPy, numpy, anything with DLPack) without a copy."""
    if isinstance(value, torch.Tensor):
        return negated(value)
    if isinstance(value, Pyramid):
        raise InputError(f"{name} is a Pyramid; expected a tensor. Pass one of its levels, such as pyramid.levels[0].")
    if not hasattr(value, "__dlpack__"):
        hint = "Make a list a tensor with torch.tensor(values)."
        if not torch.compiler.is_compiling() and type(value).__module__.startswith("PIL."):
            hint = (
                "Make a picture of Pillow one: torch.from_numpy(numpy.array(picture.convert('RGB'))).movedim(-1, -3); "
                "gpu_lod.images.load reads its file upright, with alpha, and more than 8 bits of grey."
            )
        elif isinstance(value, (str, PurePath)):
            picture = "numpy.array(Image.open(path).convert('RGB'))"
            hint = f"Read a picture's file with gpu_lod.images.load, or torch.from_numpy({picture}).movedim(-1, -3)."
        elif isinstance(value, (list, tuple)) and any(hasattr(one, "shape") for one in value):
            hint = "Make tensors of one size one by torch.stack; of several sizes, call this for each."
        raise InputError(
            f"{name} is {_kind(value)}; expected a torch tensor, a CuPy or numpy array, or another array that speaks "
            f"DLPack. {hint}"
        )
    _refuse_masks(value, name)
    try:
        _refuse_negative_strides(value)
        result: torch.Tensor = from_dlpack(value)
    except Exception as error:  # every library raises what it likes
        raise InputError(
            f"{name} is a {type(value).__name__} that torch cannot take through DLPack ({error}). Pass a contiguous, "
            "writable copy, in the machine's byte order and without negative strides."
        ) from None
    return result


def negated(value: torch.Tensor) -> torch.Tensor:
    """The tensor, without a negation that torch has put off: shaders and kernels read memory as it is."""
    if torch.compiler.is_compiling() or type(value) not in _PLAIN or not value.is_neg():
        return value
    return value.resolve_neg()


def _refuse_masks(value: Any, name: str) -> None:
    """Neither DLPack nor torch know of them."""
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{name} is a masked array, whose mask would be lost. Say what it hides: array.filled(0).")


def _refuse_negative_strides(array: Any) -> None:
    """torch does not survive them: its from_dlpack ends the process (2.13)."""
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        description = getattr(array, protocol, None) or {}
        if any(stride < 0 for stride in description.get("strides") or ()):
            raise ValueError("a negative stride")


def dense(value: Any, name: str) -> torch.Tensor:
    """An ordinary tensor with data: not sparse, nested, quantized, complex or on meta; other libraries' arrays too."""
    found = tensor(value, name)
    if found.is_nested:
        raise InputError(f"{name} is a nested tensor; expected an ordinary dense tensor. Pad and stack its parts.")
    if not _ordinary(found) or found.is_meta or found.is_complex():
        raise InputError(f"{name} is a {_kind(found)}; expected an ordinary dense tensor with data.")
    if not torch.compiler.is_compiling() and type(found) in _PLAIN:
        check_alive(found)
    return found


def _ordinary(value: torch.Tensor) -> bool:
    """Whether it is one block of values that are what they say."""
    return value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def ordinary(value: torch.Tensor, name: str) -> None:
    """A tensor of any dtype, complex too, on any device."""
    if not _ordinary(value):
        raise InputError(f"{name} is a {_kind(value)}; expected an ordinary dense tensor.")


def real(value: Any, name: str) -> torch.Tensor:
    """A dense tensor of numbers, not of booleans."""
    found = dense(value, name)
    if found.dtype == torch.bool:
        raise InputError(f"{name} is a {_kind(found)}; expected numbers. Convert it with .to(torch.float32).")
    return found


def no_nan(value: torch.Tensor, name: str) -> None:
    """They are read on the host, where they can be."""
    if readable(value) and torch.isnan(values(value)).any():
        raise InputError(f"{name} holds NaN; expected numbers, infinities too. Replace it with -inf or 0.")


def readable(value: torch.Tensor) -> bool:
    """Whether the host may look at values: a CUDA graph that is being captured has none yet, and holds no check."""
    return not capturing(value.device)


def image(value: Any, name: str = "image", *, max_channels: int | None = 4) -> torch.Tensor:
    """A dense tensor [B, C, H, W] or [C, H, W], no side empty, of a stored dtype; other libraries' arrays too."""
    image = dense(value, name)
    shape = tuple(image.shape)
    if image.ndim not in (3, 4):
        hint = " Add the channel with .unsqueeze(0)." if image.ndim == 2 else ""
        raise InputError(f"{name} has shape {shape}; expected [B, C, H, W] or [C, H, W].{hint}")
    if image.numel() == 0:
        raise InputError(f"{name} has shape {shape}; every side must be at least 1.")
    if image.dtype not in DTYPES:
        way = ".to(torch.float32)"
        if not image.dtype.is_floating_point and not image.dtype.is_complex:  # values in [0, 1], as floats are
            way += " and divide it by its white, or with .to(torch.uint8) where that is 255"
        raise InputError(f"{name} is {image.dtype}; expected {_DTYPE_NAMES}. Convert it with {way}.")
    if max_channels is not None and image.shape[-3] > max_channels:
        if shape[-1] <= max_channels or shape[-1] <= _FEW < min(shape[-3:-1]):
            hint = " The channels seem to come last: use .movedim(-1, -3)."
        else:
            hint = " Take some of them: patches of all can be read where an allocator puts tokens, by gather_patches."
        raise InputError(
            f"{name} has shape {shape}, that is {image.shape[-3]} channels; expected 1 to {max_channels}.{hint}"
        )
    return image


def choice(value: Any, name: str, choices: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} is {shown(value)}; expected one of {', '.join(map(repr, choices))}.")
    return value


def integer(value: Any, name: str, *, at_least: int, at_most: int | None = None) -> int:
    """A Python integer, of numpy's too."""
    if isinstance(value, np.integer):
        value = int(value)
    whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not whole or not at_least <= value <= (at_most or _LARGEST):
        limit = f"an integer of at least {at_least}" if at_most is None else f"an integer from {at_least} to {at_most}"
        if torch.compiler.is_compiling() and isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            raise InputError(f"{name} has no value yet; in compiled code expected {limit}.")
        if whole and abs(value) > _LARGEST:  # of which Python may refuse to print the digits
            raise InputError(f"{name} is beyond 64 bits; expected {limit}.")
        hint = " Make it one with int()." if hasattr(value, "__index__") and not isinstance(value, int) else ""
        raise InputError(f"{name} is {shown(value)}; expected {limit}.{hint}")
    return value


_LARGEST = 2**63 - 1


def _refuse_gradients(value: Any, name: str, expected: str) -> None:
    """Raises where a tensor whose values are read asks for gradients, which would be none without a word."""
    if not isinstance(value, torch.Tensor) or torch.compiler.is_compiling():
        return
    if (value.requires_grad and torch.is_grad_enabled()) or transformed(value):
        raise InputError(f"{name} asks for gradients, and none pass to it; expected {expected}.")


def number(value: Any, name: str) -> float:
    _refuse_gradients(value, name, "a number. Make it one with .item()")
    try:
        if isinstance(value, torch.Tensor) and (not _ordinary(value) or value.is_meta or value.is_complex()):
            raise TypeError
        if isinstance(value, (str, bytes, bytearray)):  # which float() would read
            raise TypeError
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} is {_kind(value)}; expected a number.") from None
    if not -math.inf < result < math.inf:  # which compiled code can ask of a number that it does not know yet
        raise InputError(f"{name} is {result}; expected a finite number.")
    return result


def between(value: Any, name: str, low: float, high: float) -> float:
    """A number in [low, high]."""
    result = number(value, name)
    if not low <= result <= high:
        sign = "positive number" if low > 0 else "number"
        raise InputError(f"{name} is {result:g}; expected a {sign} from {low:g} to {high:g}.")
    return result


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}; expected True or False.")
    return value


def numbers(value: Any, name: str, count: int) -> tuple[float, ...]:
    """One finite number a channel."""
    _refuse_gradients(value, name, "numbers. Make it that with .detach()")
    values = dense(value, name).tolist() if isinstance(value, torch.Tensor) else value
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise InputError(f"{name} is {shown(value)}; expected {count} numbers, one a channel.")
    return tuple(number(one, name) for one in values)


def levels(
    value: Any, height: int, width: int, sizes: Callable[[int, int], list[tuple[int, int]]] = level_sizes
) -> int:
    """A number of levels; None is the full chain down to 1 x 1, whose sizes `sizes` tells."""
    most = len(sizes(height, width))
    if value is None:
        return most
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and most < value <= _LARGEST:
        raise InputError(
            f"levels is {value}, but a {width} x {height} image has {most} down to 1 x 1. Leave levels out to have all."
        )
    return integer(value, "levels", at_least=1)


LONGEST = 2**24
"""Pixels of a side beyond which fp32 does not tell neighbours apart."""


def size(value: Any, *, at_most: int | None = None) -> tuple[int, int]:
    """(height, width) in pixels."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        tensor_ = isinstance(value, torch.Tensor)
        said, hint = (_kind(value), " An image's is image.shape[-2:].") if tensor_ else (shown(value), "")
        raise InputError(f"size is {said}; expected (height, width) in pixels.{hint}")
    height, width = (
        integer(side, name, at_least=1, at_most=at_most) for side, name in zip(value, ("height", "width"), strict=True)
    )
    return height, width


def fixation(value: Any, batch: int, *, wait: bool = True) -> torch.Tensor:
    """Fixations as fp32 [B, 2], where they are; one fixation serves the whole batch. Inside [0, 1].

    They are read on the host: on a GPU that waits for the work that makes them. Without `wait` they are not read there.
    """
    points, _ = fixations(value, f"[2], or [{batch}, 2] for this batch of {batch}", (1, batch), wait=wait)
    return points.expand(batch, 2)


def fixations(
    value: Any, expected: str = "[2] or [B, 2]", counts: tuple[int, ...] | None = None, *, wait: bool = True
) -> tuple[torch.Tensor, bool]:
    """Fixations as fp32 [B, 2], and whether it was a single one [2]."""
    points = _numbers(value, "fixation")
    single = points.ndim == 1
    rows = points[None] if single else points
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.shape[0] < 1 or (counts and rows.shape[0] not in counts):
        raise InputError(f"fixation has shape {tuple(points.shape)}; expected {expected}.")
    if (wait or on_host(rows)) and readable(rows):
        recording.check(_fixation_values, rows)
    return rows, single


def _fixation_values(points: torch.Tensor) -> None:
    for coordinate in values(points).flatten().tolist():
        if not 0.0 <= coordinate <= 1.0:  # also NaN
            raise InputError(
                f"fixation holds {coordinate}; expected finite (x, y) in [0, 1], y down. Divide pixel positions by "
                "(width, height)."
            )


def _numbers(value: Any, name: str) -> torch.Tensor:
    """A dense fp32 tensor with data, of whatever holds numbers."""
    expected = "(x, y) or a dense [B, 2]" if name == "fixation" else "a dense tensor [B, K, 3] or [K, 3]"
    if isinstance(value, torch.Tensor):
        none = value.is_complex() or value.dtype == torch.bool
        if value.is_nested or value.layout is not torch.strided or none or value.is_meta:
            what = "nested tensor" if value.is_nested else _kind(value)
            raise InputError(f"{name} is a {what}; expected {expected}, with data.")
        if value.dtype == torch.float32:
            return negated(value)
    if isinstance(value, (tuple, list)):
        for item in value:
            for one in item if isinstance(item, (tuple, list)) else (item,):
                _refuse_gradients(one, name, "one tensor that holds all of them: torch.stack them")
    _refuse_masks(value, name)
    if not torch.compiler.is_compiling() and isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # of which torch would warn
    try:
        # On the CPU whatever the default device, but where it is if it is an array.
        where = None if hasattr(value, "__dlpack__") else torch.device("cpu")
        return torch.as_tensor(value, dtype=torch.float32, device=where)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name} is {_kind(value)}; expected {expected} ({error}).") from None


def sites(value: Any, image: torch.Tensor) -> torch.Tensor:
    """Sites (x, y, level) as fp32 [B, K, 3] or [1, K, 3], where they are."""
    batch = image.shape[0] if image.ndim == 4 else 1
    points = _numbers(value, "sites")
    shape = tuple(points.shape)
    expected = f"[K, 3], or [{batch}, K, 3] for this batch of {batch}: (x, y, level)"
    if points.ndim not in (2, 3) or shape[-1] != 3 or (points.ndim == 3 and shape[0] != batch):
        raise InputError(f"sites have shape {shape}; expected {expected}.")
    if shape[-2] < 1:
        raise InputError(f"sites have shape {shape}, that is none; expected at least one, {expected}.")
    return points if points.ndim == 3 else points[None]


def highest_level(sites: torch.Tensor) -> float:
    """Of sites inside the image, of levels from 0 on.

    They are read on the host: on a GPU that waits for the work that makes them.
    """
    return recording.check(_site_values, sites)


def _site_values(sites: torch.Tensor) -> float:
    # A column at a time: with `dim`, aminmax wakes torch's threads however few the sites, and those then spin for
    # milliseconds on the cores that a software renderer needs.
    columns = [torch.aminmax(column) for column in values(sites).unbind(-1)]
    low, high = ([float(bound) for bound in bounds] for bounds in zip(*columns, strict=True))
    for name, least, most in zip("xy", low, high, strict=False):
        if not (least >= 0.0 and most <= 1.0):  # also NaN
            raise InputError(
                f"sites have {name} from {least} to {most}; expected [0, 1], y down. Divide pixel positions by "
                "(width, height)."
            )
    if not (low[2] >= 0.0 and math.isfinite(high[2])):
        raise InputError(
            f"sites have levels from {low[2]} to {high[2]}; expected finite ones of at least 0, which is full "
            "resolution. Levels past the last read the last."
        )
    result: float = high[2]
    return result


def mean_source(src: Any, verb: str, *, name: str = "src", max_channels: int | None = 4) -> torch.Tensor:
    """The image, or level 0 of the mean pyramid, that a sampler reads."""
    if isinstance(src, Pyramid):
        if src.reduce != "mean":
            raise InputError(f"{name} is a {src.reduce} pyramid; {verb} samples mean ones: pass mipmap(image).")
        src = src.levels[0]
    return image(src, name, max_channels=max_channels)


def hiz_pyramid(value: Any, reduce: str, verb: str) -> None:
    """A pyramid that was reduced as the verb needs it."""
    if not isinstance(value, Pyramid):
        raise InputError(f"{verb} takes a Pyramid, and this is {_kind(value)}: pass hiz(relevance, reduce={reduce!r}).")
    if value.reduce != reduce:
        raise InputError(
            f"{verb} needs a {reduce} pyramid, and this is a {value.reduce} one: pass "
            f"hiz(relevance, reduce={reduce!r})."
        )
    image(value.levels[0], "the pyramid's level 0", max_channels=None)


def same_device(first: torch.Tensor, other: torch.Tensor, name: str, than: str = "the image") -> None:
    if first.device != other.device:
        raise InputError(f"{name} is on {other.device} and {than} on {first.device}; move one with .to().")


def transformed(value: Any) -> bool:
    """True inside torch.func.vmap, grad and jvp, in forward mode, and of gradients in a batch, as of a Jacobian: the
    tensor has no memory of its own."""
    if not isinstance(value, torch.Tensor) or torch.compiler.is_compiling():
        return False
    forward = forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None
    functorch = torch._C._functorch
    return forward or functorch.is_functorch_wrapped_tensor(value) or functorch.is_legacy_batchedtensor(value)


def transforming() -> bool:
    """Whether this is inside of torch.func.vmap, grad and their like, whatever the tensors: torch makes none require
    gradients there."""
    return torch._C._functorch.maybe_current_level() is not None


# torch.compiler.assume_constant_result, which would import the compiler at once.
transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def values(tensor: torch.Tensor) -> torch.Tensor:
    """What can be read on the host; inside torch.func.vmap that is the whole batch."""
    if memoryless(tensor):
        raise InputError(
            f"a tensor whose values decide is a {type(tensor).__name__}, which has no memory of its own. Pass the one "
            "that it stands for."
        )
    tensor = tensor.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def array(tensor: torch.Tensor) -> Any:
    """The same as a numpy array."""
    read = values(tensor)
    with torch._C._DisableFuncTorch():  # inside torch.func not even a tensor that is none of its own has an array
        return read.cpu().numpy()


def traced() -> bool:
    """True while make_fx records what is done, when nothing that depends on its arguments can be read on the host, or
    torch.jit.trace, to which all that is read is the same ever after."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None or scripted()


def scripted() -> bool:
    """True while torch.jit.trace records."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def on_host(value: torch.Tensor) -> bool:
    """True if reading the values waits for no device."""
    return value.device.type == "cpu"


def gl_place(value: Any, name: str = "fixation") -> None:
    """The GL backend reads the values of a fixation, or of sites, and gives no gradients in them."""
    _read_place(value, name, "GL")


def cuda_place(value: Any, name: str = "fixation") -> None:
    """So does the CUDA backend."""
    _read_place(value, name, "CUDA")


def _read_place(value: Any, name: str, backend: str) -> None:
    if transformed(value):
        several = "fixations pass [B, 2]" if name == "fixation" else "sets of sites pass [B, K, 3]"
        raise UnsupportedError(
            f"{name}: inside torch.func (vmap, grad or jvp), of which the {backend} backend knows nothing. Use "
            f"backend='torch'; for several {several} and image.expand(B, -1, -1, -1)."
        )
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name}: gradients are asked for, and the {backend} backend gives them in the image only. Use "
            f"backend='torch', or {name}.detach()."
        )


def no_counts(place: torch.Tensor, dtype: torch.dtype, name: str, *, way_out: str = "src.float() / 255") -> None:
    """Gradients in a place are of samples that are floating point."""
    if place.requires_grad and torch.is_grad_enabled() and not dtype.is_floating_point:
        raise InputError(
            f"gradients are asked for in the {name}, and samples of {dtype} have none. Pass {way_out}, or "
            f"{name}.detach()."
        )


def no_vmap(value: Any, verb: str, instead: str) -> None:
    """For verbs that decide by values how much they return or compute."""
    if not torch.compiler.is_compiling() and isinstance(value, torch.Tensor) and _batched(value):
        raise UnsupportedError(f"{verb} does not run under torch.func.vmap: {instead}")


def _batched(value: torch.Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        if torch._C._functorch.is_batchedtensor(value):
            return True
        value = torch._C._functorch.get_unwrapped(value)
    return False


def gl_input(value: torch.Tensor) -> None:
    """GL verbs take CPU and CUDA tensors with memory of their own."""
    _own_memory(value, "GL")
    if value.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"the tensor is on {value.device}; the GL backend takes CPU and CUDA tensors. Use backend='torch', or move "
            "the tensor."
        )


def cuda_input(value: torch.Tensor) -> None:
    """CUDA verbs take CUDA tensors with memory of their own."""
    _own_memory(value, "CUDA")
    device.check_kind(value.device)


def memoryless(value: Any) -> bool:
    """True for a tensor that stands for others or for none, by its class: a wrapper, a fake tensor."""
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor) or torch.compiler.is_compiling():
        return False
    fake = value.untyped_storage().device.type == "meta"  # torch warns of those whose address is asked for
    return fake or (not value.data_ptr() and value.numel() > 0)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def faked() -> bool:
    """True inside a FakeTensorMode: then whatever is made has no memory."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


def _own_memory(value: torch.Tensor, backend: str) -> None:
    if memoryless(value):
        raise UnsupportedError(
            f"the tensor is a {type(value).__name__}, which has no memory of its own; the {backend} backend needs it. "
            "Use backend='torch', or pass the tensors that it stands for."
        )
    if not torch.compiler.is_compiling() and faked():
        raise UnsupportedError(
            f"the {backend} backend gives nothing inside a FakeTensorMode, where no tensor has memory. Use "
            "backend='torch', or leave the mode."
        )
    if scripted():
        raise UnsupportedError(
            f"torch.jit.trace sees nothing of what the {backend} backend does. Use backend='torch' there, or "
            "torch.export, which records whole verbs."
        )
    if transformed(value):  # there is no functorch rule
        raise UnsupportedError(
            f"the {backend} backend knows reverse-mode gradients only: no forward mode, no torch.func.grad, jvp or "
            "vmap. Use backend='torch' there; for a batch pass [B, C, H, W]."
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested tensor"
        where = " on meta" if value.is_meta else ""
        return f"{value.layout} {value.dtype} tensor {tuple(value.shape)}{where}".replace("torch.", "")
    return (
        f"{type(value).__name__} {shown(value)}"
        if isinstance(value, (int, float, str, type(None)))
        else type(value).__name__
    )


def shown(value: Any) -> str:
    """For a message."""
    try:
        return repr(value)
    except ValueError:  # Python refuses to print very many digits
        return f"<{type(value).__name__} of very many digits>"
