"""What a program sets for its models changes no picture: autocast, the precision of products, the default dtype and
device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import CALLS, CASES
from images import noise
from scripts import succeed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpu_lod as lod
from gpu_lod import precision, vlm
from gpu_lod.salient_cells import saliency_cells


@contextlib.contextmanager
def low_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "products of bfloat16": low_products,
    "default float64": lambda: default(torch.float64),
    "default device": lambda: torch.device("meta"),
}
around = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


def test_the_settings_change_what_torch_makes() -> None:
    """Or the tests below would test nothing."""
    a, b = torch.randn(2, 256, 256).unbind()
    exact = a @ b
    for make in AROUND["autocast"], AROUND["products of bfloat16"]:
        with make():
            off = ((a @ b).float() - exact).abs().max()
        if make is AROUND["products of bfloat16"] and off < 1e-3:
            # Some CPUs take another way through it, which sums in another order, but in float32.
            pytest.skip("this CPU makes no such products in bfloat16")
        assert off > 1e-2


@around
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_verbs_keep_their_precision(name: str, backend: str, around: Callable[[], Any]) -> None:
    call = CALLS[name]
    arguments = call.arguments(*call.inputs())

    def run() -> list[torch.Tensor]:
        how = {"backend": backend} if call.backends else {}
        result = call.verb(*arguments, **how)
        if isinstance(result, lod.Pyramid):
            return list(result.levels)
        if isinstance(result, lod.Culled):
            return [result.mask, result.indices, result.pruned]
        return [result] if isinstance(result, torch.Tensor) else list(result)

    expected = run()
    with around():
        found = run()
    for got, wanted in zip(found, expected, strict=True):
        # Where products may be of fewer bits, other sums are taken.
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 if around is low_products else 0)


@around
@pytest.mark.parametrize("size", [(2, 3, 90, 100), (1, 3, 600, 700)], ids=str)
def test_energies_keep_their_precision(size: tuple[int, ...], around: Callable[[], Any]) -> None:
    """Small pictures are convolved with, larger ones multiplied."""
    image = noise(*size)
    expected = lod.oriented_energy(image.double().float(), 1, 4, backend="torch")[0]
    with around():
        found = lod.oriented_energy(image, 1, 4, backend="torch")[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@around
@pytest.mark.parametrize("name", ["oriented_energy", "mipmap", "gather_patches"])
@pytest.mark.parametrize("backend", ["gl", "torch"])
def test_gradients_keep_their_precision(name: str, backend: str, around: Callable[[], Any]) -> None:
    call = CALLS[name]
    (image,) = call.inputs()
    image.requires_grad_()

    def gradient() -> torch.Tensor:
        made = call.run(image, backend=backend)
        return torch.autograd.grad(sum(part.square().sum() for part in made), image)[0]  # type: ignore[arg-type]

    expected = gradient()
    with around():
        torch.testing.assert_close(gradient(), expected, rtol=1e-5, atol=1e-5)


@around
def test_saliency_keeps_its_precision(around: Callable[[], Any]) -> None:
    image = noise(1, 3, 64, 80)
    expected = saliency_cells(image, 16)
    with around():
        torch.testing.assert_close(saliency_cells(image, 16), expected, rtol=0, atol=1e-6)


@around
@pytest.mark.parametrize("name", lod.allocate.names())
def test_allocators_choose_the_same(name: str, around: Callable[[], Any]) -> None:
    """Given the relevance: without, ties of a saliency that is off in its last place may go otherwise."""
    allocator = lod.allocate.make(name, 60, 14)
    image, generator = noise(2, 3, 150, 210), torch.Generator().manual_seed(0)
    relevance = torch.rand(2, 11, 15, generator=generator)
    given: dict[str, Any] = {"query": torch.randn(2, allocator.query_width or 8, generator=generator)}
    given = {need: value for need, value in given.items() if need in allocator.needs}
    expected = allocator(image, relevance, **given)
    with around():
        found = allocator(image, relevance, **given)
    for part in ("sites", "scores", "patches", "weights"):
        got, wanted = getattr(found, part), getattr(expected, part)
        # A program that allows its products bfloat16 allows it blends, too.
        blends = part == "patches" and name == "SoftVortex" and around is low_products
        close = {"rtol": 0, "atol": 1e-2 if blends else 1e-6}
        if wanted is not None:
            torch.testing.assert_close(got, wanted, **close, msg=lambda text, part=part: f"{part}: {text}")


def _states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


TOKENS, ATTENDED = _states(2, 200, 64), _states(2, 200).exp()
WORDS, LOOKS, FEATURES, QUERY = _states(2, 12, 64), _states(2, 12, 200).exp(), _states(2, 9, 10, 64), _states(64)
torch.manual_seed(0)  # now and then two scores of other pictures are a rounding apart, and their tokens change places
PICTURES, MAPS = noise(2, 3, 150, 210), _states(2, 11, 15)
SITES = _states(2, 200, 3).sigmoid()


def _glances() -> list[torch.Tensor]:
    found = vlm.glances(lod.allocate.Wavelet(20, 14), PICTURES, MAPS)
    look = vlm.Glances(20, lod.allocate.Wavelet(10, 14), threshold=0, patch=14)
    looked = look(PICTURES, MAPS, ATTENDED[:, :20])
    first = look.first(PICTURES)
    parts = [(tokens.sites, tokens.patches) for tokens in (*found, looked.tokens, first)]
    return [part for pair in parts for part in pair if part is not None]


CHOICES: dict[str, Callable[[], Any]] = {
    "vision_zip": lambda: vlm.vision_zip(TOKENS, TOKENS, ATTENDED, 20, 10),
    "bipartite_merge": lambda: vlm.bipartite_merge(TOKENS, TOKENS, 90),
    "sparse_vlm": lambda: vlm.sparse_vlm(TOKENS, WORDS, LOOKS, 20, 10),
    "query_similarity": lambda: [vlm.query_similarity(FEATURES, QUERY)],
    "straight_through_top_k": lambda: list(vlm.straight_through_top_k(ATTENDED, 20)),
    "coverage_loss": lambda: [lod.allocate.coverage_loss(SITES, ATTENDED)],
    "repulsion_loss": lambda: [lod.allocate.repulsion_loss(SITES[..., :2])],
    "dead_bin_loss": lambda: [lod.allocate.dead_bin_loss(ATTENDED)],
    "glances": _glances,
    "rotary_embedding": lambda: list(vlm.rotary_embedding(SITES[..., :2], vlm.axial_frequencies(64))),
    "TokenMemory": lambda: [vlm.TokenMemory(20, 14).update(PICTURES).tokens.patches],
}


@around
@pytest.mark.parametrize("name", CHOICES)
def test_choices_among_tokens_keep_their_precision(name: str, around: Callable[[], Any]) -> None:
    def run() -> list[torch.Tensor]:
        found = CHOICES[name]()
        return found if isinstance(found, list) else [found.tokens, found.sizes, found.indices, found.owner]

    expected = run()
    with around():
        found = run()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_allocators_compile_under_autocast() -> None:
    image = noise(1, 3, 90, 120)
    run = torch.compile(lambda x: lod.allocate.Downsample(20, 14)(x).patches, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        found = run(image)
    torch.testing.assert_close(found, lod.allocate.Downsample(20, 14)(image).patches)


class NoDefault(TorchDispatchMode):
    """Refuses what is made in the default dtype, which is bfloat16 where nobody else has that."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        made = {tensor.dtype for tensor in tree_leaves(found) if isinstance(tensor, torch.Tensor)}
        assert torch.bfloat16 not in made, f"{op} makes numbers of the default dtype"
        return found


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_verbs_make_nothing_of_the_default_dtype(name: str, backend: str) -> None:
    call = CALLS[name]
    arguments = call.arguments(*call.inputs())
    with default(torch.bfloat16), NoDefault():
        call.verb(*arguments, **({"backend": backend} if call.backends else {}))


