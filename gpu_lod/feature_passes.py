"""The shaders of `feature_maps`, and the texture that it can give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpu_lod.bridge import Private
from gpu_lod.context import Context
from gpu_lod.copies import put
from gpu_lod.errors import LimitError, UnsupportedError
from gpu_lod.gaussian import reduce_level
from gpu_lod.oriented_energy import energy_planes
from gpu_lod.program import LOCAL_SIZE, Program
from gpu_lod.pyramid import burt_sizes
from gpu_lod.texture import Texture
from gpu_lod.transfer import (
    ALIGNMENT,
    READ_BARRIERS,
    Planes,
    bind_table,
    check_texture_size,
    new_planes,
    parts,
    planes_of,
    planes_to_texture,
    scratch_planes,
)

_COUNT, _SEMANTIC = 40, slice(17, 33)
_MADE = 24
"""Channels that shaders make: all but the semantic ones."""
_LEVELS = 6
_WIDEST = 5
"""Most neighbouring channels that one binding holds."""
_STAGED_BYTES = 64 * 2**20
"""Of channels at once that torch rounds or copies to their place."""
_LAYERS = 10
_TILE = 4
"""Rows and columns that an invocation makes at once; parts begin at whole tiles."""


@dataclass(frozen=True)
class FeatureTexture:
    """Feature maps as an array texture, for shaders of yours to sample.

    Layer 10 k + n holds channels 4 n to 4 n + 3 of image k as red, green, blue and alpha. One level, linear filter,
    clamped to the edge, texel centres at (i + 0.5) / n; row 0 is the image's first.
    It belongs to `context` and stays valid as long as this object lives; use it where that context is current (inside
    `with context:` or `with context.active():`), bound by its OpenGL name `glo`.
    """

    texture: Texture
    context: Context
    batch: int
    dtype: torch.dtype

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a FeatureTexture is OpenGL's and cannot be copied or pickled: make it where it is to be sampled, or pass "
            "the tensor that feature_maps gives without as_texture."
        )

    @property
    def glo(self) -> int:
        """OpenGL's name of the texture, a GL_TEXTURE_2D_ARRAY."""
        return self.texture.glo

    @property
    def layers(self) -> int:
        return self.texture.key.layers

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of a layer."""
        return self.texture.key.height, self.texture.key.width


def make_texture(
    ctx: Context,
    image: torch.Tensor,
    fixation: torch.Tensor,
    previous: torch.Tensor | None,
    semantic: torch.Tensor | None,
    dtype: torch.dtype,
    video: bool,
) -> FeatureTexture:
    batch = image.shape[0] if image.ndim == 4 else 1
    height, width = image.shape[-2:]
    check_texture_size(ctx, height, width)
    if batch * _LAYERS > ctx.limits.layers:
        raise LimitError(
            f"{batch} images are {batch * _LAYERS} layers, and this device's array textures end at "
            f"{ctx.limits.layers}. Pass at most {ctx.limits.layers // _LAYERS} at once, or leave as_texture off."
        )
    batched = image if image.ndim == 4 else image[None]

    def fits(images: int, rows: int) -> bool:
        """With the texture they are what a call may take: twice that, and less for luma and its pyramid."""
        least = images == 1 and rows <= _TILE
        return least or images * rows <= min(batch * height // 2, _STAGED_BYTES // (_COUNT * width * dtype.itemsize))

    with ctx.active(batched.device):
        texture = ctx.textures.give((width, height), layers=batch * _LAYERS, dtype=dtype, channels=4)
        job = _Job(ctx, batched, fixation, previous, video)
    for first, count, row, end in parts(ctx, batch, (0, height), fits, width, _TILE):
        part = (first, first + count), (row, end)
        with ctx.active(batched.device):
            target, maps = _new_maps(ctx, width, semantic, dtype, *part)
            done = _written(job, target, *part)
        if not done:
            _stage(job, maps, *part)
        with ctx.active(batched.device):
            planes_to_texture(ctx, planes_of(ctx, maps), texture, 0, layer=first * _LAYERS, row=row)
        del target, maps  # before the next are made
    with ctx.active(batched.device):
        texture.clamp_levels(ctx.gl, 0, 0)
    return FeatureTexture(texture, ctx, batch, dtype)


def make(
    ctx: Context,
    image: torch.Tensor,
    fixation: torch.Tensor,
    previous: torch.Tensor | None,
    semantic: torch.Tensor | None,
    dtype: torch.dtype,
    video: bool,
) -> torch.Tensor:
    """The maps [B, 40, H, W], or [40, H, W] of a single image."""
    batched = image if image.ndim == 4 else image[None]
    whole = (0, batched.shape[0]), (0, batched.shape[2])
    with ctx.active(batched.device):
        target, result = _new_maps(ctx, batched.shape[3], semantic, dtype, *whole)
        job = _Job(ctx, batched, fixation, previous, video)
        done = _written(job, target, *whole)
    if not done:
        _stage(job, result, *whole)
    return result if image.ndim == 4 else result[0]


def _new_maps(
    ctx: Context,
    width: int,
    semantic: torch.Tensor | None,
    dtype: torch.dtype,
    images: tuple[int, int],
    rows: tuple[int, int],
) -> tuple[Planes, torch.Tensor]:
    """Some images and rows of the maps, [n, 40, rows, W], of which the semantic ones are there: torch writes them
    while no buffer of the call is GL's."""
    target, result = new_planes(ctx, (images[1] - images[0], _COUNT, rows[1] - rows[0], width), dtype)
    given: float | torch.Tensor = 0.0
    if semantic is not None:
        each = semantic if semantic.ndim == 4 else semantic[None]
        given = (each[slice(*images)] if len(each) > 1 else each)[..., slice(*rows), :]
    put(ctx, result[:, _SEMANTIC], given)
    return target, result


