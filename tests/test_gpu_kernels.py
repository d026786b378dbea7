"""backend="cuda" on a real GPU: the kernels against float64, streams, graphs, and no waiting.

`make gpu-check` runs these. None of them needs OpenGL.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from compare import HARDWARE_WEIGHT_ERROR, assert_matches
from images import DTYPES, SIZES, grey_levels, noise
from oracle import extreme_chain, mean_chain
from oracle import foveate as foveate_oracle
from oracle import gather_patches as patch_oracle
from oracle import log_polar as polar_oracle
from scripts import HERE, succeed
from test_gather_patches import grid_sites, unfolded

import gpu_lod as lod
from gpu_lod.errors import CaptureError

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"
ODD = [(1001, 777), (127, 255), (4097, 33), (1, 9001), (8191, 3)]


def on_host(levels: Any) -> list[torch.Tensor]:
    return [level.cpu() for level in levels]


def slack(truth: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of weights with 8 fractional bits."""
    return 2 * HARDWARE_WEIGHT_ERROR * truth[1] + HARDWARE_WEIGHT_ERROR * truth[2]


# -- every verb against the float64 oracle ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, *ODD, (64, 64), (1024, 1024)], ids=str)
def test_chains(size: tuple[int, int], dtype: torch.dtype) -> None:
    image = noise(2, 3, *size, dtype=dtype).to(CUDA)
    for level, truth in zip(on_host(lod.mipmap(image, backend="cuda")), mean_chain(image.cpu()), strict=True):
        assert_matches(level, truth, "box")
    for reduce in ("max", "min"):
        pyramid = lod.hiz(image[:, :2], reduce=reduce, backend="cuda")
        for level, truth in zip(on_host(pyramid), extreme_chain(image[:, :2].cpu(), reduce), strict=True):
            assert_matches(level, truth, "exact")


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_every_small_size(reduce: Literal["max", "min"]) -> None:
    for height in range(1, 68):
        for width in sorted({*range(1, 68, 2), 2, (height * 29) % 67 + 1, 64}):
            image = noise(1, 1, height, width)
            found = on_host(lod.hiz(image.to(CUDA), reduce, backend="cuda"))
            for level, truth in zip(found, extreme_chain(image, reduce), strict=True):
                assert torch.equal(level.double(), truth), (height, width)


def test_nan_and_subnormals() -> None:
    relevance = torch.randn(1, 2, 230, 70)
    relevance.view(-1)[::53] = float("nan")
    relevance[0, 1] = -1e-40
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for reduce in ("max", "min"):
            pyramid = lod.hiz(relevance.to(CUDA, dtype), reduce=reduce, backend="cuda")
            for level, truth in zip(on_host(pyramid), extreme_chain(relevance.to(dtype), reduce), strict=True):
                assert_matches(level, truth, "exact")


