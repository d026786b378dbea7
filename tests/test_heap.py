"""Freed memory is used again."""

from __future__ import annotations

import platform

import pytest
from scripts import succeed


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's")
@pytest.mark.parametrize("call", ["lod.foveate(image, (0.4, 0.6), backend='torch')", "lod.allocate.TokenDAG()(image)"])
def test_a_program_that_freed_nothing_large_pays_for_no_fresh_pages(call: str) -> None:
    """A megabyte is 256 of them, and what these calls make on the way is more than ten."""
    faults = succeed(
        f"""
        import resource, torch
        import gpu_lod as lod

        image = torch.rand(1, 3, 1024, 1024)

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            {call}
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        print(*[faults() for _ in range(12)])
        """,
        fresh=True,
    )
    first, *later = map(int, faults.split())
    assert first > 2000 and sorted(later[3:])[4] < 200


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's")
@pytest.mark.parametrize("way", ["trim", "close"])
def test_what_a_context_gives_up_leaves_the_process(way: str) -> None:
    """Textures of many sizes, each of them below the size at which glibc asks the kernel for pages of their own."""
    out = succeed(
        f"""
        import os, torch
        import gpu_lod as lod

        def resident():
            with open("/proc/self/statm") as file:
                return os.sysconf("SC_PAGE_SIZE") * int(file.read().split()[1])

        context = lod.Context()
        image = torch.rand(3, 220, 220)
        for side in range(100, 220):
            lod.foveate(lod.mipmap(image[:, :side, :side]), (0.4, 0.6), backend="gl")
        idle, before = context.textures.pool.idle_bytes, resident()
        context.{way}()
        print(context.software, idle, before - resident())
        """,
        fresh=True,
    )
    software, idle, given = out.split()
    if software == "False":
        pytest.skip("a GPU's memory")
    assert int(idle) > 2**25 and int(given) > 0.8 * int(idle)
