"""The command ``tensorizer``: lists, verifies, compares, copies and encrypts files."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tensorizer._errors import CryptographyError, HashMismatchError

from .arguments import parser
from .output import say

_FAILED, _INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 for differences, 2 for errors, 130 if it is interrupted."""
    try:
        return _run(parser().parse_args(arguments))
    except KeyboardInterrupt:
        if arguments is None:
            # The interpreter takes a moment to end, in which a second one needs no traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        say("tensorizer: interrupted", sys.stderr)
        return _INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options))
    except BrokenPipeError:
        # Whoever read the list has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, RuntimeError, MemoryError, CryptographyError,
            HashMismatchError, ImportError) as error:  # fmt: skip
        say(f"tensorizer: error: {error}", sys.stderr)
        return _FAILED
