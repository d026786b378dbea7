"""Tokens of each level where the picture has what only that level shows: budgets by wavelet energy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from gpu_lod import checks, precision
from gpu_lod.allocate.base import Allocator, Need, register
from gpu_lod.allocate.energy import ROUNDING, checked, luma, over_patches, relevances
from gpu_lod.allocate.ordering import ordered
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import shared_out
from gpu_lod.allocate.tree_cut import tokens_at
from gpu_lod.cached import constant, numbers
from gpu_lod.dispatch import needs_grad
from gpu_lod.errors import InputError, UnsupportedError
from gpu_lod.patch_grid import Pool
from gpu_lod.planewise import bands


@register
class Wavelet(Allocator):
    """The budget shared out among levels by the energy of their wavelet bands, and the best nodes of each level.

    Band l = 0, 1, ... of the discrete wavelet transform of the luma, three orientations together, holds frequencies
    from 1/4 to 1/2 of a cycle in 2^l pixels: what tokens of level l, 2^l pixels between samples, still show, and those
    of the next level do not. So a node of level l is worth its mean relevance times the energy of band l in it. Levels
    share the budget by largest remainder on the sums of that, and none gets more than it has nodes. Coarse and
    fine nodes may cover the same pixels: what they show of them differs.

    Energy is that of the patch which is handed out, at the far edges shifted inward. In the sums a node counts by as
    much of it as is picture, so that no pixel counts twice. What rounding to 8 bits would add is added to all of it, so
    a picture without structure is shared out by its relevance alone.

    The transform is ptwt's, on the device of the picture. Coefficients that the right or bottom edge cuts are left out,
    unless there is no other; those of filters longer than Haar's that reach past an edge see its pixels go on there.
    Scores are the mean relevance of what a token covers, 1 being the highest of the picture.

    Args:
        levels: how many, from level 0; no more are used than it takes for one node to cover the picture.
        wavelet: a discrete one that PyWavelets knows. "haar" has its coefficients on the nodes exactly; those of longer
            filters reach past them, and their middle is taken.

    Raises:
        UnsupportedError: ptwt is not installed.

    Source: Mallat, "A Theory for Multiresolution Signal Decomposition" (1989).
    """

    needs: ClassVar[tuple[Need, ...]] = ("image", "relevance")

    def __init__(
        self, budget: int = 273, patch: int = 14, pool: Pool = "mean", levels: int = 4, wavelet: str = "haar"
    ) -> None:
        super().__init__(budget, patch, pool)
        self.levels = checks.integer(levels, "levels", at_least=1, at_most=20)
        if not isinstance(wavelet, str):
            raise InputError(f"wavelet is {wavelet!r}; expected the name of a discrete one, such as 'haar' or 'db2'.")
        self.wavelet = wavelet

    def work(self, scene: Scene) -> int:
        return scene.size[0] * scene.size[1]

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        top = min(self.levels - 1, (max(scene.grid) - 1).bit_length())
        relevance = relevances(scene, top)
        there = [level[0].numel() for level in relevance]
        self.enough(sum(there), f"patches of {len(there)} levels")
        rounding = 3 * (scene.patch / 2) ** 2 * ROUNDING
        bands = band_energies(scene, top + 1, self.wavelet)
        worth = [share * (energy + rounding) for share, energy in zip(relevance, bands, strict=True)]
        once = [_once(scene, level, values).double().sum((1, 2)) for level, values in enumerate(worth)]
        weight = torch.stack(once, dim=1)
        room = numbers(tuple(there), torch.int64, scene.device).expand_as(weight)
        counts = shared_out(weight, room, self.budget, least=0)
        taken = torch.arange(self.budget, device=scene.device) < counts[..., None]
        nodes = [(level, _best(values, taken[:, level])) for level, values in enumerate(worth)]
        return tokens_at(scene, nodes, relevance, self.budget)


def _once(scene: Scene, level: int, values: torch.Tensor) -> torch.Tensor:
    """Of values [B, h_l, w_l] of a level what each node adds to the others: patches at the far edges overlap."""
    side = scene.patch * 2**level
    if not any(n % side for n in scene.size):
        return values
    return values * constant(scene.device, _inside, scene.size, scene.patch, level)


def _best(values: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Where the highest of values [B, h, w] are, equal ones by their place.

    Args:
        taken: [B, most], whether the highest, the next one, and so on, are among them.
    """
    flat = values.flatten(1)
    order = ordered(flat, taken.shape[1])[1]
    return torch.zeros_like(flat, dtype=torch.bool).scatter(1, order, taken[:, : order.shape[1]]).view_as(values)


