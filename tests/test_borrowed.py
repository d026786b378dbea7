"""Ordinary tensors whose own memory shaders read: any address, any strides, to the last byte of a page, and let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from images import noise
from scripts import HERE, succeed

import gpu_lod as lod
from gpu_lod.bridge import gl as G
from gpu_lod.transfer import memory_of, planes_of

VERBS: dict[str, Callable[[torch.Tensor], Any]] = {
    "compute": lambda x: lod.mipmap(x, generator="compute"),
    "registers": lambda x: lod.mipmap(x, generator="registers"),
    "single-pass": lambda x: lod.mipmap(x, generator="single-pass"),
    "single-pass, converted": lambda x: lod.mipmap(x, generator="single-pass", mean=[0.4] * 3, std=[0.2] * 3),
    "fragment": lambda x: lod.mipmap(x, generator="fragment"),
    "hiz": lambda x: lod.hiz(x, backend="gl"),
    "gaussian": lambda x: lod.gaussian(x, backend="gl"),
    "laplacian": lambda x: lod.laplacian(x, backend="gl"),
    "oriented_energy": lambda x: lod.oriented_energy(x[..., :1, :, :], 2, backend="gl"),
    "feature_maps": lambda x: lod.feature_maps(x, backend="gl"),
    "inverse_log_polar": lambda x: lod.inverse_log_polar(x, (0.4, 0.6), (21, 34), backend="gl"),
    "log_polar": lambda x: lod.log_polar(x, (0.4, 0.6), 16, 32, backend="gl"),
}
DTYPES = {torch.uint8: 1, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}
"""And what the order of sums may change, which is another one where rows are no whole vectors."""


@pytest.fixture(autouse=True)
def able(llvmpipe: lod.Context) -> None:
    assert llvmpipe.host.borrows


@contextmanager
def copying(ctx: lod.Context) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctx.host, "borrow", lambda tensor: None)
        yield


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def at(image: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, so many elements behind an address that allocators give."""
    room = torch.empty(image.numel() + offset, dtype=image.dtype)
    return room[offset:].view(image.shape).copy_(image)


def test_it_is_the_memory_itself(ctx: lod.Context) -> None:
    image = noise(3, 32, 32)
    with ctx.active():
        found = memory_of(ctx, image)
        assert found is not None
        buffer, offset, _ = found
        ctx.gl.BindBuffer(G.COPY_READ_BUFFER, buffer.glo)
        image[0, 0, 1] = 42.0
        seen = torch.empty(2)
        ctx.gl.GetBufferSubData(G.COPY_READ_BUFFER, offset, 8, seen.data_ptr())
        ctx.gl.BindBuffer(G.COPY_READ_BUFFER, 0)
    assert seen[1] == 42.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_any_address(ctx: lod.Context, verb: str, dtype: torch.dtype) -> None:
    for shape in ((3, 16, 24), (2, 3, 13, 19)):
        image = noise(*shape, dtype=dtype)
        with copying(ctx):
            expected = tensors(VERBS[verb](image))
        for offset in (0, 1, 2, 3, 5, 8, 31, 64):
            for got, want in zip(tensors(VERBS[verb](at(image, offset))), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_pass_reads_any_strides(ctx: lod.Context, dtype: torch.dtype) -> None:
    image = noise(2, 3, 37, 52, dtype=dtype)
    sources = {
        "channels last": image.to(memory_format=torch.channels_last),
        "cropped": noise(2, 3, 50, 60, dtype=dtype)[..., 3:40, 5:57],
        "every other": noise(4, 3, 74, 104, dtype=dtype)[::2, :, ::2, ::2],
        "transposed": noise(2, 3, 52, 37, dtype=dtype).transpose(2, 3),
        "expanded": noise(1, 3, 1, 52, dtype=dtype).expand(2, 3, 37, 52),
    }
    for name, source in sources.items():
        with copying(ctx):
            expected = lod.mipmap(source.contiguous(), generator="single-pass")
        for got, want in zip(lod.mipmap(source, generator="single-pass"), expected, strict=True):
            assert torch.equal(got, want), name


def test_what_cannot_be_borrowed_is_copied(ctx: lod.Context) -> None:
    raw = torch.arange(4 * 16 + 4, dtype=torch.uint8)
    odd = torch.frombuffer(raw.numpy(), dtype=torch.float32, offset=1, count=16).view(1, 4, 4)
    negated = torch.view_as_complex(noise(1, 4, 4, 2)).conj().imag
    assert negated.is_neg()
    for image in (odd, negated):
        with ctx.active():
            assert ctx.bridge.borrow(image) is None
        assert torch.equal(lod.hiz(image, backend="gl")[0], image)


def test_a_driver_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = lod.Context()
    borrower = ctx.host._borrower
    image = noise(3, 32, 32)
    real, asked = ctx.gl.BufferData, []

    def refuse(target: int, *rest: Any) -> None:
        asked.append(target)
        real(0xBAD, *rest)

    monkeypatch.setattr(borrower, "able", True)
    monkeypatch.setattr(ctx.gl, "BufferData", refuse)
    for _ in range(2):
        assert torch.equal(lod.mipmap(image, generator="compute")[0], image)
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 16, 63])
def test_it_is_whole_texels(ctx: lod.Context, dtype: torch.dtype, offset: int) -> None:
    """Of four floats too, to the last element."""
    image = at(noise(1, 5, 5, dtype=dtype), offset)
    lent: list[tuple[int, int]] = []
    real = ctx.gl.BufferData
    with pytest.MonkeyPatch.context() as patch, ctx.active():
        patch.setattr(ctx.gl, "BufferData", lambda *a: [lent.append((a[2], a[1])), real(*a)])
        found = ctx.bridge.borrow(image)
    assert found is not None
    ((address, nbytes),) = lent
    assert address % 64 == nbytes % 64 == 0
    assert address + found[1] == image.data_ptr()
    assert address + nbytes >= image.data_ptr() + image.nbytes


