"""Every verb as a function of tensors, for what holds of all verbs: gradients, custom ops, compiled code.

A new verb gets a row, in LINEAR if its backward is an adjoint and in OTHERS if not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from images import noise

import gpu_lod as lod
from gpu_lod.feature_maps import reference as features
from gpu_lod.foveate import reference as foveated
from gpu_lod.gather_patches import Look
from gpu_lod.gather_patches import reference as gathered
from gpu_lod.gaussian import reference as gaussian_chain
from gpu_lod.inverse_log_polar import reference as inverse_samples
from gpu_lod.laplacian import collapse_reference
from gpu_lod.laplacian import reference as laplacian_chain
from gpu_lod.log_polar import reference as samples
from gpu_lod.log_polar import ring_rule
from gpu_lod.mipmap import reference as mip_chain
from gpu_lod.oriented_energy import reference as energies

SITES = torch.tensor([[[0.4, 0.6, 0.0], [0.1, 0.9, 1.3]], [[0.7, 0.2, 2.0], [0.5, 1.0, 0.4]]])
LOOK = Look(4, False, None, (0.0,) * 3, torch.float64)
FIXATION = torch.tensor([[0.4, 0.6], [0.7, 0.2]])


@dataclass(frozen=True)
class Call:
    """A call of a verb on tensors."""

    verb: Callable[..., Any]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    """Floats that gradients are asked in."""
    arguments: Callable[..., tuple[Any, ...]]
    """The verb's arguments, from the inputs."""
    reference: Callable[..., Any] | None = None
    """The inputs to outputs in plain torch, in float64 too."""
    backends: tuple[str, ...] = ("torch", "gl")

    def run(self, *inputs: torch.Tensor, backend: str | None = None) -> list[torch.Tensor]:
        """What the verb makes of them, as tensors, without level 0 where that is the image."""
        how = {} if backend is None or not self.backends else {"backend": backend}
        result = self.verb(*self.arguments(*inputs), **how)
        if isinstance(result, lod.Culled):
            return [result.mask, result.indices, result.pruned, torch.tensor(result.tested)]
        if isinstance(result, lod.Pyramid):
            return list(result.levels[result.reduce != "laplacian" :])
        return [result] if isinstance(result, torch.Tensor) else list(result)


def image() -> tuple[torch.Tensor, ...]:
    return (noise(2, 3, 13, 18),)


def levels(kind: Any) -> tuple[torch.Tensor, ...]:
    make = {"mean": lod.mipmap, "laplacian": lod.laplacian, "max": lod.hiz}[kind]
    return tuple(level.clone() for level in make(*image()))


RULE: Any = (6, 10, None, 0.7, "log", 0.05)
SIZE = (11, 9)
BOXES = torch.tensor([[0.1, 0.2, 0.5, 0.4], [0.0, 0.0, 1.0, 1.0]])

LINEAR = {
    "mipmap": Call(lod.mipmap, image, lambda x: (x,), lambda x: mip_chain(x)[1:]),
    "gaussian": Call(lod.gaussian, image, lambda x: (x, 3), lambda x: gaussian_chain(x, 3)[1:]),
    "laplacian": Call(lod.laplacian, image, lambda x: (x, 3), lambda x: laplacian_chain(x, 3)),
    "collapse": Call(
        lod.collapse,
        lambda: levels("laplacian"),
        lambda *x: (lod.Pyramid(x, "laplacian"),),
        lambda *x: collapse_reference(list(x)),
    ),
    "log_polar": Call(
        lod.log_polar,
        image,
        lambda x: (x, FIXATION, *RULE),
        lambda x: samples(mip_chain(x), FIXATION, ring_rule(*RULE)),
    ),
    "log_polar of a pyramid": Call(
        lod.log_polar,
        lambda: levels("mean"),
        lambda *x: (lod.Pyramid(x), FIXATION, *RULE),
        lambda *x: samples(list(x), FIXATION, ring_rule(*RULE)),
    ),
    "foveate": Call(
        lod.foveate,
        image,
        lambda x: (x, FIXATION, 0.1),
        lambda x: foveated(mip_chain(x), FIXATION, 0.1),
    ),
    "foveate, anisotropic": Call(
        lod.foveate,
        image,
        lambda x: (x, FIXATION, 0.03, 0.0, 3.0),
        lambda x: foveated(mip_chain(x), FIXATION, 0.03, 0.0, 3.0),
    ),
    "foveate of a pyramid": Call(
        lod.foveate,
        lambda: levels("mean"),
        lambda *x: (lod.Pyramid(x), FIXATION, 0.1),
        lambda *x: foveated(list(x), FIXATION, 0.1),
    ),
    "gather_patches": Call(
        lod.gather_patches,
        image,
        lambda x: (x, SITES, 4),
        lambda x: gathered(mip_chain(x), SITES, LOOK),
    ),
    "gather_patches, normalised, of a pyramid": Call(
        lod.gather_patches,
        lambda: levels("mean"),
        lambda *x: (lod.Pyramid(x), SITES, 3, "zero", None, [0.5, 1.0, 2.0]),
        lambda *x: gathered(list(x), SITES, LOOK),
    ),
    "inverse_log_polar": Call(
        lod.inverse_log_polar,
        image,
        lambda x: (x, FIXATION, SIZE),
        lambda x: inverse_samples(x, FIXATION, SIZE, 0.01, 0.7, False, True),
    ),
}
OTHERS = {
    "oriented_energy": Call(lod.oriented_energy, image, lambda x: (x, 2, 3), lambda x: energies(x, 2, 3)),
    "feature_maps": Call(
        lod.feature_maps,
        lambda: (*image(), noise(2, 3, 13, 18), noise(2, 16, 13, 18)),
        lambda x, before, semantic: (x, FIXATION, before, semantic),
        lambda x, before, semantic: features(x, FIXATION, before, semantic),
    ),
    "mipmap max": Call(lod.mipmap, image, lambda x: (x, 3, "max"), lambda x: mip_chain(x, 3, "max")[1:]),
    "hiz": Call(lod.hiz, image, lambda x: (x, "min"), lambda x: mip_chain(x, None, "min")[1:]),
    "region_max": Call(lod.region_max, lambda: levels("max"), lambda *x: (lod.Pyramid(x, "max"), BOXES)),
    "region_min": Call(
        lod.region_min, lambda: tuple(-x for x in levels("max")), lambda *x: (lod.Pyramid(x, "min"), BOXES)
    ),
    "cull": Call(lod.cull, lambda: levels("max"), lambda *x: (lod.Pyramid(x, "max"), torch.tensor([0.7, 0.9]))),
    "cortical_sites": Call(lod.cortical_sites, lambda: (FIXATION.clone(),), lambda x: (x, 40, (90, 120)), backends=()),
}
CALLS = LINEAR | OTHERS
CASES = [(name, backend) for name, call in CALLS.items() for backend in call.backends or ("auto",)]
LINEAR_CASES = [(name, backend) for name, call in LINEAR.items() for backend in call.backends]
