"""The bridge through PyCUDA on a real GPU. PyCUDA must have been built with OpenGL; each test has a process of its own,
for a CUDA context that is current lasts."""

from __future__ import annotations

import importlib

import pytest
from scripts import HERE, run, succeed

pytestmark = pytest.mark.gpu

BEGIN = """
    import torch
    torch.zeros(1, device="cuda")  # the primary context
    import pycuda.autoprimaryctx
    import gpu_lod as lod
    ctx = lod.Context("cuda", interop="pycuda")
"""


@pytest.fixture(autouse=True)
def with_opengl() -> None:
    pytest.importorskip("pycuda", reason="PyCUDA is not installed")
    try:
        importlib.import_module("pycuda.gl")
    except ImportError as error:
        pytest.skip(f"this PyCUDA has no OpenGL ({error})")


def test_verbs_match_the_oracles() -> None:
    succeed(
        BEGIN
        + """
    from compare import HARDWARE_WEIGHT_ERROR, assert_matches
    from images import DTYPES, noise
    from oracle import extreme_chain, foveate, log_polar, mean_chain

    def on_host(levels):
        return [level.cpu() for level in levels]

    with ctx:
        for dtype in DTYPES:
            image = noise(3, 3, 97, 140, dtype=dtype)
            for generator in ("compute", "single-pass"):
                for level, truth in zip(lod.mipmap(image.cuda(), generator=generator), mean_chain(image), strict=True):
                    assert level.is_cuda
                    assert_matches(level.cpu(), truth, "box")
            pyramid = lod.mipmap(image.cuda(), backend="torch")
            fixation = torch.rand(3, 2)
            truth, texels, blend = log_polar(on_host(pyramid), fixation, 17, 40)
            slack = 2 * HARDWARE_WEIGHT_ERROR * texels + HARDWARE_WEIGHT_ERROR * blend
            found = lod.log_polar(pyramid, fixation, 17, 40, backend="gl")
            assert_matches(found.cpu(), truth, "trilinear", slack=slack)
            truth, texels, blend = foveate(on_host(pyramid), fixation)
            slack = 2 * HARDWARE_WEIGHT_ERROR * texels + HARDWARE_WEIGHT_ERROR * blend
            assert_matches(lod.foveate(pyramid, fixation, backend="gl").cpu(), truth, "trilinear", slack=slack)
        relevance = noise(2, 1, 61, 45)
        for level, truth in zip(lod.hiz(relevance.cuda(), backend="gl"), extreme_chain(relevance, "max"), strict=True):
            assert torch.equal(level.cpu(), truth.to(level.dtype))
    assert type(ctx.interop.driver).__name__ == "PyCudaDriver"
    """,
        PYTHONPATH=HERE,
    )


def test_results_are_the_mapped_buffers() -> None:
    succeed(
        BEGIN
        + """
    image = ctx.empty(3, 64, 64)
    image.copy_(torch.rand(3, 64, 64))
    pyramid = lod.mipmap(image, backend="gl")
    assert pyramid[0].data_ptr() == image.data_ptr()
    bridge = ctx.interop
    with ctx.active(device=image.device):
        assert bridge.driver.check_same_gpu(ctx.renderer) is None
        for level in pyramid:
            buffer, offset = bridge.find(level)
            address, nbytes = bridge.driver.address(buffer.handle)
            assert level.data_ptr() == address + offset and offset + level.nbytes <= nbytes
    assert bridge.find(torch.rand(4, device="cuda")) is None
    """
    )


def test_what_cuda_refuses_leaves_other_buffers_alone() -> None:
    """A buffer that has no memory cannot be registered; PyCUDA would unregister what it never got."""
    result = run(
        BEGIN
        + """
    import gc
    kept = [ctx.empty(4096 << i, dtype=torch.uint8).fill_(i) for i in range(6)]
    dropped = [ctx.empty(4096 << i, dtype=torch.uint8) for i in range(6)]
    del dropped
    gc.collect()
    ctx.trim()
    with ctx.active(device=torch.device("cuda", 0)):
        for name in (0, 2**31 - 1):
            try:
                ctx.interop.driver.register(name)
            except lod.GpuLodError as error:
                assert "cuGraphicsGLRegisterBuffer" in str(error), error
            else:
                raise SystemExit(f"{name} was taken")
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(kept))
    for i, tensor in enumerate(kept):  # they go over to OpenGL, and come back
        assert float(lod.mipmap(tensor.view(1, 64, -1), backend="gl")[-1]) == i
    """
    )
    assert result.returncode == 0, result.stderr
    assert "PyCUDA WARNING" not in result.stderr, result.stderr  # of a clean-up that failed


