"""CUDA sources into machine code: NVRTC takes every variant without a word, and what is compiled is kept on disk."""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run

from gpu_lod.errors import CudaUnavailableError, KernelError
from gpu_lod.kernels import compiler, cubins, sources
from gpu_lod.kernels.sources import Kernel

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SMALLEST = sources.of_dtype("log_polar", torch.float32)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and nothing in memory."""
    monkeypatch.setattr(compiler, "_made", {})
    monkeypatch.setenv("GPU_LOD_CACHE", str(tmp_path / "gpu_lod"))
    cubins._warn_once.cache_clear()
    yield tmp_path / "gpu_lod" / "cubins"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """What was compiled, in order."""
    seen: list[Kernel] = []
    real = compiler.build

    def counted(kernel: Kernel, arch: str) -> tuple[bytes, str]:
        seen.append(kernel)
        return real(kernel, arch)

    monkeypatch.setattr(compiler, "build", counted)
    return seen


# -- NVRTC ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", sources.variants(), ids=lambda kernel: " ".join((kernel.name, *kernel.defines)))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_a_warning(monkeypatch: pytest.MonkeyPatch, arch: str, kernel: Kernel) -> None:
    """Optimised in full for one of them and of one dtype, which differ in how they are read and written alone: the
    others say the same in a third of the time. NVRTC 13.5 fails at that with its own "unsupported operation"."""
    options = compiler.options
    in_full = arch == "sm_90" and not {*sources.ELEMENTS.values()} - {"FLOAT32"} & {*kernel.defines}
    if not in_full and (13, 0) <= tuple(map(int, compiler.version().split("."))) < (13, 5):
        monkeypatch.setattr(compiler, "options", lambda *of: [*options(*of), "--Ofast-compile=max"])
    code, log = compiler.build(kernel, arch)
    assert code.startswith(b"\x7fELF") and kernel.name.encode() in code
    assert log.strip() == ""


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_89", "sm_120"])
def test_other_gpus_have_room_for_what_is_asked_of_them(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Their multiprocessors hold fewer threads, and blocks beyond those are no bound on registers."""
    options = compiler.options
    monkeypatch.setattr(compiler, "options", lambda *of: [*options(*of), "--Ofast-compile=max"])
    bounded = {name.removesuffix(".cu") for name, text in sources.texts().items() if ", RESIDENT_BLOCKS(" in text}
    assert bounded == {"foveate", "patches", "reduce"}
    for kernel in sources.variants():
        others = arch == "sm_75" and "FLOAT32" not in kernel.defines  # the oldest: what its instructions lack
        if others if kernel.name not in bounded else "FLOAT32" in kernel.defines:
            assert compiler.build(kernel, arch)[1].strip() == ""


def test_no_lambda_is_a_template() -> None:
    """NVRTC 13.0, which torch 2.11 brings, takes one for a function of the host. The tests have a newer one, which does
    not."""
    generic = re.compile(r"\[[^\]]*\]\s*\([^)]*\bauto\b")
    assert generic.search("auto make = [&](int y, auto whole) {")
    assert not [name for name, text in sources.texts().items() if generic.search(text)]


def test_pythons_own_bytes_stay_what_they_are() -> None:
    """An empty log is one byte, and Python has one object for all bytes objects that hold a space alone."""
    code, log = compiler.build(sources.of_dtype("log_polar", torch.float32), "sm_90")
    assert code and not log
    assert bytes([32])[0] == 32


def test_variants_are_all_that_can_be_asked_for() -> None:
    files = {name.removesuffix(".cu") for name in sources.texts() if name.endswith(".cu")}
    assert {kernel.name for kernel in sources.variants()} == files
    assert len(sources.variants()) == len(set(sources.variants())) == 4 * 3 * 2 + 4 * 9 + 21 + 2 + 4


def test_a_warning_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    text = sources.texts()["log_polar.cu"].replace("float4 sample", "int unused; float4 sample")
    monkeypatch.setattr(sources, "texts", lambda: {**sources_before, "log_polar.cu": text})
    assert "never referenced" in compiler.build(SMALLEST, "sm_90")[1]


sources_before = dict(sources.texts())


def test_what_does_not_compile_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "texts", lambda: {**sources_before, "log_polar.cu": "nonsense"})
    with pytest.raises(
        KernelError, match=r"(?s)log_polar.cu FLOAT32 does not compile for sm_90.*log_polar.cu\(1\): error"
    ):
        compiler.cubin(SMALLEST, "sm_90")
    monkeypatch.undo()
    with pytest.raises(KernelError, match=r"sm_999.*newer than NVRTC.*pip install"):
        compiler.build(SMALLEST, "sm_999")


def test_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = compiler._nvrtc()
    compiler._nvrtc.cache_clear()
    try:
        with monkeypatch.context() as here:
            here.setattr(nvrtc, "nvrtcVersion", raiser(RuntimeError('Failure finding "libnvrtc.so.13"')))
            with pytest.raises(CudaUnavailableError, match=r"(?s)libnvrtc.so.13.*pip install .*nvidia-cuda-nvrtc"):
                compiler.cubin(SMALLEST, "sm_90")
        with monkeypatch.context() as here:
            real = builtins.__import__

            def without(name: str, *rest: Any, **how: Any) -> Any:
                if name.startswith("cuda"):
                    raise ImportError("No module named 'cuda'")
                return real(name, *rest, **how)

            here.setattr(builtins, "__import__", without)
            with pytest.raises(CudaUnavailableError, match=r"No module named 'cuda'.*pip install 'cuda-bindings=="):
                compiler.cubin(SMALLEST, "sm_90")
    finally:
        compiler._nvrtc.cache_clear()


