"""Cost of each file of tests: ``make test-python PYTEST="-p costs"`` prints the twenty dearest.

CPU seconds are those of a control group of each worker, so that they include every process which
its tests started, however it was forked; without the right to make such groups only the time on
the clock is told. Processes are the programs that tests started and the interpreters they forked.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

#: CPU accounting of Linux's first version of control groups.
GROUPS = Path("/sys/fs/cgroup/cpuacct")
#: Costs of each test file: seconds, CPU seconds, processes, tests.
_costs = defaultdict(lambda: [0.0, 0.0, 0, 0])
_started = [0]
#: The control group of this worker, if there is one.
_groups = []


def _count(owner, name):
    """Count the calls of a function that starts a process."""
    start = getattr(owner, name)

    def counted(*args, **kwargs):
        _started[0] += 1
        return start(*args, **kwargs)

    setattr(owner, name, counted)


def _cpu_seconds():
    return sum(int((group / "cpuacct.usage").read_text()) for group in _groups) / 1e9


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        with contextlib.suppress(OSError):
            group = GROUPS / f"tests-{os.getpid()}"
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            _groups.append(group)
    _count(subprocess.Popen, "__init__")


def pytest_collection_finish():
    # As the tests know it; this file is loaded before their folder is on the path.
    if forking := sys.modules.get("forking"):
        _count(forking.Server, "start")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    before = time.monotonic(), _cpu_seconds(), _started[0]
    result = yield
    after = time.monotonic(), _cpu_seconds(), _started[0]
    row = _costs[item.location[0]]
    for place in range(3):
        row[place] += after[place] - before[place]
    row[3] += 1
    return result


def pytest_testnodedown(node, error):
    """Add what a worker has measured."""
    for name, row in getattr(node, "workeroutput", {}).get("costs", {}).items():
        _costs[name] = [mine + other for mine, other in zip(_costs[name], row, strict=True)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = dict(_costs)
    elif path := os.environ.get("TENSORIZER_TEST_COSTS"):
        Path(path).write_text(json.dumps(_costs))


def pytest_terminal_summary(terminalreporter):
    if not _costs:
        return
    terminalreporter.section("the twenty dearest files")
    rows = sorted(_costs.items(), key=lambda row: -(row[1][1] or row[1][0]))
    total = [sum(row[place] for _, row in rows) for place in range(4)]
    terminalreporter.write_line(f"{'CPU s':>8} {'s':>8} {'started':>8} {'tests':>6}  file")
    for name, (seconds, cpu, started, tests) in [*rows[:20], ("together", total)]:
        terminalreporter.write_line(f"{cpu:8.1f} {seconds:8.1f} {started:8} {tests:6}  {name}")
