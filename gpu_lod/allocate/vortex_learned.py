"""Vortices that learn where to stand and how hard to pull."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.allocate.base import register
from gpu_lod.allocate.learned import Learned, even_points, log_relevance, parameter, soft_top_k
from gpu_lod.allocate.losses import repulsion_loss
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.voronoi import distances
from gpu_lod.patch_grid import Pool
from gpu_lod.uncompiled import as_it_stands


@register
class VortexLearned(Learned):
    """The K level-0 patches that learned vortices pull most, no patch twice.

    A vortex pulls a patch by strength / (distance^2 + radius^2), as in `VortexField`; a patch is worth its relevance
    (over the mean, plus 1e-4, so that it has a logarithm) times the pull of all vortices together. Scores are the soft
    top-k of the logarithm of that, in [0, 1], with gradients in the relevance and all parameters; over all patches they
    sum to K. Whole counts of patches have no gradients: the count of a vortex is the sum of the soft top-k times the
    share that the vortex has in the pull (`soft_counts`).

    Parameters: centres as the logits of (x, y), the logarithms of strengths, of radii and of the soft top-k's
    temperature. `repulsion` is the loss that keeps the vortices apart.

    Args:
        vortices: how many; spread evenly to begin with, all equally strong.
        radius: to begin with, in units of the longer side.
        temperature: of the soft top-k, in natural logarithms of worth.
    """

    monotone = True
    finest = True

    learns: ClassVar[tuple[str, ...]] = ("centre_logits", "log_strengths", "log_radii", "log_temperature")

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        vortices: int = 8,
        radius: float = 0.1,
        temperature: float = 0.1,
    ) -> None:
        super().__init__(budget, patch, pool)
        vortices = checks.integer(vortices, "vortices", at_least=1, at_most=1024)
        radius = checks.between(radius, "radius", 1e-6, 1e6)
        temperature = checks.between(temperature, "temperature", 1e-6, 1e6)
        self._made_with = {"vortices": vortices, "radius": radius, "temperature": temperature}
        self.centre_logits = parameter(even_points(vortices).logit())
        self.log_strengths = nn.Parameter(torch.zeros(vortices, dtype=torch.float32))
        self.log_radii = nn.Parameter(torch.full((vortices,), math.log(radius), dtype=torch.float32))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature), dtype=torch.float32))

    @property
    def centres(self) -> torch.Tensor:
        """[V, 2], (x, y) in [0, 1]."""
        return self.centre_logits.sigmoid()

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        worth, soft = self._soft(scene, self._log_pull(scene))
        index = ordered(worth, self.budget)[1]
        return scene.sites(0, index), soft.gather(1, index).float()

    @as_it_stands
    def soft_counts(self, image: Any = None, relevance: Any = None) -> torch.Tensor:
        """[B, V], how many patches each vortex gets, in fractions; in sum K for each image. Differentiable."""
        scene, _ = self._scene(image, relevance, None, None, None)
        pull = self._log_pull(scene)
        return (self._soft(scene, pull)[1][:, None] * pull.softmax(1)).sum(-1).float()

    def repulsion(self, size: tuple[int, int] = (1, 1), distance: float = 0.2) -> torch.Tensor:
        """`repulsion_loss` of the centres, in units of the longer side of a picture of this size."""
        height, width = checks.size(size)
        box = self.centre_logits.new_tensor([width, height]) / max(height, width)
        return repulsion_loss(self.centres * box, distance)

    def _log_pull(self, scene: Scene) -> torch.Tensor:
        """[1, V, Hg Wg], float64: distances do not depend on the picture."""
        away = distances(scene, self.centres.float()[None]).double()
        radii = (2 * self.log_radii.double()).exp()
        return self.log_strengths.double()[:, None] - (away + radii[:, None]).log()

    def _soft(self, scene: Scene, pull: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What each patch is worth, and the soft top-k of it: [B, Hg Wg], float64."""
        self.enough(scene.grid[0] * scene.grid[1])
        worth = log_relevance(scene) + pull.logsumexp(1)
        return worth, soft_top_k(worth / self.log_temperature.double().exp(), self.budget, 1.0)
