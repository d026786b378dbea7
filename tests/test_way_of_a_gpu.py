"""What verbs do on hardware alone, on whatever renderer there is: each against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import CALLS
from compare import HARDWARE_WEIGHT_ERROR, assert_matches, stored_range
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod.agreement import difference
from gpu_lod.bridge.views import Views
from gpu_lod.program import Program, Programs
from gpu_lod.sharing import Sharing
from gpu_lod.tuning import tuning

FIXATION = torch.tensor([[0.4, 0.6], [0.7, 0.2]])
SITES = torch.tensor([[[0.4, 0.6, 0.0], [0.1, 0.9, 1.3]], [[0.7, 0.2, 2.0], [0.5, 1.0, 0.4]]])
BOXES = torch.tensor([[0.1, 0.2, 0.5, 0.4], [0.0, 0.0, 1.0, 1.0], [0.9, 0.95, 1.0, 1.0]])
VERBS: dict[str, tuple[str, Callable[..., Any]]] = {
    # (row of the tolerances, verb)
    "mipmap": ("box", lambda x, how: lod.mipmap(x, backend=how)),
    "hiz": ("exact", lambda x, how: lod.hiz(x, reduce="min", backend=how)),
    "region_max": ("exact", lambda x, how: lod.region_max(lod.hiz(x, backend="torch"), BOXES, backend=how)),
    "region_min": (
        "exact",
        lambda x, how: lod.region_min(lod.hiz(x, reduce="min", backend="torch"), BOXES, backend=how),
    ),
    "cull": ("exact", lambda x, how: _culled(lod.cull(lod.hiz(x, backend=how), 0.5 * _range(x), backend=how))),
    "gaussian": ("binomial", lambda x, how: lod.gaussian(x, backend=how)),
    "laplacian": ("binomial", lambda x, how: lod.laplacian(x, backend=how)),
    "collapse": ("binomial", lambda x, how: lod.collapse(lod.laplacian(x, 3, backend="torch"), backend=how)),
    "oriented_energy": ("energy", lambda x, how: lod.oriented_energy(x, 3, backend=how)),
    "feature_maps": ("features", lambda x, how: lod.feature_maps(x, FIXATION, backend=how)),
    "log_polar": ("trilinear", lambda x, how: lod.log_polar(x, FIXATION, 13, 22, border="zero", backend=how)),
    "log_polar of a pyramid": (
        "trilinear",
        lambda x, how: lod.log_polar(lod.mipmap(x, backend="torch"), FIXATION, 12, 24, backend=how),
    ),
    "inverse_log_polar": ("trilinear", lambda x, how: lod.inverse_log_polar(x, FIXATION, (21, 30), backend=how)),
    "inverse_log_polar, words": ("trilinear", lambda x, how: lod.inverse_log_polar(x, FIXATION, (21, 32), backend=how)),
    "foveate": ("trilinear", lambda x, how: lod.foveate(x, FIXATION, 0.1, backend=how)),
    "gather_patches": ("trilinear", lambda x, how: lod.gather_patches(x, SITES, 7, backend=how)),
    "gather_patches, words": ("trilinear", lambda x, how: lod.gather_patches(x, SITES, 16, "zero", backend=how)),
}
SAMPLERS = ("log_polar", "foveate", "gather_patches")


def _range(x: torch.Tensor) -> float:
    return 255.0 if x.dtype == torch.uint8 else 1.0


def _culled(found: lod.Culled) -> list[torch.Tensor]:
    return [
        found.mask.float(),
        *(part.float() for part in (found.indices, found.pruned)),
        torch.tensor(found.tested).float(),
    ]


@pytest.fixture
def hardware(ctx: lod.Context, monkeypatch: pytest.MonkeyPatch) -> lod.Context:
    """The context, taken for that of a GPU."""
    monkeypatch.setattr(Sharing, "software", False)
    monkeypatch.setattr(ctx, "tuning", tuning(software=False))
    monkeypatch.setattr(ctx.programs, "pairs", ctx.tuning.pairs)
    monkeypatch.setattr(ctx.textures, "_software", False)
    return ctx


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VERBS)
def test_every_verb(hardware: lod.Context, name: str, dtype: torch.dtype, sample_error: float) -> None:
    kind, verb = VERBS[name]
    slack = 2.0**-15 if kind == "trilinear" else 0.0  # positions are fp32, in torch too
    if name.startswith(SAMPLERS):
        slack += sample_error * stored_range(dtype)
        if dtype == torch.uint8:  # Mesa filters textures of 8 bits with weights of so few
            slack = max(slack, 255 * 2 * HARDWARE_WEIGHT_ERROR)
    for shape in ((2, 3, 48, 64), (2, 1, 45, 31), (2, 4, 33, 70), (2, 3, 1, 9), (2, 2, 130, 3)):
        image = noise(*shape, dtype=dtype)
        found, expected = verb(image, "gl"), verb(image, "torch")
        if isinstance(found, torch.Tensor):
            found, expected = [found], [expected]
        for actual, oracle in zip(found, expected, strict=True):
            assert actual.dtype == oracle.dtype
            stored = actual.dtype == torch.uint8 or kind == "exact"
            most = 1.0 if stored else max(_range(image), float(oracle.abs().max()))
            assert_matches(
                (actual / most).to(actual.dtype), oracle.double() / most, kind, slack=slack, where=f"{shape}"
            )


@pytest.fixture
def made(hardware: lod.Context, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The compute shaders that are asked for, and how."""
    found: list[tuple[str, dict[str, Any]]] = []
    compute = Programs.compute

    def noted(programs: Programs, shader: str, **defines: Any) -> Program:
        found.append((shader, defines))
        return compute(programs, shader, **defines)

    monkeypatch.setattr(Programs, "compute", noted)
    return found


