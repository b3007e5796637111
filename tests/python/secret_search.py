"""Looks for the secrets of the tests in all that comes out of them, and fails those that show one.

That is what they print, log and warn of, what programs that they start print, and the texts of the
errors that they expect. A test that means to show a secret is marked ``shows_secrets``.
"""

import contextlib
import logging
import subprocess

import pytest
from secret_words import shown_in

#: Secrets that the running test has shown so far, each with its place.
_shown = []
#: The same of warnings, which pytest prints after a test has ended.
_warned = []


def look(where, said):
    """Note a text that shows a secret."""
    if said and (part := shown_in(said)):
        _shown.append(f"{where}: …{part}…")


def look_at_error(error):
    """Look at the texts of an error, and of those that it comes from."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        with contextlib.suppress(Exception):
            notes = getattr(error, "__notes__", ())
            look(f"an error, {type(error).__name__}", "\n".join([str(error), repr(error), *notes]))
        error = error.__cause__ or error.__context__


class _Lines(logging.Handler):
    """Looks at what is logged, which pytest keeps from its warnings on only."""

    def emit(self, record):
        look("the log", record.getMessage())


def _watched_exit(exit_):
    def watched(self, kind, error, trace):
        look_at_error(error)
        return exit_(self, kind, error, trace)

    return watched


def _watched_communicate(communicate):
    def watched(self, *args, **kwargs):
        out, err = communicate(self, *args, **kwargs)
        for where, said in (("output", out), ("errors", err)):
            look(f"the {where} of {self.args!r:.60}", said)
        return out, err

    return watched


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "shows_secrets(why): may show secrets of the tests")
    logger = logging.getLogger("tensorizer")
    logger.addHandler(_Lines())
    # The line of each load and save, too.
    logger.setLevel(logging.INFO)
    raising = type(pytest.raises(Exception))
    raising.__exit__ = _watched_exit(raising.__exit__)
    subprocess.Popen.communicate = _watched_communicate(subprocess.Popen.communicate)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    for name, text in report.sections:
        look(name, text)
    if call.excinfo is not None and report.failed:
        look_at_error(call.excinfo.value)
    shown, _shown[:] = list(dict.fromkeys(_shown)), []
    if shown and item.get_closest_marker("shows_secrets") is None:
        report.outcome = "failed"
        before = f"{report.longreprtext}\n" if report.longrepr else ""
        report.longrepr = before + "secrets are shown:\n" + "\n".join(shown)
    return report


def pytest_warning_recorded(warning_message, nodeid):
    if part := shown_in(str(warning_message.message)):
        _warned.append(f"a warning of {nodeid}: …{part}…")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if _warned and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _warned:
        terminalreporter.section("secrets are shown")
        for line in dict.fromkeys(_warned):
            terminalreporter.line(line)
