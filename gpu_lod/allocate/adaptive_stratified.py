"""Strata as fine as the question asks for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributions import Categorical

from gpu_lod import checks, dispatch, precision
from gpu_lod.allocate.base import Need, register
from gpu_lod.allocate.learned import Learned
from gpu_lod.allocate.random import MOST_SEED
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.stratified import best_of_each, strata_of
from gpu_lod.cached import numbers
from gpu_lod.errors import InputError
from gpu_lod.patch_grid import Pool
from gpu_lod.uncompiled import as_it_stands

COARSEST, FINEST = 2, 8
"""Strata along a side."""

CHOICES = FINEST - COARSEST + 1

START = 4
"""What a new head says whatever the query."""


@register
class AdaptiveStratified(Learned):
    """`Stratified` on a grid of 2 to 8 by 2 to 8 strata that a small head reads off the query: for each image the most
    likely count of rows, and of columns (no more than the picture's grid has). A new head says 4 x 4.

    The counts are whole numbers and pass no gradient, so tokens have none in the head, and a loss of tokens alone does
    not train it. What does is the expected loss over all 49 grids, exact and without noise: `expected_loss`, of the
    losses that `Stratified(strata=(rows, columns))` has with each; it chooses the same sites as this does on that grid.
    For a loss too dear to be taken 49 times, `distribution` gives what a score-function estimate (REINFORCE) needs.

    Args:
        width: D, of a query.
        hidden: width of the head.
        seed: of the head's first weights.
    """

    monotone = True
    finest = True

    needs: ClassVar[tuple[Need, ...]] = ("relevance", "query")
    learns: ClassVar[tuple[str, ...]] = tuple(
        f"head.{layer}.{name}" for layer in (0, 1, 3) for name in ("weight", "bias")
    )

    def __init__(
        self,
        budget: int = 273,
        patch: int = 14,
        pool: Pool = "mean",
        width: int = 512,
        hidden: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(budget, patch, pool)
        width = self.query_width = checks.integer(width, "width", at_least=1)
        hidden = checks.integer(hidden, "hidden", at_least=1)
        seed = checks.integer(seed, "seed", at_least=0, at_most=MOST_SEED)
        self._made_with = {"width": width, "hidden": hidden, "seed": seed}
        # torch's own start would be drawn of the program's random numbers.
        device = torch.get_default_device()
        first = nn.utils.skip_init(nn.Linear, width, hidden, device=device)
        last = nn.utils.skip_init(nn.Linear, hidden, 2 * CHOICES, device=device)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer, size in ((first, width**-0.5), (last, 0.1 * hidden**-0.5)):
                layer.weight.copy_(
                    (2 * torch.rand(layer.weight.shape, generator=generator, device="cpu", dtype=torch.float32) - 1)
                    * size
                )
                layer.bias.zero_()
            last.bias.view(2, CHOICES)[:, START - COARSEST] = 1
        self.head = nn.Sequential(nn.LayerNorm(width), first, nn.GELU(), last)

    def choose(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        self.enough(scene.grid[0] * scene.grid[1])
        assert scene.query is not None
        wanted = COARSEST + self._logits(scene.query).argmax(-1)
        cut = torch.minimum(wanted, numbers(tuple(scene.grid), wanted.dtype, wanted.device))
        # Images with fewer strata have empty ones, which get nothing.
        return best_of_each(scene, strata_of(scene, cut), FINEST**2, self.budget)

    @as_it_stands
    @precision.in_full
    def distribution(self, query: Any) -> tuple[Categorical, Categorical]:
        """How likely each count of rows and each of columns is, for each query: 0 stands for 2 strata, 6 for 8.

        Shape: query [B, D] or [D], which is a batch of one.
        """
        query = checks.tensor(query, "query")
        logits = self._logits(self._query(query, query.shape[0] if query.ndim == 2 else 1))
        return Categorical(logits=logits[:, 0]), Categorical(logits=logits[:, 1])

    @as_it_stands
    @precision.in_full
    def expected_loss(self, losses: torch.Tensor, query: Any) -> torch.Tensor:
        """The mean over the batch of the loss to expect if grids were drawn from `distribution`.

        Shape: losses [B, 7, 7], of each image with 2 to 8 rows and 2 to 8 columns of strata; query [B, D].

        Raises:
            InputError: losses of another shape.
        """
        losses = checks.real(losses, "losses")
        rows, columns = self.distribution(query)
        likely = rows.probs[:, :, None] * columns.probs[:, None]
        if losses.shape != likely.shape:
            raise InputError(f"losses are {tuple(losses.shape)}; expected {tuple(likely.shape)}, one a query and grid.")
        checks.same_device(likely, losses, "the losses", type(self).__name__)
        return (likely * losses).sum((1, 2)).mean()

    def _logits(self, query: torch.Tensor) -> torch.Tensor:
        """[B, 2, 7]"""
        if torch.is_grad_enabled():
            (query,) = dispatch.keepable(query)
        found: torch.Tensor = self.head(query.to(next(self.parameters()).dtype))
        return found.unflatten(-1, (2, CHOICES))
