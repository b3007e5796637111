"""Handles Ctrl-C and errors while the command starts, mostly by importing torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from types import TracebackType
from typing import Any

from . import standard_streams
from .arguments import parse
from .output import error_line, report_error

#: The exit status after an error, and after Ctrl-C.
FAILED, INTERRUPTED = 2, 130
_json = False


def begin(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; for those of the process, Ctrl-C and errors end it from then on.

    Raises:
        SystemExit: See :func:`tensorizer_cli.arguments.parse`.

    """
    global _json  # noqa: PLW0603
    if arguments is None:
        standard_streams.open_closed_streams()
    options = parse(arguments)
    if arguments is None:
        _json = options.json
        _replace(signal.default_int_handler, _leave)
        sys.excepthook = _fail
    return options


def done() -> None:
    """Leave Ctrl-C and errors to Python again."""
    _replace(_leave, signal.default_int_handler)
    if sys.excepthook is _fail:
        sys.excepthook = sys.__excepthook__


def interrupted(json_wanted: bool) -> str:
    """Return the message after Ctrl-C."""
    return error_line("KeyboardInterrupt", "interrupted", json_wanted)


def _leave(*_: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{interrupted(_json)}\n".encode())
    os._exit(INTERRUPTED)


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the process after an error of ``python -m tensorizer`` in importing the package."""
    if not issubclass(kind, ImportError) and not _json:
        sys.__excepthook__(kind, error, trace)
    report_error(error, _json)
    os._exit(FAILED)


def _replace(old: Any, new: Any) -> None:
    try:
        if signal.getsignal(signal.SIGINT) is old:
            signal.signal(signal.SIGINT, new)
    except ValueError:
        # Not the main thread, which alone handles signals.
        pass
