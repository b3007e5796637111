"""The command ``tensorizer``: lists, verifies, compares, copies and encrypts files."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from .arguments import parse
from .file_description import refuse_missing
from .output import error_line, open_closed_streams, print_error, report_error, warnings_reported

#: The exit status after an error, and after Ctrl-C.
_FAILED, _INTERRUPTED = 2, 130
#: Errors that files, servers and machines cause; any other is a mistake in the program.
_EXPECTED = (OSError, ValueError, RuntimeError, MemoryError, ImportError, pickle.UnpicklingError)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 for differences, 2 for errors, 130 if it is interrupted.

    Raises:
        SystemExit: After ``--help`` and ``--version`` (0), and for wrong arguments (2).

    """
    options = None
    try:
        if arguments is None:
            open_closed_streams()
        options = parse(arguments)
        return _run(options, owns_process=arguments is None)
    except KeyboardInterrupt:
        if arguments is None:
            # A second Ctrl-C while the interpreter ends needs no traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        print_error(_interrupted(options is not None and options.json))
        return _INTERRUPTED


def _run(options: argparse.Namespace, *, owns_process: bool) -> int:
    try:
        with warnings_reported(options.json):
            refuse_missing(options)
            # Most commands import torch, which takes long, and may not be the one it was built for.
            with _ended_by_ctrl_c(options.json) if owns_process else contextlib.nullcontext():
                module = import_module(f"{__package__}.{options.module}")
            return int(getattr(module, options.command)(options))
    except Exception as error:
        own = type(error).__module__.partition(".")[0] == "tensorizer"
        if not own and not isinstance(error, _EXPECTED) and not options.json:
            # A mistake in the program, not in its input.
            print_error(traceback.format_exc())
        report_error(error, options.json)
        return _FAILED


@contextlib.contextmanager
def _ended_by_ctrl_c(json_wanted: bool) -> Iterator[None]:
    """End the process at once after Ctrl-C: modules may catch the exception while they start."""

    def leave(*_: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{_interrupted(json_wanted)}\n".encode())
        os._exit(_INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _interrupted(json_wanted: bool) -> str:
    """Return the message after Ctrl-C."""
    line = error_line("KeyboardInterrupt", "interrupted", json_wanted)
    return line if json_wanted else "tensorizer: interrupted"
