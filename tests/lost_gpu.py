"""A CUDA error that sticks, such as an illegal address, fails every later test of its process, whatever that tries."""

from __future__ import annotations

import os
import sys

import torch


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Where pytest-xdist replaces a process that ends, let the tests that follow have a new one. What the test itself
    found has been reported by now."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{nodeid} leaves CUDA unusable: {error}", file=sys.__stderr__, flush=True)
        os._exit(1)