def _written(job: _Job, target: Planes, images: tuple[int, int], rows: tuple[int, int]) -> bool:
    """Make all other channels where they belong, or say that it cannot be done, and `_stage` must."""
    # fp16 is packed by shaders where rows are whole words of theirs; elsewhere torch rounds what they made in fp32.
    packed = target.dtype == torch.float32 or (target.width % 4 == 0 and target.width >= 8)
    if not packed or _WIDEST * target.area * target.dtype.itemsize > _most(job.ctx):
        return False
    job.write(target, _COUNT, images, rows)
    return True


def _stage(job: _Job, result: torch.Tensor, images: tuple[int, int], rows: tuple[int, int]) -> None:
    """Make the channels in fp32 elsewhere, some images or rows at a time; torch rounds and places them."""
    ctx, width = job.ctx, job.width

    def fits(images: int, rows: int) -> bool:
        small = images * _MADE * rows * width * 4 <= _STAGED_BYTES or (images == 1 and rows <= _TILE)
        return small and ((images - 1) * _MADE + _WIDEST) * rows * width * 4 <= _most(ctx)

    for index, count, row, end in parts(ctx, images[1] - images[0], rows, fits, width, _TILE):
        first = images[0] + index
        with ctx.active(result.device):
            target, staged = new_planes(ctx, (count, _MADE, end - row, width), torch.float32)
            job.write(target, _MADE, (first, first + count), (row, end))
        with torch.inference_mode(False), torch.no_grad():
            into = result[index : index + count, :, row - rows[0] : end - rows[0]]
            into[:, : _SEMANTIC.start] = staged[:, : _SEMANTIC.start]
            into[:, _SEMANTIC.stop :] = staged[:, _SEMANTIC.start :]


def _most(ctx: Context) -> int:
    return ctx.limits.storage_bytes - 2 * ALIGNMENT


