"""Cost of each test: the dearest are printed.

    PYTHONPATH=tests/python make test-python PYTEST="-p costs"

CPU seconds are those of the worker and of all processes below it, so that forks count. They are
without the collection of the tests, and without what ends after a test.
"""

import contextlib

import psutil
import pytest

#: CPU seconds and name of each test.
_costs = []


def _cpu_seconds():
    own, seconds = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.stash["before"] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    result = yield
    item.user_properties.append(("cpu", _cpu_seconds() - item.stash["before"]))
    return result


def pytest_runtest_logreport(report):
    cpu = dict(report.user_properties).get("cpu")
    if cpu is not None:
        _costs.append((cpu, report.nodeid))


def pytest_terminal_summary(terminalreporter):
    if _costs:
        terminalreporter.section(f"the dearest of {sum(cpu for cpu, _ in _costs):.0f} CPU seconds")
    for cpu, name in sorted(_costs, reverse=True)[:40]:
        terminalreporter.write_line(f"{cpu:8.1f}  {name}")
