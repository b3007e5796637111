"""Ctrl-C while the command ``tensorizer`` starts, which is the import of torch most of the time.

The package is imported before its ``main`` can run. In other programs nothing happens here.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any


def _is_command() -> bool:
    name = (getattr(sys, "argv", None) or [""])[0]
    if name != "-m":
        return Path(name).name == "tensorizer"
    # The interpreter is looking for the module that it was told to run.
    given = sys.orig_argv
    return "-m" in given and given[given.index("-m") + 1 :][:1] == ["tensorizer"]


def _leave(*_: Any) -> None:
    os.write(2, b"tensorizer: interrupted\n")
    os._exit(130)


def _replace(old: Any, new: Any) -> None:
    try:
        if signal.getsignal(signal.SIGINT) is old:
            signal.signal(signal.SIGINT, new)
    except ValueError:
        # Not the main thread, to which signals go.
        pass


def done() -> None:
    """Leave Ctrl-C to Python again."""
    _replace(_leave, signal.default_int_handler)


if _is_command():
    _replace(signal.default_int_handler, _leave)
