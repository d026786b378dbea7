"""README and docs: links lead somewhere, and the Python there runs, block after block."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from skimage import data

import gpu_lod as lod
from gpu_lod.allocate import base

CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = [
    CHECKOUT / "README.md",
    CHECKOUT / "CONTRIBUTING.md",
    CHECKOUT / "CHANGELOG.md",
    *(CHECKOUT / "docs").glob("*.md"),
]


# -- links -------------------------------------------------------------------------------------------------------------


def links(text: str) -> list[str]:
    """What Markdown links to, pictures too, but for other sites."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in found if not link.startswith(("https://", "http://"))]


def anchors(text: str) -> set[str]:
    """Those of the headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def dead(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        there = target.exists() and (not anchor or anchor in anchors(target.read_text("utf-8")))
        if not there or not target.is_relative_to(CHECKOUT):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead(page)


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links((CHECKOUT / "README.md").read_text("utf-8"))}
    assert {page.relative_to(CHECKOUT).as_posix() for page in PAGES} - linked == {"README.md"}


def test_dead_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.CHECKOUT", tmp_path)
    (tmp_path / "b.md").write_text("# 0.1 ms, `here`?\n```python\n# no heading\n```\n")
    (tmp_path / "a.md").write_text(
        "[x](b.md) [x](b.md#01-ms-here) [x](c.md) [x\ny](b.md#no-heading) ![x](https://c.d) `[x](e)` [x](#here)\n"
        "# Here\n"
        f"[x](../{tmp_path.name}.md)"
    )
    tmp_path.with_suffix(".md").touch()
    assert dead(tmp_path / "a.md") == ["c.md", "b.md#no-heading", f"../{tmp_path.name}.md"]


# -- code --------------------------------------------------------------------------------------------------------------


class Processor:
    """What an image processor of transformers says."""

    image_mean = image_std = (0.5, 0.5, 0.5)


def readme() -> dict[str, Any]:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        image_size=224, patch_size=16, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2
    )
    Image.fromarray(data.astronaut()).save("photo.jpg")
    return {"model": SiglipVisionModel(config).eval(), "processor": Processor()}


def encoders() -> dict[str, Any]:
    """Models of the kinds that the page begins with, small, and what a user has."""
    from test_vlm_qwen import IMAGE, qwen25
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": 100, "bos_token_id": 98, "eos_token_id": 99}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config={**small, "image_size": 224, "patch_size": 14}))
    words = {"input_ids": torch.tensor([[1, 5, 99]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    return {
        "image": torch.rand(1, 3, 512, 512), "clip": clip.eval(), "processor": Processor(), "qwen": qwen25(side=14),
        "tokenizer": lambda texts, return_tensors: words, "input_ids": torch.tensor([[5, IMAGE, 7]]),
        "video": torch.rand(2, 3, 252, 336),
    }  # fmt: skip


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": readme,
    "docs/allocators.md": lambda: {
        "allocator": lod.allocate.GridTopK(9, 14), "image": torch.rand(1, 3, 140, 140),
        "relevance": torch.rand(1, 10, 10), "next_image": torch.rand(1, 3, 140, 140),
        "next_relevance": torch.rand(1, 10, 10),
    },
    "docs/cuda.md": dict,
    "docs/encoders.md": encoders,
    "docs/gradients.md": dict,
    "docs/usage.md": dict,
}  # fmt: skip
"""What the blocks of a page may take for granted, page by page."""
ON_A_GPU = ["docs/cuda.md"]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (CHECKOUT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def run(page: str) -> dict[str, Any]:
    """The names that there are when all blocks of a page have run."""
    names = {"torch": torch, "lod": lod, **GIVEN[page]()}
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own; nothing that a page registers stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for name, kind in list(base.kinds.items()):
        monkeypatch.setitem(base.kinds, name, kind)
    monkeypatch.setitem(base.kinds, "Middle", None)
    monkeypatch.delitem(base.kinds, "Middle")


def test_every_page_with_code_is_run() -> None:
    pages = [page.relative_to(CHECKOUT).as_posix() for page in PAGES]
    assert sorted(filter(blocks, pages)) == sorted(GIVEN)


@pytest.mark.usefixtures("one_thread", "elsewhere")
@pytest.mark.parametrize("page", sorted(GIVEN.keys() - ON_A_GPU - {"README.md", "docs/gradients.md"}))
def test_code_runs(page: str) -> None:
    run(page)


@pytest.mark.gpu
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", ON_A_GPU)
def test_code_for_a_gpu_runs(page: str) -> None:
    run(page)


@pytest.mark.usefixtures("one_thread", "elsewhere")
def test_the_readme_runs_and_shapes_are_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("README.md")
    with Image.open("seen.png") as seen:
        assert seen.size == (512, 512) and "torch" in capsys.readouterr().out
    assert names["retina"].shape == (1, 3, 256, 512) and names["sites"].shape == (273, 3)
    assert names["patches"].shape == names["tokens"].patches.shape == (1, 273, 3, 14, 14)
    assert names["picture"].shape == (1, 3, 1024, 1024)
    assert names["encoded"].features.shape == (1, 529, 32) and names["encoded"].tokens.sites.shape == (1, 529, 3)


@pytest.mark.usefixtures("one_thread", "elsewhere")
def test_gradients_shapes_are_as_the_page_says() -> None:
    names = run("docs/gradients.md")
    assert names["polar"].shape == (1, 3, 16, 32) and names["small"].shape == (1, 3, 8, 10)
    assert isinstance(names["pyramid"], lod.Pyramid) and names["each"].shape == (5, 3, 16, 32)
