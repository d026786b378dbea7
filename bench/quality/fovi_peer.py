"""Another library's foveated sensor as a method: fovi (Blauch, Alvarez and Konkle), the samples of its retina.

K tokens of P x P mean K P^2 samples, or the largest whole number of its rings that has no more. The retina is as its
authors default it: isotropic sampling by M(r) = 1 / (r + a) with a of 0.5 degrees in a circular field of 16 degrees,
each sample the nearest pixel. Pictures that are not square are treated as its fixation policies do: the field is as
wide as the side of a square of the picture's area, and what of it lies outside the picture is lost (it pads with 0; no
pixel is shown by such a sample here). With reach="corners" the field is just wide enough to hold the whole picture.

fovi has no inverse. A pixel of the field shows the sample that is nearest in the coordinates that its receptive fields
are made in, the cortical manifold; the rest is the mean of the samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from inputs import declare_vision_operators

from gpu_lod.allocate.grid_top_k import GridTopK
from gpu_lod.rebuild import Rebuilt


class Fovi:
    """fovi's RetinalTransform, as the frame takes a method: budget and patch, then picture, relevance and fixation.

    Args:
        reach: "area", a field of the picture's area, or "corners", one that holds the picture.
    """

    needs: ClassVar[tuple[str, ...]] = ("relevance",)
    takes: ClassVar[tuple[str, ...]] = ("fixation",)

    def __init__(self, budget: int, patch: int, reach: str = "area") -> None:
        self.budget, self.patch, self.reach = budget, patch, reach
        self.retina = retina_of(budget * patch**2)

    @staticmethod
    def absent() -> str:
        """Why it cannot be had, if so."""
        try:
            retina_of(1)
        except Exception as error:  # not ImportError alone: a broken install raises anything
            how = "pip install --no-deps fovi torchvision, and pip install einops trimesh plum-dispatch ipython"
            return f"{type(error).__name__}: {error}: {how}"
        return ""

    @staticmethod
    def depends() -> str:
        """What else results depend on."""
        try:
            return version("fovi")
        except PackageNotFoundError:
            return ""

    def __call__(self, image: torch.Tensor, relevance: torch.Tensor, fixation: Any = None) -> Seen:
        """The samples.

        Shape: image uint8 [C, H, W]; relevance [H, W], whose peak is the fixation where None is given.
        """
        fixation, gaze, field = self._look(image, relevance, fixation)
        samples = (255 * self.retina(image[None], gaze, fixation_size=field)[0]).round().to(torch.uint8)
        size = (image.shape[-2], image.shape[-1])
        x, y = self._places(size, gaze, field)
        inside = (x >= 0) & (x < size[1]) & (y >= 0) & (y < size[0])
        return Seen(self.retina, samples[:, inside], inside, size, fixation, float(field[0, 0]))

    def choose(self, image: torch.Tensor, relevance: torch.Tensor, fixation: Any = None) -> Any:
        """Where the samples stand in the picture, not what is there."""
        _, gaze, field = self._look(image, relevance, fixation)
        return self._places((image.shape[-2], image.shape[-1]), gaze, field)

    def _look(self, image: torch.Tensor, relevance: torch.Tensor, fixation: Any) -> tuple[Any, ...]:
        """The fixation, and as the retina takes them: the gaze, and the sides of the field in pixels."""
        if fixation is None:  # where allocators look then
            scene, _ = GridTopK(1, self.patch)._scene(image, relevance, None, None, None)
            fixation = scene.fixations()[0, 0].tolist()
        diameter = self._diameter(image.shape[-2], image.shape[-1], fixation)
        gaze = torch.tensor([[fixation[1], fixation[0]]], dtype=torch.float32)  # its order is (row, column)
        return fixation, gaze, torch.tensor([[diameter, diameter]], dtype=torch.float32)

    def _places(self, size: tuple[int, int], gaze: torch.Tensor, field: torch.Tensor) -> tuple[Any, Any]:
        x, y = self.retina.sampler._direct_pixel_coords(size, gaze, field)
        return x[0], y[0]

    def _diameter(self, height: int, width: int, fixation: Any) -> float:
        if self.reach == "area":
            return math.sqrt(height * width)
        away = (max(at, 1 - at) * side for at, side in zip(fixation, (width, height), strict=True))
        return 2 * math.hypot(*away)


@cache
def retina_of(count: int) -> Any:
    """A retina with so many samples, or the next smaller number that it can have. It takes seconds to make."""
    declare_vision_operators()
    from fovi.sensing.coords import find_desired_res
    from fovi.sensing.retina import RetinalTransform

    rings, _ = find_desired_res(16, 0.5, count, "isotropic", force_less_than=True, quiet=True)
    return RetinalTransform(rings, fov=16, cmf_a=0.5, auto_match_cart_resources=False, device="cpu").eval()


@dataclass(frozen=True)
class Seen:
    """What a retina sees of a picture: samples [C, N], those of it that are inside the picture."""

    retina: Any
    samples: torch.Tensor
    inside: torch.Tensor
    size: tuple[int, int]
    fixation: Any
    diameter: float

    def rebuilt(self) -> Rebuilt:
        """The picture whose every pixel shows the sample that is nearest on the cortex."""
        from scipy.spatial import cKDTree

        (height, width), at = self.size, self.fixation
        x, y = torch.arange(width) + 0.5 - at[0] * width, torch.arange(height) + 0.5 - at[1] * height
        places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1) / (self.diameter / 2)
        covered = places.norm(dim=-1) <= 1
        tree = cKDTree(_cortical(self.retina, self.retina.sampler.sampling_grid[0, 0, self.inside]))
        nearest = torch.from_numpy(tree.query(_cortical(self.retina, places[covered]))[1])
        image = self.samples.float().mean(1).round().to(torch.uint8)[:, None, None].repeat(1, height, width)
        image[:, covered] = self.samples[:, nearest]
        return Rebuilt(image, covered)


def _cortical(retina: Any, places: torch.Tensor) -> Any:
    """Places [N, 2] in units of the field's radius on fovi's cortical manifold, [N, 3]."""
    import numpy as np
    from fovi.sensing.manifold import CorticalSensorManifold

    model = CorticalSensorManifold(retina.cmf_a, retina.fov)
    x, y = places.double().numpy().T * (retina.fov / 2)
    return np.stack(model.map_to_xyz(model.map_3d(x, y)), axis=-1)
