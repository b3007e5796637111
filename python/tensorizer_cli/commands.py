"""The functions that run the commands.

Modules that need torch are imported when their command is run.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from importlib import import_module

#: The module and the function of each command; the function returns the exit status.
COMMANDS = {
    "ls": ("ls", "run"),
    "info": ("info", "run"),
    "cache": ("cache", "run"),
    "load": ("load", "run"),
    "verify": ("verify", "run"),
    "diff": ("diff", "run"),
    "cp": ("copy", "cp"),
    "encrypt": ("copy", "encrypt"),
    "decrypt": ("copy", "decrypt"),
    "rekey": ("copy", "rekey"),
    "keygen": ("keygen", "run"),
    "completion": ("completion", "run"),
}
#: Errors that files, servers and machines cause; any other is a mistake in the program.
_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    MemoryError,
    ImportError,
    pickle.UnpicklingError,
)


def of(name: str) -> Callable[[argparse.Namespace], int]:
    """Return the function that runs a command."""
    module, function = COMMANDS[name]
    found: Callable[[argparse.Namespace], int] = getattr(
        import_module(f"{__package__}.{module}"), function
    )
    return found


def is_expected(error: Exception) -> bool:
    """Tell whether an error is caused by files, servers or machines."""
    own = type(error).__module__.partition(".")[0] == "tensorizer"
    return own or isinstance(error, _ERRORS)
