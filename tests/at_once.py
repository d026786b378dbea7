"""`make gpu-check` may be stopped at any time: tracebacks are printed as tests fail, not when all have ended."""

from __future__ import annotations

import pytest
from scripts import in_gpu_check


class AtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After the line that says that it failed."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_sep("_", f"{report.nodeid} ({report.when})")
        terminal.write_line(report.longreprtext)
        terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Not in the processes of pytest-xdist, which report to this one."""
    if in_gpu_check() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(AtOnce(config))
