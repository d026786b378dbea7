"""The reader of the search: a small transformer that answers queries from tokens, whatever allocator they are from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quality.search_scenes import BOX, CLASSES, COLOURS, SIDE

KINDS = ("place", "colour")
QUERY = 5
"""Width of a query: (x, y), then the frame's (r, g, b); what it is not asked by is 0."""
CANVAS, SPAN = 16, 32
"""Points along a side of what a query sees of each token, and how many pixels they span."""
WINDOW = 16
"""Tokens that a query reads."""
_SHARP = 5.0
_ROUNDS = 2
_FAINT = 20.0
_LEAST = 1e-2


def queries(places: torch.Tensor, colours: torch.Tensor, kind: str) -> torch.Tensor:
    """[B, Q, QUERY] about digits at places [B, Q, 2] framed in colours [B, Q], asked by one of the two."""
    asked = torch.zeros(*places.shape[:2], QUERY)
    if kind == "place":
        asked[..., :2] = places
    else:
        asked[..., 2:] = torch.tensor(list(COLOURS.values()))[colours]
    return asked


class Pixels(NamedTuple):
    """All samples of all tokens, N = K P P."""

    at: torch.Tensor
    """[B, N, 2]"""
    scores: torch.Tensor
    """[B, Qc, N]: how much each is of the frame that each query by colour asks for, before the softmax"""


class Reading(NamedTuple):
    logits: torch.Tensor
    """[B, Q, CLASSES]"""
    places: torch.Tensor
    """[B, Q, 2]: where it looked"""
    pixels: Pixels


class Held(NamedTuple):
    """Tokens that are left of more, and how many each stands for."""

    patches: torch.Tensor
    """[B, K, 3, P, P]"""
    sites: torch.Tensor
    """[B, K, 3]"""
    sizes: torch.Tensor
    """[B, K], at least 1"""


