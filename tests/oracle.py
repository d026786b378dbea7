"""Float64 oracles, written from the definitions and sharing no code with the package."""

from __future__ import annotations

import functools
import math

import torch


@functools.cache
def halving_matrix(n: int) -> torch.Tensor:
    """[m, n] float64, sparse: the exact area average along a side of n, as a matrix."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64).to_sparse()
    m, taps = n // 2, 2 + n % 2
    i = torch.arange(m, dtype=torch.float64)
    shares = [(m - i) / n, torch.full_like(i, m / n), (i + 1) / n] if n % 2 else [torch.full_like(i, 0.5)] * 2
    row = torch.arange(m).repeat(taps)
    column = torch.cat([2 * torch.arange(m) + tap for tap in range(taps)])
    return torch.sparse_coo_tensor(torch.stack([row, column]), torch.cat(shares), (m, n), check_invariants=True)


def _halved(x: torch.Tensor, dim: int) -> torch.Tensor:
    first = x.movedim(dim, 0)
    matrix = halving_matrix(len(first))
    return (matrix @ first.flatten(1)).unflatten(1, first.shape[1:]).movedim(0, dim)


def mean_chain(image: torch.Tensor, levels: int | None = None) -> list[torch.Tensor]:
    """Level by level in float64, never rounded."""
    chain = [image.double()]
    count = max(image.shape[-2:]).bit_length() if levels is None else levels
    while len(chain) < count:
        chain.append(_halved(_halved(chain[-1], -2), -1).contiguous())
    return chain


def extreme_chain(image: torch.Tensor, reduce: str, levels: int | None = None) -> list[torch.Tensor]:
    """Each texel from all level-above texels of its footprint, by definition; small images only."""
    take = torch.amax if reduce == "max" else torch.amin
    chain = [image.double()]
    count = max(image.shape[-2:]).bit_length() if levels is None else levels
    while len(chain) < count:
        above = chain[-1]
        h, w = above.shape[-2:]
        rows = [take(above[..., a:b, :], dim=-2, keepdim=True) for a, b in _footprints(h)]
        tall = torch.cat(rows, dim=-2)
        chain.append(torch.cat([take(tall[..., a:b], dim=-1, keepdim=True) for a, b in _footprints(w)], dim=-1))
    return chain


def _footprints(n: int) -> list[tuple[int, int]]:
    if n == 1:
        return [(0, 1)]
    return [(2 * i, 2 * i + 2 + n % 2) for i in range(n // 2)]


def binomial_matrix(n: int) -> torch.Tensor:
    """[ceil(n/2), n] float64: every other sample of the 5-tap binomial, mirrored about the outermost samples."""
    weights = torch.zeros(-(-n // 2), n, dtype=torch.float64)
    for i in range(weights.shape[0]):
        for k, weight in zip(range(-2, 3), (1, 4, 6, 4, 1), strict=True):
            weights[i, _mirrored(2 * i + k, n)] += weight / 16
    return weights


def _mirrored(i: int, n: int) -> int:
    while not 0 <= i < n:
        i = 0 if n == 1 else -i if i < 0 else 2 * (n - 1) - i
    return i


def expansion_matrix(n: int) -> torch.Tensor:
    """[n, ceil(n/2)] float64: zeros between the samples, twice the binomial; mirrored before, repeated after."""
    m = -(-n // 2)
    weights = torch.zeros(n, m, dtype=torch.float64)
    for i in range(n):
        for j in range(-1, m + 1):
            k = i - 2 * j
            if -2 <= k <= 2:
                source = min(1, m - 1) if j == -1 else min(j, m - 1)
                weights[i, source] += (1, 4, 6, 4, 1)[k + 2] / 8
    return weights


def gaussian_chain(image: torch.Tensor, levels: int | None = None) -> list[torch.Tensor]:
    chain = [image.double()]
    while chain[-1].shape[-2:] != (1, 1) if levels is None else len(chain) < levels:
        above = chain[-1]
        chain.append(binomial_matrix(above.shape[-2]) @ above @ binomial_matrix(above.shape[-1]).T)
    return chain


def laplacian_chain(image: torch.Tensor, levels: int | None = None) -> list[torch.Tensor]:
    chain = gaussian_chain(image, levels)
    for level in range(len(chain) - 1):
        height, width = chain[level].shape[-2:]
        chain[level] = chain[level] - expansion_matrix(height) @ chain[level + 1] @ expansion_matrix(width).T
    return chain


def second_derivative(angle: float, *, flat: bool = True) -> torch.Tensor:
    """[9, 9] float64, rows y: Freeman and Adelson's G2 along (cos, sin) of `angle`, in rotated coordinates.

    Args:
        flat: with its mean taken away, as a multiple of the Gaussian.
    """
    u, gaussian = _rotated(angle)
    kernel = 0.9213 * (2 * u * u - 1) * gaussian
    return kernel - gaussian * (kernel.sum() / gaussian.sum()) if flat else kernel


def hilbert_transform(angle: float) -> torch.Tensor:
    """[9, 9] float64: H2, the quadrature partner of G2."""
    u, gaussian = _rotated(angle)
    return 0.9780 * (u**3 - 2.254 * u) * gaussian


def _rotated(angle: float) -> tuple[torch.Tensor, torch.Tensor]:
    at = 0.67 * torch.arange(-4, 5, dtype=torch.float64)
    y, x = torch.meshgrid(at, at, indexing="ij")
    return x * math.cos(angle) + y * math.sin(angle), torch.exp(-x * x - y * y)


def dense(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """[..., n, h, w]: [..., h, w] correlated with each of n square kernels in two dimensions, mirrored about the
    outermost samples."""
    height, width = x.shape[-2:]
    reach = kernels.shape[-1] // 2
    rows = torch.tensor([_mirrored(i, height) for i in range(-reach, height + reach)])
    columns = torch.tensor([_mirrored(i, width) for i in range(-reach, width + reach)])
    padded = x.double()[..., rows, :][..., columns].reshape(-1, 1, height + 2 * reach, width + 2 * reach)
    return torch.nn.functional.conv2d(padded, kernels[:, None]).view(*x.shape[:-2], -1, height, width)


def oriented_energy(image: torch.Tensor, levels: int | None = None, orientations: int = 4) -> list[torch.Tensor]:
    """[..., orientations, h, w] of each level, each angle by a filter of its own."""
    angles = [math.pi * k / orientations for k in range(orientations)]
    even, odd = (torch.stack([make(angle) for angle in angles]) for make in (second_derivative, hilbert_transform))
    return [dense(x, even) ** 2 + dense(x, odd) ** 2 for x in gaussian_chain(image, levels)]


def log_polar(
    levels: list[torch.Tensor],
    fixation: torch.Tensor,
    rings: int,
    wedges: int,
    r_min: float | None = None,
    r_max: float = 0.7,
    spacing: str = "log",
    e0: float = 0.05,
    border: str = "clamp",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, C, rings, wedges] in float64, with the largest texel difference and the level difference at each sample."""
    levels = [level.double() for level in levels]
    batch, _, height, width = levels[0].shape
    longer = max(height, width)
    t = (torch.arange(rings, dtype=torch.float64) + 0.5) / rings
    if spacing == "log":
        r_min = 0.01 if r_min is None else r_min
        radius = r_min * (r_max / r_min) ** t
        step = radius * math.log(r_max / r_min) / rings
    else:
        radius = e0 * ((1 + r_max / e0) ** t - 1)
        step = (radius + e0) * math.log(1 + r_max / e0) / rings
    footprint = torch.maximum(2 * math.pi * radius / wedges, step)
    lod = (longer * footprint).log2().clamp(0, len(levels) - 1)[:, None].expand(rings, wedges)
    theta = 2 * math.pi * (torch.arange(wedges, dtype=torch.float64) + 0.5) / wedges
    results, textures, blends = [], [], []
    for image in range(batch):
        fx, fy = fixation[image].double()
        x = fx + radius[:, None] * theta.cos() * longer / width
        y = fy + radius[:, None] * theta.sin() * longer / height
        fine = lod.floor().long()
        coarse = (fine + 1).clamp(max=len(levels) - 1)
        a, da = _bilinear([level[image] for level in levels], fine, x, y)
        b, db = _bilinear([level[image] for level in levels], coarse, x, y)
        value = a + (b - a) * (lod - fine)
        if border == "zero":
            value = value * ((x >= 0) & (x <= 1) & (y >= 0) & (y <= 1))
        results.append(value)
        textures.append(torch.maximum(da, db))
        blends.append((b - a).abs())
    return torch.stack(results), torch.stack(textures), torch.stack(blends)