def raiser(error: Exception) -> Any:
    def call(*_: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("built", "package"), [("12.8", "nvidia-cuda-nvrtc-cu12"), ("13.0", "nvidia-cuda-nvrtc==13.*"), (None, "==13.*")]
)
def test_what_to_install_fits_torchs_cuda(monkeypatch: pytest.MonkeyPatch, built: str | None, package: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    assert package in compiler.install_line()


def test_an_error_of_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler._nvrtc(), "nvrtcCreateProgram", lambda *_: (3, None))
    with pytest.raises(KernelError, match=r"NVRTC reports error 3 taking log_polar\.cu"):
        compiler.build(SMALLEST, "sm_90")


# -- on disk ----------------------------------------------------------------------------------------------------------


def again(kernel: Kernel = SMALLEST, arch: str = "sm_90") -> bytes:
    """As another process would ask for it."""
    compiler._made.clear()
    return compiler.cubin(kernel, arch)


def test_compiled_once_for_all_processes(fresh: Path, builds: list[Kernel]) -> None:
    code = compiler.cubin(SMALLEST, "sm_90")
    assert compiler.cubin(SMALLEST, "sm_90") is code  # from memory
    assert again() == code and len(builds) == 1  # from disk
    assert [path.suffix for path in fresh.iterdir()] == [".cubin"]
    assert compiler.cubin(SMALLEST, "sm_90", anew=True) == code and len(builds) == 2


def test_the_name_holds_all_that_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiler._key(SMALLEST, "sm_90")
    names = {
        before,
        compiler._key(SMALLEST, "sm_80"),
        compiler._key(sources.of_dtype("log_polar", torch.uint8), "sm_90"),
    }
    with monkeypatch.context() as here:
        here.setattr(compiler, "version", lambda: "13.99")
        names.add(compiler._key(SMALLEST, "sm_90"))
    for file in ("log_polar.cu", "elements.cuh"):
        with monkeypatch.context() as here:
            here.setattr(sources, "texts", lambda file=file: {**sources_before, file: sources_before[file] + "\n"})
            names.add(compiler._key(SMALLEST, "sm_90"))
    with monkeypatch.context() as here:
        real = compiler.options
        here.setattr(compiler, "options", lambda *what: [*real(*what), "--fmad=false"])
        names.add(compiler._key(SMALLEST, "sm_90"))
    assert len(names) == 7
    assert compiler._key(SMALLEST, "sm_90") == before


@pytest.mark.parametrize("damage", ["cut short", "a bit", "empty", "a folder"])
def test_damaged_files_are_compiled_again(fresh: Path, builds: list[Kernel], damage: str) -> None:
    code = compiler.cubin(SMALLEST, "sm_90")
    [file] = fresh.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "a folder":
        file.unlink()
        file.mkdir()
        with pytest.warns(UserWarning, match="cannot be kept"):
            assert again() == code
        return
    if damage == "a bit":
        content[500] ^= 1
    file.write_bytes(b"" if damage == "empty" else bytes(content[:-7] if damage == "cut short" else content))
    assert again() == code and len(builds) == 2
    assert again() == code and len(builds) == 2  # it was written anew


def test_a_folder_that_cannot_be_written_warns_once(fresh: Path, builds: list[Kernel]) -> None:
    """A file stands where the folder should be: that stops root too."""
    fresh.parent.write_text("in the way")
    with pytest.warns(UserWarning, match="GPU_LOD_CACHE") as seen:
        for kernel in (SMALLEST, sources.of_dtype("fill", torch.float32)):
            assert again(kernel)
    assert len(seen) == 1 and len(builds) == 2


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_warns(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o500)
    with pytest.warns(UserWarning, match="Permission denied"):
        again()
    fresh.chmod(0o700)


def test_nothing_is_left_of_a_write_that_failed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(UserWarning, match="no space left"):
        assert again()
    assert list(fresh.iterdir()) == []


def test_without_platformdirs_nothing_is_kept(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, builds: list[Kernel]
) -> None:
    monkeypatch.delenv("GPU_LOD_CACHE")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert again() == again() and len(builds) == 2
    assert not fresh.exists()


def test_two_processes_at_once(fresh: Path, tmp_path: Path) -> None:
    """Both compile or one takes what the other made; no file is ever seen half."""
    script = """
        import sys, threading
        from gpu_lod.kernels import compiler, cubins, sources
        import torch
        names = [sources.of_dtype(name, torch.float32) for name in ("log_polar", "fill", "foveate", "patches")]
        for _ in range(3):
            compiler._made.clear()
            for kernel in names:
                assert compiler.cubin(kernel, "sm_90").startswith(bytes([127]) + b"ELF")
        """
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: run(script, fresh=True, GPU_LOD_CACHE=str(tmp_path / "gpu_lod")), range(2)))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    assert [path.suffix for path in fresh.iterdir()] == [".cubin"] * 4
    for path in fresh.iterdir():
        assert cubins.load(path.stem) is not None


def test_importing_the_package_imports_neither_cuda_nor_platformdirs() -> None:
    """Beyond what torch imports itself."""
    done = run(
        """
        import sys, torch
        before = set(sys.modules)
        import gpu_lod, gpu_lod.kernels.samplers
        print(sorted(m for m in set(sys.modules) - before if m.split(".")[0] in ("cuda", "platformdirs")))
        """
    )
    assert done.stdout.strip() == "[]", done.stderr
