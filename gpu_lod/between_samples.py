"""Samples read between them by products with matrices of weights: in plain torch on a CPU, for those who need not keep
what is not finite where it is.

Most weights of such a matrix are 0. Small levels have one for each side, and two products take less time than the dozen
operations on strided views that sums are; larger ones are made block by block, all by the same small matrix.

What is read is the same to the bit however many images there are, though libraries add in other orders for other sizes.
Large levels are made an image at a time. Small ones are shortened by the bits that weights have: products are exact
then, and a sum of two is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_lod.cached import constant

ROWS = 16
"""That a product makes of a block."""
SAMPLES = 8
"""Of a row of a block, that a product reads between."""
_SMALL = 128
"""Pixels along the longer side up to which one matrix makes all."""
_CPU = torch.device("cpu")


def spread(samples: torch.Tensor, factor: int, out: torch.Tensor, *, signs: bool = False) -> None:
    """Samples [B, h, w], 2 or 4 pixels apart, read at every pixel from the first on: out [B, n ROWS, m SAMPLES factor].
    Beyond the last ones are these.

    Args:
        signs: every other row is made of the other sign.
    """
    tall, wide = out.shape[1:]
    if max(tall, wide) <= _SMALL:
        lines = torch.matmul(_short(samples, factor), _between(wide, samples.shape[2], factor, across=True))
        weights = _between(tall, samples.shape[1], factor, signs=signs).expand(len(out), -1, -1)
        torch.bmm(weights, _short(lines, factor), out=out)
        return
    rows, columns, step = tall // factor + 1, wide // factor + 1, ROWS // factor
    samples = F.pad(samples, (0, columns - samples.shape[2], 0, rows - samples.shape[1]), mode="replicate")
    longer = _LONGER[factor, signs].expand(tall // ROWS, -1, -1)
    for image, blocks in zip(samples, out.unflatten(1, (-1, ROWS)), strict=True):
        windows = image.unfold(1, SAMPLES + 1, SAMPLES).reshape(-1, SAMPLES + 1)
        lines = torch.mm(windows, _WIDER[factor]).view(rows, wide)
        torch.bmm(longer, lines.unfold(0, step + 1, step).transpose(1, 2), out=blocks)


def _short(values: torch.Tensor, factor: int) -> torch.Tensor:
    """Without the last bits, which a product with 3/4 has no room for; one with a half has."""
    return values.view(torch.int32).bitwise_and(-factor).view(torch.float32) if factor > 2 else values


def _between(n: int, samples: int, factor: int, *, across: bool = False, signs: bool = False) -> torch.Tensor:
    """[n, samples], the weights of samples that are `factor` pixels apart in n pixels from the first on; or the other
    way round."""
    return constant(_CPU, _weights, n, samples, factor, across, signs)


def _weights(n: int, samples: int, factor: int, across: bool, signs: bool) -> torch.Tensor:
    matrix = torch.zeros(n, samples, dtype=torch.float32, device="cpu")
    pixels = torch.arange(n, device="cpu")
    share = (pixels % factor).float() / factor
    for step, weight in enumerate((1 - share, share)):
        matrix.index_put_((pixels, (pixels // factor + step).clamp(max=samples - 1)), weight, accumulate=True)
    if signs:
        matrix[1::2].neg_()
    return matrix.t().contiguous() if across else matrix


_WIDER = {factor: _weights(SAMPLES * factor, SAMPLES + 1, factor, True, False) for factor in (2, 4)}
_LONGER = {
    (factor, signs): _weights(ROWS, ROWS // factor + 1, factor, False, signs)
    for factor in (2, 4)
    for signs in (False, True)
}
