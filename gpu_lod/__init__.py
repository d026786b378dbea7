"""Level of detail on graphics hardware for PyTorch. `import gpu_lod as lod`; importing opens nothing."""

import importlib
from pathlib import Path
from typing import Any

# In a checkout, which comes first on the path of a Python that is started there, these stand beside the package.
if (_CHECKOUT := Path(__file__).parents[1]).joinpath("bridge", "__init__.py").exists():
    __path__.append(str(_CHECKOUT))

from gpu_lod.context import Context
from gpu_lod.cortical_sites import cortical_sites
from gpu_lod.cull import Culled, cull
from gpu_lod.dispatch import Choice, explain
from gpu_lod.errors import GpuLodError
from gpu_lod.feature_maps import feature_maps
from gpu_lod.feature_passes import FeatureTexture
from gpu_lod.foveate import foveate
from gpu_lod.gather_patches import gather_patches
from gpu_lod.gaussian import gaussian
from gpu_lod.hiz import hiz
from gpu_lod.inverse_log_polar import inverse_log_polar
from gpu_lod.laplacian import collapse, laplacian
from gpu_lod.log_polar import log_polar
from gpu_lod.mipmap import mipmap
from gpu_lod.oriented_energy import oriented_energy
from gpu_lod.plan import Plan, plan
from gpu_lod.pyramid import Pyramid
from gpu_lod.rebuild import Rebuilt, rebuild
from gpu_lod.region import region_max, region_min
from gpu_lod.to_cupy import to_cupy
from gpu_lod.token_set import TokenSet

__version__ = "0.1.0"

__all__ = [
    "Choice",
    "Context",
    "Culled",
    "FeatureTexture",
    "GpuLodError",
    "Plan",
    "Pyramid",
    "Rebuilt",
    "TokenSet",
    "__version__",
    "collapse",
    "cortical_sites",
    "cull",
    "explain",
    "feature_maps",
    "foveate",
    "gather_patches",
    "gaussian",
    "hiz",
    "inverse_log_polar",
    "laplacian",
    "log_polar",
    "mipmap",
    "oriented_energy",
    "plan",
    "rebuild",
    "region_max",
    "region_min",
    "to_cupy",
]


_LATER = "allocate", "vlm"
"""These load with their first use."""


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER, "errors"])


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"gpu_lod.{name}")
    raise AttributeError(f"module 'gpu_lod' has no attribute {name!r}")
