"""Where the texels that samplers read lie: in a buffer on software renderers, else in array textures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from images import DTYPES, noise

import gpu_lod as lod
from gpu_lod.errors import OutOfMemoryError
from gpu_lod.texture import Texels, Texture

SITES = [[0.1, 0.2, 0.0], [0.9, 0.8, 1.4], [0.5, 0.5, 3.0], [0.3, 0.3, 9.0]]
SAMPLERS: dict[str, Callable[[lod.Pyramid], torch.Tensor]] = {
    "log_polar": lambda src: lod.log_polar(src, (0.4, 0.6), 12, 20, generator="compute"),
    "log_polar drawn": lambda src: lod.log_polar(src, (0.4, 0.6), 12, 20, generator="fragment"),
    "foveate": lambda src: lod.foveate(src, (0.4, 0.6), backend="gl"),
    "gather_patches": lambda src: lod.gather_patches(src, SITES, 7, backend="gl"),
}
BOXES = torch.tensor([[0.1, 0.2, 0.5, 0.9], [0.0, 0.0, 1.0, 1.0], [0.33, 0.4, 0.34, 0.41], [0.7, 0.2, 0.7, 0.5]])


def kinds(ctx: lod.Context, pyramid: lod.Pyramid, **how: bool) -> set[type]:
    with ctx.active():
        return {type(texture) for _, texture in pyramid.textures(ctx, **how)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_buffer_gives_what_an_array_gives(llvmpipe: lod.Context, name: str, dtype: torch.dtype) -> None:
    sample = SAMPLERS[name]
    for shape in ((1, 1, 33, 47), (2, 2, 64, 48), (3, 3, 45, 33), (1, 4, 16, 90), (3, 1, 77), (3, 50, 1)):
        levels = lod.mipmap(noise(*shape, dtype=dtype)).levels
        llvmpipe.limits.texels = 2**27
        buffer = lod.Pyramid(levels).upload()
        assert kinds(llvmpipe, buffer) == {Texels}
        found = sample(buffer)
        llvmpipe.limits.texels = 0
        array = lod.Pyramid(levels).upload()
        assert kinds(llvmpipe, array) == {Texture}
        expected = sample(array)
        tolerance = {torch.uint8: 1, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}[dtype]
        assert float((found.float() - expected.float()).abs().max()) <= tolerance, shape


@pytest.mark.parametrize("name", SAMPLERS)
def test_bfloat16_is_kept_in_two_bytes_and_read_exactly(llvmpipe: lod.Context, name: str) -> None:
    """Sampled in fp32 and rounded once: what fp32 texels of the same values give, rounded."""
    for shape in ((2, 3, 45, 34), (1, 4, 16, 90), (3, 50, 1)):
        levels = lod.mipmap(1e30 * (noise(*shape, dtype=torch.bfloat16) - 0.5)).levels  # beyond float16's range
        found, wide = lod.Pyramid(levels).upload(), lod.Pyramid([level.float() for level in levels]).upload()
        with llvmpipe.active():
            (_, small), (_, large) = found.textures(llvmpipe)[0], wide.textures(llvmpipe)[0]
        assert 2 * small.key.nbytes == large.key.nbytes
        assert torch.equal(SAMPLERS[name](found), SAMPLERS[name](wide).bfloat16()), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_are_the_same_from_both(llvmpipe: lod.Context, dtype: torch.dtype) -> None:
    for shape in ((2, 3, 45, 33), (1, 1, 64, 64), (1, 1, 90)):
        levels = lod.hiz(noise(*shape, dtype=dtype)).levels
        expected = lod.region_max(lod.Pyramid(levels, "max"), BOXES, backend="torch")
        for most, kind in ((2**27, Texels), (0, Texture)):
            llvmpipe.limits.texels = most
            hz = lod.Pyramid(levels, "max").upload()
            assert kinds(llvmpipe, hz) == {kind}
            assert torch.equal(lod.region_max(hz, BOXES, backend="gl"), expected), shape


def test_who_needs_an_array_gets_one(llvmpipe: lod.Context) -> None:
    """A texture unit's own filter; and what a generator drew is sampled as it is."""
    pyramid = lod.mipmap(noise(3, 20, 30)).upload()
    assert kinds(llvmpipe, pyramid) == {Texels}
    assert kinds(llvmpipe, pyramid, filtered=True) == {Texture}
    assert kinds(llvmpipe, pyramid) == {Texels}
    assert kinds(llvmpipe, lod.hiz(noise(1, 20, 30))) == {Texels}
    assert kinds(llvmpipe, lod.mipmap(noise(3, 20, 30), generator="driver")) == {Texture}


def test_memory_comes_back(llvmpipe: lod.Context) -> None:
    gc.collect()
    with llvmpipe.active():
        llvmpipe.trim()
        before = llvmpipe.textures.pool.leased
    pyramid = lod.mipmap(noise(3, 64, 64)).upload()
    assert llvmpipe.textures.pool.leased == before + 1
    [(_, texels)] = pyramid.textures(llvmpipe)
    name = texels.item.glo
    del pyramid, texels
    with llvmpipe.active():
        assert (llvmpipe.textures.pool.leased, llvmpipe.textures.pool.idle) == (before, 1)
        assert llvmpipe.gl.IsTexture(name)
        llvmpipe.trim()
        assert llvmpipe.textures.pool.idle == 0
        assert not llvmpipe.gl.IsTexture(name)


@pytest.mark.parametrize("failing", ["BufferStorage", "TexBuffer"])
def test_a_driver_without_memory(llvmpipe: lod.Context, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named error, nothing left behind, and the context works on."""
    pyramid = lod.mipmap(noise(3, 64, 64))
    made: list[int] = []
    generate, delete = llvmpipe.gl.gen, llvmpipe.gl.delete

    def generated(kind: str) -> int:
        made.append(1)
        return generate(kind)

    def deleted(kind: str, *names: int) -> None:
        made.extend(-1 for name in names if name)
        delete(kind, *names)

    monkeypatch.setattr(llvmpipe.gl, "gen", generated)
    monkeypatch.setattr(llvmpipe.gl, "delete", deleted)
    llvmpipe.trim()
    with monkeypatch.context() as broken:
        command = getattr(llvmpipe.gl, failing)

        def refused(*arguments: Any) -> None:
            command(0xFFFF, *arguments[1:])  # an error of the driver's, whatever it is

        broken.setattr(llvmpipe.gl, failing, refused)
        broken.setattr(llvmpipe.gl, "check", lambda where: _out_of_memory() if llvmpipe.gl.GetError() else None)
        made.clear()
        with llvmpipe.active(), pytest.raises(OutOfMemoryError):
            pyramid.textures(llvmpipe)
        assert sum(made) == 0 and made
    assert torch.isfinite(lod.foveate(pyramid.upload(), (0.5, 0.5), backend="gl")).all()


def _out_of_memory() -> None:
    raise OutOfMemoryError("no memory")
