"""Feature maps: each channel of shader and reference() against its definition in float64."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import moderngl
import pytest
import torch
from compare import TOLERANCES, assert_matches
from images import DTYPES, SIZES, noise
from oracle import dense, gaussian_chain, laplacian_chain, oriented_energy
from scripts import succeed
from times import fastest

import gpu_lod as lod
from gpu_lod.errors import CalibrationWarning, InputChangedError, InputError, LimitError, UnsupportedError
from gpu_lod.feature_maps import CHANNELS, reference

BACKENDS: list[Any] = ["torch", "gl"]


# -- the definitions in float64 ----------------------------------------------------------------------------------------


def unit(image: torch.Tensor) -> torch.Tensor:
    """[B, 3, H, W] in [0, 1]."""
    batched = image if image.ndim == 4 else image[None]
    colours = batched[:, :3] if batched.shape[1] > 2 else batched[:, :1].expand(-1, 3, -1, -1)
    return colours.double() / (255 if image.dtype == torch.uint8 else 1)


def luma_of(image: torch.Tensor) -> torch.Tensor:
    colours = unit(image)
    if image.shape[-3] <= 2:
        return colours[:, :1]
    return (colours * torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)[:, None, None]).sum(1, keepdim=True)


def reading(n: int, level: int, count: int) -> torch.Tensor:
    """[n, count]: pixel i reads sample i / 2^level of a level of `count` samples."""
    weights = torch.zeros(n, count, dtype=torch.float64)
    for i in range(n):
        at = min(i / 2**level, count - 1)
        below = int(at)
        weights[i, below] += 1 - (at - below)
        weights[i, min(below + 1, count - 1)] += at - below
    return weights


def read(level: torch.Tensor, index: int, height: int, width: int) -> torch.Tensor:
    return reading(height, index, level.shape[-2]) @ level @ reading(width, index, level.shape[-1]).T


def truth(
    image: torch.Tensor,
    fixation: Any = (0.5, 0.5),
    previous: torch.Tensor | None = None,
    semantic: torch.Tensor | None = None,
    video: bool = False,
) -> torch.Tensor:
    colours, luma = unit(image), luma_of(image)
    batch, _, height, width = colours.shape
    x = ((torch.arange(width, dtype=torch.float64) + 0.5) / width).expand(batch, 1, height, width)
    y = ((torch.arange(height, dtype=torch.float64) + 0.5) / height)[:, None].expand(batch, 1, height, width)
    gaussians, bands = gaussian_chain(luma), laplacian_chain(luma)[:-1]

    def smoothed(level: int) -> torch.Tensor:
        level = min(level, len(gaussians) - 1)
        return read(gaussians[level], level, height, width)

    saliency = sum((smoothed(c) - smoothed(s)).abs() for c, s in ((1, 3), (2, 4), (3, 5))) / 3
    kernel = torch.tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], dtype=torch.float64) / 8
    gx, gy = dense(luma, torch.stack([kernel, kernel.T])).unbind(-3)
    motion = torch.zeros_like(luma)
    before = None if previous is None else luma_of(previous)
    for k in range(batch):
        if video and k > 0:
            motion[k] = luma[k] - luma[k - 1]
        elif before is not None:
            motion[k] = luma[k] - before[k if before.shape[0] > 1 else 0]
    points = torch.as_tensor(fixation, dtype=torch.float32).double().expand(batch, 2)[:, :, None, None, None]
    longer = max(height, width)
    eccentricity = torch.hypot((x - points[:, 0]) * width / longer, (y - points[:, 1]) * height / longer)
    nothing = torch.zeros_like(luma)
    energies = [
        read(bands[level].square(), level, height, width) if level < len(bands) else nothing for level in range(1, 5)
    ]
    windows = dense(luma, torch.eye(25, dtype=torch.float64).view(25, 5, 5)).movedim(-3, 0)
    features = torch.zeros(batch, 16, height, width, dtype=torch.float64)
    if semantic is not None:
        features = features + semantic.double()
    red, green, blue = colours.split(1, dim=1)
    return torch.cat(
        [
            colours,
            x,
            y,
            saliency,
            gx,
            gy,
            torch.hypot(gx, gy),
            luma,
            motion,
            eccentricity,
            bands[0].abs() if bands else nothing,
            oriented_energy(luma, 1)[0][:, 0],
            features,
            *energies,
            windows.var(0, unbiased=False),
            red - green,
            blue - (red + green) / 2,
        ],
        dim=1,
    )


def check(found: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    """Each feature by itself, so that a message names it; in units of its largest value if that is above 1."""
    expected = expected if found.ndim == 4 else expected[0]
    assert found.shape == expected.shape
    for name, where_it_is in CHANNELS.items():
        one, two = found[..., where_it_is, :, :], expected[..., where_it_is, :, :]
        kind = "energy" if name == "orientation" else "features"
        largest = max(1.0, float(two.abs().max()))
        assert_matches((one.double() / largest).to(one.dtype), two / largest, kind, where=f"{name}, {where}")


# -- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parity(backend: Any, dtype: torch.dtype) -> None:
    for height, width in SIZES:
        for shape in ((2, 3, height, width), (1, height, width)):
            image = noise(*shape, dtype=dtype)
            found = lod.feature_maps(image, (0.3, 0.6), backend=backend)
            assert found.dtype == torch.float32 and found.is_contiguous()
            check(found, truth(image, (0.3, 0.6)), f"{shape}")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_grey_colour_and_alpha(backend: Any, channels: int) -> None:
    for shape in ((3, channels, 17, 31), (channels, 12, 20)):
        image = noise(*shape, dtype=torch.uint8)
        check(lod.feature_maps(image, backend=backend), truth(image), f"{shape}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_pictures(backend: Any, photo: torch.Tensor, page: torch.Tensor) -> None:
    for image in (photo[:, ::2, ::2].contiguous(), page):
        check(lod.feature_maps(image, backend=backend), truth(image))


@pytest.mark.parametrize("size", [(17, 31), (33, 64), (1, 9), (5, 4), (1, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_rounded_once(backend: Any, size: tuple[int, int]) -> None:
    """Widths that shaders pack, and that torch rounds."""
    image, semantic = noise(3, 3, *size), torch.randn(3, 16, *size)
    half = lod.feature_maps(image, semantic=semantic, dtype=torch.float16, backend=backend)
    full = lod.feature_maps(image, semantic=semantic, backend=backend)
    assert half.dtype == torch.float16 and torch.equal(half, full.half())
    check(half, truth(image, semantic=semantic))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [23, 24])
def test_motion(backend: Any, width: int) -> None:
    image = noise(4, 3, 15, width)
    frame, frames = noise(1, 15, width, dtype=torch.uint8), noise(4, 4, 15, width, dtype=torch.float16)
    for arguments in (
        {"previous": frame},
        {"previous": frame[None]},
        {"previous": frames},
        {"video": True},
        {"video": True, "previous": frame},
    ):
        found = lod.feature_maps(image, backend=backend, **arguments)
        check(found, truth(image, **arguments), f"{list(arguments)}")
    assert float(lod.feature_maps(image, backend=backend)[:, 10].abs().max()) == 0
    single = lod.feature_maps(image[1], previous=image[0], backend=backend)
    assert torch.equal(single, lod.feature_maps(image, video=True, backend=backend)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 4, 8, 16, 32])
def test_pictures_anywhere_in_gl_memory(ctx: lod.Context, dtype: torch.dtype, first: int) -> None:
    """A picture that begins `first` bytes into its buffer."""
    image = noise(2, 3, 12, 16, dtype=dtype)
    skipped = first // dtype.itemsize
    whole = ctx.empty(image.numel() + skipped, dtype=dtype)
    inside = whole[skipped:].view(image.shape)
    inside.copy_(image)
    assert torch.equal(lod.feature_maps(inside, backend="gl"), lod.feature_maps(image, backend="gl"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_semantic_features_are_taken_as_they_are(backend: Any, dtype: torch.dtype) -> None:
    for height, width in ((9, 14), (40, 52)):
        image = noise(2, 3, height, width)
        for shape in ((2, 16, height, width), (1, 16, height, width), (16, height, width)):
            features = torch.randn(shape).to(dtype)
            found = lod.feature_maps(image, semantic=features, backend=backend)
            assert torch.equal(found[:, CHANNELS["semantic"]], features.float().expand(2, 16, height, width))
    assert bool((lod.feature_maps(image, backend=backend)[:, 17:33] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_fixations(backend: Any) -> None:
    image, points = noise(3, 1, 20, 11), torch.rand(3, 2)
    check(lod.feature_maps(image, points, backend=backend), truth(image, points))


@pytest.mark.parametrize("tile", ["_TILE", "_TILE_SOFTWARE"])
@pytest.mark.parametrize("width", [31, 32])
def test_both_tilings(tile: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["gpu_lod.oriented_energy"]
    monkeypatch.setattr(module, "_TILE_SOFTWARE", getattr(module, tile))
    image = noise(2, 3, 21, width)
    check(lod.feature_maps(image, backend="gl"), truth(image))
    check(lod.feature_maps(image, dtype=torch.float16, backend="gl"), truth(image))


# -- what the channels mean --------------------------------------------------------------------------------------------


def test_channels_cover_everything_once() -> None:
    flat = [channel for part in CHANNELS.values() for channel in range(40)[part]]
    assert flat == list(range(40))


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_gradients_rise_towards_x_and_y(backend: Any) -> None:
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(10.0), indexing="ij")
    maps = lod.feature_maps((0.03 * x + 0.05 * y)[None], backend=backend)[:, 2:-2, 2:-2]
    for channel, slope in ((6, 0.03), (7, 0.05)):
        assert torch.allclose(maps[channel], torch.tensor(slope), atol=1e-6)
    assert torch.allclose(maps[8], torch.tensor((0.03**2 + 0.05**2) ** 0.5), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_places(backend: Any) -> None:
    """x to the right, y down, circles round in pixels."""
    maps = lod.feature_maps(torch.zeros(1, 10, 20), (1.0, 0.0), backend=backend)
    assert float(maps[3, 0, -1]) == pytest.approx(0.975) and float(maps[4, -1, 0]) == pytest.approx(0.95)
    assert float(maps[11, 0, -1]) == pytest.approx((0.5**2 + 0.5**2) ** 0.5 / 20, rel=1e-5)
    assert float(maps[11, 9, 19]) == pytest.approx((0.5**2 + 9.5**2) ** 0.5 / 20, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_convention_levels_are_read_where_their_samples_stand(backend: Any) -> None:
    """At pixel (2^l i, 2^l j) nothing is interpolated."""
    image = noise(1, 40, 40)
    square = lod.laplacian(image, backend="torch")
    maps = lod.feature_maps(image, backend=backend)
    for level in range(1, 5):
        expected = square[level][0] ** 2
        assert torch.allclose(maps[32 + level, :: 2**level, :: 2**level], expected, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flat_picture_has_nothing_but_its_colour(backend: Any) -> None:
    maps = lod.feature_maps(torch.full((3, 33, 44), 0.7), backend=backend)
    for name in ("saliency", "gradient", "high_pass", "orientation", "band_energy", "variance"):
        assert float(maps[CHANNELS[name]].abs().max()) < 1e-6, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_variance_is_stable(backend: Any) -> None:
    """A texture of a hundredth of a count on a bright picture: the mean square less the squared mean would be noise."""
    image = 0.9 + 4e-5 * noise(1, 24, 28)
    expected = truth(image)[0, 37]
    found = lod.feature_maps(image, backend=backend)[37].double()
    assert float((found / expected - 1).abs().max()) < 1e-2
    naive = torch.nn.functional.avg_pool2d(image**2, 5, 1) - torch.nn.functional.avg_pool2d(image, 5, 1) ** 2
    assert float((naive[0].double() / expected[2:-2, 2:-2] - 1).abs().max()) > 1


# -- textures ----------------------------------------------------------------------------------------------------------


def texels(ctx: lod.Context, features: lod.FeatureTexture) -> torch.Tensor:
    """[layers, H, W, 4] as a shader of the user's own reads them."""
    height, width = features.size
    with ctx.active():
        mgl: moderngl.Context = ctx._mgl
        program = mgl.compute_shader(
            """#version 430
            layout(local_size_x = 1) in;
            layout(binding = 0) uniform sampler2DArray t_maps;
            layout(std430, binding = 0) writeonly buffer Target { vec4 b_target[]; };
            void main() {
                ivec3 at = ivec3(gl_GlobalInvocationID), size = textureSize(t_maps, 0);
                b_target[(at.z * size.y + at.y) * size.x + at.x] =
                    textureLod(t_maps, vec3((vec2(at.xy) + 0.5) / vec2(size.xy), at.z), 0.0);
            }"""
        )
        target = mgl.buffer(reserve=features.layers * height * width * 16)
        features.texture.bind(ctx.gl)
        target.bind_to_storage_buffer(0)
        program.run(width, height, features.layers)
        mgl.finish()
        result = torch.frombuffer(bytearray(target.read()), dtype=torch.float32)
        target.release()
        program.release()
    return result.view(features.layers, height, width, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(9, 14), (8, 16), (31, 20)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_textures_hold_the_same(ctx: lod.Context, batch: int, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """They are made of some images, or rows of one, at a time."""
    image, previous, semantic = noise(batch, 3, *size), noise(batch, 3, *size) / 2, torch.rand(batch, 16, *size)
    for given in (semantic, semantic[0]):
        kinds = {"previous": previous, "semantic": given, "dtype": dtype}
        features = lod.feature_maps(image, as_texture=True, **kinds)
        assert isinstance(features, lod.FeatureTexture)
        assert (features.layers, features.batch) == (10 * batch, batch)
        assert (features.size, features.dtype) == (size, dtype)
        assert features.context is ctx and features.glo == features.texture.glo > 0
        maps = lod.feature_maps(image, backend="gl", **kinds)
        expected = maps.view(10 * batch, 4, *size).permute(0, 2, 3, 1).float()
        assert float((texels(ctx, features) - expected).abs().max()) < (1e-3 if dtype == torch.float16 else 1e-5)


def test_a_texture_lives_as_long_as_its_value(ctx: lod.Context) -> None:
    """And never comes back to the pool: its sampler state is the caller's."""
    features = lod.feature_maps(noise(1, 8, 8), as_texture=True)
    glo = features.glo
    other = lod.feature_maps(noise(1, 8, 8), as_texture=True)
    with ctx.active():
        assert other.glo != glo and ctx.gl.IsTexture(glo)
    del features
    gc.collect()
    with ctx.active():
        assert not ctx.gl.IsTexture(glo)


def test_what_textures_cannot_be(restored_limits: lod.Context) -> None:
    image = noise(3, 1, 8, 8)
    with pytest.raises(UnsupportedError, match="torch makes none"):
        lod.feature_maps(image, as_texture=True, backend="torch")
    with pytest.raises(UnsupportedError, match="no gradients"):
        lod.feature_maps(image.clone().requires_grad_(), as_texture=True)
    restored_limits.limits.layers = 25
    with pytest.raises(LimitError, match="at most 2 at once"):
        lod.feature_maps(image, as_texture=True)
    restored_limits.limits.texture_size = 7
    with pytest.raises(LimitError, match="8 x 8"):
        lod.feature_maps(image[:1], as_texture=True)


# -- limits and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [52, 53])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_work_is_split_to_fit_bindings(restored_limits: lod.Context, dtype: torch.dtype, width: int) -> None:
    image, previous = noise(3, 3, 70, width), noise(3, 3, 70, width, dtype=torch.uint8)
    arguments: dict[str, Any] = {"previous": previous, "dtype": dtype, "backend": "gl"}
    expected = lod.feature_maps(image, **arguments)
    film = lod.feature_maps(image, video=True, dtype=dtype, backend="gl")
    for limit in (2**20, 96 * 1024, 12 * 1024, 7 * 1024):  # images at once; channels of one; rows elsewhere
        restored_limits.limits.storage_bytes = limit
        assert torch.equal(lod.feature_maps(image, **arguments), expected), limit
        assert torch.equal(lod.feature_maps(image, video=True, dtype=dtype, backend="gl"), film), limit
    restored_limits.limits.storage_bytes = 1024
    with pytest.raises(LimitError):
        lod.feature_maps(image, **arguments)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 512), (torch.float16, 512), (torch.float16, 511)])