def band_energies(scene: Scene, levels: int, wavelet: str = "haar") -> list[torch.Tensor]:
    """Energy of bands 0, 1, ... in the patches of the nodes of the same level, [B, h_l, w_l] each. One that is larger
    than the picture counts as if it were full of what is there."""
    try:
        import pywt
        from ptwt.conv_transform_2 import wavedec2
    except ImportError as error:
        raise UnsupportedError(f"wavelets need ptwt ({error}); in the checkout: pip install '.[allocate]'") from None
    if wavelet not in pywt.wavelist(kind="discrete"):
        raise InputError(f"wavelet is {wavelet!r}; expected a discrete one of PyWavelets, such as 'haar' or 'db2'.")
    multiple = 2**levels
    bottom, right = (-n % multiple for n in scene.size)
    values = luma(scene)
    if bottom or right:
        values = F.pad(values, (0, right, 0, bottom), mode="replicate")
    if not precision.exact("conv", values.device):  # what it is made of
        values = values.double()
    filters: Any = constant(values.device, _filters, wavelet, values.dtype).unbind()

    def energies_of(part: torch.Tensor) -> list[torch.Tensor]:
        _, *details = wavedec2(part, filters, mode="constant", level=levels)
        return [torch.stack(three).square().sum(0) for three in reversed(details)]

    separate = (
        len(filters[0]) == 2 and checks.on_host(values) and not (needs_grad(values) or checks.transformed(values))
    )
    energies = _by_rows(energies_of, values[:, 0], levels) if separate else energies_of(values[:, 0])
    found = []
    for level, energy in enumerate(map(checked, energies)):
        step = 2 ** (level + 1)
        # Coefficients that the edge cuts hold pixels several times: another energy than of as much picture.
        there = [max(1, n // step) for n in scene.size]
        middle = [(have - n // step) // 2 for have, n in zip(energy.shape[1:], values.shape[-2:], strict=True)]
        energy = energy[:, middle[0] : middle[0] + there[0], middle[1] : middle[1] + there[1]]
        means = over_patches(energy, scene, level, step, (there[0] * step, there[1] * step))
        found.append(means * (scene.patch / 2) ** 2)
    return found


def _by_rows(
    energies_of: Callable[[torch.Tensor], list[torch.Tensor]], values: torch.Tensor, levels: int
) -> list[torch.Tensor]:
    """`energies_of(values)`, some rows at a time: Haar's coefficients reach over no others, and what torch's
    convolutions make of a picture on the way is several times as large.

    Args:
        values: [B, h, w], of sides that are multiples of 2^levels.
    """
    count, height, width = values.shape
    most = 2**levels
    result = [values.new_empty(count, height >> level, width >> level) for level in range(1, levels + 1)]
    for some, rows in bands(count, height // most, width * most):
        for level, part in enumerate(energies_of(values[some, rows.start * most : rows.stop * most]), start=1):
            step = most >> level
            result[level - 1][some, rows.start * step : rows.stop * step] = part
    return result


def _filters(wavelet: str, dtype: torch.dtype) -> torch.Tensor:
    """[4, taps]: what decomposes, low and high, and what composes."""
    import pywt

    return torch.tensor(pywt.Wavelet(wavelet).filter_bank, dtype=torch.float64, device="cpu").to(dtype)


def _inside(size: tuple[int, int], patch: int, level: int) -> torch.Tensor:
    """[h_l, w_l], how much of each node is picture: 1 but at the far edges."""
    side = patch * 2**level
    shares = []
    for n in size:
        begin = torch.arange(-(-n // side), dtype=torch.float32, device="cpu") * side
        shares.append((n - begin).clamp(max=side) / side)
    return shares[0][:, None] * shares[1]