@pytest.fixture
def waited(hardware: lod.Context, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that all of GL's work is waited for."""
    found: list[int] = []
    finish = hardware.gl.Finish
    monkeypatch.setattr(hardware.gl, "Finish", lambda: (found.append(1), finish()))
    return found


OF_PYRAMIDS: dict[str, Callable[[lod.Pyramid], object]] = {
    "log_polar": lambda x: lod.log_polar(x, FIXATION, 13, 22, backend="gl"),
    "foveate": lambda x: lod.foveate(x, FIXATION, 0.1, backend="gl"),
    "gather_patches": lambda x: lod.gather_patches(x, SITES, 7, backend="gl"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_it_is_the_way_of_a_gpu(name: str, made: list[tuple[str, dict[str, Any]]], waited: list[int]) -> None:
    """One pixel or row an invocation, filtered by texture units, and GL's work waited for once."""
    OF_PYRAMIDS[name](lod.mipmap(noise(2, 3, 48, 64, dtype=torch.uint8), backend="torch"))
    assert len(waited) == 1
    shaders = [shader for shader, _ in made]
    assert shaders[0] == "planes_to_texels.comp" and "foveate_blocks.comp" not in shaders
    last = made[-1][1]
    assert not last["FETCHED"] and "PLANAR" not in last
    assert last.get("RINGS_AT_ONCE", 1) == last.get("STEPS_AT_ONCE", 1) == 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_image_becomes_no_texture(name: str, made: list[tuple[str, dict[str, Any]]], waited: list[int]) -> None:
    """Its chain is read in memory, and waited for with its samples."""
    VERBS[name][1](noise(2, 3, 48, 64, dtype=torch.uint8), "gl")
    assert len(waited) == 1
    shaders = [shader for shader, _ in made]
    assert shaders[0] == "single_pass.comp" and "planes_to_texels.comp" not in shaders
    assert made[-1][1]["PLANAR"] and "foveate_blocks.comp" not in shaders


def test_zink_over_a_software_vulkan_reads_no_buffer_textures(
    ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctx, "renderer", "zink Vulkan 1.4(llvmpipe (LLVM 22.1.8, 256 bits) (MESA_LLVMPIPE))")
    bound: list[int] = []
    monkeypatch.setattr(Views, "bind", lambda *how: bound.append(1))
    assert ctx.software and not ctx.fetches
    image = noise(2, 3, 48, 64)
    for name, (_, verb) in VERBS.items():
        assert difference(verb(image, "gl"), verb(image, "torch")) == "", name
    assert not bound


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "gl" in call.backends])
def test_plans_of_every_verb(hardware: lod.Context, name: str) -> None:
    """All is OpenGL's work alone but the descent, which asks how far it came."""
    call = CALLS[name]

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return call.run(*inputs, backend="gl")

    planned = lod.plan(run, *call.inputs())
    assert planned.replays == (name != "cull"), planned.reason
    for _ in range(2):
        inputs = call.inputs()
        for actual, expected in zip(planned(*inputs), run(*inputs), strict=True):
            assert torch.equal(actual, expected)