def test_little_memory_beyond_the_result(dtype: torch.dtype, width: int) -> None:
    """At most twice the output and 1.8 times the input, of all that OpenGL holds."""
    succeed(
        f"""
        import torch, gpu_lod as lod
        image = torch.rand(1, 3, 512, {width})
        ctx = lod.Context()
        maps = lod.feature_maps(image, dtype={dtype}, backend="gl")
        pools = ctx.host.pool, ctx.private.pool, ctx.textures.pool
        with ctx.active():  # takes back what the verb used on the way
            pass
        held = sum(pool.idle_bytes for pool in pools)
        assert 0 < held <= 2 * maps.nbytes + 1.8 * image.nbytes, (held, maps.nbytes, image.nbytes)
        """
    )


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_agree(dtype: torch.dtype) -> None:
    image, previous, semantic = noise(2, 3, 13, 18), noise(1, 1, 13, 18), torch.rand(16, 13, 18)
    weights = torch.rand(2, 40, 13, 18)
    found = []
    for backend in BACKENDS:
        inputs = [tensor.clone().requires_grad_() for tensor in (image, previous, semantic)]
        maps = lod.feature_maps(inputs[0], previous=inputs[1], semantic=inputs[2], dtype=dtype, backend=backend)
        (maps.float() * weights).sum().backward()
        found.append([tensor.grad for tensor in inputs])
    for one, two in zip(*found, strict=True):
        assert one is not None and float(one.abs().max()) > 0.1
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-4)


