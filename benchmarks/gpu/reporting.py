"""A plugin of pytest: a row for each test as it ends; tests that have one are not run again.

``GPU_ROWS`` names the file, ``GPU_DEADLINE`` when no more tests are begun, in seconds of the
monotonic clock. A test that hangs ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path

import pytest
from rows import Rows

#: Seconds that a test may take, and that must be left to begin one.
LIMIT, LEAST = 120, 20
#: Exit code of pytest when the time is over.
OUT_OF_TIME = 75
STEP = "tests"


class Plugin:
    def __init__(self, rows: Rows, deadline: float) -> None:
        self.rows, self.deadline, self.begun = rows, deadline, 0
        self.reports: list[pytest.TestReport] = []

    def pytest_collection_modifyitems(self, config, items) -> None:
        left = [item for item in items if f"{STEP}/{item.nodeid}" not in self.rows.ends]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        # One at least, however little time there is.
        if self.begun and time.monotonic() + LEAST > self.deadline:
            pytest.exit("time is over", returncode=OUT_OF_TIME)
        self.begun += 1
        key = f"{STEP}/{item.nodeid}"
        self.rows.begin(key)
        self.reports.clear()
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            took = round(time.monotonic() - began, 3)
            self.rows.end(key, {"step": STEP, "took": took} | self._outcome())

    def _outcome(self) -> dict[str, object]:
        bad = next((report for report in self.reports if report.failed), None)
        if bad is not None:
            return {"status": "failed", "why": f"{bad.when}: {bad.longreprtext[-1500:]}"}
        skipped = next((report for report in self.reports if report.skipped), None)
        if skipped is not None:
            return {"status": "absent", "why": str(skipped.longrepr)[-300:]}
        return {"status": "ok"}

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)


def pytest_configure(config) -> None:
    rows = Rows(Path(os.environ["GPU_ROWS"]))
    config.pluginmanager.register(Plugin(rows, float(os.environ["GPU_DEADLINE"])))
