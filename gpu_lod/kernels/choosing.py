"""What allocators repeat until it is done, which a GPU would be waited for or given many small launches for: memory and
launches of amounts.cu, best.cu, peaks.cu, ranks.cu, served.cu, shares.cu and threshold.cu."""

from __future__ import annotations

import ctypes

import torch

from gpu_lod.errors import LimitError
from gpu_lod.kernels.device import THREADS, Device
from gpu_lod.kernels.sources import AMOUNTS, BEST, BEST_DOUBLE, PEAKS, RANKS, SERVED, SHARES, THRESHOLD

MOST_CELLS = 2**16
"""Of a map, for which a block is not too slow."""
MOST_STRATA = 2**12
"""Each of which is compared with all others."""
MOST_BANDS = 8
"""For which a block has room."""

MOST_SCORES = 2**14
"""Of a row, through which a block goes again and again."""
MOST_BEST = 2**9
"""Of a row's scores, each of which is compared with all others."""
MOST_RANKED = 2**12
"""Cells, and strata, for which a block has room."""


class Amounts(ctypes.Structure):
    """The parameter of amounts.cu."""

    _fields_ = (
        ("relevance", ctypes.c_void_p),
        ("amounts", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("cells", ctypes.c_int),
        ("highest", ctypes.c_int),
        ("lowest", ctypes.c_int),
    )


class Best(ctypes.Structure):
    """The parameter of best.cu."""

    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("there", ctypes.c_int),
        ("count", ctypes.c_int),
    )


class Peaks(ctypes.Structure):
    """The parameter of peaks.cu."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("across", ctypes.c_void_p),
        ("central", ctypes.c_void_p),
        ("points", ctypes.c_void_p),
        ("height", ctypes.c_float),
        ("width", ctypes.c_float),
        ("longer", ctypes.c_float),
        ("reach", ctypes.c_float),
        ("keep", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("count", ctypes.c_int),
    )


class Ranks(ctypes.Structure):
    """The parameter of ranks.cu."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("strata", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("cells", ctypes.c_int),
        ("count", ctypes.c_int),
        ("tiles", ctypes.c_int),
    )