CASES = [
    ((2, 3, 61, 47), "previous of all", False),
    ((3, 4, 40, 70), "previous of one", False),
    ((1, 1, 130, 96), "", False),
    ((2, 2, 1, 90), "previous of all", False),
    ((3, 3, 33, 64), "previous of one", True),
    ((2, 3, 2, 3), "", True),
    ((2, 1, 2, 2), "previous of one", False),
    ((1, 3, 1, 1), "previous of one", True),
]


@pytest.mark.parametrize(("shape", "frames", "video"), CASES)
def test_gradients_are_those_of_a_graph(
    shape: tuple[int, ...], frames: str, video: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every input, in double precision, where kinks of lengths and absolutes lie alike; of some rows at a time."""
    monkeypatch.setattr(sys.modules["gpu_lod.feature_channels"], "_CACHED", 700)
    batch, _, height, width = shape
    image = torch.rand(shape, dtype=torch.float64)
    fixation = torch.rand(1 if video else batch, 2, dtype=torch.float64)
    previous = torch.rand(batch if "all" in frames else 1, *shape[1:], dtype=torch.float64) if frames else None
    semantic = torch.rand(16, height, width, dtype=torch.float64)
    weights = torch.rand(batch, 40, height, width, dtype=torch.float64)
    found = []
    for make in (reference, sys.modules["gpu_lod.feature_maps"]._made):
        given = [x if x is None else x.clone().requires_grad_() for x in (image, fixation, previous, semantic)]
        make(*given, torch.float64, video).backward(weights)
        found.append([x.grad for x in given if x is not None])
    for ours, graph in zip(*found, strict=True):
        assert float(graph.abs().max()) > 0.1
        assert torch.allclose(ours, graph, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_makes_no_maps(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    image, semantic = torch.rand(1, 3, 70, 60), torch.rand(16, 70, 60).requires_grad_()
    asked = image.clone().requires_grad_()
    maps = lod.feature_maps(asked, semantic=semantic, backend=backend)
    alone = lod.feature_maps(image, semantic=semantic, backend=backend)
    weights = torch.rand_like(maps)
    monkeypatch.setattr(sys.modules["gpu_lod.feature_maps"], "channels", None)
    torch.autograd.grad(maps, asked, weights)
    monkeypatch.setattr(sys.modules["gpu_lod.feature_channels"], "_luma", None)  # of features none reads the picture
    for _ in range(2):
        (gradient,) = torch.autograd.grad(alone, semantic, weights, retain_graph=True)
        assert torch.equal(gradient, weights[0, 17:33])
        gradient.zero_()  # which is nobody else's


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backward_does_not_read_may_be_written_to(backend: Any, twice: bool) -> None:
    """As a program does that moves its fixation, and keeps its frame for the next one."""
    image, given = noise(3, 40, 30), {"semantic": torch.rand(16, 40, 30), "previous": noise(3, 40, 30)}
    found = []
    for written in (False, True):
        asked, fixation = image.clone().requires_grad_(), torch.tensor([0.4, 0.6])
        kinds = {name: tensor.clone() for name, tensor in given.items()}
        maps = lod.feature_maps(asked, fixation, backend=backend, **kinds)
        if written:
            for tensor in (fixation, *kinds.values()):
                tensor.fill_(0.75)
        (gradient,) = torch.autograd.grad(maps.square().sum() if twice else maps.sum(), asked, create_graph=twice)
        found.append(torch.autograd.grad(gradient.square().sum(), asked)[0] if twice else gradient)
    assert torch.allclose(*found, rtol=1e-5, atol=1e-4)
    semantic = given["semantic"].requires_grad_()
    maps = lod.feature_maps(image, semantic=semantic, backend=backend)
    image.zero_()
    (gradient,) = torch.autograd.grad(maps.sum(), semantic)
    assert bool((gradient == 1).all())
    asked = noise(3, 40, 30).requires_grad_()
    doubled = asked * 1
    maps = lod.feature_maps(doubled, backend=backend)
    doubled.mul_(2)
    with pytest.raises(InputChangedError):
        maps.sum().backward()


@pytest.mark.parametrize("side", [20, 70, 130])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients_beside_a_vmap_over_fixations(backend: Any, side: int) -> None:
    image, points = noise(3, side, side + 2).requires_grad_(), torch.rand(3, 2)

    def run(point: torch.Tensor) -> torch.Tensor:
        return lod.feature_maps(image, point, backend=backend)

    found, expected = torch.func.vmap(run)(points), torch.stack([run(point) for point in points])
    weights = torch.rand_like(found)
    ours, loops = (torch.autograd.grad(maps, image, weights)[0] for maps in (found, expected))
    assert torch.allclose(ours, loops, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_finite_where_nothing_changes(backend: Any) -> None:
    image = torch.full((3, 9, 12), 0.5, requires_grad=True)
    lod.feature_maps(image, (0.5 / 12, 0.5 / 9), backend=backend).sum().backward()
    assert image.grad is not None and bool(image.grad.isfinite().all())


def test_tangents_of_flat_pictures_are_finite() -> None:
    image = torch.full((1, 6, 7), 0.5)
    point = torch.tensor([0.5 / 7, 0.5 / 6])
    for function, x in (
        (lambda x: lod.feature_maps(x), image),
        (lambda f: lod.feature_maps(image, f), point),
    ):
        assert torch.func.jvp(function, (x,), (torch.ones_like(x),))[1].isfinite().all()


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_gradients_beside_an_image_of_inference_mode(backend: Any) -> None:
    with torch.inference_mode():
        image = noise(3, 9, 12)
    semantic = noise(16, 9, 12).requires_grad_()
    lod.feature_maps(image, semantic=semantic, backend=backend).sum().backward()
    assert semantic.grad is not None and bool((semantic.grad == 1).all())


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_what_reads_a_nan_is_nan(channels: int) -> None:
    """On both backends, of greys too, whose red less green a compiler may know to be 0."""
    image = noise(1, channels, 64, 96)
    image[0, : 1 if channels < 3 else 3, 30, 40] = float("nan")
    made = {backend: lod.feature_maps(image, backend=backend)[0].isnan() for backend in BACKENDS}
    assert all(bool(made["torch"][channel, 30, 40]) for channel in (0, 1, 2, 5, 9, 12, 13, 33, 37, 38, 39))
    differ = (made["gl"] != made["torch"]).flatten(1).any(1)
    assert set(differ.nonzero().flatten().tolist()) <= {33, 34, 35, 36}
    assert not bool((made["gl"] & ~made["torch"]).any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_variance_of_what_is_not_finite_is_not_a_number(backend: Any) -> None:
    for bad in (float("nan"), float("inf")):
        image = noise(1, 12, 14)
        image[0, 6, 7] = bad
        variance = lod.feature_maps(image, backend=backend)[37]
        assert bool(variance[4:9, 5:10].isnan().all()) and bool(variance[:4].isfinite().all())


def test_gradcheck() -> None:
    image = torch.rand(2, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    fixation = torch.tensor([[0.43, 0.57], [0.2, 0.9]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, f: reference(x, f, video=True), (image, fixation), fast_mode=True)


def test_the_reference_in_double_precision() -> None:
    image = torch.rand(2, 3, 19, 26, dtype=torch.float64)
    found = reference(image, torch.tensor([[0.3, 0.6]]).expand(2, 2), video=True)
    assert float((found - truth(image, (0.3, 0.6), video=True)).abs().max()) < 1e-12


def test_no_gradients_in_the_fixation_from_shaders() -> None:
    fixation = torch.tensor([0.4, 0.5], requires_grad=True)
    image = noise(1, 9, 9)
    with pytest.raises(UnsupportedError, match="fixation: gradients"):
        lod.feature_maps(image, fixation, backend="gl")
    assert lod.explain(lod.feature_maps, image, fixation).backend == "torch"
    lod.feature_maps(image, fixation)[11].sum().backward()
    assert fixation.grad is not None


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image": torch.zeros(9, 12)}, "expected"),
        ({"image": torch.zeros(5, 9, 12)}, "5 channels"),
        ({"image": torch.zeros(1, 0, 12)}, "at least 1"),
        ({"image": torch.zeros(1, 9, 12, dtype=torch.float64)}, "float64"),
        ({"image": "photo.jpg"}, "str"),
        ({"fixation": (0.5, 2.0)}, "2.0"),
        ({"fixation": (0.5, 0.5, 0.5)}, "shape"),
        ({"fixation": torch.zeros(3, 2)}, "batch of 2"),
        ({"previous": torch.zeros(1, 9, 11)}, "resize them first"),
        ({"previous": torch.zeros(3, 1, 9, 12)}, "1 image or 2"),
        ({"previous": torch.zeros(2, 1, 9, 12), "video": True}, "before the first"),
        ({"previous": torch.zeros(9, 12)}, "previous has shape"),
        ({"previous": torch.zeros(1, 9, 12, dtype=torch.int32)}, "previous is torch.int32"),
        ({"previous": torch.zeros(1, 9, 12, device="meta")}, "previous is a"),
        ({"semantic": torch.zeros(15, 9, 12)}, "16"),
        ({"semantic": torch.zeros(3, 16, 9, 12)}, r"\[2, 16, H, W\]"),
        ({"semantic": torch.zeros(16, 5, 6)}, "interpolate"),
        ({"semantic": torch.zeros(16, 9, 12, dtype=torch.uint8)}, "torch.uint8; expected features in float16"),
        ({"semantic": torch.zeros(16, 9, 12, dtype=torch.float64)}, "torch.float64; expected features in float16"),
        ({"dtype": torch.bfloat16}, "float16 or torch.float32"),
        ({"dtype": "half"}, "dtype is half"),
        ({"video": 1}, "video is 1"),
        ({"as_texture": "yes"}, "as_texture is 'yes'"),
        ({"backend": "cpu"}, "'auto'"),
    ],
)
def test_bad_input(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        lod.feature_maps(**{"image": torch.zeros(2, 1, 9, 12), **arguments})


def test_auto_takes_the_shaders_where_they_were_measured(
    ctx: lod.Context, unseeded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = noise(1, 1024, 1024)
    fastest("gl", lod.feature_maps, image)
    assert lod.explain(lod.feature_maps, image[:, :400]).backend == "torch"  # too far from what was measured
    assert lod.explain(lod.feature_maps, image[..., :1023]).backend == "torch"  # ragged rows
    assert lod.explain(lod.feature_maps, image, dtype=torch.float16).backend == "gl"  # as the gain is large
    assert lod.explain(lod.feature_maps, image).backend == "gl"
    assert lod.explain(lod.feature_maps, image, backend="torch").reason == "asked for"
    assert lod.explain(lod.feature_maps, image, as_texture=True).backend == "gl"
    with monkeypatch.context() as patch:
        patch.setattr(ctx, "renderer", "a GPU")
        with pytest.warns(CalibrationWarning, match=r"another driver, .*gpu-lod calibrate"):
            assert "has not been measured" in lod.explain(lod.feature_maps, image).reason
        assert lod.explain(lod.feature_maps, image).backend == "torch"


def test_auto_reaches_torch_without_opengl(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastest("gl", lod.feature_maps, noise(1, 1024, 1024))

    def broken(*_: torch.Tensor) -> lod.Context:
        raise RuntimeError("no driver")

    monkeypatch.setattr("gpu_lod.dispatch.context_for", broken)
    chosen = lod.explain(lod.feature_maps, noise(1, 1024, 1024))
    assert chosen.backend == "torch" and "no driver" in chosen.reason
    image = noise(1, 9, 12)
    check(lod.feature_maps(image), truth(image))


def test_auto_takes_torch_under_transforms() -> None:
    gradient = torch.func.grad(lambda x: lod.feature_maps(x)[9].sum())(torch.rand(1, 9, 12))
    assert torch.allclose(gradient, torch.ones(1, 9, 12))


def test_the_comparer_can_say_no() -> None:
    """A channel that is off by what fp32 may not be is found, by its name."""
    image = noise(3, 17, 31)
    expected, right = truth(image), lod.feature_maps(image, backend="torch")
    for name, where in CHANNELS.items():
        maps = right.clone()
        maps[where][0, 5, 7] += 100 * TOLERANCES["features"][torch.float32] * max(1.0, float(maps[where].max()))
        with pytest.raises(AssertionError, match=name):
            check(maps, expected)


def test_the_saliency_alone_is_channel_5_whatever_is_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.rand(5, 3, 37, 29)
    expected = lod.feature_maps(image, backend="torch")[:, 5]
    for at_once in (1, 37 * 29 * 2, 2**20):
        monkeypatch.setattr(sys.modules["gpu_lod.feature_channels"], "AT_ONCE", at_once)
        found = sys.modules["gpu_lod.feature_channels"].saliency_map(image)
        assert torch.allclose(found, expected, atol=1e-6)
