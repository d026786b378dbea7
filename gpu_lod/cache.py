"""The folder where measured times and compiled kernels are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path

OFF = "off"


def folder(kind: str) -> Path | None:
    """Where things of a kind are kept: under $GPU_LOD_CACHE, else under the user's cache folder. None if that says
    "off", for a user without a home, or without platformdirs, which knows that folder."""
    named = os.environ.get("GPU_LOD_CACHE")
    if named is not None and named.lower() == OFF:
        return None
    if not named:
        try:
            import platformdirs
        except ImportError:
            return None
        try:
            named = platformdirs.user_cache_dir("gpu_lod", appauthor=False)
        except RuntimeError:  # no $HOME, and no account that would have one
            return None
        if named.startswith("~"):  # what older versions say then
            return None
    return Path(os.path.expanduser(named)) / kind  # a shell leaves a quoted ~ as it is
