"""The single-pass generator: a whole mip chain, or a batch of them, in one dispatch (shaders/single_pass.comp)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_lod import recording, subgroups
from gpu_lod.bridge import Buffer, Private
from gpu_lod.bridge import gl as G
from gpu_lod.context import Context
from gpu_lod.errors import LimitError, ShaderError, UnsupportedError
from gpu_lod.program import Program
from gpu_lod.pyramid import Reduce
from gpu_lod.texture import Texture
from gpu_lod.transfer import ALIGNMENT, Planes, bind_table, parts, rows_of, word_defines, wrapped

_STEPS = 6
"""Levels that a workgroup makes of its tile of 64 x 64 texels; fewer where shared memory is small."""
LARGEST_TILE = 1 << _STEPS
"""Texels along its side."""
_FIELDS = 6
"""Of a level in the shader's table."""


@dataclass(frozen=True)
class Source:
    """An image [B, C, H, W] of any strides, whose memory is a GL buffer.

    `owner` is what must stay alive while it is read.
    """

    buffer: Buffer
    offset: int
    """Of the first element, in bytes."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements, none negative."""
    dtype: torch.dtype
    owner: object

    @staticmethod
    def of_planes(planes: Planes, channels: int) -> Source:
        shape = (planes.count // channels, channels, planes.height, planes.width)
        stride = (channels * planes.area, planes.area, planes.width, 1)
        return Source(planes.buffer, planes.offset, shape, stride, planes.dtype, planes.owner)

    def _span(self, first: int, planes: int, row: int, end: int) -> tuple[int, int]:
        """The first and the last element of some rows of some planes."""
        channels = self.shape[1]
        images, columns = self.stride[0], self.stride[1]
        each = [plane // channels * images + plane % channels * columns for plane in range(first, first + planes)]
        begin = min(each) + row * self.stride[2]
        last = max(each) + (end - 1) * self.stride[2] + (self.shape[3] - 1) * self.stride[3]
        return begin, last

    def nbytes(self, planes: int, row: int, end: int) -> int:
        """Of the largest binding for some rows of so many planes at once."""
        total = self.shape[0] * self.shape[1]
        spans = (self._span(first, min(planes, total - first), row, end) for first in range(0, total, planes))
        return max(last - begin + 1 for begin, last in spans) * self.dtype.itemsize + 2 * ALIGNMENT

    def readable(self, ctx: Context) -> bool:
        """True if what a row of the largest tiles rests on fits a binding."""
        return self.nbytes(1, 0, min(2 * LARGEST_TILE, self.shape[2])) <= ctx.limits.storage_bytes

    def bind(self, ctx: Context, first: int, planes: int, row: int, end: int) -> int:
        """Bind them to binding 0; returns the index there of the image's first element, negative if that comes
        before."""
        begin, last = self._span(first, planes, row, end)
        size = self.dtype.itemsize
        start = (self.offset + begin * size) // ALIGNMENT * ALIGNMENT
        stop = -(-(self.offset + (last + 1) * size) // 4) * 4
        if stop - start > ctx.limits.storage_bytes:
            raise LimitError(
                f"an image with strides {self.stride} does not fit this device's storage-buffer bindings of "
                f"{ctx.limits.storage_bytes} bytes. Pass image.contiguous()."
            )
        self.buffer.bind(0, start, stop - start)
        return (self.offset - start) // size

    @property
    def per_word(self) -> int:
        return 4 // self.dtype.itemsize

    @property
    def paired(self) -> bool:
        """True if elements 2i and 2i + 1 of every row lie in one word."""
        others = (self.offset // self.dtype.itemsize, *self.stride[:3])
        return self.stride[3] == 1 and all(count % 2 == 0 for count in others)


Conversion = tuple[Sequence[float], Sequence[float]]
"""Of the source on its way into level 0: value * scale + offset, both a number a channel."""


class _Layout:
    """Where the shader finds the levels of a chain, and how many texels of each a tile makes."""

    def __init__(self, chain: Sequence[Planes], steps: int, *, with_top: bool, subgroups: bool) -> None:
        self._with_top = with_top
        self.sizes = [(planes.height, planes.width) for planes in chain]
        self.steps = steps
        self.last = len(chain) - 1
        self.margins = _margins(self.sizes, steps)
        self._rest = chain[3:]
        self._tails = list(range(steps, self.last, steps))
        self.subgroups = subgroups and any(self._quads(base) for base in (0, *self._tails))
        """Whether some tiles can use them, as the shader's fit_lanes says."""

    def _quads(self, base: int) -> bool:
        made = min(self.steps, self.last - base)
        return made >= 5 and self.margins[base + 1] == (0, 0) and min(self.sizes[base + 3]) > 1

    @property
    def tile(self) -> int:
        """Texels of the source along a side of a tile."""
        return 1 << min(self.steps, self.last)

    @property
    def tiles(self) -> tuple[int, int]:
        """(rows, columns) of tiles that cover level 1, and with it all levels above; or level 0, where an odd side may
        take one more."""
        height, width = self.sizes[0 if self._with_top else 1]
        side = self.tile if self._with_top else self.tile // 2
        return -(-height // side), -(-width // side)

    @property
    def first_side(self) -> int:
        """Texels that a tile makes along a side of its first level, at the most: one of two, for few programs."""
        half = 1 << (self.steps - 1)
        firsts = range(1, self.last + 1, self.steps)
        wide = any(
            min(half + margin, size) > half
            for level in firsts
            for margin, size in zip(self.margins[level], self.sizes[level], strict=True)
        )
        return 2 * half - 1 if wide else half

    @property
    def shared_bytes(self) -> int:
        sides = [self.first_side]
        for _ in range(3 if self.subgroups else 1):
            sides.append((sides[-1] + 1) // 2)
        return 4 * (sum(side**2 for side in sides) + 1)

    def tail_values(self, planes: int) -> int:
        """Texels that the last workgroup of each plane goes on from."""
        return planes * sum(math.prod(self.sizes[level]) for level in self._tails)

    def table(self, ctx: Context, planes: int) -> Private:
        """What single_pass.comp knows of each level, for dispatches of so many planes."""

        def make() -> Private:
            rows, tail = [], 0
            for level, ((height, width), margin) in enumerate(zip(self.sizes, self.margins, strict=True)):
                rest = _elements_between(self._rest[0], self._rest[level - 3]) if level >= 3 else 0
                rows.append([width, height, margin[1], margin[0], rest, tail])
                if level in self._tails:
                    tail += planes * height * width
            return ctx.private.lease(4 * _FIELDS * len(rows)).write(torch.tensor(rows, dtype=torch.int32, device="cpu"))

        offsets = tuple(level.offset for level in self._rest)
        itemsize = self._rest[0].dtype.itemsize if self._rest else 0
        return ctx.constants.get(("single pass", tuple(self.sizes), self.steps, offsets, itemsize, planes), make)

    def bind_rest(self, ctx: Context, spare: Planes) -> None:
        """Levels 3 and up as a whole, or anything where there are none.

        Raises:
            LimitError: they are larger than a binding may be.
        """
        if not self._rest:
            spare.bind(ctx, 3, 0, 0)
            return
        first, last = self._rest[0], self._rest[-1]
        nbytes = -(-(last.offset + last.nbytes) // 4) * 4 - first.offset
        if nbytes > ctx.limits.storage_bytes:
            raise LimitError(
                f"levels 3 and up of this batch take {nbytes} bytes, which the single-pass generator needs in one "
                f"storage-buffer binding, and this device allows {ctx.limits.storage_bytes}. Use generator='compute', "
                "or fewer images at once."
            )
        first.buffer.bind(3, first.offset, nbytes)


def _margins(sizes: Sequence[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    """Texels (along y, x) of each level that a tile makes beyond its own: what an odd side asks of the level above."""
    margins = [(0, 0)] * len(sizes)
    for level in range(len(sizes) - 2, 0, -1):
        if level % steps:  # else it is the last that a tile makes
            below = margins[level + 1]
            y, x = (2 * m + (n % 2 if n > 1 else 0) for m, n in zip(below, sizes[level], strict=True))
            margins[level] = (y, x)
    return margins


def _layout(ctx: Context, chain: Sequence[Planes], *, with_top: bool, lanes: bool) -> _Layout:
    """With the largest tiles that the device has shared memory for.

    Raises:
        UnsupportedError: it has less than any device with OpenGL 4.3 may have.
    """
    for steps in range(_STEPS, 2, -1):
        layout = _Layout(chain, steps, with_top=with_top, subgroups=lanes)
        if layout.shared_bytes <= ctx.limits.shared_bytes:
            return layout
    raise UnsupportedError(
        f"the single-pass generator needs {layout.shared_bytes} bytes of shared memory in a workgroup, and this device "
        f"has {ctx.limits.shared_bytes}. Use generator='compute'."
    )


def reduce_chain(
    ctx: Context,
    source: Source | Texture,
    chain: Sequence[Planes],
    channels: int,
    reduce: Reduce,
    conversion: Conversion | None = None,
) -> None:
    """Make the levels of a chain below level 0, and with a conversion level 0 too.

    Args:
        source: level 0, or what becomes level 0 by the conversion; a texture has a filtered layer for each plane, and
            gives means.
        chain: level 0, which is not touched without a conversion, and in one buffer the levels below it, at least one.

    Raises:
        LimitError: a part of it does not fit the device's storage-buffer bindings.
        UnsupportedError: the device has too little shared memory.
    """
    with_top = conversion is not None
    layout = _layout(ctx, chain, with_top=with_top, lanes=subgroups.usable(ctx))
    try:
        program = _program(ctx, source, chain, channels, reduce, conversion, layout)
    except ShaderError:
        if not layout.subgroups:
            raise
        layout = _layout(ctx, chain, with_top=with_top, lanes=False)
        program = _program(ctx, source, chain, channels, reduce, conversion, layout)
        ctx.limits.lanes = False  # they were what the driver refused
    # As (binding, planes, rows of them to a row of tiles).
    targets = [(level, chain[min(level, layout.last)], layout.tile >> min(level, layout.last)) for level in (1, 2)]
    if conversion is not None:
        targets.append((7, chain[0], layout.tile))

    def rows(row: int, end: int) -> tuple[int, int]:
        """Of the source, that rows of tiles rest on."""
        return row * layout.tile, min((end + 1) * layout.tile, layout.sizes[0][0])

    def fits(planes: int, count: int) -> bool:
        """Whether so many planes, or so many rows of tiles of one."""
        nbytes = [4 * planes, 4 * layout.tail_values(planes)]
        for _, target, rows_of_tile in targets:
            span = rows_of(target, 0, planes, 0, count * rows_of_tile)
            nbytes.append((span[1] - span[0] + 1) * target.dtype.itemsize + 2 * ALIGNMENT)
        if isinstance(source, Source):
            nbytes.append(source.nbytes(planes, *rows(0, count)))
        return max(nbytes) <= ctx.limits.storage_bytes

    layout.bind_rest(ctx, chain[1])
    tail = counters = None
    try:
        for first, planes, row, end in parts(ctx, chain[0].count, (0, layout.tiles[0]), fits, layout.sizes[0][1]):
            if tail is None or counters is None:  # the first part is the largest
                tail = ctx.private.lease(max(4 * layout.tail_values(planes), 4))
                counters = _counters(ctx, planes)
                bind_table(ctx, 4, tail)
                bind_table(ctx, 5, counters)
                bind_table(ctx, 6, layout.table(ctx, planes))
            index = {}
            for binding, target, rows_of_tile in targets:
                span = rows_of(target, first, planes, row * rows_of_tile, end * rows_of_tile)
                index[binding] = wrapped(target.bind(ctx, binding, *span))
            if isinstance(source, Source):
                program.set(u_source_first=wrapped(source.bind(ctx, first, planes, *rows(row, end))))
            program.set(u_firsts=(index[1], index[2]), u_top_first=index.get(7, 0))
            program.set(u_first_plane=first, u_first_layer=first, u_first_row=row).dispatch_groups(
                layout.tiles[1], end - row, planes
            )
            ctx.gl.MemoryBarrier(G.SHADER_STORAGE_BARRIER_BIT)
    except BaseException:
        if counters is not None:
            counters.clear()  # they may stand somewhere in the middle
        raise


def _program(
    ctx: Context,
    source: Source | Texture,
    chain: Sequence[Planes],
    channels: int,
    reduce: Reduce,
    conversion: Conversion | None,
    layout: _Layout,
) -> Program:
    even = all(side % 2 == 0 for side in layout.sizes[0])
    if isinstance(source, Texture):
        loads: dict[str, object] = {"FROM_TEXTURE": True}
    else:
        loads = {
            "SOURCE_PER_WORD": source.per_word,
            "SOURCE_BFLOAT16": source.dtype == torch.bfloat16,
            "PAIRED": even and source.paired,
        }
    program = ctx.programs.compute(
        "single_pass.comp",
        **word_defines(chain[1].dtype),
        **{f"REDUCE_{reduce.upper()}": True},
        **loads,
        EVEN=even,
        CONVERT=conversion is not None,
        KEEP_TOP=conversion is not None,
        STEPS=layout.steps,
        FIRST_SIDE=layout.first_side,
        SUBGROUPS=layout.subgroups,
        THREADS_X=ctx.tuning.single_pass[0],
        THREADS_Y=ctx.tuning.single_pass[1],
    )
    rows, columns = layout.tiles
    height, width = layout.sizes[0]
    program.set(u_source_size=(width, height), u_channels=channels, u_last=layout.last, u_tiles=rows * columns)
    if conversion is not None:
        unused = (0.0,) * (4 - channels)
        program.set(u_scale=(*conversion[0], *unused), u_offset=(*conversion[1], *unused))
    if isinstance(source, Texture):
        source.bind(ctx.gl)
        program.set(u_texel_scale=source.texel_scale)
    else:
        program.set(u_stride=tuple(map(wrapped, source.stride[::-1])))
    return program


def _counters(ctx: Context, planes: int) -> Private:
    """Zeros, which every call leaves behind again."""
    count = 1 << max(planes - 1, 1023).bit_length()
    counters = ctx.constants.get(("tiles done", count), lambda: ctx.private.lease(4 * count).clear())
    recording.on_failure(counters.clear)
    return counters


def _elements_between(first: Planes, other: Planes) -> int:
    return (other.offset - first.offset) // first.dtype.itemsize
