"""The shader loader, without GL; and compile errors, with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import reference_compiler
import torch

import gpu_lod as lod
from gpu_lod import glstate, shaders
from gpu_lod.errors import ShaderError
from gpu_lod.program import Program, Programs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Shader files of the test's own: folder(**{"name": text}) with dots written as underscores."""

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(shaders, "files", lambda _: tmp_path)
    return write


def test_every_shader_assembles() -> None:
    names = shaders.names()
    assert "log_polar.comp" in names
    assert not any(name.endswith(".py") for name in names)
    for name in names:
        if not name.endswith(".glsl"):
            assert shaders.source(name, PER_WORD=1).text.lstrip().startswith("#version 430")


def test_a_borrowed_context_gets_back_every_binding_that_a_shader_uses() -> None:
    lines = [line for name in shaders.names() for line in files(shaders).joinpath(name).read_text().splitlines()]
    used = [int(number) for line in lines if " buffer " in line for number in re.findall(r"binding = (\d+)", line)]
    assert len(used) > 20 and max(used) == glstate.STORAGE_BINDINGS - 1


def test_includes_are_recursive_and_once(folder: Callable[..., None]) -> None:
    folder(
        {
            "main.comp": '#version 430\n#include "a.glsl"\n#include "b.glsl" // again\nint m;\n',
            "a.glsl": '#include "b.glsl"\nint a;\n',
            "b.glsl": "int b;\n",
        }
    )
    source = shaders.source("main.comp")
    assert source.text.count("int b;") == 1
    assert source.files == ("main.comp", "a.glsl", "b.glsl")


def test_cycle(folder: Callable[..., None]) -> None:
    folder(
        {
            "main.comp": '#version 430\n#include "a.glsl"\n',
            "a.glsl": '#include "b.glsl"\n',
            "b.glsl": '#include "a.glsl"\n',
        }
    )
    with pytest.raises(ShaderError, match=r"main\.comp -> a\.glsl -> b\.glsl -> a\.glsl"):
        shaders.source("main.comp")


def test_unknown_names_list_the_choices(folder: Callable[..., None]) -> None:
    folder({"main.comp": '#version 430\n#include "typo.glsl"\n', "real.glsl": ""})
    with pytest.raises(ShaderError, match=r"'typo\.glsl', included from main\.comp; there are main\.comp, real\.glsl"):
        shaders.source("main.comp")
    with pytest.raises(ShaderError, match=r"there is no shader 'none\.comp'"):
        shaders.source("none.comp")


def test_no_version(folder: Callable[..., None]) -> None:
    folder({"main.comp": "int a;\n"})
    with pytest.raises(ShaderError, match="#version"):
        shaders.source("main.comp")


def test_defines(folder: Callable[..., None]) -> None:
    folder({"main.comp": "// words\n#version 430\nint a;\n"})
    text = shaders.source("main.comp", YES=True, NO=False, NONE=None, SIZE=64).text
    assert "#define YES 1\n" in text
    assert "#define SIZE 64\n" in text
    assert "NO" not in text
    assert text.index("#version") < text.index("#define")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("0:20003(5): error: `x' undeclared", "b.glsl:3: error: `x' undeclared"),
        ("0(10002) : error C1503: undefined", "a.glsl:2 : error C1503: undefined"),
        ("ERROR: 0:2: 'y' : undeclared", "ERROR: main.comp:2: 'y' : undeclared"),
        ("link: 3 samplers", "link: 3 samplers"),
    ],
    ids=["mesa", "nvidia", "angle", "none"],
)
def test_translate(log: str, expected: str) -> None:
    assert shaders.Source("main.comp", "", ("main.comp", "a.glsl", "b.glsl")).translate(log) == expected


def test_a_compile_error_names_file_line_and_reason(folder: Callable[..., None], ctx: lod.Context) -> None:
    good = "void helper() {}\n"
    folder(
        {
            "main.comp": "#version 430\nlayout(local_size_x = 1) in;\n"
            '#include "good.glsl"\n#include "bad.glsl"\nvoid main() { nothing(); }\n',
            "good.glsl": good,
            "bad.glsl": "// first\n// second\nint broken = undeclared_name;\n",
        }
    )
    with ctx.active(), pytest.raises(ShaderError) as caught:
        ctx.programs.compute("main.comp")
    message = str(caught.value)
    assert "bad.glsl:3" in message
    assert "undeclared_name" in message
    assert "main.comp:5" in message


def test_unknown_uniform_is_told(ctx: lod.Context) -> None:
    with ctx.active():
        program = ctx.programs.render("reduce_level.frag", REDUCE_MEAN=1, TAPS_X=2, TAPS_Y=2)
        program.set(u_target_size=(4, 4))  # dropped by the compiler for even sides, and that is fine
        with pytest.raises(ShaderError, match="u_typo"):
            program.set(u_typo=1)


@pytest.mark.skipif(not reference_compiler.is_here(), reason="no glslangValidator: apt-get install glslang-tools")
def test_what_one_driver_takes_and_others_refuse_fails(folder: Callable[..., None], ctx: lod.Context) -> None:
    reference_compiler.settle()  # what other tests had compiled
    head = "#version 430\nlayout(local_size_x = 1) in;\n"
    folder({"main.comp": head + "shared float total = 1.0;\nvoid main() { total += 1.0; }\n"})
    with ctx.active():
        if ctx.renderer.startswith("llvmpipe"):  # Mesa lets shared variables have a value from the start
            ctx.programs.compute("main.comp")
            with pytest.raises(AssertionError, match=r"main.comp:3.*shared"):
                reference_compiler.settle()
        with pytest.raises(AssertionError, match=r"main.comp:3.*shared"):
            reference_compiler.refuse({"compute_shader": shaders.source("main.comp")})


@pytest.mark.skipif(not reference_compiler.is_here(), reason="no glslangValidator here")
def test_no_driver_may_give_other_bits_for_the_same_footprint_in_another_program(
    ctx: lod.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fuses products and sums as it likes, and in each program other ones, but for those that are `precise`."""
    seen: list[shaders.Source] = []
    by_driver = Programs._compile

    def noted(self: Programs, stages: dict[str, shaders.Source]) -> Program:
        seen.extend(stages.values())
        return by_driver(self, stages)

    monkeypatch.setattr(Programs, "_compile", noted)
    with ctx.active():
        ctx.programs.clear()
    lod.mipmap(torch.rand(1, 1, 37, 53), generator="single-pass")
    [source] = [one for one in seen if one.name == "single_pass.comp"]
    assert reference_compiler.contractible(source, "box") == []
    assert reference_compiler.contractible(source, "weights") == []
    assert reference_compiler.contractible(source, "quad"), "halves need it not"