def test_a_counter_goes_to_and_fro() -> None:
    """Through an image in GL memory, on two streams in turn: no stale byte, and nothing grows."""
    succeed(
        BEGIN
        + """
    import gc
    image = ctx.empty(1, 64, 64, device="cuda")
    assert ctx.owns(image)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.default_stream()]
    torch.cuda.synchronize()

    def usage():
        gc.collect()
        with ctx.active(device=image.device):
            bridge = ctx.interop
            return len(bridge._by_address), bridge.pool.leased, bridge.pool.idle

    for count in range(500):
        streams[count % 2].wait_stream(streams[1 - count % 2])
        with torch.cuda.stream(streams[count % 2]):
            image.fill_(float(count))
            pyramid = lod.mipmap(image, generator="compute")
            for level in (pyramid[1], pyramid[6], image):
                wrong += (level != count).sum()
        if count == 100:
            before = usage()
    torch.cuda.synchronize()
    assert int(wrong) == 0 and usage() == before
    """
    )


def test_another_thread_is_refused_and_the_first_goes_on() -> None:
    succeed(
        BEGIN
        + """
    import threading
    image = torch.ones(1, 16, 16, device="cuda")
    assert float(lod.mipmap(image, backend="gl")[4]) == 1
    found = []

    def elsewhere():
        try:
            lod.mipmap(image, backend="gl")
        except lod.GpuLodError as error:
            found.append(f"{type(error).__name__}: {error}")

    def elsewhere_in_the_same_context():
        primary = pycuda.driver.Device(0).retain_primary_context()
        primary.push()
        try:
            elsewhere()
        finally:
            pycuda.driver.Context.pop()

    for work in (elsewhere, elsewhere_in_the_same_context):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert float(lod.mipmap(2 * image, backend="gl")[4]) == 2
    assert found[0].startswith("ContextNotCurrentError: no PyCUDA context is current"), found
    assert found[1].startswith("ContextNotCurrentError: a verb on CUDA tensors was called on thread MainThread"), found
    """
    )


def test_a_context_that_is_not_the_primary_one_is_refused() -> None:
    """torch would not see its memory."""
    succeed(
        """
    import torch
    torch.zeros(1, device="cuda")
    import pycuda.autoinit
    import gpu_lod as lod
    try:
        ctx = lod.Context("cuda", interop="pycuda")
        with ctx:
            lod.mipmap(torch.ones(1, 16, 16, device="cuda"), backend="gl")
    except lod.GpuLodError as error:
        assert type(error).__name__ == "DeviceMismatchError", error
        assert "autoprimaryctx" in str(error)
    else:
        raise SystemExit("it was taken")
    """
    )


@pytest.mark.parametrize("closed", [True, False])
def test_exit_with_tensors_alive_is_quiet(closed: bool) -> None:
    """PyCUDA's objects clean up after themselves, and write of what fails to stderr."""
    result = run(
        BEGIN
        + f"""
    image = ctx.empty(1, 64, 64).fill_(4)
    level = lod.mipmap(image, backend="gl")[2]
    if {closed}:
        ctx.close()
    assert float(level.sum()) == 4 * 256
    """
    )
    assert result.returncode == 0 and "PyCUDA" not in result.stderr, result.stderr


def test_the_doctor_finds_it_well() -> None:
    found = succeed(
        """
    import io, json, sys
    from contextlib import redirect_stdout
    from gpu_lod import cli
    text = io.StringIO()
    sys.argv = ["gpu-lod", "doctor", "--json"]
    with redirect_stdout(text):
        try:
            cli.main()
        except SystemExit:
            pass
    for finding in json.loads(text.getvalue())["findings"]:
        if finding["name"].startswith("PyCUDA bridge"):
            print(finding["status"], finding["found"])
    """
    )
    assert found.startswith("ok torch wrote"), found
