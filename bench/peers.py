"""Other libraries beside the verbs: what a user would pick on the host. Where one is not installed its sides drop out.

`optional` keeps the reason. A side that does another job than the verb says which; it is listed and never an opponent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from inputs import hwc, inputs_for, job, optional

cv2 = optional("cv2")
kornia = optional("kornia.geometry.transform")
skimage = optional("skimage.transform")
pillow = optional("PIL.Image")

Sides = dict[str, Callable[[], object]]
ROUNDS = "rounds to 8 bits at every level, where the verb rounds once"
GAUSSIAN = "a Gaussian pyramid: 25 taps a texel, where a mean takes 4"
SLOW_PIXELS = 2048 * 2048
"""Above this, libraries that take seconds a call would take most of a run."""


def _halves(step: Callable[[Any, int, int], Any], array: Any) -> list[Any]:
    """A chain [H, W, C] down to 1 x 1: `step` takes the level above, and how high and wide the next one is."""
    levels = [array]
    height, width = _size(array)
    while max(height, width) > 1:
        height, width = max(1, height // 2), max(1, width // 2)
        levels.append(step(levels[-1], height, width))
    return levels


def _size(array: Any) -> tuple[int, int]:
    return (array.height, array.width) if hasattr(array, "height") else array.shape[:2]


def _opencv_step(array: Any, height: int, width: int) -> Any:
    return cv2.resize(array, (width, height), interpolation=cv2.INTER_AREA)


def _skimage_step(array: Any, height: int, width: int) -> Any:
    factors = (array.shape[0] // height, array.shape[1] // width, 1)
    return skimage.downscale_local_mean(array, factors)


def _pillow_reduce(array: Any, height: int, width: int) -> Any:
    return array.reduce((2 if array.width > 1 else 1, 2 if array.height > 1 else 1))


def _pillow_chain(array: Any) -> list[Any]:
    levels = [array]
    while max(_size(levels[-1])) > 1:  # sides are halved upwards
        levels.append(_pillow_reduce(levels[-1], 0, 0))
    return levels


def _pillow_box(array: Any, height: int, width: int) -> Any:
    return array.resize((width, height), pillow.Resampling.BOX)


def kornia_depth(height: int, width: int) -> int:
    """Levels of kornia's pyramid: its blur needs a few pixels."""
    return min(height, width).bit_length() - 2


def chains(image: torch.Tensor, cache: str, dtype: torch.dtype) -> tuple[Sides, dict[str, str], dict[str, str]]:
    """Mean chains: the sides, which of them do another job, and which were left out; each with the reason."""
    batch, _, height, width = image.shape
    powers = all(side & (side - 1) == 0 for side in (height, width))
    whole = dtype == torch.uint8
    sides: Sides = {}
    other: dict[str, str] = {}
    dropped: dict[str, str] = {}

    def add(name: str, way: Callable[[Any], object], inputs: list[Any], why: str = "") -> None:
        sides[name] = job(way, inputs)
        if why:
            other[name] = why

    if batch == 1 and dtype != torch.float16:
        arrays = inputs_for(image, cache, hwc)
        if cv2:
            # Its area filter is the polyphase box at odd sides too.
            add("opencv INTER_AREA (HWC)", partial(_halves, _opencv_step), arrays, ROUNDS if whole else "")
        if skimage and powers and dtype == torch.float32:
            name = "scikit-image downscale_local_mean (HWC)"
            if height * width > SLOW_PIXELS:
                dropped[name] = f"left out above {SLOW_PIXELS} pixels: about a second a call"
            else:
                add(name, partial(_halves, _skimage_step), arrays)
        if pillow and whole:
            pictures = [pillow.fromarray(array) for array in arrays]
            ceil = f"{ROUNDS}{'' if powers else '; its sides are halved upwards'}"
            add("pillow reduce(2) (HWC)", _pillow_chain, pictures, ceil)
            add("pillow resize BOX (HWC)", partial(_halves, _pillow_box), pictures, f"{ROUNDS}, rows and columns apart")
    if kornia and dtype == torch.float32:
        name = "kornia build_pyramid (Gaussian)"
        if batch * height * width > SLOW_PIXELS:
            dropped[name] = f"left out above {SLOW_PIXELS} pixels: about a second a call"
        else:
            inputs = inputs_for(image, cache, lambda x: x)
            build = partial(kornia.build_pyramid, max_level=kornia_depth(height, width))
            add(name, build, inputs, GAUSSIAN)
    return sides, other, dropped