class Reader(nn.Module):
    """Tokens and queries to the digits' classes.

    1. A query by colour finds its place: samples of all tokens that have the colour of the frame attend, and their
       mean position, sharpened by mean shift, is the place.
    2. Each query takes the `WINDOW` tokens nearest to its place, fine ones first, and sees each in its own frame: the
       patch resampled at CANVAS x CANVAS points about the place, with a mask of what the patch covers of them. This is
       the patch embedding; level, offset and coverage are the position embedding.
    3. A transformer over [query token, those tokens]; the answer is read off the query token. Queries do not see each
       other.

    Resampling puts pieces of a digit into one frame, which positions as vectors alone take hours of training to do on
    a CPU. It is the same for tokens of all levels.

    Shape: patches [B, K, 3, P, P] in [0, 1], sites [B, K, 3], queries [B, Q, QUERY], those of one place in the batch by
        the same; weights [B, K] multiply the content of tokens and carry gradients: one of weight 0 is a blank.

    Args:
        every: step 1 takes every so-manyth sample along each side of a patch.
        cut: leaves fewer tokens between steps 1 and 2. Attention of step 3 is proportional to the sizes it gives.
    """

    points: torch.Tensor

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.heads = heads
            # Of single samples, so that all sides of a frame count alike and their mean is its centre.
            self.metric = nn.Parameter(torch.eye(3) * _SHARP)
            self.look = nn.Linear(2 * CANVAS**2, width)
            self.where = nn.Linear(4, width)
            self.start = nn.Parameter(torch.zeros(width))
            layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))
        at = ((torch.arange(CANVAS) + 0.5) / CANVAS - 0.5) * SPAN
        self.register_buffer("points", torch.stack(torch.meshgrid(at, at, indexing="xy"), -1), persistent=False)

    def forward(
        self,
        patches: torch.Tensor,
        sites: torch.Tensor,
        asked: torch.Tensor,
        weights: torch.Tensor | None = None,
        every: int = 1,
        cut: Callable[[Reader, torch.Tensor, torch.Tensor, torch.Tensor, Pixels], Held] | None = None,
    ) -> Reading:
        by_colour = asked[0, :, 2:].any(-1)
        pixels = self.pixels(patches, sites, asked[:, by_colour, 2:], every)
        places = asked[..., :2].clone()
        places[:, by_colour] = _centres(pixels)
        held = None if cut is None else cut(self, patches, sites, asked, pixels)
        patches, sites, sizes = (patches, sites, None) if held is None else held
        return Reading(self._read(patches, sites, weights, sizes, places), places, pixels)

    def pixels(self, patches: torch.Tensor, sites: torch.Tensor, colours: torch.Tensor, every: int = 1) -> Pixels:
        """What step 1 sees of tokens, for queries by colours [B, Qc, 3]."""
        count = patches.shape[-1]
        step = torch.exp2(sites[..., 2:])
        along = ((torch.arange(count) - (count - 1) / 2) * step / SIDE)[..., ::every]  # [B, K, P]
        patches = patches[..., ::every, ::every]
        count = patches.shape[-1]
        x = (sites[..., :1] + along)[:, :, None, :].expand(-1, -1, count, -1)
        y = (sites[..., 1:2] + along)[..., None].expand(-1, -1, -1, count)
        # A sample counts by its area.
        base = (2 * step.log()).expand(-1, -1, count**2).flatten(1)
        seen = patches.movedim(2, -1).flatten(1, 3) @ self.metric  # [B, N, 3]
        wanted = colours @ self.metric
        apart = seen.square().sum(-1)[:, None] - 2 * wanted @ seen.mT + wanted.square().sum(-1, keepdim=True)
        return Pixels(torch.stack([x, y], -1).flatten(1, 3), base[:, None] - apart)

    def _read(
        self,
        patches: torch.Tensor,
        sites: torch.Tensor,
        weights: torch.Tensor | None,
        sizes: torch.Tensor | None,
        places: torch.Tensor,
    ) -> torch.Tensor:
        count = patches.shape[-1]
        step, centre, at = torch.exp2(sites[..., 2]), sites[..., :2] * SIDE, places.detach() * SIDE
        near = remoteness(sites, places.detach(), count)
        index = near.topk(min(WINDOW, near.shape[-1]), largest=False).indices  # [B, Q, M]
        rows = torch.arange(len(index))[:, None, None]
        luma, centre, step = patches.mean(2)[rows, index], centre[rows, index], step[rows, index]
        offset = (self.points + (at[:, :, None] - centre)[..., None, None, :]) / step[..., None, None, None]
        cover = (offset.abs().amax(-1) <= count / 2).float()
        grid = (offset / ((count - 1) / 2)).flatten(0, 2)
        seen = F.grid_sample(luma.flatten(0, 2)[:, None], grid, padding_mode="border", align_corners=True)
        seen = (seen.view_as(cover) - 0.5) * 2 * cover
        aside = ((centre - at[:, :, None]) / (BOX * step[..., None])).clamp(-2, 2)
        position = torch.cat([aside, step.log2()[..., None], cover.mean((-1, -2))[..., None]], -1)
        content = torch.cat([seen.flatten(-2), cover.flatten(-2)], -1)
        if weights is not None:
            content = content * weights[rows, index][..., None]
        tokens = self.look(content) + self.where(position)
        tokens = torch.cat([self.start.expand(*index.shape[:2], 1, -1), tokens], 2).flatten(0, 1)
        bias = -_FAINT * (cover.sum((-1, -2)) == 0)
        if sizes is not None:
            bias = bias + sizes.log()[rows, index]
        bias = F.pad(bias, (1, 0)).flatten(0, 1)[:, None]  # [B Q, 1, M + 1]
        mask = bias.expand(-1, bias.shape[-1], -1).repeat_interleave(self.heads, 0)
        # Without dropout only this differs: layers fused for evaluation take any mask for a boolean one, and pass no
        # gradient to weights of tokens.
        self.layers.train()
        return self.answer(self.layers(tokens, mask=mask)[:, 0]).unflatten(0, index.shape[:2])


def remoteness(sites: torch.Tensor, places: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, Q, K], in pixels: how far the patches at sites [B, K, 3] are from places [B, Q, 2], and how coarse. A query
    takes the least remote tokens."""
    step = torch.exp2(sites[:, None, :, 2])
    away = (sites[:, None, :, :2] - places[:, :, None]).abs().amax(-1) * SIDE - step * patch / 2
    return away.clamp(min=-BOX / 2) + 4 * step


def _centres(pixels: Pixels) -> torch.Tensor:
    """[B, Qc, 2]: the mean position by attention, then that of what is near it."""
    with torch.no_grad():
        found = pixels.scores.softmax(-1) @ pixels.at
        for _ in range(_ROUNDS):
            away = torch.cdist(found, pixels.at, compute_mode="donot_use_mm_for_euclid_dist") * (SIDE / BOX)
            found = (pixels.scores - away.square() / 2).softmax(-1) @ pixels.at
        return found


def loss_of(reading: Reading, places: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the answers, and of where frames are: attention belongs into the box that is asked for.

    Shape: places [B, Qc, 2] of the digits that are asked for by colour; classes [B, Q] of all.
    """
    answers = F.cross_entropy(reading.logits.flatten(0, 1), classes.flatten())
    away = (reading.pixels.at[:, None] - places[:, :, None]).abs().amax(-1)
    inside = (reading.pixels.scores.softmax(-1) * (away <= BOX / 2 / SIDE)).sum(-1)
    return answers - (inside + _LEAST).log().mean()