class Served(ctypes.Structure):
    """The parameter of served.cu."""

    _fields_ = (
        ("order", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("taken", ctypes.c_void_p),
        ("bands", ctypes.c_int),
        ("patches", ctypes.c_int),
    )


class Shares(ctypes.Structure):
    """The parameter of shares.cu."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("total", ctypes.c_longlong),
        ("strata", ctypes.c_int),
        ("least", ctypes.c_int),
    )


class Threshold(ctypes.Structure):
    """The parameter of threshold.cu."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("centres", ctypes.c_void_p),
        ("thresholds", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("tail", ctypes.c_double),
        ("scores", ctypes.c_int),
        ("count", ctypes.c_int),
        ("halvings", ctypes.c_int),
    )


def amounts(device: Device, relevance: torch.Tensor, *, highest: int, lowest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps [B, h, w], fp32, as amounts and as finite numbers: as `Summable` has it.

    Raises:
        LimitError: larger maps than a block is to go through.
    """
    maps, cells = len(relevance), relevance[0].numel()
    if cells > MOST_CELLS:
        raise LimitError(f"a map of {cells} cells is more than a block takes ({MOST_CELLS}).")
    relevance = relevance.detach().contiguous()
    found, finite = torch.empty_like(relevance), torch.empty_like(relevance)
    parameters = Amounts(
        relevance=relevance.data_ptr(),
        amounts=found.data_ptr(),
        finite=finite.data_ptr(),
        cells=cells,
        highest=highest,
        lowest=lowest,
    )
    device.launch(AMOUNTS, (maps, 1, 1), THREADS, parameters)
    return found, finite


def best(device: Device, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest `count` of scores [B, N], fp32 or float64, and their places, int64, [B, count] each: as
    `torch.sort(scores, descending=True, stable=True)` has them.

    Raises:
        LimitError: more scores than a block is to go through time and again, or more of them than it is to compare.
    """
    rows, there = scores.shape
    if there > MOST_SCORES or count > MOST_BEST:
        raise LimitError(f"{count} of {there} scores are more than a block finds ({MOST_BEST} of {MOST_SCORES}).")
    scores = scores.detach().contiguous()
    found, places = scores.new_empty(rows, count), scores.new_empty((rows, count), dtype=torch.int64)
    parameters = Best(
        scores=scores.data_ptr(), found=found.data_ptr(), places=places.data_ptr(), there=there, count=count
    )
    device.launch(BEST_DOUBLE if scores.dtype == torch.float64 else BEST, (rows, 1, 1), THREADS, parameters)
    return found, places


def peaks(
    device: Device,
    values: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    count: int,
    size: tuple[int, int],
    reach: float,
    inhibition: float,
) -> torch.Tensor:
    """[B, count, 2] the highest cells of maps [B, h, w], fp32 and not negative: as `find_fixations` has it.

    Args:
        tables: [h] and [w], the cells' centres in parts of the sides, and [h, w], by which equal cells are ordered.
        size: (height, width), in proportion to the sides of what the map shows.
        reach: the radius, squared.

    Raises:
        LimitError: a map of more cells than a block has threads.
    """
    maps, rows, columns = values.shape
    if rows * columns > THREADS:
        raise LimitError(f"a map of {rows} x {columns} cells is more than a block takes ({THREADS}).")
    values = values.contiguous()
    points = torch.empty((maps, count, 2), dtype=torch.float32, device=values.device)
    down, across, central = tables
    parameters = Peaks(
        values=values.data_ptr(),
        down=down.data_ptr(),
        across=across.data_ptr(),
        central=central.data_ptr(),
        points=points.data_ptr(),
        height=size[0],
        width=size[1],
        longer=max(size),
        reach=reach,
        keep=1 - inhibition,
        rows=rows,
        columns=columns,
        count=count,
    )
    device.launch(PEAKS, (maps, 1, 1), THREADS, parameters)
    return points


def ranks(device: Device, values: torch.Tensor, strata: torch.Tensor, count: int) -> torch.Tensor:
    """[B, N], int64, how many of its stratum come before each of values [B, N], fp32: as `ranks_within` has it.

    Args:
        strata: [B, N], int64, from 0 to `count` - 1.

    Raises:
        LimitError: more values, or strata, than a block has room for.
    """
    images, cells = values.shape
    if max(cells, count) > MOST_RANKED:
        raise LimitError(f"{cells} values of {count} strata are more than a block ranks ({MOST_RANKED}).")
    values, strata = values.detach().contiguous(), strata.contiguous()
    found, tiles = torch.empty_like(strata), -(-cells // THREADS)
    parameters = Ranks(
        values=values.data_ptr(),
        strata=strata.data_ptr(),
        ranks=found.data_ptr(),
        cells=cells,
        count=count,
        tiles=tiles,
    )
    device.launch(RANKS, (images * tiles, 1, 1), THREADS, parameters)
    return found


def served(device: Device, order: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Where [B, N] the patches are that bands get, `counts` [B, S] each, int64: as `given_away` has it.

    Args:
        order: pairs [B, S * N] from the best on, int64, band * N + patch each.

    Raises:
        LimitError: more bands, or patches, than a block is to go through.
    """
    (images, bands), patches = counts.shape, order.shape[1] // counts.shape[1]
    if bands > MOST_BANDS or patches > MOST_CELLS:
        raise LimitError(
            f"{bands} bands of {patches} patches are more than a block takes ({MOST_BANDS} of {MOST_CELLS})."
        )
    order, counts = order.contiguous(), counts.contiguous()
    rank = torch.empty_like(order, dtype=torch.int32)
    taken = torch.empty((images, patches), dtype=torch.bool, device=order.device)
    parameters = Served(
        order=order.data_ptr(),
        counts=counts.data_ptr(),
        rank=rank.data_ptr(),
        taken=taken.data_ptr(),
        bands=bands,
        patches=patches,
    )
    device.launch(SERVED, (images, 1, 1), THREADS, parameters)
    return taken


def shares(
    device: Device, weight: torch.Tensor, room: torch.Tensor, total: int | torch.Tensor, least: int
) -> torch.Tensor:
    """[B, S] whole shares of `total`, a number or [B], by weight [B, S] and room [B, S], int64: as `shared_out` has
    it.

    Raises:
        LimitError: more strata than a block is to rank.
    """
    if weight.shape[1] > MOST_STRATA:
        raise LimitError(f"{weight.shape[1]} strata are more than a block ranks ({MOST_STRATA}).")
    weight, room = weight.detach().double().contiguous(), room.long().contiguous()
    totals = total.long().expand(len(weight)).contiguous() if isinstance(total, torch.Tensor) else None
    counts, scratch = torch.empty_like(room), weight.new_empty(2 * weight.numel())
    parameters = Shares(
        weight=weight.data_ptr(),
        room=room.data_ptr(),
        totals=None if totals is None else totals.data_ptr(),
        counts=counts.data_ptr(),
        scratch=scratch.data_ptr(),
        total=0 if isinstance(total, torch.Tensor) else total,
        strata=weight.shape[1],
        least=least,
    )
    device.launch(SHARES, (len(weight), 1, 1), THREADS, parameters)
    return counts


def threshold(
    device: Device, logits: torch.Tensor, count: int, *, tail: float, halvings: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a soft top-k of logits [B, N], float64, the centres [B, 1], from there the thresholds [B, 1], and [B, N] the
    shares in them: as `soft_top_k` has it.

    Raises:
        LimitError: more scores than a block is to go through time and again.
    """
    rows, scores = logits.shape
    if scores > MOST_SCORES:
        raise LimitError(f"{scores} scores are more than a block goes through ({MOST_SCORES}).")
    logits = logits.detach().contiguous()
    centres, found, share = logits.new_empty(rows, 1), logits.new_empty(rows, 1), torch.empty_like(logits)
    parameters = Threshold(
        logits=logits.data_ptr(),
        centres=centres.data_ptr(),
        thresholds=found.data_ptr(),
        shares=share.data_ptr(),
        tail=tail,
        scores=scores,
        count=count,
        halvings=halvings,
    )
    device.launch(THRESHOLD, (rows, 1, 1), THREADS, parameters)
    return centres, found, share
