"""Triton's library beside Mesa's driver, which brings an LLVM too. A small one stands for it: CPU builds of torch come
without Triton, and it calls what it exports as that does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import succeed

_SOURCE = """
int LLVMContextCreate(void) { return 42; }
int called(void) { return LLVMContextCreate(); }
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package `triton`."""
    folder = tmp_path_factory.mktemp("site")
    inner = folder / "triton" / "_C"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").touch()
    source = inner / "triton.c"
    source.write_text(_SOURCE)
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(inner / "libtriton.so"), str(source)], check=True)
    return folder


_CALLS = """
        import ctypes, importlib.util, os
        from pathlib import Path
        library = Path(importlib.util.find_spec("triton").origin).with_name("_C") / "libtriton.so"
        assert ctypes.CDLL(str(library), os.RTLD_NOW).called() == 42, "it called another library's LLVM"
"""


def test_triton_calls_its_own_llvm_after_a_verb(site: Path) -> None:
    succeed(
        """
        import torch, gpu_lod as lod
        assert lod.mipmap(torch.rand(3, 9, 9), backend="gl")[1].shape == (3, 4, 4)
        """
        + _CALLS,
        PYTHONPATH=str(site),
    )


def test_triton_calls_its_own_llvm_beside_an_adopted_context(site: Path) -> None:
    """Whose driver was opened before gpu_lod could load anything."""
    succeed(
        """
        import torch, gpu_lod as lod, moderngl
        with moderngl.create_context(standalone=True, backend="egl", require=430) as window:
            with lod.Context.adopt(window):
                assert lod.mipmap(torch.rand(3, 9, 9), backend="gl")[1].shape == (3, 4, 4)
        """
        + _CALLS,
        PYTHONPATH=str(site),
    )


def test_triton_is_not_loaded_where_mesa_keeps_its_llvm_to_itself(site: Path, tmp_path: Path) -> None:
    """82 MB of a process, for nothing."""
    linked = shutil.copy(site / "triton" / "_C" / "libtriton.so", tmp_path / "libgallium-25.so")
    succeed(
        f"""
        import ctypes, torch, gpu_lod as lod
        ctypes.CDLL({str(linked)!r})
        assert lod.mipmap(torch.rand(3, 9, 9), backend="gl")[1].shape == (3, 4, 4)
        with open("/proc/self/maps") as maps:
            assert "libtriton" not in maps.read()
        """,
        PYTHONPATH=str(site),
    )


def test_an_llvm_that_serves_all_is_a_named_error(site: Path) -> None:
    """As TensorFlow's is: llvmpipe would die of its first shader."""
    succeed(
        f"""
        import ctypes, torch, gpu_lod as lod
        library = {str(site / "triton" / "_C" / "libtriton.so")!r}
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        image = torch.rand(3, 512, 512)
        try:
            lod.mipmap(image, backend="gl")
        except lod.errors.GLUnavailableError as error:
            assert library in str(error) and "backend='torch'" in str(error), error
        else:
            raise SystemExit("it compiled shaders by another LLVM")
        choice = lod.explain(lod.feature_maps, image)  # by OpenGL, where it opens
        assert choice.backend == "torch" and library in choice.reason, choice
        assert torch.equal(lod.feature_maps(image), lod.feature_maps(image, backend="torch"))
        """
    )


@pytest.mark.parametrize(
    "triton", ["sys.modules['triton'] = None", "sys.modules['triton'] = types.ModuleType('triton')", "spoil()"]
)
def test_what_is_no_triton_is_no_hindrance(triton: str, tmp_path: Path) -> None:
    library = tmp_path / "triton" / "_C" / "libtriton.so"
    library.parent.mkdir(parents=True)
    library.touch()
    succeed(
        f"""
        import sys, types, torch, gpu_lod as lod
        def spoil():
            sys.path.insert(0, {str(tmp_path)!r})
        {triton}
        assert lod.mipmap(torch.rand(3, 9, 9), backend="gl")[1].shape == (3, 4, 4)
        """
    )
