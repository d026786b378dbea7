"""llvmpipe taken for a GPU, by `pytest --as-hardware`: verbs go the ways of hardware, and texture filters weigh with 8
fractional bits. What fails then would fail where there is a GPU."""

from __future__ import annotations

import pytest

from gpu_lod import shaders
from gpu_lod.bridge import gl as G
from gpu_lod.bridge.gl import GL

RENDERER = "hardware"
_ROUND = """
#ifndef PLANAR
    {0} = round({0} * 256.0) / 256.0;
#endif"""
"""Of what texture units filter; what lies in memory shaders do."""
_ROUNDED = {
    "trilinear.glsl": {
        "#ifdef FETCHED": "#if 1",  # where weights can be rounded
        "share = place - whole;": f"share = place - whole;{_ROUND.format('share')}",
        "l.share = level - float(fine);": f"l.share = level - float(fine);{_ROUND.format('l.share')}",
    },
    # llvmpipe's anisotropic filter reads level 0 alone from compute shaders.
    "foveate.comp": {"#ifdef PROBES": "#if 1"},
}


def pretend() -> None:
    """For as long as the process lives."""
    patch = pytest.MonkeyPatch()
    read, text = shaders._read, GL.string

    def rounded(name: str, stack: tuple[str, ...]) -> str:
        found = read(name, stack)
        for line, other in _ROUNDED.get(name, {}).items():
            assert line in found, f"{name} has no {line!r} any more"
            found = found.replace(line, other)
        return found

    patch.setattr(shaders, "_read", rounded)
    patch.setattr(GL, "string", lambda gl, name: RENDERER if name == G.RENDERER else text(gl, name))