def gaussians(image: torch.Tensor, levels: int) -> tuple[Sides, dict[str, str]]:
    """Gaussian pyramids: the sides, and which of them do another job."""
    sides: Sides = {}
    other: dict[str, str] = {}
    if cv2 and len(image) == 1:
        array = hwc(image)

        def pyramid() -> list[Any]:
            result = [array]
            for _ in range(levels - 1):
                result.append(cv2.pyrDown(result[-1]))
            return result

        sides["opencv pyrDown (HWC)"] = pyramid
    if image.shape[-1] * image.shape[-2] * len(image) > SLOW_PIXELS:
        return sides, other
    if skimage and len(image) == 1:
        array = hwc(image)

        def gaussian() -> list[Any]:
            return list(skimage.pyramid_gaussian(array, max_layer=levels - 1, channel_axis=-1))

        name = "scikit-image pyramid_gaussian (HWC)"
        sides[name] = gaussian
        other[name] = "a sampled Gaussian of sigma 2/3 and a bilinear resize, on another grid, in double precision"
    if kornia:
        name = "kornia build_pyramid"
        sides[name] = lambda: kornia.build_pyramid(image, max_level=levels)
        other[name] = "a bilinear resize behind the blur, on another grid"
    return sides, other


def laplacians(image: torch.Tensor, levels: int) -> tuple[Sides, Sides]:
    """Laplacian pyramids of single images, and the way back."""
    if not cv2 or len(image) != 1:
        return {}, {}
    array = hwc(image)

    def there() -> list[Any]:
        result = [array]
        for _ in range(levels - 1):
            result.append(cv2.pyrDown(result[-1]))
            result[-2] = result[-2] - cv2.pyrUp(result[-1], dstsize=_size(result[-2])[::-1])
        return result

    bands = there()

    def back() -> Any:
        result = bands[-1]
        for band in reversed(bands[:-1]):
            result = band + cv2.pyrUp(result, dstsize=_size(band)[::-1])
        return result

    return {"opencv pyrDown, pyrUp (HWC)": there}, {"opencv pyrUp (HWC)": back}


def log_polars(image: torch.Tensor, cache: str, rings: int, wedges: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Log-polar maps of single images: ways that take (array, fixation) with their inputs; all do another job."""
    if len(image) != 1 or image.dtype == torch.float16:
        return {}, {}
    why = "one level, no level of detail: far rings alias; rings begin at 1 px"
    ways: dict[str, Any] = {}
    arrays = inputs_for(image, cache, hwc)

    def centre(array: Any, fixation: torch.Tensor) -> tuple[float, float, float]:
        height, width = array.shape[:2]
        return float(fixation[0, 0]) * width, float(fixation[0, 1]) * height, 0.7 * max(height, width)

    def warp_polar(array: Any, fixation: torch.Tensor) -> object:
        x, y, radius = centre(array, fixation)
        return cv2.warpPolar(array, (rings, wedges), (x, y), radius, cv2.WARP_POLAR_LOG | cv2.INTER_LINEAR)

    def warp_polar_skimage(array: Any, fixation: torch.Tensor) -> object:
        x, y, radius = centre(array, fixation)
        return skimage.warp_polar(
            array, center=(y, x), radius=radius, output_shape=(wedges, rings), scaling="log", channel_axis=-1
        )

    if cv2:
        ways["opencv warpPolar (no LOD, HWC)"] = (warp_polar, arrays)
    if skimage and image.dtype == torch.float32:
        ways["scikit-image warp_polar (no LOD, HWC)"] = (warp_polar_skimage, arrays)
    return ways, dict.fromkeys(ways, why)
