"""Sizes of buffers that shaders read as textures: llvmpipe compiles a shader once for all of them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import succeed

import gpu_lod as lod
from gpu_lod.bridge import borrowed
from gpu_lod.bridge.views import alike

SHAPES = [(1, 37, 27), (1, 31, 33), (1, 127, 129), (3, 127, 129)]
"""In fp32, and in whole 64 bytes: neither a power of two nor with bits 8 to 15 of 0; one of these; both; the other."""


def kind(nbytes: int) -> tuple[bool, bool]:
    return nbytes & (nbytes - 1) == 0, nbytes & 0xFF00 == 0


def test_shapes_are_of_all_kinds() -> None:
    assert {kind(-(-4 * planes * height * width // 64) * 64) for planes, height, width in SHAPES} == {
        (False, False), (True, False), (True, True), (False, True),
    }  # fmt: skip


@given(st.one_of(st.integers(1, 2**20), st.integers(2**30, 2**33), st.integers(0, 32).map(lambda bit: 1 << bit)))
def test_sizes_are_of_one_kind(nbytes: int) -> None:
    size = alike(nbytes)
    assert nbytes <= size <= nbytes + 768
    assert kind(size) == (False, False) and alike(size) == size


@given(begin=st.integers(0, 3 * mmap.PAGESIZE), count=st.one_of(st.integers(1, 2**18), st.sampled_from([2**12, 2**16])))
def test_around_a_tensor_in_its_pages(begin: int, count: int) -> None:
    first, last = borrowed._around(begin, begin + count)
    assert first <= begin and begin + count <= last
    assert first // mmap.PAGESIZE == begin // mmap.PAGESIZE
    assert (last - 1) // mmap.PAGESIZE == (begin + count - 1) // mmap.PAGESIZE
    assert first % 64 == 0 == last % 64
    room = -(begin % -mmap.PAGESIZE) + -(begin + count) % mmap.PAGESIZE
    assert kind(last - first) == (False, False) or room < 768 + 2 * 64


@pytest.mark.parametrize("nbytes", [1, 4096, 2**16, 3 * 2**16, 2**20])
def test_buffers_are_of_one_kind(llvmpipe: lod.Context, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], llvmpipe.gl.BufferStorage
    monkeypatch.setattr(llvmpipe.gl, "BufferStorage", lambda *given: made.append(given[1]) or make(*given))
    with llvmpipe.active():
        for pool in (llvmpipe.private, llvmpipe.host):
            pool.trim()
            pool.lease(nbytes)
    assert len(made) == 2 and {kind(size) for size in made} == {(False, False)}


@pytest.mark.usefixtures("llvmpipe")
def test_a_shader_is_compiled_once(tmp_path: Path) -> None:
    """Whatever the size of what it reads: Mesa keeps what it compiled, a file each."""

    def kept(shapes: list[Any]) -> int:
        folder = tmp_path / str(len(shapes))
        succeed(
            f"""
            import time, torch
            import gpu_lod as lod

            for shape in {shapes}:
                lod.oriented_energy(torch.rand(shape), 1, 1, backend="gl")
            time.sleep(1)  # a thread writes them, which is stopped at exit
            """,
            MESA_SHADER_CACHE_DIR=str(folder),
        )
        return sum(path.is_file() for path in folder.rglob("*") if path.name != "index")

    one = kept(SHAPES[:1])
    if not one:
        pytest.skip("this Mesa keeps nothing")
    assert kept(SHAPES) == one
