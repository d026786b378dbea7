"""Samplers of an image: its chain is read in memory, and no texture is made of it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from compare import TOLERANCES, assert_matches, stored_range
from images import DTYPES, noise
from times import asked, fastest

import gpu_lod as lod
from gpu_lod import memory_chain, sources
from gpu_lod.doctor import parity
from gpu_lod.foveate import reference as foveated
from gpu_lod.gather_patches import _look
from gpu_lod.gather_patches import reference as patches
from gpu_lod.jobs import small
from gpu_lod.log_polar import reference as polar_map
from gpu_lod.log_polar import ring_rule
from gpu_lod.memory_chain import LevelsInMemory, MemoryChain
from gpu_lod.pyramid import Pyramid
from gpu_lod.texture import Texels, TexturePool
from gpu_lod.tuning import tuning

SHAPES = ((2, 3, 64, 96), (1, 1, 31, 17), (3, 2, 33, 128), (2, 4, 45, 77), (3, 101, 77), (1, 3, 1, 9), (2, 3, 1, 1))
Sampler = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


@pytest.fixture
def hardware(restored_limits: lod.Context, monkeypatch: pytest.MonkeyPatch) -> lod.Context:
    """The context, taken for that of a GPU's driver."""
    monkeypatch.setattr(restored_limits, "renderer", "hardware")
    monkeypatch.setattr(restored_limits, "tuning", tuning(software=False))
    monkeypatch.setattr(restored_limits.programs, "pairs", restored_limits.tuning.pairs)
    return restored_limits


