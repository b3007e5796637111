"""The command ``tensorizer``: lists, verifies, compares, copies and encrypts files."""

from __future__ import annotations

import argparse
import signal
import traceback

from . import commands, file_description, standard_streams, start
from .output import report_error, warnings_reported


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
            # A second Ctrl-C while the interpreter ends needs no traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        standard_streams.print_error(start.interrupted(options is not None and options.json))
        return start.INTERRUPTED
    finally:
        standard_streams.flush_or_discard()


def _run(options: argparse.Namespace) -> int:
    try:
        with warnings_reported(options.json):
            try:
                file_description.refuse_missing(options)
                # Most commands import torch, which takes long, and may not be the one it was built
                # for.
                run = commands.of(options.command)
            finally:
                start.done()
            status = run(options)
            standard_streams.flush()
            return status
    except Exception as error:
        if not commands.is_expected(error) and not options.json:
            # A mistake in the program, not in its input.
            standard_streams.print_error(traceback.format_exc())
        report_error(error, options.json)
        return start.FAILED