@pytest.mark.parametrize("given", [True, False], ids=["relevance given", "picture alone"])
@pytest.mark.parametrize("name", lod.allocate.names())
def test_allocators_make_nothing_of_the_default_dtype(name: str, given: bool) -> None:
    """Three digits of where a token is: to arange(n) / n, torch gives the default dtype."""
    allocator = lod.allocate.make(name, 60, 14)
    image, relevance = noise(1, 3, 150, 210), torch.rand(1, 11, 15)
    more = {"query": torch.rand(1, allocator.query_width or 8)} if "query" in allocator.needs else {}
    with default(torch.bfloat16), NoDefault():
        allocator(image, relevance if given else None, **more)


@pytest.mark.parametrize(
    ("setting", "value", "kind", "device", "exact"),
    [
        ("torch.backends.mkldnn.matmul.fp32_precision", "bf16", "matmul", "cpu", False),
        ("torch.backends.mkldnn.conv.fp32_precision", "bf16", "conv", "cpu", False),
        ("torch.backends.cuda.matmul.fp32_precision", "tf32", "matmul", "cuda", False),
        ("torch.backends.cudnn.conv.fp32_precision", "tf32", "conv", "cuda", False),
        ("torch.backends.cudnn.conv.fp32_precision", "ieee", "conv", "cuda", True),
    ],
)
def test_what_is_exact(setting: str, value: str, kind: str, device: str, exact: bool) -> None:
    """In a process of its own: torch minds if both of its ways to say so were used."""
    code = f"import torch; from gpu_lod import precision; {setting} = {value!r}\n"
    code += f"print(precision.exact({kind!r}, torch.device({device!r})))"
    assert succeed(code).strip() == str(exact)


def test_products_are_exact_if_nobody_says_otherwise() -> None:
    assert all(precision.exact(kind, torch.device("cpu")) for kind in ("matmul", "conv"))
    assert not precision.exact("conv", torch.device("cuda"))
    factor = torch.ones(2, 2)
    assert precision.factor(factor) is factor
    with low_products():  # whether this CPU would take fewer bits or not
        assert not precision.exact("matmul", torch.device("cpu"))
        assert precision.factor(factor).dtype == torch.float64


def test_before_there_were_precisions_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.9, on settings that stand for those of a GPU."""
    for backend, kind in ((torch.backends.mkldnn, "conv"), (torch.backends.cuda, "matmul")):
        monkeypatch.setattr(backend, kind, object())
    monkeypatch.setattr(torch.backends.cudnn, "conv", object())
    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        assert precision.exact("conv", torch.device("cpu"))
        assert precision.exact("conv", torch.device("cuda")) is not allowed
    for word in ("highest", "high"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda word=word: word)
        assert precision.exact("matmul", torch.device("cuda")) is (word == "highest")
