"""What counts as torch's result, and what does not."""

import pytest
import torch
from images import noise

import gpu_lod as lod
from gpu_lod.agreement import FAR, difference

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_rounding_is_none_and_more_is(dtype: torch.dtype) -> None:
    truth = noise(2, 3, 5, 7, dtype=dtype)
    top = float(truth.float().max())
    near, far = (truth.float().clone() for _ in range(2))
    near[0, 0, 0, 0] = max(float(near[0, 0, 0, 0]) - 0.8 * FAR * top, 0)
    far[1, 2, 4, 6] = top * 1.5 if float(truth[1, 2, 4, 6]) > top / 2 else top
    assert difference(truth.clone(), truth) == difference(near.to(dtype), truth) == ""
    assert "at most, where values are up to" in difference((far.clamp(max=255)).to(dtype), truth)


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"),
    [
        ([NAN, INF, -INF, 1.0], [NAN, INF, -INF, 1.0], True),
        ([0.0, INF, -INF, 1.0], [NAN, INF, -INF, 1.0], False),
        ([NAN, INF, -INF, 1.0], [0.0, INF, -INF, 1.0], False),
        ([NAN, -INF, -INF, 1.0], [NAN, INF, -INF, 1.0], False),
        ([NAN, 1.0, -INF, 1.0], [NAN, INF, -INF, 1.0], False),
        ([0.0, -0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], True),
        ([0.0, 1e-30, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], False),
    ],
)
def test_what_is_not_finite(ours: list[float], theirs: list[float], alike: bool) -> None:
    assert (difference(torch.tensor(ours), torch.tensor(theirs)) == "") == alike


def test_a_filter_of_its_own_is_compared_on_average() -> None:
    truth = torch.ones(64, 64)
    one, all_of_them = truth.clone(), truth + 0.5
    one[0, 0] = 3.0
    assert difference(one, truth) and not difference(one, truth, own_filter=True)
    assert "0.5 on average" in difference(all_of_them, truth, own_filter=True)


def test_parts_are_named() -> None:
    image = noise(1, 16, 16)
    hz = lod.hiz(image, backend="torch")
    levels = [level.clone() for level in hz.levels]
    levels[-1] += 1
    assert difference(lod.Pyramid(tuple(levels), "max"), hz).startswith("level 4: 1 at most")
    assert difference(hz[1:], hz.levels).startswith("4 tensors, expected 5")
    assert difference([image, image + 1], (image, image)).startswith("part 1: 1 at most")
    culled = lod.cull(hz, 0.5, backend="torch")
    assert difference(lod.cull(hz, 0.5, backend="gl"), culled) == ""
    other = lod.cull(hz, 0.6, backend="torch")
    assert "mask: " in difference(other, culled) and "are others" in difference(other, culled)


def test_another_shape_or_dtype() -> None:
    image = noise(2, 4, 4)
    assert difference(image[:1], image) == "torch.float32 of (1, 4, 4), expected torch.float32 of (2, 4, 4)"
    assert difference(image.half(), image).startswith("torch.float16 of")
    assert difference(image[:0], image[:0]) == ""
    assert difference(torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2])) == "2 of 3 are others"


def test_infinities_of_the_truth_excuse_nothing() -> None:
    """The scale is that of finite values."""
    assert difference(torch.tensor([1.0, INF]), torch.tensor([2.0, INF])) == "1 at most, where values are up to 2"
    assert difference(torch.tensor([1.0, -INF]), torch.tensor([2.0, -INF]))
