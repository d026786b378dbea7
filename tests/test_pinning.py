"""A CPU for each thread of a software renderer, and for no other thread."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest
from scripts import succeed

from gpu_lod import pinning
from gpu_lod.pinning import places

pytestmark = pytest.mark.threads

_OPEN = """
import json, os, threading
import gpu_lod as lod
names = lambda: {int(t): open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")}
import torch; torch.rand(100, 100) @ torch.rand(100, 100)
before = names()
context = lod.Context()
started = {t: n for t, n in names().items() if t not in before}
lod.mipmap(torch.rand(3, 64, 64), backend="gl")
print(json.dumps({
    "software": context.software,
    "cpus": sorted(os.sched_getaffinity(0)),
    "before": [sorted(os.sched_getaffinity(t)) for t in before if t in names()],
    "started": [(n, sorted(os.sched_getaffinity(t))) for t, n in started.items()],
    "creator": before[threading.get_native_id()],
}))
"""


def _opened(**environment: str) -> dict:
    found = json.loads(succeed(_OPEN, **environment))
    if not found["software"] or len(found["cpus"]) < 2:
        pytest.skip("no software renderer with several threads")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux alone")
def test_each_thread_of_the_renderer_has_a_cpu_of_its_own():
    found = _opened()
    rasterisers = [cpus for name, cpus in found["started"] if name.startswith("llvmpipe-")]
    if len(rasterisers) != len(found["cpus"]):
        pytest.skip("more CPUs than the renderer has threads")
    compute = [cpus for name, cpus in found["started"] if name == found["creator"]]
    assert sorted(rasterisers) == sorted(compute) == [[cpu] for cpu in found["cpus"]]
    others = [cpus for name, cpus in found["started"] if name != found["creator"] and not name.startswith("llvmpipe-")]
    assert all(cpus == found["cpus"] for cpus in found["before"] + others)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux alone")
@pytest.mark.parametrize("off", ["off", "OFF"])
def test_no_thread_is_pinned_where_that_is_off(off: str) -> None:
    found = _opened(GPU_LOD_PIN=off)
    assert all(cpus == found["cpus"] for _, cpus in found["started"])


def test_rasterisers_and_compute_threads_share_the_cpus_among_themselves():
    started = {11: "llvmpipe-0", 12: "llvmpipe-1", 13: "python", 14: "python", 15: "python:disk$0"}
    assert places(started, "python", [2, 5]) == {11: 2, 12: 5, 13: 2, 14: 5}


@pytest.mark.parametrize(
    ("started", "cpus"),
    [
        ({}, [0, 1]),
        ({11: "llvmpipe-0", 12: "llvmpipe-1"}, [0, 1]),  # compute threads have names of their own
        ({11: "llvmpipe-0", 12: "llvmpipe-1", 13: "python", 14: "python", 16: "python"}, [0, 1]),  # one is another's
        ({11: "llvmpipe-0", 12: "llvmpipe-1", 13: "python", 14: "python"}, [0, 1, 2]),
        ({11: "llvmpipe-0", 13: "python"}, [0]),
        ({11: "nvidia", 12: "nvidia", 13: "python", 14: "python"}, [0, 1]),
    ],
)
def test_threads_are_left_alone_where_it_is_not_certain_whose_they_are(started, cpus):
    assert places(started, "python", cpus) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux alone")
def test_threads_that_have_no_name_yet_are_waited_for(monkeypatch):
    me = threading.get_native_id()
    own = {11: "python", 12: "python", 13: "python", 14: "python"}  # each as the thread that started it
    looks = [{me: "python"}, {me: "python"} | own, {me: "python"} | own | {11: "llvmpipe-0", 12: "llvmpipe-1"}]
    pinned = {}
    monkeypatch.setattr(pinning, "_threads", lambda: looks.pop(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {2, 5})
    monkeypatch.setattr(os, "sched_setaffinity", pinned.__setitem__)
    with pinning.pinning():
        pass
    assert pinned == {11: {2}, 12: {5}, 13: {2}, 14: {5}}


@pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux alone")
def test_a_renderer_with_more_threads_than_cpus_is_not_waited_for(monkeypatch):
    me = threading.get_native_id()
    four = {10 + i: f"llvmpipe-{i}" for i in range(4)} | {20 + i: "python" for i in range(4)}
    looks = [{me: "python"}, {me: "python"} | four]  # and no third look
    monkeypatch.setattr(pinning, "_threads", lambda: looks.pop(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {2, 5})
    with pinning.pinning():
        pass
    assert not looks


@pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux alone")
def test_a_driver_that_starts_no_such_threads_is_not_waited_for(monkeypatch):
    me = threading.get_native_id()
    looks = [{me: "python"}, {me: "python", 11: "python"}]  # and no third look
    monkeypatch.setattr(pinning, "_threads", lambda: looks.pop(0))
    with pinning.pinning():
        pass
    assert not looks


_WORKERS = """
import os, torch
from torch.utils.data import DataLoader
import gpu_lod as lod

class Threads:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        lod.mipmap(torch.rand(3, 64, 64), backend="gl")
        names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
        own = sum(name.startswith("llvmpipe-") for name in names)
        return own, "LP_NUM_THREADS" in os.environ, torch.get_num_threads()

os.environ.pop("LP_NUM_THREADS", None)
if "ASKED" in os.environ:
    os.environ["LP_NUM_THREADS"] = os.environ["ASKED"]
if __name__ == "__main__":
    for found in DataLoader(Threads(), num_workers=2, timeout=60, batch_size=None):
        print(*found)
    print(lod.Context().software)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.cpu_count() == 1, reason="threads are counted on Linux alone")
@pytest.mark.parametrize("asked", [None, "3"])
def test_in_a_worker_the_renderer_has_as_many_threads_as_torch(asked: str | None) -> None:
    *workers, software = succeed(_WORKERS, **({} if asked is None else {"ASKED": asked})).splitlines()
    if software != "True":
        pytest.skip("no software renderer")
    assert workers == [f"{asked or 1} {asked is not None} 1"] * 2
