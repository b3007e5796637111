"""The command ``tensorizer``: lists, verifies, compares, copies and encrypts files."""

from __future__ import annotations

import argparse
import os
import signal

from . import start
from .output import error_line, flush, tell, without_password

_FAILED = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 for differences, 2 for errors, 130 if it is interrupted.

    Raises:
        SystemExit: After ``--help`` and ``--version`` (0), and for wrong arguments (2).

    """
    options = None
    try:
        options = start.begin(arguments)
        return _run(options)
    except KeyboardInterrupt:
        if arguments is None:
            # The interpreter takes a moment to end, in which a second one needs no traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        tell(start.interrupted(options is not None and options.json))
        return start.INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    try:
        # With torch, which takes long and may not be the one that the package was built for.
        from . import commands
    except ImportError as error:
        return _failed(error, options)
    finally:
        start.done()
    try:
        status = commands.COMMANDS[options.command](options)
        flush()
        return status
    except commands.ERRORS as error:
        return _failed(error, options)


def _failed(error: BaseException, options: argparse.Namespace) -> int:
    text = without_password(_text(error))
    text = text if options.json else f"error: {text}"
    tell(error_line(type(error).__name__, text, options.json))
    return _FAILED


def _text(error: BaseException) -> str:
    """Return what an error says, without Python's number and quotes of what the system says."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error) or type(error).__name__
    where = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return error.strerror if str(where) in error.strerror else f"{where}: {error.strerror}"
