"""SLIC's superpixels by kernels, on the emulator, against scikit-image's."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_emulator import COMPILER, DESCENDING, SHUFFLED, EmulatedDevice

import gpu_lod as lod
from gpu_lod import by_kernel, cached, checks
from gpu_lod.allocate.hybrid_atlas import given_regions, majority
from gpu_lod.errors import CaptureError, KernelError, LimitError
from gpu_lod.kernels import device, sources, superpixels

data = pytest.importorskip("skimage.data")
segmentation = pytest.importorskip("skimage.segmentation")
regular_grid = pytest.importorskip("skimage.util").regular_grid
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the emulator")

ORDERS = pytest.mark.parametrize("order", [0, DESCENDING, SHUFFLED], ids=["ascending", "descending", "shuffled"])
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "page", "text")
SIZES = [(1, 1), (1, 23), (17, 1), (2, 2), (13, 29), (40, 90), (64, 64)]


@pytest.fixture(autouse=True)
def usable() -> None:
    device.usable.cache_clear()


def photograph(name: str, size: tuple[int, int]) -> torch.Tensor:
    """[C, h, w], fp32, a picture of scikit-image's pooled to a size."""
    pixels = torch.from_numpy(np.atleast_3d(getattr(data, name)())).permute(2, 0, 1).float() / 255
    return F.adaptive_avg_pool2d(pixels, size)