def test_nothing_is_held_and_nothing_leaks(ctx: lod.Context) -> None:
    borrow, delete = ctx.host.borrow, ctx.gl.delete
    lent: list[int] = []  # OpenGL may give a name again
    deleted: set[int] = set()

    def noting(tensor: torch.Tensor) -> Any:
        found = borrow(tensor)
        assert found is not None
        lent.append(found[0].glo)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctx.host, "borrow", noting)
        patch.setattr(ctx.gl, "delete", lambda kind, *names: [deleted.update(names), delete(kind, *names)])
        for verb in ("gaussian", "inverse_log_polar", "feature_maps"):
            image = noise(3, 32, 32)
            VERBS[verb](image)  # its result is not kept, and gaussian's would be the image
            gone = weakref.ref(image)
            del image
            gc.collect()
            assert gone() is None, verb
        count = len(lent)
        lod.hiz(ctx.empty(1, 1, 1).fill_(1), backend="gl")  # the next call deletes the names
    assert count == len(lent) == 3
    assert set(lent) <= deleted
    assert not ctx.host._borrower._lent


def test_planes_keep_it(ctx: lod.Context) -> None:
    image = noise(3, 32, 32)
    with ctx.active():
        planes = planes_of(ctx, image)
    alive = weakref.ref(image)
    del image
    gc.collect()
    assert alive() is not None
    del planes
    gc.collect()
    assert alive() is None


def test_it_is_let_go_after_an_error(ctx: lod.Context) -> None:
    image = noise(3, 32, 32)
    with pytest.raises(ZeroDivisionError), ctx.active():
        planes_of(ctx, image)
        raise ZeroDivisionError
    assert not ctx.host._borrower._lent
    gone = weakref.ref(image)
    del image
    gc.collect()
    assert gone() is None


def test_levels_may_get_other_memory() -> None:
    """What a pyramid keeps between calls holds no address of memory that others own."""
    top = torch.rand(1, 512, 512)
    pyramid = lod.hiz(top, backend="torch")
    expected = lod.cull(pyramid, 0.99, backend="gl").mask
    pyramid.levels[0].share_memory_()
    assert torch.equal(lod.cull(pyramid, 0.99, backend="gl").mask, expected)
    pyramid.levels[0].data = torch.zeros(1, 512, 512)
    gc.collect()
    assert not bool(lod.cull(pyramid, 0.99, backend="gl").mask.any())


@pytest.mark.parametrize("how", [{}, {"mean": [0.4] * 3, "std": [0.2] * 3}], ids=["plain", "converted"])
def test_views_that_reach_far_are_copied(restored_limits: lod.Context, how: dict[str, Any]) -> None:
    """A row of tiles of such rests on more memory than a binding may have."""
    restored_limits.limits.storage_bytes = 2**18
    image = torch.rand(1, 3, 800, 800)[..., ::10, ::10]
    for got, want in zip(
        lod.mipmap(image, generator="single-pass", **how), lod.mipmap(image, backend="torch", **how), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("generator", ["compute", "single-pass"])
def test_negated_views_of_gl_memory_are_negated(ctx: lod.Context, generator: Any) -> None:
    image = ctx.empty(1, 4, 4, 2)
    image.copy_(torch.rand(1, 4, 4, 2))
    for view in (torch.view_as_complex(image).conj().imag, torch._neg_view(ctx.empty(1, 4, 4).fill_(0.5))):
        assert torch.equal(lod.hiz(view, generator=generator)[1], lod.hiz(view, backend="torch")[1])


def test_not_a_byte_of_the_next_page(ctx: lod.Context) -> None:
    """An image that ends with a page whose successor may not be read: reading it ends the process."""
    result = succeed(
        """
        import ctypes, mmap, torch
        import gpu_lod as lod
        from test_borrowed import VERBS, tensors

        libc = ctypes.CDLL(None, use_errno=True)
        for dtype in (torch.uint8, torch.float16, torch.float32):
            for shape in ((3, 13, 19), (3, 16, 24), (3, 1, 7), (3, 5, 1)):
                count = 1
                for n in shape:
                    count *= n
                nbytes = count * dtype.itemsize
                pages = -(-nbytes // mmap.PAGESIZE)
                room = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
                begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
                assert not libc.mprotect(ctypes.c_void_p(begin + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0)
                image = torch.frombuffer(room, dtype=dtype, offset=pages * mmap.PAGESIZE - nbytes, count=count)
                image = image.view(shape).copy_(torch.arange(count).remainder(200).view(shape))
                for name, verb in VERBS.items():
                    tensors(verb(image))
        print("done")
        """,
        PYTHONPATH=HERE,
    )
    assert "done" in result