@pytest.fixture(params=["hardware", "software", "storage buffers"])
def either(
    request: pytest.FixtureRequest, restored_limits: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> lod.Context:
    """Every way to read memory: a GPU's, and a software renderer's, for which no number of samples is many."""
    monkeypatch.setattr(sources, "MANY", math.inf)
    if request.param == "hardware":
        request.getfixturevalue("hardware")
    elif request.param == "storage buffers":
        restored_limits.limits.texels = 0
    return restored_limits


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[LevelsInMemory]:
    """All that was read in memory; textures are made of nothing."""
    found: list[LevelsInMemory] = []
    bind = LevelsInMemory.bind

    def counted(levels: LevelsInMemory, gl: Any) -> None:
        found.append(levels)
        bind(levels, gl)

    def none(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a texture is made")

    monkeypatch.setattr(LevelsInMemory, "bind", counted)
    monkeypatch.setattr(TexturePool, "lease", none)
    monkeypatch.setattr(TexturePool, "texels", none)
    return found


def sites_of(points: torch.Tensor) -> torch.Tensor:
    """Twenty sites about each of some points, of whole levels and of others."""
    offsets = torch.linspace(-0.4, 0.4, 20)[:, None] * torch.tensor([1.0, -1.0])
    places = (points[:, None] + offsets).clamp(0, 1)
    levels = torch.cat([torch.zeros(4), torch.ones(4), torch.linspace(0, 4, 12)])
    return torch.cat([places, levels[:, None].expand(len(points), -1, 1)], dim=-1)


SAMPLERS: dict[str, Sampler] = {
    "log_polar": lambda x, points, how: lod.log_polar(x, points, 19, 33, backend=how),
    "log_polar, zero": lambda x, points, how: lod.log_polar(x, points, 16, 32, r_max=0.9, border="zero", backend=how),
    "foveate": lambda x, points, how: lod.foveate(x, points, backend=how),
    "foveate, biased": lambda x, points, how: lod.foveate(x, points, bias=1.3, backend=how),
    "gather_patches": lambda x, points, how: lod.gather_patches(x, sites_of(points), 14, backend=how),
    "gather_patches, zero": lambda x, points, how: lod.gather_patches(x, sites_of(points), 7, "zero", backend=how),
    "gather_patches, sharper": lambda x, points, how: lod.gather_patches(
        x, sites_of(points), 8, bias=-0.7, backend=how
    ),
}  # fmt: skip


MAIN = ("log_polar", "foveate", "gather_patches")
FLOAT, *OTHERS = torch.float32, torch.uint8, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("either", "name", "dtype"),
    [
        *(("hardware", name, FLOAT) for name in SAMPLERS),
        *(("hardware", name, dtype) for name in MAIN for dtype in OTHERS),
        *(("software", name, FLOAT) for name in MAIN),
        *(("software", "log_polar", dtype) for dtype in OTHERS),
        ("software", "foveate", torch.uint8),
        ("storage buffers", "log_polar", FLOAT),
    ],
    indirect=["either"],
    ids=str,
)
def test_samples_are_torchs(name: str, dtype: torch.dtype, either: lod.Context, bound: list[LevelsInMemory]) -> None:
    sample = SAMPLERS[name]
    for shape in SHAPES if dtype == FLOAT else SHAPES[:4]:
        image = noise(*shape, dtype=dtype)
        points = torch.rand(shape[0] if len(shape) == 4 else 1, 2)
        found = sample(image, points, "gl")
        assert bound and all(levels.key.layers == len(points) for levels in bound), shape
        # Of the chain as OpenGL stores it: of small dtypes a last place of a level is a last place of a sample.
        chain = [level.double() for level in lod.mipmap(image, backend="gl")]
        assert_matches(found, oracle(name, chain, points, image), "trilinear", where=str(shape))
        bound.clear()


def oracle(name: str, chain: list[torch.Tensor], points: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """The same in torch, in float64."""
    verb, _, how = name.partition(", ")
    if verb == "log_polar":
        rings, wedges, r_max = (16, 32, 0.9) if how else (19, 33, 0.7)
        rule = ring_rule(rings, wedges, None, r_max, "log", 0.05)
        return polar_map(chain, points.double(), rule, how or "clamp")
    if verb == "foveate":
        return foveated(chain, points.double(), 0.05, 1.3 if how else 0.0)
    patch, border, bias = {"": (14, "clamp", 0.0), "zero": (7, "zero", 0.0), "sharper": (8, "clamp", -0.7)}[how]
    look = _look(image.double(), patch, border, None, None, None, bias)
    return patches(chain, sites_of(points), look)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patches_of_other_dtypes(dtype: torch.dtype, either: lod.Context, bound: list[LevelsInMemory]) -> None:
    image, points = noise(2, 3, 64, 50, dtype=dtype), torch.rand(2, 2)
    how: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    for other in (torch.float32, torch.float16, torch.bfloat16):
        found, expected = (
            lod.gather_patches(image, sites_of(points), 8, **how, dtype=other, backend=backend)
            for backend in ("gl", "torch")
        )
        assert bound and found.dtype == other
        # A level's last place is at most a fifth of a standard deviation's.
        last = TOLERANCES["trilinear"][dtype] / stored_range(dtype) / 0.2 if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(found, expected, atol=last + 2 * torch.finfo(other).eps, rtol=torch.finfo(other).eps)


def test_drawn_maps_too(either: lod.Context) -> None:
    """They need a texture to draw to, and none to read."""
    for dtype in DTYPES:
        image, point = noise(2, 3, 64, 96, dtype=dtype), torch.rand(2, 2)
        found = lod.log_polar(image, point, 16, 32, generator="fragment", backend="gl")
        torch.testing.assert_close(found, lod.log_polar(image, point, 16, 32, backend="gl"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["log_polar", "foveate", "gather_patches, zero"])
def test_more_images_than_a_binding_holds(name: str, hardware: lod.Context, bound: list[LevelsInMemory]) -> None:
    sample, points = SAMPLERS[name], torch.rand(600, 2)
    for dtype in DTYPES:
        image = noise(600, 3, 16, 17, dtype=dtype)
        expected = sample(image, points, "gl")
        assert len(bound) == 1
        bound.clear()
        nbytes = image.nbytes // len(image)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hardware.limits, "storage_bytes", 300 * nbytes + 512)
            assert torch.equal(sample(image, points, "gl"), expected), dtype
        assert [levels.key.layers for levels in bound] == [256, 256, 88]
        bound.clear()


def test_what_bindings_do_not_hold_becomes_a_texture(hardware: lod.Context) -> None:
    image = noise(3, 3, 40, 52)
    whole, below = image.nbytes, 3 * 3 * 4 * (20 * 26 + 10 * 13 + 5 * 6 + 2 * 3 + 1)
    hardware.limits.storage_bytes = whole + 512
    assert memory_chain.fits(hardware, image, None)
    for less in (whole + 508, below + 512):
        hardware.limits.storage_bytes = less
        assert not memory_chain.fits(hardware, image, None)
        expected = lod.log_polar(image, (0.3, 0.4), 8, 12, backend="torch")
        assert torch.allclose(lod.log_polar(image, (0.3, 0.4), 8, 12, backend="gl"), expected, atol=2e-2)
    hardware.limits.storage_bytes = 2**27
    assert not memory_chain.fits(hardware, torch.empty(1, 1, 2**16), None), "17 levels"
    assert memory_chain.fits(hardware, torch.empty(1, 1, 2**16), 16)
    assert not memory_chain.fits(hardware, torch.empty(1, 1, 2**16 + 1), 16), "places are integers in fp32"
    # Shaders count elements by integers, whatever a binding holds.
    hardware.limits.storage_bytes = 2**40
    wide = torch.empty(1, 1, device="meta", dtype=torch.uint8).expand(1, 1, 2**15, 2**16)
    assert memory_chain._at_once(hardware, wide) == 0 and memory_chain._at_once(hardware, wide[..., 1000:, :]) == 1


@pytest.mark.parametrize("shape", [(1, 1, 1021, 1537), (1, 2, 5, 2**16 - 1)], ids=str)
def test_a_pixel_of_a_long_side_is_where_it_is(shape: tuple[int, ...], hardware: lod.Context) -> None:
    """In fp32 places would be off by as much as a side is long: some 1e-4 of white noise, and several counts."""
    for dtype in (torch.float32, torch.uint8):
        image, point = noise(*shape, dtype=dtype), torch.tensor([[0.9, 0.61]])
        found = lod.foveate(image, point, backend="gl")
        chain = [level.double() for level in lod.mipmap(image, backend="gl")]
        assert_matches(found, foveated(chain, point.double(), 0.05), "trilinear", where=str(dtype))
        sharp = lod.foveate(image, point, bias=-30.0, backend="gl")
        assert torch.allclose(sharp, image, atol=1e-6)


def test_the_buffers_of_a_chain_are_held(either: lod.Context) -> None:
    """From when it is made until it is bound others may take buffers, and give back those that nobody has."""
    with either as ctx, ctx.active():
        [(_, levels)] = MemoryChain(noise(2, 3, 40, 52)).textures(ctx)
        assert isinstance(levels, LevelsInMemory)
        mine = {planes.buffer.glo for planes in levels._parts}
        gc.collect()
        others = [ctx.private.lease(2 * 3 * 20 * 26 * 4).item.glo for _ in range(8)]
        assert mine.isdisjoint(others)


@pytest.mark.parametrize("name", ["log_polar", "foveate", "gather_patches"])
def test_gradients_are_torchs(name: str, either: lod.Context, bound: list[LevelsInMemory]) -> None:
    sample, points = SAMPLERS[name], torch.rand(2, 2)
    image = noise(2, 3, 33, 48).requires_grad_()
    found, expected = (sample(image, points, how) for how in ("gl", "torch"))
    weights = torch.rand_like(found)
    one, two = (torch.autograd.grad((made * weights).sum(), image)[0] for made in (found, expected))
    assert bound and torch.allclose(one, two, atol=1e-5)


def test_a_plan_reads_the_next_image(either: lod.Context, bound: list[LevelsInMemory]) -> None:
    image, point = noise(2, 3, 33, 48), torch.rand(2, 2)
    planned = lod.plan(lambda x, where: lod.log_polar(x, where, 16, 20, backend="gl"), image, point)
    assert "GL commands are repeated" in planned.reason
    for _ in range(2):
        image, point = noise(2, 3, 33, 48), torch.rand(2, 2)
        assert torch.allclose(planned(image, point), lod.log_polar(image, point, 16, 20, backend="torch"), atol=2e-5)
    assert bound


def test_a_plan_of_a_fixation_that_changes(hardware: lod.Context, bound: list[LevelsInMemory]) -> None:
    """How many levels it reads would be the fixation's to say: all are made."""
    image, point = noise(3, 33, 48), torch.rand(2)
    planned = lod.plan(lambda x, where: lod.foveate(x, where, backend="gl"), image, point)
    assert "GL commands are repeated" in planned.reason
    for point in (torch.tensor([0.1, 0.9]), torch.tensor([0.5, 0.5])):
        assert torch.allclose(planned(image, point), lod.foveate(image, point, backend="torch"), atol=2e-5)


def test_the_doctor_looks_at_it(hardware: lod.Context, bound: list[LevelsInMemory]) -> None:
    jobs = [job for job in small() if job.at.endswith("of an image") and job.verb is not lod.log_polar]
    (finding,) = parity.compare("shaders", 0, torch.device("cpu"), jobs)
    assert finding.status == "ok" and finding.found.startswith("16 results of 2 verbs") and len(bound) == 16


def noting(bind: Callable[..., None], read: list[str], name: str) -> Callable[..., None]:
    def noted(it: Any, gl: Any) -> None:
        read.append(name)
        bind(it, gl)

    return noted


@pytest.mark.usefixtures("llvmpipe")
def test_a_software_renderer_makes_a_texture_of_what_is_sampled_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an RGB image where the result is half of it: there is no room before."""
    read: list[str] = []
    for kind, name in ((LevelsInMemory, "memory"), (Texels, "texture")):
        monkeypatch.setattr(kind, "bind", noting(kind.bind, read, name))
    for channels, few, many in ((3, 30, 44), (4, 19, 24), (1, 19, 24)):
        image = noise(channels, 64, 64)
        for rings in (few, many):
            lod.log_polar(image, (0.4, 0.6), rings, 50, backend="gl")
        assert read == ["memory", "texture"], channels
        read.clear()
        turned = noise(64, 64, channels).permute(2, 0, 1)  # a copy of it takes the texture's room
        lod.log_polar(turned, (0.4, 0.6), many, 50, backend="gl")
        assert read == [["memory"], ["texture"]][channels == 1], "one channel is as it was"
        lod.log_polar(turned, (0.4, 0.6), 150, 50, backend="gl")
        assert read.pop() == "texture"
        read.clear()


def test_anisotropy_is_the_texture_units(hardware: lod.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    textures = MemoryChain.textures

    def watched(chain: MemoryChain, ctx: lod.Context, *, filtered: bool = False) -> Any:
        asked.append(filtered)
        return textures(chain, ctx, filtered=filtered)

    monkeypatch.setattr(MemoryChain, "textures", watched)
    lod.foveate(noise(3, 32, 32), (0.5, 0.5), anisotropy=4, backend="gl")
    assert asked == [True]


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 64, 96), torch.uint8), ((1, 64, 96), FLOAT)], ids=str)
def test_times_are_asked_for_the_way_that_opengl_takes(
    shape: tuple[int, ...], dtype: torch.dtype, unseeded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, made = noise(*shape, dtype=dtype), []
    source = sources.source

    def seen(*args: Any, **kwargs: Any) -> sources.Source:
        made.append(source(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sources, "source", seen)
    calls = [(lod.log_polar, (0.4, 0.6), rings, 2 * rings) for rings in (8, 24, 60)]
    calls += [(lod.gather_patches, lod.cortical_sites((0.4, 0.6), budget, (64, 96), 8), 8) for budget in (4, 20, 90)]
    states = [asked(verb, image, *arguments).state for verb, *arguments in calls]
    assert states == 2 * [sources.AN_IMAGE, sources.MANY_SAMPLES, sources.BY_TEXTURE]
    for verb, *arguments in calls:
        verb(image, *arguments, backend="gl")
    assert [isinstance(one, Pyramid) for one in made] == 2 * [False, False, lod.Context().software]


def test_auto_takes_shaders_for_images_where_they_are_faster(unseeded: Path, bound: list[LevelsInMemory]) -> None:
    image, point = noise(2, 3, 64, 96, dtype=torch.uint8), torch.tensor([[0.4, 0.6], [0.1, 0.9]])
    sites = lod.cortical_sites(point, 8, (64, 96), 8) + torch.tensor([0.0, 0.0, 0.3])
    for verb, way, *arguments in ((lod.log_polar, "gl compute", point, 8, 16), (lod.gather_patches, "gl", sites, 8)):
        assert lod.explain(verb, image, *arguments).backend == "torch"  # nothing was measured yet
        assert lod.explain(verb, lod.mipmap(image), *arguments).backend == "torch"
        question = fastest(way, verb, image, *arguments)
        assert (question.batch, question.channels, question.dtype) == (2, 3, "uint8")
        assert lod.explain(verb, image, *arguments).backend == "gl"
        assert lod.explain(verb, lod.mipmap(image), *arguments).backend == "torch"  # images say nothing of pyramids
        bound.clear()
        found = verb(image, *arguments)
        assert bound and torch.equal(found, verb(image, *arguments, backend="gl"))
        assert_matches(found, verb(image, *arguments, backend="torch").double(), "trilinear")


def test_what_torch_takes_of_images_whatever_the_times_are(unseeded: Path) -> None:
    image, sites = noise(1, 3, 64, 96), lod.cortical_sites((0.4, 0.6), 8, (64, 96), 8)
    fastest("gl", lod.gather_patches, image, sites, 8)
    assert lod.explain(lod.gather_patches, image, sites, 8).backend == "gl"
    for words, src, places in (
        ("slices, which torch copies", image, sites.floor()),
        ("gradients are asked for in the sites", image, sites.clone().requires_grad_()),
        ("hold 1 to 4 channels, and there are 5", noise(1, 5, 64, 96), sites),
    ):
        chosen = lod.explain(lod.gather_patches, src, places, 8)
        assert chosen.backend == "torch" and words in chosen.reason
        assert torch.equal(lod.gather_patches(src, places, 8), lod.gather_patches(src, places, 8, backend="torch"))


@pytest.mark.parametrize(
    ("shape", "dtype", "how", "least"),
    [
        ((1, 3, 64, 96), FLOAT, "", 16 / 9 + 1 / 3 + 0.2 - 1.8),
        ((3, 64, 96), torch.uint8, "", 16 / 9 + 1 / 3 + 0.2 - 1.8),
        ((2, 3, 33, 47), FLOAT, "", 16 / 9 + 1 / 3 + 0.2 - 1.8),
        ((1, 1, 64, 96), FLOAT, "", sources.MANY),
        ((1, 2, 64, 96), torch.float16, "", sources.MANY),
        ((1, 3, 33, 96), torch.uint8, "", 16 / 9 + 1 / 3 + 1.6 - 1.8),
        ((1, 3, 64, 95), torch.bfloat16, "", 16 / 9 + 1 / 3 + 0.8 - 1.8),
        ((1, 3, 64, 96), FLOAT, "turned", 16 / 9 + 1 / 3 + 1.2 - 1.8),
        ((1, 3, 64, 96), FLOAT, "recorded", 16 / 9 + 1 / 3 + 1.2 - 1.8),
        ((1, 1, 64, 96), FLOAT, "negated", 4 / 3 + 1 / 3 + 1.2 - 1.8),
    ],
)
def test_a_texture_is_made_where_there_is_room_for_it(
    shape: tuple[int, ...], dtype: torch.dtype, how: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the picture stand the texture and its chain, and a copy of what is not read where it is."""
    image = torch.empty(shape, dtype=dtype)
    if how == "turned":
        image = image.mT
    if how == "negated":
        image = torch._neg_view(image)
    monkeypatch.setattr(sources.recording, "current", lambda: object() if how == "recorded" else None)
    for share, wanted in ((0.99 * least, False), (1.01 * least, True)):
        samples = math.ceil(share * image.numel() / image.shape[-3])
        assert sources._texture_pays(image, samples, samples * image.shape[-3] * image.itemsize) == wanted
    assert not sources._texture_pays(image, int(0.24 * image.numel() / image.shape[-3]), 100 * image.nbytes)


@pytest.mark.parametrize("channels", [3, 4])
def test_anisotropy_on_hardware_copies_an_image_into_the_memory_of_its_result(
    hardware: lod.Context, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A texture unit reads a texture alone; on the way into it there is a copy, and no third picture."""
    image, bridge, made = noise(2, channels, 128, 192), hardware.bridge, []
    gc.collect()
    hardware.trim()
    make = bridge._make
    monkeypatch.setattr(bridge._borrower, "able", False)  # as that of hardware
    monkeypatch.setattr(bridge, "_make", lambda nbytes: made.append(nbytes) or make(nbytes))
    result = lod.foveate(image, (0.3, 0.6), anisotropy=4, backend="gl")
    assert result.shape == image.shape and sum(made) <= 1.5 * image.nbytes