class _Job:
    """A batch, its luma and its luma's pyramid in GL memory. Made and used inside `ctx.active()`."""

    def __init__(
        self,
        ctx: Context,
        image: torch.Tensor,
        fixation: torch.Tensor,
        previous: torch.Tensor | None,
        video: bool,
    ) -> None:
        self.ctx = ctx
        self.video = video
        self.batch, self.channels, self.height, self.width = image.shape
        self.area = self.height * self.width
        self.source = planes_of(ctx, image)
        earlier = None if previous is None else previous if previous.ndim == 4 else previous[None]
        others = None if earlier is None else planes_of(ctx, earlier)
        self.fixations: Private = ctx.private.lease(self.batch * 8).write(fixation.float())
        self.earlier = 0 if earlier is None else earlier.shape[0]
        # The frames before first: what came before an image of a video is the plane before its own.
        self.lumas = scratch_planes(ctx, (self.earlier + self.batch, self.height, self.width), torch.float32)
        self.luma = self.lumas.layers(self.earlier, self.batch)
        self.fetched = self.lumas.fetchable(ctx)  # and then all that is made of it, which is smaller
        self._make_luma(self.source, self.channels, self.luma)
        if earlier is not None and others is not None:
            self._make_luma(others, earlier.shape[1], self.lumas.layers(0, self.earlier))
        self.gaussians = [self.luma]
        for height, width in burt_sizes(self.height, self.width)[1:_LEVELS]:
            below = scratch_planes(ctx, (self.batch, height, width), torch.float32)
            reduce_level(ctx, self.gaussians[-1], below)
            self.gaussians.append(below)
        last = len(self.gaussians) - 1
        self.levels = [self._make_level(level) for level in range(min(1, last), last + 1)]
        self.levels += [self.levels[-1]] * (_LEVELS - 1 - len(self.levels))

    def write(self, target: Planes, per_image: int, images: tuple[int, int], rows: tuple[int, int]) -> None:
        """All channels that shaders make, of some images and rows, into a target that holds these and no others.

        Args:
            per_image: planes of the target an image; 24 leaves the semantic ones out.
        """
        ctx, width, height = self.ctx, self.width, self.height
        first, end = images

        def fits(count: int, tall: int) -> bool:
            written = ((count - 1) * per_image + _WIDEST - 1) * target.area + tall * width
            read = max(  # bytes
                ((count - 1) * height + tall + _TILE) * width * 4,
                ((count - 1) * self.channels * self.area + tall * width) * self.source.dtype.itemsize,
                (self.levels[0].area * (count - 1) + (tall // 2 + _TILE) * self.levels[0].width) * 4,
            )
            return max(written * target.dtype.itemsize, read) <= _most(ctx)

        for index, count, row, stop in parts(ctx, end - first, rows, fits, width, _TILE):
            self._write_part(target, per_image, rows[0], index, (first + index, count, row, stop))
        energies = target.layers(13, target.count - 13)
        energy_planes(ctx, self.luma.layers(first, end - first), energies, 4, apart=per_image, rows=rows)

    def _write_part(
        self, target: Planes, per_image: int, first_row: int, index: int, part: tuple[int, int, int, int]
    ) -> None:
        """What one dispatch of each shader makes.

        Args:
            first_row: that the target holds.
            index: of the first image, in the target.
            part: first image, images, first row, row after the last.
        """
        ctx, width, height = self.ctx, self.width, self.height
        image, count, row, stop = part
        after = _SEMANTIC.stop if per_image == _COUNT else _SEMANTIC.start
        motion = self.video or bool(self.earlier)
        last, half = len(self.gaussians) - 1, target.dtype == torch.float16
        points = ctx.programs.compute(
            "feature_points.comp",
            PER_WORD=self.source.per_word,
            FROM_BFLOAT16=self.source.dtype == torch.bfloat16,
            CHANNELS=self.channels,
            GROUPS=self._in_groups(self.source),
            TEXELS=self._as_texels(self.source),
            ALIGNED=self.aligned,
            HALF=half,
            MOTION=motion,
            FETCHED=self.fetched,
        )
        kind = {"ALIGNED": self.aligned, "HALF": half, "FETCHED": self.fetched}
        small = min(height, width) <= 2
        around = ctx.programs.compute("feature_neighbours.comp", SMALL=small, LAST=last == 0, **kind)
        scales = ctx.programs.compute("feature_scales.comp", **kind)

        def bind(binding: int, channel: int, channels: int) -> int:
            """Some neighbouring channels of the target; returns the index of the first one's texel 0."""
            plane = index * per_image + channel
            last = plane + (count - 1) * per_image + channels - 1
            return self._rows(target, binding, plane, last, row - first_row, stop - first_row) - first_row * width

        shape = {
            "u_size": (width, height),
            "u_rows": (row, stop),
            "u_stride": (target.area, per_image * target.area if count > 1 else 0),  # else beyond 31 bits it may be
        }
        groups = -(-width // (4 * LOCAL_SIZE))
        self._bind_colours(self.source, self.channels, image, count, row, stop, points)
        bind_table(ctx, 3, self.fixations)
        if motion:
            before = image - 1 + self.earlier if self.video else image if self.earlier > 1 else 0
            moves = self.video or self.earlier > 1
            last_before = before + count - 1 if moves else before
            points.set(
                u_before_first=self._read(self.lumas, 2, max(before, 0), max(last_before, 0), row, stop, self.floats)
                + (before - max(before, 0)) * self.area,
                u_before_stride=self.area if moves else 0,
                u_no_motion=0 if self.earlier else 1,
            )
        points.set(
            u_first=(bind(0, 0, 5), bind(4, 9, 3), bind(5, after + 5, 2)),
            u_first_image=image,
            u_pixel=(1 / width, 1 / height),
            u_box=(width / max(width, height), height / max(width, height)),
            **shape,
        ).dispatch_groups(groups, stop - row, count)

        coarse = self.gaussians[min(1, last)]
        around.set(
            u_source=(
                self._read(self.luma, 1, image, image + count - 1, row - 2, stop + 2, self.floats),
                self._read(coarse, 2, image, image + count - 1, row // 2 - 1, stop // 2 + 2),
            ),
            u_coarse_size=(coarse.width, coarse.height),
            u_first=(bind(0, 6, 3), bind(4, 12, 1), bind(5, after + 4, 1)),
            **shape,
        ).dispatch_groups(groups, -(-(stop - row) // _TILE), count)

        tops = [
            self._read(planes, level, image, image + count - 1, row >> level, (stop >> level) + 3, 2) // 2
            for level, planes in enumerate(self.levels, start=1)
        ]
        sizes = {f"u_size{level}": (p.width // 2, p.height) for level, p in enumerate(self.levels, start=1)}
        scales.set(
            u_level=tuple(tops[:4]), u_level5=tops[4], u_first=(bind(0, 5, 1), bind(6, after, 4)), **sizes, **shape
        ).dispatch_groups(groups, -(-(stop - row) // _TILE), count)

    @property
    def aligned(self) -> bool:
        return self.width % 4 == 0

    def _in_groups(self, source: Planes) -> bool:
        """Whether rows of a picture, which may be anywhere in a buffer of the caller's, begin at groups of four."""
        return self.aligned and source.offset % (4 * source.dtype.itemsize) == 0

    def _as_texels(self, source: Planes) -> bool:
        return source.dtype == torch.float32 and source.fetchable(self.ctx)

    @property
    def floats(self) -> int:
        """That shaders load at once of a row of luma."""
        return 4 if self.aligned else 1

    def _read(self, planes: Planes, binding: int, first: int, last: int, begin: int, end: int, floats: int = 1) -> int:
        """`_rows`, or all of the planes as a buffer texture."""
        if self.fetched:
            return planes.fetch(binding, floats) + first * planes.area
        return self._rows(planes, binding, first, last, begin, end)

    def _rows(self, planes: Planes, binding: int, first: int, last: int, begin: int, end: int) -> int:
        """Bind rows `begin` to `end` - 1, as far as there are such, of planes; returns the index of the first plane's
        texel 0. Of several planes all from the first row to the last are bound."""
        begin, end = min(max(begin, 0), planes.height - 1), min(max(end, 1), planes.height)
        origin = planes.bind(
            self.ctx, binding, first * planes.area + begin * planes.width, last * planes.area + end * planes.width - 1
        )
        return origin + first * planes.area

    def _bind_colours(
        self, source: Planes, channels: int, image: int, count: int, row: int, stop: int, program: Program
    ) -> None:
        tops = []
        for channel, binding in enumerate((1, 6, 7) if channels > 2 else (1,)):
            first = image * channels + channel
            if self._as_texels(source):
                origin = source.fetch(binding, 4 if self._in_groups(source) else 1) + first * self.area
            else:
                origin = self._rows(source, binding, first, first + (count - 1) * channels, row, stop)
            tops.append(origin)
        program.set(u_source_first=(*tops, 0, 0)[:3])

    def _make_luma(self, source: Planes, channels: int, target: Planes) -> None:
        ctx, width = self.ctx, self.width
        program = ctx.programs.compute(
            "feature_luma.comp",
            PER_WORD=source.per_word,
            FROM_BFLOAT16=source.dtype == torch.bfloat16,
            CHANNELS=channels,
            GROUPS=self._in_groups(source),
            TEXELS=self._as_texels(source),
            ALIGNED=self.aligned,
        )

        def fits(count: int, tall: int) -> bool:
            read = ((count - 1) * channels * self.area + tall * width) * source.dtype.itemsize
            return max(read, ((count - 1) * self.area + tall * width) * 4) <= _most(ctx)

        for image, count, row, stop in parts(ctx, target.count, (0, self.height), fits, width):
            self._bind_colours(source, channels, image, count, row, stop, program)
            program.set(
                u_size=(width, self.height),
                u_first_row=row,
                u_target_first=self._rows(target, 0, image, image + count - 1, row, stop),
            ).dispatch_groups(-(-width // (4 * LOCAL_SIZE)), stop - row, count)
        ctx.gl.MemoryBarrier(READ_BARRIERS)

    def _make_level(self, level: int) -> Planes:
        """A Gaussian level and the square of its band side by side: planes of twice its width."""
        ctx, fine = self.ctx, self.gaussians[level]
        last = level == len(self.gaussians) - 1
        coarse = fine if last else self.gaussians[level + 1]
        target = scratch_planes(ctx, (self.batch, fine.height, 2 * fine.width), torch.float32)
        aligned = fine.width % 4 == 0
        program = ctx.programs.compute("feature_level.comp", LAST=last, ALIGNED=aligned, FETCHED=self.fetched)
        across, down = (64, 8) if aligned else (LOCAL_SIZE, 1)  # texels of a workgroup

        def fits(count: int, tall: int) -> bool:
            return ((count - 1) * fine.height + tall + 2) * fine.width * 8 <= _most(ctx)

        for image, count, row, stop in parts(ctx, self.batch, (0, fine.height), fits, fine.width, 2):
            end = image + count - 1
            program.set(
                u_size=(fine.width, fine.height),
                u_coarse_size=(coarse.width, coarse.height),
                u_rows=(row, stop),
                u_first=(
                    self._rows(target, 0, image, end, row, stop) // 2,
                    self._read(fine, 1, image, end, row, stop, 4 if aligned else 1),
                    self._read(coarse, 2, image, end, row // 2 - 1, stop // 2 + 2),
                ),
            ).dispatch_groups(-(-fine.width // across), -(-(stop - row) // down), count)
        ctx.gl.MemoryBarrier(READ_BARRIERS)
        return target
