"""Where the best GL way loses, and why."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_lod.report.files import Data
from gpu_lod.report.rows import Row, gain
from gpu_lod.report.text import on_cuda

SOFTWARE = "The renderer is software: shaders, texture filter and torch share the same cores."
SHARED = (
    "Where OpenGL is all that takes part, the GPU changes between CUDA's context and OpenGL's first, and back: a third "
    "of a millisecond on an H200, whatever the work (docs/bridge.md)."
)
REASONS = {
    "mipmap": "A halving is a sum of four, and torch streams through it at the speed of memory, several elements an "
    "instruction. A shader adds index arithmetic for each texel, stores one invocation after the other, and a dispatch "
    "costs as much as a small level.",
    "hiz": "As for mipmap: whole rows of maximum vectorise. What GL gives is the pyramid where cull reads it.",
    "gaussian": "Twenty-five taps a texel: libraries run them as two passes of five over rows that the cache holds.",
    "laplacian": "Twice the Gaussian's reads, and as many levels written as read.",
    "collapse": "The way back streams through every level once, and adds.",
    "oriented_energy": "Separable filters are long sums over rows, which a convolution library blocks for the cache.",
    "feature_maps": "Forty channels leave for memory whoever computes them. Torch blends whole rows of what comes from "
    "coarse levels, several pixels an instruction; and small pictures show the passes' fixed costs.",
    "log_polar": "Few output texels: the call's fixed cost, and torch that samples two levels a ring only.",
    "inverse_log_polar": "One bilinear read a pixel from a small map, which stays in the cache on either side.",
    "foveate": "Torch works from coarse to fine over boxes, and filters only the pixels that need a level.",
    "gather_patches": "Sites on the grid are copies of pixels: there is nothing to filter, and torch copies.",
    "cull": "Where much is kept, descent visits most texels, and torch's comparison streams through memory.",
    "region_max": "Four fetches a box: the fixed cost of a call is most of it.",
    "region_min": "As for region_max, of which it is the other way round.",
}
"""By verb, in few words; kept here alone."""


@dataclass(frozen=True)
class Losses:
    """Of one verb on one device: the rows that it lost, worst first."""

    verb: str
    why: str
    rows: list[Row]
    measured: int
    """Rows of the verb that had an opponent."""

    @property
    def worst(self) -> float:
        return self._gains[0]

    @property
    def mildest(self) -> float:
        return self._gains[-1]

    @property
    def _gains(self) -> list[float]:
        return [value for value in map(gain, self.rows) if value is not None]


def losses(data: Data) -> list[Losses]:
    """Verbs that lose somewhere, in the file's order."""
    found = []
    for verb in dict.fromkeys(row["verb"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["verb"] == verb and gain(row) is not None]
        lost = sorted((row for row in rows if (gain(row) or 1) < 1), key=lambda row: gain(row) or 1)
        if lost:
            why = REASONS.get(verb, "Not looked into yet.")
            where = SOFTWARE if data["software"] else SHARED if on_cuda(data) else ""
            found.append(Losses(verb, f"{why} {where}".rstrip(), lost, len(rows)))
    return found
