"""Planar tensors in GL buffers, and their way into textures and back.

A storage-buffer binding has a largest size and an offset alignment, so nothing here binds a whole tensor and hopes:
`chunks` cuts the output into ranges that fit together with what they are computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gpu_lod import recording
from gpu_lod.bridge import Buffer, Private, Shared
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context
from gpu_lod.copies import put
from gpu_lod.errors import LimitError
from gpu_lod.program import LOCAL_SIZE, MAX_GROUPS
from gpu_lod.texture import Sampled, Texels, Texture

ALIGNMENT = 256
"""Byte alignment of levels in a packed buffer: the largest offset alignment that OpenGL lets a driver ask for."""

READ_BARRIERS = G.SHADER_STORAGE_BARRIER_BIT | G.TEXTURE_FETCH_BARRIER_BIT
"""Between what shaders wrote to planes and shaders that bind or fetch them."""

_TEXELS = {
    (torch.float32, 1): G.R32F,
    (torch.float32, 2): G.RG32F,
    (torch.float32, 4): G.RGBA32F,
    (torch.float16, 1): G.R16F,
    (torch.bfloat16, 1): G.R16UI,  # the bits
    (torch.uint8, 1): G.R8UI,  # counts
}
_BITS = {4: G.R32UI, 2: G.R16UI, 1: G.R8UI}
_CHUNK_WORDS = ALIGNMENT // 4


def word_defines(dtype: torch.dtype) -> dict[str, int | bool]:
    """Defines of shaders/words.glsl: how elements of a dtype lie in words."""
    return {"PER_WORD": 4 // dtype.itemsize, "BFLOAT16": dtype == torch.bfloat16}


@dataclass(frozen=True)
class Planes:
    """Contiguous planes [count, height, width] in a GL buffer.

    `owner` is what must stay alive while they are used: a lease or a loan, or a tensor over one.
    """

    buffer: Buffer
    offset: int
    """Of the first element, in bytes."""
    count: int
    height: int
    width: int
    dtype: torch.dtype
    owner: object

    @property
    def per_word(self) -> int:
        return 4 // self.dtype.itemsize

    @property
    def area(self) -> int:
        return self.height * self.width

    @property
    def elements(self) -> int:
        return self.count * self.area

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def bind(self, ctx: Context, binding: int, first: int, last: int) -> int:
        """Bind elements first..last (inclusive); returns the index, in the binding, of element 0 of the planes.

        The index is negative where the binding starts after it.

        Raises:
            LimitError: the range is larger than a binding may be.
        """
        size = self.dtype.itemsize
        start = (self.offset + first * size) // ALIGNMENT * ALIGNMENT
        # Shaders read whole words; buffers are a multiple of 64 bytes at the least, so that rounding up stays inside.
        end = -(-(self.offset + (last + 1) * size) // 4) * 4
        if end - start > ctx.limits.storage_bytes:
            raise LimitError(
                f"{end - start} bytes are needed in one storage-buffer binding, and this device allows "
                f"{ctx.limits.storage_bytes}. Use smaller images, or backend='torch'."
            )
        self.buffer.bind(binding, start, end - start)
        return (self.offset - start) // size

    def fetchable(self, ctx: Context) -> bool:
        """True if shaders had better read it as a buffer texture, and can."""
        within = self.offset + self.nbytes <= self.dtype.itemsize * ctx.limits.texels
        return ctx.fetches and self.buffer.views is not None and within

    def fetch(self, unit: int, together: int = 1) -> int:
        """Bind the buffer to a texture unit, texels of so many elements: several of fp32 alone. Returns the index,
        in elements, of element 0 of the planes."""
        self._as_texels(unit, _TEXELS[self.dtype, together])
        return self.offset // self.dtype.itemsize

    def fetch_bits(self, unit: int) -> int:
        """The same, an element's bits a texel."""
        self._as_texels(unit, _BITS[self.dtype.itemsize])
        return self.offset // self.dtype.itemsize

    def fetch_words(self, unit: int, together: int = 1) -> int:
        """The same as words of 32 bits, one or four a texel. Returns the index of the first word."""
        self._as_texels(unit, {1: G.R32UI, 4: G.RGBA32UI}[together])
        return self.offset // 4

    def _as_texels(self, unit: int, internal_format: int) -> None:
        assert self.buffer.views is not None
        recording.refers(self.buffer.glo)
        self.buffer.views.bind(unit, internal_format)

    def span_fits(self, ctx: Context, first: int, last: int) -> bool:
        """True if elements first..last fit one binding, alignment included."""
        return (last - first + 1) * self.dtype.itemsize + 2 * ALIGNMENT <= ctx.limits.storage_bytes

    def layers(self, first: int, count: int) -> Planes:
        """Some of the planes."""
        if count == self.count:
            return self
        return replace(self, offset=self.offset + first * self.area * self.dtype.itemsize, count=count)