def _bilinear(
    levels: list[torch.Tensor], which: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    channels = levels[0].shape[0]
    value = torch.zeros(channels, *x.shape, dtype=torch.float64)
    spread = torch.zeros_like(value)
    for index, level in enumerate(levels):
        mine = which == index
        if not mine.any():
            continue
        h, w = level.shape[-2:]
        u, v = (x * w - 0.5), (y * h - 0.5)
        x0, y0 = u.floor(), v.floor()
        fu, fv = u - x0, v - y0
        taps = [
            level[:, (y0 + j).clamp(0, h - 1).long(), (x0 + i).clamp(0, w - 1).long()] for j in (0, 1) for i in (0, 1)
        ]
        top = taps[0] + (taps[1] - taps[0]) * fu
        bottom = taps[2] + (taps[3] - taps[2]) * fu
        value = torch.where(mine, top + (bottom - top) * fv, value)
        stacked = torch.stack(taps)
        spread = torch.where(mine, stacked.amax(0) - stacked.amin(0), spread)
    return value, spread


def inverse_log_polar(
    polar: torch.Tensor,
    fixation: torch.Tensor,
    size: tuple[int, int],
    r_min: float | None = None,
    r_max: float = 0.7,
    spacing: str = "log",
    e0: float = 0.05,
    border: str = "zero",
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, C, H, W] in float64, and the spread of the four texels that each pixel is blended from."""
    polar = polar.double()
    batch, channels, rings, wedges = polar.shape
    height, width = size
    result = torch.zeros(batch, channels, height, width, dtype=torch.float64)
    spread = torch.zeros_like(result)
    start = 0.01 if r_min is None else r_min
    for image in range(batch):
        fx, fy = (float(value) for value in fixation[image])
        for row in range(height):
            for column in range(width):
                dx = ((column + 0.5) / width - fx) * width / max(size)
                dy = ((row + 0.5) / height - fy) * height / max(size)
                r = math.hypot(dx, dy)
                if border == "zero" and r > r_max:
                    continue
                if spacing == "log":
                    k = rings * math.log(max(r, 1e-30) / start) / math.log(r_max / start) - 0.5
                else:
                    k = rings * math.log(1 + r / e0) / math.log(1 + r_max / e0) - 0.5
                j = wedges * (math.atan2(dy, dx) % (2 * math.pi)) / (2 * math.pi) - 0.5
                k = min(max(k, 0.0), rings - 1)
                k0, j0 = min(int(k), rings - 1), math.floor(j)
                k1 = min(k0 + 1, rings - 1)
                taps = [polar[image, :, a, b % wedges] for a in (k0, k1) for b in (j0, j0 + 1)]
                near, far = taps[0] + (taps[1] - taps[0]) * (j - j0), taps[2] + (taps[3] - taps[2]) * (j - j0)
                result[image, :, row, column] = near + (far - near) * (k - k0)
                stacked = torch.stack(taps)
                spread[image, :, row, column] = stacked.amax(0) - stacked.amin(0)
    return result, spread


def gather_patches(
    levels: list[torch.Tensor], sites: torch.Tensor, patch: int, border: str = "clamp", bias: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, K, C, P, P] in float64, with the largest texel difference and the level difference at each sample."""
    levels = [level.double() for level in levels]
    batch, _, height, width = levels[0].shape
    results = []
    for image in range(batch):
        mine = [level[image] for level in levels]
        for x, y, level in sites[image if len(sites) > 1 else 0].double().tolist():
            steps = (torch.arange(patch, dtype=torch.float64) - (patch - 1) / 2) * 2**level
            across = (x * width + steps).expand(patch, patch) / width
            down = (y * height + steps)[:, None].expand(patch, patch) / height
            read = min(max(level + bias, 0.0), len(levels) - 1)
            fine = torch.full((patch, patch), int(read))
            a, da = _bilinear(mine, fine, across, down)
            b, db = _bilinear(mine, (fine + 1).clamp(max=len(levels) - 1), across, down)
            value = a + (b - a) * (read - int(read))
            if border == "zero":
                value = value * ((across >= 0) & (across <= 1) & (down >= 0) & (down <= 1))
            results.append(torch.stack([value, torch.maximum(da, db), (b - a).abs()]))
    stacked = torch.stack(results).unflatten(0, (batch, -1))
    return stacked[:, :, 0], stacked[:, :, 1], stacked[:, :, 2]


def _pixels(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y of every pixel's centre, [H, W] each, in [0, 1]."""
    x = ((torch.arange(width, dtype=torch.float64) + 0.5) / width).expand(height, width)
    y = ((torch.arange(height, dtype=torch.float64) + 0.5) / height)[:, None].expand(height, width)
    return x, y


def foveate(
    levels: list[torch.Tensor], fixation: torch.Tensor, e0: float = 0.05, bias: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, C, H, W] in float64, with the largest texel difference and the level difference at each sample."""
    levels = [level.double() for level in levels]
    batch, _, height, width = levels[0].shape
    x, y = _pixels(height, width)
    results = []
    for image in range(batch):
        fx, fy = fixation[image].double()
        e = torch.hypot((x - fx) * width, (y - fy) * height) / max(height, width)
        lod = (((e + e0) / e0).log2() + bias).clamp(0, len(levels) - 1)
        fine = lod.floor().long()
        mine = [level[image] for level in levels]
        a, da = _bilinear(mine, fine, x, y)
        b, db = _bilinear(mine, (fine + 1).clamp(max=len(levels) - 1), x, y)
        results.append(torch.stack([a + (b - a) * (lod - fine), torch.maximum(da, db), (b - a).abs()]))
    stacked = torch.stack(results)
    return stacked[:, 0], stacked[:, 1], stacked[:, 2]


def probes(
    levels: list[torch.Tensor], fixation: torch.Tensor, anisotropy: float, e0: float = 0.05, bias: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Anisotropic foveation as EXT_texture_filter_anisotropic filters: of a footprint of Pmax along the radius and Pmin
    across it, N = min(ceil(Pmax / Pmin), maxAniso) trilinear samples at log2(Pmax / N), at i / (N + 1) - 1/2 of the
    footprint for i of 1..N; a level below 0 is level 0. Pmax is 2^level pixels, Pmin that over the anisotropy, maxAniso
    16. In float64, with the largest texel difference and the level difference of each sample, of which means are taken.
    """
    levels = [level.double() for level in levels]
    batch, _, height, width = levels[0].shape
    x, y = _pixels(height, width)
    results = []
    for image in range(batch):
        fx, fy = fixation[image].double()
        across, down = (x - fx) * width, (y - fy) * height
        pixels = torch.hypot(across, down)
        level = (1 + pixels / max(height, width) / e0).log2().add(bias).clamp(min=0)
        longest = 2**level
        count = min(math.ceil(anisotropy - 1e-9), 16)
        read = (longest / count).log2().clamp(0, len(levels) - 1)
        fine = read.floor().long()
        mine = [one[image] for one in levels]
        parts = []
        for i in range(1, count + 1):
            along = longest * (i / (count + 1) - 0.5)
            turned = torch.where(pixels > 0, along / pixels, 0.0)
            at = x + across * turned / width, y + down * turned / height
            a, da = _bilinear(mine, fine, *at)
            b, db = _bilinear(mine, (fine + 1).clamp(max=len(levels) - 1), *at)
            parts.append(torch.stack([a + (b - a) * (read - fine), torch.maximum(da, db), (b - a).abs()]))
        results.append(torch.stack(parts).mean(0))
    stacked = torch.stack(results)
    return stacked[:, 0], stacked[:, 1], stacked[:, 2]
