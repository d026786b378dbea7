"""A retina that is learned: centres about the gaze, each serving the patches that are nearest."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from gpu_lod import checks
from gpu_lod.allocate.base import Need, register
from gpu_lod.allocate.learned import Learned, by_score, convex, even_points, parameter
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.voronoi import distances
from gpu_lod.cached import numbers
from gpu_lod.cortical_sites import GOLDEN_ANGLE
from gpu_lod.errors import InputError
from gpu_lod.patch_grid import Pool

MARGIN = 1 / 32
"""The gaze is kept so far from the edges: there is room for centres on all sides of it."""


@register
class PseudoLogPolar(Learned):
    """K learned centres about a fixation; level-0 patches are assigned to them by softmax(-distance / T).

    A centre is an offset from the fixation. Along each side, an offset o becomes r o / (r + |o|) where r is the room
    between the fixation and the edge: about o near the fixation, never beyond the edge, and never the same for two
    offsets. A fixation nearer than 1/32 of a side to an edge is taken to be that far from it. To begin with, a quarter
    of the centres is in the fovea, in a normal distribution of sigma 0.05 about the fixation, and the others are spread
    evenly over the picture that is looked at in its middle.

    A token is read at its centre, at the level at which it is as large as what is assigned to it: half the log2 of the
    assigned patches, at least 0. Its score is the relevance assigned to it. `weights` are the assignment as each token
    sees it, in sum 1 for each token, also for one to which next to nothing is assigned. Gradients reach the offsets
    through the sites, the scores, the weights, and the patches if the picture is floating point.

    Units: offsets in parts of the longer side; T in mean distances between neighbours of K even centres, so that it is
    free of the resolution and of K.

    Args:
        fovea: share of the centres that start in it.
        sigma: of the fovea, in units of the longer side.
        temperatures: T in training and in running (`train()` and `eval()`).
        Without a fixation, the peak of relevance is one (`find_fixations`), through which there are no gradients.

    Source: Vogel (1979) for the angles of the fovea; soft assignment as in Agustsson et al., "Soft-to-Hard Vector
        Quantization" (2017).
    """

    takes: ClassVar[tuple[Need, ...]] = ("fixation",)
    weighs: ClassVar[bool] = True
    moves: ClassVar[bool] = True
    learns: ClassVar[tuple[str, ...]] = ("offsets",)

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        fovea: float = 0.25,
        sigma: float = 0.05,
        temperatures: tuple[float, float] = (1.0, 0.1),
    ) -> None:
        super().__init__(budget, patch, pool)
        fovea = checks.between(fovea, "fovea", 0, 1)
        sigma = checks.between(sigma, "sigma", 1e-4, 10)  # closer, and fp32 cannot tell centres apart
        self._made_with = {"fovea": fovea, "sigma": sigma}
        self.temperatures = checks.numbers(temperatures, "temperatures", 2)
        if min(self.temperatures) <= 0:
            raise InputError(f"the temperatures are {self.temperatures}; expected positive numbers.")
        self.offsets = parameter(_start(self.budget, round(fovea * self.budget), sigma))

    def work(self, scene: Scene) -> int:
        return self.budget * scene.grid[0] * scene.grid[1]

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        centres, logs = self._assigned(scene)
        # Over the patches, a softmax of the logarithms is the shares over their sum, even where all are nothing.
        parts, total, top = convex(logs)
        levels = 0.5 * (total * top.exp()).clamp(min=1).log2()
        relevance = ((parts * scene.amounts().flatten(1)[:, None]).sum(-1, keepdim=True) * top.exp())[..., 0]
        scores, sites, weights = by_score(relevance, torch.cat([centres, levels], dim=-1), parts / total)
        return sites, scores, weights

    def mass(self, image: Any = None, relevance: Any = None, fixation: Any = None) -> torch.Tensor:
        """[B, K], how many patches are assigned to each centre, in the order of `offsets`: for `dead_bin_loss`."""
        scene, _ = self._scene(image, relevance, None, fixation, None)
        return self._assigned(scene)[1].exp().sum(-1)

    def _assigned(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        """Centres [B, K, 2], and the logarithm of each centre's share in each patch [B, K, Hg Wg]: shares sum to 1 for
        each patch."""
        gaze = scene.fixations()[:, 0] if scene.fixation is None else scene.fixation
        height, width = scene.size
        box = numbers((width, height), torch.float64, scene.device) / max(height, width)
        gaze = gaze.double().clamp(MARGIN, 1 - MARGIN)[:, None]
        offsets = self.offsets.double()
        room = torch.where(offsets > 0, 1 - gaze, gaze) * box
        centres = gaze + room * offsets / (room + offsets.abs()) / box
        # In units of the mean distance between neighbours of K even centres; and the root has a slope at 0.
        density = self.budget * max(height, width) ** 2 / (height * width)
        apart = (distances(scene, centres.float()) * density + 1e-12).sqrt()
        near = apart / -self.temperatures[0 if self.training else 1]
        # CUDA's softmax over what does not come last has a thread for each patch of an image: too few.
        shares = near.log_softmax(1) if checks.on_host(near) else near - near.logsumexp(1, keepdim=True)
        return centres.float(), shares


def _start(count: int, inside: int, sigma: float) -> torch.Tensor:
    """Offsets [count, 2], the first `inside` of them in the fovea."""
    index = torch.arange(inside, dtype=torch.float64, device="cpu")
    # The radius within which (i + 1/2) / n of a normal distribution in the plane lies.
    radius = sigma * (-2 * torch.log1p(-(index + 0.5) / max(1, inside))).sqrt()
    angle = index * GOLDEN_ANGLE
    fovea = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
    # No farther out than half a spacing from the edge; in the middle there is room 1/2 on either side.
    rest = max(1, count - inside)
    away = (even_points(count - inside) - 0.5) * (1 - 0.5 / math.sqrt(rest))
    return torch.cat([fovea, away * 0.5 / (0.5 - away.abs())])
