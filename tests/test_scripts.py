"""What the tests do of themselves in `make gpu-check`, which may be stopped at any time."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import scripts


@pytest.mark.parametrize(
    ("checks", "beside", "seconds"), [(True, True, 45), (True, False, 120), (False, True, 120), (False, False, 120)]
)
def test_a_script_that_hangs_fails_its_test_before_the_process_is_ended(
    checks: bool, beside: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, there in (("GPU_LOD_TEST_WARNINGS", checks), ("PYTEST_XDIST_WORKER", beside)):
        if there:
            monkeypatch.setenv(name, "default")
        else:
            monkeypatch.delenv(name, raising=False)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: seen.update(options) or SimpleNamespace())
    scripts.run("pass")
    assert seen["timeout"] == seconds