def memory_of(ctx: Context, tensor: torch.Tensor) -> tuple[Buffer, int, object] | None:
    """The buffer that is the tensor's own memory, to be read, the byte offset of its first element, and what must stay
    alive meanwhile; or None where it must be copied."""
    if tensor.is_neg():
        return None
    found = ctx.bridge.find(tensor)
    if found is not None:
        found[0].take()
        return *found, tensor
    # A recording is repeated on other values, which come by way of memory that GL owns.
    return ctx.bridge.borrow(tensor) if recording.current() is None else None


def planes_of(ctx: Context, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Planes:
    """The planes of a tensor [..., H, W]: its own memory if GL can read that, else a copy.

    A copy is made once, whatever the tensor's strides and dtype.

    Args:
        dtype: of the planes; None is the tensor's.
    """
    height, width = tensor.shape[-2:]
    count = tensor.numel() // (height * width)
    dtype = dtype or tensor.dtype
    found = memory_of(ctx, tensor) if dtype == tensor.dtype and tensor.is_contiguous() else None
    if found is not None:
        buffer, offset, owner = found
        return Planes(buffer, offset, count, height, width, dtype, owner)
    lease = ctx.bridge.lease(tensor.numel() * dtype.itemsize)
    put(ctx, lease.tensor(dtype, tuple(tensor.shape)), tensor)
    return Planes(lease.item, 0, count, height, width, dtype, lease)


def new_planes(ctx: Context, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Planes, torch.Tensor]:
    """Uninitialised planes in a buffer of their own, and the tensor [..., height, width] that the buffer is."""
    *outer, height, width = shape
    lease = ctx.bridge.lease(-(-math.prod(shape) * dtype.itemsize // 4) * 4)
    return Planes(lease.item, 0, math.prod(outer), height, width, dtype, lease), lease.tensor(dtype, shape)


def packed_planes(
    ctx: Context, batch: int, channels: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[Planes], list[torch.Tensor]]:
    """Uninitialised levels [batch, channels, h, w], one behind the other in one buffer: as planes and as tensors."""
    if not sizes:
        return [], []
    return packed_in(ctx.bridge.lease(packed_bytes(batch, channels, sizes, dtype)), batch, channels, sizes, dtype)


def private_planes(
    ctx: Context, batch: int, channels: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[Planes]:
    """The same that no tensor sees."""
    planes: list[Planes] = []
    if sizes:
        lease, offset = ctx.private.lease(packed_bytes(batch, channels, sizes, dtype)), 0
        for h, w in sizes:
            planes.append(Planes(lease.item, offset, batch * channels, h, w, dtype, lease))
            offset += packed_bytes(batch, channels, [(h, w)], dtype)
    return planes


def packed_bytes(batch: int, channels: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """What levels one behind the other take."""
    return sum(-(-batch * channels * h * w * dtype.itemsize // ALIGNMENT) * ALIGNMENT for h, w in sizes)


def packed_in(
    lease: Shared, batch: int, channels: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[Planes], list[torch.Tensor]]:
    """Such levels in a buffer that is there."""
    size, offset = dtype.itemsize, 0
    flat = lease.tensor(dtype, (lease.nbytes // size,))
    planes, tensors = [], []
    for h, w in sizes:
        planes.append(Planes(lease.item, offset, batch * channels, h, w, dtype, lease))
        tensors.append(flat.as_strided((batch, channels, h, w), (channels * h * w, h * w, w, 1), offset // size))
        offset += packed_bytes(batch, channels, [(h, w)], dtype)
    return planes, tensors


def scratch_planes(ctx: Context, shape: tuple[int, int, int], dtype: torch.dtype) -> Planes:
    """Uninitialised planes that no tensor sees."""
    lease = ctx.private.lease(-(-math.prod(shape) * dtype.itemsize // 4) * 4)
    return Planes(lease.item, 0, *shape, dtype, lease)


@dataclass(frozen=True)
class Chunk:
    """A range of words of the output that one dispatch makes."""

    first: int
    """Element of the output that it starts with."""
    elements: int
    words: int
    plane: int
    """Plane of the first element, and where in that plane it is."""
    start: int


def chunks(ctx: Context, target: Planes, fits: Callable[[int, int], bool] | None = None) -> Iterator[Chunk]:
    """Cut the output into ranges that fit a binding; `fits(first, last)` may ask for smaller ones.

    Raises:
        LimitError: even the smallest range does not fit.
    """
    per_word = target.per_word
    words = math.ceil(target.elements / per_word)
    largest = max((ctx.limits.storage_bytes - ALIGNMENT) // 4 // _CHUNK_WORDS, 1) * _CHUNK_WORDS
    at = 0
    while at < words:
        count = min(words - at, largest)
        first = at * per_word
        while True:
            elements = min(count * per_word, target.elements - first)
            if fits is None or fits(first, first + elements - 1):
                break
            if count <= _CHUNK_WORDS:
                raise LimitError(
                    f"an image of width {target.width} does not fit this device's storage-buffer bindings of "
                    f"{ctx.limits.storage_bytes} bytes, not even in parts. Use smaller images, or backend='torch'."
                )
            count = max(count // 2 // _CHUNK_WORDS, 1) * _CHUNK_WORDS
        plane_words = target.area / per_word
        if plane_words <= count < words - at and plane_words % _CHUNK_WORDS == 0:
            count -= count % int(plane_words)  # whole planes take the faster shader
            elements = count * per_word
        yield Chunk(first, elements, count, first // target.area, first % target.area)
        at += count


def parts(
    ctx: Context, planes: int, rows: tuple[int, int], fits: Callable[[int, int], bool], width: int, step: int = 1
) -> Iterator[tuple[int, int, int, int]]:
    """Cut a job over planes into dispatches whose buffers fit: as many planes at once as may be, else rows of one.

    Args:
        rows: the first row wanted, and the one after the last.
        fits: whether what so many planes, or so many rows of one, are made of and written to fits the bindings.
        width: of the planes, for the error's message.
        step: rows are cut at multiples of it, counted from the first.

    Yields:
        (first plane, planes, first row, row after the last)

    Raises:
        LimitError: even the smallest part does not fit.
    """
    first, end = rows
    at_once, tall = min(planes, MAX_GROUPS), end - first
    while at_once > 1 and not (tall <= MAX_GROUPS and fits(at_once, tall)):
        at_once = -(-at_once // 2)
    while at_once == 1 and not (tall <= MAX_GROUPS and fits(1, tall)):
        if tall <= step:
            raise LimitError(
                f"an image of width {width} does not fit this device's storage-buffer bindings of "
                f"{ctx.limits.storage_bytes} bytes, not even in parts. Use smaller images, or backend='torch'."
            )
        tall = -(-tall // (2 * step)) * step
    for plane in range(0, planes, at_once):
        for row in range(first, end, tall):
            yield plane, min(at_once, planes - plane), row, min(row + tall, end)


def rows_of(target: Planes, first: int, planes: int, row: int, end: int) -> tuple[int, int]:
    """The first and the last element of some planes, or of some rows of one."""
    begin = first * target.area
    if planes > 1:
        return begin, begin + planes * target.area - 1
    row, end = min(row, target.height - 1), min(end, target.height)
    return begin + row * target.width, begin + max(end, row + 1) * target.width - 1


def wrapped(index: int) -> int:
    """Modulo 2^32 as a signed integer: shaders add such numbers up to an index inside a binding."""
    return (index + 2**31) % 2**32 - 2**31


def bind_table(ctx: Context, binding: int, table: Private) -> None:
    """Bind a whole small buffer.

    Raises:
        LimitError: it is larger than a binding may be.
    """
    if table.nbytes > ctx.limits.storage_bytes:
        raise LimitError(
            f"a table of {table.nbytes} bytes does not fit this device's storage-buffer bindings of "
            f"{ctx.limits.storage_bytes}. Pass fewer boxes, sites, rings, wedges or images at once, or use "
            "backend='torch'."
        )
    table.item.bind(binding, 0, table.nbytes)


def make_words(
    ctx: Context,
    shader: str,
    target: Planes,
    chunk: Chunk,
    *,
    shared_channels: int = 1,
    rows_at_once: int = 1,
    at_once: int | None = None,
    uniforms: Mapping[str, object],
    defines: Mapping[str, object],
) -> None:
    """Run a shader built on place.glsl over a chunk of its output, which it writes through binding 0.

    Args:
        shared_channels, rows_at_once: planes and rows that one invocation writes where rows are whole words.
        at_once: elements of a row that one invocation writes where rows are whole vectors of so many; the shader has
            at_once.glsl. None is a word's.
    """
    index = target.bind(ctx, 0, chunk.first, chunk.first + chunk.elements - 1)
    assert index == -chunk.first, "chunks start at aligned words of aligned planes"
    planes = chunk.elements // target.area // shared_channels
    whole = (
        target.width % target.per_word == 0
        and chunk.start == 0
        and chunk.plane % shared_channels == 0
        and planes * shared_channels * target.area == chunk.elements
        and max(planes, target.height) <= MAX_GROUPS
    )
    how: dict[str, object] = {"WHOLE_ROWS": whole}
    vector, local = target.per_word, LOCAL_SIZE
    if at_once is not None:
        if whole and target.width % at_once == 0:
            vector = at_once
            # No more than a row has: a software renderer runs the rest all the same, eight at a time.
            local = min(LOCAL_SIZE, -(-target.width // vector // 8) * 8)
        how |= {"AT_ONCE": vector, "LOCAL_SIZE": local}
    program = ctx.programs.compute(shader, **how, **word_defines(target.dtype), **defines)
    program.set(u_target_size=(target.width, target.height), **uniforms)
    if whole:
        groups = -(-target.width // vector // local), -(-target.height // rows_at_once), planes
        program.dispatch_groups(*groups)
    else:
        program.set(u_words=chunk.words, u_elements=chunk.elements, u_start=chunk.start).dispatch(chunk.words)


def narrow(ctx: Context, source: Planes, first: int, target: Planes, at: int, count: int) -> None:
    """Round fp32 elements, `count` of them from `first` on, to those of fp16 or bfloat16 planes from `at` on."""
    program = ctx.programs.compute("narrow.comp", BFLOAT16=target.dtype == torch.bfloat16)
    most = (ctx.limits.storage_bytes - 2 * ALIGNMENT) // 4
    for begin in range(0, count, most):
        last = min(begin + most, count) - 1
        index = target.bind(ctx, 0, at + begin, at + last) + at + begin
        program.set(
            u_source_first=source.bind(ctx, 1, first + begin, first + last) + first + begin,
            u_target_first=index,
            u_elements=last + 1 - begin,
        ).dispatch((index + last - begin) // 2 - index // 2 + 1)
        ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)  # the next ones may share a word with these


def check_texture_size(ctx: Context, height: int, width: int) -> None:
    """Raises LimitError for an image larger than the device's textures."""
    if max(height, width) > ctx.limits.texture_size:
        raise LimitError(
            f"the image is {width} x {height}, and this device's textures end at {ctx.limits.texture_size}. Use "
            "generator='compute' for pyramids, a smaller image, or backend='torch'."
        )


def layer_groups(ctx: Context, layers: int, most: int | None = None) -> list[tuple[int, int]]:
    """(first, count) of groups that fit one texture; multiples of 256 layers, so that they start at whole words.

    Args:
        most: layers of a texture; None is an array texture's limit.
    """
    step = max((most or ctx.limits.layers) // ALIGNMENT, 1) * ALIGNMENT
    return [(first, min(step, layers - first)) for first in range(0, layers, step)]


def planes_to_texture(
    ctx: Context, source: Planes, texture: Sampled, level: int, *, layer: int = 0, row: int = 0
) -> None:
    """Write planes into a level of a texture, from a layer and a row on: plane k of a layer becomes channel k."""
    channels = texture.key.channels
    defines = {"CHANNELS": channels, "BUFFERED": isinstance(texture, Texels)}
    program = ctx.programs.compute("planes_to_texels.comp", **word_defines(source.dtype), **defines)
    if isinstance(texture, Texels):
        texture.bind_image(ctx.gl)
        program.set(u_start=texture.item.starts[level], u_height=texture.key.sizes[level][1])
    else:
        texture.bind_image(ctx.gl, level)
    layers = source.count // channels
    area, width, height = source.area, source.width, source.height
    at_once = layers
    while at_once > 1 and not source.span_fits(ctx, 0, at_once * channels * area - 1):
        at_once = -(-at_once // 2)
    for first_layer in range(0, layers, at_once):
        count = min(at_once, layers - first_layer)
        base = first_layer * channels * area
        rows = height
        if count == 1:  # each channel is bound by itself, and by parts if it must be
            while rows > 1 and not source.span_fits(ctx, 0, rows * width - 1):
                rows = -(-rows // 2)
        for first_row in range(0, height, rows):
            size = min(rows, height - first_row)
            first = []
            for channel in range(4):
                begin = base + min(channel, channels - 1) * area + first_row * width
                last = (base + count * channels * area if count > 1 else begin + size * width) - 1
                first.append(source.bind(ctx, channel, begin, last) + begin)
            program.set(
                u_size=(width, size),
                u_first_row=row + first_row,
                u_first_layer=layer + first_layer,
                u_layer_stride=channels * area,
                u_first=tuple(first),
            ).dispatch_groups(-(-width // LOCAL_SIZE), size, count)
    ctx.gl.MemoryBarrier(
        G.TEXTURE_FETCH_BARRIER_BIT
        | G.TEXTURE_UPDATE_BARRIER_BIT
        | G.SHADER_IMAGE_ACCESS_BARRIER_BIT
        | G.FRAMEBUFFER_BARRIER_BIT
    )


def texture_to_planes(
    ctx: Context, texture: Texture, level: int, target: Planes, rows: tuple[int, int] | None = None
) -> None:
    """Write a level of a texture into planes: channel k of a layer becomes plane k.

    Args:
        rows: of the planes, the first that the level's are, and the one after the last; None is all.
    """
    texture.bind(ctx.gl)
    of_rows = {} if rows is None else {"u_rows": rows}
    for chunk in chunks(ctx, target):
        make_words(
            ctx,
            "texels_to_planes.comp",
            target,
            chunk,
            uniforms={"u_level": level, "u_first_plane": chunk.plane, **of_rows},
            defines={"CHANNELS": texture.key.channels, "BAND": rows is not None},
        )
    ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