def test_a_thousand_chains_are_the_same() -> None:
    """What the last block reads is what the others wrote, every time."""
    image = torch.rand(8, 3, 1000, 1333, device=CUDA)
    first = lod.mipmap(image, backend="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(1000):
        for one, two in zip(lod.mipmap(image, backend="cuda").levels[1:], first.levels[1:], strict=True):
            wrong += (one != two).sum()
    assert int(wrong) == 0


read_as = pytest.mark.parametrize("read_as", ["texture", "memory"])


@read_as
def test_levels_are_blended_in_proportion(read_as: str) -> None:
    levels, sites, expected = grey_levels(CUDA)
    found = lod.gather_patches(read(lod.Pyramid(levels), read_as), sites, 1, backend="cuda").flatten().cpu()
    assert float((found - expected).abs().max()) <= HARDWARE_WEIGHT_ERROR, found.tolist()


def read(pyramid: lod.Pyramid, read_as: str) -> lod.Pyramid:
    """By texture units, or from memory."""
    return pyramid.upload(backend="cuda") if read_as == "texture" else pyramid


@pytest.mark.parametrize("spacing", ["log", "cortical"])
@pytest.mark.parametrize("border", ["clamp", "zero"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@read_as
def test_log_polar(dtype: torch.dtype, border: Any, spacing: Any, read_as: str) -> None:
    for channels in (1, 2, 3, 4):
        pyramid = read(lod.mipmap(noise(3, channels, 97, 140, dtype=dtype).to(CUDA), backend="cuda"), read_as)
        fixation = torch.rand(3, 2)
        how = {"spacing": spacing, "border": border}
        found = lod.log_polar(pyramid, fixation, 17, 40, backend="cuda", **how)
        truth = polar_oracle(on_host(pyramid), fixation, 17, 40, **how)
        assert found.device == torch.device(CUDA)
        assert_matches(found.cpu(), truth[0], "trilinear", slack=slack(truth))
        assert torch.equal(lod.log_polar(pyramid, fixation.to(CUDA), 17, 40, backend="cuda", **how), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@read_as
def test_foveate(dtype: torch.dtype, read_as: str) -> None:
    for channels in (1, 2, 3, 4):
        pyramid = read(lod.mipmap(noise(3, channels, 97, 140, dtype=dtype).to(CUDA), backend="cuda"), read_as)
        fixation = torch.tensor([[0.0, 0.0], [1.0, 0.4], [0.3, 0.6]])
        found = lod.foveate(pyramid, fixation, backend="cuda")
        truth = foveate_oracle(on_host(pyramid), fixation)
        assert_matches(found.cpu(), truth[0], "trilinear", slack=slack(truth))


def test_anisotropic() -> None:
    y, x = torch.meshgrid(torch.linspace(0, 9, 60), torch.linspace(0, 14, 90), indexing="ij")
    pyramid = lod.mipmap(torch.stack([x.sin(), y.cos(), (x * y / 9).sin()]).to(CUDA))
    for anisotropy in (2.0, 4.0, 16.0):
        found, expected = (
            lod.foveate(pyramid, (0.3, 0.6), anisotropy=anisotropy, backend=backend) for backend in ("cuda", "torch")
        )
        assert (found - expected).abs().mean() < 0.05  # the texture unit places its probes as it likes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("border", ["clamp", "zero"])
@read_as
def test_gather_patches(dtype: torch.dtype, border: Any, read_as: str) -> None:
    image = noise(3, 3, 96, 144, dtype=dtype).to(CUDA)
    pyramid = read(lod.mipmap(image, backend="cuda"), read_as)
    sites = torch.rand(3, 20, 3) * torch.tensor([0.5, 0.5, 2.0]) + torch.tensor([0.25, 0.25, 0.0])
    found = lod.gather_patches(pyramid, sites.to(CUDA), 14, border=border, backend="cuda")
    if border == "clamp":
        truth = patch_oracle(on_host(pyramid), sites, 14, border)
        assert_matches(found.cpu(), truth[0], "trilinear", slack=slack(truth) + max(pyramid.size) * 2.0**-20 * truth[1])
    for patch in (1, 14, 16, 31):
        one = read(lod.mipmap(image[0]), read_as)
        exact = lod.gather_patches(one, grid_sites(96, 144, patch), patch, border=border, backend="cuda")
        assert torch.equal(exact.cpu(), unfolded(image[0].cpu(), patch))
    for into, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        one, two = (
            lod.gather_patches(image, grid_sites(96, 144, 14), 14, border, (0.4,) * 3, (0.3,) * 3, into, backend)
            for backend in ("cuda", "torch")
        )
        assert one.dtype == into and torch.allclose(one.float(), two.float(), atol=tolerance, rtol=tolerance)


@read_as
def test_more_images_than_layers(read_as: str) -> None:
    """Of a texture; or than a launch has blocks along a side."""
    image = torch.rand(2500 if read_as == "texture" else 70_000, 1, 20, 30, device=CUDA)
    for sample in (SAMPLERS["foveate"], SAMPLERS["log_polar"]):
        at = torch.tensor([0.4, 0.6], device=CUDA)
        whole, tail = (sample(read(lod.mipmap(x, backend="cuda"), read_as), at) for x in (image, image[-10:]))
        assert torch.equal(whole[-10:], tail)


def test_gradients() -> None:
    image = torch.rand(2, 3, 37, 53, device=CUDA)

    def gradient(backend: Any, loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = image.clone().requires_grad_()
        loss(lod.log_polar(lod.mipmap(x, backend=backend), (0.4, 0.6), 9, 14, backend=backend)).backward()
        assert x.grad is not None
        return x.grad

    found, expected = (gradient(backend, lambda polar: polar.square().sum()) for backend in ("cuda", "torch"))
    # Twice a sample's error, of three weights between pixels in [0, 1], times what the sample takes of the pixel.
    taken = gradient("torch", torch.sum)
    assert ((found - expected).abs() <= 6 * HARDWARE_WEIGHT_ERROR * taken + 1e-5).all()


# -- streams, graphs, waiting -----------------------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "log_polar": lambda src, at: lod.log_polar(src, at, 16, 32, backend="cuda"),
    "foveate": lambda src, at: lod.foveate(src, at, backend="cuda"),
    "gather_patches": lambda src, at: lod.gather_patches(
        src, torch.cat([at, torch.full_like(at[:1], 0.7)])[None], 14, backend="cuda"
    ),
}
each = pytest.mark.parametrize("name", SAMPLERS)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each
def test_nothing_waits_for_the_gpu(name: str) -> None:
    """Not with points on the GPU, and not with a new image at each call; but for tables, which are brought once."""
    SAMPLERS[name](torch.rand(3, 301, 203, device=CUDA), torch.rand(2, device=CUDA))
    with no_waiting():
        for _ in range(3):
            image, at = torch.rand(3, 301, 203, device=CUDA), torch.rand(2, device=CUDA)
            SAMPLERS[name](image, at)
            SAMPLERS[name](lod.mipmap(image, backend="cuda").upload(backend="cuda"), at)
            SAMPLERS[name](image, torch.tensor([0.25, 0.75]))
            lod.hiz(image, backend="cuda")


def test_places_may_begin_at_any_float() -> None:
    """As those of rows of three floats do. In a process of its own: a misaligned address costs it its context."""
    succeed(
        """
        import torch
        from test_gpu_kernels import CUDA, SAMPLERS
        image, gaze = torch.rand(3, 301, 203, device=CUDA), torch.rand(4, 3, device=CUDA)
        for name, sampler in SAMPLERS.items():
            for at in gaze[:, :2]:
                found, expected = (sampler(image, one) for one in (at, at.clone()))
                assert torch.equal(found, expected), name
            torch.cuda.synchronize()
            print(name, "may")
        """,
        PYTHONPATH=HERE,
    )


@each
def test_a_pinned_place_may_be_written_to_after_the_call(name: str) -> None:
    image, at = torch.rand(3, 301, 203, device=CUDA), torch.tensor([0.25, 0.75])
    expected, pinned = SAMPLERS[name](image, at), at.pin_memory()
    torch.cuda._sleep(200_000_000)  # about a tenth of a second
    found = SAMPLERS[name](image, pinned)
    pinned.fill_(0.9)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_chains_in_a_graph(reduce: Any) -> None:
    image = torch.rand(2, 3, 1001, 777, device=CUDA)
    lod.mipmap(image, reduce=reduce, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pyramid = lod.mipmap(image, reduce=reduce, backend="cuda")
    for _ in range(3):
        image.copy_(torch.rand_like(image))
        graph.replay()
        for one, two in zip(pyramid.levels, lod.mipmap(image, reduce=reduce, backend="cuda"), strict=True):
            assert torch.equal(one, two)


@each
def test_samplers_of_an_image_in_a_graph(name: str) -> None:
    """Which is no texture."""
    image, at = torch.rand(2, 3, 301, 203, device=CUDA), torch.rand(2, device=CUDA)
    SAMPLERS[name](image, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = SAMPLERS[name](image, at)
    for _ in range(3):
        image.copy_(torch.rand_like(image))
        at.copy_(torch.rand(2))
        graph.replay()
        assert torch.equal(found, SAMPLERS[name](image, at))


@each
def test_samplers_in_a_graph(name: str) -> None:
    """The fixation is read when the graph runs; the pyramid lives as long as the graph."""
    pyramid = lod.mipmap(torch.rand(3, 301, 203, device=CUDA), backend="cuda").upload(backend="cuda")
    at = torch.rand(2, device=CUDA)
    SAMPLERS[name](pyramid, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = SAMPLERS[name](pyramid, at)
    for _ in range(3):
        at.copy_(torch.rand(2))
        graph.replay()
        assert torch.equal(found, SAMPLERS[name](pyramid, at))


@each
def test_plans_of_samplers(name: str) -> None:
    pyramid = lod.mipmap(torch.rand(3, 301, 203, device=CUDA), backend="cuda").upload(backend="cuda")
    planned = lod.plan(lambda at: SAMPLERS[name](pyramid, at), torch.rand(2, device=CUDA))
    assert planned.replays and "CUDA graph" in planned.reason, planned.reason
    for _ in range(3):
        at = torch.rand(2, device=CUDA)
        assert torch.equal(planned(at), SAMPLERS[name](pyramid, at))


@each
def test_plans_from_an_image(name: str) -> None:
    image, at = torch.rand(2, 3, 301, 203, device=CUDA), torch.rand(2, device=CUDA)
    planned = lod.plan(SAMPLERS[name], image, at)
    assert planned.replays and "CUDA graph" in planned.reason, planned.reason
    for _ in range(3):
        image, at = torch.rand_like(image), torch.rand_like(at)
        assert torch.equal(planned(image, at), SAMPLERS[name](image, at))


def test_a_plan_with_an_input_on_the_host_is_no_graph() -> None:
    """The host reads its values, which a graph would keep."""
    planned = lod.plan(lambda x, gain: x * float(gain), torch.rand(9, device=CUDA), torch.tensor(2.0))
    assert not planned.replays and "would keep" in planned.reason
    x = torch.rand(9, device=CUDA)
    assert torch.equal(planned(x, torch.tensor(3.0)), 3 * x)


def test_plans_of_chains() -> None:
    planned = lod.plan(lod.mipmap, torch.rand(2, 3, 1001, 777, device=CUDA), backend="cuda")
    assert planned.replays and "CUDA graph" in planned.reason, planned.reason
    for _ in range(3):
        image = torch.rand(2, 3, 1001, 777, device=CUDA)
        for one, two in zip(planned(image), lod.mipmap(image, backend="cuda"), strict=True):
            assert torch.equal(one, two)


def test_a_plan_that_waits_leaves_torch_as_it_was() -> None:
    """A capture that fails spoils neither random numbers, nor the current stream, nor memory, nor captures to come."""
    stream, x = torch.cuda.current_stream(), torch.rand(9, device=CUDA)
    planned = lod.plan(lambda x: x * x.sum().item(), x)
    assert not planned.replays and "capturing it ended with" in planned.reason, planned.reason
    assert torch.cuda.current_stream() == stream
    assert torch.rand(4, device=CUDA).shape == (4,)
    torch.cuda.synchronize()
    assert torch.equal(planned(x), x * x.sum().item())
    # What two streams used stays active for as long as torch believes in a capture.
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    used = torch.zeros(2**24, device=CUDA)
    used.record_stream(torch.cuda.Stream())
    del used
    torch.cuda.synchronize()
    x = torch.rand(9, device=CUDA)
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < before + 2**24

    image = torch.rand(3, 301, 203, device=CUDA)
    planned = lod.plan(lod.mipmap, image, backend="cuda")
    assert planned.replays and "CUDA graph" in planned.reason, planned.reason
    noisy = lod.plan(lambda x: x + torch.rand_like(x), x)
    assert noisy.replays and not torch.equal(noisy(x).clone(), noisy(x))
    for _ in range(2):
        image = torch.rand_like(image)
        for one, two in zip(planned(image), lod.mipmap(image, backend="cuda"), strict=True):
            assert torch.equal(one, two)


def test_textures_are_refused_in_a_capture_and_no_harm_is_done() -> None:
    image, at = torch.rand(3, 301, 203, device=CUDA), torch.rand(2, device=CUDA)
    expected = lod.foveate(image, at, anisotropy=4.0, backend="cuda")
    x, graph = torch.zeros(4, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(CaptureError, match="upload"):
            lod.foveate(image, at, anisotropy=4.0, backend="cuda")
        with pytest.raises(CaptureError):
            SAMPLERS["foveate"](lod.mipmap(image, backend="cuda"), torch.rand(2))
    graph.replay()
    assert float(y.sum()) == 4.0
    assert torch.equal(lod.foveate(image, at, anisotropy=4.0, backend="cuda"), expected)


@each
def test_a_second_stream(name: str) -> None:
    """It reads a texture that the first is still filling, and the texture is taken again only after both."""
    side = torch.cuda.Stream(CUDA)
    for value in (0.25, 0.5, 0.75):
        pyramid = lod.mipmap(torch.full((3, 600, 400), value, device=CUDA), backend="cuda")
        side.wait_stream(torch.cuda.current_stream(CUDA))
        at = torch.rand(2, device=CUDA)
        torch.cuda._sleep(20_000_000)  # about ten milliseconds
        pyramid.upload(backend="cuda")
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            found = SAMPLERS[name](pyramid, torch.rand(2, device=CUDA))
        del pyramid, at
        gc.collect()
        for other in (0.1, 0.9):  # the same texture, from the pool
            another = lod.mipmap(torch.full((3, 600, 400), other, device=CUDA), backend="cuda")
            SAMPLERS[name](another.upload(backend="cuda"), torch.rand(2, device=CUDA))
        torch.cuda.synchronize()
        assert (found - value).abs().max() < 0.01  # other pictures are 0.15 away, the filter's rounding far less


def test_without_opengl() -> None:
    """No context is opened on the way."""
    succeed(
        """
        import torch, gpu_lod as lod
        image = torch.rand(3, 64, 64, device="cuda")
        pyramid = lod.mipmap(image, backend="cuda").upload(backend="cuda")
        lod.log_polar(pyramid, (0.4, 0.6), 8, 8, backend="cuda")
        lod.gather_patches(pyramid, [[0.5, 0.5, 0.5]], backend="cuda")
        assert float(lod.foveate(pyramid, (0.4, 0.6), backend="cuda").mean()) > 0
        with open("/proc/self/maps") as maps:
            assert "libEGL_nvidia" not in maps.read()
        """
    )