def drawn(name: str, size: tuple[int, int]) -> torch.Tensor:
    """[3, h, w] of what is no photograph."""
    y, x = (torch.arange(n) for n in size)
    squares = ((y[:, None] // 3 + x // 3) % 2).float()
    one = {
        "flat": torch.full(size, 0.3),
        "pixels": ((y[:, None] + x) % 2).float(),
        "squares": squares,
        "stripes": (x // 2 % 2).float().expand(size),
        "steps": (y[:, None] // 5 * 0.1 + x // 7 * 0.1).float(),
        "spots": (torch.rand(size) < 0.2).float(),
    }
    if name == "noise":
        return torch.rand(3, *size)
    if name == "four colours":
        return torch.stack([squares, (y[:, None] // 5 % 2).float().expand(size), 1 - squares])
    return one[name].expand(3, *size).contiguous()


DRAWN = ("flat", "pixels", "squares", "stripes", "steps", "spots", "noise", "four colours")


def theirs(pictures: torch.Tensor, segments: int, compactness: float) -> torch.Tensor:
    """As scikit-image has them."""
    seen = pictures[:, : 3 if pictures.shape[1] >= 3 else 1].permute(0, 2, 3, 1).double().numpy()
    how = {"n_segments": segments, "compactness": compactness, "start_label": 1}
    return torch.stack([torch.from_numpy(segmentation.slic(one, **how)) for one in seen])


def ours(pictures: torch.Tensor, segments: int, compactness: float) -> torch.Tensor:
    """By kernels, from 1 on."""
    found, most = superpixels.superpixels(device.device_of(pictures), pictures, segments, compactness)
    assert found.dtype == torch.int64 and int(found.max()) < most
    return found + 1


# -- the same as scikit-image's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 7, 64, 5000])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_superpixels_of_photographs(emulated: EmulatedDevice, size: tuple[int, int], segments: int) -> None:
    """Grey and in colour, one of more pixels than segments and the other way round."""
    if size[0] * size[1] > 200 and segments > 64:
        segments = 150
    for compactness in (0.1, 10.0, 1000.0):
        for names in (("astronaut", "chelsea", "coffee"), ("page", "text")):
            pictures = torch.stack([photograph(name, size) for name in names])
            assert torch.equal(ours(pictures, segments, compactness), theirs(pictures, segments, compactness))


@ORDERS
@pytest.mark.parametrize("name", DRAWN)
def test_superpixels_of_drawings(emulated: EmulatedDevice, name: str, order: int) -> None:
    """Where pixels are as near to several centres, and where most parts are too small or too large."""
    emulated.order, emulated.seed = order, 5
    for size, segments, compactness in itertools.product(((9, 31), (24, 24)), (1, 5, 20, 90), (0.01, 1.0, 100.0)):
        for channels in (1, 3):
            pictures = drawn(name, size)[None, :channels]
            assert torch.equal(ours(pictures, segments, compactness), theirs(pictures, segments, compactness))


@pytest.mark.parametrize("patch", [1, 2, 7, 16, 40])
@pytest.mark.parametrize("shape", [(1, 3, 64, 64), (2, 1, 33, 50), (1, 4, 5, 81), (1, 2, 1, 1)], ids=str)
def test_means_of_patches(emulated: EmulatedDevice, shape: tuple[int, ...], patch: int) -> None:
    pictures = torch.rand(*shape)
    for given in (pictures, pictures.flip(3).transpose(2, 3)):
        found = superpixels.patch_means(device.device_of(given), given, patch)
        assert torch.equal(found, F.avg_pool2d(given.contiguous(), patch, ceil_mode=True))


def test_more_patches_than_a_launch_has_threads(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superpixels, "MOST_BLOCKS", 2)
    pictures = torch.rand(1, 3, 64, 64)
    with pytest.raises(LimitError, match="192 patches"):
        superpixels.patch_means(device.device_of(pictures), pictures, 8)


@ORDERS
def test_an_image_of_a_batch_is_as_alone(emulated: EmulatedDevice, order: int) -> None:
    """And thread after thread in any order; two channels are looked at as one, four as three."""
    emulated.order, emulated.seed = order, 9
    for channels in (2, 4):
        pictures = torch.rand(3, channels, 21, 18)
        pictures[1], pictures[2] = 0.5, photograph("coffee", (21, 18))[:1] * 7 - 2
        together = ours(pictures, 30, 10.0)
        assert torch.equal(together, theirs(pictures, 30, 10.0))
        assert all(torch.equal(ours(pictures[i : i + 1], 30, 10.0)[0], together[i]) for i in range(3))


@pytest.mark.parametrize("side", [64, 70])
def test_parts_larger_than_most_are_cut(emulated: EmulatedDevice, side: int) -> None:
    """A winding band of few colours, whose nearest centres hang together over long ways, is searched as far as that. In
    shared memory, and of larger pictures not."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    for turns in (0.15, 0.4, 0.9):
        away = ((y - 31.5) ** 2 + (x - 31.5) ** 2).sqrt()
        spiral = ((away * turns + torch.atan2(y - 31.5, x - 31.5) / 6.2831853) % 1 < 0.5).float()
        for compactness in (0.001, 0.01, 0.1):
            pictures = spiral.expand(1, 3, side, side)
            assert torch.equal(ours(pictures, 64, compactness), theirs(pictures, 64, compactness))


@pytest.mark.parametrize("columns", [1, 2, 3, 63, 64, 65, 1000, 4097, 2**15, 2**16 - 1, 2**16])
def test_where_connected_has_a_row_end(columns: int) -> None:
    """The quotient without a division, of every pixel that there may be."""
    pixel = torch.arange(2**16)
    assert torch.equal(pixel * (0xFFFFFFFF // columns + 1) >> 32, pixel // columns)


def labelled(emulated: EmulatedDevice, labels: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Regions of labels [B, h, w]: what connected.cu makes."""
    batch, rows, columns = labels.shape
    given = labels.to(torch.int32).contiguous()
    scratch = torch.zeros(batch, 3, rows * columns, dtype=torch.int32)
    regions = torch.empty(batch, rows, columns, dtype=torch.int64)
    where = {"labels": given.data_ptr(), "scratch": scratch.data_ptr(), "regions": regions.data_ptr()}
    sizes = {"rows": rows, "columns": columns, "least": least, "most": most}
    emulated.launch(sources.CONNECTED, (batch, 1, 1), 1024, superpixels.Connected(**where, **sizes))
    return regions


def one_by_one(labels: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """The same of [h, w], as scikit-image has it: pixel after pixel, a search after the other."""
    rows, columns = labels.shape
    label = {(y, x): int(labels[y, x]) for y, x in itertools.product(range(rows), range(columns))}
    found, count = dict.fromkeys(label, -1), 0
    for y, x in label:
        if found[y, x] >= 0:
            continue
        part, near, at = [(y, x)], 0, 0
        found[y, x] = count
        while at < len(part) < most:
            for i, j in ((0, 1), (0, -1), (1, 0), (-1, 0)):
                a, b = part[at][0] + i, part[at][1] + j
                if (a, b) not in label:
                    continue
                if label[a, b] == label[y, x] and found[a, b] < 0:
                    found[a, b] = count
                    part.append((a, b))
                    if len(part) >= most:
                        break
                elif found[a, b] >= 0 and found[a, b] != count:
                    near = found[a, b]
            at += 1
        if len(part) < least:
            for a, b in part:
                found[a, b] = near
        else:
            count += 1
    return torch.tensor(list(found.values())).view(rows, columns)


@ORDERS
@pytest.mark.parametrize("size", [(1, 70), (70, 1), (30, 41), (66, 63)], ids=str)
def test_labels_that_wind(emulated: EmulatedDevice, size: tuple[int, int], order: int) -> None:
    """Of as few kinds that parts are of any size and shape, and threads unite the same ones from many sides."""
    emulated.order, emulated.seed = order, 7
    labels = torch.stack([(torch.rand(size) < share).long() for share in (0.2, 0.45, 0.6, 0.9)])
    for least, most in ((0, 3), (4, 24), (30, 180)):
        found = labelled(emulated, labels, least, most)
        assert all(torch.equal(a, one_by_one(b, least, most)) for a, b in zip(found, labels, strict=True))


def test_two_threads_that_unite_the_same(emulated: EmulatedDevice) -> None:
    """What one loses to the other before its atomic operation, it unites anew."""
    emulated.order = SHUFFLED
    labels = torch.stack([(torch.rand(30, 41) < share).long() for share in (0.45, 0.6)])
    expected = [one_by_one(one, 4, 24) for one in labels]

    def made() -> bool:
        return all(map(torch.equal, labelled(emulated, labels, 4, 24), expected))

    assert all(made() for emulated.seed in range(4))
    emulated.changes = (("pixel = before, other = earlier;", "return;"),)
    assert not all(made() for emulated.seed in range(4))


def test_where_the_grid_of_centres_is() -> None:
    for height, width, points in itertools.product(range(1, 31), range(1, 31), (1, 2, 3, 7, 12, 64, 500)):
        slices = regular_grid((1, height, width), points)[1:]
        assert superpixels.grid((height, width), points) == tuple((s.start or 0, int(s.step or 1)) for s in slices)


def test_pictures_that_are_no_numbers_stay_inside(emulated: EmulatedDevice) -> None:
    """While a graph is captured nobody looks for such: superpixels of theirs are anything, and others are as ever."""
    pictures = torch.rand(4, 3, 20, 20)
    expected = ours(pictures, 30, 10.0)
    pictures[0], pictures[2, 1, 5, 5] = torch.nan, torch.inf
    found = ours(pictures, 30, 10.0)
    assert torch.equal(found[1::2], expected[1::2]) and int(found.min()) >= 1


def test_pixels_that_are_in_no_window_keep_their_labels(emulated: EmulatedDevice) -> None:
    """Of segments without pixels, whose centres are no numbers, none has a window."""
    colours = torch.rand(1, 30 * 40, 3, dtype=torch.float64)
    labels = torch.randint(1, 4, (1, 30, 40), dtype=torch.int32)
    before = labels.clone()
    centres = torch.full((1, 3, 5), torch.nan, dtype=torch.float64)
    centres[0, 1] = torch.tensor([10.5, 7.0, 0.5, 0.5, 0.5])
    where = {"colours": colours.data_ptr(), "centres": centres.data_ptr(), "labels": labels.data_ptr()}
    sizes = {"rows": 30, "columns": 40, "segments": 3, "reach_y": 4, "reach_x": 9, "tiles": 19, "across": 3}
    parameters = superpixels.Nearest(**where, **sizes, weight=0.1)
    device.device_of(colours).launch(sources.NEAREST, (19, 1, 1), 64, parameters)
    before[0, 6:15, :17] = 2  # from int(10.5 - 4) to before int(10.5 + 4 + 1)
    assert torch.equal(labels, before)


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("lab", ("part > 0.008856", "part > 0.08856")),
        ("lab", ("(b, of_b,", "(b, of_g,")),
        ("nearest", ("if (away < least)", "if (away <= least)")),
        ("nearest", ("y < window.top || ", "")),
        ("means", ("sum / (double)count", "sum / (double)(count + 1)")),
        ("connected", ("i == 2 ? pixel + columns", "i == 3 ? pixel + columns")),
        ("connected", ("if (part < first) found", "if (part < first && found == first) found")),
        ("connected", ("left <= p.most) continue", "left <= pixels) continue")),
        (
            "connected",
            ("number[pixel] = searched(picture, pixel, p.most)", "number[pixel] = searched(picture, pixel, 9)"),
        ),
        ("connected", ("number[rest] = searched(picture, rest, p.most)", "number[rest] = searched(picture, rest, 9)")),
        ("connected", ("size >= p.least ? large++", "size > p.least ? large++")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_kernel_differs(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, kernel: str, change: tuple[str, str]
) -> None:
    pictures = torch.stack([drawn(name, (24, 24)) for name in ("squares", "noise", "spots", "four colours")])
    cases = list(itertools.product((5, 20, 90), (0.01, 1.0, 100.0)))
    broken(emulated, monkeypatch, kernel, change)
    assert not all(torch.equal(ours(pictures, *case), theirs(pictures, *case)) for case in cases)


def broken(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, kernel: str, *changes: tuple[str, str]) -> None:
    """Changes one kernel alone."""
    launch = emulated.launch

    def changed(one: sources.Kernel, *rest: Any) -> None:
        emulated.changes = changes if one.name == kernel else ()
        launch(one, *rest)

    monkeypatch.setattr(emulated, "launch", changed)


BARRIERS = [
    (name, which)
    for name in ("nearest", "means", "connected")
    for which in range(sources.texts()[f"{name}.cu"].count("__syncthreads();"))
]


INSIDE = {
    "means": (("pixel = start + places[done + me]", "pixel = (start + places[done + me]) % pixels"),),
    "connected": (
        ("pixels <= ROOM", "pixels <= 0"),  # of what is 0 before, and not of rubbish
        ("while (whole[pixel] < pixel) pixel", "while (whole[pixel] < pixel && whole[pixel] >= 0) pixel"),
    ),
}
"""Where a thread would read and write what is none of its memory without a barrier."""


@pytest.mark.parametrize(("kernel", "which"), BARRIERS)
def test_every_barrier_is_needed(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, kernel: str, which: int
) -> None:
    before = sources.texts()[f"{kernel}.cu"].split("__syncthreads();")[which][-60:]
    # Segments of more pixels than a block has threads; and parts that are cut.
    pictures = torch.stack([torch.rand(3, 40, 43), drawn("spots", (40, 43))])
    cases = (500, 10.0), (4, 1000.0), (40, 0.01)
    expected = [theirs(pictures, *case) for case in cases]
    monkeypatch.setattr(torch, "empty", torch.zeros)  # whatever else is there is no place of a pixel
    monkeypatch.setattr(superpixels, "ROOM", 0)

    def made() -> bool:
        return all(torch.equal(ours(pictures, *case), one) for case, one in zip(cases, expected, strict=True))

    with monkeypatch.context() as patch:
        broken(emulated, patch, kernel, *INSIDE.get(kernel, ()))
        assert made()
    broken(emulated, monkeypatch, kernel, (before + "__syncthreads();", before), *INSIDE.get(kernel, ()))
    # Or the emulator says that threads wait at different barriers, or that a place made of rubbish is no int.
    with pytest.raises(AssertionError, match=r"barrier|no int is as large"):
        for emulated.seed, emulated.order in enumerate((0, DESCENDING, SHUFFLED, SHUFFLED)):
            assert made(), "no barrier"


# -- what HybridAtlas makes of them ------------------------------------------------------------------------------------


def plain(run: Callable[[], Any]) -> Any:
    """As tensors of a CPU have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "KIND", "cuda")
        return run()


def same(found: lod.TokenSet, expected: lod.TokenSet) -> None:
    assert torch.equal(found.sites, expected.sites) and torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("size", [(37, 61), (64, 64), (8, 120)], ids=str)
@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_tokens_of_superpixels(emulated: EmulatedDevice, name: str, size: tuple[int, int]) -> None:
    image = torch.stack([photograph(name, size), drawn("noise", size)[: photograph(name, size).shape[0]]])
    relevance = torch.rand(2, -(-size[0] // 4), -(-size[1] // 4))
    for budget, segments in ((7, 5), (30, 64)):
        allocator = lod.allocate.HybridAtlas(budget, 4, segments=segments)
        for what in ({"image": image, "relevance": relevance}, {"relevance": relevance}):
            emulated.calls.clear()
            found = allocator(**what)
            launched = [call[1].name for call in emulated.named("launch")]
            assert launched.count("nearest") == superpixels.ROUNDS and launched.count("connected") == 1
            same(found, plain(lambda a=allocator, w=what: a(**w)))  # type: ignore[misc]


LABELS: dict[str, Callable[[], torch.Tensor]] = {
    "few": lambda: torch.randint(-2, 3, (3, 15, 20)),
    "huge": lambda: torch.randint(-2, 3, (3, 15, 20)) * 2**60,
    "one each": lambda: torch.randperm(300).view(1, 15, 20).repeat(3, 1, 1) - 7,
    "background": lambda: torch.zeros(3, 15, 20, dtype=torch.long),
    "no background": lambda: torch.full((3, 15, 20), 5),
    "several kinds": lambda: torch.stack(
        [torch.zeros(15, 20), torch.arange(300.0).view(15, 20), torch.ones(15, 20)]
    ).long(),
    "pixels": lambda: torch.randint(0, 3, (3, 60, 80)),
}


@pytest.mark.parametrize("kind", LABELS)
def test_tokens_of_labels(emulated: EmulatedDevice, kind: str) -> None:
    labels, relevance = LABELS[kind](), torch.rand(3, 15, 20)
    for how in ({}, {"background": 0.5}, {"background": 0.0}):
        allocator = lod.allocate.HybridAtlas(40, 4, **how)
        for amounts in (relevance, torch.ones_like(relevance)):
            found = allocator(relevance=amounts, labels=labels)
            assert "nearest" not in [call[1].name for call in emulated.named("launch")]
            same(found, plain(lambda a=allocator, r=amounts: a(relevance=r, labels=labels)))  # type: ignore[misc]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["superpixels", "labels"])
def test_nothing_waits_while_a_graph_is_captured(
    emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from test_allocate_graphs import Watch

    for module in (cached, checks, by_kernel):
        monkeypatch.setattr(module, "capturing", lambda where: emulated.is_capturing)
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    allocator = lod.allocate.HybridAtlas(40, 4)
    what = {"image": torch.rand(2, 3, 60, 80), "relevance": torch.rand(2, 15, 20)}
    if kind == "labels":
        what["labels"] = torch.randint(0, 5, (2, 60, 80))
    for _ in range(2):
        expected = allocator(**what)
    emulated.is_capturing = True
    with Watch() as watch:
        found = allocator(**what)
    assert not watch.waits
    same(found, expected)


def background(behind: torch.Tensor, spare: torch.Tensor, size: tuple[int, int], budget: int) -> list[torch.Tensor]:
    """Middles of runs, and their sites."""
    scene = lod.allocate.Scene(size, 7, torch.rand(behind.shape), None, None, None, None)
    every = scene.sites(0, torch.arange(behind[0].numel()))
    middle, sites = lod.allocate.HybridAtlas(budget, 7)._background(scene, behind, spare, every)
    return [middle, sites[middle.flatten(1)]]


@ORDERS
@pytest.mark.parametrize("size", [(7, 7), (70, 3), (100, 231), (455, 462), (33, 120)], ids=str)
def test_runs_of_what_is_behind(emulated: EmulatedDevice, size: tuple[int, int], order: int) -> None:
    emulated.order, emulated.seed = order, 3
    grid = [-(-n // 7) for n in size]
    for share in (0.0, 0.1, 0.5, 1.0):
        behind = torch.rand(3, *grid) < share
        behind[1] = share > 0.3
        there = behind.flatten(1).sum(1)
        for spare in (torch.zeros_like(there), there.clamp(max=1), there.clamp(max=20), there // 2, there):
            given = behind, spare.clamp(max=900), size, 900
            found = background(*given)
            assert emulated.named("launch")[-1][1].name == "runs"
            expected = plain(lambda g=given: background(*g))  # type: ignore[misc]
            assert all(map(torch.equal, found, expected))


def test_the_barrier_of_runs_is_needed(emulated: EmulatedDevice) -> None:
    behind, spare = torch.ones(1, 12, 40, dtype=torch.bool), torch.tensor([30])
    expected, differ = background(behind, spare, (84, 280), 30), []
    before = sources.texts()["runs.cu"].split("__syncthreads();")[0][-60:]
    emulated.changes = ((before + "__syncthreads();", before),)
    for emulated.seed, emulated.order in enumerate((0, DESCENDING, SHUFFLED)):
        differ.append(not all(map(torch.equal, background(behind, spare, (84, 280), 30), expected)))
    assert any(differ)


def test_more_runs_than_a_block_has_room_for(emulated: EmulatedDevice) -> None:
    behind, spare = torch.ones(1, 40, 40, dtype=torch.bool), torch.tensor([50])
    found = background(behind, spare, (280, 280), superpixels.MOST_RUNS + 1)
    assert not emulated.named("launch")
    assert all(map(torch.equal, found, background(behind, spare, (280, 280), 50)))
    assert emulated.named("launch")[-1][1].name == "runs"


def test_more_than_kernels_take(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    relevance, labels = torch.rand(1, 9, 12), torch.randint(0, 4, (1, 9, 12))
    allocator = lod.allocate.HybridAtlas(20, 4)
    expected = allocator(relevance=relevance), allocator(relevance=relevance, labels=labels)
    monkeypatch.setattr(superpixels, "MOST_PAIRS", 9 * 12 * 2)
    monkeypatch.setattr("gpu_lod.kernels.choosing.MOST_STRATA", 4)
    emulated.calls.clear()
    same(allocator(relevance=relevance), expected[0])
    same(allocator(relevance=relevance, labels=labels), expected[1])
    assert not {"nearest", "connected"} & {call[1].name for call in emulated.named("launch")}
    for module in (cached, checks, by_kernel):
        monkeypatch.setattr(module, "capturing", lambda where: emulated.is_capturing)
    emulated.is_capturing = True
    with pytest.raises(LimitError, match="9 x 12 patches"):
        allocator(relevance=relevance)
    with pytest.raises(LimitError, match="108 strata"):
        allocator(relevance=relevance, labels=labels)


@pytest.mark.parametrize("size", [(257, 256), (300, 300)], ids=str)
def test_larger_grids_than_kernels_take_are_named(emulated: EmulatedDevice, size: tuple[int, int]) -> None:
    with pytest.raises(LimitError, match=f"{size[0]} x {size[1]} patches"):
        ours(torch.rand(1, 1, *size), 5, 10.0)


def test_kernels_need_no_scikit_image(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    assert lod.allocate.HybridAtlas(20, 4)(torch.rand(1, 3, 36, 48)).budget == 20


def test_where_kernels_fail(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-image makes superpixels, but for a graph."""
    monkeypatch.setattr(by_kernel, "_failed", set())
    relevance, allocator = torch.rand(1, 9, 12), lod.allocate.HybridAtlas(20, 4)
    expected = allocator(relevance=relevance)

    def refuse(*_: Any) -> Any:
        raise KernelError("no such kernel")

    monkeypatch.setattr("gpu_lod.allocate.hybrid_atlas.superpixels", refuse)
    with pytest.warns(lod.errors.GpuLodWarning, match="no such kernel"):
        same(allocator(relevance=relevance), expected)
    for module in (cached, checks, by_kernel):
        monkeypatch.setattr(module, "capturing", lambda where: emulated.is_capturing)
    emulated.is_capturing = True
    with pytest.raises(CaptureError, match="superpixels are made by kernels"):
        allocator(relevance=relevance)


def test_regions_of_labels_are_in_their_order(emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.tensor([[[7, 7, 0], [-3, 7, 2**40]], [[1, 1, 1], [1, 1, 1]]])
    scene = lod.allocate.Scene((2, 3), 1, torch.rand(2, 2, 3), None, None, None, labels)
    region, most, ahead = given_regions(scene, labels)
    assert most == 5 and region.tolist() == [[3, 3, 1, 0, 3, 4], [2] * 6]
    assert ahead.tolist() == [[True, False, True, True, True]] * 2
    monkeypatch.setattr(checks, "readable", lambda *_: False)  # in a graph each picture has its own
    region, most, ahead = given_regions(scene, labels)
    assert most == 6 and region.tolist() == [[2, 2, 1, 0, 2, 3], [0] * 6]
    assert ahead.tolist() == [[True, False, True, True, False, False], [True] + [False] * 5]


@pytest.mark.parametrize("kinds", [1, 2, 9, 400])
def test_the_most_frequent_label_of_large_patches(monkeypatch: pytest.MonkeyPatch, kinds: int) -> None:
    """Which torch's own would wait for: counted by a sort."""
    labels = torch.randint(-kinds // 2, kinds, (3, 50, 75))
    scene = lod.allocate.Scene((50, 75), 7, torch.ones(3, 8, 11), None, None, None, labels)
    expected = majority(labels, scene)
    monkeypatch.setattr(checks, "on_host", lambda value: False)
    monkeypatch.setattr("gpu_lod.allocate.hybrid_atlas._MODE", 0)
    monkeypatch.setattr(torch.Tensor, "mode", None)
    assert torch.equal(majority(labels, scene), expected)
