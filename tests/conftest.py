"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import as_hardware
import at_once
import hypothesis
import pytest
import reference_compiler
import torch
from compare import HARDWARE_WEIGHT_ERROR
from cuda_emulator import EmulatedDevice
from lost_gpu import pytest_runtest_logfinish as pytest_runtest_logfinish

import gpu_lod as lod
from gpu_lod import cached, calibration
from gpu_lod.kernels import device

hypothesis.settings.register_profile("gpu_lod", deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile("gpu_lod")

CHECKOUT = Path(__file__).resolve().parents[1]


# The torchvision of the package index is built for CUDA builds of torch. Beside a CPU build its operators are missing,
# and then it does not even import, which timm does. Declared, they need not be there: nothing here calls them.
if torch.version.cuda is None:
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-hardware", action="store_true", help="take llvmpipe for a GPU")


def pytest_configure(config: pytest.Config) -> None:
    at_once.pytest_configure(config)
    if config.getoption("--as-hardware"):
        as_hardware.pretend()
    os.environ["GPU_LOD_CACHE"] = "off"  # what was calibrated here is no matter of the tests
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        # Threads of several processes that wait for each other on the same cores cost more than they save.
        each = max(1, (os.cpu_count() or 1) // int(workers))
        os.environ["OMP_NUM_THREADS"] = str(each)  # of the programs that tests run
        torch.set_num_threads(each)
        if config.option.markexpr != "threads":
            os.environ.setdefault("LP_NUM_THREADS", str(each))  # llvmpipe's, for each of its two kinds
    # CI tests the built wheel: a stray path entry must not let the checkout stand in for it.
    if os.environ.get("GPU_LOD_TEST_INSTALLED") and Path(lod.__file__).resolve().is_relative_to(CHECKOUT / "gpu_lod"):
        raise pytest.UsageError(f"testing the checkout ({lod.__file__}) instead of the installed wheel")


@pytest.fixture(scope="module", autouse=True)
def kept() -> None:
    """What there is when a module begins stays: many tests look for what nobody holds any more, and need not go through
    that."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m threads` reads the modules that say so: all of them take as long to read as a third of its tests to run."""
    if config.option.markexpr != "threads" or collection_path.suffix != ".py":
        return None
    return None if "pytest.mark.threads" in collection_path.read_text("utf-8") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="session")
def ctx() -> lod.Context:
    """The default context. No fallback: without OpenGL the parity tests fail, they do not skip."""
    return lod.Context()


@pytest.fixture
def llvmpipe(restored_limits: lod.Context) -> lod.Context:
    """The default context, for what llvmpipe alone does, or is asked to do by the bit."""
    if not restored_limits.renderer.startswith("llvmpipe"):
        pytest.skip(f"llvmpipe's way, and this is {restored_limits.renderer}")
    return restored_limits


@pytest.fixture(scope="session")
def sample_error(ctx: lod.Context) -> float:
    """What a texture unit's weights may move a sample by, in units of the picture's range: across, down, and between
    levels. Nothing on llvmpipe, whose weights are fp32."""
    return 0.0 if ctx.renderer.startswith("llvmpipe") else 3 * HARDWARE_WEIGHT_ERROR


@pytest.fixture(scope="session", autouse=True)
def by_the_book() -> Iterator[None]:
    """What one driver compiles another may refuse: Khronos's compiler must take every shader, where it is installed."""
    with reference_compiler.beside_the_driver():
        yield


@pytest.fixture(scope="module", autouse=True)
def settled(by_the_book: None) -> Iterator[None]:
    """All that a module compiled at once: to start the reference compiler takes as long as many shaders."""
    yield
    reference_compiler.settle()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small models: on a busy machine threads wait for each other far longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's measured times: empty, and the test's own. `times.fastest` fills it."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GPU_LOD_CACHE", str(folder))
    calibration.reload()
    yield folder
    calibration.reload()


@pytest.fixture
def unseeded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, and no times come with the package: those of a machine like this one may say anything."""
    monkeypatch.setattr(calibration, "_of_package", list)
    return cache


@pytest.fixture
def restored_limits(ctx: lod.Context) -> Iterator[lod.Context]:
    """The context, whose limits the test may lower."""
    before = vars(ctx.limits).copy()
    yield ctx
    vars(ctx.limits).update(before)


@pytest.fixture(scope="session")
def photo() -> torch.Tensor:
    """The astronaut, uint8 [3, 512, 512]."""
    from skimage import data

    return torch.from_numpy(data.astronaut()).permute(2, 0, 1).contiguous()


@pytest.fixture(scope="session")
def page() -> torch.Tensor:
    """A scanned page of text, uint8 [1, 191, 384]."""
    from skimage import data

    return torch.from_numpy(data.page())[None].contiguous()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    """backend="cuda" on CPU tensors, by the emulator."""
    found = EmulatedDevice()
    monkeypatch.setattr(device, "KIND", "cpu")
    monkeypatch.setattr(device, "open_device", lambda _: found)
    monkeypatch.setattr(cached, "capturing", lambda _: found.is_capturing)
    monkeypatch.setattr(cached, "_constants", cached._Constants())
    return found
