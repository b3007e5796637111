"""The command ``tensorizer``: lists, verifies, compares, copies and encrypts files."""

from __future__ import annotations

import argparse
import signal
import traceback

from . import commands, heads, standard, start
from .output import tell_error, warnings_told


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
        standard.tell(start.interrupted(options is not None and options.json))
        return start.INTERRUPTED
    finally:
        standard.settle()


def _run(options: argparse.Namespace) -> int:
    try:
        with warnings_told(options.json):
            try:
                heads.refuse_missing(options)
                # Most with torch, which takes long and may not be what the package was built for.
                run = commands.of(options.command)
            finally:
                start.done()
            status = run(options)
            standard.flush()
            return status
    except Exception as error:
        if not commands.is_expected(error) and not options.json:
            # A mistake in the program.
            standard.tell(traceback.format_exc())
        tell_error(error, options.json)
        return start.FAILED
