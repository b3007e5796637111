"""Ctrl-C while the command ``tensorizer`` starts, which is the import of torch most of the time."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from .arguments import parse
from .output import error_line

#: The status of the command after Ctrl-C.
INTERRUPTED = 130
_json = False


def begin(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; from then on Ctrl-C ends the process, if they are its own.

    Raises:
        SystemExit: See :func:`tensorizer_cli.arguments.parse`.

    """
    global _json  # noqa: PLW0603
    options = parse(arguments)
    if arguments is None:
        _json = options.json
        _replace(signal.default_int_handler, _leave)
    return options


def done() -> None:
    """Leave Ctrl-C to Python again."""
    _replace(_leave, signal.default_int_handler)


def interrupted(json_wanted: bool) -> str:
    """Return what is said after Ctrl-C."""
    return error_line("KeyboardInterrupt", "interrupted", json_wanted)


def _leave(*_: Any) -> None:
    os.write(2, f"{interrupted(_json)}\n".encode())
    os._exit(INTERRUPTED)


def _replace(old: Any, new: Any) -> None:
    try:
        if signal.getsignal(signal.SIGINT) is old:
            signal.signal(signal.SIGINT, new)
    except ValueError:
        # Not the main thread, to which signals go.
        pass
