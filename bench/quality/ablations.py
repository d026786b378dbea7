"""FoveatedPyramid, the tree cut by detail x magnification, with one of the two left out; and tokens of fractional
levels that are read sharper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from gpu_lod.allocate.base import Need
from gpu_lod.allocate.downsample import Downsample
from gpu_lod.allocate.foveated_pyramid import FoveatedPyramid
from gpu_lod.allocate.residual import Residual
from gpu_lod.allocate.scene import Scene
from gpu_lod.token_set import TokenSet

EVEN = 1e6
"""An e0 beyond which there is no eccentricity: magnification is 1 everywhere."""


class PyramidOnly(FoveatedPyramid):
    """Detail alone: there is no fixation."""

    takes: ClassVar[tuple[Need, ...]] = ()

    def __init__(self, budget: int = 273, patch: int = 14, **arguments: Any) -> None:
        super().__init__(budget, patch, e0=EVEN, **arguments)


class FoveationOnly(FoveatedPyramid):
    """Magnification alone. Relevance says where the fixation is if none is given, and nothing else."""

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        fixation = scene.fixations()[:, 0] if scene.fixation is None else scene.fixation
        return super().choose(replace(scene, relevance=torch.ones_like(scene.relevance), fixation=fixation))


BIAS = -0.75


class SharpDownsample(Downsample):
    """Read three quarters of a level finer."""

    def __call__(self, *given: Any, **more: Any) -> TokenSet:
        return super().__call__(*given, bias=BIAS, **more)


class SharpResidual(Residual):
    """The same."""

    def __call__(self, *given: Any, **more: Any) -> TokenSet:
        return super().__call__(*given, bias=BIAS, **more)
